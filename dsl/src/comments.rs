//! Comments and blank lines: finding them, giving each to the item it is about, and bringing both
//! spellings to one arrangement, so that what one spelling has no place for (a comment on
//! `components:`, which `.dream` does not write) stands at the same item in both.

use crate::ast::*;
use crate::source::Span;

/// A comment in the text.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    /// Where its marker is.
    pub(crate) at: usize,
    pub(crate) text: String,
}

/// The comments of a `.dream` text.
pub(crate) fn in_dream(text: &str) -> Vec<Found> {
    let bytes = text.as_bytes();
    let mut found = Vec::new();
    let mut index = 0;
    while index < bytes.len() {
        match bytes[index] {
            b'"' => {
                index += 1;
                while index < bytes.len() && !matches!(bytes[index], b'"' | b'\n') {
                    let escape = bytes[index] == b'\\' && bytes.get(index + 1) != Some(&b'\n');
                    index += if escape { 2 } else { 1 };
                }
                index += 1;
            }
            b'/' if bytes.get(index + 1) == Some(&b'/') => {
                let end = text[index..].find('\n').map_or(text.len(), |length| index + length);
                found.push(Found { at: index, text: clean(&text[index + 2..end]) });
                index = end;
            }
            _ => index += 1,
        }
    }
    found
}

/// The comments of a YAML text: `#` at the start of a line or after a blank, outside the given
/// scalars.
pub(crate) fn in_yaml(text: &str, mut scalars: Vec<Span>) -> Vec<Found> {
    scalars.sort_by_key(|span| span.start);
    let mut scalars = scalars.into_iter().peekable();
    let bytes = text.as_bytes();
    let mut found = Vec::new();
    let mut index = 0;
    while index < bytes.len() {
        while scalars.peek().is_some_and(|span| span.end <= index) {
            scalars.next();
        }
        if let Some(span) = scalars.peek()
            && span.contains(index)
        {
            index = span.end;
            continue;
        }
        let begins = index == 0 || bytes[index - 1].is_ascii_whitespace();
        if bytes[index] == b'#' && begins {
            let end = text[index..].find('\n').map_or(text.len(), |length| index + length);
            found.push(Found { at: index, text: clean(&text[index + 1..end]) });
            index = end;
        } else {
            index += 1;
        }
    }
    found
}

/// Where the formulas of definitions stand: their comments are theirs.
pub(crate) fn code(root: &Map) -> Vec<Span> {
    let definitions = root.items.iter().filter(|item| item.node.key.text == "define");
    let definitions = definitions.filter_map(|item| item.node.value.as_map()).flat_map(|map| &map.items);
    let keys = definitions.filter_map(|item| item.node.value.as_map()).flat_map(|map| &map.items);
    keys.filter(|item| item.node.key.text == "code").map(|item| item.node.value.span).collect()
}

/// A comment without what YAML has no place for.
fn clean(text: &str) -> String {
    let plain = |c: &char| {
        !c.is_control() && !matches!(c, '\u{feff}' | '\u{fffe}' | '\u{ffff}' | '\u{2028}' | '\u{2029}')
    };
    let text: String = text.chars().map(|c| if c == '\t' { ' ' } else { c }).filter(plain).collect();
    text.trim().to_string()
}

/// Gives every comment to an item and notes blank lines.
pub(crate) fn attach(root: &mut Map, text: &str, spelling: Spelling, found: Vec<Found>) {
    let place = Place { text, spelling };
    for comment in found {
        place.put(root, &comment);
    }
    place.blanks(root);
    root.broken = true;
    settle(root);
    tidy(root);
}

struct Place<'t> {
    text: &'t str,
    spelling: Spelling,
}

/// Nodes that hold comments: pairs and values.
trait Holder: Sized {
    fn span(&self) -> Span;
    fn value(&mut self) -> &mut Value;
}

impl Holder for Pair {
    fn span(&self) -> Span {
        self.key.span.to(self.value.span)
    }
    fn value(&mut self) -> &mut Value {
        &mut self.value
    }
}

impl Holder for Value {
    fn span(&self) -> Span {
        self.span
    }
    fn value(&mut self) -> &mut Value {
        self
    }
}

impl Place<'_> {
    fn put<T: Holder>(&self, block: &mut Block<T>, comment: &Found) {
        let at = comment.at;
        let before = block.items.iter().take_while(|item| item.node.span().start <= at).count();
        let Some(index) = before.checked_sub(1) else {
            let first = block.items.first().map(|item| item.node.span().start);
            let head = block.span.start < at && self.same_line(block.span.start, at);
            match block.items.first_mut() {
                _ if head && self.delimited(block.span) && block.opening.is_none() => {
                    block.opening = Some(comment.text.clone());
                }
                Some(item) if first.is_some() => item.comments.push(self.comment(comment)),
                _ => block.closing.push(self.comment(comment)),
            }
            return;
        };
        let item = &mut block.items[index];
        let span = item.node.span();
        if span.contains(at) {
            let value = item.node.value();
            match &mut value.kind {
                ValueKind::Map(map) => match at < map.span.start && self.same_line(span.start, at) {
                    true if map.opening.is_none() => map.opening = Some(comment.text.clone()),
                    _ => self.put(map, comment),
                },
                ValueKind::List(list) => match at < list.span.start && self.same_line(span.start, at) {
                    true if list.opening.is_none() => list.opening = Some(comment.text.clone()),
                    _ => self.put(list, comment),
                },
                _ => item.comments.push(self.comment(comment)),
            }
            return;
        }
        if self.belongs_inside(span, at, item.node.value()) {
            match &mut item.node.value().kind {
                ValueKind::Map(map) => self.put(map, comment),
                ValueKind::List(list) => self.put(list, comment),
                _ => {}
            }
        } else if self.same_line(span.end, at) && item.trailing.is_none() {
            item.trailing = Some(comment.text.clone());
        } else if let Some(next) = block.items.get_mut(index + 1) {
            next.comments.push(self.comment(comment));
        } else {
            block.closing.push(self.comment(comment));
        }
    }

    /// Whether a comment after an item is still one of the block that is its value: a block
    /// without delimiters ends with the line of its last item, or in YAML with its indentation.
    fn belongs_inside(&self, span: Span, at: usize, value: &Value) -> bool {
        let inner = match &value.kind {
            ValueKind::Map(map) if map.broken && !map.items.is_empty() => map.span,
            ValueKind::List(list) if list.broken && !list.items.is_empty() => list.span,
            _ => return false,
        };
        if self.delimited(inner) {
            return false;
        }
        let indented = self.spelling == Spelling::Yaml && self.column(inner.start) <= self.column(at);
        self.same_line(span.end, at) || (indented && self.column(span.start) < self.column(inner.start))
    }

    fn comment(&self, comment: &Found) -> Comment {
        Comment { text: comment.text.clone(), blank: self.blank_above(comment.at) }
    }

    fn delimited(&self, span: Span) -> bool {
        self.text.get(span.start..).is_some_and(|text| text.starts_with(['{', '[', '(']))
    }

    fn same_line(&self, from: usize, to: usize) -> bool {
        from <= to && !self.text.get(from..to).unwrap_or("\n").contains('\n')
    }

    fn column(&self, at: usize) -> usize {
        at - self.text[..at].rfind('\n').map_or(0, |newline| newline + 1)
    }

    fn blank_above(&self, at: usize) -> bool {
        let Some(above) = self.text.get(..at).and_then(|text| text.rfind('\n')).map(|end| &self.text[..end])
        else {
            return false;
        };
        let line = above.rfind('\n').map_or(above, |start| &above[start + 1..]);
        line.trim().is_empty()
    }

    fn blanks<T: Holder>(&self, block: &mut Block<T>) {
        let mut end = 0;
        for item in &mut block.items {
            let span = item.node.span();
            item.blank = self.blank_above(span.start) && !self.same_line(end, span.start);
            end = span.end;
            match &mut item.node.value().kind {
                ValueKind::Map(map) => self.blanks(map),
                ValueKind::List(list) => self.blanks(list),
                _ => {}
            }
        }
    }
}

/// The same for every block: no blank line at its start, comments and broken blocks break what
/// holds them, and a comment after a closing delimiter moves inside it.
fn settle<T: Holder>(block: &mut Block<T>) {
    for item in &mut block.items {
        let trailing = &mut item.trailing;
        block.broken |= match &mut item.node.value().kind {
            ValueKind::Map(map) => settle_inner(map, trailing),
            ValueKind::List(list) => settle_inner(list, trailing),
            _ => false,
        };
    }
    block.broken |= block.commented();
    start(block);
}

fn settle_inner<T: Holder>(block: &mut Block<T>, trailing: &mut Option<String>) -> bool {
    settle(block);
    if block.broken
        && let Some(text) = trailing.take()
    {
        block.closing.push(Comment { text, blank: false });
    }
    block.broken
}

/// No blank line stands before the first thing in a block.
fn start<T>(block: &mut Block<T>) {
    if let Some(item) = block.items.first_mut() {
        match item.comments.first_mut() {
            Some(comment) => comment.blank = false,
            None => item.blank = false,
        }
    } else if let Some(comment) = block.closing.first_mut() {
        comment.blank = false;
    }
}

// One arrangement for both spellings --------------------------------------------------------------

fn tidy(root: &mut Map) {
    tidy_group::<Pair>(root, "let");
    tidy_definitions(root);
    tidy_group::<Pair>(root, "define");
    let Some(index) = root.items.iter().position(|item| item.node.key.text == "model") else { return };
    let item = &mut root.items[index];
    let ValueKind::Map(model) = &mut item.node.value.kind else { return };
    tidy_name(model, &mut item.comments);
    if let Some(pair) = model.get_mut("body") {
        as_list(&mut pair.value);
    }
    if let Some(Pair { value: Value { kind: ValueKind::Map(components), .. }, .. }) =
        model.get_mut("components")
    {
        components.items.iter_mut().for_each(tidy_component);
    }
    if let Some(Pair { value: Value { kind: ValueKind::List(body), .. }, .. }) = model.get_mut("body") {
        tidy_layers(body);
    }
    tidy_group::<Pair>(model, "components");
    tidy_group::<Value>(model, "body");
    model.broken = true;
    start(model);
}

/// A definition is its settings and its formulas: what is said about them is said about it, and
/// formulas are without what all are indented by.
fn tidy_definitions(root: &mut Map) {
    let Some(pair) = root.get_mut("define") else { return };
    let ValueKind::Map(definitions) = &mut pair.value.kind else { return };
    for item in &mut definitions.items {
        let ValueKind::Map(map) = &mut item.node.value.kind else { continue };
        map.broken = true;
        map.items.sort_by_key(|item| item.node.key.text == "code");
        gather(map, &mut item.comments);
        item.comments.append(&mut map.closing);
        for key in &mut map.items {
            match (key.node.key.text.as_str(), &mut key.node.value.kind) {
                ("code", ValueKind::Text(code)) => *code = crate::define::read::dedent(&format!("\n{code}")),
                ("settings", ValueKind::Map(settings)) => settings.broken = settings.commented(),
                _ => {}
            }
        }
    }
}

/// `name` comes first and has no comments of its own: `.dream` writes it into the head of the
/// model.
fn tidy_name(model: &mut Map, above: &mut Vec<Comment>) {
    let Some(index) = model.items.iter().position(|item| item.node.key.text == "name") else { return };
    let name = &model.items[index].node.value.kind;
    let text = match name {
        ValueKind::Word(text) | ValueKind::Text(text) => text,
        _ => return,
    };
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte)) {
        return;
    }
    let mut item = model.items.remove(index);
    item.blank = false;
    above.append(&mut item.comments);
    let trailing = item.trailing.take();
    match model.opening {
        None => model.opening = trailing,
        Some(_) => above.extend(trailing.map(|text| Comment { text, blank: false })),
    }
    model.items.insert(0, item);
}

/// `let`, `components` and `body` have no delimiters of their own in `.dream`: what is said about
/// them is said about their first item, and what stands at their end about what follows.
fn tidy_group<T: Holder>(map: &mut Map, key: &str)
where
    for<'a> &'a mut Block<T>: TryFrom<&'a mut ValueKind>,
{
    let Some(index) = map.items.iter().position(|item| item.node.key.text == key) else { return };
    let item = &mut map.items[index];
    let Ok(block) = <&mut Block<T>>::try_from(&mut item.node.value.kind) else { return };
    if block.items.is_empty() {
        return;
    }
    block.broken = true;
    let closing = std::mem::take(&mut block.closing);
    let mut above = std::mem::take(&mut item.comments);
    above.extend(block.opening.take().map(|text| Comment { text, blank: false }));
    // A blank line above the group stays above it, whatever now stands first in it.
    item.blank |= above.first().is_some_and(|comment| comment.blank);
    if let Some(first) = block.items.first_mut() {
        above.append(&mut first.comments);
        // A heading of the file is above `let:`; one of the components or layers is about the first
        // of them.
        if key == "let" { item.comments = above } else { first.comments = above }
    }
    if let (Some(text), Some(last)) = (item.trailing.take(), block.items.last_mut()) {
        match last.trailing {
            None => last.trailing = Some(text),
            Some(_) => last.comments.push(Comment { text, blank: false }),
        }
    }
    start(block);
    match map.items.get_mut(index + 1) {
        Some(next) => {
            next.comments.splice(0..0, closing);
        }
        None => {
            map.closing.splice(0..0, closing);
        }
    }
}

/// A component is one pair inside a map: the map and the pair have no comments of their own.
fn tidy_component(item: &mut Item<Pair>) {
    let ValueKind::Map(wrapper) = &mut item.node.value.kind else { return };
    if wrapper.items.len() != 1 {
        return;
    }
    item.comments.extend(wrapper.opening.take().map(|text| Comment { text, blank: false }));
    let closing = std::mem::take(&mut wrapper.closing);
    let inner = &mut wrapper.items[0];
    inner.blank = false;
    item.comments.append(&mut inner.comments);
    let trailing = [item.trailing.take(), inner.trailing.take()].into_iter().flatten();
    match &mut inner.node.value.kind {
        ValueKind::Map(keys) => {
            let trailing: Vec<String> = trailing.collect();
            if keys.broken || trailing.len() + closing.len() > 1 {
                keys.broken = true;
                keys.closing.extend(trailing.into_iter().map(|text| Comment { text, blank: false }));
                keys.closing.extend(closing);
            } else {
                item.trailing =
                    trailing.into_iter().chain(closing.into_iter().map(|comment| comment.text)).next();
            }
            wrapper.broken = keys.broken;
        }
        _ => item.comments.extend(trailing.map(|text| Comment { text, blank: false }).chain(closing)),
    }
}

/// One composition in the place of a list of layers is a list of one.
fn as_list(value: &mut Value) {
    if let ValueKind::Layer(_) | ValueKind::Map(_) = value.kind {
        let span = value.span;
        let inner = std::mem::replace(&mut value.kind, ValueKind::Null);
        let items = vec![Item::new(Value::new(inner, span))];
        value.kind = ValueKind::List(List { items, span, ..List::default() });
    }
}

fn tidy_layers(list: &mut List) {
    for item in &mut list.items {
        let ValueKind::Map(map) = &mut item.node.kind else { continue };
        if map.items.len() == 1
            && map.items[0].node.key.text == "layer"
            && let ValueKind::Layer(layer) = &map.items[0].node.value.kind
        {
            let (layer, span) = (layer.clone(), map.items[0].node.value.span);
            gather(map, &mut item.comments);
            item.node = Value::new(ValueKind::Layer(layer), span);
            continue;
        }
        if map.get("recur").is_none() && map.get("repeat").is_none() {
            continue;
        }
        if let Some(pair) = map.get_mut("layers") {
            as_list(&mut pair.value);
        }
        map.broken = true;
        list.broken = true;
        let rank = |item: &Item<Pair>| match item.node.key.text.as_str() {
            "recur" | "repeat" => 0,
            "layers" => 2,
            _ => 1,
        };
        map.items.sort_by_key(rank);
        let layers = map.items.pop_if(|item| item.node.key.text == "layers");
        gather(map, &mut item.comments);
        if let Some(mut layers) = layers {
            layers.blank = false;
            item.comments.append(&mut layers.comments);
            if let ValueKind::List(inner) = &mut layers.node.value.kind {
                tidy_layers(inner);
                let mut closing = std::mem::take(&mut map.closing);
                closing.extend(item.trailing.take().map(|text| Comment { text, blank: false }));
                if !closing.is_empty() || (inner.broken && layers.trailing.is_some()) {
                    inner.broken = true;
                    let trailing = layers.trailing.take().map(|text| Comment { text, blank: false });
                    inner.closing.extend(trailing.into_iter().chain(closing));
                }
                start(inner);
            }
            map.items.push(layers);
        }
    }
    start(list);
}

/// Moves the comments of the pairs of a map above the item that holds it.
fn gather(map: &mut Map, above: &mut Vec<Comment>) {
    above.extend(map.opening.take().map(|text| Comment { text, blank: false }));
    for inner in &mut map.items {
        inner.blank = false;
        above.append(&mut inner.comments);
        above.extend(inner.trailing.take().map(|text| Comment { text, blank: false }));
    }
}

impl<'a> TryFrom<&'a mut ValueKind> for &'a mut Map {
    type Error = ();
    fn try_from(kind: &'a mut ValueKind) -> Result<Self, ()> {
        if let ValueKind::Map(map) = kind { Ok(map) } else { Err(()) }
    }
}

impl<'a> TryFrom<&'a mut ValueKind> for &'a mut List {
    type Error = ();
    fn try_from(kind: &'a mut ValueKind) -> Result<Self, ()> {
        if let ValueKind::List(list) = kind { Ok(list) } else { Err(()) }
    }
}

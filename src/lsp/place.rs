//! The keys that may stand at a place of a text that is being typed.
//!
//! *In*: the text before the place, which rarely is a file without errors. *Out*: [`Place`], by
//! braces in `.dream` and by indentation and braces in YAML. *Promise*: the table of keys decides;
//! no key of the language is named here, but for the words that open layers and groups.

use dreamc_dsl::keys::{self, Key, Section, Type};
use dreamc_dsl::{FileKind, Spelling};

/// Keys, values or layers that may stand at a place.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// The type of the group that the place is in.
    pub group: Type,
    /// Its key, where a value stands here.
    pub key: Option<&'static Key>,
    /// Whether a composition stands here.
    pub layers: bool,
}

static SPEC: Type = Type::Section(&keys::SPEC);
static SUITE: Type = Type::Section(&keys::SUITE);

impl Place {
    fn new(group: Type, layers: bool) -> Place {
        Place { group, key: None, layers }
    }

    /// The keys of the group.
    pub fn section(&self) -> Option<&'static Section> {
        self.group.section()
    }

    /// The key of that name in this group.
    pub fn named(&self, name: &str) -> Option<&'static Key> {
        match (self.group, self.section()) {
            (Type::Layers, _) => keys::ITEMS.iter().find_map(|item| item.key(name)),
            (_, section) => section?.key(name),
        }
    }
}

/// The place at the end of a text whose last `partial` bytes are a word that has begun.
pub fn at(text: &str, partial: usize, spelling: Spelling, kind: FileKind) -> Place {
    let root = match kind {
        FileKind::Spec => SPEC,
        FileKind::Suite => SUITE,
    };
    let before = &text[..text.len() - partial];
    match spelling {
        Spelling::Dream => dream(before, root),
        Spelling::Yaml => yaml(before, root),
    }
}

/// The type under a key, also where the key is in an element of a list.
fn under(group: Type, key: &str) -> Option<Type> {
    group.child(key).or_else(|| group.element()?.child(key))
}

/// A word of `.dream`, or a sign.
#[derive(Clone, Debug, PartialEq)]
enum Token {
    Word(String),
    Sign(char),
    End,
}

impl Token {
    fn is(&self, word: &str) -> bool {
        matches!(self, Token::Word(own) if own == word)
    }

    fn word(&self) -> Option<&str> {
        if let Token::Word(word) = self { Some(word) } else { None }
    }
}

/// A group that is open around a place of `.dream`.
struct Open {
    group: Option<Type>,
    layers: bool,
    /// Tokens since it opened, or since a group in it closed.
    tokens: Vec<Token>,
}

fn dream(text: &str, root: Type) -> Place {
    let mut open = vec![Open { group: Some(root), layers: false, tokens: vec![] }];
    for token in tokens(text) {
        let Some(top) = open.last_mut() else { break };
        match token {
            Token::Sign('{') => {
                let (group, layers) = opened(top);
                open.push(Open { group, layers, tokens: vec![] });
            }
            Token::Sign('(') => {
                let skips = top.tokens.last().is_some_and(|t| t.is("skip"));
                let group = if skips { Some(Type::Section(&keys::SKIP)) } else { top.group };
                let layers = top.layers && !skips;
                open.push(Open { group, layers, tokens: vec![] });
            }
            Token::Sign('[') => {
                let key = top.tokens.last().and_then(Token::word);
                let kind = key.and_then(|key| top.group?.child(key));
                let group = kind.and_then(|kind| kind.element().copied()).or(top.group);
                let layers = top.layers;
                open.push(Open { group, layers, tokens: vec![] });
            }
            Token::Sign(sign @ ('}' | ')' | ']')) => {
                if open.len() > 1 {
                    open.pop();
                }
                if let Some(top) = open.last_mut() {
                    if sign == '}' {
                        top.tokens.clear();
                    }
                    top.tokens.push(Token::Sign(sign));
                }
            }
            token => top.tokens.push(token),
        }
    }
    let Some(top) = open.last() else { return Place::new(root, false) };
    let mut place = Place::new(top.group.unwrap_or(Type::Any), top.layers);
    let last = top.tokens.iter().rev().find(|token| **token != Token::End);
    match last {
        Some(Token::Sign('=')) => place.group = Type::Component,
        Some(Token::Word(word)) if top.group.is_some_and(|group| group.section().is_some()) => {
            // A flag has no value, and a key ends with its line.
            let key = place.named(word).filter(|key| !matches!(key.kind, Type::Bool));
            place.key = key.filter(|_| top.tokens.last() != Some(&Token::End));
        }
        _ => {}
    }
    place
}

/// The group that a brace opens after these tokens.
fn opened(top: &Open) -> (Option<Type>, bool) {
    let line: Vec<&Token> = top.tokens.iter().rev().take_while(|token| **token != Token::End).collect();
    let stream = |token: &&&Token| ["recur", "repeat", "layer", "body"].iter().any(|word| token.is(word));
    let closed = line.first() == Some(&&Token::Sign(')'));
    if top.layers || closed || line.iter().any(|token| stream(&token)) {
        return (Some(Type::Layers), true);
    }
    let word = |back: usize| line.get(back).and_then(|token| token.word());
    match (line.get(1), word(0), word(1)) {
        (Some(Token::Sign('=')), Some(kind), _) => (Type::Component.child(kind), false),
        (_, _, Some("model")) => (Some(Type::Section(&keys::MODEL)), false),
        (_, Some(key), _) => (top.group.and_then(|group| under(group, key)), false),
        _ => (None, false),
    }
}

fn tokens(text: &str) -> Vec<Token> {
    let mut all = vec![];
    let mut rest = text;
    while let Some(letter) = rest.chars().next() {
        let part = |c: char| c.is_alphanumeric() || "_.-%".contains(c);
        let length = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if letter == '"' {
            let end = rest[1..].find(['"', '\n']).map_or(rest.len(), |at| at + 2);
            all.push(Token::Sign('"'));
            end
        } else if letter == '\n' {
            all.push(Token::End);
            1
        } else if part(letter) {
            let end = rest.find(|c| !part(c)).unwrap_or(rest.len());
            all.push(Token::Word(rest[..end].into()));
            end
        } else {
            if !letter.is_whitespace() {
                all.push(Token::Sign(letter));
            }
            letter.len_utf8()
        };
        rest = &rest[length..];
    }
    all
}

/// A line of YAML: where its key stands, and the key with the text after its colon.
fn key_of(line: &str) -> (usize, Option<(&str, &str)>) {
    let mut rest = line.trim_start_matches([' ', '\t']);
    while let Some(item) = rest.strip_prefix("- ") {
        rest = item.trim_start_matches(' ');
    }
    let at = line.len() - rest.len();
    let name = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    let end = rest.find(|c| !name(c)).unwrap_or(rest.len());
    let pair = rest[end..].strip_prefix(':').filter(|v| end > 0 && (v.is_empty() || v.starts_with(' ')));
    (at, pair.map(|value| (&rest[..end], value)))
}

/// Keys of flow groups that are open at the end of a value, and the key that waits for its value.
fn flow(value: &str) -> (Vec<String>, Option<String>) {
    let (mut open, mut key) = (vec![], None);
    let all = tokens(value);
    for (i, token) in all.iter().enumerate() {
        match token {
            Token::Word(word) if all.get(i + 1) == Some(&Token::Sign(':')) => key = Some(word.clone()),
            Token::Sign('{' | '[') => open.push(key.take()),
            Token::Sign('}' | ']') => {
                open.pop();
                key = None;
            }
            Token::Sign(',') => key = None,
            _ => {}
        }
    }
    (open.into_iter().flatten().collect(), key)
}

fn yaml(text: &str, root: Type) -> Place {
    let mut lines: Vec<&str> = text.split('\n').map(|line| line.trim_end_matches('\r')).collect();
    let current = lines.pop().unwrap_or("");
    let (mut limit, pair) = key_of(current);
    let (mut path, mut key) = (vec![], None);
    if let Some((name, value)) = pair {
        let (open, waits) = flow(value);
        path = open;
        match (value.contains('{'), waits) {
            (true, waits) => {
                path.insert(0, name.to_string());
                key = waits;
            }
            (false, _) => key = Some(name.to_string()),
        }
    }
    for line in lines.iter().rev() {
        let text = line.trim();
        if text.is_empty() || text.starts_with('#') {
            continue;
        }
        let (at, pair) = key_of(line);
        if at >= limit {
            continue;
        }
        // A list may be as far to the left as its key.
        limit = at;
        if let Some((name, value)) = pair {
            path.splice(0..0, [name.to_string()].into_iter().chain(flow(value).0));
        }
        if limit == 0 {
            break;
        }
    }
    let mut group = Some(root);
    for name in &path {
        group = group.and_then(|group| under(group, name));
    }
    let group = match group {
        Some(group) => group.element().copied().filter(|_| key.is_none()).unwrap_or(group),
        None => Type::Any,
    };
    let mut place = Place::new(group, matches!(group, Type::Layers | Type::Composition));
    let quoted = current.rsplit_once("skip(").is_some_and(|(_, rest)| !rest.contains(')'));
    if place.layers && quoted {
        return Place::new(Type::Section(&keys::SKIP), false);
    }
    if let Some(name) = key {
        place.key = place.named(&name);
        place.layers = place.key.is_some_and(|key| matches!(key.kind, Type::Layers | Type::Composition));
    }
    place
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of a text with `^` at the place: the group, the key, and whether layers stand there.
    fn place(text: &str, spelling: Spelling) -> (&'static str, &'static str, bool) {
        let text = text.split('^').next().unwrap();
        let place = at(text, 0, spelling, FileKind::Spec);
        (place.section().map_or("", |s| s.name), place.key.map_or("", |k| k.name), place.layers)
    }

    #[test]
    fn braces_of_dream_say_where_a_place_is() {
        let place = |text| place(text, Spelling::Dream);
        assert_eq!(place("^"), ("spec", "", false));
        assert_eq!(place("model m {\n  vocab 256\n  ^"), ("model", "", false));
        assert_eq!(place("model m {\n  sa = sequence { heads 4  ^"), ("sequence", "", false));
        assert_eq!(place("model m {\n  ea = experts { router ^"), ("experts", "router", false));
        assert_eq!(place("model m { sa = sequence { heads 4 } // x }\n ^"), ("model", "", false));
        assert!(place("model m {\n recur 4 { ^").2 && place("model m {\n layer { (a | ^").2);
        assert_eq!(place("model m {\n layer { skip(capacity 0.5, ^"), ("skip", "", false));
        assert!(place("model m {\n layer { skip(capacity 0.5) { ^").2);
        assert_eq!(place("train {\n  steps 4\n  evaluate { ^"), ("evaluate", "", false));
        assert_eq!(place("train {\n  schedule ^"), ("train", "schedule", false));
        assert_eq!(place("train {\n  schedule cosine ^"), ("train", "", false));
        assert_eq!(place("data { text \"a { b\"  ^"), ("data", "", false));
        // Braces that close nothing are read over.
        assert_eq!(place("} } ) train { ^"), ("train", "", false));
    }

    #[test]
    fn indentation_and_braces_of_yaml_say_where_a_place_is() {
        let place = |text| place(text, Spelling::Yaml);
        assert_eq!(place("^"), ("spec", "", false));
        assert_eq!(place("model:\n  vocab: 256\n  ^"), ("model", "", false));
        assert_eq!(place("model:\n  components:\n    sa: {sequence: {heads: 4, ^"), ("sequence", "", false));
        assert_eq!(
            place("model:\n  components:\n    sa:\n      sequence:\n        ^"),
            ("sequence", "", false)
        );
        assert_eq!(
            place("model:\n  components:\n    ea: {experts: {count: 4,\n          router: ^"),
            ("experts", "router", false)
        );
        assert!(place("model:\n  body:\n    - ^").2);
        assert!(place("model:\n  body:\n    - recur: 4\n      layers: [\"(a | ^").2);
        assert_eq!(place("model:\n  body:\n    - \"skip(capacity 0.5, ^"), ("skip", "", false));
        assert_eq!(place("train:\n  schedule: ^"), ("train", "schedule", false));
        assert_eq!(place("train:\n  evaluate: {every: 4, ^"), ("evaluate", "", false));
        assert_eq!(place("train:\n  groups:\n    - ^"), ("group", "", false));
        assert_eq!(place("train:\n  steps: 4\n\n# a: b\n  ^"), ("train", "", false));
    }
}

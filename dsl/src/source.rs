//! Where things stand in a source text.
//!
//! A [`Span`] is a range of bytes in one address space: first the file's text, then, each after a
//! gap of one byte, the files that it includes, and the `--set` arguments that changed it. So a
//! diagnostic about an override points into the argument with no other machinery than a span.

use indexmap::IndexMap;

use crate::ast::Spelling;

/// A range of bytes of a source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Span {
    /// First byte.
    pub start: usize,
    /// One past the last byte.
    pub end: usize,
}

impl Span {
    /// The bytes from `start` up to `end`.
    pub fn new(start: usize, end: usize) -> Span {
        Span { start, end: end.max(start) }
    }

    /// The smallest span that holds both.
    pub fn to(self, other: Span) -> Span {
        Span::new(self.start.min(other.start), self.end.max(other.end))
    }

    /// Whether the byte at `position` is inside.
    pub fn contains(self, position: usize) -> bool {
        self.start <= position && position < self.end
    }
}

/// A text and the tokens of the specification's fields in it, by path: `model.components.ea.count`,
/// `model.body[0].recur`, `train.steps`, …
///
/// Paths follow the fields of [`crate::Spec`]; the kind of a component and the levels of a router
/// are left out (`model.components.ea.router.query`). A field that was left to its default has the
/// token of what holds it.
#[derive(Clone, Debug, Default)]
pub struct SourceMap {
    /// The file's name as the user gave it.
    pub name: String,
    /// Its text.
    pub text: String,
    /// How it is spelled; hints are spelled as the file is.
    pub spelling: Spelling,
    /// The files that it includes, each with its name.
    pub included: Vec<(String, String)>,
    /// The `--set` arguments, in order.
    pub arguments: Vec<String>,
    /// Path to the span of the field's value.
    pub fields: IndexMap<String, Span>,
}

/// One line of a source, for a reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place<'a> {
    /// The file's name, or `--set` for an argument.
    pub name: &'a str,
    /// Line, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
    /// The whole line.
    pub text: &'a str,
    /// The part of the span in this line, in bytes of `text`.
    pub mark: Span,
}

impl SourceMap {
    /// A text without fields.
    pub fn new(name: impl Into<String>, text: impl Into<String>) -> SourceMap {
        SourceMap { name: name.into(), text: text.into(), ..SourceMap::default() }
    }

    /// A message as a person writes this file: what stands in backquotes as YAML has it (`rope:
    /// none`) is put as `.dream` has it (`rope none`) where the file is one. Of two forms
    /// (`` `A` (YAML: `B`) ``) the file's is left.
    pub fn spelled(&self, message: &str) -> String {
        let parts: Vec<&str> = message.split('`').collect();
        let mut out = String::with_capacity(message.len());
        let mut index = 0;
        // Parts of odd numbers are code.
        while index < parts.len() {
            let (text, code) = (parts[index], index % 2 == 1);
            let other = parts.get(index + 2).filter(|_| code && parts.get(index + 1) == Some(&" (YAML: "));
            match (other, self.spelling) {
                (Some(yaml), Spelling::Yaml) => out += &format!("`{yaml}`"),
                (Some(_), Spelling::Dream) => out += &format!("`{text}`"),
                (None, Spelling::Dream) if code => out += &format!("`{}`", in_dream(text)),
                (None, _) if code => out += &format!("`{text}`"),
                (None, _) => out += text,
            }
            if other.is_some() {
                // The text after the second form goes on after its parenthesis.
                out += parts.get(index + 3).map_or("", |rest| rest.strip_prefix(')').unwrap_or(rest));
                index += 4;
            } else {
                index += 1;
            }
        }
        out
    }

    /// The span of the field, or of the closest enclosing field that has one.
    pub fn locate(&self, path: &str) -> Option<Span> {
        let mut path = path;
        loop {
            if let Some(span) = self.fields.get(path) {
                return Some(*span);
            }
            path = &path[..path.rfind(['.', '['])?];
        }
    }

    /// Where a text stands that some field holds, such as a path.
    pub fn find(&self, text: &str) -> Option<Span> {
        let holds = |span: &&Span| self.slice(**span).trim_matches(['"', '\'']) == text;
        self.fields.values().filter(holds).min_by_key(|span| span.start).copied()
    }

    /// Appends a file, before any argument; the position of its first byte.
    pub(crate) fn add_file(&mut self, name: &str, text: &str) -> usize {
        let base = self.end() + 1;
        self.included.push((name.to_string(), text.to_string()));
        base
    }

    /// Appends an argument; the position of its first byte.
    pub(crate) fn add_argument(&mut self, argument: &str) -> usize {
        let base = self.end() + 1;
        self.arguments.push(argument.to_string());
        base
    }

    fn end(&self) -> usize {
        let included = self.included.iter().map(|(_, text)| text.len() + 1).sum::<usize>();
        self.text.len() + included + self.arguments.iter().map(|argument| argument.len() + 1).sum::<usize>()
    }

    /// The text of a span; empty where the span does not fit the source.
    pub fn slice(&self, span: Span) -> &str {
        let (_, text, base) = self.piece(span.start);
        text.get(span.start - base..span.end.saturating_sub(base)).unwrap_or("")
    }

    /// The file or argument that holds the byte at `position`, and where it begins.
    fn piece(&self, position: usize) -> (&str, &str, usize) {
        let mut base = self.text.len() + 1;
        if position < base {
            return (&self.name, &self.text, 0);
        }
        for (name, text) in &self.included {
            if position <= base + text.len() {
                return (name, text, base);
            }
            base += text.len() + 1;
        }
        for argument in &self.arguments {
            if position <= base + argument.len() {
                return ("--set", argument, base);
            }
            base += argument.len() + 1;
        }
        (&self.name, &self.text, 0)
    }

    /// The line in which a span begins. A span that fits no line gives the end of the text.
    pub fn place(&self, span: Span) -> Place<'_> {
        let (name, text, base) = self.piece(span.start);
        let mut start = (span.start - base).min(text.len());
        while !text.is_char_boundary(start) {
            start -= 1;
        }
        let line_start = text[..start].rfind('\n').map_or(0, |newline| newline + 1);
        let line_end = text[start..].find('\n').map_or(text.len(), |newline| start + newline);
        let mut end = span.end.saturating_sub(base).clamp(start, line_end);
        while !text.is_char_boundary(end) {
            end += 1;
        }
        Place {
            name,
            line: text[..start].bytes().filter(|byte| *byte == b'\n').count() + 1,
            column: text[line_start..start].chars().count() + 1,
            text: text[line_start..line_end].trim_end_matches('\r'),
            mark: Span::new(start - line_start, end - line_start),
        }
    }
}

/// Pairs of YAML as `.dream` has them: `equal: {flops: 1%, order: true}` is
/// `equal { flops 1%  order true }`. Other code stays as it is.
fn in_dream(code: &str) -> String {
    let word = |text: &str| {
        !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.'))
    };
    let pair = |text: &str| text.split_once(": ").is_some_and(|(key, _)| word(key));
    let inside = code.strip_prefix('{').and_then(|code| code.strip_suffix('}'));
    if !pair(inside.unwrap_or(code)) {
        return code.to_string();
    }
    let mut out = String::with_capacity(code.len() + 8);
    // Commas part the pairs of a group, and stay in lists.
    let mut around = Vec::new();
    let mut letters = code.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            '{' => {
                around.push('{');
                out.push_str("{ ");
            }
            '}' => {
                around.pop();
                out.push_str(" }");
            }
            '[' | '(' => {
                around.push(letter);
                out.push(letter);
            }
            ']' | ')' => {
                around.pop();
                out.push(letter);
            }
            ',' if around.last() == Some(&'{') => out.push(' '),
            ':' if letters.peek() == Some(&' ') => {}
            letter => out.push(letter),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_are_in_the_spelling_of_the_file() {
        let spelled = |spelling, text| SourceMap { spelling, ..SourceMap::default() }.spelled(text);
        for (text, yaml, dream) in [
            ("write `rope: none`", "write `rope: none`", "write `rope none`"),
            (
                "write `sweep: {train.clip: [1, 2], eps: 3}`, or not",
                "write `sweep: {train.clip: [1, 2], eps: 3}`, or not",
                "write `sweep { train.clip [1, 2]  eps 3 }`, or not",
            ),
            ("`heads` divides: 1 or `2`", "`heads` divides: 1 or `2`", "`heads` divides: 1 or `2`"),
            ("write `lanes 4` (YAML: `lanes: 4`) there", "write `lanes: 4` there", "write `lanes 4` there"),
            (
                "`skip(capacity 0.5) { a > b }`",
                "`skip(capacity 0.5) { a > b }`",
                "`skip(capacity 0.5) { a > b }`",
            ),
        ] {
            assert_eq!(spelled(Spelling::Yaml, text), yaml);
            assert_eq!(spelled(Spelling::Dream, text), dream);
        }
    }
}

//! From the tree back to text, in either spelling.
//!
//! The author chooses what stands on one line and what is broken into several; all else is fixed.
//! The result depends on the tree alone, so formatting twice changes nothing, and a file that went
//! through the other spelling comes back as formatting would have left it.

mod dream;
mod yaml;

use crate::ast::*;

/// The text of a tree that has no slips of syntax.
pub(crate) fn print(root: &Map, spelling: Spelling) -> String {
    match spelling {
        Spelling::Yaml => yaml::print(root),
        Spelling::Dream => dream::print(root),
    }
}

/// An arithmetic expression; both spellings write it alike.
pub(crate) fn arith(arith: &Arith) -> String {
    match &arith.kind {
        ArithKind::Literal(text) | ArithKind::Name(text) => text.clone(),
        ArithKind::Negate(inner) => format!("-{}", self::arith(inner)),
        ArithKind::Binary(operator, left, right) => {
            format!("{} {} {}", self::arith(left), operator.sign(), self::arith(right))
        }
        ArithKind::Group(inner) => format!("({})", self::arith(inner)),
        ArithKind::Invalid => "0".into(),
    }
}

/// A composition expression; both spellings write it alike.
pub(crate) fn layer(layer: &Layer) -> String {
    let join = |terms: &[Layer], sign: &str| terms.iter().map(self::layer).collect::<Vec<_>>().join(sign);
    match &layer.kind {
        LayerKind::Component(name) => name.clone(),
        LayerKind::Sequential(terms) => join(terms, " > "),
        LayerKind::Parallel(terms) => join(terms, " | "),
        LayerKind::Group(inner) => format!("({})", self::layer(inner)),
        LayerKind::Skip(arguments, inner) => {
            let arguments: Vec<String> =
                arguments.items.iter().map(|item| dream::argument(&item.node)).collect();
            format!("skip({}) {{ {} }}", arguments.join(", "), self::layer(inner))
        }
        LayerKind::Statement(words) => {
            words.iter().map(|word| word.text.as_str()).collect::<Vec<_>>().join(" ")
        }
        LayerKind::Invalid => "invalid".into(),
    }
}

/// A text in quotes; letters that are `hidden` by their numbers, which YAML alone reads.
fn quote(text: &str, hidden: fn(char) -> bool) -> String {
    let mut quoted = String::from("\"");
    for letter in text.chars() {
        match letter {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            '\n' => quoted.push_str("\\n"),
            '\t' => quoted.push_str("\\t"),
            '\r' => quoted.push_str("\\r"),
            letter if hidden(letter) => quoted.push_str(&format!("\\u{:04x}", u32::from(letter))),
            letter => quoted.push(letter),
        }
    }
    quoted.push('"');
    quoted
}

/// Lines at an indentation.
#[derive(Default)]
struct Lines {
    text: String,
    indent: usize,
}

impl Lines {
    /// Begins a line.
    fn begin(&mut self) {
        if !self.text.is_empty() && !self.text.ends_with('\n') {
            self.text.push('\n');
        }
        self.text.extend(std::iter::repeat_n(' ', 2 * self.indent));
    }

    /// Lines of a text, each at the indentation; empty ones stay empty.
    fn lines_of(&mut self, text: &str) {
        for line in text.lines() {
            match line.is_empty() {
                true => {
                    if !self.text.ends_with('\n') {
                        self.text.push('\n');
                    }
                    self.text.push('\n');
                }
                false => {
                    self.begin();
                    self.push(line);
                }
            }
        }
    }

    fn push(&mut self, text: &str) {
        self.text.push_str(text);
    }

    fn blank(&mut self) {
        if !self.text.is_empty() {
            if !self.text.ends_with('\n') {
                self.text.push('\n');
            }
            self.text.push('\n');
        }
    }

    fn comments(&mut self, comments: &[Comment], marker: &str) {
        for comment in comments {
            if comment.blank {
                self.blank();
            }
            self.begin();
            self.comment(&comment.text, marker);
        }
    }

    /// A comment at the end of the line.
    fn trailing(&mut self, comment: Option<&String>, marker: &str) {
        if let Some(text) = comment {
            self.text.push_str("  ");
            self.comment(text, marker);
        }
    }

    fn comment(&mut self, text: &str, marker: &str) {
        self.text.push_str(marker);
        if !text.is_empty() {
            self.text.push(' ');
            self.text.push_str(text);
        }
    }

    /// Blank line and comments before an item.
    fn head<T>(&mut self, item: &Item<T>, marker: &str) {
        self.comments(&item.comments, marker);
        if item.blank {
            self.blank();
        }
    }

    fn finish(mut self) -> String {
        if !self.text.is_empty() && !self.text.ends_with('\n') {
            self.text.push('\n');
        }
        self.text
    }
}

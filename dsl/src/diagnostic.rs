//! Diagnostics of a text: one type for errors and warnings of every stage.
//!
//! A diagnostic has a stable code, one phrase, the token it is about, and help that says what would
//! be right. Later stages make theirs with [`Diagnostic::error`] and
//! [`Diagnostic::at`], which finds the token of a field of the checked spec.

use std::fmt::{self, Write as _};

use serde::Serialize;
use serde_json::json;

use crate::source::{SourceMap, Span};

/// Whether a diagnostic stops the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// It does.
    Error,
    /// It does not.
    Warning,
}

/// One error or warning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    /// Stable name of the kind, in kebab case.
    pub code: &'static str,
    /// Whether it stops the work.
    pub severity: Severity,
    /// The mistake, in one phrase.
    pub message: String,
    /// The token it is about.
    pub span: Option<Span>,
    /// Other tokens that have to do with it, and what.
    pub related: Vec<(Span, String)>,
    /// The way to mend it.
    pub help: Option<String>,
}

impl Diagnostic {
    /// An error.
    pub fn error(code: &'static str, message: impl Into<String>) -> Diagnostic {
        let message = message.into();
        Diagnostic { code, severity: Severity::Error, message, span: None, related: Vec::new(), help: None }
    }

    /// A warning.
    pub fn warning(code: &'static str, message: impl Into<String>) -> Diagnostic {
        Diagnostic { severity: Severity::Warning, ..Diagnostic::error(code, message) }
    }

    /// About the token at `span`.
    pub fn on(mut self, span: Span) -> Diagnostic {
        self.span = Some(span);
        self
    }

    /// About the field at `path` of a checked spec, such as `model.components.ea.count`.
    pub fn at(mut self, sources: &SourceMap, path: &str) -> Diagnostic {
        self.span = sources.locate(path);
        self
    }

    /// With what would be right.
    pub fn help(mut self, help: impl Into<String>) -> Diagnostic {
        self.help = Some(help.into());
        self
    }

    /// With another token that has to do with it.
    pub fn related(mut self, span: Span, note: impl Into<String>) -> Diagnostic {
        self.related.push((span, note.into()));
        self
    }

    /// As text for a person: file, line, column, the line underlined, help.
    pub fn render(&self, source: &SourceMap, color: bool) -> String {
        let paint = |style: &str, text: &str| match color {
            true => format!("\x1b[{style}m{text}\x1b[0m"),
            false => text.to_string(),
        };
        let (word, tint) = match self.severity {
            Severity::Error => ("error", "1;31"),
            Severity::Warning => ("warning", "1;33"),
        };
        let message = source.spelled(&self.message);
        let mut out =
            format!("{}: {}\n", paint(tint, &format!("{word}[{}]", self.code)), paint("1", &message));
        let related = self.related.iter().map(|(span, note)| (*span, note.as_str()));
        let places = self.span.map(|span| (span, "")).into_iter().chain(related);
        let places: Vec<_> = places.map(|(span, note)| (source.place(span), note)).collect();
        let width = places.iter().map(|(place, _)| place.line.to_string().len()).max().unwrap_or(1);
        let blue = "1;34";
        for (index, (place, note)) in places.iter().enumerate() {
            let pad = " ".repeat(width);
            if index == 0 || place.name != places[0].0.name {
                let arrow = paint(blue, "-->");
                let _ = writeln!(out, "{pad}{arrow} {}:{}:{}", place.name, place.line, place.column);
            } else {
                let _ = writeln!(out, "{pad} {}", paint(blue, "..."));
            }
            let (text, offset, length) = window(place.text, place.mark);
            let bar = paint(blue, "|");
            let number = paint(blue, &format!("{:>width$}", place.line));
            let mark = if index == 0 { "^" } else { "-" }.repeat(length);
            let mark = paint(if index == 0 { tint } else { blue }, &mark);
            let note = if note.is_empty() { String::new() } else { format!(" {note}") };
            let _ = writeln!(out, "{number} {bar} {text}\n{pad} {bar} {}{mark}{note}", " ".repeat(offset));
        }
        if let Some(help) = self.help.as_deref().map(|help| source.spelled(help)) {
            let pad = " ".repeat(if places.is_empty() { 0 } else { width });
            let _ = writeln!(out, "{pad} {} {}: {help}", paint(blue, "="), paint("1", "help"));
        }
        out
    }

    /// As JSON for a program.
    pub fn to_json(&self, source: &SourceMap) -> serde_json::Value {
        let place = |span: Span| {
            let place = source.place(span);
            json!({"file": place.name, "line": place.line, "column": place.column,
                   "start": span.start, "end": span.end})
        };
        json!({
            "code": self.code,
            "severity": self.severity,
            "message": source.spelled(&self.message),
            "at": self.span.map(place),
            "related": self.related.iter()
                .map(|(span, note)| json!({"at": place(*span), "message": note})).collect::<Vec<_>>(),
            "help": self.help.as_deref().map(|help| source.spelled(help)),
        })
    }
}

/// The part of a line a terminal can show around the mark, the mark's offset in it and its length,
/// in columns. Tabs become spaces and control characters a dot, so that the marks stand under what
/// they mean.
fn window(line: &str, mark: Span) -> (String, usize, usize) {
    const WIDTH: usize = 140;
    let plain = |c: char| match c {
        '\t' => ' ',
        c if c.is_control() => '·',
        c => c,
    };
    // No more of a long line than can be shown.
    let clean = |text: &str| -> Vec<char> { text.chars().take(WIDTH).map(plain).collect() };
    let columns = |letters: &[char]| letters.iter().map(|letter| columns(*letter)).sum::<usize>();
    let end = mark.end.min(line.len());
    let mut before: Vec<char> =
        line.get(..mark.start).unwrap_or(line).chars().rev().take(WIDTH).map(plain).collect();
    before.reverse();
    let mut inside = clean(line.get(mark.start..end).unwrap_or(""));
    let mut after = clean(line.get(end..).unwrap_or(""));
    inside.truncate(WIDTH);
    let used = before.len() + inside.len() + after.len();
    if used > WIDTH {
        let left = (WIDTH - inside.len()) / 2;
        let left = left.max((WIDTH - inside.len()).saturating_sub(after.len()));
        before.drain(..before.len().saturating_sub(left));
        after.truncate(WIDTH - inside.len() - before.len());
    }
    let (offset, length) = (columns(&before), columns(&inside).max(1));
    (before.into_iter().chain(inside).chain(after).collect(), offset, length)
}

/// The columns a character takes in a terminal: two for East Asian wide ones and pictures.
fn columns(letter: char) -> usize {
    let wide = matches!(u32::from(letter),
        0x1100..=0x115f | 0x2e80..=0xa4cf | 0xac00..=0xd7a3 | 0xf900..=0xfaff | 0xfe30..=0xfe6f
        | 0xff00..=0xff60 | 0xffe0..=0xffe6 | 0x1f300..=0x1faff | 0x20000..=0x3fffd);
    if wide { 2 } else { 1 }
}

/// The limit of diagnostics that are shown: more are of no use, and each shows a line.
pub const SHOWN: usize = 200;

/// Diagnostics of one source: at least one error where this is the `Err` of a result.
#[derive(Clone, Debug)]
pub struct Diagnostics {
    /// The source the spans refer to.
    pub source: Box<SourceMap>,
    /// Errors and warnings in the order of their tokens.
    pub list: Vec<Diagnostic>,
}

impl Diagnostics {
    /// Diagnostics of a source, put in the order of their tokens.
    pub fn new(source: SourceMap, mut list: Vec<Diagnostic>) -> Diagnostics {
        list.sort_by_key(|diagnostic| diagnostic.span.map(|span| span.start));
        Diagnostics { source: Box::new(source), list }
    }

    /// Whether one of them is an error.
    pub fn has_errors(&self) -> bool {
        self.list.iter().any(|diagnostic| diagnostic.severity == Severity::Error)
    }

    /// The first [`SHOWN`] as text for a person, with a last line that counts all.
    pub fn render(&self, color: bool) -> String {
        let mut out = String::new();
        for diagnostic in self.list.iter().take(SHOWN) {
            out.push_str(&diagnostic.render(&self.source, color));
            out.push('\n');
        }
        let count = |severity| self.list.iter().filter(|diagnostic| diagnostic.severity == severity).count();
        let plural =
            |count: usize, word: &str| format!("{count} {word}{}", if count == 1 { "" } else { "s" });
        let counts = [(count(Severity::Error), "error"), (count(Severity::Warning), "warning")];
        let counts: Vec<_> = counts.into_iter().filter(|(n, _)| *n > 0).map(|(n, w)| plural(n, w)).collect();
        let shown =
            if self.list.len() > SHOWN { format!("; the first {SHOWN} are shown") } else { String::new() };
        let _ = writeln!(out, "{}: {}{shown}", self.source.name, counts.join(", "));
        out
    }

    /// The first [`SHOWN`] as a JSON array.
    pub fn to_json(&self) -> serde_json::Value {
        self.list.iter().take(SHOWN).map(|diagnostic| diagnostic.to_json(&self.source)).collect()
    }
}

impl fmt::Display for Diagnostics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.render(false))
    }
}

impl std::error::Error for Diagnostics {}

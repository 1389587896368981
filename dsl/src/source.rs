//! Where things stand in a source file.

use indexmap::IndexMap;

/// A range of bytes of a source text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// First byte.
    pub start: usize,
    /// One past the last byte.
    pub end: usize,
}

/// The tokens of a specification's fields, by path: `model.components.ea.count`, `model.body[0].recur`, …
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SourceMap {
    /// The file's name as the user gave it.
    pub name: String,
    /// Its text.
    pub text: String,
    /// Path to the span of the field's value.
    pub fields: IndexMap<String, Span>,
}

impl SourceMap {
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
}

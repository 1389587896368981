//! Places in a text: bytes here, lines and UTF-16 units in the protocol.

use dreamc_dsl::Span;
use lsp_types::{Position, Range};

/// The place of a byte, as the protocol counts.
pub fn position(text: &str, offset: usize) -> Position {
    let before = &text[..floor(text, offset)];
    let line = before.bytes().filter(|b| *b == b'\n').count();
    let start = before.rfind('\n').map_or(0, |at| at + 1);
    // A document has at most 16 MiB.
    Position { line: line as u32, character: before[start..].encode_utf16().count() as u32 }
}

/// The range of a span.
pub fn range(text: &str, span: Span) -> Range {
    Range { start: position(text, span.start), end: position(text, span.end.max(span.start)) }
}

/// The byte at a place. A place after the end of a line is that end, one after the text its end.
pub fn offset(text: &str, position: Position) -> usize {
    let mut start = 0;
    for _ in 0..position.line {
        match text[start..].find('\n') {
            Some(at) => start += at + 1,
            None => return text.len(),
        }
    }
    let end = text[start..].find('\n').map_or(text.len(), |at| start + at);
    let mut units = 0;
    for (at, letter) in text[start..end].char_indices() {
        if units >= position.character as usize {
            return start + at;
        }
        units += letter.len_utf16();
    }
    end
}

/// The name around or before a byte.
pub fn word(text: &str, offset: usize) -> Span {
    let part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let offset = floor(text, offset);
    let start = text[..offset].trim_end_matches(part).len();
    let rest = &text[offset..];
    Span::new(start, offset + rest.len() - rest.trim_start_matches(part).len())
}

fn floor(text: &str, offset: usize) -> usize {
    let mut offset = offset.min(text.len());
    while !text.is_char_boundary(offset) {
        offset -= 1;
    }
    offset
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_and_bytes_agree() {
        let text = "a\n// 𝑑𝑒 ü\nlast";
        for (at, _) in text.char_indices().chain([(text.len(), ' ')]) {
            assert_eq!(offset(text, position(text, at)), at);
        }
        // 𝑑 takes two units and four bytes.
        assert_eq!(position(text, 9), Position { line: 1, character: 5 });
        assert_eq!(offset(text, Position { line: 0, character: 99 }), 1);
        assert_eq!(offset(text, Position { line: 99, character: 0 }), text.len());
        assert_eq!(word("heads 4", 5), Span::new(0, 5));
        assert_eq!(word("heads 4", 2), Span::new(0, 5));
        assert_eq!(word("a > b", 2), Span::new(2, 2));
    }
}

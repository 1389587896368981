//! Files to documents, one row at a time.
//!
//! *In*: a text, JSONL or Parquet file. *Out*: documents with the line they stand on, or what is
//! wrong with that line. *Promise*: one row is in memory at a time, and none longer than
//! [`LONGEST_ROW`]; the order is the file's.
//!
//! Look next at [`super::shard`], which turns documents into tokens on disk.

use super::DataError;
use crate::files;
use crate::sums::HashedRead;
use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

/// Longest line that is read. A longer one is a bad row: without a bound one missing newline would
/// fill the memory.
pub const LONGEST_ROW: usize = 64 << 20;

/// Bytes of text handed to the tokenizer at once, cut at a line's end where there is one.
const PIECE: usize = 64 << 10;

/// A text to learn, split where loss begins to be taken.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Document {
    /// No loss is taken on this.
    pub prompt: String,
    /// Loss is taken on this and on the end token.
    pub answer: String,
}

/// How prompt and answer are put together: `{prompt}` and `{answer}` are replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    before: String,
    between: Option<String>,
    after: String,
}

impl Template {
    /// Parses a template; `prompted` says whether rows have a prompt.
    pub fn new(text: &str, prompted: bool) -> Result<Self, DataError> {
        let refuse = |what: &str| {
            Err(DataError::Section(format!("template {text:?} {what}, as \"{{prompt}}\\n{{answer}}\"")))
        };
        let Some((head, after)) = text.split_once("{answer}") else {
            return refuse("lacks {answer}");
        };
        if after.contains("{answer}") || after.contains("{prompt}") {
            return refuse("must name {prompt} and {answer} once, the prompt first");
        }
        let (before, between) = match head.split_once("{prompt}") {
            Some((_, between)) if between.contains("{prompt}") => {
                return refuse("must name {prompt} and {answer} once, the prompt first");
            }
            Some((before, between)) => (before.to_string(), Some(between.to_string())),
            None if prompted => return refuse("lacks {prompt}"),
            None => (head.to_string(), None),
        };
        Ok(Template { before, between, after: after.to_string() })
    }

    /// The document of a row.
    pub fn apply(&self, prompt: Option<&str>, answer: &str) -> Document {
        let prompt = match (prompt, &self.between) {
            (Some(prompt), Some(between)) => format!("{}{prompt}{between}", self.before),
            _ => self.before.clone(),
        };
        Document { prompt, answer: format!("{answer}{}", self.after) }
    }

    /// The text before an answer, for a prompt.
    pub fn prompt(&self, prompt: &str) -> String {
        self.apply(Some(prompt), "").prompt
    }
}

/// A row that could be read, or why not.
pub type Row<T> = Result<T, BadRow>;

/// A line's number, and its bytes with the ending.
pub type Line<'a> = (u64, Row<&'a [u8]>);

/// A row that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadRow {
    /// Line, or row of a table, from 1.
    pub line: u64,
    /// The mistake and the way to mend it.
    pub problem: String,
}

/// Lines of a file, none of them longer than [`LONGEST_ROW`]; counts the bytes that went by.
pub struct Lines<R> {
    reader: R,
    line: u64,
    /// Bytes read so far.
    pub bytes: u64,
    buffer: Vec<u8>,
}

/// A file whose lines are read, and the checksum of what was.
pub type Hashing = BufReader<HashedRead<File>>;

impl Lines<Hashing> {
    /// Opens a file.
    pub fn open(path: &Path) -> Result<Self, DataError> {
        let file = files::open(path).map_err(|e| DataError::io(path, e))?;
        Ok(Lines::new(BufReader::with_capacity(1 << 18, HashedRead::new(file))))
    }

    /// BLAKE3 of what was read so far: once the last line was, of the file as it was read.
    pub fn sum(&self) -> String {
        self.reader.get_ref().sum()
    }
}

impl<R: BufRead> Lines<R> {
    /// Lines of a reader.
    pub fn new(reader: R) -> Self {
        Lines { reader, line: 0, bytes: 0, buffer: Vec::new() }
    }

    /// The next line with its ending, and its number; `None` at the end.
    pub fn read_line(&mut self) -> std::io::Result<Option<Line<'_>>> {
        self.buffer.clear();
        let mut length = 0usize;
        loop {
            let chunk = self.reader.fill_buf()?;
            if chunk.is_empty() {
                break;
            }
            let end = chunk.iter().position(|&b| b == b'\n').map(|i| i + 1);
            let take = end.unwrap_or(chunk.len());
            length += take;
            if length <= LONGEST_ROW {
                self.buffer.extend_from_slice(&chunk[..take]);
            }
            self.reader.consume(take);
            if end.is_some() {
                break;
            }
        }
        if length == 0 {
            return Ok(None);
        }
        self.line += 1;
        self.bytes += length as u64;
        if length > LONGEST_ROW {
            let problem = format!("the line has {length} bytes; at most {LONGEST_ROW} are read as one row");
            return Ok(Some((self.line, Err(BadRow { line: self.line, problem }))));
        }
        Ok(Some((self.line, Ok(&self.buffer))))
    }
}

/// Pieces of a text file: whole lines of about [`PIECE`] bytes, a longer line cut between
/// characters. A text is one document; its pieces are tokenised one by one. A piece begins with a
/// line that is not blank and has no space before it, where there is one: tokenizers join blank
/// lines and indentation to the line's end before.
pub struct TextPieces<R> {
    lines: Lines<R>,
    held: String,
    /// Where the part of `held` that has not been handed out begins.
    start: usize,
    done: bool,
}

impl<R: BufRead> TextPieces<R> {
    /// The pieces of these lines.
    pub fn new(lines: Lines<R>) -> Self {
        TextPieces { lines, held: String::new(), start: 0, done: false }
    }

    /// Bytes of the file read so far.
    pub fn bytes(&self) -> u64 {
        self.lines.bytes
    }

    /// Its lines.
    pub fn lines(&self) -> &Lines<R> {
        &self.lines
    }

    /// The next piece. A line that is not text is an error; what is held comes with the next call.
    pub fn read_piece(&mut self) -> std::io::Result<Option<Row<String>>> {
        loop {
            let held = self.held.len() - self.start;
            if held > 2 * PIECE || (self.done && held > 0) {
                return Ok(Some(Ok(self.cut())));
            }
            if self.done {
                return Ok(None);
            }
            match self.lines.read_line()? {
                None => self.done = true,
                Some((_, Err(bad))) => return Ok(Some(Err(bad))),
                Some((line, Ok(bytes))) => match text(bytes) {
                    Ok(text) if held >= PIECE && !text.starts_with(char::is_whitespace) => {
                        let piece = self.held.split_off(self.start);
                        self.held = text.to_string();
                        self.start = 0;
                        return Ok(Some(Ok(piece)));
                    }
                    Ok(text) => self.held.push_str(text),
                    Err(problem) => return Ok(Some(Err(BadRow { line, problem }))),
                },
            }
        }
    }

    /// Takes a piece from what is held.
    fn cut(&mut self) -> String {
        let rest = &self.held[self.start..];
        if rest.len() <= 2 * PIECE {
            let piece = rest.to_string();
            self.held.clear();
            self.start = 0;
            return piece;
        }
        let at = (0..=PIECE).rev().find(|&i| rest.is_char_boundary(i)).unwrap_or(rest.len());
        self.start += at;
        rest[..at].to_string()
    }
}

/// The bytes as text, or what is wrong with them.
fn text(bytes: &[u8]) -> Result<&str, String> {
    let text = std::str::from_utf8(bytes).map_err(|e| {
        format!("byte {} of the line is not UTF-8; convert the file to UTF-8", e.valid_up_to() + 1)
    })?;
    match text.find('\0') {
        Some(at) => Err(format!("byte {} of the line is NUL, which text does not contain", at + 1)),
        None => Ok(text),
    }
}

/// Which fields of a row make a document.
#[derive(Clone)]
pub struct Fields {
    /// Field of the prompt.
    pub prompt: Option<String>,
    /// Field of the text to learn.
    pub answer: String,
    /// Field of an answer that is worse, where rows are pairs.
    pub rejected: Option<String>,
    /// How both are put together.
    pub template: Template,
}

/// The text that shards and data are found by: that of rows which are no pairs is as it was before
/// there were any.
impl fmt::Debug for Fields {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Fields { prompt, answer, rejected, template } = self;
        let mut out = f.debug_struct("Fields");
        out.field("prompt", prompt).field("answer", answer);
        if let Some(rejected) = rejected {
            out.field("rejected", rejected);
        }
        out.field("template", template).finish()
    }
}

impl Fields {
    /// The documents of a JSON line: one, two of a pair, the better first, or none of a blank line.
    pub fn documents(&self, line: &[u8]) -> Result<Vec<Document>, String> {
        let line = text(line)?;
        if line.trim().is_empty() {
            return Ok(vec![]);
        }
        let row: serde_json::Map<String, serde_json::Value> = serde_json::from_str(line)
            .map_err(|e| format!("not a JSON object: {e}; every line must be one object"))?;
        let field = |name: &str| match row.get(name) {
            Some(serde_json::Value::String(s)) if s.contains('\0') => {
                Err(format!("field {name:?} contains NUL, which text does not"))
            }
            Some(serde_json::Value::String(s)) => Ok(s.clone()),
            Some(serde_json::Value::Number(n)) => Ok(n.to_string()),
            Some(_) => Err(format!("field {name:?} is not a string")),
            None => {
                let present = row.keys().map(|k| format!("{k:?}")).collect::<Vec<_>>().join(", ");
                Err(format!("has no field {name:?}; its fields are {present}"))
            }
        };
        let prompt = self.prompt.as_deref().map(field).transpose()?;
        let answers = [&self.answer].into_iter().chain(&self.rejected);
        let answers = answers.map(|name| field(name)).collect::<Result<Vec<_>, _>>()?;
        self.of(prompt.as_deref(), &answers)
    }

    /// The documents of a prompt and its answers, which differ.
    pub fn of(&self, prompt: Option<&str>, answers: &[String]) -> Result<Vec<Document>, String> {
        if let ([chosen, rejected], Some(name)) = (answers, &self.rejected)
            && chosen == rejected
        {
            return Err(format!(
                "fields {:?} and {name:?} are the same answer, of which none is preferred",
                self.answer
            ));
        }
        Ok(answers.iter().map(|answer| self.template.apply(prompt, answer)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(input: &[u8]) -> Vec<Row<String>> {
        let mut pieces = TextPieces::new(Lines::new(input));
        std::iter::from_fn(|| pieces.read_piece().unwrap()).collect()
    }

    #[test]
    fn pieces_join_to_the_text() {
        let line = "ünïcode ".repeat(1000) + "\n";
        let long = "é".repeat(300_000);
        let input = line.repeat(20) + &long;
        let joined: String = pieces(input.as_bytes()).into_iter().map(Result::unwrap).collect();
        assert!(joined == input);
        assert!(pieces(input.as_bytes()).len() > 5);
        assert!(pieces(b"").is_empty());
    }

    #[test]
    fn bad_lines_are_named_and_the_rest_goes_on() {
        let rows = pieces(b"good\nb\xFFd\nalso good\n");
        assert_eq!(rows.len(), 2);
        let bad = rows[0].as_ref().unwrap_err();
        assert_eq!((bad.line, bad.problem.contains("byte 2 of the line is not UTF-8")), (2, true));
        assert_eq!(rows[1], Ok("good\nalso good\n".into()));
        assert_eq!(pieces(b"a\0b")[0].as_ref().unwrap_err().line, 1);
    }

    #[test]
    fn json_rows_say_what_they_lack() {
        let fields = Fields {
            prompt: Some("q".into()),
            answer: "a".into(),
            rejected: None,
            template: Template::new("Q: {prompt}\nA: {answer}!", true).unwrap(),
        };
        let found = fields.documents(br#"{"q": "1+1", "a": 2}"#).unwrap();
        assert_eq!(found, [Document { prompt: "Q: 1+1\nA: ".into(), answer: "2!".into() }]);
        assert_eq!(fields.documents(b"  \n"), Ok(vec![]));
        let problem = |row: &[u8]| fields.documents(row).unwrap_err();
        assert!(problem(br#"{"q": "x"}"#).contains(r#"no field "a"; its fields are "q""#));
        assert!(problem(br#"{"q": [], "a": ""}"#).contains("not a string"));
        assert!(problem(b"[1]").contains("not a JSON object"));
        assert!(problem(b"{\"q\": \"\\u0000\", \"a\": \"\"}").contains("NUL"));
        let deep = "[".repeat(100_000);
        assert!(problem(deep.as_bytes()).contains("not a JSON object"));
    }

    #[test]
    fn a_row_of_a_pair_has_two_answers_that_differ() {
        let fields = Fields {
            prompt: Some("q".into()),
            answer: "good".into(),
            rejected: Some("bad".into()),
            template: Template::new("{prompt}: {answer}", true).unwrap(),
        };
        let found = fields.documents(br#"{"q": "1+1", "good": 2, "bad": 3}"#).unwrap();
        assert_eq!(found.iter().map(|d| d.answer.as_str()).collect::<Vec<_>>(), ["2", "3"]);
        let problem = |row: &[u8]| fields.documents(row).unwrap_err();
        assert!(problem(br#"{"q": "1+1", "good": 2, "bad": 2}"#).contains("the same answer"));
        assert!(problem(br#"{"q": "1+1", "good": 2}"#).contains(r#"no field "bad""#));
    }

    #[test]
    fn templates_are_checked() {
        for bad in
            ["{prompt}", "{answer}{prompt}", "{answer}{answer}", "{prompt}{prompt}{answer}", "{answer}"]
        {
            assert!(Template::new(bad, true).is_err(), "{bad}");
        }
        let plain = Template::new("{answer}\n", false).unwrap();
        assert_eq!(plain.apply(None, "x"), Document { prompt: String::new(), answer: "x\n".into() });
    }
}

//! `dreamc tokenizer`: learn a vocabulary.

use clap::{Args, Subcommand};
use dreamc_data::files::write_named;
use dreamc_data::rows::{Hashing, Lines, TextPieces};
use dreamc_data::{DataError, Notice, Tokenizer, tokenizer};
use dreamc_study::failure::{Done, Failure};
use dreamc_study::progress::Progress;
use dreamc_study::say;
use std::path::PathBuf;

/// Learn a vocabulary from texts
#[derive(Args)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Train(Train),
}

/// Learn a byte-level BPE vocabulary and write its tokenizer.json
#[derive(Args)]
#[command(after_help = "\
Examples:
  dreamc tokenizer train book.txt --vocab 4096 -o tokenizer.json
  dreamc tokenizer train train.jsonl --field question --field answer --vocab 8192 -o tokenizer.json

Then, in the specification: `data: {text: book.txt, tokenizer: tokenizer.json}` and `vocab: 4096`.")]
struct Train {
    /// Texts, or .jsonl files with --field
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,

    /// Tokens of the vocabulary, the 256 bytes and the end token included
    #[arg(long, value_name = "N")]
    vocab: usize,

    /// Where the tokenizer goes
    #[arg(short, long, value_name = "FILE", default_value = "tokenizer.json")]
    out: PathBuf,

    /// Fields of .jsonl files to read; may be given several times
    #[arg(long, value_name = "NAME")]
    field: Vec<String>,
}

pub fn run(a: Arguments) -> Done {
    let Command::Train(a) = a.command;
    let mut progress = Progress::default();
    let mut failed = None;
    let json = tokenizer::train(Texts::new(&a, &mut progress, &mut failed), a.vocab);
    progress.clear();
    if let Some(error) = failed {
        return Err(error);
    }
    let json = json?;
    write_named(&a.out, |out| out.write_all(json.as_bytes()))?;
    let learned = Tokenizer::from_json(json, &[])?;
    say!("{}: {} tokens", a.out.display(), learned.vocab())?;
    if learned.vocab() < a.vocab {
        say!("the texts hold no more pairs that occur twice; set vocab to {}", learned.vocab())?;
    }
    Ok(())
}

/// The texts of all files, one piece in memory at a time.
struct Texts<'a> {
    a: &'a Train,
    next: usize,
    open: Option<Open>,
    progress: &'a mut Progress,
    failed: &'a mut Option<Failure>,
    total: u64,
}

enum Open {
    Text(TextPieces<Hashing>),
    Jsonl(Lines<Hashing>, Vec<String>),
}

impl<'a> Texts<'a> {
    fn new(a: &'a Train, progress: &'a mut Progress, failed: &'a mut Option<Failure>) -> Self {
        Texts { a, next: 0, open: None, progress, failed, total: 0 }
    }

    fn read(&mut self) -> Result<Option<String>, Failure> {
        loop {
            let Some(path) = self.a.files.get(self.next) else { return Ok(None) };
            let io = |e| DataError::io(path, e);
            if self.open.is_none() {
                self.total = std::fs::metadata(path).map_err(io)?.len();
                let jsonl = path.extension().is_some_and(|e| e == "jsonl" || e == "ndjson");
                let lines = Lines::open(path)?;
                self.open = Some(if jsonl {
                    if self.a.field.is_empty() {
                        let what = "say which fields of the rows to read with --field";
                        return Err(Failure::Usage(format!("{}: {what}", path.display())));
                    }
                    Open::Jsonl(lines, vec![])
                } else {
                    Open::Text(TextPieces::new(lines))
                });
            }
            let bad = |line, problem| DataError::Row { path: path.clone(), line, problem };
            let (text, done) = match self.open.as_mut() {
                Some(Open::Text(pieces)) => {
                    let piece = pieces.read_piece().map_err(io)?;
                    (piece.transpose().map_err(|b| bad(b.line, b.problem))?, pieces.bytes())
                }
                Some(Open::Jsonl(lines, texts)) => {
                    if texts.is_empty() {
                        while let Some((line, row)) = lines.read_line().map_err(io)? {
                            let row = row.map_err(|b| bad(b.line, b.problem))?;
                            let object: serde_json::Value = serde_json::from_slice(row)
                                .map_err(|e| bad(line, format!("not a JSON object: {e}")))?;
                            let found = self.a.field.iter().filter_map(|f| object.get(f)?.as_str());
                            texts.extend(found.map(str::to_string));
                            if !texts.is_empty() {
                                break;
                            }
                        }
                    }
                    (texts.pop(), lines.bytes)
                }
                None => (None, 0),
            };
            let notice = Notice { what: "reading", path, done, total: self.total };
            self.progress.notice(&notice);
            match text {
                Some(text) => return Ok(Some(text)),
                None => {
                    self.open = None;
                    self.next += 1;
                }
            }
        }
    }
}

impl Iterator for Texts<'_> {
    type Item = String;

    fn next(&mut self) -> Option<String> {
        match self.read() {
            Ok(text) => text,
            Err(error) => {
                *self.failed = Some(error);
                None
            }
        }
    }
}

//! Token shards: a file tokenised once, then read where it is needed.
//!
//! *In*: a file, what its rows mean, a tokenizer. *Out*: a [`Shard`]: tokens and document ends on
//! disk. *Promise*: built streaming (memory does not grow with the file), with progress; a shard is
//! found again by a hash of the file's content, its reading and the tokenizer, and appears whole or
//! not at all, whoever is killed or builds the same at the same moment. The hash is of the bytes
//! that were tokenised: a file that changes while it is read is refused.
//!
//! A shard is a folder of `tokens.bin` (little-endian, 1, 2 or 4 bytes each), `documents.bin` (for
//! each document where it ends and where loss begins, as two 64-bit token numbers), `shard.json`
//! and `checksums.txt`; and of `bytes.bin` where tokens do not tell how many bytes of text they
//! stand for: those numbers, 32 bits each. Every byte is verified when it is opened, and a damaged
//! shard is built anew. Look next at [`super::stream`] and [`super::examples`], which cut shards
//! into rows.

use super::rows::{BadRow, Document, Fields, Lines, TextPieces};
use super::tokenizer::Measured;
use super::{DataError, Notice, Tokenizer};
use crate::sums::{Hashed, Sums, SumsError, hash, seal};
use crate::{files, stamp};
use dreamc_dsl::spec::BadRows;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Changes whenever the same file and tokenizer would give other shards.
const VERSION: u32 = 3;

/// Text tokenised at once, shared among threads.
const BATCH: usize = 1 << 20;

const TOKENS: &str = "tokens.bin";
const DOCUMENTS: &str = "documents.bin";
const BYTES: &str = "bytes.bin";
const META: &str = "shard.json";

/// Meaning of a file's rows.
#[derive(Clone, Debug)]
pub enum Format {
    /// One document.
    Text,
    /// JSON objects, one a line.
    Jsonl(Fields),
    /// A table.
    Parquet(Fields),
}

impl Format {
    fn describe(&self) -> String {
        match self {
            Format::Text => "text".into(),
            Format::Jsonl(fields) => format!("jsonl {fields:?}"),
            Format::Parquet(fields) => format!("parquet {fields:?}"),
        }
    }

    /// Whether every row is a pair of answers: two documents, the better first.
    pub fn pairs(&self) -> bool {
        match self {
            Format::Text => false,
            Format::Jsonl(fields) | Format::Parquet(fields) => fields.rejected.is_some(),
        }
    }

    /// Whether loss begins after a prompt, so that documents must stay whole.
    pub fn prompted(&self) -> bool {
        match self {
            Format::Text => false,
            Format::Jsonl(fields) | Format::Parquet(fields) => fields.prompt.is_some(),
        }
    }
}

/// Facts about a shard besides its tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Meta {
    /// Format of the shard.
    pub version: u32,
    /// Hash of the file's content.
    pub source: String,
    /// The tokenizer's fingerprint.
    pub tokenizer: String,
    /// Bytes a token takes.
    pub width: u8,
    /// Tokens, end tokens included.
    pub tokens: u64,
    /// Documents.
    pub documents: u64,
    /// Rows left out because they could not be read.
    pub skipped: u64,
    /// The first of them.
    pub first_skipped: Option<String>,
}

/// A tokenised file. It is read at places and never mapped, since a mapped file that another
/// program cuts ends the process.
pub struct Shard {
    /// Facts about it.
    pub meta: Meta,
    folder: PathBuf,
    tokens: File,
    documents: File,
    lengths: Lengths,
}

/// Bytes of text that tokens stand for.
enum Lengths {
    /// By token.
    Told(Vec<u8>),
    /// By place.
    Measured(File),
}

/// A document's place in a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its first token.
    pub start: u64,
    /// The first token that loss is taken on.
    pub learn: u64,
    /// One past its last token, which is the end token.
    pub end: u64,
}

impl Shard {
    /// Tokens in all.
    pub fn len(&self) -> u64 {
        self.meta.tokens
    }

    /// Whether it has no tokens.
    pub fn is_empty(&self) -> bool {
        self.meta.tokens == 0
    }

    /// Tokens of a range.
    pub fn tokens(&self, range: Range<u64>) -> Result<Vec<i32>, DataError> {
        let bytes = self.stored(&range)?;
        Ok(match self.meta.width {
            1 => bytes.iter().map(|&b| i32::from(b)).collect(),
            2 => bytes.chunks_exact(2).map(|b| i32::from(u16::from_le_bytes([b[0], b[1]]))).collect(),
            _ => bytes.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        })
    }

    /// The bytes in which tokens of a range are stored.
    fn stored(&self, range: &Range<u64>) -> Result<Vec<u8>, DataError> {
        let width = u64::from(self.meta.width);
        let count = range.end.saturating_sub(range.start);
        self.read(TOKENS, &self.tokens, range.start * width, (count * width) as usize)
    }

    /// Bytes of text that each token of a range stands for; those of a document add up to its text.
    pub fn bytes(&self, range: Range<u64>) -> Result<Vec<u32>, DataError> {
        match &self.lengths {
            Lengths::Told(lengths) => {
                let length = |id: i32| lengths.get(id as usize).map_or(0, |&n| u32::from(n));
                Ok(self.tokens(range)?.into_iter().map(length).collect())
            }
            Lengths::Measured(file) => {
                let count = range.end.saturating_sub(range.start);
                let words = self.read(BYTES, file, 4 * range.start, 4 * count as usize)?;
                let word = |b: &[u8]| u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                Ok(words.chunks_exact(4).map(word).collect())
            }
        }
    }

    /// Document number `i`.
    pub fn document(&self, i: u64) -> Result<Place, DataError> {
        Ok(self.places(i, 1)?[0])
    }

    /// `count` documents from number `i` on, at least one.
    fn places(&self, i: u64, count: u64) -> Result<Vec<Place>, DataError> {
        // The end of the document before is the first word.
        let first = (2 * i).saturating_sub(2);
        let words = 2 * (i + count) - first;
        let bytes = self.read(DOCUMENTS, &self.documents, 8 * first, 8 * words as usize)?;
        let words: Vec<u64> =
            bytes.chunks_exact(8).map(|b| u64::from_le_bytes(std::array::from_fn(|k| b[k]))).collect();
        let (before, own) = words.split_at(if i == 0 { 0 } else { 2 });
        let mut start = before.first().copied().unwrap_or(0);
        let place = |pair: &[u64]| Place {
            start: std::mem::replace(&mut start, pair[0]),
            learn: pair[1],
            end: pair[0],
        };
        Ok(own.chunks_exact(2).map(place).collect())
    }

    fn read(&self, name: &str, file: &File, at: u64, bytes: usize) -> Result<Vec<u8>, DataError> {
        let path = self.folder.join(name);
        let mut buffer = vec![0; bytes];
        match file.read_exact_at(&mut buffer, at) {
            Ok(()) => Ok(buffer),
            Err(e) if e.kind() == ErrorKind::UnexpectedEof => {
                Err(DataError::file(&path, "was cut short while it was used; the next run makes it anew"))
            }
            Err(e) => Err(DataError::io(&path, e)),
        }
    }

    /// The document that holds token `i`, by bisection.
    pub fn document_of(&self, i: u64) -> Result<u64, DataError> {
        let (mut low, mut high) = (0, self.meta.documents.saturating_sub(1));
        while low < high {
            let middle = low + (high - low) / 2;
            if self.document(middle)?.end > i { high = middle } else { low = middle + 1 }
        }
        Ok(low)
    }

    /// Opens and verifies a shard; `None` where it is damaged.
    fn verified(folder: &Path, tokenizer: &Tokenizer) -> Result<Option<Self>, DataError> {
        let damaged = |error: SumsError| match error {
            SumsError::Io { path, error } if error.kind() != ErrorKind::NotFound => {
                Err(DataError::io(&path, error))
            }
            _ => Ok(None),
        };
        let files =
            Sums::open(folder).and_then(|s| Ok((s.read(META)?, s.verify(TOKENS)?, s.verify(DOCUMENTS)?)));
        let (meta, tokens, documents) = match files {
            Ok(files) => files,
            Err(error) => return damaged(error),
        };
        let lengths = match tokenizer.told() {
            Some(lengths) => Lengths::Told(lengths.to_vec()),
            None => match Sums::open(folder).and_then(|s| s.verify(BYTES)) {
                Ok(file) => Lengths::Measured(file),
                Err(error) => return damaged(error),
            },
        };
        let Ok(meta) = serde_json::from_slice::<Meta>(&meta) else { return Ok(None) };
        let fits = |file: &File, n: u64, bytes: u64| {
            file.metadata().is_ok_and(|m| n.checked_mul(bytes) == Some(m.len()))
        };
        let shard = Shard { meta, folder: folder.to_path_buf(), tokens, documents, lengths };
        let meta = &shard.meta;
        let measured = match &shard.lengths {
            Lengths::Told(_) => true,
            Lengths::Measured(file) => fits(file, meta.tokens, 4),
        };
        let sizes = matches!(meta.width, 1 | 2 | 4)
            && fits(&shard.tokens, meta.tokens, meta.width.into())
            && fits(&shard.documents, meta.documents, 16)
            && measured;
        Ok((meta.version == VERSION && sizes && shard.is_ordered()?).then_some(shard))
    }

    /// Whether documents stand one after another and fill the shard.
    fn is_ordered(&self) -> Result<bool, DataError> {
        const AT_ONCE: u64 = 1 << 16;
        let mut at = 0;
        for from in (0..self.meta.documents).step_by(AT_ONCE as usize) {
            for Place { start, learn, end } in self.places(from, AT_ONCE.min(self.meta.documents - from))? {
                if start != at || learn < start || end <= learn {
                    return Ok(false);
                }
                at = end;
            }
        }
        Ok(at == self.meta.tokens)
    }
}

/// The shard of a file: from the cache where it is there, else built.
pub fn open(
    path: &Path,
    format: &Format,
    tokenizer: &Tokenizer,
    bad_rows: BadRows,
    cache: &Path,
    notice: &mut dyn FnMut(Notice),
) -> Result<Shard, DataError> {
    let source = content_hash(path, cache, notice)?;
    let policy = match bad_rows {
        BadRows::Stop => "stop",
        BadRows::Skip => "skip",
    };
    let key = format!("{VERSION}|{source}|{}|{}|{policy}", format.describe(), tokenizer.fingerprint());
    let folder = cache.join("shards").join(&blake3::hash(key.as_bytes()).to_hex()[..32]);
    if folder.is_dir() {
        if let Some(shard) = Shard::verified(&folder, tokenizer)? {
            return Ok(shard);
        }
        // A damaged shard is built anew; it is only a cache.
        match fs::remove_dir_all(&folder) {
            Err(e) if e.kind() != ErrorKind::NotFound => return Err(DataError::io(&folder, e)),
            _ => {}
        }
    }
    let parent = cache.join("shards");
    fs::create_dir_all(&parent).map_err(|e| DataError::io(&parent, e))?;
    files::remove_abandoned(&parent, None);
    let (temporary, _lock) = files::claim_folder(&folder).map_err(|e| DataError::io(&folder, e))?;
    let built = Builder::new(&temporary, tokenizer)
        .and_then(|b| b.run(path, format, bad_rows, source, notice))
        .and_then(|()| match fs::rename(&temporary, &folder) {
            // Another process built the same meanwhile.
            Err(_) if folder.is_dir() => Ok(()),
            result => result.map_err(|e| DataError::io(&folder, e)),
        });
    if temporary.exists() {
        let _ = fs::remove_dir_all(&temporary);
    }
    built?;
    files::sync_folder(&parent).map_err(|e| DataError::io(&parent, e))?;
    Shard::verified(&folder, tokenizer)?.ok_or_else(|| {
        DataError::file(&folder, "was damaged while it was opened; try again, and check the disk")
    })
}

/// Writes a shard into a temporary folder.
struct Builder<'a> {
    folder: PathBuf,
    tokenizer: &'a Tokenizer,
    tokens: Hashed,
    documents: Hashed,
    /// Where tokens do not tell their bytes.
    bytes: Option<Hashed>,
    /// Bytes of text before the next token that no token stands for.
    carried: u32,
    meta: Meta,
    waiting: Vec<Part>,
    waiting_bytes: usize,
}

/// A part of a document; the last one closes it.
struct Part {
    document: Document,
    /// Whether others of the document come before it.
    further: bool,
    last: bool,
}

impl<'a> Builder<'a> {
    fn new(folder: &Path, tokenizer: &'a Tokenizer) -> Result<Self, DataError> {
        let create = |name: &str| {
            let path = folder.join(name);
            Hashed::create(&path).map_err(|e| DataError::io(&path, e))
        };
        let width = match tokenizer.vocab() {
            0..=0x100 => 1,
            0x101..=0x1_0000 => 2,
            _ => 4,
        };
        Ok(Builder {
            tokens: create(TOKENS)?,
            documents: create(DOCUMENTS)?,
            bytes: if tokenizer.told().is_none() { Some(create(BYTES)?) } else { None },
            carried: 0,
            folder: folder.to_path_buf(),
            tokenizer,
            meta: Meta {
                version: VERSION,
                source: String::new(),
                tokenizer: tokenizer.fingerprint().to_string(),
                width,
                tokens: 0,
                documents: 0,
                skipped: 0,
                first_skipped: None,
            },
            waiting: vec![],
            waiting_bytes: 0,
        })
    }

    fn run(
        mut self,
        path: &Path,
        format: &Format,
        bad_rows: BadRows,
        source: String,
        notice: &mut dyn FnMut(Notice),
    ) -> Result<(), DataError> {
        let total = fs::metadata(path).map_err(|e| DataError::io(path, e))?.len();
        let mut report = |done, total| notice(Notice { what: "tokenising", path, done, total });
        let io = |e| DataError::io(path, e);
        match format {
            Format::Text => {
                let mut pieces = TextPieces::new(Lines::open(path)?);
                let mut further = false;
                while let Some(piece) = pieces.read_piece().map_err(io)? {
                    if let Some(answer) = self.sift(path, bad_rows, piece)? {
                        let document = Document { prompt: String::new(), answer };
                        self.push(Part { document, further, last: false })?;
                        further = true;
                    }
                    report(pieces.bytes(), total);
                }
                self.push(Part { document: Document::default(), further, last: true })?;
                unchanged(path, &source, &pieces.lines().sum())?;
            }
            Format::Jsonl(fields) => {
                let mut lines = Lines::open(path)?;
                while let Some((line, row)) = lines.read_line().map_err(io)? {
                    let row = row
                        .and_then(|text| fields.documents(text).map_err(|problem| BadRow { line, problem }));
                    for document in self.sift(path, bad_rows, row)?.into_iter().flatten() {
                        self.push(Part { document, further: false, last: true })?;
                    }
                    report(lines.bytes, total);
                }
                unchanged(path, &source, &lines.sum())?;
            }
            Format::Parquet(fields) => {
                let mut rows = super::parquet::ParquetRows::open(path, fields)?;
                while let Some(row) = rows.read_row()? {
                    for document in self.sift(path, bad_rows, row)?.into_iter().flatten() {
                        self.push(Part { document, further: false, last: true })?;
                    }
                    report(rows.read(), rows.total);
                }
                // Its columns are read here and there; what was read is what is there if that is
                // what was hashed.
                let (now, _) = files::open(path).and_then(|f| hash(&f)).map_err(io)?;
                unchanged(path, &source, &now)?;
            }
        }
        self.flush()?;
        report(total, total);
        if self.meta.documents == 0 || self.meta.tokens <= self.meta.documents {
            return Err(DataError::file(path, format!("holds no text ({} bad rows)", self.meta.skipped)));
        }
        self.meta.source = source;
        self.finish()
    }

    /// A good row, or `None` for one to leave out.
    fn sift<T>(
        &mut self,
        path: &Path,
        bad_rows: BadRows,
        row: Result<T, BadRow>,
    ) -> Result<Option<T>, DataError> {
        match (row, bad_rows) {
            (Ok(row), _) => Ok(Some(row)),
            (Err(BadRow { line, problem }), BadRows::Stop) => {
                Err(DataError::Row { path: path.to_path_buf(), line, problem })
            }
            (Err(BadRow { line, problem }), BadRows::Skip) => {
                self.meta.skipped += 1;
                self.meta.first_skipped.get_or_insert_with(|| format!("line {line}: {problem}"));
                Ok(None)
            }
        }
    }

    fn push(&mut self, part: Part) -> Result<(), DataError> {
        self.waiting_bytes += part.document.prompt.len() + part.document.answer.len() + 64;
        self.waiting.push(part);
        if self.waiting_bytes >= BATCH { self.flush() } else { Ok(()) }
    }

    /// Tokenises what waits, on all threads, and writes it in order.
    fn flush(&mut self) -> Result<(), DataError> {
        let parts = std::mem::take(&mut self.waiting);
        self.waiting_bytes = 0;
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
        let tokenizer = self.tokenizer;
        // Tokens, and how many of them are the prompt's.
        type Encoded = Vec<(Measured, usize)>;
        let encode = |parts: &[Part]| -> Result<Encoded, DataError> {
            let one = |p: &Part| match p.further {
                true => Ok((tokenizer.measure_further(&p.document.answer)?, 0)),
                false => tokenizer.measure_pair(&p.document.prompt, &p.document.answer),
            };
            parts.iter().map(one).collect()
        };
        let share = parts.len().div_ceil(threads).max(1);
        let encoded = std::thread::scope(|scope| {
            let running: Vec<_> =
                parts.chunks(share).map(|chunk| scope.spawn(move || encode(chunk))).collect();
            running
                .into_iter()
                .map(|t| {
                    t.join()
                        .unwrap_or_else(|_| Err(DataError::Tokenizer("failed on a row of the data".into())))
                })
                .collect::<Result<Vec<_>, _>>()
        })?;
        for (part, (mut measured, prompt)) in parts.iter().zip(encoded.into_iter().flatten()) {
            let learn = self.meta.tokens + prompt as u64;
            match measured.bytes.first_mut() {
                Some(first) => *first += std::mem::take(&mut self.carried),
                None => {
                    let length = part.document.prompt.len() + part.document.answer.len();
                    self.carried += u32::try_from(length).unwrap_or(u32::MAX);
                }
            }
            self.write(&measured)?;
            if part.last {
                // A text without any token is its end token's.
                let bytes = std::mem::take(&mut self.carried);
                self.write(&Measured { ids: vec![self.tokenizer.end()], bytes: vec![bytes] })?;
                self.meta.documents += 1;
                let words = [self.meta.tokens, learn];
                let io = |e| DataError::io(&self.folder, e);
                self.documents.write_all(bytemuck::cast_slice(&words.map(u64::to_le))).map_err(io)?;
            }
        }
        Ok(())
    }

    fn write(&mut self, measured: &Measured) -> Result<(), DataError> {
        let Measured { ids, bytes: lengths } = measured;
        self.meta.tokens += ids.len() as u64;
        let width = usize::from(self.meta.width);
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes().into_iter().take(width)).collect();
        let io = |e| DataError::io(&self.folder, e);
        self.tokens.write_all(&bytes).map_err(io)?;
        let Some(out) = &mut self.bytes else { return Ok(()) };
        let lengths: Vec<u8> = lengths.iter().flat_map(|n| n.to_le_bytes()).collect();
        out.write_all(&lengths).map_err(io)
    }

    fn finish(self) -> Result<(), DataError> {
        let Builder { folder, tokens, documents, bytes, meta, .. } = self;
        let write = || {
            let mut file = Hashed::create(&folder.join(META))?;
            serde_json::to_writer_pretty(&mut file, &meta)?;
            let mut sums =
                vec![(META, file.finish()?), (TOKENS, tokens.finish()?), (DOCUMENTS, documents.finish()?)];
            if let Some(bytes) = bytes {
                sums.push((BYTES, bytes.finish()?));
            }
            seal(&folder, &sums)
        };
        write().map_err(|e| DataError::io(&folder, e))
    }
}

/// Refuses a file that is not what was hashed any more.
fn unchanged(path: &Path, hashed: &str, read: &str) -> Result<(), DataError> {
    if hashed == read {
        return Ok(());
    }
    Err(DataError::file(
        path,
        "changed while it was read; nothing of it is kept: try again once it is written",
    ))
}

/// Where a file has its first hole, which a file of a terabyte may be made of.
fn hole(file: &File, length: u64) -> Option<u64> {
    let begin = |whence| {
        // SAFETY: the call moves the place of a descriptor that is open, and nothing else.
        let at = unsafe { libc::lseek(file.as_raw_fd(), 0, whence) };
        u64::try_from(at).ok()
    };
    let hole = begin(libc::SEEK_HOLE);
    begin(libc::SEEK_SET);
    hole.filter(|at| *at < length)
}

/// Hash of a file's content. A file that has not been touched since is not read again.
pub fn content_hash(path: &Path, cache: &Path, notice: &mut dyn FnMut(Notice)) -> Result<String, DataError> {
    let io = |e| DataError::io(path, e);
    let file = files::open(path).map_err(io)?;
    let m = file.metadata().map_err(io)?;
    if let Some(hole) = hole(&file, m.len()) {
        let what = format!(
            "has a hole from byte {hole} on: nothing was ever written there, so that it reads as zeros, which no text or table has"
        );
        return Err(DataError::file(path, what));
    }
    let mut read = |done, total| notice(Notice { what: "hashing", path, done, total });
    stamp::hash(path, &file, cache, &mut read).map_err(io)
}

//! Text to tokens and back.
//!
//! *In*: text. *Out*: ids below [`Tokenizer::vocab`]. *Promise*: deterministic; two tokenizers with
//! one [`Tokenizer::fingerprint`] give the same tokens, which is what shards are cached by.
//!
//! **Bytes**, the default, is one token a byte, 256 in all. Id 0, the byte NUL, which no text
//! contains, ends a document, begins the next, and fills unused places (where no loss is taken). A
//! `tokenizer.json` uses its own end and begin tokens; which of its tokens end a text is what
//! `generation_config.json`, else `config.json`, next to it say, else the first of the names that
//! are known.

use super::DataError;
use crate::{files, foreign};
use dreamc_dsl::spec;
use serde::Deserialize;
use std::path::Path;
use tokenizers::ModelWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, PreTokenizerWrapper, TokenizerBuilder};

/// Largest `tokenizer.json` that is read; the largest in the wild are below 40 MB.
const LARGEST_FILE: u64 = 256 << 20;

/// Ids are below this; the largest vocabularies in the wild have some 300 thousand tokens.
const LARGEST_VOCAB: u32 = 1 << 24;

/// Names under which tokenizers have a token that ends a document, likeliest first.
const ENDS: [&str; 10] = [
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<|im_end|>",
    "[SEP]",
    "<end_of_turn>",
];
/// The same for tokens that begin one.
const BEGINS: [&str; 6] = ["<|begin_of_text|>", "<s>", "<bos>", "<|bos|>", "[BOS]", "[CLS]"];

/// How text becomes tokens.
pub struct Tokenizer {
    kind: Kind,
    fingerprint: String,
    vocab: usize,
    end: u32,
    ends: Vec<u32>,
    begin: u32,
    begins: bool,
    /// Whether a text's tokens begin with one that the text does not have, such as the `▁` of
    /// SentencePiece.
    prefixes: bool,
    /// Bytes of text by token, where each stands for the same wherever it comes.
    told: Option<Vec<u8>>,
}

enum Kind {
    Bytes,
    Json { inner: Box<tokenizers::Tokenizer>, text: String },
}

/// Tokens, and the bytes of the text that each stands for: those of a text add up to its length,
/// where it has any token.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Measured {
    /// The tokens.
    pub ids: Vec<u32>,
    /// The bytes of each.
    pub bytes: Vec<u32>,
}

impl Tokenizer {
    /// One token a byte.
    pub fn bytes() -> Self {
        Tokenizer {
            kind: Kind::Bytes,
            fingerprint: "bytes".into(),
            vocab: 256,
            end: 0,
            ends: vec![0],
            begin: 0,
            begins: false,
            prefixes: false,
            // The byte NUL ends documents.
            told: Some((0..256).map(|id| u8::from(id != 0)).collect()),
        }
    }

    /// The tokenizer a specification names; paths are relative to `base`.
    pub fn open(spec: &spec::Tokenizer, base: &Path) -> Result<Self, DataError> {
        match spec {
            spec::Tokenizer::Bytes => Ok(Self::bytes()),
            spec::Tokenizer::File(path) => Self::from_file(&base.join(path)),
        }
    }

    /// Reads a `tokenizer.json`.
    pub fn from_file(path: &Path) -> Result<Self, DataError> {
        let size = std::fs::metadata(path).map_err(|e| DataError::io(path, e))?.len();
        if size > LARGEST_FILE {
            return Err(DataError::file(path, format!("{size} bytes are too many for a tokenizer.json")));
        }
        let text = files::read_text(path).map_err(|e| DataError::io(path, e))?;
        Self::from_json(text, &ends_beside(path)).map_err(|e| DataError::file(path, e.to_string()))
    }

    /// Parses the content of a `tokenizer.json`. Its texts end with any of `given`, where some are
    /// its tokens.
    pub fn from_json(text: String, given: &[u32]) -> Result<Self, DataError> {
        check_growth(&text)?;
        let read = || tokenizers::Tokenizer::from_bytes(text.as_bytes()).map_err(|e| e.to_string());
        let mut inner = foreign::call(read)
            .flatten()
            .map_err(|e| DataError::Tokenizer(format!("not a tokenizer.json: {e}")))?;
        let _ = inner.with_truncation(None);
        inner.with_padding(None);
        if let ModelWrapper::BPE(bpe) = inner.get_model()
            && let Some(dropout) = bpe.dropout.filter(|d| *d > 0.0)
        {
            return Err(DataError::Tokenizer(format!(
                "drops merges at random (`dropout: {dropout}`), so that no text has the same tokens twice; set it to null"
            )));
        }
        let find = |names: &[&str]| names.iter().find_map(|name| inner.token_to_id(name));
        let known = find(&ENDS);
        let given: Vec<u32> = given.iter().copied().filter(|id| inner.id_to_token(*id).is_some()).collect();
        // Documents end with the token that has one of the known names, unless generation would not
        // stop there.
        let end = match (known, given.first()) {
            (Some(known), None) => known,
            (Some(known), Some(_)) if given.contains(&known) => known,
            (_, Some(first)) => *first,
            (None, None) => {
                return Err(DataError::Tokenizer(format!(
                    "has no token that ends a document; add one of {}, or put a generation_config.json with its \
                     `eos_token_id` beside it",
                    ENDS.join(", ")
                )));
            }
        };
        let ends = if given.is_empty() { vec![end] } else { given };
        let own = own_begin(&inner);
        let begin = own.or_else(|| find(&BEGINS)).unwrap_or(end);
        let largest = inner.get_vocab(true).into_iter().max_by_key(|(_, id)| *id);
        if let Some((token, id)) = largest.as_ref().filter(|(_, id)| *id >= LARGEST_VOCAB) {
            return Err(DataError::Tokenizer(format!(
                "token {token:?} has the id {id}; ids below {LARGEST_VOCAB} are read"
            )));
        }
        let vocab = largest.map_or(0, |(_, id)| id as usize + 1);
        if begin as usize >= vocab {
            return Err(DataError::Tokenizer(format!(
                "its template begins texts with the id {begin}, which is no token; its ids are below {vocab}"
            )));
        }
        let mut told = tells_bytes(&inner)
            .then(|| (0..vocab).map(|id| token_bytes(&inner, id as u32)).collect::<Vec<u8>>());
        // They stand for the borders of documents. Other special tokens come from text that spells
        // them.
        for id in ends.iter().chain([&end, &begin]) {
            if let Some(length) = told.as_mut().and_then(|told| told.get_mut(*id as usize)) {
                *length = 0;
            }
        }
        let mut fingerprint = format!("json-{}", blake3::hash(text.as_bytes()).to_hex());
        if known != Some(end) {
            fingerprint += &format!("-end-{end}");
        }
        let kind = Kind::Json { inner: Box::new(inner), text };
        let begins = own.is_some();
        let mut tokenizer =
            Tokenizer { kind, fingerprint, vocab, end, ends, begin, begins, prefixes: false, told };
        let (line, both) = (tokenizer.encode("a")?, tokenizer.encode("\na")?);
        tokenizer.prefixes = tokenizer.encode("\n")?.into_iter().chain(line).ne(both);
        Ok(tokenizer)
    }

    /// One more than the largest id.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// The token after the last of a document.
    pub fn end(&self) -> u32 {
        self.end
    }

    /// The tokens after which no text goes on; [`Tokenizer::end`] is among them.
    pub fn ends(&self) -> &[u32] {
        &self.ends
    }

    /// A `generation_config.json` to put next to its copy, so that it ends texts as this does;
    /// `None` where it does by itself.
    pub fn generation_config(&self) -> Option<String> {
        let Kind::Json { inner, .. } = &self.kind else { return None };
        let known = ENDS.iter().find_map(|name| inner.token_to_id(name));
        let alone = known.is_some_and(|known| self.ends == [known]);
        (!alone).then(|| serde_json::json!({ "eos_token_id": self.ends }).to_string() + "\n")
    }

    /// The special token that is written so: decoding drops it, so that no decoded text has it.
    pub fn special(&self, text: &str) -> Option<u32> {
        let Kind::Json { inner, .. } = &self.kind else { return None };
        inner.token_to_id(text).filter(|_| inner.get_added_vocabulary().is_special_token(text))
    }

    /// The token of this id as its vocabulary spells it.
    pub fn token(&self, id: u32) -> Option<String> {
        match &self.kind {
            Kind::Bytes => u8::try_from(id).ok().map(|byte| char::from(byte).to_string()),
            Kind::Json { inner, .. } => inner.id_to_token(id),
        }
    }

    /// The token before the first of a document.
    pub fn begin(&self) -> u32 {
        self.begin
    }

    /// Whether it puts the begin token before a text by itself, as models do that were never
    /// trained without.
    pub fn begins(&self) -> bool {
        self.begins
    }

    /// Equal for tokenizers that give the same tokens.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// The content of its `tokenizer.json`, where it has one.
    pub fn json(&self) -> Option<&str> {
        match &self.kind {
            Kind::Bytes => None,
            Kind::Json { text, .. } => Some(text),
        }
    }

    /// The tokens of a text, with nothing put before or after it.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        match &self.kind {
            Kind::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Kind::Json { inner, .. } => {
                let encode = || inner.encode_fast(text, false).map_err(|e| e.to_string());
                let encoding = foreign::call(encode).flatten().map_err(DataError::Tokenizer)?;
                Ok(encoding.get_ids().to_vec())
            }
        }
    }

    /// The tokens of a text and their bytes.
    fn measure(&self, text: &str) -> Result<Measured, DataError> {
        let Kind::Json { inner, .. } = &self.kind else { return self.told_of(self.encode(text)?) };
        if self.told.is_some() {
            return self.told_of(self.encode(text)?);
        }
        let encode = || inner.encode(text, false).map_err(|e| e.to_string());
        let encoding = foreign::call(encode).flatten().map_err(DataError::Tokenizer)?;
        let mut at = 0;
        // A token stands for what goes on from the one before to its end: spaces that no token has
        // are the next one's, and of several tokens of one character the first has its bytes.
        let length = |(_, end): &(usize, usize)| {
            let end = (*end).clamp(at, text.len());
            (end - std::mem::replace(&mut at, end)) as u32
        };
        let mut bytes: Vec<u32> = encoding.get_offsets().iter().map(length).collect();
        if let Some(last) = bytes.last_mut() {
            *last += (text.len() - at) as u32;
        }
        Ok(Measured { ids: encoding.get_ids().to_vec(), bytes })
    }

    /// Tokens that tell their bytes.
    fn told_of(&self, ids: Vec<u32>) -> Result<Measured, DataError> {
        let told = self.told.as_deref().unwrap_or_default();
        let bytes = ids.iter().map(|&id| told.get(id as usize).map_or(0, |&n| u32::from(n))).collect();
        Ok(Measured { ids, bytes })
    }

    /// The tokens of a text whose first part is a prompt, and how many of them are the prompt's: as
    /// many as it has alone. The text is encoded as a whole, as `transformers` and lm-eval do.
    pub fn encode_pair(&self, prompt: &str, answer: &str) -> Result<(Vec<u32>, usize), DataError> {
        self.measure_pair(prompt, answer).map(|(whole, alone)| (whole.ids, alone))
    }

    /// The same with their bytes.
    pub fn measure_pair(&self, prompt: &str, answer: &str) -> Result<(Measured, usize), DataError> {
        if prompt.is_empty() {
            return Ok((self.measure(answer)?, 0));
        }
        let alone = self.encode(prompt)?.len();
        let whole = self.measure(&format!("{prompt}{answer}"))?;
        let alone = alone.min(whole.ids.len());
        Ok((whole, alone))
    }

    /// The tokens of lines that others stand before: without the one that only the beginning of a
    /// text has. Those of the line break that stands in for what is before are dropped.
    pub fn measure_further(&self, text: &str) -> Result<Measured, DataError> {
        if self.prefixes {
            let (before, mut whole) = (self.encode("\n")?, self.measure(&format!("\n{text}"))?);
            if whole.ids.starts_with(&before) {
                let dropped: u32 = whole.bytes.iter().take(before.len()).sum();
                whole.ids.drain(..before.len());
                whole.bytes.drain(..before.len());
                // The break is one byte, whichever token it is counted to.
                if let Some(first) = whole.bytes.first_mut() {
                    *first = (*first + dropped).saturating_sub(1);
                }
                return Ok(whole);
            }
        }
        self.measure(text)
    }

    /// The text that tokens add to that of the tokens `before`.
    pub fn decode_further(&self, before: &[u32], ids: &[u32]) -> String {
        let whole = self.decode(&[before, ids].concat());
        match whole.strip_prefix(&self.decode(before)) {
            Some(rest) => rest.to_string(),
            // A character with bytes on both sides.
            None => self.decode(ids),
        }
    }

    /// The text of tokens; end and begin tokens give nothing, broken UTF-8 gives replacement
    /// characters.
    pub fn decode(&self, ids: &[u32]) -> String {
        match &self.kind {
            Kind::Bytes => {
                let bytes: Vec<u8> =
                    ids.iter().filter(|&&id| id != 0).filter_map(|&id| u8::try_from(id).ok()).collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
            Kind::Json { inner, .. } => {
                foreign::call(|| inner.decode(ids, true).unwrap_or_default()).unwrap_or_default()
            }
        }
    }

    /// Bytes of text by token, where each stands for the same wherever it comes: bytes, and words
    /// of bytes of an unchanged text. Others are measured in their text.
    pub fn told(&self) -> Option<&[u8]> {
        self.told.as_deref()
    }
}

/// The parts of a `tokenizer.json` that change text as a whole.
#[derive(Deserialize)]
struct Skim {
    normalizer: Option<serde_json::Value>,
    decoder: Option<serde_json::Value>,
}

/// Ends of texts by what `transformers` reads of a folder: `generation_config.json`, or
/// `config.json` where that does not say.
fn ends_beside(path: &Path) -> Vec<u32> {
    let id = |value: &serde_json::Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    for name in ["generation_config.json", "config.json"] {
        let text = files::read_text(&path.with_file_name(name)).unwrap_or_default();
        let map: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
        let ends: Vec<u32> = match map.get("eos_token_id") {
            Some(serde_json::Value::Array(ids)) => ids.iter().filter_map(id).collect(),
            Some(value) => id(value).into_iter().collect(),
            None => vec![],
        };
        if !ends.is_empty() {
            return ends;
        }
    }
    vec![]
}

/// Replacements may make a text at most this many times as long; those in the wild write three
/// bytes for a space.
const MOST_GROWTH: u64 = 64;

/// How many times as long a replacement makes a text at the most.
fn growth(replace: &serde_json::Map<String, serde_json::Value>) -> u64 {
    let content = replace.get("content").and_then(|c| c.as_str()).map_or(0, |c| c.len() as u64);
    let pattern = replace.get("pattern").and_then(|p| p.get("String")).and_then(|p| p.as_str());
    match pattern {
        Some(pattern) if !pattern.is_empty() => content.div_ceil(pattern.len() as u64).max(1),
        // It may match nothing, before and after every byte.
        _ => 1 + 2 * content,
    }
}

/// Refuses what would take more memory than its size tells: a table of characters that says it is
/// longer than it is, and replacements that make text grow without bounds.
fn check_growth(text: &str) -> Result<(), DataError> {
    let skim: Skim =
        serde_json::from_str(text).map_err(|e| DataError::Tokenizer(format!("not a tokenizer.json: {e}")))?;
    for part in [&skim.normalizer, &skim.decoder] {
        let mut waiting: Vec<&serde_json::Value> = part.iter().collect();
        let mut grows = 1u64;
        while let Some(value) = waiting.pop() {
            match value {
                serde_json::Value::Array(values) => waiting.extend(values),
                serde_json::Value::Object(map) => {
                    if map.get("type").is_some_and(|t| t == "Replace") {
                        grows = grows.saturating_mul(growth(map));
                    }
                    waiting.extend(map.values());
                }
                _ => {}
            }
        }
        if grows > MOST_GROWTH {
            return Err(DataError::Tokenizer(format!(
                "its replacements make a text up to {grows} times as long; {MOST_GROWTH} times are the most"
            )));
        }
    }
    let mut waiting: Vec<serde_json::Value> = skim.normalizer.into_iter().collect();
    while let Some(value) = waiting.pop() {
        match value {
            serde_json::Value::Array(values) => waiting.extend(values),
            serde_json::Value::Object(map) => {
                if let Some(table) = map.get("precompiled_charsmap").and_then(|t| t.as_str())
                    && length_of(table).is_none_or(|length| length > 3 * (table.len() as u64 / 4))
                {
                    let what = "not a tokenizer.json: its precompiled_charsmap is cut short";
                    return Err(DataError::Tokenizer(what.into()));
                }
                waiting.extend(map.into_iter().map(|(_, value)| value));
            }
            _ => {}
        }
    }
    Ok(())
}

/// The length that a table in base64 begins with: four bytes, little-endian.
fn length_of(table: &str) -> Option<u64> {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digit = |b: &u8| DIGITS.iter().position(|d| d == b).map(|d| d as u64);
    let bits = table.as_bytes().get(..6)?.iter().try_fold(0u64, |bits, b| Some(bits << 6 | digit(b)?))?;
    Some(u64::from(((bits >> 4) as u32).swap_bytes()))
}

/// The token that the tokenizer's own template puts before a text.
fn own_begin(inner: &tokenizers::Tokenizer) -> Option<u32> {
    let encode = |special| inner.encode_fast("a", special).map(|e| e.get_ids().to_vec()).unwrap_or_default();
    let ids = |special| foreign::call(|| encode(special)).unwrap_or_default();
    let (with, without) = (ids(true), ids(false));
    with.first().copied().filter(|first| with.len() > without.len() && without.first() != Some(first))
}

/// Bytes that a token of a byte-level vocabulary stands for, which writes a byte as one character.
fn token_bytes(inner: &tokenizers::Tokenizer, id: u32) -> u8 {
    let Some(token) = inner.id_to_token(id) else { return 0 };
    let added = inner.get_added_vocabulary().get_vocab().contains_key(&token);
    let n = if added { token.len() } else { token.chars().count() };
    u8::try_from(n).unwrap_or(u8::MAX)
}

/// Whether tokens tell how many bytes of text they stand for: those of byte-level vocabularies
/// whose texts are taken as they are.
fn tells_bytes(inner: &tokenizers::Tokenizer) -> bool {
    let prefix = |level: &ByteLevel| level.add_prefix_space;
    let plain = match inner.get_pre_tokenizer() {
        Some(PreTokenizerWrapper::ByteLevel(level)) => !prefix(level),
        Some(PreTokenizerWrapper::Sequence(list)) => {
            !list.as_ref().iter().any(|p| matches!(p, PreTokenizerWrapper::ByteLevel(level) if prefix(level)))
        }
        _ => false,
    };
    let byte_level = matches!(inner.get_decoder(), Some(tokenizers::DecoderWrapper::ByteLevel(_)));
    // A token that takes spaces around it has other bytes each time.
    let strips = inner.get_added_tokens_decoder().values().any(|t| t.lstrip || t.rstrip);
    let longest = inner.get_vocab(true).keys().map(|token| token.chars().count()).max().unwrap_or(0);
    let whole = ByteLevel::alphabet().iter().all(|c| inner.token_to_id(&c.to_string()).is_some());
    byte_level
        && whole
        && plain
        && !strips
        && inner.get_normalizer().is_none()
        && longest <= usize::from(u8::MAX)
}

/// Learns a byte-level BPE vocabulary of `size` from texts and returns its `tokenizer.json`. Texts
/// are read one at a time; memory grows with the number of different words, not with the texts.
pub fn train(texts: impl Iterator<Item = String> + Send, size: usize) -> Result<String, DataError> {
    if size > LARGEST_VOCAB as usize {
        return Err(DataError::Tokenizer(format!(
            "a vocabulary of {size} is too large; {LARGEST_VOCAB} tokens are the most"
        )));
    }
    if size <= 256 {
        return Err(DataError::Tokenizer(format!(
            "a vocabulary of {size} cannot hold the 256 bytes and the end token; use at least 257, or the byte level"
        )));
    }
    let mut trainer = BpeTrainerBuilder::new()
        .show_progress(false)
        .vocab_size(size)
        .min_frequency(2)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .special_tokens(vec![AddedToken::from(ENDS[0], true)])
        .build();
    let problem = |e: tokenizers::Error| DataError::Tokenizer(e.to_string());
    let byte_level = ByteLevel::new(false, true, true);
    let mut tokenizer = TokenizerBuilder::new()
        .with_model(BPE::default())
        .with_normalizer(None::<tokenizers::NormalizerWrapper>)
        .with_pre_tokenizer(Some(byte_level))
        .with_post_processor(Some(byte_level))
        .with_decoder(Some(byte_level))
        .build()
        .map_err(problem)?;
    tokenizer.train(&mut trainer, texts).map_err(problem)?;
    tokenizer.to_string(true).map_err(problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_round_trip() {
        let t = Tokenizer::bytes();
        let ids = t.encode("héllo\n").unwrap();
        assert_eq!(ids.len(), 7);
        assert_eq!(t.decode(&ids), "héllo\n");
        assert_eq!(t.decode(&[104, 0, 300, 105]), "hi");
        assert_eq!(t.measure_pair("", "héllo\n").unwrap().0.bytes, [1; 7]);
    }

    #[test]
    fn a_trained_tokenizer_round_trips_and_compresses() {
        let text = "the cat sat on the mat, the cat sat on the hat. ".repeat(20);
        let json = train(std::iter::once(text.clone()), 300).unwrap();
        let t = Tokenizer::from_json(json.clone(), &[]).unwrap();
        assert_eq!(t.vocab(), t.end().max(t.vocab() as u32 - 1) as usize + 1);
        let ids = t.encode(&text).unwrap();
        assert!(ids.len() * 3 < text.len(), "{} tokens for {} bytes", ids.len(), text.len());
        assert_eq!(t.decode(&ids), text);
        let told = t.told().unwrap();
        assert_eq!(bytes_of(&t, &text), text.len());
        assert_eq!(told[t.end() as usize], 0);
        assert_eq!(t.fingerprint(), Tokenizer::from_json(json, &[]).unwrap().fingerprint());
        let strange = "naïve 🦀\u{7}";
        assert_eq!(t.decode(&t.encode(strange).unwrap()), strange);
    }

    #[test]
    fn bad_files_are_refused() {
        let problem = |text: &str| Tokenizer::from_json(text.into(), &[]).err().unwrap().to_string();
        assert!(problem("{").contains("not a tokenizer.json"));
        assert!(train(std::iter::empty(), 10).unwrap_err().to_string().contains("at least 257"));
    }

    /// A small vocabulary of pieces, with `▁` before every text and bytes to fall back on, as Llama
    /// 2 has it.
    fn pieces(change: impl FnOnce(&mut serde_json::Value)) -> Result<Tokenizer, DataError> {
        let mut vocab = serde_json::Map::new();
        let mut add = |token: String| {
            let id = vocab.len();
            vocab.insert(token, id.into());
        };
        ["<unk>", "<s>", "</s>", "<|turn|>"].iter().for_each(|t| add(t.to_string()));
        (0..256).for_each(|b| add(format!("<0x{b:02X}>")));
        ["▁", "a", "b", "c", "▁a", "▁b", "ab", "▁ab"].iter().for_each(|t| add(t.to_string()));
        let special = |id: u64, content: &str| {
            serde_json::json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true})
        };
        let mut json = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null,
            "added_tokens": [special(0, "<unk>"), special(1, "<s>"), special(2, "</s>"), special(3, "<|turn|>")],
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
            "pre_tokenizer": null, "post_processor": null,
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
            "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "vocab": vocab,
                "merges": ["▁ a", "▁ b", "a b", "▁ ab"]}
        });
        change(&mut json);
        Tokenizer::from_json(json.to_string(), &[])
    }

    #[test]
    fn pieces_of_a_text_are_those_of_the_whole() {
        let t = pieces(|_| {}).unwrap();
        let whole = t.encode("b\nab a").unwrap();
        let (pair, prompt) = t.encode_pair("b\nab", " a").unwrap();
        assert_eq!((pair, prompt), (whole.clone(), t.encode("b\nab").unwrap().len()));
        let first = t.encode("b\n").unwrap();
        assert_eq!([first, t.measure_further("ab a").unwrap().ids].concat(), whole);
        assert_ne!(t.encode("ab a").unwrap(), t.measure_further("ab a").unwrap().ids, "a text begins with ▁");
        // Written text goes on where the prompt ends.
        let written = &whole[whole.len() - 1..];
        assert_eq!(t.decode(written), "a");
        assert_eq!(t.decode_further(&whole[..whole.len() - 1], written), " a");
        assert_eq!(t.decode_further(&[t.begin()], written), "a");
        let bytes = Tokenizer::bytes();
        assert_eq!(bytes.measure_further("é").unwrap().ids, bytes.encode("é").unwrap());
        assert_eq!(bytes.decode_further(&[0xC3], &[0xA9]), "\u{FFFD}");
    }

    #[test]
    fn special_tokens_that_a_text_spells_are_text() {
        let t = pieces(|_| {}).unwrap();
        let ids = t.encode("a <unk> b").unwrap();
        assert!(ids.contains(&0));
        assert_eq!(bytes_of(&t, "a <unk> b"), "a <unk> b".len());
    }

    /// Bytes that the tokens of a text stand for.
    fn bytes_of(t: &Tokenizer, text: &str) -> usize {
        t.measure_pair("", text).unwrap().0.bytes.iter().sum::<u32>() as usize
    }

    /// Every kind of tokenizer counts the bytes of the text, whatever it does to it: pieces with
    /// and without bytes to fall back on, words in lower case, words without spaces, and texts in
    /// another normal form.
    #[test]
    fn the_bytes_of_a_text_are_those_of_its_tokens() {
        let json = |model: serde_json::Value, more: serde_json::Value| {
            let end = serde_json::json!({"id": 1, "content": "</s>", "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true});
            let mut json = serde_json::json!({"version": "1.0", "truncation": null, "padding": null,
                "added_tokens": [end], "normalizer": null, "pre_tokenizer": null, "post_processor": null,
                "decoder": null, "model": model});
            more.as_object().unwrap().iter().for_each(|(key, value)| json[key] = value.clone());
            Tokenizer::from_json(json.to_string(), &[]).unwrap()
        };
        let word_piece = serde_json::json!({"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {"[UNK]": 0, "</s>": 1, "a": 2, "##b": 3, "cafe": 4, "\u{4e2d}": 5}});
        let bert = serde_json::json!({"normalizer": {"type": "BertNormalizer", "clean_text": true,
                "handle_chinese_chars": true, "strip_accents": null, "lowercase": true},
            "pre_tokenizer": {"type": "BertPreTokenizer"}});
        let unigram = serde_json::json!({"type": "Unigram", "unk_id": 0, "byte_fallback": false,
            "vocab": [["<unk>", 0.0], ["</s>", 0.0], ["\u{2581}", -3.0], ["a", -2.0], ["\u{2581}ab", -1.0]]});
        let metaspace = serde_json::json!({"normalizer": {"type": "NFKC"},
            "pre_tokenizer": {"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true}});
        let words = serde_json::json!({"type": "WordLevel", "unk_token": "<unk>", "vocab": {"<unk>": 0, "</s>": 1, "a": 2}});
        let byte_level = {
            let text = "the cat sat on the mat, the cat sat on the hat. ".repeat(20);
            train(std::iter::once(text), 300).unwrap()
        };
        let nfc = {
            let mut json: serde_json::Value = serde_json::from_str(&byte_level).unwrap();
            json["normalizer"] = serde_json::json!({"type": "NFC"});
            Tokenizer::from_json(json.to_string(), &[]).unwrap()
        };
        let all = [
            ("BPE with bytes", pieces(|_| {}).unwrap(), false),
            ("BPE without", pieces(|json| json["model"]["byte_fallback"] = false.into()).unwrap(), false),
            ("WordPiece", json(word_piece, bert), false),
            ("Unigram", json(unigram, metaspace), false),
            ("words", json(words, serde_json::json!({"pre_tokenizer": {"type": "Whitespace"}})), false),
            ("byte level", Tokenizer::from_json(byte_level, &[]).unwrap(), true),
            ("byte level in NFC", nfc, false),
        ];
        for (name, t, told) in all {
            assert_eq!(t.told().is_some(), told, "{name}");
            for text in ["ab", "  ab  a\n", "Café 中 ﬁ e\u{301}", "naïve 🦀 </s> a\u{7}b", "a\t\n\n a"]
            {
                assert_eq!(bytes_of(&t, text), text.len(), "{name}: {text:?}");
                let further = t.measure_further(text).unwrap();
                assert_eq!(
                    further.bytes.iter().sum::<u32>() as usize,
                    text.len(),
                    "{name}: {text:?} further"
                );
                let (pair, _) = t.measure_pair("ab\n", text).unwrap();
                assert_eq!(
                    pair.bytes.iter().sum::<u32>() as usize,
                    3 + text.len(),
                    "{name}: {text:?} paired"
                );
                assert_eq!(pair.ids.len(), pair.bytes.len());
            }
        }
    }

    #[test]
    fn ends_are_those_that_the_folder_says() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        std::fs::write(&path, pieces(|_| {}).unwrap().json().unwrap()).unwrap();
        let open = |name: &str, text: &str| {
            std::fs::write(folder.path().join(name), text).unwrap();
            Tokenizer::from_file(&path).unwrap()
        };
        let plain = Tokenizer::from_file(&path).unwrap();
        assert_eq!((plain.end(), plain.ends(), plain.generation_config()), (2, &[2][..], None));
        let t = open("config.json", r#"{"eos_token_id": 3}"#);
        assert_eq!((t.end(), t.ends()), (3, &[3][..]));
        assert_ne!(t.fingerprint(), plain.fingerprint());
        let t = open("generation_config.json", r#"{"eos_token_id": [3, 2, 999]}"#);
        assert_eq!((t.end(), t.ends()), (2, &[3, 2][..]));
        assert_eq!(t.fingerprint(), plain.fingerprint());
        assert_eq!(open("generation_config.json", &t.generation_config().unwrap()).ends(), t.ends());
        assert_eq!((t.special("<|turn|>"), t.special("ab")), (Some(3), None));
    }

    #[test]
    fn tokenizers_that_are_random_or_grow_text_without_bounds_are_refused() {
        let refused =
            |change: &dyn Fn(&mut serde_json::Value)| pieces(|json| change(json)).err().unwrap().to_string();
        assert!(refused(&|json| json["model"]["dropout"] = 0.1.into()).contains("drops merges at random"));
        let double = serde_json::json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"});
        let nothing =
            serde_json::json!({"type": "Replace", "pattern": {"Regex": "x*"}, "content": "y".repeat(99)});
        for (part, list) in [("normalizer", "normalizers"), ("decoder", "decoders")] {
            for steps in [vec![double.clone(); 30], vec![nothing.clone()]] {
                let error =
                    refused(&|json| json[part] = serde_json::json!({"type": "Sequence", list: steps}));
                assert!(error.contains("times as long; 64 times are the most"), "{error}");
            }
        }
        assert!(train(std::iter::empty(), 1 << 62).unwrap_err().to_string().contains("is too large"));
    }
}

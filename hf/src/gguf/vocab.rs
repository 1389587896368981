//! Tokenizers, both ways: between `tokenizer.json` and the keys `tokenizer.*` of a GGUF file.
//!
//! *Promise*: tokens keep their ids. A file of dreamc has its whole `tokenizer.json`
//! (`tokenizer.huggingface.json`), which is read back to the byte; of other files one is made from
//! tokens, kinds, merges or scores, for the two models that BPE has there: bytes (`gpt2`) and
//! pieces with bytes to fall back on (`llama`).

use super::file::Gguf;
use super::value::{Value, code};
use serde_json::{Map, Value as Json, json};
use std::collections::HashMap;

const TOKENS: &str = "tokenizer.ggml.tokens";
const KINDS: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
const SCORES: &str = "tokenizer.ggml.scores";
const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const BEGIN: &str = "tokenizer.ggml.bos_token_id";
const END: &str = "tokenizer.ggml.eos_token_id";
const UNKNOWN: &str = "tokenizer.ggml.unknown_token_id";
const ADD_BEGIN: &str = "tokenizer.ggml.add_bos_token";
const ADD_SPACE: &str = "tokenizer.ggml.add_space_prefix";
const TEMPLATE: &str = "tokenizer.chat_template";
const WHOLE: &str = "tokenizer.huggingface.json";
/// Ends of texts apart from the one.
const ENDS: [&str; 2] = ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"];

/// Kinds of tokens.
mod kind {
    pub const NORMAL: i128 = 1;
    pub const UNKNOWN: i128 = 2;
    pub const CONTROL: i128 = 3;
    pub const USER: i128 = 4;
    pub const UNUSED: i128 = 5;
    pub const BYTE: i128 = 6;
}

/// How texts are split before merges: llama.cpp's name, and the expression of `tokenizer.json`.
const SPLITS: [(&str, &str); 4] = [
    (
        "llama-bpe",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    (
        "qwen2",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    (
        "gpt-4o",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    ("gpt-2", r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"),
];

/// The tokenizer of a model that leaves.
pub struct Leaving<'a> {
    /// Its `tokenizer.json`.
    pub text: &'a str,
    /// The model's tokens.
    pub vocab: u64,
    /// The tokens that begin and end a text.
    pub ends: (u32, u32),
    /// Whether it puts the begin token before a text.
    pub begins: bool,
    /// The template of chats.
    pub template: Option<String>,
}

/// The keys of a tokenizer in a file, and notes on them for a person.
pub type Keys = (Vec<(String, Value)>, Vec<String>);

/// The keys of a tokenizer, and notes.
pub fn write(own: &Leaving) -> Result<Keys, String> {
    let json: Json = serde_json::from_str(own.text).map_err(|e| format!("tokenizer.json is no JSON: {e}"))?;
    let model = &json["model"];
    let mut notes = vec![];
    let vocab = model["vocab"].as_object().filter(|_| model["type"] == "BPE");
    let Some(vocab) = vocab else {
        let found = &model["type"];
        return Err(format!("tokenizer.json is of the model {found}; BPE has a form in llama.cpp"));
    };
    let pieces = model["byte_fallback"] == true;
    let mut tokens: Vec<(String, i128)> =
        (0..own.vocab).map(|id| (format!("[PAD{id}]"), kind::UNUSED)).collect();
    let mut put = |id: Option<u64>, text: &str, of: i128| {
        if let Some(token) = id.and_then(|id| tokens.get_mut(id as usize)) {
            *token = (text.into(), of);
        }
    };
    for (text, id) in vocab {
        let byte = pieces && text.len() == 6 && text.starts_with("<0x") && text.ends_with('>');
        put(id.as_u64(), text, if byte { kind::BYTE } else { kind::NORMAL });
    }
    for token in json["added_tokens"].as_array().into_iter().flatten() {
        let text = token["content"].as_str().unwrap_or_default();
        let unknown = model["unk_token"] == text;
        let of = match token["special"] == true {
            true if unknown => kind::UNKNOWN,
            true => kind::CONTROL,
            false => kind::USER,
        };
        put(token["id"].as_u64(), text, of);
    }
    let merges = merges(model);
    let mut values = vec![
        (MODEL.to_string(), Value::Text(if pieces { "llama" } else { "gpt2" }.into())),
        (TOKENS.into(), Value::texts(tokens.iter().map(|(text, _)| text.clone()))),
        (
            KINDS.into(),
            Value::Array(code::I32, tokens.iter().map(|(_, of)| Value::Whole(*of, code::I32)).collect()),
        ),
    ];
    if pieces {
        values.push((SCORES.into(), scores(&tokens, &merges)));
        let prefixed = own.text.contains(r#""Prepend""#) || own.text.contains(r#""prepend_scheme":"first""#);
        values.push((ADD_SPACE.into(), Value::Bool(prefixed)));
    } else {
        let (pre, known) = split(&json["pre_tokenizer"]);
        if !known && !merges.is_empty() {
            notes.push(format!("llama.cpp is told to split texts as `{pre}`, and tokenizer.json splits them otherwise: give it token ids"));
        }
        values.push((PRE.into(), Value::Text(pre.into())));
        values.push((MERGES.into(), Value::texts(merges.into_iter().map(|(a, b)| format!("{a} {b}")))));
    }
    values.push((BEGIN.into(), Value::whole(own.ends.0.into())));
    values.push((END.into(), Value::whole(own.ends.1.into())));
    if let Some(id) =
        model["unk_token"].as_str().and_then(|text| tokens.iter().position(|(own, _)| own == text))
    {
        values.push((UNKNOWN.into(), Value::whole(id as u64)));
    }
    values.push((ADD_BEGIN.into(), Value::Bool(own.begins)));
    values.extend(own.template.clone().map(|text| (TEMPLATE.into(), Value::Text(text))));
    values.push((WHOLE.into(), Value::Text(own.text.into())));
    Ok((values, notes))
}

/// The keys of a model without a tokenizer.
pub fn none() -> Vec<(String, Value)> {
    vec![(MODEL.into(), Value::Text("none".into()))]
}

/// The merges of a model: pairs, or texts of two with a space between.
fn merges(model: &Json) -> Vec<(String, String)> {
    let one = |merge: &Json| match merge {
        Json::String(text) => text.split_once(' ').map(|(a, b)| (a.to_string(), b.to_string())),
        Json::Array(pair) => match pair.as_slice() {
            [Json::String(a), Json::String(b)] => Some((a.clone(), b.clone())),
            _ => None,
        },
        _ => None,
    };
    model["merges"].as_array().into_iter().flatten().filter_map(one).collect()
}

/// Scores of pieces: the sooner a merge makes one, the higher.
fn scores(tokens: &[(String, i128)], merges: &[(String, String)]) -> Value {
    let mut ranks: HashMap<String, usize> = HashMap::new();
    for (rank, (a, b)) in merges.iter().enumerate() {
        ranks.entry(format!("{a}{b}")).or_insert(rank);
    }
    let score = |(text, of): &(String, i128)| match ranks.get(text) {
        Some(rank) => -(*rank as f32) - 1.0,
        None if *of == kind::NORMAL => -(merges.len() as f32) - 1.0,
        None => 0.0,
    };
    Value::Array(code::F32, tokens.iter().map(|token| Value::F32(score(token))).collect())
}

/// llama.cpp's name of how texts are split, and whether it is that.
fn split(pre: &Json) -> (&'static str, bool) {
    let own = |json: &Json| json["pattern"]["Regex"].as_str().map(String::from);
    let all: Vec<&Json> = match pre["pretokenizers"].as_array() {
        Some(all) => all.iter().collect(),
        None => vec![pre],
    };
    let regex = all.iter().find_map(|json| own(json));
    let bytes = all.iter().any(|json| json["type"] == "ByteLevel" && json["use_regex"] != false);
    match regex {
        Some(regex) => match SPLITS.iter().find(|(_, known)| *known == regex) {
            Some((name, _)) => (name, true),
            None => ("llama-bpe", false),
        },
        None => ("gpt-2", bytes),
    }
}

/// The files of a tokenizer that a file has: `tokenizer.json`, `tokenizer_config.json` and
/// `generation_config.json`, and notes.
pub struct Read {
    /// The content of `tokenizer.json`.
    pub tokenizer: Option<String>,
    /// The content of `tokenizer_config.json`.
    pub config: Option<String>,
    /// The content of `generation_config.json`.
    pub generation: String,
    /// Notes.
    pub notes: Vec<String>,
}

/// The tokenizer of a file.
pub fn read(file: &Gguf) -> Result<Read, String> {
    let whole = |key: &str| file.get(key).and_then(Value::as_whole);
    let mut notes = vec![];
    let mut generation = Map::new();
    let ends: Vec<u64> = whole(END).into_iter().chain(ENDS.iter().filter_map(|key| whole(key))).collect();
    match ends.as_slice() {
        [] => {}
        [one] => drop(generation.insert("eos_token_id".into(), json!(one))),
        several => drop(generation.insert("eos_token_id".into(), json!(several))),
    }
    generation.extend(whole(BEGIN).map(|id| ("bos_token_id".to_string(), json!(id))));
    let tokens = tokens(file)?;
    let tokenizer = match file.get(MODEL).and_then(Value::as_text) {
        None | Some("none" | "no_vocab") => None,
        Some(_) if tokens.is_empty() => None,
        Some(model) => match kept(file, &tokens) {
            Some(text) => Some(text),
            None => match model {
                "gpt2" => Some(bytes(file, &tokens, &mut notes)?),
                "llama" => Some(pieces(file, &tokens)?),
                other => {
                    notes.push(format!(
                        "a tokenizer of the model `{other}` is not read: ids can be given, texts cannot"
                    ));
                    None
                }
            },
        },
    };
    let text = |id: Option<u64>| id.and_then(|id| tokens.get(id as usize)).map(|(text, _)| json!(text));
    let config = file.get(TEMPLATE).and_then(Value::as_text).map(|template| {
        let mut map = Map::new();
        map.insert("tokenizer_class".into(), json!("PreTrainedTokenizerFast"));
        map.extend(text(whole(BEGIN)).map(|text| ("bos_token".to_string(), text)));
        map.extend(text(whole(END)).map(|text| ("eos_token".to_string(), text)));
        map.insert("chat_template".into(), json!(template));
        pretty(&Json::Object(map))
    });
    let generation = pretty(&Json::Object(generation));
    Ok(Read { tokenizer, config, generation, notes })
}

fn pretty(json: &Json) -> String {
    serde_json::to_string_pretty(json).unwrap_or_default() + "\n"
}

/// Tokens with their kinds.
fn tokens(file: &Gguf) -> Result<Vec<(String, i128)>, String> {
    let Some(texts) = file.get(TOKENS).and_then(Value::as_array) else { return Ok(vec![]) };
    let kinds = file.get(KINDS).and_then(Value::as_array).unwrap_or_default();
    if !kinds.is_empty() && kinds.len() != texts.len() {
        return Err(format!("{TOKENS} has {} values and {KINDS} {}", texts.len(), kinds.len()));
    }
    let of = |i: usize| match kinds.get(i) {
        Some(Value::Whole(x, _)) => *x,
        _ => kind::NORMAL,
    };
    let one = |(i, text): (usize, &Value)| match text.as_text() {
        Some(text) => Ok((text.to_string(), of(i))),
        None => Err(format!("{TOKENS} has {text:?} among its texts")),
    };
    texts.iter().enumerate().map(one).collect()
}

/// The whole `tokenizer.json` that a file has, where its tokens are those of the other keys.
fn kept(file: &Gguf, tokens: &[(String, i128)]) -> Option<String> {
    let text = file.get(WHOLE)?.as_text()?;
    let json: Json = serde_json::from_str(text).ok()?;
    let same = |id: Option<u64>, text: &str| {
        id.and_then(|id| tokens.get(id as usize)).is_some_and(|(own, _)| own == text)
    };
    let added = json["added_tokens"].as_array()?;
    let is_added = |id: &Json| added.iter().any(|token| token["id"] == *id);
    let vocab = json["model"]["vocab"].as_object()?;
    let all = vocab.iter().all(|(text, id)| same(id.as_u64(), text) || is_added(id));
    let rest = added.iter().all(|t| same(t["id"].as_u64(), t["content"].as_str().unwrap_or_default()));
    (all && rest).then(|| text.to_string())
}

/// Tokens that stand in texts as they are written.
fn added(tokens: &[(String, i128)]) -> Vec<Json> {
    let one = |(id, (text, of)): (usize, &(String, i128))| {
        let special = *of == kind::CONTROL || *of == kind::UNKNOWN;
        (special || *of == kind::USER).then(|| {
            json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": special})
        })
    };
    tokens.iter().enumerate().filter_map(one).collect()
}

/// A post-processor that puts the begin token before texts, where the file says so.
fn template(file: &Gguf, tokens: &[(String, i128)], usual: bool) -> Json {
    let begins = file.get(ADD_BEGIN).and_then(Value::as_flag).unwrap_or(usual);
    let id = file.get(BEGIN).and_then(Value::as_whole);
    let Some((id, (text, _))) = id.and_then(|id| Some((id, tokens.get(id as usize)?))).filter(|_| begins)
    else {
        return Json::Null;
    };
    let special = json!({"SpecialToken": {"id": text, "type_id": 0}});
    let (a, b) =
        (json!({"Sequence": {"id": "A", "type_id": 0}}), json!({"Sequence": {"id": "B", "type_id": 1}}));
    json!({"type": "TemplateProcessing", "single": [special, a], "pair": [special, a, b],
           "special_tokens": {text: {"id": text, "ids": [id], "tokens": [text]}}})
}

/// The vocabulary; each text may be there once.
fn vocabulary(tokens: &[(String, i128)]) -> Result<Map<String, Json>, String> {
    let mut vocab = Map::new();
    for (id, (text, of)) in tokens.iter().enumerate() {
        if *of != kind::UNUSED && vocab.insert(text.clone(), json!(id)).is_some() {
            return Err(format!("{TOKENS} has {text:?} twice"));
        }
    }
    Ok(vocab)
}

/// The `tokenizer.json` of bytes and merges.
fn bytes(file: &Gguf, tokens: &[(String, i128)], notes: &mut Vec<String>) -> Result<String, String> {
    let vocab = vocabulary(tokens)?;
    let mut merges = vec![];
    for merge in file.get(MERGES).and_then(Value::as_array).unwrap_or_default() {
        let pair = merge.as_text().and_then(|text| text.split_once(' '));
        let Some((a, b)) = pair.filter(|(a, b)| vocab.contains_key(*a) && vocab.contains_key(*b)) else {
            return Err(format!("{MERGES} has {merge:?}, which is no two tokens"));
        };
        merges.push(json!([a, b]));
    }
    let pre = file.get(PRE).and_then(Value::as_text).unwrap_or("default");
    let level = |regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": regex});
    let alias = match pre {
        "llama3" | "llama-v3" | "smaug-bpe" => "llama-bpe",
        "deepseek-r1-qwen" => "qwen2",
        other => other,
    };
    let pre_tokenizer = match SPLITS.iter().find(|(name, _)| *name == alias) {
        Some(("gpt-2", _)) => level(true),
        Some((_, regex)) => {
            let split = json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
            json!({"type": "Sequence", "pretokenizers": [split, level(false)]})
        }
        None => {
            notes.push(format!("texts are split as those of GPT-2: `{PRE}` is `{pre}`, which is not known; token ids are exact"));
            level(true)
        }
    };
    // Words that are tokens are not merged anew, as in llama.cpp.
    let ignore = alias == "llama-bpe";
    let json = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added(tokens), "normalizer": null,
        "pre_tokenizer": pre_tokenizer, "post_processor": template(file, tokens, ignore), "decoder": level(true),
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": ignore,
                  "vocab": vocab, "merges": merges}
    });
    Ok(pretty(&json))
}

/// The `tokenizer.json` of pieces with scores, and bytes to fall back on.
fn pieces(file: &Gguf, tokens: &[(String, i128)]) -> Result<String, String> {
    let vocab = vocabulary(tokens)?;
    let scores = file.get(SCORES).and_then(Value::as_array).unwrap_or_default();
    if scores.len() != tokens.len() {
        return Err(format!("{TOKENS} has {} values and {SCORES} {}", tokens.len(), scores.len()));
    }
    // Whatever two pieces make a third may be merged, the ones of the highest score first.
    let mut merges: Vec<(f64, usize, &str, &str)> = vec![];
    for (id, (text, of)) in tokens.iter().enumerate() {
        if *of != kind::NORMAL {
            continue;
        }
        let score = scores[id].as_real().unwrap_or(0.0);
        for (at, _) in text.char_indices().skip(1) {
            let (a, b) = text.split_at(at);
            if vocab.contains_key(a) && vocab.contains_key(b) {
                merges.push((score, id, a, b));
            }
        }
    }
    let number = |text: &str| vocab.get(text).and_then(Json::as_u64).unwrap_or(0);
    merges.sort_by(|x, y| {
        let of = |m: &(f64, usize, &str, &str)| (m.1, number(m.2), number(m.3));
        y.0.total_cmp(&x.0).then_with(|| of(x).cmp(&of(y)))
    });
    let merges: Vec<Json> = merges.iter().map(|(.., a, b)| json!([a, b])).collect();
    let unknown = file.get(UNKNOWN).and_then(Value::as_whole).and_then(|id| tokens.get(id as usize));
    let unknown = unknown.map(|(text, _)| text.clone());
    let prefixed = file.get(ADD_SPACE).and_then(Value::as_flag).unwrap_or(true);
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let normalizer = match prefixed {
        true => json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]}),
        false => replace,
    };
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    decoders.extend(prefixed.then(|| json!({"type": "Strip", "content": " ", "start": 1, "stop": 0})));
    let json = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added(tokens),
        "normalizer": normalizer, "pre_tokenizer": null, "post_processor": template(file, tokens, true),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {"type": "BPE", "dropout": null, "unk_token": unknown, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
                  "vocab": vocab, "merges": merges}
    });
    Ok(pretty(&json))
}

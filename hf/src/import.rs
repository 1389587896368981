//! Models of other programs, made ours.
//!
//! *In*: `config.json`, `model.safetensors` or shards with `model.safetensors.index.json`, perhaps
//! `tokenizer.json`. *Out*: a folder of `spec.yaml`, `model.safetensors` (names of
//! `docs/dev/semantics.md` section 11, the specification in its metadata), `checksums.txt`, and the
//! folder's own `config.json`, `generation_config.json` and files of the tokenizer as they were,
//! which every command opens as it opens a checkpoint, and which are there for the way back.

use super::config::Config;
use super::family::Slot;
use super::tensors::{self, Shards};
use super::{HfError, bytes, json};
use dreamc_compiler::compile;
use dreamc_data::{Tokenizer, sums};
use dreamc_dsl::{Spec, Spelling};
use dreamc_runtime::checkpoint::folder;
use dreamc_runtime::train::prepare;
use serde_json::{Map, Value};
use std::io::{self, Write};
use std::path::Path;

/// An imported model.
#[derive(Debug)]
pub struct Imported {
    /// Its specification.
    pub spec: Spec,
    /// Number of parameters.
    pub parameters: u64,
    /// Bytes of all tensors.
    pub bytes: u64,
    /// Notes for the user.
    pub notes: Vec<String>,
    /// Whether there is a tokenizer.
    pub reads_text: bool,
}

/// Imports the Hugging Face folder `from` as the folder `to`, a model called `name`. Fields of its
/// configuration that are not known are refused, but for those to `ignore`. A folder that is there
/// already is replaced with `force`, and only if it is one of ours.
pub fn hugging_face(
    from: &Path,
    to: &Path,
    name: &str,
    force: bool,
    ignore: &[String],
) -> Result<Imported, HfError> {
    folder::free(to, force)?;
    let path = from.join("config.json");
    missing(from, &path)?;
    let map = json(&path)?;
    let noises: Vec<String> = noises(&map).collect();
    let config = Config::read(&path, map, ignore)?;
    let mut shards = Shards::open(from)?;
    shards.rename(config.family.renamed);
    let mut notes = config.notes.clone();
    notes.extend(noises);
    notes.extend(ignore.iter().map(|field| format!("the field `{field}` is ignored")));
    let tokenizer = tokenizer(from, &config)?;
    notes.extend(tokenizer.as_ref().map(|t| contradiction(from, t)).transpose()?.flatten());
    notes.extend(tokenizer.as_ref().and_then(|t| lost_ends(from, t)));
    if tokenizer.is_none() {
        let note = "no tokenizer.json: text cannot be read or written, token ids can (`dreamc probe`)";
        notes.push(note.into());
    }
    let kept = kept(from)?;
    let stored = shards.dtype(config.family.ends[0]);
    let specification =
        |d: dreamc_dsl::Diagnostics| HfError::Specification { path: path.clone(), problem: d.render(false) };
    let (spec, text) = config.specification(name, stored).map_err(specification)?;
    let layers = super::config::layers(&spec.model).map_err(|problem| HfError::refused(&path, problem))?;

    // One token is enough to learn which tensors the model has.
    let compiled = compile(&spec, &prepare::forward(1, 1))?;
    let made = tensors::assemble(&config, &layers, &compiled.tensors, &shards)?;
    notes.extend(made.notes);
    let resolved = dreamc_dsl::show(&spec, Spelling::Yaml);
    let metadata = [("format", "dreamc"), ("spec", resolved.as_str())];
    let mut files: Vec<(&str, sums::Fill)> = vec![
        ("spec.yaml", Box::new(|out: &mut dyn Write| out.write_all(text.as_bytes()))),
        ("model.safetensors", Box::new(|out: &mut dyn Write| shards.write(out, &metadata, &made.tensors))),
    ];
    for (name, bytes) in &kept {
        files.push((*name, Box::new(move |out: &mut dyn Write| out.write_all(bytes))));
    }
    folder::write(to, files)?;
    let bytes = made.tensors.iter().map(|t| t.bytes()).sum();
    let parameters = dreamc_runtime::model::parameters(&compiled);
    Ok(Imported { spec, parameters, bytes, notes, reads_text: tokenizer.is_some() })
}

/// Says of a folder without `config.json` why it is no model.
fn missing(from: &Path, path: &Path) -> Result<(), HfError> {
    if path.exists() {
        return Ok(());
    }
    if from.join("adapter_config.json").is_file() {
        let problem = "is an adapter of another model (PEFT): import that model, then the adapter with `dreamc import peft`";
        return Err(HfError::refused(from, problem));
    }
    if !from.is_dir() {
        let problem = "there is no such folder; a model of the hub is downloaded first, with `hf download NAME --local-dir DIR`";
        let error = io::Error::new(io::ErrorKind::NotFound, problem);
        return Err(HfError::Io { path: from.to_path_buf(), error });
    }
    Err(HfError::refused(from, "has no config.json; is this the folder of a model of transformers?"))
}

/// The files of the folder that are kept as they are, for generation and for the way back.
fn kept(from: &Path) -> Result<Vec<(&'static str, Vec<u8>)>, HfError> {
    let mut found = vec![];
    for name in folder::KEPT {
        let path = from.join(name);
        if path.is_file() {
            found.push((name, bytes(&path)?));
        }
    }
    Ok(found)
}

/// Says where the files of a tokenizer differ on its begin token.
fn contradiction(from: &Path, tokenizer: &Tokenizer) -> Result<Option<String>, HfError> {
    let path = from.join("tokenizer_config.json");
    if !path.is_file() {
        return Ok(None);
    }
    let said = json(&path)?.get("add_bos_token").and_then(Value::as_bool);
    Ok(said.filter(|said| *said != tokenizer.begins()).map(|said| {
        let puts = if said { "puts no begin token before a text" } else { "puts a begin token before a text" };
        format!(
            "tokenizer_config.json says `add_bos_token: {said}`, and the post-processor of tokenizer.json {puts}: tokenizer.json \
             counts, as in transformers 5; version 4 follows tokenizer_config.json"
        )
    }))
}

/// Says of each noise that `transformers` trains with that there is none here.
fn noises(map: &Map<String, Value>) -> impl Iterator<Item = String> {
    let names = ["attention_dropout", "embd_pdrop", "resid_pdrop", "router_jitter_noise"];
    let share = move |name: &&str| map.get(*name).and_then(Value::as_f64).is_some_and(|share| share > 0.0);
    names
        .into_iter()
        .filter(share)
        .map(|name| format!("{name}: training has no such noise, and nothing is drawn"))
}

/// Says of an `eos_token_id` that is no token which one ends texts in its place.
fn lost_ends(from: &Path, tokenizer: &Tokenizer) -> Option<String> {
    let token = |value: &Value| value.as_u64().is_some_and(|id| id < tokenizer.vocab() as u64);
    for name in ["generation_config.json", "config.json"] {
        let Ok(map) = json(&from.join(name)) else { continue };
        let lost = match map.get("eos_token_id") {
            None | Some(Value::Null) => continue,
            Some(Value::Array(ids)) => ids.iter().find(|id| !token(id))?.clone(),
            Some(id) => Some(id).filter(|id| !token(id))?.clone(),
        };
        let ends: Vec<String> = tokenizer.ends().iter().map(u32::to_string).collect();
        let ends = ends.join(", ");
        return Some(format!(
            "{name}: `eos_token_id` {lost} is no token of tokenizer.json; texts end with {ends}"
        ));
    }
    None
}

/// The tokenizer, where there is one.
fn tokenizer(from: &Path, config: &Config) -> Result<Option<Tokenizer>, HfError> {
    let path = from.join("tokenizer.json");
    if !path.is_file() {
        return Ok(None);
    }
    let tokenizer = Tokenizer::from_file(&path)?;
    if tokenizer.vocab() as u64 > config.whole(Slot::Vocab) {
        let problem = format!(
            "has {} tokens, config.json says vocab_size {}",
            tokenizer.vocab(),
            config.whole(Slot::Vocab)
        );
        return Err(HfError::refused(&path, problem));
    }
    Ok(Some(tokenizer))
}

//! Models of dreamc, made those of `transformers`, and their weights alone.
//!
//! *In*: weights, their specification, and the folders where files of the model they came from may
//! be. *Out*: a folder that `transformers` loads, a file of tensors, or a checkpoint of PyTorch's
//! distributed format. *Promise*: a model of a family of [`FAMILIES`](super::family::FAMILIES)
//! leaves as that family, so that importing it gives the same specification and the same bytes; any
//! other leaves as a [`package`](super::package). Nothing that exists is written over.

use super::config::{self, Config, torch};
use super::fold::Fold;
use super::tensors::{Theirs, disassemble};
use super::{HfError, MERGE_FIRST, bytes, json, package};
use dreamc_compiler::compile;
use dreamc_data::files;
use dreamc_data::{Tokenizer, sums};
use dreamc_dsl::{Spec, Spelling};
use dreamc_runtime::checkpoint::safetensors::{self, Dtype};
use dreamc_runtime::checkpoint::{Checkpoint, CheckpointError, Weights, dcp, folder};
use dreamc_runtime::train::prepare;
use serde_json::{Map, Value, json};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// A model to be exported.
pub struct Model<'a> {
    /// Its specification.
    pub spec: &'a Spec,
    /// Its weights.
    pub weights: &'a Weights,
    /// Its tokenizer, where it has one.
    pub tokenizer: Option<&'a Tokenizer>,
    /// Folders where files of the model it was imported from may be, likeliest first.
    pub beside: Vec<PathBuf>,
    /// The type to store weights in; as they are stored where absent.
    pub dtype: Option<Dtype>,
    /// The text of its ledger, where there is one.
    pub ledger: Option<String>,
}

/// A model that was exported.
#[derive(Debug)]
pub struct Exported {
    /// The class of `transformers` that loads it.
    pub class: String,
    /// Whether the class is in the folder, so that loading it takes `trust_remote_code`.
    pub package: bool,
    /// Number of tensors.
    pub tensors: usize,
    /// Bytes of all tensors.
    pub bytes: u64,
    /// Notes for the user.
    pub notes: Vec<String>,
}

const CONFIG: &str = "config.json";
const GENERATION: &str = "generation_config.json";
const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";

/// Exports a model as the folder `to`: as a model of a family where it is one, unless `native` is
/// false.
pub fn hugging_face(model: &Model, to: &Path, native: bool) -> Result<Exported, HfError> {
    if model.spec.model.adapt.is_some() {
        return Err(HfError::Export(MERGE_FIRST.into()));
    }
    folder::free(to, false).map_err(|error| match error {
        CheckpointError::Io { .. } => error.into(),
        _ => HfError::Exists { path: to.to_path_buf() },
    })?;
    let kept = match model.kept(CONFIG) {
        Some(path) => json(&path)?,
        None => Map::new(),
    };
    let dtype = stored(model)?;
    // Training keeps f32; a tuned model leaves in the type in which it came.
    let family_dtype = model.dtype.or_else(|| typed(&kept)).unwrap_or(dtype);
    let likely = kept.get("model_type").and_then(Value::as_str);
    let family = match native {
        true => config::recognise(model.spec, family_dtype, likely, &kept),
        false => Err("the package is asked for".into()),
    };
    match family {
        Ok(config) => as_family(model, &config, (family_dtype, &Fold::default()), &kept, to),
        Err(why) => {
            if let (true, Some((spec, fold))) = (native, Fold::of(model.spec, &ours(model)?))
                && let Ok(config) = config::recognise(&spec, family_dtype, likely, &kept)
            {
                let folded = Model {
                    spec: &spec,
                    weights: model.weights,
                    tokenizer: model.tokenizer,
                    beside: model.beside.clone(),
                    dtype: model.dtype,
                    ledger: model.ledger.clone(),
                };
                let mut exported = as_family(&folded, &config, (family_dtype, &fold), &kept, to)?;
                exported.notes.push(format!(
                    "{} has no key for it and weights stand for it: {}",
                    exported.class,
                    fold.what.join(", ")
                ));
                return Ok(exported);
            }
            let mut exported = package::write(model, dtype, to)?;
            if native {
                exported.notes.insert(0, format!("no class of transformers computes it: {why}"));
            }
            Ok(exported)
        }
    }
}

/// An error where something is.
fn absent(to: &Path) -> Result<(), HfError> {
    match to.symlink_metadata() {
        Ok(_) => Err(HfError::Exists { path: to.to_path_buf() }),
        Err(_) => Ok(()),
    }
}

/// Writes the weights of a model under their own names, in one file.
pub fn weights(model: &Model, to: &Path) -> Result<Exported, HfError> {
    let dtype = model.dtype;
    let list = ours(model)?;
    let entries: Vec<Theirs> = list.into_iter().map(Theirs::ours).collect();
    let spec = dreamc_dsl::show(model.spec, Spelling::Yaml);
    let metadata = [("format", "pt"), ("spec", spec.as_str())];
    let size = size(model, &entries, dtype)?;
    absent(to)?;
    files::write_new(to, |out| write((model, &Fold::default()), &entries, dtype, &metadata, out))
        .map_err(|error| HfError::Io { path: to.to_path_buf(), error })?;
    let (tensors, notes) = (entries.len(), vec![]);
    Ok(Exported { class: String::new(), package: false, tensors, bytes: size, notes })
}

/// Writes the weights of a model, and the optimizer's tensors and the step of a checkpoint, as a
/// folder of `files` files that `torch.distributed.checkpoint` reads: a state dict of `model`,
/// `optimizer` and `step`.
pub fn distributed(
    model: &Model,
    checkpoint: Option<&Checkpoint>,
    files: usize,
    to: &Path,
) -> Result<Exported, HfError> {
    let theirs: Vec<Theirs> = ours(model)?.into_iter().map(Theirs::ours).collect();
    let types = types(model, &theirs, model.dtype)?;
    let bytes = size(model, &theirs, model.dtype)?;
    let entry = |of: &str, name: &str, shape: &[u64], dtype: Dtype| dcp::Entry {
        path: vec![of.into(), name.into()],
        shape: shape.to_vec(),
        dtype,
    };
    let mut entries: Vec<dcp::Entry> =
        theirs.iter().zip(&types).map(|(t, &dtype)| entry("model", &t.name, &t.shape, dtype)).collect();
    if let Some(checkpoint) = checkpoint {
        let optimizer = checkpoint.optimizer.entries();
        entries.extend(optimizer.map(|(name, shape)| entry("optimizer", name, shape, Dtype::F32)));
        entries.push(dcp::Entry { path: vec!["step".into()], shape: vec![], dtype: Dtype::I64 });
    }
    let read = |n: usize, first: u64, elements: u64, out: &mut dyn Write| {
        let dcp::Entry { path, dtype, .. } = &entries[n];
        let stored = match (path[0].as_str(), path.last()) {
            ("model", Some(name)) => model.weights.stored(name),
            ("optimizer", Some(name)) => checkpoint.and_then(|c| c.optimizer.stored(name)),
            _ => {
                let step = checkpoint.map_or(0, |c| c.state.step);
                return out.write_all(&step.to_le_bytes());
            }
        };
        let stored = stored.ok_or_else(|| io::Error::other("no such tensor"))?;
        stored.convert(first, elements, *dtype, out)
    };
    absent(to)?;
    dcp::write(to, &entries, files, &read)?;
    Ok(Exported { class: String::new(), package: false, tensors: entries.len(), bytes, notes: vec![] })
}

impl Model<'_> {
    /// A file that was kept of the model this one comes from.
    pub(crate) fn kept(&self, name: &str) -> Option<PathBuf> {
        self.beside.iter().map(|folder| folder.join(name)).find(|path| path.is_file())
    }

    /// The files of the tokenizer, and which tokens end a text: as they were kept, where the
    /// tokenizer is still the same; else made of the tokenizer.
    pub(super) fn texts(&self) -> Result<Vec<(String, Vec<u8>)>, HfError> {
        let Some(tokenizer) = self.tokenizer else {
            let kept = self.kept(GENERATION).map(|path| Ok((GENERATION.to_string(), bytes(&path)?)));
            return kept.into_iter().collect();
        };
        let mut found: Vec<(String, Vec<u8>)> = vec![];
        match tokenizer.json() {
            None => found.push((TOKENIZER.into(), byte_tokenizer()?)),
            Some(text) => {
                found.push((TOKENIZER.into(), text.as_bytes().to_vec()));
                let same = |folder: &&PathBuf| {
                    bytes(&folder.join(TOKENIZER)).is_ok_and(|other| other == text.as_bytes())
                };
                for folder in self.beside.iter().filter(same) {
                    for name in folder::KEPT.iter().filter(|n| ![CONFIG, TOKENIZER].contains(n)) {
                        let path = folder.join(name);
                        if path.is_file() && !found.iter().any(|(n, _)| n == name) {
                            found.push(((*name).into(), bytes(&path)?));
                        }
                    }
                }
            }
        }
        let has = |found: &[(String, Vec<u8>)], name: &str| found.iter().any(|(n, _)| n == name);
        if !has(&found, GENERATION) {
            let mut map = Map::new();
            map.insert("eos_token_id".into(), json!(tokenizer.ends()));
            if tokenizer.begins() {
                map.insert("bos_token_id".into(), json!(tokenizer.begin()));
            }
            found.push((GENERATION.into(), pretty(&Value::Object(map))?));
        }
        if !has(&found, TOKENIZER_CONFIG) {
            let mut map = Map::new();
            map.insert("tokenizer_class".into(), json!("PreTrainedTokenizerFast"));
            map.insert("model_max_length".into(), json!(self.spec.model.context));
            map.insert("clean_up_tokenization_spaces".into(), json!(false));
            if let Some(end) = tokenizer.token(tokenizer.end()) {
                map.insert("eos_token".into(), json!(end));
            }
            if let Some(begin) = tokenizer.token(tokenizer.begin()).filter(|_| tokenizer.begins()) {
                map.insert("bos_token".into(), json!(begin));
            }
            found.push((TOKENIZER_CONFIG.into(), pretty(&Value::Object(map))?));
        }
        Ok(found)
    }
}

/// Names and shapes of the tensors of the specification, which the weights must all have.
pub(crate) fn ours(model: &Model) -> Result<Vec<(String, Vec<u64>)>, HfError> {
    // One token is enough to learn which tensors the model has.
    let compiled = compile(model.spec, &prepare::forward(1, 1))?;
    let path = model.weights.path().to_path_buf();
    for tensor in &compiled.tensors {
        let problem = match model.weights.stored(&tensor.name) {
            Some(found) if found.shape == tensor.shape => continue,
            Some(found) => format!(
                "tensor {} is {:?}; by the specification it is {:?}",
                tensor.name, found.shape, tensor.shape
            ),
            None => format!("lacks the tensor {} {:?}", tensor.name, tensor.shape),
        };
        return Err(HfError::Checkpoint(CheckpointError::Corrupt { path, problem }));
    }
    Ok(compiled.tensors.into_iter().map(|t| (t.name, t.shape)).collect())
}

/// The type that weights are exported in: the one that is asked for, else that of the embedding.
fn stored(model: &Model) -> Result<Dtype, HfError> {
    let stored = model.weights.stored("embed.weight").map(|t| t.dtype);
    let Some(dtype) = model.dtype.or(stored) else {
        let problem = "lacks the tensor embed.weight".into();
        return Err(HfError::Refused { path: model.weights.path().to_path_buf(), problem });
    };
    Ok(dtype)
}

/// The type of weights that a configuration names.
fn named_type(kept: &Map<String, Value>) -> Option<&str> {
    ["torch_dtype", "dtype"].iter().find_map(|name| kept.get(*name)?.as_str())
}

/// The same as a type of safetensors.
pub(super) fn typed(kept: &Map<String, Value>) -> Option<Dtype> {
    let name = named_type(kept)?;
    [Dtype::F32, Dtype::F16, Dtype::BF16].into_iter().find(|dtype| torch(*dtype) == name)
}

fn as_family(
    model: &Model,
    config: &Config,
    (dtype, fold): (Dtype, &Fold),
    kept: &Map<String, Value>,
    to: &Path,
) -> Result<Exported, HfError> {
    let named = config::layers(&model.spec.model).map_err(HfError::Export)?;
    let list = ours(model)?;
    let entries =
        disassemble(config, &named, list.iter().map(|(name, shape)| (name.as_str(), shape.as_slice())))
            .map_err(|name| {
                HfError::Export(format!("a {} has no place for the tensor {name}", config.family.title))
            })?;
    let size = size(model, &entries, Some(dtype))?;
    let same = model.kept(CONFIG).filter(|path| {
        let read = Config::read(path, kept.clone(), &[]);
        let spec = |config: &Config| config.spec("model", Some(dtype)).ok();
        let packed = kept.contains_key("quantization_config");
        !packed
            && read.is_ok_and(|read| {
                named_type(kept).is_none_or(|found| found == torch(dtype))
                    && read.family == config.family
                    && spec(&read).is_some_and(|read| spec(config) == Some(read))
            })
    });
    let text = match same {
        // As it was, to the byte.
        Some(path) => bytes(&path)?,
        None => {
            let mut map = config.json(dtype, kept);
            if let Some(tokenizer) = model.tokenizer
                && !map.contains_key("eos_token_id")
            {
                map.insert("eos_token_id".into(), json!(tokenizer.end()));
                if tokenizer.begins() {
                    map.insert("bos_token_id".into(), json!(tokenizer.begin()));
                }
            }
            pretty(&Value::Object(map))?
        }
    };
    let texts = model.texts()?;
    let metadata = [("format", "pt")];
    let mut files: Vec<(&str, sums::Fill)> = vec![
        (CONFIG, Box::new(|out: &mut dyn Write| out.write_all(&text))),
        (
            "model.safetensors",
            Box::new(|out: &mut dyn Write| write((model, fold), &entries, Some(dtype), &metadata, out)),
        ),
    ];
    for (name, bytes) in &texts {
        files.push((name, Box::new(move |out: &mut dyn Write| out.write_all(bytes))));
    }
    folder::write(to, files)?;
    let (class, tensors) = (config.family.class.to_string(), entries.len());
    Ok(Exported { class, package: false, tensors, bytes: size, notes: vec![] })
}

/// A `tokenizer.json` with one token a byte. The byte NUL, which ends a document, is a special
/// token; the other bytes are the letters by which byte-level tokenizers name them.
pub(crate) fn byte_tokenizer() -> Result<Vec<u8>, HfError> {
    let end = json!({"id": 0, "content": "\0", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                     "special": true});
    let level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    // Printable bytes of Latin 1 are their own letters, the others the letters from U+0100 on.
    let printable = |b: &u8| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let others: Vec<u8> = (0..=255).filter(|b| !printable(b)).collect();
    let letter = |b: u8| -> char {
        let place = others.iter().position(|o| *o == b);
        place.map_or(char::from(b), |n| char::from_u32(0x100 + n as u32).unwrap_or('\u{fffd}'))
    };
    let mut vocab = Map::new();
    vocab.insert("\0".into(), json!(0));
    (1..=255).for_each(|b| {
        vocab.insert(letter(b).to_string(), json!(b));
    });
    let model = json!({"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                       "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                       "vocab": vocab, "merges": []});
    pretty(
        &json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [end], "normalizer": null,
                   "pre_tokenizer": level, "post_processor": null, "decoder": level, "model": model}),
    )
}

/// JSON for people.
pub(super) fn pretty(value: &Value) -> Result<Vec<u8>, HfError> {
    let text = serde_json::to_string_pretty(value).map_err(io::Error::from);
    Ok((text.map_err(|error| HfError::Io { path: PathBuf::from(CONFIG), error })? + "\n").into_bytes())
}

/// The types in which tensors are written: as they are stored, or as `to`.
fn types(model: &Model, entries: &[Theirs], to: Option<Dtype>) -> Result<Vec<Dtype>, HfError> {
    let of = |name: &str| model.weights.stored(name).map(|t| t.dtype);
    let one = |entry: &Theirs| {
        let mut found = entry.runs.iter().filter_map(|run| of(&run.name));
        let first = found.next().unwrap_or(Dtype::F32);
        match to {
            Some(to) => Ok(to),
            None if found.all(|other| other == first) => Ok(first),
            None => Err(HfError::Export(format!(
                "{} would be of parts that are stored in different types; --dtype f32 makes them one",
                entry.name
            ))),
        }
    };
    entries.iter().map(one).collect()
}

/// Bytes of tensors.
pub(super) fn size(model: &Model, entries: &[Theirs], to: Option<Dtype>) -> Result<u64, HfError> {
    let each = types(model, entries, to)?.into_iter().zip(entries);
    Ok(each.map(|(dtype, e)| e.shape.iter().product::<u64>() * dtype.bitsize() as u64 / 8).sum())
}

/// Writes tensors that are made of runs of ours, with the multipliers that they stand for.
pub(super) fn write(
    (model, fold): (&Model, &Fold),
    entries: &[Theirs],
    to: Option<Dtype>,
    metadata: &[(&str, &str)],
    out: &mut dyn Write,
) -> io::Result<()> {
    let types = types(model, entries, to).map_err(io::Error::other)?;
    let list: Vec<_> =
        entries.iter().zip(&types).map(|(e, t)| (e.name.clone(), e.shape.clone(), *t)).collect();
    safetensors::write_stored(out, metadata, &list, |i, out| {
        let read = |name: &str, first: u64, elements: u64, out: &mut dyn Write| {
            let stored = model.weights.stored(name).ok_or_else(|| io::Error::other("no such tensor"))?;
            fold.convert(&stored, name, (first, elements), types[i], out)
        };
        entries[i].write(types[i].bitsize() / 8, read, out)
    })
}

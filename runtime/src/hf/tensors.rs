//! Tensors of a Hugging Face folder, and those of ours that they are made into, both ways.
//!
//! Ours are fused: queries, keys and values are the rows of one matrix, experts stand one behind
//! another. In row-major order both are one tensor's bytes after another's, so a tensor of ours is
//! a list of runs of rows of theirs, and the other way round, and nothing is computed.

use super::config::{Config, Named};
use super::family::{Role, Slot, Source};
use super::{HfError, json};
use crate::checkpoint::safetensors::{self, Dtype, Stored, Tensors};
use dreamc_compiler::compiled::Tensor;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// The files of tensors of a folder.
#[derive(Debug)]
pub struct Shards {
    /// Name for errors about all of them.
    path: PathBuf,
    files: Vec<Tensors>,
    /// Which file holds a tensor.
    places: BTreeMap<String, usize>,
}

/// A tensor of ours and what it is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct Made {
    /// Its name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<u64>,
    /// The type its parts are stored in.
    pub dtype: Dtype,
    /// Runs of rows of tensors of the folder, in order.
    pub parts: Vec<Part>,
}

/// A run of rows of a tensor of the folder.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// Its name.
    pub name: String,
    /// The shape of the whole tensor.
    pub shape: Vec<u64>,
    /// Which half of its rows it is (0 or 1), where it is not all of them.
    pub half: Option<u64>,
}

impl Part {
    /// The elements of the tensor that belong to it: the first, and how many.
    pub fn elements(&self) -> (u64, u64) {
        let all: u64 = self.shape.iter().product();
        self.half.map_or((0, all), |half| (half * (all / 2), all / 2))
    }
}

impl Made {
    /// Bytes it takes.
    pub fn bytes(&self) -> u64 {
        self.shape.iter().product::<u64>() * self.dtype.bitsize() as u64 / 8
    }
}

/// Tensors of a model, and what the user should know.
pub struct Assembled {
    /// The tensors.
    pub tensors: Vec<Made>,
    /// Notes.
    pub notes: Vec<String>,
}

impl Shards {
    /// Maps `model.safetensors`, or the files that `model.safetensors.index.json` names.
    pub fn open(folder: &Path) -> Result<Self, HfError> {
        let (index, single) = (folder.join(INDEX), folder.join(SINGLE));
        if !index.is_file() {
            if !single.is_file() {
                let problem = format!("has neither {SINGLE} nor {INDEX}; older `.bin` files are not read");
                return Err(HfError::refused(folder, problem));
            }
            let file = Tensors::open(&single)?;
            let places = file.entries().map(|(name, _)| (name.to_string(), 0)).collect();
            return Ok(Shards { path: single, files: vec![file], places });
        }
        let map = json(&index)?;
        let Some(Value::Object(weights)) = map.get("weight_map") else {
            return Err(HfError::refused(&index, "has no object `weight_map`"));
        };
        let (mut files, mut numbers, mut places) = (vec![], BTreeMap::new(), BTreeMap::new());
        for (name, file) in weights {
            // A name with a folder in it would lead out of this one.
            let Some(file) = file.as_str().filter(|f| Path::new(f).file_name().is_some_and(|n| n == *f))
            else {
                return Err(HfError::refused(
                    &index,
                    format!("tensor {name}: {file} is not the name of a file"),
                ));
            };
            let number = match numbers.get(file) {
                Some(&number) => number,
                None => {
                    files.push(Tensors::open(&folder.join(file))?);
                    numbers.insert(file.to_string(), files.len() - 1);
                    files.len() - 1
                }
            };
            if files[number].stored(name).is_none() {
                return Err(HfError::refused(
                    &folder.join(file),
                    format!("lacks the tensor {name} that {INDEX} says it has"),
                ));
            }
            places.insert(name.clone(), number);
        }
        for file in &files {
            if let Some((name, _)) = file.entries().find(|(name, _)| !places.contains_key(*name)) {
                return Err(HfError::refused(
                    file.path(),
                    format!("has a tensor {name} that {INDEX} does not know"),
                ));
            }
        }
        Ok(Shards { path: index, files, places })
    }

    fn get(&self, name: &str) -> Option<Stored<'_>> {
        self.places.get(name).and_then(|&number| self.files[number].stored(name))
    }

    /// The type a tensor is stored in.
    pub fn dtype(&self, name: &str) -> Option<Dtype> {
        self.get(name).map(|t| t.dtype)
    }

    /// Writes tensors made of these.
    pub fn write(&self, out: &mut dyn Write, metadata: &[(&str, &str)], made: &[Made]) -> io::Result<()> {
        let entries: Vec<_> = made.iter().map(|m| (m.name.clone(), m.shape.clone(), m.dtype)).collect();
        safetensors::write_stored(out, metadata, &entries, |i, out| {
            made[i].parts.iter().try_for_each(|part| {
                let Some(stored) = self.get(&part.name) else { return Ok(()) };
                let (first, elements) = part.elements();
                stored.copy_elements(first, elements, out)
            })
        })
    }
}

/// Makes the tensors of a compiled model from those of a folder; every tensor of either side is
/// accounted for.
pub fn assemble(
    config: &Config,
    layers: &[Named],
    wanted: &[Tensor],
    shards: &Shards,
) -> Result<Assembled, HfError> {
    let refuse = |problem: String| Err(HfError::refused(&shards.path, problem));
    let (mut tensors, mut used, mut notes) = (vec![], BTreeSet::new(), vec![]);
    for tensor in wanted {
        let Some(parts) = parts(config, layers, &tensor.name, &tensor.shape) else {
            return refuse(format!("nothing in such a model is called {}, which ours needs", tensor.name));
        };
        let mut dtype = None;
        for Part { name, shape, .. } in &parts {
            let Some(found) = shards.get(name) else {
                return refuse(format!("lacks the tensor {name} {shape:?}"));
            };
            if found.shape != shape {
                return refuse(format!(
                    "tensor {name} is {:?}; by config.json it should be {shape:?}",
                    found.shape
                ));
            }
            if !matches!(found.dtype, Dtype::BF16 | Dtype::F16 | Dtype::F32) {
                return refuse(format!(
                    "tensor {name} is stored as {:?}; BF16, F16 and F32 are read",
                    found.dtype
                ));
            }
            if *dtype.get_or_insert(found.dtype) != found.dtype {
                let first = dtype.unwrap_or(found.dtype);
                return refuse(format!(
                    "tensor {name} is {:?} and {} is {first:?}",
                    found.dtype, parts[0].name
                ));
            }
            used.insert(name.clone());
        }
        let dtype = dtype.unwrap_or(Dtype::F32);
        tensors.push(Made { name: tensor.name.clone(), shape: tensor.shape.clone(), dtype, parts });
    }
    for name in shards.places.keys().filter(|name| !used.contains(*name)) {
        // Tables that older versions stored and every version computes.
        if name.ends_with(".rotary_emb.inv_freq") {
            continue;
        }
        let same = || -> io::Result<bool> {
            let of = |name: &str| shards.get(name).map(|t| t.bytes()).transpose();
            Ok(of(name)? == of("model.embed_tokens.weight")?)
        };
        let io = |error| HfError::Io { path: shards.path.clone(), error };
        if config.flag(Slot::Tie) && name == "lm_head.weight" && same().map_err(io)? {
            notes.push("lm_head.weight equals the embedding that it is tied to, and is left out".into());
            continue;
        }
        return refuse(format!("has a tensor {name} that such a model does not have; nothing is imported"));
    }
    Ok(Assembled { tensors, notes })
}

/// The parts of a tensor of ours, in order.
pub fn parts(config: &Config, layers: &[Named], name: &str, shape: &[u64]) -> Option<Vec<Part>> {
    let whole = |name: String| Some(vec![Part { name, shape: shape.to_vec(), half: None }]);
    match name {
        "embed.weight" => return whole("model.embed_tokens.weight".into()),
        "head.weight" => return whole("lm_head.weight".into()),
        "norm.weight" => return whole("model.norm.weight".into()),
        _ => {}
    }
    // `layers.{i}.{component}.{rest}`
    let mut words = name.splitn(4, '.');
    let ("layers", number, component, rest) = (words.next()?, words.next()?, words.next()?, words.next()?)
    else {
        return None;
    };
    let layer = layers.get(number.parse::<usize>().ok()?)?;
    let role = if component == layer.attention {
        Role::Attention
    } else if component == layer.network {
        layer.role
    } else {
        return None;
    };
    let (stem, kind) = rest.rsplit_once('.')?;
    let found = config.family.tensors.iter().copied().flatten().find(|(r, s, _)| *r == role && *s == stem)?;
    let theirs = |stem: &str| format!("model.layers.{number}.{stem}.{kind}");
    match found.2 {
        Source::One(stem) => whole(theirs(stem)),
        Source::Row(stem) => {
            Some(vec![Part { name: theirs(stem), shape: [&[1], shape].concat(), half: None }])
        }
        Source::Heads(stems) => {
            let (heads, kv, size) =
                (config.whole(Slot::Heads), config.whole(Slot::KvHeads), config.whole(Slot::HeadSize));
            let rows = [heads, kv, kv].map(|heads| heads * size);
            let part = |(stem, rows): (&str, u64)| {
                let shape = [&[rows], &shape[1..]].concat();
                Part { name: theirs(stem), shape, half: None }
            };
            Some(stems.into_iter().zip(rows).map(part).collect())
        }
        Source::Half(stem, half) => {
            let shape = [&[2 * shape[0]], &shape[1..]].concat();
            Some(vec![Part { name: theirs(stem), shape, half: Some(half) }])
        }
        Source::Each(stem) => {
            let of = |e: u64| {
                let name = theirs(&stem.replace("{e}", &e.to_string()));
                Part { name, shape: shape[1..].to_vec(), half: None }
            };
            Some((0..shape[0]).map(of).collect())
        }
    }
}

/// A tensor of theirs and the runs of ours that it is made of: name, first element, how many.
#[derive(Clone, Debug, PartialEq)]
pub struct Theirs {
    /// Its name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Runs of elements of tensors of ours, in order: name, first element, how many.
    pub runs: Vec<(String, u64, u64)>,
}

/// The tensors of theirs that these of ours are taken apart into; the name of one that has no place
/// there is the error.
pub fn disassemble<'a>(
    config: &Config,
    layers: &[Named],
    ours: impl Iterator<Item = (&'a str, &'a [u64])>,
) -> Result<Vec<Theirs>, String> {
    /// The place among them of each run of theirs: the half that it is.
    type Runs = Vec<(u64, (String, u64, u64))>;
    let mut found: BTreeMap<String, (Vec<u64>, Runs)> = BTreeMap::new();
    for (name, shape) in ours {
        let parts = parts(config, layers, name, shape).ok_or_else(|| name.to_string())?;
        let mut at = 0;
        for part in parts {
            let (_, elements) = part.elements();
            let (_, runs) = found.entry(part.name.clone()).or_insert_with(|| (part.shape.clone(), vec![]));
            runs.push((part.half.unwrap_or(0), (name.to_string(), at, elements)));
            at += elements;
        }
    }
    let theirs = found.into_iter().map(|(name, (shape, mut runs))| {
        runs.sort_by_key(|(half, _)| *half);
        Theirs { name, shape, runs: runs.into_iter().map(|(_, run)| run).collect() }
    });
    Ok(theirs.collect())
}

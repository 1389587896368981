//! Tensors of a Hugging Face folder, and those of ours that they are made into, both ways.
//!
//! Ours are fused: queries, keys and values are the rows of one matrix, experts stand one after
//! another. In row-major order both are one tensor's bytes after another's, so a tensor of ours is
//! a list of runs of theirs, and the other way round. Where theirs stand in another order (matrices
//! of gpt-oss' experts are transposed, gate and up side by side) elements are put in order, block
//! by block. Nothing is computed, save that MXFP4 is written as the bf16 numbers it stands for.

use super::config::{Config, Named};
use super::family::{Mixer, Role, Rows, Slot, Source};
use super::{HfError, json};
use dreamc_compiler::compiled::Tensor;
use dreamc_runtime::checkpoint::safetensors::{self, Dtype, Stored, Tensors};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
const OLD_INDEX: &str = "pytorch_model.bin.index.json";
const OLD: &str = "pytorch_model.bin";

/// The files of tensors of a folder.
#[derive(Debug)]
pub struct Shards {
    /// Name for errors about all of them.
    path: PathBuf,
    files: Vec<Tensors>,
    /// Which file holds a tensor, and its name there.
    places: BTreeMap<String, (usize, String)>,
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
    /// Parts of tensors of the folder, in order.
    pub parts: Vec<Part>,
}

/// A part of a tensor of the folder.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// Its name.
    pub name: String,
    /// The shape of the whole tensor.
    pub shape: Vec<u64>,
    /// The elements of the tensor that it is among: the first, and how many.
    pub range: (u64, u64),
    /// Where they stand there, unless it is all of them in our order.
    pub order: Option<Order>,
}

/// The places of our elements among those of a range of theirs: ours are blocks of `sizes`
/// elements, theirs as many blocks, and the element of ours at `(i, j, …)` stands `offset + i·s_i +
/// j·s_j + …` from where its block begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// How many blocks.
    pub blocks: u64,
    /// The place of a block's first element.
    pub offset: u64,
    /// Sizes of a block of ours, each with its stride there, below zero where it goes backwards.
    pub sizes: Vec<(u64, i64)>,
}

impl Order {
    /// Elements of a block of ours.
    fn block(&self) -> u64 {
        self.sizes.iter().map(|(size, _)| size).product()
    }

    /// The places of a block's elements, in our order.
    pub(crate) fn places(&self) -> Vec<usize> {
        let mut places = vec![self.offset as usize];
        for &(size, stride) in &self.sizes {
            let along = |place: usize| {
                (0..size as usize).map(move |i| place.wrapping_add_signed(i as isize * stride as isize))
            };
            places = places.into_iter().flat_map(along).collect();
        }
        places
    }
}

impl Part {
    /// All of a tensor, in its order.
    pub(crate) fn whole(name: String, shape: Vec<u64>) -> Self {
        let all = shape.iter().product();
        Part { name, shape, range: (0, all), order: None }
    }

    /// How many elements of ours it is.
    pub fn ours(&self) -> u64 {
        self.order.as_ref().map_or(self.range.1, |order| order.blocks * order.block())
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

/// Says of a folder without tensors what it has in their place, and what makes tensors of it.
fn lacking(folder: &Path) -> String {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    let of = |ends: &[&str]| names.iter().find(|name| ends.iter().any(|end| name.ends_with(end)));
    if let Some(name) = of(&[".pt", ".pth", ".ckpt"]) {
        let (from, to) = (folder.display(), format!("{}-safe", folder.display()));
        return format!(
            "has neither {SINGLE} nor {OLD}, and {name} is a pickle of another layout, which would have to be run. Where you trust it, convert it \
             once with transformers and import {to}:\n  python -c 'import sys; from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; \
             a, b = sys.argv[1:]; M.from_pretrained(a, dtype=\"auto\").save_pretrained(b); T.from_pretrained(a).save_pretrained(b)' {from} {to}"
        );
    }
    if let Some(name) = of(&[".gguf"]) {
        return format!(
            "has no {SINGLE}, and {name} is a file of llama.cpp: `dreamc import gguf {}` reads it",
            folder.join(name).display()
        );
    }
    if let Some(name) = of(&[".h5", ".msgpack", ".onnx"]) {
        return format!(
            "has {name} and no {SINGLE}; import the PyTorch weights of the model, as safetensors"
        );
    }
    format!(
        "has neither {SINGLE} nor {INDEX}: its weights are missing; download them with `hf download NAME --local-dir DIR`"
    )
}

/// Opens a file of tensors, of safetensors or of `torch.save`.
fn tensors(path: &Path) -> Result<Tensors, HfError> {
    match path.extension() {
        Some(end) if end == "bin" => super::pickled::open(path),
        _ => Ok(Tensors::open(path)?),
    }
}

impl Shards {
    /// Opens `model.safetensors`, or the files that `model.safetensors.index.json` names; where
    /// there are none, `pytorch_model.bin` or those of its index.
    pub fn open(folder: &Path) -> Result<Self, HfError> {
        let there = |name: &str| folder.join(name).is_file();
        let old = !there(INDEX) && !there(SINGLE);
        let (named, single) = if old { (OLD_INDEX, OLD) } else { (INDEX, SINGLE) };
        let (index, single) = (folder.join(named), folder.join(single));
        if !index.is_file() {
            if !single.is_file() {
                return Err(HfError::refused(folder, lacking(folder)));
            }
            let file = tensors(&single)?;
            let places = file.entries().map(|(name, _)| (name.to_string(), (0, name.to_string()))).collect();
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
                    files.push(tensors(&folder.join(file))?);
                    numbers.insert(file.to_string(), files.len() - 1);
                    files.len() - 1
                }
            };
            if files[number].stored(name).is_none() {
                return Err(HfError::refused(
                    &folder.join(file),
                    format!("lacks the tensor {name} that {named} says it has"),
                ));
            }
            places.insert(name.clone(), (number, name.clone()));
        }
        for file in &files {
            if let Some((name, _)) = file.entries().find(|(name, _)| !places.contains_key(*name)) {
                return Err(HfError::refused(
                    file.path(),
                    format!("has a tensor {name} that {named} does not know"),
                ));
            }
        }
        Ok(Shards { path: index, files, places })
    }

    fn get(&self, name: &str) -> Option<Stored<'_>> {
        self.places.get(name).and_then(|(number, there)| self.files[*number].stored(there))
    }

    /// Takes tensors under the names that a family's own files have, where a version of
    /// `transformers` writes others.
    pub fn rename(&mut self, pairs: &[(&str, &str)]) {
        let own = |name: &String| {
            pairs.iter().find(|(other, _)| name.contains(other)).map(|(other, own)| name.replace(other, own))
        };
        let renamed: Vec<_> =
            self.places.keys().filter_map(|name| Some((name.clone(), own(name)?))).collect();
        for (name, own) in renamed {
            if !self.places.contains_key(&own)
                && let Some(place) = self.places.remove(&name)
            {
                self.places.insert(own, place);
            }
        }
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
                let (first, elements) = part.range;
                match (self.get(&part.name), &part.order) {
                    (Some(stored), None) => stored.copy_elements(first, elements, out),
                    (Some(stored), Some(order)) => {
                        let size = stored.dtype.bitsize() / 8;
                        let (places, each) = (order.places(), elements / order.blocks.max(1));
                        for block in 0..order.blocks {
                            let mut theirs = vec![];
                            stored.copy_elements(first + block * each, each, &mut theirs)?;
                            let element = |place: &usize| &theirs[place * size..][..size];
                            let ours: Vec<u8> = places.iter().flat_map(element).copied().collect();
                            out.write_all(&ours)?;
                        }
                        Ok(())
                    }
                    (None, Some(order)) => self.unpack(&part.name, order, out),
                    (None, None) => Ok(()),
                }
            })
        })
    }

    /// The blocks and scales of a tensor of `[blocks, columns, rows]` that is packed by rows.
    fn packed(&self, name: &str) -> Option<(Stored<'_>, Stored<'_>)> {
        Some((self.get(&format!("{name}_blocks"))?, self.get(&format!("{name}_scales"))?))
    }

    /// Writes a tensor packed as MXFP4 (OCP Microscaling Formats, section 5.2) in our order, as
    /// bf16, which has all of its numbers: 32 of four bits share an exponent, lower halves first.
    fn unpack(&self, name: &str, order: &Order, out: &mut dyn Write) -> io::Result<()> {
        const VALUES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        let [(rows, step), (columns, _)] = order.sizes[..] else { return Ok(()) };
        let Some((blocks, scales)) = self.packed(name) else { return Ok(()) };
        let there: u64 = blocks.shape.get(1).copied().unwrap_or(0);
        for block in 0..order.blocks {
            for row in 0..rows {
                let at = block * there + order.offset + row * step.unsigned_abs();
                let (mut packed, mut exponents, mut values) = (vec![], vec![], vec![]);
                blocks.copy_elements(at * columns / 2, columns / 2, &mut packed)?;
                scales.copy_elements(at * columns / 32, columns / 32, &mut exponents)?;
                for (pairs, exponent) in packed.chunks(16).zip(exponents) {
                    let scale = f32::from(exponent) - 127.0;
                    for four in pairs.iter().flat_map(|pair| [pair & 15, pair >> 4]) {
                        let size = VALUES[usize::from(four & 7)] * scale.exp2();
                        let value = if four < 8 { size } else { -size };
                        values.extend(half::bf16::from_f32(value).to_le_bytes());
                    }
                }
                out.write_all(&values)?;
            }
        }
        Ok(())
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
    let mut left = 0;
    for tensor in wanted {
        let Some(parts) = parts(config, layers, &tensor.name, &tensor.shape) else {
            return refuse(format!("nothing in such a model is called {}, which ours needs", tensor.name));
        };
        let mut dtype = None;
        for Part { name, shape, order, .. } in &parts {
            if let (Some((blocks, scales)), Some(order), None) =
                (shards.packed(name), order, shards.get(name))
            {
                unpacked(&shards.path, name, [blocks, scales], shape)?;
                let [(_, _), (columns, _)] = order.sizes[..] else {
                    return refuse(format!("tensor {name}_blocks is packed, and {name} has no columns"));
                };
                if columns % 32 != 0 {
                    return refuse(format!("tensor {name} has {columns} columns, MXFP4 packs 32 at a time"));
                }
                dtype = Some(Dtype::BF16);
                used.extend(["blocks", "scales"].map(|of| format!("{name}_{of}")));
                continue;
            }
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
        if name.ends_with(".rotary_emb.inv_freq") || config.family.computed.contains(&name.as_str()) {
            continue;
        }
        if config.family.unread.iter().any(|begin| name.starts_with(begin)) {
            left += 1;
            continue;
        }
        let same = || -> io::Result<bool> {
            let of = |name: &str| shards.get(name).map(|t| t.bytes()).transpose();
            Ok(of(name)? == of(config.family.ends[0])?)
        };
        let io = |error| HfError::Io { path: shards.path.clone(), error };
        if config.flag(Slot::Tie) && *name == config.family.ends[1] && same().map_err(io)? {
            notes.push(format!("{name} equals the embedding that it is tied to, and is left out"));
            continue;
        }
        return refuse(format!("has a tensor {name} that such a model does not have; nothing is imported"));
    }
    if left > 0 {
        notes.push(format!(
            "{left} tensors of layers that predict further tokens are left out, as the class of transformers leaves them"
        ));
    }
    Ok(Assembled { tensors, notes })
}

/// Refuses blocks and scales that are no tensor of `[blocks, columns, rows]`.
fn unpacked(path: &Path, name: &str, found: [Stored<'_>; 2], shape: &[u64]) -> Result<(), HfError> {
    let &[many, columns, rows] = shape else { return Ok(()) };
    let right = [vec![many, rows, columns / 32, 16], vec![many, rows, columns / 32]];
    for ((stored, right), of) in found.iter().zip(right).zip(["blocks", "scales"]) {
        if stored.shape != right || stored.dtype != Dtype::U8 {
            let found = (stored.dtype, stored.shape);
            return Err(HfError::refused(
                path,
                format!("tensor {name}_{of} is {found:?}; MXFP4 of such a model is U8 {right:?}"),
            ));
        }
    }
    Ok(())
}

/// The parts of a tensor of ours, in order.
pub fn parts(config: &Config, layers: &[Named], name: &str, shape: &[u64]) -> Option<Vec<Part>> {
    let whole = |name: String| Some(vec![Part::whole(name, shape.to_vec())]);
    let [embed, head, norm, _] = config.family.ends;
    if let Some((_, theirs, row)) = config.family.beside.iter().find(|(ours, ..)| *ours == name) {
        let shape = if *row { [&[1], shape].concat() } else { shape.to_vec() };
        return Some(vec![Part::whole((*theirs).into(), shape)]);
    }
    match name {
        "embed.weight" => return whole(embed.into()),
        "head.weight" => return whole(head.into()),
        "norm.weight" => return whole(norm.into()),
        _ => {}
    }
    // `layers.{i}.{component}.{rest}`
    let mut words = name.splitn(4, '.');
    let ("layers", number, component, rest) = (words.next()?, words.next()?, words.next()?, words.next()?)
    else {
        return None;
    };
    let number = number.parse::<usize>().ok()?;
    let layer = layers.get(number)?;
    let (role, rest) = match layer.parts.iter().find(|(name, _)| name == component) {
        Some((_, role)) => (*role, rest.to_string()),
        None => (Role::Layer, format!("{component}.{rest}")),
    };
    let rest = rest.as_str();
    let table = || config.family.tensors.iter().copied().flatten().filter(|(r, ..)| *r == role);
    // A tensor by its whole name, else all of a module by its stem.
    let named = table().find(|(_, name, _)| *name == rest);
    let (stem, kind) =
        if named.is_some() { (rest, None) } else { rest.rsplit_once('.').map(|(s, k)| (s, Some(k)))? };
    let (.., source) = named.or_else(|| table().find(|(_, name, _)| *name == stem))?;
    let theirs = |stem: &str| {
        let kind = kind.map_or(String::new(), |kind| format!(".{kind}"));
        format!("{}.{stem}{kind}", config.place(number))
    };
    match *source {
        Source::One(stem) => whole(theirs(stem)),
        Source::Row(stem) => Some(vec![Part::whole(theirs(stem), [&[1], shape].concat())]),
        Source::Heads(stems) => {
            let (heads, kv, size) =
                (config.whole(Slot::Heads), config.whole(Slot::KvHeads), config.whole(Slot::HeadSize));
            let rows = [heads, kv, kv].map(|heads| heads * size);
            let part = |(stem, rows): (&str, u64)| Part::whole(theirs(stem), [&[rows], &shape[1..]].concat());
            Some(stems.into_iter().zip(rows).map(part).collect())
        }
        Source::Half(stem, half) => {
            let mut part = Part::whole(theirs(stem), [&[2 * shape[0]], &shape[1..]].concat());
            let all = part.range.1 / 2;
            part.range = (half * all, all);
            Some(vec![part])
        }
        Source::HalfEach(stem, half) => {
            let &[experts, rows, wide] = shape else { return None };
            let mut part = Part::whole(theirs(stem), vec![experts, 2 * rows, wide]);
            let (offset, sizes) = (half * rows * wide, vec![(rows * wide, 1)]);
            part.order = Some(Order { blocks: experts, offset, sizes });
            Some(vec![part])
        }
        Source::Each(stem) => {
            let of = |e: u64| Part::whole(theirs(&stem.replace("{e}", &e.to_string())), shape[1..].to_vec());
            Some((0..shape[0]).map(of).collect())
        }
        Source::Turned(stem, of, which) => {
            let &[experts, out, inner] = shape else { return None };
            let mut part = Part::whole(theirs(stem), vec![experts, inner, of * out]);
            let sizes = vec![(out, of as i64), (inner, (of * out) as i64)];
            part.order = Some(Order { blocks: experts, offset: which, sizes });
            Some(vec![part])
        }
        Source::Pairs(stem) => {
            let (heads, kv, size) =
                (config.whole(Slot::Heads), config.whole(Slot::KvHeads), config.whole(Slot::HeadSize));
            let &[rows, wide] = shape else { return None };
            let turning = (heads + kv) * size;
            let part = |first: u64, rows: u64, order| Part {
                range: (first * wide, rows * wide),
                order,
                ..Part::whole(theirs(stem), shape.to_vec())
            };
            let sizes = vec![(2, wide as i64), (size / 2, 2 * wide as i64), (wide, 1)];
            let order = Some(Order { blocks: heads + kv, offset: 0, sizes });
            Some(vec![part(0, turning, order), part(turning, rows.checked_sub(turning)?, None)])
        }
        Source::LastPairs(short, long) => {
            let stem = if config.whole(Slot::QueryRank) > 0 { short } else { long };
            let (still, turned) = (config.whole(Slot::Still), config.whole(Slot::Turned));
            last_pairs(theirs(stem), shape, config.whole(Slot::Heads), [still, turned])
        }
        Source::LatentPairs(stem) => {
            let (rank, turned) = (config.whole(Slot::KvRank), config.whole(Slot::Turned));
            last_pairs(theirs(stem), shape, 1, [rank, turned])
        }
        Source::PairsOf(stem, which) => {
            let (heads, size) = (config.whole(Slot::Heads), config.whole(Slot::HeadSize));
            let &[all] = shape else { return None };
            let mut part = Part::whole(theirs(stem), vec![2, 1, heads, size]);
            part.range = (which * all, all);
            part.order = Some(Order { blocks: heads, offset: 0, sizes: vec![(2, 1), (size / 2, 2)] });
            Some(vec![part])
        }
        Source::Flat(stem) => Some(vec![Part::whole(theirs(stem), vec![shape.iter().product()])]),
        Source::Stacked(stem, [from, to], which) => {
            let rows = stacked(config);
            let (all, before) = (rows[from..to].iter().sum::<u64>(), rows[from..which].iter().sum::<u64>());
            let elements = shape.iter().product::<u64>();
            let each = elements.checked_div(rows[which])?;
            let (whole, order) = if stem.ends_with("conv1d.weight") {
                (vec![all, 1, each], Some(backwards(rows[which], each)))
            } else if stem.ends_with("conv1d.bias") {
                (vec![all], None)
            } else {
                (vec![all, each], None)
            };
            Some(vec![Part { range: (before * each, elements), order, ..Part::whole(theirs(stem), whole) }])
        }
        Source::ByHead(stem, pieces, which) => {
            let heads = config.whole(Slot::MixerGroups).max(1);
            let members = config.whole(Slot::MixerHeads) / heads;
            let size = |rows: &Rows| match rows {
                Rows::Keys => config.whole(Slot::MixerState),
                Rows::Values => members * config.whole(Slot::MixerSize),
                Rows::Members => members,
            };
            let (all, before) =
                (pieces.iter().map(size).sum::<u64>(), pieces[..which].iter().map(size).sum::<u64>());
            let own = size(&pieces[which]);
            let wide = shape.iter().product::<u64>().checked_div(heads * own)?;
            let mut part = Part::whole(theirs(stem), vec![heads * all, wide]);
            let (offset, sizes) = (before * wide, vec![(own * wide, 1)]);
            part.order = Some(Order { blocks: heads, offset, sizes });
            Some(vec![part])
        }
        Source::GatedHeads([queries, keys, values]) => {
            let (heads, kv, size) =
                (config.whole(Slot::Heads), config.whole(Slot::KvHeads), config.whole(Slot::HeadSize));
            let &[_, wide] = shape else { return None };
            let part = |stem, rows: u64| Part::whole(theirs(stem), vec![rows * size, wide]);
            let order = Some(Order { blocks: heads, offset: 0, sizes: vec![(size * wide, 1)] });
            Some(vec![Part { order, ..part(queries, 2 * heads) }, part(keys, kv), part(values, kv)])
        }
        Source::Gates(stem) => {
            let (heads, size) = (config.whole(Slot::Heads), config.whole(Slot::HeadSize));
            let &[rows, wide] = shape else { return None };
            let mut part = Part::whole(theirs(stem), vec![2 * rows, wide]);
            part.order = Some(Order { blocks: heads, offset: size * wide, sizes: vec![(size * wide, 1)] });
            Some(vec![part])
        }
        Source::Either(short, long) => {
            whole(theirs(if config.whole(Slot::QueryRank) > 0 { short } else { long }))
        }
        Source::Filter(stem) => {
            let (&each, rows) = shape.split_last()?;
            let rows = rows.iter().product();
            let order = Some(backwards(rows, each));
            Some(vec![Part { order, ..Part::whole(theirs(stem), vec![rows, 1, each]) }])
        }
        Source::Ones(stem, [before, behind]) => {
            let ones = |n: usize| vec![1; n];
            Some(vec![Part::whole(theirs(stem), [&ones(before), shape, &ones(behind)].concat())])
        }
        Source::Among(stem, of, which) => {
            let &[experts, out] = shape else { return None };
            let mut part = Part::whole(theirs(stem), vec![experts, of * out]);
            part.order = Some(Order { blocks: experts, offset: which, sizes: vec![(out, of as i64)] });
            Some(vec![part])
        }
    }
}

/// The rows of the parts of a mixer that stand one after another.
fn stacked(config: &Config) -> Vec<u64> {
    let [heads, size, groups, state] =
        [Slot::MixerHeads, Slot::MixerSize, Slot::MixerGroups, Slot::MixerState]
            .map(|slot| config.whole(slot));
    match config.family.mixer.map(|(mixer, _)| mixer) {
        Some(Mixer::Mamba2 | Mixer::FalconH1) => {
            vec![heads * size, heads * size, groups * state, groups * state, heads]
        }
        Some(Mixer::GatedDelta) => vec![groups * state, groups * state, heads * size],
        Some(Mixer::Kda) | None => vec![],
    }
}

/// Filters of theirs end with the token itself.
fn backwards(rows: u64, each: u64) -> Order {
    Order { blocks: rows, offset: each.saturating_sub(1), sizes: vec![(each, -1)] }
}

/// The parts of a matrix whose rows are `heads` heads: the last elements of each turn, neighbours
/// together.
fn last_pairs(name: String, shape: &[u64], heads: u64, [still, turned]: [u64; 2]) -> Option<Vec<Part>> {
    let &[rows, wide] = shape else { return None };
    if rows != heads * (still + turned) {
        return None;
    }
    let part = |first: u64, rows: u64, order| Part {
        range: (first * wide, rows * wide),
        order,
        ..Part::whole(name.clone(), shape.to_vec())
    };
    let sizes = || vec![(2, wide as i64), (turned / 2, 2 * wide as i64), (wide, 1)];
    let head = |h: u64| {
        let first = h * (still + turned);
        let order = Some(Order { blocks: 1, offset: 0, sizes: sizes() });
        [part(first, still, None), part(first + still, turned, order)]
    };
    Some((0..heads).flat_map(head).collect())
}

/// A tensor of theirs and the parts of ours that it is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct Theirs {
    /// Its name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Parts of tensors of ours, in the order of the ranges that they fill.
    pub runs: Vec<Run>,
}

impl Theirs {
    /// A tensor of ours under its own name.
    pub fn ours((name, shape): (String, Vec<u64>)) -> Theirs {
        Theirs { runs: vec![Run::whole(&name, shape.iter().product())], name, shape }
    }
}

/// A run of elements of a tensor of ours.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// The name of the tensor.
    pub name: String,
    /// Its first element.
    pub first: u64,
    /// How many.
    pub elements: u64,
    /// The elements of theirs that they are among: the first, and how many.
    pub range: (u64, u64),
    /// Where they stand there, unless they are all of them in this order.
    pub order: Option<Order>,
}

impl Run {
    /// All of a tensor that keeps its name.
    pub fn whole(name: &str, elements: u64) -> Self {
        Run { name: name.into(), first: 0, elements, range: (0, elements), order: None }
    }
}

/// The tensors of theirs that these of ours are taken apart into; the name of one that has no place
/// there is the error.
pub fn disassemble<'a>(
    config: &Config,
    layers: &[Named],
    ours: impl Iterator<Item = (&'a str, &'a [u64])>,
) -> Result<Vec<Theirs>, String> {
    disassemble_by(ours, |name, shape| parts(config, layers, name, shape))
}

/// The same by the parts that each is made of.
pub(crate) fn disassemble_by<'a>(
    ours: impl Iterator<Item = (&'a str, &'a [u64])>,
    parts: impl Fn(&str, &[u64]) -> Option<Vec<Part>>,
) -> Result<Vec<Theirs>, String> {
    let mut found: BTreeMap<String, Theirs> = BTreeMap::new();
    for (name, shape) in ours {
        let parts = parts(name, shape).ok_or_else(|| name.to_string())?;
        let mut first = 0;
        for part in parts {
            let elements = part.ours();
            let theirs = found.entry(part.name.clone()).or_insert_with(|| Theirs {
                name: part.name.clone(),
                shape: part.shape.clone(),
                runs: vec![],
            });
            let (range, order) = (part.range, part.order);
            theirs.runs.push(Run { name: name.to_string(), first, elements, range, order });
            first += elements;
        }
    }
    let mut theirs: Vec<Theirs> = found.into_values().collect();
    theirs.iter_mut().for_each(|t| t.runs.sort_by_key(|run| run.range.0));
    Ok(theirs)
}

impl Theirs {
    /// Writes it, elements of ours read by `read` (name, first, how many) in a type of `size`
    /// bytes. Parts that stand among one another are put together a block at a time.
    pub fn write(
        &self,
        size: usize,
        mut read: impl FnMut(&str, u64, u64, &mut dyn Write) -> io::Result<()>,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        for same in self.runs.chunk_by(|a, b| a.range == b.range) {
            let Some(Order { blocks, .. }) = same[0].order else {
                let Run { name, first, elements, .. } = &same[0];
                read(name, *first, *elements, out)?;
                continue;
            };
            let each = same[0].range.1 / blocks.max(1);
            let orders: Vec<_> = same
                .iter()
                .filter_map(|run| run.order.as_ref().map(|order| (run, order.block(), order.places())))
                .collect();
            for block in 0..blocks {
                let mut theirs = vec![0; each as usize * size];
                for (run, elements, places) in &orders {
                    let mut ours = vec![];
                    read(&run.name, run.first + block * elements, *elements, &mut ours)?;
                    for (place, element) in places.iter().zip(ours.chunks(size)) {
                        theirs[place * size..][..size].copy_from_slice(element);
                    }
                }
                out.write_all(&theirs)?;
            }
        }
        Ok(())
    }
}

//! Models of dreamc, made llama.cpp's.
//!
//! *In*: weights, their specification, and a format. *Out*: a GGUF file. *Promise*: it computes
//! what the model computes; blocks that the format has keep their bits, and other matrices are
//! converted or packed as [`quantise`](dreamc_runtime::quantise) does. Vectors and routers are f32,
//! as llama.cpp needs them. Nothing that exists is written over.

use super::family::{self, EMBEDDING, FREQUENCIES, Family, HEAD};
use super::file::{self, Entry, Kind};
use super::scales::{self, Bare};
use super::{fields, vocab};
use crate::config::{self, Config};
use crate::export::{Exported, Model};
use crate::family::Slot;
use crate::tensors::{Run, Theirs, disassemble_by};
use crate::{HfError, bytes, json};
use dreamc_compiler::compile;
use dreamc_compiler::compiled::{Tensor, TensorKind};
use dreamc_compiler::format::{NV, NV_HEAD, Unpackable};
use dreamc_data::files;
use dreamc_runtime::checkpoint::safetensors::{Dtype, Stored, encoded};
use dreamc_runtime::quantise::is_matrix;
use dreamc_runtime::train::prepare;
use serde_json::{Map, Value as Json};
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;

/// The names of formats.
pub fn formats() -> Vec<&'static str> {
    file::KINDS.iter().map(|(_, name, _)| *name).collect()
}

/// How the numbers of a tensor of ours leave.
#[derive(Clone, Copy, Debug)]
struct Leaving {
    kind: Kind,
    /// The bits are those of the file.
    same: bool,
    /// A number that is added to each.
    add: f32,
    /// The largest size of a number, where blocks that are made have a scale of their tensor.
    largest: f32,
}

impl Leaving {
    /// Bytes of a row of blocks that keep their bits, in the file that has them.
    fn row(&self, numbers: u64) -> Option<u64> {
        match self.kind {
            Kind::Packed(_) | Kind::Nvfp4 if self.same => {
                Some(self.kind.row(numbers)? + file::head(self.kind))
            }
            _ => None,
        }
    }

    /// The numbers of such a row.
    fn numbers(&self, bytes: u64) -> Option<u64> {
        match self.kind {
            Kind::Packed(packed) if self.same => Some(bytes / packed.bytes() as u64 * packed.unit() as u64),
            Kind::Nvfp4 if self.same => Some(bytes.checked_sub(NV_HEAD as u64)? / NV.2 as u64 * NV.0 as u64),
            _ => None,
        }
    }
}

/// Exports a model as the file `to`, its matrices in a format; as they are stored where absent.
pub fn export(model: &Model, to: &Path, format: Option<&str>) -> Result<Exported, HfError> {
    if to.symlink_metadata().is_ok() {
        return Err(HfError::Exists { path: to.to_path_buf() });
    }
    let asked = match format {
        None => None,
        Some(name) => Some(Kind::named(name).ok_or_else(|| {
            let known = formats().join(", ");
            HfError::Export(format!(
                "there is no format `{name}`; {known} are those that GGUF files are written in"
            ))
        })?),
    };
    let kept = match model.kept("config.json") {
        Some(path) => json(&path)?,
        None => Map::new(),
    };
    let (config, family) = recognised(model, &kept)?;
    let layers = config::layers(&model.spec.model).map_err(HfError::Export)?;
    let tensors = compile(model.spec, &prepare::forward(1, 1))?.tensors;
    crate::export::ours(model)?;
    let Kinds { leaving, unfit, unscaled } = kinds(model, (&config, family), &tensors, asked)?;
    let mut notes = vec![];
    if unscaled {
        notes
            .push("the embedding leaves as f32: llama.cpp has no scale of its tensor, as nvfp4 needs".into());
    }
    if let Some(name) = unfit.first() {
        notes.push(format!("{} matrices leave as f32: rows of {name} are no whole blocks", unfit.len()));
    }
    let mut said = fields::write(family, &config, &model.spec.model.name).map_err(HfError::Export)?;
    notes.append(&mut said.notes);
    said.values.push(("general.quantization_version".into(), super::value::Value::whole(2)));
    let (texts, more) = texts(model, config.whole(Slot::Vocab))?;
    said.values.extend(texts);
    notes.extend(more);

    // Of tensors whose bits are kept the shape is that of bytes.
    let shape = |tensor: &Tensor| {
        let mut shape = tensor.shape.clone();
        let own = leaving.get(&tensor.name);
        if let (Some(last), Some(own)) = (shape.last_mut(), own) {
            *last = own.row(*last).unwrap_or(*last);
        }
        shape
    };
    let list: Vec<(String, Vec<u64>)> = tensors.iter().map(|t| (t.name.clone(), shape(t))).collect();
    let parts = |name: &str, shape: &[u64]| family::parts(family, &config, &layers, name, shape);
    let mut theirs =
        disassemble_by(list.iter().map(|(name, shape)| (name.as_str(), shape.as_slice())), parts).map_err(
            |name| {
                HfError::Export(format!("llama.cpp's `{}` has no place for the tensor {name}", family.name))
            },
        )?;
    if family.head && config.flag(Slot::Tie) {
        let copy = theirs.iter().find(|t| t.name == EMBEDDING).cloned();
        theirs.extend(copy.map(|t| Theirs { name: HEAD.into(), ..t }));
    }
    let mut entries: Vec<Entry> = theirs.iter().map(|t| entry(t, &leaving)).collect();
    let mut vectors = vec![];
    for (theirs, (_, shape, kind)) in theirs.iter().zip(&entries) {
        if *kind == Kind::Nvfp4 {
            vectors.extend(scales_of(model, theirs, shape, &leaving)?);
        }
    }
    vectors.extend(said.frequencies.take().map(|found| (FREQUENCIES.into(), found)));
    let vector = |(name, found): &(String, Vec<f32>)| {
        (name.clone(), vec![found.len() as u64], Kind::Plain(Dtype::F32))
    };
    entries.extend(vectors.iter().map(vector));
    let sizes: Result<Vec<u64>, _> = entries.iter().map(file::size).collect();
    let size = sizes.map_err(|error| HfError::Export(error.to_string()))?.iter().sum();
    files::write_new(to, |out| {
        file::write(out, &said.values, &entries, |i, out| match theirs.get(i) {
            Some(theirs) => fill(model, theirs, &leaving, out),
            None => vectors[i - theirs.len()].1.iter().try_for_each(|x| out.write_all(&x.to_le_bytes())),
        })
    })
    .map_err(|error| HfError::Io { path: to.to_path_buf(), error })?;
    Ok(Exported { class: family.name.into(), package: false, tensors: entries.len(), bytes: size, notes })
}

/// The family of a model that llama.cpp has, and its configuration.
fn recognised(model: &Model, kept: &Map<String, Json>) -> Result<(Config, &'static Family), HfError> {
    let stored = model.weights.stored("embed.weight").map_or(Dtype::F32, |t| t.dtype);
    let likely = kept.get("model_type").and_then(Json::as_str);
    let mut why = String::new();
    // Gemma's scale is rounded to the type that the weights were stored in.
    for dtype in [stored, Dtype::BF16, Dtype::F32, Dtype::F16] {
        match config::recognise(model.spec, dtype, likely, kept) {
            Err(error) => why = error,
            Ok(config) => {
                return match Family::of(config.family.kind) {
                    Some(family) => Ok((config, family)),
                    None => {
                        let known: Vec<&str> = family::FAMILIES.iter().map(|f| f.kind).collect();
                        let problem = format!(
                            "it is a {}, which is not written as GGUF; {} are",
                            config.family.title,
                            known.join(", ")
                        );
                        Err(HfError::Export(problem))
                    }
                };
            }
        }
    }
    Err(HfError::Export(format!("llama.cpp has no family that computes it: {why}")))
}

/// How each tensor leaves.
#[derive(Default)]
struct Kinds {
    leaving: BTreeMap<String, Leaving>,
    /// Matrices that have no whole blocks.
    unfit: Vec<String>,
    /// Whether the embedding would need a scale.
    unscaled: bool,
}

fn kinds(
    model: &Model,
    (config, family): (&Config, &Family),
    tensors: &[Tensor],
    asked: Option<Kind>,
) -> Result<Kinds, HfError> {
    let mut found = Kinds::default();
    let wide = Kind::Plain(Dtype::F32);
    for tensor in tensors {
        let Some(stored) = model.weights.stored(&tensor.name) else { continue };
        let own = stored.packed.map_or(Kind::Plain(stored.dtype), Kind::of);
        let row = tensor.shape.last().copied().unwrap_or(0);
        let matrix = is_matrix(tensor) && tensor.kind != TensorKind::Router;
        let mut kind = match (matrix, asked) {
            (false, _) => wide,
            (true, None) if own.name().is_some() => own,
            (true, None) => {
                let (name, format) = (&tensor.name, stored.packed.map_or("", |packed| packed.name()));
                return Err(HfError::Export(format!(
                    "tensor {name} is {format}, which GGUF has not; name a --format: {}",
                    formats().join(", ")
                )));
            }
            (true, Some(asked)) if asked.row(row).is_some() => asked,
            (true, Some(_)) => {
                found.unfit.push(tensor.name.clone());
                wide
            }
        };
        if kind == Kind::Nvfp4 && !family.scales {
            return Err(HfError::Export(format!(
                "llama.cpp's `{}` does not multiply by scales of tensors, which nvfp4 has; name another --format",
                family.name
            )));
        }
        if kind == Kind::Nvfp4 && tensor.kind == TensorKind::Embedding {
            (kind, found.unscaled) = (wide, true);
        }
        let offset = config.family.gemma && !matrix && tensor.name.contains("norm");
        let add = if offset { 1.0 } else { 0.0 };
        let same = kind == own && add == 0.0;
        let largest = match kind {
            Kind::Nvfp4 if !same => largest(&stored).map_err(|error| {
                HfError::Export(format!("tensor {} cannot be read: {error}", tensor.name))
            })?,
            _ => 0.0,
        };
        found.leaving.insert(tensor.name.clone(), Leaving { kind, same, add, largest });
    }
    Ok(found)
}

/// The largest size of a number of a tensor.
fn largest(stored: &Stored<'_>) -> io::Result<f32> {
    let (all, most) = (stored.shape.iter().product::<u64>(), 1 << 20);
    let mut largest = 0f32;
    for at in (0..all).step_by(most as usize) {
        let mut bytes = vec![];
        stored.convert(at, most.min(all - at), Dtype::F32, &mut bytes)?;
        let sizes = bytes.as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x).abs());
        largest = sizes.fold(largest, f32::max);
    }
    Ok(largest)
}

/// The tensor of scales of one of theirs, whose numbers have this shape.
fn scales_of(
    model: &Model,
    theirs: &Theirs,
    shape: &[u64],
    leaving: &BTreeMap<String, Leaving>,
) -> Result<Option<(String, Vec<f32>)>, HfError> {
    let (own, count) = (theirs.runs.first().and_then(|run| leaving.get(&run.name)), scales::count(shape));
    let (Some(own), Some(name)) = (own, scales::name(&theirs.name)) else { return Ok(None) };
    if !own.same {
        return Ok(Some((name, vec![scales::scale(own.largest); count as usize])));
    }
    let mut nothing = io::sink();
    let mut bare = Bare::new(theirs.shape.last().copied().unwrap_or(0), &mut nothing);
    kept(model, theirs, 1, &mut bare)
        .map_err(|error| HfError::Export(format!("tensor {} cannot be read: {error}", theirs.name)))?;
    match bare.scales(count) {
        Some(found) => Ok(Some((name, found))),
        None => Err(HfError::Export(format!(
            "rows of one matrix of {} have several scales in nvfp4, and GGUF has one for all; name a --format",
            theirs.name
        ))),
    }
}

/// The keys of the tokenizer.
fn texts(model: &Model, vocab: u64) -> Result<vocab::Keys, HfError> {
    let Some(tokenizer) = model.tokenizer else {
        return Ok((
            vocab::none(),
            vec!["no tokenizer next to the weights: llama.cpp reads token ids alone".into()],
        ));
    };
    let made;
    let text = match tokenizer.json() {
        Some(text) => text,
        None => {
            made = String::from_utf8_lossy(&crate::export::byte_tokenizer()?).into_owned();
            &made
        }
    };
    let template = match model.kept("chat_template.jinja") {
        Some(path) => Some(String::from_utf8_lossy(&bytes(&path)?).into_owned()),
        None => match model.kept("tokenizer_config.json") {
            Some(path) => json(&path)?.get("chat_template").and_then(Json::as_str).map(String::from),
            None => None,
        },
    };
    let ends = (tokenizer.begin(), tokenizer.end());
    let leaving = vocab::Leaving { text, vocab, ends, begins: tokenizer.begins(), template };
    match vocab::write(&leaving) {
        Ok(found) => Ok(found),
        Err(why) => Ok((
            vocab::none(),
            vec![format!("{why}: the file has no tokenizer, and llama.cpp reads token ids alone")],
        )),
    }
}

/// The entry of a tensor of theirs: shapes of kept blocks become those of their numbers.
fn entry(theirs: &Theirs, leaving: &BTreeMap<String, Leaving>) -> Entry {
    let own = theirs.runs.first().and_then(|run| leaving.get(&run.name));
    let mut shape = theirs.shape.clone();
    let kind = own.map_or(Kind::Plain(Dtype::F32), |own| own.kind);
    if let (Some(last), Some(own)) = (shape.last_mut(), own) {
        *last = own.numbers(*last).unwrap_or(*last);
    }
    (theirs.name.clone(), shape, kind)
}

/// Writes the numbers of a tensor of theirs.
fn fill(
    model: &Model,
    theirs: &Theirs,
    leaving: &BTreeMap<String, Leaving>,
    out: &mut dyn Write,
) -> io::Result<()> {
    let lost = |name: &str| io::Error::other(format!("tensor {name} is gone"));
    let Some(Run { name, .. }) = theirs.runs.first() else { return Ok(()) };
    let own = leaving.get(name).ok_or_else(|| lost(name))?;
    if own.same {
        return match own.kind {
            Kind::Plain(dtype) => kept(model, theirs, dtype.bitsize() / 8, out),
            Kind::Packed(_) => kept(model, theirs, 1, out),
            Kind::Nvfp4 => {
                let row = theirs.shape.last().copied().unwrap_or(0);
                kept(model, theirs, 1, &mut Bare::new(row, out))
            }
        };
    }
    let stored = |name: &str| model.weights.stored(name).ok_or_else(|| lost(name));
    let mut encoder = Encoder { name: &theirs.name, own: *own, pending: vec![], done: 0, out };
    theirs.write(
        4,
        |name, first, count, out| stored(name)?.convert(first, count, Dtype::F32, out),
        &mut encoder,
    )?;
    encoder.finish()
}

/// Writes the elements of a tensor of theirs as the file has them, of `size` bytes each.
fn kept(model: &Model, theirs: &Theirs, size: usize, out: &mut dyn Write) -> io::Result<()> {
    let bytes = size as u64;
    let copy = |name: &str, first: u64, count: u64, out: &mut dyn Write| {
        let stored = model.weights.stored(name);
        let stored = stored.ok_or_else(|| io::Error::other(format!("tensor {name} is gone")))?;
        stored.copy_bytes(first * bytes, count * bytes, out)
    };
    theirs.write(size, copy, out)
}

/// Takes f32 numbers and writes them as they leave.
struct Encoder<'a> {
    name: &'a str,
    own: Leaving,
    pending: Vec<u8>,
    /// Numbers that were written.
    done: u64,
    out: &'a mut dyn Write,
}

impl Encoder<'_> {
    /// Writes whole blocks of those that wait.
    fn some(&mut self) -> io::Result<()> {
        let unit = match self.own.kind {
            Kind::Plain(_) => 1,
            Kind::Packed(packed) => packed.unit(),
            Kind::Nvfp4 => NV.0,
        };
        let count = self.pending.len() / 4 / unit * unit;
        let rest = self.pending.split_off(count * 4);
        let all = std::mem::replace(&mut self.pending, rest);
        let values: Vec<f32> =
            all.as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x) + self.own.add).collect();
        let bytes = match self.own.kind {
            Kind::Plain(dtype) => encoded(&values, dtype)?,
            Kind::Packed(packed) => {
                let mut blocks = vec![];
                packed.pack(&values, &mut blocks).map_err(|bad| self.unpackable(bad))?;
                blocks
            }
            Kind::Nvfp4 => scales::pack(&values, self.own.largest).map_err(|bad| self.unpackable(bad))?,
        };
        self.done += count as u64;
        self.out.write_all(&bytes)
    }

    fn unpackable(&self, bad: Unpackable) -> io::Error {
        let (at, format) = (self.done + bad.at as u64, self.own.kind.name().unwrap_or_default());
        let (name, value) = (self.name, bad.value);
        io::Error::other(format!("tensor {name}: number {at} is {value}, which {format} cannot hold"))
    }

    fn finish(mut self) -> io::Result<()> {
        self.some()?;
        match self.pending.is_empty() {
            true => Ok(()),
            false => Err(io::Error::other(format!("tensor {} ends within a block", self.name))),
        }
    }
}

impl Write for Encoder<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.pending.extend(bytes);
        if self.pending.len() >= 1 << 20 {
            self.some()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

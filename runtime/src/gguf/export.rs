//! Models of dreamc, made llama.cpp's.
//!
//! *In*: weights, their specification, and a format. *Out*: a GGUF file. *Promise*: it computes
//! what the model computes; blocks that the format has keep their bits, and other matrices are
//! converted or packed as [`quantise`](crate::quantise) does. Vectors and routers are f32, as
//! llama.cpp needs them. Nothing that exists is written over.

use super::family::{self, EMBEDDING, FREQUENCIES, Family, HEAD};
use super::file::{self, Entry, Kind};
use super::{fields, vocab};
use crate::checkpoint::safetensors::{Dtype, encoded};
use crate::files;
use crate::hf::config::{self, Config};
use crate::hf::export::{Exported, Model};
use crate::hf::family::Slot;
use crate::hf::tensors::{Run, Theirs, disassemble_by};
use crate::hf::{HfError, bytes, json};
use crate::quantise::is_matrix;
use crate::train::prepare;
use dreamc_compiler::compile;
use dreamc_compiler::compiled::{Tensor, TensorKind};
use dreamc_compiler::format::Packed;
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
    crate::hf::export::ours(model)?;
    let (leaving, unfit) = kinds(model, &config, &tensors, asked)?;
    let mut notes = vec![];
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
        if let (Some(last), Some(Leaving { kind: Kind::Packed(packed), same: true, .. })) =
            (shape.last_mut(), leaving.get(&tensor.name))
        {
            *last = *last / packed.unit() as u64 * packed.bytes() as u64;
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
    if let Some(found) = &said.frequencies {
        entries.push((FREQUENCIES.into(), vec![found.len() as u64], Kind::Plain(Dtype::F32)));
    }
    let sizes: Result<Vec<u64>, _> = entries.iter().map(file::size).collect();
    let size = sizes.map_err(|error| HfError::Export(error.to_string()))?.iter().sum();
    files::write_new(to, |out| {
        file::write(out, &said.values, &entries, |i, out| match theirs.get(i) {
            Some(theirs) => fill(model, theirs, &leaving, out),
            None => said.frequencies.iter().flatten().try_for_each(|x| out.write_all(&x.to_le_bytes())),
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

/// How each tensor leaves, and which matrices have no whole blocks.
fn kinds(
    model: &Model,
    config: &Config,
    tensors: &[Tensor],
    asked: Option<Kind>,
) -> Result<(BTreeMap<String, Leaving>, Vec<String>), HfError> {
    let (mut found, mut unfit) = (BTreeMap::new(), vec![]);
    let wide = Kind::Plain(Dtype::F32);
    for tensor in tensors {
        let Some(stored) = model.weights.stored(&tensor.name) else { continue };
        let own = stored.packed.map_or(Kind::Plain(stored.dtype), Kind::Packed);
        let row = tensor.shape.last().copied().unwrap_or(0);
        let matrix = is_matrix(tensor) && tensor.kind != TensorKind::Router;
        let kind = match (matrix, asked) {
            (false, _) => wide,
            (true, None) if own.name().is_some() => own,
            (true, None) => {
                let (name, format) = (&tensor.name, stored.packed.map_or("", Packed::name));
                return Err(HfError::Export(format!(
                    "tensor {name} is {format}, which GGUF has not; name a --format: {}",
                    formats().join(", ")
                )));
            }
            (true, Some(asked)) if asked.row(row).is_some() => asked,
            (true, Some(_)) => {
                unfit.push(tensor.name.clone());
                wide
            }
        };
        let offset = config.family.gemma && !matrix && tensor.name.contains("norm");
        let add = if offset { 1.0 } else { 0.0 };
        found.insert(tensor.name.clone(), Leaving { kind, same: kind == own && add == 0.0, add });
    }
    Ok((found, unfit))
}

/// The keys of the tokenizer.
fn texts(model: &Model, vocab: u64) -> Result<vocab::Keys, HfError> {
    let Some(tokenizer) = model.tokenizer else {
        return Ok((
            vocab::none(),
            vec!["no tokenizer beside the weights: llama.cpp reads token ids alone".into()],
        ));
    };
    let made;
    let text = match tokenizer.json() {
        Some(text) => text,
        None => {
            made = String::from_utf8_lossy(&crate::hf::export::byte_tokenizer()?).into_owned();
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
    if let (Some(last), Some(Leaving { kind: Kind::Packed(packed), same: true, .. })) =
        (shape.last_mut(), own)
    {
        *last = *last / packed.bytes() as u64 * packed.unit() as u64;
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
    let stored = |name: &str| model.weights.stored(name).ok_or_else(|| lost(name));
    if own.same {
        let size = match own.kind {
            Kind::Plain(dtype) => dtype.bitsize() / 8,
            Kind::Packed(_) => 1,
        };
        let bytes = size as u64;
        return theirs.write(
            size,
            |name, first, count, out| stored(name)?.copy_bytes(first * bytes, count * bytes, out),
            out,
        );
    }
    let mut encoder = Encoder { name: &theirs.name, own: *own, pending: vec![], done: 0, out };
    theirs.write(
        4,
        |name, first, count, out| stored(name)?.convert(first, count, Dtype::F32, out),
        &mut encoder,
    )?;
    encoder.finish()
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
                packed.pack(&values, &mut blocks).map_err(|bad| {
                    let (at, name) = (self.done + bad.at as u64, packed.name());
                    io::Error::other(format!(
                        "tensor {}: number {at} is {}, which {name} cannot hold",
                        self.name, bad.value
                    ))
                })?;
                blocks
            }
        };
        self.done += count as u64;
        self.out.write_all(&bytes)
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

//! Models of llama.cpp, made ours.
//!
//! *In*: a GGUF file. *Out*: a folder like that of an import of `transformers`. *Promise*: blocks
//! keep their bits and are read in their file; what one tensor of ours is made of in several
//! kinds becomes f32, which holds each of them.

use super::family::{self, FREQUENCIES, HEAD};
use super::file::{Gguf, Kind};
use super::scales::{self, Headed};
use super::{fields, vocab};
use crate::config::{Config, layers};
use crate::family::Slot;
use crate::tensors::Part;
use crate::{HfError, Imported};
use dreamc_compiler::compile;
use dreamc_compiler::compiled::Tensor;
use dreamc_compiler::format::{NV, Packed};
use dreamc_data::{Tokenizer, sums};
use dreamc_dsl::Spelling;
use dreamc_runtime::checkpoint::folder;
use dreamc_runtime::checkpoint::safetensors::{Dtype, PACKED, Stored, write_stored};
use dreamc_runtime::train::prepare;
use serde_json::{Map, Value as Json};
use std::collections::BTreeSet;
use std::io::{self, Write};
use std::path::Path;

/// A tensor of ours.
struct Made {
    name: String,
    /// Of what is written: bytes where it is packed.
    shape: Vec<u64>,
    dtype: Dtype,
    /// The common kind of its parts, whose bits are kept; numbers are made f32 where there is none.
    kind: Option<Kind>,
    parts: Vec<Part>,
    /// A number that is added to each.
    add: f32,
}

/// Imports the file `from` as the folder `to`, a model called `name`. A folder that is there
/// already is replaced with `force`, and only if it is one of ours.
pub fn import(from: &Path, to: &Path, name: &str, force: bool) -> Result<Imported, HfError> {
    let refuse = |problem: String| HfError::refused(from, problem);
    folder::free(to, force)?;
    let file = Gguf::open(from)?;
    let (family, map) = fields::read(&file).map_err(refuse)?;
    let config = Config::read(from, map.clone(), &[])?;
    let mut notes = config.notes.clone();
    let specification = |d: dreamc_dsl::Diagnostics| HfError::Specification {
        path: from.to_path_buf(),
        problem: d.render(false),
    };
    let (spec, text) = config.specification(name, None).map_err(specification)?;
    let layers = layers(&spec.model).map_err(refuse)?;
    let compiled = compile(&spec, &prepare::forward(1, 1))?;
    let parts = |name: &str, shape: &[u64]| family::parts(family, &config, &layers, name, shape);
    let made = assemble(&file, &config, &compiled.tensors, parts, &mut notes).map_err(refuse)?;
    finite(&file, &made).map_err(refuse)?;

    let read = vocab::read(&file).map_err(refuse)?;
    notes.extend(read.notes);
    let kept = serde_json::to_string_pretty(&Json::Object(map)).unwrap_or_default() + "\n";
    let mut texts = vec![("config.json", kept), ("generation_config.json", read.generation)];
    texts.extend(read.config.map(|text| ("tokenizer_config.json", text)));
    let reads_text = read.tokenizer.is_some();
    match read.tokenizer {
        Some(text) => {
            tokenizer(from, &text, &texts[1].1, config.whole(Slot::Vocab))?;
            texts.push(("tokenizer.json", text));
        }
        None => {
            notes.push("no tokenizer that is read: token ids can be read and written (`dreamc probe`)".into())
        }
    }
    let shown = dreamc_dsl::show(&spec, Spelling::Yaml);
    let said = |m: &Made| match m.kind {
        Some(kind @ (Kind::Packed(_) | Kind::Nvfp4)) => Some((m.name.clone(), Json::from(kind.name()))),
        _ => None,
    };
    let said: Map<String, Json> = made.iter().filter_map(said).collect();
    let (packed, said) = (!said.is_empty(), Json::Object(said).to_string());
    let mut metadata = vec![("format", "dreamc"), ("spec", shown.as_str())];
    metadata.extend(packed.then_some((PACKED, said.as_str())));
    let entries: Vec<_> = made.iter().map(|m| (m.name.clone(), m.shape.clone(), m.dtype)).collect();
    let fill = |i: usize, out: &mut dyn Write| made[i].write(&file, out);
    let mut files: Vec<(&str, sums::Fill)> = vec![
        ("spec.yaml", Box::new(|out: &mut dyn Write| out.write_all(text.as_bytes()))),
        ("model.safetensors", Box::new(|out: &mut dyn Write| write_stored(out, &metadata, &entries, fill))),
    ];
    for (name, text) in &texts {
        files.push((*name, Box::new(move |out: &mut dyn Write| out.write_all(text.as_bytes()))));
    }
    folder::write(to, files)?;
    let bytes = |(_, shape, dtype): &(String, Vec<u64>, Dtype)| {
        shape.iter().product::<u64>() * dtype.bitsize() as u64 / 8
    };
    let (parameters, bytes) = (dreamc_runtime::model::parameters(&compiled), entries.iter().map(bytes).sum());
    Ok(Imported { spec, parameters, bytes, notes, reads_text })
}

/// Sees that a tokenizer is one, and that its tokens are the model's.
fn tokenizer(from: &Path, text: &str, generation: &str, vocab: u64) -> Result<(), HfError> {
    let json: Json = serde_json::from_str(generation).unwrap_or_default();
    let ends: Vec<u32> = match &json["eos_token_id"] {
        Json::Array(all) => all.iter().filter_map(Json::as_u64).filter_map(|id| id.try_into().ok()).collect(),
        one => one.as_u64().and_then(|id| id.try_into().ok()).into_iter().collect(),
    };
    let tokenizer = Tokenizer::from_json(text.into(), &ends)
        .map_err(|error| HfError::refused(from, format!("its tokenizer: {error}")))?;
    if tokenizer.vocab() as u64 > vocab {
        let problem = format!("has {} tokens, and an embedding of {vocab}", tokenizer.vocab());
        return Err(HfError::refused(from, problem));
    }
    Ok(())
}

/// Makes the tensors of a compiled model; every tensor of either side is accounted for.
fn assemble(
    file: &Gguf,
    config: &Config,
    wanted: &[Tensor],
    parts: impl Fn(&str, &[u64]) -> Option<Vec<Part>>,
    notes: &mut Vec<String>,
) -> Result<Vec<Made>, String> {
    let (mut made, mut used, mut mixed, mut inputs) = (vec![], BTreeSet::new(), 0, 0);
    for tensor in wanted {
        let lost = || format!("nothing in such a model is called {}, which ours needs", tensor.name);
        let own = parts(&tensor.name, &tensor.shape).ok_or_else(lost)?;
        let mut kinds = vec![];
        for Part { name, shape, .. } in &own {
            let Some((kind, found)) = file.kinds.get(name) else {
                return Err(format!("lacks the tensor {name} {shape:?}"));
            };
            if found != shape {
                return Err(format!("tensor {name} is {found:?}; by its keys it should be {shape:?}"));
            }
            kinds.push(*kind);
            used.insert(name.clone());
            if *kind == Kind::Nvfp4 {
                scales::of(file, name)?;
                used.extend(scales::name(name));
                let of_inputs = scales::of_inputs(name).filter(|name| file.kinds.contains_key(name));
                inputs += usize::from(of_inputs.is_some());
                used.extend(of_inputs);
            }
        }
        let one = kinds.first().copied().filter(|first| kinds.iter().all(|kind| kind == first));
        let offset = config.family.gemma && tensor.shape.len() == 1 && tensor.name.contains("norm");
        // Vectors of others are f32, and an offset is added to numbers.
        let kind = one.filter(|_| !offset);
        mixed += usize::from(one.is_none());
        let (dtype, shape, parts) = match kind {
            Some(kind @ (Kind::Packed(_) | Kind::Nvfp4)) => {
                let mut shape = tensor.shape.clone();
                if let Some(last) = shape.last_mut() {
                    *last = kind.row(*last).ok_or_else(lost)?;
                }
                let parts = parts(&tensor.name, &shape).ok_or_else(lost)?;
                if let Some(last) = shape.last_mut() {
                    *last += super::file::head(kind);
                }
                (Dtype::U8, shape, parts)
            }
            Some(Kind::Plain(dtype)) => (dtype, tensor.shape.clone(), own),
            None => (Dtype::F32, tensor.shape.clone(), own),
        };
        let add = if offset { -1.0 } else { 0.0 };
        made.push(Made { name: tensor.name.clone(), shape, dtype, kind, parts, add });
    }
    if mixed > 0 {
        notes.push(format!(
            "{mixed} matrices are of parts in different formats (queries, keys and values of one) and are stored as f32"
        ));
    }
    if inputs > 0 {
        notes.push(format!(
            "{inputs} scales of activations (`input_scale`) are left out: activations are not rounded here"
        ));
    }
    for name in file.kinds.keys().filter(|name| !used.contains(*name) && *name != FREQUENCIES) {
        if config.flag(Slot::Tie) && name == HEAD {
            continue;
        }
        return Err(format!("has a tensor {name} that such a model does not have; nothing is imported"));
    }
    Ok(made)
}

/// Refuses blocks whose scale is no number.
fn finite(file: &Gguf, made: &[Made]) -> Result<(), String> {
    for part in made.iter().flat_map(|m| &m.parts) {
        let (Some((kind, _)), Some(stored)) = (file.kinds.get(&part.name), file.tensors.stored(&part.name))
        else {
            continue;
        };
        let size = match kind {
            Kind::Plain(_) => continue,
            Kind::Packed(packed) => packed.bytes() as u64,
            Kind::Nvfp4 => NV.2 as u64,
        };
        let (all, most) = (stored.shape.iter().product::<u64>(), (1 << 20) / size * size);
        for at in (0..all).step_by(most as usize) {
            let mut bytes = vec![];
            let count = most.min(all - at);
            stored.copy_elements(at, count, &mut bytes).map_err(|e| format!("tensor {}: {e}", part.name))?;
            let bad = match kind {
                Kind::Packed(packed) => packed.bad(&bytes),
                _ => scales::bad(&bytes),
            };
            if let Some(block) = bad {
                let (name, block) = (&part.name, at / size + block as u64);
                return Err(format!("tensor {name}: the scale of block {block} is not a finite number"));
            }
        }
    }
    Ok(())
}

impl Made {
    fn write(&self, file: &Gguf, out: &mut dyn Write) -> io::Result<()> {
        for part in &self.parts {
            let lost = || io::Error::other(format!("tensor {} is gone", part.name));
            let stored = file.tensors.stored(&part.name).ok_or_else(lost)?;
            match self.kind {
                Some(Kind::Nvfp4) => {
                    let scales = scales::of(file, &part.name).map_err(io::Error::other)?;
                    copy(&stored, part, &mut headed(&stored, &scales, out))?;
                }
                Some(_) => copy(&stored, part, out)?,
                None => {
                    let numbers = numbers(file, &part.name, self.add).ok_or_else(lost)??;
                    match &part.order {
                        None => out.write_all(&numbers)?,
                        Some(order) => {
                            let each = numbers.len() / order.blocks.max(1) as usize;
                            let places = order.places();
                            for block in numbers.chunks(each.max(1)) {
                                out.write_all(&picked(block, 4, &places))?;
                            }
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

/// Writes a part as the file has it, its elements in our order.
fn copy(stored: &Stored<'_>, part: &Part, out: &mut dyn Write) -> io::Result<()> {
    let Some(order) = &part.order else { return stored.copy_elements(part.range.0, part.range.1, out) };
    let size = stored.dtype.bitsize() / 8;
    let each = part.range.1 / order.blocks.max(1);
    let places = order.places();
    for block in 0..order.blocks {
        let mut theirs = vec![];
        stored.copy_elements(part.range.0 + block * each, each, &mut theirs)?;
        out.write_all(&picked(&theirs, size, &places))?;
    }
    Ok(())
}

/// Puts the scales of a tensor of blocks before their rows.
fn headed<'a>(stored: &Stored<'_>, scales: &'a [f32], out: &'a mut dyn Write) -> Headed<'a> {
    let (bytes, rows) = stored.shape.split_last().unwrap_or((&0, &[]));
    Headed::new(scales, rows.iter().product(), *bytes, out)
}

/// Elements of `size` bytes at these places.
fn picked(from: &[u8], size: usize, places: &[usize]) -> Vec<u8> {
    places.iter().flat_map(|place| &from[place * size..][..size]).copied().collect()
}

/// All numbers of a tensor as f32, with something added to each.
fn numbers(file: &Gguf, name: &str, add: f32) -> Option<io::Result<Vec<u8>>> {
    let ((kind, shape), stored) = (file.kinds.get(name)?, file.tensors.stored(name)?);
    let read = || -> io::Result<Vec<u8>> {
        let mut bytes = vec![];
        match kind {
            Kind::Plain(_) => stored.convert(0, shape.iter().product(), Dtype::F32, &mut bytes)?,
            Kind::Packed(packed) => {
                let mut blocks = vec![];
                stored.copy_elements(0, stored.shape.iter().product(), &mut blocks)?;
                let mut values = vec![0.0; shape.iter().product::<u64>() as usize];
                packed.unpack(&blocks, &mut values);
                bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            }
            Kind::Nvfp4 => {
                let scales = scales::of(file, name).map_err(io::Error::other)?;
                let mut rows = vec![];
                let all = stored.shape.iter().product();
                stored.copy_elements(0, all, &mut headed(&stored, &scales, &mut rows))?;
                let row = shape.last().and_then(|row| u32::try_from(*row).ok()).unwrap_or(0);
                let mut values = vec![0.0; shape.iter().product::<u64>() as usize];
                Packed::Nvfp4(row).unpack(&rows, &mut values);
                bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            }
        }
        if add != 0.0 {
            for x in bytes.as_chunks_mut::<4>().0 {
                *x = (f32::from_le_bytes(*x) + add).to_le_bytes();
            }
        }
        Ok(bytes)
    };
    Some(read())
}

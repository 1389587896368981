//! Models in fewer bits.
//!
//! *In*: the weights of a model, and a format for each part of it. *Out*: a folder like that of an
//! import, whose matrices are packed ([`Packed`]) and read so, in their file. *Promise*: numbers
//! are rounded to the nearest, with scales that a calibration text decides where there is one,
//! vectors and routers stay as they are, and where a number or a scale cannot be held nothing is
//! written.

use crate::calibrate::{CalibrateError, Importance, feedback};
use crate::checkpoint::safetensors::{Dtype, PACKED, Stored, write_stored};
use crate::checkpoint::{CheckpointError, Weights, folder};
use crate::train::prepare;
use dreamc_compiler::architecture::Architecture;
use dreamc_compiler::compiled::{Tensor, TensorKind};
use dreamc_compiler::format::Packed;
use dreamc_compiler::{CompileError, compile};
use dreamc_data::sums;
use dreamc_dsl::{Spec, Spelling};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;
use thiserror::Error;

/// Why a model is not quantised.
#[derive(Debug, Error)]
pub enum QuantiseError {
    /// Its file, or the folder to write.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Its specification.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// The text that it is calibrated with.
    #[error(transparent)]
    Calibrate(#[from] CalibrateError),
    /// There is no such format.
    #[error("there is no format `{name}`; {} are built, and `keep` leaves a part as it is", Packed::NAMES.join(", "))]
    Format {
        /// The name that was asked for.
        name: String,
    },
    /// There is no such part.
    #[error("the model has no part `{name}` with matrices; its parts are {known}")]
    Part {
        /// The name that was asked for.
        name: String,
        /// Those it has.
        known: String,
    },
    /// Something else than `part: format`.
    #[error("`{text}` is not `part: format`, as in `experts: q4_0, head: q8_0`")]
    Parts {
        /// The text.
        text: String,
    },
    /// Nothing would be packed.
    #[error("no matrix of the model is packed so: {why}")]
    Nothing {
        /// The reason.
        why: String,
    },
}

/// A format that was asked for; `None` leaves tensors as they are.
pub type Asked = Option<&'static str>;

/// Formats by part.
#[derive(Clone, Debug)]
pub struct Choice {
    /// Of all matrices but those of routers.
    pub format: Asked,
    /// Of parts, in the order in which they were written; later ones count.
    pub parts: Vec<(String, Asked)>,
    /// The cost of rounding on a calibration text; to nearest without.
    pub importance: Option<Importance>,
}

impl Choice {
    /// A format for all, and others for parts: `experts: q4_0, head: q8_0`.
    pub fn new(format: &str, parts: Option<&str>) -> Result<Self, QuantiseError> {
        let pairs = parts.unwrap_or_default().split(',').map(str::trim).filter(|pair| !pair.is_empty());
        let pair = |text: &str| match text.split_once(':') {
            Some((part, format)) => Ok((part.trim().to_string(), asked(format.trim())?)),
            None => Err(QuantiseError::Parts { text: text.into() }),
        };
        let parts = pairs.map(pair).collect::<Result<_, _>>()?;
        Ok(Choice { format: asked(format)?, parts, importance: None })
    }
}

fn asked(name: &str) -> Result<Asked, QuantiseError> {
    if name == "keep" {
        return Ok(None);
    }
    match Packed::NAMES.iter().find(|known| **known == name) {
        Some(known) => Ok(Some(known)),
        None => Err(QuantiseError::Format { name: name.into() }),
    }
}

/// A model that was quantised.
#[derive(Clone, Debug, Default)]
pub struct Quantised {
    /// Bytes of its tensors before and after.
    pub bytes: (u64, u64),
    /// Tensors and numbers by the name of what they are stored in.
    pub by_format: BTreeMap<String, (usize, u64)>,
    /// Matrices that stay, since their rows are not whole blocks: one of them, and how many.
    pub unfit: Option<(String, usize)>,
}

/// The names by which a part of the model can be asked for that a matrix belongs to.
fn parts_of(architecture: &Architecture, tensor: &Tensor) -> Vec<String> {
    let kind = match tensor.kind {
        TensorKind::Embedding => Some("embedding"),
        TensorKind::Head => Some("head"),
        TensorKind::Routed => Some("experts"),
        TensorKind::Shared => Some("shared"),
        TensorKind::Router => Some("router"),
        TensorKind::Matrix | TensorKind::Gain | TensorKind::Steady | TensorKind::Balance => None,
    };
    let name = architecture.name_of(tensor.owner, tensor.part);
    let component = name.split('.').next().unwrap_or_default().to_string();
    // A component's routers are asked for by that name alone.
    let component = (tensor.kind != TensorKind::Router).then_some(component);
    kind.map(String::from).into_iter().chain(component).collect()
}

/// Whether a tensor is a matrix that formats are for. Adapters are trained, and stay as they are.
pub fn is_matrix(tensor: &Tensor) -> bool {
    let kind = match tensor.kind {
        TensorKind::Embedding | TensorKind::Head | TensorKind::Matrix => true,
        TensorKind::Routed | TensorKind::Shared | TensorKind::Router => true,
        TensorKind::Gain | TensorKind::Steady | TensorKind::Balance => false,
    };
    kind && tensor.shape.len() > 1 && tensor.part.adapter().is_none()
}

/// The formats of a model's tensors by their names, and which matrices have no whole blocks.
fn formats(
    spec: &Spec,
    tensors: &[Tensor],
    choice: &Choice,
) -> Result<(BTreeMap<String, Packed>, Vec<String>), QuantiseError> {
    let architecture = Architecture::new(&spec.model, None)?;
    let matrices: Vec<(&Tensor, Vec<String>)> =
        tensors.iter().filter(|t| is_matrix(t)).map(|t| (t, parts_of(&architecture, t))).collect();
    for (name, _) in &choice.parts {
        if !matrices.iter().any(|(_, parts)| parts.contains(name)) {
            let mut known: Vec<&str> = matrices.iter().flat_map(|(_, p)| p).map(String::as_str).collect();
            known.sort_unstable();
            known.dedup();
            return Err(QuantiseError::Part { name: name.clone(), known: known.join(", ") });
        }
    }
    let (mut found, mut unfit) = (BTreeMap::new(), vec![]);
    for (tensor, parts) in matrices {
        let own = choice.parts.iter().rev().find(|(part, _)| parts.contains(part));
        let general = choice.format.filter(|_| tensor.kind != TensorKind::Router);
        let Some(name) = own.map_or(general, |(_, format)| *format) else { continue };
        let row = tensor.shape.last().copied().unwrap_or(0);
        match Packed::named(name, row).filter(|packed| packed.fits(row)) {
            Some(packed) => {
                found.insert(tensor.name.clone(), packed);
            }
            None => unfit.push(tensor.name.clone()),
        }
    }
    Ok((found, unfit))
}

/// Writes a model in these formats as the folder `to`, with the files of `beside`, which belong to
/// it. A folder that is there already is replaced with `force`, and only if it is one of ours.
pub fn quantise(
    spec: &Spec,
    weights: &Weights,
    choice: &Choice,
    to: &Path,
    (beside, force): (&[(&'static str, Vec<u8>)], bool),
) -> Result<Quantised, QuantiseError> {
    folder::free(to, force)?;
    let compiled = compile(spec, &prepare::forward(1, 1))?;
    let (formats, unfit) = formats(spec, &compiled.tensors, choice)?;
    if formats.is_empty() {
        let why = match unfit.first() {
            Some(name) => format!("rows of {name} and of {} others are no whole blocks", unfit.len() - 1),
            None => "all parts are kept".into(),
        };
        return Err(QuantiseError::Nothing { why });
    }
    let corrupt = |problem| CheckpointError::Corrupt { path: weights.path().to_path_buf(), problem };
    let mut quantised =
        Quantised { unfit: unfit.first().map(|name| (name.clone(), unfit.len())), ..Quantised::default() };
    let (mut entries, mut said) = (vec![], Map::new());
    for tensor in &compiled.tensors {
        let Some(stored) = weights.stored(&tensor.name).filter(|stored| stored.shape == tensor.shape) else {
            let problem = format!("lacks the tensor {} {:?}", tensor.name, tensor.shape);
            return Err(corrupt(problem).into());
        };
        if let Some(packed) = stored.packed {
            let (name, format) = (&tensor.name, packed.name());
            let problem =
                format!("tensor {name} is {format} already; quantise the model that it was made of");
            return Err(corrupt(problem).into());
        }
        let numbers = tensor.elements();
        let mut shape = tensor.shape.clone();
        let before = numbers * stored.dtype.bitsize() as u64 / 8;
        let (dtype, format, after) = match formats.get(&tensor.name) {
            Some(packed) => {
                let bytes = numbers / packed.unit() as u64 * packed.bytes() as u64;
                if let Some(last) = shape.last_mut() {
                    *last = *last / packed.unit() as u64 * packed.bytes() as u64;
                }
                said.insert(tensor.name.clone(), Value::from(packed.name()));
                (Dtype::U8, packed.name().to_string(), bytes)
            }
            None => (stored.dtype, format!("{:?}", stored.dtype).to_lowercase(), before),
        };
        quantised.bytes = (quantised.bytes.0 + before, quantised.bytes.1 + after);
        let of = quantised.by_format.entry(format).or_default();
        *of = (of.0 + 1, of.1 + numbers);
        entries.push((tensor.name.clone(), shape, dtype));
    }
    let (said, text) = (Value::Object(said).to_string(), dreamc_dsl::show(spec, Spelling::Yaml));
    let mut metadata = vec![("format", "dreamc"), ("spec", text.as_str()), (PACKED, said.as_str())];
    metadata.extend(weights.metadata("step").map(|step| ("step", step)));
    let fill = |i: usize, out: &mut dyn Write| {
        let (name, tensor) = (&entries[i].0, &compiled.tensors[i]);
        let lost = || io::Error::other(format!("tensor {name} is gone"));
        let stored = weights.stored(name).ok_or_else(lost)?;
        match formats.get(name) {
            Some(packed) => pack(&stored, *packed, (name, choice.importance.as_ref()), out),
            None => stored.copy_elements(0, tensor.elements(), out),
        }
    };
    let mut files: Vec<(&str, sums::Fill)> = vec![
        ("spec.yaml", Box::new(|out: &mut dyn Write| out.write_all(text.as_bytes()))),
        ("model.safetensors", Box::new(|out: &mut dyn Write| write_stored(out, &metadata, &entries, fill))),
    ];
    for (name, bytes) in beside {
        files.push((*name, Box::new(move |out: &mut dyn Write| out.write_all(bytes))));
    }
    folder::write(to, files)?;
    Ok(quantised)
}

/// Writes the blocks of a tensor, some rows at a time.
fn pack(
    stored: &Stored,
    packed: Packed,
    (name, importance): (&str, Option<&Importance>),
    out: &mut dyn Write,
) -> io::Result<()> {
    let all: u64 = stored.shape.iter().product();
    let (wide, high) = match stored.shape[..] {
        [.., high, wide] => (wide.max(1), high.max(1)),
        _ => (all.max(1), 1),
    };
    let most = ((1 << 20) / wide * wide).max(wide);
    let some = |at: u64, count: u64| -> io::Result<Vec<f32>> {
        let mut bytes = vec![];
        stored.convert(at, count, Dtype::F32, &mut bytes)?;
        Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    };
    let mut largest = 0f32;
    if packed.asks_largest() {
        for at in (0..all).step_by(most as usize) {
            largest = some(at, most.min(all - at))?.iter().fold(largest, |most, x| most.max(x.abs()));
        }
    }
    for (matrix, first) in (0..all).step_by((high * wide) as usize).enumerate() {
        let factors = importance.and_then(|found| found.factors(name, matrix));
        let end = first + high * wide;
        for at in (first..end).step_by(most as usize) {
            let values = some(at, most.min(end - at))?;
            let own = importance.and_then(|found| found.of(name, at, values.len() as u64));
            let mut blocks = vec![];
            let made = match (own, &factors) {
                (Some(own), Some(factors)) => {
                    feedback::pack(packed, (&values, largest), own, factors, &mut blocks)
                }
                _ => packed.pack_some(&values, largest, &mut blocks),
            };
            made.map_err(|bad| {
                let number = at + bad.at as u64;
                io::Error::other(format!(
                    "tensor {name}: number {number} is {}, which {} cannot hold",
                    bad.value,
                    packed.name()
                ))
            })?;
            out.write_all(&blocks)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_pairs_of_a_part_and_a_format() {
        let choice = Choice::new("q8_0", Some("experts: q4_0 , head:keep")).unwrap();
        assert_eq!(choice.format, Some("q8_0"));
        assert_eq!(choice.parts, [("experts".into(), Some("q4_0")), ("head".into(), None)]);
        let said = |format: &str, parts| Choice::new(format, parts).unwrap_err().to_string();
        assert!(said("q5", None).starts_with(
            "there is no format `q5`; f16, int8, q8_0, q4_0, mxfp4, nvfp4, q4_k, q6_k are built"
        ));
        assert!(said("q8_0", Some("experts q4_0")).starts_with("`experts q4_0` is not `part: format`"));
    }
}

//! Multipliers folded into weights, for classes that have no key for them.
//!
//! *In*: a specification and the names and shapes of its tensors. *Out*: the specification without
//! the scales of attentions and of logits, and the factors on numbers of tensors that stand for
//! them ([`Fold`]). *Promise*: the folded model computes the same but for the rounding of products,
//! and none where factors are powers of two; nothing is folded into a gain that is stored less one.
//!
//! The scale of scores is folded into the gain of queries where there is one, else into the rows of
//! queries and their bias; that of logits into the gain of the norm before the head, so that an
//! embedding that is the head stays as it is.

use dreamc_dsl::Spec;
use dreamc_dsl::spec::{Component, QkNorm};
use dreamc_runtime::checkpoint::safetensors::{Dtype, Stored, encoded};
use std::io::{self, Write};
use std::ops::Range;

/// Factors on numbers of tensors.
#[derive(Clone, Debug, Default)]
pub(super) struct Fold {
    factors: Vec<Factor>,
    /// Multipliers that it stands for, for people.
    pub what: Vec<String>,
}

#[derive(Clone, Debug)]
struct Factor {
    tensor: String,
    range: Range<u64>,
    by: f64,
}

impl Fold {
    /// The specification without its multipliers, and what stands for them; none where there is
    /// nothing to fold, or no place for it.
    pub fn of(spec: &Spec, tensors: &[(String, Vec<u64>)]) -> Option<(Spec, Fold)> {
        let (mut folded, mut fold) = (spec.clone(), Fold::default());
        if spec.model.norm.unit_offset {
            return None;
        }
        for (name, component) in &mut folded.model.components {
            let Component::Sequence(a) = component else { continue };
            let Some(scale) = a.scale.take() else { continue };
            let by = scale * (a.head_size as f64).sqrt();
            // Of a mixture of projections every one would have to be multiplied.
            let mixed = format!(".{name}.qkv.shared.");
            if a.latent.is_some() || tensors.iter().any(|(tensor, _)| tensor.contains(&mixed)) {
                return None;
            }
            let rows = a.heads * a.head_size;
            let parts: &[&str] =
                if a.qk_norm == QkNorm::None { &["qkv.weight", "qkv.bias"] } else { &["q_norm.weight"] };
            let mut any = false;
            for (tensor, shape) in tensors {
                let own = |part: &&&str| tensor.ends_with(&format!(".{name}.{part}"));
                let Some(part) = parts.iter().find(own) else { continue };
                if part.ends_with("weight") && part.starts_with("qkv") && shape.len() != 2 {
                    return None;
                }
                let each: u64 = shape.iter().skip(1).product();
                let all: u64 = shape.iter().product();
                let range = if part.starts_with("qkv") { 0..(rows * each).min(all) } else { 0..all };
                fold.factors.push(Factor { tensor: tensor.clone(), range, by });
                any = true;
            }
            if !any {
                return None;
            }
            fold.what.push(format!("`{name}.scale` {scale}"));
        }
        if let Some(scale) = folded.model.logit_scale.take() {
            let (tensor, shape) = tensors.iter().find(|(tensor, _)| tensor == "norm.weight")?;
            let range = 0..shape.iter().product();
            fold.factors.push(Factor { tensor: tensor.clone(), range, by: scale });
            fold.what.push(format!("`logit_scale` {scale}"));
        }
        (!fold.factors.is_empty()).then_some((folded, fold))
    }

    /// Writes elements of a tensor, multiplied.
    pub fn convert(
        &self,
        stored: &Stored,
        name: &str,
        (first, elements): (u64, u64),
        to: Dtype,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        let own: Vec<&Factor> = self.factors.iter().filter(|f| f.tensor == name).collect();
        if own.is_empty() {
            return stored.convert(first, elements, to, out);
        }
        let mut bytes = vec![];
        stored.convert(first, elements, Dtype::F32, &mut bytes)?;
        let values = bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        let values: Vec<f32> = (first..)
            .zip(values)
            .map(|(at, value)| {
                let by: f64 = own.iter().filter(|f| f.range.contains(&at)).map(|f| f.by).product();
                (f64::from(value) * by) as f32
            })
            .collect();
        out.write_all(&encoded(&values, to)?)
    }
}

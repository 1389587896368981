//! The cost of rounding a matrix, on a text.
//!
//! *In*: a model in the precision it was trained in, rows of a calibration text. *Out*: the
//! [`Importance`] of each number of its matrices, and blocks that are packed by it. *Promise*: of
//! every kind of matrix alike (experts, shared ones, matrices of loops and recurrences), since
//! nothing but gradients is read; the scale of a block is that of the least weighted error, which
//! is never above that of rounding to nearest.
//!
//! To second order the loss grows by `½ Σ F (w - q)²` where `F` is the mean square of a number's
//! gradient over rows: the diagonal of the Fisher information, as in SqueezeLLM (2306.07629,
//! section 4.1). A scale that is fitted to the largest number of a block minimises no such error;
//! scales that clip it are tried, of numbers in E2M1 those with codes near it, and the best is
//! kept. Codes then follow one another: what a number loses, later ones of its row make good for
//! ([`feedback`]).

pub mod feedback;

use self::feedback::{Factor, Moments};
use crate::checkpoint::Weights;
use crate::model::{Model, ModelError, Scale};
use crate::train::prepare;
use dreamc_compiler::compiled::Tensor;
use dreamc_compiler::format::{NV, NV_HEAD, Packed, Unpackable};
use dreamc_compiler::{Options, compile};
use dreamc_data::{Batches, DataError, NO_LOSS};
use dreamc_device::cpu::{CpuDevice, CpuOptions};
use dreamc_dsl::Spec;
use dreamc_dsl::spec::{OptimizerKind, Precision};
use std::collections::HashMap;
use thiserror::Error;

/// Most tokens of a row.
pub const SEQUENCE: u64 = 512;

/// Most rows that are read.
pub const ROWS: u64 = 64;

/// Shares of the largest number of a block that scales are fitted to.
const CLIPS: [f32; 15] =
    [1.0, 0.98, 0.96, 0.94, 0.92, 0.9, 0.88, 0.86, 0.84, 0.82, 0.79, 0.76, 0.72, 0.68, 0.63];

/// Why a text is not calibrated with.
#[derive(Debug, Error)]
pub enum CalibrateError {
    /// The model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The text.
    #[error(transparent)]
    Data(#[from] DataError),
    /// It is too short.
    #[error(
        "the calibration text has {tokens} tokens to learn, fewer than a row of {row}: give a longer one"
    )]
    Short {
        /// Its tokens.
        tokens: u64,
        /// Tokens of a row.
        row: u64,
    },
    /// Adapters freeze the matrices.
    #[error(
        "the matrices of a model with adapters are its base's: `dreamc merge` it first, or quantise the base"
    )]
    Adapters,
    /// A gradient is not a number.
    #[error("the gradient of {tensor} on the calibration text is not finite")]
    NotFinite {
        /// Whose.
        tensor: String,
    },
}

/// The mean square of the gradient of each number of tensors, and the second moments of its
/// columns, by name.
#[derive(Clone, Debug, Default)]
pub struct Importance {
    squares: HashMap<String, Vec<f32>>,
    moments: HashMap<String, Moments>,
}

impl Importance {
    /// Over rows of a text, one at a time, of the matrices that are wanted.
    pub fn measure(
        spec: &Spec,
        weights: &Weights,
        mut batches: Batches,
        wanted: impl Fn(&Tensor) -> bool,
    ) -> Result<Self, CalibrateError> {
        if spec.model.adapt.is_some() {
            return Err(CalibrateError::Adapters);
        }
        let mut spec = spec.clone();
        let train = &mut spec.train;
        (train.only, train.freeze, train.groups) = (vec![], vec![], vec![]);
        (train.dpo, train.transfer, train.memory) = (None, None, None);
        // Nothing is moved: the least of states.
        (train.optimizer, train.moments) = (OptimizerKind::Lion, Precision::Bf16);
        let sequence = prepare::sequence(&spec);
        let segments = prepare::masked(&spec);
        let options = Options { train: true, segments, ..prepare::forward(1, sequence) };
        let compiled = compile(&spec, &options).map_err(ModelError::from)?;
        let device = CpuDevice::new(CpuOptions::default());
        let mut model = Model::load(&device, compiled)?;
        model.restore(weights)?;
        let tensors: Vec<Tensor> =
            model.compiled().tensors.iter().filter(|t| t.gradient.is_some() && wanted(t)).cloned().collect();
        let mut squares: HashMap<String, Vec<f32>> =
            tensors.iter().map(|t| (t.name.clone(), vec![0.0; t.elements() as usize])).collect();
        let of = |t: &Tensor| {
            let (wide, high) = (t.shape.last().copied().unwrap_or(1), t.shape.iter().nth_back(1));
            let matrices = t.elements() / (wide * high.copied().unwrap_or(1)).max(1);
            (t.name.clone(), Moments::new(matrices as usize, wide as usize))
        };
        let mut moments: HashMap<String, Moments> = tensors.iter().map(of).collect();
        let (mut rows, mut tokens) = (0u64, 0);
        while let Some(batch) = batches.take(1)? {
            let learned = batch.targets.iter().filter(|&&target| target != NO_LOSS).count() as u64;
            if learned == 0 {
                continue;
            }
            (rows, tokens) = (rows + 1, tokens + learned);
            model.drop_step()?;
            model.begin_step()?;
            model.backward(&batch, Scale { loss: 1.0, auxiliary: 0.0 }, None)?;
            for tensor in &tensors {
                let (Some(sums), Some(gradient)) = (squares.get_mut(&tensor.name), model.gradient(tensor)?)
                else {
                    continue;
                };
                if gradient.iter().any(|g| !g.is_finite()) {
                    return Err(CalibrateError::NotFinite { tensor: tensor.name.clone() });
                }
                sums.iter_mut().zip(&gradient).for_each(|(sum, g)| *sum += g * g);
                if let Some(moments) = moments.get_mut(&tensor.name) {
                    moments.add(&device, &gradient);
                }
            }
        }
        if tokens < sequence {
            return Err(CalibrateError::Short { tokens, row: sequence });
        }
        squares.values_mut().flatten().for_each(|sum| *sum /= rows as f32);
        Ok(Importance { squares, moments })
    }

    /// That of numbers of a tensor from number `at` on; none where the text says nothing of it.
    pub fn of(&self, tensor: &str, at: u64, count: u64) -> Option<&[f32]> {
        self.squares.get(tensor)?.get(at as usize..(at + count) as usize)
    }

    /// How errors of a matrix of a tensor go on in its rows; none where the text says nothing of
    /// it.
    pub fn factors(&self, tensor: &str, matrix: usize) -> Option<Vec<Factor>> {
        self.moments.get(tensor).map(|moments| moments.factors(matrix))
    }
}

/// The block of numbers whose scale is that of the least weighted error.
fn fitted(packed: Packed, (own, of_tensor): (&[f32], f32), weights: &[f32]) -> Result<Vec<u8>, Unpackable> {
    if let Packed::Nvfp4(_) = packed {
        return fit_nvfp4((own, of_tensor), weights);
    }
    let largest = own.iter().fold(0f32, |most, x| most.max(x.abs()));
    let (mut block, mut unpacked, mut clipped) = (vec![], vec![0.0; own.len()], vec![0.0; own.len()]);
    let mut best: Option<(f64, Vec<u8>)> = None;
    // A scale that is a power of two is the next or the last one; a number alone has none.
    let (clips, moves) = match packed {
        Packed::Mxfp4 => (&CLIPS[..1], &[0, 1, -1][..]),
        Packed::F16 => (&CLIPS[..1], &[0][..]),
        _ => (&CLIPS[..], &[0][..]),
    };
    for (clip, by) in clips.iter().flat_map(|clip| moves.iter().map(move |by| (*clip, *by))) {
        let most = clip * largest;
        clipped.iter_mut().zip(own).for_each(|(to, x)| *to = x.clamp(-most, most));
        // A number that a block cannot hold is one whose scale is to be fitted to it.
        let numbers = if clip == 1.0 { own } else { &clipped[..] };
        block.clear();
        packed.pack_moved(numbers, of_tensor, by, &mut block)?;
        packed.unpack(&block, &mut unpacked);
        let error = error(own, &unpacked, weights);
        if best.as_ref().is_none_or(|(least, _)| error < *least) {
            best = Some((error, block.clone()));
        }
    }
    Ok(best.map(|(_, block)| block).unwrap_or_default())
}

/// The sum of weighted squares of what rounding changes.
fn error(own: &[f32], unpacked: &[f32], weights: &[f32]) -> f64 {
    // Numbers that the text never reaches count a little, so that they are not lost.
    let mean = weights.iter().map(|w| f64::from(*w)).sum::<f64>() / weights.len() as f64;
    let floor = if mean > 0.0 { 0.01 * mean } else { 1.0 };
    let each = own.iter().zip(unpacked).zip(weights);
    each.map(|((x, q), w)| (f64::from(*w) + floor) * (f64::from(*x) - f64::from(*q)).powi(2)).sum()
}

/// A block of nvfp4 for a given scale of its tensor. Each scale of the block is the one with the
/// least error among codes near that which the largest number asks for.
fn fit_nvfp4((own, of_tensor): (&[f32], f32), weights: &[f32]) -> Result<Vec<u8>, Unpackable> {
    let format = Packed::Nvfp4(NV.0 as u32);
    let mut best = vec![];
    format.pack_some(own, of_tensor, &mut best)?;
    let (mut block, mut unpacked) = (vec![], vec![0.0; NV.0]);
    let mut least = [f64::INFINITY; NV.0 / NV.1];
    for by in [0, -1, 1, -2, 2, -3, 3, -4, 4] {
        block.clear();
        format.pack_moved(own, of_tensor, by, &mut block)?;
        format.unpack(&block, &mut unpacked);
        for (part, least) in least.iter_mut().enumerate() {
            let range = part * NV.1..(part + 1) * NV.1;
            let error = error(&own[range.clone()], &unpacked[range.clone()], &weights[range]);
            if error < *least {
                *least = error;
                best[NV_HEAD + part] = block[NV_HEAD + part];
                let codes = NV_HEAD + 4 + part * NV.1 / 2..NV_HEAD + 4 + (part + 1) * NV.1 / 2;
                best[codes.clone()].copy_from_slice(&block[codes]);
            }
        }
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dreamc_data::rng::Philox;

    /// In every format the weighted error is at most that of rounding to nearest, and less in most.
    #[test]
    fn scales_of_the_least_error_are_found() {
        let mut random = Philox::new(1, "calibration").stream(0);
        let n = 4096;
        let values: Vec<f32> = (0..n).map(|_| (random.unit() + random.unit() - 1.0) as f32).collect();
        let importance: Vec<f32> = (0..n).map(|_| random.unit().powi(4) as f32).collect();
        for name in Packed::NAMES {
            // A row of nvfp4 is fitted 64 numbers at a time.
            let packed = Packed::named(name, NV.0 as u64).unwrap();
            let error = |bytes: &[u8]| -> f64 {
                let mut found = vec![0.0; n];
                packed.unpack(bytes, &mut found);
                let each = values.iter().zip(&found).zip(&importance);
                each.map(|((x, q), w)| f64::from(*w) * f64::from(x - q).powi(2)).sum()
            };
            let (mut nearest, mut own) = (vec![], vec![]);
            packed.pack_some(&values, 1.0, &mut nearest).unwrap();
            let unit = packed.unit();
            for (values, weights) in values.chunks_exact(unit).zip(importance.chunks_exact(unit)) {
                own.extend(fitted(packed, (values, 1.0), weights).unwrap());
            }
            assert_eq!(nearest.len(), own.len(), "{name}");
            let (nearest, own) = (error(&nearest), error(&own));
            let share = match name {
                "q4_0" | "mxfp4" | "nvfp4" => 0.97,
                // Numbers that count nothing here count a little there.
                _ => 1.01,
            };
            assert!(own <= share * nearest, "{name}: {own:e}, to nearest {nearest:e}");
        }
        let bad = fitted(Packed::Q4, (&[f32::NAN; 32], 1.0), &[1.0; 32]).unwrap_err();
        assert_eq!(bad.at, 0);
    }
}

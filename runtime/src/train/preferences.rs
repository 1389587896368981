//! Preferences: pairs of answers, and how much likelier the model found the better one before it
//! was trained on them (DPO, 2305.18290).
//!
//! *In*: a model and the pairs of a dataset. *Out*: the [`Reference`] of every pair, the loss and
//! the share of held-out pairs that are [`Preferred`]. *Promise*: the reference is computed once,
//! by the weights that a run begins with, and kept in its folder with a checksum; a run goes on
//! with those numbers or not at all.

use super::error::TrainError;
use super::folder::RunFolder;
use crate::checkpoint::CheckpointError;
use crate::checkpoint::safetensors::{Dtype, Tensors, write_stored};
use crate::evaluate::EvaluateError;
use crate::model::Model;
use dreamc_data::files;
use dreamc_data::{Batch, Batches, DataError, Dataset};
use dreamc_device::group::{Group, GroupError};
use dreamc_dsl::spec::Dpo;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The file of a run that has them.
pub const REFERENCE: &str = "reference.safetensors";

/// `ln π(chosen) - ln π(rejected)` of every pair by the weights that a run begins with, by the
/// number of the pair in its file; NaN of those that fit no row.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reference {
    /// Of the file that is learned from.
    learned: Vec<f32>,
    /// Of the file that held-out pairs are in, which may be the same.
    held: Vec<f32>,
}

/// Held-out pairs by a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Preferred {
    /// Mean loss, in nats.
    pub loss: f64,
    /// Share of pairs whose better answer has gained on the other.
    pub share: f64,
    /// Mean of `β·(ln π(chosen) - ln π(rejected) - reference)`.
    pub margin: f64,
    /// How many pairs.
    pub pairs: u64,
}

/// `-(1 - ε) ln σ(z) - ε ln σ(-z)`.
fn loss(z: f64, smoothing: f64) -> f64 {
    let softplus = |x: f64| x.max(0.0) + (-x.abs()).exp().ln_1p();
    (1.0 - smoothing) * softplus(-z) + smoothing * softplus(z)
}

/// The pairs of these batches, by number, and how much likelier the better answer of each is.
fn margins(model: &mut Model, mut pairs: Batches) -> Result<Vec<(u64, f64)>, EvaluateError> {
    let mut found = vec![];
    while let Some(batch) = pairs.take(model.batch())? {
        let nll = model.evaluate(&batch)?;
        let n = batch.sequence;
        let answer = |row: usize| -> f64 {
            let targets = batch.targets[row * n..][..n].iter().zip(&nll[row * n..][..n]);
            targets.filter(|(target, _)| **target >= 0).map(|(_, nats)| -f64::from(*nats)).sum()
        };
        for (pair, documents) in batch.documents.chunks_exact(2).enumerate() {
            found.push((documents[0] / 2, answer(2 * pair) - answer(2 * pair + 1)));
        }
    }
    Ok(found)
}

impl Reference {
    /// That of the model as it is.
    pub fn of(model: &mut Model, dataset: &Dataset) -> Result<Self, EvaluateError> {
        let (learned, held) = dataset.pair_documents();
        let mut reference = Reference {
            learned: vec![f32::NAN; learned as usize / 2],
            held: vec![f32::NAN; held as usize / 2],
        };
        for (held_out, values) in [(false, &mut reference.learned), (true, &mut reference.held)] {
            let Some(pairs) = dataset.pairs(held_out)? else { continue };
            for (pair, margin) in margins(model, pairs)? {
                if let Some(value) = values.get_mut(pair as usize) {
                    *value = margin as f32;
                }
            }
        }
        Ok(reference)
    }

    /// The bytes of its numbers.
    fn bytes(&self) -> Vec<u8> {
        self.learned.iter().chain(&self.held).flat_map(|x| x.to_le_bytes()).collect()
    }

    /// Keeps it in a run's folder.
    pub fn write(&self, folder: &RunFolder, data_hash: &str) -> Result<(), TrainError> {
        let path = folder.path().join(REFERENCE);
        let sum = blake3::hash(&self.bytes()).to_hex().to_string();
        let entries = [("learned", &self.learned), ("held", &self.held)]
            .map(|(name, values)| (name.to_string(), vec![values.len() as u64], Dtype::F32));
        let metadata = [("data", data_hash), ("blake3", &sum)];
        let write = files::write_atomic(&path, |out| {
            write_stored(out, &metadata, &entries, |i, out| {
                let values = [&self.learned, &self.held][i];
                values.iter().try_for_each(|x| out.write_all(&x.to_le_bytes()))
            })
        });
        write.map_err(|error| TrainError::Io { path, error })
    }

    /// That of a run which goes on.
    pub fn open(folder: &Path, data_hash: &str) -> Result<Self, CheckpointError> {
        let path = folder.join(REFERENCE);
        let corrupt =
            |problem: &str| CheckpointError::Corrupt { path: path.clone(), problem: problem.into() };
        let file = Tensors::open(&path)?;
        let get = |name: &str| {
            let found = file.get(name)?;
            found.map(|(_, values)| values).ok_or_else(|| corrupt("lacks the reference of the run's pairs"))
        };
        let reference = Reference { learned: get("learned")?, held: get("held")? };
        let sum = blake3::hash(&reference.bytes()).to_hex().to_string();
        if file.metadata("blake3") != Some(&sum) {
            return Err(corrupt("is damaged: its checksum is another; begin the run anew"));
        }
        if file.metadata("data") != Some(data_hash) {
            return Err(corrupt("is the reference of other data; begin the run anew"));
        }
        Ok(reference)
    }

    /// Shares that of rank 0.
    pub fn share(self, group: &Group) -> Result<Self, GroupError> {
        if group.size() == 1 {
            return Ok(self);
        }
        let count = (self.learned.len() as u64).to_le_bytes();
        let bytes = group.broadcast(0, &[&count[..], &self.bytes()].concat())?;
        let (count, bytes) = bytes.split_at(count.len().min(bytes.len()));
        let count = count.try_into().map_or(0, u64::from_le_bytes);
        let mut learned: Vec<f32> = bytemuck::pod_collect_to_vec(bytes);
        let held = learned.split_off((count as usize).min(learned.len()));
        Ok(Reference { learned, held })
    }

    /// Adds the reference of its pairs to a batch to learn from.
    pub fn give(&self, batch: &mut Batch) -> Result<(), DataError> {
        batch.reference.clear();
        for pair in batch.documents.chunks_exact(2) {
            let found = self.learned.get(pair[0] as usize / 2).filter(|x| !x.is_nan());
            let missing = || DataError::Section(format!("pair {} has no reference", pair[0] / 2 + 1));
            batch.reference.push(*found.ok_or_else(missing)?);
        }
        Ok(())
    }

    /// At most `most` held-out pairs; `None` where none are held out.
    pub fn measure(
        &self,
        model: &mut Model,
        dataset: &Dataset,
        dpo: Dpo,
        most: u64,
    ) -> Result<Option<Preferred>, EvaluateError> {
        let Some(pairs) = dataset.pairs(true)? else { return Ok(None) };
        let mut all = Preferred::default();
        for (pair, margin) in margins(model, pairs.at_most(most.max(1)))? {
            let Some(reference) = self.held.get(pair as usize).filter(|x| !x.is_nan()) else { continue };
            let z = dpo.beta * (margin - f64::from(*reference));
            all.loss += loss(z, dpo.smoothing);
            all.share += f64::from(u8::from(z > 0.0));
            all.margin += z;
            all.pairs += 1;
        }
        let n = all.pairs as f64;
        let of = |sum: f64| sum / n;
        let (loss, share, margin) = (of(all.loss), of(all.share), of(all.margin));
        Ok((all.pairs > 0).then_some(Preferred { loss, share, margin, ..all }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loss_is_the_logarithm_of_a_sigmoid_on_both_sides() {
        for z in [-800.0, -3.0, -0.1, 0.0, 0.1, 3.0, 800.0f64] {
            let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
            let plain = if z < -700.0 { -z } else { -sigmoid(z).ln() };
            assert!((loss(z, 0.0) - plain).abs() < 1e-12 * plain.max(1.0), "{z}");
            assert!((loss(z, 0.2) - (0.8 * loss(z, 0.0) + 0.2 * loss(-z, 0.0))).abs() < 1e-9, "{z}");
        }
    }

    #[test]
    fn a_pair_without_a_reference_is_an_error() {
        let reference = Reference { learned: vec![0.5, f32::NAN, -1.0], held: vec![] };
        let mut batch = Batch { documents: vec![4, 5, 0, 1], ..Batch::new(1) };
        reference.give(&mut batch).unwrap();
        assert_eq!(batch.reference, [-1.0, 0.5]);
        for document in [2, 6] {
            let mut batch = Batch { documents: vec![document, document + 1], ..Batch::new(1) };
            assert!(reference.give(&mut batch).is_err());
        }
    }
}

//! Adapters of a trained model, and the model that they and their base are together.
//!
//! *In*: weights whose specification has `adapt`. *Out*: [`adapters`], each with the rows of the
//! matrix that it adds to; [`merge`], a folder like that of an import in which every matrix is
//! `W + alpha/rank · B A`, of DoRA each row with its magnitude. *Promise*: what is not adapted is
//! copied bit for bit; a merged number is that of f64, rounded once to the type that the matrix has
//! in its file.

use crate::checkpoint::safetensors::{Dtype, write_stored};
use crate::checkpoint::{CheckpointError, Weights, folder};
use crate::train::prepare;
use dreamc_compiler::bind::{Adapted, Factor, Slice};
use dreamc_compiler::compiled::Tensor;
use dreamc_compiler::lower::LEAST_NORM as LEAST;
use dreamc_compiler::{CompileError, compile};
use dreamc_data::sums;
use dreamc_dsl::spec::Model;
use dreamc_dsl::{Spec, Spelling};
use std::io::{self, Write};
use std::path::Path;
use thiserror::Error;

/// Why adapters are not merged.
#[derive(Debug, Error)]
pub enum AdaptError {
    /// A file, or the folder to write.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The specification.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// There is nothing to merge.
    #[error("the model has no adapters: its specification has no `adapt`")]
    None,
}

/// A pair of factors, and the rows that their product adds to.
#[derive(Clone, Debug, PartialEq)]
pub struct Adapter {
    /// The name of the tensor.
    pub tensor: String,
    /// Its shape: matrices may be several.
    pub shape: Vec<u64>,
    /// The first of the rows of each of its matrices.
    pub first: u64,
    /// How many.
    pub rows: u64,
    /// The name of `A`, `[.., rank, in]`.
    pub a: String,
    /// The name of `B`, `[.., rows, rank]`.
    pub b: String,
    /// The names of magnitudes and of the matrix's own norms, `[.., rows]`, where it is one of
    /// DoRA.
    pub dora: Option<[String; 2]>,
}

impl Adapter {
    /// The norms of its rows of the matrix `w`.
    pub fn norms(&self, w: &[f32]) -> Vec<f32> {
        let [.., high, wide] = self.shape[..] else { return vec![] };
        norms(w, [high, wide], [self.first, self.rows])
    }
}

/// The norms of `rows` rows, from row `first` on, of each of the matrices `[high, wide]` in `w`.
pub(crate) fn norms(w: &[f32], [high, wide]: [u64; 2], [first, rows]: [u64; 2]) -> Vec<f32> {
    let matrices = w.chunks_exact((high * wide).max(1) as usize);
    let own = |m: &[f32]| -> Vec<f32> {
        let rows = m.chunks_exact(wide.max(1) as usize).skip(first as usize).take(rows as usize);
        rows.map(|row| row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt() as f32).collect()
    };
    matrices.flat_map(own).collect()
}

/// The first of an adapter's rows among `all` of its tensor.
pub(crate) fn first(matrix: Adapted, all: u64, rows: u64) -> u64 {
    match matrix.rows() {
        Slice::All | Slice::First(_) => 0,
        Slice::Last(_, n) => all.saturating_sub(n.saturating_mul(rows)),
    }
}

/// The tensors of a model.
pub fn tensors(spec: &Spec) -> Result<Vec<Tensor>, CompileError> {
    // One token is enough to learn which tensors the model has.
    Ok(compile(spec, &prepare::forward(1, 1))?.tensors)
}

/// The adapters among the tensors of a model, in their order.
pub fn adapters(tensors: &[Tensor]) -> Result<Vec<Adapter>, CompileError> {
    let mut found = vec![];
    for a in tensors {
        let Some((matrix, Factor::A)) = a.part.adapter() else { continue };
        let owner = a.name.strip_suffix(a.part.path()).unwrap_or_default();
        let beside = |path: &str| {
            let name = format!("{owner}{path}");
            tensors.iter().find(|t| t.name == name)
        };
        let missing = CompileError::Unsupported("an adapter without its matrix");
        let (b, w) = (beside(matrix.adapter(Factor::B).path()), beside(matrix.path()));
        let (Some(b), Some(w)) = (b, w) else { return Err(missing) };
        let height = |t: &Tensor| t.shape.iter().rev().nth(1).copied().unwrap_or(0);
        let (rows, all) = (height(b), height(w));
        let first = first(matrix, all, rows);
        let (tensor, shape) = (w.name.clone(), w.shape.clone());
        let vector = |factor| beside(matrix.adapter(factor).path()).map(|t| t.name.clone());
        let dora = vector(Factor::Magnitude).zip(vector(Factor::Norm)).map(|(m, n)| [m, n]);
        found.push(Adapter { tensor, shape, first, rows, a: a.name.clone(), b: b.name.clone(), dora });
    }
    Ok(found)
}

/// A model that was merged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Merged {
    /// Matrices that adapters were added to.
    pub matrices: usize,
    /// Bytes of all tensors.
    pub bytes: u64,
    /// Packed matrices, which are f32 now.
    pub unpacked: usize,
}

/// Writes a model with its adapters in its matrices as the folder `to`, with the files of `beside`,
/// which belong to it. A folder that is there already is replaced with `force`, and only if it is
/// one of ours.
pub fn merge(
    spec: &Spec,
    weights: &Weights,
    to: &Path,
    (beside, force): (&[(&'static str, Vec<u8>)], bool),
) -> Result<Merged, AdaptError> {
    folder::free(to, force)?;
    let Some(adapt) = &spec.model.adapt else { return Err(AdaptError::None) };
    let all = tensors(spec)?;
    let adapters = adapters(&all)?;
    let model = Model { adapt: None, ..spec.model.clone() };
    let plain = Spec { model, weights: None, ..spec.clone() };
    let corrupt = |problem| CheckpointError::Corrupt { path: weights.path().to_path_buf(), problem };
    for tensor in &all {
        if weights.stored(&tensor.name).is_none_or(|stored| stored.shape != tensor.shape) {
            return Err(corrupt(format!("lacks the tensor {} {:?}", tensor.name, tensor.shape)).into());
        }
    }
    let (mut entries, mut unpacked) = (vec![], 0);
    for tensor in all.iter().filter(|t| t.part.adapter().is_none()) {
        let Some(stored) = weights.stored(&tensor.name) else { continue };
        unpacked += usize::from(stored.packed.is_some());
        entries.push((tensor.name.clone(), tensor.shape.clone(), stored.dtype));
    }
    let size = |(_, shape, dtype): &(String, Vec<u64>, Dtype)| {
        shape.iter().product::<u64>() * dtype.bitsize() as u64 / 8
    };
    let bytes = entries.iter().map(size).sum();
    let matrices = entries.iter().filter(|(name, ..)| adapters.iter().any(|a| a.tensor == *name)).count();
    let text = dreamc_dsl::show(&plain, Spelling::Yaml);
    let metadata = [("format", "dreamc"), ("spec", text.as_str())];
    let fill = |i: usize, out: &mut dyn Write| {
        let (name, shape, dtype) = &entries[i];
        let own: Vec<&Adapter> = adapters.iter().filter(|a| a.tensor == *name).collect();
        match own[..] {
            [] => {
                let lost = || io::Error::other(format!("tensor {name} is gone"));
                let stored = weights.stored(name).ok_or_else(lost)?;
                stored.copy_elements(0, shape.iter().product(), out)
            }
            _ => whole(weights, name, &own, adapt.scale(), *dtype, out),
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
    Ok(Merged { matrices, bytes, unpacked })
}

/// Writes `W + scale · B A` of a tensor, of DoRA with its magnitudes.
fn whole(
    weights: &Weights,
    name: &str,
    adapters: &[&Adapter],
    scale: f64,
    dtype: Dtype,
    out: &mut dyn Write,
) -> io::Result<()> {
    let get = |name: &str| {
        let found = weights.get(name).map_err(io::Error::other)?;
        found.map(|(_, values)| values).ok_or_else(|| io::Error::other(format!("tensor {name} is gone")))
    };
    let w = get(name)?;
    let numbers = |a: &&Adapter| {
        let magnitudes = a.dora.as_ref().map(|[name, _]| get(name)).transpose()?;
        Ok((get(&a.a)?, get(&a.b)?, magnitudes))
    };
    let factors: Vec<_> = adapters.iter().map(numbers).collect::<io::Result<_>>()?;
    let Some([.., high, wide]) = adapters.first().map(|a| &a.shape[..]) else { return Ok(()) };
    let (high, wide) = (*high as usize, *wide as usize);
    let mut sums = vec![0f64; wide];
    let mut bytes = vec![];
    for (n, row) in w.chunks_exact(wide).enumerate() {
        let (matrix, i) = (n / high, n % high);
        sums.iter_mut().zip(row).for_each(|(sum, w)| *sum = f64::from(*w));
        for (adapter, (a, b, magnitudes)) in adapters.iter().zip(&factors) {
            let rows = adapter.rows as usize;
            let Some(i) = i.checked_sub(adapter.first as usize).filter(|i| *i < rows) else { continue };
            let rank = b.len() * high * wide / (rows * w.len());
            for r in 0..rank {
                let factor = scale * f64::from(b[(matrix * rows + i) * rank + r]);
                let a = &a[(matrix * rank + r) * wide..][..wide];
                sums.iter_mut().zip(a).for_each(|(sum, a)| *sum += factor * f64::from(*a));
            }
            if let Some(magnitude) = magnitudes.as_ref().map(|all| f64::from(all[matrix * rows + i])) {
                let norm = sums.iter().map(|x| x * x).sum::<f64>().max(LEAST).sqrt();
                sums.iter_mut().for_each(|sum| *sum *= magnitude / norm);
            }
        }
        for sum in &sums {
            match dtype {
                Dtype::BF16 => bytes.extend(half::bf16::from_f64(*sum).to_le_bytes()),
                Dtype::F16 => bytes.extend(half::f16::from_f64(*sum).to_le_bytes()),
                _ => bytes.extend((*sum as f32).to_le_bytes()),
            }
        }
        if bytes.len() > 1 << 20 {
            out.write_all(&bytes)?;
            bytes.clear();
        }
    }
    out.write_all(&bytes)
}

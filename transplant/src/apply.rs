//! The numbers of one tensor.
//!
//! *Promise*: what one source gives unchanged is its bits; means, factors and differences are
//! computed in f64 and rounded once. Memory is that of the tensors that a move names, in f64 where
//! they are decomposed.

use crate::{Decomposition, Heads, Move, Source, Step, TransplantError, decompose};
use dreamc_compiler::compiled::Init;

/// Where numbers come from.
pub trait Read {
    /// Shape and numbers of a tensor of the donor.
    fn donor(&self, name: &str) -> Result<(Vec<u64>, Vec<f32>), TransplantError>;

    /// The first values of a tensor of the model, or of noise on it, by its name.
    fn drawn(&self, name: &str, init: Init, elements: usize) -> Vec<f32>;
}

/// The numbers of a tensor that begins like `init` where its move says so.
pub fn values(m: &Move, init: Init, read: &dyn Read) -> Result<Vec<f32>, TransplantError> {
    let elements = m.shape.iter().product::<u64>() as usize;
    let fresh = || read.drawn(&m.to, init, elements);
    let mut out = match &m.steps[..] {
        [Step::Fresh] => fresh(),
        [Step::Zero] => vec![0.0; elements],
        [Step::Stack] => {
            let mut all = vec![];
            for source in &m.from {
                all.extend(taken(source, read)?.1);
            }
            all
        }
        [Step::Factor { base, rank, first }] => factors(&m.from, base, (*rank as usize, *first), read)?,
        steps => {
            let (mut shape, mut numbers) = mean(&m.from, read)?;
            for step in steps {
                (shape, numbers) = stepped(step, (shape, numbers), &m.shape, &fresh);
            }
            numbers
        }
    };
    if out.len() != elements {
        return Err(TransplantError::Read(format!("{} has {} numbers for {:?}", m.to, out.len(), m.shape)));
    }
    if m.noise > 0.0 {
        let mean = out.iter().map(|x| f64::from(*x)).sum::<f64>() / elements.max(1) as f64;
        let square = out.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>();
        let deviation = m.noise * (square / elements.max(1) as f64).sqrt();
        let noise = read.drawn(&format!("{}.noise", m.to), Init::Normal(1.0), elements);
        out.iter_mut().zip(noise).for_each(|(x, n)| *x = (f64::from(*x) + deviation * f64::from(n)) as f32);
    }
    Ok(out)
}

type Shaped = (Vec<u64>, Vec<f32>);

/// A tensor of the donor, or rows of it.
fn taken(source: &Source, read: &dyn Read) -> Result<Shaped, TransplantError> {
    let (mut shape, numbers) = read.donor(&source.name)?;
    let Some(rows) = &source.rows else { return Ok((shape, numbers)) };
    let wide = shape.last().copied().unwrap_or(1);
    if let [.., high, _] = &mut shape[..] {
        *high = rows.end - rows.start;
    }
    let range = (rows.start * wide) as usize..(rows.end * wide) as usize;
    let part = numbers.get(range).map(<[f32]>::to_vec);
    part.map(|part| (shape, part))
        .ok_or_else(|| TransplantError::Read(format!("{} has no such rows", source.name)))
}

/// The mean of all sources by their shares; of one its bits.
pub(crate) fn mean(from: &[Source], read: &dyn Read) -> Result<Shaped, TransplantError> {
    let Some((first, others)) = from.split_first() else {
        return Err(TransplantError::Read("a mean of nothing".into()));
    };
    let (shape, numbers) = taken(first, read)?;
    if others.is_empty() {
        return Ok((shape, numbers));
    }
    let mut sums: Vec<f64> = numbers.iter().map(|x| first.share * f64::from(*x)).collect();
    for source in others {
        let (other, numbers) = taken(source, read)?;
        if other != shape {
            return Err(TransplantError::Read(format!("{} has another shape", source.name)));
        }
        sums.iter_mut().zip(&numbers).for_each(|(sum, x)| *sum += source.share * f64::from(*x));
    }
    Ok((shape, sums.into_iter().map(|x| x as f32).collect()))
}

/// Numbers after one step towards a shape.
fn stepped(step: &Step, (from, numbers): Shaped, to: &[u64], fresh: &dyn Fn() -> Vec<f32>) -> Shaped {
    let wide = from.last().copied().unwrap_or(1) as usize;
    match step {
        Step::Slice => (to.to_vec(), boxed((&from, &numbers), (to, vec![0.0; size(to)]))),
        Step::Pad { zero } => {
            let under = if *zero { vec![0.0; size(to)] } else { fresh() };
            (to.to_vec(), boxed((&from, &numbers), (to, under)))
        }
        Step::Group(heads) | Step::Repeat(heads) => {
            (to.to_vec(), regrouped(*heads, &numbers, wide_of(&from)))
        }
        Step::Merge(count) => {
            let one = size(to) / to_count(&from, to, *count);
            let groups = numbers.chunks((one * *count as usize).max(1));
            let merged = groups.flat_map(|group| averaged(group, one, *count as usize));
            (to.to_vec(), merged.collect())
        }
        Step::Tile(count) => (to.to_vec(), numbers.repeat(*count as usize)),
        Step::Latent(latent) => (to.to_vec(), latent.made(&numbers, wide)),
        Step::Tokens(tokens) => {
            let mut out = fresh();
            for (row, from) in out.chunks_mut(wide.max(1)).zip(tokens) {
                let first = usize::try_from(*from).ok().map(|from| from * wide);
                if let Some(known) = first.and_then(|first| numbers.get(first..first + wide)) {
                    row.copy_from_slice(known);
                }
            }
            (to.to_vec(), out)
        }
        // They are whole moves, not steps of one.
        Step::Fresh | Step::Zero | Step::Stack | Step::Factor { .. } => (from, numbers),
    }
}

fn size(shape: &[u64]) -> usize {
    shape.iter().product::<u64>() as usize
}

/// Columns of a matrix; a vector is one column.
fn wide_of(shape: &[u64]) -> usize {
    if shape.len() < 2 { 1 } else { shape.last().copied().unwrap_or(1) as usize }
}

/// How many matrices a merged tensor has.
fn to_count(from: &[u64], to: &[u64], merged: u64) -> usize {
    let count = from.first().copied().unwrap_or(1) / merged.max(1);
    if from.len() == to.len() { count.max(1) as usize } else { 1 }
}

/// The mean of `count` runs of `one` numbers.
fn averaged(group: &[f32], one: usize, count: usize) -> Vec<f32> {
    let of = |i: usize| (0..count).map(|k| f64::from(group[k * one + i])).sum::<f64>() / count as f64;
    (0..one).map(|i| of(i) as f32).collect()
}

/// The part that two shapes have in common, of one tensor put into another.
fn boxed((from, numbers): (&[u64], &[f32]), (to, mut out): (&[u64], Vec<f32>)) -> Vec<f32> {
    let (Some(wide_from), Some(wide_to)) = (from.last(), to.last()) else { return numbers.to_vec() };
    let (wide_from, wide_to) = (*wide_from as usize, *wide_to as usize);
    let common = wide_from.min(wide_to);
    let rows: usize = from[..from.len() - 1].iter().zip(to).map(|(a, b)| *a.min(b) as usize).product();
    for row in 0..rows {
        // The row's place in each of the two, dimension by dimension.
        let (mut rest, mut at_from, mut at_to, mut step_from, mut step_to) = (row, 0, 0, 1, 1);
        for (a, b) in from[..from.len() - 1].iter().zip(to).rev() {
            let least = (*a.min(b) as usize).max(1);
            let place = rest % least;
            rest /= least;
            (at_from, at_to) = (at_from + place * step_from, at_to + place * step_to);
            (step_from, step_to) = (step_from * *a as usize, step_to * *b as usize);
        }
        out[at_to * wide_to..][..common].copy_from_slice(&numbers[at_from * wide_from..][..common]);
    }
    out
}

/// Queries as they are, then keys and values of another number of heads: means of neighbours
/// (2305.13245), or each several times.
fn regrouped(heads: Heads, numbers: &[f32], wide: usize) -> Vec<f32> {
    let head = heads.size as usize * wide;
    let (from, to) = (heads.from as usize, heads.to as usize);
    let (queries, rest) = numbers.split_at((heads.queries as usize * head).min(numbers.len()));
    let mut out = queries.to_vec();
    for kind in rest.chunks((from * head).max(1)) {
        for i in 0..to {
            if to >= from {
                out.extend(&kind[i * from / to * head..][..head]);
            } else {
                let many = from / to;
                out.extend(averaged(&kind[i * many * head..][..many * head], head, many));
            }
        }
    }
    out
}

/// `B = U Σ` or `A = Vᵀ` of the largest singular values of each matrix's difference from the mean,
/// one after another. The mean is of the numbers that the matrix itself is rounded to.
fn factors(
    from: &[Source],
    base: &[Source],
    (rank, first): (usize, bool),
    read: &dyn Read,
) -> Result<Vec<f32>, TransplantError> {
    let mut out = vec![];
    for (d, [high, wide]) in decomposed(from, base, read)? {
        if first {
            let row = |k: usize| d.right.get(k).cloned().unwrap_or_else(|| vec![0.0; wide]);
            out.extend((0..rank).flat_map(|k| row(k).into_iter().map(|x| x as f32)));
        } else {
            let at = |i: usize, k: usize| d.values.get(k).map_or(0.0, |s| s * d.left[k][i]);
            out.extend((0..high).flat_map(|i| (0..rank).map(move |k| (i, k))).map(|(i, k)| at(i, k) as f32));
        }
    }
    Ok(out)
}

/// Differences of each matrix from the mean of `base`, decomposed, with rows and columns.
fn decomposed(
    from: &[Source],
    base: &[Source],
    read: &dyn Read,
) -> Result<Vec<(Decomposition, [usize; 2])>, TransplantError> {
    let (shape, base) = mean(base, read)?;
    let wide = wide_of(&shape);
    let high = base.len() / wide.max(1);
    let of = |source: &Source| {
        let (_, numbers) = taken(source, read)?;
        let difference: Vec<f64> =
            numbers.iter().zip(&base).map(|(w, b)| f64::from(*w) - f64::from(*b)).collect();
        Ok((decompose(&difference, wide), [high, wide]))
    };
    from.iter().map(of).collect()
}

/// The singular values of what each matrix differs by from the mean of `base`, largest first.
pub fn differences(
    from: &[Source],
    base: &[Source],
    read: &dyn Read,
) -> Result<Vec<Vec<f64>>, TransplantError> {
    Ok(decomposed(from, base, read)?.into_iter().map(|(d, _)| d.values).collect())
}

//! Rounding in which later numbers of a row make good for earlier ones.
//!
//! *In*: rows of a matrix, their [`Importance`](super::Importance), and the second moments `H` of
//! the columns of its gradient. *Out*: blocks. *Promise*: scales are those of the least weighted
//! error for what a block has become when it is reached, and each number is the nearest to its own
//! plus what earlier errors ask of it.
//!
//! Errors `e = w - q` of a row cost `e H eᵀ`. With `H = A D Aᵀ`, `A` upper with ones on its
//! diagonal, that is `Σ d_k (e_k + Σ_{i<k} e_i A_ik)²`: column by column, `q_k` is nearest to
//! `w_k + Σ_{i<k} e_i A_ik`. It is GPTQ (2210.17323) as QuIP (2307.13304, section 3) writes it.
//! GPTQ's `H` is that of a matrix's inputs; here it is `Σ Gᵀ G` over the gradients of rows of text
//! (OAC, 2405.15025), which has what comes after the matrix in it, and which every kind of matrix
//! has.

use super::fitted;
use dreamc_compiler::format::{NV, NV_HEAD, Packed, Unpackable};
use dreamc_device::cpu::CpuDevice;
use std::ops::Range;

/// Most columns of a window: errors go no further.
const WINDOW: usize = 2048;
/// Rows that go through the columns together.
const ROWS: usize = 16;
/// The share of the mean of second moments that their diagonal grows by.
const DAMPING: f64 = 0.01;

/// Windows of rows of `wide` numbers.
fn windows(wide: usize) -> impl Iterator<Item = Range<usize>> {
    (0..wide).step_by(WINDOW).map(move |first| first..wide.min(first + WINDOW))
}

/// Second moments of the columns of the gradients of the matrices of a tensor.
#[derive(Clone, Debug)]
pub struct Moments {
    wide: usize,
    /// By matrix and window: `n` by `n`, right above the diagonal.
    sums: Vec<Vec<Vec<f32>>>,
}

impl Moments {
    /// Empty, for matrices with rows of `wide` numbers.
    pub fn new(matrices: usize, wide: usize) -> Self {
        let own = || windows(wide).map(|w| vec![0.0; w.len() * w.len()]).collect();
        Moments { wide, sums: (0..matrices).map(|_| own()).collect() }
    }

    /// Adds those of a gradient of all matrices.
    pub fn add(&mut self, device: &CpuDevice, gradient: &[f32]) {
        let each = gradient.len() / self.sums.len().max(1);
        for (gradient, sums) in gradient.chunks_exact(each.max(1)).zip(&mut self.sums) {
            for (window, sums) in windows(self.wide).zip(sums) {
                device.add_gram(gradient, self.wide, window.start, sums);
            }
        }
    }

    /// How errors go on, of a matrix.
    pub fn factors(&self, matrix: usize) -> Vec<Factor> {
        let Some(sums) = self.sums.get(matrix) else { return vec![] };
        windows(self.wide).zip(sums).map(|(columns, sums)| Factor::of(columns, sums)).collect()
    }
}

/// `A` of a window.
#[derive(Clone, Debug)]
pub struct Factor {
    columns: Range<usize>,
    /// Row by row; what stands on the diagonal and below it has no meaning.
    above: Vec<f32>,
}

impl Factor {
    /// Of second moments, a share of their mean added to the diagonal: as much as it takes.
    fn of(columns: Range<usize>, sums: &[f32]) -> Self {
        let n = columns.len();
        let mean = (0..n).map(|i| f64::from(sums[i * n + i])).sum::<f64>() / n as f64;
        let mut share = DAMPING;
        while mean > 0.0 && share < 1e3 {
            let mut c: Vec<f64> = sums.iter().map(|x| f64::from(*x)).collect();
            (0..n).for_each(|i| c[i * n + i] += share * mean);
            if triangle(&mut c, n).is_some() {
                let above = (0..n * n).map(|at| (c[at] / c[at % n * (n + 1)]) as f32).collect();
                return Factor { columns, above };
            }
            share *= 10.0;
        }
        // A text that says nothing of it: no number makes good for another.
        Factor { columns, above: vec![0.0; n * n] }
    }
}

/// `C`, upper, with `C Cᵀ` a symmetric matrix that is given above its diagonal; `None` where it is
/// not positive definite.
fn triangle(m: &mut [f64], n: usize) -> Option<()> {
    for k in (0..n).rev() {
        let (before, own) = m.split_at_mut(k * n);
        let square = own[k] - dot(&own[k + 1..n], &own[k + 1..n]);
        if !(square > 0.0 && square.is_finite()) {
            return None;
        }
        own[k] = square.sqrt();
        let by = 1.0 / own[k];
        for row in before.chunks_exact_mut(n) {
            row[k] = (row[k] - dot(&row[k + 1..], &own[k + 1..n])) * by;
        }
    }
    Some(())
}

/// Sums in eight lanes.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let (a, b) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    let mut sums = [0.0; 8];
    for (a, b) in a.0.iter().zip(b.0) {
        (0..8).for_each(|i| sums[i] += a[i] * b[i]);
    }
    sums.iter().sum::<f64>() + a.1.iter().zip(b.1).map(|(a, b)| a * b).sum::<f64>()
}

/// Appends the blocks of rows of a matrix, whose tensor has this largest size.
pub fn pack(
    packed: Packed,
    (values, of_tensor): (&[f32], f32),
    importance: &[f32],
    factors: &[Factor],
    to: &mut Vec<u8>,
) -> Result<(), Unpackable> {
    let wide = factors.last().map_or(0, |last| last.columns.end).max(1);
    let groups: Vec<(&[f32], &[f32])> =
        values.chunks(ROWS * wide).zip(importance.chunks(ROWS * wide)).collect();
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let share = groups.len().div_ceil(threads).max(1);
    let some = |number: usize, groups: &[(&[f32], &[f32])]| -> Result<Vec<u8>, Unpackable> {
        let mut bytes = vec![];
        for (i, group) in groups.iter().enumerate() {
            let at = (number * share + i) * ROWS * wide;
            let rows = rows(packed, *group, of_tensor, factors, wide);
            bytes.extend(rows.map_err(|bad| Unpackable { at: at + bad.at, ..bad })?);
        }
        Ok(bytes)
    };
    let all: Vec<Result<Vec<u8>, Unpackable>> = std::thread::scope(|scope| {
        let started: Vec<_> =
            groups.chunks(share).enumerate().map(|(n, part)| scope.spawn(move || some(n, part))).collect();
        let join = |thread: std::thread::ScopedJoinHandle<_>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        started.into_iter().map(join).collect()
    });
    for part in all {
        to.extend(part?);
    }
    Ok(())
}

/// The blocks of some rows.
fn rows(
    packed: Packed,
    (own, importance): (&[f32], &[f32]),
    of_tensor: f32,
    factors: &[Factor],
    wide: usize,
) -> Result<Vec<u8>, Unpackable> {
    // A row of nvfp4 is fitted 64 numbers at a time, each with the scale of the tensor.
    let (format, head) = match packed {
        Packed::Nvfp4(_) => (Packed::Nvfp4(NV.0 as u32), NV_HEAD),
        other => (other, 0),
    };
    let unit = format.unit();
    let mut wanted = own.to_vec();
    let count = own.len() / wide;
    let mut blocks: Vec<Vec<u8>> = vec![vec![]; count];
    let mut found: Vec<Vec<u8>> = vec![vec![]; count];
    for factor in factors {
        let (first, n) = (factor.columns.start, factor.columns.len());
        for (i, after) in factor.above.chunks_exact(n).enumerate() {
            let at = first + i;
            for (r, (block, found)) in blocks.iter_mut().zip(&mut found).enumerate() {
                let row = r * wide;
                if at.is_multiple_of(unit) {
                    let range = row + at..row + at + unit;
                    *block = fitted(format, (&wanted[range.clone()], of_tensor), &importance[range.clone()])
                        .map_err(|bad| fail(own, range.start, bad))?;
                }
                let x = wanted[row + at];
                let error = own[row + at] - format.put(block, at % unit, x);
                let rest = &mut wanted[row + at + 1..row + first + n];
                rest.iter_mut().zip(&after[i + 1..]).for_each(|(x, a)| *x += error * a);
                if (at + 1).is_multiple_of(unit) {
                    let skip = if at < unit { 0 } else { head };
                    found.extend(&block[skip..]);
                }
            }
        }
    }
    Ok(found.concat())
}

/// The place of a number that cannot be held, with its own value where that is NaN or infinite.
fn fail(own: &[f32], first: usize, bad: Unpackable) -> Unpackable {
    let at = first + bad.at;
    let value = if own[at].is_finite() { bad.value } else { own[at] };
    Unpackable { at, value }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dreamc_data::rng::Philox;
    use dreamc_device::cpu::CpuOptions;

    const WIDE: usize = 512;

    /// Gradients whose columns go together, and numbers.
    fn drawn() -> (Moments, Vec<f32>, Vec<f32>) {
        let mut random = Philox::new(3, "feedback").stream(0);
        let mut normal = || (0..6).map(|_| random.unit()).sum::<f64>() - 3.0;
        let rows = 700;
        let shared: Vec<f64> = (0..rows).map(|_| normal()).collect();
        let gradient: Vec<f32> = (0..rows * WIDE)
            .map(|i| (normal() + 1.5 * shared[i / WIDE] * f64::from((i % WIDE).is_multiple_of(3))) as f32)
            .collect();
        let mut moments = Moments::new(1, WIDE);
        moments.add(&CpuDevice::new(CpuOptions { threads: Some(1) }), &gradient);
        let values: Vec<f32> = (0..40 * WIDE).map(|_| normal() as f32).collect();
        let importance = (0..40 * WIDE).map(|_| random.unit() as f32).collect();
        (moments, values, importance)
    }

    /// The numbers of blocks with the scales that [`fitted`] finds, each block by itself.
    fn alone(packed: Packed, values: &[f32], importance: &[f32]) -> Vec<f32> {
        let format = if packed.asks_largest() { Packed::Nvfp4(NV.0 as u32) } else { packed };
        let unit = format.unit();
        let mut found = vec![0.0; values.len()];
        let blocks = values.chunks_exact(unit).zip(importance.chunks_exact(unit));
        for ((own, weights), found) in blocks.zip(found.chunks_exact_mut(unit)) {
            format.unpack(&fitted(format, (own, 4.0), weights).unwrap(), found);
        }
        found
    }

    /// The numbers with feedback.
    fn fed(packed: Packed, values: &[f32], importance: &[f32], factors: &[Factor]) -> Vec<f32> {
        let (mut bytes, mut found) = (vec![], vec![0.0; values.len()]);
        pack(packed, (values, 4.0), importance, factors, &mut bytes).unwrap();
        assert_eq!(bytes.len(), values.len() / packed.unit() * packed.bytes());
        packed.unpack(&bytes, &mut found);
        found
    }

    #[test]
    fn a_factor_and_its_transpose_are_the_moments() {
        let n = 5;
        let right: Vec<f64> = (0..n * n)
            .map(|at| {
                let (i, j) = (at / n, at % n);
                1.0 / (1 + i + j) as f64 + if i == j { 0.5 } else { 0.0 }
            })
            .collect();
        let mut c = right.clone();
        triangle(&mut c, n).unwrap();
        for (i, j) in (0..n).flat_map(|i| (i..n).map(move |j| (i, j))) {
            let sum: f64 = (j..n).map(|k| c[i * n + k] * c[j * n + k]).sum();
            assert!((sum - right[i * n + j]).abs() < 1e-12, "{i} {j}");
        }
        assert!(triangle(&mut [1.0, 2.0, 2.0, 1.0], 2).is_none());
    }

    /// Errors cost less by the moments than without feedback, in every format.
    #[test]
    fn errors_that_later_numbers_make_good_for_cost_less() {
        let (moments, values, importance) = drawn();
        let sums = &moments.sums[0][0];
        let h = |i: usize, j: usize| f64::from(sums[i.min(j) * WIDE + i.max(j)]);
        let factors = moments.factors(0);
        for name in Packed::NAMES {
            let packed = Packed::named(name, WIDE as u64).unwrap();
            let cost = |found: &[f32]| -> f64 {
                let of = |row: usize| {
                    let errors: Vec<f64> = (0..WIDE)
                        .map(|i| f64::from(values[row * WIDE + i] - found[row * WIDE + i]))
                        .collect();
                    let each = (0..WIDE).flat_map(|i| (0..WIDE).map(move |j| (i, j)));
                    each.map(|(i, j)| errors[i] * errors[j] * h(i, j)).sum::<f64>()
                };
                (0..8).map(of).sum()
            };
            let plain = cost(&alone(packed, &values, &importance));
            let fed = cost(&fed(packed, &values, &importance, &factors));
            assert!(fed < 0.9 * plain, "{name}: {fed:e}, without {plain:e}");
        }
    }

    /// Moments of nothing leave every number to itself.
    #[test]
    fn without_moments_numbers_are_the_nearest_of_their_scales() {
        let (_, values, importance) = drawn();
        let factors = Moments::new(1, WIDE).factors(0);
        for name in Packed::NAMES {
            let packed = Packed::named(name, WIDE as u64).unwrap();
            let (plain, fed) =
                (alone(packed, &values, &importance), fed(packed, &values, &importance, &factors));
            // Blocks are packed by a scale before it is rounded, and numbers put by what it became.
            for (x, (plain, fed)) in values.iter().zip(plain.iter().zip(&fed)) {
                let (own, other) = ((x - fed).abs(), (x - plain).abs());
                assert!(own <= other * 1.0001 + 1e-6, "{name}: {x} became {fed}, by itself {plain}");
            }
        }
        let mut bad = values.clone();
        bad[20 * WIDE + 7] = f32::NAN;
        let found = pack(Packed::Q4, (&bad, 4.0), &importance, &factors, &mut vec![]).unwrap_err();
        assert_eq!(found.at, 20 * WIDE + 7);
        assert!(found.value.is_nan());
    }
}

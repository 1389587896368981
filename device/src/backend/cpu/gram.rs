//! Products of the columns of a matrix with one another, of numbers on the host.

use super::product::{Side, block, block_scratch};
use super::{CpuDevice, Pointer};

/// Columns of a tile.
const TILE: usize = 256;

impl CpuDevice {
    /// Adds `Xᵀ X` to `sums`, where `X` is columns `first` to `first + n` of rows of `wide` numbers
    /// and `sums` are `n` by `n`. Tiles below the diagonal stay.
    ///
    /// Sizes that do not belong together add nothing.
    pub fn add_gram(&self, rows: &[f32], wide: usize, first: usize, sums: &mut [f32]) {
        let n = sums.len().isqrt();
        if n == 0 || n * n != sums.len() || first + n > wide {
            return;
        }
        let k = rows.len() / wide;
        let pieces = n.div_ceil(TILE);
        let upper: Vec<(usize, usize)> = (0..pieces).flat_map(|i| (i..pieces).map(move |j| (i, j))).collect();
        let to = Pointer::to(sums);
        let from = Pointer(rows.as_ptr().cast_mut());
        let tile = |task: usize, _: usize| {
            let (i, j) = (upper[task].0 * TILE, upper[task].1 * TILE);
            let (m, columns) = (TILE.min(n - i), TILE.min(n - j));
            let side = |at: usize| Side::Strided { start: from.add(first + at), line: 1, step: wide };
            let mut scratch = vec![0.0; block_scratch(m, columns, k)];
            // SAFETY: rows have `wide` numbers, and the columns are among them; no two tasks have
            // the same tile of the sums.
            unsafe { block((m, columns, k), side(i), side(j), to.add(i * n + j), n, true, &mut scratch) };
        };
        // A task that panics leaves its tile as it was.
        let _ = self.pool.run(upper.len(), &tile);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::CpuOptions;

    #[test]
    fn products_of_columns_are_added() {
        let (k, wide, first, n) = (37, 700, 50, 600);
        let rows: Vec<f32> = (0..k * wide).map(|i| ((i * 37 + 5) % 101) as f32 / 50.0 - 1.0).collect();
        let mut sums = vec![0.5f32; n * n];
        CpuDevice::new(CpuOptions { threads: Some(2) }).add_gram(&rows, wide, first, &mut sums);
        for (i, j) in [(0, 0), (0, 599), (255, 256), (300, 301), (599, 599), (100, 400)] {
            let of = |r: usize, c: usize| f64::from(rows[r * wide + first + c]);
            let right = 0.5 + (0..k).map(|r| of(r, i) * of(r, j)).sum::<f64>();
            assert!((f64::from(sums[i * n + j]) - right).abs() < 1e-4, "{i} {j}");
        }
        assert_eq!(sums[599 * n], 0.5);
    }
}

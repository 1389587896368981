//! Singular values of a matrix, by one-sided Jacobi rotations.
//!
//! *In*: a matrix of rows. *Out*: [`Decomposition`], `W = U diag(σ) Vᵀ`, σ descending. *Promise*:
//! all in f64, to about 1e-12 of the largest; nothing random, so the same matrix gives the same
//! bits.

/// Sweeps over all pairs of columns; ten are enough for anything that is no test of this.
const SWEEPS: usize = 60;

/// Columns are orthogonal whose cosine is below this.
const ORTHOGONAL: f64 = 1e-14;

/// `W = U diag(σ) Vᵀ`.
#[derive(Clone, Debug, PartialEq)]
pub struct Decomposition {
    /// The columns of `U`, each of as many numbers as `W` has rows.
    pub left: Vec<Vec<f64>>,
    /// The singular values, the largest first.
    pub values: Vec<f64>,
    /// The columns of `V`, each of as many numbers as `W` has columns.
    pub right: Vec<Vec<f64>>,
}

/// Decomposes a matrix of `columns` columns.
pub fn decompose(w: &[f64], columns: usize) -> Decomposition {
    let columns = columns.max(1);
    let rows = w.len() / columns;
    if rows >= columns {
        return tall(w, rows, columns);
    }
    let flipped: Vec<f64> = (0..columns).flat_map(|j| (0..rows).map(move |i| w[i * columns + j])).collect();
    let Decomposition { left, values, right } = tall(&flipped, columns, rows);
    Decomposition { left: right, values, right: left }
}

/// Of a matrix that has no more columns than rows.
fn tall(w: &[f64], rows: usize, columns: usize) -> Decomposition {
    let mut u: Vec<Vec<f64>> =
        (0..columns).map(|j| (0..rows).map(|i| w[i * columns + j]).collect()).collect();
    let unit = |j: usize| (0..columns).map(|i| if i == j { 1.0 } else { 0.0 }).collect();
    let mut v: Vec<Vec<f64>> = (0..columns).map(unit).collect();
    for _ in 0..SWEEPS {
        let mut turned = false;
        for p in 0..columns {
            for q in p + 1..columns {
                let (a, b, c) = (dot(&u[p], &u[p]), dot(&u[q], &u[q]), dot(&u[p], &u[q]));
                if c.abs() <= ORTHOGONAL * (a * b).sqrt() || c == 0.0 {
                    continue;
                }
                turned = true;
                let zeta = (b - a) / (2.0 * c);
                let t = zeta.signum() / (zeta.abs() + zeta.hypot(1.0));
                let t = if zeta == 0.0 { 1.0 } else { t };
                let cosine = t.hypot(1.0).recip();
                rotate(&mut u, p, q, (cosine, cosine * t));
                rotate(&mut v, p, q, (cosine, cosine * t));
            }
        }
        if !turned {
            break;
        }
    }
    let values: Vec<f64> = u.iter().map(|column| dot(column, column).sqrt()).collect();
    let mut order: Vec<usize> = (0..columns).collect();
    order.sort_by(|a, b| values[*b].total_cmp(&values[*a]));
    let left = order.iter().map(|j| {
        let factor = if values[*j] > 0.0 { values[*j].recip() } else { 0.0 };
        u[*j].iter().map(|x| x * factor).collect()
    });
    Decomposition {
        left: left.collect(),
        values: order.iter().map(|j| values[*j]).collect(),
        right: order.iter().map(|j| v[*j].clone()).collect(),
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Columns `p` and `q` turned by an angle, `p` before `q`.
fn rotate(columns: &mut [Vec<f64>], p: usize, q: usize, (cosine, sine): (f64, f64)) {
    let (before, behind) = columns.split_at_mut(q);
    for (x, y) in before[p].iter_mut().zip(&mut behind[0]) {
        (*x, *y) = (cosine * *x - sine * *y, sine * *x + cosine * *y);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matrix_is_the_product_of_its_factors() {
        for (rows, columns) in [(5, 3), (3, 5), (4, 4), (1, 6), (6, 1)] {
            let w: Vec<f64> = (0..rows * columns).map(|i| ((i * 37 + 11) % 23) as f64 / 7.0 - 1.5).collect();
            let d = decompose(&w, columns);
            assert!(d.values.is_sorted_by(|a, b| a >= b), "{:?}", d.values);
            for i in 0..rows {
                for j in 0..columns {
                    let terms = (0..d.values.len()).map(|k| d.left[k][i] * d.values[k] * d.right[k][j]);
                    let sum: f64 = terms.sum();
                    assert!((sum - w[i * columns + j]).abs() < 1e-12, "{rows} {columns}: {sum}");
                }
            }
            for (a, x) in d.right.iter().enumerate() {
                for (b, y) in d.right.iter().enumerate().filter(|(b, _)| d.values[*b] > 1e-9) {
                    let unit = if a == b { 1.0 } else { 0.0 };
                    assert!(d.values[a] <= 1e-9 || (dot(x, y) - unit).abs() < 1e-12);
                }
            }
        }
    }

    #[test]
    fn the_nearest_matrix_of_a_rank_leaves_the_small_values() {
        let w = [3.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 1.0];
        assert_eq!(decompose(&w, 3).values, [3.0, 2.0, 1.0]);
        assert_eq!(decompose(&[0.0; 6], 3).values, [0.0, 0.0]);
    }
}

//! Ranks of the matrices of a model, by their singular values.

use dreamc_study::failure::Failure;
use dreamc_study::model::Trained;
use dreamc_study::report::analysis::Rank;
use dreamc_transplant::decompose;

/// Columns or rows of a matrix whose singular values are computed, at most: they take the cube.
const MOST: u64 = 512;

/// The ranks of all matrices but embeddings, whose smaller side is no more than [`MOST`]; of
/// stacked matrices each.
pub fn ranks(trained: &Trained) -> Result<Vec<Rank>, Failure> {
    let mut found = vec![];
    let entries: Vec<(String, Vec<u64>)> =
        trained.tensors.entries().map(|(name, shape)| (name.to_string(), shape.to_vec())).collect();
    for (name, shape) in entries.iter().filter(|(name, _)| name.starts_with("layers.")) {
        let [stacked @ .., rows, columns] = &shape[..] else { continue };
        if *rows.min(columns) > MOST || *rows.min(columns) < 2 {
            continue;
        }
        let Some((_, values)) = trained.tensors.get(name)? else { continue };
        let all = stacked.iter().product::<u64>();
        for (number, matrix) in values.chunks((rows * columns) as usize).enumerate() {
            let matrix: Vec<f64> = matrix.iter().map(|x| f64::from(*x)).collect();
            let values = decompose(&matrix, *columns as usize).values;
            let name = if all > 1 { format!("{name}[{number}]") } else { name.clone() };
            let (nine_tenths, effective) = (kept(&values, 0.9), effective(&values));
            found.push(Rank { name, full: *rows.min(columns) as usize, nine_tenths, effective });
        }
    }
    Ok(found)
}

/// Singular values, of those given largest first, whose squares are a share of the sum of all.
pub fn kept(values: &[f64], share: f64) -> usize {
    let all: f64 = values.iter().map(|s| s * s).sum();
    let mut sum = 0.0;
    let enough = values.iter().position(|s| {
        sum += s * s;
        sum >= share * all
    });
    enough.map_or(values.len(), |place| place + 1)
}

/// The exponential of the entropy of singular values as shares of their sum (Roy and Vetterli,
/// 2007).
fn effective(values: &[f64]) -> f64 {
    let all: f64 = values.iter().sum();
    let shares = values.iter().map(|s| s / all.max(f64::MIN_POSITIVE)).filter(|p| *p > 0.0);
    (-shares.map(|p| p * p.ln()).sum::<f64>()).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_of_singular_values() {
        assert_eq!([0.5, 0.9, 0.99, 1.0].map(|share| kept(&[3.0, 1.0, 0.1, 0.0], share)), [1, 2, 2, 3]);
        assert!((effective(&[2.0, 2.0, 0.0]) - 2.0).abs() < 1e-12);
    }
}

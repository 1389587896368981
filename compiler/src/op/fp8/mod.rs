//! Numbers rounded to e4m3 with a scale for each tile.
//!
//! e4m3 is the float of 8 bits that matmuls of training read: 4 bits of exponent, 3 of mantissa,
//! numbers to 448, none infinite (Micikevicius et al., *FP8 Formats for Deep Learning*, 2022, table
//! 1). Tiles of 128 numbers have a scale each, and weights one of 128 by 128 (DeepSeek-AI,
//! *DeepSeek-V3 Technical Report*, 2024, section 3.3.2). Scales here are powers of two (UE8M0), as
//! that section proposes for the inputs of attention and of its backward, and DeepGEMM takes on
//! Blackwell: then every scaled number is one of bf16, and a matmul that reads those in bf16 has
//! the products of one that reads e4m3, to the bit.

pub(crate) mod cuda;
pub mod kernel;

use super::group::routing;
use super::*;
use crate::ir::TILE;

/// `(x, offsets i32[e1]?) -> y bf16`: the numbers of `x`, each rounded as e4m3 in units of its
/// tile's scale.
///
/// `x` is a matrix for each place of its first `outer` dimensions; the next `down` ones number its
/// rows, all others its columns. A tile has `tile[0]` rows and `tile[1]` columns, or what is left
/// of them. With offsets, tiles begin anew with each group of rows, and with the rows of none.
///
/// Stored in e4m3 ([`DType::E4m3`]) it is a matrix whose rows are whole tiles, for a matmul that
/// multiplies codes: one that sums over rows of `x` wants it `turned`.
///
/// The scale is the least power of two at which no number of the tile is above 448, and at least
/// 2^-100. Numbers are rounded to nearest even; below 2^-6 units they are multiples of 2^-9. A tile
/// with a number that is infinite or none is NaN throughout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fp8 {
    /// Dimensions that number matrices.
    pub outer: u64,
    /// Dimensions after them that number rows.
    pub down: u64,
    /// Rows and columns of a tile.
    pub tile: [u64; 2],
    /// Whether tiles are within groups of rows.
    pub groups: bool,
    /// Whether the result is stored in e4m3, else in bf16.
    pub e4m3: bool,
    /// Whether the result has the columns of `x` as its rows; stored in e4m3 alone.
    pub turned: bool,
}

impl Fp8 {
    /// Whether a matrix of `lines` lines, `depth` numbers each, has a place in e4m3: lines are
    /// whole tiles, and the scales of one tile of all lines come in pieces of 16 bytes.
    pub fn fits(lines: u64, depth: u64) -> bool {
        depth.is_multiple_of(TILE) && lines.is_multiple_of(16)
    }
}

/// The largest number of e4m3.
const LARGEST: f64 = 448.0;
/// The least exponent of a scale.
const LEAST: i32 = -100;

/// The exponent of a tile's scale, by its largest magnitude.
fn exponent(largest: f64) -> i32 {
    let mut k = LEAST;
    while largest > LARGEST * f64::from(k).exp2() {
        k += 1;
    }
    k
}

/// The nearest number of e4m3, ties to even.
fn e4m3(x: f64) -> f64 {
    let mut step = (-9f64).exp2();
    while x.abs() >= 16.0 * step {
        step *= 2.0;
    }
    (x / step).round_ties_even() * step
}

/// Rounds the numbers of a tile at these places.
fn round(x: &mut [f64], places: &[usize]) {
    let finite = places.iter().all(|&i| x[i].is_finite());
    let largest = places.iter().fold(0.0, |m: f64, &i| m.max(x[i].abs()));
    let unit = if finite { f64::from(exponent(largest)).exp2() } else { f64::NAN };
    for &i in places {
        x[i] = e4m3(x[i] / unit) * unit;
    }
}

impl Payload for Fp8 {
    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        a.word("outer")?;
        a.integer(&mut self.outer)?;
        a.word("down")?;
        a.integer(&mut self.down)?;
        a.word("tile")?;
        a.integer(&mut self.tile[0])?;
        a.integer(&mut self.tile[1])?;
        a.flag("groups", &mut self.groups)?;
        a.flag("e4m3", &mut self.e4m3)?;
        a.flag("turned", &mut self.turned)
    }
}

impl Operation for Fp8 {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "fp8",
            operands: if self.groups { &["x[.., s, c]", "offsets i32[e1]"] } else { &["x"] },
            results: &["y"],
            class: Class::Anchor(self, Anchor { again: true, ..Anchor::default() }),
            rows: Rows::All,
            bf16: Bf16::Own,
            work: Work::Operand(0, 2),
            derivative: Derivative::Missing("here: functions are differentiated before they are rounded"),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        x.float(0)?;
        let dims = self.outer.saturating_add(self.down);
        x.check(dims <= x[0].dims.len() as u64, "takes x of as many dimensions as it numbers")?;
        x.check(self.tile.iter().all(|&n| n > 0), "a tile has at least one row and one column")?;
        if self.groups {
            x.int(1)?;
            let rows = self.outer == 0 && self.down == 1 && x[1].dims.len() == 1;
            x.check(rows, "groups are of x[slots, ..] and offsets")?;
        }
        if !self.e4m3 {
            x.check(!self.turned, "what is turned is stored in e4m3")?;
            return Ok(vec![Type { dims: x[0].dims.clone(), dtype: DType::Bf16 }]);
        }
        let (rows, columns) = x[0].dims.split_at(self.down as usize);
        let all = |dims: &[Dim]| dims.iter().fold(1u64, |n, d| n.saturating_mul(x.size(*d)));
        let (lines, depth, along) = match self.turned {
            false => (all(rows), all(columns), self.tile[1]),
            true => (all(columns), all(rows), self.tile[0]),
        };
        let matrix = self.outer == 0 && !self.groups && along == TILE && Fp8::fits(lines, depth);
        x.check(matrix, "in e4m3 a matrix has 16 lines or a multiple, of whole tiles of 128")?;
        let dims = if self.turned { [columns, rows].concat() } else { x[0].dims.to_vec() };
        Ok(vec![Type { dims: dims.into(), dtype: DType::E4m3 }])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let (outer, down) = (self.outer as usize, self.down as usize);
        let sizes = e.sizes(0);
        let count = |sizes: &[usize]| sizes.iter().product::<usize>();
        let (matrices, rows) = (count(&sizes[..outer]), count(&sizes[outer..outer + down]));
        let columns = count(&sizes[outer + down..]);
        // The rows of no group come last: all of them where there are none.
        let mut groups = if self.groups { e.groups(1, rows)? } else { vec![] };
        let end = groups.last().map_or(0, |group| group.end);
        groups.push(end..rows);
        let [high, wide] = self.tile.map(|n| n.min(1 << 32) as usize);
        let mut y = e.floats(0).to_vec();
        for matrix in 0..matrices {
            for first in groups.iter().flat_map(|group| group.clone().step_by(high).map(|r| (r, group.end))) {
                let lines = first.0..(first.0 + high).min(first.1);
                for column in (0..columns).step_by(wide) {
                    let across = column..(column + wide).min(columns);
                    let places: Vec<usize> = lines
                        .clone()
                        .flat_map(|line| across.clone().map(move |c| (matrix * rows + line) * columns + c))
                        .collect();
                    round(&mut y, &places);
                }
            }
        }
        if self.turned {
            let from = |i: usize| (i % rows.max(1)) * columns + i / rows.max(1);
            y = (0..y.len()).map(|i| y[from(i)]).collect();
        }
        Ok(vec![Data::Float(y)])
    }

    fn random(&self, mut case: Case) -> Instance {
        // Sizes of every order, so that scales differ.
        let number = |rng: &mut Rng| {
            let size = [1e-6, 1e-2, 1.0, 700.0][rng.below(4) as usize];
            f64::from((rng.between(-2.0, 2.0) * size) as f32)
        };
        let tile = [1 + case.rng.below(3), 1 + case.rng.below(3)];
        if case.rng.once_in(2) {
            let routing = routing(&mut case);
            let columns = case.dim("c");
            let x = case.floats_from("x", &[routing.slots_dim, columns], number);
            let offsets = routing.offsets(&mut case);
            return case
                .finish(Fp8 { outer: 0, down: 1, tile, groups: true, ..Fp8::default() }, &[x, offsets]);
        }
        let dims = ["a", "b", "c"].map(|name| case.dim(name));
        let x = case.floats_from("x", &dims, number);
        let outer = case.rng.below(2);
        let down = case.rng.below(4 - outer);
        case.finish(Fp8 { outer, down, tile, ..Fp8::default() }, &[x])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every number of the format is what it is, and between two of them the nearer is taken.
    #[test]
    fn numbers_are_those_of_the_format() {
        let mut all: Vec<f64> = vec![];
        for exponent in 0..16 {
            for mantissa in 0..8 {
                let of = f64::from(mantissa) / 8.0;
                all.push(if exponent == 0 {
                    of * (-6f64).exp2()
                } else {
                    (1.0 + of) * f64::from(exponent - 7).exp2()
                });
            }
        }
        // The last code is no number.
        assert_eq!(all.pop(), Some(480.0));
        assert_eq!(all.last(), Some(&LARGEST));
        for (k, pair) in all.windows(2).enumerate() {
            let [low, high] = [pair[0], pair[1]];
            let middle = (low + high) / 2.0;
            assert_eq!((e4m3(low), e4m3(-high)), (low, -high));
            assert_eq!(e4m3(middle), if k % 2 == 0 { low } else { high }, "{middle}");
            assert_eq!((e4m3(middle * 0.999), e4m3(middle * 1.001)), (low, high));
        }
    }

    #[test]
    fn scales_are_the_least_that_hold_the_tile() {
        assert_eq!([448.0, 448.1, 896.0, 1.75, 1.0].map(exponent), [0, 1, 1, -8, -8]);
        assert_eq!([0.0, 1e-25, 1e-40].map(exponent), [LEAST, -91, LEAST]);
        let mut x = [448.0 * 4.0, 1.0, f64::NAN, 3.0];
        round(&mut x, &[0, 1]);
        assert_eq!(x[..2], [1792.0, 1.0]);
        round(&mut x, &[2, 3]);
        assert!(x[2].is_nan() && x[3].is_nan());
    }
}

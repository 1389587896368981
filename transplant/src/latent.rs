//! Attention over heads as latent attention (MHA2MLA, 2502.14837, section 3).
//!
//! *In*: the fused matrix of a donor's queries, keys and values, and which pairs of its rotation go
//! on turning. *Out*: the matrices of latent attention. *Promise*: queries and the keys that turn
//! are the donor's rows in another order; the other keys and all values are `U Σ` and `Vᵀ` of the
//! largest singular values of both together, which at full rank is the donor's product.

use crate::apply::{Read, mean};
use crate::{At, Decomposition, Side, Source, Step, TransplantError, Weight, decompose};
use dreamc_compiler::bind::Part;
use dreamc_compiler::lower::attention::part;
use dreamc_dsl::spec::{Attention, Component};
use serde::Serialize;
use std::ops::Range;

/// How a matrix of latent attention comes of a donor's heads.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Latent {
    /// Which matrix it is.
    pub matrix: Matrix,
    /// Heads of queries.
    pub heads: u64,
    /// The donor's heads of keys.
    pub kv_heads: u64,
    /// Rows of a head.
    pub size: u64,
    /// Heads of the part of keys that turns.
    pub keys: u64,
    /// Rows of a head that turn, of each of `keys` in their order.
    pub turned: Vec<Vec<u64>>,
}

/// A matrix of latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Matrix {
    /// Queries, of the stream.
    Query,
    /// The short vector of queries, of this length.
    QueryDown(u64),
    /// Queries, of that vector.
    QueryUp(u64),
    /// The short vector of keys and values, of this length, and the keys that turn.
    Down(u64),
    /// Keys that do not turn and values, of that vector.
    Up(u64),
}

impl Latent {
    /// The way in words.
    pub fn words(&self) -> String {
        let turned = self.turned.first().map_or(0, Vec::len);
        match self.matrix {
            Matrix::Query => format!("queries in order, {turned} of {} rows of a head turn", self.size),
            Matrix::QueryDown(rank) => format!("factor A of rank {rank} of queries"),
            Matrix::QueryUp(rank) => format!("factor B of rank {rank} of queries"),
            Matrix::Down(rank) => {
                format!("factor A of rank {rank} of keys and values, {turned} rows of a head apart")
            }
            Matrix::Up(rank) => format!("factor B of rank {rank} of keys and values"),
        }
    }

    /// Whether its factors lose nothing of a matrix of `wide` columns.
    pub fn full(&self, wide: u64) -> bool {
        let turned = self.turned.first().map_or(0, Vec::len) as u64;
        match self.matrix {
            Matrix::Query => true,
            Matrix::QueryDown(rank) | Matrix::QueryUp(rank) => rank >= wide.min(self.heads * self.size),
            Matrix::Down(rank) | Matrix::Up(rank) => {
                let (units, values) = (self.units().0.len() as u64, self.kv_heads * self.size);
                rank >= wide.min(units * (self.size - turned) + values)
            }
        }
    }

    /// The numbers of the matrix, of those of the donor's.
    pub(crate) fn made(&self, numbers: &[f32], wide: usize) -> Vec<f32> {
        let row = |i: u64| numbers.get(i as usize * wide..(i as usize + 1) * wide).unwrap_or_default();
        let factors = |rows: &[u64]| decompose(&of_rows(&row, rows), wide);
        match self.matrix {
            Matrix::Query => self.queries().into_iter().flat_map(|i| row(i).to_vec()).collect(),
            Matrix::QueryDown(rank) => right(&factors(&self.queries()), rank, wide),
            Matrix::QueryUp(rank) => {
                let d = factors(&self.queries());
                (0..self.heads * self.size).flat_map(|i| left(&d, i, rank)).collect()
            }
            Matrix::Down(rank) => {
                let mut out = right(&factors(&self.joint()), rank, wide);
                for (key, turned) in self.turned.iter().enumerate() {
                    let heads = self.heads_of(key as u64);
                    for element in turned {
                        let rows = heads.clone().map(|head| row(self.key_row(head, *element)));
                        out.extend(mean_of(&rows.collect::<Vec<_>>(), wide));
                    }
                }
                out
            }
            Matrix::Up(rank) => {
                let d = factors(&self.joint());
                let (units, of) = self.units();
                let still = self.size - self.turned.first().map_or(0, Vec::len) as u64;
                let values = units.len() as u64 * still;
                let mut out = vec![];
                for head in 0..self.heads {
                    let first = of[head as usize] as u64 * still;
                    out.extend((first..first + still).flat_map(|i| left(&d, i, rank)));
                    let first = values + self.donor_head(head) * self.size;
                    out.extend((first..first + self.size).flat_map(|i| left(&d, i, rank)));
                }
                out
            }
        }
    }

    /// The rows of queries: of each head those that do not turn, then those that do.
    fn queries(&self) -> Vec<u64> {
        let of = |head: u64| {
            let turned = self.turned_of(head);
            let order = self.still(turned).into_iter().chain(turned.iter().copied());
            order.map(move |element| head * self.size + element).collect::<Vec<_>>()
        };
        (0..self.heads).flat_map(of).collect()
    }

    /// The rows of keys that do not turn, and of values.
    fn joint(&self) -> Vec<u64> {
        let (units, _) = self.units();
        let keys = units.iter().flat_map(|(head, key)| {
            let still = self.still(&self.turned[*key as usize]);
            still.into_iter().map(move |element| self.key_row(*head, element))
        });
        keys.chain(self.values()).collect()
    }

    /// The rows of values.
    fn values(&self) -> Range<u64> {
        let first = (self.heads + self.kv_heads) * self.size;
        first..first + self.kv_heads * self.size
    }

    /// The donor's heads of keys, each once for every choice of pairs that its queries have, and
    /// which of these every head of queries reads.
    fn units(&self) -> (Vec<(u64, u64)>, Vec<usize>) {
        let (mut units, mut of) = (vec![], vec![]);
        for head in 0..self.heads {
            let (donor, key) = (self.donor_head(head), self.key_of(head));
            let same = |unit: &&(u64, u64)| {
                unit.0 == donor && self.turned[unit.1 as usize] == self.turned[key as usize]
            };
            let place = units.iter().position(|unit| same(&unit));
            of.push(place.unwrap_or(units.len()));
            if place.is_none() {
                units.push((donor, key));
            }
        }
        (units, of)
    }

    fn still(&self, turned: &[u64]) -> Vec<u64> {
        (0..self.size).filter(|element| !turned.contains(element)).collect()
    }

    fn turned_of(&self, head: u64) -> &[u64] {
        &self.turned[self.key_of(head) as usize]
    }

    fn key_of(&self, head: u64) -> u64 {
        head * self.keys / self.heads
    }

    fn donor_head(&self, head: u64) -> u64 {
        head * self.kv_heads / self.heads
    }

    /// The donor's heads of keys whose queries have this one.
    fn heads_of(&self, key: u64) -> Range<u64> {
        let group = self.heads / self.keys;
        self.donor_head(key * group)..self.donor_head((key + 1) * group - 1) + 1
    }

    fn key_row(&self, head: u64, element: u64) -> u64 {
        (self.heads + head) * self.size + element
    }
}

fn of_rows<'a>(row: &dyn Fn(u64) -> &'a [f32], rows: &[u64]) -> Vec<f64> {
    rows.iter().flat_map(|i| row(*i).iter().map(|x| f64::from(*x))).collect()
}

/// The first rows of `Vᵀ`, and zeros after them.
fn right(d: &Decomposition, rank: u64, wide: usize) -> Vec<f32> {
    let row = |k: usize| d.right.get(k).cloned().unwrap_or_else(|| vec![0.0; wide]);
    (0..rank as usize).flat_map(|k| row(k).into_iter().map(|x| x as f32)).collect()
}

/// A row of `U Σ`, and zeros after it.
fn left(d: &Decomposition, row: u64, rank: u64) -> Vec<f32> {
    let at = |k: usize| d.values.get(k).map_or(0.0, |s| s * d.left[k][row as usize]);
    (0..rank as usize).map(|k| at(k) as f32).collect()
}

/// The mean of rows; of one its bits.
fn mean_of(rows: &[&[f32]], wide: usize) -> Vec<f32> {
    let of = |i: usize| rows.iter().map(|row| f64::from(row[i])).sum::<f64>() / rows.len() as f64;
    (0..wide).map(|i| of(i) as f32).collect()
}

/// The two attentions, where one is latent and the other has heads.
pub(crate) fn becomes<'a>(
    (new, to): (&'a Side, &Weight),
    old: &'a Side,
    component: &str,
) -> Option<(&'a Attention, &'a Attention)> {
    let (Component::Sequence(own), Component::Sequence(theirs)) =
        (new.components.get(to.component()?)?, old.components.get(component)?)
    else {
        return None;
    };
    (own.latent.is_some() && theirs.latent.is_none()).then_some((own, theirs))
}

/// The matrix of latent attention that a tensor is.
fn matrix(part: Part, own: &Attention) -> Option<Matrix> {
    let l = own.latent.as_ref()?;
    match (part, l.query) {
        (part::QUERY_UP, None) => Some(Matrix::Query),
        (part::QUERY_UP, Some(rank)) => Some(Matrix::QueryUp(rank)),
        (part::QUERY_DOWN, Some(rank)) => Some(Matrix::QueryDown(rank)),
        (part::KV_DOWN, _) => Some(Matrix::Down(l.kv)),
        (part::KV_UP, _) => Some(Matrix::Up(l.kv)),
        _ => None,
    }
}

/// The step that makes a tensor of latent attention from the fused matrix of a donor's; none of a
/// tensor that is no such matrix. Sizes that do not fit are an error.
pub(crate) fn step(
    to: &Weight,
    (own, theirs): (&Attention, &Attention),
    from: &Weight,
) -> Result<Option<Step>, TransplantError> {
    let (Some(matrix), Some(l)) = (matrix(to.part, own), &own.latent) else { return Ok(None) };
    let component = to.component().unwrap_or_default();
    let refuse = |key: &str, message: String, help: String| {
        let at = At::Field(format!("model.components.{component}.{key}"));
        Err(TransplantError::new("shape", at, message, help))
    };
    if from.part != part::QKV || from.shape.len() != 2 || theirs.kv_from.is_some() {
        let message =
            format!("latents come of one matrix of queries, keys and values, and `{}` is none", from.name);
        let help = "say `how: fresh` in `transplant.map`, or take a donor without mixtures of projections";
        return refuse("latent", message, help.into());
    }
    for (key, ours, other) in
        [("heads", own.heads, theirs.heads), ("head_size", own.head_size, theirs.head_size)]
    {
        if ours != other {
            let message =
                format!("latent attention keeps the donor's heads: its `{key}` is {other} and this {ours}");
            return refuse(key, message, format!("write `{key}: {other}`"));
        }
    }
    if l.value != theirs.head_size {
        let message =
            format!("values of the donor have {} elements, and these {}", theirs.head_size, l.value);
        return refuse("latent.value", message, format!("write `value: {}`", theirs.head_size));
    }
    let kv_heads = theirs.kv_heads;
    if !l.keys.is_multiple_of(kv_heads) && !kv_heads.is_multiple_of(l.keys) {
        let message = format!("{} heads of keys that turn are none of the donor's {kv_heads}", l.keys);
        return refuse("latent.keys", message, format!("write `keys: {kv_heads}`"));
    }
    let turned = (0..l.keys).map(|key| turned(own, key)).collect();
    let (heads, size, keys) = (own.heads, own.head_size, l.keys);
    Ok(Some(Step::Latent(Latent { matrix, heads, kv_heads, size, keys, turned })))
}

/// The rows of a head that turn: the two of every pair, first all first ones. Where the model has a
/// rotation of its own these are pairs at even distances, whose frequencies are the same where
/// `turned` divides the size of a head.
fn turned(own: &Attention, key: u64) -> Vec<u64> {
    let Some(l) = &own.latent else { return vec![] };
    let all = own.rope.map_or(own.head_size, |rope| rope.turning(own.head_size)) / 2;
    let count = l.turned / 2;
    let own: Vec<u64> = match l.pairs_of(key) {
        Some(pairs) => pairs.to_vec(),
        None => (0..count).map(|i| i * all.max(count) / count.max(1)).collect(),
    };
    own.iter().copied().chain(own.iter().map(|pair| pair + all.max(count))).collect()
}

/// Whether all that turns of the donor goes on turning, as it did.
pub(crate) fn turns_alike(own: &Attention, theirs: &Attention) -> bool {
    let Some(l) = &own.latent else { return false };
    let Some(rope) = theirs.rope else { return own.rope.is_none() };
    let all = rope.turning(theirs.head_size);
    let own_rotation = l.pairs.is_empty() && (rope.share < 1.0 || l.turned != theirs.head_size);
    own.rope == theirs.rope && l.turned == all && !own_rotation
}

/// The singular values of keys that do not turn and of values, which the short vector of a move
/// keeps the largest of; none of a move that makes no such vector.
pub fn spectrum(
    from: &[Source],
    steps: &[Step],
    read: &dyn Read,
) -> Result<Option<Vec<f64>>, TransplantError> {
    let [Step::Latent(latent @ Latent { matrix: Matrix::Down(_), .. })] = steps else { return Ok(None) };
    let (shape, numbers) = mean(from, read)?;
    let wide = shape.last().copied().unwrap_or(1) as usize;
    let row = |i: u64| numbers.get(i as usize * wide..(i as usize + 1) * wide).unwrap_or_default();
    Ok(Some(decompose(&of_rows(&row, &latent.joint()), wide).values))
}

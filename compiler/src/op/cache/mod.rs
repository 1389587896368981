//! Rows of caches written, appended and taken.

pub(crate) mod cuda;
pub mod kernel;

use super::*;

/// `(cache[D, ..], x[..], row[]) -> cache` with that row replaced.
pub struct CacheWrite;

/// `(cache[b, s, ..], x[b, t, ..], slots i32[b, t]) -> cache` with `x[b, i]` in place `slots[b, i]`
/// of its sequence; a negative slot is not written. Slots of one sequence differ.
pub struct Append;

/// `(cache[D, ..], row[]) -> x[..], cache`: the row, and the cache with it set to zero; the reverse
/// of [`CacheWrite`].
pub struct CacheTake;

/// A cache, and the range of the row that operand `index` names.
fn cache_row(e: &Evaluation, index: usize) -> Result<(Data, std::ops::Range<usize>), String> {
    let rows = e.sizes(0)[0];
    let each = e.sizes(0)[1..].iter().product::<usize>();
    let row = checked(e.ints(index)[0], rows, "cache row")?;
    Ok((e.operands[0].data.clone(), row * each..(row + 1) * each))
}

/// Dimensions of a cache and of its rows, and a row's number.
fn random_dims(case: &mut Case) -> (Dims, Dims, u64) {
    let depths = case.dim("depths");
    let row = case.row_dims("h");
    let at = case.rng.below(case.module.size(depths));
    ([&[depths], &row[..]].concat().into(), row, at)
}

impl Operation for CacheWrite {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "cache_write",
            operands: &["cache[D, ..]", "x[..]", "row i32[]"],
            results: &["cache[D, ..]"],
            class: Class::anchored(self),
            rows: Rows::All,
            bf16: Bf16::Own,
            work: Work::Counted(self),
            derivative: Derivative::Rule(self),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        x.scalar(2)?;
        let (cache, row) = (&x[0], &x[1]);
        let fits = cache.dtype == row.dtype && !cache.dims.is_empty() && cache.dims[1..] == row.dims[..];
        x.check(fits, "x has the cache's type without the first dimension")?;
        Ok(vec![cache.clone()])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let (mut cache, row) = cache_row(e, 2)?;
        match &mut cache {
            Data::Float(cache) => cache[row].copy_from_slice(e.floats(1)),
            Data::Int(cache) => cache[row].copy_from_slice(e.ints(1)),
        }
        Ok(vec![cache])
    }

    fn random(&self, mut case: Case) -> Instance {
        let (cache, x, row) = random_dims(&mut case);
        let inputs = [case.state("cache", &cache), case.floats("x", &x), case.index("row", row)];
        case.finish(Op::CacheWrite, &inputs)
    }
}

impl Counted for CacheWrite {
    /// A row read and written, the rest left where it is.
    fn cost(&self, s: &Shapes, _: &Extents) -> Counts {
        let row = s.operand_bytes(1, s.operand(1));
        Counts { read: row + Count::from(4), written: row, ..s.nothing() }
    }
}

impl Reverse for CacheWrite {
    fn reverse(&self, at: &mut Adjoint) -> Result<(), CompileError> {
        let (d, row) = (at.d()?, at.operand(2));
        let back = at.builder().ops(Op::CacheTake, &[d, row]);
        at.add(1, back[0]);
        at.add(0, back[1]);
        Ok(())
    }
}

impl Operation for Append {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "append",
            operands: &["cache[b, s, ..]", "x[b, t, ..]", "slots i32[b, t]"],
            results: &["cache[b, s, ..]"],
            class: Class::anchored(self),
            rows: Rows::Of(rows),
            bf16: Bf16::Reads(&[0, 1]),
            work: Work::Counted(self),
            derivative: Derivative::Missing("here: nothing is trained through a cache of decoding"),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        x.int(2)?;
        let (cache, rows) = (&x[0], &x[1]);
        let fits = cache.dims.len() >= 2
            && rows.dims.len() == cache.dims.len()
            && cache.dtype == rows.dtype
            && cache.dims[0] == rows.dims[0]
            && cache.dims[2..] == rows.dims[2..]
            && x[2].dims[..] == rows.dims[..2];
        x.check(fits, "takes cache[b, s, ..], x[b, t, ..], slots[b, t]")?;
        Ok(vec![cache.clone()])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let (places, tokens) = (e.sizes(0)[1], e.sizes(1)[1]);
        let width: usize = e.sizes(0)[2..].iter().product();
        let mut cache = e.operands[0].data.clone();
        for (i, &slot) in e.ints(2).iter().enumerate().filter(|(_, slot)| **slot >= 0) {
            let place = i / tokens * places + checked(slot, places, "slot")?;
            let (to, from) = (place * width..(place + 1) * width, i * width..(i + 1) * width);
            match &mut cache {
                Data::Float(cache) => cache[to].copy_from_slice(&e.floats(1)[from]),
                Data::Int(cache) => cache[to].copy_from_slice(&e.ints(1)[from]),
            }
        }
        Ok(vec![cache])
    }

    fn random(&self, mut case: Case) -> Instance {
        let (b, s, t, h) = (case.dim("b"), case.dim("s"), case.dim("t"), case.dim("h"));
        let (places, tokens) = (case.module.size(s), case.module.size(t));
        let mut next = 0;
        let cache = case.state("cache", &[b, s, h]);
        let x = case.floats("x", &[b, t, h]);
        // One after another from a place of its own for each sequence, the last ones perhaps beyond
        // the end.
        let slots = case.ints_from("slots", &[b, t], |rng| {
            if next % tokens == 0 {
                next = tokens * rng.below(places);
            }
            let slot = next / tokens + next % tokens;
            next += 1;
            if slot < places { slot as i32 } else { -1 }
        });
        case.finish(Op::Append, &[cache, x, slots])
    }
}

impl Counted for Append {
    /// Rows read and written, the rest left where it is.
    fn cost(&self, s: &Shapes, _: &Extents) -> Counts {
        let rows = s.operand_bytes(1, s.operand(1));
        Counts { read: rows + s.operand_bytes(2, s.operand(2)), written: rows, ..s.nothing() }
    }
}

/// Rows without a slot are not written.
fn rows(at: &Asked, k: usize) -> Need {
    let slots = at.node.inputs[2];
    match at.maker(slots).filter(|_| k == 1) {
        Some(n) if n.op == Op::Admit && slots.0 == n.first.0 + 1 => Need::Places(n.inputs[2]),
        _ => Need::All,
    }
}

impl Operation for CacheTake {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "cache_take",
            operands: &["cache[D, ..]", "row i32[]"],
            results: &["x[..]", "cache[D, ..]"],
            class: Class::anchored(self),
            rows: Rows::All,
            bf16: Bf16::Own,
            work: Work::Counted(self),
            derivative: Derivative::Rule(self),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        x.scalar(1)?;
        x.check(!x[0].dims.is_empty(), "a cache has rows")?;
        Ok(vec![Type { dtype: x[0].dtype, dims: x[0].dims[1..].into() }, x[0].clone()])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        fn take<T: Copy>(row: &mut [T], zero: T) -> Vec<T> {
            let taken = row.to_vec();
            row.fill(zero);
            taken
        }
        let (mut cache, row) = cache_row(e, 1)?;
        let taken = match &mut cache {
            Data::Float(cache) => Data::Float(take(&mut cache[row], 0.0)),
            Data::Int(cache) => Data::Int(take(&mut cache[row], 0)),
        };
        Ok(vec![taken, cache])
    }

    fn random(&self, mut case: Case) -> Instance {
        let (cache, _, row) = random_dims(&mut case);
        let inputs = [case.state("cache", &cache), case.index("row", row)];
        case.finish(Op::CacheTake, &inputs)
    }
}

impl Counted for CacheTake {
    /// The row moved out and zeros in its place.
    fn cost(&self, s: &Shapes, _: &Extents) -> Counts {
        let row = s.operand_bytes(0, s.result(0));
        Counts { read: row + Count::from(4), written: row * 2, ..s.nothing() }
    }
}

impl Reverse for CacheTake {
    fn reverse(&self, at: &mut Adjoint) -> Result<(), CompileError> {
        let row = at.operand(1);
        let (x, cache) = (at.cotangent_or_zeros(0), at.cotangent_or_zeros(1));
        let back = at.builder().op(Op::CacheWrite, &[cache, x, row]);
        at.add(0, back);
        Ok(())
    }
}

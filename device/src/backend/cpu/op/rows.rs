//! Generated row kernels.
//!
//! A [`RowKernel`] is a list of operations on arrays that belong to one row. It is executed an
//! operation at a time for a *block* of rows, as many as keep all arrays in the nearest caches, so
//! that each operation is a long loop over adjacent memory and intermediate results never reach
//! main memory. Arrays share scratch where their lifetimes do not overlap; float inputs are read
//! and outputs written in place.
//!
//! Sums over rows follow the plan's own law (blocks of [`SUM_BLOCK`] rows in order, then the blocks
//! in order), so they do not depend on blocks here.

use super::Run;
use crate::backend::cpu::simd::{
    self, dot, exp, fma, gelu, gelu_grad, kernel_fn, largest, log, sigmoid, silu, silu_grad,
};
use crate::backend::cpu::simd::{sin_cos, softplus, sum, tanh};
use crate::backend::cpu::{Arguments, Context, Pointer, Scratch, Stored, View};
use dreamc_compiler::ir::{Binary, DType, Positions, Reduce, Unary};
use dreamc_compiler::program::{Broadcast, RowInput, RowKernel, RowOp, RowStore, SUM_BLOCK};
use half::bf16;

/// Floats of all arrays of a block.
const BLOCK: usize = 48 * 1024;
/// Floats that a task computes, about.
const TASK: usize = 32 * 1024;

/// Memory of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// In scratch: the floats before it, per row of the block.
    Scratch(usize),
    /// In scratch, the same for all rows: the floats before it among those.
    Fixed(usize),
    /// In the memory of an input.
    Input(usize),
    /// In the memory of an input of bf16, which only what goes element by element reads.
    Narrow(usize),
    /// Part of another array, from an element on.
    Part(usize, usize),
}

/// An operation done in one go with another: with the one that makes an operand of it for nobody
/// else, which is never stored; or with a later one that shares its work.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fused {
    /// A norm and the product with `by`: `(x, size, eps, by)`.
    Scaled(u32, u64, f64, u32),
    /// A product with `by` and the derivative of a norm: `(x, dy, by, size, eps)`.
    GradOfScaled(u32, u32, u32, u64, f64),
    /// SiLU and its derivative: `(x, array of the later one, whether that is the derivative)`.
    SiluBoth(u32, u32, bool),
}

impl Fused {
    fn operands(self) -> Vec<usize> {
        match self {
            Fused::Scaled(x, .., by) => vec![x as usize, by as usize],
            Fused::GradOfScaled(x, dy, by, ..) => vec![x as usize, dy as usize, by as usize],
            Fused::SiluBoth(x, ..) => vec![x as usize],
        }
    }
}

/// The operation that each is fused with, and whether it is left to another.
fn fuse(kernel: &RowKernel) -> (Vec<Option<Fused>>, Vec<bool>) {
    let count = kernel.ops.len();
    let (mut fused, mut left) = (vec![None; count], vec![false; count]);
    let stored = |array: usize| kernel.outputs.iter().any(|o| o.array as usize == array);
    let only = |array: u32, user: usize| {
        let reads = |op: &RowOp| op.operands().iter().filter(|&&x| x == array as usize).count();
        kernel.ops.iter().map(reads).sum::<usize>() == 1
            && reads(&kernel.ops[user]) == 1
            && !stored(array as usize)
    };
    // The small operand covers the groups of the large one, or is as large.
    let by_groups = |b: &Broadcast, size: u64, length: u64| {
        b.inner == 1 && (b.size == size || b.size == length) && length.is_multiple_of(size.max(1))
    };
    for i in 0..count {
        let length = kernel.lengths[i];
        match kernel.ops[i] {
            RowOp::Binary { op: Binary::Mul, a, b, broadcast, small_first } => {
                let (large, small) = if small_first { (b, a) } else { (a, b) };
                if let RowOp::Rms { x, size, eps } = kernel.ops[large as usize]
                    && only(large, i)
                    && by_groups(&broadcast, size, length)
                {
                    fused[i] = Some(Fused::Scaled(x, size, eps.0, small));
                    left[large as usize] = true;
                } else if let RowOp::Rms { x, size, eps } = kernel.ops[small as usize]
                    && only(small, i)
                    && broadcast.size == length
                {
                    fused[i] = Some(Fused::Scaled(x, size, eps.0, large));
                    left[small as usize] = true;
                }
            }
            RowOp::RmsGrad { x, dy, size, eps } => {
                if let RowOp::Binary { op: Binary::Mul, a, b, broadcast, small_first } =
                    kernel.ops[dy as usize]
                    && fused[dy as usize].is_none()
                    && only(dy, i)
                    && by_groups(&broadcast, size, length)
                {
                    let (large, small) = if small_first { (b, a) } else { (a, b) };
                    fused[i] = Some(Fused::GradOfScaled(x, large, small, size, eps.0));
                    left[dy as usize] = true;
                }
            }
            RowOp::Unary(op @ (Unary::Silu | Unary::SiluGrad), x) if !left[i] => {
                let other = if op == Unary::Silu { Unary::SiluGrad } else { Unary::Silu };
                let later = (i + 1..count).find(|&j| kernel.ops[j] == RowOp::Unary(other, x));
                if let Some(j) = later.filter(|&j| !left[j] && !stored(i) && !stored(j)) {
                    fused[i] = Some(Fused::SiluBoth(x, j as u32, op == Unary::Silu));
                    left[j] = true;
                }
            }
            _ => {}
        }
    }
    (fused, left)
}

/// A row kernel prepared for execution.
pub(in crate::backend::cpu) struct Compiled {
    places: Vec<Place>,
    /// Operations fused with each, which are therefore not done by themselves.
    fused: Vec<Option<Fused>>,
    left: Vec<bool>,
    /// The output that an array is computed into, where its operands allow.
    direct: Vec<Option<usize>>,
    /// The output of bf16 that is all an array is for, where it is computed element by element: it
    /// is rounded while it is near.
    rounded: Vec<Option<usize>>,
    /// Angles per position of each rotation, one per pair.
    frequencies: Vec<Vec<f64>>,
    /// Floats of scratch for each row of a block, and for the block.
    per_row: usize,
    fixed: usize,
    /// Floats of the sines and cosines of a row.
    rotation: usize,
    /// Rotations by the angles of the rotation before them.
    same_angles: Vec<bool>,
    /// Rows of a block and of a task.
    block: usize,
    task: usize,
    /// First float in shared scratch of the partial sums of each output.
    partials: Vec<usize>,
    partial_floats: usize,
}

impl Run for RowKernel {
    fn scratch(&self) -> Scratch {
        let c = Compiled::new(self);
        Scratch { local: (c.per_row + c.rotation) * c.block + c.fixed, shared: c.partial_floats }
    }

    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        if let Some(compiled) = args.rows {
            compiled.run(cx, self, args, args.in_place, args.places(self.rows));
        }
    }
}

impl Compiled {
    pub(in crate::backend::cpu) fn new(kernel: &RowKernel) -> Self {
        let count = kernel.ops.len();
        let lengths: Vec<usize> = kernel.lengths.iter().map(|&l| l as usize).collect();
        let stored = |array: usize| kernel.outputs.iter().any(|o| o.array as usize == array);

        let (fused, left) = fuse(kernel);
        let operands = |i: usize| match fused[i] {
            Some(fused) => fused.operands(),
            None if left[i] => vec![],
            None => kernel.ops[i].operands(),
        };
        let elementwise: Vec<bool> = kernel
            .ops
            .iter()
            .enumerate()
            .map(|(i, op)| match *op {
                _ if fused[i].is_some() => matches!(fused[i], Some(Fused::SiluBoth(..))),
                RowOp::Unary(..) => true,
                RowOp::Binary { broadcast, .. } => broadcast.size as usize == lengths[i],
                _ => false,
            })
            .collect();
        let users = |array: usize| {
            let operands = &operands;
            (0..count).filter(move |&i| operands(i).contains(&array))
        };

        let mut fixed = 0;
        let mut places = vec![Place::Scratch(0); count];
        // The array whose memory another is part of.
        let mut roots: Vec<usize> = (0..count).collect();
        for (i, op) in kernel.ops.iter().enumerate() {
            match *op {
                // An array that is stored again is copied first: an output may overlap the input.
                RowOp::Load { input } if !stored(i) => {
                    if let RowInput::Row { dtype: DType::F32, .. }
                    | RowInput::Shared { dtype: DType::F32, .. } = kernel.inputs[input as usize]
                    {
                        places[i] = Place::Input(input as usize);
                    } else if let RowInput::Row { dtype: DType::Bf16, .. } = kernel.inputs[input as usize]
                        && users(i).all(|user| elementwise[user])
                    {
                        places[i] = Place::Narrow(input as usize);
                    }
                }
                RowOp::Constant(_) | RowOp::Zeros => {
                    places[i] = Place::Fixed(fixed);
                    fixed += lengths[i];
                }
                RowOp::Slice { x, size, start } if lengths[x as usize] == size as usize && !stored(i) => {
                    places[i] = Place::Part(x as usize, start as usize);
                    roots[i] = roots[x as usize];
                }
                _ => {}
            }
        }

        // The operation after which the memory of an array is free.
        let mut last: Vec<usize> = (0..count).map(|i| if stored(i) { count } else { i }).collect();
        for i in 0..count {
            for x in operands(i) {
                last[roots[x]] = last[roots[x]].max(i);
            }
        }
        let mut per_row = 0;
        let mut live: Vec<(usize, usize, usize)> = vec![];
        // An array is there from the operation on that computes it.
        let made = (0..count).flat_map(|i| match fused[i] {
            Some(Fused::SiluBoth(_, later, _)) => vec![(i, i), (later as usize, i)],
            _ if left[i] => vec![],
            _ => vec![(i, i)],
        });
        for (array, i) in made {
            if places[array] != Place::Scratch(0) {
                continue;
            }
            // The first gap among arrays that are still needed.
            live.retain(|&(_, _, until)| until >= i);
            live.sort_unstable();
            let mut start = 0;
            for &(from, to, _) in &live {
                if start + lengths[array] <= from {
                    break;
                }
                start = start.max(to);
            }
            places[array] = Place::Scratch(start);
            live.push((start, start + lengths[array], last[array]));
            per_row = per_row.max(start + lengths[array]);
        }

        let (mut direct, mut rounded) = (vec![None; count], vec![None; count]);
        for (number, output) in kernel.outputs.iter().enumerate() {
            let array = output.array as usize;
            if output.store != RowStore::Row || !matches!(places[array], Place::Scratch(_)) {
                continue;
            }
            let only = kernel.outputs.iter().filter(|o| o.array == output.array).count() == 1;
            match output.dtype {
                DType::F32 if direct[array].is_none() => direct[array] = Some(number),
                DType::Bf16 if only && elementwise[array] && users(array).next().is_none() => {
                    rounded[array] = Some(number)
                }
                _ => {}
            }
        }

        let frequencies: Vec<Vec<f64>> = kernel
            .ops
            .iter()
            .map(|op| match op {
                RowOp::Rope { size, rope, .. } => {
                    (0..size / 2).map(|i| rope.frequency(i, size / 2)).collect()
                }
                _ => vec![],
            })
            .collect();

        let mut before = None;
        let same_angles = kernel.ops.iter().map(|op| match op {
            RowOp::Rope { size, rope, position, depths, .. } => {
                before.replace((size, rope, position, depths)) == Some((size, rope, position, depths))
            }
            _ => false,
        });
        let same_angles = same_angles.collect();

        let sums = kernel.outputs.iter().map(|o| matches!(o.store, RowStore::Sum | RowStore::AddSum));
        let mut partial_floats = 0;
        let blocks = kernel.rows.div_ceil(SUM_BLOCK) as usize;
        let partials = kernel.outputs.iter().zip(sums.clone()).map(|(output, is_sum)| {
            let start = partial_floats;
            partial_floats += if is_sum { blocks * lengths[output.array as usize] } else { 0 };
            start
        });
        let partials = partials.collect();

        // A power of two, so that blocks do not straddle those of the sums.
        let rows = (BLOCK / per_row.max(1)).clamp(1, SUM_BLOCK as usize);
        let block = 1 << rows.ilog2();
        let unit = if sums.clone().any(|s| s) { SUM_BLOCK as usize } else { block };
        let work: usize = lengths.iter().sum();
        Compiled {
            places,
            fused,
            left,
            direct,
            rounded,
            same_angles,
            rotation: frequencies.iter().map(|f| 2 * f.len()).max().unwrap_or(0),
            frequencies,
            per_row,
            fixed,
            block,
            task: (TASK / work.max(1)).max(1).next_multiple_of(unit),
            partials,
            partial_floats,
        }
    }

    /// Rows whose place is negative are left alone.
    pub(super) fn run(
        &self,
        cx: &Context,
        kernel: &RowKernel,
        args: &Arguments,
        in_place: bool,
        places: Option<&[i32]>,
    ) {
        let rows = kernel.rows as usize;
        let shared = cx.shared();
        cx.parallel(rows.div_ceil(self.task), |task, scratch| {
            let (scratch, rest) = scratch.split_at_mut(self.per_row * self.block);
            let (fixed, rest) = rest.split_at_mut(self.fixed);
            let rotation = &mut rest[..self.rotation * self.block];
            self.fill_fixed(kernel, fixed);
            let (scratch, fixed) = (Pointer::to(scratch), Pointer::to(fixed));
            let end = ((task + 1) * self.task).min(rows);
            let mut next = task * self.task;
            while next < end {
                let first = next;
                next = end.min(first + self.block);
                if let Some(places) = places {
                    // Kernels that sum rows have no places, so blocks may begin anywhere.
                    let skipped = places[first..end].iter().take_while(|p| **p < 0).count();
                    if skipped > 0 {
                        next = first + skipped;
                        continue;
                    }
                    next = first + places[first..next].iter().take_while(|p| **p >= 0).count();
                }
                let block = Block {
                    compiled: self,
                    kernel,
                    args,
                    scratch,
                    fixed,
                    first,
                    rows: next - first,
                    in_place,
                };
                for i in (0..kernel.ops.len()).filter(|&i| !self.left[i]) {
                    block.compute(cx, i, rotation);
                }
                for (number, output) in kernel.outputs.iter().enumerate() {
                    let x = block.array(output.array as usize);
                    match output.store {
                        RowStore::Row | RowStore::AddRow => {
                            let adds = output.store == RowStore::AddRow;
                            let array = output.array as usize;
                            let there = [self.direct[array], self.rounded[array]].contains(&Some(number));
                            if adds || in_place || !there {
                                block.store(number, x, output.dtype, adds);
                            }
                        }
                        RowStore::Sum | RowStore::AddSum => {
                            let start = self.partials[number] + first / SUM_BLOCK as usize * x.length;
                            let partial = shared.part_mut(start, x.length);
                            sum_rows(x, partial, !first.is_multiple_of(SUM_BLOCK as usize));
                        }
                    }
                }
            }
        });
        for (number, output) in kernel.outputs.iter().enumerate() {
            let adds = output.store == RowStore::AddSum;
            if !adds && output.store != RowStore::Sum {
                continue;
            }
            let length = kernel.lengths[output.array as usize] as usize;
            let blocks = rows.div_ceil(SUM_BLOCK as usize);
            let partials = shared.part_mut(self.partials[number], blocks * length);
            let (total, others) = partials.split_at_mut(length.min(partials.len()));
            for other in others.chunks_exact(length.max(1)) {
                simd::add(other, total);
            }
            let at = kernel.inputs.len() + number;
            match output.dtype {
                DType::Bf16 => {
                    let out = args.view::<bf16>(at).all_mut();
                    for (i, y) in out.iter_mut().enumerate() {
                        let x = total.get(i).copied().unwrap_or(0.0);
                        *y = simd::to_bf16(if adds { y.to_f32() + x } else { x });
                    }
                }
                _ => {
                    let out = args.floats(at).all_mut();
                    if !adds {
                        out.fill(0.0);
                    }
                    simd::add(total, out);
                }
            }
        }
    }

    /// Constants and zeros, which stay as they are for the whole task.
    fn fill_fixed(&self, kernel: &RowKernel, fixed: &mut [f32]) {
        for (i, (op, place)) in kernel.ops.iter().zip(&self.places).enumerate() {
            if let &Place::Fixed(start) = place {
                let value = if let RowOp::Constant(x) = op { x.0 as f32 } else { 0.0 };
                fixed[start..start + kernel.lengths[i] as usize].fill(value);
            }
        }
    }
}

/// Elements that are rounded at a time.
const PIECE: usize = 1024;

/// The rows of an array as it is stored.
#[derive(Clone, Copy)]
enum Elements<'a> {
    Wide(View<'a, f32>),
    Narrow(View<'a, bf16>),
}

/// Some rows under way.
struct Block<'a> {
    compiled: &'a Compiled,
    kernel: &'a RowKernel,
    args: &'a Arguments<'a>,
    scratch: Pointer<f32>,
    fixed: Pointer<f32>,
    /// First row, and how many.
    first: usize,
    rows: usize,
    in_place: bool,
}

impl<'a> Block<'a> {
    /// The rows of an array.
    fn array(&self, i: usize) -> View<'a, f32> {
        let length = self.kernel.lengths[i] as usize;
        let (start, stride) = match self.compiled.places[i] {
            Place::Scratch(before) => match self.compiled.direct[i] {
                Some(output) if !self.in_place => return self.operand(self.kernel.inputs.len() + output),
                _ => (self.scratch.add(before * self.compiled.block), length),
            },
            Place::Fixed(before) => (self.fixed.add(before), 0),
            Place::Input(input) => return self.operand(input),
            Place::Narrow(_) => unreachable!("read as an element"),
            Place::Part(x, first) => {
                let x = self.array(x);
                (x.start.add(first), x.stride)
            }
        };
        // SAFETY: scratch belongs to the task, and arrays overlap only where one is dead; a part is
        // in its array, by the check of the plan.
        unsafe { View::new(start, self.rows, length, stride) }
    }

    /// The rows of an operand of floats.
    fn operand(&self, i: usize) -> View<'a, f32> {
        match self.kernel.inputs.get(i) {
            Some(RowInput::Shared { .. }) => self.args.floats(i).repeated(self.rows),
            _ => self.args.floats(i).rows_from(self.first, self.rows),
        }
    }

    fn ints(&self, i: u32) -> View<'a, i32> {
        self.args.ints(i as usize).rows_from(self.first, self.rows)
    }

    fn store(&self, number: usize, x: View<f32>, dtype: DType, adds: bool) {
        let at = self.kernel.inputs.len() + number;
        match dtype {
            DType::Bf16 => {
                let y = self.args.view::<bf16>(at).rows_from(self.first, self.rows);
                if adds { add_narrow(x, y) } else { narrow_rows(x, y) }
            }
            _ => {
                let y = self.args.floats(at).rows_from(self.first, self.rows);
                if adds { add_rows(x, y) } else { copy_rows(x, y) }
            }
        }
    }

    /// Performs operation `i`. Its result overlaps none of its operands.
    fn compute(&self, cx: &Context, i: usize, rotation: &mut [f32]) {
        let y = || self.array(i);
        let x = |array: u32| self.array(array as usize);
        match self.compiled.fused[i] {
            Some(Fused::Scaled(a, size, eps, by)) => {
                return rms_scaled(x(a), x(by), size as usize, eps as f32, y());
            }
            Some(Fused::GradOfScaled(a, dy, by, size, eps)) => {
                return rms_grad_scaled(x(a), x(dy), x(by), size as usize, eps as f32, y());
            }
            Some(Fused::SiluBoth(a, later, derivative)) => {
                let (y, slope) = if derivative { (y(), x(later)) } else { (x(later), y()) };
                return match self.elements(a) {
                    Elements::Wide(a) => silu_both(a, y, slope),
                    Elements::Narrow(a) => silu_both_narrow(a, y, slope),
                };
            }
            None => {}
        }
        match self.kernel.ops[i] {
            RowOp::Constant(_) | RowOp::Zeros => {}
            RowOp::Index { input } => {
                let (y, value) = (y(), self.args.index(input as usize) as f32);
                (0..y.rows).for_each(|row| y.row_mut(row).fill(value));
            }
            RowOp::Load { input } => self.load(cx, i, input as usize),
            RowOp::Unary(op, a) => {
                let a = self.elements(a);
                self.by_elements(i, [a, a], |[a, _], y| match a {
                    Elements::Wide(a) => unary(op, a, y),
                    Elements::Narrow(a) => unary_narrow(op, a, y),
                });
            }
            RowOp::Binary { op, a, b, broadcast, small_first } => {
                let (large, small) = if small_first { (b, a) } else { (a, b) };
                if broadcast.size != self.kernel.lengths[i] {
                    return binary(op, small_first, x(large), x(small), broadcast, y());
                }
                use Elements::{Narrow, Wide};
                self.by_elements(
                    i,
                    [self.elements(large), self.elements(small)],
                    |operands, y| match operands {
                        [Wide(a), Wide(b)] => full(op, small_first, a, b, y),
                        [Narrow(a), Wide(b)] => full_narrow_wide(op, small_first, a, b, y),
                        [Wide(a), Narrow(b)] => full_wide_narrow(op, small_first, a, b, y),
                        [Narrow(a), Narrow(b)] => full_narrow(op, small_first, a, b, y),
                    },
                );
            }
            RowOp::Reduce { op, x: a, over } => reduce(op, x(a), over, y()),
            RowOp::Rms { x: a, size, eps } => rms(x(a), size as usize, eps.0 as f32, y()),
            RowOp::RmsGrad { x: a, dy, size, eps } => rms_grad(x(a), x(dy), size as usize, eps.0 as f32, y()),
            RowOp::Softmax { x: a, size } => softmax(x(a), size as usize, y()),
            RowOp::SoftmaxGrad { y: a, dy, size } => softmax_grad(x(a), x(dy), size as usize, y()),
            RowOp::Rope { x: a, size, rope, position, depths } => {
                let frequencies = &self.compiled.frequencies[i];
                let known = self.compiled.same_angles[i];
                let size = size as usize;
                match rope.positions {
                    Positions::Tokens => {
                        if !known {
                            angles_of_rows(frequencies, self.ints(position), rope.inverse, rotation);
                        }
                        rotate(x(a), size, rotation, size, y());
                    }
                    Positions::Depth { half_reversed } => {
                        let p = self.args.index(position as usize) as f64;
                        let odd = match half_reversed {
                            true => self.args.index(depths as usize) as f64 - 1.0 - p,
                            false => p,
                        };
                        if !known {
                            angles_of_row(frequencies, p, odd, rope.inverse, rotation);
                        }
                        rotate(x(a), size, rotation, 0, y());
                    }
                }
            }
            RowOp::Slice { x: a, size, start } => {
                if !matches!(self.compiled.places[i], Place::Part(..)) {
                    slice(x(a), size as usize, start as usize, y());
                }
            }
            RowOp::Concat { ref parts, groups } => {
                let mut first = 0;
                let (y, groups) = (y(), groups as usize);
                let total = y.length / groups;
                for &part in parts {
                    let part = x(part);
                    let size = part.length / groups;
                    for row in 0..self.rows {
                        let (part, y) = (part.row(row), y.row_mut(row));
                        for g in 0..groups {
                            y[g * total + first..][..size].copy_from_slice(&part[g * size..][..size]);
                        }
                    }
                    first += size;
                }
            }
            RowOp::Pick { table, chosen } => {
                let (table, chosen, y) = (x(table), self.ints(chosen), y());
                for row in 0..self.rows {
                    let table = table.row(row);
                    if cx.indices_below(chosen.row(row), table.len()) {
                        for (y, c) in y.row_mut(row).iter_mut().zip(chosen.row(row)) {
                            *y = table[*c as usize];
                        }
                    }
                }
            }
            RowOp::PickGrad { d, chosen } => {
                let (d, chosen, y) = (x(d), self.ints(chosen), y());
                for row in 0..self.rows {
                    let y = y.row_mut(row);
                    y.fill(0.0);
                    if cx.indices_below(chosen.row(row), y.len()) {
                        for (d, c) in d.row(row).iter().zip(chosen.row(row)) {
                            y[*c as usize] = *d;
                        }
                    }
                }
            }
        }
    }

    /// An array that an operation reads element by element.
    fn elements(&self, array: u32) -> Elements<'a> {
        match self.compiled.places[array as usize] {
            Place::Narrow(input) => Elements::Narrow(self.args.view(input).rows_from(self.first, self.rows)),
            _ => Elements::Wide(self.array(array as usize)),
        }
    }

    /// Computes array `i` by `f`, in pieces that are rounded while they are in the nearest cache
    /// where that is all it is for.
    fn by_elements(
        &self,
        i: usize,
        operands: [Elements<'a>; 2],
        f: impl Fn([Elements<'a>; 2], View<'a, f32>),
    ) {
        let y = self.array(i);
        let Some(number) = self.compiled.rounded[i].filter(|_| !self.in_place) else { return f(operands, y) };
        let at = self.kernel.inputs.len() + number;
        let to = self.args.view::<bf16>(at).rows_from(self.first, self.rows);
        let flat = |x: &Elements| match x {
            Elements::Wide(x) => x.flat().is_some(),
            Elements::Narrow(x) => x.flat().is_some(),
        };
        let Some(to) = to.flat_mut().filter(|_| operands.iter().all(flat)) else {
            f(operands, y);
            return narrow_rows(y, to);
        };
        for (piece, to) in to.chunks_mut(PIECE).enumerate() {
            let (first, length) = (piece * PIECE, to.len());
            let part = operands.map(|x| match x {
                Elements::Wide(x) => Elements::Wide(x.part_of_flat(first, length)),
                Elements::Narrow(x) => Elements::Narrow(x.part_of_flat(first, length)),
            });
            // The first elements of the array are room for all pieces.
            let y = y.part_of_flat(0, length);
            f(part, y);
            simd::narrow(y.row(0), to);
        }
    }

    /// Rows of packed numbers.
    fn unpack(&self, cx: &Context, input: usize, y: View<f32>) {
        let Some(numbers) = self.args.packed(cx, input) else { return };
        let shared = matches!(self.kernel.inputs[input], RowInput::Shared { .. });
        let stride = if shared { 0 } else { self.args.stride(input) };
        for row in 0..self.rows {
            // SAFETY: the plan was checked: the operand has these rows.
            unsafe { numbers.unpack((self.first + row) * stride, y.row_mut(row)) };
        }
    }

    fn load(&self, cx: &Context, i: usize, input: usize) {
        if matches!(self.compiled.places[i], Place::Input(_) | Place::Narrow(_)) {
            return;
        }
        let y = self.array(i);
        match self.kernel.inputs[input] {
            RowInput::Row { dtype: DType::Bf16, .. } => {
                widen(self.args.view(input).rows_from(self.first, self.rows), y);
            }
            RowInput::Shared { dtype: DType::Bf16, .. } => {
                widen(self.args.view(input).repeated(self.rows), y)
            }
            RowInput::Row { dtype: DType::Packed(_), .. }
            | RowInput::Shared { dtype: DType::Packed(_), .. } => self.unpack(cx, input, y),
            _ => copy_rows(self.operand(input), y),
        }
    }
}

/// Evaluates an expression with the usual group lengths as constants, which makes straight code of
/// its inner loops.
macro_rules! sized {
    ($size:ident: $body:expr) => {
        match $size {
            16 => sized!(@ $size 16 $body),
            32 => sized!(@ $size 32 $body),
            64 => sized!(@ $size 64 $body),
            128 => sized!(@ $size 128 $body),
            _ => $body,
        }
    };
    (@ $size:ident $constant:literal $body:expr) => {{
        let $size: usize = $constant;
        $body
    }};
}

fn narrow_rows(x: View<f32>, y: View<bf16>) {
    match (x.flat(), y.flat_mut()) {
        (Some(x), Some(y)) => simd::narrow(x, y),
        _ => (0..y.rows).for_each(|row| simd::narrow(x.row(row), y.row_mut(row))),
    }
}

#[inline(always)]
fn map<T: Stored>(x: View<T>, y: View<f32>, f: impl Fn(f32) -> f32) {
    if let (Some(x), Some(y)) = (x.flat(), y.flat_mut()) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = f(x.widen());
        }
        return;
    }
    for row in 0..y.rows {
        for (y, x) in y.row_mut(row).iter_mut().zip(x.row(row)) {
            *y = f(x.widen());
        }
    }
}

/// SiLU and its derivative, of one exponential.
#[inline(always)]
fn both<const FMA: bool, T: Stored>(x: View<T>, y: View<f32>, slope: View<f32>) {
    let into = |x: &[T], y: &mut [f32], slope: &mut [f32]| {
        for ((y, slope), x) in y.iter_mut().zip(slope).zip(x) {
            let x = x.widen();
            let s = sigmoid::<FMA>(x);
            *y = x * s;
            *slope = s * fma::<FMA>(x, 1.0 - s, 1.0);
        }
    };
    if let (Some(x), Some(y), Some(slope)) = (x.flat(), y.flat_mut(), slope.flat_mut()) {
        return into(x, y, slope);
    }
    for row in 0..y.rows {
        into(x.row(row), y.row_mut(row), slope.row_mut(row));
    }
}

/// `y = f(a, b)`, element by element.
#[inline(always)]
fn zip<A: Stored, B: Stored>(a: View<A>, b: View<B>, y: View<f32>, f: impl Fn(f32, f32) -> f32) {
    if let (Some(a), Some(b), Some(y)) = (a.flat(), b.flat(), y.flat_mut()) {
        for ((y, a), b) in y.iter_mut().zip(a).zip(b) {
            *y = f(a.widen(), b.widen());
        }
        return;
    }
    for row in 0..y.rows {
        for ((y, a), b) in y.row_mut(row).iter_mut().zip(a.row(row)).zip(b.row(row)) {
            *y = f(a.widen(), b.widen());
        }
    }
}

/// The same by operation.
#[inline(always)]
fn zip_by<A: Stored, B: Stored>(op: Binary, swapped: bool, a: View<A>, b: View<B>, y: View<f32>) {
    match (op, swapped) {
        (Binary::Add, _) => zip(a, b, y, |a, b| a + b),
        (Binary::Sub, false) => zip(a, b, y, |a, b| a - b),
        (Binary::Sub, true) => zip(a, b, y, |a, b| b - a),
        (Binary::Mul, _) => zip(a, b, y, |a, b| a * b),
        (Binary::Div, false) => zip(a, b, y, |a, b| a / b),
        (Binary::Div, true) => zip(a, b, y, |a, b| b / a),
        (Binary::Max, _) => zip(a, b, y, |a, b| if b > a { b } else { a }),
        (Binary::Where, false) => zip(a, b, y, kept),
        (Binary::Where, true) => zip(a, b, y, |a, b| kept(b, a)),
    }
}

/// `a` where `b` is not 0, else 0.
#[inline(always)]
pub(super) fn kept(a: f32, b: f32) -> f32 {
    if b != 0.0 { a } else { 0.0 }
}

/// Numbers, and a function applied to each of them.
pub(super) trait Each {
    fn each(self, f: impl Fn(f32) -> f32);
}

/// Applies the function of an operation.
#[inline(always)]
pub(super) fn by_unary<const FMA: bool>(op: Unary, to: impl Each) {
    match op {
        Unary::Neg => to.each(|x| -x),
        Unary::Exp => to.each(exp::<FMA>),
        Unary::Log => to.each(log::<FMA>),
        Unary::Sigmoid => to.each(sigmoid::<FMA>),
        Unary::Tanh => to.each(tanh::<FMA>),
        Unary::Silu => to.each(silu::<FMA>),
        Unary::SiluGrad => to.each(silu_grad::<FMA>),
        Unary::Gelu => to.each(gelu::<FMA>),
        Unary::GeluGrad => to.each(gelu_grad::<FMA>),
        Unary::Relu => to.each(|x| if x > 0.0 { x } else { 0.0 }),
        Unary::Softplus => to.each(softplus::<FMA>),
        Unary::Rsqrt => to.each(|x| 1.0 / x.sqrt()),
        Unary::Sqrt => to.each(f32::sqrt),
        Unary::Recip => to.each(|x| 1.0 / x),
        Unary::Square => to.each(|x| x * x),
        Unary::Positive => to.each(|x| if x > 0.0 { 1.0 } else { 0.0 }),
        Unary::Sin => to.each(|x| f64::from(x).sin() as f32),
        Unary::Cos => to.each(|x| f64::from(x).cos() as f32),
        Unary::Floor => to.each(f32::floor),
    }
}

struct Mapped<'a, T> {
    x: View<'a, T>,
    y: View<'a, f32>,
}

impl<T: Stored> Each for Mapped<'_, T> {
    #[inline(always)]
    fn each(self, f: impl Fn(f32) -> f32) {
        map(self.x, self.y, f);
    }
}

#[inline(always)]
fn map_by<const FMA: bool, T: Stored>(op: Unary, x: View<T>, y: View<f32>) {
    by_unary::<FMA>(op, Mapped { x, y });
}

/// `y = f(large, small)`, the small operand spread over `[outer, size, inner]`.
#[inline(always)]
fn spread(large: View<f32>, small: View<f32>, b: Broadcast, y: View<f32>, f: impl Fn(f32, f32) -> f32) {
    let (size, inner) = (b.size as usize, b.inner as usize);
    if y.length == 0 {
        return;
    }
    for row in 0..y.rows {
        let (large, small, y) = (large.row(row), small.row(row), y.row_mut(row));
        if size == 1 {
            // A plain loop over two slices becomes one of vectors; pieces of sixteen do not.
            let small = small[0];
            for (y, l) in y.iter_mut().zip(large) {
                *y = f(*l, small);
            }
        } else if inner == 1 {
            sized!(size: for (y, large) in y.chunks_exact_mut(size).zip(large.chunks_exact(size)) {
                zip_into(large, &small[..size], y, &f);
            });
        } else {
            for (y, large) in y.chunks_exact_mut(size * inner).zip(large.chunks_exact(size * inner)) {
                for (i, s) in small.iter().enumerate() {
                    let (y, large) = (&mut y[i * inner..][..inner], &large[i * inner..][..inner]);
                    for (y, l) in y.iter_mut().zip(large) {
                        *y = f(*l, *s);
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn some<const N: usize>(x: &[f32], at: usize) -> [f32; N] {
    let mut some = [0.0; N];
    some.copy_from_slice(&x[at..at + N]);
    some
}

/// `y = f(a, b)`, sixteen elements at a time: all are read before any is written, so the compiler
/// makes vectors of short loops too and need not ask what overlaps.
#[inline(always)]
fn zip_into(a: &[f32], b: &[f32], y: &mut [f32], f: impl Fn(f32, f32) -> f32) {
    let n = y.len();
    let (a, b) = (&a[..n], &b[..n]);
    let whole = n / 16 * 16;
    for at in (0..whole).step_by(16) {
        let (a, b) = (some::<16>(a, at), some::<16>(b, at));
        let mut both = [0.0; 16];
        for i in 0..16 {
            both[i] = f(a[i], b[i]);
        }
        y[at..at + 16].copy_from_slice(&both);
    }
    for i in whole..n {
        y[i] = f(a[i], b[i]);
    }
}

/// `y = f(x, y)`, likewise.
#[inline(always)]
fn zip_onto(x: &[f32], y: &mut [f32], f: impl Fn(f32, f32) -> f32) {
    let n = y.len();
    let x = &x[..n];
    let whole = n / 16 * 16;
    for at in (0..whole).step_by(16) {
        let (a, b) = (some::<16>(x, at), some::<16>(y, at));
        let mut both = [0.0; 16];
        for i in 0..16 {
            both[i] = f(a[i], b[i]);
        }
        y[at..at + 16].copy_from_slice(&both);
    }
    for i in whole..n {
        y[i] = f(x[i], y[i]);
    }
}

/// Cosines and sines of a row, position `even` for even pairs and `odd` for odd ones.
#[inline(always)]
fn angles<const FMA: bool>(frequencies: &[f64], even: f64, odd: f64, inverse: bool, rotation: &mut [f32]) {
    let pairs = frequencies.len();
    let (cos, sin) = rotation[..2 * pairs].split_at_mut(pairs);
    let sign = if inverse { -1.0 } else { 1.0 };
    for (i, ((f, c), s)) in frequencies.iter().zip(cos).zip(sin).enumerate() {
        let position = if i % 2 == 0 { even } else { odd };
        let (sin, cos) = sin_cos::<FMA>(position * *f);
        *c = cos;
        *s = sin * sign;
    }
}

kernel_fn! {
    fn unary(op: Unary, x: View<f32>, y: View<f32>) {
        map_by::<FMA, f32>(op, x, y);
    }

    fn unary_narrow(op: Unary, x: View<bf16>, y: View<f32>) {
        map_by::<FMA, bf16>(op, x, y);
    }

    fn silu_both(x: View<f32>, y: View<f32>, slope: View<f32>) {
        both::<FMA, f32>(x, y, slope);
    }

    fn silu_both_narrow(x: View<bf16>, y: View<f32>, slope: View<f32>) {
        both::<FMA, bf16>(x, y, slope);
    }

    fn full(op: Binary, swapped: bool, a: View<f32>, b: View<f32>, y: View<f32>) {
        zip_by(op, swapped, a, b, y);
    }

    fn full_narrow(op: Binary, swapped: bool, a: View<bf16>, b: View<bf16>, y: View<f32>) {
        zip_by(op, swapped, a, b, y);
    }

    fn full_narrow_wide(op: Binary, swapped: bool, a: View<bf16>, b: View<f32>, y: View<f32>) {
        zip_by(op, swapped, a, b, y);
    }

    fn full_wide_narrow(op: Binary, swapped: bool, a: View<f32>, b: View<bf16>, y: View<f32>) {
        zip_by(op, swapped, a, b, y);
    }

    fn binary(op: Binary, small_first: bool, large: View<f32>, small: View<f32>, b: Broadcast, y: View<f32>) {
        match (op, small_first) {
            (Binary::Add, _) => spread(large, small, b, y, |l, s| l + s),
            (Binary::Sub, false) => spread(large, small, b, y, |l, s| l - s),
            (Binary::Sub, true) => spread(large, small, b, y, |l, s| s - l),
            (Binary::Mul, _) => spread(large, small, b, y, |l, s| l * s),
            (Binary::Div, false) => spread(large, small, b, y, |l, s| l / s),
            (Binary::Div, true) => spread(large, small, b, y, |l, s| s / l),
            (Binary::Max, _) => spread(large, small, b, y, |l, s| if s > l { s } else { l }),
            (Binary::Where, false) => spread(large, small, b, y, kept),
            (Binary::Where, true) => spread(large, small, b, y, |l, s| kept(s, l)),
        }
    }

    fn reduce(op: Reduce, x: View<f32>, over: Broadcast, y: View<f32>) {
        let (size, inner) = (over.size as usize, over.inner as usize);
        let empty = if op == Reduce::Max { f32::NEG_INFINITY } else { 0.0 };
        for row in 0..y.rows {
            let (x, y) = (x.row(row), y.row_mut(row));
            if size * inner == 0 {
                y.fill(empty);
            } else if inner == 1 {
                sized!(size: for (y, x) in y.iter_mut().zip(x.chunks_exact(size)) {
                    *y = if op == Reduce::Max { largest::<FMA>(x) } else { sum::<FMA>(x) };
                });
            } else {
                for (y, x) in y.chunks_exact_mut(inner).zip(x.chunks_exact(size * inner)) {
                    y.fill(empty);
                    for x in x.chunks_exact(inner) {
                        if op == Reduce::Max {
                            for (y, x) in y.iter_mut().zip(x) {
                                *y = if *x > *y { *x } else { *y };
                            }
                        } else {
                            for (y, x) in y.iter_mut().zip(x) {
                                *y += *x;
                            }
                        }
                    }
                }
            }
            if op == Reduce::Mean {
                for y in y.iter_mut() {
                    *y /= size as f32;
                }
            }
        }
    }

    fn rms(x: View<f32>, size: usize, eps: f32, y: View<f32>) {
        for row in 0..y.rows {
            let (x, y) = (x.row(row), y.row_mut(row));
            sized!(size: for (x, y) in x.chunks_exact(size).zip(y.chunks_exact_mut(size)) {
                let r = 1.0 / (dot::<FMA>(x, x) / size as f32 + eps).sqrt();
                zip_into(x, x, y, |x, _| x * r);
            });
        }
    }

    /// [`rms`], times a vector as long as a group or as the row.
    fn rms_scaled(x: View<f32>, by: View<f32>, size: usize, eps: f32, y: View<f32>) {
        for row in 0..y.rows {
            let (x, by, y) = (x.row(row), by.row(row), y.row_mut(row));
            let step = if by.len() == y.len() { size } else { 0 };
            sized!(size: for (i, (x, y)) in x.chunks_exact(size).zip(y.chunks_exact_mut(size)).enumerate() {
                let r = 1.0 / (dot::<FMA>(x, x) / size as f32 + eps).sqrt();
                zip_into(x, &by[i * step..][..size], y, |x, by| x * r * by);
            });
        }
    }

    /// [`rms_grad`] of `dy` times such a vector.
    fn rms_grad_scaled(x: View<f32>, dy: View<f32>, by: View<f32>, size: usize, eps: f32, y: View<f32>) {
        for row in 0..y.rows {
            let (x, dy, by, y) = (x.row(row), dy.row(row), by.row(row), y.row_mut(row));
            let step = if by.len() == y.len() { size } else { 0 };
            sized!(size: for (i, ((x, dy), y)) in x.chunks_exact(size).zip(dy.chunks_exact(size)).zip(y.chunks_exact_mut(size)).enumerate() {
                let r = 1.0 / (dot::<FMA>(x, x) / size as f32 + eps).sqrt();
                zip_into(dy, &by[i * step..][..size], y, |dy, by| dy * by);
                let along = dot::<FMA>(x, y) / size as f32 * (r * r * r);
                zip_onto(x, y, |x, dy| fma::<FMA>(-along, x, dy * r));
            });
        }
    }

    fn rms_grad(x: View<f32>, dy: View<f32>, size: usize, eps: f32, y: View<f32>) {
        for row in 0..y.rows {
            let (x, dy, y) = (x.row(row), dy.row(row), y.row_mut(row));
            sized!(size: for ((x, dy), y) in x.chunks_exact(size).zip(dy.chunks_exact(size)).zip(y.chunks_exact_mut(size)) {
                let r = 1.0 / (dot::<FMA>(x, x) / size as f32 + eps).sqrt();
                let along = dot::<FMA>(x, dy) / size as f32 * (r * r * r);
                zip_into(x, dy, y, |x, dy| fma::<FMA>(-along, x, dy * r));
            });
        }
    }

    fn softmax(x: View<f32>, size: usize, y: View<f32>) {
        for row in 0..y.rows {
            let (x, y) = (x.row(row), y.row_mut(row));
            for (x, y) in x.chunks_exact(size).zip(y.chunks_exact_mut(size)) {
                let most = largest::<FMA>(x);
                for (y, x) in y.iter_mut().zip(x) {
                    *y = exp::<FMA>(*x - most);
                }
                let factor = 1.0 / sum::<FMA>(y);
                for y in y.iter_mut() {
                    *y *= factor;
                }
            }
        }
    }

    fn softmax_grad(s: View<f32>, dy: View<f32>, size: usize, y: View<f32>) {
        for row in 0..y.rows {
            let (s, dy, y) = (s.row(row), dy.row(row), y.row_mut(row));
            for ((s, dy), y) in s.chunks_exact(size).zip(dy.chunks_exact(size)).zip(y.chunks_exact_mut(size))
            {
                let along = dot::<FMA>(s, dy);
                for ((y, s), dy) in y.iter_mut().zip(s).zip(dy) {
                    *y = *s * (*dy - along);
                }
            }
        }
    }

    /// Cosines and sines of one row.
    fn angles_of_row(frequencies: &[f64], even: f64, odd: f64, inverse: bool, rotation: &mut [f32]) {
        angles::<FMA>(frequencies, even, odd, inverse, rotation);
    }

    /// Cosines and sines of every row.
    fn angles_of_rows(frequencies: &[f64], positions: View<i32>, inverse: bool, rotation: &mut [f32]) {
        for (row, rotation) in rotation.chunks_exact_mut((2 * frequencies.len()).max(1)).take(positions.rows).enumerate() {
            let p = positions.row(row)[0] as f64;
            angles::<FMA>(frequencies, p, p, inverse, rotation);
        }
    }

    /// Rotates groups of `size` by cosines and sines that are `stride` apart from row to row.
    fn rotate(x: View<f32>, size: usize, rotation: &[f32], stride: usize, y: View<f32>) {
        let pairs = size / 2;
        for row in 0..y.rows {
            let (cos, sin) = rotation[row * stride..][..size].split_at(pairs);
            let (x, y) = (x.row(row), y.row_mut(row));
            sized!(size: for (x, y) in x.chunks_exact(size).zip(y.chunks_exact_mut(size)) {
                let ((a, b), (ya, yb)) = (x.split_at(size / 2), y.split_at_mut(size / 2));
                let (cos, sin) = (&cos[..size / 2], &sin[..size / 2]);
                let whole = size / 2 / 8 * 8;
                for at in (0..whole).step_by(8) {
                    // All is read before anything is written: the compiler need not ask what
                    // overlaps.
                    let (a, b) = (some::<8>(a, at), some::<8>(b, at));
                    let (c, s) = (some::<8>(cos, at), some::<8>(sin, at));
                    let (mut first, mut second) = ([0.0; 8], [0.0; 8]);
                    for i in 0..8 {
                        first[i] = a[i] * c[i] - b[i] * s[i];
                        second[i] = b[i] * c[i] + a[i] * s[i];
                    }
                    ya[at..at + 8].copy_from_slice(&first);
                    yb[at..at + 8].copy_from_slice(&second);
                }
                for i in whole..size / 2 {
                    ya[i] = a[i] * cos[i] - b[i] * sin[i];
                    yb[i] = b[i] * cos[i] + a[i] * sin[i];
                }
            });
        }
    }

    fn slice(x: View<f32>, size: usize, start: usize, y: View<f32>) {
        for row in 0..y.rows {
            let (x, y) = (x.row(row), y.row_mut(row));
            let taken = (y.len() * size).checked_div(x.len()).unwrap_or(0);
            if taken > 0 {
                for (x, y) in x.chunks_exact(size).zip(y.chunks_exact_mut(taken)) {
                    y.copy_from_slice(&x[start..start + taken]);
                }
            }
        }
    }

    fn copy_rows(x: View<f32>, y: View<f32>) {
        map(x, y, |x| x);
    }

    fn add_rows(x: View<f32>, y: View<f32>) {
        for row in 0..y.rows {
            for (y, x) in y.row_mut(row).iter_mut().zip(x.row(row)) {
                *y += *x;
            }
        }
    }

    /// Adds up rows in order, on top of the sum so far where there is one.
    fn sum_rows(x: View<f32>, total: &mut [f32], begun: bool) {
        if !begun {
            total.copy_from_slice(x.row(0));
        }
        for row in !begun as usize..x.rows {
            for (t, x) in total.iter_mut().zip(x.row(row)) {
                *t += *x;
            }
        }
    }

    fn add_narrow(x: View<f32>, y: View<bf16>) {
        for row in 0..y.rows {
            for (y, x) in y.row_mut(row).iter_mut().zip(x.row(row)) {
                *y = simd::to_bf16(simd::from_bf16(*y) + *x);
            }
        }
    }

    fn widen(x: View<bf16>, y: View<f32>) {
        map(x, y, |x| x);
    }
}

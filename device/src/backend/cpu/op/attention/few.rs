//! Attention of few queries over the places of a cache, as decoding has it: bound by the memory
//! that keys and values are read from, which are read where they are and packed nowhere.
//!
//! A task takes one key head of one sequence: scores are a product of few rows with the cached keys
//! ([`product::block`], whose right operand's steps are adjacent), and values are added up a row at
//! a time, their sums in registers. Memory that the next loop will read is asked for before.
//! Where few key heads would leave threads without work, the keys are cut into pieces of
//! [`PIECE`], and what pieces found is brought to one scale in their order. Cuts follow from the
//! shape of the cache alone, so neither threads nor the other rows of a batch change any bits.

use super::scored::{self, Dropout, Scored};
use super::{BLOCK, SUMS, Scores, Sizes, Visible, blocks, finish, soften, take};
use crate::backend::cpu::product::{self, FEW, Side};
use crate::backend::cpu::simd::{exp, fma, kernel_fn, sum};
use crate::backend::cpu::{Arguments, Context, Pointer, Scratch, Stored, View};
use dreamc_compiler::ir::{Attention as Scoring, Mask};
use dreamc_compiler::op::attention::formula::Part;
use half::bf16;

/// Keys of a piece where there are fewer key heads than [`HEADS`].
const PIECE: usize = 512;
/// Key heads that are tasks enough.
const HEADS: usize = 8;

/// Whether attention is of few queries over a cache.
pub(super) fn suits(s: &Sizes, attention: &Scoring) -> bool {
    attention.mask == Mask::Positions && s.queries <= FEW
}

fn pieces(s: &Sizes) -> usize {
    if s.kv_heads < HEADS { s.keys.div_ceil(PIECE).max(1) } else { 1 }
}

pub(super) fn scratch(s: &Sizes) -> Scratch {
    let lines = s.group * s.queries;
    let product = product::block_scratch(FEW, BLOCK, s.size);
    let shared = if pieces(s) > 1 { s.batch * s.kv_heads * pieces(s) * lines * (s.size + 2) } else { 0 };
    Scratch { local: lines * (s.size + 1 + SUMS) + FEW * BLOCK + product, shared }
}

kernel_fn! {
    /// `sums += Σ weights[i] · x` with `x` the elements from `element` on of row `first + i`.
    fn add_rows(weights: &[f32], x: View<f32>, first: usize, element: usize, sums: &mut [f32]) {
        add_rows_of::<f32, FMA>(weights, x, first, element, sums);
    }

    /// The same of bf16.
    fn add_rows_narrow(weights: &[f32], x: View<bf16>, first: usize, element: usize, sums: &mut [f32]) {
        add_rows_of::<bf16, FMA>(weights, x, first, element, sums);
    }

    /// The parts of a result, each relative to the largest score of its piece, as one; the
    /// logarithm of the sum of all exponentials. A part is `size` sums, the largest score, and the
    /// sum of exponentials.
    fn joined(parts: &[f32], stride: usize, result: &mut [f32]) -> f32 {
        let size = result.len();
        let mut most = f32::NEG_INFINITY;
        for part in parts.chunks(stride) {
            most = if part[size] > most { part[size] } else { most };
        }
        result.fill(0.0);
        if most == f32::NEG_INFINITY {
            return most;
        }
        let mut total = 0.0;
        for part in parts.chunks(stride) {
            let factor = exp::<FMA>(part[size] - most);
            total = fma::<FMA>(factor, part[size + 1], total);
            for (r, x) in result.iter_mut().zip(part) {
                *r = fma::<FMA>(factor, *x, *r);
            }
        }
        let factor = 1.0 / total;
        for r in result.iter_mut() {
            *r *= factor;
        }
        most + total.ln()
    }

    fn total(sums: &[f32]) -> f32 {
        sum::<FMA>(sums)
    }
}

/// Elements of a row whose sums are in registers at once.
const WIDE: usize = 64;
const NARROW: usize = 16;

#[inline(always)]
fn add_rows_of<T: Stored, const FMA: bool>(
    weights: &[f32],
    x: View<T>,
    first: usize,
    mut element: usize,
    sums: &mut [f32],
) {
    let (wide, rest) = sums.split_at_mut(sums.len() / WIDE * WIDE);
    for sums in wide.chunks_exact_mut(WIDE) {
        add_part::<T, FMA, WIDE>(weights, x, first, element, sums);
        element += WIDE;
    }
    let mut narrow = rest.chunks_exact_mut(NARROW);
    for sums in &mut narrow {
        add_part::<T, FMA, NARROW>(weights, x, first, element, sums);
        element += NARROW;
    }
    for sum in narrow.into_remainder() {
        for (i, weight) in weights.iter().enumerate() {
            *sum = fma::<FMA>(*weight, x.row(first + i)[element].widen(), *sum);
        }
        element += 1;
    }
}

/// `N` elements of each row.
#[inline(always)]
fn add_part<T: Stored, const FMA: bool, const N: usize>(
    weights: &[f32],
    x: View<T>,
    first: usize,
    element: usize,
    sums: &mut [f32],
) {
    let mut all = [0.0; N];
    all.copy_from_slice(sums);
    for (i, weight) in weights.iter().enumerate() {
        for (sum, x) in all.iter_mut().zip(&x.row(first + i)[element..element + N]) {
            *sum = fma::<FMA>(*weight, x.widen(), *sum);
        }
    }
    sums.copy_from_slice(&all);
}

/// Asks for rows that will be read soon.
fn ask<T>(x: View<T>, row: usize, rows: usize, element: usize, size: usize) {
    #[cfg(target_arch = "x86_64")]
    for row in row..row + rows {
        let start = x.start.add(row * x.stride + element).get().cast::<u8>();
        for at in (0..size * size_of::<T>()).step_by(64) {
            // SAFETY: SSE is part of the architecture, and the instruction reads nothing that a
            // program could see.
            unsafe {
                use std::arch::x86_64::*;
                _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(at).cast());
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (x, row, rows, element, size);
}

/// One launch. Operands are where the views say.
pub(super) fn run<T: Stored>(
    s: &Sizes,
    attention: &Scoring,
    (scored, dropout): (Option<Scored>, Option<Dropout>),
    cx: &Context,
    args: &Arguments,
) {
    let [q, k, v] = ["q", "k", "v"].map(|name| args.view::<T>(name));
    let o = args.view::<T>("o").rows_of(s.heads * s.size);
    let lse = args.floats("lse").rows_of(s.heads);
    let scores = Scores::of(attention, scored.as_ref());
    let (size, pieces, lines) = (s.size, pieces(s), s.group * s.queries);
    let add = |weights: &[f32], row: usize, element: usize, sums: &mut [f32]| match T::NARROW {
        false => add_rows(weights, v.same(), row, element, sums),
        true => add_rows_narrow(weights, v.same(), row, element, sums),
    };
    let part = size + 2;
    let parts = cx.shared();
    cx.parallel(s.batch * s.kv_heads * pieces, |task, mut scratch| {
        let (piece, kv_head) = (task % pieces, task / pieces % s.kv_heads);
        let sequence = task / pieces / s.kv_heads;
        let visible = Visible::new(s, attention, args, sequence);
        let results = take(&mut scratch, lines * size);
        let most = take(&mut scratch, lines);
        let sums = take(&mut scratch, lines * SUMS);
        let tile = take(&mut scratch, FEW * BLOCK);
        let steps = take(&mut scratch, scored::room(attention, false));
        results.fill(0.0);
        most.fill(f32::NEG_INFINITY);
        sums.fill(0.0);
        let length = if pieces == 1 { s.keys } else { PIECE };
        let all = piece * length..((piece + 1) * length).min(s.keys);
        for keys in blocks(all).filter(|keys| visible.any(&(0..s.queries), keys)) {
            let (row, n) = (sequence * s.keys + keys.start, keys.len());
            ask(v, row, n, kv_head * size, size);
            let at = |row: usize| k.start.add(row * k.stride + kv_head * size);
            let right = Side::Strided { start: at(row), line: k.stride, step: 1 };
            // Lines are the queries of a head, or the heads of the one query.
            let (outer, inner, stride) = match s.queries {
                1 => (1, s.group, size),
                n => (s.group, n, q.stride),
            };
            for i in 0..outer {
                let start = q.start.add(sequence * s.queries * q.stride + (kv_head * s.group + i) * size);
                for j in (0..inner).step_by(FEW) {
                    let m = FEW.min(inner - j);
                    let left = Side::Strided { start: start.add(j * stride), line: stride, step: 1 };
                    let tile = &mut tile[..m * n];
                    // SAFETY: `tile` is `m` by `n`, and this task's.
                    unsafe {
                        let c = Pointer::to(tile);
                        product::block((m, n, size), left, right, c, n, false, scratch);
                    }
                    for (line, tile) in (i * inner + j..).zip(tile.chunks_exact_mut(n)) {
                        let query = if s.queries == 1 { 0 } else { line - i * inner };
                        let pair = [sequence, kv_head * s.group + line / s.queries];
                        if let Some(scored) = &scored {
                            let queries = query..query + 1;
                            let part = scored.part(&visible, pair, &queries, &keys);
                            if part == Part::Empty {
                                continue;
                            }
                            scored.block(&visible, pair, &keys, steps);
                            scored.tile(
                                &visible,
                                pair,
                                queries,
                                &keys,
                                part,
                                attention.scale as f32,
                                steps,
                                tile,
                            );
                        }
                        soften(
                            &scores,
                            &visible,
                            query..query + 1,
                            keys.clone(),
                            tile,
                            &mut most[line..line + 1],
                            &mut sums[line * SUMS..][..SUMS],
                            &mut results[line * size..][..size],
                        );
                        if let Some(dropout) = &dropout {
                            dropout.apply(s, pair, query..query + 1, &keys, tile);
                        }
                        add(tile, row, kv_head * size, &mut results[line * size..][..size]);
                    }
                }
            }
        }
        for (line, result) in results.chunks_exact_mut(size).enumerate() {
            let (head, query) = (line / s.queries, line % s.queries);
            let sums = &sums[line * SUMS..][..SUMS];
            if pieces > 1 {
                let first = ((sequence * s.kv_heads + kv_head) * lines + line) * pieces + piece;
                let to = parts.part_mut(first * part, part);
                to[..size].copy_from_slice(result);
                (to[size], to[size + 1]) = (most[line], total(sums));
                continue;
            }
            let (row, head) = (sequence * s.queries + query, kv_head * s.group + head);
            lse.row_mut(row)[head] = finish(result, most[line], sums);
            T::store(result, &mut o.row_mut(row)[head * size..][..size]);
        }
    });
    if pieces == 1 {
        return;
    }
    cx.pieces(s.batch * s.kv_heads, lines * pieces * part, |range, scratch| {
        let result = &mut scratch[..size];
        for of in range {
            let (sequence, kv_head) = (of / s.kv_heads, of % s.kv_heads);
            for line in 0..lines {
                let (head, query) = (kv_head * s.group + line / s.queries, line % s.queries);
                let row = sequence * s.queries + query;
                let found = parts.part((of * lines + line) * pieces * part, pieces * part);
                lse.row_mut(row)[head] = joined(found, part, result);
                T::store(result, &mut o.row_mut(row)[head * size..][..size]);
            }
        }
    });
}

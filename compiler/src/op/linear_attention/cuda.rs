//! The CUDA of linear attention: rows of a head's state by threads of their own, since none reads
//! another, and columns likewise where sums over rows are wanted, the products of states with `u`
//! being known by then.

use super::kernel::{LinearAttention, LinearAttentionGrad, LinearShape};
use super::{Decay, Delta, Part};
use crate::codegen::naive::{Naive, whole};
use crate::codegen::{CodegenError, Source, Variant};
use crate::op::Tokens;
use crate::op::kernel::{KernelKind, times};
use std::fmt::Display;

type Result<T> = std::result::Result<T, CodegenError>;

/// Where a head begins in the rows of an operand, as an expression of `h`.
pub(super) fn first(shape: &LinearShape, part: &Part) -> String {
    let mut after = shape.head_count();
    let mut terms: Vec<String> = vec![];
    for (size, stride) in shape.heads.iter().zip(&part.strides) {
        after = after.checked_div(*size).unwrap_or(1);
        if *stride > 0 && *size > 1 {
            terms.push(format!("(h) / {after}ll % {size}ll * {stride}ll"));
        }
    }
    if terms.is_empty() { "0ll".into() } else { format!("({})", terms.join(" + ")) }
}

/// Numbers by their names.
type Numbers = Vec<(String, String)>;

pub(super) const LETTERS: [&str; 5] = ["Q", "K", "V", "U", "W"];

fn numbers(shape: &LinearShape, delta: Delta, before: bool) -> Numbers {
    let mut list: Numbers = [
        ("BATCH", shape.batch),
        ("SEQUENCE", shape.tokens),
        ("HEADS", shape.head_count()),
        ("SIZE", shape.size),
        ("VALUE", shape.value),
    ]
    .map(|(name, n)| (name.into(), whole(n)))
    .into();
    let decays = match shape.decay_kind() {
        Decay::None => 0,
        Decay::Head => 1,
        Decay::Channel => 2,
    };
    let small = [("DECAYS", decays), ("DELTA", delta.operands()), ("BEFORE", usize::from(before))];
    list.extend(small.map(|(name, n)| (name.into(), n.to_string())));
    for (letter, part) in LETTERS.iter().zip(&shape.parts).chain(shape.decay.as_ref().map(|p| (&"DECAY", p)))
    {
        list.push((format!("FIRST_{letter}(h)"), first(shape, part)));
        list.push((format!("ROW_{letter}"), whole(part.row)));
    }
    list
}

fn naive(kernel: &dyn KernelKind, variant: Variant, list: &Numbers) -> Result<Naive> {
    let list: Vec<(&str, &dyn Display)> =
        list.iter().map(|(name, n)| (name.as_str(), n as &dyn Display)).collect();
    Naive::new(kernel, variant, include_str!("naive.cuh"), &list)
}

pub(super) fn forward(kernel: &LinearAttention, variant: Variant) -> Result<Option<Source>> {
    let s = &kernel.shape;
    let rows = times(&[s.batch, s.head_count(), s.value]);
    let mut list = numbers(s, kernel.delta, kernel.before);
    let marks = match kernel.tokens {
        Tokens::All => 0,
        Tokens::Segments => 1,
        Tokens::Kept => 2,
    };
    let small = [("MARKS", marks), ("SIZE_FIRST", u64::from(kernel.size_first))];
    list.extend(small.map(|(name, n)| (name.into(), n.to_string())));
    list.push(("KEPT".into(), whole(kernel.kept())));
    let text = naive(kernel, variant, &list)?;
    Ok(match kernel.tokens == Tokens::Kept {
        true => text.pass("forward", rows)?.pass("counts", s.batch)?,
        false => text.scratch("spare", times(&[rows, s.size])).pass("forward", rows)?,
    }
    .finish())
}

pub(super) fn backward(kernel: &LinearAttentionGrad, variant: Variant) -> Result<Option<Source>> {
    let s = &kernel.shape;
    let [rows, columns] = [s.value, s.size].map(|n| times(&[s.batch, s.head_count(), n]));
    let tokens = times(&[s.batch, s.tokens]);
    let stretches = s.tokens.div_ceil(kernel.stretch());
    let mut list = numbers(s, kernel.delta, kernel.before);
    list.push(("MARKS".into(), u64::from(kernel.segments).to_string()));
    list.push(("STRETCH".into(), whole(kernel.stretch())));
    list.push(("STRETCHES".into(), whole(stretches)));
    // The cotangent of an operand that heads share is the sum of the heads' parts, which are stored
    // separately first.
    let mut joins = vec![];
    for (letter, (_, gradient, part)) in LETTERS
        .into_iter()
        .take(s.parts.len())
        .chain(s.decay.as_ref().map(|_| "DECAY"))
        .zip(kernel.operands())
    {
        let width = if letter == "V" { s.value } else { s.size };
        let of_head = letter == "DECAY" && s.decay_kind() == Decay::Head;
        let name = letter.to_lowercase();
        if s.is_shared(part) || of_head {
            let to = format!("parts_{name}[OF_HEAD({width}ll) + (c)] = (x)");
            list.push((format!("GIVE_{letter}(c, x)"), to));
            joins.push((name, part.row, width));
        } else {
            let to = format!("put({gradient} + token * ROW_{letter} + FIRST_{letter}(h) + (c), x)");
            list.push((format!("GIVE_{letter}(c, x)"), to));
        }
    }
    let state = times(&[columns, s.value]);
    let mut text = naive(kernel, variant, &list)?
        .scratch("spare", state)
        .scratch("held", times(&[state, stretches + kernel.stretch()]));
    if kernel.delta != Delta::None {
        let products = times(&[tokens, s.head_count(), s.value]);
        text = text.scratch("products", products).scratch("backs", products);
    }
    for (name, _, width) in &joins {
        text = text.scratch(&format!("parts_{name}"), times(&[tokens, s.head_count(), *width]));
    }
    if kernel.delta != Delta::None {
        text = text.pass("products", rows)?;
    }
    text = text.pass("queries", columns)?.pass("values", rows)?.pass("keys", columns)?;
    for (name, row, _) in &joins {
        text = text.pass(&format!("join_{name}"), times(&[tokens, *row]))?;
    }
    Ok(text.finish())
}

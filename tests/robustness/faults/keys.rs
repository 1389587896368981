//! Faults in the text of kernels that choose keys, that read those chosen, and that read keys which
//! heads share: the CPU's numbers or the interpreter, which finds races, notice each.

use super::kernel_texts::{Fault, Form};
use crate::support::launch::Case;
use dreamc_compiler::format::Packed;
use dreamc_compiler::ir::{Attention, Mask};
use dreamc_compiler::op::Measure;
use dreamc_compiler::op::attention::Among;
use dreamc_compiler::program::{AttentionShape, kernel};

fn ints(numbers: impl Iterator<Item = u64>) -> Vec<u8> {
    numbers.flat_map(|n| (n as i32).to_le_bytes()).collect()
}

/// Small whole numbers, so that many scores are equal and none is rounded.
fn whole(count: u64, seed: u64) -> Vec<u8> {
    (0..count).flat_map(|i| (((i * i + i * seed) % 7) as f32 - 3.0).to_le_bytes()).collect()
}

/// Blocks of two tokens, chosen by what heads with weights agree on, in documents.
pub fn choices() -> Case {
    let shape = AttentionShape { batch: 1, queries: 90, keys: 90, heads: 4, kv_heads: 2, size: 8 };
    let choice = kernel::ChooseKeys {
        shape,
        seen: Attention { scale: 0.5, every: Some(2), segments: true, ..Attention::default() },
        measure: Measure::Relu,
        weighed: true,
        near: 1,
        first: 1,
        lists: 2,
        count: 8,
    };
    let given = [
        ("q", whole(90 * 4 * 8, 3)),
        ("k", whole(90 * 2 * 8, 5)),
        ("weights", whole(90 * 4, 2)),
        ("segments", ints((0..90).map(|i| i / 50))),
    ];
    Case::new(choice, Packed::Q8, ("chosen", &[]), &given)
}

fn attention(shape: AttentionShape, attention: Attention, shared: bool, given: &[(&str, Vec<u8>)]) -> Case {
    let kernel = kernel::Attention { shape, attention, shared, lengths: vec![] };
    Case::new(kernel, Packed::Q8, ("o", &["q", "k", "v", "o"]), given)
}

/// Heads with lists of their own, of blocks of eight tokens.
pub fn blocks() -> Case {
    let shape = AttentionShape { batch: 1, queries: 100, keys: 100, heads: 2, kv_heads: 2, size: 16 };
    let among = Some(Among { block: 8, count: 3, heads: 2, own: false });
    // Of 13 blocks, every fourth.
    let chosen = ints((0..100 * 2 * 3).map(|i| i / 3 % 4 + 4 * (i % 3)));
    let seen = Attention { scale: 0.7, among, ..Attention::default() };
    attention(shape, seen, false, &[("chosen", chosen)])
}

/// The last tokens of a cache. Each reads one token, so that few queries of a tile read a tile of
/// keys.
pub fn tokens() -> Case {
    let shape = AttentionShape { batch: 1, queries: 30, keys: 1000, heads: 2, kv_heads: 2, size: 16 };
    let among = Some(Among { block: 1, count: 1, heads: 2, own: false });
    let given = [
        ("query_positions", ints((0..30).map(|i| 970 + i))),
        ("key_positions", ints(0..1000)),
        ("chosen", ints((0..30 * 2).map(|i| i * 61 % 970))),
    ];
    let seen = Attention { scale: 0.7, among, mask: Mask::Positions, ..Attention::default() };
    attention(shape, seen, false, &given)
}

/// One token of each of two texts over a cache of latents, whose values are its keys.
pub fn latents() -> Case {
    let shape = AttentionShape { batch: 2, queries: 1, keys: 300, heads: 5, kv_heads: 1, size: 96 };
    let number = |i: u64| ((i * 7919 + i * i % 97) % 1013) as f32 / 1013.0 - 0.5;
    let keys: Vec<u8> =
        (0..2 * 300 * 96).flat_map(|i| half::bf16::from_f32(number(i)).to_le_bytes()).collect();
    let given = [
        ("k", keys.clone()),
        ("v", keys),
        ("query_positions", ints([299, 299].into_iter())),
        ("key_positions", ints((0..600).map(|i| i % 300 * 7 % 300))),
    ];
    let seen = Attention { scale: 0.6, mask: Mask::Positions, ..Attention::default() };
    attention(shape, seen, true, &given)
}

pub fn faults() -> Vec<Fault> {
    let of = |file, form| move |(name, line, fault)| Fault { name, file, form, format: "none", line, fault };
    let choices = [
        ("choices: a score of one head", "total[r][c] += s;", "total[r][c] = s;"),
        (
            "choices: the highest number of equal ones",
            "0x7fffffffu - number(e) >= least",
            "u32(number(e)) >= least",
        ),
        (
            "choices: one block less than there is room for",
            "int left = C::COUNT - near - first,",
            "int left = C::COUNT - near - first - 1,",
        ),
        ("choices: keys of other documents", "segments[i] == segments[j])", "segments[i] >= segments[j])"),
        (
            "choices: a count is read too early",
            "buffer[threadIdx.x / 32] = sum;\n    __syncthreads();",
            "buffer[threadIdx.x / 32] = sum;",
        ),
    ];
    let blocks = [
        ("lists: that of the first head for all", "LISTS + head / (HEADS / LISTS)", "LISTS"),
        (
            "lists: a key more of each block",
            "i64 key = i64(block) * BLOCK + v % BLOCK;",
            "i64 key = i64(block) * BLOCK + v % BLOCK + 1;",
        ),
    ];
    let tokens = [(
        "lists: tiles of half of the queries",
        "int query = tile * 32 + lane;",
        "int query = tile * 32 + lane / 2;",
    )];
    let latents = [
        (
            "latents: parts weigh alike",
            "sum = fmaf(power_of_two(most - from), sums[",
            "sum = fmaf(1.0f, sums[",
        ),
        (
            "latents: the sum of one warp for all",
            "total += numbers[w * ROWS + row + 8 * half];",
            "total += numbers[row + 8 * half];",
        ),
        (
            "latents: a warp's own maximum",
            "high = fmaxf(high, numbers[w * ROWS + row + 8 * half]);",
            "high = fmaxf(high, numbers[sharer * ROWS + row + 8 * half]);",
        ),
        (
            "latents: keys of all parts",
            "end = (part + 1) * F::PART < end ? (part + 1) * F::PART : end;",
            "end = end;",
        ),
        ("latents: sums do not shrink", "result[d][e / 2][2 * half + e % 2] *= shrink;", ";"),
        ("latents: a tile is read too early", "copy_wait<0>();\n        // The tile", "// The tile"),
        ("latents: weights are read too early", "__syncthreads();\n        F::add(", "F::add("),
    ];
    let mut all: Vec<Fault> = choices.map(of("choose.cuh", Form::Choices)).into();
    all.extend(blocks.map(of("attention.cuh", Form::Blocks)));
    all.extend(tokens.map(of("attention.cuh", Form::Tokens)));
    all.extend(latents.map(of("flash_parts.cuh", Form::Latents)));
    all
}

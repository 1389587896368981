//! Attention over keys that heads share, and over keys that are chosen, interpreted: against the
//! meaning of the operations in f64 and the naive kernels, under three schedules, with nothing
//! found.

use crate::ptx::{SCHEDULES, by_hand, results, write};
use crate::support::distance;
use dreamc_compiler::ir::DType::{self, Bf16, F32, I32};
use dreamc_compiler::ir::interpret::Tensor;
use dreamc_compiler::ir::{Attention, Mask, interpret};
use dreamc_compiler::op::attention::Among;
use dreamc_compiler::op::choose::Measure;
use dreamc_compiler::program::{AttentionShape, BufferId, Kernel, Plan, ProgramKey, kernel};
use dreamc_device::gpu::sources;
use dreamc_device::ptx::{Checks, Options, PtxDevice};
use dreamc_device::{Device, DeviceError, Group, Session};

/// An attention, whether its values are its keys, and whether its gradient is computed, too.
struct Case {
    shape: AttentionShape,
    attention: Attention,
    shared: bool,
    gradient: bool,
    dtype: DType,
}

/// Numbers of products of bf16, weights rounded to it in between, against f64.
const OF_BF16: f64 = 1.0 / 128.0;

impl Case {
    /// Operands that are given, in order: name, type, shape.
    fn given(&self) -> Vec<(&'static str, DType, Vec<u64>)> {
        let (s, a) = (&self.shape, &self.attention);
        let (queries, keys) = (s.batch * s.queries, s.batch * s.keys);
        let mut list = vec![
            ("q", self.dtype, vec![queries, s.heads * s.size]),
            ("k", self.dtype, vec![keys, s.kv_heads * s.size]),
        ];
        list.extend((!self.shared).then(|| ("v", self.dtype, vec![keys, s.kv_heads * s.size])));
        if a.mask == Mask::Positions {
            list.push(("query_positions", I32, vec![s.batch, s.queries]));
            list.push(("key_positions", I32, vec![s.batch, s.keys]));
        }
        list.extend(a.segments.then(|| ("segments", I32, vec![s.batch, s.queries])));
        list.extend(a.among.map(|among| ("chosen", I32, vec![queries, among.heads * among.count])));
        list
    }

    /// Operands of the mask.
    fn masks(&self) -> Vec<&'static str> {
        let names = ["query_positions", "key_positions", "segments", "chosen"];
        self.given().iter().map(|(name, ..)| *name).filter(|name| names.contains(name)).collect()
    }

    fn plan(&self) -> Plan {
        let (s, attention) = (self.shape, self.attention.clone());
        let (rows, wide) = (s.batch * s.queries, s.heads * s.size);
        let mut buffers = self.given();
        buffers.push(("o", self.dtype, vec![rows, wide]));
        buffers.push(("lse", F32, vec![rows, s.heads]));
        let v = if self.shared { "k" } else { "v" };
        let operands = [&["q", "k", v][..], &self.masks(), &["o", "lse"]].concat();
        let shared = self.shared;
        let forward = kernel::Attention { shape: s, attention: attention.clone(), shared, lengths: vec![] };
        let mut launches: Vec<(Kernel, _, _)> = vec![(forward.into(), operands, None)];
        if self.gradient {
            let keys = vec![s.batch * s.keys, s.kv_heads * s.size];
            buffers.push(("do", self.dtype, vec![rows, wide]));
            buffers.push(("dq", self.dtype, vec![rows, wide]));
            buffers.push(("dk", self.dtype, keys.clone()));
            buffers.push(("dv", self.dtype, keys));
            let backward = kernel::AttentionGrad { shape: s, attention, log: false, lengths: vec![] };
            let operands = [&["q", "k", "v", "o", "lse", "do"][..], &self.masks(), &["dq", "dk", "dv"]];
            launches.push((backward.into(), operands.concat(), None));
        }
        let buffers: Vec<_> = buffers.iter().map(|(n, t, s)| (*n, *t, &s[..])).collect();
        by_hand(&buffers, launches)
    }

    /// An integer of a mask.
    fn int(&self, name: &str, j: u64) -> i32 {
        let s = &self.shape;
        match name {
            // The last tokens of a cache whose places are in some order, a part of them empty.
            "query_positions" => (s.keys - s.queries + j % s.queries) as i32,
            "key_positions" if (s.keys / 3..s.keys / 3 + 40).contains(&(j % s.keys)) => -1,
            "key_positions" => (j % s.keys * 7 % s.keys) as i32,
            "segments" => (j % s.queries / 50) as i32,
            // The blocks that a hash leaves, in order; fewer than there is room for are chosen of
            // some queries, and none of a few.
            _ => self.attention.among.map_or(-1, |among| {
                let (row, n) = (j / among.count, j % among.count);
                let query = row / among.heads % s.queries;
                let own = match self.attention.mask {
                    Mask::Causal => query,
                    Mask::Positions => s.keys - s.queries + query,
                } / among.block;
                let stride = (own + 1).div_ceil(among.count).max(1);
                let number = (n * stride + row * 7 % stride) as i32;
                let there = number as u64 <= own && query % 11 != 3 && (row + n) % 5 > 0;
                if there { number } else { -1 }
            }),
        }
    }

    fn fill(&self, plan: &Plan, session: &mut dyn Session) -> Result<(), DeviceError> {
        for (i, b) in plan.buffers.iter().enumerate() {
            let value = |j: u64| {
                let x = ((j * 7919 + i as u64 * 131 + j * j % 97) % 1013) as f32 / 1013.0 - 0.5;
                half::bf16::from_f32(x).to_f32()
            };
            write(session, BufferId(i as u32), b, value, |j| self.int(&b.name, j))?;
        }
        Ok(())
    }

    /// Results by the meaning of the operations in f64, from what a device has.
    fn meaning(&self, found: &[(String, Vec<f32>)]) -> Vec<(String, Vec<f64>)> {
        let (s, a) = (&self.shape, &self.attention);
        let (q, k) = ("f32[b, t, n, d]", "f32[b, s, g, d]");
        let keys = if s.keys == s.queries { "t" } else { "s" };
        let k = &k.replace('s', keys);
        let masks: String = self.masks().iter().map(|name| format!(", %{name}")).collect();
        let mut words = format!("scale {}", a.scale);
        if let Some(cap) = a.softcap {
            words += &format!(" softcap {cap}");
        }
        if let Some(window) = a.window {
            words += &format!(" window {window}");
        }
        words += if a.mask == Mask::Positions { " mask positions" } else { " mask causal" };
        words += if a.segments { " segments" } else { "" };
        if let Some(every) = a.every {
            words += &format!(" every {every}");
        }
        if let Some(among) = a.among {
            words += &format!(" among {} of {} for {}", among.block, among.count, among.heads);
        }
        let types = [
            ("q", q.into()),
            ("k", k.clone()),
            ("v", k.clone()),
            ("query_positions", "i32[b, t]".into()),
            ("key_positions", format!("i32[b, {keys}]")),
            ("segments", "i32[b, t]".into()),
            ("chosen", "i32[b, t, c, m]".into()),
            ("do", q.into()),
        ];
        let there = |name: &str| found.iter().any(|(n, _)| n == name);
        let inputs = types.iter().filter(|(name, _)| there(name));
        let inputs: String = inputs.map(|(name, ty)| format!("  input %{name} : {ty}\n")).collect();
        let v = if self.shared { "k" } else { "v" };
        let (lists, count) = a.among.map_or((1, 1), |among| (among.heads, among.count));
        let back = format!(
            "  %2, %3, %4 = attention_grad %q, %k, %v, %0, %1, %do{masks} {words} : {q}, {k}, {k}\n  \
             return o = %0, lse = %1, dq = %2, dk = %3, dv = %4\n"
        );
        let text = format!(
            "dims {{ b {}  t {}  s {}  n {}  g {}  d {}  c {lists}  m {count} }}\nfunc @f {{\n{inputs}  \
             %0, %1 = attention %q, %k, %{v}{masks} {words} : {q}, f32[b, t, n]\n{}}}",
            s.batch,
            s.queries,
            s.keys,
            s.heads,
            s.kv_heads,
            s.size,
            if self.gradient { &back } else { "  return o = %0, lse = %1\n" },
        );
        let module = dreamc_compiler::ir::parse(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
        let sizes = |list: Vec<u64>| list.iter().map(|&n| n as usize).collect::<Vec<_>>();
        let mut args = vec![];
        for (name, _) in types.iter().filter(|(name, _)| there(name)) {
            let (batch, queries) = (s.batch, s.queries);
            let dims = sizes(match *name {
                "q" | "do" => vec![batch, queries, s.heads, s.size],
                "k" | "v" => vec![batch, s.keys, s.kv_heads, s.size],
                "query_positions" | "segments" => vec![batch, queries],
                "key_positions" => vec![batch, s.keys],
                _ => vec![batch, queries, lists, count],
            });
            let numbers: u64 = dims.iter().product::<usize>() as u64;
            args.push(match *name {
                "q" | "do" | "k" | "v" => {
                    let values = &found.iter().find(|(n, _)| n == name).unwrap().1;
                    Tensor::float(&dims, values.iter().map(|&x| f64::from(x)).collect())
                }
                _ => Tensor::int(&dims, (0..numbers).map(|j| self.int(name, j)).collect()),
            });
        }
        let results = interpret(&module, &module.functions["f"], &args).unwrap_or_else(|e| panic!("{e}"));
        results.into_iter().map(|(name, t)| (name.to_string(), t.floats().to_vec())).collect()
    }

    /// As the meaning has it, and with equal bits under the schedules; by the naive kernels, too,
    /// where these do not take too long. Texts have these words.
    fn compare(&self, what: &str, words: &[&str], naive: bool) {
        let plan = self.plan();
        let texts = sources(&plan, "sm_80", Default::default()).unwrap();
        for words in words {
            assert!(texts.iter().any(|t| t.text.contains(words)), "{what}: no text has `{words}`: {texts:?}");
        }
        let fill = |session: &mut dyn Session| self.fill(&plan, session);
        let mut expected = vec![];
        let mut first: Option<Vec<Vec<u32>>> = None;
        for (schedule, threads) in SCHEDULES {
            let options = Options { schedule, threads, ..Options::default() };
            let found = results(&plan, &fill, &PtxDevice::new(options).unwrap());
            if expected.is_empty() {
                expected = self.meaning(&found);
            }
            self.hold(&format!("{what}, {schedule:?}"), &found, &expected);
            let bits = |(_, x): &(String, Vec<f32>)| x.iter().map(|x| x.to_bits()).collect();
            let bits: Vec<Vec<u32>> = found.iter().map(bits).collect();
            assert!(*first.get_or_insert_with(|| bits.clone()) == bits, "{what}: {schedule:?}: other bits");
        }
        if naive {
            let options = Options { checks: Checks::NONE, ..Options::default() };
            let found = results(&plan, &fill, &PtxDevice::naive(options).unwrap());
            self.hold(&format!("{what}, naive"), &found, &expected);
        }
    }

    fn hold(&self, what: &str, found: &[(String, Vec<f32>)], expected: &[(String, Vec<f64>)]) {
        for (name, expected) in expected {
            let found = &found.iter().find(|(n, _)| n == name).unwrap().1;
            // A query that sees nothing has no logarithm.
            let finite = |x: f64| if x.is_finite() { x } else { -1e3 };
            let found: Vec<f64> = found.iter().map(|&x| finite(x.into())).collect();
            let expected: Vec<f64> = expected.iter().map(|&x| finite(x)).collect();
            let e = distance(&found, &expected);
            println!("{what}: {name} differs by {e:.1e}");
            let bound = if self.dtype == F32 { 1e-4 } else { OF_BF16 };
            assert!(e < bound, "{what}: {name} differs by {e}");
        }
    }
}

fn interpreted() -> bool {
    dreamc_skip::need(PtxDevice::fast()).is_some()
}

/// A cache of latents.
fn latents(batch: u64, queries: u64, keys: u64, heads: u64, size: u64) -> Case {
    let shape = AttentionShape { batch, queries, keys, heads, kv_heads: 1, size };
    let attention = Attention { scale: 0.6, mask: Mask::Positions, ..Attention::default() };
    Case { shape, attention, shared: true, gradient: false, dtype: Bf16 }
}

#[test]
fn parts_of_a_cache_of_latents_are_joined() {
    if interpreted() {
        latents(2, 1, 300, 5, 96).compare("one token", &["flash_parts<F>", "flash_join<S, F::PARTS>"], true);
    }
}

/// One token of a model of many heads, tokens of a prompt in tiles of 64 rows that begin within a
/// token, few keys, heads whose columns warps do not share evenly, windows and caps; and caches of
/// keys and values, of one head of keys for several of queries and for each.
#[test]
fn attention_of_shared_keys_is_right_and_clean() {
    if !interpreted() {
        return;
    }
    latents(1, 1, 200, 50, 64).compare("many heads", &["<S, true, 4, 2, 32, ", "flash_join<"], false);
    let prompt = latents(1, 30, 150, 3, 576);
    prompt.compare("a prompt", &["<S, true, 4, 2, 32, "], false);
    latents(2, 3, 40, 2, 160).compare("few keys", &["<S, true, 1, 4, 32, 64>"], true);
    let plain = latents(1, 5, 130, 3, 224);
    let window = Attention { window: Some(70), softcap: Some(2.0), ..plain.attention.clone() };
    Case { attention: window.clone(), ..plain }.compare("a window", &["<S, true, 1, 4, 32, 64>"], false);
    let cache = |queries, heads, kv_heads, size| {
        let case = latents(2, queries, 290, heads, size);
        Case { shape: AttentionShape { kv_heads, ..case.shape }, shared: false, ..case }
    };
    cache(1, 6, 2, 64).compare("a cache", &["<S, false, 1, 4, 64, 128>", "flash_join<"], true);
    let capped = cache(3, 4, 4, 160);
    Case { attention: window, ..capped }.compare("a head of keys each", &["<S, false, 1, 4, 32, 64>"], false);
}

/// A sequence whose heads have lists of blocks, and its gradient.
fn chosen(tokens: u64, [heads, kv_heads]: [u64; 2], size: u64, [block, count, lists]: [u64; 3]) -> Case {
    let shape = AttentionShape { batch: 1, queries: tokens, keys: tokens, heads, kv_heads, size };
    let among = Some(Among { block, count, heads: lists, own: false });
    let attention = Attention { scale: 0.7, among, ..Attention::default() };
    Case { shape, attention, shared: false, gradient: true, dtype: Bf16 }
}

const FORWARD: &str = "flash<FlashWarps<S, true>>";
const BACKWARD: &str = "flash_grad_keys<FlashWarps<S, true>>";

#[test]
fn chosen_keys_alone_are_read() {
    if interpreted() {
        chosen(100, [2, 2], 16, [8, 3, 2]).compare("blocks", &[FORWARD, BACKWARD], true);
        // So few that tiles of keys are read by some queries of a tile alone.
        let case = chosen(1000, [2, 2], 16, [1, 1, 2]);
        let attention = Attention { mask: Mask::Positions, ..case.attention.clone() };
        let shape = AttentionShape { queries: 30, ..case.shape };
        Case { shape, attention, ..case }.compare("a token each", &[FORWARD, BACKWARD], false);
    }
}

/// Lists of heads, of groups, of all heads; blocks longer than a word of bits, of one token, of
/// none that is a power of two; with documents, a window, ends of blocks alone, and over a cache.
#[test]
fn attention_of_chosen_keys_is_right_and_clean() {
    if !interpreted() {
        return;
    }
    let both = &[FORWARD, BACKWARD];
    chosen(203, [2, 2], 64, [64, 2, 2]).compare("long blocks", both, false);
    let tokens = chosen(150, [4, 4], 32, [1, 30, 1]);
    let window = Attention { window: Some(90), ..tokens.attention.clone() };
    Case { attention: window, ..tokens }.compare("tokens", both, false);
    let groups = chosen(190, [4, 1], 128, [12, 4, 1]);
    let segments = Attention { segments: true, ..groups.attention.clone() };
    Case { attention: segments, ..groups }.compare("groups, documents", both, false);
    let ends = chosen(150, [4, 2], 48, [1, 1, 1]);
    let every = Attention { among: None, every: Some(8), ..ends.attention.clone() };
    Case { attention: every, ..ends }.compare("ends", both, false);
    let some = chosen(130, [4, 2], 48, [6, 5, 4]);
    let every = Attention { every: Some(3), ..some.attention.clone() };
    Case { attention: every, ..some }.compare("ends of blocks", both, false);
    Case { dtype: F32, ..chosen(90, [4, 2], 40, [8, 3, 2]) }.compare("f32", &["attention<S>"], false);
    of_a_cache(chosen(210, [4, 2], 64, [1, 9, 2]), 37).compare("a prompt", both, false);
    // Heads that read one head of keys by lists of their own are no rows of one tile.
    of_a_cache(chosen(210, [4, 2], 64, [8, 9, 4]), 1).compare("a list each", both, false);
}

/// The last tokens of two texts, over caches of as many keys.
fn of_a_cache(case: Case, queries: u64) -> Case {
    let attention = Attention { mask: Mask::Positions, ..case.attention.clone() };
    let shape = AttentionShape { batch: 2, queries, ..case.shape };
    Case { shape, attention, ..case }
}

/// A token that is written reads its chosen keys in parts, each by blocks of its own, which are
/// joined: lists of heads, of groups and of all heads; of single tokens and blocks; a window.
#[test]
fn chosen_keys_of_a_cache_are_read_in_parts() {
    if !interpreted() {
        return;
    }
    let parts = &["flash_parts<F>", "flash_join<S, F::PARTS>", BACKWARD];
    let case = of_a_cache(chosen(300, [4, 2], 64, [8, 9, 2]), 1);
    case.compare("blocks of groups", parts, true);
    of_a_cache(chosen(290, [6, 2], 32, [1, 40, 1]), 2).compare("tokens of all heads", parts, false);
    let heads = of_a_cache(chosen(270, [3, 3], 96, [16, 4, 3]), 3);
    let window = Attention { window: Some(200), ..heads.attention.clone() };
    Case { attention: window, ..heads }.compare("blocks of heads, a window", parts, false);
}

/// The lists that a device chooses.
fn lists(choice: &kernel::ChooseKeys, dtype: DType, device: &dyn Device) -> Vec<i32> {
    let s = &choice.shape;
    let positions = choice.seen.mask == Mask::Positions;
    let mut buffers = vec![
        ("q", dtype, vec![s.batch * s.queries, s.heads * s.size]),
        ("k", dtype, vec![s.batch * s.keys, s.kv_heads * s.size]),
    ];
    if positions {
        buffers.push(("query_positions", I32, vec![s.batch, s.queries]));
        buffers.push(("key_positions", I32, vec![s.batch, s.keys]));
    }
    buffers.extend(choice.seen.segments.then(|| ("segments", I32, vec![s.batch, s.queries])));
    buffers.extend(choice.weighed.then(|| ("weights", F32, vec![s.batch * s.queries, s.heads])));
    buffers.push(("chosen", I32, vec![s.batch * s.queries, choice.lists * choice.count]));
    let buffers: Vec<_> = buffers.iter().map(|(n, t, s)| (*n, *t, &s[..])).collect();
    let names = buffers.iter().map(|(name, ..)| *name).collect();
    let plan = by_hand(&buffers, vec![(choice.clone().into(), names, None)]);
    let mut session = device.load(&plan, &Group::alone()).unwrap_or_else(|e| panic!("{e}"));
    let masks = Case { shape: *s, attention: choice.seen.clone(), shared: false, gradient: false, dtype };
    masks.fill(&plan, session.as_mut()).unwrap();
    session.run(ProgramKey::ALONE).unwrap_or_else(|e| panic!("{e}"));
    session.read_all::<i32>(BufferId(plan.buffers.len() as u32 - 1)).unwrap()
}

/// Choices are those of the naive kernel, of equal scores the lower number, under three schedules:
/// scores of products, of their positive parts with weights, and of a softmax; with blocks that are
/// always chosen, documents, places of a cache, and lists longer than what there is to choose.
#[test]
fn choices_are_those_of_the_naive_kernel() {
    if !interpreted() {
        return;
    }
    let seen = |block, mask| Attention { scale: 0.3, every: Some(block), mask, ..Attention::default() };
    let of = |batch, queries, keys, [heads, kv_heads]: [u64; 2], size| AttentionShape {
        batch,
        queries,
        keys,
        heads,
        kv_heads,
        size,
    };
    let moba = kernel::ChooseKeys {
        shape: of(1, 130, 130, [2, 2], 40),
        seen: Attention { segments: true, ..seen(16, Mask::Causal) },
        measure: Measure::Products,
        weighed: false,
        near: 1,
        first: 0,
        lists: 2,
        count: 3,
    };
    let nsa = kernel::ChooseKeys {
        shape: of(2, 70, 70, [4, 1], 16),
        seen: seen(8, Mask::Causal),
        measure: Measure::Softmax,
        near: 2,
        first: 1,
        lists: 1,
        count: 5,
        ..moba.clone()
    };
    let dsa = kernel::ChooseKeys {
        shape: of(1, 90, 90, [4, 1], 32),
        seen: seen(1, Mask::Causal),
        measure: Measure::Relu,
        weighed: true,
        near: 0,
        lists: 1,
        count: 20,
        ..moba.clone()
    };
    let cached = |choice: &kernel::ChooseKeys, queries, block| kernel::ChooseKeys {
        shape: AttentionShape { batch: 2, queries, keys: 150, ..choice.shape },
        seen: seen(block, Mask::Positions),
        ..choice.clone()
    };
    let none = kernel::ChooseKeys { shape: of(1, 7, 7, [2, 2], 16), count: 9, ..moba.clone() };
    // The lists of the first tile of queries have room for all that these see, those of the last
    // not.
    let room = kernel::ChooseKeys {
        shape: of(1, 70, 70, [4, 1], 16),
        seen: seen(2, Mask::Causal),
        count: 33,
        ..dsa.clone()
    };
    // The last tile of queries is of a document that the first tile of keys has none of.
    let documents = kernel::ChooseKeys {
        shape: of(1, 150, 150, [2, 2], 16),
        seen: Attention { segments: true, ..seen(1, Mask::Causal) },
        count: 4,
        ..moba.clone()
    };
    for (what, choice) in [
        ("products", moba.clone()),
        ("room for all", room),
        ("documents", documents),
        ("softmax", nsa.clone()),
        ("relu", dsa.clone()),
        ("no block", none),
        ("one token of a cache", cached(&nsa, 1, 8)),
        ("tokens of a cache", cached(&dsa, 5, 1)),
        ("a prompt", cached(&moba, 20, 4)),
    ] {
        for dtype in [F32, Bf16] {
            let options = Options { checks: Checks::NONE, ..Options::default() };
            let expected = lists(&choice, dtype, &PtxDevice::naive(options).unwrap());
            for (schedule, threads) in SCHEDULES {
                let options = Options { schedule, threads, ..Options::default() };
                let found = lists(&choice, dtype, &PtxDevice::new(options).unwrap());
                let differs = found.iter().zip(&expected).position(|(a, b)| a != b);
                let count = choice.count as usize;
                if let Some(at) = differs.map(|at| at / count * count) {
                    let (found, expected) = (&found[at..at + count], &expected[at..at + count]);
                    panic!(
                        "{what}, {dtype:?}, {schedule:?}, list {}: {found:?}, not {expected:?}",
                        at / count
                    );
                }
            }
        }
    }
}

//! Attention over keys that heads share, and over keys that are chosen, interpreted: against the
//! meaning of the operations in f64 and the naive kernels, under three schedules, with nothing
//! found.

use crate::ptx::{SCHEDULES, by_hand, results, write};
use crate::support::distance;
use dreamc_compiler::ir::DType::{self, Bf16, F32, I32};
use dreamc_compiler::ir::interpret::Tensor;
use dreamc_compiler::ir::{Attention, Mask, interpret};
use dreamc_compiler::program::{AttentionShape, BufferId, Kernel, Plan, kernel};
use dreamc_runtime::device::gpu::sources;
use dreamc_runtime::device::ptx::{Checks, Options, PtxDevice};
use dreamc_runtime::device::{DeviceError, Session};

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
            "key_positions" => (j % s.keys * 5 % s.keys) as i32,
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

/// Lines of `flash_parts.cuh`, and faults in their place.
const FAULTS: [(&str, &str, &str); 7] = [
    ("parts weigh alike", "sum = fmaf(power_of_two(most - from), sums[", "sum = fmaf(1.0f, sums["),
    (
        "the sum of one warp for all",
        "total += numbers[w * ROWS + row + 8 * half];",
        "total += numbers[row + 8 * half];",
    ),
    (
        "a warp's own maximum",
        "high = fmaxf(high, numbers[w * ROWS + row + 8 * half]);",
        "high = fmaxf(high, numbers[sharer * ROWS + row + 8 * half]);",
    ),
    ("keys of all parts", "end = (part + 1) * F::PART < end ? (part + 1) * F::PART : end;", "end = end;"),
    ("sums do not shrink", "result[d][e / 2][2 * half + e % 2] *= shrink;", ";"),
    ("a tile is read too early", "copy_wait<0>();\n        // The tile", "// The tile"),
    ("weights are read too early", "__syncthreads();\n        F::add(", "F::add("),
];

/// Each in a process of its own, since blocks of kernels are read once.
#[test]
fn faults_of_shared_keys_are_noticed() {
    noticed("flash_parts.cuh", &FAULTS, "keys::parts_of_a_cache_of_latents_are_joined");
}

/// The test notices each fault of a file of `kernels/`.
fn noticed(file: &str, faults: &[(&str, &str, &str)], test: &str) {
    if !interpreted() {
        return;
    }
    let text = std::fs::read_to_string(format!("{}/kernels/{file}", env!("CARGO_MANIFEST_DIR"))).unwrap();
    for (what, line, fault) in faults {
        assert_eq!(text.matches(line).count(), 1, "{what}: `{line}`");
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(file), text.replacen(line, fault, 1)).unwrap();
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test]).env("DREAMC_KERNELS", folder.path());
        let out = command.output().unwrap();
        let said = String::from_utf8_lossy(&out.stdout);
        assert!(said.contains("running 1 test") && !out.status.success(), "{what} is not noticed:\n{said}");
    }
}

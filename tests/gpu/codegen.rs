//! The generated CUDA: every kernel of the examples compiles for both architectures without
//! spilling a register, and their number by kind is known. `tests/kernels` shows one of each.

use crate::support::{load, root};
use dreamc_compiler::codegen::{HEADERS, Limits, Source, Variant, generate};
use dreamc_compiler::format::Packed;
use dreamc_compiler::ir::{Attention, Mask};
use dreamc_compiler::op::attention::Among;
use dreamc_compiler::op::attention::kernel::LONGEST_SHARED;
use dreamc_compiler::op::choose::Measure;
use dreamc_compiler::precision::Narrow;
use dreamc_compiler::program::{AttentionShape, Kernel, KernelKind, Matrix, kernel};
use dreamc_compiler::{Cache, CompileError, Options, compile};
use dreamc_device::gpu::{distinct, sources};
use dreamc_nvrtc::Nvrtc;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

fn training(batch: u64, sequence: u64) -> Options {
    Options { batch, sequence, train: true, ..Options::default() }
}

fn generation(batch: u64) -> Options {
    let cache = Some(Cache { places: 256, chunk: 64, slack: f64::INFINITY, every: false });
    Options { train: false, cache, ..training(batch, 64) }
}

fn of_example(path: &str, options: &Options, architecture: &str) -> Vec<Source> {
    let compiled = match compile(&load(path), options) {
        Ok(compiled) => compiled,
        Err(CompileError::Unsupported(what)) => {
            println!("{path} has no such plan: {what}");
            return vec![];
        }
        Err(error) => panic!("{path}: {error}"),
    };
    sources(&compiled.plan, architecture, Limits::default()).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// Registers and spilled bytes of each entry, from what `ptxas -v` says.
fn usage(log: &str) -> Vec<(String, u64, u64)> {
    let mut list: Vec<(String, u64, u64)> = vec![];
    let number = |text: &str| text.split_whitespace().next_back().and_then(|n| n.parse().ok()).unwrap_or(0);
    for line in log.lines() {
        if let Some((_, name)) = line.split_once("Compiling entry function '") {
            list.push((name.split('\'').next().unwrap_or_default().into(), 0, 0));
        } else if let Some(entry) = list.last_mut() {
            for (text, what) in [(" bytes spill stores", 2), (" bytes spill loads", 2), (" registers", 1)] {
                if let Some((before, _)) = line.split_once(text) {
                    let n = number(before);
                    if what == 1 { entry.1 = n } else { entry.2 += n }
                }
            }
        }
    }
    list
}

/// Compiles on all cores; gives registers by kernel and entry, and panics where one spills.
fn compile_all(nvrtc: &Nvrtc, sources: &[Source], architecture: &str) -> Vec<(String, u64)> {
    let (next, found) = (AtomicUsize::new(0), Mutex::new(vec![]));
    let spills: Mutex<Vec<String>> = Mutex::new(vec![]);
    let option = format!("--gpu-architecture={architecture}");
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, |n| n.get()) {
            scope.spawn(|| {
                while let Some(source) = sources.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let text =
                        dreamc_nvrtc::Source { name: "kernel.cu", text: &source.text, headers: HEADERS };
                    let compiled = nvrtc.cubin(text, &[&option, "--ptxas-options=-v"]);
                    let compiled =
                        compiled.unwrap_or_else(|e| panic!("{}: {e}\n{}", source.name, source.text));
                    // `ptxas` warns where it serialises `wgmma`, which should be asynchronous.
                    assert!(!compiled.log.contains("serialized"), "{}: {}", source.name, compiled.log);
                    let usage = usage(&compiled.log);
                    assert_eq!(usage.len(), source.passes.len(), "{}: {}", source.name, compiled.log);
                    for (entry, registers, spilled) in usage {
                        let key = format!("{} {entry}", source.name);
                        if spilled > 0 {
                            spills.lock().unwrap().push(format!("{key} spills {spilled} bytes"));
                        }
                        found.lock().unwrap().push((key, registers));
                    }
                }
            });
        }
    });
    let spills = spills.into_inner().unwrap();
    assert!(spills.is_empty(), "for {architecture}: {}", spills.join(", "));
    // Threads finish in any order, and kernels of different plans may share a name.
    let mut found = found.into_inner().unwrap();
    found.sort();
    found
}

/// Those that are alike but for their sizes: a text with every number replaced.
fn shape(text: &str) -> String {
    let body = text.lines().skip(1).collect::<Vec<_>>().join("\n");
    let mut shape = String::new();
    for c in body.chars() {
        match c.is_ascii_digit() {
            true if shape.ends_with('#') => {}
            true => shape.push('#'),
            false => shape.push(c),
        }
    }
    shape
}

/// The kernels of all examples, trained and written with: those for every architecture, and those
/// for Hopper alone. Of those that differ in sizes alone the largest model's, unless `all`.
fn of_all_examples(all: bool) -> [Vec<Source>; 2] {
    let folders = ["examples", "examples/published"];
    let mut examples: Vec<String> = folders
        .into_iter()
        .flat_map(|folder| {
            let files = std::fs::read_dir(root(folder)).unwrap();
            files.map(move |file| format!("{folder}/{}", file.unwrap().file_name().to_string_lossy()))
        })
        .collect();
    examples.sort();
    let mut total = 0;
    let mut lists = [BTreeMap::new(), BTreeMap::new()];
    for path in &examples {
        if !path.ends_with(".yaml") || path.ends_with(".suite.yaml") {
            continue;
        }
        let hidden = load(path).model.hidden;
        let narrow = |options: Options| Options { narrow: Narrow::Storage, ..options };
        // As many tokens as fill a GPU: what Hopper has kernels of its own for.
        let full = of_example(path, &narrow(training(4, 1024)), "sm_90a");
        let own = full.into_iter().filter(|s| s.text.contains("hopper.cuh")).map(|s| (1, s));
        let all_of_them = [training(2, 256), narrow(training(2, 256)), generation(2)];
        let common = all_of_them.iter().flat_map(|options| of_example(path, options, "sm_80"));
        for (of, source) in common.map(|s| (0, s)).chain(own) {
            total += 1;
            let key = if all { source.text.clone() } else { shape(&source.text) };
            let entry = lists[of].entry(key).or_insert_with(|| (hidden, source.clone()));
            if entry.0 < hidden {
                *entry = (hidden, source);
            }
        }
    }
    let lists = lists.map(|list| list.into_values().map(|(_, s)| s).collect::<Vec<Source>>());
    println!(
        "{total} kernels of all plans, {} distinct, {} for Hopper alone",
        lists[0].len(),
        lists[1].len()
    );
    assert!(!lists[1].is_empty());
    lists
}

#[test]
fn kernels_of_all_examples_compile_without_spilling() {
    let Some(nvrtc) = dreamc_skip::need(Nvrtc::find()) else { return };
    // With DREAMC_ALL_KERNELS every distinct text, which takes minutes more.
    let [common, own] = of_all_examples(std::env::var_os("DREAMC_ALL_KERNELS").is_some());
    for (architecture, list) in [("sm_80", common.clone()), ("sm_90a", [common, own].concat())] {
        let begun = std::time::Instant::now();
        let found = compile_all(nvrtc, &list, architecture);
        println!("{architecture}: {:.1} s", begun.elapsed().as_secs_f64());
        let most = found.iter().max_by_key(|(_, r)| *r).unwrap();
        println!("  most registers: {} in {}", most.1, most.0);
        if let Some(folder) = std::env::var_os("DREAMC_KERNEL_REPORT") {
            std::fs::write(std::path::Path::new(&folder).join(architecture), table(&found)).unwrap();
        }
    }
}

/// Kernels of latents of the size of DeepSeek-V2's, and of the longest that a cache may hold.
#[test]
fn kernels_of_latents_compile_without_spilling() {
    let Some(nvrtc) = dreamc_skip::need(Nvrtc::find()) else { return };
    let attention = Attention { mask: Mask::Positions, ..Attention::default() };
    let mut kernels = vec![];
    for size in [576, LONGEST_SHARED] {
        let shape = AttentionShape { batch: 4, queries: 1, keys: 4096, heads: 16, kv_heads: 1, size };
        kernels.push(Kernel::Attention(kernel::Attention {
            shape,
            attention: attention.clone(),
            shared: true,
            lengths: vec![],
        }));
    }
    for rows in [1, 64, 1024] {
        for (first, transposed) in [(0, true), (128, false)] {
            let (heads, out, inner, part) = (16, 256, 512, 128);
            let by_head = kernel::ByHead { rows, heads, out, inner, first, part, transposed, stored: false };
            kernels.push(Kernel::ByHead(by_head));
        }
    }
    let narrow = Variant { narrow: u32::MAX, aligned: true, wide: u64::MAX, ..Variant::default() };
    let variants = [Variant::default(), narrow, Variant { places: true, ..narrow }];
    let of = |kernel: &Kernel, variant: Variant| {
        let places = variant.places && kernel.rows().is_some();
        let source =
            generate(kernel, Variant { places, ..variant }).unwrap_or_else(|e| panic!("{kernel}: {e}"));
        source.expect("a kernel with something to do")
    };
    let list: Vec<Source> =
        kernels.iter().flat_map(|kernel| variants.map(|variant| of(kernel, variant))).collect();
    for (name, registers) in compile_all(nvrtc, &list, "sm_80") {
        println!("{registers} {name}");
    }
}

/// Kernels of chosen keys at the sizes of trainings: lists of heads, of groups and of all heads, of
/// sequences and over a cache, and what chooses them.
#[test]
fn kernels_of_chosen_keys_compile_without_spilling() {
    let Some(nvrtc) = dreamc_skip::need(Nvrtc::find()) else { return };
    let mut kernels: Vec<Kernel> = vec![];
    for (size, kv_heads, lists, block, count, segments) in [
        (64, 4, 4, 64, 8, false),
        (64, 4, 1, 1, 512, true),
        (128, 1, 1, 32, 8, true),
        (128, 4, 4, 64, 8, false),
    ] {
        let among = Some(Among { block, count, heads: lists, own: false });
        let attention = Attention { segments, among, ..Attention::default() };
        let shape = AttentionShape { batch: 1, queries: 4096, keys: 4096, heads: 4, kv_heads, size };
        let forward =
            kernel::Attention { shape, attention: attention.clone(), shared: false, lengths: vec![] };
        kernels.push(forward.clone().into());
        kernels.push(
            kernel::AttentionGrad { shape, attention: attention.clone(), log: false, lengths: vec![] }.into(),
        );
        let one = AttentionShape { queries: 1, ..shape };
        let cached = Attention { mask: Mask::Positions, segments: false, ..attention };
        kernels.push(kernel::Attention { shape: one, attention: cached.clone(), ..forward }.into());
        for (shape, seen) in [(shape, Attention { segments, ..Attention::default() }), (one, cached)] {
            let seen = Attention { every: Some(block), among: None, ..seen };
            let measure = if block == 32 { Measure::Softmax } else { Measure::Relu };
            let choice = kernel::ChooseKeys {
                shape,
                seen,
                measure,
                weighed: block == 1,
                near: 1,
                first: 1,
                lists,
                count,
            };
            kernels.push(choice.into());
        }
    }
    let narrow = Variant { narrow: u32::MAX, aligned: true, wide: u64::MAX, ..Variant::default() };
    let of = |kernel: &Kernel, variant| generate(kernel, variant).unwrap().expect("something to do");
    let list: Vec<Source> =
        kernels.iter().flat_map(|kernel| [Variant::default(), narrow].map(|v| of(kernel, v))).collect();
    for architecture in ["sm_80", "sm_90a"] {
        for (name, registers) in compile_all(nvrtc, &list, architecture) {
            println!("{registers} {name}");
        }
    }
}

/// Products of few rows with matrices of every format, of one row and of several, in f32 and bf16.
#[test]
fn products_of_packed_matrices_compile_without_spilling() {
    let Some(nvrtc) = dreamc_skip::need(Nvrtc::find()) else { return };
    let (n, k) = (14_336, 4096);
    let mut list = vec![];
    for packed in Packed::NAMES.iter().filter_map(|name| Packed::named(name, k)) {
        for (m, result) in [(1, 0), (8, 0), (8, 1), (16, 0), (16, 1)] {
            let (a, b) = (Matrix { row: k, column: 1 }, Matrix { row: 1, column: k });
            let product = kernel::Product { m, n, k, a, b, accumulate: false, stored: true };
            let at = product.signature().iter().position(|slot| slot.name == "c").unwrap();
            let packed = Some(packed);
            let variant = Variant { packed, narrow: result << at, wide: u64::MAX, ..Variant::default() };
            let source = generate(&product.into(), variant).unwrap().unwrap();
            let name = format!("{packed:?} of {m} rows, {}", if result == 1 { "bf16" } else { "f32" });
            list.push(Source { name, ..source });
        }
    }
    for architecture in ["sm_80", "sm_90a"] {
        for (name, registers) in compile_all(nvrtc, &list, architecture) {
            println!("{registers} {name}");
        }
    }
}

/// Hopper's kernels of models at the sizes of their trainings, whose wide tiles smaller batches do
/// not have: none spills, and `ptxas` waits for no `wgmma`.
#[test]
fn hoppers_kernels_compile_at_real_shapes() {
    let Some(nvrtc) = dreamc_skip::need(Nvrtc::find()) else { return };
    let mut texts: BTreeMap<String, Source> = BTreeMap::new();
    for name in [
        "dr-da-16",
        "la-16",
        "published/llama-3.2-1b",
        "published/gemma-2-2b",
        "published/mixtral-8x7b",
        "published/olmoe-1b-7b",
    ] {
        let options = Options { narrow: Narrow::Storage, ..training(8, 4096) };
        let all = of_example(&format!("examples/{name}.yaml"), &options, "sm_90a");
        let own: Vec<Source> = all.into_iter().filter(|s| s.text.contains("hopper.cuh")).collect();
        assert!(own.iter().any(|s| s.text.contains("Warpgroups<256")), "{name} has no wide tile");
        texts.extend(own.into_iter().map(|s| (s.text.clone(), s)));
    }
    let list: Vec<Source> = texts.into_values().collect();
    assert!(list.iter().any(|s| s.text.contains("__cluster_dims__")), "no clusters");
    assert!(list.iter().any(|s| s.text.contains("head_x")), "no head");
    println!("{} kernels", list.len());
    compile_all(nvrtc, &list, "sm_90a");
}

/// The same of kernels that make codes of e4m3 and multiply them, plain and cut along the sums.
#[test]
fn kernels_of_codes_compile_without_spilling() {
    let Some(nvrtc) = dreamc_skip::need(Nvrtc::find()) else { return };
    let mut texts: BTreeMap<String, Source> = BTreeMap::new();
    // 640 tokens are an odd number of tiles, too few to keep the processors busy.
    let llama = "published/llama-3.2-1b";
    for (name, batch, sequence) in [("dr-da-16", 8, 4096), (llama, 8, 4096), (llama, 1, 640)] {
        let options = Options { narrow: Narrow::E4m3, ..training(batch, sequence) };
        let all = of_example(&format!("examples/{name}.yaml"), &options, "sm_90a");
        texts.extend(all.into_iter().filter(|s| s.text.contains("e4m3")).map(|s| (s.text.clone(), s)));
    }
    let list: Vec<Source> = texts.into_values().collect();
    for what in [
        "Codes<6, true, 1>",
        "Codes<6, true, 2>",
        "product_slice_e4m3",
        "e4m3_rows",
        "e4m3_tiles<true, false",
    ] {
        assert!(list.iter().any(|s| s.text.contains(what)), "no {what}");
    }
    compile_all(nvrtc, &list, "sm_90a");
}

/// How many kernels of each kind the examples need, those for Hopper alone after a slash: a kernel
/// that appears or goes shows here, and its text in `tests/kernels`.
#[test]
fn kernels_of_all_examples_are_counted() {
    let [common, own] = of_all_examples(false);
    let mut counts: BTreeMap<String, [usize; 2]> = BTreeMap::new();
    for (i, source) in common.iter().map(|s| (0, s)).chain(own.iter().map(|s| (1, s))) {
        // Names end in sizes: `rows_512x64`, `attention_b2_q64_k256_h32_g8_d128_positions`.
        let sized = |word: &&str| word.chars().any(|c| c.is_ascii_digit()) && *word != "bf16";
        let kind: Vec<&str> = source.name.split('_').filter(|word| !sized(word)).collect();
        counts.entry(kind.join("_")).or_default()[i] += 1;
    }
    let lines = counts.iter().map(|(kind, [common, own])| format!("{kind} {common}/{own}\n"));
    insta::assert_snapshot!(lines.collect::<String>());
}

/// Registers by kernel and entry.
fn table(found: &[(String, u64)]) -> String {
    found.iter().fold(String::new(), |mut text, (name, registers)| {
        let _ = writeln!(text, "{registers:4}  {name}");
        text
    })
}

/// Registers of the kernels of a small model that trains and generates in bf16, by `ptxas`; none
/// spills.
#[test]
fn registers_of_a_small_model() {
    let Some(nvrtc) = dreamc_skip::need(Nvrtc::find()) else { return };
    // It depends on the version.
    if nvrtc.version() != (13, 0) {
        return dreamc_skip::missing("NVRTC is not 13.0");
    }
    let narrow = |options: Options| Options { narrow: Narrow::Storage, ..options };
    let path = "examples/tiny-dr-da.yaml";
    let mut list = of_example(path, &narrow(training(2, 32)), "sm_80");
    list.extend(of_example(path, &narrow(generation(2)), "sm_80"));
    list.sort_by(|a, b| a.text.cmp(&b.text));
    list.dedup_by(|a, b| a.text == b.text);
    for architecture in ["sm_80", "sm_90a"] {
        let found = compile_all(nvrtc, &list, architecture);
        insta::assert_snapshot!(format!("registers_{architecture}"), table(&found));
    }
}

#[test]
fn texts_are_the_same_every_time_and_distinct() {
    let options = training(2, 16);
    let (a, b) = (
        of_example("examples/tiny-dr.yaml", &options, "sm_80"),
        of_example("examples/tiny-dr.yaml", &options, "sm_80"),
    );
    assert_eq!(a, b);
    for (i, source) in a.iter().enumerate() {
        assert!(!a[..i].contains(source), "{}", source.name);
    }
    // One text serves products of different sizes.
    let (firsts, texts) = distinct(&a);
    assert!(firsts.len() < a.len());
    assert!(texts.iter().zip(&a).all(|(&text, source)| a[firsts[text]].text == source.text));
}

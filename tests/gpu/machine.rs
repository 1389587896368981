//! The model of the machine (`compile --emit kernels`): the facts that it reads from texts, what it
//! makes of them, and its sum for the largest example against the page that states it and against
//! the review of the machine code.

use crate::support::{load, root};
use dreamc_compiler::codegen::{Argument, Language, Limits, Pass, Source, Turns};
use dreamc_compiler::count::device::Device;
use dreamc_compiler::precision::Narrow;
use dreamc_compiler::program::{Plan, ProgramKey, Task};
use dreamc_compiler::rewrite::{Rewriting, Target};
use dreamc_compiler::{Options, compile};
use dreamc_device::gpu::machine::{Body, Code, Estimate, Tiles, Unit, Why, read};
use dreamc_device::gpu::{Recode, Table, sources, table};
use dreamc_runtime::train::prepare;
use std::collections::{BTreeMap, HashMap};
use std::sync::LazyLock;

fn h200() -> &'static Device {
    Device::find("h200").unwrap()
}

/// A step of `dr-da-16` at 8 x 4096, as the page has it.
static PLAN: LazyLock<Plan> = LazyLock::new(|| {
    let spec = load("examples/dr-da-16.yaml");
    let rewrite = Rewriting { target: Target::of(h200()), ..Rewriting::default() };
    let segments = prepare::masked(&spec);
    let forward = prepare::forward(8, 4096);
    let options = Options { train: true, segments, rewrite, narrow: Narrow::Storage, ..forward };
    compile(&spec, &options).unwrap().plan
});

/// Micro-batches of its step.
const MICRO: u64 = 32;

fn step(device: &'static Device, recode: &Recode) -> Table {
    let times = |program: ProgramKey| match program.task {
        Task::Backward { .. } => MICRO,
        Task::Norm | Task::Update => 1,
        _ => 0,
    };
    let tokens = MICRO * 8 * 4096;
    table(&PLAN, &times, tokens, "sm_90a", device, &|_| HashMap::new(), recode).unwrap()
}

fn as_it_is(_: &str, _: &mut [Code]) {}

/// An H200 but for this.
fn like(change: impl Fn(&mut Device)) -> &'static Device {
    let mut device = *h200();
    change(&mut device);
    Box::leak(Box::new(device))
}

// --- facts of a text -----------------------------------------------------------------------------

fn source(text: &str, pass: Pass) -> Source {
    Source {
        name: "by hand".into(),
        text: text.into(),
        passes: vec![pass],
        iterations: 1,
        scratch: 0,
        language: Language::Portable,
    }
}

fn pass(entry: &str, block: u32, shared_bytes: u32, sizes: &[u32]) -> Pass {
    let arguments = sizes.iter().map(|&n| Argument::Size(n)).collect();
    Pass { entry: entry.into(), grid: 512, block, shared_bytes, arguments, turns: Turns::default() }
}

/// Registers of a row kernel where NVRTC was not asked, and where it was.
#[test]
fn registers_are_those_of_the_compiler_where_it_was_asked() {
    let text = "// rows_512x2048
KERNEL __launch_bounds__(256, 2) rows(const float *in0, i64 in0_stride) {
    __shared__ float memory[64];
    join_threads<256>();
}
";
    let turns = Turns { trips: 12, barriers: 6, reductions: 3 };
    let pass = Pass { turns, ..pass("rows", 256, 0, &[0; 6]) };
    let code = read(&source(text, pass.clone()), &pass, None);
    assert_eq!(code.body, Body::Rows(turns));
    assert_eq!((code.grid, code.block, code.shared), (512.0, 256, 256));
    assert_eq!(code.registers, 72);
    let asked = read(&source(text, pass.clone()), &pass, Some(140));
    assert_eq!((asked.registers, code.resident(h200()), asked.resident(h200())), (140, 3, 1));
}

/// Facts that the generated texts of the example state.
#[test]
fn facts_of_generated_texts_are_those_of_their_constants() {
    let all = sources(&PLAN, "sm_90a", Limits::of(h200())).unwrap();
    let of = |name: &str| -> Vec<(&Source, Code)> {
        let some = all.iter().filter(|s| s.name.starts_with(name) && s.passes.len() == 1);
        some.map(|s| (s, read(s, &s.passes[0], None))).collect()
    };
    // The number after the name of a parameter in a launch, in the text's order.
    let mut seen = 0;
    for (source, code) in of("grouped_outer") {
        let Body::Tiles(t) = code.body else { panic!("{}", source.name) };
        let expected = if source.text.contains("Warpgroups<256") {
            (Unit::Warpgroups, 128.0, 256.0)
        } else if source.text.contains("Warpgroups<128") {
            (Unit::Warpgroups, 128.0, 128.0)
        } else {
            (Unit::Warps, 64.0, 64.0)
        };
        assert_eq!((t.unit, t.rows, t.columns), expected, "{}", source.text);
        // Eight pairs at a time where gradients are added to what is there.
        assert_eq!(t.adds, Some(8.0), "{}", source.name);
        seen += 1;
    }
    assert!(seen >= 3, "{seen} outer products");
    for (source, code) in of("attention_b").into_iter().chain(of("attention_grad")) {
        let Body::Attention(a) = code.body else { continue };
        let (queries, expected) = (8.0 * 4096.0 * 16.0, (128.0, queries_of(&source.text)));
        assert_eq!((a.size, a.queries), expected, "{}", source.name);
        assert_eq!(a.queries, queries, "{}", source.name);
    }
    let rows: Vec<Turns> = all
        .iter()
        .filter(|s| s.name.starts_with("rows"))
        .flat_map(|s| s.passes.iter().map(|p| read(s, p, None)))
        .filter_map(|code| match code.body {
            Body::Rows(turns) => Some(turns),
            _ => None,
        })
        .collect();
    assert!(rows.len() > 40, "{} row kernels", rows.len());
    // The largest kernels back have 6, 7 and 11 barriers for each of their rows
    // (`docs/dev/cuda-notebook.md`): two of them go through 64 rows in a block, and wait once more
    // for the sums of all.
    for barriers in [6 * 64 + 1, 11] {
        assert!(rows.iter().any(|t| t.barriers == barriers), "{barriers}: {rows:?}");
    }
}

/// Sequences, tokens and heads of a text's `Shape`.
fn queries_of(text: &str) -> f64 {
    let shape = text.split_once("typedef Shape<").unwrap().1;
    let numbers: Vec<f64> = shape.split(", ").map_while(|n| n.parse().ok()).collect();
    numbers[0] * numbers[1] * numbers[3]
}

// --- what is made of them ------------------------------------------------------------------------

fn tiles(change: impl Fn(&mut Tiles)) -> Code {
    let mut tiles = Tiles {
        unit: Unit::Warpgroups,
        rows: 128.0,
        columns: 128.0,
        count: 132.0 * 64.0,
        depth: 4096.0,
        result: 2.0,
        adds: None,
        gathers: None,
        instructions: 0.0,
        streams: false,
        cluster: 1.0,
    };
    change(&mut tiles);
    let grid = tiles.count;
    Code { grid, block: 288, shared: 100 << 10, registers: 112, body: Body::Tiles(tiles) }
}

fn estimate(code: &Code) -> Estimate {
    let Body::Tiles(t) = code.body else { return code.estimate(0.0, h200()) };
    code.estimate(t.count * t.rows * t.columns * t.depth, h200())
}

/// Tiles of 128 x 128 ask the L2 cache for 32 KiB for each 64 terms, and reach what the review says
/// (520 TFLOP/s); those of 192 x 192 the 777 TFLOP/s of the public kernel by which the cache is
/// priced; those of 128 x 256 are between them, and those of 256 x 256 are bound by the products.
#[test]
fn the_l2_cache_feeds_narrow_tiles_too_slowly_and_large_ones_fast_enough() {
    let of = |rows, columns| estimate(&tiles(|t| (t.rows, t.columns) = (rows, columns)));
    let (narrow, wide) = (of(128.0, 128.0), of(128.0, 256.0));
    assert_eq!((narrow.why, wide.why), (Why::Cache, Why::Cache));
    assert_eq!(of(256.0, 256.0).why, Why::TensorCores);
    // 33.5 bytes of a cycle: 8.1 TB/s of a public kernel for all processors together.
    let (bytes, device) = (132.0 * 64.0 * 4096.0 * 256.0 * 2.0, h200());
    let fed = bytes / narrow.seconds;
    assert!((fed / (33.5 * 132.0 * device.clock) - 1.0).abs() < 0.05, "{fed:e} bytes a second");
    for (rows, columns, expected) in [(128.0, 128.0, 520e12), (128.0, 256.0, 690e12), (192.0, 192.0, 777e12)]
    {
        let rate = 2.0 * 132.0 * 64.0 * rows * columns * 4096.0 / of(rows, columns).seconds;
        assert!((rate / expected - 1.0).abs() < 0.04, "{rows} x {columns}: {rate:e} and not {expected:e}");
    }
}

/// A thread of 64 results that adds pair by pair waits for memory 32 times, and four times where it
/// asks for eight pairs at once.
#[test]
fn what_is_added_pair_by_pair_is_one_round_trip_after_another() {
    let added = |batch| estimate(&tiles(|t| (t.adds, t.depth) = (Some(batch), 64.0)));
    let (one, eight) = (added(1.0), added(8.0));
    assert_eq!(one.why, Why::Trips);
    let waves = (132.0 * 64.0 / (132.0 * f64::from(one.resident))).ceil();
    let less = (one.seconds - eight.seconds) / waves;
    assert!((less / (28.0 * 440e-9) - 1.0).abs() < 0.02, "{less:e} a tile");
}

/// Of a block that has a processor to itself; two of them hide each other's gathering.
#[test]
fn gathered_pieces_take_the_warps_that_bring_them() {
    let alone = |gathers| estimate(&Code { registers: 168, ..tiles(|t| t.gathers = gathers) });
    let gathered = |cycles| alone(Some((16.0, cycles)));
    assert_eq!(alone(None).resident, 1);
    assert!(gathered(98.0).seconds > 1.4 * gathered(12.0).seconds);
    assert_eq!(gathered(98.0).why, Why::Gather);
    assert_eq!(gathered(12.0), alone(None));
}

/// Blocks of a processor are as many as registers, threads and shared memory allow.
#[test]
fn residency_is_bounded_by_registers_threads_and_shared_memory() {
    let of = |registers, block, shared| {
        let body = Body::Rows(Turns { trips: 1, barriers: 0, reductions: 0 });
        Code { grid: 1.0, block, shared, registers, body }.resident(h200())
    };
    assert_eq!([of(32, 256, 0), of(64, 256, 0), of(128, 256, 0), of(140, 256, 0)], [8, 4, 2, 1]);
    assert_eq!([of(32, 1024, 0), of(16, 32, 0)], [2, 32]);
    assert_eq!([of(32, 128, 227 << 10), of(32, 128, 113 << 10), of(32, 128, 56 << 10)], [1, 2, 4]);
}

/// Of the same blocks twice as many at once take no longer, and more steps of a block no less.
#[test]
fn more_blocks_at_once_are_no_slower_and_more_steps_no_faster() {
    let rows = |registers, trips, barriers, reductions| {
        let body = Body::Rows(Turns { trips, barriers, reductions });
        Code { grid: 4096.0, block: 256, shared: 0, registers, body }.estimate(0.0, h200()).seconds
    };
    let mut last = f64::INFINITY;
    for registers in [255, 128, 64, 32] {
        let now = rows(registers, 24, 22, 8);
        assert!(now <= last, "{registers} registers: {now:e} after {last:e}");
        last = now;
    }
    let base = rows(64, 24, 22, 8);
    assert!(rows(64, 25, 22, 8) > base && rows(64, 24, 23, 8) > base);
    assert!(rows(64, 24, 22, 9) > base);
    for registers in [112, 224] {
        let of = |count: f64| {
            let code = Code { registers, ..tiles(|t| t.count = count) };
            estimate(&Code { grid: count, ..code }).seconds
        };
        let times: Vec<f64> = (1..2000).step_by(7).map(|n| of(f64::from(n))).collect();
        assert!(times.is_sorted(), "more tiles take less");
    }
}

// --- the example ---------------------------------------------------------------------------------

/// The figures of the page are those of the code, and no kernel takes less than the data sheet.
#[test]
fn the_sum_of_the_largest_example_is_what_the_page_says() {
    let found = step(h200(), &as_it_is);
    let page = std::fs::read_to_string(root("docs/dev/cuda-notebook.md")).unwrap();
    let line = page.lines().find(|line| line.starts_with("| all |")).expect("the table has a sum");
    let number = |cell: &str| -> f64 {
        let digits = cell.trim().split(':').next().unwrap().replace(',', "");
        digits.trim().parse().unwrap_or_else(|_| panic!("{cell}"))
    };
    let cells: Vec<&str> = line.split('|').collect();
    let (expected, least) = (number(cells[2]) / 1e3, number(cells[3]) / 1e3);
    println!(
        "{:.4} s and at least {:.4} s; the page has {expected} and {least}",
        found.seconds(),
        found.least()
    );
    assert!((found.seconds() / expected - 1.0).abs() < 0.02, "{} s, on the page {expected}", found.seconds());
    assert!((found.least() / least - 1.0).abs() < 0.02, "{} s at least, on the page {least}", found.least());
    assert!(found.lines.iter().all(|l| l.seconds >= l.least && l.least >= 0.0));
}

/// A slower part of the machine makes no kernel faster.
#[test]
fn a_slower_machine_is_never_faster() {
    // In order: a sum of the same numbers is the same number.
    let of = |device| -> BTreeMap<String, f64> {
        step(device, &as_it_is).lines.into_iter().map(|l| (l.kernel, l.seconds)).collect()
    };
    let all = of(h200());
    type Slower = (&'static str, fn(&mut Device));
    let slower: [Slower; 4] = [
        ("memory", |d| d.bandwidth /= 2.0),
        ("tensor cores", |d| d.bf16 /= 2.0),
        // Products of routers wait for operands: cores of half the rate cost nothing.
        ("cores", |d| d.f32 /= 4.0),
        ("memory, a little", |d| d.bandwidth *= 0.99),
    ];
    for (what, change) in slower {
        let found = of(like(change));
        assert_eq!(found.len(), all.len(), "{what}");
        for (kernel, seconds) in &found {
            assert!(*seconds >= all[kernel] * (1.0 - 1e-12), "{what}: {kernel}");
        }
        assert!(found.values().sum::<f64>() > all.values().sum(), "{what} costs nothing");
    }
}

/// The code of the review: addends pair by pair, 98 and 44 instructions for a gathered piece, a
/// chain of 72 cycles for each score back, narrow tiles, the barriers that the three largest row
/// kernels had, one block of a processor.
fn reviewed(name: &str, codes: &mut [Code]) {
    for code in codes {
        let resident = code.resident(h200());
        match &mut code.body {
            Body::Tiles(t) => {
                if t.unit == Unit::Warpgroups && t.columns == 256.0 && t.depth < 2048.0 {
                    (t.columns, t.count, t.streams, t.cluster) = (128.0, 2.0 * t.count, false, 1.0);
                    (code.grid, code.block, code.registers) = (t.count, 288, 112);
                    code.shared = 100 << 10;
                }
                t.adds = t.adds.map(|_| 1.0);
                let each = if name.starts_with("grouped_outer") { 98.0 } else { 44.0 };
                t.gathers = t.gathers.map(|_| (16.0, each));
            }
            Body::Attention(a) if name.starts_with("attention_grad") => a.instructions = 72.0,
            Body::Rows(t) if name.contains(" sum ") && t.barriers > 0 => {
                // 22, 15 and 20 where 6, 7 and 11 are now.
                t.barriers = t.barriers * 57 / 24;
                if resident > 1 && t.trips > 400 {
                    code.registers = 140;
                }
            }
            Body::Attention(_) | Body::Rows(_) | Body::Items => {}
        }
    }
}

/// The rate that the review of the machine code expected, whose author knew instructions, latencies
/// and no model: 60 to 75 thousand tokens a second.
#[test]
fn the_code_of_the_review_takes_what_the_review_expects() {
    let (now, then) = (step(h200(), &as_it_is), step(h200(), &reviewed));
    let rate = |t: &Table| t.tokens as f64 / t.seconds();
    let part = |t: &Table, of: &[&str]| -> f64 {
        let is = |name: &str| of.iter().any(|of| name.starts_with(of));
        t.lines.iter().filter(|l| is(&l.kernel)).map(|l| l.seconds).sum()
    };
    println!("{:.0} tokens/s then, {:.0} now", rate(&then), rate(&now));
    for (of, expected) in
        [(&["grouped_outer"][..], 2.8), (&["attention_grad"], 2.1), (&["rows"], 3.1), (&["head_loss"], 2.3)]
    {
        let (then, now) = (part(&then, of), part(&now, of));
        println!("{of:?}: {then:.2} s then, {expected} by the review, {now:.2} now");
        assert!((then / expected - 1.0).abs() < 0.3, "{of:?}: {then} s, {expected} by the review");
        assert!(now <= then, "{of:?} was faster");
    }
    assert!((60e3..75e3).contains(&rate(&then)), "{} tokens/s", rate(&then));
}

#[test]
#[ignore = "prints what is read"]
fn what_is_read_of_each_kernel() {
    let found = step(h200(), &|name, codes| println!("{name}: {codes:?}"));
    println!("{found}");
}

//! Every kernel against its definition in f64, at awkward sizes, with one, two and three threads.

use super::{CpuDevice, CpuOptions};
use crate::{Device, DeviceError, Group, Instrument, PlanError, Session};
use dreamc_compiler::ir::{self, Attention, DType, Mask, Positions, Reduce, Rope, Unary};
use dreamc_compiler::op::attention::Among;
use dreamc_compiler::op::chosen::ABSENT;
use dreamc_compiler::op::{Bits, Measure};
use dreamc_compiler::program::*;
use dreamc_dsl::spec::{Balance, BalanceLaw, BalanceTarget};

/// Numbers that look random and are the same every time.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 >> 33
    }

    fn below(&mut self, n: usize) -> usize {
        self.next() as usize % n
    }

    /// Between -1 and 1.
    fn float(&mut self) -> f32 {
        (self.next() as f64 / (1u64 << 30) as f64 - 1.0) as f32
    }

    fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.float()).collect()
    }

    fn ints(&mut self, n: usize, below: usize) -> Vec<i32> {
        (0..n).map(|_| self.below(below) as i32).collect()
    }
}

/// An operand and its contents, a buffer of its own.
#[derive(Clone, Debug)]
pub(super) enum Value {
    F(Vec<f32>),
    /// Rows this number of elements apart, the first some elements into the buffer.
    Strided(Vec<f32>, u64),
    I(Vec<i32>),
    Index(u64),
}

use Value::{F, I, Index, Strided};

impl Value {
    pub(super) fn f(&self) -> &[f32] {
        match self {
            F(x) | Strided(x, _) => x,
            _ => panic!("not floats"),
        }
    }

    fn i(&self) -> &[i32] {
        let I(x) = self else { panic!("not integers") };
        x
    }
}

fn buffer(name: &str, dtype: DType, elements: usize, offset: &mut u64) -> Buffer {
    let b = Buffer {
        name: name.into(),
        space: Space::Io,
        dtype,
        shape: vec![elements as u64],
        instances: 1,
        offset: *offset,
    };
    *offset += b.bytes().next_multiple_of(ALIGNMENT);
    b
}

/// A plan of one launch.
pub(super) fn plan_of(kernel: &Kernel, operands: &[Value]) -> Plan {
    let mut plan = Plan { kernels: vec![kernel.clone()], ..Plan::default() };
    let mut list = vec![];
    for (i, value) in operands.iter().enumerate() {
        let (dtype, n, stride) = match value {
            F(x) => (DType::F32, x.len(), 0),
            Strided(x, stride) => (DType::F32, x.len(), *stride),
            I(x) => (DType::I32, x.len(), 0),
            Index(i) => {
                list.push(Operand::Index(Affine::constant(*i)));
                continue;
            }
        };
        plan.buffers.push(buffer(&i.to_string(), dtype, n, &mut plan.arena));
        let buffer = BufferId(plan.buffers.len() as u32 - 1);
        list.push(Operand::Tensor { buffer, instance: Affine::default(), offset: 0, stride });
    }
    let launch = Launch { kernel: KernelId(0), operands: list, places: None, origin: "test".into() };
    plan.programs.insert(ProgramKey::ALONE, Program { steps: vec![Step::Launch(launch)], variables: 0 });
    plan
}

pub(super) fn session(plan: &Plan, threads: usize) -> Box<dyn Session> {
    let device = CpuDevice::new(CpuOptions { threads: Some(threads) });
    let session = device.load(plan, &Group::alone()).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(session.scratch_bytes(), device.scratch_bytes(plan).unwrap());
    session
}

/// Runs one launch and returns what its operands hold then, and its multiply-adds. Operands that
/// may be bf16 are tried so, too.
pub(super) fn launch(kernel: Kernel, operands: &[Value]) -> (Vec<Value>, u64) {
    if kernel.signature().iter().any(|slot| matches!(slot.storage, Storage::Float(_) | Storage::Weight)) {
        launch_narrow(&kernel, operands);
    }
    launch_wide(kernel, operands)
}

fn launch_wide(kernel: Kernel, operands: &[Value]) -> (Vec<Value>, u64) {
    let plan = plan_of(&kernel, operands);
    let mut first: Option<(Vec<Value>, u64)> = None;
    for threads in [1, 2, 3] {
        let mut session = session(&plan, threads);
        session.instrument(Instrument { count: true, time: false });
        let tensors = operands.iter().filter(|v| !matches!(v, Index(_)));
        for (i, value) in tensors.enumerate() {
            match value {
                F(x) | Strided(x, _) => session.write_at(BufferId(i as u32), 0, 0, x),
                I(x) => session.write_at(BufferId(i as u32), 0, 0, x),
                Index(_) => Ok(()),
            }
            .unwrap();
        }
        let stats = session.run(ProgramKey::ALONE).unwrap();
        let mut results = vec![];
        let mut number = 0;
        for value in operands {
            let id = BufferId(number);
            number += !matches!(value, Index(_)) as u32;
            results.push(match value {
                F(_) => F(session.read_all(id).unwrap()),
                Strided(_, s) => Strided(session.read_all(id).unwrap(), *s),
                I(_) => I(session.read_all(id).unwrap()),
                Index(i) => Index(*i),
            });
        }
        let run = (results, stats.multiply_adds());
        match &first {
            None => first = Some(run),
            // By text, which tells -0 from 0 and finds NaN equal to itself.
            Some(f) => assert_eq!(format!("{f:?}"), format!("{run:?}"), "{threads} threads: {kernel:?}"),
        }
    }
    first.unwrap()
}

/// The last of these operands, of f32, after one launch for rows whose place is not negative, and
/// its multiply-adds.
fn launch_some(kernel: Kernel, operands: &[Value], places: &[i32]) -> (Vec<f32>, u64) {
    let operands = [operands, &[I(places.to_vec())]].concat();
    let mut plan = plan_of(&kernel, &operands);
    for step in plan.programs.values_mut().flat_map(|program| &mut program.steps) {
        if let Step::Launch(launch) = step {
            launch.places = launch.operands.pop();
        }
    }
    let mut session = session(&plan, 2);
    session.instrument(Instrument { count: true, time: false });
    for (i, value) in operands.iter().enumerate() {
        let id = BufferId(i as u32);
        match value {
            F(x) => session.write_at(id, 0, 0, x),
            I(x) => session.write_at(id, 0, 0, x),
            Strided(..) | Index(_) => panic!("operands are whole"),
        }
        .unwrap();
    }
    let count = session.run(ProgramKey::ALONE).unwrap().multiply_adds();
    (session.read_all(BufferId(operands.len() as u32 - 2)).unwrap(), count)
}

/// Runs one launch with what may be bf16 stored so, and compares it with the launch in f32 on the
/// same numbers; its bits are the same on any number of threads.
fn launch_narrow(kernel: &Kernel, operands: &[Value]) {
    use half::bf16;
    let slots = kernel.signature();
    let narrow = |i: usize| matches!(slots[i].storage, Storage::Float(_) | Storage::Weight);
    let rounded = |x: &[f32]| x.iter().map(|x| bf16::from_f32(*x).to_f32()).collect::<Vec<_>>();
    let operands = operands.iter().enumerate().map(|(i, value)| match value {
        F(x) if narrow(i) => F(rounded(x)),
        Strided(x, stride) if narrow(i) => Strided(rounded(x), *stride),
        other => other.clone(),
    });
    let operands: Vec<Value> = operands.collect();
    let (expected, count) = launch_wide(kernel.clone(), &operands);

    let mut plan = plan_of(kernel, &operands);
    plan.arena = 0;
    for (i, b) in plan.buffers.iter_mut().enumerate() {
        b.dtype = if narrow(i) { DType::Bf16 } else { b.dtype };
        b.offset = plan.arena;
        plan.arena += b.bytes().next_multiple_of(ALIGNMENT);
    }
    let mut first: Option<Vec<Vec<u32>>> = None;
    for threads in [1, 2, 3] {
        let mut session = session(&plan, threads);
        session.instrument(Instrument { count: true, time: false });
        for (i, value) in operands.iter().enumerate() {
            let id = BufferId(i as u32);
            match value {
                F(x) | Strided(x, _) if narrow(i) => {
                    let x: Vec<bf16> = x.iter().map(|x| bf16::from_f32(*x)).collect();
                    session.write_at(id, 0, 0, &x)
                }
                F(x) | Strided(x, _) => session.write_at(id, 0, 0, x),
                I(x) => session.write_at(id, 0, 0, x),
                Index(_) => panic!("no kernel of bf16 has an index"),
            }
            .unwrap();
        }
        assert_eq!(session.run(ProgramKey::ALONE).unwrap().multiply_adds(), count, "{kernel:?}");
        let mut bits = vec![];
        for (i, expected) in expected.iter().enumerate() {
            let (F(expected) | Strided(expected, _)) = expected else { continue };
            let id = BufferId(i as u32);
            let found: Vec<f32> = match narrow(i) {
                true => session.read_all::<bf16>(id).unwrap().iter().map(|x| x.to_f32()).collect(),
                false => session.read_all(id).unwrap(),
            };
            let scale = expected.iter().filter(|x| x.is_finite()).fold(0f32, |m, x| m.max(x.abs()));
            for (k, (found, expected)) in found.iter().zip(expected).enumerate() {
                let fine = (found - expected).abs() <= 1.0 / 64.0 * scale || found == expected;
                assert!(fine, "{kernel:?}: element {k} of operand {i} is {found}, in f32 {expected}");
            }
            bits.push(found.iter().map(|x| x.to_bits()).collect());
        }
        assert!(*first.get_or_insert_with(|| bits.clone()) == bits, "{threads} threads: {kernel:?}");
    }
}

fn close(what: &str, actual: &[f32], expected: &[f64]) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    let scale = expected.iter().filter(|e| e.is_finite()).fold(0f64, |m, e| m.max(e.abs()));
    for (i, (a, e)) in actual.iter().zip(expected).enumerate() {
        let fine = (*a as f64 - e).abs() <= 3e-6 * e.abs().max(scale) + 1e-30 || *a as f64 == *e;
        assert!(fine, "{what}: element {i} is {a}, should be {e}");
    }
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| x as f64).collect()
}

/// The tests of this file again, with the instruction sets that this machine would not choose.
#[test]
fn other_instruction_sets() {
    use super::simd::{VARIABLE, pairs};
    if std::env::var_os(VARIABLE).is_some() {
        return;
    }
    let levels: &[&str] = match cfg!(target_arch = "x86_64") {
        true => &["portable", "avx2", "avx512", "bf16"],
        false if pairs() => &["portable"],
        false => &[],
    };
    let test = std::env::current_exe().unwrap();
    for level in levels {
        let mut command = emulated(&test);
        let names =
            ["tiles", "few_rows", "grouped", "by_head", "row_kernels", "itself", "cpu::tests::attention"];
        let output = command.args(names).env(VARIABLE, level).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && !text.contains(" 0 passed"), "{level}: {text}");
    }
}

/// A command that runs a program of this architecture: through the runner that cargo has for
/// aarch64 (`tests/aarch64`) where this test runs so.
fn emulated(program: &std::path::Path) -> std::process::Command {
    let runner = std::env::var("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER").unwrap_or_default();
    let mut words = runner.split_whitespace().filter(|_| cfg!(target_arch = "aarch64"));
    let Some(first) = words.next() else { return std::process::Command::new(program) };
    let mut command = std::process::Command::new(first);
    command.args(words).arg(program);
    command
}

#[test]
fn product() {
    let mut r = Random(1);
    for (m, n, k) in [
        (1, 1, 1),
        (7, 5, 3),
        (64, 96, 33),
        (193, 257, 300),
        (1, 40, 513),
        (300, 1, 20),
        (4, 4, 0),
        (130, 129, 2100),
        (14, 40, 1024),
    ] {
        for (ta, tb, accumulate) in
            [(false, false, false), (false, true, true), (true, false, false), (true, true, true)]
        {
            let (a, b, c) = (r.floats(m * k), r.floats(k * n), r.floats(m * n));
            let layout = |transposed, rows: usize, columns: usize| match transposed {
                false => Matrix { row: columns as u64, column: 1 },
                true => Matrix { row: 1, column: rows as u64 },
            };
            let (la, lb) = (layout(ta, m, k), layout(tb, k, n));
            let kernel = Kernel::Product(kernel::Product {
                m: m as u64,
                n: n as u64,
                k: k as u64,
                a: la,
                b: lb,
                accumulate,
                stored: false,
            });
            let (out, count) = launch(kernel, &[F(a.clone()), F(b.clone()), F(c.clone())]);
            assert_eq!(count, (m * n * k) as u64);
            let at = |x: &[f32], l: Matrix, i: usize, j: usize| {
                x[i * l.row as usize + j * l.column as usize] as f64
            };
            let expected: Vec<f64> = (0..m * n)
                .map(|e| {
                    let (i, j) = (e / n, e % n);
                    let sum: f64 = (0..k).map(|s| at(&a, la, i, s) * at(&b, lb, s, j)).sum();
                    sum + if accumulate { c[e] as f64 } else { 0.0 }
                })
                .collect();
            close(&format!("{m} {n} {k}"), out[2].f(), &expected);
        }
    }
}

/// A matrix times its own transpose, computed by half, has the bits of the product with a
/// copy, on any number of threads.
#[test]
fn product_of_a_matrix_and_itself() {
    let mut r = Random(7);
    for (n, k) in [(1, 5), (40, 33), (97, 300), (256, 512), (600, 70)] {
        let a = r.floats(n * k);
        let (n64, k64) = (n as u64, k as u64);
        for (line, step) in [(k64, 1), (1, n64)] {
            let (m, a_at, b_at) =
                (n64, Matrix { row: line, column: step }, Matrix { row: step, column: line });
            let kernel = Kernel::Product(kernel::Product {
                m,
                n: n64,
                k: k64,
                a: a_at,
                b: b_at,
                accumulate: false,
                stored: false,
            });
            for narrow in [false, true] {
                let mut plan = plan_of(&kernel, &[F(a.clone()), F(a.clone()), F(vec![0.0; n * n])]);
                let stored: Vec<half::bf16> = a.iter().map(|x| half::bf16::from_f32(*x)).collect();
                if narrow {
                    plan.buffers[..2].iter_mut().for_each(|b| b.dtype = DType::Bf16);
                }
                let mut results = vec![];
                for (other, threads) in [(1, 1), (0, 1), (0, 2), (0, 3)] {
                    for step in &mut plan.programs[&ProgramKey::ALONE].steps {
                        let Step::Launch(launch) = step else { continue };
                        let Operand::Tensor { buffer, .. } = &mut launch.operands[1] else { continue };
                        *buffer = BufferId(other);
                    }
                    let mut session = session(&plan, threads);
                    for id in [BufferId(0), BufferId(1)] {
                        match narrow {
                            false => session.write_at(id, 0, 0, &a),
                            true => session.write_at(id, 0, 0, &stored),
                        }
                        .unwrap();
                    }
                    session.run(ProgramKey::ALONE).unwrap();
                    let found: Vec<f32> = session.read_all(BufferId(2)).unwrap();
                    results.push(found.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
                }
                assert!(results.iter().all(|r| *r == results[0]), "{n} {k} {narrow}");
            }
        }
    }
}

/// Chosen experts, and what `Group` makes of them.
fn grouping(chosen: &[i32], experts: usize) -> (Vec<i32>, Vec<i32>, Vec<i32>) {
    let mut order: Vec<i32> = (0..chosen.len() as i32).collect();
    order.sort_by_key(|&s| (chosen[s as usize].min(experts as i32), s));
    let offsets = (0..=experts as i32).map(|e| chosen.iter().filter(|&&c| c < e).count() as i32).collect();
    let mut inverse = vec![0; chosen.len()];
    order.iter().enumerate().for_each(|(place, &slot)| inverse[slot as usize] = place as i32);
    (order, offsets, inverse)
}

#[test]
fn group() {
    let mut r = Random(2);
    for (slots, experts) in [(1, 1), (40, 7), (1000, 64), (5, 300), (0, 3)] {
        // Some choices are no-ops.
        let chosen = r.ints(slots, experts + 2);
        let (order, offsets, inverse) = grouping(&chosen, experts);
        let kernel = Kernel::Group(kernel::Group { slots: slots as u64, experts: experts as u64 });
        let empty = || I(vec![-7; slots]);
        let (out, _) = launch(kernel, &[I(chosen), empty(), I(vec![-7; experts + 1]), empty()]);
        assert_eq!((out[1].i(), out[2].i(), out[3].i()), (&order[..], &offsets[..], &inverse[..]));
        let counts = r.floats(experts);
        let kernel = Kernel::AddCounts(kernel::AddCounts { experts: experts as u64 });
        let (out, _) = launch(kernel, &[I(offsets.clone()), F(counts.clone())]);
        let expected: Vec<f64> =
            (0..experts).map(|e| counts[e] as f64 + (offsets[e + 1] - offsets[e]) as f64).collect();
        close("counts", out[1].f(), &expected);
    }
}

#[test]
fn groups_of_whole_tiles() {
    let mut r = Random(5);
    for (rows, k, spare, experts, tile) in
        [(1, 1, 0, 1, 1), (40, 3, 1, 7, 4), (300, 2, 1, 5, 16), (90, 2, 0, 4, 8), (7, 3, 3, 2, 2)]
    {
        let slots = rows * k;
        let chosen = r.ints(slots, experts + 2);
        let (order, offsets, _) = grouping(&chosen, experts);
        let mut score: Vec<f32> = r.ints(slots, 9).iter().map(|&i| i as f32 - 4.0).collect();
        score[0] = f32::NAN;
        let none = experts as u64 + 5;
        let size = |n: usize| n as u64;
        let kernel = kernel::RoundGroups {
            slots: size(slots),
            experts: size(experts),
            k: size(k),
            spare: size(spare),
            tile: size(tile),
            none,
        };
        let operands = [F(score.clone()), I(chosen.clone()), I(order), I(offsets), I(vec![-7; slots])];
        let (out, _) = launch(Kernel::RoundGroups(kernel), &operands);
        let worth = |s: usize| if score[s].is_nan() { f32::NEG_INFINITY } else { score[s] };
        let better = |a: usize, b: usize| worth(a) > worth(b) || (worth(a) == worth(b) && a < b);
        for slot in 0..slots {
            let e = chosen[slot];
            let spares = |s: usize| s % k + spare >= k;
            let of = |spare: bool| (0..slots).filter(move |&s| spares(s) == spare);
            let count = |spare: bool| of(spare).filter(|&s| chosen[s] == e).count();
            let ahead = of(spares(slot)).filter(|&s| chosen[s] == e && better(s, slot)).count();
            let (own, over) = (count(false), count(false) % tile);
            let up = over * 2 >= tile && tile - over <= count(true) && over > 0;
            let taken = match (spares(slot), up) {
                (false, true) => own,
                (false, false) => own - over,
                (true, true) => tile - over,
                (true, false) => 0,
            };
            let expected = if e >= experts as i32 || ahead < taken { e } else { none as i32 };
            assert_eq!(out[4].i()[slot], expected, "slot {slot} of {slots}, {tile} a tile");
        }
    }
}

#[test]
fn route() {
    let mut r = Random(3);
    for (rows, experts, k) in
        [(1, 1, 1), (50, 7, 7), (33, 64, 4), (5, 300, 20), (3, 40, 16), (9, 5, 0), (2, 2000, 500)]
    {
        // Few values, so that there are ties.
        let mut z: Vec<f32> = r.ints(rows * experts, 9).iter().map(|&i| i as f32 - 4.0).collect();
        z[0] = f32::NAN;
        if z.len() > 3 {
            z[2] = -0.0;
        }
        let kernel = Kernel::Route(kernel::Route { rows: rows as u64, experts: experts as u64, k: k as u64 });
        let (out, _) = launch(kernel, &[F(z.clone()), I(vec![-1; rows * k])]);
        for row in 0..rows {
            let z = &z[row * experts..][..experts];
            let worth = |i: i32| if z[i as usize].is_nan() { f32::NEG_INFINITY } else { z[i as usize] };
            let mut best: Vec<i32> = (0..experts as i32).collect();
            best.sort_by(|&a, &b| worth(b).partial_cmp(&worth(a)).unwrap().then(a.cmp(&b)));
            assert_eq!(&out[1].i()[row * k..][..k], &best[..k], "{rows} {experts} {k}, row {row}");
        }
    }
}

/// Vectors of heads by some rows of each head's matrix, of all rows and of those that are needed.
#[test]
fn products_by_head() {
    let mut r = Random(41);
    for (rows, heads, out, inner, first, part) in
        [(1, 1, 1, 1, 0, 1), (1, 16, 24, 70, 8, 16), (5, 3, 9, 33, 2, 5), (40, 2, 300, 17, 0, 290)]
    {
        let w = r.floats(heads * out * inner);
        for transposed in [false, true] {
            let (n, k) = if transposed { (inner, part) } else { (part, inner) };
            let x = r.floats(rows * heads * k);
            let places: Vec<i32> = (0..rows).map(|row| if row % 3 == 1 { -1 } else { row as i32 }).collect();
            for some in [false, true] {
                let kernel = Kernel::ByHead(kernel::ByHead {
                    rows: rows as u64,
                    heads: heads as u64,
                    out: out as u64,
                    inner: inner as u64,
                    first: first as u64,
                    part: part as u64,
                    transposed,
                    stored: false,
                });
                let operands = [F(x.clone()), F(w.clone()), F(vec![9.0; rows * heads * n])];
                let needed = |row: usize| !some || places[row] >= 0;
                let (result, count) = match some {
                    true => launch_some(kernel, &operands, &places),
                    false => {
                        let (result, count) = launch(kernel, &operands);
                        (result[2].f().to_vec(), count)
                    }
                };
                let used = (0..rows).filter(|row| needed(*row)).count();
                assert_eq!(count, (used * heads * n * k) as u64);
                let expected = (0..rows * heads * n).map(|at| {
                    let (row, head, column) = (at / n / heads, at / n % heads, at % n);
                    let element = |i: usize| {
                        let (o, i) = if transposed { (first + i, column) } else { (first + column, i) };
                        w[(head * out + o) * inner + i] as f64
                    };
                    let sum = |row: usize| {
                        (0..k).map(|i| x[(row * heads + head) * k + i] as f64 * element(i)).sum()
                    };
                    if needed(row) { sum(row) } else { 9.0 }
                });
                close("by head", &result, &expected.collect::<Vec<f64>>());
            }
        }
    }
}

/// `(tokens, per token, experts, out, inner)`; experts without tokens and no-ops among them.
const MIXTURES: [(usize, usize, usize, usize, usize); 5] =
    [(1, 1, 1, 1, 1), (50, 1, 3, 20, 17), (70, 4, 9, 33, 40), (3, 2, 40, 5, 64), (500, 2, 3, 70, 260)];

#[test]
fn grouped_products() {
    let mut r = Random(4);
    for (tokens, per, experts, out, inner) in MIXTURES {
        let slots = tokens * per;
        let chosen = r.ints(slots, experts + (experts > 2) as usize);
        let (order, offsets, _) = grouping(&chosen, experts);
        let used = offsets[experts] as usize;
        let expert_of = |s: usize| (0..experts).find(|&e| (s as i32) < offsets[e + 1]);
        let w = r.floats(experts * out * inner);
        let sizes = [slots as u64, experts as u64, out as u64, inner as u64];
        let [slots64, experts64, out64, inner64] = sizes;
        for (transposed, gathered) in [(false, false), (false, true), (true, false), (true, true)] {
            let (k, n) = if transposed { (out, inner) } else { (inner, out) };
            let row = |s: usize| if gathered { order[s] as usize / per } else { s };
            let x = r.floats(if gathered { tokens } else { slots } * k);
            let mut operands = vec![F(x.clone()), F(w.clone()), I(offsets.clone())];
            if gathered {
                operands.push(I(order.clone()));
            }
            operands.push(F(vec![9.0; slots * n]));
            let kernel = Kernel::Grouped(kernel::Grouped {
                slots: slots64,
                experts: experts64,
                out: out64,
                inner: inner64,
                transposed,
                gather: gathered.then_some(per as u64),
                stored: false,
            });
            let (result, count) = launch(kernel, &operands);
            assert_eq!(count, (used * out * inner) as u64);
            let mut expected = vec![0.0; slots * n];
            for s in 0..used {
                let e = expert_of(s).unwrap();
                for j in 0..n {
                    let w = |i: usize| {
                        let (o, i) = if transposed { (i, j) } else { (j, i) };
                        w[(e * out + o) * inner + i] as f64
                    };
                    expected[s * n + j] = (0..k).map(|i| x[row(s) * k + i] as f64 * w(i)).sum();
                }
            }
            close("grouped", result.last().unwrap().f(), &expected);
        }
        for (gathered, accumulate) in [(false, false), (true, false), (false, true), (true, true)] {
            let row = |s: usize| if gathered { order[s] as usize / per } else { s };
            let y = r.floats(slots * out);
            let x = r.floats(if gathered { tokens } else { slots } * inner);
            let before = r.floats(w.len());
            let mut operands = vec![F(y.clone()), F(x.clone()), I(offsets.clone())];
            if gathered {
                operands.push(I(order.clone()));
            }
            operands.push(F(before.clone()));
            let kernel = Kernel::GroupedOuter(kernel::GroupedOuter {
                slots: slots64,
                experts: experts64,
                out: out64,
                inner: inner64,
                gather: gathered.then_some(per as u64),
                accumulate,
            });
            let (result, count) = launch(kernel, &operands);
            assert_eq!(count, (used * out * inner) as u64);
            let mut expected = if accumulate { wide(&before) } else { vec![0.0; before.len()] };
            for s in 0..used {
                let e = expert_of(s).unwrap();
                for o in 0..out {
                    for i in 0..inner {
                        expected[(e * out + o) * inner + i] +=
                            y[s * out + o] as f64 * x[row(s) * inner + i] as f64;
                    }
                }
            }
            close("outer", result.last().unwrap().f(), &expected);
        }
    }
}

#[test]
fn gather_and_combine() {
    let mut r = Random(5);
    for (rows, k, width) in [(1, 1, 1), (20, 3, 17), (300, 4, 70), (7, 1, 128)] {
        let (slots, experts) = (rows * k, 5);
        let (order, _, inverse) = grouping(&r.ints(slots, experts), experts);
        let (x, y, gates) = (r.floats(rows * width), r.floats(slots * width), r.floats(slots));
        let sizes = [rows as u64, slots as u64, k as u64, width as u64];
        let [rows64, slots64, k64, width64] = sizes;

        let kernel = Kernel::Gather(kernel::Gather { slots: slots64, k: k64, width: width64 });
        let (out, _) = launch(kernel, &[F(x.clone()), I(order.clone()), F(vec![0.0; slots * width])]);
        let expected: Vec<f64> =
            (0..slots * width).map(|i| x[order[i / width] as usize / k * width + i % width] as f64).collect();
        close("gather", out[2].f(), &expected);

        for gated in [false, true] {
            let mut operands = vec![F(y.clone()), I(inverse.clone())];
            if gated {
                operands.push(F(gates.clone()));
            }
            operands.push(F(vec![5.0; rows * width]));
            let (out, _) = launch(
                Kernel::Combine(kernel::Combine { rows: rows64, k: k64, width: width64, gated }),
                &operands,
            );
            let expected: Vec<f64> = (0..rows * width)
                .map(|i| {
                    let slots = i / width * k..(i / width + 1) * k;
                    let gate = |s: usize| if gated { gates[s] as f64 } else { 1.0 };
                    slots.map(|s| gate(s) * y[inverse[s] as usize * width + i % width] as f64).sum()
                })
                .collect();
            close("combine", out.last().unwrap().f(), &expected);
        }

        let kernel = Kernel::CombineGrad(kernel::CombineGrad { slots: slots64, k: k64, width: width64 });
        let operands = [F(x.clone()), I(order.clone()), F(gates.clone()), F(vec![0.0; slots * width])];
        let (out, _) = launch(kernel, &operands);
        let expected: Vec<f64> = (0..slots * width)
            .map(|i| {
                let slot = order[i / width] as usize;
                gates[slot] as f64 * x[slot / k * width + i % width] as f64
            })
            .collect();
        close("combine grad", out[3].f(), &expected);

        let kernel = Kernel::CombineGates(kernel::CombineGates { rows: rows64, k: k64, width: width64 });
        let operands = [F(x.clone()), F(y.clone()), I(inverse.clone()), F(vec![0.0; slots])];
        let (out, _) = launch(kernel, &operands);
        let expected: Vec<f64> = (0..slots)
            .map(|s| {
                let at = |i: usize| y[inverse[s] as usize * width + i] as f64;
                (0..width).map(|i| x[s / k * width + i] as f64 * at(i)).sum()
            })
            .collect();
        close("combine gates", out[3].f(), &expected);
    }
}

/// Softmax attention of one query over keys in f64: result, `lse`, probabilities and slopes of the
/// soft-cap.
fn attend(scores: &[f64], a: &Attention) -> (f64, Vec<f64>, Vec<f64>) {
    let capped: Vec<f64> =
        scores.iter().map(|s| a.softcap.map_or(s * a.scale, |c| c * (s * a.scale / c).tanh())).collect();
    let most = capped.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = capped.iter().map(|s| (s - most).exp()).sum();
    let p = capped.iter().map(|s| (s - most).exp() / sum).collect();
    let slopes = capped.iter().map(|s| a.softcap.map_or(1.0, |c| 1.0 - (s / c) * (s / c))).collect();
    (if scores.is_empty() { f64::NEG_INFINITY } else { most + sum.ln() }, p, slopes)
}

/// Naive gradient of one query: `(d score, p)` for each key.
fn attend_grad(p: &[f64], slopes: &[f64], dp: &[f64], dlse: f64, a: &Attention) -> Vec<f64> {
    let along = p.iter().zip(dp).map(|(p, d)| p * d).sum::<f64>() - dlse;
    (0..p.len()).map(|j| p[j] * (dp[j] - along) * slopes[j] * a.scale).collect()
}

#[test]
fn attention() {
    let mut r = Random(6);
    let shapes = [
        (1, 1, 1, 1, 1, 4),
        (2, 70, 70, 4, 2, 16),
        (1, 130, 130, 3, 3, 33),
        (2, 5, 150, 2, 1, 32),
        (1, 200, 200, 6, 1, 8),
        // Few queries over a cache: its keys in pieces, and more heads of a group than go together.
        (3, 1, 1100, 6, 2, 80),
        (1, 1, 90, 20, 1, 24),
        (2, 16, 140, 8, 8, 64),
    ];
    for (batch, queries, keys, heads, kv_heads, size) in shapes {
        // Blocks of one token and of several, few of them, which are read by lists where there are
        // many keys, and more, which are tiles.
        let among = |block, count| Among { block, count, heads: kv_heads as u64, own: false };
        for (softcap, window, mask, segments, among) in [
            (None, None, Mask::Causal, false, None),
            (Some(2.0), Some(40), Mask::Causal, false, None),
            (None, Some(1), Mask::Causal, true, None),
            (None, None, Mask::Causal, true, None),
            (None, None, Mask::Positions, false, None),
            (Some(3.0), Some(33), Mask::Positions, queries == keys, None),
            (None, None, Mask::Causal, false, Some(among(1, 2))),
            (None, Some(90), Mask::Causal, true, Some(among(1, 9))),
            (None, None, Mask::Causal, false, Some(among(16, 1))),
            (None, None, Mask::Causal, true, Some(among(24, 3))),
            (None, None, Mask::Positions, false, Some(among(6, 4))),
        ] {
            if mask == Mask::Causal && queries != keys {
                continue;
            }
            let scale = 1.0 / (size as f64).sqrt();
            let a = Attention { scale, softcap, window, mask, segments, among, ..Attention::default() };
            let shape = AttentionShape {
                batch: batch as u64,
                queries: queries as u64,
                keys: keys as u64,
                heads: heads as u64,
                kv_heads: kv_heads as u64,
                size: size as u64,
            };
            let (qn, kn) = (heads * size, kv_heads * size);
            // Rows further apart than they are long.
            let (qs, ks) = (qn + 3, kn + 5);
            let rows = |r: &mut Random, n: usize, stride: usize| Strided(r.floats(n * stride), stride as u64);
            let q = rows(&mut r, batch * queries, qs);
            let (k, v) = (rows(&mut r, batch * keys, ks), rows(&mut r, batch * keys, ks));
            // Positions with gaps and absent keys; queries from the middle on; one sees nothing.
            let shift = (keys - queries) as i32;
            let mut q_pos: Vec<i32> =
                (0..batch * queries).map(|i| (i % queries) as i32 * 2 + shift).collect();
            if q_pos.len() > 1 {
                q_pos[0] = -5;
            }
            let k_pos: Vec<i32> =
                (0..batch * keys).map(|i| if i % 7 == 3 { -1 } else { (i % keys) as i32 * 2 }).collect();
            let segment: Vec<i32> = (0..batch * queries).map(|i| (i % queries / 29) as i32).collect();
            // In no order, some twice, some none.
            let lists = among.map_or(0, |a| kv_heads * a.count as usize);
            let blocks = among.map_or(1, |a| keys / a.block as usize + 1);
            let chosen: Vec<i32> = (0..batch * queries * lists)
                .map(|n| if n % 5 == 4 { -1 } else { r.below(blocks) as i32 })
                .collect();
            // Of every second kind something follows from the logarithm, too.
            let log = softcap.is_some() || segments;
            let dlse = log.then(|| F(r.floats(batch * queries * heads)));
            let mut mask_operands = vec![];
            if mask == Mask::Positions {
                mask_operands.extend([I(q_pos.clone()), I(k_pos.clone())]);
            }
            if segments {
                mask_operands.push(I(segment.clone()));
            }
            if among.is_some() {
                mask_operands.push(I(chosen.clone()));
            }
            let sees = |b: usize, i: usize, j: usize, h: usize| {
                let (p, s) = match mask {
                    Mask::Causal => (i as i64, j as i64),
                    Mask::Positions => (q_pos[b * queries + i] as i64, k_pos[b * keys + j] as i64),
                };
                s >= 0
                    && s <= p
                    && window.is_none_or(|w| p - s < w as i64)
                    && (!segments || segment[b * queries + i] == segment[b * queries + j])
                    && among.is_none_or(|a| {
                        let of = (b * queries + i) * kv_heads + h / (heads / kv_heads);
                        let count = a.count as usize;
                        chosen[of * count..][..count].contains(&((s as u64 / a.block) as i32))
                    })
            };
            let mut operands = vec![q.clone(), k.clone(), v.clone()];
            operands.extend(mask_operands.clone());
            operands.extend([F(vec![7.0; batch * queries * qn]), F(vec![7.0; batch * queries * heads])]);
            let (out, count) = launch(
                Kernel::Attention(kernel::Attention {
                    shape,
                    attention: a.clone(),
                    shared: false,
                    lengths: vec![],
                }),
                &operands,
            );
            let (o, lse) = (out[out.len() - 2].f(), out[out.len() - 1].f());

            let d = rows(&mut r, batch * queries, qs);
            let mut o_exact = vec![0.0; o.len()];
            let mut lse_exact = vec![0.0; lse.len()];
            let [mut dq, mut dk, mut dv] =
                [(queries, qs), (keys, ks), (keys, ks)].map(|(n, s)| vec![0.0; batch * n * s]);
            let mut pairs = 0;
            for b in 0..batch {
                for i in 0..queries {
                    for h in 0..heads {
                        let seen: Vec<usize> = (0..keys).filter(|&j| sees(b, i, j, h)).collect();
                        pairs += seen.len();
                        let g = h / (heads / kv_heads) * size;
                        let at_q = (b * queries + i) * qs + h * size;
                        let at_k: Vec<usize> = seen.iter().map(|j| (b * keys + j) * ks + g).collect();
                        let inner = |x: &[f32], i: usize, y: &[f32], j: usize| -> f64 {
                            (0..size).map(|c| x[i + c] as f64 * y[j + c] as f64).sum()
                        };
                        let scores: Vec<f64> = at_k.iter().map(|&j| inner(q.f(), at_q, k.f(), j)).collect();
                        let (l, p, slopes) = attend(&scores, &a);
                        lse_exact[(b * queries + i) * heads + h] = l;
                        let dp: Vec<f64> = at_k.iter().map(|&j| inner(d.f(), at_q, v.f(), j)).collect();
                        let dlse = dlse.as_ref().map_or(0.0, |x| x.f()[(b * queries + i) * heads + h]);
                        let ds = attend_grad(&p, &slopes, &dp, dlse.into(), &a);
                        for c in 0..size {
                            for (n, &j) in at_k.iter().enumerate() {
                                o_exact[((b * queries + i) * heads + h) * size + c] +=
                                    p[n] * v.f()[j + c] as f64;
                                dq[at_q + c] += ds[n] * k.f()[j + c] as f64;
                                dk[j + c] += ds[n] * q.f()[at_q + c] as f64;
                                dv[j + c] += p[n] * d.f()[at_q + c] as f64;
                            }
                        }
                    }
                }
            }
            assert_eq!(count, (2 * pairs * size) as u64);
            close("o", o, &o_exact);
            close("lse", lse, &lse_exact);

            let mut o_rows = vec![0.0; batch * queries * qs];
            for (row, o) in o.chunks_exact(qn).enumerate() {
                o_rows[row * qs..][..qn].copy_from_slice(o);
            }
            let mut operands = vec![q, k, v, Strided(o_rows, qs as u64), F(lse.to_vec()), d];
            operands.extend(mask_operands);
            operands.extend(dlse);
            // Elements between rows stay.
            for (n, s) in [(queries, qs), (keys, ks), (keys, ks)] {
                operands.push(Strided(vec![7.0; batch * n * s], s as u64));
            }
            let (out, count) = launch(
                Kernel::AttentionGrad(kernel::AttentionGrad { shape, attention: a, log, lengths: vec![] }),
                &operands,
            );
            assert_eq!(count, (5 * pairs * size) as u64);
            for (i, (mut exact, n, s)) in [(dq, qn, qs), (dk, kn, ks), (dv, kn, ks)].into_iter().enumerate() {
                exact.chunks_exact_mut(s).for_each(|row| row[n..].fill(7.0));
                close(["dq", "dk", "dv"][i], out[out.len() - 3 + i].f(), &exact);
            }
        }
    }
}

/// Blocks of queries and keys without a document in common are not computed: keys and values of
/// another document that are no numbers reach nothing, forward and back.
#[test]
fn other_documents_are_not_read() {
    let (tokens, size, mut r) = (256, 16, Random(3));
    let shape =
        AttentionShape { batch: 1, queries: tokens, keys: tokens, heads: 1, kv_heads: 1, size: size as u64 };
    let (own, n) = (128 * size, 256 * size);
    let documents = I((0..tokens as i32).map(|i| i / 128).collect());
    let mut rows = |first: f32| {
        let mut x = r.floats(n);
        x[..own].fill(first);
        F(x)
    };
    let [q, o, d] = [0.5, 0.5, 0.5].map(&mut rows);
    let [k, v] = [f32::NAN; 2].map(&mut rows);
    let room = |n: usize| F(vec![7.0; n]);
    for window in [None, Some(200)] {
        let attention = Attention { scale: 0.25, segments: true, window, ..Attention::default() };
        let forward =
            kernel::Attention { shape, attention: attention.clone(), shared: false, lengths: vec![] };
        let operands = [q.clone(), k.clone(), v.clone(), documents.clone(), room(n), room(256)];
        let (out, _) = launch_wide(forward.into(), &operands);
        assert!(out[4].f()[own..].iter().all(|x| x.is_finite()));
        let backward = kernel::AttentionGrad { shape, attention, log: false, lengths: vec![] };
        let given = [&q, &k, &v, &o, &out[5], &d, &documents].map(Clone::clone);
        let operands = [&given[..], &[room(n), room(n), room(n)]].concat();
        let (out, _) = launch_wide(backward.into(), &operands);
        assert!(out[7..].iter().all(|x| x.f()[own..].iter().all(|x| x.is_finite())));
    }
}

/// Lists have the largest scores, also where some queries see no more than their lists have room
/// for, and need no score.
#[test]
fn choices_of_keys() {
    let (tokens, size, mut r) = (90, 8, Random(9));
    let (q, k) = (r.floats(tokens * size), r.floats(tokens * size));
    for (block, near, first, count) in
        [(1, 0, 0, 40), (1, 2, 1, 40), (3, 1, 1, 12), (2, 0, 0, 90), (4, 3, 0, 3)]
    {
        let choice = kernel::ChooseKeys {
            shape: AttentionShape {
                batch: 1,
                queries: tokens as u64,
                keys: tokens as u64,
                heads: 1,
                kv_heads: 1,
                size: size as u64,
            },
            seen: Attention { scale: 0.5, every: Some(block as u64), ..Attention::default() },
            measure: Measure::Products,
            weighed: false,
            near,
            first,
            lists: 1,
            count: count as u64,
        };
        let operands = [F(q.clone()), F(k.clone()), I(vec![7; tokens * count])];
        let (out, _) = launch_wide(choice.into(), &operands);
        let I(found) = &out[2] else { panic!("lists are integers") };
        for (i, found) in found.chunks_exact(count).enumerate() {
            let score = |number: usize| -> f64 {
                let key = number * block + block - 1;
                (0..size).map(|c| f64::from(q[i * size + c]) * f64::from(k[key * size + c])).sum()
            };
            let own = i / block;
            let forced: Vec<usize> =
                (0..=own).filter(|n| n + near as usize > own || *n < first as usize).take(count).collect();
            let mut rest: Vec<usize> = (0..(i + 1) / block).filter(|n| !forced.contains(n)).collect();
            rest.sort_by(|a, b| score(*b).total_cmp(&score(*a)));
            let mut list: Vec<i32> =
                forced.iter().chain(rest.iter().take(count - forced.len())).map(|n| *n as i32).collect();
            list.sort_unstable();
            list.resize(count, -1);
            assert_eq!(found, list, "query {i}: {block}, {near}, {first}, {count}");
        }
    }
}

/// How much heads read of the blocks of a list, the scores of its tokens and their gradient, by
/// their definitions; of queries in several parts.
#[test]
fn losses_of_chosen_keys() {
    let (tokens, heads, size, mut r) = (300, 4, 6, Random(4));
    let (lists, groups, count) = (2, 2, 5);
    let of_queries = tokens * heads;
    let [q, k] = [of_queries, tokens * groups].map(|n| r.floats(n * size));
    let [weights, lse] = [(); 2].map(|()| r.floats(of_queries));
    let d = r.floats(tokens * lists * count);
    for (block, window) in [(1, None), (1, Some(90)), (7, Some(50))] {
        // In increasing order, the last of every third list none, some after the query.
        let step = tokens / block / count;
        let number = |n: usize| (n % count * step + (n / count * 7) % step) as i32;
        let chosen: Vec<i32> = (0..tokens * lists * count)
            .map(|n| if n / count % 3 == 0 && n % count + 1 == count { -1 } else { number(n) })
            .collect();
        let among = Among { block: block as u64, count: count as u64, heads: lists as u64, own: false };
        let seen = Attention { scale: 0.6, window, among: Some(among), ..Attention::default() };
        let shape = AttentionShape {
            batch: 1,
            queries: tokens as u64,
            keys: tokens as u64,
            heads: heads as u64,
            kv_heads: groups as u64,
            size: size as u64,
        };
        let absent = f64::from(ABSENT as f32);
        let (mut mass, mut scores) = (vec![0.0; d.len()], vec![absent; d.len()]);
        let [mut dq, mut dk] = [&q, &k].map(|x| vec![0.0; x.len()]);
        let (mut dweights, mut pairs) = (vec![0.0; of_queries], 0);
        for (at, &number) in chosen.iter().enumerate().filter(|(_, number)| **number >= 0) {
            let (i, list) = (at / count / lists, at / count % lists);
            let first = number as usize * block;
            for j in (first..first + block).filter(|j| *j <= i && window.is_none_or(|w| i - j < w as usize)) {
                let score = if scores[at] == absent { 0.0 } else { scores[at] };
                scores[at] = score;
                for h in list * heads / lists..(list + 1) * heads / lists {
                    let (row, key) = (i * heads + h, j * groups + h / (heads / groups));
                    let s: f64 =
                        (0..size).map(|c| f64::from(q[row * size + c]) * f64::from(k[key * size + c])).sum();
                    let (s, weight) = (0.6 * s, f64::from(weights[row]));
                    pairs += 1;
                    mass[at] += (s - f64::from(lse[row])).exp();
                    scores[at] += weight * s.max(0.0);
                    dweights[row] += f64::from(d[at]) * s.max(0.0);
                    let by = if s > 0.0 { 0.6 * weight * f64::from(d[at]) } else { 0.0 };
                    for c in 0..size {
                        dq[row * size + c] += by * f64::from(k[key * size + c]);
                        dk[key * size + c] += by * f64::from(q[row * size + c]);
                    }
                }
            }
        }
        let [of_q, of_k] = [&q, &k].map(|x| F(x.clone()));
        let room = |n: usize| F(vec![7.0; n]);
        let given = [of_q.clone(), of_k.clone(), F(lse.clone()), I(chosen.clone()), room(d.len())];
        let (out, counted) = launch(kernel::KeyMass { shape, seen: seen.clone() }.into(), &given);
        close("mass", out[4].f(), &mass);
        assert_eq!(counted, pairs * size as u64);
        if block > 1 {
            continue;
        }
        let of = kernel::KeyScores { shape, seen, relu: true, weighed: true };
        let given = [of_q, of_k, I(chosen), F(weights.clone())];
        let (out, counted) = launch_wide(of.clone().into(), &[&given[..], &[room(d.len())]].concat());
        let there =
            |x: &[f64]| -> Vec<f64> { x.iter().map(|x| if *x == absent { 0.0 } else { *x }).collect() };
        let found: Vec<f64> = out[4].f().iter().map(|x| f64::from(*x)).collect();
        assert!(found.iter().zip(&scores).all(|(a, b)| (*a == absent) == (*b == absent)));
        close("scores", &there(&found).iter().map(|x| *x as f32).collect::<Vec<_>>(), &there(&scores));
        assert_eq!(counted, pairs * size as u64);
        let results = [F(d.clone()), room(q.len()), room(k.len()), room(of_queries)];
        let (out, counted) =
            launch_wide(kernel::KeyScoresGrad { scores: of }.into(), &[&given[..], &results].concat());
        close("dq", out[5].f(), &dq);
        close("dk", out[6].f(), &dk);
        close("dweights", out[7].f(), &dweights);
        assert_eq!(counted, 3 * pairs * size as u64);
    }
}

#[test]
fn depth_attention() {
    let mut r = Random(7);
    for (depths, rows, heads, kv_heads, size) in
        [(1, 1, 1, 1, 1), (5, 37, 4, 2, 16), (9, 300, 1, 1, 40), (3, 6, 6, 3, 128)]
    {
        for (row, softcap) in [(0, None), (depths - 1, None), (depths / 2, Some(1.5))] {
            let scale = 1.0 / (size as f64).sqrt();
            let a = Attention { scale, softcap, ..Attention::default() };
            let shape = DepthShape {
                depths: depths as u64,
                rows: rows as u64,
                heads: heads as u64,
                kv_heads: kv_heads as u64,
                size: size as u64,
            };
            let (qs, cache) = (heads * size + 2, depths * rows * kv_heads * size);
            let q = Strided(r.floats(rows * qs), qs as u64);
            let (k, v, d) = (r.floats(cache), r.floats(cache), r.floats(rows * heads * size));
            let index = Index(row as u64);
            let operands = [q.clone(), F(k.clone()), F(v.clone()), index.clone(), F(vec![0.0; d.len()])];
            let (out, count) = launch(
                Kernel::DepthAttention(kernel::DepthAttention { shape, attention: a.clone() }),
                &operands,
            );
            assert_eq!(count, (2 * (row + 1) * d.len()) as u64);
            let (dk0, dv0) = (r.floats(cache), r.floats(cache));
            let (mut o, mut dq) = (vec![0.0; d.len()], vec![0.0; rows * qs]);
            let (mut dk, mut dv) = (wide(&dk0), wide(&dv0));
            for n in 0..rows {
                for h in 0..heads {
                    let at: Vec<usize> = (0..=row)
                        .map(|l| ((l * rows + n) * kv_heads + h / (heads / kv_heads)) * size)
                        .collect();
                    let (at_q, at_d) = (n * qs + h * size, (n * heads + h) * size);
                    let inner = |x: &[f32], i: usize, y: &[f32], j: usize| -> f64 {
                        (0..size).map(|c| x[i + c] as f64 * y[j + c] as f64).sum()
                    };
                    let scores: Vec<f64> = at.iter().map(|&j| inner(q.f(), at_q, &k, j)).collect();
                    let (_, p, slopes) = attend(&scores, &a);
                    let dp: Vec<f64> = at.iter().map(|&j| inner(&d, at_d, &v, j)).collect();
                    let ds = attend_grad(&p, &slopes, &dp, 0.0, &a);
                    for c in 0..size {
                        for (l, &j) in at.iter().enumerate() {
                            o[at_d + c] += p[l] * v[j + c] as f64;
                            dq[at_q + c] += ds[l] * k[j + c] as f64;
                            dk[j + c] += ds[l] * q.f()[at_q + c] as f64;
                            dv[j + c] += p[l] * d[at_d + c] as f64;
                        }
                    }
                }
            }
            close("o", out[4].f(), &o);
            let operands = [
                q,
                F(k),
                F(v),
                index,
                F(d.clone()),
                Strided(vec![0.0; rows * qs], qs as u64),
                F(dk0),
                F(dv0),
            ];
            let (out, count) = launch(
                Kernel::DepthAttentionGrad(kernel::DepthAttentionGrad { shape, attention: a }),
                &operands,
            );
            assert_eq!(count, (5 * (row + 1) * d.len()) as u64);
            close("dq", out[5].f(), &dq);
            close("dk", out[6].f(), &dk);
            close("dv", out[7].f(), &dv);
        }
    }
}

#[test]
fn sources_in_depth() {
    let mut r = Random(9);
    for (sources, rows, width) in [(1, 1, 1), (5, 37, 16), (9, 300, 40), (3, 6, 130)] {
        for row in [0, sources - 1, sources / 2] {
            let eps = 1e-3;
            let shape = SourcesShape {
                sources: sources as u64,
                rows: rows as u64,
                width: width as u64,
                eps: Bits(eps),
            };
            let stride = width + 2;
            let (v, q) = (r.floats(sources * rows * width), r.floats(width));
            let (x, du) = (r.floats(rows * stride), r.floats(rows * width));
            let operands = [F(v.clone()), Strided(x.clone(), stride as u64), F(q.clone()), Index(row as u64)];
            let forward = [&operands[..], &[F(vec![0.0; du.len()])]].concat();
            let (out, count) = launch(Kernel::ReadSources(kernel::ReadSources(shape)), &forward);
            assert_eq!(count, (2 * (row + 1) * du.len()) as u64);
            let before = r.floats(v.len());
            let (mut u, mut dx, mut dq) = (vec![0.0; du.len()], vec![0.0; du.len()], vec![0.0; du.len()]);
            let mut dv = wide(&before);
            for n in 0..rows {
                let source = |s: usize| match s == row {
                    true => wide(&x[n * stride..][..width]),
                    false => wide(&v[(s * rows + n) * width..][..width]),
                };
                let inner = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
                let (q, d) = (wide(&q), wide(&du[n * width..][..width]));
                let root = |v: &[f64]| 1.0 / (inner(v, v) / width as f64 + eps).sqrt();
                let scores: Vec<f64> = (0..=row).map(|s| inner(&q, &source(s)) * root(&source(s))).collect();
                let sum: f64 = scores.iter().map(|s| s.exp()).sum();
                let p: Vec<f64> = scores.iter().map(|s| s.exp() / sum).collect();
                let dp: Vec<f64> = (0..=row).map(|s| inner(&d, &source(s))).collect();
                let mean = inner(&p, &dp);
                for s in 0..=row {
                    let (v, ds) = (source(s), p[s] * (dp[s] - mean));
                    for c in 0..width {
                        u[n * width + c] += p[s] * v[c];
                        let back = ds * root(&v) * (q[c] - scores[s] * root(&v) * v[c] / width as f64);
                        dq[n * width + c] += ds * root(&v) * v[c];
                        match s == row {
                            true => dx[n * width + c] += p[s] * d[c] + back,
                            false => dv[(s * rows + n) * width + c] += p[s] * d[c] + back,
                        }
                    }
                }
            }
            close("u", out[4].f(), &u);
            let zeros = || F(vec![0.0; du.len()]);
            let backward = [&operands[..], &[F(du.clone()), zeros(), zeros(), F(before)]].concat();
            let (out, count) = launch(Kernel::ReadSourcesGrad(kernel::ReadSourcesGrad(shape)), &backward);
            assert_eq!(count, (6 * (row + 1) * du.len()) as u64);
            close("dx", out[5].f(), &dx);
            close("dq", out[6].f(), &dq);
            close("dsources", out[7].f(), &dv);
        }
    }
}

/// The CPU's results for an instance of one operation, and those of its definition in f64.
pub(super) fn check_instance(i: &ir::random::Instance) {
    check_instance_by(i, &|kernel, operands| launch_wide(kernel, operands));
}

/// A launch, which gives the operands after it, and its multiply-adds.
pub(super) type Launching<'a> = dyn Fn(Kernel, &[Value]) -> (Vec<Value>, u64) + 'a;

/// The same of another launch.
pub(super) fn check_instance_by(i: &ir::random::Instance, run: &Launching) {
    use dreamc_compiler::ir::interpret::{Data, interpret};
    use dreamc_compiler::schedule::{Bind, LocalOperand, Place, View, schedule};
    let f = &i.function;
    let stored =
        |(port, _): &(ir::Port, ir::Value)| f.state_of(port).map_or(Bind::Store, |p| Bind::State(p.0));
    let bind: Vec<Bind> = f.results.iter().map(stored).collect();
    let scheduled = schedule(&i.module, f, &bind).unwrap_or_else(|e| panic!("{e}\n{}", i.module));
    let [launch] = &scheduled.launches[..] else { panic!("one launch\n{}", i.module) };
    let view = |operand: &LocalOperand| match *operand {
        LocalOperand::View(View { place, .. }) => place,
        LocalOperand::Index(_) => panic!("an index\n{}", i.module),
    };
    let places: Vec<Place> = launch.operands.iter().map(view).collect();
    let operand = |(place, slot): (&Place, &Slot)| match *place {
        Place::Param(p) => match &i.args[p as usize].data {
            Data::Float(x) => F(x.iter().map(|x| *x as f32).collect()),
            Data::Int(x) => I(x.clone()),
        },
        Place::Result(_) | Place::Temp(_) => F(vec![f32::NAN; slot.elements() as usize]),
    };
    let operands: Vec<Value> = places.iter().zip(&launch.kernel.signature()).map(operand).collect();
    // The numbers that the device sees.
    let rounded = |t: &ir::Tensor| match &t.data {
        Data::Float(x) => ir::Tensor::float(&t.dims, x.iter().map(|x| f64::from(*x as f32)).collect()),
        Data::Int(_) => t.clone(),
    };
    let args: Vec<ir::Tensor> = i.args.iter().map(rounded).collect();
    let expected = interpret(&i.module, f, &args).unwrap();
    let (out, count) = run(launch.kernel.clone(), &operands);
    let work = launch.kernel.work();
    assert_eq!(u128::from(count), work.fixed.multiply_adds, "{}", i.module);
    for (k, (name, tensor)) in expected.iter().enumerate() {
        let own = |p: &Place| match *p {
            Place::Result(r) => r as usize == k,
            Place::Param(p) => f.params[p as usize].name == *name,
            Place::Temp(_) => false,
        };
        let at = places.iter().position(own).unwrap_or_else(|| panic!("no place of {name}\n{}", i.module));
        close(&format!("{name} of {}", i.module), out[at].f(), tensor.floats());
    }
}

/// Every case of operations over the sequence: documents, tokens that take no part, states.
#[test]
fn operations_over_the_sequence() {
    let names = ["conv", "conv_grad", "running", "recurrence", "recurrence_grad"];
    for name in [&names[..], &["linear_attention", "linear_attention_grad"]].concat() {
        for entry in ir::random::table().iter().filter(|e| e.name == name) {
            (0..40).for_each(|seed| check_instance(&entry.instance(seed)));
        }
    }
}

/// Tiles of every shape, of rows that end inside one, and of groups, in f32 and bf16: the bits of
/// the definition. Numbers are of every size, some are infinite or none.
#[test]
fn tiles_of_e4m3() {
    use dreamc_compiler::ir::interpret::evaluate;
    use dreamc_compiler::ir::{Module, Tensor, Type};
    use dreamc_compiler::op::Fp8;
    use half::bf16;
    let mut r = Random(11);
    let offsets = vec![0, 100, 100, 240];
    let shapes = [
        ([1, 37, 300], [1, 128], false),
        ([2, 150, 260], [128, 1], false),
        ([3, 130, 140], [128, 128], false),
        ([1, 300, 70], [128, 1], true),
        ([1, 300, 1030], [3, 5], true),
        ([2, 5, 1], [2, 128], false),
    ];
    for ([matrices, rows, columns], tile, groups) in shapes {
        let mut x = r.floats(matrices * rows * columns);
        x.iter_mut().for_each(|x| *x *= [1e-30, 1e-6, 1e-2, 1.0, 1e4][r.below(5)]);
        let count = x.len();
        if count > 1000 {
            (x[3], x[count / 2], x[count - 1]) = (f32::NAN, f32::INFINITY, 0.0);
        }
        let mut module = Module::default();
        let sizes = [("m", matrices), ("r", rows), ("c", columns), ("e1", offsets.len())];
        let [m, down, c, ends] = sizes.map(|(name, size)| module.dim(name, size as u64));
        let all = if groups { vec![down, c] } else { vec![m, down, c] };
        let op = Fp8 { outer: all.len() as u64 - 2, down: 1, tile, groups, ..Fp8::default() };
        let kernel = kernel::Fp8 {
            matrices: matrices as u64,
            rows: rows as u64,
            columns: columns as u64,
            tile,
            groups: groups.then_some(offsets.len() as u64 - 1),
            e4m3: false,
            turned: false,
        };
        for narrow in [false, true] {
            let x: Vec<f32> =
                x.iter().map(|x| if narrow { bf16::from_f32(*x).to_f32() } else { *x }).collect();
            let dims: Vec<usize> = all.iter().map(|d| module.size(*d) as usize).collect();
            let mut args = vec![Tensor::float(&dims, wide(&x))];
            let mut types = vec![Type::f32(&all)];
            let mut operands = vec![F(x.clone())];
            if groups {
                args.push(Tensor::int(&[offsets.len()], offsets.clone()));
                types.push(Type::i32(&[ends]));
                operands.push(I(offsets.clone()));
            }
            operands.push(F(vec![f32::NAN; count]));
            let of = types.iter().collect::<Vec<_>>();
            let expected = evaluate(&module, &op.into(), &of, &args).unwrap().0.remove(0);
            let mut plan = plan_of(&kernel.into(), &operands);
            plan.buffers.last_mut().unwrap().dtype = DType::Bf16;
            if narrow {
                plan.buffers[0].dtype = DType::Bf16;
            }
            let mut session = session(&plan, 2);
            match narrow {
                false => session.write_at(BufferId(0), 0, 0, &x),
                true => {
                    let x: Vec<bf16> = x.iter().map(|x| bf16::from_f32(*x)).collect();
                    session.write_at(BufferId(0), 0, 0, &x)
                }
            }
            .unwrap();
            if groups {
                session.write_at(BufferId(1), 0, 0, &offsets).unwrap();
            }
            session.run(ProgramKey::ALONE).unwrap();
            let found = session.read_all::<bf16>(BufferId(1 + u32::from(groups))).unwrap();
            for (at, (found, expected)) in found.iter().zip(expected.floats()).enumerate() {
                let same = found.to_f64() == *expected || (found.is_nan() && expected.is_nan());
                assert!(same, "{kernel:?} {narrow}: {found} for {expected} at {at}, of {}", x[at]);
            }
        }
    }
}

#[test]
fn caches() {
    let mut r = Random(8);
    let (width, parts, rows) = (60, 5, 4);
    let (length, stride) = (width / parts, 15);
    let x = r.floats(parts * stride);
    let cache = r.floats(rows * width);
    let kernel = Kernel::CacheWrite(kernel::CacheWrite { width: width as u64, parts: parts as u64 });
    let (out, _) = launch(kernel, &[Strided(x.clone(), stride as u64), Index(2), F(cache.clone())]);
    let mut expected = cache.clone();
    for i in 0..width {
        expected[2 * width + i] = x[i / length * stride + i % length];
    }
    assert_eq!(out[2].f(), expected);
    let kernel = Kernel::CacheTake(kernel::CacheTake { width: width as u64, parts: parts as u64 });
    let (out, _) =
        launch(kernel, &[Index(2), F(expected.clone()), Strided(vec![0.0; x.len()], stride as u64)]);
    for i in 0..width {
        assert_eq!(out[2].f()[i / length * stride + i % length], expected[2 * width + i]);
    }
    expected[2 * width..3 * width].fill(0.0);
    assert_eq!(out[1].f(), expected);
}

#[test]
fn append() {
    let mut r = Random(14);
    let (sequences, tokens, places, width) = (3, 4, 6, 5);
    let (x, cache) = (r.floats(sequences * tokens * (width + 2)), r.floats(sequences * places * width));
    let mut slots = r.ints(sequences * tokens, places);
    slots[1] = -1;
    let mut expected = cache.clone();
    for (row, &slot) in slots.iter().enumerate().filter(|(_, s)| **s >= 0) {
        let at = (row / tokens * places + slot as usize) * width;
        expected[at..at + width].copy_from_slice(&x[row * (width + 2)..][..width]);
    }
    let [rows, tokens, places, width] = [sequences * tokens, tokens, places, width].map(|n| n as u64);
    let operands = [Strided(x, width + 2), I(slots), F(cache)];
    let (out, _) = launch(Kernel::Append(kernel::Append { rows, tokens, places, width }), &operands);
    assert_eq!(out[2].f(), expected);
}

#[test]
fn embedding() {
    let mut r = Random(9);
    for (rows, vocab, width) in [(1, 1, 1), (100, 7, 33), (50, 400, 20)] {
        let (table, ids, d) = (r.floats(vocab * width), r.ints(rows, vocab), r.floats(rows * width));
        let [rows64, vocab64, width64] = [rows, vocab, width].map(|n| n as u64);
        let kernel = Kernel::Embed(kernel::Embed { rows: rows64, vocab: vocab64, width: width64 });
        let (out, _) = launch(kernel, &[F(table.clone()), I(ids.clone()), F(vec![0.0; rows * width])]);
        for row in 0..rows {
            assert_eq!(out[2].f()[row * width..][..width], table[ids[row] as usize * width..][..width]);
        }
        for accumulate in [false, true] {
            let kernel = Kernel::EmbedGrad(kernel::EmbedGrad {
                rows: rows64,
                vocab: vocab64,
                width: width64,
                accumulate,
            });
            let (out, _) = launch(kernel, &[F(d.clone()), I(ids.clone()), F(table.clone())]);
            let mut expected = if accumulate { wide(&table) } else { vec![0.0; table.len()] };
            for i in 0..d.len() {
                expected[ids[i / width] as usize * width + i % width] += d[i] as f64;
            }
            close("table", out[2].f(), &expected);
        }
    }
}

/// Loss and gradient of logits in f64.
fn cross_entropy_exact(logits: &[f64], target: i32, d: f64) -> (f64, f64, Vec<f64>) {
    let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let lse = most + logits.iter().map(|z| (z - most).exp()).sum::<f64>().ln();
    if target < 0 {
        return (0.0, lse, vec![0.0; logits.len()]);
    }
    let mut grad: Vec<f64> = logits.iter().map(|z| d * (z - lse).exp()).collect();
    grad[target as usize] -= d;
    (lse - logits[target as usize], lse, grad)
}

#[test]
fn cross_entropy() {
    let mut r = Random(10);
    for (rows, vocab) in [(1, 1), (40, 17), (9, 700)] {
        let logits: Vec<f32> = r.floats(rows * vocab).iter().map(|x| x * 9.0).collect();
        let mut targets = r.ints(rows, vocab);
        targets[rows / 2] = -1;
        let d = r.floats(rows);
        let [rows64, vocab64] = [rows, vocab].map(|n| n as u64);
        let (mut nll, mut lse, mut grad) = (vec![], vec![], vec![]);
        for row in 0..rows {
            let exact =
                cross_entropy_exact(&wide(&logits[row * vocab..][..vocab]), targets[row], d[row] as f64);
            nll.push(exact.0);
            lse.push(exact.1);
            grad.extend(exact.2);
        }
        let kernel = Kernel::CrossEntropy(kernel::CrossEntropy { rows: rows64, vocab: vocab64 });
        let operands = [F(logits.clone()), I(targets.clone()), F(vec![3.0; rows]), F(vec![3.0; rows])];
        let (out, _) = launch(kernel, &operands);
        close("nll", out[2].f(), &nll);
        close("lse", out[3].f(), &lse);
        let kernel = Kernel::CrossEntropyGrad(kernel::CrossEntropyGrad { rows: rows64, vocab: vocab64 });
        let operands = [F(logits.clone()), I(targets), out[3].clone(), F(d), F(vec![3.0; rows * vocab])];
        let (out, _) = launch(kernel, &operands);
        close("dlogits", out[4].f(), &grad);
    }
}

#[test]
fn head_loss() {
    let mut r = Random(11);
    for (rows, vocab, width, softcap) in [
        (1, 1, 1, None),
        (100, 300, 20, None),
        (97, 513, 33, Some(2.0)),
        (5, 40_000, 3, None),
        (300, 30_000, 2, Some(5.0)),
    ] {
        let (x, w, d) = (r.floats(rows * width), r.floats(vocab * width), r.floats(rows));
        let mut targets = r.ints(rows, vocab);
        targets[rows / 2] = -100;
        let (mut nll, mut lse, mut dx) = (vec![], vec![], vec![0.0; x.len()]);
        let before = r.floats(w.len());
        let mut dw = vec![0.0; w.len()];
        for row in 0..rows {
            let z: Vec<f64> = (0..vocab)
                .map(|j| (0..width).map(|i| x[row * width + i] as f64 * w[j * width + i] as f64).sum())
                .collect();
            let capped: Vec<f64> =
                z.iter().map(|z| softcap.map_or(*z, |c: f64| c * (z / c).tanh())).collect();
            let exact = cross_entropy_exact(&capped, targets[row], d[row] as f64);
            nll.push(exact.0);
            lse.push(exact.1);
            for j in 0..vocab {
                let slope = softcap.map_or(1.0, |c| 1.0 - (capped[j] / c) * (capped[j] / c));
                for i in 0..width {
                    dx[row * width + i] += exact.2[j] * slope * w[j * width + i] as f64;
                    dw[j * width + i] += exact.2[j] * slope * x[row * width + i] as f64;
                }
            }
        }
        let [rows64, vocab64, width64] = [rows, vocab, width].map(|n| n as u64);
        let kernel = Kernel::HeadLoss(kernel::HeadLoss {
            rows: rows64,
            vocab: vocab64,
            width: width64,
            softcap: softcap.map(Bits),
            stored: false,
        });
        let empty = || F(vec![3.0; rows]);
        let (out, count) =
            launch(kernel, &[F(x.clone()), F(w.clone()), I(targets.clone()), empty(), empty()]);
        assert_eq!(count, (rows * vocab * width) as u64);
        close("nll", out[3].f(), &nll);
        close("lse", out[4].f(), &lse);
        for accumulate in [false, true] {
            let kernel = Kernel::HeadLossGrad(kernel::HeadLossGrad {
                rows: rows64,
                vocab: vocab64,
                width: width64,
                softcap: softcap.map(Bits),
                accumulate,
            });
            let operands = [
                F(x.clone()),
                F(w.clone()),
                I(targets.clone()),
                out[4].clone(),
                F(d.clone()),
                F(vec![3.0; x.len()]),
                F(before.clone()),
            ];
            let (out, count) = launch(kernel, &operands);
            assert_eq!(count, (3 * rows * vocab * width) as u64);
            close("dx", out[5].f(), &dx);
            let start = if accumulate { wide(&before) } else { vec![0.0; w.len()] };
            let expected: Vec<f64> = start.iter().zip(&dw).map(|(s, d)| s + d).collect();
            close("dw", out[6].f(), &expected);
        }
    }
}

#[test]
fn zero_copy_norm() {
    let mut r = Random(12);
    for n in [1, 100, 40_000] {
        let (x, y) = (r.floats(n), r.floats(n));
        let elements = n as u64;
        assert_eq!(launch(Kernel::Zero(kernel::Zero { elements }), &[F(x.clone())]).0[0].f(), vec![0.0; n]);
        let (out, _) =
            launch(Kernel::Copy(kernel::Copy { elements, accumulate: false }), &[F(x.clone()), F(y.clone())]);
        assert_eq!(out[1].f(), x);
        let (out, _) =
            launch(Kernel::Copy(kernel::Copy { elements, accumulate: true }), &[F(x.clone()), F(y.clone())]);
        close("sum", out[1].f(), &(0..n).map(|i| x[i] as f64 + y[i] as f64).collect::<Vec<_>>());
        let (out, _) = launch(Kernel::Norm(kernel::Norm { elements }), &[F(x.clone()), F(vec![0.0])]);
        close("norm", out[1].f(), &[wide(&x).iter().map(|x| x * x).sum::<f64>().sqrt()]);
    }
}

#[test]
fn balance() {
    let cases: [(&[f32], BalanceTarget, BalanceLaw, &[f64]); 4] = [
        (&[5.0, 1.0, 3.0], BalanceTarget::Median, BalanceLaw::Sign, &[-1.0, 1.0, 0.0]),
        (&[5.0, 1.0, 3.0, 2.0], BalanceTarget::Median, BalanceLaw::Sign, &[-1.0, 1.0, -1.0, 1.0]),
        (&[6.0, 2.0, 4.0], BalanceTarget::Mean, BalanceLaw::Proportional, &[-0.5, 0.5, 0.0]),
        (&[0.0, 0.0], BalanceTarget::Mean, BalanceLaw::Proportional, &[0.0, 0.0]),
    ];
    for (counts, target, law, steps) in cases {
        let balance = Balance { rate: 0.25, target, law };
        let kernel = Kernel::Balance(kernel::Balance {
            experts: counts.len() as u64,
            rate: Bits(balance.rate),
            target: balance.target,
            law: balance.law,
        });
        let (out, _) = launch(kernel, &[F(vec![1.0; counts.len()]), F(counts.to_vec())]);
        close("bias", out[0].f(), &steps.iter().map(|s| 1.0 + 0.25 * s).collect::<Vec<_>>());
        assert_eq!(out[1].f(), vec![0.0; counts.len()]);
    }
}

mod row_kernels {
    use super::*;

    /// A row kernel in f64: arrays of one row.
    fn evaluate(kernel: &RowKernel, inputs: &[Vec<f64>], indices: &[i64]) -> Vec<Vec<f64>> {
        let mut arrays: Vec<Vec<f64>> = vec![];
        for (i, op) in kernel.ops.iter().enumerate() {
            let n = kernel.lengths[i] as usize;
            let x = |a: u32| &arrays[a as usize];
            let by_group = |a: &[f64], size: u64, f: &dyn Fn(usize, &[f64]) -> Vec<f64>| -> Vec<f64> {
                a.chunks(size as usize).enumerate().flat_map(|(g, a)| f(g, a)).collect()
            };
            let result: Vec<f64> = match op {
                RowOp::Load { input } => inputs[*input as usize].clone(),
                RowOp::Constant(c) => vec![c.0; n],
                RowOp::Index { input } => vec![indices[*input as usize] as f64; n],
                RowOp::Zeros => vec![0.0; n],
                RowOp::Unary(op, a) => x(*a).iter().map(|&x| op.apply(x)).collect(),
                RowOp::Binary { op, a, b, broadcast, small_first } => {
                    let (large, small) = if *small_first { (x(*b), x(*a)) } else { (x(*a), x(*b)) };
                    let spread = |i: usize| small[i / broadcast.inner as usize % broadcast.size as usize];
                    (0..n)
                        .map(|i| {
                            let (l, s) = (large[i], spread(i));
                            let (a, b) = if *small_first { (s, l) } else { (l, s) };
                            match op {
                                ir::Binary::Add => a + b,
                                ir::Binary::Sub => a - b,
                                ir::Binary::Mul => a * b,
                                ir::Binary::Div => a / b,
                                ir::Binary::Max => a.max(b),
                                ir::Binary::Where => a * f64::from(u8::from(b != 0.0)),
                            }
                        })
                        .collect()
                }
                RowOp::Reduce { op, x: a, over } => (0..n)
                    .map(|i| {
                        let (o, inner) = (i / over.inner as usize, i % over.inner as usize);
                        let terms = (0..over.size as usize)
                            .map(|s| x(*a)[(o * over.size as usize + s) * over.inner as usize + inner]);
                        match op {
                            Reduce::Sum => terms.sum(),
                            Reduce::Mean => terms.sum::<f64>() / over.size as f64,
                            Reduce::Max => terms.fold(f64::NEG_INFINITY, f64::max),
                        }
                    })
                    .collect(),
                RowOp::Rms { x: a, size, eps } => by_group(x(*a), *size, &|_, a| {
                    let r = (a.iter().map(|x| x * x).sum::<f64>() / a.len() as f64 + eps.0).sqrt();
                    a.iter().map(|x| x / r).collect()
                }),
                RowOp::RmsGrad { x: a, dy, size, eps } => by_group(x(*a), *size, &|g, a| {
                    let dy = &x(*dy)[g * a.len()..][..a.len()];
                    let r = 1.0 / (a.iter().map(|x| x * x).sum::<f64>() / a.len() as f64 + eps.0).sqrt();
                    let along = a.iter().zip(dy).map(|(x, d)| x * d).sum::<f64>() / a.len() as f64;
                    a.iter().zip(dy).map(|(x, d)| r * d - x * r * r * r * along).collect()
                }),
                RowOp::Softmax { x: a, size } => by_group(x(*a), *size, &|_, a| {
                    let most = a.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let sum: f64 = a.iter().map(|x| (x - most).exp()).sum();
                    a.iter().map(|x| (x - most).exp() / sum).collect()
                }),
                RowOp::SoftmaxGrad { y, dy, size } => by_group(x(*y), *size, &|g, y| {
                    let dy = &x(*dy)[g * y.len()..][..y.len()];
                    let along: f64 = y.iter().zip(dy).map(|(y, d)| y * d).sum();
                    y.iter().zip(dy).map(|(y, d)| y * (d - along)).collect()
                }),
                RowOp::Rope { x: a, size, rope, position, depths } => by_group(x(*a), *size, &|_, a| {
                    let half = a.len() / 2;
                    let mut out = a.to_vec();
                    for i in 0..half {
                        let p = match rope.positions {
                            Positions::Tokens => inputs[*position as usize][0],
                            Positions::Depth { half_reversed: true } if i % 2 == 1 => {
                                (indices[*depths as usize] - 1 - indices[*position as usize]) as f64
                            }
                            Positions::Depth { .. } => indices[*position as usize] as f64,
                        };
                        let angle = p * rope.frequency(i as u64, half as u64);
                        let (s, c) = if rope.inverse { (-angle).sin_cos() } else { angle.sin_cos() };
                        out[i] = a[i] * c - a[i + half] * s;
                        out[i + half] = a[i + half] * c + a[i] * s;
                    }
                    out
                }),
                RowOp::Slice { x: a, size, start } => {
                    let taken = n * *size as usize / x(*a).len();
                    by_group(x(*a), *size, &|_, a| a[*start as usize..][..taken].to_vec())
                }
                RowOp::Concat { parts, groups } => (0..*groups as usize)
                    .flat_map(|g| {
                        parts.iter().flat_map(move |&p| {
                            let size = x(p).len() / *groups as usize;
                            x(p)[g * size..][..size].to_vec()
                        })
                    })
                    .collect(),
                RowOp::Pick { table, chosen } => {
                    inputs[*chosen as usize].iter().map(|&c| x(*table)[c as usize]).collect()
                }
                RowOp::PickGrad { d, chosen } => {
                    let mut out = vec![0.0; n];
                    inputs[*chosen as usize].iter().zip(x(*d)).for_each(|(&c, &d)| out[c as usize] = d);
                    out
                }
            };
            assert_eq!(result.len(), n, "operation {i}");
            arrays.push(result);
        }
        arrays
    }

    /// Builds row kernels and their operands.
    #[derive(Clone)]
    struct Build {
        kernel: RowKernel,
        operands: Vec<Value>,
        random: u64,
    }

    impl Build {
        fn new(rows: u64, random: u64) -> Self {
            let kernel = RowKernel { rows, inputs: vec![], ops: vec![], lengths: vec![], outputs: vec![] };
            Build { kernel, operands: vec![], random }
        }

        fn op(&mut self, op: RowOp, length: u64) -> u32 {
            self.kernel.ops.push(op);
            self.kernel.lengths.push(length);
            self.kernel.ops.len() as u32 - 1
        }

        fn input(&mut self, input: RowInput, value: Value) -> u32 {
            self.kernel.inputs.push(input);
            self.operands.push(value);
            self.operands.len() as u32 - 1
        }

        /// Loads a random input, strided by `gap` more than its length.
        fn row(&mut self, length: u64, gap: u64) -> u32 {
            self.random += 1;
            let stride = length + gap;
            let x = Random(self.random).floats((self.kernel.rows * stride) as usize);
            let input = self.input(RowInput::Row { length, dtype: DType::F32 }, Strided(x, stride));
            self.op(RowOp::Load { input }, length)
        }

        fn shared(&mut self, length: u64) -> u32 {
            self.random += 1;
            let x = Random(self.random).floats(length as usize);
            let input = self.input(RowInput::Shared { length, dtype: DType::F32 }, F(x));
            self.op(RowOp::Load { input }, length)
        }

        fn ints(&mut self, length: u64, below: usize) -> u32 {
            self.random += 1;
            // Different ones within a row.
            let mut r = Random(self.random);
            let rows = (0..self.kernel.rows).flat_map(|_| {
                let first = r.below(below);
                (0..length as usize).map(move |i| ((first + i) % below) as i32)
            });
            let x = rows.collect();
            self.input(RowInput::RowInts { length }, I(x))
        }

        fn store(&mut self, array: u32, store: RowStore) {
            self.kernel.outputs.push(RowOutput { array, dtype: DType::F32, store });
        }

        /// Runs it and compares every output.
        fn check(&self) {
            let kernel = &self.kernel;
            let rows = kernel.rows as usize;
            let mut operands = self.operands.clone();
            let mut r = Random(99);
            for output in &kernel.outputs {
                let n = kernel.lengths[output.array as usize] as usize;
                operands.push(match output.store {
                    RowStore::Row | RowStore::AddRow => Strided(r.floats(rows * (n + 1)), n as u64 + 1),
                    RowStore::Sum | RowStore::AddSum => F(r.floats(n)),
                });
            }
            let (out, _) = launch(Kernel::Rows(kernel.clone()), &operands);
            let before = &operands[kernel.inputs.len()..];
            let mut expected: Vec<Vec<f64>> = before.iter().map(|v| wide(v.f())).collect();
            for (output, e) in kernel.outputs.iter().zip(&mut expected) {
                if output.store == RowStore::Sum {
                    e.fill(0.0);
                }
            }
            for row in 0..rows {
                let mut inputs = vec![];
                let mut indices = vec![];
                for (input, value) in kernel.inputs.iter().zip(&operands) {
                    inputs.push(match (*input, value) {
                        (RowInput::Row { length, .. }, Strided(x, s)) => {
                            wide(&x[row * *s as usize..][..length as usize])
                        }
                        (RowInput::RowInts { length }, I(x)) => {
                            x[row * length as usize..][..length as usize].iter().map(|&i| i as f64).collect()
                        }
                        (_, F(x)) => wide(x),
                        _ => vec![],
                    });
                    indices.push(if let Index(i) = value { *i as i64 } else { 0 });
                }
                let arrays = evaluate(kernel, &inputs, &indices);
                for (output, e) in kernel.outputs.iter().zip(&mut expected) {
                    let x = &arrays[output.array as usize];
                    for (i, x) in x.iter().enumerate() {
                        match output.store {
                            RowStore::Row => e[row * (arrays[output.array as usize].len() + 1) + i] = *x,
                            RowStore::AddRow => e[row * (arrays[output.array as usize].len() + 1) + i] += x,
                            RowStore::Sum | RowStore::AddSum => e[i] += x,
                        }
                    }
                }
            }
            for (i, e) in expected.iter().enumerate() {
                close(&format!("output {i} of {:?}", kernel.ops), out[kernel.inputs.len() + i].f(), e);
            }
        }
    }

    /// Row counts around the borders of blocks.
    const ROWS: [u64; 4] = [1, 63, 130, 700];

    #[test]
    fn element_wise() {
        use Unary::{Recip, Square};
        for rows in ROWS {
            for length in [1, 7, 96] {
                let mut b = Build::new(rows, rows + length);
                let x = b.row(length, 3);
                let square = b.op(RowOp::Unary(Square, x), length);
                let one = b.op(RowOp::Constant(Bits(0.5)), 1);
                let broadcast = Broadcast { outer: length, size: 1, inner: 1 };
                let op =
                    RowOp::Binary { op: ir::Binary::Add, a: square, b: one, broadcast, small_first: false };
                let positive = b.op(op, length);
                // On numbers of either sign, unless that is nothing.
                for &op in Unary::ALL {
                    let of = if op.apply(-1.0).is_nan() || op == Recip { positive } else { x };
                    let y = b.op(RowOp::Unary(op, of), length);
                    b.store(y, RowStore::Row);
                }
                b.check();
            }
        }
    }

    #[test]
    fn broadcasts_and_reductions() {
        for (rows, (outer, size, inner)) in
            ROWS.into_iter().zip([(1, 5, 1), (3, 16, 1), (4, 3, 17), (2, 1, 20)])
        {
            let broadcast = Broadcast { outer, size, inner };
            let n = outer * size * inner;
            let mut b = Build::new(rows, n);
            let large = b.row(n, 0);
            let small = b.row(size, 1);
            let gain = b.shared(size);
            for &op in ir::Binary::ALL {
                for (small, small_first) in [(small, false), (small, true), (gain, false)] {
                    let (l, s) = if small_first { (small, large) } else { (large, small) };
                    let y = b.op(RowOp::Binary { op, a: l, b: s, broadcast, small_first }, n);
                    // Quotients by numbers near 0 would drown the other elements of the comparison.
                    let y = if op == ir::Binary::Div { b.op(RowOp::Unary(Unary::Tanh, y), n) } else { y };
                    b.store(y, RowStore::AddRow);
                }
            }
            for op in [Reduce::Sum, Reduce::Mean, Reduce::Max] {
                let y = b.op(RowOp::Reduce { op, x: large, over: broadcast }, outer * inner);
                b.store(y, RowStore::Row);
            }
            b.check();
        }
    }

    #[test]
    fn norms_softmax_and_sums() {
        for (rows, (groups, size)) in ROWS.into_iter().zip([(1, 1), (3, 20), (1, 130), (8, 32)]) {
            let n = groups * size;
            let mut b = Build::new(rows, n + 7);
            let (x, dy) = (b.row(n, 0), b.row(n, 2));
            let y = b.op(RowOp::Rms { x, size, eps: Bits(1e-3) }, n);
            let dx = b.op(RowOp::RmsGrad { x, dy, size, eps: Bits(1e-3) }, n);
            let p = b.op(RowOp::Softmax { x, size }, n);
            let dp = b.op(RowOp::SoftmaxGrad { y: p, dy, size }, n);
            let zeros = b.op(RowOp::Zeros, 3);
            for array in [y, dx, p, dp, x, zeros] {
                b.store(array, RowStore::Row);
            }
            b.store(y, RowStore::Sum);
            b.store(dp, RowStore::AddSum);
            b.store(y, RowStore::Row);
            b.check();
        }
    }

    #[test]
    fn rotations() {
        for (rows, (groups, size)) in ROWS.into_iter().zip([(1, 2), (3, 16), (5, 64), (2, 6)]) {
            let n = groups * size;
            let mut b = Build::new(rows, n);
            let x = b.row(n, 1);
            let position = b.ints(1, 100_000);
            let depth = b.input(RowInput::Index, Index(3));
            let depths = b.input(RowInput::Index, Index(11));
            let scaling =
                ir::RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original_context: 100.0 };
            for (positions, scaling, inverse) in [
                (Positions::Tokens, None, false),
                (Positions::Tokens, Some(scaling), true),
                (Positions::Depth { half_reversed: false }, None, true),
                (Positions::Depth { half_reversed: true }, None, false),
            ] {
                let rope = Rope { base: 500.0, positions, scaling, chosen: None, inverse };
                let position = if positions == Positions::Tokens { position } else { depth };
                let y = b.op(RowOp::Rope { x, size, rope, position, depths }, n);
                b.store(y, RowStore::Row);
            }
            b.check();
        }
    }

    #[test]
    fn rearrangements() {
        for rows in ROWS {
            let mut b = Build::new(rows, rows);
            let x = b.row(60, 0);
            let chosen = b.ints(4, 60);
            let whole = b.op(RowOp::Slice { x, size: 60, start: 13 }, 20);
            let grouped = b.op(RowOp::Slice { x, size: 15, start: 2 }, 20);
            let joined = b.op(RowOp::Concat { parts: vec![whole, grouped, x], groups: 4 }, 100);
            let picked = b.op(RowOp::Pick { table: x, chosen }, 4);
            let spread = b.op(RowOp::PickGrad { d: picked, chosen }, 60);
            let twice = b.op(RowOp::Unary(Unary::Neg, whole), 20);
            for array in [grouped, joined, picked, spread, twice] {
                b.store(array, RowStore::Row);
            }
            b.check();
            b.store(whole, RowStore::Row);
            b.check();
        }
    }

    /// A chain long enough that arrays take each other's places.
    /// SiLU and its derivative are computed where the first of them is; the memory of the other is
    /// not an array's that comes and goes before it is read.
    #[test]
    fn silu_and_its_derivative() {
        for (rows, length) in [(1, 64), (130, 7), (700, 96)] {
            for [first, second] in [[Unary::Silu, Unary::SiluGrad], [Unary::SiluGrad, Unary::Silu]] {
                let mut b = Build::new(rows, rows + length);
                let (x, z) = (b.row(length, 3), b.row(length, 0));
                let broadcast = Broadcast { outer: 1, size: length, inner: 1 };
                let binary = |op, a, b| RowOp::Binary { op, a, b, broadcast, small_first: false };
                let y = b.op(RowOp::Unary(first, x), length);
                let between = b.op(binary(ir::Binary::Mul, y, z), length);
                let between = b.op(binary(ir::Binary::Sub, between, z), length);
                let later = b.op(RowOp::Unary(second, x), length);
                let both = b.op(binary(ir::Binary::Mul, later, between), length);
                b.store(both, RowStore::Row);
                b.store(both, RowStore::Sum);
                b.check();
            }
        }
    }

    #[test]
    fn long_chains() {
        let mut b = Build::new(300, 5);
        let mut arrays = vec![b.row(50, 0), b.row(50, 4)];
        let mut r = Random(77);
        for i in 0..40 {
            let recent = arrays.len().saturating_sub(6);
            let pick = |r: &mut Random| arrays[recent + r.below(arrays.len() - recent)];
            let (x, y) = (pick(&mut r), pick(&mut r));
            let broadcast = Broadcast { outer: 1, size: 50, inner: 1 };
            arrays.push(if i % 3 == 0 {
                b.op(RowOp::Unary(Unary::Tanh, x), 50)
            } else {
                b.op(RowOp::Binary { op: ir::Binary::Add, a: x, b: y, broadcast, small_first: false }, 50)
            });
        }
        let last = arrays[arrays.len() - 1];
        b.store(arrays[20], RowStore::Row);
        b.store(last, RowStore::Row);
        b.check();
    }

    /// Outputs over inputs, crosswise, and bf16 on both sides.
    #[test]
    fn in_place_and_bf16() {
        let mut kernel = RowKernel {
            rows: 200,
            inputs: vec![RowInput::Row { length: 9, dtype: DType::F32 }; 2],
            ops: vec![RowOp::Load { input: 0 }, RowOp::Load { input: 1 }, RowOp::Unary(Unary::Neg, 0)],
            lengths: vec![9; 3],
            outputs: vec![
                RowOutput { array: 2, dtype: DType::F32, store: RowStore::Row },
                RowOutput { array: 0, dtype: DType::F32, store: RowStore::Row },
            ],
        };
        let mut plan = plan_of(&Kernel::Rows(kernel.clone()), &vec![F(vec![0.0; 1800]); 4]);
        let tensor =
            |i| Operand::Tensor { buffer: BufferId(i), instance: Affine::default(), offset: 0, stride: 9 };
        let operands = |plan: &mut Plan, list: [u32; 4]| {
            let Step::Launch(l) = &mut plan.programs[0].steps[0] else { panic!() };
            l.operands = list.map(tensor).to_vec();
        };
        operands(&mut plan, [0, 1, 2, 2]);
        let error = CpuDevice::default().load(&plan, &Group::alone()).err().unwrap();
        assert!(error.to_string().contains("overlap"), "{error}");
        operands(&mut plan, [0, 1, 1, 0]);
        let mut session = session(&plan, 2);
        let (x, y) = (Random(1).floats(1800), Random(2).floats(1800));
        session.write_at(BufferId(0), 0, 0, &x).unwrap();
        session.write_at(BufferId(1), 0, 0, &y).unwrap();
        session.run(ProgramKey::ALONE).unwrap();
        assert_eq!(session.read_all::<f32>(BufferId(0)).unwrap(), x);
        assert_eq!(session.read_all::<f32>(BufferId(1)).unwrap(), x.iter().map(|x| -x).collect::<Vec<_>>());

        kernel.inputs[0] = RowInput::Row { length: 9, dtype: DType::Bf16 };
        kernel.outputs[0].dtype = DType::Bf16;
        let mut plan = plan_of(&Kernel::Rows(kernel), &vec![F(vec![0.0; 1800]); 4]);
        for i in [0, 2] {
            plan.buffers[i].dtype = DType::Bf16;
        }
        let mut session = super::session(&plan, 2);
        let x: Vec<half::bf16> = x.iter().map(|&x| half::bf16::from_f32(x)).collect();
        session.write_at(BufferId(0), 0, 0, &x).unwrap();
        session.run(ProgramKey::ALONE).unwrap();
        assert_eq!(
            session.read_all::<half::bf16>(BufferId(2)).unwrap(),
            x.iter().map(|x| -*x).collect::<Vec<_>>()
        );
        let wide: Vec<f32> = x.iter().map(|x| x.to_f32()).collect();
        assert_eq!(session.read_all::<f32>(BufferId(3)).unwrap(), wide);
    }
}

/// `y[i] = y[i] + x[2 - i]` over a loop backwards, then the norm of all of `y`: instances, offsets,
/// nested loops.
fn looped() -> Plan {
    let mut plan = Plan {
        kernels: vec![
            Kernel::Copy(kernel::Copy { elements: 5, accumulate: true }),
            Kernel::Norm(kernel::Norm { elements: 30 }),
        ],
        ..Plan::default()
    };
    for (name, shape, instances) in [("x", vec![2, 5], 3), ("y", vec![10], 3), ("norm", vec![1], 1)] {
        let b = Buffer {
            name: name.into(),
            space: Space::Io,
            dtype: DType::F32,
            shape,
            instances,
            offset: plan.arena,
        };
        plan.arena += b.bytes().next_multiple_of(ALIGNMENT);
        plan.buffers.push(b);
    }
    let tensor = |buffer, terms: &[(u32, u64)], offset| Operand::Tensor {
        buffer: BufferId(buffer),
        instance: Affine { base: 0, terms: terms.to_vec() },
        offset,
        stride: 0,
    };
    let copy = |offset| {
        let operands = vec![tensor(0, &[(1, 1)], offset), tensor(1, &[(0, 1)], offset)];
        Step::Launch(Launch { kernel: KernelId(0), operands, places: None, origin: "copy".into() })
    };
    let inner = Step::Loop { variable: 1, count: 3, reverse: false, steps: vec![copy(0), copy(5)] };
    let outer = Step::Loop { variable: 0, count: 3, reverse: true, steps: vec![inner] };
    let operands = vec![tensor(1, &[], 0), tensor(2, &[], 0)];
    let norm = Step::Launch(Launch { kernel: KernelId(1), operands, places: None, origin: "norm".into() });
    plan.programs.insert(ProgramKey::ALONE, Program { steps: vec![outer, norm], variables: 2 });
    plan
}

#[test]
fn loops_instances_and_profiles() {
    let plan = looped();
    let mut session = session(&plan, 2);
    let x = Random(3).floats(30);
    session.write_at(plan.find("x").unwrap(), 0, 0, &x[..10]).unwrap();
    session.write_at(plan.find("x").unwrap(), 1, 0, &x[10..]).unwrap();
    let stats = session.run(ProgramKey::ALONE).unwrap();
    assert_eq!((stats.launches, stats.by_launch.len()), (19, 0));
    let y: Vec<f32> = session.read_all(plan.find("y").unwrap()).unwrap();
    let sums: Vec<f64> = (0..30).map(|i| (0..3).map(|j| x[j * 10 + i % 10] as f64).sum()).collect();
    close("y", &y, &sums);
    let mut norm = [0.0];
    session.read_at(plan.find("norm").unwrap(), 0, 0, &mut norm).unwrap();
    close("norm", &norm, &[sums.iter().map(|s| s * s).sum::<f64>().sqrt()]);

    session.instrument(Instrument { count: true, time: true });
    let stats = session.run(ProgramKey::ALONE).unwrap();
    let counts: Vec<_> = stats.by_launch.iter().map(|l| (l.origin.as_str(), l.count)).collect();
    assert_eq!(counts, [("copy", 9), ("copy", 9), ("norm", 1)]);
    assert!(stats.by_launch.iter().all(|l| l.seconds > 0.0));
}

#[test]
fn access_is_checked() {
    let plan = looped();
    let mut session = session(&plan, 1);
    let x = plan.find("x").unwrap();
    assert!(matches!(session.write_at(x, 0, 1, &[0f32; 30]), Err(DeviceError::OutOfBounds { .. })));
    assert!(matches!(session.write_at(x, u64::MAX, 1, &[0f32; 3]), Err(DeviceError::OutOfBounds { .. })));
    assert!(matches!(session.write_at(x, 0, 0, &[0i32; 3]), Err(DeviceError::WrongType { .. })));
    assert!(matches!(session.write(x, 0, 0, &[0; 3]), Err(DeviceError::OutOfBounds { .. })));
    assert!(matches!(session.read_all::<f32>(BufferId(9)), Err(DeviceError::NoBuffer(_))));
    let error = session.run(ProgramKey::UPDATE).unwrap_err();
    assert_eq!(error.to_string(), "no program `update`; there are `launches 0`");
}

/// A plan that is wrong in one way is refused, and the message says in which.
#[test]
fn malformed_plans() {
    fn refused(what: &str, break_it: impl Fn(&mut Plan)) {
        let mut plan = looped();
        break_it(&mut plan);
        match CpuDevice::default().load(&plan, &Group::alone()) {
            Err(DeviceError::Plan(error)) => assert!(error.to_string().contains(what), "{what}: {error}"),
            Err(error) => panic!("{what}: {error}"),
            Ok(_) => panic!("{what}: loaded"),
        }
    }
    fn operand(plan: &mut Plan, i: usize) -> &mut Operand {
        let Step::Launch(launch) = &mut plan.programs[0].steps[1] else { panic!() };
        &mut launch.operands[i]
    }
    fn outer(plan: &mut Plan) -> (&mut u32, &mut u64, &mut Vec<Step>) {
        let Step::Loop { variable, count, steps, .. } = &mut plan.programs[0].steps[0] else { panic!() };
        (variable, count, steps)
    }
    fn operand_of_loop(plan: &mut Plan) -> &mut Operand {
        let Step::Loop { steps, .. } = &mut outer(plan).2[0] else { panic!() };
        let Step::Launch(launch) = &mut steps[0] else { panic!() };
        &mut launch.operands[0]
    }
    refused("it is not aligned", |p| p.buffers[1].offset += 4);
    refused("beyond the arena", |p| p.arena -= ALIGNMENT);
    refused("64 bits", |p| p.buffers[0].shape = vec![u64::MAX, 3]);
    refused("there is no such variable", |p| *outer(p).0 = 7);
    refused("the variable is in use", |p| *outer(p).0 = 1);
    refused("ends at", |p| *outer(p).1 = 4);
    refused("does not fit in 64 bits", |p| {
        let Operand::Tensor { instance, .. } = operand_of_loop(p) else { panic!() };
        instance.terms[0].1 = u64::MAX;
    });
    refused("has no value here", |p| {
        let launch = outer(p).2.remove(0);
        p.programs[0].steps.push(launch);
        let Step::Loop { steps, .. } = p.programs[0].steps.pop().unwrap() else { panic!() };
        p.programs[0].steps.extend(steps);
    });
    refused("no such kernel", |p| p.kernels.truncate(1));
    refused("takes 2 operands, has 3", |p| {
        let Step::Launch(launch) = &mut p.programs[0].steps[1] else { panic!() };
        launch.operands.push(Operand::Index(Affine::default()));
    });
    refused("no such buffer", |p| {
        *operand(p, 0) =
            Operand::Tensor { buffer: BufferId(9), instance: Affine::default(), offset: 0, stride: 0 }
    });
    refused("must be a tensor", |p| *operand(p, 0) = Operand::Index(Affine::default()));
    refused("holds I32, must be F32", |p| p.buffers[2].dtype = DType::I32);
    refused("ends at", |p| p.kernels[1] = Kernel::Norm(kernel::Norm { elements: 31 }));
    refused("overlap", |p| *operand(p, 1) = operand(p, 0).clone());
    refused("`x` holds I32 and `y` Bf16", |p| {
        p.buffers[0].dtype = DType::I32;
        p.buffers[1].dtype = DType::Bf16;
        p.kernels[0] = Kernel::Copy(kernel::Copy { elements: 5, accumulate: false });
        p.programs[0].steps.pop();
    });
    refused("holds I32, must be F32", |p| p.buffers[0].dtype = DType::I32);
    refused("cannot choose more", |p| {
        p.kernels.push(Kernel::Route(kernel::Route { rows: 1, experts: 2, k: 3 }))
    });
    refused("multiple of slots per row", |p| {
        p.kernels.push(Kernel::Gather(kernel::Gather { slots: 3, k: 2, width: 1 }))
    });
    let rows = |ops: Vec<RowOp>, lengths: Vec<u64>| {
        let inputs = vec![RowInput::Row { length: 4, dtype: DType::F32 }];
        Kernel::Rows(RowKernel { rows: 2, inputs, ops, lengths, outputs: vec![] })
    };
    let load = || RowOp::Load { input: 0 };
    refused("1 operations but 0 lengths", |p| p.kernels.push(rows(vec![load()], vec![])));
    refused("length 5 where 4 is right", |p| p.kernels.push(rows(vec![load()], vec![5])));
    refused("there is no input 1", |p| p.kernels.push(rows(vec![RowOp::Load { input: 1 }], vec![4])));
    refused("array 0 is not defined", |p| p.kernels.push(rows(vec![RowOp::Unary(Unary::Neg, 0)], vec![4])));
    refused("not a multiple of 3", |p| {
        p.kernels.push(rows(vec![load(), RowOp::Softmax { x: 0, size: 3 }], vec![4, 4]))
    });
    refused("takes more than there is", |p| {
        p.kernels.push(rows(vec![load(), RowOp::Slice { x: 0, size: 4, start: 2 }], vec![4, 3]))
    });
    assert!(matches!(PlanError::Kernel { kernel: 1, problem: String::new() }, PlanError::Kernel { .. }));
}

/// Integers in memory that point nowhere are an error and no more.
#[test]
fn bad_indices() {
    let floats = |n| F(vec![1.0; n]);
    let cases: Vec<(Kernel, Vec<Value>)> = vec![
        (
            Kernel::Embed(kernel::Embed { rows: 2, vocab: 3, width: 4 }),
            vec![floats(12), I(vec![0, 3]), floats(8)],
        ),
        (
            Kernel::Embed(kernel::Embed { rows: 2, vocab: 3, width: 4 }),
            vec![floats(12), I(vec![0, -1]), floats(8)],
        ),
        (
            Kernel::EmbedGrad(kernel::EmbedGrad { rows: 2, vocab: 3, width: 4, accumulate: true }),
            vec![floats(8), I(vec![0, 3]), floats(12)],
        ),
        (
            Kernel::CrossEntropy(kernel::CrossEntropy { rows: 1, vocab: 3 }),
            vec![floats(3), I(vec![3]), floats(1), floats(1)],
        ),
        (
            Kernel::Gather(kernel::Gather { slots: 2, k: 1, width: 2 }),
            vec![floats(4), I(vec![0, 2]), floats(4)],
        ),
        (
            Kernel::Combine(kernel::Combine { rows: 2, k: 1, width: 2, gated: false }),
            vec![floats(4), I(vec![-1, 1]), floats(4)],
        ),
        (
            Kernel::Grouped(kernel::Grouped {
                slots: 2,
                experts: 2,
                out: 1,
                inner: 1,
                transposed: false,
                gather: None,
                stored: false,
            }),
            vec![floats(2), floats(2), I(vec![0, 2, 1]), floats(2)],
        ),
        (
            Kernel::GroupedOuter(kernel::GroupedOuter {
                slots: 2,
                experts: 1,
                out: 1,
                inner: 1,
                gather: Some(1),
                accumulate: false,
            }),
            vec![floats(2), floats(2), I(vec![0, 2]), I(vec![0, 5]), floats(1)],
        ),
        (
            Kernel::Rows(RowKernel {
                rows: 1,
                inputs: vec![
                    RowInput::Shared { length: 2, dtype: DType::F32 },
                    RowInput::RowInts { length: 1 },
                ],
                ops: vec![RowOp::Load { input: 0 }, RowOp::Pick { table: 0, chosen: 1 }],
                lengths: vec![2, 1],
                outputs: vec![RowOutput { array: 1, dtype: DType::F32, store: RowStore::Row }],
            }),
            vec![floats(2), I(vec![2]), floats(1)],
        ),
    ];
    for (kernel, operands) in cases {
        let plan = plan_of(&kernel, &operands);
        let mut session = session(&plan, 2);
        for (i, value) in operands.iter().enumerate() {
            match value {
                I(x) => session.write_at(BufferId(i as u32), 0, 0, x).unwrap(),
                _ => session.write_at(BufferId(i as u32), 0, 0, value.f()).unwrap(),
            }
        }
        assert!(matches!(session.run(ProgramKey::ALONE), Err(DeviceError::BadIndex { .. })), "{kernel:?}");
    }
}

/// Pages within a forgotten range go back to the system: they are zeros, and take no memory until
/// they are written. Everything around the range stays.
#[test]
#[cfg(target_os = "linux")]
fn forgotten_pages_are_given_back() {
    const N: usize = 3 << 20;
    let mut plan = Plan::default();
    plan.buffers.push(buffer("cache", DType::F32, N, &mut plan.arena));
    let mut session = session(&plan, 1);
    let resident = || -> usize {
        let status = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
        let line = status.lines().find(|line| line.starts_with("Rss:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
    };
    session.write_at(BufferId(0), 0, 0, &vec![1.0f32; N]).unwrap();
    let full = resident();
    let (from, to) = (5000, N - 7000);
    session.forget(BufferId(0), 0, from as u64, (to - from) as u64).unwrap();
    let left = resident();
    // Other tests allocate meanwhile.
    assert!(left + (2 * N) < full, "{left} of {full} bytes are still taken");
    let values = session.read_all::<f32>(BufferId(0)).unwrap();
    let page = 64 << 10;
    assert!(values[..from].iter().chain(&values[to..]).all(|x| *x == 1.0));
    assert!(values[from + page..to - page].iter().all(|x| *x == 0.0));
    session.write_at(BufferId(0), 0, from as u64, &[2.0f32]).unwrap();
    assert_eq!(session.read_all::<f32>(BufferId(0)).unwrap()[from], 2.0);
    let beyond = session.forget(BufferId(0), 0, 1, N as u64);
    assert!(matches!(beyond, Err(DeviceError::OutOfBounds { .. })), "{beyond:?}");
    assert!(session.forget(BufferId(0), 0, 0, u64::MAX).is_err());
    assert!(session.forget(BufferId(1), 0, 0, 1).is_err());
}

/// Logits, loss and gradients of a whole model in bf16 are near those of the interpreter in f64,
/// and have the same bits on any number of threads. Most sizes are no multiples of a vector or
/// tile.
#[test]
fn model_in_bf16() {
    use dreamc_compiler::compiled::Init;
    use dreamc_compiler::ir::interpret::Tensor;
    use dreamc_compiler::lower::Shape;
    use dreamc_compiler::oracle::{Batch, Oracle};
    use dreamc_compiler::precision::Narrow;
    use dreamc_compiler::{Options, compile};

    let text = "
model:
  name: awkward
  vocab: 107
  hidden: 72
  context: 64
  components:
    sa: {sequence: {heads: 3, kv_heads: 1, head_size: 26}}
    mlp: {mlp: {intermediate: 101}}
    ea: {experts: {count: 4, active: 4, intermediate: 35}}
  body:
    - \"sa > mlp\"
    - \"sa > ea\"
train: {batch: 2, sequence: 37}
";
    let ast = dreamc_dsl::parse("model.yaml", text, dreamc_dsl::Spelling::Yaml).unwrap();
    let (spec, _) = dreamc_dsl::check(&ast, &[]).unwrap_or_else(|e| panic!("{e}"));
    let (b, n) = (2usize, 37usize);
    let (batch, sequence) = (b as u64, n as u64);
    let mut r = Random(3);
    let batch_of = Batch { ids: r.ints(b * n, 107), targets: r.ints(b * n, 107), ..Batch::default() };
    let options =
        Options { batch, sequence, train: true, logits: true, narrow: Narrow::Storage, ..Options::default() };
    let compiled = compile(&spec, &options).unwrap();
    let weights: Vec<Vec<f32>> = compiled
        .tensors
        .iter()
        .map(|tensor| {
            let n = tensor.shape.iter().product::<u64>() as usize;
            match tensor.init {
                Init::Normal(deviation) => r.floats(n).iter().map(|x| 1.7 * deviation as f32 * x).collect(),
                Init::Constant(x) => vec![x as f32; n],
                _ => vec![0.0; n],
            }
        })
        .collect();
    let shape = Shape { batch, sequence, z_loss: spec.train.z_loss, ..Shape::default() };
    let dims = |shape: &[u64]| shape.iter().map(|n| *n as usize).collect::<Vec<_>>();
    let all = compiled.tensors.iter().zip(&weights);
    let given =
        all.map(|(t, values)| (t.name.clone(), Tensor::float(&dims(&t.shape), wide(values)))).collect();
    let expected = Oracle::new(&spec.model, shape, None).unwrap().evaluate(&given, &batch_of).unwrap();

    let apart = |found: &[f32], expected: &[f64]| {
        let square = |x: f64| x * x;
        let off: f64 = found.iter().zip(expected).map(|(a, b)| square(f64::from(*a) - b)).sum();
        (off / expected.iter().map(|x| square(*x)).sum::<f64>().max(1e-12)).sqrt()
    };
    let mut first: Option<Vec<u32>> = None;
    for threads in [1, 2, 3] {
        let mut session = session(&compiled.plan, threads);
        for (tensor, values) in compiled.tensors.iter().zip(&weights) {
            session.write_at(tensor.weight, tensor.instance, 0, values).unwrap();
        }
        let find = |name: &str| compiled.plan.find(name);
        let positions: Vec<i32> = (0..b * n).map(|i| (i % n) as i32).collect();
        for (name, values) in
            [("ids", &batch_of.ids), ("targets", &batch_of.targets), ("positions", &positions)]
        {
            if let Some(id) = find(name) {
                session.write_at(id, 0, 0, values).unwrap();
            }
        }
        for (name, value) in
            [("loss_scale", 1.0 / (b * n) as f32), ("aux_scale", 1.0), ("loss", 0.0), ("aux", 0.0)]
        {
            if let Some(id) = find(name) {
                session.write_at(id, 0, 0, &[value]).unwrap();
            }
        }
        session.run(ProgramKey::BACKWARD).unwrap();
        let read = |name: &str| session.read_all::<f32>(find(name).unwrap()).unwrap();
        let mut bits: Vec<u32> = vec![];
        let mut near = |what: &str, bound: f64, found: Vec<f32>, expected: &[f64]| {
            let e = apart(&found, expected);
            assert!(e < bound, "{what}: {e} apart, {threads} threads");
            bits.extend(found.iter().map(|x| x.to_bits()));
        };
        near("logits", 0.02, read("logits"), expected.logits.floats());
        for tensor in &compiled.tensors {
            let Some(gradient) = tensor.gradient else { continue };
            let mut found = vec![0.0f32; tensor.shape.iter().product::<u64>() as usize];
            session.read_at(gradient, tensor.instance, 0, &mut found).unwrap();
            near(&tensor.name, 0.05, found, expected.gradients[&tensor.name].floats());
        }
        assert!(*first.get_or_insert_with(|| bits.clone()) == bits, "{threads} threads");
    }
}

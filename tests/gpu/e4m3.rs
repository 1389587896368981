//! Matmuls of codes of e4m3 on tensor cores, interpreted: each operand in its form, every kind of
//! result, against the CPU, which rounds to bf16 and multiplies that.

use crate::support::run::options;
use dreamc_compiler::codegen::Limits;
use dreamc_compiler::ir::{DType, TILE};
use dreamc_compiler::precision::Narrow;
use dreamc_compiler::program::{
    ALIGNMENT, Affine, Buffer, BufferId, Kernel, KernelId, Launch, Matrix, Operand, Plan, ProgramKey, Space,
    Step, Task, kernel,
};
use dreamc_compiler::{Compiled, compile};
use dreamc_device::agree::compare;
use dreamc_device::cpu::CpuDevice;
use dreamc_device::ptx::{Checks, Options, PtxDevice, Schedule};
use dreamc_device::{Device, DeviceError, Group, Session};
use dreamc_dsl::spec::Precision;
use half::bf16;

/// The same products of numbers that are rounded, and multiplied in bf16.
const REFERENCE: ProgramKey = ProgramKey::first(Task::Alone(1));

/// A matmul of layers: `y`, `dx` or `dW`, by what its operands are.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Side {
    /// Rows of tokens, summed along.
    Rows,
    /// Columns of tokens, summed over them.
    Columns,
    /// A weight, summed along its rows.
    Weight,
    /// The same, summed over its rows.
    Turned,
}

impl Side {
    fn turned(self) -> bool {
        matches!(self, Side::Columns | Side::Turned)
    }

    /// The rounding of `lines` lines along the sum, `k` numbers each, to codes or to bf16.
    fn rounding(self, lines: u64, k: u64, e4m3: bool) -> kernel::Fp8 {
        let tile = match self {
            Side::Rows => [1, TILE],
            Side::Columns => [TILE, 1],
            Side::Weight | Side::Turned => [TILE, TILE],
        };
        let [rows, columns] = if self.turned() { [k, lines] } else { [lines, k] };
        kernel::Fp8 { matrices: 1, rows, columns, tile, groups: None, e4m3, turned: e4m3 && self.turned() }
    }
}

/// A matmul with both of its roundings: [`ProgramKey::ALONE`] with codes, [`REFERENCE`] in bf16.
struct Case {
    plan: Plan,
    what: String,
}

const A: BufferId = BufferId(0);
const B: BufferId = BufferId(1);
const A_CODES: BufferId = BufferId(2);
const B_CODES: BufferId = BufferId(3);
const C: BufferId = BufferId(6);
const EXPECTED: BufferId = BufferId(7);

impl Case {
    fn new(
        (m, n, k): (u64, u64, u64),
        sides: [Side; 2],
        (source, result): (DType, DType),
        accumulate: bool,
    ) -> Case {
        let mut plan = Plan::default();
        let mut buffer = |name: &str, dtype, elements: u64| {
            let shape = vec![elements];
            let offset = plan.arena;
            let buffer = Buffer { name: name.into(), space: Space::Io, dtype, shape, instances: 1, offset };
            plan.arena += buffer.bytes().next_multiple_of(ALIGNMENT);
            plan.buffers.push(buffer);
        };
        buffer("a", source, m * k);
        buffer("b", source, n * k);
        buffer("a codes", DType::E4m3, m * k);
        buffer("b codes", DType::E4m3, n * k);
        buffer("a rounded", DType::Bf16, m * k);
        buffer("b rounded", DType::Bf16, n * k);
        buffer("c", result, m * n);
        buffer("expected", DType::F32, m * n);
        let [a, b] = sides;
        let matrix = |side: Side, lines| match side.turned() {
            false => (k, 1),
            true => (1, lines),
        };
        let ((a_line, a_sum), (b_line, b_sum)) = (matrix(a, m), matrix(b, n));
        let product = kernel::Product {
            m,
            n,
            k,
            a: Matrix { row: a_line, column: a_sum },
            b: Matrix { row: b_sum, column: b_line },
            accumulate,
            stored: false,
        };
        let mut launch = |program: ProgramKey, kernel: Kernel, operands: &[u32]| {
            let id = KernelId(plan.kernels.len() as u32);
            plan.kernels.push(kernel);
            let tensor = |&id: &u32| Operand::Tensor {
                buffer: BufferId(id),
                instance: Affine::default(),
                offset: 0,
                stride: 0,
            };
            let operands = operands.iter().map(tensor).collect();
            let launch = Launch { kernel: id, operands, places: None, origin: "launch".into() };
            plan.programs.entry(program).or_default().steps.push(Step::Launch(launch));
        };
        launch(ProgramKey::ALONE, a.rounding(m, k, true).into(), &[0, 2]);
        launch(ProgramKey::ALONE, b.rounding(n, k, true).into(), &[1, 3]);
        launch(ProgramKey::ALONE, kernel::ProductE4m3 { m, n, k, accumulate }.into(), &[2, 3, 6]);
        launch(REFERENCE, a.rounding(m, k, false).into(), &[0, 4]);
        launch(REFERENCE, b.rounding(n, k, false).into(), &[1, 5]);
        launch(REFERENCE, product.into(), &[4, 5, 7]);
        let adds = if accumulate { ", added" } else { "" };
        let what = format!("{m}x{n}x{k} of {sides:?}, {} to {}{adds}", source.name(), result.name());
        Case { plan, what }
    }

    /// Numbers whose tiles differ by orders, some of them zero throughout.
    fn load(&self, device: &dyn Device) -> Box<dyn Session> {
        let mut session = device.load(&self.plan, &Group::alone()).unwrap_or_else(|e| panic!("{e}"));
        for id in [A, B, C, EXPECTED] {
            let buffer = self.plan.buffer(id);
            let value = |i: u64| {
                let random = (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15 + u64::from(id.0 % 5)) >> 40;
                let order = [1.0, 1e-3, 40.0, 0.0, 7.0][(i / TILE % 5) as usize];
                (random as f32 / (1 << 23) as f32 - 1.0) * if id.0 < 2 { order } else { 1.0 }
            };
            // Both results begin with the same numbers, which may be added to.
            let values: Vec<bf16> = (0..buffer.elements())
                .map(|i| bf16::from_f32(if id.0 < 2 { value(i) } else { value(i % 97) }))
                .collect();
            let wide: Vec<f32> = values.iter().map(|x| x.to_f32()).collect();
            match buffer.dtype {
                DType::Bf16 => session.write_at(id, 0, 0, &values).unwrap(),
                _ => session.write_at(id, 0, 0, &wide).unwrap(),
            }
        }
        session
    }

    fn bytes(&self, session: &dyn Session, id: BufferId) -> Vec<u8> {
        let mut bytes = vec![0; self.plan.buffer(id).bytes() as usize];
        session.read(id, 0, 0, &mut bytes).unwrap();
        bytes
    }

    fn result(&self, session: &dyn Session, id: BufferId) -> Vec<f32> {
        match self.plan.buffer(id).dtype {
            DType::Bf16 => session.read_all::<bf16>(id).unwrap().into_iter().map(f32::from).collect(),
            _ => session.read_all(id).unwrap(),
        }
    }

    /// Codes have the bits of the CPU's, and results are those of the product in bf16.
    fn agrees(&self, device: &dyn Device) -> Vec<u8> {
        let mut cpu = self.load(&CpuDevice::default());
        cpu.run(ProgramKey::ALONE).unwrap();
        cpu.run(REFERENCE).unwrap();
        let mut session = self.load(device);
        session.run(ProgramKey::ALONE).unwrap_or_else(|e| panic!("{}: {e}", self.what));
        for id in [A_CODES, B_CODES] {
            let name = &self.plan.buffer(id).name;
            assert!(self.bytes(&*session, id) == self.bytes(&*cpu, id), "{}: {name} differ", self.what);
        }
        let expected = self.result(&*cpu, EXPECTED);
        let largest = expected.iter().filter(|x| x.is_finite()).fold(0.0f32, |m, x| m.max(x.abs()));
        assert!(largest > 0.0, "{}", self.what);
        let bound = largest * if self.plan.buffer(C).dtype == DType::Bf16 { 4e-3 } else { 2e-6 };
        for (at, found) in [("the CPU", self.result(&*cpu, C)), ("the GPU", self.result(&*session, C))] {
            for (i, (x, y)) in found.iter().zip(&expected).enumerate() {
                let same = (x - y).abs() <= bound || x.is_nan() && y.is_nan();
                assert!(same, "{}: number {i} is {x} on {at}, {y} by bf16", self.what);
            }
        }
        self.bytes(&*session, C)
    }
}

/// The matmuls of a layer: tokens by a weight, cotangents by it, and the weight's gradient.
const SIDES: [[Side; 2]; 3] =
    [[Side::Rows, Side::Weight], [Side::Rows, Side::Turned], [Side::Columns, Side::Columns]];

const SCHEDULES: [(Schedule, usize); 3] =
    [(Schedule::Forward, 2), (Schedule::Reverse, 1), (Schedule::Random(3), 1)];

/// Two processors, so that a block goes from tile to tile; edges of tiles in both directions.
#[test]
fn tiles_of_codes_are_right_and_clean() {
    use DType::{Bf16, F32};
    if dreamc_skip::need(PtxDevice::new(Options::default())).is_none() {
        return;
    }
    let small = Limits { processors: 2, ..Limits::default() };
    let device = |(schedule, threads)| {
        let options = Options { schedule, threads, ..Options::default() };
        PtxDevice::hopper(options).unwrap().with_limits(small)
    };
    // Three rows of tiles; two, in clusters; sums that are cut.
    for (size, sides, types, add, text) in [
        ((272, 176, 384), SIDES[0], (Bf16, F32), false, "Codes<6, true, 1>"),
        ((240, 272, 1152), SIDES[0], (F32, Bf16), false, "__cluster_dims__(2, 1, 1)"),
        ((240, 144, 256), SIDES[1], (Bf16, Bf16), false, "__cluster_dims__(2, 1, 1)"),
        ((144, 272, 384), SIDES[2], (Bf16, F32), true, "__cluster_dims__(2, 1, 1)"),
        ((128, 144, 2560), SIDES[2], (F32, F32), true, "product_slice_e4m3"),
    ] {
        let case = Case::new(size, sides, types, add);
        let sources = dreamc_device::gpu::sources(&case.plan, "sm_90a", small).unwrap();
        assert!(sources.iter().any(|s| s.text.contains(text)), "{}: {text}", case.what);
        let mut bits: Option<Vec<u8>> = None;
        for schedule in SCHEDULES {
            let now = case.agrees(&device(schedule));
            assert!(bits.get_or_insert_with(|| now.clone()) == &now, "{}: other bits", case.what);
        }
    }
}

/// Naive kernels have the bits of the CPU: sums in order of products that are exact.
#[test]
fn naive_products_of_codes_have_the_bits_of_the_cpu() {
    let fast = Options { checks: Checks::NONE, ..Options::default() };
    let Some(device) = dreamc_skip::need(PtxDevice::naive(fast)) else { return };
    for (sides, add) in SIDES.into_iter().zip([false, true, true]) {
        let case = Case::new((144, 128, 256), sides, (DType::Bf16, DType::F32), add);
        let mut cpu = case.load(&CpuDevice::default());
        cpu.run(ProgramKey::ALONE).unwrap();
        assert!(case.agrees(&device) == case.bytes(&*cpu, C), "{}", case.what);
    }
}

/// A tile with a number that is infinite makes its row no numbers, and no others.
#[test]
fn what_is_no_number_is_none() {
    let fast = Options { checks: Checks::NONE, ..Options::default() };
    if dreamc_skip::need(PtxDevice::new(fast)).is_none() {
        return;
    }
    let case = Case::new((128, 128, 256), SIDES[0], (DType::F32, DType::F32), false);
    for device in [&CpuDevice::default() as &dyn Device, &PtxDevice::hopper(fast).unwrap()] {
        let mut session = case.load(device);
        session.write_at(A, 0, 5 * 256 + 130, &[f32::INFINITY]).unwrap();
        session.run(ProgramKey::ALONE).unwrap();
        let c = case.result(&*session, C);
        let none: Vec<bool> = c.iter().map(|x| x.is_nan()).collect();
        assert!(none[5 * 128..6 * 128].iter().all(|none| *none), "{}", device.name());
        assert_eq!(none.iter().filter(|none| **none).count(), 128, "{}", device.name());
    }
}

/// A step of a model: each launch does on tensor cores what it does on the CPU, and the loss and
/// the gradients are those of operands rounded to bf16, but for the order of sums.
#[test]
fn a_step_of_codes_is_one_of_rounded_numbers() {
    let fast = Options { checks: Checks::NONE, ..Options::default() };
    if dreamc_skip::need(PtxDevice::new(fast)).is_none() {
        return;
    }
    let text = include_str!("../../device/src/backend/gpu/proof/models/codes.dream");
    let ast = dreamc_dsl::parse("codes", text, dreamc_dsl::Spelling::Dream).unwrap();
    let (spec, _) = dreamc_dsl::check(&ast, &[]).unwrap();
    let of = |narrow| compile(&spec, &dreamc_compiler::Options { narrow, ..options(2, 64) }).unwrap();
    let [rounded, codes] = [Narrow::Fp8, Narrow::E4m3].map(of);
    let products = |compiled: &Compiled| {
        compiled.plan.kernels.iter().filter(|k| matches!(k, Kernel::ProductE4m3(_))).count()
    };
    assert!(products(&rounded) == 0 && products(&codes) > 4, "{}", codes.plan);
    let hopper = PtxDevice::hopper(fast).unwrap();
    assert_eq!(hopper.narrow(Precision::Fp8), Narrow::E4m3);
    let all =
        compare(&codes.plan, ProgramKey::BACKWARD, &CpuDevice::default(), &hopper, &|s| fill(&codes, s))
            .unwrap();
    for launch in &all {
        // Attention rounds its weights, too.
        let bound = if launch.kernel.contains("e4m3") { 4e-3 } else { 2e-2 };
        assert!(launch.difference < bound, "{launch:?}");
    }
    let gradients = |compiled: &Compiled| {
        let mut session = CpuDevice::default().load(&compiled.plan, &Group::alone()).unwrap();
        fill(compiled, session.as_mut()).unwrap();
        session.run(ProgramKey::BACKWARD).unwrap();
        let mut all = vec![];
        for t in &compiled.tensors {
            let mut g = vec![0.0f32; t.shape.iter().product::<u64>() as usize];
            session.read_at(t.gradient.unwrap(), t.instance, 0, &mut g).unwrap();
            all.push((t.name.clone(), g));
        }
        all
    };
    for ((name, found), (_, expected)) in gradients(&codes).iter().zip(&gradients(&rounded)) {
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum::<f64>();
        let cosine = dot(found, expected) / (dot(found, found) * dot(expected, expected)).sqrt();
        assert!(cosine > 0.9995, "the gradient of {name} has a cosine of {cosine}");
    }
}

/// Weights and a batch.
fn fill(compiled: &Compiled, session: &mut dyn Session) -> Result<(), DeviceError> {
    for (i, t) in compiled.tensors.iter().enumerate() {
        let number = |j: u64| ((j * 7919 + i as u64 * 104_729) % 2027) as f32 / 10135.0 - 0.1;
        // Gains are about one.
        let centre = if t.shape.len() == 1 { 1.0 } else { 0.0 };
        let w: Vec<f32> = (0..t.shape.iter().product()).map(|j| number(j) + centre).collect();
        session.write_at(t.weight, t.instance, 0, &w)?;
    }
    let tokens = 128;
    for (name, offset) in [("ids", 0), ("targets", 1)] {
        let ids: Vec<i32> = (0..tokens).map(|i| (i + offset) * 37 % 64).collect();
        session.write_at(compiled.plan.find(name).unwrap(), 0, 0, &ids)?;
    }
    if let Some(id) = compiled.plan.find("positions") {
        session.write_at(id, 0, 0, &(0..tokens).map(|i| i % 64).collect::<Vec<i32>>())?;
    }
    session.write_at(compiled.plan.find("loss_scale").unwrap(), 0, 0, &[1.0 / tokens as f32])
}

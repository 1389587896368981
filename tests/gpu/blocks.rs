//! Kernels that read packed weights, interpreted, against the CPU: every format by every kernel,
//! few rows and many, whole chunks and ragged ones, matrices plain and transposed.

use dreamc_compiler::format::Packed;
use dreamc_compiler::ir::DType;
use dreamc_compiler::program::{
    ALIGNMENT, Affine, Buffer, BufferId, Kernel, KernelId, KernelKind, Launch, Layout, Matrix, Operand, Plan,
    Space, Step, Storage, kernel,
};
use dreamc_runtime::device::cpu::{CpuDevice, CpuOptions};
use dreamc_runtime::device::ptx::{Checks, Options, PtxDevice};
use dreamc_runtime::device::{Device, Group};
use half::bf16;

/// A launch of one kernel, and what its operands hold.
struct Case {
    plan: Plan,
    given: Vec<(BufferId, Vec<u8>)>,
    result: BufferId,
}

/// Numbers between -1 and 1.
fn random(count: u64, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2862933555777941757).wrapping_add(3037000493);
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 33) as f64 / (1u64 << 30) as f64 - 1.0) as f32
    };
    (0..count).map(|_| next()).collect()
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

impl Case {
    /// `result` names the operand that is compared, in bf16 where `narrow`; `given` has operands
    /// that are not random.
    fn new(
        kernel: impl Into<Kernel>,
        packed: Packed,
        (result, narrow): (&str, bool),
        given: &[(&str, Vec<u8>)],
    ) -> Case {
        let kernel = kernel.into();
        let mut plan = Plan::default();
        let (mut all, mut operands, mut found) = (vec![], vec![], BufferId(0));
        for (i, slot) in kernel.signature().iter().enumerate() {
            assert!(!matches!(slot.layout, Layout::Index(_)));
            let dtype = match slot.storage {
                Storage::Weight => DType::Packed(packed),
                Storage::Is(dtype) => dtype,
                Storage::Float(_) if slot.name == result && narrow => DType::Bf16,
                Storage::Float(_) | Storage::Any => DType::F32,
            };
            let elements = slot.span(|_| 0).next_multiple_of(dtype.unit());
            let id = BufferId(i as u32);
            let buffer = Buffer {
                name: slot.name.into(),
                space: Space::Io,
                dtype,
                shape: vec![elements],
                instances: 1,
                offset: plan.arena,
            };
            // The end of the matrix is the end of its memory but for alignment.
            plan.arena += buffer.bytes().next_multiple_of(ALIGNMENT);
            plan.buffers.push(buffer);
            operands.push(Operand::Tensor { buffer: id, instance: Affine::default(), offset: 0, stride: 0 });
            if slot.name == result {
                found = id;
            }
            let values = random(elements, i as u64 + 1);
            let own = given.iter().find(|(name, _)| *name == slot.name);
            let bytes = match (own, dtype) {
                (Some((_, bytes)), _) => bytes.clone(),
                (None, DType::Packed(packed)) => {
                    let mut bytes = vec![];
                    packed.pack(&values, &mut bytes).unwrap();
                    bytes
                }
                (None, DType::F32) => floats(&values),
                (None, DType::Bf16 | DType::I32) => continue,
            };
            all.push((id, bytes));
        }
        plan.kernels.push(kernel);
        let launch = Launch { kernel: KernelId(0), operands, places: None, origin: "launch".into() };
        plan.programs.entry("main".into()).or_default().steps.push(Step::Launch(launch));
        Case { plan, given: all, result: found }
    }

    /// The bits of the result, of bf16 as those of the same f32.
    fn run(&self, device: &dyn Device) -> Vec<u32> {
        let mut session =
            device.load(&self.plan, &Group::alone()).unwrap_or_else(|e| panic!("{e}\n{}", self.plan));
        for (id, bytes) in &self.given {
            session.write(*id, 0, 0, bytes).unwrap();
        }
        session.run("main").unwrap_or_else(|e| panic!("{e}\n{}", self.plan));
        match self.plan.buffer(self.result).dtype {
            DType::Bf16 => {
                let all = session.read_all::<bf16>(self.result).unwrap();
                all.iter().map(|x| x.to_f32().to_bits()).collect()
            }
            _ => session.read_all::<f32>(self.result).unwrap().iter().map(|x| x.to_bits()).collect(),
        }
    }

    /// How far two results are apart, by the largest number.
    fn apart(&self, a: &dyn Device, b: &dyn Device) -> f64 {
        let (a, b) = (self.run(a), self.run(b));
        let all = || a.iter().zip(&b).map(|(x, y)| (f32::from_bits(*x), f32::from_bits(*y)));
        let largest = all().map(|(_, y)| y.abs()).fold(0.0, f32::max);
        assert!(largest > 0.0, "nothing was computed\n{}", self.plan);
        let apart = all()
            .map(|(x, y)| f64::from((x - y).abs()))
            .fold(0.0, |most, x| if x > most || x.is_nan() { x } else { most });
        apart / f64::from(largest)
    }
}

struct Devices {
    cpu: CpuDevice,
    fast: PtxDevice,
    naive: PtxDevice,
}

fn devices() -> Option<Devices> {
    let fast = dreamc_skip::need(PtxDevice::new(Options::default()))?;
    let naive = PtxDevice::naive(Options { checks: Checks::NONE, ..Options::default() }).unwrap();
    Some(Devices { cpu: CpuDevice::new(CpuOptions { threads: Some(2) }), fast, naive })
}

impl Devices {
    fn agree(&self, what: &str, case: &Case, bound: f64) {
        for (rung, device) in [("fast", &self.fast), ("naive", &self.naive)] {
            let apart = case.apart(device, &self.cpu);
            assert!(apart <= bound, "{what}, {rung}: {apart:e} apart");
        }
    }
}

/// Formats with lengths of rows that are ragged chunks of theirs: one that is shorter, and one with
/// several and a part.
fn formats() -> Vec<(Packed, u64)> {
    let lengths = |name: &str| match name {
        "q4_k" | "q6_k" => [256, 2304],
        "f16" | "int8" => [48, 1104],
        "nvfp4" => [64, 1088],
        _ => [96, 1120],
    };
    let of = |name: &&str| lengths(name).map(|k| (Packed::named(name, k).unwrap(), k));
    Packed::NAMES.iter().flat_map(of).collect()
}

fn product(m: u64, n: u64, k: u64, transposed: bool) -> kernel::Product {
    let a = Matrix { row: k, column: 1 };
    let b = if transposed { Matrix { row: n, column: 1 } } else { Matrix { row: 1, column: k } };
    kernel::Product { m, n, k, a, b, accumulate: false, stored: true }
}

#[test]
fn numbers_of_embeddings_have_the_bits_of_the_cpu() {
    let Some(devices) = devices() else { return };
    for (packed, width) in formats() {
        let ids: Vec<u8> = [4, 0, 2, 4].iter().flat_map(|id: &i32| id.to_le_bytes()).collect();
        let embed = kernel::Embed { rows: 4, vocab: 5, width };
        let case = Case::new(embed, packed, ("x", false), &[("ids", ids)]);
        for device in [&devices.fast, &devices.naive] {
            assert_eq!(case.run(device), case.run(&devices.cpu), "{packed:?}");
        }
    }
}

#[test]
fn products_of_few_rows_agree_with_the_cpu() {
    let Some(devices) = devices() else { return };
    for (packed, k) in formats() {
        // Of several rows the matrix has fewer than a warp takes, and more; so has `x` than a tile.
        for (m, n) in [(1, 21), (2, 5), (9, 22), (16, 36)] {
            let case = Case::new(product(m, n, k, false), packed, ("c", false), &[]);
            assert!(text(&case).contains("few_product"), "{packed:?}");
            devices.agree(&format!("{packed:?} {m}x{n}x{k}"), &case, 4e-6);
        }
        for m in [1, 7] {
            let case = Case::new(product(m, 19, k, false), packed, ("c", true), &[]);
            devices.agree(&format!("{packed:?} of {m} rows in bf16"), &case, 8e-3);
        }
    }
}

/// The text that a GPU runs.
fn text(case: &Case) -> String {
    let limits = dreamc_compiler::codegen::Limits::default();
    let sources = dreamc_runtime::device::gpu::sources(&case.plan, "sm_80", limits).unwrap();
    sources.iter().map(|source| source.text.as_str()).collect()
}

/// With one in a row of `a` and zeros elsewhere a product is its matrix, to the bit.
#[test]
fn unpacked_numbers_have_the_bits_of_the_cpu() {
    let Some(devices) = devices() else { return };
    // Of the last no eight numbers are left for the last thread.
    let all = formats().into_iter().step_by(2).chain([(Packed::F16, 13)]);
    for (packed, k) in all {
        let (m, n) = (k.max(17), 3);
        let one: Vec<f32> = (0..m * k).map(|at| if at / k % k == at % k { 1.0 } else { 0.0 }).collect();
        let case = Case::new(product(m, n, k, false), packed, ("c", false), &[("a", floats(&one))]);
        assert!(text(&case).contains("unpack_weight"), "{packed:?}");
        assert_eq!(case.run(&devices.fast), case.run(&devices.cpu), "{packed:?}");
    }
}

#[test]
fn products_of_many_rows_and_transposed_ones_agree_with_the_cpu() {
    let Some(devices) = devices() else { return };
    for (packed, k) in formats().into_iter().step_by(2) {
        let case = Case::new(product(33, 40, k, false), packed, ("c", false), &[]);
        devices.agree(&format!("{packed:?}, many rows"), &case, 4e-6);
        let case = Case::new(product(33, 40, k, false), packed, ("c", true), &[]);
        devices.agree(&format!("{packed:?}, many rows in bf16"), &case, 2e-2);
        for m in [2, 18] {
            let case = Case::new(product(m, k, 24, true), packed, ("c", false), &[]);
            devices.agree(&format!("{packed:?}, transposed"), &case, 4e-6);
        }
    }
}

#[test]
fn grouped_products_and_those_by_head_agree_with_the_cpu() {
    let Some(devices) = devices() else { return };
    let ints = |list: &[i32]| list.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    for (packed, inner) in formats() {
        for (slots, transposed, gather) in
            [(6, false, None), (6, false, Some(2)), (6, true, None), (70, false, Some(2))]
        {
            let (experts, out) = (4, 10);
            let grouped = kernel::Grouped { slots, experts, out, inner, transposed, gather, stored: true };
            let s = slots as i32;
            let order: Vec<i32> = (0..s).map(|i| s - 1 - i).collect();
            let given = [("offsets", ints(&[0, 2, 2, 5, s - 1])), ("order", ints(&order))];
            let case = Case::new(grouped, packed, ("y", false), &given);
            devices.agree(&format!("{packed:?}, grouped {slots} {transposed} {gather:?}"), &case, 4e-6);
        }
        for (rows, transposed) in [(2, false), (2, true), (17, false)] {
            let (heads, out, first, part) = (3, 8, 2, 5);
            let by_head = kernel::ByHead { rows, heads, out, inner, first, part, transposed, stored: true };
            let case = Case::new(by_head, packed, ("y", false), &[]);
            devices.agree(&format!("{packed:?}, by head {rows} {transposed}"), &case, 4e-6);
        }
    }
}

#[test]
fn losses_of_packed_heads_agree_with_the_cpu() {
    let Some(devices) = devices() else { return };
    for (packed, width) in formats().into_iter().step_by(2) {
        let head = kernel::HeadLoss { rows: 3, vocab: 11, width, softcap: None, stored: true };
        let targets = [3i32, 10, -1].iter().flat_map(|x| x.to_le_bytes()).collect();
        let case = Case::new(head, packed, ("nll", false), &[("targets", targets)]);
        devices.agree(&format!("{packed:?}, head"), &case, 1e-5);
    }
}

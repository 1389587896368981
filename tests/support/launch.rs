//! One launch of a kernel on operands of random numbers, on interpreted GPUs and on the CPU.

use dreamc_compiler::format::Packed;
use dreamc_compiler::ir::DType;
use dreamc_compiler::program::{
    ALIGNMENT, Affine, Buffer, BufferId, Kernel, KernelId, KernelKind, Launch, Layout, Matrix, Operand, Plan,
    ProgramKey, Space, Step, Storage, kernel,
};
use dreamc_device::cpu::{CpuDevice, CpuOptions};
use dreamc_device::ptx::{Checks, Options, PtxDevice};
use dreamc_device::{Device, Group};
use half::bf16;

/// A launch of one kernel, and what its operands hold.
pub struct Case {
    pub plan: Plan,
    given: Vec<(BufferId, Vec<u8>)>,
    result: BufferId,
    /// Which rows are needed, where not all are.
    places: Vec<i32>,
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

pub fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

impl Case {
    /// `result` names the operand that is compared, `narrow` those in bf16; `given` has operands
    /// that are not random.
    pub fn new(
        kernel: impl Into<Kernel>,
        packed: Packed,
        (result, narrow): (&str, &[&str]),
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
                Storage::Float(_) if narrow.contains(&slot.name) => DType::Bf16,
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
                (None, DType::Bf16) => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
                (None, DType::I32 | DType::E4m3) => continue,
            };
            all.push((id, bytes));
        }
        plan.kernels.push(kernel);
        let launch = Launch { kernel: KernelId(0), operands, places: None, origin: "launch".into() };
        plan.programs.entry(ProgramKey::ALONE).or_default().steps.push(Step::Launch(launch));
        Case { plan, given: all, result: found, places: vec![] }
    }

    /// The same launch where these rows are needed, those from 0 on; the others hold NaN.
    pub fn some(mut self, operand: &str, places: &[i32]) -> Case {
        let id = BufferId(self.plan.buffers.len() as u32);
        let buffer = Buffer {
            name: "places".into(),
            space: Space::Io,
            dtype: DType::I32,
            shape: vec![places.len() as u64],
            instances: 1,
            offset: self.plan.arena,
        };
        self.plan.arena += buffer.bytes().next_multiple_of(ALIGNMENT);
        self.plan.buffers.push(buffer);
        self.given.push((id, places.iter().flat_map(|place| place.to_le_bytes()).collect()));
        let read = self.plan.buffers.iter().position(|buffer| buffer.name == operand).unwrap();
        let (_, bytes) = self.given.iter_mut().find(|(id, _)| id.0 == read as u32).unwrap();
        let row = bytes.len() / places.len();
        for (bytes, _) in bytes.chunks_exact_mut(row).zip(places).filter(|(_, place)| **place < 0) {
            bytes.fill(0xff);
        }
        let operand = Operand::Tensor { buffer: id, instance: Affine::default(), offset: 0, stride: 0 };
        for program in self.plan.programs.values_mut() {
            for step in &mut program.steps {
                if let Step::Launch(launch) = step {
                    launch.places = Some(operand.clone());
                }
            }
        }
        self.places = places.to_vec();
        self
    }

    /// Puts what the result held before into its rows that nobody needs: a GPU leaves them as they
    /// were, the CPU uses them for others.
    fn leave(&self, result: &mut [u32]) {
        let Some((_, before)) = self.given.iter().find(|(id, _)| *id == self.result) else { return };
        let row = result.len() / self.places.len().max(1);
        let bits = before.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes));
        for (i, bits) in bits.enumerate().take(result.len()) {
            if self.places.get(i / row.max(1)).is_some_and(|place| *place < 0) {
                result[i] = bits;
            }
        }
    }

    /// The bits of the result, of bf16, integers and bytes as those of the same f32.
    pub fn run(&self, device: &dyn Device) -> Vec<u32> {
        let mut session =
            device.load(&self.plan, &Group::alone()).unwrap_or_else(|e| panic!("{e}\n{}", self.plan));
        for (id, bytes) in &self.given {
            session.write(*id, 0, 0, bytes).unwrap();
        }
        session.run(ProgramKey::ALONE).unwrap_or_else(|e| panic!("{e}\n{}", self.plan));
        match self.plan.buffer(self.result).dtype {
            DType::Bf16 => {
                let all = session.read_all::<bf16>(self.result).unwrap();
                all.iter().map(|x| x.to_f32().to_bits()).collect()
            }
            DType::I32 => {
                let all = session.read_all::<i32>(self.result).unwrap();
                all.into_iter().map(|n| (n as f32).to_bits()).collect()
            }
            // Codes and exponents as numbers: they are equal or not.
            DType::E4m3 => {
                let mut bytes = vec![0; self.plan.buffer(self.result).bytes() as usize];
                session.read(self.result, 0, 0, &mut bytes).unwrap();
                bytes.into_iter().map(|byte| f32::from(byte).to_bits()).collect()
            }
            _ => session.read_all::<f32>(self.result).unwrap().iter().map(|x| x.to_bits()).collect(),
        }
    }

    /// How far the result of a GPU is from that of the CPU, by the largest number.
    pub fn apart(&self, a: &dyn Device, b: &dyn Device) -> f64 {
        let (a, mut b) = (self.run(a), self.run(b));
        self.leave(&mut b);
        let all = || a.iter().zip(&b).map(|(x, y)| (f32::from_bits(*x), f32::from_bits(*y)));
        let largest = all().map(|(_, y)| y.abs()).fold(0.0, f32::max);
        assert!(largest > 0.0, "nothing was computed\n{}", self.plan);
        let apart = all()
            .map(|(x, y)| f64::from((x - y).abs()))
            .fold(0.0, |most, x| if x > most || x.is_nan() { x } else { most });
        apart / f64::from(largest)
    }
}

pub struct Devices {
    pub cpu: CpuDevice,
    pub fast: PtxDevice,
    pub naive: PtxDevice,
}

pub fn devices() -> Option<Devices> {
    let fast = dreamc_skip::need(PtxDevice::new(Options::default()))?;
    let naive = PtxDevice::naive(Options { checks: Checks::NONE, ..Options::default() }).unwrap();
    Some(Devices { cpu: CpuDevice::new(CpuOptions { threads: Some(2) }), fast, naive })
}

impl Devices {
    pub fn agree(&self, what: &str, case: &Case, bound: f64) {
        for (rung, device) in [("fast", &self.fast), ("naive", &self.naive)] {
            let apart = case.apart(device, &self.cpu);
            assert!(apart <= bound, "{what}, {rung}: {apart:e} apart");
        }
    }
}

/// The product of `m` rows with a packed matrix of `n` rows of `k` numbers, or of `n` columns.
pub fn product(m: u64, n: u64, k: u64, transposed: bool) -> kernel::Product {
    let a = Matrix { row: k, column: 1 };
    let b = if transposed { Matrix { row: n, column: 1 } } else { Matrix { row: 1, column: k } };
    kernel::Product { m, n, k, a, b, accumulate: false, stored: true }
}

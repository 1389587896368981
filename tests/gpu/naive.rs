//! Naive kernels: random instances of every kernel against fast ones, both interpreted; as
//! statements against the CPU; and in Metal, which a compiler reads.

use dreamc_compiler::codegen::{Argument, Dialect, Source, Variant, generate};
use dreamc_compiler::ir::random::{Instance, table};
use dreamc_compiler::ir::{DType, Type, Value};
use dreamc_compiler::op::Bits;
use dreamc_compiler::program::{
    ALIGNMENT, Affine, Buffer, BufferId, Kernel, KernelId, KernelKind, Launch, Operand, Plan, ProgramKey,
    Space, Step, Storage, kernel,
};
use dreamc_compiler::schedule::{Bind, LocalOperand, Place, schedule};
use dreamc_compiler::statement::run::{self, Grid, Memory};
use dreamc_compiler::statement::{Unit, print};
use dreamc_device::check::check;
use dreamc_device::cpu::{CpuDevice, CpuOptions};
use dreamc_device::ptx::{Checks, Options, PtxDevice};
use dreamc_device::statements::StatementDevice;
use dreamc_device::{Device, DeviceError, Group, Session};
use dreamc_dsl::spec::{BalanceLaw, BalanceTarget};
use half::bf16;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A plan with one program, and the contents of some of its buffers.
#[derive(Default)]
struct Case {
    plan: Plan,
    floats: Vec<(BufferId, Vec<f32>)>,
    ints: Vec<(BufferId, Vec<i32>)>,
}

impl Case {
    fn buffer(&mut self, dtype: DType, elements: u64) -> BufferId {
        let id = BufferId(self.plan.buffers.len() as u32);
        let (name, shape, offset) = (format!("b{}", id.0), vec![elements], self.plan.arena);
        let buffer = Buffer { name, space: Space::Io, dtype, shape, instances: 1, offset };
        self.plan.arena += buffer.bytes().next_multiple_of(ALIGNMENT);
        self.plan.buffers.push(buffer);
        id
    }

    /// The schedule of an instance of one operation; `None` where the schedule takes it only among
    /// others, or nothing runs.
    fn of(i: &Instance) -> Option<Case> {
        let (mut case, f) = (Case::default(), &i.function);
        let mut params = vec![];
        for (p, arg) in i.args.iter().enumerate() {
            let ty = f.ty(Value(p as u32)).clone();
            let ints = arg.ints().to_vec();
            if f.params[p].binding.is_index() {
                params.push(Operand::Index(Affine::constant(ints[0] as u64)));
                continue;
            }
            let id = case.buffer(ty.dtype, i.module.elements(&ty.dims));
            match ty.dtype {
                DType::I32 => case.ints.push((id, ints)),
                DType::F32 | DType::Bf16 | DType::E4m3 | DType::Packed(_) => {
                    case.floats.push((id, arg.floats().iter().map(|&x| x as f32).collect()));
                }
            }
            params.push(tensor(id));
        }
        let bind = vec![Bind::Store; f.results.len()];
        let ignored = vec![Bind::Ignore; f.results.len()];
        // Results that stay in the memory of an operand cannot be stored elsewhere.
        let scheduled = schedule(&i.module, f, &bind).or_else(|_| schedule(&i.module, f, &ignored));
        let scheduled = scheduled.ok().filter(|s| !s.launches.is_empty())?;
        // A norm over all of a matrix, say, which the schedule takes for rows.
        if scheduled.launches.iter().any(|l| l.kernel.check().is_err()) {
            return None;
        }
        let of = |case: &mut Case, ty: &Type| case.buffer(ty.dtype, i.module.elements(&ty.dims));
        let results: Vec<BufferId> = f.results.iter().map(|(_, v)| of(&mut case, f.ty(*v))).collect();
        let temps =
            scheduled.temps.iter().map(|t| case.buffer(t.dtype, t.bytes / t.dtype.bytes() * t.dtype.unit()));
        let temps: Vec<BufferId> = temps.collect();
        for launch in scheduled.launches {
            let operand = |o: &LocalOperand| match o {
                LocalOperand::Index(p) => params[*p as usize].clone(),
                LocalOperand::View(view) => {
                    let base = match view.place {
                        Place::Param(p) => params[p as usize].clone(),
                        Place::Result(r) => tensor(results[r as usize]),
                        Place::Temp(t) => tensor(temps[t as usize]),
                    };
                    match base {
                        Operand::Tensor { buffer, instance, .. } => {
                            Operand::Tensor { buffer, instance, offset: view.offset, stride: view.stride }
                        }
                        index => index,
                    }
                }
            };
            let operands = launch.operands.iter().map(operand).collect();
            case.launch(launch.kernel, operands);
        }
        Some(case)
    }

    fn launch(&mut self, kernel: Kernel, operands: Vec<Operand>) {
        let id = KernelId(self.plan.kernels.len() as u32);
        self.plan.kernels.push(kernel);
        let program = self.plan.programs.entry(ProgramKey::ALONE).or_default();
        let launch = Launch { kernel: id, operands, places: None, origin: "launch".into() };
        program.steps.push(Step::Launch(launch));
    }

    /// A kernel that is of no operation, on floats between -1 and 1.
    fn by_hand(kernel: impl Into<Kernel>) -> Case {
        let (mut case, kernel) = (Case::default(), kernel.into());
        let mut operands = vec![];
        let mut seed = 1u64;
        for slot in kernel.signature() {
            let dtype = if let Storage::Is(dtype) = slot.storage { dtype } else { DType::F32 };
            let id = case.buffer(dtype, slot.elements());
            let random = (0..slot.elements()).map(|_| {
                seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                ((seed >> 33) as f64 / (1u64 << 30) as f64 - 1.0) as f32
            });
            case.floats.push((id, random.collect()));
            operands.push(tensor(id));
        }
        case.launch(kernel, operands);
        case
    }

    /// The same with every buffer in bf16 that no kernel wants otherwise; whether there is one.
    fn narrow(mut self) -> Option<Case> {
        let mut wide = vec![false; self.plan.buffers.len()];
        let mut narrow = wide.clone();
        for step in &self.plan.programs[&ProgramKey::ALONE].steps {
            let Step::Launch(launch) = step else { continue };
            let signature = self.plan.kernel(launch.kernel).signature();
            for (slot, operand) in signature.iter().zip(&launch.operands) {
                let Operand::Tensor { buffer, .. } = operand else { continue };
                match slot.storage {
                    Storage::Float(_) => narrow[buffer.0 as usize] = true,
                    Storage::Is(_) | Storage::Weight | Storage::Any => wide[buffer.0 as usize] = true,
                }
            }
        }
        self.plan.arena = 0;
        for (i, buffer) in self.plan.buffers.iter_mut().enumerate() {
            if narrow[i] && !wide[i] {
                buffer.dtype = DType::Bf16;
            }
            buffer.offset = self.plan.arena;
            self.plan.arena += buffer.bytes().next_multiple_of(ALIGNMENT);
        }
        // A kernel between that copies rows in f32 would leave operands of two types.
        (narrow.contains(&true) && check(&self.plan).is_ok()).then_some(self)
    }

    fn fill(&self, session: &mut dyn Session) -> Result<(), DeviceError> {
        for (id, values) in &self.floats {
            match self.plan.buffer(*id).dtype {
                DType::Bf16 => {
                    let values: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
                    session.write_at(*id, 0, 0, &values)?;
                }
                // Random codes would be those of no numbers, too.
                DType::E4m3 => {}
                DType::F32 | DType::I32 | DType::Packed(_) => session.write_at(*id, 0, 0, values)?,
            }
        }
        self.ints.iter().try_for_each(|(id, values)| session.write_at(*id, 0, 0, values))
    }

    /// Its kernels, and which of their operands are bf16.
    fn kernels(&self) -> Vec<(Kernel, u32)> {
        let mut list = vec![];
        for step in &self.plan.programs[&ProgramKey::ALONE].steps {
            let Step::Launch(launch) = step else { continue };
            let narrow = launch.operands.iter().enumerate().map(|(i, operand)| match operand {
                Operand::Tensor { buffer, .. } => {
                    u32::from(self.plan.buffer(*buffer).dtype == DType::Bf16) << i
                }
                Operand::Index(_) => 0,
            });
            list.push((self.plan.kernel(launch.kernel).clone(), narrow.sum()));
        }
        list
    }

    /// All buffers after a run, as floats.
    fn results(&self, device: &dyn Device) -> Result<Vec<Vec<f64>>, DeviceError> {
        let mut session = device.load(&self.plan, &Group::alone())?;
        self.fill(session.as_mut())?;
        session.run(ProgramKey::ALONE)?;
        let read = |(i, buffer): (usize, &Buffer)| {
            let id = BufferId(i as u32);
            Ok(match buffer.dtype {
                DType::F32 => session.read_all::<f32>(id)?.into_iter().map(f64::from).collect(),
                DType::I32 => session.read_all::<i32>(id)?.into_iter().map(f64::from).collect(),
                DType::Bf16 => session.read_all::<bf16>(id)?.iter().map(|x| x.to_f64()).collect(),
                DType::E4m3 => {
                    let mut bytes = vec![0; buffer.bytes() as usize];
                    session.read(id, 0, 0, &mut bytes)?;
                    bytes.into_iter().map(f64::from).collect()
                }
                DType::Packed(_) => vec![],
            })
        };
        self.plan.buffers.iter().enumerate().map(read).collect()
    }

    /// Names of kernels that were compared. Integers are equal, and floats within `tolerance` of
    /// the largest of their buffer, or of 1 where that is smaller: a gradient that is zero by
    /// nature holds rounding noise.
    fn agrees(&self, one: &dyn Device, other: &dyn Device, tolerance: f64) -> Vec<String> {
        let run = |device: &dyn Device| self.results(device).unwrap_or_else(|e| panic!("{e}\n{}", self.plan));
        for ((these, those), buffer) in run(one).iter().zip(&run(other)).zip(&self.plan.buffers) {
            let largest = those.iter().filter(|x| x.is_finite()).fold(1.0f64, |m, x| m.max(x.abs()));
            let bound =
                if matches!(buffer.dtype, DType::I32 | DType::E4m3) { 0.0 } else { tolerance * largest };
            for (a, b) in these.iter().zip(those) {
                let same = a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= bound;
                assert!(same, "`{}` holds {a}, of {} {b}\n{}", buffer.name, other.name(), self.plan);
            }
        }
        let name = |kernel: &Kernel| kernel.to_string().split(' ').next().unwrap_or_default().to_string();
        self.plan.kernels.iter().map(name).collect()
    }
}

fn tensor(buffer: BufferId) -> Operand {
    Operand::Tensor { buffer, instance: Affine::default(), offset: 0, stride: 0 }
}

/// Instances of every kernel, and how far results may be apart.
fn cases() -> impl Iterator<Item = (Case, f64)> {
    let random = table().into_iter().flat_map(|entry| {
        let found = (0..20).filter_map(move |seed| Case::of(&entry.instance(seed)));
        found.take(2).map(|case| (case, 1e-4)).collect::<Vec<_>>()
    });
    let (elements, experts) = (1003, 7);
    let tiles = |matrices, [rows, columns]: [u64; 2], tile| kernel::Fp8 {
        matrices,
        rows,
        columns,
        tile,
        groups: None,
        e4m3: false,
        turned: false,
    };
    let codes = |sizes, tile, turned| kernel::Fp8 { e4m3: true, turned, ..tiles(1, sizes, tile) };
    let product = || {
        // Rounded numbers by themselves: codes that are random would be those of no numbers, too.
        let mut case = Case::by_hand(codes([48, 384], [1, 128], false));
        let (codes, c) = (BufferId(1), case.buffer(DType::F32, 48 * 48));
        let product = kernel::ProductE4m3 { m: 48, n: 48, k: 384, accumulate: false };
        case.launch(product.into(), vec![tensor(codes), tensor(codes), tensor(c)]);
        case
    };
    let balance = |target, law| kernel::Balance { experts, rate: Bits(0.1), target, law };
    let by_hand = [
        Case::by_hand(kernel::Zero { elements }),
        Case::by_hand(kernel::Copy { elements, accumulate: false }),
        Case::by_hand(kernel::Copy { elements, accumulate: true }),
        Case::by_hand(kernel::Norm { elements }),
        Case::by_hand(tiles(1, [37, 300], [1, 128])),
        Case::by_hand(tiles(2, [150, 70], [128, 1])),
        Case::by_hand(tiles(2, [130, 140], [128, 128])),
        Case::by_hand(codes([48, 384], [1, 128], false)),
        Case::by_hand(codes([48, 256], [128, 128], false)),
        Case::by_hand(codes([256, 144], [128, 128], true)),
        Case::by_hand(codes([256, 80], [128, 1], true)),
        product(),
        Case::by_hand(balance(BalanceTarget::Mean, BalanceLaw::Proportional)),
        Case::by_hand(balance(BalanceTarget::Median, BalanceLaw::Sign)),
    ];
    random.chain(by_hand.map(|case| (case, 1e-5)))
}

/// Every kernel is computed alike on two devices, in f32 and in bf16.
fn all_agree(one: &dyn Device, other: &dyn Device) {
    let mut seen = BTreeSet::new();
    for (case, tolerance) in cases() {
        seen.extend(case.agrees(one, other, tolerance));
        if let Some(case) = case.narrow() {
            seen.extend(case.agrees(one, other, 2e-2));
        }
    }
    for variant in Kernel::VARIANTS.iter().filter(|name| !COLLECTIVES.contains(name)) {
        let capital = |c: char| if c.is_uppercase() { format!("_{}", c.to_lowercase()) } else { c.into() };
        let name: String = variant.chars().map(capital).collect();
        assert!(seen.contains(name.trim_start_matches('_')), "no instance of {variant} was compared");
    }
}

/// The executor hands the range of a collective to the group: there is no kernel.
const COLLECTIVES: [&str; 8] =
    ["AllReduce", "ReduceScatter", "AllGather", "Gathered", "Scattered", "Sent", "Returned", "Pooled"];

#[test]
fn naive_kernels_do_what_fast_ones_do() {
    let options = Options { checks: Checks::NONE, ..Options::default() };
    let Some(fast) = dreamc_skip::need(PtxDevice::new(options)) else { return };
    all_agree(&PtxDevice::naive(options).unwrap(), &fast);
}

#[test]
fn statements_do_what_the_cpu_does() {
    all_agree(&StatementDevice::new(), &CpuDevice::new(CpuOptions::default()));
}

/// The row kernels of GPUs, a statement at a time for all threads of a block.
#[test]
fn row_kernels_as_statements_do_what_the_cpu_does() {
    all_agree(&StatementDevice::of_blocks(), &CpuDevice::new(CpuOptions::default()));
}

/// A barrier left out is found by the accesses that it keeps apart, and a dialect without the words
/// of blocks is refused by name.
#[test]
fn barriers_of_row_kernels_are_held() {
    let (mut left_out, mut found) = (0, 0);
    for (case, _) in cases() {
        for kernel in case.plan.kernels.iter().filter(|k| matches!(k, Kernel::Rows(_))) {
            let plain = Variant { dialect: Dialect::Plain, ..Variant::default() };
            let Some(source) = generate(kernel, plain).unwrap() else { continue };
            for (at, line) in source.text.match_indices("wait_") {
                let end = source.text[at..].find('\n').unwrap();
                let text = [&source.text[..at], "0;", &source.text[at + end..]].concat();
                left_out += 1;
                found += usize::from(first_failure(&Unit::parse(&text).unwrap(), &source).is_some());
                assert!(first_failure(&Unit::parse(&source.text).unwrap(), &source).is_none(), "{line}");
            }
            let metal = Variant { dialect: Dialect::Metal, ..Variant::default() };
            let error = generate(kernel, metal).unwrap_err().to_string();
            assert!(error.contains("row kernel") && error.contains("naive"), "{error}");
        }
    }
    assert!(left_out >= 5 && found == left_out, "{found} of {left_out}");
}

/// A text that is printed for CUDA is read again as the same statements, and one that is printed as
/// statements, too.
#[test]
fn printed_statements_are_read_again() {
    for (case, _) in cases() {
        for kernel in &case.plan.kernels {
            let of = |dialect| {
                let variant = Variant { naive: true, dialect, ..Variant::default() };
                generate(kernel, variant).unwrap().map(|source| source.text)
            };
            if matches!(kernel, Kernel::Rows(_)) {
                let plain = Variant { dialect: Dialect::Plain, ..Variant::default() };
                let Some(source) = generate(kernel, plain).unwrap() else { continue };
                let unit = Unit::parse(&source.text).unwrap();
                let again = Unit::parse(&print::print(&unit, "again", Dialect::Plain)).unwrap();
                assert_eq!(unit.entries, again.entries);
            }
            let (Some(plain), Some(cuda)) = (of(Dialect::Plain), of(Dialect::Cuda)) else { continue };
            let units =
                [plain, cuda].map(|text| Unit::parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}")));
            let [plain, cuda] = units.map(|unit| print::print(&unit, "again", Dialect::Cuda));
            assert_eq!(plain, cuda);
        }
    }
}

/// Memory of whatever is asked for: zeros, or what was written.
#[derive(Default)]
struct Anything(BTreeMap<u64, u8>);

impl Memory for Anything {
    fn load(&self, address: u64, bytes: u64) -> Result<u64, String> {
        let byte = |i| u64::from(self.0.get(&(address + i)).copied().unwrap_or(0)) << (8 * i);
        Ok((0..bytes).map(byte).sum())
    }

    fn store(&mut self, address: u64, bytes: u64, value: u64) -> Result<(), String> {
        self.0.extend((0..bytes).map(|i| (address + i, (value >> (8 * i)) as u8)));
        Ok(())
    }
}

/// The first entry of a source that does not run on zeros.
fn first_failure(unit: &Unit, source: &Source) -> Option<String> {
    let mut memory = Anything::default();
    let argument = |n: usize, argument: &Argument| match *argument {
        Argument::Operand(_)
        | Argument::Scratch(_)
        | Argument::Places
        | Argument::Status
        | Argument::Map(_) => run::Value::Address((n as u64 + 1) << 32),
        Argument::Stride(_) | Argument::Distance(_) => run::Value::Int(1 << 16),
        Argument::Index(_) | Argument::Launch | Argument::Iteration => run::Value::Int(0),
        Argument::Size(n) => run::Value::Int(n.into()),
    };
    source.passes.iter().zip(&unit.entries).find_map(|(pass, entry)| {
        let given: Vec<run::Value> = pass.arguments.iter().enumerate().map(|(n, a)| argument(n, a)).collect();
        let grid =
            Grid { blocks: pass.grid.into(), threads: pass.block.into(), shared: pass.shared_bytes.into() };
        run::run(unit, entry, grid, &given, &mut memory).err()
    })
}

/// Clang reads the Metal of every kernel, with address spaces as Metal has them: an address of the
/// device's memory is no address of a thread's.
#[test]
fn metal_is_well_formed() {
    let Some(clang) = Clang::find() else { return };
    let mut texts = BTreeMap::new();
    for (case, _) in cases() {
        let mut kernels = case.kernels();
        kernels.extend(case.narrow().map_or(vec![], |case| case.kernels()));
        for (kernel, narrow) in kernels {
            let variant = Variant { naive: true, narrow, dialect: Dialect::Metal, ..Variant::default() };
            let Some(source) = generate(&kernel, variant).unwrap() else { continue };
            let kind = kernel.to_string().split(' ').next().unwrap_or_default().to_string();
            texts.entry((kind, narrow)).or_insert(source.text);
        }
    }
    assert!(texts.len() > 40, "{:?}", texts.keys());
    let texts: Vec<String> = texts.into_values().collect();
    clang.check(&texts).unwrap();
    // A text that is no Metal is noticed.
    let spoiled = |from: &str, to: &str| {
        let text = texts.iter().find(|text| text.contains(from)).unwrap();
        clang.check(&[text.replacen(from, to, 1)]).unwrap_err()
    };
    spoiled("device const float *", "const float *");
    spoiled("return;", "return 1;");
    spoiled("i64 at = thread_number()", "i64 at = no_number()");
}

/// Clang's library, by its Python module.
struct Clang(PathBuf);

impl Clang {
    fn find() -> Option<Clang> {
        let python = crate::support::python()?;
        let found = Command::new(&python).args(["-c", "import clang.cindex"]).output();
        match found.is_ok_and(|output| output.status.success()) {
            true => Some(Clang(python)),
            false => {
                dreamc_skip::skip("Python's `libclang` is not installed");
                None
            }
        }
    }

    /// The first thing that it says against each text.
    fn check(&self, texts: &[String]) -> Result<(), String> {
        let folder = tempfile::tempdir().unwrap();
        for (n, text) in texts.iter().enumerate() {
            std::fs::write(folder.path().join(format!("{n}.metal")), text).unwrap();
        }
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gpu/metal/check.py");
        let output = Command::new(&self.0).arg(script).arg(folder.path()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let failed = String::from_utf8_lossy(&output.stderr).into_owned();
        match output.status.success() && said.is_empty() {
            true => Ok(()),
            false => Err(said + &failed),
        }
    }
}

//! The embedded device: native code, all threads of the machine, nothing to install.
//!
//! *In*: a plan that [`check`](crate::check) passed. *Out*: a session over one aligned
//! arena. *Promise*: the bits of every result depend on the operands alone, not on the number of
//! threads nor on chance: work is cut by shape, each piece is computed in one order, and pieces are
//! joined in one order. All memory is allocated when the plan is loaded.
//!
//! A launch becomes tasks ([`Context::parallel`]) that a [`Pool`] of threads claims. The files, by
//! what they compute:
//!
//! - `simd`: compiling for several instruction sets; `exp` and its like; tile registers
//! - `product`: matrix products, the ground of everything heavy
//! - `op`: the kernels, a file for each operation
//!
//! # Where the unsafe code is
//!
//! Operands are places in one arena, so Rust cannot see that they do not overlap; the check of the
//! plan did. A [`View`] is such a place. Making one is unsafe and happens once per operand, in
//! `Arguments`; it hands out slices, checks their bounds, and relies on one rule that every kernel
//! here keeps: *tasks that run at the same time write disjoint elements, and read none that another
//! writes*. The rest is products ([`product`]), which take raw pointers.

mod gram;
mod op;
mod pool;
mod product;
mod simd;
#[cfg(test)]
mod tests;

use super::{Backend, Call, Value, Work, room};
use crate::check::check;
use crate::executor::{self, Program};
use crate::mapped::Mapped;
use crate::{Device, DeviceError, Group, Session, machine};
use dreamc_compiler::ahead::room;
use dreamc_compiler::format::{Format, Packed};
use dreamc_compiler::ir::DType;
use dreamc_compiler::precision::Narrow;
use dreamc_compiler::program::{Kernel, KernelKind, MAPPED, Plan, Slot, Storage};
use dreamc_compiler::with_kernel;
use dreamc_dsl::spec::Precision;
use half::bf16;
use memmap2::MmapMut;
use op::Run as _;
use pool::Pool;
use product::Stored;
use product::packed::Numbers;
use std::convert::Infallible;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// How a [`CpuDevice`] is set up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuOptions {
    /// Threads; as many as the process may use where not given.
    pub threads: Option<usize>,
}

/// The device. Its threads are shared by its sessions, which run one at a time.
pub struct CpuDevice {
    pool: Arc<Pool>,
}

impl CpuDevice {
    /// Starts the threads.
    pub fn new(options: CpuOptions) -> Self {
        let available = || std::thread::available_parallelism().map_or(1, |n| n.get());
        // A processor's tiles are asked for, and best before there are threads.
        simd::tile_registers();
        CpuDevice { pool: Arc::new(Pool::new(options.threads.unwrap_or_else(available).max(1))) }
    }

    /// How many threads it has.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }
}

impl Default for CpuDevice {
    fn default() -> Self {
        CpuDevice::new(CpuOptions::default())
    }
}

impl Device for CpuDevice {
    fn name(&self) -> String {
        let threads = self.threads();
        let s = if threads == 1 { "" } else { "s" };
        let narrow = match (simd::pairs(), simd::tile_registers()) {
            (_, true) => " with tiles of bf16",
            (true, false) => " with bf16",
            (false, false) => "",
        };
        format!("cpu ({threads} thread{s}, {}{narrow})", simd::level().name())
    }

    /// bf16 pays where the processor has instructions for them. A recipe with fp8 wants its
    /// numbers, at any price.
    fn narrow(&self, asked: Precision) -> Narrow {
        match asked {
            Precision::Bf16 if !simd::pairs() => Narrow::Nothing,
            _ => asked.into(),
        }
    }

    /// Weights in bf16 are half the bytes on every processor, which widens what it cannot multiply.
    fn writes(&self, asked: Precision) -> Narrow {
        match asked {
            Precision::Bf16 | Precision::Fp8 => Narrow::Storage,
            Precision::F32 => Narrow::Nothing,
        }
    }

    fn maps(&self, _: Format) -> bool {
        true
    }

    fn scratch_bytes(&self, plan: &Plan) -> Result<u64, DeviceError> {
        check(plan)?;
        Ok(Scratch::of_plan(plan).bytes(self.threads()) + room(plan))
    }

    fn load(&self, plan: &Plan, group: &Group) -> Result<Box<dyn Session>, DeviceError> {
        executor::load(plan, group, |programs| {
            let codes = programs.iter().map(|program| vec![(); program.launches.len()]).collect();
            Ok((Cpu::new(self.pool.clone(), plan, programs)?, codes))
        })
    }
}

/// Memory of a session, zeroed and aligned for any vector.
///
/// In large pages where the system has them for the asking: a step goes through hundreds of
/// megabytes, more than the processor remembers the addresses of small pages of.
struct Memory {
    start: *mut u8,
    /// Owns what `start` points to.
    map: MmapMut,
}

/// Bytes of a large page.
const LARGE_PAGE: usize = 2 << 20;

// SAFETY: it is owned memory; accesses are governed by the session.
unsafe impl Send for Memory {}

impl Memory {
    fn new(bytes: u64, what: &'static str) -> Result<Self, DeviceError> {
        let failed = || DeviceError::OutOfMemory { bytes, what };
        let align = if bytes < LARGE_PAGE as u64 { 1 } else { LARGE_PAGE };
        // At least one byte: there is no map of none.
        let size =
            usize::try_from(bytes.max(1)).ok().and_then(|n| n.checked_add(align)).ok_or_else(failed)?;
        let mut map = MmapMut::map_anon(size).map_err(|_| failed())?;
        // Small pages do as well, only slower.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        let start = map.as_mut_ptr();
        Ok(Memory { start: start.wrapping_add(start.align_offset(align)), map })
    }

    /// Gives the whole pages of a range back to the system: they hold zeros, and are taken
    /// when they are written next, one by one: a large page would be taken whole for a token.
    /// Where the system does not do that everything stays as it was.
    #[cfg(target_os = "linux")]
    fn forget(&mut self, at: usize, bytes: usize) {
        use memmap2::{Advice, UncheckedAdvice};
        // SAFETY: it asks for a number.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(0).max(1);
        // The map begins where a page does.
        let first = self.start.addr() - self.map.as_ptr().addr() + at;
        let (from, to) = (first.next_multiple_of(page), (first + bytes) / page * page);
        if from >= to {
            return;
        }
        let _ = self.map.advise_range(Advice::NoHugePage, from, to - from);
        // SAFETY: the pages are whole ones of this map (memmap2 would begin earlier for an offset
        // within a page), which is private and has no file, so that they become zeros, a value of
        // every element. No reference into them lives: views end with their launch, and `&mut self`
        // says that none is under way.
        let _ = unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, from, to - from) };
    }

    #[cfg(not(target_os = "linux"))]
    fn forget(&mut self, _: usize, _: usize) {}
}

/// Floats that a kernel needs apart from its operands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Scratch {
    /// For each thread.
    local: usize,
    /// For the launch.
    shared: usize,
}

impl Scratch {
    fn local(local: usize) -> Self {
        Scratch { local, shared: 0 }
    }

    fn of_plan(plan: &Plan) -> Self {
        let most = plan.kernels.iter().map(Scratch::of).fold(Scratch::default(), |a, b| Scratch {
            local: a.local.max(b.local),
            shared: a.shared.max(b.shared),
        });
        // Whole pages, so that threads share no cache line.
        Scratch { local: most.local.next_multiple_of(1024), shared: most.shared.next_multiple_of(1024) }
    }

    fn bytes(&self, threads: usize) -> u64 {
        4 * (self.local as u64 * threads as u64 + self.shared as u64)
    }

    fn of(kernel: &Kernel) -> Self {
        with_kernel!(kernel, k => k.scratch())
    }
}

/// An address that threads may share. Its users answer for what they do with it.
#[derive(Debug)]
pub(crate) struct Pointer<T>(*mut T);

impl<T> Clone for Pointer<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Pointer<T> {}

// SAFETY: an address is a number; every access through it is unsafe and argued for where it is
// made.
unsafe impl<T> Send for Pointer<T> {}
// SAFETY: likewise.
unsafe impl<T> Sync for Pointer<T> {}

impl<T> Pointer<T> {
    /// To the first element of a slice. Using the slice ends the use of the pointer.
    pub(crate) fn to(slice: &mut [T]) -> Self {
        Pointer(slice.as_mut_ptr())
    }

    pub(crate) fn add(self, elements: usize) -> Self {
        Pointer(self.0.wrapping_add(elements))
    }

    pub(crate) fn get(self) -> *const T {
        self.0
    }

    pub(crate) fn get_mut(self) -> *mut T {
        self.0
    }
}

/// Rows of an operand: `rows` pieces of `length` elements, `stride` apart.
pub(crate) struct View<'a, T> {
    start: Pointer<T>,
    rows: usize,
    length: usize,
    stride: usize,
    _launch: PhantomData<&'a T>,
}

impl<T> Clone for View<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for View<'_, T> {}

impl<'a, T> View<'a, T> {
    /// # Safety
    /// The rows are valid for `'a`; tasks that use the view at the same time write disjoint
    /// elements, and read none that another writes.
    unsafe fn new(start: Pointer<T>, rows: usize, length: usize, stride: usize) -> Self {
        View { start, rows, length, stride, _launch: PhantomData }
    }

    /// Adjacent elements as rows of another length.
    fn rows_of(self, length: usize) -> Self {
        assert!(self.rows == 1 && (length == 0 || self.length.is_multiple_of(length)));
        // There are as many rows of nothing as anyone asks for.
        View { rows: self.length.checked_div(length).unwrap_or(usize::MAX), length, stride: length, ..self }
    }

    /// The first `length` adjacent elements as `rows` rows.
    fn rows_of_part(self, length: usize, rows: usize) -> Self {
        assert!(self.rows == 1 && rows.checked_mul(length).is_some_and(|n| n <= self.length));
        View { rows, length, stride: length, ..self }
    }

    /// The same rows by another name of their type.
    fn same<U>(self) -> View<'a, U> {
        assert!(size_of::<T>() == size_of::<U>());
        let View { rows, length, stride, .. } = self;
        View { start: Pointer(self.start.0.cast()), rows, length, stride, _launch: PhantomData }
    }

    /// Some of the rows.
    fn rows_from(self, first: usize, rows: usize) -> Self {
        assert!(first <= self.rows && rows <= self.rows - first);
        View { start: self.start.add(first * self.stride), rows, ..self }
    }

    /// All of an operand without rows, as each of `rows` rows.
    fn repeated(self, rows: usize) -> Self {
        assert!(self.rows == 1);
        View { rows, stride: 0, ..self }
    }

    /// All rows in one piece, where they are adjacent.
    #[inline]
    fn flat(self) -> Option<&'a [T]> {
        let adjacent = self.rows == 1 || self.stride == self.length;
        // SAFETY: as for `row`.
        adjacent.then(|| unsafe { std::slice::from_raw_parts(self.start.get(), self.rows * self.length) })
    }

    /// All rows in one piece to write, where they are adjacent.
    #[inline]
    fn flat_mut(self) -> Option<&'a mut [T]> {
        let adjacent = self.rows == 1 || self.stride == self.length;
        // SAFETY: as for `row`.
        adjacent
            .then(|| unsafe { std::slice::from_raw_parts_mut(self.start.get_mut(), self.rows * self.length) })
    }

    /// Some elements, of rows that are adjacent.
    fn part_of_flat(self, first: usize, length: usize) -> Self {
        assert!(self.flat().is_some_and(|all| first + length <= all.len()));
        View { start: self.start.add(first), rows: 1, length, stride: length, ..self }
    }

    /// As many adjacent elements as there are bytes in an operand of any type.
    fn bytes(self, element_bytes: usize) -> View<'a, u8> {
        assert!(self.rows == 1 && size_of::<T>() == 1);
        let length = self.length * element_bytes;
        View { start: Pointer(self.start.0.cast()), rows: 1, length, stride: length, _launch: PhantomData }
    }

    /// A row.
    #[inline]
    fn row(self, row: usize) -> &'a [T] {
        assert!(row < self.rows);
        // SAFETY: in bounds by the assertion; aliasing is the maker's promise.
        unsafe { std::slice::from_raw_parts(self.start.get().add(row * self.stride), self.length) }
    }

    /// A row to write.
    #[inline]
    #[allow(clippy::mut_from_ref)]
    fn row_mut(self, row: usize) -> &'a mut [T] {
        assert!(row < self.rows);
        // SAFETY: as for `row`.
        unsafe { std::slice::from_raw_parts_mut(self.start.get_mut().add(row * self.stride), self.length) }
    }

    /// Adjacent elements.
    fn part(self, start: usize, length: usize) -> &'a [T] {
        assert!(self.rows == 1 && start <= self.length && length <= self.length - start);
        // SAFETY: as for `row`.
        unsafe { std::slice::from_raw_parts(self.start.get().add(start), length) }
    }

    /// Adjacent elements to write.
    fn part_mut(self, start: usize, length: usize) -> &'a mut [T] {
        assert!(self.rows == 1 && start <= self.length && length <= self.length - start);
        // SAFETY: as for `row`.
        unsafe { std::slice::from_raw_parts_mut(self.start.get_mut().add(start), length) }
    }

    /// All of an operand without rows.
    fn all(self) -> &'a [T] {
        self.part(0, self.length)
    }

    /// All of an operand without rows, to write.
    fn all_mut(self) -> &'a mut [T] {
        self.part_mut(0, self.length)
    }
}

impl<'a> View<'a, f32> {
    /// The same memory as integers.
    fn integers(self) -> View<'a, i32> {
        View {
            start: Pointer(self.start.0.cast()),
            rows: self.rows,
            length: self.length,
            stride: self.stride,
            _launch: PhantomData,
        }
    }

    /// Pairs of floats as doubles.
    fn doubles(self) -> View<'a, f64> {
        assert!(self.rows == 1 && self.start.get().cast::<f64>().is_aligned());
        let length = self.length / 2;
        View { start: Pointer(self.start.0.cast()), rows: 1, length, stride: length, _launch: PhantomData }
    }
}

/// One operand of one launch, its loop variables filled in.
#[derive(Clone, Copy)]
struct Argument {
    start: Pointer<u8>,
    /// Elements from row to row where the operand is strided.
    stride: usize,
    index: usize,
    element_bytes: usize,
    /// Whether it may be f32 or bf16, and is bf16.
    narrow: bool,
    /// How its numbers are packed, where they are.
    packed: Option<Packed>,
}

/// The operands of one launch, and what else is known of it.
struct Arguments<'a> {
    slots: &'a [Slot],
    list: &'a [Argument],
    /// The row kernel that runs.
    rows: Option<&'a op::Compiled>,
    /// Whether rows may be written over those that are read.
    in_place: bool,
    places: Option<Pointer<i32>>,
}

/// An operand, by its name or its number.
trait Which {
    fn number(self, slots: &[Slot]) -> usize;
}

impl Which for usize {
    fn number(self, _: &[Slot]) -> usize {
        self
    }
}

impl Which for &str {
    /// A kernel here that asks for an operand that its signature lacks is a mistake of this
    /// program.
    fn number(self, slots: &[Slot]) -> usize {
        let found = slots.iter().position(|slot| slot.name == self);
        found.unwrap_or_else(|| panic!("there is no operand `{self}`"))
    }
}

impl<'a> Arguments<'a> {
    fn view<T>(&self, which: impl Which) -> View<'a, T> {
        let i = which.number(self.slots);
        let (slot, argument) = (&self.slots[i], &self.list[i]);
        let start = Pointer(argument.start.0.cast());
        let (rows, length, stride) = match slot.in_rows() {
            Some((rows, length)) => (rows as usize, length as usize, argument.stride),
            None => {
                let span = slot.span(|index| self.list[index].index as u64);
                // Codes and exponents are bytes.
                let codes = slot.storage == Storage::Is(DType::E4m3);
                let elements = if codes { DType::E4m3.room(span) } else { span } as usize;
                (1, elements, elements)
            }
        };
        debug_assert!(match slot.storage {
            Storage::Is(DType::E4m3) => size_of::<T>() == 1,
            Storage::Is(dtype) => dtype.bytes() == size_of::<T>() as u64,
            Storage::Float(_) | Storage::Weight => size_of::<T>() == if argument.narrow { 2 } else { 4 },
            Storage::Any => true,
        });
        // SAFETY: the plan was checked: these rows are in the operand's buffer, which is aligned
        // for any type and lives as long as the launch, and overlap no other operand that the
        // launch writes (nor read what it writes, but for row kernels in place, which know). That
        // tasks are disjoint is the rule of this module.
        unsafe { View::new(start, rows, length, stride) }
    }

    fn floats(&self, which: impl Which) -> View<'a, f32> {
        self.view(which)
    }

    fn ints(&self, which: impl Which) -> View<'a, i32> {
        self.view(which)
    }

    /// The bytes of an operand of any type.
    fn bytes(&self, which: impl Which) -> View<'a, u8> {
        let i = which.number(self.slots);
        self.view::<u8>(i).bytes(self.list[i].element_bytes)
    }

    fn index(&self, which: impl Which) -> usize {
        self.list[which.number(self.slots)].index
    }

    /// Whether an operand that may be f32 or bf16 is bf16.
    fn narrow(&self, which: impl Which) -> bool {
        self.list[which.number(self.slots)].narrow
    }

    /// Elements from row to row of an operand in rows.
    fn stride(&self, which: impl Which) -> usize {
        self.list[which.number(self.slots)].stride
    }

    /// The numbers of an operand that is packed.
    fn packed<'c>(&self, cx: &Context<'c>, which: impl Which) -> Option<Numbers<'c>> {
        let argument = &self.list[which.number(self.slots)];
        argument.packed.map(|packed| Numbers::new(packed, argument.start, cx.bad_scale))
    }

    /// For each of the kernel's `rows` rows, whether it is needed; nothing where all are.
    fn places(&self, rows: u64) -> Option<&'a [i32]> {
        // SAFETY: the plan was checked: the places are in the arena, and the launch writes none of
        // them.
        self.places.map(|p| unsafe { std::slice::from_raw_parts(p.get(), rows as usize) })
    }
}

/// Context of a kernel besides its operands.
pub(crate) struct Context<'a> {
    pool: &'a Pool,
    local: Pointer<f32>,
    /// Floats of each thread.
    local_len: usize,
    shared: Pointer<f32>,
    shared_len: usize,
    /// An index in memory was out of range.
    bad_index: &'a AtomicBool,
    /// A scale of packed weights was no number.
    bad_scale: &'a AtomicBool,
    panicked: &'a AtomicBool,
    /// Multiply-adds of this launch, where they are counted.
    multiply_adds: Option<&'a AtomicU64>,
}

impl<'a> Context<'a> {
    /// Calls `task(number, scratch)` for every number below `tasks`, on all threads; scratch
    /// belongs to the task while it runs and holds anything before.
    fn parallel(&self, tasks: usize, task: impl Fn(usize, &mut [f32]) + Sync) {
        let done = self.pool.run(tasks, &|number, thread| {
            let start = self.local.add(thread * self.local_len);
            // SAFETY: the session allocated as much for every thread, and a thread does one task at
            // a time.
            let scratch = unsafe { std::slice::from_raw_parts_mut(start.get_mut(), self.local_len) };
            task(number, scratch);
        });
        if done.is_err() {
            self.panicked.store(true, Ordering::Relaxed);
        }
    }

    /// Calls `task(range, scratch)` for pieces of `0..n`, so large that each is some 2¹⁴ elements
    /// of work, `work` per item.
    fn pieces(&self, n: usize, work: usize, task: impl Fn(std::ops::Range<usize>, &mut [f32]) + Sync) {
        let size = ((1 << 14) / work.max(1)).max(1);
        self.parallel(n.div_ceil(size), |i, scratch| task(i * size..((i + 1) * size).min(n), scratch));
    }

    /// Scratch that all tasks of the launch see.
    fn shared(&self) -> View<'a, f32> {
        // SAFETY: the session allocated it and runs one launch at a time; kernels keep to the rule
        // of this module.
        unsafe { View::new(self.shared, 1, self.shared_len, self.shared_len) }
    }

    /// Whether all indices are in `0..bound`; where not, the run fails after this launch.
    fn indices_below(&self, indices: &[i32], bound: usize) -> bool {
        let fine = simd::all_below(indices, bound.min(i32::MAX as usize) as u32);
        if !fine {
            self.bad_index();
        }
        fine
    }

    fn bad_index(&self) {
        self.bad_index.store(true, Ordering::Relaxed);
    }

    /// Counts multiply-adds, if anyone wants to know.
    fn count(&self, multiply_adds: impl FnOnce() -> u64) {
        if let Some(counter) = self.multiply_adds {
            counter.fetch_add(multiply_adds(), Ordering::Relaxed);
        }
    }
}

/// A kernel ready to run.
struct Prepared {
    kernel: Kernel,
    slots: Vec<Slot>,
    rows: Option<op::Compiled>,
}

impl Prepared {
    fn new(kernel: &Kernel) -> Self {
        let rows = if let Kernel::Rows(k) = kernel { Some(op::Compiled::new(k)) } else { None };
        Prepared { kernel: kernel.clone(), slots: kernel.signature(), rows }
    }

    /// `places` are as many as the kernel has rows, where not all are needed.
    fn run(&self, cx: &Context, list: &[Argument], in_place: bool, places: Option<Pointer<i32>>) {
        let args = &Arguments { slots: &self.slots, list, rows: self.rows.as_ref(), in_place, places };
        // The operands that may be bf16 are of one type, and the first is one of them.
        match list.first().is_some_and(|x| x.narrow) {
            false => with_kernel!(&self.kernel, k => k.run::<f32>(cx, args)),
            true => with_kernel!(&self.kernel, k => k.run::<bf16>(cx, args)),
        }
    }
}

/// Weights in files, by their addresses.
#[derive(Default)]
struct Files {
    /// First address and numbers, in increasing order, disjoint.
    ranges: Vec<(u64, Mapped)>,
}

impl Files {
    /// Numbers from an address on, in place of those that were there.
    fn map(&mut self, at: u64, numbers: Mapped) {
        let place = self.ranges.partition_point(|(first, _)| *first < at);
        match self.ranges.get_mut(place) {
            Some((first, old)) if *first == at => *old = numbers,
            _ => self.ranges.insert(place, (at, numbers)),
        }
    }

    /// The bytes from an address to the end of its tensor.
    fn find(&self, at: u64) -> Option<&[u8]> {
        let place = self.ranges.partition_point(|(first, _)| *first <= at).checked_sub(1)?;
        let (first, numbers) = &self.ranges[place];
        numbers.bytes().get((at - first) as usize..).filter(|rest| !rest.is_empty())
    }

    /// The tensor of a launch that has a scale which is no number.
    fn bad_scale(&self, call: &Call) -> DeviceError {
        for value in call.values {
            let Value::Tensor { at, dtype: DType::Packed(packed), .. } = *value else { continue };
            let place = self.ranges.partition_point(|(first, _)| *first <= at);
            let Some((_, numbers)) = place.checked_sub(1).and_then(|place| self.ranges.get(place)) else {
                continue;
            };
            if let Some(block) = packed.bad(numbers.bytes()) {
                let path = numbers.file.path().into();
                return DeviceError::BadScale { path, tensor: numbers.name.to_string(), block };
            }
        }
        // The file was repaired meanwhile.
        DeviceError::NoFile { origin: call.origin.into() }
    }

    /// Whether every file is as it was.
    fn unchanged(&self) -> Result<(), DeviceError> {
        let mut last = std::ptr::null();
        for (_, Mapped { file, .. }) in &self.ranges {
            if !std::ptr::eq(Arc::as_ptr(file), last) {
                last = Arc::as_ptr(file);
                let changed = |problem| DeviceError::FileChanged { path: file.path().into(), problem };
                file.unchanged().map_err(changed)?;
            }
        }
        Ok(())
    }
}

/// A plan's memory and kernels on the CPU.
struct Cpu {
    pool: Arc<Pool>,
    kernels: Vec<Prepared>,
    arena: Memory,
    files: Files,
    scratch: Memory,
    scratch_size: Scratch,
    /// Bytes that exchanges with other ranks hold meanwhile.
    under_way: u64,
    /// Operands of the launch under way; as long as the longest list.
    arguments: Vec<Argument>,
    bad_index: AtomicBool,
    bad_scale: AtomicBool,
    panicked: AtomicBool,
    multiply_adds: AtomicU64,
    /// Number of the last launch.
    number: usize,
}

impl Cpu {
    fn new(pool: Arc<Pool>, plan: &Plan, programs: &[Program]) -> Result<Self, DeviceError> {
        let scratch_size = Scratch::of_plan(plan);
        let scratch = scratch_size.bytes(pool.threads());
        // Pages are handed out as they are written: a plan that the machine cannot hold would be
        // killed at some step.
        if let Some((all, _)) = machine::memory() {
            room::check("the CPU", plan, (scratch, 0), plan.arena.saturating_add(scratch), all)?;
        }
        let arena = Memory::new(plan.arena, "arena")?;
        let scratch = Memory::new(scratch, "scratch of the CPU device")?;
        let longest = programs.iter().flat_map(|p| &p.launches).map(|l| l.operands.len()).max().unwrap_or(0);
        Ok(Cpu {
            pool,
            kernels: plan.kernels.iter().map(Prepared::new).collect(),
            arena,
            files: Files::default(),
            scratch,
            scratch_size,
            under_way: room(plan),
            arguments: Vec::with_capacity(longest),
            bad_index: AtomicBool::new(false),
            bad_scale: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            multiply_adds: AtomicU64::new(0),
            number: 0,
        })
    }
}

impl Backend for Cpu {
    /// A kernel serves all launches of it.
    type Code = ();
    type Recording = Infallible;

    const RECORDS: bool = false;
    const SYNCHRONOUS: bool = true;

    fn scratch_bytes(&self) -> u64 {
        self.scratch_size.bytes(self.pool.threads()) + self.under_way
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        // SAFETY: the executor keeps to ranges of the arena, and no launch is under way.
        let target =
            unsafe { std::slice::from_raw_parts_mut(self.arena.start.add(at as usize), bytes.len()) };
        target.copy_from_slice(bytes);
        Ok(())
    }

    fn read(&self, at: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        if at >= MAPPED {
            // Instances of a buffer are in several places of the file.
            let mut done = 0;
            while done < bytes.len() {
                let missing = || DeviceError::NoFile { origin: "reading weights".into() };
                let from = self.files.find(at + done as u64).ok_or_else(missing)?;
                let n = from.len().min(bytes.len() - done);
                bytes[done..done + n].copy_from_slice(&from[..n]);
                done += n;
            }
            return self.files.unchanged();
        }
        // SAFETY: the executor keeps to ranges of the arena, and no launch is under way.
        let source = unsafe { std::slice::from_raw_parts(self.arena.start.add(at as usize), bytes.len()) };
        bytes.copy_from_slice(source);
        Ok(())
    }

    fn forget(&mut self, at: u64, bytes: u64) -> Result<(), DeviceError> {
        self.arena.forget(at as usize, bytes as usize);
        Ok(())
    }

    fn map(&mut self, at: u64, numbers: Mapped, _: DType) -> Result<(), DeviceError> {
        self.files.map(at, numbers);
        Ok(())
    }

    fn launch(&mut self, (): &(), call: &Call) -> Result<(), DeviceError> {
        let kernel = &self.kernels[call.id.0 as usize];
        let arena = Pointer(self.arena.start);
        let (files, mut missing) = (&self.files, false);
        // Tensors of the check are whole instances, and so are those of files.
        let mut place = |at: u64| match at >= MAPPED {
            false => arena.add(at as usize),
            true => match files.find(at) {
                Some(bytes) => Pointer(bytes.as_ptr().cast_mut()),
                None => {
                    missing = true;
                    arena
                }
            },
        };
        let argument = |(value, slot): (&Value, &Slot)| match *value {
            Value::Tensor { at, stride, dtype } => Argument {
                start: place(at),
                stride: stride as usize,
                index: 0,
                element_bytes: dtype.bytes() as usize,
                narrow: matches!(slot.storage, Storage::Float(_) | Storage::Weight) && dtype == DType::Bf16,
                packed: if let DType::Packed(packed) = dtype { Some(packed) } else { None },
            },
            Value::Index(index) => Argument {
                start: arena,
                stride: 0,
                index: index as usize,
                element_bytes: 0,
                narrow: false,
                packed: None,
            },
        };
        self.arguments.clear();
        self.arguments.extend(call.values.iter().zip(&kernel.slots).map(argument));
        if missing {
            return Err(DeviceError::NoFile { origin: call.origin.into() });
        }
        let places = call.places.map(|at| Pointer(arena.add(at as usize).0.cast()));
        let local: Pointer<f32> = Pointer(self.scratch.start.cast());
        let cx = Context {
            pool: &self.pool,
            local,
            local_len: self.scratch_size.local,
            shared: local.add(self.scratch_size.local * self.pool.threads()),
            shared_len: self.scratch_size.shared,
            bad_index: &self.bad_index,
            bad_scale: &self.bad_scale,
            panicked: &self.panicked,
            multiply_adds: call.counted.then_some(&self.multiply_adds),
        };
        self.number = call.number;
        self.bad_index.store(false, Ordering::Relaxed);
        self.multiply_adds.store(0, Ordering::Relaxed);
        kernel.run(&cx, &self.arguments, call.in_place, places);
        if self.panicked.swap(false, Ordering::Relaxed) {
            return Err(DeviceError::Panicked { origin: call.origin.into() });
        }
        match self.bad_scale.swap(false, Ordering::Relaxed) {
            true => Err(self.files.bad_scale(call)),
            false => Ok(()),
        }
    }

    fn work(&mut self, _: &Call) -> Result<Work, DeviceError> {
        let multiply_adds = self.multiply_adds.load(Ordering::Relaxed);
        Ok(Work { multiply_adds, instructions: 0 })
    }

    fn bad_index(&mut self) -> Result<Option<usize>, DeviceError> {
        Ok(self.bad_index.swap(false, Ordering::Relaxed).then_some(self.number))
    }

    fn finish(&mut self) -> Result<(), DeviceError> {
        self.files.unchanged()
    }
}

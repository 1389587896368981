//! Global memory at made-up device addresses, and the windows of the generic address space.
//!
//! Allocations are far apart, so that a stray pointer hits a gap rather than a neighbour. A word is
//! atomic because blocks may run on several cores: a kernel that races gets a value some thread
//! wrote, as on a GPU, and never more than that can go wrong.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering::Relaxed};

use super::finding::{Kind, Outcome, Trouble};

/// Where the generic address space shows shared memory of the block, local memory of the thread and
/// the parameters.
pub(super) const SHARED_WINDOW: u64 = 0x0100_0000_0000;
pub(super) const LOCAL_WINDOW: u64 = 0x0200_0000_0000;
pub(super) const PARAM_WINDOW: u64 = 0x0300_0000_0000;
/// Bytes of each window.
pub(super) const WINDOW: u64 = 0x0100_0000_0000;

/// The first global allocation, and what every one is aligned to (as `cudaMalloc` does).
const FIRST: u64 = 0x7000_0000_0000;
const ALIGN: u64 = 512;
/// Unmapped bytes between allocations, at least.
const GAP: u64 = 1 << 20;

/// Global memory: allocations that outlive launches.
#[derive(Debug, Default)]
pub struct Memory {
    /// Sorted by address.
    allocations: Vec<Allocation>,
    next: u64,
    /// The variables of each module that has run here, by the module's identity.
    modules: HashMap<u64, Vec<u64>>,
}

#[derive(Debug)]
struct Allocation {
    base: u64,
    bytes: u64,
    words: Box<[AtomicU32]>,
    read_only: bool,
    /// For each byte whether it was written; `None` where all count as written.
    written: Option<Box<[AtomicU8]>>,
}

/// Why the host cannot get at device memory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{bytes} bytes at {address:#x} are not inside one allocation")]
pub struct MemoryError {
    /// The device address.
    pub address: u64,
    /// The length asked for.
    pub bytes: u64,
}

impl Memory {
    /// No allocations.
    pub fn new() -> Memory {
        Memory::default()
    }

    /// `bytes` zeros; gives their device address.
    pub fn alloc(&mut self, bytes: u64) -> u64 {
        let base = self.next.max(FIRST);
        self.next = (base + bytes + GAP).next_multiple_of(ALIGN);
        // Zeros that nobody touched take no memory yet: allocations may be larger than what is used
        // of them.
        let words = Box::into_raw(vec![0u32; bytes.div_ceil(4) as usize].into_boxed_slice());
        // SAFETY: a box of words; an `AtomicU32` has size, alignment and bit validity of a `u32`.
        let words = unsafe { Box::from_raw(words as *mut [AtomicU32]) };
        self.allocations.push(Allocation { base, bytes, words, read_only: false, written: None });
        base
    }

    /// `bytes` that no one has written: reading them before a write is a finding.
    pub fn alloc_uninitialised(&mut self, bytes: u64) -> u64 {
        let base = self.alloc(bytes);
        if let Some(allocation) = self.allocations.last_mut() {
            // Not zeros, which would often do by luck.
            allocation.words.iter().for_each(|word| word.store(POISON, Relaxed));
            allocation.written = Some((0..bytes).map(|_| AtomicU8::new(0)).collect());
        }
        base
    }

    /// A copy of `data`.
    pub fn alloc_from(&mut self, data: &[u8]) -> u64 {
        let base = self.alloc(data.len() as u64);
        if let Some(allocation) = self.allocations.last() {
            allocation.put(0, data, false);
        }
        base
    }

    /// Whether kernels may write to the allocation at `address`.
    pub fn set_read_only(&mut self, address: u64, read_only: bool) -> Result<(), MemoryError> {
        let at = self.find(address, 1).ok_or(MemoryError { address, bytes: 1 })?;
        self.allocations[at].read_only = read_only;
        Ok(())
    }

    /// Gives the allocation that starts at `address` back.
    pub fn free(&mut self, address: u64) -> Result<(), MemoryError> {
        match self.allocations.iter().position(|allocation| allocation.base == address) {
            Some(at) => {
                self.allocations.remove(at);
                Ok(())
            }
            None => Err(MemoryError { address, bytes: 0 }),
        }
    }

    /// Copies from the device.
    pub fn read(&self, address: u64, bytes: u64) -> Result<Vec<u8>, MemoryError> {
        let at = self.find(address, bytes).ok_or(MemoryError { address, bytes })?;
        let allocation = &self.allocations[at];
        let mut data = vec![0; bytes as usize];
        allocation.get(address - allocation.base, &mut data);
        Ok(data)
    }

    /// Copies to the device.
    pub fn write(&mut self, address: u64, data: &[u8]) -> Result<(), MemoryError> {
        let bytes = data.len() as u64;
        let at = self.find(address, bytes).ok_or(MemoryError { address, bytes })?;
        let allocation = &self.allocations[at];
        allocation.put(address - allocation.base, data, false);
        Ok(())
    }

    /// Has a range count as written by nobody, until [`Memory::show`] gets what this gives: reading
    /// it is a finding. Nothing is hidden of an allocation whose bytes all count as written.
    pub fn hide(&mut self, address: u64, bytes: u64) -> Result<Vec<u8>, MemoryError> {
        let written = self.written(address, bytes)?;
        Ok(written.map_or(vec![], |all| all.iter().map(|byte| byte.swap(0, Relaxed)).collect()))
    }

    /// Ends that; whether something was written there meanwhile.
    pub fn show(&mut self, address: u64, hidden: &[u8]) -> Result<bool, MemoryError> {
        let written = self.written(address, hidden.len() as u64)?.unwrap_or_default();
        let mut any = false;
        for (byte, was) in written.iter().zip(hidden) {
            any |= byte.fetch_or(*was, Relaxed) != 0;
        }
        Ok(any)
    }

    fn written(&self, address: u64, bytes: u64) -> Result<Option<&[AtomicU8]>, MemoryError> {
        let at = self.find(address, bytes).ok_or(MemoryError { address, bytes })?;
        let allocation = &self.allocations[at];
        let first = (address - allocation.base) as usize;
        Ok(allocation.written.as_ref().map(|all| &all[first..first + bytes as usize]))
    }

    /// A slice of numbers on the device.
    pub fn alloc_slice<T: bytemuck::NoUninit>(&mut self, values: &[T]) -> u64 {
        self.alloc_from(bytemuck::cast_slice(values))
    }

    /// `count` numbers from the device.
    pub fn read_slice<T: bytemuck::AnyBitPattern>(
        &self,
        address: u64,
        count: usize,
    ) -> Result<Vec<T>, MemoryError> {
        let bytes = self.read(address, (count * size_of::<T>()) as u64)?;
        Ok(bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect())
    }

    /// The addresses of a module's variables, made on first use and kept.
    pub(super) fn module(&mut self, id: u64, make: impl FnOnce(&mut Memory) -> Vec<u64>) -> Vec<u64> {
        if let Some(addresses) = self.modules.get(&id) {
            return addresses.clone();
        }
        let addresses = make(self);
        self.modules.insert(id, addresses.clone());
        addresses
    }

    /// The allocation that holds all of `bytes` at `address`.
    fn find(&self, address: u64, bytes: u64) -> Option<usize> {
        let at = self.allocations.partition_point(|allocation| allocation.base <= address).checked_sub(1)?;
        self.allocations[at].holds(address, bytes).then_some(at)
    }

    /// Number of allocations; an index below it stays valid during a launch.
    pub(super) fn count(&self) -> usize {
        self.allocations.len()
    }

    /// Bytes of an allocation.
    pub(super) fn length(&self, allocation: usize) -> u64 {
        self.allocations[allocation].bytes
    }
}

/// The value of bytes that nothing wrote: a NaN in every float format, and a large number as an
/// integer.
pub(super) const POISON: u32 = 0xffff_ffff;

impl Allocation {
    fn holds(&self, address: u64, bytes: u64) -> bool {
        address >= self.base && bytes <= self.bytes && address - self.base <= self.bytes - bytes
    }

    fn get(&self, offset: u64, data: &mut [u8]) {
        for (i, byte) in data.iter_mut().enumerate() {
            let at = offset + i as u64;
            *byte = (self.words[(at / 4) as usize].load(Relaxed) >> (at % 4 * 8)) as u8;
        }
    }

    fn put(&self, offset: u64, data: &[u8], shared: bool) {
        let mut at = offset;
        let mut rest = data;
        while !rest.is_empty() {
            let lane = (at % 4) as usize;
            let (now, later) = rest.split_at(rest.len().min(4 - lane));
            let mut bytes = [0; 4];
            bytes[lane..lane + now.len()].copy_from_slice(now);
            let ones = (u64::from(u32::MAX) >> (32 - 8 * now.len()) << (8 * lane)) as u32;
            self.set(at / 4, u32::from_le_bytes(bytes), ones, shared);
            at += now.len() as u64;
            rest = later;
        }
        if let Some(written) = &self.written {
            for byte in &written[offset as usize..offset as usize + data.len()] {
                byte.store(1, Relaxed);
            }
        }
    }

    /// Replaces the bits of a word that `ones` names; without losing another thread's bits where
    /// the word is shared.
    #[inline]
    fn set(&self, word: u64, value: u32, ones: u32, shared: bool) {
        let word = &self.words[word as usize];
        if ones == u32::MAX {
            word.store(value, Relaxed);
        } else if shared {
            // Never fails: the closure always gives a value.
            let _ = word.fetch_update(Relaxed, Relaxed, |old| Some(old & !ones | value & ones));
        } else {
            word.store(word.load(Relaxed) & !ones | value & ones, Relaxed);
        }
    }
}

/// Memory as one worker sees it during a launch.
#[derive(Debug)]
pub(super) struct Global<'a> {
    memory: &'a Memory,
    /// Whether other workers run blocks of the same launch.
    shared: bool,
    /// Whether to say when unwritten bytes are read.
    initialised: bool,
    /// The allocation last hit.
    recent: usize,
}

impl<'a> Global<'a> {
    pub fn new(memory: &'a Memory, shared: bool, initialised: bool) -> Global<'a> {
        Global { memory, shared, initialised, recent: 0 }
    }

    /// The allocation that holds an access, and the offset in it.
    #[inline]
    pub fn locate(&mut self, address: u64, bytes: u64, write: bool) -> Outcome<(usize, u64)> {
        let hit = self
            .memory
            .allocations
            .get(self.recent)
            .is_some_and(|allocation| allocation.holds(address, bytes));
        if !hit {
            self.recent =
                self.memory.find(address, bytes).ok_or_else(|| self.outside(address, bytes, write))?;
        }
        let allocation = &self.memory.allocations[self.recent];
        if write && allocation.read_only {
            return Err(Trouble::new(
                Kind::ReadOnly,
                format!("a write to {address:#x}, which is for reading only"),
                "a kernel that leaves its inputs alone, or a buffer that is not marked read-only",
            ));
        }
        Ok((self.recent, address - allocation.base))
    }

    #[cold]
    fn outside(&self, address: u64, bytes: u64, write: bool) -> Box<Trouble> {
        let what = if write { "write" } else { "read" };
        let allocations = &self.memory.allocations;
        let after = allocations.partition_point(|allocation| allocation.base <= address);
        let near = if let Some(before) = after.checked_sub(1).map(|at| &allocations[at])
            && address - before.base < before.bytes + GAP
        {
            let past = (address - before.base + bytes).saturating_sub(before.bytes);
            format!("{past} bytes past the end of the {} bytes allocated at {:#x}", before.bytes, before.base)
        } else if let Some(next) = allocations.get(after)
            && next.base - address <= GAP
        {
            format!(
                "{} bytes before the {} bytes allocated at {:#x}",
                next.base - address,
                next.bytes,
                next.base
            )
        } else if address < 1 << 16 {
            "a null pointer, or near one".into()
        } else {
            "in no allocation".into()
        };
        Trouble::new(
            Kind::OutOfBounds,
            format!("a {what} of {bytes} bytes at {address:#x}: {near}"),
            "an index checked against the length of the buffer",
        )
    }

    /// Reads words of `N` × 4 bytes or fewer; the address must be located and aligned to its size.
    #[inline]
    pub fn load(&self, (allocation, offset): (usize, u64), bytes: u64) -> Outcome<u64> {
        let allocation = &self.memory.allocations[allocation];
        if self.initialised
            && let Some(written) = &allocation.written
            && written[offset as usize..(offset + bytes) as usize].iter().any(|byte| byte.load(Relaxed) == 0)
        {
            return Err(Trouble::new(
                Kind::Uninitialised,
                format!(
                    "a read of {bytes} bytes of global memory at offset {offset} that nothing has written"
                ),
                "a buffer filled before it is read",
            ));
        }
        let word = |at: u64| u64::from(allocation.words[at as usize].load(Relaxed));
        Ok(match bytes {
            1 => word(offset / 4) >> (offset % 4 * 8) & 0xff,
            2 => word(offset / 4) >> (offset % 4 * 8) & 0xffff,
            4 => word(offset / 4),
            _ => word(offset / 4) | word(offset / 4 + 1) << 32,
        })
    }

    /// Writes 1, 2, 4 or 8 bytes; the address must be located for writing and aligned to its size.
    #[inline]
    pub fn store(&self, (allocation, offset): (usize, u64), bytes: u64, value: u64) {
        let allocation = &self.memory.allocations[allocation];
        let shift = offset % 4 * 8;
        match bytes {
            1 => allocation.set(offset / 4, (value as u32) << shift, 0xff << shift, self.shared),
            2 => allocation.set(offset / 4, (value as u32) << shift, 0xffff << shift, self.shared),
            4 => allocation.set(offset / 4, value as u32, u32::MAX, self.shared),
            _ => {
                allocation.set(offset / 4, value as u32, u32::MAX, self.shared);
                allocation.set(offset / 4 + 1, (value >> 32) as u32, u32::MAX, self.shared);
            }
        }
        self.mark(allocation, offset, bytes);
    }

    /// Replaces 4 or 8 bytes by what `update` makes of them, as one step; gives the old value. 8
    /// bytes are one step only where no other worker runs.
    pub fn update(
        &self,
        (at, offset): (usize, u64),
        bytes: u64,
        update: impl Fn(u64) -> u64,
    ) -> Outcome<u64> {
        let allocation = &self.memory.allocations[at];
        let old = self.load((at, offset), bytes)?;
        if bytes == 4 {
            let word = &allocation.words[(offset / 4) as usize];
            let old = word.fetch_update(Relaxed, Relaxed, |old| Some(update(u64::from(old)) as u32));
            self.mark(allocation, offset, bytes);
            return Ok(u64::from(old.unwrap_or_else(|old| old)));
        }
        self.store((at, offset), bytes, update(old));
        Ok(old)
    }

    /// Copies any number of bytes out.
    pub fn read(&self, (allocation, offset): (usize, u64), data: &mut [u8]) {
        self.memory.allocations[allocation].get(offset, data);
    }

    /// Copies any number of bytes in.
    pub fn write(&self, (allocation, offset): (usize, u64), data: &[u8]) {
        self.memory.allocations[allocation].put(offset, data, self.shared);
    }

    #[inline]
    fn mark(&self, allocation: &Allocation, offset: u64, bytes: u64) {
        if let Some(written) = &allocation.written {
            for byte in &written[offset as usize..(offset + bytes) as usize] {
                byte.store(1, Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_reads_what_it_wrote() {
        let mut memory = Memory::new();
        let a = memory.alloc_from(&[1, 2, 3, 4, 5, 6, 7]);
        let b = memory.alloc(3);
        memory.write(a + 3, &[9, 9, 9]).unwrap();
        assert_eq!(memory.read(a, 7).unwrap(), [1, 2, 3, 9, 9, 9, 7]);
        assert_eq!(memory.read(b, 3).unwrap(), [0; 3]);
        assert!(
            memory.read(a, 8).is_err() && memory.read(a - 1, 1).is_err() && memory.read(a + 7, 1).is_err()
        );
        assert!(memory.read(u64::MAX, 2).is_err() && memory.write(b + 1, &[0; 3]).is_err());
        memory.free(a).unwrap();
        assert!(memory.read(a, 1).is_err() && memory.free(a).is_err());
        let values = memory.alloc_slice(&[1.5f32, -2.0]);
        assert_eq!(memory.read_slice::<f32>(values, 2).unwrap(), [1.5, -2.0]);
    }

    #[test]
    fn an_access_outside_is_told_from_its_neighbour() {
        let mut memory = Memory::new();
        let a = memory.alloc(16);
        let b = memory.alloc_uninitialised(8);
        memory.set_read_only(a, true).unwrap();
        let mut global = Global::new(&memory, false, true);
        let trouble = global.locate(a + 12, 8, false).unwrap_err();
        assert!(trouble.what.contains("4 bytes past the end of the 16 bytes"), "{}", trouble.what);
        assert!(global.locate(b - 4, 4, false).unwrap_err().what.contains("4 bytes before the 8 bytes"));
        assert!(global.locate(0, 4, false).unwrap_err().what.contains("null"));
        assert_eq!(global.locate(a, 4, true).unwrap_err().kind, Kind::ReadOnly);
        let at = global.locate(b, 2, true).unwrap();
        assert_eq!(global.load(at, 2).unwrap_err().kind, Kind::Uninitialised);
        global.store(at, 2, 0x1234);
        assert_eq!(global.load(at, 2).unwrap(), 0x1234);
        assert_eq!(global.load(at, 4).unwrap_err().kind, Kind::Uninitialised);
        assert_eq!(global.update((at.0, 4), 4, |old| old + 1).unwrap_err().kind, Kind::Uninitialised);
    }
}

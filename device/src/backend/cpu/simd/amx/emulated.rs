//! Tile registers for tests on a processor that has none: it refuses their instructions, and what
//! it refuses is done here by the manual's definition.
//!
//! *In*: the signal of a refused instruction. *Out*: its effect on tiles and memory, and the
//! program goes on after it. *Promise*: exactly the encodings that [`super`] uses are known, with
//! the conditions under which a processor would refuse them, too; those end the program with a line
//! that says why. Other instructions get the signal's default. Nothing here allocates or locks, as
//! a signal's handler must not.
//!
//! `DREAMC_TILE_FAULT` names a mistake that a kernel could have made, for tests of the tests.

use std::arch::asm;
use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU8, Ordering};

/// See [`FAULTS`].
pub(crate) const FAULT: &str = "DREAMC_TILE_FAULT";
/// Mistakes, each as if the kernel had made it, and the tests that must notice it.
pub(crate) const FAULTS: [(&str, &[&str]); 8] = [
    // The products of high halves are added to the sums of the low ones.
    ("halves", &[BITS]),
    // The same in products of few rows alone.
    ("few rows", &[BITS, "few_rows_have_the_bits_of_many"]),
    // Each of the two sums of products is added to the result, not both together.
    ("apart", &[BITS]),
    // Tiles have a line less than they should.
    ("line", &[BITS, SUMS]),
    // The last words, fewer than sixteen, are left out.
    ("last words", &[BITS, SUMS]),
    // Numbers too small for a normal one are no zeros.
    ("subnormal", &[BITS]),
    // Tiles of sums keep their contents.
    ("not cleared", &[BITS]),
    // Lines are next to one another in memory.
    ("adjacent", &[BITS, SUMS]),
];
const BITS: &str = "bits_by_definition";
/// Sums of small integers, exact in any order, and added to others.
const SUMS: &str = "tiles_of_bf16";
static CHOSEN: AtomicU8 = AtomicU8::new(u8::MAX);

fn fault(name: &str) -> bool {
    FAULTS.get(usize::from(CHOSEN.load(Ordering::Relaxed))).is_some_and(|(chosen, _)| *chosen == name)
}

/// Lets this process have tiles. Says whether it did.
pub(crate) fn install() -> bool {
    static DONE: LazyLock<bool> = LazyLock::new(|| {
        let chosen = std::env::var(FAULT).unwrap_or_default();
        let chosen = FAULTS.iter().position(|(name, _)| *name == chosen);
        CHOSEN.store(chosen.map_or(u8::MAX, |i| i as u8), Ordering::Relaxed);
        // SAFETY: the handler is a function of this form, and all else of the structure is zero.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = refused;
            action.sa_sigaction = handler as libc::sighandler_t;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
            libc::sigaction(libc::SIGILL, &action, std::ptr::null_mut()) == 0
        }
    });
    *DONE
}

/// The tiles of a thread.
struct State {
    configured: bool,
    lines: [u8; 8],
    bytes: [u16; 8],
    tiles: [Tile; 8],
}

/// Sixteen lines of 64 bytes.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Tile([[u32; 16]; 16]);

const ZERO: Tile = Tile([[0; 16]; 16]);

thread_local! {
    // Without a destructor or a first value to compute, it is a place in memory.
    static STATE: UnsafeCell<State> =
        const { UnsafeCell::new(State { configured: false, lines: [0; 8], bytes: [0; 8], tiles: [ZERO; 8] }) };
}

/// Ends the program.
fn stop(why: &'static str) -> ! {
    for text in ["the emulated processor refuses: ", why, "\n"] {
        // SAFETY: the bytes are a string's.
        let _ = unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
    }
    // SAFETY: it may be called at any time.
    unsafe { libc::abort() }
}

extern "C" fn refused(_: c_int, _: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the system hands over the registers of the thread, which is this one, stopped at an
    // instruction; nothing else uses its tiles.
    let done = unsafe {
        let registers = &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs;
        STATE.with(|state| perform(&mut *state.get(), registers))
    };
    if !done {
        // The instruction is met again, and ends the program.
        // SAFETY: the default is no function of this program.
        unsafe { libc::signal(libc::SIGILL, libc::SIG_DFL) };
    }
}

/// General registers in the order of their numbers.
const REGISTERS: [c_int; 16] = [
    libc::REG_RAX,
    libc::REG_RCX,
    libc::REG_RDX,
    libc::REG_RBX,
    libc::REG_RSP,
    libc::REG_RBP,
    libc::REG_RSI,
    libc::REG_RDI,
    libc::REG_R8,
    libc::REG_R9,
    libc::REG_R10,
    libc::REG_R11,
    libc::REG_R12,
    libc::REG_R13,
    libc::REG_R14,
    libc::REG_R15,
];

/// Performs the instruction that the registers point to, and moves them on; says whether it is one
/// of tiles.
///
/// # Safety
/// The registers are those of a thread that is stopped at an instruction.
unsafe fn perform(state: &mut State, registers: &mut [i64; 23]) -> bool {
    let code = registers[libc::REG_RIP as usize] as *const u8;
    // SAFETY: the caller's; bytes after the first are read where those before say that they are of
    // the same instruction.
    unsafe {
        let byte = |i: usize| *code.add(i);
        // A prefix of three bytes, the map 0F38, W and L zero.
        if byte(0) != 0xc4 || byte(1) & 0x1f != 2 || byte(2) & 0x84 != 0 {
            return false;
        }
        let (extend, other) = (!byte(1) >> 5, !byte(2) >> 3 & 15);
        let (prefix, form) = (byte(2) & 3, byte(4));
        // Only products have a third register.
        if byte(3) != 0x5c && other != 0 {
            return false;
        }
        let (kind, register, low) = (form >> 6, form >> 3 & 7 | (extend & 4) << 1, form & 7);
        let in_memory = |length: &mut usize| address(code, extend, registers, length);
        let mut length = 5;
        match (prefix, byte(3), kind) {
            (0, 0x49, 3) if form == 0xc0 => state.configured = false,
            (0, 0x49, 0..=2) if register == 0 => {
                let (at, _) = in_memory(&mut length);
                configure(state, at as *const u8);
            }
            (3, 0x49, 3) if low == 0 => {
                shape(state, register);
                if !fault("not cleared") {
                    state.tiles[register as usize] = ZERO;
                }
            }
            // An index is part of their address.
            (2 | 3, 0x4b, 0..=2) if low == 4 => {
                let (at, apart) = in_memory(&mut length);
                let (lines, bytes) = shape(state, register);
                let apart = if fault("adjacent") { bytes as u64 } else { apart };
                let tile = &mut state.tiles[register as usize];
                let line = |i: usize| at.wrapping_add(apart.wrapping_mul(i as u64));
                if prefix == 3 {
                    *tile = ZERO;
                    for (i, to) in tile.0.iter_mut().enumerate().take(lines) {
                        std::ptr::copy_nonoverlapping(line(i) as *const u8, to.as_mut_ptr().cast(), bytes);
                    }
                } else {
                    for (i, from) in tile.0.iter().enumerate().take(lines) {
                        std::ptr::copy_nonoverlapping(from.as_ptr().cast(), line(i) as *mut u8, bytes);
                    }
                }
            }
            (2, 0x5c, 3) => multiply(state, register, low | (extend & 1) << 3, other),
            _ => return false,
        }
        registers[libc::REG_RIP as usize] += length as i64;
    }
    true
}

/// The address of an operand in memory without its index, and the index times its scale; `length`
/// grows by what they take of the instruction.
///
/// # Safety
/// As for [`perform`]; the instruction has such an operand.
unsafe fn address(code: *const u8, extend: u8, registers: &[i64; 23], length: &mut usize) -> (u64, u64) {
    let value = |number: u8| registers[REGISTERS[number as usize] as usize] as u64;
    // SAFETY: the caller's.
    unsafe {
        let form = *code.add(4);
        let (kind, mut base, mut index) = (form >> 6, form & 7, 0);
        if base == 4 {
            let both = *code.add(*length);
            *length += 1;
            let number = both >> 3 & 7 | (extend & 2) << 2;
            // The stack's register is no index.
            index = if number == 4 { 0 } else { value(number) << (both >> 6) };
            base = both & 7;
        }
        let far = match kind {
            1 => {
                *length += 1;
                i64::from(code.add(*length - 1).cast::<i8>().read())
            }
            2 => {
                *length += 4;
                i64::from(code.add(*length - 4).cast::<i32>().read_unaligned())
            }
            _ if base == 5 => stop("an address without a base"),
            _ => 0,
        };
        (value(base | (extend & 1) << 3).wrapping_add_signed(far), index)
    }
}

/// `LDTILECFG`.
///
/// # Safety
/// The operand is 64 bytes.
unsafe fn configure(state: &mut State, at: *const u8) {
    // SAFETY: the caller's.
    let all = unsafe { at.cast::<[u8; 64]>().read_unaligned() };
    if all[0] == 0 {
        state.configured = false;
        return;
    }
    let bytes = |i: usize| u16::from_le_bytes([all[16 + 2 * i], all[17 + 2 * i]]);
    if all[0] != 1 || all[1] != 0 || all[2..16].iter().chain(&all[32..48]).chain(&all[56..]).any(|b| *b != 0)
    {
        stop("a palette, a first line or bytes without meaning");
    }
    for i in 0..8 {
        let (lines, bytes) = (all[48 + i], bytes(i));
        if lines > 16 || bytes > 64 || (lines == 0) != (bytes == 0) {
            stop("the shape of a tile");
        }
        (state.lines[i], state.bytes[i]) = (lines, bytes);
        if fault("line") && lines == 16 {
            state.lines[i] = 15;
        }
        state.tiles[i] = ZERO;
    }
    state.configured = true;
}

/// Lines of a tile, and bytes of a line.
fn shape(state: &State, tile: u8) -> (usize, usize) {
    if !state.configured || tile >= 8 || state.lines[tile as usize] == 0 {
        stop("a tile without a shape");
    }
    (state.lines[tile as usize].into(), state.bytes[tile as usize].into())
}

/// `TDPBF16PS`.
fn multiply(state: &mut State, c: u8, a: u8, b: u8) {
    let [(lines, bytes), (left, left_bytes), (right, right_bytes)] = [c, a, b].map(|tile| shape(state, tile));
    let whole = [bytes, left_bytes, right_bytes].iter().all(|bytes| bytes.is_multiple_of(4));
    // A fault takes a line of one tile and not the words of another.
    let fits = lines == left && bytes == right_bytes && (left_bytes / 4 == right || fault("line"));
    if c == a || c == b || a == b || !whole || !fits {
        stop("a product of tiles that do not fit");
    }
    let words = (left_bytes / 4).min(right);
    if fault("last words") && words < 16 {
        return;
    }
    // Products of few rows use five tiles at the most.
    let halves = fault("halves") || fault("few rows") && state.lines[5] == 0;
    let (left, right) = (state.tiles[a as usize], state.tiles[b as usize]);
    let tile = &mut state.tiles[c as usize];
    for (sums, left) in tile.0.iter_mut().zip(&left.0).take(lines) {
        // SAFETY: tiles are there only with AVX-512; lines are 64 bytes.
        unsafe { line(sums, left, &right, words, halves) };
        sums[bytes / 4..].fill(0);
    }
    tile.0[lines..].fill([0; 16]);
}

/// One line of a product. The processor's own vectors compute it, told by their control register to
/// make zero of numbers that are too small.
///
/// # Safety
/// The processor has AVX-512; `words` is at least 1 and at most 16.
#[target_feature(enable = "avx512f")]
unsafe fn line(sums: &mut [u32; 16], left: &[u32; 16], right: &Tile, words: usize, halves: bool) {
    /// All exceptions masked, to nearest; numbers too small are zero as operands and as results.
    const TILES: u32 = 0x9fc0;
    let control = if fault("subnormal") { 0x1f80 } else { TILES };
    let mut before = 0u32;
    let halves = u32::from(halves);
    let apart = u32::from(fault("apart"));
    // SAFETY: the caller's; the control register is as it was after the last line.
    unsafe {
        asm!(
            "stmxcsr [{before}]",
            "ldmxcsr [{control}]",
            "vpxord {low}, {low}, {low}",
            "vpxord {high}, {high}, {high}",
            "2:",
            "vpbroadcastd {x}, dword ptr [{left}]",
            "vmovups {y}, [{right}]",
            "vpslld {u}, {x}, 16",
            "vpslld {v}, {y}, 16",
            "vfmadd231ps {low}, {u}, {v}",
            "vpsrld {u}, {x}, 16",
            "vpsrld {v}, {y}, 16",
            "vpslld {u}, {u}, 16",
            "vpslld {v}, {v}, 16",
            "test {halves:e}, {halves:e}",
            "jnz 3f",
            "vfmadd231ps {high}, {u}, {v}",
            "jmp 4f",
            "3:",
            "vfmadd231ps {low}, {u}, {v}",
            "4:",
            "add {left}, 4",
            "add {right}, 64",
            "dec {words}",
            "jnz 2b",
            "vmovups {x}, [{sums}]",
            "test {apart:e}, {apart:e}",
            "jnz 5f",
            "vaddps {low}, {low}, {high}",
            "vaddps {x}, {x}, {low}",
            "jmp 6f",
            "5:",
            "vaddps {x}, {x}, {low}",
            "vaddps {x}, {x}, {high}",
            "6:",
            "vmovups [{sums}], {x}",
            "ldmxcsr [{before}]",
            before = in(reg) &raw mut before,
            control = in(reg) &raw const control,
            left = inout(reg) left.as_ptr() => _,
            right = inout(reg) right.0.as_ptr() => _,
            words = inout(reg) words => _,
            sums = in(reg) sums.as_mut_ptr(),
            halves = in(reg) halves,
            apart = in(reg) apart,
            low = out(zmm_reg) _,
            high = out(zmm_reg) _,
            x = out(zmm_reg) _,
            y = out(zmm_reg) _,
            u = out(zmm_reg) _,
            v = out(zmm_reg) _,
            options(nostack),
        );
    }
}

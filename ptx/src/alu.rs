//! The arithmetic of the instruction set as one table: an opcode with all its modifiers, and what
//! it computes in a lane.
//!
//! An opcode that has no entry here is refused at load; there is no default rounding, saturation or
//! comparison to fall into by accident. Every entry becomes a loop over the 32 lanes of a warp,
//! compiled twice where the processor may have wide vectors and fused multiply-add, so that the
//! interpreter's cost is shared by 32 lanes.

use super::float::{self, Rounding, Short, flush, from_brain, from_half, saturate};
use super::memory::{LOCAL_WINDOW, SHARED_WINDOW, WINDOW};

/// Lanes of a warp.
pub const LANES: usize = 32;

/// The registers of a warp, by kind; a row has a value for each lane.
#[derive(Debug, Clone, Default)]
pub struct Registers {
    /// 16- and 32-bit registers, zero-extended to 32 bits.
    pub w: Vec<[u32; LANES]>,
    /// 64-bit registers.
    pub d: Vec<[u64; LANES]>,
    /// Predicates, a bit for each lane.
    pub p: Vec<u32>,
}

/// Which of the three kinds a register is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum File {
    /// 16 or 32 bits.
    W,
    /// 64 bits.
    D,
    /// Predicate.
    P,
}

/// Rows of the destination (first) and of the sources, and small constants after them.
pub type Slots = [u16; 8];

/// Computes an operation for the lanes of the mask.
///
/// Unsafe only because some need processor features; [`Alu`] holds none that this machine lacks.
pub type Run = unsafe fn(&mut Registers, &Slots, u32);

/// An operation: its code and the registers it takes.
#[derive(Debug, Clone, Copy)]
pub struct Alu {
    pub run: Run,
    pub out: File,
    pub ins: &'static [File],
    /// Constants that follow the sources in the slots.
    pub constants: [u16; 3],
}

/// Whether the wide versions may run.
#[cfg(target_arch = "x86_64")]
fn wide_available() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

macro_rules! file {
    (w) => {
        File::W
    };
    (d) => {
        File::D
    };
    (p) => {
        File::P
    };
}

macro_rules! row {
    ($r:ident, $file:ident, $slot:expr) => {
        $r.$file[$slot as usize]
    };
}

macro_rules! lane {
    (p, $row:ident, $i:ident) => {
        $row >> $i & 1 != 0
    };
    ($file:ident, $row:ident, $i:ident) => {
        $row[$i]
    };
}

macro_rules! zeros {
    (w) => {
        [0u32; LANES]
    };
    (d) => {
        [0u64; LANES]
    };
    (p) => {
        0u32
    };
}

macro_rules! put {
    (p, $out:ident, $i:ident, $value:expr) => {
        $out |= u32::from($value) << $i
    };
    ($file:ident, $out:ident, $i:ident, $value:expr) => {
        $out[$i] = $value
    };
}

macro_rules! store {
    (p, $r:ident, $slot:expr, $out:ident, $mask:ident) => {
        let row = &mut $r.p[$slot as usize];
        *row = *row & !$mask | $out & $mask;
    };
    ($file:ident, $r:ident, $slot:expr, $out:ident, $mask:ident) => {
        let row = &mut $r.$file[$slot as usize];
        if $mask == u32::MAX {
            *row = $out;
        } else {
            for i in 0..LANES {
                row[i] = if $mask >> i & 1 != 0 { $out[i] } else { row[i] };
            }
        }
    };
}

macro_rules! count {
    () => { 0 };
    ($head:ident $($tail:ident)*) => { 1 + count!($($tail)*) };
}

/// `alu!(w; a: w, b: w => a.wrapping_add(b))`: destination kind, sources with their kinds, the
/// result in one lane. With `constants k` before the arrow, `k` is the array of the operation's
/// constants.
macro_rules! alu {
    ($out:ident; $($name:ident: $file:ident),* => $value:expr) => {
        alu!($out; $($name: $file),*; constants _unused [0, 0, 0] => $value)
    };
    ($out:ident; $($name:ident: $file:ident),*; constants $k:ident $constants:expr => $value:expr) => {{
        #[inline(always)]
        fn plain(r: &mut Registers, s: &Slots, mask: u32) {
            const SOURCES: usize = count!($($name)*);
            let mut source = 0;
            $( source += 1; let $name = row!(r, $file, s[source]); )*
            let _ = source;
            let $k = [s[SOURCES + 1], s[SOURCES + 2], s[SOURCES + 3]];
            let mut out = zeros!($out);
            for i in 0..LANES {
                $( let $name = lane!($file, $name, i); )*
                put!($out, out, i, $value);
            }
            store!($out, r, s[0], out, mask);
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c")]
        fn wide(r: &mut Registers, s: &Slots, mask: u32) {
            plain(r, s, mask)
        }
        #[cfg(target_arch = "x86_64")]
        let run = if wide_available() { wide as Run } else { plain as Run };
        #[cfg(not(target_arch = "x86_64"))]
        let run = plain as Run;
        Alu { run, out: file!($out), ins: &[$(file!($file)),*], constants: $constants }
    }};
}

/// An operation on f32 in its plain and its flushing (`.ftz`) form.
macro_rules! single {
    ($ftz:expr; $($name:ident),* => $value:expr) => {
        if $ftz {
            alu!(w; $($name: w),* => { $( let $name = flush(f32::from_bits($name)); )* flush($value).to_bits() })
        } else {
            alu!(w; $($name: w),* => { $( let $name = f32::from_bits($name); )* f32::to_bits($value) })
        }
    };
}

macro_rules! double {
    ($($name:ident),* => $value:expr) => {
        alu!(d; $($name: d),* => { $( let $name = f64::from_bits($name); )* f64::to_bits($value) })
    };
}

/// An operation on 16-bit floats, for both formats, one or two to a register.
macro_rules! short {
    ($short:expr, $packed:expr; $($name:ident),*; $format:ident => $value:expr) => {{
        #[inline(always)]
        fn one($format: Short, $($name: u32),*) -> u32 { $value }
        #[inline(always)]
        fn two(format: Short, $($name: u32),*) -> u32 {
            one(format, $($name & 0xffff),*) | one(format, $($name >> 16),*) << 16
        }
        match ($short, $packed) {
            (Short::Half, false) => alu!(w; $($name: w),* => one(Short::Half, $($name & 0xffff),*)),
            (Short::Brain, false) => alu!(w; $($name: w),* => one(Short::Brain, $($name & 0xffff),*)),
            (Short::Half, true) => alu!(w; $($name: w),* => two(Short::Half, $($name),*)),
            (Short::Brain, true) => alu!(w; $($name: w),* => two(Short::Brain, $($name),*)),
        }
    }};
}

/// The operation that an opcode names, if it is one that only computes.
pub fn find(opcode: &str) -> Option<Alu> {
    let ftz = opcode.contains(".ftz.");
    let text = if ftz { opcode.replacen(".ftz.", ".", 1) } else { opcode.to_owned() };
    let parts: Vec<&str> = text.split('.').collect();
    match parts[0] {
        "cvt" => return convert(&parts[1..], ftz),
        "setp" => return compare(parts.get(1)?, parts.get(2)?, ftz).filter(|_| parts.len() == 3),
        _ => {}
    }
    if let Some(operation) = singles(&text, ftz) {
        return Some(operation);
    }
    if let Some(operation) = approximations(&text, ftz) {
        return Some(operation);
    }
    if ftz {
        return None;
    }
    moves(&text).or_else(|| words(&text)).or_else(|| longs(&text)).or_else(|| bits(&text)).or_else(|| {
        doubles(&text).or_else(|| {
            let (rest, kind) = text.rsplit_once('.')?;
            let (format, packed) = short_of(kind)?;
            shorts(rest, format, packed)
        })
    })
}

fn short_of(kind: &str) -> Option<(Short, bool)> {
    Some(match kind {
        "f16" => (Short::Half, false),
        "f16x2" => (Short::Half, true),
        "bf16" => (Short::Brain, false),
        "bf16x2" => (Short::Brain, true),
        _ => return None,
    })
}

fn moves(text: &str) -> Option<Alu> {
    Some(match text {
        "mov.b16" | "mov.u16" | "mov.s16" | "mov.b32" | "mov.u32" | "mov.s32" | "mov.f32" => {
            alu!(w; a: w => a)
        }
        "mov.b64" | "mov.u64" | "mov.s64" | "mov.f64" | "cvta.global.u64" | "cvta.to.global.u64" => {
            alu!(d; a: d => a)
        }
        "cvta.const.u64" | "cvta.to.const.u64" => alu!(d; a: d => a),
        "isspacep.shared" | "isspacep.shared::cta" => alu!(p; a: d => a.wrapping_sub(SHARED_WINDOW) < WINDOW),
        "isspacep.local" => alu!(p; a: d => a.wrapping_sub(LOCAL_WINDOW) < WINDOW),
        "isspacep.global" => alu!(p; a: d => a.wrapping_sub(SHARED_WINDOW) >= 3 * WINDOW),
        "mov.pred" => alu!(p; a: p => a),
        "and.pred" => alu!(p; a: p, b: p => a & b),
        "or.pred" => alu!(p; a: p, b: p => a | b),
        "xor.pred" => alu!(p; a: p, b: p => a ^ b),
        "not.pred" => alu!(p; a: p => !a),
        "selp.b16" | "selp.u16" | "selp.s16" | "selp.b32" | "selp.u32" | "selp.s32" | "selp.f32" => {
            alu!(w; a: w, b: w, c: p => if c { a } else { b })
        }
        "selp.b64" | "selp.u64" | "selp.s64" | "selp.f64" => {
            alu!(d; a: d, b: d, c: p => if c { a } else { b })
        }
        "slct.u32.s32" | "slct.s32.s32" | "slct.b32.s32" | "slct.f32.s32" => {
            alu!(w; a: w, b: w, c: w => if c as i32 >= 0 { a } else { b })
        }
        // Packing and unpacking, as the decoder writes `mov` with a vector on one side.
        "pack.b32" => alu!(w; a: w, b: w => a & 0xffff | b << 16),
        "pack.b64" => alu!(d; a: w, b: w => u64::from(a) | u64::from(b) << 32),
        "low.b32" => alu!(w; a: w => a & 0xffff),
        "high.b32" => alu!(w; a: w => a >> 16),
        "low.b64" => alu!(w; a: d => a as u32),
        "high.b64" => alu!(w; a: d => (a >> 32) as u32),
        _ => return None,
    })
}

/// Integers of 32 and 16 bits.
fn words(text: &str) -> Option<Alu> {
    Some(match text {
        "add.u32" | "add.s32" => alu!(w; a: w, b: w => a.wrapping_add(b)),
        "sub.u32" | "sub.s32" => alu!(w; a: w, b: w => a.wrapping_sub(b)),
        "mul.lo.u32" | "mul.lo.s32" => alu!(w; a: w, b: w => a.wrapping_mul(b)),
        "mul.hi.u32" => alu!(w; a: w, b: w => ((u64::from(a) * u64::from(b)) >> 32) as u32),
        "mul.hi.s32" => alu!(w; a: w, b: w => ((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u32),
        "mul.wide.u32" => alu!(d; a: w, b: w => u64::from(a) * u64::from(b)),
        "mul.wide.s32" => alu!(d; a: w, b: w => (i64::from(a as i32) * i64::from(b as i32)) as u64),
        "mad.lo.u32" | "mad.lo.s32" => alu!(w; a: w, b: w, c: w => a.wrapping_mul(b).wrapping_add(c)),
        "mad.hi.u32" => {
            alu!(w; a: w, b: w, c: w => (((u64::from(a) * u64::from(b)) >> 32) as u32).wrapping_add(c))
        }
        "mad.hi.s32" => {
            alu!(w; a: w, b: w, c: w => (((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u32).wrapping_add(c))
        }
        "mad.wide.u32" => alu!(d; a: w, b: w, c: d => (u64::from(a) * u64::from(b)).wrapping_add(c)),
        "mad.wide.s32" => {
            alu!(d; a: w, b: w, c: d => ((i64::from(a as i32) * i64::from(b as i32)) as u64).wrapping_add(c))
        }
        // The hardware's quotient by zero: all ones, and the dividend.
        "div.u32" => alu!(w; a: w, b: w => a.checked_div(b).unwrap_or(u32::MAX)),
        "rem.u32" => alu!(w; a: w, b: w => a.checked_rem(b).unwrap_or(a)),
        "div.s32" => {
            alu!(w; a: w, b: w => if b == 0 { u32::MAX } else { (a as i32).wrapping_div(b as i32) as u32 })
        }
        "rem.s32" => alu!(w; a: w, b: w => if b == 0 { a } else { (a as i32).wrapping_rem(b as i32) as u32 }),
        "neg.s32" => alu!(w; a: w => a.wrapping_neg()),
        "abs.s32" => alu!(w; a: w => (a as i32).wrapping_abs() as u32),
        "min.u32" => alu!(w; a: w, b: w => a.min(b)),
        "max.u32" => alu!(w; a: w, b: w => a.max(b)),
        "min.s32" => alu!(w; a: w, b: w => (a as i32).min(b as i32) as u32),
        "max.s32" => alu!(w; a: w, b: w => (a as i32).max(b as i32) as u32),
        "sad.u32" => alu!(w; a: w, b: w, c: w => a.abs_diff(b).wrapping_add(c)),
        "sad.s32" => alu!(w; a: w, b: w, c: w => (a as i32).abs_diff(b as i32).wrapping_add(c)),

        "add.u16" | "add.s16" => alu!(w; a: w, b: w => a.wrapping_add(b) & 0xffff),
        "sub.u16" | "sub.s16" => alu!(w; a: w, b: w => a.wrapping_sub(b) & 0xffff),
        "mul.lo.u16" | "mul.lo.s16" => alu!(w; a: w, b: w => a.wrapping_mul(b) & 0xffff),
        "mul.hi.u16" => alu!(w; a: w, b: w => (a & 0xffff).wrapping_mul(b & 0xffff) >> 16),
        "mul.hi.s16" => {
            alu!(w; a: w, b: w => ((i32::from(a as i16) * i32::from(b as i16)) >> 16) as u32 & 0xffff)
        }
        "mul.wide.u16" => alu!(w; a: w, b: w => (a & 0xffff).wrapping_mul(b & 0xffff)),
        "mul.wide.s16" => alu!(w; a: w, b: w => (i32::from(a as i16) * i32::from(b as i16)) as u32),
        "mad.lo.u16" | "mad.lo.s16" => {
            alu!(w; a: w, b: w, c: w => a.wrapping_mul(b).wrapping_add(c) & 0xffff)
        }
        "div.u16" => alu!(w; a: w, b: w => a.checked_div(b).unwrap_or(0xffff)),
        "rem.u16" => alu!(w; a: w, b: w => a.checked_rem(b).unwrap_or(a)),
        "neg.s16" => alu!(w; a: w => a.wrapping_neg() & 0xffff),
        "abs.s16" => alu!(w; a: w => (a as i16).wrapping_abs() as u32 & 0xffff),
        "min.u16" => alu!(w; a: w, b: w => a.min(b)),
        "max.u16" => alu!(w; a: w, b: w => a.max(b)),
        "min.s16" => alu!(w; a: w, b: w => (a as i16).min(b as i16) as u32 & 0xffff),
        "max.s16" => alu!(w; a: w, b: w => (a as i16).max(b as i16) as u32 & 0xffff),
        "dp4a.s32.s32" => alu!(w; a: w, b: w, c: w => {
            let mut sum = c;
            for i in [0, 8, 16, 24] {
                sum = sum.wrapping_add((i32::from((a >> i) as i8) * i32::from((b >> i) as i8)) as u32);
            }
            sum
        }),
        "dp4a.u32.u32" => alu!(w; a: w, b: w, c: w => {
            let mut sum = c;
            for i in [0, 8, 16, 24] {
                sum = sum.wrapping_add((a >> i & 0xff) * (b >> i & 0xff));
            }
            sum
        }),
        // Halves of `a` with the two low or the two high bytes of `b`.
        "dp2a.lo.u32.u32" => alu!(w; a: w, b: w, c: w => pairs(a, b).wrapping_add(c)),
        "dp2a.hi.u32.u32" => alu!(w; a: w, b: w, c: w => pairs(a, b >> 16).wrapping_add(c)),
        "dp2a.lo.s32.s32" => alu!(w; a: w, b: w, c: w => signed_pairs(a, b).wrapping_add(c)),
        "dp2a.hi.s32.s32" => alu!(w; a: w, b: w, c: w => signed_pairs(a, b >> 16).wrapping_add(c)),
        _ => return None,
    })
}

/// The halves of `a` times the two low bytes of `b`, added up.
fn pairs(a: u32, b: u32) -> u32 {
    ((a & 0xffff) * (b & 0xff)).wrapping_add((a >> 16) * (b >> 8 & 0xff))
}

/// The same with signs.
fn signed_pairs(a: u32, b: u32) -> u32 {
    let low = i32::from(a as i16) * i32::from(b as i8);
    let high = i32::from((a >> 16) as i16) * i32::from((b >> 8) as i8);
    low.wrapping_add(high) as u32
}

/// Integers of 64 bits.
fn longs(text: &str) -> Option<Alu> {
    Some(match text {
        "add.u64" | "add.s64" => alu!(d; a: d, b: d => a.wrapping_add(b)),
        "sub.u64" | "sub.s64" => alu!(d; a: d, b: d => a.wrapping_sub(b)),
        "mul.lo.u64" | "mul.lo.s64" => alu!(d; a: d, b: d => a.wrapping_mul(b)),
        "mul.hi.u64" => alu!(d; a: d, b: d => ((u128::from(a) * u128::from(b)) >> 64) as u64),
        "mul.hi.s64" => alu!(d; a: d, b: d => ((i128::from(a as i64) * i128::from(b as i64)) >> 64) as u64),
        "mad.lo.u64" | "mad.lo.s64" => alu!(d; a: d, b: d, c: d => a.wrapping_mul(b).wrapping_add(c)),
        "div.u64" => alu!(d; a: d, b: d => a.checked_div(b).unwrap_or(u64::MAX)),
        "rem.u64" => alu!(d; a: d, b: d => a.checked_rem(b).unwrap_or(a)),
        "div.s64" => {
            alu!(d; a: d, b: d => if b == 0 { u64::MAX } else { (a as i64).wrapping_div(b as i64) as u64 })
        }
        "rem.s64" => alu!(d; a: d, b: d => if b == 0 { a } else { (a as i64).wrapping_rem(b as i64) as u64 }),
        "neg.s64" => alu!(d; a: d => a.wrapping_neg()),
        "abs.s64" => alu!(d; a: d => (a as i64).wrapping_abs() as u64),
        "min.u64" => alu!(d; a: d, b: d => a.min(b)),
        "max.u64" => alu!(d; a: d, b: d => a.max(b)),
        "min.s64" => alu!(d; a: d, b: d => (a as i64).min(b as i64) as u64),
        "max.s64" => alu!(d; a: d, b: d => (a as i64).max(b as i64) as u64),
        _ => return None,
    })
}

/// Logic, shifts and fields. A shift by the width or more gives zero, or copies of the sign.
fn bits(text: &str) -> Option<Alu> {
    Some(match text {
        "and.b16" | "and.b32" => alu!(w; a: w, b: w => a & b),
        "or.b16" | "or.b32" => alu!(w; a: w, b: w => a | b),
        "xor.b16" | "xor.b32" => alu!(w; a: w, b: w => a ^ b),
        "not.b32" => alu!(w; a: w => !a),
        "not.b16" => alu!(w; a: w => !a & 0xffff),
        "cnot.b32" => alu!(w; a: w => u32::from(a == 0)),
        "and.b64" => alu!(d; a: d, b: d => a & b),
        "or.b64" => alu!(d; a: d, b: d => a | b),
        "xor.b64" => alu!(d; a: d, b: d => a ^ b),
        "not.b64" => alu!(d; a: d => !a),
        "shl.b32" => alu!(w; a: w, b: w => if b < 32 { a << (b & 31) } else { 0 }),
        "shr.u32" | "shr.b32" => alu!(w; a: w, b: w => if b < 32 { a >> (b & 31) } else { 0 }),
        "shr.s32" => alu!(w; a: w, b: w => (a as i32 >> b.min(31)) as u32),
        "shl.b16" => alu!(w; a: w, b: w => if b < 16 { a << (b & 15) & 0xffff } else { 0 }),
        "shr.u16" | "shr.b16" => alu!(w; a: w, b: w => if b < 16 { a >> (b & 15) } else { 0 }),
        "shr.s16" => alu!(w; a: w, b: w => (a as i16 >> b.min(15)) as u32 & 0xffff),
        "shl.b64" => alu!(d; a: d, b: w => if b < 64 { a << (b & 63) } else { 0 }),
        "shr.u64" | "shr.b64" => alu!(d; a: d, b: w => if b < 64 { a >> (b & 63) } else { 0 }),
        "shr.s64" => alu!(d; a: d, b: w => (a as i64 >> b.min(63)) as u64),
        "shf.l.wrap.b32" => alu!(w; a: w, b: w, c: w => (join(a, b) << (c & 31) >> 32) as u32),
        "shf.r.wrap.b32" => alu!(w; a: w, b: w, c: w => (join(a, b) >> (c & 31)) as u32),
        "shf.l.clamp.b32" => alu!(w; a: w, b: w, c: w => (join(a, b) << c.min(32) >> 32) as u32),
        "shf.r.clamp.b32" => alu!(w; a: w, b: w, c: w => (join(a, b) >> c.min(32)) as u32),
        "lop3.b32" => alu!(w; a: w, b: w, c: w, table: w => {
            let mut out = 0;
            for i in 0..8 {
                let minterm = (if i & 4 == 0 { !a } else { a }) & (if i & 2 == 0 { !b } else { b })
                    & (if i & 1 == 0 { !c } else { c });
                out |= if table >> i & 1 == 0 { 0 } else { minterm };
            }
            out
        }),
        "popc.b32" => alu!(w; a: w => a.count_ones()),
        "popc.b64" => alu!(w; a: d => a.count_ones()),
        "clz.b32" => alu!(w; a: w => a.leading_zeros()),
        "clz.b64" => alu!(w; a: d => a.leading_zeros()),
        "brev.b32" => alu!(w; a: w => a.reverse_bits()),
        "brev.b64" => alu!(d; a: d => a.reverse_bits()),
        "bfind.u32" => alu!(w; a: w => 31u32.wrapping_sub(a.leading_zeros())),
        "bfind.s32" => alu!(w; a: w => 31u32.wrapping_sub((a ^ (a as i32 >> 31) as u32).leading_zeros())),
        "bfind.shiftamt.u32" => alu!(w; a: w => if a == 0 { u32::MAX } else { a.leading_zeros() }),
        "bfind.u64" => alu!(w; a: d => 63u32.wrapping_sub(a.leading_zeros())),
        "bfe.u32" => alu!(w; a: w, b: w, c: w => field(u64::from(a), b, c, 32) as u32),
        "bfe.s32" => alu!(w; a: w, b: w, c: w => signed_field(i64::from(a as i32) as u64, b, c, 32) as u32),
        "bfe.u64" => alu!(d; a: d, b: w, c: w => field(a, b, c, 64)),
        "bfe.s64" => alu!(d; a: d, b: w, c: w => signed_field(a, b, c, 64)),
        "bfi.b32" => alu!(w; a: w, b: w, c: w, e: w => insert(u64::from(a), u64::from(b), c, e) as u32),
        "bfi.b64" => alu!(d; a: d, b: d, c: w, e: w => insert(a, b, c, e)),
        "prmt.b32" => alu!(w; a: w, b: w, c: w => {
            let bytes = join(a, b);
            let mut out = 0;
            for i in 0..4 {
                let selector = c >> (4 * i) & 15;
                let byte = (bytes >> (8 * (selector & 7))) as u32 & 0xff;
                let byte = if selector & 8 == 0 { byte } else { (byte as i8 >> 7) as u32 & 0xff };
                out |= byte << (8 * i);
            }
            out
        }),
        _ => return None,
    })
}

#[inline(always)]
fn join(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// `length` bits of `a` from `position`, both taken modulo 256 and cut at the width.
#[inline(always)]
fn field(a: u64, position: u32, length: u32, width: u32) -> u64 {
    let (position, length) = (position & 255, length & 255);
    let shifted = if position < width { a >> position } else { 0 };
    if length < width { shifted & ((1 << length) - 1) } else { shifted }
}

/// As [`field`], with the sign bit of the field (or of `a`, where the field reaches beyond) copied
/// upwards. `a` comes sign-extended to 64 bits.
#[inline(always)]
fn signed_field(a: u64, position: u32, length: u32, width: u32) -> u64 {
    let (position, length) = (position & 255, length & 255);
    if length == 0 {
        return 0;
    }
    let shifted = (a as i64) >> position.min(63);
    let drop = 64 - length.min(width).min(64);
    if position + length >= width { shifted as u64 } else { (shifted << drop >> drop) as u64 }
}

/// `b` with `length` bits from `position` replaced by the low bits of `a`.
#[inline(always)]
fn insert(a: u64, b: u64, position: u32, length: u32) -> u64 {
    let (position, length) = (position & 255, length & 255);
    if position >= 64 {
        return b;
    }
    let ones = if length < 64 { (1u64 << length) - 1 } else { u64::MAX };
    b & !(ones << position) | (a & ones) << position
}

fn singles(text: &str, ftz: bool) -> Option<Alu> {
    Some(match text {
        "add.f32" | "add.rn.f32" => single!(ftz; a, b => a + b),
        "sub.f32" | "sub.rn.f32" => single!(ftz; a, b => a - b),
        "mul.f32" | "mul.rn.f32" => single!(ftz; a, b => a * b),
        "fma.rn.f32" => single!(ftz; a, b, c => a.mul_add(b, c)),
        "add.sat.f32" | "add.rn.sat.f32" => single!(ftz; a, b => saturate(a + b)),
        "sub.sat.f32" | "sub.rn.sat.f32" => single!(ftz; a, b => saturate(a - b)),
        "mul.sat.f32" | "mul.rn.sat.f32" => single!(ftz; a, b => saturate(a * b)),
        "fma.rn.sat.f32" => single!(ftz; a, b, c => saturate(a.mul_add(b, c))),
        "add.rz.f32" => single!(ftz; a, b => float::fma_single(a, 1.0, b, Rounding::Zero)),
        "add.rm.f32" => single!(ftz; a, b => float::fma_single(a, 1.0, b, Rounding::Down)),
        "add.rp.f32" => single!(ftz; a, b => float::fma_single(a, 1.0, b, Rounding::Up)),
        "sub.rz.f32" => single!(ftz; a, b => float::fma_single(a, 1.0, -b, Rounding::Zero)),
        "sub.rm.f32" => single!(ftz; a, b => float::fma_single(a, 1.0, -b, Rounding::Down)),
        "sub.rp.f32" => single!(ftz; a, b => float::fma_single(a, 1.0, -b, Rounding::Up)),
        "mul.rz.f32" => single!(ftz; a, b => product(a, b, Rounding::Zero)),
        "mul.rm.f32" => single!(ftz; a, b => product(a, b, Rounding::Down)),
        "mul.rp.f32" => single!(ftz; a, b => product(a, b, Rounding::Up)),
        "fma.rz.f32" => single!(ftz; a, b, c => float::fma_single(a, b, c, Rounding::Zero)),
        "fma.rm.f32" => single!(ftz; a, b, c => float::fma_single(a, b, c, Rounding::Down)),
        "fma.rp.f32" => single!(ftz; a, b, c => float::fma_single(a, b, c, Rounding::Up)),
        "div.rn.f32" => single!(ftz; a, b => a / b),
        "div.rz.f32" => single!(ftz; a, b => float::div_single(a, b, Rounding::Zero)),
        "div.rm.f32" => single!(ftz; a, b => float::div_single(a, b, Rounding::Down)),
        "div.rp.f32" => single!(ftz; a, b => float::div_single(a, b, Rounding::Up)),
        "rcp.rn.f32" => single!(ftz; a => 1.0 / a),
        "rcp.rz.f32" => single!(ftz; a => float::div_single(1.0, a, Rounding::Zero)),
        "rcp.rm.f32" => single!(ftz; a => float::div_single(1.0, a, Rounding::Down)),
        "rcp.rp.f32" => single!(ftz; a => float::div_single(1.0, a, Rounding::Up)),
        "sqrt.rn.f32" => single!(ftz; a => a.sqrt()),
        "sqrt.rz.f32" => single!(ftz; a => float::sqrt_single(a, Rounding::Zero)),
        "sqrt.rm.f32" => single!(ftz; a => float::sqrt_single(a, Rounding::Down)),
        "sqrt.rp.f32" => single!(ftz; a => float::sqrt_single(a, Rounding::Up)),
        "min.f32" => single!(ftz; a, b => float::min(a, b)),
        "max.f32" => single!(ftz; a, b => float::max(a, b)),
        "min.NaN.f32" => {
            single!(ftz; a, b => if a.is_nan() || b.is_nan() { float::NAN } else { float::min(a, b) })
        }
        "max.NaN.f32" => {
            single!(ftz; a, b => if a.is_nan() || b.is_nan() { float::NAN } else { float::max(a, b) })
        }
        "neg.f32" => single!(ftz; a => -a),
        "abs.f32" => single!(ftz; a => a.abs()),
        // The first operand gives the sign.
        "copysign.f32" if !ftz => alu!(w; a: w, b: w => a & 0x8000_0000 | b & 0x7fff_ffff),
        "testp.finite.f32" if !ftz => alu!(p; a: w => f32::from_bits(a).is_finite()),
        "testp.infinite.f32" if !ftz => alu!(p; a: w => f32::from_bits(a).is_infinite()),
        "testp.number.f32" if !ftz => alu!(p; a: w => !f32::from_bits(a).is_nan()),
        "testp.notanumber.f32" if !ftz => alu!(p; a: w => f32::from_bits(a).is_nan()),
        "testp.normal.f32" if !ftz => alu!(p; a: w => f32::from_bits(a).is_normal()),
        "testp.subnormal.f32" if !ftz => alu!(p; a: w => f32::from_bits(a).is_subnormal()),
        _ => return None,
    })
}

/// A product in any mode; doubles hold it exactly.
fn product(a: f32, b: f32, mode: Rounding) -> f32 {
    float::SINGLE.round(f64::from(a) * f64::from(b), mode) as f32
}

/// The `.approx` operations, computed as well as f32 can hold them: hardware may be off in the last
/// bits, and by far more for `tanh`.
fn approximations(text: &str, ftz: bool) -> Option<Alu> {
    Some(match text {
        "div.approx.f32" | "div.full.f32" => single!(ftz; a, b => a / b),
        "rcp.approx.f32" => single!(ftz; a => 1.0 / a),
        "sqrt.approx.f32" => single!(ftz; a => a.sqrt()),
        "rsqrt.approx.f32" => single!(ftz; a => (1.0 / f64::from(a).sqrt()) as f32),
        "ex2.approx.f32" => single!(ftz; a => f64::from(a).exp2() as f32),
        "lg2.approx.f32" => single!(ftz; a => f64::from(a).log2() as f32),
        "sin.approx.f32" => single!(ftz; a => f64::from(a).sin() as f32),
        "cos.approx.f32" => single!(ftz; a => f64::from(a).cos() as f32),
        "tanh.approx.f32" if !ftz => single!(false; a => f64::from(a).tanh() as f32),
        // Only the upper half of the bits is read and given; flushing is the only form there is.
        "rcp.approx.f64" if ftz => alu!(d; a: d => upper(1.0 / flushed(a))),
        "rsqrt.approx.f64" if ftz => alu!(d; a: d => upper(1.0 / flushed(a).sqrt())),
        _ => return None,
    })
}

fn flushed(bits: u64) -> f64 {
    let x = f64::from_bits(bits & !0xffff_ffff);
    if x.abs() < f64::MIN_POSITIVE { 0f64.copysign(x) } else { x }
}

fn upper(x: f64) -> u64 {
    let x = if x.abs() < f64::MIN_POSITIVE { 0f64.copysign(x) } else { x };
    x.to_bits() & !0xffff_ffff
}

fn doubles(text: &str) -> Option<Alu> {
    Some(match text {
        "add.f64" | "add.rn.f64" => double!(a, b => a + b),
        "sub.f64" | "sub.rn.f64" => double!(a, b => a - b),
        "mul.f64" | "mul.rn.f64" => double!(a, b => a * b),
        "fma.rn.f64" => double!(a, b, c => a.mul_add(b, c)),
        "add.rz.f64" => double!(a, b => float::add_double(a, b, Rounding::Zero)),
        "add.rm.f64" => double!(a, b => float::add_double(a, b, Rounding::Down)),
        "add.rp.f64" => double!(a, b => float::add_double(a, b, Rounding::Up)),
        "div.rn.f64" => double!(a, b => a / b),
        "rcp.rn.f64" => double!(a => 1.0 / a),
        "sqrt.rn.f64" => double!(a => a.sqrt()),
        "neg.f64" => double!(a => -a),
        "abs.f64" => double!(a => a.abs()),
        "min.f64" => {
            double!(a, b => if a.is_nan() || b < a || b == a && b.is_sign_negative() { b } else { a })
        }
        "max.f64" => {
            double!(a, b => if a.is_nan() || b > a || b == a && b.is_sign_positive() { b } else { a })
        }
        "copysign.f64" => alu!(d; a: d, b: d => a & (1 << 63) | b & !(1 << 63)),
        _ => return None,
    })
}

/// Arithmetic on f16 and bf16. A product or sum of two is exact in a double, or rounded to odd.
fn shorts(operation: &str, format: Short, packed: bool) -> Option<Alu> {
    const ONE: [u32; 2] = [0x3c00, 0x3f80];
    Some(match operation {
        "add" | "add.rn" => short!(format, packed; a, b; f => f.fma(a, ONE[f as usize], b)),
        "sub" | "sub.rn" => short!(format, packed; a, b; f => f.fma(b, ONE[f as usize] | 0x8000, a)),
        "mul" | "mul.rn" => {
            short!(format, packed; a, b; f => f.bits(f.value(a) * f.value(b), Rounding::Nearest))
        }
        "fma.rn" => short!(format, packed; a, b, c; f => f.fma(a, b, c)),
        "fma.rn.relu" => short!(format, packed; a, b, c; f => {
            let sum = f.fma(a, b, c);
            if sum & 0x8000 != 0 && sum & 0x7fff <= 0x7c00 { 0 } else { sum }
        }),
        "neg" => short!(format, packed; a; _f => a ^ 0x8000),
        "abs" => short!(format, packed; a; _f => a & 0x7fff),
        "min" => short!(format, packed; a, b; f => pick(f, a, b, false, false)),
        "max" => short!(format, packed; a, b; f => pick(f, a, b, true, false)),
        "min.NaN" => short!(format, packed; a, b; f => pick(f, a, b, false, true)),
        "max.NaN" => short!(format, packed; a, b; f => pick(f, a, b, true, true)),
        "ex2.approx" if format == Short::Half => {
            short!(format, packed; a; f => f.bits(f.value(a).exp2(), Rounding::Nearest))
        }
        "tanh.approx" => short!(format, packed; a; f => f.bits(f.value(a).tanh(), Rounding::Nearest)),
        "mov" if !packed => return None,
        _ => return None,
    })
}

/// The smaller or larger of two 16-bit floats, as [`float::min`] and [`float::max`] choose.
#[inline(always)]
fn pick(format: Short, a: u32, b: u32, larger: bool, propagate: bool) -> u32 {
    let (x, y) = (format.value(a), format.value(b));
    match (x.is_nan(), y.is_nan()) {
        (true, true) => 0x7fff,
        (true, false) | (false, true) if propagate => 0x7fff,
        (true, false) => b,
        (false, true) => a,
        _ if x == y => {
            if larger {
                a & b
            } else {
                a | b
            }
        }
        _ => {
            if (x < y) != larger {
                a
            } else {
                b
            }
        }
    }
}

/// `setp` with one comparison.
fn compare(comparison: &str, kind: &str, ftz: bool) -> Option<Alu> {
    macro_rules! of {
        ($file:ident, $x:ident => $value:expr; $a:ident $b:ident, $test:expr) => {
            alu!(p; a: $file, b: $file => {
                let ($a, $b) = ({ let $x = a; $value }, { let $x = b; $value });
                $test
            })
        };
    }
    macro_rules! ordered {
        ($file:ident, $x:ident => $value:expr) => {
            match comparison {
                "eq" => of!($file, $x => $value; a b, a == b),
                "ne" => of!($file, $x => $value; a b, a != b),
                "lt" | "lo" => of!($file, $x => $value; a b, a < b),
                "le" | "ls" => of!($file, $x => $value; a b, a <= b),
                "gt" | "hi" => of!($file, $x => $value; a b, a > b),
                "ge" | "hs" => of!($file, $x => $value; a b, a >= b),
                _ => return None,
            }
        };
    }
    macro_rules! floating {
        ($file:ident, $x:ident => $value:expr) => {
            match comparison {
                // Unlike Rust's, the ordered `ne` is false where either is NaN.
                "ne" => of!($file, $x => $value; a b, a != b && !a.is_nan() && !b.is_nan()),
                "eq" | "lt" | "le" | "gt" | "ge" => ordered!($file, $x => $value),
                "equ" => of!($file, $x => $value; a b, a == b || a.is_nan() || b.is_nan()),
                "neu" => of!($file, $x => $value; a b, a != b),
                "ltu" => of!($file, $x => $value; a b, a < b || a.is_nan() || b.is_nan()),
                "leu" => of!($file, $x => $value; a b, a <= b || a.is_nan() || b.is_nan()),
                "gtu" => of!($file, $x => $value; a b, a > b || a.is_nan() || b.is_nan()),
                "geu" => of!($file, $x => $value; a b, a >= b || a.is_nan() || b.is_nan()),
                "num" => of!($file, $x => $value; a b, !a.is_nan() && !b.is_nan()),
                "nan" => of!($file, $x => $value; a b, a.is_nan() || b.is_nan()),
                _ => return None,
            }
        };
    }
    let by_name = matches!(comparison, "lo" | "ls" | "hi" | "hs");
    let equality = matches!(comparison, "eq" | "ne");
    Some(match (kind, ftz) {
        ("f32", false) => floating!(w, x => f32::from_bits(x)),
        ("f32", true) => floating!(w, x => flush(f32::from_bits(x))),
        ("f64", false) => floating!(d, x => f64::from_bits(x)),
        ("f16", false) => floating!(w, x => from_half(x)),
        ("bf16", false) => floating!(w, x => from_brain(x)),
        ("s32", false) if !by_name => ordered!(w, x => x as i32),
        ("u32", false) => ordered!(w, x => x),
        ("b32" | "b16", false) if equality => ordered!(w, x => x),
        ("s16", false) if !by_name => ordered!(w, x => x as i16),
        ("u16", false) => ordered!(w, x => x & 0xffff),
        ("s64", false) if !by_name => ordered!(d, x => x as i64),
        ("u64", false) => ordered!(d, x => x),
        ("b64", false) if equality => ordered!(d, x => x),
        _ => return None,
    })
}

/// The kinds of number that `cvt` knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Number {
    /// Bits, and whether signed.
    Integer(u16, bool),
    /// Bits; 16 is f16.
    Float(u16),
    /// bf16
    Brain,
}

fn number(kind: &str) -> Option<Number> {
    Some(match kind {
        "u8" => Number::Integer(8, false),
        "u16" => Number::Integer(16, false),
        "u32" => Number::Integer(32, false),
        "u64" => Number::Integer(64, false),
        "s8" => Number::Integer(8, true),
        "s16" => Number::Integer(16, true),
        "s32" => Number::Integer(32, true),
        "s64" => Number::Integer(64, true),
        "f16" => Number::Float(16),
        "f32" => Number::Float(32),
        "f64" => Number::Float(64),
        "bf16" => Number::Brain,
        _ => return None,
    })
}

/// `cvt`, its opcode split at the dots with `cvt` and `.ftz` taken off.
fn convert(parts: &[&str], ftz: bool) -> Option<Alu> {
    let [modifiers @ .., to, from] = parts else { return None };
    match (*to, *from, modifiers) {
        ("bf16x2", "f32", ["rn"]) if !ftz => {
            return Some(alu!(w; a: w, b: w =>
                float::brain_bits(f32::from_bits(a)) << 16 | float::brain_bits(f32::from_bits(b))));
        }
        ("f16x2", "f32", ["rn"]) if !ftz => {
            return Some(alu!(w; a: w, b: w =>
                float::half_bits(f32::from_bits(a)) << 16 | float::half_bits(f32::from_bits(b))));
        }
        ("bf16x2", "f32", ["rn", "relu"]) if !ftz => {
            return Some(alu!(w; a: w, b: w => {
                let [a, b] = [a, b].map(f32::from_bits).map(|x| if x < 0.0 { 0.0 } else { x });
                float::brain_bits(a) << 16 | float::brain_bits(b)
            }));
        }
        ("tf32", "f32", ["rna"]) if !ftz => {
            return Some(alu!(w; a: w =>
                (float::TENSOR.round(f64::from(f32::from_bits(a)), Rounding::Away) as f32).to_bits()));
        }
        ("e4m3x2", "f32", ["rn", "satfinite"]) if !ftz => {
            return Some(alu!(w; a: w, b: w => float::quarter_bits(f32::from_bits(a), float::E4M3) << 8
                | float::quarter_bits(f32::from_bits(b), float::E4M3)));
        }
        ("e5m2x2", "f32", ["rn", "satfinite"]) if !ftz => {
            return Some(alu!(w; a: w, b: w => float::quarter_bits(f32::from_bits(a), float::E5M2) << 8
                | float::quarter_bits(f32::from_bits(b), float::E5M2)));
        }
        ("f16x2", "e4m3x2", ["rn"]) if !ftz => {
            return Some(alu!(w; a: w => float::half_bits(float::from_quarter(a & 0xff, float::E4M3))
                | float::half_bits(float::from_quarter(a >> 8 & 0xff, float::E4M3)) << 16));
        }
        ("f16x2", "e5m2x2", ["rn"]) if !ftz => {
            return Some(alu!(w; a: w => float::half_bits(float::from_quarter(a & 0xff, float::E5M2))
                | float::half_bits(float::from_quarter(a >> 8 & 0xff, float::E5M2)) << 16));
        }
        _ => {}
    }
    let (to, from) = (number(to)?, number(from)?);
    match (to, from) {
        (Number::Integer(..), Number::Integer(..)) if modifiers.is_empty() && !ftz => Some(resize(to, from)),
        (Number::Integer(bits, signed), _) => float_to_integer(bits, signed, from, modifiers, ftz),
        (_, Number::Integer(bits, signed)) if !ftz => integer_to_float(to, bits, signed, modifiers),
        (_, Number::Integer(..)) => None,
        _ => float_to_float(to, from, modifiers, ftz),
    }
}

/// Between integers: cut to the narrower, extend by the sign of the source, then by that of the
/// destination.
fn resize(to: Number, from: Number) -> Alu {
    let (Number::Integer(to_bits, to_signed), Number::Integer(from_bits, from_signed)) = (to, from) else {
        unreachable!("called for integers only");
    };
    match (to_bits, from_bits, from_signed) {
        (64, 32, false) => return alu!(d; a: w => u64::from(a)),
        (64, 32, true) => return alu!(d; a: w => a as i32 as i64 as u64),
        (32, 64, _) => return alu!(w; a: d => a as u32),
        (32, 32, _) => return alu!(w; a: w => a),
        (32, 16, false) => return alu!(w; a: w => a & 0xffff),
        (16, 32, _) => return alu!(w; a: w => a & 0xffff),
        _ => {}
    }
    #[inline(always)]
    fn extend(x: u64, how: u16) -> u64 {
        let drop = 64 - u32::from(how & 127);
        if how & 128 == 0 { x << drop >> drop } else { ((x << drop) as i64 >> drop) as u64 }
    }
    let how = |bits: u16, signed: bool| bits | u16::from(signed) << 7;
    let constants = [how(from_bits, from_signed), how(to_bits, to_signed), 0];
    match (to_bits, from_bits) {
        (64, 64) => alu!(d; a: d; constants k constants => extend(extend(a, k[0]), k[1])),
        (64, _) => alu!(d; a: w; constants k constants => extend(extend(u64::from(a), k[0]), k[1])),
        // 16-bit registers hold their value zero-extended.
        (16, 64) => alu!(w; a: d; constants k constants => extend(extend(a, k[0]), k[1]) as u32 & 0xffff),
        (16, _) => {
            alu!(w; a: w; constants k constants => extend(extend(u64::from(a), k[0]), k[1]) as u32 & 0xffff)
        }
        (_, 64) => alu!(w; a: d; constants k constants => extend(extend(a, k[0]), k[1]) as u32),
        _ => alu!(w; a: w; constants k constants => extend(extend(u64::from(a), k[0]), k[1]) as u32),
    }
}

/// To the integer in a mode, out of range to the nearest in range; NaN is zero for the narrower
/// conversions, the top bit alone for those with a 64-bit side.
fn float_to_integer(bits: u16, signed: bool, from: Number, modifiers: &[&str], ftz: bool) -> Option<Alu> {
    let mode = match modifiers {
        ["rni"] => 0,
        ["rzi"] => 1,
        ["rmi"] => 2,
        ["rpi"] => 3,
        _ => return None,
    };
    #[inline(always)]
    fn integer(x: f64, k: [u16; 3], wide: bool) -> u64 {
        let (bits, signed) = (u32::from(k[0]), k[1] != 0);
        if x.is_nan() {
            return if wide || bits == 64 { 1 << (bits - 1) } else { 0 };
        }
        let x = match k[2] {
            0 => x.round_ties_even(),
            1 => x.trunc(),
            2 => x.floor(),
            _ => x.ceil(),
        };
        if signed {
            let top = i64::MAX >> (64 - bits);
            (x as i64).clamp(-top - 1, top) as u64
        } else {
            (x as u64).min(u64::MAX >> (64 - bits))
        }
    }
    let constants = [bits, u16::from(signed), mode];
    let cut = |alu: Alu| Some(alu);
    match (bits == 64, from) {
        (false, Number::Float(32)) if ftz => cut(
            alu!(w; a: w; constants k constants => integer(f64::from(flush(f32::from_bits(a))), k, false) as u32),
        ),
        (true, Number::Float(32)) if ftz => cut(
            alu!(d; a: w; constants k constants => integer(f64::from(flush(f32::from_bits(a))), k, false)),
        ),
        _ if ftz => None,
        (false, Number::Float(32)) => cut(
            alu!(w; a: w; constants k constants => narrow(integer(f64::from(f32::from_bits(a)), k, false), k)),
        ),
        (true, Number::Float(32)) => {
            cut(alu!(d; a: w; constants k constants => integer(f64::from(f32::from_bits(a)), k, false)))
        }
        (false, Number::Float(16)) => {
            cut(alu!(w; a: w; constants k constants => narrow(integer(f64::from(from_half(a)), k, false), k)))
        }
        (false, Number::Brain) => cut(
            alu!(w; a: w; constants k constants => narrow(integer(f64::from(from_brain(a)), k, false), k)),
        ),
        (false, Number::Float(64)) => {
            cut(alu!(w; a: d; constants k constants => narrow(integer(f64::from_bits(a), k, true), k)))
        }
        (true, Number::Float(64)) => {
            cut(alu!(d; a: d; constants k constants => integer(f64::from_bits(a), k, true)))
        }
        _ => None,
    }
}

/// 16-bit registers hold their value zero-extended; 8-bit results are extended by their sign.
#[inline(always)]
fn narrow(x: u64, k: [u16; 3]) -> u32 {
    if k[0] == 16 { x as u32 & 0xffff } else { x as u32 }
}

fn integer_to_float(to: Number, bits: u16, signed: bool, modifiers: &[&str]) -> Option<Alu> {
    let mode = match modifiers {
        ["rn"] => Rounding::Nearest,
        ["rz"] => Rounding::Zero,
        ["rm"] => Rounding::Down,
        ["rp"] => Rounding::Up,
        _ => return None,
    };
    if mode != Rounding::Nearest {
        // 32 bits are exact in a double, so rounding that is exact.
        macro_rules! directed {
            ($mode:expr) => {
                if signed {
                    alu!(w; a: w => (float::SINGLE.round(f64::from(a as i32), $mode) as f32).to_bits())
                } else {
                    alu!(w; a: w => (float::SINGLE.round(f64::from(a), $mode) as f32).to_bits())
                }
            };
        }
        return match (to, bits, mode) {
            (Number::Float(32), 32, Rounding::Zero) => Some(directed!(Rounding::Zero)),
            (Number::Float(32), 32, Rounding::Down) => Some(directed!(Rounding::Down)),
            (Number::Float(32), 32, Rounding::Up) => Some(directed!(Rounding::Up)),
            _ => None,
        };
    }
    Some(match (to, bits, signed) {
        (Number::Float(32), 32, true) => alu!(w; a: w => (a as i32 as f32).to_bits()),
        (Number::Float(32), 32, false) => alu!(w; a: w => (a as f32).to_bits()),
        (Number::Float(32), 64, true) => alu!(w; a: d => (a as i64 as f32).to_bits()),
        (Number::Float(32), 64, false) => alu!(w; a: d => (a as f32).to_bits()),
        (Number::Float(32), 16, true) => alu!(w; a: w => f32::from(a as i16).to_bits()),
        (Number::Float(32), 16, false) => alu!(w; a: w => f32::from(a as u16).to_bits()),
        (Number::Float(32), 8, true) => alu!(w; a: w => f32::from(a as i8).to_bits()),
        (Number::Float(32), 8, false) => alu!(w; a: w => f32::from(a as u8).to_bits()),
        (Number::Float(64), 32, true) => alu!(d; a: w => f64::from(a as i32).to_bits()),
        (Number::Float(64), 32, false) => alu!(d; a: w => f64::from(a).to_bits()),
        (Number::Float(64), 64, true) => alu!(d; a: d => (a as i64 as f64).to_bits()),
        (Number::Float(64), 64, false) => alu!(d; a: d => (a as f64).to_bits()),
        (Number::Float(16), 32, true) => {
            alu!(w; a: w => Short::Half.bits(f64::from(a as i32), Rounding::Nearest))
        }
        (Number::Float(16), 32, false) => alu!(w; a: w => Short::Half.bits(f64::from(a), Rounding::Nearest)),
        (Number::Float(16), 16, true) => {
            alu!(w; a: w => Short::Half.bits(f64::from(a as i16), Rounding::Nearest))
        }
        (Number::Float(16), 16, false) => {
            alu!(w; a: w => Short::Half.bits(f64::from(a as u16), Rounding::Nearest))
        }
        (Number::Brain, 32, true) => {
            alu!(w; a: w => Short::Brain.bits(f64::from(a as i32), Rounding::Nearest))
        }
        (Number::Brain, 32, false) => alu!(w; a: w => Short::Brain.bits(f64::from(a), Rounding::Nearest)),
        _ => return None,
    })
}

fn float_to_float(to: Number, from: Number, modifiers: &[&str], ftz: bool) -> Option<Alu> {
    use Number::{Brain, Float};
    Some(match (to, from, modifiers) {
        (Float(32), Float(32), []) => single!(ftz; a => a),
        (Float(32), Float(32), ["sat"]) => single!(ftz; a => saturate(a)),
        (Float(32), Float(32), ["rni"]) => single!(ftz; a => a.round_ties_even()),
        (Float(32), Float(32), ["rzi"]) => single!(ftz; a => a.trunc()),
        (Float(32), Float(32), ["rmi"]) => single!(ftz; a => a.floor()),
        (Float(32), Float(32), ["rpi"]) => single!(ftz; a => a.ceil()),
        (Float(64), Float(32), []) if ftz => alu!(d; a: w => f64::from(flush(f32::from_bits(a))).to_bits()),
        (Float(64), Float(32), []) => alu!(d; a: w => f64::from(f32::from_bits(a)).to_bits()),
        (Float(32), Float(64), ["rn"]) if ftz => alu!(w; a: d => flush(f64::from_bits(a) as f32).to_bits()),
        (Float(32), Float(64), ["rn"]) => alu!(w; a: d => (f64::from_bits(a) as f32).to_bits()),
        (Float(32), Float(16), []) => alu!(w; a: w => from_half(a).to_bits()),
        _ if ftz => return None,
        (Float(32), Float(64), ["rz"]) => {
            alu!(w; a: d => (float::SINGLE.round(f64::from_bits(a), Rounding::Zero) as f32).to_bits())
        }
        (Float(32), Float(64), ["rm"]) => {
            alu!(w; a: d => (float::SINGLE.round(f64::from_bits(a), Rounding::Down) as f32).to_bits())
        }
        (Float(32), Float(64), ["rp"]) => {
            alu!(w; a: d => (float::SINGLE.round(f64::from_bits(a), Rounding::Up) as f32).to_bits())
        }
        (Float(64), Float(64), ["rni"]) => double!(a => a.round_ties_even()),
        (Float(64), Float(64), ["rzi"]) => double!(a => a.trunc()),
        (Float(64), Float(64), ["rmi"]) => double!(a => a.floor()),
        (Float(64), Float(64), ["rpi"]) => double!(a => a.ceil()),
        (Float(16), Float(32), ["rn"]) => alu!(w; a: w => float::half_bits(f32::from_bits(a))),
        (Float(16), Float(32), ["rz"]) => {
            alu!(w; a: w => Short::Half.bits(f64::from(f32::from_bits(a)), Rounding::Zero))
        }
        (Float(16), Float(64), ["rn"]) => {
            alu!(w; a: d => Short::Half.bits(f64::from_bits(a), Rounding::Nearest))
        }
        (Float(64), Float(16), []) => alu!(d; a: w => f64::from(from_half(a)).to_bits()),
        (Brain, Float(32), ["rn"]) => alu!(w; a: w => float::brain_bits(f32::from_bits(a))),
        (Brain, Float(32), ["rz"]) => {
            alu!(w; a: w => Short::Brain.bits(f64::from(f32::from_bits(a)), Rounding::Zero))
        }
        (Brain, Float(64), ["rn"]) => {
            alu!(w; a: d => Short::Brain.bits(f64::from_bits(a), Rounding::Nearest))
        }
        (Float(32), Brain, []) => alu!(w; a: w => from_brain(a).to_bits()),
        (Float(64), Brain, []) => alu!(d; a: w => f64::from(from_brain(a)).to_bits()),
        _ => return None,
    })
}

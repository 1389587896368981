//! Tiles rounded to e4m3.
//!
//! A task has the columns of some tiles that are in the same rows: it reads their rows twice, once
//! for the magnitudes of each column and once to round.

use super::grouped::offsets_fit;
use super::{Run, sizes};
use crate::backend::cpu::simd::{from_bf16, kernel_fn};
use crate::backend::cpu::{Arguments, Context, Scratch, Stored, View};
use dreamc_compiler::ir::TILE;
use dreamc_compiler::program::kernel::Fp8;
use half::bf16;
use std::ops::Range;

/// Columns of a task, as far as tiles allow.
const COLUMNS: usize = 512;

kernel_fn! {
    /// The larger magnitudes, as bits: those of what is infinite or no number are largest.
    fn larger(x: &[f32], largest: &mut [u32]) {
        for (largest, x) in largest.iter_mut().zip(x) {
            *largest = (*largest).max(x.to_bits() & 0x7fff_ffff);
        }
    }

    fn larger_narrow(x: &[bf16], largest: &mut [u32]) {
        for (largest, x) in largest.iter_mut().zip(x) {
            *largest = (*largest).max(from_bf16(*x).to_bits() & 0x7fff_ffff);
        }
    }

    /// Numbers rounded in units of `unit`, whose inverse is `per`.
    fn round(x: &[f32], per: &[f32], unit: &[f32], y: &mut [bf16]) {
        for (((y, x), per), unit) in y.iter_mut().zip(x).zip(per).zip(unit) {
            *y = rounded(*x, *per, *unit);
        }
    }

    fn round_narrow(x: &[bf16], per: &[f32], unit: &[f32], y: &mut [bf16]) {
        for (((y, x), per), unit) in y.iter_mut().zip(x).zip(per).zip(unit) {
            *y = rounded(from_bf16(*x), *per, *unit);
        }
    }
}

/// `x` rounded to e4m3 in units of `unit`, ties to even. All is exact but the rounding, so that the
/// upper half of the result's bits is its bf16.
#[inline(always)]
fn rounded(x: f32, per: f32, unit: f32) -> bf16 {
    let number = x * per;
    let size = number.to_bits() & 0x7fff_ffff;
    // Below 2^-6 the sum's last place is 2^-9.
    let small = ((f32::from_bits(size) + 16384.0) - 16384.0).to_bits();
    let normal = (size.wrapping_add(0x7_ffff + (size >> 20 & 1))) & 0xfff0_0000;
    let rounded = if size < 0x3c80_0000 { small } else { normal };
    let scaled = f32::from_bits(rounded | (number.to_bits() & 0x8000_0000)) * unit;
    bf16::from_bits((scaled.to_bits() >> 16) as u16)
}

/// The scale of a tile and its inverse, by the bits of its largest magnitude. A tile with a number
/// that is infinite or none has none.
fn scale(largest: u32) -> (f32, f32) {
    if largest >= 0x7f80_0000 {
        return (f32::NAN, f32::NAN);
    }
    let above = u32::from(largest & 0x7f_ffff > 0x60_0000);
    let k = ((largest >> 23) as i32 - 127 - 8 + above as i32).max(-100);
    let power = |k: i32| f32::from_bits(((k + 127) as u32) << 23);
    (power(k), power(-k))
}

/// Numbers that are rounded.
trait Number: Copy {
    fn larger(x: &[Self], largest: &mut [u32]);
    fn round(x: &[Self], per: &[f32], unit: &[f32], y: &mut [bf16]);
}

impl Number for f32 {
    fn larger(x: &[f32], largest: &mut [u32]) {
        larger(x, largest);
    }

    fn round(x: &[f32], per: &[f32], unit: &[f32], y: &mut [bf16]) {
        round(x, per, unit, y);
    }
}

impl Number for bf16 {
    fn larger(x: &[bf16], largest: &mut [u32]) {
        larger_narrow(x, largest);
    }

    fn round(x: &[bf16], per: &[f32], unit: &[f32], y: &mut [bf16]) {
        round_narrow(x, per, unit, y);
    }
}

/// Rounds tiles `wide` columns wide that have these rows and columns.
fn tiles<T: Number>(
    (x, y): (View<T>, View<bf16>),
    (rows, columns): (Range<usize>, Range<usize>),
    wide: usize,
    [largest, per, unit]: [&mut [f32]; 3],
) {
    let mut sizes = [0u32; COLUMNS];
    let across = columns.len();
    for (first, part) in (0..across).step_by(COLUMNS).map(|at| (at, at..(at + COLUMNS).min(across))) {
        let sizes = &mut sizes[..part.len()];
        sizes.fill(0);
        let part = columns.start + part.start..columns.start + part.end;
        for row in rows.clone() {
            T::larger(&x.row(row)[part.clone()], sizes);
        }
        for (to, size) in largest[first..].iter_mut().zip(&*sizes) {
            *to = f32::from_bits(*size);
        }
    }
    for tile in (0..across).step_by(wide) {
        let of = tile..(tile + wide).min(across);
        let most = largest[of.clone()].iter().map(|x| x.to_bits()).max().unwrap_or(0);
        let (power, inverse) = scale(most);
        unit[of.clone()].fill(power);
        per[of].fill(inverse);
    }
    for row in rows {
        let y = &mut y.row_mut(row)[columns.clone()];
        T::round(&x.row(row)[columns.clone()], &per[..across], &unit[..across], y);
    }
}

/// Columns of a task: whole tiles.
fn span(kernel: &Fp8) -> usize {
    let [columns, wide] = sizes([kernel.columns, kernel.tile[1]]);
    let wide = wide.min(columns.max(1));
    COLUMNS.max(wide) / wide * wide
}

impl Run for Fp8 {
    fn scratch(&self) -> Scratch {
        Scratch::local(3 * span(self))
    }

    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        match (self.e4m3, args.narrow("x")) {
            (false, true) => rounds::<bf16>(self, cx, args),
            (false, false) => rounds::<f32>(self, cx, args),
            (true, true) => codes::<bf16>(self, cx, args),
            (true, false) => codes::<f32>(self, cx, args),
        }
    }
}

/// The number of a code.
pub(super) fn number(code: u8) -> f32 {
    let (sign, size) = (u32::from(code & 0x80) << 24, u32::from(code & 0x7f));
    let of = match size {
        0x7f => f32::NAN,
        0..8 => size as f32 / 512.0,
        _ => f32::from_bits((size << 20) + (120 << 23)),
    };
    f32::from_bits(of.to_bits() | sign)
}

/// The code of a number of e4m3.
fn code(x: f32) -> u8 {
    let (sign, size) = ((x.to_bits() >> 24 & 0x80) as u8, x.abs());
    let small = size < 1.0 / 64.0;
    sign | if small { (size * 512.0) as u8 } else { ((size.to_bits() >> 20) - 960) as u8 }
}

/// Tiles to codes, and the exponents of their scales after them.
fn codes<T: Number + Stored>(kernel: &Fp8, cx: &Context, args: &Arguments) {
    let [rows, columns] = sizes([kernel.rows, kernel.columns]);
    let [lines, depth] = sizes(kernel.lines());
    let [high, wide] = sizes(kernel.tile);
    let (x, y) = (args.view::<T>("x").rows_of(columns), args.view::<u8>("y"));
    cx.parallel(rows.div_ceil(high), |task, _| {
        let down = task * high..((task + 1) * high).min(rows);
        for across in (0..columns).step_by(wide).map(|first| first..(first + wide).min(columns)) {
            let numbers = |row: usize| x.row(row)[across.clone()].iter().map(|x| x.widen());
            let sizes = down.clone().flat_map(numbers).map(|x| x.to_bits() & 0x7fff_ffff);
            let (unit, per) = scale(sizes.max().unwrap_or(0));
            for row in down.clone() {
                for (column, x) in across.clone().zip(numbers(row)) {
                    let (line, at) = if kernel.turned { (column, row) } else { (row, column) };
                    let (number, exponent) = match unit.is_nan() {
                        true => (0x7f, 127),
                        false => (code(rounded(x, per, 1.0).to_f32()), (unit.to_bits() >> 23) as u8),
                    };
                    y.part_mut(line * depth + at, 1)[0] = number;
                    if at % TILE as usize == 0 {
                        y.part_mut(lines * depth + at / TILE as usize * lines + line, 1)[0] = exponent;
                    }
                }
            }
        }
    });
}

fn rounds<T: Number + Sync>(kernel: &Fp8, cx: &Context, args: &Arguments) {
    let [matrices, rows, columns] = sizes([kernel.matrices, kernel.rows, kernel.columns]);
    let [high, wide] = sizes(kernel.tile);
    let (wide, span) = (wide.min(columns.max(1)), span(kernel));
    let (x, y) = (args.view::<T>("x").rows_of(columns), args.view::<bf16>("y").rows_of(columns));
    let offsets = kernel.groups.map(|_| args.ints("offsets").all());
    if offsets.is_some_and(|offsets| !offsets_fit(cx, offsets, rows)) {
        return;
    }
    // Rows of the tiles of one row of them, each list in order.
    let starts: Vec<Range<usize>> = match offsets {
        None => (0..matrices).map(|m| m * rows..(m + 1) * rows).collect(),
        Some(offsets) => {
            let ends = offsets[1..].iter().map(|&end| end as usize).chain([rows]);
            offsets.iter().map(|&begin| begin as usize).zip(ends).map(|(begin, end)| begin..end).collect()
        }
    };
    let lines: Vec<Range<usize>> = starts
        .iter()
        .flat_map(|all| all.clone().step_by(high).map(|first| first..first.saturating_add(high).min(all.end)))
        .collect();
    let across = columns.div_ceil(span);
    // Short tiles several to a task.
    let each = ((1 << 14) / (span * high.min(rows.max(1))).max(1)).max(1);
    let down = lines.len().div_ceil(each);
    cx.parallel(down * across, |task, scratch| {
        let (largest, rest) = scratch.split_at_mut(span);
        let (per, rest) = rest.split_at_mut(span);
        let unit = &mut rest[..span];
        let column = task % across * span;
        let part = column..(column + span).min(columns);
        let first = task / across * each;
        for line in &lines[first..(first + each).min(lines.len())] {
            tiles((x, y), (line.clone(), part.clone()), wide, [&mut *largest, &mut *per, &mut *unit]);
        }
    });
}

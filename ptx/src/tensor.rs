//! Warp-wide matrices: `ldmatrix`, `stmatrix` and `mma.sync`.
//!
//! Products of the narrow formats are exact in f32; they are added in order of k, each sum rounded.
//! Hardware adds in other orders and widths, so results agree within a tolerance and not to the
//! bit.

use super::alu::Registers;
use super::decode::Operands;
use super::finding::{Kind, LoadError, Outcome, Trouble};
use super::float;
use super::parse::Operand;
use super::program::{Address, Op};

/// `ldmatrix` or `stmatrix` of 8 × 8 matrices of 16-bit elements.
#[derive(Debug)]
pub(super) struct Matrix {
    pub load: bool,
    pub transposed: bool,
    /// A register for each matrix.
    pub regs: Vec<u16>,
    pub address: Address,
}

/// `mma.sync`: d = a b + c, all fragments spread over the warp.
#[derive(Debug)]
pub(super) struct Multiply {
    element: Element,
    depth: usize,
    d: Vec<u16>,
    a: Vec<u16>,
    b: Vec<u16>,
    c: Vec<u16>,
}

/// The type of the factors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Element {
    Brain,
    Half,
    Tensor,
    /// e4m3.
    Quarter,
}

impl Element {
    /// Bytes of a factor in memory.
    pub fn bytes(self) -> usize {
        match self {
            Element::Brain | Element::Half => 2,
            Element::Tensor => 4,
            Element::Quarter => 1,
        }
    }

    /// The factor in that half or quarter of a register, lowest first; the whole register for tf32.
    #[inline(always)]
    pub fn value(self, bits: u32, part: usize) -> f32 {
        match self {
            Element::Brain => float::from_brain(bits >> (16 * part)),
            Element::Half => float::from_half(bits >> (16 * part)),
            Element::Quarter => float::from_quarter(bits >> (8 * part) & 0xff, float::E4M3),
            // The bits that tf32 has not are ignored.
            Element::Tensor => f32::from_bits(bits & 0xffff_e000),
        }
    }
}

/// The operation that an opcode names, if it is one of this family.
pub(super) fn decode<'a>(
    decoder: &mut impl Operands<'a>,
    opcode: &str,
    operands: &[Operand<'a>],
) -> Result<Option<Op>, LoadError> {
    let parts: Vec<&str> = opcode.split('.').collect();
    if let [what @ ("ldmatrix" | "stmatrix"), "sync", "aligned", "m8n8", count, rest @ .., "b16"] = &parts[..]
    {
        let count = match *count {
            "x1" => 1,
            "x2" => 2,
            "x4" => 4,
            _ => return Ok(None),
        };
        let transposed = match rest {
            ["shared" | "shared::cta"] | [] => false,
            ["trans", "shared" | "shared::cta"] | ["trans"] => true,
            _ => return Ok(None),
        };
        if !rest.contains(&"shared") && !rest.contains(&"shared::cta") {
            return Err(decoder.fault("matrices are moved through addresses in shared memory (`.shared`)"));
        }
        let load = *what == "ldmatrix";
        let (data, place) = match (operands, load) {
            ([data, place], true) | ([place, data], false) => (data, place),
            _ => return Err(decoder.fault("two operands are taken")),
        };
        let regs = decoder.words(data, count, load)?;
        let address = decoder.address_of(place)?;
        return Ok(Some(Op::Matrix(Box::new(Matrix { load, transposed, regs, address }))));
    }
    let (shape, types) = match &parts[..] {
        ["mma", "sync", "aligned", shape, "row", "col", types @ ..] => (*shape, types),
        _ => return Ok(None),
    };
    let (depth, element) = match (shape, types) {
        ("m16n8k16", ["f32", "bf16", "bf16", "f32"]) => (16, Element::Brain),
        ("m16n8k16", ["f32", "f16", "f16", "f32"]) => (16, Element::Half),
        ("m16n8k8", ["f32", "bf16", "bf16", "f32"]) => (8, Element::Brain),
        ("m16n8k8", ["f32", "f16", "f16", "f32"]) => (8, Element::Half),
        ("m16n8k8", ["f32", "tf32", "tf32", "f32"]) => (8, Element::Tensor),
        ("m16n8k4", ["f32", "tf32", "tf32", "f32"]) => (4, Element::Tensor),
        _ => return Ok(None),
    };
    let [d, a, b, c] = operands else { return Err(decoder.fault("four operands are taken")) };
    let words = if element == Element::Tensor { depth / 2 } else { depth / 4 };
    Ok(Some(Op::Multiply(Box::new(Multiply {
        element,
        depth,
        d: decoder.words(d, 4, true)?,
        a: decoder.words(a, words, false)?,
        b: decoder.words(b, words / 2, false)?,
        c: decoder.words(c, 4, false)?,
    }))))
}

/// Refuses a warp-wide operation that not all lanes execute.
pub(super) fn whole_warp(mask: u32, what: &str) -> Outcome<()> {
    if mask == u32::MAX {
        return Ok(());
    }
    Err(Trouble::new(
        Kind::Mask,
        format!("{what} by {} of the warp's 32 lanes ({mask:#010x})", mask.count_ones()),
        "all 32 lanes executing it together: outside divergent code, in blocks of whole warps",
    )
    .lane(mask.trailing_zeros() % 32))
}

impl Multiply {
    /// Multiplies, for a whole warp.
    pub fn run(&self, registers: &mut Registers) {
        let mut a = [[0f32; 16]; 16];
        let mut b = [[0f32; 8]; 16];
        let halves = if self.element == Element::Tensor { 1 } else { 2 };
        // A lane holds, of each quadrant of a and each half of b, the elements of its row and its
        // column (or columns).
        for (i, &row) in self.a.iter().enumerate() {
            for (lane, &word) in registers.w[usize::from(row)].iter().enumerate() {
                for half in 0..halves {
                    let (m, k) = (lane / 4 + i % 2 * 8, lane % 4 * halves + half + i / 2 * 4 * halves);
                    a[m][k] = self.element.value(word, half);
                }
            }
        }
        for (i, &row) in self.b.iter().enumerate() {
            for (lane, &word) in registers.w[usize::from(row)].iter().enumerate() {
                for half in 0..halves {
                    b[lane % 4 * halves + half + i * 4 * halves][lane / 4] = self.element.value(word, half);
                }
            }
        }
        let mut sums = [[0f32; 8]; 16];
        for (i, &row) in self.c.iter().enumerate() {
            for (lane, &word) in registers.w[usize::from(row)].iter().enumerate() {
                sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2] = f32::from_bits(word);
            }
        }
        for (sums, a) in sums.iter_mut().zip(&a) {
            for (a, b) in a[..self.depth].iter().zip(&b) {
                for (sum, b) in sums.iter_mut().zip(b) {
                    *sum += a * b;
                }
            }
        }
        for (i, &row) in self.d.iter().enumerate() {
            for (lane, word) in registers.w[usize::from(row)].iter_mut().enumerate() {
                *word = sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2].to_bits();
            }
        }
    }
}

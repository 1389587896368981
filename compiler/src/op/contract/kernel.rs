//! A matrix product.

use crate::CompileError;
use crate::codegen::naive::{Naive, numbers};
use crate::codegen::{CodegenError, Source, Variant};
use crate::ir::{DType, Dims};
use crate::op::Fp8;
use crate::op::kernel::{KernelKind, Slot, Units, Work, adding, input, need, result, storage, times};
use crate::program::{Kernel, Matrix};
use crate::schedule::{Choose, Select, row_dims};
use std::fmt::Display;

/// `c[m, n] = Σ_k a[m, k] · b[k, n]`, `c` row-major.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Product {
    /// Rows of the result.
    pub m: u64,
    /// Columns of the result.
    pub n: u64,
    /// Length of the sums.
    pub k: u64,
    /// Layout of `a`.
    pub a: Matrix,
    /// Layout of `b`.
    pub b: Matrix,
    /// Adds.
    pub accumulate: bool,
    /// `b` has a storage type of its own: a weight in bf16 or packed, while `a` is f32.
    pub stored: bool,
}

impl Product {
    /// Whether rows that nobody needs are left out: a result that is added to, or made of columns,
    /// has all rows.
    pub fn leaves_rows_out(&self) -> bool {
        self.a.column == 1 && !self.accumulate
    }
}

impl KernelKind for Product {
    fn signature(&self) -> Vec<Slot> {
        let &Product { m, n, k, a, b, accumulate, stored } = self;
        vec![
            input("a", &[m, k]).float(0).matrix(a),
            input("b", &[k, n]).weight(stored, 0).matrix(b),
            result("c", &[m, n]).float(1).adds(accumulate),
        ]
    }

    fn check(&self) -> Result<(), String> {
        Ok(())
    }

    fn summary(&self) -> String {
        let of = storage(self.stored);
        format!("product {}×{}×{}{}{of}", self.m, self.n, self.k, adding(self.accumulate))
    }

    fn work(&self) -> Work {
        Work::per(Units::Rows { rows: self.m, some: self.leaves_rows_out() }, &[self.n, self.k])
    }

    fn rows(&self) -> Option<u64> {
        Some(self.m)
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        super::cuda::product(self, variant)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let &Product { m, n, k, a, b, accumulate, stored: _ } = self;
        let variant = Variant { places: variant.places && self.leaves_rows_out(), ..variant };
        let numbers: &[(&str, &dyn Display)] = numbers!["N": n, "K": k, "A_ROW": a.row, "A_COLUMN": a.column, "B_ROW": b.row, "B_COLUMN": b.column, "ACCUMULATE": accumulate.into()];
        let naive = Naive::new(self, variant, include_str!("naive.cuh"), numbers)?;
        Ok(naive.pass("product", times(&[m, n]))?.finish())
    }
}

/// `c[m, n] = Σ_k a[m, k] · b[n, k]` of operands in e4m3, `c` row-major. Products of 128 terms are
/// added up, multiplied by both scales, and added to the sum in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProductE4m3 {
    /// Rows of the result.
    pub m: u64,
    /// Columns of the result.
    pub n: u64,
    /// Length of the sums.
    pub k: u64,
    /// Adds.
    pub accumulate: bool,
}

impl KernelKind for ProductE4m3 {
    fn signature(&self) -> Vec<Slot> {
        let &ProductE4m3 { m, n, k, accumulate } = self;
        vec![
            input("a", &[m, k]).stored(DType::E4m3),
            input("b", &[n, k]).stored(DType::E4m3),
            result("c", &[m, n]).float(0).adds(accumulate),
        ]
    }

    fn check(&self) -> Result<(), String> {
        let fits = Fp8::fits(self.m, self.k) && Fp8::fits(self.n, self.k);
        need(fits, "in e4m3 a matrix has 16 lines or a multiple, of whole tiles of 128")
    }

    fn summary(&self) -> String {
        format!("product_e4m3 {}×{}×{}{}", self.m, self.n, self.k, adding(self.accumulate))
    }

    fn work(&self) -> Work {
        Work::product(&[self.m, self.n, self.k])
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        super::cuda::product_e4m3(self, variant)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let &ProductE4m3 { m, n, k, accumulate } = self;
        let numbers: &[(&str, &dyn Display)] =
            numbers!["M": m, "N": n, "K": k, "ACCUMULATE": accumulate.into()];
        let naive = Naive::new(self, variant, include_str!("naive_e4m3.cuh"), numbers)?;
        Ok(naive.pass("product", times(&[m, n]))?.finish())
    }
}

impl Choose for super::Contract {
    /// The product of a contraction: free dimensions and summed ones must each be adjacent, the
    /// summed in one order in both operands.
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        let over = &self.over[..];
        let mut order: Option<Dims> = None;
        // Of each operand: elements from line to line, and from sum to sum; lines, sums.
        let mut sides = vec![];
        for operand in 0..2 {
            let dims = s.dims(operand);
            let summed: Dims = dims.iter().copied().filter(|d| over.contains(d)).collect();
            if *order.get_or_insert_with(|| summed.clone()) != summed {
                return s.bug("a contraction whose operands order the summed dimensions differently");
            }
            let free: Dims = dims.iter().copied().filter(|d| !over.contains(d)).collect();
            let (sums, lines) = (s.elements(&summed), s.elements(&free));
            let free_first = if dims.ends_with(&summed) {
                true
            } else if dims.starts_with(&summed) {
                false
            } else {
                return s.bug("a contraction over dimensions in the middle");
            };
            let fast = if free_first { sums } else { lines };
            let row = s.elements(&dims[row_dims(dims).len()..]);
            let slow = match s.stride(operand)? {
                0 => fast,
                _ if row != fast => {
                    s.make_adjacent(operand)?;
                    fast
                }
                stride => stride,
            };
            sides.push((if free_first { (slow, 1) } else { (1, slow) }, lines, sums));
        }
        let [((a_line, a_sum), m, k), ((b_line, b_sum), n, _)] = sides[..] else {
            return s.bug("a contraction of two operands");
        };
        if s.dtype(0) == DType::E4m3 {
            let whole = s.stride(0)? == 0 && s.stride(1)? == 0 && a_sum == 1 && b_sum == 1;
            return match whole {
                true => Ok(Kernel::ProductE4m3(ProductE4m3 { m, n, k, accumulate: s.adds(0) })),
                false => s.bug("a contraction of operands in e4m3 over other than their rows"),
            };
        }
        Ok(Kernel::Product(Product {
            m,
            n,
            k,
            a: Matrix { row: a_line, column: a_sum },
            b: Matrix { row: b_sum, column: b_line },
            accumulate: s.adds(0),
            stored: s.dtype(0) != s.dtype(1),
        }))
    }
}

//! Elements in another order.

use crate::CompileError;
use crate::codegen::naive::Naive;
use crate::codegen::{CodegenError, Source, Variant};
use crate::op::kernel::{KernelKind, Slot, Work, input, need, result, times};
use crate::program::Kernel;
use crate::schedule::{Choose, Select};
use std::fmt::Display;

/// Loops of a result.
pub const LOOPS: usize = 6;

/// `y[i, j, …] = x[i · stride + j · stride + …]`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Arrange {
    /// Elements of `x`.
    pub from: u64,
    /// Sizes of the loops of `y`, slowest first; 1 of those that there are not.
    pub sizes: [u64; LOOPS],
    /// Elements of `x` from step to step of each loop: 0 where it is repeated.
    pub strides: [u64; LOOPS],
}

impl Arrange {
    /// The last element of `x` that is read, and one more.
    fn reach(&self) -> u64 {
        let steps = self.sizes.iter().zip(&self.strides);
        steps.fold(1, |n: u64, (size, stride)| n.saturating_add(size.saturating_sub(1).saturating_mul(*stride)))
    }
}

impl KernelKind for Arrange {
    fn signature(&self) -> Vec<Slot> {
        vec![input("x", &[self.from]).float(0), result("y", &self.sizes).float(0)]
    }

    fn check(&self) -> Result<(), String> {
        need(self.reach() <= self.from, "it reads behind its operand")
    }

    fn summary(&self) -> String {
        let sizes: Vec<String> = self.sizes.iter().filter(|n| **n != 1).map(u64::to_string).collect();
        format!("arrange {}", sizes.join("×"))
    }

    fn work(&self) -> Work {
        Work::default()
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        self.naive(variant)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let list = |numbers: &[u64]| {
            let numbers: Vec<String> = numbers.iter().map(|n| format!("{n}ll")).collect();
            format!("{{{}}}", numbers.join(", "))
        };
        let (sizes, strides) = (list(&self.sizes), list(&self.strides));
        let numbers: &[(&str, &dyn Display)] =
            &[("LOOPS", &LOOPS), ("SIZES", &sizes), ("STRIDES", &strides)];
        let naive = Naive::new(self, variant, include_str!("naive.cuh"), numbers)?;
        Ok(naive.pass("arrange", times(&self.sizes))?.finish())
    }
}

impl Choose for super::Arrange {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        let dims = s.dims(0);
        // Slowest first; neighbours that are one loop are joined.
        let mut loops: Vec<(u64, u64)> = vec![];
        for d in &self.to {
            let size = s.size(*d);
            let stride = dims.iter().position(|x| x == d).map_or(0, |at| s.elements(&dims[at + 1..]));
            match loops.last_mut() {
                _ if size == 1 => {}
                Some((n, step)) if *step == stride.saturating_mul(size) => (*n, *step) = (*n * size, stride),
                _ => loops.push((size, stride)),
            }
        }
        if loops.len() > LOOPS {
            return Err(CompileError::Unsupported("values of more than six dimensions in another order"));
        }
        let (mut sizes, mut strides) = ([1; LOOPS], [0; LOOPS]);
        let first = LOOPS - loops.len();
        for (k, (size, stride)) in loops.into_iter().enumerate() {
            (sizes[first + k], strides[first + k]) = (size, stride);
        }
        Ok(Kernel::Arrange(Arrange { from: s.elements(dims), sizes, strides }))
    }
}

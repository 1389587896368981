//! Attention along depth.

use crate::CompileError;
use crate::codegen::naive::{Naive, whole};
use crate::codegen::text::float;
use crate::codegen::{CodegenError, Source, Variant};
use crate::ir::Attention;
use crate::op::attention::kernel::window;
use crate::op::kernel::{
    Amount, KernelKind, Slot, Touches, Units, Work, divides, index, input, need, times, updated, wide,
};
use crate::program::Kernel;
use crate::schedule::{Choose, Select};
use std::fmt::Display;

/// Shapes of a depth attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DepthShape {
    /// Rows of the cache.
    pub depths: u64,
    /// Tokens.
    pub rows: u64,
    /// Query heads.
    pub heads: u64,
    /// Key heads.
    pub kv_heads: u64,
    /// Head size.
    pub size: u64,
}

/// Every token attends to rows `0..=row` of itself in the caches `k` and `v`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DepthAttention {
    /// Sizes.
    pub shape: DepthShape,
    /// Scores.
    pub attention: Attention,
}

/// The gradient of [`DepthAttention`]; `dk` and `dv` are added to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DepthAttentionGrad {
    /// Sizes.
    pub shape: DepthShape,
    /// Scores.
    pub attention: Attention,
}

/// The operand of both kernels that gives the last row seen.
const ROW: usize = 3;

impl DepthShape {
    fn queries(&self, name: &'static str) -> Slot {
        input(name, &[self.rows, self.heads, self.size])
    }

    /// `q`, `k`, `v`, `row`; of the caches that share of rows is read that is seen.
    fn operands(&self, touches: Touches) -> Vec<Slot> {
        let cache = |name| input(name, &self.cache()).touches(touches);
        let row = index("row", Some(self.depths));
        vec![self.queries("q").rows(1), cache("k"), cache("v"), row]
    }

    fn cache(&self) -> [u64; 4] {
        [self.depths, self.rows, self.kv_heads, self.size]
    }

    /// The share of the caches that a launch sees, by the products that every row of them would
    /// take.
    fn share(&self, products: u64) -> Touches {
        Touches::Share(wide(&[products, self.rows, self.heads, self.size, self.depths]))
    }

    fn check(&self, attention: &Attention) -> Result<(), String> {
        divides(self.kv_heads, self.heads, "query heads must be a multiple of key heads")?;
        need(self.size > 0, "heads of size 0")?;
        need(attention.softcap.is_none_or(|c| c > 0.0), "the soft-cap must be positive")
    }

    fn summary(&self) -> String {
        let s = self;
        format!("{} at {} depths, {}/{} heads of {}", s.rows, s.depths, s.heads, s.kv_heads, s.size)
    }

    /// `products` products and `elementwise` operations for each row seen of each token and head,
    /// `outputs` for each element of `q`; see [`crate::ir::cost()`].
    fn work(&self, window: Option<u64>, some: bool, products: u64, elementwise: u64, outputs: u64) -> Work {
        let &DepthShape { depths, rows, heads, size, .. } = self;
        Work {
            fixed: Amount { multiply_adds: 0, elementwise: wide(&[rows, heads, size, outputs]) },
            each: Amount {
                multiply_adds: wide(&[products, heads, size]),
                elementwise: wide(&[heads, elementwise]),
            },
            units: Units::Depth { row: ROW, depths, window, rows, some },
        }
    }
}

impl DepthShape {
    fn naive(&self, kernel: &dyn KernelKind, a: &Attention, variant: Variant) -> Result<Naive, CodegenError> {
        let numbers: &[(&str, &dyn Display)] = &[
            ("ROWS", &whole(self.rows)),
            ("HEADS", &whole(self.heads)),
            ("KV_HEADS", &whole(self.kv_heads)),
            ("SIZE", &whole(self.size)),
            ("WINDOW", &window(a)?),
            ("SCALE", &float(a.scale)),
            ("CAPPED", &u8::from(a.softcap.is_some())),
            ("SOFTCAP", &float(a.softcap.unwrap_or(1.0))),
        ];
        Naive::new(kernel, variant, include_str!("naive.cuh"), numbers)
    }
}

impl KernelKind for DepthAttention {
    fn signature(&self) -> Vec<Slot> {
        let s = &self.shape;
        let mut list = s.operands(s.share(2));
        list.push(s.queries("o").written());
        list
    }

    fn check(&self) -> Result<(), String> {
        self.shape.check(&self.attention)
    }

    fn summary(&self) -> String {
        format!("depth_attention {}", self.shape.summary())
    }

    fn work(&self) -> Work {
        let a = &self.attention;
        self.shape.work(a.window, true, 2, 5 + 3 * u64::from(a.softcap.is_some()), 1)
    }

    fn rows(&self) -> Option<u64> {
        Some(self.shape.rows)
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        super::cuda::forward(self, variant)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let s = &self.shape;
        let naive = s.naive(self, &self.attention, variant)?;
        Ok(naive.pass("forward", times(&[s.rows, s.heads, s.size]))?.finish())
    }
}

impl KernelKind for DepthAttentionGrad {
    fn signature(&self) -> Vec<Slot> {
        let s = &self.shape;
        let gradient = |name| updated(name, &s.cache()).touches(s.share(5));
        let mut list = s.operands(s.share(5));
        list.extend([
            s.queries("do"),
            s.queries("dq").rows(1).written(),
            gradient("dk").state(5, 1),
            gradient("dv").state(6, 2),
        ]);
        list
    }

    fn check(&self) -> Result<(), String> {
        self.shape.check(&self.attention)
    }

    fn summary(&self) -> String {
        format!("depth_attention_grad {}", self.shape.summary())
    }

    fn work(&self) -> Work {
        let a = &self.attention;
        self.shape.work(a.window, false, 5, 6 + 6 * u64::from(a.softcap.is_some()), 2)
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        super::cuda::backward(self, variant)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let s = &self.shape;
        let naive = s.naive(self, &self.attention, variant)?;
        let naive = naive.pass("queries", times(&[s.rows, s.heads, s.size]))?;
        Ok(naive.pass("caches", times(&[s.rows, s.kv_heads, s.size]))?.finish())
    }
}

fn shape(s: &Select) -> DepthShape {
    let (q, k) = (s.dims(0), s.dims(1));
    let (n, m) = (q.len(), k.len());
    DepthShape {
        depths: s.size(k[0]),
        rows: s.elements(&q[..n - 2]),
        heads: s.size(q[n - 2]),
        kv_heads: s.size(k[m - 2]),
        size: s.size(q[n - 1]),
    }
}

impl Choose for super::DepthAttention {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        let attention = self.0.clone();
        Ok(Kernel::DepthAttention(DepthAttention { shape: shape(s), attention }))
    }
}

impl Choose for super::DepthAttentionGrad {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        let attention = self.0.clone();
        Ok(Kernel::DepthAttentionGrad(DepthAttentionGrad { shape: shape(s), attention }))
    }
}

//! Attention along the sequence.

use super::formula::code::Sizes;
use super::formula::{MOST_READS, Place, Read};
use super::listed;
use crate::CompileError;
use crate::codegen::naive::{Naive, whole};
use crate::codegen::text::float;
use crate::codegen::{CodegenError, Source, Variant};
use crate::ir::{Attention as Scores, Mask};
use crate::op::kernel::{
    Amount, KernelKind, Slot, Units, Work, divides, input, ints, need, result, times, wide,
};
use crate::program::Kernel;
use crate::schedule::{Choose, Select};
use std::fmt::Display;

/// Shapes of a sequence attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionShape {
    /// Sequences.
    pub batch: u64,
    /// Queries of each.
    pub queries: u64,
    /// Keys of each.
    pub keys: u64,
    /// Query heads.
    pub heads: u64,
    /// Key heads.
    pub kv_heads: u64,
    /// Head size.
    pub size: u64,
}

/// The longest heads whose values are their keys: a tile of them is in shared memory once, and more
/// would not fit together with the queries.
pub const LONGEST_SHARED: u64 = 864;

/// Names of what a program reads.
pub const X: [&str; MOST_READS] =
    ["x0", "x1", "x2", "x3", "x4", "x5", "x6", "x7", "x8", "x9", "x10", "x11", "x12", "x13", "x14", "x15"];
/// Names of their cotangents.
pub const DX: [&str; MOST_READS] = [
    "dx0", "dx1", "dx2", "dx3", "dx4", "dx5", "dx6", "dx7", "dx8", "dx9", "dx10", "dx11", "dx12", "dx13",
    "dx14", "dx15",
];

/// `o = softmax(q · kᵀ) · v` for every head, and the logarithm of its denominators.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Attention {
    /// Sizes.
    pub shape: AttentionShape,
    /// Scores and mask.
    pub attention: Scores,
    /// Whether values are the keys: both operands are one place.
    pub shared: bool,
    /// Lengths of what the program reads: of tables, else 1.
    pub lengths: Vec<u64>,
}

/// The gradient of [`Attention`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AttentionGrad {
    /// Sizes.
    pub shape: AttentionShape,
    /// Scores and mask.
    pub attention: Scores,
    /// Whether the logarithm of the denominators has a cotangent, too.
    pub log: bool,
    /// Lengths of what the program reads: of tables, else 1.
    pub lengths: Vec<u64>,
}

impl AttentionShape {
    /// Of queries and keys, the first operands.
    pub(crate) fn of(s: &Select) -> AttentionShape {
        let (q, k) = (s.dims(0), s.dims(1));
        AttentionShape {
            batch: s.size(q[0]),
            queries: s.size(q[1]),
            keys: s.size(k[1]),
            heads: s.size(q[2]),
            kv_heads: s.size(k[2]),
            size: s.size(q[3]),
        }
    }

    pub(crate) fn queries(&self, name: &'static str) -> Slot {
        input(name, &[self.batch, self.queries, self.heads, self.size]).float(0).rows(2)
    }

    pub(crate) fn keys(&self, name: &'static str) -> Slot {
        input(name, &[self.batch, self.keys, self.kv_heads, self.size]).float(0).rows(2)
    }

    pub(crate) fn lse(&self, name: &'static str) -> Slot {
        input(name, &[self.batch, self.queries, self.heads])
    }

    pub(crate) fn masks(&self, attention: &Scores) -> Vec<Slot> {
        let mut list = vec![];
        if attention.mask == Mask::Positions {
            list.push(ints("query_positions", &[self.batch, self.queries]));
            list.push(ints("key_positions", &[self.batch, self.keys]));
        }
        if attention.segments {
            list.push(ints("segments", &[self.batch, self.queries]));
        }
        if attention.dropout.is_some() {
            list.push(ints("draws", &[self.batch, self.queries]));
        }
        if let Some(among) = attention.among {
            list.push(ints("chosen", &[self.batch, self.queries, among.heads, among.count]));
        }
        list
    }

    /// Slots of the program's operands, by these names; of tables of these lengths.
    fn reads(&self, attention: &Scores, lengths: &[u64], names: [&'static str; MOST_READS]) -> Vec<Slot> {
        let slot = |((read, &length), name): ((&Read, &u64), &'static str)| {
            let heads = if read.heads { &[self.heads][..] } else { &[] };
            let shape = match read.place {
                Place::Query => [&[self.batch, self.queries], heads].concat(),
                Place::Key => [&[self.batch, self.keys], heads].concat(),
                Place::All => heads.to_vec(),
                Place::Table => [heads, &[length]].concat(),
            };
            input(name, &shape)
        };
        attention.read().iter().zip(lengths).zip(names).map(slot).collect()
    }

    fn check(&self, attention: &Scores, lengths: &[u64]) -> Result<(), String> {
        if let Some(program) = &attention.program {
            program.check()?;
            need(attention.softcap.is_none(), "a program has no soft-cap besides")?;
        }
        need(lengths.len() == attention.read().len(), "a length for everything that the program reads")?;
        need(lengths.iter().all(|&n| n > 0), "a table of no numbers")?;
        let plain = attention.softcap.is_none() && attention.program.is_none();
        need(plain || !attention.listed(), "keys that are chosen have neither a soft-cap nor a program")?;
        need(attention.softcap.is_none_or(|c| c > 0.0), "the soft-cap must be positive")?;
        self.check_keys(attention)
    }

    /// Heads, and how keys are seen.
    pub(crate) fn check_keys(&self, attention: &Scores) -> Result<(), String> {
        divides(self.kv_heads, self.heads, "query heads must be a multiple of key heads")?;
        need(self.size > 0, "heads of size 0")?;
        let square = self.queries == self.keys;
        let positions = attention.mask == Mask::Positions;
        need(positions || square, "a causal mask needs as many keys as queries; use positions")?;
        need(!attention.segments || square, "segments need as many keys as queries")?;
        need(attention.every != Some(0), "blocks of no token have no end")?;
        let Some(among) = attention.among else { return Ok(()) };
        need(among.block > 0, "a choice of blocks of no token")?;
        divides(among.heads, self.heads, "query heads must be a multiple of lists")
    }

    fn summary(&self) -> String {
        let s = self;
        format!("{}×{}×{}, {}/{} heads of {}", s.batch, s.queries, s.keys, s.heads, s.kv_heads, s.size)
    }

    /// `products` products and `elementwise` operations for each pair and head, `outputs` for each
    /// element of `q`; see [`crate::ir::cost()`]. The mask's operands begin at number `masks`.
    fn work(&self, attention: &Scores, masks: usize, products: u64, elementwise: u64, outputs: u64) -> Work {
        let units = Units::Pairs { shape: *self, attention: attention.clone(), masks };
        let gradient = masks == super::AttentionGrad::MASK;
        let program = attention.program.as_ref().map_or(0, |p| p.work(gradient));
        let (each, elementwise) = (attention.each(self.heads), elementwise + program);
        Work {
            fixed: Amount {
                multiply_adds: 0,
                elementwise: wide(&[self.batch, self.queries, self.heads, self.size, outputs]),
            },
            each: Amount {
                multiply_adds: wide(&[products, each, self.size]),
                elementwise: wide(&[each, elementwise]),
            },
            units,
        }
    }

    /// Pairs of a query and a key that the mask and the window may leave, over all sequences, and
    /// all heads where the program hides other keys from some; `None` beyond 128 bits.
    pub fn most_pairs(&self, attention: &Scores) -> Option<u128> {
        let pairs = match attention.mask {
            Mask::Causal => attention.pairs(self.queries, self.heads),
            Mask::Positions => {
                let ends = self.keys.div_ceil(attention.every.unwrap_or(1).max(1));
                let seen = attention.most_keys(self.keys).min(ends);
                let pairs = u128::from(seen) * u128::from(self.queries);
                pairs.checked_mul(attention.times(self.heads).into())?
            }
        };
        pairs.checked_mul(self.batch.into())
    }
}

impl AttentionShape {
    fn naive(
        &self,
        kernel: &dyn KernelKind,
        attention: &Scores,
        lengths: &[u64],
        (log, gradient): (bool, bool),
        variant: Variant,
    ) -> Result<Naive, CodegenError> {
        let (s, a) = (self, attention);
        let program = a.program.as_deref();
        let reads: String = (0..a.read().len()).map(|n| format!(", x{n}")).collect();
        let functions = program.map_or(String::new(), |p| p.functions(self.code(lengths), gradient));
        let numbers: &[(&str, &dyn Display)] = &[
            ("QUERIES", &whole(s.queries)),
            ("KEYS", &whole(s.keys)),
            ("HEADS", &whole(s.heads)),
            ("KV_HEADS", &whole(s.kv_heads)),
            ("SIZE", &whole(s.size)),
            ("WINDOW", &window(a)?),
            ("SCALE", &float(a.scale)),
            ("CAPPED", &u8::from(a.softcap.is_some())),
            ("SOFTCAP", &float(a.softcap.unwrap_or(1.0))),
            ("POSITIONS", &u8::from(a.mask == Mask::Positions)),
            ("SEGMENTS", &u8::from(a.segments)),
            ("DROPOUT", &u8::from(a.dropout.is_some())),
            ("DROPPED", &format!("{}u", a.dropout.map_or(0, super::threshold))),
            ("KEPT", &float(a.dropout.map_or(1.0, |p| 1.0 / (1.0 - p)))),
            ("LOG", &u8::from(log)),
            ("EVERY", &whole(a.every.unwrap_or(1))),
            ("AMONG", &u8::from(a.among.is_some())),
            ("BLOCK", &whole(a.among.map_or(1, |among| among.block))),
            ("CHOICES", &whole(a.among.map_or(1, |among| among.heads))),
            ("COUNT", &whole(a.among.map_or(1, |among| among.count))),
            ("PROGRAM", &u8::from(program.is_some())),
            ("READS", &reads),
        ];
        let text = concat!(include_str!("seen.cuh"), include_str!("naive.cuh"));
        Naive::with(kernel, variant, text, numbers, &functions)
    }

    pub(super) fn code<'a>(&self, lengths: &'a [u64]) -> Sizes<'a> {
        Sizes { queries: self.queries, keys: self.keys, heads: self.heads, lengths }
    }

    /// The lines that sum the cotangent of an element of what a program reads, and how many of them
    /// there are.
    fn cotangents(&self, read: usize, of: Read, length: u64) -> (String, u64) {
        let heads = if of.heads { self.heads } else { 1 };
        let (own, count) = match of.place {
            Place::Query => ("b i", self.batch * self.queries),
            Place::Key => ("b j", self.batch * self.keys),
            Place::All => ("", 1),
            Place::Table => ("n", length),
        };
        let mut lines = String::from("float sum = 0.0f;\ni64 n = 0;\n");
        let heads_last = of.place != Place::Table;
        let (h, rest) = match heads_last {
            true => (format!("at % {heads}"), format!("at / {heads}")),
            false => (format!("at / {length}"), format!("at % {length}")),
        };
        lines += &match own {
            "b i" => format!("i64 b0 = {rest} / QUERIES, i0 = {rest} % QUERIES;\n"),
            "b j" => format!("i64 b0 = {rest} / KEYS, j0 = {rest} % KEYS;\n"),
            "n" => format!("n = {rest};\n"),
            _ => String::new(),
        };
        let mut each = |name: &str, fixed: bool, all: &str| {
            lines += &match fixed {
                true => format!("for (i64 {name} = {name}0; {name} <= {name}0; ++{name})\n"),
                false => format!("for (i64 {name} = 0; {name} < {all}; ++{name})\n"),
            };
        };
        each("b", own.contains('b'), &format!("{}ll", self.batch));
        if of.heads {
            lines += &format!("for (i64 h = {h}; h <= {h}; ++h)\n");
        } else {
            each("h", false, "HEADS");
        }
        let mut each = |name: &str, fixed: bool, all: &str| {
            lines += &match fixed {
                true => format!("for (i64 {name} = {name}0; {name} <= {name}0; ++{name})\n"),
                false => format!("for (i64 {name} = 0; {name} < {all}; ++{name})\n"),
            };
        };
        each("i", own.contains('i'), "QUERIES");
        each("j", own.contains('j'), "KEYS");
        lines += &format!(
            "{{\n    if (!SEES(b, i, j, h)) continue;\n    i64 row = (b * QUERIES + i) * HEADS + h;\n    \
             float s = PRODUCT(b, i, j, h);\n    float ds = OF_SCORE(s, b, i, j, h, row);\n    \
             sum += through(ds, program_by{read}(s, OF_PAIR(b, i, j, h), n READS));\n}}\ndx{read}[at] = sum;\n"
        );
        (lines, count.saturating_mul(heads))
    }
}

/// The window as generated text has it: 0 for none, which is as good as one wider than all
/// sequences. A window of no keys, which 0 would not be, is malformed.
pub(crate) fn window(a: &Scores) -> Result<u64, CodegenError> {
    match a.window {
        Some(0) => Err(CodegenError::Malformed("a window of no keys".into())),
        Some(w) if w <= i32::MAX as u64 => Ok(w),
        Some(_) | None => Ok(0),
    }
}

/// Pairs of a query and a key that it sees, over all sequences, by the values of the mask; those
/// that the mask has no use for may be empty. `None` where values are missing.
pub fn visible(
    s: &AttentionShape,
    a: &Scores,
    positions: &[i32],
    key_positions: &[i32],
    segments: &[i32],
    chosen: &[i32],
) -> Option<u64> {
    if !a.by_operands() {
        return s.most_pairs(a)?.try_into().ok();
    }
    let at = |values: &[i32], b: u64, of: u64, i: u64| {
        usize::try_from(b * of + i).ok().and_then(|i| values.get(i).copied())
    };
    let mut pairs = 0;
    for b in 0..s.batch {
        for i in 0..s.queries {
            let query = match a.mask {
                Mask::Causal => i as i64,
                Mask::Positions => at(positions, b, s.queries, i)?.into(),
            };
            let segment = if a.segments { Some(at(segments, b, s.queries, i)?) } else { None };
            for j in 0..s.keys {
                let key = match a.mask {
                    Mask::Causal => j as i64,
                    Mask::Positions => at(key_positions, b, s.keys, j)?.into(),
                };
                let near = (0..=query).contains(&key)
                    && a.window.is_none_or(|w| ((query - key) as u64) < w)
                    && a.every.is_none_or(|e| (key as u64 + 1).is_multiple_of(e));
                let together = match segment {
                    Some(segment) => segment == at(segments, b, s.queries, j)?,
                    None => true,
                };
                if near && together {
                    pairs += match a.among {
                        None => 1,
                        Some(among) => {
                            let at = [b as usize, s.queries as usize];
                            let lists = super::Chosen::of_sequence(among, at, s.heads as usize, chosen);
                            let sees = |&h: &u64| lists.sees(i as usize, h as usize, key);
                            (0..s.heads).filter(sees).count() as u64
                        }
                    };
                }
            }
        }
    }
    Some(pairs)
}

impl KernelKind for Attention {
    fn signature(&self) -> Vec<Slot> {
        let s = &self.shape;
        let mut list = vec![s.queries("q"), s.keys("k"), s.keys("v")];
        list.extend(s.masks(&self.attention));
        list.extend(s.reads(&self.attention, &self.lengths, X));
        list.push(result("o", &[s.batch, s.queries, s.heads, s.size]).float(0));
        list.push(result("lse", &[s.batch, s.queries, s.heads]));
        list
    }

    fn check(&self) -> Result<(), String> {
        self.shape.check(&self.attention, &self.lengths)
    }

    fn summary(&self) -> String {
        let shared = if self.shared { ", values are keys" } else { "" };
        format!("attention {}{shared}", self.shape.summary())
    }

    fn work(&self) -> Work {
        self.shape.work(&self.attention, 3, 2, 5 + 3 * u64::from(self.attention.softcap.is_some()), 1)
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        // The fast kernels drop no weights.
        match self.attention.dropout.is_some() || !listed::fits_bits(&self.shape, &self.attention, variant) {
            true => self.naive(variant),
            false => super::cuda::forward(self, variant),
        }
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let s = &self.shape;
        let naive = s.naive(self, &self.attention, &self.lengths, (false, false), variant)?;
        Ok(naive.pass("forward", times(&[s.batch, s.queries, s.heads, s.size]))?.finish())
    }
}

impl KernelKind for AttentionGrad {
    fn signature(&self) -> Vec<Slot> {
        let s = &self.shape;
        let mut list =
            vec![s.queries("q"), s.keys("k"), s.keys("v"), s.queries("o"), s.lse("lse"), s.queries("do")];
        list.extend(s.masks(&self.attention));
        list.extend(self.log.then(|| s.lse("dlse")));
        list.extend(s.reads(&self.attention, &self.lengths, X));
        list.extend([s.queries("dq"), s.keys("dk"), s.keys("dv")].map(Slot::written));
        let cotangents = s.reads(&self.attention, &self.lengths, DX);
        let moved = self.attention.moved();
        list.extend(moved.into_iter().map(|n| cotangents[n].clone().written()));
        list
    }

    fn check(&self) -> Result<(), String> {
        self.shape.check(&self.attention, &self.lengths)
    }

    fn summary(&self) -> String {
        format!("attention_grad {}", self.shape.summary())
    }

    fn work(&self) -> Work {
        self.shape.work(&self.attention, 6, 5, 6 + 6 * u64::from(self.attention.softcap.is_some()), 2)
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        match slow(&self.attention) || !listed::fits_bits(&self.shape, &self.attention, variant) {
            true => self.naive(variant),
            false => super::cuda::backward(self, variant),
        }
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let s = &self.shape;
        let naive = s.naive(self, &self.attention, &self.lengths, (self.log, true), variant)?;
        let naive = naive.pass("queries", times(&[s.batch, s.queries, s.heads, s.size]))?;
        let mut naive = naive.pass("keys", times(&[s.batch, s.keys, s.kv_heads, s.size]))?;
        for n in self.attention.moved() {
            let (lines, threads) = s.cotangents(n, self.attention.read()[n], self.lengths[n]);
            naive = naive.body(&format!("x{n}"), &lines, threads)?;
        }
        Ok(naive.finish())
    }
}

/// Whether the fast kernels of GPUs have no code for its gradient, so that the naive ones run.
fn slow(attention: &Scores) -> bool {
    !attention.moved().is_empty() || attention.dropout.is_some()
}

/// Lengths of what a program reads, from operand number `first` on.
fn lengths(s: &Select, attention: &Scores, first: usize) -> Vec<u64> {
    let length = |(n, read): (usize, &Read)| match (read.place, s.dims(first + n).last()) {
        (Place::Table, Some(&dim)) => s.size(dim),
        (Place::Query | Place::Key | Place::All | Place::Table, _) => 1,
    };
    attention.read().iter().enumerate().map(length).collect()
}

impl Choose for super::Attention {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        let (attention, lengths) = (self.clone(), lengths(s, self, self.reads()));
        Ok(Kernel::Attention(Attention {
            shape: AttentionShape::of(s),
            attention,
            shared: s.same(1, 2),
            lengths,
        }))
    }
}

impl Choose for super::AttentionGrad {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        let (attention, lengths) = (self.0.clone(), lengths(s, &self.0, self.reads()));
        let log = self.log(s.operands()).is_some();
        Ok(Kernel::AttentionGrad(AttentionGrad { shape: AttentionShape::of(s), attention, log, lengths }))
    }
}

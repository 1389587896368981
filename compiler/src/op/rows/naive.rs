//! The naive text of a row kernel: a thread for each block of rows, every array in memory.
//!
//! Arrays are made one after another as the kernel lists them, each by a loop of its own. Rows are
//! summed in blocks of [`SUM_BLOCK`], and then the blocks, as [`RowStore::Sum`] says.

use super::kernel::{RowInput, RowKernel, RowOp, RowStore, SUM_BLOCK};
use crate::codegen::text::{Builder, Operands, Param, float, per_thread, places, scratch, status};
use crate::codegen::{CodegenError, Source, Variant};
use crate::ir::{Positions, Reduce, Rope};
use crate::op::kernel::{KernelKind, times};

type Result<T> = std::result::Result<T, CodegenError>;

/// Threads at most: each has memory of its own for the arrays.
const MOST: u64 = 1024;

pub(super) fn generate(kernel: &RowKernel, variant: Variant) -> Result<Option<Source>> {
    kernel.check().map_err(CodegenError::Malformed)?;
    let mut builder = Builder::statements(format!("naive {}", kernel.summary()), "naive.cuh");
    let blocks = kernel.rows.div_ceil(SUM_BLOCK);
    let threads = blocks.min(MOST);
    let total = kernel.lengths.iter().fold(0u64, |n, &l| n.saturating_add(l));
    let arrays = builder.scratch(times(&[4, threads, total]));
    let mut text = Text { kernel, builder: &mut builder, body: String::new() };
    text.arrays(variant.places && kernel.rows().is_some(), blocks, threads, total)?;
    let body = std::mem::take(&mut text.body);

    let operands = Operands::of(kernel, variant).numbered()?;
    let params = || operands.iter().map(|p| Param::new(&p.declaration, &p.name, p.argument));
    let mut list: Vec<Param> = params().collect();
    list.push(scratch("float *", "arrays", arrays));
    let mut sums = vec![];
    for (number, output) in kernel.outputs.iter().enumerate() {
        if matches!(output.store, RowStore::Sum | RowStore::AddSum) {
            let length = kernel.lengths[output.array as usize];
            let at = builder.scratch(times(&[4, blocks, length]));
            list.push(scratch("float *", &format!("sums{number}"), at));
            sums.push((number, length, output.store, at));
        }
    }
    list.extend(variant.places.then(places));
    list.extend(status());
    builder.entry("naive_rows", per_thread(threads)?, &list, &body);
    for (number, length, store, at) in sums {
        let x = kernel.inputs.len() + number;
        let add = if store == RowStore::AddSum { format!("value(x{x}[at]) + sum") } else { "sum".into() };
        let body = format!(
            "    i64 at = thread_number();\n    if (at >= {length}) return;\n    float sum = 0.0f;\n    \
             for (i64 b = 0; b < {blocks}; ++b) sum += sums{number}[b * {length} + at];\n    \
             put(x{x} + at, {add});\n"
        );
        let mut list: Vec<Param> = params().collect();
        list.push(scratch("const float *", &format!("sums{number}"), at));
        builder.entry(&format!("naive_sum{number}"), per_thread(length)?, &list, &body);
    }
    Ok(builder.finish())
}

struct Text<'k> {
    kernel: &'k RowKernel,
    builder: &'k mut Builder,
    body: String,
}

impl Text<'_> {
    fn line(&mut self, line: &str) {
        self.body.push_str("    ");
        self.body.push_str(line);
        self.body.push('\n');
    }

    /// The body of the entry: for each row of this thread's blocks, arrays in order, then outputs.
    fn arrays(&mut self, some: bool, blocks: u64, threads: u64, total: u64) -> Result<()> {
        let kernel = self.kernel;
        self.line("i64 at = thread_number();");
        self.line(&format!("if (at >= {threads}) return;"));
        let mut start = 0u64;
        for (i, length) in kernel.lengths.iter().enumerate() {
            self.line(&format!("float *a{i} = arrays + at * {total}ll + {start};"));
            start = start.saturating_add(*length);
        }
        self.line(&format!("for (i64 block = at; block < {blocks}; block += {threads}) {{"));
        let outputs = || kernel.outputs.iter().enumerate();
        let summed = |store| matches!(store, RowStore::Sum | RowStore::AddSum);
        for (number, output) in outputs().filter(|(_, o)| summed(o.store)) {
            let length = kernel.lengths[output.array as usize];
            self.line(&format!(
                "for (i64 i = 0; i < {length}; ++i) sums{number}[block * {length} + i] = 0.0f;"
            ));
        }
        let rows = kernel.rows;
        self.line(&format!(
            "for (i64 row = block * {SUM_BLOCK}; row < {rows} && row < (block + 1) * {SUM_BLOCK}; ++row) {{"
        ));
        if some {
            self.line("if (places[row] < 0) continue;");
        }
        for (i, op) in kernel.ops.iter().enumerate() {
            self.op(i, op);
        }
        for (number, output) in outputs() {
            let (a, length) = (output.array, kernel.lengths[output.array as usize]);
            let x = kernel.inputs.len() + number;
            let to = format!("x{x} + row * x{x}_stride + i");
            let statement = match output.store {
                RowStore::Row => format!("put({to}, a{a}[i]);"),
                RowStore::AddRow => format!("put({to}, value(*({to})) + a{a}[i]);"),
                RowStore::Sum | RowStore::AddSum => format!("sums{number}[block * {length} + i] += a{a}[i];"),
            };
            self.line(&format!("for (i64 i = 0; i < {length}; ++i) {statement}"));
        }
        self.line("}");
        self.line("}");
        Ok(())
    }

    /// Element `i` of array `n` becomes the expression.
    fn each(&mut self, n: usize, expression: &str) {
        let length = self.kernel.lengths[n];
        self.line(&format!("for (i64 i = 0; i < {length}; ++i) a{n}[i] = {expression};"));
    }

    /// For each group of `size` of array `n`, which begins at element `g`.
    fn groups(&mut self, n: usize, size: u64, statements: &str) {
        let length = self.kernel.lengths[n];
        self.line(&format!("for (i64 g = 0; g < {length}; g += {size}) {{ {statements} }}"));
    }

    fn op(&mut self, n: usize, op: &RowOp) {
        let length = self.kernel.lengths[n];
        match *op {
            RowOp::Load { input } => match self.kernel.inputs[input as usize] {
                RowInput::Shared { .. } => self.each(n, &format!("value(x{input}[i])")),
                RowInput::Row { .. } | RowInput::RowInts { .. } | RowInput::Index => {
                    self.each(n, &format!("value(x{input}[row * x{input}_stride + i])"));
                }
            },
            RowOp::Constant(c) => self.each(n, &float(c.0)),
            RowOp::Index { input } => self.each(n, &format!("float(x{input})")),
            RowOp::Zeros => self.each(n, "0.0f"),
            RowOp::Unary(op, x) => self.each(n, &op.statement(&format!("a{x}[i]"))),
            RowOp::Binary { op, a, b, broadcast, small_first } => {
                let small = format!("i / {} % {}", broadcast.inner.max(1), broadcast.size.max(1));
                let at = |array: u32, small_one: bool| match small_one {
                    true => format!("a{array}[{small}]"),
                    false => format!("a{array}[i]"),
                };
                self.each(n, &op.statement(&at(a, small_first), &at(b, !small_first)));
            }
            RowOp::Reduce { op, x, over } => {
                let (inner, size) = (over.inner.max(1), over.size);
                let element = format!("a{x}[(i / {inner} * {size} + j) * {inner} + i % {inner}]");
                let (first, join, last) = match op {
                    Reduce::Sum => ("0.0f", format!("s += {element}"), "s".to_string()),
                    Reduce::Mean => {
                        ("0.0f", format!("s += {element}"), format!("s / {}", float(size as f64)))
                    }
                    Reduce::Max => ("-infinity()", format!("s = larger(s, {element})"), "s".to_string()),
                };
                self.line(&format!(
                    "for (i64 i = 0; i < {length}; ++i) {{ float s = {first}; \
                     for (i64 j = 0; j < {size}; ++j) {join}; a{n}[i] = {last}; }}"
                ));
            }
            RowOp::Rms { x, size, eps } => {
                let root = root(x, size, eps.0);
                self.groups(
                    n,
                    size,
                    &format!("{root} for (i64 j = g; j < g + {size}; ++j) a{n}[j] = a{x}[j] * r;"),
                );
            }
            RowOp::RmsGrad { x, dy, size, eps } => {
                let (root, count) = (root(x, size, eps.0), float(size as f64));
                self.groups(
                    n,
                    size,
                    &format!(
                        "{root} float c = 0.0f; for (i64 j = g; j < g + {size}; ++j) c += a{x}[j] * a{dy}[j]; \
                         for (i64 j = g; j < g + {size}; ++j) \
                         a{n}[j] = r * (a{dy}[j] - a{x}[j] * (r * r * c / {count}));"
                    ),
                );
            }
            RowOp::Softmax { x, size } => self.groups(
                n,
                size,
                &format!(
                    "float m = -infinity(), s = 0.0f; \
                     for (i64 j = g; j < g + {size}; ++j) m = larger(m, a{x}[j]); \
                     for (i64 j = g; j < g + {size}; ++j) {{ a{n}[j] = expf(a{x}[j] - m); s += a{n}[j]; }} \
                     for (i64 j = g; j < g + {size}; ++j) a{n}[j] /= s;"
                ),
            ),
            RowOp::SoftmaxGrad { y, dy, size } => self.groups(
                n,
                size,
                &format!(
                    "float c = 0.0f; for (i64 j = g; j < g + {size}; ++j) c += a{y}[j] * a{dy}[j]; \
                     for (i64 j = g; j < g + {size}; ++j) a{n}[j] = a{y}[j] * (a{dy}[j] - c);"
                ),
            ),
            RowOp::Rope { x, size, rope, position, depths } => self.rope(n, x, size, rope, position, depths),
            RowOp::Slice { x, size, start } => {
                let taken = (length * size).checked_div(self.kernel.lengths[x as usize]).unwrap_or(0).max(1);
                self.each(n, &format!("a{x}[i / {taken} * {size} + {start} + i % {taken}]"));
            }
            RowOp::Concat { ref parts, groups } => {
                let (groups, mut start) = (groups.max(1), 0);
                let whole = length / groups;
                for part in parts {
                    let own = self.kernel.lengths[*part as usize] / groups;
                    self.line(&format!(
                        "for (i64 i = 0; i < {}; ++i) a{n}[i / {own} * {whole} + {start} + i % {own}] = a{part}[i];",
                        own * groups,
                        own = own.max(1),
                    ));
                    start += own;
                }
            }
            RowOp::Pick { table, chosen } => {
                let bound = self.kernel.lengths[table as usize];
                self.line(&format!(
                    "for (i64 i = 0; i < {length}; ++i) {{ int c = x{chosen}[row * x{chosen}_stride + i]; \
                     a{n}[i] = below(c, {bound}, status, launch) ? a{table}[c] : 0.0f; }}"
                ));
            }
            RowOp::PickGrad { d, chosen } => {
                let count = self.kernel.lengths[d as usize];
                self.each(n, "0.0f");
                self.line(&format!(
                    "for (i64 i = 0; i < {count}; ++i) {{ int c = x{chosen}[row * x{chosen}_stride + i]; \
                     if (below(c, {length}, status, launch)) a{n}[c] = a{d}[i]; }}"
                ));
            }
        }
    }

    /// Pairs `(i, i + size / 2)` of each group turned by an angle.
    fn rope(&mut self, n: usize, x: u32, size: u64, rope: Rope, position: u32, depths: u32) {
        let (length, half) = (self.kernel.lengths[n], size / 2);
        let list: Vec<String> = (0..half).map(|i| format!("{:?}", rope.frequency(i, half))).collect();
        self.builder.line(&format!("TABLE Wide frequencies{n}[] = {{{}}};", list.join(", ")));
        let angle = match rope.positions {
            Positions::Tokens => format!("(Wide)x{position}[row * x{position}_stride]"),
            Positions::Depth { half_reversed: false } => format!("(Wide)x{position}"),
            Positions::Depth { half_reversed: true } => {
                format!("(Wide)(p % 2 == 0 ? x{position} : x{depths} - 1 - x{position})")
            }
        };
        let sign = if rope.inverse { "-" } else { "" };
        self.line(&format!("for (i64 g = 0; g < {length}; g += {size}) for (i64 p = 0; p < {half}; ++p) {{"));
        self.line(&format!("Wide angle = {angle} * frequencies{n}[p];"));
        self.line(&format!("float c = cosine(angle), s = {sign}sine(angle);"));
        self.line(&format!("float low = a{x}[g + p], high = a{x}[g + p + {half}];"));
        self.line(&format!("a{n}[g + p] = low * c - high * s, a{n}[g + p + {half}] = high * c + low * s;"));
        self.line("}");
    }
}

/// `r`, the reciprocal root of the mean square of a group.
fn root(x: u32, size: u64, eps: f64) -> String {
    format!(
        "float q = 0.0f; for (i64 j = g; j < g + {size}; ++j) q += a{x}[j] * a{x}[j]; \
         float r = 1.0f / sqrtf(q / {} + {});",
        float(size as f64),
        float(eps)
    )
}

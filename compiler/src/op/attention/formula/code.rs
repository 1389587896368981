//! Formulas as C: the same steps for every device.

use super::{Binary, Formula, Place, Program, Read, Step, Unary};
use crate::codegen::text::float;
use std::fmt::Write as _;

/// Shapes that a program's operands are found by.
#[derive(Clone, Copy)]
pub(crate) struct Sizes<'a> {
    /// Queries and keys of a sequence, and query heads.
    pub queries: u64,
    pub keys: u64,
    pub heads: u64,
    /// Of each operand: of tables, else 1.
    pub lengths: &'a [u64],
}

impl Sizes<'_> {
    /// Where an operand's number is, for sequence `b`, query `i`, key `j`, head `h` and an index.
    fn offset(&self, read: usize, of: Read, index: &str) -> String {
        let (heads, h) = if of.heads { (self.heads, "h") } else { (1, "0") };
        match of.place {
            Place::Query => format!("(b * {}ll + i) * {heads}ll + {h}", self.queries),
            Place::Key => format!("(b * {}ll + j) * {heads}ll + {h}", self.keys),
            Place::All => h.into(),
            Place::Table => format!("{h} * {}ll + {index}", self.lengths[read]),
        }
    }
}

impl Step {
    fn code(self, program: &Program, sizes: Sizes) -> String {
        match self {
            Step::Number(x) => float(x.0),
            Step::Score => "s".into(),
            Step::Query => "(float)query".into(),
            Step::Key => "(float)key".into(),
            Step::Head => "(float)h".into(),
            Step::Read(read) => format!("x{read}[{}]", sizes.offset(read, program.reads[read], "0")),
            Step::Lookup(read, x) => {
                let index = format!("nearest(t{x}, {})", sizes.lengths[read]);
                format!("x{read}[{}]", sizes.offset(read, program.reads[read], &index))
            }
            Step::Unary(f, x) => match f {
                Unary::Neg => format!("-t{x}"),
                Unary::Exp => format!("expf(t{x})"),
                Unary::Log => format!("logf(t{x})"),
                Unary::Sqrt => format!("sqrtf(t{x})"),
                Unary::Abs => format!("fabsf(t{x})"),
                Unary::Tanh => format!("tanhf(t{x})"),
                Unary::Sin => format!("sinf(t{x})"),
                Unary::Cos => format!("cosf(t{x})"),
                Unary::Floor => format!("floorf(t{x})"),
                Unary::Stop => format!("t{x}"),
            },
            Step::Binary(f, a, b) => match f {
                Binary::Add => format!("t{a} + t{b}"),
                Binary::Sub => format!("t{a} - t{b}"),
                Binary::Mul => format!("t{a} * t{b}"),
                Binary::Div => format!("t{a} / t{b}"),
                Binary::Min => format!("t{b} < t{a} ? t{b} : t{a}"),
                Binary::Max => format!("t{b} > t{a} ? t{b} : t{a}"),
                Binary::Less => format!("t{a} < t{b} ? 1.0f : 0.0f"),
                Binary::AtMost => format!("t{a} <= t{b} ? 1.0f : 0.0f"),
                Binary::Equal => format!("t{a} == t{b} ? 1.0f : 0.0f"),
            },
            Step::Where(c, a, b) => format!("t{c} > 0.0f ? t{a} : t{b}"),
        }
    }
}

/// The index of a table that a number means; NaN is 0.
const NEAREST: &str = "\
DEVICE i64 nearest(float x, i64 length) {
    return x > 0.0f ? (x < (float)(length - 1) ? (i64)x : length - 1) : 0;
}
";

impl Program {
    /// A device function of a pair, by its name: `name(s, b, i, j, h, query, key, x0, …)`. `query`
    /// and `key` are positions.
    fn function(&self, name: &str, steps: &[Step], sizes: Sizes, value: usize) -> String {
        let reads: String = (0..self.reads.len()).map(|n| format!(", const float *x{n}")).collect();
        let mut text = format!(
            "DEVICE float {name}(float s, i64 b, i64 i, i64 j, i64 h, i64 query, i64 key{reads}) {{\n"
        );
        for (n, step) in steps.iter().enumerate() {
            // Writing to a string does not fail.
            let _ = writeln!(text, "    float t{n} = {};", step.code(self, sizes));
        }
        let _ = writeln!(text, "    return t{value};\n}}");
        text
    }

    /// The struct `Scored` of the fast kernels, as `Plain` in `kernels/attention.cuh`.
    pub(crate) fn scored(&self, sizes: Sizes) -> String {
        let names: String = (0..self.reads.len()).map(|n| format!(" const float *x{n};")).collect();
        let (scores, masks) = (self.score.is_some(), self.mask.is_some());
        let mut text = format!(
            "{NEAREST}struct Scored {{\n    static constexpr bool SCORES = {scores}, MASKS = {masks};\n    \
             struct Reads {{{names} }};\n"
        );
        let (score, all) = (vec![Step::Score], vec![Step::Number(crate::op::Bits(1.0))]);
        let of = |formula: &Option<Formula>, otherwise: &[Step]| {
            let steps = formula.as_ref().map_or(otherwise, Formula::steps).to_vec();
            (steps.len() - 1, steps)
        };
        let partials = self.score.as_ref().map(Formula::partials);
        let slope = partials.map_or((0, all.clone()), |partials| (partials.by_score, partials.steps));
        for (name, (value, steps)) in
            [("score", of(&self.score, &score)), ("slope", slope), ("sees", of(&self.mask, &all))]
        {
            text += &format!(
                "    static DEVICE float {name}(float s, const Reads &reads, i64 b, i64 i, i64 j, i64 h, i64 query, i64 key) {{\n"
            );
            let mut read: Vec<usize> = steps.iter().filter_map(|step| step.read()).collect();
            read.sort_unstable();
            read.dedup();
            for n in read {
                let _ = writeln!(text, "        const float *x{n} = reads.x{n};");
            }
            for (n, step) in steps.iter().enumerate() {
                let _ = writeln!(text, "        float t{n} = {};", step.code(self, sizes));
            }
            let _ = writeln!(text, "        return t{value};\n    }}");
        }
        text + "};"
    }

    /// The functions `program_score`, `program_sees`, and with gradients `program_slope`, the
    /// derivative by the scaled product, and for each operand that has one `program_by0`, …; where
    /// an operand is a table, they have its index as another argument, and are zero at others.
    pub(crate) fn functions(&self, sizes: Sizes, gradient: bool) -> String {
        let mut text = NEAREST.to_string();
        let of = |name: &str, formula: &Option<Formula>, otherwise: &[Step]| {
            let steps = formula.as_ref().map_or(otherwise, Formula::steps);
            self.function(name, steps, sizes, steps.len() - 1)
        };
        text += &of("program_score", &self.score, &[Step::Score]);
        text += &of("program_sees", &self.mask, &[Step::Number(crate::op::Bits(1.0))]);
        let Some(partials) = self.score.as_ref().filter(|_| gradient).map(Formula::partials) else {
            return text + &self.function("program_slope", &[Step::Number(crate::op::Bits(1.0))], sizes, 0);
        };
        text += &self.function("program_slope", &partials.steps, sizes, partials.by_score);
        for n in self.moved() {
            let reads: String = (0..self.reads.len()).map(|n| format!(", const float *x{n}")).collect();
            let _ = writeln!(
                text,
                "DEVICE float program_by{n}(float s, i64 b, i64 i, i64 j, i64 h, i64 query, i64 key, i64 at{reads}) {{"
            );
            for (n, step) in partials.steps.iter().enumerate() {
                let _ = writeln!(text, "    float t{n} = {};", step.code(self, sizes));
            }
            text += "    float sum = 0.0f;\n";
            for partial in partials.of.iter().filter(|partial| partial.read == n) {
                let _ = match partials.steps[partial.leaf] {
                    Step::Lookup(_, x) => {
                        writeln!(
                            text,
                            "    if (nearest(t{x}, {}) == at) sum += t{};",
                            sizes.lengths[n], partial.by
                        )
                    }
                    _ => writeln!(text, "    sum += t{};", partial.by),
                };
            }
            text += "    return sum;\n}\n";
        }
        text
    }
}

//! Rotations by position (RoPE).

use super::*;
pub use dreamc_dsl::spec::RopeScaling;

/// Which position a rotation encodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Positions {
    /// `positions[b, t]` is the second operand.
    #[default]
    Tokens,
    /// `depth[]` and `depths[]` are the second and third operands. Pair `i` uses `depth`; where
    /// `half_reversed`, odd pairs use `depths - 1 - depth`.
    Depth {
        /// Whether odd pairs count backwards from the last depth.
        half_reversed: bool,
    },
}

/// Pairs of a longer rotation, each at its frequency there (partial RoPE, 2502.14837, section 3.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Chosen {
    /// Pairs of the longer rotation, at most 128.
    pub of: u64,
    /// A bit for each of the first 64 that is chosen, and for each of the others.
    pub bits: [u64; 2],
}

impl Chosen {
    /// These pairs of `of` pairs.
    pub fn new(pairs: &[u64], of: u64) -> Self {
        let mut bits = [0; 2];
        for pair in pairs.iter().filter(|pair| **pair < 128) {
            bits[(pair / 64) as usize] |= 1 << (pair % 64);
        }
        Chosen { of, bits }
    }

    /// The pairs, ascending.
    fn pairs(self) -> impl Iterator<Item = u64> {
        (0..128).filter(move |pair| self.bits[(pair / 64) as usize] >> (pair % 64) & 1 == 1)
    }
}

/// `(x[.., d], position operands) -> x` rotated: pairs `(i, i + d/2)` of the last dimension by
/// `position · base^(-2i/d)`, or by what `chosen` says.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rope {
    /// Base of the frequencies.
    pub base: f64,
    /// Which position is encoded.
    pub positions: Positions,
    /// Lowered frequencies. The factor on rotated vectors that YaRN has is an operation of its own,
    /// and 1 here.
    pub scaling: Option<RopeScaling>,
    /// The pairs of a longer rotation that these are, in its order.
    pub chosen: Option<Chosen>,
    /// Rotates backwards: the transpose, for gradients.
    pub inverse: bool,
}

by_bits!(
    Rope,
    Rope { base, positions, scaling, chosen, inverse } => (Bits(base), positions, scaling.map(key), chosen, inverse)
);

/// Which scaling it is, its numbers, and whether it truncates.
fn key(scaling: RopeScaling) -> (u8, [Bits; 4], bool) {
    let (kind, numbers, truncate) = match scaling {
        RopeScaling::Llama3 { factor, low, high, original_context } => {
            (0, [factor, low, high, original_context], false)
        }
        RopeScaling::Linear { factor } => (1, [factor, 0.0, 0.0, 0.0], false),
        RopeScaling::Yarn { factor, fast, slow, original_context, truncate, attention: _ } => {
            (2, [factor, fast, slow, original_context], truncate)
        }
    };
    (kind, numbers.map(Bits), truncate)
}

impl Rope {
    /// Angle per position of pair `i` of `pairs`.
    pub fn frequency(&self, i: u64, pairs: u64) -> f64 {
        let (i, pairs) = match self.chosen {
            Some(chosen) => (chosen.pairs().nth(i as usize).unwrap_or(i), chosen.of),
            None => (i, pairs),
        };
        let f = self.base.powf(-(i as f64) / pairs as f64);
        let Some(s) = self.scaling else { return f };
        match s {
            RopeScaling::Llama3 { factor, low, high, original_context } => {
                let wavelength = std::f64::consts::TAU / f;
                let ratio = original_context / wavelength;
                if ratio < low {
                    f / factor
                } else if ratio > high {
                    f
                } else {
                    let smooth = (ratio - low) / (high - low);
                    (1.0 - smooth) * f / factor + smooth * f
                }
            }
            RopeScaling::Linear { factor } => f / factor,
            RopeScaling::Yarn { factor, fast, slow, original_context, truncate, attention: _ } => {
                // The pair that turns `times` times in the original context.
                let turning = |times: f64| {
                    let wavelength = original_context / times;
                    pairs as f64 * (wavelength / std::f64::consts::TAU).ln() / self.base.ln()
                };
                let (mut low, mut high) = (turning(fast), turning(slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                let (low, high) = (low.max(0.0), high.min(2.0 * pairs as f64 - 1.0));
                let wide = if low == high { 1e-3 } else { high - low };
                let divided = ((i as f64 - low) / wide).clamp(0.0, 1.0);
                f / factor * divided + f * (1.0 - divided)
            }
        }
    }
}

impl Payload for Rope {
    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        let mut depth = usize::from(self.positions != Positions::Tokens);
        let mut half_reversed = self.positions == Positions::Depth { half_reversed: true };
        a.word("base")?;
        a.float(&mut self.base)?;
        a.choice(&["tokens", "depth"], &mut depth)?;
        if depth == 1 {
            a.flag("half_reversed", &mut half_reversed)?;
            self.positions = Positions::Depth { half_reversed };
        } else {
            self.positions = Positions::Tokens;
        }
        let (kind, numbers, mut whole) = self.scaling.map_or((3, [Bits(0.0); 4], false), key);
        let mut numbers = numbers.map(|x| x.0);
        let kinds: [(u8, &str, &[&str]); 3] = [
            (0, "factor", &["low", "high", "context"]),
            (1, "linear", &[]),
            (2, "yarn", &["fast", "slow", "context"]),
        ];
        for (n, word, others) in kinds {
            let mut scaled = kind == n;
            a.flag(word, &mut scaled)?;
            if !scaled {
                continue;
            }
            a.float(&mut numbers[0])?;
            for (word, x) in others.iter().zip(&mut numbers[1..]) {
                a.word(word)?;
                a.float(x)?;
            }
            let [factor, x, y, original_context] = numbers;
            self.scaling = Some(match n {
                0 => RopeScaling::Llama3 { factor, low: x, high: y, original_context },
                1 => RopeScaling::Linear { factor },
                _ => {
                    a.flag("truncate", &mut whole)?;
                    let (fast, slow, truncate) = (x, y, whole);
                    RopeScaling::Yarn { factor, fast, slow, original_context, truncate, attention: 1.0 }
                }
            });
        }
        let mut some = self.chosen.is_some();
        a.flag("chosen", &mut some)?;
        if some {
            let Chosen { mut of, bits: [mut low, mut high] } = self.chosen.unwrap_or_default();
            a.integer(&mut low)?;
            a.integer(&mut high)?;
            a.word("of")?;
            a.integer(&mut of)?;
            self.chosen = Some(Chosen { of, bits: [low, high] });
        }
        a.flag("inverse", &mut self.inverse)
    }
}

impl Operation for Rope {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "rope",
            operands: match self.positions {
                Positions::Tokens => &["x[.., d]", "positions i32[..]"],
                Positions::Depth { .. } => &["x[.., d]", "depth i32[]", "depths i32[]"],
            },
            results: &["y[.., d]"],
            class: Class::Row { again: false, row: self },
            rows: Rows::Same,
            bf16: Bf16::Own,
            // Two multiplications and an addition.
            work: Work::Operand(0, 3),
            derivative: Derivative::Rule(self),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        x.float(0)?;
        let d = x.last(0)?;
        x.check(x.size(d).is_multiple_of(2), "rotates pairs: the last dimension must be even")?;
        if let Some(chosen) = self.chosen {
            let pairs = chosen.pairs().filter(|pair| *pair < chosen.of).count() as u64;
            x.check(pairs == x.size(d) / 2, "chosen pairs must be those of the last dimension")?;
        }
        for k in 1..x.len() {
            x.int(k)?;
        }
        match self.positions {
            Positions::Tokens => {
                x.check(x[0].dims.starts_with(&x[1].dims), "positions must have the leading dimensions")?;
            }
            Positions::Depth { .. } => {
                let scalars = x[1].dims.is_empty() && x[2].dims.is_empty();
                x.check(scalars, "depth and depths are scalars")?;
            }
        }
        Ok(vec![x[0].clone()])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let x = e.floats(0);
        let d = e.last(0);
        let pairs = d / 2;
        // Positions stand for the leading dimensions: each belongs to `rows_each` rows of `d`.
        let rows_each = x.len() / d / e.ints(1).len();
        let position = |row: usize, pair: usize| match self.positions {
            Positions::Tokens => f64::from(e.ints(1)[row / rows_each]),
            Positions::Depth { half_reversed } => {
                let (depth, depths) = (f64::from(e.ints(1)[0]), f64::from(e.ints(2)[0]));
                if half_reversed && pair % 2 == 1 { depths - 1.0 - depth } else { depth }
            }
        };
        let mut out = x.to_vec();
        for (row, y) in out.chunks_mut(d).enumerate() {
            for i in 0..pairs {
                let angle = position(row, i) * self.frequency(i as u64, pairs as u64);
                let (sin, cos) = if self.inverse { (-angle).sin_cos() } else { angle.sin_cos() };
                let (a, b) = (y[i], y[i + pairs]);
                y[i] = a * cos - b * sin;
                y[i + pairs] = b * cos + a * sin;
            }
        }
        Ok(vec![Data::Float(out)])
    }

    fn random(&self, mut case: Case) -> Instance {
        let leading = [case.dim("b"), case.dim("t")];
        let d = 2 * case.size();
        let dims = [leading[0], leading[1], case.dim("heads"), case.sized("d", d)];
        let x = case.floats("x", &dims);
        let original_context = 64.0;
        let scaling = case.rng.once_in(2).then_some(RopeScaling::Llama3 {
            factor: 4.0,
            low: 1.0,
            high: 4.0,
            original_context,
        });
        let positions = match case.rng.below(3) {
            0 => Positions::Tokens,
            n => Positions::Depth { half_reversed: n == 1 },
        };
        let mut inputs = vec![x];
        if positions == Positions::Tokens {
            let known = 1 + case.rng.below(2) as usize;
            inputs.push(case.ints("positions", &leading[..known], 50));
        } else {
            let depths = 1 + case.rng.below(9);
            let depth = case.rng.below(depths);
            inputs.extend([case.index("depth", depth), case.index("depths", depths)]);
        }
        let inverse = case.rng.once_in(3);
        let truncate = case.rng.once_in(2);
        let (factor, fast, slow) = (4.0, 8.0, 1.0);
        let yarn = RopeScaling::Yarn { factor, fast, slow, original_context, truncate, attention: 1.0 };
        let scaling = match case.rng.below(4) {
            0 => Some(yarn),
            1 => Some(RopeScaling::Linear { factor: 4.0 }),
            _ => scaling,
        };
        // Every second pair, from the second.
        let every: Vec<u64> = (0..d / 2).map(|i| 2 * i + 1).collect();
        let chosen = case.rng.once_in(3).then(|| Chosen::new(&every, d));
        case.finish(Rope { base: 100.0, positions, scaling, chosen, inverse }, &inputs)
    }
}

impl Reverse for Rope {
    fn reverse(&self, at: &mut Adjoint) -> Result<(), CompileError> {
        let back = Rope { inverse: !self.inverse, ..*self };
        let mut operands = at.operands();
        operands[0] = at.d()?;
        let dx = at.builder().op(back, &operands);
        at.add(0, dx);
        Ok(())
    }
}

impl RowWork for Rope {
    fn row(&self, r: &mut RowBuilder, node: &Node) -> Result<Option<u32>, CompileError> {
        let x = r.array(node.inputs[0])?;
        let (position, depths) = match self.positions {
            Positions::Tokens => (r.ints(node.inputs[1])?, 0),
            Positions::Depth { .. } => (r.index(node.inputs[1])?, r.index(node.inputs[2])?),
        };
        let (size, n) = (r.last(node.inputs[0]), r.length_of(node.first)?);
        Ok(Some(r.op(RowOp::Rope { x, size, rope: *self, position, depths }, n)))
    }
}

//! Sums of products of what tokens give, in formulas: how much larger they are than at the base.
//!
//! *In*: the graphs of a definition here and at the base. *Out*: the places that read numbers which
//! grow with the size, by how much ([`Grown`]). *Promise*: read off the formulas; a factor that a
//! norm or a quotient takes away again does not count.
//!
//! Moves of two values in training agree, so that a sum of `d` products of them is in proportion to
//! `d`: that is why scores have 1/d. Every value has a ratio, its size here over its size at the
//! base: 1 for the row of the stream, for weights and for what `linear` makes of either; for
//! numbers that are written their own ratio; `d/b` times more for a sum over `d` instead of `b`; 1
//! after a norm; `√(b/d)` after a norm to the length 1. Functions that are not in proportion to
//! what they read, and what the component gives, must have 1.

use dreamc_dsl::define::graph::{
    Binary, DimId, Function, Graph, Node, Norm, Recurrence, Reduce, Region, Unary,
};

/// A place of a definition that reads numbers which grow.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Grown {
    /// The name of the value that it stands in; none of what is returned.
    pub value: Option<String>,
    /// The function that reads them.
    pub by: &'static str,
    /// Their size here over that at the base; none where two sizes are added.
    pub ratio: Option<f64>,
}

/// The places of a definition that read numbers which grow, without those that follow from others.
pub(super) fn grown(here: &Graph, base: &Graph) -> Vec<Grown> {
    let mut walk = Walk { here, base, found: vec![], looking: true, value: None };
    let all = walk.region(&here.region, &base.region, &[], &[]);
    if let Some(result) = here.region.results.first() {
        let of = all.get(result.0 as usize).copied().unwrap_or(Size::ONE);
        walk.value = None;
        walk.one(of, "return");
    }
    walk.found
}

/// The size of a value over that at the base.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Size {
    /// Nothing yet: a state before its first token.
    Empty,
    /// In proportion.
    Times(f64),
    /// A number that is written: here, and at the base.
    Number(f64, f64),
}

impl Size {
    const ONE: Size = Size::Times(1.0);

    fn ratio(self) -> f64 {
        match self {
            Size::Empty => 1.0,
            Size::Times(ratio) => ratio,
            Size::Number(_, 0.0) => 1.0,
            Size::Number(here, base) => (here / base).abs(),
        }
    }

    fn map(self, f: impl Fn(f64) -> f64, ratio: impl Fn(f64) -> f64) -> Size {
        match self {
            Size::Empty => Size::Empty,
            Size::Times(own) => Size::Times(ratio(own)),
            Size::Number(here, base) => Size::Number(f(here), f(base)),
        }
    }
}

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-6 * b.abs()
}

/// Numbers that only keep a quotient finite.
const SMALL: f64 = 1e-3;

struct Walk<'g> {
    here: &'g Graph,
    base: &'g Graph,
    found: Vec<Grown>,
    /// Whether places are reported; states are followed before.
    looking: bool,
    /// The value whose formula is walked.
    value: Option<String>,
}

impl Walk<'_> {
    /// How many more numbers dimensions have.
    fn more(&self, over: &[DimId]) -> f64 {
        let size = |graph: &Graph, dim: &DimId| graph.size(*dim) as f64;
        let base = |dim: &DimId| {
            let own = self.base.dims.iter().find(|own| own.name == self.here.name(*dim));
            own.map_or_else(|| size(self.here, dim), |own| own.size as f64)
        };
        over.iter().map(|dim| size(self.here, dim) / base(dim).max(1.0)).product()
    }

    /// Tells of a place whose numbers must be as large as at the base.
    fn one(&mut self, size: Size, by: &'static str) {
        // A number that is written is what is meant.
        let Size::Times(ratio) = size else { return };
        if !near(ratio, 1.0) {
            self.tell(by, Some(ratio));
        }
    }

    fn tell(&mut self, by: &'static str, ratio: Option<f64>) {
        let found = Grown { value: self.value.clone(), by, ratio };
        if self.looking && !self.found.contains(&found) {
            self.found.push(found);
        }
    }

    /// Two values that are added or compared: the size of the larger.
    fn add(&mut self, a: Size, b: Size) -> Size {
        match (a, b) {
            (Size::Empty, other) | (other, Size::Empty) => other,
            (Size::Times(own), Size::Number(number, _)) | (Size::Number(number, _), Size::Times(own)) => {
                if number.abs() > SMALL && !near(own, 1.0) {
                    self.tell("sum", None);
                    return Size::ONE;
                }
                Size::Times(own)
            }
            (a, b) => {
                let (one, other) = (a.ratio(), b.ratio());
                if !near(one, other) {
                    self.tell("sum", None);
                    return Size::ONE;
                }
                Size::Times(one)
            }
        }
    }

    /// The sizes of the values of a region, given those of what it reads and of its states.
    fn region(&mut self, here: &Region, base: &Region, reads: &[Size], states: &[Size]) -> Vec<Size> {
        let mut all: Vec<Size> = vec![];
        let mut emitted: Vec<Vec<Size>> = vec![vec![]; here.nodes.len()];
        for (place, node) in here.nodes.iter().enumerate() {
            let args: Vec<Size> =
                node.args.iter().map(|v| all.get(v.0 as usize).copied().unwrap_or(Size::ONE)).collect();
            let at_base = base.nodes.get(place);
            // A name stands at the last node of its formula.
            self.value = here.nodes[place..].iter().find_map(|node| node.name.clone());
            let size = match (&node.function, at_base.map(|node| &node.function)) {
                (Function::Recurrence(own), Some(Function::Recurrence(base))) => {
                    emitted[place] = self.recurrence(own, base, &args);
                    Size::ONE
                }
                (Function::Emitted(number), _) => {
                    let of = node.args.first().and_then(|v| emitted.get(v.0 as usize));
                    of.and_then(|all| all.get(*number as usize)).copied().unwrap_or(Size::ONE)
                }
                (Function::Number(own), Some(Function::Number(base))) => Size::Number(*own, *base),
                (Function::Read(number), _) => reads.get(*number as usize).copied().unwrap_or(Size::ONE),
                (Function::State(number), _) => states.get(*number as usize).copied().unwrap_or(Size::ONE),
                _ => self.node(node, &args),
            };
            all.push(size);
        }
        all
    }

    /// The results of a recurrence; its states are followed until they stay.
    fn recurrence(&mut self, here: &Recurrence, base: &Recurrence, args: &[Size]) -> Vec<Size> {
        let mut states = vec![Size::Empty; here.states.len()];
        let looking = std::mem::replace(&mut self.looking, false);
        let mut last = vec![];
        // A state that follows from others takes as many turns as there are states, and one more.
        for turn in 0..here.states.len() + 3 {
            self.looking = looking && turn == here.states.len() + 2;
            let all = self.region(&here.body, &base.body, args, &states);
            let of = |v: &dreamc_dsl::define::graph::ValueId| all.get(v.0 as usize).copied();
            last = here.body.results.iter().map(|v| of(v).unwrap_or(Size::ONE)).collect();
            states = last.iter().take(here.states.len()).copied().collect();
        }
        self.looking = looking;
        last
    }

    /// The size of a value of one function.
    fn node(&mut self, node: &Node, args: &[Size]) -> Size {
        let first = args.first().copied().unwrap_or(Size::ONE);
        let second = args.get(1).copied().unwrap_or(Size::ONE);
        match &node.function {
            Function::Unary(f) => self.unary(*f, first),
            Function::Binary(Binary::Mul) | Function::Outer => match (first, second) {
                (Size::Empty, _) | (_, Size::Empty) => Size::Empty,
                (Size::Number(a, b), Size::Number(c, d)) => Size::Number(a * c, b * d),
                (a, b) => Size::Times(a.ratio() * b.ratio()),
            },
            Function::Binary(Binary::Div) => match (first, second) {
                (Size::Empty, _) => Size::Empty,
                (Size::Number(a, b), Size::Number(c, d)) => Size::Number(a / c, b / d),
                (a, b) => Size::Times(a.ratio() / b.ratio()),
            },
            Function::Binary(Binary::Add | Binary::Sub | Binary::Max | Binary::Min) => {
                // The sign of a number is all that these look at.
                let bound = |size: Size| matches!(size, Size::Number(here, _) if here == 0.0);
                if bound(first) || bound(second) {
                    return if bound(first) { second } else { first };
                }
                self.add(first, second)
            }
            Function::Binary(_) => Size::ONE,
            Function::Where => {
                let third = args.get(2).copied().unwrap_or(Size::ONE);
                self.add(second, third)
            }
            Function::Dot(over) => match (first, second) {
                (Size::Empty, _) | (_, Size::Empty) => Size::Empty,
                (a, b) => Size::Times(a.ratio() * b.ratio() * self.more(over)),
            },
            Function::Reduce(Reduce::Sum, over) => first.map(|x| x, |own| own * self.more(over)),
            Function::Softmax(_) => {
                self.one(first, "softmax");
                Size::ONE
            }
            Function::Norm { how: Norm::L2, over, .. } => Size::Times(self.more(over).powf(-0.5)),
            Function::Norm { how: Norm::Rms | Norm::Layer, .. } => Size::ONE,
            Function::Attend(_) | Function::DepthAttend { .. } => {
                self.one(first, "attend");
                self.one(second, "attend");
                args.get(2).copied().unwrap_or(Size::ONE)
            }
            Function::Apply(_) => {
                self.one(first, "component");
                Size::ONE
            }
            // In proportion to the first value, whose weight has a rate of its own.
            Function::Linear(_)
            | Function::Conv(_)
            | Function::Running(_)
            | Function::Average { .. }
            | Function::Shift(_)
            | Function::Stop
            | Function::Rope { .. }
            | Function::Pick
            | Function::Slice { .. }
            | Function::Merge(..)
            | Function::Split(..)
            | Function::Reduce(Reduce::Mean | Reduce::Maximum, _) => first,
            Function::Join(..) => {
                let mut size = first;
                for other in args.iter().skip(1) {
                    size = self.add(size, *other);
                }
                size
            }
            Function::Input
            | Function::Number(_)
            | Function::Fact(_)
            | Function::Noise(_)
            | Function::Weight(_)
            | Function::Embedding
            | Function::Top { .. }
            | Function::Choose(_)
            | Function::Scores
            | Function::Mass
            | Function::Recurrence(_)
            | Function::Emitted(_)
            | Function::Earlier(_)
            | Function::ValueOf(..)
            | Function::Read(_)
            | Function::State(_)
            | Function::Score
            | Function::QueryPlace
            | Function::KeyPlace
            | Function::Head(_)
            | Function::AtQuery(_)
            | Function::AtKey(_)
            | Function::Look(_) => Size::ONE,
        }
    }

    fn unary(&mut self, f: Unary, of: Size) -> Size {
        let bounded = |walk: &mut Self, by| {
            walk.one(of, by);
            Size::ONE
        };
        match f {
            Unary::Neg => of.map(|x| -x, |own| own),
            Unary::Abs => of.map(f64::abs, |own| own),
            Unary::Relu => of.map(|x| x.max(0.0), |own| own),
            Unary::Square => of.map(|x| x * x, |own| own * own),
            Unary::Relu2 => of.map(|x| x.max(0.0).powi(2), |own| own * own),
            Unary::Sqrt => of.map(f64::sqrt, f64::sqrt),
            Unary::Rsqrt => of.map(|x| x.sqrt().recip(), |own| own.sqrt().recip()),
            Unary::Not | Unary::Floor => Size::ONE,
            Unary::Exp => bounded(self, "exp"),
            Unary::Log => bounded(self, "log"),
            Unary::Sin => bounded(self, "sin"),
            Unary::Cos => bounded(self, "cos"),
            Unary::Tanh => bounded(self, "tanh"),
            Unary::Sigmoid => bounded(self, "sigmoid"),
            Unary::Silu => bounded(self, "silu"),
            Unary::Gelu => bounded(self, "gelu"),
            Unary::Softplus => bounded(self, "softplus"),
            Unary::LogSigmoid => bounded(self, "log_sigmoid"),
        }
    }
}

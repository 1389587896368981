//! Scores and masks of a definition's attentions as the programs of [`ir::Attention`].
//!
//! *In*: the regions of an `attend`. *Out*: a [`Program`], and what each of its operands is made
//! from ([`Source`]). *Promise*: equal regions give equal programs, whatever their spelling:
//! numbers are folded, and a mask is above zero where the region's value is not zero.

use super::tokens::Heads;
use super::*;
use crate::op::attention::formula::{self, Builder, Place, Program, Read, Step};
use dreamc_dsl::define::graph::{Attend, Binary, Graph, Type as OfValue, Unary, WeightId};

/// The value that an operand of a program is made from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Source {
    /// The value.
    pub from: From,
    /// How the program reads it, and with it the operand's shape.
    pub read: Read,
    /// The dimensions of a table that indices run over, in the order in which they become one, the
    /// last fastest. Dimensions of heads, where the table has some, come before them.
    pub table: Vec<DimId>,
}

/// A value that a program reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum From {
    /// That operand of the `attend`.
    Operand(u32),
    /// A weight that is written in the score.
    Weight(WeightId),
}

/// The program of an `attend` of a region, and its operands in order; none where it has neither a
/// score nor a mask.
pub(super) fn program(
    graph: &Graph,
    region: &Region,
    node: &Node,
    attend: &Attend,
) -> Result<Option<(Program, Vec<Source>)>, CompileError> {
    if attend.score.is_none() && attend.mask.is_none() {
        return Ok(None);
    }
    let operand = |number: u32| node.args.get(number as usize).map(|&value| &region.node(value).ty);
    let mut sources = vec![];
    let mut formula = |region: &Option<Region>, truth: bool| {
        let Some(region) = region else { return Ok(None) };
        let mut builder =
            Scoring { graph, operand: &operand, sources: &mut sources, builder: Builder::default() };
        builder.formula(region, truth).map(Some)
    };
    let (score, mask) = (formula(&attend.score, false)?, formula(&attend.mask, true)?);
    let reads = sources.iter().map(|source: &Source| source.read).collect();
    let program = Program { reads, score, mask };
    let fits = program.check();
    fits.map_err(|_| CompileError::Unsupported("a score or a mask of so many steps or operands"))?;
    Ok(Some((program, sources)))
}

impl Lower<'_> {
    /// The operands of a program, in order. Of a cache what is read at keys is appended as they
    /// are.
    pub(super) fn read_by_score(
        &mut self,
        d: &mut Defining,
        node: &Node,
        heads: &Heads,
        sources: &[Source],
    ) -> Result<Vec<Value>, CompileError> {
        let all = self.b.dims(heads.q)[2];
        let mut operands = vec![];
        for source in sources {
            let x = match source.from {
                From::Operand(operand) => d.arg(node, operand as usize)?,
                From::Weight(weight) => self.own_weight(d, weight, false),
            };
            let order = if source.read.heads { &heads.order[..] } else { &[] };
            let merged = if source.read.heads { vec![all] } else { vec![] };
            let at_token = matches!(source.read.place, Place::Query | Place::Key);
            let x = match source.read.place {
                Place::Table => {
                    let table = d.dims(&source.table);
                    let length: u64 = source.table.iter().map(|&dim| d.graph.size(dim)).product();
                    let length = self.dim_of(d.owner, &format!(".table{length}"), length);
                    let x = self.formulas(&d.rows).spread(x, &[order, &table].concat(), false);
                    self.b.reshape(x, &[&merged[..], &[length]].concat())
                }
                Place::Query | Place::Key | Place::All => {
                    let x = self.formulas(&d.rows).spread(x, order, at_token);
                    let rows = if at_token { &d.rows[..] } else { &[] };
                    self.b.reshape(x, &[rows, &merged].concat())
                }
            };
            let x = match source.read.place {
                Place::Key => self.of_last_token(d, x),
                Place::Query | Place::All | Place::Table => x,
            };
            operands.push(match (source.read.place, self.shape.cache, d.admitted) {
                (Place::Key, Some(_), Some(admitted)) => self.append_read(d, x, admitted),
                _ => x,
            });
        }
        Ok(operands)
    }

    /// A cache of what is read at keys.
    fn append_read(&mut self, d: &mut Defining, x: Value, admitted: Admitted) -> Value {
        let dims = self.b.dims(x);
        let ty = Type::f32(&[&[dims[0], admitted.entries], &dims[2..]].concat());
        let part = part::kept(&format!("read{}", d.text()));
        let (port, cache) = self.state(d.owner, part, Lifetime::Token(PerToken::Application), ty);
        let cache = self.b.op(Op::Append, &[cache, x, admitted.slots]);
        self.b.result(port, cache);
        cache
    }
}

/// A formula while it is built.
struct Scoring<'g, 'a> {
    graph: &'g Graph,
    operand: &'a dyn Fn(u32) -> Option<&'g OfValue>,
    sources: &'a mut Vec<Source>,
    builder: Builder,
}

impl Scoring<'_, '_> {
    fn formula(&mut self, region: &Region, truth: bool) -> Result<formula::Formula, CompileError> {
        let mut steps: Vec<usize> = vec![];
        for node in &region.nodes {
            let args: Vec<usize> = node.args.iter().map(|arg| steps[arg.0 as usize]).collect();
            let step = self.step(region, node, &args)?;
            steps.push(step);
        }
        let result = region.results.first().ok_or(CompileError::Unsupported("a score of nothing"))?;
        let mut value = steps[result.0 as usize];
        if truth {
            value = self.truth(value);
        }
        Ok(self.builder.formula(value))
    }

    fn step(&mut self, region: &Region, node: &Node, args: &[usize]) -> Result<usize, CompileError> {
        let table = matches!(node.function, Of::Read(_) | Of::Weight(_)) && self.is_table(region, node);
        let b = &mut self.builder;
        Ok(match &node.function {
            Of::Number(x) => b.number(*x),
            Of::Score => b.step(Step::Score),
            Of::QueryPlace => b.step(Step::Query),
            Of::KeyPlace => b.step(Step::Key),
            Of::Head(_) => b.step(Step::Head),
            Of::AtQuery(operand) => self.value(From::Operand(*operand), Place::Query)?,
            Of::AtKey(operand) => self.value(From::Operand(*operand), Place::Key)?,
            // A table's own place is a step that nothing needs.
            Of::Read(_) | Of::Weight(_) if table => b.number(0.0),
            Of::Read(operand) => self.value(From::Operand(*operand), Place::All)?,
            Of::Weight(weight) => self.value(From::Weight(*weight), Place::All)?,
            Of::Look(places) => self.look(region, node, places, args)?,
            Of::Unary(f) => self.unary(*f, args[0]),
            Of::Binary(f) => self.binary(*f, args[0], args[1]),
            Of::Where => {
                let c = self.truth(args[0]);
                self.builder.choose(c, args[1], args[2])
            }
            Of::Stop => b.unary(formula::Unary::Stop, args[0]),
            Of::Fact(_) => {
                return Err(CompileError::Unsupported(
                    "a number of the application or the token in a score: name its value above, and read that",
                ));
            }
            Of::Input
            | Of::Embedding
            | Of::Noise(_)
            | Of::Outer
            | Of::Reduce(..)
            | Of::Softmax(_)
            | Of::Norm { .. }
            | Of::Dot(_)
            | Of::Linear(_)
            | Of::Split(..)
            | Of::Merge(..)
            | Of::Join(..)
            | Of::Slice { .. }
            | Of::Top { .. }
            | Of::Pick
            | Of::Rope { .. }
            | Of::Shift(_)
            | Of::Conv(_)
            | Of::Running(_)
            | Of::Average { .. }
            | Of::Choose(_)
            | Of::Scores
            | Of::Mass
            | Of::Attend(_)
            | Of::Recurrence(_)
            | Of::Emitted(_)
            | Of::DepthAttend { .. }
            | Of::Earlier(_)
            | Of::ValueOf(..)
            | Of::Apply(_)
            | Of::State(_) => {
                return Err(CompileError::Unsupported(
                    "a function in a score that is not element by element",
                ));
            }
        })
    }

    /// Whether a value is only read by index.
    fn is_table(&self, region: &Region, node: &Node) -> bool {
        let is = |value: &ValueId| std::ptr::eq(region.node(*value), node);
        let looks = |reader: &Node| matches!(reader.function, Of::Look(_));
        let plain = |reader: &Node| {
            reader.args.iter().enumerate().any(|(n, arg)| is(arg) && !(n == 0 && looks(reader)))
        };
        !region.results.iter().any(is) && !region.nodes.iter().any(plain)
    }

    fn dims(&self, from: From) -> Result<Vec<DimId>, CompileError> {
        let missing = CompileError::Unsupported("a score that reads an operand which is not there");
        match from {
            From::Operand(operand) => (self.operand)(operand).map(|ty| ty.dims.clone()).ok_or(missing),
            From::Weight(weight) => {
                self.graph.weights.get(weight.0 as usize).map(|weight| weight.dims.clone()).ok_or(missing)
            }
        }
    }

    fn source(&mut self, source: Source) -> usize {
        let known = self.sources.iter().position(|known| *known == source);
        known.unwrap_or_else(|| {
            self.sources.push(source);
            self.sources.len() - 1
        })
    }

    /// A value read at a token, or the same for all.
    fn value(&mut self, from: From, place: Place) -> Result<usize, CompileError> {
        let read = Read { place, heads: !self.dims(from)?.is_empty() };
        let read = self.source(Source { from, read, table: vec![] });
        Ok(self.builder.step(Step::Read(read)))
    }

    fn look(
        &mut self,
        region: &Region,
        node: &Node,
        places: &[Option<u32>],
        args: &[usize],
    ) -> Result<usize, CompileError> {
        let from = match node.args.first().map(|&table| &region.node(table).function) {
            Some(Of::Read(operand)) => From::Operand(*operand),
            Some(Of::Weight(weight)) => From::Weight(*weight),
            _ => return Err(CompileError::Unsupported("a table in a score that is not a value above it")),
        };
        let dims = self.dims(from)?;
        let indexed: Vec<(DimId, usize)> = dims
            .iter()
            .zip(places)
            .filter_map(|(&dim, place)| Some((dim, args[(*place)? as usize])))
            .collect();
        let table: Vec<DimId> = indexed.iter().map(|(dim, _)| *dim).collect();
        if table.is_empty() {
            return self.value(from, Place::All);
        }
        let read = Read { place: Place::Table, heads: dims.iter().any(|dim| !table.contains(dim)) };
        let read = self.source(Source { from, read, table });
        let mut index = None;
        let several = indexed.len() > 1;
        for (dim, mut place) in indexed {
            let b = &mut self.builder;
            if several {
                // Each index is the nearest of its own dimension, as a lookup finds for one.
                let (zero, last) = (b.number(0.0), b.number(self.graph.size(dim) as f64 - 1.0));
                place = b.unary(formula::Unary::Floor, place);
                place = b.binary(formula::Binary::Max, place, zero);
                place = b.binary(formula::Binary::Min, place, last);
            }
            index = Some(match index {
                None => place,
                Some(before) => {
                    let size = b.number(self.graph.size(dim) as f64);
                    let before = b.binary(formula::Binary::Mul, before, size);
                    b.binary(formula::Binary::Add, before, place)
                }
            });
        }
        let index = index.unwrap_or(0);
        Ok(self.builder.step(Step::Lookup(read, index)))
    }

    /// 1 where a number is not zero, else 0.
    fn truth(&mut self, x: usize) -> usize {
        self.builder.truth(x)
    }

    fn unary(&mut self, f: Unary, x: usize) -> usize {
        use formula::{Binary as B, Unary as U};
        let b = &mut self.builder;
        match f {
            Unary::Neg => b.unary(U::Neg, x),
            Unary::Not => {
                let zero = b.number(0.0);
                b.binary(B::Equal, x, zero)
            }
            Unary::Exp => b.unary(U::Exp, x),
            Unary::Log => b.unary(U::Log, x),
            Unary::Sqrt => b.unary(U::Sqrt, x),
            Unary::Rsqrt => {
                let (one, root) = (b.number(1.0), b.unary(U::Sqrt, x));
                b.binary(B::Div, one, root)
            }
            Unary::Abs => b.unary(U::Abs, x),
            Unary::Square => b.binary(B::Mul, x, x),
            Unary::Sin => b.unary(U::Sin, x),
            Unary::Cos => b.unary(U::Cos, x),
            Unary::Tanh => b.unary(U::Tanh, x),
            Unary::Sigmoid => sigmoid(b, x),
            Unary::Silu => {
                let gate = sigmoid(b, x);
                b.binary(B::Mul, x, gate)
            }
            Unary::Gelu => {
                let square = b.binary(B::Mul, x, x);
                let cube = b.binary(B::Mul, square, x);
                let (small, twice) =
                    (b.number(0.044715), b.number(2.0 * (2.0 / std::f64::consts::PI).sqrt()));
                let cube = b.binary(B::Mul, small, cube);
                let inner = b.binary(B::Add, x, cube);
                let inner = b.binary(B::Mul, twice, inner);
                let gate = sigmoid(b, inner);
                b.binary(B::Mul, x, gate)
            }
            Unary::Relu => {
                let zero = b.number(0.0);
                b.binary(B::Max, x, zero)
            }
            Unary::Relu2 => {
                let positive = self.unary(Unary::Relu, x);
                self.builder.binary(B::Mul, positive, positive)
            }
            Unary::Softplus => softplus(b, x),
            Unary::LogSigmoid => {
                let x = b.unary(U::Neg, x);
                let above = softplus(b, x);
                b.unary(U::Neg, above)
            }
            Unary::Floor => b.unary(U::Floor, x),
        }
    }

    fn binary(&mut self, f: Binary, x: usize, y: usize) -> usize {
        use formula::{Binary as B, Unary as U};
        let b = &mut self.builder;
        match f {
            Binary::Add => b.binary(B::Add, x, y),
            Binary::Sub => b.binary(B::Sub, x, y),
            Binary::Mul => b.binary(B::Mul, x, y),
            Binary::Div => b.binary(B::Div, x, y),
            Binary::Min => b.binary(B::Min, x, y),
            Binary::Max => b.binary(B::Max, x, y),
            Binary::Less => b.binary(B::Less, x, y),
            Binary::LessEqual => b.binary(B::AtMost, x, y),
            Binary::Greater => b.binary(B::Less, y, x),
            Binary::GreaterEqual => b.binary(B::AtMost, y, x),
            Binary::Equal => b.binary(B::Equal, x, y),
            Binary::NotEqual => {
                let (one, equal) = (b.number(1.0), b.binary(B::Equal, x, y));
                b.binary(B::Sub, one, equal)
            }
            Binary::And => {
                let (x, y) = (b.truth(x), b.truth(y));
                b.binary(B::Mul, x, y)
            }
            Binary::Or => {
                let (x, y) = (b.truth(x), b.truth(y));
                b.binary(B::Max, x, y)
            }
            Binary::Mod => {
                let whole = b.binary(B::Div, x, y);
                let whole = b.unary(U::Floor, whole);
                let whole = b.binary(B::Mul, y, whole);
                b.binary(B::Sub, x, whole)
            }
        }
    }
}

/// `(1 + tanh(x / 2)) / 2`, which has a slope everywhere.
fn sigmoid(b: &mut Builder, x: usize) -> usize {
    use formula::{Binary as B, Unary as U};
    let (half, one) = (b.number(0.5), b.number(1.0));
    let x = b.binary(B::Mul, x, half);
    let t = b.unary(U::Tanh, x);
    let t = b.binary(B::Add, t, one);
    b.binary(B::Mul, t, half)
}

/// `max(0, x) + log(1 + exp(-|x|))`, whose parts have the slopes 1 and -1/2 at zero.
fn softplus(b: &mut Builder, x: usize) -> usize {
    use formula::{Binary as B, Unary as U};
    let (zero, one, size) = (b.number(0.0), b.number(1.0), b.unary(U::Abs, x));
    let size = b.unary(U::Neg, size);
    let small = b.unary(U::Exp, size);
    let small = b.binary(B::Add, one, small);
    let small = b.unary(U::Log, small);
    let above = b.binary(B::Max, zero, x);
    b.binary(B::Add, above, small)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dreamc_dsl::{Spelling, check, parse};

    /// The program of an `attend` in a definition, as text, and what it reads.
    fn shown(score: &str) -> (String, String, Vec<Read>) {
        let text = format!(
            "define f(heads 4, size 16) {{\n  \
               q = linear(x, [heads, size])\n  k = linear(x, [heads, size])\n  v = linear(x, [heads, size])\n  \
               f = running(log_sigmoid(linear(x, [heads])))\n  slope = exp(weight([heads], zero))\n  \
               T = weight([heads, far: 128], zero)\n  \
               return linear(attend(q, k, v, {score}) + 0 * f * slope * sum(T, over far), [hidden])\n}}\n\
             model m {{\n  vocab 256  hidden 64  context 128\n  f = f {{ heads 4 }}\n  repeat 2 {{ layer {{ f }} }}\n}}\n"
        );
        let ast = parse("m.dream", &text, Spelling::Dream).unwrap_or_else(|found| panic!("{found}"));
        let (spec, _) = check(&ast, &[]).unwrap_or_else(|found| panic!("{found}"));
        let Some(spec::Component::Defined(defined)) = spec.model.components.get("f") else { panic!("no f") };
        let graph = defined.graph(&spec.model).unwrap();
        for node in &graph.region.nodes {
            if let Of::Attend(attend) = &node.function {
                let (program, _) = program(&graph, &graph.region, node, attend).unwrap().unwrap();
                let of = |formula: &Option<formula::Formula>| {
                    formula.as_ref().map_or(String::new(), |formula| program.show(formula))
                };
                return (of(&program.score), of(&program.mask), program.reads.clone());
            }
        }
        panic!("no attention")
    }

    #[test]
    fn scores_and_masks_are_the_programs_that_they_say() {
        for (text, score, mask) in [
            ("score = s - slope * (i - j)", "sub(s, mul(x0[head], sub(i, j)))", ""),
            ("score = 30 * tanh(s / 30)", "mul(30, tanh(div(s, 30)))", ""),
            ("score = s + f[i] - f[j]", "sub(add(s, x0[i, head]), x1[j, head])", ""),
            ("score = s + T[head, clip(i - j, 0, 127)]", "add(s, x0[head, min(max(sub(i, j), 0), 127)])", ""),
            ("mask = i - j < 8 or j < 4", "", "max(less(sub(i, j), 8), less(j, 4))"),
            ("mask = i - j", "", "sub(1, equal(sub(i, j), 0))"),
            (
                "score = s - slope * (i - j), mask = f[j] > slope",
                "sub(s, mul(x0[head], sub(i, j)))",
                "less(x0[head], x1[j, head])",
            ),
        ] {
            let (found_score, found_mask, _) = shown(text);
            assert_eq!((found_score.as_str(), found_mask.as_str()), (score, mask), "{text}");
        }
    }
}

//! Definitions evaluated from their text: its typed graph, node after node, and recurrences token
//! after token.
//!
//! A value has a list of numbers for each token, or one list where it is the same for all. Which
//! side of a kink a number is on is a choice, which is held where a derivative is measured.

use super::*;
use dreamc_compiler::op::attention::{drawn, kept};
use dreamc_dsl::define::graph::{
    ABSENT, Attend, Binary, Choice, DimId, Fact, From as Begins, Function as Of, Graph, Measure, Node, Norm,
    Purpose, Recurrence, Reduce, Region, Turn, Unary, ValueId, WeightId,
};
use std::collections::HashMap;

/// A value: for each token, or once.
#[derive(Clone)]
pub(super) struct Value {
    dims: Vec<DimId>,
    each: Vec<Vec<f64>>,
}

impl Value {
    fn at(&self, token: usize) -> &[f64] {
        &self.each[if self.each.len() == 1 { 0 } else { token }]
    }

    /// A list for each of `tokens` tokens.
    fn spread(&self, tokens: usize) -> Value {
        Value { dims: self.dims.clone(), each: (0..tokens).map(|i| self.at(i).to_vec()).collect() }
    }
}

/// Numbers of one token with their dimensions.
#[derive(Clone, Copy)]
struct Numbers<'a> {
    dims: &'a [DimId],
    of: &'a [f64],
}

/// Sizes of dimensions.
struct Sizes<'g>(&'g Graph);

/// Places in dimensions.
type Places = HashMap<DimId, usize>;

impl Sizes<'_> {
    fn size(&self, dim: DimId) -> usize {
        self.0.size(dim) as usize
    }

    fn elements(&self, dims: &[DimId]) -> usize {
        dims.iter().map(|&dim| self.size(dim)).product()
    }

    /// Calls for every place of these dimensions, in order.
    fn each(&self, dims: &[DimId], mut f: impl FnMut(&Places)) {
        for at in 0..self.elements(dims) {
            let mut left = at;
            let mut places = Places::new();
            for &dim in dims.iter().rev() {
                places.insert(dim, left % self.size(dim));
                left /= self.size(dim);
            }
            f(&places);
        }
    }

    /// Which element of `dims` stands at places.
    fn at(&self, dims: &[DimId], places: &Places) -> usize {
        dims.iter().fold(0, |at, dim| at * self.size(*dim) + places[dim])
    }

    fn of(&self, x: Numbers, places: &Places) -> f64 {
        x.of[self.at(x.dims, places)]
    }

    /// The sum over dimensions of what a function gives, in the places of others.
    fn sums(&self, to: &[DimId], over: &[DimId], mut f: impl FnMut(&Places) -> f64) -> Vec<f64> {
        let mut out = vec![0.0; self.elements(to)];
        self.each(&[to, over].concat(), |places| out[self.at(to, places)] += f(places));
        out
    }
}

/// Choices that are held where a derivative is measured.
type Hold<'h> = &'h mut dyn FnMut(Vec<f64>) -> Vec<f64>;

fn truth(x: bool) -> f64 {
    f64::from(u8::from(x))
}

fn unary(f: Unary, x: &[f64], hold: Hold) -> Vec<f64> {
    let each = |f: &dyn Fn(f64) -> f64| x.iter().map(|x| f(*x)).collect::<Vec<f64>>();
    let softplus = |x: f64| lse(&[0.0, x]);
    match f {
        Unary::Neg => each(&|x| -x),
        Unary::Not => hold(each(&|x| truth(x == 0.0))),
        Unary::Exp => each(&f64::exp),
        Unary::Log => each(&f64::ln),
        Unary::Sqrt => each(&f64::sqrt),
        Unary::Rsqrt => each(&|x| 1.0 / x.sqrt()),
        Unary::Abs => {
            let signs = hold(each(&|x| truth(x > 0.0) - truth(x < 0.0)));
            x.iter().zip(signs).map(|(x, sign)| x * sign).collect()
        }
        Unary::Square => each(&|x| x * x),
        Unary::Sin => each(&f64::sin),
        Unary::Cos => each(&f64::cos),
        Unary::Tanh => each(&f64::tanh),
        Unary::Sigmoid => each(&sigmoid),
        Unary::Silu => each(&|x| x * sigmoid(x)),
        Unary::Gelu => each(&gelu),
        Unary::Relu | Unary::Relu2 => {
            let on = hold(each(&|x| truth(x > 0.0)));
            let above = x.iter().zip(on).map(|(x, on)| if on > 0.0 { *x } else { 0.0 });
            above.map(|x| if f == Unary::Relu { x } else { x * x }).collect()
        }
        Unary::Softplus => each(&softplus),
        Unary::LogSigmoid => each(&|x| -softplus(-x)),
        Unary::Floor => hold(each(&f64::floor)),
    }
}

fn binary(f: Binary, a: &[f64], b: &[f64], hold: Hold) -> Vec<f64> {
    let each = |f: &dyn Fn(f64, f64) -> f64| a.iter().zip(b).map(|(a, b)| f(*a, *b)).collect::<Vec<f64>>();
    let mut choice = |f: &dyn Fn(f64, f64) -> bool| hold(each(&|a, b| truth(f(a, b))));
    match f {
        Binary::Add => each(&|a, b| a + b),
        Binary::Sub => each(&|a, b| a - b),
        Binary::Mul => each(&|a, b| a * b),
        Binary::Div => each(&|a, b| a / b),
        Binary::Min | Binary::Max => {
            let first = if f == Binary::Min { choice(&|a, b| a < b) } else { choice(&|a, b| a > b) };
            let pairs = a.iter().zip(b).zip(first);
            pairs.map(|((a, b), first)| if first > 0.0 { *a } else { *b }).collect()
        }
        Binary::Less => choice(&|a, b| a < b),
        Binary::LessEqual => choice(&|a, b| a <= b),
        Binary::Greater => choice(&|a, b| a > b),
        Binary::GreaterEqual => choice(&|a, b| a >= b),
        Binary::Equal => choice(&|a, b| a == b),
        Binary::NotEqual => choice(&|a, b| a != b),
        Binary::And => choice(&|a, b| a != 0.0 && b != 0.0),
        Binary::Or => choice(&|a, b| a != 0.0 || b != 0.0),
        Binary::Mod => {
            let whole = hold(each(&|a, b| (a / b).floor()));
            a.iter().zip(b).zip(whole).map(|((a, b), whole)| a - b * whole).collect()
        }
    }
}

/// A function of one token: its numbers, from those of its operands.
fn function(g: &Sizes, node: &Node, x: &[Numbers], places_of: Option<DimId>, hold: Hold) -> Vec<f64> {
    let to = &node.ty.dims[..];
    let spread = |x: Numbers| {
        let mut out = vec![];
        g.each(to, |places| out.push(g.of(x, places)));
        out
    };
    match &node.function {
        Of::Number(number) => vec![*number],
        Of::Unary(f) => unary(*f, x[0].of, hold),
        Of::Binary(f) => binary(*f, &spread(x[0]), &spread(x[1]), hold),
        Of::Where => {
            let on = hold(x[0].of.iter().map(|c| truth(*c != 0.0)).collect());
            let on = spread(Numbers { of: &on, ..x[0] });
            let pairs = spread(x[1]).into_iter().zip(spread(x[2]));
            on.iter().zip(pairs).map(|(on, (a, b))| if *on > 0.0 { a } else { b }).collect()
        }
        Of::Outer => spread(x[0]).iter().zip(spread(x[1])).map(|(a, b)| a * b).collect(),
        Of::Reduce(how, over) => {
            let n = g.elements(over) as f64;
            match how {
                Reduce::Sum => g.sums(to, over, |places| g.of(x[0], places)),
                Reduce::Mean => g.sums(to, over, |places| g.of(x[0], places) / n),
                Reduce::Maximum => {
                    let mut most = vec![f64::NEG_INFINITY; g.elements(to)];
                    g.each(x[0].dims, |places| {
                        let most = &mut most[g.at(to, places)];
                        *most = most.max(g.of(x[0], places));
                    });
                    let mut here = vec![];
                    g.each(x[0].dims, |places| {
                        here.push(truth(g.of(x[0], places) == most[g.at(to, places)]));
                    });
                    let here = hold(here);
                    let here = Numbers { dims: x[0].dims, of: &here };
                    let sum = g.sums(to, over, |p| if g.of(here, p) > 0.0 { g.of(x[0], p) } else { 0.0 });
                    let count = g.sums(to, over, |p| g.of(here, p));
                    sum.iter().zip(count).map(|(sum, n)| sum / n).collect()
                }
            }
        }
        Of::Softmax(over) => {
            let rest: Vec<DimId> = x[0].dims.iter().copied().filter(|d| d != over).collect();
            let mut rows: Vec<Vec<f64>> = vec![vec![]; g.elements(&rest)];
            g.each(&[&rest[..], &[*over]].concat(), |p| rows[g.at(&rest, p)].push(g.of(x[0], p)));
            let all: Vec<f64> = rows.iter().map(|row| lse(row)).collect();
            let mut out = vec![];
            g.each(to, |p| out.push((g.of(x[0], p) - all[g.at(&rest, p)]).exp()));
            out
        }
        Of::Norm { how, over, eps } => {
            let rest: Vec<DimId> = x[0].dims.iter().copied().filter(|d| !over.contains(d)).collect();
            let n = g.elements(over) as f64;
            let mean = match how {
                Norm::Layer => g.sums(&rest, over, |p| g.of(x[0], p) / n),
                Norm::Rms | Norm::L2 => vec![0.0; g.elements(&rest)],
            };
            let from = |p: &Places| g.of(x[0], p) - mean[g.at(&rest, p)];
            let square = g.sums(&rest, over, |p| from(p).powi(2) / if *how == Norm::L2 { 1.0 } else { n });
            let mut out = vec![];
            g.each(to, |p| {
                let gain = x.get(1).map_or(1.0, |gain| g.of(*gain, p));
                out.push(from(p) / (square[g.at(&rest, p)] + eps).sqrt() * gain);
            });
            out
        }
        Of::Dot(over) => g.sums(to, over, |p| g.of(x[0], p) * g.of(x[1], p)),
        Of::Linear(over) => {
            let outs: Vec<DimId> = x[1].dims[..x[1].dims.len() - over.len()].to_vec();
            let width = g.elements(over);
            let mut out = vec![];
            g.each(to, |p| {
                let row = g.at(&outs, p) * width;
                let mut sum = x.get(2).map_or(0.0, |bias| g.of(*bias, p));
                let mut p = p.clone();
                let mut k = 0;
                g.each(over, |inner| {
                    p.extend(inner);
                    sum += x[1].of[row + k] * g.of(x[0], &p);
                    k += 1;
                });
                out.push(sum);
            });
            out
        }
        Of::Split(of, into) => {
            let mut out = vec![];
            g.each(to, |p| {
                let mut p = p.clone();
                p.insert(*of, g.at(into, &p));
                out.push(g.of(x[0], &p));
            });
            out
        }
        Of::Merge(of, into) => {
            let mut out = vec![];
            g.each(to, |p| {
                let (mut p, mut left) = (p.clone(), p[into]);
                for dim in of.iter().rev() {
                    p.insert(*dim, left % g.size(*dim));
                    left /= g.size(*dim);
                }
                out.push(g.of(x[0], &p));
            });
            out
        }
        Of::Join(along, parts) => {
            let mut out = vec![];
            g.each(to, |p| {
                let (mut k, mut place) = (0, p[along]);
                while place >= g.size(parts[k]) {
                    place -= g.size(parts[k]);
                    k += 1;
                }
                let mut p = p.clone();
                p.insert(parts[k], place);
                out.push(g.of(x[k], &p));
            });
            out
        }
        Of::Slice { of, from, to: part } => {
            let mut out = vec![];
            g.each(to, |p| {
                let mut p = p.clone();
                p.insert(*of, *from as usize + p[part]);
                out.push(g.of(x[0], &p));
            });
            out
        }
        Of::Top { over, choices } => {
            let rest: Vec<DimId> = to.iter().copied().filter(|d| d != choices).collect();
            let mut rows: Vec<Vec<f64>> = vec![vec![]; g.elements(&rest)];
            g.each(&[&rest[..], &[*over]].concat(), |p| rows[g.at(&rest, p)].push(g.of(x[0], p)));
            let best: Vec<Vec<usize>> = rows.iter().map(|row| largest_of(row, g.size(*choices))).collect();
            let mut out = vec![];
            g.each(to, |p| out.push(best[g.at(&rest, p)][p[choices]] as f64));
            hold(out)
        }
        Of::Pick => {
            let mut out = vec![];
            g.each(to, |p| {
                let mut p = p.clone();
                let chosen = g.of(x[1], &p) as usize;
                p.extend(places_of.map(|of| (of, chosen)));
                out.push(g.of(x[0], &p));
            });
            out
        }
        Of::Stop => hold(x[0].of.to_vec()),
        Of::Look(order) => {
            // The dimensions of the table, at the places that operands give.
            let mut out = vec![];
            g.each(to, |p| {
                let mut p = p.clone();
                for (dim, place) in x[0].dims.iter().zip(order) {
                    if let Some(operand) = place {
                        let place = g.of(x[*operand as usize], &p).max(0.0) as usize;
                        p.insert(*dim, place.min(g.size(*dim) - 1));
                    }
                }
                out.push(g.of(x[0], &p));
            });
            out
        }
        Of::Input
        | Of::Fact(_)
        | Of::Noise(_)
        | Of::Weight(_)
        | Of::Embedding
        | Of::Rope { .. }
        | Of::Shift(_)
        | Of::Conv(_)
        | Of::Running(_)
        | Of::Average { .. }
        | Of::Choose(_)
        | Of::Scores
        | Of::Attend(_)
        | Of::Mass
        | Of::Recurrence(_)
        | Of::Emitted(_)
        | Of::DepthAttend { .. }
        | Of::Earlier(_)
        | Of::ValueOf(..)
        | Of::Apply(_)
        | Of::Read(_)
        | Of::State(_)
        | Of::Score
        | Of::QueryPlace
        | Of::KeyPlace
        | Of::Head(_)
        | Of::AtQuery(_)
        | Of::AtKey(_) => vec![f64::NAN; g.elements(to)],
    }
}

/// Keys and values of an application, and which tokens have them.
pub(super) type Applied = (Value, Value, Vec<bool>);

/// A definition while it is evaluated.
struct Defining<'g> {
    name: &'g str,
    graph: &'g Graph,
    inside: &'g Inside,
    values: Vec<Value>,
    /// All results of recurrences.
    emitted: HashMap<ValueId, Vec<Value>>,
}

impl Defining<'_> {
    fn arg(&self, node: &Node, k: usize) -> &Value {
        &self.values[node.args[k].0 as usize]
    }
}

impl Formulas<'_> {
    /// The output of a defined component for every token.
    pub(super) fn defined(&mut self, name: &str, graph: &Graph, n: &[f64], inside: &Inside) -> Vec<f64> {
        let mut d = Defining { name, graph, inside, values: vec![], emitted: HashMap::new() };
        for (i, node) in graph.region.nodes.iter().enumerate() {
            let value = self.value(&mut d, node, ValueId(i as u32), n);
            d.values.push(value);
        }
        for node in graph.region.nodes.iter().filter(|n| n.name.is_some()) {
            let Some(named) = &node.name else { continue };
            let Some(id) = graph.value(named) else { continue };
            // A token that skips this application has the value of the one before.
            let mut value = d.values[id.0 as usize].spread(self.tokens());
            let key = (name.to_string(), named.clone());
            for i in (0..self.tokens()).filter(|&i| !inside.keys[i]) {
                value.each[i] = match self.named.get(&key) {
                    Some(before) => before.at(i).to_vec(),
                    None => vec![0.0; value.each[i].len()],
                };
            }
            self.named.insert(key, value);
        }
        let (tokens, h) = (self.tokens(), self.model.hidden as usize);
        for loss in graph.losses.iter().filter(|_| self.training) {
            let here: Vec<usize> = (0..tokens).filter(|&i| inside.here[i]).collect();
            let value = &d.values[loss.0 as usize];
            self.auxiliary += here.iter().map(|&i| value.at(i)[0]).sum::<f64>() / here.len() as f64;
        }
        match graph.region.results.first() {
            Some(result) => d.values[result.0 as usize].spread(tokens).each.concat(),
            None => vec![f64::NAN; tokens * h],
        }
    }

    /// Stops what components left for later applications and for others.
    pub(super) fn detach_definitions(&mut self, of: &dyn Fn(&str) -> bool) {
        let stopped = |this: &mut Self, value: &Value| {
            let width = value.each.first().map_or(0, Vec::len).max(1);
            let all = this.stop(value.each.concat());
            Value { dims: value.dims.clone(), each: all.chunks(width).map(<[f64]>::to_vec).collect() }
        };
        let named: Vec<(String, String)> = self.named.keys().filter(|(c, _)| of(c)).cloned().collect();
        for key in named {
            let value = self.named[&key].clone();
            self.named[&key] = stopped(self, &value);
        }
        let applied: Vec<(String, u32)> = self.applied.keys().filter(|(c, _)| of(c)).cloned().collect();
        for key in applied {
            let Some((k, v, keys)) = self.applied[&key].last().cloned() else { continue };
            let last = (stopped(self, &k), stopped(self, &v), keys);
            if let Some(place) = self.applied[&key].last_mut() {
                *place = last;
            }
        }
    }

    /// A weight of this application, with what its pass adds.
    fn weight_of(&self, d: &Defining, id: WeightId) -> Value {
        let weight = &d.graph.weights[id.0 as usize];
        let path = |to: &str| format!("{}.{}", d.name, weight.path.replacen("weight", to, 1));
        let numbers = match weight.purpose {
            Purpose::Matrix | Purpose::Output => {
                self.adapted(&path("weight"), [&path("lora_a"), &path("lora_b")])
            }
            Purpose::Bias | Purpose::Gain | Purpose::Filter | Purpose::Own => {
                self.own(&path("weight")).to_vec()
            }
        };
        Value { dims: weight.dims.clone(), each: vec![numbers] }
    }

    fn value(&mut self, d: &mut Defining, node: &Node, at: ValueId, n: &[f64]) -> Value {
        let (tokens, dims) = (self.tokens(), node.ty.dims.clone());
        let g = Sizes(d.graph);
        let each = |each: Vec<Vec<f64>>| Value { dims: dims.clone(), each };
        match &node.function {
            Of::Input => each(n.chunks(self.model.hidden as usize).map(<[f64]>::to_vec).collect()),
            Of::Fact(fact) => each(self.fact(*fact)),
            Of::Noise(deviation) => {
                let scaled = |row: &[f64]| row.iter().map(|x| x * deviation).collect();
                each(self.noise.chunks(self.model.hidden as usize).map(scaled).collect())
            }
            Of::Weight(id) => self.weight_of(d, *id),
            Of::Embedding => {
                let (table, width) = (d.arg(node, 0).at(0), g.elements(&dims));
                let ids = self.batch.ids.iter();
                each(ids.map(|&id| table[id as usize * width..][..width].to_vec()).collect())
            }
            Of::Rope { base, over, at } => {
                let x = d.arg(node, 0).spread(tokens);
                let turned = x.each.iter().enumerate().map(|(i, row)| {
                    let place = match at {
                        Turn::Position => f64::from(self.batch.positions[i]),
                        Turn::Depth => self.depth as f64,
                    };
                    turn(&g, Numbers { dims: &x.dims, of: row }, *over, *base, place)
                });
                each(turned.collect())
            }
            Of::Shift(by) => {
                let x = self.of_last(d.arg(node, 0));
                let zero = vec![0.0; g.elements(&dims)];
                let before = |i| self.before_of(i, &d.inside.keys).nth(*by as usize);
                each((0..tokens).map(|i| before(i).map_or(zero.clone(), |j| x.at(j).to_vec())).collect())
            }
            Of::Conv(width) => {
                let (x, w) = (self.of_last(d.arg(node, 0)), d.arg(node, 1));
                let bias = node.args.get(2).map(|_| d.arg(node, 2).clone());
                let rows = (0..tokens).map(|i| {
                    let mut out = vec![];
                    let before: Vec<usize> = self.before_of(i, &d.inside.keys).take(g.size(*width)).collect();
                    g.each(&dims, |p| {
                        let mut p = p.clone();
                        let add = |bias: &Value| g.of(Numbers { dims: &bias.dims, of: bias.at(i) }, &p);
                        let mut sum = bias.as_ref().map_or(0.0, add);
                        for (m, &j) in before.iter().enumerate() {
                            p.insert(*width, m);
                            let of_w = g.of(Numbers { dims: &w.dims, of: w.at(i) }, &p);
                            sum += of_w * g.of(Numbers { dims: &x.dims, of: x.at(j) }, &p);
                        }
                        out.push(sum);
                    });
                    out
                });
                each(rows.collect())
            }
            Of::Average { all } => {
                let x = d.arg(node, 0).spread(tokens);
                let mut rows: Vec<Vec<f64>> = vec![];
                for i in 0..tokens {
                    let (own, _) = self.place(i);
                    let same = |j: &usize| d.inside.here[*j] && (*all || self.place(*j).0 == own);
                    let those: Vec<usize> = (0..tokens).filter(same).collect();
                    let mean = |k| those.iter().map(|&j| x.at(j)[k]).sum::<f64>() / those.len() as f64;
                    rows.push((0..g.elements(&dims)).map(mean).collect());
                }
                each(rows)
            }
            Of::Running(block) => {
                let x = self.of_last(d.arg(node, 0));
                let number = |i: usize| block.map(|block| self.position(i) / block);
                let sum = |i: usize| {
                    let mut sum = vec![0.0; g.elements(&dims)];
                    let before = self.before_of(i, &d.inside.keys).filter(|&j| number(j) == number(i));
                    before.for_each(|j| add(&mut sum, x.at(j)));
                    sum
                };
                each((0..tokens).map(sum).collect())
            }
            Of::Choose(choice) => each(self.choose_blocks(d, node, choice)),
            Of::Scores => each(self.scores_of_chosen(d, node)),
            Of::Attend(a) => each(self.attend(d, node, a)),
            Of::Mass => each(self.mass_of_chosen(d, node)),
            Of::Recurrence(r) => {
                let results = self.recurrence(d, node, r, n);
                d.emitted.insert(at, results);
                each(vec![vec![]])
            }
            Of::Emitted(k) => d.emitted[&node.args[0]][*k as usize].clone(),
            Of::DepthAttend { scale, .. } => {
                let [q, k, v] = [0, 1, 2].map(|i| d.arg(node, i).spread(tokens));
                let key = (d.name.to_string(), at.0);
                let mut all = self.applied.get(&key).cloned().unwrap_or_default();
                all.push((k, v, d.inside.keys.clone()));
                self.applied.insert(key, all.clone());
                let rows = (0..tokens).map(|i| {
                    let seen: Vec<(&[f64], &[f64])> = all
                        .iter()
                        .filter(|(_, _, keys)| keys[i])
                        .map(|(k, v, _)| (k.at(i), v.at(i)))
                        .collect();
                    let kinds: [&[DimId]; 3] = [&q.dims, &all[0].0.dims, &all[0].1.dims];
                    mix(
                        &g,
                        &dims,
                        kinds,
                        q.at(i),
                        &seen,
                        (|_, _: &Places, s| scale * s, |_, _: &Places| 1.0),
                        |_| None,
                    )
                });
                each(rows.collect())
            }
            Of::Earlier(named) => match self.named.get(&(d.name.to_string(), named.clone())) {
                Some(value) => value.clone(),
                None => each(vec![vec![0.0; g.elements(&dims)]; tokens]),
            },
            Of::ValueOf(component, named) => match self.named.get(&(component.clone(), named.clone())) {
                // Dimensions of another graph, in the order of this one's.
                Some(value) => each(value.each.clone()),
                None => each(vec![vec![f64::NAN; g.elements(&dims)]]),
            },
            Of::Number(_)
            | Of::Unary(_)
            | Of::Binary(_)
            | Of::Where
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
            | Of::Stop => {
                let args: Vec<&Value> = node.args.iter().map(|a| &d.values[a.0 as usize]).collect();
                let of = node.args.get(1).and_then(|a| d.graph.region.node(*a).ty.places_of);
                let many = if args.iter().any(|x| x.each.len() > 1) { tokens } else { 1 };
                let row = |i: usize| {
                    let x: Vec<Numbers> =
                        args.iter().map(|x| Numbers { dims: &x.dims, of: x.at(i) }).collect();
                    function(&g, node, &x, of, &mut |held| self.stop(held))
                };
                each((0..many).map(row).collect())
            }
            Of::Apply(applied) => {
                let x = d.arg(node, 0).spread(tokens).each.concat();
                let name = format!("{}.{}", d.name, applied.path);
                let y = self.output_of(&name, &applied.component, &x, d.inside);
                each(y.chunks(self.model.hidden as usize).map(<[f64]>::to_vec).collect())
            }
            Of::Head(dim) => each(vec![(0..g.size(*dim)).map(|i| i as f64).collect()]),
            Of::Read(_)
            | Of::State(_)
            | Of::Score
            | Of::QueryPlace
            | Of::KeyPlace
            | Of::AtQuery(_)
            | Of::AtKey(_)
            | Of::Look(_) => each(vec![vec![f64::NAN; g.elements(&dims)]]),
        }
    }

    /// A value that later tokens read: of tokens that left their loop as their last pass made it.
    fn of_last(&mut self, x: &Value) -> Value {
        let mut x = x.spread(self.tokens());
        if let Some(before) = self.seen[0].get(self.seen[1].len()) {
            for i in (0..x.each.len()).filter(|&i| self.gone[i]) {
                x.each[i].clone_from(&before.each[i]);
            }
        }
        self.seen[1].push(x.clone());
        x
    }

    fn fact(&self, fact: Fact) -> Vec<Vec<f64>> {
        match fact {
            Fact::Depth => vec![vec![self.depth as f64]],
            Fact::Depths => vec![vec![self.depths as f64]],
            Fact::Position => self.batch.positions.iter().map(|p| vec![f64::from(*p)]).collect(),
            Fact::Pass => vec![vec![self.pass as f64]],
        }
    }

    /// The place of a token in its document.
    fn position(&self, i: usize) -> u64 {
        self.batch.positions[i].max(0) as u64
    }

    /// The token, and those before it in its document, the latest first, that take part.
    fn before_of<'s>(&'s self, i: usize, part: &'s [bool]) -> impl Iterator<Item = usize> + 's {
        (0..=i).rev().filter(move |&j| self.behind(i, j) && part[j])
    }

    /// All results of a recurrence at every token.
    fn recurrence(&mut self, d: &Defining, node: &Node, r: &Recurrence, n: &[f64]) -> Vec<Value> {
        let (tokens, g, h) = (self.tokens(), Sizes(d.graph), self.model.hidden as usize);
        let input = n.chunks(h).map(<[f64]>::to_vec).collect();
        let input = self.of_last(&Value { dims: vec![], each: input });
        let args: Vec<Value> = (0..node.args.len())
            .map(|k| match d.arg(node, k) {
                constant if constant.each.len() == 1 => constant.clone(),
                value => self.of_last(value),
            })
            .collect();
        let types: Vec<Vec<DimId>> =
            r.body.results.iter().map(|result| r.body.node(*result).ty.dims.clone()).collect();
        let mut results: Vec<Vec<Vec<f64>>> =
            types.iter().map(|dims| vec![vec![0.0; g.elements(dims)]; tokens]).collect();
        let initial = |i: usize| -> Vec<Vec<f64>> {
            let state = |s: &dreamc_dsl::define::graph::State| match s.from {
                Begins::Number(x) => vec![x; g.elements(&s.dims)],
                Begins::Operand(k) => {
                    let from = &args[k as usize];
                    let mut out = vec![];
                    g.each(&s.dims, |p| out.push(g.of(Numbers { dims: &from.dims, of: from.at(i) }, p)));
                    out
                }
            };
            r.states.iter().map(state).collect()
        };
        let mut left: HashMap<usize, Vec<Vec<f64>>> = HashMap::new();
        for i in (0..tokens).filter(|&i| d.inside.keys[i]) {
            let states = match self.before_of(i, &d.inside.keys).nth(1) {
                Some(before) => left.remove(&before).unwrap_or_else(|| initial(i)),
                None => initial(i),
            };
            let mut values: Vec<(Vec<DimId>, Vec<f64>)> = vec![];
            for inner in &r.body.nodes {
                let numbers = match &inner.function {
                    Of::State(k) => states[*k as usize].clone(),
                    Of::Read(k) => args[*k as usize].at(i).to_vec(),
                    Of::Weight(id) => self.weight_of(d, *id).each.concat(),
                    Of::Fact(fact) => {
                        let all = self.fact(*fact);
                        all[if all.len() == 1 { 0 } else { i }].clone()
                    }
                    Of::Noise(deviation) => self.noise[i * h..][..h].iter().map(|x| x * deviation).collect(),
                    Of::Input => input.at(i).to_vec(),
                    _ => {
                        let of = inner.args.get(1).and_then(|a| r.body.node(*a).ty.places_of);
                        let x: Vec<Numbers> = inner
                            .args
                            .iter()
                            .map(|a| &values[a.0 as usize])
                            .map(|(dims, of)| Numbers { dims, of })
                            .collect();
                        function(&g, inner, &x, of, &mut |held| self.stop(held))
                    }
                };
                let dims = match &inner.function {
                    Of::Read(k) => args[*k as usize].dims.clone(),
                    Of::Weight(id) => d.graph.weights[id.0 as usize].dims.clone(),
                    _ => inner.ty.dims.clone(),
                };
                values.push((dims, numbers));
            }
            let mut after = vec![];
            for (k, result) in r.body.results.iter().enumerate() {
                let (dims, of) = &values[result.0 as usize];
                results[k][i].clone_from(of);
                if let Some(state) = r.states.get(k) {
                    let mut ordered = vec![];
                    g.each(&state.dims, |p| ordered.push(g.of(Numbers { dims, of }, p)));
                    after.push(ordered);
                }
            }
            left.insert(i, after);
        }
        types.into_iter().zip(results).map(|(dims, each)| Value { dims, each }).collect()
    }

    /// The blocks of keys that each token reads.
    fn choose_blocks(&mut self, d: &Defining, node: &Node, choice: &Choice) -> Vec<Vec<f64>> {
        let (tokens, g) = (self.tokens(), Sizes(d.graph));
        let q = d.arg(node, 0).spread(tokens);
        let k = self.of_last(d.arg(node, 1));
        let weights = choice.weighed.then(|| d.arg(node, 2).clone());
        let Some((size, heads)) = q.dims.split_last() else { return vec![vec![]; tokens] };
        let lists: Vec<DimId> = node.ty.dims.iter().copied().filter(|dim| *dim != choice.choices).collect();
        let count = g.size(choice.choices);
        let mut rows = vec![];
        for i in 0..tokens {
            let own = self.position(i) / choice.block;
            let complete = |j: &usize| (self.position(*j) + 1).is_multiple_of(choice.block);
            let ends: Vec<usize> =
                (0..=i).filter(|&j| self.behind(i, j) && d.inside.keys[j]).filter(complete).collect();
            let mut scores = vec![vec![0.0; ends.len()]; g.elements(&lists)];
            g.each(heads, |p| {
                let product = |j: usize| {
                    let mut p = p.clone();
                    let mut sum = 0.0;
                    for e in 0..g.size(*size) {
                        p.insert(*size, e);
                        let key = grouped(&g, heads, &k.dims, *size, &p);
                        let of_k = g.of(Numbers { dims: &k.dims, of: k.at(j) }, &key);
                        sum += g.of(Numbers { dims: &q.dims, of: q.at(i) }, &p) * of_k;
                    }
                    choice.scale * sum
                };
                let mut terms: Vec<f64> = ends.iter().map(|&j| product(j)).collect();
                match choice.measure {
                    Measure::Products => {}
                    Measure::Relu => terms.iter_mut().for_each(|x| *x = x.max(0.0)),
                    Measure::Softmax => {
                        let most = terms.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                        let all: f64 = terms.iter().map(|x| (x - most).exp()).sum();
                        terms.iter_mut().for_each(|x| *x = (*x - most).exp() / all);
                    }
                }
                let of_head = |w: &Value| g.of(Numbers { dims: &w.dims, of: w.at(i) }, p);
                let weight = weights.as_ref().map_or(1.0, of_head);
                let list = &mut scores[g.at(&lists, p)];
                list.iter_mut().zip(terms).for_each(|(sum, term)| *sum += weight * term);
            });
            let mut row = vec![];
            for scores in scores {
                // Forced blocks are above all others: the nearest first, then the first ones.
                let mut ranked: Vec<(f64, f64, u64)> = vec![];
                for (&j, score) in ends.iter().zip(scores) {
                    ranked.push((0.0, score, self.position(j) / choice.block));
                }
                let near = (0..=own).rev().take(choice.near as usize);
                let forced: Vec<u64> = near.chain((0..=own).take(choice.first as usize)).collect();
                ranked.retain(|(_, _, block)| !forced.contains(block));
                for (place, block) in forced.iter().enumerate() {
                    if !forced[..place].contains(block) {
                        ranked.push((1.0, -(place as f64), *block));
                    }
                }
                ranked.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.total_cmp(&a.1)).then(a.2.cmp(&b.2)));
                let mut list: Vec<f64> =
                    ranked.iter().take(count).map(|(_, _, block)| *block as f64).collect();
                list.sort_by(f64::total_cmp);
                list.resize(count, -1.0);
                row.extend(list);
            }
            rows.extend(self.stop(row));
        }
        rows.chunks(g.elements(&node.ty.dims).max(1)).map(<[f64]>::to_vec).collect()
    }

    /// The scores of the tokens that each token chose.
    fn scores_of_chosen(&mut self, d: &Defining, node: &Node) -> Vec<Vec<f64>> {
        let (tokens, g) = (self.tokens(), Sizes(d.graph));
        let made = d.graph.region.node(node.args[0]);
        let Of::Choose(choice) = &made.function else { return vec![vec![]; tokens] };
        let (q, k) = (d.arg(made, 0).spread(tokens), self.of_last(d.arg(made, 1)));
        let weights = choice.weighed.then(|| d.arg(made, 2).clone());
        let Some((size, heads)) = q.dims.split_last() else { return vec![vec![]; tokens] };
        let mut rows = vec![];
        for i in 0..tokens {
            let chosen = d.arg(node, 0).at(i).to_vec();
            let key = |number: f64| {
                let is = |j: &usize| self.behind(i, *j) && self.position(*j) as f64 == number;
                (0..=i).filter(|&j| d.inside.keys[j]).find(is)
            };
            let keys: Vec<Option<usize>> = chosen.iter().map(|number| key(*number)).collect();
            // Products of each number of a list with the heads of the list.
            let mut products: Vec<(usize, f64, f64)> = vec![];
            g.each(heads, |p| {
                let mut p = p.clone();
                let weight =
                    weights.as_ref().map_or(1.0, |w| g.of(Numbers { dims: &w.dims, of: w.at(i) }, &p));
                for n in 0..g.size(choice.choices) {
                    p.insert(choice.choices, n);
                    let entry = g.at(&node.ty.dims, &p);
                    let Some(j) = keys[entry] else { continue };
                    let mut sum = 0.0;
                    for e in 0..g.size(*size) {
                        p.insert(*size, e);
                        let key = grouped(&g, heads, &k.dims, *size, &p);
                        let of_k = g.of(Numbers { dims: &k.dims, of: k.at(j) }, &key);
                        sum += g.of(Numbers { dims: &q.dims, of: q.at(i) }, &p) * of_k;
                    }
                    products.push((entry, weight, choice.scale * sum));
                }
            });
            let mut terms: Vec<f64> = products.iter().map(|(.., s)| *s).collect();
            if choice.measure == Measure::Relu {
                terms = self.relu(terms);
            }
            let mut row: Vec<f64> = keys.iter().map(|j| if j.is_some() { 0.0 } else { ABSENT }).collect();
            products.iter().zip(terms).for_each(|((entry, weight, _), term)| row[*entry] += weight * term);
            rows.push(row);
        }
        rows
    }

    /// How much an attention reads of each block that was chosen, all heads of a list together.
    fn mass_of_chosen(&mut self, d: &Defining, node: &Node) -> Vec<Vec<f64>> {
        let (tokens, g) = (self.tokens(), Sizes(d.graph));
        let read = d.graph.region.node(node.args[0]);
        let Of::Attend(a) = &read.function else { return vec![vec![]; tokens] };
        let Some((operand, block)) = a.among else { return vec![vec![]; tokens] };
        let (q, k) = (d.arg(read, 0).spread(tokens), self.of_last(d.arg(read, 1)));
        let chosen = d.arg(read, operand as usize);
        let (Some((size, heads)), Some(choices)) = (q.dims.split_last(), chosen.dims.last()) else {
            return vec![vec![]; tokens];
        };
        let mut rows = vec![];
        for i in 0..tokens {
            let near = |j: &usize| a.window.is_none_or(|w| ((i - j) as u64) < w);
            let end = |j: &usize| a.every.is_none_or(|every| (self.position(*j) + 1).is_multiple_of(every));
            let seen: Vec<usize> =
                (0..=i).filter(|&j| self.behind(i, j) && d.inside.keys[j]).filter(near).filter(end).collect();
            let mut row = vec![0.0; g.elements(&node.ty.dims)];
            g.each(heads, |p| {
                let list = list_of(&g, &chosen.dims, chosen.at(i), heads, p);
                let place = |j: usize| list.iter().position(|n| *n == (self.position(j) / block) as f64);
                let mut scores: Vec<(usize, f64)> = vec![];
                for &j in &seen {
                    let Some(n) = place(j) else { continue };
                    let (mut p, mut sum) = (p.clone(), 0.0);
                    for e in 0..g.size(*size) {
                        p.insert(*size, e);
                        let key = grouped(&g, heads, &k.dims, *size, &p);
                        let of_k = g.of(Numbers { dims: &k.dims, of: k.at(j) }, &key);
                        sum += g.of(Numbers { dims: &q.dims, of: q.at(i) }, &p) * of_k;
                    }
                    scores.push((n, a.scale * sum));
                }
                let most = scores.iter().map(|(_, s)| *s).fold(f64::NEG_INFINITY, f64::max);
                let all: f64 = scores.iter().map(|(_, s)| (s - most).exp()).sum();
                for (n, s) in scores {
                    let mut at = grouped(&g, heads, &chosen.dims, *choices, p);
                    at.insert(*choices, n);
                    row[g.at(&node.ty.dims, &at)] += (s - most).exp() / all;
                }
            });
            rows.push(self.stop(row));
        }
        rows
    }

    /// Attention over the tokens so far.
    fn attend(&mut self, d: &Defining, node: &Node, a: &Attend) -> Vec<Vec<f64>> {
        let (tokens, g) = (self.tokens(), Sizes(d.graph));
        let q = d.arg(node, 0).spread(tokens);
        let [k, v] = [1, 2].map(|i| self.of_last(d.arg(node, i)));
        let read: Vec<Value> = (0..node.args.len()).map(|i| self.of_last(d.arg(node, i))).collect();
        let heads = &q.dims[..q.dims.len() - 1];
        let drops = Drops::new(self, d, node, a);
        let rows = (0..tokens).map(|i| {
            let near = |j: &usize| a.window.is_none_or(|w| ((i - j) as u64) < w);
            let end = |j: &usize| a.every.is_none_or(|every| (self.position(*j) + 1).is_multiple_of(every));
            let seen: Vec<usize> =
                (0..=i).filter(|&j| self.behind(i, j) && d.inside.keys[j]).filter(near).filter(end).collect();
            let pairs: Vec<(&[f64], &[f64])> = seen.iter().map(|&j| (k.at(j), v.at(j))).collect();
            let pair = |region: &Region, j: usize, p: &Places, s: f64| {
                let place = |i: usize| self.place(i).1 as f64;
                let mut values: Vec<(Vec<DimId>, Vec<f64>)> = vec![];
                for inner in &region.nodes {
                    let numbers = match &inner.function {
                        Of::Score => vec![s],
                        Of::QueryPlace => vec![place(i)],
                        Of::KeyPlace => vec![place(j)],
                        Of::Head(dim) => vec![p[dim] as f64],
                        Of::AtQuery(k) => d.arg(node, *k as usize).at(i).to_vec(),
                        Of::AtKey(k) => read[*k as usize].at(j).to_vec(),
                        Of::Read(k) => d.arg(node, *k as usize).at(i).to_vec(),
                        Of::Weight(id) => self.weight_of(d, *id).each.concat(),
                        _ => {
                            let mut x: Vec<Numbers> = inner
                                .args
                                .iter()
                                .map(|a| &values[a.0 as usize])
                                .map(|(dims, of)| Numbers { dims, of })
                                .collect();
                            // One head: its dimensions are gone.
                            let mut inner = inner.clone();
                            inner.ty.dims.retain(|dim| !heads.contains(dim));
                            let of_head;
                            if let Of::Look(order) = &mut inner.function {
                                of_head = row_of_head(&g, x[0], order, heads, p);
                                x[0] = Numbers { dims: &of_head.0, of: &of_head.1 };
                            }
                            function(&g, &inner, &x, None, &mut |held| held)
                        }
                    };
                    let dims = match &inner.function {
                        Of::AtQuery(k) | Of::AtKey(k) | Of::Read(k) => d.arg(node, *k as usize).dims.clone(),
                        Of::Weight(id) => d.graph.weights[id.0 as usize].dims.clone(),
                        _ => vec![],
                    };
                    // The element of this head.
                    let left: Vec<DimId> = dims.iter().copied().filter(|dim| !heads.contains(dim)).collect();
                    let looked = matches!(
                        region.nodes.iter().find(|n| matches!(n.function, Of::Look(_))),
                        Some(look) if look.args.first() == Some(&ValueId(values.len() as u32))
                    );
                    if looked || left.len() == dims.len() {
                        values.push((dims, numbers));
                    } else {
                        let mut own = vec![];
                        g.each(&left, |inner| {
                            let mut all = p.clone();
                            all.extend(inner);
                            own.push(g.of(Numbers { dims: &dims, of: &numbers }, &all));
                        });
                        values.push((left, own));
                    }
                }
                values[region.results[0].0 as usize].1[0]
            };
            let kinds: [&[DimId]; 3] = [&q.dims, &k.dims, &v.dims];
            let sink = a.sink.map(|k| d.arg(node, k as usize).clone());
            let mut hidden: Vec<(usize, Places)> = vec![];
            let score = |at: usize, p: &Places, product: f64| {
                let s = a.scale * product;
                let j = seen[at];
                if let Some(mask) = &a.mask
                    && pair(mask, j, p, s) == 0.0
                {
                    hidden.push((j, p.clone()));
                    return f64::NEG_INFINITY;
                }
                if let Some((operand, block)) = a.among {
                    let (chosen, own) = (d.arg(node, operand as usize), self.position(j) / block);
                    let list = list_of(&g, &chosen.dims, chosen.at(i), heads, p);
                    if !list.contains(&(own as f64)) {
                        return f64::NEG_INFINITY;
                    }
                }
                a.score.as_ref().map_or(s, |score| pair(score, j, p, s))
            };
            let factor =
                |at: usize, p: &Places| drops.as_ref().map_or(1.0, |d| d.factor(&g, [i, seen[at]], p));
            let sink =
                |p: &Places| sink.as_ref().map(|sink| g.of(Numbers { dims: &sink.dims, of: sink.at(i) }, p));
            mix(&g, &node.ty.dims, kinds, q.at(i), &pairs, (score, factor), sink)
        });
        rows.collect()
    }
}

/// The places of a head of keys that the head `p` of queries reads.
fn grouped(g: &Sizes, heads: &[DimId], of_keys: &[DimId], size: DimId, p: &Places) -> Places {
    let mut p = p.clone();
    let groups: Vec<DimId> = of_keys.iter().copied().filter(|dim| *dim != size).collect();
    if let ([all], [group]) = (heads, &groups[..])
        && !p.contains_key(group)
    {
        let each = (g.size(*all) / g.size(*group)).max(1);
        p.insert(*group, p[all] / each);
    }
    p
}

/// The numbers of the blocks that a head of a token reads.
fn list_of(g: &Sizes, dims: &[DimId], row: &[f64], heads: &[DimId], p: &Places) -> Vec<f64> {
    let Some(choices) = dims.last() else { return vec![] };
    let mut p = grouped(g, heads, dims, *choices, p);
    let number = |n: usize| {
        p.insert(*choices, n);
        g.of(Numbers { dims, of: row }, &p)
    };
    (0..g.size(*choices)).map(number).collect()
}

/// Weights that an attention drops in training: each of a pair and a head with a probability, and
/// what it keeps is as much greater.
struct Drops {
    share: f64,
    /// Dimensions of heads, those that keys have first.
    order: Vec<DimId>,
    /// A random number of every query.
    draws: Vec<i32>,
    /// The number of every token among those of its sequence that there are.
    numbers: Vec<usize>,
}

impl Drops {
    fn new(f: &mut Formulas, d: &Defining, node: &Node, a: &Attend) -> Option<Drops> {
        if a.dropout == 0.0 || !f.training {
            return None;
        }
        let (q, k) = (&d.arg(node, 0).dims, &d.arg(node, 1).dims);
        let (size, heads) = q.split_last()?;
        let groups = k.iter().filter(|dim| *dim != size);
        let shared: Vec<DimId> = groups.copied().filter(|dim| heads.contains(dim)).collect();
        let rest = heads.iter().copied().filter(|dim| !shared.contains(dim));
        let (application, number) = (f.depth as u64, f.dropping);
        f.dropping += 1;
        let draws = f.draws.iter().map(|&x| drawn(x, application, number)).collect();
        let here = &d.inside.here;
        let before = |i: usize| (i - f.place(i).1..i).filter(|&j| here[j]).count();
        let numbers = (0..f.tokens()).map(before).collect();
        Some(Drops { share: a.dropout, order: shared.iter().copied().chain(rest).collect(), draws, numbers })
    }

    /// The factor of a weight.
    fn factor(&self, g: &Sizes, [query, key]: [usize; 2], head: &Places) -> f64 {
        let keeps = kept(
            self.draws[query],
            g.at(&self.order, head),
            self.numbers[key],
            (self.share * 2f64.powi(32)) as u32,
        );
        if keeps { 1.0 / (1.0 - self.share) } else { 0.0 }
    }
}

/// The part of a table that belongs to one head, where it is not looked up at that dimension;
/// `order` keeps the places of the dimensions that are left.
fn row_of_head(
    g: &Sizes,
    table: Numbers,
    order: &mut Vec<Option<u32>>,
    heads: &[DimId],
    head: &Places,
) -> (Vec<DimId>, Vec<f64>) {
    let mut looked = vec![];
    let left: Vec<DimId> = table
        .dims
        .iter()
        .zip(order.iter())
        .filter_map(|(dim, place)| {
            let stays = place.is_some() || !heads.contains(dim);
            looked.extend(stays.then_some(*place));
            stays.then_some(*dim)
        })
        .collect();
    *order = looked;
    let mut of = vec![];
    g.each(&left, |inner| {
        let mut all = head.clone();
        all.extend(inner);
        of.push(g.of(table, &all));
    });
    (left, of)
}

/// Pairs `(i, i + size / 2)` of a dimension turned by `place · base^(-2i / size)`.
fn turn(g: &Sizes, x: Numbers, over: DimId, base: f64, place: f64) -> Vec<f64> {
    let size = g.size(over);
    let mut out = vec![];
    g.each(x.dims, |p| {
        let i = p[&over];
        let (pair, second) = (i % (size / 2), i >= size / 2);
        let of = |place: usize| {
            let mut p = p.clone();
            p.insert(over, place);
            g.of(x, &p)
        };
        let (sin, cos) = (place * base.powf(-2.0 * pair as f64 / size as f64)).sin_cos();
        let (a, b) = (of(pair), of(pair + size / 2));
        out.push(if second { b * cos + a * sin } else { a * cos - b * sin });
    });
    out
}

/// `Σ p v` of every head, `p` the softmax of scores, one more logit among them where there is a
/// sink; zero where nothing is seen. `score` is given the number of the pair, the place of the
/// head, and the product of query and key; `factor` of the weight the number and the place.
fn mix(
    g: &Sizes,
    to: &[DimId],
    [of_q, of_k, of_v]: [&[DimId]; 3],
    q: &[f64],
    seen: &[(&[f64], &[f64])],
    (mut score, factor): (impl FnMut(usize, &Places, f64) -> f64, impl Fn(usize, &Places) -> f64),
    sink: impl Fn(&Places) -> Option<f64>,
) -> Vec<f64> {
    let Some((&size, heads)) = of_q.split_last() else { return vec![] };
    let groups: Vec<DimId> = of_k.iter().copied().filter(|d| *d != size).collect();
    let value = of_v.iter().copied().find(|d| !groups.contains(d));
    let mut out = vec![0.0; g.elements(to)];
    g.each(heads, |head| {
        let mut head = head.clone();
        // Groups of queries share a head of keys.
        if let ([heads], [group]) = (heads, &groups[..])
            && heads != group
        {
            head.insert(*group, head[heads] / (g.size(*heads) / g.size(*group)));
        }
        let mut scores = vec![];
        for (at, (k, _)) in seen.iter().enumerate() {
            let mut product = 0.0;
            g.each(&[size], |p| {
                let mut p = p.clone();
                p.extend(&head);
                product += g.of(Numbers { dims: of_q, of: q }, &p) * g.of(Numbers { dims: of_k, of: k }, &p);
            });
            scores.push(score(at, &head, product));
        }
        let all = lse(&[&scores[..], sink(&head).as_slice()].concat());
        let there = scores.iter().zip(seen).enumerate().filter(|(_, (s, _))| **s > f64::NEG_INFINITY);
        for (at, (s, (_, v))) in there {
            let weight = (s - all).exp() * factor(at, &head);
            g.each(value.as_slice(), |p| {
                let mut p = p.clone();
                p.extend(&head);
                out[g.at(to, &p)] += weight * g.of(Numbers { dims: of_v, of: v }, &p);
            });
        }
    });
    out
}

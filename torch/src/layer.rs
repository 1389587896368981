//! The classes of a layer: one for each component, and one that wires them.

use crate::TorchError;
use crate::body::{Body, Call, Method, What, live, read_in, state_name};
use crate::classes::{attribute, declared, path};
use crate::scope::{Item, Names, identifier, statements};
use crate::shape::Varies;
use crate::tree::{Expr, Stmt, lines};
use dreamc_compiler::architecture::Architecture;
use dreamc_compiler::ir::{Binding, Dim, Dims, Function, Lifetime, Op, Port, Value};
use dreamc_compiler::lower::{Lowered, Weight, skip};
use std::collections::HashSet;
use std::ops::Range;

/// A model that is written.
pub struct Source<'a> {
    pub architecture: &'a Architecture,
    pub lowered: &'a Lowered,
    /// The same for a batch of another size.
    pub other: &'a Lowered,
    pub varies: Varies<'a>,
    pub capacities: Vec<f64>,
}

impl Source<'_> {
    /// The variable of a state: what a pass leaves is what the next one reads, and tokens that a
    /// `skip` processed are those of its layer.
    pub fn handed(&self, name: &str, leader: Option<usize>) -> String {
        let members = self.lowered.facts.states.get(name).filter(|state| state.part == skip::part::MEMBERS);
        match (name, members, leader) {
            ("exit.next", ..) => state_name("exit.left"),
            (_, Some(state), Some(leader)) => {
                let label = self.architecture.label(state.owner);
                state_name(&format!("{}.{label}.members", self.architecture.bodies[leader].name))
            }
            (name, ..) => state_name(name),
        }
    }

    /// A function lowered for a batch of another size.
    pub fn other_of(&self, name: &str) -> Option<(&dreamc_compiler::ir::Module, &Function)> {
        self.other.module.functions.get(name).map(|f| (&self.other.module, f))
    }

    /// The dimensions of the stream.
    pub fn stream(&self) -> Dims {
        let dims = &self.lowered.module.dims;
        let number = |name: &&str| dims.get_index_of(*name).map(|k| Dim(k as u32));
        ["batch", "seq", "hidden"].iter().filter_map(number).collect()
    }

    /// The first words of the names of the tensors of a body's first set; none where it has none.
    pub fn prefix(&self, leader: usize) -> Option<String> {
        self.architecture.prefixes().find(|(_, (body, _))| *body == leader).map(|(prefix, _)| prefix)
    }
}

/// A class of the module.
#[derive(Clone, Debug)]
pub struct Class {
    /// Its name.
    pub name: String,
    /// Its documentation.
    pub doc: String,
    /// The statements of `__init__` after the first.
    pub init: Vec<Stmt>,
    /// Its methods: name, arguments, statements.
    pub methods: Vec<(String, Vec<String>, Vec<Stmt>)>,
}

impl Class {
    /// Its text.
    pub fn text(&self) -> String {
        let mut out = format!("class {}(nn.Module):\n", self.name);
        if !self.doc.is_empty() {
            out.push_str(&docstring(&self.doc));
        }
        if !self.init.is_empty() {
            out.push_str("    def __init__(self):\n        super().__init__()\n");
            lines(&self.init, 8, &mut out);
            out.push('\n');
        }
        for (name, args, body) in &self.methods {
            let head = format!("    def {name}({}):\n", args.join(", "));
            match head.chars().count() > crate::tree::WIDTH {
                true => out.push_str(&format!("    def {name}(\n        {}\n    ):\n", args.join(", "))),
                false => out.push_str(&head),
            }
            lines(body, 8, &mut out);
            out.push('\n');
        }
        out.trim_end().to_string() + "\n"
    }
}

/// A docstring of a class, in lines that fit.
fn docstring(text: &str) -> String {
    let text = text.replace('\\', "\\\\").replace("\"\"\"", "'''");
    let mut out: Vec<String> = vec![];
    for line in text.trim().lines() {
        let indent: String = line.chars().take_while(|c| *c == ' ').collect();
        let mut own = indent.clone();
        for word in line.split_whitespace() {
            if own.chars().count() + word.chars().count() > 92 {
                out.push(std::mem::replace(&mut own, indent.clone()));
            }
            own.push_str(if own.trim().is_empty() { "" } else { " " });
            own.push_str(word);
        }
        out.push(own);
    }
    let end = if out.len() > 1 { "\n    " } else { "" };
    let each: Vec<String> =
        out.iter().map(|l| if l.is_empty() { String::new() } else { format!("    {l}") }).collect();
    format!("    \"\"\"{}{end}\"\"\"\n\n", each.join("\n").trim())
}

/// An argument of a method, and the value of the function that it is.
#[derive(Clone, Debug)]
pub struct Argument {
    /// Its name.
    pub name: String,
    /// The parameter; none is the number of a pass whose weights are read.
    pub value: Option<Value>,
}

/// The method of a body, for the model that calls it.
pub struct Calls {
    /// Its parameters, in order.
    pub args: Vec<(String, Port)>,
    /// Numbers of passes or turns that weights are found by.
    pub numbers: Vec<(String, Binding)>,
    /// Its results.
    pub results: Vec<Port>,
    /// Its name; none is a call of the class.
    pub method: Option<String>,
}

/// Results that a body is asked for: counts of choices and observations are left.
pub fn wanted(f: &Function) -> Vec<(Port, Value)> {
    let left = |p: &Port| !matches!(p.binding, Binding::State(Lifetime::Set) | Binding::Observed);
    let mut all: Vec<(Port, Value)> = f.results.iter().filter(|(p, _)| left(p)).cloned().collect();
    // The stream first, then losses, then states.
    all.sort_by_key(|(p, _)| match p.binding {
        Binding::Stream => 0,
        binding if binding.is_state() => 2,
        Binding::Value
        | Binding::Batch(_)
        | Binding::Weight
        | Binding::PassWeight
        | Binding::TurnWeight
        | Binding::Buffer
        | Binding::Prepared
        | Binding::State(_)
        | Binding::Saved
        | Binding::Index(_)
        | Binding::Output(_)
        | Binding::Observed
        | Binding::Patched
        | Binding::Cotangent(_) => 1,
    });
    all
}

/// The name of a number that weights of passes are found by.
fn number(binding: Binding) -> Option<&'static str> {
    match binding {
        Binding::PassWeight => Some("this_pass"),
        Binding::TurnWeight => Some("turn"),
        Binding::Value
        | Binding::Stream
        | Binding::Batch(_)
        | Binding::Weight
        | Binding::Buffer
        | Binding::Prepared
        | Binding::State(_)
        | Binding::Saved
        | Binding::Index(_)
        | Binding::Output(_)
        | Binding::Observed
        | Binding::Patched
        | Binding::Cotangent(_) => None,
    }
}

/// The body of a method that is being written.
struct Writing<'a> {
    source: &'a Source<'a>,
    body: usize,
    f: &'a Function,
    live: Vec<bool>,
    /// The parts of the function that something needs, outermost only.
    parts: Vec<(Range<usize>, String)>,
}

/// The classes of a leader: of its components, of its layer, and how its bodies are called.
type Classes = (Vec<Class>, Class, Vec<(usize, Calls)>);

/// A method's text: names of its arguments, statements, results.
type Written = (Vec<String>, Vec<Stmt>, Vec<Expr>);

/// The classes of the components and of the layer of a leader, and how its bodies are called.
pub fn classes(source: &Source, leader: usize) -> Result<Classes, TorchError> {
    let bodies: Vec<usize> =
        (0..source.architecture.bodies.len()).filter(|&b| source.architecture.leader(b) == leader).collect();
    let weights = &source.lowered.weights[leader];
    let title = capitalised(&source.architecture.bodies[leader].name);
    let mut layer = Class { name: title, doc: doc_of(source, leader), init: vec![], methods: vec![] };
    let mut parts: Vec<Class> = vec![];
    let mut names: Vec<String> = vec![];
    let mut calls = vec![];
    for &body in &bodies {
        let writing = Writing::new(source, body);
        for (range, part) in &writing.parts {
            let k = names.iter().position(|n| n == part).unwrap_or_else(|| {
                names.push(part.clone());
                parts.push(part_class(source, weights, part));
                names.len() - 1
            });
            let method = writing.method(body == leader);
            let (args, stmts) = writing.part(range, part)?;
            parts[k].methods.push((method, args, stmts));
        }
        let (call, args, stmts) = writing.layer(body == leader)?;
        layer.methods.push((writing.method(body == leader), args, stmts));
        calls.push((body, call));
    }
    for (part, class) in names.iter().zip(&parts) {
        layer.init.push(Stmt::Assign(
            vec![path(part).text()],
            Expr::call(&class.name, vec![]),
            String::new(),
        ));
    }
    let own: Vec<(String, &Weight)> = weights
        .iter()
        .filter(|w| !names.iter().any(|part| inside(&w.name, part).is_some()))
        .map(|w| (w.name.clone(), w))
        .collect();
    layer.init.extend(declared(&own, &source.lowered.module));
    Ok((parts, layer, calls))
}

/// The name of a tensor inside a part.
fn inside<'n>(name: &'n str, part: &str) -> Option<&'n str> {
    name.strip_prefix(part)?.strip_prefix('.')
}

fn part_class(source: &Source, weights: &[Weight], part: &str) -> Class {
    let own: Vec<(String, &Weight)> =
        weights.iter().filter_map(|w| inside(&w.name, part).map(|name| (name.to_string(), w))).collect();
    Class {
        name: capitalised(part),
        doc: crate::docs::of_component(source.architecture, part),
        init: declared(&own, &source.lowered.module),
        methods: vec![],
    }
}

fn doc_of(source: &Source, body: usize) -> String {
    crate::docs::of_body(source.architecture, body)
}

/// `GatedDelta` of `gated_delta`.
pub fn capitalised(name: &str) -> String {
    let words = name.split(|c: char| !c.is_alphanumeric()).filter(|w| !w.is_empty());
    let word = |w: &str| {
        let mut chars = w.chars();
        chars.next().map_or(String::new(), |c| c.to_uppercase().collect::<String>() + chars.as_str())
    };
    let name = words.map(word).collect::<String>();
    match name.as_str() {
        "Model" | "Weight" | "F" | "None" | "True" | "False" => name + "Part",
        name if name.starts_with(|c: char| c.is_numeric()) => format!("Part{name}"),
        name => name.into(),
    }
}

impl<'a> Writing<'a> {
    fn new(source: &'a Source<'a>, body: usize) -> Self {
        let f = &source.lowered.module.functions[&source.architecture.bodies[body].name];
        let values: Vec<Value> = wanted(f).iter().map(|(_, v)| *v).collect();
        let live = live(f, &values, None);
        let marks = &source.lowered.facts.marks[&f.name];
        let mut parts: Vec<(Range<usize>, String)> = vec![];
        for (range, name) in &marks.parts {
            if range.clone().any(|n| live[n]) && !parts.iter().any(|(r, _)| r.contains(&range.start)) {
                parts.push((range.clone(), name.clone()));
            }
        }
        Writing { source, body, f, live, parts }
    }

    fn method(&self, leads: bool) -> String {
        if leads { "forward".into() } else { format!("forward_{}", self.f.name) }
    }

    fn alive(&self, range: Range<usize>) -> impl Iterator<Item = usize> + '_ {
        range.filter(|&n| self.live[n])
    }

    /// Values that nodes of a range read from outside it, in order, and those that it gives.
    fn ends(&self, range: &Range<usize>) -> (Vec<Value>, Vec<Value>) {
        let own: HashSet<Value> = self.alive(range.clone()).flat_map(|n| self.f.nodes[n].results()).collect();
        let mut reads = vec![];
        for v in self.alive(range.clone()).flat_map(|n| &self.f.nodes[n].inputs) {
            if !own.contains(v) && !reads.contains(v) {
                reads.push(*v);
            }
        }
        let outside = self.alive(0..self.f.nodes.len()).filter(|n| !range.contains(n));
        let values: Vec<Value> = wanted(self.f).iter().map(|(_, v)| *v).collect();
        let read = read_in(self.f, outside, &values);
        let mut gives: Vec<Value> = own.into_iter().filter(|v| read.contains(v)).collect();
        gives.sort();
        (reads, gives)
    }

    /// The text of a tensor where it is an attribute of the class of `part`, or of the layer.
    fn tensor(&self, v: Value, part: Option<&str>) -> Option<Expr> {
        let port = self.f.params.get(v.index())?;
        let held = matches!(
            port.binding,
            Binding::Weight | Binding::PassWeight | Binding::TurnWeight | Binding::Buffer
        );
        if !held || self.source.lowered.foreign[self.body].iter().any(|w| w.name == port.name) {
            return None;
        }
        let name = match part {
            Some(part) => inside(&port.name, part)?,
            None => &port.name,
        };
        let mut at = path(name);
        if let Some(number) = number(port.binding) {
            at = at.index(number);
        }
        // A pass that differs from the first may read the first rows alone.
        let leader = self.source.architecture.leader(self.body);
        let whole = self.source.lowered.weights[leader].iter().find(|w| w.name == port.name)?;
        let dims = &self.f.ty(v).dims;
        if whole.dims != *dims {
            at = at.index(format!(":{}", self.source.lowered.module.size(*dims.first()?)));
        }
        Some(at)
    }

    /// The names of the arguments of a method that reads these values, and the numbers of passes.
    fn arguments(&self, reads: &[Value], part: Option<&str>) -> (Vec<Argument>, Vec<(String, Binding)>) {
        let mut args: Vec<Argument> = vec![];
        let mut numbers: Vec<(String, Binding)> = vec![];
        for &v in reads {
            let port = self.f.params.get(v.index());
            if let (Some(port), Some(_)) = (port, self.tensor(v, part)) {
                if let Some(name) = number(port.binding)
                    && !numbers.iter().any(|(n, _)| n == name)
                {
                    numbers.push((name.into(), port.binding));
                }
                continue;
            }
            let marks = &self.source.lowered.facts.marks[&self.f.name];
            let name = match port {
                Some(port) => {
                    state_name(part.and_then(|part| inside(&port.name, part)).unwrap_or(&port.name))
                }
                None => match marks.names.get(&v) {
                    Some(name) => identifier(name),
                    None if self.f.ty(v).dims.len() == 3 && args.iter().all(|a| a.name != "x") => "x".into(),
                    None => match self.f.nodes.iter().find(|n| n.results().any(|r| r == v)).map(|n| &n.op) {
                        Some(Op::TopTokens(_)) => "index".into(),
                        Some(Op::Decide(_) | Op::KeepInts(_)) => "places".into(),
                        Some(_) | None => "given".into(),
                    },
                },
            };
            let mut own = name.clone();
            let mut n = 1;
            while args.iter().any(|a| a.name == own) {
                n += 1;
                own = format!("{name}{n}");
            }
            args.push(Argument { name: own, value: Some(v) });
        }
        let rank = |a: &Argument| {
            let port = a.value.and_then(|v| self.f.params.get(v.index()));
            match port.map(|p| p.binding) {
                _ if a.name == "x" => 0,
                None => 1,
                Some(Binding::Stream) => 0,
                Some(b) if b.is_state() => 2,
                Some(Binding::Batch(_)) => 3,
                Some(_) => 4,
            }
        };
        args.sort_by_key(rank);
        (args, numbers)
    }

    /// Statements of items, with their arguments' names.
    fn written(
        &self,
        items: &[Item<What>],
        (args, numbers): (&[Argument], &[(String, Binding)]),
        reads: &[Value],
        part: Option<&str>,
        results: &[Value],
    ) -> Result<Written, TorchError> {
        let mut params: Vec<(Value, Expr)> =
            args.iter().filter_map(|a| a.value.map(|v| (v, Expr::name(a.name.clone())))).collect();
        params.extend(reads.iter().filter_map(|&v| self.tensor(v, part).map(|e| (v, e))));
        let ty = |v: Value| self.f.types.get(v.index());
        let floats =
            |a: &&Argument| a.value.and_then(ty).is_some_and(|ty| ty.dtype.is_float() && ty.dims.len() > 1);
        let like = args.iter().find(floats).or(args.first());
        let none = Argument { name: "x".into(), value: None };
        let like = like.unwrap_or(&none);
        let dims = like.value.and_then(ty).map_or_else(|| self.source.stream(), |ty| ty.dims.clone());
        let other = self.source.other_of(&self.f.name);
        let there = match (other, like.value) {
            (Some((_, f)), Some(v)) => f.types.get(v.index()).map_or_else(Dims::new, |ty| ty.dims.clone()),
            _ => dims.clone(),
        };
        // Tokens that are put back among all of a sequence: some argument has all.
        let puts = items.iter().any(|i| match i.what {
            What::Node(n) => match &self.f.nodes[n].op {
                Op::PutTokens(_) => true,
                Op::Zeros(z) => z.0.iter().any(|d| (self.source.varies)(*d) && !dims.contains(d)),
                _ => false,
            },
            What::Call(_) => false,
        });
        let whole: Vec<&Argument> = args
            .iter()
            .filter(|a| puts && a.value.and_then(ty).is_some_and(|ty| ty.dims.len() > 1))
            .collect();
        let sized: Vec<(String, Dims)> =
            whole.iter().filter_map(|a| Some((a.name.clone(), a.value.and_then(ty)?.dims.clone()))).collect();
        let body = Body {
            module: &self.source.lowered.module,
            f: self.f,
            marks: &self.source.lowered.facts.marks[&self.f.name],
            varies: self.source.varies,
            like: (&like.name, &dims),
            capacities: &self.source.capacities,
            other: self.source.other_of(&self.f.name),
            like_there: &there,
            sized: &sized,
        };
        let mut names = Names::default();
        for (name, _) in numbers {
            names.take(name);
        }
        // Zeros get the device and type of an argument, whose name stays its own.
        let kept = whole.iter().filter_map(|a| a.value);
        let all: Vec<Value> = results.iter().copied().chain(like.value).chain(kept).collect();
        let (stmts, mut values) = statements(items, &params, names, &all, &mut Method { body: &body })?;
        values.truncate(results.len());
        let mut list = vec!["self".to_string()];
        list.extend(args.iter().map(|a| a.name.clone()));
        list.extend(numbers.iter().map(|(name, _)| name.clone()));
        Ok((list, stmts, values))
    }

    /// The method of a part.
    fn part(&self, range: &Range<usize>, part: &str) -> Result<(Vec<String>, Vec<Stmt>), TorchError> {
        let (reads, gives) = self.ends(range);
        let (args, numbers) = self.arguments(&reads, Some(part));
        let read = read_in(self.f, self.alive(range.clone()), &gives);
        let body = self.plain();
        let items = body.items(self.alive(range.clone()), &read);
        let (list, mut stmts, values) =
            self.written(&items, (&args, &numbers), &reads, Some(part), &gives)?;
        stmts.push(Stmt::Return(values));
        Ok((list, stmts))
    }

    fn plain(&self) -> Body<'_> {
        Body {
            module: &self.source.lowered.module,
            f: self.f,
            marks: &self.source.lowered.facts.marks[&self.f.name],
            varies: self.source.varies,
            like: ("x", &[]),
            capacities: &self.source.capacities,
            other: None,
            like_there: &[],
            sized: &[],
        }
    }

    /// The method of the layer, which calls those of its parts.
    fn layer(&self, leads: bool) -> Result<(Calls, Vec<String>, Vec<Stmt>), TorchError> {
        let returned = wanted(self.f);
        let results: Vec<Value> = returned.iter().map(|(_, v)| *v).collect();
        let all = read_in(self.f, self.alive(0..self.f.nodes.len()), &results);
        let body = self.plain();
        let mut items: Vec<Item<What>> = vec![];
        let mut at = 0;
        let mut numbers: Vec<(String, Binding)> = vec![];
        let end = self.f.nodes.len();
        for (range, part) in self.parts.iter().cloned().chain([(end..end, String::new())]) {
            items.extend(body.items(self.alive(at..range.start), &all));
            at = range.end;
            if range.is_empty() {
                continue;
            }
            let (reads, gives) = self.ends(&range);
            let (args, more) = self.arguments(&reads, Some(&part));
            let mut args: Vec<Value> = args.iter().filter_map(|a| a.value).collect();
            for (name, binding) in more {
                // The number stands as a parameter of a value that nothing else has.
                if !numbers.iter().any(|(n, _)| *n == name) {
                    numbers.push((name.clone(), binding));
                }
                args.push(self.number_value(binding));
            }
            let gives = gives.into_iter().map(Some).collect();
            let method = (!leads).then(|| self.method(false));
            items.push(Item {
                reads: args,
                gives,
                what: What::Call(Call { part: attribute(&part), method }),
            });
        }
        let stream = self.f.params.iter().position(|p| p.binding == Binding::Stream);
        let mut reads: Vec<Value> = stream.map(|k| Value(k as u32)).into_iter().collect();
        for v in items.iter().flat_map(|i| &i.reads).chain(&results) {
            if v.index() < self.f.params.len() && !reads.contains(v) {
                reads.push(*v);
            }
        }
        let (mut args, more) = self.arguments(&reads, None);
        if stream.is_none() {
            args.insert(0, Argument { name: "x".into(), value: None });
        }
        for (name, binding) in more {
            if !numbers.iter().any(|(n, _)| *n == name) {
                numbers.push((name, binding));
            }
        }
        let mut all_args = args.clone();
        all_args.extend(
            numbers
                .iter()
                .map(|(name, b)| Argument { name: name.clone(), value: Some(self.number_value(*b)) }),
        );
        let (list, mut stmts, values) = self.layer_written(&items, &args, &numbers, &reads, &results)?;
        stmts.push(Stmt::Return(values));
        let port = |a: &Argument| match a.value {
            Some(v) => (a.name.clone(), self.f.params[v.index()].clone()),
            None => (a.name.clone(), Port::new("x", Binding::Stream)),
        };
        let call = Calls {
            args: args.iter().map(port).collect(),
            numbers,
            results: returned.into_iter().map(|(p, _)| p).collect(),
            method: (!leads).then(|| self.method(false)),
        };
        Ok((call, list, stmts))
    }

    fn layer_written(
        &self,
        items: &[Item<What>],
        args: &[Argument],
        numbers: &[(String, Binding)],
        reads: &[Value],
        results: &[Value],
    ) -> Result<Written, TorchError> {
        let mut all = args.to_vec();
        all.extend(
            numbers
                .iter()
                .map(|(name, b)| Argument { name: name.clone(), value: Some(self.number_value(*b)) }),
        );
        self.written(items, (&all, &[]), reads, None, results)
    }

    /// A value that stands for the number of a pass, beyond those of the function.
    fn number_value(&self, binding: Binding) -> Value {
        Value(u32::MAX - u32::from(binding == Binding::TurnWeight))
    }
}

//! The class of the whole model: its loops, and the values that applications hand on.

use crate::TorchError;
use crate::body::{Body, Method, live, read_in};
use crate::classes::{declared, path};
use crate::layer::{Calls, Class, Source, capitalised};
use crate::scope::{Names, statements};
use crate::shape::{integer, listed, zeros};
use crate::tree::{Expr, Stmt};
use dreamc_compiler::architecture::{Apply, Block, continues, run_of};
use dreamc_compiler::bind::Owner;
use dreamc_compiler::ir::{Binding, Function, Index, Input, Lifetime, Output, Port, Value};
use dreamc_compiler::lower::{EMBED, HEAD, POOL, Weight, skip};
use dreamc_compiler::program::Affine;
use dreamc_compiler::wiring::attend;
use std::collections::BTreeMap;

/// Names of loop variables, from the outermost.
const VARIABLES: [&str; 8] = ["i", "j", "k", "l", "m", "n", "o", "p"];

/// Writes the model.
pub struct Writer<'a> {
    pub source: &'a Source<'a>,
    /// How each body is called.
    pub calls: BTreeMap<usize, Calls>,
}

impl Writer<'_> {
    /// Its class.
    pub fn class(&self) -> Result<Class, TorchError> {
        let model = &self.source.architecture.model;
        let mut methods = vec![("forward".to_string(), self.arguments(), self.forward()?)];
        methods.push(self.head("logits", &[Output::Logits], None)?);
        methods.push(self.head("loss", &[Output::Loss], Some(Output::Logits))?);
        if self.source.lowered.module.functions.contains_key(POOL) {
            methods.push(self.pool()?);
        }
        methods.push(generate());
        Ok(Class {
            name: "Model".into(),
            doc: format!("The model `{}`.", model.name),
            init: self.init(),
            methods,
        })
    }

    fn arguments(&self) -> Vec<String> {
        let all = ["self", "ids", "targets=None", "positions=None", "segments=None", "noise=None"];
        all.iter()
            .filter(|a| **a != "noise=None" || self.reads(Input::Noise))
            .map(|a| a.to_string())
            .collect()
    }

    /// Whether some function reads an input of the host.
    fn reads(&self, input: Input) -> bool {
        let functions = self.source.lowered.module.functions.values();
        functions.into_iter().any(|f| f.param_of(Binding::Batch(input)).is_some())
    }

    /// Tensors outside the layers, and lists of layers.
    fn init(&self) -> Vec<Stmt> {
        let own: Vec<(String, &Weight)> =
            self.source.lowered.globals.iter().map(|w| (w.name.clone(), w)).collect();
        let mut stmts = declared(&own, &self.source.lowered.module);
        let mut lists: BTreeMap<String, Vec<(String, usize)>> = BTreeMap::new();
        for (prefix, (body, _)) in self.source.architecture.prefixes() {
            let (list, number) = prefix.split_once('.').unwrap_or((&prefix, ""));
            // Bodies of one loop are one class.
            if lists
                .get(list)
                .is_some_and(|known: &Vec<(String, usize)>| known.iter().any(|(n, _)| n == number))
            {
                continue;
            }
            lists.entry(list.into()).or_default().push((number.into(), body));
        }
        for (list, each) in lists {
            let class = |body: usize| capitalised(&self.source.architecture.bodies[body].name);
            let value = match list.as_str() {
                "layers" => {
                    let made: Vec<String> =
                        each.iter().map(|(_, body)| format!("{}()", class(*body))).collect();
                    let same = made.iter().all(|m| *m == made[0]);
                    match same && made.len() > 2 {
                        true => format!("nn.ModuleList({} for _ in range({}))", made[0], made.len()),
                        false => format!("nn.ModuleList([{}])", made.join(", ")),
                    }
                }
                _ => {
                    let made: Vec<String> =
                        each.iter().map(|(n, body)| format!("\"{n}\": {}()", class(*body))).collect();
                    format!("nn.ModuleDict({{{}}})", made.join(", "))
                }
            };
            stmts.push(Stmt::Assign(vec![format!("self.{list}")], Expr::name(value), String::new()));
        }
        for (k, body) in self.source.architecture.bodies.iter().enumerate() {
            if self.source.architecture.leader(k) == k && self.source.prefix(k).is_none() {
                let value = Expr::call(&capitalised(&body.name), vec![]);
                stmts.push(Stmt::Assign(vec![format!("self.{}", body.name)], value, String::new()));
            }
        }
        stmts
    }

    fn forward(&self) -> Result<Vec<Stmt>, TorchError> {
        let line = |text: &str| Stmt::Line(text.to_string());
        let mut out = vec![line("batch, seq = ids.shape")];
        if self.reads(Input::Positions) {
            out.push(Stmt::Block(
                "if positions is None".into(),
                vec![line("positions = torch.arange(seq, device=ids.device).expand(batch, seq)")],
            ));
        }
        if self.reads(Input::Segments) {
            out.push(Stmt::Block(
                "if segments is None".into(),
                vec![line("segments = torch.zeros_like(ids)")],
            ));
        }
        if self.reads(Input::Noise) {
            let hidden = self.source.architecture.model.hidden;
            let make = format!("noise = torch.randn(batch, seq, {hidden}, device=ids.device)");
            out.push(Stmt::Block("if noise is None".into(), vec![line(&make)]));
        }
        let (embed, x) = self.outside(EMBED, &[Output::Logits], None)?;
        out.extend(embed);
        out.push(Stmt::Assign(vec!["x".into()], x[0].clone(), String::new()));
        out.retain(|s| !matches!(s, Stmt::Assign(to, x, _) if to.len() == 1 && x.text() == to[0]));
        out.extend(self.states(&out));
        // The losses of passes are of tokens that have targets.
        let early = self
            .calls
            .values()
            .flat_map(|c| &c.args)
            .any(|(_, p)| p.binding == Binding::Batch(Input::Targets));
        if early {
            out.push(Stmt::Block(
                "if targets is None".into(),
                vec![line("targets = torch.full_like(ids, -1)")],
            ));
            out.push(line("loss_scale = 1 / (targets >= 0).sum().clamp(min=1)"));
        }
        out.push(line("extra = 0.0"));
        self.blocks(&self.source.architecture.blocks, &mut out)?;
        if self.source.lowered.module.functions.contains_key(POOL) {
            out.push(Stmt::Line(format!("extra = extra + self.pool({})", self.pool_args().join(", "))));
        }
        let used = format!("{out:?}").contains("extra + ");
        if !used {
            out.retain(|s| *s != line("extra = 0.0"));
        }
        let head = self.head_args(&[Output::Logits], None);
        out.push(Stmt::Line(format!("logits = self.logits({})", head.join(", "))));
        if early {
            out.push(Stmt::Block("if not (targets >= 0).any()".into(), vec![line("return logits")]));
        } else {
            out.push(Stmt::Block("if targets is None".into(), vec![line("return logits")]));
            out.push(line("loss_scale = 1 / (targets >= 0).sum().clamp(min=1)"));
        }
        let head = self.head_args(&[Output::Loss], Some(Output::Logits));
        let extra = if used { " + extra" } else { "" };
        out.push(Stmt::Line(format!("return logits, self.loss({}){extra}", head.join(", "))));
        Ok(out)
    }

    /// States before the first application.
    fn states(&self, _: &[Stmt]) -> Vec<Stmt> {
        let mut made: BTreeMap<String, Stmt> = BTreeMap::new();
        let module = &self.source.lowered.module;
        let names = ["batch", "seq"];
        let size = |d: dreamc_compiler::ir::Dim| match names.iter().find(|name| **name == module.name(d)) {
            Some(name) => name.to_string(),
            None => module.size(d).to_string(),
        };
        for (body, calls) in &self.calls {
            let f = self.function(*body);
            for (_, port) in calls.args.iter().filter(|(_, p)| p.binding.is_state()) {
                let name = self.source.handed(&port.name, Some(self.source.architecture.leader(*body)));
                let Some(v) = f.find_param(&port.name) else { continue };
                let ty = f.ty(v);
                let value = zeros("x", &ty.dims, &size);
                let value = if ty.dtype.is_float() { value } else { value.method("long", vec![]) };
                let value = match self.copies(&port.name, self.source.architecture.leader(*body)) {
                    0 | 1 => value,
                    n => Expr::name(format!("[{} for _ in range({n})]", value.text())),
                };
                made.entry(name.clone())
                    .or_insert_with(|| Stmt::Assign(vec![name], value, listed(&ty.dims, module)));
            }
        }
        made.into_values().collect()
    }

    /// How many variables a state has: tokens that a part processed are of one set of weights, and
    /// its next pass chooses among them.
    fn copies(&self, name: &str, leader: usize) -> usize {
        let state = self.source.lowered.facts.states.get(name);
        match state.is_some_and(|state| state.part == skip::part::MEMBERS) {
            true => self.source.architecture.prefixes().filter(|(_, (body, _))| *body == leader).count(),
            false => 1,
        }
    }

    /// Where an application reads and leaves a state.
    fn place(&self, name: &str, apply: &Apply) -> String {
        let leader = self.source.architecture.leader(apply.body);
        let variable = self.source.handed(name, Some(leader));
        match self.copies(name, leader) > 1 {
            true => format!("{variable}[{}]", affine(&apply.set).text()),
            false => variable,
        }
    }

    fn function(&self, body: usize) -> &Function {
        &self.source.lowered.module.functions[&self.source.architecture.bodies[body].name]
    }

    fn blocks(&self, blocks: &[Block], out: &mut Vec<Stmt>) -> Result<(), TorchError> {
        for block in blocks {
            match block {
                Block::Apply(apply) => self.apply(apply, out)?,
                Block::Loop { variable, count, blocks, detached: _ } => {
                    let mut body = vec![];
                    self.blocks(blocks, &mut body)?;
                    out.push(Stmt::Block(
                        format!("for {} in range({count})", variable_name(*variable)),
                        body,
                    ));
                }
            }
        }
        Ok(())
    }

    fn apply(&self, apply: &Apply, out: &mut Vec<Stmt>) -> Result<(), TorchError> {
        let calls = &self.calls[&apply.body];
        let mut args = vec![];
        for (name, port) in &calls.args {
            args.push(match port.binding {
                Binding::Stream => Expr::name("x"),
                Binding::State(_) => Expr::name(self.place(&port.name, apply)),
                Binding::Batch(input) => Expr::name(input.name()),
                Binding::Index(index) => self.index(index, Some(apply))?,
                Binding::Weight | Binding::Buffer => path(&port.name),
                _ => return Err(TorchError::Argument(name.clone())),
            });
        }
        for (_, binding) in &calls.numbers {
            let number = if *binding == Binding::TurnWeight { &apply.turn } else { &apply.pass };
            args.push(affine(number));
        }
        let layer = self.layer(apply);
        let call = match &calls.method {
            None => Expr::Call(Box::new(layer), args),
            Some(method) => layer.method(method, args),
        };
        let mut after = vec![];
        let targets = calls.results.iter().map(|port| match port.binding {
            Binding::Stream => "x".to_string(),
            Binding::Output(output) => {
                let more = if apply.detached { ".detach()" } else { "" };
                after.push(Stmt::Line(format!("extra = extra + {}{more}", output.name())));
                output.name().to_string()
            }
            _ => self.place(&port.name, apply),
        });
        let targets: Vec<String> = targets.collect();
        out.push(Stmt::Assign(targets, call, String::new()));
        out.extend(after);
        if apply.detached {
            self.detach(apply, calls, out);
        }
        Ok(())
    }

    /// Ends gradients of what an application leaves.
    fn detach(&self, apply: &Apply, calls: &Calls, out: &mut Vec<Stmt>) {
        out.push(Stmt::Line("x = x.detach()".into()));
        for port in calls.results.iter().filter(|p| p.binding.is_state()) {
            let name = self.place(&port.name, apply);
            let state = self.source.lowered.facts.states.get(&port.name);
            let whole = port.binding == Binding::State(Lifetime::Saved)
                || state.is_some_and(|s| s.part == attend::part::SOURCES);
            let cache = state.and_then(|s| self.source.architecture.cache_of(s.owner));
            let text = match cache.filter(|_| !whole) {
                None => format!("{name} = {name}.detach()"),
                Some(cache) if state.is_some_and(|s| s.owner == Owner::Depths) => {
                    // One after another, all that the application left.
                    let body = &self.source.architecture.bodies[apply.body];
                    let rows = (1..=body.depths(&self.source.architecture.model)).map(|by| {
                        let row = apply.rows[cache].clone().plus(&Affine::constant(by));
                        affine(&row).text()
                    });
                    let written = rows
                        .fold(name.clone(), |of, row| format!("write({of}, {name}[{row}].detach(), {row})"));
                    format!("{name} = {written}")
                }
                Some(cache) => {
                    let before = state.map_or(0, |state| state.part.rows_before());
                    let row = apply.rows[cache].clone().plus(&Affine::constant(before));
                    let row = affine(&row).text();
                    format!("{name} = write({name}, {name}[{row}].detach(), {row})")
                }
            };
            out.push(Stmt::Line(text));
        }
    }

    /// The module of an application's set of weights.
    fn layer(&self, apply: &Apply) -> Expr {
        let architecture = self.source.architecture;
        let leader = architecture.leader(apply.body);
        let Some(prefix) = self.source.prefix(leader) else {
            return Expr::name("self").attribute(&architecture.bodies[leader].name);
        };
        let own: Vec<(String, u64)> = architecture
            .prefixes()
            .filter(|(_, (body, _))| *body == leader)
            .map(|(prefix, (_, set))| (prefix, set))
            .collect();
        let list = prefix.split_once('.').map_or("layers", |(list, _)| list);
        let mut numbers: Vec<(u64, u64)> =
            own.iter().filter_map(|(p, set)| Some((*set, p.rsplit_once('.')?.1.parse().ok()?))).collect();
        numbers.sort_unstable();
        let places: Vec<u64> = numbers.iter().map(|(_, n)| *n).collect();
        let step = if places.len() > 1 { places[1].saturating_sub(places[0]) } else { 1 };
        let even = places.windows(2).all(|w| w[1] == w[0] + step);
        let at = match even {
            true => {
                let first = Affine::constant(places.first().copied().unwrap_or(0));
                affine(&apply.set.times(step).plus(&first)).text()
            }
            false => format!("{places:?}[{}]", affine(&apply.set).text()),
        };
        let at = match list {
            "layers" => at,
            _ if at.chars().all(|c| c.is_ascii_digit()) => format!("\"{at}\""),
            _ => format!("str({at})"),
        };
        Expr::name("self").attribute(list).index(at)
    }

    /// An integer that the loops supply.
    fn index(&self, index: Index, apply: Option<&Apply>) -> Result<Expr, TorchError> {
        let architecture = self.source.architecture;
        let row = |cache: u32| match apply {
            Some(apply) => apply.rows[cache as usize].clone(),
            None => Affine::constant(architecture.rows[cache as usize]),
        };
        let all = || Affine::constant(architecture.depth);
        Ok(match index {
            Index::Given => return Err(TorchError::Unsupported("an index that nothing gives")),
            Index::Depth => affine(&apply.map_or_else(all, |a| a.depth.clone())),
            Index::Depths => affine(&all()),
            Index::Pass => affine(&apply.map_or_else(Affine::default, |a| a.pass.clone())),
            Index::Row(cache) => affine(&row(cache)),
            Index::Latest(cache) => Expr::infix("-", affine(&row(cache)), integer(1)),
            Index::Next { cache, by } => affine(&row(cache).plus(&Affine::constant(by.into()))),
            Index::First => integer(0),
            Index::FirstPass { cache, by } => {
                let pass = apply.map_or_else(Affine::default, |a| a.pass.times(by.into()));
                let first = row(cache).minus(&pass);
                affine(&first.ok_or(TorchError::Unsupported("a row before the first pass"))?)
            }
            Index::Run { cache, offset, block } => affine(&run_of(&row(cache), offset, block)),
            Index::Continues { cache, offset, block } => affine(&continues(&row(cache), offset, block)),
        })
    }

    /// The statements of a function outside the layers, whose results are these outputs; of the
    /// embedding it is the stream.
    fn outside(
        &self,
        name: &str,
        outputs: &[Output],
        given: Option<Output>,
    ) -> Result<(Vec<Stmt>, Vec<Expr>), TorchError> {
        let f = &self.source.lowered.module.functions[name];
        let (wanted, nodes, known) = self.pieces(f, outputs, given);
        let mut params: Vec<(Value, Expr)> = known.map(|v| (v, Expr::name("logits"))).into_iter().collect();
        for (k, port) in f.params.iter().enumerate() {
            let expr = match port.binding {
                Binding::Weight | Binding::Buffer => path(&port.name),
                Binding::Batch(input) => Expr::name(input.name()),
                Binding::Stream => Expr::name("x"),
                Binding::Index(index) => self.index(index, None)?,
                _ => Expr::name(self.source.handed(&port.name, None)),
            };
            params.push((Value(k as u32), expr));
        }
        let like =
            f.params.iter().position(|p| p.binding == Binding::Stream).map(|k| f.types[k].dims.clone());
        let dims = like.unwrap_or_default();
        let body = Body {
            module: &self.source.lowered.module,
            f,
            marks: &self.source.lowered.facts.marks.get(name).cloned().unwrap_or_default(),
            varies: self.source.varies,
            like: ("x", &dims),
            capacities: &[],
            other: self.source.other_of(name),
            like_there: &dims,
            sized: &[],
        };
        let items = body.items(nodes.iter().copied(), &read_in(f, nodes.iter().copied(), &wanted));
        statements(&items, &params, Names::default(), &wanted, &mut Method { body: &body })
    }

    /// Values that are wanted of a function, the nodes that make them, and a value that is known.
    fn pieces(
        &self,
        f: &Function,
        outputs: &[Output],
        given: Option<Output>,
    ) -> (Vec<Value>, Vec<usize>, Option<Value>) {
        let of = |output: Output| {
            f.results.iter().find(|(p, _)| p.binding == Binding::Output(output)).map(|(_, v)| *v)
        };
        let streams = f.results.iter().filter(|(p, _)| p.binding == Binding::Stream).map(|(_, v)| *v);
        let wanted: Vec<Value> = outputs.iter().filter_map(|o| of(*o)).chain(streams).collect();
        let known = given.and_then(of);
        let alive = live(f, &wanted, known);
        (wanted, (0..f.nodes.len()).filter(|&n| alive[n]).collect(), known)
    }

    /// The values that a method of the head reads, as the model calls it.
    fn head_args(&self, outputs: &[Output], given: Option<Output>) -> Vec<String> {
        let f = &self.source.lowered.module.functions[HEAD];
        let (wanted, nodes, known) = self.pieces(f, outputs, given);
        let read = read_in(f, nodes.iter().copied(), &wanted);
        let port = |p: &Port| match p.binding {
            Binding::Stream => Some("x".to_string()),
            Binding::Batch(input) => Some(input.name().to_string()),
            Binding::State(_) => Some(self.source.handed(&p.name, None)),
            _ => None,
        };
        let mut args: Vec<String> =
            known.filter(|v| read.contains(v)).map(|_| "logits".to_string()).into_iter().collect();
        let used = f.params.iter().enumerate().filter(|(k, _)| read.contains(&Value(*k as u32)));
        args.extend(used.filter_map(|(_, p)| port(p)));
        args
    }

    fn head(
        &self,
        name: &str,
        outputs: &[Output],
        given: Option<Output>,
    ) -> Result<(String, Vec<String>, Vec<Stmt>), TorchError> {
        let (mut stmts, values) = self.outside(HEAD, outputs, given)?;
        stmts.push(Stmt::Return(values));
        let args = std::iter::once("self".to_string()).chain(self.head_args(outputs, given)).collect();
        Ok((name.into(), args, stmts))
    }

    fn pool_args(&self) -> Vec<String> {
        let f = &self.source.lowered.module.functions[POOL];
        f.params.iter().map(|p| self.source.handed(&p.name, None)).collect()
    }

    /// The penalty of pooled thresholds.
    fn pool(&self) -> Result<(String, Vec<String>, Vec<Stmt>), TorchError> {
        let (mut stmts, values) = self.outside(POOL, &[Output::Aux], None)?;
        stmts.push(Stmt::Return(values));
        let args = std::iter::once("self".to_string()).chain(self.pool_args()).collect();
        Ok(("pool".into(), args, stmts))
    }
}

fn variable_name(variable: u32) -> String {
    VARIABLES.get(variable as usize).map_or_else(|| format!("i{variable}"), |name| name.to_string())
}

/// `2 + 3 * i`
fn affine(a: &Affine) -> Expr {
    let term = |&(variable, step): &(u32, u64)| match step {
        1 => Expr::name(variable_name(variable)),
        _ => Expr::infix("*", integer(step as i64), Expr::name(variable_name(variable))),
    };
    let base = (a.base > 0 || a.terms.iter().all(|t| t.1 == 0)).then(|| integer(a.base as i64));
    let terms = a.terms.iter().filter(|t| t.1 > 0).map(term);
    base.into_iter().chain(terms).reduce(|a, b| Expr::infix("+", a, b)).unwrap_or_else(|| integer(0))
}

/// Greedy continuation.
fn generate() -> (String, Vec<String>, Vec<Stmt>) {
    let line = |text: &str| Stmt::Line(text.to_string());
    let body = vec![
        line(
            "\"\"\"The likeliest continuation by so many tokens; every step reads the whole text again.\"\"\"",
        ),
        Stmt::Block(
            "for _ in range(tokens)".into(),
            vec![line("ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1)], 1)")],
        ),
        line("return ids"),
    ];
    ("generate".into(), vec!["self".into(), "ids".into(), "tokens".into()], body)
}

//! The classes of a model's layers, and the order in which layers are applied.
//!
//! *In*: the body of a model. *Out*: a Python class for each distinct layer, the constructor's
//! call for each set of weights, and the order of sets as a Python expression in which loops stay
//! loops. *Promise*: sets of weights and wrapped parts have the numbers that their tensors have.

use crate::{HfError, composition};
use dreamc_compiler::architecture::{readers, units};
use dreamc_dsl::spec::{
    CausalRule, Expr, Item, Kind, Known, Mixing, Model, NormGain, PassKeys, Scorer, Skip, SkipGate,
    SkipInput, SkipKv, SkipLevel, SkipRule, Statement, Stream, depth_choice, has_passes,
};
use std::collections::BTreeSet;
use std::fmt::Write;

/// Names that a module of PyTorch has itself.
const TAKEN: [&str; 20] = [
    "apply",
    "bfloat16",
    "buffers",
    "children",
    "compile",
    "cpu",
    "cuda",
    "double",
    "eval",
    "float",
    "forward",
    "half",
    "modules",
    "parameters",
    "skip",
    "slots",
    "to",
    "train",
    "training",
    "type",
];

/// Words of Python, which an attribute may have for its name and no line may spell.
const WORDS: [&str; 35] = [
    "False", "None", "True", "and", "as", "assert", "async", "await", "break", "class", "continue", "def",
    "del", "elif", "else", "except", "finally", "for", "from", "global", "if", "import", "in", "is",
    "lambda", "nonlocal", "not", "or", "pass", "raise", "return", "try", "while", "with", "yield",
];

/// The layers of a model.
pub struct Layers {
    /// A class for each distinct layer.
    pub classes: Vec<String>,
    /// Names of the classes.
    pub names: Vec<String>,
    /// The call that makes each set of weights.
    pub made: Vec<String>,
    /// Components that are used.
    pub components: BTreeSet<String>,
    /// Wrapped parts.
    pub skips: Vec<Skip>,
    /// Whether some layer is recurrent, so that projections may be mixtures.
    pub projected: bool,
    /// Whether no attention has a plain projection.
    pub all_projected: bool,
    /// Statements between layers, by number, each with how many layers are applied before it.
    pub statements: Vec<(Statement, u64)>,
    /// Loops that have weights of their own.
    pub loops: Vec<Loop>,
    /// The order of sets, with the outermost loop's count and without.
    orders: [String; 2],
}

/// A loop that has weights of its own.
#[derive(Clone)]
pub struct Loop {
    /// Its number among all loops.
    number: u64,
    /// Passes that it has weights for.
    passes: u64,
    /// Whether passes begin with a vector of their own.
    pub embed: bool,
    /// Whether passes have matrices of their own.
    pub lora: bool,
    /// Whether a gate shares out the loss among passes.
    pub gate: bool,
    /// Whether tokens may leave it by that.
    pub leaves: bool,
    /// The keys that passes use.
    pub kv: PassKeys,
    /// Whether a `skip` inside has weights or shares for each pass.
    pub skip_passes: bool,
    /// Whether passes choose among the tokens of the pass before.
    pub chooses: bool,
    /// How each token scores the numbers of passes among which it chooses.
    pub choice: Option<Scorer>,
}

impl Loop {
    /// Whether passes have weights of their own.
    pub fn has_passes(&self) -> bool {
        self.embed || self.lora || self.skip_passes || self.choice.is_some()
    }

    /// Whether passes use keys of the first.
    pub fn keys_of_first(&self) -> bool {
        !self.kv.is_own()
    }

    /// The entry that makes it.
    pub fn made(&self) -> String {
        let mut text = format!("{:?}: Loop(config, passes={}", self.number.to_string(), self.passes);
        let choice = self.choice.is_some();
        for (name, on) in [
            ("embed", self.embed),
            ("exit", self.gate),
            ("kv_first", self.keys_of_first()),
            ("choice", choice),
        ] {
            if on {
                let _ = write!(text, ", {name}=True");
            }
        }
        if self.kv == PassKeys::Replaced {
            text += ", kv_replaced=True";
        }
        text += &scores(&self.choice.unwrap_or(Scorer::PLAIN));
        text + ")"
    }
}

/// Whether passes choose among the tokens of the pass before.
fn nested(items: &[Item]) -> bool {
    items.iter().any(|item| match item {
        Item::Layer(expr) => expr.skips().iter().any(|(skip, _)| skip.nested),
        Item::Statement(_) => false,
        Item::Repeat { items, .. } | Item::Recur { items, .. } => nested(items),
    })
}

/// Whether the code lets tokens leave a loop: of one stream, where no token skips a part.
fn leaves(model: &Model) -> bool {
    fn skips(expr: &Expr) -> bool {
        match expr {
            Expr::Component(_) | Expr::Norm => false,
            Expr::Sequential(terms) | Expr::Parallel(terms) => terms.iter().any(skips),
            Expr::Skip(..) => true,
        }
    }
    fn any(items: &[Item]) -> bool {
        items.iter().any(|item| match item {
            Item::Layer(expr) => skips(expr),
            Item::Statement(_) => false,
            Item::Repeat { items, .. } | Item::Recur { items, .. } => any(items),
        })
    }
    model.stream == Stream::Sum && !any(&model.body)
}

/// A set of weights.
struct Set<'a> {
    expr: &'a Expr,
    around: Around,
}

/// The loops around a set of weights.
#[derive(Clone, Copy)]
struct Around {
    /// Whether there are some, and whether the stream is then normalised.
    recurrent: Option<bool>,
    /// How often they run it.
    times: u64,
    /// Passes that have matrices of their own, and the rank of these.
    lora: Option<(u64, u64)>,
}

impl Layers {
    /// Reads the body of a model.
    pub fn new(model: &Model) -> Result<Self, HfError> {
        let mut walk = Walk::default();
        let [fixed, free] = [false, true].map(|free| {
            walk = Walk { leaves: leaves(model), ..Walk::default() };
            walk.items(&model.body, Around { recurrent: None, times: 1, lora: None }, free)
        });
        let mut layers = Layers {
            classes: vec![],
            names: vec![],
            made: vec![],
            components: BTreeSet::new(),
            skips: vec![],
            projected: walk.sets.iter().any(|set| set.around.recurrent.is_some()),
            all_projected: true,
            statements: walk.statements.iter().map(|(s, depth)| ((*s).clone(), *depth)).collect(),
            loops: walk.loops.clone(),
            orders: [fixed, free],
        };
        let mut known: Vec<(&Expr, Option<bool>)> = vec![];
        for set in &walk.sets {
            let key = (set.expr, set.around.recurrent);
            let number = match known.iter().position(|k| *k == key) {
                Some(number) => number,
                None => {
                    known.push(key);
                    let name = format!("Layer{}", known.len() - 1);
                    layers.class(model, &name, set)?;
                    layers.names.push(name);
                    known.len() - 1
                }
            };
            let times = if set.around.recurrent.is_some() { set.around.times } else { 0 };
            let made = format!("Layer{number}(config, times={times})");
            layers.made.push(match set.around.lora {
                None => made,
                Some((passes, rank)) => format!("adapted({made}, passes={passes}, rank={rank})"),
            });
        }
        Ok(layers)
    }

    /// The order of sets of weights as a Python expression; `free` where the count of the outermost
    /// loop is the configuration's.
    pub fn order(&self, free: bool) -> String {
        self.orders[usize::from(free)].clone()
    }

    fn class(&mut self, model: &Model, name: &str, set: &Set) -> Result<(), HfError> {
        let mut emit = Emit::default();
        match model.stream {
            Stream::Sum => emit.apply(set.expr),
            Stream::Lanes { .. } => emit.lanes(set.expr),
            Stream::Attend { .. } => emit.attend(set.expr),
        }
        let (recurrent, reads) = (set.around.recurrent, matches!(model.stream, Stream::Attend { .. }));
        let mut text = format!("class {name}(nn.Module):\n    \"\"\"{}\"\"\"\n\n", composition(set.expr));
        // Writing to a String does not fail.
        let mut line = |line: String| {
            let _ = writeln!(text, "{line}");
        };
        line("    def __init__(self, config, times):\n        super().__init__()".into());
        let mut slots = vec![];
        for name in &emit.names {
            let numbered = |stem| name.strip_prefix(stem).is_some_and(|j| j.parse::<usize>().is_ok());
            let ours = name == "residual_norm" || numbered("norm") || numbered("lanes");
            if TAKEN.contains(&name.as_str()) || ours {
                return Err(HfError::Export(format!(
                    "the component `{name}` has a name that a module of PyTorch has itself, so that no class can have it"
                )));
            }
            let Some(component) = model.components.get(name) else { continue };
            let sequence = component.kind() == Kind::Sequence;
            let call = match component.known() {
                Known::Attention(a) => {
                    self.all_projected &= recurrent.is_some() && a.projection.is_some();
                    let over = if sequence { "Sequence" } else { "Depth" };
                    format!("{over}Attention(config, \"{name}\", times)")
                }
                Known::Experts(_) => format!("Experts(config, \"{name}\")"),
                Known::Mlp(_) => format!("Mlp(config, \"{name}\")"),
                Known::Own => {
                    let kind = component.kind().section().name;
                    return Err(HfError::Export(format!(
                        "packages have no `{kind}`, and `{name}` is one; `dreamc export torch` writes it as PyTorch"
                    )));
                }
            };
            if sequence {
                slots.push(format!("{}.slots", attribute(name)));
            }
            line(match WORDS.contains(&name.as_str()) {
                true => format!("        setattr(self, {name:?}, {call})"),
                false => format!("        self.{name} = {call}"),
            });
            if reads && emit.readers.contains(&attribute(name)) {
                line(format!("        {}.read = Read(config.hidden_size)", attribute(name)));
            }
            self.components.insert(name.clone());
        }
        if !emit.skips.is_empty() {
            line("        self.skip = nn.ModuleList([".into());
            for (number, skip) in emit.skips.iter().enumerate() {
                line(format!("            Skip(config, {}),", arguments(skip)));
                slots.push(format!("self.skip[{number}].slots()"));
                self.skips.push((*skip).clone());
            }
            line("        ])".into());
            for reader in emit.readers.iter().filter(|reader| reader.starts_with("self.skip[")) {
                line(format!("        {reader}.read = Read(config.hidden_size)"));
            }
        }
        for j in 0..emit.norms {
            line(format!("        self.norm{j} = Norm(config.hidden_size)"));
        }
        for j in 0..emit.lanes {
            line(format!("        self.lanes{j} = Lanes(config, times)"));
        }
        if recurrent == Some(true) {
            line("        self.residual_norm = Norm(config.hidden_size)".into());
        }
        let slots = if slots.is_empty() { "0".into() } else { slots.join(" + ") };
        line(format!("        self.slots = {slots}\n\n    def forward(self, x, at):"));
        emit.lines.iter().for_each(|code| line(format!("        {code}")));
        line(
            if recurrent == Some(true) { "        return self.residual_norm(x)" } else { "        return x" }
                .into(),
        );
        self.classes.push(text);
        Ok(())
    }
}

/// Which tokens a router chooses where each decides for itself, in the words of the code.
pub fn rule(rule: &SkipRule, least: f64) -> &'static str {
    match rule {
        SkipRule::Threshold { .. } => "threshold",
        SkipRule::DepthChoice { .. } => "depth_choice",
        SkipRule::TopK { .. } if least >= 1.0 => "all",
        SkipRule::TopK { causal: None, .. } => "topk",
        SkipRule::TopK { causal: Some(CausalRule::Bce { .. }), .. } => "bce",
        SkipRule::TopK { causal: Some(CausalRule::Predictor { .. }), .. } => "predictor",
    }
}

/// Whether tokens that skip are keys all the same.
pub fn all_keys(skip: &Skip) -> bool {
    match &skip.rule {
        SkipRule::Threshold { .. } => skip.kv == SkipKv::All,
        SkipRule::DepthChoice { .. } => false,
        SkipRule::TopK { .. } => least(skip) >= 1.0,
    }
}

/// The least share of tokens that a pass processes.
pub fn least(skip: &Skip) -> f64 {
    skip.capacities.iter().copied().fold(skip.rule.capacity(), f64::min)
}

/// The arguments of a router's scores, where they are no plain product.
fn scores(scorer: &Scorer) -> String {
    let mut text = String::new();
    if scorer.temperature != 1.0 {
        let _ = write!(text, ", temperature={:?}", scorer.temperature);
    }
    if let Some(size) = scorer.network {
        let _ = write!(text, ", network={size}");
    }
    text
}

fn arguments(skip: &Skip) -> String {
    let own = rule(&skip.rule, least(skip));
    let mut text = format!("{own:?}");
    if let SkipRule::TopK { capacity, causal } = &skip.rule {
        if least(skip) < 1.0 && causal.is_none() {
            let _ = write!(text, ", capacity={capacity:?}");
        }
        if let Some(CausalRule::Predictor { hidden, .. }) = causal {
            let _ = write!(text, ", predictor={hidden}");
        }
    }
    let all = own == "all";
    for (name, on) in [
        ("norm_only", skip.input == SkipInput::NormOnly),
        ("whole", skip.level == SkipLevel::Sequence && matches!(skip.rule, SkipRule::Threshold { .. })),
        ("all_keys", all_keys(skip)),
        ("merge", skip.merge && !all),
    ] {
        if on {
            let _ = write!(text, ", {name}=True");
        }
    }
    if skip.each_pass {
        text += ", passes=times";
    }
    if !skip.capacities.is_empty() {
        let _ = write!(text, ", shares={:?}", skip.capacities);
    }
    if !skip.rule.chosen() {
        text += &scores(&skip.scorer);
    }
    if skip.gate_scale != 1.0 {
        let _ = write!(text, ", gate_scale={:?}", skip.gate_scale);
    }
    for (name, on) in [
        ("nested", skip.nested),
        ("sigmoid", skip.gate == SkipGate::Sigmoid),
        ("tanh", skip.gate == SkipGate::Tanh),
        ("of_stream", skip.whole),
    ] {
        if on {
            let _ = write!(text, ", {name}=True");
        }
    }
    text
}

/// The part of a layer that has this name, in Python.
fn attribute(name: &str) -> String {
    if WORDS.contains(&name) { format!("getattr(self, {name:?})") } else { format!("self.{name}") }
}

#[derive(Default)]
struct Walk<'a> {
    sets: Vec<Set<'a>>,
    statements: Vec<(&'a Statement, u64)>,
    /// Layers applied so far; outside loops alone.
    depth: u64,
    /// Number of loops so far.
    count: u64,
    loops: Vec<Loop>,
    /// Whether tokens may leave a loop that has a gate.
    leaves: bool,
}

impl<'a> Walk<'a> {
    /// Numbers the sets of items; gives their order.
    fn items(&mut self, items: &'a [Item], around: Around, free: bool) -> String {
        let begin = self.sets.len();
        let mut terms: Vec<String> = vec![];
        let mut plain = true;
        for item in items {
            match item {
                Item::Layer(expr) => {
                    terms.push(format!("[{}]", self.sets.len()));
                    self.sets.push(Set { expr, around });
                    self.depth += 1;
                }
                Item::Repeat { count, items } => {
                    for _ in 0..*count {
                        let before = self.sets.len();
                        let order = self.items(items, around, false);
                        plain &= order == range(before, self.sets.len());
                        terms.push(order);
                    }
                }
                Item::Statement(statement) => {
                    plain = false;
                    terms.push(format!("[~{}]", self.statements.len()));
                    self.statements.push((statement, self.depth));
                }
                Item::Recur { count, residual_norm, items, looping } => {
                    plain = false;
                    let own = Loop {
                        number: self.count,
                        passes: *count,
                        embed: looping.embed,
                        lora: looping.lora.is_some(),
                        gate: looping.exit.gate().is_some(),
                        leaves: self.leaves && looping.exit.gate().is_some(),
                        kv: looping.kv,
                        skip_passes: has_passes(items),
                        chooses: nested(items),
                        choice: depth_choice(items).map(|(skip, _)| skip.scorer),
                    };
                    let (leaves, kv_first) = (own.leaves, own.keys_of_first());
                    let ends = leaves || kv_first || own.choice.is_some();
                    self.count += 1;
                    let inside = Around {
                        recurrent: Some(*residual_norm),
                        times: around.times * count,
                        lora: looping.lora.map(|rank| (*count, rank)).or(around.lora),
                    };
                    let mut inner = self.items(items, inside, false);
                    if own.has_passes() || own.chooses || leaves || kv_first {
                        inner = format!("[\"{}\"] + {inner}", own.number);
                    }
                    if own.has_passes() || own.chooses || own.gate || kv_first {
                        self.loops.push(own);
                    }
                    let count = if free { "config.recur".into() } else { count.to_string() };
                    terms.push(format!("{count} * {}", grouped(&inner)));
                    terms.extend(ends.then(|| "[\"out\"]".to_string()));
                }
            }
        }
        if plain { range(begin, self.sets.len()) } else { terms.join(" + ") }
    }
}

/// Sets from `begin` to before `end`.
fn range(begin: usize, end: usize) -> String {
    if end - begin <= 4 {
        let numbers: Vec<String> = (begin..end).map(|i| i.to_string()).collect();
        return format!("[{}]", numbers.join(", "));
    }
    format!("[*range({begin}, {end})]")
}

fn grouped(order: &str) -> String {
    if order.starts_with('[') && order.ends_with(']') && !order[1..].contains('[') {
        order.into()
    } else {
        format!("({order})")
    }
}

/// The call that makes a statement between layers, after the embedding and `depth` layers.
pub fn statement((statement, depth): &(Statement, u64)) -> String {
    let (what, name) = match statement {
        Statement::Norm(NormGain::Own) => ("norm", None),
        Statement::Norm(NormGain::Plain) => ("norm plain", None),
        Statement::Norm(NormGain::Named(gain)) => ("norm of", Some(gain)),
        Statement::Linear(_) => ("linear", None),
        Statement::StartZeros => ("start zeros", None),
        Statement::StartNormal(deviation) => {
            return format!("Statement(config, \"start normal\", deviation={deviation:?})");
        }
        Statement::Save(name) => ("save", Some(name)),
        Statement::History(steps) => {
            return format!("Statement(config, \"mix history\", sources={:?})", steps.depths(*depth));
        }
        Statement::Mix { name, how } => {
            let what = match how {
                Mixing::Add => "mix add",
                Mixing::Linear(_) => "mix linear",
                Mixing::Scaled => "mix scaled",
                Mixing::Diagonal => "mix diagonal",
            };
            (what, Some(name))
        }
    };
    let name = name.map_or(String::new(), |name| format!(", {name:?}"));
    format!("Statement(config, {what:?}{name})")
}

/// The lines of a layer.
#[derive(Default)]
struct Emit<'a> {
    lines: Vec<String>,
    skips: Vec<&'a Skip>,
    names: Vec<String>,
    chains: usize,
    /// Norms among its terms.
    norms: usize,
    /// Units that stand between lanes.
    lanes: usize,
    /// Parts that read sources.
    readers: Vec<String>,
}

impl<'a> Emit<'a> {
    /// Adds the update of an expression to `x`.
    fn apply(&mut self, e: &'a Expr) {
        match e {
            Expr::Sequential(terms) => terms.iter().for_each(|term| self.apply(term)),
            Expr::Norm => self.norm(),
            Expr::Component(_) | Expr::Parallel(_) | Expr::Skip(..) => {
                let update = self.update(e, "x", "");
                self.lines.push(format!("x = x + {update}"));
            }
        }
    }

    fn norm(&mut self) {
        self.lines.push(format!("x = self.norm{}(x)", self.norms));
        self.norms += 1;
    }

    /// Moves the lanes `x` around each unit of an expression.
    fn lanes(&mut self, e: &'a Expr) {
        for unit in units(e) {
            if *unit == Expr::Norm {
                self.norm();
                continue;
            }
            let update = self.update(unit, "u", "");
            self.lines.push(format!("x = self.lanes{}(x, at, lambda u: {update})", self.lanes));
            self.lanes += 1;
        }
    }

    /// Adds what the units of an expression make to the sources `x`.
    fn attend(&mut self, e: &'a Expr) {
        for unit in units(e) {
            let terms = readers(unit);
            let mut outputs = vec![];
            for (i, term) in terms.iter().enumerate() {
                let part = match term {
                    Expr::Component(name) => attribute(name),
                    Expr::Norm | Expr::Sequential(_) | Expr::Parallel(_) | Expr::Skip(..) => {
                        format!("self.skip[{}]", self.skips.len())
                    }
                };
                let update = self.update(term, &format!("{part}.read(x)"), "");
                self.readers.push(part);
                outputs.push(match terms.len() {
                    1 => update,
                    _ => {
                        self.lines.push(format!("y{i} = {update}"));
                        format!("y{i}")
                    }
                });
            }
            self.lines.extend(outputs.iter().map(|output| format!("x.add({output})")));
        }
    }

    /// The update of an expression that reads `x`, as a Python expression; functions it needs are
    /// written before, as deep as `indent` says.
    fn update(&mut self, e: &'a Expr, x: &str, indent: &str) -> String {
        match e {
            Expr::Component(name) => {
                if !self.names.contains(name) {
                    self.names.push(name.clone());
                }
                format!("{}({x}, at)", attribute(name))
            }
            // A term of a layer's own `>` alone.
            Expr::Norm => "0".into(),
            Expr::Parallel(terms) => {
                let updates: Vec<String> = terms.iter().map(|term| self.update(term, x, indent)).collect();
                updates.join(" + ")
            }
            Expr::Sequential(_) => {
                let name = format!("chain{}", self.chains);
                self.chains += 1;
                self.function(&name, e, indent);
                format!("{name}({x}, at)")
            }
            Expr::Skip(skip, inner) => {
                let number = self.skips.len();
                self.skips.push(skip);
                let name = format!("part{number}");
                self.function(&name, inner, indent);
                format!("self.skip[{number}]({x}, at, {name})")
            }
        }
    }

    /// A function that gives the update of an expression.
    fn function(&mut self, name: &str, e: &'a Expr, indent: &str) {
        self.lines.push(format!("{indent}def {name}(x, at):"));
        let inner = format!("{indent}    ");
        match e {
            Expr::Sequential(terms) => {
                for (i, term) in terms.iter().enumerate() {
                    let update = self.update(term, if i == 0 { "x" } else { "x + y" }, &inner);
                    let line = if i == 0 { format!("y = {update}") } else { format!("y = y + {update}") };
                    self.lines.push(format!("{inner}{line}"));
                }
                self.lines.push(format!("{inner}return y"));
            }
            Expr::Component(_) | Expr::Norm | Expr::Parallel(_) | Expr::Skip(..) => {
                let update = self.update(e, "x", &inner);
                self.lines.push(format!("{inner}return {update}"));
            }
        }
        self.lines.push(String::new());
    }
}

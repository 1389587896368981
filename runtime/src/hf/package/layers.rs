//! The classes of a model's layers, and the order in which layers are applied.
//!
//! *In*: the body of a model. *Out*: a Python class for each distinct layer, the constructor's
//! call for each set of weights, and the order of sets as a Python expression in which loops stay
//! loops. *Promise*: sets of weights and wrapped parts have the numbers that their tensors have.

use crate::hf::{HfError, composition};
use dreamc_dsl::spec::{
    CausalRule, Expr, Item, Mixing, Model, Skip, SkipInput, SkipKv, SkipLevel, SkipRule, Statement,
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
    /// Statements between layers, by number.
    pub statements: Vec<Statement>,
    /// The order of sets, with the outermost loop's count and without.
    orders: [String; 2],
}

/// A set of weights.
struct Set<'a> {
    expr: &'a Expr,
    /// Whether it is recurrent, and whether the stream is then normalised.
    recurrent: Option<bool>,
    /// How often it is applied.
    times: u64,
}

impl Layers {
    /// Reads the body of a model.
    pub fn new(model: &Model) -> Result<Self, HfError> {
        let mut walk = Walk { sets: vec![], statements: vec![] };
        let [fixed, free] = [false, true].map(|free| {
            walk.sets.clear();
            walk.statements.clear();
            walk.items(&model.body, None, 1, free)
        });
        let mut layers = Layers {
            classes: vec![],
            names: vec![],
            made: vec![],
            components: BTreeSet::new(),
            skips: vec![],
            projected: walk.sets.iter().any(|set| set.recurrent.is_some()),
            all_projected: true,
            statements: walk.statements.iter().map(|s| (*s).clone()).collect(),
            orders: [fixed, free],
        };
        let mut known: Vec<(&Expr, Option<bool>)> = vec![];
        for set in &walk.sets {
            let key = (set.expr, set.recurrent);
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
            let times = if set.recurrent.is_some() { set.times } else { 0 };
            layers.made.push(format!("Layer{number}(config, times={times})"));
        }
        Ok(layers)
    }

    /// The order of sets of weights as a Python expression; `free` where the count of the outermost
    /// loop is the configuration's.
    pub fn order(&self, free: bool) -> String {
        self.orders[usize::from(free)].clone()
    }

    fn class(&mut self, model: &Model, name: &str, set: &Set) -> Result<(), HfError> {
        use dreamc_dsl::spec::Component as C;
        let mut emit = Emit { lines: vec![], skips: vec![], names: vec![], chains: 0, norms: 0 };
        emit.apply(set.expr);
        let mut text = format!("class {name}(nn.Module):\n    \"\"\"{}\"\"\"\n\n", composition(set.expr));
        // Writing to a String does not fail.
        let mut line = |line: String| {
            let _ = writeln!(text, "{line}");
        };
        line("    def __init__(self, config, times):\n        super().__init__()".into());
        let mut slots = vec![];
        for name in &emit.names {
            let norm = name.strip_prefix("norm").is_some_and(|j| j.parse::<usize>().is_ok());
            if TAKEN.contains(&name.as_str()) || name == "residual_norm" || norm {
                return Err(HfError::Export(format!(
                    "the component `{name}` has a name that a module of PyTorch has itself, so that no class can have it"
                )));
            }
            let Some(component) = model.components.get(name) else { continue };
            let call = match component {
                C::Sequence(_) => format!("SequenceAttention(config, \"{name}\", times)"),
                C::Depth(_) => format!("DepthAttention(config, \"{name}\", times)"),
                C::Experts(_) => format!("Experts(config, \"{name}\")"),
                C::Mlp(_) => format!("Mlp(config, \"{name}\")"),
            };
            match component {
                C::Sequence(a) | C::Depth(a) => {
                    self.all_projected &= set.recurrent.is_some() && a.projection.is_some();
                }
                C::Experts(_) | C::Mlp(_) => {}
            }
            if matches!(component, C::Sequence(_)) {
                slots.push(format!("{}.slots", attribute(name)));
            }
            line(match WORDS.contains(&name.as_str()) {
                true => format!("        setattr(self, {name:?}, {call})"),
                false => format!("        self.{name} = {call}"),
            });
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
        }
        for j in 0..emit.norms {
            line(format!("        self.norm{j} = Norm(config.hidden_size)"));
        }
        if set.recurrent == Some(true) {
            line("        self.residual_norm = Norm(config.hidden_size)".into());
        }
        let slots = if slots.is_empty() { "0".into() } else { slots.join(" + ") };
        line(format!("        self.slots = {slots}\n\n    def forward(self, x, at):"));
        emit.lines.iter().for_each(|code| line(format!("        {code}")));
        line(
            if set.recurrent == Some(true) {
                "        return self.residual_norm(x)"
            } else {
                "        return x"
            }
            .into(),
        );
        self.classes.push(text);
        Ok(())
    }
}

/// Which tokens a router chooses where each decides for itself, in the words of the code.
pub fn rule(rule: &SkipRule) -> &'static str {
    match rule {
        SkipRule::Threshold { .. } => "threshold",
        SkipRule::TopK { capacity, .. } if *capacity >= 1.0 => "all",
        SkipRule::TopK { causal: None, .. } => "topk",
        SkipRule::TopK { causal: Some(CausalRule::Bce { .. }), .. } => "bce",
        SkipRule::TopK { causal: Some(CausalRule::Predictor { .. }), .. } => "predictor",
    }
}

/// Whether tokens that skip are keys all the same.
pub fn all_keys(skip: &Skip) -> bool {
    match &skip.rule {
        SkipRule::Threshold { .. } => skip.kv == SkipKv::All,
        SkipRule::TopK { capacity, .. } => *capacity >= 1.0,
    }
}

fn arguments(skip: &Skip) -> String {
    let mut text = format!("{:?}", rule(&skip.rule));
    if let SkipRule::TopK { capacity, causal } = &skip.rule {
        if *capacity < 1.0 && causal.is_none() {
            let _ = write!(text, ", capacity={capacity:?}");
        }
        if let Some(CausalRule::Predictor { hidden, .. }) = causal {
            let _ = write!(text, ", predictor={hidden}");
        }
    }
    let all = rule(&skip.rule) == "all";
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
    text
}

/// The part of a layer that has this name, in Python.
fn attribute(name: &str) -> String {
    if WORDS.contains(&name) { format!("getattr(self, {name:?})") } else { format!("self.{name}") }
}

struct Walk<'a> {
    sets: Vec<Set<'a>>,
    statements: Vec<&'a Statement>,
}

impl<'a> Walk<'a> {
    /// Numbers the sets of items; gives their order. `times` is how often the loops around run
    /// them.
    fn items(&mut self, items: &'a [Item], recurrent: Option<bool>, times: u64, free: bool) -> String {
        let begin = self.sets.len();
        let mut terms: Vec<String> = vec![];
        let mut plain = true;
        for item in items {
            match item {
                Item::Layer(expr) => {
                    terms.push(format!("[{}]", self.sets.len()));
                    self.sets.push(Set { expr, recurrent, times });
                }
                Item::Repeat { count, items } => {
                    for _ in 0..*count {
                        let before = self.sets.len();
                        let order = self.items(items, recurrent, times, false);
                        plain &= order == range(before, self.sets.len());
                        terms.push(order);
                    }
                }
                Item::Statement(statement) => {
                    plain = false;
                    terms.push(format!("[~{}]", self.statements.len()));
                    self.statements.push(statement);
                }
                Item::Recur { count, residual_norm, items, looping: _ } => {
                    plain = false;
                    let inner = self.items(items, Some(*residual_norm), times * count, false);
                    let count = if free { "config.recur".into() } else { count.to_string() };
                    terms.push(format!("{count} * {}", grouped(&inner)));
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

/// The call that makes a statement between layers.
pub fn statement(statement: &Statement) -> String {
    let (what, name) = match statement {
        Statement::Norm => ("norm", None),
        Statement::Linear(_) => ("linear", None),
        Statement::StartZeros => ("start zeros", None),
        Statement::StartNormal(deviation) => {
            return format!("Statement(config, \"start normal\", deviation={deviation:?})");
        }
        Statement::Save(name) => ("save", Some(name)),
        Statement::History { .. } => ("mix history", None),
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
struct Emit<'a> {
    lines: Vec<String>,
    skips: Vec<&'a Skip>,
    names: Vec<String>,
    chains: usize,
    /// Norms among its terms.
    norms: usize,
}

impl<'a> Emit<'a> {
    /// Adds the update of an expression to `x`.
    fn apply(&mut self, e: &'a Expr) {
        match e {
            Expr::Sequential(terms) => terms.iter().for_each(|term| self.apply(term)),
            Expr::Norm => {
                self.lines.push(format!("x = self.norm{}(x)", self.norms));
                self.norms += 1;
            }
            Expr::Component(_) | Expr::Parallel(_) | Expr::Skip(..) => {
                let update = self.update(e, "x", "");
                self.lines.push(format!("x = x + {update}"));
            }
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

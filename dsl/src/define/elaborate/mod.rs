//! From the tree of a definition, with its settings, to its typed graph.
//!
//! *In*: a [`Definition`], the value of each setting, the width of the stream and the components of
//! the model. *Out*: a [`Graph`] whose values all have named dimensions with sizes, and every
//! mistake at its token. *Promise*: a mistake gives one message; what depends on it is `None` from
//! there on, so that it causes no other.

mod calls;
mod expr;
mod names;
mod prune;
mod regions;
mod sizes;
mod tokens;

use std::cell::Cell;
use std::collections::HashMap;

use indexmap::IndexMap;

use super::graph::*;
use super::syntax::{self, Definition, Expr, Name, Statement};
use crate::component::{self, Component};
use crate::diagnostic::Diagnostic;
use crate::number::Number;
use crate::source::Span;
use crate::suggest::closest;

/// Dimensions of one value.
const MAX_DIMS: usize = 8;
/// Elements of one value, of a token or of a weight.
const MAX_ELEMENTS: u64 = 1 << 40;
/// Values of one definition.
const MAX_VALUES: usize = 4096;
/// Components that read values of one another, or apply one another.
const MAX_CHAIN: usize = 8;
/// Definitions that are elaborated for one, those that they apply and read included.
const MAX_NESTED: u32 = 256;

thread_local! {
    /// The definitions elaborated so far for the outermost.
    static NESTED: Cell<u32> = const { Cell::new(0) };
}

/// The model that a definition stands in.
#[derive(Clone, Copy)]
pub struct Context<'c> {
    /// The width of the stream.
    pub hidden: u64,
    /// How many ids tokens have.
    pub vocab: u64,
    /// The components of the model by name; `None` where one is wrong.
    pub components: &'c dyn Fn(&str) -> Option<&'c Component>,
    /// Their names.
    pub names: &'c [&'c str],
    /// Through how many components this one is read.
    chain: usize,
}

impl<'c> Context<'c> {
    /// A model of that width and vocabulary with those components.
    pub fn new(
        [hidden, vocab]: [u64; 2],
        components: &'c dyn Fn(&str) -> Option<&'c Component>,
        names: &'c [&'c str],
    ) -> Context<'c> {
        Context { hidden, vocab, components, names, chain: 0 }
    }
}

/// The result of elaboration.
#[derive(Debug, Default)]
pub struct Elaborated {
    /// The graph; where there are errors, a part of it.
    pub graph: Graph,
    /// The types of tokens, for editors.
    pub types: Vec<(Span, Type)>,
    /// Errors and warnings.
    pub found: Vec<Diagnostic>,
}

impl Elaborated {
    /// The dimensions of values at their tokens, with sizes.
    pub fn hints(&self) -> Vec<(Span, String)> {
        let shown = |ty: &Type| {
            let dim = |dim: &DimId| format!("{} {}", self.graph.name(*dim), self.graph.size(*dim));
            let dims = ty.dims.iter().map(dim).collect::<Vec<_>>().join(", ");
            let constant = if ty.per_token { "" } else { ", the same for every token" };
            match ty.dims.is_empty() {
                true => format!("a number{constant}"),
                false => format!("[{dims}]{constant}"),
            }
        };
        self.types.iter().map(|(span, ty)| (*span, shown(ty))).collect()
    }
}

/// The graph of a definition with settings.
pub fn elaborate<'c>(
    definition: &'c Definition,
    settings: &IndexMap<String, component::Setting>,
    context: Context<'c>,
) -> Elaborated {
    if context.chain == 0 {
        NESTED.set(0);
    }
    let mut first = Elaborator::new(definition, context, HashMap::new());
    first.settings(settings);
    let sizes = first.settings.clone();
    first.statements(&definition.body, true);
    // A value of the last application may be named below its first use: its type is known then.
    if first.awaited {
        let mut second = Elaborator::new(definition, context, first.named_types());
        second.settings = sizes;
        second.dims = first.dims;
        second.graph.dims = first.graph.dims;
        second.statements(&definition.body, true);
        return second.finish();
    }
    first.finish()
}

/// The value of an expression: a number that is known, or a value of the region that is being
/// written.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Got {
    Number(f64),
    Value(ValueId),
}

/// A name in the scope of a definition.
#[derive(Debug)]
struct Bound {
    /// Where it is assigned.
    span: Span,
    /// Its value; `None` where that was reported.
    is: Option<Is>,
    /// Whether something reads it.
    read: bool,
}

#[derive(Clone, Copy, Debug)]
enum Is {
    Got(Got),
    /// A value of a recurrence, which gives it where it is read.
    Emitted {
        recurrence: ValueId,
        of: ValueId,
    },
}

/// A region that is being written inside the definition.
#[derive(Debug)]
struct Inner {
    of: Of,
    region: Region,
    /// The values outside that it reads.
    operands: Vec<ValueId>,
    /// The values that stand for those read already.
    reads: HashMap<(ValueId, u8), ValueId>,
}

#[derive(Debug)]
enum Of {
    Recurrence {
        /// The values of states and of names, as the last statement left them.
        locals: IndexMap<String, Bound>,
        /// How many of the locals are states.
        states: usize,
    },
    /// The score or the mask of an attention with these heads.
    Score { word: &'static str, heads: Vec<DimId> },
}

struct Elaborator<'a> {
    definition: &'a Definition,
    context: Context<'a>,
    settings: IndexMap<&'a str, Option<Number>>,
    /// The types of values that are read before they are named.
    expected: HashMap<String, (String, Type)>,
    awaited: bool,
    graph: Graph,
    dims: HashMap<String, DimId>,
    scope: IndexMap<String, Bound>,
    inner: Option<Inner>,
    /// The value that is being written, by which weights are named.
    label: String,
    /// The `linear` that is returned.
    output: Option<Span>,
    /// How many weights have a path.
    paths: HashMap<String, u32>,
    types: Vec<(Span, Type)>,
    found: Vec<Diagnostic>,
    /// Whether the definition is too large, which was reported.
    full: bool,
    /// Where the value is returned.
    returned: Option<Span>,
}

impl<'a> Elaborator<'a> {
    fn new(
        definition: &'a Definition,
        context: Context<'a>,
        expected: HashMap<String, (String, Type)>,
    ) -> Elaborator<'a> {
        Elaborator {
            definition,
            context,
            settings: IndexMap::new(),
            expected,
            awaited: false,
            graph: Graph::default(),
            dims: HashMap::new(),
            scope: IndexMap::new(),
            inner: None,
            label: String::new(),
            output: None,
            paths: HashMap::new(),
            types: Vec::new(),
            found: Vec::new(),
            full: false,
            returned: None,
        }
    }

    fn finish(mut self) -> Elaborated {
        if self.returned.is_none() && !self.full {
            let help = "write `return linear(v, [hidden])`";
            self.error("missing-return", self.definition.name.span, "this definition returns nothing", help);
        }
        self.unread();
        let kept: Vec<ValueId> = self
            .kept()
            .iter()
            .filter_map(|name| match self.outer(name)? {
                Got::Value(id) => Some(id),
                Got::Number(_) => None,
            })
            .collect();
        self.values_of_losses(&kept);
        prune::prune(&mut self.graph, &kept);
        Elaborated { graph: self.graph, types: self.types, found: self.found }
    }

    /// The context of a definition that this one applies or reads; reports where there are too
    /// many.
    fn inside(&mut self, span: Span) -> Option<Context<'a>> {
        NESTED.set(NESTED.get() + 1);
        let (message, help) = if self.context.chain >= MAX_CHAIN {
            (
                format!("more than {MAX_CHAIN} definitions stand inside or read one another"),
                "write some of them as one",
            )
        } else if NESTED.get() > MAX_NESTED {
            (
                format!("more than {MAX_NESTED} definitions stand inside or read one another"),
                "apply fewer: each application is a component of its own",
            )
        } else {
            return Some(Context { chain: self.context.chain + 1, ..self.context });
        };
        // One message: all around it are too deep for the same reason.
        if NESTED.get() <= MAX_NESTED + 1 {
            self.error("too-large", span, message, help);
        }
        self.full = true;
        None
    }

    fn error(&mut self, code: &'static str, span: Span, message: impl Into<String>, help: impl Into<String>) {
        self.found.push(Diagnostic::error(code, message).on(span).help(help));
    }

    // Statements ----------------------------------------------------------------------------------

    fn statements(&mut self, statements: &'a [Statement], outermost: bool) {
        for statement in statements {
            if self.full {
                return;
            }
            if let Some(returned) = self.returned.filter(|_| outermost) {
                let at = statement.span();
                let error = Diagnostic::error("unreachable", "nothing is computed after `return`").on(at);
                self.found
                    .push(error.related(returned, "returned here").help("take it away, or put it before"));
                return;
            }
            match statement {
                Statement::Assign(name, value) => self.assign(name, value),
                Statement::Recurrence(recurrence) if outermost => self.recurrence(recurrence),
                Statement::Recurrence(recurrence) => {
                    let help =
                        "write one recurrence with several states: `recurrence S [dims], z [dims] { … }`";
                    self.error("nested", recurrence.span, "a recurrence stands in another", help);
                }
                Statement::Loss(value) if outermost => self.add_loss(value),
                Statement::Loss(value) => {
                    let help = "name the value here, and write `loss` with it after the braces";
                    self.error("nested", value.span, "a recurrence has no loss of its own", help);
                }
                Statement::Return(value) if outermost => self.give(value),
                Statement::Return(value) => {
                    let help = "name the value here, and return what is made of it after the braces";
                    self.error("nested", value.span, "a recurrence returns nothing", help);
                }
            }
        }
    }

    fn assign(&mut self, name: &'a Name, value: &'a Expr) {
        let free = self.may_name(name);
        self.label.clone_from(&name.text);
        let got = self.expr(value);
        if !free {
            return;
        }
        if let Some(Got::Value(id)) = got {
            self.types.push((name.span, self.ty(id).clone()));
            let node = self.node_mut(id);
            node.name.get_or_insert_with(|| name.text.clone());
        }
        let bound = Bound { span: name.span, is: got.map(Is::Got), read: false };
        match &mut self.inner {
            Some(Inner { of: Of::Recurrence { locals, states }, .. }) => {
                let state = locals.get_index_of(&name.text).is_some_and(|place| place < *states);
                if state {
                    self.new_state(name, value.span, got);
                    return;
                }
                let read = locals.get(&name.text).is_some_and(|old| old.read);
                locals.insert(name.text.clone(), Bound { read, ..bound });
            }
            _ => {
                self.scope.insert(name.text.clone(), bound);
            }
        }
    }

    /// Whether a value may have that name; reports it where it may not.
    fn may_name(&mut self, name: &Name) -> bool {
        let text = name.text.as_str();
        let taken = if text == "x" {
            Some("the row of the token")
        } else if text == "hidden" {
            Some("the width of the stream")
        } else if super::functions::FACTS.iter().any(|(fact, ..)| *fact == text) {
            Some("a number of the token")
        } else if matches!(text, "and" | "or" | "not" | "from" | "over" | "along" | "at") {
            Some("a word of the language")
        } else {
            None
        };
        if let Some(taken) = taken {
            self.error("bad-name", name.span, format!("`{text}` is {taken}"), "choose another name");
            return false;
        }
        let setting = self.definition.settings.iter().find(|setting| setting.name.text == text);
        let before = match (&self.inner, setting) {
            (_, Some(setting)) => Some((setting.name.span, "a setting has this name")),
            (_, None) => self.scope.get(text).map(|bound| (bound.span, "first here")),
        };
        if let Some((first, note)) = before {
            let message = format!("`{text}` is assigned twice");
            let error = Diagnostic::error("duplicate-name", message).on(name.span).related(first, note);
            self.found
                .push(error.help("choose another name: only inside `recurrence` is a name assigned again"));
            return false;
        }
        true
    }

    /// `loss value`
    fn add_loss(&mut self, value: &'a Expr) {
        self.label = "loss".into();
        let Some(got) = self.expr(value) else { return };
        let id = self.id(got, value.span);
        let ty = self.ty(id).clone();
        if !ty.dims.is_empty() {
            let message = format!("a loss is one number, not `{}`", self.shown(&ty.dims));
            let names: Vec<&str> = ty.dims.iter().map(|dim| self.graph.name(*dim)).collect();
            let help = format!("sum it: `loss sum({}, over {})`", short(value), names.join(" "));
            let origin = self.origin(value, id);
            let error = Diagnostic::error("dimensions", message).on(value.span);
            self.found.push(error.related(origin.0, origin.1).help(help));
            return;
        }
        if let Function::Number(_) = self.region().node(id).function {
            let help = "make it of `x` or of a `weight`";
            self.error("constant", value.span, "nothing that is trained changes this loss", help);
            return;
        }
        self.graph.losses.push(id);
    }

    /// Refuses values for losses that anything else depends on: means over tokens are made of
    /// tokens to come, and a generation makes neither scores nor weights of keys.
    fn values_of_losses(&mut self, kept: &[ValueId]) {
        let nodes = &self.graph.region.nodes;
        let mut needed = vec![false; nodes.len()];
        for root in self.graph.region.results.iter().chain(kept) {
            needed[root.0 as usize] = true;
        }
        for place in (0..nodes.len()).rev() {
            if needed[place] {
                nodes[place].args.iter().for_each(|arg| needed[arg.0 as usize] = true);
            }
        }
        let found = nodes.iter().zip(needed);
        let found = found.filter(|(node, needed)| *needed && node.function.reads() == Reads::Losses);
        let found: Vec<_> =
            found.map(|(node, _)| (node.span, matches!(node.function, Function::Average { .. }))).collect();
        for (span, mean) in found {
            let (code, message, help) = match mean {
                true => (
                    "ahead",
                    "tokens to come are in this mean, and more than a loss depends on it",
                    "read it by `loss` alone; `running(v)` is the sum over the tokens so far",
                ),
                false => (
                    "loss-alone",
                    "more than a loss depends on this, and a generation does not make it",
                    "read it by `loss` alone; `attend` reads keys by their weights",
                ),
            };
            self.error(code, span, message, help);
        }
    }

    /// `return value`
    fn give(&mut self, value: &'a Expr) {
        self.returned = Some(value.span);
        self.label = "out".into();
        self.output = Some(value.span);
        let got = self.expr(value);
        self.output = None;
        let Some(got) = got else { return };
        let id = self.id(got, value.span);
        let expected = self.hidden_dim(value.span);
        let ty = self.ty(id).clone();
        if ty.dims != [expected] {
            let message = format!("a definition returns `[hidden]`, not `{}`", self.shown(&ty.dims));
            let help = format!("write `return linear({}, [hidden])`", short(value));
            let error = Diagnostic::error("dimensions", message).on(value.span);
            let origin = self.origin(value, id);
            self.found.push(error.related(origin.0, origin.1).help(help));
            return;
        }
        if !ty.per_token {
            let help = "make it of `x`, the row of the token";
            self.error("constant", value.span, "the result is the same for every token", help);
            return;
        }
        self.graph.region.results = vec![id];
    }

    // Values --------------------------------------------------------------------------------------

    fn region(&self) -> &Region {
        self.inner.as_ref().map_or(&self.graph.region, |inner| &inner.region)
    }

    fn region_mut(&mut self) -> &mut Region {
        match &mut self.inner {
            Some(inner) => &mut inner.region,
            None => &mut self.graph.region,
        }
    }

    fn ty(&self, id: ValueId) -> &Type {
        &self.region().node(id).ty
    }

    fn node_mut(&mut self, id: ValueId) -> &mut Node {
        &mut self.region_mut().nodes[id.0 as usize]
    }

    /// A new value of the region that is being written.
    fn push(&mut self, function: Function, args: Vec<ValueId>, ty: Type, span: Span) -> ValueId {
        self.bound(&ty.dims, span);
        let region = self.region_mut();
        region.nodes.push(Node { function, args, ty, name: None, span });
        ValueId(region.nodes.len() as u32 - 1)
    }

    /// A new value of the definition, outside of any region in it.
    fn push_outside(&mut self, function: Function, ty: Type, span: Span) -> ValueId {
        self.bound(&ty.dims, span);
        self.graph.region.nodes.push(Node { function, args: Vec::new(), ty, name: None, span });
        ValueId(self.graph.region.nodes.len() as u32 - 1)
    }

    /// Reports a value, or a definition, that is too large.
    fn bound(&mut self, dims: &[DimId], span: Span) {
        let inside = self.inner.as_ref().map_or(0, |inner| inner.region.nodes.len());
        let (code, message, help) = if self.full {
            return;
        } else if dims.len() > MAX_DIMS {
            let message = format!("this value has {} dimensions: {}", dims.len(), self.shown(dims));
            ("too-large", message, format!("at most {MAX_DIMS} are possible: `merge` some, or sum over them"))
        } else if self.graph.elements(dims) > MAX_ELEMENTS {
            let message = format!("this value has too many elements: {}", self.sized(dims));
            ("too-large", message, "at most 2^40 are possible".to_string())
        } else if self.graph.region.nodes.len() + inside >= MAX_VALUES {
            let message = format!("`{}` computes too many values", self.definition.name.text);
            ("too-large", message, format!("at most {MAX_VALUES} are possible: make it several definitions"))
        } else {
            return;
        };
        self.full = true;
        self.error(code, span, message, help);
    }

    /// The value of a number or a value.
    fn id(&mut self, got: Got, span: Span) -> ValueId {
        match got {
            Got::Value(id) => id,
            Got::Number(number) => self.push(Function::Number(number), Vec::new(), Type::default(), span),
        }
    }

    /// The token's row, or another value that stands outside of regions.
    fn outside(&mut self, function: Function, ty: Type, span: Span) -> Option<ValueId> {
        let same = |node: &Node| node.function == function && node.args.is_empty();
        let id = match self.graph.region.nodes.iter().position(same) {
            Some(place) => ValueId(place as u32),
            None => self.push_outside(function, ty, span),
        };
        self.bring(id, span)
    }

    /// A weight, as a value.
    fn weight(
        &mut self,
        purpose: Purpose,
        dims: Vec<DimId>,
        inputs: usize,
        init: Option<Init>,
        span: Span,
    ) -> Option<ValueId> {
        let kind = match purpose {
            Purpose::Matrix | Purpose::Output | Purpose::Own => "weight",
            Purpose::Bias => "bias",
            Purpose::Gain => "gain",
            Purpose::Filter => "filter",
        };
        let mut path = format!("{}.{kind}", self.label);
        let count = self.paths.entry(path.clone()).or_insert(0);
        *count += 1;
        if *count > 1 {
            path += &count.to_string();
        }
        self.bound(&dims, span);
        let id = WeightId(self.graph.weights.len() as u32);
        self.graph.weights.push(Weight { path, dims: dims.clone(), inputs, init, purpose, span });
        let ty = Type { dims, per_token: false, places_of: None };
        let value = self.push_outside(Function::Weight(id), ty, span);
        self.bring(value, span)
    }
}

/// An expression as help shows it, where it is short.
fn short(expr: &Expr) -> String {
    match &expr.kind {
        syntax::ExprKind::Name(name) => name.clone(),
        _ => "…".into(),
    }
}

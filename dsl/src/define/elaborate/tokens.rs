//! Functions of several tokens, of several applications, and of other components.

use super::calls::Args;
use super::*;
use crate::define::syntax::{Call, ExprKind};
use crate::spec::{Defined, Kind};

impl<'a> Elaborator<'a> {
    pub(super) fn shift(&mut self, args: &mut Args) -> Option<Got> {
        let value = self.tokens(args)?;
        let many = args.named("n").or_else(|| args.next());
        let many = match many {
            Some(expr) => self.size(expr, "how far `shift` reads back", 1)?,
            None => 1,
        };
        let ty = self.ty(value).clone();
        Some(Got::Value(self.push(Function::Shift(many), vec![value], ty, args.span)))
    }

    /// The next argument as a value that each token has its own of.
    fn tokens(&mut self, args: &mut Args) -> Option<ValueId> {
        let (value, expr) = self.tensor(args, "value")?;
        self.per_token(value, expr, args)?;
        Some(value)
    }

    fn per_token(&mut self, value: ValueId, expr: &Expr, args: &Args) -> Option<()> {
        if self.ty(value).per_token {
            return Some(());
        }
        let (span, note) = self.origin(expr.bare(), value);
        let message = format!("`{}` reads tokens, and this is the same for all", args.entry.name);
        let error = Diagnostic::error("constant", message).on(expr.span).related(span, note);
        self.found.push(error.help("make it of `x`, the row of the token"));
        None
    }

    pub(super) fn running(&mut self, args: &mut Args) -> Option<Got> {
        let value = self.tokens(args)?;
        let block = match args.named("block") {
            Some(expr) => Some(self.size(expr, "the block of `running`", 1)?),
            None => None,
        };
        let ty = self.ty(value).clone();
        Some(Got::Value(self.push(Function::Running(block), vec![value], ty, args.span)))
    }

    pub(super) fn average(&mut self, args: &mut Args) -> Option<Got> {
        let all = args.flag("batch").is_some();
        let value = self.tokens(args)?;
        let ty = Type { places_of: None, ..self.ty(value).clone() };
        Some(Got::Value(self.push(Function::Average { all }, vec![value], ty, args.span)))
    }

    pub(super) fn conv(&mut self, args: &mut Args) -> Option<Got> {
        let bias = args.flag("bias");
        let value = self.tokens(args)?;
        let (width, expr) = self.size_of(args, "width", 1)?;
        let width = self.dim_of_size(expr, width, "width");
        let ty = self.ty(value).clone();
        let filter = [&ty.dims[..], &[width]].concat();
        self.distinct(&filter, args.span)?;
        let mut operands = vec![value, self.weight(Purpose::Filter, filter, 1, None, args.span)?];
        if let Some(span) = bias {
            operands.push(self.weight(Purpose::Bias, ty.dims.clone(), 0, Some(Init::Constant(0.0)), span)?);
        }
        Some(Got::Value(self.push(Function::Conv(width), operands, ty, args.span)))
    }

    // Attention -----------------------------------------------------------------------------------

    pub(super) fn attend(&mut self, args: &mut Args) -> Option<Got> {
        let sink = args.flag("sink");
        let (mut operands, heads, dims) = self.queries_keys_values(args)?;
        let summed = *self.ty(operands[0]).dims.last()?;
        let window = match args.named("window") {
            Some(expr) => Some(self.size(expr, "the window", 1)?),
            None => None,
        };
        let every = match args.named("every") {
            Some(expr) => Some(self.size(expr, "the blocks of `every`", 1)?),
            None => None,
        };
        let (scale, written) = self.scale(args, summed)?;
        let among = match args.named("among") {
            Some(expr) => Some(self.among(expr, &mut operands, &heads)?),
            None => None,
        };
        let dropout = match args.named("dropout") {
            None => 0.0,
            Some(expr) => {
                let share = self.number(expr)?.real();
                if !(0.0..1.0).contains(&share) {
                    self.error(
                        "bad-number",
                        expr.span,
                        format!("`dropout` is {share}"),
                        "it is at least 0 and below 1",
                    );
                    return None;
                }
                share
            }
        };
        let sink = match sink {
            None => None,
            Some(span) => {
                operands.push(self.weight(
                    Purpose::Own,
                    heads.clone(),
                    0,
                    Some(Init::Constant(0.0)),
                    span,
                )?);
                Some(operands.len() as u32 - 1)
            }
        };
        let (score, mask) = (args.named("score"), args.named("mask"));
        if let (Some(expr), true) = (score.or(mask), every.is_some() || among.is_some()) {
            let message = "a score or a mask of keys that are chosen";
            let help = "leave it out: `among` and `every` say which keys are seen, `scale` and `window` may stand with them";
            self.error("unexpected", expr.span, message, help);
            return None;
        }
        let score = match score {
            Some(expr) => Some(self.score("score", expr, &heads, &mut operands)?),
            None => None,
        };
        let mask = match mask {
            Some(expr) => Some(self.score("mask", expr, &heads, &mut operands)?),
            None => None,
        };
        let ty = Type { dims, per_token: true, places_of: None };
        let attend = Attend { window, every, among, sink, scale, written, dropout, score, mask };
        Some(Got::Value(self.push(Function::Attend(Box::new(attend)), operands, ty, args.span)))
    }

    /// The operand of `among`, and the tokens of a block.
    fn among(&mut self, expr: &Expr, operands: &mut Vec<ValueId>, heads: &[DimId]) -> Option<(u32, u64)> {
        let got = self.expr(expr)?;
        let chosen = self.id(got, expr.span);
        let Function::Choose(choice) = self.graph.region.node(chosen).function else {
            let (span, note) = self.origin(expr.bare(), chosen);
            let message = "`among` needs the numbers of blocks, which `choose` gives";
            let error = Diagnostic::error("wrong-type", message).on(expr.span).related(span, note);
            self.found.push(error.help("write `attend(q, k, v, among = choose(q, k, n, block = b))`"));
            return None;
        };
        let dims = self.ty(chosen).dims.clone();
        let lists: Vec<DimId> = dims.iter().copied().filter(|dim| *dim != choice.choices).collect();
        let size = operands[0];
        let summed = self.ty(size).dims.last().copied();
        let of_keys: Vec<DimId> =
            self.ty(operands[1]).dims.iter().copied().filter(|dim| Some(*dim) != summed).collect();
        let grouped = lists.len() == of_keys.len() && lists.iter().all(|dim| of_keys.contains(dim));
        if !(grouped || begins(heads, &of_keys, &lists)) {
            let (own, of_heads) = (self.shown(&lists), self.shown(heads));
            let message = format!("choices are of `{own}`, and heads of queries `{of_heads}`");
            let (span, note) = self.origin(expr.bare(), chosen);
            let error = Diagnostic::error("dimensions", message).on(expr.span).related(span, note);
            let help =
                "a choice is one for all heads, or has the dimensions of heads that queries or keys have";
            self.found.push(error.help(help));
            return None;
        }
        operands.push(chosen);
        Some((operands.len() as u32 - 1, choice.block))
    }

    /// `choose(q, k, n, block = b, …)`
    pub(super) fn choose_keys(&mut self, args: &mut Args) -> Option<Got> {
        let (relu, softmax) = (args.flag("relu"), args.flag("softmax"));
        let (q, k) = (self.tensor(args, "queries"), self.tensor(args, "keys"));
        let ((q, of_q), (k, of_k)) = (q?, k?);
        self.per_token(q, of_q, args)?;
        self.per_token(k, of_k, args)?;
        let (count, written) = self.size_of(args, "number of blocks", 1)?;
        let mut size = |own: &mut Self, name: &str, least: u64, other: u64| match args.named(name) {
            Some(expr) => own.size(expr, &format!("`{name}` of `choose`"), least).map(|n| (n, expr.span)),
            None => Some((other, written.span)),
        };
        let (block, near, first) =
            (size(self, "block", 1, 1)?.0, size(self, "near", 0, 0)?, size(self, "first", 0, 0)?);
        if near.0.saturating_add(first.0) > count {
            let span = if near.0 > count { near.1 } else { first.1 };
            let message = format!("{} blocks are always chosen, of {count}", near.0.saturating_add(first.0));
            self.error("sizes", span, message, "choose at least as many as `near` and `first` say");
            return None;
        }
        if let (Some(_), Some(span)) = (relu, softmax) {
            self.error(
                "unexpected",
                span,
                "`relu` and `softmax` at once",
                "one of them says what a score is",
            );
            return None;
        }
        let heads = self.heads_of(q, of_q, k, of_k)?;
        let summed = *self.ty(q).dims.last()?;
        let scale = self.scale(args, summed)?.0;
        let lists: Vec<DimId> = match args.word("over") {
            None => heads.clone(),
            Some((word, [])) => {
                self.error("missing-argument", word.span, "`over` names no dimension", "write `over heads`");
                return None;
            }
            Some((_, names)) => {
                let mut lists = heads.clone();
                for name in names {
                    let ExprKind::Name(text) = &name.kind else {
                        let message = "this is no name of a dimension";
                        self.error("unknown-dimension", name.span, message, "write `over` and names");
                        return None;
                    };
                    match self.dims.get(text).copied().filter(|dim| lists.contains(dim)) {
                        Some(dim) => lists.retain(|other| *other != dim),
                        None => {
                            self.unknown_dim(text, name.span, Some((of_q, &heads)));
                            return None;
                        }
                    }
                }
                lists
            }
        };
        let of_keys: Vec<DimId> = self.ty(k).dims.iter().copied().filter(|dim| *dim != summed).collect();
        if !begins(&heads, &of_keys, &lists) {
            let (own, keys) = (self.shown(&lists), self.shown(&of_keys));
            let message = format!("a choice for each of `{own}`, and keys are of `{keys}`");
            let help = "sum over all heads, over none, or over those that share a head of keys";
            self.error("dimensions", args.span, message, help);
            return None;
        }
        let mut operands = vec![q, k];
        if let Some(expr) = args.named("weights") {
            let got = self.expr(expr)?;
            let weights = self.id(got, expr.span);
            let dims = self.ty(weights).dims.clone();
            if dims.len() != heads.len() || !dims.iter().all(|dim| heads.contains(dim)) {
                let (own, of_heads) = (self.shown(&dims), self.shown(&heads));
                let message = format!("weights are `{own}`, and heads of queries `{of_heads}`");
                self.error("dimensions", expr.span, message, "a weight is one number of each head");
                return None;
            }
            operands.push(weights);
        }
        let choices = self.dim_of_size(written, count, "choices");
        let dims = [&lists[..], &[choices]].concat();
        self.distinct(&dims, args.span)?;
        let measure = match (relu, softmax) {
            (Some(_), _) => Measure::Relu,
            (_, Some(_)) => Measure::Softmax,
            _ => Measure::Products,
        };
        let weighed = operands.len() > 2;
        let choice = Choice { block, near: near.0, first: first.0, measure, weighed, scale, choices };
        let ty = Type { dims, per_token: true, places_of: None };
        Some(Got::Value(self.push(Function::Choose(choice), operands, ty, args.span)))
    }

    /// `scores(choice)`
    pub(super) fn scores(&mut self, args: &mut Args) -> Option<Got> {
        let (chosen, expr) = self.tensor(args, "choice")?;
        let Function::Choose(choice) = self.graph.region.node(chosen).function else {
            let message = "`scores` needs a choice, which `choose` gives";
            let help = "write `scores(c)` with `c = choose(q, k, n)`";
            self.refuse_read("wrong-type", (chosen, expr), message.into(), help);
            return None;
        };
        if choice.block > 1 {
            let message = format!("`scores` are of tokens, and this choice is of blocks of {}", choice.block);
            self.refuse_read(
                "sizes",
                (chosen, expr),
                message,
                "leave `block` out: a block of one token is a token",
            );
            return None;
        }
        if choice.measure == Measure::Softmax {
            let message = "scores of a `softmax` are made of all keys, not of those that were chosen";
            self.refuse_read(
                "unexpected",
                (chosen, expr),
                message.into(),
                "choose by products, or by `relu`",
            );
            return None;
        }
        let ty = self.ty(chosen).clone();
        Some(Got::Value(self.push(Function::Scores, vec![chosen], ty, args.span)))
    }

    /// `mass(attention)`
    pub(super) fn mass(&mut self, args: &mut Args) -> Option<Got> {
        let (attention, expr) = self.tensor(args, "attention")?;
        let node = self.graph.region.node(attention);
        let among = match &node.function {
            Function::Attend(attend) => attend.among.and_then(|(k, _)| node.args.get(k as usize).copied()),
            _ => None,
        };
        let Some(chosen) = among else {
            let message = "`mass` needs an attention among keys that are chosen";
            let help = "write `mass(y)` with `y = attend(q, k, v, among = choose(q, k, n, block = b))`";
            self.refuse_read("wrong-type", (attention, expr), message.into(), help);
            return None;
        };
        let ty = self.ty(chosen).clone();
        Some(Got::Value(self.push(Function::Mass, vec![attention], ty, args.span)))
    }

    fn refuse_read(
        &mut self,
        code: &'static str,
        (value, expr): (ValueId, &Expr),
        message: String,
        help: &str,
    ) {
        let (span, note) = self.origin(expr.bare(), value);
        let error = Diagnostic::error(code, message).on(expr.span).related(span, note);
        self.found.push(error.help(help));
    }

    pub(super) fn depth_attend(&mut self, args: &mut Args) -> Option<Got> {
        let (operands, _, dims) = self.queries_keys_values(args)?;
        let summed = *self.ty(operands[0]).dims.last()?;
        let (scale, written) = self.scale(args, summed)?;
        let ty = Type { dims, per_token: true, places_of: None };
        Some(Got::Value(self.push(Function::DepthAttend { scale, written }, operands, ty, args.span)))
    }

    /// The factor of scores, and whether the text says it.
    fn scale(&mut self, args: &mut Args, summed: DimId) -> Option<(f64, bool)> {
        match args.named("scale") {
            Some(expr) => self.number(expr).map(|number| (Number::real(number), true)),
            None => Some((1.0 / (self.graph.size(summed) as f64).sqrt(), false)),
        }
    }

    /// Queries, keys and values; the dimensions of heads, and those of the result.
    fn queries_keys_values(&mut self, args: &mut Args) -> Option<(Vec<ValueId>, Vec<DimId>, Vec<DimId>)> {
        let (q, k, v) =
            (self.tensor(args, "queries"), self.tensor(args, "keys"), self.tensor(args, "values"));
        let (q, k, v) = (q?, k?, v?);
        for (value, expr) in [q, k, v] {
            self.per_token(value, expr, args)?;
        }
        let of = |own: &Self, value: ValueId| own.ty(value).dims.clone();
        let (of_q, of_k, of_v) = (of(self, q.0), of(self, k.0), of(self, v.0));
        let heads = self.heads_of(q.0, q.1, k.0, k.1)?;
        let summed = *of_q.last()?;
        let of_keys: Vec<DimId> = of_k.iter().filter(|dim| **dim != summed).copied().collect();
        let (shown_k, shown_v) = (self.shown(&of_k), self.shown(&of_v));
        let own: Vec<DimId> = of_v.iter().filter(|dim| !of_keys.contains(dim)).copied().collect();
        let ([value], true) = (own.as_slice(), of_keys.iter().all(|dim| of_v.contains(dim))) else {
            let message = format!("values are `{shown_v}`, and keys `{shown_k}`");
            let help = "values have the dimensions of heads that keys have, and one of their own";
            self.refuse_heads(v, k, message, help.into());
            return None;
        };
        let dims = [&heads[..], &[*value]].concat();
        self.distinct(&dims, args.span)?;
        Some((vec![q.0, k.0, v.0], heads, dims))
    }

    fn refuse_heads(&mut self, at: (ValueId, &Expr), other: (ValueId, &Expr), message: String, help: String) {
        let (first, note) = self.origin(other.1.bare(), other.0);
        let (second, own_note) = self.origin(at.1.bare(), at.0);
        let error = Diagnostic::error("dimensions", message).on(at.1.span).related(first, note);
        self.found.push(error.related(second, own_note).help(help));
    }

    /// The dimensions of heads of queries; keys have the same or fewer.
    fn heads_of(&mut self, q: ValueId, of_q: &Expr, k: ValueId, of_k: &Expr) -> Option<Vec<DimId>> {
        let (q, k) = ((q, of_q), (k, of_k));
        let [of_q, of_k] = [q.0, k.0].map(|value| self.ty(value).dims.clone());
        let (shown_q, shown_k) = (self.shown(&of_q), self.shown(&of_k));
        let Some((summed, heads)) = of_q.split_last() else {
            self.error(
                "dimensions",
                q.1.span,
                "queries are numbers without dimensions",
                "they are `[heads, size]`",
            );
            return None;
        };
        let name = self.graph.name(*summed).to_string();
        if !of_k.contains(summed) {
            let message = format!("keys are `{shown_k}`, without the last dimension of queries, `{shown_q}`");
            let help = format!(
                "the product of query and key is summed over `{name}`, the last dimension of queries"
            );
            self.refuse_heads(k, q, message, help);
            return None;
        }
        let of_keys: Vec<DimId> = of_k.iter().filter(|dim| *dim != summed).copied().collect();
        let inside = of_keys.iter().all(|dim| heads.contains(dim));
        let grouped = match (heads, of_keys.as_slice()) {
            ([heads], [groups]) => self.graph.size(*heads).is_multiple_of(self.graph.size(*groups)),
            _ => false,
        };
        if !inside && !grouped {
            let message =
                format!("keys of `{}` do not fit queries of `{}`", self.sized(&of_keys), self.sized(heads));
            let help = "keys have the dimensions of heads of queries, some of them, or one whose size divides the number of heads";
            self.refuse_heads(k, q, message, help.into());
            return None;
        }
        Some(heads.to_vec())
    }

    // Other applications and components -----------------------------------------------------------

    /// `earlier(name)`
    pub(super) fn earlier(&mut self, args: &mut Args) -> Option<Got> {
        let Some(Expr { kind: ExprKind::Name(name), span }) = args.next() else {
            let message = "`earlier` has no name of a value";
            self.error(
                "missing-argument",
                args.call.name.span,
                message,
                "write `earlier(v)` with `v = …` in this definition",
            );
            return None;
        };
        let known = match self.scope.contains_key(name) {
            true => match self.outer(name)? {
                Got::Value(id) => {
                    let node = self.graph.region.node(id);
                    Some((node.name.clone().unwrap_or_else(|| name.clone()), node.ty.clone()))
                }
                Got::Number(_) => None,
            },
            false => self.expected.get(name).cloned(),
        };
        let (name, ty) = match known {
            Some(known) => known,
            None if self.definition.assigned(name).is_some() && self.expected.is_empty() => {
                // The second reading knows its dimensions from the value that this one names.
                self.awaited = true;
                (name.clone(), Type { per_token: true, ..Type::default() })
            }
            None => {
                let names: Vec<&str> = self.scope.keys().map(String::as_str).collect();
                let help = match closest(name, names) {
                    Some(known) => format!("did you mean `{known}`?"),
                    None => format!("name a value of this definition: `{name} = …`"),
                };
                self.error("unknown-name", *span, format!("`{name}` is no value of this definition"), help);
                return None;
            }
        };
        let ty = Type { per_token: true, ..ty };
        Some(Got::Value(self.push(Function::Earlier(name), Vec::new(), ty, args.span)))
    }

    /// `component.value`
    pub(super) fn value_of(&mut self, component: &Name, value: &Name, span: Span) -> Option<Got> {
        let Some(found) = (self.context.components)(&component.text) else {
            if !self.context.names.contains(&component.text.as_str()) {
                let help = match closest(&component.text, self.context.names.iter().copied()) {
                    Some(known) => format!("did you mean `{known}.{}`?", value.text),
                    None => "name a component of the model that is applied before".into(),
                };
                self.error(
                    "unknown-name",
                    component.span,
                    format!("no component is called `{}`", component.text),
                    help,
                );
            }
            return None;
        };
        let Component::Defined(defined) = found else {
            let kind = found.kind().section().name;
            let message =
                format!("`{}` is a component of kind `{kind}`, whose values have no names", component.text);
            let help = "values of a component that is defined have names: write it as a definition";
            self.error("unknown-name", component.span, message, help);
            return None;
        };
        let context = self.inside(span)?;
        let mut other = Elaborator::new(&defined.definition, context, HashMap::new());
        other.settings(&defined.settings);
        other.statements(&defined.definition.body, true);
        let Some(Got::Value(id)) = other.outer(&value.text) else {
            if other.found.is_empty() {
                let names: Vec<&str> = other.scope.keys().map(String::as_str).collect();
                let help = match closest(&value.text, names.iter().copied()) {
                    Some(known) => format!("did you mean `{}.{known}`?", component.text),
                    None => format!("its values are {}", crate::suggest::listing(names)),
                };
                let message = format!("`{}` has no value `{}`", component.text, value.text);
                self.error("unknown-name", value.span, message, help);
            }
            return None;
        };
        let node = other.graph.region.node(id);
        let name = node.name.clone().unwrap_or_else(|| value.text.clone());
        let ty = node.ty.clone();
        let sizes: Vec<(String, u64)> =
            ty.dims.iter().map(|dim| (other.graph.name(*dim).to_string(), other.graph.size(*dim))).collect();
        let mut dims = Vec::new();
        for (dim, size) in sizes {
            let own = self.dims.get(&dim).map(|own| self.graph.size(*own)).or_else(|| {
                self.settings
                    .get(dim.as_str())
                    .and_then(|own| own.and_then(Number::whole).map(|own| own as u64))
            });
            if let Some(own) = own.filter(|own| *own != size) {
                let message = format!("`{dim}` is {own} here, and {size} in `{}`", component.text);
                self.error(
                    "dimensions",
                    span,
                    message,
                    "give the dimension another name in one of the definitions",
                );
                return None;
            }
            dims.push(self.intern(&dim, size, span));
        }
        let ty = Type { dims, ..ty };
        self.outside(Function::ValueOf(component.text.clone(), name), ty, span).map(Got::Value)
    }

    /// `sequence(x) { heads 4 }`
    pub(super) fn apply(&mut self, call: &Call, span: Span) -> Option<Got> {
        let name = call.name.text.as_str();
        if name == self.definition.name.text {
            let help = "a definition applies others, not itself: `recur` applies a component several times";
            self.error("circle", call.name.span, format!("`{name}` applies itself"), help);
            return None;
        }
        let kind = Kind::BUILT_IN.into_iter().find(|kind| kind.section().name == name);
        let own: &'a syntax::Definition = self.definition;
        let defined = own.uses.get(name);
        if kind.is_none() && defined.is_none() {
            let kinds = Kind::BUILT_IN.iter().map(|kind| kind.section().name);
            let kinds: Vec<&str> = kinds.chain(self.definition.uses.keys().map(String::as_str)).collect();
            self.unknown_function(call, &kinds);
            return None;
        }
        if self.inner.is_some() {
            let message = format!("`{name}` stands in a recurrence or a score");
            self.error("nested", call.name.span, message, "apply it above, and read its value");
            return None;
        }
        let [syntax::Argument { kind: syntax::ArgumentKind::Value(argument), .. }] =
            call.arguments.as_slice()
        else {
            let message = format!("`{name}` is a component, and takes one value");
            self.error("missing-argument", call.name.span, message, format!("write `{name}(x) {{ … }}`"));
            return None;
        };
        let got = self.expr(argument)?;
        let value = self.id(got, argument.span);
        let hidden = self.hidden_dim(span);
        let ty = self.ty(value).clone();
        if ty.dims != [hidden] || !ty.per_token {
            let message = format!("a component is given `[hidden]`, not `{}`", self.shown(&ty.dims));
            let (at, note) = self.origin(argument.bare(), value);
            let error = Diagnostic::error("dimensions", message).on(argument.span).related(at, note);
            self.found
                .push(error.help(format!("write `{name}(linear({}, [hidden]))`", short(argument.bare()))));
            return None;
        }
        let numbers: Vec<(String, Option<Number>)> =
            self.settings.iter().map(|(name, number)| (name.to_string(), *number)).collect();
        let keys = call.keys.clone().unwrap_or_default();
        let (component, found) = match (kind, defined) {
            (_, Some(definition)) => {
                let context = self.inside(call.name.span)?;
                Defined::applied(definition, &keys, call.name.span, numbers, context)
            }
            (Some(kind), None) => kind.applied(&keys, call.name.span, numbers, self.context.hidden),
            (None, None) => return None,
        };
        self.found.extend(found);
        let count = self.paths.entry(self.label.clone()).or_insert(0);
        *count += 1;
        let path = if *count > 1 { format!("{}{count}", self.label) } else { self.label.clone() };
        let ty = Type { dims: vec![hidden], per_token: true, places_of: None };
        let applied = Applied { component: component?, path };
        Some(Got::Value(self.push(Function::Apply(Box::new(applied)), vec![value], ty, span)))
    }
}

/// Whether dimensions of lists come first among those of heads, where those that keys also have
/// come before the others: heads of one list are then adjacent.
fn begins(heads: &[DimId], of_keys: &[DimId], lists: &[DimId]) -> bool {
    let shared = of_keys.iter().copied().filter(|dim| heads.contains(dim));
    let rest = heads.iter().copied().filter(|dim| !of_keys.contains(dim));
    let order: Vec<DimId> = shared.chain(rest).collect();
    order.get(..lists.len()).is_some_and(|first| first.iter().all(|dim| lists.contains(dim)))
}

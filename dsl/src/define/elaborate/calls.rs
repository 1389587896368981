//! Calls: their arguments, and the functions of one token.

use super::*;
use crate::define::functions::{Entry, FUNCTIONS, Form, INITS, function};
use crate::define::syntax::{Argument, ArgumentKind, Call, DimExpr, ExprKind, Operator};

/// The arguments of a call that are not read yet.
pub(super) struct Args<'c> {
    pub(super) call: &'c Call,
    pub(super) entry: &'static Entry,
    pub(super) span: Span,
    values: Vec<&'c Expr>,
    named: Vec<(&'c Name, &'c Expr)>,
    words: Vec<(&'c Name, &'c [Expr])>,
    dims: Vec<(&'c [DimExpr], Span)>,
}

impl<'c> Args<'c> {
    fn new(call: &'c Call, entry: &'static Entry, span: Span) -> Args<'c> {
        let (mut values, mut named, mut words, mut dims) = (vec![], vec![], vec![], vec![]);
        for Argument { kind, span } in &call.arguments {
            match kind {
                ArgumentKind::Value(value) => values.push(value),
                ArgumentKind::Named(name, value) => named.push((name, value)),
                ArgumentKind::Word(name, operands) => words.push((name, operands.as_slice())),
                ArgumentKind::Dims(list) => dims.push((list.as_slice(), *span)),
            }
        }
        Args { call, entry, span, values, named, words, dims }
    }

    /// The next value.
    pub(super) fn next(&mut self) -> Option<&'c Expr> {
        (!self.values.is_empty()).then(|| self.values.remove(0))
    }

    /// The value after `name =`.
    pub(super) fn named(&mut self, name: &str) -> Option<&'c Expr> {
        let place = self.named.iter().position(|(own, _)| own.text == name)?;
        Some(self.named.remove(place).1)
    }

    /// The operands of a word.
    pub(super) fn word(&mut self, word: &str) -> Option<(&'c Name, &'c [Expr])> {
        let place = self.words.iter().position(|(own, _)| own.text == word)?;
        Some(self.words.remove(place))
    }

    /// Whether a word stands alone, after the first value.
    pub(super) fn flag(&mut self, word: &str) -> Option<Span> {
        let is = |value: &&Expr| matches!(&value.kind, ExprKind::Name(name) if name == word);
        let place = self.values.iter().position(is)?;
        Some(self.values.remove(place).span)
    }

    /// Dimensions in brackets.
    fn brackets(&mut self) -> Option<(&'c [DimExpr], Span)> {
        (!self.dims.is_empty()).then(|| self.dims.remove(0))
    }
}

impl<'a> Elaborator<'a> {
    pub(super) fn call(&mut self, call: &Call, span: Span) -> Option<Got> {
        let Some(entry) = function(&call.name.text) else { return self.apply(call, span) };
        if let Some(keys) = &call.keys {
            let message = format!("`{}` is a function, and has no keys", entry.name);
            self.error("unexpected", keys.span, message, format!("write `{}`", entry.call));
        }
        let before = self.found.len();
        let mut args = Args::new(call, entry, span);
        let got = self.function(&mut args);
        if got.is_some() && self.found.len() == before {
            self.left_over(&args);
        }
        got.filter(|_| self.found.len() == before)
    }

    fn function(&mut self, args: &mut Args) -> Option<Got> {
        self.fits_score(args)?;
        match args.entry.form {
            Form::Unary(f) => {
                let value = self.value(args, "value")?;
                self.unary(f, value.0, args.span)
            }
            Form::Binary(f) => {
                let (a, b) = (self.value(args, "first number"), self.value(args, "second number"));
                self.two(f, args.entry.name, a?, b?, args.span)
            }
            Form::Where => self.choose(args),
            Form::Clip => self.clip(args),
            Form::Reduce(how) => self.reduce(how, args),
            Form::Softmax => {
                let (value, over) = self.over(args, "value")?;
                let [dim] = self.one_dim(&over, args)?;
                let ty = self.ty(value).clone();
                Some(Got::Value(self.push(Function::Softmax(dim), vec![value], ty, args.span)))
            }
            Form::Norm(how) => self.norm(how, args),
            Form::Dot => {
                let (a, b) = (self.tensor(args, "first value"), self.tensor(args, "second value"));
                let ((a, left), (b, _)) = (a?, b?);
                let dims = expr::union(&self.ty(a).dims, &self.ty(b).dims);
                let over = self.over_of(args, left, &dims)?;
                self.dot(a, b, over, args.span)
            }
            Form::Outer => {
                let (a, b) = (self.tensor(args, "first value"), self.tensor(args, "second value"));
                let (a, b) = (a?.0, b?.0);
                let (of_a, of_b) = (self.ty(a).clone(), self.ty(b).clone());
                let dims = expr::union(&of_a.dims, &of_b.dims);
                let ty = Type { dims, per_token: of_a.per_token || of_b.per_token, places_of: None };
                Some(Got::Value(self.push(Function::Outer, vec![a, b], ty, args.span)))
            }
            Form::Linear => self.linear(args),
            Form::Weight => self.own_weight(args),
            Form::Embedding => self.only_outside(args).and_then(|()| self.embedding(args)),
            Form::Split => self.split(args),
            Form::Merge => self.merge(args),
            Form::Join => self.join(args),
            Form::Slice => self.slice(args),
            Form::Places => self.places(args),
            Form::Top => self.top(args),
            Form::Pick => self.pick(args),
            Form::Rope => self.rope(args),
            Form::Stop => {
                let value = self.tensor(args, "value")?.0;
                let ty = self.ty(value).clone();
                Some(Got::Value(self.push(Function::Stop, vec![value], ty, args.span)))
            }
            Form::Noise => {
                let deviation = self.known_number(args, "deviation")?;
                let ty = Type { dims: vec![self.hidden_dim(args.span)], per_token: true, places_of: None };
                self.only_outside(args)?;
                Some(Got::Value(self.push(Function::Noise(deviation), Vec::new(), ty, args.span)))
            }
            Form::Shift => self.only_outside(args).and_then(|()| self.shift(args)),
            Form::Conv => self.only_outside(args).and_then(|()| self.conv(args)),
            Form::Running => self.only_outside(args).and_then(|()| self.running(args)),
            Form::Average => self.only_outside(args).and_then(|()| self.average(args)),
            Form::ChooseKeys => self.only_outside(args).and_then(|()| self.choose_keys(args)),
            Form::Attend => self.only_outside(args).and_then(|()| self.attend(args)),
            Form::Scores => self.only_outside(args).and_then(|()| self.scores(args)),
            Form::Mass => self.only_outside(args).and_then(|()| self.mass(args)),
            Form::DepthAttend => self.only_outside(args).and_then(|()| self.depth_attend(args)),
            Form::Earlier => self.only_outside(args).and_then(|()| self.earlier(args)),
        }
    }

    // Arguments -----------------------------------------------------------------------------------

    /// Reports arguments that the function does not read.
    fn left_over(&mut self, args: &Args) {
        let right = |name: &str| format!("write `{}`, `{name}` is none of it", args.entry.call);
        let words: Vec<&str> = args
            .entry
            .call
            .split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
            .filter(|word| !word.is_empty())
            .collect();
        let mut unexpected: Vec<(Span, String)> = Vec::new();
        unexpected.extend(args.values.iter().map(|value| (value.span, short(value))));
        unexpected.extend(args.named.iter().map(|(name, _)| (name.span, name.text.clone())));
        unexpected.extend(args.words.iter().map(|(name, _)| (name.span, name.text.clone())));
        unexpected.extend(args.dims.iter().map(|(_, span)| (*span, "[…]".into())));
        for (span, text) in unexpected {
            let help = match closest(&text, words.iter().copied()).filter(|known| *known != text) {
                Some(known) => format!("did you mean `{known}`? It is `{}`", args.entry.call),
                None => right(&text),
            };
            self.error(
                "unexpected",
                span,
                format!("`{}` does not take this argument", args.entry.name),
                help,
            );
        }
    }

    fn missing(&mut self, args: &Args, role: &str) {
        let message = format!("`{}` has no {role}", args.entry.name);
        self.error("missing-argument", args.call.name.span, message, format!("write `{}`", args.entry.call));
    }

    /// The next argument as it is.
    fn value<'c>(&mut self, args: &mut Args<'c>, role: &str) -> Option<(Got, &'c Expr)> {
        let Some(expr) = args.next() else {
            self.missing(args, role);
            return None;
        };
        Some((self.expr(expr)?, expr))
    }

    /// The next argument as a value with dimensions.
    pub(super) fn tensor<'c>(&mut self, args: &mut Args<'c>, role: &str) -> Option<(ValueId, &'c Expr)> {
        let (got, expr) = self.value(args, role)?;
        Some((self.id(got, expr.span), expr))
    }

    /// The next argument as a number that is known.
    fn known_number(&mut self, args: &mut Args, role: &str) -> Option<f64> {
        let Some(expr) = args.next() else {
            self.missing(args, role);
            return None;
        };
        self.number(expr).map(Number::real)
    }

    /// The next argument as a size, and the setting that it is.
    pub(super) fn size_of<'c>(
        &mut self,
        args: &mut Args<'c>,
        role: &str,
        least: u64,
    ) -> Option<(u64, &'c Expr)> {
        let Some(expr) = args.next() else {
            self.missing(args, role);
            return None;
        };
        let role = format!("the {role} of `{}`", args.entry.name);
        Some((self.size(expr, &role, least)?, expr))
    }

    /// A dimension of that size: the setting's where the size is one.
    pub(super) fn dim_of_size(&mut self, expr: &Expr, size: u64, name: &str) -> DimId {
        match &expr.bare().kind {
            ExprKind::Name(setting) if self.settings.contains_key(setting.as_str()) => {
                self.intern(setting, size, expr.span)
            }
            _ => self.own_dim(name, size, expr.span),
        }
    }

    /// The next value and the dimensions after `over`.
    fn over(&mut self, args: &mut Args, role: &str) -> Option<(ValueId, Vec<DimId>)> {
        let (value, expr) = self.tensor(args, role)?;
        let dims = self.ty(value).dims.clone();
        Some((value, self.over_of(args, expr, &dims)?))
    }

    /// The dimensions after `over`; the value's only one where `over` is missing.
    pub(super) fn over_of(&mut self, args: &mut Args, value: &Expr, dims: &[DimId]) -> Option<Vec<DimId>> {
        let Some((word, names)) = args.word("over") else {
            if let [dim] = dims {
                return Some(vec![*dim]);
            }
            let (message, help) = match dims {
                [] => (
                    format!("`{}` needs a value with dimensions: this is a number", args.entry.name),
                    format!("write `{}`", args.entry.call),
                ),
                _ => {
                    let shown = self.shown(dims);
                    let last = dims.last().map_or("", |dim| self.graph.name(*dim));
                    (
                        format!("`{}` does not say over which dimension of `{shown}`", args.entry.name),
                        format!("write `{}({}, over {last})`", args.entry.name, short(value.bare())),
                    )
                }
            };
            self.error("missing-argument", args.call.name.span, message, help);
            return None;
        };
        if names.is_empty() {
            self.error(
                "missing-argument",
                word.span,
                "`over` names no dimension",
                format!("write `{}`", args.entry.call),
            );
            return None;
        }
        let mut over = Vec::new();
        let mut right = true;
        for name in names {
            let ExprKind::Name(text) = &name.kind else {
                self.error(
                    "unknown-dimension",
                    name.span,
                    "this is no name of a dimension",
                    "write `over` and names",
                );
                right = false;
                continue;
            };
            match self.dims.get(text).copied().filter(|dim| dims.contains(dim)) {
                Some(dim) if over.contains(&dim) => {
                    let message = format!("`{text}` stands twice");
                    self.error("dimensions", name.span, message, "a dimension is named once");
                    right = false;
                }
                Some(dim) => over.push(dim),
                None => {
                    self.unknown_dim(text, name.span, Some((value, dims)));
                    right = false;
                }
            }
        }
        right.then_some(over)
    }

    fn one_dim(&mut self, over: &[DimId], args: &Args) -> Option<[DimId; 1]> {
        match over {
            [dim] => Some([*dim]),
            _ => {
                let message =
                    format!("`{}` is over one dimension, not {}", args.entry.name, self.shown(over));
                self.error("dimensions", args.span, message, "`merge` them first");
                None
            }
        }
    }

    // Elements ------------------------------------------------------------------------------------

    fn choose(&mut self, args: &mut Args) -> Option<Got> {
        let (c, a, b) = (
            self.value(args, "condition"),
            self.value(args, "first value"),
            self.value(args, "second value"),
        );
        let ((c, of_c), (a, of_a), (b, of_b)) = (c?, a?, b?);
        if let Got::Number(c) = c {
            return Some(if c != 0.0 { a } else { b });
        }
        let (c, a, b) = (self.id(c, of_c.span), self.id(a, of_a.span), self.id(b, of_b.span));
        let between = self.fit("where", (a, of_a), (b, of_b), args.span)?;
        let of = self.ty(c).clone();
        let larger = |a: &Type, b: &Type| b.dims.iter().all(|dim| a.dims.contains(dim));
        let per_token = of.per_token || between.per_token;
        let dims = if larger(&between, &of) {
            between.dims
        } else if larger(&of, &between) {
            of.dims
        } else {
            self.fit("where", (c, of_c), (a, of_a), args.span)?;
            self.fit("where", (c, of_c), (b, of_b), args.span)?.dims
        };
        let ty = Type { dims, per_token, places_of: None };
        Some(Got::Value(self.push(Function::Where, vec![c, a, b], ty, args.span)))
    }

    /// `clip(v, low, high)` is `min(max(v, low), high)`.
    fn clip(&mut self, args: &mut Args) -> Option<Got> {
        let (v, low, high) =
            (self.value(args, "value"), self.value(args, "lower bound"), self.value(args, "upper bound"));
        let (v, low, high) = (v?, low?, high?);
        let value = self.two(Binary::Max, "clip", v, low, args.span)?;
        self.two(Binary::Min, "clip", (value, v.1), high, args.span)
    }

    // Dimensions ----------------------------------------------------------------------------------

    fn reduce(&mut self, how: Reduce, args: &mut Args) -> Option<Got> {
        if let (Reduce::Sum, Some(expr)) = (how, args.values.first())
            && let Some((outer, left, right)) = product(expr)
        {
            let whole = *expr;
            args.next();
            let (x, y) = (self.expr(left), self.expr(right));
            let (x, y) = (self.id(x?, left.span), self.id(y?, right.span));
            let dims = match outer {
                true => expr::union(&self.ty(x).dims, &self.ty(y).dims),
                false => self.fit("*", (x, left), (y, right), whole.bare().span)?.dims,
            };
            let over = self.over_of(args, whole, &dims)?;
            return self.dot(x, y, over, args.span);
        }
        let (value, over) = self.over(args, "value")?;
        let ty = self.ty(value).clone();
        let dims = ty.dims.iter().filter(|dim| !over.contains(dim)).copied().collect();
        let ty = Type { dims, per_token: ty.per_token, places_of: None };
        Some(Got::Value(self.push(Function::Reduce(how, over), vec![value], ty, args.span)))
    }

    fn norm(&mut self, how: Norm, args: &mut Args) -> Option<Got> {
        let gain = args.flag("gain");
        let eps = match args.named("eps") {
            Some(expr) => {
                let eps = self.number(expr)?.real();
                if eps < 0.0 {
                    self.error("bad-number", expr.span, format!("`eps` is {eps}"), "it is 0 or above");
                    return None;
                }
                eps
            }
            None => 1e-6,
        };
        let (value, over) = self.over(args, "value")?;
        let ty = self.ty(value).clone();
        let mut operands = vec![value];
        if let Some(span) = gain {
            operands.push(self.weight(Purpose::Gain, over.clone(), 0, Some(Init::Constant(1.0)), span)?);
        }
        Some(Got::Value(self.push(Function::Norm { how, over, eps }, operands, ty, args.span)))
    }

    // Weights -------------------------------------------------------------------------------------

    fn linear(&mut self, args: &mut Args) -> Option<Got> {
        let bias = args.flag("bias");
        let (value, expr) = self.tensor(args, "value")?;
        let Some((written, _)) = args.brackets() else {
            self.missing(args, "dimensions of its result");
            return None;
        };
        let out = self.dims(written)?;
        let of = self.ty(value).clone();
        if of.dims.is_empty() {
            let message = "`linear` needs a value with dimensions: this is a number";
            self.error("dimensions", expr.span, message, "multiply it by `weight([dims])`");
            return None;
        }
        let over = match args.words.iter().any(|(word, _)| word.text == "over") {
            true => self.over_of(args, expr, &of.dims)?,
            false => of.dims.clone(),
        };
        let init = self.init(args)?;
        let purpose = match self.output {
            Some(span) if span == args.span && self.inner.is_none() => Purpose::Output,
            _ => Purpose::Matrix,
        };
        let inputs = over.len();
        let weight = self.weight(purpose, [&out[..], &over[..]].concat(), inputs, init, args.span)?;
        let mut operands = vec![value, weight];
        if let Some(span) = bias {
            operands.push(self.weight(Purpose::Bias, out.clone(), 0, Some(Init::Constant(0.0)), span)?);
        }
        // A dimension that stays and is written has a matrix for each of its places.
        let stays = of.dims.iter().filter(|dim| !over.contains(dim) && !out.contains(dim)).copied();
        let dims = stays.chain(out.iter().copied()).collect();
        let ty = Type { dims, per_token: of.per_token, places_of: None };
        Some(Got::Value(self.push(Function::Linear(over), operands, ty, args.span)))
    }

    fn own_weight(&mut self, args: &mut Args) -> Option<Got> {
        let Some((written, _)) = args.brackets() else {
            self.missing(args, "dimensions");
            return None;
        };
        let dims = self.dims(written)?;
        let init = self.init(args)?;
        self.weight(Purpose::Own, dims, 0, init, args.span).map(Got::Value)
    }

    fn embedding(&mut self, args: &mut Args) -> Option<Got> {
        let Some((written, _)) = args.brackets() else {
            self.missing(args, "dimensions");
            return None;
        };
        let dims = self.dims(written)?;
        let init = self.init(args)?;
        let ids = self.own_dim("vocab", self.context.vocab, args.span);
        let table = self.weight(Purpose::Own, [&[ids], &dims[..]].concat(), 0, init, args.span)?;
        let ty = Type { dims, per_token: true, places_of: None };
        Some(Got::Value(self.push(Function::Embedding, vec![table], ty, args.span)))
    }

    /// How a weight begins, where it is written; `None` where it is wrong.
    fn init(&mut self, args: &mut Args) -> Option<Option<Init>> {
        for (word, count, _) in INITS {
            if *count == 0 {
                if args.flag(word).is_some() {
                    return Some(Some(Init::Constant(f64::from(*word == "one"))));
                }
                continue;
            }
            let Some((name, operands)) = args.word(word) else { continue };
            if operands.len() != *count {
                let message = format!("`{word}` has {} numbers, not {count}", operands.len());
                let help = if *count == 1 {
                    format!("write `{word} 0.02`")
                } else {
                    format!("write `{word} 0.001 0.1`")
                };
                self.error("missing-argument", name.span, message, help);
                return None;
            }
            let numbers: Vec<_> =
                operands.iter().map(|operand| self.number(operand).map(Number::real)).collect();
            let numbers = numbers.into_iter().collect::<Option<Vec<f64>>>()?;
            return self.init_of(word, &numbers, name.span).map(Some);
        }
        let Some(number) = args.next() else { return Some(None) };
        if let ExprKind::Name(word) = &number.kind
            && self.settings.get(word.as_str()).is_none()
        {
            let names = INITS.iter().map(|(word, ..)| *word);
            let help = match closest(word, names.clone()) {
                Some(known) => format!("did you mean `{known}`?"),
                None => format!("write {}, or a number", crate::suggest::listing(names)),
            };
            self.error("unknown-name", number.span, format!("a weight cannot begin as `{word}`"), help);
            return None;
        }
        self.number(number).map(|number| Some(Init::Constant(number.real())))
    }

    fn init_of(&mut self, word: &str, numbers: &[f64], span: Span) -> Option<Init> {
        let (first, second) = (numbers[0], numbers.get(1).copied().unwrap_or_default());
        let (init, right, help) = match word {
            "normal" => (Init::Normal(first), first >= 0.0, "a standard deviation is 0 or above"),
            "uniform" => (Init::Uniform(first, second), first <= second, "the lower number stands first"),
            "ramp" => (Init::Ramp(first, second), true, ""),
            "log_uniform" => (
                Init::LogUniform(first, second),
                0.0 < first && first <= second,
                "write two numbers above 0, the lower first",
            ),
            _ => (
                Init::InverseSoftplusUniform(first, second),
                0.0 < first && first <= second,
                "write two step sizes above 0, the lower first",
            ),
        };
        if !right {
            let shown = numbers.iter().map(f64::to_string).collect::<Vec<_>>().join(" ");
            self.error("bad-number", span, format!("`{word} {shown}` is no distribution"), help);
            return None;
        }
        Some(init)
    }

    // Shapes --------------------------------------------------------------------------------------

    fn split(&mut self, args: &mut Args) -> Option<Got> {
        let (value, over) = self.over(args, "value")?;
        let [dim] = self.one_dim(&over, args)?;
        let Some((written, _)) = args.brackets() else {
            self.missing(args, "dimensions");
            return None;
        };
        let parts = self.dims(written)?;
        if self.graph.elements(&parts) != self.graph.size(dim) {
            let (whole, shown) = (self.sized(&[dim]), self.sized(&parts));
            let message = format!(
                "`{}` of {} does not split into `{shown}`",
                self.graph.name(dim),
                self.graph.size(dim)
            );
            let help =
                format!("expected sizes whose product is {}: `{whole}` is split", self.graph.size(dim));
            let at = self.graph.dims[dim.0 as usize].span;
            let error = Diagnostic::error("sizes", message).on(args.span).help(help);
            self.found.push(error.related(at, format!("`{}` appears here", self.graph.name(dim))));
            return None;
        }
        let ty = self.ty(value).clone();
        let dims: Vec<DimId> =
            ty.dims.iter().flat_map(|own| if *own == dim { parts.clone() } else { vec![*own] }).collect();
        self.distinct(&dims, args.span)?;
        let ty = Type { dims, ..ty };
        Some(Got::Value(self.push(Function::Split(dim, parts), vec![value], ty, args.span)))
    }

    /// Reports a value that would have a dimension twice.
    pub(super) fn distinct(&mut self, dims: &[DimId], span: Span) -> Option<()> {
        let twice = dims.iter().enumerate().find(|(place, dim)| dims[..*place].contains(dim));
        let Some((_, dim)) = twice else { return Some(()) };
        let message =
            format!("the result would have `{}` twice: `{}`", self.graph.name(*dim), self.shown(dims));
        self.error("dimensions", span, message, "give the new dimension another name: `[part: 4]`");
        None
    }

    fn merge(&mut self, args: &mut Args) -> Option<Got> {
        let (value, over) = self.over(args, "value")?;
        let ty = self.ty(value).clone();
        let begin = ty.dims.iter().position(|dim| *dim == over[0]).unwrap_or(0);
        if ty.dims.get(begin..begin + over.len()) != Some(&over[..]) {
            let message =
                format!("`{}` do not stand side by side in `{}`", self.shown(&over), self.shown(&ty.dims));
            self.error("dimensions", args.span, message, "name neighbours in their order");
            return None;
        }
        let size = self.graph.elements(&over);
        let Some((written, span)) = args.brackets() else {
            self.missing(args, "name for the new dimension");
            return None;
        };
        let [own] = written else {
            self.error(
                "dimensions",
                span,
                "`merge` makes one dimension",
                format!("write `{}`", args.entry.call),
            );
            return None;
        };
        let merged = self.dim(own, Some(size))?;
        self.must_be(merged, size, own.name.span, &self.sized(&over))?;
        let mut dims = ty.dims.clone();
        dims.splice(begin..begin + over.len(), [merged]);
        self.distinct(&dims, args.span)?;
        let ty = Type { dims, ..ty };
        Some(Got::Value(self.push(Function::Merge(over, merged), vec![value], ty, args.span)))
    }

    /// Reports a dimension that has not the size which a function gives it.
    fn must_be(&mut self, dim: DimId, size: u64, span: Span, of: &str) -> Option<()> {
        let own = self.graph.size(dim);
        if own == size {
            return Some(());
        }
        let message = format!("`{}` is {own}, and {of} gives {size}", self.graph.name(dim));
        let at = self.graph.dims[dim.0 as usize].span;
        let error = Diagnostic::error("sizes", message).on(span).related(at, format!("{own} here"));
        self.found.push(error.help("choose another name, which has the size that it is given"));
        None
    }

    fn join(&mut self, args: &mut Args) -> Option<Got> {
        let mut parts = Vec::new();
        while !args.values.is_empty() {
            parts.push(self.tensor(args, "value")?);
        }
        let along = args.word("along");
        let name = match along {
            Some((_, [Expr { kind: ExprKind::Name(name), span }])) => {
                Name { text: name.clone(), span: *span }
            }
            _ => {
                self.missing(args, "dimension: `along d`");
                return None;
            }
        };
        if parts.len() < 2 {
            self.missing(args, "second value");
            return None;
        }
        let types: Vec<Type> = parts.iter().map(|(id, _)| self.ty(*id).clone()).collect();
        let common = |dim: &DimId| types.iter().all(|ty| ty.dims.contains(dim));
        let mut own = Vec::new();
        for ((id, expr), ty) in parts.iter().zip(&types) {
            let rest: Vec<DimId> = ty.dims.iter().filter(|dim| !common(dim)).copied().collect();
            // Values of equal dimensions are joined along their last.
            let same = types.iter().all(|other| other.dims == ty.dims);
            match (rest.as_slice(), ty.dims.last()) {
                ([dim], _) => own.push(*dim),
                ([], Some(last)) if same => own.push(*last),
                _ => {
                    let (first, note) = self.origin(parts[0].1.bare(), parts[0].0);
                    let message = format!(
                        "`join` does not see which dimension becomes a part: `{}` and `{}`",
                        self.shown(&types[0].dims),
                        self.shown(&ty.dims)
                    );
                    let _ = id;
                    let error = Diagnostic::error("dimensions", message).on(expr.span).related(first, note);
                    self.found.push(error.help("each value has one dimension that not all have"));
                    return None;
                }
            }
        }
        let size = own.iter().map(|dim| self.graph.size(*dim)).fold(0, u64::saturating_add);
        let written = DimExpr { name, size: None };
        let joined = self.dim(&written, Some(size))?;
        self.must_be(joined, size, written.name.span, "`join`")?;
        let place = |dim: &DimId| if *dim == own[0] { joined } else { *dim };
        let dims: Vec<DimId> = types[0].dims.iter().map(place).collect();
        self.distinct(&dims, args.span)?;
        let per_token = types.iter().any(|ty| ty.per_token);
        let ty = Type { dims, per_token, places_of: None };
        let values = parts.iter().map(|(id, _)| *id).collect();
        Some(Got::Value(self.push(Function::Join(joined, own), values, ty, args.span)))
    }

    fn slice(&mut self, args: &mut Args) -> Option<Got> {
        let (value, over) = self.over(args, "value")?;
        let [of] = self.one_dim(&over, args)?;
        let (from, _) = self.size_of(args, "first place", 0)?;
        let Some(([own], span)) = args.brackets() else {
            self.missing(args, "dimension in its stead");
            return None;
        };
        let to = self.dim(own, None)?;
        let (size, part) = (self.graph.size(of), self.graph.size(to));
        if from.saturating_add(part) > size {
            let message = format!(
                "the places {from} to {} do not lie in `{}`, which has {size}",
                from.saturating_add(part) - 1,
                self.graph.name(of)
            );
            let at = self.graph.dims[of.0 as usize].span;
            let error = Diagnostic::error("sizes", message).on(span).related(at, format!("{size} here"));
            self.found.push(
                error.help(format!("`{}` has {part}: begin earlier, or take fewer", self.graph.name(to))),
            );
            return None;
        }
        let ty = self.ty(value).clone();
        let dims: Vec<DimId> = ty.dims.iter().map(|dim| if *dim == of { to } else { *dim }).collect();
        self.distinct(&dims, args.span)?;
        let ty = Type { dims, ..ty };
        Some(Got::Value(self.push(Function::Slice { of, from, to }, vec![value], ty, args.span)))
    }

    fn places(&mut self, args: &mut Args) -> Option<Got> {
        let Some(Expr { kind: ExprKind::Name(name), span }) = args.next() else {
            self.missing(args, "dimension");
            return None;
        };
        let written = DimExpr { name: Name { text: name.clone(), span: *span }, size: None };
        let dim = self.dim(&written, None)?;
        let ty = Type { dims: vec![dim], ..Type::default() };
        self.outside(Function::Head(dim), ty, args.span).map(Got::Value)
    }

    fn top(&mut self, args: &mut Args) -> Option<Got> {
        let (value, expr) = self.tensor(args, "value")?;
        let (count, written) = self.size_of(args, "number of choices", 1)?;
        let dims = self.ty(value).dims.clone();
        let over = self.over_of(args, expr, &dims)?;
        let [over] = self.one_dim(&over, args)?;
        if count > self.graph.size(over) {
            let message = format!(
                "`top` chooses {count} of `{}`, which has {}",
                self.graph.name(over),
                self.graph.size(over)
            );
            self.error("sizes", written.span, message, "choose at most as many as there are");
            return None;
        }
        let choices = self.dim_of_size(written, count, "choices");
        let dims = dims.iter().map(|dim| if *dim == over { choices } else { *dim }).collect();
        let ty = Type { dims, per_token: self.ty(value).per_token, places_of: Some(over) };
        Some(Got::Value(self.push(Function::Top { over, choices }, vec![value], ty, args.span)))
    }

    fn pick(&mut self, args: &mut Args) -> Option<Got> {
        let (value, places) = (self.tensor(args, "value"), self.tensor(args, "places"));
        let ((value, expr), (places, chosen)) = (value?, places?);
        let (of, at) = (self.ty(value).clone(), self.ty(places).clone());
        let Some(dim) = at.places_of else {
            let (span, note) = self.origin(chosen.bare(), places);
            let error =
                Diagnostic::error("wrong-type", "`pick` needs places, which `top` gives").on(chosen.span);
            self.found.push(error.related(span, note).help("write `pick(v, top(scores, n, over d))`"));
            return None;
        };
        if !of.dims.contains(&dim) {
            let message = format!(
                "the places are of `{}`, which `{}` has not",
                self.graph.name(dim),
                self.shown(&of.dims)
            );
            let (span, note) = self.origin(expr.bare(), value);
            let (from, choice) = self.origin(chosen.bare(), places);
            let error = Diagnostic::error("dimensions", message).on(args.span).related(span, note);
            self.found.push(error.related(from, choice).help("pick from a value with that dimension"));
            return None;
        }
        let rest: Vec<DimId> = of.dims.iter().filter(|own| **own != dim).copied().collect();
        let ty = Type {
            dims: expr::union(&at.dims, &rest),
            per_token: of.per_token || at.per_token,
            places_of: None,
        };
        Some(Got::Value(self.push(Function::Pick, vec![value, places], ty, args.span)))
    }

    fn rope(&mut self, args: &mut Args) -> Option<Got> {
        let (value, expr) = self.tensor(args, "value")?;
        let base = self.known_number(args, "base")?;
        if base <= 1.0 {
            self.error(
                "bad-number",
                args.span,
                format!("the base of `rope` is {base}"),
                "it is above 1, such as 10000",
            );
            return None;
        }
        let dims = self.ty(value).dims.clone();
        let over = match args.words.iter().any(|(word, _)| word.text == "over") {
            true => self.over_of(args, expr, &dims)?,
            false => dims.last().map(|last| vec![*last]).unwrap_or_default(),
        };
        let [over] = self.one_dim(&over, args)?;
        if !self.graph.size(over).is_multiple_of(2) {
            let message =
                format!("`rope` turns pairs, and `{}` is {}", self.graph.name(over), self.graph.size(over));
            let at = self.graph.dims[over.0 as usize].span;
            let error =
                Diagnostic::error("sizes", message).on(args.span).related(at, "its size appears here");
            self.found.push(error.help("choose an even size"));
            return None;
        }
        let at = match args.word("at") {
            None => Turn::Position,
            Some((word, operands)) => match operands {
                [Expr { kind: ExprKind::Name(name), .. }] if name == "position" => Turn::Position,
                [Expr { kind: ExprKind::Name(name), .. }] if name == "depth" => Turn::Depth,
                _ => {
                    let help = "write `at position` or `at depth`";
                    self.error("unknown-name", word.span, "`rope` turns by the position or the depth", help);
                    return None;
                }
            },
        };
        let ty =
            Type { per_token: self.ty(value).per_token || at == Turn::Position, ..self.ty(value).clone() };
        Some(Got::Value(self.push(Function::Rope { base, over, at }, vec![value], ty, args.span)))
    }

    /// Applies another component: reports a name that is no function either.
    pub(super) fn unknown_function(&mut self, call: &Call, kinds: &[&str]) {
        let name = &call.name.text;
        let names = FUNCTIONS.iter().map(|entry| entry.name).chain(kinds.iter().copied());
        let known = closest(name, names);
        let help = match (known, synonym(name)) {
            (_, Some(help)) => help.to_string(),
            (Some(known), _) => match function(known) {
                Some(entry) => format!("did you mean `{}`?", entry.call),
                None => format!("did you mean `{known}(x) {{ … }}`?"),
            },
            (None, None) => {
                "docs/language.md lists the functions; another definition stands above this one".into()
            }
        };
        self.error("unknown-function", call.name.span, format!("there is no function `{name}`"), help);
    }
}

/// The spelling here of functions of other programs.
fn synonym(name: &str) -> Option<&'static str> {
    Some(match name {
        "einsum" | "matmul" | "bmm" | "mm" => {
            "write `dot(a, b, over d)`; a product with a weight is `linear(v, [dims])`"
        }
        "swish" => "write `silu(v)`",
        "norm" | "normalize" | "normalise" => {
            "write `l2(v, over d)`, `rms(v, over d)` or `layer_norm(v, over d)`"
        }
        "concat" | "cat" | "concatenate" => "write `join(a, b, along d)`",
        "reshape" | "view" | "rearrange" => {
            "write `split(v, over d, [a, b])` or `merge(v, over a b, [d: a * b])`"
        }
        "transpose" | "permute" => "dimensions have names, and no order that a formula sees: leave it out",
        "cumsum" => "write `running(v)`",
        "conv1d" => "write `conv(v, width)`",
        "dense" | "Linear" | "proj" => "write `linear(v, [dims])`",
        "attention" | "scaled_dot_product_attention" | "sdpa" => "write `attend(q, k, v)`",
        "topk" => "write `top(v, n, over d)`",
        "gather" => "write `pick(v, places)`",
        "detach" | "stop_gradient" => "write `stop(v)`",
        "pow" => "write `square(v)`, or `exp(p * log(v))`",
        "clamp" => "write `clip(v, low, high)`",
        "parameter" | "param" | "Parameter" => "write `weight([dims], init)`",
        _ => return None,
    })
}

/// The two factors of a product, and whether it is an `outer`.
fn product(expr: &Expr) -> Option<(bool, &Expr, &Expr)> {
    match &expr.bare().kind {
        ExprKind::Binary(Operator::Multiply, a, b) => Some((false, a, b)),
        ExprKind::Call(call) if call.name.text == "outer" => match call.arguments.as_slice() {
            [
                Argument { kind: ArgumentKind::Value(a), .. },
                Argument { kind: ArgumentKind::Value(b), .. },
            ] => Some((true, a, b)),
            _ => None,
        },
        _ => None,
    }
}

//! Values that are computed together: the step of a recurrence, the score and the mask of an
//! attention.

use super::*;
use crate::define::functions::Group;
use crate::define::syntax::ExprKind;

/// The words of a score stand in no value outside: a place of their own among what is read.
const WORD: ValueId = ValueId(u32::MAX);

impl<'a> Elaborator<'a> {
    /// Reports a function that does not belong into the region that is being written.
    pub(super) fn only_outside(&mut self, args: &calls::Args) -> Option<()> {
        let name = args.entry.name;
        let (message, help) = match self.inner.as_ref().map(|inner| &inner.of) {
            None => return Some(()),
            Some(Of::Recurrence { .. }) => (
                format!("`{name}` stands in a recurrence, which computes one token at a time"),
                format!("name its value above `recurrence`, and read that: `v = {name}(…)`"),
            ),
            Some(Of::Score { word, .. }) => (
                format!("`{name}` stands in a {word}, which is computed for every pair of tokens"),
                "name its value above, and read that as `v[i]` or `v[j]`".to_string(),
            ),
        };
        self.error("nested", args.call.name.span, message, help);
        None
    }

    /// Reports a function in a score that is not element by element.
    pub(super) fn fits_score(&mut self, args: &calls::Args) -> Option<()> {
        let Some(Inner { of: Of::Score { .. }, .. }) = &self.inner else { return Some(()) };
        let weight = matches!(args.entry.form, crate::define::functions::Form::Weight);
        if args.entry.group == Group::Elements || weight { Some(()) } else { self.only_outside(args) }
    }

    // Recurrences ---------------------------------------------------------------------------------

    pub(super) fn recurrence(&mut self, written: &'a syntax::Recurrence) {
        let mut states = Vec::new();
        let mut locals = IndexMap::new();
        let mut operands = Vec::new();
        let mut right = true;
        for state in &written.states {
            let free = self.may_name(&state.name) && !locals.contains_key(&state.name.text);
            self.label.clone_from(&state.name.text);
            let dims = self.dims(&state.dims);
            let from = match (&state.from, &dims) {
                (None, _) => Some(From::Number(0.0)),
                (Some(from), Some(dims)) => self.beginning(state, from, dims, &mut operands),
                (Some(_), None) => None,
            };
            let (Some(dims), Some(from), true) = (dims, from, free) else {
                right = false;
                locals.insert(state.name.text.clone(), Bound { span: state.name.span, is: None, read: true });
                continue;
            };
            let bound = Bound { span: state.name.span, is: None, read: true };
            locals.insert(state.name.text.clone(), bound);
            states.push(State { name: state.name.text.clone(), dims, from });
        }
        let count = locals.len();
        self.inner = Some(Inner {
            of: Of::Recurrence { locals, states: count },
            region: Region::default(),
            operands,
            reads: HashMap::new(),
        });
        if right {
            self.begin_states(&states, &written.states);
        }
        self.statements(&written.body, false);
        let Some(Inner { of: Of::Recurrence { locals, .. }, region, operands, .. }) = self.inner.take()
        else {
            return;
        };
        self.end_recurrence(written, states, locals, region, operands, right);
    }

    /// The states as the last token left them.
    fn begin_states(&mut self, states: &[State], written: &[syntax::State]) {
        for (place, (state, written)) in states.iter().zip(written).enumerate() {
            let ty = Type { dims: state.dims.clone(), per_token: true, places_of: None };
            let id = self.push(Function::State(place as u32), Vec::new(), ty.clone(), written.name.span);
            self.types.push((written.name.span, ty));
            if let Some(Inner { of: Of::Recurrence { locals, .. }, .. }) = &mut self.inner
                && let Some(bound) = locals.get_mut(&state.name)
            {
                bound.is = Some(Is::Got(Got::Value(id)));
            }
        }
    }

    /// The value of a state before the first token.
    fn beginning(
        &mut self,
        state: &syntax::State,
        from: &Expr,
        dims: &[DimId],
        operands: &mut Vec<ValueId>,
    ) -> Option<From> {
        match self.expr(from)? {
            Got::Number(number) => Some(From::Number(number)),
            Got::Value(id) => {
                let ty = self.ty(id).clone();
                if ty.per_token {
                    let message = format!("`{}` begins with a value of a token", state.name.text);
                    let help = "before the first token there is none: begin with a number or a weight";
                    let origin = self.origin(from.bare(), id);
                    let error = Diagnostic::error("token", message).on(from.span).related(origin.0, origin.1);
                    self.found.push(error.help(help));
                    return None;
                }
                if !ty.dims.iter().all(|dim| dims.contains(dim)) {
                    let (own, other) = (self.shown(dims), self.shown(&ty.dims));
                    let message = format!("`{}` is `{own}`, and begins as `{other}`", state.name.text);
                    let origin = self.origin(from.bare(), id);
                    let error =
                        Diagnostic::error("dimensions", message).on(from.span).related(origin.0, origin.1);
                    self.found.push(error.help("what it begins with has its dimensions, or some of them"));
                    return None;
                }
                operands.push(id);
                Some(From::Operand(operands.len() as u32 - 1))
            }
        }
    }

    /// `S = …` in the body of a recurrence.
    pub(super) fn new_state(&mut self, name: &Name, at: Span, got: Option<Got>) {
        let got = got.map(|got| self.id(got, at));
        let Some(Inner { of: Of::Recurrence { locals, .. }, .. }) = &self.inner else { return };
        let Some(bound) = locals.get(&name.text) else { return };
        let first = bound.span;
        let before = match bound.is {
            Some(Is::Got(Got::Value(id))) => Some(self.ty(id).dims.clone()),
            _ => None,
        };
        let mut is = got.map(|id| Is::Got(Got::Value(id)));
        if let (Some(dims), Some(id)) = (before, got) {
            let new = self.ty(id).dims.clone();
            if new.len() != dims.len() || !new.iter().all(|dim| dims.contains(dim)) {
                let message = format!(
                    "the state `{}` is `{}`, and becomes `{}`",
                    name.text,
                    self.shown(&dims),
                    self.shown(&new)
                );
                let error = Diagnostic::error("dimensions", message).on(at).related(first, "its dimensions");
                let help = match new.iter().all(|dim| dims.contains(dim)) {
                    true => "write `outer(a, b)` for a product with the dimensions of both",
                    false => "a state keeps its dimensions: sum over the others",
                };
                self.found.push(error.help(help));
                is = None;
            }
        }
        if let Some(Inner { of: Of::Recurrence { locals, .. }, .. }) = &mut self.inner
            && let Some(bound) = locals.get_mut(&name.text)
            && (is.is_some() || got.is_none())
        {
            bound.is = is.or(bound.is);
        }
    }

    fn end_recurrence(
        &mut self,
        written: &syntax::Recurrence,
        states: Vec<State>,
        locals: IndexMap<String, Bound>,
        mut region: Region,
        operands: Vec<ValueId>,
        right: bool,
    ) {
        for (place, state) in states.iter().enumerate() {
            let Some(Some(Is::Got(Got::Value(id)))) = locals.get(&state.name).map(|bound| bound.is) else {
                continue;
            };
            if right && region.node(id).function == Function::State(place as u32) {
                let span =
                    written.states.iter().find(|own| own.name.text == state.name).map(|own| own.name.span);
                let message = format!("the state `{}` never changes", state.name);
                let help = format!("assign it inside the braces: `{0} = {0} + …`", state.name);
                self.error("unchanged-state", span.unwrap_or(written.span), message, help);
            }
            region.results.push(id);
        }
        let body = Recurrence { states, body: region };
        let ty = Type { per_token: true, ..Type::default() };
        let function = Function::Recurrence(Box::new(body));
        let recurrence = self.push(function, operands, ty, written.span);
        for (name, bound) in locals {
            let is = match bound.is {
                Some(Is::Got(Got::Value(of))) => Some(Is::Emitted { recurrence, of }),
                Some(Is::Got(Got::Number(number))) => Some(Is::Got(Got::Number(number))),
                Some(Is::Emitted { .. }) | None => None,
            };
            self.scope.insert(name, Bound { is, ..bound });
        }
    }

    /// A value of a recurrence at every token.
    pub(super) fn emit(&mut self, recurrence: ValueId, of: ValueId, name: &str) -> ValueId {
        let region = &mut self.graph.region;
        let Function::Recurrence(inner) = &mut region.nodes[recurrence.0 as usize].function else {
            return recurrence;
        };
        let result = match inner.body.results.iter().position(|result| *result == of) {
            Some(place) => place,
            None => {
                inner.body.results.push(of);
                inner.body.results.len() - 1
            }
        };
        let Node { ty, span, .. } = inner.body.node(of);
        let (ty, span) = (Type { per_token: true, ..ty.clone() }, *span);
        let function = Function::Emitted(result as u32);
        region.nodes.push(Node { function, args: vec![recurrence], ty, name: Some(name.into()), span });
        ValueId(region.nodes.len() as u32 - 1)
    }

    // Scores --------------------------------------------------------------------------------------

    /// The region of a score or a mask, whose operands go on from those of the attention.
    pub(super) fn score(
        &mut self,
        word: &'static str,
        expr: &Expr,
        heads: &[DimId],
        operands: &mut Vec<ValueId>,
    ) -> Option<Region> {
        self.inner = Some(Inner {
            of: Of::Score { word, heads: heads.to_vec() },
            region: Region::default(),
            operands: std::mem::take(operands),
            reads: HashMap::new(),
        });
        let got = self.expr(expr);
        let id = got.map(|got| self.id(got, expr.span));
        let mut inner = self.inner.take()?;
        *operands = std::mem::take(&mut inner.operands);
        let id = id?;
        let dims = inner.region.node(id).ty.dims.clone();
        if !dims.iter().all(|dim| heads.contains(dim)) {
            let (own, other) = (self.shown(heads), self.shown(&dims));
            let message = format!("a {word} is `{own}`, or some of these, not `{other}`");
            self.error("dimensions", expr.span, message, "it is one number of each head and pair of tokens");
            return None;
        }
        inner.region.results = vec![id];
        Some(inner.region)
    }

    /// A word that only a score and a mask have.
    pub(super) fn word_of_score(&mut self, name: &str, span: Span) -> Option<Option<Got>> {
        let Some(Inner { of: Of::Score { heads, .. }, .. }) = &self.inner else { return None };
        let heads = heads.clone();
        let per_pair = |dims| Type { dims, per_token: true, places_of: None };
        let (way, function, ty) = match name {
            "s" => (0, Function::Score, per_pair(heads)),
            "i" => (1, Function::QueryPlace, per_pair(Vec::new())),
            "j" => (2, Function::KeyPlace, per_pair(Vec::new())),
            "head" => match heads.as_slice() {
                [dim] => {
                    let ty = Type { dims: vec![*dim], ..Type::default() };
                    (3, Function::Head(*dim), ty)
                }
                _ => {
                    let message =
                        format!("`head` is a place in one dimension, and heads are `{}`", self.shown(&heads));
                    self.error("dimensions", span, message, "`merge` the dimensions of heads");
                    return Some(None);
                }
            },
            _ => return None,
        };
        let before = self.inner.as_ref().and_then(|inner| inner.reads.get(&(WORD, way)).copied());
        let id = before.unwrap_or_else(|| self.push(function, Vec::new(), ty, span));
        if let Some(inner) = &mut self.inner {
            inner.reads.insert((WORD, way), id);
        }
        Some(Some(Got::Value(id)))
    }

    /// `c[i]`, `c[j]`, or `T[head, i - j]`.
    pub(super) fn index(&mut self, of: &Expr, places: &[Expr], span: Span) -> Option<Got> {
        let name = match &of.bare().kind {
            ExprKind::Name(name) => Some(name.as_str()),
            _ => None,
        };
        let Some(Inner { of: Of::Score { word, heads }, .. }) = &self.inner else {
            let shown = name.unwrap_or("v");
            let message = format!("`{shown}[…]` is a value of another token");
            let help = format!(
                "other tokens are read by `shift({shown}, 1)`, `conv`, `running`, `attend` and `recurrence`"
            );
            self.error("token", span, message, help);
            return None;
        };
        let (word, heads) = (*word, heads.clone());
        let Some(name) = name else {
            let help = "name it above, and write `v[i]` or `v[j]`";
            self.error("token", span, format!("a {word} reads values by their names"), help);
            return None;
        };
        if !self.scope.contains_key(name) {
            return self.name(name, of.span);
        }
        let Got::Value(outer) = self.outer(name)? else {
            self.error(
                "wrong-type",
                span,
                format!("`{name}` is a number, and has no places"),
                "write it without brackets",
            );
            return None;
        };
        let ty = self.graph.region.node(outer).ty.clone();
        if !ty.per_token {
            return self.look(name, outer, places, &heads, span);
        }
        let place = match places {
            [Expr { kind: ExprKind::Name(place), .. }] => place.as_str(),
            _ => "",
        };
        let (way, function): (u8, fn(u32) -> Function) = match place {
            "i" => (1, Function::AtQuery),
            "j" => (2, Function::AtKey),
            _ => {
                let help = format!("write `{name}[i]` at the query, `{name}[j]` at the key");
                let message = format!("`{name}` of a token is read at the query or at the key");
                self.error("token", span, message, help);
                return None;
            }
        };
        if !ty.dims.iter().all(|dim| heads.contains(dim)) {
            let (own, other) = (self.shown(&heads), self.shown(&ty.dims));
            let message =
                format!("a {word} reads values of `{own}`, or some of these, and `{name}` is `{other}`");
            let first = self.scope.get(name).map_or(span, |bound| bound.span);
            let error = Diagnostic::error("dimensions", message)
                .on(span)
                .related(first, format!("`{name}` is made here"));
            self.found.push(error.help("sum over the other dimensions first"));
            return None;
        }
        Some(Got::Value(self.read(outer, way, ty, span, function)))
    }

    /// The element of a constant value at places.
    fn look(
        &mut self,
        name: &str,
        outer: ValueId,
        places: &[Expr],
        heads: &[DimId],
        span: Span,
    ) -> Option<Got> {
        let ty = self.graph.region.node(outer).ty.clone();
        if places.len() != ty.dims.len() {
            let message =
                format!("`{name}` is `{}`, and is read at {} places", self.shown(&ty.dims), places.len());
            let first = self.scope.get(name).map_or(span, |bound| bound.span);
            let error = Diagnostic::error("dimensions", message).on(span).related(first, "its dimensions");
            self.found.push(error.help("write a place for each dimension"));
            return None;
        }
        let table = self.bring(outer, span)?;
        let mut args = vec![table];
        let mut looked = Vec::new();
        let mut dims: Vec<DimId> = Vec::new();
        for (place, dim) in places.iter().zip(&ty.dims) {
            let head = matches!(&place.kind, ExprKind::Name(word) if word == "head");
            if head && heads == [*dim] {
                looked.push(None);
                dims = expr::union(&dims, &[*dim]);
                continue;
            }
            let got = self.expr(place)?;
            let id = self.id(got, place.span);
            dims = expr::union(&dims, &self.ty(id).dims.clone());
            looked.push(Some(args.len() as u32));
            args.push(id);
        }
        let ty = Type { dims, per_token: true, places_of: None };
        Some(Got::Value(self.push(Function::Look(looked), args, ty, span)))
    }
}

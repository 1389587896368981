//! Names: looking them up, values that several regions read, and the words of messages.

use super::*;
use crate::define::functions::{FACTS, FUNCTIONS};
use crate::define::syntax::ExprKind;

impl<'a> Elaborator<'a> {
    /// The value of a name.
    pub(super) fn name(&mut self, name: &str, span: Span) -> Option<Got> {
        if let Some(word) = self.word_of_score(name, span) {
            return word;
        }
        if let Some(Inner { of: Of::Recurrence { locals, .. }, .. }) = &mut self.inner
            && let Some(bound) = locals.get_mut(name)
        {
            bound.read = true;
            return match bound.is? {
                Is::Got(got) => Some(self.noted(got, span)),
                Is::Emitted { .. } => None,
            };
        }
        if self.scope.contains_key(name) {
            return self.bound_value(name, span);
        }
        if let Some(setting) = self.settings.get(name) {
            return setting.map(|number| Got::Number(number.real()));
        }
        let hidden = self.context.hidden;
        match name {
            "hidden" => return Some(Got::Number(hidden as f64)),
            "x" => {
                let ty = Type { dims: vec![self.hidden_dim(span)], per_token: true, places_of: None };
                let got = self.outside(Function::Input, ty, span).map(Got::Value)?;
                return Some(self.noted(got, span));
            }
            _ => {}
        }
        if let Some((_, fact, _)) = FACTS.iter().find(|(word, ..)| *word == name) {
            let per_token = matches!(fact, Fact::Position);
            let ty = Type { per_token, ..Type::default() };
            return self.outside(Function::Fact(*fact), ty, span).map(Got::Value);
        }
        if let Some(dim) = self.dims.get(name) {
            return Some(Got::Number(self.graph.size(*dim) as f64));
        }
        self.unknown(name, span);
        None
    }

    /// The value as it is shown at a token.
    fn noted(&mut self, got: Got, span: Span) -> Got {
        if let Got::Value(id) = got {
            self.types.push((span, self.ty(id).clone()));
        }
        got
    }

    /// The value of a name of the definition, in the region that is being written.
    fn bound_value(&mut self, name: &str, span: Span) -> Option<Got> {
        match self.outer(name)? {
            Got::Number(number) => Some(Got::Number(number)),
            Got::Value(id) => {
                let got = self.bring(id, span).map(Got::Value)?;
                Some(self.noted(got, span))
            }
        }
    }

    /// The value of a name of the definition, outside of regions.
    pub(super) fn outer(&mut self, name: &str) -> Option<Got> {
        let bound = self.scope.get_mut(name)?;
        bound.read = true;
        match bound.is? {
            Is::Got(got) => Some(got),
            Is::Emitted { recurrence, of } => {
                let id = self.emit(recurrence, of, name);
                if let Some(bound) = self.scope.get_mut(name) {
                    bound.is = Some(Is::Got(Got::Value(id)));
                }
                Some(Got::Value(id))
            }
        }
    }

    /// A value of the definition in the region that is being written.
    pub(super) fn bring(&mut self, outer: ValueId, span: Span) -> Option<ValueId> {
        let Some(inner) = &self.inner else { return Some(outer) };
        let ty = self.graph.region.node(outer).ty.clone();
        match &inner.of {
            Of::Score { word, .. } if ty.per_token => {
                let word = *word;
                let node = self.graph.region.node(outer);
                let name = node.name.clone().unwrap_or("v".into());
                let message = format!("`{word}` reads `{name}` of a token, and does not say which one");
                let help = format!("write `{name}[i]` at the query, `{name}[j]` at the key");
                self.error("token", span, message, help);
                None
            }
            Of::Score { .. } | Of::Recurrence { .. } => Some(self.read(outer, 0, ty, span, Function::Read)),
        }
    }

    /// An operand of the region, read in a way.
    pub(super) fn read(
        &mut self,
        outer: ValueId,
        way: u8,
        ty: Type,
        span: Span,
        function: fn(u32) -> Function,
    ) -> ValueId {
        let Some(inner) = &mut self.inner else { return outer };
        if let Some(id) = inner.reads.get(&(outer, way)) {
            return *id;
        }
        let operand = match inner.operands.iter().position(|operand| *operand == outer) {
            Some(place) => place,
            None => {
                inner.operands.push(outer);
                inner.operands.len() - 1
            }
        };
        let id = self.push(function(operand as u32), Vec::new(), ty, span);
        if let Some(inner) = &mut self.inner {
            inner.reads.insert((outer, way), id);
        }
        id
    }

    /// Reports a name without a value.
    fn unknown(&mut self, name: &str, span: Span) {
        let message = format!("`{name}` is no value here");
        if let Some(below) = self.definition.assigned(name) {
            let in_recurrence = self.inner.is_none();
            let error = Diagnostic::error("unknown-name", message).on(span);
            let help = match in_recurrence {
                true => "a value is named before it is read: move its line up",
                false => {
                    "a value is named before it is read; that of the token before is a state: `recurrence S [dims] { … }`"
                }
            };
            self.found.push(error.related(below, "named here").help(help));
            return;
        }
        let mut names: Vec<&str> = vec!["x", "hidden"];
        if let Some(Inner { of: Of::Recurrence { locals, .. }, .. }) = &self.inner {
            names.extend(locals.keys().map(String::as_str));
        }
        if let Some(Inner { of: Of::Score { .. }, .. }) = &self.inner {
            names.extend(["s", "i", "j", "head"]);
        }
        names.extend(self.scope.keys().map(String::as_str));
        names.extend(self.settings.keys());
        names.extend(FACTS.iter().map(|(name, ..)| *name));
        let function = FUNCTIONS.iter().find(|function| function.name == name);
        let help = match (closest(name, names.iter().copied()), function) {
            (_, Some(function)) => format!("it is a function: `{}`", function.call),
            (Some(known), None) => format!("did you mean `{known}`?"),
            (None, None) => format!(
                "name it above, or make it a setting: `define {}({name} 4)`",
                self.definition.name.text
            ),
        };
        self.error("unknown-name", span, message, help);
    }

    // Words of messages ---------------------------------------------------------------------------

    /// The names of dimensions: `[heads, size]`.
    pub(super) fn shown(&self, dims: &[DimId]) -> String {
        let names: Vec<&str> = dims.iter().map(|dim| self.graph.name(*dim)).collect();
        format!("[{}]", names.join(", "))
    }

    /// Dimensions with their sizes: `[heads 4, size 16]`.
    pub(super) fn sized(&self, dims: &[DimId]) -> String {
        let shown = |dim: &DimId| format!("{} {}", self.graph.name(*dim), self.graph.size(*dim));
        format!("[{}]", dims.iter().map(shown).collect::<Vec<_>>().join(", "))
    }

    /// Where a value comes from, and its dimensions.
    pub(super) fn origin(&self, expr: &Expr, id: ValueId) -> (Span, String) {
        let dims = self.shown(&self.ty(id).dims);
        if let ExprKind::Name(name) = &expr.kind {
            let local = match &self.inner {
                Some(Inner { of: Of::Recurrence { locals, .. }, .. }) => locals.get(name),
                _ => None,
            };
            if let Some(bound) = local.or_else(|| self.scope.get(name)) {
                return (bound.span, format!("`{name}` is `{dims}`"));
            }
        }
        (expr.span, format!("this is `{dims}`"))
    }

    /// Reports values that nothing reads.
    pub(super) fn unread(&mut self) {
        let kept = self.kept();
        let unread: Vec<(String, Span)> = self
            .scope
            .iter()
            .filter(|(name, bound)| !bound.read && bound.is.is_some() && !kept.contains(name))
            .map(|(name, bound)| (name.clone(), bound.span))
            .collect();
        for (name, span) in unread {
            let warning = Diagnostic::warning("unused-value", format!("nothing reads `{name}`")).on(span);
            self.found.push(warning.help("take it away, or use it"));
        }
    }

    /// Names that other components of the model may read.
    pub(super) fn kept(&self) -> Vec<String> {
        let mut kept = Vec::new();
        for name in self.context.names {
            if let Some(Component::Defined(other)) = (self.context.components)(name) {
                kept.extend(
                    other.definition.values_of_others().into_iter().map(|(_, value)| value.text.clone()),
                );
            }
        }
        kept.extend(self.definition.earlier_values().into_iter().map(|name| name.text.clone()));
        kept
    }

    /// The types of all names, each with the name that its value had first.
    pub(super) fn named_types(&mut self) -> HashMap<String, (String, Type)> {
        let names: Vec<String> = self.scope.keys().cloned().collect();
        let mut types = HashMap::new();
        for name in names {
            if let Some(Got::Value(id)) = self.outer(&name) {
                let node = self.graph.region.node(id);
                let first = node.name.clone().unwrap_or_else(|| name.clone());
                types.insert(name, (first, node.ty.clone()));
            }
        }
        types
    }
}

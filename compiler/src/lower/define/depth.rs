//! Functions of this component's other applications to the same token.

use super::*;

impl Lower<'_> {
    /// The softmax over the applications so far.
    pub(super) fn depth_attended(
        &mut self,
        d: &mut Defining,
        node: &Node,
        scale: f64,
    ) -> Result<Value, CompileError> {
        let c = d.owner;
        let marked = self.architecture.skipped(c);
        let mut heads = self.heads(d, node)?;
        if scale < 0.0 {
            heads.q = self.b.unary(Unary::Neg, heads.q);
        }
        let size = self.b.dims(heads.q)[3];
        let row = self.row(c);
        let depths = self.dim_of(c, "depths", self.architecture.rows_of(c));
        let parts = [heads.q, heads.k, heads.v];
        let [q, k, v] = if marked { self.mark(c, parts) } else { parts };
        let number = d.text();
        let mut cache = |name: &str, value| {
            let ty = Type::f32(&[&[depths], &self.b.dims(value)[..]].concat());
            let part = Part::Kept(Symbol::new(&format!("{name}{number}")));
            let (port, state) = self.state(c, part, Lifetime::Depth, ty);
            let written = self.b.op(Op::CacheWrite, &[state, value, row]);
            self.b.result(port, written);
            written
        };
        let (k, v) = (cache("depth_keys", k), cache("depth_values", v));
        let op = ir::Attention { scale: scale.abs(), ..ir::Attention::default() };
        let o = self.b.op(DepthAttention(op), &[q, k, v, row]);
        let o = if marked { self.unmark(o, size) } else { o };
        Ok(self.of_heads(d, node, &heads, o))
    }

    /// A value of the last application; zero at the first. Its rows are those of applications, each
    /// behind that of the application itself.
    pub(super) fn earlier(
        &mut self,
        d: &mut Defining,
        node: &Node,
        name: &str,
    ) -> Result<Value, CompileError> {
        if !self.inside.is_empty() {
            return Err(CompileError::Unsupported("`earlier` in a part that tokens skip"));
        }
        let c = d.owner;
        let own = d.own(&node.ty);
        let row_dims = [&d.rows[..], &own].concat();
        let depths = self.dim_of(c, "depths_behind", self.architecture.rows_of(c) + 1);
        let ty = Type::f32(&[&[depths], &row_dims[..]].concat());
        let part = Part::Kept(Symbol::new(&format!("earlier.{name}")));
        let (port, state) = self.state(c, part, Lifetime::Depth, ty);
        let first = self.b.index("first", Index::First);
        let nothing = self.b.zeros(&Type::f32(&row_dims));
        let state = self.b.op(Op::CacheWrite, &[state, nothing, first]);
        let row = self.row(c);
        let taken = self.b.ops(Op::CacheTake, &[state, row]);
        let state = self.b.op(Op::CacheWrite, &[taken[1], taken[0], row]);
        d.remembered.insert(name.into(), (port, state));
        Ok(taken[0])
    }

    /// Leaves the values that the next application reads.
    pub(super) fn remember_values(&mut self, d: &mut Defining) -> Result<(), CompileError> {
        let c = d.owner;
        for (name, (port, state)) in std::mem::take(&mut d.remembered) {
            let value = d.graph.value(&name).ok_or(MALFORMED)?;
            let value = self.each_token(d, d.value(value));
            let next = format!("{}.next", self.architecture.label(c));
            let next = self.b.index(&next, Index::Next { cache: self.cache_number(c), by: 1 });
            let state = self.b.op(Op::CacheWrite, &[state, value, next]);
            self.b.result(port, state);
        }
        Ok(())
    }
}

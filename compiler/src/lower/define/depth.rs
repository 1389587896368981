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
        let mut heads = self.heads(d, [d.arg(node, 0)?, d.arg(node, 1)?, d.arg(node, 2)?])?;
        if scale < 0.0 {
            heads.q = self.b.unary(Unary::Neg, heads.q);
        }
        let size = self.b.dims(heads.q)[3];
        let row = self.row(c);
        let depths = self.dim_of(c, ".depths", self.architecture.rows_of(c));
        let parts = [heads.q, heads.k, heads.v];
        let [q, k, v] = if marked { self.mark(c, parts) } else { parts };
        let number = d.text();
        let mut cache = |name: &str, value| {
            let ty = Type::f32(&[&[depths], &self.b.dims(value)[..]].concat());
            let part = part::kept(&format!("{name}{number}"));
            let (port, state) = self.state(c, part, Lifetime::Depth, ty);
            let written = self.b.op(Op::CacheWrite, &[state, value, row]);
            self.b.result(port, written);
            written
        };
        let (k, v) = (cache("depth_keys", k), cache("depth_values", v));
        let op = ir::Attention { scale: scale.abs(), ..ir::Attention::default() };
        if self.shape.scores {
            self.depth_scores(c, &op, [q, k, v, row]);
        }
        let o = self.b.op(DepthAttention(op), &[q, k, v, row]);
        let o = if marked { self.unmark(o, size) } else { o };
        self.point(c, "heads", o);
        Ok(self.of_heads(d, node, &heads, o))
    }

    /// A value of the last application to the token; zero where there is none. An application
    /// leaves its value in the row after its own.
    pub(super) fn earlier(
        &mut self,
        d: &mut Defining,
        node: &Node,
        name: &str,
    ) -> Result<Value, CompileError> {
        let c = d.owner;
        let row_dims = [self.stream_rows(), d.own(&node.ty)].concat();
        let depths = self.dim_of(c, ".depths_behind", self.architecture.rows_of(c) + 1);
        let ty = Type::f32(&[&[depths], &row_dims[..]].concat());
        let part = part::kept_behind(&format!("earlier.{name}"));
        let (port, state) = self.state(c, part, Lifetime::Depth, ty);
        let first = self.b.index("first", Index::First);
        let nothing = self.b.zeros(&Type::f32(&row_dims));
        let state = self.b.op(Op::CacheWrite, &[state, nothing, first]);
        let row = self.row(c);
        let taken = self.b.ops(Op::CacheTake, &[state, row]);
        let state = self.b.op(Op::CacheWrite, &[taken[1], taken[0], row]);
        d.remembered.insert(name.into(), (port, state, taken[0]));
        Ok(self.here_again(taken[0]))
    }

    /// Leaves the values that the next application reads.
    pub(super) fn remember_values(&mut self, d: &mut Defining) -> Result<(), CompileError> {
        for (name, (port, state, before)) in std::mem::take(&mut d.remembered) {
            let value = d.graph.value(&name).ok_or(MALFORMED)?;
            let value = self.each_token(d, d.value(value));
            let value = self.instead(value, before);
            let next = self.next_row(d.owner);
            let state = self.b.op(Op::CacheWrite, &[state, value, next]);
            self.b.result(port, state);
        }
        Ok(())
    }

    /// The row after that of this application.
    fn next_row(&mut self, c: Owner) -> Value {
        let next = format!("{}.next", self.architecture.label(c));
        self.b.index(&next, Index::Next { cache: self.cache_number(c), by: 1 })
    }

    /// A value of every token of the stream: that of the tokens which take part here, and of the
    /// others the one before.
    fn instead(&mut self, value: Value, before: Value) -> Value {
        if self.inside.is_empty() {
            return value;
        }
        let rows = self.b.dims(value)[..2].to_vec();
        let ones = self.ones(&rows);
        let taking = self.every(ones, Row::Key);
        let one = self.b.constant(1.0);
        let others = self.b.sub(one, taking);
        let (value, before) = (self.every(value, Row::Key), self.b.mul(before, others));
        self.b.add(value, before)
    }

    /// Which values of a component others read.
    pub(super) fn read_values(&self, of: &str) -> Vec<String> {
        let model = &self.architecture.model;
        let mut found: Vec<String> = vec![];
        for component in model.components.values() {
            let spec::Component::Defined(defined) = component else { continue };
            let Ok(graph) = defined.graph(model) else { continue };
            for node in &graph.region.nodes {
                if let Of::ValueOf(component, name) = &node.function
                    && component == of
                    && !found.contains(name)
                {
                    found.push(name.clone());
                }
            }
        }
        found
    }

    /// Leaves the values that other components read.
    pub(super) fn leave_values(&mut self, d: &Defining) -> Result<(), CompileError> {
        let label = self.architecture.label(d.owner);
        for name in self.read_values(&label) {
            let value = d.graph.value(&name).ok_or(MALFORMED)?;
            let mut value = self.each_token(d, d.value(value));
            let path = format!("value.{name}");
            if self.architecture.skipped(d.owner) {
                let part = part::kept_behind(&path);
                let dims = [self.stream_rows(), self.b.dims(value)[2..].into()].concat();
                let before = self.latest_row(d.owner, part, &dims);
                value = self.instead(value, before);
                let next = self.next_row(d.owner);
                self.hand_at(d.owner, part, value, next);
            } else {
                self.hand_row(d.owner, part::kept(&path), value);
            }
            self.named.insert((label.clone(), name), value);
        }
        Ok(())
    }

    /// The row of the latest application, of a component that some tokens skip. Each application
    /// leaves its value in the row after its own, and the first row is zero.
    fn latest_row(&mut self, c: Owner, part: Part, dims: &[Dim]) -> Value {
        let ty = Type::f32(dims);
        let first = self.b.index("first", Index::First);
        let nothing = self.b.zeros(&ty);
        self.hand_at(c, part, nothing, first);
        let row = self.row(c);
        self.handed_row(c, part, &ty, row)
    }

    /// A value of the latest application of another component.
    pub(super) fn value_of(
        &mut self,
        d: &Defining,
        node: &Node,
        component: &str,
        name: &str,
    ) -> Result<Value, CompileError> {
        let own = d.own(&node.ty);
        let dims = [&d.rows[..], &own].concat();
        if let Some(&value) = self.named.get(&(component.into(), name.into())) {
            let value = self.here_again(value);
            return Ok(self.b.reshape(value, &dims));
        }
        let model = &self.architecture.model;
        let number = model.components.get_index_of(component).ok_or(MALFORMED)?;
        let source = Owner::Component(number as u32);
        // Its dimensions are those of the component that made it.
        let names: Vec<(String, u64)> =
            node.ty.dims.iter().map(|&dim| (d.graph.name(dim).to_string(), d.graph.size(dim))).collect();
        let of_source: Dims = names.iter().map(|(name, size)| self.own_dim(source, name, *size)).collect();
        let of_source = [self.stream_rows(), of_source].concat();
        let path = format!("value.{name}");
        let value = if self.architecture.skipped(source) {
            self.latest_row(source, part::kept_behind(&path), &of_source)
        } else {
            let latest = Index::Latest(self.cache_number(source));
            let latest = self.b.index(&format!("{component}.latest"), latest);
            self.handed_row(source, part::kept(&path), &Type::f32(&of_source), latest)
        };
        let value = self.here_again(value);
        Ok(self.b.reshape(value, &dims))
    }
}

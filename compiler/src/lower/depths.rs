//! Keys of a token that earlier applications left, in the softmax of an attention over the sequence
//! (Mixture-of-Depths Attention, 2603.15619): those of the component itself, or of all that leave
//! theirs in the model's depth stream.

use super::*;
use crate::ir::Attention;
use smallvec::smallvec;

/// Tensors and states of keys and values along depth.
pub mod part {
    use crate::bind::Part;

    const fn own(path: &'static str) -> Part {
        Part::new("depths", path)
    }

    /// The matrix of keys and values that a component leaves in the depth stream.
    pub const KV: Part = own("depth_kv.weight");
    /// Its bias.
    pub const KV_BIAS: Part = own("depth_kv.bias");
    /// Keys of an attention, or of the depth stream, that later applications see, each in
    /// the row after that of its application; the first row stands for the keys of the
    /// sequence.
    pub const KEYS: Part = own("depth_keys").with_rows(1).repeatable();
    /// Its values.
    pub const VALUES: Part = own("depth_values").with_rows(1).repeatable();
}

impl Lower<'_> {
    /// The output of one softmax over the keys of the sequence, whose output `o` and log-sum-exp
    /// are given, and the keys that the component's earlier applications made of the same token;
    /// the weight of the sequence in it.
    pub(super) fn with_depth_keys(
        &mut self,
        c: Owner,
        [q, k, v]: [Value; 3],
        (o, lse): (Value, Value),
        scale: f64,
    ) -> (Value, Value) {
        let dims = self.b.dims(k);
        let Some((&size, heads)) = dims.split_last() else { return (o, lse) };
        let (width, rows) = (self.b.module.size(size), self.architecture.rows_of(c));
        let wide = self.dim_of(c, "marked", width + 1);
        let depths = self.dim_of(c, "depths_behind", rows + 1);
        let ty = Type::f32(&[&[depths], heads, &[wide]].concat());
        let states = [part::KEYS, part::VALUES].map(|part| self.state(c, part, Lifetime::Depth, ty.clone()));
        let row = self.row(c);
        let [(_, keys), (_, values)] = &states;
        let (mixed, share, written) = self.among_depths(q, lse, scale, ([*keys, *values], row));
        let name = format!("{}.next", self.architecture.label(c));
        let next = self.b.index(&name, Index::Next { cache: self.cache_number(c), by: 1 });
        for (((port, _), state), own) in states.into_iter().zip(written).zip([k, v]) {
            let own = self.unmarked(own, wide);
            let state = self.b.op(Op::CacheWrite, &[state, own, next]);
            self.b.result(port, state);
        }
        let o = self.b.mul(o, share);
        (self.b.add(o, mixed), share)
    }

    /// The same over the keys that stand in the depth stream by now. A key there is normed without
    /// a gain: the query has that of keys instead, the reader's own.
    pub(super) fn with_depth_stream(
        &mut self,
        c: Owner,
        normed: bool,
        q: Value,
        (o, lse): (Value, Value),
        scale: f64,
    ) -> (Value, Value) {
        let Some([kv, size, wide]) = self.depth_dims() else { return (o, lse) };
        let dims = self.b.dims(q);
        let q = match normed {
            false => q,
            true => {
                let gain = self.gain(c, attention::part::KEY_NORM, q, 1, TensorKind::Gain);
                self.b.mul(q, gain)
            }
        };
        let q = self.b.reshape(q, &[dims[0], dims[1], dims[2], size]);
        let ty = Type::f32(&[dims[0], dims[1], kv, wide]);
        let [keys, values] = [part::KEYS, part::VALUES].map(|part| self.handed(Owner::Depths, part, &ty));
        let row = match self.left {
            0 => self.row(Owner::Depths),
            left => self.depth_row(left),
        };
        let (mixed, share, [k, v]) = self.among_depths(q, lse, scale, ([keys.1, values.1], row));
        self.hand(&keys.0, k);
        self.hand(&values.0, v);
        let (o, mixed) = (self.b.mul(o, share), self.b.reshape(mixed, &dims));
        (self.b.add(o, mixed), share)
    }

    /// Leaves keys and values that a matrix makes of what a component reads.
    pub(super) fn leave_depths(&mut self, c: Owner, n: Value, biased: bool) {
        let Some([kv, size, _]) = self.depth_dims() else { return };
        let narrow = self.b.module.size(kv) * self.b.module.size(size);
        let (both, each) = (self.dim_of(c, "depth_kv", 2 * narrow), self.dim_of(c, "depth_k", narrow));
        let hidden = self.hidden();
        let made = self.matrix(c, part::KV, n, [both, hidden], None);
        let made = self.bias(c, biased.then_some(part::KV_BIAS), made);
        let parts = self.b.ops(Split(smallvec![each, each]), &[made]);
        self.leave_in_depths(parts[0], parts[1]);
    }

    /// Leaves keys, as they are before norm and rotation, and values of all heads in the next row
    /// of the depth stream.
    pub(super) fn leave_in_depths(&mut self, k: Value, v: Value) {
        let Some([kv, size, wide]) = self.depth_dims() else { return };
        let normed = self.architecture.model.depth_reader().is_some_and(|a| a.qk_norm == QkNorm::Rms);
        let dims = [&self.b.rows(k)[..], &[kv, size]].concat();
        let (k, v) = (self.b.reshape(k, &dims), self.b.reshape(v, &dims));
        let k = if normed { self.b.op(Rms { inner: 1, eps: self.eps() }, &[k]) } else { k };
        self.left += 1;
        let next = self.depth_row(self.left);
        for (part, own) in [(part::KEYS, k), (part::VALUES, v)] {
            let own = self.unmarked(own, wide);
            self.hand_at(Owner::Depths, part, own, next);
        }
    }

    /// Key heads of the depth stream, their size, and that with the dimension of the sequence.
    fn depth_dims(&mut self) -> Option<[Dim; 3]> {
        let (kv, size) = self.architecture.model.depth_reader().map(|a| (a.kv_heads, a.head_size))?;
        let dims = [("kv_heads", kv), ("size", size), ("marked", size + 1)];
        Some(dims.map(|(name, size)| self.dim_of(Owner::Depths, name, size)))
    }

    /// The row of the depth stream this many after those that applications before left.
    fn depth_row(&mut self, by: u32) -> Value {
        let (label, cache) = (self.architecture.label(Owner::Depths), self.cache_number(Owner::Depths));
        self.b.index(&format!("{label}.next{by}"), Index::Next { cache, by })
    }

    /// Attention over rows of keys and values of the same token up to `row`, in whose softmax the
    /// sequence has this log-sum-exp: the mixture of the rows' values, the weight of the sequence,
    /// and the states.
    ///
    /// The sequence is one more key, in row 0: a dimension of its own makes its score the
    /// log-sum-exp, and returns its weight.
    fn among_depths(
        &mut self,
        q: Value,
        lse: Value,
        scale: f64,
        (states, row): ([Value; 2], Value),
    ) -> (Value, Value, [Value; 2]) {
        let (one, dims) = (self.one(), self.b.dims(states[0]));
        let (heads, wide) = (&dims[1..dims.len() - 1], dims[dims.len() - 1]);
        let size = self.b.dims(q)[3];
        let score = self.b.scale(lse, 1.0 / scale);
        let score = self.b.reshape(score, &[&self.b.dims(lse)[..], &[one]].concat());
        let q = self.b.op(Concat(wide), &[q, score]);
        let channel = self.b.zeros(&Type::f32(&[heads, &[one]].concat()));
        let full = self.b.constant(1.0);
        let full = self.b.add(channel, full);
        let nothing = self.b.zeros(&Type::f32(&[heads, &[size]].concat()));
        let sequence = self.b.op(Concat(wide), &[nothing, full]);
        let first = self.b.index("first", Index::First);
        let states = states.map(|state| self.b.op(Op::CacheWrite, &[state, sequence, first]));
        let all = Attention { scale, ..Attention::default() };
        let mixed = self.b.op(DepthAttention(all), &[q, states[0], states[1], row]);
        let parts = self.b.ops(Split(smallvec![size, one]), &[mixed]);
        (parts[0], self.b.reshape(parts[1], &self.b.dims(lse)), states)
    }

    /// Vectors with a zero where the sequence has its one.
    fn unmarked(&mut self, x: Value, wide: Dim) -> Value {
        let (one, dims) = (self.one(), self.b.dims(x));
        let channel = self.b.zeros(&Type::f32(&[&dims[..dims.len() - 1], &[one]].concat()));
        self.b.op(Concat(wide), &[x, channel])
    }
}

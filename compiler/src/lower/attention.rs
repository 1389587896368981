//! Attention over the sequence and over depth, with its caches.

use super::define::Admitted;
use super::*;
use crate::op::ByHead;
use crate::op::attention::kernel::LONGEST_SHARED;
use smallvec::smallvec;

/// Tensors and states of attentions.
pub mod part {
    use crate::bind::{Adapted, Counted, Part, Slice};

    const fn own(path: &'static str) -> Part {
        Part::new("attention", path)
    }

    /// Queries, keys and values.
    pub const QKV: Part = own("qkv.weight").with_low_rank();
    /// Their shared expert.
    pub const QKV_SHARED: Part = own("qkv.shared.weight");
    /// The bias of queries, keys and values.
    pub const QKV_BIAS: Part = own("qkv.bias");
    /// The bias of queries, where values have none.
    pub const QUERY_BIAS: Part = own("q.bias");
    /// The bias of keys, where values have none.
    pub const KEY_BIAS: Part = own("k.bias");
    /// The gain of queries.
    pub const QUERY_NORM: Part = own("q_norm.weight");
    /// The gain of keys.
    pub const KEY_NORM: Part = own("k_norm.weight");
    /// The matrix of the vector that queries are made of.
    pub const QUERY_DOWN: Part = own("q_down.weight").with_adapters();
    /// The gain of that vector.
    pub const QUERY_DOWN_NORM: Part = own("q_down_norm.weight");
    /// The matrix of queries alone.
    pub const QUERY_UP: Part = own("q_up.weight").with_adapters();
    /// The matrix of the vector that keys and values are made of, and of the part of keys
    /// that turns.
    pub const KV_DOWN: Part = own("kv_down.weight").with_adapters();
    /// The gain of that vector.
    pub const KV_DOWN_NORM: Part = own("kv_down_norm.weight");
    /// The matrix of keys and values.
    pub const KV_UP: Part = own("kv_up.weight").with_adapters();
    /// Logits in the denominators of the softmax.
    pub const SINK: Part = own("sink");
    /// The share of an attention's own values where those of its first application are mixed in.
    pub const RESIDUAL: Part = own("value_residual");
    /// The gate of what heads give.
    pub const GATE: Part = own("gate.weight").with_low_rank();
    /// The output projection.
    pub const OUT: Part = own("out.weight").with_low_rank().at_end();
    /// Its shared expert.
    pub const OUT_SHARED: Part = own("out.shared.weight").at_end();
    /// The bias of the output projection.
    pub const OUT_BIAS: Part = own("out.bias").at_end();
    /// Keys.
    pub const KEYS: Part = own("keys").with_rows(0).repeatable();
    /// Values.
    pub const VALUES: Part = own("values").with_rows(0).repeatable();
    /// Latents, which are both: what keys and values of all heads are made of, and what
    /// heads share of keys.
    pub const LATENTS: Part = own("latents");
    /// Positions of the keys that a cache of processed tokens holds.
    pub const CACHED: Part = own("cached");
    /// Values of the first application.
    pub const FIRST_VALUES: Part = own("first_values").with_rows(0);
    /// Keys that others read.
    pub const HANDED_KEYS: Part = own("handed_keys").with_rows(0).repeatable().counted(Counted::Handed);
    /// Their values.
    pub const HANDED_VALUES: Part = own("handed_values").with_rows(0).repeatable().counted(Counted::Handed);

    /// The rows of [`QKV`] that make queries.
    pub const QUERY_ROWS: Adapted = QKV.rows_named(Slice::First("q"));
    /// Those that make keys.
    pub const KEY_ROWS: Adapted = QKV.rows_named(Slice::Last("k", 2));
    /// Those that make values.
    pub const VALUE_ROWS: Adapted = QKV.rows_named(Slice::Last("v", 1));
}

/// The length of a place in the cache of a latent attention, that is the vector that keys and
/// values of all heads are made of and what heads share of keys; `None` where the cache holds keys
/// and values themselves, which are shorter, or latents are too long for a GPU's attention.
///
/// The one place that decides it, for every device.
pub(crate) fn latent_place(a: &spec::Attention) -> Option<u64> {
    let l = a.latent.as_ref()?;
    let place = l.turned.checked_mul(l.keys)?.checked_add(l.kv)?;
    let expanded = a.heads.checked_mul(a.head_size)?.checked_mul(2)?;
    (place < expanded && place <= LONGEST_SHARED).then_some(place)
}

/// Queries, keys and values, and last keys before norm and rotation with their values.
type Made = (Value, Option<Value>, Option<Value>, Option<(Value, Value)>);

impl Lowering for spec::Attention {
    fn fits(&self, _: u64) -> Result<(), CompileError> {
        fits("an attention", &[self.heads.max(self.kv_heads), self.head_size])?;
        if let Some(l) = &self.latent {
            if l.turned > self.head_size || l.value > self.head_size {
                return Err(CompileError::Unsupported("latent heads that are shorter than their parts"));
            }
            if !self.heads.is_multiple_of(l.keys.max(1)) || l.keys == 0 {
                return Err(CompileError::Unsupported("heads that do not share latent keys evenly"));
            }
            fits("an attention", &[l.keys.saturating_mul(l.turned)])?;
        }
        Ok(())
    }

    fn lower(&self, l: &mut Lower, c: Owner, kind: Kind, n: Value) -> Result<Value, CompileError> {
        l.attention(c, self, n, kind == Kind::Depth)
    }
}

impl Lower<'_> {
    fn attention(
        &mut self,
        c: Owner,
        a: &spec::Attention,
        n: Value,
        depth: bool,
    ) -> Result<Value, CompileError> {
        let marked = depth && self.architecture.skipped(c);
        let asking = self.asking.take();
        let rows = self.b.rows(n);
        let heads = self.dim_of(c, "heads", a.heads);
        // Dimensions of keys are those of the component that makes them.
        let source = self.source(a)?;
        let shared = if depth || source.is_some() { Keys::Own } else { self.keys() };
        let reads = shared == Keys::Reads;
        let kv = self.dim_of(source.unwrap_or(c), "kv_heads", a.kv_heads);
        let size = self.dim_of(source.unwrap_or(c), "size", a.head_size);
        let queries = self.dim_of(c, "q", a.heads * a.latent.as_ref().map_or(a.head_size, |l| l.value));
        if a.latent.is_none() {
            self.dim_of(c, "k", a.kv_heads * a.head_size);
        }
        let with = |rows: &[Dim], more: &[Dim]| [rows, more].concat();

        // One routing decision serves both projections.
        let mixture = self
            .body
            .and_then(|b| b.recurrent)
            .and_then(|e| a.projection.as_ref().map(|p| (p, p.count.unwrap_or(e))));
        let routing = mixture.map(|(p, experts)| {
            (self.route(c, &p.router, n, experts, experts, 1, true, false, None), p.shared, experts)
        });
        let (mut q, k, v, plain) = match &a.latent {
            Some(latent) => {
                let (q, k, v) = self.latent(c, a, latent, n, [heads, kv, size]);
                (q, k, v, None)
            }
            None => self.qkv(c, a, n, source.is_none() && !reads, [heads, kv, size], (&routing, depth)),
        };
        let (k, v) = match (k, v, source) {
            (Some(k), Some(v), _) if a.value_residual => (k, self.residual_values(c, v)),
            (Some(k), Some(v), _) => (k, v),
            (_, _, Some(source)) => self.keys_of(source, &rows, [kv, size]),
            (_, _, None) if reads => self.first_keys(c, [kv, size]),
            (_, _, None) => return Err(CompileError::Unsupported("an attention without keys")),
        };
        let (k, v) = match source {
            None if !depth && shared == Keys::Own => self.of_last_pass(c, k, v),
            None if shared == Keys::Replaces => self.replaced(c, k, v),
            _ => (k, v),
        };
        // Every token has a key, whoever takes part here.
        let of_all = reads || shared == Keys::Replaces;
        if self.is_read(c) && self.shape.cache.is_none() {
            self.hand_keys(c, k, v);
        }
        if shared == Keys::Leaves || shared == Keys::Makes && self.shape.cache.is_none() {
            let (k, v) = (self.every(k, Row::Key), self.every(v, Row::Key));
            self.hand_row(c, part::HANDED_KEYS, k);
            self.hand_row(c, part::HANDED_VALUES, v);
        }
        // Kernels take the largest score from the largest `q·k`, and a key that is not there has
        // the lowest: a scale below 0 is the sign of the query.
        let scale = a.scale.unwrap_or(1.0 / (a.head_size as f64).sqrt());
        if scale < 0.0 {
            q = self.b.unary(Unary::Neg, q);
        }
        let mut op = ir::Attention {
            scale: scale.abs(),
            softcap: a.softcap,
            window: a.window,
            mask: Mask::Causal,
            segments: !depth && self.shape.segments,
            program: None,
            dropout: None,
            every: None,
            among: None,
        };
        let o = if depth {
            let row = self.row(c);
            let depths = self.dim_of(c, "depths", self.architecture.rows_of(c));
            let [q, k, v] = if marked { self.mark(c, [q, k, v]) } else { [q, k, v] };
            let ty = Type::f32(&[&[depths], &self.b.dims(k)[..]].concat());
            let mut cache = |part: Part, value| {
                let (port, state) = self.state(c, part, Lifetime::Depth, ty.clone());
                let written = self.b.op(Op::CacheWrite, &[state, value, row]);
                self.b.result(port, written);
                written
            };
            let (k, v) = (cache(part::KEYS, k), cache(part::VALUES, v));
            self.observe(c, Observation::Queries, q);
            if self.shape.scores {
                self.depth_scores(c, &op, [q, k, v, row]);
            }
            let o = self.b.op(DepthAttention(op), &[q, k, v, row]);
            if marked { self.unmark(o, size) } else { o }
        } else {
            // Mixtures group the rows of both projections alike.
            let ahead = asking.filter(|_| routing.is_none());
            if let Some(index) = ahead {
                q = self.b.op(Op::TakeTokens, &[q, index]);
            }
            // Chosen tokens among keys of all: segments are of as many queries as keys.
            let spread = of_all && self.gathered() && op.segments;
            if spread {
                q = self.every(q, Row::Token);
            }
            let mut operands = vec![q, k, v];
            if of_all {
                // All of them are there.
            } else if let (Some(&Inside::Masked { keys: Some((places, _)), .. }), None) =
                (self.inside.last(), self.shape.cache)
            {
                // Whatever stands in the rows of tokens that take no part, nothing may come of it.
                operands[1] = self.b.op(Op::Keep, &[k, places]);
                operands[2] = self.b.op(Op::Keep, &[v, places]);
            }
            let mask = match (self.shape.cache, ahead) {
                (Some(places), _) if shared == Keys::Replaces => {
                    let mut all = Some(self.all_entries(rows[0], places));
                    Some(self.cache_as(c, [part::KEYS, part::VALUES], &mut operands, places, &mut all))
                }
                _ if of_all => self.first_places(&rows, ahead, spread),
                (Some(places), _) if source.is_some() => Some(self.cached_places(&rows, places)),
                (Some(places), _) => {
                    let mask = self.cache(c, &mut operands, places);
                    self.made.insert(self.architecture.label(c), (operands[1], operands[2]));
                    Some(mask)
                }
                (None, Some(index)) => {
                    let keys = self.all_places(&rows);
                    Some((self.b.op(Op::TakeTokens, &[keys, index]), keys))
                }
                (None, None) => self.tokens_seen(&rows, a.window.is_some()),
            };
            if let Some((queries, keys)) = mask {
                op.mask = Mask::Positions;
                operands.extend([queries, keys]);
            }
            if op.segments {
                let around = if spread { 0 } else { self.inside.len() };
                operands.push(self.token_ints_at(Ints::Given(Input::Segments), around));
            }
            let scale = op.scale;
            let mut scores = self.shape.scores.then(|| self.scores(&op, &operands));
            let results = self.b.ops(Op::Attention(op), &operands);
            let (mut o, mut lse) = (results[0], results[1]);
            if spread {
                (o, lse) = (self.here_again(o), self.here_again(lse));
                scores = scores.map(|scores| self.here_again(scores));
            }
            if a.sink {
                o = self.sunk(c, o, lse, heads);
                scores = scores.map(|scores| self.sunk(c, scores, lse, heads));
            }
            if a.depth_keys {
                let lse = if a.sink { self.with_sink(c, lse, heads) } else { lse };
                let share;
                (o, share) = self.with_depth_keys(c, [q, k, v], (o, lse), scale);
                scores = scores.map(|scores| self.b.mul(scores, share));
            }
            if let (Some(leaves), Some((k, v))) = (a.depth_stream, plain) {
                let lse = if a.sink { self.with_sink(c, lse, heads) } else { lse };
                let share;
                (o, share) = self.with_depth_stream(c, a.qk_norm == QkNorm::Rms, q, (o, lse), scale);
                scores = scores.map(|scores| self.b.mul(scores, share));
                match leaves {
                    spec::DepthStream::Keys => self.leave_in_depths(k, v),
                    spec::DepthStream::Own => {
                        self.leave_depths(c, n, a.bias.is_some_and(spec::Bias::of_qkv));
                    }
                }
            }
            if let Some(scores) = scores {
                self.point(c, "scores", scores);
            }
            o
        };
        let o = match a.gate {
            Some(gate) => self.gated(c, gate, o, n, asking),
            None => o,
        };
        let o = match &a.latent {
            Some(l) if self.absorbs(a).is_some() => self.values_of_latents(c, l, o, a.head_size),
            Some(l) if l.value < a.head_size => {
                let [value, rest] = [("value", l.value), ("no_value", a.head_size - l.value)]
                    .map(|(name, size)| self.dim_of(c, name, size));
                self.b.ops(Split(smallvec![value, rest]), &[o])[0]
            }
            Some(_) | None => o,
        };
        self.point(c, "heads", o);
        let mut o = self.b.reshape(o, &with(&self.b.dims(o)[..2], &[queries]));
        if let (Some(index), None) = (asking, &routing)
            && self.b.dims(o)[1] != self.b.dims(index)[1]
        {
            o = self.b.op(Op::TakeTokens, &[o, index]);
        }
        let init = self.output_init();
        let dims = [self.hidden(), queries];
        let y = self.projection(c, [part::OUT, part::OUT_SHARED], o, dims, &routing, init);
        let y = self.bias(c, a.bias.is_some_and(spec::Bias::of_out).then_some(part::OUT_BIAS), y);
        match (asking, &routing) {
            (Some(index), Some(_)) => Ok(self.b.op(Op::TakeTokens, &[y, index])),
            _ => Ok(y),
        }
    }

    /// Queries, and keys and values where it makes them: `[b, t, heads, size]` each, turned.
    fn qkv(
        &mut self,
        c: Owner,
        a: &spec::Attention,
        n: Value,
        has_keys: bool,
        [heads, kv, size]: [Dim; 3],
        (routing, depth): (&Option<(Routing, bool, u64)>, bool),
    ) -> Made {
        let rows = self.b.rows(n);
        let with = |rows: &[Dim], more: &[Dim]| [rows, more].concat();
        let (wide, narrow) = (a.heads * a.head_size, a.kv_heads * a.head_size);
        let queries = self.dim_of(c, "q", wide);
        let keys = self.dim_of(c, "k", narrow);
        // Queries are the first rows of the matrix: a pass that makes no keys reads these alone.
        let all = if has_keys { self.dim_of(c, "qkv", wide + 2 * narrow) } else { queries };
        let dims = [all, self.hidden()];
        let own = [(part::QUERY_ROWS, queries), (part::KEY_ROWS, keys), (part::VALUE_ROWS, keys)];
        let own = if has_keys { &own[..] } else { &own[..1] };
        // A mixture adapts the matrix of each expert as one.
        let qkv = match routing {
            None => self.matrix_of(c, (part::QKV, own), n, dims, None),
            Some(_) => self.projection(c, [part::QKV, part::QKV_SHARED], n, dims, routing, None),
        };
        let qkv = self.bias(c, a.bias.is_some_and(spec::Bias::of_qkv).then_some(part::QKV_BIAS), qkv);

        let parts = match has_keys {
            true => self.b.ops(Split(smallvec![queries, keys, keys]), &[qkv]),
            false => vec![qkv],
        };
        let of_qk = |part| a.bias.is_some_and(spec::Bias::of_qk).then_some(part);
        let mut q = self.bias(c, of_qk(part::QUERY_BIAS), parts[0]);
        let mut k = parts.get(1).map(|&k| self.bias(c, of_qk(part::KEY_BIAS), k));
        let plain = k.zip(parts.get(2).copied());
        if a.qk_norm == QkNorm::RmsAll {
            q = self.norm(q, c, part::QUERY_NORM, 1);
            k = k.map(|k| self.norm(k, c, part::KEY_NORM, 1));
        }
        let mut q = self.b.reshape(q, &with(&rows, &[heads, size]));
        let mut k = k.map(|k| self.b.reshape(k, &with(&rows, &[kv, size])));
        let v = parts.get(2).map(|&v| self.b.reshape(v, &with(&rows, &[kv, size])));
        if a.qk_norm == QkNorm::Rms {
            q = self.norm(q, c, part::QUERY_NORM, 1);
            k = k.map(|k| self.norm(k, c, part::KEY_NORM, 1));
        }
        if let Some(rope) = a.rope {
            q = self.rope(q, c, rope, depth);
            k = k.map(|k| self.rope(k, c, rope, depth));
        }
        for (value, name) in [(Some(q), "q"), (k, "k"), (v, "v")] {
            if let Some(value) = value {
                self.b.call(value, name);
                self.point(c, name, value);
            }
        }
        (q, k, v, plain)
    }

    /// The same of latent attention (DeepSeek-V2, 2405.04434, section 2.1.3): values padded with
    /// zeros, or, where caches hold latents, the latents as both keys and values.
    fn latent(
        &mut self,
        c: Owner,
        a: &spec::Attention,
        l: &spec::Latent,
        n: Value,
        [heads, kv, size]: [Dim; 3],
    ) -> (Value, Option<Value>, Option<Value>) {
        let (rows, hidden, one) = (self.b.rows(n), self.hidden(), self.one());
        let with = |more: &[Dim]| [&rows[..], more].concat();
        let still = a.head_size - l.turned;
        let [turned, value] =
            [("turned", l.turned), ("value", l.value)].map(|(name, size)| self.dim_of(c, name, size));
        // Where all of a head turns there is no such part.
        let plain = (still > 0).then(|| self.dim_of(c, "still", still));

        let wide = self.dim_of(c, "queries", a.heads * a.head_size);
        let q = match l.query {
            None => self.matrix(c, part::QUERY_UP, n, [wide, hidden], None),
            Some(rank) => {
                let rank = self.dim_of(c, "query_rank", rank);
                let mut down = self.matrix(c, part::QUERY_DOWN, n, [rank, hidden], None);
                if l.norm {
                    down = self.norm_of_latents(down, c, part::QUERY_DOWN_NORM, l.eps);
                }
                self.matrix(c, part::QUERY_UP, down, [wide, rank], None)
            }
        };
        let q = self.b.reshape(q, &with(&[heads, size]));
        let (begin, end) = match plain {
            None => (None, q),
            Some(plain) => {
                let parts = self.b.ops(Split(smallvec![plain, turned]), &[q]);
                (Some((parts[0], plain)), parts[1])
            }
        };
        let end = self.turn_latent(c, a, l, end);

        let rank = self.dim_of(c, "kv_rank", l.kv);
        // The parts of keys that turn, of all their heads.
        let (groups, parts) = match l.keys {
            1 => (one, turned),
            keys => (self.dim_of(c, "turned_keys", keys), self.dim_of(c, "all_turned", keys * l.turned)),
        };
        let both = self.dim_of(c, "kv_down", l.kv + l.keys * l.turned);
        let down = self.matrix(c, part::KV_DOWN, n, [both, hidden], None);
        let halves = self.b.ops(Split(smallvec![rank, parts]), &[down]);
        let latent = match l.norm {
            true => self.norm_of_latents(halves[0], c, part::KV_DOWN_NORM, l.eps),
            false => halves[0],
        };
        let shared = self.b.reshape(halves[1], &with(&[groups, turned]));
        let shared = self.turn_latent(c, a, l, shared);
        if let Some(place) = self.absorbs(a) {
            // `q·(W k) = (Wᵀ q)·k`: one head of latents for all heads' queries.
            let place = self.dim_of(c, "latents", place);
            let begin = match begin {
                Some((begin, plain)) => {
                    let w = self.kv_up(c, l, heads, still);
                    self.b.op(ByHead { over: plain, part: plain, first: 0 }, &[begin, w])
                }
                None => self.b.zeros(&Type::f32(&with(&[heads, rank]))),
            };
            let end = self.among_keys(c, l, end, parts);
            let q = self.b.op(Concat(place), &[begin, end]);
            let latent = self.b.reshape(latent, &with(&[one, rank]));
            let shared = self.b.reshape(shared, &with(&[one, parts]));
            let latents = self.b.op(Concat(place), &[latent, shared]);
            return (q, Some(latents), Some(latents));
        }
        let q = match begin {
            Some((begin, _)) => self.b.op(Concat(size), &[begin, end]),
            None => self.b.reshape(end, &with(&[heads, size])),
        };
        // As many heads as queries have, each with the part of its head of keys.
        let size_of_part = if still == 0 { size } else { turned };
        let shared = match l.keys {
            1 => {
                let shared = self.b.reshape(shared, &with(&[turned]));
                let zeros = self.b.zeros(&Type::f32(&with(&[kv, turned])));
                self.b.add(zeros, shared)
            }
            keys => {
                let group = a.heads / keys;
                let all = self.dim_of(c, &format!("turned_of{}", a.heads), a.heads * l.turned);
                let some = self.dim_of(c, &format!("turned_by{group}"), group * l.turned);
                let many = self.dim_of(c, &format!("keyed{group}"), group);
                let flat = self.b.reshape(shared, &with(&[parts]));
                let each = self.b.ops(Split((0..keys).map(|_| turned).collect()), &[flat]);
                let zeros = self.b.zeros(&Type::f32(&with(&[many, turned])));
                let mut out = vec![];
                for part in each {
                    let part = self.b.add(zeros, part);
                    out.push(self.b.reshape(part, &with(&[some])));
                }
                self.b.op(Concat(all), &out)
            }
        };
        let shared = self.b.reshape(shared, &with(&[kv, size_of_part]));
        let each = self.dim_of(c, "kv_each", still + l.value);
        let wide = self.dim_of(c, "kv_up", a.heads * (still + l.value));
        let up = self.matrix(c, part::KV_UP, latent, [wide, rank], None);
        let up = self.b.reshape(up, &with(&[kv, each]));
        let (k, v) = match plain {
            None => (shared, self.b.reshape(up, &with(&[kv, value]))),
            Some(plain) => {
                let parts = self.b.ops(Split(smallvec![plain, value]), &[up]);
                (self.b.op(Concat(size), &[parts[0], shared]), parts[1])
            }
        };
        let v = if l.value == a.head_size {
            self.b.reshape(v, &with(&[kv, size]))
        } else {
            let rest = self.dim_of(c, "no_value", a.head_size - l.value);
            let zeros = self.b.zeros(&Type::f32(&with(&[kv, rest])));
            self.b.op(Concat(size), &[v, zeros])
        };
        (q, Some(k), Some(v))
    }

    /// The parts of heads that turn, turned: as a rotation of their own, or at the frequencies of
    /// the pairs of a whole head that each head of keys has.
    fn turn_latent(&mut self, c: Owner, a: &spec::Attention, l: &spec::Latent, x: Value) -> Value {
        let Some(rope) = a.rope else { return x };
        if l.pairs.is_empty() {
            return self.rope(x, c, rope, false);
        }
        let of = rope.turning(a.head_size) / 2;
        if let [pairs] = &l.pairs[..] {
            return self.turned_by_tokens(x, rope, Some(ir::Chosen::new(pairs, of)));
        }
        // Queries of the heads that share a key turn alike.
        let dims = self.b.dims(x);
        let rows = dims[..dims.len() - 2].to_vec();
        let (heads, turned) = (self.b.module.size(dims[dims.len() - 2]), dims[dims.len() - 1]);
        let all = self.dim_of(c, &format!("turned_of{heads}"), heads * l.turned);
        let group = heads / l.keys;
        let some = self.dim_of(c, &format!("turned_by{group}"), group * l.turned);
        let many = self.dim_of(c, &format!("keyed{group}"), group);
        let flat = self.b.reshape(x, &[&rows[..], &[all]].concat());
        let parts = self.b.ops(Split((0..l.keys).map(|_| some).collect()), &[flat]);
        let mut out = vec![];
        for (part, pairs) in parts.into_iter().zip(&l.pairs) {
            let part = self.b.reshape(part, &[&rows[..], &[many, turned]].concat());
            let part = self.turned_by_tokens(part, rope, Some(ir::Chosen::new(pairs, of)));
            out.push(self.b.reshape(part, &[&rows[..], &[some]].concat()));
        }
        let flat = self.b.op(Concat(all), &out);
        self.b.reshape(flat, &dims)
    }

    /// The parts of queries that turn, each at the place of its head of keys among those of all,
    /// with zeros at the others: one head of all parts gives the scores of each.
    fn among_keys(&mut self, c: Owner, l: &spec::Latent, x: Value, parts: Dim) -> Value {
        if l.keys == 1 {
            return x;
        }
        let dims = self.b.dims(x);
        let rows = dims[..dims.len() - 2].to_vec();
        let (heads, turned) = (self.b.module.size(dims[dims.len() - 2]), dims[dims.len() - 1]);
        let group = heads / l.keys;
        let all = self.dim_of(c, &format!("turned_of{heads}"), heads * l.turned);
        let some = self.dim_of(c, &format!("turned_by{group}"), group * l.turned);
        let many = self.dim_of(c, &format!("keyed{group}"), group);
        let wide = self.dim_of(c, "placed", group * l.keys * l.turned);
        let whole = self.dim_of(c, "all_placed", heads * l.keys * l.turned);
        let flat = self.b.reshape(x, &[&rows[..], &[all]].concat());
        let split = self.b.ops(Split((0..l.keys).map(|_| some).collect()), &[flat]);
        let zeros = self.b.zeros(&Type::f32(&[&rows[..], &[many, turned]].concat()));
        let mut out = vec![];
        for (key, part) in split.into_iter().enumerate() {
            let part = self.b.reshape(part, &[&rows[..], &[many, turned]].concat());
            let at: Vec<Value> = (0..l.keys as usize).map(|i| if i == key { part } else { zeros }).collect();
            let part = self.b.op(Concat(parts), &at);
            out.push(self.b.reshape(part, &[&rows[..], &[wide]].concat()));
        }
        let flat = self.b.op(Concat(whole), &out);
        self.b.reshape(flat, &[&rows[..], &[dims[dims.len() - 2], parts]].concat())
    }

    /// The length of latents, where queries and outputs absorb the matrix that would make keys and
    /// values of them.
    fn absorbs(&self, a: &spec::Attention) -> Option<u64> {
        self.shape.cache.and_then(|_| latent_place(a))
    }

    /// That matrix as one for each head: rows of its key, then of its value.
    fn kv_up(&mut self, c: Owner, l: &spec::Latent, heads: Dim, still: u64) -> Value {
        let heads_of = self.b.module.size(heads);
        let rank = self.dim_of(c, "kv_rank", l.kv);
        let each = self.dim_of(c, "kv_each", still + l.value);
        let wide = self.dim_of(c, "kv_up", heads_of * (still + l.value));
        let w = self.whole_matrix(c, part::KV_UP, [wide, rank], None);
        self.b.reshape(w, &[heads, each, rank])
    }

    /// Values of heads, from sums of latents that the part of keys that heads share follows:
    /// `Σ p (W v) = W Σ p v`.
    fn values_of_latents(&mut self, c: Owner, l: &spec::Latent, o: Value, head_size: u64) -> Value {
        let still = head_size - l.turned;
        let of_keys = if l.keys == 1 { "turned" } else { "all_turned" };
        let parts = [("kv_rank", l.kv), (of_keys, l.keys * l.turned), ("value", l.value)];
        let [rank, turned, value] = parts.map(|(name, size)| self.dim_of(c, name, size));
        let heads = self.b.dims(o)[2];
        let w = self.kv_up(c, l, heads, still);
        let sums = self.b.ops(Split(smallvec![rank, turned]), &[o])[0];
        self.b.op(ByHead { over: rank, part: value, first: still }, &[sums, w])
    }

    /// The component whose keys and values an attention reads.
    fn source(&self, a: &spec::Attention) -> Result<Option<Owner>, CompileError> {
        let Some(name) = &a.kv_from else { return Ok(None) };
        let number = self.architecture.model.components.get_index_of(name.as_str());
        let number = number.ok_or(CompileError::Unsupported("keys of a component without definition"))?;
        Ok(Some(Owner::Component(number as u32)))
    }

    /// Whether other components read the keys and values of this one.
    fn is_read(&self, c: Owner) -> bool {
        let name = self.architecture.label(c);
        let attentions = self.architecture.model.components.values().filter_map(spec::Component::attention);
        attentions.into_iter().any(|a| a.kv_from.as_ref() == Some(&name))
    }

    /// A state with a row for each application of a component, as it is by now.
    pub(super) fn handed(&mut self, c: Owner, part: Part, row: &Type) -> (String, Value) {
        let name = self.architecture.name_of(c, part);
        if let Some((_, value)) = self.handed.get(&name) {
            return (name, *value);
        }
        let rows = self.architecture.rows_of(c);
        let depths = match part.rows_before() {
            0 => self.dim_of(c, "depths", rows),
            before => self.dim_of(c, ".depths_behind", rows + before),
        };
        let ty = Type::f32(&[&[depths], &row.dims[..]].concat());
        let (port, state) = self.state(c, part, Lifetime::Depth, ty);
        self.handed.insert(name.clone(), (port, state));
        (name, state)
    }

    pub(super) fn hand(&mut self, name: &str, value: Value) {
        if let Some((_, now)) = self.handed.get_mut(name) {
            *now = value;
        }
    }

    /// A row of such a state: it is taken out and put back.
    pub(super) fn handed_row(&mut self, c: Owner, part: Part, row: &Type, index: Value) -> Value {
        let (name, state) = self.handed(c, part, row);
        let taken = self.b.ops(Op::CacheTake, &[state, index]);
        let state = self.b.op(Op::CacheWrite, &[taken[1], taken[0], index]);
        self.hand(&name, state);
        taken[0]
    }

    pub(super) fn hand_row(&mut self, c: Owner, part: Part, value: Value) {
        let ty = self.b.ty(value).clone();
        self.handed(c, part, &ty);
        let row = self.row(c);
        self.hand_at(c, part, value, row);
    }

    /// Writes a row of such a state.
    pub(super) fn hand_at(&mut self, c: Owner, part: Part, value: Value, row: Value) {
        let ty = self.b.ty(value).clone();
        let (name, state) = self.handed(c, part, &ty);
        let state = self.b.op(Op::CacheWrite, &[state, value, row]);
        self.hand(&name, state);
    }

    /// Leaves keys and values for components that read them.
    fn hand_keys(&mut self, c: Owner, k: Value, v: Value) {
        self.hand_row(c, part::HANDED_KEYS, k);
        self.hand_row(c, part::HANDED_VALUES, v);
        self.made.insert(self.architecture.label(c), (k, v));
    }

    /// Keys and values of the latest application of a component: of tokens, or with caches of all
    /// places.
    fn keys_of(&mut self, source: Owner, rows: &[Dim], heads: [Dim; 2]) -> (Value, Value) {
        let label = self.architecture.label(source);
        if let Some(&made) = self.made.get(&label) {
            return made;
        }
        let cache = self.architecture.cache_of(source).unwrap_or(0) as u32;
        match self.shape.cache {
            None => {
                let ty = Type::f32(&[rows, &heads].concat());
                let latest = self.b.index(&format!("{label}.latest"), Index::Latest(cache));
                let k = self.handed_row(source, part::HANDED_KEYS, &ty, latest);
                (k, self.handed_row(source, part::HANDED_VALUES, &ty, latest))
            }
            Some(places) => {
                let entries = self.dim("places", places.tokens);
                let ty = Type::f32(&[&[rows[0], entries], &heads[..]].concat());
                let mut latest = |part: Part| {
                    let name = format!("{}.latest", self.architecture.name_of(source, part));
                    self.facts.states.insert(name.clone(), State { owner: source, part });
                    self.b.param(&name, Binding::State(Lifetime::Token(PerToken::Latest)), ty.clone())
                };
                (latest(part::KEYS), latest(part::VALUES))
            }
        }
    }

    /// How keys and values of sequence attention are shared by the passes around.
    fn keys(&self) -> Keys {
        self.body.map_or(Keys::Own, |body| body.keys)
    }

    /// Keys and values that the first pass made at this place of it: of all tokens, or with caches
    /// of all places.
    fn first_keys(&mut self, c: Owner, heads: [Dim; 2]) -> (Value, Value) {
        let rows = self.stream_rows();
        let Some(places) = self.shape.cache else {
            let (ty, row) = (Type::f32(&[&rows, &heads[..]].concat()), self.row(c));
            let k = self.handed_row(c, part::HANDED_KEYS, &ty, row);
            return (k, self.handed_row(c, part::HANDED_VALUES, &ty, row));
        };
        let entries = self.dim("places", places.tokens);
        let ty = Type::f32(&[&[rows[0], entries], &heads[..]].concat());
        let mut first = |part: Part| {
            let name = format!("{}.first", self.architecture.name_of(c, part));
            self.facts.states.insert(name.clone(), State { owner: c, part });
            self.b.param(&name, Binding::State(Lifetime::Token(PerToken::First)), ty.clone())
        };
        (first(part::KEYS), first(part::VALUES))
    }

    /// Keys and values of every token of the stream: those made here, and of tokens that take no
    /// part those of the first pass at this place of it.
    fn replaced(&mut self, c: Owner, k: Value, v: Value) -> (Value, Value) {
        if self.inside.is_empty() {
            return (k, v);
        }
        let ones = self.ones(&self.b.rows(k));
        let own = self.every(ones, Row::Key);
        let one = self.b.constant(1.0);
        let rest = self.b.sub(one, own);
        let cache = self.cache_number(c);
        let by = self.body.and_then(|body| body.each_pass.get(cache as usize)).map_or(0, |by| *by as u32);
        let name = format!("{}.first_pass", self.architecture.label(c));
        let first = self.b.index(&name, Index::FirstPass { cache, by });
        let [k, v] = [(k, part::HANDED_KEYS), (v, part::HANDED_VALUES)].map(|(made, part)| {
            let made = self.every(made, Row::Key);
            let ty = self.b.ty(made).clone();
            let before = self.handed_row(c, part, &ty, first);
            let kept = self.b.mul(before, rest);
            self.b.add(made, kept)
        });
        (k, v)
    }

    /// Positions of the queries (only of those at `asking`, where given) and of keys of all tokens
    /// without a cache, or of the first pass; none where a causal mask will do.
    fn first_places(&mut self, rows: &[Dim], asking: Option<Value>, spread: bool) -> Option<(Value, Value)> {
        let asked = self.asked();
        if let Some(places) = self.shape.cache {
            let (positions, keys) = self.cached_places(rows, places);
            // A query that nobody asks for stands before all keys.
            let asked = asked.map(|asked| self.b.op(KeepInts { otherwise: -1 }, &[positions, asked]));
            return Some((asked.unwrap_or(positions), keys));
        }
        if spread || asking.is_none() && asked.is_none() && !self.gathered() {
            return None;
        }
        let queries = match (asking, asked) {
            (Some(index), _) => {
                let all = self.all_places(rows);
                self.b.op(Op::TakeTokens, &[all, index])
            }
            (None, Some(asked)) => asked,
            (None, None) => self.all_places(rows),
        };
        let rows = self.stream_rows();
        Some((queries, self.places_in_order(&rows)))
    }

    /// Positions of queries and of all places of the caches.
    fn cached_places(&mut self, rows: &[Dim], places: Places) -> (Value, Value) {
        let entries = self.dim("places", places.tokens);
        let (input, ty) = (Input::KeyPositions, Type::i32(&[rows[0], entries]));
        let keys = self.b.param(input.name(), Binding::Batch(input), ty);
        (self.given(Input::Positions), keys)
    }

    /// `λ v + (1 - λ) v_0`, `v_0` of the component's first application.
    fn residual_values(&mut self, c: Owner, v: Value) -> Value {
        self.hand_row(c, part::FIRST_VALUES, v);
        let (ty, first) = (self.b.ty(v).clone(), self.b.index("first", Index::First));
        let before = self.handed_row(c, part::FIRST_VALUES, &ty, first);
        let one = self.one();
        let share = self.weight(c, part::RESIDUAL, &[one], TensorKind::Gain, Some(Init::Constant(0.5)));
        let share = self.b.reshape(share, &[]);
        let all = self.b.constant(1.0);
        let rest = self.b.sub(all, share);
        let (own, first) = (self.b.mul(v, share), self.b.mul(before, rest));
        self.b.add(own, first)
    }

    /// A matrix's result and its bias, where it has one.
    pub(super) fn bias(&mut self, c: Owner, part: Option<Part>, x: Value) -> Value {
        let Some(part) = part else { return x };
        let dims = self.b.dims(x);
        let zero = Some(Init::Constant(0.0));
        let bias = self.weight(c, part, &dims[dims.len() - 1..], TensorKind::Gain, zero);
        self.b.add(x, bias)
    }

    /// Outputs of heads where each softmax has one more logit, of no value: the share `Σ e^s / (Σ
    /// e^s + e^sink)` of them.
    fn sunk(&mut self, c: Owner, o: Value, lse: Value, heads: Dim) -> Value {
        let sink = self.weight(c, part::SINK, &[heads], TensorKind::Gain, Some(Init::Constant(0.0)));
        let above = self.b.sub(lse, sink);
        let share = self.b.unary(Unary::Sigmoid, above);
        self.b.mul(o, share)
    }

    /// The log-sum-exp with the logit of its sink.
    fn with_sink(&mut self, c: Owner, lse: Value, heads: Dim) -> Value {
        let sink = self.weight(c, part::SINK, &[heads], TensorKind::Gain, Some(Init::Constant(0.0)));
        let above = self.b.sub(lse, sink);
        let more = self.b.unary(Unary::Softplus, above);
        self.b.add(more, sink)
    }

    /// Outputs of heads times `sigmoid(W_g n)`. The queries are the tokens of `n`, or those at
    /// `asking` of them.
    fn gated(&mut self, c: Owner, gate: spec::HeadGate, o: Value, n: Value, asking: Option<Value>) -> Value {
        let (dims, hidden) = (self.b.dims(o), self.hidden());
        let n = match asking {
            Some(index) if self.b.dims(n)[1] != dims[1] => self.b.op(Op::TakeTokens, &[n, index]),
            _ => n,
        };
        let (rows, heads) = (&dims[..2], &dims[2..]);
        let out = match gate {
            spec::HeadGate::Head => heads[0],
            spec::HeadGate::Element => {
                let all = self.b.module.elements(heads);
                self.dim_of(c, "q", all)
            }
        };
        let z = self.matrix(c, part::GATE, n, [out, hidden], None);
        let mut share = self.b.unary(Unary::Sigmoid, z);
        if gate == spec::HeadGate::Element {
            share = self.b.reshape(share, &[rows, heads].concat());
        }
        self.b.mul(o, share)
    }

    /// Queries, keys and values of depth attention for every token of the stream, in a dimension
    /// more than they have: there a query is 1, and the key of a token that takes no part in this
    /// application so low that its weight is exactly 0.
    pub(super) fn mark(&mut self, c: Owner, parts: [Value; 3]) -> [Value; 3] {
        const NEVER: f64 = 1e30;
        let one = self.one();
        let dims = self.b.dims(parts[0]);
        let size = dims.last().map_or(0, |&d| self.b.module.size(d));
        let wide = self.dim_of(c, "marked", size + 1);
        let ones = self.ones(&dims[..2]);
        let taking = self.every(ones, Row::Key);
        let rows = self.b.dims(taking);
        let less = self.b.constant(1.0);
        let absent = self.b.sub(taking, less);
        let absent = self.b.scale(absent, NEVER);
        let [q, k, v] = parts;
        let parts = [self.every(q, Row::Query), self.every(k, Row::Key), self.every(v, Row::Key)];
        let channels = [self.b.constant(1.0), absent, self.b.constant(0.0)];
        [0, 1, 2].map(|i| {
            let heads = self.b.dims(parts[i])[2];
            let zeros = self.b.zeros(&Type::f32(&[&rows[..], &[heads, one]].concat()));
            let channel = self.b.add(zeros, channels[i]);
            self.b.op(Concat(wide), &[parts[i], channel])
        })
    }

    /// The result of depth attention for the tokens that there are here, without the dimension of
    /// marks.
    pub(super) fn unmark(&mut self, o: Value, size: Dim) -> Value {
        let one = self.one();
        let o = self.b.ops(Split(smallvec![size, one]), &[o])[0];
        self.here_again(o)
    }

    /// Of rows of every token of the stream, those of the tokens that there are here.
    pub(super) fn here_again(&mut self, mut x: Value) -> Value {
        for i in 0..self.inside.len() {
            if let Inside::Gathered { index, .. } = self.inside[i] {
                x = self.b.op(Op::TakeTokens, &[x, index]);
            }
        }
        x
    }

    /// Appends keys and values to the caches of this application, latents that are both to one;
    /// positions of the queries and of what is cached.
    pub(super) fn cache(&mut self, c: Owner, operands: &mut [Value], places: Places) -> (Value, Value) {
        let parts = if operands[1] == operands[2] { [part::LATENTS; 2] } else { [part::KEYS, part::VALUES] };
        self.cache_as(c, parts, operands, places, &mut None)
    }

    /// The same under these names. Keys of processed tokens are admitted once.
    pub(super) fn cache_as(
        &mut self,
        c: Owner,
        parts: [Part; 2],
        operands: &mut [Value],
        places: Places,
        admitted: &mut Option<Admitted>,
    ) -> (Value, Value) {
        let dims = self.b.dims(operands[1]);
        let (batch, kv) = (dims[0], &dims[2..]);
        let positions = self.given(Input::Positions);
        let kept = match self.inside.last() {
            Some(&Inside::Masked { keys, .. }) => keys,
            _ => None,
        };
        let queries = match self.asked() {
            // A query that nobody asks for stands before all keys.
            Some(asked) => self.b.op(KeepInts { otherwise: -1 }, &[positions, asked]),
            None => positions,
        };
        let Admitted { entries, slots, keys } = match (kept, *admitted) {
            (_, Some(admitted)) => admitted,
            // Tokens that have keys alone, side by side.
            (Some((taking, share)), None) => {
                let entries = places.entries(share);
                let entries = self.dim(&format!("entries{entries}"), entries);
                let ty = Type::i32(&[batch, entries]);
                let (port, cached) = self.state(c, part::CACHED, Lifetime::Token(PerToken::Application), ty);
                let admitted = self.b.ops(Op::Admit, &[cached, positions, taking]);
                self.b.result(port, admitted[0]);
                Admitted { entries, slots: admitted[1], keys: admitted[0] }
            }
            (None, None) => self.all_entries(batch, places),
        };
        *admitted = Some(Admitted { entries, slots, keys });
        let ty = Type::f32(&[&[batch, entries], kv].concat());
        let lifetime = if self.is_read(c) || self.architecture.shares_keys(c) {
            Lifetime::Token(PerToken::Row)
        } else {
            Lifetime::Token(PerToken::Application)
        };
        let mut append = |part: Part, rows| {
            let (port, cache) = self.state(c, part, lifetime, ty.clone());
            let cache = self.b.op(Op::Append, &[cache, rows, slots]);
            self.b.result(port, cache);
            cache
        };
        let [k, v] = [operands[1], operands[2]];
        if parts[0] == parts[1] {
            let latents = append(parts[0], k);
            (operands[1], operands[2]) = (latents, latents);
        } else {
            (operands[1], operands[2]) = (append(parts[0], k), append(parts[1], v));
        }
        (queries, keys)
    }

    /// The entries of every token.
    fn all_entries(&mut self, batch: Dim, places: Places) -> Admitted {
        let entries = self.dim("places", places.tokens);
        let (input, ty) = (Input::KeyPositions, Type::i32(&[batch, entries]));
        let keys = self.b.param(input.name(), Binding::Batch(input), ty);
        Admitted { entries, slots: self.given(Input::Slots), keys }
    }

    /// Rotated by position, where the rotation has a share of the vectors their first elements
    /// alone.
    pub(super) fn rope(&mut self, x: Value, c: Owner, rope: spec::Rope, depth: bool) -> Value {
        let size = self.b.dims(x).last().map_or(0, |&d| self.b.module.size(d));
        let turning = rope.turning(size);
        if turning < size {
            let all = self.b.dims(x).last().copied().into_iter().collect::<Vec<_>>();
            let [turning, rest] =
                [turning, size - turning].map(|part| self.dim_of(c, &format!("{part}of{size}"), part));
            let parts = self.b.ops(Split(smallvec![turning, rest]), &[x]);
            let turned = self.rope(parts[0], c, spec::Rope { share: 1.0, ..rope }, depth);
            return self.b.op(Concat(all[0]), &[turned, parts[1]]);
        }
        if !depth {
            return self.turned_by_tokens(x, rope, None);
        }
        let attention = rope.scaling.map_or(1.0, |s| s.attention());
        let positions = Positions::Depth { half_reversed: rope.half_reversed };
        let scaling = rope.scaling.map(spec::RopeScaling::frequencies);
        let op = Op::Rope(ir::Rope { base: rope.base, positions, scaling, chosen: None, inverse: false });
        let (l, all) = (self.b.index("depth", Index::Depth), self.b.index("depths", Index::Depths));
        let turned = self.b.op(op, &[x, l, all]);
        self.b.scale(turned, attention)
    }

    /// All of these vectors rotated by the positions of tokens.
    fn turned_by_tokens(&mut self, x: Value, rope: spec::Rope, chosen: Option<ir::Chosen>) -> Value {
        let attention = rope.scaling.map_or(1.0, |s| s.attention());
        let scaling = rope.scaling.map(spec::RopeScaling::frequencies);
        let (base, positions) = (rope.base, Positions::Tokens);
        let op = Op::Rope(ir::Rope { base, positions, scaling, chosen, inverse: false });
        let positions = self.given(Input::Positions);
        let turned = self.b.op(op, &[x, positions]);
        self.b.scale(turned, attention)
    }

    /// One projection of an attention, `[out, in]`: a matrix, or the mixture
    /// `s·W_e·x + stop_gradient(s)·W_shared·x` (Equation 7).
    pub(super) fn projection(
        &mut self,
        c: Owner,
        [part, common]: [Part; 2],
        x: Value,
        [out, over]: [Dim; 2],
        routing: &Option<(Routing, bool, u64)>,
        init: Option<Init>,
    ) -> Value {
        let Some((routing, shared, experts)) = routing else {
            return self.matrix(c, part, x, [out, over], init);
        };
        let many = self.dim_of(c, &format!("projections{experts}"), *experts);
        let w = self.weight(c, part, &[many, out, over], TensorKind::Routed, init);
        let slots = self.b.op(Op::Gather, &[x, routing.order]);
        let y = self.b.op(Grouped { over }, &[slots, w, routing.offsets]);
        let y = self.adapted_each(c, part, ([slots, y, routing.offsets], w), [many, out, over]);
        let y = self.b.op(Op::Combine, &[y, routing.inverse]);
        let rows = self.b.rows(x);
        let s = self.b.reshape(routing.gates, &rows);
        let y = self.b.mul(y, s);
        if !shared {
            return y;
        }
        let w = self.weight(c, common, &[out, over], TensorKind::Shared, init);
        if self.form.is_declared() {
            return y;
        }
        let common = self.b.contract(x, w, &[over]);
        let s = self.b.stop_gradient(s);
        let common = self.b.mul(common, s);
        self.b.add(y, common)
    }
}

//! Functions of several tokens: what they see of a sequence, and what decoding keeps for them.

use super::*;
use crate::op::attention::Among;
use crate::op::choose::{ChooseKeys, Measure};
use crate::op::chosen::{KeyMass, KeyScores};
use crate::op::{Conv, KeepInts, Running, Tokens};
use dreamc_dsl::define::graph::{Attend, Choice, Measure as Measured};
use smallvec::smallvec;

impl Lower<'_> {
    /// Which tokens a mixer goes through, and the integers that say so.
    pub(super) fn sequence(&mut self, rows: &[Dim]) -> (Tokens, Option<Value>) {
        let mixed = self.mixed();
        if self.shape.cache.is_some() {
            return (Tokens::Kept, Some(mixed.unwrap_or_else(|| self.given(Input::Slots))));
        }
        let segments = self.shape.segments.then(|| self.given(Input::Segments));
        let marks = match (mixed, segments) {
            (None, None) => return (Tokens::All, None),
            (None, Some(segments)) => segments,
            (Some(mixed), segments) => {
                let segments = segments.unwrap_or_else(|| {
                    // No token decides, so that all have the number of those that do not.
                    let zeros = self.b.zeros(&Type::f32(rows));
                    let none = self.b.op(Decide { inclusive: false }, &[zeros]);
                    self.b.op(KeepInts { otherwise: 0 }, &[none, none])
                });
                self.b.op(KeepInts { otherwise: -1 }, &[segments, mixed])
            }
        };
        (Tokens::Segments, Some(marks))
    }

    /// A convolution over the tokens so far, a filter for each channel.
    pub(super) fn convolved(
        &mut self,
        d: &mut Defining,
        node: &Node,
        width: DimId,
    ) -> Result<Value, CompileError> {
        let (v, filter) = (d.arg(node, 0)?, d.arg(node, 1)?);
        let own = d.own(&node.ty);
        let v = self.each_token(d, v);
        let mut values = self.formulas(&d.rows);
        let v = values.ordered(v, &own);
        let v = self.of_last_token(d, v);
        let mut values = self.formulas(&d.rows);
        let filter = values.spread(filter, &[&[d.dim(width)], &own[..]].concat(), false);
        let (tokens, marks) = self.sequence(&d.rows);
        let op = Conv { reverse: false, tokens };
        let size = d.graph.size(width);
        let y = match (tokens, marks) {
            (Tokens::Kept, Some(_)) if size <= 1 => {
                let filter = self.b.reshape(filter, &own);
                self.b.mul(v, filter)
            }
            (Tokens::Kept, Some(slots)) => {
                let before = self.dim_of(d.owner, &format!(".before{}", size - 1), size - 1);
                let part = d.text_state();
                let (port, history) = self.text_state(d.owner, part, &[&[before], &own[..]].concat());
                let results = self.b.ops(op, &[v, filter, history, slots]);
                self.b.result(port, results[1]);
                results[0]
            }
            (_, marks) => {
                let operands: Vec<Value> = [v, filter].into_iter().chain(marks).collect();
                self.b.op(op, &operands)
            }
        };
        match node.args.get(2) {
            Some(&bias) => {
                let bias = d.value(bias);
                Ok(self.formulas(&d.rows).binary(ir::Binary::Add, y, bias, &own))
            }
            None => Ok(y),
        }
    }

    /// The sum over the tokens so far, or over those of the token's own block.
    pub(super) fn summed(&mut self, d: &mut Defining, v: Value, block: Option<u64>) -> Value {
        let v = self.each_token(d, v);
        let v = self.of_last_token(d, v);
        let (tokens, marks) = self.sequence(&d.rows);
        let op = Running { reverse: false, tokens, block };
        let positions = block.map(|_| self.given(Input::Positions));
        match (tokens, marks) {
            (Tokens::Kept, Some(slots)) => {
                let halves = block.map(|_| self.dim("halves", 2));
                let own = self.b.dims(v)[d.rows.len()..].to_vec();
                let part = d.text_state();
                let (port, sum) = self.text_state(d.owner, part, &[halves.as_slice(), &own].concat());
                let operands = [&[v, sum, slots], positions.as_slice()].concat();
                let results = self.b.ops(op, &operands);
                self.b.result(port, results[1]);
                results[0]
            }
            (_, marks) => {
                let operands: Vec<Value> = [v].into_iter().chain(marks).chain(positions).collect();
                self.b.op(op, &operands)
            }
        }
    }

    /// The mean over the tokens here, of each sequence or of all, for every token.
    pub(super) fn averaged(&mut self, d: &Defining, v: Value, all: bool) -> Value {
        if all {
            let each = Type::f32(&self.b.dims(v));
            let mean = self.b.reduce(Reduce::Mean, v, &d.rows);
            let zeros = self.b.zeros(&each);
            return self.b.add(zeros, mean);
        }
        // A mean of each sequence is over its last dimensions, so that its gradient is a sum over
        // neighbours. A sequence and dimensions of the value are the rows; a number has one.
        let number = self.b.dims(v).len() == d.rows.len();
        let one = number.then(|| self.dim("one", 1));
        let each = [&self.b.dims(v)[..], one.as_slice()].concat();
        let (batch, tokens) = d.rows.split_at(1);
        let order = [batch, &each[d.rows.len()..], tokens].concat();
        let zeros = self.b.zeros(&Type::f32(&each));
        let wide = if number { self.b.add(zeros, v) } else { v };
        let wide = self.b.arrange(wide, &order);
        let mean = self.b.reduce(Reduce::Mean, wide, tokens);
        let zeros = self.b.zeros(&Type::f32(&order));
        let mean = self.b.add(zeros, mean);
        let mean = self.b.arrange(mean, &each);
        match one {
            Some(one) => self.b.reduce(Reduce::Sum, mean, &[one]),
            None => mean,
        }
    }

    /// The places of queries and keys in their documents, where they are not their numbers among
    /// the tokens here; negative where there is none.
    fn positions_seen(&mut self) -> Option<(Value, Value)> {
        let asked = self.asked();
        if !self.shape.segments && self.inside.is_empty() && asked.is_none() {
            return None;
        }
        let positions = self.given(Input::Positions);
        let taking = match self.inside.last() {
            Some(&Inside::Masked { keys, .. }) => keys.map(|(taking, _)| taking),
            _ => None,
        };
        let mut of = |places: Option<Value>| match places {
            Some(places) => self.b.op(KeepInts { otherwise: -1 }, &[positions, places]),
            None => positions,
        };
        Some((of(asked), of(taking)))
    }

    /// The blocks of keys that a token reads: their numbers as floats.
    pub(super) fn chosen_blocks(
        &mut self,
        d: &mut Defining,
        node: &Node,
        at: ValueId,
        choice: &Choice,
    ) -> Result<Value, CompileError> {
        let (q, k) = (d.arg(node, 0)?, d.arg(node, 1)?);
        let heads = self.heads(d, [q, k, k])?;
        let mut k = self.of_last_token(d, heads.k);
        if let (Some(&Inside::Masked { keys: Some((places, _)), .. }), None) =
            (self.inside.last(), self.shape.cache)
        {
            k = self.b.op(Op::Keep, &[k, places]);
        }
        let own = d.own(&node.ty);
        let Some((&count, lists)) = own.split_last() else { return Err(MALFORMED) };
        // Heads of one list are adjacent: those that share a head of keys, all, or one each.
        let order: Dims = heads.order.iter().copied().filter(|dim| lists.contains(dim)).collect();
        let all = self.b.module.elements(&order);
        let list = match order[..] {
            [one] => one,
            _ => self.dim_of(d.owner, &format!(".lists{all}"), all),
        };
        let mut seen = ir::Attention {
            scale: choice.scale,
            every: Some(choice.block),
            segments: self.shape.segments,
            ..ir::Attention::default()
        };
        let moved = [heads.q, k];
        let k = self.b.stop_gradient(k);
        let mut operands = vec![self.b.stop_gradient(heads.q), k, k];
        let mask = match self.shape.cache {
            Some(places) => {
                let part = part::kept(&format!("ends{}", d.text()));
                Some(self.cache_as(d.owner, [part, part], &mut operands, places, &mut d.admitted))
            }
            None => self.positions_seen(),
        };
        operands.truncate(2);
        if let Some((queries, keys)) = mask {
            seen.mask = Mask::Positions;
            operands.extend([queries, keys]);
        }
        if seen.segments {
            operands.push(self.given(Input::Segments));
        }
        let masks = operands[2..].to_vec();
        let mut weights = None;
        if choice.weighed {
            let own = d.arg(node, 2)?;
            let own = self.formulas(&d.rows).spread(own, &heads.order, true);
            let of_heads = self.b.dims(heads.q)[2];
            let own = self.b.reshape(own, &[&d.rows[..], &[of_heads]].concat());
            operands.push(self.b.stop_gradient(own));
            weights = Some(own);
        }
        let op = ChooseKeys {
            seen: seen.clone(),
            measure: match choice.measure {
                Measured::Products => Measure::Products,
                Measured::Relu => Measure::Relu,
                Measured::Softmax => Measure::Softmax,
            },
            weighed: choice.weighed,
            near: choice.near,
            first: choice.first,
            lists: list,
            count,
        };
        let chosen = self.b.op(op, &operands);
        let among =
            Among { block: choice.block, count: self.b.module.size(count), heads: all, own: choice.near > 0 };
        let numbers = self.b.op(Op::Numbers, &[chosen]);
        let made = Made {
            chosen,
            lists: order,
            among,
            scores: KeyScores {
                seen: ir::Attention { every: None, among: Some(among), ..seen },
                relu: choice.measure == Measured::Relu,
                weighed: choice.weighed,
            },
            operands: [&moved[..], &masks, &[chosen], weights.as_slice()].concat(),
        };
        let numbers = self.of_lists(d, node, &made, numbers);
        d.choices.insert(at, made);
        Ok(numbers)
    }

    /// A number for each block of each list, as the value of a graph.
    fn of_lists(&mut self, d: &Defining, node: &Node, made: &Made, numbers: Value) -> Value {
        let own = d.own(&node.ty);
        let each: Dims = own.last().copied().into_iter().collect();
        let numbers = self.b.reshape(numbers, &[&d.rows[..], &made.lists, &each].concat());
        self.formulas(&d.rows).ordered(numbers, &own)
    }

    /// Zeros in the place of a value that losses alone read, where texts are written: they have no
    /// loss.
    fn without_losses(&mut self, d: &Defining, node: &Node) -> Option<Value> {
        let ty = Type::f32(&[&d.rows[..], &d.own(&node.ty)].concat());
        self.shape.cache.is_some().then(|| self.b.zeros(&ty))
    }

    /// The scores by which tokens were chosen.
    pub(super) fn tokens_scores(&mut self, d: &Defining, node: &Node) -> Result<Value, CompileError> {
        if let Some(none) = self.without_losses(d, node) {
            return Ok(none);
        }
        let made = node.args.first().and_then(|of| d.choices.get(of)).ok_or(MALFORMED)?;
        let scores = self.b.op(made.scores.clone(), &made.operands);
        Ok(self.of_lists(d, node, made, scores))
    }

    /// The weights of the blocks that an attention reads.
    pub(super) fn mass_of(&mut self, d: &Defining, node: &Node) -> Result<Value, CompileError> {
        if let Some(none) = self.without_losses(d, node) {
            return Ok(none);
        }
        let read = node.args.first().and_then(|of| d.attentions.get(of)).ok_or(MALFORMED)?;
        let made = d.choices.get(&read.choice).ok_or(MALFORMED)?;
        let mass = self.b.op(KeyMass(read.attention.clone()), &read.operands);
        Ok(self.of_lists(d, node, made, mass))
    }

    /// The choice of an attention, its lists as heads stand here.
    fn choice_of(
        &self,
        d: &Defining,
        node: &Node,
        operand: u32,
        heads: &Heads,
    ) -> Result<(Value, Among), CompileError> {
        let made = node.args.get(operand as usize).and_then(|arg| d.choices.get(arg)).ok_or(MALFORMED)?;
        let lists = &made.lists;
        let first = heads.order.get(..lists.len()) == Some(&lists[..]);
        let of_keys = self.b.module.elements(lists) == self.b.module.size(self.b.dims(heads.k)[2]);
        if !(first || of_keys && lists.iter().all(|dim| !heads.order.contains(dim))) {
            return Err(CompileError::Unsupported(
                "a choice whose heads stand in another order than those of its attention",
            ));
        }
        Ok((made.chosen, made.among))
    }

    /// Queries, keys and values as heads of one size, and the size that values have.
    pub(super) fn heads(&mut self, d: &Defining, parts: [Value; 3]) -> Result<Heads, CompileError> {
        let [q, k, v] = parts.map(|part| self.each_token(d, part));
        let mut values = self.formulas(&d.rows);
        let [of_q, of_k, of_v] = [q, k, v].map(|x| values.own(x));
        let Some((&size, q_heads)) = of_q.split_last() else { return Err(MALFORMED) };
        let k_heads: Dims = of_k.into_iter().filter(|dim| *dim != size).collect();
        let value = of_v.into_iter().find(|dim| !k_heads.contains(dim)).ok_or(MALFORMED)?;
        let k_heads = &k_heads[..];
        // A group of query heads shares a head of keys: they are adjacent.
        let shared = k_heads.iter().copied().filter(|h| q_heads.contains(h));
        let rest = q_heads.iter().copied().filter(|h| !k_heads.contains(h));
        let order: Dims = shared.chain(rest).collect();
        let q = values.ordered(q, &[&order[..], &[size]].concat());
        let k = values.ordered(k, &[k_heads, &[size]].concat());
        let v = values.ordered(v, &[k_heads, &[value]].concat());
        let all = |dims: &[Dim]| values.b.module.elements(dims);
        let (heads, groups, sizes) = (all(&order), all(k_heads), [all(&[size]), all(&[value])]);
        // One dimension is that of the heads themselves, as long as keys have another.
        let heads = match order[..] {
            [one] => one,
            _ => self.dim_of(d.owner, &format!(".heads{heads}"), heads),
        };
        let groups = match *k_heads {
            [one] if one != heads => one,
            _ => self.dim_of(d.owner, &format!(".groups{groups}"), groups),
        };
        let longest = sizes[0].max(sizes[1]);
        let long = match sizes {
            [a, _] if a == longest => size,
            _ => value,
        };
        let mut fit = |x: Value, of: Dim, heads: Dim, own: Dim| {
            let size = self.b.module.size(own);
            let x = self.b.reshape(x, &[&d.rows[..], &[heads, own]].concat());
            if size == longest {
                return self.b.reshape(x, &[&d.rows[..], &[heads, of]].concat());
            }
            let rest = self.dim(&format!("left{}", longest - size), longest - size);
            let zeros = self.b.zeros(&Type::f32(&[&d.rows[..], &[heads, rest]].concat()));
            self.b.op(crate::op::Concat(of), &[x, zeros])
        };
        let [q, k, v] = [(q, heads, size), (k, groups, size), (v, groups, value)]
            .map(|(x, heads, own)| fit(x, long, heads, own));
        Ok(Heads { q, k, v, order, value })
    }

    /// The heads of an attention's result as the values that they are.
    pub(super) fn of_heads(&mut self, d: &Defining, node: &Node, heads: &Heads, o: Value) -> Value {
        let dims = self.b.dims(o);
        let (long, size) = (dims[dims.len() - 1], self.b.module.size(heads.value));
        let all = self.b.module.size(long);
        let mut o = o;
        if size < all {
            let rest = self.dim(&format!("left{}", all - size), all - size);
            o = self.b.ops(Split(smallvec![heads.value, rest]), &[o])[0];
        }
        let rows = self.b.dims(o)[..2].to_vec();
        let o = self.b.reshape(o, &[&rows[..], &heads.order, &[heads.value]].concat());
        let own = d.own(&node.ty);
        self.formulas(&rows).ordered(o, &own)
    }

    /// Attention over the tokens so far.
    pub(super) fn attended(
        &mut self,
        d: &mut Defining,
        node: &Node,
        at: ValueId,
        a: &Attend,
    ) -> Result<Value, CompileError> {
        let mut heads = self.heads(d, [d.arg(node, 0)?, d.arg(node, 1)?, d.arg(node, 2)?])?;
        if a.scale < 0.0 {
            heads.q = self.b.unary(Unary::Neg, heads.q);
        }
        let mut op = ir::Attention {
            scale: a.scale.abs(),
            softcap: None,
            window: a.window,
            mask: Mask::Causal,
            segments: self.shape.segments,
            program: None,
            dropout: (a.dropout > 0.0 && self.form == Form::Training).then_some(a.dropout),
            every: a.every,
            among: None,
        };
        let among = match a.among {
            Some((operand, _)) => {
                let (chosen, among) = self.choice_of(d, node, operand, &heads)?;
                op.among = Some(among);
                Some(chosen)
            }
            None => None,
        };
        let scored = attend::program(d.graph, &d.graph.region, node, a)?;
        let (mut k, mut v) = (self.of_last_token(d, heads.k), self.of_last_token(d, heads.v));
        if let (Some(&Inside::Masked { keys: Some((places, _)), .. }), None) =
            (self.inside.last(), self.shape.cache)
        {
            k = self.b.op(Op::Keep, &[k, places]);
            v = self.b.op(Op::Keep, &[v, places]);
        }
        let mut operands = vec![heads.q, k, v];
        let mask = match self.shape.cache {
            Some(places) => {
                let number = d.text();
                let part = |name: &str| part::kept(&format!("{name}{number}"));
                let parts = [part("keys"), part("values")];
                Some(self.cache_as(d.owner, parts, &mut operands, places, &mut d.admitted))
            }
            None if op.listed() => self.positions_seen(),
            None => self.tokens_seen(&d.rows, a.window.is_some() || reads_places(a)),
        };
        if let Some((queries, keys)) = mask {
            op.mask = Mask::Positions;
            operands.extend([queries, keys]);
        }
        if op.segments {
            operands.push(self.given(Input::Segments));
        }
        let masks = operands[3..].to_vec();
        let plain = ir::Attention { dropout: None, ..op.clone() };
        if op.dropout.is_some() {
            let draws = Ints::Draws(self.dropping);
            operands.push(self.token_ints(draws));
            self.dropping += 1;
        }
        operands.extend(among);
        if let Some((program, sources)) = scored {
            let read = self.read_by_score(d, node, &heads, &sources)?;
            operands.extend(read);
            op.program = Some(std::sync::Arc::new(program));
        }
        let mut scores = self.shape.scores.then(|| self.scores(&op, &operands));
        let results = self.b.ops(Op::Attention(op), &operands);
        let (mut o, lse) = (results[0], results[1]);
        if let (Some((operand, _)), Some(chosen)) = (a.among, among) {
            let choice = *node.args.get(operand as usize).ok_or(MALFORMED)?;
            let operands = [&[heads.q, operands[1], lse], &masks[..], &[chosen]].concat();
            d.attentions.insert(at, Read { choice, attention: plain, operands });
        }
        if let Some(sink) = a.sink {
            let sink = d.arg(node, sink as usize)?;
            let sink = self.formulas(&d.rows).ordered(sink, &heads.order);
            let last = self.b.dims(lse)[2];
            let sink = self.formulas(&d.rows).reshaped(sink, &[last]);
            let above = self.b.sub(lse, sink);
            let share = self.b.unary(Unary::Sigmoid, above);
            o = self.b.mul(o, share);
            scores = scores.map(|scores| self.b.mul(scores, share));
        }
        if let Some(scores) = scores {
            self.point(d.owner, "scores", scores);
        }
        self.point(d.owner, "heads", o);
        Ok(self.of_heads(d, node, &heads, o))
    }
}

/// Whether a score or a mask reads where query and key stand: those of the whole sequence, whoever
/// takes part.
fn reads_places(a: &Attend) -> bool {
    let place = |n: &Node| matches!(n.function, Of::QueryPlace | Of::KeyPlace);
    [&a.score, &a.mask].into_iter().flatten().any(|region| region.nodes.iter().any(place))
}

/// A choice of blocks.
pub(super) struct Made {
    /// Numbers of blocks as integers.
    chosen: Value,
    /// The dimensions of its lists.
    lists: Dims,
    /// The same for attention.
    among: Among,
    /// Its scores, and their operands, which gradients reach.
    scores: KeyScores,
    operands: Vec<Value>,
}

/// An attention among chosen blocks: the choice, and the operands of its weights.
pub(super) struct Read {
    choice: ValueId,
    attention: ir::Attention,
    operands: Vec<Value>,
}

/// Queries, keys and values `[b, t, heads, size]`.
pub(super) struct Heads {
    pub(super) q: Value,
    pub(super) k: Value,
    pub(super) v: Value,
    /// The dimensions that heads of queries are made of.
    pub(super) order: Dims,
    /// The last dimension of a value.
    pub(super) value: Dim,
}

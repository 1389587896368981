//! Slots sorted by expert, and as many of each as fill tiles.

pub(crate) mod cuda;
pub mod kernel;

use super::*;

/// `(chosen[.., k]) -> order i32[slots], offsets i32[e1], inverse i32[.., k]`. Slots number the
/// entries of `chosen` in row-major order; `order` lists them by expert (then by number), `offsets`
/// says where each expert's begin, and `inverse` where each slot went. Choices of `experts` or more
/// (no-ops) are in no group: they stand last in `order`, after the last offset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Group {
    /// The experts.
    pub experts: Dim,
    /// Their number plus one.
    pub offsets: Dim,
    /// Product of the dimensions of `chosen`.
    pub slots: Dim,
}

/// `(score[.., k], chosen i32[.., k], order i32[slots], offsets i32[e1]) -> kept i32[.., k]`: the
/// choices with as many of each expert as fill tiles; all others are `none`. `order` and `offsets`
/// group the choices. The last `spare` of a row's choices are spare. An expert that `n` others
/// chose keeps the multiple of `tile` nearest to `n`: it lets those of the lowest score go, or
/// takes spare choices of the highest. Half a tile is filled; where spare choices are too few the
/// tile is let go. Ties go to the lower slot, and NaN is below all numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RoundGroups {
    /// The experts.
    pub experts: Dim,
    /// Slots of a tile.
    pub tile: u64,
    /// Choices at the end of a row that are spare.
    pub spare: u64,
    /// The choice of no expert.
    pub none: u64,
}

/// Of a group's slots those that a tile keeps, in no order: see [`RoundGroups`].
fn rounded(slots: &[i32], score: &[f64], k: usize, tile: usize, spare: usize) -> Vec<i32> {
    let key = |slot: i32| match score[slot as usize] {
        x if x.is_nan() => f64::NEG_INFINITY,
        x => x + 0.0,
    };
    let mut best = slots.to_vec();
    best.sort_by(|&a, &b| key(b).total_cmp(&key(a)).then(a.cmp(&b)));
    let (mut own, others): (Vec<i32>, Vec<i32>) =
        best.into_iter().partition(|&slot| slot as usize % k + spare < k);
    let over = own.len() % tile;
    let missing = tile - over;
    if over > 0 && missing <= over && missing <= others.len() {
        own.extend(&others[..missing]);
    } else {
        own.truncate(own.len() - over);
    }
    own
}

impl Payload for Group {
    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        a.word("experts")?;
        a.dim(&mut self.experts)?;
        a.word("offsets")?;
        a.dim(&mut self.offsets)?;
        a.word("slots")?;
        a.dim(&mut self.slots)
    }
}

impl Operation for Group {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "group",
            operands: &["chosen i32[.., k]"],
            results: &["order i32[slots]", "offsets i32[e1]", "inverse i32[.., k]"],
            class: Class::anchored(self),
            rows: Rows::All,
            bf16: Bf16::Own,
            work: Work::Operand(0, 1),
            derivative: Derivative::Blocked("its results are integers"),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        x.int(0)?;
        x.last(0)?;
        let all = x.elements(&x[0].dims) == x.size(self.slots);
        x.check(all, "slots must be the product of the dimensions")?;
        x.one_more(self.offsets, self.experts)?;
        Ok(vec![Type::i32(&[self.slots]), Type::i32(&[self.offsets]), x[0].clone()])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let (chosen, experts) = (e.ints(0), e.size(self.experts));
        if let Some(e) = chosen.iter().find(|&&e| e < 0) {
            return Err(format!("choice {e} is negative"));
        }
        let expert = |slot: &usize| (chosen[*slot] as usize).min(experts);
        let mut order: Vec<usize> = (0..chosen.len()).collect();
        order.sort_by_key(expert);
        let offsets = (0..=experts).map(|e| order.partition_point(|slot| expert(slot) < e) as i32).collect();
        let mut inverse = vec![0; chosen.len()];
        for (position, &slot) in order.iter().enumerate() {
            inverse[slot] = position as i32;
        }
        let order = order.into_iter().map(|s| s as i32).collect();
        Ok(vec![Data::Int(order), Data::Int(offsets), Data::Int(inverse)])
    }

    fn random(&self, mut case: Case) -> Instance {
        let routing = routing(&mut case);
        let bound = case.module.size(routing.experts) + 2;
        let chosen = case.ints("chosen", &routing.choices, bound);
        case.finish(routing.op(), &[chosen])
    }
}

impl Payload for RoundGroups {
    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        a.word("experts")?;
        a.dim(&mut self.experts)?;
        a.word("tile")?;
        a.integer(&mut self.tile)?;
        a.word("spare")?;
        a.integer(&mut self.spare)?;
        a.word("none")?;
        a.integer(&mut self.none)
    }
}

impl Operation for RoundGroups {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "round_groups",
            operands: &["score[.., k]", "chosen i32[.., k]", "order i32[slots]", "offsets i32[e1]"],
            results: &["kept i32[.., k]"],
            class: Class::anchored(self),
            rows: Rows::All,
            bf16: Bf16::Own,
            work: Work::Operand(0, 1),
            derivative: Derivative::Held(Ties::Tiles),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        x.float(0)?;
        x.int(1)?;
        x.int(2)?;
        x.int(3)?;
        let k = x.last(1)?;
        x.check(x[0].dims == x[1].dims, "scores and choices must have the same dimensions")?;
        let all = x[2].dims.len() == 1 && x.elements(&x[1].dims) == x.elements(&x[2].dims);
        x.check(all, "slots must be the product of the dimensions")?;
        x.check(x[3].dims.len() == 1, "takes offsets i32[e1]")?;
        x.one_more(x[3].dims[0], self.experts)?;
        x.check(self.tile > 0, "a tile has one slot at least")?;
        x.check(self.spare <= x.size(k), "more choices are spare than there are")?;
        let beyond = (x.size(self.experts)..=i32::MAX as u64).contains(&self.none);
        x.check(beyond, "no expert is a number beyond the last")?;
        Ok(vec![x[1].clone()])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let (k, experts) = (e.last(1), e.size(self.experts));
        let (score, chosen, order, offsets) = (e.floats(0), e.ints(1), e.ints(2), e.ints(3));
        let none = self.none as i32;
        // Choices of no expert stay as they are.
        let mut kept: Vec<i32> =
            chosen.iter().map(|&c| if (0..experts as i32).contains(&c) { none } else { c }).collect();
        for (expert, bounds) in offsets.windows(2).enumerate() {
            let from = checked(bounds[0], order.len() + 1, "offset")?;
            let to = checked(bounds[1], order.len() + 1, "offset")?;
            let slots = order.get(from..to).ok_or("offsets that fall")?;
            for &slot in slots {
                checked(slot, chosen.len(), "slot")?;
            }
            for slot in rounded(slots, score, k, self.tile as usize, self.spare as usize) {
                kept[slot as usize] = expert as i32;
            }
        }
        Ok(vec![Data::Int(kept)])
    }

    fn random(&self, mut case: Case) -> Instance {
        let routing = routing(&mut case);
        let k = case.module.size(routing.choices[routing.choices.len() - 1]);
        let none = case.module.size(routing.experts) + 2;
        let (tile, spare) = (1 + case.rng.below(4), case.rng.below(k.min(2) + 1).min(k));
        let score = case.floats_from("score", &routing.choices, super::route::random_score);
        let chosen = routing.chosen(&mut case);
        let (order, offsets) = (routing.order(&mut case), routing.offsets(&mut case));
        let op = RoundGroups { experts: routing.experts, tile, spare, none };
        case.finish(op, &[score, chosen, order, offsets])
    }
}

/// A random routing: choices and their grouping, as tensors; up to two of the choices beyond the
/// experts are no-ops.
pub(super) struct Routing {
    pub experts: Dim,
    pub offsets_dim: Dim,
    pub slots_dim: Dim,
    /// Dimensions of `chosen` and `inverse`.
    pub choices: Dims,
    chosen: Tensor,
    order: Tensor,
    offsets: Tensor,
    inverse: Tensor,
}

pub(super) fn routing(case: &mut Case) -> Routing {
    let experts = case.dim("e");
    let count = case.module.size(experts);
    let offsets_dim = case.sized("e1", count + 1);
    let mut choices = vec![case.dim("b"), case.dim("t")];
    choices.push(case.dim("k"));
    let slots = case.module.elements(&choices);
    let slots_dim = case.sized("slots", slots);
    let noops = if case.rng.once_in(2) { 0 } else { 2 };
    let data = case.fill(&choices, |rng| rng.below(count + noops) as i32);
    let chosen = Tensor::int(&case.sizes(&choices), data);
    let op = Group { experts, offsets: offsets_dim, slots: slots_dim };
    let [order, offsets, inverse] = case.made(op, &[&Type::i32(&choices)], std::slice::from_ref(&chosen));
    Routing { experts, offsets_dim, slots_dim, choices: choices.into(), chosen, order, offsets, inverse }
}

impl Routing {
    fn op(&self) -> Group {
        Group { experts: self.experts, offsets: self.offsets_dim, slots: self.slots_dim }
    }

    fn chosen(&self, case: &mut Case) -> Value {
        case.tensor("chosen", Binding::Value, Type::i32(&self.choices), self.chosen.clone())
    }

    pub fn order(&self, case: &mut Case) -> Value {
        case.tensor("order", Binding::Value, Type::i32(&[self.slots_dim]), self.order.clone())
    }

    pub fn offsets(&self, case: &mut Case) -> Value {
        case.tensor("offsets", Binding::Value, Type::i32(&[self.offsets_dim]), self.offsets.clone())
    }

    pub fn inverse(&self, case: &mut Case) -> Value {
        case.tensor("inverse", Binding::Value, Type::i32(&self.choices), self.inverse.clone())
    }

    /// Rows of tokens of size `h`.
    pub fn tokens(&self, h: Dim) -> Dims {
        with(&self.choices[..2], h)
    }
}

//! Routers, rotary positions and balancing, shared by expert mixtures and projections.

use super::{Checker, Group, Setting};
use crate::dream;
use crate::keys::{self, Section};
use crate::spec::*;

/// The router that a preset stands for.
fn preset(name: &str, projection: bool) -> Router {
    let rope = Rope { base: 500.0, half_reversed: true, share: 1.0, scaling: None };
    let dreamer = Router {
        form: RouterForm::LowRank { query: 128, rope: Some(rope) },
        score: Score::Sigmoid,
        select: Select::Logit,
        groups: 1,
        topk_groups: 1,
        normalise: !projection,
        scale: 1.0,
        balance: Some(Balance {
            rate: if projection { 1e-2 } else { 1e-3 },
            target: BalanceTarget::Median,
            law: BalanceLaw::Sign,
        }),
        load_balance_loss: 0.0,
        z_loss: 0.0,
    };
    let linear = Router { form: RouterForm::Linear, balance: None, ..dreamer.clone() };
    match name {
        "deepseek_v3" => Router {
            select: Select::Score,
            scale: 2.5,
            balance: Some(Balance { rate: 1e-3, target: BalanceTarget::Mean, law: BalanceLaw::Sign }),
            ..linear
        },
        "mixtral" => Router { score: Score::Softmax, load_balance_loss: 0.02, ..linear },
        "olmoe" => Router {
            score: Score::Softmax,
            normalise: false,
            load_balance_loss: 0.01,
            z_loss: 0.001,
            ..linear
        },
        _ => dreamer,
    }
}

/// The rate of balancing where nothing says otherwise: so large that its sum over the steps is 5,
/// which moves a bias past any logit of a fresh router. From 5000 steps on it is the paper's 1e-3,
/// which is for runs of a hundred thousand steps.
fn following(steps: Option<u64>) -> f64 {
    steps.map_or(1e-3, |steps| (5.0 / steps.max(1) as f64).clamp(1e-3, 2e-2))
}

impl Default for Projection {
    fn default() -> Self {
        Projection { count: None, shared: true, router: preset("dreamer", true) }
    }
}

impl Default for Router {
    fn default() -> Self {
        preset("dreamer", false)
    }
}

impl Checker {
    /// The router of a mixture: its preset, the fields written over it, and the short keys of the
    /// mixture itself.
    pub(crate) fn router(&mut self, owner: &Group, projection: bool) -> Option<Router> {
        let group = self.section_or_default(owner, "router", &keys::ROUTER);
        let mut base = preset(self.word(&group, "preset")?, projection);
        if let (Some(balance), false, false) = (&mut base.balance, projection, self.has(&group, "preset")) {
            balance.rate = following(self.known.steps);
        }
        let form = match self.has(&group, "form") {
            true => self.word(&group, "form"),
            false => Some(if base.form == RouterForm::Linear { "linear" } else { "low_rank" }),
        };
        let form = form.and_then(|form| self.form(owner, &group, form, &base));
        let score = match self.has(&group, "score") {
            false => Some(base.score),
            true => self.word(&group, "score").map(|w| match w {
                "softmax" => Score::Softmax,
                "sqrtsoftplus" => Score::Sqrtsoftplus,
                _ => Score::Sigmoid,
            }),
        };
        let select = match self.has(&group, "select") {
            false => Some(base.select),
            true => {
                self.word(&group, "select").map(|w| if w == "score" { Select::Score } else { Select::Logit })
            }
        };
        let groups = self.int(&group, "groups");
        let topk_groups =
            if self.has(&group, "topk_groups") { self.int(&group, "topk_groups") } else { groups };
        if projection && groups.is_some_and(|groups| groups > 1) {
            let help = "take `groups` away: the best group has the best expert";
            let path = group.path("groups");
            self.error_at("unreached", &path, "a projection chooses one expert, in one group", help);
        }
        if let (Some(groups), Some(best)) = (groups, topk_groups)
            && best > groups
        {
            let message = format!("{best} groups cannot be chosen: there are {groups}");
            let help = format!("write at most {groups}");
            self.error_at("out-of-range", &group.path("topk_groups"), message, help);
        }
        let normalise =
            if self.has(&group, "normalise") { self.bool(&group, "normalise") } else { Some(base.normalise) };
        if projection && normalise == Some(true) {
            let path = group.path("normalise");
            let help = "a gate over its own sum is 1, and no loss would reach the router";
            self.error_at("unreached-router", &path, "a top-1 router cannot be normalised", help);
        }
        let scale = if self.has(&group, "scale") { self.real(&group, "scale") } else { Some(base.scale) };
        let weight = |this: &mut Checker, key, base| {
            if this.has(&group, key) { this.real(&group, key) } else { Some(base) }
        };
        let load_balance_loss = weight(self, "load_balance_loss", base.load_balance_loss);
        let z_loss = weight(self, "z_loss", base.z_loss);
        let balance = self.one_of(owner, &group, "balance");
        let balance = match balance {
            Some(place) => self.balance(place, base.balance),
            None => Some(base.balance),
        };
        let note = self.sources.locate(&owner.path("balance")).filter(|_| self.has(owner, "balance"));
        if let Some(span) = note {
            self.sources.fields.insert(group.path("balance"), span);
        }
        Some(Router {
            form: form?,
            score: score?,
            select: select?,
            groups: groups?,
            topk_groups: topk_groups?,
            normalise: normalise?,
            scale: scale?,
            balance: balance?,
            load_balance_loss: load_balance_loss?,
            z_loss: z_loss?,
        })
    }

    /// Which of two groups a key is written in: the mixture (short) or its router. Both is an
    /// error.
    fn one_of<'g, 'a>(
        &mut self,
        owner: &'g Group<'a>,
        router: &'g Group<'a>,
        key: &'static str,
    ) -> Option<&'g Group<'a>> {
        match (self.has(owner, key), self.has(router, key)) {
            (true, true) => {
                let message = format!("`{key}` is written here and in `router`");
                self.error_at("duplicate-key", &owner.path(key), message, "take one away");
                None
            }
            (true, false) => Some(owner),
            (false, true) => Some(router),
            (false, false) => None,
        }
    }

    fn form(&mut self, owner: &Group, group: &Group, form: &str, base: &Router) -> Option<RouterForm> {
        let query_place = self.one_of(owner, group, "query");
        if form == "linear" {
            for (place, key) in [(query_place, "query"), (self.has(group, "rope").then_some(group), "rope")] {
                if let Some(place) = place {
                    let message = format!("a linear router has no `{key}`");
                    let help = format!("take `{key}` away, or write `form: low_rank`");
                    self.error_at("unknown-key", &place.path(key), message, help);
                }
            }
            return Some(RouterForm::Linear);
        }
        let (base_query, base_rope) = match &base.form {
            RouterForm::LowRank { query, rope } => (*query, *rope),
            RouterForm::Linear => {
                (128, Some(Rope { base: 500.0, half_reversed: true, share: 1.0, scaling: None }))
            }
        };
        let query = match query_place {
            Some(place) => self.int(place, "query"),
            None => Some(base_query),
        };
        let rope = if self.has(group, "rope") { self.rope(group, true) } else { Some(base_rope) };
        let (query, rope) = (query?, rope?);
        if let Some(place) = query_place {
            let span = self.sources.locate(&place.path("query")).unwrap_or_default();
            self.sources.fields.insert(group.path("query"), span);
        }
        if let Some(rope) = rope
            && rope.share < 1.0
            && !rope.turns_pairs(query)
        {
            self.odd_share(&group.path("rope"), &rope, query);
        } else if rope.is_some() && query % 2 == 1 {
            let help = "make it even, or write `rope: none`";
            self.error_at(
                "odd-size",
                &group.path("query"),
                format!("a rotated query is even, not {query}"),
                help,
            );
        }
        Some(RouterForm::LowRank { query, rope })
    }

    fn balance(&mut self, owner: &Group, base: Option<Balance>) -> Option<Option<Balance>> {
        if self.is_none(owner, "balance") {
            return Some(None);
        }
        let group = self.section(owner, "balance")?;
        let rate =
            if self.has(&group, "rate") { self.real(&group, "rate") } else { base.map(|base| base.rate) };
        if rate.is_none() && !self.has(&group, "rate") {
            self.error("missing-key", group.at, "`rate` is missing in balance", "write it: `balance: 1e-3`");
        }
        let target = match self.has(&group, "target") {
            false => Some(base.map_or(BalanceTarget::Median, |base| base.target)),
            true => self.word(&group, "target").map(|word| match word {
                "mean" => BalanceTarget::Mean,
                _ => BalanceTarget::Median,
            }),
        };
        let law = match self.has(&group, "law") {
            false => Some(base.map_or(BalanceLaw::Sign, |base| base.law)),
            true => self.word(&group, "law").map(|word| match word {
                "proportional" => BalanceLaw::Proportional,
                _ => BalanceLaw::Sign,
            }),
        };
        Some(Some(Balance { rate: rate?, target: target?, law: law? }))
    }

    /// The rotation under `rope`, or the table's default; `Some(None)` for none.
    pub(crate) fn rope(&mut self, owner: &Group, depth: bool) -> Option<Option<Rope>> {
        if self.is_none(owner, "rope") {
            return Some(None);
        }
        if let Setting::Default(text) = self.setting(owner, "rope")? {
            return Some(default_rope(owner.section, text));
        }
        let group = self.section(owner, "rope")?;
        let base = self.real(&group, "base");
        let half_reversed = self.bool(&group, "half_reversed");
        if half_reversed == Some(true) && !depth {
            let help = "the last token is not known; take it away";
            let path = group.path("half_reversed");
            self.error_at("rope", &path, "only positions of depth can be half reversed", help);
        }
        let share = self.real(&group, "share");
        let scaling = match self.has(&group, "scaling") && !self.is_none(&group, "scaling") {
            false => Some(None),
            true => self.scaling(&group).map(Some),
        };
        if let (Some(base), Some(Some(RopeScaling::Yarn { .. }))) = (base, scaling)
            && base <= 1.0
        {
            let help = "frequencies fall from pair to pair where it is above 1, and YaRN looks for the pairs between";
            let message = format!("a base of {base} has no pairs of low frequency");
            self.error_at("out-of-range", &group.path("base"), message, help);
        }
        Some(Some(Rope { base: base?, half_reversed: half_reversed?, share: share?, scaling: scaling? }))
    }

    /// Reports a share of `size` elements that is not a number of pairs.
    pub(crate) fn odd_share(&mut self, path: &str, rope: &Rope, size: u64) {
        let turning = rope.turning(size);
        let message = format!("a share of {} turns {turning} of {size} elements", rope.share);
        let help = "a rotation turns pairs: make `share` times the size an even number above 0";
        let place = format!("{path}.share");
        self.error_at("odd-size", &place, message, help);
    }

    /// Groups that experts can be chosen in.
    pub(crate) fn expert_groups(&mut self, owner: &Group, router: &Router, all: u64, active: u64) {
        let Router { groups, topk_groups, .. } = *router;
        let path = format!("{}.groups", owner.path("router"));
        if !all.is_multiple_of(groups) {
            let message = format!("{all} experts cannot be cut into {groups} equal groups");
            self.error_at("indivisible", &path, message, "`groups` divides the number of experts");
        } else if groups > 1 && active > topk_groups.saturating_mul(all / groups) {
            let few = topk_groups * (all / groups);
            let message = format!("{active} experts cannot be active: {topk_groups} groups have {few}");
            let help = "choose in more groups (`topk_groups`), or fewer experts (`active`)";
            self.error_at("out-of-range", &path, message, help);
        }
    }

    fn scaling(&mut self, owner: &Group) -> Option<RopeScaling> {
        let group = self.section(owner, "scaling")?;
        let kind = self.word(&group, "type")?;
        let factor = self.real(&group, "factor");
        for (key, of) in keys::SCALING.keys.iter().filter_map(|key| Some((key.name, key.of?))) {
            if kind != of && self.has(&group, key) {
                let message = format!("`{key}` is a key of `{of}`, and this scaling is `{kind}`");
                let help = format!("take it away, or write `type: {of}`");
                self.error_at("unknown-key", &group.path(key), message, help);
            }
        }
        if kind == "linear" {
            if self.has(&group, "original_context") {
                let help = "take it away";
                let path = group.path("original_context");
                self.error_at("unknown-key", &path, "`linear` divides all frequencies alike", help);
            }
            return Some(RopeScaling::Linear { factor: factor? });
        }
        if !self.has(&group, "original_context") {
            let message = format!("`original_context` is missing in scaling: `{kind}` needs it");
            self.error("missing-key", group.at, message, "write it: `original_context: 8192`");
            return None;
        }
        let original_context = self.real(&group, "original_context");
        if kind == "yarn" {
            let (fast, slow) = (self.real(&group, "fast")?, self.real(&group, "slow")?);
            if slow >= fast {
                let message = format!("`slow` ({slow}) is not below `fast` ({fast})");
                let help = "pairs between the two are blended, so `slow` is below `fast`";
                let path = group.path(if self.has(&group, "slow") { "slow" } else { "fast" });
                self.error_at("out-of-range", &path, message, help);
            }
            let (factor, truncate) = (factor?, self.bool(&group, "truncate")?);
            let attention = match self.has(&group, "attention") {
                true => self.real(&group, "attention")?,
                false => 0.1 * factor.max(1.0).ln() + 1.0,
            };
            let original_context = original_context?;
            return Some(RopeScaling::Yarn { factor, fast, slow, original_context, attention, truncate });
        }
        let (low, high) = (self.real(&group, "low"), self.real(&group, "high"));
        let (low, high) = (low?, high?);
        if low >= high {
            let help = "wavelengths between the two are blended, so `low` is below `high`";
            self.error_at(
                "out-of-range",
                &group.path("low"),
                format!("`low` ({low}) is not below `high` ({high})"),
                help,
            );
        }
        Some(RopeScaling::Llama3 { factor: factor?, low, high, original_context: original_context? })
    }
}

/// The rotation that a default of the table stands for.
fn default_rope(section: &Section, text: &str) -> Option<Rope> {
    let value = dream::read_value(text, section.key("rope").map(|key| key.kind), &mut Vec::new());
    let mut checker = Checker::new(Default::default());
    let group =
        checker.section_of(&keys::ROPE, &keys::Type::Any, "rope", &value, String::new(), value.span)?;
    let (base, half_reversed) = (checker.real(&group, "base")?, checker.bool(&group, "half_reversed")?);
    Some(Rope { base, half_reversed, share: 1.0, scaling: None })
}

//! A routed mixture of networks.

use serde::Serialize;

use super::mlp::{ACTIVATION_KEY, DEPTH_STREAM, about, activation};
use super::*;
use crate::keys::{BALANCE_SHORT, COUNT, QUERY_SHORT, ROUTER};
use crate::show::{or_none, router};

/// A routed mixture of networks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Experts {
    /// Number of experts `E`.
    pub count: u64,
    /// Experts each token uses, `k <= E`.
    pub active: u64,
    /// Intermediate size `I` of each.
    pub intermediate: u64,
    /// Non-linearity.
    pub activation: Activation,
    /// Further experts that return nothing (integrated MoDE); routed like the others, numbered
    /// after them.
    pub noop: u64,
    /// Experts that every token uses as well as the routed ones: one network of `shared` times `I`.
    pub shared: u64,
    /// Whether what those give is multiplied by `sigmoid(w·x)`.
    pub shared_gate: bool,
    /// Whether the router's logits and the routed experts' matrices add learned vectors.
    pub biased: bool,
    /// Whether it leaves keys and values in the depth stream of its model.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub depth_stream: bool,
    /// The number whose multiples experts' numbers of tokens are in training.
    pub round: Option<u64>,
    /// How experts are scored, chosen and balanced.
    pub router: Router,
    /// Whether it reads the stream through a norm of its own.
    pub pre_norm: bool,
    /// Whether the branch output has a norm of its own.
    pub post_norm: bool,
}

/// A routed mixture of networks.
pub static EXPERTS: Section = Section {
    name: "experts",
    doc: "A routed mixture of networks.",
    short: None,
    keys: &[
        key("count", SIZE, Required, "Number of experts *E*."),
        key("active", SIZE, Required, "Experts each token uses; at most `count + noop`."),
        key("intermediate", SIZE, Required, "Intermediate size of each."),
        ACTIVATION_KEY,
        key(
            "noop",
            COUNT,
            Value("0"),
            "Further experts that return nothing (integrated MoDE), routed like the others and numbered after them.",
        ),
        key(
            "shared",
            COUNT,
            Value("0"),
            "Experts that every token uses, as well as the routed ones (DeepSeek): one network of this many times `intermediate`.",
        ),
        key(
            "shared_gate",
            Type::Bool,
            FALSE,
            "Whether what shared experts give is multiplied by `sigmoid(w·x̂)` (Qwen).",
        ),
        key(
            "biased",
            Type::Bool,
            FALSE,
            "Whether the logits of the router and the matrices of each routed expert add learned vectors (gpt-oss).",
        ),
        key(
            "round",
            Type::Optional(&SIZE),
            Value("none"),
            "In training, each expert's number of tokens becomes the nearest multiple of this, over the micro-batch: tokens of the lowest score are let go, or tokens whose next choice it is are taken, those of the highest score first. Gates are those of the choice. Elsewhere every token has its experts (SonicMoE, 2512.14080).",
        ),
        DEPTH_STREAM,
        QUERY_SHORT,
        BALANCE_SHORT,
        key(
            "router",
            Type::Section(&ROUTER),
            Rule("the preset `dreamer`"),
            "How experts are scored, chosen, gated and balanced.",
        ),
        PRE_NORM,
        POST_NORM,
    ],
};

impl Language for Experts {
    fn check(c: &mut Checker, group: &Group, _: Kind, _: Option<u64>) -> Option<Self> {
        let (count, active) = (c.int(group, "count"), c.int(group, "active"));
        let (intermediate, noop) = (c.int(group, "intermediate"), c.int(group, "noop"));
        let activation = activation(c, group);
        if let (Some(count), Some(active), Some(noop)) = (count, active, noop)
            && active > count + noop
        {
            let message = format!("{active} experts cannot be active: there are {}", count + noop);
            let help = format!(
                "write at most {} (`count`{})",
                count + noop,
                if noop > 0 { " and `noop`" } else { "" }
            );
            c.error_at("out-of-range", &group.path("active"), message, help);
        }
        let round = c.int_or_none(group, "round");
        let (shared, shared_gate) = (c.int(group, "shared"), c.bool(group, "shared_gate"));
        if let (Some(0), Some(true)) = (shared, shared_gate) {
            let help = "write how many there are: `shared: 1`";
            let path = group.path("shared_gate");
            c.error_at("unreached", &path, "`shared_gate` gates shared experts, and there are none", help);
        }
        let (biased, depth_stream) = (c.bool(group, "biased"), c.bool(group, "depth_stream"));
        let router = c.router(group, false);
        if let (Some(router), Some(count), Some(active), Some(noop)) = (&router, count, active, noop) {
            c.expert_groups(group, router, count + noop, active);
        }
        let (pre_norm, post_norm) = (c.bool(group, "pre_norm"), c.bool(group, "post_norm"));
        Some(Experts {
            count: count?,
            active: active?,
            intermediate: intermediate?,
            activation: activation?,
            noop: noop?,
            round: round?,
            shared: shared?,
            shared_gate: shared_gate?,
            biased: biased?,
            depth_stream: depth_stream?,
            router: router?,
            pre_norm: pre_norm?,
            post_norm: post_norm?,
        })
    }

    fn show(&self, keys: &mut Fields, _: bool) {
        keys.put("count", int(self.count));
        keys.put("active", int(self.active));
        keys.put("intermediate", int(self.intermediate));
        keys.put("activation", name(self.activation));
        keys.put("noop", int(self.noop));
        keys.put("shared", int(self.shared));
        keys.put("shared_gate", ValueKind::Bool(self.shared_gate));
        keys.put("biased", ValueKind::Bool(self.biased));
        keys.put("depth_stream", ValueKind::Bool(self.depth_stream));
        keys.put("round", or_none(self.round, int));
        keys.put("router", router(&self.router));
        keys.put("pre_norm", ValueKind::Bool(self.pre_norm));
        keys.put("post_norm", ValueKind::Bool(self.post_norm));
    }
}

impl Described for Experts {
    fn norms(&self) -> (bool, bool) {
        (self.pre_norm, self.post_norm)
    }

    fn known(&self) -> Known<'_> {
        Known::Experts(self)
    }

    fn router(&self) -> Option<&Router> {
        Some(&self.router)
    }

    fn about(&self) -> Option<String> {
        Some(about(format!("{} of {} experts", self.active, self.count), self.depth_stream))
    }

    fn sizes(&mut self) -> Vec<(&str, Option<&mut u64>)> {
        vec![
            ("count", Some(&mut self.count)),
            ("active", Some(&mut self.active)),
            ("intermediate", Some(&mut self.intermediate)),
            ("noop", Some(&mut self.noop)),
            ("round", self.round.as_mut()),
            ("shared", Some(&mut self.shared)),
            ("query", self.router.query()),
        ]
    }

    fn broken(&self, _: &Model) -> Option<String> {
        let (all, router) = (self.count.saturating_add(self.noop), &self.router);
        let groups = router.groups.max(1);
        if self.active > all {
            Some(format!("{} active experts of {all}", self.active))
        } else if !all.is_multiple_of(groups) {
            Some(format!("{all} experts are no multiple of {groups} groups"))
        } else if self.active > router.topk_groups.saturating_mul(all / groups) {
            Some(format!("{} groups have no {} experts", router.topk_groups, self.active))
        } else {
            router.broken()
        }
    }

    fn owned(&self) -> Option<u64> {
        Some(self.count)
    }

    fn attends(&self, _: &Model) -> bool {
        false
    }

    fn sees_by_place(&self, _: &Model) -> bool {
        false
    }

    fn reads_by_name(&self) -> bool {
        false
    }

    fn steps(&self, _: Mixes, hidden: u64) -> Option<Vec<(String, String)>> {
        let wide = format!("n × {} × {}", self.active + self.shared, self.intermediate);
        Some(vec![
            ("router".into(), format!("n × {}", self.count + self.noop)),
            ("the chosen".into(), format!("n × {}", self.active)),
            ("up, activation".into(), wide),
            ("down, weighted sum".into(), format!("n × {hidden}")),
        ])
    }

    fn formula(&self, _: Mixes) -> String {
        "A mixture of experts: Σ_e g_e · down_e(act(gate_e x) ⊙ up_e x) over the experts that a \
         router chooses (Shazeer et al., 1701.06538)."
            .into()
    }

    fn unmix(&mut self) {}

    fn matrices(&self, _: &Model) -> Vec<String> {
        let shared = (self.shared > 0).then(|| self.activation.matrices("shared."));
        self.activation.matrices("").chain(shared.into_iter().flatten()).collect()
    }

    fn shrink(&mut self, to: &mut Small) {
        let all = self.active >= self.count + self.noop;
        to.less("shared", &mut self.shared, 2);
        if self.router.groups > 1 {
            let router = &mut self.router;
            let every = router.topk_groups == router.groups;
            let each = ((self.count + self.noop) / router.groups).min(2);
            to.less("topk_groups", &mut router.topk_groups, 2);
            to.less("groups", &mut router.groups, if every { 2 } else { 3 });
            to.less("noop", &mut self.noop, 0);
            to.less("count", &mut self.count, router.groups * each);
            self.count = router.groups * each;
            to.less("active", &mut self.active, router.topk_groups * each);
        } else {
            to.less("noop", &mut self.noop, 2);
        }
        if self.router.groups > 1 {
            to.less("active", &mut self.active, 2);
        } else if all {
            to.less("count", &mut self.count, 3);
            self.active = self.active.min(self.count + self.noop);
        } else {
            to.less("count", &mut self.count, 5);
            to.less("active", &mut self.active, 2);
        }
        if let Some(round) = &mut self.round {
            to.less("round", round, 4);
        }
        to.less("intermediate", &mut self.intermediate, 6);
        self.router.shrink("query", to);
    }

    fn settle(&mut self, least: u64) {
        self.intermediate = self.intermediate.max(least);
        self.active = self.count + self.noop;
        (self.router.groups, self.router.topk_groups) = (1, 1);
        self.round = None;
        self.router.unbalance();
    }

    fn widths(&mut self) -> Vec<(&'static str, &mut u64)> {
        vec![("intermediate", &mut self.intermediate)]
    }
}

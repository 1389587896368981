//! A configuration, between `config.json` and a specification.
//!
//! *In*: the fields of a `config.json` of either generation of `transformers` (`rope_theta` and
//! `rope_scaling`, or `rope_parameters`; `sliding_window` alone, or with `layer_types`), or a
//! specification. *Out*: a [`Config`], and from it the text of a specification, or a `config.json`.
//! *Promise*: every field was read, is known not to change what the model computes, was named to be
//! ignored, or is refused; and a configuration is written only where reading it again gives the
//! specification that it was made of.

use super::family::{
    Absent, FAMILIES, Factor, Family, Form, Kind, Mixer, Norms, Placed, Role, Rotation, Slot, Sparse, UNREAD,
    Windows,
};
use super::fields::{Fields, Result, harmless};
use dreamc_dsl::ast::Ast;
use dreamc_dsl::spec::{
    Activation, Attention, Balance, BalanceLaw, BalanceTarget, Component, Defined, EmbedScale, Exit, Experts,
    Expr, Item, Known, Looping, Mlp, Model, NormGain, Rope, RopeScaling, Setting, Statement,
};
use dreamc_dsl::{Diagnostics, Spec, Spelling};
use dreamc_runtime::checkpoint::safetensors::Dtype;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// Layers of a model, at most.
const MOST_LAYERS: u64 = 1 << 16;

/// A configuration, understood.
#[derive(Clone, Debug)]
pub struct Config {
    /// Its kind.
    pub family: &'static Family,
    /// Notes for the user.
    pub notes: Vec<String>,
    /// Quantities; flags are 0 and 1, and a number that is null is absent.
    values: BTreeMap<Slot, f64>,
    /// The layers in order.
    layers: Vec<Layer>,
    window: Option<u64>,
    /// Rotation of layers without and with the window.
    rotations: [Turn; 2],
    load_balance_loss: f64,
    /// The non-linearity of networks: in the file, and in the language.
    activation: (&'static str, &'static str),
    /// The factors of the family.
    factors: Vec<f64>,
}

/// The forms that the layers of a family have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Layer {
    windowed: bool,
    mixing: Option<Mixing>,
    network: Option<Network>,
}

/// The part of a layer that mixes tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mixing {
    Attention,
    Mixer,
}

/// The network of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Network {
    Dense,
    Sparse,
}

impl Layer {
    fn attends(&self) -> bool {
        self.mixing == Some(Mixing::Attention)
    }

    fn mixes(&self) -> bool {
        self.mixing == Some(Mixing::Mixer)
    }

    fn sparse(&self) -> bool {
        self.network == Some(Network::Sparse)
    }
}

/// A rotation: its base, and how its frequencies are lowered.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Turn {
    base: f64,
    scaling: Option<RopeScaling>,
}

/// The rotation of heads that do not turn.
const STILL: Turn = Turn { base: 0.0, scaling: None };

impl Config {
    /// Reads the fields of a configuration that stands at `path`, but for those to `ignore`.
    pub fn read(path: &Path, map: Map<String, Value>, ignore: &[String]) -> Result<Self> {
        let f = Fields::new(path, "", &map, ignore);
        let inner = |name: &str| ["rope_scaling.", "rope_parameters."].iter().any(|p| name.starts_with(p));
        if let Some(name) = ignore.iter().find(|n| !map.contains_key(*n) && !inner(n)) {
            return f.refuse(format!("has no field `{name}` to ignore"));
        }
        let mut notes = vec![];
        let family = family(&f)?;
        let activation = activation(&f, family)?;
        family.off.iter().try_for_each(|name| f.off(name))?;
        for name in family.on {
            if !f.flag(name, true)? {
                return f.wrong(name, &Value::from(false), "true");
            }
        }
        for name in family.harmless {
            f.get(name);
        }
        for &(name, right) in family.fixed {
            if let Some(value) = f.real_or_none(name)?.filter(|value| *value != right) {
                return f.wrong(name, &Value::from(value), &format!("{right:?}"));
            }
        }
        for &(name, right) in family.words {
            if let Some(word) = f.word(name)?.filter(|word| *word != right) {
                return f.wrong(name, &Value::from(word), right);
            }
        }
        if family.biased {
            packed(&f, &mut notes)?;
        }
        let mut values = values(&f, family)?;
        if family.form == Form::Recurrent {
            beginning(&f, &mut values)?;
        }
        if family.latent {
            latent(&f, &mut values)?;
        }
        if let Some((kind, placed)) = family.mixer {
            mixer(&f, kind, placed, &mut values)?;
        }
        let factors = factors(&f, family)?;
        let singles = single(&f, family)?;
        if singles.is_some() {
            let least = f.real_or_none("time_step_min")?.unwrap_or(1e-3);
            if least > 1e-9 {
                notes.push(format!(
                    "steps of Mamba-2 have no limit, as in the authors' code; transformers 5 raises those below `time_step_min` {least:?}, \
                     which moves logits where there are any"
                ));
            }
        }
        if let Some(layers) = &singles {
            values.insert(Slot::Layers, layers.len() as f64);
        }
        if family.sparse == Sparse::Counted {
            counted(&mut values);
        }
        let get = |slot| values.get(&slot).copied().unwrap_or(0.0);
        let (hidden, heads) = (get(Slot::Hidden), get(Slot::Heads));
        if family.qk_norm == "rms_all" && get(Slot::HeadSize) * heads != hidden {
            let size = Value::from(get(Slot::HeadSize) as u64);
            return f.wrong("head_dim", &size, "hidden_size / num_attention_heads");
        }
        let count = get(Slot::Layers) as u64;
        if count > MOST_LAYERS {
            return f.wrong("num_hidden_layers", &Value::from(count), "at most 65536");
        }
        let alone = family.sparse == Sparse::Counted && get(Slot::Experts) == 0.0;
        if let Some(&shared) = values.get(&Slot::Shared).filter(|_| !alone)
            && shared % get(Slot::ExpertIntermediate) != 0.0
        {
            let right = "a multiple of moe_intermediate_size";
            let named = family.fields().find(|(_, slot, _)| *slot == Slot::Shared);
            return f.wrong(named.map_or("", |(name, ..)| name), &Value::from(shared as u64), right);
        }
        let rotations = rotations(&f, family, get(Slot::Context))?;
        if let (Some((Mixer::FalconH1, _)), true) = (family.mixer, rotations[0].scaling.is_some()) {
            return f.refuse("has a scaling of its rotation, which `std/falcon_h1` has not".into());
        }
        rotations.iter().for_each(|turn| ratio(*turn, get(Slot::Context), &mut notes));
        if let Rotation::Full(base) = family.rotation
            && rotations[1].base != base
            && !map.contains_key("rope_parameters")
        {
            notes.push(format!(
                "layers with the window turn by the `rope_theta` of the file, as in version 4 of transformers; version 5 \
                 takes {base:?} for them where there is no `rope_parameters`"
            ));
        }
        let (window, windowed) = windows(&f, family, count as usize, &mut notes)?;
        let sparse = sparse(&f, family, count as usize, get(Slot::Dense) as usize, get(Slot::Experts) > 0.0)?;
        let mixers = mixers(&f, family, count as usize)?;
        let layer = |((windowed, sparse), mixer)| Layer {
            windowed,
            mixing: Some(if mixer { Mixing::Mixer } else { Mixing::Attention }),
            network: Some(if sparse { Network::Sparse } else { Network::Dense }),
        };
        let layers: Vec<Layer> =
            singles.unwrap_or_else(|| windowed.into_iter().zip(sparse).zip(mixers).map(layer).collect());
        let load_balance_loss = load_balance_loss(&f, family, get(Slot::Active), &layers, &mut notes)?;
        f.finish()?;
        Ok(Config {
            family,
            notes,
            values,
            layers,
            window,
            rotations,
            load_balance_loss,
            activation,
            factors,
        })
    }

    /// A quantity.
    pub fn real(&self, slot: Slot) -> Option<f64> {
        self.values.get(&slot).copied()
    }

    /// A whole quantity; 0 where the family lacks it.
    pub fn whole(&self, slot: Slot) -> u64 {
        self.real(slot).unwrap_or(0.0) as u64
    }

    /// A flag.
    pub fn flag(&self, slot: Slot) -> bool {
        self.real(slot) == Some(1.0)
    }

    /// The window, where some layer has one.
    pub fn window(&self) -> Option<u64> {
        self.window.filter(|_| self.layers.iter().any(|l| l.windowed))
    }

    /// Whether a layer has the window.
    pub fn windowed(&self, layer: usize) -> bool {
        self.layers.get(layer).is_some_and(|l| l.windowed)
    }

    /// The base of the rotation of layers without or with the window, and its scaling.
    pub fn rotation(&self, windowed: bool) -> (f64, Option<RopeScaling>) {
        let Turn { base, scaling } = self.rotations[usize::from(windowed)];
        (base, scaling)
    }

    /// Whether some layers have experts and others have none.
    pub fn mixed(&self) -> bool {
        self.layers.iter().any(|l| l.sparse() != self.layers[0].sparse())
    }

    /// The non-linearity of networks: in the file, and in the language.
    pub fn activation(&self) -> (&'static str, &'static str) {
        self.activation
    }

    /// Intermediate size of experts.
    fn expert_intermediate(&self) -> u64 {
        let own = self.real(Slot::ExpertIntermediate).is_some();
        self.whole(if own { Slot::ExpertIntermediate } else { Slot::Intermediate })
    }

    /// The specification; `stored` is the type of the embedding, to which its scale is rounded.
    pub fn spec(&self, name: &str, stored: Option<Dtype>) -> std::result::Result<Spec, Diagnostics> {
        Ok(dreamc_dsl::check(&self.parsed(name, stored)?, &[])?.0)
    }

    /// The same, and its text in YAML.
    pub fn specification(
        &self,
        name: &str,
        stored: Option<Dtype>,
    ) -> std::result::Result<(Spec, String), Diagnostics> {
        let ast = self.parsed(name, stored)?;
        let text = dreamc_dsl::format(&ast, Spelling::Yaml)?;
        Ok((dreamc_dsl::check(&ast, &[])?.0, text))
    }

    /// JSON is YAML.
    fn parsed(&self, name: &str, stored: Option<Dtype>) -> std::result::Result<Ast, Diagnostics> {
        dreamc_dsl::parse("config.json", &self.tree(name, stored).to_string(), Spelling::Yaml)
    }

    /// The specification as a tree.
    fn tree(&self, name: &str, stored: Option<Dtype>) -> Value {
        let gemma = self.family.gemma;
        let mut model = some([
            ("name", Some(json!(name))),
            ("vocab", Some(json!(self.whole(Slot::Vocab)))),
            ("hidden", Some(json!(self.whole(Slot::Hidden)))),
            ("context", Some(json!(self.whole(Slot::Context)))),
            ("tie", Some(json!(self.flag(Slot::Tie)))),
            ("embed_scale", gemma.then(|| embed_scale(self.whole(Slot::Hidden), stored))),
        ]);
        let factors = [
            ("embed_scale", self.real(Slot::EmbedScale)),
            ("logit_scale", self.real(Slot::LogitDivisor).map(|divisor| 1.0 / divisor)),
            ("logit_scale", self.real(Slot::LogitFactor)),
            ("output_scale", self.real(Slot::OutputScale)),
        ];
        let factors = factors.map(|(name, factor)| (name, factor.filter(|x| *x != 1.0).map(|x| json!(x))));
        model.extend(some(factors));
        model.extend(some([("logit_softcap", self.real(Slot::LogitSoftcap).map(|cap| json!(cap)))]));
        let eps = self.real(Slot::Eps).unwrap_or_default();
        model.insert("norm".into(), json!({"eps": eps, "unit_offset": gemma || self.family.unit_offset}));
        model.insert("components".into(), self.components().into());
        model.insert("body".into(), self.body().into());
        json!({"model": model, "train": {"sequence": self.row(), "precision": "f32"}})
    }

    /// The components that some layer has.
    fn components(&self) -> Map<String, Value> {
        let has = |of: &dyn Fn(&Layer) -> bool| self.layers.iter().any(of);
        let mut all = Map::new();
        if let Some((mixer, _)) = self.family.mixer.filter(|_| has(&Layer::mixes)) {
            all.insert("mixer".into(), json!({mixer.name(): self.mixer(mixer)}));
        }
        for (name, windowed) in self.attentions().into_iter().zip([false, true]) {
            if has(&|l| l.attends() && l.windowed == windowed) {
                all.insert(name.into(), json!({"sequence": self.attention(windowed)}));
            }
        }
        if has(&|l| l.network == Some(Network::Dense)) {
            all.insert("mlp".into(), self.mlp());
        }
        if has(&Layer::sparse) {
            all.insert("ea".into(), json!({"experts": self.experts()}));
        }
        all
    }

    /// Places of norms, where the class has other ones than its family's component.
    fn norms(&self) -> [(&'static str, Option<Value>); 2] {
        let (before, after) = self.family.norms.places();
        [("pre_norm", Some(json!(before))), ("post_norm", Some(json!(after)))]
    }

    fn mlp(&self) -> Value {
        let intermediate = self.whole(Slot::Intermediate);
        let factors = self.factors(Role::Mlp);
        if !factors.is_empty() {
            let mut own = some([("wide", Some(json!(intermediate)))]);
            own.extend(factors);
            return json!({SCALED: own});
        }
        let mut own = some([
            ("intermediate", Some(json!(intermediate))),
            ("activation", Some(json!(self.activation.1))),
            ("biased", self.flag(Slot::MlpBias).then(|| json!(true))),
        ]);
        own.extend(some(self.norms()));
        json!({"mlp": own})
    }

    fn experts(&self) -> Map<String, Value> {
        let intermediate = self.expert_intermediate();
        let size = self.real(Slot::Shared);
        let shared = match (size, self.whole(Slot::SharedCount)) {
            (Some(size), _) => Some(size as u64 / intermediate.max(1)),
            (None, count) => (count > 0).then_some(count),
        };
        let mut own = some([
            ("count", Some(json!(self.whole(Slot::Experts)))),
            ("active", Some(json!(self.whole(Slot::Active)))),
            ("intermediate", Some(json!(intermediate))),
            ("activation", Some(json!(self.activation.1))),
            ("shared", shared.map(|n| json!(n))),
            ("shared_gate", (size.is_some() && self.family.shared_gate).then(|| json!(true))),
            ("biased", self.family.biased.then(|| json!(true))),
        ]);
        own.extend(some(self.norms()));
        let router = some([
            ("preset", Some(json!(self.family.router.0))),
            ("groups", self.real(Slot::Groups).map(|n| json!(n as u64))),
            ("topk_groups", self.real(Slot::ActiveGroups).map(|n| json!(n as u64))),
            ("scale", self.real(Slot::GateScale).map(|x| json!(x))),
            // Gates of the chosen are always divided by their sum where no field says so.
            ("normalise", Some(json!(self.real(Slot::Normalise) != Some(0.0)))),
            ("load_balance_loss", Some(json!(self.load_balance_loss))),
            ("z_loss", Some(json!(0))),
        ]);
        own.insert("router".into(), router.into());
        own
    }

    /// The names of attentions without and with the window.
    fn attentions(&self) -> [&'static str; 2] {
        let some = |windowed| self.layers.iter().any(|l| l.windowed == windowed);
        if some(true) && some(false) { ["global", "local"] } else { ["sa", "sa"] }
    }

    fn attention(&self, windowed: bool) -> Map<String, Value> {
        let real = |slot| self.real(slot);
        let mut own = some([
            ("heads", Some(json!(self.whole(Slot::Heads)))),
            ("kv_heads", Some(json!(self.whole(Slot::KvHeads)))),
            ("head_size", Some(json!(self.whole(Slot::HeadSize)))),
            ("rope", Some(self.rope(windowed))),
            ("qk_norm", Some(json!(self.family.qk_norm))),
            ("window", self.window.filter(|_| windowed).map(|w| json!(w))),
            ("softcap", real(Slot::Softcap).map(|c| json!(c))),
            ("scale", real(Slot::Scalar).map(|s| 1.0 / s.sqrt()).or(real(Slot::Scale)).map(|s| json!(s))),
            ("bias", self.biased().then(|| json!(self.family.bias))),
            ("sink", self.family.sinks.then(|| json!(true))),
            ("latent", self.family.latent.then(|| self.latent())),
            ("gate", self.family.gated.then(|| json!("element"))),
            ("projection", (self.family.form != Form::Straight).then(|| json!("none"))),
        ]);
        if self.family.norms != Norms::Before {
            own.extend(some(self.norms()));
        }
        own
    }

    fn rope(&self, windowed: bool) -> Value {
        let Turn { base, scaling } = self.rotations[usize::from(windowed)];
        let share = Some(self.family.share).filter(|share| *share != 1.0);
        match (share, scaling) {
            _ if base == STILL.base => json!("none"),
            (None, None) => json!(base),
            _ => some([
                ("base", Some(json!(base))),
                ("share", share.map(|share| json!(share))),
                ("scaling", scaling.map(said)),
            ])
            .into(),
        }
    }

    fn latent(&self) -> Value {
        let [kv, turned, value] = [Slot::KvRank, Slot::Turned, Slot::Value].map(|s| json!(self.whole(s)));
        let query = self.real(Slot::QueryRank).map_or(json!("none"), |n| json!(n as u64));
        // Norms within the attention have the class's own.
        let eps = (self.real(Slot::Eps) != Some(INNER_EPS)).then(|| json!(INNER_EPS));
        let known = [("query", query), ("kv", kv), ("turned", turned), ("value", value)];
        some(known.map(|(name, value)| (name, Some(value))).into_iter().chain([("eps", eps)])).into()
    }

    /// The settings of a definition of the library.
    fn mixer(&self, mixer: Mixer) -> Map<String, Value> {
        let of = |slot| self.whole(slot);
        let (size, groups, state) = (of(Slot::MixerSize), of(Slot::MixerGroups), of(Slot::MixerState));
        let (width, members) = (of(Slot::MixerWidth), of(Slot::MixerHeads) / groups.max(1));
        let eps = self.real(Slot::Eps).unwrap_or_default();
        let settings = match mixer {
            Mixer::Mamba2 => {
                json!({"size": size, "groups": groups, "members": members, "state": state, "width": width, "eps": eps})
            }
            Mixer::GatedDelta => {
                json!({"heads": groups, "size": state, "value": size, "members": members, "width": width, "eps": eps})
            }
            Mixer::Kda => {
                json!({"heads": of(Slot::MixerHeads), "size": size, "value": size, "width": width, "eps": eps})
            }
            Mixer::FalconH1 => json!({
                "heads": of(Slot::Heads), "kv_heads": of(Slot::KvHeads), "head": of(Slot::HeadSize),
                "base": self.rotations[0].base, "size": size, "groups": groups, "members": members, "state": state,
                "width": width,
            }),
        };
        let mut own = if let Value::Object(own) = settings { own } else { Map::new() };
        if mixer == Mixer::FalconH1 {
            own.extend(self.factors(Role::Mixer));
        }
        own
    }

    /// The factors of a part of a layer as settings.
    fn factors(&self, role: Role) -> Map<String, Value> {
        let own = self.family.factors.iter().zip(&self.factors).filter(|(factor, _)| factor.role == role);
        own.map(|(factor, by)| (factor.setting.to_string(), json!(by))).collect()
    }

    /// The beginning of the names of a layer's tensors.
    pub fn place(&self, number: usize) -> String {
        let each = self.family.ends[3];
        let [prelude, core] = [Slot::Prelude, Slot::Core].map(|slot| self.whole(slot) as usize);
        match self.family.form {
            Form::Straight | Form::Looped => format!("{each}.{number}"),
            Form::Recurrent if number < prelude => format!("{each}.prelude.{number}"),
            Form::Recurrent if number < prelude + core => format!("{each}.core_block.{}", number - prelude),
            Form::Recurrent => format!("{each}.coda.{}", number - prelude - core),
        }
    }

    /// Layers as an item: the shortest period of them, repeated.
    fn repeated(&self, layers: &[Layer]) -> Value {
        let names = self.attentions();
        let layer = |l: &Layer| {
            let mixing = l.mixing.map(|mixing| match mixing {
                Mixing::Attention => names[usize::from(l.windowed)],
                Mixing::Mixer => "mixer",
            });
            let network = l.network.map(|network| match network {
                Network::Dense => "mlp",
                Network::Sparse => "ea",
            });
            let terms: Vec<&str> = mixing.into_iter().chain(network).collect();
            match self.family.form {
                Form::Straight | Form::Looped => terms.join(" > "),
                Form::Recurrent => {
                    terms.iter().map(|term| format!("{term} > norm")).collect::<Vec<_>>().join(" > ")
                }
            }
        };
        let layers: Vec<String> = layers.iter().map(layer).collect();
        let period = (1..=layers.len())
            .find(|p| {
                layers.len().is_multiple_of(*p) && (*p..layers.len()).all(|i| layers[i] == layers[i - p])
            })
            .unwrap_or(layers.len());
        json!({"repeat": layers.len() / period.max(1), "layers": layers[..period]})
    }

    /// The items of the body.
    fn body(&self) -> Vec<Value> {
        let passes = self.whole(Slot::Passes);
        match self.family.form {
            Form::Straight => vec![self.repeated(&self.layers)],
            Form::Looped => vec![json!({
                "recur": passes, "residual_norm": false, "exit": {"gate": 0.1},
                "layers": [self.repeated(&self.layers), "norm"],
            })],
            Form::Recurrent => {
                let (before, rest) = self.layers.split_at(self.whole(Slot::Prelude) as usize);
                let (core, after) = rest.split_at(self.whole(Slot::Core) as usize);
                let noise = self.real(Slot::Noise).unwrap_or_default();
                let depth = json!({
                    "lognormal_poisson": {"mean": passes, "sigma": 0.5}, "min": 1, "max": passes.saturating_mul(2),
                });
                vec![
                    self.repeated(before),
                    json!("save e"),
                    json!(format!("start normal {noise:?}")),
                    json!({
                        "recur": passes, "residual_norm": false, "backprop": self.whole(Slot::Backprop).min(passes),
                        "depth": depth, "layers": ["mix e linear", self.repeated(core)],
                    }),
                    json!("norm final"),
                    self.repeated(after),
                ]
            }
        }
    }

    /// The field that says which layers have a mixer, and its value.
    fn placed(&self, placed: Placed) -> Option<(&'static str, Value)> {
        let numbers = |mixes: bool, from: usize| -> Value {
            let layers = self.layers.iter().enumerate().filter(|(_, layer)| layer.mixes() == mixes);
            layers.map(|(i, _)| i + from).collect()
        };
        Some(match placed {
            Placed::Every => return None,
            Placed::Indices => ("attn_layer_indices", numbers(false, 0)),
            Placed::Types => {
                let kind = |l: &Layer| if l.mixes() { "linear_attention" } else { "full_attention" };
                ("layer_types", self.layers.iter().map(kind).collect())
            }
            Placed::Named => {
                let kind = |l: &Layer| if l.mixes() { "mamba" } else { "attention" };
                ("layer_types", self.layers.iter().map(kind).collect())
            }
            Placed::Config => {
                let of = |slot| self.whole(slot);
                let map = json!({
                    "full_attn_layers": numbers(false, 1), "kda_layers": numbers(true, 1), "head_dim": of(Slot::MixerSize),
                    "num_heads": of(Slot::MixerHeads), "short_conv_kernel_size": of(Slot::MixerWidth),
                });
                ("linear_attn_config", map)
            }
            Placed::Single => {
                let letter =
                    |l: &Layer| SINGLES.iter().find(|(.., one)| one == l).map(|(letter, ..)| *letter);
                let letters: String = self.layers.iter().filter_map(letter).collect();
                ("hybrid_override_pattern", json!(letters))
            }
        })
    }

    /// The factors that a field lists.
    fn listed(&self, field: &str) -> Vec<f64> {
        let own = self.family.factors.iter().zip(&self.factors).filter(|(factor, _)| factor.field == field);
        own.map(|(_, by)| *by).collect()
    }

    /// Whether projections have biases.
    pub fn biased(&self) -> bool {
        self.family.bias != "none" && self.real(Slot::Bias) != Some(0.0)
    }

    /// Tokens of a row to evaluate and train on: what a GiB of logits allows, 2048 at most.
    fn row(&self) -> u64 {
        let most = (1 << 28) / self.whole(Slot::Vocab).max(1);
        let power = 1 << most.clamp(1, 2048).ilog2();
        power.min(self.whole(Slot::Context))
    }

    /// The `config.json`, of weights of this type; `kept` are the fields of the file that the model
    /// was imported from; those that change nothing remain.
    pub fn json(&self, dtype: Dtype, kept: &Map<String, Value>) -> Map<String, Value> {
        let family = self.family;
        let mut map = Map::new();
        let mut put = |name: &str, value: Value| {
            map.insert(name.into(), value);
        };
        put("architectures", json!([family.class]));
        put("model_type", json!(family.kind));
        let old = ["torch_dtype", "dtype", "transformers_version", "auto_map"];
        for (name, value) in kept.iter().filter(|(n, v)| harmless(n, v) && !old.contains(&n.as_str())) {
            put(name, value.clone());
        }
        if kept.is_empty() {
            // Some classes have one that is beyond a small vocabulary.
            put("pad_token_id", Value::Null);
        }
        put("torch_dtype", json!(torch(dtype)));
        put(family.activation.0, json!(self.activation.0));
        for &(name, slot, absent) in family.fields() {
            // A class refuses null for sizes that no layer of the model has.
            let never = !matches!(absent, Absent::Nothing | Absent::Required) && slot.kind() != Kind::Cap;
            if self.real(slot).is_some() || !never {
                put(name, written(slot.kind(), self.real(slot)));
            }
        }
        for &(name, value) in family.fixed {
            put(name, json!(value));
        }
        for &(name, value) in family.words {
            put(name, json!(value));
        }
        if let Some((_, placed)) = family.mixer {
            if let Some((name, layers)) = self.placed(placed) {
                put(name, layers);
            }
            if placed == Placed::Single {
                // Version 5 raises steps to it.
                put("time_step_min", json!(1e-12));
            }
        }
        for (factor, &by) in family.factors.iter().zip(&self.factors) {
            match factor.place {
                None => put(factor.field, json!(by)),
                Some(0) => put(factor.field, json!(self.listed(factor.field))),
                Some(_) => {}
            }
        }
        let [full, local] = self.rotations;
        let kind = |turn: Turn| {
            let mut kind = scaled(turn.scaling);
            kind["rope_theta"] = json!(turn.base);
            kind
        };
        match family.rotation {
            // Both versions read it so.
            Rotation::Full(base)
                if full.base == base && (local == Turn { base, scaling: None }) && full.scaling.is_some() =>
            {
                put("rope_theta", json!(base));
                put("rope_scaling", scaled(full.scaling));
            }
            Rotation::Full(_) => {
                let both = json!({"full_attention": kind(full), "sliding_attention": kind(local)});
                put("rope_parameters", both);
            }
            Rotation::Base(_) => put("rope_base", json!(full.base)),
            Rotation::Still => {}
            Rotation::Typed(_) if full == STILL => put("position_embedding_type", json!("nope")),
            Rotation::One(_) | Rotation::Two(..) | Rotation::Typed(_) => {
                put("rope_theta", json!(full.base));
                if let Rotation::Typed(_) = family.rotation {
                    put("position_embedding_type", json!("rope"));
                }
                if let Rotation::Two(..) = family.rotation {
                    put("rope_local_base_freq", json!(local.base));
                }
                // A class may have a scaling where the file has none.
                if full.scaling.is_some() || family.biased {
                    let mut written = scaled(full.scaling);
                    if let (true, Some(RopeScaling::Yarn { factor, .. })) = (family.latent, full.scaling) {
                        let twice = (self.whole(Slot::HeadSize) as f64
                            / self.real(Slot::Scalar).unwrap_or(1.0))
                        .powf(0.25);
                        let weight = (twice - 1.0) / (0.1 * factor.ln());
                        // As people write it; whether it is that, reading it again says.
                        written["mscale_all_dim"] = json!((weight * 1e9).round() / 1e9);
                    }
                    put("rope_scaling", written);
                }
            }
        }
        let some = self.layers.iter().any(|l| l.windowed);
        let window = self.window.filter(|_| some);
        let kinds = || -> Value {
            let kind = |l: &Layer| if l.windowed { "sliding_attention" } else { "full_attention" };
            self.layers.iter().map(kind).collect()
        };
        match family.windows {
            // A class that has windows from a layer on has a default.
            Windows::Never if family.harmless.contains(&"max_window_layers") => {
                put("sliding_window", Value::Null);
            }
            Windows::Never => {}
            Windows::Unused => put("use_sliding_window", json!(false)),
            Windows::All(_) => put("sliding_window", json!(window)),
            Windows::AllUsed(_) => {
                put("use_sliding_window", json!(some));
                put("sliding_window", json!(window));
            }
            Windows::But(..) => {
                put("sliding_window", json!(window));
                put("layer_types", kinds());
            }
            Windows::From(_) => {
                put("use_sliding_window", json!(some));
                put("sliding_window", json!(window));
                let first = self.layers.iter().position(|l| l.windowed);
                put("max_window_layers", json!(first.unwrap_or(self.layers.len())));
                put("layer_types", kinds());
            }
        }
        let sparse = self.layers.iter().filter(|l| l.sparse()).count();
        match family.sparse {
            Sparse::Never | Sparse::All | Sparse::Later | Sparse::Counted => {}
            Sparse::Listed => {
                let dense: Vec<usize> =
                    (0..self.layers.len()).filter(|&i| !self.layers[i].sparse()).collect();
                put("decoder_sparse_step", json!(1));
                put("mlp_only_layers", json!(dense));
            }
        }
        if family.router.1 > 0.0 {
            let coefficient =
                self.load_balance_loss * sparse as f64 / self.real(Slot::Active).unwrap_or(1.0).max(1.0);
            put("output_router_logits", json!(self.load_balance_loss > 0.0));
            let coefficient = if coefficient > 0.0 { coefficient } else { family.router.1 };
            put("router_aux_loss_coef", json!(coefficient));
        }
        map
    }
}

/// A letter, its words, and the layer that they mean.
type Single = (char, [&'static str; 2], Layer);

/// The letters, and the words of version 5 and of earlier ones, of layers that are one component.
const SINGLES: [Single; 4] = {
    const fn layer(mixing: Option<Mixing>, network: Option<Network>) -> Layer {
        Layer { windowed: false, mixing, network }
    }
    [
        ('M', ["linear_attention", "mamba"], layer(Some(Mixing::Mixer), None)),
        ('*', ["full_attention", "attention"], layer(Some(Mixing::Attention), None)),
        ('-', ["mlp", "mlp"], layer(None, Some(Network::Dense))),
        ('E', ["moe", "moe"], layer(None, Some(Network::Sparse))),
    ]
};

/// The epsilon of norms within latent attentions, which no field changes.
const INNER_EPS: f64 = 1e-6;

/// The fields that are there, in order.
fn some<'a>(fields: impl IntoIterator<Item = (&'a str, Option<Value>)>) -> Map<String, Value> {
    fields.into_iter().filter_map(|(name, value)| Some((name.to_string(), value?))).collect()
}

/// A scaling as the language writes it.
fn said(scaling: RopeScaling) -> Value {
    match scaling {
        RopeScaling::Llama3 { factor, low, high, original_context } => {
            json!({"factor": factor, "low": low, "high": high, "original_context": original_context})
        }
        RopeScaling::Linear { factor } => json!({"type": "linear", "factor": factor}),
        RopeScaling::Yarn { factor, fast, slow, original_context, attention, truncate } => json!({
            "type": "yarn", "factor": factor, "fast": fast, "slow": slow, "original_context": original_context,
            "attention": attention, "truncate": truncate,
        }),
    }
}

/// A scaling as `config.json` writes it.
fn scaled(scaling: Option<RopeScaling>) -> Value {
    let context = |x: f64| written(Kind::Either, Some(x));
    let Some(scaling) = scaling else { return json!({"rope_type": "default"}) };
    match scaling {
        RopeScaling::Llama3 { factor, low, high, original_context } => {
            json!({"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
                   "original_max_position_embeddings": context(original_context)})
        }
        RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
        RopeScaling::Yarn { factor, fast, slow, original_context, attention, truncate } => {
            json!({"rope_type": "yarn", "factor": factor, "beta_fast": fast, "beta_slow": slow,
                   "original_max_position_embeddings": context(original_context), "attention_factor": attention,
                   "truncate": truncate})
        }
    }
}

/// The type of weights in `transformers`' word.
pub fn torch(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::BF16 => "bfloat16",
        Dtype::F16 => "float16",
        _ => "float32",
    }
}

/// A number as JSON: whole numbers whole and real ones with a point, since `transformers` checks.
fn written(kind: Kind, value: Option<f64>) -> Value {
    match (kind, value) {
        (_, None) => Value::Null,
        (Kind::Whole | Kind::Count, Some(x)) => json!(x as u64),
        (Kind::Either, Some(x)) if x.fract() == 0.0 => json!(x as u64),
        (Kind::Real | Kind::Cap | Kind::Either, Some(x)) => json!(x),
        (Kind::Flag, Some(x)) => json!(x != 0.0),
    }
}

/// The scale of Gemma's embedding: `sqrt(hidden)` in the type of the weights.
fn embed_scale(hidden: u64, stored: Option<Dtype>) -> Value {
    let exact = (hidden as f64).sqrt();
    let rounded = match stored {
        Some(Dtype::BF16) => half::bf16::from_f64(exact).to_f64(),
        Some(Dtype::F16) => half::f16::from_f64(exact).to_f64(),
        _ => exact,
    };
    if rounded == exact { json!("sqrt_hidden") } else { json!(rounded) }
}

// From config.json --------------------------------------------------------------------------------

fn family(f: &Fields) -> Result<&'static Family> {
    let known = || FAMILIES.each_ref().map(|family| family.kind).join(", ");
    let Some(kind) = f.word("model_type")? else {
        return f.refuse("lacks `model_type`; is this the folder of a model of transformers?".into());
    };
    let Some(family) = FAMILIES.iter().find(|family| family.kind == kind) else {
        if let Some((_, why)) = UNREAD.iter().find(|(unread, _)| *unread == kind) {
            return f.refuse(format!("`model_type` is {kind:?}, which is not read: {why}"));
        }
        return f.refuse(format!("`model_type` is {kind:?}; dreamc imports {}", known()));
    };
    match f.get("architectures") {
        None => Ok(family),
        Some(Value::Array(names)) if names.iter().all(|n| n == family.class) => Ok(family),
        Some(other) => f.wrong("architectures", other, &format!("[{:?}]", family.class)),
    }
}

/// The non-linearity of networks; that of the class where the file names none.
fn activation(f: &Fields, family: &Family) -> Result<(&'static str, &'static str)> {
    let (field, known) = family.activation;
    let Some(word) = f.word(field)? else { return Ok(known[0]) };
    match known.iter().find(|(theirs, _)| *theirs == word) {
        Some(found) => Ok(*found),
        None => {
            let names: Vec<&str> = known.iter().map(|(theirs, _)| *theirs).collect();
            f.wrong(field, &Value::from(word), &names.join(" or "))
        }
    }
}

/// The scale of the embedding and the noise that a loop begins with, of `init_values`; the layers
/// of its parts are all there are.
fn beginning(f: &Fields, values: &mut BTreeMap<Slot, f64>) -> Result<()> {
    let Some(Value::Object(map)) = f.get("init_values") else {
        return f.refuse("lacks the object `init_values`".into());
    };
    // Its other fields are how weights began.
    let inner = Fields::new(f.path, "init_values.", map, f.ignore);
    let (std, scale) = (inner.real("std")?, inner.real("embed_scale")?);
    values.insert(Slot::EmbedScale, scale);
    values.insert(Slot::Noise, std * scale);
    let of = |slot: Slot| values.get(&slot).copied().unwrap_or(0.0);
    let parts = of(Slot::Prelude) + of(Slot::Core) + of(Slot::Coda);
    if parts != of(Slot::Layers) {
        return f.wrong(
            "n_layers",
            &Value::from(of(Slot::Layers) as u64),
            &format!("{parts}, the layers of its parts"),
        );
    }
    Ok(())
}

/// The size and the scale of latent heads: YaRN has a second factor, on scores.
fn latent(f: &Fields, values: &mut BTreeMap<Slot, f64>) -> Result<()> {
    let of = |slot: Slot| values.get(&slot).copied().unwrap_or(0.0);
    if of(Slot::KvHeads) != of(Slot::Heads) {
        return f.wrong("num_key_value_heads", &Value::from(of(Slot::KvHeads) as u64), "as many as heads");
    }
    if !f.flag("rope_interleave", true)? {
        return f.wrong("rope_interleave", &Value::from(false), "true");
    }
    let scaling = ["rope_parameters", "rope_scaling"].iter().find_map(|name| f.map.get(*name)?.as_object());
    let number = |name: &str| scaling.and_then(|s| s.get(name)?.as_f64()).unwrap_or(0.0);
    let twice = mscale(number("factor"), number("mscale_all_dim"));
    let size = of(Slot::Still) + of(Slot::Turned);
    values.insert(Slot::HeadSize, size);
    values.insert(Slot::Scalar, size / twice.powi(4));
    Ok(())
}

/// The sizes of experts and of the network of all tokens, which is alone where there are none.
fn counted(values: &mut BTreeMap<Slot, f64>) {
    let of = |slot: Slot| values.get(&slot).copied().unwrap_or(0.0);
    let (experts, shared) = (of(Slot::ExpertsOrNone), of(Slot::Shared));
    if experts > 0.0 {
        values.insert(Slot::Experts, experts);
    } else {
        values.insert(Slot::Intermediate, shared);
    }
}

/// The definition of networks with factors.
const SCALED: &str = "scaled_mlp";

/// The factors of a family.
fn factors(f: &Fields, family: &Family) -> Result<Vec<f64>> {
    let one = |factor: &Factor| -> Result<f64> {
        let Some(place) = factor.place else { return Ok(f.real_or_none(factor.field)?.unwrap_or(1.0)) };
        let all = family.factors.iter().filter(|other| other.field == factor.field).count();
        let Some(found) = f.get(factor.field).filter(|value| !value.is_null()) else { return Ok(1.0) };
        let list = found.as_array().filter(|list| list.len() == all);
        match list.and_then(|list| list[place].as_f64()).filter(|by| by.is_finite() && *by > 0.0) {
            Some(by) => Ok(by),
            None => f.wrong(factor.field, found, &format!("a list of {all} numbers above 0")),
        }
    };
    family.factors.iter().map(one).collect()
}

/// The sizes of a mixer's heads, and fields that it has one value of.
fn mixer(f: &Fields, kind: Mixer, placed: Placed, values: &mut BTreeMap<Slot, f64>) -> Result<()> {
    if placed == Placed::Config {
        listed(f, values)?;
    }
    // As later versions of `transformers` write that there is no limit.
    let free = [json!([0.0, {"__float__": "Infinity"}]), Value::Null];
    if matches!(kind, Mixer::Mamba2 | Mixer::FalconH1)
        && let Some(limit) = f.get("time_step_limit").filter(|limit| !free.contains(limit))
    {
        return f.wrong("time_step_limit", limit, "[0.0, Infinity], no limit");
    }
    let of = |values: &BTreeMap<Slot, f64>, slot: Slot| values.get(&slot).copied().unwrap_or(0.0);
    let heads = of(values, Slot::MixerHeads);
    let hidden = of(values, Slot::Hidden);
    let expanded = values.get(&Slot::MixerExpand).map(|by| (by * hidden, "mamba_expand * hidden_size"));
    let stated = values.get(&Slot::MixerWide).map(|&wide| (wide, "mamba_d_ssm"));
    if let Some((wide, named)) = expanded.or(stated) {
        let size = *values.entry(Slot::MixerSize).or_insert((wide / heads).floor());
        if size * heads != wide {
            let right = format!("{named} / mamba_n_heads, {}", wide / heads);
            return f.wrong("mamba_d_head", &Value::from(size as u64), &right);
        }
    }
    let groups = *values.entry(Slot::MixerGroups).or_insert(heads);
    if heads % groups != 0.0 {
        let (groups_of, heads_of) = match (kind, placed) {
            (Mixer::GatedDelta, _) => ("linear_num_key_heads", "linear_num_value_heads"),
            (Mixer::Mamba2 | Mixer::Kda | Mixer::FalconH1, Placed::Single) => ("n_groups", "mamba_num_heads"),
            (
                Mixer::Mamba2 | Mixer::Kda | Mixer::FalconH1,
                Placed::Every | Placed::Indices | Placed::Types | Placed::Named | Placed::Config,
            ) => ("mamba_n_groups", "mamba_n_heads"),
        };
        return f.wrong(groups_of, &Value::from(groups as u64), &format!("a divisor of {heads_of}"));
    }
    Ok(())
}

/// The object in which Kimi Linear's own files have sizes and places of its mixer.
const LISTED: &str = "linear_attn_config";

/// Sizes of that object, which stand before those outside of it.
fn listed(f: &Fields, values: &mut BTreeMap<Slot, f64>) -> Result<()> {
    let Some(map) = object(f, LISTED)? else { return Ok(()) };
    let inner = Fields::new(f.path, "linear_attn_config.", map, f.ignore);
    for (name, slot) in [
        ("head_dim", Slot::MixerSize),
        ("num_heads", Slot::MixerHeads),
        ("short_conv_kernel_size", Slot::MixerWidth),
    ] {
        values.extend(inner.whole_or_none(name)?.map(|n| (slot, n as f64)));
    }
    for name in ["full_attn_layers", "kda_layers"] {
        inner.get(name);
    }
    inner.finish()
}

/// A field that is an object.
fn object<'a>(f: &Fields<'a>, name: &'static str) -> Result<Option<&'a Map<String, Value>>> {
    match f.get(name) {
        None => Ok(None),
        Some(Value::Object(map)) => Ok(Some(map)),
        Some(other) => f.wrong(name, other, "an object"),
    }
}

/// The layers of a family whose layers are one component each.
fn single(f: &Fields, family: &Family) -> Result<Option<Vec<Layer>>> {
    if !matches!(family.mixer, Some((_, Placed::Single))) {
        return Ok(None);
    }
    let (words, letters) = (f.get("layers_block_type"), f.word("hybrid_override_pattern")?);
    let of =
        |right: &dyn Fn(&Single) -> bool| SINGLES.iter().find(|one| right(one)).map(|(.., layer)| *layer);
    let found: Option<Vec<Layer>> = match (words, letters) {
        (Some(Value::Array(words)), _) => {
            words.iter().map(|word| of(&|(_, names, _)| names.iter().any(|name| word == name))).collect()
        }
        (Some(_), _) => None,
        (None, Some(letters)) => letters.chars().map(|found| of(&|(letter, ..)| *letter == found)).collect(),
        (None, None) => return f.refuse("lacks `hybrid_override_pattern`".into()),
    };
    if let Some(layers) = found.filter(|layers| !layers.is_empty()) {
        return Ok(Some(layers));
    }
    match (words, letters) {
        (Some(words), _) => f.wrong(
            "layers_block_type",
            words,
            "a list of \"linear_attention\", \"full_attention\", \"mlp\" and \"moe\"",
        ),
        (None, letters) => f.wrong(
            "hybrid_override_pattern",
            &json!(letters),
            "letters of M, *, - and E, one for each layer",
        ),
    }
}

/// Which layers have a mixer in the place of an attention.
fn mixers(f: &Fields, family: &Family, layers: usize) -> Result<Vec<bool>> {
    let Some((_, placed)) = family.mixer else { return Ok(vec![false; layers]) };
    match placed {
        Placed::Every => Ok(vec![true; layers]),
        Placed::Indices => {
            let mut found = vec![true; layers];
            if let Some(list) = f.get("attn_layer_indices") {
                numbered(f, "attn_layer_indices", list, 0, &mut found, false)?;
            }
            Ok(found)
        }
        Placed::Types => typed_mixers(f, layers, |i, every| !(i + 1).is_multiple_of(every)),
        Placed::Named => typed_mixers(f, layers, |_, _| true),
        Placed::Config => {
            if let Some(map) = object(f, LISTED)?
                && let (Some(full), Some(kda)) = (map.get("full_attn_layers"), map.get("kda_layers"))
            {
                let (mut found, mut others) = (vec![true; layers], vec![true; layers]);
                numbered(f, "linear_attn_config.full_attn_layers", full, 1, &mut found, false)?;
                numbered(f, "linear_attn_config.kda_layers", kda, 1, &mut others, false)?;
                if found.iter().zip(&others).any(|(a, b)| a == b) {
                    let right = "the layers that full_attn_layers does not name";
                    return f.wrong("linear_attn_config.kda_layers", kda, right);
                }
                f.get("layer_types");
                return Ok(found);
            }
            typed_mixers(f, layers, |i, every| i == 0 || !i.is_multiple_of(every))
        }
        Placed::Single => Ok(vec![false; layers]),
    }
}

/// Marks the layers whose numbers, from `first` on, a list has.
fn numbered(f: &Fields, name: &str, list: &Value, first: u64, found: &mut [bool], mark: bool) -> Result<()> {
    let right = "a list of numbers of layers";
    let Some(numbers) = list.as_array() else { return f.wrong(name, list, right) };
    for number in numbers {
        let index = number.as_u64().and_then(|i| i.checked_sub(first));
        match index.and_then(|i| found.get_mut(usize::try_from(i).ok()?)) {
            Some(layer) => *layer = mark,
            None => return f.wrong(name, list, right),
        }
    }
    Ok(())
}

/// The layers that `layer_types` names `linear_attention`, else those that this says of a number
/// and of how often an attention stands between.
fn typed_mixers(f: &Fields, layers: usize, mixes: impl Fn(usize, usize) -> bool) -> Result<Vec<bool>> {
    let every = f.whole_or_none("full_attention_interval")?.unwrap_or(4);
    let every = usize::try_from(every).unwrap_or(usize::MAX);
    let Some(types) = f.get("layer_types") else { return Ok((0..layers).map(|i| mixes(i, every)).collect()) };
    let Some(list) = types.as_array() else { return f.wrong("layer_types", types, "a list") };
    if list.len() != layers {
        let found = list.len();
        return f.refuse(format!("`layer_types` names {found} layers, `num_hidden_layers` is {layers}"));
    }
    let mut found = vec![];
    for (i, kind) in list.iter().enumerate() {
        found.push(match kind.as_str() {
            Some("linear_attention" | "mamba") => true,
            Some("full_attention" | "attention") => false,
            _ => {
                return f.refuse(format!(
                    "`layer_types[{i}]` is {kind}; such a model has \"full_attention\" and \"linear_attention\""
                ));
            }
        });
    }
    Ok(found)
}

/// `yarn_get_mscale` of `modeling_deepseek_v3.py`.
fn mscale(factor: f64, weight: f64) -> f64 {
    if factor > 1.0 { 0.1 * weight * factor.ln() + 1.0 } else { 1.0 }
}

/// Notes how experts are packed; other packings are refused.
fn packed(f: &Fields, notes: &mut Vec<String>) -> Result<()> {
    let Some(value) = f.get("quantization_config") else { return Ok(()) };
    if value.get("quant_method").and_then(Value::as_str) != Some("mxfp4") {
        return f.wrong("quantization_config", value, "one with `quant_method` \"mxfp4\", or null");
    }
    notes.push(
        "matrices of experts are packed as MXFP4 and are imported as the bf16 numbers they stand for; `dreamc export hf` \
         writes bf16"
            .into(),
    );
    Ok(())
}

/// The quantities of the family's fields.
fn values(f: &Fields, family: &Family) -> Result<BTreeMap<Slot, f64>> {
    let mut values: BTreeMap<Slot, f64> = BTreeMap::new();
    for &(name, slot, absent) in family.fields() {
        // Later versions of `transformers` write one name for all families.
        let later = (name == "num_experts" && !f.map.contains_key(name)).then_some("num_local_experts");
        let name = later.filter(|later| f.map.contains_key(*later)).unwrap_or(name);
        // Both are read, and the first counts.
        let others = family.aliases.iter().filter(|(first, _)| *first == name).map(|(_, other)| *other);
        let present = others.filter(|other| f.get(other).is_some()).last();
        let name = present.filter(|_| !f.map.contains_key(name)).unwrap_or(name);
        // A null is no number where there may be one or not, and elsewhere as good as nothing.
        // Heads of keys and values are then as many as those of queries.
        let null = f.map.get(name).is_some_and(Value::is_null);
        let found = match slot.kind() {
            Kind::Whole => f.whole_or_none(name)?.map(|n| n as f64),
            Kind::Count => match f.get(name) {
                None => None,
                Some(value) => match value.as_u64() {
                    Some(n) => Some(n as f64),
                    None => return f.wrong(name, value, "a whole number"),
                },
            },
            Kind::Real | Kind::Either | Kind::Cap => f.real_or_none(name)?,
            Kind::Flag => match f.get(name) {
                None => None,
                Some(_) => Some(f64::from(u8::from(f.flag(name, false)?))),
            },
        };
        let get = |slot| values.get(&slot).copied().unwrap_or(0.0);
        let absent = match (null, slot) {
            (true, Slot::Softcap | Slot::LogitSoftcap) => Absent::Nothing,
            (true, Slot::KvHeads) => Absent::Heads,
            (true, Slot::Scalar) => Absent::Required,
            _ => absent,
        };
        let value = match (found, absent) {
            (Some(value), _) => Some(value),
            (None, Absent::Required) => return f.refuse(format!("lacks `{name}`")),
            (None, Absent::Whole(n)) => Some(n as f64),
            (None, Absent::Real(x)) => Some(x),
            (None, Absent::Flag(flag)) => Some(f64::from(u8::from(flag))),
            (None, Absent::Nothing) => None,
            (None, Absent::Heads) => Some(get(Slot::Heads)),
            (None, Absent::HiddenByHeads) => {
                let (hidden, heads) = (get(Slot::Hidden), get(Slot::Heads));
                if hidden % heads != 0.0 {
                    return f.refuse(format!(
                        "`hidden_size` {hidden} is not a multiple of `num_attention_heads` {heads}"
                    ));
                }
                Some(hidden / heads)
            }
        };
        if let Some(value) = value {
            values.insert(slot, value);
        }
    }
    Ok(values)
}

/// The context that a model was first trained with, as its scaling names it; Phi 3 names it
/// outside.
const ORIGINAL: &str = "original_max_position_embeddings";

/// The fields outside of a rotation's object that say the same, and the longest sequence.
#[derive(Clone, Copy)]
struct Around {
    base: Option<f64>,
    original: Option<f64>,
    context: f64,
}

/// Rotations of layers without and with the window, of either generation.
fn rotations(f: &Fields, family: &Family, context: f64) -> Result<[Turn; 2]> {
    let rotation = family.rotation;
    let typed = matches!(rotation, Rotation::Typed(_));
    if rotation == Rotation::Still || typed && f.word("position_embedding_type")? != Some("rope") {
        if typed {
            for name in ["rope_theta", "rope_scaling", "rope_parameters"] {
                f.get(name);
            }
        }
        return Ok([STILL; 2]);
    }
    if let Rotation::Base(base) = rotation {
        let base = f.real_or_none("rope_base")?.unwrap_or(base);
        return Ok([Turn { base, scaling: None }; 2]);
    }
    let original = match family.harmless.contains(&ORIGINAL) {
        true => f.real_or_none(ORIGINAL)?,
        false => None,
    };
    let (outer, none) = (f.real_or_none("rope_theta")?, Map::new());
    // `GptOssConfig` has a scaling of its own where the file has none.
    let own = match family.biased {
        true => Map::from_iter([
            ("rope_type".into(), json!("yarn")),
            ("factor".into(), json!(32.0)),
            ("beta_fast".into(), json!(32.0)),
            ("beta_slow".into(), json!(1.0)),
            ("truncate".into(), json!(false)),
            ("original_max_position_embeddings".into(), json!(4096)),
        ]),
        false => Map::new(),
    };
    let around = |base: Option<f64>| Around { base, original, context };
    let local = match rotation {
        Rotation::One(_) | Rotation::Full(_) | Rotation::Base(_) | Rotation::Still | Rotation::Typed(_) => {
            None
        }
        Rotation::Two(..) => f.real_or_none("rope_local_base_freq")?,
    };
    let (place, map) = match (object(f, "rope_parameters")?, object(f, "rope_scaling")?) {
        (Some(a), Some(b)) if a != b => {
            return f.refuse("has both `rope_parameters` and `rope_scaling`, and they differ".into());
        }
        (Some(map), _) => ("rope_parameters.", map),
        (None, Some(map)) => ("rope_scaling.", map),
        (None, None) => ("", &own),
    };
    let (full, local_default) = match rotation {
        Rotation::Full(base) | Rotation::Base(base) => (base, base),
        Rotation::Still => return Ok([STILL; 2]),
        Rotation::Typed(base) => {
            let one = turn(&Fields::new(f.path, place, map, f.ignore), around(outer), Some(base))?;
            return Ok([one, one]);
        }
        Rotation::One(base) => {
            let r = Fields::new(f.path, place, map, f.ignore);
            for fields in [&r, f].into_iter().filter(|_| family.share != 1.0) {
                if let Some(share) = fields.real_or_none("partial_rotary_factor")?
                    && share != family.share
                {
                    return fields.wrong(
                        "partial_rotary_factor",
                        &Value::from(share),
                        &family.share.to_string(),
                    );
                }
            }
            let one = turn(&r, around(outer), base)?;
            return Ok([one, one]);
        }
        Rotation::Two(full, local) => (full, local),
    };
    // Newer files have an object for each kind of layer.
    let kinds = ["full_attention", "sliding_attention"];
    if !kinds.iter().any(|kind| map.contains_key(*kind)) {
        let full = turn(&Fields::new(f.path, place, map, f.ignore), around(outer), Some(full))?;
        let empty = Fields::new(f.path, "", &none, f.ignore);
        let local = if let Rotation::Full(_) = rotation { Some(full.base) } else { local };
        return Ok([full, turn(&empty, around(local), Some(local_default))?]);
    }
    let r = Fields::new(f.path, place, map, f.ignore);
    let mut turns = vec![];
    for ((kind, outer), default) in kinds.into_iter().zip([outer, local]).zip([full, local_default]) {
        let inner = match r.get(kind) {
            None => &none,
            Some(Value::Object(map)) => map,
            Some(other) => return r.wrong(kind, other, "an object"),
        };
        let place = format!("{place}{kind}.");
        turns.push(turn(&Fields::new(f.path, &place, inner, f.ignore), around(outer), Some(default))?);
    }
    r.finish()?;
    Ok([turns[0], turns[1]])
}

/// One rotation, whose base may stand outside of the object; `default` where it stands nowhere.
fn turn(r: &Fields, around: Around, default: Option<f64>) -> Result<Turn> {
    let place = r.place;
    let base = match (around.base, r.real_or_none("rope_theta")?) {
        (Some(a), Some(b)) if a != b => {
            return r.refuse(format!("`rope_theta` is {a} and `{place}rope_theta` is {b}"));
        }
        (Some(base), _) | (None, Some(base)) => base,
        (None, None) => match default {
            Some(base) => base,
            None => return r.refuse("lacks `rope_theta`".into()),
        },
    };
    // Some files say `type`, the oldest name, or both.
    let (kind, old) = (r.word("rope_type")?, r.word("type")?);
    let known = "\"default\", \"linear\", \"llama3\" and \"yarn\"";
    let scaling = match kind.or(old) {
        None if r.map.keys().all(|k| ["rope_theta", "partial_rotary_factor"].contains(&k.as_str())) => None,
        Some("default") => None,
        Some("linear") => Some(RopeScaling::Linear { factor: r.real("factor")? }),
        Some("llama3") => {
            let original_context = original(r, around)?;
            let (low, high) = (r.real("low_freq_factor")?, r.real("high_freq_factor")?);
            Some(RopeScaling::Llama3 { factor: r.real("factor")?, low, high, original_context })
        }
        Some("yarn") => Some(yarn(r, around)?),
        Some(other) => {
            return r.refuse(format!("`{place}rope_type` is {other:?}; dreamc has {known}"));
        }
        None => return r.refuse(format!("lacks `{place}rope_type`; dreamc has {known}")),
    };
    r.finish()?;
    Ok(Turn { base, scaling })
}

/// YaRN, with the defaults of `_compute_yarn_parameters` in `modeling_rope_utils.py`.
fn yarn(r: &Fields, around: Around) -> Result<RopeScaling> {
    let factor = r.real("factor")?;
    let scale = |weight: f64| if factor > 1.0 { 0.1 * weight * factor.ln() + 1.0 } else { 1.0 };
    let (own, all) = (r.real_or_none("mscale")?, r.real_or_none("mscale_all_dim")?);
    let attention = match (r.real_or_none("attention_factor")?, own, all) {
        (Some(attention), ..) => attention,
        (None, Some(own), Some(all)) => scale(own) / scale(all),
        (None, ..) => scale(1.0),
    };
    Ok(RopeScaling::Yarn {
        factor,
        fast: r.real_or_none("beta_fast")?.unwrap_or(32.0),
        slow: r.real_or_none("beta_slow")?.unwrap_or(1.0),
        original_context: original(r, around)?,
        attention,
        truncate: r.flag("truncate", true)?,
    })
}

/// The context that the model was first trained with, which may stand outside of the object.
fn original(r: &Fields, around: Around) -> Result<f64> {
    match (around.original, r.real_or_none(ORIGINAL)?) {
        (Some(a), Some(b)) if a != b => {
            r.refuse(format!("`{ORIGINAL}` is {a} and `{}{ORIGINAL}` is {b}", r.place))
        }
        (Some(context), _) | (None, Some(context)) => Ok(context),
        (None, None) => Ok(around.context),
    }
}

/// Notes a factor of YaRN that version 4 of `transformers` does not read.
fn ratio(turn: Turn, context: f64, notes: &mut Vec<String>) {
    let Some(RopeScaling::Yarn { factor, original_context, .. }) = turn.scaling else { return };
    let ratio = context / original_context;
    let note = format!(
        "YaRN divides frequencies by the `factor` {factor}, as transformers 5 does; version 4 divides them by \
         max_position_embeddings / original_max_position_embeddings, {ratio}"
    );
    if ratio != factor && !notes.contains(&note) {
        notes.push(note);
    }
}

/// The window, and which layers have it.
fn windows(
    f: &Fields,
    family: &Family,
    layers: usize,
    notes: &mut Vec<String>,
) -> Result<(Option<u64>, Vec<bool>)> {
    let written = match family.windows {
        Windows::Unused => {
            // A 0 in files of version 5.
            f.get("sliding_window");
            None
        }
        _ => f.whole_or_none("sliding_window")?,
    };
    let or = |default: Option<u64>| if f.map.contains_key("sliding_window") { written } else { default };
    let (window, mut windowed): (_, Vec<bool>) = match family.windows {
        Windows::Never => {
            if let Some(window) = written {
                return f.wrong("sliding_window", &Value::from(window), "null");
            }
            (None, vec![false; layers])
        }
        Windows::Unused => {
            f.off("use_sliding_window")?;
            (None, vec![false; layers])
        }
        Windows::All(default) => (or(default), vec![true; layers]),
        Windows::AllUsed(default) => {
            let used = f.flag("use_sliding_window", false)?;
            (or(Some(default)).filter(|_| used), vec![true; layers])
        }
        Windows::But(every, default) => {
            let mut every = every;
            // The number of older files, under either name.
            if family.kind == "gemma3_text" {
                for name in ["sliding_window_pattern", "_sliding_window_pattern"] {
                    if let Some(number) = f.whole_or_none(name)? {
                        every = usize::try_from(number).unwrap_or(usize::MAX);
                    }
                }
            }
            (or(Some(default)), (1..=layers).map(|i| !i.is_multiple_of(every)).collect())
        }
        Windows::From(default) => {
            let used = f.flag("use_sliding_window", false)?;
            let from = match f.get("max_window_layers") {
                None => 28,
                Some(value) => match value.as_u64() {
                    Some(n) => usize::try_from(n).unwrap_or(usize::MAX),
                    None => return f.wrong("max_window_layers", value, "a whole number"),
                },
            };
            (or(Some(default)).filter(|_| used), (0..layers).map(|i| i >= from).collect())
        }
    };
    let types = f.get("layer_types").filter(|_| family.mixer.is_none());
    match (family.windows, types) {
        (_, None) => {}
        (Windows::All(_) | Windows::AllUsed(_), Some(_)) => {
            let title = family.title;
            notes.push(format!("`layer_types` is not read, as transformers does not read it of {title}"));
        }
        (Windows::Never | Windows::Unused | Windows::But(..) | Windows::From(_), Some(types)) => {
            windowed = layer_types(f, types, layers, window.is_some())?;
        }
    }
    if window.is_none() {
        windowed.fill(false);
    }
    Ok((window, windowed))
}

/// The layers that `layer_types` names `sliding_attention`.
fn layer_types(f: &Fields, types: &Value, layers: usize, window: bool) -> Result<Vec<bool>> {
    let Some(types) = types.as_array() else { return f.wrong("layer_types", types, "a list") };
    if types.len() != layers {
        let found = types.len();
        return f.refuse(format!("`layer_types` names {found} layers, `num_hidden_layers` is {layers}"));
    }
    let mut windowed = vec![];
    for (i, kind) in types.iter().enumerate() {
        match kind.as_str() {
            Some("sliding_attention") if window => windowed.push(true),
            Some("sliding_attention") => {
                return f.refuse(format!(
                    "`layer_types[{i}]` is \"sliding_attention\" and there is no `sliding_window`"
                ));
            }
            Some("full_attention") => windowed.push(false),
            _ => {
                return f.refuse(format!(
                    "`layer_types[{i}]` is {kind}; dreamc has \"full_attention\" and \"sliding_attention\""
                ));
            }
        }
    }
    Ok(windowed)
}

/// Which layers have experts.
fn sparse(f: &Fields, family: &Family, layers: usize, dense: usize, experts: bool) -> Result<Vec<bool>> {
    match family.sparse {
        Sparse::Later => {
            let listed = matches!(family.mixer, Some((_, Placed::Config)));
            let Some(list) = f.get("mlp_layer_types").filter(|_| listed) else {
                return Ok((0..layers).map(|i| i >= dense).collect());
            };
            let of = |kind: &Value| match kind.as_str() {
                Some("sparse") => Some(true),
                Some("dense") => Some(false),
                _ => None,
            };
            let found: Option<Vec<bool>> = list.as_array().and_then(|kinds| kinds.iter().map(of).collect());
            match found.filter(|found| found.len() == layers) {
                Some(found) => Ok(found),
                None => f.wrong("mlp_layer_types", list, "\"dense\" or \"sparse\" for each layer"),
            }
        }
        Sparse::Never => Ok(vec![false; layers]),
        Sparse::All => Ok(vec![true; layers]),
        Sparse::Counted => Ok(vec![experts; layers]),
        Sparse::Listed => {
            let step = f.whole_or_none("decoder_sparse_step")?.unwrap_or(1);
            let mut found: Vec<bool> = (1..=layers as u64).map(|i| i.is_multiple_of(step)).collect();
            let Some(list) = f.get("mlp_only_layers") else { return Ok(found) };
            let right = "a list of numbers of layers";
            let Some(dense) = list.as_array() else { return f.wrong("mlp_only_layers", list, right) };
            for layer in dense {
                match layer.as_u64().and_then(|i| found.get_mut(usize::try_from(i).ok()?)) {
                    Some(sparse) => *sparse = false,
                    None => return f.wrong("mlp_only_layers", list, right),
                }
            }
            Ok(found)
        }
    }
}

/// The weight of the balancing loss of a layer. `transformers` adds the loss only where
/// `output_router_logits` is true. It takes means over the tokens of all layers where dreamc adds
/// up the layers' own losses, and counts a choice as one where dreamc counts a share of the choices
/// of its token.
fn load_balance_loss(
    f: &Fields,
    family: &Family,
    active: f64,
    layers: &[Layer],
    notes: &mut Vec<String>,
) -> Result<f64> {
    if family.sparse == Sparse::Never {
        return Ok(0.0);
    }
    let coefficient = match f.get("router_aux_loss_coef") {
        None => family.router.1,
        Some(value) => match value.as_f64() {
            Some(weight) if weight >= 0.0 => weight,
            _ => return f.wrong("router_aux_loss_coef", value, "a number, 0 or above"),
        },
    };
    let routed = layers.iter().filter(|l| l.sparse()).count();
    if !f.flag("output_router_logits", false)? || routed == 0 || coefficient == 0.0 {
        return Ok(0.0);
    }
    let weight = coefficient * active / routed as f64;
    notes.push(format!(
        "output_router_logits: training balances experts by `load_balance_loss: {weight:?}`, layer by layer; transformers pools \
         all layers (docs/hugging-face.md)"
    ));
    Ok(weight)
}

// From a specification ----------------------------------------------------------------------------

/// The names of the components of a layer, one after the other, and their roles: what mixes
/// tokens, a network, or one of the two.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    /// Both of each.
    pub parts: Vec<(String, Role)>,
}

impl Named {
    fn has(&self, role: Role) -> bool {
        self.parts.iter().any(|(_, own)| *own == role)
    }
}

/// The parts of a model whose layers are an attention and a network, one after the other.
struct Plain<'a> {
    model: &'a Model,
    layers: Vec<Named>,
    /// Passes of the loop around all layers and a norm.
    passes: Option<u64>,
    /// The attention without and with a window.
    attentions: [Option<&'a Attention>; 2],
    mlp: Option<&'a Mlp>,
    experts: Option<&'a Experts>,
    mixer: Option<(Mixer, &'a Defined)>,
    /// The network with factors.
    scaled: Option<&'a Defined>,
}

/// The layers of a model, each with weights of its own, in the order in which they are first
/// applied; or why it has other parts than layers of a family.
pub fn layers(model: &Model) -> std::result::Result<Vec<Named>, String> {
    let mut found = vec![];
    each_layer(&model.body, &mut |expr| {
        found.push(named(model, expr)?);
        Ok(())
    })?;
    Ok(found)
}

/// Visits the layers of a body.
fn each_layer<'a>(
    items: &'a [Item],
    visit: &mut impl FnMut(&'a Expr) -> std::result::Result<(), String>,
) -> std::result::Result<(), String> {
    for item in items {
        match item {
            Item::Layer(expr) => visit(expr)?,
            Item::Statement(_) => {}
            Item::Repeat { count, items } => {
                for _ in 0..*count {
                    each_layer(items, visit)?;
                }
            }
            Item::Recur { items, .. } => each_layer(items, visit)?,
        }
    }
    Ok(())
}

/// The names of what mixes tokens and of the network that are a layer's components, whatever norms
/// stand between them.
fn named(model: &Model, expr: &Expr) -> std::result::Result<Named, String> {
    let terms = match expr {
        Expr::Sequential(terms) => terms.as_slice(),
        Expr::Component(_) => std::slice::from_ref(expr),
        Expr::Norm | Expr::Parallel(_) | Expr::Skip(..) => &[],
    };
    let other = || {
        let layer = super::composition(expr);
        format!("the layer `{layer}` is not a sequence attention and a network after it")
    };
    let mut parts = vec![];
    for term in terms.iter().filter(|term| **term != Expr::Norm) {
        let Expr::Component(name) = term else { return Err(other()) };
        let Some(component) = model.components.get(name) else { return Err(other()) };
        parts.push((name.clone(), role(component).ok_or_else(other)?));
    }
    let mixes = |role: Role| matches!(role, Role::Attention | Role::Mixer);
    match parts.as_slice() {
        [_] => Ok(Named { parts }),
        [(_, first), (_, second)] if mixes(*first) && !mixes(*second) => Ok(Named { parts }),
        [(_, first), (name, _)] if mixes(*first) => Err(format!("`{name}` is no network, where one stands")),
        _ => Err(other()),
    }
}

/// The role of a component that families have.
fn role(component: &Component) -> Option<Role> {
    if let Component::Defined(own) = component {
        return match (mixer_of(own), is(own, SCALED)) {
            (Some(_), _) => Some(Role::Mixer),
            (None, true) => Some(Role::Mlp),
            (None, false) => None,
        };
    }
    match component.known() {
        Known::Mlp(_) => Some(Role::Mlp),
        Known::Experts(_) => Some(Role::Experts),
        Known::Attention(_) | Known::Own => {
            matches!(component, Component::Sequence(_)).then_some(Role::Attention)
        }
    }
}

/// The mixer of the library that a definition is, if there are families of it.
fn mixer_of(own: &Defined) -> Option<Mixer> {
    Mixer::ALL.into_iter().find(|mixer| is(own, mixer.name()))
}

/// Whether a definition is that of the library of this name.
fn is(own: &Defined, name: &str) -> bool {
    dreamc_dsl::define::library::definition(name).is_some_and(|library| own.definition == library)
}

impl<'a> Plain<'a> {
    fn new(model: &'a Model) -> std::result::Result<Self, String> {
        let mut plain = Plain {
            model,
            layers: vec![],
            passes: None,
            attentions: [None; 2],
            mlp: None,
            experts: None,
            mixer: None,
            scaled: None,
        };
        let mut items = model.body.as_slice();
        if let [Item::Recur { count, items: inner, .. }] = items
            && let [inner @ .., Item::Statement(Statement::Norm(NormGain::Own))] = inner.as_slice()
        {
            (plain.passes, items) = (Some(*count), inner);
        }
        straight(items)?;
        each_layer(items, &mut |expr| plain.layer(expr))?;
        Ok(plain)
    }

    fn layer(&mut self, expr: &'a Expr) -> std::result::Result<(), String> {
        let found = named(self.model, expr)?;
        if matches!(expr, Expr::Sequential(terms) if terms.contains(&Expr::Norm)) {
            return Err(format!("the layer `{}` normalises the stream", super::composition(expr)));
        }
        for (name, _) in &found.parts {
            let component = self.model.components.get(name);
            if let Some(Component::Sequence(a)) = component {
                same(&mut self.attentions[usize::from(a.window.is_some())], a, name)?;
            }
            if let Some(Component::Defined(own)) = component
                && let Some(mixer) = mixer_of(own)
            {
                if self.mixer.is_some_and(|first| first != (mixer, own)) {
                    return Err(differs(name));
                }
                self.mixer = Some((mixer, own));
            }
            if let Some(Component::Defined(own)) = component
                && is(own, SCALED)
            {
                same(&mut self.scaled, own, name)?;
            }
            match component.map(|c| c.known()) {
                Some(Known::Mlp(mlp)) => same(&mut self.mlp, mlp, name)?,
                Some(Known::Experts(experts)) => same(&mut self.experts, experts, name)?,
                Some(Known::Attention(_) | Known::Own) | None => {}
            }
        }
        self.layers.push(found);
        Ok(())
    }

    /// A quantity of the model.
    fn value(&self, slot: Slot, family: &Family) -> Option<f64> {
        let a = self.attentions[0].or(self.attentions[1]);
        let experts = self.experts;
        let own = family.fields().any(|(_, slot, _)| *slot == Slot::ExpertIntermediate);
        let flag = |flag: bool| f64::from(u8::from(flag));
        match slot {
            Slot::Vocab => Some(self.model.vocab as f64),
            Slot::Hidden => Some(self.model.hidden as f64),
            Slot::Context => Some(self.model.context as f64),
            Slot::Layers => Some(self.layers.len() as f64),
            Slot::Heads if self.attends() => self.settings(&["heads"]),
            Slot::KvHeads if self.attends() => self.settings(&["kv_heads"]),
            Slot::HeadSize if self.attends() => self.settings(&["head"]),
            Slot::Heads => Some(a?.heads as f64),
            Slot::KvHeads => Some(a?.kv_heads as f64),
            Slot::HeadSize => Some(a?.head_size as f64),
            Slot::Intermediate if self.scaled.is_some() => number(self.scaled?, "wide"),
            Slot::Intermediate => match (self.mlp, experts) {
                (Some(mlp), _) => Some(mlp.intermediate as f64),
                (None, Some(experts)) if !own => Some(experts.intermediate as f64),
                // No layer is dense; the class's size stands for none.
                (None, _) => family.fields().find_map(|(_, slot, absent)| match (slot, absent) {
                    (Slot::Intermediate, Absent::Whole(n)) => Some(*n as f64),
                    _ => None,
                }),
            },
            Slot::Eps => Some(self.model.norm.eps),
            Slot::Tie => Some(flag(self.model.tie)),
            Slot::Scalar => {
                let a = a?;
                let scale = a.scale.unwrap_or(1.0 / (a.head_size as f64).sqrt());
                let (exact, whole) = (1.0 / (scale * scale), (1.0 / (scale * scale)).round());
                Some(if 1.0 / whole.sqrt() == scale { whole } else { exact })
            }
            Slot::Softcap => a?.softcap,
            Slot::LogitSoftcap => self.model.logit_softcap,
            Slot::Experts => experts.map(|e| e.count as f64),
            Slot::Active => experts.map(|e| e.active as f64),
            Slot::ExpertIntermediate => experts.map(|e| e.intermediate as f64),
            Slot::Normalise => experts.map(|e| flag(e.router.normalise)),
            Slot::Shared if family.sparse == Sparse::Counted && experts.is_none() => {
                self.mlp.map(|mlp| mlp.intermediate as f64)
            }
            Slot::Shared => experts.map(|e| (e.shared * e.intermediate) as f64),
            Slot::ExpertsOrNone => Some(experts.map_or(0.0, |e| e.count as f64)),
            Slot::Scale => {
                let a = a?;
                Some(a.scale.unwrap_or(1.0 / (a.head_size as f64).sqrt()))
            }
            Slot::OutputScale => Some(self.model.output_scale.unwrap_or(1.0)),
            Slot::LogitDivisor => {
                let exact = 1.0 / self.model.logit_scale.unwrap_or(1.0);
                let whole = exact.round();
                Some(if Some(1.0 / whole) == self.model.logit_scale { whole } else { exact })
            }
            Slot::LogitFactor => Some(self.model.logit_scale.unwrap_or(1.0)),
            Slot::SharedCount => experts.map(|e| e.shared as f64),
            Slot::Dense => {
                let sparse = self.layers.iter().position(|l| l.has(Role::Experts));
                Some(sparse.unwrap_or(self.layers.len()) as f64)
            }
            Slot::Groups => experts.map(|e| e.router.groups as f64),
            Slot::ActiveGroups => experts.map(|e| e.router.topk_groups as f64),
            Slot::GateScale => experts.map(|e| e.router.scale),
            Slot::Passes => self.passes.map(|n| n as f64),
            // Nothing goes back to the family that has them.
            Slot::Backprop | Slot::Prelude | Slot::Core | Slot::Coda => None,
            Slot::Noise => None,
            Slot::EmbedScale => Some(match self.model.embed_scale {
                None => 1.0,
                Some(EmbedScale::SqrtHidden) => (self.model.hidden as f64).sqrt(),
                Some(EmbedScale::Value(x)) => x,
            }),
            Slot::QueryRank => a?.latent.as_ref()?.query.map(|n| n as f64),
            Slot::KvRank => Some(a?.latent.as_ref()?.kv as f64),
            Slot::Turned => Some(a?.latent.as_ref()?.turned as f64),
            Slot::Still => Some((a?.head_size - a?.latent.as_ref()?.turned) as f64),
            Slot::Value => Some(a?.latent.as_ref()?.value as f64),
            Slot::Bias => Some(flag(a?.bias.is_some())),
            Slot::MlpBias => Some(flag(self.mlp?.biased)),
            Slot::MixerHeads => match self.mixer?.0 {
                Mixer::Mamba2 | Mixer::FalconH1 => self.settings(&["groups", "members"]),
                Mixer::GatedDelta => self.settings(&["heads", "members"]),
                Mixer::Kda => self.settings(&["heads"]),
            },
            Slot::MixerSize => match self.mixer?.0 {
                Mixer::Mamba2 | Mixer::Kda | Mixer::FalconH1 => self.settings(&["size"]),
                Mixer::GatedDelta => self.settings(&["value"]),
            },
            Slot::MixerGroups => match self.mixer?.0 {
                Mixer::Mamba2 | Mixer::FalconH1 => self.settings(&["groups"]),
                Mixer::GatedDelta | Mixer::Kda => self.settings(&["heads"]),
            },
            Slot::MixerState => match self.mixer?.0 {
                Mixer::Mamba2 | Mixer::FalconH1 => self.settings(&["state"]),
                Mixer::GatedDelta | Mixer::Kda => self.settings(&["size"]),
            },
            Slot::MixerWidth => self.settings(&["width"]),
            Slot::MixerWide => self.settings(&["groups", "members", "size"]),
            Slot::MixerExpand => {
                let (wide, hidden) =
                    (self.settings(&["groups", "members", "size"])?, self.model.hidden as f64);
                (wide % hidden == 0.0).then_some(wide / hidden)
            }
        }
    }

    /// Whether the mixer attends, too.
    fn attends(&self) -> bool {
        self.mixer.is_some_and(|(mixer, _)| mixer == Mixer::FalconH1)
    }

    /// A factor of its parts.
    fn factor(&self, factor: &Factor) -> f64 {
        let own = match factor.role {
            Role::Mixer => self.mixer.map(|(_, own)| own),
            Role::Mlp => self.scaled,
            Role::Layer | Role::Attention | Role::Experts => None,
        };
        own.and_then(|own| number(own, factor.setting)).unwrap_or(1.0)
    }

    /// The product of sizes of the mixer.
    fn settings(&self, names: &[&str]) -> Option<f64> {
        names.iter().map(|name| Some(self.setting(name)? as f64)).product()
    }

    /// A size of the mixer, small enough that products of three are.
    fn setting(&self, name: &str) -> Option<u64> {
        let of = |name: &str| match self.mixer?.1.settings.get(name)? {
            Setting::Size(size) => Some(*size),
            Setting::Number(_) | Setting::Derived => None,
        };
        let size = match (self.mixer?.0, name, of(name)) {
            (Mixer::FalconH1, "head", None) => self.model.hidden.checked_div(of("heads")?)?,
            // As the library has it.
            (Mixer::Mamba2 | Mixer::FalconH1, "members", None) => {
                2 * self.model.hidden.checked_div(of("size")?)?.checked_div(of("groups")?)?
            }
            (_, _, size) => size?,
        };
        (size < 1 << 20).then_some(size)
    }

    /// The non-linearity of its networks as a family has it; that of the class where it lacks it.
    fn activation(&self, family: &Family) -> (&'static str, &'static str) {
        let (_, known) = family.activation;
        let own = self.mlp.map(|mlp| mlp.activation).or(self.experts.map(|e| e.activation));
        let own = own.map(Activation::name);
        let found = known.iter().find(|(_, ours)| own == Some(*ours));
        *found.unwrap_or(&known[0])
    }

    /// The configuration that it would be of this family.
    fn config(&self, family: &'static Family) -> Option<Config> {
        let value = |&(_, slot, _): &(&str, Slot, Absent)| Some((slot, self.value(slot, family)?));
        let mut values: BTreeMap<Slot, f64> = family.fields().filter_map(value).collect();
        if family.sparse == Sparse::Counted {
            counted(&mut values);
        }
        if family.latent {
            for slot in [Slot::HeadSize, Slot::Scalar] {
                values.extend(self.value(slot, family).map(|value| (slot, value)));
            }
        }
        let turn = |a: &Attention| -> Option<Turn> {
            let Rope { base, scaling, .. } = a.rope?;
            Some(Turn { base, scaling })
        };
        let [full, local] = self.attentions.map(|a| a.and_then(turn));
        let rotations = match family.rotation {
            Rotation::Still => [STILL; 2],
            Rotation::Typed(_) if full.is_none() => [STILL; 2],
            _ if self.attends() => [Turn { base: number(self.mixer?.1, "base")?, scaling: None }; 2],
            _ => [full.or(local)?, local.or(full)?],
        };
        let windowed = |(name, _): &(String, Role)| {
            let component = self.model.components.get(name);
            matches!(component, Some(Component::Sequence(a)) if a.window.is_some())
        };
        let one = |named: &Named, role: Role| named.has(role);
        let layer = |named: &Named| Layer {
            windowed: named.parts.iter().any(windowed),
            mixing: match (one(named, Role::Attention), one(named, Role::Mixer)) {
                (true, _) => Some(Mixing::Attention),
                (false, true) => Some(Mixing::Mixer),
                (false, false) => None,
            },
            network: match (one(named, Role::Mlp), one(named, Role::Experts)) {
                (true, _) => Some(Network::Dense),
                (false, true) => Some(Network::Sparse),
                (false, false) => None,
            },
        };
        Some(Config {
            family,
            notes: vec![],
            values,
            layers: self.layers.iter().map(layer).collect(),
            window: self.attentions[1].and_then(|a| a.window),
            rotations,
            load_balance_loss: self.experts.map_or(0.0, |e| e.router.load_balance_loss),
            activation: self.activation(family),
            factors: family.factors.iter().map(|factor| self.factor(factor)).collect(),
        })
    }
}

/// A setting of a definition that has a number.
fn number(own: &Defined, name: &str) -> Option<f64> {
    match own.settings.get(name)? {
        Setting::Size(size) => Some(*size as f64),
        Setting::Number(number) => Some(*number),
        Setting::Derived => None,
    }
}

/// Refuses what is more than layers one after the other.
fn straight(items: &[Item]) -> std::result::Result<(), String> {
    items.iter().try_for_each(|item| match item {
        Item::Layer(_) => Ok(()),
        Item::Statement(_) => Err("statements stand between its layers".into()),
        Item::Repeat { items, .. } => straight(items),
        Item::Recur { count, .. } => Err(format!("`recur {count}` applies one set of weights several times")),
    })
}

/// Takes the first of several components, or one that equals it.
fn same<'a, T: PartialEq>(
    place: &mut Option<&'a T>,
    found: &'a T,
    name: &str,
) -> std::result::Result<(), String> {
    if place.is_some_and(|first| first != found) {
        return Err(differs(name));
    }
    *place = Some(found);
    Ok(())
}

fn differs(name: &str) -> String {
    format!("`{name}` differs from the component of the same kind in the layers before it")
}

/// The configuration of a specification whose weights are stored in this type: of a family such
/// that reading what is written gives the specification again. `likely` is the `model_type` to
/// begin with.
pub fn recognise(
    spec: &Spec,
    stored: Dtype,
    likely: Option<&str>,
    kept: &Map<String, Value>,
) -> std::result::Result<Config, String> {
    let plain = Plain::new(&spec.model)?;
    let wanted = meaning(&spec.model, &plain.layers);
    let mut closest: Option<(usize, String)> = None;
    let mut order: Vec<&'static Family> = FAMILIES.iter().collect();
    order.retain(|family| family.form != Form::Recurrent);
    order.sort_by_key(|family| likely != Some(family.kind));
    for family in order {
        let Some(config) = plain.config(family) else { continue };
        let read = Config::read(Path::new("config.json"), config.json(stored, kept), &[]);
        let found = read.ok().and_then(|read| read.spec(&spec.model.name, Some(stored)).ok());
        let Some(found) = found else { continue };
        let Ok(layers) = layers(&found.model) else { continue };
        let found = meaning(&found.model, &layers);
        if found == wanted {
            return Ok(config);
        }
        let (ours, theirs) = (lines(spec, &wanted), lines(spec, &found));
        let differ = |a: &[String], b: &[String]| -> Vec<String> {
            a.iter().filter(|line| !b.contains(line)).cloned().collect()
        };
        let (ours, theirs) = (differ(&ours, &theirs), differ(&theirs, &ours));
        let distance = ours.len() + theirs.len();
        if closest.as_ref().is_none_or(|(best, _)| distance < *best) {
            let or = |line: Option<&String>| line.map_or("nothing".into(), |line| format!("`{line}`"));
            let (ours, theirs) = (or(ours.first()), or(theirs.first()));
            closest =
                Some((distance, format!("{ours} of the specification is {theirs} of {}", family.title)));
        }
    }
    Err(closest.map_or("it is of no family that transformers has".into(), |(_, why)| why))
}

/// A model as a class computes it: without names, the grouping of its layers, and what training
/// alone reads. Models that are equal so are the same function of the same tensors.
fn meaning(model: &Model, layers: &[Named]) -> Model {
    let mut model = model.clone();
    let loops = matches!(model.body.as_slice(), [Item::Recur { .. }]);
    let old = std::mem::take(&mut model.components);
    let mut body = vec![];
    for layer in layers {
        let mut names = vec![];
        for (name, role) in &layer.parts {
            let mut role = match role {
                Role::Mixer => "mixer",
                Role::Mlp => "mlp",
                Role::Experts => "ea",
                Role::Layer | Role::Attention => "global",
            };
            let Some(mut component) = old.get(name).cloned() else { continue };
            if let Component::Sequence(a) = &mut component {
                a.scale.get_or_insert(1.0 / (a.head_size as f64).sqrt());
                if let Some(latent) = &mut a.latent {
                    latent.eps.get_or_insert(model.norm.eps);
                }
                // Layers outside loops do not use it.
                a.projection = a.projection.take().filter(|_| loops);
                role = if a.window.is_some() { "local" } else { role };
            }
            if let Component::Experts(e) = &mut component {
                (e.router.load_balance_loss, e.router.z_loss) = (0.0, 0.0);
                if let Some(balance) = &mut e.router.balance {
                    let (target, law) = (BalanceTarget::Mean, BalanceLaw::Sign);
                    *balance = Balance { rate: 0.0, target, law };
                }
            }
            model.components.insert(role.into(), component);
            names.push(Expr::Component(role.into()));
        }
        body.push(Item::Layer(Expr::Sequential(names)));
    }
    model.components.sort_keys();
    model.body = match model.body.as_slice() {
        [Item::Recur { count, residual_norm, items, looping }] => {
            let mut looping = Looping { backprop: None, depth: None, ..looping.clone() };
            if looping.exit.gate().is_some() {
                // Packages have no loss.
                looping.exit = Exit::Gate(0.0);
            }
            body.extend(items.last().filter(|item| matches!(item, Item::Statement(_))).cloned());
            vec![Item::Recur { count: *count, residual_norm: *residual_norm, items: body, looping }]
        }
        _ => body,
    };
    model.name = "model".into();
    // A factor is the same by name and by number.
    if let Some(EmbedScale::Value(x)) = model.embed_scale
        && x == (model.hidden as f64).sqrt()
    {
        model.embed_scale = Some(EmbedScale::SqrtHidden);
    }
    model
}

/// The lines of a model, to say where two differ; `spec` is any specification.
fn lines(spec: &Spec, model: &Model) -> Vec<String> {
    let alone = Spec { weights: None, data: None, model: model.clone(), ..spec.clone() };
    let text = dreamc_dsl::show(&alone, Spelling::Yaml);
    let model = text.lines().take_while(|line| !line.starts_with("train:"));
    model.map(|line| line.trim().to_string()).filter(|line| !line.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::super::finite;
    use super::*;
    use dreamc_dsl::Spelling;

    /// The published configurations, as they mean what the examples say.
    #[test]
    fn published_models_are_those_of_the_examples() {
        let gemma = r#"{"architectures": ["Gemma2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
            "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
            "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "initializer_range": 0.02, "intermediate_size": 9216,
            "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8, "num_hidden_layers": 26,
            "num_key_value_heads": 4, "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
            "rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype": "float32", "transformers_version": "4.42.4",
            "use_cache": true, "vocab_size": 256000}"#;
        let llama = r#"{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
            "bos_token_id": 128000, "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
            "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": false,
            "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1,
            "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0, "tie_word_embeddings": true,
            "torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0", "use_cache": true, "vocab_size": 128256}"#;
        let mixtral = r#"{"architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
            "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
            "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": false,
            "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": null,
            "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 32000}"#;
        let olmoe = r#"{"architectures": ["OlmoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "clip_qkv": null,
            "eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 1024,
            "max_position_embeddings": 4096, "model_type": "olmoe", "norm_topk_prob": false, "num_attention_heads": 16,
            "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16,
            "output_router_logits": false, "pad_token_id": 1, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000.0,
            "router_aux_loss_coef": 0.01, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true,
            "vocab_size": 50304}"#;
        for (name, text) in [
            ("gemma-2-2b", gemma),
            ("llama-3.2-1b", llama),
            ("mixtral-8x7b", mixtral),
            ("olmoe-1b-7b", olmoe),
        ] {
            let map = serde_json::from_str(text).unwrap();
            let config = Config::read(Path::new("config.json"), map, &[]).unwrap();
            let yaml = config.specification(name, Some(Dtype::BF16)).unwrap().1;
            let ast = dreamc_dsl::parse("config.json", &yaml, Spelling::Yaml).unwrap();
            let found = dreamc_dsl::check(&ast, &[]).unwrap_or_else(|d| panic!("{yaml}\n{d}")).0;
            let path = format!("{}/../examples/published/{name}.yaml", env!("CARGO_MANIFEST_DIR"));
            let mut example = dreamc_dsl::load(path, &[]).unwrap().0.model;
            // The examples train with the losses of their papers; a configuration that leaves
            // router logits out trains with none.
            for component in example.components.values_mut() {
                if let dreamc_dsl::spec::Component::Experts(experts) = component {
                    (experts.router.load_balance_loss, experts.router.z_loss) = (0.0, 0.0);
                }
            }
            assert_eq!(found.model, example, "{name}");
        }
    }

    /// Published configurations give the published numbers of parameters, and go back as they came.
    #[test]
    fn published_configurations_have_their_published_sizes() {
        let mistral = r#"{"architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
            "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
            "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": false,
            "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 32000}"#;
        let phi = r#"{"architectures": ["Phi3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
            "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 32000,
            "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02, "intermediate_size": 8192,
            "max_position_embeddings": 4096, "model_type": "phi3", "num_attention_heads": 32, "num_hidden_layers": 32,
            "num_key_value_heads": 32, "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0,
            "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000.0, "sliding_window": 2047,
            "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 32064}"#;
        let gemma = r#"{"architectures": ["Gemma3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
            "attn_logit_softcapping": null, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
            "final_logit_softcapping": null, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
            "initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
            "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0,
            "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": null,
            "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
            "use_cache": true, "vocab_size": 262144}"#;
        let qwen = r#"{"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
            "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
            "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
            "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
            "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_cache": true, "use_sliding_window": false,
            "vocab_size": 151936}"#;
        let moe = r#"{"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
            "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
            "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960,
            "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
            "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
            "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": false, "rms_norm_eps": 1e-06,
            "rope_scaling": null, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": null,
            "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true, "use_sliding_window": false,
            "vocab_size": 151936}"#;
        let qwen2 = r#"{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
            "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
            "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
            "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
            "sliding_window": 32768, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_cache": true, "use_mrope": false,
            "use_sliding_window": false, "vocab_size": 151936}"#;
        let distilled = r#"{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
            "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 1536, "initializer_range": 0.02, "intermediate_size": 8960,
            "max_position_embeddings": 131072, "max_window_layers": 21, "model_type": "qwen2", "num_attention_heads": 12,
            "num_hidden_layers": 28, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 10000, "sliding_window": 4096,
            "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true, "use_mrope": false,
            "use_sliding_window": false, "vocab_size": 151936}"#;
        let qwen2_moe = r#"{"architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
            "decoder_sparse_step": 1, "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
            "intermediate_size": 5632, "max_position_embeddings": 8192, "max_window_layers": 21, "model_type": "qwen2_moe",
            "moe_intermediate_size": 1408, "norm_topk_prob": false, "num_attention_heads": 16, "num_experts": 60,
            "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 16, "output_router_logits": false,
            "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 5632,
            "sliding_window": 32768, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true,
            "use_sliding_window": false, "vocab_size": 151936}"#;
        let smol = r#"{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 0,
            "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
            "intermediate_size": 1536, "is_llama_config": true, "max_position_embeddings": 8192, "model_type": "llama",
            "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
            "rope_interleaved": false, "rope_scaling": null, "rope_theta": 100000, "tie_word_embeddings": true,
            "torch_dtype": "bfloat16", "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "unsloth_fixed": true,
            "use_cache": true, "vocab_size": 49152}"#;
        let olmo2 = r#"{"architectures": ["Olmo2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "eos_token_id": 100257,
            "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
            "max_position_embeddings": 4096, "model_type": "olmo2", "num_attention_heads": 32, "num_hidden_layers": 32,
            "num_key_value_heads": 32, "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 500000,
            "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.47.0.dev0", "use_cache": true,
            "vocab_size": 100352}"#;
        let olmo3 = format!(
            r#"{{"architectures": ["Olmo3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "dtype": "bfloat16",
            "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
            "layer_types": [{}], "max_position_embeddings": 65536, "model_type": "olmo3", "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 100277, "rms_norm_eps": 1e-06,
            "rope_scaling": {{"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
            "original_max_position_embeddings": 8192, "rope_type": "yarn"}}, "rope_theta": 500000, "sliding_window": 4096,
            "tie_word_embeddings": false, "transformers_version": "4.57.0", "use_cache": true, "vocab_size": 100278}}"#,
            types(32, 4)
        );
        let gpt_oss = format!(
            r#"{{"architectures": ["GptOssForCausalLM"], "attention_bias": true, "attention_dropout": 0.0, "eos_token_id": 200002,
            "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
            "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": [{}], "max_position_embeddings": 131072,
            "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
            "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": false, "pad_token_id": 199999,
            "quantization_config": {{"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
            "model.embed_tokens", "lm_head"], "quant_method": "mxfp4"}}, "rms_norm_eps": 1e-05, "rope_scaling": {{"beta_fast": 32.0,
            "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": false}},
            "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
            "tie_word_embeddings": false, "transformers_version": "4.55.0.dev0", "use_cache": true, "vocab_size": 201088}}"#,
            types(24, 2)
        );
        let deepseek = r#"{"architectures": ["DeepseekForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
            "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekConfig"}, "aux_loss_alpha": 0.001, "bos_token_id": 100000,
            "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
            "intermediate_size": 10944, "max_position_embeddings": 4096, "model_type": "deepseek", "moe_intermediate_size": 1408,
            "moe_layer_freq": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": false, "num_attention_heads": 16,
            "num_experts_per_tok": 6, "num_hidden_layers": 28, "num_key_value_heads": 16, "pretraining_tp": 1, "rms_norm_eps": 1e-06,
            "rope_scaling": null, "rope_theta": 10000, "scoring_func": "softmax", "seq_aux": true, "tie_word_embeddings": false,
            "torch_dtype": "bfloat16", "transformers_version": "4.36.0", "use_cache": true, "vocab_size": 102400}"#;
        let dots = r#"{"architectures": ["Dots1ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
            "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
            "intermediate_size": 10944, "max_position_embeddings": 32768, "max_window_layers": 62, "model_type": "dots1",
            "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 2,
            "norm_topk_prob": true, "num_attention_heads": 32, "num_experts_per_tok": 6, "num_hidden_layers": 62,
            "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000000,
            "routed_scaling_factor": 2.5, "scoring_func": "noaux_tc", "sliding_window": null, "tie_word_embeddings": false,
            "topk_group": 1, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": true, "use_sliding_window": false,
            "vocab_size": 152064}"#;
        let lite = r#"{"architectures": ["DeepseekV2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
            "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"}, "aux_loss_alpha": 0.001, "bos_token_id": 100000,
            "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
            "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v2",
            "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
            "norm_topk_prob": false, "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
            "num_key_value_heads": 16, "pretraining_tp": 1, "q_lora_rank": null, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707,
            "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 10000,
            "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": true, "tie_word_embeddings": false, "topk_group": 1,
            "topk_method": "greedy", "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": true,
            "v_head_dim": 128, "vocab_size": 102400}"#;
        // Without `quantization_config`: its weights are stored in 8 bits, which are refused, and
        // people convert them.
        let v3 = r#"{"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
            "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1,
            "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02,
            "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3",
            "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
            "norm_topk_prob": true, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
            "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40,
            "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 10000,
            "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": false, "topk_group": 4,
            "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": true,
            "v_head_dim": 128, "vocab_size": 129280}"#;
        let ouro = r#"{"architectures": ["OuroForCausalLM"], "attention_dropout": 0.0,
            "auto_map": {"AutoConfig": "configuration_ouro.OuroConfig"}, "bos_token_id": 0, "early_exit_threshold": 1.0,
            "eos_token_id": 0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
            "intermediate_size": 5632, "max_position_embeddings": 65536, "max_window_layers": 24, "model_type": "ouro",
            "num_attention_heads": 16, "num_hidden_layers": 24, "num_key_value_heads": 16, "rms_norm_eps": 1e-06,
            "rope_scaling": null, "rope_theta": 1000000.0, "sliding_window": null, "tie_word_embeddings": false,
            "torch_dtype": "bfloat16", "total_ut_steps": 4, "use_cache": true, "use_sliding_window": false, "vocab_size": 49152}"#;
        for (text, total) in [
            (olmo2, 7_298_617_344),
            (&olmo3, 7_298_011_136),
            (&gpt_oss, 20_914_757_184),
            (deepseek, 16_375_728_128),
            // Without the biases that choose, which are state: 128 of each of 61 layers.
            (dots, 142_774_381_696 - 61 * 128),
            (lite, 15_706_484_224),
            // 671 billion with the biases that choose: 256 of each of 58 layers.
            (v3, 671_026_419_200 - 58 * 256),
            (ouro, 1_434_652_673),
            (qwen2, 494_032_768),
            (distilled, 1_777_088_000),
            (qwen2_moe, 14_315_784_192),
            (smol, 134_515_008),
            (mistral, 7_241_732_096),
            (phi, 3_821_079_552),
            (gemma, 999_885_952),
            (qwen, 596_049_920),
            (moe, 30_532_122_624u64),
        ] {
            let kept: Map<String, Value> = serde_json::from_str(text).unwrap();
            let config = Config::read(Path::new("config.json"), kept.clone(), &[]).unwrap();
            let spec = config.spec("model", Some(Dtype::BF16)).unwrap();
            let kind = config.family.kind;
            let compiled =
                dreamc_compiler::compile(&spec, &dreamc_runtime::train::prepare::forward(1, 1)).unwrap();
            assert_eq!(dreamc_runtime::model::parameters(&compiled), total, "{kind}");
            let back = recognise(&spec, Dtype::BF16, Some(kind), &kept).unwrap();
            assert_eq!(back.family.kind, kind);
            let again = Config::read(Path::new("config.json"), back.json(Dtype::BF16, &kept), &[]).unwrap();
            assert_eq!(again.spec("model", Some(Dtype::BF16)).unwrap().model, spec.model, "{kind}");
        }
    }

    /// Published hybrids have their published sizes, and go back.
    #[test]
    fn published_hybrids_have_their_published_sizes() {
        let qwen = r#"{"architectures": ["Qwen3NextForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
            "decoder_sparse_step": 1, "eos_token_id": 151645, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
            "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5120, "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
            "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_next", "moe_intermediate_size": 512,
            "norm_topk_prob": true, "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10,
            "num_hidden_layers": 48, "num_key_value_heads": 2, "output_router_logits": false, "partial_rotary_factor": 0.25,
            "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 10000000, "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": 512, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
            "transformers_version": "4.57.0.dev0", "use_cache": true, "use_sliding_window": false, "vocab_size": 151936}"#;
        let nemotron = r#"{"architectures": ["NemotronHForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
            "bos_token_id": 1, "chunk_size": 128, "conv_kernel": 4, "eos_token_id": 2, "expand": 2, "head_dim": 128,
            "hidden_dropout": 0.0, "hidden_size": 2688, "hybrid_override_pattern":
            "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "initializer_range": 0.02, "intermediate_size": 1856,
            "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_hidden_act": "silu", "mamba_num_heads": 64,
            "mamba_proj_bias": false, "mamba_ssm_cache_dtype": "float32", "max_position_embeddings": 262144, "mlp_bias": false,
            "mlp_hidden_act": "relu2", "model_type": "nemotron_h", "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "n_groups": 8, "n_routed_experts": 128,
            "n_shared_experts": 1, "norm_eps": 1e-05, "norm_topk_prob": true, "num_attention_heads": 32, "num_experts_per_tok": 6,
            "num_hidden_layers": 52, "num_key_value_heads": 2, "num_logits_to_keep": 1, "pad_token_id": 0,
            "partial_rotary_factor": 1.0, "rescale_prenorm_residual": true, "residual_in_fp32": false, "rope_theta": 10000,
            "routed_scaling_factor": 2.5, "sliding_window": null, "ssm_state_size": 128, "tie_word_embeddings": false,
            "time_step_limit": [0.0, Infinity], "topk_group": 1, "torch_dtype": "bfloat16", "use_bias": false, "use_cache": true, "use_conv_bias": true,
            "use_mamba_kernels": true, "vocab_size": 131072}"#;
        let kimi = r#"{"architectures": ["KimiLinearForCausalLM"], "bos_token_id": 163584, "dtype": "bfloat16",
            "eos_token_id": 163586, "first_k_dense_replace": 1, "head_dim": 72, "hidden_act": "silu", "hidden_size": 2304,
            "initializer_range": 0.02, "intermediate_size": 9216, "kv_lora_rank": 512, "linear_attn_config": {"full_attn_layers":
            [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21,
            22, 23, 25, 26], "num_heads": 32, "short_conv_kernel_size": 4}, "mla_use_nope": true, "model_max_length": 1048576,
            "model_type": "kimi_linear", "moe_intermediate_size": 1024, "moe_layer_freq": 1, "moe_renormalize": true,
            "moe_router_activation_func": "sigmoid", "num_attention_heads": 32, "num_expert_group": 1, "num_experts": 256,
            "num_experts_per_token": 8, "num_hidden_layers": 27, "num_key_value_heads": 32, "num_nextn_predict_layers": 0,
            "num_shared_experts": 1, "pad_token_id": 163839, "q_lora_rank": null, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000.0, "routed_scaling_factor": 2.446,
            "tie_word_embeddings": false, "topk_group": 1, "use_cache": true, "use_grouped_topk": true, "v_head_dim": 128,
            "vocab_size": 163840}"#;
        let kind = |i: usize| if i % 10 == 5 { "\"attention\"" } else { "\"mamba\"" };
        let granite = format!(
            r#"{{"architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
            "attention_multiplier": 0.0078125, "bos_token_id": 100257, "embedding_multiplier": 12, "eos_token_id": 100257,
            "hidden_act": "silu", "hidden_size": 1536, "init_method": "mup", "initializer_range": 0.1, "intermediate_size": 512,
            "layer_types": [{}], "logits_scaling": 6, "mamba_chunk_size": 256, "mamba_conv_bias": true, "mamba_d_conv": 4,
            "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 48,
            "mamba_proj_bias": false, "max_position_embeddings": 131072, "model_type": "granitemoehybrid",
            "normalization_function": "rmsnorm", "num_attention_heads": 12, "num_experts_per_tok": 6, "num_hidden_layers": 40,
            "num_key_value_heads": 4, "num_local_experts": 64, "output_router_logits": false, "pad_token_id": 100256,
            "position_embedding_type": "nope", "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": null,
            "rope_theta": 10000, "router_aux_loss_coef": 0.01, "shared_intermediate_size": 1024, "tie_word_embeddings": true,
            "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 100352}}"#,
            (0..40).map(kind).collect::<Vec<_>>().join(", ")
        );
        for (text, total) in [
            (qwen, 79_674_391_296),
            (nemotron, 31_577_937_344),
            (kimi, 49_122_675_072),
            (granite.as_str(), 6_939_037_248u64),
        ] {
            let kept: Map<String, Value> = serde_json::from_slice(&finite(text.as_bytes())).unwrap();
            let config =
                Config::read(Path::new("config.json"), kept.clone(), &[]).unwrap_or_else(|e| panic!("{e}"));
            let yaml = config.specification("model", Some(Dtype::BF16)).unwrap().1;
            let spec = config.spec("model", Some(Dtype::BF16)).unwrap_or_else(|e| panic!("{yaml}\n{e}"));
            let kind = config.family.kind;
            let compiled =
                dreamc_compiler::compile(&spec, &dreamc_runtime::train::prepare::forward(1, 1)).unwrap();
            assert_eq!(dreamc_runtime::model::parameters(&compiled), total, "{kind}");
            let back = recognise(&spec, Dtype::BF16, Some(kind), &kept).unwrap();
            assert_eq!(back.family.kind, kind);
            let again = Config::read(Path::new("config.json"), back.json(Dtype::BF16, &kept), &[]).unwrap();
            assert_eq!(again.spec("model", Some(Dtype::BF16)).unwrap().model, spec.model, "{kind}");
        }
    }

    /// A gpt-oss without `rope_scaling` has that of its class, which is that of the published one.
    #[test]
    fn a_scaling_that_is_absent_is_that_of_the_class() {
        let text = r#"{"hidden_size": 64, "intermediate_size": 64, "model_type": "gpt_oss", "num_attention_heads": 4,
            "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4,
            "num_experts_per_tok": 2, "vocab_size": 100, "sliding_window": 16}"#;
        let read = |scaling: Option<Value>| {
            let mut map: Map<String, Value> = serde_json::from_str(text).unwrap();
            map.extend(scaling.map(|scaling| ("rope_scaling".to_string(), scaling)));
            let config = Config::read(Path::new("config.json"), map, &[]).unwrap();
            config.spec("model", Some(Dtype::BF16)).unwrap().model
        };
        let published = json!({"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
            "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": false});
        let model = read(Some(published));
        assert_eq!(read(None), model);
        assert_eq!(read(Some(Value::Null)), model);
    }

    /// `layer_types` of `layers` layers, each `every`th without the window.
    fn types(layers: usize, every: usize) -> String {
        let kind = |i: usize| match i.is_multiple_of(every) {
            true => "\"full_attention\"",
            false => "\"sliding_attention\"",
        };
        (1..=layers).map(kind).collect::<Vec<_>>().join(", ")
    }

    /// Huginn as published, whose norms after loop and coda have one gain.
    #[test]
    fn huginn_has_its_published_size() {
        let text = r#"{"architecture_class_name": "RecurrentGPT", "architectures": ["RavenForCausalLM"],
            "auto_map": {"AutoConfig": "raven_config_minimal.RavenConfig"}, "bias": false, "block_class_name": "SandwichBlock",
            "block_size": 4096, "bos_token_id": 65504, "effective_expected_depth": 132, "eos_token_id": 65505, "head_dim": 96,
            "init_orthogonal": false, "init_strategy": "takase", "init_values": {"embed_scale": 72.6636084983398,
            "embedding": 0.008703882797784892, "out_proj": 0.0005356869554443541, "std": 0.008703882797784892},
            "injection_type": "linear", "intermediate_size": 17920, "mean_backprop_depth": 8, "mean_recurrence": 32,
            "mlp_class_name": "GatedMLP", "model_type": "huginn_raven", "n_embd": 5280, "n_heads": 55, "n_layers": 8,
            "n_layers_in_coda": 2, "n_layers_in_prelude": 2, "n_layers_in_recurrent_block": 4, "nonlin_name": "SiLU",
            "norm_class_name": "RMSNorm_llama", "norm_eps": 1e-06, "num_key_value_heads": 55, "pad_token_id": 65509,
            "padded_vocab_size": 65536, "padding_multiple": 4096, "qk_bias": true, "rope_base": 50000,
            "sampling_scheme": "poisson-lognormal-filling", "state_init": "like-init", "tie_embeddings": true,
            "torch_dtype": "bfloat16", "transformers_version": "4.47.1", "vocab_size": 65536}"#;
        let config =
            Config::read(Path::new("config.json"), serde_json::from_str(text).unwrap(), &[]).unwrap();
        let yaml = config.specification("huginn", Some(Dtype::BF16)).unwrap().1;
        let spec = config.spec("huginn", Some(Dtype::BF16)).unwrap_or_else(|e| panic!("{yaml}\n{e}"));
        let compiled =
            dreamc_compiler::compile(&spec, &dreamc_runtime::train::prepare::forward(1, 1)).unwrap();
        assert_eq!(dreamc_runtime::model::parameters(&compiled), 3_564_976_800);
        // No class takes it back: its stream is wired by the norms of its layers.
        assert!(recognise(&spec, Dtype::BF16, Some("huginn_raven"), &Map::new()).is_err());
    }

    #[test]
    fn the_scale_of_an_embedding_is_rounded_as_its_weights_are() {
        let scale = |hidden, stored| embed_scale(hidden, Some(stored));
        assert_eq!(scale(2304, Dtype::BF16), "sqrt_hidden");
        assert_eq!(scale(3584, Dtype::BF16), 59.75);
        assert_eq!(scale(4608, Dtype::BF16), 68.0);
        assert_eq!(scale(3584, Dtype::F32), "sqrt_hidden");
    }
}

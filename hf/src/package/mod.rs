//! A model of no family, as a package that `transformers` loads with `trust_remote_code`.
//!
//! *In*: weights and their specification. *Out*: a folder with `configuration_dreamc.py` and
//! `modeling_dreamc.py`, which compute what the model computes and have no part that it lacks;
//! `config.json` with its sizes; the weights under their own names; its tokenizer, and a model
//! card. *Promise*: every key of the specification is in the code or the model is refused by the
//! key's name; `tests/hf/packages.py` compares logits and texts with those of dreamc.
//!
//! [`layers`] writes the classes of the model's layers, [`template`] the parts that they are made
//! of (`parts/*.py`), [`card`] the model card. A model with definitions is [`printed`] from the IR.

mod card;
mod layers;
mod printed;
mod template;

use super::HfError;
use super::config::torch;
use super::export::{Exported, Model, ours, pretty, size, write as write_tensors};
use super::fold::Fold;
use super::tensors::Theirs;
use dreamc_data::rng::Philox;
use dreamc_data::sums;
use dreamc_dsl::spec::*;
use dreamc_dsl::{Spec, Spelling};
use dreamc_runtime::checkpoint::folder;
use dreamc_runtime::checkpoint::safetensors::Dtype;
use serde_json::{Map, Value, json};
use std::io::Write;
use std::path::Path;
use template::{Parts, expand};

/// The parts of the code, in order, each with the part of a model that needs it.
const PARTS: [(&str, &str); 29] = [
    ("", include_str!("parts/head.py")),
    ("", include_str!("parts/norm.py")),
    ("matrix", include_str!("parts/matrix.py")),
    ("lora", include_str!("parts/lora.py")),
    ("rope", include_str!("parts/frequencies.py")),
    ("rope", include_str!("parts/rotate.py")),
    ("depth_rope", include_str!("parts/depth_angles.py")),
    ("router", include_str!("parts/router.py")),
    ("depth_left", include_str!("parts/depths.py")),
    ("network", include_str!("parts/activate.py")),
    ("mlp", include_str!("parts/mlp.py")),
    ("always", include_str!("parts/shared.py")),
    ("experts", include_str!("parts/experts.py")),
    ("plain_projection", include_str!("parts/projection.py")),
    ("projection", include_str!("parts/projection_mixture.py")),
    ("latent", include_str!("parts/latent.py")),
    ("attention", include_str!("parts/attention.py")),
    ("sequence", include_str!("parts/sequence.py")),
    ("depth", include_str!("parts/depth.py")),
    ("score", include_str!("parts/score.py")),
    ("norm_only", include_str!("parts/norm_score.py")),
    ("predictor", include_str!("parts/predictor.py")),
    ("skip_network", include_str!("parts/scorer.py")),
    ("skip", include_str!("parts/skip.py")),
    ("stated", include_str!("parts/statement.py")),
    ("loops", include_str!("parts/loop.py")),
    ("lanes", include_str!("parts/lanes.py")),
    ("attend", include_str!("parts/sources.py")),
    ("", include_str!("parts/pass.py")),
];
const MODEL: &str = include_str!("parts/model.py");
const CONFIGURATION: &str = include_str!("parts/configuration.py");

/// The class of every package.
const CLASS: &str = "DreamcForCausalLM";

/// Writes a model as a package, of weights whose embedding is stored in this type.
pub(super) fn write(model: &Model, dtype: Dtype, to: &Path) -> Result<Exported, HfError> {
    let list = ours(model)?;
    let own = model.spec.model.components.values().any(|c| matches!(c.known(), Known::Own));
    let (modeling, configuration, config, notes) = match own {
        true => {
            let note = "its definitions are printed from the specification; the package has no cache, and reads the whole text for every token";
            let config = config(model, dtype, Map::new());
            (printed::modeling(model.spec)?, expand(CONFIGURATION, &Parts::new()), config, vec![note.into()])
        }
        false => {
            let code = Code::new(model.spec, list.iter().any(|(name, _)| name == "norm.weight"))?;
            (code.modeling(), expand(CONFIGURATION, &code.parts), code.config(model, dtype), code.notes)
        }
    };
    let config = pretty(&Value::Object(config))?;
    let parameters: u64 = list
        .iter()
        .filter(|(name, _)| !name.ends_with(".router.bias"))
        .map(|(_, shape)| shape.iter().product::<u64>())
        .sum();
    let entries: Vec<Theirs> = list.into_iter().map(Theirs::ours).collect();
    let size = size(model, &entries, model.dtype)?;
    let texts = model.texts()?;
    let card = card::card(model, parameters, dtype);
    let spec = dreamc_dsl::show(model.spec, Spelling::Yaml);
    let metadata = [("format", "pt"), ("spec", spec.as_str())];
    let mut files: Vec<(&str, sums::Fill)> = vec![
        ("config.json", Box::new(|out: &mut dyn Write| out.write_all(&config))),
        ("configuration_dreamc.py", Box::new(|out: &mut dyn Write| out.write_all(configuration.as_bytes()))),
        ("modeling_dreamc.py", Box::new(|out: &mut dyn Write| out.write_all(modeling.as_bytes()))),
        ("README.md", Box::new(|out: &mut dyn Write| out.write_all(card.as_bytes()))),
        ("spec.yaml", Box::new(|out: &mut dyn Write| out.write_all(spec.as_bytes()))),
        (
            "model.safetensors",
            Box::new(|out: &mut dyn Write| {
                write_tensors((model, &Fold::default()), &entries, model.dtype, &metadata, out)
            }),
        ),
    ];
    for (name, bytes) in &texts {
        files.push((name, Box::new(move |out: &mut dyn Write| out.write_all(bytes))));
    }
    folder::write(to, files)?;
    Ok(Exported { class: CLASS.into(), package: true, tensors: entries.len(), bytes: size, notes })
}

/// The function that draws the numbers that a stream begins with.
fn noise(spec: &Spec) -> String {
    let [first, second] = Philox::new(spec.train.seed, "start").key();
    include_str!("parts/noise.py").replace("@NOISE_KEY@", &format!("{first}, {second}"))
}

/// `config.json`, with the numbers of components.
fn config(model: &Model, dtype: Dtype, components: Map<String, Value>) -> Map<String, Value> {
    let m = &model.spec.model;
    let value = json!({
        "architectures": [CLASS],
        "auto_map": {
            "AutoConfig": "configuration_dreamc.DreamcConfig",
            "AutoModelForCausalLM": "modeling_dreamc.DreamcForCausalLM",
        },
        "model_type": "dreamc",
        "vocab_size": m.vocab,
        "hidden_size": m.hidden,
        "max_position_embeddings": m.context,
        // The head of a tied model reads the embedding itself, so that there is nothing to tie.
        "tie_word_embeddings": false,
        "torch_dtype": torch(dtype),
        "components": components,
    });
    let Value::Object(mut map) = value else { return Map::new() };
    if let Some(tokenizer) = model.tokenizer {
        map.insert("eos_token_id".into(), json!(tokenizer.end()));
        if tokenizer.begins() {
            map.insert("bos_token_id".into(), json!(tokenizer.begin()));
        }
    }
    map
}

/// The code of a model: what it is made of.
struct Code<'a> {
    spec: &'a Spec,
    model: &'a dreamc_dsl::spec::Model,
    parts: Parts,
    layers: layers::Layers,
    /// Count of the one outermost `recur`.
    recur: Option<u64>,
    notes: Vec<String>,
    /// Names of gains that norms share, the last norm's not among them.
    gains: Vec<String>,
}

impl<'a> Code<'a> {
    /// Finds the parts of a model, or a key that is not generated. `normed` where a norm follows
    /// the body.
    fn new(spec: &'a Spec, normed: bool) -> Result<Self, HfError> {
        let model = &spec.model;
        let layers = layers::Layers::new(model)?;
        let mut code =
            Code { spec, model, parts: Parts::new(), layers, recur: None, notes: vec![], gains: vec![] };
        // Every field stands here, so that a new one is generated and never forgotten.
        let dreamc_dsl::spec::Model {
            name: _,
            vocab: _,
            hidden: _,
            context: _,
            tie,
            head_bias,
            embed_scale,
            logit_scale,
            logit_softcap,
            output_scale,
            norm: Norm { eps: _, unit_offset },
            stream,
            adapt,
            components,
            body,
        } = model;
        if adapt.is_some() {
            return Err(HfError::Export(super::MERGE_FIRST.into()));
        }
        code.add("tie", *tie);
        code.add("head_bias", *head_bias);
        code.add("embed_scale", embed_scale.is_some());
        code.add("logit_scale", logit_scale.is_some());
        code.add("logit_softcap", logit_softcap.is_some());
        code.add("output_scale", output_scale.is_some());
        code.add("unit_offset", *unit_offset);
        code.stream(*stream);
        let used = code.layers.components.clone();
        for (_, component) in components.iter().filter(|(name, _)| used.contains(*name)) {
            code.component(component);
        }
        code.add("stated", !code.layers.statements.is_empty());
        for (statement, _) in code.layers.statements.clone() {
            code.statement(&statement);
        }
        for looping in code.layers.loops.clone() {
            code.add("loops", true);
            code.add("passes", looping.has_passes());
            code.add("pass_embed", looping.embed);
            code.add("lora", looping.lora);
            code.add("exit_gate", looping.gate);
            code.add("leaving", looping.leaves);
            let kv_first = looping.keys_of_first();
            code.add("kv_first", kv_first);
            code.add("kv_replaced", looping.kv == PassKeys::Replaced);
            code.add("out", looping.leaves || kv_first || looping.choice.is_some());
            let turns = looping.has_passes() || looping.chooses || looping.leaves || kv_first;
            code.add("turns", turns);
        }
        let skips = code.layers.skips.clone();
        skips.iter().for_each(|skip| code.skip(skip));
        let outer: Vec<u64> = body
            .iter()
            .filter_map(|item| match item {
                Item::Recur { count, .. } => Some(*count),
                Item::Layer(_) | Item::Statement(_) | Item::Repeat { .. } => None,
            })
            .collect();
        if let [count] = outer[..] {
            code.recur = Some(count);
        }
        code.add("recur", code.recur.is_some());
        code.add("final_norm", normed);
        let has = |part| code.parts.contains(part);
        let attention = has("sequence") || has("depth");
        let both = has("sequence") && has("depth");
        let network = has("mlp") || has("experts");
        let matrix =
            network || has("lowrank") || has("shared") || has("predictor") || has("norm_only") || has("gate");
        let statement = has("linear_statement") || has("mix_linear") || has("history");
        let matrix = matrix || statement || has("pass_embed") || has("latent");
        let matrix = matrix || has("skip_network") || has("choice_network") || has("lane_embed");
        let handed = has("value_residual") || has("depth_keys") || has("kv_from");
        let fields = has("depth")
            || has("save")
            || has("norm_of")
            || has("history")
            || has("leaving")
            || has("kv_first")
            || has("lanes")
            || has("nested")
            || handed;
        let rope = has("sequence_rope") || has("depth_rope");
        let math = attention || has("lowrank") || has("llama3") || has("yarn") || has("topk");
        let depth_position = has("depth_rope");
        let plain = attention && !code.layers.all_projected;
        for (part, on) in [
            ("attention", attention),
            ("both", both),
            ("network", network),
            ("matrix", matrix),
            ("fields", fields),
            ("rope", rope),
            ("math", math),
            ("depth_position", depth_position),
            ("plain_projection", plain),
        ] {
            code.add(part, on);
        }
        Ok(code)
    }

    fn add(&mut self, part: &'static str, on: bool) {
        if on {
            self.parts.insert(part);
        }
    }

    fn stream(&mut self, stream: Stream) {
        match stream {
            Stream::Sum => {}
            Stream::Attend { block } => {
                self.add("attend", true);
                self.add("block", block > 1);
            }
            Stream::Lanes { count: _, kind, embed } => {
                self.add("lanes", true);
                self.add("lane_embed", embed);
                match kind {
                    LaneKind::Static => {}
                    LaneKind::Dynamic => self.add("dynamic", true),
                    LaneKind::Mhc => self.add("mhc", true),
                }
            }
        }
        self.add("wired", stream != Stream::Sum);
    }

    fn component(&mut self, component: &Component) {
        match component.known() {
            Known::Attention(a) => {
                let depth = component.kind() == Kind::Depth;
                let [own, turned] = match depth {
                    true => ["depth", "depth_rope"],
                    false => ["sequence", "sequence_rope"],
                };
                self.add(own, true);
                self.add(turned, a.rope.is_some());
                self.attention(a);
            }
            Known::Experts(Experts {
                count: _,
                active: _,
                intermediate: _,
                activation,
                noop,
                shared,
                shared_gate: _,
                biased,
                depth_stream,
                // Packages do not train.
                round: _,
                router,
                pre_norm,
                post_norm,
            }) => {
                self.add("always", *shared > 0);
                self.add("experts", true);
                self.add("noop", *noop > 0);
                self.add("biased", *biased);
                self.leaves(*depth_stream);
                self.norms(*pre_norm, *post_norm);
                self.activation(*activation);
                self.router(router);
            }
            Known::Mlp(Mlp { intermediate: _, activation, biased, depth_stream, pre_norm, post_norm }) => {
                self.add("mlp", true);
                self.add("biased_mlp", *biased);
                self.leaves(*depth_stream);
                self.norms(*pre_norm, *post_norm);
                self.activation(*activation);
            }
            // Refused by `Layers::class`.
            Known::Own => {}
        }
    }

    /// A network that may leave keys in the depth stream.
    fn leaves(&mut self, depth_stream: bool) {
        self.add("network_left", depth_stream);
        self.add("depth_left", depth_stream);
    }

    fn attention(&mut self, a: &Attention) {
        let Attention {
            heads,
            kv_heads,
            head_size: _,
            rope,
            qk_norm,
            window,
            softcap,
            scale: _,
            sink,
            kv_from,
            latent,
            value_residual,
            depth_keys,
            depth_stream,
            gate,
            bias,
            pre_norm,
            post_norm,
            projection,
        } = a;
        self.add("kv_from", kv_from.is_some());
        self.add("value_residual", *value_residual);
        self.add("depth_keys", *depth_keys || depth_stream.is_some());
        self.add("depth_stream", depth_stream.is_some());
        self.add("depth_own", *depth_stream == Some(DepthStream::Own));
        self.add("depth_left", *depth_stream == Some(DepthStream::Own));
        self.add("latent", latent.is_some());
        if let Some(l) = latent {
            self.add("latent_eps", l.eps.is_some());
            self.add("latent_raw", !l.norm);
            self.add("latent_keys", l.keys > 1);
            self.add("latent_pairs", !l.pairs.is_empty());
        }
        self.add("sink", *sink);
        self.add("gate", gate.is_some());
        self.add("bias", bias.is_some_and(|bias| !bias.of_qk()));
        self.add("qk_bias", bias.is_some_and(Bias::of_qk));
        self.add("groups", heads != kv_heads);
        self.add("window", window.is_some());
        self.add("softcap", softcap.is_some());
        self.norms(*pre_norm, *post_norm);
        match qk_norm {
            QkNorm::None => {}
            QkNorm::Rms => self.add("qk_rms", true),
            QkNorm::RmsAll => self.add("qk_all", true),
        }
        self.add("qk_norm", *qk_norm != QkNorm::None);
        self.rope(rope.as_ref());
        if let Some(Projection { count: _, shared, router }) = projection
            && self.layers.projected
        {
            self.add("projection", true);
            self.add("shared", *shared);
            self.router(router);
        }
    }

    fn norms(&mut self, before: bool, behind: bool) {
        self.add("raw", !before);
        self.add("post_norm", behind);
    }

    fn rope(&mut self, rope: Option<&Rope>) {
        let Some(Rope { base: _, half_reversed: _, share, scaling }) = rope else { return };
        self.add("share", *share < 1.0);
        self.add("scaling", scaling.is_some());
        match scaling {
            None => {}
            Some(RopeScaling::Llama3 { .. }) => self.add("llama3", true),
            Some(RopeScaling::Linear { .. }) => self.add("stretched", true),
            Some(RopeScaling::Yarn { .. }) => self.add("yarn", true),
        }
    }

    fn activation(&mut self, activation: Activation) {
        self.add(activation.name(), true);
    }

    fn router(&mut self, router: &Router) {
        let Router {
            form,
            score,
            select: _,
            groups,
            topk_groups,
            normalise,
            scale,
            balance,
            // Losses of training.
            load_balance_loss: _,
            z_loss: _,
        } = router;
        self.add("sqrtsoftplus", *score == Score::Sqrtsoftplus);
        self.add("grouped", groups > topk_groups);
        self.add("router", true);
        match form {
            RouterForm::LowRank { query: _, rope } => {
                self.add("lowrank", true);
                self.add("depth_rope", rope.is_some());
                self.rope(rope.as_ref());
            }
            RouterForm::Linear => self.add("linear", true),
        }
        self.add("normalise", *normalise);
        self.add("router_scale", *scale != 1.0);
        self.add("balanced", balance.is_some());
    }

    fn skip(&mut self, skip: &Skip) {
        let Skip {
            rule,
            input,
            level,
            kv: _,
            merge,
            each_pass,
            gate,
            gate_scale,
            whole,
            capacities,
            nested,
            scorer: Scorer { temperature, network, z_loss: _ },
        } = skip;
        let chosen = rule.chosen();
        self.add("skip_temperature", !chosen && *temperature != 1.0);
        self.add("skip_network", !chosen && network.is_some());
        self.add("choice_temperature", chosen && *temperature != 1.0);
        self.add("choice_network", chosen && network.is_some());
        self.add("pass_router", *each_pass);
        self.add("sigmoid_gate", *gate == SkipGate::Sigmoid);
        self.add("tanh_gate", *gate == SkipGate::Tanh);
        self.add("gate_scale", *gate_scale != 1.0);
        self.add("whole_gate", *whole);
        self.add("pass_shares", !capacities.is_empty());
        self.add("nested", *nested);
        self.add("skip", true);
        self.add("score", !rule.chosen());
        self.add("norm_only", *input == SkipInput::NormOnly);
        self.add("merge", *merge);
        self.add("whole", *level == SkipLevel::Sequence);
        self.add("remember", *merge || !layers::all_keys(skip));
        match layers::rule(rule, layers::least(skip)) {
            "topk" => {
                let note = "its top-k router looks ahead: it scores texts, and nothing writes with it";
                self.notes.push(note.into());
                self.add("topk", true);
            }
            "all" => self.add("all_tokens", true),
            rule => self.add(rule, true),
        }
    }

    fn statement(&mut self, statement: &Statement) {
        match statement {
            Statement::Norm(NormGain::Own) => self.add("norm_statement", true),
            Statement::Norm(NormGain::Plain) => self.add("norm_plain", true),
            Statement::Norm(NormGain::Named(gain)) => {
                self.add("norm_of", true);
                if gain != LAST_GAIN && !self.gains.contains(gain) {
                    self.gains.push(gain.clone());
                }
            }
            Statement::Linear(_) => self.add("linear_statement", true),
            Statement::StartZeros => self.add("start_zeros", true),
            Statement::StartNormal(_) => self.add("noise", true),
            Statement::Save(_) => self.add("save", true),
            Statement::History(_) => self.add("history", true),
            Statement::Mix { name: _, how } => {
                self.add("mix", true);
                self.add(
                    match how {
                        Mixing::Add => "mix_add",
                        Mixing::Linear(_) => "mix_linear",
                        Mixing::Scaled => "mix_scaled",
                        Mixing::Diagonal => "mix_diagonal",
                    },
                    true,
                );
            }
        }
    }

    /// `modeling_dreamc.py`.
    fn modeling(&self) -> String {
        let skipping = match self.parts.contains("skip") {
            true => {
                "Tokens that skip a part are computed and left out: results are those of dreamc, its savings are not."
            }
            false => "It is written to be read; dreamc computes the same faster.",
        };
        let number = |x: f64| format!("{x:?}");
        let scale = match self.model.embed_scale {
            None => String::new(),
            Some(EmbedScale::SqrtHidden) => number((self.model.hidden as f64).sqrt()),
            Some(EmbedScale::Value(x)) => number(x),
        };
        let needed = PARTS.iter().filter(|(part, _)| part.is_empty() || self.parts.contains(part));
        let expanded = needed.map(|(_, text)| expand(text, &self.parts).trim_end().to_string());
        let mut pieces: Vec<String> = expanded.collect();
        if self.parts.contains("noise") {
            pieces.push(noise(self.spec).trim_end().to_string());
        }
        // Layers use the parts before them, and the shared state only by name.
        pieces.extend(self.layers.classes.iter().map(|class| class.trim_end().to_string()));
        pieces.push(expand(MODEL, &self.parts).trim_end().to_string());
        let names = self.layers.names.iter().map(|name| format!("{name:?}")).collect::<Vec<_>>().join(", ");
        let layers: Vec<String> =
            self.layers.made.iter().map(|made| format!("            {made},")).collect();
        let loops: Vec<String> =
            self.layers.loops.iter().map(|looping| format!("            {},", looping.made())).collect();
        let block = match self.model.stream {
            Stream::Attend { block } => block,
            Stream::Sum | Stream::Lanes { .. } => 1,
        };
        let calls = self.layers.statements.iter().map(layers::statement);
        let statements: Vec<String> = calls.map(|call| format!("            {call},")).collect();
        (pieces.join("\n\n\n") + "\n")
            .replace("@TITLE@", &self.model.name)
            .replace("@SKIPPING@", skipping)
            .replace("@EPS@", &number(self.model.norm.eps))
            .replace("@NO_SPLIT@", &format!("[{names}]"))
            .replace("@LAYERS@", &layers.join("\n"))
            .replace("@STATEMENTS@", &statements.join("\n"))
            .replace("@LOOPS@", &loops.join("\n"))
            .replace("@GAINS@", &format!("{:?}", self.gains))
            .replace("@BLOCK@", &block.to_string())
            .replace("@ORDER@", &self.layers.order(self.recur.is_some()))
            .replace("@EMBED_SCALE@", &scale)
            .replace("@LOGIT_SCALE@", &number(self.model.logit_scale.unwrap_or(1.0)))
            .replace("@OUTPUT_SCALE@", &number(self.model.output_scale.unwrap_or(1.0)))
            .replace("@LOGIT_SOFTCAP@", &number(self.model.logit_softcap.unwrap_or(1.0)))
    }

    /// `config.json`.
    fn config(&self, model: &Model, dtype: Dtype) -> Map<String, Value> {
        let m = self.model;
        let used = m.components.iter().filter(|(name, _)| self.layers.components.contains(*name));
        let components: Map<String, Value> =
            used.map(|(name, c)| (name.clone(), component_json(c, m))).collect();
        let mut map = config(model, dtype, components);
        if let Some(recur) = self.recur {
            map.insert("recur".into(), json!(recur));
        }
        if let Stream::Lanes { count, .. } = m.stream {
            map.insert("lanes".into(), json!(count));
        }
        map
    }
}

fn component_json(component: &Component, model: &dreamc_dsl::spec::Model) -> Value {
    let left = || model.depth_reader().map(|a| json!([a.kv_heads, a.head_size]));
    let attention = |a: &Attention| {
        json!({
            "heads": a.heads,
            "kv_heads": a.kv_heads,
            "head_size": a.head_size,
            "rope": a.rope.as_ref().map(rope_json),
            "qk_norm": match a.qk_norm {
                QkNorm::None => "none",
                QkNorm::Rms => "rms",
                QkNorm::RmsAll => "rms_all",
            },
            "window": a.window,
            "softcap": a.softcap,
            "scale": a.scale,
            "pre_norm": a.pre_norm,
            "post_norm": a.post_norm,
            "sink": a.sink,
            "latent": a.latent.as_ref().map(|l| {
                json!({"query": l.query, "kv": l.kv, "turned": l.turned, "value": l.value, "norm": l.norm, "eps": l.eps,
                       "keys": l.keys, "pairs": l.pairs})
            }),
            "kv_from": a.kv_from,
            "value_residual": a.value_residual,
            "depth_keys": a.depth_keys,
            "depth_stream": a.depth_stream.map(|leaves| match leaves {
                DepthStream::Keys => "keys",
                DepthStream::Own => "own",
            }),
            "gate": a.gate.map(|gate| match gate {
                HeadGate::Head => "head",
                HeadGate::Element => "element",
            }),
            "bias": a.bias.map(|bias| match bias {
                Bias::Qk => "qk",
                Bias::Qkv => "qkv",
                Bias::Out => "out",
                Bias::All => "all",
            }),
            "projection": a.projection.as_ref().map(|p| {
                json!({"count": p.count, "shared": p.shared, "router": router_json(&p.router)})
            }),
        })
    };
    match component.known() {
        Known::Attention(a) => attention(a),
        Known::Experts(e) => json!({
            "count": e.count,
            "active": e.active,
            "intermediate": e.intermediate,
            "activation": e.activation.name(),
            "gated": e.activation.gated(),
            "noop": e.noop,
            "shared": e.shared,
            "shared_gate": e.shared_gate,
            "biased": e.biased,
            "depth_stream": e.depth_stream.then(left).flatten(),
            "pre_norm": e.pre_norm,
            "post_norm": e.post_norm,
            "router": router_json(&e.router),
        }),
        Known::Mlp(m) => json!({
            "intermediate": m.intermediate,
            "activation": m.activation.name(),
            "gated": m.activation.gated(),
            "biased": m.biased,
            "depth_stream": m.depth_stream.then(left).flatten(),
            "pre_norm": m.pre_norm,
            "post_norm": m.post_norm,
        }),
        Known::Own => Value::Null,
    }
}

fn rope_json(rope: &Rope) -> Value {
    let scaling = rope.scaling.map(|s| match s {
        RopeScaling::Llama3 { factor, low, high, original_context } => {
            json!({"type": "llama3", "factor": factor, "low": low, "high": high, "original_context": original_context,
                   "attention": 1.0})
        }
        RopeScaling::Linear { factor } => json!({"type": "linear", "factor": factor, "attention": 1.0}),
        RopeScaling::Yarn { factor, fast, slow, original_context, attention, truncate } => {
            json!({"type": "yarn", "factor": factor, "fast": fast, "slow": slow, "original_context": original_context,
                   "attention": attention, "truncate": truncate})
        }
    });
    json!({"base": rope.base, "half_reversed": rope.half_reversed, "share": rope.share, "scaling": scaling})
}

fn router_json(router: &Router) -> Value {
    let (query, rope) = match &router.form {
        RouterForm::LowRank { query, rope } => (*query, rope.as_ref()),
        RouterForm::Linear => (0, None),
    };
    json!({
        "query": query,
        "rope": rope.map(rope_json),
        "score": match router.score {
            Score::Sigmoid => "sigmoid",
            Score::Softmax => "softmax",
            Score::Sqrtsoftplus => "sqrtsoftplus",
        },
        "select": match router.select {
            Select::Logit => "logit",
            Select::Score => "score",
        },
        "normalise": router.normalise,
        "groups": router.groups,
        "topk_groups": router.topk_groups,
        "scale": router.scale,
        "balanced": router.balance.is_some(),
    })
}

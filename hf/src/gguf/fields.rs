//! The metadata of a model's sizes, both ways: between the keys of a GGUF file and a `config.json`.
//!
//! *Promise*: what llama.cpp computes with the keys is what the specification computes, or the
//! model is refused with the setting and what would be right.

use super::family::{EMBEDDING, FAMILIES, FREQUENCIES, Family, HEAD};
use super::file::Gguf;
use super::value::{Value, code};
use crate::config::Config;
use crate::family::{self as theirs, Kind, Rotation, Slot, Windows};
use dreamc_dsl::spec::RopeScaling;
use serde_json::{Map, Value as Json, json};
use std::f64::consts::TAU;

type Result<T> = std::result::Result<T, String>;

/// Where a quantity stands, after the architecture's name.
const KEYS: [(Slot, &str); 13] = [
    (Slot::Hidden, "embedding_length"),
    (Slot::Context, "context_length"),
    (Slot::Layers, "block_count"),
    (Slot::Heads, "attention.head_count"),
    (Slot::KvHeads, "attention.head_count_kv"),
    (Slot::HeadSize, "attention.key_length"),
    (Slot::Intermediate, "feed_forward_length"),
    (Slot::Eps, "attention.layer_norm_rms_epsilon"),
    (Slot::Experts, "expert_count"),
    (Slot::Active, "expert_used_count"),
    (Slot::ExpertIntermediate, "expert_feed_forward_length"),
    (Slot::Shared, "expert_shared_feed_forward_length"),
    (Slot::LogitSoftcap, "final_logit_softcapping"),
];
const SOFTCAP: &str = "attn_logit_softcapping";
const WINDOW: &str = "attention.sliding_window";
const BASE: &str = "rope.freq_base";
const LOCAL_BASE: &str = "rope.freq_base_swa";
/// The scaling of Llama 3 as numbers: four of them, and a file of another program has none.
const LLAMA3: &str = "dreamc.rope_scaling";

/// Beta of YaRN where pairs turn fast, and slow: no key says others.
const YARN: (f64, f64) = (32.0, 1.0);

/// The content of a model's file apart from its tensors.
pub struct Fields {
    /// Keys and values.
    pub values: Vec<(String, Value)>,
    /// Divisors of frequencies.
    pub frequencies: Option<Vec<f32>>,
    /// Notes for the user.
    pub notes: Vec<String>,
}

/// The metadata of a model.
pub fn write(family: &Family, config: &Config, name: &str) -> Result<Fields> {
    let mut notes = vec![];
    refuse(family, config, &mut notes)?;
    let arch = family.name;
    let key = |key: &str| format!("{arch}.{key}");
    let mut values = vec![
        ("general.architecture".to_string(), Value::Text(arch.into())),
        ("general.name".into(), Value::Text(name.into())),
        (key("vocab_size"), Value::whole(config.whole(Slot::Vocab))),
    ];
    for (slot, named) in KEYS {
        let Some(x) = config.real(slot) else { continue };
        let value = match slot.kind() {
            Kind::Whole | Kind::Count => Value::whole(x as u64),
            Kind::Real | Kind::Cap | Kind::Either | Kind::Flag => Value::F32(x as f32),
        };
        values.push((key(named), value));
    }
    let size = config.whole(Slot::HeadSize);
    values.push((key("attention.value_length"), Value::whole(size)));
    values.push((key("rope.dimension_count"), Value::whole(size)));
    if let Some(cap) = config.real(Slot::Softcap) {
        values.push((key(SOFTCAP), Value::F32(cap as f32)));
    }
    if family.kind == "gpt_oss" {
        values.push((key("expert_feed_forward_length"), Value::whole(config.whole(Slot::Intermediate))));
    }
    if let Some(window) = config.window().filter(|_| family.windows.is_some()) {
        values.push((key(WINDOW), Value::whole(window)));
    }
    let [(base, scaling), (local, _)] = [false, true].map(|windowed| config.rotation(windowed));
    values.push((key(BASE), Value::F32(base as f32)));
    if family.kind == "gemma3_text" {
        values.push((key(LOCAL_BASE), Value::F32(local as f32)));
    }
    let mut frequencies = None;
    let scaled = |of: &str, factor: f64| {
        [
            (key("rope.scaling.type"), Value::Text(of.into())),
            (key("rope.scaling.factor"), Value::F32(factor as f32)),
        ]
    };
    match scaling {
        None => {}
        Some(RopeScaling::Linear { factor }) => values.extend(scaled("linear", factor)),
        Some(RopeScaling::Yarn { factor, fast, slow, original_context, attention, truncate }) => {
            values.extend(scaled("yarn", factor));
            values.push((key("rope.scaling.original_context_length"), Value::whole(original_context as u64)));
            if (fast, slow) != YARN {
                return Err(format!(
                    "`rope` has YaRN with fast {fast} and slow {slow}; llama.cpp has {YARN:?}"
                ));
            }
            let usual = 0.1 * factor.ln() + 1.0;
            if (attention / usual - 1.0).abs() > 1e-9 {
                values.push((key("rope.scaling.attn_factor"), Value::F32((attention / usual) as f32)));
            }
            if !truncate {
                notes.push(
                    "llama.cpp rounds the bounds of YaRN to whole pairs, which the model does not".into(),
                );
            }
        }
        Some(RopeScaling::Llama3 { factor, low, high, original_context }) => {
            let all = [factor, low, high, original_context];
            frequencies = Some(divisors(base, size, all));
            let all = all.map(Value::F64).into();
            values.push((LLAMA3.into(), Value::Array(code::F64, all)));
        }
    }
    Ok(Fields { values, frequencies, notes })
}

/// Says why llama.cpp would compute something else.
fn refuse(family: &Family, config: &Config, notes: &mut Vec<String>) -> Result<()> {
    let differs = |what: &str, right: &str| Err(format!("{what}; llama.cpp's `{}` {right}", family.name));
    if let Some(right) = family.normalise
        && config.flag(Slot::Normalise) != right
    {
        let right = if right { "divides gates by their sum" } else { "divides no gates by their sum" };
        return differs("the router's `normalise` is another", right);
    }
    if config.biased() && !family.biases || config.flag(Slot::MlpBias) && family.kind != "llama" {
        return differs("projections have biases", "has none");
    }
    if family.kind == "olmoe" && config.whole(Slot::KvHeads) != config.whole(Slot::Heads) {
        return differs("heads of keys are fewer than those of queries", "has as many");
    }
    if config.mixed() {
        return differs("some layers have experts and some have none", "has experts in all of them");
    }
    let (name, _) = config.activation();
    let right = match family.kind {
        "gemma2" | "gemma3_text" => "gelu_pytorch_tanh",
        _ => "silu",
    };
    if name != right {
        return differs(&format!("the activation is {name}"), &format!("has {right}"));
    }
    let layers = config.whole(Slot::Layers);
    if let Some(window) = config.window() {
        let right = |i: usize| family.windows.is_some_and(|n| i % n < n - 1);
        let all = (0..layers as usize).map(|i| config.windowed(i));
        match family.windows {
            Some(n) => {
                if all.enumerate().any(|(i, found)| found != right(i)) {
                    return differs("windows are of other layers", &format!("has none in every {n}th layer"));
                }
            }
            None if window >= config.whole(Slot::Context) => {}
            None => {
                let text = format!("attention has a window of {window}");
                return differs(
                    &text,
                    "has none: a text may be so long and no longer, which `context` would say",
                );
            }
        }
    } else if family.windows.is_some_and(|n| layers as usize >= 1 && n > 1) {
        return differs("no layer has a window", "has them");
    }
    if let Some(scalar) = config.real(Slot::Scalar) {
        let right = scalar_of(family, layers, |slot| config.whole(slot));
        if scalar != right as f64 {
            let text = format!("scores are divided by the root of {scalar}");
            return differs(&text, &format!("divides by that of {right}"));
        }
    }
    if config.family.gemma && config.real(Slot::Hidden).is_some_and(|hidden| hidden.sqrt().fract() != 0.0) {
        notes.push("the embedding's scale is the root of the hidden size in f32, as llama.cpp has it".into());
    }
    Ok(())
}

/// The number whose root divides scores in Gemma.
fn scalar_of(family: &Family, layers: u64, of: impl Fn(Slot) -> u64) -> u64 {
    if family.odd_scale == Some(layers) {
        return of(Slot::Hidden) / of(Slot::Heads).max(1);
    }
    of(Slot::HeadSize)
}

/// The divisors of the frequencies of the pairs of a head, in the scaling of Llama 3.
fn divisors(base: f64, size: u64, [factor, low, high, original]: [f64; 4]) -> Vec<f32> {
    let pair = |i: u64| {
        let length = TAU * base.powf(2.0 * i as f64 / size as f64);
        if length < original / high {
            1.0
        } else if length > original / low {
            factor as f32
        } else {
            let smooth = (original / length - low) / (high - low);
            (1.0 / ((1.0 - smooth) / factor + smooth)) as f32
        }
    };
    (0..size / 2).map(pair).collect()
}

/// The family and the `config.json` of a file.
pub fn read(file: &Gguf) -> Result<(&'static Family, Map<String, Json>)> {
    let Some(arch) = file.get("general.architecture").and_then(Value::as_text) else {
        return Err("has no `general.architecture`: it is no model".into());
    };
    let get = |key: &str| file.get(&format!("{arch}.{key}"));
    let experts = get("expert_count").and_then(Value::as_whole).is_some_and(|n| n > 0);
    let kind = if arch == "llama" && experts { "mixtral" } else { "" };
    let family = FAMILIES.iter().find(|f| f.name == arch && (kind.is_empty() || f.kind == kind));
    let Some(family) = family else {
        let mut known: Vec<&str> = FAMILIES.iter().map(|f| f.name).collect();
        known.dedup();
        return Err(format!("`general.architecture` is `{arch}`; {} are read", known.join(", ")));
    };
    let Some(own) = theirs::FAMILIES.iter().find(|own| own.kind == family.kind) else {
        return Err(format!("`{arch}` is of no family that is known"));
    };
    for unread in
        ["attention.clamp_kqv", "logit_scale", "residual_scale", "embedding_scale", "attention.scale"]
    {
        if get(unread).is_some() {
            return Err(format!("has the key `{arch}.{unread}`, which is not read for `{arch}`"));
        }
    }
    let mut map = Map::new();
    map.insert("model_type".into(), json!(family.kind));
    map.insert("architectures".into(), json!([own.class]));
    for &(name, slot, absent) in own.fields() {
        let found = match quantity(file, family, slot, &get)? {
            Some(x) => x,
            None if matches!(absent, theirs::Absent::Required) => {
                let key = KEYS.iter().find(|(of, _)| *of == slot).map_or(name, |(_, key)| key);
                return Err(format!("lacks the key `{arch}.{key}`"));
            }
            None if slot.kind() == Kind::Cap => Json::Null,
            None => continue,
        };
        map.insert(name.into(), found);
    }
    for &(name, value) in own.fixed {
        map.insert(name.into(), json!(value));
    }
    if own.router.1 > 0.0 {
        map.insert("output_router_logits".into(), json!(false));
    }
    rotations(file, family, own, &get, &mut map)?;
    windows(family, own, &get, &mut map)?;
    Ok((family, map))
}

/// The value of a field.
fn quantity<'a>(
    file: &'a Gguf,
    family: &Family,
    slot: Slot,
    get: &impl Fn(&str) -> Option<&'a Value>,
) -> Result<Option<Json>> {
    let shape = |name: &str| file.kinds.get(name).map(|(_, shape)| shape.clone());
    let has = |name: &str| file.kinds.contains_key(name);
    let whole = |slot: Slot| {
        let key = KEYS.iter().find(|(of, _)| *of == slot).map(|(_, key)| *key);
        key.and_then(get).and_then(Value::as_whole)
    };
    let size = || whole(Slot::HeadSize).or_else(|| Some(whole(Slot::Hidden)? / whole(Slot::Heads)?.max(1)));
    let value = match slot {
        Slot::Vocab => {
            let rows = shape(EMBEDDING).and_then(|shape| shape.first().copied());
            let Some(rows) = rows else { return Err(format!("lacks the tensor {EMBEDDING}")) };
            json!(rows)
        }
        Slot::Tie => json!(!has(HEAD)),
        Slot::Bias => json!(has("blk.0.attn_q.bias")),
        Slot::MlpBias => json!(has("blk.0.ffn_gate.bias")),
        Slot::Normalise => json!(family.normalise.unwrap_or(true)),
        Slot::HeadSize => return Ok(size().map(|n| json!(n))),
        Slot::KvHeads => return Ok(whole(slot).or_else(|| whole(Slot::Heads)).map(|n| json!(n))),
        Slot::Scalar => {
            let of = |slot| if slot == Slot::HeadSize { size() } else { whole(slot) }.unwrap_or(0);
            json!(scalar_of(family, of(Slot::Layers), of) as f64)
        }
        Slot::Softcap => json!(get(SOFTCAP).and_then(Value::as_real).unwrap_or(50.0)),
        Slot::LogitSoftcap => {
            let usual = (family.kind == "gemma2").then_some(30.0);
            match get("final_logit_softcapping").and_then(Value::as_real).filter(|x| *x > 0.0).or(usual) {
                Some(cap) => json!(cap),
                None => return Ok(None),
            }
        }
        // An expert's size is that of its file, where the key is not there.
        Slot::Shared | Slot::ExpertIntermediate => {
            let name = if slot == Slot::Shared {
                "blk.0.ffn_gate_shexp.weight"
            } else {
                "blk.0.ffn_gate_exps.weight"
            };
            let rows = shape(name).and_then(|shape| shape.iter().rev().nth(1).copied());
            return Ok(whole(slot).filter(|n| *n > 0).or(rows).map(|n| json!(n)));
        }
        Slot::Intermediate if family.kind == "gpt_oss" => {
            return Ok(whole(Slot::ExpertIntermediate).or_else(|| whole(slot)).map(|n| json!(n)));
        }
        // Models of experts alone have no size of a dense network.
        Slot::Intermediate => return Ok(whole(slot).filter(|n| *n > 0).map(|n| json!(n))),
        _ => {
            let Some((_, key)) = KEYS.iter().find(|(of, _)| *of == slot) else { return Ok(None) };
            let Some(value) = get(key) else { return Ok(None) };
            let found = match slot.kind() {
                Kind::Whole | Kind::Count => value.as_whole().map(|n| json!(n)),
                Kind::Real | Kind::Cap | Kind::Either | Kind::Flag => value.as_real().map(|x| json!(x)),
            };
            let wrong = || format!("the key `{}.{key}` is {value:?}, no number of its kind", family.name);
            return found.ok_or_else(wrong).map(Some);
        }
    };
    Ok(Some(value))
}

/// The rotation.
fn rotations<'a>(
    file: &'a Gguf,
    family: &Family,
    own: &theirs::Family,
    get: &impl Fn(&str) -> Option<&'a Value>,
    map: &mut Map<String, Json>,
) -> Result<()> {
    let real = |key: &str| get(key).and_then(Value::as_real);
    let base = real(BASE).unwrap_or(10_000.0);
    let size = map.get("head_dim").and_then(Json::as_u64).unwrap_or(0);
    if let Some(turned) = get("rope.dimension_count").and_then(Value::as_whole).filter(|n| *n != size) {
        return Err(format!(
            "`rope.dimension_count` is {turned}, and heads have {size} elements; all of them turn"
        ));
    }
    map.insert("rope_theta".into(), json!(base));
    if let Rotation::Two(..) = own.rotation {
        map.insert("rope_local_base_freq".into(), json!(real(LOCAL_BASE).unwrap_or(10_000.0)));
    }
    let factor = real("rope.scaling.factor").unwrap_or(1.0);
    let scaling = match get("rope.scaling.type").and_then(Value::as_text) {
        None | Some("none") => Json::Null,
        Some("linear") => json!({"rope_type": "linear", "factor": factor}),
        Some("yarn") => {
            let original = get("rope.scaling.original_context_length").and_then(Value::as_whole);
            let Some(original) = original else {
                return Err("lacks the key `rope.scaling.original_context_length` of YaRN".into());
            };
            let more = real("rope.scaling.attn_factor").unwrap_or(1.0);
            json!({"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original,
                   "attention_factor": more * (0.1 * factor.ln() + 1.0), "beta_fast": YARN.0, "beta_slow": YARN.1,
                   "truncate": true})
        }
        Some(other) => return Err(format!("`rope.scaling.type` is `{other}`; linear and yarn are read")),
    };
    let scaling = match frequencies(file)? {
        None => scaling,
        Some(found) => llama3(file, base, size, &found)?,
    };
    if !scaling.is_null() || family.kind == "gpt_oss" {
        let plain = json!({"rope_type": "default"});
        map.insert("rope_scaling".into(), if scaling.is_null() { plain } else { scaling });
    }
    Ok(())
}

/// The divisors of frequencies of a file.
fn frequencies(file: &Gguf) -> Result<Option<Vec<f32>>> {
    match file.tensors.get(FREQUENCIES) {
        Ok(found) => Ok(found.map(|(_, values)| values)),
        Err(error) => Err(format!("tensor {FREQUENCIES}: {error}")),
    }
}

/// The scaling of Llama 3 whose divisors these are.
fn llama3(file: &Gguf, base: f64, size: u64, found: &[f32]) -> Result<Json> {
    let said = file
        .get(LLAMA3)
        .and_then(Value::as_array)
        .map(|all| all.iter().filter_map(Value::as_real).collect::<Vec<f64>>());
    let largest = found.iter().fold(1f32, |most, x| most.max(*x));
    // Those of the models that are published.
    let mut tries = vec![[f64::from(largest), 1.0, 4.0, 8192.0]];
    tries.extend(said.and_then(|all| <[f64; 4]>::try_from(all).ok()));
    let same = |all: &[f64; 4]| {
        let right = divisors(base, size, *all);
        right.len() == found.len() && right.iter().zip(found).all(|(a, b)| (a - b).abs() <= 1e-5 * a.abs())
    };
    let Some([factor, low, high, original]) = tries.into_iter().rev().find(same) else {
        return Err(format!(
            "tensor {FREQUENCIES} has divisors that are no scaling of Llama 3 with a context of 8192"
        ));
    };
    let original = if original.fract() == 0.0 { json!(original as u64) } else { json!(original) };
    Ok(json!({"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
              "original_max_position_embeddings": original}))
}

/// Windows, as the family's configuration says them.
fn windows<'a>(
    family: &Family,
    own: &theirs::Family,
    get: &impl Fn(&str) -> Option<&'a Value>,
    map: &mut Map<String, Json>,
) -> Result<()> {
    let window = get(WINDOW).and_then(Value::as_whole).filter(|n| *n > 0);
    let layers = map.get("num_hidden_layers").and_then(Json::as_u64).unwrap_or(0);
    match own.windows {
        Windows::Never => {}
        Windows::Unused | Windows::AllUsed(_) | Windows::From(_) => {
            map.insert("use_sliding_window".into(), json!(false));
        }
        Windows::All(_) => {
            map.insert("sliding_window".into(), Json::Null);
        }
        Windows::But(..) => {
            let n = family.windows.unwrap_or(1) as u64;
            let kind = |i: u64| if i % n < n - 1 { "sliding_attention" } else { "full_attention" };
            let Some(window) = window.or((family.kind == "gemma2").then_some(4096)) else {
                return Err(format!("lacks the key `{}.{WINDOW}`", family.name));
            };
            map.insert("sliding_window".into(), json!(window));
            map.insert("layer_types".into(), (0..layers.min(1 << 16)).map(kind).collect());
        }
    }
    if window.is_some() && family.windows.is_none() {
        return Err(format!(
            "has the key `{}.{WINDOW}`, and no layer of such a model has a window",
            family.name
        ));
    }
    Ok(())
}

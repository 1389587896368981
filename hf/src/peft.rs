//! Adapters of `peft`, both ways.
//!
//! *In*: `adapter_config.json` and `adapter_model.safetensors` of a LoRA, with the base that it was
//! trained on; or a model of dreamc with `adapt`. *Out*: the other. *Promise*: what comes out
//! computes what went in, or nothing comes out: a setting that is not known, a module that has no
//! place and a matrix without its factors are refused by name.

use super::config::{self, Config, Named};
use super::export::{Model, pretty};
use super::tensors::{Part, parts};
use super::{HfError, json};
use dreamc_data::sums;
use dreamc_dsl::spec::{self, Adapt};
use dreamc_dsl::{Spec, Spelling};
use dreamc_runtime::adapt::{Adapter, adapters, tensors};
use dreamc_runtime::checkpoint::safetensors::{Dtype, Tensors, write_stored};
use dreamc_runtime::checkpoint::{CheckpointError, Weights, folder};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::path::Path;

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
const PREFIX: &str = "base_model.model.";

/// The module of `transformers` that an adapter adds to: the name of its weight without `.weight`.
fn module(config: &Config, layers: &[Named], adapter: &Adapter) -> Result<String, HfError> {
    let (name, shape) = (&adapter.tensor, &adapter.shape);
    let fused = |why: &str| {
        HfError::Export(format!("{name}: {why}, so that `peft` has no adapter of these rows alone"))
    };
    let [_, wide] = shape[..] else {
        return Err(fused("experts have adapters of their own, which are parameters and no modules there"));
    };
    let parts = parts(config, layers, name, shape);
    let parts =
        parts.ok_or_else(|| HfError::Export(format!("a {} has no place for {name}", config.family.title)))?;
    let mut first = 0;
    for part in parts {
        let rows = part.ours() / wide.max(1);
        if (first, rows) == (adapter.first, adapter.rows) {
            let Part { name: theirs, shape, range, order } = part;
            let whole = range == (0, shape.iter().product()) && order.is_none();
            let module = theirs.strip_suffix(".weight").filter(|_| whole);
            return module
                .map(String::from)
                .ok_or_else(|| fused(&format!("it is a part of {theirs}, or in another order there")));
        }
        first += rows;
    }
    Err(fused("its rows are parts of several modules"))
}

/// The configuration of a family whose models this one is, without its adapters.
fn family(spec: &Spec, kept: &Map<String, Value>) -> Result<(Config, Vec<Named>), HfError> {
    let model = spec::Model { adapt: None, ..spec.model.clone() };
    let plain = Spec { model, ..spec.clone() };
    let likely = kept.get("model_type").and_then(Value::as_str);
    let dtype = super::export::typed(kept).unwrap_or(Dtype::F32);
    let config = config::recognise(&plain, dtype, likely, kept).map_err(|why| {
        HfError::Export(format!("`peft` adapts classes of transformers, and none computes the model: {why}"))
    })?;
    let layers = config::layers(&plain.model).map_err(HfError::Export)?;
    Ok((config, layers))
}

/// An adapter that was exported or imported.
#[derive(Clone, Debug, PartialEq)]
pub struct Moved {
    /// Modules that it adapts.
    pub modules: usize,
    /// Its numbers.
    pub numbers: u64,
}

/// The tensors of an adapter as `peft` names them after their module, with our names and shapes.
fn tensors_of(adapter: &Adapter, rank: u64) -> Vec<(&'static str, &String, Vec<u64>)> {
    let (wide, rows) = (adapter.shape.last().copied().unwrap_or(0), adapter.rows);
    let factors =
        [("lora_A.weight", &adapter.a, vec![rank, wide]), ("lora_B.weight", &adapter.b, vec![rows, rank])];
    let magnitude = adapter.dora.iter().map(|[m, _]| ("lora_magnitude_vector", m, vec![rows]));
    factors.into_iter().chain(magnitude).collect()
}

/// Writes the adapters of a model as the folder `to`, which `peft` loads on the model's base.
pub fn export(model: &Model, base: &str, to: &Path) -> Result<Moved, HfError> {
    let Some(adapt) = &model.spec.model.adapt else {
        return Err(HfError::Export("the model has no adapters: its specification has no `adapt`".into()));
    };
    folder::free(to, false).map_err(|error| match error {
        CheckpointError::Io { .. } => error.into(),
        _ => HfError::Exists { path: to.to_path_buf() },
    })?;
    let kept = model.kept("config.json").map(|path| json(&path)).transpose()?.unwrap_or_default();
    let (config, layers) = family(model.spec, &kept)?;
    let all = tensors(model.spec)?;
    let mut found: BTreeMap<String, Adapter> = BTreeMap::new();
    for adapter in adapters(&all)? {
        found.insert(module(&config, &layers, &adapter)?, adapter);
    }
    let names: BTreeSet<String> = all
        .iter()
        .filter(|t| t.shape.len() == 2)
        .flat_map(|t| parts(&config, &layers, &t.name, &t.shape).unwrap_or_default())
        .filter_map(|part| part.name.strip_suffix(".weight").map(String::from))
        .collect();
    let said = json!({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": adapt.rank,
        "lora_alpha": number(adapt.alpha), "target_modules": targets(&found, &names), "lora_dropout": 0.0, "bias": "none",
        "fan_in_fan_out": false, "use_rslora": false, "use_dora": adapt.dora, "init_lora_weights": true, "inference_mode": true,
    });
    let said = pretty(&said)?;
    let mut entries = vec![];
    for (module, adapter) in &found {
        for (factor, ours, _) in tensors_of(adapter, adapt.rank) {
            let stored = model.weights.stored(ours);
            let Some(stored) = stored else {
                let problem = format!("lacks the tensor {ours}");
                return Err(
                    CheckpointError::Corrupt { path: model.weights.path().to_path_buf(), problem }.into()
                );
            };
            let dtype = model.dtype.unwrap_or(stored.dtype);
            entries
                .push(((format!("{PREFIX}{module}.{factor}"), stored.shape.to_vec(), dtype), ours.clone()));
        }
    }
    let numbers = entries.iter().map(|((_, shape, _), _)| shape.iter().product::<u64>()).sum();
    let list: Vec<_> = entries.iter().map(|(entry, _)| entry.clone()).collect();
    let fill = |i: usize, out: &mut dyn Write| {
        let ((_, shape, dtype), ours) = &entries[i];
        let stored = model.weights.stored(ours).ok_or_else(|| io::Error::other("no such tensor"))?;
        stored.convert(0, shape.iter().product(), *dtype, out)
    };
    let files: Vec<(&str, sums::Fill)> = vec![
        (CONFIG, Box::new(|out: &mut dyn Write| out.write_all(&said))),
        (WEIGHTS, Box::new(|out: &mut dyn Write| write_stored(out, &[("format", "pt")], &list, fill))),
    ];
    folder::write(to, files)?;
    Ok(Moved { modules: found.len(), numbers })
}

/// A whole number where it is one, as `peft` writes it.
fn number(x: f64) -> Value {
    if x.fract() == 0.0 && x.abs() < 1e15 { json!(x as i64) } else { json!(x) }
}

/// The last words of the modules' names where they name these modules alone, else all their names.
fn targets(found: &BTreeMap<String, Adapter>, all: &BTreeSet<String>) -> Vec<String> {
    let last = |name: &String| name.rsplit('.').next().unwrap_or(name).to_string();
    let words: BTreeSet<String> = found.keys().map(last).collect();
    let others = all.iter().any(|name| !found.contains_key(name) && words.contains(&last(name)));
    if others { found.keys().cloned().collect() } else { words.into_iter().collect() }
}

/// Settings of `peft` that change nothing of what an adapter computes.
const IDLE: [&str; 23] = [
    "peft_type",
    "task_type",
    "base_model_name_or_path",
    "revision",
    "r",
    "lora_alpha",
    "target_modules",
    "lora_dropout",
    "inference_mode",
    "auto_mapping",
    "peft_version",
    "init_lora_weights",
    "fan_in_fan_out",
    "use_rslora",
    "use_dora",
    "bias",
    "layers_to_transform",
    "layers_pattern",
    "exclude_modules",
    "loftq_config",
    "eva_config",
    "runtime_config",
    "ensure_weight_tying",
];

/// The rank and `alpha` of a configuration that is plain LoRA, and whether it is DoRA.
fn plain(path: &Path, said: &Map<String, Value>) -> Result<(u64, f64, bool), HfError> {
    let refuse = |problem: String| Err(HfError::refused(path, problem));
    if said.get("peft_type").and_then(Value::as_str) != Some("LORA") {
        return refuse("`peft_type` is not LORA, the one adapter that is read".into());
    }
    let off = |value: &Value| match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(all) => all.is_empty(),
        Value::Object(all) => all.is_empty(),
        Value::String(text) => text.is_empty(),
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::Bool(true) => false,
    };
    for (field, value) in said.iter().filter(|(field, _)| !IDLE.contains(&field.as_str())) {
        // Megatron's own module is named whether it is used or not.
        if !off(value) && field != "megatron_core" && field != "qalora_group_size" {
            return refuse(format!("`{field}: {value}` is not read: adapters of dreamc have no such part"));
        }
    }
    if said.get("fan_in_fan_out").is_some_and(|value| !off(value)) {
        return refuse("`fan_in_fan_out: true`: matrices of transposed modules are not read".into());
    }
    if said.get("bias").is_some_and(|value| value != "none" && !off(value)) {
        return refuse(
            "`bias` is trained, too, and adapters of dreamc have none; only `none` is read".into(),
        );
    }
    let rank = said.get("r").and_then(Value::as_u64).filter(|rank| *rank > 0);
    let alpha = said.get("lora_alpha").and_then(Value::as_f64);
    let (Some(rank), Some(alpha)) = (rank, alpha) else {
        return refuse("lacks `r` or `lora_alpha`, numbers above 0".into());
    };
    // Of such a one the factor is alpha / √r.
    let stable = said.get("use_rslora").is_some_and(|value| !off(value));
    let dora = said.get("use_dora").is_some_and(|value| !off(value));
    Ok((rank, if stable { alpha * (rank as f64).sqrt() } else { alpha }, dora))
}

/// Where a tensor of an imported adapter comes from.
enum From<'a> {
    /// A tensor of `peft`.
    Theirs(String),
    /// The norms of the base's rows.
    Base(&'a Adapter),
}

/// Imports the `peft` folder `from`, trained on the model `base`, as the folder `to`: adapters
/// alone, bound to the base's file.
pub fn import(
    from: &Path,
    (spec, base): (&Spec, &Weights),
    to: &Path,
    (beside, force): (&[(&'static str, Vec<u8>)], bool),
) -> Result<Moved, HfError> {
    folder::free(to, force)?;
    let path = from.join(CONFIG);
    if !path.is_file() {
        return Err(HfError::refused(
            from,
            format!("has no {CONFIG}; is this the folder of an adapter of `peft`?"),
        ));
    }
    if spec.model.adapt.is_some() {
        return Err(HfError::Export("the base has adapters already: `dreamc merge` it first".into()));
    }
    let (rank, alpha, dora) = plain(&path, &json(&path)?)?;
    let theirs = Tensors::open(&from.join(WEIGHTS))?;
    let refuse = |problem: String| Err(HfError::refused(theirs.path(), problem));
    let kept = base.path().parent().map(|folder| folder.join("config.json")).filter(|path| path.is_file());
    let kept = kept.map(|path| json(&path)).transpose()?.unwrap_or_default();
    let (config, layers) = family(spec, &kept)?;
    // Every matrix that could be adapted, to learn which are.
    let with = |components: Vec<String>, matrices: Vec<String>| {
        let adapt = Some(Adapt { components, matrices, rank, alpha, dora });
        Spec { model: spec::Model { adapt, ..spec.model.clone() }, weights: None, ..spec.clone() }
    };
    let every = with(spec.model.names().map(String::from).collect(), vec![]);
    let places = adapters(&tensors(&every)?)?;
    let mut known: BTreeMap<String, Adapter> = BTreeMap::new();
    for place in places {
        if let Ok(module) = module(&config, &layers, &place) {
            known.insert(module, place);
        }
    }
    let name = |module: &str, factor: &str| format!("{PREFIX}{module}.{factor}");
    let mut chosen = BTreeSet::new();
    for (tensor, shape) in theirs.entries() {
        let found = known.iter().find(|(module, place)| {
            tensors_of(place, rank).iter().any(|(factor, ..)| name(module, factor) == tensor)
        });
        let Some((module, place)) = found else {
            return refuse(format!(
                "tensor {tensor} {shape:?} adapts nothing that dreamc adapts of a {}",
                config.family.title
            ));
        };
        for (factor, _, right) in tensors_of(place, rank) {
            match theirs.stored(&name(module, factor)) {
                Some(stored) if stored.shape == right => {}
                Some(stored) => {
                    let (name, found) = (name(module, factor), stored.shape);
                    return refuse(format!(
                        "tensor {name} is {found:?}; on this base it should be {right:?}: it adapts another model"
                    ));
                }
                None => return refuse(format!("lacks the tensor {}", name(module, factor))),
            }
        }
        // `layers.{i}.{component}.{matrix}.adapter_a`
        let mut words = place.a.splitn(4, '.').skip(2);
        if let (Some(component), Some(rest)) = (words.next(), words.next()) {
            chosen.insert((component.to_string(), rest.trim_end_matches(".adapter_a").to_string()));
        }
    }
    let components: BTreeSet<String> = chosen.iter().map(|(component, _)| component.clone()).collect();
    let matrices: BTreeSet<String> = chosen.iter().map(|(_, matrix)| matrix.clone()).collect();
    let adapted = with(components.into_iter().collect(), matrices.into_iter().collect());
    let list = adapters(&tensors(&adapted)?)?;
    let mut entries = vec![];
    for adapter in &list {
        let module = known.iter().find(|(_, place)| place.a == adapter.a).map(|(module, _)| module.clone());
        let module = module.unwrap_or_default();
        for (factor, ours, _) in tensors_of(adapter, rank) {
            let theirs_name = name(&module, factor);
            let Some(stored) = theirs.stored(&theirs_name) else {
                return refuse(format!(
                    "lacks {theirs_name}: dreamc adapts a matrix in all layers of a component, or in none"
                ));
            };
            entries.push(((ours.clone(), stored.shape.to_vec(), Dtype::F32), From::Theirs(theirs_name)));
        }
    }
    let numbers = entries.iter().map(|((_, shape, _), _)| shape.iter().product::<u64>()).sum();
    for adapter in &list {
        if let Some([_, norm]) = &adapter.dora {
            entries.push(((norm.clone(), vec![adapter.rows], Dtype::F32), From::Base(adapter)));
        }
    }
    let binding = base.binding()?;
    let text = dreamc_dsl::show(&adapted, Spelling::Yaml);
    let stored: Vec<_> = entries.iter().map(|(entry, _)| entry.clone()).collect();
    let metadata = [&[("format", "dreamc"), ("spec", text.as_str())][..], &binding.metadata()].concat();
    let fill = |i: usize, out: &mut dyn Write| {
        let lost = || io::Error::other("no such tensor");
        match &entries[i].1 {
            From::Theirs(name) => {
                let stored = theirs.stored(name).ok_or_else(lost)?;
                stored.convert(0, entries[i].0.1.iter().product(), Dtype::F32, out)
            }
            From::Base(adapter) => {
                let (_, w) = base.get(&adapter.tensor).map_err(io::Error::other)?.ok_or_else(lost)?;
                adapter.norms(&w).iter().try_for_each(|norm| out.write_all(&norm.to_le_bytes()))
            }
        }
    };
    let mut files: Vec<(&str, sums::Fill)> = vec![
        ("spec.yaml", Box::new(|out: &mut dyn Write| out.write_all(text.as_bytes()))),
        ("model.safetensors", Box::new(|out: &mut dyn Write| write_stored(out, &metadata, &stored, fill))),
    ];
    for (name, bytes) in beside {
        files.push((*name, Box::new(move |out: &mut dyn Write| out.write_all(bytes))));
    }
    folder::write(to, files)?;
    Ok(Moved { modules: list.len(), numbers })
}

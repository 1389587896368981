//! `dreamc diff`: how two specifications, or two runs, differ.

use clap::Args;
use dreamc_study::compare::study::ledger;
use dreamc_study::failure::Done;
use dreamc_study::say;
use dreamc_study::show::{self, table};
use dreamc_study::spec::Named;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Show how two specifications, or two runs, differ: every field, and of runs the results
#[derive(Args)]
#[command(after_help = "\
Examples:
  dreamc diff examples/tiny-la.yaml examples/tiny-dr.yaml
  dreamc diff runs/quickstart-001 runs/book-001")]
pub struct Arguments {
    /// A specification or the folder of a run
    #[arg(value_name = "A")]
    a: PathBuf,

    /// Another
    #[arg(value_name = "B")]
    b: PathBuf,

    /// Print JSON with stable keys
    #[arg(long)]
    json: bool,
}

/// A field that differs; `None` where one has no such field.
#[derive(Serialize)]
struct Difference {
    field: String,
    a: Option<String>,
    b: Option<String>,
}

pub fn run(a: Arguments) -> Done {
    let (one, other) = (fields(&a.a)?, fields(&a.b)?);
    let mut names: Vec<&String> = one.keys().chain(other.keys()).collect();
    names.sort();
    names.dedup();
    let differ = names.into_iter().filter(|n| one.get(*n) != other.get(*n));
    let found: Vec<Difference> = differ
        .map(|n| Difference { field: n.clone(), a: one.get(n).cloned(), b: other.get(n).cloned() })
        .collect();
    if a.json {
        return Ok(show::json(&found)?);
    }
    if found.is_empty() {
        return Ok(say!("no field differs")?);
    }
    let mut rows = vec![vec![String::new(), a.a.display().to_string(), a.b.display().to_string()]];
    let cell = |v: &Option<String>| v.clone().unwrap_or_else(|| "–".into());
    rows.extend(found.iter().map(|d| vec![d.field.clone(), cell(&d.a), cell(&d.b)]));
    Ok(say!("{}", table(&rows).trim_end())?)
}

/// Fields of a specification by path, and of a run what its ledger holds under `run`.
fn fields(path: &Path) -> Result<BTreeMap<String, String>, dreamc_study::failure::Failure> {
    let spec = Named { spec: path.to_path_buf(), set: vec![] }.load()?;
    let mut all = BTreeMap::new();
    flatten("", &serde_json::to_value(&spec)?, &mut all);
    if let Some(ledger) = ledger(path)? {
        flatten("run", &serde_json::to_value(&ledger)?, &mut all);
    }
    Ok(all)
}

fn flatten(path: &str, value: &Value, all: &mut BTreeMap<String, String>) {
    let below = |name: &str| if path.is_empty() { name.to_string() } else { format!("{path}.{name}") };
    match value {
        Value::Object(map) => map.iter().for_each(|(name, v)| flatten(&below(name), v, all)),
        Value::Array(list) if list.iter().any(|v| v.is_object() || v.is_array()) => {
            list.iter().enumerate().for_each(|(i, v)| flatten(&below(&i.to_string()), v, all));
        }
        Value::Null => {}
        Value::String(text) => drop(all.insert(path.into(), text.clone())),
        Value::Bool(_) | Value::Number(_) | Value::Array(_) => {
            drop(all.insert(path.into(), value.to_string()))
        }
    }
}

//! What the studio's page asks: the language server, drawings, counts and matching.

use crate::command::matching::with_values;
use crate::compare::arms::TOLERANCE;
use crate::lsp::Session;
use crate::report::{draw, page};
use dreamc_compiler::count::{Options, count};
use dreamc_compiler::matching::{Measure, Request, TOKENS, find, pair};
use dreamc_dsl::{Diagnostics, FileKind, Spec, Spelling};
use dreamc_studio::{Match, Tools, View};
use indexmap::IndexMap;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// Tabs whose documents are kept; the one that was opened first is forgotten.
const TABS: usize = 64;

/// The language server of each tab.
#[derive(Default)]
pub struct Studio {
    tabs: Mutex<IndexMap<String, Session>>,
}

impl Tools for Studio {
    fn language(&self, tab: &str, path: &Path, message: &Value) -> Vec<Value> {
        let mut tabs = self.tabs.lock().unwrap_or_else(PoisonError::into_inner);
        if tabs.len() >= TABS && !tabs.contains_key(tab) {
            tabs.shift_remove_index(0);
        }
        tabs.entry(tab.to_string()).or_default().answer(path, message)
    }

    fn view(&self, path: &Path, text: &str) -> Option<View> {
        let spec = spec(path, text).ok()??;
        let tokens = TOKENS.min(spec.model.context);
        let counts = count(&spec, &Options { tokens, device: None }).ok()?;
        let svg = page::alone(&draw::svg(&spec.model));
        Some(View { svg, counts: serde_json::to_value(counts).ok()? })
    }

    fn matched(&self, own: (&Path, &str), baseline: (&Path, &str)) -> Result<Match, String> {
        let read = |(path, text): (&Path, &str)| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            match spec(path, text) {
                Ok(Some(spec)) => Ok(spec),
                Ok(None) => Err(format!("{name} is a suite, and no specification")),
                Err(_) => Err(format!("{name} has errors: mend them first")),
            }
        };
        let (own_spec, baseline) = (read(own)?, read(baseline)?);
        let tokens = TOKENS.min(own_spec.model.context).min(baseline.model.context);
        let matched = match &own_spec.matching {
            Some(section) => {
                let request = Request { tokens, ..Request::from(section) };
                find(&own_spec, &baseline, &request).map_err(|e| e.to_string())?
            }
            None => {
                let measures = [Measure::FlopsPerToken, Measure::Parameters].map(|m| (m, TOLERANCE));
                let both = pair(&own_spec, &baseline, measures, tokens).map_err(|e| e.to_string())?;
                let closest = |closest: Option<_>| match closest {
                    Some(closest) => format!("no two sizes meet FLOPs and parameters; closest: {closest}"),
                    None => "no two sizes meet FLOPs and parameters".to_string(),
                };
                both.map_err(closest)?.1
            }
        };
        let name = own.0.to_string_lossy();
        let text = with_values(&name, own.1.to_string(), &matched).map_err(|e| e.to_string())?;
        Ok(Match { fields: json!(matched.fields), residual: json!(matched.residual), text })
    }
}

/// The specification of a text; `None` of a suite.
fn spec(path: &Path, text: &str) -> Result<Option<Spec>, Diagnostics> {
    let name = path.to_string_lossy();
    let tree = dreamc_dsl::parse(&name, text, Spelling::of(&name))?;
    if tree.kind != FileKind::Spec {
        return Ok(None);
    }
    let folder = path.parent().unwrap_or(Path::new(""));
    Ok(Some(dreamc_dsl::check_in(tree, folder, &[])?.0))
}

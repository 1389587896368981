//! The code of a model that has definitions: the module that `dreamc export torch` prints, in the
//! class that `transformers` loads.
//!
//! *In*: a model. *Out*: `modeling_dreamc.py`. *Promise*: the formulas are those of the IR; tensors
//! have the names of checkpoints. It has no cache.

use super::super::HfError;
use super::template::{Parts, expand};
use super::{CLASS, noise};
use dreamc_compiler::architecture::Architecture;
use dreamc_dsl::Spec;
use dreamc_dsl::spec::{Item, Statement};
use dreamc_torch::Options;

const PRINTED: &str = include_str!("parts/printed.py");
const IMPORTS: &str = "from transformers import GenerationMixin, PreTrainedModel\n\
     from transformers.modeling_outputs import CausalLMOutputWithPast\n\n\
     from .configuration_dreamc import DreamcConfig\n";

/// `modeling_dreamc.py` of a model, or the reason that it has none.
pub fn modeling(spec: &Spec) -> Result<String, HfError> {
    let refused = |problem: String| {
        Err(HfError::Export(format!("{problem}; `dreamc export torch` writes it as PyTorch")))
    };
    let architecture = Architecture::new(&spec.model, None)?;
    // The module is of training; other rules are asked where a text is written.
    if architecture.skips() {
        return refused("a package of a model with definitions has no `skip`".into());
    }
    let module = match dreamc_torch::module(&spec.model, Options { segments: false, z_loss: 0.0 }) {
        Ok(module) => module,
        Err(e) => return refused(e.to_string()),
    };
    if let Some((ours, theirs)) = module.renamed.iter().next() {
        return refused(format!("`{ours}` would be `{theirs}` in Python: give its component another name"));
    }
    let mut parts = Parts::new();
    let mut more = String::new();
    if begins_with_noise(&spec.model.body) {
        parts.insert("noise");
        more = format!("import numpy as np\n\n\n{}\n\n\n", noise(spec).trim_end());
    }
    // Transformers loads the folder: the module's own way of it goes.
    let text = module.text;
    let text = text.find("\n\n\ndef load(folder):").map_or(text.as_str(), |end| &text[..end]);
    let after = "import torch.nn.functional as F\n";
    let Some(at) = text.find(after).map(|at| at + after.len()) else {
        return refused("the module has no imports".into());
    };
    let title = format!(
        "\"\"\"`{}`, as `dreamc export hf` writes it: printed from its specification, with `{CLASS}` around it.\"\"\"\n\n",
        spec.model.name
    );
    let body = text[text.find("import ").unwrap_or(0)..at].replace("import pathlib\n\n", "");
    let rest = text[at..].trim_start();
    Ok(format!("{title}{body}{IMPORTS}\n\n{more}{rest}\n\n\n{}", expand(PRINTED, &parts)))
}

/// Whether the stream begins with drawn numbers somewhere.
fn begins_with_noise(items: &[Item]) -> bool {
    items.iter().any(|item| match item {
        Item::Layer(_) => false,
        Item::Statement(statement) => matches!(statement, Statement::StartNormal(_)),
        Item::Repeat { items, .. } | Item::Recur { items, .. } => begins_with_noise(items),
    })
}

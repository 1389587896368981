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
    let (mut numpy, mut numbers) = ("", String::new());
    if module.noise {
        parts.insert("noise");
        (numpy, numbers) = ("import numpy as np\n", format!("{}\n\n\n", noise(spec).trim_end()));
    }
    let title = format!(
        "\"\"\"`{}`, as `dreamc export hf` writes it: printed from its specification, with `{CLASS}` around it.\"\"\"\n\n",
        spec.model.name
    );
    let math = if module.math { "import math\n\n" } else { "" };
    let imports = format!("{math}{numpy}{}{IMPORTS}", dreamc_torch::IMPORTS);
    Ok(format!("{title}{imports}\n\n{numbers}{}\n\n\n{}", module.code, expand(PRINTED, &parts)))
}

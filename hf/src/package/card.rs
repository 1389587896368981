//! The model card of a package: counts, data, ledger, licence, and the way to use it.

use super::super::config::torch;
use super::super::export::Model;
use dreamc_dsl::spec::Source;
use dreamc_runtime::checkpoint::safetensors::Dtype;
use serde_json::Value;
use std::fmt::Write;

/// The text of `README.md`.
pub fn card(model: &Model, parameters: u64, dtype: Dtype) -> String {
    let m = &model.spec.model;
    let name = &m.name;
    let mut text = String::new();
    // Writing to a String does not fail.
    let mut line = |line: &str| {
        let _ = writeln!(text, "{line}");
    };
    line("---\nlibrary_name: transformers\npipeline_tag: text-generation\nlicense: other\n---\n");
    line(&format!("# {name}\n"));
    line("An attention mixture, trained with dreamc and exported by `dreamc export hf`.\n");
    line("```python\nfrom transformers import AutoModelForCausalLM, PreTrainedTokenizerFast\n");
    line("model = AutoModelForCausalLM.from_pretrained(\".\", trust_remote_code=True)");
    line("tokenizer = PreTrainedTokenizerFast.from_pretrained(\".\")\n```\n");
    line(
        "`trust_remote_code` runs `modeling_dreamc.py` of this folder; read it first. The tokenizer has no code.\n",
    );
    line("| | |\n|---|---|");
    line(&format!("| parameters | {parameters} |"));
    line(&format!("| stored as | {} |", torch(dtype)));
    line(&format!(
        "| vocabulary | {} |\n| hidden size | {} |\n| context | {} |",
        m.vocab, m.hidden, m.context
    ));
    line("\n## Data\n");
    match &model.spec.data {
        None => line("The specification names none."),
        Some(data) => {
            for (source, weight) in &data.sources {
                let share = format!("weight {weight:?}");
                match source {
                    Source::Task(task) => line(&format!(
                        "- a generated task, {:?}, {} to {} steps, {share}",
                        task.kind, task.min_steps, task.max_steps
                    )),
                    Source::Text { path } | Source::Jsonl { path, .. } | Source::Parquet { path, .. } => {
                        // The name alone: folders are of the machine that trained.
                        let name = path.rsplit('/').next().unwrap_or(path);
                        line(&format!("- `{name}`, {share}"));
                    }
                }
            }
        }
    }
    line("\n## Ledger\n");
    match model.ledger.as_deref().and_then(|text| serde_json::from_str::<Value>(text).ok()) {
        None => line("No ledger came with the weights."),
        Some(ledger) => {
            line("| | |\n|---|---|");
            for key in [
                "dreamc",
                "status",
                "steps",
                "tokens",
                "targets",
                "seed",
                "device",
                "precision",
                "train_seconds",
                "declared_flops_per_token",
                "spec_hash",
                "data_hash",
                "tokenizer_hash",
            ] {
                match ledger.get(key) {
                    None | Some(Value::Null) => {}
                    Some(Value::String(value)) if value.is_empty() => {}
                    Some(Value::String(value)) => line(&format!("| {} | {value} |", key.replace('_', " "))),
                    Some(value) => line(&format!("| {} | {value} |", key.replace('_', " "))),
                }
            }
        }
    }
    line("\n## Licence\n");
    line(
        "The licence of the weights is for those who trained them to name, and follows from that of the data; this card names none. \
         The Python code was written by dreamc (MIT).",
    );
    line("\n## Comparing\n");
    line(
        "```sh\necho '[[1, 2, 3, 4, 5]]' > ids.json\ndreamc probe . --ids ids.json -o probe.safetensors\n```\n",
    );
    line("`logits` of `probe.safetensors` are those of the model for `[[1, 2, 3, 4]]`, to 1e-5 in f32.");
    text
}

//! The fields of a `config.json`, read one by one.
//!
//! *In*: a JSON object. *Out*: values of the kind that is asked for. *Promise*: every field was
//! read, is known not to change what the model computes, was named to be ignored, or is refused by
//! name.

use super::HfError;
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::Path;

/// Fields that do not change what a model computes from tokens to logits: how it is stored, shown,
/// trained by `transformers` and, in older files, sampled from.
const HARMLESS: [&str; 66] = [
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_name_or_path",
    "attention_dropout",
    "attn_implementation",
    "auto_map",
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "cache_implementation",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "eos_token_id",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_llama_config",
    "keys_to_ignore_at_inference",
    "label2id",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "min_length",
    "model_max_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "pad_token_id",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "router_jitter_noise",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
];

/// Fields that change nothing while they are off.
const HARMLESS_OFF: [&str; 9] = [
    "add_cross_attention",
    "chunk_size_feed_forward",
    "is_encoder_decoder",
    "pruned_heads",
    "rope_interleaved",
    "test_time_noise",
    "tie_encoder_decoder",
    "use_mrope",
    "use_sliding_window",
];

/// Whether a field changes nothing, with this value.
pub(super) fn harmless(name: &str, value: &Value) -> bool {
    let off = match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(n) => n.as_f64() == Some(0.0),
        Value::Object(map) => map.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::String(_) | Value::Bool(true) => false,
    };
    HARMLESS.contains(&name)
        || (HARMLESS_OFF.contains(&name) && off)
        || (name == "partial_rotary_factor" && value.as_f64() == Some(1.0))
}

/// The fields of a configuration; remembers which were read.
pub(super) struct Fields<'a> {
    pub(super) path: &'a Path,
    /// Where it stands in the file, as `rope_scaling.`.
    pub(super) place: &'a str,
    pub(super) map: &'a Map<String, Value>,
    /// Fields that are not looked at, by their full names.
    pub(super) ignore: &'a [String],
    read: RefCell<BTreeSet<&'static str>>,
}

pub(super) type Result<T> = std::result::Result<T, HfError>;

impl<'a> Fields<'a> {
    pub(super) fn new(
        path: &'a Path,
        place: &'a str,
        map: &'a Map<String, Value>,
        ignore: &'a [String],
    ) -> Self {
        Fields { path, place, map, ignore, read: RefCell::default() }
    }

    /// A field; `None` where it is absent or null.
    pub(super) fn get(&self, name: &'static str) -> Option<&'a Value> {
        self.read.borrow_mut().insert(name);
        self.map.get(name).filter(|v| !v.is_null())
    }

    pub(super) fn refuse<T>(&self, problem: String) -> Result<T> {
        Err(HfError::refused(self.path, problem))
    }

    pub(super) fn wrong<T>(&self, name: &str, value: &Value, expected: &str) -> Result<T> {
        self.refuse(format!("`{}{name}` is {value}; expected {expected}", self.place))
    }

    pub(super) fn whole_or_none(&self, name: &'static str) -> Result<Option<u64>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.as_u64() {
            Some(number) if number > 0 => Ok(Some(number)),
            _ => self.wrong(name, value, "a whole number, at least 1"),
        }
    }

    pub(super) fn real_or_none(&self, name: &'static str) -> Result<Option<f64>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.as_f64() {
            Some(number) if number > 0.0 && number.is_finite() => Ok(Some(number)),
            _ => self.wrong(name, value, "a number above 0"),
        }
    }

    pub(super) fn real(&self, name: &'static str) -> Result<f64> {
        match self.real_or_none(name)? {
            Some(number) => Ok(number),
            None => self.refuse(format!("lacks `{}{name}`", self.place)),
        }
    }

    pub(super) fn flag(&self, name: &'static str, default: bool) -> Result<bool> {
        match self.get(name) {
            None => Ok(default),
            Some(Value::Bool(value)) => Ok(*value),
            Some(value) => self.wrong(name, value, "true or false"),
        }
    }

    pub(super) fn word(&self, name: &'static str) -> Result<Option<&'a str>> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(word)) => Ok(Some(word)),
            Some(value) => self.wrong(name, value, "a text"),
        }
    }

    /// A field that must be absent, null, `false` or 0: what it asks for does not exist here.
    pub(super) fn off(&self, name: &'static str) -> Result<()> {
        match self.get(name) {
            None | Some(Value::Bool(false)) => Ok(()),
            Some(value) if value.as_u64() == Some(0) => Ok(()),
            Some(value) => self.wrong(name, value, "null or false: dreamc has nothing that computes this"),
        }
    }

    /// Refuses every field that was not read and may change the meaning.
    pub(super) fn finish(&self) -> Result<()> {
        let read = self.read.borrow();
        for (name, value) in self.map {
            let full = format!("{}{name}", self.place);
            let ignored = self.ignore.contains(&full);
            if read.contains(name.as_str()) {
                if ignored {
                    return self.refuse(format!("the field `{full}` is known and cannot be ignored"));
                }
                continue;
            }
            let here = self.place.is_empty() || name == "partial_rotary_factor";
            if !(ignored || here && harmless(name, value)) {
                return self.refuse(format!(
                    "the field `{full}` ({value}) is not known; it may change what the model computes, so nothing is imported; \
                     where it does not, add `--ignore {full}`"
                ));
            }
        }
        Ok(())
    }
}

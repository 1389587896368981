//! "Did you mean": the closest known name.

use crate::keys;

/// The candidate closest to `word`, where it is close enough to be a slip: at most a third of the
/// letters differ, or one is the beginning of the other.
pub(crate) fn closest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    if word.is_empty() || word.len() > 64 {
        return None;
    }
    let lower = word.to_lowercase().replace('-', "_");
    let limit = 1 + lower.chars().count() / 4;
    let score = |candidate: &str| {
        let distance = distance(&lower, &candidate.to_lowercase());
        let prefix = lower.len() >= 3 && (candidate.starts_with(&lower) || lower.starts_with(candidate));
        (distance <= limit.min(candidate.len().max(2) - 1) || prefix).then_some(distance)
    };
    let scored = candidates.into_iter().filter_map(|candidate| Some((score(candidate)?, candidate)));
    scored.min_by_key(|(distance, _)| *distance).map(|(_, candidate)| candidate)
}

/// Names in other programs, and the names here; the first that the place has is
/// meant.
const SYNONYMS: &[(&[&str], &[&str])] = &[
    (&["lr", "base_lr", "max_lr", "peak_lr"], &["learning_rate"]),
    (&["adam", "adamw", "beta1", "beta2", "adam_beta1", "adam_beta2"], &["betas", "optimizer"]),
    (&["optim", "optimiser", "muon", "lion"], &["optimizer"]),
    (&["wd", "decay"], &["weight_decay"]),
    (&["warmup_steps", "warm_up"], &["warmup"]),
    (&["scheduler", "lr_scheduler", "lr_schedule"], &["schedule"]),
    (&["grad_clip", "gradient_clipping", "max_grad_norm", "clip_norm"], &["clip"]),
    (&["max_iters", "num_steps", "n_steps", "iterations", "epochs"], &["steps"]),
    (&["batch_size", "bs"], &["batch"]),
    (&["gradient_accumulation", "gradient_accumulation_steps", "grad_accum"], &["accumulate"]),
    (
        &["seq", "seq_len", "seq_length", "sequence_length", "block_size", "max_length"],
        &["sequence", "context"],
    ),
    (&["max_position_embeddings", "context_length", "n_ctx", "ctx"], &["context"]),
    (&["dtype", "bf16", "fp16"], &["precision"]),
    (&["d_model", "dim", "hidden_size", "n_embd", "width", "model_dim", "embed_dim"], &["hidden"]),
    (&["vocab_size", "vocabulary", "n_vocab"], &["vocab"]),
    (&["tie_embeddings", "tie_word_embeddings", "tied"], &["tie"]),
    (&["n_heads", "num_heads", "n_head", "num_attention_heads"], &["heads"]),
    (&["n_kv_heads", "num_kv_heads", "num_key_value_heads"], &["kv_heads"]),
    (&["head_dim", "d_head", "head_width"], &["head_size"]),
    (&["rope_theta", "theta", "rope_base"], &["rope", "base"]),
    (&["sliding_window", "window_size"], &["window"]),
    (&["d_ff", "ffn", "ffn_dim", "intermediate_size", "mlp_ratio", "ff", "n_inner"], &["intermediate"]),
    (&["n_experts", "num_experts", "num_local_experts", "experts"], &["count"]),
    (&["top_k", "topk", "k", "num_experts_per_tok", "experts_per_token"], &["active"]),
    (&["hidden_act", "activation_function", "act"], &["activation"]),
    (&["eval_every", "eval_interval", "eval_steps"], &["evaluate"]),
    (&["save_every", "save_steps", "save_interval"], &["checkpoint"]),
    (&["val", "val_split", "holdout"], &["validation"]),
    (&["n_layers", "num_layers", "n_layer", "num_hidden_layers", "depth"], &["repeat"]),
    (&["layers", "blocks", "h"], &["body"]),
];

/// Values that keys have in other programs, and what there is here.
const VALUES: &[(&str, &[&str], &str)] = &[
    (
        "norm",
        &["layernorm", "layer_norm", "ln", "rmsnorm", "rms_norm", "rms", "batchnorm"],
        "every norm is an RMS norm; `norm` holds its `eps` and `unit_offset`",
    ),
    (
        "rope",
        &["alibi", "learned", "absolute", "sinusoidal", "relative", "rotary", "nope"],
        "positions are rotary or none: write their base, such as `rope: 10000`, or `rope: none`",
    ),
];

/// The help in place of a value that a key has in other programs.
pub(crate) fn elsewhere(key: &str, word: &str) -> Option<String> {
    let lower = word.to_lowercase().replace('-', "_");
    let known = VALUES.iter().find(|(of, words, _)| *of == key && words.contains(&lower.as_str()));
    known.map(|(.., help)| help.to_string())
}

/// The name that a word stands for: what it is called elsewhere, else the closest.
pub(crate) fn meant<'a>(word: &str, names: &[&'a str]) -> Option<&'a str> {
    let lower = word.to_lowercase().replace('-', "_");
    let known = SYNONYMS.iter().filter(|(words, _)| words.contains(&lower.as_str()));
    let known = known.flat_map(|(_, here)| *here).find_map(|name| names.iter().find(|n| *n == name));
    known.copied().or_else(|| closest(word, names.iter().copied()))
}

/// The field of a specification that a word names, as it is called here or in other programs:
/// `train.learning_rate` for `lr`.
pub fn field_called(word: &str) -> Option<String> {
    let lower = word.to_lowercase().replace('-', "_");
    let sections =
        [("train", &keys::TRAIN), ("model", &keys::MODEL), ("eval", &keys::EVAL), ("data", &keys::DATA)];
    let known = |name: &str| {
        sections.iter().find(|(_, section)| section.key(name).is_some()).map(|(of, _)| format!("{of}.{name}"))
    };
    let synonyms = SYNONYMS.iter().filter(|(words, _)| words.contains(&lower.as_str()));
    known(&lower).or_else(|| synonyms.flat_map(|(_, here)| *here).find_map(|name| known(name)))
}

/// The names as a list for a reader: `a`, `b` or `c`.
pub(crate) fn listing<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    let mut names: Vec<_> = names.into_iter().map(|name| format!("`{name}`")).collect();
    match names.pop() {
        None => "nothing".to_string(),
        Some(last) if names.is_empty() => last,
        Some(last) => format!("{} or {last}", names.join(", ")),
    }
}

/// Edits (insertions, deletions, replacements, swaps of neighbours) from one word to another.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut table = vec![vec![0; b.len() + 1]; a.len() + 1];
    for i in 0..=a.len() {
        for j in 0..=b.len() {
            table[i][j] = if i == 0 || j == 0 {
                i + j
            } else {
                let replaced = table[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
                let swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
                let swapped = if swapped { table[i - 2][j - 2] + 1 } else { usize::MAX };
                replaced.min(table[i - 1][j] + 1).min(table[i][j - 1] + 1).min(swapped)
            };
        }
    }
    table[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slips_are_found_and_strangers_are_not() {
        let names = ["heads", "kv_heads", "head_size", "rope", "window"];
        assert_eq!(closest("haeds", names), Some("heads"));
        assert_eq!(closest("kv-heads", names), Some("kv_heads"));
        assert_eq!(closest("windows", names), Some("window"));
        assert_eq!(closest("banana", names), None);
        assert_eq!(closest("", names), None);
    }

    #[test]
    fn words_of_other_programs_are_known() {
        assert_eq!(meant("lr", &["learning_rate", "clip"]), Some("learning_rate"));
        assert_eq!(meant("n_layers", &["vocab", "repeat"]), Some("repeat"));
        assert_eq!(meant("seq_len", &["vocab", "context"]), Some("context"));
        assert_eq!(meant("hiden", &["hidden", "vocab"]), Some("hidden"));
        assert_eq!(meant("banana", &["hidden", "vocab"]), None);
    }

    #[test]
    fn lists_read_as_a_sentence() {
        assert_eq!(listing(["a", "b", "c"]), "`a`, `b` or `c`");
        assert_eq!(listing(["a"]), "`a`");
    }
}

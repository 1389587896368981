//! `ledger.json`: what was run on what, and what it cost. The keys are stable.

use crate::checkpoint::Change;
use dreamc_compiler::rewrite::Rewriting;
use serde::{Deserialize, Serialize};

/// The account of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Ledger {
    /// Version of dreamc.
    pub dreamc: String,
    /// The model's name.
    pub model: String,
    /// Applications of layers.
    #[serde(default)]
    pub depth: u64,
    /// BLAKE3 of the resolved specification.
    pub spec_hash: String,
    /// BLAKE3 of contents, weights and tokenizer of the data.
    pub data_hash: String,
    /// BLAKE3 of the tokenizer.
    #[serde(default)]
    pub tokenizer_hash: String,
    /// Seed of weights, order and sampling.
    pub seed: u64,
    /// The device, for people.
    pub device: String,
    /// Ranks that trained it since it was begun or continued; that of one has none.
    #[serde(skip_serializing_if = "is_one")]
    pub ranks: u64,
    /// Precision of its steps, in words.
    #[serde(default)]
    pub precision: String,
    /// Which rewriting rules made its programs.
    pub rewriting: Rewriting,
    /// The machine, for people.
    #[serde(default)]
    pub machine: String,
    /// `running`, `finished`, `stopped early`, `interrupted` or `failed`.
    pub status: String,
    /// Rewriting rules that were used in the training programs, with how often.
    #[serde(default)]
    pub rewritten: Vec<(String, usize)>,
    /// Optimizer steps taken.
    pub steps: u64,
    /// Tokens read by training steps, padding included.
    pub tokens: u64,
    /// Tokens loss was taken on.
    pub targets: u64,
    /// How often the source was read that was read most; absent where no source has an end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epochs: Option<f64>,
    /// Continuations with another recipe, first to last. `spec_hash` is of the last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub changes: Vec<Change>,
    /// Seconds spent in training steps, over all continuations.
    pub train_seconds: f64,
    /// Parameters, balancing biases not counted.
    pub parameters: u64,
    /// FLOPs a training token should take, where they were counted.
    pub declared_flops_per_token: Option<f64>,
    /// FLOPs a generated token should take: the mean over a sequence of
    /// [`TOKENS`](dreamc_compiler::matching::TOKENS) or the context.
    #[serde(default)]
    pub decode_flops_per_token: Option<f64>,
    /// The same where wrapped parts and mixtures with no-op experts process the shares that the
    /// last evaluation saw; absent where there was none yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processed_flops_per_token: Option<f64>,
    /// Bytes of weights and mean caches while such a sequence is generated.
    #[serde(default)]
    pub generation_memory: Option<u64>,
    /// FLOPs of products that training steps carried out: two a multiply-add.
    pub executed_flops: u64,
    /// FLOPs that the donor was trained with whose weights a transplant took, its own donor's and
    /// teacher's among them; absent without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub donor_flops: Option<u64>,
    /// FLOPs a training token should take of the teacher's forward, the mean over all steps; absent
    /// where there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub teacher_flops_per_token: Option<f64>,
    /// FLOPs of products of the teacher's forward; values that a disk kept take none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub teacher_flops: Option<u64>,
    /// Bytes of the device's memory, all programs.
    pub peak_memory: u64,
    /// Steps left out because of infinities or spikes.
    pub skipped_steps: u64,
    /// The last evaluation: mean loss in nats over what is held out, see
    /// [`held_out`](crate::evaluate::held_out).
    pub validation_loss: Option<f64>,
    /// How many targets that is of.
    #[serde(default)]
    pub validation_targets: Option<u64>,
    /// The last evaluation.
    pub bits_per_byte: Option<f64>,
    /// The last evaluation.
    pub exact_match: Option<f64>,
    /// How many problems that is of.
    #[serde(default)]
    pub exact_match_problems: Option<u64>,
    /// Step and loss of the best evaluation.
    pub best: Option<(u64, f64)>,
}

fn is_one(ranks: &u64) -> bool {
    *ranks < 2
}

impl Ledger {
    /// FLOPs a training token should take, a teacher's among them.
    pub fn training_flops_per_token(&self) -> Option<f64> {
        Some(self.declared_flops_per_token? + self.teacher_flops_per_token.unwrap_or(0.0))
    }

    /// FLOPs that were carried out until these weights were there, of donors and teachers too.
    pub fn flops_in_all(&self) -> u64 {
        let others = [self.donor_flops, self.teacher_flops].into_iter().flatten();
        others.fold(self.executed_flops, u64::saturating_add)
    }

    /// As it is kept.
    pub fn text(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }
}

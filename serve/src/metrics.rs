//! Counts for Prometheus.
//!
//! *In*: what the engine and the connections do. *Out*: the text format of Prometheus, version
//! 0.0.4. *Promise*: counters never fall; nothing waits for a lock.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// A number that several threads change.
#[derive(Debug, Default)]
pub struct Number(AtomicU64);

impl Number {
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Relaxed);
    }

    pub fn set(&self, n: u64) {
        self.0.store(n, Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// A sum of durations, and of how many.
#[derive(Debug, Default)]
pub struct Times {
    count: Number,
    microseconds: Number,
}

impl Times {
    pub fn add(&self, time: Duration) {
        self.count.add(1);
        self.microseconds.add(time.as_micros() as u64);
    }

    /// Seconds of one; 0 where there was none.
    pub fn mean(&self) -> f64 {
        self.microseconds.get() as f64 / 1e6 / self.count.get().max(1) as f64
    }
}

/// Answers by their status.
const STATUSES: [u16; 12] = [200, 400, 401, 404, 405, 408, 413, 415, 429, 431, 500, 503];

/// All that is counted.
#[derive(Debug, Default)]
pub struct Metrics {
    pub running: Number,
    pub waiting: Number,
    pub prompt_tokens: Number,
    pub shared_tokens: Number,
    pub cache_tokens: Number,
    pub reserved_tokens: Number,
    pub kept_tokens: Number,
    pub written_tokens: Number,
    pub texts: Number,
    pub gone: Number,
    pub steps: Times,
    pub first_token: Times,
    pub whole: Times,
    pub connections: Number,
    answers: [Number; STATUSES.len()],
}

impl Metrics {
    /// Counts an answer.
    pub fn answered(&self, status: u16) {
        if let Some(at) = STATUSES.iter().position(|s| *s == status) {
            self.answers[at].add(1);
        }
    }

    /// The page that Prometheus reads.
    pub fn page(&self) -> String {
        let mut page = String::new();
        let mut one = |name: &str, kind: &str, help: &str, values: &[(String, String)]| {
            let _ = writeln!(page, "# HELP dreamc_{name} {help}\n# TYPE dreamc_{name} {kind}");
            for (suffix, value) in values {
                let _ = writeln!(page, "dreamc_{name}{suffix} {value}");
            }
        };
        let plain = |n: &Number| vec![(String::new(), n.get().to_string())];
        let times = |t: &Times| {
            let seconds = t.microseconds.get() as f64 / 1e6;
            vec![("_sum".into(), seconds.to_string()), ("_count".into(), t.count.get().to_string())]
        };
        one("texts_running", "gauge", "Texts that have a row.", &plain(&self.running));
        one("texts_waiting", "gauge", "Texts that wait for a row.", &plain(&self.waiting));
        let help = "Tokens in caches, of texts that have a row.";
        one("cache_tokens", "gauge", help, &plain(&self.cache_tokens));
        let help = "Tokens that texts with a row have and may yet write.";
        one("cache_tokens_reserved", "gauge", help, &plain(&self.reserved_tokens));
        let help = "Tokens of prompts that are kept for others that begin alike.";
        one("cache_tokens_kept", "gauge", help, &plain(&self.kept_tokens));
        one("connections", "gauge", "Open connections.", &plain(&self.connections));
        one("texts_total", "counter", "Texts written to their end.", &plain(&self.texts));
        one("texts_gone_total", "counter", "Texts whose client went away.", &plain(&self.gone));
        one("prompt_tokens_total", "counter", "Tokens of prompts.", &plain(&self.prompt_tokens));
        let help = "Tokens of prompts that were taken over from another prompt.";
        one("prompt_tokens_shared_total", "counter", help, &plain(&self.shared_tokens));
        one("written_tokens_total", "counter", "Tokens written.", &plain(&self.written_tokens));
        one("step_seconds", "summary", "Time of a step of all rows.", &times(&self.steps));
        let help = "Time from a request to its first token.";
        one("first_token_seconds", "summary", help, &times(&self.first_token));
        one("text_seconds", "summary", "Time from a request to the end of a text.", &times(&self.whole));
        let answers: Vec<_> = STATUSES
            .iter()
            .zip(&self.answers)
            .map(|(status, n)| (format!("{{status=\"{status}\"}}"), n.get().to_string()))
            .collect();
        one("answers_total", "counter", "Answers by status.", &answers);
        page
    }
}

//! Optimizers of a recipe: words, constants, and the size of their steps.
//!
//! *In*: the section `optimizer`. *Out*: an [`OptimizerKind`]. The key table, the checker,
//! printing, rules of transfer and reports read [`LAWS`], so that a law is a variant and a line
//! here, and its step in `compiler/src/optim`.

use serde::Serialize;

/// The law that moves weights.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OptimizerKind {
    /// AdamW.
    AdamW,
    /// The sign of a mean of gradients.
    Lion,
    /// Sums of gradients, with that momentum.
    Sgd(f64),
    /// Orthogonalised means for matrices, AdamW for the rest.
    Muon(Matrices),
    /// The same with every matrix at a fixed Frobenius norm.
    MuonH(Matrices),
}

/// How matrices that are orthogonalised move.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Matrices {
    /// Decay rate of the mean.
    pub momentum: f64,
    /// Factor on the learning rate.
    pub rate: f64,
}

/// The size of a law's steps, which rules that carry a rate from size to size ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// Each number moves by about the rate, whatever its gradient.
    Alike,
    /// In proportion to the gradient.
    Gradients,
    /// Whole matrices move by about the rate.
    Matrices,
    /// Whole matrices turn by the rate and keep their norm.
    Norms,
}

/// A law as it is written.
pub(crate) struct Law {
    /// Its word.
    pub(crate) word: &'static str,
    /// Its name in reports; the constants follow it.
    name: &'static str,
    doc: &'static str,
    /// The keys of the section that it reads.
    pub(crate) constants: &'static [&'static str],
    pace: Pace,
    /// The law, from the section's constants.
    pub(crate) of: fn(Matrices) -> OptimizerKind,
}

/// All laws.
pub(crate) static LAWS: [Law; 5] = [
    Law {
        word: "adamw",
        name: "AdamW",
        doc: "AdamW (1711.05101, algorithm 2)",
        constants: &[],
        pace: Pace::Alike,
        of: |_| OptimizerKind::AdamW,
    },
    Law {
        word: "lion",
        name: "Lion",
        doc: "the sign of a mean of gradients (2302.06675, algorithm 2)",
        constants: &[],
        pace: Pace::Alike,
        of: |_| OptimizerKind::Lion,
    },
    Law {
        word: "sgd",
        name: "SGD",
        doc: "the gradient, with momentum",
        constants: &["momentum"],
        pace: Pace::Gradients,
        of: |m| OptimizerKind::Sgd(m.momentum),
    },
    Law {
        word: "muon",
        name: "Muon",
        doc: "matrices, each expert's by itself, move by the orthogonalised mean of their gradients (Jordan et al., *Muon*, 2024); \
              embeddings, head, gains, biases and routers by AdamW",
        constants: &["momentum", "matrix_rate"],
        pace: Pace::Matrices,
        of: OptimizerKind::Muon,
    },
    Law {
        word: "muonh",
        name: "MuonH",
        doc: "as `muon`, each matrix at its first Frobenius norm (2603.28743, section 3): the learning rate is the angle of a step; \
              a matrix that begins at zero moves by AdamW",
        constants: &["momentum", "matrix_rate"],
        pace: Pace::Norms,
        of: OptimizerKind::MuonH,
    },
];

/// Words and their meanings, for the key table.
pub(crate) static WORDS: [(&str, &str); LAWS_COUNT] = {
    let mut words = [("", ""); LAWS_COUNT];
    let mut at = 0;
    while at < LAWS_COUNT {
        words[at] = (LAWS[at].word, LAWS[at].doc);
        at += 1;
    }
    words
};

const LAWS_COUNT: usize = 5;

impl OptimizerKind {
    /// Its constants in the order of the law's keys.
    fn numbers(self) -> Vec<f64> {
        match self {
            OptimizerKind::AdamW | OptimizerKind::Lion => vec![],
            OptimizerKind::Sgd(momentum) => vec![momentum],
            OptimizerKind::Muon(m) | OptimizerKind::MuonH(m) => vec![m.momentum, m.rate],
        }
    }

    fn law(self) -> &'static Law {
        let some = Matrices { momentum: 0.0, rate: 0.0 };
        let same = |law: &&Law| std::mem::discriminant(&(law.of)(some)) == std::mem::discriminant(&self);
        LAWS.iter().find(same).unwrap_or(&LAWS[0])
    }

    /// Its word.
    pub fn word(self) -> &'static str {
        self.law().word
    }

    /// Its constants by key.
    pub fn constants(self) -> Vec<(&'static str, f64)> {
        self.law().constants.iter().copied().zip(self.numbers()).collect()
    }

    /// The size of its steps.
    pub fn pace(self) -> Pace {
        self.law().pace
    }

    /// Whether it moves whole matrices, each by the orthogonalised mean of its gradients.
    pub fn of_matrices(self) -> bool {
        matches!(self.pace(), Pace::Matrices | Pace::Norms)
    }

    /// The same with another factor on the rate of whole matrices; `None` where it moves none.
    pub fn with_matrix_rate(self, rate: f64) -> Option<Self> {
        match self {
            OptimizerKind::Muon(m) => Some(OptimizerKind::Muon(Matrices { rate, ..m })),
            OptimizerKind::MuonH(m) => Some(OptimizerKind::MuonH(Matrices { rate, ..m })),
            OptimizerKind::AdamW | OptimizerKind::Lion | OptimizerKind::Sgd(_) => None,
        }
    }

    /// Its name and constants, for people: `Muon 0.95 × 1 and AdamW`.
    pub fn described(self) -> String {
        let numbers: Vec<String> = self.numbers().iter().map(f64::to_string).collect();
        let rest = if self.of_matrices() { " and AdamW" } else { "" };
        format!("{} {}", self.law().name, numbers.join(" × ")).trim_end().to_string() + rest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn laws_are_found_by_their_kinds() {
        let some = Matrices { momentum: 0.5, rate: 2.0 };
        for law in &LAWS {
            let kind = (law.of)(some);
            assert_eq!((kind.word(), kind.constants().len()), (law.word, law.constants.len()));
        }
        let described = LAWS.each_ref().map(|law| (law.of)(some).described());
        assert_eq!(
            described,
            ["AdamW", "Lion", "SGD 0.5", "Muon 0.5 × 2 and AdamW", "MuonH 0.5 × 2 and AdamW"]
        );
    }
}

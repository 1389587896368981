//! The generated tasks: their names, and the numbers that each takes.
//!
//! *In*: nothing. *Out*: [`TaskKind`] and its [`Facts`]. *Promise*: one entry of the list below is
//! all that the language knows of a task; its problems are a file of the crate `data`.

use serde::Serialize;

/// A number that a task takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Knob {
    /// The noun phrase of what it counts.
    pub about: &'static str,
    /// The least that it may be.
    pub least: u64,
    /// The most.
    pub most: u64,
    /// Its value where none is written.
    pub default: u64,
}

/// All that the language knows of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Its name in specifications.
    pub name: &'static str,
    /// The task in half a sentence.
    pub about: &'static str,
    /// The paper that it is from, as arXiv numbers it; empty where it is the project's own.
    pub paper: &'static str,
    /// The difficulty: `min_steps` to `max_steps`, whose default this has, and `longer`.
    pub steps: Knob,
    /// The key `size`.
    pub size: Knob,
    /// The key `length`, where the task has it.
    pub length: Option<Knob>,
}

/// Most steps of a problem, so that a slip of the finger does not fill the memory.
pub const MOST_STEPS: u64 = 10_000;

macro_rules! knob {
    ($about:literal, $least:literal ..= $most:expr, $default:literal) => {
        Knob { about: $about, least: $least, most: $most, default: $default }
    };
}

macro_rules! tasks {
    ($($kind:ident, $name:literal, $paper:literal, $about:literal, steps $steps:tt, size $size:tt $(, length $length:tt)?;)*) => {
        /// The generated tasks.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
        #[serde(rename_all = "snake_case")]
        pub enum TaskKind {
            $(#[doc = $about] $kind,)*
        }

        impl TaskKind {
            /// All of them, in the order of the list.
            pub const ALL: &[TaskKind] = &[$(TaskKind::$kind),*];

            /// All that the language knows of it.
            pub fn facts(self) -> &'static Facts {
                match self {
                    $(TaskKind::$kind => {
                        const FACTS: Facts = Facts {
                            name: $name,
                            about: $about,
                            paper: $paper,
                            steps: knob!$steps,
                            size: knob!$size,
                            length: tasks!(@length $($length)?),
                        };
                        &FACTS
                    })*
                }
            }
        }

        /// Names and meanings, as the key `task` takes them.
        pub const TASKS: &[(&str, &str)] = &[$(($name, $about)),*];
    };
    (@length) => { None };
    (@length $length:tt) => { Some(knob!$length) };
}

tasks! {
    Arithmetic, "arithmetic", "", "multi-step arithmetic in words, modulo `size`",
        steps ("operations", 1..=MOST_STEPS, 4), size ("the modulus", 2..=1000, 10);
    Composition, "composition", "", "a function given as a random table of `size` entries, applied several times",
        steps ("applications", 1..=MOST_STEPS, 4), size ("entries of the table", 2..=1000, 8);
    Permutation, "permutation", "", "state tracking: swaps of `size` elements",
        steps ("swaps", 1..=MOST_STEPS, 4), size ("elements", 2..=26, 5);
    Mqar, "mqar", "2312.04927",
        "multi-query associative recall: `steps` pairs of a key and a value, of a vocabulary of `size`; each key comes once more within `length` symbols, and its value is asked",
        steps ("pairs", 1..=MOST_STEPS, 4), size ("symbols, half of them keys", 4..=8192, 64), length ("symbols of a text", 4..=65_536, 64);
    Recall, "recall", "2403.17844",
        "in-context recall of MAD: `steps` pairs of keys and values among `size` symbols, a key with the same value throughout; asked where a key comes again",
        steps ("pairs", 2..=MOST_STEPS, 32), size ("symbols, half of them keys", 4..=124, 16);
    NoisyRecall, "noisy_recall", "2403.17844",
        "noisy in-context recall of MAD: as `recall`, with a symbol of noise in one place of five",
        steps ("pairs", 2..=MOST_STEPS, 32), size ("symbols, half of them keys", 4..=62, 16);
    FuzzyRecall, "fuzzy_recall", "2403.17844",
        "fuzzy in-context recall of MAD: as `recall`, with keys and values of one to three symbols",
        steps ("pairs", 2..=MOST_STEPS, 16), size ("symbols, half of them of keys", 4..=52, 16);
    Memorization, "memorization", "2403.17844",
        "memorization of MAD: `size` facts that are the same in every problem, and stand in no prompt; `steps` of them are asked",
        steps ("facts asked", 1..=MOST_STEPS, 16), size ("facts", 2..=3844, 256);
    SelectiveCopying, "selective_copying", "2403.17844",
        "selective copying of MAD: `steps` symbols of `size` among blanks, `length` places in all, repeated in order",
        steps ("symbols to copy", 1..=MOST_STEPS, 16), size ("symbols", 2..=62, 16), length ("places", 2..=65_536, 64);
    Induction, "induction", "2212.14052",
        "induction heads: in `steps` symbols of `size` a mark comes once, and once more at the end; the symbol after the mark is asked",
        steps ("symbols", 2..=MOST_STEPS, 64), size ("symbols", 2..=62, 16);
    PHop, "p_hop", "2402.09268",
        "p-hop induction: from the end of `length` letters of an alphabet of `size`, `steps` hops, each to the letter after the last place before that has the same letter",
        steps ("hops", 1..=MOST_STEPS, 4), size ("letters of the alphabet", 2..=26, 4), length ("letters", 2..=65_536, 100);
    ModularSum, "modular_sum", "2411.12537",
        "the sum of `steps` digits modulo `size`; with `size` 2, the default, parity",
        steps ("digits", 1..=MOST_STEPS, 40), size ("the modulus", 2..=10, 2);
    Symmetric, "symmetric", "2404.08819",
        "the word problem of the symmetric group of `size` letters: the product of `steps` permutations",
        steps ("factors", 1..=MOST_STEPS, 16), size ("letters", 2..=6, 5);
    Alternating, "alternating", "2404.08819",
        "the word problem of the alternating group of `size` letters: the product of `steps` even permutations",
        steps ("factors", 1..=MOST_STEPS, 16), size ("letters", 3..=6, 5);
    FlipFlop, "flip_flop", "2306.00946",
        "flip-flop language: `steps` instructions, each with a bit, which write, are ignored (`size` in a hundred) or read; asked is each bit that is read",
        steps ("instructions", 2..=MOST_STEPS, 64), size ("ignored instructions in a hundred", 0..=99, 80);
    Dyck, "dyck", "2010.07515",
        "Dyck words: the brackets that close `steps` brackets of `size` kinds, nested at most `length` deep",
        steps ("brackets", 1..=MOST_STEPS, 32), size ("kinds of bracket", 1..=4, 2), length ("the greatest depth", 1..=1000, 4);
    Copying, "copying", "2402.01032",
        "copying: `steps` letters of an alphabet of `size`, repeated",
        steps ("letters", 1..=MOST_STEPS, 32), size ("letters of the alphabet", 2..=26, 26);
    NGram, "n_gram", "2402.01032",
        "n-gram lookup: of `steps` letters of an alphabet of `size`, the one after the only place of a group of `length`",
        steps ("letters", 3..=MOST_STEPS, 64), size ("letters of the alphabet", 2..=26, 26), length ("letters of the group", 1..=64, 2);
    Sorting, "sorting", "", "`steps` letters of an alphabet of `size`, in order",
        steps ("letters", 1..=MOST_STEPS, 8), size ("letters of the alphabet", 2..=26, 26);
    Sum, "sum", "2307.03381", "the sum of `length` numbers of `steps` digits to the base `size`",
        steps ("digits", 1..=1000, 4), size ("the base", 2..=10, 10), length ("numbers", 2..=100, 2);
    Chain, "chain", "2407.20311",
        "a chain of assignments modulo `size` among `length` variables in any order, in the manner of iGSM: the value of one that takes `steps` operations",
        steps ("operations", 1..=MOST_STEPS, 4), size ("the modulus", 2..=1000, 23), length ("variables", 2..=10_001, 16);
    PathStar, "path_star", "2403.06963",
        "paths of a star: of `size` paths of `steps` edges each from a start, nodes named by `length` symbols, the one to a goal",
        steps ("edges", 1..=1000, 4), size ("paths", 1..=100, 2), length ("names", 2..=100_001, 50);
    Depo, "depo", "2512.17351",
        "Depo of Physics of Language Models 4.1: a cycle of up to `size` nodes in any order, and of `length` of them the node `steps` places further",
        steps ("hops", 1..=MOST_STEPS, 8), size ("nodes", 3..=1000, 75), length ("questions", 1..=1000, 10);
    Brevo, "brevo", "2512.17351",
        "Brevo of Physics of Language Models 4.1: all that a node depends on in a graph of `steps` nodes named by `size` symbols, in the first order that can be",
        steps ("nodes", 3..=1000, 30), size ("names", 3..=3844, 62);
    Capo, "capo", "2512.17351",
        "Capo of Physics of Language Models 4.1: six facts of each of `size` persons, which are the same in every problem; those of `steps` persons are asked",
        steps ("persons asked", 1..=1000, 4), size ("persons", 2..=1_000_000, 1000);
    Mano, "mano", "2512.17351",
        "Mano of Physics of Language Models 4.1: the value of an expression of `steps` operators modulo `size`, operators first",
        steps ("operators", 1..=MOST_STEPS, 10), size ("the modulus", 2..=26, 23);
    Lano, "lano", "2512.17351",
        "Lano of Physics of Language Models 4.1: a text of the authors' grammar `cfg3f`, of `steps` levels of rules; right is every text that the grammar has",
        steps ("levels of rules", 1..=6, 4), size ("symbols of a level", 3..=3, 3);
}

impl Facts {
    /// The numbers that a task takes, by their keys.
    pub fn knobs(&self) -> impl Iterator<Item = (&'static str, Knob)> {
        let length = self.length.map(|knob| ("length", knob));
        [("steps", self.steps), ("size", self.size)].into_iter().chain(length)
    }
}

impl Knob {
    /// Whether a number is one that it may be.
    pub fn takes(&self, n: u64) -> bool {
        (self.least..=self.most).contains(&n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table of `docs/tasks.md` is that of the list; `BLESS=1` writes it there.
    #[test]
    fn the_page_of_tasks_has_the_list() {
        const BEFORE: &str = "|---|---|---|---|---|---|\n";
        let knob = |knob: Knob| format!("{}: {} to {} ({})", knob.about, knob.least, knob.most, knob.default);
        let mut table = String::new();
        for kind in TaskKind::ALL {
            let facts = kind.facts();
            let (steps, size, length) =
                (knob(facts.steps), knob(facts.size), facts.length.map_or("–".into(), knob));
            let paper = if facts.paper.is_empty() { "–" } else { facts.paper };
            table +=
                &format!("| `{}` | {} | {paper} | {steps} | {size} | {length} |\n", facts.name, facts.about);
        }
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/tasks.md");
        let old = std::fs::read_to_string(path).unwrap();
        let (before, after) = old.split_once(BEFORE).unwrap();
        let rest = after.split_once("\n\n").unwrap().1;
        let new = format!("{before}{BEFORE}{table}\n{rest}");
        if std::env::var_os("BLESS").is_some_and(|v| v == "1") {
            std::fs::write(path, &new).unwrap();
        } else {
            assert!(old == new, "docs/tasks.md has another list; BLESS=1 writes it");
        }
    }

    #[test]
    fn numbers_of_tasks_are_in_their_ranges() {
        for kind in TaskKind::ALL {
            for (key, knob) in kind.facts().knobs() {
                assert!(knob.takes(knob.default), "{} {key}", kind.facts().name);
            }
        }
    }
}

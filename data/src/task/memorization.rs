//! Memorization of MAD (arXiv 2403.17844, section 3.1): facts that are the same in every problem of
//! every split, so that they are learned in weights or not at all. A text asks `steps` of them,
//! each a key and its value: `aZ cQ `. Held out are texts, not facts.

use super::symbols::symbol;
use super::{Drawn, Text};
use crate::rng::{Philox, Stream};
use dreamc_dsl::spec::Task;

/// The seed of the facts, which no seed of a run changes.
const FACTS: u64 = 12_345;

/// Any numbers go together.
pub fn check(_: &Task) -> Result<(), String> {
    Ok(())
}

/// The value of a key.
fn value(key: u64, size: u64) -> u64 {
    Philox::new(FACTS, "facts").stream(key).below(size)
}

/// Draws a problem.
pub fn problem(task: &Task, steps: u64, random: &mut Stream) -> Drawn {
    let mut text = Text::default();
    for _ in 0..steps {
        let key = random.below(task.size);
        text.push(&symbol(key, task.size)).ask(&symbol(value(key, task.size), task.size)).push(" ");
    }
    text.drawn()
}

#[cfg(test)]
mod tests {
    use super::super::tests::{asked, draws};
    use super::*;
    use dreamc_dsl::spec::TaskKind;
    use std::collections::HashMap;

    #[test]
    fn facts_are_the_same_in_every_text() {
        let task = Task { size: 62, ..Task::new(TaskKind::Memorization, 1, 16) };
        let mut known: HashMap<String, String> = HashMap::new();
        for drawn in draws(&task, 16, 100) {
            for range in asked(&drawn) {
                let key = drawn.answer[range.start - 1..range.start].to_string();
                let value = drawn.answer[range.clone()].to_string();
                assert_eq!(known.entry(key).or_insert(value.clone()), &value);
            }
        }
        assert_eq!(known.len(), 62);
        // Values of 62 facts drawn among 62 symbols: about 39 different.
        let values: std::collections::HashSet<&String> = known.values().collect();
        assert!((30..48).contains(&values.len()), "{}", values.len());
    }
}

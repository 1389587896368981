//! Sorting: letters in any order, and in theirs: `cab=` gives `abc`.

use super::Drawn;
use super::symbols::lower;
use crate::rng::Stream;
use dreamc_dsl::spec::Task;

/// Any numbers go together.
pub fn check(_: &Task) -> Result<(), String> {
    Ok(())
}

/// Draws a problem.
pub fn problem(task: &Task, steps: u64, random: &mut Stream) -> Drawn {
    let mut letters: Vec<u64> = (0..steps).map(|_| random.below(task.size)).collect();
    let text = |of: &[u64]| of.iter().map(|l| lower(*l, task.size)).collect::<String>();
    let prompt = text(&letters) + "=";
    letters.sort_unstable();
    (prompt, text(&letters)).into()
}

#[cfg(test)]
mod tests {
    use super::super::tests::draws;
    use super::*;
    use dreamc_dsl::spec::TaskKind;

    #[test]
    fn the_answer_is_the_letters_in_order() {
        for drawn in draws(&Task::new(TaskKind::Sorting, 1, 8), 8, 100) {
            let mut letters: Vec<char> = drawn.prompt.trim_end_matches('=').chars().collect();
            letters.sort();
            assert_eq!(letters.into_iter().collect::<String>(), drawn.answer);
        }
    }
}

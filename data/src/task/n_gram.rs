//! N-gram lookup (arXiv 2402.01032, section 4.2): in `steps` letters, the letter after the only
//! place of a group of `length` that the prompt repeats: `cabdc|ab=` gives `d`.

use super::Drawn;
use super::symbols::lower;
use crate::rng::Stream;
use dreamc_dsl::spec::Task;

/// Texts that are drawn before one is made to have a group once.
const TRIES: usize = 64;

/// The group and the letter after it stand in the text.
pub fn check(task: &Task) -> Result<(), String> {
    let length = task.length.unwrap_or(1);
    if task.min_steps <= length {
        return Err(format!(
            "a group of {length} and the letter after it take {} letters, min_steps is {}: use min_steps {} or length {}",
            length + 1,
            task.min_steps,
            length + 1,
            task.min_steps.saturating_sub(1).max(1)
        ));
    }
    // Beyond this no group of a text is its only one.
    let most = task.difficulties().max().unwrap_or(0);
    let groups = (0..length).fold(1u64, |all, _| all.saturating_mul(task.size));
    if most > 8 * groups {
        return Err(format!(
            "of {most} letters there are {groups} groups of {length}, and each would stand in many places: use at most {} letters or length {}",
            8 * groups,
            length + 1
        ));
    }
    Ok(())
}

/// Draws a problem.
pub fn problem(task: &Task, steps: u64, random: &mut Stream) -> Drawn {
    let length = task.length.unwrap_or(1) as usize;
    let mut last = None;
    for _ in 0..TRIES {
        let letters: Vec<u64> = (0..steps).map(|_| random.below(task.size)).collect();
        let at = random.below(steps - length as u64) as usize;
        let group = &letters[at..at + length];
        let once = letters.windows(length).filter(|w| *w == group).count() == 1;
        last = Some((letters.clone(), at));
        if once {
            break;
        }
    }
    let (letters, at) = last.unwrap_or_default();
    // Where no drawn text has such a group, the answer is that of the first of its places.
    let group = letters[at..at + length].to_vec();
    let at = letters.windows(length).position(|w| w == group).unwrap_or(at);
    let text = |of: &[u64]| of.iter().map(|l| lower(*l, task.size)).collect::<String>();
    (format!("{}|{}=", text(&letters), text(&group)), text(&letters[at + length..at + length + 1])).into()
}

#[cfg(test)]
mod tests {
    use super::super::tests::draws;
    use super::*;
    use dreamc_dsl::spec::TaskKind;

    #[test]
    fn the_answer_follows_the_only_place_of_the_group() {
        for drawn in draws(&Task::new(TaskKind::NGram, 3, 64), 64, 300) {
            let (text, group) = drawn.prompt.trim_end_matches('=').split_once('|').unwrap();
            assert_eq!((text.len(), group.len()), (64, 2));
            let at = text.find(group).unwrap();
            assert_eq!(text[at + 2..at + 3], drawn.answer);
            assert_eq!((0..63).filter(|i| &text[*i..i + 2] == group).count(), 1, "{text} {group}");
        }
    }

    #[test]
    fn groups_that_do_not_fit_say_what_would() {
        let task = Task::new(TaskKind::NGram, 2, 64);
        assert!(check(&task).unwrap_err().ends_with("use min_steps 3 or length 1"));
        let many = Task { size: 2, ..Task::new(TaskKind::NGram, 3, 64) };
        assert!(check(&many).unwrap_err().ends_with("use at most 32 letters or length 3"));
    }
}

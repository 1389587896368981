//! p-hop induction (arXiv 2402.09268, section 4): from the last of `length` letters, each hop goes
//! to the letter after the latest earlier place of the same letter. `steps` hops; the answer is the
//! letter where they end, or `-` where a hop finds no such place, as the paper has it. The prompt
//! ends with the number of hops: `bacab 2 = `.

use super::Drawn;
use super::symbols::lower;
use crate::rng::Stream;
use dreamc_dsl::spec::Task;

/// Any numbers go together.
pub fn check(_: &Task) -> Result<(), String> {
    Ok(())
}

/// The place where `hops` hops from the last letter end.
fn end(letters: &[u64], hops: u64) -> Option<usize> {
    let mut at = letters.len().checked_sub(1)?;
    for _ in 0..hops {
        let before = (0..at).rev().find(|&j| letters[j] == letters[at])?;
        at = before + 1;
    }
    Some(at)
}

/// Draws a problem.
pub fn problem(task: &Task, hops: u64, random: &mut Stream) -> Drawn {
    let letters: Vec<u64> = (0..task.length.unwrap_or(1)).map(|_| random.below(task.size)).collect();
    let text: String = letters.iter().map(|l| lower(*l, task.size)).collect();
    let answer = end(&letters, hops).map_or("-".into(), |at| lower(letters[at], task.size));
    (format!("{text} {hops} = "), answer).into()
}

#[cfg(test)]
mod tests {
    use super::super::tests::draws;
    use super::*;
    use dreamc_dsl::spec::TaskKind;

    #[test]
    fn hops_are_those_of_the_definition() {
        // The last `a` (4) was before at 2, whose next is `c` (3); `c` was before at 0: `b` (1).
        let letters = [2, 1, 0, 2, 0];
        assert_eq!([0, 1, 2].map(|hops| end(&letters, hops)), [Some(4), Some(3), Some(1)]);
        assert_eq!(end(&letters, 3), None);
    }

    /// Of four letters and a hundred places one hop always ends somewhere, and of sixteen, which go
    /// back three places each on average, most do; each letter is the answer as often.
    #[test]
    fn answers_are_spread_over_the_letters() {
        for (hops, least) in [(1, 1.0), (16, 0.85)] {
            let mut counts = [0u64; 4];
            for drawn in draws(&Task::new(TaskKind::PHop, 1, 16), hops, 2000) {
                if drawn.answer != "-" {
                    counts[(drawn.answer.as_bytes()[0] - b'a') as usize] += 1;
                }
                assert_eq!(drawn.prompt.split(' ').next().unwrap().len(), 100);
            }
            let all: u64 = counts.iter().sum();
            assert!(all as f64 >= least * 2000.0, "{hops}: {counts:?}");
            assert!(counts.iter().all(|n| (0.2..0.3).contains(&(*n as f64 / all as f64))), "{counts:?}");
        }
    }
}

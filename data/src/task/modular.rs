//! The sum of digits modulo `size`; parity where `size` is 2 (Grazzi et al., arXiv 2411.12537,
//! section 5.1: trained on 3 to 40 digits, asked 40 to 256): `1101=` gives `1`.

use super::Drawn;
use crate::rng::Stream;
use dreamc_dsl::spec::Task;

/// Any numbers go together.
pub fn check(_: &Task) -> Result<(), String> {
    Ok(())
}

/// Draws a problem.
pub fn problem(task: &Task, steps: u64, random: &mut Stream) -> Drawn {
    let digits: Vec<u64> = (0..steps).map(|_| random.below(task.size)).collect();
    let sum = digits.iter().sum::<u64>() % task.size;
    let prompt: String = digits.iter().map(u64::to_string).chain(["=".into()]).collect();
    (prompt, sum.to_string()).into()
}

#[cfg(test)]
mod tests {
    use super::super::tests::draws;
    use super::*;
    use dreamc_dsl::spec::TaskKind;

    #[test]
    fn answers_follow_from_the_digits_and_are_even() {
        for size in [2, 5, 10] {
            let task = Task { size, ..Task::new(TaskKind::ModularSum, 1, 40) };
            let mut counts = vec![0u64; size as usize];
            for drawn in draws(&task, 12, 2000) {
                let digits = drawn.prompt.trim_end_matches('=').bytes().map(|b| u64::from(b - b'0'));
                let sum = digits.sum::<u64>() % size;
                assert_eq!(sum.to_string(), drawn.answer);
                counts[sum as usize] += 1;
            }
            let even = 2000 / size;
            assert!(counts.iter().all(|n| n.abs_diff(even) < even / 2 - 10), "{counts:?}");
        }
    }
}

//! Sums of numbers with many digits, the most significant first (arXiv 2307.03381, "plain"):
//! `047+981=` gives `1028`. Numbers have `steps` digits, zeros in front too; the sum has as many as
//! it may need, so that its length tells nothing.

use super::Drawn;
use crate::rng::Stream;
use dreamc_dsl::spec::Task;

/// Any numbers go together.
pub fn check(_: &Task) -> Result<(), String> {
    Ok(())
}

/// Draws a problem.
pub fn problem(task: &Task, steps: u64, random: &mut Stream) -> Drawn {
    let base = task.size;
    let numbers: Vec<Vec<u64>> =
        (0..task.length.unwrap_or(2)).map(|_| (0..steps).map(|_| random.below(base)).collect()).collect();
    let text = |digits: &[u64]| digits.iter().map(u64::to_string).collect::<String>();
    let terms: Vec<String> = numbers.iter().map(|n| text(n)).collect();
    let mut sum = vec![];
    let mut carry = 0;
    for place in (0..steps as usize).rev() {
        carry += numbers.iter().map(|n| n[place]).sum::<u64>();
        sum.push(carry % base);
        carry /= base;
    }
    // The digits that the largest carry takes.
    let mut most = task.length.unwrap_or(2) - 1;
    while most > 0 {
        sum.push(carry % base);
        carry /= base;
        most /= base;
    }
    sum.reverse();
    (terms.join("+") + "=", text(&sum)).into()
}

#[cfg(test)]
mod tests {
    use super::super::tests::draws;
    use super::*;
    use dreamc_dsl::spec::TaskKind;

    #[test]
    fn sums_are_those_of_arithmetic() {
        for (base, terms) in [(10, 2), (10, 12), (2, 2), (7, 3)] {
            let task = Task { size: base, length: Some(terms), ..Task::new(TaskKind::Sum, 1, 6) };
            let mut lengths = std::collections::HashSet::new();
            for drawn in draws(&task, 6, 200) {
                let number = |text: &str| u64::from_str_radix(text, base as u32).unwrap();
                let sum: u64 = drawn.prompt.trim_end_matches('=').split('+').map(number).sum();
                assert_eq!(number(&drawn.answer), sum, "{} {}", drawn.prompt, drawn.answer);
                lengths.insert(drawn.answer.len());
            }
            assert_eq!(lengths.len(), 1);
        }
    }
}

//! Multi-query associative recall (Zoology, arXiv 2312.04927, section 3).
//!
//! `steps` pairs of a key and a value, keys and values each without repetition; then every key once
//! more, in an order and at places that chance decides, with its value after it, which is asked.
//! The gaps have the paper's distribution: the place after gap `g` has weight `g^(a - 1)`, `a` =
//! 0.01. Other places hold any symbol. Keys are lower-case, values upper-case: `aQcT`, then
//! `xAaQ…`. In the paper the place after a key holds any symbol, its value being the target alone;
//! here a text goes on with the value.

use super::symbols::{lower, upper};
use super::{Drawn, Text, chosen};
use crate::rng::Stream;
use dreamc_dsl::spec::Task;

/// The exponent of the gaps, as in the paper's settings.
const POWER: f64 = 0.01;

/// Each key once, and its query, in the length of a text.
pub fn check(task: &Task) -> Result<(), String> {
    let (length, half) = (task.length.unwrap_or(0), task.size / 2);
    let most = task.difficulties().max().unwrap_or(0);
    if 4 * most > length {
        return Err(format!(
            "{most} pairs and their queries take {} symbols, length is {length}: use length {} or at most {} pairs",
            4 * most,
            4 * most,
            length / 4
        ));
    }
    if most > half {
        return Err(format!(
            "{most} pairs take as many keys, size {} has {half}: use size {} or at most {half} pairs",
            task.size,
            2 * most
        ));
    }
    Ok(())
}

/// Draws a problem.
pub fn problem(task: &Task, pairs: u64, random: &mut Stream) -> Drawn {
    let (length, half) = (task.length.unwrap_or(0), task.size / 2);
    let (keys, values) = (chosen(pairs, half, random), chosen(pairs, half, random));
    let mut text = Text::default();
    for (key, value) in keys.iter().zip(&values) {
        text.push(&lower(*key, half)).push(&upper(*value, half));
    }
    let places = (length - 2 * pairs) / 2;
    // Weighted choice without replacement: the smallest of `-ln(u) / weight` (Efraimidis).
    let mut drawn: Vec<(f64, u64)> = (0..places)
        .map(|gap| {
            let weight = POWER * ((gap + 1) as f64).powf(POWER - 1.0);
            (-(1.0 - random.unit()).ln() / weight, gap)
        })
        .collect();
    drawn.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut at: Vec<Option<usize>> = vec![None; places as usize];
    for (pair, (_, gap)) in drawn.iter().take(pairs as usize).enumerate() {
        at[*gap as usize] = Some(pair);
    }
    for pair in at {
        match pair {
            Some(pair) => {
                text.push(&lower(keys[pair], half)).ask(&upper(values[pair], half));
            }
            None => {
                for _ in 0..2 {
                    let any = random.below(2 * half);
                    text.push(&if any < half { lower(any, half) } else { upper(any - half, half) });
                }
            }
        }
    }
    text.drawn()
}

#[cfg(test)]
mod tests {
    use super::super::tests::{asked, draws};
    use super::*;
    use dreamc_dsl::spec::TaskKind;
    use std::collections::HashMap;

    fn task(size: u64, length: u64) -> Task {
        Task { size, length: Some(length), ..Task::new(TaskKind::Mqar, 1, 4) }
    }

    #[test]
    fn every_key_is_asked_once_and_has_its_value() {
        for drawn in draws(&task(52, 64), 4, 300) {
            let text: Vec<char> = drawn.answer.chars().collect();
            assert_eq!(text.len(), 64);
            let pairs: HashMap<char, char> = (0..4).map(|i| (text[2 * i], text[2 * i + 1])).collect();
            assert_eq!(pairs.len(), 4);
            let mut keys = vec![];
            for range in &drawn.asked {
                let key = text[range.start - 1];
                assert!(range.start >= 9 && range.len() == 1);
                assert_eq!(pairs[&key], text[range.start]);
                keys.push(key);
            }
            keys.sort();
            keys.dedup();
            assert_eq!(keys.len(), 4);
        }
    }

    /// Short gaps are the likelier: with weights `g^-0.99` over 28 places, four of them drawn
    /// without replacement, the first holds a query in most texts and the last seldom.
    #[test]
    fn gaps_follow_a_power_law() {
        let mut at = [0u64; 28];
        for drawn in draws(&task(52, 64), 4, 2000) {
            for range in asked(&drawn) {
                at[(range.start - 9) / 2] += 1;
            }
        }
        assert_eq!(at.iter().sum::<u64>(), 8000);
        let share = |i: usize| at[i] as f64 / 2000.0;
        assert!(share(0) > 0.6 && share(1) > 0.3 && share(1) < share(0), "{at:?}");
        let far: f64 = (20..28).map(share).sum::<f64>() / 8.0;
        assert!(far > 0.03 && far < 0.12, "{at:?}");
    }

    #[test]
    fn numbers_that_do_not_fit_say_what_would() {
        let refused =
            |size, length, pairs| check(&Task { max_steps: pairs, ..task(size, length) }).unwrap_err();
        assert!(refused(64, 64, 17).ends_with("use length 68 or at most 16 pairs"));
        assert!(refused(16, 64, 9).ends_with("use size 18 or at most 8 pairs"));
        let longer = Task { longer: vec![32], ..task(64, 64) };
        assert!(check(&longer).unwrap_err().contains("use length 128"));
    }
}

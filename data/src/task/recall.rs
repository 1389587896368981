//! In-context recall of MAD (arXiv 2403.17844, section 3.1), plain, noisy and fuzzy.
//!
//! Pairs of a key and a value, one after another, keys drawn with repetition; a key has the same
//! value throughout a text, and another in another text. Asked is the value of every key that came
//! before. Keys are lower-case, values upper-case. *Noisy*: in a place of five before a pair stands
//! a symbol of noise, a digit. *Fuzzy*: keys and values are of one to three symbols.

use super::symbols::{lower, upper};
use super::{Drawn, Text};
use crate::rng::Stream;
use dreamc_dsl::spec::Task;
use std::collections::HashMap;

/// The share of places before a pair that hold noise, as in the paper's settings.
const NOISE: f64 = 0.2;

/// Most symbols of a fuzzy key or value, as in the paper's settings.
const MOTIF: u64 = 3;

/// The kinds of recall.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Keys and values of one symbol.
    Plain,
    /// With noise among the pairs.
    Noisy,
    /// Keys and values of several symbols.
    Fuzzy,
}

/// Any numbers go together.
pub fn check(_: &Task) -> Result<(), String> {
    Ok(())
}

/// Draws a problem; the last pair asks for a key that came before.
pub fn problem(kind: Kind, task: &Task, pairs: u64, random: &mut Stream) -> Drawn {
    let half = task.size / 2;
    let mut known: HashMap<u64, String> = HashMap::new();
    // Fuzzy keys are those that one text has; as many as there are symbols.
    let names: Vec<String> = match kind {
        Kind::Plain | Kind::Noisy => (0..half).map(|k| lower(k, half)).collect(),
        Kind::Fuzzy => motifs(half, random),
    };
    let mut order: Vec<u64> = vec![];
    let mut text = Text::default();
    for pair in 0..pairs {
        if kind == Kind::Noisy && random.unit() < NOISE {
            text.push(&random.below(10).to_string());
        }
        let key = match pair + 1 == pairs {
            true => order[random.below(order.len() as u64) as usize],
            false => random.below(half),
        };
        order.push(key);
        text.push(&names[key as usize]);
        match known.get(&key) {
            Some(value) => text.ask(value),
            None => {
                let symbols = if kind == Kind::Fuzzy { 1 + random.below(MOTIF) } else { 1 };
                let value: String = (0..symbols).map(|_| upper(random.below(half), half)).collect();
                known.insert(key, value.clone());
                text.push(&value)
            }
        };
    }
    text.drawn()
}

/// `half` keys of one to three symbols; none begins another.
fn motifs(half: u64, random: &mut Stream) -> Vec<String> {
    let mut all: Vec<String> = vec![];
    // Keys of the longest are as many as the cube of the symbols: there are always more.
    let mut tries = 0u64;
    while (all.len() as u64) < half {
        tries += 1;
        // Short keys use up beginnings; after a while only the longest are drawn.
        let symbols = if tries > 4 * half { MOTIF } else { 1 + random.below(MOTIF) };
        let one: String = (0..symbols).map(|_| lower(random.below(half), half)).collect();
        if all.iter().all(|other| !one.starts_with(other.as_str()) && !other.starts_with(&one)) {
            all.push(one);
        } else if tries > 64 * (half + 16) {
            // Short keys left no beginning free: keys of one symbol each are always enough.
            all = (0..half).map(|k| lower(k, half)).collect();
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::super::tests::draws;
    use super::*;
    use dreamc_dsl::spec::TaskKind;

    #[test]
    fn a_key_that_came_before_has_its_value_and_is_asked() {
        for drawn in draws(&Task::new(TaskKind::Recall, 2, 32), 32, 200) {
            let text: Vec<char> = drawn.answer.chars().collect();
            assert_eq!(text.len(), 64);
            let mut known: HashMap<char, char> = HashMap::new();
            let mut asked = vec![];
            for (i, pair) in text.chunks(2).enumerate() {
                if let Some(value) = known.insert(pair[0], pair[1]) {
                    assert_eq!(value, pair[1]);
                    asked.push(2 * i + 1..2 * i + 2);
                }
            }
            assert_eq!(asked, drawn.asked);
            assert!(asked.len() >= 24, "eight keys: {}", asked.len());
        }
    }

    #[test]
    fn one_place_of_five_holds_noise() {
        let texts = draws(&Task::new(TaskKind::NoisyRecall, 2, 32), 32, 300);
        let noise: usize = texts.iter().map(|d| d.answer.chars().filter(char::is_ascii_digit).count()).sum();
        // 9,600 places: 1,920 with a standard deviation of 39.
        assert!((1760..2080).contains(&noise), "{noise}");
        for drawn in texts {
            assert!(drawn.asked.iter().all(|r| drawn.answer[r.clone()].chars().all(char::is_uppercase)));
        }
    }

    #[test]
    fn fuzzy_keys_are_read_in_one_way() {
        for drawn in draws(&Task::new(TaskKind::FuzzyRecall, 2, 16), 16, 200) {
            let mut known: HashMap<String, String> = HashMap::new();
            let (mut rest, mut at, mut asked) = (drawn.answer.as_str(), 0, vec![]);
            while !rest.is_empty() {
                let key = rest.chars().take_while(|c| c.is_lowercase()).count();
                let value = rest[key..].chars().take_while(|c| c.is_uppercase()).count();
                let pair = (rest[..key].to_string(), rest[key..key + value].to_string());
                assert!((1..=3).contains(&key) && (1..=3).contains(&value), "{}", drawn.answer);
                if let Some(before) = known.insert(pair.0, pair.1.clone()) {
                    assert_eq!(before, pair.1);
                    asked.push(at + key..at + key + value);
                }
                (rest, at) = (&rest[key + value..], at + key + value);
            }
            assert_eq!(asked, drawn.asked);
        }
    }
}

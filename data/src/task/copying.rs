//! Copying (arXiv 2402.01032, section 3) and selective copying (MAD, 2403.17844, section 3.1;
//! Mamba, 2312.00752, section 4.1.1).
//!
//! Copying: letters, a bar, the letters again: `cab|` gives `cab`. Selective copying: `steps`
//! symbols at places that chance decides among `length`, blanks (`.`) between them, and a bar; the
//! answer is the symbols in their order: `..c.a|` gives `ca`.

use super::symbols::{lower, symbol};
use super::{Drawn, chosen};
use crate::rng::Stream;
use dreamc_dsl::spec::Task;

/// Symbols have places of their own.
pub fn check(task: &Task) -> Result<(), String> {
    let most = task.difficulties().max().unwrap_or(0);
    match task.length {
        Some(length) if most > length => Err(format!(
            "{most} symbols take as many places, length is {length}: use length {most} or at most {length} symbols"
        )),
        _ => Ok(()),
    }
}

/// Draws a text to copy.
pub fn whole(task: &Task, steps: u64, random: &mut Stream) -> Drawn {
    let text: String = (0..steps).map(|_| lower(random.below(task.size), task.size)).collect();
    (format!("{text}|"), text).into()
}

/// Draws symbols among blanks.
pub fn selective(task: &Task, steps: u64, random: &mut Stream) -> Drawn {
    let length = task.length.unwrap_or(steps);
    let mut places = vec![None; length as usize];
    for place in chosen(steps, length, random) {
        places[place as usize] = Some(random.below(task.size));
    }
    let blank = ".".repeat(symbol(0, task.size).len());
    let prompt: String = places
        .iter()
        .map(|s| s.map_or(blank.clone(), |s| symbol(s, task.size)))
        .chain(["|".into()])
        .collect();
    let answer: String = places.into_iter().flatten().map(|s| symbol(s, task.size)).collect();
    (prompt, answer).into()
}

#[cfg(test)]
mod tests {
    use super::super::tests::draws;
    use super::*;
    use dreamc_dsl::spec::TaskKind;

    #[test]
    fn the_answer_is_the_text_without_blanks() {
        for drawn in draws(&Task::new(TaskKind::Copying, 1, 32), 32, 50) {
            assert_eq!(drawn.prompt, format!("{}|", drawn.answer));
            assert_eq!(drawn.answer.len(), 32);
        }
        let mut filled = [0u64; 64];
        for drawn in draws(&Task::new(TaskKind::SelectiveCopying, 1, 16), 16, 1000) {
            assert_eq!(drawn.prompt.replace('.', ""), format!("{}|", drawn.answer));
            assert_eq!((drawn.prompt.len(), drawn.answer.len()), (65, 16));
            drawn.prompt[..64].bytes().zip(&mut filled).for_each(|(b, n)| *n += u64::from(b != b'.'));
        }
        // Each place is filled in a quarter of 1,000 texts, with a standard deviation of 14.
        assert!(filled.iter().all(|n| (180..320).contains(n)), "{filled:?}");
    }

    #[test]
    fn more_symbols_than_places_are_refused() {
        let task = Task { length: Some(8), ..Task::new(TaskKind::SelectiveCopying, 1, 16) };
        assert!(check(&task).unwrap_err().ends_with("use length 16 or at most 8 symbols"));
    }
}

//! Induction heads, as H3 (arXiv 2212.14052, section 3.1) and Mamba (2312.00752, section 4.1.2) ask
//! for them: a mark stands once among random symbols and once more at their end, and the answer is
//! the symbol after the first: `cab|dac|` gives `d`. Trained on short texts and asked on long ones
//! (`longer`) it is the length-generalisation test of those papers.

use super::Drawn;
use super::symbols::symbol;
use crate::rng::Stream;
use dreamc_dsl::spec::Task;

/// The mark.
const MARK: char = '|';

/// Any numbers go together.
pub fn check(_: &Task) -> Result<(), String> {
    Ok(())
}

/// Draws a problem: the mark before any symbol.
pub fn problem(task: &Task, steps: u64, random: &mut Stream) -> Drawn {
    let symbols: Vec<u64> = (0..steps).map(|_| random.below(task.size)).collect();
    let place = random.below(steps) as usize;
    let mut prompt = String::new();
    for (i, s) in symbols.iter().enumerate() {
        if i == place {
            prompt.push(MARK);
        }
        prompt += &symbol(*s, task.size);
    }
    prompt.push(MARK);
    (prompt, symbol(symbols[place], task.size)).into()
}

#[cfg(test)]
mod tests {
    use super::super::tests::draws;
    use super::*;
    use dreamc_dsl::spec::TaskKind;

    #[test]
    fn the_answer_is_the_symbol_after_the_mark_wherever_it_stands() {
        let mut places = [0u64; 20];
        for drawn in draws(&Task::new(TaskKind::Induction, 2, 20), 20, 4000) {
            let at = drawn.prompt.find(MARK).unwrap();
            assert_eq!(drawn.prompt[at + 1..at + 2], drawn.answer);
            assert_eq!((drawn.prompt.len(), drawn.prompt.matches(MARK).count()), (22, 2));
            places[at] += 1;
        }
        // 200 each, with a standard deviation of 14.
        assert!(places.iter().all(|n| (130..270).contains(n)), "{places:?}");
    }
}

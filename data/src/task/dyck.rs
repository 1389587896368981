//! Dyck words of `size` kinds of bracket, at most `length` deep (arXiv 2010.07515): `steps`
//! brackets, at least one of them open, and the answer closes them: `([()=` gives `])`. Each
//! bracket is an opening one of any kind with probability one half, surely where nothing is open,
//! never at the greatest depth; the last one opens, or is left out, where nothing would be left
//! open otherwise.

use super::Drawn;
use crate::rng::Stream;
use dreamc_dsl::spec::Task;

const BRACKETS: [(char, char); 4] = [('(', ')'), ('[', ']'), ('{', '}'), ('<', '>')];

/// Any numbers go together.
pub fn check(_: &Task) -> Result<(), String> {
    Ok(())
}

/// Draws a problem.
pub fn problem(task: &Task, steps: u64, random: &mut Stream) -> Drawn {
    let depth = task.length.unwrap_or(1) as usize;
    let mut open: Vec<char> = vec![];
    let mut prompt = String::new();
    for i in 0..steps {
        let (opens, full) = (random.below(2) == 0, open.len() == depth);
        // Closed, it would leave nothing to ask.
        let needed = i + 1 == steps && open.len() == 1;
        if needed && full {
            break;
        }
        match open.last().copied().filter(|_| !needed && (full || !opens)) {
            Some(close) => {
                prompt.push(close);
                open.pop();
            }
            None => {
                let (bracket, close) = BRACKETS[random.below(task.size) as usize];
                prompt.push(bracket);
                open.push(close);
            }
        }
    }
    let answer: String = open.into_iter().rev().collect();
    (prompt + "=", answer).into()
}

#[cfg(test)]
mod tests {
    use super::super::tests::draws;
    use super::*;
    use dreamc_dsl::spec::TaskKind;

    #[test]
    fn words_are_closed_by_the_answer_and_no_deeper_than_asked() {
        for (size, depth) in [(1, 1), (2, 4), (4, 12)] {
            let task = Task { size, length: Some(depth), ..Task::new(TaskKind::Dyck, 1, 32) };
            let mut deepest = 0;
            for steps in [1, 2, 32, 33] {
                for drawn in draws(&task, steps, 200) {
                    let word = drawn.prompt.replace('=', "") + &drawn.answer;
                    let mut open = vec![];
                    for c in word.chars() {
                        match BRACKETS.iter().find(|b| b.0 == c) {
                            Some((_, close)) => open.push(*close),
                            None => assert_eq!(open.pop(), Some(c), "{word}"),
                        }
                        deepest = deepest.max(open.len() as u64);
                    }
                    assert!(open.is_empty() && !drawn.answer.is_empty(), "{word}");
                }
            }
            assert!(deepest <= depth && (depth > 4 || deepest == depth), "{deepest} of {depth}");
        }
    }
}

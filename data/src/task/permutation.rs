//! State tracking: `size` symbols in order, `steps` swaps of two places: `abcd 1-3 2-4 1-2 = `
//! gives `dcab`.

use super::Drawn;
use crate::rng::Stream;
use dreamc_dsl::spec::Task;

/// Any numbers go together.
pub fn check(_: &Task) -> Result<(), String> {
    Ok(())
}

/// Draws a problem.
pub fn problem(task: &Task, steps: u64, random: &mut Stream) -> Drawn {
    let size = task.size;
    let mut state: Vec<char> = (0..size).map(|i| char::from(b'a' + i as u8)).collect();
    let mut prompt: String = state.iter().collect();
    for _ in 0..steps {
        let i = random.below(size);
        let j = (i + 1 + random.below(size - 1)) % size;
        let (i, j) = (i.min(j), i.max(j));
        state.swap(i as usize, j as usize);
        prompt.push_str(&format!(" {}-{}", i + 1, j + 1));
    }
    prompt.push_str(" = ");
    (prompt, state.into_iter().collect::<String>()).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Philox;
    use dreamc_dsl::spec::TaskKind;

    #[test]
    fn answers_follow_from_the_text() {
        for i in 0..100 {
            let task = Task { size: 12, ..Task::new(TaskKind::Permutation, 1, 5) };
            let Drawn { prompt, answer, .. } = problem(&task, 5, &mut Philox::new(0, "t").stream(i));
            let mut words = prompt.trim_end_matches(" = ").split(' ');
            let mut state: Vec<char> = words.next().unwrap().chars().collect();
            for word in words {
                let (i, j) = word.split_once('-').unwrap();
                state.swap(i.parse::<usize>().unwrap() - 1, j.parse::<usize>().unwrap() - 1);
            }
            assert_eq!(state.iter().collect::<String>(), answer, "{prompt}");
        }
    }
}

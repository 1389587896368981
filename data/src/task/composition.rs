//! Function composition: a random table on `size` symbols, applied `steps` times:
//! `a>c b>a c>b fff a = ` gives `a`.

use super::{Drawn, symbol};
use crate::rng::Stream;
use dreamc_dsl::spec::Task;

/// Any numbers go together.
pub fn check(_: &Task) -> Result<(), String> {
    Ok(())
}

/// Draws a problem. The table's rows come in random order, so that a row is found by its symbol,
/// not its place.
pub fn problem(task: &Task, steps: u64, random: &mut Stream) -> Drawn {
    let size = task.size;
    let table: Vec<u64> = (0..size).map(|_| random.below(size)).collect();
    let mut order: Vec<u64> = (0..size).collect();
    for i in (1..size).rev() {
        order.swap(i as usize, random.below(i + 1) as usize);
    }
    let start = random.below(size);
    let end = (0..steps).fold(start, |x, _| table[x as usize]);
    let mut prompt = String::new();
    for x in order {
        prompt.push_str(&format!("{}>{} ", symbol(x), symbol(table[x as usize])));
    }
    for _ in 0..steps {
        prompt.push('f');
    }
    prompt.push_str(&format!(" {} = ", symbol(start)));
    (prompt, symbol(end)).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Philox;
    use dreamc_dsl::spec::TaskKind;
    use std::collections::HashMap;

    #[test]
    fn answers_follow_from_the_text() {
        for i in 0..100 {
            let task = Task { size: 30, ..Task::new(TaskKind::Composition, 1, 3) };
            let Drawn { prompt, answer, .. } = problem(&task, 3, &mut Philox::new(0, "t").stream(i));
            let words: Vec<&str> = prompt.split_whitespace().collect();
            let table: HashMap<&str, &str> = words.iter().filter_map(|w| w.split_once('>')).collect();
            assert_eq!(table.len(), 30);
            let [steps, start, "="] = words[30..] else { panic!("{prompt}") };
            assert_eq!(steps.chars().fold(start, |x, _| table[x]), answer, "{prompt}");
        }
    }
}

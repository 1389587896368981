//! Depo of "Physics of language models 4.1" (arXiv 2512.17351, task 1, in the manner of its Depo2):
//! a cycle of nodes as pairs of a node and the next, in any order, then questions: the node a
//! number of places further. Names have five to seven letters of three, the last one upper-case. Of
//! `n` nodes, `size` at most, the authors' generator draws `n` with weight `1 / (n + √size)` from 3
//! on, and so does this one; `length` nodes are asked, or all where there are fewer.
//! `abcabCbbacA…`, then ` 2abcabC=bbacA`. In the paper every question has a number of hops of its
//! own, and tests have `size` nodes; here the hops of a text are its difficulty.

use super::{Drawn, Text, chosen};
use crate::rng::Stream;
use dreamc_dsl::spec::Task;
use std::collections::HashSet;

/// Letters of names.
const LETTERS: u64 = 3;
/// Fewest letters of a name, and most.
const NAME: [u64; 2] = [5, 7];

/// Any numbers go together.
pub fn check(_: &Task) -> Result<(), String> {
    Ok(())
}

/// A number from 3 to `most`, small ones the likelier.
fn nodes(most: u64, random: &mut Stream) -> u64 {
    let weight = |n: u64| 1.0 / (n as f64 + (most as f64).sqrt());
    let mut left = random.unit() * (3..=most).map(weight).sum::<f64>();
    let found = (3..=most).find(|&n| {
        left -= weight(n);
        left < 0.0
    });
    found.unwrap_or(most)
}

/// `count` different names.
fn names(count: u64, random: &mut Stream) -> Vec<String> {
    let (mut seen, mut all) = (HashSet::new(), vec![]);
    while (all.len() as u64) < count {
        let length = NAME[0] + random.below(NAME[1] - NAME[0] + 1);
        let letter = |_| char::from(b'a' + random.below(LETTERS) as u8);
        let mut name: String = (0..length).map(letter).collect();
        let last = name.pop().map(|c| c.to_ascii_uppercase());
        name.extend(last);
        if seen.insert(name.clone()) {
            all.push(name);
        }
    }
    all
}

/// Draws a problem.
pub fn problem(task: &Task, hops: u64, random: &mut Stream) -> Drawn {
    let n = nodes(task.size, random);
    let names = names(n, random);
    let after = |node: u64, hops: u64| &names[((node + hops % n) % n) as usize];
    let mut text = Text::default();
    for node in chosen(n, n, random) {
        text.push(after(node, 0)).push(after(node, 1));
    }
    for node in chosen(n.min(task.length.unwrap_or(1)), n, random) {
        text.push(&format!(" {hops}{}=", after(node, 0))).ask(after(node, hops));
    }
    text.drawn()
}

#[cfg(test)]
mod tests {
    use super::super::tests::{asked, draws};
    use super::*;
    use dreamc_dsl::spec::TaskKind;
    use std::collections::HashMap;

    fn task(size: u64) -> Task {
        Task { size, length: Some(4), ..Task::new(TaskKind::Depo, 1, 16) }
    }

    /// The names of a text; each ends with an upper-case letter.
    fn read(text: &str) -> Vec<&str> {
        text.split_inclusive(|c: char| c.is_ascii_uppercase()).collect()
    }

    #[test]
    fn answers_are_so_many_places_further() {
        for hops in [1, 3, 16] {
            for drawn in draws(&task(9), hops, 100) {
                let edges = read(drawn.answer.split(' ').next().unwrap());
                let next: HashMap<&str, &str> = edges.chunks(2).map(|e| (e[0], e[1])).collect();
                assert!((3..=9).contains(&next.len()) && edges.len() == 2 * next.len());
                for range in asked(&drawn) {
                    let before = &drawn.answer[..range.start - 1];
                    let name =
                        before.rsplit(' ').next().unwrap().trim_start_matches(|c: char| c.is_ascii_digit());
                    let end = (0..hops).fold(name, |at, _| next[at]);
                    assert_eq!(&drawn.answer[range.clone()], end);
                    assert!((5..=7).contains(&end.len()));
                }
                assert_eq!(asked(&drawn).len(), next.len().min(4));
            }
        }
    }

    /// Of 3 to 12 nodes with weight 1 / (n + √12): three in 0.155 of the texts, twelve in 0.065.
    #[test]
    fn small_cycles_are_the_likelier() {
        let mut counts = [0u64; 13];
        for drawn in draws(&task(12), 1, 4000) {
            counts[read(drawn.answer.split(' ').next().unwrap()).len() / 2] += 1;
        }
        let total: f64 = (3..=12).map(|n| 1.0 / (f64::from(n) + 12f64.sqrt())).sum();
        for (n, count) in counts.iter().enumerate().skip(3) {
            let share = 1.0 / (n as f64 + 12f64.sqrt()) / total;
            let found = *count as f64 / 4000.0;
            assert!((found - share).abs() < 0.02, "{n}: {found} for {share}");
        }
    }
}

//! Word problems of groups (arXiv 2404.08819, section 5): the product of permutations of `size`
//! letters, any of them (S3, S5) or the even ones (A5). An element is the symbol of its number in
//! lexicographic order, one character up to 62 elements, two above. `steps` factors, left to right:
//! the state is permuted by each in turn, `s[i] = s[f[i]]`. `bac=` gives one element. The paper
//! asks for the product after every factor; here it is asked after the last.

use super::Drawn;
use super::symbols::symbol;
use crate::rng::Stream;
use dreamc_dsl::spec::Task;

/// Which permutations a group has.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// All.
    Symmetric,
    /// The even ones.
    Alternating,
}

/// Any numbers go together.
pub fn check(_: &Task) -> Result<(), String> {
    Ok(())
}

/// The elements of a group on `letters` letters, in lexicographic order.
fn elements(group: Group, letters: u64) -> Vec<Vec<usize>> {
    let mut all: Vec<Vec<usize>> = vec![vec![]];
    for _ in 0..letters {
        let longer = |p: &Vec<usize>| {
            let rest = (0..letters as usize).filter(|i| !p.contains(i)).collect::<Vec<_>>();
            rest.into_iter().map(|i| [&p[..], &[i]].concat()).collect::<Vec<_>>()
        };
        all = all.iter().flat_map(longer).collect();
    }
    let even = |p: &Vec<usize>| {
        let swaps = (0..p.len()).map(|i| p[i + 1..].iter().filter(|j| **j < p[i]).count()).sum::<usize>();
        swaps.is_multiple_of(2)
    };
    match group {
        Group::Symmetric => all,
        Group::Alternating => all.into_iter().filter(even).collect(),
    }
}

/// Draws a problem.
pub fn problem(group: Group, task: &Task, steps: u64, random: &mut Stream) -> Drawn {
    let all = elements(group, task.size);
    let order = all.len() as u64;
    let mut state: Vec<usize> = (0..task.size as usize).collect();
    let mut prompt = String::new();
    for _ in 0..steps {
        let factor = random.below(order);
        state = all[factor as usize].iter().map(|&i| state[i]).collect();
        prompt += &symbol(factor, order);
    }
    let product = all.iter().position(|p| *p == state).unwrap_or_default() as u64;
    (prompt + "=", symbol(product, order)).into()
}

#[cfg(test)]
mod tests {
    use super::super::tests::draws;
    use super::*;
    use dreamc_dsl::spec::TaskKind;
    use std::collections::HashMap;

    #[test]
    fn groups_have_their_orders_and_are_closed() {
        let of = [(Group::Symmetric, 3, 6), (Group::Symmetric, 5, 120), (Group::Alternating, 5, 60)];
        for (group, letters, order) in of {
            let all = elements(group, letters);
            assert_eq!(all.len(), order);
            assert!(all.is_sorted() && all[0].is_sorted());
            for a in &all[..6] {
                for b in &all {
                    let product: Vec<usize> = b.iter().map(|&i| a[i]).collect();
                    assert!(all.contains(&product));
                }
            }
        }
    }

    /// The identity leaves a product as it is, inverses cancel, and products are spread evenly.
    #[test]
    fn products_are_those_of_the_group() {
        let task = Task { size: 3, ..Task::new(TaskKind::Symmetric, 1, 16) };
        let mut single: HashMap<String, String> = HashMap::new();
        for drawn in draws(&task, 1, 100) {
            single.insert(drawn.prompt, drawn.answer);
        }
        assert_eq!(single.len(), 6);
        assert!(single.iter().all(|(prompt, answer)| prompt.trim_end_matches('=') == answer));
        // By hand: `b` swaps the last two places, `c` the first two.
        let all = elements(Group::Symmetric, 3);
        let (b, c) = (&all[1], &all[2]);
        assert_eq!((b, c), (&vec![0, 2, 1], &vec![1, 0, 2]));
        let expected = vec![2, 0, 1];
        for drawn in draws(&task, 2, 400).into_iter().filter(|d| d.prompt == "bc=") {
            assert_eq!(drawn.answer, symbol(all.iter().position(|p| *p == expected).unwrap() as u64, 6));
        }
        let mut counts = [0u64; 6];
        for drawn in draws(&task, 7, 3000) {
            counts[(drawn.answer.as_bytes()[0] - b'a') as usize] += 1;
        }
        assert!(counts.iter().all(|n| (400..600).contains(n)), "{counts:?}");
    }
}

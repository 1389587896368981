//! Brevo of "Physics of language models 4.1" (arXiv 2512.17351, task 2, in the manner of its
//! Brevo1): a graph of `steps` nodes without cycles, named by `size` symbols, as pairs of a node
//! and one that depends on it, in any order; then a node, and all that it depends on in an order in
//! which it can be made. Graphs are the authors': up to a quarter of the nodes and one depend on
//! nothing, every other on one to four before it, each with at most four dependents, and the last
//! one is asked. `ab cb bd ?d=acbd`. The paper takes any right order, and trains on one that chance
//! chooses; here the order is the one whose next symbol is always the first there can be, so that
//! one answer is right. Texts of the paper have fewer nodes with more probability.

use super::symbols::symbol;
use super::{Drawn, chosen};
use crate::rng::Stream;
use dreamc_dsl::spec::Task;

/// Most nodes that a node depends on, and most that depend on it.
const DEGREE: usize = 4;

/// A symbol for each node.
pub fn check(task: &Task) -> Result<(), String> {
    let most = task.difficulties().max().unwrap_or(0);
    if most > task.size {
        return Err(format!(
            "{most} nodes take as many symbols, size is {}: use size {most} or at most {} nodes",
            task.size, task.size
        ));
    }
    Ok(())
}

/// Needs of each node of a graph, by places: all of them before it.
fn graph(n: usize, random: &mut Stream) -> Vec<Vec<usize>> {
    let mut needs: Vec<Vec<usize>> = vec![vec![]; n];
    let mut dependents = vec![0; n];
    let leaves = 1 + random.below((n as u64 - 1) / 4 + 1) as usize;
    for (node, needs) in needs.iter_mut().enumerate().skip(leaves) {
        let free: Vec<usize> = (0..node).filter(|&i| dependents[i] < DEGREE).collect();
        let most = free.len().min(DEGREE) as u64;
        if most == 0 {
            continue;
        }
        for i in chosen(1 + random.below(most), free.len() as u64, random) {
            needs.push(free[i as usize]);
            dependents[free[i as usize]] += 1;
        }
    }
    needs
}

/// The nodes that one depends on, and itself, in the order whose next name is the least there can
/// be.
fn order(needs: &[Vec<usize>], of: usize, names: &[u64]) -> Vec<usize> {
    let mut wanted = vec![false; needs.len()];
    let mut open = vec![of];
    while let Some(node) = open.pop() {
        if !std::mem::replace(&mut wanted[node], true) {
            open.extend(&needs[node]);
        }
    }
    let mut made = vec![];
    let mut left: Vec<usize> = (0..needs.len()).filter(|&i| wanted[i]).collect();
    // Some node is always ready: needs stand before it.
    while let Some(next) =
        left.iter().copied().filter(|&i| needs[i].iter().all(|n| made.contains(n))).min_by_key(|&i| names[i])
    {
        made.push(next);
        left.retain(|&i| i != next);
    }
    made
}

/// Draws a problem.
pub fn problem(task: &Task, nodes: u64, random: &mut Stream) -> Drawn {
    let names = chosen(nodes, task.size, random);
    let last = names.len() - 1;
    // A last node that depends on nothing, because all before it have their dependents, asks
    // nothing.
    let needs = loop {
        let found = graph(names.len(), random);
        if !found[last].is_empty() {
            break found;
        }
    };
    let name = |node: usize| symbol(names[node], task.size);
    let edges: Vec<(usize, usize)> =
        needs.iter().enumerate().flat_map(|(to, from)| from.iter().map(move |f| (*f, to))).collect();
    let mut text = String::new();
    for i in chosen(edges.len() as u64, edges.len() as u64, random) {
        let (from, to) = edges[i as usize];
        text += &format!("{}{} ", name(from), name(to));
    }
    let answer: String = order(&needs, last, &names).into_iter().map(name).collect();
    (format!("{text}?{}=", name(last)), answer).into()
}

#[cfg(test)]
mod tests {
    use super::super::tests::draws;
    use super::*;
    use dreamc_dsl::spec::TaskKind;

    fn task() -> Task {
        Task { size: 26, ..Task::new(TaskKind::Brevo, 3, 20) }
    }

    #[test]
    fn answers_are_all_that_is_needed_in_an_order_that_can_be() {
        for nodes in [3, 8, 20] {
            for drawn in draws(&task(), nodes, 200) {
                let (edges, asked) = drawn.prompt.split_once('?').unwrap();
                let edges: Vec<(char, char)> = edges
                    .split_whitespace()
                    .map(|e| (e.chars().next().unwrap(), e.chars().nth(1).unwrap()))
                    .collect();
                let asked = asked.chars().next().unwrap();
                let mut needed = vec![asked];
                let mut at = 0;
                while at < needed.len() {
                    let more: Vec<char> = edges.iter().filter(|e| e.1 == needed[at]).map(|e| e.0).collect();
                    needed.extend(more.into_iter().filter(|c| !needed.contains(c)).collect::<Vec<_>>());
                    at += 1;
                }
                let answer: Vec<char> = drawn.answer.chars().collect();
                assert_eq!(answer.len(), needed.len(), "{drawn:?}");
                for (i, node) in answer.iter().enumerate() {
                    let of: Vec<char> = edges.iter().filter(|e| e.1 == *node).map(|e| e.0).collect();
                    assert!(of.len() <= DEGREE && of.iter().all(|c| answer[..i].contains(c)), "{drawn:?}");
                    assert!(edges.iter().filter(|e| e.0 == *node).count() <= DEGREE);
                }
                assert_eq!(answer.last(), Some(&asked));
            }
        }
    }

    /// Shares of graphs of ten nodes by how many nodes are answered, and the mean of their edges,
    /// of 20,000 graphs that the authors' code drew (`brevo.py` of PhysicsLM4).
    #[test]
    fn graphs_are_drawn_as_the_authors_draw_them() {
        const ANSWERED: [f64; 9] = [0.032, 0.035, 0.046, 0.070, 0.115, 0.168, 0.214, 0.207, 0.112];
        const EDGES: f64 = 18.305;
        let (mut answered, mut edges) = ([0.0; 9], 0.0);
        for drawn in draws(&task(), 10, 4000) {
            answered[drawn.answer.len() - 2] += 1.0 / 4000.0;
            edges += drawn.prompt.matches(' ').count() as f64 / 4000.0;
        }
        assert!((edges - EDGES).abs() < 0.3, "{edges}");
        for (found, share) in answered.iter().zip(ANSWERED) {
            assert!((found - share).abs() < 0.025, "{answered:?}");
        }
    }

    #[test]
    fn the_least_that_is_ready_is_next() {
        // 3 needs 1 and 2, which need 0; names b, d, c, a.
        let needs = vec![vec![], vec![0], vec![0], vec![1, 2]];
        assert_eq!(order(&needs, 3, &[1, 3, 2, 0]), [0, 2, 1, 3]);
        assert_eq!(order(&needs, 1, &[1, 3, 2, 0]), [0, 1]);
    }

    #[test]
    fn more_nodes_than_symbols_say_what_would_fit() {
        let refused = check(&Task { size: 12, ..task() }).unwrap_err();
        assert!(refused.ends_with("use size 20 or at most 12 nodes"), "{refused}");
    }
}

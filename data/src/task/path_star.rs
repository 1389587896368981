//! Paths of a star (arXiv 2403.06963, section 4): from a start, `size` paths of `steps` edges each,
//! nodes named by `length` symbols without repetition, edges in any order; asked is the path from
//! the start to the end of one. `ab|cd|bc|…/a,d=a,b,c,d`.

use super::symbols::symbol;
use super::{Drawn, chosen};
use crate::rng::Stream;
use dreamc_dsl::spec::Task;

/// A symbol for each node.
pub fn check(task: &Task) -> Result<(), String> {
    let (most, length) = (task.difficulties().max().unwrap_or(0), task.length.unwrap_or(0));
    let needed = 1 + most.saturating_mul(task.size);
    if needed > length {
        return Err(format!(
            "{} paths of {most} edges have {needed} nodes, length {length} names no more: use length {needed} or at most {} edges",
            task.size,
            length.saturating_sub(1) / task.size.max(1)
        ));
    }
    Ok(())
}

/// Draws a problem.
pub fn problem(task: &Task, edges: u64, random: &mut Stream) -> Drawn {
    let length = task.length.unwrap_or(0);
    let nodes = chosen(1 + edges * task.size, length, random);
    let name = |node: u64| symbol(node, length);
    let path = |arm: u64| {
        let first = 1 + (arm * edges) as usize;
        [&nodes[..1], &nodes[first..first + edges as usize]].concat()
    };
    let pairs: Vec<(u64, u64)> = (0..task.size)
        .flat_map(|arm| path(arm).windows(2).map(|w| (w[0], w[1])).collect::<Vec<_>>())
        .collect();
    let order = chosen(pairs.len() as u64, pairs.len() as u64, random);
    let written: Vec<String> = order
        .iter()
        .map(|i| pairs[*i as usize])
        .map(|(from, to)| format!("{},{}", name(from), name(to)))
        .collect();
    let answer: Vec<String> = path(random.below(task.size)).into_iter().map(name).collect();
    let (start, goal) = (name(nodes[0]), answer.last().cloned().unwrap_or_default());
    (format!("{}/{start},{goal}=", written.join("|")), answer.join(",")).into()
}

#[cfg(test)]
mod tests {
    use super::super::tests::draws;
    use super::*;
    use dreamc_dsl::spec::TaskKind;
    use std::collections::HashMap;

    fn task() -> Task {
        Task { size: 3, length: Some(50), ..Task::new(TaskKind::PathStar, 1, 6) }
    }

    #[test]
    fn the_answer_is_the_one_path_to_the_goal() {
        for edges in [1, 5] {
            for drawn in draws(&task(), edges, 200) {
                let (graph, asked) = drawn.prompt.split_once('/').unwrap();
                let pairs: Vec<(&str, &str)> = graph.split('|').map(|e| e.split_once(',').unwrap()).collect();
                assert_eq!(pairs.len() as u64, 3 * edges);
                let before: HashMap<&str, &str> = pairs.iter().map(|(from, to)| (*to, *from)).collect();
                assert_eq!(before.len(), pairs.len());
                let (start, goal) = asked.trim_end_matches('=').split_once(',').unwrap();
                // From the goal there is one way back.
                let mut path = vec![goal];
                while let Some(from) = before.get(path[path.len() - 1]) {
                    path.push(from);
                }
                path.reverse();
                assert_eq!(path[0], start);
                assert_eq!(drawn.answer, path.join(","));
                assert_eq!(pairs.iter().filter(|(from, _)| *from == start).count(), 3);
            }
        }
    }

    #[test]
    fn graphs_with_more_nodes_than_names_say_what_would_fit() {
        let refused = check(&Task { max_steps: 20, ..task() }).unwrap_err();
        assert!(refused.ends_with("use length 61 or at most 16 edges"), "{refused}");
    }
}

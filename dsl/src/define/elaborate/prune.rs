//! Taking values and weights away that the result does not depend on.

use super::*;

/// Leaves what the result and some other values depend on.
pub(super) fn prune(graph: &mut Graph, kept: &[ValueId]) {
    let roots: Vec<ValueId> = kept.iter().chain(&graph.losses).copied().collect();
    let moved = leave(&mut graph.region, &roots);
    graph.losses.iter_mut().for_each(|id| *id = ValueId(moved[id.0 as usize]));
    let mut used = vec![false; graph.weights.len()];
    for node in &graph.region.nodes {
        if let Function::Weight(id) = node.function {
            used[id.0 as usize] = true;
        }
    }
    let places = places(&used);
    for node in &mut graph.region.nodes {
        if let Function::Weight(id) = &mut node.function {
            *id = WeightId(places[id.0 as usize]);
        }
    }
    let mut used = used.into_iter();
    graph.weights.retain(|_| used.next().unwrap_or(false));
}

/// Leaves the values of a region that its results and some others depend on; their new places.
fn leave(region: &mut Region, roots: &[ValueId]) -> Vec<u32> {
    let mut used = vec![false; region.nodes.len()];
    for root in region.results.iter().chain(roots) {
        used[root.0 as usize] = true;
    }
    for place in (0..region.nodes.len()).rev() {
        if used[place] {
            region.nodes[place].args.iter().for_each(|arg| used[arg.0 as usize] = true);
        }
    }
    let places = places(&used);
    let mut kept = used.iter().copied();
    region.nodes.retain(|_| kept.next().unwrap_or(false));
    let moved = |id: &mut ValueId| *id = ValueId(places[id.0 as usize]);
    for node in &mut region.nodes {
        node.args.iter_mut().for_each(moved);
        if let Function::Recurrence(recurrence) = &mut node.function {
            let _ = leave(&mut recurrence.body, &[]);
        }
        if let Function::Attend(attend) = &mut node.function {
            for region in attend.score.iter_mut().chain(&mut attend.mask) {
                let _ = leave(region, &[]);
            }
        }
    }
    region.results.iter_mut().for_each(moved);
    places
}

/// The new place of each thing that is used.
fn places(used: &[bool]) -> Vec<u32> {
    let mut next = 0;
    let place = |used: &bool| {
        let place = next;
        next += u32::from(*used);
        place
    };
    used.iter().map(place).collect()
}

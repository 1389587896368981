//! The price of a row kernel: the steps of a thread one after another.

use crate::codegen::Turns;
use std::collections::BTreeSet;

/// A step of a thread, for what a launch costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// A loop that is gone through so often begins, or a branch.
    Open { turns: u64, of_loop: bool },
    /// The innermost of them ends.
    Close,
    /// The row's threads wait for each other; whether they are a block.
    Wait { block: bool },
    /// Threads join their parts by shuffles.
    Join,
    /// Numbers of the row of an operand are loaded.
    Load(usize),
    /// Numbers of the row of an output are stored.
    Store,
}

/// Steps joined: loops multiply what they hold, and a barrier, a store to memory or an end of a
/// loop ends a run of loads, over which none of the next is moved. Rows that were read before come
/// from the cache of the processor.
pub(super) fn turns(steps: &[Step]) -> Turns {
    let mut of = Turns::default();
    let (mut open, mut now): (Vec<(u64, bool)>, u64) = (vec![], 1);
    let (mut loading, mut seen) = (false, BTreeSet::new());
    for step in steps {
        match *step {
            Step::Open { turns, of_loop } => {
                open.push((now, of_loop));
                now = now.saturating_mul(turns.max(1));
                loading &= !of_loop;
            }
            Step::Close => {
                let (before, of_loop) = open.pop().unwrap_or((1, false));
                now = before;
                loading &= !of_loop;
            }
            Step::Wait { block } => {
                of.barriers = of.barriers.saturating_add(if block { now } else { 0 });
                loading = false;
            }
            Step::Join => of.reductions = of.reductions.saturating_add(now),
            Step::Load(operand) if seen.insert(operand) => {
                of.trips = of.trips.saturating_add(if loading { 0 } else { now });
                loading = true;
            }
            Step::Load(_) => {}
            Step::Store => loading = false,
        }
    }
    of
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two rows of 2048 are read by 256 threads in eight accesses each, and four are under way at
    /// once; a norm waits for all of them, and what is read a second time comes from the cache.
    #[test]
    fn round_trips_barriers_and_reductions_of_a_row_are_counted() {
        use Step::*;
        let open = |turns| Open { turns, of_loop: true };
        let steps = [
            open(3),
            open(2),
            Load(0),
            Close,
            Join,
            Wait { block: true },
            open(2),
            Load(0),
            Load(1),
            Store,
            Close,
            Wait { block: false },
            Wait { block: true },
            Close,
        ];
        // Each of three turns: two runs of four loads; then two of row 1, as row 0 is known.
        assert_eq!(turns(&steps), Turns { trips: 3 * (2 + 2), barriers: 6, reductions: 3 });
        // Loads of a branch and those after it are under way at once.
        let branch = [Open { turns: 1, of_loop: false }, Load(0), Close, Load(1), Store, Load(2)];
        assert_eq!(turns(&branch), Turns { trips: 2, barriers: 0, reductions: 0 });
    }
}

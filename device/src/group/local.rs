//! A group of threads in one process: for proofs and tests.

use super::{Collective, Group, GroupError, Transport, combine};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Where the ranks meet.
struct Hall {
    state: Mutex<State>,
    changed: Condvar,
    patience: Duration,
}

#[derive(Default)]
struct State {
    /// Collectives that are complete.
    round: u64,
    /// The bytes that each rank brought to the one under way.
    brought: Vec<Option<(Collective, Vec<u8>)>>,
    /// All that was brought to the last that is complete.
    complete: Arc<Vec<(Collective, Vec<u8>)>>,
    /// The first rank that failed or left.
    failed: Option<GroupError>,
}

/// A rank's end of the hall.
struct Local {
    rank: u64,
    hall: Arc<Hall>,
}

/// The ranks of a group of threads, to be handed to one thread each. Each of them that is dropped
/// has left the group.
pub fn groups(size: u64, patience: Duration) -> Vec<Group> {
    let brought = (0..size).map(|_| None).collect();
    let state = Mutex::new(State { brought, ..State::default() });
    let hall = Arc::new(Hall { state, changed: Condvar::new(), patience });
    (0..size).map(|rank| Group::over(rank, size, Arc::new(Local { rank, hall: hall.clone() }))).collect()
}

impl Local {
    fn state(&self) -> MutexGuard<'_, State> {
        self.hall.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn give_up(&self, error: GroupError) {
        self.state().failed.get_or_insert(error);
        self.hall.changed.notify_all();
    }
}

impl Transport for Local {
    fn exchange(&self, what: Collective, bytes: &[u8]) -> Result<Vec<u8>, GroupError> {
        let begun = Instant::now();
        let mut state = self.state();
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        let round = state.round;
        state.brought[self.rank as usize] = Some((what, bytes.to_vec()));
        if state.brought.iter().all(Option::is_some) {
            let all = state.brought.iter_mut().filter_map(Option::take).collect();
            (state.complete, state.round) = (Arc::new(all), round + 1);
            self.hall.changed.notify_all();
        }
        while state.round == round {
            if let Some(error) = &state.failed {
                return Err(error.clone());
            }
            let Some(left) = self.hall.patience.checked_sub(begun.elapsed()) else {
                let silent = state.brought.iter().position(Option::is_none).unwrap_or(0) as u64;
                let error = GroupError::Silent { rank: silent, seconds: self.hall.patience.as_secs() };
                drop(state);
                self.give_up(error.clone());
                return Err(error);
            };
            let waited = self.hall.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let all = state.complete.clone();
        drop(state);
        let first = all[0].0;
        if let Some(rank) = all.iter().position(|(other, _)| *other != first) {
            let (theirs, first) = (all[rank].0.to_string(), first.to_string());
            return Err(GroupError::Apart { rank: rank as u64, theirs, first });
        }
        let parts: Vec<&[u8]> = all.iter().map(|(_, bytes)| bytes.as_slice()).collect();
        combine(what, &parts, self.rank)
    }

    fn failed(&self) -> Option<GroupError> {
        self.state().failed.clone()
    }

    fn fail(&self, reason: &str) {
        self.give_up(GroupError::Failed { rank: self.rank, reason: reason.into() });
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.give_up(GroupError::Ended { rank: self.rank });
    }
}

//! The order of work on several streams: what comes after what, and exchanges that something does
//! not come after.
//!
//! *In*: work as it is given, events, and what threads have seen done. *Out*: [`Known`], of each
//! piece of work what it comes after, and [`Flight`]s, exchanges whose numbers nobody may touch
//! meanwhile. *Promise*: work of two streams is in order where an event, or a thread that saw one
//! of them done, says so, and not because it happened to run so.
//!
//! From the *CUDA Programming Guide*, "Events" and "Implicit Synchronization", and NVIDIA's *NCCL*,
//! "Using NCCL with CUDA streams".

use std::collections::BTreeMap;

/// Of each stream the number of the last work that is done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Known(BTreeMap<u64, u64>);

impl Known {
    /// Work of a stream is done, up to a number.
    pub fn reach(&mut self, stream: u64, number: u64) {
        let own = self.0.entry(stream).or_default();
        *own = (*own).max(number);
    }

    /// Whether work of a stream is done.
    pub fn has(&self, stream: u64, number: u64) -> bool {
        self.0.get(&stream).is_some_and(|own| *own >= number)
    }

    /// All that another knows.
    pub fn learn(&mut self, other: &Known) {
        other.0.iter().for_each(|(&stream, &number)| self.reach(stream, number));
    }
}

/// Bytes of a card's memory: where they begin, and how many.
pub type Range = (u64, u64);

/// Whether two have a byte in common.
pub fn meet(a: Range, b: Range) -> bool {
    a.0 < b.0.saturating_add(b.1) && b.0 < a.0.saturating_add(a.1)
}

/// An exchange that some work may not come after.
#[derive(Clone, Debug)]
pub struct Flight {
    /// Its stream, and its number.
    pub stream: u64,
    /// See `stream`.
    pub given: u64,
    /// The work that it comes after.
    pub known: Known,
    /// Memory that it reads.
    pub reads: Vec<Range>,
    /// Memory that it writes.
    pub writes: Vec<Range>,
}

impl Flight {
    /// Whether it is in order with work of another stream that comes after `known`.
    pub fn in_order(&self, (stream, given): (u64, u64), known: &Known) -> bool {
        stream == self.stream || known.has(self.stream, self.given) || self.known.has(stream, given)
    }

    /// The problem of work that reads and writes this meanwhile.
    pub fn problem(&self, reads: &[Range], writes: &[Range]) -> Option<&'static str> {
        let any = |own: &[Range], other: &[Range]| own.iter().any(|&a| other.iter().any(|&b| meet(a, b)));
        if any(&self.writes, reads) {
            Some("reads what an exchange still writes")
        } else if any(&self.writes, writes) || any(&self.reads, writes) {
            Some("writes what an exchange still has")
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_knows_of_neither_is_out_of_order() {
        let flight = Flight {
            stream: 1,
            given: 5,
            known: Known::default(),
            reads: vec![(0, 4)],
            writes: vec![(8, 4)],
        };
        let mut known = Known::default();
        assert!(!flight.in_order((2, 6), &known));
        known.reach(1, 4);
        assert!(!flight.in_order((2, 6), &known), "an earlier exchange is done");
        let mut other = Known::default();
        other.reach(1, 5);
        known.learn(&other);
        assert!(flight.in_order((2, 6), &known) && flight.in_order((1, 6), &Known::default()));
        let mut after = flight.clone();
        after.known.reach(2, 6);
        assert!(after.in_order((2, 6), &Known::default()) && !after.in_order((2, 7), &Known::default()));
        assert_eq!(flight.problem(&[(0, 8)], &[(12, 4)]), None);
        assert!(flight.problem(&[(11, 1)], &[]).is_some_and(|words| words.starts_with("reads")));
        assert!(flight.problem(&[], &[(3, 1)]).is_some_and(|words| words.starts_with("writes")));
        assert!(flight.problem(&[], &[(0, 9)]).is_some_and(|words| words.starts_with("writes")));
    }
}

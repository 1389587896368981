//! Generated reasoning tasks: problems whose difficulty is a number of composed steps.
//!
//! *In*: a [`Task`], a seed, a split, an index. *Out*: a [`Problem`]. *Promise*: a function of
//! these four and nothing else; no problem of the training split is in the test split or the
//! reverse, whatever the seeds, since the split is decided by a hash of the problem itself; answers
//! are unique, so exact match is the score.
//!
//! One file a task, each with one function from (size, steps, random numbers) to a problem.

mod arithmetic;
mod composition;
mod permutation;

use super::DataError;
use crate::rng::{Philox, Stream};
use dreamc_dsl::spec::{Task, TaskKind};

/// A problem and its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The prompt, up to where the answer begins.
    pub prompt: String,
    /// The one right continuation.
    pub answer: String,
    /// Composed steps.
    pub steps: u64,
}

/// The two disjoint halves of a task's problems.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// To learn from.
    Train,
    /// Held out: one problem in [`HELD_OUT`].
    Test,
}

/// One problem in so many is held out.
pub const HELD_OUT: u64 = 8;

/// Problems drawn before a task is declared too small to have both splits.
const ATTEMPTS: u64 = 4096;

/// Most steps of a problem, so that a slip of the finger does not fill the memory.
const MOST_STEPS: u64 = 10_000;

impl Split {
    /// The split a problem belongs to.
    pub fn of(prompt: &str) -> Split {
        let hash = blake3::hash(prompt.as_bytes());
        let word = u64::from_le_bytes(std::array::from_fn(|i| hash.as_bytes()[i]));
        if word.is_multiple_of(HELD_OUT) { Split::Test } else { Split::Train }
    }
}

/// The problems of a task in one split, by index.
#[derive(Clone, Debug)]
pub struct Problems {
    task: Task,
    split: Split,
    philox: Philox,
}

impl Problems {
    /// Checks the task's numbers.
    pub fn new(task: &Task, seed: u64, split: Split) -> Result<Self, DataError> {
        let refuse = |problem: String| Err(DataError::Task { task: name(task.kind), problem });
        if task.min_steps > task.max_steps {
            return refuse(format!("min_steps {} exceeds max_steps {}", task.min_steps, task.max_steps));
        }
        if task.min_steps == 0 || task.max_steps > MOST_STEPS {
            let range = format!("{} to {}", task.min_steps, task.max_steps);
            return refuse(format!("steps must be 1 to {MOST_STEPS}, are {range}"));
        }
        let sizes = match task.kind {
            TaskKind::Arithmetic => arithmetic::SIZES,
            TaskKind::Composition => composition::SIZES,
            TaskKind::Permutation => permutation::SIZES,
        };
        if !sizes.contains(&task.size) {
            let (low, high) = (sizes.start(), sizes.end());
            return refuse(format!("size must be {low} to {high}, is {}", task.size));
        }
        let purpose = match split {
            Split::Train => "task/train",
            Split::Test => "task/test",
        };
        Ok(Problems { task: task.clone(), split, philox: Philox::new(seed, purpose) })
    }

    /// Problem number `index`, of a random number of steps.
    pub fn at(&self, index: u64) -> Result<Problem, DataError> {
        let mut random = self.philox.stream(2 * index);
        let span = self.task.max_steps - self.task.min_steps + 1;
        let drawn = (0..ATTEMPTS).find_map(|_| {
            let steps = self.task.min_steps + random.below(span);
            self.draw(steps, &mut random)
        });
        drawn.ok_or_else(|| DataError::Task {
            task: name(self.task.kind),
            problem: format!(
                "size {} with {} to {} steps has too few problems to hold some out; use a larger size or more steps",
                self.task.size, self.task.min_steps, self.task.max_steps
            ),
        })
    }

    /// Problem number `index` of so many steps; `None` where the few problems there are all fell
    /// into the other split.
    pub fn of_steps(&self, steps: u64, index: u64) -> Option<Problem> {
        // Odd streams belong to fixed difficulties; `at` uses the even ones.
        let mut random = self.philox.stream(2 * (index * (MOST_STEPS + 1) + steps) + 1);
        (0..ATTEMPTS).find_map(|_| self.draw(steps, &mut random))
    }

    /// Draws one problem; `None` where it belongs to the other split.
    fn draw(&self, steps: u64, random: &mut Stream) -> Option<Problem> {
        let (prompt, answer) = match self.task.kind {
            TaskKind::Arithmetic => arithmetic::problem(self.task.size, steps, random),
            TaskKind::Composition => composition::problem(self.task.size, steps, random),
            TaskKind::Permutation => permutation::problem(self.task.size, steps, random),
        };
        (Split::of(&prompt) == self.split).then_some(Problem { prompt, answer, steps })
    }
}

/// The steps that the problems of a task compose, in words.
pub(crate) fn steps(task: &Task) -> String {
    match (task.min_steps, task.max_steps) {
        (1, 1) => "1 step".into(),
        (least, most) if least == most => format!("{most} steps"),
        (least, most) => format!("{least} to {most} steps"),
    }
}

/// A task's name in specifications.
pub fn name(kind: TaskKind) -> &'static str {
    match kind {
        TaskKind::Arithmetic => "arithmetic",
        TaskKind::Composition => "composition",
        TaskKind::Permutation => "permutation",
    }
}

/// A symbol for element `i`: letters while they last, then letters with a number.
fn symbol(i: u64) -> String {
    let letter = char::from(b'a' + (i % 26) as u8);
    if i < 26 { letter.to_string() } else { format!("{letter}{}", i / 26) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn task(kind: TaskKind, size: u64, min_steps: u64, max_steps: u64) -> Task {
        Task { kind, size, min_steps, max_steps }
    }

    const KINDS: [TaskKind; 3] = [TaskKind::Arithmetic, TaskKind::Composition, TaskKind::Permutation];

    #[test]
    fn splits_are_disjoint_and_deterministic() {
        for kind in KINDS {
            let task = task(kind, 5, 1, 4);
            let train = Problems::new(&task, 1, Split::Train).unwrap();
            let test = Problems::new(&task, 2, Split::Test).unwrap();
            let set = |p: &Problems| (0..500).map(|i| p.at(i).unwrap().prompt).collect::<HashSet<_>>();
            assert!(set(&train).is_disjoint(&set(&test)));
            assert!(set(&test).len() > 50);
            assert_eq!(train.at(17).unwrap(), train.at(17).unwrap());
            assert_eq!(test.of_steps(3, 9).unwrap().steps, 3);
        }
    }

    #[test]
    fn every_difficulty_is_drawn() {
        let problems = Problems::new(&task(TaskKind::Permutation, 4, 2, 5), 0, Split::Train).unwrap();
        let steps: HashSet<u64> = (0..200).map(|i| problems.at(i).unwrap().steps).collect();
        assert_eq!(steps, (2..=5).collect());
    }

    #[test]
    fn bad_numbers_are_refused_with_what_would_be_right() {
        let problem = |t| Problems::new(&t, 0, Split::Train).unwrap_err().to_string();
        assert!(problem(task(TaskKind::Arithmetic, 10, 4, 2)).contains("exceeds"));
        assert!(problem(task(TaskKind::Arithmetic, 1, 1, 2)).contains("size must be 2 to"));
        assert!(problem(task(TaskKind::Permutation, 4, 0, 2)).contains("1 to 10000"));
    }
}

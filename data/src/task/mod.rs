//! Generated tasks: problems whose difficulty is a number of steps, and whose answers are unique.
//!
//! *In*: a [`Task`], a seed, a split, an index. *Out*: a [`Problem`]. *Promise*: a function of
//! these four and nothing else, so that nothing is stored and a resumed run goes on exactly; no
//! problem of the training split is in the test split or the reverse, whatever the seeds, since the
//! split is decided by a hash of the problem itself; exact match is the score.
//!
//! One file a task, or a family of them, with its paper, and a line in the list below; its names
//! and numbers are an entry of [`dreamc_dsl::task`]. A file refuses numbers that do not go
//! together, and says which would.

mod symbols;

use super::DataError;
use crate::rng::{Philox, Stream};
use dreamc_dsl::spec::{Task, TaskKind};
use dreamc_dsl::task::MOST_STEPS;
use std::collections::HashSet;
use std::ops::Range;

/// A text that a task drew.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Drawn {
    prompt: String,
    answer: String,
    /// The parts of the answer that are asked, in bytes; all of it and its end where there are
    /// none.
    asked: Vec<Range<usize>>,
}

impl From<(String, String)> for Drawn {
    fn from((prompt, answer): (String, String)) -> Self {
        Drawn { prompt, answer, asked: vec![] }
    }
}

/// A text with questions in it.
#[derive(Default)]
struct Text {
    text: String,
    asked: Vec<Range<usize>>,
}

impl Text {
    /// Goes on with what is given.
    fn push(&mut self, given: &str) -> &mut Self {
        self.text += given;
        self
    }

    /// Goes on with what is asked.
    fn ask(&mut self, answer: &str) -> &mut Self {
        self.asked.push(self.text.len()..self.text.len() + answer.len());
        self.push(answer)
    }

    fn drawn(self) -> Drawn {
        Drawn { prompt: String::new(), answer: self.text, asked: self.asked }
    }
}

/// `count` different numbers below `n`, in any order.
fn chosen(count: u64, n: u64, random: &mut Stream) -> Vec<u64> {
    let (mut seen, mut all) = (HashSet::new(), vec![]);
    // Floyd's: each number below `n` with the same probability, without a list of all.
    for top in n.saturating_sub(count)..n {
        let any = random.below(top + 1);
        let one = if seen.insert(any) { any } else { top };
        seen.insert(one);
        all.push(one);
    }
    for i in (1..all.len()).rev() {
        all.swap(i, random.below(i as u64 + 1) as usize);
    }
    all
}

macro_rules! tasks {
    ($($kind:ident => $file:ident, $draw:expr;)*) => {
        /// Refuses numbers that do not go together.
        fn check(task: &Task) -> Result<(), String> {
            match task.kind {
                $(TaskKind::$kind => $file::check(task),)*
            }
        }

        /// Draws a text of `steps` steps.
        fn draw(task: &Task, steps: u64, random: &mut Stream) -> Drawn {
            match task.kind {
                $(TaskKind::$kind => $draw(task, steps, random),)*
            }
        }
    };
}

mod arithmetic;
mod brevo;
mod capo;
mod chain;
mod composition;
mod copying;
mod depo;
mod dyck;
mod flip_flop;
mod group;
mod hops;
mod induction;
mod lano;
mod mano;
mod memorization;
mod modular;
mod mqar;
mod n_gram;
mod path_star;
mod permutation;
mod recall;
mod sorting;
mod sum;

tasks! {
    Arithmetic => arithmetic, arithmetic::problem;
    Composition => composition, composition::problem;
    Permutation => permutation, permutation::problem;
    Mqar => mqar, mqar::problem;
    Recall => recall, |t: &Task, n, r: &mut Stream| recall::problem(recall::Kind::Plain, t, n, r);
    NoisyRecall => recall, |t: &Task, n, r: &mut Stream| recall::problem(recall::Kind::Noisy, t, n, r);
    FuzzyRecall => recall, |t: &Task, n, r: &mut Stream| recall::problem(recall::Kind::Fuzzy, t, n, r);
    Memorization => memorization, memorization::problem;
    SelectiveCopying => copying, copying::selective;
    Induction => induction, induction::problem;
    PHop => hops, hops::problem;
    ModularSum => modular, modular::problem;
    Symmetric => group, |t: &Task, n, r: &mut Stream| group::problem(group::Group::Symmetric, t, n, r);
    Alternating => group, |t: &Task, n, r: &mut Stream| group::problem(group::Group::Alternating, t, n, r);
    FlipFlop => flip_flop, flip_flop::problem;
    Dyck => dyck, dyck::problem;
    Copying => copying, copying::whole;
    NGram => n_gram, n_gram::problem;
    Sorting => sorting, sorting::problem;
    Sum => sum, sum::problem;
    Chain => chain, chain::problem;
    PathStar => path_star, path_star::problem;
    Depo => depo, depo::problem;
    Brevo => brevo, brevo::problem;
    Capo => capo, capo::problem;
    Mano => mano, mano::problem;
    Lano => lano, lano::problem;
}

/// A problem and its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The prompt, up to where the answer begins.
    pub prompt: String,
    /// A right continuation; the only one but for [`Problem::others`].
    pub answer: String,
    /// The parts of the answer that are asked, in bytes, where the rest is given: each is an answer
    /// of its own. Empty where all of it is asked, and its end.
    pub asked: Vec<Range<usize>>,
    /// Steps.
    pub steps: u64,
}

impl Problem {
    /// The parts of the answer that are asked, in bytes: each is an answer of its own.
    pub fn answers(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let whole = self.asked.is_empty().then_some(0..self.answer.len());
        whole.into_iter().chain(self.asked.iter().cloned())
    }

    /// Of each character of the answer, the others that are right after the same beginning; empty
    /// where one answer is right.
    pub fn others(&self, task: &Task) -> Vec<Vec<char>> {
        match task.kind {
            TaskKind::Lano => lano::others(self),
            _ => vec![],
        }
    }

    /// The text before its last answer, and that answer.
    pub fn last(&self) -> (String, String) {
        match self.asked.last() {
            None => (self.prompt.clone(), self.answer.clone()),
            Some(asked) => {
                (format!("{}{}", self.prompt, &self.answer[..asked.start]), self.answer[asked.clone()].into())
            }
        }
    }
}

/// The two disjoint halves of a task's problems.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// To learn from.
    Train,
    /// Held out: one problem in [`HELD_OUT`].
    Test,
}

/// One problem in this number is held out.
pub const HELD_OUT: u64 = 8;

/// Problems drawn before a task is declared too small to have both splits.
const ATTEMPTS: u64 = 4096;

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
        let facts = task.kind.facts();
        let numbers = [("size", Some(task.size), Some(facts.size)), ("length", task.length, facts.length)];
        for (key, found, knob) in numbers {
            let (Some(found), Some(knob)) = (found, knob) else { continue };
            if !knob.takes(found) {
                return refuse(format!("{key} must be {} to {}, is {found}", knob.least, knob.most));
            }
        }
        if task.difficulties().any(|steps| !facts.steps.takes(steps)) {
            let (least, most) = (facts.steps.least, facts.steps.most);
            return refuse(format!("steps must be {least} to {most}, are {}", steps(task)));
        }
        check(task).map_err(|problem| DataError::Task { task: name(task.kind), problem })?;
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

    /// Problem number `index` of `steps` steps; `None` where the few problems there are all fell
    /// into the other split.
    pub fn of_steps(&self, steps: u64, index: u64) -> Option<Problem> {
        // Odd streams belong to fixed difficulties; `at` uses the even ones.
        let mut random = self.philox.stream(2 * (index * (MOST_STEPS + 1) + steps) + 1);
        (0..ATTEMPTS).find_map(|_| self.draw(steps, &mut random))
    }

    /// Draws one problem; `None` where it belongs to the other split.
    fn draw(&self, steps: u64, random: &mut Stream) -> Option<Problem> {
        let Drawn { prompt, answer, asked } = draw(&self.task, steps, random);
        // Of a text with questions in it, what is given and what is asked are the problem.
        let of = if asked.is_empty() { Split::of(&prompt) } else { Split::of(&format!("{prompt}{answer}")) };
        (of == self.split).then_some(Problem { prompt, answer, asked, steps })
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
    kind.facts().name
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
        Task { size, ..Task::new(kind, min_steps, max_steps) }
    }

    /// `count` texts of a task, of both splits.
    pub(super) fn draws(task: &Task, steps: u64, count: u64) -> Vec<Drawn> {
        check(task).unwrap();
        let philox = Philox::new(7, "draws");
        (0..count).map(|i| draw(task, steps, &mut philox.stream(i))).collect()
    }

    /// The answers of a text; one at least.
    pub(super) fn asked(drawn: &Drawn) -> &[Range<usize>] {
        assert!(!drawn.asked.is_empty());
        &drawn.asked
    }

    /// Of every task, as a specification has it that says nothing but its name: problems are a
    /// function of seed, split and index; those of the two splits differ, whatever the seeds; every
    /// answer that is asked stands in the text.
    #[test]
    fn splits_are_disjoint_and_deterministic() {
        for &kind in TaskKind::ALL {
            let facts = kind.facts();
            let task = Task::new(kind, facts.steps.least.max(3), facts.steps.default.max(3));
            let train = Problems::new(&task, 1, Split::Train).unwrap();
            let test = Problems::new(&task, 2, Split::Test).unwrap();
            let text = |p: &Problems, i| p.at(i).map(|p| p.prompt + &p.answer).unwrap();
            let set = |p: &Problems| (0..300).map(|i| text(p, i)).collect::<HashSet<_>>();
            let (learned, held) = (set(&train), set(&test));
            assert!(learned.is_disjoint(&held), "{}", facts.name);
            assert!(
                held.len() > 50 && learned.len() > 150,
                "{}: {} {}",
                facts.name,
                learned.len(),
                held.len()
            );
            assert_eq!(train.at(17).unwrap(), Problems::new(&task, 1, Split::Train).unwrap().at(17).unwrap());
            assert_ne!(train.at(17).unwrap(), Problems::new(&task, 3, Split::Train).unwrap().at(17).unwrap());
            let problem = test.of_steps(task.max_steps, 9).unwrap();
            assert_eq!(problem.steps, task.max_steps);
            let (before, answer) = problem.last();
            assert!((problem.prompt.clone() + &problem.answer).starts_with(&(before + &answer)));
        }
    }

    #[test]
    fn chosen_numbers_differ_and_are_spread_evenly() {
        let mut counts = [0u64; 10];
        for i in 0..2000 {
            let found = chosen(4, 10, &mut Philox::new(0, "chosen").stream(i));
            assert_eq!(found.iter().collect::<HashSet<_>>().len(), 4);
            counts[found[0] as usize] += 1;
        }
        assert!(counts.iter().all(|n| (140..260).contains(n)), "{counts:?}");
        assert_eq!(chosen(3, 3, &mut Philox::new(0, "all").stream(0)).iter().sum::<u64>(), 3);
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
        assert!(problem(task(TaskKind::Arithmetic, 1, 1, 2)).contains("size must be 2 to 1000, is 1"));
        assert!(
            problem(task(TaskKind::Permutation, 4, 0, 2))
                .contains("steps must be 1 to 10000, are 0 to 2 steps")
        );
    }
}

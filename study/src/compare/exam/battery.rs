//! The tasks of an exam, and how hard each is asked.
//!
//! *In*: a kind of task. *Out*: its [`Setting`]. *Promise*: a problem to learn from takes at most
//! 128 tokens of the byte level and one that is asked beyond at most 256, so that a model of that
//! context sits the whole exam.

use dreamc_data::DataError;
use dreamc_data::task::{Problems, Split};
use dreamc_dsl::spec::{Task, TaskKind};

/// Those that an exam has where none are named: recall, copying, lookup, counting, and states that
/// a sum does not hold.
pub const BATTERY: [TaskKind; 6] = [
    TaskKind::Mqar,
    TaskKind::Copying,
    TaskKind::PHop,
    TaskKind::ModularSum,
    TaskKind::Symmetric,
    TaskKind::FlipFlop,
];

/// A task as an exam asks it.
pub struct Setting {
    /// The capability that it shows, in a word or two.
    pub capability: &'static str,
    /// The task: its numbers, and the steps beyond those learned.
    pub task: Task,
}

/// How an exam asks a task.
pub fn setting(kind: TaskKind) -> Setting {
    let of = |capability, steps: [u64; 2], longer: &[u64], size: u64, length: Option<u64>| {
        let [least, most] = steps;
        let task = Task { size, length, longer: longer.to_vec(), ..Task::new(kind, least, most) };
        Setting { capability, task }
    };
    match kind {
        TaskKind::Arithmetic => of("arithmetic", [1, 3], &[4, 5], 10, None),
        TaskKind::Composition => of("composition", [1, 4], &[6, 8], 6, None),
        TaskKind::Permutation => of("states", [1, 6], &[8, 12], 5, None),
        TaskKind::Mqar => of("recall", [2, 8], &[12, 16], 52, Some(64)),
        TaskKind::Recall => of("recall", [24, 28], &[40, 56], 16, None),
        TaskKind::NoisyRecall => of("recall", [24, 28], &[40, 56], 16, None),
        TaskKind::FuzzyRecall => of("recall", [12, 14], &[20, 28], 16, None),
        TaskKind::Memorization => of("memory of facts", [4, 8], &[], 128, None),
        TaskKind::SelectiveCopying => of("copying", [2, 8], &[12, 16], 16, Some(48)),
        TaskKind::Induction => of("lookup", [24, 32], &[64, 128], 16, None),
        TaskKind::PHop => of("lookup", [1, 4], &[6, 8], 4, Some(48)),
        TaskKind::ModularSum => of("counting", [3, 16], &[32, 64], 2, None),
        TaskKind::Symmetric => of("states", [1, 6], &[8, 12], 3, None),
        TaskKind::Alternating => of("states", [1, 6], &[8, 12], 5, None),
        TaskKind::FlipFlop => of("states", [8, 16], &[32, 64], 80, None),
        TaskKind::Dyck => of("nesting", [2, 10], &[16, 32], 2, Some(4)),
        TaskKind::Copying => of("copying", [2, 12], &[16, 24], 26, None),
        TaskKind::NGram => of("lookup", [16, 24], &[32, 64], 26, Some(2)),
        TaskKind::Sorting => of("sorting", [2, 8], &[12, 16], 26, None),
        TaskKind::Sum => of("arithmetic", [1, 3], &[4, 5], 10, Some(2)),
        TaskKind::Chain => of("arithmetic", [1, 4], &[5, 6], 10, Some(7)),
        TaskKind::PathStar => of("search", [1, 4], &[6, 8], 2, Some(50)),
        TaskKind::Depo => of("depth of reasoning", [1, 2], &[3, 4], 5, Some(2)),
        TaskKind::Brevo => of("breadth of reasoning", [3, 10], &[12, 14], 26, None),
        TaskKind::Capo => of("memory of facts", [1, 3], &[], 64, None),
        TaskKind::Mano => of("arithmetic", [1, 5], &[6, 8], 23, None),
        TaskKind::Lano => of("grammar", [2, 4], &[5], 3, None),
    }
}

impl Setting {
    /// Tokens of the longest of the problems that are learned from, at the byte level.
    pub fn tokens(&self) -> Result<u64, DataError> {
        most(&self.task, self.task.max_steps)
    }

    /// The section `data` of a suite.
    pub fn data(&self) -> String {
        let Task { kind, min_steps, max_steps, size, length, longer } = &self.task;
        let length = length.map_or(String::new(), |length| format!(", length: {length}"));
        let steps: Vec<String> = longer.iter().map(u64::to_string).collect();
        let longer = match longer.is_empty() {
            true => String::new(),
            false => format!(", longer: [{}]", steps.join(", ")),
        };
        let name = kind.facts().name;
        format!(
            "data: {{task: {name}, min_steps: {min_steps}, max_steps: {max_steps}, size: {size}{length}{longer}, document_mask: true}}\n"
        )
    }
}

/// Tokens of the longest of some problems of `steps` steps, with the token at their end.
fn most(task: &Task, steps: u64) -> Result<u64, DataError> {
    let problems = Problems::new(task, 0, Split::Train)?;
    let drawn = (0..16).filter_map(|i| problems.of_steps(steps, i));
    Ok(drawn.map(|p| (p.prompt.len() + p.answer.len() + 1) as u64).max().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Most tokens of a problem that is learned from.
    const LEARNED: u64 = 128;
    /// Most tokens of a problem that is asked.
    const ASKED: u64 = 256;

    /// Every task can be asked: its numbers go together, and its problems take no more tokens than
    /// an exam promises.
    #[test]
    fn every_task_fits_an_exam() {
        for &kind in TaskKind::ALL {
            let setting = setting(kind);
            let name = kind.facts().name;
            let learned = setting.tokens().unwrap();
            assert!((2..=LEARNED).contains(&learned), "{name}: {learned}");
            for &steps in &setting.task.longer {
                assert!(steps > setting.task.max_steps, "{name}");
                let asked = most(&setting.task, steps).unwrap();
                assert!(asked <= ASKED, "{name}: {asked} tokens of {steps} steps");
            }
            assert!(setting.data().contains(&format!("task: {name}, min_steps:")));
        }
    }
}

//! Memory of a rank by kind, as the arena of its plan has it.

use dreamc_compiler::program::{Plan, Space};
use serde::Serialize;

/// Bytes of a rank by purpose; they add up to the total.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Weights.
    pub weights: u64,
    /// Gradients.
    pub gradients: u64,
    /// The optimizer's states of this rank.
    pub optimizer: u64,
    /// Activations that the forward keeps for the backward.
    pub kept: u64,
    /// Counts, caches, and values prepared of weights.
    pub states: u64,
    /// Inputs and results that host and programs exchange.
    pub inputs: u64,
    /// Values of one program at a time, which share memory; gaps between buffers.
    pub temporaries: u64,
    /// Scratch of kernels, outside the arena, and numbers of exchanges under way on a CPU.
    pub scratch: u64,
    /// A teacher: its weights where they are not mapped, and its forward.
    #[serde(skip_serializing_if = "none")]
    pub teacher: u64,
    /// All of it.
    pub total: u64,
    /// Weights that stay in their file, not in the total.
    pub mapped: u64,
}

/// Whether a kind is left out of a report: most trainings have no teacher.
fn none(bytes: &u64) -> bool {
    *bytes == 0
}

impl Memory {
    /// Memory of a plan, with `scratch` bytes outside its arena.
    pub fn of(plan: &Plan, scratch: u64) -> Self {
        let mut memory = Memory { scratch, total: plan.arena + scratch, ..Memory::default() };
        for b in &plan.buffers {
            match b.space {
                Space::Weights => memory.weights += b.bytes(),
                Space::Mapped => memory.mapped += b.bytes(),
                Space::Gradients => memory.gradients += b.bytes(),
                Space::Optimizer => memory.optimizer += b.bytes(),
                Space::Saved => memory.kept += b.bytes(),
                Space::State | Space::Prepared => memory.states += b.bytes(),
                Space::Io => memory.inputs += b.bytes(),
                // Temporaries share memory, and aliases are counted where they point.
                Space::Temporary | Space::Alias | Space::Spread => {}
            }
        }
        let named = memory.weights
            + memory.gradients
            + memory.optimizer
            + memory.kept
            + memory.states
            + memory.inputs;
        memory.temporaries = plan.arena.saturating_sub(named);
        memory
    }

    /// The same with a teacher of `teacher` bytes.
    pub fn taught(self, teacher: u64) -> Self {
        Memory { teacher, total: self.total + teacher, ..self }
    }

    /// The kinds with their names, largest purpose first in the order of a plan.
    pub fn kinds(&self) -> [(&'static str, u64); 9] {
        [
            ("weights", self.weights),
            ("gradients", self.gradients),
            ("optimizer", self.optimizer),
            ("kept activations", self.kept),
            ("counts, caches, prepared", self.states),
            ("inputs and results", self.inputs),
            ("temporaries", self.temporaries),
            ("scratch, exchanges", self.scratch),
            ("teacher", self.teacher),
        ]
    }
}

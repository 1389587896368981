//! The launch list as text, for people and snapshots: `dreamc compile SPEC --emit plan`.
//!
//! ```text
//! arena 14336 bytes
//! buffers
//!   weights    embed.weight            f32[17, 12]           0
//! program evaluate
//!   embed          (embed.weight, ids) -> (stream[0])                        ; embed: embed %0
//!   for v0 in 0..4
//!     …
//! ```

use crate::program::{Affine, Buffer, Kernel, KernelKind, Operand, Plan, Space, Step};
use std::fmt::{Display, Formatter, Result};

impl Display for Space {
    fn fmt(&self, f: &mut Formatter) -> Result {
        f.pad(match self {
            Space::Weights => "weights",
            Space::Mapped => "mapped",
            Space::Gradients => "gradients",
            Space::Optimizer => "optimizer",
            Space::Spread => "spread",
            Space::State => "state",
            Space::Saved => "saved",
            Space::Prepared => "prepared",
            Space::Io => "io",
            Space::Temporary => "temporary",
            Space::Alias => "alias",
        })
    }
}

impl Display for Affine {
    fn fmt(&self, f: &mut Formatter) -> Result {
        let mut terms: Vec<String> = self
            .terms
            .iter()
            .map(|&(v, s)| if s == 1 { format!("v{v}") } else { format!("{s}·v{v}") })
            .collect();
        if self.base != 0 || terms.is_empty() {
            terms.push(self.base.to_string());
        }
        f.write_str(&terms.join("+"))
    }
}

impl Display for Plan {
    fn fmt(&self, f: &mut Formatter) -> Result {
        writeln!(f, "arena {} bytes", self.arena)?;
        writeln!(f, "buffers")?;
        for b in self.buffers.iter().filter(|b| b.space != Space::Temporary) {
            writeln!(f, "  {:<10} {:<44} {:<28} {:>12}", b.space, b.name, shape(b), b.offset)?;
        }
        let temporary = self.buffers.iter().filter(|b| b.space == Space::Temporary);
        let (count, sum) = temporary.clone().fold((0, 0), |(n, sum), b| (n + 1, sum + b.bytes()));
        let end = temporary.clone().map(|b| b.offset + b.bytes()).max().unwrap_or(0);
        let start = temporary.map(|b| b.offset).min().unwrap_or(0);
        writeln!(f, "  {:<10} {count} of {sum} bytes in {}", "temporary", end - start)?;
        for (name, program) in &self.programs {
            writeln!(f, "program {name}")?;
            self.steps(&program.steps, 1, f)?;
        }
        Ok(())
    }
}

fn shape(b: &Buffer) -> String {
    let dims: Vec<String> = b.shape.iter().map(u64::to_string).collect();
    let times = if b.instances == 1 { String::new() } else { format!("{} × ", b.instances) };
    format!("{times}{}[{}]", b.dtype.name(), dims.join(", "))
}

impl Plan {
    fn steps(&self, steps: &[Step], depth: usize, f: &mut Formatter) -> Result {
        let indent = "  ".repeat(depth);
        for step in steps {
            match step {
                Step::Launch(launch) => {
                    let kernel = self.kernel(launch.kernel);
                    let operands: Vec<String> = launch.operands.iter().map(|o| self.operand(o)).collect();
                    let results =
                        kernel.signature().iter().rev().take_while(|slot| slot.role.writes()).count();
                    let (inputs, outputs) = operands.split_at(operands.len().saturating_sub(results));
                    let line =
                        format!("{indent}{kernel} ({}) -> ({})", inputs.join(", "), outputs.join(", "));
                    writeln!(f, "{line:<110} ; {}", launch.origin)?;
                }
                Step::Loop { variable, count, reverse, steps } => {
                    let order = if *reverse { " reversed" } else { "" };
                    writeln!(f, "{indent}for v{variable} in 0..{count}{order}")?;
                    self.steps(steps, depth + 1, f)?;
                }
            }
        }
        Ok(())
    }

    fn operand(&self, operand: &Operand) -> String {
        match operand {
            Operand::Index(i) => i.to_string(),
            Operand::Tensor { buffer, instance, offset, .. } => {
                let b = self.buffer(*buffer);
                let at = if b.instances == 1 { String::new() } else { format!("[{instance}]") };
                let from = if *offset == 0 { String::new() } else { format!("+{offset}") };
                format!("{}{at}{from}", b.name)
            }
        }
    }
}

impl Display for Kernel {
    /// The kind and the sizes, as `--emit plan` has them.
    fn fmt(&self, f: &mut Formatter) -> Result {
        f.write_str(&self.summary())
    }
}

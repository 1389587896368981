//! Naive kernels: a thread for each element of a result, in kernel statements.
//!
//! *In*: a kernel, the sections of its `naive.cuh` and its numbers. *Out*: a [`Source`] with an
//! entry for each section that runs, which [`crate::statement`] types and prints in a dialect.
//! *Promise*: an entry has the operands of the kernel's signature by their names, the numbers by
//! theirs in capitals, and `at`, the number of its thread; each sum is made by one thread in order,
//! so two runs give the same bits.
//!
//! It is the rung below the fast kernel: slow, obvious, and the arbiter on a new GPU.
//! `DREAMC_NAIVE=1` runs it in the place of the fast one.

use super::text::{Builder, Operands, Param, per_thread, places, scratch, status};
use super::{CodegenError, Source, Variant};
use crate::op::kernel::{KernelKind, Storage};
use std::fmt::Display;

type Result<T> = std::result::Result<T, CodegenError>;

/// A naive kernel under way.
pub(crate) struct Naive {
    builder: Builder,
    params: Vec<Param>,
    text: &'static str,
}

/// The lines between `// name` and the next such line.
fn section<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    let header = |line: &str| line == "// functions" || line.starts_with("// pass ");
    let wanted = |line: &str| match line.strip_prefix("// pass ") {
        Some(line) => line.split(':').next() == Some(name),
        None => line == "// functions" && name == "functions",
    };
    let mut at = 0;
    let mut found = None;
    for line in text.split_inclusive('\n') {
        let end = at + line.len();
        match found {
            None if wanted(line.trim_end()) => found = Some(end),
            Some(start) if header(line.trim_end()) => return Some(&text[start..at]),
            None | Some(_) => {}
        }
        at = end;
    }
    found.map(|start| &text[start..])
}

impl Naive {
    /// `text` are the sections, `numbers` what they call the kernel's numbers. Whole ones end in
    /// `ll`.
    pub(crate) fn new(
        kernel: &dyn KernelKind,
        variant: Variant,
        text: &'static str,
        numbers: &[(&str, &dyn Display)],
    ) -> Result<Naive> {
        Naive::with(kernel, variant, text, numbers, "")
    }

    /// The same with functions that are generated, which the sections may call.
    pub(crate) fn with(
        kernel: &dyn KernelKind,
        variant: Variant,
        text: &'static str,
        numbers: &[(&str, &dyn Display)],
        functions: &str,
    ) -> Result<Naive> {
        let mut builder = Builder::statements(format!("naive {}", kernel.summary()), "naive.cuh");
        if variant.packed.is_some() {
            builder.portable();
            builder.line("#include \"blocks.cuh\"");
        }
        let mut groups: Vec<(u8, bool)> = vec![];
        for (i, slot) in kernel.signature().iter().enumerate() {
            if let Storage::Float(group) = slot.storage
                && groups.iter().all(|(g, _)| *g != group)
            {
                groups.push((group, variant.is_narrow(i)));
            }
        }
        for (group, narrow) in groups {
            builder.line(&format!("typedef {} Float{group};", if narrow { "bf16" } else { "float" }));
        }
        for (name, number) in numbers {
            builder.line(&format!("#define {name} {number}"));
        }
        let some = kernel.rows().is_some() && variant.places;
        builder.line(&format!("#define SOME {}", u8::from(some)));
        if !functions.is_empty() {
            builder.line(functions.trim_end());
        }
        if let Some(functions) = section(text, "functions") {
            builder.line(functions.trim_end());
        }
        let mut params = Operands::of(kernel, variant).all()?;
        params.extend(some.then(places));
        Ok(Naive { builder, params, text })
    }

    /// Floats of scratch memory that all later entries see by this name.
    pub(crate) fn scratch(mut self, name: &str, floats: u64) -> Naive {
        let at = self.builder.scratch(floats.saturating_mul(4));
        self.params.push(scratch("float *", name, at));
        self
    }

    /// A section for `threads` threads.
    pub(crate) fn pass(self, name: &str, threads: u64) -> Result<Naive> {
        let lines = section(self.text, name)
            .ok_or_else(|| CodegenError::Malformed(format!("there is no section `{name}`")))?;
        self.body(name, lines, threads)
    }

    /// Lines that are generated, for `threads` threads.
    pub(crate) fn body(mut self, name: &str, lines: &str, threads: u64) -> Result<Naive> {
        let mut body = format!("i64 at = thread_number();\nif (at >= {threads}) return;\n{lines}");
        body = body
            .lines()
            .map(|l| if l.starts_with('#') { format!("{l}\n") } else { format!("    {l}\n") })
            .collect();
        let params: Vec<Param> = self
            .params
            .iter()
            .map(|p| Param::new(&p.declaration, &p.name, p.argument))
            .chain(status())
            .collect();
        self.builder.entry(&format!("naive_{name}"), per_thread(threads)?, &params, &body);
        Ok(self)
    }

    pub(crate) fn finish(self) -> Option<Source> {
        self.builder.finish()
    }
}

/// A whole number that does not wrap where two are multiplied.
pub(crate) fn whole(n: u64) -> String {
    format!("{n}ll")
}

/// Several of them by name.
macro_rules! numbers {
    ($($name:literal: $n:expr),* $(,)?) => {
        &[$(($name, &$crate::codegen::naive::whole($n) as &dyn std::fmt::Display)),*]
    };
}
pub(crate) use numbers;

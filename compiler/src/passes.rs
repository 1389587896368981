//! The passes by name, and what is done around each: it is timed, its result is verified, and
//! whoever watches sees it.
//!
//! *In*: a pass and the function that it makes. *Out*: the same. *Promise*: in debug builds, and
//! where `DREAMC_VERIFY=1` stands in the environment, every function satisfies [`verify_function`]
//! between any two passes.

use crate::CompileError;
use crate::ir::{Function, Module, verify_function};
use std::cell::RefCell;
use std::time::{Duration, Instant};

/// A pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pass {
    /// The spec resolved: distinct bodies, loops, sets of weights.
    Resolve,
    /// Lowering: `embed`, the bodies, `head`.
    Lower,
    /// Differentiation: a joint function.
    Differentiate,
    /// Rewriting: a function ready to be scheduled, before forward and backward are cut apart.
    /// Unchanged where nothing is rewritten.
    Rewrite,
    /// Casts to bf16.
    Narrow,
    /// Work on weights alone leaves the calls.
    Hoist,
    /// Forward and backward are cut apart.
    Partition,
    /// Launches of a function.
    Schedule,
    /// Programs and buffers.
    Assemble,
}

/// All of them, in order.
pub const PASSES: [Pass; 9] = [
    Pass::Resolve,
    Pass::Lower,
    Pass::Differentiate,
    Pass::Rewrite,
    Pass::Narrow,
    Pass::Hoist,
    Pass::Partition,
    Pass::Schedule,
    Pass::Assemble,
];

impl Pass {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Pass::Resolve => "resolve",
            Pass::Lower => "lower",
            Pass::Differentiate => "differentiate",
            Pass::Rewrite => "rewrite",
            Pass::Narrow => "narrow",
            Pass::Hoist => "hoist",
            Pass::Partition => "partition",
            Pass::Schedule => "schedule",
            Pass::Assemble => "assemble",
        }
    }
}

/// An observer of the functions that [`Pass::Lower`], [`Pass::Differentiate`] and [`Pass::Rewrite`]
/// make, and may change them: whoever looks into the compiler, or tests that something would notice
/// if a pass were wrong.
pub type Watch<'a> = &'a dyn Fn(Pass, &mut Module, &mut Function);

/// The time of a pass, of all threads together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    /// Which.
    pub pass: Pass,
    /// How often it ran.
    pub runs: u64,
    /// How long in all.
    pub time: Duration,
}

/// The passes of one compilation.
pub(crate) struct Passes<'a> {
    watch: Option<Watch<'a>>,
    verifies: bool,
    spent: RefCell<[(u64, Duration); PASSES.len()]>,
}

impl<'a> Passes<'a> {
    pub fn new(watch: Option<Watch<'a>>) -> Self {
        let asked = std::env::var_os("DREAMC_VERIFY").is_some_and(|v| v == "1");
        let spent = RefCell::new([(0, Duration::ZERO); PASSES.len()]);
        Passes { watch, verifies: cfg!(debug_assertions) || asked, spent }
    }

    /// Works on each item, in order of the items, or on all threads of the machine side by side.
    /// Where somebody watches, it is one after another. Of several errors it gives the first.
    pub fn each<T: Send, R: Send>(
        &self,
        parallel: bool,
        items: Vec<T>,
        work: impl Fn(&Passes, T) -> Result<R, CompileError> + Sync,
    ) -> Result<Vec<R>, CompileError> {
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get()).min(items.len());
        if !parallel || threads < 2 || self.watch.is_some() {
            return items.into_iter().map(|item| work(self, item)).collect();
        }
        let mut shares: Vec<Vec<(usize, T)>> = (0..threads).map(|_| vec![]).collect();
        for (n, item) in items.into_iter().enumerate() {
            shares[n % threads].push((n, item));
        }
        let own = |share: Vec<(usize, T)>| {
            let passes = Passes::new(None);
            let made: Vec<_> = share.into_iter().map(|(n, item)| (n, work(&passes, item))).collect();
            (made, passes.spent.into_inner())
        };
        let mut made = vec![];
        std::thread::scope(|scope| {
            let handles: Vec<_> = shares.into_iter().map(|share| scope.spawn(|| own(share))).collect();
            for handle in handles {
                let (found, spent) = handle.join().unwrap_or_else(|e| std::panic::resume_unwind(e));
                made.extend(found);
                for (total, (runs, time)) in self.spent.borrow_mut().iter_mut().zip(spent) {
                    *total = (total.0 + runs, total.1 + time);
                }
            }
        });
        made.sort_by_key(|(n, _)| *n);
        made.into_iter().map(|(_, result)| result).collect()
    }

    /// Runs a pass.
    pub fn run<T>(&self, pass: Pass, work: impl FnOnce() -> T) -> T {
        let begun = Instant::now();
        let made = work();
        let (runs, time) = &mut self.spent.borrow_mut()[pass as usize];
        (*runs, *time) = (*runs + 1, *time + begun.elapsed());
        made
    }

    /// Runs a pass that makes a function.
    pub fn function(
        &self,
        pass: Pass,
        module: &mut Module,
        work: impl FnOnce(&mut Module) -> Result<Function, CompileError>,
    ) -> Result<Function, CompileError> {
        let f = self.run(pass, || work(module))?;
        self.verify(pass, module, &f)?;
        Ok(f)
    }

    /// Whether a function is well formed after a pass.
    pub fn verify(&self, pass: Pass, module: &Module, f: &Function) -> Result<(), CompileError> {
        if !self.verifies {
            return Ok(());
        }
        let broken =
            |e: crate::ir::VerifyError| CompileError::Pass { pass: pass.name(), problem: e.to_string() };
        verify_function(module, f).map_err(broken)
    }

    /// Shows a function to whoever watches.
    pub fn watch(&self, pass: Pass, module: &mut Module, f: &mut Function) {
        if let Some(watch) = self.watch {
            watch(pass, module, f);
        }
    }

    /// Times of the passes, in order.
    pub fn timings(&self) -> Vec<Timing> {
        let spent = self.spent.borrow();
        PASSES.iter().zip(spent.iter()).map(|(&pass, &(runs, time))| Timing { pass, runs, time }).collect()
    }
}

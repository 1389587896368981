//! Arguments that several commands have: how the command line spells what `dreamc-study` is asked
//! with.
//!
//! *In*: options. *Out*: the types of `dreamc-study`, which know no command line: each struct here
//! derefs to its own.

use clap::{ArgMatches, Args, Command, FromArgMatches, ValueEnum, value_parser};
use dreamc_study::device::{Kind, Where};
use dreamc_study::model::Passes;
use dreamc_study::output::{Color, Terminal};
use dreamc_study::rewriting::Choice;
use dreamc_study::spec::Named;
use std::ops::Deref;
use std::path::{Path, PathBuf};

/// Arguments that are read as `$spelled` and are a `$of`.
macro_rules! arguments {
    ($(#[$doc:meta])* $name:ident is $of:ty, read as $spelled:ident: $into:expr) => {
        $(#[$doc])*
        pub struct $name($of);

        impl Deref for $name {
            type Target = $of;

            fn deref(&self) -> &$of {
                &self.0
            }
        }

        impl FromArgMatches for $name {
            fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
                let into: fn($spelled) -> $of = $into;
                Ok($name(into($spelled::from_arg_matches(matches)?)))
            }

            fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
                *self = Self::from_arg_matches(matches)?;
                Ok(())
            }
        }

        impl Args for $name {
            fn augment_args(command: Command) -> Command {
                $spelled::augment_args(command)
            }

            fn augment_args_for_update(command: Command) -> Command {
                $spelled::augment_args_for_update(command)
            }
        }
    };
}

#[derive(Args)]
struct SpelledSpec {
    /// The specification, YAML or .dream; or the folder of a run or an imported model, for its
    /// spec.yaml
    #[arg(value_name = "SPEC")]
    spec: PathBuf,

    /// Change a field: `--set ea.count=1024`, `--set train.steps=100`; may be given several times
    #[arg(long, value_name = "FIELD=VALUE")]
    set: Vec<String>,
}

arguments! {
    /// A specification and changes to it.
    SpecArguments is Named, read as SpelledSpec: |a| Named { spec: a.spec, set: a.set }
}

#[derive(Args)]
struct SpelledDevice {
    /// Where to run: cpu, cuda (of several ranks each its own), cuda:1, …, rocm (a GPU of AMD's,
    /// by naive kernels, tried on none yet), metal (Apple's, likewise), or ptx (the GPU's kernels,
    /// interpreted and checked)
    #[arg(long, default_value_t = Kind::Cpu)]
    device: Kind,

    /// Threads of the CPU; all by default, shared by the ranks of a machine
    #[arg(long, value_name = "N", value_parser = threads)]
    threads: Option<usize>,
}

arguments! {
    /// Where to run.
    DeviceArguments is Where, read as SpelledDevice: |a| Where { device: a.device, threads: a.threads }
}

/// Most threads: a machine has fewer, and of many more the system has no room for their stacks.
const MOST_THREADS: usize = 1024;

fn threads(text: &str) -> Result<usize, String> {
    let threads = text.parse().ok().filter(|n| (1..=MOST_THREADS).contains(n));
    threads.ok_or_else(|| format!("a number of threads from 1 to {MOST_THREADS}"))
}

/// The arithmetic of products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Arithmetic {
    /// Everywhere
    F32,
    /// Products and storage; sums, statistics and weights in f32
    Bf16,
}

#[derive(Args)]
#[command(next_help_heading = "Rewriting")]
struct SpelledRewriting {
    /// Rewrite nothing
    #[arg(long, conflicts_with = "only")]
    no_rewrite: bool,

    /// Use these rewriting rules alone; `dreamc explain` shows which there are
    #[arg(long, value_name = "RULE,…", value_delimiter = ',')]
    only: Vec<String>,

    /// The device whose roofline chooses: cpu, or a GPU's name; by default the device that runs the
    /// plan, and where none does, cpu
    #[arg(long, value_name = "NAME")]
    target: Option<String>,
}

arguments! {
    /// Choice of rewriting rules.
    RewriteArguments is Choice, read as SpelledRewriting:
    |a| Choice { no_rewrite: a.no_rewrite, only: a.only, target: a.target }
}

/// Where the base of a model is.
#[derive(Args)]
pub struct BaseArguments {
    /// The base of a model that holds only what was trained, where it has moved since
    #[arg(long, value_name = "RUN|CHECKPOINT")]
    base: Option<PathBuf>,
}

impl BaseArguments {
    /// Where the base has moved, if it is named.
    pub fn moved(&self) -> Option<&Path> {
        self.base.as_deref()
    }
}

#[derive(Args)]
struct SpelledPasses {
    /// Run a recurrent model at this depth: the count of its outermost `recur`
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..1 << 20))]
    depth: Option<u64>,

    /// A token leaves a loop with `exit gate` after the first pass by which more than this share
    /// of it has left, from 0 to below 1; all passes by default
    #[arg(long, value_name = "Q", value_parser = share)]
    exit: Option<f64>,
}

arguments! {
    /// How the passes of a recurrent model are run.
    PassArguments is Passes, read as SpelledPasses: |a| Passes { depth: a.depth, exit: a.exit }
}

/// A share of a token that can be exceeded.
pub fn share(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|share| (0.0..1.0).contains(share));
    number.ok_or_else(|| "a share is a number from 0 to below 1".into())
}

#[derive(Args)]
#[command(next_help_heading = "Terminal")]
struct SpelledTerminal {
    /// Colours and live lines: where a terminal shows them (heeds NO_COLOR, CLICOLOR,
    /// CLICOLOR_FORCE and TERM=dumb), always, or never
    #[arg(long, global = true, value_enum, default_value_t = When::Auto, value_name = "WHEN", hide_possible_values = true)]
    color: When,

    /// Results and errors alone: no header, progress, notes or warnings
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    quiet: bool,

    /// Every step and every checkpoint on a line of its own
    #[arg(short, long, global = true)]
    verbose: bool,
}

/// When there are colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum When {
    /// On a terminal that has them
    Auto,
    /// Everywhere
    Always,
    /// Nowhere
    Never,
}

arguments! {
    /// How dreamc speaks.
    TerminalArguments is Terminal, read as SpelledTerminal: |a| {
        let color = match a.color {
            When::Auto => Color::Auto,
            When::Always => Color::Always,
            When::Never => Color::Never,
        };
        Terminal { color, quiet: a.quiet, verbose: a.verbose }
    }
}

//! Which rewriting rules are used, from the command line.

use crate::failure::Failure;
use clap::Args;
use dreamc_compiler::rewrite::{Rewriting, Rules, Target};

/// Choice of rewriting rules.
#[derive(Args)]
pub struct RewriteArguments {
    /// Rewrite nothing
    #[arg(long, conflicts_with = "only")]
    no_rewrite: bool,

    /// Use these rewriting rules alone
    #[arg(long, value_name = "RULE,…", value_delimiter = ',')]
    only: Vec<String>,

    /// The device whose roofline chooses: cpu, or a GPU's name
    #[arg(long, value_name = "NAME", default_value = "cpu")]
    target: String,
}

impl RewriteArguments {
    /// The choice; an error where there is no such target. A rule that does not exist is refused by compilation.
    pub fn rewriting(&self) -> Result<Rewriting, Failure> {
        let unknown =
            || Failure::Usage(format!("no target `{}`; there are {}", self.target, Target::names()));
        let target = Target::named(&self.target).ok_or_else(unknown)?;
        let rules = match (self.no_rewrite, self.only.is_empty()) {
            (true, _) => Rules::Off,
            (false, true) => Rules::All,
            (false, false) => Rules::Only(self.only.clone()),
        };
        Ok(Rewriting { rules, target, proofs: false })
    }
}

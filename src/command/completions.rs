//! `dreamc completions`: completion scripts for shells, and manual pages.

use clap::{Args, CommandFactory};
use clap_complete::Shell;
use dreamc_study::failure::{Done, Failure};
use dreamc_study::output;
use std::path::{Path, PathBuf};

/// Print a completion script for a shell, or write manual pages
#[derive(Args)]
#[command(after_help = "\
Examples:
  dreamc completions bash > ~/.local/share/bash-completion/completions/dreamc
  dreamc completions zsh > ~/.zfunc/_dreamc
  dreamc completions fish > ~/.config/fish/completions/dreamc.fish
  dreamc completions --man ~/.local/share/man/man1")]
pub struct Arguments {
    /// The shell
    #[arg(required_unless_present = "man", conflicts_with = "man")]
    shell: Option<Shell>,

    /// Write a manual page of every command into this folder, which is made
    #[arg(long, value_name = "DIR")]
    man: Option<PathBuf>,
}

pub fn run<C: CommandFactory>(a: Arguments) -> Done {
    if let Some(folder) = a.man {
        return manual(C::command(), &folder);
    }
    let mut script = vec![];
    if let Some(shell) = a.shell {
        clap_complete::generate(shell, &mut C::command(), "dreamc", &mut script);
    }
    Ok(output::write(&script)?)
}

fn manual(command: clap::Command, folder: &Path) -> Done {
    let write = || {
        std::fs::create_dir_all(folder)?;
        clap_mangen::generate_to(command, folder)
    };
    write().map_err(|error| Failure::Usage(format!("--man {}: {error}", folder.display())))
}

//! `dreamc lsp`: the language server, which editors start.

use crate::lsp;
use clap::Args;
use dreamc_study::failure::{Done, Failure};

/// Serve editors: errors as one types, completion, hover, renaming (Language Server Protocol)
#[derive(Args)]
#[command(after_help = "\
Editors start this and speak with it on standard input and output. Visual Studio Code: the folder editors/vscode.
Neovim: vim.lsp.start({ name = \"dreamc\", cmd = { \"dreamc\", \"lsp\" } }) for files *.dream.")]
pub struct Arguments {
    /// Standard input and output, which editors ask for by this name; there is no other way
    #[arg(long, hide = true)]
    stdio: bool,
}

pub fn run(a: Arguments) -> Done {
    let Arguments { stdio: _ } = a;
    match lsp::serve()? {
        true => Ok(()),
        false => Err(Failure::Said),
    }
}

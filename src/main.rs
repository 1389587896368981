//! The program: arguments in, exit code out.

use std::process::ExitCode;

fn main() -> ExitCode {
    dreamc::run(std::env::args_os()).into()
}

//! Options that a command does not have: where a person finds what they ask for.
//!
//! *In*: the error of the parser, and the command line. *Out*: the same error, with advice that is
//! true of this command.

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, Error};
use std::ffi::OsString;

/// Puts advice for an option that the command lacks in place of the parser's, which goes by letters
/// alone.
pub fn advise(mut error: Error, all: &Command, line: &[OsString]) -> Error {
    let Some(ContextValue::String(given)) = error.get(ContextKind::InvalidArg) else { return error };
    if error.kind() != ErrorKind::UnknownArgument || !given.starts_with("--") {
        return error;
    }
    let option = given.trim_start_matches('-').split('=').next().unwrap_or_default().to_string();
    let words = line.iter().skip(1).filter_map(|word| word.to_str());
    let Some(command) = words.into_iter().find_map(|word| all.find_subcommand(word)) else { return error };
    // No file is called `--steps`.
    error.remove(ContextKind::Suggested);
    let Some(advice) = advice(&option, command, all) else { return error };
    error.remove(ContextKind::SuggestedArg);
    error.remove(ContextKind::SuggestedValue);
    error.remove(ContextKind::SuggestedSubcommand);
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![StyledStr::from(advice)]));
    error
}

fn takes(command: &Command, option: &str) -> bool {
    command.get_arguments().any(|argument| argument.get_long() == Some(option))
}

fn advice(option: &str, command: &Command, all: &Command) -> Option<String> {
    if option == "data" && command.get_name() == "resume" {
        return Some(
            "a run goes on with its own data; `dreamc train RUN --data FILE` begins another from its weights"
                .into(),
        );
    }
    if let (true, Some(field)) = (takes(command, "set"), dreamc_dsl::field_called(option)) {
        return Some(format!("it is a field of the specification: `--set {field}=VALUE`"));
    }
    let others: Vec<String> = all
        .get_subcommands()
        .filter(|other| takes(other, option))
        .map(|other| format!("`dreamc {}`", other.get_name()))
        .collect();
    let (last, rest) = others.split_last()?;
    let (names, has) = match rest {
        [] => (last.clone(), "has"),
        _ => (format!("{} and {last}", rest.join(", ")), "have"),
    };
    Some(format!("{names} {has} `--{option}`; `dreamc {}` does not", command.get_name()))
}

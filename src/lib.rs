//! The command line of dreamc.
//!
//! One file a command, under [`command`]; each reads its arguments, calls the library
//! (`dreamc-study` for all that a front end shares with others) and prints. [`arguments`] has those
//! of several commands, [`unknown`] answers options that a command lacks, [`lsp`] is the server of
//! editors, [`studio`] what the studio's page asks.

mod arguments;
mod command;
mod lsp;
mod studio;
mod unknown;

use clap::{CommandFactory, Parser, Subcommand};
use dreamc_study::{failure, output};
use std::ffi::OsString;

/// A declarative architecture compiler for attention mixtures.
#[derive(Parser)]
#[command(name = "dreamc", version, propagate_version = true, max_term_width = 100)]
#[command(after_help = "\
Examples:
  dreamc new recurrent mine                        write a small model with comments, which trains as it is
  dreamc train examples/quickstart.yaml            train a small model, on the CPU, from nothing
  dreamc check my.yaml                             every error of a file, each at its place
  dreamc train my.yaml --data book.txt --out run   train on a text of yours
  dreamc generate run \"Once upon\"                  let it write

`dreamc COMMAND --help` shows more of each. Where a command reads a specification, `-` is standard input.

Exit codes:
  0    the work is done and the answer is yes
  1    the answer is no: errors in a specification, a proof that fails, a run that fails
  2    the command line is wrong: an option, or a file that is not there or not of the kind that is needed
  130  stopped by Ctrl-C (SIGINT); a run has left a checkpoint and can be resumed
  143  stopped by SIGTERM, in the same way")]
struct Arguments {
    #[command(flatten)]
    terminal: arguments::TerminalArguments,

    #[command(subcommand)]
    command: Option<Command>,
}

/// Said where no command is given.
const BEGIN: &str = "\
dreamc compiles mixtures of attention from a specification: it checks, counts, trains and compares them.

Begin with:
  dreamc new                      write a small model with comments, recurrent.dream
  dreamc train recurrent.dream    train it on this machine, in a few minutes
  dreamc doctor                   see what this machine can do, and what to install

`dreamc --help` lists all commands.
";

#[derive(Subcommand)]
enum Command {
    New(command::new::Arguments),
    Doctor(command::doctor::Arguments),
    Check(command::check::Arguments),
    CheckTransfer(command::check_transfer::Arguments),
    Fmt(command::fmt::Arguments),
    Show(command::show::Arguments),
    Schema(command::schema::Arguments),
    Count(command::count::Arguments),
    Match(command::matching::Arguments),
    Plan(command::plan::Arguments),
    Compile(command::compile::Arguments),
    Explain(command::explain::Arguments),
    Draw(command::draw::Arguments),
    Studio(command::studio::Arguments),
    Train(command::train::Arguments),
    Transplant(command::transplant::Arguments),
    Resume(command::resume::Arguments),
    Launch(command::launch::Arguments),
    Generate(command::generate::Arguments),
    Serve(command::serve::Arguments),
    Eval(command::eval::Arguments),
    Analyze(command::analyze::Arguments),
    Compare(command::compare::Arguments),
    Exam(command::exam::Arguments),
    Report(command::report::Arguments),
    Fit(command::fit::Arguments),
    Watch(command::watch::Arguments),
    Runs(command::runs::Arguments),
    Diff(command::diff::Arguments),
    Verify(command::verify::Arguments),
    Bench(command::bench::Arguments),
    Probe(command::probe::Arguments),
    Import(command::import::Arguments),
    Export(command::export::Arguments),
    Quantize(command::quantize::Arguments),
    Merge(command::merge::Arguments),
    Data(command::data::Arguments),
    Tokenizer(command::tokenizer::Arguments),
    Lsp(command::lsp::Arguments),
    Completions(command::completions::Arguments),
}

/// Runs the program with its arguments, the first of them its name; gives the exit code that
/// `dreamc --help` documents.
pub fn run(arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>) -> u8 {
    dreamc_runtime::train::signal::ignore_limits();
    dreamc_device::notice::listen(|line| output::complain(&format!("{line}\n")));
    command::doctor::prove_plans();
    let line: Vec<OsString> = arguments.into_iter().map(Into::into).collect();
    let arguments = match Arguments::try_parse_from(&line) {
        Ok(arguments) => arguments,
        Err(error) => {
            let error = unknown::advise(error, &Arguments::command(), &line);
            // Nobody is left to hear of a stream that is closed.
            let _ = error.print();
            return error.exit_code() as u8;
        }
    };
    output::speak(*arguments.terminal);
    let Some(command) = arguments.command else {
        return match output::write(BEGIN.as_bytes()).and_then(|()| output::flush()) {
            Ok(()) => 0,
            Err(error) => failure::Failure::from(error).report(),
        };
    };
    let result = match command {
        Command::New(a) => command::new::run(a),
        Command::Doctor(a) => command::doctor::run(a),
        Command::Check(a) => command::check::run(a),
        Command::CheckTransfer(a) => command::check_transfer::run(a),
        Command::Fmt(a) => command::fmt::run(a),
        Command::Show(a) => command::show::run(a),
        Command::Schema(a) => command::schema::run(a),
        Command::Count(a) => command::count::run(a),
        Command::Match(a) => command::matching::run(a),
        Command::Plan(a) => command::plan::run(a),
        Command::Compile(a) => command::compile::run(a),
        Command::Explain(a) => command::explain::run(a),
        Command::Draw(a) => command::draw::run(a),
        Command::Studio(a) => command::studio::run(a),
        Command::Train(a) => command::train::run(a),
        Command::Transplant(a) => command::transplant::run(a),
        Command::Resume(a) => command::resume::run(a),
        Command::Launch(a) => command::launch::run(a),
        Command::Generate(a) => command::generate::run(a),
        Command::Serve(a) => command::serve::run(a),
        Command::Eval(a) => command::eval::run(a),
        Command::Analyze(a) => command::analyze::run(a),
        Command::Compare(a) => command::compare::run(a),
        Command::Exam(a) => command::exam::run(a),
        Command::Report(a) => command::report::run(a),
        Command::Fit(a) => command::fit::run(a),
        Command::Watch(a) => command::watch::run(a),
        Command::Runs(a) => command::runs::run(a),
        Command::Diff(a) => command::diff::run(a),
        Command::Verify(a) => command::verify::run(a),
        Command::Bench(a) => command::bench::run(a),
        Command::Probe(a) => command::probe::run(a),
        Command::Import(a) => command::import::run(a),
        Command::Export(a) => command::export::run(a),
        Command::Quantize(a) => command::quantize::run(a),
        Command::Merge(a) => command::merge::run(a),
        Command::Data(a) => command::data::run(a),
        Command::Tokenizer(a) => command::tokenizer::run(a),
        Command::Lsp(a) => command::lsp::run(a),
        Command::Completions(a) => command::completions::run::<Arguments>(a),
    };
    // A fault of standard output is a failure of a command that otherwise succeeded.
    match result.and(output::flush().map_err(Into::into)) {
        Ok(()) => 0,
        Err(failure) => failure.report(),
    }
}

//! `dreamc analyze tokens`: a text as a model reads it.

use crate::arguments::{BaseArguments, DeviceArguments, RewriteArguments};
use clap::{Args, value_parser};
use dreamc_compiler::{CompileError, Options, compile, looks_ahead};
use dreamc_runtime::analysis::tokens::{Reading, Token, read};
use dreamc_runtime::model::Model;
use dreamc_runtime::train::prepare;
use dreamc_study::failure::{Done, Failure};
use dreamc_study::model::Trained;
use dreamc_study::say;
use dreamc_study::show::{self, table};
use std::path::PathBuf;

/// Tokens of a text at most: each has a table of its own for every router and depth.
const MOST: usize = 512;

/// Show what may follow each token of a text, and which experts and depths it took
#[derive(Args)]
#[command(after_help = "\
Of every token: its probability behind those before it, the likeliest next tokens, the experts that routers chose by depth, the
parts in skip(…) that processed it, where depth attention looked, and the passes of a loop with an exit that it left behind.
With --json all of it; the table shows the likeliest tokens and one column of routes.

Examples:
  dreamc analyze tokens runs/quickstart-001 \"abcdefgh 3-8 1-2 = \"
  dreamc analyze tokens runs/book-001 \"Once upon a time\" --top 3 --json")]
pub struct Arguments {
    /// A run folder, a checkpoint or a .safetensors file
    #[arg(value_name = "RUN|CHECKPOINT")]
    model: PathBuf,

    /// The text
    #[arg(value_name = "TEXT")]
    text: String,

    /// The likeliest tokens that are shown
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = value_parser!(u64).range(1..=100))]
    top: u64,

    /// Print the reading as JSON
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    base: BaseArguments,

    #[command(flatten)]
    device: DeviceArguments,

    #[command(flatten)]
    rewriting: RewriteArguments,
}

pub fn run(a: &Arguments) -> Done {
    let device = a.device.open()?;
    let trained = Trained::open(&a.model, a.base.moved(), &[], a.rewriting.on(device.as_ref())?)?;
    let (spec, tokenizer) = (&trained.spec, trained.tokenizer()?);
    if looks_ahead(&spec.model) {
        return Err(CompileError::LooksAhead.into());
    }
    let ids = trained.prompt(&tokenizer, &a.text)?;
    let most = MOST.min(usize::try_from(spec.model.context).unwrap_or(MOST));
    if ids.is_empty() {
        return Err(Failure::Usage("the text has no token: give it at least one".into()));
    }
    if ids.len() > most {
        return Err(Failure::Usage(format!(
            "the text has {} tokens, and at most {most} are shown",
            ids.len()
        )));
    }
    let options = Options {
        observe: true,
        logits: true,
        rewrite: trained.rewriting.clone(),
        narrow: trained.narrow(device.as_ref()),
        ..prepare::forward(1, ids.len() as u64)
    };
    let mut model = Model::load(device.as_ref(), compile(spec, &options)?)?;
    model.restore(&trained.tensors)?;
    let reading = read(&mut model, spec, &tokenizer, &ids, a.top as usize)?;
    if a.json {
        return Ok(show::json(&reading)?);
    }
    Ok(say!("{}", shown(&reading))?)
}

/// The reading as a table.
fn shown(reading: &Reading) -> String {
    let mut rows = vec![["token", "given", "next", "route"].map(String::from).to_vec()];
    rows.extend(reading.tokens.iter().map(|token| {
        let next = token.next.iter().map(|n| format!("{:?} {:.1} %", n.text, 100.0 * n.probability));
        vec![
            format!("{:?}", token.text),
            token.given.map_or("–".into(), |p| format!("{:.1} %", 100.0 * p)),
            next.collect::<Vec<_>>().join("  "),
            route(token),
        ]
    }));
    table(&rows).trim_end().to_string()
}

/// The experts of a token by depth, the depths that processed it, and where it left.
fn route(token: &Token) -> String {
    let mut words: Vec<String> = vec![];
    for chosen in &token.experts {
        let experts: Vec<String> = chosen.experts.iter().map(u64::to_string).collect();
        words.push(format!("{}@{}: {}", chosen.component, chosen.depth, experts.join(" ")));
    }
    if !token.parts.is_empty() {
        let taken = token.parts.iter().filter(|part| part.taken).map(|part| part.depth.to_string());
        let taken: Vec<String> = taken.collect();
        words.push(match taken.is_empty() {
            true => "skips every part".into(),
            false => format!("processed at {}", taken.join(" ")),
        });
    }
    let likely = token.exits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    words.extend(
        likely.map(|(pass, share)| format!("leaves after pass {} ({:.0} %)", pass + 1, 100.0 * share)),
    );
    words.join(", ")
}

//! `dreamc analyze routing`: what tokens skip, and what that goes with.

use super::{Common, Opened, described};
use clap::{Args, value_parser};
use dreamc_compiler::bind::Owner;
use dreamc_data::files;
use dreamc_runtime::analysis::routing::ablation;
use dreamc_runtime::analysis::skips::{ablate, decisions, held_out};
use dreamc_runtime::model::Model;
use dreamc_runtime::train::prepare;
use dreamc_study::failure::{Done, Failure};
use dreamc_study::progress::Progress;
use dreamc_study::report::routing::{Routing, summary};
use std::ops::RangeInclusive;
use std::path::PathBuf;

/// Analyse what Mixture-of-Depths routers let tokens skip
#[derive(Args)]
#[command(after_help = "\
The analyses of the study of routers in Gemma 2, of any model with `skip(…)`: share of tokens that each wrapped part processes, by
layer and kind of layer (paired t-test over rows, Cohen's d); correlation of router scores and norms; change in perplexity when a
part is left out (Welch's t-test between kinds, the rest of the same layers as control); shares by class of token (binomial tests,
Bonferroni) and a logistic probe from class to decision. Leaves routing.html, routing.md, routing.json and figures.

Examples:
  dreamc analyze routing runs/mod-001
  dreamc analyze routing runs/tuned-001 --data wiki.txt --first 4 --depths 12-20 --depths 21-24
  dreamc analyze routing runs/mod-001 --data book.txt --labels tags.txt")]
pub struct Arguments {
    /// A run folder, a checkpoint or a .safetensors file
    #[arg(value_name = "RUN|CHECKPOINT")]
    model: PathBuf,

    /// Rows it is run on
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = value_parser!(u64).range(1..1 << 40))]
    sequences: u64,

    /// Tokens at the beginning of each row that do not count, as attention treats them apart
    #[arg(long, value_name = "N", default_value_t = 0)]
    first: usize,

    /// Compare kinds of layers within these depths, `12-20`, counted from 0; may be given several
    /// times. All by default
    #[arg(long, value_name = "A-B", value_parser = depths)]
    depths: Vec<RangeInclusive<u64>>,

    /// Classes of tokens: a file with one label a line for every token that is read, in order. By
    /// default what the text of a token tells: digits, punctuation, space, capitalised,
    /// word-initial, word-internal
    #[arg(long, value_name = "FILE")]
    labels: Option<PathBuf>,

    /// Write the tokens that are read, one a line as JSON, for something to label
    #[arg(long, value_name = "FILE")]
    write_tokens: Option<PathBuf>,

    /// Leave no part out: saves the time of that
    #[arg(long)]
    no_ablation: bool,

    #[command(flatten)]
    common: Common,
}

fn depths(text: &str) -> Result<RangeInclusive<u64>, String> {
    let range = text.split_once('-').and_then(|(a, b)| Some(a.parse().ok()?..=b.parse().ok()?));
    range.filter(|r| !r.is_empty()).ok_or_else(|| "two depths, the lower first: 12-20".into())
}

pub fn run(a: Arguments) -> Done {
    let Opened { device, trained, dataset, mut held } = a.common.open(&a.model)?;
    let (spec, tokenizer) = (&trained.spec, trained.tokenizer()?);
    // Parts are left out by zeros in their weights, which a file does not take.
    let storing = match a.no_ablation {
        true => trained.storing(device.as_ref()),
        false => trained.narrow(device.as_ref()).into(),
    };
    let compiled = prepare::observer(spec, &trained.rewriting, storing)?;
    if !compiled.observed.iter().any(|o| matches!(o.owner, Owner::Skip(_))) {
        let what = "no part of the model is wrapped in skip(…): there is no routing of tokens to analyse";
        return Err(Failure::Usage(what.into()));
    }
    let mut model = Model::load(device.as_ref(), compiled)?;
    model.restore(&trained.tensors)?;
    let mut progress = Progress::default();
    progress.phase(&format!("running {} rows", a.sequences));
    let mut seen = decisions(&mut model, &spec.model, &mut held, a.sequences)?;
    if let Some(path) = &a.write_tokens {
        files::write_named(path, |out| {
            for (id, place) in seen.tokens.iter().zip(&seen.places) {
                let text = tokenizer.decode(&[*id]);
                writeln!(out, "{}", serde_json::json!({"place": place, "id": id, "text": text}))?;
            }
            Ok(())
        })?;
    }
    match &a.labels {
        Some(path) => {
            let text = files::read_text(path).map_err(|e| files::about(path, e))?;
            let labels: Vec<&str> = text.lines().map(str::trim).collect();
            seen.label(&labels).map_err(|e| Failure::Usage(format!("{}: {e}", path.display())))?;
        }
        None => seen.built_in(&tokenizer),
    }
    seen.without_first(a.first);
    let ablation = if a.no_ablation {
        None
    } else {
        progress.phase("leaving parts out, one after the other");
        let loss = held_out(&mut model, &dataset, a.sequences)?;
        let parts = ablate(&mut model, &spec.model, &dataset, a.sequences)?;
        (loss.targets > 0).then(|| ablation(loss, parts))
    };
    progress.clear();
    let all = 0..=u64::MAX;
    let ranges = if a.depths.is_empty() { vec![all] } else { a.depths.clone() };
    let routing = Routing {
        model: spec.model.name.clone(),
        step: trained.tensors.metadata("step").and_then(|s| s.parse().ok()),
        data: described(spec, &dataset),
        sequences: seen.decisions.sequences.iter().filter(|n| **n > 0).count() as u64,
        tokens: seen.tokens.len() as u64,
        first: a.first as u64,
        kinds: ranges.into_iter().flat_map(|r| seen.decisions.kinds(r)).collect(),
        parts: seen.decisions.parts(spec.train.seed),
        recursions: seen.decisions.recursions(),
        ablation,
    };
    a.common.leave(&a.model, "routing", routing.page(), &routing, || summary(&routing))
}

//! `dreamc analyze`: what a trained model does inside.

pub mod rank;
mod routing;
mod tokens;

use crate::arguments::{BaseArguments, DeviceArguments, RewriteArguments};
use clap::{Args, Subcommand, value_parser};
use dreamc_compiler::probe::{Probe, matches, points};
use dreamc_compiler::{Options, compile, looks_ahead};
use dreamc_data::files;
use dreamc_data::{Batches, Dataset};
use dreamc_device::Device;
use dreamc_dsl::spec::{Item, Spec};
use dreamc_runtime::analysis::probe::{Part, ProbeError, Probing, Without, without_experts, without_heads};
use dreamc_runtime::analysis::{experts::ExpertUse, observe};
use dreamc_runtime::evaluate;
use dreamc_runtime::model::Model;
use dreamc_runtime::train::prepare::{self, forward};
use dreamc_study::failure::{Done, Failure};
use dreamc_study::model::Trained;
use dreamc_study::progress::Progress;
use dreamc_study::report::analysis::{Analysis, AtDepth, Rank};
use dreamc_study::report::{draw, page::Page};
use dreamc_study::show::table;
use dreamc_study::spec::{measure_on, open_data};
use dreamc_study::{say, show};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Analyse where depth attention looks and which experts serve which depth
#[derive(Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
#[command(after_help = "\
The paper's section 4.2 of any model with routers or depth attention: map of depth-attention scores, depths of experts and experts
of depths, Lorenz curves, routing entropy; how much each layer turns the stream, and how alike what layers add is; ranks of matrices;
and a recurrent model at other depths. Leaves analysis.html, analysis.md, analysis.json
and figures.

Examples:
  dreamc analyze runs/quickstart-001
  dreamc analyze runs/book-001 --data other.txt --sequences 200
  dreamc analyze runs/quickstart-001 --depth 2 --depth 4 --depth 16 --json
  dreamc analyze runs/quickstart-001 --importance            the loss without each head and expert
  dreamc analyze routing runs/mod-001                        what tokens skip
  dreamc analyze tokens runs/quickstart-001 \"abcd 1-2 = \"     a text, token by token")]
pub struct Arguments {
    #[command(subcommand)]
    what: Option<What>,

    #[command(flatten)]
    inside: Inside,
}

#[derive(Subcommand)]
enum What {
    Routing(Box<routing::Arguments>),
    Tokens(Box<tokens::Arguments>),
}

#[derive(Args)]
struct Inside {
    /// A run folder, a checkpoint or a .safetensors file
    #[arg(value_name = "RUN|CHECKPOINT", required = true)]
    model: Option<PathBuf>,

    /// Rows it is run on
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = value_parser!(u64).range(1..1 << 40))]
    sequences: u64,

    /// Also measure the loss of one batch without each head and each expert
    #[arg(long)]
    importance: bool,

    /// Measure a recurrent model at this depth: the count of its outermost `recur`; may be given
    /// several times. A few around the trained one by default
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..1 << 20))]
    depth: Vec<u64>,

    #[command(flatten)]
    common: Common,
}

/// Arguments of every analysis: data, device, and the folder of the report.
#[derive(Args)]
struct Common {
    /// Run it on all of this file (text, .jsonl, .parquet) in place of what was held out
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,

    /// Folder of the report; `analysis` in the run's folder by default
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,

    /// Print the analysis as JSON
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    base: BaseArguments,

    #[command(flatten)]
    device: DeviceArguments,

    #[command(flatten)]
    rewriting: RewriteArguments,
}

/// Rows by which parts are taken out, at most.
const IMPORTANT: u64 = 16;

/// A trained model and what it is run on.
struct Opened {
    device: Box<dyn Device>,
    trained: Trained,
    dataset: Dataset,
    held: Batches,
}

impl Common {
    fn open(&self, path: &Path) -> Result<Opened, Failure> {
        let device = self.device.open()?;
        let mut trained = Trained::open(path, self.base.moved(), &[], self.rewriting.on(device.as_ref())?)?;
        if let Some(file) = &self.data {
            let beside = trained.tokenizer_file();
            measure_on(&mut trained.spec, file, beside.as_deref())?;
        }
        let nothing =
            || Failure::Usage("there is no held-out data to run it on; name a file with --data".into());
        let data = trained.spec.data.as_ref().ok_or_else(nothing)?;
        let dataset = open_data(&trained.spec, data, None)?;
        let held = dataset.validation()?.ok_or_else(nothing)?;
        Ok(Opened { device, trained, dataset, held })
    }

    /// Writes the page, its figures and the analysis as JSON, all called `name`, and prints the
    /// summary, or the JSON.
    fn leave(
        &self,
        path: &Path,
        name: &str,
        page: Page,
        analysis: &impl Serialize,
        summary: impl FnOnce() -> String,
    ) -> Done {
        let folder = match &self.out {
            Some(folder) => folder.clone(),
            None if path.is_dir() => path.join("analysis"),
            None => "analysis".into(),
        };
        std::fs::create_dir_all(&folder).map_err(|e| files::about(&folder, e))?;
        page.write(&folder, name)?;
        let text = serde_json::to_string_pretty(analysis)? + "\n";
        files::write_atomic(&folder.join(format!("{name}.json")), |out| out.write_all(text.as_bytes()))?;
        if self.json {
            return Ok(show::json(analysis)?);
        }
        say!("{}", summary())?;
        Ok(say!("{}", folder.join(format!("{name}.html")).display())?)
    }
}

pub fn run(a: Arguments) -> Done {
    match (a.what, &a.inside.model) {
        (Some(What::Routing(a)), _) => routing::run(*a),
        (Some(What::Tokens(a)), _) => tokens::run(&a),
        (None, Some(model)) => inside(&a.inside, model),
        (None, None) => Err(Failure::Usage("name a run or a checkpoint".into())),
    }
}

fn inside(a: &Inside, path: &Path) -> Done {
    let Opened { device, trained, dataset, mut held } = a.common.open(path)?;
    let spec = &trained.spec;
    let mut model = Model::load(
        device.as_ref(),
        prepare::observer(spec, &trained.rewriting, trained.storing(device.as_ref()))?,
    )?;
    model.restore(&trained.tensors)?;
    let mut progress = Progress::default();
    progress.phase(&format!("running {} rows", a.sequences));
    let observations = observe(&mut model, spec, &mut held, a.sequences)?;
    drop(model);
    progress.phase("ranks of matrices");
    let ranks = rank::ranks(&trained)?;
    let importance = match a.importance {
        true => {
            progress.phase("the loss without each head and expert");
            importance(&trained, device.as_ref(), &dataset)?
        }
        false => vec![],
    };
    let experts = observations.routers.iter().map(|r| ExpertUse::of(r, spec.train.seed)).collect();
    let analysis = Analysis {
        model: spec.model.name.clone(),
        step: trained.tensors.metadata("step").and_then(|s| s.parse().ok()),
        data: described(spec, &dataset),
        observations,
        experts,
        ranks,
        importance,
        depths: depths(a, &trained, device.as_ref(), &mut progress)?,
    };
    progress.clear();
    let wiring = draw::figure(&spec.model.name, &spec.model);
    a.common.leave(path, "analysis", analysis.page(wiring), &analysis, || summary(&analysis))
}

/// The data in words, files by their names alone: a page that is passed on tells nothing of
/// folders.
fn described(spec: &Spec, dataset: &Dataset) -> Vec<String> {
    let mut lines = dataset.describe();
    for path in spec.clone().paths() {
        let name = Path::new(path.as_str()).file_name().unwrap_or_default().to_string_lossy().into_owned();
        lines.iter_mut().for_each(|line| *line = line.replace(path.as_str(), &name));
    }
    lines
}

/// Count of the one outermost `recur`, which can be run at other depths.
fn recurrence(spec: &Spec) -> Option<u64> {
    let counts: Vec<u64> = spec
        .model
        .body
        .iter()
        .filter_map(|item| match item {
            Item::Recur { count, .. } => Some(*count),
            _ => None,
        })
        .collect();
    if let [count] = counts[..] { Some(count) } else { None }
}

/// Whether training sees the loss of every pass.
fn exits(spec: &Spec) -> bool {
    let seen = |item: &Item| matches!(item, Item::Recur { looping, .. } if !looping.exit.is_last());
    spec.model.body.iter().any(seen)
}

/// The model at several depths; at none where it is not recurrent and none was asked for.
fn depths(
    a: &Inside,
    trained: &Trained,
    device: &dyn Device,
    progress: &mut Progress,
) -> Result<Vec<AtDepth>, Failure> {
    let spec = &trained.spec;
    let Some(data) = &spec.data else { return Ok(vec![]) };
    // The loss is that of the run and of `eval`, over the same rows.
    let dataset = open_data(spec, data, spec.eval.stride)?;
    let mut counts = a.depth.clone();
    let own = recurrence(spec);
    match own {
        // The loss after every pass.
        Some(n) if counts.is_empty() && exits(spec) => counts = (1..=n).collect(),
        Some(n) if counts.is_empty() => counts = vec![1, n / 4, n / 2, 3 * n / 4, n, n + n / 2, 2 * n],
        Some(n) => counts.push(n),
        None => {}
    }
    // Passes with weights of their own are no more than are written.
    let limit = spec.model.most_passes();
    counts.retain(|n| *n > 0 && (!a.depth.is_empty() || limit.is_none_or(|most| *n <= most)));
    counts.sort_unstable();
    counts.dedup();
    let mut found = vec![];
    let all = counts.len();
    for (i, count) in counts.into_iter().enumerate() {
        progress.phase(&format!("at depth {count}, {} of {all}", i + 1));
        let mut model = trained.measurer(device, Some(count))?;
        let mut at = AtDepth {
            count,
            depth: model.compiled().depth,
            trained: own == Some(count),
            loss: None,
            targets: None,
            exact_match: None,
            by_difficulty: vec![],
        };
        let loss = match &a.common.data {
            Some(_) => evaluate::drawn(&mut model, &dataset, u64::MAX)?,
            None => evaluate::held_out(&mut model, &dataset, &spec.train)?,
        };
        if let Some(loss) = loss.filter(|l| l.targets > 0) {
            at.loss = Some(loss.mean());
            at.targets = Some(loss.targets);
        }
        let mut all = vec![];
        // A model that looks ahead cannot generate.
        let tasks: Vec<_> = dataset.tasks().filter(|_| !looks_ahead(&spec.model)).collect();
        if !tasks.is_empty() {
            model = trained.scoring(device, Some(count))?;
        }
        for task in tasks {
            let (mask, seed) = (prepare::masked(spec), spec.train.seed);
            let each = spec.eval.examples;
            all.extend(evaluate::exact_match(&mut model, &dataset.tokenizer, task, seed, mask, each)?);
        }
        at.exact_match = evaluate::share(&all);
        let asked = all.iter().filter(|d| d.asked > 0);
        at.by_difficulty = asked.map(|d| (d.steps, d.right as f64 / d.asked as f64)).collect();
        found.push(at);
    }
    Ok(found)
}

/// Parts whose importance the summary lists, the most important first; the file has all.
const SHOWN: usize = 12;

/// The batch without each head and each expert that it uses.
fn importance(trained: &Trained, device: &dyn Device, dataset: &Dataset) -> Result<Vec<Without>, Failure> {
    let Some(mut held) = dataset.validation()? else { return Ok(vec![]) };
    let mut found = vec![];
    for part in [Part::Heads, Part::Experts] {
        let [captured, patched] = part.patterns();
        let rows = IMPORTANT.min(trained.spec.train.batch).max(1);
        let looking = || Options {
            segments: prepare::masked(&trained.spec),
            ..forward(rows, prepare::sequence(&trained.spec))
        };
        let known = points(&trained.spec.model, &looking())?;
        let there = |pattern: &String| known.iter().any(|point| matches(pattern, &point.name));
        let keep = |patterns: Vec<String>| patterns.into_iter().filter(|p| there(p)).collect::<Vec<_>>();
        let probe = Probe { captured: keep(captured), patched: keep(patched) };
        if probe.is_empty() {
            continue;
        }
        let options = Options { probe, rewrite: trained.rewriting.clone(), ..looking() };
        let mut model = Model::load(device, compile(&trained.spec, &options)?)?;
        model.restore(&trained.tensors)?;
        let Some(batch) = held.take(model.batch())? else { break };
        let mut probing = Probing::new(model)?;
        found.extend(match part {
            Part::Experts => without_experts(&mut probing, &batch)?,
            Part::Heads => {
                without_heads(&mut probing, &mut |model: &mut Model| -> Result<f64, ProbeError> {
                    let losses = model.evaluate(&batch)?;
                    let learned = batch.targets.iter().zip(&losses).filter(|(target, _)| **target >= 0);
                    Ok(learned.map(|(_, loss)| f64::from(*loss)).sum::<f64>() / batch.learned().max(1) as f64)
                })?
            }
        });
    }
    Ok(found)
}

/// Ranks, matrices of one name in all layers together.
fn matrices(ranks: &[Rank]) -> String {
    let mut groups: Vec<(String, Vec<&Rank>)> = vec![];
    for rank in ranks {
        let words: Vec<&str> = rank.name.split('.').collect();
        let name = match words[..] {
            ["layers", _, ..] => format!("layers.*.{}", words[2..].join(".")),
            _ => rank.name.clone(),
        };
        match groups.iter_mut().find(|(other, _)| *other == name) {
            Some((_, all)) => all.push(rank),
            None => groups.push((name, vec![rank])),
        }
    }
    if groups.is_empty() {
        return String::new();
    }
    let mut rows = vec![["matrix", "rank", "of 9/10 of squares", "effective"].map(String::from).to_vec()];
    let mean =
        |all: &[&Rank], of: &dyn Fn(&Rank) -> f64| all.iter().map(|r| of(r)).sum::<f64>() / all.len() as f64;
    for (name, all) in groups {
        let nine = mean(&all, &|rank| rank.nine_tenths as f64);
        let effective = mean(&all, &|rank| rank.effective);
        rows.push(vec![name, all[0].full.to_string(), format!("{nine:.1}"), format!("{effective:.1}")]);
    }
    format!("\n{}", table(&rows))
}

fn summary(analysis: &Analysis) -> String {
    let head = [
        "",
        "experts",
        "dead",
        "Gini",
        "entropy",
        "≥ 1/5 of depths",
        "used at a depth, least … most",
        "even split",
    ];
    let mut rows = vec![head.map(String::from).to_vec()];
    for u in &analysis.experts {
        let used = u.depths.iter().map(|d| d.used);
        let (low, high) = (used.clone().min().unwrap_or(0), used.max().unwrap_or(0));
        rows.push(vec![
            format!("{}{}", u.component, if u.projection { ", projections" } else { "" }),
            u.experts.to_string(),
            u.dead.to_string(),
            format!("{:.3}", u.gini),
            format!("{:.3}", u.balance),
            format!("{:.1} %", 100.0 * u.generalists),
            format!("{low} … {high}"),
            format!("{:.1}", u.layered),
        ]);
    }
    let mut text = if analysis.experts.is_empty() { String::new() } else { table(&rows) };
    let influence = &analysis.observations.streams.influence;
    if influence.len() > 1 {
        let head = ["layer", "block influence", "most alike", "cosine of what both add"];
        let mut rows = vec![head.map(String::from).to_vec()];
        let similarity = &analysis.observations.streams.similarity;
        for (depth, i) in influence.iter().enumerate() {
            let others = similarity[depth].iter().enumerate().filter(|(other, _)| *other != depth);
            let Some((other, cosine)) = others.max_by(|a, b| a.1.total_cmp(b.1)) else { continue };
            rows.push(vec![depth.to_string(), format!("{i:.4}"), other.to_string(), format!("{cosine:.2}")]);
        }
        let blank = if text.is_empty() { "" } else { "\n" };
        text = format!("{text}{blank}{}", table(&rows));
    }
    text = format!("{text}{}", matrices(&analysis.ranks));
    if !analysis.importance.is_empty() {
        let mut rows = vec![["part", "number", "loss without"].map(String::from).to_vec()];
        let mut all: Vec<_> = analysis.importance.iter().collect();
        all.sort_by(|a, b| b.measure.total_cmp(&a.measure));
        let one = |part: &&Without| {
            vec![part.name.clone(), part.number.to_string(), format!("{:.4}", part.measure)]
        };
        rows.extend(all.iter().take(SHOWN).map(one));
        text = format!("{text}\n{}", table(&rows));
    }
    if !analysis.observations.passes.is_empty() {
        let mut rows = vec![["pass", "loss", "targets", "leave"].map(String::from).to_vec()];
        for (i, pass) in analysis.observations.passes.iter().enumerate() {
            rows.push(vec![
                (i + 1).to_string(),
                format!("{:.4}", pass.loss),
                pass.targets.to_string(),
                pass.share.map_or("–".into(), |share| format!("{:.1} %", 100.0 * share)),
            ]);
        }
        text = format!("{text}\n{}", table(&rows));
    }
    if analysis.depths.len() > 1 {
        let mut rows = vec![["recur", "depth", "loss", "targets", "exact match"].map(String::from).to_vec()];
        for d in &analysis.depths {
            rows.push(vec![
                d.count.to_string(),
                d.depth.to_string(),
                d.loss.map_or("–".into(), |l| format!("{l:.4}")),
                d.targets.map_or("–".into(), |n| n.to_string()),
                d.exact_match.map_or("–".into(), |e| format!("{:.1} %", 100.0 * e)),
            ]);
        }
        text = format!("{text}\n{}", table(&rows));
    }
    text
}

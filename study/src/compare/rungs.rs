//! The report of a ladder, from ledgers alone: tuning, cells, curves of equal FLOPs, laws.
//!
//! *In*: the folder of [`super::ladder`]. *Out*: a [`Page`], `runs.csv`, and a table for the
//! terminal. *Promise*: only runs at their end count, so that no point stands inside a schedule
//! that has not decayed; a law that the runs do not determine is a reason, never a number.

use super::ladder::{Lost, Manifest, SWEEP, losses, lost, noise};
use super::study::{self, ledger, run_folder, spec_file};
use crate::failure::{Done, Failure};
use crate::number::{grouped, many};
use crate::report::draw;
use crate::report::page::{Block, Figure, Page, Table};
use crate::report::plot::{Axis, Color, Mark, Plot, Series};
use crate::show::{short, table};
use crate::spec;
use dreamc_compiler::count::{Options as Counting, count};
use dreamc_data::files;
use dreamc_dsl::Spec;
use dreamc_dsl::spec::Item;
use dreamc_fits::iso::{Frontier, frontier};
use dreamc_fits::{Constant, Fit, Law, Options, Run, Speedup, fit, speedup};
use dreamc_runtime::statistics::{Summary, bonferroni, paired};
use std::path::Path;

const NONE: &str = "–";
/// As in the report of a comparison: no test below, and no conclusion.
const FEWEST_TESTED: usize = 3;
const FEWEST_CONCLUSIVE: usize = 5;

/// A ladder as it stands.
pub struct Climb {
    manifest: Manifest,
    /// Runs at their end, each with the number of its cell and its targets.
    runs: Vec<(usize, Run, Option<u64>)>,
    /// Held-out losses of the trials of each arm.
    trials: Vec<Vec<Option<f64>>>,
    /// Those of the trials that went on, by cell and arm.
    halved: Vec<Vec<Vec<Option<f64>>>>,
    /// Carried rates that were tried again.
    lost: Vec<Lost>,
    /// The specifications at the first cell.
    specs: Vec<Option<Spec>>,
    /// Fits by arm.
    laws: Vec<Laws>,
    /// The law of each arm with the baseline, where they differ in passes: what one is worth.
    passes: Vec<Option<Result<Fit, String>>>,
    /// The baseline's noise at each cell, in words.
    noise: Vec<Option<String>>,
}

struct Laws {
    law: Result<Fit, String>,
    frontier: Result<Frontier, String>,
    speedup: Vec<Speedup>,
}

impl Climb {
    /// Reads the folder of a ladder.
    pub fn read(folder: &Path) -> Result<Self, Failure> {
        let Some(manifest) = Manifest::of(folder)? else {
            return Err(Failure::Usage(format!("{} is not the folder of a ladder", folder.display())));
        };
        let (mut runs, mut noises) = (vec![], vec![]);
        let mut specs: Vec<Option<Spec>> = vec![None; manifest.arms.len()];
        for (c, cell) in manifest.cells.iter().enumerate() {
            let at = folder.join(&cell.name);
            for (i, arm) in manifest.arms.iter().enumerate() {
                let path = spec_file(&at, arm);
                if !path.is_file() {
                    continue;
                }
                let text = files::read_text(&path).map_err(|e| files::about(&path, e))?;
                let spec = spec::parse(&path.display().to_string(), &text, &[])?;
                for &seed in &manifest.seeds {
                    let ended = ledger(&run_folder(&at, arm, seed))?.filter(study::ended);
                    let Some(l) = ended else { continue };
                    let (Some(loss), Some(flops)) = (l.validation_loss, l.declared_flops_per_token) else {
                        continue;
                    };
                    let (inside, passes) = looped(&spec);
                    let run = Run {
                        arm: arm.clone(),
                        params: l.parameters as f64 - inside,
                        loop_params: inside,
                        passes,
                        tokens: l.tokens as f64,
                        flops: flops * l.tokens as f64,
                        loss,
                        seed,
                        seconds: Some(l.train_seconds).filter(|s| *s > 0.0),
                    };
                    runs.push((c, run, l.validation_targets));
                }
                specs[i].get_or_insert(spec);
            }
            let base = losses(&at, &manifest.arms[0], &manifest.seeds)?;
            noises.push(noise(&base, manifest.arms.len().saturating_sub(1)));
        }
        let mut trials = vec![];
        for of in &manifest.trials {
            let mut found = vec![];
            for trial in of {
                let loss = losses(&folder.join(SWEEP), &trial.name, &manifest.seeds[..1])?;
                found.push(loss.first().copied());
            }
            trials.push(found);
        }
        let loss_of = |at: &str, name: &str| -> Result<Option<f64>, Failure> {
            Ok(losses(&folder.join(at), name, &manifest.seeds[..1])?.first().copied())
        };
        let mut halved = vec![];
        for cell in &manifest.halved {
            let arms = manifest.trials.iter().zip(&cell.trials);
            let of = |(trials, own): (&Vec<_>, &Vec<usize>)| {
                let each = own.iter().filter_map(|k| trials.get(*k));
                each.map(|trial: &super::ladder::Trial| loss_of(&cell.folder(), &trial.name))
                    .collect::<Result<Vec<_>, _>>()
            };
            halved.push(arms.map(of).collect::<Result<Vec<_>, _>>()?);
        }
        let lost = lost(&manifest, folder)?;
        let mut laws: Vec<Laws> = vec![];
        for arm in &manifest.arms {
            let own: Vec<&Run> = runs.iter().map(|(_, r, _)| r).filter(|r| r.arm == *arm).collect();
            let frontier = frontier(&own, &Options::default()).map_err(|e| e.to_string());
            let base = laws.first().and_then(|l| l.frontier.as_ref().ok());
            let speedup = match (base, &frontier) {
                (Some(base), Ok(own)) => speedup(base, own),
                _ => vec![],
            };
            laws.push(Laws {
                law: fit(Law::Plain, &own, &Options::default()).map_err(|e| e.to_string()),
                frontier,
                speedup,
            });
        }
        let with_baseline = |arm: &String| {
            let of = |r: &&Run| r.arm == *arm || r.arm == manifest.arms[0];
            let both: Vec<&Run> = runs.iter().map(|(_, r, _)| r).filter(of).collect();
            let loops = *arm != manifest.arms[0] && both.iter().any(|r| r.passes != both[0].passes);
            loops.then(|| fit(Law::Loop, &both, &Options::default()).map_err(|e| e.to_string()))
        };
        let passes = manifest.arms.iter().map(with_baseline).collect();
        Ok(Climb { manifest, runs, trials, halved, lost, specs, laws, passes, noise: noises })
    }

    fn of(&self, cell: usize, arm: &str) -> Vec<&Run> {
        self.runs.iter().filter(|(c, r, _)| *c == cell && r.arm == arm).map(|(_, r, _)| r).collect()
    }

    /// FLOPs a second of an arm, over all its runs.
    fn rate(&self, arm: &str) -> Option<f64> {
        let own = self.runs.iter().map(|(_, r, _)| r).filter(|r| r.arm == arm);
        let (flops, seconds) =
            own.fold((0.0, 0.0), |(f, s), r| r.seconds.map_or((f, s), |t| (f + r.flops, s + t)));
        (seconds > 0.0).then_some(flops / seconds)
    }

    /// The loss of an arm at its best size of a budget, and the name of the size.
    fn best(&self, budget: f64, arm: &str) -> Option<(Summary, &str)> {
        let cells = self.manifest.cells.iter().enumerate().filter(|(_, c)| c.budget == Some(budget));
        let found = cells.filter_map(|(c, cell)| {
            let losses: Vec<f64> = self.of(c, arm).iter().map(|r| r.loss).collect();
            Some((Summary::of(&losses)?, cell.size.as_deref()?))
        });
        found.min_by(|a, b| a.0.mean.total_cmp(&b.0.mean))
    }

    /// The largest budget at which every arm that goes on has a run.
    fn last_budget(&self) -> Option<f64> {
        let has = |b: &f64| {
            let going = self.manifest.arms.iter().filter(|arm| !self.manifest.stopped.contains(arm));
            let mut going = going.map(|arm| self.best(*b, arm).is_some());
            going.all(|found| found)
        };
        self.manifest.cells.iter().filter_map(|c| c.budget).filter(has).reduce(f64::max)
    }

    /// One row for each arm: what a reader quotes.
    fn quoted(&self) -> Option<Table> {
        let budget = self.last_budget()?;
        let interval = |low: f64, high: f64| format!(" ({low:.2} to {high:.2})");
        let head = [
            "arm".to_string(),
            "tuned".into(),
            format!("loss at {budget:.1e} FLOPs, nats"),
            "size".into(),
            "effective speedup, ×".into(),
            "phi, worth of a pass".into(),
        ];
        let mut table = Table {
            caption: "The result: means over seeds ± standard deviation at each arm's best size, 95 % intervals in brackets".into(),
            head: head.to_vec(),
            rows: vec![],
            text: vec![1, 3],
        };
        for (i, arm) in self.manifest.arms.iter().enumerate() {
            let tuned = self.manifest.chosen[i].and_then(|k| self.manifest.trials[i].get(k));
            let tuned = tuned.map_or(NONE.into(), |t| {
                let of = |(field, value): &(String, f64)| {
                    format!("{} {value:e}", field.strip_prefix("train.").unwrap_or(field))
                };
                t.values.iter().map(of).collect::<Vec<_>>().join(", ")
            });
            let (loss, size) = self.best(budget, arm).map_or((NONE.into(), NONE.into()), |(s, size)| {
                let deviation = s.deviation.map_or(String::new(), |d| format!(" ± {d:.4}"));
                (format!("{:.4}{deviation}", s.mean), size.to_string())
            });
            let speedup = self.laws[i].speedup.last().filter(|_| i > 0);
            let speedup = match speedup.map(|s| (s.factor, s.interval)) {
                None => NONE.into(),
                Some((None, _)) => "beyond the baseline's law".into(),
                Some((Some(factor), within)) => {
                    format!("{factor:.2}{}", within.map_or(String::new(), |(l, h)| interval(l, h)))
                }
            };
            let phi = self.passes[i].as_ref().and_then(|f| f.as_ref().ok());
            let phi = phi.and_then(|f| f.constants.iter().find(|c| c.name == "phi"));
            let phi = phi.map_or(NONE.into(), |c| format!("{:.2}{}", c.value, interval(c.low, c.high)));
            let row = [arm.clone(), tuned, loss, size, speedup, phi];
            table.rows.push(row.map(Into::into).to_vec());
        }
        Some(table)
    }

    /// The row of an arm in a cell: parameters, tokens, FLOPs, loss, difference, interval, verdict.
    fn row(&self, cell: usize, arm: &str) -> Option<Vec<String>> {
        let own = self.of(cell, arm);
        let losses: Vec<f64> = own.iter().map(|r| r.loss).collect();
        let s = Summary::of(&losses)?;
        let first = own.first()?;
        let deviation = s.deviation.map_or(String::new(), |d| format!(" ± {d:.4}"));
        let base = self.of(cell, &self.manifest.arms[0]);
        let pairs: (Vec<f64>, Vec<f64>) =
            own.iter().filter_map(|r| Some((r.loss, base.iter().find(|b| b.seed == r.seed)?.loss))).unzip();
        let mut row = vec![
            self.manifest.cells[cell].name.clone(),
            arm.into(),
            short(first.params + first.loop_params),
            grouped(first.tokens as u128),
            format!("{:.3e}", first.flops),
            format!("{:.4}{deviation}", s.mean),
            s.n.to_string(),
        ];
        if arm == self.manifest.arms[0] || pairs.0.is_empty() {
            row.extend([NONE, NONE, NONE].map(String::from));
            return Some(row);
        }
        let difference = Summary::of(&pairs.0)?.mean - Summary::of(&pairs.1)?.mean;
        row.push(format!("{difference:+.4}"));
        let n = pairs.0.len();
        let test = if n < FEWEST_TESTED { None } else { paired(&pairs.0, &pairs.1) };
        match test {
            None => row.extend([
                NONE.into(),
                if n < FEWEST_TESTED { "too few seeds" } else { "no variation" }.into(),
            ]),
            Some(t) => {
                row.push(format!("{:+.4} … {:+.4}", t.interval.0, t.interval.1));
                let p = bonferroni(t.p, self.manifest.arms.len() - 1);
                row.push(match () {
                    _ if n < FEWEST_CONCLUSIVE => format!("p = {p:.4}; too few to conclude"),
                    _ if p < 0.05 => format!("p = {p:.4}; differs"),
                    _ => format!("p = {p:.4}; no difference shown"),
                });
            }
        }
        Some(row)
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let cells = 0..self.manifest.cells.len();
        cells.flat_map(|c| self.manifest.arms.iter().filter_map(move |arm| self.row(c, arm))).collect()
    }
}

const HEAD: [&str; 10] = [
    "cell",
    "arm",
    "parameters",
    "tokens",
    "FLOPs",
    "held-out loss, nats a target",
    "seeds",
    "against the baseline",
    "95 % interval",
    "p × arms",
];

/// Parameters inside the one loop of a model, and its passes; none of a model without one. They are
/// those that the model has more than it has without the loop.
fn looped(spec: &Spec) -> (f64, f64) {
    let passes = |item: &Item| if let Item::Recur { count, .. } = item { Some(*count) } else { None };
    let loops: Vec<u64> = spec.model.body.iter().filter_map(passes).collect();
    let [passes_of] = loops[..] else { return (0.0, 1.0) };
    let of = |spec: &Spec| count(spec, &Counting::default()).ok().map(|c| c.parameters);
    let mut rest = spec.clone();
    rest.model.body.retain(|item| passes(item).is_none());
    let Some(all) = of(spec) else { return (0.0, 1.0) };
    let inside = match rest.model.body.is_empty() {
        true => spec.model.components.keys().filter_map(|name| all.by_component.get(name)).sum::<u128>(),
        false => all.total - of(&rest).map_or(0, |r| r.total.min(all.total)),
    };
    (inside as f64, passes_of as f64)
}

/// The result in a terminal: one table.
pub fn summary(climb: &Climb) -> String {
    let mut rows = vec![HEAD.map(String::from).to_vec()];
    rows.extend(climb.rows());
    table(&rows)
}

/// Writes the report and the table of runs.
pub fn write(climb: &Climb, folder: &Path) -> Done {
    let mut text = String::from("arm,params,loop_params,passes,tokens,flops,loss,seed,seconds\n");
    for (_, r, _) in &climb.runs {
        let seconds = r.seconds.map_or(String::new(), |s| format!("{s:.3}"));
        text += &format!(
            "{},{},{},{},{},{},{},{},{seconds}\n",
            r.arm, r.params, r.loop_params, r.passes, r.tokens, r.flops, r.loss, r.seed
        );
    }
    files::write_atomic(&folder.join("runs.csv"), |out| out.write_all(text.as_bytes()))?;
    Ok(page(climb).write(folder, "report")?)
}

/// The report.
pub fn page(climb: &Climb) -> Page {
    let m = &climb.manifest;
    let mut page = Page { title: format!("{}: a ladder", m.suite), blocks: vec![] };
    let all = m.cells.len() * m.seeds.len() * (m.arms.len() - m.stopped.len());
    page.text(format!(
        "{} at {} with {}; the baseline is `{}`. Every loss is that of a run at the end of its schedule.",
        many(m.arms.len() as u128, "arm"),
        many(m.cells.len() as u128, "cell"),
        many(m.seeds.len() as u128, "seed"),
        m.arms[0]
    ));
    if climb.runs.len() < all {
        page.text(format!("{} of {all} runs are at their end: the rest is missing below.", climb.runs.len()));
    }
    for arm in &m.stopped {
        page.text(format!("`{arm}` was worse than the baseline by more than its noise at both of the smallest cells, and was stopped there."));
    }
    page.heading("Results");
    if let Some(table) = climb.quoted() {
        page.add(Block::Table(table));
    }
    let rows: Vec<_> = climb.rows().into_iter().map(|r| r.into_iter().map(Into::into).collect()).collect();
    page.add(Block::Table(Table {
        caption: "Every cell".into(),
        head: HEAD.map(String::from).to_vec(),
        rows,
        text: vec![1, 8, 9],
    }));
    let targets: Vec<u64> = climb.runs.iter().filter_map(|r| r.2).collect();
    if let (Some(low), Some(high)) = (targets.iter().min(), targets.iter().max()) {
        let many = if low == high { grouped((*low).into()) } else { format!("{low} to {high}") };
        page.text(format!("Every loss is of {many} held-out targets."));
    }
    page.note(
        "Means over seeds ± standard deviation. Two-sided paired t-tests over seeds, which share their batches; p × arms is Bonferroni's \
         correction for the arms of a cell. Below three seeds there is no test, below five no conclusion. FLOPs are those of matrix products, \
         forward and back, as counted.",
    );
    let noises: Vec<String> = m
        .cells
        .iter()
        .zip(&climb.noise)
        .filter_map(|(c, n)| Some(format!("{}: {}", c.name, n.as_ref()?)))
        .collect();
    if !noises.is_empty() {
        page.add(Block::List(noises));
    }
    tuning(&mut page, climb);
    curves(&mut page, climb);
    laws(&mut page, climb);
    page.heading("The architectures");
    let drawn = m.arms.iter().zip(&climb.specs);
    page.add(Block::Figures(
        drawn.filter_map(|(arm, spec)| Some(draw::figure(arm, &spec.as_ref()?.model))).collect(),
    ));
    page.text(
        "As `.dream` at the smallest cell, defaults left out; lines that the baseline lacks are set off.",
    );
    let side = m.arms.iter().zip(&climb.specs);
    page.add(Block::Side(
        side.filter_map(|(a, s)| Some((format!("`{a}`"), dreamc_dsl::sketch(s.as_ref()?)))).collect(),
    ));
    page
}

/// The losses of every trial, and over one field their curves.
fn tuning(page: &mut Page, climb: &Climb) {
    let m = &climb.manifest;
    if m.trials.iter().all(Vec::is_empty) {
        return;
    }
    page.heading("Tuning");
    let fields: Vec<&String> =
        m.trials[0].first().map(|t| t.values.iter().map(|v| &v.0).collect()).unwrap_or_default();
    let mut head: Vec<String> = fields.iter().map(|f| f.to_string()).collect();
    head.extend(m.arms.iter().cloned());
    let mut rows = vec![];
    for (k, trial) in m.trials[0].iter().enumerate() {
        let mut row: Vec<crate::report::page::Cell> =
            trial.values.iter().map(|v| format!("{:e}", v.1).into()).collect();
        for (i, losses) in climb.trials.iter().enumerate() {
            let text = losses.get(k).copied().flatten().map_or(NONE.into(), |l| format!("{l:.4}"));
            let rank = if m.chosen[i] == Some(k) {
                crate::report::page::Rank::Best
            } else {
                crate::report::page::Rank::Plain
            };
            row.push(crate::report::page::Cell { text, rank });
        }
        rows.push(row);
    }
    page.add(Block::Table(Table {
        caption: "Held-out loss of every trial, nats a target".into(),
        head,
        rows,
        text: vec![],
    }));
    page.text("Every arm tried the same values at the smallest cell, with the first seed; the one set off is the one it goes on with.");
    if m.cells.len() > 1 {
        page.text(match m.transfer.as_str() {
            "" => "No rule carries these values to the other cells, which use them as they are: larger models often want a lower rate, so \
                   that differences between arms at other cells are differences at a rate tuned elsewhere."
                .into(),
            rule => format!("The other cells use these values by the rule `{rule}` of docs/rates.md, each arm from its own size at the smallest cell."),
        });
    }
    later(page, climb);
    for (i, arm) in m.arms.iter().enumerate() {
        let Some(best) = m.chosen[i].and_then(|k| m.trials[i].get(k)) else { continue };
        for (f, (field, value)) in best.values.iter().enumerate() {
            let all = m.trials[i].iter().map(|t| t.values[f].1);
            let (low, high) = all.fold((f64::INFINITY, 0f64), |(l, h), v| (l.min(v), h.max(v)));
            if *value == low || *value == high {
                page.text(format!("`{arm}` goes on with `{field}` {value:e}, an end of its values: a better one may stand outside."));
            }
        }
    }
    if fields.len() != 1 {
        return;
    }
    let series = m.arms.iter().enumerate().map(|(i, arm)| Series {
        name: arm.clone(),
        points: m.trials[i]
            .iter()
            .zip(&climb.trials[i])
            .filter_map(|(t, l)| Some((t.values[0].1, (*l)?)))
            .collect(),
        band: vec![],
        color: Color::Series(i),
        mark: Mark::Dots,
    });
    let plot = Plot {
        title: format!("held-out loss over {}", fields[0]),
        x: Axis { label: fields[0].clone(), log: true, ..Axis::default() },
        y: Axis { label: "held-out loss, nats".into(), ..Axis::default() },
        series: series.collect(),
    };
    let caption = format!("Held-out loss of the trials over `{}`, one seed each.", fields[0]);
    page.add(Block::Figures(vec![Figure { name: "tuning".into(), svg: plot.svg(), caption, full: false }]));
}

/// Loss over parameters at each budget, and over FLOPs, tokens and time.
fn curves(page: &mut Page, climb: &Climb) {
    let m = &climb.manifest;
    if climb.runs.is_empty() || m.cells.iter().all(|c| c.budget.is_none()) {
        return;
    }
    let mut figures = vec![];
    let mut budgets: Vec<f64> = m.cells.iter().filter_map(|c| c.budget).collect();
    budgets.dedup();
    let point = |c: usize, arm: &String, x: &dyn Fn(&Run) -> Option<f64>| {
        let own = climb.of(c, arm);
        let (first, losses) = (own.first().and_then(|r| x(r))?, own.iter().map(|r| r.loss));
        let (low, high) =
            losses.clone().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
        Some(((first, losses.sum::<f64>() / own.len() as f64), (first, low, high)))
    };
    let mut series = vec![];
    for (i, arm) in m.arms.iter().enumerate() {
        for (b, budget) in budgets.iter().enumerate() {
            let cells = (0..m.cells.len()).filter(|c| m.cells[*c].budget == Some(*budget));
            let mut found: Vec<_> =
                cells.filter_map(|c| point(c, arm, &|r| Some(r.params + r.loop_params))).collect();
            found.sort_by(|a, b| a.0.0.total_cmp(&b.0.0));
            series.push(Series {
                name: if b == 0 { arm.clone() } else { String::new() },
                points: found.iter().map(|p| p.0).collect(),
                band: found.iter().map(|p| p.1).collect(),
                color: Color::Series(i),
                mark: if climb.laws[i].frontier.is_ok() { Mark::Points } else { Mark::Dots },
            });
        }
    }
    // Parabolas of the budgets, over the sizes that were trained.
    for (i, arm) in m.arms.iter().enumerate() {
        let Ok(frontier) = &climb.laws[i].frontier else { continue };
        let sizes = climb.runs.iter().map(|(_, r, _)| r).filter(|r| r.arm == *arm);
        let sizes = sizes.map(|r| r.params + r.loop_params);
        let (low, high) = sizes.fold((f64::INFINITY, 0f64), |(l, h), n| (l.min(n), h.max(n)));
        for budget in 0..frontier.optima.len() {
            let at = |k: i32| low * (high / low).powf(f64::from(k) / 24.0);
            let points = (0..=24).filter_map(|k| Some((at(k), frontier.at(budget, at(k))?)));
            series.push(Series {
                name: String::new(),
                points: points.collect(),
                band: vec![],
                color: Color::Series(i),
                mark: Mark::Dashed,
            });
        }
    }
    let axis = |label: &str| Axis { label: label.into(), log: true, ..Axis::default() };
    let y = Axis { label: "held-out loss, nats".into(), ..Axis::default() };
    let plot = Plot { title: "curves of equal FLOPs".into(), x: axis("parameters"), y: y.clone(), series };
    figures.push(Figure {
        name: "equal-flops".into(),
        svg: plot.svg(),
        caption: "Held-out loss over parameters, a curve for each budget (the lower, the larger); bands are from the least seed to the largest. Dashed, the \
                  parabolas whose vertices are the optima."
            .into(),
        full: true,
    });
    type Of = fn(&Run) -> Option<f64>;
    let over: [(&str, &str, Of); 3] = [
        ("flops", "training FLOPs", |r| Some(r.flops)),
        ("tokens", "training tokens", |r| Some(r.tokens)),
        ("time", "training time, seconds", |r| r.seconds),
    ];
    for (file, label, x) in over {
        let series = m.arms.iter().enumerate().map(|(i, arm)| Series {
            name: arm.clone(),
            points: (0..m.cells.len()).filter_map(|c| point(c, arm, &x)).map(|p| p.0).collect(),
            band: vec![],
            color: Color::Series(i),
            mark: Mark::Points,
        });
        let mut series: Vec<Series> = series.collect();
        if file == "flops" {
            for (i, laws) in climb.laws.iter().enumerate() {
                let (Ok(f), Some(low), Some(high)) = (&laws.frontier, budgets.first(), budgets.last()) else {
                    continue;
                };
                let at = |k: i32| low * (high / low).powf(f64::from(k) / 32.0);
                series.push(Series {
                    name: String::new(),
                    points: (0..=32).map(|k| (at(k), f.loss(at(k)))).collect(),
                    band: (0..=32)
                        .map(|k| (at(k), f.band(at(k))))
                        .filter(|(_, band)| !band.0.is_nan())
                        .map(|(x, (low, high))| (x, low, high))
                        .collect(),
                    color: Color::Series(i),
                    mark: Mark::Dashed,
                });
            }
        }
        let plot = Plot { title: format!("loss over {label}"), x: axis(label), y: y.clone(), series };
        let caption = format!(
            "Held-out loss over {label}, a point a cell{}.",
            if file == "flops" { "; dashed, the law of the optima with its 95 % interval" } else { "" }
        );
        figures.push(Figure { name: format!("loss-over-{file}"), svg: plot.svg(), caption, full: false });
    }
    page.heading("Curves");
    page.add(Block::Figures(figures));
}

/// Trials at later cells, and carried rates that were tried again.
fn later(page: &mut Page, climb: &Climb) {
    let m = &climb.manifest;
    let number = |loss: &Option<f64>| loss.map_or("-".to_string(), |loss| format!("{loss:.4}"));
    for (halved, losses) in m.halved.iter().zip(&climb.halved) {
        let head = ["trial", "loss"].map(String::from).to_vec();
        let mut rows: Vec<Vec<crate::report::page::Cell>> = vec![];
        for (i, own) in halved.trials.iter().enumerate() {
            let each = own.iter().zip(&losses[i]);
            rows.extend(each.map(|(k, loss)| vec![m.trials[i][*k].name.clone().into(), number(loss).into()]));
        }
        let caption = format!("The best of the cell before, tried at {}", halved.cell);
        page.add(Block::Table(Table { caption, head, rows, text: vec![0] }));
    }
    if climb.lost.is_empty() {
        return;
    }
    let head =
        ["arm", "rate", "at half of it", "as carried", "at twice of it", "lost"].map(String::from).to_vec();
    let rows = climb.lost.iter().map(|own| {
        let [half, carried, twice] = own.losses.map(|loss| number(&loss));
        let row = [own.arm.clone(), format!("{:e}", own.rate), half, carried, twice, number(&own.nats())];
        row.map(Into::into).to_vec()
    });
    let at = m.recheck.as_ref().map_or("", |recheck| &recheck.cell);
    let caption = format!("Carried rates at {at}, one seed each, held-out loss in nats a target");
    page.add(Block::Table(Table { caption, head, rows: rows.collect(), text: vec![0] }));
}

fn laws(page: &mut Page, climb: &Climb) {
    let m = &climb.manifest;
    if m.cells.iter().all(|c| c.budget.is_none()) {
        return;
    }
    page.heading("Laws");
    let head = ["arm", "law", "constant", "value", "95 % from", "to"].map(String::from).to_vec();
    let (mut rows, mut reasons) = (vec![], vec![]);
    let number = |v: f64| {
        if v != 0.0 && !(0.01..1e4).contains(&v.abs()) { format!("{v:.2e}") } else { format!("{v:.3}") }
    };
    let mut add = |arm: &String, law: &str, constants: &[Constant]| {
        for c in constants {
            let row =
                [arm.clone(), law.into(), c.name.into(), number(c.value), number(c.low), number(c.high)];
            rows.push(row.map(Into::into).to_vec());
        }
    };
    for (arm, laws) in m.arms.iter().zip(&climb.laws) {
        match &laws.law {
            Ok(fit) => {
                add(arm, fit.law.name(), &fit.constants);
                let n = fit.residuals.len() as f64;
                let deviation = (fit.residuals.iter().map(|r| r * r).sum::<f64>() / n).sqrt();
                reasons.push(format!(
                    "`{arm}`: residuals of log loss {deviation:.2e} (root mean square) over {n} runs"
                ));
            }
            Err(reason) => reasons.push(format!("`{arm}`: no law of size and tokens: {reason}")),
        }
        match &laws.frontier {
            Ok(frontier) => {
                add(arm, "L = E + K C^-gamma", &frontier.constants);
                let edges = frontier.optima.iter().filter(|o| !o.inside).count();
                if edges > 0 {
                    reasons.push(format!(
                        "`{arm}`: {edges} of {} optima stand at an edge of the sizes trained",
                        frontier.optima.len()
                    ));
                }
            }
            Err(reason) => reasons.push(format!("`{arm}`: no law of compute: {reason}")),
        }
        let rates = (climb.rate(&m.arms[0]), climb.rate(arm));
        for s in &laws.speedup {
            if *arm == m.arms[0] {
                continue;
            }
            let Some(factor) = s.factor else {
                reasons.push(format!(
                    "`{arm}` at {:.2e} FLOPs is below the baseline's irreducible loss",
                    s.flops
                ));
                continue;
            };
            let beyond = if s.extrapolated { ", beyond the baseline's budgets" } else { "" };
            let within = s.interval.map_or(String::new(), |(low, high)| format!(" ({low:.2} to {high:.2})"));
            let time = match rates {
                (Some(base), Some(own)) => format!(", and {:.2} times the time", factor * own / base),
                _ => String::new(),
            };
            reasons.push(format!("`{arm}` at {:.2e} FLOPs: the baseline needs {factor:.2}{within} times the compute{time} for its loss{beyond}", s.flops));
        }
    }
    for (arm, both) in m.arms.iter().zip(&climb.passes) {
        let label = format!("{arm} with {}", m.arms[0]);
        match both {
            Some(Ok(fit)) => {
                add(&label, fit.law.name(), &fit.constants);
                reasons.push(format!(
                    "{label}: one law for both, whose only difference is passes; phi is true as far as the arms differ in nothing else"
                ));
            }
            Some(Err(reason)) => reasons.push(format!("{label}: no law of a loop: {reason}")),
            None => {}
        }
    }
    if !rows.is_empty() {
        page.add(Block::Table(Table { caption: String::new(), head, rows, text: vec![1, 2] }));
    }
    page.add(Block::List(reasons));
    page.note("Intervals are of 1,000 resamples of the residuals (docs/fits.md). The same figures come of `dreamc fit runs.csv`.");
}

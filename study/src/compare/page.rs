//! The report of a comparison, from ledgers and metrics alone.
//!
//! *In*: a [`Study`]. *Out*: a [`Page`]. *Promise*: a figure that the runs do not determine is a
//! dash, never a guess; an arm that does not agree with the baseline carries a dagger wherever it
//! stands.

use super::agreement::{FLOPS, PROCESSED};
use super::study::{Arm, Study};
use crate::number::{decimal_bytes, decimals, grouped, many};
use crate::report::draw;
use crate::report::page::{Block, Cell, Figure, Page, Rank, Table};
use crate::report::plot::{Axis, Color, Format, Mark, Plot, Series};
use crate::show::{duration, short, table, times};
use dreamc_compiler::looks_ahead;
use dreamc_dsl::spec::Schedule;
use dreamc_runtime::statistics::{Summary, TTest, bonferroni, paired};
use dreamc_runtime::train::metrics::EvaluationLine;

const NONE: &str = "–";

/// Quantities measured of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Metric {
    ExactMatch,
    Loss,
    BitsPerByte,
}

impl Metric {
    const ALL: [Metric; 3] = [Metric::ExactMatch, Metric::Loss, Metric::BitsPerByte];

    fn name(self) -> &'static str {
        match self {
            Metric::ExactMatch => "exact match",
            Metric::Loss => "validation loss",
            Metric::BitsPerByte => "bits per byte",
        }
    }

    /// Its name and unit.
    fn titled(self) -> &'static str {
        match self {
            Metric::ExactMatch => "exact match, %",
            Metric::Loss => "validation loss, nats",
            Metric::BitsPerByte => "bits per byte",
        }
    }

    fn of(self, line: &EvaluationLine) -> Option<f64> {
        let value = match self {
            Metric::ExactMatch => line.exact_match,
            Metric::Loss => line.validation_loss,
            Metric::BitsPerByte => line.bits_per_byte,
        };
        value.filter(|v| v.is_finite())
    }

    /// Whether `a` is better than `b`.
    fn better(self, a: f64, b: f64) -> bool {
        if self == Metric::ExactMatch { a > b } else { a < b }
    }

    fn arrow(self) -> &'static str {
        if self == Metric::ExactMatch { "↑" } else { "↓" }
    }

    fn show(self, value: f64) -> String {
        if self == Metric::ExactMatch { format!("{:.1} %", 100.0 * value) } else { format!("{value:.4}") }
    }

    fn show_difference(self, value: f64) -> String {
        if self == Metric::ExactMatch {
            format!("{:+.1} points", 100.0 * value)
        } else {
            format!("{value:+.4}")
        }
    }

    fn show_summary(self, s: &Summary) -> String {
        let deviation = s.deviation.map(|d| match self {
            Metric::ExactMatch => format!(" ± {:.1}", 100.0 * d),
            _ => format!(" ± {d:.4}"),
        });
        match self {
            Metric::ExactMatch => format!("{:.1}{} %", 100.0 * s.mean, deviation.unwrap_or_default()),
            _ => format!("{:.4}{}", s.mean, deviation.unwrap_or_default()),
        }
    }
}

/// A point of a curve: the runs of an arm at one evaluation.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Point {
    tokens: f64,
    seconds: f64,
    flops: f64,
    mean: f64,
    low: f64,
    high: f64,
}

/// The evaluations that all begun runs of an arm have made, over its tokens.
fn curve(arm: &Arm, metric: Metric) -> Vec<Point> {
    let runs: Vec<_> = arm.runs.iter().flatten().filter(|r| !r.metrics.evaluations.is_empty()).collect();
    let Some(first) = runs.first() else { return vec![] };
    let point = |line: &EvaluationLine| {
        let mut values = vec![];
        let (mut tokens, mut seconds, mut flops) = (0.0, 0.0, 0.0);
        for run in &runs {
            let found = run.metrics.evaluations.iter().find(|e| e.step == line.step)?;
            values.push(metric.of(found)?);
            let step = run.metrics.steps.iter().find(|s| s.step == line.step)?;
            let n = runs.len() as f64;
            tokens += step.tokens as f64 / n;
            seconds += step.seconds / n;
            let each = run.ledger.executed_flops as f64 / run.ledger.tokens.max(1) as f64;
            flops += each * step.tokens as f64 / n;
        }
        let summary = Summary::of(&values)?;
        let low = values.iter().copied().fold(f64::INFINITY, f64::min);
        let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        Some(Point { tokens, seconds, flops, mean: summary.mean, low, high })
    };
    first.metrics.evaluations.iter().filter_map(point).collect()
}

/// The best point of a curve; the first of equals.
fn best(curve: &[Point], metric: Metric) -> Option<Point> {
    curve.iter().copied().reduce(|b, p| if metric.better(p.mean, b.mean) { p } else { b })
}

/// Whether a curve has points before its end, without which no time to a loss can be read.
fn followed(curve: &[Point]) -> bool {
    curve.len() > 1
}

/// The first point that is as good as `target`.
fn reach(curve: &[Point], metric: Metric, target: f64) -> Option<Point> {
    curve.iter().copied().find(|p| !metric.better(target, p.mean))
}

/// Last evaluations of the runs that ended, by seed.
fn finals(arm: &Arm, metric: Metric) -> Vec<Option<f64>> {
    let last = |run: &Option<super::study::Run>| {
        let run = run.as_ref().filter(|r| r.ended())?;
        metric.of(run.metrics.last()?)
    };
    arm.runs.iter().map(last).collect()
}

/// Values of two arms at the seeds that both have.
fn both(a: &[Option<f64>], b: &[Option<f64>]) -> (Vec<f64>, Vec<f64>) {
    a.iter().zip(b).filter_map(|(a, b)| Some(((*a)?, (*b)?))).unzip()
}

/// The metrics that the runs have.
fn measured(study: &Study) -> Vec<Metric> {
    let has = |a: &Arm, m| finals(a, m).iter().any(Option::is_some) || !curve(a, m).is_empty();
    Metric::ALL.into_iter().filter(|m| study.arms.iter().any(|a| has(a, *m))).collect()
}

/// The report.
pub fn page(study: &Study) -> Page {
    let mut page = Page { title: format!("{}: a comparison", study.name), blocks: vec![] };
    let metrics = measured(study);
    opening(&mut page, study, &metrics);
    resources(&mut page, study);
    processed(&mut page, study);
    agreement(&mut page, study);
    results(&mut page, study, &metrics);
    tests(&mut page, study, &metrics);
    curves(&mut page, study, &metrics);
    efficiency(&mut page, study, &metrics);
    difficulty(&mut page, study);
    differences(&mut page, study);
    runs(&mut page, study);
    environment(&mut page, study);
    rewriting(&mut page, study);
    page
}

/// Name of an arm as tables have it.
pub fn name(arm: &Arm) -> String {
    if arm.agrees() { arm.name.clone() } else { format!("{} †", arm.name) }
}

fn opening(page: &mut Page, study: &Study, metrics: &[Metric]) {
    let baseline = &study.arms[0];
    let arms = many(study.arms.len() as u128, "arm");
    page.text(format!(
        "{arms}, {}; the baseline is `{}`. Every figure is computed from the ledgers and metrics of the run folders; \
         `dreamc report` makes this page anew from them.",
        many(study.seeds.len() as u128, "seed"),
        baseline.name
    ));
    let all = study.arms.len() * study.seeds.len();
    let ended: usize = study.arms.iter().map(|a| a.ended().count()).sum();
    if ended < all {
        page.text(format!(
            "{ended} of {all} runs have come to their end: what follows is not the last word."
        ));
    }
    for arm in study.arms.iter().filter(|a| !a.agrees()) {
        let broken: Vec<&str> = arm.agreement.iter().filter(|c| !c.agrees).map(|c| c.what).collect();
        page.text(format!(
            "† `{}` does not agree with the baseline in what the suite says must be equal ({}): no difference of results can be \
             put down to its architecture.",
            arm.name,
            broken.join(", ")
        ));
    }
    for arm in study.arms.iter().filter(|a| looks_ahead(&a.spec.model)) {
        page.text(format!(
            "`{}` reads later tokens where its loss is measured (top-k without `causal`): its loss is not that of predicting them.",
            name(arm)
        ));
    }
    for (arm, by) in study.arms[1..].iter().filter_map(|a| Some((a, missed(study, a)?))) {
        page.text(format!(
            "`{}` is matched to the baseline in the FLOPs that are declared, and processes {:+.1} % of the baseline's FLOPs per token: \
             its routers let through another share of the tokens than their capacity (`equal: {{flops_processed: 1%}}` asks for it).",
            name(arm),
            100.0 * by
        ));
    }
    let Some(&metric) = metrics.first() else { return };
    let ours = finals(baseline, metric);
    let mut items = vec![];
    for arm in &study.arms[1..] {
        let theirs = finals(arm, metric);
        let (a, b) = both(&theirs, &ours);
        let (Some(sa), Some(sb)) = (Summary::of(&a), Summary::of(&b)) else { continue };
        let mut text = format!(
            "`{}`: {} {} against {}, {}",
            name(arm),
            metric.name(),
            metric.show_summary(&sa),
            metric.show_summary(&sb),
            metric.show_difference(sa.mean - sb.mean)
        );
        text += &format!(" ({})", tested(&a, &b));
        let (c, base) = (curve(arm, metric), curve(baseline, metric));
        let known = |t: &Point| followed(&base) && (metric != Metric::ExactMatch || t.mean > 0.0);
        if let Some(target) = best(&base, metric).filter(known) {
            text += &match reach(&c, metric, target.mean) {
                Some(p) => {
                    format!("; reaches the baseline's best with {}", tokens_than(target.tokens / p.tokens))
                }
                None => "; does not reach the baseline's best".into(),
            };
        }
        items.push(text + ".");
    }
    if !items.is_empty() {
        page.add(Block::List(items));
    }
}

/// By how much an arm that agrees in declared FLOPs misses the baseline in those it processes,
/// where the difference is beyond what the suite allows of declared ones.
fn missed(study: &Study, arm: &Arm) -> Option<f64> {
    let by = arm.flops_processed()? / study.arms[0].flops_processed()? - 1.0;
    let declared = arm.agreement.iter().find(|c| c.what == FLOPS)?;
    let limit = declared.limit.filter(|_| declared.agrees)?;
    let demanded = arm.agreement.iter().any(|c| c.what == PROCESSED && c.limit.is_some());
    (by.abs() > limit && !demanded).then_some(by)
}

/// Tokens of an arm in words, where the baseline takes `ratio` times as many: equal where two
/// digits do not tell them apart.
fn tokens_than(ratio: f64) -> String {
    let (ratio, word) = if ratio < 1.0 { (1.0 / ratio, "more") } else { (ratio, "fewer") };
    let written = format!("{ratio:.2}");
    if written == "1.00" { "as many tokens".into() } else { format!("{written} × {word} tokens") }
}

/// Fewer seeds than this have no test: the deviation of two differences says nothing.
const FEWEST_TESTED: usize = 3;
/// Fewer seeds than this decide nothing, whatever the test says.
const FEWEST_CONCLUSIVE: usize = 5;

/// A paired test over seeds, where there are enough of them.
pub fn test(a: &[f64], b: &[f64]) -> Option<TTest> {
    if a.len() < FEWEST_TESTED { None } else { paired(a, b) }
}

/// A test in words.
fn tested(a: &[f64], b: &[f64]) -> String {
    match (test(a, b), a.len()) {
        (None, n) if n < FEWEST_TESTED => {
            format!("{}: too few to test", many(n as u128, "seed"))
        }
        (None, _) => "the difference does not vary: no test".into(),
        (Some(t), n) => {
            let few = if n < FEWEST_CONCLUSIVE {
                format!("; {n} seeds are too few to conclude")
            } else {
                "".into()
            };
            format!("paired t({}) = {:.2}, p = {}{few}", t.df, t.t, p_value(t.p))
        }
    }
}

/// The result in a few lines, for a terminal.
pub fn summary(study: &Study) -> String {
    let metrics = measured(study);
    let baseline = &study.arms[0];
    let mut rows = vec![vec![String::new(), "seeds".into()]];
    for m in &metrics {
        rows[0].push(format!("{} {}", m.titled(), m.arrow()));
        rows[0].push("against the baseline".into());
    }
    let mut remarks = vec![];
    for arm in &study.arms {
        let mut row = vec![name(arm), arm.ended().count().to_string()];
        for &m in &metrics {
            let values: Vec<f64> = finals(arm, m).into_iter().flatten().collect();
            row.push(Summary::of(&values).map_or(NONE.into(), |s| m.show_summary(&s)));
            let (a, b) = both(&finals(arm, m), &finals(baseline, m));
            let means = (Summary::of(&a), Summary::of(&b));
            let (true, (Some(ours), Some(theirs))) = (arm.name != baseline.name, means) else {
                row.push(String::new());
                continue;
            };
            row.push(m.show_difference(ours.mean - theirs.mean));
            remarks.push(format!("  {}, {}: {}", name(arm), m.name(), tested(&a, &b)));
        }
        rows.push(row);
    }
    format!("{}\n{}", table(&rows), remarks.join("\n"))
}

fn relative(value: Option<f64>, baseline: Option<f64>) -> String {
    match (value, baseline) {
        (Some(v), Some(b)) if b != 0.0 => format!("{:+.3} %", 100.0 * (v / b - 1.0)),
        _ => NONE.into(),
    }
}

fn resources(page: &mut Page, study: &Study) {
    page.heading("Resources");
    let ledger = |a: &Arm| a.runs.iter().flatten().map(|r| r.ledger.clone()).next();
    let head = [
        "model",
        "depth",
        "parameters",
        "Δ parameters",
        "FLOPs/token",
        "Δ FLOPs",
        "processed",
        "Δ processed",
        "training FLOPs/token",
        "memory, bytes",
        "training memory, bytes",
    ];
    let mut table = Table { head: head.map(String::from).to_vec(), ..Table::default() };
    let base = ledger(&study.arms[0]);
    for arm in &study.arms {
        let l = ledger(arm);
        let of = |f: &dyn Fn(&dreamc_runtime::train::ledger::Ledger) -> Option<f64>| {
            (l.as_ref().and_then(f), base.as_ref().and_then(f))
        };
        let (params, b_params) = of(&|l| Some(l.parameters as f64));
        let (flops, b_flops) = of(&|l| l.decode_flops_per_token);
        let number = |n: Option<f64>| n.map_or(NONE.into(), decimals);
        let bytes = |n: Option<u64>| n.map_or(NONE.into(), |n| decimal_bytes(n.into()));
        let row = [
            name(arm),
            l.as_ref().map_or(NONE.into(), |l| l.depth.to_string()),
            number(params),
            relative(params, b_params),
            number(flops),
            relative(flops, b_flops),
            number(arm.flops_processed()),
            relative(arm.flops_processed(), study.arms[0].flops_processed()),
            number(l.as_ref().and_then(|l| l.declared_flops_per_token)),
            bytes(l.as_ref().and_then(|l| l.generation_memory)),
            bytes(l.as_ref().map(|l| l.peak_memory)),
        ];
        table.rows.push(row.map(Cell::from).to_vec());
    }
    page.add(Block::Table(table));
    page.note(
        "FLOPs per token and memory are those of generation: means over a sequence of 1024 tokens, or the context where that is \
         shorter. Processed are FLOPs per token at the shares of tokens that routers let through in the evaluation after the last step, the mean over \
         seeds. A FLOP is one multiply or one add of a matrix product. Memory is weights and mean caches; training memory \
         is the whole plan of a micro-batch, scoring included. Δ is against the baseline.",
    );
}

/// The share of tokens that each wrapped part processes, and by which rule.
fn processed(page: &mut Page, study: &Study) {
    let head = ["model", "part", "capacity", "training", "evaluation", "generation"];
    let mut table = Table { head: head.map(String::from).to_vec(), text: vec![1], ..Table::default() };
    for arm in &study.arms {
        let seen: Vec<_> =
            arm.ended().filter_map(|r| r.metrics.last()?.health.as_ref()).map(|h| &h.parts).collect();
        for part in seen.first().into_iter().copied().flatten() {
            let own: Vec<_> =
                seen.iter().filter_map(|parts| parts.iter().find(|p| p.name == part.name)).collect();
            let mean = own.iter().map(|p| p.processed).sum::<f64>() / own.len() as f64;
            let written: Vec<f64> = own.iter().filter_map(|p| p.generation).collect();
            let generation = written.iter().sum::<f64>() / written.len() as f64;
            let percent = |share: f64| format!("{:.1} %", 100.0 * share);
            let row = [
                name(arm),
                format!("`{}`", part.name),
                percent(part.asked),
                part.training.map_or(NONE.into(), percent),
                percent(mean),
                if written.is_empty() { NONE.into() } else { percent(generation) },
            ];
            table.rows.push(row.map(Cell::from).to_vec());
        }
    }
    if table.rows.is_empty() {
        return;
    }
    page.heading("Tokens processed");
    page.add(Block::Table(table));
    page.note(
        "Shares of the tokens that come to a wrapped part. Training computes what top-k chooses, or all where every token decides by itself; \
         evaluation and generation follow one rule, `causal` of top-k. Evaluation's share is that of held-out text after the last step, \
         generation's that of the tokens that the model then writes after held-out prompts, as `eval` would draw them; both are means over seeds. \
         A model without such a rule is evaluated by top-k and generates nothing.",
    );
}

fn agreement(page: &mut Page, study: &Study) {
    let Some(first) = study.arms.iter().find(|a| !a.agreement.is_empty()) else { return };
    page.heading("Equal quantities");
    let head = ["what", "asked for", "baseline"].map(String::from);
    let arms: Vec<&Arm> = study.arms[1..].iter().filter(|a| !a.agreement.is_empty()).collect();
    let mut table = Table { head: head.to_vec(), text: vec![1], ..Table::default() };
    table.head.extend(arms.iter().map(|a| name(a)));
    for (i, row) in first.agreement.iter().enumerate() {
        let asked = match row.limit {
            None => "no".into(),
            Some(0.0) => "equal".into(),
            Some(limit) => format!("within {} %", 100.0 * limit),
        };
        let mut cells: Vec<Cell> = vec![row.what.into(), asked.into(), row.baseline.clone().into()];
        for arm in &arms {
            let c = &arm.agreement[i];
            let value = match c.difference {
                Some(d) => format!("{:+.3} %", 100.0 * d),
                // Of what is not known yet nothing is equal.
                None if c.what == PROCESSED => NONE.into(),
                None if c.arm == c.baseline => "equal".into(),
                None => c.arm.clone(),
            };
            cells.push(if c.agrees { value.into() } else { format!("{value} †").into() });
        }
        table.rows.push(cells);
    }
    page.add(Block::Table(table));
}

fn results(page: &mut Page, study: &Study, metrics: &[Metric]) {
    page.heading("Results");
    if metrics.is_empty() {
        page.text("No run has been evaluated yet.");
        return;
    }
    // Data efficiency is read from evaluations before the last.
    let several = |m: Metric| followed(&curve(&study.arms[0], m));
    let efficient = metrics.iter().any(|m| several(*m));
    let decays = efficient && study.arms.iter().any(|a| a.spec.train.schedule != Schedule::Constant);
    let mut head = vec!["model".to_string(), "seeds".into()];
    for m in metrics {
        head.push(format!("{} {}", m.titled(), m.arrow()));
        if *m == Metric::Loss {
            head.push("perplexity ↓".into());
        }
        if several(*m) {
            head.push(format!("DE by {}, × ↑{}", m.name(), if decays { " ‡" } else { "" }));
        }
    }
    let mut table = Table { head, ..Table::default() };
    for arm in &study.arms {
        let mut row: Vec<Cell> = vec![name(arm).into(), arm.ended().count().to_string().into()];
        for &m in metrics {
            let values: Vec<f64> = finals(arm, m).into_iter().flatten().collect();
            let summary = Summary::of(&values);
            let rank = summary.map_or(Rank::Plain, |s| rank(study, m, s.mean));
            let text = summary.map_or(NONE.into(), |s| m.show_summary(&s));
            row.push(Cell { text, rank });
            if m == Metric::Loss {
                let perplexities: Vec<f64> = values.iter().map(|v| v.exp()).collect();
                let text = Summary::of(&perplexities).map_or(NONE.into(), |s| {
                    let deviation = s.deviation.map_or(String::new(), |d| format!(" ± {d:.3}"));
                    format!("{:.3}{deviation}", s.mean)
                });
                row.push(Cell { text, rank });
            }
            if several(m) {
                row.push(saving(study, arm, m).map_or(NONE.into(), |(s, _)| format!("{s:.2}")).into());
            }
        }
        table.rows.push(row);
    }
    page.add(Block::Table(table));
    let of = |count: &dyn Fn(&EvaluationLine) -> Option<u64>, what: &str| {
        let lines = study.arms.iter().flat_map(Arm::ended).filter_map(|r| r.metrics.last());
        let counts: Vec<u64> = lines.filter_map(count).collect();
        let (low, high) = (counts.iter().min()?, counts.iter().max()?);
        let many = if low == high { grouped((*low).into()) } else { format!("{low} to {high}") };
        Some(format!("{many} {what}"))
    };
    let counted = [of(&|l| l.targets, "held-out targets"), of(&|l| l.problems, "held-out problems")];
    let counted: Vec<String> = counted.into_iter().flatten().collect();
    if !counted.is_empty() {
        page.text(format!("Every figure is of {}.", counted.join(" and ")));
    }
    if decays {
        page.text(
            "‡ Read while the learning rate was still high. A run that ends after so many tokens decays its rate by then, and is better: a \
             ladder compares such runs.",
        );
    }
    let mut note = String::from(
        "Means over seeds ± standard deviation, of the evaluation after the last step; the best and the second best are set off.",
    );
    if efficient {
        note += " DE, data efficiency: tokens after which the baseline's mean over seeds was at its best, over those after which the arm's \
                 mean first was as good; its resolution is that of the evaluations";
        note += match metrics.contains(&Metric::ExactMatch) {
            true => ", which before the last score at most 32 problems of each difficulty.",
            false => ".",
        };
    }
    page.note(note);
}

fn rank(study: &Study, metric: Metric, mean: f64) -> Rank {
    let mean_of =
        |a: &Arm| Summary::of(&finals(a, metric).into_iter().flatten().collect::<Vec<_>>()).map(|s| s.mean);
    let better = study.arms.iter().filter_map(mean_of).filter(|m| metric.better(*m, mean)).count();
    match better {
        0 => Rank::Best,
        1 if study.arms.len() > 2 => Rank::Second,
        _ => Rank::Plain,
    }
}

/// How many times fewer tokens an arm needs to be as good as the baseline at its best, and the
/// points of both.
fn saving(study: &Study, arm: &Arm, metric: Metric) -> Option<(f64, (Point, Point))> {
    let base = curve(&study.arms[0], metric);
    let target = best(&base, metric)?;
    if !followed(&base) || (metric == Metric::ExactMatch && target.mean == 0.0) {
        return None;
    }
    let point = reach(&curve(arm, metric), metric, target.mean)?;
    Some((target.tokens / point.tokens, (target, point)))
}

/// A probability as tables have it.
pub fn p_value(p: f64) -> String {
    if p < 1e-4 { "< 0.0001".into() } else { format!("{p:.4}") }
}

fn tests(page: &mut Page, study: &Study, metrics: &[Metric]) {
    let mut pairs = vec![];
    for j in 0..study.arms.len() {
        for i in j + 1..study.arms.len() {
            pairs.push((i, j));
        }
    }
    let mut rows = vec![];
    for &metric in metrics {
        let tested: Vec<(usize, usize, usize, Option<TTest>, f64)> = pairs
            .iter()
            .filter_map(|&(i, j)| {
                let (a, b) = both(&finals(&study.arms[i], metric), &finals(&study.arms[j], metric));
                let difference = Summary::of(&a)?.mean - Summary::of(&b)?.mean;
                Some((i, j, a.len(), test(&a, &b), difference))
            })
            .collect();
        let many = tested.iter().filter(|t| t.3.is_some()).count();
        for (i, j, n, test, difference) in tested {
            let pair = format!("{} − {}", name(&study.arms[i]), name(&study.arms[j]));
            let mut row: Vec<Cell> = vec![
                metric.name().into(),
                pair.into(),
                n.to_string().into(),
                metric.show_difference(difference).into(),
            ];
            match test {
                Some(t) => {
                    let bound = |v: f64| metric.show_difference(v).replace(" points", "");
                    row.push(format!("{} … {}", bound(t.interval.0), bound(t.interval.1)).into());
                    row.push(format!("{:.2}", t.t).into());
                    row.push(format!("{}", t.df).into());
                    row.push(p_value(t.p).into());
                    row.push(p_value(bonferroni(t.p, many)).into());
                    row.push(format!("{:.2}", t.d).into());
                    row.push(conclusion(n, bonferroni(t.p, many)).into());
                }
                None => {
                    row.extend((0..6).map(|_| Cell::from(NONE)));
                    row.push(if n < FEWEST_TESTED { "too few seeds" } else { "no variation" }.into());
                }
            }
            rows.push(row);
        }
    }
    if rows.is_empty() {
        return;
    }
    let head = [
        "metric",
        "pair",
        "seeds",
        "difference",
        "95 % interval",
        "t",
        "df",
        "p",
        "p × pairs",
        "Cohen's d",
        "conclusion",
    ];
    let head = head.map(String::from).to_vec();
    page.add(Block::Table(Table {
        caption: "Paired tests over seeds".into(),
        head,
        rows,
        text: vec![1, 10],
    }));
    page.note(
        "Two-sided paired t-tests: runs of one seed see the same batches in the same order. p × pairs is Bonferroni's correction for the \
         pairs of a metric; Cohen's d is that of the differences. Losses and their differences are in nats, exact match in percentage points. \
         Below three seeds there is no test, below five no conclusion is drawn from one.",
    );
}

/// Conclusion from a test of `seeds` seeds with this probability.
pub fn conclusion(seeds: usize, p: f64) -> &'static str {
    match () {
        _ if seeds < FEWEST_CONCLUSIVE => "too few to conclude",
        _ if p < 0.05 => "differs",
        _ => "no difference shown",
    }
}

/// The quantity that a curve is drawn over.
struct Over {
    what: &'static str,
    label: &'static str,
    file: &'static str,
    at: fn(&Point) -> f64,
}

const OVER: [Over; 3] = [
    Over { what: "training tokens", label: "training tokens", file: "", at: |p| p.tokens },
    Over { what: "training FLOPs", label: "training FLOPs executed", file: "-over-flops", at: |p| p.flops },
    Over { what: "training time", label: "training time, seconds", file: "-over-time", at: |p| p.seconds },
];

fn curves(page: &mut Page, study: &Study, metrics: &[Metric]) {
    let mut figures = vec![];
    for &metric in metrics {
        for over in &OVER {
            let mut series = vec![];
            for (i, arm) in study.arms.iter().enumerate() {
                let points = curve(arm, metric);
                series.push(Series {
                    name: name(arm),
                    points: points.iter().map(|p| ((over.at)(p), p.mean)).collect(),
                    band: points.iter().map(|p| ((over.at)(p), p.low, p.high)).collect(),
                    color: Color::Series(i),
                    mark: Mark::Dots,
                });
            }
            if series.iter().all(|s| s.points.len() < 2) {
                continue;
            }
            let percent = metric == Metric::ExactMatch;
            let label = if percent { "exact match, held out" } else { metric.titled() };
            let plot = Plot {
                title: format!("{} over {}", metric.name(), over.what),
                x: Axis { label: over.label.into(), zero: true, ..Axis::default() },
                y: Axis {
                    label: label.into(),
                    format: if percent { Format::Percent } else { Format::Number },
                    ..Axis::default()
                },
                series,
            };
            figures.push(Figure {
                name: format!("{}{}", metric.name().replace(' ', "-"), over.file),
                svg: plot.svg(),
                caption: format!(
                    "{} over {}: means over seeds; bands are from the least to the largest.",
                    capital(metric.name()),
                    over.what
                ),
                full: false,
            });
        }
    }
    let mut series = vec![];
    for (i, arm) in study.arms.iter().enumerate() {
        series.push(Series {
            name: name(arm),
            points: losses(arm),
            band: vec![],
            color: Color::Series(i),
            mark: Mark::Line,
        });
    }
    if series.iter().any(|s| s.points.len() > 1) {
        let plot = Plot {
            title: "training loss over training tokens".into(),
            x: Axis { label: "training tokens".into(), zero: true, ..Axis::default() },
            y: Axis { label: "training loss, nats".into(), ..Axis::default() },
            series,
        };
        figures.push(Figure {
            name: "training-loss".into(),
            svg: plot.svg(),
            caption: "Training loss over tokens: means over seeds and over one hundredth of the run each."
                .into(),
            full: false,
        });
    }
    if !figures.is_empty() {
        page.heading("Over training");
        page.add(Block::Figures(figures));
    }
}

fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or(String::new(), |c| c.to_uppercase().chain(letters).collect())
}

/// Tokens and training loss: the mean over all begun runs, and over about a hundredth of the steps
/// each.
fn losses(arm: &Arm) -> Vec<(f64, f64)> {
    let runs: Vec<_> = arm.runs.iter().flatten().collect();
    let steps = runs.iter().map(|r| r.metrics.steps.len()).min().unwrap_or(0);
    let window = steps.div_ceil(100).max(1);
    let mut points = vec![];
    for from in (0..steps).step_by(window) {
        let to = (from + window).min(steps);
        let all = runs.iter().flat_map(|r| &r.metrics.steps[from..to]);
        let n = (runs.len() * (to - from)) as f64;
        let tokens =
            runs.iter().map(|r| r.metrics.steps[to - 1].tokens as f64).sum::<f64>() / runs.len() as f64;
        points.push((tokens, all.map(|s| s.loss).sum::<f64>() / n));
    }
    points
}

fn efficiency(page: &mut Page, study: &Study, metrics: &[Metric]) {
    let mut rows = vec![];
    for &metric in metrics {
        let base = curve(&study.arms[0], metric);
        let Some(target) = best(&base, metric) else { continue };
        if !followed(&base) || (metric == Metric::ExactMatch && target.mean == 0.0) {
            continue;
        }
        for arm in &study.arms {
            let mut row: Vec<Cell> =
                vec![metric.name().into(), name(arm).into(), metric.show(target.mean).into()];
            match saving(study, arm, metric) {
                Some((saving, (_, p))) => row.extend([
                    short(p.tokens).into(),
                    format!("{saving:.2}").into(),
                    decimals(p.flops).into(),
                    format!("{:.2}", target.flops / p.flops.max(1.0)).into(),
                    duration(p.seconds).into(),
                    format!("{:.2}", target.seconds / p.seconds.max(1e-9)).into(),
                ]),
                None => {
                    row.push("not reached".into());
                    row.extend((0..5).map(|_| Cell::from(NONE)));
                }
            }
            rows.push(row);
        }
    }
    if rows.is_empty() {
        return;
    }
    page.heading("To reach the baseline's best");
    let head = [
        "metric",
        "model",
        "target",
        "tokens",
        "tokens saved, ×",
        "training FLOPs",
        "FLOPs saved, ×",
        "training time",
        "time saved, ×",
    ];
    page.add(Block::Table(Table {
        caption: String::new(),
        head: head.map(String::from).to_vec(),
        rows,
        text: vec![1],
    }));
    page.note(
        "The target is the best mean over seeds of the baseline's evaluations. FLOPs are those that training steps executed; time is \
         spent in training steps, evaluation not included, on the machine below: it says as much about kernels as \
         about architectures.",
    );
}

fn difficulty(page: &mut Page, study: &Study) {
    let Some((table, figure)) = difficulties(study, "composed steps", "difficulty") else { return };
    page.heading("By difficulty");
    page.add(Block::Table(table));
    page.add(Block::Figures(vec![figure]));
}

/// Shares of right answers of the runs of an arm at their end, of problems of `steps` steps.
pub fn shares(arm: &Arm, steps: u64) -> Vec<f64> {
    let last = arm.ended().filter_map(|r| r.metrics.last());
    last.filter_map(|e| e.by_difficulty.iter().find(|d| d.0 == steps)).map(|d| d.1).collect()
}

/// The difficulties that some run was asked, ascending.
pub fn asked(study: &Study) -> Vec<u64> {
    let mut all: Vec<u64> = vec![];
    for run in study.arms.iter().flat_map(|a| a.ended()) {
        all.extend(run.metrics.last().iter().flat_map(|e| e.by_difficulty.iter().map(|d| d.0)));
    }
    all.sort_unstable();
    all.dedup();
    all
}

/// Exact match by difficulty, whose steps are `what`, as a table and a picture with a name of its
/// file; `None` where fewer than two difficulties were asked.
pub fn difficulties(study: &Study, what: &str, file: &str) -> Option<(Table, Figure)> {
    let all = asked(study);
    if all.len() < 2 {
        return None;
    }
    let mut table = Table { caption: format!("Exact match, held out, by {what}"), ..Table::default() };
    table.head = vec!["model".into()];
    table.head.extend(all.iter().map(|s| many((*s).into(), "step")));
    let mut series = vec![];
    for (i, arm) in study.arms.iter().enumerate() {
        let mut row: Vec<Cell> = vec![name(arm).into()];
        let mut points = vec![];
        let mut band = vec![];
        for &steps in &all {
            let values = shares(arm, steps);
            let summary = Summary::of(&values);
            row.push(summary.map_or(NONE.into(), |s| Metric::ExactMatch.show_summary(&s)).into());
            if let Some(s) = summary {
                points.push((steps as f64, s.mean));
                let low = values.iter().copied().fold(f64::INFINITY, f64::min);
                let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                band.push((steps as f64, low, high));
            }
        }
        table.rows.push(row);
        series.push(Series { name: name(arm), points, band, color: Color::Series(i), mark: Mark::Dots });
    }
    let plot = Plot {
        title: format!("exact match by {what}"),
        x: Axis { label: what.into(), whole: true, ..Axis::default() },
        y: Axis {
            label: "exact match, held out".into(),
            format: Format::Percent,
            range: Some((0.0, 1.0)),
            ..Axis::default()
        },
        series,
    };
    let figure = Figure {
        name: file.into(),
        svg: plot.svg(),
        caption: format!(
            "Exact match after the last step by the number of {what}: means over seeds; bands are from the least to the largest."
        ),
        full: false,
    };
    Some((table, figure))
}

fn differences(page: &mut Page, study: &Study) {
    page.heading("The architectures");
    let figure = |arm: &Arm| draw::figure(&arm.name, &arm.spec.model);
    page.add(Block::Figures(study.arms.iter().map(figure).collect()));
    page.text(format!(
        "As `.dream`, defaults left out; lines that the baseline `{}` lacks are set off. The whole specifications are next to this page.",
        study.arms[0].name
    ));
    let side = study.arms.iter().map(|arm| (format!("`{}`", arm.name), dreamc_dsl::sketch(&arm.spec)));
    page.add(Block::Side(side.collect()));
}

fn rewriting(page: &mut Page, study: &Study) {
    let of = |a: &Arm| a.runs.iter().flatten().map(|r| r.ledger.rewritten.clone()).next().unwrap_or_default();
    let all: Vec<Vec<(String, usize)>> = study.arms.iter().map(of).collect();
    let mut rules: Vec<String> = all.iter().flatten().map(|r| r.0.clone()).collect();
    rules.sort();
    rules.dedup();
    if rules.is_empty() {
        return;
    }
    page.heading("Appendix: rewrites");
    let mut table = Table { head: vec!["rule".into()], ..Table::default() };
    table.head.extend(study.arms.iter().map(name));
    for rule in rules {
        let count = |used: &Vec<(String, usize)>| used.iter().find(|u| u.0 == rule).map_or(0, |u| u.1);
        let mut row: Vec<Cell> = vec![format!("`{rule}`").into()];
        row.extend(all.iter().map(|used| Cell::from(count(used).to_string())));
        table.rows.push(row);
    }
    page.add(Block::Table(table));
    page.note("How often each rule was used in the functions of the training programs; `dreamc explain` says where and what it saves.");
}

fn runs(page: &mut Page, study: &Study) {
    page.heading("Runs");
    let head = [
        "model",
        "seed",
        "status",
        "steps",
        "tokens",
        "epochs",
        "validation loss, nats",
        "exact match",
        "FLOPs executed",
        "training time",
        "tokens/s",
    ];
    let mut table = Table { head: head.map(String::from).to_vec(), text: vec![2], ..Table::default() };
    for arm in &study.arms {
        for (seed, run) in study.seeds.iter().zip(&arm.runs) {
            let mut row: Vec<Cell> = vec![name(arm).into(), seed.to_string().into()];
            match run {
                None => {
                    row.push("not begun".into());
                    row.extend((0..8).map(|_| Cell::from(NONE)));
                }
                Some(run) => {
                    let l = &run.ledger;
                    row.extend([
                        l.status.clone().into(),
                        l.steps.to_string().into(),
                        grouped(l.tokens.into()).into(),
                        l.epochs.map_or(NONE.into(), times).into(),
                        l.validation_loss.map_or(NONE.into(), |v| Metric::Loss.show(v)).into(),
                        l.exact_match.map_or(NONE.into(), |v| Metric::ExactMatch.show(v)).into(),
                        decimals(l.executed_flops as f64).into(),
                        duration(l.train_seconds).into(),
                        short(l.tokens as f64 / l.train_seconds.max(1e-9)).into(),
                    ]);
                }
            }
            table.rows.push(row);
        }
    }
    page.add(Block::Table(table));
}

fn environment(page: &mut Page, study: &Study) {
    page.heading("Environment");
    let ledgers: Vec<_> =
        study.arms.iter().flat_map(|a| a.runs.iter().flatten().map(|r| &r.ledger)).collect();
    let distinct = |f: &dyn Fn(&dreamc_runtime::train::ledger::Ledger) -> String| {
        let mut all: Vec<String> = ledgers.iter().map(|l| f(l)).filter(|v| !v.is_empty()).collect();
        all.sort();
        all.dedup();
        if all.is_empty() { NONE.to_string() } else { all.join("; ") }
    };
    let seeds: Vec<String> = study.seeds.iter().map(u64::to_string).collect();
    let rows = [
        ("dreamc", distinct(&|l| l.dreamc.clone())),
        ("device", distinct(&|l| l.device.clone())),
        ("machine", distinct(&|l| l.machine.clone())),
        ("seeds", seeds.join(", ")),
        ("data, BLAKE3", distinct(&|l| l.data_hash.chars().take(16).collect())),
        ("specifications, BLAKE3", distinct(&|l| l.spec_hash.chars().take(16).collect())),
    ];
    let rows = rows.into_iter().map(|(k, v)| vec![k.into(), v.into()]).collect();
    page.add(Block::Table(Table {
        caption: String::new(),
        head: vec!["what".into(), "value".into()],
        rows,
        text: vec![1],
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_gain_is_no_factor() {
        for (ratio, words) in [
            (1.0, "as many tokens"),
            (1.004, "as many tokens"),
            (0.997, "as many tokens"),
            (2.0, "2.00 × fewer tokens"),
            (0.5, "2.00 × more tokens"),
        ] {
            assert_eq!(tokens_than(ratio), words);
        }
    }
}

//! The report of an exam, from the ledgers and metrics of its comparisons alone.
//!
//! *In*: an [`Exam`]. *Out*: a [`Page`], and a table for the terminal. *Promise*: a score is the
//! mean over difficulties of the share of held-out problems that a run answers exactly; a score
//! that no run determines is a dash; an interval is of seeds, and needs two.

use super::inside::{self, Head, Inside, Passes};
use super::{Manifest, Sat};
use crate::compare::page::{asked, conclusion, difficulties, name, p_value, shares, test};
use crate::compare::study::{Arm, Study};
use crate::failure::Failure;
use crate::number::{decimals, grouped, many};
use crate::report::draw;
use crate::report::page::{Block, Cell, Figure, Page, Rank, Table};
use crate::report::plot::{Color, Radar};
use crate::show::{duration, table};
use dreamc_runtime::statistics::{Summary, bonferroni, student_quantile};
use std::path::Path;

const NONE: &str = "–";

/// An exam as it stands.
pub struct Exam {
    manifest: Manifest,
    /// Its name.
    name: String,
    /// The comparison of each task; `None` where it has not begun.
    studies: Vec<Option<Study>>,
    /// The inside of the arms of each task, where it was looked into.
    inside: Vec<Vec<Inside>>,
}

/// Which problems a score is of.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Of {
    /// Those as hard as the ones learned from.
    Learned,
    /// Those that are harder.
    Beyond,
}

impl Exam {
    /// Reads the folder of an exam.
    pub fn read(folder: &Path) -> Result<Self, Failure> {
        let Some(manifest) = Manifest::of(folder)? else {
            return Err(Failure::Usage(format!("{} is not the folder of an exam", folder.display())));
        };
        let read = |task: &Sat| {
            let at = task.folder(folder);
            if at.join("compare.json").is_file() { Study::read(&at).map(Some) } else { Ok(None) }
        };
        let studies = manifest.tasks.iter().map(read).collect::<Result<_, _>>()?;
        let inside =
            manifest.tasks.iter().map(|task| inside::read(folder, task)).collect::<Result<_, _>>()?;
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Exam { manifest, name, studies, inside })
    }

    fn each(&self) -> impl Iterator<Item = (&Sat, &Study)> {
        self.manifest.tasks.iter().zip(&self.studies).filter_map(|(t, s)| Some((t, s.as_ref()?)))
    }

    /// Scores of an arm in a task, by seed.
    fn scores(task: &Sat, study: &Study, arm: &Arm, of: Of) -> Vec<f64> {
        let wanted = |steps: &u64| (*steps <= task.learned) == (of == Of::Learned);
        let all: Vec<Vec<f64>> =
            asked(study).into_iter().filter(wanted).map(|steps| shares(arm, steps)).collect();
        let runs = all.iter().map(Vec::len).min().unwrap_or(0);
        let mean = |run: usize| all.iter().map(|s| s[run]).sum::<f64>() / all.len() as f64;
        (0..runs).map(mean).collect()
    }

    /// Scores of the arm of a number by seed, the mean over all tasks; none before every task has
    /// come to its end.
    fn overall(&self, arm: usize) -> Vec<f64> {
        if self.studies.iter().any(Option::is_none) {
            return vec![];
        }
        let all: Vec<Vec<f64>> = self
            .each()
            .filter_map(|(t, s)| Some(Exam::scores(t, s, s.arms.get(arm)?, Of::Learned)))
            .collect();
        let runs = all.iter().map(Vec::len).min().unwrap_or(0);
        (0..runs).map(|run| all.iter().map(|s| s[run]).sum::<f64>() / all.len() as f64).collect()
    }

    /// The arms of the first task that has begun.
    fn arms(&self) -> &[Arm] {
        self.each().next().map_or(&[], |(_, study)| &study.arms)
    }
}

/// A score with its interval of 95 %.
fn scored(values: &[f64]) -> String {
    let Some(s) = Summary::of(values) else { return NONE.into() };
    let percent = |x: f64| format!("{:.1}", 100.0 * x);
    match s.deviation {
        None => format!("{} %", percent(s.mean)),
        Some(deviation) => {
            let half = student_quantile(0.975, s.n as f64 - 1.0) * deviation / (s.n as f64).sqrt();
            let (low, high) = ((s.mean - half).max(0.0), (s.mean + half).min(1.0));
            format!("{} % ({} to {})", percent(s.mean), percent(low), percent(high))
        }
    }
}

/// Rows of scores, a task each; the best of a row is set off.
fn rows(exam: &Exam, of: Of) -> Vec<Vec<Cell>> {
    let mut all = vec![];
    for (task, study) in exam.each() {
        let scores: Vec<Vec<f64>> = study.arms.iter().map(|arm| Exam::scores(task, study, arm, of)).collect();
        if scores.iter().all(Vec::is_empty) {
            continue;
        }
        all.push((vec![format!("`{}`", task.name), task.capability.clone()], scores));
    }
    if of == Of::Learned {
        let scores: Vec<Vec<f64>> = (0..exam.arms().len()).map(|arm| exam.overall(arm)).collect();
        if scores.iter().any(|s| !s.is_empty()) {
            all.push((vec!["all".into(), "mean over tasks".into()], scores));
        }
    }
    all.into_iter()
        .map(|(head, scores)| {
            let means: Vec<Option<f64>> = scores.iter().map(|s| Summary::of(s).map(|s| s.mean)).collect();
            let best = means.iter().flatten().copied().fold(f64::NEG_INFINITY, f64::max);
            let cell = |(values, mean): (&Vec<f64>, &Option<f64>)| Cell {
                text: scored(values),
                rank: if *mean == Some(best) && means.len() > 1 { Rank::Best } else { Rank::Plain },
            };
            head.into_iter().map(Cell::from).chain(scores.iter().zip(&means).map(cell)).collect()
        })
        .collect()
}

/// The result in a terminal.
pub fn summary(exam: &Exam) -> String {
    let mut all = vec![vec!["task".to_string(), "shows".into()]];
    all[0].extend(exam.arms().iter().map(name));
    let text = |cell: Cell| cell.text.replace('`', "");
    all.extend(rows(exam, Of::Learned).into_iter().map(|row| row.into_iter().map(text).collect()));
    table(&all)
}

/// The report.
pub fn page(exam: &Exam) -> Page {
    let m = &exam.manifest;
    let mut page = Page { title: format!("{}: an exam", exam.name), blocks: vec![] };
    page.text(format!(
        "{} on {}, {}; the baseline is `{}`, and every arm was trained for as many tokens as any other. Every figure is computed from the \
         ledgers and metrics of the run folders; `dreamc report` makes this page anew from them.",
        many(m.arms.len() as u128, "arm"),
        many(m.tasks.len() as u128, "task"),
        many(m.seeds.len() as u128, "seed"),
        m.arms[0]
    ));
    let planned = m.tasks.len() * m.arms.len() * m.seeds.len();
    let ended: usize = exam.each().flat_map(|(_, s)| &s.arms).map(|arm| arm.ended().count()).sum();
    if ended < planned {
        page.text(format!(
            "{ended} of {planned} runs have come to their end: what follows is not the last word."
        ));
    }
    for arm in exam.arms().iter().filter(|arm| !arm.agrees()) {
        page.text(format!(
            "† `{}` does not agree with the baseline in what the suites say must be equal: no difference can be put down to its architecture.",
            arm.name
        ));
    }
    capabilities(&mut page, exam);
    paired(&mut page, exam);
    by_difficulty(&mut page, exam);
    heads(&mut page, exam);
    passes(&mut page, exam);
    costs(&mut page, exam);
    page.heading("The architectures");
    let drawn = exam.arms().iter().map(|arm| draw::figure(&arm.name, &arm.spec.model));
    page.add(Block::Figures(drawn.collect()));
    let side = exam.arms().iter().map(|a| (format!("`{}`", a.name), dreamc_dsl::sketch(&a.spec)));
    page.add(Block::Side(side.collect()));
    page
}

/// The scores, of problems as hard as those learned and harder ones, and their picture.
fn capabilities(page: &mut Page, exam: &Exam) {
    page.heading("Capabilities");
    if exam.arms().is_empty() {
        page.text("No run has begun yet.");
        return;
    }
    let mut head = vec!["task".to_string(), "shows".into()];
    head.extend(exam.arms().iter().map(name));
    let captions = [
        (Of::Learned, "Exact match, held out, of problems as hard as those learned from"),
        (Of::Beyond, "Exact match of problems harder than any that was learned from"),
    ];
    for (of, caption) in captions {
        let rows = rows(exam, of);
        if rows.is_empty() {
            continue;
        }
        page.add(Block::Table(Table { caption: caption.into(), head: head.clone(), rows, text: vec![1] }));
    }
    page.note(
        "A score is the mean over difficulties, then over seeds; in brackets the 95 % interval of Student's t over seeds, which one seed does \
         not have. It says nothing of other sizes, lengths of training or rates.",
    );
    let tasks: Vec<(&Sat, &Study)> = exam.each().collect();
    if tasks.len() < 3 {
        return;
    }
    let series = exam.arms().iter().enumerate().map(|(i, arm)| {
        let of = |(task, study): &(&Sat, &Study)| {
            let scores = Exam::scores(task, study, study.arms.get(i)?, Of::Learned);
            Summary::of(&scores).map(|s| s.mean)
        };
        (name(arm), tasks.iter().map(of).collect(), Color::Series(i))
    });
    let radar = Radar {
        title: "exact match in every task".into(),
        axes: tasks.iter().map(|(task, _)| task.name.clone()).collect(),
        series: series.collect(),
    };
    page.add(Block::Figures(vec![Figure {
        name: "capabilities".into(),
        svg: radar.svg(),
        caption: "Exact match of problems as hard as those learned from: means over seeds; the outer ring is 100 %.".into(),
        full: false,
    }]));
}

/// Every arm against the baseline, in every task and over all.
fn paired(page: &mut Page, exam: &Exam) {
    let mut found = vec![];
    for (arm, of) in exam.arms().iter().enumerate().skip(1) {
        for (task, study) in exam.each() {
            let (Some(own), Some(base)) = (study.arms.get(arm), study.arms.first()) else { continue };
            let of_arm = |arm| Exam::scores(task, study, arm, Of::Learned);
            found.push((format!("`{}`", task.name), name(own), of_arm(own), of_arm(base)));
        }
        found.push(("all".into(), name(of), exam.overall(arm), exam.overall(0)));
    }
    found.retain(|(_, _, own, base)| !own.is_empty() && own.len() == base.len());
    let tests: Vec<_> = found.iter().map(|(_, _, own, base)| test(own, base)).collect();
    let tested = tests.iter().flatten().count();
    let mut rows: Vec<Vec<Cell>> = vec![];
    for ((task, arm, own, base), test) in found.iter().zip(&tests) {
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
        let points = |x: f64| format!("{:+.1}", 100.0 * x);
        let mut row = vec![
            task.clone(),
            arm.clone(),
            own.len().to_string(),
            format!("{} points", points(mean(own) - mean(base))),
        ];
        match test {
            None => {
                row.extend([NONE, NONE, NONE].map(String::from));
                row.push(if own.len() < 3 { "too few seeds" } else { "no variation" }.into());
            }
            Some(t) => {
                let corrected = bonferroni(t.p, tested);
                row.push(format!("{} … {}", points(t.interval.0), points(t.interval.1)));
                row.push(p_value(t.p));
                row.push(p_value(corrected));
                row.push(conclusion(own.len(), corrected).into());
            }
        }
        rows.push(row.into_iter().map(Cell::from).collect());
    }
    if rows.is_empty() {
        return;
    }
    page.heading("Against the baseline");
    let head = ["task", "arm", "seeds", "difference", "95 % interval", "p", "p × tests", "conclusion"];
    page.add(Block::Table(Table {
        caption: "Paired tests over seeds".into(),
        head: head.map(String::from).to_vec(),
        rows,
        text: vec![1, 7],
    }));
    page.note(
        "Two-sided paired t-tests: runs of one seed see the same problems in the same order. p × tests is Bonferroni's correction for all tests \
         of this table. Below three seeds there is no test, below five no conclusion is drawn from one.",
    );
}

/// Exact match over the difficulties of each task.
fn by_difficulty(page: &mut Page, exam: &Exam) {
    let mut figures = vec![];
    let mut tables = vec![];
    for (task, study) in exam.each() {
        let Some((mut table, mut figure)) = difficulties(study, &task.steps_are, &task.name) else {
            continue;
        };
        table.caption = format!(
            "`{}`: exact match by {}; up to {} are learned from",
            task.name, task.steps_are, task.learned
        );
        figure.caption = format!(
            "`{}`: exact match by {}. Problems up to {} were learned from; means over seeds, bands from the least to the largest.",
            task.name, task.steps_are, task.learned
        );
        figures.push(figure);
        tables.push(table);
    }
    if figures.is_empty() {
        return;
    }
    page.heading("By difficulty");
    page.add(Block::Figures(figures));
    tables.into_iter().for_each(|table| page.add(Block::Table(table)));
}

/// Heads that a table shows of an arm.
const SHOWN: usize = 3;

/// Which heads answer: exact match without each, the three that cost the most.
fn heads(page: &mut Page, exam: &Exam) {
    let percent = |x: f64| format!("{:.1} %", 100.0 * x);
    let mut rows: Vec<Vec<Cell>> = vec![];
    for (task, inside) in exam.manifest.tasks.iter().zip(&exam.inside) {
        for found in inside {
            let mut heads: Vec<&Head> = found.heads.iter().collect();
            heads.sort_by(|a, b| a.exact.total_cmp(&b.exact));
            let said = |head: &&Head| {
                let points = 100.0 * (head.exact - found.exact);
                format!("`{}` {} ({points:+.1})", head.name, head.number)
            };
            let first: Vec<String> = heads.iter().take(SHOWN).map(said).collect();
            let said = match (found.all_heads, first.is_empty()) {
                (0, _) => "no attention".into(),
                (_, true) => "too many to take out each".into(),
                (_, false) => first.join(", "),
            };
            let all = found.all_heads.to_string();
            rows.push(
                [format!("`{}`", task.name), format!("`{}`", found.arm), percent(found.exact), all, said]
                    .map(Cell::from)
                    .to_vec(),
            );
        }
    }
    if rows.is_empty() {
        return;
    }
    page.heading("Which heads answer");
    page.add(Block::Table(Table {
        caption: "Exact match of the first seed, and the heads without which it falls the most, in points"
            .into(),
        head: ["task", "arm", "whole", "heads", "without one head"].map(String::from).to_vec(),
        rows,
        text: vec![1, 4],
    }));
    page.note(
        "The output of one head of one application is zero (`dreamc probe --ablate heads` does the same to losses); problems are as hard as those \
         learned from. Heads that stand in for one another cost little one by one.",
    );
}

/// Which passes of a loop solve which difficulty.
fn passes(page: &mut Page, exam: &Exam) {
    let mut tables = vec![];
    for (task, inside) in exam.manifest.tasks.iter().zip(&exam.inside) {
        for found in inside.iter().filter(|found| !found.passes.is_empty()) {
            let steps: Vec<u64> = found.passes[0].by.iter().map(|(steps, _)| *steps).collect();
            let mut head = vec!["passes".to_string()];
            head.extend(steps.iter().map(|steps| format!("{steps} {}", task.steps_are)));
            let row = |passes: &Passes| {
                let shares = passes.by.iter().map(|(_, share)| format!("{:.0} %", 100.0 * share));
                std::iter::once(passes.count.to_string()).chain(shares).map(Cell::from).collect()
            };
            let rows = found.passes.iter().map(row).collect();
            let caption = format!(
                "`{}`, `{}`: exact match with the first passes of its loop alone",
                task.name, found.arm
            );
            tables.push(Table { caption, head, rows, text: vec![] });
        }
    }
    if tables.is_empty() {
        return;
    }
    page.heading("Which passes solve which depth");
    tables.into_iter().for_each(|table| page.add(Block::Table(table)));
    page.note("The first seed, evaluated with fewer passes than it was trained with; the last row is the model itself.");
}

/// Costs of every task, as foreseen and as they were.
fn costs(page: &mut Page, exam: &Exam) {
    let head = ["task", "arm", "steps", "tokens", "rate", "training FLOPs executed", "training time"];
    let mut rows = vec![];
    let mut seconds = 0.0;
    for (task, study) in exam.each() {
        for arm in &study.arms {
            let ledgers: Vec<_> = arm.ended().map(|r| &r.ledger).collect();
            let Some(first) = ledgers.first() else { continue };
            let time: f64 = ledgers.iter().map(|l| l.train_seconds).sum();
            seconds += time;
            let row = [
                format!("`{}`", task.name),
                name(arm),
                first.steps.to_string(),
                grouped(first.tokens.into()),
                format!("{:e}", arm.spec.train.learning_rate),
                decimals(ledgers.iter().map(|l| l.executed_flops as f64).sum()),
                duration(time),
            ];
            rows.push(row.map(Cell::from).to_vec());
        }
    }
    if rows.is_empty() {
        return;
    }
    page.heading("Cost");
    page.add(Block::Table(Table {
        caption: "Steps, tokens and rate of a run; FLOPs and time of all seeds".into(),
        head: head.map(String::from).to_vec(),
        rows,
        text: vec![1],
    }));
    let foreseen: f64 = exam.manifest.tasks.iter().map(|t| t.seconds).sum();
    page.text(format!(
        "{} in training steps; foreseen were {} for all, compiling, trials of rates and evaluation included.",
        duration(seconds),
        duration(foreseen)
    ));
    let tuned = exam.manifest.tasks.iter().any(|t| t.tuned);
    page.text(match tuned {
        true => "Every arm tried the same rates in every task with the first seed, and went on with its best; an end of the list may not be the best there is.",
        false => "All arms trained at one rate: the time allowed no tuning, so that a difference may be one of rates.",
    });
}

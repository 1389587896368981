//! The report of what tokens skip: the analyses of the study of routers in Gemma 2, for one model.

use super::page::{Block, Cell, Figure, Page, Table};
use super::plot::{Axis, Color, Format, Mark, Plot, Series};
use crate::number::{grouped, many};
use crate::show::table;
use dreamc_runtime::analysis::routing::{Ablation, Changes, FEWEST, Kinds, PartRate, Recursion};
use dreamc_runtime::statistics::TTest;
use serde::Serialize;

/// Tokens that a model skips.
#[derive(Clone, Debug, Serialize)]
pub struct Routing {
    /// The model's name.
    pub model: String,
    /// Steps it was trained for.
    pub step: Option<u64>,
    /// Data that it was run on.
    pub data: Vec<String>,
    /// Rows.
    pub sequences: u64,
    /// Tokens that were counted.
    pub tokens: u64,
    /// Tokens at the beginning of each row that were not.
    pub first: u64,
    /// Kinds of layers against each other.
    pub kinds: Vec<Kinds>,
    /// Every routed part.
    pub parts: Vec<PartRate>,
    /// How deep tokens recurse, in parts that passes of a loop apply.
    pub recursions: Vec<Recursion>,
    /// Loss without each part.
    pub ablation: Option<Ablation>,
}

impl Routing {
    /// The page.
    pub fn page(&self) -> Page {
        let mut page = Page { title: format!("{}: what tokens skip", self.model), blocks: vec![] };
        let step = self.step.map_or(String::new(), |s| format!(" after {}", many(s.into(), "step")));
        let first = match self.first {
            0 => String::new(),
            n => format!(" The first {n} tokens of each row do not count."),
        };
        page.text(format!(
            "`{}`{step}, over {} tokens of {} held-out rows.{first} Decisions are those the model is evaluated and sampled by. \
             Depths are counted from 0, the first application of a layer.",
            self.model,
            grouped(self.tokens.into()),
            grouped(self.sequences.into()),
        ));
        page.add(Block::List(self.data.clone()));
        page.note(
            "The analyses are those of What Do Mixture-of-Depth Routers Learn? Routing Patterns in Gemma 2.",
        );
        self.rates(&mut page);
        self.deep(&mut page);
        self.compared(&mut page);
        if let Some(ablation) = &self.ablation {
            ablated(&mut page, ablation);
        }
        self.classes(&mut page);
        page
    }

    /// Kinds of layers in order, and a series for each: what `value` gives at the depths of its
    /// parts.
    fn by_kind(&self, value: &dyn Fn(&PartRate) -> Option<f64>) -> Vec<Series> {
        let points = self.parts.iter().map(|p| (p.kind.as_str(), p.depth, value(p)));
        kinds(points)
    }

    fn rates(&self, page: &mut Page) {
        page.heading("How much is processed");
        let rates = Plot {
            title: "share of tokens processed, by depth".into(),
            x: depth_axis(),
            y: Axis {
                label: "tokens processed".into(),
                format: Format::Percent,
                range: Some((0.0, 1.0)),
                ..Axis::default()
            },
            series: self.by_kind(&|p| Some(p.rate)),
        };
        let norms = Plot {
            title: "correlation of router score and norm, by depth".into(),
            x: depth_axis(),
            y: Axis { label: "Pearson's r".into(), range: Some((-1.0, 1.0)), ..Axis::default() },
            series: self.by_kind(&|p| p.pearson.map(|c| c.r)),
        };
        page.add(Block::Figures(vec![
            figure(
                "routing-rates",
                &rates,
                "Share of the tokens that come to a wrapped part and are processed there.",
            ),
            figure(
                "routing-norms",
                &norms,
                "Correlation of a token's router score and the norm of what the router reads.",
            ),
        ]));
        let head = [
            "depth",
            "part",
            "tokens",
            "processed",
            "Pearson r",
            "p",
            "Spearman ρ",
            "probe",
            "majority",
            "lift",
        ];
        let mut table = Table { head: head.map(String::from).to_vec(), text: vec![1], ..Table::default() };
        for p in &self.parts {
            let probe = |f: &dyn Fn(&dreamc_runtime::analysis::routing::Probe) -> String| {
                p.probe.as_ref().map_or("–".into(), f)
            };
            let cells = [
                p.depth.to_string(),
                p.kind.clone(),
                p.tokens.to_string(),
                percent(p.rate),
                p.pearson.map_or("–".into(), |c| format!("{:+.3}", c.r)),
                p.pearson.map_or("–".into(), |c| p_value(c.p)),
                p.spearman.map_or("–".into(), |c| format!("{:+.3}", c.r)),
                probe(&|q| percent(q.accuracy)),
                probe(&|q| percent(q.majority)),
                probe(&|q| points(q.accuracy - q.majority)),
            ];
            table.rows.push(cells.map(Cell::from).to_vec());
        }
        page.add(Block::Table(table));
        page.note(
            "The probe is a logistic regression from the class of a token to whether it is processed, on a fifth of the tokens \
             that it was not fitted to; its lift is over guessing the commoner decision.",
        );
    }

    /// Shares of tokens by recursion depth.
    fn deep(&self, page: &mut Page) {
        if self.recursions.is_empty() {
            return;
        }
        page.heading("How deep tokens recurse");
        let series = self.recursions.iter().enumerate().map(|(i, r)| Series {
            name: r.name.clone(),
            points: r.shares.iter().enumerate().map(|(passes, share)| (passes as f64, *share)).collect(),
            band: vec![],
            color: Color::Series(i),
            mark: Mark::Points,
        });
        let plot = Plot {
            title: "share of tokens by recursion depth".into(),
            x: Axis { label: "applications that process a token".into(), whole: true, ..Axis::default() },
            y: Axis {
                label: "tokens".into(),
                format: Format::Percent,
                range: Some((0.0, 1.0)),
                ..Axis::default()
            },
            series: series.collect(),
        };
        let caption = "Share of all tokens, by how many applications of a wrapped part process them.";
        page.add(Block::Figures(vec![figure("routing-recursion", &plot, caption)]));
        let most = self.recursions.iter().map(|r| r.shares.len()).max().unwrap_or(0);
        let numbers = (0..most).map(|passes| passes.to_string());
        let head = ["part".to_string()].into_iter().chain(numbers).collect();
        let mut table = Table { head, text: vec![0], ..Table::default() };
        for r in &self.recursions {
            let shares = (0..most).map(|passes| r.shares.get(passes).map_or("–".into(), |s| percent(*s)));
            table.rows.push([r.name.clone()].into_iter().chain(shares).map(Cell::from).collect());
        }
        page.add(Block::Table(table));
    }

    fn compared(&self, page: &mut Page) {
        if self.kinds.is_empty() {
            return;
        }
        page.heading("Kinds of layers");
        let head = [
            "depths",
            "kinds",
            "processed",
            "Cohen's d",
            "first above",
            "t",
            "p",
            "norms",
            "d of norms",
            "p of norms",
        ];
        let mut table = Table { head: head.map(String::from).to_vec(), text: vec![1], ..Table::default() };
        for k in &self.kinds {
            let test = |t: Option<TTest>, f: &dyn Fn(TTest) -> String| t.map_or("–".into(), f);
            let cells = [
                format!("{}–{}", k.depths.0, k.depths.1),
                format!("`{}` against `{}`", k.first, k.second),
                format!("{} against {}", percent(k.rate.first.mean), percent(k.rate.second.mean)),
                test(k.rate.test, &|t| format!("{:+.2}", t.d)),
                percent(k.rate.above),
                test(k.rate.test, &|t| format!("{:.2}", t.t)),
                test(k.rate.test, &|t| p_value(t.p)),
                format!("{:.2} against {:.2}", k.norm.first.mean, k.norm.second.mean),
                test(k.norm.test, &|t| format!("{:+.2}", t.d)),
                test(k.norm.test, &|t| p_value(t.p)),
            ];
            table.rows.push(cells.map(Cell::from).to_vec());
        }
        page.add(Block::Table(table));
        page.note("Paired t-tests over rows, of means over the layers of a kind; d is the mean difference over the deviation of differences.");
    }

    fn classes(&self, page: &mut Page) {
        let mut names: Vec<&str> = vec![];
        for c in self.parts.iter().flat_map(|p| &p.classes) {
            if !names.contains(&c.class.as_str()) {
                names.push(&c.class);
            }
        }
        if names.is_empty() {
            return;
        }
        page.heading("Classes of tokens");
        let line = |(i, name): (usize, &&str)| Series {
            name: name.to_string(),
            points: self
                .parts
                .iter()
                .filter_map(|p| {
                    let c = p.classes.iter().find(|c| c.class == **name)?;
                    Some((p.depth as f64, c.deviation))
                })
                .collect(),
            band: vec![],
            color: Color::Series(i),
            mark: Mark::Dots,
        };
        let plot = Plot {
            title: "deviation of classes from the rate of all tokens, by depth".into(),
            x: depth_axis(),
            y: Axis {
                label: "processed, less rate of all".into(),
                format: Format::Percent,
                zero: true,
                ..Axis::default()
            },
            series: names.iter().enumerate().map(line).collect(),
        };
        page.add(Block::Figures(vec![figure(
            "routing-classes",
            &plot,
            "How much more of a class is processed than of all tokens.",
        )]));
        let head =
            ["depth", "part", "class", "tokens", "processed", "deviation", "p", "corrected", "stands out"];
        let mut table =
            Table { head: head.map(String::from).to_vec(), text: vec![1, 2, 8], ..Table::default() };
        for p in &self.parts {
            for c in &p.classes {
                let cells = [
                    p.depth.to_string(),
                    p.kind.clone(),
                    c.class.clone(),
                    c.tokens.to_string(),
                    percent(c.rate),
                    points(c.deviation),
                    p_value(c.p),
                    p_value(c.corrected),
                    if c.stands_out() { "✓".into() } else { String::new() },
                ];
                table.rows.push(cells.map(Cell::from).to_vec());
            }
        }
        page.add(Block::Table(table));
        page.note(format!(
            "Exact binomial tests against the rate of all tokens, corrected for the number of classes (Bonferroni); classes with \
             fewer than {FEWEST} tokens are left out. A class stands out where that is significant at 5 % and at least five points."
        ));
    }
}

fn ablated(page: &mut Page, ablation: &Ablation) {
    page.heading("Parts left out");
    let targets = grouped(ablation.targets.into());
    page.text(format!(
        "The whole model has a perplexity of {:.3}, over {targets} targets.",
        ablation.perplexity
    ));
    let of = |routed: bool| {
        let own = ablation.parts.iter().filter(move |(p, _)| p.routed == routed);
        own.flat_map(|(p, change)| p.depths.iter().map(|d| (p.kind.as_str(), *d, Some(*change))))
            .collect::<Vec<_>>()
    };
    let mut figures = vec![];
    for (name, routed, what) in
        [("routing-ablation", true, "the wrapped part"), ("routing-control", false, "all else of the layer")]
    {
        let series = kinds(of(routed).into_iter());
        if series.is_empty() {
            continue;
        }
        let plot = Plot {
            title: format!("change in perplexity without {what}, by depth"),
            x: depth_axis(),
            y: Axis { label: "change in perplexity".into(), zero: true, ..Axis::default() },
            series,
        };
        let caption = format!("Change in perplexity where {what} adds nothing, by kind of wrapped part.");
        figures.push(Figure { name: name.into(), svg: plot.svg(), caption, full: false });
    }
    page.add(Block::Figures(figures));
    let head = ["depth", "left out", "of a layer with", "perplexity", "change"];
    let mut table = Table { head: head.map(String::from).to_vec(), text: vec![1, 2], ..Table::default() };
    for (p, change) in &ablation.parts {
        let depths: Vec<String> = p.depths.iter().map(u64::to_string).collect();
        let what = if p.routed { p.part.clone() } else { format!("{} (control)", p.part) };
        let cells = [
            depths.join(", "),
            what,
            p.kind.clone(),
            format!("{:.3}", ablation.perplexity + change),
            format!("{change:+.3}"),
        ];
        table.rows.push(cells.map(Cell::from).to_vec());
    }
    page.add(Block::Table(table));
    let head = ["left out", "kinds", "change", "difference", "t", "df", "p"];
    let mut table = Table { head: head.map(String::from).to_vec(), text: vec![0, 1], ..Table::default() };
    let rows = [("wrapped parts", &ablation.tests), ("control", &ablation.controls)];
    for (what, changes) in rows {
        table.rows.extend(changes.iter().map(|c| changed(what, c)));
    }
    if !table.rows.is_empty() {
        page.add(Block::Table(table));
        page.note("Welch's t-test between the changes of two kinds of layers.");
    }
}

fn changed(what: &str, c: &Changes) -> Vec<Cell> {
    let test = |f: &dyn Fn(TTest) -> String| c.test.map_or("–".into(), f);
    let cells = [
        what.to_string(),
        format!("`{}` against `{}`", c.first, c.second),
        format!("{:+.3} against {:+.3}", c.first_change.mean, c.second_change.mean),
        format!("{:+.3}", c.first_change.mean - c.second_change.mean),
        test(&|t| format!("{:.2}", t.t)),
        test(&|t| format!("{:.1}", t.df)),
        test(&|t| p_value(t.p)),
    ];
    cells.map(Cell::from).to_vec()
}

/// A series of points by depth for each kind.
fn kinds<'a>(points: impl Iterator<Item = (&'a str, u64, Option<f64>)>) -> Vec<Series> {
    let mut all: Vec<Series> = vec![];
    for (kind, depth, value) in points {
        let Some(value) = value else { continue };
        let at = (depth as f64, value);
        match all.iter_mut().find(|s| s.name == kind) {
            Some(series) => series.points.push(at),
            None => all.push(Series {
                name: kind.into(),
                points: vec![at],
                band: vec![],
                color: Color::Series(all.len()),
                mark: Mark::Points,
            }),
        }
    }
    all
}

fn depth_axis() -> Axis {
    Axis { label: "depth".into(), whole: true, ..Axis::default() }
}

fn figure(name: &str, plot: &Plot, caption: &str) -> Figure {
    Figure { name: name.into(), svg: plot.svg(), caption: caption.into(), full: false }
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

fn points(share: f64) -> String {
    format!("{:+.1} pp", 100.0 * share)
}

fn p_value(p: f64) -> String {
    if p >= 1e-3 {
        format!("{p:.3}")
    } else if p > 0.0 {
        format!("{p:.0e}")
    } else {
        // Below what a number holds.
        "< 1e-300".into()
    }
}

/// The most of it in a few lines.
pub fn summary(r: &Routing) -> String {
    let mut rows =
        vec![["depth", "processed", "score ~ norm", "probe", "majority"].map(String::from).to_vec()];
    for p in &r.parts {
        rows.push(vec![
            format!("{} {}", p.depth, p.kind),
            percent(p.rate),
            p.pearson.map_or("–".into(), |c| format!("{:+.3}", c.r)),
            p.probe.map_or("–".into(), |q| percent(q.accuracy)),
            p.probe.map_or("–".into(), |q| percent(q.majority)),
        ]);
    }
    let mut text = table(&rows);
    if !r.recursions.is_empty() {
        let mut rows =
            vec![["recursion", "share of tokens in 0, 1, … applications"].map(String::from).to_vec()];
        for r in &r.recursions {
            let shares: Vec<String> = r.shares.iter().map(|share| percent(*share)).collect();
            rows.push(vec![r.name.clone(), shares.join(", ")]);
        }
        text = format!("{text}\n{}", table(&rows));
    }
    if !r.kinds.is_empty() {
        let mut rows = vec![["kinds", "processed", "d", "p"].map(String::from).to_vec()];
        for k in &r.kinds {
            rows.push(vec![
                format!("{} against {}, depths {}–{}", k.first, k.second, k.depths.0, k.depths.1),
                format!("{} against {}", percent(k.rate.first.mean), percent(k.rate.second.mean)),
                k.rate.test.map_or("–".into(), |t| format!("{:+.2}", t.d)),
                k.rate.test.map_or("–".into(), |t| p_value(t.p)),
            ]);
        }
        text = format!("{text}\n{}", table(&rows));
    }
    if let Some(a) = &r.ablation {
        let mut rows = vec![["left out", "perplexity", "change"].map(String::from).to_vec()];
        let targets = format!("of {} targets", a.targets);
        rows.push(vec!["nothing".into(), format!("{:.3}", a.perplexity), targets]);
        for (p, change) in a.parts.iter().filter(|(p, _)| p.routed) {
            let depths: Vec<String> = p.depths.iter().map(u64::to_string).collect();
            rows.push(vec![
                format!("{} {}", depths.join(", "), p.part),
                format!("{:.3}", a.perplexity + change),
                format!("{change:+.3}"),
            ]);
        }
        text = format!("{text}\n{}", table(&rows));
    }
    text
}

//! The report of an analysis: the paper's section 4.2 for one model.

use super::page::{Block, Cell, Figure, Page, Table};
use super::plot::{Axis, Color, Format, Map, Mark, Plot, Series, Stack};
use crate::number::{grouped, many};
use dreamc_runtime::analysis::experts::ExpertUse;
use dreamc_runtime::analysis::probe::Without;
use dreamc_runtime::analysis::streams::Streams;
use dreamc_runtime::analysis::{DepthAttention, Observations};
use dreamc_runtime::statistics::entropy;
use dreamc_runtime::train::health::Pass;
use serde::Serialize;

/// An analysis of a model.
#[derive(Clone, Debug, Serialize)]
pub struct Analysis {
    /// The model's name.
    pub model: String,
    /// Steps it was trained for.
    pub step: Option<u64>,
    /// Data that it was run on.
    pub data: Vec<String>,
    /// Observations.
    pub observations: Observations,
    /// The use of experts, of every router.
    pub experts: Vec<ExpertUse>,
    /// Ranks of the matrices.
    pub ranks: Vec<Rank>,
    /// The loss without each head and each expert; empty where it was not asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub importance: Vec<Without>,
    /// The model at several depths.
    pub depths: Vec<AtDepth>,
}

/// The rank of a matrix.
#[derive(Clone, Debug, Serialize)]
pub struct Rank {
    /// Its tensor.
    pub name: String,
    /// The most it can be.
    pub full: usize,
    /// Singular values whose squares are nine tenths of the sum of all squares.
    pub nine_tenths: usize,
    /// The exponential of the entropy of the singular values as shares of their sum.
    pub effective: f64,
}

/// A recurrent model at some depth.
#[derive(Clone, Debug, Serialize)]
pub struct AtDepth {
    /// Count of its outermost `recur`.
    pub count: u64,
    /// Applications of layers.
    pub depth: u64,
    /// Whether it was trained at this depth.
    pub trained: bool,
    /// Mean loss, in nats.
    pub loss: Option<f64>,
    /// How many targets that is of.
    pub targets: Option<u64>,
    /// Share of held-out problems answered exactly.
    pub exact_match: Option<f64>,
    /// The same by composed steps.
    pub by_difficulty: Vec<(u64, f64)>,
}

impl Analysis {
    /// The page, with a drawing of the model.
    pub fn page(&self, wiring: Figure) -> Page {
        let mut page = Page { title: format!("{}: what it does inside", self.model), blocks: vec![] };
        let o = &self.observations;
        let step = self.step.map_or(String::new(), |s| format!(" after {}", many(s.into(), "step")));
        page.text(format!(
            "`{}`{step}, depth {}, over {} tokens of {} held-out sequences. Routing indices are those the model used.",
            self.model,
            o.depth,
            grouped(o.tokens.into()),
            grouped(o.sequences.into()),
        ));
        page.add(Block::List(self.data.clone()));
        page.add(Block::Figures(vec![wiring]));
        page.note(
            "Depths are counted from 0, the first application of a layer. Figures are numbered as in Knupp et al., Depth-Recurrent \
             Attention Mixtures: Giving Latent Reasoning the Attention it Deserves (arXiv 2601.21582). An even split has as many experts \
             at each depth as a layered model whose layers share them out.",
        );
        for attention in &o.depth_attention {
            depth_attention(&mut page, attention);
        }
        // Experts proper come before projections.
        let (projections, networks): (Vec<_>, Vec<_>) = self.experts.iter().partition(|u| u.projection);
        for used in networks.into_iter().chain(projections) {
            experts(&mut page, used);
        }
        streams(&mut page, &o.streams);
        passes(&mut page, &o.passes);
        if self.depths.len() > 1 {
            self.against_depth(&mut page);
        }
        page
    }

    fn against_depth(&self, page: &mut Page) {
        page.heading("Loss against depth");
        page.text("The same weights with the outermost `recur` run other numbers of times.");
        let mut figures = vec![];
        let line = |name: &str, color: usize, value: &dyn Fn(&AtDepth) -> Option<f64>| Series {
            name: name.into(),
            points: self.depths.iter().filter_map(|d| Some((d.count as f64, value(d)?))).collect(),
            band: vec![],
            color: Color::Series(color),
            mark: Mark::Dots,
        };
        let x = Axis {
            label: "applications of the recurrent part".into(),
            whole: true,
            zero: true,
            ..Axis::default()
        };
        let mut plot = |name: &str, y: Axis, series: Vec<Series>, caption: &str| {
            if series.iter().any(|s| !s.points.is_empty()) {
                let svg = Plot { title: caption.into(), x: x.clone(), y, series }.svg();
                figures.push(Figure { name: name.into(), svg, caption: caption.into(), full: false });
            }
        };
        let y = Axis { label: "validation loss, nats".into(), ..Axis::default() };
        plot("loss-by-depth", y, vec![line("", 0, &|d| d.loss)], "Validation loss by depth.");
        let mut steps: Vec<u64> =
            self.depths.iter().flat_map(|d| d.by_difficulty.iter().map(|b| b.0)).collect();
        steps.sort_unstable();
        steps.dedup();
        let mut series: Vec<Series> = steps
            .iter()
            .enumerate()
            .map(|(i, s)| {
                let at = |d: &AtDepth| d.by_difficulty.iter().find(|b| b.0 == *s).map(|b| b.1);
                let color = Color::Ramp(i as f64 / (steps.len().max(2) - 1) as f64);
                let name = format!("{s} step{}", if *s == 1 { "" } else { "s" });
                Series { color, mark: Mark::Thin, ..line(&name, 0, &at) }
            })
            .collect();
        series.push(Series { color: Color::Ink, ..line("all", 0, &|d| d.exact_match) });
        let y = Axis {
            label: "exact match, held out".into(),
            format: Format::Percent,
            range: Some((0.0, 1.0)),
            ..Axis::default()
        };
        plot("exact-match-by-depth", y, series, "Exact match by depth and composed steps.");
        let head = ["recur", "depth", "loss", "targets", "exact match"].map(String::from).to_vec();
        let row = |d: &AtDepth| {
            let trained = if d.trained { " (trained)" } else { "" };
            vec![
                Cell::from(format!("{}{trained}", d.count)),
                d.depth.to_string().into(),
                d.loss.map_or("–".into(), |l| format!("{l:.4}")).into(),
                d.targets.map_or("–".into(), |n| grouped(n.into())).into(),
                d.exact_match.map_or("–".into(), percent).into(),
            ]
        };
        let rows = self.depths.iter().map(row).collect();
        page.add(Block::Table(Table { head, rows, ..Table::default() }));
        page.add(Block::Figures(figures));
    }
}

/// How long the stream is along depth, how much layers turn it, and how far passes move it.
fn streams(page: &mut Page, streams: &Streams) {
    let mut figures = vec![];
    let mut plot = |name: &str, x: &str, y: &str, points: Vec<(f64, f64)>, caption: &str| {
        if points.len() > 1 {
            let x = Axis { label: x.into(), whole: true, zero: true, ..Axis::default() };
            let y = Axis { label: y.into(), zero: true, ..Axis::default() };
            let (color, mark) = (Color::Series(0), Mark::Dots);
            let series = vec![Series { name: String::new(), points, band: vec![], color, mark }];
            let svg = Plot { title: caption.into(), x, y, series }.svg();
            figures.push(Figure { name: name.into(), svg, caption: caption.into(), full: false });
        }
    };
    let norms = streams.norms.iter().map(|n| (n.depth as f64, n.norm)).collect();
    let caption = "Mean norm of the stream after every layer, that of the embedding first.";
    plot("stream-norms", "layers before", "mean norm of the stream", norms, caption);
    let turned = streams.influence.iter().enumerate().map(|(depth, i)| (depth as f64, *i)).collect();
    let caption = "Block influence: 1 - cos of the stream before and after every layer, the mean over tokens (arXiv 2403.03853).";
    plot("block-influence", "layers before", "block influence", turned, caption);
    let moved = streams.passes.iter().map(|p| (p.pass as f64 + 1.0, p.movement)).collect();
    let caption =
        "How far each pass moves the stream: the norm of the difference over that of what the pass leaves.";
    plot("stream-movement", "pass", "relative movement", moved, caption);
    if !figures.is_empty() {
        page.heading("The stream along depth");
        page.add(Block::Figures(figures));
    }
}

/// Losses after the passes of a loop with an exit, and how many tokens leave after each.
fn passes(page: &mut Page, passes: &[Pass]) {
    if passes.is_empty() {
        return;
    }
    let mut figures = vec![];
    let mut plot = |name: &str, label: &str, value: &dyn Fn(&Pass) -> Option<f64>, caption: &str, format| {
        let points: Vec<(f64, f64)> =
            passes.iter().enumerate().filter_map(|(i, pass)| Some((i as f64 + 1.0, value(pass)?))).collect();
        if points.len() > 1 {
            let x = Axis { label: "pass".into(), whole: true, zero: true, ..Axis::default() };
            let y = Axis { label: label.into(), format, ..Axis::default() };
            let (color, mark) = (Color::Series(0), Mark::Dots);
            let series = vec![Series { name: String::new(), points, band: vec![], color, mark }];
            let svg = Plot { title: caption.into(), x, y, series }.svg();
            figures.push(Figure { name: name.into(), svg, caption: caption.into(), full: false });
        }
    };
    let caption = "Loss of the stream after every pass, through the final norm and the head.";
    plot("loss-by-pass", "loss, nats per target", &|pass| Some(pass.loss), caption, Format::default());
    let caption = "The share of tokens that leaves after every pass, the mean of the gate's.";
    plot("exits-by-pass", "share of tokens", &|pass| pass.share, caption, Format::Percent);
    page.heading("Passes");
    let head = ["pass", "loss, nats per target", "targets", "tokens that leave"].map(String::from).to_vec();
    let row = |(i, pass): (usize, &Pass)| {
        vec![
            Cell::from((i + 1).to_string()),
            format!("{:.4}", pass.loss).into(),
            grouped(pass.targets.into()).into(),
            pass.share.map_or("–".into(), percent).into(),
        ]
    };
    let rows = passes.iter().enumerate().map(row).collect();
    page.add(Block::Table(Table { head, rows, ..Table::default() }));
    page.add(Block::Figures(figures));
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

fn depth_attention(page: &mut Page, a: &DepthAttention) {
    page.heading(&format!("Depth attention `{}`", a.component));
    let largest = |row: &[f64]| row.iter().copied().fold(0.0, f64::max);
    let n = a.depths.len();
    let values = a.scores.iter().map(|row| {
        let most = largest(row).max(f64::MIN_POSITIVE);
        (0..n).map(|j| row.get(j).map(|s| s / most)).collect()
    });
    let map = Map {
        title: format!("mean scores of {} by depth", a.component),
        x: "depth that is looked at".into(),
        y: "depth that looks".into(),
        legend: ("mean score".into(), "0".into(), "largest of its depth".into()),
        // Small maps have room for the scores themselves, in percent.
        cells: if n <= 12 {
            a.scores.iter().map(|row| row.iter().map(|s| format!("{:.0}", 100.0 * s)).collect()).collect()
        } else {
            vec![]
        },
        values: values.collect(),
        aspect: 0.9,
        wide: false,
    };
    page.add(Block::Figures(vec![Figure {
        name: format!("depth-attention-{}", a.component),
        svg: map.svg(),
        caption: "Mean scores of depth attention, in percent, coloured by the largest of each depth (Figure 4). On the diagonal a depth looks at itself.".into(),
        full: false,
    }]));
    let head = ["depth", "itself", "depth before", "first depth", "mean distance", "entropy / ln(depth + 1)"];
    let mut table = Table { head: head.map(String::from).to_vec(), ..Table::default() };
    for (i, (depth, row)) in a.depths.iter().zip(&a.scores).enumerate() {
        let distance: f64 = row.iter().enumerate().map(|(j, s)| (i - j) as f64 * s).sum();
        let before = if i > 0 { percent(row[i - 1]) } else { "–".into() };
        let entropy =
            if i > 0 { format!("{:.3}", entropy(row) / (row.len() as f64).ln()) } else { "–".into() };
        let cells =
            [depth.to_string(), percent(row[i]), before, percent(row[0]), format!("{distance:.2}"), entropy];
        table.rows.push(cells.map(Cell::from).to_vec());
    }
    page.add(Block::Table(table));
}

/// Generalists and specialists; where one or two depths are a fifth of all, nobody is a specialist.
fn generalists(u: &ExpertUse) -> String {
    let general = format!(
        "Of the experts that are chosen at all, {} are generalists: 90 % of their choices spread over a fifth of the depths \
         or more.",
        percent(u.generalists)
    );
    if u.depths.len() <= 10 {
        return general;
    }
    format!(
        "{general} {} are specialists of one or two early depths, {} of one or two late ones.",
        percent(u.early_specialists),
        percent(u.late_specialists)
    )
}

fn experts(page: &mut Page, u: &ExpertUse) {
    let what = if u.projection { "Projections of" } else { "Experts" };
    page.heading(&format!("{what} `{}`", u.component));
    let depths = u.depths.len();
    let mut items = vec![
        format!(
            "{} experts over {depths} depths; {} were never chosen. Gini of all choices {:.3}, entropy {} of the most there can be.",
            u.experts,
            u.dead,
            u.gini,
            percent(u.balance)
        ),
        generalists(u),
    ];
    let ratio = |f: &dyn Fn(&dreamc_runtime::analysis::experts::DepthUse) -> f64| {
        let all: Vec<f64> = u.depths.iter().map(|d| f(d) / u.layered).collect();
        let low = all.iter().copied().fold(f64::INFINITY, f64::min);
        let high = all.iter().copied().fold(0.0, f64::max);
        let (low, high) = (format!("{low:.1}"), format!("{high:.1}"));
        if low == high { format!("{low} ×") } else { format!("{low} to {high} ×") }
    };
    items.push(format!(
        "A depth uses {} as many experts as an even split has ({:.1}); {} as many have 90 % of its choices.",
        ratio(&|d| d.used as f64),
        u.layered,
        ratio(&|d| d.most as f64)
    ));
    page.add(Block::List(items));
    let name = |figure: &str| format!("{figure}-{}", u.component);
    let mut figures = vec![];
    let mut add = |file: &str, svg: String, caption: &str, full: bool| {
        figures.push(Figure { name: name(file), svg, caption: caption.into(), full });
    };
    let stack = Stack {
        title: format!("depths of the experts of {}", u.component),
        x: "experts, in order of depth-generalisation".into(),
        y: "P(depth | expert)".into(),
        part: "depth".into(),
        columns: u.depths_of_experts(),
    };
    add(
        "depths-of-experts",
        stack.svg(),
        "Distribution of depths per expert (Figure 5): experts by the number of depths that have 90 % \
        of their choices, then by a depth sampled from their distribution.",
        true,
    );
    let rows = u.experts_of_depths().into_iter().map(|row| {
        let most = row.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
        row.into_iter().map(|p| Some(p / most)).collect()
    });
    let map = Map {
        title: format!("experts of the depths of {}", u.component),
        x: "experts, in the same order".into(),
        y: "depth".into(),
        legend: ("P(expert | depth)".into(), "0".into(), "largest of its depth".into()),
        cells: vec![],
        values: rows.collect(),
        aspect: 0.26,
        wide: true,
    };
    add("experts-of-depths", map.svg(), "Distribution of experts per depth (Figure 7).", true);
    let mut series = vec![];
    for (i, d) in u.depths.iter().enumerate() {
        series.push(Series {
            name: if depths <= 6 || i == 0 || i + 1 == depths {
                format!("depth {}", d.depth)
            } else {
                String::new()
            },
            points: d.lorenz.clone(),
            band: vec![],
            color: Color::Ramp(i as f64 / (depths.max(2) - 1) as f64),
            mark: Mark::Thin,
        });
    }
    let ideal =
        |share: f64| (1..=50).map(|i| f64::from(i) / 50.0).map(|x| (x, x * share)).collect::<Vec<_>>();
    let line =
        |name: &str, points, color, mark| Series { name: name.into(), points, band: vec![], color, mark };
    series.push(line("all depths", u.lorenz.clone(), Color::Ink, Mark::Line));
    series.push(line("even split", ideal(1.0 / depths.max(1) as f64), Color::Series(1), Mark::Dashed));
    let lorenz = Plot {
        title: format!("Lorenz curves of {}", u.component),
        x: Axis {
            label: "share of choices".into(),
            format: Format::Percent,
            range: Some((0.0, 1.0)),
            ..Axis::default()
        },
        y: Axis {
            label: "least share of experts".into(),
            format: Format::Percent,
            log: true,
            ..Axis::default()
        },
        series,
    };
    add(
        "lorenz",
        lorenz.svg(),
        "Lorenz curves (Figure 6): the least share of all experts that has a share of the choices, at each depth \
        and over all of them, against an even split.",
        false,
    );
    let over_depth = |f: &dyn Fn(&dreamc_runtime::analysis::experts::DepthUse) -> f64| {
        u.depths.iter().map(|d| (d.depth as f64, f(d))).collect::<Vec<_>>()
    };
    let layered = u.depths.iter().map(|d| (d.depth as f64, u.layered)).collect();
    let depth_axis = || Axis { label: "depth".into(), whole: true, ..Axis::default() };
    let per_depth = Plot {
        title: format!("experts per depth of {}", u.component),
        x: depth_axis(),
        y: Axis { label: "experts".into(), zero: true, ..Axis::default() },
        series: vec![
            line("chosen at all", over_depth(&|d| d.used as f64), Color::Series(0), Mark::Dots),
            line("with 90 % of choices", over_depth(&|d| d.most as f64), Color::Series(2), Mark::Dots),
            line("exp(entropy)", over_depth(&|d| d.effective), Color::Series(3), Mark::Dots),
            line("even split", layered, Color::Series(1), Mark::Dashed),
        ],
    };
    add("experts-per-depth", per_depth.svg(), "Experts per depth, against an even split of them.", false);
    let living: usize = u.by_depths.iter().sum();
    let bars =
        u.by_depths.iter().enumerate().map(|(i, n)| ((i + 1) as f64, *n as f64 / living.max(1) as f64));
    let shares = Plot {
        title: format!("experts of {} by number of depths", u.component),
        x: Axis { label: "depths with 90 % of an expert's choices".into(), whole: true, ..Axis::default() },
        y: Axis { label: "share of living experts".into(), format: Format::Percent, ..Axis::default() },
        series: vec![line("", bars.collect(), Color::Series(0), Mark::Bars)],
    };
    add("experts-by-depths", shares.svg(), "Share of experts by the number of depths they serve.", false);
    let routing = Plot {
        title: format!("routing entropy of {}", u.component),
        x: depth_axis(),
        y: Axis { label: "share of the most".into(), range: Some((0.0, 1.0)), ..Axis::default() },
        series: vec![
            line("of the choices", over_depth(&|d| d.entropy), Color::Series(0), Mark::Dots),
            line("of a token's scores", over_depth(&|d| d.token_entropy), Color::Series(2), Mark::Dots),
            line("Gini of the choices", over_depth(&|d| d.gini), Color::Series(1), Mark::Dashed),
        ],
    };
    add(
        "routing-entropy",
        routing.svg(),
        "Routing entropy by depth, as a share of the most there can be, and the Gini coefficient: even routing has entropy 1 and Gini 0.",
        false,
    );
    page.add(Block::Figures(figures));
    let head = ["depth", "experts", "with 90 %", "exp(entropy)", "entropy", "token entropy", "Gini"];
    let mut table = Table { head: head.map(String::from).to_vec(), ..Table::default() };
    for d in &u.depths {
        let cells = [
            d.depth.to_string(),
            d.used.to_string(),
            d.most.to_string(),
            format!("{:.1}", d.effective),
            format!("{:.3}", d.entropy),
            format!("{:.3}", d.token_entropy),
            format!("{:.3}", d.gini),
        ];
        table.rows.push(cells.map(Cell::from).to_vec());
    }
    page.add(Block::Table(table));
}

//! Plots as SVG: lines, bars, maps, rings and stacked shares, with labelled axes.
//!
//! *In*: numbers. *Out*: SVG that takes its colours from the variables of `style.css`, so that one
//! file is legible on light and dark screens and on paper. *Promise*: deterministic text; NaN and
//! infinities are left out; no script and nothing from elsewhere. A page's script finds by
//! `data-series` what belongs to a series: its lines, and its name in the legend.

use std::fmt::Write;

/// Width of a plot in its own units, about those of the screen.
const WIDTH: f64 = 540.0;
/// Width of a plot that takes the whole page.
const WIDE: f64 = 1060.0;
/// Number of colours for series; more series share them and differ in their dashes.
const COLORS: usize = 6;

/// How positions on an axis are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Format {
    /// With a prefix where it is long: `1.2M`.
    #[default]
    Number,
    /// As a percentage of 1.
    Percent,
}

/// An axis.
#[derive(Clone, Debug, Default)]
pub struct Axis {
    /// Name and unit.
    pub label: String,
    /// Whether it is logarithmic; values must then be positive.
    pub log: bool,
    /// Whether 0 is on it in any case.
    pub zero: bool,
    /// Whether only whole numbers have ticks.
    pub whole: bool,
    /// How its ticks are written.
    pub format: Format,
    /// First and last value; those of the data, rounded outwards, where absent.
    pub range: Option<(f64, f64)>,
}

/// Which colour.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Color {
    /// That of the n-th series.
    Series(usize),
    /// Between the first (0) and the last (1) of a sequence.
    Ramp(f64),
    /// That of text.
    Ink,
}

impl Color {
    fn css(self) -> String {
        match self {
            Color::Series(n) => format!("var(--c{})", n % COLORS),
            Color::Ink => "var(--ink)".into(),
            Color::Ramp(at) => ramp(at),
        }
    }
}

/// Colours of middling lightness, which show on white and on black.
fn ramp(at: f64) -> String {
    const STOPS: [[f64; 3]; 5] = [
        [74.0, 98.0, 206.0],
        [22.0, 144.0, 176.0],
        [66.0, 160.0, 88.0],
        [208.0, 146.0, 22.0],
        [206.0, 70.0, 52.0],
    ];
    let at = if at.is_finite() { at.clamp(0.0, 1.0) * 4.0 } else { 0.0 };
    let i = (at as usize).min(3);
    let mix = |c: usize| (STOPS[i][c] + (at - i as f64) * (STOPS[i + 1][c] - STOPS[i][c])).round() as u8;
    format!("#{:02x}{:02x}{:02x}", mix(0), mix(1), mix(2))
}

/// How a series is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// A line.
    Line,
    /// A line with a dot at each point.
    Dots,
    /// Dots without a line, for points with nothing between them.
    Points,
    /// A dashed line.
    Dashed,
    /// A thin line, one of many.
    Thin,
    /// Bars from 0.
    Bars,
}

/// Points that belong together.
#[derive(Clone, Debug)]
pub struct Series {
    /// Its name in the legend; without one it has no entry.
    pub name: String,
    /// Its points, from left to right.
    pub points: Vec<(f64, f64)>,
    /// Least and largest at positions, drawn as a band under the line.
    pub band: Vec<(f64, f64, f64)>,
    /// Its colour.
    pub color: Color,
    /// How it is drawn.
    pub mark: Mark,
}

/// Series over two axes.
#[derive(Clone, Debug)]
pub struct Plot {
    /// Description for those who cannot see the figure.
    pub title: String,
    /// Horizontal.
    pub x: Axis,
    /// Vertical.
    pub y: Axis,
    /// Marks, the last on top.
    pub series: Vec<Series>,
}

struct Frame {
    left: f64,
    top: f64,
    width: f64,
    height: f64,
}

/// A linear or logarithmic map of values to places.
#[derive(Clone, Copy)]
struct Scale {
    low: f64,
    high: f64,
    log: bool,
}

impl Scale {
    fn new(axis: &Axis, values: impl Iterator<Item = f64>) -> (Self, Vec<f64>) {
        let usable = |v: &f64| v.is_finite() && (!axis.log || *v > 0.0);
        let (mut low, mut high) =
            values.filter(usable).fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
        if axis.zero && !axis.log {
            low = low.min(0.0);
        }
        if low > high {
            (low, high) = if axis.log { (1.0, 10.0) } else { (0.0, 1.0) };
        }
        if let Some(range) = axis.range {
            (low, high) = range;
        }
        if axis.log {
            if low == high {
                (low, high) = (low / 2.0, high * 2.0);
            }
            return (Scale { low, high, log: true }, log_ticks(low, high));
        }
        if low == high {
            let half = if low == 0.0 { 0.5 } else { low.abs() * 0.1 };
            (low, high) = (low - half, high + half);
        }
        let step = nice((high - low) / 5.0);
        let step = if axis.whole { step.max(1.0).ceil() } else { step };
        if axis.range.is_none() {
            (low, high) = ((low / step + 1e-9).floor() * step, (high / step - 1e-9).ceil() * step);
        }
        let first = (low / step - 1e-9).ceil() as i64;
        let last = (high / step + 1e-9).floor() as i64;
        let ticks = (first..=last.min(first + 50)).map(|i| i as f64 * step).collect();
        (Scale { low, high, log: false }, ticks)
    }

    /// From 0 to 1.
    fn at(&self, v: f64) -> f64 {
        if self.log {
            (v / self.low).ln() / (self.high / self.low).ln()
        } else {
            (v - self.low) / (self.high - self.low)
        }
    }
}

fn log_ticks(low: f64, high: f64) -> Vec<f64> {
    let decades = (high / low).log10();
    let factors: &[f64] = if decades > 4.0 {
        &[1.0]
    } else if decades > 1.5 {
        &[1.0, 3.0]
    } else {
        &[1.0, 2.0, 5.0]
    };
    let mut ticks = vec![];
    for power in low.log10().floor() as i32..=high.log10().ceil() as i32 {
        ticks.extend(factors.iter().map(|f| f * 10f64.powi(power)));
    }
    ticks.retain(|t| *t >= low * 0.999 && *t <= high * 1.001);
    ticks
}

/// The round number closest above.
fn nice(step: f64) -> f64 {
    let power = 10f64.powf(step.log10().floor());
    let share = step / power;
    power * [1.0, 2.0, 2.5, 5.0].into_iter().find(|s| share <= s * 1.0001).unwrap_or(10.0)
}

/// A number as ticks are written.
fn tick(v: f64, format: Format, step: f64, largest: f64) -> String {
    let trimmed = |v: f64, digits: usize| {
        let text = format!("{v:.digits$}");
        let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
        if text == "-0" { "0".to_string() } else { text.to_string() }
    };
    if format == Format::Percent {
        let digits = if step < 0.009 { 1 } else { 0 };
        return format!("{} %", trimmed(100.0 * v, digits));
    }
    let (unit, name) = match largest {
        _ if v == 0.0 => (1.0, ""),
        a if a >= 1e9 => (1e9, "G"),
        a if a >= 1e6 => (1e6, "M"),
        a if a >= 1e4 => (1e3, "k"),
        _ => (1.0, ""),
    };
    if v != 0.0 && v.abs() < 1e-3 {
        return format!("{v:.0e}");
    }
    let digits = (-(step / unit).abs().log10().floor()).clamp(0.0, 4.0) as usize + 1;
    format!("{}{name}", trimmed(v / unit, digits))
}

/// Text that means itself in XML.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Width of text in the plots' font, near enough to place things.
pub(super) fn text_width(text: &str) -> f64 {
    6.4 * text.chars().count() as f64
}

/// The beginning of a picture of a size, described by its title.
pub(super) fn open(title: &str, width: f64, height: f64) -> String {
    format!(
        "<svg class=\"plot\" xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" role=\"img\" \
         aria-label=\"{}\">\n",
        escape(title)
    )
}

/// A dot of a shape that differs from series to series, so that they differ without colours, too.
fn dot(out: &mut String, color: Color, x: f64, y: f64) {
    let fill = color.css();
    let Color::Series(n) = color else {
        let _ = writeln!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{fill}\"/>");
        return;
    };
    let _ = match n % 4 {
        0 => writeln!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.2\" fill=\"{fill}\"/>"),
        1 => writeln!(
            out,
            "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"6\" height=\"6\" fill=\"{fill}\"/>",
            x - 3.0,
            y - 3.0
        ),
        2 => writeln!(out, "<path d=\"M{x:.1} {:.1}l4 7h-8z\" fill=\"{fill}\"/>", y - 4.2),
        _ => writeln!(out, "<path d=\"M{x:.1} {:.1}l4 4-4 4-4-4z\" fill=\"{fill}\"/>", y - 4.0),
    };
}

/// Names with a stroke of their colours, in as many lines as they need; gives their height.
/// `key` numbers a name that a script may switch.
fn legend(out: &mut String, left: f64, entries: &[(usize, &str, Color, Mark)]) -> f64 {
    let (mut x, mut y) = (left, 14.0);
    for (key, name, color, mark) in entries {
        let width = 34.0 + text_width(name) + 14.0;
        if x > left && x + width > WIDTH {
            (x, y) = (left, y + 18.0);
        }
        let (of, color) = (*color, color.css());
        let _ = writeln!(out, "<g class=\"key\" data-series=\"{key}\">");
        if *mark == Mark::Bars {
            let _ = writeln!(
                out,
                "<rect x=\"{x:.1}\" y=\"{:.1}\" width=\"24\" height=\"10\" fill=\"{color}\"/>",
                y - 9.0
            );
        } else {
            let dash = if *mark == Mark::Dashed { " stroke-dasharray=\"6 4\"" } else { "" };
            let _ = writeln!(
                out,
                "<line x1=\"{x:.1}\" x2=\"{:.1}\" y1=\"{:.1}\" y2=\"{:.1}\" stroke=\"{color}\" stroke-width=\"2.5\"{dash}/>",
                x + 24.0,
                y - 4.0,
                y - 4.0
            );
        }
        if matches!(mark, Mark::Dots | Mark::Points) {
            dot(out, of, x + 12.0, y - 4.0);
        }
        let _ = writeln!(out, "<text x=\"{:.1}\" y=\"{y:.1}\">{}</text></g>", x + 30.0, escape(name));
        x += width;
    }
    if entries.is_empty() { 8.0 } else { y + 12.0 }
}

/// A tick of an axis as it is written.
fn written(axis: &Axis, ticks: &[f64], t: f64) -> String {
    let step = ticks.windows(2).map(|w| w[1] - w[0]).fold(f64::INFINITY, f64::min);
    if axis.log || !step.is_finite() {
        return tick(t, axis.format, t.abs(), t.abs());
    }
    let largest = ticks.iter().fold(0.0, |m: f64, t| m.max(t.abs()));
    tick(t, axis.format, step, largest)
}

/// A value as a reader of a plot gets it: exact where it is whole, else to five digits.
fn reading(v: f64, format: Format) -> String {
    if format == Format::Percent {
        return format!("{:.1} %", 100.0 * v);
    }
    if v.fract() == 0.0 && v.abs() < 1e15 {
        let sign = if v < 0.0 { "-" } else { "" };
        return format!("{sign}{}", crate::number::grouped(v.abs() as u128));
    }
    match v.abs() {
        a if !(1e-3..1e6).contains(&a) => format!("{v:.4e}"),
        a => format!("{v:.*}", (4 - a.log10().floor() as i32).max(0) as usize),
    }
}

/// Ticks, grid and labels.
fn axes(out: &mut String, f: &Frame, x: (&Axis, &Scale, &[f64]), y: (&Axis, &Scale, &[f64])) {
    let bottom = f.top + f.height;
    for &t in y.2 {
        let at = bottom - y.1.at(t) * f.height;
        let _ = writeln!(
            out,
            "<line class=\"grid\" x1=\"{:.1}\" x2=\"{:.1}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
             <text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            f.left,
            f.left + f.width,
            f.left - 7.0,
            at + 4.0,
            written(y.0, y.2, t)
        );
    }
    for &t in x.2 {
        let at = f.left + x.1.at(t) * f.width;
        let _ = writeln!(
            out,
            "<line class=\"axis\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{bottom:.1}\" y2=\"{:.1}\"/>\
             <text class=\"tick\" x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            bottom + 4.0,
            bottom + 17.0,
            written(x.0, x.2, t)
        );
    }
    let _ = writeln!(
        out,
        "<path class=\"axis\" d=\"M{:.1} {:.1}V{bottom:.1}H{:.1}\"/>",
        f.left,
        f.top,
        f.left + f.width
    );
    labels(out, f, &x.0.label, &y.0.label);
}

fn labels(out: &mut String, f: &Frame, x: &str, y: &str) {
    let _ = writeln!(
        out,
        "<text class=\"label\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
        f.left + f.width / 2.0,
        f.top + f.height + 37.0,
        escape(x)
    );
    let middle = f.top + f.height / 2.0;
    let _ = writeln!(
        out,
        "<text class=\"label\" transform=\"translate(14 {middle:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
        escape(y)
    );
}

impl Plot {
    /// The picture.
    pub fn svg(&self) -> String {
        let bars: Vec<usize> =
            (0..self.series.len()).filter(|&i| self.series[i].mark == Mark::Bars).collect();
        let named = self.series.iter().enumerate().filter(|(_, s)| !s.name.is_empty());
        let entries: Vec<_> = named.map(|(i, s)| (i, &*s.name, s.color, s.mark)).collect();
        let mut legends = String::new();
        let left = 62.0;
        let top = legend(&mut legends, left, &entries);
        let xs =
            self.series.iter().flat_map(|s| s.points.iter().map(|p| p.0).chain(s.band.iter().map(|b| b.0)));
        let ys = self
            .series
            .iter()
            .flat_map(|s| s.points.iter().map(|p| p.1).chain(s.band.iter().flat_map(|b| [b.1, b.2])));
        let spacing = self.bar_spacing();
        let xs: Vec<f64> = match spacing {
            Some(gap) => xs.flat_map(|x| [x - gap / 2.0, x + gap / 2.0]).collect(),
            None => xs.collect(),
        };
        let mut x_axis = self.x.clone();
        if let (Some(_), None) = (spacing, x_axis.range) {
            let low = xs.iter().copied().fold(f64::INFINITY, f64::min);
            let high = xs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            x_axis.range = Some((low, high)).filter(|_| low < high);
        }
        let (x, x_ticks) = Scale::new(&x_axis, xs.into_iter());
        let y_axis = Axis { zero: self.y.zero || !bars.is_empty(), ..self.y.clone() };
        let (y, y_ticks) = Scale::new(&y_axis, ys);
        // The last tick stands in the middle below its place, which may be the edge of the frame.
        let outside =
            |t: &f64| (x.at(*t) - 1.0) * (WIDTH - left) + text_width(&written(&self.x, &x_ticks, *t)) / 2.0;
        let right = x_ticks.iter().map(outside).fold(14.0, f64::max);
        let f = Frame { left, top: top + 4.0, width: WIDTH - left - right, height: 240.0 };
        let mut out = open(&self.title, WIDTH, f.top + f.height + 46.0);
        out += &legends;
        axes(&mut out, &f, (&self.x, &x, &x_ticks), (&self.y, &y, &y_ticks));
        let bottom = f.top + f.height;
        let place = |(px, py): (f64, f64)| {
            let usable = px.is_finite() && py.is_finite() && (!x.log || px > 0.0) && (!y.log || py > 0.0);
            usable.then(|| {
                (
                    f.left + x.at(px).clamp(-0.01, 1.01) * f.width,
                    bottom - y.at(py).clamp(-0.01, 1.01) * f.height,
                )
            })
        };
        for (i, s) in self.series.iter().enumerate().filter(|(_, s)| !s.band.is_empty()) {
            let upper = s.band.iter().filter_map(|b| place((b.0, b.2)));
            let lower = s.band.iter().rev().filter_map(|b| place((b.0, b.1)));
            let points: Vec<_> = upper.chain(lower).map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            let _ = writeln!(
                out,
                "<polygon class=\"band\" data-series=\"{i}\" fill=\"{}\" points=\"{}\"/>",
                s.color.css(),
                points.join(" ")
            );
        }
        for (i, s) in self.series.iter().enumerate() {
            let color = s.color.css();
            let readings = self.readings(s, &|p| place(p).map(|(x, _)| x));
            let _ = writeln!(out, "<g class=\"series\" data-series=\"{i}\"{readings}>");
            let title =
                if s.name.is_empty() { String::new() } else { format!("<title>{}</title>", escape(&s.name)) };
            if s.mark == Mark::Bars {
                let (n, number) = (bars.len() as f64, bars.iter().position(|b| *b == i).unwrap_or(0) as f64);
                let gap = spacing.unwrap_or(1.0) / (x.high - x.low) * f.width;
                let wide = (gap * 0.8 / n).min(40.0);
                let zero = bottom - y.at(if y.log { y.low } else { 0.0 }) * f.height;
                let _ = writeln!(out, "<g fill=\"{color}\">{title}");
                for (px, py) in s.points.iter().filter_map(|p| place(*p)) {
                    let from = px - wide * n / 2.0 + wide * number;
                    let (high, low) = (py.min(zero), py.max(zero));
                    let _ = writeln!(
                        out,
                        "<rect x=\"{from:.1}\" y=\"{high:.1}\" width=\"{wide:.1}\" height=\"{:.1}\"/>",
                        low - high
                    );
                }
                out += "</g>\n</g>\n";
                continue;
            }
            let points: Vec<_> = s.points.iter().filter_map(|p| place(*p)).collect();
            let path: Vec<_> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            let dash = if s.mark == Mark::Dashed { " stroke-dasharray=\"6 4\"" } else { "" };
            let thin = if s.mark == Mark::Thin { " thin" } else { "" };
            if s.mark != Mark::Points {
                let _ = writeln!(
                    out,
                    "<polyline class=\"line{thin}\" stroke=\"{color}\"{dash} points=\"{}\">{title}</polyline>",
                    path.join(" ")
                );
            }
            if matches!(s.mark, Mark::Dots | Mark::Points) || points.len() == 1 {
                for (x, y) in points {
                    dot(&mut out, s.color, x, y);
                }
            }
            out += "</g>\n";
        }
        out + "</svg>\n"
    }

    /// Attributes from which a script reads a series: its name, and of each point its place, its
    /// position and its value.
    fn readings(&self, s: &Series, place: &dyn Fn((f64, f64)) -> Option<f64>) -> String {
        if s.name.is_empty() {
            return String::new();
        }
        let point = |p: &(f64, f64)| {
            let (x, y) = (reading(p.0, self.x.format), reading(p.1, self.y.format));
            Some(format!("[{:.1},\"{x}\",\"{y}\"]", place(*p)?))
        };
        let points: Vec<String> = s.points.iter().filter_map(point).collect();
        format!(
            " data-name=\"{}\" data-points=\"{}\"",
            escape(&s.name),
            escape(&format!("[{}]", points.join(",")))
        )
    }

    /// The least distance of bars.
    fn bar_spacing(&self) -> Option<f64> {
        let bars = self.series.iter().filter(|s| s.mark == Mark::Bars);
        let mut xs: Vec<f64> = bars.flat_map(|s| s.points.iter().map(|p| p.0)).collect();
        xs.sort_by(f64::total_cmp);
        let gap = xs.windows(2).map(|w| w[1] - w[0]).filter(|g| *g > 0.0).fold(f64::INFINITY, f64::min);
        if xs.is_empty() { None } else { Some(if gap.is_finite() { gap } else { 1.0 }) }
    }
}

/// Values over a grid; the stronger the colour, the larger.
#[derive(Clone, Debug)]
pub struct Map {
    /// Description of the figure.
    pub title: String,
    /// Name of the columns.
    pub x: String,
    /// Name of the rows; the first row is at the bottom.
    pub y: String,
    /// Quantity of the colour, from where it is full to where there is none.
    pub legend: (String, String, String),
    /// Rows of values from 0 to 1; `None` is no value.
    pub values: Vec<Vec<Option<f64>>>,
    /// Texts of the cells by row; empty where there is no room for them.
    pub cells: Vec<Vec<String>>,
    /// Height of the grid over its width.
    pub aspect: f64,
    /// Whether it takes the whole page.
    pub wide: bool,
}

impl Map {
    /// The picture.
    pub fn svg(&self) -> String {
        let rows = self.values.len();
        let columns = self.values.iter().map(Vec::len).max().unwrap_or(0);
        let left = 62.0;
        let page = if self.wide { WIDE } else { WIDTH };
        let width = page - left - 14.0;
        let f = Frame { left, top: 34.0, width, height: width * self.aspect };
        let mut out = open(&self.title, page, f.top + f.height + 46.0);
        let (what, none, full) = &self.legend;
        let _ = writeln!(out, "<text x=\"{left}\" y=\"14\">{}</text>", escape(what));
        let mut x = left + text_width(what) + 14.0;
        let _ = writeln!(out, "<text class=\"tick\" x=\"{x:.1}\" y=\"14\">{}</text>", escape(none));
        x += text_width(none) + 6.0;
        for i in 0..12 {
            let _ = writeln!(
                out,
                "<rect class=\"heat\" x=\"{:.1}\" y=\"4\" width=\"9\" height=\"12\" fill-opacity=\"{:.2}\"/>",
                x + 9.0 * f64::from(i),
                f64::from(i) / 11.0
            );
        }
        let _ = writeln!(out, "<rect class=\"frame\" x=\"{x:.1}\" y=\"4\" width=\"108\" height=\"12\"/>");
        let _ = writeln!(out, "<text class=\"tick\" x=\"{:.1}\" y=\"14\">{}</text>", x + 114.0, escape(full));
        let (cell, tall) = (f.width / columns.max(1) as f64, f.height / rows.max(1) as f64);
        // One path for each strength keeps large maps small.
        let mut levels: Vec<String> = vec![String::new(); 41];
        for (r, row) in self.values.iter().enumerate() {
            let y = f.top + f.height - (r + 1) as f64 * tall;
            for (c, value) in row.iter().enumerate() {
                let Some(v) = value.filter(|v| v.is_finite()) else { continue };
                let level = (v.clamp(0.0, 1.0) * 40.0).round() as usize;
                let x = f.left + c as f64 * cell;
                let _ = write!(levels[level], "M{x:.2} {y:.2}h{cell:.2}v{tall:.2}h-{cell:.2}z");
            }
        }
        for (level, path) in levels.iter().enumerate().skip(1).filter(|(_, p)| !p.is_empty()) {
            let _ = writeln!(
                out,
                "<path class=\"heat\" fill-opacity=\"{:.3}\" d=\"{path}\"/>",
                level as f64 / 40.0
            );
        }
        let _ = writeln!(
            out,
            "<rect class=\"frame\" x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\"/>",
            f.left, f.top, f.width, f.height
        );
        for (r, row) in self.cells.iter().enumerate() {
            let y = f.top + f.height - (r as f64 + 0.5) * tall + 4.0;
            for (c, text) in row.iter().enumerate() {
                let x = f.left + (c as f64 + 0.5) * cell;
                let text = escape(text);
                let _ = writeln!(
                    out,
                    "<text class=\"cell\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\">{text}</text>"
                );
            }
        }
        numbers(&mut out, &f, columns, rows);
        labels(&mut out, &f, &self.x, &self.y);
        out + "</svg>\n"
    }
}

/// Numbers of columns and rows, from 0, in the middle of their cells.
fn numbers(out: &mut String, f: &Frame, columns: usize, rows: usize) {
    let every = |n: usize, most: usize| {
        (1..)
            .find(|step| n.div_ceil(*step) <= most)
            .map_or(1, |s| if s <= 2 { s } else { nice(s as f64).ceil() as usize })
    };
    for c in (0..columns).step_by(every(columns, 16)) {
        let x = f.left + (c as f64 + 0.5) * f.width / columns as f64;
        let y = f.top + f.height + 17.0;
        let _ =
            writeln!(out, "<text class=\"tick\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\">{c}</text>");
    }
    for r in (0..rows).step_by(every(rows, 16)) {
        let y = f.top + f.height - (r as f64 + 0.5) * f.height / rows as f64 + 4.0;
        let _ = writeln!(
            out,
            "<text class=\"tick\" x=\"{:.1}\" y=\"{y:.1}\" text-anchor=\"end\">{r}</text>",
            f.left - 7.0
        );
    }
}

/// Columns cut into shares.
#[derive(Clone, Debug)]
pub struct Stack {
    /// Description of the figure.
    pub title: String,
    /// Name of the columns.
    pub x: String,
    /// Quantity of the height.
    pub y: String,
    /// Name of the parts; they are numbered from 0.
    pub part: String,
    /// For each column the shares of its parts, from the bottom up; they add up to 1 or to nothing.
    /// It takes the whole page.
    pub columns: Vec<Vec<f64>>,
}

impl Stack {
    /// The picture.
    pub fn svg(&self) -> String {
        let parts = self.columns.iter().map(Vec::len).max().unwrap_or(0);
        let at = |part: usize| part as f64 / (parts.max(2) - 1) as f64;
        let f = Frame { left: 62.0, top: 34.0, width: WIDE - 76.0, height: 260.0 };
        let mut out = open(&self.title, WIDE, f.top + f.height + 46.0);
        let _ = writeln!(out, "<text x=\"{}\" y=\"14\">{}</text>", f.left, escape(&self.part));
        let mut x = f.left + text_width(&self.part) + 14.0;
        let _ = writeln!(out, "<text class=\"tick\" x=\"{x:.1}\" y=\"14\">0</text>");
        x += 12.0;
        for i in 0..parts {
            let wide = 160.0 / parts as f64;
            let _ = writeln!(
                out,
                "<rect x=\"{:.2}\" y=\"4\" width=\"{wide:.2}\" height=\"12\" fill=\"{}\"/>",
                x + i as f64 * wide,
                ramp(at(i))
            );
        }
        let _ = writeln!(
            out,
            "<text class=\"tick\" x=\"{:.1}\" y=\"14\">{}</text>",
            x + 166.0,
            parts.saturating_sub(1)
        );
        let wide = f.width / self.columns.len().max(1) as f64;
        for part in 0..parts {
            let mut path = String::new();
            for (c, column) in self.columns.iter().enumerate() {
                let (below, share) =
                    (column.iter().take(part).sum::<f64>(), column.get(part).copied().unwrap_or(0.0));
                if share > 0.0 {
                    let (x, y) = (f.left + c as f64 * wide, f.top + f.height * (1.0 - below - share));
                    let _ = write!(path, "M{x:.2} {y:.2}h{wide:.2}v{:.2}h-{wide:.2}z", f.height * share);
                }
            }
            let _ = writeln!(
                out,
                "<path fill=\"{}\" d=\"{path}\"><title>{} {part}</title></path>",
                ramp(at(part)),
                escape(&self.part)
            );
        }
        let y = Axis {
            label: self.y.clone(),
            format: Format::Percent,
            range: Some((0.0, 1.0)),
            ..Axis::default()
        };
        let x = Axis {
            label: self.x.clone(),
            whole: true,
            range: Some((0.0, self.columns.len().max(1) as f64)),
            ..Axis::default()
        };
        let (ys, y_ticks) = Scale::new(&y, std::iter::empty());
        let (xs, _) = Scale::new(&x, std::iter::empty());
        axes(&mut out, &f, (&x, &xs, &[]), (&y, &ys, &y_ticks));
        // Columns are numbered in their middle, as those of maps are.
        numbers(&mut out, &f, self.columns.len(), 0);
        out + "</svg>\n"
    }
}

/// Shares of one on axes in a ring, a polygon each.
#[derive(Clone, Debug)]
pub struct Radar {
    /// Description for those who cannot see the figure.
    pub title: String,
    /// Names of the axes, from the top and to the right; three at least.
    pub axes: Vec<String>,
    /// Name, share on each axis where there is one, and colour.
    pub series: Vec<(String, Vec<Option<f64>>, Color)>,
}

impl Radar {
    /// The figure; a polygon has no corner where its share is absent.
    pub fn svg(&self) -> String {
        let mut body = String::new();
        let entries: Vec<(usize, &str, Color, Mark)> =
            self.series.iter().enumerate().map(|(i, s)| (i, s.0.as_str(), s.2, Mark::Dots)).collect();
        let top = legend(&mut body, 8.0, &entries) + 34.0;
        let radius = 150.0;
        let (x, y) = (WIDTH / 2.0, top + radius);
        let place = |axis: usize, share: f64| {
            let turn = std::f64::consts::TAU * axis as f64 / self.axes.len().max(1) as f64;
            (x + radius * share * turn.sin(), y - radius * share * turn.cos())
        };
        let ring = |share: f64| {
            let corner = |axis| place(axis, share);
            let corners = (0..self.axes.len()).map(corner).map(|(x, y)| format!("{x:.1},{y:.1}"));
            corners.collect::<Vec<_>>().join(" ")
        };
        for share in [0.25, 0.5, 0.75, 1.0] {
            let _ = writeln!(body, "<polygon class=\"grid\" fill=\"none\" points=\"{}\"/>", ring(share));
        }
        for (axis, name) in self.axes.iter().enumerate() {
            let ((to_x, to_y), (at_x, at_y)) = (place(axis, 1.0), place(axis, 1.1));
            let _ = writeln!(
                body,
                "<line class=\"grid\" x1=\"{x:.1}\" y1=\"{y:.1}\" x2=\"{to_x:.1}\" y2=\"{to_y:.1}\"/>"
            );
            let anchor = match at_x - x {
                d if d > 1.0 => "start",
                d if d < -1.0 => "end",
                _ => "middle",
            };
            let _ = writeln!(
                body,
                "<text class=\"label\" x=\"{at_x:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\">{}</text>",
                at_y + 4.0,
                escape(name)
            );
        }
        for (i, (_, shares, color)) in self.series.iter().enumerate() {
            let found = shares.iter().enumerate().filter_map(|(axis, share)| Some((axis, (*share)?)));
            let found: Vec<(f64, f64)> = found
                .filter(|(_, share)| share.is_finite())
                .map(|(axis, share)| place(axis, share.clamp(0.0, 1.0)))
                .collect();
            let points: Vec<String> = found.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            let css = color.css();
            let _ = writeln!(
                body,
                "<g data-series=\"{i}\"><polygon class=\"line\" points=\"{}\" stroke=\"{css}\" style=\"fill:{css};fill-opacity:.1\"/>",
                points.join(" ")
            );
            found.iter().for_each(|(x, y)| dot(&mut body, *color, *x, *y));
            body += "</g>\n";
        }
        format!("{}{body}</svg>\n", open(&self.title, WIDTH, y + radius + 40.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(low: f64, high: f64, format: Format) -> Vec<String> {
        let axis = Axis { format, ..Axis::default() };
        let (_, ticks) = Scale::new(&axis, [low, high].into_iter());
        let step = ticks[1] - ticks[0];
        let largest = ticks.iter().fold(0.0, |m: f64, t| m.max(t.abs()));
        ticks.into_iter().map(|t| tick(t, format, step, largest)).collect()
    }

    #[test]
    fn ticks_are_round_and_cover_the_data() {
        assert_eq!(labels(0.0, 1.0, Format::Percent), ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"]);
        assert_eq!(labels(1.31, 5.4, Format::Number), ["1", "2", "3", "4", "5", "6"]);
        assert_eq!(labels(0.0, 2_048_000.0, Format::Number), ["0", "0.5M", "1M", "1.5M", "2M", "2.5M"]);
        assert_eq!(labels(-0.2, 0.2, Format::Number), ["-0.2", "-0.1", "0", "0.1", "0.2"]);
        assert_eq!(labels(3.0, 3.0, Format::Number), ["2.6", "2.8", "3", "3.2", "3.4"]);
        assert_eq!(log_ticks(1.0, 100.0), [1.0, 3.0, 10.0, 30.0, 100.0]);
    }

    /// The last tick, and the reading of a point.
    #[test]
    fn what_stands_at_the_edge_is_not_cut() {
        let series = |points: Vec<(f64, f64)>| Series {
            name: "a \"b\"".into(),
            points,
            band: vec![],
            color: Color::Series(0),
            mark: Mark::Line,
        };
        let x = Axis { format: Format::Percent, range: Some((0.0, 1.0)), ..Axis::default() };
        let plot = Plot {
            title: "t".into(),
            x,
            y: Axis::default(),
            series: vec![series(vec![(0.0, 0.0), (1.0, 2.5)])],
        };
        let svg = plot.svg();
        let line = svg.lines().find(|line| line.contains(">100 %<")).expect("a last tick");
        let at: f64 = line.split("<text").nth(1).and_then(|t| t.split('"').nth(3)).unwrap().parse().unwrap();
        assert!(at + text_width("100 %") / 2.0 <= WIDTH, "{line}");
        let place = svg.split("data-points=").nth(1).expect("points");
        assert!(place.contains("&quot;100.0 %&quot;,&quot;2.5000&quot;]]"), "{place}");
        assert!(svg.contains("data-name=\"a &quot;b&quot;\""), "{svg}");
        assert_eq!(
            ["1,234,567", "0", "-3", "0.50000", "1.2345e-4"],
            [
                reading(1_234_567.0, Format::Number),
                reading(0.0, Format::Number),
                reading(-3.0, Format::Number),
                reading(0.5, Format::Number),
                reading(1.2345e-4, Format::Number),
            ]
        );
    }

    #[test]
    fn numbers_that_are_none_are_left_out() {
        let points = vec![(0.0, 1.0), (1.0, f64::NAN), (f64::INFINITY, 2.0), (2.0, 3.0)];
        let series =
            Series { name: "<a>".into(), points, band: vec![], color: Color::Series(0), mark: Mark::Dots };
        let plot = Plot { title: "t".into(), x: Axis::default(), y: Axis::default(), series: vec![series] };
        let svg = plot.svg();
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        assert!(svg.contains("&lt;a&gt;"));
        // Two points, and one in the legend.
        assert_eq!(svg.matches("<circle").count(), 3);
        let empty = Plot { series: vec![], ..plot };
        assert!(empty.svg().ends_with("</svg>\n"));
    }

    #[test]
    fn maps_and_stacks_of_nothing_are_pictures_too() {
        let map = Map {
            title: String::new(),
            x: String::new(),
            y: String::new(),
            legend: Default::default(),
            values: vec![],
            cells: vec![],
            aspect: 1.0,
            wide: false,
        };
        assert!(!map.svg().contains("NaN"));
        let stack = Stack {
            title: String::new(),
            x: String::new(),
            y: String::new(),
            part: String::new(),
            columns: vec![],
        };
        assert!(!stack.svg().contains("NaN"));
    }

    #[test]
    fn a_ring_has_a_corner_for_each_share() {
        let series = vec![
            ("a<b".into(), vec![Some(1.0), Some(0.5), None], Color::Series(0)),
            ("c".into(), vec![Some(f64::NAN), Some(2.0), Some(0.0)], Color::Series(1)),
        ];
        let axes = ["x", "y", "z"].map(String::from).to_vec();
        let svg = Radar { title: "t".into(), axes, series }.svg();
        assert!(svg.contains("a&lt;b") && !svg.contains("NaN") && !svg.contains("a<b"), "{svg}");
        let polygons: Vec<&str> = svg.lines().filter(|l| l.contains("class=\"line\"")).collect();
        let corners = |line: &str| {
            line.split("points=\"").nth(1).unwrap().split('"').next().unwrap().split(' ').count()
        };
        assert_eq!(polygons.iter().map(|l| corners(l)).collect::<Vec<_>>(), [2, 2]);
    }
}

//! The wiring of a model as SVG: components as boxes next to the stream, loops as loops, skips as
//! detours.
//!
//! *In*: a checked model. *Out*: SVG in the style of [`plot`](super::plot): the stream is a line
//! from the embedding down to the head. *Promise*: deterministic text; legible at the width of a
//! phone where at most two components stand side by side; a repeated body is drawn once, with its
//! count, and a loop once or pass by pass. Lines bear what a token has there.

use super::formulas;
use super::page::Figure;
use super::plot::{escape, open, text_width};
use dreamc_dsl::Diagnostic;
use dreamc_dsl::spec::{
    Component, Exit, Expr, Item, LaneKind, Looping, Mixes, Mixing, Model, NormGain, PassKeys, Skip,
    SkipLevel, Statement, Steps, Stream, normalised,
};
use std::fmt::Write;

/// Width and height of a component's box.
const BOX: (f64, f64) = (116.0, 38.0);
/// From the stream to a box, and from box to box.
const GAP: f64 = 20.0;
/// Room above and below a box, for its lines and what is written next to them.
const ROOM: f64 = 52.0;
/// Passes of a loop that are drawn one after the other; of more the first and the last.
const PASSES: u64 = 6;
const FIRST_PASSES: u64 = 3;
/// Height of a mark on the stream.
const MARK: f64 = 26.0;
/// From a frame to what it holds.
const PAD: f64 = 12.0;
/// Height of a frame's label.
const LABEL: f64 = 20.0;
/// From lane to lane, and as many as are drawn.
const LANE: f64 = 5.0;
const DRAWN_LANES: u64 = 6;
/// Least width of a drawing.
const LEAST: f64 = 340.0;

/// A part of the wiring, from the top to the bottom.
#[derive(Clone, Debug, PartialEq)]
enum Piece {
    /// A name, a line about it, the number of its colour, and what its lines bear.
    Component(String, String, usize, String),
    /// Something that happens to the stream itself: what is written on it, and next to it.
    Mark(String, String),
    /// Dimensions of the stream from here on.
    Line(String),
    /// One after the other.
    Chain(Vec<Piece>),
    /// Side by side, from the same place to the same sum.
    Beside(Vec<Piece>),
    /// A part in a frame of a kind, with a label.
    Framed(Frame, String, Box<Piece>),
}

/// How a part is framed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Frame {
    /// Applied again and again: a line leads back up.
    Loop,
    /// Copies of it follow one another.
    Copies,
    /// Some tokens go around it.
    Skip,
}

impl Frame {
    fn class(self) -> &'static str {
        match self {
            Frame::Loop => "again",
            Frame::Copies => "copies",
            Frame::Skip => "skips",
        }
    }
}

/// A drawing as it grows: lines at the back, boxes over them.
struct Pen {
    wires: String,
    boxes: String,
    stream: Stream,
}

impl Pen {
    /// From the stream to what is written next to its lines.
    fn beside(&self) -> f64 {
        match self.stream {
            Stream::Sum | Stream::Attend { .. } => 6.0,
            Stream::Lanes { count, .. } => 6.0 + LANE * (count.min(DRAWN_LANES) - 1) as f64 / 2.0,
        }
    }
}

/// How a loop is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loops {
    /// Once, with a line that leads back.
    Folded,
    /// Pass by pass.
    Unrolled,
}

/// The wiring of a model as a figure of a report.
pub fn figure(name: &str, model: &Model) -> Figure {
    Figure {
        name: format!("wiring-{name}"),
        svg: svg(model, Loops::Folded),
        caption: format!("The wiring of `{name}`."),
        full: false,
    }
}

/// The wiring of a model.
pub fn svg(model: &Model, loops: Loops) -> String {
    let mut wiring = Wiring { model, loops, depth: 0 };
    let mut chain = vec![Piece::Mark("embedding".into(), carried(model.stream))];
    chain.push(Piece::Line(match model.stream {
        Stream::Sum | Stream::Attend { .. } => format!("n × {}", model.hidden),
        Stream::Lanes { count, .. } => format!("n × {count} × {}", model.hidden),
    }));
    chain.extend(wiring.items(&model.body, false, None));
    if model.stream != Stream::Sum || !normalised(&model.body, false) {
        chain.push(Piece::Mark("norm".into(), String::new()));
    }
    let tied = if model.tie { "the embedding's matrix" } else { "" };
    chain.push(Piece::Mark("head".into(), tied.into()));
    chain.push(Piece::Line(format!("n × {}", model.vocab)));
    picture(&format!("the wiring of {}", model.name), chain, model.stream)
}

/// A component from inside: the formulas of its definition, or its steps; nothing where the model
/// has no such component.
pub fn inside(name: &str, model: &Model) -> Result<Option<String>, Vec<Diagnostic>> {
    match model.components.get(name) {
        None => Ok(None),
        Some(Component::Defined(defined)) => Ok(Some(formulas::svg(name, &defined.graph(model)?))),
        Some(component) => Ok(stepwise(name, component, model)),
    }
}

/// The steps of a component, and what a token has after each.
fn stepwise(name: &str, component: &Component, model: &Model) -> Option<String> {
    let steps = steps(component, model.hidden)?;
    let piece = |(step, dims): (String, String)| [Piece::Mark(step, String::new()), Piece::Line(dims)];
    let mut chain = vec![Piece::Line(format!("n × {}", model.hidden))];
    chain.extend(steps.into_iter().flat_map(piece));
    Some(picture(&format!("the inside of {name}"), chain, Stream::Sum))
}

/// Steps of a component with its norms, each with the dimensions of what it leaves.
fn steps(component: &Component, hidden: u64) -> Option<Vec<(String, String)>> {
    let norm = |is: bool| is.then(|| ("norm".to_string(), format!("n × {hidden}")));
    let (before, after) = component.norms();
    let inside = component.steps(component.kind().mixes(), hidden)?;
    Some(norm(before).into_iter().chain(inside).chain(norm(after)).collect())
}

/// Pieces one after the other as SVG.
fn picture(title: &str, chain: Vec<Piece>, stream: Stream) -> String {
    let piece = Piece::Chain(chain);
    let (left, right, height) = piece.size();
    let (left, width) = (left + 4.0, (left + right + 8.0).max(LEAST));
    let mut out = open(title, width, height + 8.0);
    let mut pen = Pen { wires: String::new(), boxes: String::new(), stream };
    piece.draw(left, 4.0, &mut pen);
    let (top, bottom) = (4.0 + MARK / 2.0, 4.0 + height - 4.0);
    let (class, lines) = match stream {
        Stream::Sum => ("wire", 1),
        Stream::Attend { .. } => ("wire sources", 1),
        Stream::Lanes { count, .. } => ("wire", count.min(DRAWN_LANES)),
    };
    for lane in 0..lines {
        let x = left + LANE * (lane as f64 - (lines - 1) as f64 / 2.0);
        let _ = writeln!(out, "<path class=\"{class}\" d=\"M{x:.1} {top:.1}V{bottom:.1}\"/>");
    }
    out + &pen.wires + &pen.boxes + "</svg>\n"
}

/// A line about a stream that is no sum.
fn carried(stream: Stream) -> String {
    match stream {
        Stream::Sum => String::new(),
        Stream::Attend { block: 1 } => "◇ softmax over all outputs".into(),
        Stream::Attend { block } => format!("◇ softmax over sums of {block}"),
        Stream::Lanes { count, kind, embed } => {
            let kind = match kind {
                LaneKind::Static => "static",
                LaneKind::Dynamic => "dynamic",
                LaneKind::Mhc => "mhc",
            };
            let embed = if embed { ", a vector each" } else { "" };
            format!("{count} lanes, {kind}{embed}")
        }
    }
}

/// Items become pieces.
struct Wiring<'a> {
    model: &'a Model,
    loops: Loops,
    /// Applications of layers so far.
    depth: u64,
}

impl Wiring<'_> {
    /// Pieces of items; in a pass of that number, where a loop around them is drawn pass by pass.
    fn items(&mut self, list: &[Item], normalises: bool, pass: Option<u64>) -> Vec<Piece> {
        list.iter().map(|item| self.item(item, normalises, pass)).collect()
    }

    fn item(&mut self, item: &Item, normalises: bool, pass: Option<u64>) -> Piece {
        match item {
            Item::Layer(expr) => {
                self.depth += 1;
                let layer = expression(self.model, expr, pass);
                if !normalises {
                    return layer;
                }
                Piece::Chain(vec![layer, Piece::Mark("norm".into(), String::new())])
            }
            Item::Statement(statement) => mark(statement),
            Item::Repeat { count, items } => {
                let first = self.depth;
                let inside = Piece::Chain(self.items(items, normalises, pass));
                self.again(first, *count);
                Piece::Framed(Frame::Copies, format!("{count} × weights of their own"), inside.into())
            }
            Item::Recur { count, residual_norm, items, looping } => {
                let about = about_loop(*count, looping);
                let first = self.depth;
                match self.loops {
                    Loops::Folded => {
                        let inside = Piece::Chain(self.items(items, *residual_norm, pass));
                        self.again(first, *count);
                        Piece::Framed(Frame::Loop, about, inside.into())
                    }
                    Loops::Unrolled => self.passes(*count, items, *residual_norm, about),
                }
            }
        }
    }

    /// Counts the applications since `first` `count` times in all.
    fn again(&mut self, first: u64, count: u64) {
        self.depth = (self.depth - first).saturating_mul(count).saturating_add(first);
    }

    /// The passes of a loop one after the other.
    fn passes(&mut self, count: u64, items: &[Item], normalises: bool, about: String) -> Piece {
        let mut all = vec![Piece::Mark("loop".into(), about)];
        let (first, mut each) = (self.depth, 0);
        for pass in 0..count {
            if count > PASSES && pass == FIRST_PASSES {
                let left_out = count - 1 - FIRST_PASSES;
                all.push(Piece::Mark("…".into(), format!("{left_out} passes like these")));
            }
            if count > PASSES && pass >= FIRST_PASSES && pass + 1 < count {
                continue;
            }
            let from = first.saturating_add(each * pass);
            self.depth = from;
            let inside = Piece::Chain(self.items(items, normalises, Some(pass)));
            each = self.depth - from;
            let depths = match each {
                1 => format!("depth {from}"),
                _ => format!("depths {from} to {}", self.depth.saturating_sub(1)),
            };
            let label = format!("pass {} of {count}, {depths}", pass + 1);
            all.push(Piece::Framed(Frame::Copies, label, inside.into()));
        }
        Piece::Chain(all)
    }
}

/// A line about a loop.
fn about_loop(count: u64, looping: &Looping) -> String {
    let mut about = format!("{count} × the same weights");
    if let Some(rank) = looping.lora {
        let _ = write!(about, " + rank {rank} a pass");
    }
    if looping.embed {
        about += ", a vector a pass";
    }
    match looping.kv {
        PassKeys::Own => {}
        PassKeys::First => about += ", keys of the first pass",
        PassKeys::Replaced => about += ", keys of the first pass for tokens that skip",
    }
    match looping.exit {
        Exit::Last => {}
        Exit::Mean => about += ", losses of all passes",
        Exit::Gate(_) => about += ", losses of all passes by a gate",
        Exit::Expected(_) => about += ", logits of all passes by a gate",
    }
    if let Some(kept) = looping.backprop.filter(|kept| *kept < count) {
        let _ = write!(about, ", gradients of the last {kept}");
    }
    about
}

/// A statement on the stream.
fn mark(statement: &Statement) -> Piece {
    let (on, beside) = match statement {
        Statement::Norm(NormGain::Own) => ("norm".into(), String::new()),
        Statement::Norm(NormGain::Plain) => ("norm".into(), "no gain".into()),
        Statement::Norm(NormGain::Named(gain)) => ("norm".into(), format!("the gain `{gain}`")),
        Statement::Linear(_) => ("linear".into(), String::new()),
        Statement::StartZeros => ("start".into(), "zeros".into()),
        Statement::StartNormal(deviation) => ("start".into(), format!("normal, {deviation}")),
        Statement::Save(name) => (format!("save {name}"), String::new()),
        Statement::History(Steps::Every(1)) => ("mix history".into(), "a factor each".into()),
        Statement::History(Steps::Every(step)) => {
            ("mix history".into(), format!("of every {step}, a factor each"))
        }
        Statement::History(Steps::Apart(step)) => {
            ("mix history".into(), format!("{step} apart, a factor each"))
        }
        Statement::Mix { name, how } => {
            let how = match how {
                Mixing::Add => "added",
                Mixing::Linear(_) => "a matrix of both",
                Mixing::Scaled => "a factor each",
                Mixing::Diagonal => "decay and step",
            };
            (format!("mix {name}"), how.into())
        }
    };
    Piece::Mark(on, beside)
}

fn expression(model: &Model, expr: &Expr, pass: Option<u64>) -> Piece {
    let all = |terms: &[Expr]| terms.iter().map(|term| expression(model, term, pass)).collect();
    match expr {
        Expr::Component(name) => {
            let (about, color) = about(&model.components[name]);
            Piece::Component(name.clone(), about, color, model.hidden.to_string())
        }
        Expr::Norm => Piece::Mark("norm".into(), String::new()),
        Expr::Sequential(terms) => Piece::Chain(all(terms)),
        Expr::Parallel(terms) => Piece::Beside(all(terms)),
        Expr::Skip(skip, inside) => {
            Piece::Framed(Frame::Skip, skipping(skip, pass), expression(model, inside, pass).into())
        }
    }
}

/// A line about a component, and the number of its kind's colour.
fn about(component: &Component) -> (String, usize) {
    let (words, colour) = match (component.kind().mixes(), component.router()) {
        (Mixes::Tokens, _) => ("over the sequence", 0),
        (Mixes::Depths, _) => ("over depth", 1),
        (Mixes::Features, Some(_)) => ("a mixture", 2),
        (Mixes::Features, None) => ("a network", 3),
    };
    (component.about().unwrap_or_else(|| words.into()), colour)
}

fn skipping(skip: &Skip, pass: Option<u64>) -> String {
    let share = |c: f64| format!("{} %", (c * 1000.0).round() / 10.0);
    if skip.rule.chosen() {
        return "as many passes as a token chooses".into();
    }
    let capacity = skip.rule.capacity();
    let own = pass.and_then(|pass| skip.capacities.get(usize::try_from(pass).ok()?));
    if let Some(own) = own {
        return format!("{} of the tokens", share(*own));
    }
    if let [_, ..] = skip.capacities[..] {
        let each: Vec<String> = skip.capacities.iter().map(|c| share(*c)).collect();
        return format!("{} of the tokens by pass", each.join(", "));
    }
    match skip.level {
        SkipLevel::Token => format!("{} of the tokens", share(capacity)),
        SkipLevel::Sequence => format!("{} of the sequences", share(capacity)),
    }
}

impl Piece {
    /// How far it reaches to the left and to the right of its stream, and down.
    fn size(&self) -> (f64, f64, f64) {
        match self {
            Piece::Component(..) => (8.0, GAP + BOX.0, BOX.1 + ROOM),
            Piece::Line(dims) => (8.0, 8.0 + text_width(dims), 18.0),
            Piece::Mark(on, beside) => {
                let half = mark_width(on) / 2.0;
                let text = if beside.is_empty() { 0.0 } else { 8.0 + text_width(beside) };
                (half, half + text, MARK + 8.0)
            }
            Piece::Chain(parts) => parts.iter().map(Piece::size).fold((8.0, 8.0, 0.0), |sum, part| {
                (f64::max(sum.0, part.0), f64::max(sum.1, part.1), sum.2 + part.2)
            }),
            Piece::Beside(parts) => {
                let (mut right, mut height) = (0.0, BOX.1);
                for part in parts {
                    let (w, h) = part.branch();
                    right += GAP + w;
                    height = f64::max(height, h);
                }
                (8.0, right, height + ROOM)
            }
            Piece::Framed(frame, label, inside) => {
                let (left, right, height) = inside.size();
                let detour = if *frame == Frame::Skip { 18.0 } else { 0.0 };
                let back = if *frame == Frame::Loop { 22.0 } else { 0.0 };
                let left = left + PAD + detour;
                let right = (right + PAD + back).max(text_width(label) + 2.0 * PAD - left);
                (left, right, height + LABEL + PAD + 14.0)
            }
        }
    }

    /// Width and height as a branch next to others: a component alone is its box, all else has a
    /// stream of its own.
    fn branch(&self) -> (f64, f64) {
        match self {
            Piece::Component(..) => BOX,
            Piece::Mark(..) | Piece::Line(_) | Piece::Chain(_) | Piece::Beside(_) | Piece::Framed(..) => {
                let (left, right, height) = self.size();
                (left + right, height)
            }
        }
    }

    /// Draws it with its stream at `x`, from `y` down.
    fn draw(&self, x: f64, y: f64, pen: &mut Pen) {
        let height = self.size().2;
        match self {
            Piece::Component(..) => side_by_side(std::slice::from_ref(self), x, y, height, pen),
            Piece::Beside(parts) => side_by_side(parts, x, y, height, pen),
            Piece::Mark(on, beside) => {
                let width = mark_width(on);
                let middle = y + MARK / 2.0 + 4.0;
                let _ = writeln!(
                    pen.boxes,
                    "<rect class=\"mark\" x=\"{:.1}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"20\" rx=\"10\"/>\
                     <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                    x - width / 2.0,
                    middle - 10.0,
                    middle + 4.0,
                    escape(on)
                );
                if !beside.is_empty() {
                    let _ = writeln!(
                        pen.boxes,
                        "<text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                        x + width / 2.0 + 8.0,
                        middle + 4.0,
                        escape(beside)
                    );
                }
            }
            Piece::Line(dims) => {
                let beside = pen.beside();
                let _ = writeln!(
                    pen.boxes,
                    "<text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                    x + beside,
                    y + 13.0,
                    escape(dims)
                );
            }
            Piece::Chain(parts) => {
                let mut y = y;
                for part in parts {
                    part.draw(x, y, pen);
                    y += part.size().2;
                }
            }
            Piece::Framed(frame, label, inside) => framed(*frame, label, inside, self, (x, y), pen),
        }
    }
}

fn mark_width(text: &str) -> f64 {
    text_width(text) + 18.0
}

/// Terms that read the stream at one place and are added to it at another.
fn side_by_side(parts: &[Piece], x: f64, y: f64, height: f64, pen: &mut Pen) {
    let (from, to) = (y + 6.0, y + height - 12.0);
    let mut left = x;
    for part in parts {
        left += GAP;
        let (width, tall) = part.branch();
        let top = from + 10.0 + (height - 34.0 - tall) / 2.0;
        let (stem, last) = match part {
            Piece::Component(name, about, color, dims) => {
                component((name, about, *color), left, top, pen);
                let stem = left + width / 2.0;
                for y in [top - 7.0, top + tall + 12.0] {
                    let _ = writeln!(
                        pen.boxes,
                        "<text class=\"tick\" x=\"{:.1}\" y=\"{y:.1}\">{}</text>",
                        stem + 6.0,
                        escape(dims)
                    );
                }
                (stem, top + tall)
            }
            Piece::Mark(..) | Piece::Line(_) | Piece::Chain(_) | Piece::Beside(_) | Piece::Framed(..) => {
                let stem = left + part.size().0;
                part.draw(stem, top, pen);
                (stem, top)
            }
        };
        let _ = writeln!(
            pen.wires,
            "<path class=\"wire\" d=\"M{x:.1} {from:.1}H{stem:.1}V{top:.1}M{stem:.1} {last:.1}V{to:.1}H{:.1}\"/>\
             <path class=\"arrow\" d=\"M{stem:.1} {top:.1}l-4 -7h8z\"/>",
            x + 7.0
        );
        left += width;
    }
    ends(x, from, to, pen);
}

/// Where components read the stream, and where their outputs go.
fn ends(x: f64, from: f64, to: f64, pen: &mut Pen) {
    let _ = match pen.stream {
        Stream::Sum => writeln!(
            pen.boxes,
            "<circle class=\"dot\" cx=\"{x:.1}\" cy=\"{from:.1}\" r=\"2.5\"/><circle class=\"sum\" cx=\"{x:.1}\" cy=\"{to:.1}\" r=\"7\"/>\
             <path class=\"wire\" d=\"M{:.1} {to:.1}h8m-4 -4v8\"/>",
            x - 4.0
        ),
        Stream::Attend { .. } => writeln!(
            pen.boxes,
            "<path class=\"sum\" d=\"M{x:.1} {:.1}l6 6-6 6-6-6z\"/><circle class=\"dot\" cx=\"{x:.1}\" cy=\"{to:.1}\" r=\"4\"/>",
            from - 6.0
        ),
        Stream::Lanes { count, .. } => {
            let half = LANE * (count.min(DRAWN_LANES) - 1) as f64 / 2.0 + 6.0;
            let bar = |y: f64, h: f64| {
                format!(
                    "<rect class=\"sum\" x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{h:.1}\" rx=\"3\"/>",
                    x - half,
                    y - h / 2.0,
                    2.0 * half
                )
            };
            writeln!(pen.boxes, "{}{}", bar(from, 6.0), bar(to, 12.0))
        }
    };
}

fn component((name, about, color): (&str, &str, usize), x: f64, y: f64, pen: &mut Pen) {
    let middle = x + BOX.0 / 2.0;
    let _ = writeln!(
        pen.boxes,
        "<rect class=\"part\" stroke=\"var(--c{color})\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{:.1}\" rx=\"5\"/>\
         <text class=\"name\" x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\
         <text class=\"tick\" x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
        BOX.0,
        BOX.1,
        y + 16.0,
        escape(name),
        y + 31.0,
        escape(about)
    );
}

fn framed(frame: Frame, label: &str, inside: &Piece, whole: &Piece, (x, y): (f64, f64), pen: &mut Pen) {
    let (left, right, height) = whole.size();
    let (top, bottom) = (y + 5.0, y + height - 5.0);
    let class = frame.class();
    let _ = writeln!(
        pen.wires,
        "<rect class=\"frame {class}\" x=\"{:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{:.1}\" rx=\"8\"/>\
         <text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
        x - left,
        left + right,
        bottom - top,
        x + right - 8.0,
        top + 15.0,
        escape(label)
    );
    let first = top + LABEL;
    let end = bottom - 8.0;
    match frame {
        Frame::Copies => {}
        Frame::Loop => {
            let _ = writeln!(
                pen.wires,
                "<path class=\"wire {class}\" d=\"M{x:.1} {end:.1}H{:.1}V{first:.1}H{:.1}\"/>\
                 <path class=\"arrow {class}\" d=\"M{x:.1} {first:.1}l7 -4v8z\"/>",
                x + right - 10.0,
                x + 7.0
            );
        }
        Frame::Skip => {
            let around = x - left + 10.0;
            let _ = writeln!(
                pen.wires,
                "<path class=\"wire {class}\" d=\"M{x:.1} {first:.1}H{around:.1}V{end:.1}H{:.1}\"/>\
                 <path class=\"arrow {class}\" d=\"M{x:.1} {end:.1}l-7 -4v8z\"/>",
                x - 7.0
            );
        }
    }
    let stream = pen.stream;
    if frame == Frame::Skip {
        // Terms inside are on a sum, whatever carries its update on.
        pen.stream = Stream::Sum;
    }
    inside.draw(x, first, pen);
    pen.stream = stream;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(body: &str) -> Model {
        wired(body, "sum")
    }

    fn wired(body: &str, stream: &str) -> Model {
        let text = format!(
            "model:\n  vocab: 8\n  hidden: 8\n  context: 8\n  stream: {stream}\n  components:\n    sa: {{sequence: {{heads: 2, head_size: 4}}}}\n    \
             mlp: {{mlp: {{intermediate: 8}}}}\n  body: {body}\n"
        );
        let parsed = dreamc_dsl::parse("model.yaml", &text, dreamc_dsl::Spelling::Yaml).unwrap();
        dreamc_dsl::check(&parsed, &[]).unwrap().0.model
    }

    #[test]
    fn a_body_is_drawn_once_with_its_count() {
        let svg = svg(&model("[{repeat: 24, layers: [\"sa > mlp\"]}]"), Loops::Folded);
        assert_eq!(svg.matches("class=\"part\"").count(), 2);
        assert!(svg.contains("24 × weights of their own"), "{svg}");
    }

    #[test]
    fn only_a_loop_leads_back_and_only_a_skip_leads_around() {
        let again = svg(&model("[{recur: 3, layers: [\"sa | mlp\"]}]"), Loops::Folded);
        assert!(again.contains("arrow again") && !again.contains("skips"), "{again}");
        let skips = svg(&model("[\"skip(capacity 0.125, causal bce 0.01) { sa > mlp }\"]"), Loops::Folded);
        assert!(skips.contains("arrow skips") && skips.contains("12.5 % of the tokens"), "{skips}");
        assert!(!skips.contains("again"), "{skips}");
    }

    #[test]
    fn a_stream_is_drawn_as_what_it_carries() {
        let body = "[\"sa > mlp\", \"skip(capacity 0.5, causal bce 0.1) { mlp }\"]";
        let drawn = |stream: &str| svg(&wired(body, stream), Loops::Folded);
        let long = |svg: &str| svg.lines().filter(|line| line.starts_with("<path class=\"wire")).count();
        let (sum, lanes) = (drawn("sum"), drawn("{lanes: 3}"));
        assert_eq!(long(&lanes), long(&sum) + 2, "{lanes}");
        assert!(lanes.contains("3 lanes, static"), "{lanes}");
        let attended = drawn("{attend: {block: 8}}");
        assert!(attended.contains("wire sources") && attended.contains("sums of 8"), "{attended}");
        // Three outputs, one of a part that is a sum inside.
        assert_eq!(attended.matches("<circle class=\"sum\"").count(), 1, "{attended}");
    }

    #[test]
    fn passes_are_drawn_one_after_the_other_with_their_depths() {
        let body =
            |count: u64| format!("[\"sa\", {{recur: {count}, layers: [\"sa | mlp\", \"mlp\"]}}, \"mlp\"]");
        let three = svg(&model(&body(3)), Loops::Unrolled);
        assert_eq!(three.matches("class=\"part\"").count(), 1 + 3 * 3 + 1, "{three}");
        for pass in ["pass 1 of 3, depths 1 to 2", "pass 2 of 3, depths 3 to 4", "pass 3 of 3, depths 5 to 6"]
        {
            assert!(three.contains(pass), "{pass}: {three}");
        }
        assert!(!three.contains("arrow again"), "{three}");
        let many = svg(&model(&body(1000)), Loops::Unrolled);
        assert_eq!(many.matches("class=\"part\"").count(), 1 + 4 * 3 + 1, "{many}");
        assert!(many.contains("996 passes like these"), "{many}");
        assert!(many.contains("pass 1000 of 1000, depths 1999 to 2000"), "{many}");
    }

    #[test]
    fn lines_bear_their_dimensions() {
        let model = model("[\"sa > mlp\"]");
        let svg = svg(&model, Loops::Folded);
        // The stream's, a component's two lines each, and the head's.
        assert_eq!(svg.matches(">n × 8<").count(), 2, "{svg}");
        assert_eq!(svg.matches(">8<").count(), 4, "{svg}");
        let inside = inside("sa", &model).unwrap().unwrap();
        assert!(inside.contains(">n × 2 × 4<") && inside.contains("attention over tokens"), "{inside}");
    }

    #[test]
    fn nothing_reaches_beyond_the_picture() {
        for body in [
            "[\"sa | mlp\"]",
            "[{recur: 2, layers: [{repeat: 3, layers: [\"sa > mlp\", \"skip(capacity 0.5, causal bce 0.1) { sa > mlp }\"]}]}]",
            "[\"(sa > mlp)\"]",
        ] {
            let svg = svg(&model(body), Loops::Folded);
            let size: Vec<f64> =
                svg.split('"').nth(5).unwrap().split(' ').map(|n| n.parse().unwrap()).collect();
            for rect in svg.split("<rect ").skip(1) {
                let number = |key: &str| -> f64 {
                    rect.split(&format!(" {key}=\""))
                        .nth(1)
                        .unwrap()
                        .split('"')
                        .next()
                        .unwrap()
                        .parse()
                        .unwrap()
                };
                let (x, y) = (number("x"), number("y"));
                assert!(x >= 0.0 && y >= 0.0, "{body}: {rect}");
                assert!(x + number("width") <= size[2] && y + number("height") <= size[3], "{body}: {rect}");
            }
        }
    }
}

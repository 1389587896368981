//! The graph of a definition as SVG: a box for each value, lines with their dimensions.
//!
//! *In*: a typed graph. *Out*: SVG in the style of [`draw`](super::draw). *Promise*: deterministic
//! text; a value stands below all that it is made of; a recurrence, a score or a mask is a graph of
//! its own below, in a frame.

use super::plot::{escape, open, text_width};
use dreamc_dsl::define::graph::{DimId, Function, Graph, Norm, Reduce, Region, Turn, ValueId};
use std::fmt::Write;

/// Height of a box, and from row to row.
const HEIGHT: f64 = 38.0;
const ROW: f64 = 74.0;
/// From box to box.
const GAP: f64 = 26.0;
/// Height of a title.
const TITLE: f64 = 30.0;
/// Least width of a drawing.
const LEAST: f64 = 340.0;

/// The graph of a definition.
pub fn svg(name: &str, graph: &Graph) -> String {
    let mut parts = vec![(String::new(), &graph.region)];
    for node in &graph.region.nodes {
        if let Function::Recurrence(recurrence) = &node.function {
            let states: Vec<String> =
                recurrence.states.iter().map(|s| format!("{} {}", s.name, dims(graph, &s.dims))).collect();
            parts.push((format!("recurrence {}: one token", states.join(", ")), &recurrence.body));
        }
        if let Function::Attend(attend) = &node.function {
            parts.extend(attend.score.iter().map(|region| ("score of a pair of tokens".to_string(), region)));
            parts.extend(attend.mask.iter().map(|region| ("mask of a pair of tokens".to_string(), region)));
        }
    }
    let drawn: Vec<(String, Drawn)> =
        parts.into_iter().map(|(title, region)| (title, Drawn::of(graph, region))).collect();
    let width = drawn.iter().map(|(_, part)| part.width).fold(LEAST, f64::max) + 2.0 * GAP;
    let height: f64 = drawn.iter().map(|(title, part)| part.height + titled(title)).sum::<f64>() + 12.0;
    let mut out = open(&format!("the formulas of {name}"), width, height);
    let mut y = 8.0;
    for (title, part) in &drawn {
        if !title.is_empty() {
            let _ = writeln!(
                out,
                "<rect class=\"frame\" x=\"6\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" rx=\"8\"/>\
                 <text class=\"tick\" x=\"16\" y=\"{:.1}\">{}</text>",
                y + 2.0,
                width - 12.0,
                part.height + TITLE - 8.0,
                y + 18.0,
                escape(title)
            );
            y += TITLE;
        }
        part.put((width - part.width) / 2.0, y, &mut out);
        y += part.height;
    }
    out + "</svg>\n"
}

fn titled(title: &str) -> f64 {
    if title.is_empty() { 0.0 } else { TITLE }
}

fn dims(graph: &Graph, dims: &[DimId]) -> String {
    let names: Vec<&str> = dims.iter().map(|dim| graph.name(*dim)).collect();
    format!("[{}]", names.join(", "))
}

/// A region with its places.
struct Drawn {
    boxes: Vec<Placed>,
    wires: Vec<(usize, usize, String)>,
    width: f64,
    height: f64,
}

struct Placed {
    x: f64,
    y: f64,
    width: f64,
    name: String,
    about: String,
    given: bool,
}

impl Drawn {
    fn of(graph: &Graph, region: &Region) -> Drawn {
        // Numbers stand in what reads them, as results of a recurrence do.
        let shown = |id: usize| !matches!(region.nodes[id].function, Function::Number(_));
        let mut rows: Vec<Vec<usize>> = Vec::new();
        let mut row_of = vec![0; region.nodes.len()];
        for (id, node) in region.nodes.iter().enumerate().filter(|(id, _)| shown(*id)) {
            let above =
                node.args.iter().filter(|arg| shown(arg.0 as usize)).map(|arg| row_of[arg.0 as usize] + 1);
            row_of[id] = above.max().unwrap_or(0);
            if rows.len() <= row_of[id] {
                rows.resize(row_of[id] + 1, Vec::new());
            }
            rows[row_of[id]].push(id);
        }
        let mut places = vec![usize::MAX; region.nodes.len()];
        let mut centre = vec![0.0; region.nodes.len()];
        let mut boxes = Vec::new();
        let mut width: f64 = 0.0;
        for (row, ids) in rows.iter_mut().enumerate() {
            // Under what they are made of, so that lines cross little.
            let wish = |id: usize| {
                let args: Vec<f64> = region.nodes[id]
                    .args
                    .iter()
                    .filter(|arg| shown(arg.0 as usize))
                    .map(|arg| centre[arg.0 as usize])
                    .collect();
                if args.is_empty() { f64::MAX } else { args.iter().sum::<f64>() / args.len() as f64 }
            };
            ids.sort_by(|a, b| wish(*a).total_cmp(&wish(*b)).then(a.cmp(b)));
            let mut x = 0.0;
            for &id in ids.iter() {
                let node = &region.nodes[id];
                let about = about(graph, region, ValueId(id as u32));
                let name = node.name.clone().unwrap_or_default();
                let own = text_width(&name).max(text_width(&about)).max(44.0) + 16.0;
                places[id] = boxes.len();
                centre[id] = x + own / 2.0;
                let given = node.args.is_empty();
                boxes.push(Placed { x, y: row as f64 * ROW, width: own, name, about, given });
                x += own + GAP;
            }
            width = width.max(x - GAP);
        }
        let mut wires = Vec::new();
        for (id, node) in region.nodes.iter().enumerate().filter(|(id, _)| shown(*id)) {
            for arg in node.args.iter().map(|arg| arg.0 as usize).filter(|arg| shown(*arg)) {
                wires.push((places[arg], places[id], dims(graph, &region.nodes[arg].ty.dims)));
            }
        }
        Drawn { boxes, wires, width, height: rows.len() as f64 * ROW }
    }

    fn put(&self, left: f64, top: f64, out: &mut String) {
        for (from, to, label) in &self.wires {
            let (a, b) = (&self.boxes[*from], &self.boxes[*to]);
            let (x1, y1) = (left + a.x + a.width / 2.0, top + a.y + HEIGHT);
            let (x2, y2) = (left + b.x + b.width / 2.0, top + b.y);
            let bend = (y2 - y1) / 2.0;
            let _ = writeln!(
                out,
                "<path class=\"wire\" fill=\"none\" d=\"M{x1:.1} {y1:.1}C{x1:.1} {:.1} {x2:.1} {:.1} {x2:.1} {y2:.1}\"/>\
                 <path class=\"arrow\" d=\"M{x2:.1} {y2:.1}l-4 -7h8z\"/>\
                 <text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                y1 + bend,
                y2 - bend,
                x1 + 0.3 * (x2 - x1),
                y1 + 0.3 * (y2 - y1) + 4.0,
                escape(label)
            );
        }
        for part in &self.boxes {
            let (x, y) = (left + part.x, top + part.y);
            let middle = x + part.width / 2.0;
            let color = if part.given { 2 } else { 1 };
            let _ = writeln!(
                out,
                "<rect class=\"part\" stroke=\"var(--c{color})\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{HEIGHT:.1}\" rx=\"5\"/>",
                part.width
            );
            let lines = match part.name.is_empty() {
                true => vec![("name", &part.about, 23.0)],
                false => vec![("name", &part.name, 16.0), ("tick", &part.about, 31.0)],
            };
            for (class, text, down) in lines {
                let _ = writeln!(
                    out,
                    "<text class=\"{class}\" x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                    y + down,
                    escape(text)
                );
            }
        }
    }
}

/// The function of a value, with the numbers that it reads.
fn about(graph: &Graph, region: &Region, id: ValueId) -> String {
    let node = region.node(id);
    let list = |ids: &[DimId]| ids.iter().map(|dim| graph.name(*dim)).collect::<Vec<_>>().join(" ");
    let number = |place: usize| match node.args.get(place).map(|arg| &region.node(*arg).function) {
        Some(Function::Number(number)) => Some(format!("{number}")),
        _ => None,
    };
    let text = match &node.function {
        Function::Input => "x".into(),
        Function::Number(number) => number.to_string(),
        Function::Fact(fact) => format!("{fact:?}").to_lowercase(),
        Function::Noise(deviation) => format!("noise {deviation}"),
        Function::Weight(weight) => {
            graph.weights.get(weight.0 as usize).map_or("weight".into(), |w| w.path.clone())
        }
        Function::Embedding => "embedding".into(),
        Function::Unary(f) => format!("{f:?}").to_lowercase(),
        Function::Binary(f) => format!("{f:?}").to_lowercase(),
        Function::Where => "where".into(),
        Function::Outer => "outer".into(),
        Function::Reduce(how, over) => {
            let word = match how {
                Reduce::Sum => "sum",
                Reduce::Mean => "mean",
                Reduce::Maximum => "maximum",
            };
            format!("{word} over {}", list(over))
        }
        Function::Softmax(over) => format!("softmax over {}", list(&[*over])),
        Function::Norm { how, over, .. } => {
            let word = match how {
                Norm::Rms => "rms",
                Norm::L2 => "l2",
                Norm::Layer => "layer_norm",
            };
            format!("{word} over {}", list(over))
        }
        Function::Dot(over) => format!("dot over {}", list(over)),
        Function::Linear(over) => format!("linear over {}", list(over)),
        Function::Split(dim, parts) => format!("split {}: {}", list(&[*dim]), list(parts)),
        Function::Merge(parts, dim) => format!("merge {}: {}", list(parts), list(&[*dim])),
        Function::Join(dim, _) => format!("join along {}", list(&[*dim])),
        Function::Slice { of, from, to } => format!("slice {} from {from}: {}", list(&[*of]), list(&[*to])),
        Function::Top { over, .. } => format!("top over {}", list(&[*over])),
        Function::Pick => "pick".into(),
        Function::Rope { at, .. } => match at {
            Turn::Position => "rope at position".into(),
            Turn::Depth => "rope at depth".into(),
        },
        Function::Stop => "stop".into(),
        Function::Shift(n) => format!("shift {n}"),
        Function::Conv(width) => format!("conv {}", graph.size(*width)),
        Function::Running(None) => "running".into(),
        Function::Running(Some(block)) => format!("running in blocks of {block}"),
        Function::Average { all: false } => "average".into(),
        Function::Average { all: true } => "average of the batch".into(),
        Function::Choose(c) => format!("choose {} blocks of {}", graph.size(c.choices), c.block),
        Function::Scores => "scores of the choice".into(),
        Function::Mass => "mass of the attention".into(),
        Function::Attend(a) => match (a.every, a.among) {
            (Some(every), _) => format!("attend every {every}"),
            (None, Some(_)) => "attend among".into(),
            (None, None) => "attend".into(),
        },
        Function::Recurrence(_) => "recurrence".into(),
        Function::Emitted(_) => "of the recurrence".into(),
        Function::DepthAttend { .. } => "depth_attend".into(),
        Function::Earlier(name) => format!("earlier {name}"),
        Function::ValueOf(component, value) => format!("{component}.{value}"),
        Function::Apply(applied) => applied.component.kind().section().name.to_string(),
        Function::Read(_) => "read".into(),
        Function::State(_) => "state".into(),
        Function::Score => "s".into(),
        Function::QueryPlace => "i".into(),
        Function::KeyPlace => "j".into(),
        Function::Head(dim) => format!("places of {}", list(&[*dim])),
        Function::AtQuery(_) => "at the query".into(),
        Function::AtKey(_) => "at the key".into(),
        Function::Look(_) => "look up".into(),
    };
    let numbers: Vec<String> = (0..node.args.len()).filter_map(number).collect();
    if numbers.is_empty() { text } else { format!("{text} {}", numbers.join(" ")) }
}

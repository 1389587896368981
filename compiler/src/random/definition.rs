//! A random definition, well typed by construction.
//!
//! *In*: a seed. *Out*: the text of a specification in `.dream` with one definition and components
//! that it makes, or a random specification in one of whose components' place the definition
//! stands. *Promise*: it is accepted, every value is read, and its numbers stay small: no function
//! of it has a pole or a step where gradients are compared with differences.

use super::{Drawn, Rng, drawn, read};
use dreamc_dsl::{Spec, Spelling, check, parse};

/// The dimensions that values are drawn over, with their sizes.
const SIZES: [(&str, u64); 3] = [("heads", 2), ("size", 4), ("value", 6)];

/// A value that was written.
#[derive(Clone)]
struct Value {
    name: String,
    dims: Vec<&'static str>,
    read: bool,
}

/// A choice of keys, and the attention among them.
struct Choice {
    name: String,
    attention: String,
    /// The dimension of the blocks of a list.
    blocks: String,
    /// Dimensions of a number for each block of each list.
    over: String,
    /// Whether it is one of tokens whose scores a loss may read.
    scored: bool,
}

struct Writer {
    r: Rng,
    lines: Vec<String>,
    values: Vec<Value>,
    choices: Vec<Choice>,
    /// The size of the dimension that is called `choices`.
    of_choices: Option<u64>,
}

/// The specification of that seed: every second one is a random specification with the definition
/// in a component's place, so that it stands in loops, skips, lanes and recipes of every kind.
pub fn spec(seed: u64) -> Spec {
    let within = if seed.is_multiple_of(2) { None } else { within(seed) };
    within.unwrap_or_else(|| {
        let text = specification(seed);
        let ast = parse("random.dream", &text, Spelling::Dream).ok();
        let checked = ast.and_then(|ast| check(&ast, &[]).ok());
        // The tests of this module read these.
        checked.map_or_else(|| drawn(seed).spec, |(spec, _)| spec)
    })
}

/// A random specification with a random definition in the place of a component, of the first that
/// the checker lets go.
pub fn within(seed: u64) -> Option<Spec> {
    let Drawn { text, spec, .. } = drawn(seed);
    let mut w = Writer::new(seed);
    w.definition(seed);
    let code: String =
        w.lines.iter().flat_map(|line| line.lines()).map(|line| format!("    {line}\n")).collect();
    let settings: Vec<String> = SIZES.iter().map(|(name, size)| format!("{name}: {size}")).collect();
    let defined =
        format!("define:\n  drawn:\n    settings: {{{}}}\n    code: |\n{code}", settings.join(", "));
    spec.model.components.keys().find_map(|name| {
        let start = format!("    {name}: {{");
        let line = |line: &str| match line.starts_with(&start) {
            true => format!("    {name}: {{drawn: {{}}}}\n"),
            false => format!("{line}\n"),
        };
        let text: String = text.lines().map(line).collect();
        let found = read(&format!("{text}{defined}"))?;
        let kept = found.model.components.get(name)?;
        matches!(kept, dreamc_dsl::spec::Component::Defined(_)).then_some(found)
    })
}

/// A random specification with a definition.
pub fn specification(seed: u64) -> String {
    let mut w = Writer::new(seed);
    let text = w.definition(seed);
    let second = if w.r.once_in(2) {
        "  b = drawn { value 4 }\n  body { a > b  repeat 2 { a } }\n"
    } else {
        "  repeat 2 { a }\n"
    };
    format!(
        "{text}model random-{seed} {{\n  vocab 64\n  hidden 8\n  context 16\n  a = drawn {{}}\n{second}}}\n"
    )
}

impl Writer {
    fn new(seed: u64) -> Writer {
        Writer {
            r: Rng::new(seed ^ 0x6465_6669_6e65),
            lines: vec![],
            values: vec![],
            choices: vec![],
            of_choices: None,
        }
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.r.below(of.len() as u64) as usize]
    }

    fn definition(&mut self, seed: u64) -> String {
        let first = self.dims();
        self.push(format!("linear(x, [{}])", first.join(", ")), first);
        for _ in 0..2 + self.r.below(7) {
            self.statement();
        }
        self.losses(seed);
        self.followed(seed);
        let unread: Vec<Value> = self.values.iter().filter(|value| !value.read).cloned().collect();
        let terms: Vec<String> = unread
            .iter()
            .map(|value| match value.dims.is_empty() {
                true => format!("tanh({}) * weight([hidden], normal 0.1)", value.name),
                false => format!("linear(tanh({}), [hidden])", value.name),
            })
            .collect();
        self.lines.push(format!("  return {}", terms.join(" + ")));
        let settings: Vec<String> = SIZES.iter().map(|(name, size)| format!("{name} {size}")).collect();
        format!("define drawn({}) {{\n{}\n}}\n\n", settings.join(", "), self.lines.join("\n"))
    }

    /// Some dimensions in their order.
    fn dims(&mut self) -> Vec<&'static str> {
        loop {
            let mut dims = vec![];
            for (name, _) in SIZES {
                if self.r.once_in(2) {
                    dims.push(name);
                }
            }
            if !dims.is_empty() {
                return dims;
            }
        }
    }

    /// Losses of one definition in three, of draws of their own: what else a seed says stays.
    fn losses(&mut self, seed: u64) {
        let mut r = Rng::new(seed ^ 0x6c6f_7373_6573);
        if !r.once_in(3) {
            return;
        }
        for _ in 0..=r.below(2) {
            let Some(value) = self.values.get(r.below(self.values.len() as u64) as usize) else { continue };
            let bounded = match r.below(3) {
                0 => format!("average(tanh({}))", value.name),
                1 => format!("average(tanh({}), batch)", value.name),
                _ => format!("sigmoid({0}) - average(sigmoid({0}))", value.name),
            };
            let over = value.dims.join(" ");
            let line = match value.dims.is_empty() {
                true => format!("  loss 0.3 * square({bounded} - 0.2)"),
                false => format!("  loss 0.1 * sum(square({bounded} - 0.2), over {over})"),
            };
            self.lines.push(line);
        }
    }

    /// Losses by which choices follow attention, of half of the choices, of draws of their own.
    fn followed(&mut self, seed: u64) {
        let mut r = Rng::new(seed ^ 0x666f_6c6c_6f77);
        let first = &self.values[0];
        let by = format!("sigmoid(sum({}, over {}))", first.name, first.dims.join(" "));
        for (n, Choice { name, attention, blocks, over, scored }) in self.choices.iter().enumerate() {
            if r.once_in(2) {
                continue;
            }
            if !scored {
                self.lines.push(format!("  loss 0.1 * {by} * sum(square(mass({attention})), over {over})"));
                continue;
            }
            let most = format!("stop(maximum(scores({name}), over {blocks}))");
            self.lines.push(format!("  s{n}_of = scores({name}) - {most}"));
            let away = format!("log(sum(exp(s{n}_of), over {blocks})) - s{n}_of");
            self.lines.push(format!("  loss 0.1 * sum(mass({attention}) * ({away}), over {over})"));
        }
    }

    fn push(&mut self, text: String, dims: Vec<&'static str>) {
        let name = format!("v{}", self.values.len());
        self.lines.push(format!("  {name} = {text}"));
        self.values.push(Value { name, dims, read: false });
    }

    /// A value so far, which is read by that.
    fn value(&mut self) -> Value {
        let place = self.r.below(self.values.len() as u64) as usize;
        self.values[place].read = true;
        self.values[place].clone()
    }

    /// A value with a dimension, which is read by that; the first one has some.
    fn tensor(&mut self) -> Value {
        let shaped: Vec<usize> =
            (0..self.values.len()).filter(|&place| !self.values[place].dims.is_empty()).collect();
        let place = self.pick(&shaped);
        self.values[place].read = true;
        self.values[place].clone()
    }

    fn matrix(&mut self, dims: &[&'static str]) -> String {
        format!("linear(x, [{}])", dims.join(", "))
    }

    fn statement(&mut self) {
        match self.r.below(17) {
            0 => self.element(),
            1 => self.pair(),
            2 => self.reduce(),
            3 => self.norm(),
            4 => self.product(),
            5 => self.tokens(),
            6 => self.attend(),
            7 => self.recurrence(),
            8 => self.reshape(),
            9 => {
                let (c, dims) = (self.tensor(), self.dims());
                let own = self.matrix(&dims);
                let over = c.dims.join(" ");
                self.push(format!("where(stop(sum({}, over {over})) > 0, {own}, 0.5)", c.name), dims);
            }
            10 => {
                let value = self.tensor();
                let last = value.dims[value.dims.len() - 1];
                self.push(format!("rope({}, 100, over {last})", value.name), value.dims);
            }
            11 => {
                let value = self.tensor();
                let weight = self.pick(&[
                    "normal 0.5",
                    "one",
                    "uniform -1 1",
                    "0.3",
                    "ramp 1 -0.5",
                    "log_uniform 1 2",
                ]);
                self.push(
                    format!("{} * weight([{}], {weight})", value.name, value.dims.join(", ")),
                    value.dims,
                );
            }
            12 => {
                let value = self.tensor();
                let dims = self.dims();
                let words = self.pick(&["", ", bias", ", normal 0.2", ", bias, normal 0.2"]);
                self.push(format!("linear({}, [{}]{words})", value.name, dims.join(", ")), dims);
            }
            13 => {
                let dims = self.dims();
                self.push(format!("embedding([{}], normal 0.5)", dims.join(", ")), dims);
            }
            // The dimension of a choice of keys has the name that one of places has.
            14 if !self.lines.iter().any(|line| line.contains("choose(")) => self.choice(),
            15 => self.choose(),
            _ => {
                let (dims, inner) = (self.dims(), self.pick(&["mlp", "sequence"]));
                let keys = if inner == "mlp" { "intermediate 8" } else { "heads 2  head_size 4" };
                self.push(format!("linear({inner}(x) {{ {keys} }}, [{}])", dims.join(", ")), dims);
            }
        }
    }

    /// Elements that another value of theirs chooses.
    fn choice(&mut self) {
        let (v, s, n) = (self.matrix(&["heads", "value"]), self.matrix(&["heads"]), self.values.len());
        self.blocks(2);
        self.lines.push(format!("  s{n} = {s}\n  p{n} = top(s{n}, 2, over heads)"));
        let text = format!("sum(pick({v}, p{n}) * sigmoid(pick(s{n}, p{n})), over choices)");
        self.push(text, vec!["value"]);
    }

    /// The dimension of choices of that number: the first size has the plain name.
    fn blocks(&mut self, count: u64) -> String {
        match *self.of_choices.get_or_insert(count) == count {
            true => "choices".into(),
            false => format!("choices{count}"),
        }
    }

    fn element(&mut self) {
        let value = self.value();
        let f = self.pick(&["tanh", "sigmoid", "silu", "gelu", "softplus", "sin", "cos", "log_sigmoid", "-"]);
        self.push(format!("{f}({})", value.name), value.dims);
    }

    /// A sum or product of two values; the second has dimensions of the first.
    fn pair(&mut self) {
        let a = self.value();
        let other = self.value();
        let fits = other.dims.iter().all(|dim| a.dims.contains(dim));
        let b = if fits { other.name } else { format!("sum({}, over {})", other.name, other.dims.join(" ")) };
        let text = match self.r.below(4) {
            0 => format!("{} + {b}", a.name),
            1 => format!("tanh({}) * {b}", a.name),
            2 => format!("{} - 0.5 * {b}", a.name),
            _ => format!("tanh({}) / (1 + square({b}))", a.name),
        };
        self.push(text, a.dims);
    }

    fn reduce(&mut self) {
        let value = self.tensor();
        let over = self.pick(&value.dims);
        let dims: Vec<_> = value.dims.iter().filter(|dim| **dim != over).copied().collect();
        match self.r.below(3) {
            0 => self.push(format!("softmax({}, over {over})", value.name), value.dims),
            1 => self.push(format!("mean({}, over {over})", value.name), dims),
            _ => self.push(format!("sum({}, over {over})", value.name), dims),
        }
    }

    fn norm(&mut self) {
        let value = self.tensor();
        let (over, how) = (self.pick(&value.dims), self.pick(&["rms", "l2", "layer_norm"]));
        let gain = if self.r.once_in(2) { ", gain" } else { "" };
        self.push(format!("{how}({}, over {over}{gain}, eps = 0.1)", value.name), value.dims);
    }

    /// A product over a dimension of two values, or one with the dimensions of both.
    fn product(&mut self) {
        let (a, b) = (self.tensor(), self.tensor());
        let mut dims = a.dims.clone();
        dims.extend(b.dims.iter().filter(|dim| !a.dims.contains(dim)));
        let shared: Vec<_> = a.dims.iter().filter(|dim| b.dims.contains(dim)).copied().collect();
        match shared.first() {
            Some(over) if self.r.once_in(2) => {
                let dims = dims.into_iter().filter(|dim| dim != over).collect();
                self.push(format!("dot(tanh({}), {}, over {over})", a.name, b.name), dims);
            }
            _ => self.push(format!("outer(tanh({}), {})", a.name, b.name), dims),
        }
    }

    fn tokens(&mut self) {
        let value = self.value();
        let text = match self.r.below(5) {
            4 => format!("running(0.1 * tanh({}), block = 3)", value.name),
            0 => format!("shift({})", value.name),
            1 => format!("shift({}, 3)", value.name),
            2 if !value.dims.is_empty() => format!("conv({}, 3)", value.name),
            2 => format!("tanh({})", value.name),
            _ => format!("running(0.1 * tanh({}))", value.name),
        };
        self.push(text, value.dims);
    }

    fn attend(&mut self) {
        let gate = if self.r.once_in(2) {
            format!("running(log_sigmoid({}))", self.matrix(&["heads"]))
        } else {
            String::new()
        };
        let (q, k, v) = (
            self.matrix(&["heads", "size"]),
            self.matrix(&["heads", "size"]),
            self.matrix(&["heads", "value"]),
        );
        let mut words = self.pick(&["", ", window = 3", ", scale = 0.5", ", sink"]).to_string();
        if gate.is_empty() {
            words += self.pick(&[
                "",
                ", score = s - 0.1 * (i - j)",
                ", score = 2 * tanh(s / 2)",
                ", mask = i - j < 4 or j == 0",
                ", score = s * exp(-head), mask = mod(i - j, 2) == 0",
            ]);
        } else {
            let name = format!("v{}", self.values.len());
            self.push(gate, vec!["heads"]);
            if let Some(value) = self.values.last_mut() {
                value.read = true;
            }
            words += &format!(", score = s + {name}[i] - {name}[j]");
        }
        words += self.pick(&["", "", ", dropout = 0.3"]);
        self.push(format!("attend({q}, {k}, {v}{words})"), vec!["heads", "value"]);
    }

    /// Attention among blocks or tokens that are chosen, or at the ends of blocks.
    fn choose(&mut self) {
        let n = self.values.len();
        let [q, k] = [(); 2].map(|()| self.matrix(&["heads", "size"]));
        let v = self.matrix(&["heads", "value"]);
        self.lines.push(format!("  query{n} = {q}\n  key{n} = {k}"));
        let (call, count, scored) = match self.r.below(4) {
            0 => (String::new(), 0, false),
            1 => {
                let ends = format!("running(key{n}, block = 2) / 2");
                (format!("choose(query{n}, {ends}, 2, block = 2, near = 1)"), 2, false)
            }
            2 => {
                let (index, keys) = (self.matrix(&["heads", "size"]), self.matrix(&["size"]));
                let weights = self.matrix(&["heads"]);
                let words = format!("relu, weights = {weights}, over heads");
                (format!("choose({index}, {keys}, 3, {words})"), 3, true)
            }
            _ => {
                let words = "block = 3, near = 1, first = 1, softmax";
                (format!("choose(query{n}, key{n}, 3, {words})"), 3, false)
            }
        };
        let mut words = ", every = 2".to_string();
        if count > 0 {
            let (name, blocks) = (format!("chosen{n}"), self.blocks(count));
            self.lines.push(format!("  {name} = {call}"));
            words = format!(", among = {name}");
            let over = if scored { blocks.clone() } else { format!("heads {blocks}") };
            self.choices.push(Choice { name, attention: format!("v{n}"), blocks, over, scored });
        }
        let more = self.pick(&["", ", window = 4", ", sink", ", scale = 0.5", ", dropout = 0.3"]);
        self.push(format!("attend(query{n}, key{n}, {v}{words}{more})"), vec!["heads", "value"]);
    }

    fn recurrence(&mut self) {
        let place = self.lines.len();
        let (k, v) = (self.matrix(&["heads", "size"]), self.matrix(&["heads", "value"]));
        let decay = self.pick(&["0.5", "sigmoid(linear(x, [heads]))", "sigmoid(linear(x, [heads, size]))"]);
        let update = self.pick(&[
            "a{n} * S{n} + outer(u{n}, k{n})",
            "a{n} * S{n} + outer(u{n} - sum(S{n} * k{n}, over size), k{n})",
            "tanh(a{n} * S{n} + outer(u{n}, k{n}))",
        ]);
        let n = place.to_string();
        self.lines.push(format!("  a{n} = {decay}\n  k{n} = l2({k}, over size)\n  u{n} = {v}"));
        let update = update.replace("{n}", &n);
        let name = format!("v{}", self.values.len());
        self.lines.push(format!(
            "  recurrence S{n} [heads, value, size] {{\n    S{n} = {update}\n    {name} = sum(S{n} * k{n}, over size)\n  }}"
        ));
        self.values.push(Value { name, dims: vec!["heads", "value"], read: false });
    }

    /// Shapes that come back to the dimensions that all have.
    fn reshape(&mut self) {
        let own = self.matrix(&["heads", "value"]);
        let n = self.values.len();
        let text = match self.r.below(3) {
            0 => format!(
                "merge(split({own}, over value, [left: 2, right: value / 2]), over left right, [value])"
            ),
            1 => format!(
                "join(slice({own}, over value, value / 2, [low{n}: value / 2]), slice({own}, over value, 0, [high{n}: value / 2]), along value)"
            ),
            _ => format!(
                "split(merge({own}, over heads value, [all: heads * value]), over all, [heads, value])"
            ),
        };
        self.push(text, vec!["heads", "value"]);
    }
}

#[cfg(test)]
mod tests {
    use dreamc_dsl::spec::Component;
    use dreamc_dsl::{Spelling, check, format, parse};

    /// Most random specifications take a definition in a component's place.
    #[test]
    fn definitions_stand_in_random_specifications() {
        let found = (0..100).filter(|seed| super::within(*seed).is_some()).count();
        assert!(found > 70, "{found} of 100");
    }

    /// Choices have losses that read their scores, and how much attention reads of them.
    #[test]
    fn choices_follow_attention() {
        let texts: Vec<String> = (0..400).map(super::specification).collect();
        let found = |word: &str| texts.iter().filter(|text| text.contains(word)).count();
        let (scores, masses) = (found("= scores("), found("mass("));
        assert!(scores >= 10 && masses > scores, "{scores} of scores, {masses} of masses");
    }

    #[test]
    fn every_random_definition_is_well_typed_in_both_spellings() {
        for seed in 0..400 {
            let text = super::specification(seed);
            let ast = parse("random.dream", &text, Spelling::Dream)
                .unwrap_or_else(|found| panic!("{found}\n{text}"));
            let (spec, warnings) =
                check(&ast, &[]).unwrap_or_else(|found| panic!("seed {seed}: {found}\n{text}"));
            assert!(warnings.is_empty(), "seed {seed}: {warnings:?}\n{text}");
            let yaml = format(&ast, Spelling::Yaml).unwrap();
            let back = parse("random.yaml", &yaml, Spelling::Yaml).unwrap();
            assert_eq!(check(&back, &[]).unwrap().0, spec, "seed {seed}");
            for component in spec.model.components.values() {
                let Component::Defined(defined) = component else { continue };
                let graph = defined.graph(&spec.model).unwrap();
                assert_eq!(graph.region.results.len(), 1, "seed {seed}");
            }
        }
    }
}

//! The text form of formulas: functions by their words, steps that are used twice by a name.
//!
//! `t0 = exp(s); div(t0, add(1, t0))`. Operands are `x0[i, head]`, `x1[j]`, `x2[head]`, `x3`, and
//! tables `x4[head, INDEX]` or `x4[INDEX]`: `i` and `j` alone are no index, but stand for the query
//! and the key.

use super::{Binary, Builder, Formula, Place, Program, Read, Step, Unary};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Parentheses that may be open at once.
const DEEPEST: usize = 200;

impl Program {
    /// The program of a score and a mask in text form.
    pub fn parse(score: Option<&str>, mask: Option<&str>) -> Result<Program, String> {
        let mut reads = BTreeMap::new();
        let mut formula = |text: Option<&str>| -> Result<Option<Formula>, String> {
            let Some(text) = text else { return Ok(None) };
            let mut reader = Reader {
                text,
                at: 0,
                depth: 0,
                builder: Builder::default(),
                names: BTreeMap::new(),
                reads: std::mem::take(&mut reads),
            };
            let value = reader.whole()?;
            reads = reader.reads;
            Ok(Some(reader.builder.formula(value)))
        };
        let (score, mask) = (formula(score)?, formula(mask)?);
        for (expected, &found) in reads.keys().enumerate() {
            if expected != found {
                return Err(format!("x{found} is read and x{expected} is not"));
            }
        }
        Ok(Program { reads: reads.into_values().collect(), score, mask })
    }

    /// A formula of it in text form.
    pub fn show(&self, formula: &Formula) -> String {
        let steps = formula.steps();
        let mut uses = vec![0; steps.len()];
        for x in steps.iter().flat_map(|step| step.operands()) {
            uses[x] += 1;
        }
        let mut shown: Vec<String> = vec![];
        let (mut out, mut names) = (String::new(), 0);
        for (at, step) in steps.iter().enumerate() {
            let text = self.show_step(*step, &shown);
            let leaf = step.operands().next().is_none();
            if uses[at] > 1 && !leaf {
                // Writing to a string does not fail.
                let _ = write!(out, "t{names} = {text}; ");
                shown.push(format!("t{names}"));
                names += 1;
            } else {
                shown.push(text);
            }
        }
        out + shown.last().map_or("0", String::as_str)
    }

    fn show_step(&self, step: Step, shown: &[String]) -> String {
        let head = |read: usize| if self.reads.get(read).is_some_and(|r| r.heads) { "head" } else { "" };
        match step {
            Step::Number(x) => format!("{:?}", x.0).trim_end_matches(".0").to_string(),
            Step::Score => "s".into(),
            Step::Query => "i".into(),
            Step::Key => "j".into(),
            Step::Head => "head".into(),
            Step::Read(read) => {
                let place = match self.reads.get(read).map(|r| r.place) {
                    Some(Place::Query) => "i",
                    Some(Place::Key) => "j",
                    Some(Place::All | Place::Table) | None => "",
                };
                let inside: Vec<&str> = [place, head(read)].into_iter().filter(|t| !t.is_empty()).collect();
                match inside.is_empty() {
                    true => format!("x{read}"),
                    false => format!("x{read}[{}]", inside.join(", ")),
                }
            }
            Step::Lookup(read, x) => {
                // An index that is a position alone would read as the place of the operand.
                let index = if matches!(shown[x].as_str(), "i" | "j" | "head") {
                    format!("({})", shown[x])
                } else {
                    shown[x].clone()
                };
                match head(read) {
                    "" => format!("x{read}[{index}]"),
                    head => format!("x{read}[{head}, {index}]"),
                }
            }
            Step::Unary(f, x) => format!("{}({})", f.name(), shown[x]),
            Step::Binary(f, a, b) => format!("{}({}, {})", f.name(), shown[a], shown[b]),
            Step::Where(c, a, b) => format!("where({}, {}, {})", shown[c], shown[a], shown[b]),
        }
    }
}

struct Reader<'t> {
    text: &'t str,
    at: usize,
    depth: usize,
    builder: Builder,
    /// Steps by their names.
    names: BTreeMap<&'t str, usize>,
    reads: BTreeMap<usize, Read>,
}

impl<'t> Reader<'t> {
    /// Named steps, and the formula.
    fn whole(&mut self) -> Result<usize, String> {
        loop {
            let start = self.at;
            let word = self.word();
            if word.starts_with('t') && self.accept('=') {
                let value = self.expression()?;
                self.expect(';')?;
                self.names.insert(word, value);
                continue;
            }
            self.at = start;
            let value = self.expression()?;
            self.skip();
            return match self.text.get(self.at..) {
                Some("") | None => Ok(value),
                Some(rest) => Err(format!("the formula ends before `{rest}`")),
            };
        }
    }

    fn skip(&mut self) {
        self.at += self.text[self.at..].len() - self.text[self.at..].trim_start().len();
    }

    /// The letters, digits, points and signs that come next; perhaps none.
    fn word(&mut self) -> &'t str {
        self.skip();
        let rest = &self.text[self.at..];
        let is_number = rest.starts_with(|c: char| c.is_ascii_digit() || c == '-');
        let mut end = 0;
        for (at, c) in rest.char_indices() {
            let exponent = is_number && at > 0 && rest[..at].ends_with('e');
            let sign = matches!(c, '-' | '+') && (at == 0 || exponent);
            if !(c.is_ascii_alphanumeric() || c == '_' || (is_number && c == '.') || sign) {
                break;
            }
            end = at + c.len_utf8();
        }
        self.at += end;
        &rest[..end]
    }

    fn accept(&mut self, c: char) -> bool {
        self.skip();
        let found = self.text[self.at..].starts_with(c);
        self.at += if found { c.len_utf8() } else { 0 };
        found
    }

    fn expect(&mut self, c: char) -> Result<(), String> {
        if self.accept(c) { Ok(()) } else { Err(self.missing(&format!("`{c}`"))) }
    }

    fn missing(&self, what: &str) -> String {
        match self.text[self.at..].chars().next() {
            Some(c) => format!("{what} expected before `{c}` of `{}`", self.text),
            None => format!("{what} expected at the end of `{}`", self.text),
        }
    }

    fn expression(&mut self) -> Result<usize, String> {
        if self.depth == DEEPEST {
            return Err(format!("more than {DEEPEST} parentheses are open at once"));
        }
        self.depth += 1;
        let value = self.term();
        self.depth -= 1;
        value
    }

    fn term(&mut self) -> Result<usize, String> {
        if self.accept('(') {
            let value = self.expression()?;
            self.expect(')')?;
            return Ok(value);
        }
        let word = self.word();
        if let Some(&step) = self.names.get(word) {
            return Ok(step);
        }
        let leaf = match word {
            "" => return Err(self.missing("a number, a name or a function")),
            "s" => Some(Step::Score),
            "i" => Some(Step::Query),
            "j" => Some(Step::Key),
            "head" => Some(Step::Head),
            _ => None,
        };
        if let Some(leaf) = leaf {
            return Ok(self.builder.step(leaf));
        }
        if let Ok(number) = word.parse::<f64>() {
            return Ok(self.builder.number(number));
        }
        if let Some(read) = word.strip_prefix('x').and_then(|n| n.parse::<usize>().ok()) {
            return self.operand(read);
        }
        self.function(word)
    }

    fn function(&mut self, word: &str) -> Result<usize, String> {
        self.expect('(').map_err(|_| format!("`{word}` is no name of a formula"))?;
        let mut list = vec![self.expression()?];
        while !self.accept(')') {
            if !self.accept(',') {
                return Err(self.missing("`,` or `)`"));
            }
            list.push(self.expression()?);
        }
        let counted = |n: usize| match list.len() == n {
            true => Ok(()),
            false => Err(format!("`{word}` takes {n} operands, has {}", list.len())),
        };
        if let Some(f) = Unary::ALL.into_iter().find(|f| f.name() == word) {
            counted(1)?;
            return Ok(self.builder.unary(f, list[0]));
        }
        if let Some(f) = Binary::ALL.into_iter().find(|f| f.name() == word) {
            counted(2)?;
            return Ok(self.builder.binary(f, list[0], list[1]));
        }
        if word == "where" {
            counted(3)?;
            return Ok(self.builder.choose(list[0], list[1], list[2]));
        }
        Err(format!("`{word}` is no function of a formula"))
    }

    /// The brackets of an operand.
    fn operand(&mut self, number: usize) -> Result<usize, String> {
        let (mut place, mut heads, mut index) = (Place::All, false, None);
        if self.accept('[') {
            loop {
                let start = self.at;
                let word = self.word();
                self.skip();
                let alone = self.text[self.at..].starts_with([',', ']']);
                match word {
                    "i" if alone => place = Place::Query,
                    "j" if alone => place = Place::Key,
                    "head" if alone => heads = true,
                    _ => {
                        self.at = start;
                        (place, index) = (Place::Table, Some(self.expression()?));
                    }
                }
                if self.accept(']') {
                    break;
                }
                if !self.accept(',') {
                    return Err(self.missing("`,` or `]`"));
                }
            }
        }
        let read = Read { place, heads };
        if *self.reads.entry(number).or_insert(read) != read {
            return Err(format!("x{number} is read in two ways"));
        }
        Ok(self.builder.step(index.map_or(Step::Read(number), |index| Step::Lookup(number, index))))
    }
}

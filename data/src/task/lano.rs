//! Lano of "Physics of language models 4.1" (arXiv 2512.17351, task 5): texts of a context-free
//! grammar, the authors' `cfg3f`. A level has three symbols, each with three or four rules of two
//! or three symbols of the level below, which are as likely; the lowest level has `a`, `b` and `c`.
//! A text has `steps` levels of rules below a symbol that the prompt names, and a stop:
//! `2c=abaac.`. At each place all symbols are right that some text of the grammar goes on with
//! ([`others`]). The paper lets the model write a text at random and asks whether it obeys the
//! grammar; here a text is right where the likeliest symbol never leaves the grammar, each after
//! what was drawn.

use super::{Drawn, Problem};
use crate::rng::Stream;
use dreamc_dsl::spec::Task;
use std::collections::BTreeSet;

/// Levels of rules.
const LEVELS: usize = 6;

/// Rules of each symbol, the highest level first, as symbols of the level below.
const RULES: [&[&[&str]]; LEVELS] = [
    &[&["12", "102", "200", "11"]],
    &[&["202", "12", "22"], &["00", "01", "102"], &["21", "10", "012", "02"]],
    &[&["22", "020", "10", "11"], &["210", "12", "21"], &["120", "200", "02"]],
    &[&["12", "212", "021"], &["02", "202", "21", "022"], &["011", "110", "00", "221"]],
    &[&["122", "202", "022"], &["11", "20", "200"], &["020", "21", "112"]],
    &[&["110", "211", "201", "21"], &["200", "01", "220"], &["010", "22", "00"]],
];

/// Any numbers go together.
pub fn check(_: &Task) -> Result<(), String> {
    Ok(())
}

/// The level of the root of a text with `steps` levels of rules.
fn top(steps: u64) -> usize {
    LEVELS - (steps as usize).clamp(1, LEVELS)
}

/// The symbols of a rule.
fn symbols(rule: &str) -> impl DoubleEndedIterator<Item = usize> + '_ {
    rule.bytes().map(|symbol| usize::from(symbol - b'0'))
}

fn letter(symbol: usize) -> char {
    char::from(b'a' + symbol as u8)
}

/// Draws a text.
pub fn problem(_: &Task, steps: u64, random: &mut Stream) -> Drawn {
    let level = top(steps);
    let root = random.below(RULES[level].len() as u64) as usize;
    let mut text = String::new();
    let mut open = vec![(level, root)];
    while let Some((level, symbol)) = open.pop() {
        match RULES.get(level) {
            Some(rules) => {
                let rules = rules[symbol];
                let rule = rules[random.below(rules.len() as u64) as usize];
                open.extend(symbols(rule).rev().map(|below| (level + 1, below)));
            }
            None => text.push(letter(symbol)),
        }
    }
    text.push('.');
    // Prompts are few: the text decides its split.
    let asked = std::iter::once(0..text.len()).collect();
    Drawn { prompt: format!("{steps}{}=", letter(root)), answer: text, asked }
}

/// Of each symbol of a text, the others that the grammar goes on with after the same beginning.
pub fn others(problem: &Problem) -> Vec<Vec<char>> {
    let text = problem.answer.as_bytes();
    let root = problem.prompt.trim_end_matches('=').bytes().last().unwrap_or(b'a');
    let root = usize::from(root.saturating_sub(b'a')).min(RULES[top(problem.steps)].len() - 1);
    let parse = Parse::new(&text[..text.len().saturating_sub(1)], top(problem.steps));
    let besides = |(all, &own): (Vec<char>, &u8)| all.into_iter().filter(|c| *c != char::from(own)).collect();
    parse.allowed(root).into_iter().zip(text).map(besides).collect()
}

/// Of each symbol of a level, and each place where it may begin: the places after its end.
type Ends = Vec<Vec<Vec<usize>>>;

/// Of the symbols of a rule that begins at a place: where each may begin; and where the rule ends.
fn begins(below: &Ends, rule: &str, at: usize) -> Vec<Vec<usize>> {
    let mut all = vec![vec![at]];
    for symbol in symbols(rule) {
        let last = &all[all.len() - 1];
        let ends: BTreeSet<usize> = last.iter().flat_map(|&at| &below[symbol][at]).copied().collect();
        all.push(ends.into_iter().collect());
    }
    all
}

/// A text, read by the grammar.
struct Parse {
    /// The level of the root.
    top: usize,
    /// Of the letters, then of each level up to the root.
    ends: Vec<Ends>,
}

impl Parse {
    fn new(text: &[u8], top: usize) -> Self {
        let places = text.len() + 1;
        let letters = (0..3).map(|symbol| {
            let is = |at: usize| text.get(at).is_some_and(|&c| char::from(c) == letter(symbol));
            (0..places).map(|at| if is(at) { vec![at + 1] } else { vec![] }).collect()
        });
        let mut ends: Vec<Ends> = vec![letters.collect()];
        for level in (top..LEVELS).rev() {
            let below = &ends[ends.len() - 1];
            let of = |rules: &&[&str], at: usize| {
                let ends = rules.iter().filter_map(|rule| begins(below, rule, at).pop());
                ends.flatten().collect::<BTreeSet<usize>>().into_iter().collect()
            };
            let symbols = RULES[level].iter();
            let found = symbols.map(|rules| (0..places).map(|at| of(rules, at)).collect()).collect();
            ends.push(found);
        }
        Parse { top, ends }
    }

    /// Of each place, the letters that may begin there, and the stop, after what stands before.
    fn allowed(&self, root: usize) -> Vec<Vec<char>> {
        let places = self.ends[0][0].len();
        let mut begun = vec![vec![false; places]; 3];
        begun[root][0] = true;
        // From the root down, each level with the ends of the one below it.
        for (rules, below) in RULES[self.top..].iter().zip(self.ends.iter().rev().skip(1)) {
            let mut next = vec![vec![false; places]; 3];
            for (rules, begun) in rules.iter().zip(&begun) {
                for at in (0..places).filter(|&at| begun[at]) {
                    for rule in *rules {
                        for (symbol, begins) in symbols(rule).zip(begins(below, rule, at)) {
                            begins.into_iter().for_each(|at| next[symbol][at] = true);
                        }
                    }
                }
            }
            begun = next;
        }
        let whole = &self.ends[LEVELS - self.top][root][0];
        let at = |at: usize| {
            let letters = (0..3).filter(|&symbol| begun[symbol][at]).map(letter);
            letters.chain(whole.contains(&at).then_some('.')).collect()
        };
        (0..places).map(at).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{asked, draws};
    use super::*;
    use dreamc_dsl::spec::TaskKind;

    /// All texts below a symbol.
    fn all(level: usize, symbol: usize) -> Vec<String> {
        let Some(rules) = RULES.get(level) else { return vec![letter(symbol).into()] };
        let of = |rule: &&str| {
            symbols(rule).fold(vec![String::new()], |before, below| {
                let below = all(level + 1, below);
                before.iter().flat_map(|b| below.iter().map(move |t| b.clone() + t)).collect()
            })
        };
        rules[symbol].iter().flat_map(of).collect()
    }

    /// The right symbols are those that follow in one of all texts with the same beginning.
    #[test]
    fn others_are_those_that_some_text_goes_on_with() {
        let task = Task::new(TaskKind::Lano, 2, 3);
        for drawn in [draws(&task, 2, 40), draws(&task, 3, 3)].concat() {
            assert!(matches!(asked(&drawn), [all] if *all == (0..drawn.answer.len())));
            let bytes = drawn.prompt.as_bytes();
            let (steps, root) = (u64::from(bytes[0] - b'0'), usize::from(bytes[1] - b'a'));
            let texts: Vec<String> = all(top(steps), root).into_iter().map(|t| t + ".").collect();
            assert!(texts.contains(&drawn.answer));
            let answer = drawn.answer.clone();
            let problem = Problem { prompt: drawn.prompt, answer: drawn.answer, asked: drawn.asked, steps };
            for (i, others) in others(&problem).into_iter().enumerate() {
                let follow = texts.iter().filter(|t| t.len() > i && t[..i] == answer[..i]);
                let right: BTreeSet<char> = follow.filter_map(|t| t[i..].chars().next()).collect();
                let found = others.into_iter().chain(answer[i..].chars().next()).collect();
                assert_eq!(right, found, "{answer} at {i}");
            }
        }
    }

    /// The mean length of texts is what the rules of the authors' file give.
    #[test]
    fn lengths_are_those_of_the_authors_grammar() {
        let task = Task::new(TaskKind::Lano, 1, 6);
        let drawn = draws(&task, 6, 400);
        let mean = drawn.iter().map(|d| d.answer.len() as f64 - 1.0).sum::<f64>() / 400.0;
        assert!((mean - 249.86).abs() < 8.0, "{mean}");
        assert!(drawn.iter().all(|d| (65..=730).contains(&d.answer.len()) && d.prompt == "6a="));
    }
}

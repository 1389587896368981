//! The entries of `map`: which tensors each names, and where it says they come from.

use crate::fit::steps;
use crate::propose::{anew, sizes};
use crate::{At, Move, Side, Source, Step, TransplantError, Weight, word};
use dreamc_compiler::bind::Factor;
use dreamc_compiler::lower::attention;
use dreamc_dsl::spec::{How, Move as Entry};
use std::collections::BTreeMap;

/// The entries, and the one that counts for each tensor.
pub(crate) struct Rules<'a> {
    entries: &'a [Entry],
    /// By the name of a tensor.
    chosen: BTreeMap<String, usize>,
}

impl<'a> Rules<'a> {
    /// Finds for each tensor the entry of most words, and of these the one with fewest `*`. Two of
    /// as many are an error, and so is an entry that names nothing.
    pub(crate) fn new(new: &Side, entries: &'a [Entry]) -> Result<Self, TransplantError> {
        let mut chosen = BTreeMap::new();
        for weight in &new.tensors {
            let mut best: Option<(usize, (usize, usize))> = None;
            for (i, entry) in entries.iter().enumerate() {
                if captures(&entry.to, &weight.name).is_none() {
                    continue;
                }
                let words = entry.to.split('.').count();
                let exact = (words, words - entry.to.split('.').filter(|word| *word == "*").count());
                match best {
                    Some((first, other)) if other == exact => {
                        let message =
                            format!("`{}` and `{}` both name `{}`", entries[first].to, entry.to, weight.name);
                        let help = "the entry of most words counts, then the one with fewest `*`: make one of them more exact";
                        return Err(refused("claimed-twice", i, "to", message, help.into()));
                    }
                    Some((_, other)) if other > exact => {}
                    _ => best = Some((i, exact)),
                }
            }
            if let Some((i, _)) = best {
                chosen.insert(weight.name.clone(), i);
            }
        }
        for (i, entry) in entries.iter().enumerate() {
            if !new.tensors.iter().any(|weight| captures(&entry.to, &weight.name).is_some()) {
                let message = format!("`{}` names no tensor of the model", entry.to);
                return Err(refused("unknown-name", i, "to", message, known(new, &entry.to)));
            }
        }
        Ok(Rules { entries, chosen })
    }

    /// The number of the entry that says where a tensor comes from.
    pub(crate) fn of(&self, weight: &Weight) -> Option<usize> {
        self.chosen.get(&weight.name).copied()
    }

    /// Where an entry says that a tensor comes from.
    pub(crate) fn moved(
        &self,
        rule: usize,
        to: &Weight,
        (new, old): (&Side, &Side),
    ) -> Result<Move, TransplantError> {
        let entry = &self.entries[rule];
        match entry.how {
            Some(How::Fresh) => return Ok(anew(to, Step::Fresh)),
            Some(How::Zero) => return Ok(anew(to, Step::Zero)),
            _ => {}
        }
        let latent = matches!(entry.how, None | Some(How::Factor));
        if let Some(found) = self.latent(rule, to, (new, old)).filter(|_| latent) {
            return found;
        }
        let stars = captures(&entry.to, &to.name).unwrap_or_default();
        let words: Vec<&str> = to.name.split('.').collect();
        let rest = &words[entry.to.split('.').count().min(words.len())..];
        let patterns = if entry.from.is_empty() { std::slice::from_ref(&entry.to) } else { &entry.from };
        let low = to.part.low();
        let rest = low.map_or(rest.join("."), |(matrix, _)| matrix.path().into());
        let found: Vec<Option<Source>> = patterns
            .iter()
            .map(|pattern| {
                let name = [filled(pattern, &stars), rest.clone()].join(".");
                source(old, name.trim_end_matches('.'))
            })
            .collect();
        if let Some(missing) = found.iter().position(Option::is_none) {
            // Of a component that becomes one of another kind some tensors have no counterpart.
            return match rest.is_empty() || found.iter().any(Option::is_some) {
                true => Err(self.unknown(rule, missing, old)),
                false => Ok(anew(to, Step::Fresh)),
            };
        }
        let share = 1.0 / found.len() as f64;
        let from: Vec<Source> =
            found.into_iter().flatten().map(|source| Source { share, ..source }).collect();
        if let (Some((_, factor)), [passes, high, wide]) = (low, &to.shape[..]) {
            if from.len() as u64 != *passes {
                return Ok(anew(to, Step::Fresh));
            }
            let (first, base) = (factor == Factor::A, from.clone());
            let rank = if first { *high } else { *wide };
            let steps = vec![Step::Factor { base, rank, first }];
            return Ok(Move { to: to.name.clone(), shape: to.shape.clone(), from, steps, noise: 0.0 });
        }
        let steps = self.steps(rule, to, &from, (new, old))?;
        let (to, shape) = (to.name.clone(), to.shape.clone());
        Ok(Move { to, shape, from, steps, noise: entry.noise })
    }

    /// A matrix of latent attention that an entry says comes of attention over heads; none of any
    /// other.
    fn latent(
        &self,
        rule: usize,
        to: &Weight,
        (new, old): (&Side, &Side),
    ) -> Option<Result<Move, TransplantError>> {
        let entry = &self.entries[rule];
        let stars = captures(&entry.to, &to.name)?;
        let patterns = if entry.from.is_empty() { std::slice::from_ref(&entry.to) } else { &entry.from };
        // An entry that names a tensor of its own has no component of the donor.
        let fused = |pattern: &String| {
            old.tensor(&format!("{}.{}", filled(pattern, &stars), attention::part::QKV.path()))
        };
        let found: Vec<&Weight> = patterns.iter().map(fused).collect::<Option<_>>()?;
        let both = crate::latent::becomes((new, to), old, found.first()?.component()?)?;
        let step = match crate::latent::step(to, both, found[0]) {
            Ok(step) => step?,
            Err(error) => return Some(Err(error)),
        };
        let share = 1.0 / found.len() as f64;
        let from = found.iter().map(|w| Source { name: w.name.clone(), rows: None, share }).collect();
        let (to, shape) = (to.name.clone(), to.shape.clone());
        Some(Ok(Move { to, shape, from, steps: vec![step], noise: entry.noise }))
    }

    /// The way from sources of one shape to a tensor.
    fn steps(
        &self,
        rule: usize,
        to: &Weight,
        from: &[Source],
        (new, old): (&Side, &Side),
    ) -> Result<Vec<Step>, TransplantError> {
        let entry = &self.entries[rule];
        let shape = |source: &Source| {
            let mut shape = old.tensor(&source.name).map(|found| found.shape.clone()).unwrap_or_default();
            if let (Some(rows), [.., high, _]) = (&source.rows, &mut shape[..]) {
                *high = rows.end - rows.start;
            }
            shape
        };
        let shapes: Vec<Vec<u64>> = from.iter().map(shape).collect();
        if let Some(other) = shapes.iter().position(|shape| *shape != shapes[0]) {
            let message = format!(
                "`{}` is {} and `{}` {}, which have no mean",
                from[0].name,
                sizes(&shapes[0]),
                from[other].name,
                sizes(&shapes[other])
            );
            return Err(refused("shape", rule, "from", message, "name tensors of one shape".into()));
        }
        let Some(first) = from.first().and_then(|source| old.tensor(&source.name)) else { return Ok(vec![]) };
        let rows = from[0].rows.as_ref().map(|rows| rows.end - rows.start);
        // Where heads become latents some tensors are no factors: they are as they were.
        let latent = first.component().and_then(|name| crate::latent::becomes((new, to), old, name));
        let how = entry.how.filter(|how| *how != How::Factor || latent.is_none());
        if let Some(steps) = steps((new, to), (old, first), rows, how) {
            return Ok(steps);
        }
        let way = entry.how.map_or("copy", word);
        let message = format!(
            "no `{way}` makes `{}`, {}, of `{}`, {}",
            to.name,
            sizes(&to.shape),
            first.name,
            sizes(&shapes[0])
        );
        let help = format!("what does: {}", crate::fit::ways((new, to), (old, first)));
        let key = if entry.how.is_some() { "how" } else { "to" };
        Err(refused("shape", rule, key, message, help))
    }

    /// Refuses an entry of whose tensors none comes from the donor although it says so.
    pub(crate) fn used(&self, moves: &[Move], old: &Side) -> Result<(), TransplantError> {
        for (rule, entry) in self.entries.iter().enumerate() {
            let asks = !matches!(entry.how, Some(How::Fresh | How::Zero));
            let mut own = moves.iter().filter(|m| self.chosen.get(&m.to) == Some(&rule)).peekable();
            if asks && own.peek().is_some() && own.all(|m| m.from.is_empty()) {
                return Err(self.unknown(rule, 0, old));
            }
        }
        Ok(())
    }

    fn unknown(&self, rule: usize, place: usize, old: &Side) -> TransplantError {
        let entry = &self.entries[rule];
        let pattern = entry.from.get(place).unwrap_or(&entry.to);
        let key = match entry.from.len() {
            0 => "to".into(),
            1 => "from".into(),
            _ => format!("from[{place}]"),
        };
        let message = format!("`{pattern}` names no tensor of the donor that these could come from");
        let field = At::Field(format!("transplant.map[{rule}].{key}"));
        TransplantError::new("unknown-name", field, message, known(old, pattern))
    }
}

/// The words that `*` stands for where a pattern names a tensor by its first words.
fn captures(pattern: &str, name: &str) -> Option<Vec<String>> {
    let mut words = name.split('.');
    let mut stars = vec![];
    for wanted in pattern.split('.') {
        let word = words.next()?;
        match wanted {
            "*" => stars.push(word.to_string()),
            _ if wanted == word => {}
            _ => return None,
        }
    }
    Some(stars)
}

/// A pattern with words in the places of `*`.
fn filled(pattern: &str, stars: &[String]) -> String {
    let mut stars = stars.iter();
    let words = pattern.split('.').map(|word| match word {
        "*" => stars.next().map_or("*", String::as_str),
        word => word,
    });
    words.collect::<Vec<_>>().join(".")
}

/// A tensor of the donor, or rows of queries, keys or values.
fn source(old: &Side, name: &str) -> Option<Source> {
    let whole = |name: &str, rows| Source { name: name.to_string(), rows, share: 1.0 };
    if old.tensor(name).is_some() {
        return Some(whole(name, None));
    }
    let words: Vec<&str> = name.split('.').collect();
    let place = words.iter().position(|word| ["q", "k", "v"].contains(word))?;
    let mut fused = words.clone();
    fused[place] = "qkv";
    let found = old.tensor(&fused.join("."))?;
    let rows = old.rows(found, words[place])?;
    Some(whole(&found.name, Some(rows)))
}

/// The names that a pattern could have meant.
fn known(side: &Side, pattern: &str) -> String {
    let words: Vec<&str> = pattern.split('.').collect();
    // As far as the words are right.
    let fit = |n: usize| side.tensors.iter().any(|t| captures(&words[..n].join("."), &t.name).is_some());
    let right = (1..=words.len()).rev().find(|n| fit(*n)).unwrap_or(0);
    let mut next: Vec<&str> = vec![];
    for tensor in &side.tensors {
        let begins = right == 0 || captures(&words[..right].join("."), &tensor.name).is_some();
        if let (true, Some(word)) = (begins, tensor.name.split('.').nth(right))
            && !next.contains(&word)
        {
            next.push(word);
        }
    }
    next.truncate(12);
    let listing = next.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", ");
    match right {
        0 => format!("names begin with {listing}"),
        _ => format!("behind `{}` there is {listing}", words[..right].join(".")),
    }
}

fn refused(code: &'static str, rule: usize, key: &str, message: String, help: String) -> TransplantError {
    TransplantError::new(code, At::Field(format!("transplant.map[{rule}].{key}")), message, help)
}

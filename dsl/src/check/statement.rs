//! Statements on the stream, from their words.
//!
//! In: the words of a statement, and the streams that are named before it. Out: a [`Statement`], or
//! an error at the word that is wrong.

use super::Checker;
use super::body::Walk;
use crate::ast::Word;
use crate::number::{self, Number};
use crate::source::Span;
use crate::spec::{Beginning, LAST_GAIN, Mixing, NormGain, PLAIN, Statement, Steps};
use crate::suggest::{closest, listing};

/// The forms, for help.
const FORMS: &str = "the statements are `norm`, `norm GAIN`, `norm plain`, `linear`, `start zeros|normal σ`, `save NAME`, `mix NAME add|linear|scaled|diagonal` and `mix history weighted`";
const MIXINGS: [&str; 4] = ["add", "linear", "scaled", "diagonal"];
const BEGINNINGS: [&str; 2] = ["identity", "normal"];

/// Whether a stream or a gain may be called so.
fn is_name(text: &str) -> bool {
    let letters = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') && text.bytes().all(letters)
}

impl Checker {
    /// `recurrent` says whether a `recur` is around it.
    pub(super) fn statement(
        &mut self,
        walk: &mut Walk,
        words: &[Word],
        span: Span,
        recurrent: bool,
    ) -> Option<Statement> {
        let texts: Vec<&str> = words.iter().map(|word| word.text.as_str()).collect();
        let (statement, used) = match texts.first().copied() {
            Some("norm") => (self.norm(walk, words), 2),
            Some("linear") => {
                let (beginning, used) = self.beginning(words, 1, Beginning::Identity);
                (beginning.map(Statement::Linear), used)
            }
            Some("save") => (self.save(walk, words, span), 2),
            Some("mix") if texts.get(1) == Some(&"history") => self.history(walk, words, span, recurrent),
            Some("mix") => self.mix(walk, words, span),
            Some("start") => self.start(words, span),
            _ => {
                self.error("statement", span, "this is no statement", FORMS);
                return None;
            }
        };
        if let Some(extra) = words.get(used) {
            let message = format!("`{}` does not belong here", extra.text);
            let help = "a statement ends with its line, or at a comma";
            self.error("statement", extra.span, message, help);
            return None;
        }
        statement
    }

    /// A norm, which shares a gain where it names one, and has none where it is plain.
    fn norm(&mut self, walk: &mut Walk, words: &[Word]) -> Option<Statement> {
        let Some(name) = words.get(1) else { return Some(Statement::Norm(NormGain::Own)) };
        if name.text == PLAIN {
            return Some(Statement::Norm(NormGain::Plain));
        }
        if !is_name(&name.text) || matches!(name.text.as_str(), "rms" | "none") {
            let help = "a name has letters, digits and `_`, begins with a letter, and is not `rms` or `none`; `final` is the gain of the last norm, `plain` is no gain";
            self.error("bad-name", name.span, format!("`{}` cannot name a gain", name.text), help);
            return None;
        }
        let own = walk.gains.entry(name.text.clone()).or_insert((name.span, 0));
        own.1 += if walk.copies > 0 { 2 } else { 1 };
        Some(Statement::Norm(NormGain::Named(name.text.clone())))
    }

    /// Refuses a gain of a last norm that is not there, and a name that one norm alone has.
    pub(super) fn lonely_gains(&mut self, walk: &Walk, last: bool) {
        for (name, (span, times)) in &walk.gains {
            if name == LAST_GAIN {
                if !last {
                    let message = "no norm follows this body, so that none has the gain `final`";
                    let help = "the last thing done to the stream is a norm already: give both another name, such as `norm g`";
                    self.error("unknown-gain", *span, message, help);
                }
            } else if *times < 2 {
                let others = walk.gains.keys().map(String::as_str).chain([LAST_GAIN]);
                let near = closest(name, others.filter(|other| other != name));
                let help = match near {
                    Some(near) => format!("did you mean `{near}`?"),
                    None => "every norm is an RMS norm: write `norm` alone, or name the gain where it is meant, too".into(),
                };
                self.error("unused-gain", *span, format!("no other norm has the gain `{name}`"), help);
            }
        }
    }

    /// How a matrix begins, where the word at `at` says it; and how many words there are then.
    fn beginning(&mut self, words: &[Word], at: usize, default: Beginning) -> (Option<Beginning>, usize) {
        match words.get(at).map(|word| word.text.as_str()) {
            None => (Some(default), at),
            Some("identity") => (Some(Beginning::Identity), at + 1),
            Some("normal") => (Some(Beginning::Normal), at + 1),
            Some(other) => {
                self.unknown_word(&words[at], other, &BEGINNINGS, "a way to begin");
                (None, words.len())
            }
        }
    }

    fn unknown_word(&mut self, word: &Word, text: &str, known: &[&'static str], what: &str) {
        let help = match closest(text, known.iter().copied()) {
            Some(known) => format!("did you mean `{known}`?"),
            None => format!("write {}", listing(known.iter().copied())),
        };
        self.error("statement", word.span, format!("`{text}` is not {what}"), help);
    }

    fn save(&mut self, walk: &mut Walk, words: &[Word], span: Span) -> Option<Statement> {
        let Some(name) = words.get(1) else {
            self.error("statement", span, "`save` needs a name for the stream", "write `save e`");
            return None;
        };
        if !is_name(&name.text) || name.text == "history" {
            let help = "a name has letters, digits and `_`, begins with a letter, and is not `history`";
            self.error("bad-name", name.span, format!("`{}` cannot name a stream", name.text), help);
            return None;
        }
        walk.saved.entry(name.text.clone()).or_insert((name.span, false));
        Some(Statement::Save(name.text.clone()))
    }

    /// The statement, and how many words it has.
    fn start(&mut self, words: &[Word], span: Span) -> (Option<Statement>, usize) {
        let help = "write `start zeros` or `start normal 0.02`";
        match words.get(1).map(|word| word.text.as_str()) {
            Some("zeros") => (Some(Statement::StartZeros), 2),
            Some("normal") => {
                let Some(word) = words.get(2) else {
                    self.error("statement", span, "`start normal` needs a deviation", help);
                    return (None, words.len());
                };
                let number = match number::literal(&word.text) {
                    Some(number) => Some(number),
                    None => number::named(&word.text, word.span, &self.lets, &mut self.found),
                };
                let deviation = number.map(Number::real);
                if let Some(wrong) = deviation.filter(|deviation| *deviation <= 0.0) {
                    let message = format!("a deviation is above 0, and this is {wrong}");
                    self.error("out-of-range", word.span, message, "write a number such as 0.02");
                    return (None, 3);
                }
                (deviation.map(Statement::StartNormal), 3)
            }
            Some(other) => {
                self.unknown_word(&words[1], other, &["zeros", "normal"], "a way to start");
                (None, words.len())
            }
            None => {
                self.error("statement", span, "this does not say what the stream starts with", help);
                (None, words.len())
            }
        }
    }

    /// The statement, and how many words it has.
    fn history(
        &mut self,
        walk: &Walk,
        words: &[Word],
        span: Span,
        recurrent: bool,
    ) -> (Option<Statement>, usize) {
        let help =
            "write `mix history weighted`, `mix history weighted every 4` or `mix history weighted apart 4`";
        match words.get(2) {
            Some(word) if word.text == "weighted" => {}
            Some(word) => {
                self.unknown_word(word, &word.text, &["weighted"], "a way to mix the history");
                return (None, words.len());
            }
            None => {
                self.error("statement", span, "this does not say how the history is mixed", help);
                return (None, words.len());
            }
        }
        if recurrent || walk.looped {
            let message = "a stream of a `recur` is another one in every pass: history is of layers outside";
            let help = "make the `recur` a `repeat`, or put the statement before it";
            self.error("history", span, message, help);
            return (None, words.len());
        }
        let apart = words.get(3).is_some_and(|word| word.text == "apart");
        let step = match (words.get(3), words.get(4)) {
            (None, _) => Some(1),
            (Some(every), Some(number)) if apart || every.text == "every" => {
                let found = match number::literal(&number.text) {
                    Some(found) => Some(found),
                    None => number::named(&number.text, number.span, &self.lets, &mut self.found),
                };
                let whole = |found: &Number| matches!(found, Number::Int(step) if *step > 0);
                if found.as_ref().is_some_and(|found| !whole(found)) {
                    let message = format!("`{}` is no number of layers", number.text);
                    self.error("out-of-range", number.span, message, help);
                }
                found.and_then(|found| match found {
                    Number::Int(step) => u64::try_from(step).ok().filter(|step| *step > 0),
                    _ => None,
                })
            }
            (Some(word), None) if apart || word.text == "every" => {
                let message = format!("`{}` needs a number of layers", word.text);
                self.error("statement", word.span, message, help);
                None
            }
            (Some(word), _) => {
                self.unknown_word(word, &word.text, &["every", "apart"], "a choice of streams");
                None
            }
        };
        // Every stream is read either way.
        let steps = if apart && step != Some(1) { Steps::Apart } else { Steps::Every };
        (step.map(|step| Statement::History(steps(step))), 5.min(words.len()))
    }

    /// The statement, and how many words it has.
    fn mix(&mut self, walk: &mut Walk, words: &[Word], span: Span) -> (Option<Statement>, usize) {
        let Some(name) = words.get(1) else {
            let help = "write `mix e linear` with a stream that `save e` names";
            self.error("statement", span, "`mix` needs the name of a saved stream", help);
            return (None, words.len());
        };
        let known = match walk.saved.get_mut(&name.text) {
            Some((_, read)) => {
                *read = true;
                true
            }
            None => {
                let help = match closest(&name.text, walk.saved.keys().map(String::as_str)) {
                    Some(known) => format!("did you mean `{known}`?"),
                    None => format!("write `save {}` where the stream is what you mean", name.text),
                };
                let message = format!("no stream is saved as `{}` before this", name.text);
                self.error("unknown-stream", name.span, message, help);
                false
            }
        };
        let Some(how) = words.get(2) else {
            let help = format!("write `mix {} {}`", name.text, listing(MIXINGS).replace('`', ""));
            self.error("statement", span, "this does not say how the streams are mixed", help);
            return (None, words.len());
        };
        let (how, used) = match how.text.as_str() {
            "add" => (Some(Mixing::Add), 3),
            "scaled" => (Some(Mixing::Scaled), 3),
            "diagonal" => (Some(Mixing::Diagonal), 3),
            "linear" => {
                let (beginning, used) = self.beginning(words, 3, Beginning::Normal);
                (beginning.map(Mixing::Linear), used)
            }
            other => {
                self.unknown_word(how, other, &MIXINGS, "a way to mix streams");
                return (None, words.len());
            }
        };
        let statement = how.filter(|_| known).map(|how| Statement::Mix { name: name.text.clone(), how });
        (statement, used)
    }

    /// Warns of names that nothing reads.
    pub(super) fn unread_streams(&mut self, walk: &Walk) {
        for (name, (span, read)) in &walk.saved {
            if !read {
                let help = "read it with `mix`, or take it away";
                self.warning("unused-stream", *span, format!("nothing reads `{name}`"), help);
            }
        }
    }
}

//! One text being written.
//!
//! *In*: a prompt, how tokens are drawn, and logits. *Out*: tokens, and text as soon as it is
//! certain. *Promise*: nothing of a stop string is ever heard, and no part of a character.

use super::{Sampling, Why, Written};
use dreamc_data::Tokenizer;
use dreamc_data::rng::{Philox, Stream};

/// Tokens of the prompt that generated ones are decoded after: only so is it known whether they
/// begin with a space.
const BEFORE: usize = 8;

/// Tokens that are decoded once more at every step, at the least: those of a character, and of the
/// beginning of a stop string, are not apart from what follows.
const OPEN: usize = 64;

/// One text being written.
pub struct Writer {
    sampling: Sampling,
    random: Stream,
    /// Ends of a text besides the tokenizer's own: tokens, and texts.
    stop_tokens: Vec<u32>,
    stop_texts: Vec<String>,
    room: usize,
    /// Tokens that the open ones are decoded after.
    before: Vec<u32>,
    tokens: Vec<u32>,
    /// The token that was drawn last, also one that ended the text.
    drawn: Option<u32>,
    /// Tokens whose text is settled, and that text: all of it is heard.
    settled: usize,
    text: String,
    /// Bytes of the text of the open tokens that are heard.
    said: usize,
    /// Why it ended, and the text of the open tokens.
    done: Option<(Why, String)>,
}

impl Writer {
    /// A text after a prompt, the `number`-th of those with one seed, and the tokens to read
    /// first: of a prompt longer than the context the last that fit, with one place left to
    /// generate; of an empty one the end token.
    pub fn new(
        prompt: &[u32],
        number: u64,
        context: usize,
        tokenizer: &Tokenizer,
        sampling: Sampling,
    ) -> (Vec<u32>, Self) {
        let end = [tokenizer.end()];
        let prompt = if prompt.is_empty() { &end[..] } else { prompt };
        let prompt = prompt[prompt.len().saturating_sub(context.max(2) - 1)..].to_vec();
        // A special token is in no decoded text: it stops as a token.
        let stop_tokens = sampling.stop.iter().filter_map(|s| tokenizer.special(s)).collect();
        let texts = sampling.stop.iter().filter(|s| !s.is_empty() && tokenizer.special(s).is_none());
        let writer = Writer {
            random: Philox::new(sampling.seed, "sampling").stream(number),
            stop_tokens,
            stop_texts: texts.cloned().collect(),
            room: sampling.max_tokens.min(context - prompt.len()),
            before: prompt[prompt.len().saturating_sub(BEFORE)..].to_vec(),
            tokens: vec![],
            drawn: None,
            settled: 0,
            text: String::new(),
            said: 0,
            done: None,
            sampling,
        };
        (prompt, writer)
    }

    /// The tokens written.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The token that the last step drew, one that ended the text and is not of it among them; none
    /// where it drew none.
    pub fn drawn(&self) -> Option<u32> {
        self.drawn
    }

    /// Writes one token and returns it, to be read; none where the text has come to its end.
    pub fn step(
        &mut self,
        logits: &[f32],
        tokenizer: &Tokenizer,
        heard: &mut dyn FnMut(&str),
    ) -> Option<u32> {
        if self.done.is_some() {
            return None;
        }
        let full = if self.room < self.sampling.max_tokens { Why::Context } else { Why::Length };
        let mut why = None;
        self.drawn = None;
        if self.tokens.len() < self.room {
            let token = self.sampling.draw(logits, &mut self.random);
            self.drawn = Some(token);
            if self.stop_tokens.contains(&token) {
                why = Some(Why::Stop);
            } else if tokenizer.ends().contains(&token) {
                why = Some(Why::End);
            } else {
                self.tokens.push(token);
            }
        }
        if why.is_none() && self.tokens.len() >= self.room {
            why = Some(full);
        }
        let mut text = tokenizer.decode_further(&self.before, &self.tokens[self.settled..]);
        if let Some(at) = self.stop_texts.iter().filter_map(|s| text.find(s)).min() {
            text.truncate(at);
            why = Some(Why::Stop);
        }
        // A broken character at the end may yet become whole, and the beginning of a stop string a
        // stop string.
        let sure = if why.is_some() { text.len() } else { certain(&text, &self.stop_texts) };
        if sure > self.said && text.is_char_boundary(self.said) {
            heard(&text[self.said..sure]);
            self.said = sure;
        }
        if let Some(why) = why {
            self.done = Some((why, text));
            return None;
        }
        if sure == text.len() && self.said == sure && self.tokens.len() - self.settled >= OPEN {
            self.text += &text;
            let behind = [&self.before, &self.tokens[self.settled..]].concat();
            self.before = behind[behind.len() - BEFORE..].to_vec();
            (self.settled, self.said) = (self.tokens.len(), 0);
        }
        self.tokens.last().copied()
    }

    /// The text and its tokens; of a text that has not come to its end, all that is certain.
    pub fn finish(self, tokenizer: &Tokenizer) -> Written {
        let (why, open) = self.done.unwrap_or_else(|| {
            let mut open = tokenizer.decode_further(&self.before, &self.tokens[self.settled..]);
            open.truncate(self.said);
            (Why::Length, open)
        });
        Written { text: self.text + &open, tokens: self.tokens, why }
    }
}

/// How much of a text can no longer change or be cut off.
fn certain(text: &str, stop: &[String]) -> usize {
    // A broken character may become the next one of a stop string.
    let whole = text.trim_end_matches('\u{FFFD}');
    let held =
        |s: &String| s.char_indices().map(|(i, _)| i).rev().find(|&i| whole.ends_with(&s[..i])).unwrap_or(0);
    whole.len() - stop.iter().map(held).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Longer than what is decoded at every step, with characters of two bytes; stopped at every
    /// place.
    #[test]
    fn a_long_text_is_heard_once_whatever_is_settled() {
        let whole: String = (0..60).map(|i| format!("{i}é ")).collect();
        let tokenizer = Tokenizer::bytes();
        for at in 0..whole.chars().count() - 6 {
            let stop: String = whole.chars().skip(at).take(6).collect();
            let sampling = Sampling { stop: vec![stop.clone()], max_tokens: 1000, ..Sampling::default() };
            let (_, mut writer) = Writer::new(&[1], 0, 1001, &tokenizer, sampling);
            let (mut heard, mut bytes) = (String::new(), whole.bytes());
            let one = |byte: u8| {
                let mut logits = vec![0.0; 256];
                logits[usize::from(byte)] = 9.0;
                logits
            };
            while writer.step(&one(bytes.next().unwrap()), &tokenizer, &mut |piece| heard += piece).is_some()
            {
            }
            let written = writer.finish(&tokenizer);
            assert_eq!((heard.as_str(), written.why), (&whole[..whole.find(&stop).unwrap()], Why::Stop));
            assert_eq!(heard, written.text);
        }
    }
}

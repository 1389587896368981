//! Requests and answers as JSON.
//!
//! *In*: the body of a request. *Out*: texts to write, and the objects that OpenAI's clients read.
//! *Promise*: a field that is not understood, or asks for what there is not, is refused by name;
//! every refusal has OpenAI's shape.

use crate::Shared;
use crate::engine::{Answer, Ask, Scored};
use dreamc_data::Tokenizer;
use dreamc_runtime::generate::{Sampling, Why};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::time::Instant;
use tokio::sync::mpsc::UnboundedSender;

/// Most texts of a request, prompts times choices.
const MOST_TEXTS: usize = 128;
/// Most likeliest tokens reported with each token.
const MOST_LOGPROBS: u64 = 20;
/// Most stop strings, and most bytes of one.
const MOST_STOPS: (usize, usize) = (16, 256);
/// Tokens written where a request does not say.
const TOKENS: usize = 16;
/// The log-probability of what cannot be: JSON has no infinity.
const NEVER: f64 = -9999.0;

/// Why a request is refused.
#[derive(Debug)]
pub struct Refusal {
    pub status: u16,
    pub kind: &'static str,
    pub param: Option<&'static str>,
    pub message: String,
    /// Seconds after which to ask again.
    pub again: Option<u64>,
}

impl Refusal {
    pub fn new(status: u16, message: impl Into<String>) -> Self {
        let kind = match status {
            401 => "authentication_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        };
        Refusal { status, kind, param: None, message: message.into(), again: None }
    }

    fn of(param: &'static str, message: impl Into<String>) -> Self {
        Refusal { param: Some(param), ..Refusal::new(400, message) }
    }

    pub fn json(&self) -> Value {
        let code = self.status.to_string();
        json!({ "error": { "message": self.message, "type": self.kind, "param": self.param, "code": code } })
    }
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "a text, a list of texts, a list of token ids, or a list of such lists")]
enum Prompt {
    Text(String),
    Ids(Vec<u32>),
    Texts(Vec<String>),
    Lists(Vec<Vec<u32>>),
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "a text or a list of texts")]
enum Stop {
    One(String),
    Several(Vec<String>),
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
}

/// The body of `POST /v1/completions`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Body {
    model: Option<String>,
    prompt: Option<Prompt>,
    max_tokens: Option<usize>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<i64>,
    seed: Option<i64>,
    stop: Option<Stop>,
    n: Option<usize>,
    best_of: Option<usize>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    echo: Option<bool>,
    logprobs: Option<u64>,
    suffix: Option<String>,
    presence_penalty: Option<f64>,
    frequency_penalty: Option<f64>,
    logit_bias: Option<Map<String, Value>>,
    #[serde(rename = "user")]
    _user: Option<String>,
}

/// A request that is understood.
pub struct Completion {
    prompts: Vec<Vec<u32>>,
    choices: usize,
    sampling: Sampling,
    logprobs: Option<usize>,
    echo: bool,
    pub stream: bool,
    pub usage: bool,
}

/// Reads JSON; refuses other text, and unknown fields.
pub fn read<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, Refusal> {
    serde_json::from_slice(body).map_err(|e| Refusal::new(400, format!("the body of the request: {e}")))
}

/// A seed for a request that has none: no two are the same.
fn any_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}

impl Completion {
    pub fn read(body: &[u8], shared: &Shared) -> Result<Self, Refusal> {
        let body: Body = read(body)?;
        let options = &shared.options;
        if let Some(model) = body.model.as_ref().filter(|m| **m != options.model) {
            let (param, known) = (Some("model"), &options.model);
            let message = format!("the model `{model}` does not exist; this is `{known}`");
            return Err(Refusal { param, ..Refusal::new(404, message) });
        }
        let zero = |x: Option<f64>| x.is_none_or(|x| x == 0.0);
        if !zero(body.presence_penalty) || !zero(body.frequency_penalty) {
            return Err(Refusal::of("presence_penalty", "there are no penalties: leave them out, or 0"));
        }
        if body.logit_bias.is_some_and(|bias| !bias.is_empty()) {
            return Err(Refusal::of("logit_bias", "logits have no biases: leave it out"));
        }
        if body.suffix.is_some_and(|suffix| !suffix.is_empty()) {
            return Err(Refusal::of("suffix", "the model writes after prompts only: leave it out"));
        }
        let choices = body.n.unwrap_or(1);
        if body.best_of.is_some_and(|best| best != choices) {
            return Err(Refusal::of("best_of", "texts are not ranked: leave it out, or as large as `n`"));
        }
        let temperature = body.temperature.unwrap_or(options.temperature);
        if !(temperature >= 0.0 && temperature.is_finite()) {
            return Err(Refusal::of("temperature", "`temperature` must be 0 or larger"));
        }
        let top_p = body.top_p.or(options.top_p);
        if top_p.is_some_and(|p| !(p > 0.0 && p <= 1.0)) {
            return Err(Refusal::of("top_p", "`top_p` must be above 0 and at most 1"));
        }
        let top_k = match body.top_k {
            None | Some(-1) => None,
            Some(k) if k > 0 => Some(k as usize),
            Some(_) => return Err(Refusal::of("top_k", "`top_k` must be at least 1, or -1 for all tokens")),
        };
        if body.logprobs.is_some_and(|n| n > MOST_LOGPROBS) {
            return Err(Refusal::of("logprobs", format!("`logprobs` must be at most {MOST_LOGPROBS}")));
        }
        let stop = match body.stop {
            None => vec![],
            Some(Stop::One(stop)) => vec![stop],
            Some(Stop::Several(stops)) => stops,
        };
        if stop.len() > MOST_STOPS.0 || stop.iter().any(|s| s.len() > MOST_STOPS.1) {
            let (texts, bytes) = MOST_STOPS;
            return Err(Refusal::of(
                "stop",
                format!("`stop` must be at most {texts} texts of {bytes} bytes"),
            ));
        }
        let prompts = prompts(body.prompt, shared)?;
        if choices == 0 || choices.saturating_mul(prompts.len()) > MOST_TEXTS {
            let message = format!("`n` times prompts must be 1 to {MOST_TEXTS} texts");
            return Err(Refusal::of("n", message));
        }
        let echo = body.echo.unwrap_or(false);
        let longest = prompts.iter().map(|p| p.len().max(1)).max().unwrap_or(1);
        // A prompt that is only read leaves no place.
        let context = shared.context;
        let asked = body.max_tokens.unwrap_or(TOKENS.min(context.saturating_sub(longest)).max(1));
        if longest.saturating_add(asked) > context || longest == context {
            let param = if longest >= context { "prompt" } else { "max_tokens" };
            let message = format!(
                "the model's context is {context} tokens; the prompt has {longest} and {asked} are to be written"
            );
            return Err(Refusal::of(param, message));
        }
        let most = options.limits.cache_tokens;
        if longest.saturating_add(asked) > most {
            let message = format!(
                "the caches of this server are to hold {most} tokens; the prompt has {longest} and {asked} are to be written"
            );
            return Err(Refusal::of("max_tokens", message));
        }
        let seed = body.seed.map_or_else(any_seed, |seed| seed as u64);
        let usage = body.stream_options.is_some_and(|options| options.include_usage);
        let logprobs = body.logprobs.map(|n| n as usize);
        let sampling = Sampling { temperature, top_k, top_p, seed, max_tokens: asked, stop };
        Ok(Completion {
            prompts,
            choices,
            sampling,
            logprobs,
            echo,
            stream: body.stream == Some(true),
            usage,
        })
    }

    /// The texts to write; their answers go to `answers`.
    pub fn asks(&self, answers: &UnboundedSender<(usize, Answer)>) -> Vec<Ask> {
        let prompts = self.prompts.iter().enumerate();
        let texts =
            prompts.flat_map(|(i, prompt)| (0..self.choices).map(move |c| (i * self.choices + c, c, prompt)));
        let ask = |(index, choice, prompt): (usize, usize, &Vec<u32>)| Ask {
            index,
            number: choice as u64,
            prompt: prompt.clone(),
            sampling: self.sampling.clone(),
            logprobs: self.logprobs,
            prompt_logprobs: self.echo && self.logprobs.is_some(),
            answers: answers.clone(),
            asked: Instant::now(),
        };
        texts.map(ask).collect()
    }
}

/// The tokens of the prompts of a request.
fn prompts(prompt: Option<Prompt>, shared: &Shared) -> Result<Vec<Vec<u32>>, Refusal> {
    let vocab = shared.options.vocab;
    let known = |ids: Vec<u32>| match ids.iter().find(|id| **id >= vocab) {
        Some(id) => Err(Refusal::of("prompt", format!("there is no token {id}: ids are below {vocab}"))),
        None => Ok(ids),
    };
    let text = |text: String| known(encode(&text, shared.options.begins, &shared.tokenizer)?);
    let prompts: Vec<Vec<u32>> = match prompt {
        None => vec![text(String::new())?],
        Some(Prompt::Text(one)) => vec![text(one)?],
        Some(Prompt::Ids(one)) if one.is_empty() => vec![],
        Some(Prompt::Ids(one)) => vec![known(one)?],
        Some(Prompt::Texts(all)) => all.into_iter().map(text).collect::<Result<_, _>>()?,
        Some(Prompt::Lists(all)) => all.into_iter().map(known).collect::<Result<_, _>>()?,
    };
    if prompts.is_empty() || prompts.len() > MOST_TEXTS {
        return Err(Refusal::of("prompt", format!("`prompt` must be 1 to {MOST_TEXTS} prompts")));
    }
    // From an empty prompt the model generates as after the end of a text.
    let something = |p: Vec<u32>| if p.is_empty() { vec![shared.tokenizer.end()] } else { p };
    Ok(prompts.into_iter().map(something).collect())
}

/// The tokens of a text, after the begin token where one is wanted.
pub fn encode(text: &str, begins: bool, tokenizer: &Tokenizer) -> Result<Vec<u32>, Refusal> {
    let mut ids = if begins { vec![tokenizer.begin()] } else { vec![] };
    let encoded = tokenizer.encode(text);
    ids.extend(encoded.map_err(|e| Refusal::of("prompt", format!("it cannot be encoded: {e}")))?);
    Ok(ids)
}

/// Tokens of the text before a token that tell how it is written.
const BEFORE: usize = 8;

/// Pieces of text of a sequence of tokens, and where they begin.
#[derive(Default)]
struct Pieces {
    before: Vec<u32>,
    /// Tokens of a character that is not whole.
    open: Vec<u32>,
    /// Characters of the text so far.
    characters: usize,
}

impl Pieces {
    /// A token as text; by its number where it is no text of its own.
    fn name(&self, token: u32, tokenizer: &Tokenizer) -> String {
        let text = if self.open.is_empty() {
            tokenizer.decode_further(&self.before, &[token])
        } else {
            String::new()
        };
        if text.is_empty() || text.contains('\u{FFFD}') { format!("token_id:{token}") } else { text }
    }

    fn push(&mut self, token: u32, tokenizer: &Tokenizer) {
        self.open.push(token);
        let text = tokenizer.decode_further(&self.before, &self.open);
        if !text.ends_with('\u{FFFD}') || self.open.len() > BEFORE {
            self.characters += text.chars().count();
            self.before.append(&mut self.open);
            let old = self.before.len().saturating_sub(BEFORE);
            self.before.drain(..old);
        }
    }
}

/// Log-probabilities of tokens, as OpenAI's clients read them.
#[derive(Default, Serialize)]
struct Logprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f64>>,
    top_logprobs: Vec<Option<Map<String, Value>>>,
    text_offset: Vec<usize>,
}

/// A text of a request, as far as it is known.
struct Choice {
    text: String,
    logprobs: Option<Logprobs>,
    pieces: Pieces,
    written: usize,
    finish: Option<&'static str>,
}

impl Choice {
    fn score(&mut self, scored: &Scored, tokenizer: &Tokenizer) {
        let Some(all) = &mut self.logprobs else { return };
        let finite = |x: f64| if x.is_finite() { x.max(NEVER) } else { NEVER };
        let top = scored.scores.as_ref().map(|(of_token, top)| {
            let (chosen, mut found) = (self.pieces.name(scored.token, tokenizer), Map::new());
            for &(token, score) in top.iter().filter(|(token, _)| *token != scored.token) {
                let mut name = self.pieces.name(token, tokenizer);
                if found.contains_key(&name) || name == chosen {
                    name = format!("token_id:{token}");
                }
                found.insert(name, finite(score).into());
            }
            found.insert(chosen, finite(*of_token).into());
            found
        });
        all.tokens.push(self.pieces.name(scored.token, tokenizer));
        all.token_logprobs.push(scored.scores.as_ref().map(|(score, _)| finite(*score)));
        all.top_logprobs.push(top);
        all.text_offset.push(self.pieces.characters);
        self.pieces.push(scored.token, tokenizer);
    }
}

/// The answer to a request, put together from parts.
pub struct Assembly {
    id: String,
    model: String,
    created: u64,
    choices: Vec<Choice>,
    prompt_tokens: usize,
    usage: bool,
    /// Why there is no answer.
    pub failed: Option<String>,
}

impl Assembly {
    pub fn new(request: &Completion, id: String, shared: &Shared) -> Self {
        let tokenizer = &shared.tokenizer;
        let choice = |prompt: &Vec<u32>| {
            let mut pieces = Pieces::default();
            let scored = request.echo && request.logprobs.is_some();
            if !scored {
                let old = prompt.len().saturating_sub(BEFORE);
                pieces.before = prompt[old..].to_vec();
            }
            Choice {
                text: if request.echo { tokenizer.decode(prompt) } else { String::new() },
                logprobs: request.logprobs.map(|_| Logprobs::default()),
                pieces,
                written: 0,
                finish: None,
            }
        };
        let all = request.prompts.iter().flat_map(|p| std::iter::repeat_n(p, request.choices));
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Assembly {
            id,
            model: shared.options.model.clone(),
            created: now.map_or(0, |now| now.as_secs()),
            choices: all.map(choice).collect(),
            prompt_tokens: request.prompts.iter().map(Vec::len).sum(),
            usage: request.usage,
            failed: None,
        }
    }

    /// Takes a part of an answer.
    pub fn take(&mut self, (index, answer): (usize, Answer), tokenizer: &Tokenizer) {
        let Some(choice) = self.choices.get_mut(index) else { return };
        match answer {
            Answer::Read(scored) => scored.iter().for_each(|s| choice.score(s, tokenizer)),
            Answer::Wrote(scored, text) => {
                choice.text += &text;
                choice.written += 1;
                scored.iter().for_each(|s| choice.score(s, tokenizer));
            }
            Answer::Done(why) => {
                choice.finish = Some(match why {
                    Why::End | Why::Stop => "stop",
                    Why::Length | Why::Context => "length",
                });
            }
            Answer::Failed(message) => self.failed = Some(message),
        }
    }

    /// Whether every text has come to its end.
    pub fn is_whole(&self) -> bool {
        self.choices.iter().all(|choice| choice.finish.is_some())
    }

    fn object(&self, choices: Vec<Value>, usage: Value) -> Value {
        let mut object = json!({
            "id": self.id, "object": "text_completion", "created": self.created, "model": self.model, "choices": choices,
        });
        if !usage.is_null() {
            object["usage"] = usage;
        }
        object
    }

    fn usage(&self) -> Value {
        let written: usize = self.choices.iter().map(|choice| choice.written).sum();
        let (prompt, total) = (self.prompt_tokens, self.prompt_tokens + written);
        json!({ "prompt_tokens": prompt, "completion_tokens": written, "total_tokens": total })
    }

    /// The whole answer.
    pub fn whole(mut self) -> Value {
        let choices = (0..self.choices.len()).map(|index| self.part(index)).collect();
        self.object(choices, self.usage())
    }

    /// The part of a text that is new since the last time.
    fn part(&mut self, index: usize) -> Value {
        let choice = &mut self.choices[index];
        let logprobs = choice.logprobs.as_mut().map(std::mem::take);
        let text = std::mem::take(&mut choice.text);
        json!({ "index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish })
    }

    /// The event of a part of an answer, empty where it says nothing yet.
    pub fn stream(&mut self, part: (usize, Answer), tokenizer: &Tokenizer) -> String {
        let index = part.0;
        self.take(part, tokenizer);
        if let Some(message) = &self.failed {
            return format!("data: {}\n\n", Refusal::new(500, message).json());
        }
        let Some(choice) = self.choices.get(index) else { return String::new() };
        let scored = choice.logprobs.as_ref().is_some_and(|all| !all.tokens.is_empty());
        if choice.text.is_empty() && !scored && choice.finish.is_none() {
            return String::new();
        }
        let new = self.part(index);
        let mut events = format!("data: {}\n\n", self.object(vec![new], Value::Null));
        if self.is_whole() {
            if self.usage {
                events += &format!("data: {}\n\n", self.object(vec![], self.usage()));
            }
            events += "data: [DONE]\n\n";
        }
        events
    }
}

//! Prompts from a person, one a line, and from a pipe in the same form.
//!
//! *In*: lines; one that begins with `/` changes how the model writes. *Out*: each prompt with what
//! follows it. A wrong line is answered and the session goes on; a terminal has the line editor's
//! keys and history.

use super::{remarks, say_now};
use crate::arguments::share;
use dreamc_data::Tokenizer;
use dreamc_device::Device;
use dreamc_runtime::generate::{NextLogits, Sampling, generate};
use dreamc_study::failure::{Done, Failure};
use dreamc_study::model::Passes;
use dreamc_study::model::{Texts, Trained};
use dreamc_study::{note, output};
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use std::io::{self, BufRead, IsTerminal};

const HELP: &str = "\
/depth N     run a recurrent model at this depth; /depth alone: its own
/exit Q      leave the loop of a token where more than this share of it has left; /exit alone: never
/temp T      temperature; 0 takes the likeliest token
/top-p P     only the likeliest tokens whose probabilities reach P
/tokens N    most tokens written
/seed N      seed of the next answer
/help        this list; Ctrl-D ends";

/// How a session writes.
pub struct Session<'a> {
    pub trained: &'a Trained,
    pub device: &'a dyn Device,
    pub tokenizer: &'a Tokenizer,
    pub passes: Passes,
    pub cache: bool,
    pub sampling: Sampling,
}

/// Where lines come from.
enum Lines {
    Person(Box<DefaultEditor>),
    Pipe,
}

impl Lines {
    fn open() -> Result<Self, Failure> {
        if !(io::stdin().is_terminal() && output::Stream::Out.is_terminal()) {
            return Ok(Lines::Pipe);
        }
        let editor = DefaultEditor::new().map_err(|e| Failure::Error(e.into()))?;
        Ok(Lines::Person(Box::new(editor)))
    }

    fn next(&mut self) -> Result<Option<String>, Failure> {
        match self {
            Lines::Person(editor) => match editor.readline("> ") {
                Ok(line) => {
                    let _ = editor.add_history_entry(&line);
                    Ok(Some(line))
                }
                // Ctrl-C takes the line away, as in a shell.
                Err(ReadlineError::Interrupted) => Ok(Some(String::new())),
                Err(ReadlineError::Eof) => Ok(None),
                Err(error) => Err(Failure::Error(error.into())),
            },
            Lines::Pipe => {
                let mut line = String::new();
                let read = io::stdin().lock().read_line(&mut line)?;
                Ok((read > 0).then(|| line.trim_end_matches(['\n', '\r']).to_string()))
            }
        }
    }
}

impl<'a> Session<'a> {
    /// Answers until the lines end.
    pub fn run(mut self) -> Done {
        let mut lines = Lines::open()?;
        let person = matches!(lines, Lines::Person(_));
        let mut decoder = self.decoder()?;
        if person {
            note!("{}: a prompt a line; /help lists commands, Ctrl-D ends", self.trained.spec.model.name);
        }
        while let Some(line) = lines.next()? {
            if person && line.trim().is_empty() || output::unread() {
                continue;
            }
            let answered = match line.strip_prefix('/') {
                Some(command) => self.command(command, &mut decoder),
                None => self.answer(&line, decoder.as_mut()),
            };
            match answered {
                Err(error) if person => output::complain(&format!("{error}\n")),
                answered => answered?,
            }
        }
        Ok(())
    }

    fn decoder(&self) -> Result<Box<dyn NextLogits + 'a>, Failure> {
        let texts = Texts { rows: 1, prompt: None, context: None };
        self.trained.decoder(self.device, texts, self.passes, self.cache)
    }

    fn command(&mut self, line: &str, decoder: &mut Box<dyn NextLogits + 'a>) -> Done {
        let (name, value) = line.trim().split_once(char::is_whitespace).unwrap_or((line.trim(), ""));
        let value = value.trim();
        let wrong = || Failure::Usage(format!("/{name} {value}: not a value of it\n{HELP}"));
        match name {
            "depth" | "exit" => {
                let before = self.passes;
                match (name, value) {
                    ("depth", "") => self.passes.depth = None,
                    ("depth", text) => {
                        let depth = text.parse().ok().filter(|n| (1..1 << 20).contains(n));
                        self.passes.depth = Some(depth.ok_or_else(wrong)?);
                    }
                    (_, "") => self.passes.exit = None,
                    (_, text) => self.passes.exit = Some(share(text).map_err(|_| wrong())?),
                }
                match self.decoder() {
                    Ok(made) => *decoder = made,
                    Err(error) => {
                        self.passes = before;
                        return Err(error);
                    }
                }
            }
            "temp" | "temperature" => {
                let right = |t: &f64| *t >= 0.0 && t.is_finite();
                self.sampling.temperature = value.parse().ok().filter(right).ok_or_else(wrong)?;
            }
            "top-p" => {
                let right = |p: &f64| *p > 0.0 && *p <= 1.0;
                self.sampling.top_p = Some(value.parse().ok().filter(right).ok_or_else(wrong)?);
            }
            "tokens" => {
                self.sampling.max_tokens = value.parse().ok().filter(|n| *n > 0).ok_or_else(wrong)?;
            }
            "seed" => self.sampling.seed = value.parse().map_err(|_| wrong())?,
            "help" => note!("{HELP}"),
            _ => return Err(Failure::Usage(format!("there is no /{name}\n{HELP}"))),
        }
        Ok(())
    }

    fn answer(&mut self, text: &str, decoder: &mut dyn NextLogits) -> Done {
        let prompt = self.trained.prompt(self.tokenizer, text)?;
        remarks(self.trained, text, prompt.len());
        let mut broken = say_now(text).err();
        generate(decoder, self.tokenizer, &[prompt], &self.sampling, &mut |_, piece| {
            if broken.is_none() {
                broken = say_now(piece).err();
            }
        })?;
        if let Some(error) = broken {
            return Err(error.into());
        }
        say_now("\n")?;
        self.sampling.seed = self.sampling.seed.wrapping_add(1);
        Ok(())
    }
}

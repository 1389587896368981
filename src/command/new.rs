//! `dreamc new`: a commented specification that trains as it is.
//!
//! *In*: the kind of a model and a name. *Out*: one file, and where the model is one of Hugging
//! Face, the folder of its import. *Promise*: nothing is asked, nothing is overwritten, and what is
//! written passes `dreamc check` without a warning.

use crate::command;
use clap::{Args, Subcommand};
use dreamc_dsl::Spelling;
use dreamc_study::failure::{Done, Failure};
use dreamc_study::say;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Component, Path, PathBuf};

/// Write a commented specification that trains as it is
#[derive(Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
Examples:
  dreamc new                            recurrent.dream: one layer, applied four times
  dreamc new mod my-mod                 my-mod.dream
  dreamc new moe my-moe.yaml            the same language, spelled as YAML
  dreamc new exam my-exam               my-exam.suite.yaml, a suite over a generated task, and its model
  dreamc new from gemma-2-2b my-gemma   import a model, and write what trains it further

A file that is there is not overwritten: exit code 2."
)]
pub struct Arguments {
    #[command(subcommand)]
    kind: Option<Kind>,
}

#[derive(Subcommand)]
enum Kind {
    /// One layer with one set of weights, applied four times, with depth attention (the default)
    Recurrent(Named),
    /// Mixture of Depths: half of the tokens skip every other layer
    Mod(Named),
    /// Layers with a mixture of experts, and windows at every other layer
    Moe(Named),
    /// A prelude, a core that is applied four times, and a coda
    Looped(Named),
    /// A suite over a generated task, and the recurrent model that it compares
    Exam(Named),
    /// A Hugging Face folder, imported, to be trained further
    From {
        /// The folder of the model, with its config.json
        #[arg(value_name = "HF_DIR")]
        from: PathBuf,

        /// Name of the specification and of the import; that of the folder by default
        name: Option<PathBuf>,
    },
}

#[derive(Args)]
struct Named {
    /// Name of the specification: `NAME.dream`, or with an ending of its own `.dream` or `.yaml`;
    /// that of the kind by default
    name: Option<PathBuf>,
}

pub fn run(a: Arguments) -> Done {
    let kind = a.kind.unwrap_or(Kind::Recurrent(Named { name: None }));
    let (template, word, named) = match kind {
        Kind::Recurrent(named) => (include_str!("new/recurrent.dream"), "recurrent", named),
        Kind::Mod(named) => (include_str!("new/mod.dream"), "mod", named),
        Kind::Moe(named) => (include_str!("new/moe.dream"), "moe", named),
        Kind::Looped(named) => (include_str!("new/looped.dream"), "looped", named),
        Kind::Exam(named) => return exam(named.name.unwrap_or_else(|| "exam".into())),
        Kind::From { from, name } => return further(&from, name),
    };
    let target = Target::new(named.name.unwrap_or_else(|| word.into()))?;
    target.write(template)?;
    target.next(&format!("dreamc train {}", target.path.display()))
}

/// Writes a suite and the model that it compares.
fn exam(name: PathBuf) -> Done {
    let model = Target::new(name)?;
    let suite = model.path.with_extension("suite.yaml");
    if suite.symlink_metadata().is_ok() {
        return Err(taken(&suite));
    }
    model.write(include_str!("new/recurrent.dream"))?;
    let file = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let text = include_str!("new/exam.suite.yaml").replace("NAME", &model.name);
    let text = text.replace("MODEL", &file(&model.path)).replace("FILE", &file(&suite));
    put(&suite, &text)?;
    Ok(say!("{}: written\n{}: written; next:\n  dreamc compare {0}", suite.display(), model.path.display())?)
}

/// Imports a model and writes what trains it further.
fn further(from: &Path, name: Option<PathBuf>) -> Done {
    let name = match name {
        Some(name) => name,
        None => command::import::name(from)?.into(),
    };
    let target = Target::new(name)?;
    let tokenizer = from.join("tokenizer.json");
    if from.is_dir() && !tokenizer.is_file() {
        return Err(Failure::Usage(format!(
            "there is no {}: nothing reads text for this model; `dreamc import hf` imports it for token ids alone",
            tokenizer.display()
        )));
    }
    let base = Path::new("imports").join(&target.name);
    let imported = dreamc_hf::hugging_face(from, &base, &target.name, false, &[])?;
    // The path of the base is relative to the folder of the specification.
    let folder = || target.path.parent().into_iter().flat_map(Path::components);
    let named = match folder().all(|c| matches!(c, Component::Normal(_))) {
        true => folder().map(|_| "..").collect::<PathBuf>().join(&base),
        false => std::path::absolute(&base)?,
    };
    let sequence = imported.spec.model.context.min(256);
    target.write(
        &include_str!("new/from.dream")
            .replace("\"BASE\"", &format!("{:?}", named.to_string_lossy()))
            .replace("BASE", &base.to_string_lossy())
            .replace("SEQUENCE", &sequence.to_string()),
    )?;
    say!(
        "{}: {} parameters, imported",
        base.display(),
        dreamc_study::number::grouped(imported.parameters.into())
    )?;
    target.next(&format!("dreamc train {}", target.path.display()))
}

/// A file that is not there yet.
struct Target {
    path: PathBuf,
    /// The name of its model.
    name: String,
    spelling: Spelling,
}

impl Target {
    fn new(path: PathBuf) -> Result<Target, Failure> {
        let ending = path.extension().unwrap_or_default().to_string_lossy().into_owned();
        let path = match ending.as_str() {
            "dream" | "yaml" | "yml" => path,
            _ => PathBuf::from(format!("{}.dream", path.display())),
        };
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let right = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if !name.starts_with(|c: char| c.is_ascii_alphabetic()) || !name.chars().all(right) {
            return Err(Failure::Usage(format!(
                "`{name}` is no name of a model: letters, digits, `-`, `_` and `.`, a letter first"
            )));
        }
        let spelling = Spelling::of(&path.to_string_lossy());
        let target = Target { path, name, spelling };
        match target.path.symlink_metadata() {
            Ok(_) => Err(taken(&target.path)),
            Err(_) => Ok(target),
        }
    }

    fn write(&self, template: &str) -> Result<(), Failure> {
        let file = self.path.file_name().unwrap_or_default().to_string_lossy();
        let text = template.replace("FILE", &file).replace("model NAME", &format!("model {}", self.name));
        // Lengths of names differ, and so do the columns of comments after them.
        let text = dreamc_dsl::format(&dreamc_dsl::parse(&file, &text, Spelling::Dream)?, self.spelling)?;
        if let Some(folder) = self.path.parent().filter(|f| !f.as_os_str().is_empty()) {
            std::fs::create_dir_all(folder)?;
        }
        put(&self.path, &text)
    }

    fn next(&self, line: &str) -> Done {
        Ok(say!("{}: written; next:\n  {line}", self.path.display())?)
    }
}

/// Writes a file that is not there yet.
fn put(path: &Path, text: &str) -> Result<(), Failure> {
    match File::create_new(path).and_then(|mut file| file.write_all(text.as_bytes())) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Err(taken(path)),
        written => Ok(written?),
    }
}

fn taken(path: &Path) -> Failure {
    Failure::Usage(format!("{} is there already; choose another name", path.display()))
}

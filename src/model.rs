//! Trained models on the command line.

use crate::failure::Failure;
use crate::spec;
use dreamc_compiler::rewrite::Rewriting;
use dreamc_compiler::{CompileError, Compiled};
use dreamc_dsl::Spec;
use dreamc_dsl::spec::Source;
use dreamc_runtime::checkpoint::{self, safetensors::Tensors};
use dreamc_runtime::data::Tokenizer;
use dreamc_runtime::device::Device;
use dreamc_runtime::generate::{Cached, NextLogits, Uncached, compile_cached};
use dreamc_runtime::model::Model;
use dreamc_runtime::train::prepare;
use std::path::Path;

/// A checkpoint with the specification it was trained from.
pub struct Trained {
    /// The specification, with `--set` applied.
    pub spec: Spec,
    /// The weights.
    pub tensors: Tensors,
    /// Which rewriting rules its programs are compiled with.
    pub rewriting: Rewriting,
}

impl Trained {
    /// Opens a run folder, a checkpoint folder, or a safetensors file that dreamc wrote.
    pub fn open(path: &Path, set: &[String], rewriting: Rewriting) -> Result<Self, Failure> {
        let tensors = checkpoint::open_model(path)?;
        let name = tensors.path().display().to_string();
        let Some(text) = tensors.metadata("spec") else {
            return Err(Failure::Usage(format!(
                "{name} was not written by dreamc: it does not say which specification it belongs to"
            )));
        };
        let spec = spec::parse(&name, text, set)?;
        Ok(Trained { spec, tensors, rewriting })
    }

    /// The tokenizer: the copy in the run's folder, else the one the specification names.
    pub fn tokenizer(&self) -> Result<Tokenizer, Failure> {
        let Some(data) = &self.spec.data else { return Ok(Tokenizer::bytes()) };
        if let dreamc_dsl::spec::Tokenizer::Bytes = data.tokenizer {
            return Ok(Tokenizer::bytes());
        }
        let copy =
            self.tensors.path().ancestors().map(|p| p.join("tokenizer.json")).take(5).find(|p| p.is_file());
        Ok(match copy {
            Some(path) => Tokenizer::from_file(&path)?,
            None => Tokenizer::open(&data.tokenizer, Path::new(""))?,
        })
    }

    /// Whether its training documents began with the begin token. Running text does not.
    pub fn begins(&self) -> bool {
        self.spec.data.iter().flat_map(|d| &d.sources).any(|(source, _)| match source {
            Source::Task(_) => true,
            Source::Text { .. } => false,
            Source::Jsonl { prompt, .. } | Source::Parquet { prompt, .. } => prompt.is_some(),
        })
    }

    /// Something to write with, so many rows at once: with caches, or without where those are not wanted or the model has none.
    pub fn decoder(
        &self,
        device: &dyn Device,
        rows: u64,
        depth: Option<u64>,
        cache: bool,
    ) -> Result<Box<dyn NextLogits>, Failure> {
        let compiled = match cache.then(|| compile_cached(&self.spec, rows, None, depth, &self.rewriting)) {
            Some(Err(CompileError::Unsupported(_))) | None => None,
            Some(result) => Some(result?),
        };
        if let Some(compiled) = compiled {
            let mut cached = Cached::load(device, compiled)?;
            cached.model().restore(&self.tensors)?;
            return Ok(Box::new(cached));
        }
        let mut model = Model::load(device, self.scorer(depth)?)?;
        model.restore(&self.tensors)?;
        Ok(Box::new(Uncached::new(model)))
    }

    /// Compiled to score whole rows.
    pub fn scorer(&self, depth: Option<u64>) -> Result<Compiled, Failure> {
        prepare::scorer(&self.spec, depth, &self.rewriting)?.ok_or_else(|| {
            Failure::Usage(
                "vocabulary × sequence is too large to keep logits of; use a smaller train.sequence".into(),
            )
        })
    }

    /// The tokens of a prompt.
    pub fn prompt(&self, tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>, Failure> {
        let mut ids = if self.begins() { vec![tokenizer.begin()] } else { vec![] };
        ids.extend(tokenizer.encode(text)?);
        Ok(ids)
    }
}

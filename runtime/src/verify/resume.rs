//! A run that was cut off goes on to the same bits.

use super::subject::Subject;
use super::{Checks, Place, Proof, VerifyError};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::safetensors::Tensors;
use crate::data::{Dataset, Settings};
use crate::train::folder::{Place as Folder, RunFolder};
use crate::train::{Prepared, Setup, run};
use dreamc_compiler::Options;
use dreamc_compiler::precision::Narrow;
use dreamc_compiler::rewrite::Rewriting;
use dreamc_dsl::spec::{BadRows, Data, Item, Source, Task, TaskKind, Tokenizer};
use std::path::Path;

/// Steps of the run.
const STEPS: u64 = 6;
/// After which it is cut off.
const CUT: u64 = 3;

/// Resume is bit-equal.
pub struct Resume;

impl Proof for Resume {
    fn name(&self) -> &'static str {
        "resume"
    }

    fn claim(&self) -> &'static str {
        "a resumed run ends with the same bits"
    }

    fn how(&self) -> &'static str {
        "six steps on a generated task, of two micro-batches each, at random depths where the model recurs, against three \
         and three"
    }

    fn prove(&self, s: &Subject, checks: &mut Checks) -> Result<Option<String>, VerifyError> {
        let mut spec = s.spec.clone();
        // The shortest problem of the byte level needs some room.
        spec.model.vocab = spec.model.vocab.max(256);
        spec.model.context = spec.model.context.max(32);
        let task = Task { kind: TaskKind::Permutation, min_steps: 1, max_steps: 2, size: 4 };
        spec.data = Some(Data {
            sources: vec![(Source::Task(task), 1.0)],
            tokenizer: Tokenizer::Bytes,
            validation: 0.0,
            validation_file: None,
            document_mask: spec.data.as_ref().is_some_and(|d| d.document_mask),
            begin: None,
            bad_rows: BadRows::Stop,
        });
        let counts: Vec<u64> = spec
            .model
            .body
            .iter()
            .filter_map(|i| match i {
                Item::Recur { count, .. } => Some(*count),
                _ => None,
            })
            .collect();
        let drawn = crate::train::schedule::depths(&spec).is_some();
        let train = &mut spec.train;
        (train.steps, train.batch, train.accumulate, train.sequence) = (STEPS, 4, 2, Some(32));
        (train.checkpoint.every, train.checkpoint.keep) = (CUT, 4);
        if let ([count], false) = (counts.as_slice(), drawn) {
            train.random_depth = Some((1, *count));
        }
        let depths = crate::train::schedule::possible_depths(&spec);
        let device = s.cpu(1);
        let home = tempfile::tempdir()?;
        let cache = home.path().join("cache");
        let dataset = Dataset::open(
            spec.data.as_ref().unwrap_or(&no_data()),
            &Settings {
                base: Path::new(""),
                cache: &cache,
                sequence: 32,
                vocab: spec.model.vocab,
                seed: spec.train.seed,
                stride: None,
            },
            &mut |_| {},
        )?;
        let options = Options {
            batch: 2,
            sequence: 32,
            train: true,
            segments: crate::train::prepare::masked(&spec),
            depths,
            ..Options::default()
        };
        let prepared = Prepared {
            compiled: s.pipeline.compile(&spec, &options)?,
            scorer: None,
            writer: None,
            observer: None,
            narrow: Narrow::Nothing,
            rows: 2,
            sequence: 32,
            rewriting: Rewriting::default(),
            declared: None,
            rewritten: vec![],
            seconds: 0.0,
        };
        let text = dreamc_dsl::show(&spec, dreamc_dsl::Spelling::Yaml);
        let go = |folder: &RunFolder, from: Option<Checkpoint>| {
            let setup = Setup {
                spec: &spec,
                text: &text,
                device: &device,
                dataset: &dataset,
                folder,
                base: None,
                from,
                allow_changes: false,
                count: false,
            };
            run(prepared.clone(), setup, &mut |_: &crate::train::event::Event| {})
        };
        let make = |name: &str| -> Result<RunFolder, VerifyError> {
            let place = Folder::At { path: home.path().join(name), force: false };
            Ok(RunFolder::create(&place).map_err(crate::train::TrainError::from)?)
        };
        let whole = make("whole")?;
        go(&whole, None)?;
        // Lines that a killed run wrote after its checkpoint.
        let cut = make("cut")?;
        for (from, to) in [(whole.metrics(), cut.metrics()), (whole.events(), cut.events())] {
            std::fs::copy(from, to)?;
        }
        if whole.samples().is_file() {
            std::fs::copy(whole.samples(), cut.samples())?;
        }
        let from = Checkpoint::open(&whole.checkpoints().at(CUT)).map_err(crate::train::TrainError::from)?;
        go(&cut, Some(from))?;
        let last = |folder: &RunFolder| {
            Checkpoint::open(&folder.checkpoints().at(STEPS)).map_err(crate::train::TrainError::from)
        };
        let (a, b) = (last(&whole)?, last(&cut)?);
        for (of, a, b) in [("", &a.model, &b.model), ("optimizer's ", &a.optimizer, &b.optimizer)] {
            tensors(checks, of, a, b)?;
        }
        let cursor = f64::from(u8::from(a.state.cursor != b.state.cursor));
        checks.check("place in the data", cursor, 0.0, Place::default());
        let losses = |folder: &RunFolder| -> Result<Vec<String>, VerifyError> {
            let text = std::fs::read_to_string(folder.metrics())?;
            let loss = |line: &str| {
                let line: serde_json::Value = serde_json::from_str(line).unwrap_or_default();
                format!("{} {} {}", line["step"], line["loss"], line["norm"])
            };
            Ok(text.lines().map(loss).collect())
        };
        let (a, b) = (losses(&whole)?, losses(&cut)?);
        let other = a.iter().zip(&b).filter(|(a, b)| a != b).count() + a.len().abs_diff(b.len());
        checks.check("lines of losses", other as f64, 0.0, Place::default());
        Ok(None)
    }
}

fn no_data() -> Data {
    Data {
        sources: vec![],
        tokenizer: Tokenizer::Bytes,
        validation: 0.0,
        validation_file: None,
        document_mask: false,
        begin: None,
        bad_rows: BadRows::Stop,
    }
}

/// Bits of all tensors of two files.
fn tensors(checks: &mut Checks, of: &str, a: &Tensors, b: &Tensors) -> Result<(), VerifyError> {
    let read = |file: &Tensors, name: &str| {
        file.get(name)
            .map_err(crate::train::TrainError::from)
            .map(|v| v.map(|v| v.1.to_vec()).unwrap_or_default())
    };
    for (name, _) in a.entries() {
        let (x, y) = (read(a, name)?, read(b, name)?);
        let other =
            x.iter().zip(&y).filter(|(a, b)| a.to_bits() != b.to_bits()).count() + x.len().abs_diff(y.len());
        let tensor = name.trim_end_matches(".m").trim_end_matches(".v").trim_end_matches(".counts");
        checks.check(format!("bits of {of}{name}"), other as f64, 0.0, Place::of_tensor(tensor));
    }
    Ok(())
}

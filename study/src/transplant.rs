//! Transplants on the command line's side: the donor opened, vocabularies compared, numbers made,
//! what is claimed proved, and the folder written.

pub mod pairs;

use crate::compare::study::ledger;
use crate::failure::{Done, Failure};
use crate::model::Trained;
use crate::spec::{make_absolute, resolved};
use dreamc_compiler::count;
use dreamc_compiler::rewrite::Rewriting;
use dreamc_compiler::{Options, compile};
use dreamc_data::files;
use dreamc_data::{Batch, Tokenizer, sums};
use dreamc_device::Device;
use dreamc_dsl::spec::{Spec, Tokenizer as Named};
use dreamc_dsl::{Diagnostic, Diagnostics};
use dreamc_runtime::checkpoint::safetensors::write;
use dreamc_runtime::checkpoint::{Weights, folder};
use dreamc_runtime::init;
use dreamc_runtime::model::Model;
use dreamc_runtime::train::prepare::{forward, masked, sequence};
use dreamc_runtime::train::teacher::Plan as Taught;
use dreamc_transplant::{At, Move, Plan, Read, Same, Side, Source, TransplantError, Vocabulary};
use std::io::Write;
use std::path::Path;

/// Tokens by whose logits a claim about a whole model is proved.
const PROVED: u64 = 32;

/// Logits that differ by no more, as a share of the largest, are equal.
const EQUAL: f64 = 1e-5;

/// A specification and its donor.
pub struct Transplantation<'a> {
    /// The specification of the new model, with absolute paths.
    pub spec: &'a Spec,
    /// The donor.
    pub donor: &'a Trained,
    /// The new model.
    pub new: Side,
    /// The old one.
    pub old: Side,
    /// Where every tensor comes from.
    pub plan: Plan,
}

/// How far the logits of the two models differ.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct Proof {
    /// The largest difference, as a share of the largest logit of the donor.
    pub difference: f64,
    /// Tokens that were compared.
    pub tokens: u64,
}

impl<'a> Transplantation<'a> {
    /// Plans.
    pub fn plan(spec: &'a Spec, donor: &'a Trained) -> Result<Self, Failure> {
        let (new, old) = (Side::new(spec)?, Side::new(&donor.spec)?);
        let vocabulary = vocabulary(spec, donor)?;
        let how = spec.transplant.clone().unwrap_or_default();
        let plan = dreamc_transplant::plan(&new, &old, &how, &vocabulary).map_err(|e| located(spec, e))?;
        Ok(Transplantation { spec, donor, new, old, plan })
    }

    /// The numbers of every tensor of the new model.
    pub fn values(&self) -> Result<Vec<Vec<f32>>, Failure> {
        let read = Numbers { weights: &self.donor.tensors, seed: self.spec.train.seed };
        let each = self.plan.moves.iter().zip(&self.new.tensors);
        each.map(|(m, t)| dreamc_transplant::values(m, t.init, &read).map_err(|e| located(self.spec, e)))
            .collect()
    }

    /// The singular values of what each matrix of the donor differs by from the mean of `base`.
    pub fn differences(&self, from: &[Source], base: &[Source]) -> Result<Vec<Vec<f64>>, Failure> {
        let read = Numbers { weights: &self.donor.tensors, seed: self.spec.train.seed };
        dreamc_transplant::differences(from, base, &read).map_err(|e| located(self.spec, e))
    }

    /// The singular values that the short vector of latent attention keeps the largest of; none of
    /// another move.
    pub fn spectrum(&self, m: &Move) -> Result<Option<Vec<f64>>, Failure> {
        let read = Numbers { weights: &self.donor.tensors, seed: self.spec.train.seed };
        dreamc_transplant::spectrum(&m.from, &m.steps, &read).map_err(|e| located(self.spec, e))
    }

    /// Whether the whole model is claimed to be the donor's function, with these numbers of it.
    pub fn claimed(&self) -> Result<bool, Failure> {
        Ok(match self.plan.claims.iter().find(|claim| claim.part == "model").map(|claim| &claim.same) {
            Some(Same::Same) => true,
            Some(Same::IfEqual(groups)) => self.equal(groups)?,
            Some(Same::Silent | Same::Otherwise(_)) | None => false,
        })
    }

    /// Whether the tensors of each group are equal.
    pub fn equal(&self, groups: &[Vec<String>]) -> Result<bool, Failure> {
        for group in groups {
            let Some((first, others)) = group.split_first() else { continue };
            let first = self.donor.tensors.get(first)?;
            for name in others {
                if self.donor.tensors.get(name)? != first {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Compares the logits of both models, each by its own program.
    pub fn prove(&self, values: &[Vec<f32>], device: &dyn Device) -> Result<Proof, Failure> {
        let tokens = PROVED.min(self.spec.model.context).min(self.donor.spec.model.context);
        let options = || Options { logits: true, rewrite: Rewriting::off(), ..forward(1, tokens) };
        let mut own = Model::load(device, compile(self.spec, &options())?)?;
        for (t, values) in self.new.tensors.iter().zip(values) {
            own.set(&t.name, values)?;
        }
        let mut other = Model::load(device, compile(&self.donor.spec, &options())?)?;
        other.restore(&self.donor.tensors)?;
        let vocab = self.spec.model.vocab;
        let ids: Vec<i32> = (0..tokens).map(|i| ((i * 7919 + 13) % vocab) as i32).collect();
        let batch = Batch {
            sequence: tokens as usize,
            targets: ids.clone(),
            positions: (0..tokens as i32).collect(),
            segments: vec![0; tokens as usize],
            bytes: vec![1; tokens as usize],
            ids,
            ..Batch::default()
        };
        own.evaluate(&batch)?;
        other.evaluate(&batch)?;
        let (mut difference, mut largest) = (0f64, 0f64);
        for column in 0..tokens as usize {
            let (own, other) = (own.logits(0, column)?, other.logits(0, column)?);
            for (a, b) in own.iter().zip(&other) {
                largest = largest.max(f64::from(b.abs()));
                // A number that is no number is as far away as any.
                let far = f64::from((a - b).abs());
                difference = if far.is_nan() { f64::INFINITY } else { difference.max(far) };
            }
        }
        Ok(Proof { difference: difference / largest.max(f64::MIN_POSITIVE), tokens })
    }

    /// Proves what is claimed of the whole model; a claim that does not hold is an error.
    pub fn proved(&self, values: &[Vec<f32>], device: &dyn Device) -> Result<Option<Proof>, Failure> {
        if !self.claimed()? {
            return Ok(None);
        }
        let proof = self.prove(values, device)?;
        match proof.holds() {
            true => Ok(Some(proof)),
            false => Err(Failure::Error(
                format!(
                    "the plan says that the model computes the donor's function, and its logits differ by {:.1e}: this is a fault of dreamc; \
                     nothing was written",
                    proof.difference
                )
                .into(),
            )),
        }
    }

    /// Writes the folder of the new model, like that of an import.
    pub fn write(&self, values: &[Vec<f32>], out: &Path, force: bool) -> Result<u64, Failure> {
        folder::free(out, force)?;
        let kept = self.beside()?;
        let mut spec = Spec { transplant: None, weights: None, ..self.spec.clone() };
        let donor = self.donor.tensors.binding()?;
        if let Some(heal) = &mut spec.heal {
            heal.teacher.get_or_insert_with(|| donor.path.clone());
        }
        if let (Some(data), Some(_)) = (&mut spec.data, kept.iter().find(|(n, _)| *n == "tokenizer.json"))
            && matches!(data.tokenizer, Named::File(_))
        {
            // The copy in the folder, wherever the folder goes.
            data.tokenizer = Named::File("tokenizer.json".into());
            make_absolute(&mut spec, &std::path::absolute(out)?);
        }
        let text = resolved(&spec);
        let entries: Vec<_> = self.new.tensors.iter().map(|t| (t.name.clone(), t.shape.clone())).collect();
        let flops = trained_with(&self.donor.tensors)?.map(|flops| flops.to_string());
        let mut metadata = vec![
            ("format", "dreamc"),
            ("spec", text.as_str()),
            ("donor", donor.path.as_str()),
            ("donor_hash", donor.hash.as_str()),
        ];
        metadata.extend(flops.as_deref().map(|flops| ("donor_flops", flops)));
        let mut list: Vec<(&str, sums::Fill)> = vec![
            ("spec.yaml", Box::new(|out: &mut dyn Write| out.write_all(text.as_bytes()))),
            (
                "model.safetensors",
                Box::new(|out: &mut dyn Write| write(out, &metadata, &entries, |i| Ok(values[i].clone()))),
            ),
        ];
        for (name, bytes) in &kept {
            list.push((name, Box::new(move |out: &mut dyn Write| out.write_all(bytes))));
        }
        folder::write(out, list)?;
        Ok(values.iter().map(|v| 4 * v.len() as u64).sum())
    }

    /// The tokenizer of the new model, and what belongs to it.
    fn beside(&self) -> Result<Vec<(&'static str, Vec<u8>)>, Failure> {
        let file = match self.spec.data.as_ref().map(|data| &data.tokenizer) {
            Some(Named::Bytes) => None,
            Some(Named::File(path)) => Some(path.into()),
            None => self.donor.tokenizer_file(),
        };
        let Some(file) = file else { return Ok(vec![]) };
        let mut found = vec![];
        let own = ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json"];
        let named = folder::KEPT.into_iter().filter(|name| *name == "tokenizer.json" || own.contains(name));
        for name in named {
            let path = if name == "tokenizer.json" { file.clone() } else { files::parent(&file).join(name) };
            if path.is_file() {
                found.push((name, std::fs::read(&path).map_err(|error| files::about(&path, error))?));
            }
        }
        Ok(found)
    }
}

/// FLOPs that a run was trained with whose weights these are, those of its own donor and its
/// teacher too; none of weights that are no run's.
fn trained_with(weights: &Weights) -> Result<Option<u64>, Failure> {
    let run = weights.path().ancestors().nth(3);
    let own = run.map(ledger).transpose()?.flatten().map(|ledger| ledger.flops_in_all());
    Ok(own.or_else(|| weights.metadata("donor_flops").and_then(|flops| flops.parse().ok())))
}

/// The teacher of a specification; none where it names none.
fn teacher(spec: &Spec) -> Result<Option<Trained>, Failure> {
    let donor = spec.transplant.as_ref().and_then(|transplant| transplant.from.as_ref());
    let Some(heal) = &spec.heal else { return Ok(None) };
    let Some(path) = heal.teacher.as_ref().or(donor) else { return Ok(None) };
    Trained::open(Path::new(path), None, &[], Rewriting::off()).map(Some)
}

/// FLOPs of the forward of a specification's teacher, a token of all its steps; 0 without one.
pub fn teacher_flops(spec: &Spec) -> Result<f64, Failure> {
    let (Some(heal), Some(teacher)) = (&spec.heal, teacher(spec)?) else { return Ok(0.0) };
    let options = count::Options { tokens: sequence(spec), ..count::Options::default() };
    let each = count::count(&teacher.spec, &options)?.flops_per_token.training_forward.mean();
    Ok(Taught::flops_over(heal, each, spec.train.steps))
}

/// Bytes of a specification's teacher in training, weights in f32 and the forward of a micro-batch
/// of `rows` rows; `None` without a teacher.
pub fn teacher_bytes(spec: &Spec, rows: u64) -> Result<Option<u64>, Failure> {
    let Some(teacher) = teacher(spec)? else { return Ok(None) };
    let options = Options { logits: true, segments: masked(spec), ..forward(rows, sequence(spec)) };
    Ok(Some(compile(&teacher.spec, &options)?.plan.arena))
}

/// FLOPs that the donor of a specification, or of the weights that it begins from, was trained
/// with.
pub fn donor_flops(spec: &Spec) -> Result<Option<u64>, Failure> {
    match (&spec.weights, donor(spec)?) {
        (Some(path), _) => {
            let weights = Weights::open(Path::new(path), None)?;
            Ok(weights.metadata("donor_flops").and_then(|flops| flops.parse().ok()))
        }
        (None, Some(donor)) => trained_with(&donor.tensors),
        (None, None) => Ok(None),
    }
}

/// The donor that a specification names; none where it names none.
pub fn donor(spec: &Spec) -> Result<Option<Trained>, Failure> {
    let Some(from) = spec.transplant.as_ref().and_then(|transplant| transplant.from.as_ref()) else {
        return Ok(None);
    };
    let opened = Trained::open(Path::new(from), None, &[], Rewriting::off());
    opened.map(Some).map_err(|failure| missing(spec, &failure))
}

/// Refuses to replace a folder that holds what a specification begins from or is taught by.
pub fn keep(spec: &Spec, out: &Path) -> Done {
    let donor = spec.transplant.as_ref().and_then(|transplant| transplant.from.as_ref());
    let teacher = spec.heal.as_ref().and_then(|heal| heal.teacher.as_ref());
    let full = |path: &Path| path.canonicalize().or_else(|_| std::path::absolute(path));
    let to = full(out)?;
    for (what, path) in [("donor", donor), ("teacher", teacher), ("weights", spec.weights.as_ref())] {
        if let Some(path) = path
            && full(Path::new(path))?.starts_with(&to)
        {
            let out = out.display();
            return Err(Failure::Usage(format!(
                "--force would replace {out}, which holds the {what} of this model, {path}: choose another --out"
            )));
        }
    }
    Ok(())
}

/// A donor that a specification names and that does not open.
pub fn missing(spec: &Spec, failure: &Failure) -> Failure {
    let error = Diagnostic::error("no-donor", format!("the donor cannot be opened: {failure}"));
    let error = error.help("name a run folder, a checkpoint or an imported model");
    let error = error.at(&spec.sources, "transplant.from");
    Diagnostics::new(spec.sources.clone(), vec![error]).into()
}

/// Refuses a specification that begins with a transplant which cannot be made; nothing is written.
pub fn check(spec: &Spec) -> Done {
    match donor(spec)?.filter(|_| spec.weights.is_none()) {
        Some(donor) => Transplantation::plan(spec, &donor).map(drop),
        None => Ok(()),
    }
}

/// The first weights of a specification that begins with a transplant, made in `folder`; none of
/// any other.
pub fn begin(spec: &Spec, folder: &Path, device: &dyn Device) -> Result<Option<Weights>, Failure> {
    let Some(donor) = donor(spec)? else { return Ok(None) };
    let work = Transplantation::plan(spec, &donor)?;
    let values = work.values()?;
    work.proved(&values, device)?;
    work.write(&values, folder, true)?;
    Ok(Some(Weights::open(folder, None)?))
}

impl Proof {
    /// Whether the two are one function.
    pub fn holds(self) -> bool {
        self.difference <= EQUAL
    }
}

/// Numbers of a donor's file, and those that are drawn.
struct Numbers<'a> {
    weights: &'a Weights,
    seed: u64,
}

impl Read for Numbers<'_> {
    fn donor(&self, name: &str) -> Result<(Vec<u64>, Vec<f32>), TransplantError> {
        let found = self.weights.get(name).map_err(|e| TransplantError::Read(e.to_string()))?;
        let lacking = || {
            TransplantError::Read(format!("{}: it lacks the tensor {name}", self.weights.path().display()))
        };
        found.map(|(shape, values)| (shape.to_vec(), values)).ok_or_else(lacking)
    }

    fn drawn(&self, name: &str, init: dreamc_compiler::compiled::Init, elements: usize) -> Vec<f32> {
        init::values(self.seed, name, init, elements)
    }
}

/// How the vocabularies of the two correspond, by the texts of their tokens.
fn vocabulary(spec: &Spec, donor: &Trained) -> Result<Vocabulary, Failure> {
    let Some(data) = &spec.data else {
        return Ok(match spec.model.vocab == donor.spec.model.vocab {
            true => Vocabulary::Same,
            false => Vocabulary::Unknown,
        });
    };
    let Ok(theirs) = donor.tokenizer() else { return Ok(Vocabulary::Unknown) };
    let ours = Tokenizer::open(&data.tokenizer, Path::new(""))?;
    if ours.fingerprint() == theirs.fingerprint() && spec.model.vocab == donor.spec.model.vocab {
        return Ok(Vocabulary::Same);
    }
    let known: std::collections::HashMap<String, i64> = (0..donor.spec.model.vocab as u32)
        .filter_map(|id| Some((theirs.token(id)?, i64::from(id))))
        .collect();
    let of = |id: u32| ours.token(id).and_then(|text| known.get(&text).copied()).unwrap_or(-1);
    Ok(Vocabulary::ByText((0..spec.model.vocab as u32).map(of).collect()))
}

/// An error at its token of the specification.
fn located(spec: &Spec, error: TransplantError) -> Failure {
    match error {
        TransplantError::Compile(error) => error.into(),
        TransplantError::Refused { code, message, help, at } => {
            let error = Diagnostic::error(code, message).help(help);
            let error = match &at {
                At::Nowhere => error,
                At::Field(field) => error.at(&spec.sources, field),
            };
            Diagnostics::new(spec.sources.clone(), vec![error]).into()
        }
        error @ TransplantError::Read(_) => Failure::Error(Box::new(error)),
    }
}

//! The models whose kernels `dreamc doctor --gpu` proves: the smallest sizes, sizes that are
//! multiples of nothing, and as many tokens as fill a GPU, which then chooses its widest tiles.

use super::{ProofError, Trial};
use crate::Device;
use crate::cuda::CudaDevice;
use dreamc_compiler::program::ProgramKey;
use dreamc_compiler::rewrite::{Rewriting, Target};
use dreamc_compiler::{Options, compile};
use dreamc_dsl::ast::Spelling;
use dreamc_dsl::spec::Precision;

/// A model and a batch of it.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Its name, and the model's.
    pub name: &'static str,
    /// The model, as it is written.
    pub text: &'static str,
    /// Sequences and tokens of each.
    pub batch: (u64, u64),
    /// The precision that its recipe asks for.
    pub precision: Precision,
    /// Whether attention stops at documents.
    pub documents: bool,
}

macro_rules! case {
    ($name:literal, $file:literal, $batch:expr, $precision:ident, $documents:expr) => {
        Case {
            name: $name,
            text: include_str!(concat!("models/", $file, ".dream")),
            batch: $batch,
            precision: Precision::$precision,
            documents: $documents,
        }
    };
}

/// Small ones first: they take no time, and find most.
pub const CASES: [Case; 12] = [
    case!("smallest", "smallest", (1, 3), F32, false),
    case!("smallest-bf16", "smallest", (1, 3), Bf16, false),
    case!("ragged", "ragged", (3, 37), F32, true),
    case!("ragged-bf16", "ragged", (3, 37), Bf16, true),
    case!("skips-bf16", "skips", (2, 30), Bf16, false),
    case!("recurrence", "recurrence", (2, 70), F32, false),
    case!("chunks", "chunks", (3, 150), Bf16, true),
    case!("codes", "codes", (2, 128), Fp8, false),
    case!("mixture", "mixture", (4, 1000), Bf16, false),
    case!("dense", "dense", (4, 512), Bf16, true),
    case!("dense-fp8", "dense", (4, 512), Fp8, true),
    case!("wide-heads", "wide-heads", (6, 390), Bf16, false),
];

/// The programs of a step, and of evaluation.
pub const PROGRAMS: [ProgramKey; 4] =
    [ProgramKey::BACKWARD, ProgramKey::NORM, ProgramKey::UPDATE, ProgramKey::EVALUATE];

impl Case {
    /// The launches of a step of it on a GPU.
    pub fn trial(&self, device: &CudaDevice) -> Result<Trial, ProofError> {
        let failed = |why: String| ProofError::Case { case: self.name, why };
        let ast =
            dreamc_dsl::parse(self.name, self.text, Spelling::Dream).map_err(|d| failed(d.render(false)))?;
        let (spec, _) = dreamc_dsl::check(&ast, &[]).map_err(|d| failed(d.render(false)))?;
        let rewrite = device.sheet().map_or_else(Rewriting::default, |sheet| Rewriting {
            target: Target::of(sheet),
            ..Rewriting::default()
        });
        let options = Options {
            batch: self.batch.0,
            sequence: self.batch.1,
            train: true,
            segments: self.documents,
            rewrite,
            narrow: device.narrow(self.precision),
            ..Options::default()
        };
        let compiled = compile(&spec, &options).map_err(|e| failed(e.to_string()))?;
        Ok(device.trial(&compiled.plan, &PROGRAMS)?)
    }
}

//! Shared by the whole-program tests: golden files and comparisons, and a folder to run the program
//! in.

#![allow(dead_code, unused_imports, reason = "each test uses a part")]

pub mod launch;
pub mod losses;
pub mod minimise;
pub mod ptrace;
pub mod run;
pub mod sandbox;

use dreamc_compiler::ir::interpret::Tensor;
use dreamc_compiler::lower::Shape;
use dreamc_compiler::oracle::{Batch, Oracle};
use dreamc_device::cpu::{CpuDevice, CpuOptions};
use dreamc_device::poison::Poisoned;
use dreamc_dsl::Spec;
use dreamc_dsl::spec::Stream;
use dreamc_verify::shrink;
pub use dreamc_verify::{distance, error};
use indexmap::IndexMap;
use safetensors::{Dtype, SafeTensors};
use std::path::PathBuf;

/// The CPU with unwritten memory poisoned.
pub fn cpu(threads: usize) -> Poisoned<'static> {
    Poisoned(Box::new(CpuDevice::new(CpuOptions { threads: Some(threads) })))
}

/// The golden cases, by file name.
pub const CASES: [&str; 17] = [
    "la",
    "dr",
    "dr_da",
    "eq4",
    "eq6",
    "la_da",
    "prelude_core_coda",
    "nested",
    "window",
    "switch",
    "geglu_relu",
    "gemma",
    "dr_da_deep",
    "mod",
    "mod_recur",
    "mod_depth",
    "mod_threshold",
];

/// The golden cases of the wiring of depth; most stand for a file of `examples/zoo`.
pub const WIRINGS: [&str; 47] = [
    "apart",
    "factors",
    "lanes_embed",
    "keys_replaced",
    "latent",
    "lora",
    "layered",
    "moeut",
    "attention_residuals",
    "attention_residuals_block",
    "attention_sink",
    "biased_experts",
    "choice_network",
    "cross_layer_kv",
    "define_followed",
    "define_losses",
    "denseformer",
    "depth_heads",
    "depth_stream",
    "dora",
    "exit_expected",
    "exit_mean",
    "gated_attention",
    "huginn",
    "hyper_connections_dynamic",
    "hyper_connections_static",
    "looped_iso_depth",
    "mhc",
    "mix_add",
    "mixture_of_recursions",
    "mixture_of_recursions_token",
    "moda",
    "ouro",
    "parcae",
    "partial_latent",
    "partial_rotation",
    "post_norms",
    "relaxed_recursive",
    "router_network",
    "rounded_experts",
    "shared_experts",
    "shared_gains",
    "std_choices",
    "universal_transformer",
    "value_residual",
    "x0_scaled",
    "yoco",
];

/// A golden file: the spec and its tensors in f64.
pub struct Golden {
    pub name: String,
    pub spec: Spec,
    pub tensors: IndexMap<String, Tensor>,
}

/// A path below the repository's root; where a test was built elsewhere `CARGO_MANIFEST_DIR` gives
/// the root.
pub fn root(path: &str) -> PathBuf {
    let built = || env!("CARGO_MANIFEST_DIR").into();
    PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(built)).join(path)
}

/// The golden files of compositions of components.
pub fn goldens() -> Vec<Golden> {
    let found: Vec<Golden> = CASES
        .iter()
        .filter(|name| root(&format!("tests/goldens/{name}.yaml")).exists())
        .map(|name| golden(name))
        .collect();
    assert!(found.len() >= 16, "golden files are missing");
    found
}

/// Those and the golden files of the wiring of depth.
pub fn every_golden() -> Vec<Golden> {
    goldens().into_iter().chain(WIRINGS.iter().map(|name| golden(name))).collect()
}

/// A golden file, by its name.
pub fn golden(name: &str) -> Golden {
    Golden {
        name: name.to_string(),
        spec: load(&format!("tests/goldens/{name}.yaml")),
        tensors: read(&format!("tests/goldens/{name}.safetensors")),
    }
}

/// A spec that must be without errors.
pub fn load(path: &str) -> Spec {
    match dreamc_dsl::load(root(path), &[]) {
        Ok((spec, _)) => spec,
        Err(e) => panic!("{path}: {e}"),
    }
}

/// Specifications of a folder, by name.
pub fn specs(folder: &str) -> Vec<(String, Spec)> {
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(root(folder)).unwrap().flatten().map(|entry| entry.path()).collect();
    files.sort();
    let name = |path: &PathBuf| format!("{folder}/{}", path.file_name().unwrap().to_string_lossy());
    let names = files
        .iter()
        .map(name)
        .filter(|name| !name.contains(".suite.") && (name.ends_with(".yaml") || name.ends_with(".dream")));
    names.map(|name| (name.clone(), load(&name))).collect()
}

/// Of specifications that are the same when they are made small the first.
pub fn models(specs: Vec<(String, Spec)>) -> Vec<(String, Spec)> {
    let (files, mut seen) = (specs.len(), Vec::<(Spec, String)>::new());
    let mut distinct = vec![];
    for (name, spec) in specs {
        let mut small = shrink(&spec, false).spec;
        small.model.name = String::new();
        match seen.iter().find(|(s, _)| s.model == small.model && s.data == small.data) {
            Some((_, other)) => println!("{name}: as {other}"),
            None => {
                seen.push((small, name.clone()));
                distinct.push((name, spec));
            }
        }
    }
    println!("{files} files, {} models", distinct.len());
    // Small folders hold no duplicates; `shrink` must not make all of a large one equal.
    assert!(distinct.len() >= files.min(6));
    distinct
}

/// Tensors of a file as f64 or i32.
pub fn read(path: &str) -> IndexMap<String, Tensor> {
    let bytes = std::fs::read(root(path)).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut all: IndexMap<String, Tensor> = IndexMap::new();
    for (name, view) in file.tensors() {
        let data = view.data();
        let tensor = match view.dtype() {
            Dtype::F64 => Tensor::float(
                view.shape(),
                data.chunks_exact(8).map(|c| f64::from_le_bytes(c.try_into().unwrap())).collect(),
            ),
            Dtype::F32 => Tensor::float(
                view.shape(),
                data.chunks_exact(4).map(|c| f32::from_le_bytes(c.try_into().unwrap()) as f64).collect(),
            ),
            Dtype::I64 => Tensor::int(
                view.shape(),
                data.chunks_exact(8).map(|c| i64::from_le_bytes(c.try_into().unwrap()) as i32).collect(),
            ),
            other => panic!("{name}: {other:?}"),
        };
        all.insert(name, tensor);
    }
    all
}

impl Golden {
    /// The bound of each gradient of a device in f32: 1e-5, or `times` times what rounding every
    /// value of the interpreter changes, the least that f32 does. That is more where a model
    /// magnifies what goes in (`nested` is nine applications deep at hidden size 8; of `mod_depth`
    /// the gradient of a norm of keys along depth is small), and of lanes and sources, which have
    /// gradients near zero.
    #[allow(dead_code)]
    pub fn bounds(&self, times: f64) -> impl Fn(&str) -> f64 {
        let magnifies = ["huginn", "mod_depth", "nested"].contains(&self.name.as_str());
        let measured = magnifies || self.spec.model.stream != Stream::Sum;
        let rounding = if measured { self.rounding() } else { IndexMap::new() };
        move |name| (times * rounding.get(name).unwrap_or(&0.0)).max(1e-5)
    }

    #[allow(dead_code)]
    fn rounding(&self) -> IndexMap<String, f64> {
        let ids = &self.tensors["ids"];
        let (b, n) = (ids.dims[0], ids.dims[1] - 1);
        let shape = Shape { batch: b as u64, sequence: n as u64, ..Shape::default() };
        let oracle = Oracle::new(&self.spec.model, shape, None).unwrap();
        let (ids, targets) = self.batch(ids.ints(), n);
        let (weights, batch) = (self.with_prefix("weights."), Batch { ids, targets, ..Batch::default() });
        let exact = oracle.evaluate(&weights, &batch).unwrap();
        let rounded = oracle.evaluate_rounded(&weights, &batch).unwrap();
        let off = |(name, g): (&String, &Tensor)| {
            (name.clone(), distance(rounded.gradients[name].floats(), g.floats()))
        };
        exact.gradients.iter().map(off).collect()
    }

    /// Logits of what a model writes: where tokens skip, the reference says what that is without
    /// looking ahead.
    pub fn written(&self) -> &[f64] {
        self.tensors.get("inference.logits").unwrap_or(&self.tensors["logits"]).floats()
    }

    /// Tensors whose names begin with a prefix, without it.
    #[allow(dead_code)]
    pub fn with_prefix(&self, prefix: &str) -> IndexMap<String, Tensor> {
        self.tensors
            .iter()
            .filter_map(|(n, t)| n.strip_prefix(prefix).map(|n| (n.to_string(), t.clone())))
            .collect()
    }

    /// Input ids and targets of rows of `n + 1` ids.
    pub fn batch(&self, ids: &[i32], n: usize) -> (Vec<i32>, Vec<i32>) {
        let rows = ids.chunks_exact(n + 1);
        (rows.clone().flat_map(|r| r[..n].to_vec()).collect(), rows.flat_map(|r| r[1..].to_vec()).collect())
    }
}

/// A Python with the packages of `tests/clients`: `DREAMC_CLIENTS`, or `.venv-clients`.
pub fn python() -> Option<std::path::PathBuf> {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = std::env::var_os("DREAMC_CLIENTS").map_or(root.join(".venv-clients"), Into::into);
    let python = folder.join("bin/python");
    if !python.is_file() {
        dreamc_skip::skip(
            "no clients: `python3 -m venv .venv-clients`, and pip install -r tests/clients/requirements.txt there",
        );
    }
    python.is_file().then_some(python)
}

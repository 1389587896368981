//! Heads turned into latents, against the paper's formulas on plain attention
//! (`tests/reference/latent_values.py`).

use crate::support::{cpu, error, read};
use dreamc_compiler::compiled::Init;
use dreamc_compiler::{Options, compile};
use dreamc_data::Batch;
use dreamc_dsl::{Spec, Spelling, check, parse};
use dreamc_runtime::model::Model;
use dreamc_runtime::train::prepare::forward;
use dreamc_transplant::{Read, Same, Side, TransplantError, Vocabulary, plan, values};
use indexmap::IndexMap;

type Tensors = IndexMap<String, dreamc_compiler::ir::interpret::Tensor>;

fn spec(sa: &str) -> Spec {
    let text = format!(
        "model m {{ vocab 17 hidden 12 context 16 sa = sequence {{ heads 4 head_size 8 qk_norm none rope 100 {sa} }} \
         mlp = mlp {{ intermediate 10 }} repeat 2 {{ sa > mlp }} }}"
    );
    check(&parse("m.dream", &text, Spelling::Dream).unwrap(), &[]).unwrap_or_else(|e| panic!("{e}")).0
}

struct Donor<'a>(&'a Tensors);

impl Read for Donor<'_> {
    fn donor(&self, name: &str) -> Result<(Vec<u64>, Vec<f32>), TransplantError> {
        let found = &self.0[&format!("weights.{name}")];
        let shape = found.dims.iter().map(|n| *n as u64).collect();
        Ok((shape, found.floats().iter().map(|x| *x as f32).collect()))
    }

    fn drawn(&self, name: &str, _: Init, _: usize) -> Vec<f32> {
        panic!("{name} begins anew")
    }
}

#[test]
fn latents_compute_what_the_paper_leaves_of_heads() {
    let golden = read("tests/goldens/transplants/latents.safetensors");
    let ids: Vec<i32> = golden["ids"].ints().to_vec();
    let n = ids.len();
    let old = spec("kv_heads 2 projection none");
    for (name, latent, whole) in [
        ("high", "kv 5 turned 4 pairs high", false),
        ("low", "kv 3 turned 4 pairs low", false),
        ("uniform", "kv 12 turned 4 pairs uniform", false),
        ("chosen", "kv 4 turned 4 pairs [[0, 3], [1, 2]]", false),
        ("full", "kv 12 turned 8 pairs high", true),
        // As many numbers as the values have are enough where all of keys turns, and more are no
        // matter; a rotation of all elements of its own is that of the head.
        ("full", "kv 40 turned 8", true),
        // Queries of their own short vector.
        ("full", "query 12 kv 12 turned 8", true),
    ] {
        let new = spec(&format!("latent {{ {latent} value 8 norm none keys 2 }}"));
        let sides = (Side::new(&new).unwrap(), Side::new(&old).unwrap());
        let plan = plan(&sides.0, &sides.1, &Default::default(), &Vocabulary::Same).unwrap();
        let claim = &plan.claims.iter().find(|claim| claim.part == "model").unwrap().same;
        assert_eq!(*claim == Same::Same, whole, "{name} {latent}: {claim:?}");
        let options = Options { logits: true, ..forward(1, n as u64) };
        let mut model = Model::load(&cpu(1), compile(&new, &options).unwrap()).unwrap();
        for (m, weight) in plan.moves.iter().zip(&sides.0.tensors) {
            model.set(&m.to, &values(m, weight.init, &Donor(&golden)).unwrap()).unwrap();
        }
        let mut batch = Batch::new(n);
        (batch.ids, batch.targets) = (ids.clone(), vec![0; n]);
        (batch.positions, batch.segments) = ((0..n as i32).collect(), vec![0; n]);
        model.evaluate(&batch).unwrap();
        let found: Vec<f64> = model.all_logits().unwrap().into_iter().map(f64::from).collect();
        let apart = error(&found, golden[&format!("logits.{name}")].floats());
        assert!(apart < 1e-5, "{name} {latent}: {apart:.1e}");
    }
}

//! Faults in matmuls that read e4m3: an operand that is not rounded. Those of the forward and of
//! the cotangents are noticed by `compiler/tests/fp8.rs`, one operand after another.

use super::{Edit, Fault, Stage};
use dreamc_compiler::ir::{DType, Op};
use dreamc_compiler::op::{Cast, Fp8};

/// Layers that are applied once, with experts.
pub const LAYERS: &str = "
    sa: {sequence: {heads: 4, kv_heads: 2, head_size: 4}}
    mlp: {mlp: {intermediate: 7}}
    ea: {experts: {count: 5, active: 2, intermediate: 6, query: 4}}
  body: [\"sa > mlp\", \"sa > ea\"]
train: {steps: 6, batch: 4, weight_decay: 0.1, learning_rate: 0.01, precision: fp8}";

/// Makes a cast of each value that is rounded by such tiles.
macro_rules! unrounded {
    ($is:expr) => {
        |_, f| {
            let is: fn(&Fp8) -> bool = $is;
            let mut found = false;
            for node in &mut f.nodes {
                if matches!(&node.op, Op::Fp8(tiles) if is(tiles)) {
                    (node.op, found) = (Cast(DType::Bf16).into(), true);
                    node.inputs.truncate(1);
                }
            }
            found
        }
    };
}

pub fn faults() -> Vec<Fault> {
    let fault = |name, edit: Edit| Fault {
        name,
        spec: LAYERS,
        stage: Stage::Narrow(edit),
        caught: "fp8",
        place: ["", ""],
    };
    vec![
        fault(
            "fp8: weights that are not rounded",
            unrounded!(|t| t.tile[0] > 1 && t.tile[1] > 1 && t.outer == 0),
        ),
        fault(
            "fp8: experts that are not rounded",
            unrounded!(|t| t.tile[0] > 1 && t.tile[1] > 1 && t.outer == 1),
        ),
        fault(
            "fp8: gradients of activations that are not rounded",
            unrounded!(|t| t.tile[1] == 1 && !t.groups),
        ),
        fault("fp8: gradients of experts' slots that are not rounded", unrounded!(|t| t.groups)),
    ]
}

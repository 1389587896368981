//! The compiler's oracle against the independent reference: logits, loss and every gradient.

use crate::support::{error, every_golden};
use dreamc_compiler::lower::Shape;
use dreamc_compiler::oracle::{Batch, Oracle};
use dreamc_compiler::rewrite::{Rewriting, Target};

#[test]
fn the_interpreter_agrees_with_the_reference() {
    agree(&Rewriting::off());
}

#[test]
fn what_was_rewritten_agrees_with_the_reference() {
    for target in ["cpu", "h100"] {
        let target = Target::named(target).unwrap();
        agree(&Rewriting { target, ..Rewriting::default() });
    }
}

fn agree(rewriting: &Rewriting) {
    for golden in every_golden() {
        let ids = &golden.tensors["ids"];
        let (b, n) = (ids.dims[0], ids.dims[1] - 1);
        let z_loss = golden.spec.train.z_loss;
        let shape = Shape { batch: b as u64, sequence: n as u64, z_loss, ..Shape::default() };
        let oracle = Oracle::rewritten(&golden.spec.model, shape, None, rewriting).unwrap();
        let weights = golden.with_prefix("weights.");
        let named: Vec<String> = oracle.tensors().iter().map(|t| t.0.clone()).collect();
        for name in weights.keys() {
            assert!(named.contains(name), "{}: the model has no tensor {name}", golden.name);
        }
        for (name, dims, ..) in oracle.tensors() {
            let expected = weights
                .get(&name)
                .unwrap_or_else(|| panic!("{}: the reference has no tensor {name}", golden.name));
            assert_eq!(
                dims.iter().map(|&d| d as usize).collect::<Vec<_>>(),
                expected.dims,
                "{}: {name}",
                golden.name
            );
        }
        let (inputs, targets) = golden.batch(ids.ints(), n);
        let found = oracle.evaluate(&weights, &Batch { ids: inputs, targets, ..Batch::default() }).unwrap();
        let e = error(found.logits.floats(), golden.tensors["logits"].floats());
        assert!(e < 1e-9, "{}: logits differ by {e}", golden.name);
        let e = error(&[found.loss], golden.tensors["loss"].floats());
        assert!(e < 1e-9, "{}: loss differs by {e}", golden.name);
        let expected = golden.with_prefix("gradients.");
        for (name, gradient) in &expected {
            let there =
                found.gradients.get(name).unwrap_or_else(|| panic!("{}: no gradient of {name}", golden.name));
            // Gradients that are zero by nature hold rounding noise on both sides.
            let scale = gradient.floats().iter().fold(0.0f64, |m, x| m.max(x.abs()));
            let e = if scale < 1e-12 {
                there.floats().iter().fold(0.0f64, |m, x| m.max(x.abs()))
            } else {
                error(there.floats(), gradient.floats())
            };
            assert!(e < 1e-9, "{}: gradient of {name} differs by {e}", golden.name);
        }
        for name in found.gradients.keys() {
            assert!(expected.contains_key(name), "{}: unexpected gradient of {name}", golden.name);
        }
    }
}

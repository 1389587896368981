//! Figures are counts of what happens.

use super::subject::{ROWS, Subject, of};
use super::{Checks, Place, Proof, VerifyError};
use crate::device::Instrument;
use dreamc_compiler::compiled::TensorKind;
use dreamc_compiler::count::Options;
use dreamc_compiler::count::executed::{Masks, executed};
use dreamc_compiler::ir::Extents;
use dreamc_compiler::lower::{Form, Shape};
use dreamc_compiler::oracle::Batch;
use dreamc_compiler::rewrite::Rewriting;
use dreamc_dsl::spec::Component;

/// Executed work and tensors are as many as counted.
pub struct Counts;

impl Proof for Counts {
    fn name(&self) -> &'static str {
        "counts"
    }

    fn claim(&self) -> &'static str {
        "executed FLOPs and parameters equal the count"
    }

    fn how(&self) -> &'static str {
        "multiply-adds of every launch by the device's counter; of a decoded text by the interpreter's; elements of every tensor"
    }

    fn prove(&self, s: &Subject, checks: &mut Checks) -> Result<Option<String>, VerifyError> {
        let device = s.cpu(1);
        let t = s.sequence() as u64;
        let counts = s.pipeline.count(&s.spec, &Options { tokens: t, ..Options::default() })?;
        let exact = |checks: &mut Checks, what: String, found: u128, expected: u128, place: Place| {
            checks.check(what, found.abs_diff(expected) as f64, 0.0, place);
        };

        // Launch by launch.
        let mut model = s.load(&device, &s.options())?;
        model.session().instrument(Instrument { count: true, time: false });
        let plan = model.compiled().plan.clone();
        let masks = Masks { positions: &s.batch.positions, key_positions: &[], segments: &s.batch.segments };
        for program in ["backward", "evaluate"] {
            let expected = executed(&plan, program, &|launch| masks.extents(plan.kernel(launch.kernel)))?;
            let stats = if program == "backward" {
                let scale = crate::model::Scale { loss: 1.0, auxiliary: 1.0 };
                model.backward(&s.batch, scale, None)?
            } else {
                model.evaluate(&s.batch)?;
                model.session().run("evaluate")?
            };
            let places = of_origins(s);
            for (e, f) in expected.launches.iter().zip(&stats.by_launch) {
                let (counted, found) = (e.multiply_adds, u128::from(f.multiply_adds));
                // Of what no-op experts and tokens that skip leave undone the count is a bound.
                let counted = if e.open && found < counted { found } else { counted };
                exact(checks, format!("{program}, {}", e.origin), found, counted, places(&e.origin));
            }
            exact(
                checks,
                format!("launches of {program}"),
                stats.by_launch.len() as u128,
                expected.launches.len() as u128,
                Place::default(),
            );
        }
        if s.samples() && !s.compile(&s.options())?.plan.buffers.iter().any(|b| b.name.ends_with(".cached")) {
            let options = s.cached_options(&Rewriting::default());
            let compiled = s.compile(&options)?;
            // Positions are data: of all zeros every query sees every place.
            let mut session = crate::device::Device::load(&device, &compiled.plan)?;
            session.instrument(Instrument { count: true, time: false });
            let skips = compiled.plan.buffers.iter().any(|b| b.name.ends_with(".cached"));
            let cache = options.cache.map_or((0, 0), |c| (c.places, c.chunk));
            for (program, tokens) in [("prefill", cache.1), ("decode", 1)] {
                if skips {
                    break;
                }
                let pairs = ROWS as u64 * cache.0 * tokens;
                let known = Extents { pairs: Some(pairs), ..Extents::default() };
                let expected = executed(&compiled.plan, program, &|_| known)?;
                let stats = session.run(program)?;
                let places = of_origins(s);
                for (e, f) in expected.launches.iter().zip(&stats.by_launch) {
                    let (counted, found) = (e.multiply_adds, u128::from(f.multiply_adds));
                    let counted = if e.open && found < counted { found } else { counted };
                    exact(checks, format!("{program}, {}", e.origin), found, counted, places(&e.origin));
                }
            }
        }

        // What is declared, by the interpreter.
        let shape = Shape { batch: 1, sequence: t, ..Shape::default() };
        let declared = s.pipeline.oracle(&s.spec.model, shape, None, &Rewriting::off(), Form::Declared)?;
        let all = of(&s.plain);
        let row = t as usize;
        let batch =
            Batch { ids: all.ids[..row].to_vec(), targets: all.targets[..row].to_vec(), ..Batch::default() };
        let done = 2 * u128::from(declared.forward(&s.weights, &batch, None)?.multiply_adds);
        let counted = counts.flops_per_token.decode.total;
        let leaves_out =
            s.spec.model.components.values().any(|c| matches!(c, Component::Experts(e) if e.noop > 0));
        let counted = if leaves_out && done < counted { done } else { counted };
        exact(checks, "FLOPs of decoding a text".into(), done, counted, Place::default());

        // Parameters.
        let tensors = &model.compiled().tensors;
        let elements = |balance: bool| {
            let of = tensors.iter().filter(|t| (t.kind == TensorKind::Balance) == balance);
            of.map(|t| u128::from(t.shape.iter().product::<u64>())).sum::<u128>()
        };
        exact(checks, "parameters".into(), elements(false), counts.parameters.total, Place::default());
        exact(
            checks,
            "entries of balancing biases".into(),
            elements(true),
            counts.parameters.balance,
            Place::default(),
        );
        for (component, counted) in &counts.parameters.by_component {
            if !s.spec.model.components.contains_key(component) {
                continue;
            }
            let of = |name: &str| Place::of_tensor(name).component.as_deref() == Some(component);
            let found = tensors.iter().filter(|t| t.kind != TensorKind::Balance && of(&t.name));
            let found = found.map(|t| u128::from(t.shape.iter().product::<u64>())).sum::<u128>();
            let place = Place { layer: None, component: Some(component.clone()) };
            exact(checks, format!("parameters of {component}"), found, *counted, place);
        }
        Ok(None)
    }
}

/// The layer of a launch's origin, `layer0: …`.
fn of_origins(_: &Subject) -> impl Fn(&str) -> Place {
    |origin: &str| {
        let layer = origin.split([':', '.', ' ']).next().filter(|l| l.starts_with("layer"));
        Place { layer: layer.map(str::to_string), component: None }
    }
}

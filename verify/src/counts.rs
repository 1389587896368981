//! Figures are counts of what happens.

use super::decoding::any_skip;
use super::subject::{ROWS, Subject, of};
use super::{Checks, Place, Proof, VerifyError, blame};
use dreamc_compiler::Compiled;
use dreamc_compiler::architecture::{Architecture, names};
use dreamc_compiler::bind::Owner;
use dreamc_compiler::compiled::{Entry, TensorKind};
use dreamc_compiler::count::executed::{Executed, Masks, executed};
use dreamc_compiler::count::{Options, counted_as};
use dreamc_compiler::ir::Extents;
use dreamc_compiler::lower::{Form, Shape, attention};
use dreamc_compiler::op::kernel::Units;
use dreamc_compiler::oracle::Batch;
use dreamc_compiler::program::{KernelKind, ProgramKey};
use dreamc_compiler::rewrite::Rewriting;
use dreamc_device::{Group, Instrument, RunStats};
use dreamc_dsl::define::graph::{Attend, Function, Node};
use dreamc_dsl::spec::{Component, Item, Model, SkipKv};

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
        for program in [ProgramKey::BACKWARD, ProgramKey::EVALUATE] {
            let expected = executed(&plan, program, &|launch| masks.extents(&plan, launch))?;
            let stats = if program.is_backward() {
                let scale = dreamc_runtime::model::Scale { loss: 1.0, auxiliary: 1.0 };
                model.backward(&s.batch, scale, None)?
            } else {
                model.evaluate(&s.batch)?;
                model.session().run(ProgramKey::EVALUATE)?
            };
            launches(s, checks, program, &expected, &stats);
        }
        let options = s.cached_options(&Rewriting::default());
        let writing = if s.samples() { Some(s.compile(&options)?) } else { None };
        // Where tokens skip, a cache that says nothing of itself is full; where attention skips and
        // its keys are those of the first pass, so is the number of queries.
        let sequence = |c: &str| matches!(s.spec.model.components.get(c), Some(Component::Sequence(_)));
        let queries = any_skip(s, &|_, inner| names(inner).into_iter().any(sequence));
        let skips =
            |c: &Compiled| queries || c.caches(Entry::Prefill, attention::part::CACHED).next().is_some();
        if let (Some(compiled), Some(cache)) = (writing.filter(|c| !skips(c)), options.cache) {
            // Not poisoned: inputs stay the zeros that they begin as.
            let mut session = device.0.load(&compiled.plan, &Group::alone())?;
            if compiled.plan.programs.contains_key(&ProgramKey::PREPARE) {
                session.run(ProgramKey::PREPARE)?;
            }
            session.instrument(Instrument { count: true, time: false });
            for (program, tokens) in [(ProgramKey::PREFILL, cache.chunk), (ProgramKey::DECODE, 1)] {
                // Positions are data: of all zeros every query sees every place. Which keys are
                // chosen is data, too: of those launches this is the most there can be.
                let pairs = ROWS as u64 * cache.places * tokens;
                let counted = |most: bool| {
                    executed(&compiled.plan, program, &|launch| match &compiled
                        .plan
                        .kernel(launch.kernel)
                        .work()
                        .units
                    {
                        Units::Pairs { attention, shape, .. } if attention.listed() => {
                            let pairs = most.then(|| pairs * attention.times(shape.heads));
                            Extents { pairs, ..Extents::default() }
                        }
                        _ => Extents { pairs: Some(pairs), ..Extents::default() },
                    })
                };
                let mut expected = counted(true)?;
                for (launch, open) in expected.launches.iter_mut().zip(counted(false)?.launches) {
                    launch.open = open.open;
                }
                launches(s, checks, program, &expected, &session.run(program)?);
            }
        }

        // Declared multiply-adds, by the interpreter. Choices of no-op experts are declared as a
        // mean, so without them.
        let mut spec = s.spec.clone();
        let mut idle = false;
        for component in spec.model.components.values_mut() {
            if let Component::Experts(e) = component
                && e.noop > 0
            {
                idle = true;
                (e.noop, e.active) = (0, e.active.min(e.count));
            }
        }
        let without = if idle { Some(s.with(spec)?) } else { None };
        let one = without.as_ref().unwrap_or(s);
        let shape = Shape { batch: 1, sequence: t, ..Shape::default() };
        let declared = s.pipeline.oracle(&one.spec.model, shape, None, &Rewriting::off(), Form::Declared)?;
        let all = of(s, &s.plain);
        let row = t as usize;
        let batch =
            Batch { ids: all.ids[..row].to_vec(), targets: all.targets[..row].to_vec(), ..Batch::default() };
        let forward = declared.forward(&one.weights, &batch, None)?;
        let [done, attended] = [forward.multiply_adds, forward.attended].map(|n| 2 * u128::from(n));
        let text = s.pipeline.count(&one.spec, &Options { tokens: t, ..Options::default() })?;
        let counted = text.flops_per_token.decode.total;
        // Which keys chosen tokens see depends on which were chosen, where there is a window, where
        // others have keys, too, and where tokens merge: the count is of even distances.
        let spec = &s.spec.model;
        let windows = |c: &str| spec.components.get(c).is_some_and(|c| c.sees_by_place(spec));
        let shared = queries && first_keys(&s.spec.model.body);
        let chooses = spec.components.values().any(|c| chooses_less(spec, c));
        let varies = shared
            || chooses
            || any_skip(s, &|skip, inner| {
                skip.merge || skip.kv == SkipKv::All || names(inner).into_iter().any(windows)
            });
        let attention = text.flops_per_token.decode_by_kind.get("sequence_attention").map_or(0, |k| k.total);
        let open = if varies { attention } else { 0 };
        let off = done.abs_diff(counted).saturating_sub(open);
        checks.check("FLOPs of decoding a text", off as f64, 0.0, Place::default());
        // Everything else is exact, whatever the keys are.
        let off = (done - attended).abs_diff(counted - attention);
        checks.check("FLOPs of decoding a text without attention", off as f64, 0.0, Place::default());

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
        let architecture = Architecture::new(&s.spec.model, None)?;
        for (i, component) in s.spec.model.components.keys().enumerate() {
            let Some(counted) = counts.parameters.by_component.get(&counted_as(component)) else { continue };
            let of = |owner: Owner| architecture.outermost(owner) == Owner::Component(i as u32);
            let found = tensors.iter().filter(|t| t.kind != TensorKind::Balance && of(t.owner));
            let found = found.map(|t| u128::from(t.shape.iter().product::<u64>())).sum::<u128>();
            let place = Place { layer: None, component: Some(component.clone()) };
            exact(checks, format!("parameters of {component}"), found, *counted, place);
        }
        Ok(None)
    }
}

/// Whether an attention of a component sees fewer keys than its choice says.
fn chooses_less(model: &Model, component: &Component) -> bool {
    let Component::Defined(defined) = component else { return false };
    let Ok(graph) = defined.graph(model) else { return false };
    let less = |operand: u32, a: &Attend, node: &Node| {
        let choice = node.args.get(operand as usize).map(|arg| &graph.region.node(*arg).function);
        let begins =
            matches!(choice, Some(Function::Choose(c)) if c.near == 0 && (c.first > 0 || c.block > 1));
        a.window.is_some() || begins
    };
    graph.region.nodes.iter().any(|node| match &node.function {
        Function::Attend(a) => a.among.is_some_and(|(operand, _)| less(operand, a, node)),
        Function::Apply(applied) => chooses_less(model, &applied.component),
        _ => false,
    })
}

/// Whether passes of some loop use the keys and values of its first.
fn first_keys(items: &[Item]) -> bool {
    items.iter().any(|item| match item {
        Item::Layer(_) | Item::Statement(_) => false,
        Item::Repeat { items, .. } => first_keys(items),
        Item::Recur { items, looping, .. } => !looping.kv.is_own() || first_keys(items),
    })
}

/// Multiply-adds launch by launch.
fn launches(s: &Subject, checks: &mut Checks, program: ProgramKey, counted: &Executed, found: &RunStats) {
    for (e, f) in counted.launches.iter().zip(&found.by_launch) {
        let found = u128::from(f.multiply_adds);
        // Of what no-op experts and tokens that skip leave undone the count is a bound.
        let good = found == e.multiply_adds || (e.open && found < e.multiply_adds);
        let off = if good { 0 } else { found.abs_diff(e.multiply_adds) };
        checks.check(format!("{program}, {}", e.origin), off as f64, 0.0, blame::of_origin(s, &e.origin));
    }
    let off = counted.launches.len().abs_diff(found.by_launch.len());
    checks.check(format!("launches of {program}"), off as f64, 0.0, Place::default());
}

//! Faults in the moves of a transplant: the logits of both programs notice each.

use dreamc_compiler::compiled::Init;
use dreamc_compiler::{Options, compile};
use dreamc_data::Batch;
use dreamc_device::cpu::{CpuDevice, CpuOptions};
use dreamc_dsl::{Spec, Spelling, check, parse};
use dreamc_runtime::init;
use dreamc_runtime::model::Model;
use dreamc_transplant::{
    Latent, Move, Plan, Read, Same, Side, Step, TransplantError, Vocabulary, plan, values,
};
use libtest_mimic::Failed;

const SA: &str = "sa = sequence { heads 4 kv_heads 2 head_size 4 projection none }";
const DENSE: &str = "mlp = mlp { intermediate 12 }\nrepeat 2 { sa > mlp }";
const SPARSE: &str = "ea = experts { count 4 active 2 intermediate 12 query 8 }\nrepeat 2 { sa > ea }";
const DEEP: &str = "mlp = mlp { intermediate 12 }\nrepeat 4 { sa > mlp }";
const LOOPED: &str = "mlp = mlp { intermediate 12 }\nrecur 2 residual_norm false { layer { sa > mlp } }";
const LOW: &str = "mlp = mlp { intermediate 12 }\nrecur 2 residual_norm false lora 16 { layer { sa > mlp } }";
/// Heads whose queries and keys are not normalised, and the latents that are the same function.
const HEADS: &str = "sa = sequence { heads 4 kv_heads 2 head_size 4 qk_norm none projection none }";
const LATENT: &str =
    "sa = sequence { heads 4 head_size 4 latent { kv 8 turned 4 value 4 norm none keys 2 pairs high } }";
/// A donor that turns in part, so that keys are factored too.
const PARTLY: &str = "sa = sequence { heads 4 kv_heads 2 head_size 4 qk_norm none rope { base 100 share 0.5 } projection none }";
const PARTLY_LATENT: &str = "sa = sequence { heads 4 head_size 4 rope { base 100 share 0.5 } latent { kv 12 turned 2 value 4 norm none keys 2 pairs [0] } }";
const WIDE: &str = "mlp = mlp { intermediate 20 }\nrepeat 2 { sa > mlp }";

/// A fault in a plan whose claim holds without it.
pub struct Fault {
    pub name: &'static str,
    /// Text before the model.
    before: &'static str,
    /// Its attention, and its other components with the layers.
    model: [&'static str; 2],
    /// The donor's attention; layers are those of [`DENSE`].
    donor: &'static str,
    /// Parts of the donor that are equal, so that its function stays where means are taken.
    equal: Equal,
    edit: fn(&mut Plan) -> bool,
}

/// Parts of a donor that are equal.
#[derive(Clone, Copy, PartialEq)]
enum Equal {
    Nothing,
    /// Layers.
    Layers,
    /// Gains of layers.
    Gains,
    /// The two heads of keys, and of values, that become one. No claim says that it is so.
    Heads,
}

fn spec(before: &str, [sa, rest]: [&str; 2]) -> Spec {
    let text = format!("{before}\nmodel m {{ vocab 17 hidden 16 context 16\n{sa}\n{rest} }}\n");
    check(&parse("spec", &text, Spelling::Dream).unwrap(), &[]).unwrap_or_else(|e| panic!("{e}")).0
}

pub fn faults() -> Vec<Fault> {
    let manyfold = "sa = sequence { heads 4 kv_heads 4 head_size 4 projection none }";
    let padded = "transplant { map [{ to \"layers.*.mlp\" how pad }] }";
    let grown = "transplant { depth zero }";
    vec![
        Fault {
            name: "experts of another layer's network",
            before: "",
            model: [SA, SPARSE],
            donor: SA,
            equal: Equal::Nothing,
            edit: |plan| {
                of(plan, "layers.0.ea.up.weight", |m| m.from[0].name = "layers.1.mlp.up.weight".into())
            },
        },
        Fault {
            name: "one expert of noise",
            before: "",
            model: [SA, SPARSE],
            donor: SA,
            equal: Equal::Nothing,
            edit: |plan| of(plan, "layers.1.ea.down.weight", |m| m.noise = 0.5),
        },
        Fault {
            name: "a norm that begins anew",
            before: "",
            model: [SA, SPARSE],
            donor: SA,
            equal: Equal::Nothing,
            edit: |plan| of(plan, "layers.1.ea.norm.weight", |m| m.steps = vec![Step::Zero]),
        },
        Fault {
            name: "a layer that was added and writes the stream",
            before: grown,
            model: [SA, DEEP],
            donor: SA,
            equal: Equal::Nothing,
            edit: |plan| of(plan, "layers.1.mlp.down.weight", |m| m.steps = vec![Step::Fresh]),
        },
        Fault {
            name: "columns of a wider network that begin by the recipe",
            before: padded,
            model: [SA, WIDE],
            donor: SA,
            equal: Equal::Nothing,
            edit: |plan| of(plan, "layers.0.mlp.down.weight", |m| m.steps = vec![Step::Pad { zero: false }]),
        },
        Fault {
            name: "key heads repeated in the wrong order",
            before: "",
            model: [manyfold, DENSE],
            donor: SA,
            equal: Equal::Nothing,
            edit: |plan| {
                of(plan, "layers.0.sa.qkv.weight", |m| {
                    if let [Step::Repeat(heads)] = &mut m.steps[..] {
                        *heads = halved(*heads);
                    }
                })
            },
        },
        Fault {
            name: "a mean whose shares do not sum to one",
            before: "",
            model: [SA, LOOPED],
            donor: SA,
            equal: Equal::Layers,
            edit: |plan| of(plan, "layers.0.mlp.up.weight", |m| m.from[0].share = 0.4),
        },
        Fault {
            name: "factors of what layers differ by from another mean",
            before: "",
            model: [SA, LOW],
            donor: SA,
            equal: Equal::Gains,
            edit: |plan| {
                of(plan, "layers.0.mlp.down.lora_b", |m| {
                    if let [Step::Factor { base, .. }] = &mut m.steps[..] {
                        base.truncate(1);
                    }
                })
            },
        },
        Fault {
            name: "factors of the other pass",
            before: "",
            model: [SA, LOW],
            donor: SA,
            equal: Equal::Gains,
            edit: |plan| of(plan, "layers.0.mlp.gate.lora_a", |m| m.from.reverse()),
        },
        Fault {
            name: "heads averaged that do not stand together",
            before: "",
            model: ["sa = sequence { heads 4 kv_heads 1 head_size 4 projection none }", DENSE],
            donor: SA,
            equal: Equal::Heads,
            edit: |plan| {
                of(plan, "layers.1.sa.qkv.weight", |m| {
                    if let [Step::Group(heads)] = &mut m.steps[..] {
                        *heads = halved(*heads);
                    }
                })
            },
        },
        Fault {
            name: "latents: queries in another order than keys",
            before: "",
            model: [LATENT, DENSE],
            donor: HEADS,
            equal: Equal::Nothing,
            edit: |plan| latent(plan, "layers.0.sa.q_up.weight", |l| l.turned[0].swap(0, 1)),
        },
        Fault {
            name: "latents: short vectors of another layer",
            before: "",
            model: [LATENT, DENSE],
            donor: HEADS,
            equal: Equal::Nothing,
            edit: |plan| {
                of(plan, "layers.1.sa.kv_down.weight", |m| m.from[0].name = "layers.0.sa.qkv.weight".into())
            },
        },
        Fault {
            name: "latents: keys made of the factors of other rows",
            before: "",
            model: [PARTLY_LATENT, DENSE],
            donor: PARTLY,
            equal: Equal::Nothing,
            edit: |plan| latent(plan, "layers.0.sa.kv_up.weight", |l| l.turned.fill(vec![1, 3])),
        },
        Fault {
            name: "latents: heads of queries read keys and values of the wrong group",
            before: "",
            model: [PARTLY_LATENT, DENSE],
            donor: PARTLY,
            equal: Equal::Nothing,
            edit: |plan| latent(plan, "layers.0.sa.kv_up.weight", |l| l.kv_heads = 1),
        },
        Fault {
            name: "a table moved by a token",
            before: "",
            model: [SA, SPARSE],
            donor: SA,
            equal: Equal::Nothing,
            edit: |plan| {
                let moved = (0..17).map(|i| (i + 1) % 17).collect();
                of(plan, "embed.weight", |m| m.steps = vec![Step::Tokens(moved)])
            },
        },
    ]
}

fn of(plan: &mut Plan, name: &str, edit: impl FnOnce(&mut Move)) -> bool {
    let Some(found) = plan.moves.iter_mut().find(|m| m.to == name) else { return false };
    let before = found.clone();
    edit(found);
    *found != before
}

/// Halves of heads as if each were a head.
fn halved(heads: dreamc_transplant::Heads) -> dreamc_transplant::Heads {
    dreamc_transplant::Heads {
        queries: 2 * heads.queries,
        from: 2 * heads.from,
        to: 2 * heads.to,
        size: heads.size / 2,
    }
}

fn latent(plan: &mut Plan, name: &str, edit: impl FnOnce(&mut Latent)) -> bool {
    of(plan, name, |m| {
        if let [Step::Latent(latent)] = &mut m.steps[..] {
            edit(latent);
        }
    })
}

/// A donor of random numbers, norms too.
struct Random<'a>(&'a Side, Equal);

impl Read for Random<'_> {
    fn donor(&self, name: &str) -> Result<(Vec<u64>, Vec<f32>), TransplantError> {
        let missing = || TransplantError::Read(format!("no {name}"));
        let weight = self.0.tensor(name).ok_or_else(missing)?;
        let gain = weight.shape.len() == 1;
        let drawn = match self.1 {
            Equal::Layers => name.replacen("layers.1", "layers.0", 1),
            Equal::Gains if gain => name.replacen("layers.1", "layers.0", 1),
            Equal::Nothing | Equal::Gains | Equal::Heads => name.to_string(),
        };
        let mut numbers = init::values(9, &drawn, Init::Uniform(-0.6, 0.6), weight.elements() as usize);
        if self.1 == Equal::Heads && name.ends_with("qkv.weight") {
            // Rows are 16 of queries, then two heads of keys and two of values, four rows each.
            for first in [16, 24] {
                let own = numbers[first * 16..][..4 * 16].to_vec();
                numbers[(first + 4) * 16..][..4 * 16].copy_from_slice(&own);
            }
        }
        Ok((weight.shape.clone(), numbers))
    }

    fn drawn(&self, name: &str, init: Init, elements: usize) -> Vec<f32> {
        init::values(4, name, init, elements)
    }
}

/// The logits of a model of these numbers.
fn logits(spec: &Spec, numbers: Vec<(String, Vec<f32>)>) -> Result<Vec<f32>, Failed> {
    const TOKENS: usize = 12;
    let options = Options { batch: 1, sequence: TOKENS as u64, logits: true, ..Options::default() };
    let device = CpuDevice::new(CpuOptions { threads: Some(1) });
    let mut model = Model::load(&device, compile(spec, &options)?)?;
    for (name, numbers) in numbers {
        model.set(&name, &numbers)?;
    }
    let ids: Vec<i32> = (0..TOKENS as i32).map(|i| (i * 5 + 3) % 17).collect();
    let positions = (0..TOKENS as i32).collect();
    let (targets, segments, bytes) = (ids.clone(), vec![0; TOKENS], vec![1; TOKENS]);
    model.evaluate(&Batch {
        sequence: TOKENS,
        ids,
        targets,
        positions,
        segments,
        bytes,
        ..Batch::default()
    })?;
    let all: Result<Vec<_>, _> = (0..TOKENS).map(|column| model.logits(0, column)).collect();
    Ok(all?.concat())
}

/// How far the logits of a transplant are from its donor's, as a share of the largest.
fn difference(fault: &Fault, faulty: bool) -> Result<f64, Failed> {
    let (new, old) = (spec(fault.before, fault.model), spec("", [fault.donor, DENSE]));
    let sides = (Side::new(&new)?, Side::new(&old)?);
    let how = new.transplant.clone().unwrap_or_default();
    let mut plan = plan(&sides.0, &sides.1, &how, &Vocabulary::Same)?;
    let claimed = |same: &Same| match fault.equal {
        Equal::Nothing => *same == Same::Same,
        Equal::Layers | Equal::Gains => matches!(same, Same::IfEqual(_)),
        Equal::Heads => true,
    };
    if !plan.claims.iter().any(|claim| claim.part == "model" && claimed(&claim.same)) {
        return Err(format!("the model is not claimed to be its donor: {:?}", plan.claims).into());
    }
    if faulty && !(fault.edit)(&mut plan) {
        return Err("was never put in".into());
    }
    let donor = Random(&sides.1, fault.equal);
    let mut made = vec![];
    for (m, weight) in plan.moves.iter().zip(&sides.0.tensors) {
        made.push((m.to.clone(), values(m, weight.init, &donor)?));
    }
    let mut given = vec![];
    for weight in &sides.1.tensors {
        given.push((weight.name.clone(), donor.donor(&weight.name)?.1));
    }
    let (own, other) = (logits(&new, made)?, logits(&old, given)?);
    let largest = other.iter().fold(0f64, |most, x| most.max(f64::from(x.abs())));
    let far = own.iter().zip(&other).fold(0f64, |most, (a, b)| most.max(f64::from((a - b).abs())));
    Ok(far / largest)
}

/// How the proof notices a fault; an error where it does not, or where it fails without one.
pub fn noticed(fault: &Fault) -> Result<String, Failed> {
    let sound = difference(fault, false)?;
    if sound > 1e-5 {
        return Err(format!("without the fault logits differ by {sound:.1e}").into());
    }
    let faulty = difference(fault, true)?;
    match faulty > 1e-4 {
        true => Ok(format!("transplant: logits differ by {faulty:.1e}")),
        false => Err(format!("logits differ by {faulty:.1e} alone").into()),
    }
}

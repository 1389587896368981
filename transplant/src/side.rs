//! One of the two models: its tensors, and what stands at each depth.

use dreamc_compiler::architecture::{Architecture, Work, components, for_each_application};
use dreamc_compiler::bind::{Owner, Part};
use dreamc_compiler::compiled::{Init, Tensor};
use dreamc_compiler::lower::attention;
use dreamc_compiler::{CompileError, Options, compile};
use dreamc_dsl::Spec;
use dreamc_dsl::spec::{Component, Expr, Model};
use std::collections::BTreeMap;

/// A model as transplants see it.
#[derive(Clone, Debug)]
pub struct Side {
    /// Its architecture.
    pub model: Model,
    /// Its components and those that definitions apply, by name.
    pub components: BTreeMap<String, Component>,
    /// Its tensors, in the order of checkpoints.
    pub tensors: Vec<Weight>,
    /// Its sets of weights of layers, `layers.{i}`.
    pub layers: Vec<Layer>,
    /// The set of each application of a layer, by depth.
    pub depths: Vec<usize>,
    /// Work on the stream, in order: the set and the composition of a layer, anything else
    /// as text.
    pub(crate) work: Vec<Done>,
}

/// Something done to the stream.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Done {
    /// A layer: its set, its composition, whether the stream is normalised after it, the passes
    /// around it.
    Layer { set: usize, expr: Expr, norm: bool },
    /// Anything else.
    Other(String),
}

/// A set of weights of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// The components in it that have tensors.
    pub components: Vec<String>,
    /// The depths at which it is applied.
    pub applied: Vec<usize>,
    /// Matrices of a mixture of projections, where it has them.
    pub recurrent: Option<u64>,
}

/// A tensor of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Weight {
    /// Its name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<u64>,
    /// How it begins.
    pub init: Init,
    /// Which tensor of its owner it is.
    pub part: Part,
    /// Where it stands.
    pub place: Place,
    /// Its name after the name of its component or layer.
    pub tail: String,
}

/// Where a tensor stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// In no layer.
    Outside,
    /// In a layer, by the number of its set of weights.
    Layer {
        /// The set.
        set: usize,
        /// The component, where it is one's.
        component: Option<String>,
    },
}

impl Weight {
    /// How many numbers it has.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// The layer that it stands in.
    pub fn set(&self) -> Option<usize> {
        match self.place {
            Place::Layer { set, .. } => Some(set),
            Place::Outside => None,
        }
    }

    /// The component whose tensor it is.
    pub fn component(&self) -> Option<&str> {
        match &self.place {
            Place::Layer { component, .. } => component.as_deref(),
            Place::Outside => None,
        }
    }
}

impl Side {
    /// The model of a specification.
    pub fn new(spec: &Spec) -> Result<Side, CompileError> {
        let architecture = Architecture::new(&spec.model, None)?;
        // One token is enough to learn which tensors the model has.
        let tensors = compile(spec, &Options { batch: 1, sequence: 1, ..Options::default() })?.tensors;
        let mut layers: Vec<Layer> = architecture
            .sets
            .iter()
            .map(|(body, _)| Layer {
                components: architecture.bodies[*body].components.clone(),
                applied: vec![],
                recurrent: architecture.bodies[*body].recurrent,
            })
            .collect();
        let (mut depths, mut work) = (vec![], vec![]);
        for_each_application(&architecture.blocks, architecture.variables, &mut |apply, variables| {
            let body = &architecture.bodies[apply.body];
            let key = (architecture.leader(apply.body), apply.set.at(variables));
            let set = architecture.sets.iter().position(|set| *set == key);
            match (&body.work, set) {
                (Work::Layer(expr), Some(set)) => {
                    layers[set].applied.push(depths.len());
                    depths.push(set);
                    work.push(Done::Layer { set, expr: expr.clone(), norm: body.residual_norm });
                }
                (other, _) => work.push(Done::Other(format!("{other:?}"))),
            }
        });
        let tensors = tensors.into_iter().map(|t| weight(&architecture, t)).collect();
        let components = components(&spec.model).into_iter().collect();
        Ok(Side { model: spec.model.clone(), components, tensors, layers, depths, work })
    }

    /// The tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<&Weight> {
        self.tensors.iter().find(|t| t.name == name)
    }

    /// The tensor of a component in a layer.
    pub fn of(&self, set: usize, component: Option<&str>, tail: &str) -> Option<&Weight> {
        self.tensors.iter().find(|t| t.set() == Some(set) && t.component() == component && t.tail == tail)
    }

    /// The rows of queries, keys or values of a fused matrix: `q`, `k` or `v`.
    pub(crate) fn rows(&self, weight: &Weight, which: &str) -> Option<std::ops::Range<u64>> {
        if weight.part != attention::part::QKV {
            return None;
        }
        let (Component::Sequence(a) | Component::Depth(a)) = self.components.get(weight.component()?)? else {
            return None;
        };
        let (q, kv) = (a.heads * a.head_size, a.kv_heads * a.head_size);
        match which {
            "q" => Some(0..q),
            "k" => Some(q..q + kv),
            "v" => Some(q + kv..q + 2 * kv),
            _ => None,
        }
    }
}

fn weight(architecture: &Architecture, t: Tensor) -> Weight {
    let own = architecture.name_of(t.owner, t.part);
    let prefix = t.name.strip_suffix(&own).unwrap_or_default();
    let set = prefix.strip_prefix("layers.").and_then(|rest| rest.strip_suffix('.')?.parse().ok());
    let component = match t.owner {
        Owner::Component(_) => Some(architecture.label(t.owner)),
        Owner::Embedding
        | Owner::Head
        | Owner::Stream
        | Owner::Skip(_)
        | Owner::Pool(_)
        | Owner::Saved(_)
        | Owner::Norm(_)
        | Owner::Lanes(_)
        | Owner::Output
        | Owner::Sources
        | Owner::Loop
        | Owner::Exit
        | Owner::Members
        | Owner::Choice
        | Owner::Depths => None,
    };
    let place = match set {
        Some(set) => Place::Layer { set, component: component.clone() },
        None => Place::Outside,
    };
    let tail = match (&component, set) {
        (Some(_), Some(_)) => t.part.path().into(),
        (None, Some(_)) => own,
        (_, None) => t.name.clone(),
    };
    Weight { name: t.name, shape: t.shape, init: t.init, part: t.part, place, tail }
}

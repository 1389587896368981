//! Bindings resolved: which value a port of a call stands for, and which instance of it.
//!
//! *In*: an [`Architecture`], the states that functions name, and the call ([`Site`]). *Out*: of a
//! port what it is bound to ([`Held`]) and the instance; of an index its value. *Promise*: this
//! reads, and makes nothing: what a port stands for does not depend on what was resolved before.
//! The arena gives each [`Held`] its buffer; the oracle takes indices from here, and has values of
//! its own.

use crate::architecture::{Apply, Architecture, Body, continues, run_of};
use crate::bind::Owner;
use crate::compiled::{End, Kept};
use crate::ir::{Binding, DType, Index, Input, Lifetime, Of, Output, PerToken, Port};
use crate::lower::{State, skip};
use crate::memory::Slot;
use crate::program::{Affine, Space};
use indexmap::IndexMap;

/// A call: the body, and the application.
pub(crate) struct Site<'s> {
    pub(crate) body: Option<usize>,
    pub(crate) apply: Option<&'s Apply>,
    /// Whether the call was made before: sums of the first are left as they are.
    pub(crate) again: bool,
}

impl<'s> Site<'s> {
    /// A call outside of the layers.
    pub(crate) const OUTSIDE: Site<'static> = Site { body: None, apply: None, again: false };

    /// The call of an application.
    pub(crate) fn of(apply: &'s Apply) -> Self {
        Site { body: Some(apply.body), apply: Some(apply), again: false }
    }

    /// The set of weights that it reads.
    fn set(&self) -> Affine {
        self.apply.map_or_else(Affine::default, |apply| apply.set.clone())
    }
}

/// A weight by its body, that of the first pass where bodies of passes differ, and its name there;
/// outside of the layers there is no body.
pub(crate) type WeightKey = (Option<usize>, String);

/// How many passes, or applications of a set, have a tensor of their own, by the body and the name
/// of tensor or gradient; with the binding that says which of the two.
pub(crate) type Passes = IndexMap<(usize, String), (u64, Binding)>;

/// A parameter or a result of a call.
pub(crate) struct Asked<'p> {
    pub(crate) port: &'p Port,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<u64>,
    /// Whether the call writes it.
    pub(crate) result: bool,
}

/// The value that a port is bound to.
#[derive(Debug)]
pub(crate) enum Held {
    /// A tensor of the weight set, or a tensor of another body by its name in checkpoints, which
    /// has one instance.
    Weight(WeightKey),
    /// Its gradient.
    Gradient(WeightKey),
    /// How often each candidate of a router was chosen.
    Counts(WeightKey),
    /// Something whose buffer is made when it is first bound.
    Buffer(Wanted),
}

/// A buffer as the binding of a port wants it.
#[derive(Debug)]
pub(crate) struct Wanted {
    pub(crate) slot: Slot,
    /// For people.
    pub(crate) name: String,
    pub(crate) space: Space,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<u64>,
    pub(crate) instances: u64,
}

/// The value that a port stands for, and which instance of it.
pub(crate) type Resolved = (Held, Affine);

/// Words for what is wrong with a port, before its binding.
pub(crate) type Unbound = &'static str;

/// All that bindings are resolved by.
#[derive(Clone, Copy)]
pub(crate) struct Resolver<'r> {
    pub(crate) architecture: &'r Architecture,
    /// The states of layers, by name.
    pub(crate) states: &'r IndexMap<String, State>,
    pub(crate) passes: &'r Passes,
    /// Attentions of an application that drop weights, at the most.
    pub(crate) draws: u64,
    /// Values that bodies keep for the way back, with their numbers.
    pub(crate) kept: &'r [(usize, Kept)],
}

impl Resolver<'_> {
    /// The value that a port of a call stands for.
    pub(crate) fn resolve(&self, site: &Site, asked: Asked) -> Result<Resolved, Unbound> {
        let (name, set) = (asked.port.name.clone(), site.set());
        match asked.port.binding {
            Binding::PassWeight | Binding::TurnWeight => {
                let key = self.key(site, &name);
                let passes = self.of_pass(site, &name).ok_or("no tensor of a pass")?;
                Ok((Held::Weight(key), passes))
            }
            Binding::Weight | Binding::Buffer => Ok((Held::Weight(self.key(site, &name)), set)),
            Binding::Cotangent(Of::Weight) => {
                let instance = self.of_pass(site, &name).unwrap_or(set);
                Ok((Held::Gradient(self.key(site, &name)), instance))
            }
            Binding::State(Lifetime::Set) | Binding::Output(Output::Aux) if site.again => {
                let shape = at_least_one(&asked.shape);
                let slot = Slot::Again(site.body, name.clone());
                let wanted = Wanted { shape, ..asked.wanted(slot, format!("again.{name}"), Space::Saved) };
                Ok(wanted.once())
            }
            Binding::State(Lifetime::Set) => Ok((Held::Counts(self.key(site, &name)), set)),
            Binding::Stream => Ok(self.stream(site, asked)),
            Binding::Prepared => {
                let body = site.body.map(|b| &self.architecture.bodies[b]);
                let (prefix, sets) = body.map_or(("model", 1), |b| (b.name.as_str(), b.sets));
                let slot = Slot::Prepared(site.body, name.clone());
                Ok(asked.wanted(slot, format!("{prefix}.{name}"), Space::Prepared).at(sets, set))
            }
            Binding::Observed => Ok(self.of_depths(site, asked, Slot::Observed(name))),
            Binding::Patched => Ok(self.of_depths(site, asked, Slot::Patched(name))),
            Binding::Saved | Binding::State(Lifetime::Token(PerToken::Application) | Lifetime::Text) => {
                self.of_application(site, asked)
            }
            Binding::State(Lifetime::Saved) => match self.states.get(&name) {
                Some(&State { owner: Owner::Skip(number), part: skip::part::MEMBERS }) => {
                    self.members(site, asked, number)
                }
                _ => self.saved(site, asked),
            },
            Binding::State(Lifetime::Depth) => {
                Ok(asked.wanted(Slot::State(name.clone()), name, Space::Saved).once())
            }
            Binding::State(Lifetime::Token(which)) => self.row_of_component(site, asked, which),
            Binding::Cotangent(Of::State(Lifetime::Saved))
                if self.whose(name.strip_prefix("d.").unwrap_or(&name)).0 == Owner::Exit =>
            {
                self.left_by_pass(site, asked)
            }
            Binding::Cotangent(Of::State(_)) => {
                Ok(asked.wanted(Slot::StateCotangent(name.clone()), name, Space::Saved).once())
            }
            Binding::Cotangent(Of::Stream) => {
                // In the backward a layer stores the next cotangent in another buffer than the one
                // it reads.
                let (slot, name) = match asked.result && site.apply.is_some() {
                    true => (Slot::NextCotangent, "d.next"),
                    false => (Slot::Cotangent, "d.stream"),
                };
                Ok(asked.wanted(slot, name.into(), Space::Saved).once())
            }
            Binding::Batch(Input::Draws) => self.drawn(site, asked),
            Binding::Cotangent(Of::Output(Output::Aux)) => Ok(asked.end(End::Input(Input::AuxScale))),
            Binding::Batch(input) => Ok(asked.end(End::Input(input))),
            Binding::Output(output) => Ok(asked.end(End::Output(output))),
            Binding::Value | Binding::Index(_) | Binding::Cotangent(Of::Value | Of::Output(_)) => {
                Err("nothing supplies")
            }
        }
    }

    fn key(&self, site: &Site, name: &str) -> WeightKey {
        key(self.architecture, site.body, name)
    }

    /// Which of the tensors that passes, or applications, have of their own under a name; none
    /// where they share one.
    fn of_pass(&self, site: &Site, name: &str) -> Option<Affine> {
        let body = self.architecture.leader(site.body?);
        let &(passes, binding) = self.passes.get(&(body, name.into()))?;
        Some(site.apply.map_or_else(Affine::default, |apply| {
            let which = if binding == Binding::TurnWeight { &apply.turn } else { &apply.pass };
            apply.set.times(passes).plus(which)
        }))
    }

    /// The stream before an application, or after it.
    fn stream(&self, site: &Site, asked: Asked) -> Resolved {
        let (places, result) = (self.architecture.places, asked.result);
        let mut instance = match site.apply {
            Some(apply) => apply.place.clone(),
            // The embedding writes the first, the head reads the last.
            None => Affine::constant(if result { 0 } else { places - 1 }),
        };
        instance.base += u64::from(result && site.apply.is_some());
        let wanted = asked.wanted(Slot::Stream, "stream".into(), Space::Saved);
        Wanted { dtype: DType::F32, ..wanted }.at(places, instance)
    }

    /// A value that host and layers exchange for each depth; outside the layers there is one.
    fn of_depths(&self, site: &Site, asked: Asked, slot: Slot) -> Resolved {
        let one = || (1, Affine::default());
        let (instances, instance) =
            site.apply.map_or_else(one, |apply| (self.architecture.depth, apply.depth.clone()));
        let name = asked.port.name.clone();
        asked.wanted(slot, name, Space::Io).at(instances, instance)
    }

    /// A value that an application of a body keeps for the way back, or decoding of a sequence.
    fn of_application(&self, site: &Site, asked: Asked) -> Result<Resolved, Unbound> {
        let (Some(number), Some(apply)) = (site.body, site.apply) else {
            return Err("outside the layers there is no");
        };
        let (body, name) = (&self.architecture.bodies[number], asked.port.name.clone());
        let again = is_again(self.kept, number);
        let (space, slot, instances, instance) = match asked.port.binding {
            Binding::Saved if again => (Space::Saved, Slot::Saved(number, name), 1, Affine::default()),
            Binding::Saved => (Space::Saved, Slot::Saved(number, name), body.kept, apply.kept.clone()),
            _ => (Space::State, Slot::OfBody(number, name), body.applications, apply.application.clone()),
        };
        let name = format!("{}.{}", body.name, asked.port.name);
        Ok(asked.wanted(slot, name, space).at(instances, instance))
    }

    /// The tokens that a `skip` processed, for the pass after it.
    fn members(&self, site: &Site, asked: Asked, skip: u32) -> Result<Resolved, Unbound> {
        let cache = self.architecture.cache_of(Owner::Members);
        let (Some(cache), Some(body)) = (cache, site.body) else { return Err("no choice of") };
        let body: &Body = &self.architecture.bodies[body];
        // Choices are numbered as they are made; those before are of the same layer.
        let mut instance = self.saves(site, cache);
        instance.base += body.nested().take_while(|nested| *nested != skip).count() as u64;
        if !asked.result {
            let before = body.among.and_then(|choices| instance.base.checked_sub(choices));
            instance.base = before.ok_or("no pass before chose")?;
        }
        let name = self.architecture.label(Owner::Members);
        let wanted = asked.wanted(Slot::State(name.clone()), name, Space::Saved);
        Ok(wanted.at(self.architecture.rows[cache], instance))
    }

    /// A saved stream: the one that a call saves, or the latest.
    fn saved(&self, site: &Site, asked: Asked) -> Result<Resolved, Unbound> {
        let (owner, name) = self.whose(&asked.port.name);
        let cache = self.architecture.cache_of(owner).ok_or("no")?;
        let mut instance = self.saves(site, cache);
        // Streams are numbered as they are saved.
        if !asked.result {
            instance.base = instance.base.checked_sub(1).ok_or("nothing saved in")?;
        }
        let wanted = asked.wanted(Slot::State(name.clone()), name, Space::Saved);
        Ok(wanted.at(self.architecture.rows[cache], instance))
    }

    /// A cache that all applications of a component share, an instance for each of their rows.
    fn row_of_component(&self, site: &Site, asked: Asked, which: PerToken) -> Result<Resolved, Unbound> {
        let (Some(&State { owner, part }), Some(apply)) = (self.states.get(&asked.port.name), site.apply)
        else {
            return Err("no component has");
        };
        let cache = self.architecture.cache_of(owner);
        let instance = cache.and_then(|cache| row(apply, cache, which == PerToken::Latest));
        let instance = instance.ok_or("no application before has")?;
        let name = self.architecture.name_of(owner, part);
        let wanted = asked.wanted(Slot::OfComponent(name.clone()), name, Space::State);
        Ok(wanted.at(self.architecture.rows_of(owner), instance))
    }

    /// The cotangent of what a pass leaves of the loss: none has another's.
    fn left_by_pass(&self, site: &Site, asked: Asked) -> Result<Resolved, Unbound> {
        let cache = self.architecture.cache_of(Owner::Exit).ok_or("no")?;
        let mut instance = self.saves(site, cache);
        if asked.result {
            instance.base = instance.base.checked_sub(1).ok_or("nothing left in")?;
        }
        Ok((Held::Buffer(self.left_cotangent(asked.shape)), instance))
    }

    /// The cotangents of what passes leave of the loss.
    pub(crate) fn left_cotangent(&self, shape: Vec<u64>) -> Wanted {
        let name = format!("d.{}", self.architecture.label(Owner::Exit));
        let (slot, instances) = (Slot::StateCotangent(name.clone()), self.architecture.rows_of(Owner::Exit));
        Wanted { slot, name, space: Space::Saved, dtype: DType::F32, shape, instances }
    }

    /// Random numbers of an attention that drops weights.
    fn drawn(&self, site: &Site, asked: Asked) -> Result<Resolved, Unbound> {
        let (Some(apply), Some(number)) = (site.apply, Input::drawn(&asked.port.name)) else {
            return Err("no attention of a layer reads");
        };
        let slot = Slot::End(End::Input(Input::Draws));
        let instance = apply.depth.times(self.draws).plus(&Affine::constant(number));
        let instances = self.architecture.depth.saturating_mul(self.draws);
        Ok(asked.wanted(slot, Input::Draws.name().into(), Space::Io).at(instances, instance))
    }

    /// Whose a saved state is, and its name: what a pass leaves has another where it is read.
    fn whose(&self, name: &str) -> (Owner, String) {
        match self.states.get(name).map_or(Owner::Stream, |state| state.owner) {
            Owner::Exit => (Owner::Exit, self.architecture.label(Owner::Exit)),
            owner => (owner, name.into()),
        }
    }

    /// How often something has been saved before a call; after the layers, in all.
    fn saves(&self, site: &Site, cache: usize) -> Affine {
        let all = || Affine::constant(self.architecture.rows[cache]);
        site.apply.map_or_else(all, |apply| apply.rows[cache].clone())
    }
}

impl Asked<'_> {
    fn wanted(self, slot: Slot, name: String, space: Space) -> Wanted {
        Wanted { slot, name, space, dtype: self.dtype, shape: self.shape, instances: 1 }
    }

    fn end(self, end: End) -> Resolved {
        Wanted::end(end, self.dtype, &self.shape).once()
    }
}

impl Wanted {
    /// A value that host and programs exchange.
    pub(crate) fn end(end: End, dtype: DType, shape: &[u64]) -> Self {
        let (slot, name) = (Slot::End(end), end.name().into());
        Wanted { slot, name, space: Space::Io, dtype, shape: at_least_one(shape), instances: 1 }
    }

    fn once(self) -> Resolved {
        self.at(1, Affine::default())
    }

    fn at(self, instances: u64, instance: Affine) -> Resolved {
        (Held::Buffer(Wanted { instances, ..self }), instance)
    }
}

/// The shape of a buffer: a scalar is one number.
fn at_least_one(shape: &[u64]) -> Vec<u64> {
    if shape.is_empty() { vec![1] } else { shape.to_vec() }
}

/// A weight of a body, or of none outside of the layers.
pub(crate) fn key(architecture: &Architecture, body: Option<usize>, name: &str) -> WeightKey {
    (body.map(|b| architecture.leader(b)), name.into())
}

/// Whether a body computes on the way back what it would have kept.
pub(crate) fn is_again(kept: &[(usize, Kept)], body: usize) -> bool {
    kept.iter().any(|(number, kept)| *number == body && kept.again)
}

/// The row of a cache that an application writes, or the one before.
fn row(apply: &Apply, cache: usize, latest: bool) -> Option<Affine> {
    let mut row = apply.rows.get(cache)?.clone();
    row.base = row.base.checked_sub(u64::from(latest))?;
    Some(row)
}

/// The value of an index at an application, or after all of them; none where no loop supplies it.
pub(crate) fn index(architecture: &Architecture, apply: Option<&Apply>, index: Index) -> Option<Affine> {
    let row_of = |cache: u32| match apply {
        Some(apply) => apply.rows.get(cache as usize).cloned(),
        None => architecture.rows.get(cache as usize).copied().map(Affine::constant),
    };
    match index {
        Index::Depth => Some(apply?.depth.clone()),
        Index::Depths => Some(Affine::constant(architecture.depth)),
        Index::Pass => Some(apply?.pass.clone()),
        Index::Row(cache) => row_of(cache),
        Index::Latest(cache) => row(apply?, cache as usize, true),
        Index::Next { cache, by } => row_of(cache).map(|row| row.plus(&Affine::constant(by.into()))),
        Index::First => Some(Affine::default()),
        Index::FirstPass { cache, by } => row_of(cache)?.minus(&apply?.pass.times(by.into())),
        Index::Run { cache, offset, block } => Some(run_of(&row_of(cache)?, offset, block)),
        Index::Continues { cache, offset, block } => Some(continues(&row_of(cache)?, offset, block)),
        Index::Given => None,
    }
}

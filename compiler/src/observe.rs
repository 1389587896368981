//! Observations that `evaluate` leaves for the host, with the applications they come from.

use crate::architecture::{Work, for_each_application};
use crate::assemble::Assembly;
use crate::bind::Owner;
use crate::compiled::{Application, Observation, Observed};
use crate::memory::Slot;

impl Assembly<'_> {
    /// The observations there are buffers of.
    pub(crate) fn observed(&self) -> Vec<Observed> {
        let a = self.architecture;
        let mut all = vec![];
        // The search is quadratic in components: it is made where lowering leaves something.
        if self.left.is_empty() {
            return all;
        }
        for (i, component) in a.model.components.keys().enumerate() {
            let mut applications = vec![];
            for_each_application(&a.blocks, a.variables, &mut |apply, variables| {
                if a.bodies[apply.body].components.contains(component) {
                    let set = (a.leader(apply.body), apply.set.at(variables));
                    applications.push(Application {
                        depth: apply.depth.at(variables),
                        set: a.sets.iter().position(|s| *s == set).unwrap_or_default() as u64,
                        row: apply.rows[i].at(variables),
                    });
                }
            });
            let owner = Owner::Component(i as u32);
            self.observations_of(owner, &Observation::OF_COMPONENT, &applications, &mut all);
        }
        let most = a.bodies.iter().map(|b| b.skips().len()).max().unwrap_or(0);
        for j in 0..most {
            let mut applications = vec![];
            for_each_application(&a.blocks, a.variables, &mut |apply, variables| {
                if a.bodies[apply.body].skips().len() > j {
                    let set = (a.leader(apply.body), apply.set.at(variables));
                    let set = a.sets.iter().position(|s| *s == set).unwrap_or_default() as u64;
                    applications.push(Application { depth: apply.depth.at(variables), set, row: 0 });
                }
            });
            let owner = Owner::Skip(j as u32);
            self.observations_of(owner, &Observation::OF_SKIP, &applications, &mut all);
        }
        let mut applications = vec![];
        for_each_application(&a.blocks, a.variables, &mut |apply, variables| {
            if matches!(a.bodies[apply.body].work, Work::Exit(_)) {
                let (depth, row) = (apply.depth.at(variables), applications.len() as u64);
                applications.push(Application { depth, set: 0, row });
            }
        });
        self.observations_of(Owner::Exit, &Observation::OF_EXIT, &applications, &mut all);
        all
    }

    pub(crate) fn observations_of(
        &self,
        owner: Owner,
        kinds: &[Observation],
        applications: &[Application],
        all: &mut Vec<Observed>,
    ) {
        for &what in kinds {
            let left = self.left.iter().find(|(_, left)| **left == (owner, what));
            let buffer = left.and_then(|(name, _)| self.bound(Slot::Observed(name.clone())));
            let component = self.architecture.label(owner);
            let applications = applications.to_vec();
            all.extend(buffer.map(|buffer| Observed { component, owner, what, buffer, applications }));
        }
    }
}

//! The spectral condition (Yang, Simon and Bernstein, *A Spectral Condition for Feature Learning*,
//! 2310.17813): a weight and its change have the spectral norm `√(fan_out / fan_in)`.
//!
//! First values have the deviation `fan_in^-1/2 · min(1, √(fan_out / fan_in))`, by the sizes
//! themselves and not by which of them grow; rates of optimizers that do not look at the size of
//! gradients are `1 / fan_in`. A token looks up a row: its fan in is 1. The paper says nothing of
//! the depth, and this rule leaves it to the defaults.

use super::{Growth, Place, Rule, Seen, Share, Use, mup};

pub(super) struct Spectral;

impl Rule for Spectral {
    fn share(&self, seen: &Seen, growth: Growth) -> Share {
        let Share { init, rate, eps } = mup::width(seen);
        let by = |i: f64, o: f64| i.powf(-0.5) * (o / i).sqrt().min(1.0);
        let init = init.map(|init| match seen.of {
            Use::Product { .. } => {
                by(seen.fan_in.here, seen.fan_out.here) / by(seen.fan_in.base, seen.fan_out.base)
            }
            Use::Lookup { .. } | Use::Factor | Use::Term | Use::Taps | Use::Unknown(_) | Use::Unread => init,
        });
        // The default of what ends a component has this factor.
        let deep = growth.depth.powf(-0.5);
        let init = if seen.place == Place::End && !seen.constant { init.map(|x| x * deep) } else { init };
        Share { init, rate, eps }
    }
}

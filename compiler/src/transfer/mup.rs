//! Maximal Update Parametrization over the width (Yang et al., *Tensor Programs V*, 2203.03466,
//! table 3, the columns of Adam) and Depth-µP over the depth (Yang et al., *Tensor Programs VI*,
//! 2310.02244).
//!
//! With `m` and `d` the width and the depth over those of the base:
//!
//! | numbers | deviation of first values | rate |
//! |---|---|---|
//! | from a size that stays to the width | `1` | `1` |
//! | from width to width | `m^-1/2` | `m^-1` |
//! | from the width to a size that stays | `m^-1` | `m^-1` |
//! | gains, biases | `1` | `1` |
//!
//! Defaults fall with `m^-1/2` everywhere; the factor here is the rest. The head's multiplier
//! of table 8 is in its first values and its rate, which is the same for optimizers that do not
//! look at the size of gradients. A matrix that Muon moves as a whole has no factor of width, or
//! `m^-1/2` where its output stays: the orthogonal step has singular values of 1 at every size.
//!
//! Depth-µP multiplies what a component adds by `d^-1/2` and rates in components by `d^-1/2`. The
//! multiplier is in the last matrix: its first values have it by default, its rate is `d^-1`.

use super::{Growth, Place, Role, Rule, Seen, Share};

pub(super) struct Mup;

impl Rule for Mup {
    fn share(&self, Seen { role, place, whole }: Seen, growth: Growth) -> Share {
        let (m, d) = (growth.width, growth.depth);
        let (init, rate) = match role {
            Role::Input | Role::Small => (m.sqrt(), 1.0),
            Role::Hidden if whole => (1.0, 1.0),
            Role::Hidden => (1.0, 1.0 / m),
            Role::Output if whole => (1.0 / m.sqrt(), 1.0 / m.sqrt()),
            Role::Output => (1.0 / m.sqrt(), 1.0 / m),
            Role::Vector => (1.0, 1.0),
        };
        let depth = match place {
            Place::Stream => 1.0,
            Place::Branch => 1.0 / d.sqrt(),
            Place::End => 1.0 / d,
        };
        Share { init, rate: rate * depth }
    }
}

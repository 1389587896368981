//! Floats that are compared and hashed by their bits, so that operations are equal exactly where
//! they do the same.

use std::hash::{Hash, Hasher};

/// A float whose equality, order (`total_cmp`) and hash are those of its bits.
#[derive(Clone, Copy, Debug)]
pub struct Bits(pub f64);

impl PartialEq for Bits {
    fn eq(&self, other: &Bits) -> bool {
        self.0.to_bits() == other.0.to_bits()
    }
}

impl Eq for Bits {}

impl PartialOrd for Bits {
    fn partial_cmp(&self, other: &Bits) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Bits {
    fn cmp(&self, other: &Bits) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl Hash for Bits {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.to_bits().hash(state);
    }
}

/// Equality, order and hash of a payload that has floats, from a tuple of all its fields with the
/// floats as [`Bits`]. The pattern names every field, so that a new one cannot be forgotten.
macro_rules! by_bits {
    ($payload:ident, $pattern:pat => $key:expr) => {
        impl PartialEq for $payload {
            fn eq(&self, other: &Self) -> bool {
                self.cmp(other).is_eq()
            }
        }

        impl Eq for $payload {}

        impl PartialOrd for $payload {
            fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
                Some(self.cmp(other))
            }
        }

        impl Ord for $payload {
            fn cmp(&self, other: &Self) -> std::cmp::Ordering {
                let &$pattern = self;
                let own = $key;
                let &$pattern = other;
                own.cmp(&$key)
            }
        }

        impl std::hash::Hash for $payload {
            fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
                let &$pattern = self;
                $key.hash(state);
            }
        }
    };
}

pub(super) use by_bits;

#[cfg(test)]
mod tests {
    use crate::op::{Attention, Constant, Op};
    use std::collections::HashSet;

    #[test]
    fn operations_are_equal_exactly_where_their_bits_are() {
        let constants = [0.0, -0.0, f64::NAN, -f64::NAN, 1.0].map(|x| Op::from(Constant(x)));
        let all: HashSet<&Op> = constants.iter().chain(&constants).collect();
        assert_eq!(all.len(), 5);
        let a = Attention { softcap: Some(2.0), ..Attention::default() };
        assert_ne!(a, Attention { softcap: Some(-2.0), ..a.clone() });
        assert_ne!(a, Attention { window: Some(2), ..a.clone() });
        assert_eq!(a, Attention { softcap: Some(2.0), ..Attention::default() });
    }
}

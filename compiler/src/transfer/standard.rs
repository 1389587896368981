//! The standard parametrisation: defaults of first values, one rate.

use super::{Growth, Rule, Seen, Share};

pub(super) struct Standard;

impl Rule for Standard {
    fn share(&self, _: &Seen, _: Growth) -> Share {
        Share::NONE
    }
}

//! Reports: what they are made of ([`page`]), their pictures ([`plot`]), and that of an [`analysis`].

pub mod analysis;
pub mod page;
pub mod plot;

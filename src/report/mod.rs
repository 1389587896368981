//! Reports: what they are made of ([`page`]) and their pictures ([`plot`]).

pub mod page;
pub mod plot;

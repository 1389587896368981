//! Reports: what they are made of ([`page`]), their pictures ([`plot`], [`draw`]), and those of an
//! [`analysis`] and of [`routing`].

pub mod analysis;
pub mod draw;
pub mod formulas;
pub mod page;
pub mod plot;
pub mod routing;

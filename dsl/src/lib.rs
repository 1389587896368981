//! The language of dreamc.
pub mod source;
pub mod spec;

//! A comparison: the arms of a suite, trained alike and reported together.
//!
//! The way of a suite ([`suite`]): [`arms`] reads and matches its specifications, [`agreement`]
//! checks that they agree in what the suite says must be equal, [`training`] trains every arm with
//! every seed, [`study`] reads what that wrote, [`page`] makes the report of it. The last two need
//! no model and no device. A suite with a sweep or a ladder goes this way once for each cell
//! ([`ladder`]), and [`rungs`] makes the report of all. An exam is several suites ([`exam`]).

pub mod agreement;
pub mod arms;
pub mod claims;
pub mod exam;
pub mod ladder;
pub mod made;
pub mod page;
pub mod rungs;
pub mod study;
pub mod suite;
pub mod training;

//! The part of dreamc that all front ends share: specifications made ready to train, models
//! opened, studies of several runs, and reports of them.
//!
//! *In*: names of files, devices and rules, as plain types. *Out*: runs, models, comparisons,
//! pages; or a [`failure::Failure`], which has its exit code. The command line and the Python
//! package stand on it; nothing here knows either.
//!
//! - [`spec`] reads specifications, [`model`] opens what was trained, [`transplant`] carries
//!   weights into another architecture, [`device`] opens devices, [`rewriting`] picks rules,
//!   [`ranks`] finds the other ranks of a training.
//! - [`compare`] trains the arms of a suite, climbs ladders and sits exams; [`report`] is what
//!   their pages are made of.
//! - [`failure`] is how work fails, [`output`] writes all that is said, [`progress`] is the live
//!   line, [`show`] prints tables and numbers, [`number`] those that are compared to the last
//!   digit.

pub mod compare;
pub mod device;
pub mod failure;
pub mod model;
pub mod number;
pub mod output;
pub mod progress;
pub mod ranks;
pub mod report;
pub mod rewriting;
pub mod show;
pub mod spec;
pub mod transplant;

//! Components that a specification writes itself: formulas over named dimensions.
//!
//! ```text
//! text ── parser ──> Definition ── elaborate, with settings ──> Graph   typed, every size known
//! ```
//!
//! *In*: the text of a `define`. *Out*: a [`Definition`], a tree with the span of every token; and,
//! for settings and a hidden size, a [`Graph`], whose values each have named dimensions and one
//! [`Function`](graph::Function). *Promise*: the list of [`functions`] is the only one, every
//! mistake is found here at its token, and what reads a graph needs no check of its own.
//!
//! - [`syntax`]: the tree of a definition, as it is written.
//! - [`functions`]: every function with its spelling and its meaning, one entry each.
//! - [`elaborate`]: sizes, dimensions and types; `parser` reads the text before it.
//! - [`names`]: where each name stands, for editors.
//! - [`library`]: definitions inside the program.
//! - [`graph`]: the typed graph that elaboration makes.

pub mod elaborate;
pub mod functions;
pub mod graph;
pub(crate) mod include;
pub mod library;
pub mod names;
mod parser;
pub(crate) mod read;
pub mod syntax;

pub use elaborate::{Context, Elaborated, elaborate};
pub use graph::Graph;
pub use read::parse;
pub use syntax::Definition;

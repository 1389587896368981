//! Data: from files and generated tasks to batches.
//!
//! *In*: the `data` section of a specification. *Out*: [`Batch`]es of ids, targets, positions and
//! segments. *Promise*: what batch number `n` holds is a function of (data, tokenizer, seed, `n`);
//! a [`Cursor`] of a few numbers continues anywhere; memory does not grow with the data; training
//! and validation share nothing.
//!
//! The way of a token: [`rows`] reads files row by row, [`tokenizer`] turns text into ids,
//! [`shard`] keeps them on disk, [`stream`] (running text) and [`examples`] (prompt and answer;
//! generated [`task`]s) cut and pack them into rows, and [`dataset`] mixes sources by weight.
//!
//! Other modules serve what outlives a kill and repeats: [`files`] (atomic writing), [`sums`]
//! (folders whose every byte is verified) and [`rng`] (random numbers by position).

pub mod batch;
pub mod dataset;
pub mod error;
pub mod examples;
pub mod files;
mod foreign;
mod pages;
pub mod parquet;
pub mod rng;
pub mod rows;
pub mod shard;
pub mod stamp;
pub mod stream;
pub mod sums;
pub mod task;
pub mod tokenizer;

pub use batch::{Batch, NO_LOSS};
pub use dataset::{Batches, Cursor, Dataset, Settings};
pub use error::DataError;
pub use tokenizer::Tokenizer;

use std::path::Path;

/// How far some long work on a file has come.
#[derive(Clone, Copy, Debug)]
pub struct Notice<'a> {
    /// The work: `tokenising`, `hashing`.
    pub what: &'static str,
    /// On which file.
    pub path: &'a Path,
    /// Bytes or rows done.
    pub done: u64,
    /// Bytes or rows in all.
    pub total: u64,
}

#[cfg(test)]
mod tests;

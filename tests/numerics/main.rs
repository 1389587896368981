//! Numbers of whole models: against the reference, between ways to compute them, and against what
//! is counted.

#[path = "../support/mod.rs"]
mod support;

mod adapters;
mod authors;
mod carried;
mod cpu;
mod definitions;
mod export;
mod generate;
mod gguf;
mod goldens;
mod import;
mod latents;
mod mapped;
mod mixers;
mod multiply_adds;
mod observation;
mod optimizers;
mod preferences;
mod probing;
mod rates;
mod rewriting;
mod skipping;
mod tuned;
mod verify;
mod whole;

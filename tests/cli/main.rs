//! The command line as its users meet it: the whole program, its output, its exit codes.

#[path = "../support/mod.rs"]
mod support;

mod adapt;
mod analyze_routing;
mod base;
mod book;
mod commands;
mod compare;
mod count_and_match;
mod definitions;
mod environment;
mod exam;
mod examples;
mod first;
mod fit;
mod heal;
mod hostile;
mod imported;
mod ladder;
mod lsp;
mod parts;
mod preferences;
mod quantize;
mod ranks;
mod rates;
mod refusals;
mod router_tuning;
mod serve;
mod slurm;
mod studio;
mod terminal;
mod torch;
mod training;
mod transplant;
mod whole;
mod workers;
mod zoo;

//! The ranks of a training: this process among those that a launcher started.
//!
//! *In*: the variables of the launcher ([`Place`]). *Out*: the [`Group`] that trains together.
//! *Promise*: ranks that were started with another specification, other data, another program or
//! other rules end before anything is trained or written; rank 0 alone speaks.

use crate::failure::{Done, Failure};
use crate::output;
use dreamc_compiler::rewrite::Rewriting;
use dreamc_data::Dataset;
use dreamc_device::group::place::Place;
use dreamc_device::group::{Group, GroupError, mpi, patience, tcp};
use std::thread::available_parallelism;

/// This process among the ranks; nothing where it is on its own, or where the variables are bad,
/// which [`together`] reports.
pub fn here() -> Option<Place> {
    Place::of_environment().ok().flatten()
}

/// Threads of a rank that shares its machine with others.
pub fn threads() -> Option<usize> {
    let ranks = here()?.local_size? as usize;
    Some((available_parallelism().map_or(1, usize::from) / ranks.max(1)).max(1))
}

/// Does work as one of the ranks that a launcher started, or alone. The other ranks end where it
/// fails.
pub fn together(work: impl FnOnce(&Group) -> Done) -> Done {
    let Some(place) = Place::of_environment()? else { return work(&Group::alone()) };
    if place.rank > 0 {
        output::follow(place.rank);
    }
    let over_mpi = if place.mpi { mpi::meet(&place)? } else { None };
    let group = over_mpi.map_or_else(|| tcp::meet(&place, patience()), Ok)?;
    work(&group).inspect_err(|failure| match failure {
        // All ranks stop at the same step.
        Failure::Stopped(_) => {}
        _ => group.fail(failure.to_string().trim()),
    })
}

/// Refuses ranks that would not train the same as rank 0.
pub fn agree(group: &Group, spec: &str, dataset: &Dataset, rewriting: &Rewriting) -> Result<(), Failure> {
    if group.size() == 1 {
        return Ok(());
    }
    let program = std::env::current_exe().and_then(std::fs::read)?;
    let short = |bytes: &[u8]| blake3::hash(bytes).to_hex()[..16].to_string();
    Ok(group.agree(&[
        ("program", format!("{} {}", env!("CARGO_PKG_VERSION"), short(&program))),
        ("specification", short(spec.as_bytes())),
        ("data", dataset.hash()[..16].to_string()),
        ("set of rewriting rules", rewriting.to_string()),
    ])?)
}

/// A text that rank 0 makes, on every rank.
pub fn from_first(group: &Group, make: impl FnOnce() -> Result<String, Failure>) -> Result<String, Failure> {
    let own = if group.leads() { make()? } else { String::new() };
    let bytes = group.broadcast(0, own.as_bytes())?;
    let garbled = |_| GroupError::Meeting("rank 0 sent no text".into());
    Ok(String::from_utf8(bytes).map_err(garbled)?)
}

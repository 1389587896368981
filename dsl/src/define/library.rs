//! The library: definitions inside the program, which a specification uses by their names.

use std::sync::{Arc, OnceLock};

use indexmap::IndexMap;

use super::syntax::Definition;

/// The files of the library by their names: each holds one definition of that name.
pub static LIBRARY: &[(&str, &str)] = &[
    ("alibi", include_str!("../../std/alibi.dream")),
    ("canon", include_str!("../../std/canon.dream")),
    ("deltanet", include_str!("../../std/deltanet.dream")),
    ("differential", include_str!("../../std/differential.dream")),
    ("dsa", include_str!("../../std/dsa.dream")),
    ("falcon_h1", include_str!("../../std/falcon_h1.dream")),
    ("forgetting", include_str!("../../std/forgetting.dream")),
    ("gated_delta", include_str!("../../std/gated_delta.dream")),
    ("gla", include_str!("../../std/gla.dream")),
    ("kda", include_str!("../../std/kda.dream")),
    ("lightning", include_str!("../../std/lightning.dream")),
    ("linear_attention", include_str!("../../std/linear_attention.dream")),
    ("mamba2", include_str!("../../std/mamba2.dream")),
    ("mlstm", include_str!("../../std/mlstm.dream")),
    ("moba", include_str!("../../std/moba.dream")),
    ("nsa", include_str!("../../std/nsa.dream")),
    ("retnet", include_str!("../../std/retnet.dream")),
    ("rwkv7", include_str!("../../std/rwkv7.dream")),
    ("scaled_mlp", include_str!("../../std/scaled_mlp.dream")),
];

/// The definition of the library of that name.
pub fn definition(name: &str) -> Option<Arc<Definition>> {
    static READ: OnceLock<IndexMap<&'static str, Arc<Definition>>> = OnceLock::new();
    let read = || {
        let one = |(name, text): &(&'static str, &'static str)| {
            let mut definition = super::parse(text).ok()?.into_iter().find(|d| d.name.text == *name)?;
            Arc::make_mut(&mut definition).library = true;
            Some((*name, definition))
        };
        LIBRARY.iter().filter_map(one).collect()
    };
    READ.get_or_init(read).get(name).cloned()
}

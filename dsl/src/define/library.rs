//! The library: definitions inside the program, which a specification uses by their names.

use std::sync::{Arc, OnceLock};

use indexmap::IndexMap;

use super::syntax::Definition;

/// The files of the library by their names: each holds one definition of that name.
pub static LIBRARY: &[(&str, &str)] = &[];

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

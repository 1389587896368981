//! `docs/environment.md` against the sources.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

const PREFIX: &str = "DREAMC_";

/// Names of variables in a text. A name ends in a letter.
fn names(text: &str, found: &mut BTreeSet<String>) {
    for (at, _) in text.match_indices(PREFIX) {
        let name = text[at..].split(|c: char| !c.is_ascii_uppercase() && c != '_').next().unwrap_or("");
        if name.len() > PREFIX.len() && !name.ends_with('_') {
            found.insert(name.into());
        }
    }
}

fn collect(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            if !path.ends_with("target") {
                collect(&path, found);
            }
        } else if path.extension().is_some_and(|e| e == "rs" || e == "py") {
            names(&fs::read_to_string(&path).unwrap(), found);
        }
    }
}

#[test]
fn the_page_of_variables_names_all_that_are_read_and_no_other() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (mut read, mut named) = (BTreeSet::new(), BTreeSet::new());
    let crates = fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path());
    let crates = crates.filter(|folder| folder.join("Cargo.toml").is_file());
    for folder in crates.chain(["src", "tests"].map(|folder| root.join(folder))) {
        collect(&folder, &mut read);
    }
    names(&fs::read_to_string(root.join("docs/environment.md")).unwrap(), &mut named);
    let missing: Vec<_> = read.difference(&named).collect();
    let gone: Vec<_> = named.difference(&read).collect();
    assert!(missing.is_empty() && gone.is_empty(), "not on the page: {missing:?}; read nowhere: {gone:?}");
}

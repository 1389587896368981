//! Every example reads, checks clean and is quick to check.

use std::path::PathBuf;

fn examples() -> Vec<PathBuf> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples");
    let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|e| e == "yaml" || e == "dream"));
    paths.sort();
    paths
}

#[test]
fn check_clean() {
    for path in examples() {
        let start = std::time::Instant::now();
        let ast = dreamc_dsl::parse_file(&path).unwrap_or_else(|diagnostics| panic!("{diagnostics}"));
        let checked = match ast.kind {
            dreamc_dsl::FileKind::Spec => dreamc_dsl::check(&ast, &[]).map(|(_, warnings)| warnings),
            dreamc_dsl::FileKind::Suite => dreamc_dsl::check_suite(&ast, &[]).map(|(_, warnings)| warnings),
        };
        match checked {
            Ok(warnings) => assert!(warnings.is_empty(), "{}: {warnings:?}", path.display()),
            Err(diagnostics) => panic!("{diagnostics}"),
        }
        println!("{} {:?}", path.display(), start.elapsed());
    }
}

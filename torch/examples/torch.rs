//! Prints the module of a specification.

fn main() {
    for path in std::env::args().skip(2) {
        let out = std::env::args().nth(1).unwrap();
        let name = std::path::Path::new(&path).file_stem().unwrap().to_string_lossy().to_string();
        let spec = match dreamc_dsl::load(&path, &[]) {
            Ok((spec, _)) => spec,
            Err(e) => {
                println!("{name}: {e}");
                continue;
            }
        };
        let segments = false;
        match dreamc_torch::module(&spec.model, dreamc_torch::Options { segments, z_loss: spec.train.z_loss })
        {
            Ok(module) => std::fs::write(format!("{out}/{name}.py"), module.text).unwrap(),
            Err(e) => println!("{name}: {e}"),
        }
    }
}

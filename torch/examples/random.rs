//! Prints a random specification and its module.

fn main() {
    for seed in std::env::args().skip(1) {
        let drawn = dreamc_compiler::random::drawn(seed.parse().unwrap());
        let options = dreamc_torch::Options { segments: false, z_loss: drawn.spec.train.z_loss };
        let text = dreamc_torch::module(&drawn.spec.model, options).unwrap().text;
        std::fs::write(format!("/tmp/r{seed}.py"), text).unwrap();
        std::fs::write(format!("/tmp/r{seed}.yaml"), drawn.text).unwrap();
    }
}

//! How fast the PTX device is: `cargo run --release -p dreamc-ptx --example speed`.
//!
//! Needs NVRTC. Prints, for the kernels that its tests use, lane-instructions a second with
//! everything checked and with nothing checked, on one core and on all.

use std::time::Instant;

#[path = "../tests/interpreter/kernels.rs"]
#[allow(dead_code)]
mod kernels;
#[path = "../tests/interpreter/support.rs"]
#[allow(dead_code)]
mod support;

use dreamc_ptx::{Checks, Options};

fn main() {
    let Some(nvrtc) = support::nvrtc() else { return };
    let cores = Options::default().threads;
    println!(
        "{:<38}{:>12}{:>10}{:>16}{:>10}{:>16}",
        "kernel", "lane-instr", "plain", "M/s", "checked", "M/s"
    );
    let examples = [
        ("rmsnorm 512 x 1024", kernels::RMSNORM, "compute_80", kernels::rmsnorm(512, 1024)),
        ("gemm 128 x 256 x 512", kernels::GEMM, "compute_80", kernels::gemm(128, 256, 512)),
        ("attention 2 heads x 256", kernels::ATTENTION, "compute_80", kernels::attention(2, 256)),
        ("moe of 16384 tokens", kernels::MOE, "compute_80", kernels::moe(16384)),
        ("hopper gemm 256 x 256 x 512", kernels::HOPPER, "compute_90a", kernels::hopper_gemm(256, 256, 512)),
    ];
    for (what, text, architecture, example) in examples {
        let module = support::compile(nvrtc, "speed.cu", text, architecture);
        for threads in [1, cores] {
            let time = |checks: Checks| {
                let options = Options { checks, threads, ..Options::default() };
                let runs = (0..5).map(|_| {
                    let start = Instant::now();
                    let (_, stats) =
                        example.case.run(&module, &options).unwrap_or_else(|finding| panic!("{finding}"));
                    (start.elapsed().as_secs_f64(), stats.instructions)
                });
                runs.min_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or_default()
            };
            let (plain, instructions) = time(Checks::NONE);
            let (checked, _) = time(Checks::ALL);
            let cores = if threads == 1 { "1 core".into() } else { format!("{threads} cores") };
            println!(
                "{:<30}{:>8}{:>12}{:>8.1} ms{:>14.0}{:>8.1} ms{:>14.0}",
                what,
                cores,
                instructions,
                plain * 1e3,
                instructions as f64 / plain / 1e6,
                checked * 1e3,
                instructions as f64 / checked / 1e6,
            );
        }
    }
}

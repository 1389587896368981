//! The `rocm` device without a GPU: the program as its users run it, on the stand-in's HIP runtime;
//! and AMD's own compiler, which needs no GPU, on the texts.

use super::cuda::{Card, TINY, losses, sandbox};
use crate::support::sandbox::{Sandbox, texts};
use dreamc_compiler::codegen::{HEADERS, Variant, generate};
use dreamc_compiler::{Options, compile};
use dreamc_dsl::{Spelling, check, parse};
use dreamc_nvrtc::{Nvrtc, Source};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

/// The stand-in as AMD's runtime and compiler; `None` where NVRTC is missing, which compiles for
/// it.
fn card() -> Option<Card> {
    Card::of(&["libamdhip64.so", "libhiprtc.so"])
}

fn command(card: &Card, sandbox: &Sandbox, settings: &str, line: &[&str]) -> Command {
    let mut command = sandbox.command(line);
    command.env("STANDIN", format!("{settings} nvrtc={}", card.nvrtc.display()));
    command.env("LD_LIBRARY_PATH", card.folder.path()).env("DREAMC_HIPRTC", card.folder.path());
    command.env("DREAMC_CACHE", Path::new(env!("CARGO_TARGET_TMPDIR")).join("rocm"));
    command
}

#[test]
fn a_gpu_of_amds_trains_as_the_cpu_does() {
    let Some(card) = card() else { return };
    let sandbox = sandbox();
    for device in ["rocm", "cpu"] {
        let line = ["train", "tiny.yaml", "--device", device, "--out", device];
        let output = command(&card, &sandbox, "", &line).output().unwrap();
        let (out, err) = texts(&output);
        assert!(output.status.success(), "{device}: {out}\n{err}");
        assert!(device == "cpu" || (out + &err).contains("tried on no GPU of AMD's yet"), "{device}");
    }
    let [amd, cpu] = ["rocm", "cpu"].map(|run| losses(&sandbox, run));
    assert_eq!(amd.len(), cpu.len());
    assert!(amd.iter().zip(&cpu).all(|(a, b)| (a - b).abs() < 1e-5), "{amd:?} {cpu:?}");
    let line = ["verify", "tiny.yaml", "--device", "rocm", "--only", "devices"];
    let output = command(&card, &sandbox, "", &line).output().unwrap();
    assert!(output.status.success(), "{:?}", texts(&output));
}

#[test]
fn a_runtime_of_amds_that_does_not_serve_is_an_error_that_says_what_would() {
    let Some(card) = card() else { return };
    let sandbox = sandbox();
    let refused = |settings: &str, device: &str, alter: fn(&mut Command)| {
        let mut command =
            command(&card, &sandbox, settings, &["train", "tiny.yaml", "--device", device, "--out", "run"]);
        alter(&mut command);
        let output = command.output().unwrap();
        let (out, err) = texts(&output);
        assert_eq!(output.status.code(), Some(1), "{out}\n{err}");
        assert!(!err.contains("panicked"), "{err}");
        err
    };
    assert!(refused("cards=0", "rocm", |_| ()).contains("sees no GPU"));
    let other = refused("cards=2", "rocm:7", |_| ());
    assert!(other.contains("no such GPU") && other.contains("there are 2"), "{other}");
    let compiler = refused("", "rocm", |c| {
        c.env("DREAMC_HIPRTC", "/nowhere");
    });
    assert!(compiler.contains("hipRTC") && compiler.contains("DREAMC_HIPRTC"), "{compiler}");
    assert!(!sandbox.path("run").exists());
    let full = refused("memory=4194304", "rocm", |_| ());
    assert!(full.contains("room for 4194304 bytes"), "{full}");
}

/// AMD's own compiler takes the naive text of every kernel.
#[test]
fn amds_compiler_takes_naive_kernels() {
    let compiler = match Nvrtc::find_amd() {
        Ok(compiler) => compiler,
        Err(error) => return dreamc_skip::skip(error.to_string()),
    };
    // A text of each kind, with each of its entries.
    let mut list: BTreeMap<String, String> = BTreeMap::new();
    for text in [TINY, include_str!("../../examples/tiny-mod-dr.yaml")] {
        let spec = check(&parse("a.yaml", text, Spelling::Yaml).unwrap(), &[]).unwrap().0;
        let options = Options { batch: 1, sequence: 16, train: true, ..Options::default() };
        let plan = compile(&spec, &options).unwrap().plan;
        for kernel in &plan.kernels {
            let naive = Variant { naive: true, ..Variant::default() };
            let Some(source) = generate(kernel, naive).unwrap() else { continue };
            let kind = kernel.to_string().split(' ').next().unwrap_or_default().to_string();
            list.entry(kind).or_insert(source.text);
        }
    }
    assert!(list.len() > 12, "{:?}", list.keys());
    for (kind, text) in list {
        let source = Source { name: &kind, text: &text, headers: HEADERS };
        let options = ["--offload-arch=gfx90a", "-O3", "-ffp-contract=off"];
        let compiled = compiler.cubin(source, &options).unwrap_or_else(|e| panic!("{kind}: {e}"));
        assert!(!compiled.code.is_empty(), "{kind}");
    }
}

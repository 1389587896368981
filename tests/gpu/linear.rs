//! Linear attention in chunks, interpreted: against the naive kernels, with nothing found.

use crate::ptx::{by_hand, results, write};
use crate::support::distance;
use dreamc_compiler::ir::DType::{self, Bf16, F32, I32};
use dreamc_compiler::op::linear_attention::Part;
use dreamc_compiler::op::linear_attention::kernel::LinearShape;
use dreamc_compiler::op::{Delta, Tokens};
use dreamc_compiler::program::{BufferId, Kernel, Plan, kernel};
use dreamc_device::gpu::sources;
use dreamc_device::ptx::{Checks, Options, PtxDevice};
use dreamc_device::{DeviceError, Session};

/// A form, its sizes, and whether pairs of heads share queries and keys.
struct Case {
    delta: Delta,
    decay: bool,
    before: bool,
    segments: bool,
    batch: u64,
    tokens: u64,
    size: u64,
    value: u64,
    shared: bool,
}

impl Case {
    /// Forward and backward as one program.
    fn plan(&self) -> Plan {
        let (groups, members) = (2, 2);
        let heads = groups * members;
        let of_keys = |width| Part {
            row: width * if self.shared { groups } else { heads },
            width,
            strides: if self.shared { vec![width, 0] } else { vec![members * width, width] },
        };
        let of_heads = |width| Part { row: width * heads, width, strides: vec![members * width, width] };
        let key = of_keys(self.size);
        let mut parts = vec![key.clone(), key.clone(), of_heads(self.value)];
        parts.extend((self.delta == Delta::Key).then(|| of_heads(self.size)));
        let shape = LinearShape {
            batch: self.batch,
            tokens: self.tokens,
            heads: vec![groups, members],
            size: self.size,
            value: self.value,
            parts: parts.clone(),
            decay: self.decay.then(|| of_heads(1)),
        };
        let rows = |row| [self.batch, self.tokens, row];
        let mut buffers: Vec<(&str, DType, Vec<u64>)> = vec![];
        let mut names: Vec<&str> = vec![];
        for (name, part) in ["q", "k", "v", "u"].iter().zip(&parts) {
            buffers.push((name, Bf16, rows(part.row).to_vec()));
            names.push(name);
        }
        let mut marks: Vec<&str> = vec![];
        if self.decay {
            buffers.push(("decay", F32, rows(heads).to_vec()));
            marks.push("decay");
        }
        if self.segments {
            buffers.push(("segments", I32, vec![self.batch, self.tokens]));
            marks.push("segments");
        }
        let mut gradients = vec![];
        for name in ["o", "do"] {
            buffers.push((name, Bf16, rows(heads * self.value).to_vec()));
        }
        for (name, part) in ["dq", "dk", "dv", "du"].iter().zip(&parts) {
            buffers.push((name, Bf16, rows(part.row).to_vec()));
            gradients.push(*name);
        }
        if self.decay {
            buffers.push(("ddecay", F32, rows(heads).to_vec()));
            gradients.push("ddecay");
        }
        let tokens = if self.segments { Tokens::Segments } else { Tokens::All };
        let (delta, before, segments) = (self.delta, self.before, self.segments);
        let forward =
            kernel::LinearAttention { shape: shape.clone(), delta, before, tokens, size_first: false };
        let backward = kernel::LinearAttentionGrad { shape, delta, before, segments };
        let of_forward = [&names[..], &marks, &["o"]].concat();
        let of_backward = [&names[..], &["do"], &marks, &gradients].concat();
        let buffers: Vec<_> = buffers.iter().map(|(n, t, s)| (*n, *t, &s[..])).collect();
        let (forward, backward): (Kernel, Kernel) = (forward.into(), backward.into());
        by_hand(&buffers, vec![(forward, of_forward, None), (backward, of_backward, None)])
    }

    fn compare(&self, what: &str) {
        let plan = self.plan();
        let texts = sources(&plan, "sm_80", Default::default()).unwrap();
        assert!(texts.iter().all(|t| t.text.contains("linear.cuh")), "{what} runs in chunks");
        let fill = |session: &mut dyn Session| -> Result<(), DeviceError> {
            for (i, b) in plan.buffers.iter().enumerate() {
                let random = |j: u64| ((j * 7919 + i as u64 * 131 + j * j % 97) % 1013) as f32 / 1013.0 - 0.5;
                let value = |j: u64| match b.name.as_str() {
                    // A factor of 0, factors of 1, and others.
                    "decay" if j % 83 == 7 => f32::NEG_INFINITY,
                    "decay" if j.is_multiple_of(5) => 0.0,
                    "decay" => -0.3 * random(j).abs(),
                    "q" | "k" | "u" => random(j) / (self.size as f32 / 8.0).sqrt(),
                    _ => random(j),
                };
                // Documents of 1, 40, 23 and 90 tokens, and some that take no part.
                let document = |j: u64| match j % self.tokens {
                    t if t % 37 == 5 || t == 0 => -1,
                    t => [1, 2, 42, 65, 155].iter().filter(|&&end| t >= end).count() as i32,
                };
                write(session, BufferId(i as u32), b, value, document)?;
            }
            Ok(())
        };
        let options = Options { checks: Checks::NONE, ..Options::default() };
        let naive = results(&plan, &fill, &PtxDevice::naive(options).unwrap());
        let found = results(&plan, &fill, &PtxDevice::new(Options::default()).unwrap());
        let read = ["q", "k", "v", "u", "decay", "segments", "do"];
        for ((name, found), (_, expected)) in
            found.iter().zip(&naive).filter(|((name, _), _)| !read.contains(&name.as_str()))
        {
            let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
            let e = distance(&wide(found), &wide(expected));
            println!("{what}: {name} differs by {e:.1e}");
            // Products of bf16, one after another.
            assert!(e < 1.5e-2, "{what}: {name} differs by {e}");
        }
    }
}

/// A decay of heads, the delta of a key, documents.
const GATED: Case = Case {
    delta: Delta::Key,
    decay: true,
    before: false,
    segments: true,
    batch: 2,
    tokens: 150,
    size: 32,
    value: 48,
    shared: false,
};

fn interpreted() -> bool {
    dreamc_skip::need(PtxDevice::fast()).is_some()
}

#[test]
fn a_gated_delta_rule_in_chunks_is_right_and_clean() {
    if interpreted() {
        GATED.compare("gated delta rule");
    }
}

#[test]
fn linear_attention_in_chunks_is_right_and_clean() {
    if !interpreted() {
        return;
    }
    Case { delta: Delta::None, shared: true, tokens: 70, value: 80, ..GATED }.compare("decays");
    Case { before: true, tokens: 65, size: 64, value: 16, ..GATED }.compare("delta, states before");
    Case { decay: false, segments: false, shared: true, size: 16, value: 64, ..GATED }.compare("delta rule");
    let plain = Case { delta: Delta::None, decay: false, before: true, segments: false, tokens: 33, ..GATED };
    plain.compare("no decay");
}

/// Lines of `linear.cuh`, and faults in their place.
const FAULTS: [(&str, &str, &str); 7] = [
    (
        "a document reads the one before it",
        "near[t][i] = begins[t] ? 0.0f : product;",
        "near[t][i] = product;",
    ),
    ("a token does not see itself", "return j <= i ? decays.far(i, j)", "return j < i ? decays.far(i, j)"),
    ("a state does not decay", "state[j][e] *= whole;", "state[j][e] *= 1.0f;"),
    (
        "the triangle decays once more",
        "first * s.decays.near[i][j] : 0.0f",
        "first * s.decays.far(i, j) : 0.0f",
    ),
    (
        "states before chunks are a chunk late",
        "bring(chunk + 1);\n            copy_commit();\n            copy_wait<STAGES - 1>",
        "bring(chunk);\n            copy_commit();\n            copy_wait<STAGES - 1>",
    ),
    (
        "pairs before a token are counted",
        "float pairs = of(s.rows, i) - down(s.columns, i)",
        "float pairs = of(s.rows, i)",
    ),
    ("a barrier is missing", "        __syncthreads();\n        invert(", "        invert("),
];

/// Each in a process of its own, since blocks of kernels are read once.
#[test]
fn faults_of_chunks_are_noticed() {
    if !interpreted() {
        return;
    }
    let text = include_str!("../../kernels/linear.cuh");
    for (what, line, fault) in FAULTS {
        assert!(text.contains(line), "{what}: there is no `{line}`");
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("linear.cuh"), text.replacen(line, fault, 1)).unwrap();
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "linear::a_gated_delta_rule_in_chunks_is_right_and_clean"]);
        let out = command.env("DREAMC_KERNELS", folder.path()).output().unwrap();
        let said = String::from_utf8_lossy(&out.stdout);
        assert!(said.contains("running 1 test") && !out.status.success(), "{what} is not noticed:\n{said}");
    }
}

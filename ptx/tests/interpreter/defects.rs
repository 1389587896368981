//! Kernels with a defect each: every one must be found, and in the way that is written next to it.
//!
//! A defect is an edit of a kernel that is right (`kernels.rs` shows that it is). It is found by a
//! finding of the device, or, where the kernel is a legal one that computes something else, by its
//! results: wrong ones, or different ones under different schedules.

use dreamc_nvrtc::Nvrtc;
use dreamc_ptx::{Arg, Kind, Launch, Options, Swizzle};

use crate::kernels::{self, Example};
use crate::support::{SCHEDULES, compile, nvrtc};

/// The way a defect is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum By {
    Finding(Kind),
    /// The results are not what they should be.
    Results,
    /// The results depend on the schedule.
    Schedules,
}

use By::{Finding, Results, Schedules};

/// Edits of the source: what stands there once, and what stands there instead.
type Edits = &'static [(&'static str, &'static str)];

fn find(nvrtc: &Nvrtc, text: &str, architecture: &str, example: &Example) -> Option<(By, String)> {
    let module = compile(nvrtc, "defect.cu", text, architecture);
    let mut bytes: Option<Vec<u8>> = None;
    for schedule in SCHEDULES {
        let options = Options { schedule, threads: 1, instruction_budget: 20_000_000, ..Options::default() };
        let memory = match example.case.run(&module, &options) {
            Ok((memory, _)) => memory,
            Err(finding) => return Some((Finding(finding.kind), finding.to_string())),
        };
        let written = example.case.written(&memory);
        if bytes.as_ref().is_some_and(|bytes| *bytes != written) {
            return Some((Schedules, format!("other bytes under {schedule:?}")));
        }
        bytes = Some(written);
        if let Some(wrong) = (example.wrong)(&memory) {
            return Some((Results, wrong));
        }
    }
    None
}

fn check(text: &str, architecture: &str, example: impl Fn() -> Example, defects: &[(&str, Edits, By)]) {
    check_launches(
        text,
        architecture,
        |_| example(),
        &defects.iter().map(|d| (d.0, d.1, d.2)).collect::<Vec<_>>(),
    );
}

/// As [`check`], the example being made by the defect's name.
fn check_launches(
    text: &str,
    architecture: &str,
    example: impl Fn(&str) -> Example,
    defects: &[(&str, Edits, By)],
) {
    let Some(nvrtc) = nvrtc() else { return };
    let mut wrong = Vec::new();
    for (name, edits, by) in defects {
        let mut edited = text.to_owned();
        for (from, to) in *edits {
            assert_eq!(edited.matches(from).count(), 1, "{name}: `{from}` must stand once");
            edited = edited.replace(from, to);
        }
        let found = find(nvrtc, &edited, architecture, &example(name));
        match found {
            Some((found, words)) if found == *by => println!("{name}: {found:?}\n{words}\n"),
            Some((found, words)) => wrong.push(format!("{name}: expected {by:?}, found {found:?}: {words}")),
            None => wrong.push(format!("{name}: not found")),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

#[test]
fn in_rmsnorm() {
    check(
        kernels::RMSNORM,
        "compute_80",
        || kernels::rmsnorm(3, 300),
        &[
            ("a missing barrier", &[("    __syncthreads();\n", "")], Finding(Kind::Uninitialised)),
            (
                "a barrier for half the warps",
                &[("__syncthreads();", "if (threadIdx.x < 64) __syncthreads();")],
                Finding(Kind::Race),
            ),
            (
                "two barriers in one warp",
                &[(
                    "__syncthreads();",
                    "if (threadIdx.x % 2) asm volatile(\"bar.sync 1;\"); else asm volatile(\"bar.sync 2;\");",
                )],
                Finding(Kind::DivergentBarrier),
            ),
            (
                "a barrier for some lanes of a warp",
                &[("__syncthreads();", "if (threadIdx.x < 100) __syncthreads();")],
                Finding(Kind::Race),
            ),
            (
                "a mask of half the warp",
                &[("0xffffffffu, sum, step", "0xffffu, sum, step")],
                Finding(Kind::Mask),
            ),
            (
                "a shuffle in a branch",
                &[("sum += __shfl_xor_sync", "if (threadIdx.x % 2 == 0) sum += __shfl_xor_sync")],
                Finding(Kind::Mask),
            ),
            ("a step of the reduction missing", &[("step > 0", "step > 1")], Results),
            (
                "one element too many read",
                &[(
                    "    for (int i = threadIdx.x; i < width; i += blockDim.x) {\n        float value",
                    "    for (int i = threadIdx.x; i <= width; i += blockDim.x) {\n        float value",
                )],
                Finding(Kind::OutOfBounds),
            ),
            (
                "one element too many written",
                &[("i < width; i += blockDim.x) {\n        y", "i <= width; i += blockDim.x) {\n        y")],
                Finding(Kind::OutOfBounds),
            ),
            (
                "a float atomic",
                &[
                    ("partial[threadIdx.x / 32] = sum;", "atomicAdd(partial, sum);"),
                    (
                        "float sum = 0.0f;",
                        "float sum = 0.0f; if (threadIdx.x < 4) partial[threadIdx.x] = 0.0f; __syncthreads();",
                    ),
                ],
                Finding(Kind::FloatAtomic),
            ),
            (
                "an array too small",
                &[("partial[threadIdx.x / 32] = sum;", "partial[threadIdx.x / 16] = sum;")],
                Finding(Kind::OutOfBounds),
            ),
            (
                "an unaligned wide load",
                &[("gain[i]", "__uint_as_float(u32(*(volatile const u64 *)(gain + 1)))")],
                Finding(Kind::Misaligned),
            ),
            (
                "an input overwritten",
                &[("__syncthreads();", "__syncthreads(); ((bf16 *)row)[threadIdx.x] = to_bf16(sum);")],
                Finding(Kind::ReadOnly),
            ),
            (
                "lanes that leave before a shuffle",
                &[("for (int step = 16;", "if (threadIdx.x % 32 > 20) return;\n    for (int step = 16;")],
                Finding(Kind::Mask),
            ),
            (
                "all threads writing one place",
                &[("if (threadIdx.x % 32 == 0) partial", "partial")],
                Finding(Kind::Race),
            ),
            (
                "an output read back",
                &[("* gain[i]", "* gain[i] + to_float(y[i])")],
                Finding(Kind::Uninitialised),
            ),
        ],
    );
}

#[test]
fn in_gemm() {
    const BARRIER: &str = "        copy_wait<STAGES - 2>();\n        __syncthreads();\n";
    check(
        kernels::GEMM,
        "compute_80",
        || kernels::gemm(70, 72, 200),
        &[
            ("a missing barrier", &[(BARRIER, "        copy_wait<STAGES - 2>();\n")], Finding(Kind::Race)),
            ("a missing wait", &[(BARRIER, "        __syncthreads();\n")], Finding(Kind::InFlight)),
            (
                "a wait after the barrier",
                &[(BARRIER, "        __syncthreads();\n        copy_wait<STAGES - 2>();\n")],
                Finding(Kind::Race),
            ),
            (
                "a group too many under way",
                &[("copy_wait<STAGES - 2>", "copy_wait<STAGES - 1>")],
                Finding(Kind::InFlight),
            ),
            (
                "a group not committed",
                &[("        copy_commit();\n\n        u32 tile_a", "\n        u32 tile_a")],
                Finding(Kind::InFlight),
            ),
            (
                "no empty groups at the end",
                &[
                    (
                        "if (next < steps) load_stage(p, base + next",
                        "if (next < steps) { load_stage(p, base + next",
                    ),
                    (
                        "        copy_commit();\n\n        u32 tile_a",
                        "        copy_commit(); }\n\n        u32 tile_a",
                    ),
                ],
                Finding(Kind::InFlight),
            ),
            (
                "a stage too early",
                &[("base + next % STAGES", "base + step % STAGES")],
                Finding(Kind::InFlight),
            ),
            (
                "two stages in three places",
                &[("step % STAGES * STAGE_BYTES, tile_b", "(step + 1) % STAGES * STAGE_BYTES, tile_b")],
                Finding(Kind::InFlight),
            ),
            (
                "fragments of b swapped",
                &[(
                    "fragment_b[j / 2][j % 2 * 2], fragment_b[j / 2][j % 2 * 2 + 1]",
                    "fragment_b[j / 2][j % 2 * 2 + 1], fragment_b[j / 2][j % 2 * 2]",
                )],
                Results,
            ),
            (
                "fragments of a swapped",
                &[(
                    "int row = warp_row + i * 16 + lane % 16, depth = k0 + lane / 16 * 8;",
                    "int row = warp_row + i * 16 + lane % 8 + lane / 16 * 8, depth = k0 + lane / 8 % 2 * 8;",
                )],
                Results,
            ),
            (
                "b not transposed",
                &[("load_matrix_x4_transposed(fragment_b", "load_matrix_x4(fragment_b")],
                Results,
            ),
            ("no check of the last row", &[("if (row < m)", "if (true)")], Finding(Kind::OutOfBounds)),
            ("no check of the last column", &[("if (column < n)", "if (true)")], Finding(Kind::Race)),
            (
                "a source out of range where nothing is read",
                &[(
                    "valid ? p.a + size_t(row0 + row) * p.k + k0 + k : p.a",
                    "p.a + size_t(row0 + row) * p.k + k0 + k",
                )],
                Finding(Kind::OutOfBounds),
            ),
            (
                "no zeros beyond the edge",
                &[(
                    "row0 + row < p.m && k0 + k < p.k;",
                    "true; if (row0 + row >= p.m || k0 + k >= p.k) continue;",
                )],
                Finding(Kind::Uninitialised),
            ),
            (
                "rows that are not aligned",
                &[("A_ROW = (DEPTH + 8) * 2", "A_ROW = (DEPTH + 2) * 2")],
                Finding(Kind::Misaligned),
            ),
            ("two lanes with one row", &[("row + 8) * n", "row + 7) * n")], Finding(Kind::Race)),
            ("a tail of k left out", &[("(k + DEPTH - 1) / DEPTH", "k / DEPTH")], Results),
            ("half the depth left out", &[("k0 < DEPTH; k0 += 16", "k0 < DEPTH; k0 += 32")], Results),
            (
                "half of a multiplication in a branch",
                &[("multiply(sums[i][j]", "if (lane % 2 == 0) multiply(sums[i][j]")],
                Finding(Kind::Mask),
            ),
        ],
    );
}

#[test]
fn in_attention() {
    const END: &str = "        copy_wait<0>();\n        __syncthreads();\n    }\n";
    check(
        kernels::ATTENTION,
        "compute_80",
        || kernels::attention(1, 200),
        &[
            (
                "no barrier after the queries",
                &[("    __syncthreads();\n\n    float sums", "\n    float sums")],
                Finding(Kind::Race),
            ),
            ("no barrier between tiles", &[(END, "        copy_wait<0>();\n    }\n")], Finding(Kind::Race)),
            (
                "no wait for the next tile",
                &[(END, "        copy_wait<1>();\n        __syncthreads();\n    }\n")],
                Finding(Kind::InFlight),
            ),
            (
                "one buffer for two tiles",
                &[("(tile + 1) % 2 * 2 * TILE_BYTES", "tile % 2 * 2 * TILE_BYTES")],
                Finding(Kind::InFlight),
            ),
            ("a token that does not see itself", &[("column <= row", "column < row")], Results),
            ("a token that sees the next", &[("column <= row", "column <= row + 1")], Results),
            (
                "a sum over half a row",
                &[("return x + __shfl_xor_sync(0xffffffffu, x, 2);", "return x;")],
                Results,
            ),
            (
                "a sum that does not shrink",
                &[("total[half] * shrink + quad_sum", "total[half] + quad_sum")],
                Results,
            ),
            ("powers of the wrong base", &[("score * scale * LOG2E", "score * scale")], Results),
            (
                "keys of the wrong tile",
                &[("load_tile(next, k + head, (tile + 1) * TILE", "load_tile(next, k + head, tile * TILE")],
                Results,
            ),
            ("rows beyond the end", &[("if (row < length)", "if (true)")], Finding(Kind::OutOfBounds)),
            (
                "another head",
                &[("size_t head = size_t(blockIdx.y)", "size_t head = size_t(blockIdx.y + 1)")],
                Finding(Kind::OutOfBounds),
            ),
        ],
    );
}

#[test]
fn in_routing() {
    check(
        kernels::MOE,
        "compute_80",
        || kernels::moe(500),
        &[
            (
                "counts that start anywhere",
                &[("histogram[i] = 0;", "if (i > 0) histogram[i] = 0;")],
                Finding(Kind::Uninitialised),
            ),
            (
                "no barrier after the zeros",
                &[("histogram[i] = 0;\n    __syncthreads();", "histogram[i] = 0;")],
                Finding(Kind::Race),
            ),
            (
                "no barrier after the counts",
                &[(
                    "atomicAdd(&histogram[expert[token]], 1u);\n    __syncthreads();",
                    "atomicAdd(&histogram[expert[token]], 1u);",
                )],
                Finding(Kind::Race),
            ),
            (
                "an increment that is no atomic",
                &[("atomicAdd(&histogram[expert[token]], 1u);", "histogram[expert[token]] += 1;")],
                Finding(Kind::Race),
            ),
            (
                "tokens beyond the end",
                &[("if (token < tokens) atomicAdd", "atomicAdd")],
                Finding(Kind::OutOfBounds),
            ),
            (
                "all blocks writing one row",
                &[("counts[blockIdx.x * EXPERTS + i] = histogram[i];", "counts[i] = histogram[i];")],
                Finding(Kind::Race),
            ),
            (
                "no barrier between turns",
                &[("        __syncthreads();\n        if (turn == warp)", "        if (turn == warp)")],
                Finding(Kind::Race),
            ),
            ("no barrier within the warp", &[("            __syncwarp();\n", "")], Finding(Kind::Race)),
            (
                "lanes missing from a match",
                &[(
                    "u32 peers = __match_any_sync(0xffffffffu, mine);",
                    "u32 peers = 0; if (mine >= 0) peers = __match_any_sync(0xffffffffu, mine);",
                )],
                Finding(Kind::Mask),
            ),
            (
                "a lane that adds to itself",
                &[("if (lane >= step) scan += below;", "scan += below;")],
                Finding(Kind::OutOfBounds),
            ),
            (
                "one offset too far",
                &[("offsets[EXPERTS] = scan;", "offsets[EXPERTS + 1] = scan;")],
                Finding(Kind::OutOfBounds),
            ),
            (
                "slots in order of arrival",
                &[
                    ("rank = __popc(peers & ((1u << lane) - 1))", "rank = 0"),
                    (
                        "position = mine >= 0 ? next[mine] + rank : 0;",
                        "position = mine >= 0 ? atomicAdd((u32 *)starts + blockIdx.x * EXPERTS + mine, 1u) : 0;",
                    ),
                    ("if (rank == 0) next[mine] += __popc(peers);", ""),
                    ("next[i] = starts[blockIdx.x * EXPERTS + i]", "next[i] = 0"),
                    (
                        "    for (int turn = 0; turn < CHUNK / 32; ++turn) {\n        __syncthreads();\n        if (turn == warp)",
                        "    {\n        (void)warp;",
                    ),
                ],
                Schedules,
            ),
            (
                "a wait for what never comes",
                &[(
                    "    __shared__ u32 next[EXPERTS];",
                    "    __shared__ u32 next[EXPERTS];\n    while (((volatile const u32 *)starts)[0] != 12345678u);",
                )],
                Finding(Kind::Budget),
            ),
        ],
    );
}

/// The last block to finish adds up what all blocks left.
const LAST_BLOCK: &str = r#"
#include "prelude.cuh"
extern "C" __global__ void total(const int *x, int *partial, u32 *ticket, int *sum) {
    __shared__ bool last;
    int value = __reduce_add_sync(0xffffffffu, x[blockIdx.x * 32 + threadIdx.x]);
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = value;
        __threadfence();
        last = atomicAdd(ticket, 1u) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    if (last) {
        int all = threadIdx.x < gridDim.x ? partial[threadIdx.x] : 0;
        all = __reduce_add_sync(0xffffffffu, all);
        if (threadIdx.x == 0) *sum = all;
    }
}
"#;

fn last_block() -> Example {
    let x: Vec<i32> = (0..20 * 32).collect();
    let right: i32 = x.iter().sum();
    let mut buffers = crate::support::Buffers::default();
    let args = [buffers.input(&x), buffers.output(80), buffers.both(&[0u32]), buffers.output(4)];
    let sum = args[3];
    let args = args.map(Arg::Pointer).to_vec();
    let launch =
        Launch { kernel: "total".into(), grid: [20, 1, 1], block: [32, 1, 1], shared_bytes: 0, args };
    let wrong = move |memory: &dreamc_ptx::Memory| {
        let found = memory.read_slice::<i32>(sum, 1).unwrap()[0];
        (found != right).then(|| format!("{found}, right is {right}"))
    };
    Example { case: buffers.case(vec![launch]), wrong: Box::new(wrong) }
}

#[test]
fn between_blocks() {
    if let Some(nvrtc) = nvrtc() {
        let module = compile(nvrtc, "last.cu", LAST_BLOCK, "compute_80");
        let example = last_block();
        let memory = example.case.run_everywhere(&module);
        assert_eq!((example.wrong)(&memory), None);
    }
    check(
        LAST_BLOCK,
        "compute_80",
        last_block,
        &[
            (
                "no fence before the ticket",
                &[("partial[blockIdx.x] = value;\n        __threadfence();", "partial[blockIdx.x] = value;")],
                Finding(Kind::Race),
            ),
            ("no fence after the ticket", &[("- 1;\n        __threadfence();", "- 1;")], Finding(Kind::Race)),
            (
                "a fence for the block only",
                &[(
                    "partial[blockIdx.x] = value;\n        __threadfence();",
                    "partial[blockIdx.x] = value;\n        __threadfence_block();",
                )],
                Finding(Kind::Race),
            ),
            ("a ticket that is no atomic", &[("atomicAdd(ticket, 1u)", "(*ticket)++")], Finding(Kind::Race)),
            ("every block the last", &[("== gridDim.x - 1", ">= 0")], Finding(Kind::Uninitialised)),
        ],
    );
}

#[test]
fn in_hopper_gemm() {
    const WAIT_EMPTY: &str = "                barrier_wait(empty0 + 8 * stage, step / STAGES % 2 ^ 1);\n";
    check_launches(
        kernels::HOPPER,
        "compute_90a",
        |name| {
            let mut example = kernels::hopper_gemm(128, 128, 320);
            if let Arg::TensorMap(map) = &mut example.case.launches[0].args[1]
                && name == "a map with another swizzle"
            {
                map.swizzle = Swizzle::None;
            }
            example
        },
        &[
            (
                "no wgmma.fence",
                &[("        asm volatile(\"wgmma.fence.sync.aligned;\" ::: \"memory\");\n", "")],
                Finding(Kind::MissingFence),
            ),
            (
                "no wait for the products",
                &[("        asm volatile(\"wgmma.wait_group.sync.aligned 0;\" ::: \"memory\");\n", "")],
                Finding(Kind::InFlight),
            ),
            (
                "a wait that leaves one group",
                &[("wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group.sync.aligned 1;")],
                Finding(Kind::InFlight),
            ),
            (
                "products not committed",
                &[("        asm volatile(\"wgmma.commit_group.sync.aligned;\" ::: \"memory\");\n", "")],
                Finding(Kind::InFlight),
            ),
            (
                "no fence after mbarrier.init",
                &[("        asm volatile(\"fence.mbarrier_init.release.cluster;\" ::: \"memory\");\n", "")],
                Finding(Kind::MissingFence),
            ),
            ("no barrier after mbarrier.init", &[("    __syncthreads();\n", "")], Finding(Kind::Race)),
            (
                "no proxy fence before the store",
                &[("    asm volatile(\"fence.proxy.async.shared::cta;\" ::: \"memory\");\n", "")],
                Finding(Kind::MissingFence),
            ),
            (
                "no barrier before the store",
                &[("    asm volatile(\"bar.sync %0, 128;\" ::\"r\"(group) : \"memory\");\n", "")],
                Finding(Kind::Race),
            ),
            (
                "no wait for the store",
                &[("        asm volatile(\"cp.async.bulk.wait_group.read 0;\" ::: \"memory\");\n", "")],
                Finding(Kind::InFlight),
            ),
            (
                "too few bytes expected",
                &[(
                    "barrier_expect(full0 + 8 * stage, STAGE_BYTES)",
                    "barrier_expect(full0 + 8 * stage, STAGE_BYTES - 16)",
                )],
                Finding(Kind::Deadlock),
            ),
            (
                "too many bytes expected",
                &[(
                    "barrier_expect(full0 + 8 * stage, STAGE_BYTES)",
                    "barrier_expect(full0 + 8 * stage, STAGE_BYTES + 16)",
                )],
                Finding(Kind::Deadlock),
            ),
            (
                "bytes of a part only expected",
                &[(
                    "barrier_expect(full0 + 8 * stage, STAGE_BYTES)",
                    "barrier_expect(full0 + 8 * stage, A_BYTES)",
                )],
                Finding(Kind::InFlight),
            ),
            (
                "a stage empty after one of two",
                &[("barrier_init(empty0 + 8 * i, 2)", "barrier_init(empty0 + 8 * i, 1)")],
                Finding(Kind::InFlight),
            ),
            (
                "a stage that waits for three",
                &[("barrier_init(empty0 + 8 * i, 2)", "barrier_init(empty0 + 8 * i, 3)")],
                Finding(Kind::Deadlock),
            ),
            (
                "the other parity when full",
                &[(
                    "barrier_wait(full0 + 8 * stage, step / STAGES % 2)",
                    "barrier_wait(full0 + 8 * stage, step / STAGES % 2 ^ 1)",
                )],
                Finding(Kind::InFlight),
            ),
            (
                "the other parity when empty",
                &[("step / STAGES % 2 ^ 1);", "step / STAGES % 2);")],
                Finding(Kind::Deadlock),
            ),
            ("no wait for an empty stage", &[(WAIT_EMPTY, "")], Finding(Kind::Mbarrier)),
            (
                "a thread that waits for every phase, and nobody for it",
                &[(
                    "        asm volatile(\"setmaxnreg.dec.sync.aligned.u32 40;\");\n",
                    "        asm volatile(\"setmaxnreg.dec.sync.aligned.u32 40;\");\n        if (threadIdx.x == 32)\n\
                     for (int step = 0; step < steps; ++step)\n\
                     barrier_wait(full0 + 8 * (step % STAGES), step / STAGES % 2);\n",
                )],
                Finding(Kind::Mbarrier),
            ),
            (
                "a stage given back too early",
                &[
                    ("        if (threadIdx.x % 128 == 0) barrier_arrive(empty0 + 8 * stage);\n", ""),
                    (
                        "        asm volatile(\"wgmma.wait_group.sync.aligned 0;\" ::: \"memory\");\n",
                        "        if (threadIdx.x % 128 == 0) barrier_arrive(empty0 + 8 * stage);\n        asm volatile(\"wgmma.wait_group.sync.aligned 0;\" ::: \"memory\");\n",
                    ),
                ],
                Finding(Kind::Race),
            ),
            (
                "a result over tiles in use",
                &[("    asm volatile(\"bar.sync 3, 256;\" ::: \"memory\");\n", "")],
                Finding(Kind::Race),
            ),
            (
                "a barrier for one group too many",
                &[("bar.sync 3, 256;", "bar.sync 3, 384;")],
                Finding(Kind::Deadlock),
            ),
            (
                "a barrier that two counts use",
                &[(
                    "bar.sync 3, 256;",
                    "bar.sync 3, %0;\" ::\"r\"(half ? 128 : 256) : \"memory\"); asm volatile(\"",
                )],
                Finding(Kind::Barrier),
            ),
            (
                "a descriptor with another stride",
                &[(
                    "tile + half * (A_BYTES / 2) + i * 32, 16, 1024",
                    "tile + half * (A_BYTES / 2) + i * 32, 16, 512",
                )],
                Results,
            ),
            (
                "b taken as stored by columns",
                &[("p, 1, 1, 0, 1;", "p, 1, 1, 0, 0;")],
                Finding(Kind::InFlight),
            ),
            ("a step of the depth too short", &[("i * 2048", "i * 1024")], Results),
            ("sums that start anywhere", &[("step + i > 0", "1")], Results),
            (
                "shared memory aligned by luck",
                &[("__align__(1024) u8 shared", "__align__(128) u8 shared")],
                Finding(Kind::Descriptor),
            ),
            ("a map with another swizzle", &[], Finding(Kind::Descriptor)),
            (
                "a warp that does not multiply",
                &[(
                    "        for (int i = 0; i < DEPTH / 16; ++i) {",
                    "        if (warp != 3) for (int i = 0; i < DEPTH / 16; ++i) {",
                )],
                Finding(Kind::Deadlock),
            ),
        ],
    );
}

#[test]
fn in_a_cluster_with_fences_of_shared_memory() {
    let fenced = format!("#define FENCES\n{}", kernels::CLUSTER);
    let Some(nvrtc) = nvrtc() else { return };
    let found = find(nvrtc, &fenced, "compute_90a", &kernels::cluster_sums(112, 1));
    assert!(found.is_none(), "{found:?}");
    check(
        &fenced,
        "compute_90a",
        || kernels::cluster_sums(112, 1),
        &[
            (
                "no release fence before a relaxed arrival",
                &[("fence.release.sync_restrict::shared::cta.cluster;", "")],
                Finding(Kind::Mbarrier),
            ),
            (
                "no acquire fence after a relaxed wait",
                &[("fence.acquire.sync_restrict::shared::cluster.cluster;", "")],
                Finding(Kind::Race),
            ),
        ],
    );
}

#[test]
fn in_a_cluster() {
    const LEAVE: &str = "    // No block leaves while the other arrives at its barriers.\n    __syncwarp();\n    \
                         arrive_cluster();\n    wait_cluster();\n";
    check(
        kernels::CLUSTER,
        "compute_90a",
        || kernels::cluster_sums(112, 1),
        &[
            (
                "a block that leaves while the other arrives at its barriers",
                &[(LEAVE, "")],
                Finding(Kind::InFlight),
            ),
            (
                "a block that leaves while the other writes into its shared memory",
                &[
                    (LEAVE, ""),
                    (
                        "step < steps; ++step) {\n            int stage = step % STAGES;\n            barrier_wait",
                        "step < steps - int(rank); ++step) {\n            int stage = step % STAGES;\n            \
                         barrier_wait",
                    ),
                    (
                        "if (lane < BLOCKS) barrier_arrive_there",
                        "if (lane < BLOCKS && step + STAGES < steps) barrier_arrive_there",
                    ),
                ],
                Finding(Kind::InFlight),
            ),
            (
                "a stage that one of two blocks gives back",
                &[
                    ("barrier_init(empty0 + 8 * i, BLOCKS);", "barrier_init(empty0 + 8 * i, 1);"),
                    (
                        "if (lane < BLOCKS) barrier_arrive_there(place_in(empty0 + 8 * stage, lane));",
                        "if (lane == rank) barrier_arrive_there(place_in(empty0 + 8 * stage, lane));",
                    ),
                ],
                Finding(Kind::Race),
            ),
            (
                "a stage given back to one of two blocks",
                &[("if (lane < BLOCKS) barrier_arrive_there", "if (lane == rank) barrier_arrive_there")],
                Finding(Kind::Deadlock),
            ),
            (
                "a wait that sees its own block alone",
                &[(
                    "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64",
                    "mbarrier.try_wait.parity.shared::cta.b64",
                )],
                Finding(Kind::Race),
            ),
            (
                "no cluster's barrier after mbarrier.init",
                &[(
                    "    __syncwarp();\n    arrive_cluster();\n    wait_cluster();\n\n",
                    "    __syncthreads();\n",
                )],
                Finding(Kind::Mbarrier),
            ),
            (
                "a barrier that is passed and not waited for",
                &[("    arrive_cluster();\n    wait_cluster();\n\n", "    arrive_cluster();\n\n")],
                Finding(Kind::Mbarrier),
            ),
            (
                "half of the bytes expected",
                &[("ROWS * ROW_BYTES);", "HALF * ROW_BYTES);")],
                Finding(Kind::InFlight),
            ),
            (
                "a copy to the own block alone",
                &[("u16 blocks = 3;", "u16 blocks = 1;")],
                Finding(Kind::Deadlock),
            ),
            (
                "a copy to a block that is not there",
                &[("u16 blocks = 3;", "u16 blocks = 7;")],
                Finding(Kind::Descriptor),
            ),
            (
                "an address of a block that is not there",
                &[("place_in(empty0 + 8 * stage, lane)", "place_in(empty0 + 8 * stage, lane + 1)")],
                Finding(Kind::OutOfBounds),
            ),
            (
                "another block's barrier by an instruction of one block",
                &[("mbarrier.arrive.release.cluster.shared::cluster.b64", "mbarrier.arrive.shared::cta.b64")],
                Finding(Kind::OutOfBounds),
            ),
        ],
    );
}

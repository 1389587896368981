//! Hazards of Hopper's asynchronous units in the kernels that ship: a line of `kernels/hopper.cuh`
//! is spoiled for each, and the PTX device names the instruction and the cause.
//!
//! Results need not show any of them: hardware may read the new value, or the old one.

use dreamc_device::ptx::PtxDevice;

/// A hazard, the lines that avoid it with what stands there instead, and words of the finding.
type Hazard = (&'static str, &'static [(&'static str, &'static str)], &'static [&'static str]);

const STALE: &str = "wgmma reads shared memory that thread";

const HAZARDS: [Hazard; 7] = [
    (
        "no proxy fence",
        &[(
            "show_to_matrices() { asm volatile(\"fence.proxy.async.shared::cta;\"",
            "show_to_matrices() { asm volatile(\"\"",
        )],
        &[STALE, "with no proxy fence in between"],
    ),
    (
        "a proxy fence for other memory",
        &[("volatile(\"fence.proxy.async.shared::cta;\"", "volatile(\"fence.proxy.async.global;\"")],
        &[STALE, "with no proxy fence in between"],
    ),
    (
        "sums read under way",
        &[("        matrices_wait<0>();\n", "")],
        &["a register is accessed while a wgmma still works on it"],
    ),
    (
        "a parity that does not turn",
        &[("        parity ^= u32(stage == 0);\n", "")],
        &["while an asynchronous copy into it is under way"],
    ),
    (
        "a swizzle that the copy has not",
        &[("u64(1024 >> 4) << 32 | 1ull << 62;", "u64(1024 >> 4) << 32 | 2ull << 62;")],
        &["wgmma reads with a swizzle of 64 bytes what a tensor copy brought with a swizzle of 128 bytes"],
    ),
    (
        "tiles that begin within a pattern",
        &[
            ("__align__(1024) u8 tiles[];", "__align__(128) u8 tiles[];"),
            ("(shared_address(tiles) + 1023) / 1024 * 1024", "(shared_address(tiles) + 127) / 128 * 128"),
        ],
        &["whose swizzle pattern repeats every 1024 bytes"],
    ),
    (
        "tiles that begin anywhere",
        &[
            ("__align__(1024) u8 tiles[];", "__align__(16) u8 tiles[];"),
            ("(shared_address(tiles) + 1023) / 1024 * 1024", "shared_address(tiles)"),
        ],
        &["which is no multiple of 128"],
    ),
];

/// Each in a process of its own, since blocks of kernels are read once.
#[test]
fn hazards_of_hoppers_kernels_are_found() {
    if dreamc_skip::need(PtxDevice::new(Default::default())).is_none() {
        return;
    }
    let text = include_str!("../../kernels/hopper.cuh");
    for (what, edits, words) in HAZARDS {
        let mut spoiled = text.to_string();
        for (line, fault) in edits {
            assert_eq!(spoiled.matches(line).count(), 1, "{what}: `{line}` stands once");
            spoiled = spoiled.replace(line, fault);
        }
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("hopper.cuh"), spoiled).unwrap();
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "ptx::wide_tiles_follow_one_another"]);
        let out = command.env("DREAMC_KERNELS", folder.path()).output().unwrap();
        let said = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
        assert!(said.contains("running 1 test") && !out.status.success(), "{what} is not noticed:\n{said}");
        assert!(words.iter().all(|words| said.contains(words)), "{what}: no {words:?} in\n{said}");
        assert!(said.contains("PTX line"), "{what}: no instruction is named:\n{said}");
    }
}

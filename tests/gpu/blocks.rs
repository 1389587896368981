//! Kernels that read packed weights, interpreted, against the CPU: every format by every kernel,
//! few rows and many, whole chunks and ragged ones, matrices plain and transposed.

use crate::support::launch::{Case, devices, floats, product};
use dreamc_compiler::format::Packed;
use dreamc_compiler::program::kernel;

/// Formats with lengths of rows that are ragged chunks of theirs: one that is shorter, and one with
/// several and a part.
fn formats() -> Vec<(Packed, u64)> {
    let lengths = |name: &str| match name {
        "q4_k" | "q6_k" => [256, 2304],
        "f16" | "int8" => [48, 1104],
        "nvfp4" => [64, 1088],
        _ => [96, 1120],
    };
    let of = |name: &&str| lengths(name).map(|k| (Packed::named(name, k).unwrap(), k));
    Packed::NAMES.iter().flat_map(of).collect()
}

#[test]
fn numbers_of_embeddings_have_the_bits_of_the_cpu() {
    let Some(devices) = devices() else { return };
    for (packed, width) in formats() {
        let ids: Vec<u8> = [4, 0, 2, 4].iter().flat_map(|id: &i32| id.to_le_bytes()).collect();
        let embed = kernel::Embed { rows: 4, vocab: 5, width };
        let case = Case::new(embed, packed, ("x", &[]), &[("ids", ids)]);
        for device in [&devices.fast, &devices.naive] {
            assert_eq!(case.run(device), case.run(&devices.cpu), "{packed:?}");
        }
    }
}

#[test]
fn products_of_few_rows_agree_with_the_cpu() {
    let Some(devices) = devices() else { return };
    for (packed, k) in formats() {
        // Of several rows the matrix has fewer than a warp takes, and more; so has `x` than a tile.
        for (m, n) in [(1, 21), (2, 5), (9, 22), (16, 36)] {
            let case = Case::new(product(m, n, k, false), packed, ("c", &[]), &[]);
            assert!(text(&case).contains("few_product"), "{packed:?}");
            devices.agree(&format!("{packed:?} {m}x{n}x{k}"), &case, 4e-6);
        }
        for m in [1, 7] {
            let case = Case::new(product(m, 19, k, false), packed, ("c", &["c"]), &[]);
            devices.agree(&format!("{packed:?} of {m} rows in bf16"), &case, 8e-3);
        }
    }
}

/// The text that a GPU runs.
fn text(case: &Case) -> String {
    let limits = dreamc_compiler::codegen::Limits::default();
    let sources = dreamc_device::gpu::sources(&case.plan, "sm_80", limits).unwrap();
    sources.iter().map(|source| source.text.as_str()).collect()
}

/// With one in a row of `a` and zeros elsewhere a product is its matrix, to the bit.
#[test]
fn unpacked_numbers_have_the_bits_of_the_cpu() {
    let Some(devices) = devices() else { return };
    // Of the last no eight numbers are left for the last thread.
    let all = formats().into_iter().step_by(2).chain([(Packed::F16, 13)]);
    for (packed, k) in all {
        let (m, n) = (k.max(17), 3);
        let one: Vec<f32> = (0..m * k).map(|at| if at / k % k == at % k { 1.0 } else { 0.0 }).collect();
        let case = Case::new(product(m, n, k, false), packed, ("c", &[]), &[("a", floats(&one))]);
        assert!(text(&case).contains("unpack_weight"), "{packed:?}");
        assert_eq!(case.run(&devices.fast), case.run(&devices.cpu), "{packed:?}");
    }
}

#[test]
fn products_of_many_rows_and_transposed_ones_agree_with_the_cpu() {
    let Some(devices) = devices() else { return };
    for (packed, k) in formats().into_iter().step_by(2) {
        let case = Case::new(product(33, 40, k, false), packed, ("c", &[]), &[]);
        devices.agree(&format!("{packed:?}, many rows"), &case, 4e-6);
        let case = Case::new(product(33, 40, k, false), packed, ("c", &["c"]), &[]);
        devices.agree(&format!("{packed:?}, many rows in bf16"), &case, 2e-2);
        for m in [2, 18] {
            let case = Case::new(product(m, k, 24, true), packed, ("c", &[]), &[]);
            devices.agree(&format!("{packed:?}, transposed"), &case, 4e-6);
        }
    }
}

#[test]
fn grouped_products_and_those_by_head_agree_with_the_cpu() {
    let Some(devices) = devices() else { return };
    let ints = |list: &[i32]| list.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    for (packed, inner) in formats() {
        for (slots, transposed, gather) in
            [(6, false, None), (6, false, Some(2)), (6, true, None), (70, false, Some(2))]
        {
            let (experts, out) = (4, 10);
            let grouped = kernel::Grouped { slots, experts, out, inner, transposed, gather, stored: true };
            let s = slots as i32;
            let order: Vec<i32> = (0..s).map(|i| s - 1 - i).collect();
            let given = [("offsets", ints(&[0, 2, 2, 5, s - 1])), ("order", ints(&order))];
            let case = Case::new(grouped, packed, ("y", &[]), &given);
            devices.agree(&format!("{packed:?}, grouped {slots} {transposed} {gather:?}"), &case, 4e-6);
        }
        for (rows, transposed) in [(2, false), (2, true), (17, false)] {
            let (heads, out, first, part) = (3, 8, 2, 5);
            let by_head = kernel::ByHead { rows, heads, out, inner, first, part, transposed, stored: true };
            let case = Case::new(by_head, packed, ("y", &[]), &[]);
            devices.agree(&format!("{packed:?}, by head {rows} {transposed}"), &case, 4e-6);
        }
    }
}

/// Rows that nobody needs, alone in a block and among others, are not written, and what they hold
/// reaches no other.
#[test]
fn rows_that_are_left_out_stay_as_they_were() {
    let Some(devices) = devices() else { return };
    let packed = Packed::Q4;
    for needed in [vec![0, -1, 2], vec![-1; 3], (0..11).map(|i| if i < 8 { -1 } else { i }).collect()] {
        let rows = needed.len() as u64;
        let case = Case::new(product(rows, 6, 96, false), packed, ("c", &[]), &[]).some("a", &needed);
        devices.agree(&format!("{needed:?}"), &case, 4e-6);
        let (heads, out, first, part) = (3, 8, 2, 5);
        let by_head =
            kernel::ByHead { rows, heads, out, inner: 96, first, part, transposed: false, stored: true };
        let case = Case::new(by_head, packed, ("y", &[]), &[]).some("x", &needed);
        devices.agree(&format!("by head, {needed:?}"), &case, 4e-6);
    }
    // Many rows, whose matrix is unpacked first.
    let needed: Vec<i32> = (0..33).map(|i| if i % 3 == 0 { -1 } else { i }).collect();
    let case = Case::new(product(33, 8, 96, false), packed, ("c", &[]), &[]).some("a", &needed);
    devices.agree("many rows", &case, 4e-6);
}

#[test]
fn losses_of_packed_heads_agree_with_the_cpu() {
    let Some(devices) = devices() else { return };
    for (packed, width) in formats().into_iter().step_by(2) {
        let head = kernel::HeadLoss { rows: 3, vocab: 11, width, softcap: None, stored: true };
        let targets: Vec<u8> = [3i32, 10, -1].iter().flat_map(|x| x.to_le_bytes()).collect();
        let given = [("targets", targets)];
        let case = Case::new(head, packed, ("nll", &[]), &given);
        devices.agree(&format!("{packed:?}, head"), &case, 1e-5);
        // Rows in bf16 meet blocks unpacked to it, for the tensor cores; the naive kernel and the
        // CPU widen the rows instead.
        let case = Case::new(head, packed, ("nll", &["x"]), &given);
        assert!(text(&case).contains("unpack<") && text(&case).contains("bf16"), "{packed:?}");
        devices.agree(&format!("{packed:?}, head of bf16"), &case, 1e-2);
        assert!(case.apart(&devices.naive, &devices.cpu) <= 1e-5, "{packed:?}, the naive head of bf16");
    }
}

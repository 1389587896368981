//! Kernel statements: a text in every dialect, what is no statement, and what runs.

use dreamc_compiler::statement::print::{Dialect, print};
use dreamc_compiler::statement::run::{Grid, Memory, Value, run};
use dreamc_compiler::statement::{StatementError, Unit};
use std::fmt::Write;

const TEXT: &str = r#"
#define ROWS 3
#define OF_ROW(x, row) ((x) + (row) * x##_stride)
typedef bf16 Float0;
TABLE Wide frequencies[] = {1.0, 0.25};
struct Pair {
    float low, high;
};
DEVICE Pair turned(float x, i64 row) {
    Wide angle = (Wide)row * frequencies[row % 2];
    Pair pair = {x * cosine(angle), x * sine(angle)};
    return pair;
}
// Not called.
DEVICE float unused(float x) { return x; }
KERNEL __launch_bounds__(256, 1) turn(const Float0 *x, i64 x_stride, float *y, int *status, int launch) {
    i64 at = thread_number();
    if (at >= 8 || !below(at, 8, status, launch)) return;
#if ROWS > 1
    float sum = 0.0f;
    for (i64 row = 0; row < ROWS; ++row) {
        Pair pair = turned(value(OF_ROW(x, row)[at]), row);
        sum += row % 2 == 0 ? pair.low : -pair.high;
    }
    y[at] = sum;
#else
    y[at] = no_such_name;
#endif
}
"#;

#[test]
fn a_text_in_every_dialect() {
    let unit = Unit::parse(TEXT).unwrap();
    let of = |dialect| {
        let text = print(&unit, "turn", dialect);
        // Metal's words come first, and are a file.
        let words = include_str!("../../kernels/words.metal");
        text.replace(words, "(words.metal)\n")
    };
    let (cuda, metal) = (of(Dialect::Cuda), of(Dialect::Metal));
    assert_eq!(cuda, of(Dialect::Hip));
    insta::assert_snapshot!("cuda", cuda);
    insta::assert_snapshot!("metal", metal);
    // The printed text says the same.
    let again = Unit::parse(&cuda).unwrap();
    assert_eq!(print(&again, "turn", Dialect::Cuda), cuda);
    assert_eq!(unit.entries[0].function.params, 5);
}

#[test]
fn what_is_no_statement_says_why() {
    let mut said = String::new();
    for body in [
        "y[at] = z;",
        "y[at] = x;",
        "x[0] = 1.0f;",
        "float a = expf(x);",
        "float a = dot(1.0f, 2.0f);",
        "int a = 1.0f % 2;",
        "i64 a = 1 + ;",
        "if (at < 3 { }",
        "float a[2] = {1.0f};",
        "float a = 1.0f.low;",
        "const int a = 1; a = 2;",
        "return 1;",
        "Pair p;",
        "y[1.5f] = 0.0f;",
        "@",
        "x + y;",
        "float *a = x;",
        "value(x) = 1.0f;",
        "while (true) {",
    ] {
        let text =
            format!("KERNEL __launch_bounds__(1, 1) f(const float *x, float *y, i64 at) {{\n{body}\n}}\n");
        let error: StatementError = Unit::parse(&text).unwrap_err();
        let _ = writeln!(said, "{body}\n    {error}");
    }
    insta::assert_snapshot!("errors", said);
    let deep = "(".repeat(100_000);
    let text = format!("KERNEL __launch_bounds__(1, 1) f(float *y) {{ y[0] = {deep}1; }}");
    assert!(Unit::parse(&text).unwrap_err().to_string().contains("levels"));
}

/// One thread.
const ONE: Grid = Grid { blocks: 1, threads: 1, shared: 0 };

/// Floats from address 0x100 on.
struct Floats(Vec<u32>);

impl Floats {
    fn place(&self, address: u64, bytes: u64) -> Result<usize, String> {
        let outside = || format!("{bytes} bytes at {address:#x}");
        let at = address.checked_sub(0x100).ok_or_else(outside)? / 4;
        (bytes == 4 && (at as usize) < self.0.len()).then_some(at as usize).ok_or_else(outside)
    }
}

impl Memory for Floats {
    fn load(&self, address: u64, bytes: u64) -> Result<u64, String> {
        self.place(address, bytes).map(|at| self.0[at].into())
    }

    fn store(&mut self, address: u64, bytes: u64, value: u64) -> Result<(), String> {
        let at = self.place(address, bytes)?;
        self.0[at] = value as u32;
        Ok(())
    }
}

/// The first of four floats after `body` in a thread, which has its number in `at`.
fn after(body: &str) -> Result<f32, String> {
    let text = format!(
        "KERNEL __launch_bounds__(1, 1) f(float *y, int n) {{\ni64 at = thread_number();\n{body}\n}}\n"
    );
    let unit = Unit::parse(&text).map_err(|e| e.to_string())?;
    let mut memory = Floats(vec![0; 4]);
    run(&unit, &unit.entries[0], ONE, &[Value::Address(0x100), Value::Int(7)], &mut memory)?;
    Ok(f32::from_bits(memory.0[0]))
}

#[test]
fn statements_compute_as_c_does() {
    for (body, result) in [
        ("y[0] = n / 2 * 2.0f;", 6.0),
        ("y[0] = -7 % 3;", -1.0),
        ("y[0] = 1 < 2 && 3 > 2 ? 2 << 3 | 1 : 0;", 17.0),
        ("int a = 2147483647; ++a; y[0] = a < 0;", 1.0),
        ("u32 a = 0u - 1u; y[0] = a / 2147483648u;", 1.0),
        ("u16 a = (u16)65537; y[0] = a;", 1.0),
        ("u32 a = 5u; a <<= 2; a ^= 1u; y[0] = (float)(a >> 1);", 10.0),
        ("int a[3] = {1, 2, 3}; int i = 0; a[i++] += 4; y[0] = a[0] * 10 + i;", 51.0),
        (
            "i64 a = 0; for (i64 i = 0; i < 10; ++i) { if (i == 2) continue; if (i == 5) break; a += i; } y[0] = a;",
            8.0,
        ),
        ("int a = 1; while (a < 100) a = a * 2; y[0] = a;", 128.0),
        ("float *z = y + 1; z[1] = 3.0f; *z = 4.0f; y[0] = y[2] + z[0];", 7.0),
        ("Wide a = 0.1; y[0] = (float)(a * 10.0 - 1.0);", 0.0),
        ("float a = 16777216.0f; y[0] = a + 1.0f - a;", 0.0),
        ("y[0] = fmaf(16777216.0f, 16777216.0f, 1.0f) > 2.8e14f;", 1.0),
        (
            "y[0] = larger(1.0f, 2.0f) + unless_zero(5.0f, 0.0f) + worth(float_of(0x7fc00000u)) ;",
            f32::NEG_INFINITY,
        ),
        ("int a = 3; { int a = 4; y[0] = a; } y[0] += a;", 7.0),
    ] {
        assert_eq!(after(body), Ok(result), "{body}");
    }
}

#[test]
fn what_cannot_run_is_an_error() {
    for (body, why) in [
        ("y[4] = 1.0f;", "4 bytes at 0x110"),
        ("y[-1] = 1.0f;", "4 bytes at 0xfc"),
        ("const float *none = 0; y[0] = none[0];", "4 bytes at 0x0"),
        ("y[0] = n / (n - 7);", "a division by zero"),
        ("y[0] = n % (n - 7);", "a division by zero"),
        ("int a[2] = {1, 2}; y[0] = a[n];", "a place outside an array"),
    ] {
        assert_eq!(after(body), Err(why.to_string()), "{body}");
    }
}

/// Threads of a block that share memory: each sums over its neighbours what all of them left.
const BLOCK: &str = r#"
KERNEL __launch_bounds__(64, 1) sums(const float *x, float *y) {
    shared float parts[4];
    shared float all[];
    const int t = thread();
    all[t] = x[block() * 64 + t];
    wait_block();
    floats4 sum = 0.0f;
    unroll(2) for (int i = 0; i < 8; i += 4) {
        sum = sum + load4(all + (t / 8 * 8 + i));
    }
    leave_sum(all_sum(sum), parts);
    wait_block();
    const float most = lanes_largest(sum[1], 32, 32);
    if (t == 0) {
        put(y + block() * 4, floats4(join_sums(parts, 64), most, -1.0f, 0.0f) * 2.0f);
    }
}
"#;

fn of_block(text: &str) -> Result<Vec<f32>, String> {
    let unit = Unit::parse(text).map_err(|e| e.to_string())?;
    let mut memory = Floats((0..128).map(|i| (i as f32).to_bits()).chain([0; 8]).collect());
    let arguments = [Value::Address(0x100), Value::Address(0x100 + 4 * 128)];
    run(&unit, &unit.entries[0], Grid { blocks: 2, threads: 64, shared: 256 }, &arguments, &mut memory)?;
    Ok(memory.0[128..].iter().map(|bits| f32::from_bits(*bits)).collect())
}

#[test]
fn threads_of_a_block_share_memory_and_join_numbers() {
    // Each of eight threads has the sum of all eight.
    let sum = |from: u32| 2.0 * 8.0 * (from..from + 64).sum::<u32>() as f32;
    // The second of two fours, of the last eight of the first warp.
    let most = |from: u32| 2.0 * (2 * from + 24 + 1 + 28 + 1) as f32;
    let expected = vec![sum(0), most(0), -2.0, 0.0, sum(64), most(64), -2.0, 0.0];
    assert_eq!(of_block(BLOCK), Ok(expected));
    let unit = Unit::parse(BLOCK).unwrap();
    insta::assert_snapshot!("block", print(&unit, "sums", Dialect::Cuda));
    let again = Unit::parse(&print(&unit, "sums", Dialect::Plain)).unwrap();
    assert_eq!(unit.entries, again.entries);
}

#[test]
fn what_threads_of_a_block_may_not_do_is_an_error() {
    for (from, to, why) in [
        ("    wait_block();\n    floats4", "    floats4", "with no barrier between"),
        ("parts);\n    wait_block();", "parts);", "with no barrier between"),
        (
            "    wait_block();\n    floats4",
            "    if (t < 32) { wait_block(); }\n    floats4",
            "32 of 64 threads come to a barrier",
        ),
        ("leave_sum(all_sum(sum), parts);", "", "float 0 of shared memory is read before it is written"),
        ("all[t] =", "all[t + 1] =", "which it does not have"),
        (
            "load4(all + (t / 8 * 8 + i))",
            "load4(all + (t / 8 * 8 + i + 1))",
            "in one access, which is no multiple",
        ),
        (
            "const float most = lanes",
            "if (t > 3) return; const float most = lanes",
            "4 of 32 threads that do this together",
        ),
        ("const float most = lanes", "const float most = 1.0f + lanes", "a statement of its own"),
        (
            "lanes_largest(sum[1], 32",
            "lanes_largest(sum[1], t",
            "`lanes` of `lanes_largest` is a number that is written",
        ),
        ("sum[1]", "sum[t]", "has a number that is written"),
        ("join_sums(parts, 64)", "join_sums(x, 64)", "there is no `join_sums` of (const float *, int)"),
        ("shared float parts[4]", "shared int parts[4]", "memory of a block is of `float`"),
        ("int t = thread()", "shared float t = thread()", "a variable of a thread that would be shared"),
    ] {
        assert!(BLOCK.contains(from), "{from}");
        let error = of_block(&BLOCK.replacen(from, to, 1)).unwrap_err();
        assert!(error.contains(why), "{to}: {error}");
    }
}

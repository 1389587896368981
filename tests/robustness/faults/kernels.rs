//! Faults in the text of kernels that read blocks, of those that make codes of e4m3 and multiply
//! them, and of those of [chosen and shared keys](super::keys): the CPU's numbers notice each, or
//! the interpreter, which finds races.
//!
//! A line of a file of `kernels/` is spoiled in a folder that `DREAMC_KERNELS` names. Texts are
//! read once in a process, so each fault has one of its own: this program again, asked for the
//! sound test of the format and the kernel that reads the line.

use super::keys;
use crate::support::launch::{Case, devices, floats, product};
use dreamc_compiler::format::Packed;
use dreamc_compiler::program::kernel;
use dreamc_device::ptx::{Options, PtxDevice};
use libtest_mimic::Failed;
use std::fs;
use std::process::Command;

/// The name of the sound test of a form and a format.
pub fn name(form: Form, format: &str) -> String {
    format!("without a fault: {} with {format}", form.name())
}

/// How blocks are read: interpreted by the fast kernel and by the naive one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// By one row.
    One,
    /// By few rows.
    Few,
    /// By many: the fast kernel unpacks them first.
    Many,
    /// By tokens that chose experts.
    Experts,
    /// By the vectors of heads.
    Heads,
    /// By few rows, with one left out.
    Some,
    /// Codes of e4m3 with scales, multiplied by Hopper's tensor cores.
    Codes,
    /// The codes of columns.
    Columns,
    /// Choices of blocks of keys.
    Choices,
    /// Attention over chosen blocks.
    Blocks,
    /// Attention over few chosen tokens.
    Tokens,
    /// Attention over keys that heads share.
    Latents,
}

impl Form {
    fn name(self) -> &'static str {
        match self {
            Form::One => "one row",
            Form::Few => "few rows",
            Form::Many => "many rows",
            Form::Experts => "experts",
            Form::Heads => "heads",
            Form::Some => "rows left out",
            Form::Codes => "products of codes",
            Form::Columns => "codes of columns",
            Form::Choices => "choices",
            Form::Blocks => "chosen blocks",
            Form::Tokens => "chosen tokens",
            Form::Latents => "latents",
        }
    }

    /// A launch with a format, of rows longer than a chunk where few rows read them.
    fn case(self, format: &str) -> Case {
        let super_block = format.ends_with("_k");
        let k = match (self, super_block) {
            (Form::Many, true) => 256,
            (Form::Many, false) => 64,
            (_, true) => 2304,
            (_, false) => 1088,
        };
        let packed = || Packed::named(format, k).unwrap();
        let ints = |list: &[i32]| list.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        match self {
            Form::One => Case::new(product(1, 7, k, false), packed(), ("c", &[]), &[]),
            Form::Few => Case::new(product(3, 7, k, false), packed(), ("c", &[]), &[]),
            Form::Many => Case::new(product(33, 8, k, false), packed(), ("c", &[]), &[]),
            Form::Some => {
                let case = Case::new(product(3, 7, k, false), packed(), ("c", &[]), &[]);
                case.some("a", &[0, -1, 2])
            }
            Form::Experts => {
                let stored = true;
                let (slots, experts, out, gather) = (6, 4, 10, Some(2));
                let grouped =
                    kernel::Grouped { slots, experts, out, inner: k, transposed: false, gather, stored };
                let given = [("offsets", ints(&[0, 2, 2, 5, 5])), ("order", ints(&[5, 4, 3, 2, 1, 0]))];
                Case::new(grouped, packed(), ("y", &[]), &given)
            }
            Form::Heads => {
                let (heads, out, first, part) = (3, 8, 2, 5);
                let (rows, transposed, stored) = (2, false, true);
                let by_head = kernel::ByHead { rows, heads, out, inner: k, first, part, transposed, stored };
                Case::new(by_head, packed(), ("y", &[]), &[])
            }
            Form::Codes => codes(),
            Form::Columns => columns(),
            Form::Choices => keys::choices(),
            Form::Blocks => keys::blocks(),
            Form::Tokens => keys::tokens(),
            Form::Latents => keys::latents(),
        }
    }

    /// How far a GPU may be from the CPU: weights of attention are rounded to bf16.
    fn bound(self) -> f64 {
        if matches!(self, Form::Blocks | Form::Tokens | Form::Latents) { 1.0 / 128.0 } else { 4e-6 }
    }
}

/// Two tiles of codes, three of terms; scales of neighbours differ.
fn codes() -> Case {
    let (m, n, k) = (128, 144, 384);
    let coded = |lines: u64, seed: u64| -> Vec<u8> {
        let code = |i: u64| (i * 31 + i / 7 * seed) as u8;
        // The last code is no number.
        let codes = (0..lines * k).map(code).map(|code| if code & 0x7f == 0x7f { 0 } else { code });
        codes.chain((0..lines * k / 128).map(|i| 124 + (i * seed % 7) as u8)).collect()
    };
    let product = kernel::ProductE4m3 { m, n, k, accumulate: false };
    Case::new(product, Packed::Q8, ("c", &[]), &[("a", coded(m, 3)), ("b", coded(n, 5))])
}

/// Two tiles of tokens for each of some columns.
fn columns() -> Case {
    let (rows, columns) = (256, 144);
    let numbers = (0..rows * columns).map(|i| {
        let number = (i * 7919 % 2027) as f32 / 1013.0 - 1.0;
        number * ((i % columns % 5) as f32 * 3.0).exp2()
    });
    let x = floats(&numbers.collect::<Vec<f32>>());
    let kernel =
        kernel::Fp8 { matrices: 1, rows, columns, tile: [128, 1], groups: None, e4m3: true, turned: true };
    Case::new(kernel, Packed::Q8, ("y", &[]), &[("x", x)])
}

/// The words that [`sound`] says of a difference.
const APART: &str = "apart from the CPU";
/// The words that the interpreter says of races, and of what is read too early.
const RACE: &str = "shared memory";

/// The forms and the formats that are tested without a fault.
pub fn all() -> Vec<(Form, &'static str)> {
    let each = |form| Packed::NAMES.map(|format| (form, format));
    [each(Form::One), each(Form::Few), each(Form::Many)].concat().into_iter().chain(MIXED).collect()
}

const MIXED: [(Form, &str); 9] = [
    (Form::Experts, "q4_0"),
    (Form::Heads, "q4_0"),
    (Form::Some, "q4_0"),
    (Form::Codes, "e4m3"),
    (Form::Columns, "e4m3"),
    (Form::Choices, "none"),
    (Form::Blocks, "none"),
    (Form::Tokens, "none"),
    (Form::Latents, "none"),
];

/// Both kernels of a GPU have the numbers of the CPU.
pub fn sound(form: Form, format: &str) -> Result<(), Failed> {
    let Some(devices) = devices() else { return Ok(()) };
    let case = form.case(format);
    let hopper = PtxDevice::hopper(Options::default())?;
    let fast = if form == Form::Codes { &hopper } else { &devices.fast };
    for (rung, device) in [("fast", fast), ("naive", &devices.naive)] {
        let apart = case.apart(device, &devices.cpu);
        if apart.is_nan() || apart > form.bound() {
            return Err(format!("{rung}: {apart:e} {APART}").into());
        }
    }
    Ok(())
}

/// A fault of a text.
pub struct Fault {
    pub name: &'static str,
    pub file: &'static str,
    pub form: Form,
    pub format: &'static str,
    pub line: &'static str,
    pub fault: &'static str,
}

pub fn faults() -> Vec<Fault> {
    let one =
        |name, format, line, fault| Fault { name, file: "few.cuh", form: Form::One, format, line, fault };
    let few =
        |name, format, line, fault| Fault { name, file: "several.cuh", form: Form::Few, format, line, fault };
    let block =
        |name, format, line, fault| Fault { name, file: "blocks.cuh", form: Form::Many, format, line, fault };
    let mut all = vec![
        one(
            "one row: the scale of a chunk's first block",
            "q8_0",
            "int block = chunk + 34 * (p / 2);\n        scale = half_float(half_at(memory + block));",
            "int block = chunk + 34 * (p / 2);\n        scale = half_float(half_at(memory + chunk));",
        ),
        one(
            "one row: codes without a sign",
            "int8",
            "codes[run] ^ 0x80808080u, 8 * i, 128.0f",
            "codes[run], 8 * i, 128.0f",
        ),
        one("one row: nibbles in the other order", "q4_0", "(run < 2 ? 0 : 4); }", "(run < 2 ? 4 : 0); }"),
        one(
            "one row: a zero point forgotten",
            "q4_0",
            "bit(run, i), 8.0f, whole)",
            "bit(run, i), 0.0f, whole)",
        ),
        one(
            "one row: the next power of two",
            "mxfp4",
            "half_of_power(memory[block]) * 32768.0f",
            "half_of_power(memory[block]) * 65536.0f",
        ),
        one(
            "one row: the scale of another sixteen numbers",
            "nvfp4",
            "e4m3(memory[block + p % 4])",
            "e4m3(memory[block + (p ^ 1) % 4])",
        ),
        one("one row: the scale of the tensor forgotten", "nvfp4", "* head * 16384.0f", "* 16384.0f"),
        one(
            "one row: offsets forgotten",
            "q4_k",
            "offsets[i] = down * float(byte_of(m, i));",
            "offsets[i] = 0.0f;",
        ),
        one(
            "one row: the upper bits of small scales forgotten",
            "q4_k",
            "(high & 0x0f0fu) | (scales >> 2 & 0x3030u)",
            "(high & 0x0f0fu)",
        ),
        one(
            "one row: small scales without a sign",
            "q6_k",
            "by * float((signed char)scales[2 * run])",
            "by * float(scales[2 * run])",
        ),
        one(
            "one row: the upper bits of codes forgotten",
            "q6_k",
            " | (high[0] >> (2 * run) & 0x03030303u) << 4",
            "",
        ),
        one("one row: halves in the other order", "f16", "(16 * (i % 2))", "(16 * (1 - i % 2))"),
        one(
            "one row: a warp's first row for all",
            "q8_0",
            "(first + r < n ? first + r : n - 1) * far",
            "first * far",
        ),
        one(
            "one row: sums of other warps forgotten",
            "q8_0",
            "other < SPLIT; ++other) sum += parts",
            "other < 1; ++other) sum += parts",
        ),
        few(
            "few rows: the scale of a chunk's first block",
            "q8_0",
            "int block = chunk + 34 * group;\n        scale = half_float(half_at(memory + block));",
            "int block = chunk + 34 * group;\n        scale = half_float(half_at(memory + chunk));",
        ),
        few("few rows: codes without a sign", "int8", "u32 codes = word ^ 0x80808080u;", "u32 codes = word;"),
        few(
            "few rows: nibbles in the other order",
            "q4_0",
            "words[0] >> (4 * step) & 0x",
            "words[0] >> (4 - 4 * step) & 0x",
        ),
        few("few rows: a zero point forgotten", "q4_0", "half), 0xc308c308u)", "half), 0xc300c300u)"),
        few(
            "few rows: half of a power of two",
            "mxfp4",
            "half_of_power(memory[block]) * 2.0f",
            "half_of_power(memory[block])",
        ),
        few(
            "few rows: the scale of another sixteen numbers",
            "nvfp4",
            "e4m3(memory[block + t])",
            "e4m3(memory[block + (t ^ 1)])",
        ),
        few(
            "few rows: the scale of the tensor forgotten",
            "nvfp4",
            "return head * 65536.0f",
            "return 65536.0f",
        ),
        few(
            "few rows: offsets forgotten",
            "q4_k",
            "fmaf(quarter.offset(fold), totals[i][e], sums[i][e])",
            "sums[i][e]",
        ),
        few(
            "few rows: small scales without a sign",
            "q6_k",
            "by * float((signed char)scales[2 * quarter])",
            "by * float(scales[2 * quarter])",
        ),
        few(
            "few rows: the upper bits of codes forgotten",
            "q6_k",
            " | (high >> (2 * step) & 0x03030303u) << 4",
            "",
        ),
        few(
            "few rows: what bf16 leaves of a half forgotten",
            "f16",
            "if (Q::LESS && PARTS > 1)",
            "if (Q::LESS && PARTS > 3)",
        ),
        few(
            "few rows: what bf16 leaves of an activation forgotten",
            "q8_0",
            "constexpr int PARTS = sizeof(C) == 2 ? 1 : 3;",
            "constexpr int PARTS = 1;",
        ),
        few("few rows: the first row for all", "q8_0", "x(8 * i + g < m ? 8 * i + g : m - 1)", "x(0)"),
        few(
            "few rows: a warp's first row for all",
            "q8_0",
            "(first + r < n ? first + r : n - 1) * far",
            "first * far",
        ),
        few(
            "few rows: halves of a tile in the other order",
            "q8_0",
            "R + g + 8 * (e / 2)]",
            "R + g + 8 * (1 - e / 2)]",
        ),
        few(
            "few rows: the chunk before",
            "q8_0",
            "bring(stage ^ 1, chunk + SPLIT);",
            "bring(stage ^ 1, chunk);",
        ),
        block("unpacked: codes without a sign", "q8_0", "float((signed char)of[2 + i])", "float(of[2 + i])"),
        block(
            "unpacked: the scale of the row forgotten",
            "int8",
            "float((signed char)of[4 + i]), float_at(of))",
            "float((signed char)of[4 + i]), 1.0f)",
        ),
        block(
            "unpacked: nibbles in the other order",
            "q4_0",
            "nibble(of[2 + i % 16], i >= 16)",
            "nibble(of[2 + i % 16], i < 16)",
        ),
        block(
            "unpacked: a row from the block before",
            "q4_0",
            "from[at / F::UNIT].at(",
            "from[at / F::UNIT / 2 * 2].at(",
        ),
        block(
            "unpacked: a sign of E2M1 forgotten",
            "mxfp4",
            "float(code & 8u ? -twice : twice)",
            "float(twice)",
        ),
        block(
            "unpacked: the scale of another sixteen numbers",
            "nvfp4",
            "e4m3(block[part]), float_at(of)",
            "e4m3(block[part ^ 1]), float_at(of)",
        ),
        block(
            "unpacked: offsets forgotten",
            "q4_k",
            "difference_of(product_of(by, float(code)), less)",
            "difference_of(product_of(by, float(code)), 0.0f)",
        ),
        block(
            "unpacked: small scales without a sign",
            "q6_k",
            "float((signed char)of[192 + i / 16])",
            "float(of[192 + i / 16])",
        ),
        block("unpacked: a half without its sign", "f16", "signed_of(bits & 0x8000u, x)", "x"),
    ];
    // Few rows have a fast kernel that reads blocks by itself, so the naive one notices these.
    for (name, format, line, fault) in [
        (
            "naive: nibbles in the other order",
            "q4_0",
            "nibble(of[2 + i % 16], i >= 16)",
            "nibble(of[2 + i % 16], i < 16)",
        ),
        ("naive: the next block of a row", "q8_0", "from[at / F::UNIT].at(", "from[at / F::UNIT ^ 1].at("),
        ("naive: offsets forgotten", "q4_k", "float(code)), less)", "float(code)), 0.0f)"),
        ("naive: small scales without a sign", "q6_k", "(signed char)of[192 + i / 16]", "of[192 + i / 16]"),
        (
            "naive: the scale of the tensor forgotten",
            "nvfp4",
            "e4m3(block[part]), float_at(of)",
            "e4m3(block[part]), 1.0f",
        ),
    ] {
        all.push(Fault { name, file: "blocks.cuh", form: Form::Few, format, line, fault });
    }
    for (name, file, form, line, fault) in [
        (
            "experts: the first one's matrix for all",
            "few.cuh",
            Form::Experts,
            "i64(some ? expert : 0)",
            "i64(0)",
        ),
        (
            "experts: a token by its place in the order",
            "few.cuh",
            Form::Experts,
            "order[slot] : slot",
            "slot : slot",
        ),
        (
            "heads: the matrix of the first for all",
            "several.cuh",
            Form::Heads,
            "w + (i64(head) * out + from)",
            "w + i64(from)",
        ),
        (
            "heads: rows of a matrix from its first on",
            "several.cuh",
            Form::Heads,
            "* out + from) * (k",
            "* out) * (k",
        ),
        (
            "rows left out: one is written",
            "several.cuh",
            Form::Some,
            "if (SOME && places[i] < 0) return;\n        C &to",
            "C &to",
        ),
        (
            "rows left out: one decides for all",
            "several.cuh",
            Form::Some,
            "any |= places[i] >= 0",
            "any &= places[i] >= 0",
        ),
    ] {
        all.push(Fault { name, file, form, format: "q4_0", line, fault });
    }
    for (name, file, form, line, fault) in [
        (
            "codes: the scale of another row",
            "e4m3.cuh",
            Form::Codes,
            "of_rows[e / 2] * of_columns[e % 2]",
            "of_rows[0] * of_columns[e % 2]",
        ),
        (
            "codes: the scales of neighbours exchanged",
            "e4m3.cuh",
            Form::Codes,
            "{low(bytes), high(bytes)}",
            "{high(bytes), low(bytes)}",
        ),
        (
            "codes: the scales of the first terms for all",
            "e4m3.cuh",
            Form::Codes,
            "number = (a.depth + step * DEPTH) / DEPTH;",
            "number = 0;",
        ),
        (
            "codes: terms whose sums are added a second time",
            "e4m3.cuh",
            Form::Codes,
            "tile_at(tile + B + u32(d * 32), 8192), d);",
            "tile_at(tile + B + u32(d * 32), 8192), step + d);",
        ),
        (
            "codes: one scale taken for all columns",
            "e4m3.cuh",
            Form::Codes,
            "return !__any_sync(ALL_LANES, others != 0);",
            "return __any_sync(ALL_LANES, others != 0);",
        ),
        (
            "codes of columns: the next power of two",
            "fp8.cuh",
            Form::Columns,
            "byte = u32(127 + k);",
            "byte = u32(128 + k);",
        ),
        (
            "codes of columns: scales by columns",
            "fp8.cuh",
            Form::Columns,
            "scales[i64(down) * columns + column + e]",
            "scales[i64(column + e) * (rows / 128) + down]",
        ),
        (
            "codes of columns: tokens in the other order",
            "fp8.cuh",
            Form::Columns,
            "<< 8 * (i % 4);",
            "<< 8 * (3 - i % 4);",
        ),
        (
            "codes of columns: numbers cut off, not rounded",
            "fp8.cuh",
            Form::Columns,
            "((size + 0x7ffffu + (size >> 20 & 1u)) >> 20) - 960u",
            "(size >> 20) - 960u",
        ),
    ] {
        all.push(Fault { name, file, form, format: "e4m3", line, fault });
    }
    all.extend(keys::faults());
    all
}

/// How the sound test says that it notices a fault.
pub fn noticed(fault: &Fault) -> Result<String, Failed> {
    let path = format!("{}/kernels/{}", env!("CARGO_MANIFEST_DIR"), fault.file);
    let text = fs::read_to_string(path)?;
    if text.matches(fault.line).count() != 1 {
        return Err(format!("{} has `{}` not once", fault.file, fault.line).into());
    }
    if devices().is_none() {
        return Ok("is left out: no texts are compiled here".into());
    }
    let folder = tempfile::tempdir()?;
    fs::write(folder.path().join(fault.file), text.replace(fault.line, fault.fault))?;
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--exact", &name(fault.form, fault.format)]).env("DREAMC_KERNELS", folder.path());
    let out = command.output()?;
    let said = String::from_utf8_lossy(&out.stdout);
    match said.lines().find(|line| line.contains(APART) || line.contains(RACE)) {
        Some(line) if !out.status.success() => Ok(line.trim().into()),
        _ => Err(format!("no number notices:\n{said}").into()),
    }
}

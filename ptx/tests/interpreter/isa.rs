//! Operation by operation, against the words of the instruction set: small PTX texts, no compiler
//! needed.

use dreamc_ptx::{Arg, Finding, Kind, Launch, LoadError, Memory, Module, Options, Schedule, run};

/// A kernel `k(.param .u64 in, .param .u64 out)` with this body, for `sm_90a`; `%in` and `%out` are
/// loaded, `%t` is the thread's number, and there are registers of every kind.
pub fn kernel(before: &str, body: &str) -> String {
    format!(
        ".version 9.0\n.target sm_90a\n.address_size 64\n{before}\n\
         .visible .entry k(.param .u64 in, .param .u64 out)\n{{\n\
         .reg .pred %p<16>; .reg .b16 %h<16>; .reg .b32 %r<80>; .reg .b64 %d<32>; .reg .b32 %t; .reg .b64 %in, %out, %at;\n\
         ld.param.u64 %in, [in]; ld.param.u64 %out, [out]; mov.u32 %t, %tid.x;\n\
         {body}\nret;\n}}\n"
    )
}

fn load(text: &str) -> Module {
    Module::load(text, None).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

fn launch(memory_in: u64, memory_out: u64, threads: u32) -> Launch {
    let args = vec![Arg::Pointer(memory_in), Arg::Pointer(memory_out)];
    Launch { kernel: "k".into(), grid: [1, 1, 1], block: [threads, 1, 1], shared_bytes: 0, args }
}

/// Runs a body with these input words; gives `count` output words.
fn words(before: &str, body: &str, threads: u32, input: &[u32], count: usize) -> Result<Vec<u32>, Finding> {
    let module = load(&kernel(before, body));
    let mut results = Vec::new();
    for schedule in [Schedule::Forward, Schedule::Reverse, Schedule::Random(5)] {
        let mut memory = Memory::new();
        let from = memory.alloc_slice(input);
        let to = memory.alloc(4 * count as u64);
        let options = Options { schedule, instruction_budget: 1_000_000, ..Options::default() };
        run(&module, &launch(from, to, threads), &mut memory, &options)?;
        results.push(memory.read_slice::<u32>(to, count).unwrap());
    }
    assert!(results.iter().all(|result| *result == results[0]), "depends on the schedule: {body}");
    Ok(results.swap_remove(0))
}

fn finding(before: &str, body: &str, threads: u32) -> Finding {
    let input: Vec<u32> = (0..256).collect();
    words(before, body, threads, &input, 256).expect_err(body)
}

/// Evaluates an operation on up to 32 cases, one to a lane. `kinds` are the widths of destination
/// and sources in bits, `1` being a predicate.
fn evaluate(opcode: &str, kinds: &[u32], cases: &[Vec<u64>]) -> Vec<u64> {
    let names = ["o", "a", "b", "c", "e"];
    let mut body = String::from(
        "mul.wide.u32 %at, %t, 64; add.u64 %in, %in, %at; mul.wide.u32 %at, %t, 8; add.u64 %out, %out, %at;\n",
    );
    for (name, kind) in names.iter().zip(kinds) {
        let kind = if *kind == 1 { ".pred".to_owned() } else { format!(".b{kind}") };
        body += &format!(".reg {kind} %{name};\n");
    }
    for (i, (name, kind)) in names.iter().zip(kinds).enumerate().skip(1) {
        let at = 8 * (i - 1);
        body += &match kind {
            1 => format!("ld.global.u32 %r0, [%in+{at}]; setp.ne.u32 %{name}, %r0, 0;\n"),
            kind => format!("ld.global.b{kind} %{name}, [%in+{at}];\n"),
        };
    }
    let operands: Vec<String> = names[..kinds.len()].iter().map(|name| format!("%{name}")).collect();
    body += &format!("{opcode} {};\n", operands.join(", "));
    body += &match kinds[0] {
        1 => "selp.b64 %d1, 1, 0, %o; st.global.b64 [%out], %d1;".to_owned(),
        16 => "cvt.u64.u16 %d1, %o; st.global.b64 [%out], %d1;".to_owned(),
        32 => "cvt.u64.u32 %d1, %o; st.global.b64 [%out], %d1;".to_owned(),
        _ => "st.global.b64 [%out], %o;".to_owned(),
    };
    let module = load(&kernel("", &body));
    let mut memory = Memory::new();
    let input: Vec<u64> =
        cases.iter().flat_map(|case| (0..8).map(|i| case.get(i).copied().unwrap_or(0))).collect();
    let from = memory.alloc_slice(&input);
    let to = memory.alloc(8 * cases.len() as u64);
    let launch = launch(from, to, cases.len() as u32);
    run(&module, &launch, &mut memory, &Options::default())
        .unwrap_or_else(|finding| panic!("{opcode}: {finding}"));
    memory.read_slice(to, cases.len()).unwrap()
}

/// Rows of a table: opcode, widths, cases of sources and result.
type Row = (&'static str, &'static [u32], &'static [(&'static [u64], u64)]);

fn check(table: &[Row]) {
    for (opcode, kinds, cases) in table {
        let inputs: Vec<Vec<u64>> = cases.iter().map(|case| case.0.to_vec()).collect();
        let found = evaluate(opcode, kinds, &inputs);
        for ((input, right), found) in cases.iter().zip(found) {
            assert_eq!(found, *right, "{opcode} {input:#x?} gives {found:#x}, right is {right:#x}");
        }
    }
}

const fn f(x: f32) -> u64 {
    x.to_bits() as u64
}

const fn d(x: f64) -> u64 {
    x.to_bits()
}

const W3: &[u32] = &[32, 32, 32];
const W4: &[u32] = &[32, 32, 32, 32];
const W2: &[u32] = &[32, 32];
const D2: &[u32] = &[64, 64];
const D3: &[u32] = &[64, 64, 64];
const P3: &[u32] = &[1, 32, 32];
const MINUS: u64 = 0xffff_ffff;
const INF: u64 = f(f32::INFINITY);
const NAN: u64 = 0x7fff_ffff;
const TINY: u64 = 1;

#[test]
fn integers() {
    const TABLE: &[Row] = &[
        ("add.u32", W3, &[(&[1, 2], 3), (&[MINUS, 2], 1)]),
        ("sub.s32", W3, &[(&[1, 2], MINUS)]),
        ("mul.lo.u32", W3, &[(&[0x1_0001, 0x1_0001], 0x2_0001)]),
        ("mul.hi.u32", W3, &[(&[MINUS, MINUS], 0xffff_fffe)]),
        ("mul.hi.s32", W3, &[(&[MINUS, MINUS], 0), (&[MINUS, 5], MINUS)]),
        ("mul.wide.u32", &[64, 32, 32], &[(&[MINUS, 2], 0x1_ffff_fffe)]),
        ("mul.wide.s32", &[64, 32, 32], &[(&[MINUS, 2], u64::MAX - 1)]),
        ("mad.lo.s32", W4, &[(&[3, 4, 5], 17)]),
        ("mad.hi.u32", W4, &[(&[MINUS, 16, 5], 20)]),
        ("mad.hi.s32", W4, &[(&[MINUS, 16, 5], 4)]),
        ("mad.wide.u32", &[64, 32, 32, 64], &[(&[MINUS, 2, 2], 0x2_0000_0000)]),
        ("mad.wide.s32", &[64, 32, 32, 64], &[(&[MINUS, 2, 3], 1)]),
        ("div.u32", W3, &[(&[7, 2], 3), (&[7, 0], MINUS)]),
        ("rem.u32", W3, &[(&[7, 4], 3), (&[7, 0], 7)]),
        ("div.s32", W3, &[(&[MINUS - 6, 2], MINUS - 2), (&[0x8000_0000, MINUS], 0x8000_0000)]),
        ("rem.s32", W3, &[(&[MINUS - 6, 4], MINUS - 2), (&[0x8000_0000, MINUS], 0)]),
        ("neg.s32", W2, &[(&[5], MINUS - 4)]),
        ("abs.s32", W2, &[(&[MINUS], 1)]),
        ("min.s32", W3, &[(&[MINUS, 1], MINUS)]),
        ("max.s32", W3, &[(&[MINUS, 1], 1)]),
        ("min.u32", W3, &[(&[MINUS, 1], 1)]),
        ("max.u32", W3, &[(&[MINUS, 1], MINUS)]),
        ("sad.s32", W4, &[(&[MINUS, 2, 10], 13)]),
        ("sad.u32", W4, &[(&[1, 4, 10], 13)]),
        ("dp4a.s32.s32", W4, &[(&[0x01ff_0203, 0x0102_0304, 100], 100 + 1 - 2 + 6 + 12)]),
        ("dp4a.u32.u32", W4, &[(&[0x01ff_0203, 0x0102_0304, 100], 100 + 1 + 510 + 6 + 12)]),
        ("dp2a.lo.u32.u32", W4, &[(&[0x0102_ffff, 0x0506_03ff, 100], 100 + 0xffff * 0xff + 0x102 * 3)]),
        ("dp2a.hi.u32.u32", W4, &[(&[0x0102_ffff, 0x0506_03ff, 100], 100 + 0xffff * 6 + 0x102 * 5)]),
        ("dp2a.lo.s32.s32", W4, &[(&[0x0102_ffff, 0x0506_03ff, 100], 100 + 1 + 0x102 * 3)]),
        ("dp2a.hi.s32.s32", W4, &[(&[0x0102_ffff, 0x0506_03ff, 100], 100 - 6 + 0x102 * 5)]),
        ("add.s16", &[16, 16, 16], &[(&[0xffff, 2], 1)]),
        ("sub.s16", &[16, 16, 16], &[(&[1, 2], 0xffff)]),
        ("mul.lo.s16", &[16, 16, 16], &[(&[0x101, 0x101], 0x201)]),
        ("mul.hi.u16", &[16, 16, 16], &[(&[0x8000, 4], 2)]),
        ("mul.hi.s16", &[16, 16, 16], &[(&[0xffff, 4], 0xffff)]),
        ("mul.wide.u16", &[32, 16, 16], &[(&[0xffff, 2], 0x1_fffe)]),
        ("mul.wide.s16", &[32, 16, 16], &[(&[0xffff, 2], MINUS - 1)]),
        ("mad.lo.s16", &[16, 16, 16, 16], &[(&[3, 4, 0xffff], 11)]),
        ("div.u16", &[16, 16, 16], &[(&[7, 2], 3)]),
        ("rem.u16", &[16, 16, 16], &[(&[7, 2], 1)]),
        ("neg.s16", &[16, 16], &[(&[1], 0xffff)]),
        ("abs.s16", &[16, 16], &[(&[0xffff], 1)]),
        ("min.s16", &[16, 16, 16], &[(&[0xffff, 1], 0xffff)]),
        ("max.s16", &[16, 16, 16], &[(&[0xffff, 1], 1)]),
        ("min.u16", &[16, 16, 16], &[(&[0xffff, 1], 1)]),
        ("max.u16", &[16, 16, 16], &[(&[0xffff, 1], 0xffff)]),
        ("add.u64", D3, &[(&[u64::MAX, 2], 1)]),
        ("sub.s64", D3, &[(&[1, 2], u64::MAX)]),
        ("mul.lo.s64", D3, &[(&[u64::MAX, 5], u64::MAX - 4)]),
        ("mul.hi.u64", D3, &[(&[u64::MAX, 2], 1)]),
        ("mul.hi.s64", D3, &[(&[u64::MAX, 2], u64::MAX)]),
        ("mad.lo.s64", &[64, 64, 64, 64], &[(&[3, 4, 5], 17)]),
        ("div.u64", D3, &[(&[7, 2], 3)]),
        ("rem.u64", D3, &[(&[7, 4], 3)]),
        ("div.s64", D3, &[(&[7u64.wrapping_neg(), 2], 3u64.wrapping_neg())]),
        ("rem.s64", D3, &[(&[7u64.wrapping_neg(), 4], 3u64.wrapping_neg())]),
        ("neg.s64", D2, &[(&[5], 5u64.wrapping_neg())]),
        ("abs.s64", D2, &[(&[u64::MAX], 1)]),
        ("min.s64", D3, &[(&[u64::MAX, 1], u64::MAX)]),
        ("max.s64", D3, &[(&[u64::MAX, 1], 1)]),
        ("min.u64", D3, &[(&[u64::MAX, 1], 1)]),
        ("max.u64", D3, &[(&[u64::MAX, 1], u64::MAX)]),
    ];
    check(TABLE);
}

#[test]
fn logic_and_fields() {
    const TABLE: &[Row] = &[
        ("and.b32", W3, &[(&[0b1100, 0b1010], 0b1000)]),
        ("or.b32", W3, &[(&[0b1100, 0b1010], 0b1110)]),
        ("xor.b32", W3, &[(&[0b1100, 0b1010], 0b0110)]),
        ("not.b32", W2, &[(&[0], MINUS)]),
        ("cnot.b32", W2, &[(&[0], 1), (&[7], 0)]),
        ("not.b16", &[16, 16], &[(&[1], 0xfffe)]),
        ("and.b64", D3, &[(&[u64::MAX, 5], 5)]),
        ("or.b64", D3, &[(&[8, 5], 13)]),
        ("xor.b64", D3, &[(&[u64::MAX, 1], u64::MAX - 1)]),
        ("not.b64", D2, &[(&[0], u64::MAX)]),
        ("shl.b32", W3, &[(&[3, 2], 12), (&[3, 32], 0), (&[3, 100], 0)]),
        ("shr.u32", W3, &[(&[MINUS, 28], 15), (&[MINUS, 32], 0)]),
        ("shr.s32", W3, &[(&[MINUS, 28], MINUS), (&[0x8000_0000, 99], MINUS)]),
        ("shl.b64", &[64, 64, 32], &[(&[3, 62], 3 << 62), (&[3, 64], 0)]),
        ("shr.u64", &[64, 64, 32], &[(&[u64::MAX, 60], 15), (&[1, 64], 0)]),
        ("shr.s64", &[64, 64, 32], &[(&[1 << 63, 63], u64::MAX), (&[1 << 63, 90], u64::MAX)]),
        ("shl.b16", &[16, 16, 32], &[(&[0x8001, 1], 2), (&[1, 16], 0)]),
        ("shr.u16", &[16, 16, 32], &[(&[0x8000, 15], 1)]),
        ("shr.s16", &[16, 16, 32], &[(&[0x8000, 15], 0xffff)]),
        ("shf.l.wrap.b32", W4, &[(&[0x8000_0000, 1, 1], 3), (&[7, 9, 32], 9)]),
        ("shf.r.wrap.b32", W4, &[(&[2, 1, 1], 0x8000_0001), (&[7, 9, 32], 7)]),
        ("shf.l.clamp.b32", W4, &[(&[7, 9, 40], 7)]),
        ("shf.r.clamp.b32", W4, &[(&[7, 9, 40], 9)]),
        ("popc.b32", W2, &[(&[0xf0f0], 8)]),
        ("popc.b64", &[32, 64], &[(&[u64::MAX], 64)]),
        ("clz.b32", W2, &[(&[0], 32), (&[1], 31)]),
        ("clz.b64", &[32, 64], &[(&[1], 63)]),
        ("brev.b32", W2, &[(&[1], 0x8000_0000)]),
        ("brev.b64", D2, &[(&[1], 1 << 63)]),
        ("bfind.u32", W2, &[(&[0x100], 8), (&[0], MINUS)]),
        ("bfind.s32", W2, &[(&[MINUS], MINUS), (&[MINUS - 1], 0)]),
        ("bfind.shiftamt.u32", W2, &[(&[0x100], 23), (&[0], MINUS)]),
        ("bfind.u64", &[32, 64], &[(&[1 << 40], 40), (&[0], MINUS)]),
        (
            "bfe.u32",
            W4,
            &[(&[0xabcd, 4, 8], 0xbc), (&[0xabcd, 4, 0], 0), (&[MINUS, 31, 8], 1), (&[5, 0, 32], 5)],
        ),
        ("bfe.s32", W4, &[(&[0xabcd, 4, 8], 0xffff_ffbc), (&[0x8000_0000, 31, 8], MINUS), (&[1, 0, 0], 0)]),
        ("bfe.u64", &[64, 64, 32, 32], &[(&[0xabcd << 40, 44, 8], 0xbc)]),
        ("bfe.s64", &[64, 64, 32, 32], &[(&[0xabcd << 40, 44, 8], 0xbcu64 | !0xff)]),
        (
            "bfi.b32",
            &[32, 32, 32, 32, 32],
            &[(&[0xf, MINUS - MINUS, 4, 2], 0x30), (&[0, MINUS, 8, 8], 0xffff_00ff)],
        ),
        ("bfi.b64", &[64, 64, 64, 32, 32], &[(&[0xf, 0, 40, 2], 3 << 40)]),
        (
            "prmt.b32",
            W4,
            &[(&[0x3322_1100, 0x7766_5544, 0x7531], 0x7755_3311), (&[0x80, 0, 0x9998], 0x0000_00ff)],
        ),
        ("selp.b32", &[32, 32, 32, 1], &[(&[1, 2, 1], 1), (&[1, 2, 0], 2)]),
        ("selp.f64", &[64, 64, 64, 1], &[(&[1, 2, 1], 1), (&[1, 2, 0], 2)]),
        ("slct.b32.s32", W4, &[(&[1, 2, 0], 1), (&[1, 2, MINUS], 2)]),
        ("and.pred", &[1, 1, 1], &[(&[1, 1], 1), (&[1, 0], 0)]),
        ("or.pred", &[1, 1, 1], &[(&[1, 0], 1), (&[0, 0], 0)]),
        ("xor.pred", &[1, 1, 1], &[(&[1, 1], 0), (&[1, 0], 1)]),
        ("not.pred", &[1, 1], &[(&[1], 0), (&[0], 1)]),
    ];
    check(TABLE);
    // lop3 takes its truth table as a constant: here a majority.
    let found = words(
        "",
        "ld.global.v4.u32 {%r0, %r1, %r2, %r3}, [%in]; lop3.b32 %r4, %r0, %r1, %r2, 0xe8; st.global.u32 [%out], %r4;",
        1,
        &[0b1100, 0b1010, 0b0110, 0],
        1,
    );
    assert_eq!(found.unwrap(), [0b1110]);
}

#[test]
fn single_precision() {
    const THIRD: f32 = 1.0 / 3.0;
    const TABLE: &[Row] = &[
        ("add.f32", W3, &[(&[f(1.5), f(2.0)], f(3.5))]),
        ("add.rn.f32", W3, &[(&[f(1.0), f(5.9e-8)], f(1.0))]),
        ("add.rz.f32", W3, &[(&[f(1.0), f(1.1e-7)], f(1.0)), (&[f(-1.0), f(-1.1e-7)], f(-1.0))]),
        (
            "add.rm.f32",
            W3,
            &[(&[f(1.0), f(-1e-20)], f(1.0 - f32::EPSILON / 2.0)), (&[f(1.0), f(-1.0)], f(-0.0))],
        ),
        ("add.rp.f32", W3, &[(&[f(1.0), f(1e-20)], f(1.0 + f32::EPSILON))]),
        ("add.sat.f32", W3, &[(&[f(0.75), f(0.75)], f(1.0)), (&[f(-1.0), f(0.5)], 0), (&[NAN, 0], 0)]),
        (
            "add.ftz.f32",
            W3,
            &[(&[TINY, 0], 0), (&[f(1.0), TINY], f(1.0)), (&[0x8000_0001, 0x8000_0001], 0x8000_0000)],
        ),
        ("sub.f32", W3, &[(&[f(1.5), f(2.0)], f(-0.5))]),
        ("sub.rz.f32", W3, &[(&[f(1.0), f(1e-20)], f(1.0 - f32::EPSILON / 2.0))]),
        ("mul.f32", W3, &[(&[f(1.5), f(2.0)], f(3.0)), (&[f(1e-30), f(1e-10)], f(1e-40))]),
        ("mul.ftz.f32", W3, &[(&[f(1e-30), f(1e-10)], 0)]),
        ("mul.rz.f32", W3, &[(&[f(THIRD), f(3.0)], f(1.0))]),
        ("mul.rp.f32", W3, &[(&[f(THIRD), f(3.0)], f(1.0 + f32::EPSILON))]),
        ("mul.rm.f32", W3, &[(&[f(-THIRD), f(3.0)], f(-1.0 - f32::EPSILON))]),
        (
            "fma.rn.f32",
            W4,
            &[
                (&[f(2.0), f(3.0), f(4.0)], f(10.0)),
                (
                    &[f(1.0 + f32::EPSILON), f(1.0 + f32::EPSILON), f(-1.0 - 2.0 * f32::EPSILON)],
                    f(f32::EPSILON * f32::EPSILON),
                ),
            ],
        ),
        ("fma.rz.f32", W4, &[(&[f(1.0), f(1.0), f(1e-20)], f(1.0))]),
        ("fma.rp.f32", W4, &[(&[f(1.0), f(1.0), f(1e-20)], f(1.0 + f32::EPSILON))]),
        ("fma.rm.f32", W4, &[(&[f(-1.0), f(1.0), f(-1e-20)], f(-1.0 - f32::EPSILON))]),
        ("fma.rn.sat.f32", W4, &[(&[f(2.0), f(3.0), f(4.0)], f(1.0))]),
        ("fma.rn.ftz.f32", W4, &[(&[TINY, f(1.0), f(4.0)], f(4.0))]),
        ("div.rn.f32", W3, &[(&[f(1.0), f(3.0)], f(THIRD)), (&[f(1.0), 0], INF)]),
        ("div.rz.f32", W3, &[(&[f(1.0), f(3.0)], f(THIRD) - 1), (&[f(2.0), f(4.0)], f(0.5))]),
        ("div.rp.f32", W3, &[(&[f(1.0), f(3.0)], f(THIRD))]),
        ("div.rm.f32", W3, &[(&[f(-1.0), f(3.0)], f(-THIRD))]),
        ("div.approx.f32", W3, &[(&[f(1.0), f(4.0)], f(0.25))]),
        ("div.full.f32", W3, &[(&[f(1.0), f(4.0)], f(0.25))]),
        ("rcp.rn.f32", W2, &[(&[f(4.0)], f(0.25))]),
        ("rcp.rz.f32", W2, &[(&[f(3.0)], f(THIRD) - 1)]),
        ("rcp.approx.f32", W2, &[(&[f(4.0)], f(0.25)), (&[0], INF)]),
        ("rcp.approx.ftz.f32", W2, &[(&[TINY], INF)]),
        ("sqrt.rn.f32", W2, &[(&[f(2.25)], f(1.5)), (&[f(-0.0)], f(-0.0))]),
        ("sqrt.rz.f32", W2, &[(&[f(2.0)], f(std::f32::consts::SQRT_2))]),
        ("sqrt.rp.f32", W2, &[(&[f(2.0)], f(std::f32::consts::SQRT_2) + 1)]),
        ("sqrt.rm.f32", W2, &[(&[f(4.0)], f(2.0))]),
        ("sqrt.approx.f32", W2, &[(&[f(2.25)], f(1.5))]),
        ("rsqrt.approx.f32", W2, &[(&[f(4.0)], f(0.5))]),
        ("ex2.approx.f32", W2, &[(&[f(3.0)], f(8.0)), (&[f(f32::NEG_INFINITY)], 0)]),
        ("ex2.approx.ftz.f32", W2, &[(&[f(-130.0)], 0)]),
        ("lg2.approx.f32", W2, &[(&[f(8.0)], f(3.0)), (&[0], f(f32::NEG_INFINITY))]),
        ("sin.approx.f32", W2, &[(&[0], 0)]),
        ("cos.approx.f32", W2, &[(&[0], f(1.0))]),
        ("tanh.approx.f32", W2, &[(&[0], 0), (&[INF], f(1.0))]),
        ("min.f32", W3, &[(&[f(1.0), f(2.0)], f(1.0)), (&[NAN, f(2.0)], f(2.0)), (&[0, f(-0.0)], f(-0.0))]),
        ("max.f32", W3, &[(&[f(1.0), f(2.0)], f(2.0)), (&[NAN, f(2.0)], f(2.0)), (&[NAN, NAN], NAN)]),
        ("min.NaN.f32", W3, &[(&[NAN, f(2.0)], NAN)]),
        ("max.NaN.f32", W3, &[(&[f(1.0), NAN], NAN)]),
        ("neg.f32", W2, &[(&[f(1.0)], f(-1.0))]),
        ("abs.f32", W2, &[(&[f(-1.0)], f(1.0))]),
        ("neg.ftz.f32", W2, &[(&[TINY], 0x8000_0000)]),
        ("copysign.f32", W3, &[(&[f(-1.0), f(3.0)], f(-3.0))]),
        ("testp.finite.f32", &[1, 32], &[(&[INF], 0), (&[f(1.0)], 1)]),
        ("testp.infinite.f32", &[1, 32], &[(&[INF], 1)]),
        ("testp.notanumber.f32", &[1, 32], &[(&[NAN], 1)]),
        ("testp.number.f32", &[1, 32], &[(&[NAN], 0)]),
        ("testp.normal.f32", &[1, 32], &[(&[TINY], 0)]),
        ("testp.subnormal.f32", &[1, 32], &[(&[TINY], 1)]),
    ];
    check(TABLE);
}

#[test]
fn double_precision() {
    const TABLE: &[Row] = &[
        ("add.f64", D3, &[(&[d(1.5), d(2.0)], d(3.5))]),
        ("add.rz.f64", D3, &[(&[d(1.0), d(1e-30)], d(1.0))]),
        ("add.rp.f64", D3, &[(&[d(1.0), d(1e-30)], d(1.0 + f64::EPSILON))]),
        ("add.rm.f64", D3, &[(&[d(1.0), d(-1e-30)], d(1.0 - f64::EPSILON / 2.0))]),
        ("sub.f64", D3, &[(&[d(1.5), d(2.0)], d(-0.5))]),
        ("mul.f64", D3, &[(&[d(1.5), d(2.0)], d(3.0))]),
        ("fma.rn.f64", &[64, 64, 64, 64], &[(&[d(2.0), d(3.0), d(4.0)], d(10.0))]),
        ("div.rn.f64", D3, &[(&[d(1.0), d(3.0)], d(1.0 / 3.0))]),
        ("rcp.rn.f64", D2, &[(&[d(4.0)], d(0.25))]),
        ("rcp.approx.ftz.f64", D2, &[(&[d(4.0)], d(0.25)), (&[d(3.0)], d(1.0 / 3.0) & !MINUS)]),
        ("rsqrt.approx.ftz.f64", D2, &[(&[d(4.0)], d(0.5))]),
        ("sqrt.rn.f64", D2, &[(&[d(2.25)], d(1.5))]),
        ("neg.f64", D2, &[(&[d(1.0)], d(-1.0))]),
        ("abs.f64", D2, &[(&[d(-1.0)], d(1.0))]),
        (
            "min.f64",
            D3,
            &[
                (&[d(1.0), d(2.0)], d(1.0)),
                (&[d(f64::NAN), d(2.0)], d(2.0)),
                (&[d(2.0), d(f64::NAN)], d(2.0)),
            ],
        ),
        ("max.f64", D3, &[(&[d(1.0), d(2.0)], d(2.0)), (&[d(-0.0), d(0.0)], d(0.0))]),
        ("copysign.f64", D3, &[(&[d(-1.0), d(3.0)], d(-3.0))]),
    ];
    check(TABLE);
}

#[test]
fn half_precision() {
    const H3: &[u32] = &[16, 16, 16];
    const H4: &[u32] = &[16, 16, 16, 16];
    const TABLE: &[Row] = &[
        // 1.5 is 0x3e00 in f16 and 0x3fc0 in bf16; 2.0 is 0x4000 in both.
        ("add.f16", H3, &[(&[0x3e00, 0x4000], 0x4300), (&[0x7bff, 0x7bff], 0x7c00)]),
        ("add.rn.bf16", H3, &[(&[0x3fc0, 0x4000], 0x4060)]),
        ("sub.f16", H3, &[(&[0x3e00, 0x4000], 0xb800)]),
        ("sub.bf16", H3, &[(&[0x3fc0, 0x4000], 0xbf00)]),
        ("mul.f16", H3, &[(&[0x3e00, 0x4000], 0x4200)]),
        ("mul.bf16", H3, &[(&[0x3fc0, 0x4000], 0x4040)]),
        ("fma.rn.f16", H4, &[(&[0x3e00, 0x4000, 0x3c00], 0x4400)]),
        ("fma.rn.bf16", H4, &[(&[0x3fc0, 0x4000, 0x3f80], 0x4080)]),
        ("fma.rn.relu.bf16", H4, &[(&[0x3fc0, 0xc000, 0x3f80], 0)]),
        ("neg.f16", &[16, 16], &[(&[0x3e00], 0xbe00)]),
        ("neg.bf16", &[16, 16], &[(&[0x3fc0], 0xbfc0)]),
        ("abs.bf16", &[16, 16], &[(&[0xbfc0], 0x3fc0)]),
        ("min.bf16", H3, &[(&[0x3fc0, 0x4000], 0x3fc0), (&[0x7fc0, 0x4000], 0x4000)]),
        ("max.f16", H3, &[(&[0x3e00, 0x4000], 0x4000)]),
        ("max.NaN.bf16", H3, &[(&[0x7fc0, 0x4000], 0x7fff)]),
        ("ex2.approx.f16", &[16, 16], &[(&[0x4000], 0x4400)]),
        ("tanh.approx.bf16", &[16, 16], &[(&[0], 0)]),
        ("add.f16x2", W3, &[(&[0x3e00_4000, 0x4000_4000], 0x4300_4400)]),
        ("fma.rn.bf16x2", W4, &[(&[0x3fc0_4000, 0x4000_4000, 0x3f80_0000], 0x4080_4080)]),
        ("mul.bf16x2", W3, &[(&[0x3fc0_4000, 0x4000_4000], 0x4040_4080)]),
        ("max.bf16x2", W3, &[(&[0x3fc0_4000, 0x4000_3f80], 0x4000_4000)]),
        ("neg.f16x2", W2, &[(&[0x3e00_4000], 0xbe00_c000)]),
    ];
    check(TABLE);
}

#[test]
fn conversions() {
    const TABLE: &[Row] = &[
        ("cvt.u64.u32", &[64, 32], &[(&[MINUS], MINUS)]),
        ("cvt.s64.s32", &[64, 32], &[(&[MINUS], u64::MAX)]),
        ("cvt.u32.u64", &[32, 64], &[(&[0x1_0000_0005], 5)]),
        ("cvt.u16.u32", &[16, 32], &[(&[0x1_2345], 0x2345)]),
        ("cvt.u32.u16", &[32, 16], &[(&[0xffff], 0xffff)]),
        ("cvt.s32.s16", &[32, 16], &[(&[0xffff], MINUS)]),
        ("cvt.s32.s8", &[32, 32], &[(&[0x1ff], MINUS)]),
        ("cvt.u32.u8", &[32, 32], &[(&[0x1ff], 0xff)]),
        ("cvt.s16.s8", &[16, 32], &[(&[0x80], 0xff80)]),
        ("cvt.u16.u64", &[16, 64], &[(&[0x5_4321], 0x4321)]),
        ("cvt.s64.s8", &[64, 32], &[(&[0x80], 0x80u64 | !0xff)]),
        ("cvt.s64.s16", &[64, 16], &[(&[0x8000], 0x8000u64 | !0xffff)]),
        ("cvt.u64.u16", &[64, 16], &[(&[0x8000], 0x8000)]),
        ("cvt.rn.f32.s32", W2, &[(&[MINUS], f(-1.0)), (&[16_777_217], f(16_777_216.0))]),
        ("cvt.rn.f32.u32", W2, &[(&[MINUS], f(4_294_967_296.0))]),
        ("cvt.rz.f32.u32", W2, &[(&[MINUS], f(4_294_967_040.0))]),
        ("cvt.rp.f32.s32", W2, &[(&[16_777_217], f(16_777_218.0))]),
        ("cvt.rm.f32.s32", W2, &[(&[16_777_217], f(16_777_216.0))]),
        ("cvt.rn.f32.u64", &[32, 64], &[(&[u64::MAX], f(18_446_744_073_709_551_616.0))]),
        ("cvt.rn.f32.s64", &[32, 64], &[(&[u64::MAX], f(-1.0))]),
        ("cvt.rn.f64.s32", &[64, 32], &[(&[MINUS], d(-1.0))]),
        ("cvt.rn.f64.s64", D2, &[(&[u64::MAX], d(-1.0))]),
        ("cvt.rn.f64.u32", &[64, 32], &[(&[MINUS], d(4_294_967_295.0))]),
        ("cvt.rn.f16.s32", &[16, 32], &[(&[3], 0x4200)]),
        (
            "cvt.rzi.s32.f32",
            W2,
            &[(&[f(-1.9)], MINUS), (&[f(3e9)], 0x7fff_ffff), (&[f(-3e9)], 0x8000_0000), (&[NAN], 0)],
        ),
        ("cvt.rni.s32.f32", W2, &[(&[f(2.5)], 2), (&[f(3.5)], 4)]),
        ("cvt.rmi.s32.f32", W2, &[(&[f(-1.1)], MINUS - 1)]),
        ("cvt.rpi.s32.f32", W2, &[(&[f(1.1)], 2)]),
        ("cvt.rzi.u32.f32", W2, &[(&[f(-1.9)], 0), (&[f(5e9)], MINUS)]),
        ("cvt.rzi.ftz.u32.f32", W2, &[(&[f(7.9)], 7)]),
        ("cvt.rzi.u64.f32", &[64, 32], &[(&[f(1e10)], 10_000_000_000), (&[NAN], 1 << 63)]),
        ("cvt.rzi.s64.f32", &[64, 32], &[(&[f(-1e10)], 10_000_000_000u64.wrapping_neg())]),
        ("cvt.rzi.s32.f64", &[32, 64], &[(&[d(-7.9)], MINUS - 6), (&[d(f64::NAN)], 0x8000_0000)]),
        ("cvt.rzi.s16.f32", &[16, 32], &[(&[f(-2.0)], 0xfffe), (&[f(1e6)], 0x7fff)]),
        ("cvt.rzi.s32.f16", &[32, 16], &[(&[0xc200], MINUS - 2)]),
        ("cvt.rni.f32.f32", W2, &[(&[f(2.5)], f(2.0)), (&[f(-0.2)], f(-0.0))]),
        ("cvt.rzi.f32.f32", W2, &[(&[f(-2.5)], f(-2.0))]),
        ("cvt.rmi.f32.f32", W2, &[(&[f(-2.5)], f(-3.0))]),
        ("cvt.rpi.f32.f32", W2, &[(&[f(2.1)], f(3.0))]),
        ("cvt.sat.f32.f32", W2, &[(&[f(2.1)], f(1.0)), (&[NAN], 0)]),
        ("cvt.ftz.f32.f32", W2, &[(&[TINY], 0)]),
        ("cvt.f64.f32", &[64, 32], &[(&[f(1.5)], d(1.5))]),
        ("cvt.rn.f32.f64", &[32, 64], &[(&[d(1.0 + 1e-9)], f(1.0))]),
        ("cvt.rp.f32.f64", &[32, 64], &[(&[d(1.0 + 1e-9)], f(1.0 + f32::EPSILON))]),
        ("cvt.rni.f64.f64", D2, &[(&[d(2.5)], d(2.0))]),
        (
            "cvt.rn.f16.f32",
            &[16, 32],
            &[(&[f(1.5)], 0x3e00), (&[f(1e6)], 0x7c00), (&[NAN], 0x7fff), (&[f(6e-8)], 1)],
        ),
        ("cvt.rz.f16.f32", &[16, 32], &[(&[f(1e6)], 0x7bff)]),
        ("cvt.f32.f16", &[32, 16], &[(&[0x3e00], f(1.5))]),
        (
            "cvt.rn.bf16.f32",
            &[16, 32],
            &[(&[f(1.0 + 1.0 / 256.0)], 0x3f80), (&[f(1.0 + 3.0 / 256.0)], 0x3f82), (&[NAN], 0x7fff)],
        ),
        ("cvt.rz.bf16.f32", &[16, 32], &[(&[f(1.999)], 0x3fff)]),
        ("cvt.f32.bf16", &[32, 16], &[(&[0x3fc0], f(1.5))]),
        ("cvt.rn.bf16x2.f32", W3, &[(&[f(1.5), f(2.0)], 0x3fc0_4000)]),
        ("cvt.rn.f16x2.f32", W3, &[(&[f(1.5), f(2.0)], 0x3e00_4000)]),
        ("cvt.rn.relu.bf16x2.f32", W3, &[(&[f(-1.5), f(2.0)], 0x4000)]),
        ("cvt.rna.tf32.f32", W2, &[(&[0x3f80_1000], 0x3f80_2000), (&[0x3f80_0fff], 0x3f80_0000)]),
        ("cvt.rn.satfinite.e4m3x2.f32", &[16, 32, 32], &[(&[f(1.0), f(1e9)], 0x387e)]),
        ("cvt.rn.satfinite.e5m2x2.f32", &[16, 32, 32], &[(&[f(1.0), f(-2.0)], 0x3cc0)]),
        ("cvt.rn.f16x2.e4m3x2", &[32, 16], &[(&[0x3840], 0x3c00_4000)]),
        ("cvt.rn.f16x2.e5m2x2", &[32, 16], &[(&[0x3cc0], 0x3c00_c000)]),
    ];
    check(TABLE);
}

#[test]
fn comparisons() {
    const TABLE: &[Row] = &[
        ("setp.eq.s32", P3, &[(&[1, 1], 1), (&[1, 2], 0)]),
        ("setp.ne.b32", P3, &[(&[1, 1], 0)]),
        ("setp.lt.s32", P3, &[(&[MINUS, 1], 1)]),
        ("setp.lt.u32", P3, &[(&[MINUS, 1], 0)]),
        ("setp.lo.u32", P3, &[(&[1, 2], 1)]),
        ("setp.ls.u32", P3, &[(&[2, 2], 1)]),
        ("setp.hi.u32", P3, &[(&[2, 2], 0)]),
        ("setp.hs.u32", P3, &[(&[2, 2], 1)]),
        ("setp.le.s32", P3, &[(&[MINUS, MINUS], 1)]),
        ("setp.gt.s32", P3, &[(&[1, MINUS], 1)]),
        ("setp.ge.s32", P3, &[(&[1, MINUS], 1)]),
        ("setp.lt.s64", &[1, 64, 64], &[(&[u64::MAX, 1], 1)]),
        ("setp.gt.u64", &[1, 64, 64], &[(&[u64::MAX, 1], 1)]),
        ("setp.eq.b64", &[1, 64, 64], &[(&[5, 5], 1)]),
        ("setp.lt.s16", &[1, 16, 16], &[(&[0xffff, 1], 1)]),
        ("setp.lt.u16", &[1, 16, 16], &[(&[0xffff, 1], 0)]),
        ("setp.eq.f32", P3, &[(&[0, f(-0.0)], 1), (&[NAN, NAN], 0)]),
        ("setp.ne.f32", P3, &[(&[f(1.0), f(2.0)], 1), (&[NAN, f(1.0)], 0)]),
        ("setp.lt.f32", P3, &[(&[f(1.0), f(2.0)], 1), (&[NAN, f(1.0)], 0)]),
        ("setp.geu.f32", P3, &[(&[f(1.0), f(2.0)], 0), (&[NAN, f(1.0)], 1)]),
        ("setp.neu.f32", P3, &[(&[f(1.0), f(1.0)], 0), (&[NAN, NAN], 1)]),
        ("setp.equ.f32", P3, &[(&[f(1.0), f(2.0)], 0), (&[NAN, f(1.0)], 1)]),
        ("setp.ltu.f32", P3, &[(&[f(1.0), NAN], 1)]),
        ("setp.leu.f32", P3, &[(&[f(3.0), f(2.0)], 0)]),
        ("setp.gtu.f32", P3, &[(&[f(3.0), f(2.0)], 1)]),
        ("setp.num.f32", P3, &[(&[f(1.0), NAN], 0), (&[f(1.0), f(2.0)], 1)]),
        ("setp.nan.f32", P3, &[(&[f(1.0), NAN], 1)]),
        ("setp.eq.ftz.f32", P3, &[(&[TINY, 0], 1)]),
        ("setp.gt.f64", &[1, 64, 64], &[(&[d(2.0), d(1.0)], 1)]),
        ("setp.lt.f16", &[1, 16, 16], &[(&[0x3c00, 0x4000], 1)]),
        ("setp.gt.bf16", &[1, 16, 16], &[(&[0x3f80, 0x4000], 0)]),
    ];
    check(TABLE);
    // With a second result and a predicate joined in: q is the comparison's opposite, joined too.
    let body = "setp.lt.u32 %p3, %t, 2; setp.lt.and.u32 %p1|%p2, %t, 3, %p3; setp.lt.or.u32 %p4, %t, 1, !%p3;\
                selp.u32 %r1, 1, 0, %p1; selp.u32 %r2, 2, 0, %p2; selp.u32 %r3, 4, 0, %p4; add.u32 %r1, %r1, %r2;\
                add.u32 %r1, %r1, %r3; mul.wide.u32 %at, %t, 4; add.u64 %out, %out, %at; st.global.u32 [%out], %r1;";
    assert_eq!(words("", body, 4, &[], 4).unwrap(), [5, 1, 4, 4]);
}

const STORE: &str = "mul.wide.u32 %at, %t, 4; add.u64 %out, %out, %at; st.global.u32 [%out], %r9;";
const FETCH: &str = "mul.wide.u32 %at, %t, 4; add.u64 %in, %in, %at; ld.global.u32 %r0, [%in];";

#[test]
fn moves_and_special_registers() {
    let lanes: Vec<u32> = (0..32).collect();
    let body = format!(
        "{FETCH} mov.b32 {{%h0, %h1}}, %r0; mov.b32 %r1, {{%h1, %h0}}; mov.b64 %d1, {{%r0, %r1}}; \
        mov.b64 {{%r2, %r3}}, %d1; mov.b64 {{_, %r4}}, %d1; mov.b64 {{%h2, %h3, %h4, %h5}}, %d1; mov.b64 %d2, {{%h5, %h4, %h3, %h2}}; \
        cvt.u32.u64 %r5, %d2; xor.b32 %r9, %r3, %r4; add.u32 %r9, %r9, %r2; add.u32 %r9, %r9, %r5; {STORE}"
    );
    let found = words("", &body, 2, &[0x0001_0002, 0x0003_0004], 2).unwrap();
    // r1 has the halves exchanged; the quarters reversed put h5, h4 low: those of r1 exchanged
    // again.
    assert_eq!(found, [0x0001_0002 + 0x0001_0002, 0x0003_0004 + 0x0003_0004]);
    for (register, right) in [
        ("%tid.x", lanes.clone()),
        ("%ntid.x", vec![32; 32]),
        ("%ctaid.x", vec![0; 32]),
        ("%nctaid.y", vec![1; 32]),
        ("%laneid", lanes.clone()),
        ("%warpid", vec![0; 32]),
        ("%lanemask_eq", lanes.iter().map(|lane| 1 << lane).collect()),
        ("%lanemask_lt", lanes.iter().map(|lane| (1 << lane) - 1).collect()),
        ("%lanemask_le", lanes.iter().map(|lane| ((2u64 << lane) - 1) as u32).collect()),
        ("%lanemask_gt", lanes.iter().map(|lane| !((2u64 << lane) - 1) as u32).collect()),
        ("%lanemask_ge", lanes.iter().map(|lane| !((1u64 << lane) - 1) as u32).collect()),
        ("%dynamic_smem_size", vec![0; 32]),
        ("%cluster_ctarank", vec![0; 32]),
    ] {
        let found = words("", &format!("mov.u32 %r9, {register}; {STORE}"), 32, &[], 32).unwrap();
        assert_eq!(found, right, "{register}");
    }
}

#[test]
fn three_dimensions() {
    let body = "mov.u32 %r1, %tid.y; mov.u32 %r2, %tid.z; mov.u32 %r3, %ctaid.y; shl.b32 %r1, %r1, 8; shl.b32 %r2, %r2, 16; \
        shl.b32 %r3, %r3, 24; or.b32 %r9, %t, %r1; or.b32 %r9, %r9, %r2; or.b32 %r9, %r9, %r3; \
        mov.u32 %r4, %ctaid.y; mad.lo.u32 %r4, %r4, 3, %tid.z; mad.lo.u32 %r4, %r4, 5, %tid.y; mad.lo.u32 %r4, %r4, 7, %t; \
        mul.wide.u32 %at, %r4, 4; add.u64 %out, %out, %at; st.global.u32 [%out], %r9;";
    let module = load(&kernel("", body));
    let mut memory = Memory::new();
    let out = memory.alloc(4 * 2 * 105);
    let args = vec![Arg::Pointer(out), Arg::Pointer(out)];
    let launch = Launch { kernel: "k".into(), grid: [1, 2, 1], block: [7, 5, 3], shared_bytes: 0, args };
    run(&module, &launch, &mut memory, &Options::default()).unwrap();
    let found: Vec<u32> = memory.read_slice(out, 210).unwrap();
    let right: Vec<u32> =
        (0..210).map(|i| i % 7 | i / 7 % 5 << 8 | i / 35 % 3 << 16 | i / 105 << 24).collect();
    assert_eq!(found, right);
}

#[test]
fn control() {
    // A loop whose length differs by lane, inside a branch, with a guarded and a negated
    // instruction.
    let body = format!(
        "mov.u32 %r9, 0; mov.u32 %r1, 0; setp.gt.u32 %p1, %t, 3; @%p1 bra skip;\n\
         again: add.u32 %r9, %r9, %r1; add.u32 %r1, %r1, 1; setp.le.u32 %p2, %r1, %t; @%p2 bra again;\n\
         bra.uni done;\n skip: mov.u32 %r9, 100;\n done: @%p1 add.u32 %r9, %r9, 1; @!%p1 add.u32 %r9, %r9, 2; {STORE}"
    );
    assert_eq!(words("", &body, 6, &[], 6).unwrap(), [2, 3, 5, 8, 101, 101]);
    // Lanes that leave early, some by a guarded exit.
    let body = format!("setp.lt.u32 %p1, %t, 2; @%p1 ret; mov.u32 %r9, 7; {STORE}");
    assert_eq!(words("", &body, 4, &[], 4).unwrap(), [0, 0, 7, 7]);
    // Names in braces hide those outside, and the same label may stand in two braces.
    let body = format!(
        "mov.u32 %r9, 1; {{ .reg .b32 %r9; mov.u32 %r9, 5; bra next; next: }} {{ bra next; mov.u32 %r9, 9; next: }} {STORE}"
    );
    assert_eq!(words("", &body, 1, &[], 1).unwrap(), [1]);
}

#[test]
fn memory_accesses() {
    // Extension by zeros and by the sign, vectors, sinks and wider registers.
    let body = format!(
        "ld.global.u8 %r1, [%in]; ld.global.s8 %r2, [%in]; ld.global.s16 %r3, [%in]; ld.global.s32 %d1, [%in+4]; \
         ld.global.v2.u32 {{%r4, _}}, [%in]; ld.global.nc.v4.u32 {{%r5, %r6, %r7, %r8}}, [%in]; shr.u64 %d1, %d1, 32; cvt.u32.u64 %r10, %d1; \
         st.global.v4.u32 [%out], {{%r1, %r2, %r3, %r10}}; st.global.v2.u32 [%out+16], {{%r4, %r8}}; st.global.u8 [%out+24], %r1; st.global.u16 [%out+26], %r1;"
    );
    let found = words("", &body, 1, &[0x8081_82ff, 0x8000_0000, 3, 4], 7).unwrap();
    assert_eq!(found, [0xff, 0xffff_ffff, 0xffff_82ff, 0xffff_ffff, 0x8081_82ff, 4, 0x00ff_00ff]);
    // A byte extended by its sign into a 16-bit register is a 16-bit number like any.
    let body = format!(
        "ld.global.s8 %h1, [%in]; setp.eq.u16 %p1, %h1, 0xff80; selp.u32 %r9, 1, 0, %p1; cvt.u32.u16 %r1, %h1; \
         add.u32 %r9, %r9, %r1; {STORE}"
    );
    assert_eq!(words("", &body, 1, &[0x80], 1).unwrap(), [0xff81]);
    // Shared memory by its own and by generic addresses; a static array and a dynamic one.
    let before = ".shared .align 4 .b8 fixed[128]; .extern .shared .align 16 .b8 dynamic[];";
    let body = format!(
        "mov.u64 %d1, fixed; cvta.shared.u64 %d2, %d1; mul.wide.u32 %at, %t, 4; add.u64 %d3, %d2, %at; st.u32 [%d3], %t; \
         bar.sync 0; cvta.to.shared.u64 %d4, %d2; xor.b32 %r1, %t, 1; shl.b32 %r1, %r1, 2; cvt.u32.u64 %r2, %d4; add.u32 %r1, %r1, %r2; \
         ld.shared.u32 %r9, [%r1]; isspacep.shared %p1, %d2; isspacep.global %p2, %d2; selp.u32 %r3, 100, 0, %p1; selp.u32 %r4, 1000, 0, %p2; \
         add.u32 %r9, %r9, %r3; add.u32 %r9, %r9, %r4; {STORE}"
    );
    assert_eq!(words(before, &body, 4, &[], 4).unwrap(), [101, 100, 103, 102]);
    // Local memory is each thread's own.
    let body = format!(
        ".local .align 8 .b8 own[16]; mov.u64 %d1, own; cvta.local.u64 %d2, %d1; st.local.u32 [%d1+4], %t; ld.u32 %r9, [%d2+4]; {STORE}"
    );
    assert_eq!(words("", &body, 40, &[], 40).unwrap(), (0..40).collect::<Vec<u32>>());
    // Constants and variables of the module.
    let before = ".const .align 4 .b8 table[8] = {1, 0, 0, 0, 2}; .global .align 4 .u32 counter = 7;";
    let body = format!(
        "mov.u64 %d1, table; ld.const.u32 %r1, [%d1+4]; ld.const.u32 %r2, [table]; mov.u64 %d2, counter; ld.global.u32 %r3, [%d2]; \
         shl.b32 %r1, %r1, 8; or.b32 %r9, %r1, %r2; shl.b32 %r3, %r3, 16; or.b32 %r9, %r9, %r3; {STORE}"
    );
    assert_eq!(words(before, &body, 1, &[], 1).unwrap(), [0x0007_0201]);
}

#[test]
fn module_variables_outlive_a_launch() {
    let text = kernel(
        ".global .u32 counter;",
        "mov.u64 %d1, counter; ld.global.u32 %r1, [%d1]; add.u32 %r1, %r1, 1; st.global.u32 [%d1], %r1; st.global.u32 [%out], %r1;",
    );
    let (module, other) = (load(&text), load(&text));
    let mut memory = Memory::new();
    let out = memory.alloc(4);
    let mut go = |module: &Module| {
        run(module, &launch(out, out, 1), &mut memory, &Options::default()).unwrap();
        memory.read_slice::<u32>(out, 1).unwrap()[0]
    };
    assert_eq!([go(&module), go(&module), go(&other), go(&module)], [1, 2, 1, 3]);
}

#[test]
fn parameters() {
    let text = ".version 9.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u32 a, .param .align 8 .b8 s[16], .param .u64 out)\n{\n\
        .reg .b32 %r<8>; .reg .b64 %d<8>;\n ld.param.u32 %r1, [a]; ld.param.v2.u32 {%r2, %r3}, [s]; ld.param.u8 %r4, [s+9]; ld.param.u64 %d1, [out];\n\
        mov.b64 %d2, s; cvta.param.u64 %d3, %d2; ld.u32 %r5, [%d3+12]; ld.param.u32 %r6, [%d2+4];\n\
        st.global.v4.u32 [%d1], {%r1, %r2, %r3, %r4}; st.global.v2.u32 [%d1+16], {%r5, %r6};\nret;\n}\n";
    let module = load(text);
    assert_eq!(module.signature("k").unwrap().params, [4, 16, 8]);
    let mut memory = Memory::new();
    let out = memory.alloc(24);
    let bytes: Vec<u8> = (0..16).collect();
    let good = Launch {
        kernel: "k".into(),
        grid: [1; 3],
        block: [1; 3],
        shared_bytes: 0,
        args: vec![Arg::U32(5), Arg::Bytes(bytes), Arg::Pointer(out)],
    };
    run(&module, &good, &mut memory, &Options::default()).unwrap();
    let found: Vec<u32> = memory.read_slice(out, 6).unwrap();
    assert_eq!(found, [5, 0x0302_0100, 0x0706_0504, 9, 0x0f0e_0d0c, 0x0706_0504]);

    let mut kind = |change: &dyn Fn(&mut Launch)| {
        let mut wrong = good.clone();
        change(&mut wrong);
        run(&module, &wrong, &mut memory, &Options::default()).unwrap_err().kind
    };
    assert_eq!(kind(&|launch| launch.kernel = "j".into()), Kind::Arguments);
    assert_eq!(kind(&|launch| drop(launch.args.pop())), Kind::Arguments);
    assert_eq!(kind(&|launch| launch.args[0] = Arg::U64(5)), Kind::Arguments);
    assert_eq!(kind(&|launch| launch.block = [1025, 1, 1]), Kind::Shape);
    assert_eq!(kind(&|launch| launch.block = [1, 1, 65]), Kind::Shape);
    assert_eq!(kind(&|launch| launch.block = [0, 1, 1]), Kind::Shape);
    assert_eq!(kind(&|launch| launch.grid = [1, 65_536, 1]), Kind::Shape);
    assert_eq!(kind(&|launch| launch.grid = [u32::MAX, 1, 1]), Kind::Shape);
    assert_eq!(kind(&|launch| launch.shared_bytes = 166_913), Kind::Shape);
    assert_eq!(kind(&|launch| launch.args[2] = Arg::Pointer(0)), Kind::OutOfBounds);
}

#[test]
fn launch_bounds() {
    for (bounds, threads, good) in
        [(".maxntid 64, 1, 1", 64, true), (".maxntid 64", 65, false), (".reqntid 32, 1, 1", 64, false)]
    {
        let text = kernel("", "").replacen("out)\n", &format!("out)\n{bounds}\n"), 1);
        let mut memory = Memory::new();
        let out = memory.alloc(4);
        let result = run(&load(&text), &launch(out, out, threads), &mut memory, &Options::default());
        assert_eq!(result.is_ok(), good, "{bounds} {threads}");
    }
}

#[test]
fn atomics() {
    for (operation, start, right) in [
        ("add.u32", 5u32, 5 + 496),
        ("add.s32", 5, 5 + 496),
        ("min.u32", 5, 0),
        ("max.u32", 5, 31),
        ("min.s32", u32::MAX, u32::MAX),
        ("max.s32", u32::MAX, 31),
        ("and.b32", 5, 0),
        ("or.b32", 32, 63),
        ("xor.b32", 5, 5),
    ] {
        for space in ["global", "shared"] {
            let body = format!(
                "ld.global.u32 %r1, [%in]; mov.u64 %d1, cell; mov.u64 %d2, %out; setp.eq.u32 %p1, %t, 0; @%p1 st.shared.u32 [%d1], %r1; \
                 @%p1 st.global.u32 [%d2], %r1; bar.sync 0; red.{space}.{operation} [{}], %t; bar.sync 0; \
                 @%p1 ld.{space}.u32 %r2, [{}]; @%p1 st.global.u32 [%out], %r2;",
                if space == "global" { "%d2" } else { "%d1" },
                if space == "global" { "%d2" } else { "%d1" },
            );
            let found = words(".shared .align 4 .b8 cell[4];", &body, 32, &[start], 1);
            assert_eq!(found.unwrap(), [right], "{operation} {space}");
        }
    }
    // Those that give the old value.
    for (operation, start, value, old, new) in [
        ("atom.global.exch.b32", 5u32, 9, 5, 9),
        ("atom.global.inc.u32", 5, 5, 5, 0),
        ("atom.global.inc.u32", 4, 5, 4, 5),
        ("atom.global.dec.u32", 0, 5, 0, 5),
        ("atom.global.dec.u32", 3, 5, 3, 2),
        ("atom.add.release.gpu.global.u32", 5, 1, 5, 6),
    ] {
        let operation = operation.replace("add.release.gpu.global.u32", "release.gpu.global.add.u32");
        let body = format!(
            "ld.global.u32 %r1, [%in]; st.global.u32 [%out], %r1; {operation} %r2, [%out], {value}; st.global.u32 [%out+4], %r2;"
        );
        assert_eq!(words("", &body, 1, &[start], 2).unwrap(), [new, old], "{operation}");
    }
    let body = "st.global.u64 [%out], 5; atom.global.cas.b64 %d1, [%out], 5, 0x100000002; atom.global.cas.b64 %d2, [%out], 5, 7; \
                st.global.u64 [%out+8], %d1; atom.global.add.u64 %d3, [%out], 0xffffffff;";
    assert_eq!(words("", body, 1, &[], 4).unwrap(), [1, 2, 5, 0]);
}

#[test]
fn shuffles() {
    let input: Vec<u32> = (0..32).map(|lane| 100 + lane).collect();
    for (shuffle, right) in [
        (
            "up.b32 %r9, %r0, 2, 0",
            Box::new(|lane: u32| if lane < 2 { lane } else { lane - 2 }) as Box<dyn Fn(u32) -> u32>,
        ),
        ("down.b32 %r9, %r0, 3, 31", Box::new(|lane| if lane > 28 { lane } else { lane + 3 })),
        ("bfly.b32 %r9, %r0, 5, 31", Box::new(|lane| lane ^ 5)),
        ("idx.b32 %r9, %r0, 7, 31", Box::new(|_| 7)),
        // Segments of eight lanes: bits 8 to 12 of the last operand say which bits of a lane are
        // its segment.
        ("idx.b32 %r9, %r0, 3, 0x181f", Box::new(|lane| lane / 8 * 8 + 3)),
        ("down.b32 %r9, %r0, 3, 0x181f", Box::new(|lane| if lane % 8 > 4 { lane } else { lane + 3 })),
        ("up.b32 %r9, %r0, 3, 0x1800", Box::new(|lane| if lane % 8 < 3 { lane } else { lane - 3 })),
    ] {
        let body = format!("{FETCH} shfl.sync.{shuffle}, 0xffffffff; {STORE}");
        let right: Vec<u32> = (0..32).map(|lane| 100 + right(lane)).collect();
        assert_eq!(words("", &body, 32, &input, 32).unwrap(), right, "{shuffle}");
    }
    let body = format!("{FETCH} shfl.sync.up.b32 %r9|%p1, %r0, 1, 0, -1; @!%p1 mov.u32 %r9, 0; {STORE}");
    assert_eq!(words("", &body, 32, &input, 2).unwrap_or_default(), [] as [u32; 0], "32 words are written");
    assert_eq!(words("", &body, 32, &input, 32).unwrap()[..3], [0, 100, 101]);
    // Two halves of a warp, each with its mask, in different branches.
    let body = format!(
        "{FETCH} setp.lt.u32 %p1, %t, 16; @%p1 bra low; shfl.sync.bfly.b32 %r9, %r0, 1, 31, 0xffff0000; bra.uni done;\n\
         low: shfl.sync.idx.b32 %r9, %r0, 4, 31, 0xffff;\n done: {STORE}"
    );
    let right: Vec<u32> = (0..32).map(|lane: u32| if lane < 16 { 104 } else { 100 + (lane ^ 1) }).collect();
    assert_eq!(words("", &body, 32, &input, 32).unwrap(), right);
}

#[test]
fn votes_matches_and_reductions() {
    let input: Vec<u32> = (0..32).map(|lane| lane % 3).collect();
    let of =
        |value: u32| (0..32u32).filter(|lane| lane % 3 == value).fold(0u32, |mask, lane| mask | 1 << lane);
    let matched: Vec<u32> = (0..32).map(|lane| of(lane % 3)).collect();
    let all = |value: u32| vec![value; 32];
    for (body, right) in [
        ("setp.eq.u32 %p1, %r0, 1; vote.sync.ballot.b32 %r9, %p1, -1;", all(of(1))),
        ("setp.lt.u32 %p1, %r0, 3; vote.sync.all.pred %p2, %p1, -1; selp.u32 %r9, 1, 0, %p2;", all(1)),
        ("setp.eq.u32 %p1, %r0, 3; vote.sync.any.pred %p2, %p1, -1; selp.u32 %r9, 1, 0, %p2;", all(0)),
        ("setp.eq.u32 %p1, %r0, 1; vote.sync.uni.pred %p2, %p1, -1; selp.u32 %r9, 1, 0, %p2;", all(0)),
        ("setp.eq.u32 %p1, %r0, 1; vote.sync.any.pred %p2, !%p1, -1; selp.u32 %r9, 1, 0, %p2;", all(1)),
        ("match.any.sync.b32 %r9, %r0, -1;", matched.clone()),
        ("cvt.u64.u32 %d1, %r0; match.any.sync.b64 %r9, %d1, -1;", matched),
        ("match.all.sync.b32 %r9|%p1, %r0, -1; selp.u32 %r9, 5, %r9, %p1;", all(0)),
        ("mov.u32 %r1, 9; match.all.sync.b32 %r9|%p1, %r1, -1;", all(u32::MAX)),
        ("redux.sync.add.s32 %r9, %r0, -1;", all(31)),
        ("redux.sync.max.u32 %r9, %r0, -1;", all(2)),
        ("redux.sync.min.u32 %r9, %r0, -1;", all(0)),
        ("sub.s32 %r0, %r0, 1; redux.sync.min.s32 %r9, %r0, -1;", all(u32::MAX)),
        ("redux.sync.or.b32 %r9, %r0, -1;", all(3)),
        ("redux.sync.and.b32 %r9, %r0, -1;", all(0)),
        ("redux.sync.xor.b32 %r9, %r0, -1;", all(1)),
        (
            "elect.sync %r1|%p1, -1; selp.u32 %r9, 1, 0, %p1;",
            (0..32).map(|lane| u32::from(lane == 0)).collect(),
        ),
        (
            "elect.sync _|%p1, -1; selp.u32 %r9, 1, 0, %p1;",
            (0..32).map(|lane| u32::from(lane == 0)).collect(),
        ),
    ] {
        let found = words("", &format!("{FETCH} {body} {STORE}"), 32, &input, 32).unwrap();
        assert_eq!(found, right, "{body}");
    }
    let body = format!("mov.u32 %r9, 0; setp.lt.u32 %p1, %t, 5; @%p1 activemask.b32 %r9; {STORE}");
    assert_eq!(words("", &body, 32, &[], 32).unwrap()[..6], [31, 31, 31, 31, 31, 0]);
}

#[test]
fn barriers() {
    // bar.red over 96 threads: how many, all, any.
    let body = format!(
        "setp.lt.u32 %p1, %t, 50; bar.red.popc.u32 %r1, 0, %p1; bar.red.and.pred %p2, 0, %p1; bar.red.or.pred %p3, 0, %p1; \
         selp.u32 %r2, 1000, 0, %p2; selp.u32 %r3, 100, 0, %p3; add.u32 %r9, %r1, %r2; add.u32 %r9, %r9, %r3; {STORE}"
    );
    assert_eq!(words("", &body, 96, &[], 96).unwrap(), [150; 96]);
    // A producer that arrives and a consumer that waits, at a barrier of its own.
    let before = ".shared .align 4 .b8 box[4];";
    let body = "setp.ge.u32 %p1, %t, 32; @%p1 bra consume; setp.eq.u32 %p2, %t, 0; @%p2 st.shared.u32 [box], 42; bar.warp.sync -1; \
                bar.arrive 3, 64; ret; consume: barrier.sync 3, 64; ld.shared.u32 %r9, [box]; setp.eq.u32 %p3, %t, 32; @%p3 st.global.u32 [%out], %r9;";
    assert_eq!(words(before, body, 64, &[], 1).unwrap(), [42]);
    // Without the arrival the value may come too late.
    let broken = body.replace("bar.arrive 3, 64;", "").replace("barrier.sync 3, 64;", "");
    let kind = finding(before, &broken, 64).kind;
    assert!(matches!(kind, Kind::Race | Kind::Uninitialised), "{kind:?}");
    // A __syncwarp that lanes come to in two places.
    let before = ".shared .align 4 .b8 cells[128];";
    let body = format!(
        "mov.u64 %d1, cells; mul.wide.u32 %d2, %t, 4; add.u64 %d1, %d1, %d2; setp.lt.u32 %p1, %t, 16; @%p1 bra low; \
         st.shared.u32 [%d1], 1; bar.warp.sync -1; bra.uni done;\n low: bar.warp.sync 0xffffffff; ld.shared.u32 %r9, [%d1+64]; {STORE}\n done:"
    );
    assert_eq!(words(before, &body, 32, &[], 16).unwrap(), [1; 16]);
    assert_eq!(finding("", "setp.eq.u32 %p1, %t, 0; @%p1 bar.sync 0;", 32).kind, Kind::DivergentBarrier);
    assert_eq!(
        finding("", "setp.lt.u32 %p1, %t, 32; @%p1 bra a; bar.sync 1; ret; a: bar.sync 2;", 64).kind,
        Kind::DivergentBarrier
    );
    assert_eq!(finding("", "bar.sync 1, 96;", 64).kind, Kind::Barrier);
    assert_eq!(finding("", "bar.sync 1, 64;", 32).kind, Kind::Barrier);
    assert_eq!(finding("", "bar.sync 1, 40;", 64).kind, Kind::Barrier);
    assert_eq!(finding("", "bar.sync 16;", 64).kind, Kind::Barrier);
    assert_eq!(
        finding("", "setp.lt.u32 %p1, %t, 32; @%p1 bra a; bar.sync 1, 64; ret; a:", 64).kind,
        Kind::Deadlock
    );
}

#[test]
fn matrices() {
    // A tile of eight rows of eight 16-bit numbers, i in place i; four such tiles in a row.
    let before = ".shared .align 16 .b8 tile[512];";
    let fill = "mov.u64 %d1, tile; cvt.u32.u64 %r1, %d1; shl.b32 %r2, %t, 4; add.u32 %r1, %r1, %r2; shl.b32 %r3, %t, 19; \
                shl.b32 %r4, %t, 3; or.b32 %r3, %r3, %r4; add.u32 %r3, %r3, 0x10000; add.u32 %r4, %r3, 0x20002; add.u32 %r5, %r4, 0x20002; \
                add.u32 %r6, %r5, 0x20002; st.shared.v4.u32 [%r1], {%r3, %r4, %r5, %r6}; bar.warp.sync -1;";
    let out = |registers: usize| {
        let stores: String =
            (0..registers).map(|i| format!("st.global.u32 [%out+{}], %r{};", 128 * i, 20 + i)).collect();
        format!("mul.wide.u32 %at, %t, 4; add.u64 %out, %out, %at; {stores}")
    };
    let pair = |low: u32, high: u32| low | high << 16;
    let plain = |lane: u32, matrix: u32| pair(64 * matrix + 2 * lane, 64 * matrix + 2 * lane + 1);
    let turned = |lane: u32, matrix: u32| {
        let (row, column) = (lane % 4 * 2, lane / 4);
        pair(64 * matrix + row * 8 + column, 64 * matrix + (row + 1) * 8 + column)
    };
    for (count, registers) in [(1usize, "{%r20}"), (2, "{%r20, %r21}"), (4, "{%r20, %r21, %r22, %r23}")] {
        for (modifier, value) in [("", &plain as &dyn Fn(u32, u32) -> u32), (".trans", &turned)] {
            let body = format!(
                "{fill} ldmatrix.sync.aligned.m8n8.x{count}{modifier}.shared.b16 {registers}, [%r1]; {}",
                out(count)
            );
            let right: Vec<u32> = (0..count as u32)
                .flat_map(|matrix| (0..32).map(move |lane| (matrix, lane)))
                .map(|(m, l)| value(l, m))
                .collect();
            assert_eq!(words(before, &body, 32, &[], 32 * count).unwrap(), right, "x{count}{modifier}");
            // `ldmatrix` loads the layout that `stmatrix` stores.
            let body = format!(
                "{fill} ldmatrix.sync.aligned.m8n8.x{count}{modifier}.shared.b16 {registers}, [%r1]; bar.warp.sync -1; \
                 stmatrix.sync.aligned.m8n8.x{count}{modifier}.shared.b16 [%r1], {registers}; bar.warp.sync -1; \
                 ldmatrix.sync.aligned.m8n8.x{count}{modifier}.shared.b16 {registers}, [%r1]; {}",
                out(count)
            );
            assert_eq!(
                words(before, &body, 32, &[], 32 * count).unwrap(),
                right,
                "stmatrix x{count}{modifier}"
            );
        }
    }
}

/// The element (row, column) of an m16n8k matrix that a lane holds in a register's half.
type Place = fn(usize, usize, usize) -> (usize, usize);

#[test]
fn multiplications() {
    // For each shape: depth, elements to a register, and where the elements of a and b are.
    let halves_a: Place =
        |lane, register, half| (lane / 4 + register % 2 * 8, lane % 4 * 2 + half + register / 2 * 8);
    let halves_b: Place = |lane, register, half| (lane % 4 * 2 + half + register * 8, lane / 4);
    let words_a: Place = |lane, register, _| (lane / 4 + register % 2 * 8, lane % 4 + register / 2 * 4);
    let words_b: Place = |lane, register, _| (lane % 4 + register * 4, lane / 4);
    for (opcode, depth, per_register, place_a, place_b) in [
        ("m16n8k16.row.col.f32.bf16.bf16.f32", 16, 2, halves_a, halves_b),
        ("m16n8k16.row.col.f32.f16.f16.f32", 16, 2, halves_a, halves_b),
        ("m16n8k8.row.col.f32.bf16.bf16.f32", 8, 2, halves_a, halves_b),
        ("m16n8k8.row.col.f32.f16.f16.f32", 8, 2, halves_a, halves_b),
        ("m16n8k8.row.col.f32.tf32.tf32.f32", 8, 1, words_a, words_b),
        ("m16n8k4.row.col.f32.tf32.tf32.f32", 4, 1, words_a, words_b),
    ] {
        // Small integers, exact in every format.
        let a = |row: usize, k: usize| ((row * 5 + k * 3) % 7) as f32 - 3.0;
        let b = |k: usize, column: usize| ((k * 11 + column * 2) % 5) as f32 - 2.0;
        let c = |row: usize, column: usize| (row * 8 + column) as f32;
        let encode = |x: f32| match (per_register, opcode.contains("bf16")) {
            (1, _) => x.to_bits(),
            (_, true) => u32::from(half::bf16::from_f32(x).to_bits()),
            _ => u32::from(half::f16::from_f32(x).to_bits()),
        };
        let (in_a, in_b) = (16 * depth / 32 / per_register, 8 * depth / 32 / per_register);
        let mut input = vec![0u32; 32 * 16];
        for lane in 0..32 {
            for half in 0..per_register {
                for register in 0..in_a {
                    let (row, k) = place_a(lane, register, half);
                    input[lane * 16 + register] |= encode(a(row, k)) << (16 * half);
                }
                for register in 0..in_b {
                    let (k, column) = place_b(lane, register, half);
                    input[lane * 16 + 4 + register] |= encode(b(k, column)) << (16 * half);
                }
            }
            for i in 0..4 {
                input[lane * 16 + 8 + i] = c(lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2).to_bits();
            }
        }
        let list = |first: usize, count: usize| {
            (first..first + count).map(|i| format!("%r{i}")).collect::<Vec<_>>().join(", ")
        };
        let body = format!(
            "mul.wide.u32 %at, %t, 64; add.u64 %in, %in, %at; ld.global.v4.u32 {{%r10, %r11, %r12, %r13}}, [%in]; \
             ld.global.v4.u32 {{%r20, %r21, %r22, %r23}}, [%in+16]; ld.global.v4.u32 {{%r30, %r31, %r32, %r33}}, [%in+32]; \
             mma.sync.aligned.{opcode} {{{}}}, {{{}}}, {{{}}}, {{{}}}; \
             mul.wide.u32 %at, %t, 16; add.u64 %out, %out, %at; st.global.v4.u32 [%out], {{%r40, %r41, %r42, %r43}};",
            list(40, 4),
            list(10, in_a),
            list(20, in_b),
            list(30, 4)
        );
        let found = words("", &body, 32, &input, 128).unwrap();
        for lane in 0..32 {
            for i in 0..4 {
                let (row, column) = (lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2);
                let right = c(row, column) + (0..depth).map(|k| a(row, k) * b(k, column)).sum::<f32>();
                assert_eq!(f32::from_bits(found[lane * 4 + i]), right, "{opcode} [{row}, {column}]");
            }
        }
        let part = body.replace("mma.sync", "setp.lt.u32 %p1, %t, 9; @%p1 mma.sync");
        assert_eq!(words("", &part, 32, &input, 128).unwrap_err().kind, Kind::Mask);
    }
}

#[test]
fn asynchronous_copies() {
    let before = ".shared .align 16 .b8 box[64];";
    let input = [1, 2, 3, 4, 5, 6, 7, 8];
    let copy = |copy: &str| {
        format!(
            "mov.u64 %d1, box; {copy} cp.async.commit_group; cp.async.wait_group 0; ld.shared.v4.u32 {{%r1, %r2, %r3, %r4}}, [%d1]; \
                 st.global.v4.u32 [%out], {{%r1, %r2, %r3, %r4}};"
        )
    };
    for (what, right) in [
        ("cp.async.cg.shared.global [%d1], [%in+16], 16;", [5, 6, 7, 8]),
        ("cp.async.ca.shared::cta.global.L2::128B [%d1], [%in], 16;", [1, 2, 3, 4]),
        ("mov.u32 %r9, 6; cp.async.cg.shared.global [%d1], [%in], 16, %r9;", [1, 2, 0, 0]),
        ("mov.u32 %r9, 0; cp.async.cg.shared.global [%d1], [%in], 16, %r9;", [0; 4]),
        ("setp.eq.u32 %p1, %t, 0; cp.async.cg.shared.global [%d1], [%in], 16, %p1;", [0; 4]),
        (
            "cp.async.ca.shared.global [%d1], [%in], 8; cp.async.ca.shared.global [%d1+8], [%in+20], 4; cp.async.ca.shared.global [%d1+12], [%in], 4;",
            [1, 2, 6, 1],
        ),
    ] {
        assert_eq!(words(before, &copy(what), 1, &input, 4).unwrap(), right, "{what}");
    }
    let plain = copy("cp.async.cg.shared.global [%d1], [%in], 16;");
    let unwaited = plain.replace("cp.async.wait_group 0;", "cp.async.wait_group 1;");
    assert_eq!(finding(before, &unwaited, 1).kind, Kind::InFlight);
    assert_eq!(finding(before, &plain.replace("cp.async.commit_group;", ""), 1).kind, Kind::InFlight);
    let all = plain.replace("cp.async.commit_group; cp.async.wait_group 0;", "cp.async.wait_all;");
    assert_eq!(words(before, &all, 1, &input, 4).unwrap(), [1, 2, 3, 4]);
    assert_eq!(finding(before, &plain.replace("[%in], 16", "[%in+4], 16"), 1).kind, Kind::Misaligned);
    let many = plain.replace("16;", "16, 17;");
    assert_eq!(finding(before, &many, 1).kind, Kind::Trap);
}

#[test]
fn phases_of_an_mbarrier() {
    let before = ".shared .align 8 .b8 barrier[8]; .shared .align 16 .b8 box[64];";
    let init = "mov.u64 %d1, barrier; mov.u64 %d2, box; setp.eq.u32 %p1, %t, 0; @%p1 mbarrier.init.shared::cta.b64 [%d1], 32; \
                @%p1 fence.mbarrier_init.release.cluster; bar.sync 0;";
    // Every thread arrives, then waits by the state it got, twice.
    let body = format!(
        "{init} mbarrier.arrive.shared::cta.b64 %d3, [%d1]; wait: mbarrier.try_wait.shared::cta.b64 %p2, [%d1], %d3; @!%p2 bra wait; \
         mbarrier.arrive.shared::cta.b64 %d3, [%d1]; poll: mbarrier.test_wait.shared::cta.b64 %p2, [%d1], %d3; @!%p2 bra poll; mov.u32 %r9, 3; {STORE}"
    );
    assert_eq!(words(before, &body, 32, &[], 32).unwrap(), [3; 32]);
    assert_eq!(finding(before, &body.replace("[%d1], 32", "[%d1], 33"), 32).kind, Kind::Deadlock);
    // Seven arrivals of 32 end a phase: lanes wait for phases that are long over.
    assert_eq!(finding(before, &body.replace("[%d1], 32", "[%d1], 7"), 32).kind, Kind::Mbarrier);
    assert_eq!(finding(before, &body.replace("bar.sync 0;", ""), 64).kind, Kind::Race);
    // A bulk copy of 32 bytes, in and out again.
    let copy = format!(
        "{} @!%p1 bra wait; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%d1], 32; \
         cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%d2], [%in], 32, [%d1]; \
         wait: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%d1], 0; @!%p2 bra wait; \
         setp.lt.u32 %p3, %t, 8; @!%p3 ret; mul.wide.u32 %at, %t, 4; add.u64 %d4, %d2, %at; ld.shared.u32 %r1, [%d4]; add.u32 %r1, %r1, 1; \
         st.shared.u32 [%d4], %r1; fence.proxy.async.shared::cta; bar.warp.sync 0xff; @!%p1 ret; \
         cp.async.bulk.global.shared::cta.bulk_group [%out], [%d2], 32; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;",
        init.replace("[%d1], 32", "[%d1], 1")
    );
    assert_eq!(words(before, &copy, 32, &[1, 2, 3, 4, 5, 6, 7, 8], 8).unwrap(), [2, 3, 4, 5, 6, 7, 8, 9]);
    for (from, to, kind) in [
        ("fence.proxy.async.shared::cta;", "", Kind::MissingFence),
        ("@%p1 fence.mbarrier_init.release.cluster;", "", Kind::MissingFence),
        ("cp.async.bulk.wait_group 0;", "", Kind::InFlight),
        ("bar.warp.sync 0xff;", "", Kind::Race),
        ("_, [%d1], 32;", "_, [%d1], 16;", Kind::Deadlock),
        ("[%in], 32, [%d1]", "[%in], 40, [%d1]", Kind::Descriptor),
        ("[%in], 32, [%d1]", "[%in+8], 32, [%d1]", Kind::Misaligned),
        (
            "wait: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%d1], 0;",
            "wait: setp.eq.u32 %p2, 0, 0;",
            Kind::InFlight,
        ),
    ] {
        assert_eq!(finding(before, &copy.replace(from, to), 32).kind, kind, "without `{from}`");
    }
    // A thread's writes before it, under the copy.
    let over = copy.replace(
        "@!%p1 bra wait;",
        "@%p1 st.shared.u32 [%d2], 7; fence.proxy.async.shared::cta; @!%p1 bra wait;",
    );
    assert_eq!(words(before, &over, 32, &[1, 2, 3, 4, 5, 6, 7, 8], 8).unwrap(), [2, 3, 4, 5, 6, 7, 8, 9]);
    let bare = over.replacen("fence.proxy.async.shared::cta;", "", 1);
    assert_eq!(finding(before, &bare, 32).kind, Kind::MissingFence);
    // cp.async that arrives when it ends.
    let copy = format!(
        "{} @!%p1 bra wait; cp.async.cg.shared.global [%d2], [%in], 16; cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%d1]; \
         wait: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%d1], 0; @!%p2 bra wait; ld.shared.u32 %r9, [%d2+4]; {STORE}",
        init.replace("[%d1], 32", "[%d1], 1")
    );
    assert_eq!(words(before, &copy, 32, &[1, 2, 3, 4], 32).unwrap(), [2; 32]);
    // One instruction, other phases: a lane whose phase is over does not wait for lanes that wait
    // for its next arrival.
    let apart = format!(
        "{} selp.u32 %r1, 1, 0, %p1; wait: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%d1], %r1; @!%p2 bra wait; \
         @%p1 mbarrier.arrive.shared::cta.b64 _, [%d1]; mov.u32 %r9, 4; {STORE}",
        init.replace("[%d1], 32", "[%d1], 1")
    );
    assert_eq!(words(before, &apart, 32, &[], 32).unwrap(), [4; 32]);
}

/// That a text is right, and what is found in it after each edit: the kind and words of it.
fn spoiled(before: &str, body: &str, threads: u32, right: &[u32], edits: &[(&str, &str, Kind, &str)]) {
    let input: Vec<u32> = (0..256).collect();
    assert_eq!(words(before, body, threads, &input, right.len()).unwrap(), right, "{body}");
    for (from, to, kind, said) in edits {
        assert_eq!(body.matches(from).count(), 1, "`{from}` stands once in {body}");
        let found = finding(before, &body.replace(from, to), threads);
        assert!(found.kind == *kind && found.what.contains(said), "`{from}` as `{to}`: {found}");
        assert!(found.site.is_some(), "{found}");
    }
}

/// An mbarrier of one arrival, made and shown; `%p1` is thread 0.
const INIT: &str = "mov.u64 %d1, barrier; mov.u64 %d2, box; setp.eq.u32 %p1, %t, 0; mul.wide.u32 %at, %t, 4; \
    @%p1 mbarrier.init.shared::cta.b64 [%d1], 1; @%p1 fence.mbarrier_init.release.cluster; bar.sync 0;";
const WAIT: &str = "wait: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%d1], 0; @!%p2 bra wait;";
const BOX: &str = ".shared .align 16 .b8 barrier[16]; .shared .align 128 .b8 box[128];";

#[test]
fn what_a_bulk_store_may_see_stale() {
    const OUT: &str = "bar.warp.sync 0xffffffff; @%p1 cp.async.bulk.global.shared::cta.bulk_group [%out], [%d2], 128; \
                       @%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group 0;";
    let stale = "a bulk store reads shared memory that thread 0 wrote, with no proxy fence in between";
    let plus: Vec<u32> = (1..33).collect();
    // Written by a plain store, an atomic, a strong store: all of them through the generic proxy.
    for write in [
        "add.u32 %r1, %t, 1; st.shared.u32 [%d4], %r1;",
        "st.shared.u32 [%d4], %t; atom.shared.add.u32 %r2, [%d4], 1;",
        "add.u32 %r1, %t, 1; st.volatile.shared.u32 [%d4], %r1;",
    ] {
        let body = format!("{INIT} add.u64 %d4, %d2, %at; {write} fence.proxy.async.shared::cta; {OUT}");
        let fence = "fence.proxy.async.shared::cta;";
        spoiled(
            BOX,
            &body,
            32,
            &plus,
            &[
                (fence, "", Kind::MissingFence, stale),
                (fence, "fence.proxy.async.global;", Kind::MissingFence, stale),
            ],
        );
        words(BOX, &body.replace(fence, "fence.proxy.async;"), 32, &[], 32).unwrap();
    }
    // A fence between the plain store and the atomic covers the store alone.
    let body = format!(
        "{INIT} add.u64 %d4, %d2, %at; st.shared.u32 [%d4], %t; atom.shared.add.u32 %r2, [%d4], 1; \
         fence.proxy.async.shared::cta; {OUT}"
    );
    let early = body.replace("fence.proxy.async.shared::cta;", "").replace("atom", "fence.proxy.async; atom");
    assert_eq!(finding(BOX, &early, 32).kind, Kind::MissingFence);
    // cp.async writes when it is waited for: a fence before that shows nothing.
    let body = format!(
        "{INIT} add.u64 %d4, %d2, %at; add.u64 %d5, %in, %at; cp.async.ca.shared.global [%d4], [%d5], 4; \
         cp.async.commit_group; cp.async.wait_group 0; fence.proxy.async.shared::cta; {OUT}"
    );
    let range: Vec<u32> = (0..32).collect();
    let (last, first) = (
        "cp.async.wait_group 0; fence.proxy.async.shared::cta;",
        "fence.proxy.async.shared::cta; cp.async.wait_group 0;",
    );
    spoiled(BOX, &body, 32, &range, &[(last, first, Kind::MissingFence, stale)]);
}

#[test]
fn what_a_bulk_load_may_see_stale() {
    // Threads write global memory that a bulk load of the same launch brings back.
    let body = format!(
        "{INIT} add.u64 %d4, %out, %at; add.u32 %r1, %t, 40; st.global.u32 [%d4+256], %r1; \
         fence.proxy.async.global; bar.sync 0; @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%d1], 128; \
         @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%d2], [%out+256], 128, [%d1]; \
         {WAIT} add.u64 %d4, %d2, %at; ld.shared.u32 %r9, [%d4]; {STORE}"
    );
    let right: Vec<u32> = (40..72).chain([0; 32]).chain(40..72).collect();
    let (fence, stale) = ("fence.proxy.async.global;", "with no proxy fence for global memory in between");
    spoiled(
        BOX,
        &body,
        32,
        &right,
        &[
            (fence, "", Kind::MissingFence, stale),
            (fence, "fence.proxy.async.shared::cta;", Kind::MissingFence, stale),
        ],
    );
    words(BOX, &body.replace(fence, "fence.proxy.async;"), 32, &[], 96).unwrap();
    let late = body
        .replace(fence, "")
        .replace("st.global.u32 [%d4+256]", "fence.proxy.async; st.global.u32 [%d4+256]");
    assert_eq!(finding(BOX, &late, 32).kind, Kind::MissingFence, "a fence before the write");
}

#[test]
fn an_mbarrier_in_use_is_not_written_over() {
    let body = format!(
        "{INIT} @%p1 mbarrier.arrive.shared::cta.b64 _, [%d1]; {WAIT} bar.sync 0; @%p1 mbarrier.inval.shared::cta.b64 [%d1]; \
         @%p1 st.shared.u32 [%d1], 7; bar.sync 0; ld.shared.u32 %r9, [%d1]; {STORE}"
    );
    let over = "over an mbarrier in use";
    spoiled(
        BOX,
        &body,
        32,
        &[7; 32],
        &[("@%p1 mbarrier.inval.shared::cta.b64 [%d1];", "", Kind::Mbarrier, over)],
    );
    // A bulk load and a cp.async that reach it.
    let load = format!(
        "{INIT} @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%d1], 16; \
         @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%d2], [%in], 16, [%d1]; \
         {WAIT} ld.shared.u32 %r9, [%d2+8]; {STORE}"
    );
    spoiled(BOX, &load, 32, &[2; 32], &[("[%d2], [%in]", "[%d1], [%in]", Kind::Mbarrier, over)]);
    let copy = format!(
        "{INIT} @%p1 cp.async.ca.shared.global [%d2], [%in], 8; cp.async.commit_group; cp.async.wait_group 0; \
         bar.sync 0; ld.shared.u32 %r9, [%d2+4]; {STORE}"
    );
    spoiled(BOX, &copy, 32, &[1; 32], &[("[%d2], [%in]", "[%d1], [%in]", Kind::Mbarrier, over)]);
}

#[test]
fn registers_of_a_wgmma_under_way_are_its_own() {
    let tile = ".shared .align 128 .b8 tile[1024];";
    // b is a tile of 8 columns and 16 deep, of zeros; a is in registers.
    let product = |d: &str, shape: &str, a: &str| {
        format!(
            "wgmma.mma_async.sync.aligned.m64{shape}k16.f32.bf16.bf16 {{{d}}}, {{{a}}}, %d2, %p2, 1, 1, 0;"
        )
    };
    let (sums, factors) = ("%s0, %s1, %s2, %s3", "%a0, %a1, %a2, %a3");
    let first = product(sums, "n8", factors);
    let frame = |second: &str| {
        format!(
            ".reg .b32 %s<8>; .reg .b32 %a<4>; mov.u64 %d1, tile; mul.wide.u32 %at, %t, 8; add.u64 %d4, %d1, %at; mov.u64 %d5, 0; \
             st.shared.u64 [%d4], %d5; fence.proxy.async.shared::cta; bar.sync 0; \
             shr.u64 %d2, %d1, 4; or.b64 %d2, %d2, 0x800080000; setp.eq.u32 %p2, 0, 0; \
             mov.b32 %s0, %t; mov.b32 %s1, 1; mov.b32 %s2, 2; mov.b32 %s3, 3; mov.b32 %s4, 4; mov.b32 %s5, 5; mov.b32 %s6, 6; mov.b32 %s7, 7; \
             mov.b32 %a0, 0; mov.b32 %a1, 0; mov.b32 %a2, 0; mov.b32 %a3, 0; \
             wgmma.fence.sync.aligned; {first} {second} wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; \
             mov.b32 %r9, %s1; {STORE}"
        )
    };
    // Sums are passed on in place, and factors are read by both.
    let body = frame(&product(sums, "n8", factors));
    let again = product(sums, "n8", factors);
    let twice = format!("{again} {again}");
    let end = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;";
    let (wide, other) = ("%s0, %s1, %s2, %s3, %s4, %s5, %s6, %s7", "another shape or order");
    for (second, said) in [
        (product("%s1, %s0, %s2, %s3", "n8", factors), other),
        (product(wide, "n16", factors), other),
        (
            product("%s4, %s5, %s6, %s7", "n8", "%s0, %s1, %s2, %s3"),
            "takes as a factor a register that a wgmma under way adds to",
        ),
        (
            product("%a0, %a1, %a2, %a3", "n8", "%s4, %s5, %s6, %s7"),
            "adds to a register that is a factor of a wgmma under way",
        ),
    ] {
        spoiled(tile, &body, 128, &[1; 128], &[(&twice, &format!("{again} {second}"), Kind::InFlight, said)]);
        // After a wait all of them are right.
        let waited = body.replace(&twice, &format!("{again} {end} wgmma.fence.sync.aligned; {second}"));
        words(tile, &waited, 128, &[], 128).unwrap();
    }
    // Nothing waits, and nothing reads the sums.
    let left =
        body.replace(end, "wgmma.commit_group.sync.aligned;").replace("mov.b32 %r9, %s1;", "mov.b32 %r9, 1;");
    let found = finding(tile, &left, 128);
    assert!(found.kind == Kind::InFlight && found.what.contains("ends while a wgmma still reads"), "{found}");
}

/// Codes of e4m3, 32 deep: four to a register of `a`, sixteen to a piece of `b`. Of `b` column 0
/// has a one at depth 5 and column 1 one at depth 21, so that sums are single numbers of `a`.
#[test]
fn a_wgmma_of_bytes_takes_each_from_its_place() {
    let tile = ".shared .align 128 .b8 tile[256];";
    let body = format!(
        ".reg .f32 %s<4>; .reg .b32 %a<4>; .reg .f32 %y; mov.u64 %d1, tile; mul.wide.u32 %at, %t, 2; add.u64 %d4, %d1, %at; \
         setp.eq.u32 %p1, %t, 2; selp.b32 %r1, 0x3800, 0, %p1; setp.eq.u32 %p1, %t, 74; selp.b32 %r1, 0x3800, %r1, %p1; \
         cvt.u16.u32 %h0, %r1; st.shared.u16 [%d4], %h0; fence.proxy.async.shared::cta; bar.sync 0; \
         shr.u64 %d2, %d1, 4; or.b64 %d2, %d2, 0x800080000; setp.ne.u32 %p2, 0, 0; \
         and.b32 %r2, %t, 3; setp.eq.u32 %p1, %r2, 1; selp.b32 %a0, 0x7c7c447c, 0x7c7c7c7c, %p1; \
         selp.b32 %a1, 0x7c7cc87c, 0x7c7c7c7c, %p1; selp.b32 %a2, 0x7c7c487c, 0x7c7c7c7c, %p1; \
         selp.b32 %a3, 0x7c7c387c, 0x7c7c7c7c, %p1; \
         mov.f32 %s0, 0f00000000; mov.f32 %s1, %s0; mov.f32 %s2, %s0; mov.f32 %s3, %s0; wgmma.fence.sync.aligned; \
         wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {{%s0, %s1, %s2, %s3}}, {{%a0, %a1, %a2, %a3}}, %d2, %p2, 1, 1; \
         wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; \
         fma.rn.f32 %y, %s1, 0f41800000, %s0; fma.rn.f32 %y, %s2, 0f43800000, %y; fma.rn.f32 %y, %s3, 0f45800000, %y; \
         cvt.rzi.s32.f32 %r9, %y; {STORE}"
    );
    // 3 and 4 of the upper rows, -4 and 1 of the lower ones.
    let own = |lane: u32| if lane.is_multiple_of(4) { (3 + 16 * 4 - 256 * 4 + 4096) as u32 } else { 0 };
    assert_eq!(words(tile, &body, 128, &[], 128).unwrap(), (0..128).map(own).collect::<Vec<_>>());
}

#[test]
fn what_is_found_at_run_time() {
    let shared = ".shared .align 8 .b8 box[64];";
    for (before, body, threads, kind) in [
        ("", "ld.global.u32 %r1, [%in+1024];", 1, Kind::OutOfBounds),
        ("", "ld.global.u32 %r1, [%in+-4];", 1, Kind::OutOfBounds),
        ("", "st.global.u32 [%out+1022], %r1;", 1, Kind::OutOfBounds),
        ("", "ld.global.u32 %r1, [%in+2];", 1, Kind::Misaligned),
        ("", "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%in+8];", 1, Kind::Misaligned),
        ("", "mov.u64 %d1, 0; ld.u32 %r1, [%d1];", 1, Kind::OutOfBounds),
        (shared, "ld.shared.u32 %r1, [box];", 1, Kind::Uninitialised),
        (shared, "st.shared.u32 [box+64], 1;", 1, Kind::OutOfBounds),
        (shared, "st.shared.u64 [box+4], 1;", 1, Kind::Misaligned),
        (shared, "st.shared.u32 [box], 1;", 2, Kind::Race),
        (shared, "mov.u32 %r1, 0; st.shared.u32 [%r1], 1;", 1, Kind::OutOfBounds),
        ("", "st.global.u32 [%out], 1;", 64, Kind::Race),
        ("", "loop: bra loop;", 1, Kind::Budget),
        ("", "trap;", 1, Kind::Trap),
        ("", "atom.global.add.f32 %r1, [%out], 0f3f800000;", 1, Kind::FloatAtomic),
        ("", "red.global.add.f32 [%out], 0f3f800000;", 1, Kind::FloatAtomic),
        ("", "shfl.sync.idx.b32 %r1, %t, 0, 31, 1;", 2, Kind::Mask),
        ("", "setp.eq.u32 %p1, %t, 0; @%p1 bar.warp.sync 3; bar.sync 0;", 2, Kind::Mask),
        (".const .u32 one = 1;", "mov.u64 %d1, one; st.global.u32 [%d1], 2;", 1, Kind::ReadOnly),
        ("", ".local .b8 own[4]; mov.u64 %d1, own; ld.local.u32 %r1, [%d1+4];", 1, Kind::OutOfBounds),
        // A read through the read-only cache of what the launch writes.
        ("", "st.global.u32 [%out], 1; ld.global.nc.u32 %r1, [%out];", 1, Kind::Race),
        // A polling loop that its own warp keeps from ending is no deadlock of the device: the
        // budget ends it.
        (
            "",
            "setp.ne.u32 %p1, %t, 0; @%p1 ret; wait: ld.volatile.global.u32 %r1, [%in]; setp.eq.u32 %p2, %r1, 0; @%p2 bra wait;",
            2,
            Kind::Budget,
        ),
    ] {
        let found = finding(before, body, threads);
        assert_eq!(found.kind, kind, "{body}: {found}");
    }
}

#[test]
fn lanes_may_wait_for_each_other() {
    // Lane 0 spins at the lower address until lane 1, at a higher one, writes: lanes make progress
    // on their own.
    let body = format!(
        "setp.ne.u32 %p1, %t, 0; @%p1 bra set; wait: ld.volatile.shared.u32 %r9, [box]; setp.eq.u32 %p2, %r9, 0; @%p2 bra wait; bra done;\n\
         set: st.volatile.shared.u32 [box], 5; mov.u32 %r9, 6;\n done: {STORE}"
    );
    let body =
        format!("setp.eq.u32 %p3, %t, 0; @%p3 st.volatile.shared.u32 [box], 0; bar.warp.sync 3; {body}");
    assert_eq!(words(".shared .align 4 .b8 box[4];", &body, 2, &[], 2).unwrap(), [5, 6]);
}

#[test]
fn blocks_may_wait_for_each_other() {
    // Each block waits until the one after it has written: it works in any order of blocks.
    let body = "mov.u32 %r1, %ctaid.x; mov.u32 %r2, %nctaid.x; sub.u32 %r2, %r2, 1; mul.wide.u32 %at, %r1, 4; add.u64 %d1, %out, %at; \
        setp.eq.u32 %p1, %r1, %r2; mov.u32 %r3, 1; @%p1 bra write; wait: ld.acquire.gpu.global.u32 %r3, [%d1+4]; setp.eq.u32 %p2, %r3, 0; @%p2 bra wait; \
        add.u32 %r3, %r3, 1; write: st.release.gpu.global.u32 [%d1], %r3;";
    let module = load(&kernel("", body));
    for schedule in [Schedule::Forward, Schedule::Reverse, Schedule::Random(3)] {
        let mut memory = Memory::new();
        let out = memory.alloc(4 * 9);
        let args = vec![Arg::Pointer(out), Arg::Pointer(out)];
        let launch = Launch { kernel: "k".into(), grid: [8, 1, 1], block: [1, 1, 1], shared_bytes: 0, args };
        let options = Options { schedule, ..Options::default() };
        run(&module, &launch, &mut memory, &options).unwrap_or_else(|finding| panic!("{finding}"));
        assert_eq!(memory.read_slice::<u32>(out, 8).unwrap(), [8, 7, 6, 5, 4, 3, 2, 1]);
    }
}

#[test]
fn what_is_refused_at_load() {
    let refused = |text: &str| Module::load(text, None).expect_err(text);
    for body in [
        "frobnicate.u32 %r1, %r2;",
        "add.rz.f32.ftz %r1, %r2, %r3;",
        "fma.f32 %r1, %r2, %r3, %r4;",
        "add.sat.s32 %r1, %r2, %r3;",
        "cvt.f32.s32 %r1, %r2;",
        "cvt.rn.f32.f32 %r1, %r2;",
        "setp.lo.s32 %p1, %r1, %r2;",
        "mul.u32 %r1, %r2, %r3;",
        "ld.global.u32.foo %r1, [%in];",
        "ld.global.v3.u32 {%r1, %r2, %r3}, [%in];",
        "st.const.u32 [%in], %r1;",
        "mma.sync.aligned.m16n8k16.row.row.f32.bf16.bf16.f32 {%r1, %r2, %r3, %r4}, {%r5, %r6, %r7, %r8}, {%r9, %r10}, {%r1, %r2, %r3, %r4};",
        "mov.u32 %r1, %clock;",
        "call foo;",
        "pack.b32 %r1, %r2, %r3;",
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e5m2.e5m2 {%r1, %r2, %r3, %r4}, %d1, %d2, %p1, 1, 1;",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.e4m3.e4m3 {%r1, %r2, %r3, %r4}, %d1, %d2, %p1, 1, 1;",
    ] {
        let error = refused(&kernel("", body));
        assert!(matches!(error, LoadError::Unsupported { .. }), "{body}: {error}");
        let line = kernel("", body).lines().position(|line| line.contains(body)).unwrap() as u32 + 1;
        assert!(error.to_string().starts_with(&format!("PTX line {line}:")), "{body}: {error}");
    }
    for body in [
        "add.u32 %r1, %r2;",
        "add.u32 %d1, %d2, %d3;",
        "add.u32 %r1, %r2, %r999;",
        "add.u32 %r1, %r2, nothing;",
        "bra nowhere;",
        "mov.u32 %r1, 0f3f800000000;",
        "@%r1 add.u32 %r1, %r2, %r3;",
        "add.u32 %r1, %r2 %r3;",
        "ld.global.u32 %r1, %in;",
        "a: a: ret;",
        "setmaxnreg.inc.sync.aligned.u32 20;",
        "cp.async.ca.shared.global [%d1], [%in], 12;",
        "ld.param.u32 %r1, [out+8];",
    ] {
        let error = refused(&kernel("", body));
        assert!(!matches!(error, LoadError::Unsupported { .. }), "{body}: {error}");
    }
    for text in [
        ".version 9.0\n.target sm_80\n.address_size 32\n",
        ".func (.param .b32 r) f() { ret; }",
        ".visible .entry k(.param .u32 a",
        ".global .align 3 .u32 x;",
        ".shared .b8 x[99999999999];",
        ".entry k() { .shared .b8 x[60000]; ret; }",
        "what is this",
    ] {
        refused(text);
    }
}

/// A block has as many registers as its bounds leave a thread of a processor's, and what some warps
/// take others give up.
#[test]
fn registers_are_taken_from_those_that_were_given_up() {
    let bounded = |bounds: &str, body: &str| kernel("", body).replace("\n{", &format!("\n{bounds}\n{{"));
    let parts = |takes: u32, gives: u32| {
        format!(
            "setp.lt.u32 %p1, %t, 128; @%p1 bra takes; setmaxnreg.dec.sync.aligned.u32 {gives}; ret; \
             takes: setmaxnreg.inc.sync.aligned.u32 {takes}; mov.u32 %r9, %t; {STORE}"
        )
    };
    let result = |bounds: &str, body: &str| {
        let module = load(&bounded(bounds, body));
        let mut memory = Memory::new();
        let at = memory.alloc(1024);
        run(&module, &launch(at, at, 256), &mut memory, &Options::default())
            .map_err(|finding| finding.to_string())
    };
    let error = |bounds: &str, takes: u32, gives: u32| result(bounds, &parts(takes, gives)).unwrap_err();
    let two = ".maxntid 256\n.minnctapersm 2";
    assert_eq!(result(two, &parts(232, 24)).map(|_| ()), Ok(()));
    for (bounds, takes, gives, what) in [
        (two, 240, 40, "warps take 35840 registers of the block's 32768"),
        (two, 120, 40, "setmaxnreg takes registers to 120 from 128"),
        (two, 232, 136, "setmaxnreg gives up registers to 136 from 128"),
        (".maxntid 256", 232, 24, "in a kernel of no bound"),
    ] {
        let error = error(bounds, takes, gives);
        assert!(error.contains(what), "{error}");
    }
}

/// No text makes the device panic: a good one cut short, and with bytes changed.
#[test]
fn no_text_panics() {
    let before =
        ".shared .align 16 .b8 box[64]; .const .u32 one[2] = {1, 2}; .global .f32 half = 0f3f000000;";
    let good = kernel(
        before,
        "mov.b64 %d1, {%r1, %r2}; @%p1 bra over; { .reg .b32 %q<3>; ld.global.v2.u32 {%q0, %q1}, [%in+4]; } over: \
         setp.lt.and.f32 %p1|%p2, %r1, 0f3f800000, !%p3; mad.lo.s32 %r1, -5, 0x10, %r2; bar.sync 0, 32; \
         shfl.sync.up.b32 %r1|%p1, %r2, 1, 0, -1; cp.async.ca.shared.global [box], [%in], 16, %r1; /* remark */ \
         // and another\n\
         .loc 1 2 3, function_name $x, inlined_at 1 1 1\n ld.param.u64 %d2, [out+0]; atom.shared.cas.b32 %r1, [box], 1, 2; mov.u32 %r3, WARP_SZ;",
    );
    assert!(Module::load(&good, Some("a\nb\nc")).is_ok());
    for end in 0..good.len() {
        let _ = Module::load(&good[..end], None);
    }
    let mut state = 1u32;
    let mut random = move |below: usize| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as usize % below
    };
    const BYTES: &[u8] = b"{}[]()<>;:,.@!%$_|+-0123456789xfUabz \n\"/*\xc3";
    for _ in 0..3000 {
        let mut bytes = good.clone().into_bytes();
        for _ in 0..1 + random(4) {
            let at = random(bytes.len());
            match random(3) {
                0 => bytes[at] = BYTES[random(BYTES.len())],
                1 => drop(bytes.remove(at)),
                _ => bytes.insert(at, BYTES[random(BYTES.len())]),
            }
        }
        let text = String::from_utf8_lossy(&bytes);
        if let Ok(module) = Module::load(&text, None) {
            let mut memory = Memory::new();
            let at = memory.alloc(64);
            let options = Options { instruction_budget: 10_000, threads: 1, ..Options::default() };
            let _ = run(&module, &launch(at, at, 32), &mut memory, &options);
        }
    }
}

/// The compiler reads 16 bytes where a program wants 12, and says so: nobody has the last four.
#[test]
fn bytes_that_a_load_does_not_use_are_not_read() {
    let body = |pragma: &str| {
        format!(
            "mov.u64 %d1, s; setp.ne.u32 %p1, %t, 0; mov.b32 %r5, 3; @%p1 bra FILLED;\n\
             st.shared.v2.b32 [%d1], {{%r5, %r5}}; st.shared.b32 [%d1+8], %r5;\n\
             FILLED: bar.sync 0; @%p1 bra READ;\n\
             st.shared.b32 [%d1+12], %t; bra END;\n\
             READ: {pragma} ld.shared.v4.b32 {{%r1, %r2, %r3, %r4}}, [%d1];\n\
             mul.wide.u32 %d2, %t, 4; add.u64 %d2, %d2, %out; add.u32 %r3, %r3, %r1; st.global.b32 [%d2], %r3;\n\
             END: mov.u32 %r6, 0;"
        )
    };
    let shared = ".shared .align 16 .b8 s[64];";
    let race = finding(shared, &body(""), 64);
    assert_eq!(race.kind, Kind::Race, "{race}");
    let used = words(shared, &body(".pragma \"used_bytes_mask 4095\";"), 64, &[0; 4], 64).unwrap();
    assert_eq!(used[1..], [6; 63]);
    let others = finding(shared, &body(".pragma \"used_bytes_mask 65520\";"), 64);
    assert_eq!(others.kind, Kind::Race, "{others}");
}

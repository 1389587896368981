//! Whole kernels: right results, nothing found, the same bytes under every schedule.

use dreamc_ptx::{Arg, Launch, Memory, Swizzle, TensorMap};

use crate::support::{Buffers, Case, brain, compile, differ, noise, nvrtc, read_brain};

/// A kernel with its inputs, and what is wrong with the results, if anything.
pub struct Example {
    pub case: Case,
    #[allow(clippy::type_complexity, reason = "used once")]
    pub wrong: Box<dyn Fn(&Memory) -> Option<String>>,
}

pub const RMSNORM: &str = include_str!("rmsnorm.cu");
pub const GEMM: &str = include_str!("gemm.cu");
pub const ATTENTION: &str = include_str!("attention.cu");
pub const MOE: &str = include_str!("moe.cu");
pub const HOPPER: &str = include_str!("hopper.cu");
pub const CLUSTER: &str = include_str!("cluster.cu");

pub fn rmsnorm(rows: usize, width: usize) -> Example {
    let (x, exact) = brain(&noise(rows * width, 1));
    let gain = noise(width, 2);
    let mut buffers = Buffers::default();
    let args = [buffers.input(&x), buffers.input(&gain), buffers.output(2 * rows * width)];
    let y = args[2];
    let mut args = args.map(Arg::Pointer).to_vec();
    args.extend([Arg::I32(width as i32), Arg::F32(1e-5)]);
    let launch = Launch {
        kernel: "rmsnorm".into(),
        grid: [rows as u32, 1, 1],
        block: [128, 1, 1],
        shared_bytes: 0,
        args,
    };
    let right: Vec<f64> = exact
        .chunks(width)
        .flat_map(|row| {
            let scale = (row.iter().map(|x| x * x).sum::<f64>() / width as f64 + 1e-5).sqrt().recip();
            row.iter().zip(&gain).map(move |(x, &gain)| x * scale * f64::from(gain)).collect::<Vec<_>>()
        })
        .collect();
    let wrong = move |memory: &Memory| differ(&read_brain(memory, y, right.len()), &right, 1.0 / 256.0, 1e-6);
    Example { case: buffers.case(vec![launch]), wrong: Box::new(wrong) }
}

pub fn gemm(m: usize, n: usize, k: usize) -> Example {
    let (a, exact_a) = brain(&noise(m * k, 3));
    let (b, exact_b) = brain(&noise(k * n, 4));
    let mut buffers = Buffers::default();
    let args = [buffers.input(&a), buffers.input(&b), buffers.output(2 * m * n)];
    let c = args[2];
    let mut args = args.map(Arg::Pointer).to_vec();
    args.extend([m, n, k].map(|extent| Arg::I32(extent as i32)));
    let grid = [n.div_ceil(64) as u32, m.div_ceil(64) as u32, 1];
    let shared_bytes = 3 * (64 * 80 + 32 * 144);
    let launch = Launch { kernel: "gemm".into(), grid, block: [128, 1, 1], shared_bytes, args };
    let right = product(&exact_a, &exact_b, [m, n, k]);
    let wrong = move |memory: &Memory| differ(&read_brain(memory, c, right.len()), &right, 1.0 / 256.0, 1e-5);
    Example { case: buffers.case(vec![launch]), wrong: Box::new(wrong) }
}

/// a b, row-major.
fn product(a: &[f64], b: &[f64], [m, n, k]: [usize; 3]) -> Vec<f64> {
    let mut right = vec![0.0; m * n];
    for row in 0..m {
        for depth in 0..k {
            let factor = a[row * k + depth];
            for column in 0..n {
                right[row * n + column] += factor * b[depth * n + column];
            }
        }
    }
    right
}

pub fn hopper_gemm(m: usize, n: usize, k: usize) -> Example {
    let (a, exact_a) = brain(&noise(m * k, 3));
    let (b, exact_b) = brain(&noise(k * n, 4));
    let mut buffers = Buffers::default();
    let [a, b, c] = [buffers.input(&a), buffers.input(&b), buffers.output(2 * m * n)];
    let map = |address: u64, [rows, columns]: [usize; 2], tile: [u32; 2], swizzle: Swizzle| {
        let map = TensorMap {
            address,
            element_bytes: 2,
            extents: vec![columns as u64, rows as u64],
            strides: vec![2 * columns as u64],
            tile: tile.into(),
            swizzle,
        };
        map.check().unwrap();
        Arg::TensorMap(Box::new(map))
    };
    let args = vec![
        map(a, [m, k], [64, 128], Swizzle::Bytes128),
        map(b, [k, n], [64, 64], Swizzle::Bytes128),
        map(c, [m, n], [128, 64], Swizzle::None),
        Arg::I32(k as i32),
    ];
    let grid = [n.div_ceil(128) as u32, m.div_ceil(128) as u32, 1];
    let shared_bytes = 3 * (128 * 64 * 2 + 64 * 128 * 2);
    let launch = Launch { kernel: "hopper_gemm".into(), grid, block: [384, 1, 1], shared_bytes, args };
    let right = product(&exact_a, &exact_b, [m, n, k]);
    let wrong = move |memory: &Memory| differ(&read_brain(memory, c, right.len()), &right, 1.0 / 256.0, 1e-5);
    Example { case: buffers.case(vec![launch]), wrong: Box::new(wrong) }
}

/// Sums of columns, once by each block of a cluster.
pub fn cluster_sums(rows: usize, clusters: usize) -> Example {
    const COLUMNS: usize = 64;
    let x = noise(rows * COLUMNS, 9);
    let mut buffers = Buffers::default();
    let [x_at, sums] = [buffers.input(&x), buffers.output(4 * 2 * clusters * COLUMNS)];
    let map = TensorMap {
        address: x_at,
        element_bytes: 4,
        extents: vec![COLUMNS as u64, rows as u64],
        strides: vec![4 * COLUMNS as u64],
        tile: vec![COLUMNS as u32, 8],
        swizzle: Swizzle::None,
    };
    map.check().unwrap();
    let args = vec![Arg::TensorMap(Box::new(map)), Arg::Pointer(sums), Arg::I32(rows as i32)];
    let grid = [2 * clusters as u32, 1, 1];
    let launch = Launch { kernel: "cluster_sums".into(), grid, block: [64, 1, 1], shared_bytes: 0, args };
    let right: Vec<f64> = (0..2 * clusters * COLUMNS)
        .map(|i| x.chunks(COLUMNS).map(|row| f64::from(row[i % COLUMNS])).sum())
        .collect();
    let wrong = move |memory: &Memory| {
        let bytes = memory.read(sums, 4 * right.len() as u64).unwrap();
        let found: Vec<f64> =
            bytemuck::pod_collect_to_vec::<u8, f32>(&bytes).into_iter().map(f64::from).collect();
        differ(&found, &right, 1e-5, 1e-5)
    };
    Example { case: buffers.case(vec![launch]), wrong: Box::new(wrong) }
}

pub fn attention(heads: usize, length: usize) -> Example {
    const WIDTH: usize = 64;
    let count = heads * length * WIDTH;
    let [q, k, v] = [5, 6, 7].map(|seed| brain(&noise(count, seed)));
    let mut buffers = Buffers::default();
    let args = [buffers.input(&q.0), buffers.input(&k.0), buffers.input(&v.0), buffers.output(2 * count)];
    let out = args[3];
    let scale = 1.0 / (WIDTH as f32).sqrt();
    let mut args = args.map(Arg::Pointer).to_vec();
    args.extend([Arg::I32(length as i32), Arg::F32(scale)]);
    let grid = [length.div_ceil(64) as u32, heads as u32, 1];
    let launch =
        Launch { kernel: "attention".into(), grid, block: [128, 1, 1], shared_bytes: 4 * 64 * 144, args };
    let mut right = vec![0.0; count];
    for head in 0..heads {
        let row = |values: &[f64], at: usize| values[(head * length + at) * WIDTH..][..WIDTH].to_vec();
        for at in 0..length {
            let query = row(&q.1, at);
            let scores: Vec<f64> = (0..=at)
                .map(|key| {
                    query.iter().zip(row(&k.1, key)).map(|(q, k)| q * k).sum::<f64>() * f64::from(scale)
                })
                .collect();
            let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - top).exp()).collect();
            let total: f64 = weights.iter().sum();
            for (key, weight) in weights.iter().enumerate() {
                for (column, value) in row(&v.1, key).into_iter().enumerate() {
                    right[(head * length + at) * WIDTH + column] += weight / total * value;
                }
            }
        }
    }
    let wrong = move |memory: &Memory| differ(&read_brain(memory, out, count), &right, 1.0 / 64.0, 6e-3);
    Example { case: buffers.case(vec![launch]), wrong: Box::new(wrong) }
}

pub fn moe(tokens: usize) -> Example {
    const EXPERTS: usize = 64;
    const CHUNK: usize = 128;
    let expert: Vec<i32> = noise(tokens, 8).iter().map(|x| ((x * x * 64.0) as i32).clamp(0, 63)).collect();
    let chunks = tokens.div_ceil(CHUNK);
    let mut buffers = Buffers::default();
    let expert_at = buffers.input(&expert);
    let counts = buffers.output(4 * chunks * EXPERTS);
    let offsets = buffers.output(4 * (EXPERTS + 1));
    let order = buffers.output(4 * tokens);
    let launch = |kernel: &str, blocks: usize, threads: usize, args: Vec<Arg>| Launch {
        kernel: kernel.into(),
        grid: [blocks as u32, 1, 1],
        block: [threads as u32, 1, 1],
        shared_bytes: 0,
        args,
    };
    let tokens_arg = Arg::I32(tokens as i32);
    let launches = vec![
        launch(
            "moe_count",
            chunks,
            CHUNK,
            vec![Arg::Pointer(expert_at), Arg::Pointer(counts), tokens_arg.clone()],
        ),
        launch(
            "moe_scan",
            1,
            EXPERTS,
            vec![Arg::Pointer(counts), Arg::Pointer(offsets), Arg::I32(chunks as i32)],
        ),
        launch(
            "moe_scatter",
            chunks,
            CHUNK,
            vec![Arg::Pointer(expert_at), Arg::Pointer(counts), Arg::Pointer(order), tokens_arg],
        ),
    ];
    let mut right: Vec<i32> = (0..tokens as i32).collect();
    right.sort_by_key(|&token| expert[token as usize]);
    let starts: Vec<u32> =
        (0..=EXPERTS as i32).map(|e| expert.iter().filter(|&&other| other < e).count() as u32).collect();
    let wrong = move |memory: &Memory| {
        let found_order: Vec<i32> = memory.read_slice(order, tokens).unwrap();
        let found_starts: Vec<u32> = memory.read_slice(offsets, EXPERTS + 1).unwrap();
        if found_starts != starts {
            return Some(format!("experts start at {found_starts:?}"));
        }
        (found_order != right).then(|| format!("the order is {found_order:?}"))
    };
    Example { case: buffers.case(launches), wrong: Box::new(wrong) }
}

/// Compiles, runs under every schedule, and compares with what is right.
fn check(name: &str, text: &str, architecture: &str, examples: Vec<Example>) {
    let Some(nvrtc) = nvrtc() else { return };
    let module = compile(nvrtc, name, text, architecture);
    for example in examples {
        let memory = example.case.run_everywhere(&module);
        if let Some(wrong) = (example.wrong)(&memory) {
            panic!("{name}: {wrong}");
        }
    }
}

#[test]
fn rmsnorm_is_right() {
    check("rmsnorm.cu", RMSNORM, "compute_80", vec![rmsnorm(5, 300), rmsnorm(1, 8)]);
}

#[test]
fn gemm_is_right() {
    check("gemm.cu", GEMM, "compute_80", vec![gemm(128, 128, 96), gemm(70, 72, 40), gemm(3, 8, 8)]);
}

#[test]
fn attention_is_right() {
    check("attention.cu", ATTENTION, "compute_80", vec![attention(2, 128), attention(1, 77)]);
}

#[test]
fn routing_is_right() {
    check("moe.cu", MOE, "compute_80", vec![moe(500), moe(1)]);
}

#[test]
fn blocks_of_a_cluster_are_right() {
    check("cluster.cu", CLUSTER, "compute_90a", vec![cluster_sums(112, 1), cluster_sums(48, 5)]);
}

#[test]
fn hopper_gemm_is_right() {
    let examples = vec![hopper_gemm(128, 128, 256), hopper_gemm(136, 72, 40)];
    check("hopper.cu", HOPPER, "compute_90a", examples);
}

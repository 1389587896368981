//! The CUDA of linear attention in chunks of 64 tokens, on the tensor cores: `kernels/linear.cuh`.
//!
//! *In*: a kernel in bf16 with at most one decay of each head and at most the delta of a key.
//! *Out*: its source, or nothing where that does not hold, heads are no multiple of 16, or a chunk
//! has no room in shared memory; the naive kernel serves then. *Promise*: as many passes as the
//! text has entries; each chunk's intermediate results are scratch memory in bf16.

use super::cuda::{LETTERS, first};
use super::kernel::{LinearAttention, LinearAttentionGrad, LinearShape};
use super::{Decay, Delta};
use crate::codegen::text::{Builder, Geometry, Operands, Param, blocks, fits, per_thread, scratch, times};
use crate::codegen::{CodegenError, Source, Variant};
use crate::op::Tokens;
use crate::op::kernel::KernelKind;

type Result<T> = std::result::Result<T, CodegenError>;

/// Tokens of a chunk; `CHUNK` of `linear.cuh`.
const CHUNK: u64 = 64;

/// Bytes of `count` rows in shared memory; `ROW` of `linear.cuh`.
fn rows(count: u64, width: u64) -> u64 {
    times(&[count, width + 8, 2])
}

/// Bytes of the decays of a chunk: `Decays` of `linear.cuh`.
const DECAYS: u64 = 4 * (4 * CHUNK + CHUNK * (CHUNK + 1) + 2 * CHUNK);

/// A kernel that runs in chunks.
struct Chunks<'k> {
    shape: &'k LinearShape,
    delta: bool,
    before: bool,
    segments: bool,
    /// Values of a head that a block has at a time.
    part: u64,
    operands: Operands,
    builder: Builder,
}

impl<'k> Chunks<'k> {
    fn new(
        kernel: &dyn KernelKind,
        shape: &'k LinearShape,
        (delta, before, segments): (Delta, bool, bool),
        variant: Variant,
    ) -> Result<Option<Self>> {
        let operands = Operands::of(kernel, variant);
        let mut names = vec!["q", "k", "v"];
        names.extend((delta == Delta::Key).then_some("u"));
        let whole = |n: u64| n > 0 && n.is_multiple_of(16);
        let strides = shape.parts.iter().flat_map(|part| part.strides.iter().chain([&part.row]));
        let fits = variant.is_narrow(0)
            && !variant.places
            && delta != Delta::Pair
            && shape.decay_kind() != Decay::Channel
            && whole(shape.size)
            && whole(shape.value)
            && strides.copied().all(|n| n.is_multiple_of(8))
            && times(&[shape.batch, shape.tokens, shape.head_count()]) > 0
            && operands.wide(&names)?;
        let part = [64, 48, 32, 16].into_iter().find(|part| shape.value.is_multiple_of(*part));
        let Some(part) = part.filter(|_| fits) else { return Ok(None) };
        let builder = Builder::new(kernel.summary(), "linear.cuh");
        Ok(Some(Chunks { shape, delta: delta == Delta::Key, before, segments, part, operands, builder }))
    }

    fn chunks(&self) -> u64 {
        times(&[self.shape.batch, self.shape.head_count(), self.shape.tokens.div_ceil(CHUNK)])
    }

    /// Parts of a key's numbers that the warps of a block of gradients divide among them.
    fn halves(&self) -> u64 {
        if self.shape.size.is_multiple_of(32) && self.shape.size >= 64 { 2 } else { 1 }
    }

    /// Bytes in shared memory of `keys` chunks of keys, `values` of parts of values, and `tokens`
    /// squares of a chunk's tokens.
    fn bytes(&self, keys: u64, values: u64, tokens: u64) -> u64 {
        keys * rows(CHUNK, self.shape.size) + values * rows(CHUNK, self.part) + tokens * rows(CHUNK, CHUNK)
    }

    /// One where there is a delta, and 16 bytes in its place.
    fn of_delta(&self, bytes: u64) -> u64 {
        if self.delta { bytes } else { 16 }
    }

    /// Shared memory of each entry, by its struct of `linear.cuh`.
    fn shared(&self) -> Shared {
        let key = rows(CHUNK, self.shape.size);
        let state = rows(self.part, self.shape.size);
        let turn = rows(CHUNK, CHUNK);
        let triangle = if self.delta { 4 * CHUNK * (CHUNK + 4) } else { 16 };
        let own = self.of_delta(key);
        Shared {
            chunk: self.bytes(1, 1, 0) + own + triangle + self.of_delta(turn) + DECAYS,
            state: self.bytes(1, 1, 0) + own,
            output: self.bytes(2, 1, 1) + state + DECAYS,
            cotangent: self.bytes(2, 1, 1)
                + self.of_delta(turn)
                + self.of_delta(rows(CHUNK, self.part))
                + DECAYS,
            back: self.bytes(2, 2, 0) + own,
            gradient: self.bytes(2, 2, 1)
                + own
                + self.of_delta(turn)
                + 2 * state
                + 4 * (18 * CHUNK + 8)
                + DECAYS,
        }
    }

    /// The struct of constants that the entries are made for.
    fn constants(&mut self, stages: u64, back_stages: u64) -> Result<()> {
        let s = self.shape;
        let mut lines = vec![];
        let numbers = [
            ("BATCH", s.batch),
            ("TOKENS", s.tokens),
            ("HEADS", s.head_count()),
            ("SIZE", s.size),
            ("VALUE", s.value),
            ("VALUE_PART", self.part),
            ("STAGES", stages),
            ("BACK_STAGES", back_stages),
            ("HALVES", self.halves()),
        ];
        for (name, n) in numbers {
            let n = fits("a size of a linear attention", n)?;
            lines.push(format!("    static constexpr int {name} = {n};"));
        }
        let decay = s.decay_kind() == Decay::Head;
        for (name, is) in [("DELTA", self.delta), ("DECAY", decay), ("BEFORE", self.before)] {
            lines.push(format!("    static constexpr bool {name} = {is};"));
        }
        let decays = s.decay.as_ref().map(|part| ("DECAY", part));
        for (letter, part) in LETTERS.into_iter().zip(&s.parts).chain(decays) {
            let name = if letter == "DECAY" { "of_decay".into() } else { letter.to_lowercase() };
            lines.push(format!("    static DEVICE i64 {name}(i64 h) {{ return {}; }}", first(s, part)));
        }
        self.builder.line(&format!("\nstruct S {{\n{}\n}};", lines.join("\n")));
        Ok(())
    }

    /// Operands with their strides.
    fn inputs(&self, names: &[&str]) -> Result<(Vec<Param>, Vec<String>)> {
        let (mut list, mut passed) = (vec![], vec![]);
        for name in names {
            if *name == "u" && !self.delta {
                passed.extend(["(const bf16 *)nullptr".to_string(), "0".into()]);
                continue;
            }
            let (address, stride) = (self.operands.get(name)?, self.operands.stride(name)?);
            passed.extend([address.name.clone(), stride.name.clone()]);
            list.extend([address, stride]);
        }
        Ok((list, passed))
    }

    /// Two arguments, functions that find decays and documents, with their parameters.
    fn marks(&self, list: &mut Vec<Param>) -> Result<String> {
        let decay = match self.shape.decay_kind() {
            Decay::None => "[&](i64, int) { return 0.0f; }",
            _ => {
                list.extend([self.operands.get("decay")?, self.operands.stride("decay")?]);
                "[&](i64 token, int h) { return decay[token * decay_stride + S::of_decay(h)]; }"
            }
        };
        let segment = match self.segments {
            false => "[&](i64) { return 0; }",
            true => {
                list.push(self.operands.get("segments")?);
                "[&](i64 token) { return segments[token]; }"
            }
        };
        Ok(format!("{decay},\n        {segment}"))
    }

    /// An entry whose body calls a template of `linear.cuh`.
    fn pass(
        &mut self,
        entry: &str,
        geometry: Geometry,
        list: &[Param],
        template: &str,
        passed: &str,
        shared: &str,
    ) {
        let check = match shared {
            "" => String::new(),
            shared => format!("    static_assert({shared} <= {}, \"room\");\n", geometry.2),
        };
        let body = format!("{check}    linear::{template}({passed});\n");
        self.builder.entry(entry, geometry, list, &body);
    }

    /// The passes that forward and backward have in common: chunks, then states.
    fn states(&mut self, shared: &Shared, memory: &Memory, stages: u64) -> Result<()> {
        let chunks = blocks(self.chunks())?;
        let (mut list, mut passed) = self.inputs(&["q", "k", "v", "u"])?;
        passed.push(self.marks(&mut list)?);
        let gradient = memory.gradient.is_some();
        let mut kept = |declaration: &str, name: &str, at: Option<u64>| match at {
            Some(at) => {
                list.push(scratch(declaration, name, at));
                passed.push(name.into());
            }
            None => passed.push("nullptr".into()),
        };
        kept("bf16 *", "ends", Some(memory.ends));
        kept("bf16 *", "w", memory.w);
        kept("bf16 *", "x", Some(memory.x));
        kept("float *", "wholes", Some(memory.wholes));
        let more = memory.gradient.as_ref();
        kept("bf16 *", "turns", more.and_then(|m| m.turns));
        kept("bf16 *", "keys_u", more.and_then(|m| m.keys_u));
        kept("bf16 *", "queries", more.map(|m| m.queries));
        let geometry = (chunks, 128, fits("shared memory", shared.chunk)?);
        let template = format!("chunks<S, {gradient}>");
        self.pass(
            "linear_chunks",
            geometry,
            &list,
            &template,
            &passed.join(", "),
            "sizeof(linear::ChunkShared<S>)",
        );

        let heads = times(&[self.shape.batch, self.shape.head_count(), self.shape.value / self.part]);
        let list = [
            Some(scratch("const bf16 *", "ends", memory.ends)),
            memory.w.map(|at| scratch("const bf16 *", "w", at)),
            Some(scratch("bf16 *", "x", memory.x)),
            Some(scratch("const float *", "wholes", memory.wholes)),
            Some(scratch("bf16 *", "kept", memory.kept)),
        ];
        let w = if memory.w.is_some() { "w" } else { "nullptr" };
        let geometry = (blocks(heads)?, 2 * self.part as u32, fits("shared memory", stages * shared.state)?);
        let list: Vec<Param> = list.into_iter().flatten().collect();
        let passed = format!("ends, {w}, x, wholes, kept");
        self.pass(
            "linear_states",
            geometry,
            &list,
            "states<S>",
            &passed,
            "S::STAGES * sizeof(linear::StateShared<S>)",
        );
        Ok(())
    }

    /// Scratch memory of the passes.
    fn memory(&mut self, gradient: bool) -> Memory {
        let s = self.shape;
        let [keys, values] = [s.size, s.value].map(|width| times(&[self.chunks(), CHUNK, width, 2]));
        let (state, turn) =
            (times(&[self.chunks(), s.value, s.size, 2]), times(&[self.chunks(), CHUNK, CHUNK, 2]));
        let (wholes, delta) = (times(&[self.chunks(), 4]), self.delta);
        let b = &mut self.builder;
        Memory {
            ends: b.scratch(keys),
            w: delta.then(|| b.scratch(keys)),
            x: b.scratch(values),
            wholes: b.scratch(wholes),
            kept: b.scratch(state),
            gradient: gradient.then(|| GradientMemory {
                turns: delta.then(|| b.scratch(turn)),
                keys_u: delta.then(|| b.scratch(keys)),
                queries: b.scratch(keys),
                back: delta.then(|| b.scratch(keys)),
                dx: b.scratch(values),
                dkept: b.scratch(state),
            }),
        }
    }
}

/// Bytes of shared memory of the entries.
struct Shared {
    chunk: u64,
    state: u64,
    output: u64,
    cotangent: u64,
    back: u64,
    gradient: u64,
}

/// Where results of passes are in scratch memory.
struct Memory {
    ends: u64,
    w: Option<u64>,
    x: u64,
    wholes: u64,
    kept: u64,
    gradient: Option<GradientMemory>,
}

/// The same of the backward.
struct GradientMemory {
    turns: Option<u64>,
    keys_u: Option<u64>,
    queries: u64,
    back: Option<u64>,
    dx: u64,
    dkept: u64,
}

/// Two stages where there is room for them, one where there is for it.
fn stages(bytes: u64, limit: u64) -> Option<u64> {
    [2, 1].into_iter().find(|stages| stages * bytes <= limit)
}

pub(super) fn forward(kernel: &LinearAttention, variant: Variant) -> Result<Option<Source>> {
    if kernel.tokens == Tokens::Kept {
        return Ok(None);
    }
    let kind = (kernel.delta, kernel.before, kernel.tokens == Tokens::Segments);
    let Some(mut c) = Chunks::new(kernel, &kernel.shape, kind, variant)? else { return Ok(None) };
    let (shared, limit) = (c.shared(), variant.shared());
    let Some(stages) = stages(shared.state, limit) else { return Ok(None) };
    if shared.chunk.max(shared.output) > limit {
        return Ok(None);
    }
    c.constants(stages, 1)?;
    let memory = c.memory(false);
    c.states(&shared, &memory, stages)?;
    let (mut list, mut passed) = c.inputs(&["q", "k"])?;
    passed.push(c.marks(&mut list)?);
    list.push(scratch("const bf16 *", "x", memory.x));
    list.push(scratch("const bf16 *", "kept", memory.kept));
    list.push(c.operands.get("o")?);
    passed.extend(["x", "kept", "o"].map(String::from));
    let geometry = (blocks(c.chunks())?, 128, fits("shared memory", shared.output)?);
    let size = "sizeof(linear::OutputShared<S>)";
    c.pass("linear_outputs", geometry, &list, "outputs<S>", &passed.join(", "), size);
    Ok(c.builder.finish())
}

pub(super) fn backward(kernel: &LinearAttentionGrad, variant: Variant) -> Result<Option<Source>> {
    let s = &kernel.shape;
    let kind = (kernel.delta, kernel.before, kernel.segments);
    let Some(mut c) = Chunks::new(kernel, s, kind, variant)? else { return Ok(None) };
    let (shared, limit) = (c.shared(), variant.shared());
    let (Some(of_states), Some(of_back)) = (stages(shared.state, limit), stages(shared.back, limit)) else {
        return Ok(None);
    };
    if !c.operands.wide(&["do"])? || shared.chunk.max(shared.cotangent).max(shared.gradient) > limit {
        return Ok(None);
    }
    c.constants(of_states, of_back)?;
    let memory = c.memory(true);
    let Some(more) = &memory.gradient else { return Ok(None) };
    c.states(&shared, &memory, of_states)?;
    let chunks = blocks(c.chunks())?;

    let (mut list, mut passed) = c.inputs(&["q", "k", "do"])?;
    passed.push(c.marks(&mut list)?);
    list.push(scratch("const bf16 *", "ends", memory.ends));
    list.extend(more.turns.map(|at| scratch("const bf16 *", "turns", at)));
    list.push(scratch("bf16 *", "dx", more.dx));
    list.extend(more.back.map(|at| scratch("bf16 *", "back", at)));
    let of_delta = |name: &str| if c.delta { name.to_string() } else { "nullptr".into() };
    passed.extend(["ends".into(), of_delta("turns"), "dx".into(), of_delta("back")]);
    let geometry = (chunks, 128, fits("shared memory", shared.cotangent)?);
    let size = "sizeof(linear::CotangentShared<S>)";
    c.pass("linear_cotangents", geometry, &list, "cotangents<S>", &passed.join(", "), size);

    let (mut list, mut passed) = c.inputs(&["do"])?;
    list.push(scratch("const bf16 *", "back", more.back.unwrap_or(memory.ends)));
    list.extend(more.keys_u.map(|at| scratch("const bf16 *", "keys_u", at)));
    list.push(scratch("const bf16 *", "queries", more.queries));
    list.push(scratch("const float *", "wholes", memory.wholes));
    list.push(scratch("bf16 *", "dx", more.dx));
    list.push(scratch("bf16 *", "dkept", more.dkept));
    let keys_u = if c.delta { "keys_u" } else { "nullptr" };
    passed.extend(["back", keys_u, "queries", "wholes", "dx", "dkept"].map(String::from));
    let heads = times(&[s.batch, s.head_count(), s.value / c.part]);
    let geometry = (blocks(heads)?, 2 * c.part as u32, fits("shared memory", of_back * shared.back)?);
    let size = "S::BACK_STAGES * sizeof(linear::BackShared<S>)";
    c.pass("linear_back", geometry, &list, "back_states<S>", &passed.join(", "), size);

    let (mut list, mut passed) = c.inputs(&["q", "k", "u", "do"])?;
    passed.push(c.marks(&mut list)?);
    for (name, at) in [("x", memory.x), ("dx", more.dx), ("kept", memory.kept), ("dkept", more.dkept)] {
        list.push(scratch("const bf16 *", name, at));
        passed.push(name.into());
    }
    let mut joins = vec![];
    let tokens = times(&[s.batch, s.tokens]);
    for letter in ["Q", "K", "V", "U", "DECAY"] {
        let name = letter.to_lowercase();
        let (numbers, before, after) = match letter {
            "DECAY" => ("float x", "store(", "], x);"),
            _ => ("int c, float x, float y", "store_pair(&", " + c], x, y);"),
        };
        let found = kernel.operands().find(|(operand, ..)| *operand == name);
        let Some((_, gradient, part)) = found else {
            passed.push(format!("\n        [&](i64 token, int h, {numbers}) {{}}"));
            continue;
        };
        let width = match letter {
            "DECAY" => 1,
            "V" => s.value,
            _ => s.size,
        };
        let to = match s.is_shared(part) {
            true => {
                let at = c.builder.scratch(times(&[tokens, s.head_count(), width, 4]));
                list.push(scratch("float *", &format!("parts_{name}"), at));
                joins.push((gradient, part, width, at));
                format!("parts_{name}[(token * S::HEADS + h) * {width}ll")
            }
            false => {
                list.push(c.operands.get(gradient)?);
                let of = if letter == "DECAY" { "of_decay" } else { &name };
                format!("{gradient}[token * {}ll + S::{of}(h)", part.row)
            }
        };
        passed.push(format!("\n        [&](i64 token, int h, {numbers}) {{ {before}{to}{after} }}"));
    }
    let geometry = (chunks, 128 * c.halves() as u32, fits("shared memory", shared.gradient)?);
    let size = "sizeof(linear::GradientShared<S>)";
    c.pass("linear_gradients", geometry, &list, "gradients<S>", &passed.join(", "), size);

    for (gradient, part, width, at) in joins {
        let list = [scratch("const float *", "parts", at), c.operands.get(gradient)?];
        let first = first(s, part);
        let template = format!("join_heads<S, {width}, {}>", part.row);
        let passed = format!("parts, {gradient}, [&](i64 h) {{ return {first}; }}");
        c.pass(
            &format!("linear_{gradient}"),
            per_thread(times(&[tokens, part.row]))?,
            &list,
            &template,
            &passed,
            "",
        );
    }
    Ok(c.builder.finish())
}

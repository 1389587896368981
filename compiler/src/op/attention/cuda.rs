//! The CUDA of attention along the sequence: which form it takes, on the ordinary cores, the tensor
//! cores or by warpgroups.

use super::kernel::{Attention, AttentionGrad, AttentionShape, X, window};
use super::listed;
use super::parts::Parts;
use crate::codegen::text::{Builder, Operands, Param, blocks, fits, float, per_thread, scratch, times};
use crate::codegen::{Argument, Base, CodegenError, HOPPER_SHARED, Matrices, Source, Variant};
use crate::ir::{Attention as Scores, Mask};

type Result<T> = std::result::Result<T, CodegenError>;

/// How an attention is run.
struct AttentionForm {
    header: &'static str,
    /// Templates are named after it.
    prefix: &'static str,
    /// Template arguments.
    arguments: String,
    /// Rows of a block, which stay in shared memory, rows that pass by at a time, and all of those
    /// that are there.
    own: u64,
    tile: u64,
    passing: u64,
    /// Bytes of a row of a head.
    row_bytes: u64,
    threads: u32,
    /// Blocks of a processor at once.
    resident: u32,
    hopper: bool,
    /// Shared memory that a block may have.
    limit: u64,
}

/// Rows that a block of an attention computes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Owner {
    /// Queries, forward.
    Queries,
    /// Queries, whose gradient is computed.
    QueryGradients,
    /// Keys, whose gradient and that of their values are computed.
    KeyGradients,
}

impl AttentionForm {
    /// On the tensor cores where heads fit their pieces and a warp's registers; by warpgroups where
    /// blocks of them fill a GPU. `shared`: values are the keys.
    fn of(s: &AttentionShape, a: &Scores, owner: Owner, shared: bool, variant: Variant) -> Self {
        let heads = if owner == Owner::KeyGradients { s.kv_heads } else { s.heads };
        let rows = if owner == Owner::KeyGradients { s.keys } else { s.queries };
        // `ROWS` and `TILE` of the templates; there are two tiles of each of the two things that
        // pass by.
        let wide = variant.is_narrow(0) && variant.aligned;
        if variant.hopper && wide && !a.listed() && matches!(s.size, 64 | 128 | 256) {
            // As many rows at a time as registers go, and as many times as memory does. Two sums of
            // 64 rows of 256 are more than the registers of a warpgroup: two of them share rows.
            let (owns, tile, sharers) = match (owner, s.size <= 128) {
                (Owner::Queries, true) => (1, 128, 1),
                (Owner::Queries, false) => (1, 64, 1),
                (Owner::QueryGradients, true) => (2, 64, 1),
                (Owner::QueryGradients, false) => (2, 32, 1),
                (Owner::KeyGradients, true) => (2, 64, 1),
                (Owner::KeyGradients, false) => (2, 64, 2),
            };
            let own = 128 / sharers;
            let shared = if sharers > 1 { format!(", {sharers}") } else { String::new() };
            let room = HOPPER_SHARED - 2048 - 2 * s.size * own * owns;
            let stages = (room / (4 * s.size * tile)).min(4);
            if rows >= own && times(&[rows.div_ceil(own), heads, s.batch]) >= variant.processors() {
                return AttentionForm {
                    header: "flash_hopper.cuh",
                    prefix: "flash",
                    arguments: format!("FlashWarpgroups<S, {tile}, {stages}{shared}>"),
                    own,
                    tile,
                    passing: 2 * stages * tile,
                    row_bytes: 2 * s.size,
                    threads: 384,
                    resident: 1,
                    hopper: true,
                    limit: variant.hopper_shared(),
                };
            }
        }
        if variant.is_narrow(0) && s.size.is_multiple_of(16) && s.size <= 128 {
            return AttentionForm {
                header: "flash.cuh",
                prefix: "flash",
                arguments: format!("FlashWarps<S, {}>", variant.aligned),
                own: 64,
                tile: 32,
                passing: 4 * 32,
                row_bytes: 2 * (s.size + 8),
                threads: 128,
                // Bits of lists take registers, too.
                resident: if a.listed() && s.size > 64 { 2 } else { 3 },
                hopper: false,
                limit: variant.shared(),
            };
        }
        // `OWN` and `LANES` of `attention.cuh`; there is one tile of each, or of both.
        AttentionForm {
            header: "attention.cuh",
            prefix: "attention",
            arguments: if shared { "S, true" } else { "S" }.into(),
            own: 16,
            tile: 32,
            passing: if shared { 32 } else { 2 * 32 },
            row_bytes: times(&[4, s.size.next_multiple_of(32) + 1]),
            threads: 128,
            resident: 1,
            hopper: false,
            limit: variant.shared(),
        }
    }

    /// Rows of the heads of all sequences, which stay (`own`) or pass by: their address and the
    /// distance from row to row, or matrices for the copy engine. Appends parameters, and gives
    /// them as arguments of the template.
    fn rows(
        &self,
        list: &mut Vec<Param>,
        o: &Operands,
        name: &str,
        own: bool,
        s: &AttentionShape,
    ) -> Result<String> {
        let address = o.get(name)?;
        if !self.hopper {
            let stride = o.stride(name)?;
            let text = format!("{}, {}", address.name, stride.name);
            list.extend([address, stride]);
            return Ok(text);
        }
        let (rows, heads) = match name {
            "q" | "do" => (s.queries, s.heads),
            _ => (s.keys, s.kv_heads),
        };
        for size in [times(&[heads, s.size]), rows, s.batch] {
            fits("rows for the copy engine", size)?;
        }
        let map = Matrices {
            base: Base::Operand(o.at(name)?),
            row: heads * s.size,
            rows,
            stride: None,
            count: s.batch,
            box_rows: fits("rows of a box", if own { self.own } else { self.tile })?,
        };
        let text = format!("{}, 0", address.name);
        list.push(Param::new("const __grid_constant__ TensorMap", &address.name, Argument::Map(map)));
        Ok(text)
    }

    /// Blocks, threads and shared memory of a launch for `rows` rows of `heads` heads; `owns` kinds
    /// of rows stay in shared memory; its entry follows.
    fn geometry(&self, builder: &mut Builder, rows: u64, heads: u64, owns: u64) -> Result<(u32, u32, u32)> {
        let (room, limit) = (if self.hopper { 1024 } else { 0 }, self.limit);
        let bytes = times(&[self.row_bytes, owns * self.own + self.passing]).saturating_add(room);
        let shared = match u32::try_from(bytes) {
            Ok(shared) if bytes <= limit => shared,
            _ => return Err(CodegenError::Shared { bytes, limit }),
        };
        if self.hopper {
            builder.hopper();
        }
        builder.resident(self.resident);
        Ok((blocks(times(&[rows.div_ceil(self.own), heads]))?, self.threads, shared))
    }
}

pub(super) fn attention_name(s: &AttentionShape, a: &Scores) -> String {
    let mut name =
        format!("b{}_q{}_k{}_h{}_g{}_d{}", s.batch, s.queries, s.keys, s.heads, s.kv_heads, s.size);
    if let Some(w) = a.window {
        name += &format!("_window{w}");
    }
    if a.softcap.is_some() {
        name += "_capped";
    }
    if a.mask == Mask::Positions {
        name += "_positions";
    }
    if a.segments {
        name += "_segments";
    }
    if let Some(every) = a.every {
        name += &format!("_every{every}");
    }
    if let Some(among) = a.among {
        name += &format!("_among{}x{}_lists{}", among.count, among.block, among.heads);
    }
    if let Some(program) = a.program.as_deref() {
        let formulas = program.score.iter().chain(&program.mask);
        let text: String = formulas.map(|f| program.show(f) + ";").collect();
        // Two programs of one shape are two kernels.
        let hash = text
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
        name += &format!("_scored{hash:016x}");
    }
    name
}

/// The line that names the shape, the mask operands, and how they are passed on.
pub(super) fn attention_shape(
    s: &AttentionShape,
    a: &Scores,
    o: &Operands,
) -> Result<(String, Vec<Param>, String)> {
    for (what, size) in [
        ("queries", times(&[s.batch, s.queries])),
        ("keys", times(&[s.batch, s.keys])),
        ("a row of queries", times(&[s.heads, s.size])),
    ] {
        fits(what, size)?;
    }
    let positions = a.mask == Mask::Positions;
    let window = window(a)?;
    let (before, program) = listed::program(s, a);
    let line = format!(
        "{before}typedef Shape<{}, {}, {}, {}, {}, {}, {positions}, {}, {window}, {}{}> S;",
        s.batch,
        s.queries,
        s.keys,
        s.heads,
        s.kv_heads,
        s.size,
        a.segments,
        a.softcap.is_some(),
        program
    );
    let mut list = vec![];
    let mut names = ["nullptr"; 3];
    if positions {
        list.extend(o.list(["query_positions", "key_positions"])?);
        (names[0], names[1]) = ("query_positions", "key_positions");
    }
    if a.segments {
        list.push(o.get("segments")?);
        names[2] = "segments";
    }
    Ok((line, list, names.join(", ")))
}

pub(crate) fn scores(a: &Scores) -> String {
    format!("{}, {}", float(a.scale), float(a.softcap.unwrap_or(1.0)))
}

/// Writes a program down, where there is one; how what it reads is passed on.
pub(super) fn scored(builder: &mut Builder, s: &AttentionShape, a: &Scores, lengths: &[u64]) -> String {
    let Some(program) = a.program.as_deref() else { return String::new() };
    builder.line(&program.scored(s.code(lengths)));
    format!(", S::Reads{{{}}}", X[..a.read().len()].join(", "))
}

pub(super) fn forward(kernel: &Attention, variant: Variant) -> Result<Option<Source>> {
    if let Some(parts) = Parts::of(kernel, variant) {
        return parts.source(kernel, variant);
    }
    let (s, a, o) = (&kernel.shape, &kernel.attention, &Operands::of(kernel, variant));
    let (line, mask, mask_names) = attention_shape(s, a, o)?;
    let shared = if kernel.shared { "_shared" } else { "" };
    let name = format!("attention_{}{shared}{}", attention_name(s, a), variant.suffix());
    let form = AttentionForm::of(s, a, Owner::Queries, kernel.shared, variant);
    let mut builder = Builder::new(name, form.header);
    let reads = scored(&mut builder, s, a, &kernel.lengths);
    builder.line(&line);
    let (bits, of_bits) = listed::passes(&mut builder, s, a, o)?;
    let geometry = form.geometry(&mut builder, s.queries, times(&[s.heads, s.batch]), 1)?;
    let mut list = vec![];
    let operands = ["q", "k", "v"].into_iter().map(|name| form.rows(&mut list, o, name, name == "q", s));
    let operands = operands.collect::<Result<Vec<_>>>()?.join(", ");
    list.extend(mask);
    list.extend(o.list(["o", "lse"])?);
    for name in &X[..a.read().len()] {
        list.push(o.get(name)?);
    }
    list.extend(bits);
    let body = format!(
        "    {}<{}>({operands}, {mask_names}, o, lse, {}{reads}{of_bits});\n",
        form.prefix,
        form.arguments,
        scores(a)
    );
    builder.entry("attention_rows", geometry, &list, &body);
    Ok(builder.finish())
}

pub(super) fn backward(kernel: &AttentionGrad, variant: Variant) -> Result<Option<Source>> {
    let (s, a, o) = (&kernel.shape, &kernel.attention, &Operands::of(kernel, variant));
    let (line, mask, mask_names) = attention_shape(s, a, o)?;
    let log = if kernel.log { "_log" } else { "" };
    let name = format!("attention_grad_{}{log}{}", attention_name(s, a), variant.suffix());
    let queries = AttentionForm::of(s, a, Owner::QueryGradients, false, variant);
    let keys = AttentionForm::of(s, a, Owner::KeyGradients, false, variant);
    let mut builder = Builder::new(name, if keys.hopper { keys.header } else { queries.header });
    let reads = scored(&mut builder, s, a, &kernel.lengths);
    builder.line(&line);
    let (bits, of_bits) = listed::passes(&mut builder, s, a, o)?;
    builder.resident(queries.resident);
    let rows = times(&[s.batch, s.queries, s.heads]);
    let along = builder.scratch(times(&[4, rows]));
    let mut products = vec![o.get("o")?, o.stride("o")?, o.get("do")?, o.stride("do")?];
    let log = if kernel.log {
        products.push(o.get("dlse")?);
        "dlse"
    } else {
        "nullptr"
    };
    products.push(scratch("float *", "along", along));
    // Lanes of a head, each with adjacent elements at a time. In f32 it is one element, whose
    // product is rounded before it is added: the gradient of a query that sees one key is zero but
    // for rounding, and devices are held to the same rounding of it.
    let each = if o.narrow("o")? { o.numbers(s.size, &["o", "do"])? } else { 1 };
    let lanes = s.size.div_ceil(each).next_power_of_two().min(32);
    let body = format!("    attention_along<S, {lanes}, {each}>(o, o_stride, d, d_stride, {log}, along);\n");
    builder.entry("attention_along_rows", per_thread(times(&[rows, lanes]))?, &products, &body);
    let entry = |builder: &mut Builder,
                 form: &AttentionForm,
                 of: &str,
                 outputs: Vec<Param>,
                 results: &str| {
        let mut list = vec![];
        let mut rows = |name, own| form.rows(&mut list, o, name, own, s);
        let queries = of == "queries";
        let (q, k, v) = (rows("q", queries)?, rows("k", !queries)?, rows("v", !queries)?);
        let d = rows("do", queries)?;
        list.push(o.get("lse")?);
        list.extend(mask.iter().map(|p| Param::new(&p.declaration, &p.name, p.argument)));
        list.extend(outputs);
        list.push(scratch("const float *", "along", along));
        for name in &X[..a.read().len()] {
            list.push(o.get(name)?);
        }
        list.extend(bits.iter().map(|p| Param::new(&p.declaration, &p.name, p.argument)));
        let body = format!(
            "    {}_grad_{of}<{}>({q}, {k}, {v}, lse, {d}, {mask_names}, {results}, along, {}{reads}{of_bits});\n",
            form.prefix,
            form.arguments,
            scores(a)
        );
        let (rows, heads) = if queries { (s.queries, s.heads) } else { (s.keys, s.kv_heads) };
        let geometry = form.geometry(builder, rows, times(&[heads, s.batch]), 2)?;
        builder.entry(&format!("attention_{of}"), geometry, &list, &body);
        Ok(())
    };
    let outputs = vec![o.get("dq")?, o.stride("dq")?];
    entry(&mut builder, &queries, "queries", outputs, "dq, dq_stride")?;
    let outputs = vec![o.get("dk")?, o.stride("dk")?, o.get("dv")?, o.stride("dv")?];
    entry(&mut builder, &keys, "keys", outputs, "dk, dk_stride, dv, dv_stride")?;
    Ok(builder.finish())
}

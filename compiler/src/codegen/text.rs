//! Putting a source together: parameters and arguments side by side, literals, sizes that fit.
//!
//! *In*: the signature of a kernel and its [`Variant`]. *Out*: a [`Source`]. *Promise*: an
//! operand's declaration and its number follow from the signature alone.

use super::{Argument, CodegenError, HOPPER_SHARED, Language, Pass, SHARED, Source, Turns, Variant, blocks};
use crate::ir::DType;
pub(crate) use crate::op::kernel::times;
use crate::op::kernel::{KernelKind, Layout, Role, Slot, Storage};
use std::borrow::Cow;
use std::fmt::Write;

type Result<T> = std::result::Result<T, CodegenError>;

/// Threads of a block where nothing says otherwise.
pub(crate) const THREADS: u64 = 256;
/// Files that use what `sm_90a` has.
const HOPPERS: [&str; 3] = ["hopper.cuh", "flash_hopper.cuh", "e4m3.cuh"];
/// Items of a chunk of a counting sort; `CHUNK` of `route.cuh`.
pub(crate) const CHUNK: u64 = 256;

/// A literal of an f32.
pub(crate) fn float(x: f64) -> String {
    let x = x as f32;
    if x.is_nan() {
        "__int_as_float(0x7fc00000)".into()
    } else if x.is_infinite() {
        if x > 0.0 { "infinity()".into() } else { "-infinity()".into() }
    } else {
        format!("{x:?}f")
    }
}

/// A literal of an f64.
pub(crate) fn double(x: f64) -> String {
    if x.is_finite() { format!("{x:?}") } else { format!("double({})", float(x)) }
}

/// A size that the kernel counts in 32 bits.
pub(crate) fn fits(what: &'static str, size: u64) -> Result<u32> {
    match u32::try_from(size) {
        Ok(n) if n <= i32::MAX as u32 => Ok(n),
        _ => Err(CodegenError::TooLarge { what, size }),
    }
}

/// Blocks of a launch.
pub(crate) fn blocks(count: u64) -> Result<u32> {
    fits("the number of blocks", count)
}

/// A parameter of an entry, its name in the text, and what it is given.
pub(crate) struct Param {
    pub(crate) declaration: String,
    pub(crate) name: String,
    pub(crate) argument: Argument,
}

impl Param {
    pub(crate) fn new(declaration: &str, name: &str, argument: Argument) -> Self {
        Param { declaration: declaration.into(), name: name.into(), argument }
    }
}

/// For each row an integer; nobody needs the rows of negative ones.
pub(crate) fn places() -> Param {
    Param::new("const int *", "places", Argument::Places)
}

pub(crate) fn scratch(declaration: &str, name: &str, at: u64) -> Param {
    Param::new(declaration, name, Argument::Scratch(at))
}

/// A size that is an argument, so that kernels that differ in it have one text.
pub(crate) fn size(name: &str, what: &'static str, size: u64) -> Result<Param> {
    Ok(Param::new("int", name, Argument::Size(fits(what, size)?)))
}

/// A distance in memory that is an argument likewise.
pub(crate) fn stride_of(name: &str, elements: u64) -> Result<Param> {
    match u32::try_from(elements) {
        Ok(n) => Ok(Param::new("u32", name, Argument::Size(n))),
        Err(_) => Err(CodegenError::TooLarge { what: "a product's stride", size: elements }),
    }
}

/// Where an index out of range is reported.
pub(crate) fn status() -> [Param; 2] {
    [Param::new("int *", "status", Argument::Status), Param::new("int", "launch", Argument::Launch)]
}

/// The same list with the parameters of [`status`] after it.
pub(crate) fn with_status(list: Vec<Param>) -> Vec<Param> {
    list.into_iter().chain(status()).collect()
}

/// Blocks, threads of each, and dynamic shared memory.
pub(crate) type Geometry = (u32, u32, u32);

/// A thread for each of `count` items.
pub(crate) fn per_thread(count: u64) -> Result<Geometry> {
    Ok((blocks(count.div_ceil(THREADS))?, THREADS as u32, 0))
}

/// A thread for each `each` of `count` elements.
pub(crate) fn per_thread_of(count: u64, each: u64) -> Result<Geometry> {
    per_thread(count.div_ceil(each))
}

/// A warp for each of `count` items.
pub(crate) fn per_warp(count: u64) -> Result<Geometry> {
    Ok((blocks(count.div_ceil(THREADS / 32))?, THREADS as u32, 0))
}

/// Words that rows of `width` elements of `bytes` are moved in, of type `element`, and how many
/// make a row: words of 16 bytes where the operands begin and have rows at multiples of that
/// (`wide`).
pub(crate) fn words(element: &str, bytes: u64, width: u64, wide: bool) -> (String, u64) {
    let each = 16 / bytes;
    match width.is_multiple_of(each) && wide {
        true => ("Words<4>".into(), width / each),
        false => (element.into(), width),
    }
}

/// A source of one pass, an entry that calls a template with its own parameters.
pub(crate) fn one(
    name: String,
    header: &str,
    entry: &str,
    geometry: Geometry,
    list: Vec<Param>,
    template: &str,
    constants: String,
) -> Result<Option<Source>> {
    let mut builder = Builder::new(name, header);
    builder.call(entry, geometry, &list, template, &constants);
    Ok(builder.finish())
}

/// The operands of a kernel, as its signature and a variant have them, to declare as parameters.
pub(crate) struct Operands {
    slots: Vec<Slot>,
    variant: Variant,
}

impl Operands {
    pub(crate) fn of(kernel: &dyn KernelKind, variant: Variant) -> Self {
        Operands { slots: kernel.signature(), variant }
    }

    /// The number of an operand.
    pub(crate) fn at(&self, name: &str) -> Result<usize> {
        let at = self.slots.iter().position(|slot| slot.name == name);
        at.ok_or_else(|| CodegenError::Malformed(format!("there is no operand `{name}`")))
    }

    /// The C++ type of an element of operand `i`.
    fn element(&self, i: usize) -> Result<Cow<'static, str>> {
        Ok(match (self.slots[i].storage, self.variant.packed) {
            (Storage::Is(DType::F32), _) => "float".into(),
            (Storage::Is(DType::I32), _) => "int".into(),
            (Storage::Is(DType::Bf16), _) => "bf16".into(),
            (Storage::Is(DType::E4m3), _) => "u8".into(),
            (Storage::Is(DType::Packed(_)), _) => return Err(CodegenError::Packed(self.slots[i].name)),
            (Storage::Weight, Some(packed)) => blocks::block(packed).into(),
            (Storage::Float(_) | Storage::Weight, _) => self.variant.element(i).into(),
            (Storage::Any, _) => self.word()?.into(),
        })
    }

    /// The C++ type of operands that may be of any type.
    pub(crate) fn word(&self) -> Result<&'static str> {
        match self.variant.element_bytes {
            2 => Ok("u16"),
            4 => Ok("u32"),
            bytes => Err(CodegenError::Malformed(format!("elements of {bytes} bytes"))),
        }
    }

    /// Operand `i`: its address, or its value where it is an index.
    fn param(&self, i: usize, element: &str) -> Param {
        let slot = &self.slots[i];
        let name = match slot.name {
            // A word of C++.
            "do" => "d",
            name => name,
        };
        match (slot.layout, slot.role) {
            (Layout::Index(_), _) => Param::new("int", name, Argument::Index(i)),
            (_, Role::Input) => Param::new(&format!("const {element} *"), name, Argument::Operand(i)),
            (_, Role::Result | Role::Accumulated | Role::Updated) => {
                Param::new(&format!("{element} *"), name, Argument::Operand(i))
            }
        }
    }

    /// An operand's address, or its value where it is an index.
    pub(crate) fn get(&self, name: &str) -> Result<Param> {
        let i = self.at(name)?;
        Ok(self.param(i, &self.element(i)?))
    }

    /// Several addresses.
    pub(crate) fn list<const N: usize>(&self, names: [&str; N]) -> Result<Vec<Param>> {
        names.into_iter().map(|name| self.get(name)).collect()
    }

    /// An operand's address, its elements taken for words of another type.
    pub(crate) fn words(&self, name: &str, word: &str) -> Result<Param> {
        Ok(self.param(self.at(name)?, word))
    }

    /// Elements from row to row of an operand.
    pub(crate) fn stride(&self, name: &str) -> Result<Param> {
        let i = self.at(name)?;
        let name = self.param(i, "").name;
        Ok(Param::new("i64", &format!("{name}_stride"), Argument::Stride(i)))
    }

    /// All operands in order; one in rows is followed by its distance from row to row.
    pub(crate) fn all(&self) -> Result<Vec<Param>> {
        let mut list = vec![];
        for slot in &self.slots {
            list.push(self.get(slot.name)?);
            if slot.in_rows().is_some() {
                list.push(self.stride(slot.name)?);
            }
        }
        Ok(list)
    }

    /// The same where operands have no names: `x0`, `x1` and so on.
    pub(crate) fn numbered(&self) -> Result<Vec<Param>> {
        let mut list = vec![];
        for (i, slot) in self.slots.iter().enumerate() {
            let param = self.param(i, &self.element(i)?);
            list.push(Param { name: format!("x{i}"), ..param });
            if slot.in_rows().is_some() {
                list.push(Param::new("i64", &format!("x{i}_stride"), Argument::Stride(i)));
            }
        }
        Ok(list)
    }

    /// Whether operands and their rows begin at multiples of 16 bytes.
    pub(crate) fn wide(&self, names: &[&str]) -> Result<bool> {
        let numbers: Vec<usize> = names.iter().map(|name| self.at(name)).collect::<Result<_>>()?;
        Ok(numbers.into_iter().all(|i| self.variant.is_wide(i)))
    }

    /// Whether an operand is bf16.
    pub(crate) fn narrow(&self, name: &str) -> Result<bool> {
        Ok(self.variant.is_narrow(self.at(name)?))
    }

    /// Numbers of a row of `width` that a thread takes at a time, where these operands all have one
    /// type: those in 16 bytes, or one.
    pub(crate) fn numbers(&self, width: u64, names: &[&str]) -> Result<u64> {
        let numbers: Vec<usize> = names.iter().map(|name| self.at(name)).collect::<Result<_>>()?;
        let each = if numbers.iter().all(|&i| self.variant.is_narrow(i)) { 8 } else { 4 };
        Ok(if width.is_multiple_of(each) && self.wide(names)? { each } else { 1 })
    }
}

/// A source under way.
pub(crate) struct Builder {
    source: Source,
    resident: u32,
    /// Blocks of a cluster.
    cluster: u64,
    /// Shared memory of a processor.
    shared: u64,
    /// Steps of the entry that follows.
    turns: Turns,
}

impl Builder {
    pub(crate) fn new(name: String, header: &str) -> Self {
        let family = name.clone();
        Builder::of_family(name, &family, header)
    }

    /// A source whose sizes are arguments; all of its family have its text.
    pub(crate) fn of_family(name: String, family: &str, header: &str) -> Self {
        let text = format!("// {family}\n#include \"{header}\"\n");
        let language = if HOPPERS.contains(&header) { Language::Hopper } else { Language::Portable };
        Builder {
            source: Source { name, text, passes: vec![], iterations: 1, scratch: 0, language },
            resident: 1,
            cluster: 1,
            shared: SHARED,
            turns: Turns::default(),
        }
    }

    /// A source in kernel statements, which every dialect is printed from.
    pub(crate) fn statements(name: String, header: &str) -> Self {
        let mut builder = Builder::new(name, header);
        builder.source.language = Language::Statements;
        builder
    }

    /// The text is not statements, though its first lines may be.
    pub(crate) fn portable(&mut self) {
        self.source.language = Language::Portable;
    }

    /// Entries of another file, after those of a source.
    pub(crate) fn over(source: Source, header: &str) -> Self {
        let mut builder =
            Builder { source, resident: 1, cluster: 1, shared: SHARED, turns: Turns::default() };
        if builder.source.language == Language::Statements {
            builder.portable();
        }
        builder.line(&format!("#include \"{header}\""));
        builder
    }

    /// How many entries there are.
    pub(crate) fn passes(&self) -> usize {
        self.source.passes.len()
    }

    /// Text before the next entry.
    pub(crate) fn line(&mut self, line: &str) {
        self.source.text.push_str(line);
        self.source.text.push('\n');
    }

    /// Scratch memory; gives where it begins.
    pub(crate) fn scratch(&mut self, bytes: u64) -> u64 {
        let start = self.source.scratch;
        self.source.scratch = start.saturating_add(bytes).next_multiple_of(256);
        start
    }

    /// Blocks of the entries that follow that a processor should have at once: registers are found
    /// for them.
    pub(crate) fn resident(&mut self, blocks: u32) {
        self.resident = blocks;
    }

    /// The entries that follow run in clusters of `blocks` blocks.
    pub(crate) fn cluster(&mut self, blocks: u64) {
        self.cluster = blocks;
    }

    /// Steps of a thread of the entry that follows.
    pub(crate) fn turns(&mut self, turns: Turns) {
        self.turns = turns;
    }

    /// The entries that follow use what `sm_90a` has.
    pub(crate) fn hopper(&mut self) {
        self.shared = HOPPER_SHARED;
        if self.source.language != Language::Hopper {
            self.source.language = Language::Hopper;
            self.line(&format!("#include \"{}\"", HOPPERS[0]));
        }
    }

    pub(crate) fn iterations(&mut self, count: u32) {
        self.source.iterations = count;
    }

    /// An entry whose body is given; nothing where there are no blocks.
    pub(crate) fn entry(
        &mut self,
        entry: &str,
        (grid, block, shared_bytes): Geometry,
        params: &[Param],
        body: &str,
    ) {
        if grid == 0 {
            return;
        }
        let text = &mut self.source.text;
        let list: Vec<String> = params
            .iter()
            .map(|p| {
                let space = if p.declaration.ends_with('*') { "" } else { " " };
                format!("{}{space}{}", p.declaration, p.name)
            })
            .collect();
        // Blocks that a processor has at once, as far as shared memory goes: without this bound
        // ptxas guesses, and may spill.
        let by_shared = self.shared / u64::from(shared_bytes.max(1));
        let resident = u64::from(self.resident).min(by_shared).max(1);
        let cluster = match self.cluster {
            1 => String::new(),
            blocks => format!("__cluster_dims__({blocks}, 1, 1) "),
        };
        let _ = write!(text, "\nKERNEL {cluster}__launch_bounds__({block}, {resident}) {entry}(");
        // Lines of at most 120 characters.
        let mut column = 36 + cluster.len() + entry.len();
        for (i, item) in list.iter().enumerate() {
            if i > 0 {
                text.push(',');
                if column + item.len() + 2 > 116 {
                    text.push_str("\n    ");
                    column = 4;
                } else {
                    text.push(' ');
                }
            }
            text.push_str(item);
            column += item.len() + 2;
        }
        let _ = write!(text, ") {{\n{body}}}\n");
        self.source.passes.push(Pass {
            entry: entry.into(),
            grid,
            block,
            shared_bytes,
            arguments: params.iter().map(|p| p.argument).collect(),
            turns: std::mem::take(&mut self.turns),
        });
    }

    /// An entry that calls a template with its own parameters.
    pub(crate) fn call(
        &mut self,
        entry: &str,
        geometry: Geometry,
        params: &[Param],
        template: &str,
        constants: &str,
    ) {
        let names: Vec<&str> = params.iter().map(|p| p.name.as_str()).collect();
        self.entry(entry, geometry, params, &format!("    {template}<{constants}>({});\n", names.join(", ")));
    }

    pub(crate) fn finish(self) -> Option<Source> {
        (!self.source.passes.is_empty()).then_some(self.source)
    }
}

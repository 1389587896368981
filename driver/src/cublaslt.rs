//! cuBLASLt as the stand-in's cards need it: the calls that dreamc makes, with products computed on
//! the host from a card's memory.
//!
//! Documentation that the rules are from: `cublasLt.h` (13.10) and NVIDIA's *cuBLAS*, "cuBLASLt API
//! Reference"; what the real library does without a GPU was looked at (it takes a leading dimension
//! that is too small, and attributes of their exact size alone). Where something is open, what is
//! worse for the caller was taken:
//!
//! - Algorithms are for the problem, the alignments and the workspace that they were asked for, and
//!   for nothing else.
//! - All of the workspace that was asked for is overwritten.
//! - A product's first launch loads its kernel (Lazy Loading): not inside a capture.
//! - Where parts of sums may be added up in the result's type, they are.

use crate::Machine;
use crate::library::{self, Status, calls};
use crate::machine::Product;
use dreamc_ptx::{Memory, MemoryError};
use std::collections::{BTreeMap, HashSet};
use std::ffi::{c_int, c_void};

type Handle = *mut c_void;

/// `CUBLAS_STATUS_NOT_INITIALIZED`
pub const NOT_INITIALIZED: u32 = 1;
/// `CUBLAS_STATUS_INVALID_VALUE`
pub const INVALID_VALUE: u32 = 7;
/// `CUBLAS_STATUS_EXECUTION_FAILED`
pub const EXECUTION_FAILED: u32 = 13;
/// `CUBLAS_STATUS_NOT_SUPPORTED`
pub const NOT_SUPPORTED: u32 = 15;

/// 13.10.0: major times 10000 and minor times 100.
pub const VERSION: usize = 131_000;

const F32: u32 = 0;
const BF16: u32 = 14;
const COMPUTE_32F: u32 = 68;
const COMPUTE_32F_PEDANTIC: u32 = 69;

/// A matrix: `columns` columns of `rows` adjacent elements, `far` elements apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    /// `cudaDataType_t`
    pub dtype: u32,
    /// Rows.
    pub rows: u64,
    /// Columns.
    pub columns: u64,
    /// The leading dimension.
    pub far: i64,
}

impl Layout {
    /// Bytes of an element.
    pub fn size(&self) -> u64 {
        if self.dtype == BF16 { 2 } else { 4 }
    }

    /// Bytes from the first element to the end of the last.
    pub fn bytes(&self) -> u64 {
        (self.columns.saturating_sub(1) * self.far as u64 + self.rows) * self.size()
    }

    fn transposed(&self, transposed: bool) -> (u64, u64) {
        if transposed { (self.columns, self.rows) } else { (self.rows, self.columns) }
    }
}

/// The computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Description {
    /// `cublasComputeType_t`
    pub compute: u32,
    /// `cudaDataType_t` of the factors.
    pub scale: u32,
    /// Whether the left matrix is transposed.
    pub left: bool,
    /// Whether the right one is.
    pub right: bool,
}

/// Limits of an algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Preference {
    /// Bytes.
    pub workspace: u64,
    /// `cublasLtReductionScheme_t`
    pub reduction: u32,
    /// Of the left and right matrix, of C and of D.
    pub alignment: [u32; 4],
}

impl Default for Preference {
    fn default() -> Self {
        Preference { workspace: 0, reduction: 7, alignment: [256; 4] }
    }
}

/// The part of the library on the host: contexts know of the handles alone.
#[derive(Default)]
pub struct Library {
    next: u64,
    layouts: BTreeMap<u64, Layout>,
    descriptions: BTreeMap<u64, Description>,
    preferences: BTreeMap<u64, Preference>,
    /// Products whose kernels are loaded.
    pub loaded: HashSet<[u64; 8]>,
}

impl Library {
    fn new_handle(&mut self) -> u64 {
        self.next += 1;
        0x10_0000 + (self.next << 4)
    }

    /// How many descriptions of any kind there are.
    pub fn left(&self) -> usize {
        self.layouts.len() + self.descriptions.len() + self.preferences.len()
    }
}

/// The matrices of a product, in the order of the call.
#[derive(Clone, Copy, Debug)]
pub struct Matrices {
    /// Left, right, C and D.
    pub handles: [u64; 4],
}

impl Machine {
    /// `cublasLtMatrixLayoutCreate`
    pub fn layout(&mut self, layout: Layout) -> Status<u64> {
        self.ask("cublasLtMatrixLayoutCreate")?;
        let handle = self.library.new_handle();
        self.library.layouts.insert(handle, layout);
        Ok(handle)
    }

    /// `cublasLtMatmulDescCreate`
    pub fn description(&mut self, compute: u32, scale: u32) -> Status<u64> {
        self.ask("cublasLtMatmulDescCreate")?;
        let handle = self.library.new_handle();
        let description = Description { compute, scale, left: false, right: false };
        self.library.descriptions.insert(handle, description);
        Ok(handle)
    }

    /// `cublasLtMatmulDescSetAttribute`, of those that anyone set so far.
    pub fn set_description(&mut self, handle: u64, attribute: u32, value: &[u8]) -> Status<()> {
        self.ask("cublasLtMatmulDescSetAttribute")?;
        let value: [u8; 4] = value.try_into().map_err(|_| INVALID_VALUE)?;
        let transposed = match i32::from_ne_bytes(value) {
            0 => false,
            1 => true,
            _ => return Err(INVALID_VALUE),
        };
        let description = self.library.descriptions.get_mut(&handle).ok_or(INVALID_VALUE)?;
        match attribute {
            3 => description.left = transposed,
            4 => description.right = transposed,
            _ => return Err(INVALID_VALUE),
        }
        Ok(())
    }

    /// `cublasLtMatmulPreferenceCreate`
    pub fn preference(&mut self) -> Status<u64> {
        self.ask("cublasLtMatmulPreferenceCreate")?;
        let handle = self.library.new_handle();
        self.library.preferences.insert(handle, Preference::default());
        Ok(handle)
    }

    /// `cublasLtMatmulPreferenceSetAttribute`, likewise.
    pub fn set_preference(&mut self, handle: u64, attribute: u32, value: &[u8]) -> Status<()> {
        self.ask("cublasLtMatmulPreferenceSetAttribute")?;
        let preference = self.library.preferences.get_mut(&handle).ok_or(INVALID_VALUE)?;
        let word = || value.try_into().map(u32::from_ne_bytes).map_err(|_| INVALID_VALUE);
        match attribute {
            1 => preference.workspace = u64::from_ne_bytes(value.try_into().map_err(|_| INVALID_VALUE)?),
            3 => preference.reduction = word()?,
            5..=8 => preference.alignment[attribute as usize - 5] = word()?,
            _ => return Err(INVALID_VALUE),
        }
        Ok(())
    }

    /// `cublasLt...Destroy` of what is on the host.
    pub fn forget(&mut self, handle: u64) -> Status<()> {
        let l = &mut self.library;
        let known = l.layouts.remove(&handle).is_some()
            || l.descriptions.remove(&handle).is_some()
            || l.preferences.remove(&handle).is_some();
        if known {
            return Ok(());
        }
        self.complain(format!("cuBLASLt: {handle:#x} is destroyed, which is nothing"));
        Err(INVALID_VALUE)
    }

    /// A problem that makes sense, with what identifies it; the matrices must be alive.
    fn problem(&mut self, description: u64, m: Matrices) -> Status<(Description, [Layout; 4])> {
        let l = &self.library;
        let layouts = m.handles.map(|handle| l.layouts.get(&handle).copied());
        let (Some(&d), [Some(left), Some(right), Some(c), Some(result)]) =
            (l.descriptions.get(&description), layouts)
        else {
            self.complain("cuBLASLt: a product of descriptions that are not".into());
            return Err(INVALID_VALUE);
        };
        let layouts = [left, right, c, result];
        let types = [left, right, c, result].map(|layout| layout.dtype);
        let known = matches!(types, [BF16, BF16, BF16, BF16] | [BF16, BF16, F32, F32] | [F32, F32, F32, F32]);
        if !matches!(d.compute, COMPUTE_32F | COMPUTE_32F_PEDANTIC) || d.scale != F32 || !known {
            return Err(NOT_SUPPORTED);
        }
        let (left_is, right_is) = (left.transposed(d.left), right.transposed(d.right));
        let fits = left_is.1 == right_is.0
            && (result.rows, result.columns) == (left_is.0, right_is.1)
            && (c.rows, c.columns) == (result.rows, result.columns);
        let lie = |layout: &Layout| layout.rows > 0 && layout.columns > 0 && layout.far >= layout.rows as i64;
        if !fits || !layouts.iter().all(lie) {
            self.complain(format!("cuBLASLt: matrices that do not fit: {d:?} of {layouts:?}"));
            return Err(INVALID_VALUE);
        }
        Ok((d, layouts))
    }

    /// `cublasLtMatmulAlgoGetHeuristic`: the only algorithm, and the workspace that it needs.
    /// `None`: none within the workspace.
    pub fn heuristic(
        &mut self,
        handle: u64,
        description: u64,
        m: Matrices,
        preference: u64,
    ) -> Status<Option<([u64; 8], u64)>> {
        self.ask("cublasLtMatmulAlgoGetHeuristic")?;
        self.of_this_context(handle)?;
        let (d, layouts) = self.problem(description, m)?;
        let Some(&p) = self.library.preferences.get(&preference) else { return Err(INVALID_VALUE) };
        // Leading dimensions are aligned as pointers are, or not counted on.
        let needed = (4 * layouts[3].rows * layouts[3].columns).next_multiple_of(256);
        if p.reduction & 2 == 0 || needed > p.workspace {
            return Ok(Some((algorithm(&d, &layouts, &p, 0), 0)));
        }
        Ok(Some((algorithm(&d, &layouts, &p, needed), needed)))
    }

    /// `cublasLtMatmul`
    #[allow(clippy::too_many_arguments, reason = "the library's")]
    pub fn matmul(
        &mut self,
        handle: u64,
        description: u64,
        (alpha, beta): (f32, f32),
        addresses: [u64; 4],
        m: Matrices,
        algorithm: [u64; 8],
        (workspace, bytes): (u64, u64),
        stream: u64,
    ) -> Status<()> {
        self.ask("cublasLtMatmul")?;
        self.of_this_context(handle)?;
        let (d, layouts) = self.problem(description, m)?;
        let [identity, needed, alignment, reduction, ..] = algorithm;
        if identity != identify(&d, &layouts) {
            self.complain("cuBLASLt: an algorithm of another problem".into());
            return Err(INVALID_VALUE);
        }
        if needed > bytes || (needed > 0 && workspace % 256 != 0) {
            self.complain(format!(
                "cuBLASLt: {bytes} bytes of workspace at {workspace:#x}, and {needed} are needed"
            ));
            return Err(INVALID_VALUE);
        }
        for (i, address) in addresses.into_iter().enumerate() {
            let promised = 1u64 << (alignment >> (8 * i) & 0xff);
            if address % promised != 0 {
                self.complain(format!(
                    "cuBLASLt: matrix {i} at {address:#x}, where {promised} bytes were promised"
                ));
                return Err(NOT_SUPPORTED);
            }
        }
        let in_place = addresses[2] == addresses[3] && m.handles[2] == m.handles[3];
        if beta != 0.0 && !in_place && addresses[2] == addresses[3] {
            self.complain("cuBLASLt: in place with two layouts".into());
            return Err(INVALID_VALUE);
        }
        let product = Product {
            description: d,
            layouts,
            addresses,
            alpha,
            beta,
            workspace: (workspace, needed),
            coarse: reduction & 5 != 0,
        };
        self.give_product(stream, algorithm, product)
    }
}

/// The purpose of an algorithm, in a number.
fn identify(d: &Description, layouts: &[Layout; 4]) -> u64 {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    (d, layouts).hash(&mut hasher);
    hasher.finish()
}

fn algorithm(d: &Description, layouts: &[Layout; 4], p: &Preference, needed: u64) -> [u64; 8] {
    let alignment =
        p.alignment.iter().rev().fold(0, |all, bytes| all << 8 | u64::from(bytes.trailing_zeros()));
    [identify(d, layouts), needed, alignment, p.reduction.into(), 0, 0, 0, 0]
}

/// Computes a product in a card's memory; `wrong`: not that.
pub fn compute(p: &Product, memory: &mut Memory, wrong: bool) -> Result<(), MemoryError> {
    let [left, right, c, result] = p.layouts;
    let (workspace, needed) = p.workspace;
    memory.write(workspace, &vec![0xff; needed as usize])?;
    let a = values(left, &memory.read(p.addresses[0], left.bytes())?);
    let b = values(right, &memory.read(p.addresses[1], right.bytes())?);
    let was = if p.beta == 0.0 { vec![] } else { values(c, &memory.read(p.addresses[2], c.bytes())?) };
    let at = |layout: Layout, transposed: bool, i: u64, j: u64| {
        let (i, j) = if transposed { (j, i) } else { (i, j) };
        (i + j * layout.far as u64) as usize
    };
    let depth = left.transposed(p.description.left).1;
    for j in 0..result.columns {
        let mut column = vec![];
        for i in 0..result.rows {
            let term = |k: u64| {
                let (x, y) = (at(left, p.description.left, i, k), at(right, p.description.right, k, j));
                f64::from(a[x]) * f64::from(b[y])
            };
            let part = |from, to| (from..to).map(term).sum::<f64>();
            let round = |x: f64| f64::from(f32::from_bits(narrowed(x as f32)));
            // In two parts, each of the result's type, where that was allowed.
            let sum = match p.coarse && result.dtype == BF16 {
                true => round(part(0, depth / 2)) + round(part(depth / 2, depth)),
                false => part(0, depth),
            };
            let mut value = if wrong { 0.0 } else { p.alpha * sum as f32 };
            if p.beta != 0.0 {
                value += p.beta * was[(i + j * c.far as u64) as usize];
            }
            match result.dtype {
                BF16 => column.extend(((narrowed(value) >> 16) as u16).to_le_bytes()),
                _ => column.extend(value.to_le_bytes()),
            }
        }
        memory.write(p.addresses[3] + j * result.far as u64 * result.size(), &column)?;
    }
    Ok(())
}

/// Bits of the nearest bf16, ties to even, as an f32's.
fn narrowed(x: f32) -> u32 {
    let bits = x.to_bits();
    if x.is_nan() { bits | 0x40_0000 } else { bits.wrapping_add(0x7fff + (bits >> 16 & 1)) & 0xffff_0000 }
}

fn values(layout: Layout, bytes: &[u8]) -> Vec<f32> {
    match layout.dtype {
        BF16 => bytes
            .chunks_exact(2)
            .map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16))
            .collect(),
        _ => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
    }
}

/// Writes a result.
fn give<T>(to: *mut T, value: Status<T>) -> Status<()> {
    library::give(INVALID_VALUE, to, value)
}

/// The bytes of an attribute.
fn attribute<'a>(value: *const c_void, bytes: usize) -> Status<&'a [u8]> {
    if value.is_null() || bytes > 64 {
        return Err(INVALID_VALUE);
    }
    // SAFETY: as many bytes as the caller says, during the call.
    Ok(unsafe { std::slice::from_raw_parts(value.cast(), bytes) })
}

calls! {
    NOT_INITIALIZED;
    cublasLtCreate(to: *mut Handle) => |m, to| give(to, m.create_library().map(|h| h as Handle));
    cublasLtDestroy(handle: Handle) => |m, handle| m.destroy_library(handle as u64);
    cublasLtMatrixLayoutCreate(to: *mut Handle, dtype: u32, rows: u64, columns: u64, far: i64) =>
        |m, to, dtype, rows, columns, far| {
            give(to, m.layout(Layout { dtype, rows, columns, far }).map(|h| h as Handle))
        };
    cublasLtMatrixLayoutDestroy(handle: Handle) => |m, handle| m.forget(handle as u64);
    cublasLtMatmulDescCreate(to: *mut Handle, compute: u32, scale: u32) =>
        |m, to, compute, scale| give(to, m.description(compute, scale).map(|h| h as Handle));
    cublasLtMatmulDescSetAttribute(handle: Handle, which: u32, value: *const c_void, bytes: usize) =>
        |m, handle, which, value, bytes| m.set_description(handle as u64, which, attribute(value, bytes)?);
    cublasLtMatmulDescDestroy(handle: Handle) => |m, handle| m.forget(handle as u64);
    cublasLtMatmulPreferenceCreate(to: *mut Handle) => |m, to| give(to, m.preference().map(|h| h as Handle));
    cublasLtMatmulPreferenceSetAttribute(handle: Handle, which: u32, value: *const c_void, bytes: usize) =>
        |m, handle, which, value, bytes| m.set_preference(handle as u64, which, attribute(value, bytes)?);
    cublasLtMatmulPreferenceDestroy(handle: Handle) => |m, handle| m.forget(handle as u64);
    cublasLtMatmulAlgoGetHeuristic(
        handle: Handle, description: Handle, left: Handle, right: Handle, c: Handle, result: Handle, preference: Handle,
        wanted: c_int, to: *mut Heuristic, count: *mut c_int
    ) => |m, handle, description, left, right, c, result, preference, wanted, to, count| {
        if wanted < 1 {
            return Err(INVALID_VALUE);
        }
        let matrices = Matrices { handles: [left, right, c, result].map(|h| h as u64) };
        let found = m.heuristic(handle as u64, description as u64, matrices, preference as u64)?;
        give(count, Ok(found.is_some().into()))?;
        let Some((algorithm, workspace)) = found else { return Ok(()) };
        give(to, Ok(Heuristic { algorithm, workspace: workspace as usize, state: 0, waves: 1.0, reserved: [0; 4] }))
    };
    cublasLtMatmul(
        handle: Handle, description: Handle, alpha: *const f32, a: u64, left: Handle, b: u64, right: Handle, beta: *const f32,
        c: u64, of_c: Handle, d: u64, result: Handle, algorithm: *const [u64; 8], workspace: u64, bytes: usize, stream: Handle
    ) => |m, handle, description, alpha, a, left, b, right, beta, c, of_c, d, result, algorithm, workspace, bytes, stream| {
        if alpha.is_null() || beta.is_null() || algorithm.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: factors on the host and an algorithm, by the caller's promise.
        let (factors, algorithm) = unsafe { ((*alpha, *beta), *algorithm) };
        let matrices = Matrices { handles: [left, right, of_c, result].map(|h| h as u64) };
        let workspace = (workspace, bytes as u64);
        m.matmul(handle as u64, description as u64, factors, [a, b, c, d], matrices, algorithm, workspace, stream as u64)
    };
}

/// `cublasLtMatmulHeuristicResult_t`
#[repr(C)]
pub struct Heuristic {
    algorithm: [u64; 8],
    workspace: usize,
    state: u32,
    waves: f32,
    reserved: [i32; 4],
}

/// As NVIDIA documents it.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetVersion() -> usize {
    VERSION
}

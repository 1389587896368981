//! cuBLASLt, NVIDIA's library of matrix products, loaded where it is and missed politely where it
//! is not.
//!
//! *In*: a [`Dense`] product and a context that is current. *Out*: the product as the library
//! prepares it, ready to be launched on a stream. *Promise*: nothing panics where the library or
//! one of its calls is missing; sums are in f32, of f32 operands without TF32; the algorithm is the
//! first that the library's heuristic names for the product's shape, layouts, types, alignments and
//! workspace, which is the same in every process.
//!
//! The library is not linked. The search, first hit wins: what `DREAMC_NVRTC` names, or the folder
//! that it is in; then where NVRTC is looked for; at last the loader's own paths. It has to be of
//! CUDA 12 or newer. Its calls, codes and defaults are those of `cublasLt.h` (13.10) and of
//! *cuBLAS*, section "Using the cuBLASLt API".

use crate::backend::foreign::{calls, first, version};
use crate::gpu::{Dense, Side};
use cudarc::cublaslt::sys;
use dreamc_nvrtc::search::{library_in, usual_places};
use libloading::Library;
use std::ffi::c_void;
use std::fmt;
use std::path::PathBuf;
use std::ptr::null_mut;
use std::sync::OnceLock;

type Raw = *mut c_void;

calls! {
    cublasLtGetVersion() -> usize;
    cublasLtCreate(*mut Raw) -> u32;
    cublasLtDestroy(Raw) -> u32;
    cublasLtMatrixLayoutCreate(*mut Raw, u32, u64, u64, i64) -> u32;
    cublasLtMatrixLayoutDestroy(Raw) -> u32;
    cublasLtMatmulDescCreate(*mut Raw, u32, u32) -> u32;
    cublasLtMatmulDescSetAttribute(Raw, u32, *const c_void, usize) -> u32;
    cublasLtMatmulDescDestroy(Raw) -> u32;
    cublasLtMatmulPreferenceCreate(*mut Raw) -> u32;
    cublasLtMatmulPreferenceSetAttribute(Raw, u32, *const c_void, usize) -> u32;
    cublasLtMatmulPreferenceDestroy(Raw) -> u32;
    cublasLtMatmulAlgoGetHeuristic(Raw, Raw, Raw, Raw, Raw, Raw, Raw, i32, *mut Heuristic, *mut i32) -> u32;
    cublasLtMatmul(
        Raw, Raw, *const c_void, u64, Raw, u64, Raw, *const c_void, u64, Raw, u64, Raw, *const [u64; 8], u64, usize, Raw
    ) -> u32;
}

/// `cublasLtMatmulHeuristicResult_t`
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Heuristic {
    algorithm: [u64; 8],
    workspace: usize,
    state: u32,
    waves: f32,
    reserved: [i32; 4],
}

/// A call that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    call: &'static str,
    code: u32,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use sys::cublasStatus_t::*;
        let known = [
            CUBLAS_STATUS_NOT_INITIALIZED,
            CUBLAS_STATUS_ALLOC_FAILED,
            CUBLAS_STATUS_INVALID_VALUE,
            CUBLAS_STATUS_ARCH_MISMATCH,
            CUBLAS_STATUS_MAPPING_ERROR,
            CUBLAS_STATUS_EXECUTION_FAILED,
            CUBLAS_STATUS_INTERNAL_ERROR,
            CUBLAS_STATUS_NOT_SUPPORTED,
            CUBLAS_STATUS_LICENSE_ERROR,
        ];
        match known.into_iter().find(|&k| k as u32 == self.code) {
            Some(name) => write!(f, "{}: {name:?}", self.call),
            None => write!(f, "{}: status {}", self.call, self.code),
        }
    }
}

fn check(call: &'static str, code: u32) -> Result<(), Refusal> {
    if code == 0 { Ok(()) } else { Err(Refusal { call, code }) }
}

/// The library as found on this machine.
pub(super) struct CublasLt {
    calls: Calls,
    /// Major, minor, patch.
    version: [usize; 3],
    _library: Library,
}

impl CublasLt {
    /// Looks for it, once per process; an error says where, or what is wrong with what was found,
    /// and what to install.
    pub(super) fn find() -> Result<&'static CublasLt, &'static str> {
        static FOUND: OnceLock<Result<CublasLt, String>> = OnceLock::new();
        FOUND.get_or_init(CublasLt::load).as_ref().map_err(String::as_str)
    }

    fn load() -> Result<CublasLt, String> {
        const INSTALL: &str = "install it with `pip install nvidia-cublas` in the virtual environment that has NVRTC, or install the \
                               CUDA toolkit";
        let mut places: Vec<PathBuf> = vec![];
        if let Some(named) = std::env::var_os("DREAMC_NVRTC").filter(|v| !v.is_empty()).map(PathBuf::from) {
            places.push(if named.is_file() {
                named.parent().map(Into::into).unwrap_or(named)
            } else {
                named
            });
        }
        places.extend(usual_places());
        let there = places.iter().find_map(|place| library_in(place, "libcublasLt.so"));
        let plain = ["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"];
        let names = there.clone().map_or(plain.map(PathBuf::from).to_vec(), |file| vec![file]);
        let (library, at) = match first(&names) {
            Ok(found) => found,
            Err(reason) if there.is_some() => {
                return Err(format!("cuBLASLt does not load ({reason}); {INSTALL}"));
            }
            Err(_) => {
                let searched: Vec<String> = places.iter().map(|place| place.display().to_string()).collect();
                return Err(format!(
                    "cuBLASLt was not found (looked in {}, the loader's paths); {INSTALL}",
                    searched.join(", ")
                ));
            }
        };
        let calls = Calls::of(&library)
            .map_err(|error| format!("cuBLASLt at {at} lacks a call ({error}); {INSTALL}"))?;
        // SAFETY: it takes nothing.
        let version = version(unsafe { (calls.cublasLtGetVersion)() });
        if version[0] < 12 {
            return Err(format!(
                "cuBLASLt at {at} is of CUDA {}, and 12 or newer is needed; {INSTALL}",
                version[0]
            ));
        }
        Ok(CublasLt { calls, version, _library: library })
    }

    /// `cuBLASLt 13.10.0`
    pub(super) fn name(&self) -> String {
        format!("cuBLASLt {}", self.version.map(|n| n.to_string()).join("."))
    }

    /// A product and what its algorithm may need, which takes no GPU.
    fn describe(&self, dense: &Dense, workspace: u64) -> Result<Described, Refusal> {
        use sys::cublasComputeType_t::{CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_PEDANTIC};
        use sys::cublasLtMatmulDescAttributes_t::{CUBLASLT_MATMUL_DESC_TRANSA, CUBLASLT_MATMUL_DESC_TRANSB};
        use sys::cublasLtMatmulPreferenceAttributes_t::*;
        use sys::cudaDataType::{CUDA_R_16BF, CUDA_R_32F};
        let calls = &self.calls;
        let float = |narrow: bool| if narrow { CUDA_R_16BF } else { CUDA_R_32F } as u32;
        // Of f32 without what would make products coarser; bf16 has nothing coarser.
        let compute = if dense.narrow { CUBLAS_COMPUTE_32F } else { CUBLAS_COMPUTE_32F_PEDANTIC } as u32;
        // SAFETY, of this and what follows: places for handles, live handles, and values of the
        // sizes that are said.
        let make = |to| unsafe { (calls.cublasLtMatmulDescCreate)(to, compute, CUDA_R_32F as u32) };
        let description = self.create("cublasLtMatmulDescCreate", make, calls.cublasLtMatmulDescDestroy)?;
        let sides = [(CUBLASLT_MATMUL_DESC_TRANSA, dense.left), (CUBLASLT_MATMUL_DESC_TRANSB, dense.right)];
        for (attribute, side) in sides {
            let transposed = i32::from(side.transposed);
            check("cublasLtMatmulDescSetAttribute", unsafe {
                let value = (&raw const transposed).cast();
                (calls.cublasLtMatmulDescSetAttribute)(description.raw, attribute as u32, value, 4)
            })?;
        }
        let layout = |side: Side, narrow: bool| {
            let make = |to| unsafe {
                (calls.cublasLtMatrixLayoutCreate)(
                    to,
                    float(narrow),
                    side.rows,
                    side.columns,
                    side.far as i64,
                )
            };
            self.create("cublasLtMatrixLayoutCreate", make, calls.cublasLtMatrixLayoutDestroy)
        };
        let left = layout(dense.left, dense.narrow)?;
        let right = layout(dense.right, dense.narrow)?;
        let result = layout(dense.result(), dense.narrow_result)?;

        let make = |to| unsafe { (calls.cublasLtMatmulPreferenceCreate)(to) };
        let preference =
            self.create("cublasLtMatmulPreferenceCreate", make, calls.cublasLtMatmulPreferenceDestroy)?;
        let set = |attribute: sys::cublasLtMatmulPreferenceAttributes_t, value: &[u8]| {
            check("cublasLtMatmulPreferenceSetAttribute", unsafe {
                let (at, bytes) = (value.as_ptr().cast(), value.len());
                (calls.cublasLtMatmulPreferenceSetAttribute)(preference.raw, attribute as u32, at, bytes)
            })
        };
        set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace.to_ne_bytes())?;
        // Sums that are cut in parts are added up in f32, too, whatever the result's type.
        let parts = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &parts.to_ne_bytes())?;
        // Without these it counts on 256 bytes.
        let [a, b, c] = dense.alignment.map(|bytes| bytes as u32);
        for (attribute, bytes) in [
            (CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b),
            (CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a),
            (CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c),
            (CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, c),
        ] {
            set(attribute, &bytes.to_ne_bytes())?;
        }
        Ok(Described { description, left, right, result, preference })
    }

    fn create(
        &self,
        call: &'static str,
        make: impl FnOnce(*mut Raw) -> u32,
        destroy: unsafe extern "C" fn(Raw) -> u32,
    ) -> Result<Owned, Refusal> {
        let mut raw = null_mut();
        check(call, make(&mut raw))?;
        Ok(Owned { raw, destroy })
    }
}

/// Something of the library's, destroyed once.
struct Owned {
    raw: Raw,
    destroy: unsafe extern "C" fn(Raw) -> u32,
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: made by the library with the call that this one belongs to. There is no one to
        // tell of a failure.
        let _ = unsafe { (self.destroy)(self.raw) };
    }
}

/// The library at work in one context, which must be current whenever this is used or dropped.
pub(super) struct Handle {
    library: &'static CublasLt,
    handle: Owned,
}

/// The request for an algorithm.
struct Described {
    description: Owned,
    left: Owned,
    right: Owned,
    result: Owned,
    preference: Owned,
}

/// A product with the algorithm that computes it.
pub(super) struct Product {
    description: Owned,
    left: Owned,
    right: Owned,
    result: Owned,
    algorithm: [u64; 8],
    accumulate: bool,
}

// SAFETY: descriptions are memory of the host that nothing else knows of.
unsafe impl Send for Product {}

impl Handle {
    pub(super) fn new(library: &'static CublasLt) -> Result<Handle, Refusal> {
        let calls = &library.calls;
        // SAFETY: a place for the handle.
        let make = |to| unsafe { (calls.cublasLtCreate)(to) };
        let handle = library.create("cublasLtCreate", make, calls.cublasLtDestroy)?;
        Ok(Handle { library, handle })
    }

    /// Describes a product and asks for an algorithm that needs at most `workspace` bytes of
    /// workspace.
    pub(super) fn product(&self, dense: &Dense, workspace: u64) -> Result<Product, Refusal> {
        let Described { description, left, right, result, preference } =
            self.library.describe(dense, workspace)?;
        let (mut first, mut found) = (Heuristic::default(), 0);
        let call = "cublasLtMatmulAlgoGetHeuristic";
        check(call, unsafe {
            (self.library.calls.cublasLtMatmulAlgoGetHeuristic)(
                self.handle.raw,
                description.raw,
                left.raw,
                right.raw,
                result.raw,
                result.raw,
                preference.raw,
                1,
                &mut first,
                &mut found,
            )
        })?;
        let none = sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED as u32;
        check(call, if found < 1 || first.workspace as u64 > workspace { none } else { first.state })?;
        let accumulate = dense.accumulate;
        Ok(Product { description, left, right, result, algorithm: first.algorithm, accumulate })
    }

    /// Launches a product on a stream of the current context; returns before it is done. `operands`
    /// are the addresses of `a`, `b` and `c`; `workspace` is an address at a multiple of 256 bytes
    /// and how many bytes there are.
    ///
    /// # Safety
    /// The operands are as the product's [`Dense`] says, and all memory stays until the stream has
    /// come to its end.
    pub(super) unsafe fn multiply(
        &self,
        product: &Product,
        [a, b, c]: [u64; 3],
        workspace: (u64, u64),
        stream: Raw,
    ) -> Result<(), Refusal> {
        // Read during the call.
        let (alpha, beta) = (1.0f32, if product.accumulate { 1.0f32 } else { 0.0 });
        // SAFETY: live handles; memory by the caller's promise.
        check("cublasLtMatmul", unsafe {
            (self.library.calls.cublasLtMatmul)(
                self.handle.raw,
                product.description.raw,
                (&raw const alpha).cast(),
                b,
                product.left.raw,
                a,
                product.right.raw,
                (&raw const beta).cast(),
                c,
                product.result.raw,
                c,
                product.result.raw,
                &product.algorithm,
                workspace.0,
                workspace.1 as usize,
                stream,
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_has_the_librarys_words() {
        let of = |code| Refusal { call: "cublasLtMatmul", code }.to_string();
        assert_eq!(of(15), "cublasLtMatmul: CUBLAS_STATUS_NOT_SUPPORTED");
        assert_eq!(of(99), "cublasLtMatmul: status 99");
        assert_eq!(size_of::<Heuristic>(), size_of::<sys::cublasLtMatmulHeuristicResult_t>());
    }
    /// All that it can be asked without a GPU, where there is one (`pip install nvidia-cublas`
    /// where NVRTC is).
    #[test]
    fn the_library_takes_our_descriptions() {
        let library = match CublasLt::find() {
            Ok(library) => library,
            Err(why) => {
                assert!(why.contains("pip install nvidia-cublas"), "{why}");
                return dreamc_skip::skip(why);
            }
        };
        println!("{}", library.name());
        assert!(library.version[0] >= 12);
        for (narrow, narrow_result) in [(false, false), (true, false), (true, true)] {
            let left = Side { rows: 6, columns: 8, far: 6, transposed: false };
            let right = Side { rows: 4, columns: 8, far: 8, transposed: true };
            let alignment = [256, 16, 4];
            let dense = Dense { m: 4, n: 6, left, right, narrow, narrow_result, accumulate: true, alignment };
            assert!(library.describe(&dense, 32 << 20).is_ok());
        }
    }
}

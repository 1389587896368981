//! Apple's GPUs by Metal.
//!
//! *In*: texts of the Metal shading language whose kernels take one structure of arguments
//! (`compiler/src/statement/print.rs`), addresses and launches. *Out*: memory of the GPU, changed.
//! *Promise*: launches run in the order in which they were given; reading and writing wait for all
//! of them; on other systems [`Card::new`] says so.
//!
//! Addresses are the GPU's own (`gpuAddress`), which Metal 3 has: macOS 13 on Apple silicon.
//!
//! No GPU of Apple's has run this. It is held to the bindings' types by a build for
//! `aarch64-apple-darwin`, and the texts to Clang (`tests/gpu/naive.rs`).

#[cfg(target_os = "macos")]
mod system;
#[cfg(target_os = "macos")]
pub use system::{Card, Code, Memory};

#[cfg(not(target_os = "macos"))]
mod elsewhere;
#[cfg(not(target_os = "macos"))]
pub use elsewhere::{Card, Code, Memory};

/// An argument at its place in a structure of C: numbers begin at multiples of their size.
pub fn arguments<'a>(list: impl IntoIterator<Item = &'a [u8]>) -> Vec<u8> {
    let mut structure: Vec<u8> = vec![];
    for bytes in list {
        structure.resize(structure.len().next_multiple_of(bytes.len().max(1)), 0);
        structure.extend(bytes);
    }
    // A structure is as long as its widest number asks, which addresses are.
    structure.resize(structure.len().next_multiple_of(8), 0);
    structure
}

/// Why memory could not be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The memory is too small.
    Full,
    /// The system's words.
    Failed(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_where_c_has_them() {
        let list = [&1u64.to_le_bytes()[..], &2u32.to_le_bytes(), &3u64.to_le_bytes(), &4u32.to_le_bytes()];
        let structure = arguments(list);
        assert_eq!(structure.len(), 32);
        assert_eq!([structure[0], structure[8], structure[16], structure[24]], [1, 2, 3, 4]);
        assert!(arguments([]).is_empty());
    }

    #[test]
    fn another_system_says_so() {
        if cfg!(not(target_os = "macos")) {
            assert!(Card::new(0).is_err_and(|message| message.contains("macOS")));
        }
    }
}

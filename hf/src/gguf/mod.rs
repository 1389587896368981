//! Models of llama.cpp, both ways: files in its format, GGUF.
//!
//! *In*: such a file ([`import`]), or weights of dreamc ([`export`]). *Out*: the other. *Promise*:
//! what comes out computes what went in, or nothing comes out: an architecture, a key, a tensor or
//! a type that is not known is refused by its name, and no length of a file is trusted.
//!
//! [`file`] is the format, [`family`] has one table of tensors for both ways, [`fields`] are keys
//! of sizes and `config.json`, [`vocab`] is the tokenizer, [`scales`] are those of whole tensors.

pub mod export;
pub mod family;
mod fields;
pub mod file;
pub mod import;
mod scales;
pub mod value;
mod vocab;

//! The CUDA of choosing tokens and moving their rows.

use super::kernel::{PutTokens, TakeTokens, TopTokens};
use crate::codegen::text::{Builder, Operands, THREADS, fits, one, per_thread, times, with_status, words};
use crate::codegen::{CodegenError, Source, Variant};
use crate::ir::DType;

type Result<T> = std::result::Result<T, CodegenError>;

pub(super) fn top_tokens(kernel: &TopTokens, variant: Variant) -> Result<Option<Source>> {
    let &TopTokens { batch, tokens, k } = kernel;
    let grid = fits("sequences", batch)?;
    let list = Operands::of(kernel, variant).all()?;
    let name = format!("top_tokens_{batch}x{tokens}_{k}");
    let constants = format!("{}, {}, {THREADS}", fits("tokens", tokens)?, fits("the choice", k)?);
    let grid = (if k == 0 { 0 } else { grid }, THREADS as u32, 0);
    one(name, "tokens.cuh", "top_tokens_of", grid, list, "top_tokens", constants)
}

/// The type that words of a row have, and the word of a row at no place.
fn word_of(dtype: DType) -> Result<(&'static str, &'static str)> {
    Ok(match dtype {
        DType::F32 => ("u32", "0x80000000u"),
        DType::I32 => ("u32", "0xffffffffu"),
        DType::Bf16 => ("u16", "0x80008000u"),
        DType::E4m3 | DType::Packed(_) => return Err(CodegenError::Packed("x")),
    })
}

pub(super) fn take_tokens(kernel: &TakeTokens, variant: Variant) -> Result<Option<Source>> {
    let &TakeTokens { batch, tokens, k, width, dtype } = kernel;
    let o = Operands::of(kernel, variant);
    let (word, none) = word_of(dtype)?;
    fits("tokens", times(&[batch, tokens]))?;
    let name = format!("take_tokens_{batch}x{tokens}x{width}_{k}_{word}_{none}");
    let (word, width) = words(word, dtype.bytes(), width, o.wide(&["x", "y"])?);
    let list = with_status(vec![o.words("x", &word)?, o.get("index")?, o.words("y", &word)?]);
    let constants = format!("{word}, {batch}, {tokens}, {k}, {width}");
    let grid = per_thread(times(&[batch, k, width]))?;
    one(name, "tokens.cuh", "take_tokens_out", grid, list, "take_tokens", constants)
}

pub(super) fn put_tokens(kernel: &PutTokens, variant: Variant) -> Result<Option<Source>> {
    let &PutTokens { batch, tokens, k, width, dtype } = kernel;
    let o = Operands::of(kernel, variant);
    let (word, none) = word_of(dtype)?;
    fits("tokens", times(&[batch, tokens]))?;
    let name = format!("put_tokens_{batch}x{tokens}x{width}_{k}_{word}_{none}");
    let (word, width) = words(word, dtype.bytes(), width, o.wide(&["x", "y"])?);
    let mut builder = Builder::new(name, "tokens.cuh");
    let count = times(&[batch, tokens, width]);
    let constants = format!("{word}, {count}, {none}");
    builder.call("fill_tokens", per_thread(count)?, &[o.words("y", &word)?], "fill", &constants);
    let list = with_status(vec![o.words("x", &word)?, o.get("index")?, o.words("y", &word)?]);
    let constants = format!("{word}, {batch}, {tokens}, {k}, {width}");
    let grid = per_thread(times(&[batch, k, width]))?;
    builder.call("put_tokens_back", grid, &list, "put_tokens", &constants);
    Ok(builder.finish())
}

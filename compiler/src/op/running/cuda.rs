//! The CUDA of running sums: a thread has a channel of a sequence, its neighbours those next to it.

use super::kernel::Running;
use crate::codegen::text::{Operands, fits, one, per_thread, times};
use crate::codegen::{CodegenError, Source, Variant};
use crate::op::Tokens;

pub(super) fn running(kernel: &Running, variant: Variant) -> Result<Option<Source>, CodegenError> {
    let &Running { batch, tokens, channels, reverse, of, block: _ } = kernel;
    let list = Operands::of(kernel, variant).all()?;
    let sizes = [("sequences", batch), ("tokens", tokens), ("channels", channels)];
    let [b, t, c] = sizes.map(|(what, size)| fits(what, size));
    let (kind, template) = match of {
        Tokens::All => ("running", "running_rows"),
        Tokens::Segments => ("running_segments", "running_documents"),
        Tokens::Kept => ("running_kept", "running_continue"),
    };
    let reversed = if reverse { "_reverse" } else { "" };
    let name = format!("{kind}{reversed}_{batch}x{tokens}x{channels}");
    let constants = format!("{}, {}, {}, {reverse}", b?, t?, c?);
    one(
        name,
        "running.cuh",
        "running_channels",
        per_thread(times(&[batch, channels]))?,
        list,
        template,
        constants,
    )
}

//! Whether a plan fits, and what to change where it does not.

use crate::DeviceError;
use dreamc_compiler::program::{Plan, Space};

/// Refuses a plan that needs more than there is, naming what takes most of it. `needed` is all of
/// it, as memory is handed out; `copied` bytes are of weights as their file has them.
pub(super) fn check(
    device: &str,
    plan: &Plan,
    (scratch, copied): (u64, u64),
    needed: u64,
    free: u64,
) -> Result<(), DeviceError> {
    if needed <= free {
        return Ok(());
    }
    let of = |spaces: &[Space]| -> u64 {
        plan.buffers.iter().filter(|b| spaces.contains(&b.space)).map(|b| b.bytes()).sum()
    };
    let weights = of(&[Space::Weights, Space::Gradients, Space::Optimizer, Space::Prepared]);
    let kept = of(&[Space::State, Space::Saved, Space::Io]);
    // Values of one program share memory: what is left of the arena.
    let temporary = plan.arena.saturating_sub(weights + kept);
    let smaller = "use a smaller train.batch with a larger train.accumulate, or a shorter train.sequence";
    let parts = [
        ("weights, gradients and optimizer state", weights, "use a smaller model, or freeze a part of it"),
        ("packed weights", copied, "quantise it to fewer bits"),
        ("activations kept for the backward pass, and caches", kept, smaller),
        ("values of one layer at a time", temporary, smaller),
        ("scratch memory of kernels", scratch, smaller),
    ];
    let (category, bytes, advice) = parts.into_iter().max_by_key(|part| part.1).unwrap_or(parts[0]);
    Err(DeviceError::DoesNotFit { device: device.into(), needed, free, category, bytes, advice })
}

#[cfg(test)]
mod tests {
    use super::*;
    use dreamc_compiler::ir::DType;
    use dreamc_compiler::program::Buffer;

    #[test]
    fn the_largest_part_is_named() {
        let buffer = |name: &str, space, elements, offset| Buffer {
            name: name.into(),
            space,
            dtype: DType::F32,
            shape: vec![elements],
            instances: 1,
            offset,
        };
        let mut plan = Plan {
            buffers: vec![buffer("w", Space::Weights, 256, 0), buffer("x", Space::Saved, 1024, 1024)],
            arena: 5120,
            ..Plan::default()
        };
        assert!(check("cuda:0", &plan, (0, 0), 5120, 5120).is_ok());
        let error = check("cuda:0", &plan, (4, 0), 5124, 5120).unwrap_err().to_string();
        assert!(
            error.contains("needs 5124") && error.contains("activations") && error.contains("4096"),
            "{error}"
        );
        assert!(error.contains("train.batch"), "{error}");
        plan.buffers[1].space = Space::Temporary;
        let error = check("cuda:0", &plan, (1 << 20, 0), 5120 + (1 << 20), 5120).unwrap_err().to_string();
        assert!(error.contains("scratch"), "{error}");
        let error = check("cuda:0", &plan, (0, 1 << 20), 5120 + (1 << 20), 5120).unwrap_err().to_string();
        assert!(error.contains("1048576 bytes, is packed weights"), "{error}");
    }
}

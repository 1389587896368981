//! Steps of runs that others published, by the same links and the rates that were measured here.
//!
//! These runs cut their models in ways that dreamc does not run: matrices over ranks (tensor
//! parallel, with the sequence cut as well), layers over ranks (pipeline), experts over ranks. They
//! are modelled to hold rates and links to the world, and `dreamc plan` offers none of them. The
//! rates are those of kernels inside steps on an H200 (docs/results/h200.md), not fitted to the
//! runs.

/// Share of the peak that large products reach inside a step: 624 to 649 of 989 TFLOP/s.
pub const PRODUCTS: f64 = 0.64;
/// Share of the peak that attention reaches, forward and backward: 571 and 438 of 989 TFLOP/s.
pub const ATTENTION: f64 = 0.48;
/// Share of the memory's bandwidth that row kernels reach.
pub const ROWS: f64 = 0.8;
/// Vectors of the model's width that row kernels of a layer read or write for a token, both ways.
pub const VECTORS: f64 = 90.0;
/// Share of the data sheet's bandwidth that long messages reach.
pub const LINKS: f64 = 0.8;

/// A run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Run {
    /// Its name.
    pub name: &'static str,
    /// Where model, mesh and speed are reported.
    pub source: &'static str,
    /// Cards.
    pub cards: f64,
    /// Peak FLOP/s of the products of a card, and of attention.
    pub peak: [f64; 2],
    /// Bytes of memory a second.
    pub memory: f64,
    /// Bytes a second inside a node, and between nodes, of a card.
    pub links: [f64; 2],
    /// Parameters that multiply a token.
    pub active: f64,
    /// Layers.
    pub layers: f64,
    /// Width of the stream, and of attention: heads times the mean of the sizes of keys and values.
    pub widths: [f64; 2],
    /// Tokens of a sequence.
    pub sequence: f64,
    /// Sequences of a step.
    pub batch: f64,
    /// Ranks over which matrices, layers and the batch are cut.
    pub tensor: f64,
    /// Stages of the pipeline, and parts of a stage that are interleaved.
    pub pipeline: [f64; 2],
    /// Copies of a token that go to experts on other ranks, bytes of a number there and back, and
    /// whether between nodes.
    pub experts: Option<(f64, [f64; 2], bool)>,
    /// Share of the exchange with experts that work hides.
    pub hidden: f64,
    /// Share of the card that exchanges take from the work.
    pub taken: f64,
    /// Share of the forward that is computed again.
    pub again: f64,
    /// FLOP/s of a card that are reported, of the model alone.
    pub reported: f64,
    /// The error that is stated: the prediction over the report, less one, is no further from 0.
    pub stated: f64,
}

/// FLOPs of a token in training: products of all parameters that it meets, and causal attention.
pub fn flops(run: &Run) -> [f64; 2] {
    let attention = 6.0 * run.layers * run.widths[1] * run.sequence;
    [6.0 * run.active, attention]
}

/// FLOP/s of a card that are predicted.
pub fn predicted(run: &Run) -> f64 {
    let [products, attention] = flops(run);
    let more = 1.0 + run.again / 3.0;
    // Seconds of one card for a token, as if it had the whole model.
    let by_products = more * products / (PRODUCTS * run.peak[0]);
    let by_attention = more * attention / (ATTENTION * run.peak[1]);
    let rows = more * run.layers * VECTORS * run.widths[0] * 2.0 / (ROWS * run.memory);
    let work = (by_products + by_attention + rows) / (1.0 - run.taken);
    // Eight gathers or scatters of the stream a layer, there and back; each of the ranks waits.
    let t = run.tensor;
    let message = run.widths[0] * 2.0 * (t - 1.0) / t / (LINKS * run.links[0]);
    let by_tensor = 8.0 * run.layers * message * t;
    let by_experts = run.experts.map_or(0.0, |(copies, bytes, between)| {
        let link = LINKS * run.links[usize::from(between)];
        2.0 * run.layers * copies * run.widths[0] * (bytes[0] + bytes[1]) / link
    });
    let all = work + by_tensor + (by_experts - run.hidden * work).max(0.0).min(by_experts);
    // A pipeline waits for its first and last stage.
    let data = run.cards / (run.tensor * run.pipeline[0]);
    let micro_batches = (run.batch / data).max(1.0);
    let bubble = (run.pipeline[0] - 1.0) / (micro_batches * run.pipeline[1]);
    (products + attention) / (all * (1.0 + bubble))
}

const H100: f64 = 989.4e12;

/// Of runs on H100s, where a line below says nothing else.
const USUAL: Run = Run {
    name: "",
    source: "",
    cards: 0.0,
    peak: [H100, H100],
    memory: 3.35e12,
    links: [450e9, 50e9],
    active: 0.0,
    layers: 0.0,
    widths: [0.0, 0.0],
    sequence: 4096.0,
    batch: 0.0,
    tensor: 1.0,
    pipeline: [1.0, 1.0],
    experts: None,
    hidden: 0.0,
    taken: 0.0,
    again: 0.0,
    reported: 0.0,
    stated: 0.2,
};

const LLAMA: Run = Run {
    source: "arXiv:2407.21783, table 4",
    active: 405e9,
    layers: 126.0,
    widths: [16384.0, 16384.0],
    sequence: 8192.0,
    batch: 2048.0,
    tensor: 8.0,
    pipeline: [16.0, 8.0],
    ..USUAL
};

/// The runs, with what was reported of them.
pub const RUNS: [Run; 5] = [
    Run { name: "Llama 3 405B, 8,192 H100", cards: 8192.0, reported: 430e12, ..LLAMA },
    Run { name: "Llama 3 405B, 16,384 H100", cards: 16384.0, reported: 400e12, ..LLAMA },
    Run {
        name: "OLMo 2 32B, 1,280 H100",
        source: "allenai.org/blog/olmo2-32B: 38 % of the peak; OLMo-core, OLMo2-32B.py",
        cards: 1280.0,
        active: 32.2e9,
        layers: 64.0,
        widths: [5120.0, 5120.0],
        batch: 2048.0,
        again: 1.0,
        reported: 0.38 * H100,
        ..USUAL
    },
    Run {
        name: "Mixtral 8×7B in Megatron Core 0.9",
        source: "Megatron-LM, megatron/core/transformer/moe/README.md, commit 022bcb5a",
        cards: 64.0,
        active: 12.9e9,
        layers: 32.0,
        widths: [4096.0, 4096.0],
        batch: 256.0,
        pipeline: [4.0, 8.0],
        experts: Some((2.0 * 7.0 / 8.0, [2.0, 2.0], false)),
        reported: 468e12,
        ..USUAL
    },
    Run {
        name: "DeepSeek-V3, 2,048 H800",
        source: "arXiv:2412.19437: 180,000 card-hours for 10¹² tokens (table 1), section 3",
        cards: 2048.0,
        peak: [1978.9e12, H100],
        links: [200e9, 50e9],
        active: 37e9,
        layers: 61.0,
        widths: [7168.0, 128.0 * 160.0],
        batch: 15360.0,
        pipeline: [16.0, 1.0],
        experts: Some((4.0 * 7.0 / 8.0, [1.0, 2.0], true)),
        hidden: 1.0,
        taken: 20.0 / 132.0,
        again: 0.2,
        // FLOPs of a token over the seconds of a card for it.
        reported: (6.0 * 37e9 + 6.0 * 61.0 * 128.0 * 160.0 * 4096.0) / (180e3 * 3600.0 / 1e12),
        stated: 0.75,
        ..USUAL
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_predicted_within_the_error_that_is_stated() {
        for run in &RUNS {
            let error = predicted(run) / run.reported - 1.0;
            println!(
                "{:<36} reported {:>4.0} TFLOP/s, predicted {:>4.0}: {:+.0} %",
                run.name,
                run.reported / 1e12,
                predicted(run) / 1e12,
                100.0 * error
            );
            assert!(error.abs() <= run.stated, "{}: {error}", run.name);
        }
    }
}

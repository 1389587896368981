//! Input of a step: rows of tokens with their targets.

/// Target of a place where no loss is taken.
pub const NO_LOSS: i32 = -1;

/// Rows of tokens, row-major, with exactly the types and meanings of the buffers of a compiled
/// model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// Tokens in a row.
    pub sequence: usize,
    /// Input tokens.
    pub ids: Vec<i32>,
    /// Next tokens; [`NO_LOSS`] where no loss is taken.
    pub targets: Vec<i32>,
    /// Position of each token: in the row, or in its document where documents are masked.
    pub positions: Vec<i32>,
    /// Document of each token, numbered within the row.
    pub segments: Vec<i32>,
    /// Bytes of text that each target stands for; 0 where no loss is taken.
    pub bytes: Vec<u32>,
    /// The document of its source that each row is, where rows are the answers of pairs.
    pub documents: Vec<u64>,
    /// How much more likely the first answer of each pair was before training, in nats.
    pub reference: Vec<f32>,
}

impl Batch {
    /// An empty batch of rows of this length.
    pub fn new(sequence: usize) -> Self {
        Batch { sequence, ..Batch::default() }
    }

    /// How many rows there are.
    pub fn rows(&self) -> usize {
        self.ids.len() / self.sequence.max(1)
    }

    /// Places where loss is taken.
    pub fn learned(&self) -> u64 {
        self.targets.iter().filter(|&&t| t >= 0).count() as u64
    }

    /// Fills the row begun last with places that mean nothing: the unused ones form a document of
    /// their own, so that no attention is over nothing.
    pub fn pad_row(&mut self, filler: u32) {
        let used = self.ids.len() % self.sequence.max(1);
        if used > 0 {
            let segment = self.segments.last().map_or(0, |s| s + 1);
            self.pad(self.sequence - used, filler, segment);
        }
    }

    /// Adds rows that mean nothing until there are `rows`.
    pub fn pad_rows(&mut self, rows: usize, filler: u32) {
        while self.rows() < rows {
            self.pad(self.sequence, filler, 0);
        }
    }

    fn pad(&mut self, places: usize, filler: u32, segment: i32) {
        self.ids.extend(std::iter::repeat_n(filler as i32, places));
        self.targets.extend(std::iter::repeat_n(NO_LOSS, places));
        self.positions.extend(0..places as i32);
        self.segments.extend(std::iter::repeat_n(segment, places));
        self.bytes.extend(std::iter::repeat_n(0, places));
    }

    /// Rows `from .. from + rows`, as a batch.
    pub fn slice(&self, from: usize, rows: usize) -> Batch {
        let range = from * self.sequence..(from + rows) * self.sequence;
        Batch {
            sequence: self.sequence,
            ids: self.ids[range.clone()].to_vec(),
            targets: self.targets[range.clone()].to_vec(),
            positions: self.positions[range.clone()].to_vec(),
            segments: self.segments[range.clone()].to_vec(),
            // Batches that are made to be computed alone stand for no text.
            bytes: self.bytes.get(range).map(<[u32]>::to_vec).unwrap_or_default(),
            documents: self.documents.get(from..from + rows).map(<[u64]>::to_vec).unwrap_or_default(),
            reference: self
                .reference
                .get(from / 2..(from + rows) / 2)
                .map(<[f32]>::to_vec)
                .unwrap_or_default(),
        }
    }
}

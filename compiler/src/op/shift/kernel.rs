//! Rows of earlier tokens.

use crate::CompileError;
use crate::codegen::naive::{Naive, numbers};
use crate::codegen::{CodegenError, Source, Variant};
use crate::op::kernel::{KernelKind, Of, Slot, Work, input, ints, result, times, updated};
use crate::program::Kernel;
use crate::schedule::{Choose, Select};
use std::fmt::Display;

/// Each row becomes that of the token `by` before it, or after it, of those that take part; zero
/// where its document has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shift {
    /// Sequences.
    pub batch: u64,
    /// Tokens of each.
    pub tokens: u64,
    /// Elements of a row.
    pub width: u64,
    /// How many tokens back.
    pub by: u64,
    /// Whether it is the token after.
    pub ahead: bool,
    /// Whether tokens of negative place take no part.
    pub places: bool,
    /// Whether documents bound it.
    pub segments: bool,
}

/// The same where the last rows of each text are in a history, which goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ShiftState {
    /// Sequences.
    pub batch: u64,
    /// Tokens of each.
    pub tokens: u64,
    /// Elements of a row.
    pub width: u64,
    /// Rows of a history: how many tokens back.
    pub by: u64,
}

impl KernelKind for Shift {
    fn signature(&self) -> Vec<Slot> {
        let &Shift { batch, tokens, width, places, segments, .. } = self;
        let rows = times(&[batch, tokens]);
        let places = places.then(|| ints("places", &[rows]));
        let segments = segments.then(|| ints("segments", &[rows]));
        let x = input("x", &[rows, width]).rows(1);
        [x].into_iter().chain(places).chain(segments).chain([result("y", &[rows, width])]).collect()
    }

    fn check(&self) -> Result<(), String> {
        if self.by == 0 { Err("shifts by at least one token".into()) } else { Ok(()) }
    }

    fn summary(&self) -> String {
        let word = |flag: bool, word: &'static str| if flag { word } else { "" };
        let (ahead, places) = (word(self.ahead, " ahead"), word(self.places, " places"));
        let segments = word(self.segments, " segments");
        let Shift { batch, tokens, width, by, .. } = self;
        format!("shift {batch}×{tokens}×{width} by {by}{ahead}{places}{segments}")
    }

    fn work(&self) -> Work {
        Work::default()
    }

    /// A thread has an element, and adjacent threads have adjacent ones: there is nothing to gain.
    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        self.naive(variant)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let &Shift { batch, tokens, width, by, ahead, places, segments } = self;
        let numbers: &[(&str, &dyn Display)] = numbers![
            "TOKENS": tokens, "WIDTH": width, "BY": by, "AHEAD": ahead.into(), "PLACES": places.into(),
            "SEGMENTS": segments.into(),
        ];
        let naive = Naive::new(self, variant, include_str!("naive.cuh"), numbers)?;
        Ok(naive.pass("shift", times(&[batch, tokens, width]))?.finish())
    }
}

impl KernelKind for ShiftState {
    fn signature(&self) -> Vec<Slot> {
        let &ShiftState { batch, tokens, width, by } = self;
        let rows = times(&[batch, tokens]);
        vec![
            input("x", &[rows, width]).rows(1).of(Of::Operand(0)),
            ints("slots", &[rows]).of(Of::Operand(2)),
            updated("history", &[batch, by, width]).state(1, 1),
            result("y", &[rows, width]).of(Of::Result(0)),
        ]
    }

    fn check(&self) -> Result<(), String> {
        if self.by == 0 { Err("a history has at least one row".into()) } else { Ok(()) }
    }

    fn summary(&self) -> String {
        let ShiftState { batch, tokens, width, by } = self;
        format!("shift_state {batch}×{tokens}×{width} by {by}")
    }

    fn work(&self) -> Work {
        Work::default()
    }

    /// A thread has a channel of a text, whose tokens follow one another.
    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        self.naive(variant)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        let &ShiftState { batch, tokens, width, by } = self;
        let numbers: &[(&str, &dyn Display)] = numbers!["TOKENS": tokens, "WIDTH": width, "BY": by];
        let naive = Naive::new(self, variant, include_str!("naive.cuh"), numbers)?;
        Ok(naive.pass("shift_state", times(&[batch, width]))?.finish())
    }
}

impl Choose for super::Shift {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        let &super::Shift { by, ahead, places, segments } = self;
        let d = s.dims(0);
        let (batch, tokens, width) = (s.size(d[0]), s.size(d[1]), s.elements(&d[2..]));
        Ok(Kernel::Shift(Shift { batch, tokens, width, by, ahead, places, segments }))
    }
}

impl Choose for super::ShiftState {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        let (d, history) = (s.dims(0), s.dims(1));
        let (batch, tokens, width) = (s.size(d[0]), s.size(d[1]), s.elements(&d[2..]));
        Ok(Kernel::ShiftState(ShiftState { batch, tokens, width, by: s.size(history[1]) }))
    }
}

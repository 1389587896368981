//! Hopper's asynchronous units.

use super::decode::Operands;
use super::exec::{Core, Wait, Warp, Worker};
use super::finding::{Kind, LoadError, Outcome, Trouble};
use super::parse::Operand;

/// An operation of this family.
#[derive(Debug)]
pub(super) enum Op {}

pub(super) const AGENTS: usize = 64;

#[derive(Debug, Default)]
pub(super) struct WarpState;

#[derive(Debug, Default)]
pub(super) struct State;

impl State {
    pub fn passed(&self, _offset: u32, _parity: u32) -> bool {
        true
    }
    pub fn why_stuck(&self, _offset: u32, _parity: u32) -> Box<Trouble> {
        Trouble::new(Kind::Deadlock, "", "")
    }
}

impl Core<'_> {
    pub fn hopper(
        &mut self,
        _warp: &mut Warp,
        _active: u32,
        op: &Op,
        _worker: &mut Worker,
    ) -> Outcome<Option<Wait>> {
        match *op {}
    }
    pub fn complete_one(&mut self, _worker: &mut Worker) -> Outcome<bool> {
        Ok(false)
    }
    pub fn finish(&mut self, _worker: &mut Worker) -> Outcome<()> {
        Ok(())
    }
}

/// The operation that an opcode names, if it is one of this family.
pub(super) fn decode<'a>(
    _decoder: &mut impl Operands<'a>,
    _opcode: &str,
    _operands: &[Operand<'a>],
) -> Result<Option<Op>, LoadError> {
    Ok(None)
}

//! Exchanges of the ranks of a group.

use super::Run;
use crate::device::backend::cpu::{Arguments, Context, Stored};
use dreamc_compiler::program::kernel::{AllGather, AllReduce, Gathered, ReduceScatter, Scattered};

impl Run for AllReduce {
    /// Nothing: the executor hands the range to the group.
    fn run<T: Stored>(&self, _: &Context, _: &Arguments) {}
}

impl Run for ReduceScatter {
    /// Nothing: the executor hands the range to the group.
    fn run<T: Stored>(&self, _: &Context, _: &Arguments) {}
}

impl Run for Gathered {
    /// Nothing: the executor hands the range to the group.
    fn run<T: Stored>(&self, _: &Context, _: &Arguments) {}
}

impl Run for Scattered {
    /// Nothing: the executor hands the range to the group.
    fn run<T: Stored>(&self, _: &Context, _: &Arguments) {}
}

impl Run for AllGather {
    /// Nothing: the executor hands the range to the group.
    fn run<T: Stored>(&self, _: &Context, _: &Arguments) {}
}

//! Exchanges of the ranks of a group.

use super::Run;
use crate::backend::cpu::{Arguments, Context, Stored};
use dreamc_compiler::program::kernel::{
    AllGather, AllReduce, Gathered, Pooled, ReduceScatter, Returned, Scattered, Sent,
};

/// A device runs nothing: the executor hands the range to the group.
macro_rules! by_the_group {
    ($($kernel:ident)*) => {$(
        impl Run for $kernel {
            fn run<T: Stored>(&self, _: &Context, _: &Arguments) {}
        }
    )*};
}

by_the_group! { AllReduce ReduceScatter Gathered Scattered AllGather Sent Returned Pooled }

//! The gradient norm, and the balancing of experts.

use super::Run;
use crate::backend::cpu::simd::{self, kernel_fn, sum_with};
use crate::backend::cpu::{Arguments, Context, Scratch, Stored};
use dreamc_compiler::program::kernel::{Balance, Norm};
use dreamc_dsl::spec::{BalanceLaw, BalanceTarget};

/// Elements whose squares are summed in f32 before f64 takes over.
const BLOCK: usize = 1024;
/// Blocks of one task.
const BLOCKS: usize = 16;

kernel_fn! {
    fn sum_of_squares(x: &[f32]) -> f64 {
        let mut total = 0.0;
        for x in x.chunks(BLOCK) {
            total += sum_with(x, x, simd::fma::<FMA>) as f64;
        }
        total
    }
}

impl Run for Norm {
    fn scratch(&self) -> Scratch {
        // A double for every task.
        Scratch { local: 0, shared: 2 * (self.elements as usize).div_ceil(BLOCK * BLOCKS) }
    }

    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let (g, norm) = (args.floats("g"), args.floats("norm"));
        let size = BLOCK * BLOCKS;
        let sums = cx.shared().doubles();
        let tasks = g.length.div_ceil(size);
        cx.parallel(tasks, |task, _| {
            let x = g.part(task * size, size.min(g.length - task * size));
            sums.part_mut(task, 1)[0] = sum_of_squares(x);
        });
        norm.all_mut()[0] = sums.part(0, tasks).iter().sum::<f64>().sqrt() as f32;
    }
}

impl Run for Balance {
    fn scratch(&self) -> Scratch {
        Scratch { local: 0, shared: self.experts as usize }
    }

    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let (bias, counts) = (args.floats("bias").all_mut(), args.floats("counts").all_mut());
        let n = counts.len();
        if n == 0 {
            return;
        }
        let mean = counts.iter().map(|&c| c as f64).sum::<f64>() / n as f64;
        let target = match self.target {
            BalanceTarget::Mean => mean,
            BalanceTarget::Median => {
                let sorted = cx.shared().part_mut(0, n);
                sorted.copy_from_slice(counts);
                sorted.sort_unstable_by(f32::total_cmp);
                (sorted[(n - 1) / 2] as f64 + sorted[n / 2] as f64) / 2.0
            }
        };
        for (bias, count) in bias.iter_mut().zip(counts) {
            let difference = target - *count as f64;
            let step = match self.law {
                BalanceLaw::Sign if difference == 0.0 => 0.0,
                BalanceLaw::Sign => difference.signum(),
                BalanceLaw::Proportional if mean == 0.0 => 0.0,
                BalanceLaw::Proportional => difference / mean,
            };
            *bias = (*bias as f64 + self.rate.0 * step) as f32;
            *count = 0.0;
        }
    }
}

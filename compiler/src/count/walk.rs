//! Cost of a function over all its applications, without visiting them one by one.
//!
//! *In*: a function of the module and the [`Site`]s that apply it. *Out*: the cost of each node
//! summed over every application. *Promise*: the sums are exact and take time in proportion to the
//! text of the spec, not to its depth.
//!
//! The cost of all operations but one is the same at every application. Depth attention at cache
//! row `r` reads `min(r + 1, window)` rows; [`cost`](cost()) at rows 0 and 1 gives both
//! coefficients, and [`sum_rows`] adds the rows up.

use crate::architecture::{Apply, Architecture, Block, run_of};
use crate::ir::{Binding, Cost, CostError, Extents, Function, Index, Mask, Module, Node, Type, cost};
use crate::lower::Facts;
use crate::op::{Attention, Work};
use crate::program::Affine;

/// An application in the text of the body, and the loops around it.
pub(super) struct Site<'a> {
    pub apply: &'a Apply,
    /// Variable and count of each loop, outermost first.
    pub loops: Vec<(u32, u64)>,
}

impl Site<'_> {
    /// How many applications it stands for.
    fn applications(&self) -> Option<u128> {
        self.loops.iter().try_fold(1u128, |n, &(_, count)| n.checked_mul(count.into()))
    }
}

/// The sites of each body.
pub(super) fn sites(architecture: &Architecture) -> Vec<Vec<Site<'_>>> {
    fn walk<'a>(blocks: &'a [Block], loops: &mut Vec<(u32, u64)>, out: &mut [Vec<Site<'a>>]) {
        for block in blocks {
            match block {
                Block::Apply(apply) => out[apply.body].push(Site { apply, loops: loops.clone() }),
                Block::Loop { variable, count, blocks, .. } => {
                    loops.push((*variable, *count));
                    walk(blocks, loops, out);
                    loops.pop();
                }
            }
        }
    }
    let mut out: Vec<Vec<Site>> = architecture.bodies.iter().map(|_| vec![]).collect();
    walk(&architecture.blocks, &mut vec![], &mut out);
    out
}

/// Cost of each node of a layer's function, over all applications of the layer.
pub(super) fn applied(
    facts: &Facts,
    module: &Module,
    f: &Function,
    sites: &[&Site],
) -> Result<Vec<Cost>, CostError> {
    let overflow = || CostError::Overflow("applications");
    let applications =
        sites.iter().try_fold(0u128, |sum, s| sum.checked_add(s.applications()?)).ok_or_else(overflow)?;
    let each = |node: &Node| {
        let all = |extents| node_cost(module, f, node, extents);
        let Work::Row(_, a, row) = node.op.signature().work else {
            return all(expected(facts, module, f, node))?.times(applications);
        };
        let cache = match f.params.get(node.inputs[row].index()).map(|p| p.binding) {
            Some(Binding::Index(Index::Row(cache))) => Some((cache, 0, None)),
            Some(Binding::Index(Index::Next { cache, by })) => Some((cache, by, None)),
            Some(Binding::Index(Index::Run { cache, offset, block })) => {
                Some((cache, 0, Some((offset, block))))
            }
            _ => None,
        };
        let row = |site: &Site| {
            let (cache, by, run) = cache?;
            let row = site.apply.rows[cache as usize].clone().plus(&Affine::constant(by.into()));
            Some(run.map_or(row.clone(), |(offset, block)| run_of(&row, offset, block)))
        };
        let last = a.window.map_or(u64::MAX, |w| w - 1);
        let rows = sites
            .iter()
            .try_fold(0u128, |sum, s| sum.checked_add(sum_rows(&row(s)?, &s.loops, last)?))
            .ok_or_else(overflow)?;
        let at = |row| all(Extents { row: Some(row), ..expected(facts, module, f, node) });
        let (first, second) = (at(0)?, at(1)?);
        first.times(applications)?.plus(minus(second, first).times(rows)?)
    };
    f.nodes.iter().map(each).collect()
}

/// Cost of each node of a function that is called once. One that reads a row of its cache reads all
/// that there are.
pub(super) fn once(facts: &Facts, module: &Module, f: &Function) -> Result<Vec<Cost>, CostError> {
    f.nodes.iter().map(|n| node_cost(module, f, n, expected(facts, module, f, n))).collect()
}

fn node_cost(module: &Module, f: &Function, node: &Node, extents: Extents) -> Result<Cost, CostError> {
    let operands: Vec<&Type> = node.inputs.iter().map(|&v| f.ty(v)).collect();
    let results: Vec<&Type> = node.results().map(|v| f.ty(v)).collect();
    let found = cost(module, &node.op, &operands, &results, &extents)?;
    #[cfg(test)]
    let found = super::tests::perturbed(&node.op, found);
    Ok(found)
}

/// Routing that is not known yet is taken to be even: a mixture with no-op experts sends them their
/// share of the slots, and tokens that take part stand at even distances.
fn expected(facts: &Facts, module: &Module, f: &Function, node: &Node) -> Extents {
    let experts = match node.op.signature().work {
        Work::Pairs(_, a, _) if a.mask == Mask::Positions => {
            let size = |i: usize, d: usize| module.size(f.ty(node.inputs[i]).dims[d]);
            let (batch, queries, keys) = (size(0, 0), size(0, 1), size(1, 1));
            let sequence = module.dims.get("seq").copied().unwrap_or(keys).max(1);
            // Tokens that skip merge with one token each, and share the update of one.
            if a.segments {
                let pairs = u128::from(batch) * u128::from(keys);
                return Extents { pairs: u64::try_from(pairs).ok(), ..Extents::default() };
            }
            // Of the places in a window, keys have their share.
            let window =
                a.window.map(|w| (u128::from(w) * u128::from(keys)).div_ceil(sequence.into()) as u64);
            let pairs = u128::from(batch) * Attention::causal_pairs(keys, window) * u128::from(queries)
                / u128::from(keys.max(1));
            // Of these, a mask of positions leaves the share that it leaves of all tokens.
            let (seen, full) =
                (a.pairs(sequence, size(0, 2)), Attention::causal_pairs(sequence, a.window).max(1));
            let pairs = pairs.checked_mul(seen).map_or(pairs, |all| all / full);
            return Extents { pairs: u64::try_from(pairs).ok(), ..Extents::default() };
        }
        // The offsets are one more than the experts, the first dimension of their matrices: an
        // operand, or the result.
        Work::Groups(..) => match &f.ty(node.first).dims[..] {
            [experts, _, _] => *experts,
            _ => f.ty(node.inputs[1]).dims[0],
        },
        Work::Nothing
        | Work::Moves
        | Work::Operand(..)
        | Work::Result(_)
        | Work::Counted(_)
        | Work::Dense(_)
        | Work::Row(..)
        | Work::Pairs(..) => return Extents::default(),
    };
    let slots = u128::from(module.size(f.ty(node.inputs[0]).dims[0]));
    let (some, all) = facts.taken.get(&experts).copied().unwrap_or((1, 1));
    // The share is at most `slots`, which is a `u64`.
    let share = slots * u128::from(some.min(all)) / u128::from(all.max(1));
    Extents { slots: Some(share as u64), ..Extents::default() }
}

/// The difference of two costs; the first is the larger in every respect.
pub(super) fn minus(a: Cost, b: Cost) -> Cost {
    Cost {
        flops: a.flops.saturating_sub(b.flops),
        recomputed: a.recomputed.saturating_sub(b.recomputed),
        elementwise: a.elementwise.saturating_sub(b.elementwise),
        read: a.read.saturating_sub(b.read),
        written: a.written.saturating_sub(b.written),
    }
}

/// `Σ min(row, last)` over all values of the loops' variables; `None` where it exceeds 128 bits.
pub(super) fn sum_rows(row: &Affine, loops: &[(u32, u64)], last: u64) -> Option<u128> {
    let stride = |variable: u32| row.terms.iter().filter(|t| t.0 == variable).map(|t| t.1).sum::<u64>();
    let mut axes: Vec<(u128, u128)> =
        loops.iter().map(|&(v, count)| (u128::from(stride(v)), u128::from(count))).collect();
    axes.sort_unstable_by(|a, b| b.cmp(a));
    sum_box(row.base.into(), &axes, last.into())
}

/// The same over axes of (stride, count), widest stride first.
fn sum_box(base: u128, axes: &[(u128, u128)], last: u128) -> Option<u128> {
    let points = axes.iter().try_fold(1u128, |n, a| n.checked_mul(a.1))?;
    if base >= last || points == 0 {
        return points.checked_mul(last.min(base));
    }
    let most = axes.iter().try_fold(base, |m, a| a.0.checked_mul(a.1 - 1)?.checked_add(m))?;
    if most <= last {
        // Along each axis the mean is half way.
        let twice = base.checked_add(most)?.checked_mul(points)?;
        return Some(twice / 2);
    }
    // Rows of one component are all different, so that at most one slice of an axis is on both
    // sides of `last`.
    let (&(stride, count), rest) = axes.split_first()?;
    let span = most - base - stride * (count - 1);
    let below = if base + span > last { 0 } else { ((last - base - span) / stride.max(1) + 1).min(count) };
    let mut sum = if below == 0 { 0 } else { sum_box(base, &[&[(stride, below)], rest].concat(), last)? };
    for i in below..count {
        let at = base.checked_add(stride.checked_mul(i)?)?;
        if at >= last {
            return sum.checked_add((points / count).checked_mul(count - i)?.checked_mul(last)?);
        }
        sum = sum.checked_add(sum_box(at, rest, last)?)?;
    }
    Some(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_add_up_like_one_by_one() {
        let cases: [(u64, &[(u64, u64)]); 6] = [
            (0, &[(1, 16)]),
            (3, &[(5, 4), (1, 5)]),
            (0, &[(1, 3), (3, 7)]),
            (2, &[(12, 2), (4, 3), (1, 4)]),
            (7, &[]),
            (1, &[(2, 9)]),
        ];
        for (base, axes) in cases {
            let terms = axes.iter().enumerate().map(|(i, a)| (i as u32, a.0)).collect();
            let loops: Vec<(u32, u64)> = axes.iter().enumerate().map(|(i, a)| (i as u32, a.1)).collect();
            let mut rows = vec![base];
            for &(stride, count) in axes {
                rows = rows.iter().flat_map(|r| (0..count).map(move |i| r + stride * i)).collect();
            }
            for last in [0, 1, 2, 5, 6, 11, 13, 30, u64::MAX] {
                let expected: u128 = rows.iter().map(|&r| u128::from(r.min(last))).sum();
                let row = Affine { base, terms: Vec::clone(&terms) };
                assert_eq!(sum_rows(&row, &loops, last), Some(expected), "{base} {axes:?} {last}");
            }
        }
    }

    #[test]
    fn sums_beyond_128_bits_are_refused() {
        let row = Affine { base: u64::MAX, terms: vec![] };
        let loops = [(0, u64::MAX), (1, u64::MAX), (2, u64::MAX)];
        assert_eq!(sum_rows(&row, &loops, u64::MAX), None);
    }
}

//! The pairs of a donor's rotation that contribute most to its scores (MHA2MLA, 2502.14837, section
//! 3.1).
//!
//! *In*: a specification whose latent attention comes of a donor's heads, and the donor. *Out*: the
//! same with the pairs of most contribution in `latent.pairs`. *Promise*: a pair's contribution is
//! the mean length of its two elements of queries times that of keys, over held-out tokens, summed
//! over the heads of queries that share a key; an attention in several layers has the mean of
//! their shares.

use super::Transplantation;
use crate::failure::{Done, Failure};
use crate::model::Trained;
use crate::note;
use crate::spec::open_data;
use dreamc_compiler::probe::{Probe, matches};
use dreamc_compiler::{Options, compile};
use dreamc_device::Device;
use dreamc_dsl::Spec;
use dreamc_dsl::spec::{Attention, Component, Mixes};
use dreamc_runtime::analysis::probe::Probing;
use dreamc_runtime::model::Model;
use dreamc_runtime::train::prepare::{forward, masked, sequence};
use dreamc_transplant::{Latent, Matrix, Step};
use std::collections::BTreeMap;

/// Rows of held-out data at a time.
const BATCH: u64 = 4;

/// The attentions of a donor that a latent one comes of: set of weights and component.
type Sources = Vec<(usize, String)>;

/// Gives every latent attention that comes of a donor's heads the pairs of most contribution, over
/// `rows` rows.
pub fn choose(spec: &mut Spec, donor: &Trained, device: &dyn Device, rows: u64) -> Done {
    let work = Transplantation::plan(spec, donor)?;
    let mut wanted: BTreeMap<String, Sources> = BTreeMap::new();
    for (m, t) in work.plan.moves.iter().zip(&work.new.tensors) {
        let [Step::Latent(Latent { matrix: Matrix::Down(_), .. })] = &m.steps[..] else { continue };
        let Some(component) = t.component() else { continue };
        let all = wanted.entry(component.into()).or_default();
        for source in m.from.iter().filter_map(|source| work.old.tensor(&source.name)) {
            if let (Some(set), Some(name)) = (source.set(), source.component()) {
                all.push((set, name.into()));
            }
        }
    }
    let turns = |(_, name): &(usize, String)| attention(&donor.spec, name).is_some_and(|a| a.rope.is_some());
    wanted.retain(|_, sources| sources.iter().all(turns));
    if wanted.is_empty() {
        return Err(Failure::Usage(
            "--pairs chooses among pairs of rotations for latent attention, and none comes of heads of the donor that turn".into(),
        ));
    }
    let sources: Sources = wanted.values().flatten().cloned().collect();
    let found = contributions(donor, device, rows, &sources)?;
    for (component, sources) in &wanted {
        let Some(Component::Sequence(a)) = spec.model.components.get_mut(component) else { continue };
        let heads = a.heads;
        let Some(l) = &mut a.latent else { continue };
        let mut lists = vec![];
        for key in 0..l.keys {
            let mut sums: Vec<f64> = vec![];
            for source in sources {
                let Some(each) = found.get(source) else { continue };
                // Heads of queries of this key, as shares of all pairs.
                let own = &each[(key * heads / l.keys) as usize..((key + 1) * heads / l.keys) as usize];
                let total: f64 = own.iter().flatten().sum();
                sums.resize(own[0].len(), 0.0);
                for head in own {
                    sums.iter_mut().zip(head).for_each(|(sum, x)| *sum += x / total.max(f64::MIN_POSITIVE));
                }
            }
            lists.push(largest(&sums, (l.turned / 2) as usize));
        }
        let same = lists.iter().all(|list| *list == lists[0]);
        for (key, list) in lists.iter().enumerate().take(if same { 1 } else { lists.len() }) {
            let of = if same { String::new() } else { format!(" of key {key}") };
            note!("`{component}` turns pairs {list:?}{of}: they contribute most to scores");
        }
        l.pairs = if same { lists.into_iter().take(1).collect() } else { lists };
    }
    Ok(())
}

/// The places of the largest numbers, ascending.
fn largest(of: &[f64], many: usize) -> Vec<u64> {
    let mut order: Vec<usize> = (0..of.len()).collect();
    order.sort_by(|a, b| of[*b].total_cmp(&of[*a]).then(a.cmp(b)));
    order.truncate(many);
    order.sort_unstable();
    order.into_iter().map(|place| place as u64).collect()
}

fn attention<'a>(spec: &'a Spec, name: &str) -> Option<&'a Attention> {
    let component = spec.model.components.get(name)?;
    component.attention().filter(|_| component.kind().mixes() == Mixes::Tokens)
}

/// Numbers of pairs of heads, for each attention.
type OfPairs = BTreeMap<(usize, String), Vec<Vec<f64>>>;

/// Contributions of pairs, for each head of queries.
fn contributions(
    donor: &Trained,
    device: &dyn Device,
    rows: u64,
    sources: &Sources,
) -> Result<OfPairs, Failure> {
    let nothing = || {
        let what = "the donor has no held-out data by which pairs are chosen; write `latent.pairs`";
        Failure::Usage(what.into())
    };
    let data = donor.spec.data.as_ref().ok_or_else(nothing)?;
    let mut held = open_data(&donor.spec, data, None)?.validation()?.ok_or_else(nothing)?;
    let name = |(set, component): &(usize, String), which: &str| format!("layers.{set}.{component}.{which}");
    let captured = sources.iter().flat_map(|source| [name(source, "q"), name(source, "k")]).collect();
    let probe = Probe { captured, patched: vec![] };
    let segments = masked(&donor.spec);
    let compiled =
        compile(&donor.spec, &Options { probe, segments, ..forward(BATCH, sequence(&donor.spec)) })?;
    let mut model = Model::load(device, compiled)?;
    model.restore(&donor.tensors)?;
    let mut probing = Probing::new(model)?;
    // Sums of lengths of pairs over tokens, of queries and of keys.
    let mut sums: BTreeMap<(usize, String), [Vec<Vec<f64>>; 2]> = BTreeMap::new();
    let mut seen = 0;
    while seen < rows {
        let Some(batch) = held.take(BATCH as usize)? else { break };
        seen += batch.rows() as u64;
        probing.model().evaluate(&batch)?;
        for source in sources {
            let Some(a) = attention(&donor.spec, &source.1) else { continue };
            let pairs = a.rope.map_or(0, |rope| rope.turning(a.head_size) / 2) as usize;
            let own = sums
                .entry(source.clone())
                .or_insert_with(|| [a.heads, a.kv_heads].map(|heads| vec![vec![0.0; pairs]; heads as usize]));
            for (which, sums) in ["q", "k"].into_iter().zip(own) {
                let pattern = name(source, which);
                let point = probing.captured().find(|probed| matches(&pattern, &probed.point.name));
                let Some(point) = point.map(|probed| probed.point.name.clone()) else { continue };
                let (values, heads) = (probing.value(&point)?, sums.len());
                let real = batch.targets.iter().map(|target| *target >= 0);
                let tokens = values.chunks(heads * a.head_size as usize).zip(real);
                for (token, _) in tokens.filter(|(_, real)| *real) {
                    for (head, sums) in token.chunks(a.head_size as usize).zip(&mut *sums) {
                        for (i, sum) in sums.iter_mut().enumerate() {
                            *sum += f64::from(head[i]).hypot(f64::from(head[i + pairs]));
                        }
                    }
                }
            }
        }
    }
    if seen == 0 {
        return Err(nothing());
    }
    let product = |(source, [queries, keys]): ((usize, String), [Vec<Vec<f64>>; 2])| {
        let group = queries.len() / keys.len().max(1);
        let each = queries
            .iter()
            .enumerate()
            .map(|(head, q)| q.iter().zip(&keys[head / group.max(1)]).map(|(q, k)| q * k).collect());
        (source, each.collect())
    };
    Ok(sums.into_iter().map(product).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_are_named_in_their_order() {
        assert_eq!(largest(&[0.5, 2.0, 2.0, 0.1, 3.0], 3), [1, 2, 4]);
        assert_eq!(largest(&[1.0, 1.0, 1.0], 2), [0, 1]);
    }
}

//! The donor's layers for each application of a layer.

use crate::{At, Side, Taken, TransplantError};
use dreamc_dsl::spec::Depth;

/// For each application of a layer of `new`, what it takes of `old`. Where the depths differ and
/// nobody says how, an error lists the ways; `covered` says that nothing asks.
pub(crate) fn taken(
    new: &Side,
    old: &Side,
    depth: Option<&Depth>,
    covered: bool,
) -> Result<Vec<Taken>, TransplantError> {
    let (ours, theirs) = (new.depths.len(), old.depths.len());
    let one = |layer: usize| vec![(layer, 1.0)];
    let layers: Vec<Vec<(usize, f64)>> = match depth {
        None if ours == theirs => (0..ours).map(one).collect(),
        None if covered => vec![vec![]; ours],
        None => return Err(undecided(ours, theirs)),
        _ if theirs == 0 => vec![vec![]; ours],
        Some(Depth::Spread) if ours <= theirs => {
            let last = ours.saturating_sub(1).max(1);
            (0..ours).map(|i| one((i * (theirs - 1) + last / 2) / last)).collect()
        }
        Some(Depth::Spread | Depth::Zero) if ours >= theirs => {
            (0..ours).map(|i| one(i * theirs / ours)).collect()
        }
        Some(Depth::Stack) if ours >= theirs && ours <= 2 * theirs => {
            let first = ours.div_ceil(2);
            (0..ours).map(|i| one(if i < first { i } else { theirs + i - ours })).collect()
        }
        Some(Depth::Interpolate) => (0..ours).map(|i| between(i, ours, theirs)).collect(),
        Some(Depth::Average) if ours <= theirs => {
            let group = |i: usize| i * theirs / ours..(i + 1) * theirs / ours;
            let even = |i: usize| group(i).map(|layer| (layer, 1.0 / group(i).len() as f64)).collect();
            (0..ours).map(even).collect()
        }
        Some(Depth::Given(list)) => given(list, ours, theirs)?,
        Some(Depth::Spread | Depth::Zero | Depth::Stack | Depth::Average) => {
            let mut error = undecided(ours, theirs);
            if let TransplantError::Refused { message, .. } = &mut error {
                *message = format!("this `depth` does not make {ours} layers of {theirs}");
            }
            return Err(error);
        }
    };
    let silent = |i: usize| {
        matches!(depth, Some(Depth::Zero)) && i > 0 && i * theirs / ours == (i - 1) * theirs / ours
    };
    let layers = layers.into_iter().enumerate();
    let taken: Vec<Taken> = layers
        .map(|(i, layers)| Taken {
            layers: layers.into_iter().map(|(depth, share)| (old.depths[depth], share)).collect(),
            silent: silent(i),
        })
        .collect();
    for layer in &new.layers {
        let quiet = layer.applied.iter().filter(|depth| taken[**depth].silent).count();
        if quiet > 0 && quiet < layer.applied.len() {
            let message = "a layer that is applied several times would add nothing at some of them alone";
            let help = "write the donor's layers as a list, or add layers with weights of their own";
            return Err(refused(message.into(), help.into()));
        }
    }
    Ok(taken)
}

/// The mean of the two nearest layers.
fn between(i: usize, ours: usize, theirs: usize) -> Vec<(usize, f64)> {
    let place = match ours {
        0 | 1 => 0.0,
        _ => (i * (theirs - 1)) as f64 / (ours - 1) as f64,
    };
    let low = place.floor() as usize;
    let share = place - place.floor();
    if share < 1e-9 || low + 1 >= theirs {
        return vec![(low, 1.0)];
    }
    vec![(low, 1.0 - share), (low + 1, share)]
}

fn given(list: &[Vec<u64>], ours: usize, theirs: usize) -> Result<Vec<Vec<(usize, f64)>>, TransplantError> {
    if list.len() != ours {
        let message = format!("`depth` has {} entries, and the model applies {ours} layers", list.len());
        let help = "write one for each application, loops unrolled: a layer of the donor, or a list of some";
        return Err(refused(message, help.into()));
    }
    for (i, layers) in list.iter().enumerate() {
        if let Some(layer) = layers.iter().find(|layer| **layer >= theirs as u64) {
            let at = At::Field(format!("transplant.depth[{i}]"));
            let message = format!("the donor has no layer {layer}");
            let help = format!("it applies {theirs}, counted from 0");
            return Err(TransplantError::new("out-of-range", at, message, help));
        }
    }
    let even =
        |layers: &Vec<u64>| layers.iter().map(|layer| (*layer as usize, 1.0 / layers.len() as f64)).collect();
    Ok(list.iter().map(even).collect())
}

fn undecided(ours: usize, theirs: usize) -> TransplantError {
    let ways = match ours < theirs {
        true => "`spread` leaves layers out, `average` and `interpolate` take means",
        false => {
            "`zero` adds layers that do nothing at first, `stack` and `spread` repeat layers, `interpolate` takes means"
        }
    };
    let example = match ours < theirs {
        true => "[0, [1, 2], 3]",
        false => "[0, 0, 1, 1]",
    };
    let message =
        format!("the model applies {ours} layers and the donor {theirs}, which can be done in several ways");
    refused(
        message,
        format!("write `transplant.depth`: {ways}; or the donor's layer for each, such as `{example}`"),
    )
}

fn refused(message: String, help: String) -> TransplantError {
    TransplantError::new("undecided", At::Field("transplant.depth".into()), message, help)
}

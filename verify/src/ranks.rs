//! Several ranks train what one trains.

use super::subject::{Subject, apart, poisoned};
use super::trial::{CUT, ROWS, STEPS, Trial, checkpoint, lines, same_bits};
use super::{Checks, Place, Proof, VerifyError, length, widen};
use dreamc_compiler::compiled::{Tensor, TensorKind};
use dreamc_data::{Batch, Cursor};
use dreamc_device::group::{Group, local};
use dreamc_dsl::spec::{Component, Item, Shard};
use dreamc_runtime::checkpoint::Checkpoint;
use dreamc_runtime::model::{Model, Scale};
use dreamc_runtime::train::folder::RunFolder;
use dreamc_runtime::train::{Prepared, TrainError};
use indexmap::IndexMap;
use std::thread;
use std::time::Duration;

/// A rank that hangs is a bug.
const PATIENCE: Duration = Duration::from_secs(300);

/// How far sums in another order may be from one another: losses and gradients of one step.
const ROUNDING: f64 = 1e-5;

/// How far losses may be after updates of gradients that are so far apart.
const LATER: f64 = 1e-3;

/// How far they may be where a model amplifies rounding: an update divides by the root of squares,
/// so that the sign of a gradient near zero moves a weight by the whole rate.
const FAR: f64 = 1e-2;

/// The proof's name: it is tried where ranks are asked for.
pub const NAME: &str = "ranks";

/// Ranks are one rank.
pub struct Ranks;

impl Proof for Ranks {
    fn name(&self) -> &'static str {
        NAME
    }

    fn claim(&self) -> &'static str {
        "several ranks train what one trains"
    }

    fn how(&self) -> &'static str {
        "six steps on a generated task, of two micro-batches a rank, in threads: gradients, counts and losses against those \
         of one rank; the bits of every rank, and of three and three steps; checkpoints of several ranks continued by one, \
         and of one by several; the same bits with the optimizer's states cut over the ranks, from the first step and from \
         checkpoints with whole ones; with weights cut the same bits where a rank has one micro-batch, and gradients that \
         are the sums of such where it has two; with experts over ranks the same bits of gradients, alone and with each \
         of these, losses of whole runs, and checkpoints continued both ways"
    }

    fn prove(&self, s: &Subject, checks: &mut Checks) -> Result<Option<String>, VerifyError> {
        let n = s.ranks;
        if n < 2 {
            return Ok(Some("one rank: `--ranks 4` compares four with it".into()));
        }
        let trial = Trial::new(s, 2 * n)?;
        let (one, many) = (trial.team(s, 1, Shard::None)?, trial.team(s, n, Shard::None)?);
        let cut = trial.team(s, n, Shard::Optimizer)?;
        let batch = trial.dataset.train(Cursor::default())?.take((ROWS * 2 * n) as usize)?;
        if let Some(batch) = batch {
            let found = step(s, &trial, &many, (&batch, None))?;
            compare(checks, &found, &step(s, &trial, &one, (&batch, None))?);
            let part = step(s, &trial, &cut, (&batch, None))?;
            let off = [(part.norm, found.norm), (part.loss, found.loss)].map(|(a, b)| (a - b).abs());
            checks.check("norm and loss, states cut over ranks", off[0].max(off[1]), 0.0, Place::default());
        }
        let [alone, together, parted] = [("one", &one[..]), ("many", &many), ("cut", &cut)].map(
            |(name, team)| -> Result<_, VerifyError> {
                let folder = trial.folder(name)?;
                go(s, &trial, team, &folder, None)?;
                Ok(folder)
            },
        );
        let (alone, together, parted) = (alone?, together?, parted?);
        let later = later(s, &trial, (&alone, &together))?;
        losses(checks, "", (&together, &alone), (1, later))?;
        let continued = |name: &str, team: &[Prepared], folder| -> Result<RunFolder, VerifyError> {
            let rest = trial.folder(name)?;
            go(s, &trial, team, &rest, Some(checkpoint(folder, CUT)?))?;
            Ok(rest)
        };
        let whole = checkpoint(&together, STEPS)?;
        same_bits(checks, &whole, &checkpoint(&continued("many after many", &many, &together)?, STEPS)?)?;
        same_bits(checks, &whole, &checkpoint(&parted, STEPS)?)?;
        same_bits(checks, &whole, &checkpoint(&continued("cut after many", &cut, &together)?, STEPS)?)?;
        same_bits(checks, &whole, &checkpoint(&continued("many after cut", &many, &parted)?, STEPS)?)?;
        losses(checks, "states cut over ranks: ", (&parted, &together), (1, later))?;
        held(checks, &many[0], &cut);
        losses(
            checks,
            "one rank after several: ",
            (&continued("one after many", &one, &together)?, &alone),
            (CUT + 1, later),
        )?;
        losses(
            checks,
            "several ranks after one: ",
            (&continued("many after one", &many, &alone)?, &alone),
            (CUT + 1, later),
        )?;
        spread(s, checks, (&trial, &many, &together), later)?;
        experts(s, checks, later)?;
        Ok(None)
    }
}

/// Proves weights that are cut over the ranks against a team with whole ones and what it trained.
///
/// A rank with cut weights adds the sum of each micro-batch to its part, one with whole weights
/// sums what it added up: the bits of both are equal where there is one micro-batch.
fn spread(
    s: &Subject,
    checks: &mut Checks,
    (trial, many, together): (&Trial, &[Prepared], &RunFolder),
    later: f64,
) -> Result<(), VerifyError> {
    let n = s.ranks;
    let cut = trial.team(s, n, Shard::Weights)?;
    held(checks, &many[0], &cut);
    if let Some(batch) = trial.dataset.train(Cursor::default())?.take((ROWS * 2 * n) as usize)? {
        let of = |team: &[Prepared], which| step(s, trial, team, (&batch, which));
        let (first, second) = (of(many, Some(0))?, of(many, Some(1))?);
        same(checks, "one micro-batch, weights cut over ranks", &of(&cut, Some(0))?, &first);
        let mut sum = of(&cut, None)?;
        // The order of losses and norms is another.
        (sum.loss, sum.auxiliary, sum.norm) = (first.loss, first.auxiliary, first.norm);
        same(checks, "two micro-batches, weights cut over ranks", &sum, &first.plus(&second));
    }
    let folder = trial.folder("spread")?;
    go(s, trial, &cut, &folder, None)?;
    losses(checks, "weights cut over ranks: ", (&folder, together), (1, later))?;
    let single = Trial::new(s, n)?;
    let (many, cut) = (single.team(s, n, Shard::None)?, single.team(s, n, Shard::Weights)?);
    let run = |name: &str, team: &[Prepared], from: Option<&RunFolder>| -> Result<RunFolder, VerifyError> {
        let folder = single.folder(name)?;
        go(s, &single, team, &folder, from.map(|from| checkpoint(from, CUT)).transpose()?)?;
        Ok(folder)
    };
    let (whole, parted) = (run("many", &many, None)?, run("spread", &cut, None)?);
    let expected = checkpoint(&whole, STEPS)?;
    same_bits(checks, &expected, &checkpoint(&parted, STEPS)?)?;
    let after = [("spread after many", &cut, &whole), ("many after spread", &many, &parted)];
    for (name, team, from) in after {
        same_bits(checks, &expected, &checkpoint(&run(name, team, Some(from))?, STEPS)?)?;
    }
    Ok(())
}

/// Proves experts that ranks share against a team where each rank has all, and what it trained.
///
/// Where all ranks own the experts together, an owner adds up what each rank's tokens give, in the
/// order of the ranks, as sums over ranks do: the bits of a step are equal where a rank has one
/// micro-batch, but for gradients that are sums over experts, those of experts in loops, and models
/// whose tokens use all experts.
fn experts(s: &Subject, checks: &mut Checks, later: f64) -> Result<(), VerifyError> {
    let n = s.ranks;
    let Some(trial) = Trial::sharing_experts(s, 2 * n)? else { return Ok(()) };
    let many = trial.team(s, n, Shard::None)?;
    let together = trial.folder("whole experts")?;
    go(s, &trial, &many, &together, None)?;
    let batch = trial.dataset.train(Cursor::default())?.take((ROWS * 2 * n) as usize)?;
    for team in (2..=n).filter(|team| n.is_multiple_of(*team)) {
        for shard in Shard::ALL {
            let own = trial.sharing(s, n, (shard, team))?;
            let name = format!("experts over {team} ranks, {} cut", shard.name());
            if shard.states() {
                held(checks, &many[0], &own);
            }
            if let Some(batch) = &batch {
                steps_of_experts(s, checks, &trial, (&many, &own, &name), (batch, team == n))?;
            }
            // One run for each form of a team, and each of what is cut.
            if (team == n) != (shard == Shard::Optimizer) {
                runs_of_experts(s, checks, &trial, (&many, &own, &name), (&together, later))?;
            }
        }
    }
    Ok(())
}

/// Whether a layer is applied more than once.
fn recurs(items: &[Item]) -> bool {
    items.iter().any(|item| match item {
        Item::Recur { .. } => true,
        Item::Repeat { items, .. } => recurs(items),
        Item::Layer(_) | Item::Statement(_) => false,
    })
}

/// Whether tokens use all experts of a mixture. Where a rank has them, rewriting makes them one
/// network, whose matmuls sum over experts in another order than their owners do.
fn dense(trial: &Trial) -> bool {
    trial.spec.model.components.values().any(|component| match component {
        Component::Experts(e) => e.active >= e.count + e.noop,
        _ => false,
    })
}

/// Compares a step of ranks that share experts with one of ranks that have all.
fn steps_of_experts(
    s: &Subject,
    checks: &mut Checks,
    trial: &Trial,
    (many, own, name): (&[Prepared], &[Prepared], &str),
    (batch, all): (&Batch, bool),
) -> Result<(), VerifyError> {
    for which in [Some(0), None] {
        let (mut found, whole) =
            (step(s, trial, own, (batch, which))?, step(s, trial, many, (batch, which))?);
        let cut = own[0].compiled.cut;
        if cut == Shard::Optimizer {
            // A rank has its part of sums alone, and those of experts.
            let tensors = &own[0].compiled.tensors;
            let stack = |name: &String| tensors.iter().any(|t| t.name == *name && t.owners > 1);
            found.gradients.retain(|name, _| stack(name));
        }
        let mut whole = whole;
        whole.gradients.retain(|name, _| found.gradients.contains_key(name));
        if which.is_some() && all && !dense(trial) {
            // Passes of a loop add to the same experts, owners rank by rank in each of them.
            let passes = recurs(&trial.spec.model.body);
            let in_order = |t: &Tensor| t.kind != TensorKind::Shared && (t.owners == 1 || !passes);
            let exact =
                |name: &String| own[0].compiled.tensors.iter().any(|t| t.name == *name && in_order(t));
            let (mut a, mut b) = (found.clone(), whole.clone());
            [&mut a, &mut b].into_iter().for_each(|of| of.gradients.retain(|name, _| exact(name)));
            // Norms of other parts are added up.
            (a.norm, b.norm) = (0.0, 0.0);
            same(checks, &format!("one micro-batch, {name}"), &a, &b);
        }
        compare(checks, &found, &whole);
    }
    Ok(())
}

/// Compares runs of ranks that share experts with those of ranks that have all, and continues
/// checkpoints of each with the other.
fn runs_of_experts(
    s: &Subject,
    checks: &mut Checks,
    trial: &Trial,
    (many, own, name): (&[Prepared], &[Prepared], &str),
    (together, later): (&RunFolder, f64),
) -> Result<(), VerifyError> {
    let run = |to: &str, team: &[Prepared], from: Option<&RunFolder>| -> Result<RunFolder, VerifyError> {
        let folder = trial.folder(&format!("{name}, {to}"))?;
        go(s, trial, team, &folder, from.map(|from| checkpoint(from, CUT)).transpose()?)?;
        Ok(folder)
    };
    let folder = run("first", own, None)?;
    losses(checks, &format!("{name}: "), (&folder, together), (1, later))?;
    let again = run("again", own, Some(&folder))?;
    same_bits(checks, &checkpoint(&folder, STEPS)?, &checkpoint(&again, STEPS)?)?;
    let (whole, after) = (run("whole", many, Some(&folder))?, run("after whole", own, Some(together))?);
    losses(checks, &format!("whole experts after {name}: "), (&whole, together), (CUT + 1, later))?;
    losses(checks, &format!("{name} after whole experts: "), (&after, together), (CUT + 1, later))
}

/// Compares the sums of a step, which are the same numbers.
fn same(checks: &mut Checks, of: &str, found: &Summed, expected: &Summed) {
    let off =
        [(found.loss, expected.loss), (found.auxiliary, expected.auxiliary), (found.norm, expected.norm)];
    let off = off.map(|(a, b)| (a - b).abs()).into_iter().fold(0.0, f64::max);
    checks.check(format!("norm and losses of {of}"), off, 0.0, Place::default());
    for (name, expected) in &expected.gradients {
        let found = found.gradients.get(name).map_or(&[][..], Vec::as_slice);
        let other = found.iter().zip(expected).filter(|(a, b)| a != b).count();
        let other = other + found.len().abs_diff(expected.len());
        let what = format!("gradient of {name} of {of}");
        checks.check(what, other as f64, 0.0, Place::of_tensor(name));
    }
    for (name, expected) in &expected.counts {
        let other = f64::from(u8::from(found.counts.get(name) != Some(expected)));
        let what = format!("selection counts of {name} of {of}");
        checks.check(what, other, 0.0, Place::of_tensor(name));
    }
}

/// That the parts of the ranks are all of the optimizer's states, each once.
fn held(checks: &mut Checks, whole: &Prepared, cut: &[Prepared]) {
    for (i, tensor) in whole.compiled.tensors.iter().enumerate().filter(|(_, t)| !t.states.is_empty()) {
        // Ranks that own the same experts have them all.
        let owners = cut[0].compiled.tensors[i].owners;
        let ranks = if owners > 1 { owners as usize } else { cut.len() };
        let parts = cut.iter().take(ranks).map(|p| p.compiled.tensors[i].kept.clone());
        let end =
            parts.fold(
                0,
                |end, part| if part.start == end || part.is_empty() { end.max(part.end) } else { u64::MAX },
            );
        let other = end.abs_diff(tensor.elements()) as f64;
        checks.check(
            format!("states of {} on all ranks", tensor.name),
            other,
            0.0,
            Place::of_tensor(&tensor.name),
        );
    }
}

/// The programs of a rank.
fn own<'p>(team: &'p [Prepared], group: &Group) -> &'p Prepared {
    &team[group.rank() as usize % team.len()]
}

/// Runs `f` on every rank; the first error that is not another rank's.
fn on<T: Send>(
    s: &Subject,
    ranks: u64,
    f: impl Fn(Group) -> Result<T, TrainError> + Sync,
) -> Result<Vec<T>, VerifyError> {
    let groups = match ranks {
        1 => vec![Group::alone()],
        n => local::groups(n, PATIENCE).into_iter().map(|group| s.pipeline.group(group)).collect(),
    };
    let results: Vec<Result<T, TrainError>> = thread::scope(|scope| {
        let f = &f;
        let spawn = |group: Group| {
            scope.spawn(move || {
                let rank = group.clone();
                f(group).inspect_err(|error| rank.fail(&error.to_string()))
            })
        };
        let threads: Vec<_> = groups.into_iter().map(spawn).collect();
        let panicked = |_| Err(TrainError::Recipe("a rank panicked".into()));
        threads.into_iter().map(|t| t.join().unwrap_or_else(panicked)).collect()
    });
    let of_others = |e: &TrainError| e.to_string().starts_with("rank ");
    let (own, others): (Vec<_>, Vec<_>) =
        results.into_iter().partition(|r| !r.as_ref().is_err_and(of_others));
    Ok(own.into_iter().chain(others).collect::<Result<_, _>>()?)
}

/// Trains a trial by as many ranks as a team is prepared for.
fn go(
    s: &Subject,
    trial: &Trial,
    team: &[Prepared],
    folder: &RunFolder,
    from: Option<Checkpoint>,
) -> Result<(), VerifyError> {
    let from = std::sync::Mutex::new(from);
    on(s, team[0].ranks, |group| {
        let (leads, prepared) = (group.leads(), own(team, &group));
        let from = if leads { from.lock().map_or(None, |mut from| from.take()) } else { None };
        trial.run(prepared, &poisoned(1), group, leads.then_some(folder), from)
    })
    .map(drop)
}

/// The sums of a step before its update.
#[derive(Clone)]
struct Summed {
    loss: f64,
    auxiliary: f64,
    norm: f64,
    gradients: IndexMap<String, Vec<f64>>,
    counts: IndexMap<String, Vec<f32>>,
}

impl Summed {
    /// These gradients and counts with others added to them.
    fn plus(mut self, other: &Summed) -> Self {
        for (name, own) in &mut self.gradients {
            let more = other.gradients.get(name).map_or(&[][..], Vec::as_slice);
            own.iter_mut().zip(more).for_each(|(a, b)| *a = f64::from(*a as f32 + *b as f32));
        }
        for (name, own) in &mut self.counts {
            let more = other.counts.get(name).map_or(&[][..], Vec::as_slice);
            own.iter_mut().zip(more).for_each(|(a, b)| *a += b);
        }
        self
    }
}

/// One step up to its norm, as rank 0 has it; of one of each rank's micro-batches alone where that
/// is asked for.
fn step(
    s: &Subject,
    trial: &Trial,
    team: &[Prepared],
    (batch, which): (&Batch, Option<usize>),
) -> Result<Summed, VerifyError> {
    let all = on(s, team[0].ranks, |group| {
        let mut model = Model::of_rank(&poisoned(1), own(team, &group).compiled.clone(), &group)?;
        model.initialise(trial.spec.train.seed)?;
        let parts = batch.rows() / ROWS as usize;
        let scale = Scale { loss: 1.0 / batch.learned().max(1) as f32, auxiliary: 1.0 / parts as f32 };
        model.begin_step()?;
        let own = group.share(parts).unwrap_or_default();
        let own = match which {
            Some(which) => own.start + which..own.start + which + 1,
            None => own,
        };
        for part in own.clone() {
            if part + 1 == own.end {
                model.last();
            }
            let first = part * ROWS as usize;
            model.at(1, first as u64);
            model.backward(&batch.slice(first, ROWS as usize), scale, None)?;
        }
        let mut sums = [model.loss()?, model.auxiliary()?.unwrap_or(0.0)];
        group.all_reduce(&mut sums)?;
        let norm = f64::from(model.norm()?);
        let (mut gradients, mut counts) = (IndexMap::new(), IndexMap::new());
        for tensor in model.compiled().tensors.clone() {
            if let Some(mut gradient) = model.gradient(&tensor)? {
                if tensor.cut {
                    gradient = Model::together(&tensor, &group, &gradient)?;
                }
                gradients.insert(tensor.name.clone(), widen(&gradient));
            }
            if tensor.counts.is_some() {
                let found = model.get(&format!("{}.counts", tensor.name))?;
                counts.insert(tensor.name, found);
            }
        }
        let [loss, auxiliary] = sums.map(f64::from);
        Ok(Summed { loss, auxiliary, norm, gradients, counts })
    })?;
    let first = all.into_iter().next();
    first.ok_or_else(|| TrainError::Recipe("a group without ranks".into()).into())
}

fn compare(checks: &mut Checks, found: &Summed, expected: &Summed) {
    let sums = [
        ("loss of a step", found.loss, expected.loss),
        ("losses of routers", found.auxiliary, expected.auxiliary),
        ("gradient norm", found.norm, expected.norm),
    ];
    for (what, a, b) in sums {
        checks.check(what, (a - b).abs() / b.abs().max(1e-6), ROUNDING, Place::default());
    }
    let longest = expected.gradients.values().map(|g| length(g.iter().copied())).fold(0.0, f64::max);
    for (name, expected) in &expected.gradients {
        let found = found.gradients.get(name).map_or(f64::INFINITY, |g| apart(g, expected, longest));
        checks.check(format!("gradient of {name}"), found, ROUNDING, Place::of_tensor(name));
    }
    for (name, expected) in &expected.counts {
        let found = found.counts.get(name);
        let other = f64::from(u8::from(found != Some(expected)));
        checks.check(format!("selection counts of {name}"), other, 0.0, Place::of_tensor(name));
    }
}

/// How far losses of later steps may be from one another: so far as twice as many ranks are from
/// one, and some, where that is further than most models go. Twice as many add the same numbers in
/// a third order, so that what they differ by is what rounding does to this model.
fn later(
    s: &Subject,
    trial: &Trial,
    (alone, together): (&RunFolder, &RunFolder),
) -> Result<f64, VerifyError> {
    if furthest(together, alone)? <= LATER {
        return Ok(LATER);
    }
    let folder = trial.folder("twice as many")?;
    go(s, trial, &trial.team(s, 2 * s.ranks, Shard::None)?, &folder, None)?;
    Ok((4.0 * furthest(&folder, alone)?).clamp(LATER, FAR))
}

/// The losses of two runs from a step on, in pairs with their names.
fn pairs(
    found: &RunFolder,
    expected: &RunFolder,
    first: u64,
) -> Result<Vec<(String, u64, f64, f64)>, VerifyError> {
    let of = |folder: &RunFolder| -> Result<Vec<serde_json::Value>, VerifyError> {
        Ok(lines(folder)?.into_iter().filter(|l| l["step"].as_u64() >= Some(first)).collect())
    };
    let mut all = vec![];
    for (a, b) in of(found)?.iter().zip(&of(expected)?) {
        let step = b["step"].as_u64().unwrap_or(0);
        for name in ["loss", "validation_loss"] {
            if let (Some(a), Some(b)) = (a[name].as_f64(), b[name].as_f64()) {
                all.push((name.to_string(), step, a, b));
            }
        }
    }
    Ok(all)
}

/// How far a loss is from another, of it.
fn off(a: f64, b: f64) -> f64 {
    (a - b).abs() / b.abs().max(1e-6)
}

/// The furthest that losses of two runs are apart.
fn furthest(found: &RunFolder, expected: &RunFolder) -> Result<f64, VerifyError> {
    Ok(pairs(found, expected, 1)?.into_iter().map(|(_, _, a, b)| off(a, b)).fold(0.0, f64::max))
}

/// Compares the losses of two runs from a step on, those of later steps by their own bound.
fn losses(
    checks: &mut Checks,
    of: &str,
    (found, expected): (&RunFolder, &RunFolder),
    (first, later): (u64, f64),
) -> Result<(), VerifyError> {
    let count = |folder: &RunFolder| -> Result<usize, VerifyError> {
        Ok(lines(folder)?.iter().filter(|l| l["step"].as_u64() >= Some(first)).count())
    };
    let other = count(found)?.abs_diff(count(expected)?);
    checks.check(format!("{of}lines of metrics"), other as f64, 0.0, Place::default());
    for (name, step, a, b) in pairs(found, expected, first)? {
        let bound = if step == 1 { ROUNDING } else { later };
        checks.check(format!("{of}{name} of step {step}"), off(a, b), bound, Place::default());
    }
    Ok(())
}

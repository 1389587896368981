//! `dreamc transplant`: first weights from a model of another architecture.

use crate::arguments::{BaseArguments, DeviceArguments, SpecArguments};
use crate::command::analyze::rank::kept;
use crate::command::import::name;
use clap::Args;
use dreamc_compiler::rewrite::Rewriting;
use dreamc_device::Device;
use dreamc_dsl::Spec;
use dreamc_dsl::spec::{Attention, Component, Depth, Item};
use dreamc_runtime::analysis::observe;
use dreamc_runtime::checkpoint::folder;
use dreamc_runtime::model::Model;
use dreamc_runtime::train::prepare;
use dreamc_study::failure::{Done, Failure};
use dreamc_study::model::Trained;
use dreamc_study::number::grouped;
use dreamc_study::show::bytes;
use dreamc_study::spec::open_data;
use dreamc_study::transplant::{Proof, Transplantation};
use dreamc_study::{note, say, show, transplant};
use dreamc_transplant::{Claim, Move, Same, Side, Source, Step};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Rows by which layers are chosen.
const ROWS: u64 = 64;

/// Make the first weights of a model from those of another architecture
#[derive(Args)]
#[command(after_help = "\
SPEC is the new model; what its `transplant` section does not say is proposed from names, roles and shapes. The plan has every tensor,
where it comes from and how, what of the donor is left over, and which parts compute the donor's function at the start. Where all of
the model does, the logits of both are compared before anything is written. FOLDER is a model like an import: `train`, `eval`,
`generate` and `export` take it.

Examples:
  dreamc transplant moe.yaml --from runs/dense --plan
  dreamc transplant moe.yaml --from runs/dense -o upcycled
  dreamc transplant latent.yaml --from runs/dense --pairs --rank 0.9 -o latent
  dreamc transplant shorter.yaml --from runs/dense --drop -o shorter
  dreamc transplant deeper.yaml --from runs/dense --set transplant.depth=zero -o deeper
  dreamc train upcycled --data book.txt")]
pub struct Arguments {
    #[command(flatten)]
    spec: SpecArguments,

    /// The donor: a run folder, a checkpoint or an imported model
    #[arg(long, value_name = "MODEL")]
    from: Option<PathBuf>,

    /// Make one of the donor's neighbouring layers whose work is most alike, over 64 rows of its
    /// held-out data, as many as the model applies
    #[arg(long, conflicts_with = "drop")]
    tie: bool,

    /// Turn the pairs of the donor's rotations that contribute most to its scores, over 64 rows of
    /// its held-out data, in latent attention that comes of its heads
    #[arg(long)]
    pairs: bool,

    /// Size the factors of loops (`lora`) to the least rank that keeps this share of the squares of
    /// what layers differ by, and latents (`kv`) to that of keys and values
    #[arg(long, value_name = "SHARE", value_parser = positive_share)]
    rank: Option<f64>,

    /// Leave out the donor's layers of the least block influence, over 64 rows of its held-out data
    #[arg(long)]
    drop: bool,

    /// Where the model goes; `imports/NAME` by default
    #[arg(short, long, value_name = "FOLDER")]
    out: Option<PathBuf>,

    /// Show the plan and write nothing
    #[arg(long)]
    plan: bool,

    /// Print the plan as JSON
    #[arg(long)]
    json: bool,

    /// Replace the model that is in FOLDER
    #[arg(long)]
    force: bool,

    #[command(flatten)]
    base: BaseArguments,

    #[command(flatten)]
    device: DeviceArguments,
}

/// A share above 0, at most 1.
fn positive_share(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|share| *share > 0.0 && *share <= 1.0);
    number.ok_or_else(|| "a share is a number above 0, at most 1".into())
}

pub fn run(a: Arguments) -> Done {
    let mut spec = a.spec.load()?;
    dreamc_study::spec::make_absolute(&mut spec, &a.spec.base());
    let written = spec.transplant.as_ref().and_then(|transplant| transplant.from.as_ref());
    let path = match (&a.from, written) {
        (Some(from), _) => from.clone(),
        (None, Some(from)) => PathBuf::from(from),
        (None, None) => {
            let help = "name the donor with --from, or as `transplant: {from: …}`";
            return Err(Failure::Usage(format!("{} names no donor: {help}", a.spec.spec.display())));
        }
    };
    let donor = match Trained::open(&path, a.base.moved(), &[], Rewriting::off()) {
        Ok(donor) => donor,
        Err(failure) if a.from.is_none() => return Err(transplant::missing(&spec, &failure)),
        Err(failure) => return Err(failure),
    };
    let out = match &a.out {
        Some(out) => out.clone(),
        None => Path::new("imports").join(&spec.model.name),
    };
    itself(&path, &out)?;
    if !a.plan {
        folder::free(&out, a.force)?;
    }
    let device = a.device.open()?;
    if a.drop || a.tie {
        let depth = proposed(&spec, &donor, device.as_ref(), a.tie)?;
        spec.transplant.get_or_insert_default().depth = Some(depth);
    }
    if a.pairs {
        transplant::pairs::choose(&mut spec, &donor, device.as_ref(), ROWS)?;
    }
    if let Some(share) = a.rank {
        rank(&mut spec, &donor, share)?;
    }
    let work = Transplantation::plan(&spec, &donor)?;
    if a.plan {
        return report(&a, &work, None);
    }
    let values = work.values()?;
    let proof = work.proved(&values, device.as_ref())?;
    let written = work.write(&values, &out, a.force)?;
    report(&a, &work, proof)?;
    if !a.json {
        let (out, from) = (out.display(), name(&path)?);
        say!("{}, from {from}: {}", spec.model.name, bytes(written))?;
        let next = if spec.data.is_some() { "" } else { " --data FILE" };
        say!("left in {out}; next:\n  dreamc train {out}{next}")?;
    }
    Ok(())
}

/// The donor's layers that the model takes: as many as it applies of the most block influence, or
/// means of neighbours whose work is most alike.
fn proposed(spec: &Spec, donor: &Trained, device: &dyn Device, tie: bool) -> Result<Depth, Failure> {
    let flag = if tie { "--tie" } else { "--drop" };
    if spec.transplant.as_ref().is_some_and(|transplant| transplant.depth.is_some()) {
        return Err(Failure::Usage(format!(
            "{flag} chooses layers, and `transplant.depth` names them: take one away"
        )));
    }
    let ours = Side::new(spec)?.depths.len();
    let nothing = || {
        let what = "the donor has no held-out data by which layers are chosen; write `transplant.depth`";
        Failure::Usage(what.into())
    };
    let data = donor.spec.data.as_ref().ok_or_else(nothing)?;
    let dataset = open_data(&donor.spec, data, None)?;
    let mut held = dataset.validation()?.ok_or_else(nothing)?;
    let observer = prepare::observer(&donor.spec, &donor.rewriting, donor.storing(device))?;
    let mut model = Model::load(device, observer)?;
    model.restore(&donor.tensors)?;
    let streams = observe(&mut model, &donor.spec, &mut held, ROWS)?.streams;
    let (influence, similarity) = (streams.influence, streams.similarity);
    if ours > influence.len() {
        let theirs = influence.len();
        return Err(Failure::Usage(format!(
            "{flag} makes fewer layers of more, and the model applies {ours}, the donor {theirs}"
        )));
    }
    if tie {
        let groups = alike(&similarity, ours);
        for group in groups.iter().filter(|group| group.len() > 1) {
            note!("layers {group:?} of the donor are one: what they add to the stream is most alike");
        }
        return Ok(Depth::Given(groups));
    }
    let mut order: Vec<usize> = (0..influence.len()).collect();
    order.sort_by(|a, b| influence[*b].total_cmp(&influence[*a]).then(a.cmp(b)));
    let (mut kept, mut left) = (order[..ours].to_vec(), order[ours..].to_vec());
    kept.sort_unstable();
    left.sort_unstable();
    for layer in left {
        note!("layer {layer} of the donor is left out: its block influence is {:.4}", influence[layer]);
    }
    Ok(Depth::Given(kept.into_iter().map(|layer| vec![layer as u64]).collect()))
}

/// `groups` groups of neighbours with the largest sum of similarities: each costs the sum
/// of `1 - similarity` of its pairs.
fn alike(similarity: &[Vec<f64>], groups: usize) -> Vec<Vec<u64>> {
    let all = similarity.len();
    let cost = |from: usize, to: usize| -> f64 {
        (from..to).flat_map(|i| (from..i).map(move |j| (i, j))).map(|(i, j)| 1.0 - similarity[i][j]).sum()
    };
    // Of each number of groups and each end, the least cost and where the last group begins.
    let mut best = vec![vec![(f64::INFINITY, 0); all + 1]; groups + 1];
    best[0][0] = (0.0, 0);
    for count in 1..=groups {
        for to in count..=all {
            for from in count - 1..to {
                let sum = best[count - 1][from].0 + cost(from, to);
                if sum < best[count][to].0 {
                    best[count][to] = (sum, from);
                }
            }
        }
    }
    let (mut to, mut found) = (all, vec![]);
    for count in (1..=groups).rev() {
        let from = best[count][to].1;
        found.push((from as u64..to as u64).collect());
        to = from;
    }
    found.reverse();
    found
}

/// Gives the loops of a model the least rank by which factors keep a share of what layers differ
/// by, of every matrix; and latents that of keys and values.
fn rank(spec: &mut Spec, donor: &Trained, share: f64) -> Done {
    let loops = |item: &&mut Item| matches!(item, Item::Recur { looping, .. } if looping.lora.is_some());
    let work = Transplantation::plan(spec, donor)?;
    let mut least = 0;
    for m in &work.plan.moves {
        let [Step::Factor { base, first: true, .. }] = &m.steps[..] else { continue };
        for values in work.differences(&m.from, base)? {
            least = least.max(kept(&values, share) as u64);
        }
    }
    let mut latents: BTreeMap<String, u64> = BTreeMap::new();
    for (m, t) in work.plan.moves.iter().zip(&work.new.tensors) {
        if let (Some(values), Some(component)) = (work.spectrum(m)?, t.component()) {
            let most = latents.entry(component.into()).or_default();
            *most = (*most).max(kept(&values, share).max(1) as u64);
        }
    }
    for (name, kv) in &latents {
        if let Some(Component::Sequence(Attention { latent: Some(l), .. })) =
            spec.model.components.get_mut(name)
        {
            l.kv = *kv;
        }
        note!(
            "`{name}` has latents of {kv}: they keep {share} of the squares of keys and values, in every layer"
        );
    }
    let mut own = spec.model.body.iter_mut().filter(loops).peekable();
    if least == 0 || own.peek().is_none() {
        if !latents.is_empty() {
            return Ok(());
        }
        return Err(Failure::Usage(
            "--rank sizes the factors of a loop and latents, and the model has none that come from the donor: write `lora: 1` in its `recur`".into(),
        ));
    }
    for item in own {
        if let Item::Recur { looping, .. } = item {
            looping.lora = Some(least);
        }
    }
    note!("rank {least}: it keeps {share} of the squares of what layers differ by, of every matrix");
    Ok(())
}

/// Refuses to put a model in its donor's place.
fn itself(donor: &Path, out: &Path) -> Done {
    let full = |path: &Path| path.canonicalize().or_else(|_| std::path::absolute(path));
    let (from, to) = (full(donor)?, full(out)?);
    if from.starts_with(&to) || to.starts_with(&from) {
        let (donor, out) = (donor.display(), out.display());
        return Err(Failure::Usage(format!(
            "{out} is the donor's own folder, {donor}: a model does not come of itself; choose another place with -o"
        )));
    }
    Ok(())
}

fn report(a: &Arguments, work: &Transplantation, proof: Option<Proof>) -> Done {
    if a.json {
        let mut plan = serde_json::to_value(&work.plan)?;
        plan["proof"] = serde_json::to_value(proof)?;
        return Ok(show::json(&plan)?);
    }
    let mut rows = vec![["tensor", "shape", "from", "how"].map(String::from).to_vec()];
    rows.extend(lines(&work.plan.moves, &work.new, &work.old));
    say!("{}", left(&rows))?;
    let lost: u64 =
        work.plan.left.iter().filter_map(|name| work.old.tensor(name)).map(|t| t.elements()).sum();
    let names: Vec<Tail> = work.plan.left.iter().filter_map(|name| split(&work.old, name)).collect();
    match names.is_empty() {
        true => say!("left over: nothing of the donor")?,
        false => say!("left over: {} ({} numbers)", merged(&names), grouped(lost.into()))?,
    }
    for line in claims(&work.plan.claims) {
        say!("{line}")?;
    }
    if let Some(proof) = proof {
        let Proof { difference, tokens } = proof;
        say!(
            "proved: the logits of {tokens} tokens differ from the donor's by {difference:.1e} of the largest"
        )?;
    }
    Ok(())
}

/// Columns to the left.
fn left(rows: &[Vec<String>]) -> String {
    let width = |c: usize| rows.iter().map(|row| row[c].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..4).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_string()
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// A name without the number of its layer, and the number.
type Tail = (String, Option<usize>);

/// The two parts of a tensor's name.
fn split(side: &Side, name: &str) -> Option<Tail> {
    let set = side.tensor(name)?.set();
    Some(match set {
        Some(set) => (name.strip_prefix(&format!("layers.{set}."))?.to_string(), Some(set)),
        None => (name.to_string(), None),
    })
}

/// Numbers as ranges: `0-3, 5`.
fn ranges(numbers: &[usize]) -> String {
    let mut words: Vec<String> = vec![];
    let mut i = 0;
    while i < numbers.len() {
        let mut j = i;
        while j + 1 < numbers.len() && numbers[j + 1] == numbers[j] + 1 {
            j += 1;
        }
        words.push(match j - i {
            0 => numbers[i].to_string(),
            _ => format!("{}-{}", numbers[i], numbers[j]),
        });
        i = j + 1;
    }
    words.join(",")
}

/// Names of one tail together.
fn merged(names: &[Tail]) -> String {
    let mut groups: Vec<(&str, Vec<usize>)> = vec![];
    for (tail, set) in names {
        match groups.iter_mut().find(|(name, _)| name == tail) {
            Some((_, sets)) => sets.extend(set),
            None => groups.push((tail, set.iter().copied().collect())),
        }
    }
    let one = |(tail, sets): &(&str, Vec<usize>)| match sets[..] {
        [] => tail.to_string(),
        _ => format!("layers.{}.{tail}", ranges(sets)),
    };
    groups.iter().map(one).collect::<Vec<_>>().join(", ")
}

/// A line for the tensors of all layers that come in one way.
fn lines(moves: &[Move], new: &Side, old: &Side) -> Vec<Vec<String>> {
    let rows = |source: &Source| match &source.rows {
        Some(rows) => format!("[{}..{}]", rows.start, rows.end),
        None => String::new(),
    };
    let mut groups: Vec<(String, String, Vec<&Move>)> = vec![];
    for m in moves {
        let Some((tail, set)) = split(new, &m.to) else { continue };
        let from = m.from.iter().filter_map(|s| Some(split(old, &s.name)?.0 + &rows(s)));
        let key = format!("{:?}{:?}{}", set.is_some(), from.collect::<Vec<_>>(), m.words());
        match groups.iter_mut().find(|(name, other, _)| (name, other) == (&tail, &key)) {
            Some((.., all)) => all.push(m),
            None => groups.push((tail, key, vec![m])),
        }
    }
    let line = |all: &[&Move]| {
        let to: Vec<_> = all.iter().filter_map(|m| split(new, &m.to)).collect();
        let mut from = vec![];
        for source in all.iter().flat_map(|m| &m.from) {
            let Some((tail, set)) = split(old, &source.name) else { continue };
            let name = (tail + &rows(source), set);
            if !from.contains(&name) {
                from.push(name);
            }
        }
        let shape: Vec<String> = all[0].shape.iter().map(u64::to_string).collect();
        vec![merged(&to), format!("[{}]", shape.join(", ")), merged(&from), all[0].words()]
    };
    groups.iter().map(|(.., all)| line(all)).collect()
}

/// Claims, parts of one reason together.
fn claims(claims: &[Claim]) -> Vec<String> {
    let words = |same: &Same| match same {
        Same::Same => "the donor's function at the start".to_string(),
        Same::IfEqual(_) => "the donor's function where its layers are equal".into(),
        Same::Silent => "adds nothing to the stream at the start".into(),
        Same::Otherwise(reason) => format!("another function: {reason}"),
    };
    let part = |name: &str| match name.strip_prefix("layers.").and_then(|rest| rest.split_once('.')) {
        Some((set, rest)) => (rest.to_string(), set.parse().ok()),
        None => (name.to_string(), None),
    };
    let mut groups: Vec<(String, Vec<Tail>)> = vec![];
    for claim in claims {
        let words = words(&claim.same);
        match groups.iter_mut().find(|(other, _)| *other == words) {
            Some((_, parts)) => parts.push(part(&claim.part)),
            None => groups.push((words, vec![part(&claim.part)])),
        }
    }
    groups.into_iter().map(|(words, parts)| format!("{}: {words}", merged(&parts))).collect()
}

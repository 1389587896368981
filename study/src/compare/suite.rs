//! The way of a suite: the comparison that is asked for, from a file to a report.

use super::agreement::{self, Comparison, Facts};
use super::arms::{self, Arm, Matching};
use super::made::{self, Made};
use super::study::{Manifest, Study, spec_file};
use super::{exam, ladder, page, training};
use crate::device::{Kind, Where};
use crate::failure::{Done, Failure};
use crate::number::{decimal_bytes, decimals, grouped, many};
use crate::rewriting::Choice;
use crate::show::table;
use crate::spec::{Named, open_data, resolved, warn};
use crate::{note, say, transplant};
use dreamc_compiler::count::{figures, training_flops};
use dreamc_compiler::transfer;
use dreamc_data::files;
use dreamc_dsl::suite::Suite;
use dreamc_dsl::{FileKind, Spec, Spelling};
use std::path::{Path, PathBuf};

/// The comparison that is asked for.
pub struct Asked {
    /// The suite, or specifications, the baseline first; one at least.
    pub files: Vec<PathBuf>,
    /// The suite, once it is known.
    pub suite: PathBuf,
    /// Of specifications: the seeds 0 to N - 1.
    pub seeds: Option<usize>,
    /// Fields of the suite that are changed.
    pub set: Vec<String>,
    /// Folder of the comparison; `runs/NAME` where none is named.
    pub out: Option<PathBuf>,
    /// Runs trained at once, which share the threads.
    pub jobs: usize,
    /// Devices that each train a run, in place of `jobs`.
    pub devices: Vec<Kind>,
    /// Share the folder with other processes.
    pub worker: bool,
    /// Print a job script for SLURM with this many workers, and stop.
    pub slurm: Option<usize>,
    /// Train arms that do not agree, too.
    pub allow_unequal: bool,
    /// Train anew what is there already.
    pub force: bool,
    /// Match, check, and stop.
    pub dry_run: bool,
    /// FLOPs a second that hours are for, in place of measuring them.
    pub rate: Option<f64>,
    /// Where to run.
    pub device: Where,
    /// Which rewriting rules are used.
    pub rewriting: Choice,
}

impl Asked {
    /// Runs trained at once by this process.
    pub fn at_once(&self) -> usize {
        if self.devices.is_empty() { self.jobs } else { self.devices.len() }
    }

    /// A job script in which this many workers share the comparison.
    fn script(&self, workers: usize, name: &str, folder: &Path) -> Result<String, Failure> {
        let quoted = |text: &str| format!("'{}'", text.replace('\'', "'\\''"));
        let here = |path: &Path| std::path::absolute(path).map(|p| quoted(&p.display().to_string()));
        let mut line = vec!["dreamc compare".into(), here(&self.suite)?, "--out".into(), here(folder)?];
        line.extend(self.set.iter().flat_map(|set| ["--set".into(), quoted(set)]));
        line.extend(["--worker".into(), format!("--device {}", self.device.device)]);
        line.extend(self.device.threads.map(|n| format!("--threads {n}")));
        line.extend(self.allow_unequal.then(|| "--allow-unequal".into()));
        let name: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        let gpu =
            if matches!(self.device.device, Kind::Cuda(_)) { "#SBATCH --gpus-per-task=1\n" } else { "" };
        Ok(format!(
            "#!/bin/bash\n#SBATCH --job-name={name}\n#SBATCH --array=0-{}\n#SBATCH --ntasks=1\n{gpu}#SBATCH --requeue\n\
             # Each task is a worker: runs are claimed in the folder, those of a worker that ended are taken over.\n\
             # Add --partition, --time and --account as your cluster asks.\nset -eu\nexec {}\n",
            workers - 1,
            line.join(" ")
        ))
    }
}

impl Asked {
    /// Of a suite of an exam, in a folder of its own.
    pub fn of_suite(suite: PathBuf, folder: PathBuf, allow_unequal: bool, exam: &exam::Asked) -> Self {
        Asked {
            files: vec![suite.clone()],
            suite,
            seeds: None,
            set: vec![],
            out: Some(folder),
            jobs: exam.jobs,
            devices: vec![],
            worker: false,
            slurm: None,
            allow_unequal,
            force: false,
            dry_run: false,
            rate: None,
            device: exam.device.clone(),
            rewriting: exam.rewriting.clone(),
        }
    }

    /// The suite that the specifications of the command line make; `None` where it names a suite.
    fn made(&mut self) -> Result<Option<Made>, Failure> {
        self.suite.clone_from(&self.files[0]);
        let folder = self.suite.is_dir();
        if !folder && dreamc_dsl::parse_file(&self.suite)?.kind == FileKind::Suite {
            return match (self.files.len(), self.seeds) {
                (1, None) => Ok(None),
                (1, Some(n)) => {
                    let seeds = list(&(0..n as u64).collect::<Vec<_>>());
                    Err(Failure::Usage(format!(
                        "a suite says its seeds itself: write `--set 'seeds=[{seeds}]'`"
                    )))
                }
                _ => Err(Failure::Usage("name one suite, or specifications".into())),
            };
        }
        if self.files.len() == 1 {
            let path = self.suite.display();
            return Err(Failure::Usage(format!(
                "{path} is one specification and not a suite: name those that are compared with it, too; `dreamc train {path} --seeds 3` \
                 trains it alone"
            )));
        }
        let made = made::suite(&self.files, self.seeds.unwrap_or(1) as u64, !self.allow_unequal)?;
        self.suite.clone_from(&made.path);
        Ok(Some(made))
    }
}

/// Runs the comparison that is asked for, or goes on with it.
pub fn run(mut a: Asked) -> Done {
    let made = a.made()?;
    let ast = match &made {
        Some(made) => dreamc_dsl::parse(&made.path.to_string_lossy(), &made.text, Spelling::Yaml)?,
        None => dreamc_dsl::parse_file(&a.suite)?,
    };
    let (suite, _) = dreamc_dsl::check_suite(&ast, &a.set)?;
    if let Some(workers) = a.slurm {
        made.iter().try_for_each(Made::write)?;
        let folder = a.out.clone().unwrap_or_else(|| Path::new("runs").join(&suite.name));
        return Ok(say!("{}", a.script(workers, &suite.name, &folder)?.trim_end())?);
    }
    if ladder::climbs(&suite) {
        return ladder::run(&a, suite);
    }
    let base = Named { spec: a.suite.clone(), set: vec![] }.base();
    let none: &arms::Fields = &|_| vec![];
    let (suite, arms) = arms::load_tree(&ast, &base, &a.set, (Matching::default(), none), &mut |_| Ok(()))?;
    arms.iter().for_each(|arm| warn(&arm.spec.sources, transfer::findings(&arm.spec)));
    let costs = agree(a.allow_unequal, &suite, &arms)?;
    say!("{}: {}, seeds {}", suite.name, many(arms.len() as u128, "arm"), list(&suite.seeds))?;
    say!("{costs}")?;
    let folder = a.out.clone().unwrap_or_else(|| Path::new("runs").join(&suite.name));
    let plan = training::Plan {
        folder: &folder,
        seeds: &suite.seeds,
        device: &a.device,
        rewriting: &a.rewriting,
        jobs: a.at_once(),
        devices: &a.devices,
        worker: a.worker,
        force: a.force,
        numbers: (0, arms.len() * suite.seeds.len()),
        later: if a.worker { 0.0 } else { ((arms.len() - 1) * suite.seeds.len()) as f64 },
        trunk: None,
    };
    training::check(&arms, &plan)?;
    if let Some(made) = &made {
        if a.dry_run {
            return Ok(say!("\n{} would be\n{}", made.path.display(), made.text.trim_end())?);
        }
        made.write()?;
        say!("the suite is {}", made.path.display())?;
    }
    if a.dry_run {
        return Ok(());
    }
    std::fs::create_dir_all(&folder).map_err(|e| files::about(&folder, e))?;
    let names = arms.iter().map(|arm| arm.name.clone()).collect();
    // The manifest goes first: by it the folder is known as ours, should the rest not be written.
    Manifest::new(&suite, &a.suite, &a.set, names)?.write(&folder)?;
    for arm in &arms {
        let text = resolved(&arm.spec);
        files::write_atomic(&spec_file(&folder, &arm.name), |out| out.write_all(text.as_bytes()))?;
    }
    let _ = say!("left in {}\n", folder.display());
    // The baseline's seeds first: they show the noise. Workers would wait for them.
    let first = if a.worker { &arms } else { &arms[..1] };
    let mut found = training::train(first, &plan);
    if found.stopped.is_none() && first.len() < arms.len() {
        let losses = ladder::losses(&folder, &arms[0].name, &suite.seeds)?;
        if let Some(least) = ladder::noise(&losses, arms.len() - 1) {
            say!("{least}")?;
        }
        let numbers = (suite.seeds.len(), plan.numbers.1);
        let rest = training::train(&arms[1..], &training::Plan { numbers, later: 0.0, ..plan });
        found.trained += rest.trained;
        found.skipped += rest.skipped;
        found.failed.extend(rest.failed);
        found.stopped = rest.stopped;
    }
    let study = Study::read(&folder)?;
    page::page(&study).write(&folder, "report")?;
    say!("\n{}\n", page::summary(&study))?;
    let runs = |n: usize| many(n as u128, "run");
    if found.skipped > 0 {
        let were = if found.skipped == 1 { "was" } else { "were" };
        say!("{} {were} trained before", runs(found.skipped))?;
    }
    say!("{} trained; the report is {}", runs(found.trained), folder.join("report.html").display())?;
    if let Some(signal) = found.stopped {
        say!("{signal}: stopped; the same command goes on")?;
        return Err(Failure::Stopped(signal));
    }
    if !found.failed.is_empty() {
        let names: Vec<&str> = found.failed.iter().map(|(name, _)| name.as_str()).collect();
        return Err(Failure::Error(format!("{} failed: {}", runs(names.len()), names.join("; ")).into()));
    }
    Ok(())
}

/// Costs of the arms, as a table; those that do not agree in what the suite says must be equal are
/// refused, or noted where they are allowed.
pub fn agree(allowed: bool, suite: &Suite, arms: &[Arm]) -> Result<String, Failure> {
    let mut facts = vec![];
    for arm in arms {
        facts.push(before(arm, &arms[0].spec, &suite.seeds)?);
    }
    let mut broken = vec![];
    for (arm, facts_of) in arms.iter().zip(&facts).skip(1) {
        let found = agreement::compare(&suite.equal, (&arms[0].spec, &facts[0]), (&arm.spec, facts_of));
        broken.extend(found.into_iter().filter(|c| !c.agrees).map(|c| (arm.name.as_str(), c)));
    }
    if !broken.is_empty() {
        let text = disagreements(&broken);
        if !allowed {
            return Err(Failure::Error(
                format!(
                    "the arms do not agree in what the suite says must be equal; nothing was trained\n\n{text}{}\n\
                     --allow-unequal trains them as they are",
                    remedies(&broken)
                )
                .into(),
            ));
        }
        note!("the arms do not agree; they will be marked\n\n{text}");
    }
    Ok(resources(arms, &facts))
}

/// Changes with which arms that do not agree would: to an arm, or `equal: {…}` of the suite; of
/// several pairs for one key, the widest.
pub fn remedies(broken: &[(&str, Comparison)]) -> String {
    let mut widest: Vec<&Comparison> = vec![];
    for (_, c) in broken {
        let size = |c: &Comparison| c.difference.map_or(f64::INFINITY, f64::abs);
        match widest.iter_mut().find(|w| w.key == c.key) {
            Some(w) if size(w) < size(c) => *w = c,
            Some(_) => {}
            None => widest.push(c),
        }
    }
    let pairs: Vec<String> = widest.iter().map(|c| c.allowance()).filter(|pair| !pair.is_empty()).collect();
    let advice = agreement::advice(broken.iter().map(|(_, c)| c));
    if pairs.is_empty() {
        return advice.into();
    }
    format!(
        "{advice}\nMatch them (`match` of a variant), or write `equal: {{{}}}` in the suite: a key that is not there is enforced by its \
         default.",
        pairs.join(", ")
    )
}

fn list(numbers: &[u64]) -> String {
    numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")
}

/// Facts about an arm before it is trained.
pub fn before(arm: &Arm, baseline: &Spec, seeds: &[u64]) -> Result<Facts, Failure> {
    let spec = &arm.spec;
    let tokens = Matching::default().tokens(spec, baseline);
    let counted = figures(&spec.model, spec.train.precision, tokens)?;
    let t = &spec.train;
    let tokens = t.steps * t.batch * t.sequence.unwrap_or(spec.model.context);
    let training = training_flops(&spec.model, t)?.mean() + transplant::teacher_flops(spec)?;
    let mut facts = Facts {
        flops: Some(counted.flops_per_token.mean()),
        training: Some(training),
        budget: Some(training * tokens as f64),
        donor: transplant::donor_flops(spec)?.map(|flops| flops as f64),
        parameters: Some(counted.parameters as f64),
        memory: Some(counted.memory_bytes as f64),
        tokens: vec![tokens; seeds.len()],
        seeds: seeds.to_vec(),
        ..Facts::default()
    };
    let Some(data) = &spec.data else {
        return Err(Failure::Usage(format!("{} has no data; give the suite a `data` section", arm.name)));
    };
    for &seed in seeds {
        let mut spec = spec.clone();
        spec.train.seed = seed;
        let dataset = open_data(&spec, data, None)?;
        facts.data.push(dataset.hash());
        facts.tokenizer.push(dataset.tokenizer.fingerprint().into());
    }
    Ok(facts)
}

fn resources(arms: &[Arm], facts: &[Facts]) -> String {
    let mut rows =
        vec![["", "parameters", "FLOPs/token", "memory", "tokens", "matched"].map(String::from).to_vec()];
    for (arm, f) in arms.iter().zip(facts) {
        let fields = arm.matched.iter().flat_map(|m| &m.fields).map(|(field, v)| format!("{field} {v}"));
        rows.push(vec![
            arm.name.clone(),
            f.parameters.map_or(String::new(), decimals),
            f.flops.map_or(String::new(), decimals),
            f.memory.map_or(String::new(), |m| decimal_bytes(m as u128)),
            f.tokens.first().map_or(String::new(), |t| grouped((*t).into())),
            fields.collect::<Vec<_>>().join(", "),
        ]);
    }
    table(&rows)
}

/// The disagreements of arms, as a table.
pub fn disagreements(broken: &[(&str, Comparison)]) -> String {
    let mut rows = vec![["", "", "baseline", "here", "allowed"].map(String::from).to_vec()];
    for (arm, c) in broken {
        let here = match c.difference {
            Some(d) => format!("{} ({:+.3} %)", c.arm, 100.0 * d),
            None => c.arm.clone(),
        };
        let allowed = match c.limit {
            Some(limit) if c.difference.is_some() => format!("± {} %", 100.0 * limit),
            _ => "equal".into(),
        };
        rows.push(vec![arm.to_string(), c.what.into(), c.baseline.clone(), here, allowed]);
    }
    table(&rows)
}

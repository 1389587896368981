//! A suite made of specifications, for `dreamc compare A B`.
//!
//! *In*: specifications, the baseline first. *Out*: the text of a suite that matches the others to
//! it, each by a pair of sizes where its costs are not the baseline's already. *Promise*: the text
//! says all that was decided, so that the suite is a person's own from then on.

use super::agreement::share_above;
use super::arms::Matching;
use crate::failure::Failure;
use crate::spec::{Named, make_absolute, resolved};
use dreamc_compiler::count::{Figures, figures};
use dreamc_compiler::matching::{Matched, Measure, pair};
use dreamc_data::files;
use dreamc_dsl::Spec;
use std::fs;
use std::path::{Path, PathBuf};

/// A suite that stands in no file yet.
pub struct Made {
    /// The text, YAML.
    pub text: String,
    /// The file it belongs into, in the folder where the program runs.
    pub path: PathBuf,
}

/// An arm as it was read.
struct Read {
    /// Its file as the suite names it.
    file: PathBuf,
    name: String,
    spec: Spec,
    /// Sections that it leaves to their defaults, or has none of.
    lacks: Vec<&'static str>,
}

/// Sections that a suite has for all arms.
const SHARED: [&str; 3] = ["data", "train", "eval"];

/// Differences that are allowed, from the closest on: of FLOPs, and of parameters.
const WITHIN: [[f64; 2]; 3] = [[0.005, 0.001], [0.005, 0.005], [0.01, 0.01]];

/// The suite of these specifications with this many seeds; arms that cost differently are matched
/// where `matched` asks for it.
pub fn suite(specs: &[PathBuf], seeds: u64, matched: bool) -> Result<Made, Failure> {
    let arms = Arms::read(specs, matched)?;
    let name: String = arms.names().join("-against-").chars().take(120).collect();
    let (baseline, variants) = (&arms.read[0], &arms.read[1..]);
    let sections: String = SHARED.iter().map(|section| shared(section, baseline, variants)).collect();
    let text = format!("# Made by `dreamc compare`.\n{}", arms.suite(&name, &sections, seeds));
    Ok(Made { text, path: format!("{name}.suite.yaml").into() })
}

/// Specifications that are compared, matched: the part of a suite that names them.
pub struct Arms {
    /// As they were read, the baseline first; one at least.
    read: Vec<Read>,
    /// The keys `baseline` and `variants`.
    text: String,
    within: [f64; 2],
}

impl Arms {
    /// Reads them, the baseline first; those that cost differently are matched where `matched` asks
    /// for it.
    pub fn read(specs: &[PathBuf], matched: bool) -> Result<Self, Failure> {
        let mut arms = vec![];
        for path in specs {
            arms.push(read(path, &arms)?);
        }
        let (baseline, variants) =
            arms.split_first().ok_or_else(|| Failure::Usage("name specifications".into()))?;
        let mut text = format!("baseline: {}\n", quoted(&baseline.file));
        let mut within = WITHIN[0];
        if !variants.is_empty() {
            text += "variants:\n";
        }
        for arm in variants {
            text += &format!("  - spec: {}\n    name: {}\n", quoted(&arm.file), arm.name);
            if let Some(fields) = fields(baseline, arm, matched, &mut within)? {
                text += &format!("    match: {{{fields}}}\n");
            }
        }
        Ok(Arms { read: arms, text, within })
    }

    /// Their names, the baseline first.
    pub fn names(&self) -> Vec<&str> {
        self.read.iter().map(|arm| arm.name.as_str()).collect()
    }

    /// The text of a suite of them with sections for all arms, and the seeds 0 to `seeds` - 1.
    pub fn suite(&self, name: &str, sections: &str, seeds: u64) -> String {
        let [flops, parameters] = self.within.map(share_above);
        let equal = match self.within == WITHIN[0] {
            true => String::new(),
            false => format!("equal: {{flops: {flops}, parameters: {parameters}}}\n"),
        };
        let seeds: Vec<String> = (0..seeds).map(|seed| seed.to_string()).collect();
        format!("name: {name}\n{}{sections}{equal}seeds: [{}]\n", self.text, seeds.join(", "))
    }
}

impl Made {
    /// Leaves the suite in its file, where nothing else stands in it.
    pub fn write(&self) -> Result<(), Failure> {
        match fs::read_to_string(&self.path) {
            Ok(text) if text == self.text => Ok(()),
            Ok(_) => Err(Failure::Usage(format!(
                "{} is another suite than these specifications make, and is left alone: `dreamc compare {}` runs it; rename it to make another",
                self.path.display(),
                self.path.display()
            ))),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                Ok(files::write_atomic(&self.path, |out| out.write_all(self.text.as_bytes()))?)
            }
            Err(error) => Err(files::about(&self.path, error).into()),
        }
    }
}

fn read(path: &Path, before: &[Read]) -> Result<Read, Failure> {
    let arguments = Named { spec: path.into(), set: vec![] };
    let mut spec = arguments.load()?;
    let file = if path.is_dir() { path.join("spec.yaml") } else { path.to_path_buf() };
    let ast = dreamc_dsl::parse_file(&file)?;
    let lacks = |section: &&str| ast.root.get(section).is_none() && ast.root.get("base").is_none();
    let lacks = SHARED.into_iter().filter(lacks).collect();
    make_absolute(&mut spec, &arguments.base());
    // Paths of the suite are relative to its folder, which is this one.
    if let Ok(here) = std::env::current_dir() {
        for path in spec.paths() {
            if let Ok(inside) = Path::new(&*path).strip_prefix(&here) {
                *path = inside.to_string_lossy().into_owned();
            }
        }
    }
    let taken = |name: &str| before.iter().any(|arm| arm.name == name);
    let mut name = spec.model.name.clone();
    let mut number = 2;
    while taken(&name) {
        name = format!("{}-{number}", spec.model.name);
        number += 1;
    }
    Ok(Read { file, name, spec, lacks })
}

/// The pairs of `match` of an arm; `None` where it costs what the baseline costs. `within` grows to
/// what is left.
fn fields(
    baseline: &Read,
    arm: &Read,
    matched: bool,
    within: &mut [f64; 2],
) -> Result<Option<String>, Failure> {
    if let Some(own) = &arm.spec.matching {
        *within = within.map(|w| w.max(own.tolerance));
        let each = own.fields.each().map(|(key, (field, step))| format!("{key}: {{{field}: {step}}}"));
        return Ok(Some(each.collect::<Vec<_>>().join(", ")));
    }
    let tokens = Matching::default().tokens(&arm.spec, &baseline.spec);
    let of = |spec: &Spec| figures(&spec.model, spec.train.precision, tokens);
    let left = differences(&of(&baseline.spec)?, &of(&arm.spec)?);
    if !matched || (left[0].abs() <= WITHIN[0][0] && left[1].abs() <= WITHIN[0][1]) {
        return Ok(None);
    }
    let mut closest: Option<Matched> = None;
    for limits in WITHIN {
        let asked = [(Measure::FlopsPerToken, limits[0]), (Measure::Parameters, limits[1])];
        match pair(&arm.spec, &baseline.spec, asked, tokens)? {
            Ok((request, _)) => {
                *within = [within[0].max(limits[0]), within[1].max(limits[1])];
                let [f, p] = &request.objectives[..] else { return Ok(None) };
                return Ok(Some(format!(
                    "flops: {{{}: {}}}, params: {{{}: {}}}",
                    f.field, f.step, p.field, p.step
                )));
            }
            Err(found) => closest = found,
        }
    }
    let closest = closest.map_or(String::new(), |m| format!("; closest: {m}"));
    let percent = left.map(|d| format!("{:+.2} %", 100.0 * d));
    Err(Failure::Error(
        format!(
            "{} costs {} FLOPs per token and {} parameters against {}, and no two of its sizes meet both within 1 %{closest}\n\
             `dreamc match {} --baseline {}` shows what each size would reach; --allow-unequal trains them as they are",
            arm.name,
            percent[0],
            percent[1],
            baseline.name,
            arm.file.display(),
            baseline.file.display()
        )
        .into(),
    ))
}

fn differences(baseline: &Figures, arm: &Figures) -> [f64; 2] {
    [
        arm.flops_per_token.mean() / baseline.flops_per_token.mean() - 1.0,
        arm.parameters as f64 / baseline.parameters as f64 - 1.0,
    ]
}

/// A section that some arm lacks, as the baseline has it; empty where arms have their own that are
/// not all the baseline's, or all have it.
fn shared(section: &'static str, baseline: &Read, variants: &[Read]) -> String {
    let text = |arm: &Read| lines(section, &resolved(&arm.spec));
    let ours = text(baseline);
    let lacks = |arm: &Read| arm.lacks.contains(&section);
    let wanted = variants.iter().any(lacks) && !lacks(baseline);
    if wanted && variants.iter().filter(|arm| !lacks(arm)).all(|arm| text(arm) == ours) {
        ours
    } else {
        String::new()
    }
}

/// The lines of a section of a specification that was written out; without the seed, which a suite
/// has for all arms.
fn lines(section: &str, text: &str) -> String {
    let mut found = String::new();
    let mut inside = false;
    for line in text.lines() {
        if !line.starts_with([' ', '#']) && !line.is_empty() {
            inside = line.split(':').next() == Some(section);
        }
        if inside && !line.is_empty() && !line.starts_with("  seed:") {
            found += line;
            found.push('\n');
        }
    }
    found
}

/// A path as YAML has it.
fn quoted(path: &Path) -> String {
    let text = path.to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "._/-".contains(c);
    let begins = text.starts_with(|c: char| c.is_ascii_alphanumeric() || "._/".contains(c));
    if begins && text.chars().all(plain) { text.into_owned() } else { format!("{text:?}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_section_is_cut_out_without_its_seed() {
        let text = "model:\n  name: m\n\ntrain:\n  steps: 3\n  seed: 7\n  schedule:\n    kind: cosine\n\neval:\n  examples: 2\n";
        assert_eq!(lines("train", text), "train:\n  steps: 3\n  schedule:\n    kind: cosine\n");
        assert_eq!(lines("eval", text), "eval:\n  examples: 2\n");
        assert_eq!(lines("data", text), "");
        assert_eq!(quoted(Path::new("a/b-1.yaml")), "a/b-1.yaml");
        assert_eq!(quoted(Path::new("a b.yaml")), "\"a b.yaml\"");
        assert_eq!(quoted(Path::new("-a.yaml")), "\"-a.yaml\"");
    }
}

//! The files of the folder that the page shows.
//!
//! *In*: paths with `/` between their parts, relative to the folder. *Out*: texts with their
//! versions. *Promise*: a path that leaves the folder, by `..` or by a link, is refused; a file is
//! written whole or not at all, and only where it is still as its writer read it.

use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Component, Path, PathBuf};
use thiserror::Error;

/// Names of files that a page lists, at most.
const MOST: usize = 5_000;
/// Folders below the one that is shown.
const DEPTH: usize = 6;
/// Bytes of a file that is shown.
const LARGEST: u64 = 4 << 20;
/// Bytes of samples that are read, the last ones.
const SAMPLES: u64 = 32 << 10;
/// Bytes of metrics that are read at once.
const PART: u64 = 256 << 10;

/// A folder with specifications.
#[derive(Clone, Debug)]
pub struct Folder {
    root: PathBuf,
}

/// A text as it is in its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Text {
    /// The text.
    pub text: String,
    /// A name of its bytes.
    pub version: String,
}

/// Faults of a file.
#[derive(Debug, Error)]
pub enum FileError {
    /// The path leads elsewhere.
    #[error("{0} is not in the folder of the studio; name a file in it")]
    Outside(String),
    /// The name is no specification's.
    #[error("{0} is no specification: its name ends in .yaml, .yml or .dream")]
    Kind(String),
    /// No such file.
    #[error("{0} does not exist")]
    Gone(String),
    /// Another program wrote it.
    #[error(
        "{0} was changed by another program since it was read: open it again, or save under another name"
    )]
    Changed(String),
    /// Too long to be shown.
    #[error("{0} has more than {most} MiB", most = LARGEST >> 20)]
    Large(String),
    /// The system refused.
    #[error("{0}: {1}")]
    Io(String, io::Error),
}

impl Folder {
    /// The folder at `path`.
    ///
    /// # Errors
    /// Where it does not exist or is no folder.
    pub fn new(path: &Path) -> io::Result<Folder> {
        let root = path.canonicalize()?;
        if !root.is_dir() {
            return Err(io::Error::new(io::ErrorKind::NotADirectory, "it is no folder"));
        }
        Ok(Folder { root })
    }

    /// Its place.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Specifications in it and in folders below, in order of their names. Hidden folders and links
    /// to folders are left out, and the copies that runs have.
    pub fn list(&self) -> Vec<String> {
        self.gathered(&|path| is_specification(path), false)
    }

    /// Reports in it and in folders below.
    pub fn reports(&self) -> Vec<String> {
        self.gathered(&|path| is_report(path), true)
    }

    fn gathered(&self, is: &dyn Fn(&Path) -> bool, in_runs: bool) -> Vec<String> {
        let mut found = vec![];
        gather(&self.root, "", DEPTH, &Wanted { is, in_runs }, &mut found);
        found.sort();
        found
    }

    /// The page of a report.
    pub fn report(&self, path: &str) -> Result<Vec<u8>, FileError> {
        let place = self.inside(path)?;
        if !is_report(Path::new(path)) {
            return Err(FileError::Gone(path.into()));
        }
        std::fs::read(place).map_err(|error| FileError::Io(path.into(), error))
    }

    /// The text of a file.
    pub fn read(&self, path: &str) -> Result<Text, FileError> {
        let place = self.place(path)?;
        let io = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => FileError::Gone(path.into()),
            _ => FileError::Io(path.into(), error),
        };
        if place.metadata().map_err(io)?.len() > LARGEST {
            return Err(FileError::Large(path.into()));
        }
        let bytes = std::fs::read(&place).map_err(io)?;
        let version = version(&bytes);
        let text = String::from_utf8(bytes)
            .map_err(|_| io(io::Error::new(io::ErrorKind::InvalidData, "it is not UTF-8")))?;
        Ok(Text { text, version })
    }

    /// Writes a file that is still of the version `read`, or that does not exist where nothing
    /// was read; gives the new version.
    pub fn write(&self, path: &str, text: &str, read: Option<&str>) -> Result<String, FileError> {
        let place = self.place(path)?;
        let now = match std::fs::read(&place) {
            Ok(bytes) => Some(version(&bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(FileError::Io(path.into(), error)),
        };
        if now.as_deref() != read {
            return Err(FileError::Changed(path.into()));
        }
        dreamc_data::files::write_named(&place, |out: &mut dyn Write| out.write_all(text.as_bytes()))
            .map_err(|error| FileError::Io(path.into(), error))?;
        Ok(version(text.as_bytes()))
    }

    /// The folder of a run.
    pub fn run(&self, path: &str) -> Result<PathBuf, FileError> {
        let there = self.inside(path)?;
        match there.join("metrics.jsonl").is_file() {
            true => Ok(there),
            false => Err(FileError::Gone(format!("{path}/metrics.jsonl"))),
        }
    }

    /// The folder of a run, a comparison, a ladder or an exam.
    pub fn job(&self, path: &str) -> Result<PathBuf, FileError> {
        let there = self.inside(path)?;
        let known = ["metrics.jsonl", "ledger.json", "compare.json", "ladder.json", "exam.json"];
        match known.iter().any(|name| there.join(name).is_file()) {
            true => Ok(there),
            false => Err(FileError::Gone(format!("{path}/metrics.jsonl"))),
        }
    }

    /// The place of a specification, or the folder of a run.
    pub fn either(&self, path: &str) -> Result<PathBuf, FileError> {
        if is_specification(Path::new(path)) { self.place(path) } else { self.run(path) }
    }

    /// The texts that a run wrote at its last evaluations, a JSON object a line, and its ledger.
    pub fn account(&self, path: &str) -> Result<(Vec<String>, Option<String>), FileError> {
        let run = self.run(path)?;
        let io = |error| FileError::Io(path.into(), error);
        let ledger = match std::fs::read_to_string(run.join("ledger.json")) {
            Ok(text) => Some(text),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(io(error)),
        };
        let mut file = match std::fs::File::open(run.join("samples.jsonl")) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((vec![], ledger)),
            Err(error) => return Err(io(error)),
        };
        let from = file.metadata().map_err(io)?.len().saturating_sub(SAMPLES);
        file.seek(SeekFrom::Start(from)).map_err(io)?;
        let mut bytes = vec![];
        file.take(SAMPLES).read_to_end(&mut bytes).map_err(io)?;
        let text = String::from_utf8_lossy(&bytes);
        // The first line of a part may be half of one.
        let lines: Vec<String> = text.lines().skip(usize::from(from > 0)).map(str::to_string).collect();
        Ok((lines, ledger))
    }

    /// Whole lines of a run's metrics from a byte on, and the byte after them. A file that became
    /// shorter, as that of a run that went on from a checkpoint, is read from its beginning.
    pub fn metrics(&self, path: &str, from: u64) -> Result<(Vec<String>, u64, bool), FileError> {
        let place = self.run(path)?.join("metrics.jsonl");
        let io = |error| FileError::Io(path.into(), error);
        let mut file = std::fs::File::open(place).map_err(io)?;
        let again = file.metadata().map_err(io)?.len() < from;
        let from = if again { 0 } else { from };
        file.seek(SeekFrom::Start(from)).map_err(io)?;
        let mut bytes = vec![];
        file.take(PART).read_to_end(&mut bytes).map_err(io)?;
        let end = bytes.iter().rposition(|&b| b == b'\n').map_or(0, |last| last + 1);
        let text = String::from_utf8_lossy(&bytes[..end]);
        Ok((text.lines().map(str::to_string).collect(), from + end as u64, again))
    }

    /// The place of a specification's path, which stays in the folder.
    pub fn place(&self, path: &str) -> Result<PathBuf, FileError> {
        if !path.is_empty() && !is_specification(Path::new(path)) {
            // A path that leads elsewhere says so first.
            self.inside(path)?;
            return Err(FileError::Kind(path.into()));
        }
        self.inside(path)
    }

    /// The place of a path that stays in the folder.
    fn inside(&self, path: &str) -> Result<PathBuf, FileError> {
        let outside = || FileError::Outside(path.into());
        let relative = Path::new(path);
        let plain = relative.components().all(|part| matches!(part, Component::Normal(_)));
        if path.is_empty() || !plain || path.contains('\\') {
            return Err(outside());
        }
        let place = self.root.join(relative);
        // A link is followed, as far as the path exists, to where it leads.
        let there = place.canonicalize().or_else(|error| match (error.kind(), place.parent()) {
            (io::ErrorKind::NotFound, Some(parent)) => {
                let name = place.file_name().unwrap_or_default();
                parent.canonicalize().map(|parent| parent.join(name))
            }
            _ => Err(error),
        });
        let there = there.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => FileError::Gone(path.into()),
            _ => FileError::Io(path.into(), error),
        })?;
        match there.starts_with(&self.root) {
            true => Ok(there),
            false => Err(outside()),
        }
    }
}

fn is_specification(path: &Path) -> bool {
    path.extension().is_some_and(|end| end == "yaml" || end == "yml" || end == "dream")
}

fn version(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex().to_string()
}

/// Reports are pages that dreamc wrote: of a comparison `report.html`, of others what `-o` named.
fn is_report(path: &Path) -> bool {
    path.extension().is_some_and(|end| end == "html")
}

/// Files that are listed.
struct Wanted<'a> {
    is: &'a dyn Fn(&Path) -> bool,
    /// Whether those in folders of runs are.
    in_runs: bool,
}

fn gather(folder: &Path, prefix: &str, depth: usize, wanted: &Wanted, found: &mut Vec<String>) {
    if !wanted.in_runs && folder.join("metrics.jsonl").is_file() {
        return;
    }
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        if found.len() >= MOST || name.starts_with('.') {
            continue;
        }
        let Ok(kind) = entry.file_type() else { continue };
        if kind.is_dir() && depth > 0 {
            gather(&entry.path(), &format!("{prefix}{name}/"), depth - 1, wanted, found);
        } else if !kind.is_dir() && (wanted.is)(Path::new(&name)) {
            found.push(format!("{prefix}{name}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder() -> (tempfile::TempDir, Folder) {
        let place = tempfile::tempdir().unwrap();
        let inside = place.path().join("specs");
        std::fs::create_dir_all(inside.join("zoo")).unwrap();
        std::fs::write(inside.join("a.yaml"), "a").unwrap();
        std::fs::write(inside.join("zoo/b.dream"), "b").unwrap();
        std::fs::write(inside.join("notes.txt"), "n").unwrap();
        std::fs::write(place.path().join("secret.yaml"), "s").unwrap();
        let folder = Folder::new(&inside).unwrap();
        (place, folder)
    }

    #[test]
    fn specifications_are_listed_by_name() {
        let (_place, folder) = folder();
        std::fs::write(folder.root().join("zoo/report.html"), "<p>").unwrap();
        std::fs::create_dir(folder.root().join("run")).unwrap();
        for name in ["metrics.jsonl", "spec.yaml"] {
            std::fs::write(folder.root().join("run").join(name), "").unwrap();
        }
        assert_eq!(folder.list(), ["a.yaml", "zoo/b.dream"]);
        assert_eq!(folder.reports(), ["zoo/report.html"]);
        assert_eq!(folder.report("zoo/report.html").unwrap(), b"<p>");
        assert!(folder.report("a.yaml").is_err() && folder.report("../x.html").is_err());
    }

    #[test]
    fn paths_that_leave_the_folder_are_refused() {
        let (place, folder) = folder();
        #[cfg(unix)]
        std::os::unix::fs::symlink(place.path().join("secret.yaml"), folder.root().join("link.yaml"))
            .unwrap();
        for path in
            ["../secret.yaml", "/etc/a.yaml", "zoo/../../secret.yaml", "", "zoo\\b.dream", "link.yaml"]
        {
            let error = folder.read(path).unwrap_err();
            assert!(matches!(error, FileError::Outside(_) | FileError::Gone(_)), "{path}: {error}");
            assert!(folder.write(path, "x", None).is_err(), "{path}");
        }
        assert!(matches!(folder.read("notes.txt"), Err(FileError::Kind(_))));
        assert!(matches!(folder.read("gone/a.yaml"), Err(FileError::Gone(_))));
        assert_eq!(std::fs::read_to_string(place.path().join("secret.yaml")).unwrap(), "s");
    }

    #[test]
    fn metrics_are_read_by_whole_lines_and_from_the_beginning_where_they_became_fewer() {
        let (_place, folder) = folder();
        let run = folder.root().join("runs/a");
        std::fs::create_dir_all(&run).unwrap();
        std::fs::write(run.join("metrics.jsonl"), "{\"step\":1}\n{\"step\":2}\n{\"st").unwrap();
        let (lines, next, again) = folder.metrics("runs/a", 0).unwrap();
        assert_eq!((lines.len(), next, again), (2, 22, false));
        std::fs::write(run.join("metrics.jsonl"), "{\"step\":1}\n").unwrap();
        assert_eq!(folder.metrics("runs/a", next).unwrap(), (vec!["{\"step\":1}".to_string()], 11, true));
        assert!(matches!(folder.metrics("zoo", 0), Err(FileError::Gone(_))));
        assert!(matches!(folder.metrics("../specs/runs/a", 0), Err(FileError::Outside(_))));
    }

    #[test]
    fn a_file_that_changed_is_not_written_over() {
        let (_place, folder) = folder();
        let read = folder.read("a.yaml").unwrap();
        let next = folder.write("a.yaml", "mine", Some(&read.version)).unwrap();
        std::fs::write(folder.root().join("a.yaml"), "theirs").unwrap();
        let error = folder.write("a.yaml", "mine again", Some(&next)).unwrap_err();
        assert!(matches!(error, FileError::Changed(_)), "{error}");
        assert!(matches!(folder.write("a.yaml", "new", None), Err(FileError::Changed(_))));
        assert_eq!(std::fs::read_to_string(folder.root().join("a.yaml")).unwrap(), "theirs");
        folder.write("new.yaml", "new", None).unwrap();
        assert_eq!(folder.read("new.yaml").unwrap().text, "new");
    }
}

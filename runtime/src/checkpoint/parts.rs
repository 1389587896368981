//! Checkpoints in parts: each rank writes what it holds, and one says where all of it is.
//!
//! *In*: the [`Share`] of a rank, what it holds of tensors that are cut over the ranks; rank 0 also
//! all that every rank has whole. *Out*: `model.rank-3.safetensors` and
//! `optimizer.rank-3.safetensors`, ranges of tensors as rows of numbers, with the step and the rank
//! in their metadata; then `parts.json`, the [`Manifest`]: the mesh, the step, the size of each
//! file, and of each tensor which numbers are in which. Their checksums are in `checksums.txt`, as
//! those of all files of a checkpoint. *Promise*: no rank has numbers that it does not hold. A
//! manifest accounts for every number once, and is written when all files are on disk. A part is
//! opened when the first number of it is read, and then verified to its last byte.

use super::CheckpointError;
use super::safetensors::{self, Entry, Stored, Tensors};
use dreamc_data::files;
use dreamc_data::sums::{Fill, Sums, put};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Bytes of a number in a part.
const NUMBER: u64 = size_of::<f32>() as u64;

/// Name of the manifest.
pub const PARTS: &str = "parts.json";

/// A file of a checkpoint, whole or in parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Tensors of the model.
    Model,
    /// Moments and selection counts.
    Optimizer,
}

impl Kind {
    /// Both, in the order of their files.
    pub const ALL: [Kind; 2] = [Kind::Model, Kind::Optimizer];

    /// The name of the file, where it is whole.
    pub fn whole(self) -> &'static str {
        match self {
            Kind::Model => "model.safetensors",
            Kind::Optimizer => "optimizer.safetensors",
        }
    }

    /// The name of the part that a rank writes.
    fn part(self, rank: u64) -> String {
        self.whole().replace(".safetensors", &format!(".rank-{rank}.safetensors"))
    }
}

/// A tensor, or the part of it, that a rank writes.
#[derive(Clone, Debug)]
pub struct Holding {
    /// Its name, and the shape of all of it.
    pub entry: Entry,
    /// The numbers that this rank has, where ranks have different ones.
    pub range: Option<Range<u64>>,
}

/// The share of a rank in a checkpoint.
pub struct Share<'a> {
    /// The folder that is being filled.
    pub folder: &'a Path,
    /// The step.
    pub step: u64,
    /// Which rank.
    pub rank: u64,
    /// Texts kept with the model.
    pub metadata: &'a [(String, String)],
    /// Its tensors of either kind.
    pub holdings: [&'a [Holding]; 2],
    /// Whether a kind is cut over ranks.
    pub cut: [bool; 2],
    /// Values of a tensor, those that the rank has.
    pub read: &'a mut dyn FnMut(&str) -> io::Result<Vec<f32>>,
}

/// A file that a rank has on disk.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Filed {
    /// The kind of its tensors.
    pub kind: Kind,
    /// Which rank wrote it.
    pub rank: u64,
    /// Its name.
    pub file: String,
    /// Its bytes.
    pub bytes: u64,
    /// Its BLAKE3, in hexadecimal.
    pub sum: String,
    /// Tensors in it with the first number and how many; nothing where the file has all.
    pub ranges: Vec<(String, u64, u64)>,
}

impl Filed {
    /// Whether it is one of several files of its kind.
    pub fn is_part(&self) -> bool {
        self.file != self.kind.whole()
    }
}

impl Share<'_> {
    /// Writes the files of the rank and makes them durable. Parts are read back; a whole file is
    /// where the checkpoint is opened.
    pub fn write(mut self) -> io::Result<Vec<Filed>> {
        let mut written = vec![];
        for (i, kind) in Kind::ALL.into_iter().enumerate() {
            let (holdings, cut) = (self.holdings[i], self.cut[i]);
            // Rank 0 writes what is whole, and has a file of every kind.
            if self.rank > 0 && (holdings.is_empty() || !cut) {
                continue;
            }
            let file = if cut { kind.part(self.rank) } else { kind.whole().into() };
            written.push(self.file(kind, &file, (holdings, cut))?);
        }
        files::sync_folder(self.folder)?;
        Ok(written)
    }

    fn file(&mut self, kind: Kind, file: &str, (holdings, cut): (&[Holding], bool)) -> io::Result<Filed> {
        let shape = |h: &Holding| match &h.range {
            Some(range) => vec![range.end - range.start],
            None => h.entry.1.clone(),
        };
        let entries: Vec<Entry> = holdings.iter().map(|h| (h.entry.0.clone(), shape(h))).collect();
        let (step, rank) = (self.step.to_string(), self.rank.to_string());
        let part = [("format", "dreamc part"), ("step", &step), ("rank", &rank)];
        let texts: Vec<(&str, &str)> = match (cut, kind) {
            (true, _) => part.to_vec(),
            (false, Kind::Model) => self.metadata.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect(),
            (false, Kind::Optimizer) => vec![],
        };
        let read = &mut *self.read;
        let content: Fill = Box::new(|out: &mut dyn Write| {
            safetensors::write(out, &texts, &entries, |i| read(&entries[i].0))
        });
        let sum = put(self.folder, file, content)?;
        let path = self.folder.join(file);
        let bytes = if cut { read_back(&path, &sum)? } else { fs::metadata(&path)?.len() };
        let all = |h: &Holding| 0..h.entry.1.iter().product::<u64>();
        let range = |h: &Holding| {
            let range = h.range.clone().unwrap_or_else(|| all(h));
            (h.entry.0.clone(), range.start, range.end - range.start)
        };
        let ranges = if cut { holdings.iter().map(range).collect() } else { vec![] };
        Ok(Filed { kind, rank: self.rank, file: file.into(), bytes, sum, ranges })
    }
}

/// Refuses a file that is not what was written; its bytes.
fn read_back(path: &Path, sum: &str) -> io::Result<u64> {
    let (found, bytes) = dreamc_data::sums::hash(&fs::File::open(path)?)?;
    if found != sum {
        let problem = format!("{}: was read back with other bytes than were written", path.display());
        return Err(io::Error::other(problem));
    }
    Ok(bytes)
}

/// How the ranks that wrote a checkpoint shared the model. Any mesh reads it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mesh {
    /// Ranks in all.
    pub ranks: u64,
    /// Tensors that were cut over them: `none`, `optimizer` or `weights`.
    pub shard: String,
    /// Ranks that owned the experts of each mixture together.
    pub experts: u64,
}

/// Where the numbers of a checkpoint are.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Manifest {
    /// Optimizer steps taken.
    pub step: u64,
    /// The ranks that wrote it.
    pub mesh: Mesh,
    /// Texts kept with the model, where it is in parts.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
    /// The parts.
    pub files: Vec<File>,
    /// Tensors of the model, where it is in parts, in the order of a whole file.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub model: Vec<Cut>,
    /// Those of the optimizer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub optimizer: Vec<Cut>,
}

/// A part.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct File {
    /// Its name.
    pub file: String,
    /// The kind of its tensors.
    pub kind: Kind,
    /// The rank that wrote it.
    pub rank: u64,
    /// Its bytes.
    pub bytes: u64,
}

/// A tensor whose numbers are in parts.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Cut {
    /// Its name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Its numbers in row-major order, from the first to the last.
    pub pieces: Vec<Piece>,
}

/// Numbers of a tensor that are in one part, under its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// Which part: a place in the list of files.
    pub part: usize,
    /// The first of them.
    pub first: u64,
    /// How many.
    pub count: u64,
}

/// Whether pieces are all numbers of a tensor, each once and in order.
fn tile(shape: &[u64], pieces: &[Piece]) -> bool {
    let end = pieces
        .iter()
        .try_fold(0u64, |at, piece| if piece.first == at { at.checked_add(piece.count) } else { None });
    let all = shape.iter().try_fold(1u64, |all, size| all.checked_mul(*size));
    end.is_some() && end == all
}

impl Manifest {
    /// That of files which ranks have written. `entries` are the tensors of each kind, and
    /// `metadata` texts of the model. Refused where they have not all numbers, each once.
    pub fn of(
        step: u64,
        mesh: Mesh,
        written: &[Filed],
        entries: [&[Entry]; 2],
        metadata: &[(String, String)],
    ) -> io::Result<Self> {
        let files: Vec<&Filed> = written.iter().filter(|file| file.is_part()).collect();
        let mut found: [HashMap<&str, Vec<Piece>>; 2] = Default::default();
        for (part, file) in files.iter().enumerate() {
            for (name, first, count) in &file.ranges {
                let pieces = found[file.kind as usize].entry(name).or_default();
                pieces.push(Piece { part, first: *first, count: *count });
            }
        }
        let mut cuts = [vec![], vec![]];
        for kind in Kind::ALL.into_iter().filter(|kind| files.iter().any(|file| file.kind == *kind)) {
            for (name, shape) in entries[kind as usize] {
                let mut pieces = found[kind as usize].remove(name.as_str()).unwrap_or_default();
                pieces.sort_by_key(|piece| piece.first);
                if !tile(shape, &pieces) {
                    let problem = format!("the parts of the ranks have not every number of {name} once");
                    return Err(io::Error::other(problem));
                }
                cuts[kind as usize].push(Cut { name: name.clone(), shape: shape.clone(), pieces });
            }
        }
        let [model, optimizer] = cuts;
        let metadata = if model.is_empty() { BTreeMap::new() } else { metadata.iter().cloned().collect() };
        let of = |w: &&Filed| File { file: w.file.clone(), kind: w.kind, rank: w.rank, bytes: w.bytes };
        Ok(Manifest { step, mesh, metadata, files: files.iter().map(of).collect(), model, optimizer })
    }

    /// Reads and checks the manifest of a checkpoint, and that all parts are there, as long as they
    /// were; none is read. Nothing where the checkpoint is whole.
    pub fn open(sums: &Sums) -> Result<Option<Self>, CheckpointError> {
        if !sums.folder().join(PARTS).exists() && sums.of(PARTS).is_err() {
            return Ok(None);
        }
        let path = sums.folder().join(PARTS);
        let bad = |problem: String| CheckpointError::Corrupt { path: path.clone(), problem };
        let manifest: Manifest = serde_json::from_slice(&sums.read(PARTS)?)
            .map_err(|error| bad(format!("cannot be read: {error}")))?;
        // Room left in each part: numbers that it has no room for are never made room for.
        let mut left: Vec<u64> = manifest.files.iter().map(|file| file.bytes / NUMBER).collect();
        let mut fits = |piece: &Piece| {
            let room = left.get_mut(piece.part);
            room.and_then(|room| room.checked_sub(piece.count).map(|rest| *room = rest)).is_some()
        };
        for cut in manifest.model.iter().chain(&manifest.optimizer) {
            if !tile(&cut.shape, &cut.pieces) || !cut.pieces.iter().all(&mut fits) {
                return Err(bad(format!("its pieces of {} are not all of it, each once", cut.name)));
            }
        }
        let parts = manifest.files.len();
        manifest.files.iter().try_for_each(|file| file.check(sums.folder(), parts))?;
        Ok(Some(manifest))
    }

    /// The tensors of a kind; nothing where they are whole.
    pub(super) fn tensors(&self, kind: Kind, sums: &Sums) -> Option<Tensors> {
        if !self.files.iter().any(|file| file.kind == kind) {
            return None;
        }
        let (cuts, metadata) = match kind {
            Kind::Model => (&self.model, self.metadata.clone()),
            Kind::Optimizer => (&self.optimizer, BTreeMap::new()),
        };
        let part = |file: &File| Part {
            kind: file.kind,
            name: file.file.clone(),
            bytes: file.bytes,
            stands_for: [file.rank, self.step],
            tensors: OnceLock::new(),
        };
        let parts = Parts { sums: sums.clone(), kind, parts: self.files.iter().map(part).collect() };
        let tensors = cuts.iter().map(|cut| ((cut.name.clone(), cut.shape.clone()), cut.pieces.clone()));
        let path = sums.folder().join(PARTS);
        Some(Tensors::of_parts(&path, parts, tensors.collect(), metadata.into_iter().collect()))
    }
}

impl File {
    /// Refuses a part that is not there or of another length.
    pub(super) fn check(&self, folder: &Path, parts: usize) -> Result<(), CheckpointError> {
        let path = folder.join(&self.file);
        let bad = |problem| Err(CheckpointError::Corrupt { path: path.clone(), problem });
        if Path::new(&self.file).components().count() != 1 || self.file.starts_with('.') {
            return bad("is no name of a file in the folder of its manifest".into());
        }
        let length = match fs::metadata(&path) {
            Ok(found) if found.is_file() => found.len(),
            Ok(_) => return bad("is no file".into()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return bad(format!("is missing; the checkpoint is whole with all of its {parts} parts"));
            }
            Err(error) => return Err(CheckpointError::Io { path, error }),
        };
        match length == self.bytes {
            true => Ok(()),
            false => bad(format!("has {length} bytes, and {} were written", self.bytes)),
        }
    }
}

/// The parts of a checkpoint that hold tensors of one kind.
#[derive(Debug)]
pub(super) struct Parts {
    sums: Sums,
    kind: Kind,
    /// All of the manifest, as pieces count them.
    parts: Vec<Part>,
}

#[derive(Debug)]
struct Part {
    kind: Kind,
    name: String,
    bytes: u64,
    /// The rank and the step.
    stands_for: [u64; 2],
    /// Its tensors, once it was verified.
    tensors: OnceLock<Tensors>,
}

impl Part {
    /// Its tensors, after every byte was verified.
    fn open(&self, sums: &Sums) -> Result<&Tensors, CheckpointError> {
        if let Some(tensors) = self.tensors.get() {
            return Ok(tensors);
        }
        let path = sums.folder().join(&self.name);
        let tensors = Tensors::of_file(&path, sums.verify(&self.name)?)?;
        let said = ["rank", "step"].map(|key| tensors.metadata(key).unwrap_or("no").to_string());
        if said != self.stands_for.map(|n| n.to_string()) {
            let [rank, step] = self.stands_for;
            let problem = format!(
                "is of rank {} and step {}, and stands for rank {rank} and step {step}",
                said[0], said[1]
            );
            return Err(CheckpointError::Corrupt { path, problem });
        }
        Ok(self.tensors.get_or_init(|| tensors))
    }
}

impl Parts {
    fn of_kind(&self) -> impl Iterator<Item = &Part> {
        self.parts.iter().filter(|part| part.kind == self.kind)
    }

    /// Verifies every byte of all.
    pub(super) fn verify(&self) -> Result<(), CheckpointError> {
        self.of_kind().try_for_each(|part| part.open(&self.sums).map(drop))
    }

    /// Bytes of all.
    pub(super) fn size(&self) -> u64 {
        self.of_kind().map(|part| part.bytes).sum()
    }

    /// BLAKE3 of the checksums of all, one a line, in hexadecimal.
    pub(super) fn hash(&self) -> String {
        let lines = self.of_kind().map(|part| format!("{}\n", self.sums.of(&part.name).unwrap_or_default()));
        blake3::hash(lines.collect::<String>().as_bytes()).to_hex().to_string()
    }

    /// Numbers of a tensor as f32.
    pub(super) fn read(
        &self,
        (name, pieces): (&str, &[Piece]),
        range: Range<u64>,
    ) -> Result<Vec<f32>, CheckpointError> {
        let mut values = vec![0f32; (range.end - range.start) as usize];
        let mut out: &mut [u8] = bytemuck::cast_slice_mut(&mut values);
        for (piece, first, count) in overlaps(pieces, 1, (range.start, range.end - range.start)) {
            let (part, stored) = self.stored(name, piece)?;
            stored.copy_elements(first, count, &mut out).map_err(|error| {
                let path = self.sums.folder().join(&part.name);
                match error.kind() {
                    io::ErrorKind::UnexpectedEof => {
                        let problem = format!("was cut short while tensor {name} was read");
                        CheckpointError::Corrupt { path, problem }
                    }
                    _ => CheckpointError::Io { path, error },
                }
            })?;
        }
        if cfg!(target_endian = "big") {
            values.iter_mut().for_each(|value| *value = f32::from_bits(value.to_bits().swap_bytes()));
        }
        Ok(values)
    }

    /// The numbers of a tensor that a part has.
    fn stored(&self, name: &str, piece: &Piece) -> Result<(&Part, Stored<'_>), CheckpointError> {
        let lacks = |path: PathBuf| {
            let problem = format!("has not the {} numbers of {name} that {PARTS} says", piece.count);
            CheckpointError::Corrupt { path, problem }
        };
        let Some(part) = self.parts.get(piece.part) else {
            return Err(lacks(self.sums.folder().join(PARTS)));
        };
        let tensors = part.open(&self.sums)?;
        let has =
            |s: &Stored| s.shape.iter().product::<u64>() == piece.count && s.dtype == safetensors::Dtype::F32;
        let stored = tensors.stored(name).filter(has);
        stored.map(|stored| (part, stored)).ok_or_else(|| lacks(tensors.path().to_path_buf()))
    }

    /// Calls for what each part has of a range of a tensor, in units of a part of a number.
    pub(super) fn over(
        &self,
        (name, pieces): (&str, &[Piece]),
        unit: u64,
        (first, count): (u64, u64),
        mut each: impl FnMut(Stored, u64, u64) -> io::Result<()>,
    ) -> io::Result<()> {
        let all = pieces.last().map_or(0, |piece| (piece.first + piece.count) * unit);
        if first.checked_add(count).is_none_or(|end| end > all) {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
        }
        for (piece, first, count) in overlaps(pieces, unit, (first, count)) {
            let (_, stored) = self.stored(name, piece).map_err(io::Error::other)?;
            each(stored, first, count)?;
        }
        Ok(())
    }
}

/// Pieces that have some of a range, with where that begins in the piece and how much it is.
fn overlaps(
    pieces: &[Piece],
    unit: u64,
    (first, count): (u64, u64),
) -> impl Iterator<Item = (&Piece, u64, u64)> {
    pieces.iter().filter_map(move |piece| {
        let (begin, end) = (piece.first * unit, (piece.first + piece.count) * unit);
        let (from, to) = (first.max(begin), (first + count).min(end));
        (from < to).then(|| (piece, from - begin, to - from))
    })
}

#[cfg(test)]
mod tests {
    use super::super::{Checkpoint, Checkpoints, State, VERSION, open_model};
    use super::*;
    use dreamc_data::sums::CHECKSUMS;

    const RANKS: u64 = 4;

    /// Tensors of seven and of no numbers, with whole ones between.
    fn entries() -> [Vec<Entry>; 2] {
        let model = [("whole", vec![3]), ("cut", vec![7, 1]), ("none", vec![0]), ("last", vec![2, 2])];
        let named = |(name, shape): (&str, Vec<u64>)| (name.to_string(), shape);
        [model.map(named).to_vec(), [("cut.m", vec![7, 1]), ("whole.counts", vec![3])].map(named).to_vec()]
    }

    /// The number at a place of a tensor at a step.
    fn value(name: &str, at: u64, step: u64) -> f32 {
        (100 * step + 10 * name.len() as u64 + at) as f32
    }

    /// The tensors of a rank: of seven numbers 0, 3, 3 and 1.
    fn holdings(rank: u64, entries: &[Entry]) -> Vec<Holding> {
        let cuts = [0, 0, 3, 6, 7];
        let range = cuts[rank as usize]..cuts[rank as usize + 1];
        let holding = |entry: &Entry| match entry.1[0] {
            7 => (!range.is_empty()).then(|| Holding { entry: entry.clone(), range: Some(range.clone()) }),
            _ => (rank == 0).then(|| Holding { entry: entry.clone(), range: None }),
        };
        entries.iter().filter_map(holding).collect()
    }

    fn write(folder: &Path, rank: u64, step: u64) -> Vec<Filed> {
        let [model, optimizer] = entries().map(|entries| holdings(rank, &entries));
        let find = |name: &str| model.iter().chain(&optimizer).find(|h| h.entry.0 == name).cloned().unwrap();
        let read = &mut |name: &str| {
            let found = find(name);
            let all = found.range.unwrap_or(0..found.entry.1.iter().product());
            Ok(all.map(|at| value(name, at, step)).collect())
        };
        let texts = [("spec".to_string(), "model: …".to_string()), ("step".into(), step.to_string())];
        let holdings = [&model[..], &optimizer[..]];
        Share { folder, step, rank, metadata: &texts, holdings, cut: [true; 2], read }.write().unwrap()
    }

    fn manifest(filed: &[Filed], step: u64) -> io::Result<Manifest> {
        let mesh = Mesh { ranks: RANKS, shard: "weights".into(), experts: 1 };
        let [model, optimizer] = entries();
        let texts = [("spec".to_string(), "model: …".to_string())];
        Manifest::of(step, mesh, filed, [&model, &optimizer], &texts)
    }

    /// Writes a checkpoint of four ranks; `fault` comes between their files and the manifest.
    fn save(
        checkpoints: &Checkpoints,
        step: u64,
        fault: impl Fn(&Path, &mut Vec<Filed>),
    ) -> Result<PathBuf, CheckpointError> {
        let begun = checkpoints.begin(step)?;
        let mut filed = (0..RANKS).flat_map(|rank| write(&begun.folder, rank, step)).collect();
        fault(&begun.folder, &mut filed);
        let state = State { version: VERSION, step, ..State::default() };
        let io = |error| CheckpointError::Io { path: checkpoints.at(step), error };
        let manifest = manifest(&filed, step).map_err(io)?;
        checkpoints.finish(begun, &state, Some(&manifest), &filed)
    }

    fn good(checkpoints: &Checkpoints, step: u64) -> PathBuf {
        save(checkpoints, step, |_, _| {}).unwrap()
    }

    #[test]
    fn parts_are_read_as_one_file() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(folder.path());
        let path = good(&checkpoints, 5);
        let (checkpoint, refused) = checkpoints.latest().unwrap();
        assert!(refused.is_empty());
        for (tensors, entries) in [&checkpoint.model, &checkpoint.optimizer].into_iter().zip(entries()) {
            let found: Vec<_> =
                tensors.entries().map(|(name, shape)| (name.to_string(), shape.to_vec())).collect();
            assert_eq!(found, entries);
            for (name, shape) in &entries {
                let all: Vec<f32> = (0..shape.iter().product()).map(|at| value(name, at, 5)).collect();
                let (found, values) = tensors.get(name).unwrap().unwrap();
                assert_eq!((found, &values), (&shape[..], &all));
                let stored = tensors.stored(name).unwrap();
                assert_eq!(stored.bytes().unwrap(), bytemuck::cast_slice::<f32, u8>(&all));
                for (first, last) in (0..all.len()).flat_map(|a| (a..=all.len()).map(move |b| (a, b))) {
                    let mut bytes = vec![];
                    stored.copy_elements(first as u64, (last - first) as u64, &mut bytes).unwrap();
                    assert_eq!(bytes, bytemuck::cast_slice::<f32, u8>(&all[first..last]));
                    bytes.clear();
                    stored
                        .copy_bytes(4 * first as u64 + 1, 4 * (last - first) as u64 / 2, &mut bytes)
                        .unwrap();
                    let from = 4 * first + 1;
                    assert_eq!(bytes, bytemuck::cast_slice::<f32, u8>(&all)[from..from + 2 * (last - first)]);
                    let range = tensors.range(name, first as u64..last as u64).unwrap().unwrap();
                    assert_eq!(range.1, all[first..last]);
                }
                assert!(stored.copy_elements(1, all.len() as u64, &mut vec![]).is_err());
            }
        }
        assert_eq!(checkpoint.model.metadata("spec"), Some("model: …"));
        // No rank has numbers of another: 0, 3, 3 and 1 of seven, each in four bytes after a
        // header.
        let part = Tensors::open(&path.join("model.rank-3.safetensors")).unwrap();
        assert_eq!(part.entries().collect::<Vec<_>>(), [("cut", &[1][..])]);
        let error = open_model(&path.join("model.rank-3.safetensors")).unwrap_err().to_string();
        assert!(error.contains("is the part that rank 3 wrote of a checkpoint; name its folder"), "{error}");
    }

    #[test]
    fn a_range_is_read_without_the_parts_that_have_none_of_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = good(&Checkpoints::new(folder.path()), 1);
        // As long as they were, and of other bytes.
        for rank in [0, 1, 3] {
            let part = path.join(format!("model.rank-{rank}.safetensors"));
            let length = fs::metadata(&part).unwrap().len();
            fs::write(part, vec![0; length as usize]).unwrap();
        }
        let checkpoint = Checkpoint::open(&path).unwrap();
        let range = checkpoint.model.range("cut", 3..6).unwrap().unwrap().1;
        assert_eq!(range, [3, 4, 5].map(|at| value("cut", at, 1)));
        let error = checkpoint.model.range("cut", 2..6).unwrap_err().to_string();
        assert!(error.contains("model.rank-1.safetensors") && error.contains("BLAKE3 differs"), "{error}");
    }

    #[test]
    fn every_flipped_byte_and_every_cut_of_a_part_is_refused_with_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(folder.path());
        good(&checkpoints, 1);
        let newest = good(&checkpoints, 2);
        let names = fs::read_dir(&newest).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        for name in names.collect::<Vec<_>>() {
            let path = newest.join(&name);
            let bytes = fs::read(&path).unwrap();
            let refused = |what: String, words: &[&str]| {
                let (fallback, refused) = checkpoints.latest().unwrap();
                let said: Vec<String> = refused.iter().map(ToString::to_string).collect();
                assert_eq!((fallback.state.step, refused.len()), (1, 1), "{name} {what}");
                assert!(words.iter().all(|word| said[0].contains(word)), "{name} {what}: {said:?}");
            };
            for i in (0..bytes.len()).step_by(3) {
                let mut bad = bytes.clone();
                bad[i] ^= 1 << (i % 8);
                fs::write(&path, &bad).unwrap();
                refused(format!("byte {i}"), &["step-00000002"]);
            }
            let part = name.contains("rank");
            for n in [0, 1, bytes.len() / 2, bytes.len() - 1] {
                fs::write(&path, &bytes[..n]).unwrap();
                let words = [&name, "bytes, and", "were written"];
                refused(format!("cut to {n}"), if part { &words } else { &[] });
            }
            fs::remove_file(&path).unwrap();
            let words = [&name, "is missing; the checkpoint is whole with all of its 8 parts"];
            refused("removed".into(), if part { &words } else { &[] });
            fs::write(&path, &bytes).unwrap();
        }
        assert_eq!(checkpoints.latest().unwrap().0.state.step, 2);
    }

    #[test]
    fn faults_of_writing_are_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(folder.path());
        let before = good(&checkpoints, 1);
        let part = "model.rank-2.safetensors";
        let refused = |words: &str, fault: &dyn Fn(&Path, &mut Vec<Filed>)| {
            let found = save(&checkpoints, 2, fault).and_then(|path| Checkpoint::open(&path)?.verify());
            let error = found.unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
            let _ = fs::remove_dir_all(checkpoints.at(2));
            // Nothing is left, and the one before is as it was.
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
            assert_eq!(checkpoints.latest().unwrap().0.state.step, 1);
        };
        let stale = |folder: &Path, _: &mut Vec<Filed>| {
            fs::copy(before.join(part), folder.join(part)).unwrap();
        };
        refused("BLAKE3 differs", &stale);
        // Also where the rank itself takes it for the one of this step.
        refused("is of rank 2 and step 1, and stands for rank 2 and step 2", &|folder, filed| {
            stale(folder, filed);
            let sum = blake3::hash(&fs::read(folder.join(part)).unwrap()).to_hex().to_string();
            filed.iter_mut().find(|filed| filed.file == part).unwrap().sum = sum;
        });
        let exchanged = |folder: &Path, _: &mut Vec<Filed>| {
            let [a, b] = [part, "model.rank-1.safetensors"].map(|name| folder.join(name));
            fs::rename(&a, folder.join("x")).unwrap();
            fs::rename(&b, &a).unwrap();
            fs::rename(folder.join("x"), &b).unwrap();
        };
        refused("BLAKE3 differs", &exchanged);
        refused("is of rank 2 and step 2, and stands for rank 1 and step 2", &|folder, filed| {
            exchanged(folder, filed);
            for filed in filed.iter_mut().filter(|filed| filed.file.starts_with("model")) {
                let bytes = fs::read(folder.join(&filed.file)).unwrap();
                filed.sum = blake3::hash(&bytes).to_hex().to_string();
            }
        });
        // The manifest before a part, and before the end of one.
        refused("model.rank-2.safetensors: is missing", &|folder, _| {
            fs::remove_file(folder.join(part)).unwrap();
        });
        refused("were written", &|folder, filed| {
            let length = filed.iter().find(|filed| filed.file == part).unwrap().bytes;
            fs::File::options().write(true).open(folder.join(part)).unwrap().set_len(length - 4).unwrap();
        });
        // Ranks that are not asked, twice the numbers of one, others than it says.
        let partial = |name: &str| format!("the parts of the ranks have not every number of {name} once");
        refused(&partial("cut"), &|_, filed| filed.retain(|filed| filed.rank != 2));
        refused(&partial("whole"), &|_, filed| filed.extend(filed.clone()));
        refused(&partial("cut"), &|_, filed| {
            let found = filed.iter_mut().find(|filed| filed.file == part).unwrap();
            found.ranges[0].1 += 1;
        });
    }

    #[test]
    fn a_manifest_that_lies_is_refused_before_any_part_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = good(&Checkpoints::new(folder.path()), 1);
        let text = fs::read_to_string(path.join(PARTS)).unwrap();
        let sums = fs::read_to_string(path.join(CHECKSUMS)).unwrap();
        let hash = |text: &str| blake3::hash(text.as_bytes()).to_hex().to_string();
        // Each change with the checksum that it would have.
        let refused = |words: &str, lie: &dyn Fn(&mut serde_json::Value)| {
            let mut found: serde_json::Value = serde_json::from_str(&text).unwrap();
            lie(&mut found);
            let told = found.to_string();
            fs::write(path.join(CHECKSUMS), sums.replace(&hash(&text), &hash(&told))).unwrap();
            fs::write(path.join(PARTS), told).unwrap();
            let found = Checkpoint::open(&path).and_then(|found| found.model.get("cut").map(drop));
            let error = found.unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        };
        let pieces = "its pieces of cut are not all of it, each once";
        let first = |at: &str| format!("/model/1/pieces/0/{at}");
        let set = |place: &str, value: u64| {
            let place = place.to_string();
            move |found: &mut serde_json::Value| *found.pointer_mut(&place).unwrap() = value.into()
        };
        for (place, value) in
            [("first", 1), ("count", 4), ("count", u64::MAX), ("part", 99), ("part", 1 << 60)]
        {
            refused(pieces, &set(&first(place), value));
        }
        refused(pieces, &|found| {
            found["model"][1]["pieces"].as_array_mut().unwrap().remove(1);
        });
        refused(pieces, &|found| found["model"][1]["shape"] = vec![u64::MAX, 2].into());
        // Numbers for which no part has room, in one tensor and in all together.
        refused("its pieces of huge are not all of it", &|found| {
            let huge = serde_json::json!({"name": "huge", "shape": [1u64 << 40],
                "pieces": [{"part": 0, "first": 0, "count": 1u64 << 40}]});
            found["model"].as_array_mut().unwrap().push(huge);
        });
        refused("not all of it", &|found| {
            let tensors = found["model"].as_array_mut().unwrap();
            let again = tensors[1].clone();
            tensors.extend(vec![again; 1000]);
        });
        // A piece of a part that has fewer numbers of that name.
        refused("model.rank-3.safetensors", &|found| {
            let pieces = &mut found["model"][1]["pieces"];
            pieces[0]["part"] = pieces[2]["part"].clone();
        });
        for name in ["../model.safetensors", ".hidden", "/etc/passwd", "a/b", "", "."] {
            refused("is no name of a file in the folder of its manifest", &|found| {
                found["files"][0]["file"] = name.into();
            });
        }
        refused("were written", &set("/files/0/bytes", u64::MAX));
        refused("cannot be read", &|found| found["step"] = (-1).into());
        refused("cannot be read", &|found| *found = serde_json::Value::Null);
        refused("cannot be read", &|found| found["files"][0]["kind"] = "other".into());
    }
}

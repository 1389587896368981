//! Files of tensors in the safetensors format.
//!
//! *In*: named tensors, one at a time. *Out*: a file any framework reads; or such a file, read at
//! places. *Promise*: writing and reading take the memory of one tensor, the bytes are a function
//! of the content, and reading never trusts a length or an offset. A tensor can be had as a range
//! of the file, [mapped](dreamc_device::mapped).
//!
//! Packed tensors ([`Packed`]) are bytes there, a row of blocks in the place of a row of numbers,
//! and the metadata `packed` says which they are: `{"layers.0.mlp.up.weight": "q4_0", …}`. Whoever
//! reads them here gets their numbers and the shape that these have.
//!
//! Tensors of a checkpoint in [parts](super::parts) stand in a file of each rank, and are read as
//! those of one file.

use super::CheckpointError;
use super::parts::{Parts, Piece};
pub use ::safetensors::Dtype;
use ::safetensors::tensor::Metadata;
use dreamc_compiler::format::{Format, Packed, Stored as Storage};
use dreamc_data::files;
use dreamc_data::sums;
use dreamc_device::mapped::{Mapped, MappedFile};
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// A tensor to be written: name and shape.
pub type Entry = (String, Vec<u64>);

/// A tensor as it is stored, f32 where it is packed.
#[derive(Clone, Copy, Debug)]
pub struct Stored<'a> {
    /// Its shape.
    pub shape: &'a [u64],
    /// Type of its elements.
    pub dtype: Dtype,
    /// How they are packed, where they are.
    pub packed: Option<Packed>,
    place: Place<'a>,
}

/// Where the numbers of a tensor are.
#[derive(Clone, Copy, Debug)]
enum Place<'a> {
    /// Bytes of a file.
    Range { file: &'a File, start: u64, end: u64 },
    /// Ranges of several files.
    Parts { name: &'a str, parts: &'a Parts, pieces: &'a [Piece] },
}

impl Stored<'_> {
    /// Its elements, little-endian, in row-major order.
    pub fn bytes(&self) -> io::Result<Vec<u8>> {
        if self.packed.is_some() {
            let mut bytes = vec![];
            self.copy_elements(0, self.shape.iter().product(), &mut bytes)?;
            return Ok(bytes);
        }
        self.raw()
    }

    /// The bytes of the file.
    fn raw(&self) -> io::Result<Vec<u8>> {
        match self.place {
            Place::Range { file, start, end } => {
                let mut bytes = vec![0; (end - start) as usize];
                file.read_exact_at(&mut bytes, start)?;
                Ok(bytes)
            }
            Place::Parts { .. } => {
                let mut bytes = vec![];
                self.copy_elements(0, self.shape.iter().product(), &mut bytes)?;
                Ok(bytes)
            }
        }
    }

    /// Writes `elements` elements of it from `first` on, without all of them in memory at once.
    pub fn copy_elements(&self, first: u64, elements: u64, out: &mut dyn Write) -> io::Result<()> {
        self.pieces(first, elements, &mut |part| out.write_all(part))
    }

    /// Writes `bytes` bytes of the file, from its byte `first` on.
    pub fn copy_bytes(&self, first: u64, bytes: u64, out: &mut dyn Write) -> io::Result<()> {
        match self.place {
            Place::Range { start, end, .. } => {
                let whole = Stored { shape: &[], dtype: Dtype::U8, packed: None, ..*self };
                match first.checked_add(bytes).is_some_and(|stop| stop <= end - start) {
                    true => whole.copy_elements(first, bytes, out),
                    false => Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
                }
            }
            Place::Parts { name, parts, pieces } => {
                let size = self.dtype.bitsize() as u64 / 8;
                parts.over((name, pieces), size, (first, bytes), |part, first, bytes| {
                    part.copy_bytes(first, bytes, out)
                })
            }
        }
    }

    /// The same as another type; values that it has not are rounded to the nearest, ties to even.
    pub fn convert(&self, first: u64, elements: u64, to: Dtype, out: &mut dyn Write) -> io::Result<()> {
        if to == self.dtype {
            return self.copy_elements(first, elements, out);
        }
        let from = self.dtype;
        self.pieces(first, elements, &mut |part| {
            let values: Vec<f32> = match from {
                Dtype::F32 => {
                    part.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
                }
                Dtype::BF16 => words(part).map(|w| half::bf16::from_bits(w).to_f32()).collect(),
                Dtype::F16 => words(part).map(|w| half::f16::from_bits(w).to_f32()).collect(),
                other => return Err(io::Error::other(format!("{other:?} is not converted"))),
            };
            out.write_all(&encoded(&values, to)?)
        })
    }

    /// Reads elements a piece at a time.
    fn pieces(
        &self,
        first: u64,
        elements: u64,
        each: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let (file, start, end) = match self.place {
            Place::Range { file, start, end } => (file, start, end),
            Place::Parts { name, parts, pieces } => {
                return parts.over((name, pieces), 1, (first, elements), |part, first, elements| {
                    part.pieces(first, elements, each)
                });
            }
        };
        if let Some(packed) = self.packed {
            return blocks(packed, (file, start, end), first, elements, each);
        }
        let size = self.dtype.bitsize() as u64 / 8;
        let mut buffer = vec![0; 1 << 20];
        let mut at = start + first * size;
        let stop = at + elements * size;
        if stop > end {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
        }
        while at < stop {
            let n = (stop - at).min(buffer.len() as u64);
            let part = &mut buffer[..n as usize];
            file.read_exact_at(part, at)?;
            each(part)?;
            at += n;
        }
        Ok(())
    }
}

/// Reads packed elements of a range of a file a piece at a time, as f32.
fn blocks(
    packed: Packed,
    (file, start, stop): (&File, u64, u64),
    first: u64,
    elements: u64,
    each: &mut dyn FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let (unit, bytes) = (packed.unit() as u64, packed.bytes() as u64);
    let (mut at, end) = (first, first + elements);
    while at < end {
        let block = at / unit;
        let count = (end.div_ceil(unit) - block).min((1 << 18) / unit + 1);
        let from = start + block * bytes;
        if from + count * bytes > stop {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
        }
        let mut buffer = vec![0; (count * bytes) as usize];
        file.read_exact_at(&mut buffer, from)?;
        if let Some(bad) = packed.bad(&buffer) {
            let number = block + bad as u64;
            return Err(io::Error::other(format!("the scale of block {number} is not a finite number")));
        }
        let mut values = vec![0.0; (count * unit) as usize];
        packed.unpack(&buffer, &mut values);
        let (begin, stop) = (at - block * unit, (end - block * unit).min(count * unit));
        let part = &values[begin as usize..stop as usize];
        each(&part.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>())?;
        at = block * unit + stop;
    }
    Ok(())
}

/// A tensor that was read: shape and values.
pub type View<'a> = (&'a [u64], Vec<f32>);

/// Writes f32 tensors: `fill` gives the values of entry number `i`.
pub fn write(
    out: &mut dyn Write,
    metadata: &[(&str, &str)],
    entries: &[Entry],
    mut fill: impl FnMut(usize) -> io::Result<Vec<f32>>,
) -> io::Result<()> {
    let entries: Vec<_> =
        entries.iter().map(|(name, shape)| (name.clone(), shape.clone(), Dtype::F32)).collect();
    write_stored(out, metadata, &entries, |i, out| {
        let values = fill(i)?;
        if cfg!(target_endian = "little") {
            return out.write_all(bytemuck::cast_slice(&values));
        }
        values.iter().try_for_each(|value| out.write_all(&value.to_le_bytes()))
    })
}

/// Writes tensors as they are stored, little-endian: `fill` writes the bytes of entry number `i`.
pub fn write_stored(
    out: &mut dyn Write,
    metadata: &[(&str, &str)],
    entries: &[(String, Vec<u64>, Dtype)],
    mut fill: impl FnMut(usize, &mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    let mut header = Map::new();
    if !metadata.is_empty() {
        let pairs = metadata.iter().map(|(k, v)| (k.to_string(), Value::from(*v)));
        header.insert("__metadata__".into(), Value::Object(pairs.collect()));
    }
    let size = |(_, shape, dtype): &(String, Vec<u64>, Dtype)| {
        shape.iter().product::<u64>() * dtype.bitsize() as u64 / 8
    };
    let mut offset = 0;
    for entry @ (name, shape, dtype) in entries {
        let end = offset + size(entry);
        let found = json!({"dtype": dtype, "shape": shape, "data_offsets": [offset, end]});
        header.insert(name.clone(), found);
        offset = end;
    }
    let mut header = serde_json::to_vec(&header)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(&header)?;
    for (i, entry) in entries.iter().enumerate() {
        let mut counted = Counted { inner: &mut *out, bytes: 0 };
        fill(i, &mut counted)?;
        let (name, shape, dtype) = entry;
        if counted.bytes != size(entry) {
            let bytes = counted.bytes;
            return Err(io::Error::other(format!(
                "tensor {name} has {bytes} bytes for {shape:?} of {dtype:?}"
            )));
        }
    }
    Ok(())
}

/// Numbers as they stand in a file, rounded where their type is shorter.
pub fn encoded(values: &[f32], to: Dtype) -> io::Result<Vec<u8>> {
    Ok(match to {
        Dtype::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Dtype::BF16 => values.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect(),
        Dtype::F16 => values.iter().flat_map(|x| half::f16::from_f32(*x).to_le_bytes()).collect(),
        other => return Err(io::Error::other(format!("nothing is converted to {other:?}"))),
    })
}

/// Counts what goes through.
pub struct Counted<'a> {
    /// Where it goes to.
    pub inner: &'a mut dyn Write,
    /// Bytes so far.
    pub bytes: u64,
}

impl Write for Counted<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.inner.write(bytes)?;
        self.bytes += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// Most bytes of a header: what the format's own library reads.
const LARGEST_HEADER: u64 = 100_000_000;

/// A file of tensors, or the parts of a checkpoint.
#[derive(Debug)]
pub struct Tensors {
    path: PathBuf,
    source: Source,
    index: Vec<Ranged>,
    /// Places in `index`, by name.
    places: HashMap<String, usize>,
    metadata: Vec<(String, String)>,
    /// The file's map, once it was asked for.
    map: Mutex<Option<Arc<MappedFile>>>,
}

/// Where tensors are.
#[derive(Debug)]
enum Source {
    File(File),
    /// The pieces of each tensor, as they are in the index.
    Parts(Parts, Vec<Vec<Piece>>),
}

/// A tensor that is a range of a file.
#[derive(Clone, Debug)]
pub struct Ranged {
    /// Its name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Type of its elements, which are adjacent, in row-major order; f32 where they are packed.
    pub dtype: Dtype,
    /// How they are packed, where they are.
    pub packed: Option<Packed>,
    /// Its first byte in the file.
    pub start: u64,
    /// The byte after its last.
    pub end: u64,
}

impl Tensors {
    /// Opens a file and checks its header.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let io = |error| CheckpointError::Io { path: path.to_path_buf(), error };
        Tensors::of_file(path, files::open(path).map_err(io)?)
    }

    /// The same of a file that is open.
    pub(super) fn of_file(path: &Path, file: File) -> Result<Self, CheckpointError> {
        let io = |error| CheckpointError::Io { path: path.to_path_buf(), error };
        let bad = |problem: String| CheckpointError::Corrupt { path: path.to_path_buf(), problem };
        let bytes = file.metadata().map_err(io)?.len();
        let not = |e: String| bad(format!("not a safetensors file: {e}"));
        let mut length = [0; 8];
        file.read_exact_at(&mut length, 0).map_err(|_| not("it is too short".into()))?;
        let length = u64::from_le_bytes(length);
        let data = length.checked_add(8).filter(|data| length <= LARGEST_HEADER && *data <= bytes);
        let data = data.ok_or_else(|| not(format!("it says that its header has {length} bytes")))?;
        let mut header = vec![0; length as usize];
        file.read_exact_at(&mut header, 8).map_err(io)?;
        let header: Metadata = serde_json::from_slice(&header).map_err(|e| not(e.to_string()))?;
        let mut index: Vec<Ranged> = header
            .tensors()
            .into_iter()
            .map(|(name, info)| Ranged {
                name,
                shape: info.shape.iter().map(|&n| n as u64).collect(),
                dtype: info.dtype,
                packed: None,
                start: data.saturating_add(info.data_offsets.0 as u64),
                end: data.saturating_add(info.data_offsets.1 as u64),
            })
            .collect();
        index.sort_by_key(|f| (f.start, f.end));
        // Tensors stand one after another and fill the file, each of the size that its shape says.
        let mut at = data;
        for f in &index {
            let elements = f.shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d));
            let bits = elements.and_then(|n| n.checked_mul(f.dtype.bitsize() as u64));
            let size = bits.filter(|bits| bits % 8 == 0).map(|bits| bits / 8);
            if f.start != at || f.end < f.start || size != Some(f.end - f.start) {
                return Err(not(format!(
                    "tensor {} does not lie where the one before it ends, or is not of its shape's size",
                    f.name
                )));
            }
            at = f.end;
        }
        if at != bytes {
            return Err(not(format!("its tensors end at byte {at}, the file at {bytes}")));
        }
        let metadata: Vec<(String, String)> =
            header.metadata().iter().flatten().map(|(k, v)| (k.clone(), v.clone())).collect();
        let places: HashMap<String, usize> =
            index.iter().enumerate().map(|(i, f)| (f.name.clone(), i)).collect();
        if let Some((_, text)) = metadata.iter().find(|(key, _)| key == PACKED) {
            unpacked(text, &mut index, &places).map_err(bad)?;
        }
        let (path, source) = (path.to_path_buf(), Source::File(file));
        Ok(Tensors { path, source, index, places, metadata, map: Mutex::new(None) })
    }

    /// Tensors that stand in parts, in this order: `path` is the manifest.
    pub(super) fn of_parts(
        path: &Path,
        parts: Parts,
        tensors: Vec<(Entry, Vec<Piece>)>,
        metadata: Vec<(String, String)>,
    ) -> Self {
        let places = tensors.iter().enumerate().map(|(i, ((name, _), _))| (name.clone(), i)).collect();
        let whole = |(name, shape)| Ranged { name, shape, dtype: Dtype::F32, packed: None, start: 0, end: 0 };
        let (index, pieces) = tensors.into_iter().map(|(entry, pieces)| (whole(entry), pieces)).unzip();
        let (path, source) = (path.to_path_buf(), Source::Parts(parts, pieces));
        Tensors { path, source, index, places, metadata, map: Mutex::new(None) }
    }

    /// Tensors that stand in a file of another format, each within it.
    pub fn of_ranges(path: &Path, file: File, mut index: Vec<Ranged>) -> Self {
        index.sort_by_key(|f| (f.start, f.end));
        let places = index.iter().enumerate().map(|(i, f)| (f.name.clone(), i)).collect();
        let (path, source) = (path.to_path_buf(), Source::File(file));
        Tensors { path, source, index, places, metadata: vec![], map: Mutex::new(None) }
    }

    /// Path of the file; of parts, of their manifest.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A text stored with the tensors.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.metadata.iter().find(|(k, _)| k == key).map(|(_, v)| v.as_str())
    }

    /// Names and shapes, in the order of the file.
    pub fn entries(&self) -> impl Iterator<Item = (&str, &[u64])> {
        self.index.iter().map(|f| (f.name.as_str(), f.shape.as_slice()))
    }

    fn find(&self, name: &str) -> Option<&Ranged> {
        self.places.get(name).map(|&i| &self.index[i])
    }

    /// A tensor as it is stored.
    pub fn stored(&self, name: &str) -> Option<Stored<'_>> {
        let at = *self.places.get(name)?;
        let Ranged { name, shape, dtype, packed, start, end } = &self.index[at];
        let place = match &self.source {
            Source::File(file) => Place::Range { file, start: *start, end: *end },
            Source::Parts(parts, pieces) => Place::Parts { name, parts, pieces: &pieces[at] },
        };
        Some(Stored { shape, dtype: *dtype, packed: *packed, place })
    }

    /// Verifies every byte of parts that were not read yet; a file is as it was opened.
    pub fn verify(&self) -> Result<(), CheckpointError> {
        match &self.source {
            Source::File(_) => Ok(()),
            Source::Parts(parts, _) => parts.verify(),
        }
    }

    /// The storage in which a tensor can be read in its place: that of the file, where numbers are
    /// aligned and of a type that matmuls read. None where it is in parts.
    pub fn storage(&self, name: &str) -> Option<Storage> {
        let found = self.find(name).filter(|_| matches!(self.source, Source::File(_)))?;
        let format = match (found.packed, found.dtype) {
            (Some(packed), _) => Format::packed(packed),
            (None, Dtype::F32) => Format::F32,
            (None, Dtype::BF16) => Format::BF16,
            (None, Dtype::F16) => Format::packed(Packed::F16),
            (None, _) => return None,
        };
        let in_place = cfg!(target_endian = "little") && found.start.is_multiple_of(format.alignment());
        in_place.then(|| Storage::mapped(format))
    }

    /// A tensor's shape, and where it is in the file.
    pub fn mapped(&self, name: &str) -> Result<Option<(&[u64], Mapped)>, CheckpointError> {
        let (Some(found), Source::File(open)) = (self.find(name), &self.source) else { return Ok(None) };
        let mut map = self.map.lock().unwrap_or_else(PoisonError::into_inner);
        let file = match &*map {
            Some(file) => file.clone(),
            None => {
                let io = |error| CheckpointError::Io { path: self.path.clone(), error };
                let file = Arc::new(MappedFile::open(&self.path, open).map_err(io)?);
                map.insert(file).clone()
            }
        };
        let bad = |problem| CheckpointError::Corrupt { path: self.path.clone(), problem };
        file.unchanged().map_err(bad)?;
        if found.end > file.length() {
            return Err(bad(format!("was cut short while tensor {name} was read")));
        }
        let (name, bytes) = (found.name.as_str().into(), found.end - found.start);
        Ok(Some((&found.shape, Mapped { file, name, start: found.start, bytes })))
    }

    /// Shape and values of a tensor; 16-bit floats are widened, and blocks unpacked.
    pub fn get(&self, name: &str) -> Result<Option<View<'_>>, CheckpointError> {
        let (Some(found), Some(stored)) = (self.find(name), self.stored(name)) else { return Ok(None) };
        let file = match stored.place {
            Place::Range { file, .. } => file,
            Place::Parts { name, parts, pieces } => {
                let values = parts.read((name, pieces), 0..found.shape.iter().product())?;
                return Ok(Some((&found.shape, values)));
            }
        };
        let io = |error: io::Error| match error.kind() {
            io::ErrorKind::UnexpectedEof => CheckpointError::Corrupt {
                path: self.path.clone(),
                problem: format!("was cut short while tensor {name} was read"),
            },
            io::ErrorKind::Other => CheckpointError::Corrupt {
                path: self.path.clone(),
                problem: format!("tensor {name}: {error}"),
            },
            _ => CheckpointError::Io { path: self.path.clone(), error },
        };
        let bytes = || stored.bytes().map_err(io);
        let values: Vec<f32> = match found.dtype {
            Dtype::F32 if found.packed.is_none() && cfg!(target_endian = "little") => {
                let mut values = vec![0f32; ((found.end - found.start) / 4) as usize];
                file.read_exact_at(bytemuck::cast_slice_mut(&mut values), found.start).map_err(io)?;
                values
            }
            Dtype::F32 => {
                bytes()?.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
            }
            Dtype::BF16 => words(&bytes()?).map(|w| half::bf16::from_bits(w).to_f32()).collect(),
            Dtype::F16 => words(&bytes()?).map(|w| half::f16::from_bits(w).to_f32()).collect(),
            other => {
                return Err(CheckpointError::Corrupt {
                    path: self.path.clone(),
                    problem: format!("tensor {name} is of type {other:?}; F32, BF16 and F16 are read"),
                });
            }
        };
        if values.len() as u64 != found.shape.iter().product::<u64>() {
            return Err(CheckpointError::Corrupt {
                path: self.path.clone(),
                problem: format!("tensor {name} has {} values for the shape {:?}", values.len(), found.shape),
            });
        }
        Ok(Some((&found.shape, values)))
    }

    /// Shape of a tensor, and values of a range of it: of parts those alone are read that have some
    /// of it.
    pub fn range(&self, name: &str, range: Range<u64>) -> Result<Option<View<'_>>, CheckpointError> {
        let (Some(found), Some(stored)) = (self.find(name), self.stored(name)) else { return Ok(None) };
        if let Place::Parts { name, parts, pieces } = stored.place {
            return Ok(Some((&found.shape, parts.read((name, pieces), range)?)));
        }
        let mut bytes = vec![];
        stored.convert(range.start, range.end - range.start, Dtype::F32, &mut bytes).map_err(|error| {
            let problem = format!("tensor {name}: {error}");
            CheckpointError::Corrupt { path: self.path.clone(), problem }
        })?;
        let values = bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        Ok(Some((&found.shape, values.collect())))
    }

    /// Bytes of the file, or of all parts.
    pub fn size(&self) -> u64 {
        match &self.source {
            Source::File(_) => self.index.last().map_or(0, |f| f.end),
            Source::Parts(parts, _) => parts.size(),
        }
    }

    /// BLAKE3 of the file, in hexadecimal; of parts, that of their checksums.
    pub fn hash(&self) -> io::Result<String> {
        match &self.source {
            Source::File(file) => sums::hash(file).map(|(hash, _)| hash),
            Source::Parts(parts, _) => Ok(parts.hash()),
        }
    }
}

/// The metadata of packed tensors.
pub const PACKED: &str = "packed";

/// Gives packed tensors the shapes of their numbers.
fn unpacked(text: &str, index: &mut [Ranged], places: &HashMap<String, usize>) -> Result<(), String> {
    let said: Map<String, Value> = serde_json::from_str(text)
        .map_err(|error| format!("its metadata `{PACKED}` is no JSON object: {error}"))?;
    for (name, format) in said {
        let Some(tensor) = places.get(&name).map(|&place| &mut index[place]) else {
            return Err(format!("its metadata `{PACKED}` names a tensor {name}, which it has not"));
        };
        let format = format.as_str().unwrap_or_default().to_string();
        let bytes = tensor.shape.last().copied().filter(|_| tensor.dtype == Dtype::U8).unwrap_or(0);
        // Bytes of a row are those of its blocks; some blocks are a row.
        let Some(packed) = Packed::of_bytes(&format, bytes) else {
            let known = Packed::NAMES.join(", ");
            return Err(format!("tensor {name} is packed as `{format}`; {known} are read, of bytes"));
        };
        if bytes == 0 || !bytes.is_multiple_of(packed.bytes() as u64) {
            let size = packed.bytes();
            return Err(format!(
                "tensor {name} is packed as {format} and has rows of {bytes} bytes, no multiple of {size}"
            ));
        }
        let numbers = (bytes / packed.bytes() as u64).checked_mul(packed.unit() as u64);
        let Some(numbers) = numbers else { return Err(format!("tensor {name} has too many numbers")) };
        if let Some(last) = tensor.shape.last_mut() {
            *last = numbers;
        }
        (tensor.packed, tensor.dtype) = (Some(packed), Dtype::F32);
    }
    Ok(())
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u16> {
    bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ::safetensors::SafeTensors;

    fn file(content: &[u8]) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.safetensors");
        std::fs::write(&path, content).unwrap();
        (folder, path)
    }

    #[test]
    fn what_is_written_is_read_by_us_and_by_the_crate() {
        let entries =
            vec![("b".to_string(), vec![2, 3]), ("a".to_string(), vec![]), ("c".to_string(), vec![0])];
        let values = [vec![1.0, -2.5, 3.0, 4.0, f32::NAN, 6.0], vec![7.0], vec![]];
        let mut bytes = vec![];
        write(&mut bytes, &[("k", "v\"")], &entries, |i| Ok(values[i].clone())).unwrap();
        let parsed = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(parsed.tensor("b").unwrap().shape(), [2, 3]);
        let (_folder, path) = file(&bytes);
        let tensors = Tensors::open(&path).unwrap();
        assert_eq!(tensors.metadata("k"), Some("v\""));
        let (shape, b) = tensors.get("b").unwrap().unwrap();
        assert_eq!(shape, [2, 3]);
        assert_eq!(bytemuck::cast_slice::<f32, u32>(&b), bytemuck::cast_slice::<f32, u32>(&values[0]));
        assert_eq!(tensors.get("a").unwrap().unwrap().1[0], 7.0);
        assert!(tensors.get("z").unwrap().is_none());
    }

    #[test]
    fn a_file_that_is_cut_while_it_is_open_is_an_error() {
        let mut bytes = vec![];
        write(&mut bytes, &[], &[("w".into(), vec![1 << 12])], |_| Ok(vec![1.0; 1 << 12])).unwrap();
        let (_folder, path) = file(&bytes);
        let tensors = Tensors::open(&path).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(100).unwrap();
        let error = tensors.get("w").unwrap_err().to_string();
        assert!(error.contains("was cut short while tensor w was read"), "{error}");
    }

    #[test]
    fn cut_and_damaged_files_are_errors() {
        let mut bytes = vec![];
        write(&mut bytes, &[], &[("w".into(), vec![4])], |_| Ok(vec![1.0; 4])).unwrap();
        for n in 0..bytes.len() {
            let (_folder, path) = file(&bytes[..n]);
            assert!(Tensors::open(&path).is_err(), "cut to {n} of {}", bytes.len());
        }
        for i in 0..bytes.len() - 16 {
            for bit in 0..8 {
                let mut damaged = bytes.clone();
                damaged[i] ^= 1 << bit;
                let (_folder, path) = file(&damaged);
                // Either refused, or some other well-formed file: never a panic.
                if let Ok(tensors) = Tensors::open(&path) {
                    let names: Vec<String> = tensors.entries().map(|(n, _)| n.to_string()).collect();
                    for name in names {
                        let _ = tensors.get(&name);
                    }
                }
            }
        }
    }
}

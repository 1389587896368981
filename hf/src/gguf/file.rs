//! The file: magic, metadata, a list of tensors, and their data.
//!
//! *In*: a GGUF file of version 2 or 3, or what to write. *Out*: the other. *Promise*: no length,
//! count or offset is trusted, and what is wrong is named with its byte or its tensor; a tensor is
//! a range of the file, read where it is.

use super::value::{self, Value, code, width};
use crate::HfError;
use dreamc_compiler::format::{NV, NV_HEAD, Packed};
use dreamc_data::files;
use dreamc_runtime::checkpoint::safetensors::{Counted, Dtype, Ranged, Tensors};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::path::Path;

const MAGIC: &[u8; 4] = b"GGUF";
const VERSION: u32 = 3;
/// A multiple that tensors begin at, where the file names no other.
const ALIGNMENT: u64 = 32;
const ALIGNMENT_KEY: &str = "general.alignment";
/// Most bytes of metadata and of the list of tensors.
const LARGEST: u64 = 1 << 28;
/// Most tensors, and most keys.
const MOST: u64 = 1 << 20;
/// Most values of an array.
const MOST_VALUES: u64 = 1 << 22;

/// The numbers of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// In 32, or in 16 bits.
    Plain(Dtype),
    /// In blocks.
    Packed(Packed),
    /// In blocks of `nvfp4`; the scale of their tensor is [another tensor](super::scales).
    Nvfp4,
}

/// Kinds by the codes of the format, and their names there.
pub const KINDS: [(u32, &str, Kind); 9] = [
    (0, "f32", Kind::Plain(Dtype::F32)),
    (1, "f16", Kind::Plain(Dtype::F16)),
    (30, "bf16", Kind::Plain(Dtype::BF16)),
    (8, "q8_0", Kind::Packed(Packed::Q8)),
    (2, "q4_0", Kind::Packed(Packed::Q4)),
    (12, "q4_k", Kind::Packed(Packed::Q4K)),
    (14, "q6_k", Kind::Packed(Packed::Q6K)),
    (39, "mxfp4", Kind::Packed(Packed::Mxfp4)),
    (40, "nvfp4", Kind::Nvfp4),
];

/// Names of kinds that the format has and that are not read.
const UNREAD: [(u32, &str); 13] = [
    (3, "q4_1"),
    (6, "q5_0"),
    (7, "q5_1"),
    (10, "q2_k"),
    (11, "q3_k"),
    (13, "q5_k"),
    (16, "iq2_xxs"),
    (17, "iq2_xs"),
    (18, "iq3_xxs"),
    (20, "iq4_nl"),
    (21, "iq3_s"),
    (22, "iq2_s"),
    (23, "iq4_xs"),
];

impl Kind {
    /// The kind of that name.
    pub fn named(name: &str) -> Option<Self> {
        KINDS.iter().find(|(_, known, _)| *known == name).map(|(.., kind)| *kind)
    }

    /// The kind of blocks of ours.
    pub fn of(packed: Packed) -> Self {
        match packed {
            Packed::Nvfp4(_) => Kind::Nvfp4,
            other => Kind::Packed(other),
        }
    }

    /// Its name; `int8` has none in this format.
    pub fn name(self) -> Option<&'static str> {
        KINDS.iter().find(|(.., kind)| *kind == self).map(|(_, name, _)| *name)
    }

    fn code(self) -> Option<u32> {
        KINDS.iter().find(|(.., kind)| *kind == self).map(|(code, ..)| *code)
    }

    /// Bytes of a row of `numbers` numbers, where they are whole blocks.
    pub fn row(self, numbers: u64) -> Option<u64> {
        let (unit, bytes) = match self {
            Kind::Plain(dtype) => (1, dtype.bitsize() as u64 / 8),
            Kind::Packed(packed) => (packed.unit() as u64, packed.bytes() as u64),
            Kind::Nvfp4 => (NV.0 as u64, NV.2 as u64),
        };
        numbers.is_multiple_of(unit).then(|| numbers / unit).and_then(|blocks| blocks.checked_mul(bytes))
    }
}

/// Bytes of a row of blocks in files of ours before those that it has in this format.
pub fn head(kind: Kind) -> u64 {
    if kind == Kind::Nvfp4 { NV_HEAD as u64 } else { 0 }
}

/// A GGUF file that was opened.
pub struct Gguf {
    /// Its metadata.
    pub values: BTreeMap<String, Value>,
    /// Its tensors; those that are packed are bytes, a row of blocks in the place of a row of
    /// numbers.
    pub tensors: Tensors,
    /// Their kinds, and the shapes of their numbers.
    pub kinds: BTreeMap<String, (Kind, Vec<u64>)>,
}

/// Reads a file from its begin, and knows where it is.
struct Cursor<'a> {
    path: &'a Path,
    inner: BufReader<&'a File>,
    at: u64,
    length: u64,
}

impl Cursor<'_> {
    fn refuse<T>(&self, problem: impl std::fmt::Display) -> Result<T, HfError> {
        Err(HfError::refused(self.path, format!("is no GGUF file that is read: {problem}")))
    }

    fn bytes(&mut self, count: u64, of: &str) -> Result<Vec<u8>, HfError> {
        let at = self.at;
        if count > self.length.min(LARGEST).saturating_sub(at) {
            return self.refuse(format_args!(
                "{of} at byte {at} would have {count} bytes, the file has {}",
                self.length
            ));
        }
        let mut bytes = vec![0; count as usize];
        let io = |error| HfError::Io { path: self.path.to_path_buf(), error };
        self.inner.read_exact(&mut bytes).map_err(io)?;
        self.at += count;
        Ok(bytes)
    }

    fn whole(&mut self, bytes: u64, of: &str) -> Result<u64, HfError> {
        let found = self.bytes(bytes, of)?;
        Ok(found.iter().rev().fold(0, |x, byte| x << 8 | u64::from(*byte)))
    }

    fn text(&mut self, of: &str) -> Result<String, HfError> {
        let (at, length) = (self.at, self.whole(8, of)?);
        let bytes = self.bytes(length, of)?;
        match String::from_utf8(bytes) {
            Ok(text) => Ok(text),
            Err(_) => self.refuse(format_args!("{of} at byte {at} is not UTF-8")),
        }
    }

    /// A value of a type.
    fn value(&mut self, of: u32, key: &str, nested: bool) -> Result<Value, HfError> {
        let at = self.at;
        if let Some((bytes, signed)) = width(of) {
            let bits = self.whole(bytes as u64, key)?;
            return Ok(match of {
                code::F32 => Value::F32(f32::from_bits(bits as u32)),
                code::F64 => Value::F64(f64::from_bits(bits)),
                code::BOOL => Value::Bool(bits != 0),
                _ if signed => {
                    let unused = 64 - 8 * bytes as u32;
                    Value::Whole(i128::from((bits << unused) as i64 >> unused), of)
                }
                _ => Value::Whole(bits.into(), of),
            });
        }
        match of {
            code::TEXT => Ok(Value::Text(self.text(key)?)),
            code::ARRAY if nested => self.refuse(format_args!("{key} at byte {at} is an array of arrays")),
            code::ARRAY => {
                let (inner, count) = (self.whole(4, key)? as u32, self.whole(8, key)?);
                let least = width(inner).map_or(8, |(bytes, _)| bytes as u64);
                let rest = self.length.min(LARGEST).saturating_sub(self.at);
                if count > MOST_VALUES {
                    return self.refuse(format_args!(
                        "{key} at byte {at} has {count} values; {MOST_VALUES} are read"
                    ));
                }
                if count.checked_mul(least).is_none_or(|bytes| bytes > rest) {
                    return self.refuse(format_args!(
                        "{key} at byte {at} would have {count} values, {rest} bytes follow"
                    ));
                }
                let all = (0..count).map(|_| self.value(inner, key, true)).collect::<Result<_, _>>()?;
                Ok(Value::Array(inner, all))
            }
            other => {
                self.refuse(format_args!("{key} at byte {at} is of a type {other}, which the format has not"))
            }
        }
    }
}

impl Gguf {
    /// Opens a file and checks all but the numbers.
    pub fn open(path: &Path) -> Result<Self, HfError> {
        let io = |error| HfError::Io { path: path.to_path_buf(), error };
        let file = files::open(path).map_err(io)?;
        let length = file.metadata().map_err(io)?.len();
        let mut cursor = Cursor { path, inner: BufReader::new(&file), at: 0, length };
        let (values, listed) = listed(&mut cursor)?;
        let (mut ranges, mut kinds) = (vec![], BTreeMap::new());
        let alignment = match values.get(ALIGNMENT_KEY) {
            None => ALIGNMENT,
            Some(value) => match value.as_whole().filter(|n| n.is_power_of_two() && *n <= 1 << 20) {
                Some(alignment) => alignment,
                None => return cursor.refuse(format_args!("{ALIGNMENT_KEY} is {value:?}, no power of two")),
            },
        };
        let data = cursor.at.next_multiple_of(alignment);
        for Listed { name, shape, kind, offset } in listed {
            let bad = |problem: String| HfError::refused(path, format!("tensor {name} {problem}"));
            let (&row, rows) = shape.split_last().ok_or_else(|| bad("has no dimensions".into()))?;
            let Some(bytes) = kind.row(row) else {
                let packed = kind.name().unwrap_or_default();
                return Err(bad(format!(
                    "is {packed} and has rows of {row} numbers, which are no whole blocks"
                )));
            };
            let size = rows.iter().try_fold(bytes, |n, d| n.checked_mul(*d));
            // Numbers are counted in 64 bits, too.
            let numbers = shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d));
            let start = data.checked_add(offset).filter(|start| start.is_multiple_of(alignment));
            let end = size.zip(start).and_then(|(size, start)| start.checked_add(size));
            let (Some(start), Some(end), Some(_)) = (start, end.filter(|end| *end <= length), numbers) else {
                return Err(bad(format!(
                    "of {shape:?} at offset {offset} does not lie in the file, whose tensors begin at byte {data} and which ends at {length}"
                )));
            };
            let (dtype, stored) = match kind {
                Kind::Plain(dtype) => (dtype, shape.clone()),
                Kind::Packed(_) | Kind::Nvfp4 => (Dtype::U8, [rows, &[bytes]].concat()),
            };
            if kinds.insert(name.clone(), (kind, shape)).is_some() {
                return Err(bad("is listed twice".into()));
            }
            ranges.push(Ranged { name, shape: stored, dtype, packed: None, start, end });
        }
        ranges.sort_by_key(|f| (f.start, f.end));
        if let Some(pair) = ranges.windows(2).find(|pair| pair[0].end > pair[1].start) {
            let (a, b) = (&pair[0].name, &pair[1].name);
            return cursor.refuse(format_args!("tensors {a} and {b} share bytes"));
        }
        drop(cursor);
        Ok(Gguf { values, tensors: Tensors::of_ranges(path, file, ranges), kinds })
    }

    /// A value of the metadata.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }
}

/// A tensor as the file lists it.
struct Listed {
    name: String,
    shape: Vec<u64>,
    kind: Kind,
    offset: u64,
}

/// Reads the metadata and the list of tensors.
fn listed(cursor: &mut Cursor) -> Result<(BTreeMap<String, Value>, Vec<Listed>), HfError> {
    let magic = cursor.bytes(4, "its magic")?;
    if magic != MAGIC {
        return cursor
            .refuse(format_args!("it begins with {:?}, not with GGUF", String::from_utf8_lossy(&magic)));
    }
    let version = cursor.whole(4, "its version")? as u32;
    match version {
        2 | 3 => {}
        _ if version.swap_bytes() <= 3 => return cursor.refuse("its numbers are big-endian"),
        _ => return cursor.refuse(format_args!("its version is {version}; 2 and 3 are read")),
    }
    let (tensors, keys) = (cursor.whole(8, "the number of tensors")?, cursor.whole(8, "the number of keys")?);
    if tensors > MOST || keys > MOST {
        return cursor
            .refuse(format_args!("it says that it has {tensors} tensors and {keys} keys; {MOST} are read"));
    }
    let mut values = BTreeMap::new();
    for _ in 0..keys {
        let key = cursor.text("a key")?;
        let of = cursor.whole(4, &key)? as u32;
        let value = cursor.value(of, &key, false)?;
        if values.insert(key.clone(), value).is_some() {
            return cursor.refuse(format_args!("the key {key} is there twice"));
        }
    }
    let mut listed = vec![];
    for _ in 0..tensors {
        let name = cursor.text("the name of a tensor")?;
        let (at, dims) = (cursor.at, cursor.whole(4, &name)?);
        if dims > 4 {
            return cursor
                .refuse(format_args!("tensor {name} at byte {at} has {dims} dimensions; the format has 4"));
        }
        let mut shape = (0..dims).map(|_| cursor.whole(8, &name)).collect::<Result<Vec<u64>, _>>()?;
        // The fastest comes first there.
        shape.reverse();
        let (at, code) = (cursor.at, cursor.whole(4, &name)? as u32);
        let Some((.., kind)) = KINDS.iter().find(|(known, ..)| *known == code) else {
            let known = KINDS.map(|(_, name, _)| name).join(", ");
            let other = UNREAD.iter().find(|(other, _)| *other == code).map(|(_, name)| *name);
            let found = other.map_or(format!("of a type {code} that is not known"), String::from);
            return cursor.refuse(format_args!("tensor {name} at byte {at} is {found}; {known} are read"));
        };
        let offset = cursor.whole(8, &name)?;
        listed.push(Listed { name, shape, kind: *kind, offset });
    }
    Ok((values, listed))
}

/// A tensor to be written: its name, the shape of its numbers, and their kind.
pub type Entry = (String, Vec<u64>, Kind);

/// Bytes of a tensor, where the format has its kind and its rows are whole blocks.
pub fn size((name, shape, kind): &Entry) -> io::Result<u64> {
    let bytes = shape
        .split_last()
        .and_then(|(row, rows)| rows.iter().try_fold(kind.row(*row)?, |n, d| n.checked_mul(*d)));
    bytes.ok_or_else(|| io::Error::other(format!("tensor {name} {shape:?} cannot be written as {kind:?}")))
}

/// Writes a file; `fill` writes the bytes of tensor number `i`.
pub fn write(
    out: &mut dyn Write,
    values: &[(String, Value)],
    entries: &[Entry],
    mut fill: impl FnMut(usize, &mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    let mut head = MAGIC.to_vec();
    head.extend(VERSION.to_le_bytes());
    head.extend((entries.len() as u64).to_le_bytes());
    head.extend((values.len() as u64).to_le_bytes());
    for (key, value) in values {
        value::text(key, &mut head);
        head.extend(value.code().to_le_bytes());
        value.write(&mut head);
    }
    let mut offset = 0u64;
    for entry @ (name, shape, kind) in entries {
        let code =
            kind.code().ok_or_else(|| io::Error::other(format!("tensor {name}: no type for {kind:?}")))?;
        value::text(name, &mut head);
        head.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|d| head.extend(d.to_le_bytes()));
        head.extend(code.to_le_bytes());
        head.extend(offset.to_le_bytes());
        offset += size(entry)?.next_multiple_of(ALIGNMENT);
    }
    head.resize(head.len().next_multiple_of(ALIGNMENT as usize), 0);
    out.write_all(&head)?;
    for (i, entry) in entries.iter().enumerate() {
        let mut counted = Counted { inner: &mut *out, bytes: 0 };
        fill(i, &mut counted)?;
        let (right, found) = (size(entry)?, counted.bytes);
        if found != right {
            return Err(io::Error::other(format!("tensor {} has {found} bytes, not {right}", entry.0)));
        }
        out.write_all(&vec![0; (right.next_multiple_of(ALIGNMENT) - right) as usize])?;
    }
    Ok(())
}

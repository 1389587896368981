//! Checkpoints as PyTorch's `torch.distributed.checkpoint` reads them.
//!
//! *In*: named tensors, one at a time. *Out*: a folder of `__0_0.distcp`, `__1_0.distcp`, …, each a
//! row of files of `torch.save`, and `.metadata`, a pickle of where in them each piece of a tensor
//! is (torch/distributed/checkpoint: metadata.py, filesystem.py, version 1.0.0). *Promise*: writing
//! takes the memory of a buffer; a tensor is cut along its first dimension into pieces of at most
//! [`PIECE`] bytes, dealt to the files in order, so that ranks of any number read parts of it.

use super::safetensors::{Counted, Dtype};
use super::{CheckpointError, folder};
use dreamc_data::sums::Fill;
use flate2::Crc;
use std::cell::RefCell;
use std::io::{self, Write};
use std::path::Path;

/// Most bytes of a piece, but for a single row that is longer.
const PIECE: u64 = 1 << 30;
/// Most bytes of a piece: sizes in an archive without extensions are of 32 bits.
const LARGEST: u64 = u32::MAX as u64 - (1 << 16);

/// A tensor of a state dict.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Its path in the nested dicts: `["model", "embed.weight"]`.
    pub path: Vec<String>,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Type of its elements.
    pub dtype: Dtype,
}

/// Writes a number of elements of an entry from a first one on: `(entry, first, elements, out)`.
pub type Read<'a> = &'a dyn Fn(usize, u64, u64, &mut dyn Write) -> io::Result<()>;

/// Rows of an entry in a file.
#[derive(Clone, Debug)]
struct Piece {
    entry: usize,
    /// The first row, and rows; of a tensor without dimensions 0 and 1.
    rows: [u64; 2],
    file: usize,
    /// Where it begins in the file, and its bytes; known once it is written.
    place: [u64; 2],
}

impl Entry {
    fn name(&self) -> String {
        self.path.join(".")
    }

    /// Elements of a row.
    fn row(&self) -> u64 {
        self.shape.iter().skip(1).product()
    }

    fn row_bytes(&self) -> u64 {
        self.row() * self.dtype.bitsize() as u64 / 8
    }

    /// The shape of some rows, and where they begin.
    fn part(&self, [first, rows]: [u64; 2]) -> (Vec<u64>, Vec<u64>) {
        let (mut shape, mut offsets) = (self.shape.clone(), vec![0; self.shape.len()]);
        if let (Some(size), Some(offset)) = (shape.first_mut(), offsets.first_mut()) {
            (*size, *offset) = (rows, first);
        }
        (shape, offsets)
    }
}

/// Rows of a piece of an entry, at most; an error where a row alone is too long.
fn rows_of_piece(entry: &Entry, most: u64) -> io::Result<u64> {
    let row = entry.row_bytes().max(1);
    if row > LARGEST {
        let name = entry.name();
        return Err(io::Error::other(format!(
            "a row of tensor {name} has {row} bytes; a piece has at most {LARGEST}"
        )));
    }
    Ok((most / row).max(1))
}

/// The pieces of all entries, those of a file of about as many bytes as those of another.
fn pieces(entries: &[Entry], files: usize, most: u64) -> io::Result<Vec<Piece>> {
    let bytes = |e: &Entry| e.shape.first().copied().unwrap_or(1) * e.row_bytes();
    let total: u64 = entries.iter().map(bytes).sum();
    let share = total.div_ceil(files as u64).max(1);
    let (mut all, mut done) = (vec![], 0u64);
    for (n, entry) in entries.iter().enumerate() {
        let rows = entry.shape.first().copied().unwrap_or(1);
        let most = rows_of_piece(entry, most)?;
        let mut first = 0;
        // A tensor without elements is a piece, too.
        loop {
            // Rows that the file's share has room for.
            let file = ((done / share) as usize).min(files - 1);
            let left = match file + 1 < files {
                true => ((file as u64 + 1) * share - done).div_ceil(entry.row_bytes().max(1)).max(1),
                false => u64::MAX,
            };
            let count = (rows - first).min(most).min(left);
            all.push(Piece { entry: n, rows: [first, count], file, place: [0; 2] });
            first += count;
            done += count * entry.row_bytes();
            if first >= rows {
                break;
            }
        }
    }
    Ok(all)
}

/// Writes a checkpoint of `entries` in `files` files as the folder `to`, which does not exist yet.
pub fn write(to: &Path, entries: &[Entry], files: usize, read: Read) -> Result<(), CheckpointError> {
    let about = |error| CheckpointError::Io { path: to.to_path_buf(), error };
    let files = files.max(1);
    let placed = RefCell::new(pieces(entries, files, PIECE).map_err(about)?);
    let names: Vec<String> = (0..files).map(name_of_file).collect();
    let mut list: Vec<(&str, Fill)> = vec![];
    for (file, name) in names.iter().enumerate() {
        let placed = &placed;
        list.push((
            name,
            Box::new(move |out: &mut dyn Write| {
                let mut at = 0;
                for piece in placed.borrow_mut().iter_mut().filter(|piece| piece.file == file) {
                    let bytes = write_piece(entries, piece, read, out)?;
                    piece.place = [at, bytes];
                    at += bytes;
                }
                Ok(())
            }),
        ));
    }
    list.push((
        ".metadata",
        Box::new(|out: &mut dyn Write| out.write_all(&metadata(entries, &placed.borrow()))),
    ));
    folder::write(to, list)
}

fn name_of_file(file: usize) -> String {
    format!("__{file}_0.distcp")
}

/// Writes a piece as a file of `torch.save`; gives its bytes.
fn write_piece(entries: &[Entry], piece: &Piece, read: Read, out: &mut dyn Write) -> io::Result<u64> {
    let entry = &entries[piece.entry];
    let (shape, _) = entry.part(piece.rows);
    let elements = shape.iter().product::<u64>();
    let first = piece.rows[0] * entry.row();
    let mut archive = Archive::new(out);
    archive.add("archive/data.pkl", |out| out.write_all(&tensor(&shape, entry.dtype)))?;
    archive.add("archive/byteorder", |out| out.write_all(b"little"))?;
    archive.add("archive/data/0", |out| read(piece.entry, first, elements, out))?;
    archive.add("archive/version", |out| out.write_all(b"3\n"))?;
    archive.finish()
}

/// A zip archive that is written from begin to end, nothing compressed.
struct Archive<'a> {
    out: Counted<'a>,
    /// Name, checksum, bytes and place of each file.
    files: Vec<(String, u32, u32, u32)>,
}

/// Sizes follow the data, and names are UTF-8.
const FLAGS: u16 = 0x0808;

impl<'a> Archive<'a> {
    fn new(out: &'a mut dyn Write) -> Self {
        Archive { out: Counted { inner: out, bytes: 0 }, files: vec![] }
    }

    fn numbers(&mut self, shorts: &[u16], longs: &[u32]) -> io::Result<()> {
        let short = shorts.iter().flat_map(|x| x.to_le_bytes());
        let bytes: Vec<u8> = short.chain(longs.iter().flat_map(|x| x.to_le_bytes())).collect();
        self.out.write_all(&bytes)
    }

    fn add(&mut self, name: &str, fill: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
        let at = short(self.out.bytes)?;
        self.numbers(&[], &[0x0403_4b50])?;
        self.numbers(&[20, FLAGS, 0, 0, 0x21], &[0, 0, 0])?;
        self.numbers(&[name.len() as u16, 0], &[])?;
        self.out.write_all(name.as_bytes())?;
        let begin = self.out.bytes;
        let mut summed = Summed { out: &mut self.out, crc: Crc::new() };
        fill(&mut summed)?;
        let crc = summed.crc.sum();
        let size = short(self.out.bytes - begin)?;
        self.numbers(&[], &[0x0807_4b50, crc, size, size])?;
        self.files.push((name.into(), crc, size, at));
        Ok(())
    }

    /// Writes the directory; gives the bytes of all.
    fn finish(mut self) -> io::Result<u64> {
        let begin = short(self.out.bytes)?;
        let files = std::mem::take(&mut self.files);
        for (name, crc, size, at) in &files {
            self.numbers(&[], &[0x0201_4b50])?;
            self.numbers(&[20, 20, FLAGS, 0, 0, 0x21], &[*crc, *size, *size])?;
            self.numbers(&[name.len() as u16, 0, 0, 0, 0], &[0, *at])?;
            self.out.write_all(name.as_bytes())?;
        }
        let (n, size) = (files.len() as u16, short(self.out.bytes)? - begin);
        self.numbers(&[], &[0x0605_4b50])?;
        self.numbers(&[0, 0, n, n], &[size, begin])?;
        self.numbers(&[0], &[])?;
        Ok(self.out.bytes)
    }
}

fn short(bytes: u64) -> io::Result<u32> {
    u32::try_from(bytes).map_err(|_| io::Error::other("a piece of a tensor is longer than 4 GiB"))
}

/// Sums up what goes through.
struct Summed<'a, 'b> {
    out: &'a mut Counted<'b>,
    crc: Crc,
}

impl Write for Summed<'_, '_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.out.write(bytes)?;
        self.crc.update(&bytes[..n]);
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// A pickle of protocol 2 that is being written.
struct Pickle(Vec<u8>);

impl Pickle {
    fn new() -> Self {
        Pickle(vec![0x80, 2])
    }

    fn code(&mut self, code: u8) -> &mut Self {
        self.0.push(code);
        self
    }

    fn global(&mut self, module: &str, name: &str) -> &mut Self {
        self.0.extend_from_slice(format!("c{module}\n{name}\n").as_bytes());
        self
    }

    fn text(&mut self, text: &str) -> &mut Self {
        self.code(b'X').0.extend_from_slice(&(text.len() as u32).to_le_bytes());
        self.0.extend_from_slice(text.as_bytes());
        self
    }

    /// A number as a little-endian one with room for its sign.
    fn number(&mut self, x: u64) -> &mut Self {
        self.code(0x8a).code(9).0.extend_from_slice(&x.to_le_bytes());
        self.code(0)
    }

    fn numbers(&mut self, list: &[u64]) -> &mut Self {
        self.code(b'(');
        for &x in list {
            self.number(x);
        }
        self.code(b't')
    }

    /// A `torch.Size`.
    fn size(&mut self, list: &[u64]) -> &mut Self {
        self.global("torch", "Size").numbers(list).code(0x85).code(b'R')
    }

    /// An object of a class, without a state so far.
    fn object(&mut self, module: &str, class: &str) -> &mut Self {
        self.global(module, class).code(b')').code(0x81)
    }

    fn end(mut self) -> Vec<u8> {
        self.code(b'.');
        self.0
    }
}

const MODULE: &str = "torch.distributed.checkpoint.metadata";

/// Names of a type of elements: of a storage, and of a dtype.
fn names(dtype: Dtype) -> (&'static str, &'static str) {
    match dtype {
        Dtype::BF16 => ("BFloat16Storage", "bfloat16"),
        Dtype::F16 => ("HalfStorage", "float16"),
        Dtype::I64 => ("LongStorage", "int64"),
        _ => ("FloatStorage", "float32"),
    }
}

/// `data.pkl` of a tensor.
fn tensor(shape: &[u64], dtype: Dtype) -> Vec<u8> {
    let mut strides = vec![1; shape.len()];
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d] * shape[d].max(1);
    }
    let mut p = Pickle::new();
    p.global("torch._utils", "_rebuild_tensor_v2").code(b'(');
    p.code(b'(').text("storage").global("torch", names(dtype).0).text("0").text("cpu");
    p.number(shape.iter().product()).code(b't').code(b'Q');
    p.number(0).numbers(shape).numbers(&strides).code(0x89);
    p.global("collections", "OrderedDict").code(b')').code(b'R');
    p.code(b't').code(b'R');
    p.end()
}

/// `.metadata` of pieces that are written.
fn metadata(entries: &[Entry], pieces: &[Piece]) -> Vec<u8> {
    let mut p = Pickle::new();
    p.object(MODULE, "Metadata").code(b'}').code(b'(');
    p.text("state_dict_metadata").code(b'}').code(b'(');
    for (n, entry) in entries.iter().enumerate() {
        p.text(&entry.name()).object(MODULE, "TensorStorageMetadata").code(b'}').code(b'(');
        p.text("properties").object(MODULE, "TensorProperties").code(b'(');
        p.global("torch", names(entry.dtype).1);
        p.global("torch.serialization", "_get_layout").text("torch.strided").code(0x85).code(b'R');
        // No gradient, contiguous, not pinned.
        p.code(0x89).global(MODULE, "_MEM_FORMAT_ENCODING").number(0).code(0x85).code(b'R');
        p.code(0x89).code(b't').code(b'b');
        p.text("size").size(&entry.shape).text("chunks").code(b']');
        for piece in pieces.iter().filter(|piece| piece.entry == n) {
            let (shape, offsets) = entry.part(piece.rows);
            p.object(MODULE, "ChunkStorageMetadata").code(b'}').code(b'(');
            p.text("offsets").size(&offsets).text("sizes").size(&shape);
            p.code(b'u').code(b'b').code(b'a');
        }
        p.code(b'u').code(b'b');
    }
    p.code(b'u');
    p.text("planner_data").code(b'}').code(b'(');
    for entry in entries {
        p.text(&entry.name()).code(b'(');
        for part in &entry.path {
            p.text(part);
        }
        p.code(b't');
    }
    p.code(b'u');
    p.text("storage_data").code(b'}').code(b'(');
    let mut numbers = vec![0u64; entries.len()];
    for piece in pieces {
        let entry = &entries[piece.entry];
        p.object(MODULE, "MetadataIndex").code(b'}').code(b'(');
        p.text("fqn").text(&entry.name()).text("index").number(numbers[piece.entry]);
        numbers[piece.entry] += 1;
        p.text("offset").size(&entry.part(piece.rows).1).code(b'u').code(b'b');
        p.object("torch.distributed.checkpoint.filesystem", "_StorageInfo").code(b'}').code(b'(');
        p.text("relative_path").text(&name_of_file(piece.file));
        p.text("offset").number(piece.place[0]).text("length").number(piece.place[1]);
        p.code(b'u').code(b'b');
    }
    p.code(b'u');
    p.text("storage_meta").code(b'N').text("version").text("1.0.0");
    p.code(b'u').code(b'b');
    p.end()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, shape: &[u64]) -> Entry {
        Entry { path: vec!["model".into(), name.into()], shape: shape.to_vec(), dtype: Dtype::F32 }
    }

    /// Every row of every tensor is in one piece, pieces are no longer than they may be, and files
    /// hold about as much as one another.
    #[test]
    fn pieces_cover_every_row_once() {
        let entries = [
            entry("a", &[100, 8]),
            entry("b", &[3]),
            entry("c", &[]),
            entry("d", &[0, 4]),
            entry("e", &[50, 16]),
        ];
        for files in 1..5 {
            for most in [1, 64, 1000, PIECE] {
                let all = pieces(&entries, files, most).unwrap();
                let mut held = vec![0; files];
                for (n, entry) in entries.iter().enumerate() {
                    let mut next = 0;
                    for piece in all.iter().filter(|piece| piece.entry == n) {
                        assert_eq!(piece.rows[0], next);
                        next += piece.rows[1];
                        let bytes = piece.rows[1] * entry.row_bytes();
                        assert!(bytes <= most.max(entry.row_bytes()));
                        held[piece.file] += bytes;
                    }
                    assert_eq!(next, entry.shape.first().copied().unwrap_or(1));
                }
                let (least, largest) = (held.iter().min().unwrap(), held.iter().max().unwrap());
                assert!(largest - least <= 3 * 64, "{held:?}");
            }
        }
    }
}

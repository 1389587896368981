//! The zip archive of `torch.save`: where its files begin.
//!
//! *In*: an open file. *Out*: names, places and lengths of the files in it. *Promise*: no length or
//! place is trusted; what is compressed is refused, since `torch` compresses nothing.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Files of an archive, each from a byte to a byte.
pub(super) type Files = BTreeMap<String, (u64, u64)>;

const END: [u8; 4] = *b"PK\x05\x06";
const END_64: [u8; 4] = *b"PK\x06\x06";
const LOCATOR_64: [u8; 4] = *b"PK\x06\x07";
const ENTRY: [u8; 4] = *b"PK\x01\x02";
const LOCAL: [u8; 4] = *b"PK\x03\x04";
/// Bytes of the end without its comment, which has at most as many more.
const END_BYTES: u64 = 22;
const COMMENT: u64 = u16::MAX as u64;
/// Largest list of files that is read.
const LARGEST_LIST: u64 = 64 << 20;

/// Numbers at a place of some bytes; `None` beyond them.
struct Numbers<'a>(&'a [u8]);

impl Numbers<'_> {
    fn at<const N: usize>(&self, place: usize) -> Option<[u8; N]> {
        self.0.get(place..place.checked_add(N)?)?.try_into().ok()
    }

    fn two(&self, place: usize) -> Option<u64> {
        self.at(place).map(|b| u64::from(u16::from_le_bytes(b)))
    }

    fn four(&self, place: usize) -> Option<u64> {
        self.at(place).map(|b| u64::from(u32::from_le_bytes(b)))
    }

    fn eight(&self, place: usize) -> Option<u64> {
        self.at(place).map(u64::from_le_bytes)
    }
}

/// The list of files: where it is, its length, and how many there are.
struct List {
    start: u64,
    bytes: u64,
    files: u64,
}

/// Reads the list of an archive's files.
pub(super) fn files(file: &File) -> io::Result<Result<Files, String>> {
    let length = file.metadata()?.len();
    let tail = length.min(END_BYTES + COMMENT);
    let mut bytes = vec![0; tail as usize];
    file.read_exact_at(&mut bytes, length - tail)?;
    let Some(end) = bytes.windows(4).rposition(|four| four == END) else {
        return Ok(Err("is no archive of torch.save (of version 1.6 or later)".into()));
    };
    // A comment of as many bytes as it says follows, and nothing else.
    let comment = Numbers(&bytes[end..]).two(20);
    let rest = (bytes.len() - end).checked_sub(END_BYTES as usize).map(|n| n as u64);
    if comment.is_none() || comment != rest {
        return Ok(Err("is an archive whose end is damaged".into()));
    }
    let list = match list(file, &bytes[end..], length - tail + end as u64)? {
        Some(list)
            if list.bytes <= LARGEST_LIST
                && list.start.checked_add(list.bytes).is_some_and(|e| e <= length) =>
        {
            list
        }
        _ => return Ok(Err("is an archive whose end is damaged".into())),
    };
    let mut bytes = vec![0; list.bytes as usize];
    file.read_exact_at(&mut bytes, list.start)?;
    let mut found = Files::new();
    let mut at = 0;
    for _ in 0..list.files {
        let Some((name, stored, size, local, next)) = entry(&bytes, at) else {
            return Ok(Err("is an archive whose list of files is damaged".into()));
        };
        if !stored {
            return Ok(Err(format!("has {name} compressed, which torch.save never does")));
        }
        let mut header = [0; 30];
        let place = local.checked_add(30).filter(|end| *end <= length);
        if place.is_none() {
            return Ok(Err(format!("has {name} beyond its end")));
        }
        file.read_exact_at(&mut header, local)?;
        let numbers = Numbers(&header);
        let (names, more) = (numbers.two(26).unwrap_or(0), numbers.two(28).unwrap_or(0));
        let start = local + 30 + names + more;
        let end = start.checked_add(size).filter(|end| *end <= length);
        match end {
            Some(end) if header[..4] == LOCAL => found.insert(name, (start, end)),
            _ => return Ok(Err(format!("has {name} beyond its end"))),
        };
        at = next;
    }
    Ok(Ok(found))
}

/// Where the list of files is, by the end of the archive, which begins at a byte of the file.
fn list(file: &File, end: &[u8], begins: u64) -> io::Result<Option<List>> {
    let numbers = Numbers(end);
    let of = || Some(List { files: numbers.two(10)?, bytes: numbers.four(12)?, start: numbers.four(16)? });
    let Some(small) = of() else { return Ok(None) };
    let large = small.files == 0xffff || small.bytes == 0xffff_ffff || small.start == 0xffff_ffff;
    let Some(locator) = begins.checked_sub(20).filter(|_| large) else { return Ok(Some(small)) };
    let mut bytes = [0; 20];
    file.read_exact_at(&mut bytes, locator)?;
    let place = Numbers(&bytes).eight(8).filter(|_| bytes[..4] == LOCATOR_64);
    let Some(place) = place.filter(|place| place.checked_add(56).is_some_and(|end| end <= begins)) else {
        return Ok(None);
    };
    let mut bytes = [0; 56];
    file.read_exact_at(&mut bytes, place)?;
    let numbers = Numbers(&bytes);
    let of =
        || Some(List { files: numbers.eight(32)?, bytes: numbers.eight(40)?, start: numbers.eight(48)? });
    Ok(of().filter(|_| bytes[..4] == END_64))
}

/// A line of the list: its name, whether it is stored as it is, its length, where its header is,
/// and the place of the next line.
fn entry(list: &[u8], at: usize) -> Option<(String, bool, u64, u64, usize)> {
    let line = Numbers(list.get(at..)?);
    if line.at::<4>(0)? != ENTRY {
        return None;
    }
    let (names, more, comment) = (line.two(28)? as usize, line.two(30)? as usize, line.two(32)? as usize);
    let name = std::str::from_utf8(line.0.get(46..46 + names)?).ok()?.to_string();
    let (mut packed, mut size, mut local) = (line.four(20)?, line.four(24)?, line.four(42)?);
    // Numbers that do not fit in 32 bits follow, in this order, as 64.
    let extra = Numbers(line.0.get(46 + names..46 + names + more)?);
    let mut place = 0;
    while let (Some(kind), Some(length)) = (extra.two(place), extra.two(place + 2)) {
        if kind == 1 {
            let mut next = place + 4;
            for number in [&mut size, &mut packed, &mut local] {
                if *number == 0xffff_ffff {
                    *number = extra.eight(next)?;
                    next += 8;
                }
            }
        }
        place += 4 + length as usize;
    }
    let stored = line.two(10)? == 0 && packed == size;
    Some((name, stored, size, local, at + 46 + names + more + comment))
}

//! Pages of a Parquet file, their sizes checked before memory is taken for them.
//!
//! *In*: a file whose metadata was read. *Out*: a [`FileReader`] for the crate's row reader.
//! *Promise*: a page takes at most [`MOST_BYTES`] and has at most [`MOST_VALUES`]; no count inside
//! it says more. The crate itself takes what a damaged count says, and ends the process where the
//! system has not so much. A list of booleans in metadata or in a page's header is refused: the
//! format has none there, and the crate would count to its stated length, up to 2³¹, without a byte
//! of content.

use bytes::Bytes;
use parquet::basic::Encoding;
use parquet::bloom_filter::Sbbf;
use parquet::column::page::{Page, PageMetadata, PageReader};
use parquet::errors::{ParquetError, Result};
use parquet::file::metadata::{ParquetMetaData, RowGroupMetaData};
use parquet::file::reader::{ChunkReader, FileReader, Length, RowGroupReader, SerializedFileReader};
use parquet::record::reader::RowIter;
use parquet::schema::types::Type;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Most bytes of a page, unpacked. Writers cut pages at about 1 MiB.
const MOST_BYTES: i64 = 256 << 20;

/// Most bytes of the header of a page, which has two values of its column in it.
const MOST_HEADER: u64 = 1 << 20;

/// Most values of a page.
const MOST_VALUES: u64 = 1 << 24;

/// A file whose pages are checked.
pub struct Checked(SerializedFileReader<Source>);

impl Checked {
    /// Reads the metadata of a file.
    pub fn new(file: File) -> Result<Self> {
        let pages = Arc::new(AtomicBool::new(false));
        if footer(&file)?.is_some_and(|footer| structure(&footer) == Err(Stop::Booleans)) {
            return refuse(
                "its metadata has a list of booleans, which the format does not have there".into(),
            );
        }
        let reader = SerializedFileReader::new(Source { file, pages: pages.clone() })?;
        // From here on what is read are pages.
        pages.store(true, Ordering::Relaxed);
        Ok(Checked(reader))
    }
}

impl FileReader for Checked {
    fn metadata(&self) -> &ParquetMetaData {
        self.0.metadata()
    }

    fn num_row_groups(&self) -> usize {
        self.0.num_row_groups()
    }

    fn get_row_group(&self, i: usize) -> Result<Box<dyn RowGroupReader + '_>> {
        Ok(Box::new(Group(self.0.get_row_group(i)?)))
    }

    fn get_row_iter(&self, projection: Option<Type>) -> Result<RowIter<'_>> {
        RowIter::from_file(projection, self)
    }
}

/// The file, whose page headers are looked at before the crate reads them.
struct Source {
    file: File,
    pages: Arc<AtomicBool>,
}

impl Length for Source {
    fn len(&self) -> u64 {
        self.file.len()
    }
}

impl ChunkReader for Source {
    type T = BufReader<File>;

    fn get_read(&self, start: u64) -> Result<BufReader<File>> {
        let mut read = self.file.get_read(start)?;
        if self.pages.load(Ordering::Relaxed) {
            let header = read.fill_buf()?;
            let mut walked = structure(header);
            if walked == Err(Stop::End) {
                let there = self.file.len().saturating_sub(start).min(MOST_HEADER);
                walked = structure(&self.file.get_bytes(start, there as usize)?);
            }
            if walked.is_err() {
                return refuse("a page has a damaged header".into());
            }
            let size = unpacked_size(header);
            if !size.is_some_and(|size| (0..=MOST_BYTES).contains(&size)) {
                let size = size.map_or("an unknown number of".into(), |size| size.to_string());
                return refuse(format!("a page says it has {size} bytes; at most {MOST_BYTES} are read"));
            }
        }
        Ok(read)
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes> {
        self.file.get_bytes(start, length)
    }
}

fn refuse<T>(what: String) -> Result<T> {
    Err(ParquetError::General(what))
}

/// A number of seven bits a byte, and the rest.
fn varint(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let length = bytes.iter().take(10).position(|b| b & 0x80 == 0)? + 1;
    let value =
        bytes[..length].iter().rev().try_fold(0u64, |v, b| Some(v.checked_mul(128)? | u64::from(b & 0x7F)));
    Some((value?, &bytes[length..]))
}

/// The metadata of a file, before their length and four letters at its end; `None` where the file
/// has no such end.
fn footer(file: &File) -> Result<Option<Bytes>> {
    let Some(end) = file.len().checked_sub(8) else { return Ok(None) };
    let length = file.get_bytes(end, 4)?;
    let length = u64::from(u32::from_le_bytes([length[0], length[1], length[2], length[3]]));
    let begin = end.checked_sub(length);
    begin.map(|begin| file.get_bytes(begin, length as usize)).transpose()
}

/// Why a walk over a value in Thrift's compact form ends before its end.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stop {
    /// No bytes are left, or they are no value.
    End,
    /// A list of booleans.
    Booleans,
}

/// Walks over a structure; its time is that of its bytes: every element but a boolean has at least
/// one.
fn structure(bytes: &[u8]) -> std::result::Result<(), Stop> {
    const STRUCTURE: u8 = 12;
    behind(bytes, STRUCTURE, 64).map(|_| ())
}

/// The bytes after a value of this type, whose parts are nested at most `depth` deep.
fn behind(bytes: &[u8], of: u8, depth: u32) -> std::result::Result<&[u8], Stop> {
    let number = |bytes| varint(bytes).ok_or(Stop::End);
    let past =
        |bytes: &'_ [u8], n: u64| usize::try_from(n).ok().filter(|n| *n <= bytes.len()).ok_or(Stop::End);
    let deeper = depth.checked_sub(1).ok_or(Stop::End)?;
    match of {
        1 | 2 => Ok(bytes),
        3 => Ok(&bytes[past(bytes, 1)?..]),
        4..=6 => Ok(number(bytes)?.1),
        7 => Ok(&bytes[past(bytes, 8)?..]),
        8 => {
            let (length, rest) = number(bytes)?;
            Ok(&rest[past(rest, length)?..])
        }
        9 | 10 => {
            let (head, rest) = bytes.split_first().ok_or(Stop::End)?;
            let (count, mut rest) =
                if head >> 4 == 15 { number(rest)? } else { (u64::from(head >> 4), rest) };
            match head & 15 {
                1 | 2 if count > 0 => return Err(Stop::Booleans),
                element => {
                    for _ in 0..count {
                        rest = behind(rest, element, deeper)?;
                    }
                }
            }
            Ok(rest)
        }
        12 => {
            let mut rest = bytes;
            loop {
                let (head, fields) = rest.split_first().ok_or(Stop::End)?;
                if head & 15 == 0 {
                    return Ok(fields);
                }
                // Where the byte does not say how much larger the field's number is than the one
                // before, the number follows.
                let value = if head >> 4 == 0 { number(fields)?.1 } else { fields };
                rest = behind(value, head & 15, deeper)?;
            }
        }
        _ => Err(Stop::End),
    }
}

/// The field `uncompressed_page_size` of a page header in Thrift's compact form: the second field,
/// after the page's type.
fn unpacked_size(header: &[u8]) -> Option<i64> {
    const NEXT_I32: u8 = 0x15;
    let (_, rest) = varint(header.strip_prefix(&[NEXT_I32])?)?;
    let (zigzag, _) = varint(rest.strip_prefix(&[NEXT_I32])?)?;
    Some((zigzag >> 1) as i64 ^ -((zigzag & 1) as i64))
}

/// A row group whose pages are checked.
struct Group<'a>(Box<dyn RowGroupReader + 'a>);

impl RowGroupReader for Group<'_> {
    fn metadata(&self) -> &RowGroupMetaData {
        self.0.metadata()
    }

    fn num_columns(&self) -> usize {
        self.0.num_columns()
    }

    fn get_column_page_reader(&self, i: usize) -> Result<Box<dyn PageReader>> {
        let column = self.0.metadata().schema_descr().column(i);
        let optional = column.max_def_level() > 0;
        Ok(Box::new(Pages { pages: self.0.get_column_page_reader(i)?, optional }))
    }

    fn get_column_bloom_filter(&self, i: usize) -> Option<&Sbbf> {
        self.0.get_column_bloom_filter(i)
    }

    fn get_row_iter(&self, projection: Option<Type>) -> Result<RowIter<'_>> {
        RowIter::from_row_group(projection, self)
    }
}

/// Pages of a column that is not nested.
struct Pages {
    pages: Box<dyn PageReader>,
    /// Whether values may be missing, so that levels come before them.
    optional: bool,
}

impl Iterator for Pages {
    type Item = Result<Page>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}

impl PageReader for Pages {
    fn get_next_page(&mut self) -> Result<Option<Page>> {
        let Some(page) = self.pages.get_next_page()? else { return Ok(None) };
        match check(&page, self.optional) {
            true => Ok(Some(page)),
            false => refuse("the numbers of values in a page do not agree".into()),
        }
    }

    fn peek_next_page(&mut self) -> Result<Option<PageMetadata>> {
        self.pages.peek_next_page()
    }

    fn skip_next_page(&mut self) -> Result<()> {
        self.pages.skip_next_page()
    }
}

/// Whether no count in a page says more than it can hold.
fn check(page: &Page, optional: bool) -> bool {
    let (values, levels) = match page {
        // A value of a dictionary takes a byte at least.
        Page::DictionaryPage { buf, num_values, .. } => return *num_values as usize <= buf.len(),
        Page::DataPage { buf, num_values, .. } => {
            let length = || Some(4 + u32::from_le_bytes(buf.get(..4)?.try_into().ok()?) as usize);
            (*num_values, if optional { length() } else { Some(0) })
        }
        Page::DataPageV2 { num_values, def_levels_byte_len, rep_levels_byte_len, .. } => {
            (*num_values, def_levels_byte_len.checked_add(*rep_levels_byte_len).map(|n| n as usize))
        }
    };
    let most = u64::from(values);
    let Some(data) = levels.and_then(|levels| page.buffer().get(levels..)) else { return false };
    most <= MOST_VALUES
        && match page.encoding() {
            Encoding::DELTA_LENGTH_BYTE_ARRAY | Encoding::DELTA_BINARY_PACKED => {
                behind_deltas(data, most).is_some()
            }
            // The lengths of what is shared with the value before, then those of the rest.
            Encoding::DELTA_BYTE_ARRAY => {
                behind_deltas(data, most).and_then(|rest| behind_deltas(rest, most)).is_some()
            }
            Encoding::PLAIN | Encoding::RLE | Encoding::RLE_DICTIONARY => true,
            #[allow(deprecated, reason = "old files have it")]
            Encoding::PLAIN_DICTIONARY => true,
            _ => page.encoding() == Encoding::BYTE_STREAM_SPLIT,
        }
}

/// The bytes after a list of up to `most` numbers in the encoding DELTA_BINARY_PACKED; `None`
/// where it is not one.
fn behind_deltas(data: &[u8], most: u64) -> Option<&[u8]> {
    let (block, rest) = varint(data)?;
    let (parts, rest) = varint(rest)?;
    let (total, rest) = varint(rest)?;
    let (_, mut rest) = varint(rest)?;
    if total > most || block > MOST_VALUES || !(1..=512).contains(&parts) || block % parts != 0 || block == 0
    {
        return None;
    }
    let each = block / parts;
    let mut left = total.saturating_sub(1);
    while left > 0 {
        let widths;
        (_, rest) = varint(rest)?;
        (widths, rest) = rest.split_at_checked(parts as usize)?;
        for width in widths {
            if left == 0 {
                break;
            }
            let bytes = u64::from(*width).checked_mul(each)?.div_ceil(8);
            // The last part may end early.
            rest = rest.get(usize::try_from(bytes).ok()?.min(rest.len())..)?;
            left = left.saturating_sub(each);
        }
    }
    Some(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_pages_are_read() {
        assert_eq!(unpacked_size(&[0x15, 0, 0x15, 24, 0x15, 24]), Some(12));
        assert_eq!(unpacked_size(&[0x15, 0, 0x15, 1]), Some(-1));
        assert_eq!(unpacked_size(&[0x15, 0, 0x15, 0xFE, 0xFF, 0xFF, 0xFF, 0x0F]), Some(i64::from(i32::MAX)));
        assert_eq!(unpacked_size(&[0x15, 0, 0x25, 24]), None);
        assert_eq!(unpacked_size(&[0x15, 0x80, 0x80]), None);
    }

    #[test]
    fn structures_have_ends_and_no_lists_of_booleans() {
        // A number, a text, a list of two numbers, a field by its number, the end.
        let good = [0x15, 2, 0x18, 1, b'a', 0x19, 0x25, 2, 4, 0x05, 0x80, 1, 6, 0];
        assert_eq!(structure(&good), Ok(()));
        (0..good.len()).for_each(|n| assert_eq!(structure(&good[..n]), Err(Stop::End), "{n}"));
        assert_eq!(structure(&[0x19, 0xF1, 0xFF, 0xFF, 0xFF, 0xFF, 0x07, 0]), Err(Stop::Booleans));
        assert_eq!(structure(&[0x19, 0x19, 0x11, 0]), Err(Stop::Booleans));
        assert_eq!(structure(&[0x19, 0x01, 0]), Ok(()), "none is no list of them");
        assert_eq!(structure(&[0x1C; 200]), Err(Stop::End), "nested without end");
        assert_eq!(
            structure(&[0x18, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 1]),
            Err(Stop::End)
        );
        assert_eq!(structure(&[0x19, 0xFC, 0xFF, 0xFF, 0xFF, 0x07]), Err(Stop::End));
    }

    #[test]
    fn counts_of_deltas_are_bounded() {
        // Blocks of 128 in 4 parts; 3 values, the first 0; least delta 0, no bits for any.
        let list = [0x80, 1, 4, 3, 0, 0, 0, 0, 0, 0, 9];
        assert_eq!(behind_deltas(&list, 3), Some(&[9][..]));
        assert_eq!(behind_deltas(&list, 2), None);
        assert_eq!(behind_deltas(&list[..7], 3), None);
        assert_eq!(
            behind_deltas(&[0x80, 1, 4, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x3F, 0], 3),
            None
        );
        assert_eq!(behind_deltas(&[0, 0, 3, 0], 3), None);
    }
}

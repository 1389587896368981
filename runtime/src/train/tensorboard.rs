//! TensorBoard event files: scalars and texts by step, and what a run was trained with.
//!
//! A file is a succession of records: length as 8 bytes, masked CRC-32C of them, the payload,
//! masked CRC-32C of it. A payload is an `Event` protocol buffer: time, step and a `Summary` of
//! scalars (`simple_value`), of texts (a tensor of strings for the plugin `text`), or of settings
//! (the plugin `hparams`).

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::Path;

/// CRC-32C (Castagnoli), bit by bit in a table made at compile time.
fn crc32c(bytes: &[u8]) -> u32 {
    const TABLE: [u32; 256] = {
        let mut table = [0; 256];
        let mut i = 0;
        while i < 256 {
            let mut crc = i as u32;
            let mut bit = 0;
            while bit < 8 {
                crc = if crc & 1 == 1 { crc >> 1 ^ 0x82F6_3B78 } else { crc >> 1 };
                bit += 1;
            }
            table[i] = crc;
            i += 1;
        }
        table
    };
    !bytes.iter().fold(!0, |crc, &b| TABLE[((crc ^ u32::from(b)) & 0xFF) as usize] ^ crc >> 8)
}

fn masked(bytes: &[u8]) -> [u8; 4] {
    crc32c(bytes).rotate_right(15).wrapping_add(0xA282_EAD8).to_le_bytes()
}

fn record(payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u64).to_le_bytes();
    [&length[..], &masked(&length), payload, &masked(payload)].concat()
}

fn varint(mut n: u64, out: &mut Vec<u8>) {
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

/// A field whose value is bytes: key, length, bytes.
fn field(number: u8, bytes: &[u8], out: &mut Vec<u8>) {
    out.push(number << 3 | 2);
    varint(bytes.len() as u64, out);
    out.extend_from_slice(bytes);
}

/// A field whose value is a whole number.
fn number(field: u8, n: u64, out: &mut Vec<u8>) {
    out.push(field << 3);
    varint(n, out);
}

/// A message that `write` fills.
fn message(write: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut out = vec![];
    write(&mut out);
    out
}

/// A `SummaryMetadata`: the plugin that shows a value, and the plugin's own content.
fn metadata(plugin: &str, content: &[u8], tensor: bool) -> Vec<u8> {
    let mut data = vec![];
    field(1, plugin.as_bytes(), &mut data);
    if !content.is_empty() {
        field(2, content, &mut data);
    }
    let mut out = vec![];
    field(1, &data, &mut out);
    if tensor {
        const DATA_CLASS_TENSOR: u64 = 2;
        number(4, DATA_CLASS_TENSOR, &mut out);
    }
    out
}

fn event(time: f64, step: u64) -> Vec<u8> {
    let mut out = vec![1 << 3 | 1];
    out.extend_from_slice(&time.to_le_bytes());
    out.push(2 << 3);
    varint(step, &mut out);
    out
}

/// An event file being written.
#[derive(Debug)]
pub struct Events {
    file: File,
    bytes: u64,
}

impl Events {
    /// Opens a file and goes on at `bytes`, dropping what is after them; begins it where it is
    /// empty.
    pub fn open(path: &Path, bytes: u64, time: f64) -> io::Result<Self> {
        let mut file = OpenOptions::new().create(true).truncate(false).write(true).open(path)?;
        let bytes = bytes.min(file.metadata()?.len());
        file.set_len(bytes)?;
        file.seek(SeekFrom::Start(bytes))?;
        let mut events = Events { file, bytes };
        if bytes == 0 {
            let mut payload = event(time, 0);
            field(3, b"brain.Event:2", &mut payload);
            events.append(&record(&payload))?;
        }
        Ok(events)
    }

    /// Writes the scalars of a step.
    pub fn scalars(&mut self, time: f64, step: u64, scalars: &[(&str, f64)]) -> io::Result<()> {
        let entry = |(tag, value): &(&str, f64)| {
            let mut entry = vec![];
            field(1, tag.as_bytes(), &mut entry);
            entry.push(2 << 3 | 5);
            entry.extend_from_slice(&(*value as f32).to_le_bytes());
            entry
        };
        self.summary(time, step, scalars.iter().map(entry))
    }

    /// Writes a text of a step, shown as Markdown.
    pub fn text(&mut self, time: f64, step: u64, tag: &str, text: &str) -> io::Result<()> {
        const DT_STRING: u8 = 7;
        let mut dimension = vec![];
        number(1, 1, &mut dimension);
        let mut tensor = vec![];
        number(1, DT_STRING.into(), &mut tensor);
        let mut shape = vec![];
        field(2, &dimension, &mut shape);
        field(2, &shape, &mut tensor);
        field(8, text.as_bytes(), &mut tensor);
        let mut entry = vec![];
        field(1, tag.as_bytes(), &mut entry);
        field(8, &tensor, &mut entry);
        field(9, &metadata("text", &[], true), &mut entry);
        self.summary(time, step, [entry].into_iter())
    }

    /// Writes what a run is trained with, and which scalars say how good it is.
    pub fn settings(
        &mut self,
        time: f64,
        settings: &[(String, serde_json::Value)],
        measures: &[&str],
    ) -> io::Result<()> {
        let (mut experiment, mut start) = (vec![], vec![]);
        for (name, value) in settings {
            let (kind, value) = match value {
                serde_json::Value::Bool(b) => (2, message(|out| number(4, u64::from(*b), out))),
                serde_json::Value::Number(n) => {
                    let bytes = n.as_f64().unwrap_or(f64::NAN).to_le_bytes();
                    (3, message(|out| out.extend([&[2 << 3 | 1][..], &bytes].concat())))
                }
                serde_json::Value::String(s) => (1, message(|out| field(3, s.as_bytes(), out))),
                other => (1, message(|out| field(3, other.to_string().as_bytes(), out))),
            };
            let mut info = vec![];
            field(1, name.as_bytes(), &mut info);
            number(4, kind, &mut info);
            field(4, &info, &mut experiment);
            let mut pair = vec![];
            field(1, name.as_bytes(), &mut pair);
            field(2, &value, &mut pair);
            field(1, &pair, &mut start);
        }
        for tag in measures {
            let mut name = vec![];
            field(2, tag.as_bytes(), &mut name);
            let mut info = vec![];
            field(1, &name, &mut info);
            field(5, &info, &mut experiment);
        }
        start.push(5 << 3 | 1);
        start.extend_from_slice(&time.to_le_bytes());
        let entry = |tag: &str, at: u8, content: &[u8]| {
            let mut data = vec![];
            field(at, content, &mut data);
            let mut entry = vec![];
            field(1, tag.as_bytes(), &mut entry);
            field(9, &metadata("hparams", &data, false), &mut entry);
            entry
        };
        let entries =
            [entry("_hparams_/experiment", 2, &experiment), entry("_hparams_/session_start_info", 3, &start)];
        entries.into_iter().try_for_each(|entry| self.summary(time, 0, [entry].into_iter()))
    }

    fn summary(&mut self, time: f64, step: u64, values: impl Iterator<Item = Vec<u8>>) -> io::Result<()> {
        let mut summary = vec![];
        values.for_each(|value| field(1, &value, &mut summary));
        let mut payload = event(time, step);
        field(5, &summary, &mut payload);
        self.append(&record(&payload))
    }

    /// Makes what was written durable.
    pub fn sync(&mut self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// Bytes written in all.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    fn append(&mut self, record: &[u8]) -> io::Result<()> {
        self.file.write_all(record)?;
        self.bytes += record.len() as u64;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc_matches_the_published_check_value() {
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
    }

    #[test]
    fn records_have_the_framing_tensorboard_reads() {
        // As written by TensorFlow's own writer for the version event at time 0.
        let mut payload = event(0.0, 0);
        field(3, b"brain.Event:2", &mut payload);
        assert_eq!(payload[..9], [9, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(payload[11..], *b"\x1a\x0dbrain.Event:2");
        let bytes = record(&payload);
        assert_eq!(bytes.len(), 12 + payload.len() + 4);
        assert_eq!(bytes[..8], (payload.len() as u64).to_le_bytes());
    }

    #[test]
    fn a_file_goes_on_where_the_checkpoint_was() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events");
        let mut events = Events::open(&path, 0, 1.0).unwrap();
        events.scalars(2.0, 1, &[("loss", 0.5)]).unwrap();
        let mark = events.bytes();
        events.scalars(3.0, 2, &[("loss", 0.4)]).unwrap();
        let whole = std::fs::read(&path).unwrap();
        assert_eq!(whole.len() as u64, events.bytes());
        let mut events = Events::open(&path, mark, 9.0).unwrap();
        events.scalars(3.0, 2, &[("loss", 0.4)]).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), whole);
    }
}

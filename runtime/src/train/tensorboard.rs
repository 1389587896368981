//! TensorBoard event files: scalars by step.
//!
//! A file is a succession of records: length as 8 bytes, masked CRC-32C of them, the payload, masked CRC-32C of it. A payload
//! is an `Event` protocol buffer, of which only time, step and scalars are written.

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
    /// Opens a file and goes on at `bytes`, dropping what is behind; begins it where it is empty.
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
        let mut summary = vec![];
        for (tag, value) in scalars {
            let mut entry = vec![];
            field(1, tag.as_bytes(), &mut entry);
            entry.push(2 << 3 | 5);
            entry.extend_from_slice(&(*value as f32).to_le_bytes());
            field(1, &entry, &mut summary);
        }
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

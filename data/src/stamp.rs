//! Hashes of files that are remembered.
//!
//! *In*: a file, and a folder of caches. *Out*: its BLAKE3. *Promise*: a file that has not been
//! touched since it was hashed (its size, its inode and both of its times are as they were) is not
//! read again; a damaged stamp counts for nothing.

use crate::files;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

/// Size, time and hash of a file when its content was hashed.
#[derive(PartialEq, Eq, Serialize, Deserialize)]
struct Stamp {
    size: u64,
    inode: (u64, u64),
    modified: (i64, i64),
    changed: (i64, i64),
    hash: String,
}

impl Stamp {
    /// A line of JSON, after a line of its own hash.
    fn text(&self) -> Vec<u8> {
        let text = serde_json::to_vec(self).unwrap_or_default();
        [blake3::hash(&text).to_hex().as_bytes(), b"\n", &text].concat()
    }

    /// `None` where the stamp is damaged.
    fn read(bytes: &[u8]) -> Option<Self> {
        let (hash, text) = bytes.split_at_checked(2 * blake3::OUT_LEN)?;
        let text = text.strip_prefix(b"\n")?;
        if blake3::hash(text).to_hex().as_bytes() != hash {
            return None;
        }
        serde_json::from_slice(text).ok()
    }
}

/// BLAKE3 of an open file, in hexadecimal; `read` hears of bytes that were read, and of how many.
pub fn hash(path: &Path, file: &File, cache: &Path, read: &mut dyn FnMut(u64, u64)) -> io::Result<String> {
    let m = file.metadata()?;
    let name = blake3::hash(path.canonicalize()?.as_os_str().as_encoded_bytes()).to_hex();
    let stamp_path = cache.join("stamps").join(format!("{}.json", &name[..32]));
    let mut stamp = Stamp {
        size: m.len(),
        inode: (m.dev(), m.ino()),
        modified: (m.mtime(), m.mtime_nsec()),
        changed: (m.ctime(), m.ctime_nsec()),
        hash: String::new(),
    };
    let known = fs::read(&stamp_path).ok().and_then(|text| Stamp::read(&text));
    if let Some(known) = known {
        stamp.hash.clone_from(&known.hash);
        if stamp == known {
            return Ok(known.hash);
        }
    }
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; 1 << 20];
    let mut done = 0;
    loop {
        let n = file.read_at(&mut buffer, done)?;
        if n == 0 {
            break;
        }
        hasher.update(&buffer[..n]);
        done += n as u64;
        read(done, m.len());
    }
    stamp.hash = hasher.finalize().to_hex().to_string();
    // A file written a moment ago may be written again within one tick of the clock, which no stamp
    // would show.
    let age = std::time::SystemTime::now().duration_since(m.modified()?);
    let settled = age.is_ok_and(|age| age.as_secs() >= 2);
    // Only a cache: where it cannot be written, the file is read again next time.
    if let (true, Some(folder)) = (settled, stamp_path.parent()) {
        let _ = fs::create_dir_all(folder);
        let _ = files::write_atomic(&stamp_path, |out| out.write_all(&stamp.text()));
    }
    Ok(stamp.hash)
}

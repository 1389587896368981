//! Files of `torch.save`, read as data.
//!
//! *In*: a `.bin` file of a state dict. *Out*: the same as a file of safetensors gives, each tensor
//! a range of the file. *Promise*: nothing in the file is run ([`pickle`]), and every tensor's
//! bytes are within the file ([`archive`]).

mod archive;
mod pickle;

use super::HfError;
use dreamc_data::files;
use dreamc_runtime::checkpoint::safetensors::{Ranged, Tensors};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Largest `data.pkl` that is read.
const LARGEST: u64 = 64 << 20;

/// Opens a file of `torch.save`.
pub(super) fn open(path: &Path) -> Result<Tensors, HfError> {
    let io = |error: io::Error| HfError::Io { path: path.to_path_buf(), error };
    let refuse = |problem: String| HfError::refused(path, problem);
    let file = files::open(path).map_err(io)?;
    let all = archive::files(&file).map_err(io)?.map_err(refuse)?;
    // The archive has one folder, of any name.
    let pickle = all.iter().find(|(name, _)| name.ends_with("/data.pkl"));
    let Some((name, &(start, end))) = pickle else {
        return Err(refuse("has no data.pkl: it is no file of torch.save".into()));
    };
    let folder = name.trim_end_matches("data.pkl").to_string();
    let order = format!("{folder}byteorder");
    if let Some(&(start, end)) = all.get(&order)
        && end - start == 3
    {
        let mut order = [0; 3];
        file.read_exact_at(&mut order, start).map_err(io)?;
        if &order == b"big" {
            return Err(refuse("holds numbers in big-endian order, which are not read".into()));
        }
    }
    if end - start > LARGEST {
        return Err(refuse(format!("has a data.pkl of {} bytes; at most {LARGEST} are read", end - start)));
    }
    let mut bytes = vec![0; (end - start) as usize];
    file.read_exact_at(&mut bytes, start).map_err(io)?;
    let mut ranges = vec![];
    for (name, tensor) in pickle::read(&bytes).map_err(refuse)? {
        let pickle::Tensor { storage, dtype, first, shape, strides } = tensor;
        let Some(&(start, end)) = all.get(&format!("{folder}data/{storage}")) else {
            return Err(refuse(format!("tensor {name} is in a storage {storage} that is not there")));
        };
        let mut adjacent = Some(1u64);
        for (&size, &stride) in shape.iter().zip(&strides).rev() {
            if size != 1 && Some(stride) != adjacent {
                return Err(refuse(format!(
                    "tensor {name} of {shape:?} has strides {strides:?}: its elements are not adjacent, `tensor.contiguous()` makes them so"
                )));
            }
            adjacent = adjacent.and_then(|n| n.checked_mul(size));
        }
        let size = dtype.bitsize() as u64 / 8;
        let from = first.checked_mul(size).and_then(|n| start.checked_add(n));
        let to = adjacent.and_then(|n| n.checked_mul(size)).and_then(|n| from?.checked_add(n));
        match (from, to) {
            (Some(start), Some(to)) if to <= end => {
                ranges.push(Ranged { name, shape, dtype, packed: None, start, end: to })
            }
            _ => {
                return Err(refuse(format!(
                    "tensor {name} of {shape:?} reaches beyond its storage {storage}"
                )));
            }
        }
    }
    Ok(Tensors::of_ranges(path, file, ranges))
}

//! Faults in what reads blocks: the numbers of a model that owns what they stand for notice each.
//!
//! A reader that is wrong is put in as a file that is: of blocks that a fault has moved, a sound
//! reader makes what a faulty one makes of those that are right. Faults of gradients are put into
//! the plan.

use dreamc_compiler::format::{Formats, Packed};
use dreamc_compiler::program::{Kernel, ProgramKey, kernel};
use dreamc_compiler::{Compiled, Options, compile};
use dreamc_data::Batch;
use dreamc_device::cpu::{CpuDevice, CpuOptions};
use dreamc_dsl::{Spec, Spelling, check, parse, show};
use dreamc_runtime::checkpoint::Weights;
use dreamc_runtime::checkpoint::safetensors::{Dtype, write_stored};
use dreamc_runtime::model::{Model, Scale};
use dreamc_runtime::quantise::{Choice, quantise};
use libtest_mimic::Failed;
use std::fs::{self, File};
use std::path::Path;

const SPEC: &str = "model blocks { vocab 64 hidden 256 context 16
  sa = sequence { heads 2 head_size 128 }
  mlp = mlp { intermediate 256 }
  layer { sa > mlp } }
train { precision f32 sequence 8 }";

const TOKENS: usize = 8;

/// The matrix whose blocks are moved; it is square.
const MOVED: &str = "layers.0.mlp.up.weight";

/// A fault of a format.
pub struct Fault {
    pub name: &'static str,
    format: &'static str,
    place: Place,
}

/// Where it is.
enum Place {
    /// In the blocks of [`MOVED`].
    Blocks(fn(Packed, &mut [u8])),
    /// In the plan that makes gradients.
    Plan(fn(&mut Compiled) -> bool),
}

/// Edits every block.
fn each(packed: Packed, bytes: &mut [u8], edit: impl Fn(&mut [u8])) {
    bytes.chunks_exact_mut(packed.bytes()).for_each(edit);
}

/// Gives every block these bytes of the next.
fn next(packed: Packed, bytes: &mut [u8], first: usize, count: usize) {
    let size = packed.bytes();
    for at in (0..bytes.len() - size).step_by(size) {
        bytes.copy_within(at + size + first..at + size + first + count, at + first);
    }
}

fn swapped(codes: &mut [u8]) {
    codes.iter_mut().for_each(|byte| *byte = byte.rotate_left(4));
}

pub fn faults() -> Vec<Fault> {
    let of = |name, format, edit| Fault { name, format, place: Place::Blocks(edit) };
    vec![
        of("a scale of the next block", "q8_0", |packed, bytes| next(packed, bytes, 0, 2)),
        of("codes of eight bits without a sign", "q8_0", |packed, bytes| {
            each(packed, bytes, |block| block[2..].iter_mut().for_each(|code| *code &= 0x7f))
        }),
        of("nibbles in the other order", "q4_0", |packed, bytes| {
            each(packed, bytes, |block| swapped(&mut block[2..]))
        }),
        of("nibbles of neighbours", "q4_0", |packed, bytes| {
            each(packed, bytes, |block| {
                let codes: Vec<u8> = block[2..].to_vec();
                let code = |i: usize| codes[i % 16] >> (4 * (i / 16)) & 15;
                (0..16).for_each(|i| block[2 + i] = code(2 * i) | code(2 * i + 1) << 4);
            })
        }),
        of("a zero point forgotten", "q4_0", |packed, bytes| {
            // `q` in the place of `q - 8`, as far as four bits have it.
            each(packed, bytes, |block| {
                let up = |code: u8| (code + 8).min(15);
                block[2..].iter_mut().for_each(|byte| *byte = up(*byte & 15) | up(*byte >> 4) << 4);
            })
        }),
        of("a power of two that is the next", "mxfp4", |packed, bytes| {
            each(packed, bytes, |block| block[0] += 1)
        }),
        of("a scale of another sixteen numbers", "nvfp4", |packed, bytes| {
            each(packed, bytes, |row| row[4..].chunks_exact_mut(36).for_each(|block| block.swap(0, 1)))
        }),
        of("the scale of the tensor forgotten", "nvfp4", |packed, bytes| {
            each(packed, bytes, |row| row[..4].copy_from_slice(&1f32.to_le_bytes()))
        }),
        of("offsets forgotten", "q4_k", |packed, bytes| each(packed, bytes, |block| block[2..4].fill(0))),
        of("the upper bits of small scales forgotten", "q4_k", |packed, bytes| {
            each(packed, bytes, |block| block[4..12].iter_mut().for_each(|byte| *byte &= 0x3f))
        }),
        of("the upper bits of codes forgotten", "q6_k", |packed, bytes| {
            each(packed, bytes, |block| block[128..192].fill(0))
        }),
        of("small scales without a sign", "q6_k", |packed, bytes| {
            each(packed, bytes, |block| block[192..208].iter_mut().for_each(|scale| *scale &= 0x7f))
        }),
        of("the scale of the next row", "int8", |packed, bytes| next(packed, bytes, 0, 4)),
        of("halves in the other order of their bytes", "f16", |packed, bytes| {
            // Without an exponent that is no number's.
            each(packed, bytes, |half| (half[0], half[1]) = (half[1], half[0] & 0xbb))
        }),
        Fault {
            name: "a derivative through the transposed blocks",
            format: "q8_0",
            place: Place::Plan(|c| {
                super::kernels(c, ProgramKey::BACKWARD, |k| match k {
                    Kernel::Product(kernel::Product { n, k, b, stored: true, .. }) if n == k => {
                        (b.row, b.column) = (b.column, b.row);
                        true
                    }
                    _ => false,
                })
            }),
        },
    ]
}

fn device() -> CpuDevice {
    CpuDevice::new(CpuOptions { threads: Some(1) })
}

/// A model of random numbers, quantised.
fn quantised(folder: &Path, format: &str) -> (Spec, Weights) {
    let (spec, _) = check(&parse("blocks", SPEC, Spelling::Dream).unwrap(), &[]).unwrap();
    let compiled = compile(&spec, &Options { sequence: TOKENS as u64, ..Options::default() }).unwrap();
    let mut model = Model::load(&device(), compiled).unwrap();
    model.initialise(5).unwrap();
    let entries: Vec<_> =
        model.entries().into_iter().map(|(name, shape)| (name, shape, Dtype::F32)).collect();
    let path = folder.join("wide.safetensors");
    let text = show(&spec, Spelling::Yaml);
    write_stored(&mut File::create(&path).unwrap(), &[("spec", text.as_str())], &entries, |i, out| {
        model.get(&entries[i].0).unwrap().iter().try_for_each(|x| out.write_all(&x.to_le_bytes()))
    })
    .unwrap();
    let weights = Weights::open(&path, None).unwrap();
    let to = folder.join("blocks");
    quantise(&spec, &weights, &Choice::new(format, None).unwrap(), &to, (&[], true)).unwrap();
    (spec, Weights::open(&to, None).unwrap())
}

/// The bits of all gradients, weights read in their file or owned.
fn bits(spec: &Spec, weights: &Weights, mapped: bool, edit: impl Fn(&mut Compiled)) -> Vec<u32> {
    let formats = if mapped { weights.formats() } else { Formats::default() };
    let sequence = TOKENS as u64;
    let options = Options { sequence, train: true, steps: false, formats, ..Options::default() };
    let mut compiled = compile(spec, &options).unwrap();
    edit(&mut compiled);
    let mut model = Model::load(&device(), compiled).unwrap();
    model.restore(weights).unwrap();
    model.begin_step().unwrap();
    let mut batch = Batch::new(TOKENS);
    batch.ids = (0..TOKENS as i32).map(|i| (7 * i + 2) % 64).collect();
    batch.targets = (0..TOKENS as i32).map(|i| (5 * i + 1) % 64).collect();
    batch.positions = (0..TOKENS as i32).collect();
    batch.segments = vec![0; TOKENS];
    let scale = Scale { loss: 1.0 / TOKENS as f32, auxiliary: 1.0 };
    model.backward(&batch, scale, None).unwrap();
    let mut bits = vec![];
    for tensor in model.compiled().tensors.clone() {
        let gradient = model.gradient(&tensor).unwrap().unwrap_or_default();
        bits.extend(gradient.iter().map(|x| x.to_bits()));
    }
    bits
}

/// How the numbers of a fault differ from those of a model that owns what its blocks stand for.
pub fn noticed(fault: &Fault) -> Result<String, Failed> {
    let folder = tempfile::tempdir()?;
    let (spec, weights) = quantised(folder.path(), fault.format);
    let right = bits(&spec, &weights, false, |_| {});
    if right != bits(&spec, &weights, true, |_| {}) {
        return Err("blocks differ from their numbers without a fault".into());
    }
    let found = match &fault.place {
        Place::Blocks(edit) => {
            let stored = weights.stored(MOVED).and_then(|stored| stored.packed);
            let (packed, (_, place)) = (stored.ok_or("is not packed")?, weights.mapped(MOVED)?.unwrap());
            let path = folder.path().join("blocks/model.safetensors");
            let mut bytes = fs::read(&path)?;
            edit(packed, &mut bytes[place.start as usize..(place.start + place.bytes) as usize]);
            let other = folder.path().join("faulty.safetensors");
            fs::write(&other, bytes)?;
            bits(&spec, &Weights::open(&other, None)?, true, |_| {})
        }
        Place::Plan(edit) => {
            let put = std::cell::Cell::new(false);
            let found = bits(&spec, &weights, true, |c| put.set(edit(c)));
            if !put.get() {
                return Err("was never put in".into());
            }
            found
        }
    };
    match right.iter().zip(&found).filter(|(x, y)| x != y).count() {
        0 => Err("no number notices".into()),
        n => Ok(format!("{n} of {} numbers differ", right.len())),
    }
}

//! Plain products by the library of the GPU's maker, where that is faster than what is generated.
//!
//! *In*: a session whose kernels are loaded and whose memory holds nothing yet. *Out*: for each distinct product of its plan who computes
//! it ([`Choice`]), and the library's products ready to launch. *Promise*: what is chosen by measuring is kept on disk and never measured
//! again, so that two runs on one machine choose alike; nothing is measured where it could not be kept. Nothing is allocated, and memory is
//! zero afterwards. A library that refuses, fails, or computes something else leaves the product to the generated kernel.

use super::cache::Compiler;
use super::{Gpu, GpuSession, Place, Run};
use crate::device::{Choice, DeviceError, Instrument, RunStats};
use crate::rng::Philox;
use dreamc_compiler::codegen::{Source, Variant};
use dreamc_compiler::program::Kernel;
use std::collections::HashMap;

/// What is known of a library that may be used.
#[derive(Clone, Debug)]
pub(crate) struct Library {
    /// With its version, for people.
    pub(crate) name: String,
    /// Wherever it can; otherwise where it is faster.
    pub(crate) always: bool,
    /// Scratch memory that it may use, at a multiple of 256 bytes.
    pub(crate) workspace: u64,
    /// Everything beside the product and our own text that speed depends on.
    pub(crate) key: String,
}

/// A matrix with adjacent elements along its columns: element `(i, j)` lies at `i + j · far`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Side {
    /// Rows, as it lies in memory.
    pub(crate) rows: u64,
    /// Columns, as it lies in memory.
    pub(crate) columns: u64,
    /// Elements from column to column, as many as there are rows or more.
    pub(crate) far: u64,
    /// Whether the product takes it transposed.
    pub(crate) transposed: bool,
}

impl Side {
    /// A matrix of `rows` x `columns` with element `(i, j)` at `i · down + j · along`, where it can be said so.
    fn of(rows: u64, columns: u64, down: u64, along: u64) -> Option<Side> {
        // A distance along which there is one element alone may be any.
        let says = |rows, columns, down, along| (down == 1 || rows == 1) && (along >= rows || columns == 1);
        if says(rows, columns, down, along) {
            Some(Side { rows, columns, far: along.max(rows), transposed: false })
        } else if says(columns, rows, along, down) {
            Some(Side { rows: columns, columns: rows, far: down.max(columns), transposed: true })
        } else {
            None
        }
    }
}

/// A plain product as libraries of linear algebra take it. They have adjacent elements along columns where we have them along rows, so they
/// see `cᵀ[n, m] (+)= bᵀ[n, k] · aᵀ[k, m]`, in which nothing moves. Sums are in f32, added to `c` in f32, and rounded once, to `c`'s type: what
/// `product.cuh` does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Dense {
    /// Rows of `c`.
    pub(crate) m: u64,
    /// Columns of `c`.
    pub(crate) n: u64,
    /// `bᵀ`
    pub(crate) left: Side,
    /// `aᵀ`
    pub(crate) right: Side,
    /// Whether `a` and `b` are bf16; else f32.
    pub(crate) narrow: bool,
    /// Whether `c` is bf16; else f32.
    pub(crate) narrow_result: bool,
    /// Whether `c` is added to.
    pub(crate) accumulate: bool,
    /// Of what numbers of bytes the addresses of `a`, `b` and `c` are multiples, for all values of the loop variables: powers of two, 256 at
    /// most.
    pub(crate) alignment: [u64; 3],
}

impl Dense {
    /// The product that a launch is, if it is a plain one in types and layouts that a library has.
    pub(super) fn of(kernel: &Kernel, variant: &Variant) -> Option<Dense> {
        let Kernel::Product { m, n, k, a, b, accumulate } = *kernel else { return None };
        let narrow = |operand: u32| variant.narrow >> operand & 1 != 0;
        let mixed = narrow(0) != narrow(1) || (narrow(2) && !narrow(0));
        if variant.places || mixed || m == 0 || n == 0 || k == 0 {
            return None;
        }
        Some(Dense {
            m,
            n,
            left: Side::of(n, k, b.column, b.row)?,
            right: Side::of(k, m, a.column, a.row)?,
            narrow: narrow(0),
            narrow_result: narrow(2),
            accumulate,
            alignment: [256; 3],
        })
    }

    /// The same with operands at these places.
    pub(super) fn at(self, operands: &[Place]) -> Dense {
        let multiple = |i: usize| match operands.get(i) {
            Some(Place::Tensor { base, instance, instance_bytes, .. }) => {
                let steps = instance.terms.iter().map(|term| term.1).chain([instance.base]);
                let bits = steps.fold(*base, |bits, steps| bits | (steps * instance_bytes));
                1 << bits.trailing_zeros().min(8)
            }
            _ => 1,
        };
        Dense { alignment: [multiple(0), multiple(1), multiple(2)], ..self }
    }

    /// `cᵀ`
    pub(crate) fn result(&self) -> Side {
        Side { rows: self.n, columns: self.m, far: self.n, transposed: false }
    }

    /// Bytes that `a`, `b` and `c` span.
    fn bytes(&self) -> [u64; 3] {
        let span = |side: Side, narrow: bool| {
            ((side.columns - 1) * side.far + side.rows) * if narrow { 2 } else { 4 }
        };
        [span(self.right, self.narrow), span(self.left, self.narrow), span(self.result(), self.narrow_result)]
    }
}

/// A distinct product of a plan.
pub(super) struct DenseProduct<G: Gpu> {
    pub(super) dense: Dense,
    /// Its source.
    pub(super) source: usize,
    /// Program and number of the first launch of it.
    pub(super) first: (usize, usize),
    pub(super) choice: Choice,
    /// Where the library was chosen.
    pub(super) product: Option<G::Product>,
}

/// The distinct products of a plan, as its launches are gone through.
pub(super) struct Products<G: Gpu> {
    known: HashMap<(Dense, usize), usize>,
    pub(super) list: Vec<DenseProduct<G>>,
}

impl<G: Gpu> Default for Products<G> {
    fn default() -> Self {
        Products { known: HashMap::new(), list: vec![] }
    }
}

impl<G: Gpu> Products<G> {
    /// The number of the product of a source, which a launch of a program has.
    pub(super) fn number(&mut self, dense: Dense, source: usize, launch: (usize, usize)) -> usize {
        *self.known.entry((dense, source)).or_insert_with(|| {
            let choice = Choice { library: false, reason: String::new() };
            self.list.push(DenseProduct { dense, source, first: launch, choice, product: None });
            self.list.len() - 1
        })
    }
}

/// Timings of which the median counts.
const ROUNDS: usize = 5;
/// Launches of a timing at most, and how many seconds of them are enough.
const MOST: u32 = 20;
const ENOUGH: f64 = 1e-3;

impl<G: Gpu> GpuSession<G> {
    /// Decides who computes each product. `compiler` keeps what was decided.
    pub(super) fn choose(&mut self, compiler: &Compiler) -> Result<(), DeviceError> {
        let Some(library) = self.gpu.library().cloned() else { return Ok(()) };
        let mut disturbed = false;
        for i in 0..self.products.len() {
            let DenseProduct { dense, source, .. } = self.products[i];
            if library.always {
                match self.gpu.product(&dense)? {
                    Ok(product) => self.products[i].take("asked for".into(), product),
                    Err(reason) => self.products[i].leave(reason),
                }
                continue;
            }
            let against = format!("{} {dense:?}", library.key);
            let Some(place) = compiler.choice(&against, &self.sources[source]) else {
                self.products[i].leave("there is no cache to keep a choice in".into());
                continue;
            };
            let (kept, product) = match place.read() {
                Some(kept) => (kept, None),
                None => {
                    disturbed = true;
                    let (choice, product) = match self.measure(i) {
                        Ok(measured) => measured,
                        Err(error) => {
                            // What a GPU does not get over ends the run; all else ends the comparison.
                            self.gpu.finish()?;
                            (Choice { library: false, reason: error.to_string() }, None)
                        }
                    };
                    let nowhere = || Choice { library: false, reason: "the choice could not be kept".into() };
                    // Another process may have been faster, and chosen otherwise.
                    (place.keep(&choice).unwrap_or_else(nowhere), product)
                }
            };
            match (kept.library, product) {
                (false, _) => self.products[i].leave(kept.reason),
                (true, Some(product)) => self.products[i].take(kept.reason, product),
                (true, None) => {
                    let product = self.gpu.product(&dense)?.map_err(|reason| DeviceError::Driver {
                        device: self.gpu.name().into(),
                        message: format!(
                            "{reason}, of a product that {} computed before; DREAMC_CUBLASLT=0 does without",
                            library.name
                        ),
                    })?;
                    self.products[i].take(kept.reason, product);
                }
            }
        }
        if disturbed { self.gpu.zero(self.arena, self.plan.arena) } else { Ok(()) }
    }

    /// Computes a product both ways and takes the time of each.
    fn measure(&mut self, i: usize) -> Result<(Choice, Option<G::Product>), DeviceError> {
        let DenseProduct { dense, first: (program, launch), .. } = self.products[i];
        let product = match self.gpu.product(&dense)? {
            Ok(product) => product,
            Err(reason) => return Ok((Choice { library: false, reason }, None)),
        };
        let mut run = Run {
            stats: RunStats::default(),
            gpu: &mut self.gpu,
            plan: &self.plan,
            program: &self.programs[program],
            modules: &self.modules,
            texts: &self.texts,
            sources: &self.sources,
            products: &self.products,
            scratch: self.scratch,
            status: self.status,
            instrument: Instrument::default(),
            synchronous: false,
            variables: vec![0; self.programs[program].variables],
        };
        let choice = run.compare(launch, &dense, &product)?;
        Ok((choice, Some(product)))
    }
}

impl<G: Gpu> DenseProduct<G> {
    fn take(&mut self, reason: String, product: G::Product) {
        self.choice = Choice { library: true, reason };
        self.product = Some(product);
    }

    fn leave(&mut self, reason: String) {
        self.choice = Choice { library: false, reason };
    }
}

impl<G: Gpu> Run<'_, G> {
    /// Whether the library's product gives what the generated kernel gives, and is faster.
    fn compare(&mut self, launch: usize, dense: &Dense, product: &G::Product) -> Result<Choice, DeviceError> {
        let generated = |reason: String| Ok(Choice { library: false, reason });
        let operands = &self.program.launches[launch].operands;
        let at: Vec<u64> = operands.iter().map(|place| self.address(place)).collect();
        let (&[a, b, c], [a_bytes, b_bytes, c_bytes]) = (&at[..], dense.bytes()) else {
            return generated("its operands are not three".into());
        };
        fill(self.gpu, a, a_bytes, 1)?;
        fill(self.gpu, b, b_bytes, 2)?;
        // What is added to matters, and of what is overwritten all must be: not what the other way leaves there.
        fill(self.gpu, c, c_bytes, 3)?;
        let before = samples(self.gpu, dense, c)?;
        self.multiply(launch, product)?;
        let between = samples(self.gpu, dense, c)?;
        self.generated(launch)?;
        let after = samples(self.gpu, dense, c)?;
        if !same(dense, &before, &between, &after) {
            return generated("the library computes something else".into());
        }
        let once = self.timed(|run| run.multiply(launch, product))?;
        let other = self.timed(|run| run.generated(launch))?;
        let times = (ENOUGH / once.max(other).max(1e-9)).clamp(1.0, f64::from(MOST)) as u32;
        let ours = self.recording(times, |run| run.generated(launch));
        let theirs = self.recording(times, |run| run.multiply(launch, product));
        let mut seconds = [vec![], vec![]];
        match (ours, theirs) {
            // What cannot be recorded would keep whole programs from being recorded.
            (Ok(_), Err(error)) => return generated(error.to_string()),
            (Ok(ours), Ok(theirs)) => {
                for _ in 0..ROUNDS {
                    seconds[0].push(self.timed(|run| run.gpu.replay(&theirs))?);
                    seconds[1].push(self.timed(|run| run.gpu.replay(&ours))?);
                }
            }
            (Err(_), _) => {
                for _ in 0..ROUNDS {
                    seconds[0]
                        .push(self.timed(|run| (0..times).try_for_each(|_| run.multiply(launch, product)))?);
                    seconds[1].push(self.timed(|run| (0..times).try_for_each(|_| run.generated(launch)))?);
                }
            }
        }
        let [theirs, ours] = seconds.map(|mut list| {
            list.sort_by(f64::total_cmp);
            list[list.len() / 2] / f64::from(times)
        });
        let micro = |seconds: f64| format!("{:.1} µs", seconds * 1e6);
        let (theirs_took, ours_took) = (micro(theirs), micro(ours));
        Ok(match theirs < ours {
            true => Choice { library: true, reason: format!("{theirs_took}, generated {ours_took}") },
            false => Choice { library: false, reason: format!("{ours_took}, library {theirs_took}") },
        })
    }

    fn timed(&mut self, work: impl FnOnce(&mut Self) -> Result<(), DeviceError>) -> Result<f64, DeviceError> {
        self.gpu.clock()?;
        work(self)?;
        self.gpu.clocked()
    }

    fn recording(
        &mut self,
        times: u32,
        launch: impl Fn(&mut Self) -> Result<(), DeviceError>,
    ) -> Result<G::Graph, DeviceError> {
        self.gpu.record()?;
        let launched = (0..times).try_for_each(|_| launch(self));
        // Ended in any case.
        let graph = self.gpu.recorded();
        launched.and(graph)
    }
}

/// Fills memory with numbers between 1/4 and 1/2 of either sign, be they taken for bf16 or for f32.
fn fill<G: Gpu>(gpu: &mut G, address: u64, bytes: u64, stream: u64) -> Result<(), DeviceError> {
    // A prime number of them: rows that repeat one another are rare.
    const NUMBERS: usize = 1_000_003;
    let numbers = NUMBERS.min(bytes as usize / 2);
    let mut random = Philox::new(0, "products").stream(stream);
    let mut block = Vec::with_capacity(2 * numbers);
    for _ in 0..numbers {
        let bits = random.below(1 << 8) as u16;
        block.extend((0x3e80 | bits & 0x7f | (bits & 0x80) << 8).to_le_bytes());
    }
    let mut done = 0;
    while done < bytes {
        let part = (bytes - done).min(block.len() as u64);
        gpu.write(address + done, &block[..part as usize])?;
        done += part;
    }
    Ok(())
}

/// Elements of a result at its beginning, in its middle and at its end; all, where there are few.
fn samples<G: Gpu>(gpu: &mut G, dense: &Dense, c: u64) -> Result<Vec<f32>, DeviceError> {
    const WINDOW: u64 = 1 << 18;
    let (elements, size) = (dense.m * dense.n, if dense.narrow_result { 2 } else { 4 });
    let windows = match elements <= 3 * WINDOW {
        true => vec![(0, elements)],
        false => [0, (elements - WINDOW) / 2, elements - WINDOW].map(|first| (first, WINDOW)).to_vec(),
    };
    let mut values = vec![];
    for (first, count) in windows {
        let mut bytes = vec![0; (count * size) as usize];
        gpu.read(c + first * size, &mut bytes)?;
        values.extend(bytes.chunks_exact(size as usize).map(|b| match *b {
            [x, y] => half::bf16::from_le_bytes([x, y]).to_f32(),
            [x, y, z, w] => f32::from_le_bytes([x, y, z, w]),
            _ => f32::NAN,
        }));
    }
    Ok(values)
}

/// Whether two runs one after the other gave the same, up to rounding relative to the largest.
fn same(dense: &Dense, before: &[f32], between: &[f32], after: &[f32]) -> bool {
    let tolerance = if dense.narrow_result { 2f32.powi(-6) } else { 2f32.powi(-12) };
    let given = |was: f32, is: f32| if dense.accumulate { is - was } else { is };
    let all = || before.iter().zip(between).zip(after);
    let pairs = || all().map(|((&was, &then), &now)| (given(was, then), given(then, now)));
    let largest = pairs().fold(0.0f32, |most, (_, ours)| most.max(ours.abs()));
    pairs().all(|(theirs, ours)| (theirs - ours).abs() <= tolerance * largest)
}

/// What a choice depends on beside the library and the product: our own kernel.
pub(super) fn geometry(source: &Source) -> String {
    format!("{:?} {} {}", source.passes, source.iterations, source.scratch)
}

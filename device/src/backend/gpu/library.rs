//! Plain products by the library of the GPU's maker, where that is faster than what is generated.
//!
//! *In*: a session whose kernels are loaded and whose memory holds nothing yet. *Out*: for each
//! distinct product of its plan the choice between both ([`Choice`]), and the library's products
//! ready to launch. *Promise*: what is chosen by measuring is kept on disk and never measured
//! again, so that two runs on one machine choose alike; nothing is measured where it could not be
//! kept. Nothing is allocated, and memory is zero afterwards. A library that refuses or fails
//! leaves the product to the generated kernel. Where both compute something else, the naive kernel
//! decides, and a person reads of it; where it agrees with neither, the plan is not loaded.

use super::cache::Compiler;
use super::{Call, Generated, Gpu, Loaded, Place, Plan, Program, waited};
use crate::notice::notice;
use crate::{Choice, DeviceError};
use dreamc_compiler::codegen::{Source, Variant, generate};
use dreamc_compiler::program::Kernel;
use dreamc_compiler::program::kernel::Product;
use dreamc_data::rng::Philox;
use std::collections::HashMap;

/// A library that may be used.
#[derive(Clone, Debug)]
pub(crate) struct Library {
    /// With its version, for people.
    pub(crate) name: String,
    /// Wherever it can; otherwise where it is faster.
    pub(crate) always: bool,
    /// Scratch memory that it may use, at a multiple of 256 bytes.
    pub(crate) workspace: u64,
    /// All that speed depends on apart from the product and our own text.
    pub(crate) key: String,
}

/// A matrix with adjacent elements along its columns: element `(i, j)` is at `i + j · far`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Side {
    /// Rows, in memory.
    pub(crate) rows: u64,
    /// Columns, in memory.
    pub(crate) columns: u64,
    /// Elements from column to column, as many as there are rows or more.
    pub(crate) far: u64,
    /// Whether the product takes it transposed.
    pub(crate) transposed: bool,
}

impl Side {
    /// A matrix of `rows` x `columns` with element `(i, j)` at `i · down + j · along`, where it can
    /// be said so.
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

/// A plain product as libraries of linear algebra take it. They have adjacent elements along
/// columns where we have them along rows, so they see `cᵀ[n, m] (+)= bᵀ[n, k] · aᵀ[k, m]`, in which
/// nothing moves. Sums are in f32, added to `c` in f32, and rounded once, to `c`'s type: what
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
    /// Of what numbers of bytes the addresses of `a`, `b` and `c` are multiples, for all values of
    /// the loop variables: powers of two, 256 at most.
    pub(crate) alignment: [u64; 3],
}

impl Dense {
    /// The product that a launch is, if it is a plain one in types and layouts that a library has.
    pub(super) fn of(kernel: &Kernel, variant: &Variant) -> Option<Dense> {
        let &Kernel::Product(Product { m, n, k, a, b, accumulate, stored: false }) = kernel else {
            return None;
        };
        let narrow = |operand: u32| variant.narrow >> operand & 1 != 0;
        let mixed = narrow(0) != narrow(1) || (narrow(2) && !narrow(0));
        if variant.naive || variant.places || mixed || m == 0 || n == 0 || k == 0 {
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

/// Timings; their median counts.
const ROUNDS: usize = 5;
/// Launches of a timing at most, and how many seconds of them are enough.
const MOST: u32 = 20;
const ENOUGH: f64 = 1e-3;

impl<G: Gpu> Generated<G> {
    /// Chooses between the kernel and the library for each product. `compiler` keeps the choices.
    pub(super) fn choose(
        &mut self,
        compiler: &Compiler,
        plan: &Plan,
        programs: &[Program],
    ) -> Result<(), DeviceError> {
        let Some(library) = self.loaded.gpu.library().cloned() else { return Ok(()) };
        let mut numbers = None;
        for i in 0..self.products.len() {
            let DenseProduct { dense, source, .. } = self.products[i];
            if library.always {
                match self.loaded.gpu.product(&dense)? {
                    Ok(product) => self.products[i].take("asked for".into(), product),
                    Err(reason) => self.products[i].leave(reason),
                }
                continue;
            }
            let against = format!("{} {dense:?}", library.key);
            let Some(place) = compiler.choice(&against, &self.loaded.sources[source]) else {
                self.products[i].leave("there is no cache to keep a choice in".into());
                continue;
            };
            let (kept, product) = match place.read() {
                Some(kept) => (kept, None),
                None => {
                    let numbers = numbers.get_or_insert_with(numbers_of_either_type);
                    let (choice, product) = match self.measure(i, compiler, numbers, plan, programs) {
                        Ok(measured) => measured,
                        // Nobody knows which product is right.
                        Err(error @ DeviceError::Disagree { .. }) => return Err(error),
                        Err(error) => {
                            // An error that a GPU does not get over ends the run, any other the
                            // comparison.
                            self.loaded.gpu.finish()?;
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
                    let product = self.loaded.gpu.product(&dense)?.map_err(|reason| DeviceError::Driver {
                        device: self.loaded.gpu.name().into(),
                        message: format!(
                            "{reason}, of a product that {} computed before; DREAMC_CUBLASLT=0 does without",
                            library.name
                        ),
                    })?;
                    self.products[i].take(kept.reason, product);
                }
            }
        }
        // Memory was written to where there are numbers.
        match numbers {
            Some(_) => self.loaded.gpu.zero(self.loaded.memory.arena, plan.arena),
            None => Ok(()),
        }
    }

    /// Computes a product both ways and takes the time of each.
    fn measure(
        &mut self,
        i: usize,
        compiler: &Compiler,
        numbers: &[u8],
        plan: &Plan,
        programs: &[Program],
    ) -> Result<(Choice, Option<G::Product>), DeviceError> {
        let DenseProduct { dense, source, first: (program, launch), .. } = self.products[i];
        let product = match self.loaded.gpu.product(&dense)? {
            Ok(product) => product,
            Err(reason) => return Ok((Choice { library: false, reason }, None)),
        };
        let (program, mut values) = (&programs[program], vec![]);
        let variables = vec![0; program.variables];
        let call = program.launches[launch].call(launch, plan, &variables, &mut values);
        let choice = Comparison { loaded: &mut self.loaded, source, call, product: &product, compiler }
            .result(&dense, numbers)?;
        let product = choice.library.then_some(product);
        Ok((choice, product))
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

/// A product both ways.
struct Comparison<'a, G: Gpu> {
    loaded: &'a mut Loaded<G>,
    source: usize,
    call: Call<'a>,
    product: &'a G::Product,
    compiler: &'a Compiler,
}

impl<G: Gpu> Comparison<'_, G> {
    fn ours(&mut self) -> Result<(), DeviceError> {
        self.loaded.generated(self.source, &self.call)
    }

    fn theirs(&mut self) -> Result<(), DeviceError> {
        self.loaded.multiply(self.product, &self.call)
    }

    /// Whether the library's product gives what the generated kernel gives, and is faster.
    fn result(&mut self, dense: &Dense, numbers: &[u8]) -> Result<Choice, DeviceError> {
        let generated = |reason: String| Ok(Choice { library: false, reason });
        let at: Vec<u64> = self.call.values.iter().map(|value| self.loaded.memory.address(value)).collect();
        let (&[a, b, c], [a_bytes, b_bytes, c_bytes]) = (&at[..], dense.bytes()) else {
            return generated("its operands are not three".into());
        };
        // A result that is added to matters; one that is overwritten must not be right beforehand.
        for (address, bytes, from) in [(a, a_bytes, 0), (b, b_bytes, 300_000), (c, c_bytes, 600_000)] {
            fill(&mut self.loaded.gpu, address, bytes, numbers, from)?;
        }
        let before = samples(&mut self.loaded.gpu, dense, c)?;
        self.theirs()?;
        let between = samples(&mut self.loaded.gpu, dense, c)?;
        self.ours()?;
        let after = samples(&mut self.loaded.gpu, dense, c)?;
        if !same(dense, &before, &between, &after) {
            fill(&mut self.loaded.gpu, c, c_bytes, numbers, 600_000)?;
            self.naive(dense)?;
            let naive = samples(&mut self.loaded.gpu, dense, c)?;
            return self.decide(dense, [&before, &between, &after, &naive]);
        }
        let once = self.timed(|run| run.theirs())?;
        let other = self.timed(|run| run.ours())?;
        let times = (ENOUGH / once.max(other).max(1e-9)).clamp(1.0, f64::from(MOST)) as u32;
        let ours = self.recording(times, |run| run.ours());
        let theirs = self.recording(times, |run| run.theirs());
        let mut seconds = [vec![], vec![]];
        match (ours, theirs) {
            // A product that cannot be recorded would keep whole programs from being recorded.
            (Ok(_), Err(error)) => return Err(error),
            (Ok(ours), Ok(theirs)) => {
                for _ in 0..ROUNDS {
                    seconds[0].push(self.timed(|run| run.loaded.gpu.replay(&theirs))?);
                    seconds[1].push(self.timed(|run| run.loaded.gpu.replay(&ours))?);
                }
            }
            (Err(_), _) => {
                for _ in 0..ROUNDS {
                    seconds[0].push(self.timed(|run| (0..times).try_for_each(|_| run.theirs()))?);
                    seconds[1].push(self.timed(|run| (0..times).try_for_each(|_| run.ours()))?);
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

    /// The product by its naive kernel.
    fn naive(&mut self, dense: &Dense) -> Result<(), DeviceError> {
        let narrow = (u32::from(dense.narrow) * 0b011) | (u32::from(dense.narrow_result) * 0b100);
        let variant = Variant { narrow, naive: true, hopper: false, ..self.compiler.texts() };
        let wrong = |message: String| DeviceError::Driver { device: self.loaded.gpu.name().into(), message };
        let source = generate(self.call.kernel, variant).map_err(|e| wrong(e.to_string()))?;
        let source = source.ok_or_else(|| wrong("a product without a naive kernel".into()))?;
        let codes = self.compiler.compile(&[&source])?;
        let module = self.loaded.gpu.load(&source, codes.first().map_or(&[], Vec::as_slice))?;
        let Loaded { gpu, memory, .. } = &mut *self.loaded;
        let given = (&self.call).into();
        let launched = memory.launch(gpu, &module, &source, &given);
        waited(gpu, launched, &given, || source.name.clone())
    }

    /// Which of two products that differ is the naive kernel's: results before both, after the
    /// library's, after ours following that, and after the naive one alone.
    fn decide(
        &self,
        dense: &Dense,
        [before, theirs, ours, naive]: [&[f32]; 4],
    ) -> Result<Choice, DeviceError> {
        let add = |to: &[f32], from: &[f32], step: &[f32]| -> Vec<f32> {
            let sums = to.iter().zip(from).zip(step).map(|((to, from), step)| to + (step - from));
            if dense.accumulate { sums.collect() } else { step.to_vec() }
        };
        let library = same(dense, before, theirs, &add(theirs, before, naive));
        let generated = same(dense, before, naive, &add(naive, theirs, ours));
        let name = self.loaded.gpu.library().map_or("the library", |library| &library.name);
        let device = self.loaded.gpu.name();
        let what = format!("{} ({})", self.call.kernel, self.call.origin);
        let (right, wrong, library) = match (library, generated) {
            (true, false) => (name, "the generated kernel", true),
            (false, true) => ("the generated kernel", name, false),
            (true, true) | (false, false) => {
                let kernel = format!("{what}: {name}, the generated and the naive kernel");
                return Err(DeviceError::Disagree { device: device.into(), kernel });
            }
        };
        notice(&format!(
            "{device}: {wrong} computes {what} otherwise than the naive kernel; {right} is used. `dreamc doctor --gpu` proves \
             all kernels"
        ));
        Ok(Choice { library, reason: format!("{wrong} computes otherwise than the naive kernel") })
    }

    fn timed(&mut self, work: impl FnOnce(&mut Self) -> Result<(), DeviceError>) -> Result<f64, DeviceError> {
        self.loaded.gpu.mark(0)?;
        work(self)?;
        self.loaded.gpu.mark(1)?;
        self.loaded.gpu.finish()?;
        self.loaded.gpu.between(0, 1)
    }

    fn recording(
        &mut self,
        times: u32,
        launch: impl Fn(&mut Self) -> Result<(), DeviceError>,
    ) -> Result<G::Graph, DeviceError> {
        self.loaded.gpu.record()?;
        let launched = (0..times).try_for_each(|_| launch(self));
        // Ended in any case.
        let graph = self.loaded.gpu.recorded();
        launched.and(graph)
    }
}

/// Numbers between 1/4 and 1/2 of either sign, be they taken for bf16 or for f32. As a prime number
/// of them is repeated, lines of matrices rarely repeat one another.
fn numbers_of_either_type() -> Vec<u8> {
    const NUMBERS: usize = 1_000_003;
    let mut random = Philox::new(0, "products").stream(0);
    let number = |_| {
        let bits = random.below(1 << 8) as u16;
        (0x3e80 | bits & 0x7f | (bits & 0x80) << 8).to_le_bytes()
    };
    (0..NUMBERS).flat_map(number).collect()
}

/// Fills memory with numbers, from one of them on.
fn fill<G: Gpu>(
    gpu: &mut G,
    address: u64,
    bytes: u64,
    numbers: &[u8],
    from: usize,
) -> Result<(), DeviceError> {
    let (first, second) = numbers.split_at(2 * from);
    let period = [second, first].concat();
    let once = (period.len() as u64).min(bytes);
    gpu.write(address, &period[..once as usize])?;
    gpu.repeat(address, once, bytes)
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

/// Whether two runs one after the other gave the same, up to rounding relative to the largest: of a
/// bf16; of long sums on tensor cores, which cut what they add; of f32.
fn same(dense: &Dense, before: &[f32], between: &[f32], after: &[f32]) -> bool {
    let tolerance = match (dense.narrow_result, dense.narrow) {
        (true, _) => 2f32.powi(-6),
        (false, true) => 2f32.powi(-9),
        (false, false) => 2f32.powi(-12),
    };
    let given = |was: f32, is: f32| if dense.accumulate { is - was } else { is };
    let all = || before.iter().zip(between).zip(after);
    let pairs = || all().map(|((&was, &then), &now)| (given(was, then), given(then, now)));
    let largest = pairs().fold(0.0f32, |most, (_, ours)| most.max(ours.abs()));
    pairs().all(|(theirs, ours)| (theirs - ours).abs() <= tolerance * largest)
}

/// Our own kernel: a choice depends on it as well as on the library and the product.
pub(super) fn geometry(source: &Source) -> String {
    format!("{:?} {} {}", source.passes, source.iterations, source.scratch)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dreamc_compiler::ir::DType;
    use dreamc_compiler::program::{Affine, Matrix, kernel};

    fn product(a: (u64, u64), b: (u64, u64), narrow: u32) -> Option<Dense> {
        let matrix = |(row, column)| Matrix { row, column };
        let kernel = Kernel::Product(kernel::Product {
            m: 4,
            n: 6,
            k: 8,
            a: matrix(a),
            b: matrix(b),
            accumulate: false,
            stored: false,
        });
        Dense::of(&kernel, &Variant { narrow, ..Variant::default() })
    }

    fn side(rows: u64, columns: u64, far: u64, transposed: bool) -> Side {
        Side { rows, columns, far, transposed }
    }

    #[test]
    fn rows_of_ours_are_columns_of_theirs() {
        let plain = product((8, 1), (6, 1), 0).unwrap();
        assert_eq!((plain.left, plain.right), (side(6, 8, 6, false), side(8, 4, 8, false)));
        assert_eq!(plain.result(), side(6, 4, 6, false));
        assert_eq!(plain.bytes(), [4 * 32, 4 * 48, 4 * 24]);
        let both = product((1, 5), (1, 9), 0b111).unwrap();
        assert_eq!((both.left, both.right), (side(8, 6, 9, true), side(4, 8, 5, true)));
        assert_eq!(both.bytes(), [2 * (7 * 5 + 4), 2 * (5 * 9 + 8), 2 * 24]);
        assert_eq!((both.narrow, both.narrow_result), (true, true));
    }

    #[test]
    fn what_a_library_cannot_say_it_is_not_asked() {
        assert!(product((16, 2), (6, 1), 0).is_none(), "no adjacent elements");
        assert!(product((7, 1), (6, 1), 0).is_none(), "rows that overlap");
        assert!(product((0, 1), (6, 1), 0).is_none(), "a row that is repeated");
        for mixed in [0b001, 0b010, 0b100, 0b101] {
            assert!(product((8, 1), (6, 1), mixed).is_none(), "{mixed:b}");
        }
        assert!(product((8, 1), (6, 1), 0b011).is_some_and(|dense| dense.narrow && !dense.narrow_result));
        // Where there is one element along a distance, that may be any.
        let one = Kernel::Product(kernel::Product {
            m: 1,
            n: 6,
            k: 8,
            a: Matrix { row: 0, column: 1 },
            b: Matrix { row: 6, column: 1 },
            accumulate: true,
            stored: false,
        });
        assert_eq!(Dense::of(&one, &Variant::default()).unwrap().right, side(8, 1, 8, false));
        assert!(Dense::of(&one, &Variant { places: true, ..Variant::default() }).is_none());
        assert!(Dense::of(&Kernel::Norm(kernel::Norm { elements: 4 }), &Variant::default()).is_none());
    }

    #[test]
    fn addresses_are_aligned_for_all_values_of_the_loops() {
        let place = |base, factor, bytes| Place::Tensor {
            base,
            instance: Affine { base: 0, terms: vec![(0, factor)] },
            instance_bytes: bytes,
            stride: 0,
            dtype: DType::F32,
        };
        let dense = product((8, 1), (6, 1), 0).unwrap();
        let places = [place(0x1000, 1, 0x1000), place(0x1000, 3, 32), place(0x1008, 1, 64)];
        assert_eq!(dense.at(&places).alignment, [256, 32, 8]);
    }

    #[test]
    fn the_same_is_the_same_up_to_rounding() {
        let dense = product((8, 1), (6, 1), 0).unwrap();
        let adds = Dense { accumulate: true, ..dense };
        let (was, result) = ([0.5f32, -0.5], [3.0f32, -4.0]);
        assert!(same(&dense, &was, &result, &result));
        assert!(same(&dense, &was, &[3.0 + 1e-6, -4.0], &result));
        assert!(!same(&dense, &was, &[3.01, -4.0], &result));
        assert!(!same(&dense, &was, &was, &result), "nothing was written");
        assert!(!same(&dense, &was, &[f32::NAN, -4.0], &result));
        assert!(!same(&dense, &was, &result, &[f32::NAN, -4.0]));
        let narrow = Dense { narrow: true, ..dense };
        assert!(same(&narrow, &was, &[3.002, -4.0], &result) && !same(&narrow, &was, &[3.01, -4.0], &result));
        assert!(same(&Dense { narrow_result: true, ..narrow }, &was, &[3.01, -4.0], &result));
        assert!(same(&adds, &was, &[3.5, -4.5], &[6.5, -8.5]));
        assert!(!same(&adds, &was, &[3.0, -4.0], &[6.0, -8.0]), "one did not add");
    }

    #[test]
    fn numbers_are_of_either_type() {
        let numbers = numbers_of_either_type();
        let bf16 = numbers.chunks_exact(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32());
        let f32s = numbers[2..].chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        for all in [bf16.collect::<Vec<_>>(), f32s.collect()] {
            assert!(all.iter().all(|x| (0.25..0.5).contains(&x.abs())));
            assert!(all.iter().sum::<f32>().abs() < 1e-2 * all.len() as f32);
        }
    }
}

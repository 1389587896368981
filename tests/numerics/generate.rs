//! Writing with caches, for every kind of layer that there is a golden model of: the same logits
//! and tokens as running the whole text anew for every token, and a row is not changed by the rows
//! around it.

use crate::support::sandbox::Sandbox;
use crate::support::{Golden, cpu, error, every_golden, golden, goldens};
use dreamc_compiler::count::{self, count};
use dreamc_compiler::ir::DType;
use dreamc_compiler::program::{BufferId, Plan, ProgramKey, Space};
use dreamc_compiler::rewrite::Rewriting;
use dreamc_compiler::{CompileError, Options, compile};
use dreamc_data::rng::Philox;
use dreamc_device::poison::Poisoned;
use dreamc_device::{Device, DeviceError, Group, Instrument, RunStats, Session};
use dreamc_dsl::Spec;
use dreamc_dsl::spec::Precision;
use dreamc_runtime::generate::{
    Cached, Next, NextLogits, Sampling, Slots, Uncached, Writing, compile_cached, likeliest,
};
use dreamc_runtime::model::{Model, ModelError};

/// Longer than a prompt's chunk, so that prompts are read in pieces.
const CONTEXT: u64 = 80;

fn device() -> Poisoned<'static> {
    cpu(2)
}

fn fill(model: &mut Model, golden: &Golden) {
    for (name, _) in model.entries() {
        let values = golden.tensors[&format!("weights.{name}")].floats();
        let values: Vec<f32> = values.iter().map(|&x| x as f32).collect();
        model.set(&name, &values).unwrap();
    }
}

fn with_context(golden: &Golden) -> Spec {
    let mut spec = golden.spec.clone();
    spec.model.context = CONTEXT;
    spec
}

fn cached(golden: &Golden, rows: u64) -> Cached {
    leaving(golden, rows, None)
}

/// With tokens that leave their loop where this share of them has.
fn leaving(golden: &Golden, rows: u64, exit: Option<f64>) -> Cached {
    written(golden, &Writing { rows, exit, ..Writing::default() })
}

fn written(golden: &Golden, writing: &Writing) -> Cached {
    let compiled = compile_cached(&with_context(golden), writing).unwrap();
    let mut cached = Cached::load(&device(), compiled).unwrap();
    fill(cached.model(), golden);
    cached
}

fn uncached(golden: &Golden, rows: u64) -> Uncached {
    leaving_uncached(golden, rows, None)
}

fn leaving_uncached(golden: &Golden, rows: u64, exit: Option<f64>) -> Uncached {
    let options = Options { batch: rows, sequence: CONTEXT, logits: true, exit, ..Default::default() };
    let compiled = compile(&with_context(golden), &options).unwrap();
    let mut model = Model::load(&device(), compiled).unwrap();
    fill(&mut model, golden);
    Uncached::new(model)
}

/// Prompts of one token, of a few, and of more than are read at once.
fn prompts(vocab: u64) -> Vec<Vec<u32>> {
    let mut random = Philox::new(1, "prompts").stream(0);
    [1, 7, 70].map(|n| (0..n).map(|_| random.below(vocab) as u32).collect()).to_vec()
}

/// The logits of every step, and the tokens drawn from them.
fn write(from: &mut dyn NextLogits, prompts: &[Vec<u32>], steps: usize) -> Vec<Vec<(Vec<f32>, u32)>> {
    let sampling = Sampling { temperature: 1.0, ..Sampling::default() };
    let mut random: Vec<_> =
        prompts.iter().map(|p| Philox::new(2, "sampling").stream(p.len() as u64)).collect();
    let mut written = vec![vec![]; prompts.len()];
    let mut logits = from.start(prompts).unwrap();
    for step in 0..steps {
        let mut next = vec![];
        for (row, logits) in logits.into_iter().enumerate() {
            let token = sampling.draw(&logits, &mut random[row]);
            written[row].push((logits, token));
            next.push(token);
        }
        logits = if step + 1 < steps { from.advance(&next).unwrap() } else { vec![] };
    }
    written
}

#[test]
fn caches_change_neither_logits_nor_tokens() {
    let mut worst = 0.0f64;
    for golden in every_golden() {
        let prompts = prompts(golden.spec.model.vocab);
        let slow = write(&mut uncached(&golden, 3), &prompts, 8);
        // Whatever prompts were said to be like: they are read in chunks of 64, 16 and 80.
        for longest in [None, Some(7), Some(70)] {
            let writing = Writing { rows: 3, prompt: longest, ..Writing::default() };
            let fast = write(&mut written(&golden, &writing), &prompts, 8);
            for (row, (fast, slow)) in fast.iter().zip(&slow).enumerate() {
                for (step, ((a, token), (b, expected))) in fast.iter().zip(slow).enumerate() {
                    let widen = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
                    let e = error(&widen(a), &widen(b));
                    worst = worst.max(e);
                    let place = format!("{}, prompts of {longest:?}, row {row}, step {step}", golden.name);
                    // Rounding grows over passes of a loop.
                    assert!(e < 1e-5, "{place}: logits differ by {e:.2e}");
                    assert_eq!(token, expected, "{place}");
                }
            }
        }
    }
    println!("largest relative difference {worst:.2e}");
}

/// Prompts with all logits asked for, and one with only the last, in one step.
#[test]
fn logits_after_every_token_are_those_without_caches() {
    for golden in every_golden() {
        let prompts = prompts(golden.spec.model.vocab);
        let writing = Writing { rows: 3, every: true, ..Writing::default() };
        let mut fast = written(&golden, &writing);
        let mut slow = uncached(&golden, 3);
        let read = |from: &mut dyn NextLogits| {
            (0..3).for_each(|row| assert_eq!(from.admit().unwrap(), Some(row)));
            let next = prompts.iter().enumerate();
            let next = next.map(|(row, tokens)| Next { every: row != 1, ..Next::prompt(row, tokens) });
            from.step(&next.collect::<Vec<_>>()).unwrap()
        };
        let (fast, slow) = (read(&mut fast), read(&mut slow));
        let vocab = golden.spec.model.vocab as usize;
        for (row, (a, b)) in fast.iter().zip(&slow).enumerate() {
            let tokens = if row == 1 { 1 } else { prompts[row].len() };
            assert_eq!((a.len(), b.len()), (tokens * vocab, tokens * vocab), "{}, row {row}", golden.name);
            let widen = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
            let e = error(&widen(a), &widen(b));
            assert!(e < 5e-6, "{}, row {row}: logits differ by {e:.2e}", golden.name);
        }
    }
    // A model that has no program for it says so, and reads nothing.
    let golden = goldens().remove(0);
    let mut plain = cached(&golden, 1);
    plain.admit().unwrap();
    let asked = plain.step(&[Next { every: true, ..Next::prompt(0, &[1, 2]) }]);
    assert!(matches!(asked, Err(ModelError::LastLogits)), "{asked:?}");
    assert_eq!(plain.held().tokens, 0);
}

#[test]
fn tokens_leave_their_loop_alike_with_caches_and_without() {
    let golden = every_golden().into_iter().find(|golden| golden.name == "ouro").unwrap();
    let prompts = prompts(golden.spec.model.vocab);
    let whole = write(&mut cached(&golden, 3), &prompts, 8);
    let mut moved = vec![];
    for share in [0.0, 0.3, 0.6, 0.9, 0.999_999] {
        let fast = write(&mut leaving(&golden, 3, Some(share)), &prompts, 8);
        let slow = write(&mut leaving_uncached(&golden, 3, Some(share)), &prompts, 8);
        let widen = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        for ((a, token), (b, expected)) in fast.iter().flatten().zip(slow.iter().flatten()) {
            let e = error(&widen(a), &widen(b));
            assert!(e < 5e-6, "leaving at {share}: logits differ by {e:.2e}");
            assert_eq!(token, expected, "leaving at {share}");
        }
        let first = fast.iter().zip(&whole).map(|(a, b)| error(&widen(&a[0].0), &widen(&b[0].0)));
        moved.push(first.fold(0.0, f64::max));
    }
    // After its first pass every token has left a little, and all of it nowhere.
    assert!(moved[0] > 1e-3 && moved[4] < 1e-6, "{moved:?}");

    let plain = every_golden().into_iter().find(|golden| golden.name == "layered").unwrap();
    let writing = Writing { exit: Some(0.5), ..Writing::default() };
    let refused = compile_cached(&with_context(&plain), &writing).map(|_| ()).unwrap_err();
    assert_eq!(refused.to_string(), CompileError::NoGate.to_string());
    let writing = Writing { exit: Some(1.0), ..Writing::default() };
    let refused = compile_cached(&with_context(&golden), &writing).map(|_| ()).unwrap_err();
    assert_eq!(refused.to_string(), CompileError::Share(1.0).to_string());
}

#[test]
fn a_row_does_not_depend_on_those_around_it() {
    for golden in goldens() {
        let prompts = prompts(golden.spec.model.vocab);
        let mut decoder = cached(&golden, 3);
        let together = write(&mut decoder, &prompts, 8);
        let mut turned = prompts.clone();
        turned.rotate_left(1);
        let mut other = write(&mut decoder, &turned, 8);
        other.rotate_right(1);
        let alone: Vec<_> =
            prompts.iter().flat_map(|p| write(&mut decoder, std::slice::from_ref(p), 8)).collect();
        let bits = |rows: &[Vec<(Vec<f32>, u32)>]| -> Vec<(Vec<u32>, u32)> {
            rows.iter().flatten().map(|(l, t)| (l.iter().map(|x| x.to_bits()).collect(), *t)).collect()
        };
        assert!(bits(&together) == bits(&other), "{}: rows in another order", golden.name);
        assert!(bits(&together) == bits(&alone), "{}: rows alone", golden.name);
    }
}

/// The caches that `dreamc count` counts of a text as long as the context are those that a plan to
/// write with reserves: of latent attention too, whose caches hold what keys and values are made
/// of.
#[test]
fn counted_caches_are_those_reserved() {
    for name in ["la", "dr_da", "latent", "kv_first", "cross_layer_kv", "ouro"] {
        let mut spec = with_context(&golden(name));
        spec.train.precision = Precision::F32;
        let counts = count(&spec, &count::Options { tokens: CONTEXT, ..count::Options::default() }).unwrap();
        let compiled = compile_cached(&spec, &Writing::default()).unwrap();
        let keys = compiled.plan.buffers.iter().filter(|b| b.space == Space::State && b.dtype == DType::F32);
        let reserved: u64 = keys.map(|b| b.bytes()).sum();
        assert!(reserved > 0, "{name}");
        assert_eq!(counts.memory_bytes.sequence_cache_context, u128::from(reserved), "{name}");
    }
}

/// A text among others: what it reads and writes, and when it leaves.
struct Text {
    prompt: Vec<u32>,
    /// Tokens that it writes, and then stands still until it leaves.
    steps: usize,
    /// Tokens of the prompt that are read.
    read: usize,
    /// The next token, and the logits of every step.
    next: u32,
    logits: Vec<Vec<f32>>,
}

/// A fault in rows.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    Nothing,
    /// Two texts get each other's logits.
    Swapped,
    /// A row that was given back is taken as it was.
    Kept,
    /// A token more is taken over than was read.
    Adopted,
    /// A token that was written is not read.
    Deaf,
    /// A kept page is found by its own tokens, whatever is before it.
    Elsewhere,
    /// A copy between rows leaves out its last token.
    Short,
    /// A copy leaves the keys and values of later applications as they were.
    Stale,
    /// A copy leaves out which tokens a part processed.
    Unmarked,
    /// Copies are taken from the row before.
    Before,
    /// Memory of the row after is given back.
    Behind,
}

/// A device on which copies between rows, or what is given back, go wrong.
struct Slipping(Poisoned<'static>, Fault);

impl Device for Slipping {
    fn name(&self) -> String {
        self.0.name()
    }

    fn scratch_bytes(&self, plan: &Plan) -> Result<u64, DeviceError> {
        self.0.scratch_bytes(plan)
    }

    fn load(&self, plan: &Plan, group: &Group) -> Result<Box<dyn Session>, DeviceError> {
        Ok(Box::new(Slip(self.0.load(plan, group)?, self.1)))
    }
}

struct Slip(Box<dyn Session>, Fault);

impl Slip {
    /// Elements of a row and of an entry of it, where a buffer is a cache of keys or values.
    fn cache(&self, buffer: BufferId) -> Option<(u64, u64)> {
        let b = self.plan().buffer(buffer);
        let keys = b.space == Space::State && b.dtype == DType::F32 && b.shape.len() > 2;
        keys.then(|| (b.shape[1..].iter().product(), b.shape[2..].iter().product()))
    }
}

impl Session for Slip {
    fn plan(&self) -> &Plan {
        self.0.plan()
    }

    fn scratch_bytes(&self) -> u64 {
        self.0.scratch_bytes()
    }

    fn write(&mut self, buffer: BufferId, instance: u64, at: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        let b = self.plan().buffer(buffer);
        let marks = b.space == Space::State && b.dtype == DType::I32 && bytes.iter().any(|b| *b != 255);
        let mut bytes = bytes;
        match (self.1, self.cache(buffer)) {
            (Fault::Stale, Some(_)) if instance > 0 => return Ok(()),
            (Fault::Unmarked, None) if marks => return Ok(()),
            (Fault::Short, Some((_, entry))) => {
                bytes = &bytes[..bytes.len().saturating_sub(4 * entry as usize)];
            }
            _ => {}
        }
        self.0.write(buffer, instance, at, bytes)
    }

    fn read(&self, buffer: BufferId, instance: u64, at: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let at = match (self.1, self.cache(buffer)) {
            (Fault::Before, Some((row, _))) => at.checked_sub(row).unwrap_or(at),
            _ => at,
        };
        self.0.read(buffer, instance, at, bytes)
    }

    fn forget(&mut self, buffer: BufferId, instance: u64, at: u64, elements: u64) -> Result<(), DeviceError> {
        let all = self.plan().buffer(buffer).elements();
        let at = match (self.1, self.cache(buffer)) {
            (Fault::Behind, Some((row, _))) if at + row < all => at + row,
            _ => at,
        };
        self.0.forget(buffer, instance, at, elements)
    }

    fn run(&mut self, program: ProgramKey) -> Result<RunStats, DeviceError> {
        self.0.run(program)
    }

    fn instrument(&mut self, instrument: Instrument) {
        self.0.instrument(instrument);
    }
}

/// Rows with a fault.
struct Faulty {
    inner: Slots,
    fault: Fault,
    kept: Vec<usize>,
    /// The first page of the first text.
    first: Vec<u32>,
}

impl NextLogits for Faulty {
    fn rows(&self) -> usize {
        self.inner.rows()
    }

    fn context(&self) -> usize {
        self.inner.context()
    }

    fn chunk(&self) -> usize {
        self.inner.chunk()
    }

    fn admit(&mut self) -> Result<Option<usize>, ModelError> {
        self.kept.pop().map_or_else(|| self.inner.admit(), |row| Ok(Some(row)))
    }

    fn step(&mut self, next: &[Next]) -> Result<Vec<Vec<f32>>, ModelError> {
        let zero = [0];
        let deaf = self.fault == Fault::Deaf;
        let read =
            next.iter().map(|n| Next { tokens: if deaf && !n.prompt { &zero } else { n.tokens }, ..*n });
        let mut logits = self.inner.step(&read.collect::<Vec<_>>())?;
        if self.fault == Fault::Swapped && logits.len() > 1 {
            logits.swap(0, 1);
        }
        Ok(logits)
    }

    fn release(&mut self, row: usize) -> Result<(), ModelError> {
        if self.fault == Fault::Kept {
            self.kept.push(row);
            return Ok(());
        }
        self.inner.release(row)
    }

    fn adopt(&mut self, row: usize, text: &[u32]) -> Result<usize, ModelError> {
        if self.fault == Fault::Kept {
            return Ok(0);
        }
        let chunk = self.chunk();
        let other = [&self.first[..], text.get(chunk..).unwrap_or(&[])].concat();
        let elsewhere = self.fault == Fault::Elsewhere && text.len() > chunk;
        let length = self.inner.adopt(row, if elsewhere { &other } else { text })?;
        Ok(if self.fault == Fault::Adopted && length > 0 { length + 1 } else { length })
    }
}

fn best(logits: &[f32]) -> u32 {
    likeliest(logits, 1).first().map_or(0, |&token| token as u32)
}

/// Texts come and go at any token, more at once than the narrow uses have rows, prompts that begin
/// alike among them, and some leave in the middle of their prompts. Gives how many tokens were
/// taken over from other prompts, or the first text whose bits are not those that it has alone.
fn come_and_go(golden: &Golden, fault: Fault, keep: usize) -> Result<usize, String> {
    let vocab = golden.spec.model.vocab;
    let mut random = Philox::new(3, "texts").stream(0);
    let common: Vec<u32> = (0..66).map(|_| random.below(vocab) as u32).collect();
    let mut texts = vec![];
    for i in 0..24 {
        let length = 1 + random.below(74) as usize;
        let mut prompt: Vec<u32> = (0..length).map(|_| random.below(vocab) as u32).collect();
        if i % 3 == 0 {
            prompt.splice(..length.min(66), common.clone());
        }
        let steps = random.below(6) as usize;
        texts.push(Text { prompt, steps, read: 0, next: 0, logits: vec![] });
    }
    let writing = Writing { rows: 18, rewrite: Rewriting::off(), ..Writing::default() };
    let mut inner = Slots::compile(&Slipping(device(), fault), &with_context(golden), &writing).unwrap();
    fill(inner.reader().model(), golden);
    inner.keep(keep);
    let mut slots = Faulty { inner, fault, kept: vec![], first: common[..CHUNK].to_vec() };
    let mut adopted = 0;
    let (mut waiting, mut live, mut done) = (texts, vec![], vec![]);
    waiting.reverse();
    while !(waiting.is_empty() && live.is_empty()) {
        // Half of the texts are there before the first has left.
        let most = if done.is_empty() { 18 } else { 6 };
        if live.len() < most
            && random.below(4) > 0
            && let Some(mut text) = waiting.pop()
        {
            let row = slots.admit().unwrap().unwrap();
            text.read = slots.adopt(row, &text.prompt).unwrap();
            adopted += text.read;
            live.push((row, text));
        }
        let mut next = vec![];
        for (row, text) in &live {
            if text.read < text.prompt.len() {
                if next.iter().all(|n: &Next| !n.prompt) {
                    let chunk = &text.prompt[text.read..][..slots.chunk().min(text.prompt.len() - text.read)];
                    next.push(Next::prompt(*row, chunk));
                }
            } else if text.logits.len() <= text.steps && random.below(4) > 0 {
                next.push(Next::written(*row, &text.next));
            }
        }
        let logits = slots.step(&next).map_err(|e| format!("{}: {e}", golden.name))?;
        let found: Vec<_> = next.iter().map(|n| (n.row, n.prompt, n.tokens.len())).zip(logits).collect();
        for ((row, prompt, tokens), logits) in found {
            let (_, text) = live.iter_mut().find(|(r, _)| *r == row).unwrap();
            if prompt {
                text.read += tokens;
            }
            if text.read == text.prompt.len() {
                text.next = best(&logits);
                text.logits.push(logits);
            }
        }
        let over = |t: &Text| t.logits.len() > t.steps || t.steps == 5 && t.read > 0;
        if !done.is_empty() || live.len() > 16 || waiting.is_empty() {
            for (row, text) in live.extract_if(.., |(_, text)| over(text)) {
                slots.release(row).unwrap();
                done.push(text);
            }
        }
    }
    let mut alone = Alone::new(golden, &with_context(golden));
    done.iter().try_for_each(|text| alone.same(text))?;
    Ok(adopted)
}

/// A model that writes one text.
struct Alone<'a>(&'a str, Cached);

impl<'a> Alone<'a> {
    fn new(golden: &'a Golden, spec: &Spec) -> Self {
        let writing = Writing { rows: 1, rewrite: Rewriting::off(), ..Writing::default() };
        let mut alone = Cached::load(&device(), compile_cached(spec, &writing).unwrap()).unwrap();
        fill(alone.model(), golden);
        Alone(&golden.name, alone)
    }

    /// Compares the bits of a text with those that it has alone.
    fn same(&mut self, text: &Text) -> Result<(), String> {
        for (step, logits) in text.logits.iter().enumerate() {
            let expected = match step {
                0 => self.1.start(std::slice::from_ref(&text.prompt)).unwrap(),
                _ => self.1.advance(&[best(&text.logits[step - 1])]).unwrap(),
            };
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            if bits(logits) != bits(&expected[0]) {
                let apart = |(a, b): (&f32, &f32)| (a - b).abs();
                let most = logits.iter().zip(&expected[0]).map(apart).fold(0.0, f32::max);
                let (name, tokens) = (self.0, text.prompt.len());
                return Err(format!("{name}, prompt of {tokens}, step {step}: logits differ by {most:e}"));
            }
        }
        Ok(())
    }
}

/// Tokens of a page, and of a chunk of a prompt.
const CHUNK: usize = 64;

/// A text of its own from beginning to end, that leaves when `leaves` tokens of its prompt are
/// read; gives how many were taken over.
fn pass(slots: &mut Faulty, prompt: &[u32], leaves: usize, texts: &mut Vec<Text>) -> usize {
    let row = slots.admit().unwrap().unwrap();
    let taken = slots.adopt(row, prompt).unwrap();
    let mut text = Text { prompt: prompt.to_vec(), steps: 3, read: taken, next: 0, logits: vec![] };
    while text.read < leaves.min(prompt.len()) {
        let chunk = &prompt[text.read..][..slots.chunk().min(prompt.len() - text.read)];
        let logits = slots.step(&[Next::prompt(row, chunk)]).unwrap().remove(0);
        text.read += chunk.len();
        if text.read == prompt.len() {
            text.next = best(&logits);
            text.logits.push(logits);
        }
    }
    while !text.logits.is_empty() && text.logits.len() <= text.steps {
        let logits = slots.step(&[Next::written(row, &text.next)]).unwrap().remove(0);
        text.next = best(&logits);
        text.logits.push(logits);
    }
    slots.release(row).unwrap();
    texts.push(text);
    taken
}

/// Prompts that begin alike, one after another: pages of those that have left serve the next, with
/// the bits of a text that is read whole. Gives how much each took over.
fn one_after_another(golden: &Golden, fault: Fault) -> Result<Vec<usize>, String> {
    let vocab = golden.spec.model.vocab;
    let mut random = Philox::new(4, "texts").stream(0);
    let mut draw = |n: usize| -> Vec<u32> { (0..n).map(|_| random.below(vocab) as u32).collect() };
    let mut spec = golden.spec.clone();
    spec.model.context = 208;
    let writing = Writing { rows: 2, rewrite: Rewriting::off(), ..Writing::default() };
    let mut inner = Slots::compile(&Slipping(device(), fault), &spec, &writing).unwrap();
    fill(inner.reader().model(), golden);
    inner.keep(5 * CHUNK + 1);
    let a = draw(200);
    let other = draw(200);
    let mut slots = Faulty { inner, fault, kept: vec![], first: a[..CHUNK].to_vec() };
    let mut texts = vec![];
    let mut taken = vec![];
    let mut next = |prompt: Vec<u32>, leaves: usize| {
        taken.push(pass(&mut slots, &prompt, leaves, &mut texts));
        let held = slots.inner.held();
        assert!(held.tokens == 0 && held.kept <= 5 * CHUNK && held.kept.is_multiple_of(CHUNK), "{held:?}");
    };
    next(a.clone(), 200);
    // Alike up to the middle of the third page; the whole of the second; less than a page.
    next([&a[..150], &draw(40)].concat(), 200);
    next([&a[..129], &draw(3)].concat(), 200);
    next(a[..128].to_vec(), 200);
    next(a[..60].to_vec(), 200);
    // A page that was read after others.
    next([&other[..64], &a[64..130]].concat(), 200);
    // One leaves when a chunk of it is read, and serves.
    next(other.clone(), 65);
    next([&other[..128], &draw(30)].concat(), 200);
    next(other.clone(), 200);
    // The pages that were used longest ago have made room.
    next(a.clone(), 200);
    let mut alone = Alone::new(golden, &spec);
    texts.iter().try_for_each(|text| alone.same(text))?;
    Ok(taken)
}

/// Tokens that the prompts of [`one_after_another`] can take over.
const TAKEN: [usize; 10] = [0, 128, 128, 64, 0, 0, 64, 128, 128, 64];

/// The compositions of components, and wirings whose caches are others' than those of one token and
/// one application.
fn with_caches() -> Vec<Golden> {
    let more = ["latent", "kv_first", "moda", "yoco", "cross_layer_kv", "ouro", "value_residual"];
    goldens().into_iter().chain(more.map(golden)).collect()
}

#[test]
fn texts_that_come_and_go_have_the_bits_that_they_have_alone() {
    let (mut adopted, mut wrong) = (0, vec![]);
    for golden in goldens() {
        match come_and_go(&golden, Fault::Nothing, 0) {
            Ok(tokens) => adopted += tokens,
            Err(place) => wrong.push(place),
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(adopted > 0, "no beginning was read once for two texts");
}

#[test]
fn prompts_that_begin_alike_are_read_once() {
    let mut wrong = vec![];
    for golden in with_caches() {
        match one_after_another(&golden, Fault::Nothing) {
            Ok(taken) if taken == TAKEN => {}
            Ok(taken) => wrong.push(format!("{}: {taken:?} tokens were taken over", golden.name)),
            Err(place) => wrong.push(place),
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn faults_in_rows_change_bits() {
    for fault in [Fault::Swapped, Fault::Kept, Fault::Adopted, Fault::Deaf, Fault::Before, Fault::Behind] {
        assert!(come_and_go(&golden("la"), fault, 256).is_err(), "{fault:?} is not noticed");
    }
    for (fault, name) in [
        (Fault::Adopted, "la"),
        (Fault::Elsewhere, "la"),
        (Fault::Short, "dr_da"),
        (Fault::Stale, "dr_da"),
        (Fault::Unmarked, "mod_recur"),
    ] {
        assert!(one_after_another(&golden(name), fault).is_err(), "{fault:?} is not noticed");
    }
}

/// A top-k router without a causal rule looks at later tokens: its loss can be measured, and
/// nothing can be asked of it.
#[test]
fn a_model_that_looks_ahead_is_measured_and_never_asked() {
    let model = |skip: &str| {
        format!(
            "model: {{name: ahead, vocab: 256, hidden: 8, context: 32, components: {{sa: {{sequence: {{heads: 1}}}}}}, \
             body: [\"skip(capacity 0.5{skip}) {{ sa }}\"]}}\ndata: {{task: permutation, size: 3, max_steps: 1}}\n\
             train: {{steps: 2, batch: 2, sequence: 16, precision: f32}}\neval: {{examples: 4}}\n"
        )
    };
    let sandbox = Sandbox::with(&[
        ("ahead.yaml", &model("")),
        ("causal.yaml", &model(", causal bce 0.1")),
        ("rows.jsonl", "{\"prompt\": \"a\", \"choices\": [\"b\", \"c\"], \"answer\": 0}\n"),
    ]);
    const SAYS: &str =
        "this model can be trained and evaluated but not sampled: a `skip` of it looks at later tokens";
    sandbox.good(&["train", "ahead.yaml", "--out", "ahead"]);
    sandbox.good(&["train", "causal.yaml", "--out", "causal"]);
    for ask in [&["--examples", "4"][..], &["--choices", "rows.jsonl"]] {
        let error = sandbox.error(&[&["eval", "ahead"][..], ask].concat());
        assert!(error.contains(SAYS) && error.contains("causal bce"), "{error}");
        sandbox.good(&[&["eval", "causal"][..], ask].concat());
    }
    let error = sandbox.error(&["generate", "ahead", "a"]);
    assert!(error.contains(SAYS), "{error}");
    let said = sandbox.good(&["eval", "ahead"]);
    assert!(
        said.contains("loss") && said.contains("this is the loss of training, and no answers are scored"),
        "{said}"
    );
    let found: serde_json::Value = serde_json::from_str(&sandbox.good(&["eval", "ahead", "--json"])).unwrap();
    let (ahead, exact) = (&found[0]["looks_ahead"], &found[0]["exact_match"]);
    assert!(*ahead == true && exact.is_null(), "{found}");
    let found: serde_json::Value =
        serde_json::from_str(&sandbox.good(&["eval", "causal", "--json"])).unwrap();
    assert!(found[0]["looks_ahead"] == false && found[0]["exact_match"].is_number(), "{found}");
}

//! Every target of `fuzz/` on the corpus and on changed copies of it: no panic, and no more memory
//! and time than bounded.
//!
//! `DREAMC_FUZZ_INPUTS` is how many inputs a target gets (the language five times as many, and the
//! corpus comes on top), `DREAMC_SEED` the seed, `DREAMC_FUZZ_TARGET` the only target to try,
//! `DREAMC_FUZZ_INPUT` a file to try in place of all that. The input that is being tried is in the
//! file that is named at the beginning, whatever becomes of the process. Earlier finds are in the
//! corpus as `found-*`.

#[path = "../../fuzz/src/lib.rs"]
mod targets;

mod bounds;
mod mutate;

use dreamc_data::rng::Philox;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};
use targets::{TARGETS, Target};

#[global_allocator]
static ALLOCATOR: bounds::Counting = bounds::Counting;

/// Bytes that an input may take: the largest arenas of a corpus of small models stay far below.
const MEMORY: usize = 256 << 20;

/// Time that an input may take, with room for builds without optimisation and for slow machines.
const TIME: Duration = Duration::from_secs(10);

fn setting<T: std::str::FromStr>(name: &str, otherwise: T) -> T {
    std::env::var(name).map_or(otherwise, |text| text.parse().ok().expect("a number"))
}

fn corpus(target: &Target) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus").join(target.name);
    let mut paths: Vec<PathBuf> =
        fs::read_dir(&folder).expect("a folder of inputs").map(|e| e.unwrap().path()).collect();
    paths.sort();
    assert!(!paths.is_empty(), "{} is empty", folder.display());
    paths.into_iter().map(|path| (path.clone(), fs::read(path).unwrap())).collect()
}

/// The thread whose panics are kept as text; the other tests of this program print theirs.
const THREAD: &str = "fuzz";

/// The last panic of an input, as text.
static PANIC: Mutex<String> = Mutex::new(String::new());

/// Since when the input at hand is tried; `None` between two.
static BEGUN: Mutex<Option<Instant>> = Mutex::new(None);

/// Ends the process when an input does not end by itself.
fn watch() {
    loop {
        std::thread::sleep(Duration::from_secs(1));
        if BEGUN.lock().unwrap().is_some_and(|begun| begun.elapsed() > 12 * TIME) {
            eprintln!("the input at hand does not end");
            std::process::abort();
        }
    }
}

/// Tries inputs one after another, and keeps the one at hand where it can be found.
struct Trial {
    target: Target,
    path: PathBuf,
    file: File,
}

impl Trial {
    fn new(target: Target) -> Self {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fuzz-{}", target.name));
        let file = File::create(&path).unwrap();
        println!("{}: the input at hand is {}", target.name, path.display());
        Trial { target, path, file }
    }

    fn run(&self, data: &[u8], what: &str) -> Result<(), String> {
        self.file.set_len(data.len() as u64).and_then(|()| self.file.write_all_at(data, 0)).unwrap();
        let call = || panic::catch_unwind(AssertUnwindSafe(|| (self.target.run)(data)));
        *BEGUN.lock().unwrap() = Some(Instant::now());
        let (result, taken) = bounds::measure(call);
        *BEGUN.lock().unwrap() = None;
        let problem = match result {
            Err(_) => PANIC.lock().unwrap().clone(),
            Ok(()) if taken.bytes > MEMORY => format!("took {} bytes", taken.bytes),
            Ok(()) if taken.time > TIME => format!("took {:?}", taken.time),
            Ok(()) => return Ok(()),
        };
        let kept = self.path.with_extension(&blake3::hash(data).to_hex()[..8]);
        fs::write(&kept, data).unwrap();
        Err(format!("{}, {what}: {problem}\nthe input is kept as {}", self.target.name, kept.display()))
    }
}

#[test]
fn nothing_from_outside_panics_or_takes_without_bound() {
    let seed: u64 = setting("DREAMC_SEED", 1);
    let inputs: u64 = setting("DREAMC_FUZZ_INPUTS", 400);
    let only = std::env::var("DREAMC_FUZZ_TARGET").ok();
    println!("DREAMC_SEED={seed} DREAMC_FUZZ_INPUTS={inputs}");
    let others = panic::take_hook();
    panic::set_hook(Box::new(move |info| match std::thread::current().name() {
        Some(THREAD) => *PANIC.lock().unwrap() = info.to_string(),
        _ => others(info),
    }));
    std::thread::spawn(watch);
    // The stack that the main thread of the program has on Linux.
    let thread = std::thread::Builder::new().name(THREAD.into()).stack_size(8 << 20).spawn(move || {
        let mut problems = vec![];
        for target in TARGETS.into_iter().filter(|t| only.as_deref().is_none_or(|name| name == t.name)) {
            let trial = Trial::new(target);
            if let Ok(path) = std::env::var("DREAMC_FUZZ_INPUT") {
                problems.extend(trial.run(&fs::read(&path).unwrap(), &path).err());
                continue;
            }
            let begun = Instant::now();
            let corpus = corpus(&target);
            for (path, data) in &corpus {
                problems.extend(trial.run(data, &path.display().to_string()).err());
            }
            let seeds: Vec<Vec<u8>> = corpus.into_iter().map(|(_, data)| data).collect();
            let random = Philox::new(seed, target.name);
            // The language is what people write by hand, and is read in a millisecond.
            let inputs = if ["yaml", "dream"].contains(&target.name) { 5 * inputs } else { inputs };
            for i in 0..inputs {
                let data = mutate::mutate(&seeds, &mut random.stream(i));
                problems.extend(trial.run(&data, &format!("input {i} of seed {seed}")).err());
                if problems.len() >= 20 {
                    return problems;
                }
            }
            println!("{}: {inputs} inputs in {:?}", target.name, begun.elapsed());
        }
        problems
    });
    let problems = thread.unwrap().join().unwrap();
    assert!(problems.is_empty(), "{}", problems.join("\n\n"));
}

//! Recording, on a GPU that only writes down its calls.

use super::launch::Launch;
use super::{Generated, Gpu, Trust};
use crate::executor::{Executor, Graphs};
use crate::{DeviceError, Group, Instrument, Session};
use dreamc_compiler::codegen::{Source, Variant};
use dreamc_compiler::program::Plan;
use dreamc_compiler::{Cache, Options, compile};
use std::collections::HashMap;
use std::convert::Infallible;
use std::path::Path;
use std::sync::{Arc, Mutex};

/// Its calls, each launch with the address of its code.
#[derive(Default)]
struct Log {
    launches: Vec<(usize, Launch)>,
    replays: usize,
    /// Marks of the clock, with the launches before each.
    marks: Vec<(usize, usize)>,
    waits: usize,
}

struct Writer {
    log: Arc<Mutex<Log>>,
    memory: HashMap<u64, u8>,
    next: u64,
    recording: bool,
    /// Why recordings fail.
    refuses: Option<&'static str>,
}

impl Writer {
    fn error(&self, message: &str) -> DeviceError {
        DeviceError::Driver { device: "writer".into(), message: message.into() }
    }
}

impl Gpu for Writer {
    type Module = usize;
    type Graph = Vec<(usize, Launch)>;
    type Product = Infallible;

    const SYNCHRONOUS: bool = false;
    const RECORDS: bool = true;

    fn name(&self) -> &str {
        "writer"
    }

    fn allocate(&mut self, bytes: u64, _: &'static str) -> Result<u64, DeviceError> {
        self.next += bytes.next_multiple_of(256) + 256;
        Ok(self.next - bytes.next_multiple_of(256))
    }

    fn load(&mut self, source: &Source, _: &[u8]) -> Result<usize, DeviceError> {
        Ok(source.text.len())
    }

    fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.memory.extend(bytes.iter().enumerate().map(|(i, b)| (address + i as u64, *b)));
        Ok(())
    }

    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        for (i, byte) in bytes.iter_mut().enumerate() {
            *byte = self.memory.get(&(address + i as u64)).copied().unwrap_or(0);
        }
        Ok(())
    }

    fn launch(&mut self, module: &usize, launch: &Launch, _: &str) -> Result<(), DeviceError> {
        self.log.lock().unwrap().launches.push((*module, launch.clone()));
        Ok(())
    }

    fn record(&mut self) -> Result<(), DeviceError> {
        self.recording = true;
        Ok(())
    }

    fn recorded(&mut self) -> Result<Self::Graph, DeviceError> {
        assert!(std::mem::take(&mut self.recording), "nothing is recorded");
        match self.refuses {
            Some(why) => Err(self.error(why)),
            None => Ok(self.log.lock().unwrap().launches.clone()),
        }
    }

    fn replay(&mut self, _: &Self::Graph) -> Result<(), DeviceError> {
        assert!(!self.recording, "a recording is replayed while it is made");
        self.log.lock().unwrap().replays += 1;
        Ok(())
    }

    fn mark(&mut self, number: usize) -> Result<bool, DeviceError> {
        let mut log = self.log.lock().unwrap();
        let launches = log.launches.len();
        log.marks.push((number, launches));
        Ok(true)
    }

    fn between(&mut self, from: usize, to: usize) -> Result<f64, DeviceError> {
        assert_eq!((from % 2, to), (0, from + 1));
        Ok(1e-6)
    }

    fn finish(&mut self) -> Result<(), DeviceError> {
        self.log.lock().unwrap().waits += 1;
        Ok(())
    }
}

fn load(plan: &Plan, graphs: Graphs, refuses: Option<&'static str>) -> (Box<dyn Session>, Arc<Mutex<Log>>) {
    let log = Arc::new(Mutex::new(Log::default()));
    let writer = Writer { log: log.clone(), memory: HashMap::new(), next: 4096, recording: false, refuses };
    let compile = |sources: &[&Source]| Ok(vec![vec![]; sources.len()]);
    let made = Executor::new(plan, &Group::alone(), graphs, |programs| {
        let texts = Variant { hopper: true, ..Variant::default() };
        Generated::new(writer, (texts, &Trust::default()), plan, programs, &compile)
    });
    (Box::new(made.unwrap()), log)
}

/// Plans of `models` golden models: training, and generation.
fn plans(models: usize) -> Vec<(String, Plan)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/goldens");
    let mut list = vec![];
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    for path in files.iter().filter(|p| p.extension().is_some_and(|e| e == "yaml")).take(models) {
        let spec = dreamc_dsl::load(path, &[]).unwrap().0;
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let options = Options { batch: 2, sequence: 8, train: true, ..Options::default() };
        let cache = Some(Cache { places: 12, chunk: 4, slack: f64::INFINITY, every: false });
        let writing = Options { sequence: 4, train: false, cache, ..options.clone() };
        for (kind, options) in [("training", options), ("writing", writing)] {
            list.push((format!("{name}, {kind}"), compile(&spec, &options).unwrap().plan));
        }
    }
    assert!(list.len() >= 2 * models.min(16));
    list
}

/// The same kernels with the same arguments run after run, whatever the host writes in between:
/// what a graph holds.
#[test]
fn no_argument_changes_between_two_runs() {
    for (name, plan) in plans(usize::MAX) {
        let (mut session, log) = load(&plan, Graphs::Off, None);
        for &program in plan.programs.keys() {
            let mut runs = vec![];
            for run in 0..3u8 {
                for (i, b) in plan.buffers.iter().enumerate().filter(|(_, b)| b.bytes() > 0) {
                    let bytes = vec![run; (b.elements() * b.dtype.bytes()) as usize];
                    session.write(dreamc_compiler::program::BufferId(i as u32), 0, 0, &bytes).unwrap();
                }
                session.run(program).unwrap();
                runs.push(std::mem::take(&mut log.lock().unwrap().launches));
            }
            assert!(!runs[0].is_empty(), "{name}: {program} launches nothing");
            assert!(runs.iter().all(|run| *run == runs[0]), "{name}: {program} launches something else");
        }
    }
}

#[test]
fn the_second_run_is_recorded_and_the_third_replayed() {
    let (name, plan) = plans(1).remove(0);
    let program = *plan.programs.keys().next().unwrap();
    let (mut session, log) = load(&plan, Graphs::Try, None);
    let mut seen = vec![];
    for _ in 0..4 {
        let stats = session.run(program).unwrap();
        let mut log = log.lock().unwrap();
        seen.push((
            std::mem::take(&mut log.launches).len(),
            std::mem::take(&mut log.replays),
            stats.replayed,
        ));
        assert!(stats.launches > 0, "{name}");
    }
    let all = seen[0].0;
    assert!(all > 0);
    // Launched; recorded and replayed; replayed.
    assert_eq!(seen, [(all, 0, false), (all, 1, true), (0, 1, true), (0, 1, true)]);
    // A run that is measured is launched.
    session.instrument(Instrument { count: false, time: true });
    let stats = session.run(program).unwrap();
    assert!(!stats.replayed && log.lock().unwrap().launches.len() == all);
    session.instrument(Instrument::default());
    assert!(session.run(program).unwrap().replayed);
}

/// A timed launch stands between two marks of the device's clock, and the host waits at the end
/// alone.
#[test]
fn launches_are_timed_by_the_clock_of_the_device() {
    let (name, plan) = plans(1).remove(0);
    let program = *plan.programs.keys().next().unwrap();
    let (mut session, log) = load(&plan, Graphs::Off, None);
    session.instrument(Instrument { count: false, time: true });
    let waits = log.lock().unwrap().waits;
    let stats = session.run(program).unwrap();
    let log = log.lock().unwrap();
    assert_eq!(log.waits, waits + 1, "{name}");
    assert_eq!(log.marks.len() as u64, 2 * stats.launches);
    assert!(log.marks.iter().enumerate().all(|(i, &(number, _))| number == i));
    let apart = log.marks.chunks(2).map(|pair| pair[1].1 - pair[0].1).sum::<usize>();
    assert_eq!(apart, log.launches.len(), "kernels between marks");
    for launch in &stats.by_launch {
        assert!((launch.seconds - 1e-6 * launch.count as f64).abs() < 1e-12, "{}", launch.origin);
    }
}

/// A run that is counted is launched; the ones after it are replayed and say the same.
#[test]
fn counts_are_repeated_between_recordings() {
    let (name, plan) = plans(1).remove(0);
    let program = *plan.programs.keys().next().unwrap();
    let (mut session, _) = load(&plan, Graphs::Try, None);
    session.instrument(Instrument { count: true, time: false });
    let runs: Vec<_> = (0..130).map(|_| session.run(program).unwrap()).collect();
    let launched = |i: usize| !runs[i].replayed;
    assert_eq!((0..130).filter(|&i| launched(i)).collect::<Vec<_>>(), [0, 64, 128], "{name}");
    assert!(runs.iter().all(|r| r.multiply_adds() == runs[0].multiply_adds() && r.multiply_adds() > 0));
}

#[test]
fn what_cannot_be_recorded_is_launched() {
    let (_, plan) = plans(1).remove(0);
    let program = *plan.programs.keys().next().unwrap();
    let (mut session, log) = load(&plan, Graphs::Try, Some("a graph with a hole"));
    let run = |session: &mut dyn Session| {
        let stats = session.run(program).unwrap();
        (stats.launches, stats.replayed, std::mem::take(&mut log.lock().unwrap().launches).len())
    };
    let (launches, _, plain) = run(session.as_mut());
    // The recording did not run, so its launches run once more, and are never recorded again.
    assert_eq!(run(session.as_mut()), (launches, false, 2 * plain));
    assert_eq!(run(session.as_mut()), (launches, false, plain));

    let (mut session, _) = load(&plan, Graphs::Must, Some("a graph with a hole"));
    session.run(program).unwrap();
    let error = session.run(program).unwrap_err().to_string();
    assert!(error.contains("a graph with a hole"), "{error}");

    let (mut session, log) = load(&plan, Graphs::Off, None);
    for _ in 0..3 {
        session.run(program).unwrap();
    }
    let log = log.lock().unwrap();
    assert_eq!((log.launches.len(), log.replays), (3 * plain, 0));
}

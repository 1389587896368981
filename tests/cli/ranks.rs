//! Several ranks train what one trains, whatever starts them and whoever of them is killed.

use crate::support::root;
use crate::support::sandbox::{Sandbox, bits, metrics, texts};
use dreamc_skip::skip;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Every kind of step: micro-batches, evaluations, a best checkpoint, random depth, experts whose
/// choices are counted, tokens that skip.
const SPEC: &str = "\
model:
  name: ranked
  vocab: 256
  hidden: 8
  context: 32
  components:
    sa: {sequence: {heads: 1, head_size: 8}}
    ea: {experts: {count: 4, active: 2, intermediate: 4, query: 4}}
  body: [{recur: 3, layers: [\"sa > ea\"]}, \"skip(capacity 0.5, causal bce 0.1) { sa }\"]
data: {text: book.txt}
train: {steps: 8, batch: 8, accumulate: 4, sequence: 16, precision: f32, random_depth: {min: 1, max: 3},
        checkpoint: {every: 2, keep: 9, best: true}, evaluate: {every: 2, batches: 2}}
";

/// Seconds after which a rank gives up one that it never met.
const PATIENCE: u64 = 15;

/// Other ranks end within this of the death of one: the rest of a step or, where they had not met,
/// the time-out.
pub const SOON: Duration = Duration::from_secs(PATIENCE + 25);

pub fn sandbox() -> Sandbox {
    let book = "the quick brown fox jumps over the lazy dog\n".repeat(60);
    Sandbox::with(&[("ranked.yaml", SPEC), ("book.txt", &book)])
}

/// The losses of steps and evaluations.
fn losses(run: &Path) -> Vec<(u64, f64)> {
    let loss = |line: &Value| {
        let loss = line["loss"].as_f64().or(line["validation_loss"].as_f64());
        (line["step"].as_u64().unwrap(), loss.unwrap())
    };
    metrics(run).iter().map(loss).collect()
}

/// Bits of tensors and states after a step, without the headers of their files, which have the
/// specification.
pub fn numbers(run: &Path, step: u64) -> Vec<Vec<u8>> {
    let behind = |file: Vec<u8>| {
        let header = u64::from_le_bytes(file[..8].try_into().unwrap());
        file[8 + header as usize..].to_vec()
    };
    bits(run, step).into_iter().map(behind).collect()
}

/// That losses are apart by no more than the rounding of sums in another order, which updates
/// carry on.
fn close(found: &[(u64, f64)], expected: &[(u64, f64)]) {
    assert_eq!(found.len(), expected.len());
    for ((step, a), (of, b)) in found.iter().zip(expected) {
        assert_eq!(step, of);
        assert!((a - b).abs() <= 1e-3 * b.abs(), "step {step}: {a} and {b}");
    }
}

/// A rank as torchrun starts it.
pub fn rank(sandbox: &Sandbox, line: &[&str], rank: u64, size: u64, port: u16) -> Command {
    let mut command = sandbox.command(line);
    command.env("RANK", rank.to_string()).env("WORLD_SIZE", size.to_string());
    command.env("LOCAL_RANK", rank.to_string()).env("LOCAL_WORLD_SIZE", size.to_string());
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    command.env("DREAMC_RANK_TIMEOUT", PATIENCE.to_string());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

pub fn port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Exit code and error output of a process that ends soon.
pub fn ends(mut child: Child, soon: Duration) -> (Option<i32>, String) {
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begun.elapsed() > soon {
            child.kill().unwrap();
            panic!("still there after {soon:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output().unwrap();
    (output.status.code(), texts(&output).1)
}

#[test]
fn ranks_train_what_one_trains_and_any_number_goes_on() {
    let s = sandbox();
    s.good(&["train", "ranked.yaml", "--out", "one"]);
    let out = s.good(&["launch", "-n", "4", "train", "ranked.yaml", "--out", "four"]);
    assert_eq!(out.matches("finished after 8 steps").count(), 1, "{out}");
    assert!(out.contains("ranks") && out.contains("4, one micro-batch of a step each"), "{out}");
    let (one, four) = (s.path("one"), s.path("four"));
    close(&losses(&four), &losses(&one));
    let ledger = |run: &str| serde_json::from_str::<Value>(&s.read(&format!("{run}/ledger.json"))).unwrap();
    let (a, b) = (ledger("one"), ledger("four"));
    assert_eq!((&b["ranks"], &b["status"]), (&Value::from(4), &Value::from("finished")));
    for equal in ["executed_flops", "tokens", "targets", "validation_targets", "data_hash"] {
        assert_eq!(a[equal], b[equal], "{equal}");
    }
    assert!(a.get("ranks").is_none(), "one rank is no group");
    // As many ranks give the same bits.
    s.good(&["launch", "-n", "4", "train", "ranked.yaml", "--out", "again"]);
    assert_eq!(bits(&s.path("again"), 8), bits(&four, 8));
    assert_eq!(metrics(&s.path("again")), metrics(&four));
    // A checkpoint of four goes on with two, and with one.
    for (ranks, run) in [("2", "two"), ("1", "alone")] {
        let copied = Command::new("cp").arg("-r").arg(&four).arg(s.path(run)).status().unwrap();
        assert!(copied.success());
        for step in [6, 8] {
            std::fs::remove_dir_all(s.path(run).join(format!("checkpoints/step-{step:08}"))).unwrap();
        }
        s.good(&["launch", "-n", ranks, "resume", run]);
        close(&losses(&s.path(run)), &losses(&one));
    }
}

#[test]
fn states_that_are_cut_over_ranks_give_the_bits_of_whole_ones() {
    cut_over_ranks("optimizer");
}

#[test]
fn weights_that_are_cut_over_ranks_give_the_bits_of_whole_ones() {
    cut_over_ranks("weights");
}

fn cut_over_ranks(shard: &str) {
    let s = sandbox();
    let four = ["launch", "-n", "4", "train", "ranked.yaml", "--out"];
    let shard = format!("train.parallel.shard={shard}");
    // Muon moves whole matrices, so that parts of ranks have two kinds of cuts.
    let set = ["--set", "train.optimizer=muon", "--set", &shard];
    let out = s.good(&[&four[..], &["cut"], &set].concat());
    assert!(out.contains("cut over the ranks: "), "{out}");
    s.good(&[&four[..], &["whole"], &set[..2]].concat());
    let (cut, whole) = (s.path("cut"), s.path("whole"));
    // The specification says so; tensors, states and losses are the same.
    assert_eq!(numbers(&cut, 8), numbers(&whole, 8));
    assert_eq!(metrics(&cut), metrics(&whole));
    let memory = |run: &str| {
        let ledger = serde_json::from_str::<Value>(&s.read(&format!("{run}/ledger.json"))).unwrap();
        ledger["peak_memory"].as_u64().unwrap()
    };
    assert!(memory("cut") < memory("whole"), "{} and {}", memory("cut"), memory("whole"));
    // A checkpoint of four goes on with two, and with one, which has all states.
    for (ranks, run) in [("2", "two"), ("1", "alone")] {
        let copied = Command::new("cp").arg("-r").arg(&cut).arg(s.path(run)).status().unwrap();
        assert!(copied.success());
        for step in [6, 8] {
            std::fs::remove_dir_all(s.path(run).join(format!("checkpoints/step-{step:08}"))).unwrap();
        }
        s.good(&["launch", "-n", ranks, "resume", run]);
        close(&losses(&s.path(run)), &losses(&cut));
    }
}

/// Ranks that own experts together train what ranks with all experts train, in less memory, whole
/// or with weights cut as well, and any form of ranks goes on with their checkpoints.
#[test]
fn experts_that_ranks_share_train_what_whole_ones_train() {
    let s = sandbox();
    let four = ["launch", "-n", "4", "train", "ranked.yaml", "--out"];
    // Attentions that recur have as many projections as all ranks can share.
    let all = [
        "--set",
        "model.components.sa.sequence.projection={count: 4}",
        "--set",
        // More experts than the rows of their turns and two sets of windows take room.
        "model.components.ea.experts.count=128",
        "--set",
        "model.components.ea.experts.intermediate=64",
    ];
    let line = |run, sets: &[&'static str]| {
        let sets = sets.iter().flat_map(|set| ["--set", set]);
        four.into_iter().chain([run]).chain(all).chain(sets).collect::<Vec<_>>()
    };
    s.good(&line("whole", &[]));
    let out = s.good(&line("shared", &["train.parallel.experts=4"]));
    assert!(out.contains("experts") && out.contains("owned by 4 ranks together"), "{out}");
    s.good(&line("again", &["train.parallel.experts=4"]));
    s.good(&line("teams", &["train.parallel={experts: 2, shard: weights}"]));
    let memory = |run: &str| {
        let ledger = serde_json::from_str::<Value>(&s.read(&format!("{run}/ledger.json"))).unwrap();
        ledger["peak_memory"].as_u64().unwrap()
    };
    for run in ["shared", "teams"] {
        close(&losses(&s.path(run)), &losses(&s.path("whole")));
        assert!(memory(run) < memory("whole"), "{run}: {} and {}", memory(run), memory("whole"));
    }
    assert_eq!(bits(&s.path("again"), 8), bits(&s.path("shared"), 8));
    // One process, ranks with all experts, and a team of two go on.
    let goes_on = [("alone", "1", "4"), ("apart", "4", "1"), ("two", "2", "2")];
    for (run, ranks, experts) in goes_on {
        let copied = Command::new("cp").arg("-r").arg(s.path("shared")).arg(s.path(run)).status().unwrap();
        assert!(copied.success());
        for step in [6, 8] {
            std::fs::remove_dir_all(s.path(run).join(format!("checkpoints/step-{step:08}"))).unwrap();
        }
        let set = format!("train.parallel.experts={experts}");
        s.good(&["launch", "-n", ranks, "resume", run, "--set", &set]);
        close(&losses(&s.path(run)), &losses(&s.path("whole")));
    }
}

#[test]
fn experts_that_ranks_cannot_share_are_refused() {
    let s = sandbox();
    let refused = |ranks: &str, set: &str| {
        let error = s.error(&["launch", "-n", ranks, "train", "ranked.yaml", "--set", set, "--out", "run"]);
        assert!(!s.path("run").exists(), "a refusal changes nothing");
        error
    };
    let error = refused("2", "train.parallel.experts=4");
    assert!(error.contains("train.parallel.experts is 4, and 2 ranks are no multiple of it"), "{error}");
    let error = refused("4", "train.parallel={data: 4, experts: 3}");
    assert!(error.contains("teams of 3 ranks do not fill 4 ranks"), "{error}");
    // The attention of a layer that recurs three times has three projections.
    let error = refused("2", "train.parallel.experts=2");
    assert!(error.contains("2 ranks cannot own the 3 experts of `sa.qkv.weight` equally"), "{error}");
}

#[test]
fn another_number_of_ranks_than_the_recipe_has_is_refused() {
    let s = sandbox();
    let line =
        ["launch", "-n", "2", "train", "ranked.yaml", "--set", "train.parallel.data=4", "--out", "run"];
    let error = s.error(&line);
    assert!(error.contains("train.parallel.data is 4, and there are 2 ranks"), "{error}");
    assert!(!s.path("run").exists(), "a refusal changes nothing");
}

#[test]
fn what_would_not_be_one_training_is_refused_before_it_begins() {
    let s = sandbox();
    let error = s.error(&["launch", "-n", "3", "train", "ranked.yaml", "--out", "run"]);
    assert!(error.contains("3 ranks share the micro-batches of a step equally"), "{error}");
    assert!(error.contains("train.accumulate is 4"), "{error}");
    let error = s.error(&["launch", "-n", "2", "eval", "run"]);
    assert!(error.contains("`train` and `resume`"), "{error}");
    let port = port();
    let line = |lr| ["train", "ranked.yaml", "--out", "run", "--set", lr];
    let first = rank(&s, &line("train.learning_rate=1e-3"), 0, 2, port).spawn().unwrap();
    let second = rank(&s, &line("train.learning_rate=2e-3"), 1, 2, port).spawn().unwrap();
    let said = [ends(first, SOON), ends(second, SOON)];
    for (code, error) in &said {
        assert_eq!(*code, Some(1), "{said:?}");
        assert!(error.contains("rank 1 has another specification than rank 0"), "{said:?}");
    }
    let mut half = s.command(&line("train.steps=1"));
    let half = half.env("RANK", "0").output().unwrap();
    assert!(texts(&half).1.contains("RANK is set and WORLD_SIZE is not"), "{half:?}");
    assert!(!s.path("run").exists(), "a refusal changes nothing");
}

pub fn setting(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |text| text.parse().expect("a number"))
}

/// Numbers that follow from a seed (SplitMix64).
pub struct Dice(pub u64);

impl Dice {
    pub fn below(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % sides.max(1)
    }
}

/// Kills one of three ranks at `of_one` random moments of a run, and all of them at `of_all`
/// others: the others end with the reason, and the run goes on to the bits of one that was left
/// alone.
fn kill(of_one: u64, of_all: u64) {
    let s = sandbox();
    let seed = setting("DREAMC_SEED", std::process::id().into());
    println!("DREAMC_SEED={seed}: {of_one} kills of one rank, {of_all} of all");
    let mut dice = Dice(seed);
    let line = ["train", "ranked.yaml", "--set", "train.batch=24", "--set", "train.accumulate=12", "--out"];
    let begun = Instant::now();
    s.good(&[&["launch", "-n", "3"][..], &line, &["whole"]].concat());
    let lasts = begun.elapsed().as_millis() as u64;
    let mut slowest = Duration::ZERO;
    for kill in 0..of_one + of_all {
        let run = format!("killed-{kill}");
        let port = port();
        // With states cut over the ranks every second time.
        let shard = if kill % 2 == 0 { "none" } else { "optimizer" };
        let shard = ["--set".into(), format!("train.parallel.shard={shard}")];
        let line = [&line[..], &[&run, &shard[0], &shard[1]]].concat();
        let mut ranks: Vec<Child> = (0..3).map(|r| rank(&s, &line, r, 3, port).spawn().unwrap()).collect();
        // From before they meet to the end.
        let (moment, dies) = (dice.below(lasts), dice.below(3));
        std::thread::sleep(Duration::from_millis(moment));
        let dead: Vec<Child> =
            if kill < of_one { vec![ranks.remove(dies as usize)] } else { std::mem::take(&mut ranks) };
        for mut dead in dead {
            dead.kill().unwrap();
            dead.wait().unwrap();
        }
        let killed = Instant::now();
        for child in ranks {
            let (code, error) = ends(child, SOON);
            // It may have come to its end before.
            let words = [
                "ended without a word",
                "failed: rank",
                "has not answered",
                "does not answer",
                "no sign of life",
            ];
            let names = words.iter().any(|words| error.contains(words));
            assert!(code == Some(0) || (code == Some(1) && names), "{kill}: {code:?} {error}");
        }
        slowest = slowest.max(killed.elapsed());
        let begins = !s.path(&run).join("spec.yaml").exists();
        let again = if begins { line } else { vec!["resume", &run] };
        s.good(&[&["launch", "-n", "3"][..], &again].concat());
        let words = format!("kill {kill} after {moment} ms, DREAMC_SEED={seed}");
        assert_eq!(numbers(&s.path(&run), 8), numbers(&s.path("whole"), 8), "{words}");
        assert_eq!(metrics(&s.path(&run)), metrics(&s.path("whole")), "{words}");
    }
    println!("the others ended within {slowest:?}; all took {:?}", begun.elapsed());
}

#[test]
fn a_rank_that_is_killed_ends_the_others_and_the_run_goes_on_to_the_same_bits() {
    kill(setting("DREAMC_KILLS", 3), 1);
}

/// `cargo test --test cli ranks::thirty -- --ignored --nocapture` takes minutes.
#[test]
#[ignore = "takes minutes"]
fn thirty_kills_of_one_rank_and_ten_of_all() {
    kill(30, 10);
}

/// `cargo test --test cli ranks::two_hundred -- --ignored --nocapture` takes a quarter of an hour.
#[test]
#[ignore = "takes a quarter of an hour"]
fn two_hundred_kills_of_one_rank() {
    kill(setting("DREAMC_KILLS", 200), 0);
}

/// Faults of a network between the ranks and rank 0.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// Bytes come late, those of some ranks before those of others.
    Late,
    /// From some moment on nothing comes through, and nothing says so.
    Lost,
}

/// A network between ranks and rank 0, which listens at `to`: bytes are handed on in pieces, late
/// by a seed. One that loses them begins to after a random number of pieces.
fn network(to: u16, seed: u64, fault: Fault) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for (number, from) in (0u64..).zip(listener.incoming().flatten()) {
            let to = loop {
                match TcpStream::connect(("127.0.0.1", to)) {
                    Ok(stream) => break stream,
                    Err(_) => std::thread::sleep(Duration::from_millis(10)),
                }
            };
            let dice = |way: u64| Dice(seed ^ ((number * 2 + way) << 32));
            let ends = [(from.try_clone(), to.try_clone()), (to.try_clone(), from.try_clone())];
            for (way, ends) in (0u64..).zip(ends) {
                let (Ok(from), Ok(to)) = ends else { continue };
                let dice = dice(way);
                std::thread::spawn(move || hand_on(from, to, dice, fault));
            }
        }
    });
    port
}

fn hand_on(mut from: TcpStream, mut to: TcpStream, mut dice: Dice, fault: Fault) {
    let mut buffer = [0; 4096];
    let mut left = if fault == Fault::Lost { 20 + dice.below(200) } else { u64::MAX };
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        // Some connections stand for a while, so that frames of other ranks overtake theirs.
        match dice.below(40) {
            0 => std::thread::sleep(Duration::from_millis(dice.below(20))),
            1..8 => std::thread::sleep(Duration::from_micros(dice.below(2000))),
            _ => {}
        }
        left = left.saturating_sub(1);
        if left > 0 && to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    if left > 0 {
        let _ = to.shutdown(std::net::Shutdown::Write);
    }
}

/// Three ranks over a network with a fault.
fn over(s: &Sandbox, line: &[&str], seed: u64, fault: Fault) -> Vec<Child> {
    let port = port();
    let others = network(port, seed, fault);
    let at = |r: u64| if r == 0 { port } else { others };
    (0..3).map(|r| patient(rank(s, line, r, 3, at(r))).spawn().unwrap()).collect()
}

/// A rank that waits longer for work than for signs of life.
fn patient(mut rank: Command) -> Command {
    rank.env("DREAMC_RANK_TIMEOUT", "120");
    rank
}

#[test]
fn a_network_that_is_late_changes_nothing_and_one_that_loses_bytes_ends_all_ranks() {
    let s = sandbox();
    let seed = setting("DREAMC_SEED", std::process::id().into());
    println!("DREAMC_SEED={seed}");
    let line = ["train", "ranked.yaml", "--set", "train.batch=24", "--set", "train.accumulate=12", "--out"];
    s.good(&[&["launch", "-n", "3"][..], &line, &["whole"]].concat());
    for child in over(&s, &[&line[..], &["late"]].concat(), seed, Fault::Late) {
        let (code, error) = ends(child, 8 * SOON);
        assert_eq!(code, Some(0), "{error}");
    }
    let same = |run: &str| {
        assert_eq!(numbers(&s.path(run), 8), numbers(&s.path("whole"), 8), "{run}, DREAMC_SEED={seed}");
        assert_eq!(metrics(&s.path(run)), metrics(&s.path("whole")), "{run}, DREAMC_SEED={seed}");
    };
    same("late");
    let ranks = over(&s, &[&line[..], &["lost"]].concat(), seed, Fault::Lost);
    let begun = Instant::now();
    let found: Vec<_> = ranks.into_iter().map(|child| ends(child, 2 * SOON)).collect();
    for (code, error) in &found {
        assert_eq!(*code, Some(1), "{found:?}");
        assert!(["sign of life", "without a word"].iter().any(|words| error.contains(words)), "{found:?}");
    }
    println!("all ranks ended {:?} after the first was started", begun.elapsed());
    let begins = !s.path("lost").join("spec.yaml").exists();
    let again = if begins { [&line[..], &["lost"]].concat() } else { vec!["resume", "lost"] };
    s.good(&[&["launch", "-n", "3"][..], &again].concat());
    same("lost");
}

fn signal(child: &Child, name: &str) {
    let sent = Command::new("kill").args([&format!("-{name}"), &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
}

#[test]
fn a_rank_that_stands_still_ends_the_others_and_one_that_is_slow_is_named() {
    let s = sandbox();
    let port = port();
    let line = ["train", "ranked.yaml", "--set", "train.steps=100000", "--out", "run"];
    let mut first = patient(rank(&s, &line, 0, 2, port)).spawn().unwrap();
    let second = patient(rank(&s, &line, 1, 2, port)).spawn().unwrap();
    let mut said = BufReader::new(first.stderr.take().unwrap());
    let begun = Instant::now();
    let slow = std::thread::spawn(move || {
        let mut all = String::new();
        let mut line = String::new();
        while said.read_line(&mut line).is_ok_and(|n| n > 0) {
            all += &line;
            if line.contains("rank 1 is slow: its part of a step takes") {
                return (true, said);
            }
            line.clear();
        }
        println!("{all}");
        (false, said)
    });
    // A rank that has a fifth of its processor.
    while !slow.is_finished() && begun.elapsed() < 4 * SOON {
        signal(&second, "STOP");
        std::thread::sleep(Duration::from_millis(40));
        signal(&second, "CONT");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(slow.is_finished(), "a slow rank is not named");
    let (named, mut said) = slow.join().unwrap();
    assert!(named, "rank 0 ended and named no slow rank");
    signal(&second, "STOP");
    let stopped = Instant::now();
    let mut rest = String::new();
    said.read_to_string(&mut rest).unwrap();
    let code = first.wait().unwrap().code();
    assert!(stopped.elapsed() < Duration::from_secs(60), "{:?}", stopped.elapsed());
    assert!(code == Some(1) && rest.contains("rank 1 has given no sign of life"), "{code:?} {rest}");
    signal(&second, "CONT");
    let (code, error) = ends(second, SOON);
    assert!(code == Some(1) && error.contains("rank 1 has given no sign of life"), "{code:?} {error}");
}

#[test]
fn a_signal_to_the_launcher_leaves_a_checkpoint() {
    let s = sandbox();
    let line = ["launch", "-n", "2", "train", "ranked.yaml", "--set", "train.steps=100000", "--out", "run"];
    let child = s.command(&line).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    while !s.path("run/checkpoints/step-00000002").exists() {
        assert!(begun.elapsed() < 3 * SOON, "no step was taken");
        std::thread::sleep(Duration::from_millis(10));
    }
    let killed = Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    let (code, error) = ends(child, SOON);
    assert_eq!(code, Some(143), "{error}");
    let ledger: Value = serde_json::from_str(&s.read("run/ledger.json")).unwrap();
    assert_eq!(ledger["status"], "interrupted");
    assert!(s.path(&format!("run/checkpoints/step-{:08}", ledger["steps"].as_u64().unwrap())).exists());
}

/// Whether a program is installed; a test that lacks one says so.
fn installed(program: &str) -> bool {
    Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
}

#[test]
fn ranks_of_open_mpi_have_the_bits_of_the_others() {
    if !installed("mpirun") {
        return skip("mpirun of Open MPI is not installed");
    }
    let s = sandbox();
    s.good(&["launch", "-n", "4", "train", "ranked.yaml", "--out", "tcp"]);
    let mpirun = |line: &[&str]| {
        let dreamc = s.command(line);
        let mut command = Command::new("mpirun");
        command.args(["-n", "4", "--oversubscribe", "--allow-run-as-root"]).arg(dreamc.get_program());
        command.args(dreamc.get_args()).current_dir(s.path("")).env("DREAMC_CACHE", s.path("cache"));
        command.output().unwrap()
    };
    let output = mpirun(&["train", "ranked.yaml", "--out", "mpi"]);
    let (out, error) = texts(&output);
    assert!(output.status.success(), "{out}{error}");
    assert_eq!(out.matches("finished after 8 steps").count(), 1, "{out}");
    assert_eq!(bits(&s.path("mpi"), 8), bits(&s.path("tcp"), 8));
    assert_eq!(metrics(&s.path("mpi")), metrics(&s.path("tcp")));
    let shared =
        ["--set", "model.components.sa.sequence.projection={count: 4}", "--set", "train.parallel.experts=4"];
    let over =
        |start: &[&'static str], run| [start, &["train", "ranked.yaml", "--out", run], &shared].concat();
    s.good(&over(&["launch", "-n", "4"], "tcp-experts"));
    let output = mpirun(&over(&[], "mpi-experts"));
    assert!(output.status.success(), "{}", texts(&output).1);
    assert_eq!(bits(&s.path("mpi-experts"), 8), bits(&s.path("tcp-experts"), 8));
    // A refusal is reported; which ranks still can, mpirun decides.
    let output = mpirun(&["train", "ranked.yaml", "--out", "mpi"]);
    assert!(!output.status.success());
    assert!(texts(&output).1.contains("mpi exists already"), "{output:?}");
}

/// The script that torchrun starts on the page.
fn script() -> String {
    let page = std::fs::read_to_string(root("docs/scaling.md")).unwrap();
    let blocks = crate::book::blocks(&page).into_iter();
    let found: Vec<_> = blocks.filter(|block| block.text.contains("exec dreamc resume")).collect();
    assert_eq!(found.len(), 1, "docs/scaling.md has one script for torchrun");
    found[0].text.clone()
}

/// The process of a rank that torchrun started in a folder: a program's variables are its own from
/// its start on.
fn of_torchrun(folder: &Path, rank: u64) -> Option<String> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
    let mut ranks = processes.filter(|process| {
        let is = |name: &str, text: &str| {
            std::fs::read_to_string(process.join(name)).is_ok_and(|t| t.trim() == text)
        };
        let of = format!("RANK={rank}");
        let variables = std::fs::read(process.join("environ")).unwrap_or_default();
        is("comm", "dreamc")
            && std::fs::read_link(process.join("cwd")).is_ok_and(|cwd| cwd == folder)
            && variables.split(|byte| *byte == 0).any(|variable| variable == of.as_bytes())
    });
    Some(ranks.next()?.file_name()?.to_string_lossy().into_owned())
}

#[test]
fn a_rank_of_torchrun_that_is_killed_is_started_again_and_goes_on_to_the_same_bits() {
    let Some(python) = dreamc_skip::transformers() else { return };
    let torchrun = python.with_file_name("torchrun");
    let s = sandbox();
    let spec = SPEC.replace("steps: 8, batch: 8, accumulate: 4", "steps: 120, batch: 24, accumulate: 12");
    s.write("model.yaml", &spec.replace("every: 2, keep: 9", "every: 20, keep: 99"));
    s.write("ranks.sh", &script());
    s.good(&["launch", "-n", "2", "train", "model.yaml", "--out", "whole"]);
    let bin = Path::new(env!("CARGO_BIN_EXE_dreamc")).parent().unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let folder = s.path("").canonicalize().unwrap();
    let mut command = Command::new(torchrun);
    command.args([
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=10",
        "--no-python",
        "bash",
        "ranks.sh",
    ]);
    command.current_dir(&folder).env("PATH", path).env("DREAMC_CACHE", s.path("cache"));
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    while !s.path("runs/model/checkpoints/step-00000040").exists() {
        assert!(begun.elapsed() < Duration::from_secs(120), "no step was taken");
        std::thread::sleep(Duration::from_millis(5));
    }
    let process = of_torchrun(&folder, 1).expect("rank 1 trains");
    assert!(Command::new("kill").args(["-KILL", &process]).status().unwrap().success());
    let (code, error) = ends(child, Duration::from_secs(120));
    assert_eq!(code, Some(0), "{error}");
    assert!(error.contains("going on after step"), "{error}");
    assert!(numbers(&s.path("runs/model"), 120) == numbers(&s.path("whole"), 120), "other bits");
    assert_eq!(metrics(&s.path("runs/model")), metrics(&s.path("whole")));
}

/// A checkpoint that leaves in PyTorch's distributed format is the same there: whole, in one file
/// and in three, and as two ranks read it with half of every tensor each; also of a run whose ranks
/// owned experts together.
#[test]
fn a_checkpoint_leaves_for_ranks_of_pytorch() {
    let sandbox = sandbox();
    sandbox.good(&["train", "ranked.yaml", "--out", "run", "-q"]);
    let at = |name: &str| sandbox.path(name).to_str().unwrap().to_string();
    let out = sandbox.good(&["export", "dcp", "run", "-o", "one"]);
    assert!(out.contains("of weights"), "{out}");
    sandbox.good(&["export", "dcp", "run", "-o", "three", "--files", "3"]);
    let launched = ["launch", "-n", "2", "train", "ranked.yaml", "--out", "owned", "-q"];
    let owned =
        ["train.parallel={experts: 2, shard: weights}", "model.components.sa.sequence.projection={count: 4}"];
    sandbox.good(&[&launched[..], &["--set", owned[0], "--set", owned[1]]].concat());
    sandbox.good(&["export", "dcp", "owned", "-o", "of-owners", "--files", "2"]);
    let again = sandbox.run(&["export", "dcp", "run", "-o", "one"]);
    assert!(!again.status.success() && texts(&again).1.contains("exists"), "{}", texts(&again).1);
    let Some(python) = dreamc_skip::transformers() else { return };
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hf/distributed.py");
    for (folder, run) in [("one", "run"), ("three", "run"), ("of-owners", "owned")] {
        // The parts of owners as one file each.
        let files = ["model", "optimizer"].map(|file| at(&format!("{folder}-{file}.safetensors")));
        let whole = files.iter().zip(bits(&sandbox.path(run), 8));
        whole.for_each(|(file, bytes)| std::fs::write(file, bytes).unwrap());
        let mut command = Command::new(&python);
        command.arg(script).args([&at(folder), &files[0], &files[1], "8"]);
        let output = command.env("OMP_NUM_THREADS", "1").output().unwrap();
        let (out, err) = texts(&output);
        assert!(output.status.success() && out.contains("equal"), "{folder}: {out}{err}");
    }
}

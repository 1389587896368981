//! Checkpoints in parts: each rank writes what it holds, any mesh and every command reads them, and
//! a rank that is killed or has no room leaves the checkpoint before.

use crate::ranks::{SOON, ends, numbers, port, rank, sandbox};
use crate::support::sandbox::{Sandbox, bits, metrics, newest, texts};
use dreamc_runtime::checkpoint::safetensors::Tensors;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Attentions that recur have as many projections as four ranks can share.
const SPEC: &str = "model.components.sa.sequence.projection={count: 4}";
const WHOLE: &str = "train.parallel={data: 4}";
const CUT: &str = "train.parallel={data: 4, shard: weights}";
const OWNED: &str = "train.parallel={data: 4, shard: weights, experts: 2}";

fn launch<'a>(ranks: &'a str, line: &[&'a str], sets: &[&'a str]) -> Vec<&'a str> {
    let sets = sets.iter().flat_map(|set| ["--set", set]);
    ["launch", "-n", ranks].into_iter().chain(line.iter().copied()).chain(sets).collect()
}

fn train(s: &Sandbox, ranks: &str, run: &str, mesh: &str) {
    s.good(&launch(ranks, &["train", "ranked.yaml", "--out", run, "-q"], &[SPEC, mesh]));
}

/// A copy of a run that was stopped after step 4.
fn stopped(s: &Sandbox, run: &str, copy: &str) {
    assert!(Command::new("cp").arg("-r").args([s.path(run), s.path(copy)]).status().unwrap().success());
    for step in [6, 8] {
        fs::remove_dir_all(s.path(copy).join(format!("checkpoints/step-{step:08}"))).unwrap();
    }
}

fn resume(s: &Sandbox, ranks: &str, run: &str, sets: &[&str]) {
    s.good(&launch(ranks, &["resume", run], sets));
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|e| e.file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn each_rank_writes_what_it_holds_and_any_mesh_goes_on_to_the_same_bits() {
    let s = sandbox();
    train(&s, "4", "whole", WHOLE);
    assert_eq!(
        names(&newest(&s.path("whole"))),
        ["checksums.txt", "model.safetensors", "optimizer.safetensors", "state.json"]
    );
    for (mesh, ranks, set) in
        [("cut", "4", CUT), ("owned", "4", OWNED), ("two", "2", "train.parallel={data: 2, shard: weights}")]
    {
        train(&s, ranks, mesh, set);
        let found = names(&newest(&s.path(mesh)));
        for kind in ["model", "optimizer"] {
            let parts = found.iter().filter(|name| name.starts_with(&format!("{kind}.rank-"))).count();
            assert_eq!(parts.to_string(), ranks, "{mesh}: {found:?}");
            assert!(!found.contains(&format!("{kind}.safetensors")), "{mesh}: {found:?}");
        }
        // The same mesh goes on as if it had not been stopped.
        let again = format!("{mesh}-again");
        stopped(&s, mesh, &again);
        resume(&s, ranks, &again, &[]);
        assert_eq!(bits(&s.path(&again), 8), bits(&s.path(mesh), 8), "{mesh}");
        assert_eq!(metrics(&s.path(&again)), metrics(&s.path(mesh)), "{mesh}");
    }
    // With one micro-batch a rank, cut weights have the bits of whole ones. So have all runs that
    // go on from either, and the parts of four ranks are what one or two read.
    assert_eq!(numbers(&s.path("cut"), 8), numbers(&s.path("whole"), 8));
    for (ranks, set) in [("1", "train.parallel={data: 1}"), ("2", "train.parallel={data: 2}")] {
        let [a, b] = ["cut", "whole"].map(|run| {
            let copy = format!("{run}-{ranks}");
            stopped(&s, run, &copy);
            resume(&s, ranks, &copy, &[set]);
            numbers(&s.path(&copy), 8)
        });
        assert_eq!(a, b, "four go on with {ranks}");
    }
    train(&s, "1", "one", "train.parallel={data: 1}");
    let [a, b] = [("cut", CUT), ("whole", WHOLE)].map(|(mesh, set)| {
        let copy = format!("one-{mesh}");
        stopped(&s, "one", &copy);
        resume(&s, "4", &copy, &[set]);
        numbers(&s.path(&copy), 8)
    });
    assert_eq!(a, b, "one goes on with four");
}

#[test]
fn every_command_reads_parts_as_it_reads_one_file() {
    let s = sandbox();
    train(&s, "4", "whole", WHOLE);
    train(&s, "4", "cut", CUT);
    let tensors = |run: &str| {
        let out = format!("{run}.safetensors");
        s.good(&["export", "weights", run, "-o", &out]);
        let file = Tensors::open(&s.path(&out)).unwrap();
        let all = file.entries().map(|(name, _)| (name.to_string(), file.get(name).unwrap().unwrap().1));
        all.collect::<Vec<_>>()
    };
    assert_eq!(tensors("cut"), tensors("whole"));
    let line = |line: &[&'static str], run: &'static str| {
        let line: Vec<&str> = line.iter().map(|word| if *word == "RUN" { run } else { word }).collect();
        s.good(&line)
    };
    for command in [&["generate", "RUN", "the ", "--greedy", "-n", "8"][..], &["eval", "RUN", "--json"]] {
        let without = |text: String| {
            text.replace("whole", "cut").lines().filter(|l| !l.contains("second")).collect::<String>()
        };
        assert_eq!(without(line(command, "cut")), without(line(command, "whole")), "{command:?}");
    }
    for run in ["cut", "whole"] {
        s.good(&["export", "dcp", run, "-o", &format!("{run}-dcp"), "--files", "2"]);
    }
    for name in ["__0_0.distcp", "__1_0.distcp"] {
        let [a, b] = ["cut", "whole"].map(|run| fs::read(s.path(&format!("{run}-dcp/{name}"))).unwrap());
        assert!(a == b, "{name}");
    }
}

#[test]
fn a_part_that_is_missing_cut_or_altered_is_refused_with_its_name() {
    let s = sandbox();
    train(&s, "4", "run", CUT);
    let whole = bits(&s.path("run"), 8);
    let folder = newest(&s.path("run"));
    let checkpoint = folder.to_str().unwrap().to_string();
    type Damage = fn(&Path, &Path);
    let damages: [(&str, Damage, &str); 4] = [
        (
            "missing",
            |part, _| fs::remove_file(part).unwrap(),
            "is missing; the checkpoint is whole with all of its 8 parts",
        ),
        (
            "cut",
            |part, _| {
                let length = fs::metadata(part).unwrap().len();
                fs::File::options().write(true).open(part).unwrap().set_len(length - 1).unwrap();
            },
            "bytes, and",
        ),
        (
            "altered",
            |part, _| {
                let mut bytes = fs::read(part).unwrap();
                *bytes.last_mut().unwrap() ^= 1;
                fs::write(part, bytes).unwrap();
            },
            "(BLAKE3 differs)",
        ),
        // Of the checkpoint before.
        ("stale", |part, before| assert!(fs::copy(before, part).unwrap() > 0), "(BLAKE3 differs)"),
    ];
    for name in ["model.rank-2.safetensors", "optimizer.rank-1.safetensors"] {
        for (what, damage, words) in damages {
            let (part, before) = (folder.join(name), s.path("run/checkpoints/step-00000006").join(name));
            let good = fs::read(&part).unwrap();
            damage(&part, &before);
            if name.starts_with("model") {
                let error = s.error(&["export", "weights", &checkpoint, "-o", "out.safetensors"]);
                assert!(error.contains(name) && error.contains(words), "{name} {what}: {error}");
                assert!(!s.path("out.safetensors").exists(), "a refusal leaves nothing");
            }
            let output = s.run(&launch("4", &["resume", "run"], &[]));
            let error = texts(&output).1;
            assert!(output.status.success(), "{name} {what}: {error}");
            assert!(error.contains(name) && error.contains(words), "{name} {what}: {error}");
            assert!(error.contains("going on after step 6"), "{name} {what}: {error}");
            assert_eq!(bits(&s.path("run"), 8), whole, "{name} {what}");
            assert_eq!(fs::read(&part).unwrap(), good, "the run has written it again");
        }
    }
}

/// The folder that a checkpoint is being written in.
fn unfinished(run: &Path) -> Option<PathBuf> {
    let checkpoints = run.join("checkpoints");
    names(&checkpoints).into_iter().find(|n| n.starts_with(".tmp-")).map(|n| checkpoints.join(n))
}

#[test]
fn a_rank_that_is_killed_while_parts_are_written_leaves_the_checkpoint_before() {
    let s = sandbox();
    let line =
        ["train", "ranked.yaml", "--set", SPEC, "--set", CUT, "--set", "train.checkpoint.every=1", "--out"];
    s.good(&[&["launch", "-n", "4"][..], &line, &["whole"]].concat());
    let moments = ["", "model.rank-0", "model.rank-2", "optimizer.rank-1", "parts.json", "checksums.txt"];
    let mut hits = 0;
    for (i, moment) in moments.into_iter().enumerate() {
        // The rank that makes the folder and the manifest, and one that writes a part alone.
        for dies in [0, 2] {
            let run = format!("killed-{i}-{dies}");
            let port = port();
            let line = [&line[..], &[&run]].concat();
            let mut ranks: Vec<Child> =
                (0..4).map(|r| rank(&s, &line, r, 4, port).spawn().unwrap()).collect();
            let begun = Instant::now();
            let there = || {
                let found = unfinished(&s.path(&run))
                    .is_some_and(|folder| names(&folder).iter().any(|n| n.starts_with(moment)));
                found && s.path(&run).join("checkpoints/step-00000002").exists()
            };
            while !there() && ranks[dies].try_wait().unwrap().is_none() {
                assert!(begun.elapsed() < 4 * SOON, "no checkpoint was written");
            }
            let hit = ranks[dies].try_wait().unwrap().is_none();
            hits += usize::from(hit);
            let mut dead = ranks.remove(dies);
            let _ = dead.kill();
            dead.wait().unwrap();
            for child in ranks {
                let (code, error) = ends(child, SOON);
                assert!(code == Some(0) || code == Some(1), "{moment} {dies}: {error}");
                assert!(!error.contains("panicked"), "{error}");
            }
            // A folder of the user's is no checkpoint that was left.
            fs::create_dir_all(s.path(&run).join("checkpoints/.tmp-mine")).unwrap();
            s.good(&launch("4", &["resume", &run], &[]));
            assert_eq!(bits(&s.path(&run), 8), bits(&s.path("whole"), 8), "{moment} {dies}");
            assert_eq!(metrics(&s.path(&run)), metrics(&s.path("whole")), "{moment} {dies}");
            let left: Vec<String> =
                names(&s.path(&run).join("checkpoints")).into_iter().filter(|n| n.starts_with('.')).collect();
            assert_eq!(left, [".tmp-mine"], "{moment} {dies}");
            println!("{moment:?}: rank {dies} was {}killed there", if hit { "" } else { "not " });
        }
    }
    assert!(hits >= moments.len(), "{hits} kills came while parts were written");
}

#[test]
fn a_rank_without_room_ends_all_and_leaves_the_checkpoint_before() {
    let s = sandbox();
    let line =
        ["train", "ranked.yaml", "--set", SPEC, "--set", CUT, "--set", "train.checkpoint.every=1", "--out"];
    s.good(&[&["launch", "-n", "4"][..], &line, &["whole"]].concat());
    s.good(&[&["launch", "-n", "4"][..], &line, &["run", "--set", "train.steps=2"]].concat());
    let before = bits(&s.path("run"), 2);
    // Rank 2 may write no file of more than a kilobyte.
    let port = port();
    let again = ["resume", "run", "--set", "train.steps=8"];
    let ranks: Vec<Child> = (0..4)
        .map(|r| {
            let plain = rank(&s, &again, r, 4, port);
            if r != 2 {
                return { plain }.spawn().unwrap();
            }
            let mut confined = Command::new("bash");
            confined.args(["-c", "trap '' XFSZ; ulimit -c 0; ulimit -f 1; exec \"$0\" \"$@\""]);
            confined.arg(plain.get_program()).args(plain.get_args()).current_dir(s.path(""));
            confined.envs(plain.get_envs().filter_map(|(k, v)| Some((k, v?))));
            confined.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
            confined.spawn().unwrap()
        })
        .collect();
    for (r, child) in ranks.into_iter().enumerate() {
        let (code, error) = ends(child, SOON + Duration::from_secs(20));
        assert_eq!(code, Some(1), "rank {r}: {error}");
        assert!(error.contains("File too large") && error.contains("rank"), "rank {r}: {error}");
    }
    assert_eq!(names(&s.path("run/checkpoints")), ["step-00000001", "step-00000002"]);
    assert_eq!(bits(&s.path("run"), 2), before);
    s.good(&launch("4", &["resume", "run"], &["train.steps=8"]));
    assert_eq!(numbers(&s.path("run"), 8), numbers(&s.path("whole"), 8));
}

#[test]
fn a_rank_that_does_not_see_the_folder_of_the_run_is_refused() {
    let s = sandbox();
    let port = port();
    let line = ["train", "ranked.yaml", "--set", "train.parallel={data: 2, shard: weights}", "--out", "run"];
    // As on a machine of its own: rank 1 has another folder there.
    fs::create_dir(s.path("run")).unwrap();
    let script = "mount -t tmpfs none run || exit 9; exec \"$@\"";
    let first = rank(&s, &line, 0, 2, port).spawn().unwrap();
    let plain = rank(&s, &line, 1, 2, port);
    let mut hidden = Command::new("unshare");
    hidden.args(["--user", "--map-root-user", "--mount", "bash", "-c", script, "bash"]);
    hidden.arg(plain.get_program()).args(plain.get_args()).current_dir(s.path(""));
    hidden.envs(plain.get_envs().filter_map(|(k, v)| Some((k, v?))));
    let second = hidden.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (code, error) = ends(second, SOON + SOON);
    let (_, of_first) = ends(first, SOON + SOON);
    if code == Some(9) || error.contains("unshare") {
        return dreamc_skip::skip("this system does not let a test mount a file system");
    }
    for error in [error, of_first] {
        assert!(
            error.contains("rank 1 does not see") && error.contains("a folder that all ranks see"),
            "{error}"
        );
    }
}

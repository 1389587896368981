//! Jobs of SLURM, by the scripts of `docs/scaling.md`: they train what `dreamc launch` trains, go
//! on after a rank is killed, after their node is taken and after one of two nodes fails, and share
//! the runs of a comparison.

mod cluster;

use crate::book;
use crate::ranks::{Dice, numbers, setting};
use crate::support::root;
use crate::support::sandbox::{Sandbox, bits, metrics};
use crate::workers;
use cluster::Cluster;
use serde_json::Value;
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

/// Long enough to be killed in; every kind of step is in `ranks`.
const SPEC: &str = "\
model:
  name: ranked
  vocab: 256
  hidden: 8
  context: 32
  components:
    sa: {sequence: {heads: 1, head_size: 8}}
    ea: {experts: {count: 4, active: 2, intermediate: 4, query: 4}}
  body: [\"sa > ea\"]
data: {text: book.txt}
train: {steps: 400, batch: 24, accumulate: 12, sequence: 16, precision: f32,
        checkpoint: {every: 50, keep: 99}, evaluate: {every: 50, batches: 2}}
";

/// No job takes longer, with its second life.
const LONG: Duration = Duration::from_secs(240);

fn sandbox() -> Sandbox {
    let book = "the quick brown fox jumps over the lazy dog\n".repeat(60);
    Sandbox::with(&[("model.yaml", SPEC), ("book.txt", &book)])
}

/// The script of the page that trains.
fn script() -> String {
    let page = fs::read_to_string(root("docs/scaling.md")).unwrap();
    let mut found = book::blocks(&page).into_iter().filter(|block| block.text.contains("#SBATCH"));
    let script = found.next().expect("docs/scaling.md has a script for SLURM").text;
    assert!(found.next().is_none(), "docs/scaling.md has two scripts for SLURM");
    script
}

/// Submits the page's script with two ranks, in a folder of its own of the sandbox.
fn submit(cluster: &Cluster, s: &Sandbox, folder: &str, options: &[&str]) -> String {
    let own = s.path(folder);
    fs::create_dir(&own).unwrap();
    for name in ["model.yaml", "book.txt"] {
        fs::copy(s.path(name), own.join(name)).unwrap();
    }
    let mut from = Command::new("sbatch");
    from.current_dir(&own).env("DREAMC_CACHE", s.path("cache"));
    cluster.submit(from, &[&["--ntasks=2", "--output=log"], options].concat(), &script())
}

/// The run that `dreamc launch` trains with as many ranks; gives what it said.
fn whole(s: &Sandbox) -> String {
    s.good(&["launch", "-n", "2", "train", "model.yaml", "--out", "whole"])
}

/// That the run of a job has the bits of the whole one.
fn same(s: &Sandbox, folder: &str, words: &str) {
    let (run, whole) = (s.path(&format!("{folder}/runs/model")), s.path("whole"));
    assert!(numbers(&run, 400) == numbers(&whole, 400), "other bits: {words}");
    assert_eq!(metrics(&run), metrics(&whole), "{words}");
}

fn ledger(s: &Sandbox, folder: &str) -> Value {
    serde_json::from_str(&s.read(&format!("{folder}/runs/model/ledger.json"))).unwrap()
}

/// Waits for a checkpoint of a job's run.
fn saved(cluster: &Cluster, s: &Sandbox, folder: &str, step: u64) {
    let path = s.path(&format!("{folder}/runs/model/checkpoints/step-{step:08}"));
    cluster.until("the job has no checkpoint", |_| path.exists());
}

#[test]
fn a_job_of_slurm_trains_the_bits_of_ranks_that_dreamc_launches() {
    let Some(cluster) = Cluster::start() else { return };
    let s = sandbox();
    let out = whole(&s);
    let job = submit(&cluster, &s, "job", &[]);
    let found = cluster.reaches(&job, &["COMPLETED", "FAILED"], LONG);
    let log = s.read("job/log");
    assert_eq!((found["JobState"].as_str(), found["Restarts"].as_str()), ("COMPLETED", "0"), "{log}");
    assert_eq!(log.matches("finished after 400 steps").count(), 1, "{log}");
    same(&s, "job", "a job of SLURM");
    // Ranks of a machine share its threads.
    let device = |text: &str| text.lines().find(|line| line.contains("threads,")).map(str::to_string);
    assert_eq!(device(&log), device(&out));
}

#[test]
fn a_rank_of_slurm_that_is_killed_ends_its_job_within_a_minute_and_it_goes_on_to_the_same_bits() {
    let Some(cluster) = Cluster::start() else { return };
    let s = sandbox();
    let begun = Instant::now();
    whole(&s);
    let lasts = begun.elapsed().as_millis() as u64;
    let seed = setting("DREAMC_SEED", std::process::id().into());
    let mut dice = Dice(seed);
    let kills = setting("DREAMC_KILLS", 2);
    for kill in 0..kills {
        let folder = format!("kill-{kill}");
        let job = submit(&cluster, &s, &folder, &[]);
        let rank = dice.below(2);
        cluster.until("no rank began", |c| c.process(&job, rank).is_some());
        // The first dies before any number is safe, the others at random moments.
        let moment = if kill == 0 { 0 } else { dice.below(lasts) };
        std::thread::sleep(Duration::from_millis(moment));
        let words = format!("rank {rank} killed after {moment} ms, DREAMC_SEED={seed}");
        let Some(process) = cluster.process(&job, rank) else { continue };
        let _ = Command::new("kill").args(["-KILL", &process]).status();
        let killed = Instant::now();
        cluster.reaches(&job, &["PENDING", "COMPLETED", "FAILED"], Duration::from_secs(60));
        println!("{words}: the job ended after {:?}", killed.elapsed());
        let found = cluster.reaches(&job, &["COMPLETED", "FAILED"], LONG);
        let log = s.read(&format!("{folder}/log"));
        assert_eq!(found["JobState"], "COMPLETED", "{words}: {log}");
        // It may have come to its end before.
        if found["Restarts"] != "0" {
            assert!(log.contains(&format!("task {rank}: Killed")), "{words}: {log}");
        }
        same(&s, &folder, &words);
    }
}

#[test]
fn a_job_whose_node_is_taken_leaves_a_checkpoint_and_goes_on_to_the_same_bits() {
    let Some(cluster) = Cluster::start() else { return };
    let s = sandbox();
    whole(&s);
    // An urgent job takes the node, or an operator requeues the job.
    for taken in ["preempted", "requeued"] {
        let job = submit(&cluster, &s, taken, &[]);
        saved(&cluster, &s, taken, 50);
        if taken == "preempted" {
            let mut urgent = Command::new("sbatch");
            urgent.current_dir(s.path(taken));
            let options = ["--partition=urgent", "--output=urgent"];
            cluster.submit(urgent, &options, "#!/bin/bash\ntrue\n");
        } else {
            cluster.good("scontrol", &["requeue", &job]);
        }
        cluster.reaches(&job, &["PENDING", "COMPLETED", "FAILED"], Duration::from_secs(60));
        let between = ledger(&s, taken);
        let found = cluster.reaches(&job, &["COMPLETED", "FAILED"], LONG);
        let log = s.read(&format!("{taken}/log"));
        assert_eq!((found["JobState"].as_str(), found["Restarts"].as_str()), ("COMPLETED", "1"), "{log}");
        assert_eq!(between["status"], "interrupted", "{taken}: {between} {log}");
        let step = between["steps"].as_u64().unwrap();
        let left = s.path(&format!("{taken}/runs/model/checkpoints/step-{step:08}"));
        assert!(left.exists(), "{taken}: {step} steps, {log}");
        same(&s, taken, taken);
    }
}

/// A node that fails is one whose daemon is gone and whose rank stands still: the controller hears
/// nothing of it for its time-out, requeues the job, and starts it when the node is back. The other
/// rank may miss a sign of life before, and end the job, which then requeues itself.
#[test]
fn a_job_over_two_nodes_of_which_one_fails_is_requeued_and_goes_on_to_the_same_bits() {
    let Some(mut cluster) = Cluster::of(["one", "two"].map(String::from).into()) else { return };
    let s = sandbox();
    whole(&s);
    let over = ["--nodes=2", "--ntasks-per-node=1", "--export=ALL,MASTER_ADDR=127.0.0.1"];
    for fails in [false, true] {
        let folder = if fails { "fails" } else { "both" };
        let job = submit(&cluster, &s, folder, &over);
        if fails {
            saved(&cluster, &s, folder, 50);
            let rank = cluster.process(&job, 1).expect("the job has a second rank");
            let still = [parent(&rank), rank];
            still.iter().for_each(|process| signal("STOP", process));
            cluster.fail();
            cluster.reaches(&job, &["PENDING"], Duration::from_secs(120));
            assert_eq!(cluster.job(&job)["Restarts"], "1");
            still.iter().for_each(|process| signal("KILL", process));
            cluster.join(1);
        }
        let found = cluster.reaches(&job, &["COMPLETED", "FAILED"], LONG);
        let log = s.read(&format!("{folder}/log"));
        let expected = ("COMPLETED", if fails { "1" } else { "0" }, "2");
        let [state, restarts, nodes] = ["JobState", "Restarts", "NumNodes"].map(|name| found[name].as_str());
        assert_eq!((state, restarts, nodes), expected, "{log}");
        let noticed = ["DUE TO NODE FAILURE", "no sign of life"].map(|words| log.contains(words));
        assert_eq!(noticed.contains(&true), fails, "{log}");
        println!("{folder}: {state:?}, noticed by SLURM and by the other rank: {noticed:?}");
        same(&s, folder, folder);
    }
}

/// The process that started a process.
fn parent(process: &str) -> String {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    // The name of a program may have spaces, and is in brackets.
    stat.rsplit_once(") ").unwrap().1.split_whitespace().nth(1).unwrap().to_string()
}

fn signal(name: &str, process: &str) {
    assert!(Command::new("kill").args([&format!("-{name}"), process]).status().unwrap().success());
}

#[test]
fn a_job_near_its_time_limit_leaves_a_checkpoint_and_goes_on() {
    let Some(cluster) = Cluster::start() else { return };
    let s = sandbox();
    s.write("model.yaml", &SPEC.replace("steps: 400", "steps: 1000000").replace("every: 50", "every: 0"));
    // The page's script has two minutes; here SLURM sends the signal at its next look, of two a
    // minute.
    let job = submit(&cluster, &s, "limit", &["--time=1", "--signal=TERM@60"]);
    cluster.reaches(&job, &["RUNNING", "FAILED"], Duration::from_secs(60));
    cluster.reaches(&job, &["PENDING", "COMPLETED", "FAILED", "TIMEOUT"], Duration::from_secs(90));
    let (between, log) = (ledger(&s, "limit"), s.read("limit/log"));
    assert_eq!(between["status"], "interrupted", "{between} {log}");
    let step = between["steps"].as_u64().unwrap();
    assert!(s.path(&format!("limit/runs/model/checkpoints/step-{step:08}")).exists(), "{step}: {log}");
    assert!(log.contains(&format!("SIGTERM: stopped after step {step}, nothing is lost")), "{log}");
    cluster.until("the job does not go on", |_| {
        metrics(&s.path("limit/runs/model")).last().is_some_and(|line| line["step"].as_u64() > Some(step))
    });
    assert_eq!(cluster.job(&job)["Restarts"], "1");
}

#[test]
fn a_job_array_of_slurm_makes_the_comparison_of_one_process() {
    let Some(cluster) = Cluster::start() else { return };
    let s = workers::sandbox();
    s.good(&["compare", "shared.suite.yaml", "--out", "alone"]);
    let line = ["compare", "shared.suite.yaml", "--out", "out", "--threads", "1", "--slurm", "2"];
    let script = s.good(&line);
    let mut from = Command::new("sbatch");
    from.current_dir(s.path("")).env("DREAMC_CACHE", s.path("cache")).env("DREAMC_HEARTBEAT", "400");
    let array = cluster.submit(from, &["--output=log-%a"], &script);
    let tasks = [0, 1].map(|task| format!("{array}_{task}"));
    for task in &tasks {
        cluster.reaches(task, &["RUNNING", "COMPLETED", "FAILED"], Duration::from_secs(60));
    }
    // A worker goes back to the queue with a run in its hands.
    cluster.until("no run began", |_| {
        workers::RUNS.iter().any(|run| s.path(&format!("out/{run}/metrics.jsonl")).exists())
    });
    cluster.good("scontrol", &["requeue", &tasks[1]]);
    for task in &tasks {
        let found = cluster.reaches(task, &["COMPLETED", "FAILED"], LONG);
        let log = s.read(&format!("log-{}", &task[task.len() - 1..]));
        assert_eq!(found["JobState"], "COMPLETED", "{log}");
    }
    for run in workers::RUNS {
        let (shared, alone) = (s.path(&format!("out/{run}")), s.path(&format!("alone/{run}")));
        assert_eq!(bits(&shared, 60), bits(&alone, 60), "{run}");
        assert_eq!(metrics(&shared), metrics(&alone), "{run}");
    }
    assert!(s.path("out/report.html").exists());
}

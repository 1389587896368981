//! Plans are held to what happens: memory to what ranks allocate, bytes to what their transport
//! counts, seconds to a simulation of every launch and message.

#[path = "../support/mod.rs"]
mod support;

use dreamc_compiler::count::executed::{Turns, executed};
use dreamc_compiler::format::Formats;
use dreamc_compiler::ir::Extents;
use dreamc_compiler::program::{Buffer, Plan, ProgramKey, Space};
use dreamc_compiler::rewrite::Rewriting;
use dreamc_data::Batch;
use dreamc_device::cpu::{CpuDevice, CpuOptions};
use dreamc_device::gpu::prices_by_rates;
use dreamc_device::group::place::Place;
use dreamc_device::group::{Collective, Group, GroupError, Traffic, Transport, mpi, tcp};
use dreamc_device::{AT_ONCE, Device, Instrument};
use dreamc_dsl::Spec;
use dreamc_plan::simulate::simulate;
use dreamc_plan::timeline::{POOLED, Prices};
use dreamc_plan::{Exchange, Machine, Memory, Mesh, What, Work, machine, timeline};
use dreamc_runtime::model::{Model, Scale};
use dreamc_runtime::train::run::FIGURES;
use dreamc_runtime::train::{Prepared, prepare, schedule};
use dreamc_skip::skip;
use serde_json::Value;
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use support::sandbox::Sandbox;

/// Loops, experts whose choices are counted, whole matrices for muon.
const SPEC: &str = "\
model:
  name: planned
  vocab: 256
  hidden: 16
  context: 16
  components:
    sa: {sequence: {heads: 2, head_size: 8}}
    ea: {experts: {count: 4, active: 2, intermediate: 8, query: 4}}
  body: [{recur: 3, layers: [\"sa > ea\"]}, \"sa > ea\"]
data: {text: book.txt}
train: {steps: 3, batch: 8, accumulate: 8, sequence: 16, precision: f32, optimizer: muon,
        checkpoint: {every: 0}, evaluate: {every: 0}}
";

fn spec(set: &[&str]) -> Spec {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("planned.yaml");
    std::fs::write(&path, SPEC).unwrap();
    let set: Vec<String> = set.iter().map(|s| s.to_string()).collect();
    dreamc_dsl::load(&path, &set).unwrap().0
}

fn prepared(spec: &Spec, device: &dyn Device, group: &Group) -> Prepared {
    prepare(spec, device, &Rewriting::default(), group, &Formats::default()).unwrap()
}

fn of_table(name: &str) -> Machine {
    machine::find(name).unwrap()
}

/// The work of a step of a rank, each launch of some microseconds.
fn work(prepared: &Prepared, micro_batches: u64, mesh: &Mesh) -> Vec<Work> {
    let (rates, launch) = of_table("cpu").shared_rates(1).unwrap();
    let prices: Prices = prices_by_rates(&prepared.compiled.plan, rates, launch).unwrap();
    timeline(&prepared.compiled.plan, &prices, &[], micro_batches, mesh)
}

fn over_tcp(size: u64) -> Vec<Group> {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let place = move |rank| Place {
        rank,
        size,
        local_rank: rank,
        local_size: Some(size),
        mpi: false,
        address: "127.0.0.1".into(),
        port,
    };
    thread::scope(|scope| {
        let meet = |rank| scope.spawn(move || tcp::meet(&place(rank), Duration::from_secs(60)).unwrap());
        let threads: Vec<_> = (0..size).map(meet).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// A batch of a model.
fn batch(model: &Model) -> Batch {
    let (rows, sequence) = (model.batch(), model.sequence());
    let tokens = rows * sequence;
    Batch {
        sequence,
        ids: (0..tokens as i32).map(|i| i % 250).collect(),
        targets: (0..tokens as i32).map(|i| (i + 1) % 250).collect(),
        positions: (0..tokens).map(|i| (i % sequence) as i32).collect(),
        segments: vec![0; tokens],
        bytes: vec![0; tokens],
        ..Batch::default()
    }
}

/// A step of a rank, and what its transport counts of it.
fn step(spec: &Spec, group: &Group) -> (Traffic, Memory, u64) {
    let device = CpuDevice::default();
    let prepared = prepared(spec, &device, group);
    let planned = Memory::of(&prepared.compiled.plan, device.scratch_bytes(&prepared.compiled.plan).unwrap());
    let mut model = Model::of_rank(&device, prepared.compiled, group).unwrap();
    let allocated = model.memory().total;
    model.initialise(1).unwrap();
    group.barrier().unwrap();
    let before = group.traffic().unwrap();
    let batch = batch(&model);
    model.begin_step().unwrap();
    let parts = spec.train.accumulate / group.size();
    for part in 0..parts {
        if part + 1 == parts {
            model.last();
        }
        model.backward(&batch, Scale { loss: 1e-3, auxiliary: 1e-3 }, None).unwrap();
    }
    group.gather(&[0; POOLED as usize]).unwrap();
    model.norm().unwrap();
    model.update(&schedule::scalars(&spec.train, 1)).unwrap();
    let after = group.traffic().unwrap();
    let passed = Traffic { sent: after.sent - before.sent, received: after.received - before.received };
    (passed, planned, allocated)
}

/// A network between ranks by which each exchange is late; a thread of its own may exchange, or
/// none.
struct Late {
    group: Group,
    by: Duration,
    thread: bool,
}

impl Transport for Late {
    fn exchange(&self, what: Collective, bytes: &[u8]) -> Result<Vec<u8>, GroupError> {
        thread::sleep(self.by);
        self.group.exchange(what, bytes)
    }

    fn any_thread(&self) -> bool {
        self.thread
    }

    fn failed(&self) -> Option<GroupError> {
        self.group.failed()
    }

    fn fail(&self, reason: &str) {
        self.group.fail(reason);
    }
}

/// Seconds of three steps, how long exchanges took and were waited for, and the bits of losses and
/// norms.
type Found = (f64, f64, f64, Vec<[u32; 2]>);

/// Three steps of a rank over a late network.
fn late(spec: &Spec, group: Group, by: Duration, thread: bool) -> Found {
    let device = CpuDevice::new(CpuOptions { threads: Some(1) });
    let late = Late { group: group.clone(), by, thread };
    let group = Group::over(group.rank(), group.size(), Arc::new(late));
    let prepared = prepared(spec, &device, &group);
    let mut model = Model::of_rank(&device, prepared.compiled, &group).unwrap();
    model.initialise(1).unwrap();
    let (rows, sequence) = (model.batch(), model.sequence());
    let tokens = rows * sequence;
    let batch = Batch {
        sequence,
        ids: (0..tokens as i32).map(|i| i * 7 % 250).collect(),
        targets: (0..tokens as i32).map(|i| (i + 1) * 7 % 250).collect(),
        positions: (0..tokens).map(|i| (i % sequence) as i32).collect(),
        segments: vec![0; tokens],
        bytes: vec![0; tokens],
        ..Batch::default()
    };
    let (begun, mut exchanged, mut waited, mut bits) = (Instant::now(), 0.0, 0.0, vec![]);
    for step in 1..=3 {
        model.begin_step().unwrap();
        model.last();
        let stats = model.backward(&batch, Scale { loss: 1e-3, auxiliary: 1e-3 }, None).unwrap();
        (exchanged, waited) = (exchanged + stats.exchanged, waited + stats.waited);
        bits.push([model.loss().unwrap().to_bits(), model.norm().unwrap().to_bits()]);
        model.update(&schedule::scalars(&spec.train, step)).unwrap();
    }
    (begun.elapsed().as_secs_f64(), exchanged, waited, bits)
}

/// Exchanges that are waited for one by one, then those that begin early, over a network that is
/// late by 2 ms: the first rank prints both. No bit may be another.
fn hides(meshes: &[(&str, u64)], run: &dyn Fn(&Spec, Duration, bool) -> Found, speaks: bool) {
    for &(shard, experts) in meshes {
        let spec = spec(&[
            "model.hidden=192",
            "model.context=64",
            "model.components.sa={sequence: {heads: 12, head_size: 16}}",
            "model.components.ea={experts: {count: 4, active: 2, intermediate: 192, query: 32}}",
            "model.body=[{repeat: 6, layers: ['sa > ea']}]",
            "train.sequence=64",
            "train.optimizer=adamw",
            "train.accumulate=2",
            "train.batch=32",
            &format!("train.parallel={{shard: {shard}, experts: {experts}}}"),
        ]);
        let by = Duration::from_millis(2);
        let (apart, ahead) = (run(&spec, by, false), run(&spec, by, true));
        if speaks {
            println!(
                "shard {shard}, experts {experts}: {:.0} ms a step, exchanges {:.0}; ahead {:.0} ms, exchanges {:.0}, waited for {:.0}",
                1e3 * apart.0 / 3.0,
                1e3 * apart.1 / 3.0,
                1e3 * ahead.0 / 3.0,
                1e3 * ahead.1 / 3.0,
                1e3 * ahead.2 / 3.0
            );
        }
        assert_eq!(apart.3, ahead.3, "shard {shard}, experts {experts}: other bits");
        // Products of a turn are shorter than the way of its rows, and ranks wait for one another.
        assert!(experts > 1 || ahead.2 < 0.95 * apart.1, "nothing is hidden: {} of {}", ahead.2, apart.1);
    }
}

/// Exchanges that begin early hide a network that is late, and change no bit:
/// `cargo test --workspace --test plan late -- --nocapture`.
#[test]
fn exchanges_ahead_of_their_use_hide_a_network_that_is_late() {
    let two = |spec: &Spec, by, thread| {
        thread::scope(|scope| {
            let groups = over_tcp(2).into_iter();
            let threads: Vec<_> =
                groups.map(|group| scope.spawn(move || late(spec, group, by, thread))).collect();
            threads.into_iter().map(|t| t.join().unwrap()).next().unwrap()
        })
    };
    hides(&[("weights", 1), ("none", 2), ("weights", 2)], &two, true);
}

/// The same by ranks of `mpirun`, where a thread makes MPI's calls meanwhile.
#[test]
fn exchanges_ahead_of_their_use_hide_open_mpi_that_is_late() {
    if Command::new("mpirun").arg("--version").stdout(Stdio::null()).status().is_err() {
        return skip("mpirun of Open MPI is not installed");
    }
    let mut command = Command::new("mpirun");
    // A rank that waits leaves its core to the other's thread.
    command.args(["-n", "2", "--oversubscribe", "--allow-run-as-root", "--mca", "mpi_yield_when_idle", "1"]);
    command.arg(std::env::current_exe().unwrap());
    command.args(["a_rank_of_open_mpi_that_is_late", "--exact", "--ignored", "--nocapture"]);
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    // The harness begins lines of its own.
    let lines: Vec<&str> =
        text.lines().filter_map(|line| Some(&line[line.find("shard weights, experts")?..])).collect();
    println!("Open MPI: {}", lines.join("\nOpen MPI: "));
    assert_eq!(lines.len(), 2, "{text}");
}

/// A rank of the test above.
#[test]
#[ignore = "mpirun starts it"]
fn a_rank_of_open_mpi_that_is_late() {
    let place = Place::of_environment().unwrap().expect("mpirun starts it");
    let group = mpi::meet(&place).unwrap().expect("mpirun has its library");
    assert!(group.any_thread(), "Open MPI lets one thread alone call it");
    // A rank that waits takes a core, so that each mesh takes long where there are few.
    let run = |spec: &Spec, by, thread| late(spec, group.clone(), by, thread);
    hides(&[("weights", 1), ("weights", 2)], &run, group.leads());
}

/// A mixture whose experts are all chosen.
const CHOSEN: [&str; 2] = [
    "model.components.ea={experts: {count: 4, active: 4, intermediate: 6}}",
    "model.body=[{repeat: 2, layers: ['sa > ea']}]",
];

#[test]
fn a_plan_pools_the_figures_that_a_run_pools() {
    assert_eq!(POOLED as usize, FIGURES);
}

#[test]
fn bytes_and_memory_are_those_of_ranks_that_train() {
    for ranks in [2, 4] {
        let experts = [("none", 1), ("optimizer", 1), ("weights", 1), ("none", ranks), ("weights", 2)];
        for (shard, team) in experts {
            let parallel = format!("train.parallel={{shard: {shard}, experts: {team}}}");
            // Every expert is chosen by every token, so that no router says how many rows pass.
            let all: &[&str] = if team > 1 { &CHOSEN } else { &[] };
            let spec = spec(&[&[parallel.as_str()], all].concat());
            let groups = over_tcp(ranks);
            let found: Vec<(Traffic, Memory, u64)> = thread::scope(|scope| {
                let run = |group: Group| {
                    let spec = &spec;
                    scope.spawn(move || step(spec, &group))
                };
                let threads: Vec<_> = groups.into_iter().map(run).collect();
                threads.into_iter().map(|t| t.join().unwrap()).collect()
            });
            let machine = of_table("cpu");
            let mesh = Mesh { machine: &machine, ranks, at_once: AT_ONCE };
            let on_paper = prepared(&spec, &CpuDevice::default(), &Group::on_paper(0, ranks));
            let bytes = mesh.bytes(&work(&on_paper, spec.train.accumulate / ranks, &mesh));
            let first = Traffic { sent: bytes.star_sent, received: bytes.star_received };
            assert_eq!(found[0].0, first, "{ranks} ranks, {shard}, experts over {team}");
            let others = |of: fn(&Traffic) -> u64| found[1..].iter().map(|f| of(&f.0)).sum::<u64>();
            assert_eq!((others(|t| t.received), others(|t| t.sent)), (first.sent, first.received));
            for (rank, (_, planned, allocated)) in found.iter().enumerate() {
                let on_paper = prepared(&spec, &CpuDevice::default(), &Group::on_paper(rank as u64, ranks));
                let scratch = CpuDevice::default().scratch_bytes(&on_paper.compiled.plan).unwrap();
                let paper = Memory::of(&on_paper.compiled.plan, scratch);
                assert_eq!(&paper, planned, "rank {rank} of {ranks}, {shard}, experts over {team}");
                assert_eq!(paper.total, *allocated, "rank {rank} of {ranks}, {shard}, experts over {team}");
                let kinds: u64 = paper.kinds().iter().map(|(_, bytes)| bytes).sum();
                assert_eq!(kinds, paper.total);
            }
        }
    }
}

/// Bytes that all ranks of Open MPI send in a run of `steps` steps, as its monitoring counts them.
fn monitored(s: &Sandbox, ranks: u64, shard: &str, steps: u64) -> u64 {
    let name = format!("{shard}-{ranks}-{steps}");
    let profiles = s.path(&format!("counted-{name}"));
    std::fs::create_dir(&profiles).unwrap();
    let set = [format!("train.parallel.shard={shard}"), format!("train.steps={steps}")];
    let dreamc =
        s.command(&["train", "planned.yaml", "--out", &name, "--set", &set[0], "--set", &set[1], "-q"]);
    let mut command = Command::new("mpirun");
    command.args(["-n", &ranks.to_string(), "--oversubscribe", "--allow-run-as-root"]);
    // Into a file of each rank, at the end.
    command.args(["--mca", "pml_monitoring_enable", "2", "--mca", "pml_monitoring_enable_output", "3"]);
    command.args(["--mca", "pml_monitoring_filename"]).arg(profiles.join("rank"));
    // In rings: a few bytes would go to one rank and from there to all, which are more.
    command.args(["--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_allgatherv_algorithm"]);
    command.arg("3");
    command.arg(dreamc.get_program()).args(dreamc.get_args());
    command.current_dir(s.path("")).env("DREAMC_CACHE", s.path("cache"));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let files: Vec<_> = std::fs::read_dir(&profiles).unwrap().flatten().collect();
    assert_eq!(files.len() as u64, ranks, "Open MPI writes a profile for each rank");
    let sent = |text: &str| -> u64 {
        let lines = text.lines().filter(|line| line.starts_with("I\t") || line.starts_with("E\t"));
        lines.map(|l| l.split_whitespace().nth(3).unwrap().parse::<u64>().unwrap()).sum()
    };
    files.iter().map(|file| sent(&std::fs::read_to_string(file.path()).unwrap())).sum()
}

/// Bytes that all ranks of Open MPI send in a step: each exchange gathers heads, a sum hands every
/// rank its part of the numbers and gathers the sums of the parts.
fn by_mpi(work: &[Work], ranks: u64) -> u64 {
    let others = ranks - 1;
    let exchanges = work.iter().filter_map(|work| match work {
        Work::Begin(exchange) | Work::Wait(exchange) => Some(exchange),
        Work::Launch(_) | Work::Until(_) | Work::Join => None,
    });
    let bytes = exchanges.map(|exchange| {
        let heads = exchange.pieces(AT_ONCE).len() as u64 * ranks * others * 24;
        let numbers = match &exchange.what {
            What::Sum { elements } => 2 * ranks * others * elements.div_ceil(ranks) * 4,
            What::Scatter { lengths } | What::Gather { lengths } => others * 4 * lengths.iter().sum::<u64>(),
            What::ToAll { sent, .. } => sent.iter().sum(),
            What::Pool { bytes } => ranks * others * bytes,
            What::Rows(_) | What::Pooled { .. } => panic!("no experts are shared here"),
        };
        heads + numbers
    });
    bytes.sum()
}

#[test]
fn open_mpi_counts_the_bytes_of_a_plan() {
    if Command::new("mpirun").arg("--version").stdout(Stdio::null()).status().is_err() {
        return skip("mpirun of Open MPI is not installed");
    }
    let s = sandbox();
    for ranks in [2, 4] {
        for shard in ["none", "optimizer", "weights"] {
            let spec = spec(&[&format!("train.parallel.shard={shard}")]);
            let on_paper = prepared(&spec, &CpuDevice::default(), &Group::on_paper(0, ranks));
            let machine = of_table("cpu");
            let mesh = Mesh { machine: &machine, ranks, at_once: AT_ONCE };
            let work = work(&on_paper, spec.train.accumulate / ranks, &mesh);
            // Messages before the first step and after the last are the same in both.
            let [few, more] = [2, 5].map(|steps| monitored(&s, ranks, shard, steps));
            assert_eq!(more - few, 3 * by_mpi(&work, ranks), "{ranks} ranks, {shard}");
            for (name, fault) in OF_WORK {
                let mut wrong = work.clone();
                if shard == "optimizer" {
                    fault(&mut wrong);
                    assert_ne!(more - few, 3 * by_mpi(&wrong, ranks), "{name}");
                }
            }
        }
    }
}

/// A fault in the work of a step, by its name.
type OfWork = (&'static str, fn(&mut Vec<Work>));

/// A fault in the plan whose memory is read, by its name.
type OfPlan = (&'static str, fn(&mut Plan));

fn exchange(work: &mut [Work], is: fn(&What) -> bool, change: impl Fn(&mut Exchange)) {
    let found = work.iter_mut().find_map(|work| match work {
        Work::Begin(exchange) | Work::Wait(exchange) if is(&exchange.what) => Some(exchange),
        Work::Begin(_) | Work::Wait(_) | Work::Launch(_) | Work::Until(_) | Work::Join => None,
    });
    change(Arc::make_mut(found.expect("there is such an exchange")));
}

const OF_WORK: [OfWork; 6] = [
    ("an exchange is forgotten", |work| {
        let at = work.iter().position(|work| matches!(work, Work::Begin(_))).unwrap();
        work.remove(at);
    }),
    ("a micro-batch more is summed", |work| {
        let at = work.iter().position(|work| matches!(work, Work::Begin(_))).unwrap();
        let again = work[at].clone();
        work.push(again);
    }),
    ("the pool of a step is a byte shorter", |work| {
        exchange(
            work,
            |what| matches!(what, What::Pool { .. }),
            |e| e.what = What::Pool { bytes: POOLED - 1 },
        );
    }),
    ("a sum that is cut is handed out whole", |work| {
        exchange(
            work,
            |what| matches!(what, What::Scatter { .. }),
            |e| {
                e.what = What::Sum { elements: e.elements() };
            },
        );
    }),
    ("weights are not handed out", |work| {
        work.retain(|work| !matches!(work, Work::Wait(e) if matches!(e.what, What::Gather { .. })));
    }),
    ("a part is one number longer", |work| {
        exchange(
            work,
            |what| matches!(what, What::Gather { .. }),
            |e| {
                if let What::Gather { lengths } = &mut e.what {
                    lengths[1] += 1;
                }
            },
        );
    }),
];

fn first(plan: &mut Plan, space: Space) -> &mut Buffer {
    plan.buffers.iter_mut().find(|b| b.space == space).expect("a buffer of the kind")
}

const OF_PLAN: [OfPlan; 4] = [
    ("an activation is not kept", |plan| first(plan, Space::Saved).space = Space::Temporary),
    ("an instance of a gradient is forgotten", |plan| first(plan, Space::Gradients).shape[0] -= 1),
    ("states are those of all ranks", |plan| first(plan, Space::Optimizer).instances *= 2),
    ("the arena is a page longer", |plan| plan.arena += 4096),
];

/// Each fault is noticed by what the tests above compare.
#[test]
fn faults_of_plans_are_noticed() {
    let spec = spec(&["train.parallel.shard=optimizer"]);
    let found = thread::scope(|scope| {
        let run = |group: Group| {
            let spec = &spec;
            scope.spawn(move || step(spec, &group))
        };
        let threads: Vec<_> = over_tcp(2).into_iter().map(run).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect::<Vec<_>>()
    });
    let machine = of_table("cpu");
    let mesh = Mesh { machine: &machine, ranks: 2, at_once: AT_ONCE };
    let prepared = prepared(&spec, &CpuDevice::default(), &Group::on_paper(0, 2));
    let counted = |work: &[Work]| {
        let bytes = mesh.bytes(work);
        Traffic { sent: bytes.star_sent, received: bytes.star_received }
    };
    let right = work(&prepared, 4, &mesh);
    assert_eq!(counted(&right), found[0].0);
    for (name, fault) in OF_WORK {
        let mut wrong = right.clone();
        fault(&mut wrong);
        assert_ne!(counted(&wrong), found[0].0, "{name}");
    }
    let scratch = CpuDevice::default().scratch_bytes(&prepared.compiled.plan).unwrap();
    assert_eq!(Memory::of(&prepared.compiled.plan, scratch), found[0].1);
    for (name, fault) in OF_PLAN {
        let mut wrong = prepared.compiled.plan.clone();
        fault(&mut wrong);
        assert_ne!(Memory::of(&wrong, scratch), found[0].1, "{name}");
    }
}

#[test]
fn the_closed_form_is_the_simulation_of_every_launch_and_message() {
    let mut most = (0, 0);
    for (name, sizes) in
        [("h100x8", &[2, 8, 16, 64, 512, 4096][..]), ("a100x8", &[8, 32]), ("cpu", &[2, 4, 8])]
    {
        let machine = of_table(name);
        for &ranks in sizes {
            for shard in ["none", "optimizer"] {
                // The largest mesh once: each of its messages is one event.
                if ranks > 1000 && shard == "none" {
                    continue;
                }
                let set = [
                    format!("train.batch={ranks}"),
                    format!("train.accumulate={ranks}"),
                    format!("train.parallel.shard={shard}"),
                    "train.optimizer=adamw".into(),
                ];
                let spec = spec(&set.iter().map(String::as_str).collect::<Vec<_>>());
                let prepared = prepared(&spec, &CpuDevice::default(), &Group::on_paper(0, ranks));
                let mesh = Mesh { machine: &machine, ranks, at_once: AT_ONCE };
                let work = work(&prepared, 1, &mesh);
                let (closed, found) = (mesh.step(&work), simulate(&work, &mesh, &|_| 1.0));
                let off = found.step / closed.step - 1.0;
                println!(
                    "{name} {ranks} {shard}: {:.3} ms, {off:+.1e}, {} messages",
                    1e3 * closed.step,
                    found.messages
                );
                // Rings are the closed form. Through the star ranks begin an exchange while rank 0
                // still sends results of the one before, which the closed form does not know.
                let most_off = if name == "cpu" { 0.05 } else { 1e-9 };
                assert!(off.abs() < most_off, "{name}, {ranks} ranks, {shard}: {off}");
                most = most.max((ranks, found.messages));
            }
        }
    }
    assert!(most.0 == 4096 && most.1 > 1_000_000, "{most:?}");
}

/// Of the slots of a rank a turn brings those of this rank's experts: what a plan prices is what
/// a device multiplies, launch by launch.
#[test]
fn matmuls_of_a_turn_are_priced_by_the_rows_that_come() {
    for ranks in [2, 4] {
        let parallel = format!("train.parallel={{experts: {ranks}}}");
        let spec = spec(&[&[parallel.as_str()], &CHOSEN[..]].concat());
        let counted = |group: Group| {
            let device = CpuDevice::new(CpuOptions { threads: Some(1) });
            let mut model =
                Model::of_rank(&device, prepared(&spec, &device, &group).compiled, &group).unwrap();
            model.initialise(1).unwrap();
            model.session().instrument(Instrument { count: true, time: false });
            model.begin_step().unwrap();
            let scale = Scale { loss: 1e-3, auxiliary: 1e-3 };
            let stats = model.backward(&batch(&model), scale, None).unwrap();
            let plan = model.compiled().plan.clone();
            (plan, stats)
        };
        let counted = &counted;
        let found: Vec<_> = thread::scope(|scope| {
            let threads: Vec<_> =
                over_tcp(ranks).into_iter().map(|group| scope.spawn(move || counted(group))).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        for (plan, stats) in found {
            let turns = Turns::of(&plan);
            let priced = executed(&plan, ProgramKey::BACKWARD, &|launch| turns.even(&plan, launch)).unwrap();
            for (priced, found) in priced.launches.iter().zip(&stats.by_launch) {
                assert_eq!(priced.multiply_adds, u128::from(found.multiply_adds), "{}", priced.origin);
            }
            let all = executed(&plan, ProgramKey::BACKWARD, &|_| Extents::default()).unwrap();
            assert!(all.open() && all.multiply_adds > priced.multiply_adds, "all slots are the most");
        }
    }
}

/// Weights that are gathered ahead of their use, and rows of experts: through the star every frame
/// is one event; between GPUs members of a team may begin a turn while others end the one before,
/// which the closed form does not know.
#[test]
fn exchanges_ahead_of_their_use_are_those_of_the_simulation() {
    for (name, ranks, shard, team, bound) in [
        ("cpu", 2, "weights", 1, 0.05),
        ("cpu", 4, "weights", 1, 0.1),
        ("cpu", 4, "none", 4, 0.1),
        ("cpu", 4, "weights", 2, 0.1),
        ("h100x8", 8, "weights", 1, 1e-9),
        ("h100x8", 8, "none", 4, 0.3),
        ("h100x8", 16, "weights", 2, 0.3),
        ("h100x8", 64, "none", 4, 0.3),
    ] {
        let machine = of_table(name);
        let set = [
            format!("train.batch={}", 2 * ranks),
            format!("train.accumulate={}", 2 * ranks),
            format!("train.parallel={{shard: {shard}, experts: {team}}}"),
            "train.optimizer=adamw".into(),
        ];
        let set: Vec<&str> = set.iter().map(String::as_str).chain(CHOSEN).collect();
        let prepared = prepared(&spec(&set), &CpuDevice::default(), &Group::on_paper(0, ranks));
        let mesh = Mesh { machine: &machine, ranks, at_once: AT_ONCE };
        let work = work(&prepared, 2, &mesh);
        let (closed, found) = (mesh.step(&work), simulate(&work, &mesh, &|_| 1.0));
        let off = found.step / closed.step - 1.0;
        println!(
            "{name} {ranks} {shard} {team}: {:.3} ms, exposed {:.3} of {:.3}, {off:+.1e}",
            1e3 * closed.step,
            1e3 * closed.exposed,
            1e3 * closed.exchanges
        );
        assert!(off.abs() < bound, "{name}, {ranks} ranks, {shard}, experts over {team}: {off}");
        // A part of them is hidden.
        assert!(closed.exposed < 0.999 * closed.exchanges, "{name} {ranks} {shard} {team}");
        assert!(work.iter().any(|work| matches!(work, Work::Until(_))), "{name} {ranks} {shard} {team}");
    }
}

#[test]
fn a_slow_rank_holds_up_all() {
    let machine = of_table("h100x8");
    let prepared = prepared(&spec(&[]), &CpuDevice::default(), &Group::on_paper(0, 8));
    let mesh = Mesh { machine: &machine, ranks: 8, at_once: AT_ONCE };
    let work = work(&prepared, 1, &mesh);
    let even = simulate(&work, &mesh, &|_| 1.0).step;
    let one = simulate(&work, &mesh, &|rank| if rank == 5 { 2.0 } else { 1.0 }).step;
    let all = simulate(&work, &mesh, &|_| 2.0).step;
    assert!(one > 1.5 * even && one <= all * 1.0001, "{even} {one} {all}");
}

fn planned(s: &Sandbox, line: &[&str]) -> Value {
    serde_json::from_str(&s.good(&[&["plan"][..], line, &["--json"]].concat())).unwrap()
}

fn sandbox() -> Sandbox {
    let book = "the quick brown fox jumps over the lazy dog\n".repeat(40);
    Sandbox::with(&[("planned.yaml", SPEC), ("book.txt", &book)])
}

#[test]
fn a_run_takes_the_memory_that_its_plan_says() {
    let s = sandbox();
    for shard in ["none", "optimizer"] {
        let set = format!("train.parallel.shard={shard}");
        s.good(&["launch", "-n", "2", "train", "planned.yaml", "--out", shard, "--set", &set]);
        let ledger: Value = serde_json::from_str(&s.read(&format!("{shard}/ledger.json"))).unwrap();
        let plan = planned(&s, &["planned.yaml", "--machine", "cpu", "--ranks", "2"]);
        let of = |o: &&Value| o["shard"] == shard && o["accumulate"] == 8;
        let offer = plan["meshes"].as_array().unwrap().iter().find(of).unwrap();
        let [planned, found] =
            [&offer["memory"]["total"], &ledger["peak_memory"]].map(|n| n.as_u64().unwrap());
        // The ledger is of rank 0, the plan of the rank with the longest part.
        let more = if shard == "none" { 0..1 } else { 0..4096 };
        assert!(planned.checked_sub(found).is_some_and(|n| more.contains(&n)), "{shard}: {planned} {found}");
    }
}

#[test]
fn a_plan_is_printed_and_refuses_what_no_program_runs() {
    let s = sandbox();
    let out = s.good(&["plan", "planned.yaml", "--machine", "h200x8", "--price", "2", "--simulate"]);
    for words in [
        "data 8",
        "shard optimizer",
        "memory of a rank",
        "NVLink 4",
        "step, simulated",
        "best distance",
        "card-hours",
        "not built, and not offered: gradients cut over ranks and weights whole (ZeRO-2)",
    ] {
        assert!(out.contains(words), "{words}: {out}");
    }
    assert!(!out.contains("InfiniBand"), "one node sends nothing between nodes: {out}");
    let out =
        s.good(&["plan", "planned.yaml", "--machine", "h200x8", "--nodes", "2", "--set", "train.batch=16"]);
    assert!(out.contains("InfiniBand NDR"), "{out}");
    for (line, words) in [
        (&["--nodes", "2"][..], "16 ranks cannot share a batch of 8 rows equally: 8 can"),
        (&["--ranks", "9"], "9 ranks on 1 node of h100x8: 8 at the most"),
        (&["--nodes", "2", "--ranks", "12"], "12 ranks leave cards of a node idle"),
        (&["--machine", "h300"], "no machine `h300`: there are h100x8, h200x8, a100x8, cpu"),
        (&["--price", "0"], "--price is 0, and must be above 0"),
        (&["--set", "train.parallel.data=4"], "train.parallel.data is 4, and 8 ranks are planned"),
        (&["--machine", "own.json"], "unknown field `cores`"),
    ] {
        s.write("own.json", "{\"cores\": 2}");
        let error = s.error(&[&["plan", "planned.yaml"][..], line].concat());
        assert!(error.contains(words), "{line:?}: {error}");
    }
    // A machine of one's own, with cards that hold nothing.
    let mut own = serde_json::to_value(of_table("h100x8")).unwrap();
    own["memory"] = Value::from(1u64 << 20);
    own["name"] = "small".into();
    s.write("small.json", &own.to_string());
    let (code, error) = s.bad(&["plan", "planned.yaml", "--machine", "small.json"]);
    assert!(code == 1 && error.contains("no mesh that this program runs fits on small"), "{error}");
}

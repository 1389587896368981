//! SLURM on this machine: a node or several, whose daemons are children of the test.
//!
//! In: the programs of `slurm-wlm` and `munge`. Out: a cluster that takes jobs; its nodes are
//! daemons of this machine with ports of their own. Promise: keys, ports, states and logs are the
//! cluster's own, and its jobs and daemons end with it.

use crate::support::sandbox::texts;
use dreamc_skip::skip;
use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::io::Read;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Within this daemons start, jobs begin, and a requeued job begins again.
const SOON: Duration = Duration::from_secs(60);

/// One cluster.
pub struct Cluster {
    folder: TempDir,
    daemons: Vec<Child>,
    /// Names of its nodes, and the program of their daemons.
    nodes: Vec<String>,
    slurmd: PathBuf,
}

/// The fields of a job by `scontrol show job`.
pub type Job = BTreeMap<String, String>;

/// A program that is installed: daemons are in folders that a user's path may lack.
fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/usr/local/sbin".into()]);
    folders.map(|folder| folder.join(name)).find(|path| path.is_file())
}

fn said(program: &str, arguments: &[&str]) -> String {
    texts(&Command::new(program).args(arguments).output().unwrap()).0.trim().to_string()
}

impl Cluster {
    /// One of one node that is up; nothing, and counted as skipped, where SLURM is not installed.
    pub fn start() -> Option<Self> {
        Cluster::of(vec![said("hostname", &["-s"])])
    }

    /// The same of nodes of these names.
    pub fn of(nodes: Vec<String>) -> Option<Self> {
        let needed = ["munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel"];
        let Some(found) = needed.map(program).into_iter().collect::<Option<Vec<_>>>() else {
            skip("SLURM is not installed: `apt-get install slurm-wlm munge`");
            return None;
        };
        let folder = tempfile::tempdir().unwrap();
        let mut cluster = Cluster { folder, daemons: vec![], nodes, slurmd: found[2].clone() };
        // munged refuses a socket that others cannot reach.
        fs::set_permissions(cluster.path(""), Permissions::from_mode(0o755)).unwrap();
        fs::create_dir(cluster.path("states")).unwrap();
        cluster.nodes.iter().for_each(|node| fs::create_dir(cluster.path(&format!("node-{node}"))).unwrap());
        let mut key = [0; 128];
        File::open("/dev/urandom").unwrap().read_exact(&mut key).unwrap();
        fs::write(cluster.path("key"), key).unwrap();
        fs::set_permissions(cluster.path("key"), Permissions::from_mode(0o600)).unwrap();
        fs::write(cluster.path("slurm.conf"), cluster.configuration()).unwrap();
        let at = |option: &str, name: &str| format!("--{option}={}", cluster.path(name).display());
        let munge = [
            at("socket", "munge"),
            at("key-file", "key"),
            at("log-file", "munged.log"),
            at("pid-file", "munged.pid"),
            at("seed-file", "seed"),
        ];
        let munge = [&["--foreground", "--num-threads=4"].map(str::to_string)[..], &munge].concat();
        cluster.daemon(&found[0], &munge);
        cluster.until("munged has no socket", |c| c.path("munge").exists());
        cluster.daemon(&found[1], &["-D".into(), "-i".into()]);
        for number in 0..cluster.nodes.len() {
            cluster.join(number);
        }
        Some(cluster)
    }

    /// Starts the daemon of a node, and waits until the node takes jobs.
    pub fn join(&mut self, number: usize) {
        let (slurmd, node) = (self.slurmd.clone(), self.nodes[number].clone());
        self.daemon(&slurmd, &["-D".into(), "-N".into(), node.clone()]);
        self.until("a node is not idle", |c| {
            texts(&c.command("sinfo").args(["-h", "-n", &node, "-o", "%T"]).output().unwrap()).0.trim()
                == "idle"
        });
    }

    /// Ends the daemon of the node that was started last, as a machine fails.
    pub fn fail(&mut self) {
        let mut daemon = self.daemons.pop().expect("a node was started");
        daemon.kill().unwrap();
        daemon.wait().unwrap();
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Two partitions of all nodes; jobs of `urgent` take them from those of `usual`.
    fn configuration(&self) -> String {
        let (host, user) = (said("hostname", &["-s"]), said("id", &["-un"]));
        let listeners: Vec<TcpListener> =
            (0..=self.nodes.len()).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let mut ports = listeners.iter().map(|listener| listener.local_addr().unwrap().port());
        let control = ports.next().unwrap();
        let processors = (2 / self.nodes.len()).max(1);
        let of = |(node, port): (&String, u16)| {
            format!(
                "NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={processors} State=UNKNOWN\n"
            )
        };
        let lines: String = self.nodes.iter().zip(ports).map(of).collect();
        let all = self.nodes.join(",");
        // Soon enough for a test; a node by itself has SLURM's five minutes.
        let patience = if self.nodes.len() > 1 { "SlurmdTimeout=5\n" } else { "" };
        // Ranks meet at a port by the number of their job, so that jobs of two clusters of a
        // machine need different ones.
        let first = 1 + u64::from(control) % 10_000 * 100;
        let home = self.path("");
        let home = home.display();
        format!(
            "ClusterName=dreamc
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={home}munge,cred_expire=5
StateSaveLocation={home}states
SlurmdSpoolDir={home}node-%n
SlurmctldPidFile={home}slurmctld.pid
SlurmdPidFile={home}slurmd.%n.pid
{patience}MailProg=/bin/true
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=1,bf_interval=1
ReturnToService=2
FirstJobId={first}
{lines}PartitionName=usual Nodes={all} Default=YES PriorityTier=1
PartitionName=urgent Nodes={all} PriorityTier=2
"
        )
    }

    fn daemon(&mut self, program: &Path, arguments: &[String]) {
        let name = program.file_name().unwrap().to_string_lossy();
        let log = File::options().create(true).append(true).open(self.path(&format!("{name}.out"))).unwrap();
        let mut command = Command::new(program);
        command.args(arguments).env("SLURM_CONF", self.path("slurm.conf")).stdin(Stdio::null());
        command.stdout(log.try_clone().unwrap()).stderr(log);
        self.daemons.push(command.spawn().unwrap());
    }

    /// A command of SLURM's users, of this cluster.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("SLURM_CONF", self.path("slurm.conf")).stdin(Stdio::null());
        command
    }

    /// Output of a command that succeeds.
    pub fn good(&self, program: &str, arguments: &[&str]) -> String {
        let output = self.command(program).args(arguments).output().unwrap();
        let (out, error) = texts(&output);
        assert!(output.status.success(), "{program} {arguments:?}: {out}{error}{}", self.logs());
        out
    }

    /// Submits a job of a folder as its user does; gives its number.
    pub fn submit(&self, mut from: Command, options: &[&str], script: &str) -> String {
        let folder = from.get_current_dir().unwrap().to_path_buf();
        fs::write(folder.join("job.sbatch"), script).unwrap();
        let bin = Path::new(env!("CARGO_BIN_EXE_dreamc")).parent().unwrap();
        let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
        from.env("PATH", path).env("SLURM_CONF", self.path("slurm.conf"));
        let output = from.arg("--parsable").args(options).arg("job.sbatch").output().unwrap();
        let (out, error) = texts(&output);
        assert!(output.status.success(), "sbatch {options:?}: {out}{error}{}", self.logs());
        out.trim().to_string()
    }

    pub fn job(&self, job: &str) -> Job {
        let text = self.good("scontrol", &["show", "-o", "job", job]);
        let fields = text.split_whitespace().filter_map(|field| field.split_once('='));
        fields.map(|(name, value)| (name.into(), value.into())).collect()
    }

    /// Waits until a job is in one of these states.
    pub fn reaches(&self, job: &str, states: &[&str], within: Duration) -> Job {
        let begun = Instant::now();
        loop {
            let found = self.job(job);
            if states.contains(&found["JobState"].as_str()) {
                return found;
            }
            assert!(begun.elapsed() < within, "not {states:?}: {found:?}{}", self.logs());
            sleep(Duration::from_millis(50));
        }
    }

    /// Process of a rank of a job's first step, once it has begun.
    pub fn process(&self, job: &str, rank: u64) -> Option<String> {
        let on = |node: &String| {
            let output = self.command("scontrol").args(["listpids", job, node]).output().unwrap();
            texts(&output).0
        };
        let out: String = self.nodes.iter().map(on).collect();
        let of = |line: &str| match line.split_whitespace().collect::<Vec<_>>()[..] {
            [process, _, "0", _, number] if number == rank.to_string() => Some(process.to_string()),
            _ => None,
        };
        let process = out.lines().find_map(of)?;
        // slurmstepd has this number before it becomes the program.
        let name = fs::read_to_string(format!("/proc/{process}/comm")).ok()?;
        (name.trim() == "dreamc").then_some(process)
    }

    pub fn until(&self, problem: &str, done: impl Fn(&Self) -> bool) {
        let begun = Instant::now();
        while !done(self) {
            assert!(begun.elapsed() < SOON, "{problem} after {SOON:?}{}", self.logs());
            sleep(Duration::from_millis(20));
        }
    }

    fn logs(&self) -> String {
        let log = |name: &str| fs::read_to_string(self.path(name)).unwrap_or_default();
        ["munged.out", "slurmctld.out", "slurmd.out"].map(|name| format!("\n{name}:\n{}", log(name))).concat()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // Jobs first: their processes are no children of the daemons' parent.
        let everyone = said("id", &["-un"]);
        let cancel = |signal| self.command("scancel").args([signal, "-f", "-u", &everyone]).output();
        let _ = (cancel("--signal=KILL"), cancel("--quiet"));
        let begun = Instant::now();
        let busy = || self.command("squeue").arg("-h").output().is_ok_and(|out| !out.stdout.is_empty());
        while busy() && begun.elapsed() < Duration::from_secs(10) {
            sleep(Duration::from_millis(50));
        }
        for daemon in self.daemons.iter_mut().rev() {
            let _ = Command::new("kill").arg(daemon.id().to_string()).status();
            let begun = Instant::now();
            while matches!(daemon.try_wait(), Ok(None)) && begun.elapsed() < Duration::from_secs(5) {
                sleep(Duration::from_millis(20));
            }
            let _ = (daemon.kill(), daemon.wait());
        }
    }
}

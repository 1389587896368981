//! Which rank a process is, by the variables of those who start ranks.
//!
//! *In*: the environment. *Out*: a [`Place`], or nothing for a process on its own. *Promise*: half
//! of what a launcher sets is refused with the name of what is missing, never taken for a process
//! on its own: two of those would train apart in silence.
//!
//! | launcher | variables |
//! |---|---|
//! | `torchrun`, `dreamc launch` | `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT` |
//! | `mpirun` of Open MPI | `OMPI_COMM_WORLD_RANK`, `_SIZE`, `_LOCAL_RANK`, `_LOCAL_SIZE` |
//! | `srun` | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS`, `SLURM_LOCALID`, `SLURM_STEP_TASKS_PER_NODE`, `SLURM_NODEID`, `SLURM_STEP_NODELIST`, `SLURM_JOB_ID` |
//!
//! In this order: what a user sets for `torchrun`'s variables holds under the others, too, and
//! `mpirun` has SLURM start its own processes. An allocation without a step of `srun` is a process
//! on its own.

use super::GroupError;

/// The port of rank 0 where nobody names one: that of `torchrun`.
const PORT: u16 = 29500;

/// A process among the ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its number, from 0.
    pub rank: u64,
    /// How many there are.
    pub size: u64,
    /// Its number among those of its machine.
    pub local_rank: u64,
    /// How many its machine has, where that is known.
    pub local_size: Option<u64>,
    /// Whether `mpirun` of Open MPI started it.
    pub mpi: bool,
    /// The machine of rank 0; empty where only MPI knows it.
    pub address: String,
    /// The port at which rank 0 waits for the others.
    pub port: u16,
}

impl Place {
    /// That of this process; `None` for one on its own.
    pub fn of_environment() -> Result<Option<Self>, GroupError> {
        Place::of(&|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    /// That of a process with these variables.
    pub fn of(variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<Self>, GroupError> {
        let number = |name: &str| -> Result<Option<u64>, GroupError> {
            let parse = |text: String| {
                let bad = |_| GroupError::Meeting(format!("{name} is `{text}`, which is no number"));
                text.parse::<u64>().map_err(bad)
            };
            variable(name).map(parse).transpose()
        };
        let launchers = [
            ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"],
            [
                "OMPI_COMM_WORLD_RANK",
                "OMPI_COMM_WORLD_SIZE",
                "OMPI_COMM_WORLD_LOCAL_RANK",
                "OMPI_COMM_WORLD_LOCAL_SIZE",
            ],
            ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"],
        ];
        for [rank_of, size_of, local_of, locals_of] in launchers {
            let slurm = rank_of.starts_with("SLURM");
            let mpi = rank_of.starts_with("OMPI");
            let (rank, size) = match (number(rank_of)?, number(size_of)?) {
                (Some(rank), Some(size)) => (rank, size),
                (None, None) => continue,
                // The script of a job has these without being a task of a step.
                (Some(_), None) | (None, Some(_)) if slurm => continue,
                (Some(_), None) => return Err(half(rank_of, size_of)),
                (None, Some(1)) => continue,
                (None, Some(_)) => return Err(half(size_of, rank_of)),
            };
            if rank >= size {
                return Err(GroupError::Meeting(format!(
                    "{rank_of} is {rank} and {size_of} is {size}: ranks count from 0"
                )));
            }
            if size == 1 {
                return Ok(None);
            }
            let local_size = match variable(locals_of) {
                Some(list) if slurm => tasks_of(&list, number("SLURM_NODEID")?.unwrap_or(0)),
                _ => number(locals_of)?,
            };
            let one_machine = local_size == Some(size);
            let address = match (variable("MASTER_ADDR"), variable("SLURM_STEP_NODELIST")) {
                (Some(address), _) => address,
                (None, _) if one_machine => "127.0.0.1".into(),
                (None, Some(nodes)) if slurm => first_node(&nodes),
                (None, _) if mpi => String::new(),
                (None, _) => return Err(half(rank_of, "MASTER_ADDR")),
            };
            let port = match (number("MASTER_PORT")?, number("SLURM_JOB_ID")?) {
                (Some(port), _) => u16::try_from(port).ok(),
                // Two jobs on a machine have two ports.
                (None, Some(job)) if slurm => Some(20_000 + (job % 10_000) as u16),
                (None, _) => Some(PORT),
            };
            // The agent of torchrun listens at its port, for a store of its own.
            let taken = variable("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|v| v == "True");
            let port = port.and_then(|port| port.checked_add(u16::from(taken)));
            let port = port.ok_or_else(|| GroupError::Meeting("MASTER_PORT is no port".into()))?;
            let local_rank = number(local_of)?.unwrap_or(0);
            return Ok(Some(Place { rank, size, local_rank, local_size, mpi, address, port }));
        }
        Ok(None)
    }
}

fn half(has: &str, lacks: &str) -> GroupError {
    GroupError::Meeting(format!("{has} is set and {lacks} is not: a rank needs both"))
}

/// The tasks of a node by SLURM's list: `2(x3),1` has two on each of nodes 0 to 2, one on node 3.
fn tasks_of(list: &str, node: u64) -> Option<u64> {
    let mut before = 0u64;
    for part in list.split(',') {
        let (tasks, nodes) = part.split_once("(x").unwrap_or((part, "1)"));
        before = before.saturating_add(nodes.strip_suffix(')')?.parse().ok()?);
        if node < before {
            return tasks.parse().ok();
        }
    }
    None
}

/// The first machine of SLURM's list: `gpu[03-05,9],login` begins with `gpu03`.
fn first_node(list: &str) -> String {
    let Some((prefix, numbers)) = list.split_once('[') else {
        return list.split(',').next().unwrap_or_default().to_string();
    };
    if let Some((first, _)) = prefix.split_once(',') {
        return first.to_string();
    }
    let first: String = numbers.chars().take_while(|c| c.is_ascii_digit()).collect();
    let behind = numbers.split_once(']').map_or("", |(_, behind)| behind);
    format!("{prefix}{first}{}", behind.split(',').next().unwrap_or_default())
}

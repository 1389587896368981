use super::place::Place;
use super::*;
use crate::cpu::CpuDevice;
use crate::{Device, DeviceError};
use dreamc_compiler::{Options, compile};
use std::net::TcpListener;
use std::path::Path;
use std::thread;
use std::time::Instant;

const PATIENCE: Duration = Duration::from_secs(20);

/// Runs `f` on every rank of a group in threads.
fn on<T: Send>(groups: Vec<Group>, f: impl Fn(Group) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let f = &f;
        let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(move || f(group))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// A port that nobody listens at.
fn port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn place(rank: u64, size: u64, port: u16) -> Place {
    Place {
        rank,
        size,
        local_rank: rank,
        local_size: Some(size),
        mpi: false,
        address: "127.0.0.1".into(),
        port,
    }
}

fn over_tcp(size: u64, patience: Duration) -> Vec<Group> {
    let port = port();
    thread::scope(|scope| {
        let meet = |rank| scope.spawn(move || tcp::meet(&place(rank, size, port), patience).unwrap());
        // Rank 0 comes last: the others wait for it.
        let threads: Vec<_> = (0..size).rev().map(meet).collect();
        let mut groups: Vec<Group> = threads.into_iter().map(|t| t.join().unwrap()).collect();
        groups.reverse();
        groups
    })
}

/// Numbers whose sum depends on its order.
fn numbers(rank: u64) -> Vec<f32> {
    (0..12).map(|i| ((rank * 31 + i) as f32).sin() * 10f32.powi((rank % 3) as i32 * 3)).collect()
}

/// Owners of the same experts are compared with one another, whatever the other members have.
#[test]
fn ranks_that_own_the_same_have_the_same() {
    let found = |numbers: [u8; 4]| {
        on(local::groups(4, PATIENCE), |group| {
            group.agree_apart(2, "experts", &[numbers[group.rank() as usize]]).map_err(|e| e.to_string())
        })
    };
    assert!(found([1, 2, 1, 2]).iter().all(Result::is_ok));
    for error in found([1, 2, 1, 3]) {
        let error = error.unwrap_err();
        assert!(error.contains("rank 3 has other experts than rank 1"), "{error}");
    }
}

#[test]
fn every_transport_gives_every_rank_the_same_bits() {
    for size in [1, 2, 4] {
        let sum = (1..size)
            .fold(numbers(0), |sum, rank| sum.iter().zip(numbers(rank)).map(|(a, b)| a + b).collect());
        for groups in [local::groups(size, PATIENCE), over_tcp(size, PATIENCE)] {
            let all = on(groups, |group| {
                let mut reduced = numbers(group.rank());
                group.all_reduce(&mut reduced).unwrap();
                // Parts of different lengths, the last of them empty.
                let cuts = [0, 5, 12, 12, 12];
                let lengths: Vec<u64> = (0..size as usize)
                    .map(|rank| if size == 1 { 12 } else { cuts[rank + 1] - cuts[rank] })
                    .collect();
                let own = group.reduce_scatter(&numbers(group.rank()), &lengths).unwrap();
                assert_eq!(own.len() as u64, lengths[group.rank() as usize]);
                let gathered = group.gather(bytemuck::cast_slice(&own)).unwrap().concat();
                let gathered: Vec<f32> = bytemuck::pod_collect_to_vec(&gathered);
                let said = group.broadcast(size - 1, &[group.rank() as u8; 3]).unwrap();
                let bytes = group.gather(&vec![7; group.rank() as usize]).unwrap();
                group.barrier().unwrap();
                (reduced, gathered, said, bytes)
            });
            for (reduced, gathered, said, bytes) in all {
                assert_eq!(reduced, sum);
                assert_eq!(gathered, sum);
                assert_eq!(said, [size as u8 - 1; 3]);
                assert_eq!(bytes, (0..size).map(|n| vec![7; n as usize]).collect::<Vec<_>>());
            }
        }
    }
}

#[test]
fn a_rank_that_fails_ends_the_others_with_its_number_and_its_words() {
    for groups in [local::groups(3, PATIENCE), over_tcp(3, PATIENCE)] {
        let errors = on(groups, |group| {
            group.barrier().unwrap();
            if group.rank() == 2 {
                group.fail("the disk is full");
                return None;
            }
            group.barrier().err()
        });
        for error in &errors[..2] {
            let reason = "the disk is full".to_string();
            assert_eq!(error, &Some(GroupError::Failed { rank: 2, reason }));
        }
    }
}

#[test]
fn a_rank_that_is_gone_ends_the_others_at_once() {
    for gone in [0, 1] {
        for groups in [local::groups(3, PATIENCE), over_tcp(3, PATIENCE)] {
            let begun = Instant::now();
            let errors = on(groups, |group| if group.rank() == gone { None } else { group.barrier().err() });
            let ended = |rank| Some(GroupError::Ended { rank });
            for (rank, error) in errors.iter().enumerate().filter(|(rank, _)| *rank as u64 != gone) {
                // Of several that end one after another, each hears of the first that it meets.
                assert!(matches!(error, Some(GroupError::Ended { .. })), "rank {rank}: {error:?}");
                assert!(rank != 2 || *error == ended(gone), "{error:?}");
            }
            assert!(begun.elapsed() < PATIENCE / 2);
        }
    }
}

#[test]
fn a_rank_that_hangs_is_named_after_the_time_out() {
    let short = Duration::from_secs(1);
    for groups in [local::groups(3, short), over_tcp(3, short)] {
        let errors = on(groups, |group| {
            if group.rank() == 1 {
                thread::sleep(3 * short);
                return None;
            }
            let error = group.barrier().err();
            // A rank that ends is an error of its own: on a busy machine one would end before
            // another's time is out.
            thread::sleep(2 * short);
            error
        });
        assert_eq!(errors[0], Some(GroupError::Silent { rank: 1, seconds: 1 }));
        assert!(matches!(errors[2], Some(GroupError::Silent { .. })), "{:?}", errors[2]);
    }
}

#[test]
fn ranks_that_ask_for_different_things_are_refused() {
    for groups in [local::groups(2, PATIENCE), over_tcp(2, PATIENCE)] {
        let errors = on(groups, |group| match group.rank() {
            0 => group.all_reduce(&mut [0.0]).unwrap_err().to_string(),
            _ => group.barrier().unwrap_err().to_string(),
        });
        assert!(
            errors[0].contains("rank 1 asks for an all-gather, and rank 0 for an all-reduce"),
            "{errors:?}"
        );
    }
    for groups in [local::groups(2, PATIENCE), over_tcp(2, PATIENCE)] {
        let errors = on(groups, |group| {
            let facts = [("specification", "a".into()), ("data", group.rank().to_string())];
            group.agree(&facts).unwrap_err().to_string()
        });
        for error in errors {
            assert_eq!(error, "rank 1 has another data than rank 0 (1, not 0): all ranks train one model");
        }
    }
}

#[test]
fn strangers_are_not_taken_for_ranks() {
    let port = port();
    let groups = thread::scope(|scope| {
        let first = scope.spawn(move || tcp::meet(&place(0, 2, port), PATIENCE).unwrap());
        let stranger = loop {
            match std::net::TcpStream::connect(("127.0.0.1", port)) {
                Ok(stream) => break stream,
                Err(_) => thread::sleep(Duration::from_millis(5)),
            }
        };
        std::io::Write::write_all(&mut &stranger, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        let second = tcp::meet(&place(1, 2, port), PATIENCE).unwrap();
        vec![first.join().unwrap(), second]
    });
    assert!(on(groups, |group| group.barrier()).iter().all(Result::is_ok));
}

#[test]
fn launchers_say_which_rank_a_process_is() {
    let of = |set: &[(&str, &str)]| {
        let find = |name: &str| set.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string());
        Place::of(&find)
    };
    let torchrun = [
        ("RANK", "3"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("MASTER_ADDR", "node1"),
        ("MASTER_PORT", "1234"),
    ];
    let expected = Place {
        rank: 3,
        size: 4,
        local_rank: 1,
        local_size: Some(2),
        mpi: false,
        address: "node1".into(),
        port: 1234,
    };
    assert_eq!(of(&torchrun).unwrap(), Some(expected.clone()));
    let agent = [&torchrun[..], &[("TORCHELASTIC_USE_AGENT_STORE", "True")]].concat();
    assert_eq!(of(&agent).unwrap(), Some(Place { port: 1235, ..expected.clone() }));
    let slurm = [
        ("SLURM_PROCID", "2"),
        ("SLURM_STEP_NUM_TASKS", "4"),
        ("SLURM_LOCALID", "0"),
        ("SLURM_STEP_NODELIST", "gpu[03-05,9],login"),
        ("SLURM_JOB_ID", "123456"),
    ];
    let found = of(&slurm).unwrap().unwrap();
    assert_eq!((found.rank, found.size, found.address.as_str(), found.port), (2, 4, "gpu03", 23_456));
    // Tasks of this step on this node, whatever the job asked for.
    for (tasks, node, expected) in [
        ("2(x1),1,1", "0", Some(2)),
        ("1(x3),2", "2", Some(1)),
        ("1(x3),2", "3", Some(2)),
        ("1(x3),2", "4", None),
        ("4", "0", Some(4)),
        ("two", "0", None),
        ("2(x", "0", None),
    ] {
        let step =
            [("SLURM_STEP_TASKS_PER_NODE", tasks), ("SLURM_NODEID", node), ("SLURM_NTASKS_PER_NODE", "4")];
        let found = of(&[&slurm[..], &step].concat()).unwrap().unwrap();
        assert_eq!(found.local_size, expected, "{tasks}, node {node}");
        assert_eq!(found.address, if expected == Some(4) { "127.0.0.1" } else { "gpu03" }, "{tasks}");
    }
    assert_eq!(of(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4")]).unwrap(), None, "a job's script");
    let mpi = [
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ];
    let found = of(&mpi).unwrap().unwrap();
    assert_eq!((found.rank, found.mpi, found.address.as_str(), found.port), (1, true, "127.0.0.1", 29500));
    assert_eq!(of(&[]).unwrap(), None);
    assert_eq!(of(&[("RANK", "0"), ("WORLD_SIZE", "1")]).unwrap(), None);
    for (half, words) in [
        (&[("RANK", "0")][..], "RANK is set and WORLD_SIZE is not"),
        (&[("WORLD_SIZE", "2")], "WORLD_SIZE is set and RANK is not"),
        (&[("RANK", "2"), ("WORLD_SIZE", "2")], "ranks count from 0"),
        (&[("RANK", "one"), ("WORLD_SIZE", "2")], "which is no number"),
        (&[("RANK", "1"), ("WORLD_SIZE", "2")], "MASTER_ADDR is not"),
    ] {
        let error = of(half).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn a_plan_for_another_number_of_ranks_is_refused() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/quickstart.yaml");
    let (spec, _) = dreamc_dsl::load(&path, &[]).unwrap();
    let device = CpuDevice::default();
    let plan = |ranks| {
        let options = Options { train: true, sequence: 8, ranks, ..Options::default() };
        compile(&spec, &options).unwrap().plan
    };
    assert!(device.load(&plan(1), &Group::alone()).is_ok());
    let text = plan(2).to_string();
    assert!(text.contains("all_reduce") && !plan(1).to_string().contains("all_reduce"));
    match device.load(&plan(2), &Group::alone()).err() {
        Some(error @ DeviceError::OtherGroup { ranks: 2, size: 1, .. }) => {
            assert!(error.to_string().contains("gradients are summed over 2 ranks, and the group has 1"));
        }
        other => panic!("a rank would train apart: {other:?}"),
    }
    let pair = local::groups(2, PATIENCE).remove(1);
    match device.load(&plan(2), &pair).err() {
        Some(DeviceError::OtherRank { rank: 0, own: 1, .. }) => {}
        other => panic!("a rank would look at the part of another: {other:?}"),
    }
    assert!(device.load(&plan(2), &local::groups(2, PATIENCE).remove(0)).is_ok());
}

#[test]
fn a_rank_hears_of_a_failure_without_exchanging() {
    for groups in [local::groups(3, PATIENCE), over_tcp(3, PATIENCE)] {
        let errors = on(groups, |group| {
            group.barrier().unwrap();
            assert_eq!(group.failed(), None);
            group.barrier().unwrap();
            if group.rank() == 2 {
                group.fail("the card is gone");
                return None;
            }
            let begun = Instant::now();
            loop {
                if let Some(error) = group.failed() {
                    return Some(error);
                }
                assert!(begun.elapsed() < PATIENCE, "nothing was heard");
                thread::sleep(Duration::from_millis(5));
            }
        });
        let reason = "the card is gone".to_string();
        let expected = Some(GroupError::Failed { rank: 2, reason });
        assert_eq!(errors, [expected.clone(), expected, None]);
    }
}

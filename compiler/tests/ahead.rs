//! Exchanges that begin ahead of their use: their order, the room that they take, and that nothing
//! changes what they read meanwhile.

mod unrolled;

use dreamc_compiler::ahead::{Ahead, ahead};
use dreamc_compiler::program::kernel::{Gathered, Returned, Scattered, Sent};
use dreamc_compiler::program::{BufferId, Kernel, KernelKind, Operand, Plan};
use dreamc_compiler::{Compiled, Options, compile};
use dreamc_dsl::spec::Shard;
use std::path::Path;
use unrolled::{Placed, list};

const RANKS: u64 = 4;

fn compiled(name: &str, shard: Shard, experts: u64) -> Compiled {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../examples/{name}"));
    let (spec, _) = dreamc_dsl::load(&path, &[]).unwrap();
    let options =
        Options { train: true, sequence: 8, ranks: RANKS, rank: 1, shard, experts, ..Options::default() };
    compile(&spec, &options).unwrap()
}

/// Bytes of an exchange of those that may be ahead, and whether its result is waited for there.
fn bytes(plan: &Plan, (launch, _): &Placed) -> Option<(u64, bool)> {
    let unit = match &launch.operands[0] {
        Operand::Tensor { buffer, .. } => plan.buffer(*buffer).dtype.bytes(),
        Operand::Index(_) => 0,
    };
    match plan.kernel(launch.kernel) {
        Kernel::Gathered(Gathered { elements, .. }) => Some((4 * elements, true)),
        Kernel::Scattered(Scattered { elements, .. }) => Some((4 * elements, false)),
        Kernel::Sent(Sent { slots, width, .. }) => Some((slots * width * unit, true)),
        Kernel::Returned(Returned { slots, width, .. }) => Some((slots * width * unit, false)),
        _ => None,
    }
}

/// Where each exchange begins among the launches of a program and where it ends, by a rank that
/// goes through them.
fn spans(plan: &Plan, name: &str) -> (Ahead, Vec<(usize, usize, usize)>) {
    let ahead = ahead(plan, &plan.programs[name]);
    let launches = list(plan, name);
    let places: Vec<usize> = (0..launches.len()).filter(|&i| bytes(plan, &launches[i]).is_some()).collect();
    assert_eq!(places.len(), ahead.list.len(), "{name}");
    let (mut begins, mut ends) = (vec![None; places.len()], vec![launches.len(); places.len()]);
    // One thread does all in the order in which they begin: an exchange that is over ends those
    // before.
    let mut queue: Vec<usize> = ahead.first.clone();
    ahead.first.iter().for_each(|&first| begins[first] = Some(0));
    let mut end = |queue: &[usize], number: usize, place: usize| {
        let last = queue.iter().position(|&other| other == number).expect("it has begun");
        queue[..=last].iter().for_each(|&other| ends[other] = ends[other].min(place.max(places[other])));
    };
    for (i, &place) in places.iter().enumerate() {
        let exchange = &ahead.list[i];
        let (launch, variables) = &launches[place];
        for operand in &launch.operands {
            let (Operand::Tensor { instance: of, .. } | Operand::Index(of)) = operand;
            assert_eq!(of.at(&exchange.variables), of.at(variables), "{name}: exchange {i} is another");
        }
        assert_eq!(exchange.begun, begins[i].is_some(), "{name}: exchange {i} begins twice, or never");
        let own = if exchange.begun { None } else { Some(i) };
        for number in own.into_iter().chain(exchange.then.iter().copied()) {
            // The others begin when this one is there.
            if exchange.waits && number != i {
                end(&queue, i, place);
            }
            if let Some(over) = ahead.list[number].over {
                end(&queue, over, place);
            }
            begins[number] = Some(place);
            queue.push(number);
        }
        if exchange.waits {
            end(&queue, i, place);
        }
    }
    let spans = places.iter().enumerate().map(|(i, &place)| (begins[i].unwrap(), place, ends[i])).collect();
    (ahead, spans)
}

#[test]
fn what_an_exchange_reads_and_leaves_is_touched_by_nothing_meanwhile() {
    let mut early = [0, 0];
    for (name, shard, experts) in [
        ("quickstart.yaml", Shard::Weights, 1),
        ("quickstart.yaml", Shard::None, 4),
        ("quickstart.yaml", Shard::Weights, 2),
        ("tiny-la.yaml", Shard::Weights, 1),
        ("tiny-prelude-core-coda.yaml", Shard::Weights, 1),
    ] {
        let plan = compiled(name, shard, experts).plan;
        for program in plan.programs.keys() {
            let launches = list(&plan, program);
            let (ahead, spans) = spans(&plan, program);
            for (number, &(begin, place, end)) in spans.iter().enumerate() {
                let (launch, variables) = &launches[place];
                let gathers = matches!(plan.kernel(launch.kernel), Kernel::Gathered(_));
                early[usize::from(!gathers)] += usize::from(begin < place);
                assert!(begin <= place && place <= end, "{name} {program}: {number}");
                // From its beginning on nothing writes what it reads.
                let reads = touched(&plan, &launches[place], &|slot| slot.role.reads());
                for other in &launches[begin..place] {
                    let writes = touched(&plan, other, &|slot| slot.role.writes());
                    assert!(apart(&reads, &writes), "{name} {program}: {} {variables:?}", launch.origin);
                }
                // Until its end nothing touches what it leaves, but other exchanges of its kind.
                let kind = std::mem::discriminant(plan.kernel(launch.kernel));
                let writes = touched(&plan, &launches[place], &|slot| slot.role.writes());
                for other in launches.iter().take(end).skip(place + 1) {
                    let same = std::mem::discriminant(plan.kernel(other.0.kernel)) == kind;
                    let all = touched(&plan, other, &|_| true);
                    assert!(same || apart(&writes, &all), "{name} {program}: {}", launch.origin);
                }
            }
            // Exchanges under way between two launches fit into the room.
            let sizes: Vec<u64> =
                launches.iter().filter_map(|l| bytes(&plan, l)).map(|(bytes, _)| bytes).collect();
            for at in 0..launches.len() {
                let held = spans.iter().zip(&sizes).filter(|((begin, _, end), _)| *begin < at && at < *end);
                let held: u64 = held.map(|(_, bytes)| bytes).sum();
                assert!(held <= ahead.room, "{name} {program}: {held} of {} at {at}", ahead.room);
            }
        }
    }
    assert!(early[0] > 20 && early[1] > 5, "{early:?} begin early");
}

/// The ranges of the arena that a launch touches in some way, by instance.
fn touched(
    plan: &Plan,
    (launch, variables): &Placed,
    is: &dyn Fn(&dreamc_compiler::program::Slot) -> bool,
) -> Vec<(u64, u64)> {
    let slots = plan.kernel(launch.kernel).signature();
    let range = |id: BufferId, instance: u64| {
        let b = plan.buffer(id);
        let each = b.bytes() / b.instances.max(1);
        (b.offset + instance * each, b.offset + (instance + 1) * each)
    };
    launch
        .operands
        .iter()
        .zip(&slots)
        .filter(|(_, slot)| is(slot))
        .filter_map(|(operand, _)| match operand {
            Operand::Tensor { buffer, instance, .. } => Some(range(*buffer, instance.at(variables))),
            Operand::Index(_) => None,
        })
        .collect()
}

fn apart(some: &[(u64, u64)], others: &[(u64, u64)]) -> bool {
    some.iter().all(|a| others.iter().all(|b| a.1 <= b.0 || b.1 <= a.0))
}

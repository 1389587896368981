//! Exchanges that begin ahead of their use: their order, which is that of all ranks, the slots that
//! they have, and that nothing changes what they read meanwhile.

mod unrolled;

use dreamc_compiler::ahead::{Ahead, ahead};
use dreamc_compiler::program::kernel::{Gathered, Returned, Scattered, Sent};
use dreamc_compiler::program::{BufferId, Kernel, KernelKind, Operand, Plan, ProgramKey};
use dreamc_compiler::{Compiled, Options, compile};
use dreamc_dsl::spec::Shard;
use std::path::Path;
use unrolled::{Placed, list};

const RANKS: u64 = 4;

fn compiled(name: &str, shard: Shard, experts: u64, rank: u64) -> Compiled {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../examples/{name}"));
    let (spec, _) = dreamc_dsl::load(&path, &[]).unwrap();
    let options =
        Options { train: true, sequence: 8, ranks: RANKS, rank, shard, experts, ..Options::default() };
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

/// A program's exchanges by a rank that goes through them.
struct Course {
    /// Where each begins among the launches, where it stands, and where it ends.
    spans: Vec<(usize, usize, usize)>,
    /// Their launches and loop variables, in the order in which they begin.
    order: Vec<(usize, Vec<u64>)>,
}

fn course(plan: &Plan, launches: &[Placed], ahead: &Ahead) -> Result<Course, String> {
    let places: Vec<usize> = (0..launches.len()).filter(|&i| bytes(plan, &launches[i]).is_some()).collect();
    if places.len() != ahead.list.len() {
        return Err(format!("{} exchanges of {}", ahead.list.len(), places.len()));
    }
    let (mut begins, mut ends) = (vec![None; places.len()], vec![launches.len(); places.len()]);
    // One thread does all in the order in which they begin: an exchange that is over ends those
    // before.
    let mut queue: Vec<usize> = ahead.first.clone();
    ahead.first.iter().for_each(|&first| begins[first] = Some(0));
    let mut end = |queue: &[usize], number: usize, place: usize| {
        let last = queue.iter().position(|&other| other == number).ok_or("one ends that has not begun")?;
        queue[..=last].iter().for_each(|&other| ends[other] = ends[other].min(place.max(places[other])));
        Ok::<(), String>(())
    };
    for (i, &place) in places.iter().enumerate() {
        let exchange = &ahead.list[i];
        let (launch, variables) = &launches[place];
        let same = |of: &dreamc_compiler::program::Affine| of.at(&exchange.variables) == of.at(variables);
        if !launch.operands.iter().all(|(Operand::Tensor { instance: of, .. } | Operand::Index(of))| same(of))
        {
            return Err(format!("exchange {i} is another"));
        }
        if exchange.begun != begins[i].is_some() {
            return Err(format!("exchange {i} begins twice, or never"));
        }
        let own = if exchange.begun { None } else { Some(i) };
        for number in own.into_iter().chain(exchange.then.iter().copied()) {
            // The others begin when this one is there.
            if exchange.waits && number != i {
                end(&queue, i, place)?;
            }
            if let Some(over) = ahead.list[number].over {
                end(&queue, over, place)?;
            }
            begins[number] = Some(place);
            queue.push(number);
        }
        if exchange.waits {
            end(&queue, i, place)?;
        }
    }
    let spans = places.iter().enumerate().map(|(i, &place)| (begins[i].unwrap_or(place), place, ends[i]));
    let order = queue.iter().map(|&number| (ahead.list[number].launch, ahead.list[number].variables.clone()));
    Ok(Course { spans: spans.collect(), order: order.collect() })
}

/// That nothing changes what an exchange reads, that nothing touches what it leaves, and that no
/// two have a slot at a time.
fn judge(plan: &Plan, name: ProgramKey, ahead: &Ahead) -> Result<Course, String> {
    let launches = list(plan, name);
    let course = course(plan, &launches, ahead)?;
    for &(begin, place, end) in &course.spans {
        let (launch, variables) = &launches[place];
        if begin > place || place > end {
            return Err(format!("{} is over before it begins", launch.origin));
        }
        let reads = touched(plan, &launches[place], &|slot| slot.role.reads());
        for other in &launches[begin..place] {
            let writes = touched(plan, other, &|slot| slot.role.writes());
            if !apart(&reads, &writes) {
                return Err(format!("{} {variables:?} begins before its operand is written", launch.origin));
            }
        }
        // Until its end nothing touches what it leaves, but other exchanges of its kind.
        let kind = std::mem::discriminant(plan.kernel(launch.kernel));
        let writes = touched(plan, &launches[place], &|slot| slot.role.writes());
        for other in launches.iter().take(end).skip(place + 1) {
            let same = std::mem::discriminant(plan.kernel(other.0.kernel)) == kind;
            if !same && !apart(&writes, &touched(plan, other, &|_| true)) {
                return Err(format!("{} is waited for after its use by {}", launch.origin, other.0.origin));
            }
        }
    }
    slots(plan, &launches, ahead)?;
    Ok(course)
}

/// That exchanges which have a slot at one time have different ones inside the room. A slot of what
/// is waited for is free when the program has come to its place, others when their exchange is
/// over.
fn slots(plan: &Plan, launches: &[Placed], ahead: &Ahead) -> Result<(), String> {
    let all: Vec<&Placed> = launches.iter().filter(|launch| bytes(plan, launch).is_some()).collect();
    let kind = |number: usize| std::mem::discriminant(plan.kernel(all[number].0.kernel));
    let gathered = all.iter().filter(|(launch, _)| matches!(plan.kernel(launch.kernel), Kernel::Gathered(_)));
    let into = gathered.filter_map(|(launch, _)| match launch.operands[0] {
        Operand::Tensor { buffer, .. } => Some(buffer),
        Operand::Index(_) => None,
    });
    let into: std::collections::BTreeSet<BufferId> = into.collect();
    let windows: u64 = into.iter().map(|buffer| plan.buffer(*buffer).bytes()).sum();
    let mut held: Vec<usize> = vec![];
    let take = |number: usize, held: &mut Vec<usize>| {
        let own = &ahead.list[number];
        if let Some(over) = own.over {
            held.retain(|&other| other > over || kind(other) != kind(over));
        }
        if own.bytes != bytes(plan, all[number]).map_or(0, |(bytes, _)| bytes) {
            return Err(format!("the slot of exchange {number} is of another size"));
        }
        let meets = |other: &&usize| {
            let other = &ahead.list[**other];
            own.at < other.at + other.bytes && other.at < own.at + own.bytes
        };
        if let Some(other) = held.iter().find(meets) {
            return Err(format!("exchanges {other} and {number} have one slot"));
        }
        if own.at + own.bytes > ahead.room {
            return Err(format!("the slot of exchange {number} is outside of the room"));
        }
        held.push(number);
        let gathers = |number: &usize| matches!(plan.kernel(all[*number].0.kernel), Kernel::Gathered(_));
        let gathered: u64 = held.iter().filter(|n| gathers(n)).map(|n| ahead.list[*n].bytes).sum();
        if gathered > windows {
            return Err("gathers take more than a second set of windows".into());
        }
        Ok(())
    };
    ahead.first.iter().try_for_each(|&number| take(number, &mut held))?;
    for (number, exchange) in ahead.list.iter().enumerate() {
        if !exchange.begun {
            take(number, &mut held)?;
        }
        if exchange.waits {
            held.retain(|&other| other > number || kind(other) != kind(number));
        }
        exchange.then.iter().try_for_each(|&next| take(next, &mut held))?;
    }
    Ok(())
}

const CASES: [(&str, Shard, u64); 5] = [
    ("quickstart.yaml", Shard::Weights, 1),
    ("quickstart.yaml", Shard::None, 4),
    ("quickstart.yaml", Shard::Weights, 2),
    ("tiny-la.yaml", Shard::Weights, 1),
    ("tiny-prelude-core-coda.yaml", Shard::Weights, 1),
];

#[test]
fn what_an_exchange_reads_and_leaves_is_touched_by_nothing_meanwhile() {
    let mut early = [0, 0];
    for (name, shard, experts) in CASES {
        let plans = [0, 1].map(|rank| compiled(name, shard, experts, rank).plan);
        for &program in plans[0].programs.keys() {
            let course = plans.each_ref().map(|plan| {
                let ahead = ahead(plan, &plan.programs[&program]);
                judge(plan, program, &ahead).unwrap_or_else(|problem| panic!("{name} {program}: {problem}"))
            });
            assert_eq!(course[0].order, course[1].order, "{name} {program}: ranks have another order");
            let launches = list(&plans[0], program);
            for &(begin, place, _) in &course[0].spans {
                let gathers = matches!(plans[0].kernel(launches[place].0.kernel), Kernel::Gathered(_));
                early[usize::from(!gathers)] += usize::from(begin < place);
            }
        }
    }
    assert!(early[0] > 20 && early[1] > 5, "{early:?} begin early");
}

/// Faults in the order, each noticed by the judge of the test above.
#[test]
fn a_fault_in_the_order_of_exchanges_is_noticed() {
    let plan = compiled("quickstart.yaml", Shard::Weights, 2, 1).plan;
    let name = ProgramKey::BACKWARD;
    let good = ahead(&plan, &plan.programs[&name]);
    let order = judge(&plan, name, &good).unwrap().order;
    let launches = list(&plan, name);
    let all: Vec<&Placed> = launches.iter().filter(|launch| bytes(&plan, launch).is_some()).collect();
    let first = |is: &dyn Fn(usize, &Kernel) -> bool| {
        (0..all.len()).find(|&i| is(i, plan.kernel(all[i].0.kernel))).unwrap()
    };
    let noticed = |words: &str, fault: &dyn Fn(&mut Ahead)| {
        let mut bad = good.clone();
        fault(&mut bad);
        let problem = judge(&plan, name, &bad).err().unwrap_or_default();
        assert!(problem.contains(words), "{words}: {problem}");
    };
    let sent = first(&|i, kernel| matches!(kernel, Kernel::Sent(_)) && !good.list[i].begun);
    noticed("begins before its operand is written", &|bad| {
        bad.list[sent].begun = true;
        bad.first.push(sent);
    });
    let gathered = first(&|_, kernel| matches!(kernel, Kernel::Gathered(_)));
    noticed("is waited for after its use", &|bad| bad.list[gathered].waits = false);
    let last = first(&|i, kernel| matches!(kernel, Kernel::Returned(_)) && good.list[i].waits);
    noticed("is waited for after its use", &|bad| bad.list[last].waits = false);
    let over = first(&|i, kernel| matches!(kernel, Kernel::Scattered(_)) && good.list[i].over.is_some());
    noticed("have one slot", &|bad| bad.list[over].over = None);
    noticed("outside of the room", &|bad| bad.list[over].at = bad.room);
    let many = (0..all.len()).find(|&i| good.list[i].then.len() > 1).unwrap();
    let next = good.list[many].then.clone();
    noticed("have one slot", &|bad| bad.list[next[1]].at = good.list[next[0]].at);
    noticed("begins twice, or never", &|bad| bad.list[many].then.clear());
    // A rank that begins two in another order breaks no rule of its own.
    let mut other = good.clone();
    other.list[many].then.reverse();
    let other = judge(&plan, name, &other).unwrap().order;
    assert_ne!(order, other, "an order of another rank is not noticed");
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

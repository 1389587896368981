//! Accesses, their times, and whether anything orders them: vector clocks over the threads of a
//! block.
//!
//! Every thread counts its own steps between synchronisations (its *tick*) and knows, through the
//! barriers it has passed, up to which tick it has seen every other thread: its [`View`]. Two
//! accesses to the same bytes, one of them a write, are in order if the later thread has seen the
//! earlier one's tick; otherwise they race, whatever order this run happened to take. Threads that
//! came through the same barrier share one view, so a barrier costs one pass over the threads of
//! the block and not one for each of them.

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

use super::finding::{Kind, Trouble};
use super::hopper::MBARRIERS;
use super::program::Scope;

/// Threads of a warp.
const LANES: usize = 32;

/// The knowledge of a thread.
#[derive(Debug, Clone, Default)]
pub(super) struct View {
    /// For each party of the block (threads, then asynchronous agents) the last tick seen.
    ticks: Box<[u32]>,
    /// The same for accesses to shared memory that a proxy fence has made visible to asynchronous
    /// units; empty without such units.
    proxy: Box<[u32]>,
    /// The same for accesses to global memory; empty where no fence of the kernel does that.
    far: Box<[u32]>,
    /// Views of other blocks, handed over through atomics and fences.
    seen: Option<Rc<BTreeMap<u32, Rc<View>>>>,
}

impl View {
    /// Whether it has seen a party of the block up to a tick.
    pub fn has_seen(&self, party: u32, tick: u32) -> bool {
        self.ticks.get(party as usize).is_some_and(|&seen| seen >= tick)
    }

    /// Takes in what another view has seen.
    fn join(&mut self, other: &View) {
        for (mine, theirs) in self.ticks.iter_mut().zip(&other.ticks) {
            *mine = (*mine).max(*theirs);
        }
        for (mine, theirs) in self.proxy.iter_mut().zip(&other.proxy) {
            *mine = (*mine).max(*theirs);
        }
        self.join_far(other);
        self.join_seen(other.seen.as_ref());
    }

    fn join_far(&mut self, other: &View) {
        for (mine, theirs) in self.far.iter_mut().zip(&other.far) {
            *mine = (*mine).max(*theirs);
        }
    }

    /// All that it has seen of global memory is shown to asynchronous units, what other blocks did
    /// too.
    fn show_far(&mut self) {
        for (far, tick) in self.far.iter_mut().zip(&self.ticks) {
            *far = (*far).max(*tick);
        }
        for view in self.seen.iter_mut().flat_map(|seen| Rc::make_mut(seen).values_mut()) {
            if view.far.iter().zip(&view.ticks).any(|(far, tick)| far < tick) {
                Rc::make_mut(view).show_far();
            }
        }
    }

    fn join_seen(&mut self, other: Option<&Rc<BTreeMap<u32, Rc<View>>>>) {
        let Some(other) = other else { return };
        let Some(mine) = &mut self.seen else {
            self.seen = Some(other.clone());
            return;
        };
        if Rc::ptr_eq(mine, other) {
            return;
        }
        let mine = Rc::make_mut(mine);
        for (&block, view) in other.iter() {
            insert_seen(mine, block, view);
        }
    }
}

fn thread_of(warp: u32, lane: u32) -> u32 {
    warp * LANES as u32 + lane
}

fn insert_seen(seen: &mut BTreeMap<u32, Rc<View>>, block: u32, view: &Rc<View>) {
    let known = seen.entry(block).or_insert_with(|| view.clone());
    if !Rc::ptr_eq(known, view) {
        let known = Rc::make_mut(known);
        for (mine, theirs) in known.ticks.iter_mut().zip(&view.ticks) {
            *mine = (*mine).max(*theirs);
        }
        known.join_far(view);
    }
}

/// The clocks of one block.
#[derive(Debug)]
pub(super) struct Clocks {
    block: u32,
    /// Ticks of the threads.
    own: Vec<u32>,
    /// Own ticks that a proxy fence has covered, for shared memory and for global memory.
    proxied: Vec<u32>,
    far: Vec<u32>,
    views: Vec<Rc<View>>,
    /// Knowledge that the last fence of a thread gives away with its next atomic.
    fenced: Vec<Option<(Rc<View>, Scope)>>,
    /// Knowledge that atomics brought in and the next fence makes count.
    pending: HashMap<u32, Vec<Rc<Release>>>,
    /// Knowledge that the last release fence of a thread covered, for its next relaxed arrival at
    /// an mbarrier.
    given: HashMap<u32, Rc<View>>,
    /// Knowledge that relaxed waits of a thread brought in, until its next acquire fence.
    taken: HashMap<u32, Vec<Rc<View>>>,
}

/// Knowledge that a thread gave away through a location.
#[derive(Debug)]
pub(super) struct Release {
    block: u32,
    view: Rc<View>,
    scope: Scope,
}

/// State of an address that threads synchronise through.
pub(super) type Location = Vec<Rc<Release>>;

impl Clocks {
    /// Clocks for `threads` threads and `agents` asynchronous agents; with those of proxy fences
    /// for shared memory and for global memory where asked.
    pub fn new(block: u32, threads: usize, agents: usize, (proxy, far): (bool, bool)) -> Clocks {
        let parties = threads + agents;
        let view = View {
            ticks: vec![0; parties].into(),
            proxy: vec![0; if proxy { parties } else { 0 }].into(),
            far: vec![0; if far { parties } else { 0 }].into(),
            seen: None,
        };
        let view = Rc::new(view);
        Clocks {
            block,
            own: vec![1; threads],
            proxied: vec![0; threads],
            far: vec![0; threads],
            views: vec![view; threads],
            fenced: vec![None; threads],
            pending: HashMap::new(),
            given: HashMap::new(),
            taken: HashMap::new(),
        }
    }

    /// The tick of a thread.
    #[inline]
    pub fn tick(&self, thread: u32) -> u32 {
        self.own[thread as usize]
    }

    /// Whether `thread` has seen the access that `party` of `block` made at `tick`.
    #[inline]
    pub fn ordered(&self, thread: u32, block: u32, party: u32, tick: u32) -> bool {
        if block == self.block {
            return party == thread || self.views[thread as usize].ticks[party as usize] >= tick;
        }
        let seen = self.views[thread as usize].seen.as_ref().and_then(|seen| seen.get(&block));
        seen.is_some_and(|view| view.ticks[party as usize] >= tick)
    }

    /// Whether a proxy fence stands between the generic access of `party` and an asynchronous one
    /// that `thread` starts.
    pub fn proxied(&self, thread: u32, party: u32, tick: u32) -> bool {
        let own = party == thread && self.proxied[thread as usize] >= tick;
        own || self.views[thread as usize].proxy.get(party as usize).is_none_or(|&seen| seen >= tick)
    }

    /// Whether a proxy fence for global memory stands between an access and an asynchronous one
    /// that `thread` starts.
    pub fn proxied_far(&self, thread: u32, by: &Stamp) -> bool {
        let view = &self.views[thread as usize];
        let shown = |view: &View| view.far.get(by.party as usize).is_some_and(|&seen| seen >= by.tick);
        if by.block != self.block {
            return view.seen.as_ref().and_then(|seen| seen.get(&by.block)).is_some_and(|view| shown(view));
        }
        by.party == thread && self.far[thread as usize] >= by.tick || shown(view)
    }

    /// The threads meet: afterwards each has seen what any had, and `extra`.
    pub fn meet(&mut self, parties: &[(u32, u32)], extra: &[Rc<View>]) {
        let Some(joined) = self.snapshot(parties, extra) else { return };
        for thread in threads(parties) {
            self.own[thread] += 1;
            self.views[thread] = joined.clone();
        }
    }

    /// Knowledge of the threads so far; they go on with new ticks.
    pub fn release(&mut self, parties: &[(u32, u32)]) -> Option<Rc<View>> {
        let joined = self.snapshot(parties, &[])?;
        for thread in threads(parties) {
            self.own[thread] += 1;
        }
        Some(joined)
    }

    fn snapshot(&self, parties: &[(u32, u32)], extra: &[Rc<View>]) -> Option<Rc<View>> {
        let first = threads(parties).next()?;
        let mut joined = View::clone(&self.views[first]);
        let mut last = &self.views[first];
        for thread in threads(parties) {
            // Neighbours mostly share their view.
            if !Rc::ptr_eq(&self.views[thread], last) {
                last = &self.views[thread];
                joined.join(last);
            }
        }
        for view in extra {
            joined.join(view);
        }
        for thread in threads(parties) {
            joined.ticks[thread] = self.own[thread];
            if let Some(proxy) = joined.proxy.get_mut(thread) {
                *proxy = (*proxy).max(self.proxied[thread]);
            }
            if let Some(far) = joined.far.get_mut(thread) {
                *far = (*far).max(self.far[thread]);
            }
        }
        Some(Rc::new(joined))
    }

    /// The threads of a warp take in a view.
    pub fn acquire(&mut self, warp: u32, lanes: u32, view: &Rc<View>) {
        self.change(warp, lanes, |joined| joined.join(view));
    }

    /// Changes the views of threads. Those that share one share the changed one.
    fn change(&mut self, warp: u32, lanes: u32, f: impl Fn(&mut View)) {
        let mut shared: Option<(Rc<View>, Rc<View>)> = None;
        for thread in threads(&[(warp, lanes)]) {
            let old = &self.views[thread];
            let new = match &shared {
                Some((from, to)) if Rc::ptr_eq(from, old) => to.clone(),
                _ => {
                    let mut changed = View::clone(old);
                    f(&mut changed);
                    Rc::new(changed)
                }
            };
            shared = Some((old.clone(), new.clone()));
            self.views[thread] = new;
        }
    }

    /// The threads of a warp see an asynchronous agent up to a tick.
    pub fn acquire_agent(&mut self, warp: u32, lanes: u32, agent: u32, tick: u32) {
        let view = self.of_agent(agent, tick);
        self.acquire(warp, lanes, &view);
    }

    /// An asynchronous agent up to a tick.
    pub fn of_agent(&self, agent: u32, tick: u32) -> Rc<View> {
        let mut view = View { ticks: vec![0; self.own.len() + agent as usize + 1].into(), ..View::default() };
        view.ticks[self.own.len() + agent as usize] = tick;
        Rc::new(view)
    }

    /// The view that a wait of a thread found: at once, or from its next acquire fence on
    /// (`relaxed`).
    pub fn see(&mut self, warp: u32, lane: u32, view: &Rc<View>, relaxed: bool) {
        match relaxed {
            true => self.taken.entry(thread_of(warp, lane)).or_default().push(view.clone()),
            false => self.acquire(warp, 1 << lane, view),
        }
    }

    /// A release fence before relaxed arrivals at mbarriers.
    pub fn release_fence(&mut self, warp: u32, lane: u32) {
        if let Some(view) = self.release(&[(warp, 1 << lane)]) {
            self.given.insert(thread_of(warp, lane), view);
        }
    }

    /// The view that a relaxed arrival of a thread gives away.
    pub fn released(&self, warp: u32, lane: u32) -> Option<Rc<View>> {
        self.given.get(&thread_of(warp, lane)).cloned()
    }

    /// An acquire fence after relaxed waits.
    pub fn acquire_fence(&mut self, warp: u32, lane: u32) {
        for view in self.taken.remove(&thread_of(warp, lane)).unwrap_or_default() {
            self.acquire(warp, 1 << lane, &view);
        }
    }

    /// The party number of an agent.
    pub fn agent(&self, agent: u32) -> u32 {
        self.own.len() as u32 + agent
    }

    /// `fence.proxy.async`: what each thread has seen of shared memory, of global memory or of both
    /// counts for asynchronous units too.
    pub fn proxy_fence(&mut self, warp: u32, lanes: u32, (shared, global): (bool, bool)) {
        self.change(warp, lanes, |fenced| {
            if shared {
                for (proxy, tick) in fenced.proxy.iter_mut().zip(&fenced.ticks) {
                    *proxy = (*proxy).max(*tick);
                }
            }
            if global {
                fenced.show_far();
            }
        });
        for thread in threads(&[(warp, lanes)]) {
            if shared {
                self.proxied[thread] = self.own[thread];
            }
            if global {
                self.far[thread] = self.own[thread];
            }
            self.own[thread] += 1;
        }
    }

    /// A memory fence of one thread: what its atomics brought in counts from here, and what it has
    /// done so far goes out with its next one.
    pub fn fence(&mut self, thread: u32, scope: Scope) {
        for release in self.pending.remove(&thread).unwrap_or_default() {
            self.take(thread, &release, scope);
        }
        let party = [(thread / LANES as u32, 1 << (thread % LANES as u32))];
        self.fenced[thread as usize] = self.release(&party).map(|view| (view, scope));
    }

    /// An atomic (or strong) access of a thread to a synchronising location.
    pub fn synchronise(&mut self, thread: u32, location: &mut Location, how: Synchronise) {
        if how.reads {
            for release in location.iter() {
                if how.acquires {
                    self.take(thread, release, how.scope);
                } else {
                    self.pending.entry(thread).or_default().push(release.clone());
                }
            }
        }
        if how.writes {
            if how.releases {
                self.fence(thread, how.scope);
            }
            if let Some((view, scope)) = &self.fenced[thread as usize] {
                let release = Release { block: self.block, view: view.clone(), scope: *scope };
                location.retain(|old| !covers(&release, old));
                location.push(Rc::new(release));
            }
        }
    }

    fn take(&mut self, thread: u32, release: &Release, scope: Scope) {
        let view = if release.block == self.block {
            release.view.clone()
        } else if release.scope == Scope::Device && scope == Scope::Device {
            let mut seen = release.view.seen.as_ref().map(|seen| BTreeMap::clone(seen)).unwrap_or_default();
            insert_seen(&mut seen, release.block, &release.view);
            let silent = &self.views[thread as usize];
            Rc::new(View {
                ticks: vec![0; silent.ticks.len()].into(),
                proxy: vec![0; silent.proxy.len()].into(),
                far: vec![0; silent.far.len()].into(),
                seen: Some(Rc::new(seen)),
            })
        } else {
            return;
        };
        self.acquire(thread / LANES as u32, 1 << (thread % LANES as u32), &view);
    }
}

/// Whether whoever takes `new` has no need of `old`.
fn covers(new: &Release, old: &Release) -> bool {
    new.block == old.block
        && new.scope >= old.scope
        && new.view.ticks.iter().zip(&old.view.ticks).all(|(new, old)| new >= old)
        && old.view.seen.is_none()
}

/// How an access takes part in synchronisation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Synchronise {
    pub reads: bool,
    pub writes: bool,
    pub acquires: bool,
    pub releases: bool,
    pub scope: Scope,
}

/// The threads that pairs of warp and lanes name.
fn threads(parties: &[(u32, u32)]) -> impl Iterator<Item = usize> + '_ {
    parties.iter().flat_map(|&(warp, lanes)| {
        (0..LANES).filter(move |lane| lanes >> lane & 1 != 0).map(move |lane| warp as usize * LANES + lane)
    })
}

/// An access as remembered.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stamp {
    pub block: u32,
    /// A thread, or an agent; agents are numbered after the threads.
    pub party: u32,
    /// Zero for none.
    pub tick: u32,
    pub pc: u32,
}

const NOBODY: Stamp = Stamp { block: 0, party: 0, tick: 0, pc: 0 };

/// Accesses of lanes of one warp at one tick that do not exclude each other: reads, or atomics.
#[derive(Debug, Clone, Copy)]
struct Readers {
    block: u32,
    lanes: u32,
    tick: u32,
    pc: u32,
    warp: u16,
    atomic: bool,
    /// Whether one of them wrote.
    wrote: bool,
}

const NO_READERS: Readers =
    Readers { block: 0, warp: 0, lanes: 0, tick: 0, pc: 0, atomic: false, wrote: false };

impl Readers {
    /// The first access of them that wrote and is as asked.
    fn find_write(&self, is: &mut impl FnMut(&Stamp) -> bool) -> Option<Stamp> {
        let Readers { block, tick, pc, .. } = *self;
        let mut lanes = if self.wrote { self.lanes } else { 0 };
        while lanes != 0 {
            let party = u32::from(self.warp) * LANES as u32 + lanes.trailing_zeros();
            lanes &= lanes - 1;
            let stamp = Stamp { block, party, tick, pc };
            if is(&stamp) {
                return Some(stamp);
            }
        }
        None
    }
}

/// Memory of one grain: the last write, and the accesses since.
#[derive(Debug, Clone)]
struct Cell {
    write: Stamp,
    first: Readers,
    /// Boxed so that a cell is small; there are many cells.
    #[expect(clippy::box_collection, reason = "a third of the size where there are none")]
    more: Option<Box<Vec<Readers>>>,
}

impl Cell {
    fn readers(&self) -> impl Iterator<Item = &Readers> {
        std::iter::once(&self.first).chain(self.more.iter().flat_map(|more| more.iter()))
    }

    fn readers_mut(&mut self) -> impl Iterator<Item = &mut Readers> {
        std::iter::once(&mut self.first).chain(self.more.iter_mut().flat_map(|more| more.iter_mut()))
    }

    /// The first write that is as asked, of the last plain one and the atomics since.
    #[inline]
    fn find_write(&self, is: &mut impl FnMut(&Stamp) -> bool) -> Option<Stamp> {
        if self.write.tick != 0 && is(&self.write) {
            return Some(self.write);
        }
        self.readers().find_map(|readers| readers.find_write(is))
    }

    fn add(&mut self, readers: Readers) {
        self.more.get_or_insert_default().push(readers);
    }
}

const UNTOUCHED: Cell = Cell { write: NOBODY, first: NO_READERS, more: None };

/// The kinds of access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    Write,
    Atomic,
    /// A read that excludes plain writes alone, as an atomic does.
    Strong,
}

/// Two accesses that nothing orders: the kind of the earlier one, and its party.
#[derive(Debug, Clone, Copy)]
pub(super) struct Conflict {
    pub earlier: Access,
    pub by: Stamp,
}

impl Conflict {
    /// The finding, `space` being what the address is in.
    pub fn trouble(&self, later: Access, place: &str, block: u32, threads: u32, lane: u32) -> Box<Trouble> {
        let verb = |access| match access {
            Access::Read | Access::Strong => "read",
            Access::Write => "write",
            Access::Atomic => "atomic",
        };
        let Stamp { party, block: other, .. } = self.by;
        let copies = threads..threads + MBARRIERS as u32;
        let (who, right) = if other != block {
            let right = "blocks that touch different memory, or a launch of its own for the later access";
            (format!("thread {party} of block {other}"), right)
        } else if party < threads {
            let right = "a barrier (__syncthreads, or __syncwarp within a warp) between the two";
            (format!("thread {party} of the block"), right)
        } else if copies.contains(&party) {
            ("a bulk copy".into(), "waiting for the copy's mbarrier before the data is touched")
        } else {
            ("a wgmma".into(), "handing the memory on only after wgmma.wait_group")
        };
        let what = format!("a race in {place}: this {} and the {} by {who}", verb(later), verb(self.earlier));
        Trouble::new(Kind::Race, what, right).lane(lane).other(self.by.pc)
    }
}

impl Cell {
    /// Enters an access; gives the conflict where something earlier is not ordered before it.
    #[inline]
    fn access(&mut self, by: Stamp, access: Access, islands: bool, clocks: &Clocks) -> Result<(), Conflict> {
        let write = &self.write;
        if write.tick != 0
            && !(write.block == by.block && write.party == by.party)
            && !clocks.ordered(by.party, write.block, write.party, write.tick)
        {
            return Err(Conflict { earlier: Access::Write, by: *write });
        }
        if access == Access::Write {
            if self.first.lanes != 0 {
                self.conflict_with_readers(by, access, clocks)?;
                self.first = NO_READERS;
                self.more = None;
            }
            self.write = by;
            return Ok(());
        }
        let (atomic, wrote) = (matches!(access, Access::Atomic | Access::Strong), access == Access::Atomic);
        let (warp, lane) = ((by.party / LANES as u32) as u16, by.party % LANES as u32);
        let same = |readers: &Readers| {
            readers.warp == warp
                && readers.tick == by.tick
                && readers.block == by.block
                && (readers.atomic, readers.wrote) == (atomic, wrote)
        };
        if self.first.lanes == 0 {
            self.first =
                Readers { block: by.block, warp, lanes: 1 << lane, tick: by.tick, pc: by.pc, atomic, wrote };
            return Ok(());
        }
        if same(&self.first) && self.more.is_none() {
            self.first.lanes |= 1 << lane;
            return Ok(());
        }
        self.conflict_with_readers(by, access, clocks)?;
        if let Some(readers) = self.readers_mut().find(|readers| same(readers)) {
            readers.lanes |= 1 << lane;
            return Ok(());
        }
        // Those that came before this access are covered by it. Of other blocks one is enough where
        // blocks cannot order each other: whichever writes later conflicts with that one or with
        // this.
        let mut kept: Vec<Readers> = Vec::new();
        let mut foreign = false;
        for readers in self.readers() {
            let other_block = readers.block != by.block;
            if other_block && islands {
                if !foreign {
                    kept.push(*readers);
                }
                foreign = true;
            } else if first_unordered(readers, by, clocks).is_some() {
                kept.push(*readers);
            }
        }
        let new =
            Readers { block: by.block, warp, lanes: 1 << lane, tick: by.tick, pc: by.pc, atomic, wrote };
        self.first = new;
        self.more = (!kept.is_empty()).then(|| Box::new(kept));
        Ok(())
    }

    fn conflict_with_readers(&self, by: Stamp, access: Access, clocks: &Clocks) -> Result<(), Conflict> {
        for readers in self.readers() {
            let excludes = match access {
                Access::Write => true,
                Access::Read => readers.atomic,
                Access::Atomic | Access::Strong => !readers.atomic,
            };
            if excludes && let Some(party) = first_unordered(readers, by, clocks) {
                let earlier = if readers.atomic { Access::Atomic } else { Access::Read };
                let stamp = Stamp { block: readers.block, party, tick: readers.tick, pc: readers.pc };
                return Err(Conflict { earlier, by: stamp });
            }
        }
        Ok(())
    }

    /// Whether the accesses of two workers, whose blocks nothing orders, exclude each other.
    fn against(&self, other: &Cell) -> Option<(Conflict, Conflict)> {
        let any = |cell: &Cell| {
            if cell.write.tick != 0 {
                return Some(Conflict { earlier: Access::Write, by: cell.write });
            }
            (cell.first.lanes != 0).then(|| {
                let readers = &cell.first;
                let party = u32::from(readers.warp) * LANES as u32 + readers.lanes.trailing_zeros();
                let earlier = if readers.atomic { Access::Atomic } else { Access::Read };
                Conflict {
                    earlier,
                    by: Stamp { block: readers.block, party, tick: readers.tick, pc: readers.pc },
                }
            })
        };
        let (mine, theirs) = (any(self)?, any(other)?);
        let atomics = |cell: &Cell| cell.readers().any(|readers| readers.atomic);
        let written = self.write.tick != 0 || other.write.tick != 0;
        let mixed = atomics(self) != atomics(other) || self.mixed() || other.mixed();
        (written || mixed && (atomics(self) || atomics(other))).then_some((mine, theirs))
    }

    fn mixed(&self) -> bool {
        let mut kinds = self.readers().map(|readers| readers.atomic);
        let first = kinds.next();
        kinds.any(|atomic| Some(atomic) != first)
    }
}

/// The first of the readers that `by` has not seen.
#[inline]
fn first_unordered(readers: &Readers, by: Stamp, clocks: &Clocks) -> Option<u32> {
    let mut lanes = readers.lanes;
    while lanes != 0 {
        let party = u32::from(readers.warp) * LANES as u32 + lanes.trailing_zeros();
        lanes &= lanes - 1;
        let itself = readers.block == by.block && party == by.party;
        if !itself && !clocks.ordered(by.party, readers.block, party, readers.tick) {
            return Some(party);
        }
    }
    None
}

/// Memory of accesses to the block's shared memory.
#[derive(Debug)]
pub(super) struct SharedRaces {
    grain: u64,
    cells: Vec<Cell>,
}

impl SharedRaces {
    pub fn new(bytes: u64, grain: u64) -> SharedRaces {
        SharedRaces { grain, cells: vec![UNTOUCHED; bytes.div_ceil(grain) as usize] }
    }

    /// Enters an access to `bytes` at `offset`, which are inside.
    #[inline]
    pub fn access(
        &mut self,
        offset: u64,
        bytes: u64,
        by: Stamp,
        access: Access,
        clocks: &Clocks,
    ) -> Result<(), Conflict> {
        let (first, last) = (offset / self.grain, (offset + bytes - 1) / self.grain);
        for cell in &mut self.cells[first as usize..=last as usize] {
            cell.access(by, access, true, clocks)?;
        }
        Ok(())
    }

    /// Holds a read against earlier writes, without entering it.
    pub fn check_read(&self, offset: u64, bytes: u64, by: Stamp, clocks: &Clocks) -> Result<(), Conflict> {
        let apart = |write: &Stamp| {
            write.party != by.party && !clocks.ordered(by.party, write.block, write.party, write.tick)
        };
        match self.find_write(offset, bytes, apart) {
            Some(write) => Err(Conflict { earlier: Access::Write, by: write }),
            None => Ok(()),
        }
    }

    /// The first write to a range of bytes that is as asked: the last plain one, or an atomic
    /// since.
    #[inline]
    pub fn find_write(&self, offset: u64, bytes: u64, mut is: impl FnMut(&Stamp) -> bool) -> Option<Stamp> {
        let (first, last) = (offset / self.grain, (offset + bytes - 1) / self.grain);
        self.cells[first as usize..=last as usize].iter().find_map(|cell| cell.find_write(&mut is))
    }

    /// Enters a read by an agent, which the caller has checked.
    pub fn agent_read(&mut self, offset: u64, bytes: u64, by: Stamp) {
        let (first, last) = (offset / self.grain, (offset + bytes - 1) / self.grain);
        let (warp, lane) = ((by.party / LANES as u32) as u16, by.party % LANES as u32);
        let new = Readers { lanes: 1 << lane, block: by.block, warp, tick: by.tick, pc: by.pc, ..NO_READERS };
        for cell in &mut self.cells[first as usize..=last as usize] {
            // A thread that has seen an agent's tick has seen its earlier ones.
            if cell.first.lanes == 0 {
                cell.first = new;
                continue;
            }
            if let Some(old) = cell.readers_mut().find(|old| old.warp == warp && old.lanes == new.lanes) {
                *old = new;
                continue;
            }
            cell.add(new);
        }
    }

    /// Enters a write that no thread made, which the caller has checked.
    pub fn agent_write(&mut self, offset: u64, bytes: u64, by: Stamp) {
        let (first, last) = (offset / self.grain, (offset + bytes - 1) / self.grain);
        for cell in &mut self.cells[first as usize..=last as usize] {
            *cell = Cell { write: by, ..UNTOUCHED };
        }
    }
}

/// Cells in a page of global memory.
const PAGE: u64 = 256;

/// Memory of a worker's accesses to global memory during a launch.
#[derive(Debug)]
pub(super) struct GlobalRaces {
    grain: u64,
    /// By allocation, then by page; pages that were touched.
    pages: Vec<Vec<Option<Box<[Cell]>>>>,
    /// Whether blocks cannot order each other.
    islands: bool,
}

impl GlobalRaces {
    pub fn new(lengths: impl Iterator<Item = u64>, grain: u64, islands: bool) -> GlobalRaces {
        let pages = lengths.map(|bytes| vec![None; bytes.div_ceil(grain * PAGE) as usize]).collect();
        GlobalRaces { grain, pages, islands }
    }

    /// Enters an access to `bytes` at an offset of an allocation.
    #[inline]
    pub fn access(
        &mut self,
        (allocation, offset): (usize, u64),
        bytes: u64,
        by: Stamp,
        access: Access,
        clocks: &Clocks,
    ) -> Result<(), Conflict> {
        let (first, last) = (offset / self.grain, (offset + bytes - 1) / self.grain);
        for cell in first..=last {
            let page = &mut self.pages[allocation][(cell / PAGE) as usize];
            let page = page.get_or_insert_with(|| vec![UNTOUCHED; PAGE as usize].into());
            page[(cell % PAGE) as usize].access(by, access, self.islands, clocks)?;
        }
        Ok(())
    }

    /// The party that wrote to a place during the launch.
    pub fn writer(&self, (allocation, offset): (usize, u64)) -> Option<Stamp> {
        let cell = offset / self.grain;
        let page = self.pages[allocation][(cell / PAGE) as usize].as_ref()?;
        let write = page[(cell % PAGE) as usize].write;
        (write.tick != 0).then_some(write)
    }

    /// The first write of the launch to bytes of an allocation that is as asked: the last plain
    /// one, or an atomic since.
    pub fn find_write(
        &self,
        (allocation, offset): (usize, u64),
        bytes: u64,
        mut is: impl FnMut(&Stamp) -> bool,
    ) -> Option<Stamp> {
        let (first, last) = (offset / self.grain, (offset + bytes - 1) / self.grain);
        (first..=last).find_map(|cell| {
            let page = self.pages[allocation][(cell / PAGE) as usize].as_ref()?;
            page[(cell % PAGE) as usize].find_write(&mut is)
        })
    }

    /// The first conflict between blocks that ran in different workers.
    pub fn across(workers: &mut Vec<GlobalRaces>) -> Option<(Conflict, Conflict)> {
        let mut all = workers.pop()?;
        while let Some(next) = workers.pop() {
            for (mine, theirs) in all.pages.iter_mut().flatten().zip(next.pages.into_iter().flatten()) {
                let (Some(ours), Some(their)) = (mine.as_mut(), &theirs) else {
                    if mine.is_none() {
                        *mine = theirs;
                    }
                    continue;
                };
                for (mine, theirs) in ours.iter_mut().zip(their) {
                    if let Some(conflict) = mine.against(theirs) {
                        return Some(conflict);
                    }
                    if mine.write.tick == 0 && mine.first.lanes == 0 {
                        *mine = theirs.clone();
                    }
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamp(clocks: &Clocks, party: u32) -> Stamp {
        Stamp { block: 0, party, tick: clocks.tick(party), pc: 0 }
    }

    #[test]
    fn a_barrier_orders_and_nothing_else_does() {
        let mut clocks = Clocks::new(0, 64, 0, (false, false));
        let mut shared = SharedRaces::new(64, 4);
        shared.access(0, 4, stamp(&clocks, 0), Access::Write, &clocks).unwrap();
        assert!(shared.access(0, 4, stamp(&clocks, 33), Access::Read, &clocks).is_err());
        shared.access(4, 4, stamp(&clocks, 33), Access::Read, &clocks).unwrap();
        // A barrier of the first warp alone does nothing for the second.
        clocks.meet(&[(0, u32::MAX)], &[]);
        shared.access(0, 4, stamp(&clocks, 5), Access::Read, &clocks).unwrap();
        assert!(shared.access(0, 4, stamp(&clocks, 33), Access::Read, &clocks).is_err());
        clocks.meet(&[(0, u32::MAX), (1, u32::MAX)], &[]);
        shared.access(0, 4, stamp(&clocks, 33), Access::Read, &clocks).unwrap();
        // Reads by two warps, then a write by one of them: the other's read is in the way.
        shared.access(0, 4, stamp(&clocks, 1), Access::Read, &clocks).unwrap();
        let conflict = shared.access(0, 4, stamp(&clocks, 33), Access::Write, &clocks).unwrap_err();
        assert_eq!((conflict.earlier, conflict.by.party), (Access::Read, 1));
    }

    #[test]
    fn atomics_exclude_plain_accesses_only() {
        let mut clocks = Clocks::new(0, 64, 0, (false, false));
        let mut shared = SharedRaces::new(64, 4);
        for thread in [0, 1, 40] {
            shared.access(0, 4, stamp(&clocks, thread), Access::Atomic, &clocks).unwrap();
        }
        assert!(shared.access(0, 4, stamp(&clocks, 40), Access::Read, &clocks).is_err());
        clocks.meet(&[(0, u32::MAX), (1, u32::MAX)], &[]);
        shared.access(0, 4, stamp(&clocks, 40), Access::Read, &clocks).unwrap();
        assert!(shared.access(0, 4, stamp(&clocks, 2), Access::Atomic, &clocks).is_err());
    }

    #[test]
    fn a_release_is_seen_by_who_acquires_it() {
        let mut clocks = Clocks::new(0, 64, 0, (false, false));
        let mut shared = SharedRaces::new(64, 4);
        shared.access(0, 4, stamp(&clocks, 0), Access::Write, &clocks).unwrap();
        let view = clocks.release(&[(0, 1)]).unwrap();
        shared.access(4, 4, stamp(&clocks, 0), Access::Write, &clocks).unwrap();
        clocks.acquire(1, 1, &view);
        shared.access(0, 4, stamp(&clocks, 32), Access::Read, &clocks).unwrap();
        assert!(
            shared.access(4, 4, stamp(&clocks, 32), Access::Read, &clocks).is_err(),
            "written after the release"
        );
        assert!(shared.access(0, 4, stamp(&clocks, 33), Access::Read, &clocks).is_err(), "did not acquire");
    }

    #[test]
    fn blocks_order_each_other_by_fence_atomic_fence() {
        let how =
            Synchronise { reads: true, writes: true, acquires: false, releases: false, scope: Scope::Device };
        for (scope, fences, good) in
            [(Scope::Device, true, true), (Scope::Block, true, false), (Scope::Device, false, false)]
        {
            let mut first = Clocks::new(0, 32, 0, (false, false));
            let mut second = Clocks::new(1, 32, 0, (false, false));
            let mut global = GlobalRaces::new([64].into_iter(), 4, false);
            let mut location = Location::new();
            global.access((0, 0), 4, stamp(&first, 3), Access::Write, &first).unwrap();
            first.meet(&[(0, u32::MAX)], &[]);
            if fences {
                first.fence(0, scope);
            }
            first.synchronise(0, &mut location, how);
            second.synchronise(0, &mut location, how);
            second.fence(0, scope);
            second.meet(&[(0, u32::MAX)], &[]);
            let by = Stamp { block: 1, party: 7, tick: second.tick(7), pc: 0 };
            assert_eq!(
                global.access((0, 0), 4, by, Access::Read, &second).is_ok(),
                good,
                "{scope:?} {fences}"
            );
        }
    }

    #[test]
    fn workers_compare_what_their_blocks_did() {
        let clocks: Vec<Clocks> = (0..3).map(|block| Clocks::new(block, 32, 0, (false, false))).collect();
        let by = |block: u32| Stamp { block, party: 0, tick: 1, pc: block };
        for (a, b, races) in [
            (Access::Read, Access::Read, false),
            (Access::Read, Access::Write, true),
            (Access::Atomic, Access::Atomic, false),
            (Access::Atomic, Access::Read, true),
        ] {
            let mut workers: Vec<GlobalRaces> =
                (0..2).map(|_| GlobalRaces::new([4096].into_iter(), 4, true)).collect();
            workers[0].access((0, 2048), 4, by(0), a, &clocks[0]).unwrap();
            workers[1].access((0, 2048), 4, by(1), b, &clocks[1]).unwrap();
            assert_eq!(GlobalRaces::across(&mut workers).is_some(), races, "{a:?} {b:?}");
        }
        // Many readers, then a writer that is one of them.
        let mut global = GlobalRaces::new([64].into_iter(), 4, true);
        for block in 0..3 {
            global.access((0, 0), 4, by(block), Access::Read, &clocks[block as usize]).unwrap();
        }
        assert!(global.access((0, 0), 4, by(2), Access::Write, &clocks[2]).is_err());
    }
}

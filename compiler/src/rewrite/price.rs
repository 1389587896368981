//! Prices of selections: of a whole one, and of a move by what it changes.
//!
//! *In*: the choices of an [`Extractor`], and one e-node for each class. *Out*: a [`Total`].
//! Operands are walked once, element-wise chains pay for what leaves their kernel, weights that are
//! prepared once are charged to all calls they serve. A class is charged by its e-node and by its
//! [`Marks`], which are what its readers do with it; so a move changes the charges of the classes
//! that it sets, brings in or drops, and of those whose marks change with them. [`Standing`] keeps
//! marks and readers of a selection and prices a move by these, which does not grow with the
//! function; `tests.rs` compares it with the price of the whole.

use super::extract::{Choice, Extractor, Kind, Selection};
use super::target::Target;
use crate::count::roofline::Demand;
use crate::schedule::reader_level;
use egg::Id;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::ops::{AddAssign, SubAssign};

/// The cost of a selection in one call.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Total {
    /// Predicted time.
    pub seconds: f64,
    /// Multiplies and adds of products.
    pub flops: f64,
    /// Bytes moved.
    pub bytes: f64,
    /// Launches.
    pub launches: f64,
}

impl Total {
    /// The same work for a share of the price.
    fn share(self, of: f64) -> Total {
        Total {
            seconds: self.seconds * of,
            flops: self.flops * of,
            bytes: self.bytes * of,
            launches: self.launches * of,
        }
    }
}

impl AddAssign for Total {
    fn add_assign(&mut self, other: Total) {
        self.seconds += other.seconds;
        self.flops += other.flops;
        self.bytes += other.bytes;
        self.launches += other.launches;
    }
}

impl SubAssign for Total {
    fn sub_assign(&mut self, other: Total) {
        *self += other.share(-1.0);
    }
}

/// Marks of a class in a selection.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Marks {
    /// Something reads it from memory.
    stored: bool,
    /// A row kernel reads it there.
    row_read: bool,
    /// The function returns it.
    returned: bool,
}

/// Heights between a class of a selection that is priced whole and its highest operand: what a move
/// brings in stands there, and nothing above it has to rise.
const GAP: usize = 1 << 16;

/// Level and row dimensions of a row kernel.
type Group = (u32, Option<usize>);

/// How many classes a row kernel has, and the age at which they last changed.
#[derive(Clone, Copy, Default)]
struct Members {
    count: u32,
    changed: u64,
}

/// The row kernels of a selection, by row dimensions and level.
#[derive(Clone, Default)]
struct Groups {
    members: Vec<Vec<Members>>,
    /// Kernels that have any.
    kernels: usize,
}

impl Groups {
    fn members(&mut self, (level, rows): Group) -> &mut Members {
        let rows = rows.map_or(0, |rows| rows + 1);
        if rows >= self.members.len() {
            self.members.resize(rows + 1, vec![]);
        }
        let levels = &mut self.members[rows];
        if level as usize >= levels.len() {
            levels.resize(level as usize + 1, Members::default());
        }
        &mut levels[level as usize]
    }

    /// Dates kernels that have another number of classes than before, and keeps the dates of
    /// others.
    fn grow_older_than(&mut self, before: &Self, age: u64) {
        for rows in 0..self.members.len().max(before.members.len()) {
            let levels = |groups: &Self| groups.members.get(rows).map_or(0, Vec::len);
            for level in 0..levels(self).max(levels(before)) {
                let old = before.members.get(rows).and_then(|levels| levels.get(level));
                let old = old.copied().unwrap_or_default();
                let group = (level as u32, rows.checked_sub(1));
                let now = self.members(group);
                now.changed = if now.count == old.count { old.changed } else { age };
            }
        }
    }

    /// Counts a class into a kernel.
    fn join(&mut self, group: Option<Group>) {
        let Some(group) = group else { return };
        let count = &mut self.members(group).count;
        *count += 1;
        let new = *count == 1;
        self.kernels += usize::from(new);
    }

    /// Counts a class out of a kernel.
    fn leave(&mut self, group: Option<Group>) {
        let Some(group) = group else { return };
        let count = &mut self.members(group).count;
        *count -= 1;
        let gone = *count == 0;
        self.kernels -= usize::from(gone);
    }
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Visit {
    #[default]
    New,
    Open,
    Done,
}

impl Extractor<'_> {
    /// Classes that a selection reaches, operands first; `None` where it turns in a circle.
    pub fn live(&self, selection: &Selection) -> Option<Vec<usize>> {
        let mut state = vec![Visit::New; self.classes.len()];
        let mut order = vec![];
        let mut stack = vec![(self.root, false)];
        while let Some((class, ready)) = stack.pop() {
            match (state[class], ready) {
                (_, true) => {
                    state[class] = Visit::Done;
                    order.push(class);
                }
                (Visit::New, _) => {
                    state[class] = Visit::Open;
                    stack.push((class, true));
                    for &c in &self.choices[class][selection[class]].children {
                        match state[c] {
                            Visit::Open => return None,
                            Visit::New => stack.push((c, false)),
                            Visit::Done => {}
                        }
                    }
                }
                _ => {}
            }
        }
        Some(order)
    }

    /// The cost of a selection; `None` where it turns in a circle.
    pub fn price(&self, selection: &Selection) -> Option<Total> {
        Standing::new(self, selection.clone()).map(|s| s.total)
    }

    /// Use that `reader`, with marks `of` its own, makes of the class that is its operand `k`.
    fn reads(&self, reader: usize, c: &Choice, of: Marks, k: usize, below: Kind) -> Marks {
        let child = c.children[k];
        let stored = Marks { stored: true, ..Marks::default() };
        match c.kind {
            Kind::Free if c.returns => Marks { returned: true, ..stored },
            Kind::Free => Marks { stored: of.stored, row_read: of.row_read, ..Marks::default() },
            Kind::Row => Marks {
                row_read: true,
                stored: self.rows[child] != self.rows[reader] && self.rows[child].is_some(),
                ..Marks::default()
            },
            // Only what reads a gather through its order reads no copy of it.
            Kind::Anchor if below == Kind::Gather && c.through == Some(k) => Marks::default(),
            Kind::Anchor | Kind::Gather => stored,
        }
    }

    /// The price of a class by itself; row kernels are launched by group, which is charged apart.
    fn charge(&self, class: usize, c: &Choice, of: Marks, later: bool) -> Total {
        let (t, rates) = (&self.target, &self.target.rates);
        let Marks { stored, row_read, .. } = of;
        let mut own = Total::default();
        let work = match c.kind {
            Kind::Free => return own,
            Kind::Gather if !stored => return own,
            // Weights are prepared by kernels of their own.
            _ if c.still => c.moved.max(c.elementwise * rates.bandwidth / rates.elementwise),
            Kind::Row => {
                own.seconds += c.elementwise / rates.elementwise;
                if stored { self.bytes[class] } else { 0.0 }
            }
            Kind::Gather | Kind::Anchor => c.moved,
        };
        if c.stepwise {
            own.seconds += c.elementwise / rates.elementwise;
        }
        if stored && !c.still && self.bytes[class] > t.large {
            // Added to everything: memory costs the same however long its computation is.
            own.seconds += work * Target::SPILL / rates.bandwidth;
        }
        own.flops += c.flops;
        own.bytes += work;
        own.seconds += rates.time(self.demand(c.flops, work)).seconds;
        if c.kind != Kind::Row || c.still {
            own.launches += 1.0;
            own.seconds += t.launch;
        }
        // The gradient of a shared expert is summed after all calls.
        let mut total = if later || c.still { own.share(1.0 / self.uses) } else { own };
        // A row kernel reads each operand once.
        if row_read && c.kind != Kind::Row {
            total.bytes += self.bytes[class];
            total.seconds += self.bytes[class] / rates.bandwidth;
        }
        total
    }

    /// Products and traffic of a kernel; element-wise work is charged separately.
    fn demand(&self, flops: f64, bytes: f64) -> Demand {
        Demand { flops, narrow: self.narrow, bytes, ..Demand::default() }
    }

    /// The cost of an e-node by itself.
    pub fn alone(&self, node: Id) -> Total {
        let (class, k) = self.locate(node, node);
        let Some(c) = k.map(|k| &self.choices[class][k]) else { return Total::default() };
        let launches = if matches!(c.kind, Kind::Anchor) { 1.0 } else { 0.0 };
        let (flops, bytes) = (c.flops, if launches > 0.0 { c.moved } else { 0.0 });
        let rates = &self.target.rates;
        let seconds = rates.time(self.demand(flops, bytes)).seconds
            + c.elementwise / rates.elementwise
            + launches * self.target.launch;
        Total { seconds, flops, bytes, launches }
    }
}

/// A class in a selection.
#[derive(Clone, Debug, Default, PartialEq)]
struct Chosen {
    /// The function needs it.
    live: bool,
    marks: Marks,
    /// The price that it was charged.
    charge: Total,
}

/// A selection with everything that its price is made of.
#[derive(Clone)]
pub struct Standing<'x> {
    x: &'x Extractor<'x>,
    selection: Selection,
    /// The e-node of each class, and its kernel.
    nodes: Vec<&'x Choice<'x>>,
    kinds: Vec<Kind>,
    total: Total,
    chosen: Vec<Chosen>,
    /// Row kernels before that of a class; 0 for classes that are not live.
    level: Vec<u32>,
    /// The kernel that a class is in, if that is a row kernel.
    group: Vec<Option<Group>>,
    /// Height of a class, above those of its operands; kept for classes that are live.
    height: Vec<usize>,
    /// Live readers of a class, and the operand that it is to them.
    readers: Vec<Vec<(usize, usize)>>,
    groups: Groups,
    /// How many moves were kept.
    age: u64,
    /// The age at which a class or one next to it last changed.
    changed: Vec<u64>,
    trial: Trial,
}

/// Classes and kernels that a move looked at and was not worth it: until they change, it is not.
pub(super) struct Seen {
    age: u64,
    classes: Vec<usize>,
    groups: Vec<Group>,
}

/// A move on trial: what it changed, so that it can be taken back.
#[derive(Clone, Default)]
struct Trial {
    /// Choices before.
    set: Vec<(usize, usize)>,
    /// Classes before, in the order in which they were touched.
    chosen: Vec<(usize, Chosen)>,
    touched: Vec<bool>,
    /// Levels and kernels before, the last change last.
    levels: Vec<(usize, u32)>,
    moved: Vec<(usize, Option<Group>)>,
    /// Readers added or dropped: class, reader, operand, whether added.
    readers: Vec<(usize, (usize, usize), bool)>,
    /// Classes looked at, as a measure of work.
    work: usize,
    /// Classes whose surroundings the price depends on, each once, and row kernels.
    looked: Vec<usize>,
    groups: Vec<Group>,
    /// The number of this trial, and of the last that looked at a class.
    number: u64,
    last: Vec<u64>,
    /// Classes to look at, each once at a time.
    queue: VecDeque<usize>,
    queued: Vec<bool>,
    /// Heights of classes that a move makes live, 0 for others; those that have one.
    heights: Vec<usize>,
    raised: Vec<usize>,
    /// Marks of a search for circles, all `New` between searches.
    visits: Vec<Visit>,
}

impl Trial {
    fn push(&mut self, class: usize) {
        if !std::mem::replace(&mut self.queued[class], true) {
            self.queue.push_back(class);
        }
    }

    fn pop(&mut self) -> Option<usize> {
        let class = self.queue.pop_front()?;
        self.queued[class] = false;
        self.work += 1;
        self.look(class);
        Some(class)
    }

    /// Remembers that the price depends on a class.
    fn look(&mut self, class: usize) {
        if std::mem::replace(&mut self.last[class], self.number) != self.number {
            self.looked.push(class);
        }
    }
}

impl<'x> Standing<'x> {
    /// Prices a selection whole; `None` where it turns in a circle.
    pub fn new(x: &'x Extractor<'x>, selection: Selection) -> Option<Self> {
        let count = x.classes.len();
        let nodes: Vec<&Choice> = selection.iter().zip(&x.choices).map(|(&k, choices)| &choices[k]).collect();
        let mut s = Standing {
            x,
            selection,
            kinds: nodes.iter().map(|c| c.kind).collect(),
            nodes,
            total: Total::default(),
            chosen: vec![Chosen::default(); count],
            level: vec![0; count],
            group: vec![None; count],
            height: vec![0; count],
            readers: vec![vec![]; count],
            groups: Groups::default(),
            age: 0,
            changed: vec![0; count],
            trial: Trial {
                touched: vec![false; count],
                queued: vec![false; count],
                heights: vec![0; count],
                visits: vec![Visit::New; count],
                last: vec![0; count],
                ..Trial::default()
            },
        };
        s.renew().then_some(s)
    }

    /// The price of the selection.
    pub fn total(&self) -> Total {
        self.total
    }

    /// The selection by itself.
    pub fn into_selection(self) -> Selection {
        self.selection
    }

    /// This with all moves that turn in no circle, whatever they cost; uses up `left`. Trials of
    /// moves hold in both.
    pub fn settled(&self, moves: &[Vec<(usize, usize)>], left: &mut usize) -> Self {
        let mut s = self.clone();
        for to in moves {
            let sound = s.set(to) && *left > 0;
            if sound {
                s.settle_heights();
                s.forget();
            } else {
                s.take_back();
            }
            *left = left.saturating_sub(s.trial.work);
        }
        s.renew();
        s.grow_older_than(self);
        s
    }

    /// Marks all that differs from an earlier selection, as [`grow_older`](Self::grow_older) does
    /// with what one move changed.
    fn grow_older_than(&mut self, before: &Self) {
        self.age += 1;
        for class in 0..self.nodes.len() {
            let same = self.selection[class] == before.selection[class]
                && self.chosen[class] == before.chosen[class]
                && self.level[class] == before.level[class];
            if same {
                continue;
            }
            self.renewed(class);
            // Operands that were read and are not, too: what reads them has changed.
            for &child in before.nodes[class].children.iter().chain(&self.nodes[class].children) {
                self.renewed(child);
            }
        }
        self.groups.grow_older_than(&before.groups, self.age);
    }

    /// Marks a class as changed, and what stands next to it.
    fn renewed(&mut self, class: usize) {
        self.changed[class] = self.age;
        for &child in &self.nodes[class].children {
            self.changed[child] = self.age;
        }
        for &(reader, _) in &self.readers[class] {
            self.changed[reader] = self.age;
        }
    }

    /// Takes a move where the price falls, and says whether it did; uses up `left`. `seen` keeps
    /// what an earlier trial of the same move looked at.
    pub(super) fn improve(
        &mut self,
        to: &[(usize, usize)],
        seen: &mut Option<Seen>,
        left: &mut usize,
    ) -> bool {
        // A class that is not reached has no price.
        if to.iter().all(|&(c, k)| self.selection[c] == k || !self.chosen[c].live) {
            return false;
        }
        if seen.as_ref().is_some_and(|seen| self.is_as(seen)) {
            return false;
        }
        let change = self.set(to).then(|| self.change());
        // A gain in the last bits is noise.
        let gain = change.filter(|c| c.seconds < -1e-12 * self.total.seconds);
        match gain {
            Some(change) => self.keep(change),
            None => {
                *seen = Some(self.seen(to));
                self.take_back();
            }
        }
        *left = left.saturating_sub(self.trial.work);
        gain.is_some()
    }

    /// The classes and kernels that the move on trial looked at.
    fn seen(&mut self, to: &[(usize, usize)]) -> Seen {
        to.iter().for_each(|&(class, _)| self.trial.look(class));
        Seen { age: self.age, classes: self.trial.looked.clone(), groups: self.trial.groups.clone() }
    }

    /// Whether nothing of what a move looked at has changed since.
    pub(super) fn is_as(&mut self, seen: &Seen) -> bool {
        seen.classes.iter().all(|&c| self.changed[c] <= seen.age)
            && seen.groups.iter().all(|&g| self.groups.members(g).changed <= seen.age)
    }

    /// Takes a move and gives the change in price; `None`, and nothing taken, where it turns in a
    /// circle.
    pub fn step(&mut self, to: &[(usize, usize)]) -> Option<Total> {
        if !self.set(to) {
            self.take_back();
            return None;
        }
        let change = self.change();
        self.keep(change);
        Some(change)
    }

    fn choice(&self, class: usize) -> &'x Choice<'x> {
        self.nodes[class]
    }

    /// Everything anew from the selection; `false`, with nothing changed, where it turns in a
    /// circle.
    fn renew(&mut self) -> bool {
        let Some(live) = self.x.live(&self.selection) else { return false };
        self.chosen.iter_mut().for_each(|p| *p = Chosen::default());
        self.readers.iter_mut().for_each(Vec::clear);
        self.level.fill(0);
        self.group.fill(None);
        self.groups = Groups::default();
        for &class in &live {
            let operands = self.choice(class).children.iter().map(|&c| self.height[c]).max();
            self.height[class] = operands.unwrap_or(0) + GAP;
            self.chosen[class].live = true;
            for (k, &child) in self.choice(class).children.iter().enumerate() {
                self.readers[child].push((class, k));
            }
        }
        for &class in live.iter().rev() {
            self.chosen[class].marks = self.marks(class);
        }
        self.total = Total::default();
        self.height[self.x.root] = usize::MAX;
        for &class in live.iter().filter(|&&class| class != self.x.root) {
            self.level[class] = self.level_of(class);
        }
        for &class in &live {
            let charge = self.charge(class);
            self.chosen[class].charge = charge;
            self.total += charge;
            self.group[class] = self.group_of(class);
            self.groups.join(self.group[class]);
        }
        self.total += self.launches(self.groups.kernels as f64);
        true
    }

    fn launches(&self, count: f64) -> Total {
        Total { launches: count, seconds: count * self.x.target.launch, ..Total::default() }
    }

    /// Uses that the readers of a class make of it.
    fn marks(&self, class: usize) -> Marks {
        let kind = self.kinds[class];
        let mut marks = Marks::default();
        for &(reader, k) in &self.readers[class] {
            let c = self.choice(reader);
            let read = self.x.reads(reader, c, self.chosen[reader].marks, k, kind);
            marks.stored |= read.stored;
            marks.row_read |= read.row_read;
            marks.returned |= read.returned;
        }
        marks
    }

    /// Row kernels before that of a class.
    fn level_of(&self, class: usize) -> u32 {
        let c = self.choice(class);
        let row = c.kind == Kind::Row && !c.still;
        let above = c.children.iter().map(|&child| {
            let same = self.x.rows[child] == self.x.rows[class];
            let joins = self.kinds[child] == Kind::Row && same;
            reader_level(self.level[child], row, joins)
        });
        above.max().unwrap_or(0)
    }

    fn charge(&self, class: usize) -> Total {
        let c = self.choice(class);
        let later = c.sums && c.children.iter().all(|&child| self.chosen[child].marks.returned);
        self.x.charge(class, c, self.chosen[class].marks, later)
    }

    fn group_of(&self, class: usize) -> Option<Group> {
        let c = self.choice(class);
        let row = c.kind == Kind::Row && !c.still;
        row.then(|| (self.level[class], self.x.rows[class]))
    }

    /// Remembers a class before it changes.
    fn touch(&mut self, class: usize) {
        if !std::mem::replace(&mut self.trial.touched[class], true) {
            self.trial.chosen.push((class, self.chosen[class].clone()));
        }
    }

    /// Sets classes, and makes their operands live and others not; `false` where it turns in a
    /// circle.
    fn set(&mut self, to: &[(usize, usize)]) -> bool {
        self.trial.work = 0;
        self.trial.looked.clear();
        self.trial.groups.clear();
        self.trial.number += 1;
        let mut dropped = vec![];
        let mut changed = vec![];
        for &(class, k) in to {
            let before = self.selection[class];
            if before == k {
                continue;
            }
            self.choose(class, k);
            self.trial.set.push((class, before));
            // A class set twice is changed once: its operands are those of the first choice.
            if self.chosen[class].live && !changed.contains(&class) {
                changed.push(class);
                dropped.push((class, &self.x.choices[class][before]));
            }
        }
        if !self.turns_in_no_circle(&changed) {
            return false;
        }
        for &class in &changed {
            self.touch(class);
            self.attach(class);
        }
        let mut idle = vec![];
        for &(class, before) in &dropped {
            self.detach(class, before, &mut idle);
        }
        while let Some(class) = idle.pop() {
            if self.readers[class].is_empty() && self.chosen[class].live {
                self.touch(class);
                self.chosen[class].live = false;
                let c = self.choice(class);
                self.detach(class, c, &mut idle);
            }
        }
        true
    }

    fn choose(&mut self, class: usize, k: usize) {
        self.selection[class] = k;
        self.nodes[class] = &self.x.choices[class][k];
        self.kinds[class] = self.nodes[class].kind;
    }

    /// Whether the classes that were changed stand above their operands, whose heights then show
    /// that nothing turns in a circle.
    fn stand_above(&mut self, changed: &[usize]) -> bool {
        let holds = self.raise_new(changed) && {
            changed.iter().all(|&c| {
                self.choice(c).children.iter().all(|&child| self.height_with(child) < self.height[c])
            })
        };
        for class in self.trial.raised.drain(..) {
            self.trial.heights[class] = 0;
        }
        holds
    }

    /// Height of a class with the move on trial.
    fn height_with(&self, class: usize) -> usize {
        if self.chosen[class].live { self.height[class] } else { self.trial.heights[class] }
    }

    /// Heights of the operands that were not live; `false` where these turn in a circle.
    fn raise_new(&mut self, changed: &[usize]) -> bool {
        let mut stack: Vec<(usize, bool)> = vec![];
        for &class in changed {
            stack.extend(self.choice(class).children.iter().map(|&c| (c, false)));
        }
        while let Some((class, ready)) = stack.pop() {
            if self.chosen[class].live {
                continue;
            }
            let children = &self.choice(class).children;
            if ready {
                self.trial.heights[class] =
                    children.iter().map(|&c| self.height_with(c)).max().unwrap_or(0) + 1;
            } else if self.trial.heights[class] == 0 {
                self.trial.work += 1;
                self.trial.heights[class] = usize::MAX;
                self.trial.raised.push(class);
                stack.push((class, true));
                for &c in children {
                    if self.trial.heights[c] == usize::MAX {
                        return false;
                    }
                    stack.push((c, false));
                }
            }
        }
        true
    }

    /// Whether no class that was changed reads itself. A circle leads through one of these, and
    /// over classes that are no lower than the lowest of them or were not live.
    fn turns_in_no_circle(&mut self, changed: &[usize]) -> bool {
        if self.stand_above(changed) {
            return true;
        }
        let Some(lowest) = changed.iter().map(|&c| self.height[c]).min() else { return true };
        let mut state = std::mem::take(&mut self.trial.visits);
        let mut seen = vec![];
        let mut stack: Vec<(usize, bool)> = changed.iter().map(|&c| (c, false)).collect();
        let mut sound = true;
        'all: while let Some((class, ready)) = stack.pop() {
            match (state[class], ready) {
                (_, true) => state[class] = Visit::Done,
                (Visit::New, _) => {
                    seen.push(class);
                    state[class] = Visit::Open;
                    stack.push((class, true));
                    for &c in &self.choice(class).children {
                        match state[c] {
                            Visit::Open => {
                                sound = false;
                                break 'all;
                            }
                            Visit::New if !self.chosen[c].live || self.height[c] >= lowest => {
                                stack.push((c, false));
                            }
                            Visit::New | Visit::Done => {}
                        }
                    }
                }
                _ => {}
            }
        }
        self.trial.work += seen.len();
        for class in seen {
            self.trial.look(class);
            state[class] = Visit::New;
        }
        self.trial.visits = state;
        sound
    }

    /// Enters a class with the operands of its choice, and makes these live.
    fn attach(&mut self, class: usize) {
        let mut stack = vec![class];
        while let Some(class) = stack.pop() {
            for (k, &child) in self.choice(class).children.iter().enumerate() {
                self.touch(child);
                self.readers[child].push((class, k));
                self.trial.readers.push((child, (class, k), true));
                if !std::mem::replace(&mut self.chosen[child].live, true) {
                    stack.push(child);
                }
            }
        }
    }

    /// Takes a class out of the readers of its operands; adds those to `idle` that may have none.
    fn detach(&mut self, class: usize, before: &Choice, idle: &mut Vec<usize>) {
        for (k, &child) in before.children.iter().enumerate() {
            self.touch(child);
            let readers = &mut self.readers[child];
            if let Some(at) = readers.iter().position(|&r| r == (class, k)) {
                readers.swap_remove(at);
                self.trial.readers.push((child, (class, k), false));
            }
            if readers.is_empty() {
                idle.push(child);
            }
        }
    }

    /// The change in price of the move that was set.
    fn change(&mut self) -> Total {
        self.settle_marks();
        self.settle_levels();
        let mut change = Total::default();
        let kernels = self.groups.kernels as f64;
        for n in 0..self.trial.chosen.len() {
            let (class, ref before) = self.trial.chosen[n];
            change -= before.charge;
            let now = if self.chosen[class].live { self.charge(class) } else { Total::default() };
            change += now;
            self.chosen[class].charge = now;
            self.regroup(class);
        }
        for n in 0..self.trial.levels.len() {
            self.regroup(self.trial.levels[n].0);
        }
        self.trial.work += self.trial.chosen.len();
        change += self.launches(self.groups.kernels as f64 - kernels);
        change
    }

    /// Takes a class from the kernel it was in to the one it is in.
    fn regroup(&mut self, class: usize) {
        let now = if self.chosen[class].live { self.group_of(class) } else { None };
        let before = std::mem::replace(&mut self.group[class], now);
        if before != now {
            self.trial.moved.push((class, before));
            self.trial.groups.extend([before, now].into_iter().flatten());
            self.groups.leave(before);
            self.groups.join(now);
        }
    }

    /// Marks of the classes touched, and of what they pass them on to.
    fn settle_marks(&mut self) {
        for n in 0..self.trial.chosen.len() {
            self.trial.push(self.trial.chosen[n].0);
        }
        while let Some(class) = self.trial.pop() {
            if !self.chosen[class].live {
                continue;
            }
            let marks = self.marks(class);
            let before = self.chosen[class].marks;
            if marks == before {
                continue;
            }
            self.touch(class);
            self.chosen[class].marks = marks;
            let c = self.choice(class);
            if c.kind == Kind::Free && !c.returns {
                c.children.iter().for_each(|&child| self.trial.push(child));
            }
            // Whether a sum waits for all calls depends on what else reads its operands.
            if marks.returned != before.returned {
                for n in 0..self.readers[class].len() {
                    self.touch(self.readers[class][n].0);
                }
            }
        }
    }

    /// Levels of the classes that the move set or brought in, and of what reads those: a level
    /// follows from those of the operands, and from whether these are in the same kernel.
    fn settle_levels(&mut self) {
        for n in 0..self.trial.chosen.len() {
            let (class, ref before) = self.trial.chosen[n];
            if !before.live {
                self.trial.push(class);
            }
        }
        for n in 0..self.trial.set.len() {
            let class = self.trial.set[n].0;
            self.trial.push(class);
            self.push_readers(class);
        }
        while let Some(class) = self.trial.pop() {
            if !self.chosen[class].live {
                continue;
            }
            let level = self.level_of(class);
            let before = std::mem::replace(&mut self.level[class], level);
            if level != before {
                self.trial.levels.push((class, before));
                self.push_readers(class);
            }
        }
    }

    /// The readers of a class, but for what the function returns: it has no level and no height.
    fn push_readers(&mut self, class: usize) {
        for &(reader, _) in &self.readers[class] {
            if reader != self.x.root {
                self.trial.push(reader);
            }
        }
    }

    /// Heights of the classes touched, and of what reads them: the lowest first, so that a class
    /// rises once.
    fn settle_heights(&mut self) {
        let mut queue = BinaryHeap::new();
        for n in 0..self.trial.chosen.len() {
            let (class, ref before) = self.trial.chosen[n];
            if !before.live {
                self.height[class] = 0;
            }
            queue.push(Reverse((self.height[class], class)));
        }
        while let Some(Reverse((at, class))) = queue.pop() {
            // Heights only rise: a class that stands elsewhere now was looked at since.
            if !self.chosen[class].live || self.height[class] != at {
                continue;
            }
            self.trial.work += 1;
            let operands = self.choice(class).children.iter().map(|&c| self.height[c]).max();
            let least = operands.unwrap_or(0) + 1;
            if least > at {
                self.height[class] = least;
                let readers = self.readers[class].iter().filter(|(reader, _)| self.height[*reader] <= least);
                queue.extend(readers.map(|&(reader, _)| Reverse((self.height[reader], reader))));
            }
        }
    }

    /// Keeps the move that was set and changes the price.
    fn keep(&mut self, change: Total) {
        self.settle_heights();
        self.total += change;
        self.grow_older();
        for n in 0..self.trial.chosen.len() {
            let class = self.trial.chosen[n].0;
            if !self.chosen[class].live {
                self.chosen[class] = Chosen::default();
                self.level[class] = 0;
            }
        }
        self.forget();
    }

    /// Marks what the move on trial changed, and what stands next to it: prices of moves that
    /// looked there are out of date.
    fn grow_older(&mut self) {
        self.age += 1;
        let trial = std::mem::take(&mut self.trial);
        let differ = trial.chosen.iter().filter(|(class, before)| self.chosen[*class] != *before);
        let classes: Vec<usize> = differ
            .map(|(class, _)| *class)
            .chain(trial.set.iter().map(|(class, _)| *class))
            .chain(trial.levels.iter().map(|(class, _)| *class))
            .chain(trial.moved.iter().map(|(class, _)| *class))
            .chain(trial.readers.iter().map(|(class, ..)| *class))
            .collect();
        for class in classes {
            self.renewed(class);
        }
        for &group in &trial.groups {
            self.groups.members(group).changed = self.age;
        }
        self.trial = trial;
    }

    /// Takes the move back that was set.
    fn take_back(&mut self) {
        let trial = std::mem::take(&mut self.trial);
        for &(class, (reader, k), added) in trial.readers.iter().rev() {
            let readers = &mut self.readers[class];
            if !added {
                readers.push((reader, k));
            } else if let Some(at) = readers.iter().rposition(|&r| r == (reader, k)) {
                readers.swap_remove(at);
            }
        }
        for (class, before) in &trial.chosen {
            self.chosen[*class] = before.clone();
        }
        for &(class, before) in trial.levels.iter().rev() {
            self.level[class] = before;
        }
        for &(class, before) in trial.moved.iter().rev() {
            self.groups.leave(self.group[class]);
            self.group[class] = before;
            self.groups.join(before);
        }
        for &(class, before) in trial.set.iter().rev() {
            self.choose(class, before);
        }
        self.trial = trial;
        self.forget();
    }

    fn forget(&mut self) {
        for (class, _) in self.trial.chosen.drain(..) {
            self.trial.touched[class] = false;
        }
        self.trial.set.clear();
        self.trial.levels.clear();
        self.trial.moved.clear();
        self.trial.readers.clear();
    }
}

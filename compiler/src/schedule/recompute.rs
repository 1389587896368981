//! Values that a row kernel makes again instead of reading them from an earlier one.
//!
//! *In*: a function whose nodes are given to kernels. *Out*: the same with copies of cheap row
//! nodes in the kernels that read them, the copies' originals gone where nobody else reads them,
//! and what only anchors read made in the kernel that has its operands at hand. *Promise*: no value
//! is made again where that reads more bytes than it spares reads and writes; a copy computes what
//! its original does, from the same operands.
//!
//! A row kernel waits for memory, not for arithmetic: a norm or an activation of rows that the
//! kernel has read anyway costs less than to write it to memory in one kernel and to read it in
//! another. Backward functions gain most, since what they recompute of the forward is wanted in
//! several of their kernels.

use super::need::Need;
use super::{Bind, Kind, sums_rows};
use crate::ir::{Dim, Dims, Function, Module, Node, Value};
use crate::op::Class;
use rustc_hash::FxHashSet;
use std::collections::{BTreeMap, BTreeSet};

/// How long a chain of operations may be that is made again for one value.
const CHAIN: usize = 6;

/// Elements of a row beyond which a kernel does not hold it as a whole.
const LONGEST: u64 = 16 * 1024;

/// A function, and for each of its nodes the kernel that it is in.
pub(super) struct Placed {
    pub f: Function,
    pub needs: Vec<Need>,
    pub kinds: Vec<Kind>,
    pub levels: Vec<u32>,
}

/// Makes again what is cheaper made than read.
pub(super) fn recompute(module: &Module, placed: Placed, bind: &[Bind]) -> Placed {
    let mut kernels = Kernels::new(module, &placed, bind);
    while kernels.copy_for_kernels() {}
    kernels.move_to_readers();
    kernels.rebuilt()
}

/// A row kernel: the row nodes of one kind on one level.
struct RowGroup {
    level: u32,
    rows: Dims,
    need: Need,
    /// Nodes that it has copies of.
    copies: BTreeSet<usize>,
    /// Values that it reads or makes.
    there: FxHashSet<Value>,
}

struct Kernels<'a> {
    module: &'a Module,
    f: &'a Function,
    needs: &'a [Need],
    kinds: &'a [Kind],
    /// Levels: those of anchors rise where what they read is made later.
    levels: Vec<u32>,
    /// Whether a value is a result that is wanted.
    returned: Vec<bool>,
    defined: Vec<Option<usize>>,
    /// Which nodes read a value.
    readers: Vec<Vec<usize>>,
    groups: Vec<RowGroup>,
    /// Groups, those of lower levels first.
    by_level: Vec<usize>,
    /// The group of a row node.
    group: Vec<Option<usize>>,
    /// The nodes of each group, copies not among them.
    members: Vec<Vec<usize>>,
    /// Groups with a copy of a node that reads the value.
    copies_read: BTreeMap<Value, BTreeSet<usize>>,
    /// Anchors that read a copy, and whose: by node and value.
    instead: BTreeMap<(usize, Value), usize>,
}

impl<'a> Kernels<'a> {
    fn new(module: &'a Module, placed: &'a Placed, bind: &'a [Bind]) -> Self {
        let Placed { f, needs, kinds, levels } = placed;
        let mut groups: Vec<RowGroup> = vec![];
        let mut group = vec![None; f.nodes.len()];
        let mut members: Vec<Vec<usize>> = vec![];
        for (i, node) in f.nodes.iter().enumerate() {
            let Kind::Row(rows, need) = &kinds[i] else { continue };
            let same = |g: &RowGroup| g.level == levels[i] && g.rows == *rows && g.need == *need;
            // That of the node before is among the last.
            let at = groups.iter().rposition(same).unwrap_or_else(|| {
                let (rows, need) = (rows.clone(), *need);
                groups.push(RowGroup {
                    level: levels[i],
                    rows,
                    need,
                    copies: BTreeSet::new(),
                    there: FxHashSet::default(),
                });
                members.push(vec![]);
                groups.len() - 1
            });
            group[i] = Some(at);
            members[at].push(i);
            groups[at].there.extend(node.inputs.iter().copied().chain(node.results()));
        }
        let (levels, defined) = (levels.clone(), f.definitions());
        let wanted = |results: Vec<usize>| results.into_iter().any(|k| bind[k] != Bind::Ignore);
        let mut by_level: Vec<usize> = (0..groups.len()).collect();
        by_level.sort_by_key(|&g| groups[g].level);
        Kernels {
            module,
            f,
            needs,
            kinds,
            levels,
            returned: f.returns().into_iter().map(wanted).collect(),
            by_level,
            defined,
            readers: f.readers(),
            groups,
            group,
            members,
            copies_read: BTreeMap::new(),
            instead: BTreeMap::new(),
        }
    }

    /// Bytes of a value in each row, and 0 for what is the same in all.
    fn bytes(&self, rows: &[Dim], v: Value) -> u64 {
        let ty = self.f.ty(v);
        match ty.dims.strip_prefix(rows) {
            Some(rest) => ty.dtype.room(self.module.elements(rest)),
            None => 0,
        }
    }

    /// Whether group `g` could have a copy of node `n`.
    fn copyable(&self, g: usize, n: usize) -> bool {
        let node = &self.f.nodes[n];
        let cheap = match node.op.class() {
            Class::View { .. } | Class::Identity | Class::Element(_) => true,
            Class::Row { again, .. } => again,
            Class::Number(_) | Class::Gather(_) | Class::Anchor(..) => false,
        };
        let group = &self.groups[g];
        let Kind::Row(rows, need) = &self.kinds[n] else { return false };
        let short = |v: &Value| self.bytes(rows, *v) <= LONGEST * 4;
        cheap
            && !rows.is_empty()
            && *rows == group.rows
            && (*need == group.need || *need == Need::All)
            && self.levels[n] < group.level
            && !sums_rows(self.f, node)
            && node.inputs.iter().all(|v| short(v) && self.bytes(rows, *v) > 0 || self.small(*v))
    }

    /// Whether a value is short enough to be the same for every row of a kernel.
    fn small(&self, v: Value) -> bool {
        self.module.elements(&self.f.ty(v).dims) <= LONGEST
    }

    /// Whether the memory of the value holds it for as long as the function runs.
    fn lasts(&self, v: Value) -> bool {
        match self.defined[v.index()] {
            None => self.f.params.get(v.index()).is_some_and(|p| !p.binding.is_state()),
            Some(n) if self.kinds[n] == Kind::View => self.lasts(self.f.nodes[n].inputs[0]),
            Some(n) => !in_place(&self.f.nodes[n], v),
        }
    }

    /// Whether somebody reads the value from memory whatever group `g` does.
    fn stored(&self, v: Value, g: usize) -> bool {
        let Some(own) = self.defined[v.index()].map(|n| self.group[n]) else { return true };
        let reads = |&r: &usize| match self.group[r] {
            Some(at) => Some(at) != own && at != g && !self.copied(at, v),
            None => !self.instead.contains_key(&(r, v)),
        };
        own.is_none()
            || self.returned(v)
            || self.readers[v.index()].iter().any(reads)
            || self.copies_read.get(&v).is_some_and(|at| at.iter().any(|&at| at != g && !self.makes(at, v)))
    }

    fn returned(&self, v: Value) -> bool {
        self.returned[v.index()]
    }

    /// Whether group `g` has a copy of what makes the value.
    fn copied(&self, g: usize, v: Value) -> bool {
        self.defined[v.index()].is_some_and(|n| self.groups[g].copies.contains(&n))
    }

    /// Whether group `g` makes the value, first or again.
    fn makes(&self, g: usize, v: Value) -> bool {
        self.copied(g, v) || self.defined[v.index()].is_some_and(|n| self.group[n] == Some(g))
    }

    /// Bytes that group `g` would read in each row to have a value that it has not; adds the nodes
    /// that it would need copies of to `made`, which keeps what it has where there is no way.
    fn cost(&self, g: usize, v: Value, chain: usize, made: &mut Vec<usize>) -> Option<u64> {
        if self.groups[g].there.contains(&v) {
            return Some(0);
        }
        let Some(n) = self.defined[v.index()] else {
            return self.lasts(v).then(|| self.bytes(&self.groups[g].rows, v));
        };
        match &self.kinds[n] {
            Kind::Free => Some(0),
            Kind::Row(..) => {
                let read = (self.stored(v, g) && self.levels[n] < self.groups[g].level)
                    .then(|| self.bytes(&self.groups[g].rows, v));
                let before = made.len();
                let again = (chain > 0 && self.copyable(g, n)).then(|| self.make(g, n, chain - 1, made));
                match (read, again.flatten()) {
                    (Some(read), Some(again)) if read < again => {
                        made.truncate(before);
                        Some(read)
                    }
                    (read, again) => again.or(read),
                }
            }
            Kind::View | Kind::Anchor => {
                let there = self.levels[n] < self.groups[g].level && self.lasts(v);
                there.then(|| self.bytes(&self.groups[g].rows, v))
            }
            Kind::Gathered | Kind::Stored => None,
        }
    }

    /// The same for all operands of a node, with the node itself.
    fn make(&self, g: usize, n: usize, chain: usize, made: &mut Vec<usize>) -> Option<u64> {
        let before = made.len();
        let mut bytes = 0;
        made.push(n);
        let inputs = &self.f.nodes[n].inputs;
        for (k, &v) in inputs.iter().enumerate() {
            let Some(more) = self.cost(g, v, chain, made) else {
                made.truncate(before);
                return None;
            };
            bytes += if inputs[..k].contains(&v) { 0 } else { more };
        }
        Some(bytes)
    }

    /// The bytes of making a node in group `g`, and all nodes that this takes, each once.
    fn cost_of_node(&self, g: usize, n: usize) -> Option<(u64, Vec<usize>)> {
        let mut made = vec![];
        let bytes = self.make(g, n, CHAIN, &mut made)?;
        made.sort_unstable();
        made.dedup();
        Some((bytes, made))
    }

    fn copy(&mut self, g: usize, nodes: &[usize]) {
        for &n in nodes {
            let node = &self.f.nodes[n];
            self.groups[g].copies.insert(n);
            for &v in &node.inputs {
                self.copies_read.entry(v).or_default().insert(g);
            }
            let values: Vec<Value> = node.inputs.iter().copied().chain(node.results()).collect();
            self.groups[g].there.extend(values);
        }
    }

    /// Gives kernels copies of what they read of other kernels, where that reads no more. Whether
    /// there was anything.
    fn copy_for_kernels(&mut self) -> bool {
        let mut any = false;
        for g in 0..self.groups.len() {
            let mut read: BTreeMap<usize, Vec<Value>> = BTreeMap::new();
            for &i in self.members[g].iter().chain(&self.groups[g].copies) {
                for &v in &self.f.nodes[i].inputs {
                    if let Some(n) = self.defined[v.index()]
                        && !self.makes(g, v)
                        && self.copyable(g, n)
                    {
                        let values = read.entry(n).or_default();
                        if !values.contains(&v) {
                            values.push(v);
                        }
                    }
                }
            }
            // The last first: what its operands would cost is then known to be read or not.
            for (n, values) in read.into_iter().rev() {
                if self.groups[g].copies.contains(&n) {
                    continue;
                }
                let rows = &self.groups[g].rows;
                // A value that nobody reads any more need not be written either.
                let spared = |&v: &Value| self.bytes(rows, v) * if self.stored(v, g) { 1 } else { 2 };
                let spared: u64 = values.iter().map(spared).sum();
                if let Some((bytes, made)) = self.cost_of_node(g, n)
                    && bytes <= spared
                {
                    self.copy(g, &made);
                    any = true;
                }
            }
        }
        any
    }

    /// Moves what only anchors read to the kernel that has its operands anyway, no later than the
    /// first of them; where nothing in the function waits for these anchors, they may wait for it.
    fn move_to_readers(&mut self) {
        for n in (0..self.f.nodes.len()).rev() {
            let Kind::Row(_, need) = &self.kinds[n] else { continue };
            let node = &self.f.nodes[n];
            if node.results().any(|v| self.returned(v)) || node.count != 1 {
                continue;
            }
            let v = node.first;
            let direct = &self.readers[v.index()];
            // A gather is done by whoever reads it.
            let readers: Vec<usize> = direct
                .iter()
                .flat_map(|&r| match self.kinds[r] {
                    Kind::Gathered => self.readers[self.f.nodes[r].first.index()].clone(),
                    _ => vec![r],
                })
                .collect();
            if readers.is_empty() || readers.iter().any(|&r| self.kinds[r] != Kind::Anchor) {
                continue;
            }
            let last = |&r: &usize| {
                let node = &self.f.nodes[r];
                node.results().all(|v| self.readers[v.index()].is_empty() && !in_place(node, v))
                    && node.inputs.iter().all(|&v| self.lasts(v))
            };
            let first = readers.iter().map(|&r| self.levels[r]).min().unwrap_or(0);
            let wait = readers.iter().all(last);
            let fits = |&g: &usize| {
                let level = self.groups[g].level;
                // Anchors read every row that the value is needed for: a kernel of fewer rows would
                // leave some unwritten.
                if self.groups[g].need != *need || !self.copyable(g, n) {
                    return None;
                }
                let (bytes, made) = self.cost_of_node(g, n)?;
                (bytes == 0).then(|| (made.len(), level.abs_diff(first), g, made))
            };
            let from = self.by_level.partition_point(|&g| self.groups[g].level <= self.levels[n]);
            let most = if wait { u32::MAX } else { first };
            let to = self.by_level.partition_point(|&g| self.groups[g].level <= most).max(from);
            let later = self.by_level[from..to].iter();
            let best = later.filter_map(fits).min_by_key(|&(work, apart, g, _)| (work, apart, g));
            if let Some((_, _, g, made)) = best {
                self.copy(g, &made);
                for r in readers {
                    self.levels[r] = self.levels[r].max(self.groups[g].level);
                }
                self.instead.extend(self.readers[v.index()].iter().map(|&r| ((r, v), g)));
            }
        }
    }

    /// The function with the copies, without what nobody reads any more.
    fn rebuilt(&self) -> Placed {
        // The value that a group has for one: its copy, or the original.
        let mut copies: BTreeMap<(usize, Value), Value> = BTreeMap::new();
        let mut own: Vec<Value> = (0..self.f.types.len() as u32).map(Value).collect();
        let mut to = Placed {
            f: Function::new(self.f.name.clone()),
            needs: self.needs[..self.f.params.len()].to_vec(),
            kinds: vec![],
            levels: vec![],
        };
        to.f.params = self.f.params.clone();
        to.f.types = self.f.types[..self.f.params.len()].to_vec();
        let push =
            |to: &mut Placed, node: &Node, inputs: Vec<Value>, kind: Kind, level: u32, need: Option<Need>| {
                let types = node.results().map(|r| self.f.ty(r).clone()).collect();
                let first = to.f.push(node.op.clone(), inputs, types);
                to.kinds.push(kind);
                to.levels.push(level);
                to.needs.extend(node.results().map(|r| need.unwrap_or(self.needs[r.index()])));
                first
            };
        let wanted = self.wanted();
        let mut with_copy: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (g, group) in self.groups.iter().enumerate() {
            group.copies.iter().for_each(|&n| with_copy.entry(n).or_default().push(g));
        }
        for (i, node) in self.f.nodes.iter().enumerate() {
            if wanted[i] {
                let inputs = node.inputs.iter().map(|v| {
                    let at = self.group[i].or_else(|| self.instead.get(&(i, *v)).copied());
                    at.and_then(|g| copies.get(&(g, *v)).copied()).unwrap_or(own[v.index()])
                });
                let inputs = inputs.collect();
                let first = push(&mut to, node, inputs, self.kinds[i].clone(), self.levels[i], None);
                for (k, r) in node.results().enumerate() {
                    own[r.index()] = Value(first.0 + k as u32);
                }
            }
            for &g in with_copy.get(&i).into_iter().flatten() {
                let group = &self.groups[g];
                let inputs =
                    node.inputs.iter().map(|v| copies.get(&(g, *v)).copied().unwrap_or(own[v.index()]));
                let inputs = inputs.collect();
                let kind = Kind::Row(group.rows.clone(), group.need);
                let first = push(&mut to, node, inputs, kind, group.level, Some(group.need));
                for (k, r) in node.results().enumerate() {
                    copies.insert((g, r), Value(first.0 + k as u32));
                }
            }
        }
        let places = |need: Need| match need {
            Need::Places(v) => Need::Places(own[v.index()]),
            need => need,
        };
        to.needs.iter_mut().for_each(|n| *n = places(*n));
        for kind in &mut to.kinds {
            if let Kind::Row(_, need) = kind {
                *need = places(*need);
            }
        }
        to.f.results = self.f.results.iter().map(|(name, v)| (name.clone(), own[v.index()])).collect();
        to
    }

    /// Whose original somebody still reads.
    fn wanted(&self) -> Vec<bool> {
        let mut wanted = vec![false; self.f.nodes.len()];
        let mut stack: Vec<Value> = self.f.results.iter().map(|(_, v)| *v).collect();
        for (i, node) in self.f.nodes.iter().enumerate() {
            if self.kinds[i] == Kind::Anchor {
                stack.extend(node.results());
            }
        }
        for (g, group) in self.groups.iter().enumerate() {
            for &c in &group.copies {
                stack.extend(group.need.places());
                stack.extend(self.f.nodes[c].inputs.iter().filter(|v| !self.makes(g, **v)));
            }
        }
        while let Some(v) = stack.pop() {
            let Some(n) = self.defined[v.index()] else { continue };
            if std::mem::replace(&mut wanted[n], true) {
                continue;
            }
            let node = &self.f.nodes[n];
            stack.extend(self.needs[v.index()].places());
            stack.extend(node.inputs.iter().filter(|v| match self.group[n] {
                Some(g) => !self.copied(g, **v),
                None => !self.instead.contains_key(&(n, **v)),
            }));
        }
        wanted
    }
}

/// Whether a result of the node stays in the memory of an operand.
fn in_place(node: &Node, result: Value) -> bool {
    node.op.signature().in_place((result.0 - node.first.0) as usize).is_some()
}

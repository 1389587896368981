//! Values that are computed before they are asked for: reductions, sines, arrays that are dear.

use super::plan::{ALONE, Kept};
use super::text::{At, Join, Term, Value, numbers};
use super::turns::Step;
use super::{Generator, Result, frequencies};
use crate::codegen::text::{double, float};
use crate::ir::{Positions, Reduce};
use crate::program::RowOp;
use std::collections::BTreeSet;

impl Generator<'_> {
    pub(super) fn sync(&mut self) {
        if self.threads > 1 {
            self.steps.push(Step::Wait { block: self.threads > 32 });
            self.line(&format!("wait_row({});", self.threads));
        }
    }

    /// The barrier of the block.
    pub(super) fn wait_block(&mut self) {
        self.steps.push(Step::Wait { block: true });
        self.line("wait_block();");
    }

    /// Declares the buffer of reductions where the text was so long.
    pub(super) fn buffer(&mut self, at: usize) {
        let parts = std::mem::take(&mut self.parts);
        if parts > 0 {
            self.text.insert_str(at, &format!("    shared float buffer[{parts}];\n"));
        }
    }

    /// Whether what an operation reads is kept by one that waits for a barrier.
    pub(super) fn waits(&self, i: usize) -> bool {
        let (mut next, mut seen) = (self.kernel.ops[i].operands(), BTreeSet::new());
        while let Some(x) = next.pop() {
            if self.waiting.contains(&x) {
                return true;
            }
            if self.plans[x].own.is_none() && seen.insert(x) {
                next.extend(self.kernel.ops[x].operands());
            }
        }
        false
    }

    /// The barrier after which everything kept so far may be read.
    pub(super) fn meet(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        self.sync();
        for line in std::mem::take(&mut self.deferred) {
            self.line(&line);
        }
        if std::mem::take(&mut self.deferred_writes) {
            self.sync();
        }
        self.waiting.clear();
    }

    /// A loop of the row's threads over the elements of an array.
    pub(super) fn open_elements(&mut self, length: u64) -> At {
        if self.threads >= length && length == 1 {
            self.open("if (t == 0) {");
            self.line("const int i = 0;");
            return At::one("0");
        }
        let width = self.width(length);
        self.open_each("i", "t", length, self.threads, width);
        At { index: "i".into(), width }
    }

    pub(super) fn close_elements(&mut self, length: u64) {
        self.close_each(length, self.threads, self.width(length));
    }

    /// For every group the result of a reduction of `terms(element)`, turned by `finish` into what
    /// is kept.
    ///
    /// Elements of a group are `inner` apart. `joins` are the operations of the accumulators,
    /// `terms` gives what to join for an element, a factor or two, `finish` the values to keep from
    /// the accumulators' names. Says whether the kept values may be read only after a barrier.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn reduce(
        &mut self,
        groups: u64,
        size: u64,
        inner: u64,
        joins: &[Join],
        terms: &dyn Fn(&mut Self, &At, &At) -> Vec<Term>,
        finish: &dyn Fn(&[String]) -> Vec<String>,
        kept: &[Kept],
    ) -> bool {
        let names: Vec<String> = joins.iter().map(|_| self.fresh("s")).collect();
        let width = if inner == 1 { self.width(size) } else { 1 };
        let accumulate = |g: &mut Self, group: &str, first: &str, step: u64| {
            g.open_each("j", first, size, step, width);
            let index = g.index(match (group, inner) {
                ("0", 1) => "j".to_string(),
                (_, 1) => format!("{group} * {size} + j"),
                ("0", _) => format!("j * {inner}"),
                _ => format!("{group} / {inner} * {} + j * {inner} + {group} % {inner}", size * inner),
            });
            let terms = terms(g, &At { index, width }, &At::one(group));
            for ((name, join), (a, b)) in names.iter().zip(joins).zip(terms) {
                let a = a.spread(width);
                g.line(&match b.map(|b| b.spread(width)) {
                    Some(b) => format!("{name} = fmaf({a}, {b}, {name});"),
                    None => format!("{name} = {};", join.two(name, &a)),
                });
            }
            g.close_each(size, step, width);
        };
        // A thread's own, one for each of the elements that it takes at a time.
        let declare = |g: &mut Self| {
            for (name, join) in names.iter().zip(joins) {
                g.line(&format!("{} {name} = {};", numbers(width), join.nothing()));
            }
        };
        let own = |name: &str, join: Join| match width {
            1 => name.to_string(),
            _ => format!("all_{}({name})", join.word()),
        };
        if groups == 1 {
            declare(self);
            let alone = self.threads > 32 && size <= ALONE;
            match alone {
                true => accumulate(self, "0", "t % 32", 32),
                false => accumulate(self, "0", "t", self.threads),
            }
            let apart = self.threads > 32 && !alone;
            let mut joined = vec![];
            for (name, &join) in names.iter().zip(joins) {
                let own = own(name, join);
                joined.push(match self.threads {
                    _ if apart => {
                        let (warps, part, sum) = (self.threads / 32, self.parts, self.fresh("v"));
                        self.parts += warps;
                        self.line(&format!("leave_{}({own}, buffer + {part});", join.word()));
                        let words = if join == Join::Sum { "join_sums" } else { "join_largest" };
                        let parts = format!("{words}(buffer + {part}, {})", self.threads);
                        self.deferred.push(format!("const float {sum} = {parts};"));
                        sum
                    }
                    1 if own == *name => own,
                    1 => self.define(&own, 1).text,
                    threads => {
                        self.steps.push(Step::Join);
                        let lanes = threads.min(32);
                        self.define(&format!("lanes_{}({own}, {lanes}, {lanes})", join.word()), 1).text
                    }
                });
            }
            let writes = kept.iter().any(|k| !matches!(k, Kept::Register(_)));
            for (kept, value) in kept.iter().zip(finish(&joined)) {
                let line = match kept {
                    Kept::Register(register) => format!("const float {register} = {value};"),
                    Kept::Shared(_) | Kept::Common(_) => {
                        format!("if (t == 0) {} = {value};", Self::kept(kept, &At::one("0")))
                    }
                };
                match apart {
                    true => self.deferred.push(line),
                    false => self.line(&line),
                }
            }
            self.deferred_writes |= apart && writes;
            return apart || writes;
        }
        // Lanes for each group: as many as it has elements, or several, within a warp.
        let lanes = (1u64 << (size / width).max(1).ilog2()).min(32).min(self.threads);
        let step = self.threads / lanes;
        // A group or several at a time; all lanes stay together.
        self.open_rolled(
            &format!("unroll(1) for (int first = 0; first < {groups}; first += {step}) {{"),
            groups.div_ceil(step),
        );
        self.line(&format!("const int g = first + t / {lanes};"));
        declare(self);
        self.open(&format!("if (g < {groups}) {{"));
        accumulate(self, "g", &format!("t % {lanes}"), lanes);
        self.close();
        let mut joined = vec![];
        for (name, &join) in names.iter().zip(joins) {
            let mut sum = own(name, join);
            if lanes > 1 {
                self.steps.push(Step::Join);
                sum = format!("lanes_{}({sum}, {lanes}, {})", join.word(), self.threads.min(32));
            }
            joined.push(if sum == *name { sum } else { self.define(&sum, 1).text });
        }
        self.open(&format!("if (g < {groups} && t % {lanes} == 0) {{"));
        for (kept, value) in kept.iter().zip(finish(&joined)) {
            self.line(&format!("{} = {value};", Self::kept(kept, &At::one("g"))));
        }
        self.close();
        self.close();
        true
    }

    /// Everything an operation keeps.
    pub(super) fn keep(&mut self, i: usize) -> Result<()> {
        if !self.plans[i].live {
            return Ok(());
        }
        let keeps = self.plans[i].own.is_some() || !self.plans[i].stats.is_empty();
        if keeps && self.waits(i) {
            self.meet();
        }
        let stats = self.plans[i].stats.clone();
        let length = self.length(i);
        let waits = match self.kernel.ops[i].clone() {
            RowOp::Rms { x, size, eps } => self.reduce(
                length / size,
                size,
                1,
                &[Join::Sum],
                &|g, at, _| {
                    let x = g.value(x, at);
                    vec![(x.clone(), Some(x))]
                },
                &|s| vec![format!("1.0f / sqrtf({} / {} + {})", s[0], float(size as f64), float(eps.0))],
                &stats,
            ),
            RowOp::RmsGrad { x, dy, size, eps } => self.reduce(
                length / size,
                size,
                1,
                &[Join::Sum, Join::Sum],
                &|g, at, _| {
                    let (x, dy) = (g.value(x, at), g.value(dy, at));
                    vec![(x.clone(), Some(x.clone())), (x, Some(dy))]
                },
                &|s| {
                    let n = float(size as f64);
                    let r = format!("(1.0f / sqrtf({} / {n} + {}))", s[0], float(eps.0));
                    vec![r.clone(), format!("{} / {n} * ({r} * {r} * {r})", s[1])]
                },
                &stats,
            ),
            RowOp::Softmax { x, size } => {
                let waits = self.reduce(
                    length / size,
                    size,
                    1,
                    &[Join::Largest],
                    &|g, at, _| vec![(g.value(x, at), None)],
                    &|s| vec![s[0].clone()],
                    &stats[..1],
                );
                if waits {
                    self.waiting.insert(i);
                    self.meet();
                }
                let most = stats[0].clone();
                self.reduce(
                    length / size,
                    size,
                    1,
                    &[Join::Sum],
                    &|g, at, group| {
                        let x = g.value(x, at);
                        let text = format!("expf({} - {})", x.text, Self::kept(&most, group));
                        vec![(Value { text, width: x.width }, None)]
                    },
                    &|s| vec![format!("1.0f / {}", s[0])],
                    &stats[1..],
                )
            }
            RowOp::SoftmaxGrad { y, dy, size } => self.reduce(
                length / size,
                size,
                1,
                &[Join::Sum],
                &|g, at, _| {
                    let (y, dy) = (g.value(y, at), g.value(dy, at));
                    vec![(y, Some(dy))]
                },
                &|s| vec![s[0].clone()],
                &stats,
            ),
            RowOp::Rope { .. } if matches!(stats[0], Kept::Shared(_)) && self.angles.contains(&i) => {
                self.angles(i, "t", self.threads);
                // Other rotations read them as well.
                self.waiting.insert(i);
                self.meet();
                false
            }
            RowOp::Reduce { op, x, over } if over.size != 1 => {
                let (size, inner) = (over.size, over.inner);
                let join = if op == Reduce::Max { Join::Largest } else { Join::Sum };
                let own: Vec<Kept> = self.plans[i].own.clone().into_iter().collect();
                let waits = self.reduce(
                    over.outer * inner,
                    size,
                    inner,
                    &[join],
                    &|g, at, _| vec![(g.value(x, at), None)],
                    &|s| {
                        vec![match op {
                            Reduce::Mean => format!("{} / {}", s[0], float(size as f64)),
                            _ => s[0].clone(),
                        }]
                    },
                    &own,
                );
                if waits {
                    self.waiting.insert(i);
                }
                return Ok(());
            }
            _ => false,
        };
        if waits {
            self.waiting.insert(i);
        }
        if let Some(own) = self.plans[i].own.take() {
            if waits {
                self.meet();
            }
            // Not known while it is computed: the expression is what is wanted.
            let at = self.open_elements(length);
            let value = self.compute(i, &at);
            self.set(&own, &at, &value);
            self.close_elements(length);
            self.plans[i].own = Some(own);
            self.waiting.insert(i);
        }
        Ok(())
    }

    /// Keeps elements.
    pub(super) fn set(&mut self, kept: &Kept, at: &At, value: &Value) {
        let line = match (kept, at.width) {
            (_, 1) => format!("{} = {};", Self::kept(kept, at), value.text),
            (Kept::Shared(start), width) => {
                format!("put(kept + {start} + {}, {});", at.index, value.spread(width))
            }
            _ => return,
        };
        self.line(&line);
    }

    /// Cosines and sines of a rotation, by `step` threads; this one is number `first`.
    pub(super) fn angles(&mut self, i: usize, first: &str, step: u64) {
        let RowOp::Rope { size, rope, position, depths, .. } = self.kernel.ops[i] else { return };
        let half = size / 2;
        let table = format!("FREQUENCIES_{i}");
        let mut text = format!("TABLE Wide {table}[] = {{");
        for (pair, frequency) in frequencies(&rope, size).into_iter().enumerate() {
            text.push_str(if pair % 4 == 0 { "\n    " } else { " " });
            text.push_str(&double(frequency));
            text.push(',');
        }
        text.push_str("\n};");
        self.tables.push(text);
        let stats = self.plans[i].stats.clone();
        self.open_each("i", first, half, step, 1);
        let position = match rope.positions {
            Positions::Tokens => format!("Wide(x{position}[0])"),
            Positions::Depth { half_reversed: false } => format!("Wide(x{position})"),
            Positions::Depth { half_reversed: true } => {
                format!("Wide(i % 2 == 0 ? x{position} : x{depths} - 1 - x{position})")
            }
        };
        self.line(&format!("const Angle angle = sine_cosine({position} * {table}[i]);"));
        self.line(&format!("{} = angle.cosine;", Self::kept(&stats[0], &At::one("i"))));
        self.line(&format!("{} = angle.sine;", Self::kept(&stats[1], &At::one("i"))));
        self.close_each(half, step, 1);
    }
}

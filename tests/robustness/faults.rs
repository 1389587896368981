//! Faults, one at a time, in every stage of the compiler: each is noticed, by a proof of
//! `dreamc verify` that names the layer and the component where it can. A fault that makes another
//! model of a specification is noticed by the golden files, too.
//!
//! A fault is put into what one pass hands to the next: a lowered, differentiated or rewritten
//! function, the plan, the counts. A fault in lowering or differentiation is in the interpreter's
//! model, too, as it would be if the pass were wrong.

#[path = "faults/blocks.rs"]
mod blocks;
#[path = "faults/experts.rs"]
mod experts;
#[path = "faults/followed.rs"]
mod followed;
#[path = "faults/fp8.rs"]
mod fp8;
#[path = "faults/kernels.rs"]
mod kernel_texts;
#[path = "faults/keys.rs"]
mod keys;
#[path = "faults/preferences.rs"]
mod preferences;
#[path = "faults/spread.rs"]
mod spread;
#[path = "../support/mod.rs"]
mod support;
#[path = "faults/teacher.rs"]
mod teacher;
#[path = "faults/transfer.rs"]
mod transfer;
#[path = "faults/transplant.rs"]
mod transplant;

use dreamc_compiler::compiled::{Init, TensorKind};
use dreamc_compiler::count::{self, CountError, Counts};
use dreamc_compiler::ir::{
    Binary, Binding, Function, Index, Lifetime, Mask, Module, Op, PerToken, Port, Positions, Unary, Value,
    infer,
};
use dreamc_compiler::lower::{Form, Shape};
use dreamc_compiler::op::attention::formula::Place;
use dreamc_compiler::op::{
    AttentionGrad, ByHead, Concat, Constant, Decide, KeepInts, Reshape, Rms, RoundGroups, Split, Zeros,
};
use dreamc_compiler::oracle::{Batch, Oracle, Setup};
use dreamc_compiler::program::{
    Affine, BufferId, Kernel, Launch, Operand, Plan, ProgramKey, RowOp, RowStore, Space, Step, Task as Does,
    kernel,
};
use dreamc_compiler::rewrite::{Rewriting, Rules};
use dreamc_compiler::{CompileError, Compiled, Options, Pass, compile_watched};
use dreamc_device::group::{Collective, Group, GroupError, Transport};
use dreamc_dsl::spec::{Activation, Component, Expr, Group as Rates, Item, Model, OptimizerKind, SkipRule};
use dreamc_dsl::{Spec, Spelling};
use dreamc_runtime::train::run::FIGURES;
use dreamc_verify::{Pipeline, Report, Task, Verdict, verify};
use libtest_mimic::{Arguments, Failed, Trial};
use std::collections::HashSet;
use std::fs;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use support::{error, every_golden};

type Edit = fn(&mut Module, &mut Function) -> bool;

/// Where a fault is.
enum Stage {
    /// In lowering.
    Lower(Edit),
    /// In lowering for caches.
    Caches(Edit),
    /// In differentiation: of joint functions.
    Derive(Edit),
    /// In rewriting.
    Rewrite(Edit),
    /// In what narrowing puts in.
    Narrow(Edit),
    /// In what the compiler, and not the interpreter, makes of the specification.
    Read(fn(&mut Spec)),
    /// In scheduling or assembly.
    Plan(fn(&mut Compiled) -> bool),
    /// In the counts.
    Count(fn(&mut Counts)),
    /// Between the ranks of a group.
    Ranks(fn(Group) -> Group),
}

struct Fault {
    name: &'static str,
    spec: &'static str,
    stage: Stage,
    /// The proof that must fail.
    caught: &'static str,
    /// Layer and component that the proof must name.
    place: [&'static str; 2],
}

/// The compiler with a fault.
struct Faulty<'a> {
    stage: Option<&'a Stage>,
    /// How often the fault was put in.
    times: AtomicUsize,
}

impl<'a> Faulty<'a> {
    fn new(stage: Option<&'a Stage>) -> Self {
        Faulty { stage, times: AtomicUsize::new(0) }
    }

    fn watch(&self, rewritten: bool, pass: Pass, module: &mut Module, f: &mut Function) {
        let read = |p: &Port| {
            matches!(p.binding, Binding::State(Lifetime::Token(PerToken::Latest | PerToken::First)))
        };
        let read = f.params.iter().any(read);
        let text = f.params.iter().any(|p| p.binding == Binding::State(Lifetime::Text));
        let caches = read || text || f.nodes.iter().any(|n| matches!(n.op, Op::Append));
        let edit = match (self.stage, pass) {
            (Some(Stage::Lower(edit)), Pass::Lower) => edit,
            (Some(Stage::Caches(edit)), Pass::Lower) if caches => edit,
            (Some(Stage::Derive(edit)), Pass::Differentiate) => edit,
            (Some(Stage::Rewrite(edit)), Pass::Rewrite) if rewritten => edit,
            (Some(Stage::Narrow(edit)), Pass::Narrow) => edit,
            _ => return,
        };
        if edit(module, f) {
            self.times.fetch_add(1, Relaxed);
        }
    }
}

impl Pipeline for Faulty<'_> {
    fn compile(&self, spec: &Spec, options: &Options) -> Result<Compiled, CompileError> {
        let mut spec = spec.clone();
        if let Some(Stage::Read(edit)) = self.stage {
            edit(&mut spec);
            self.times.fetch_add(1, Relaxed);
        }
        let rewritten = options.rewrite.rules != Rules::Off;
        let watch = |pass, module: &mut Module, f: &mut Function| self.watch(rewritten, pass, module, f);
        let mut compiled = compile_watched(&spec, options, &watch)?.0;
        if let Some(Stage::Plan(edit)) = self.stage
            && edit(&mut compiled)
        {
            self.times.fetch_add(1, Relaxed);
        }
        Ok(compiled)
    }

    fn oracle(
        &self,
        model: &Model,
        shape: Shape,
        recurrence: Option<u64>,
        rewriting: &Rewriting,
        form: Form,
    ) -> Result<Oracle, CompileError> {
        let rewritten = rewriting.rules != Rules::Off;
        let watch = |pass, module: &mut Module, f: &mut Function| self.watch(rewritten, pass, module, f);
        Oracle::with(model, shape, Setup { recurrence, rewriting, form, watch: &watch })
    }

    fn group(&self, group: Group) -> Group {
        let Some(Stage::Ranks(edit)) = self.stage else { return group };
        self.times.fetch_add(1, Relaxed);
        edit(group)
    }

    fn count(&self, spec: &Spec, options: &count::Options) -> Result<Counts, CountError> {
        let mut counts = count::count(spec, options)?;
        if let Some(Stage::Count(edit)) = self.stage {
            edit(&mut counts);
            self.times.fetch_add(1, Relaxed);
        }
        Ok(counts)
    }
}

/// A change of the bytes that a rank brings.
type Change = dyn Fn(&Group, Collective, &mut Vec<u8>) + Send + Sync;

/// A group whose ranks bring something else than they were given.
struct Wrong {
    group: Group,
    edit: Box<Change>,
}

impl Transport for Wrong {
    fn exchange(&self, what: Collective, bytes: &[u8]) -> Result<Vec<u8>, GroupError> {
        let mut bytes = bytes.to_vec();
        (self.edit)(&self.group, what, &mut bytes);
        self.group.exchange(what, &bytes)
    }

    fn failed(&self) -> Option<GroupError> {
        self.group.failed()
    }

    fn fail(&self, reason: &str) {
        self.group.fail(reason);
    }
}

/// The words of rank 1 on its part of a checkpoint, changed.
fn said(group: Group, edit: fn(&str) -> String) -> Group {
    wrong(group, move |group, what, bytes| {
        let text = String::from_utf8_lossy(bytes).into_owned();
        if what == Collective::AllGather && group.rank() == 1 && text.starts_with("[{\"kind\"") {
            *bytes = edit(&text).into_bytes();
        }
    })
}

fn wrong(group: Group, edit: impl Fn(&Group, Collective, &mut Vec<u8>) + Send + Sync + 'static) -> Group {
    Group::over(group.rank(), group.size(), Arc::new(Wrong { group, edit: Box::new(edit) }))
}

/// The words of a rank on its part, with the first number that it has one later.
fn later(text: &str) -> String {
    let number = || {
        let (head, tail) = text.split_once("\"ranges\":[[")?;
        let (name, rest) = tail.split_once(',')?;
        let (first, rest) = rest.split_once(',')?;
        Some(format!("{head}\"ranges\":[[{name},{},{rest}", first.parse::<u64>().ok()? + 1))
    };
    number().unwrap_or_default()
}

/// A rank that takes other numbers than those that rank 0 hands out.
struct Kept(Group);

impl Transport for Kept {
    fn exchange(&self, what: Collective, bytes: &[u8]) -> Result<Vec<u8>, GroupError> {
        let mut found = self.0.exchange(what, bytes)?;
        // The state is text; weights are numbers.
        if what == Collective::Broadcast(0) && !found.starts_with(b"{") {
            let values: Vec<f32> = bytemuck::pod_collect_to_vec(&found);
            found = values.iter().flat_map(|x| (x * 1.25).to_le_bytes()).collect();
        }
        Ok(found)
    }

    fn failed(&self) -> Option<GroupError> {
        self.0.failed()
    }

    fn fail(&self, reason: &str) {
        self.0.fail(reason);
    }
}

/// Takes what ranks do together with these values out of a plan.
fn apart(c: &mut Compiled, together: fn(&Kernel) -> bool, origin: &str) -> bool {
    fn take(steps: &mut Vec<Step>, is: &dyn Fn(&Launch) -> bool) -> bool {
        let before = steps.len();
        steps.retain(|step| !matches!(step, Step::Launch(launch) if is(launch)));
        let taken = steps.len() < before;
        let inside = steps.iter_mut().map(|step| match step {
            Step::Loop { steps, .. } => take(steps, is),
            Step::Launch(_) => false,
        });
        inside.fold(taken, |a, b| a | b)
    }
    let sums: Vec<bool> = c.plan.kernels.iter().map(together).collect();
    let is = |launch: &Launch| sums[launch.kernel.0 as usize] && launch.origin == origin;
    c.plan.programs.values_mut().fold(false, |any, program| take(&mut program.steps, &is) | any)
}

fn sums(kernel: &Kernel) -> bool {
    matches!(kernel, Kernel::AllReduce(_))
}

/// Puts the first sum of the last micro-batch in front of everything that adds to it.
fn early(c: &mut Compiled, is: fn(&Kernel) -> bool) -> bool {
    let sums: Vec<bool> = c.plan.kernels.iter().map(is).collect();
    let Some(program) = c.plan.programs.get_mut(&ProgramKey::LAST) else { return false };
    let is = |step: &Step| matches!(step, Step::Launch(l) if sums[l.kernel.0 as usize]);
    let Some(at) = program.steps.iter().position(is) else { return false };
    let sum = program.steps.remove(at);
    program.steps.insert(0, sum);
    true
}

fn scatters(kernel: &Kernel) -> bool {
    matches!(kernel, Kernel::ReduceScatter(_))
}

fn gathers(kernel: &Kernel) -> bool {
    matches!(kernel, Kernel::AllGather(_))
}

// Functions ---------------------------------------------------------------------------------------

/// The number of the first node that reads a parameter whose name ends so.
fn reader(f: &Function, suffix: &str) -> Option<usize> {
    (0..f.nodes.len()).find(|&i| f.nodes[i].inputs.iter().any(|&v| is_param(f, v, suffix)))
}

/// Numbers of the nodes whose operation is such.
fn nodes(f: &Function, is: impl Fn(&Op) -> bool) -> Vec<usize> {
    (0..f.nodes.len()).filter(|&i| is(&f.nodes[i].op)).collect()
}

/// Reads `new` wherever `old` was read by a node from number `from` on, or returned.
fn redirect(f: &mut Function, from: usize, old: Value, new: Value) {
    let swap = |v: &mut Value| {
        if *v == old {
            *v = new;
        }
    };
    f.nodes.iter_mut().skip(from).flat_map(|n| &mut n.inputs).for_each(swap);
    f.results.iter_mut().map(|(_, v)| v).for_each(swap);
}

/// Takes a node out: its operand is read in its place.
fn bypass(f: &mut Function, node: usize, operand: usize) -> bool {
    let (old, new) = (f.nodes[node].first, f.nodes[node].inputs[operand]);
    if f.ty(old) != f.ty(new) {
        return false;
    }
    redirect(f, node + 1, old, new);
    true
}

/// Puts a node before node number `at`; its results.
fn insert(module: &Module, f: &mut Function, at: usize, op: Op, inputs: Vec<Value>) -> Vec<Value> {
    let operands: Vec<_> = inputs.iter().map(|&v| f.ty(v)).collect();
    let types = infer(module, &op, &operands).unwrap();
    let first = f.nodes.get(at).map_or(Value(f.types.len() as u32), |n| n.first);
    let count = types.len() as u32;
    let shift = |v: &mut Value| {
        if *v >= first {
            v.0 += count;
        }
    };
    for node in &mut f.nodes[at..] {
        shift(&mut node.first);
        node.inputs.iter_mut().for_each(shift);
    }
    f.results.iter_mut().map(|(_, v)| v).for_each(shift);
    f.types.splice(first.index()..first.index(), types);
    f.nodes.insert(at, dreamc_compiler::ir::Node { op, inputs, first, count });
    (first.0..first.0 + count).map(Value).collect()
}

fn defines(f: &Function, v: Value) -> Option<usize> {
    f.definitions()[v.index()]
}

/// The first node that reads a value.
fn reads(f: &Function, v: Value) -> Option<usize> {
    (0..f.nodes.len()).find(|&i| f.nodes[i].inputs.contains(&v))
}

/// The product by head that makes queries (`absorbs`), or the one that makes values, and its
/// number.
fn by_head(f: &Function, absorbs: bool) -> Option<(usize, ByHead)> {
    f.nodes.iter().enumerate().find_map(|(i, node)| match node.op {
        Op::ByHead(of) if (of.over == of.part) == absorbs => Some((i, of)),
        _ => None,
    })
}

fn absorb(f: &mut Function, node: usize, of: ByHead) -> bool {
    f.nodes[node].op = of.into();
    true
}

fn attention(f: &mut Function, edit: impl Fn(&mut dreamc_compiler::ir::Attention)) -> bool {
    let mut found = false;
    for node in &mut f.nodes {
        if let Op::Attention(a) = &mut node.op {
            edit(a);
            found = true;
        }
    }
    found
}

/// Takes out the first node that `pick` gives an operand for: the operand is read in its place.
fn bypass_first(f: &mut Function, pick: impl Fn(&Function, usize) -> Option<usize>) -> bool {
    let found = (0..f.nodes.len()).find_map(|i| pick(f, i).map(|operand| (i, operand)));
    found.is_some_and(|(i, operand)| bypass(f, i, operand))
}

/// Where keys of the first pass are added to those of this one, and where they are left for the
/// tokens that skip it.
fn replacing(f: &Function) -> Option<[usize; 2]> {
    let first = |p: &&Port| matches!(p.binding, Binding::Index(Index::FirstPass { .. }));
    let name = f.params.iter().find(first)?.name.clone();
    let taken = (0..f.nodes.len())
        .find(|&i| matches!(f.nodes[i].op, Op::CacheTake) && is_param(f, f.nodes[i].inputs[1], &name))?;
    let of = |v: Value, is: fn(&Op) -> bool| {
        (0..f.nodes.len()).find(|&i| is(&f.nodes[i].op) && f.nodes[i].inputs.contains(&v))
    };
    let kept = of(f.nodes[taken].first, |op| matches!(op, Op::Binary(Binary::Mul)))?;
    Some([of(f.nodes[kept].first, |op| matches!(op, Op::Binary(Binary::Add)))?, kept])
}

/// Of the first norm of an adapter's rows: where its gradient stops, the sum of its squares, and in
/// this the sum of those with what the adapter adds.
fn norms(f: &Function) -> Option<[usize; 3]> {
    let made = |v: Value| (0..f.nodes.len()).find(|&i| f.nodes[i].first == v);
    let of = |i: usize, operand: usize| f.nodes[i].inputs.get(operand).and_then(|v| made(*v));
    let stops = nodes(f, |op| matches!(op, Op::StopGradient)).into_iter();
    let mut root = stops.filter_map(|stop| Some((stop, of(stop, 0)?)));
    let (stop, root) = root.find(|(_, root)| matches!(f.nodes[*root].op, Op::Unary(Unary::Rsqrt)))?;
    let sum = of(of(root, 0)?, 0)?;
    // Scaled, summed over the rank, and times `B`.
    let added = of(of(of(of(sum, 1)?, 0)?, 0)?, 1)?;
    Some([stop, sum, added])
}

/// Edits how experts' numbers of tokens are rounded.
fn rounding(f: &mut Function, edit: impl Fn(&mut RoundGroups)) -> bool {
    let mut found = false;
    for node in &mut f.nodes {
        if let Op::RoundGroups(of) = &mut node.op {
            edit(of);
            found = true;
        }
    }
    found
}

fn is_param(f: &Function, v: Value, suffix: &str) -> bool {
    f.params.get(v.index()).is_some_and(|p| p.name.ends_with(suffix))
}

// Plans -------------------------------------------------------------------------------------------

/// Visits the launches of a program, with the kernels; says whether `edit` did something.
fn launches(
    plan: &mut Plan,
    program: ProgramKey,
    edit: &mut dyn FnMut(&mut Launch, &mut Vec<Kernel>) -> bool,
) -> bool {
    fn walk(
        steps: &mut [Step],
        kernels: &mut Vec<Kernel>,
        edit: &mut dyn FnMut(&mut Launch, &mut Vec<Kernel>) -> bool,
    ) -> bool {
        let mut done = false;
        for step in steps {
            done |= match step {
                Step::Launch(launch) => edit(launch, kernels),
                Step::Loop { steps, .. } => walk(steps, kernels, edit),
            };
        }
        done
    }
    let Plan { programs, kernels, .. } = plan;
    programs.get_mut(&program).is_some_and(|p| walk(&mut p.steps, kernels, edit))
}

/// Gives a launch another kernel, where `edit` makes one of its own.
fn kernel(launch: &mut Launch, kernels: &mut Vec<Kernel>, edit: impl Fn(&mut Kernel) -> bool) -> bool {
    let mut other = kernels[launch.kernel.0 as usize].clone();
    let done = edit(&mut other);
    if done {
        kernels.push(other);
        launch.kernel.0 = kernels.len() as u32 - 1;
    }
    done
}

/// Changes kernels of a program.
fn kernels(c: &mut Compiled, program: ProgramKey, edit: fn(&mut Kernel) -> bool) -> bool {
    launches(&mut c.plan, program, &mut |launch, list| kernel(launch, list, edit))
}

/// Leaves all but one number of what these launches of `backward` zero as it was.
fn unzeroed(c: &mut Compiled, is: fn(&str) -> bool) -> bool {
    launches(&mut c.plan, ProgramKey::BACKWARD, &mut |launch, list| {
        is(&launch.origin)
            && kernel(launch, list, |k| match k {
                Kernel::Zero(zero) => std::mem::replace(&mut zero.elements, 1) > 1,
                _ => false,
            })
    })
}

/// Changes numbers of a row kernel.
fn constants(kernel: &mut Kernel, edit: impl Fn(f64) -> Option<f64>) -> bool {
    let Kernel::Rows(rows) = kernel else { return false };
    let mut done = false;
    for op in &mut rows.ops {
        if let RowOp::Constant(x) = op
            && let Some(other) = edit(x.0)
        {
            (x.0, done) = (other, true);
        }
    }
    done
}

/// Forgets the loops in operands in such buffers.
fn forget_loops(plan: &mut Plan, program: ProgramKey, is: impl Fn(&str) -> bool) -> bool {
    let named: Vec<bool> = plan.buffers.iter().map(|b| b.instances > 1 && is(&b.name)).collect();
    launches(plan, program, &mut |launch, _| {
        let mut done = false;
        for operand in &mut launch.operands {
            if let Operand::Tensor { buffer: BufferId(id), instance, .. } = operand
                && named[*id as usize]
                && !instance.terms.is_empty()
            {
                *instance = Affine::constant(instance.base);
                done = true;
            }
        }
        done
    })
}

/// Gives operands in such buffers the first instance.
fn first_instance(plan: &mut Plan, program: ProgramKey, is: impl Fn(&str) -> bool) -> bool {
    let named: Vec<bool> = plan.buffers.iter().map(|b| b.instances > 1 && is(&b.name)).collect();
    launches(plan, program, &mut |launch, _| {
        let mut done = false;
        for operand in &mut launch.operands {
            if let Operand::Tensor { buffer: BufferId(id), instance, .. } = operand
                && named[*id as usize]
                && *instance != Affine::default()
            {
                (*instance, done) = (Affine::default(), true);
            }
        }
        done
    })
}

/// Gives the last row kernel of the skipping layer, which writes the stream of every token, the
/// places of a launch before it.
fn left_out(c: &mut Compiled) -> bool {
    let last = leave_out(c, None);
    last > 0 && leave_out(c, Some(last)) == last
}

/// How many row kernels of the skipping layer write every row after one that does not; number
/// `which` of them gets its places.
fn leave_out(c: &mut Compiled, which: Option<u32>) -> u32 {
    let (mut places, mut found) = (None, 0);
    launches(&mut c.plan, ProgramKey::EVALUATE, &mut |launch, list| {
        let Kernel::Rows(k) = &list[launch.kernel.0 as usize] else { return false };
        let in_rows = k.outputs.iter().all(|o| o.store == RowStore::Row);
        match (&launch.places, &places) {
            (Some(own), None) => places = Some((own.clone(), k.rows)),
            (None, Some((others, rows)))
                if in_rows && *rows == k.rows && launch.origin.starts_with("layer1") =>
            {
                found += 1;
                if which == Some(found) {
                    launch.places = Some(others.clone());
                }
            }
            _ => {}
        }
        false
    });
    found
}

/// Takes the embedding out of evaluation.
fn unembedded(c: &mut Compiled) -> bool {
    let Some(program) = c.plan.programs.get_mut(&ProgramKey::EVALUATE) else { return false };
    let before = program.steps.len();
    program.steps.retain(|step| !matches!(step, Step::Launch(launch) if launch.origin.starts_with("embed")));
    program.steps.len() < before
}

fn tensor(c: &Compiled, suffix: &str) -> Option<usize> {
    c.tensors.iter().position(|t| t.name.ends_with(suffix))
}

// The list ----------------------------------------------------------------------------------------

/// A layer of its own before three applications of another.
const RECURRENT: &str = "
    sa: {sequence: {heads: 4, kv_heads: 2, head_size: 4}}
    local: {sequence: {heads: 2, kv_heads: 1, head_size: 4, window: 3, softcap: 2}}
    da: {depth: {heads: 2, kv_heads: 1, head_size: 4}}
    ea: {experts: {count: 5, active: 2, intermediate: 6, query: 4}}
    mlp: {mlp: {intermediate: 7}}
  body: [\"local > mlp\", {recur: 3, layers: [\"(da | sa) > ea\"]}]";

/// A layer, and one whose tokens skip.
const SKIPPING: &str = "
    sa: {sequence: {heads: 4, kv_heads: 2, head_size: 4}}
    near: {sequence: {heads: 2, kv_heads: 1, head_size: 4, window: 3}}
    mlp: {mlp: {intermediate: 7}}
    ea: {experts: {count: 5, active: 2, intermediate: 6, query: 4}}
  body: [\"sa > mlp\", \"skip(capacity 0.5, causal bce 0.1) { near > ea }\"]";

/// Matrices of every kind that move as wholes: wide, tall, and of experts.
const ORTHOGONAL: &str = "
    sa: {sequence: {heads: 4, kv_heads: 2, head_size: 4}}
    ea: {experts: {count: 3, active: 2, intermediate: 6, query: 4}}
    mlp: {mlp: {intermediate: 17}}
  body: [\"sa > mlp\", {recur: 2, layers: [\"sa > ea\"]}]
train: {steps: 6, batch: 4, weight_decay: 0.1, learning_rate: 0.01, optimizer: muon}";

/// One rate at several widths.
const WIDE: &str = "
    sa: {sequence: {heads: 4, kv_heads: 2, head_size: 4}}
    mlp: {mlp: {intermediate: 18}}
  body: [{repeat: 2, layers: [\"sa > mlp\"]}]
train: {steps: 6, batch: 4, learning_rate: 0.01, transfer: {rule: mup, width: 6, depth: 2}}";

/// The same with one table for the embedding and the head.
const TIED: &str = "
    mlp: {mlp: {intermediate: 18}}
  body: [{repeat: 2, layers: [\"mlp\"]}]
  tie: true
train: {steps: 6, batch: 4, learning_rate: 0.01, transfer: {rule: mup, width: 6, depth: 2}}";

/// Layers of three kinds, each applied several times, whose values need not be kept: with weights
/// of their own, with the same, and with a router that is balanced.
const DEEP: &str = "
    sa: {sequence: {heads: 2, head_size: 6}}
    da: {depth: {heads: 1, head_size: 4}}
    mlp: {mlp: {intermediate: 7}}
    ea: {experts: {count: 5, active: 2, intermediate: 6, query: 4}}
  body: [{repeat: 3, layers: [\"sa > mlp\"]}, {recur: 3, layers: [\"(da | sa) > ea\"]}]";

/// Moments in two bytes.
const HALVES: &str = "
    sa: {sequence: {heads: 2, head_size: 6}}
    mlp: {mlp: {intermediate: 17}}
  body: [{recur: 2, layers: [\"sa > mlp\"]}]
train: {steps: 6, batch: 4, learning_rate: 0.01, betas: [0.9, 0.95], moments: bf16}";

/// Keys of components that the golden models do not have, in one model.
const KEYS: &str = "
    sa: {sequence: {heads: 4, kv_heads: 2, head_size: 6, sink: true, gate: head, bias: all,
      rope: {base: 100, share: 0.67, scaling: {type: yarn, factor: 4, fast: 8, original_context: 64}}}}
    near: {sequence: {heads: 2, head_size: 4, window: 3, sink: true, gate: element, bias: qkv,
      rope: {base: 50, scaling: {type: linear, factor: 2}}}}
    da: {depth: {heads: 2, head_size: 4, gate: element, bias: out, rope: {base: 500, half_reversed: true, share: 0.5}}}
    ea: {experts: {count: 6, active: 2, intermediate: 3, activation: relu2, shared: 2, shared_gate: true,
      router: {preset: deepseek_v3, groups: 3, topk_groups: 2, score: sqrtsoftplus}}}
    mlp: {mlp: {intermediate: 7, activation: relu2}}
  body: [\"sa > mlp\", {recur: 3, layers: [\"(da | near) > ea\"]}, \"skip(capacity 0.5, causal bce 0.1) { near > mlp }\"]
train: {steps: 6, batch: 4, weight_decay: 0.1, learning_rate: 0.01, z_loss: 0.05}";

/// Branches with norms after them alone, and experts with biases.
const BEHIND: &str = "
    sa: {sequence: {heads: 2, head_size: 6, qk_norm: rms_all, pre_norm: false, post_norm: true, bias: qk}}
    ea: {experts: {count: 3, active: 2, intermediate: 5, activation: swiglu_clamped, biased: true, router: mixtral}}
    mlp: {mlp: {intermediate: 7, activation: geglu_erf, biased: true, pre_norm: false, post_norm: true}}
  body: [\"sa > mlp\", \"sa > ea\"]";

/// Experts whose numbers of tokens are rounded, with spare choices and without.
const ROUNDED: &str = "
    sa: {sequence: {heads: 2, head_size: 4}}
    ea: {experts: {count: 4, active: 1, intermediate: 5, round: 4, router: {form: linear, normalise: false}}}
    eb: {experts: {count: 5, active: 2, intermediate: 5, round: 3, router: {form: linear}}}
  body: [\"sa > ea\", \"sa > eb\"]";

/// Queries, keys and values of short vectors.
const LATENT: &str = "
    sa: {sequence: {heads: 3, head_size: 6, qk_norm: none, latent: {query: 5, kv: 7, turned: 2, value: 4}}}
    mlp: {mlp: {intermediate: 7}}
  body: [\"sa > mlp\", \"sa > mlp\"]";

/// Short vectors that are not normalised, and two heads of keys that turn by other pairs.
const PAIRS: &str = "
    sa: {sequence: {heads: 4, head_size: 6, qk_norm: none, latent: {kv: 7, turned: 2, value: 4, norm: none, keys: 2, pairs: [[0], [2]]}}}
    mlp: {mlp: {intermediate: 7}}
  body: [\"sa > mlp\", \"sa > mlp\"]";

/// Statements on the stream, some of them in a loop.
const STATEMENTS: &str = "
    sa: {sequence: {heads: 2, head_size: 4, projection: none}}
    mlp: {mlp: {intermediate: 7}}
  body: [norm plain, save e, sa > norm > mlp, {recur: 2, layers: [mix e linear, mlp, save e]}, mix e diagonal, linear]";

/// Gains that several norms have, streams of the past, a bias of the head, and losses of a
/// definition's own.
const NAMED: &str = "
    sa: {sequence: {heads: 2, head_size: 4}}
    own: {mixer: {heads: 2}}
  head_bias: true
  body: [norm g, sa > own, norm final, {repeat: 4, layers: [own, mix history weighted apart 2]}, norm g, sa]
define:
  mixer:
    settings: {heads: 2, count: 3}
    code: |
      z = linear(x, [heads, count])
      p = softmax(z, over count)
      m = average(p)
      loss 0.5 * sum(m * log(m), over heads count)
      loss 0.1 * sum(square(z - average(z, batch)), over heads count)
      return linear(p * linear(x, [heads, count]), [hidden])
";

/// A loop whose gradients flow through its last two passes.
const TRUNCATED: &str = "
    sa: {sequence: {heads: 2, head_size: 4, projection: none}}
    da: {depth: {heads: 1, head_size: 4, projection: none}}
    mlp: {mlp: {intermediate: 7}}
  body: [sa > mlp, save e, {recur: 3, backprop: 2, layers: [mix e linear, da > mlp]}]";

/// Lanes whose numbers depend on them, in a layer of its own and in one that is applied again.
const LANES: &str = "
    sa: {sequence: {heads: 2, head_size: 4}}
    ea: {experts: {count: 3, active: 1, intermediate: 6, query: 4}}
    mlp: {mlp: {intermediate: 7}}
  body: [\"sa > mlp\", {recur: 2, layers: [\"(sa | mlp) > ea\"]}]
  stream: {lanes: 3, kind: dynamic}";

/// Lanes that mix by doubly stochastic matrices.
const MANIFOLD: &str = "
    sa: {sequence: {heads: 2, head_size: 4}}
    mlp: {mlp: {intermediate: 7}}
  body: [\"sa > mlp\", \"sa > mlp\"]
  stream: {lanes: 2, kind: mhc, embed: true}";

/// Readings of runs of two outputs, which begin at other places in every application.
const ATTENDED: &str = "
    sa: {sequence: {heads: 2, head_size: 4}}
    da: {depth: {heads: 1, head_size: 4}}
    mlp: {mlp: {intermediate: 7}}
  body: [{recur: 3, layers: [\"(da | sa) > mlp\"]}]
  stream: {attend: {block: 2}}";

/// Keys and values that are handed from application to application.
const HANDED: &str = "
    a: {sequence: {heads: 4, kv_heads: 2, head_size: 4, value_residual: true}}
    b: {sequence: {heads: 2, kv_heads: 2, head_size: 4, kv_from: a, window: 3, bias: all}}
    mlp: {mlp: {intermediate: 7}}
  body: [\"a > mlp\", \"b\", {recur: 3, layers: [\"b > mlp\", \"a > b\"]}, {repeat: 2, layers: [\"b > mlp\"]}]";

/// Keys of earlier applications in the softmax of the sequence.
const AGAIN: &str = "
    a: {sequence: {heads: 4, kv_heads: 2, head_size: 4, depth_keys: true, sink: true}}
    mlp: {mlp: {intermediate: 7}}
  body: [\"a > mlp\", {recur: 3, layers: [\"a > mlp\"]}]";

/// Keys that an attention and a network leave for later applications of the attention.
const DEPTHS: &str = "
    a: {sequence: {heads: 4, kv_heads: 2, head_size: 4, depth_stream: keys, projection: none}}
    mlp: {mlp: {intermediate: 7, depth_stream: true}}
  body: [\"a > mlp\", {recur: 3, layers: [\"mlp > a\"]}]";

/// Passes that share the keys of the first.
const FIRST: &str = "
    sa: {sequence: {heads: 4, kv_heads: 2, head_size: 4, projection: none, bias: qkv}}
    mlp: {mlp: {intermediate: 7}}
  body: [sa > mlp, {recur: 3, kv: first, layers: [sa > mlp, mlp > sa]}]";

/// Lanes with weights of every application of a loop.
const TURNS: &str = "
    sa: {sequence: {heads: 2, head_size: 4, projection: none}}
    mlp: {mlp: {intermediate: 7}}
  body: [\"sa > mlp\", {recur: 3, layers: [\"sa > mlp\"]}]
  stream: {lanes: 2}";

/// Passes with weights and losses of their own.
const PASSES: &str = "
    sa: {sequence: {heads: 2, head_size: 4, projection: none, gate: head}}
    mlp: {mlp: {intermediate: 7}}
  body: [sa > mlp, {recur: 3, embed: true, lora: 2, exit: {gate: 0.1}, layers: [sa > mlp]}, norm]";

/// A loop whose passes share out their logits.
const EXPECTED: &str = "
    sa: {sequence: {heads: 2, head_size: 4, projection: none}}
    mlp: {mlp: {intermediate: 7}}
  logit_softcap: 3
  body: [sa > mlp, {recur: 3, exit: {expected: 0.2}, layers: [sa > mlp]}]";

/// Adapters of frozen matrices.
const ADAPTERS: &str = "
    sa: {sequence: {heads: 4, kv_heads: 2, head_size: 4, projection: none}}
    mlp: {mlp: {intermediate: 7}}
  body: [sa > mlp]
  adapt: {components: [sa, mlp], rank: 2, alpha: 6}";

/// Those whose rows have magnitudes of their own.
const MAGNITUDES: &str = "
    sa: {sequence: {heads: 4, kv_heads: 2, head_size: 4, projection: none, bias: qkv}}
    ea: {experts: {count: 3, active: 2, intermediate: 7}}
  body: [sa > ea]
  adapt: {components: [sa, ea], rank: 2, alpha: 6, dora: true}";

/// A loop whose passes choose among the tokens of the pass before.
const RECURSIONS: &str = "
    sa: {sequence: {heads: 2, head_size: 4, projection: none}}
    mlp: {mlp: {intermediate: 7}}
  body:
    - sa > mlp
    - recur: 3
      layers: [\"skip(capacity [1, 0.7, 0.4], causal bce 0.3, router pass, gate sigmoid, nested) { sa > mlp }\"]
    - mlp";

/// A part whose factor is on the stream after it.
const WHOLE: &str = "
    sa: {sequence: {heads: 2, head_size: 4}}
    mlp: {mlp: {intermediate: 7}}
  body: [sa, \"skip(capacity 0.5, causal bce 0.3, gate tanh, gate_scale 0.5, whole) { sa > mlp }\"]";

/// Routers of passes that are networks, with a temperature and a loss of their scores.
const NETWORKS: &str = "
    sa: {sequence: {heads: 2, head_size: 4, projection: none}}
    mlp: {mlp: {intermediate: 7}}
  body:
    - sa
    - recur: 3
      residual_norm: false
      layers: [\"skip(capacity [1, 0.7, 0.4], causal bce 0.3, router pass, gate sigmoid, nested, temperature 0.5, network 5, z_loss 0.2) { sa > mlp }\"]
    - mlp";

/// Passes that use the keys of the first for tokens that skip them.
const REPLACED: &str = "
    sa: {sequence: {heads: 2, head_size: 4, projection: none}}
    mlp: {mlp: {intermediate: 7}}
  body:
    - sa
    - recur: 3
      residual_norm: false
      kv: replaced
      layers: [\"skip(capacity [1, 0.7, 0.4], causal bce 0.3, nested) { sa > mlp }\"]
    - mlp";

/// A choice of passes by a network, with a temperature and a loss of its scores.
const CHOOSER: &str = "
    sa: {sequence: {heads: 2, head_size: 4, projection: none}}
    mlp: {mlp: {intermediate: 7}}
  body:
    - sa > mlp
    - {recur: 3, residual_norm: false, layers: [\"skip(depth_choice, temperature 2, network 4, z_loss 0.3) { sa > mlp }\"]}
    - mlp";

/// A loop whose tokens choose how many passes they make.
const CHOICE: &str = "
    sa: {sequence: {heads: 2, head_size: 4, projection: none}}
    mlp: {mlp: {intermediate: 7}}
  body:
    - sa > mlp
    - {recur: 3, residual_norm: false, layers: [\"skip(depth_choice, balance 0.05) { sa > mlp }\"]}
    - mlp";

/// A mixer that is written as formulas, with states of texts of every kind.
const WRITTEN: &str = "
    own: {mixer: {heads: 2}}
    mlp: {mlp: {intermediate: 7}}
  body:
    - own > mlp
    - own
define:
  mixer:
    settings: {heads: 2, size: 3}
    code: |
      k = conv(linear(x, [heads, size]), 3)
      v = linear(x, [heads, size])
      a = sigmoid(linear(x, [heads]))
      recurrence S [heads, size] {
        S = a * S + k
        o = S * v
      }
      r = running(linear(x, [size])) / (position + 1)
      return linear(o, [hidden]) + linear(shift(r), [hidden]) + linear(v * sum(k, over size), [hidden])
data: {text: read.txt, tokenizer: read.json}
train: {steps: 6, batch: 4, weight_decay: 0.1, learning_rate: 0.01}
";

/// A mixer that applies another, chooses, keeps a value for a later application, and has a matrix
/// over a state.
const INNER: &str = "
    own: {mixer: {heads: 2}}
    mlp: {mlp: {intermediate: 7}}
  body:
    - own > mlp
    - \"skip(threshold, capacity 0.5, penalty 0.1) { own }\"
    - own
define:
  mixer:
    settings: {heads: 2, size: 3}
    code: |
      y = sequence(x) { heads 2 }
      a = linear(y, [n: 5])
      best = top(a, 2, over n)
      w = sum(pick(linear(y, [n, size]), best) * softmax(pick(a, best), over choices), over choices)
      k = linear(x, [heads, size]) + 0.5 * earlier(k)
      recurrence S [heads, size] {
        S = tanh(linear(S, [heads, size]) + k)
        o = S * w
      }
      return linear(o, [hidden])
";

/// Two networks of one size inside a mixer.
const INSIDE: &str = "
    own: {mixer: {wide: 5}}
    sa: {sequence: {heads: 2, head_size: 4}}
  body:
    - own > sa
    - own
define:
  mixer:
    settings: {wide: 5}
    code: |
      first = mlp(x) { intermediate wide }
      second = mlp(shift(first)) { intermediate wide }
      return second
";

/// An attention that drops weights, in layers that are applied again.
const DROPPING: &str = "
    own: {mixer: {heads: 2}}
    mlp: {mlp: {intermediate: 7}}
  body: [{repeat: 3, layers: [own > mlp]}]
define:
  mixer:
    settings: {heads: 2, size: 3}
    code: |
      q = linear(x, [heads, size])
      k = linear(x, [heads, size])
      v = linear(x, [heads, wide: 4])
      return linear(attend(q, k, v, dropout = 0.4), [hidden])
";

/// Mixers with states of texts in a loop that tokens leave.
const LEAVING: &str = "
    own: {mixer: {heads: 2}}
    mlp: {mlp: {intermediate: 7}}
  body: [{recur: 3, residual_norm: false, exit: {gate: 0.1}, layers: [own > mlp]}, norm]
define:
  mixer:
    settings: {heads: 2, size: 3}
    code: |
      k = shift(linear(x, [heads, size]))
      v = running(linear(x, [heads, size])) / (position + 1)
      return linear(k * v, [hidden])
";

const SCORED: &str = "
    own: {mixer: {heads: 2}}
    mlp: {mlp: {intermediate: 7}}
  body:
    - mlp > own
define:
  mixer:
    settings: {heads: 2, size: 3}
    code: |
      q = linear(x, [heads, size])
      k = linear(x, [heads, size])
      v = linear(x, [heads, wide: 4])
      f = running(log_sigmoid(linear(x, [heads])))
      near = weight([heads, span: 4], normal 0.5)
      y = attend(q, k, v, score = s + f[i] - f[j] + near[head, clip(i - j, 0, 3)])
      return linear(y, [hidden])
";

/// A mixer that reads the blocks that it chooses, and means of blocks.
const CHOOSING: &str = "
    own: {mixer: {heads: 2}}
    mlp: {mlp: {intermediate: 7}}
  body:
    - mlp > own
define:
  mixer:
    settings: {heads: 2, size: 3}
    code: |
      q = linear(x, [heads, size])
      k = linear(x, [heads, size])
      v = linear(x, [heads, wide: 4])
      few = running(k, block = 2) / 2
      near = choose(q, few, 2, block = 2, near = 1)
      y = attend(q, k, v, among = near) + attend(q, few, v, every = 2)
      return linear(y, [hidden])
";

/// Edits all choices of blocks.
fn choices(f: &mut Function, edit: impl Fn(&mut dreamc_compiler::op::ChooseKeys)) -> bool {
    f.nodes.iter_mut().fold(false, |done, node| match &mut node.op {
        Op::ChooseKeys(c) => {
            edit(c);
            true
        }
        _ => done,
    })
}

/// Sums of blocks of as many tokens.
fn blocks(f: &mut Function, tokens: u64) -> bool {
    f.nodes.iter_mut().fold(false, |done, node| match &mut node.op {
        Op::Running(running) if running.block.is_some() => {
            running.block = Some(tokens);
            true
        }
        _ => done,
    })
}

/// The gradients of a score's operands that are read at such a place are zero.
fn forgotten(module: &mut Module, f: &mut Function, place: Place) -> bool {
    for at in nodes(f, |op| matches!(op, Op::AttentionGrad(_))) {
        let Op::AttentionGrad(AttentionGrad(a)) = &f.nodes[at].op else { continue };
        let Some(program) = &a.program else { continue };
        let moved = a.moved();
        let Some(n) = moved.iter().position(|&read| program.reads[read].place == place) else { continue };
        let gradient = Value(f.nodes[at].first.0 + 3 + n as u32);
        let none = insert(module, f, at + 1, Op::Binary(Binary::Sub), vec![gradient, gradient])[0];
        redirect(f, at + 2, gradient, none);
        return true;
    }
    false
}

/// A mixer whose recurrence is linear attention, of texts as well.
const LINEAR: &str = "
    own: {mixer: {heads: 2}}
    mlp: {mlp: {intermediate: 7}}
  body:
    - own > mlp
    - own
define:
  mixer:
    settings: {heads: 2, size: 3}
    code: |
      k = l2(linear(x, [heads, size]), over size)
      q = linear(x, [heads, size])
      v = linear(x, [heads, value: 4])
      a = sigmoid(linear(x, [heads]))
      b = sigmoid(linear(x, [heads]))
      recurrence S [heads, value, size] {
        S = a * S
        S = S + outer(b * (v - sum(S * k, over size)), k)
        o = sum(S * q, over size)
      }
      return linear(o, [hidden])
";

/// The nodes that go through a sequence.
fn mixers(f: &mut Function) -> impl Iterator<Item = &mut dreamc_compiler::ir::Node> {
    let mixes = |op: &Op| {
        matches!(op, Op::Conv(_) | Op::Running(_) | Op::Recurrence(_) | Op::Shift(_) | Op::ShiftState)
    };
    f.nodes.iter_mut().filter(move |n| mixes(&n.op))
}

/// The product and the sum after a loop whose tokens choose: what passes made times its share, and
/// the stream before the loop.
fn weighed(f: &Function) -> Option<[usize; 2]> {
    let behind = f.params.iter().any(|p| p.name == "choice.start");
    let only = |kind| nodes(f, |op| matches!(op, Op::Binary(b) if *b == kind)).first().copied();
    Some([only(Binary::Mul).filter(|_| behind)?, only(Binary::Add)?])
}

fn specification(text: &str) -> Spec {
    let train = "train: {steps: 6, batch: 4, weight_decay: 0.1, learning_rate: 0.01}\n";
    let text = format!(
        "model:\n  name: faulty\n  vocab: 17\n  hidden: 12\n  context: 12\n  components:{text}\n{}",
        if text.contains("train:") { "" } else { train }
    );
    let ast = dreamc_dsl::parse("faulty.yaml", &text, Spelling::Yaml).unwrap_or_else(|e| panic!("{e}"));
    dreamc_dsl::check(&ast, &[]).unwrap_or_else(|e| panic!("{e}")).0
}

fn lower(name: &'static str, spec: &'static str, edit: Edit) -> Fault {
    Fault { name, spec, stage: Stage::Lower(edit), caught: "formulas", place: ["", ""] }
}

fn caches(name: &'static str, spec: &'static str, edit: Edit, place: [&'static str; 2]) -> Fault {
    Fault { name, spec, stage: Stage::Caches(edit), caught: "cached", place }
}

fn scored(name: &'static str, edit: Edit) -> Fault {
    Fault { name, spec: SCORED, stage: Stage::Derive(edit), caught: "gradients", place: ["layers.0", "own"] }
}

fn derive(name: &'static str, edit: Edit, place: [&'static str; 2]) -> Fault {
    Fault { name, spec: RECURRENT, stage: Stage::Derive(edit), caught: "gradients", place }
}

fn rewrite(name: &'static str, edit: Edit, place: [&'static str; 2]) -> Fault {
    Fault { name, spec: RECURRENT, stage: Stage::Rewrite(edit), caught: "rewritten", place }
}

/// A fault in a rule that carries a rate from size to size.
fn wider(name: &'static str, edit: fn(&mut Spec)) -> Fault {
    Fault { name, spec: WIDE, stage: Stage::Read(edit), caught: "coordinates", place: ["", ""] }
}

/// A fault in the first values of a model of another width than the base.
fn narrow(name: &'static str, edit: fn(&mut Compiled) -> bool) -> Fault {
    Fault { name, spec: WIDE, stage: Stage::Plan(edit), caught: "coordinates", place: ["", ""] }
}

/// First values of tensors of a kind that deviate less where the model is wider.
fn narrower(c: &mut Compiled, kind: TensorKind) -> bool {
    let tensors = c.tensors.iter_mut().filter(|t| t.kind == kind);
    tensors.fold(false, |_, t| {
        let hidden = t.shape.last().map_or(1.0, |&n| n as f64);
        t.init = Init::Normal((1.0 / (5.0 * hidden)).sqrt());
        true
    })
}

/// A fault in what layers compute again on the way back, where a limit of memory asks for it.
fn again(name: &'static str, edit: fn(&mut Compiled) -> bool) -> Fault {
    Fault { name, spec: DEEP, stage: Stage::Plan(edit), caught: "memory", place: ["", ""] }
}

/// Edits the launches of a way back that it has in common with the way there: those of layers that
/// are computed again. An edit that answers `None` takes the launch out.
fn computed_again(c: &mut Compiled, edit: &dyn Fn(&Plan, &mut Launch) -> Option<bool>) -> bool {
    type Seen = HashSet<(u32, String)>;
    fn forth(steps: &[Step], seen: &mut Seen) {
        for step in steps {
            match step {
                Step::Launch(launch) => drop(seen.insert((launch.kernel.0, launch.origin.clone()))),
                Step::Loop { reverse: false, steps, .. } => forth(steps, seen),
                Step::Loop { reverse: true, .. } => {}
            }
        }
    }
    fn back(steps: &mut Vec<Step>, on_it: bool, change: &mut dyn FnMut(&mut Launch) -> bool) {
        steps.retain_mut(|step| match step {
            Step::Launch(launch) => !on_it || change(launch),
            Step::Loop { reverse, steps, .. } => {
                back(steps, on_it || *reverse, change);
                true
            }
        });
    }
    if !c.kept.iter().any(|kept| kept.again) {
        return false;
    }
    let plan = c.plan.clone();
    let mut done = false;
    for (name, program) in &mut c.plan.programs {
        if !name.is_backward() {
            continue;
        }
        let mut seen = Seen::new();
        forth(&program.steps, &mut seen);
        back(&mut program.steps, false, &mut |launch| {
            if !seen.contains(&(launch.kernel.0, launch.origin.clone())) {
                return true;
            }
            let edited = edit(&plan, launch);
            done |= edited.unwrap_or(true);
            edited.is_some()
        });
    }
    done
}

/// Has layers that are computed again read such buffers as their first application does.
fn again_as_first(c: &mut Compiled, is: &dyn Fn(&str) -> bool) -> bool {
    computed_again(c, &|plan, launch| {
        let mut done = false;
        for operand in &mut launch.operands {
            if let Operand::Tensor { buffer, instance, .. } = operand
                && is(&plan.buffers[buffer.0 as usize].name)
                && !instance.terms.is_empty()
            {
                (*instance, done) = (Affine::constant(instance.base), true);
            }
        }
        Some(done)
    })
}

/// Rates of tensors by a power of the width over the base's.
fn scaled(spec: &mut Spec, pattern: &str, power: i32) {
    let Some(transfer) = &spec.train.transfer else { return };
    let learning_rate = (spec.model.hidden as f64 / transfer.width as f64).powi(power);
    spec.train.groups.push(Rates { pattern: pattern.into(), learning_rate, weight_decay: None });
}

fn plan(
    name: &'static str,
    edit: fn(&mut Compiled) -> bool,
    caught: &'static str,
    place: [&'static str; 2],
) -> Fault {
    Fault { name, spec: RECURRENT, stage: Stage::Plan(edit), caught, place }
}

fn ranks(name: &'static str, edit: fn(Group) -> Group) -> Fault {
    Fault { name, spec: RECURRENT, stage: Stage::Ranks(edit), caught: "ranks", place: ["", ""] }
}

fn counted(name: &'static str, edit: fn(&mut Counts), place: [&'static str; 2]) -> Fault {
    Fault { name, spec: RECURRENT, stage: Stage::Count(edit), caught: "counts", place }
}

fn faults() -> Vec<Fault> {
    vec![
        // Ranks: the way of gradients, rows and figures between them.
        plan("gradients are not summed over ranks", |c| apart(c, sums, "gradients"), "ranks", ["", ""]),
        plan("counts are not summed over ranks", |c| apart(c, sums, "selection counts"), "ranks", ["", ""]),
        plan("gradients are sent before the last of them", |c| early(c, sums), "ranks", ["", ""]),
        plan(
            "gradients are summed in every micro-batch",
            |c| {
                let last = c.plan.programs.get(&ProgramKey::LAST).cloned();
                last.map(|last| c.plan.programs.insert(ProgramKey::BACKWARD, last)).is_some()
            },
            "ranks",
            ["", ""],
        ),
        // States cut over ranks.
        plan("gradients of a part are not summed", |c| apart(c, scatters, "gradients"), "ranks", ["", ""]),
        plan(
            "gradients of a part are sent before the last of them",
            |c| early(c, scatters),
            "ranks",
            ["", ""],
        ),
        plan("weights of other parts are not gathered", |c| apart(c, gathers, "weights"), "ranks", ["", ""]),
        plan(
            "a rank clips by the norm of its part",
            |c| apart(c, gathers, "gradient norms"),
            "ranks",
            ["", ""],
        ),
        plan(
            "sums of gradients cut elsewhere than weights",
            |c| {
                kernels(c, ProgramKey::LAST, |k| match k {
                    Kernel::ReduceScatter(kernel::ReduceScatter { parts, .. }) => {
                        let second = parts.cuts[2];
                        parts.cuts[1] = second.min(parts.cuts[1] + 64);
                        true
                    }
                    _ => false,
                })
            },
            "ranks",
            ["", ""],
        ),
        plan(
            "a rank goes on with the states of another's part of a tensor",
            |c| {
                let cut =
                    c.tensors.iter_mut().filter(|t| c.cut.states() && t.kept.start > 0 && !t.kept.is_empty());
                cut.map(|t| t.kept = 0..t.kept.end - t.kept.start).count() > 0
            },
            "ranks",
            ["", ""],
        ),
        ranks("a rank takes the rows of another", |group| match group.rank() {
            2 => Group::over(1, group.size(), Arc::new(group)),
            _ => group,
        }),
        ranks("a rank's gradients are left out", |group| {
            wrong(group, |group, what, bytes| {
                if what == Collective::AllReduce && group.rank() == 3 {
                    bytes.fill(0);
                }
            })
        }),
        ranks("gradients are averaged, which the loss was already", |group| {
            wrong(group, |group, what, bytes| {
                if what == Collective::AllReduce {
                    let values: Vec<f32> = bytemuck::pod_collect_to_vec(bytes);
                    let mean = values.iter().map(|x| x / group.size() as f32);
                    *bytes = mean.flat_map(f32::to_le_bytes).collect();
                }
            })
        }),
        ranks("the loss of a step is averaged twice", |group| {
            wrong(group, |group, what, bytes| {
                if let (Collective::AllGather, FIGURES, Some(loss)) = (what, bytes.len(), bytes.first_chunk())
                {
                    let loss = f32::from_le_bytes(*loss) / group.size() as f32;
                    bytes[..4].copy_from_slice(&loss.to_le_bytes());
                }
            })
        }),
        ranks("a part of a checkpoint is taken for that of another rank", |group| {
            said(group, |text| text.replace("rank-1", "rank-0").replace("\"rank\":1", "\"rank\":0"))
        }),
        ranks("a part of a checkpoint is said to have the numbers after its own", |group| said(group, later)),
        ranks("a part of a checkpoint is left out", |group| said(group, |_| "[]".into())),
        ranks("a rank begins with weights of its own", |group| match group.rank() {
            1 => Group::over(1, group.size(), Arc::new(Kept(group))),
            _ => group,
        }),
        // Lowering: what the formulas of the semantics become.
        lower("window off by one", RECURRENT, |_, f| {
            attention(f, |a| a.window.iter_mut().for_each(|w| *w += 1))
        }),
        lower("missing scale of scores", RECURRENT, |_, f| attention(f, |a| a.scale = 1.0)),
        lower("missing soft-cap", RECURRENT, |_, f| attention(f, |a| a.softcap = None)),
        lower("residual added twice", RECURRENT, |m, f| {
            let (Some(x), Some(y)) = (f.find_param("x"), f.find_result("y")) else { return false };
            let twice = insert(m, f, f.nodes.len(), Op::Binary(Binary::Add), vec![y, x])[0];
            f.results.iter_mut().filter(|(p, _)| p.binding == Binding::Stream).for_each(|(_, v)| *v = twice);
            true
        }),
        lower("reversed half of the rotation not reversed", RECURRENT, |_, f| {
            let mut found = false;
            for node in &mut f.nodes {
                if let Op::Rope(rope) = &mut node.op
                    && let Positions::Depth { half_reversed } = &mut rope.positions
                {
                    (*half_reversed, found) = (false, true);
                }
            }
            found
        }),
        lower("keys rotated backwards", RECURRENT, |_, f| {
            let tokens = |op: &Op| matches!(op, Op::Rope(r) if r.positions == Positions::Tokens);
            let found = nodes(f, tokens);
            for i in found.iter().skip(1).step_by(2) {
                if let Op::Rope(rope) = &mut f.nodes[*i].op {
                    rope.inverse = true;
                }
            }
            found.len() > 1
        }),
        lower("gain of the queries on the keys of depth attention", RECURRENT, |_, f| {
            let (Some(q), Some(k)) = (f.find_param("da.q_norm.weight"), f.find_param("da.k_norm.weight"))
            else {
                return false;
            };
            redirect(f, 0, k, q);
            true
        }),
        lower("branch without its norm", RECURRENT, |_, f| {
            bypass_first(f, |f, i| matches!(f.nodes[i].op, Op::Rms(_)).then_some(0))
        }),
        lower("balancing bias in the gates", RECURRENT, |_, f| {
            let Some(&route) = nodes(f, |op| matches!(op, Op::Route(_))).first() else { return false };
            let biased = f.nodes[route].inputs[0];
            let picks = nodes(f, |op| matches!(op, Op::Pick));
            picks.iter().filter(|&&i| i > route).take(1).for_each(|&i| f.nodes[i].inputs[0] = biased);
            !picks.is_empty()
        }),
        lower("shared expert dropped", RECURRENT, |_, f| bypass_first(f, shared_sum)),
        lower("gradient of the shared expert's score not stopped", RECURRENT, |_, f| {
            bypass_first(f, |f, i| {
                let read = |n: &dreamc_compiler::ir::Node| {
                    matches!(n.op, Op::Binary(Binary::Mul)) && n.inputs.contains(&f.nodes[i].first)
                };
                (matches!(f.nodes[i].op, Op::StopGradient) && f.nodes.iter().any(read)).then_some(0)
            })
        }),
        lower("experts not gated", RECURRENT, |_, f| {
            let gated: Vec<usize> = nodes(f, |op| matches!(op, Op::Combine))
                .into_iter()
                .filter(|&i| f.nodes[i].inputs.len() == 3)
                .collect();
            gated.iter().for_each(|&i| f.nodes[i].inputs.truncate(2));
            !gated.is_empty()
        }),
        lower("loss not scaled", RECURRENT, |_, f| {
            let Some(scale) = f.find_param("loss_scale") else { return false };
            bypass_first(f, |f, i| f.nodes[i].inputs.contains(&scale).then_some(0))
        }),
        lower("lanes: read by the numbers of the output", LANES, |_, f| {
            let (Some(alpha), Some(beta)) = (f.find_param("lanes0.alpha"), f.find_param("lanes0.beta"))
            else {
                return false;
            };
            redirect(f, 0, alpha, beta);
            true
        }),
        lower("lanes: what depends on them not scaled", LANES, |_, f| {
            bypass_first(f, |f, i| {
                let tanh =
                    |v: Value| defines(f, v).is_some_and(|n| matches!(f.nodes[n].op, Op::Unary(Unary::Tanh)));
                (matches!(f.nodes[i].op, Op::Binary(Binary::Mul)) && tanh(f.nodes[i].inputs[0])).then_some(0)
            })
        }),
        lower("lanes: rows and columns of the mixing matrix not normalised", MANIFOLD, |_, f| {
            let found = nodes(f, |op| matches!(op, Op::Binary(Binary::Div)));
            found.iter().filter(|&&i| bypass(f, i, 0)).count() > 0
        }),
        lower("sources: one less is read", ATTENDED, |_, f| {
            let (Some(first), Some(last)) = (f.find_param("run0"), f.find_param("run2")) else {
                return false;
            };
            for i in nodes(f, |op| matches!(op, Op::ReadSources(_))) {
                f.nodes[i].inputs.iter_mut().filter(|v| **v == last).for_each(|v| *v = first);
            }
            true
        }),
        lower("sources: a run that never begins anew", ATTENDED, |_, f| {
            bypass_first(f, |f, i| {
                let number = |v: &Value| defines(f, *v).is_some_and(|n| matches!(f.nodes[n].op, Op::Number));
                f.nodes[i].inputs.iter().any(number).then_some(0)
            })
        }),
        lower("skip: update not multiplied by the score", SKIPPING, |_, f| {
            bypass_first(f, |f, i| {
                let put = |n: &dreamc_compiler::ir::Node| {
                    matches!(n.op, Op::PutTokens(_)) && n.inputs[0] == f.nodes[i].first
                };
                (matches!(f.nodes[i].op, Op::Binary(Binary::Mul)) && f.nodes.iter().any(put)).then_some(0)
            })
        }),
        lower("skip: update put back to other places", SKIPPING, |m, f| {
            let puts = nodes(f, |op| matches!(op, Op::PutTokens(_)));
            let Some(&top) = nodes(f, |op| matches!(op, Op::TopTokens(_))).first() else { return false };
            let (scores, op) = (f.nodes[top].inputs[0], f.nodes[top].op.clone());
            let Some(&put) = puts.last() else { return false };
            let less = insert(m, f, put, Op::Unary(Unary::Neg), vec![scores])[0];
            let others = insert(m, f, put + 1, op, vec![less])[0];
            f.nodes[put + 2].inputs[1] = others;
            true
        }),
        Fault {
            caught: "names",
            ..lower("a component found by its name", RECURRENT, |_, f| {
                f.params.iter().any(|p| p.name.starts_with("sa.")) && attention(f, |a| a.scale *= 0.5)
            })
        },
        Fault {
            caught: "causal",
            place: ["layers.0", ""],
            ..lower("no mask: later tokens are seen", RECURRENT, |m, f| {
                let Some(positions) = f.find_param("positions") else { return false };
                let Some(&at) = nodes(f, |op| matches!(op, Op::Attention(_))).first() else { return false };
                if f.nodes[at].inputs.len() > 3 {
                    return false;
                }
                let dims = f.ty(positions).dims.clone();
                let zeros = insert(m, f, at, Op::Zeros(Zeros(dims)), vec![])[0];
                let none = insert(m, f, at + 1, Op::Decide(Decide { inclusive: false }), vec![zeros])[0];
                let last =
                    insert(m, f, at + 2, Op::KeepInts(KeepInts { otherwise: 99 }), vec![positions, none])[0];
                let node = &mut f.nodes[at + 3];
                node.inputs.extend([last, positions]);
                if let Op::Attention(a) = &mut node.op {
                    (a.mask, a.window) = (Mask::Positions, None);
                }
                true
            })
        },
        // Lowering for caches.
        caches(
            "cache read before it is written",
            RECURRENT,
            |_, f| {
                let at = nodes(f, |op| matches!(op, Op::Attention(_)));
                for i in &at {
                    for operand in [1, 2] {
                        if let Some(append) = defines(f, f.nodes[*i].inputs[operand]) {
                            f.nodes[*i].inputs[operand] = f.nodes[append].inputs[0];
                        }
                    }
                }
                !at.is_empty()
            },
            ["layers.0", ""],
        ),
        caches(
            "cache: window off by one",
            RECURRENT,
            |_, f| {
                let windowed =
                    f.nodes.iter().any(|n| matches!(&n.op, Op::Attention(a) if a.window.is_some()));
                windowed && attention(f, |a| a.window.iter_mut().for_each(|w| *w += 1))
            },
            ["layers.0", "local"],
        ),
        caches(
            "cache: missing soft-cap",
            RECURRENT,
            |_, f| attention(f, |a| a.softcap = None),
            ["layers.0", "local"],
        ),
        caches(
            "cache: keys kept without their rotation",
            RECURRENT,
            |_, f| {
                let Some(&append) = nodes(f, |op| matches!(op, Op::Append)).first() else { return false };
                let rope =
                    defines(f, f.nodes[append].inputs[1]).filter(|&i| matches!(f.nodes[i].op, Op::Rope(_)));
                rope.is_some_and(|rope| bypass(f, rope, 0))
            },
            ["layers.0", ""],
        ),
        caches(
            "cache: keys and values exchanged",
            RECURRENT,
            |_, f| {
                let [k, v, ..] = nodes(f, |op| matches!(op, Op::Append))[..] else { return false };
                let (x, y) = (f.nodes[k].inputs[1], f.nodes[v].inputs[1]);
                let other = defines(f, y).is_some_and(|i| i < k);
                if other {
                    (f.nodes[k].inputs[1], f.nodes[v].inputs[1]) = (y, x);
                }
                other
            },
            ["layers.0", ""],
        ),
        caches(
            "cache: tokens that skip are kept, too",
            SKIPPING,
            |_, f| {
                let Some(slots) = f.find_param("slots") else { return false };
                let admits = nodes(f, |op| matches!(op, Op::Admit));
                admits.iter().for_each(|&i| f.nodes[i].inputs[2] = slots);
                !admits.is_empty()
            },
            ["layers.1", ""],
        ),
        // Latents in the place of keys and values.
        caches(
            "latents: queries absorb the rows of values",
            LATENT,
            |_, f| by_head(f, true).is_some_and(|(i, of)| absorb(f, i, ByHead { first: 4, ..of })),
            ["layers.0", ""],
        ),
        caches(
            "latents: values made by the rows of keys",
            LATENT,
            |_, f| by_head(f, false).is_some_and(|(i, of)| absorb(f, i, ByHead { first: 0, ..of })),
            ["layers.0", ""],
        ),
        caches(
            "latents: values made by the matrix of another head",
            LATENT,
            |m, f| {
                let Some((i, of)) = by_head(f, false) else { return false };
                let x = f.nodes[i].inputs[0];
                let dims = f.ty(x).dims.clone();
                let size = m.size(of.over) * m.size(dims[2]);
                let all = m.dim("all heads", size);
                let rest = m.dim("other heads", size - m.size(of.over));
                let flat = insert(m, f, i, Reshape([&dims[..2], &[all]].concat().into()).into(), vec![x])[0];
                let parts = insert(m, f, i + 1, Split([of.over, rest][..].into()).into(), vec![flat]);
                let turned = insert(m, f, i + 2, Concat(all).into(), vec![parts[1], parts[0]])[0];
                let x = insert(m, f, i + 3, Reshape(dims).into(), vec![turned])[0];
                f.nodes[i + 4].inputs[0] = x;
                true
            },
            ["layers.0", ""],
        ),
        caches(
            "latents: scores without the part that turns",
            LATENT,
            |m, f| {
                let Some(i) = by_head(f, true).and_then(|(i, _)| reads(f, f.nodes[i].first)) else {
                    return false;
                };
                let dims = f.ty(f.nodes[i].inputs[1]).dims.clone();
                let zeros = insert(m, f, i, Zeros(dims).into(), vec![])[0];
                f.nodes[i + 1].inputs[1] = zeros;
                true
            },
            ["layers.0", ""],
        ),
        caches(
            "latents: values begin with the part that turns",
            LATENT,
            |m, f| {
                let Some((i, _)) = by_head(f, false) else { return false };
                let Some(split) = defines(f, f.nodes[i].inputs[0]) else { return false };
                let Op::Split(Split(parts)) = f.nodes[split].op.clone() else { return false };
                let x = f.nodes[split].inputs[0];
                let [rank, turned] = parts[..] else { return false };
                let last = insert(m, f, i, Split([turned, rank][..].into()).into(), vec![x])[1];
                f.nodes[i + 1].inputs[0] = last;
                true
            },
            ["layers.0", ""],
        ),
        caches(
            "latents: queries stand at the place of another key",
            PAIRS,
            |_, f| {
                let zeros = |v| defines(f, v).is_some_and(|i| matches!(f.nodes[i].op, Op::Zeros(_)));
                let apart = |&i: &usize| matches!(f.nodes[i].inputs[..], [x, y] if zeros(x) != zeros(y));
                let Some(i) = nodes(f, |op| matches!(op, Op::Concat(_))).into_iter().find(apart) else {
                    return false;
                };
                f.nodes[i].inputs.reverse();
                true
            },
            ["layers.0", ""],
        ),
        lower("pairs of a whole head turn as a rotation of their own", PAIRS, |_, f| {
            let mut found = false;
            for node in &mut f.nodes {
                if let Op::Rope(rope) = &mut node.op {
                    found |= rope.chosen.take().is_some();
                }
            }
            found
        }),
        lower("all heads of keys turn by the pairs of the first", PAIRS, |_, f| {
            let turns = nodes(f, |op| matches!(op, Op::Rope(rope) if rope.chosen.is_some()));
            let Some(Op::Rope(first)) = turns.first().map(|&i| f.nodes[i].op.clone()) else { return false };
            let before = f.nodes.clone();
            for i in turns {
                if let Op::Rope(rope) = &mut f.nodes[i].op {
                    rope.chosen = first.chosen;
                }
            }
            f.nodes != before
        }),
        // Keys of components.
        lower("a branch without a norm before it reads through one", BEHIND, |m, f| {
            let Some(i) = reader(f, "mlp.up.weight") else { return false };
            let x = f.nodes[i].inputs[0];
            let normed = insert(m, f, i, Rms { inner: 1, eps: 1e-6 }.into(), vec![x])[0];
            f.nodes[i + 1].inputs[0] = normed;
            true
        }),
        lower("keys without their bias", BEHIND, |_, f| {
            bypass_first(f, |f, i| f.nodes[i].inputs.iter().any(|&v| is_param(f, v, ".k.bias")).then_some(0))
        }),
        lower("logits of a router without their bias", BEHIND, |_, f| {
            bypass_first(f, |f, i| {
                f.nodes[i].inputs.iter().any(|&v| is_param(f, v, "ea.router.logit_bias")).then_some(0)
            })
        }),
        lower("experts without the bias of their last matrix", BEHIND, |_, f| {
            let Some(column) = reader(f, "ea.down.bias").map(|i| f.nodes[i].first) else { return false };
            let each = nodes(f, |op| matches!(op, Op::Grouped(_)))
                .into_iter()
                .find(|&i| f.nodes[i].inputs[1] == column)
                .map(|i| f.nodes[i].first);
            bypass_first(f, |f, i| each.filter(|v| f.nodes[i].inputs.get(1) == Some(v)).map(|_| 0))
        }),
        lower("experts with as many tokens as chose them", ROUNDED, |_, f| {
            bypass_first(f, |f, i| matches!(f.nodes[i].op, Op::RoundGroups(_)).then_some(1))
        }),
        lower("experts' numbers of tokens rounded to half a tile", ROUNDED, |_, f| {
            rounding(f, |of| of.tile = of.tile.div_ceil(2))
        }),
        lower("next choices that every token has", ROUNDED, |_, f| rounding(f, |of| of.spare = 0)),
        lower("the best tokens of an expert let go", ROUNDED, |m, f| {
            let found = nodes(f, |op| matches!(op, Op::RoundGroups(_)));
            let Some(&i) = found.last() else { return false };
            let scores = f.nodes[i].inputs[0];
            let negative = insert(m, f, i, Op::Unary(Unary::Neg), vec![scores])[0];
            f.nodes[i + 1].inputs[0] = negative;
            true
        }),
        lower("the vector that keys are made of is not normalised", LATENT, |_, f| {
            let Some(i) = reader(f, "sa.kv_down_norm.weight") else { return false };
            let normed =
                f.nodes[i].inputs.iter().copied().find(|&v| !is_param(f, v, "sa.kv_down_norm.weight"));
            let rms = normed.and_then(|v| defines(f, v));
            rms.is_some_and(|i| matches!(f.nodes[i].op, Op::Rms(_)) && bypass(f, i, 0))
        }),
        lower("the part of keys that heads share does not turn", LATENT, |_, f| {
            let turns = nodes(f, |op| matches!(op, Op::Rope(_)));
            turns.last().is_some_and(|&i| turns.len() == 2 && bypass(f, i, 0))
        }),
        lower("a steeper gate without its slope", BEHIND, |_, f| {
            let slopes = nodes(f, |op| *op == Op::Constant(Constant(1.702)));
            slopes.iter().for_each(|&i| f.nodes[i].op = Op::Constant(Constant(1.0)));
            !slopes.is_empty()
        }),
        lower("sink as good as its opposite", KEYS, |_, f| {
            let Some(i) = reader(f, "sa.sink") else { return false };
            f.nodes[i].op = Op::Binary(Binary::Add);
            true
        }),
        lower("frequencies not lowered", KEYS, |_, f| {
            let mut found = false;
            for node in &mut f.nodes {
                if let Op::Rope(rope) = &mut node.op {
                    found |= rope.scaling.take().is_some();
                }
            }
            found
        }),
        lower("output without its bias", KEYS, |_, f| {
            bypass_first(f, |f, i| {
                f.nodes[i].inputs.iter().any(|&v| is_param(f, v, "sa.out.bias")).then_some(0)
            })
        }),
        lower("activation not squared", KEYS, |_, f| {
            let relu =
                |f: &Function, v| defines(f, v).is_some_and(|i| f.nodes[i].op == Op::Unary(Unary::Relu));
            bypass_first(f, |f, i| {
                let node = &f.nodes[i];
                (node.op == Op::Unary(Unary::Square) && relu(f, node.inputs[0])).then_some(0)
            })
        }),
        lower("shared experts gated by a tangent", KEYS, |_, f| {
            let Some(z) = reader(f, "ea.shared_gate.weight").map(|i| f.nodes[i].first) else { return false };
            let found = (0..f.nodes.len()).find(|&i| f.nodes[i].inputs.contains(&z));
            found.is_some_and(|i| {
                f.nodes[i].op = Op::Unary(Unary::Tanh);
                true
            })
        }),
        lower("experts of all groups", KEYS, |_, f| {
            bypass_first(f, |f, i| {
                let node = &f.nodes[i];
                let never =
                    |v: Value| defines(f, v).is_some_and(|i| f.nodes[i].op == Op::Binary(Binary::Mul));
                let of_groups =
                    |v: Value| defines(f, v).is_some_and(|i| matches!(f.nodes[i].op, Op::Reshape(_)));
                let outside =
                    node.op == Op::Binary(Binary::Sub) && of_groups(node.inputs[0]) && never(node.inputs[1]);
                outside.then_some(0)
            })
        }),
        lower("scores without their root", KEYS, |_, f| {
            bypass_first(f, |f, i| (f.nodes[i].op == Op::Unary(Unary::Sqrt)).then_some(0))
        }),
        Fault {
            name: "nothing follows from the denominators of attention",
            spec: KEYS,
            stage: Stage::Derive(|_, f| {
                let mut found = false;
                for node in &mut f.nodes {
                    if let Op::AttentionGrad(a) = &node.op
                        && let Some(log) = a.log(node.inputs.len())
                    {
                        node.inputs.truncate(log);
                        found = true;
                    }
                }
                found
            }),
            caught: "gradients",
            place: ["", ""],
        },
        Fault {
            name: "loss of logits forgotten",
            spec: KEYS,
            stage: Stage::Read(|spec| spec.train.z_loss = 0.0),
            caught: "gradients",
            place: ["", ""],
        },
        Fault {
            name: "GELU by tanh in the place of the error function",
            spec: BEHIND,
            stage: Stage::Read(|spec| {
                for component in spec.model.components.values_mut() {
                    if let Component::Mlp(mlp) = component {
                        mlp.activation = Activation::Geglu;
                    }
                }
            }),
            caught: "devices",
            place: ["", ""],
        },
        // States that are handed from application to application.
        lower("keys of the first application read, not of the latest", HANDED, |_, f| {
            let mut found = false;
            for port in &mut f.params {
                if let Binding::Index(index @ Index::Latest(_)) = &mut port.binding {
                    (*index, found) = (Index::First, true);
                }
            }
            found
        }),
        lower("values of the latest application mixed, not of the first", HANDED, |_, f| {
            let row = f.params.iter().find(|p| matches!(p.binding, Binding::Index(Index::Row(0))));
            let row = row.map(|p| p.binding);
            let mut found = false;
            for port in f.params.iter_mut().filter(|p| p.binding == Binding::Index(Index::First)) {
                if let Some(row) = row {
                    (port.binding, found) = (row, true);
                }
            }
            found
        }),
        lower("depth keys: each application writes its keys over those before", AGAIN, |_, f| {
            let next =
                f.params.iter_mut().filter(|p| matches!(p.binding, Binding::Index(Index::Next { .. })));
            let found: Vec<_> = next.map(|port| port.binding = Binding::Index(Index::First)).collect();
            !found.is_empty()
        }),
        lower("depth stream: a key of a layer written over the one before", DEPTHS, |_, f| {
            let mut found = false;
            for port in &mut f.params {
                if let Binding::Index(Index::Next { by: by @ 2, .. }) = &mut port.binding {
                    (*by, found) = (1, true);
                }
            }
            found
        }),
        lower("depth stream: keys without the gain of the attention that reads them", DEPTHS, |_, f| {
            bypass_first(f, |f, i| {
                let node = &f.nodes[i];
                let gain =
                    |v: Value| f.params.get(v.index()).is_some_and(|p| p.name.ends_with(".k_norm.weight"));
                let normed = |v: Value| defines(f, v).is_some_and(|n| matches!(f.nodes[n].op, Op::Rms(_)));
                let asks =
                    node.op == Op::Binary(Binary::Mul) && gain(node.inputs[1]) && !normed(node.inputs[0]);
                asks.then_some(0)
            })
        }),
        lower("depth keys: without the sink in what stands for the sequence", AGAIN, |_, f| {
            bypass_first(f, |f, i| {
                let more = |v: Value| {
                    defines(f, v).is_some_and(|n| matches!(f.nodes[n].op, Op::Unary(Unary::Softplus)))
                };
                (matches!(f.nodes[i].op, Op::Binary(Binary::Add)) && more(f.nodes[i].inputs[0])).then_some(0)
            })
        }),
        caches(
            "cached values of another component read as its keys",
            HANDED,
            |_, f| {
                let (Some(k), Some(v)) = (f.find_param("a.keys.latest"), f.find_param("a.values.latest"))
                else {
                    return false;
                };
                redirect(f, 0, k, v);
                true
            },
            ["", ""],
        ),
        // Differentiation.
        derive(
            "gradient of the norm without the mean",
            |_, f| bypass_first(f, |f, i| matches!(f.nodes[i].op, Op::RmsGrad(_)).then_some(1)),
            ["", ""],
        ),
        derive(
            "gradients of keys and values exchanged",
            |_, f| {
                let Some(&i) = nodes(f, |op| matches!(op, Op::AttentionGrad(_))).first() else {
                    return false;
                };
                let first = f.nodes[i].first.0;
                let (dk, dv) = (Value(first + 1), Value(first + 2));
                for node in f.nodes.iter_mut().skip(i + 1) {
                    for v in &mut node.inputs {
                        *v = if *v == dk {
                            dv
                        } else if *v == dv {
                            dk
                        } else {
                            *v
                        };
                    }
                }
                true
            },
            ["", ""],
        ),
        derive(
            "window off by one in the backward",
            |_, f| {
                let mut found = false;
                for node in &mut f.nodes {
                    if let Op::AttentionGrad(AttentionGrad(a)) = &mut node.op
                        && let Some(window) = &mut a.window
                    {
                        (*window, found) = (*window + 1, true);
                    }
                }
                found
            },
            ["layers.0", "local"],
        ),
        derive(
            "soft-cap not differentiated",
            |_, f| {
                let mut found = false;
                for node in &mut f.nodes {
                    if let Op::AttentionGrad(AttentionGrad(a)) = &mut node.op {
                        found |= a.softcap.take().is_some();
                    }
                }
                found
            },
            ["layers.0", "local"],
        ),
        derive(
            "router recomputed in the backward, without its bias",
            |m, f| {
                let Some(&route) = nodes(f, |op| matches!(op, Op::Route(_))).last() else { return false };
                let op = f.nodes[route].op.clone();
                let Some(bias) = defines(f, f.nodes[route].inputs[0]) else { return false };
                let plain = f.nodes[bias].inputs[0];
                let chosen = f.nodes[route].first;
                let Some(&back) = nodes(f, |op| matches!(op, Op::PickGrad(_))).first() else {
                    return false;
                };
                if f.nodes[back].inputs[1] != chosen {
                    return false;
                }
                let again = insert(m, f, back, op, vec![plain])[0];
                f.nodes[back + 1].inputs[1] = again;
                true
            },
            ["layers.1", ""],
        ),
        derive(
            "a contribution to the stream's gradient lost",
            |_, f| {
                let Some(dx) = f.find_result("d.x") else { return false };
                let sum = defines(f, dx).filter(|&i| matches!(f.nodes[i].op, Op::Binary(Binary::Add)));
                sum.is_some_and(|i| bypass(f, i, 1))
            },
            ["", ""],
        ),
        derive(
            "derivative of another function",
            |_, f| {
                let found = nodes(f, |op| matches!(op, Op::Unary(Unary::SiluGrad)));
                found.iter().for_each(|&i| f.nodes[i].op = Op::Unary(Unary::Sigmoid));
                !found.is_empty()
            },
            ["", ""],
        ),
        derive(
            "gradients of the depth cache exchanged",
            |_, f| {
                let found = nodes(f, |op| matches!(op, Op::DepthAttentionGrad(_)));
                found.iter().for_each(|&i| f.nodes[i].inputs.swap(5, 6));
                !found.is_empty()
            },
            ["layers.1", "da"],
        ),
        // Rewriting.
        rewrite(
            "a gain folded into nothing",
            |_, f| {
                bypass_first(f, |f, i| {
                    let n = &f.nodes[i];
                    (matches!(n.op, Op::Binary(Binary::Mul)) && is_param(f, n.inputs[1], "norm.weight"))
                        .then_some(0)
                })
            },
            ["", ""],
        ),
        rewrite("a scale folded twice", |_, f| attention(f, |a| a.scale *= a.scale), ["", ""]),
        rewrite(
            "merged projections cut in another order",
            |_, f| {
                let cut = |i: &usize| f.nodes[*i].count == 3;
                let Some(i) = nodes(f, |op| matches!(op, Op::Split(_))).into_iter().find(cut) else {
                    return false;
                };
                let first = f.nodes[i].first.0;
                let (k, v) = (Value(first + 1), Value(first + 2));
                for node in f.nodes.iter_mut().skip(i + 1) {
                    for x in &mut node.inputs {
                        *x = if *x == k {
                            v
                        } else if *x == v {
                            k
                        } else {
                            *x
                        };
                    }
                }
                true
            },
            ["", ""],
        ),
        Fault {
            spec: ATTENDED,
            ..derive(
                "sources: the gradient of complete runs dropped",
                |_, f| {
                    let found = nodes(f, |op| matches!(op, Op::ReadSourcesGrad(_)));
                    for &i in &found {
                        let (old, new) = (Value(f.nodes[i].first.0 + 2), f.nodes[i].inputs[5]);
                        redirect(f, i + 1, old, new);
                    }
                    !found.is_empty()
                },
                ["", ""],
            )
        },
        rewrite(
            "shared expert subtracted where it is merged",
            |_, f| {
                let shared = |i: &usize| f.nodes[*i].inputs.iter().any(|v| is_param(f, *v, ".shared.weight"));
                let sums = nodes(f, |op| matches!(op, Op::Binary(Binary::Add)));
                let found: Vec<usize> = sums.into_iter().filter(shared).collect();
                found.iter().for_each(|&i| f.nodes[i].op = Op::Binary(Binary::Sub));
                !found.is_empty()
            },
            ["layers.1", ""],
        ),
        // Statements on the stream.
        lower("a diagonal mix with steps that are cut off", STATEMENTS, |_, f| {
            let found = nodes(f, |op| matches!(op, Op::Unary(Unary::Softplus)));
            found.iter().for_each(|&i| f.nodes[i].op = Op::Unary(Unary::Relu));
            !found.is_empty()
        }),
        lower("a plain norm that leaves the stream as it is", STATEMENTS, |_, f| {
            let found = nodes(f, |op| matches!(op, Op::Rms(_)));
            found.len() == 1 && f.nodes.len() == 1 && bypass(f, found[0], 0)
        }),
        Fault {
            name: "a mix in a loop that reads the stream that was saved first",
            spec: STATEMENTS,
            stage: Stage::Plan(|c| {
                forget_loops(&mut c.plan, ProgramKey::BACKWARD, |name| name.starts_with("saved."))
            }),
            caught: "gradients",
            place: ["", ""],
        },
        Fault {
            name: "a cotangent of a saved stream that goes on beyond its `save`",
            spec: STATEMENTS,
            stage: Stage::Plan(|c| unzeroed(c, |origin| origin.starts_with("d.saved."))),
            caught: "gradients",
            place: ["", ""],
        },
        // Names of gains, the past, the head, and losses of definitions.
        lower("a head without its bias", NAMED, |_, f| {
            let add = reader(f, "head.bias");
            add.is_some_and(|add| bypass(f, add, 0))
        }),
        lower("a norm without the gain of its name", NAMED, |_, f| {
            let gain = reader(f, "norms.g.weight");
            gain.is_some_and(|gain| bypass(f, gain, 0))
        }),
        lower("a stream of the past that is four layers back", NAMED, |_, f| {
            let past = |name| f.params.iter().position(|p| p.name.ends_with(name));
            let (Some(four), Some(two)) = (past("history.0"), past("history.2")) else { return false };
            redirect(f, 0, Value(two as u32), Value(four as u32));
            true
        }),
        lower("a mean over tokens that is their sum", NAMED, |module, f| {
            nodes(f, |op| matches!(op, Op::Reduce(_))).into_iter().fold(false, |done, i| {
                let Op::Reduce(r) = &mut f.nodes[i].op else { return done };
                let tokens = r.over.len() == 1 && module.name(r.over[0]) == "seq";
                if tokens && r.how == dreamc_compiler::ir::Reduce::Mean {
                    r.how = dreamc_compiler::ir::Reduce::Sum;
                }
                done || tokens
            })
        }),
        lower("a loss of a definition that is left out", NAMED, |_, f| {
            let results = f.results.len();
            f.results.retain(|(port, _)| port.binding != Binding::Output(dreamc_compiler::ir::Output::Aux));
            f.results.len() < results
        }),
        // Passes without a gradient.
        Fault {
            name: "cotangents that go on into passes without a gradient",
            spec: TRUNCATED,
            stage: Stage::Plan(|c| unzeroed(c, |origin| origin == "detached passes")),
            caught: "gradients",
            place: ["", ""],
        },
        Fault {
            name: "a pass that begins with the stream of the pass before the last",
            spec: TRUNCATED,
            stage: Stage::Plan(|c| {
                let mut done = false;
                for program in [ProgramKey::BACKWARD, ProgramKey::EVALUATE] {
                    done |= launches(&mut c.plan, program, &mut |launch, list| {
                        launch.origin == "the stream of the next pass"
                            && kernel(launch, list, |k| match k {
                                Kernel::Copy(copy) => std::mem::replace(&mut copy.elements, 1) > 1,
                                _ => false,
                            })
                    });
                }
                done
            }),
            caught: "devices",
            place: ["", ""],
        },
        lower("a pass without its embedding", PASSES, |_, f| {
            let add = reader(f, "embed.weight").filter(|_| f.name.starts_with("pass"));
            add.is_some_and(|add| bypass(f, add, 0))
        }),
        lower("an output of low rank left out", PASSES, |_, f| {
            let low = reader(f, "sa.out.lora_b").and_then(|low| {
                let low = f.nodes[low].first;
                (0..f.nodes.len()).find(|&i| f.nodes[i].inputs.contains(&low))
            });
            low.is_some_and(|add| bypass(f, add, 0))
        }),
        lower("a pass whose logits are left out of those expected", EXPECTED, |_, f| {
            let left = nodes(f, |op| matches!(op, Op::Concat(_))).into_iter().find_map(|joined| {
                f.name.starts_with("exit").then(|| defines(f, f.nodes[joined].inputs[1])).flatten()
            });
            left.is_some_and(|add| bypass(f, add, 0))
        }),
        lower("logits of the last pass in the place of those expected", EXPECTED, |_, f| {
            let sum = nodes(f, |op| matches!(op, Op::Split(_))).into_iter().find_map(|parts| {
                let sum = Value(f.nodes[parts].first.0 + 1);
                (f.name == "head").then(|| reads(f, sum)).flatten()
            });
            let last = sum.and_then(|add| Some((add, defines(f, f.nodes[add].inputs[1])?)));
            last.is_some_and(|(add, part)| {
                let (old, new) = (f.nodes[add].first, f.nodes[part].inputs[0]);
                redirect(f, add + 1, old, new);
                true
            })
        }),
        lower("lanes without the vectors that they begin with", MANIFOLD, |_, f| {
            let add = reader(f, "lanes.embed.weight");
            add.is_some_and(|add| bypass(f, add, 0))
        }),
        lower("an adapter left out", ADAPTERS, |_, f| {
            let low = reader(f, "sa.k.adapter_b").and_then(|low| {
                let low = f.nodes[low].first;
                (0..f.nodes.len()).find(|&i| f.nodes[i].inputs.contains(&low))
            });
            low.is_some_and(|add| bypass(f, add, 0))
        }),
        lower("an adapter of keys that adds to values", ADAPTERS, |_, f| {
            let sums = ["sa.k.adapter_b", "sa.v.adapter_b"].map(|name| {
                let low = f.nodes[reader(f, name)?].first;
                (0..f.nodes.len()).find(|&i| f.nodes[i].inputs.contains(&low))
            });
            let [Some(keys), Some(values)] = sums else { return false };
            let (k, v) = (f.nodes[keys].inputs[0], f.nodes[values].inputs[0]);
            (f.nodes[keys].inputs[0], f.nodes[values].inputs[0]) = (v, k);
            true
        }),
        lower("adapters without their factor", ADAPTERS, |_, f| {
            let scaled = reader(f, "sa.k.adapter_b").map(|low| f.nodes[low].inputs[0]);
            let scale = (0..f.nodes.len()).find(|&i| Some(f.nodes[i].first) == scaled);
            scale.is_some_and(|scale| bypass(f, scale, 0))
        }),
        lower("magnitudes that are not read", MAGNITUDES, |_, f| {
            let scaled = reader(f, "adapter_magnitude");
            scaled.is_some_and(|scaled| bypass(f, scaled, 1))
        }),
        lower("a norm of rows that has a gradient", MAGNITUDES, |_, f| {
            norms(f).is_some_and(|[stop, ..]| bypass(f, stop, 0))
        }),
        lower("the norm of frozen rows in the place of their sum's", MAGNITUDES, |_, f| {
            norms(f).is_some_and(|[_, sum, _]| bypass(f, sum, 0))
        }),
        lower("a norm of rows that counts once what both have in common", MAGNITUDES, |_, f| {
            let twice = norms(f).map(|[.., added]| f.nodes[added].inputs[0]);
            let twice = (0..f.nodes.len()).find(|&i| Some(f.nodes[i].first) == twice);
            twice.is_some_and(|twice| bypass(f, twice, 0))
        }),
        lower("a norm of rows without what both have in common", MAGNITUDES, |_, f| {
            norms(f).is_some_and(|[.., added]| bypass(f, added, 1))
        }),
        lower("a norm of rows without the square of what an adapter adds", MAGNITUDES, |_, f| {
            norms(f).is_some_and(|[.., added]| bypass(f, added, 0))
        }),
        lower("a gate of an exit that is what is left", PASSES, |_, f| {
            let neg = nodes(f, |op| matches!(op, Op::Unary(Unary::Neg)));
            neg.first().is_some_and(|&neg| f.name.starts_with("exit") && bypass(f, neg, 0))
        }),
        caches(
            "keys of its last pass that a token does not leave",
            PASSES,
            |_, f| {
                let reading =
                    |f: &Function, v: Value| (0..f.nodes.len()).find(|&i| f.nodes[i].inputs.contains(&v));
                let taken = nodes(f, |op| matches!(op, Op::CacheTake));
                let kept = taken.first().and_then(|&taken| reading(f, f.nodes[taken].first));
                let both = kept.and_then(|kept| reading(f, f.nodes[kept].first));
                both.is_some_and(|both| bypass(f, both, 0))
            },
            ["", ""],
        ),
        caches(
            "a token that left without its stream",
            PASSES,
            |_, f| {
                let leaves = f.name.starts_with("layer") && f.params.iter().any(|p| p.name == "exit.left");
                let y = f.results.iter().find(|(p, _)| p.name == "y").map(|(_, v)| *v);
                let both = f.nodes.iter().position(|n| Some(n.first) == y);
                leaves && both.is_some_and(|both| bypass(f, both, 0))
            },
            ["", ""],
        ),
        Fault {
            name: "the weights of the first pass at every pass",
            spec: PASSES,
            stage: Stage::Plan(|c| {
                forget_loops(&mut c.plan, ProgramKey::EVALUATE, |name| name.contains("lora_"))
            }),
            caught: "devices",
            place: ["", ""],
        },
        lower("values of the first pass that are its keys", FIRST, |_, f| {
            let taken = nodes(f, |op| matches!(op, Op::CacheTake));
            let Some(&attention) = nodes(f, |op| matches!(op, Op::Attention(_))).first() else {
                return false;
            };
            taken.len() == 2 && {
                f.nodes[attention].inputs[2] = f.nodes[attention].inputs[1];
                true
            }
        }),
        lower("the first row of keys for all layers of a pass", FIRST, |_, f| {
            let rows = f.params.iter_mut().filter(|p| matches!(p.binding, Binding::Index(Index::Row(_))));
            let reads = f.nodes.iter().any(|n| matches!(n.op, Op::CacheTake));
            let changed = rows.filter(|_| reads).map(|p| p.binding = Binding::Index(Index::First));
            changed.count() > 0
        }),
        caches(
            "cached values of the first pass that are its keys",
            FIRST,
            |_, f| {
                let keys = |p: &Port| p.binding == Binding::State(Lifetime::Token(PerToken::First));
                let reads = f.params.iter().any(keys);
                let Some(&attention) = nodes(f, |op| matches!(op, Op::Attention(_))).first() else {
                    return false;
                };
                reads && {
                    f.nodes[attention].inputs[2] = f.nodes[attention].inputs[1];
                    true
                }
            },
            ["", ""],
        ),
        Fault {
            name: "the lanes of the first application at every one",
            spec: TURNS,
            stage: Stage::Plan(|c| {
                forget_loops(&mut c.plan, ProgramKey::EVALUATE, |name| name.contains("lanes0.alpha"))
            }),
            caught: "devices",
            place: ["", ""],
        },
        Fault {
            name: "cotangents of what passes leave that are one",
            spec: PASSES,
            stage: Stage::Plan(|c| forget_loops(&mut c.plan, ProgramKey::BACKWARD, |name| name == "d.exit")),
            caught: "gradients",
            place: ["", ""],
        },
        lower("a factor on the update in the place of the stream", WHOLE, |_, f| {
            let taken: Vec<Value> =
                f.nodes.iter().filter(|n| matches!(n.op, Op::TakeTokens)).map(|n| n.first).collect();
            let sums = nodes(f, |op| matches!(op, Op::Binary(Binary::Add)));
            let whole = sums.into_iter().rfind(|&i| taken.contains(&f.nodes[i].inputs[1]));
            whole.is_some_and(|whole| bypass(f, whole, 0))
        }),
        lower("a router without its temperature", NETWORKS, |_, f| {
            let up = reader(f, "network.up.weight").and_then(|up| defines(f, f.nodes[up].inputs[0]));
            up.is_some_and(|cooled| bypass(f, cooled, 0))
        }),
        lower("a loss of scores that are not squared", NETWORKS, |_, f| {
            let squares = nodes(f, |op| matches!(op, Op::Unary(Unary::Square)));
            let of_scores = squares.into_iter().rfind(|&i| f.ty(f.nodes[i].first).dims.len() == 2);
            of_scores.is_some_and(|square| bypass(f, square, 0))
        }),
        lower("tokens that skip a pass have no keys there", REPLACED, |_, f| {
            replacing(f).is_some_and(|[sum, _]| bypass(f, sum, 0))
        }),
        lower("a key that the first pass's is added to", REPLACED, |_, f| {
            replacing(f).is_some_and(|[_, kept]| bypass(f, kept, 0))
        }),
        lower("a choice of passes without its temperature", CHOOSER, |_, f| {
            let up = reader(f, "network.up.weight").and_then(|up| defines(f, f.nodes[up].inputs[0]));
            up.is_some_and(|cooled| bypass(f, cooled, 0))
        }),
        lower("a loss of a choice that is left out", CHOOSER, |_, f| {
            let results = f.results.len();
            f.results.retain(|(port, _)| port.binding != Binding::Output(dreamc_compiler::ir::Output::Aux));
            f.results.len() < results
        }),
        lower("a gate that is the score itself", RECURSIONS, |_, f| {
            let gates = nodes(f, |op| matches!(op, Op::Unary(Unary::Sigmoid)));
            let skips = f.nodes.iter().any(|n| matches!(n.op, Op::TakeTokens));
            gates.first().is_some_and(|&gate| skips && bypass(f, gate, 0))
        }),
        lower("a pass that chooses among all tokens", RECURSIONS, |_, f| {
            let among = f.params.iter().any(|p| p.name.ends_with(".among"));
            let chosen = nodes(f, |op| matches!(op, Op::TopTokens(_)));
            let stopped = chosen.first().and_then(|&top| defines(f, f.nodes[top].inputs[0]));
            let ranked = stopped.and_then(|stop| defines(f, f.nodes[stop].inputs[0]));
            ranked.is_some_and(|ranked| among && bypass(f, ranked, 0))
        }),
        lower("a loss of a router over tokens that it was not asked about", RECURSIONS, |_, f| {
            let among = f.params.iter().any(|p| p.name.ends_with(".among"));
            let mean = nodes(f, |op| matches!(op, Op::Binary(Binary::Div)));
            mean.last().is_some_and(|&mean| among && bypass(f, mean, 0))
        }),
        lower("a pass that leaves the tokens of the one before", RECURSIONS, |_, f| {
            let among = f.params.iter().position(|p| p.name.ends_with(".among"));
            let left = f.results.iter_mut().find(|(p, _)| p.name.ends_with(".members"));
            let (Some(among), Some(left)) = (among, left) else { return false };
            left.1 = Value(among as u32);
            true
        }),
        caches(
            "a token that left and decides again",
            RECURSIONS,
            |_, f| {
                let among = nodes(f, |op| matches!(op, Op::KeepInts(_)))
                    .into_iter()
                    .find(|&i| is_param(f, f.nodes[i].inputs[1], ".among"));
                among.is_some_and(|among| bypass(f, among, 0))
            },
            ["", ""],
        ),
        Fault {
            name: "the router of the first pass at every pass",
            spec: RECURSIONS,
            stage: Stage::Plan(|c| {
                first_instance(&mut c.plan, ProgramKey::EVALUATE, |name| name.ends_with("router.weight"))
            }),
            caught: "devices",
            place: ["", ""],
        },
        Fault {
            name: "the capacity of the first pass at every pass",
            spec: RECURSIONS,
            stage: Stage::Read(|spec| {
                for item in &mut spec.model.body {
                    let Item::Recur { items, .. } = item else { continue };
                    if let Some(Item::Layer(Expr::Skip(skip, _))) = items.first_mut() {
                        skip.capacities.fill(1.0);
                    }
                }
            }),
            caught: "devices",
            place: ["", ""],
        },
        lower("passes of a choice without its share", CHOICE, |_, f| {
            weighed(f).is_some_and(|[product, _]| bypass(f, product, 0))
        }),
        lower("passes of a choice that do not return to the stream before them", CHOICE, |_, f| {
            weighed(f).is_some_and(|[_, sum]| bypass(f, sum, 1))
        }),
        lower("a bias that gates as well as chooses", CHOICE, |_, f| {
            let sums = nodes(f, |op| matches!(op, Op::Binary(Binary::Add)));
            let biased = |&add: &usize| is_param(f, f.nodes[add].inputs[1], "choice.bias");
            let pick = nodes(f, |op| matches!(op, Op::Pick)).first().copied();
            let (Some(add), Some(pick)) = (sums.into_iter().find(biased), pick) else { return false };
            f.nodes[pick].inputs[0] = f.nodes[add].first;
            add < pick
        }),
        lower("a token that has made its passes and is a key", CHOICE, |_, f| {
            let mut found = false;
            for node in f.nodes.iter_mut() {
                if let Op::Decide(decide) = &mut node.op {
                    (decide.inclusive, found) = (true, true);
                }
            }
            found
        }),
        caches(
            "a token that has made its passes and is a key in caches",
            CHOICE,
            |_, f| {
                let mut found = false;
                for node in f.nodes.iter_mut() {
                    if let Op::Decide(decide) = &mut node.op {
                        (decide.inclusive, found) = (true, true);
                    }
                }
                found
            },
            ["", ""],
        ),
        lower("a token that leaves a pass too early", CHOICE, |_, f| {
            // The first of the columns after this pass is that of the next.
            let pass = f.params.iter().any(|p| p.name == "choice.last");
            let Some(split) = nodes(f, |op| matches!(op, Op::Split(_))).into_iter().next() else {
                return false;
            };
            let columns = f.nodes[split].first;
            pass && f.nodes[split + 1..].iter_mut().any(|node| {
                let found = node.inputs.first() == Some(&Value(columns.0 + 2));
                if found {
                    node.inputs[0] = Value(columns.0 + 1);
                }
                found
            })
        }),
        // Reading of the specification.
        Fault {
            name: "capacity rounded to one token less",
            spec: SKIPPING,
            stage: Stage::Read(|spec| {
                for item in &mut spec.model.body {
                    if let Item::Layer(Expr::Skip(skip, _)) = item
                        && let SkipRule::TopK { capacity, .. } = &mut skip.rule
                        && *capacity < 1.0
                    {
                        *capacity = 0.4;
                    }
                }
            }),
            caught: "devices",
            place: ["layers.1", ""],
        },
        // Scheduling and assembly.
        plan("memory of a temporary used again too early", reused, "devices", ["layers.1", ""]),
        Fault {
            name: "rows left out that are read",
            spec: SKIPPING,
            stage: Stage::Plan(left_out),
            caught: "devices",
            place: ["layers.1", ""],
        },
        // The values are right: training left them there.
        plan("evaluation begins with the stream of training", unembedded, "devices", ["embed", ""]),
        plan(
            "a gradient overwritten where it is to be added to",
            |c| {
                launches(&mut c.plan, ProgramKey::BACKWARD, &mut |launch, list| {
                    launch.origin.starts_with("layer1")
                        && kernel(launch, list, |k| match k {
                            Kernel::GroupedOuter(kernel::GroupedOuter { accumulate, .. }) => {
                                std::mem::take(accumulate)
                            }
                            _ => false,
                        })
                })
            },
            "gradients",
            ["layers.1", ""],
        ),
        plan(
            "depth cache written to one row",
            |c| {
                let mut found = false;
                for program in [ProgramKey::BACKWARD, ProgramKey::EVALUATE] {
                    found |= launches(&mut c.plan, program, &mut |launch, list| {
                        let write = matches!(list[launch.kernel.0 as usize], Kernel::CacheWrite(_));
                        if let (true, Some(Operand::Index(row))) = (write, launch.operands.get_mut(1)) {
                            *row = Affine::constant(row.base);
                        }
                        write
                    });
                }
                found
            },
            "devices",
            ["layers.1", "da"],
        ),
        plan(
            "head of a prompt with the token before of the next text",
            |c| {
                kernels(c, ProgramKey::PREFILL, |k| match k {
                    Kernel::TakeTokens(take) if take.k == 1 => {
                        take.tokens -= 1;
                        true
                    }
                    _ => false,
                })
            },
            "cached",
            ["", ""],
        ),
        plan(
            "all applications with one cache",
            |c| {
                let keys = |name: &str| name.ends_with("sa.keys") && !name.starts_with("decode");
                let prefill = forget_loops(&mut c.plan, ProgramKey::PREFILL, keys);
                forget_loops(&mut c.plan, ProgramKey::DECODE, keys) && prefill
            },
            "cached",
            ["layers.1", "sa"],
        ),
        plan(
            "kept values of another application",
            |c| forget_loops(&mut c.plan, ProgramKey::BACKWARD, |name| name.starts_with("layer1.saved")),
            "gradients",
            ["layers.1", ""],
        ),
        plan(
            "all query heads with the first key head",
            |c| {
                let mut found = false;
                for program in [ProgramKey::BACKWARD, ProgramKey::EVALUATE] {
                    found |= kernels(c, program, |k| match k {
                        Kernel::Attention(kernel::Attention { shape, .. }) if shape.kv_heads == 2 => {
                            shape.kv_heads = 1;
                            true
                        }
                        _ => false,
                    });
                }
                found
            },
            "devices",
            ["layers.1", "sa"],
        ),
        plan(
            "gains of queries and keys exchanged",
            |c| {
                let (Some(q), Some(k)) = (tensor(c, "sa.q_norm.weight"), tensor(c, "sa.k_norm.weight"))
                else {
                    return false;
                };
                let weight = c.tensors[q].weight;
                c.tensors[q].weight = std::mem::replace(&mut c.tensors[k].weight, weight);
                true
            },
            "devices",
            ["layers.1", "sa"],
        ),
        plan(
            "no step back: the stream's gradient stays where it was",
            |c| {
                launches(&mut c.plan, ProgramKey::BACKWARD, &mut |launch, list| {
                    launch.origin.starts_with("d.next")
                        && kernel(launch, list, |k| match k {
                            Kernel::Copy(kernel::Copy { elements, .. }) => std::mem::replace(elements, 1) > 1,
                            _ => false,
                        })
                })
            },
            "gradients",
            ["", ""],
        ),
        plan(
            "another depth runs the program of this one",
            |c| {
                let Some(whole) = c.plan.programs.get(&ProgramKey::BACKWARD).cloned() else { return false };
                c.plan
                    .programs
                    .get_mut(&ProgramKey::first(Does::Backward { depth: Some(2), last: false }))
                    .map(|p| *p = whole)
                    .is_some()
            },
            "gradients",
            ["", ""],
        ),
        plan(
            "decay rates of the moments exchanged",
            |c| {
                kernels(c, ProgramKey::UPDATE, |k| {
                    constants(k, |x| match x {
                        0.9 => Some(0.999),
                        0.999 => Some(0.9),
                        _ => None,
                    })
                })
            },
            "devices",
            ["", ""],
        ),
        plan(
            "weight decay of another size",
            |c| kernels(c, ProgramKey::UPDATE, |k| constants(k, |x| (x == 0.1).then_some(0.3))),
            "devices",
            ["", ""],
        ),
        // Components that are written as formulas.
        lower("a decay that is applied after the update", WRITTEN, |_, f| {
            mixers(f).fold(false, |done, node| {
                let Op::Recurrence(recurrence) = &mut node.op else { return done };
                let mut step = recurrence.step.function().clone();
                let state = Value(0);
                let Some(decays) = step
                    .nodes
                    .iter()
                    .position(|n| matches!(n.op, Op::Binary(Binary::Mul)) && n.inputs.contains(&state))
                else {
                    return done;
                };
                let (decayed, factor) = {
                    let n = &step.nodes[decays];
                    (n.first, n.inputs[usize::from(n.inputs[0] == state)])
                };
                for n in &mut step.nodes {
                    if matches!(n.op, Op::Binary(Binary::Add)) {
                        n.inputs.iter_mut().filter(|v| **v == decayed).for_each(|v| *v = state);
                    }
                }
                let Some((_, new)) = step.results.last().cloned() else { return done };
                let (ty, first) = (step.ty(new).clone(), Value(step.types.len() as u32));
                step.types.push(ty);
                let inputs =
                    if step.nodes[decays].inputs[0] == state { vec![new, factor] } else { vec![factor, new] };
                let op = Op::Binary(Binary::Mul);
                step.nodes.push(dreamc_compiler::ir::Node { op, inputs, first, count: 1 });
                step.results.iter_mut().filter(|(_, v)| *v == new).for_each(|(_, v)| *v = first);
                recurrence.step = step.into();
                true
            })
        }),
        lower("a dimension that is summed twice", WRITTEN, |module, f| {
            let of = |op: &Op| matches!(op, Op::Reduce(r) if r.how == dreamc_compiler::ir::Reduce::Sum);
            let Some(&at) = nodes(f, of).first() else { return false };
            let sum = f.nodes[at].first;
            let twice = insert(module, f, at + 1, Op::Binary(Binary::Add), vec![sum, sum])[0];
            redirect(f, at + 2, sum, twice);
            true
        }),
        lower("a state that goes on into the next document", WRITTEN, |_, f| {
            mixers(f).fold(false, |done, node| match &mut node.op {
                Op::Running(running) if running.tokens == dreamc_compiler::op::Tokens::Segments => {
                    running.tokens = dreamc_compiler::op::Tokens::All;
                    node.inputs.truncate(1);
                    true
                }
                _ => done,
            })
        }),
        lower("choices from the smallest on", INNER, |module, f| {
            let Some(&at) = nodes(f, |op| matches!(op, Op::Route(_))).first() else { return false };
            let scores = f.nodes[at].inputs[0];
            let turned = insert(module, f, at, Op::Unary(Unary::Neg), vec![scores])[0];
            f.nodes[at + 1].inputs[0] = turned;
            true
        }),
        lower("a value of a skipped application beside the one before", INNER, |_, f| {
            let taken: Vec<Value> =
                f.nodes.iter().filter(|n| matches!(n.op, Op::CacheTake)).map(|n| n.first).collect();
            let kept = f.nodes.iter_mut().find(|n| {
                matches!(n.op, Op::Binary(Binary::Mul)) && n.inputs.iter().any(|v| taken.contains(v))
            });
            kept.is_some_and(|n| {
                n.op = Op::Binary(Binary::Sub);
                true
            })
        }),
        lower("a matrix over a state that is a mean", INNER, |_, f| {
            mixers(f).fold(false, |done, node| {
                let Op::Recurrence(recurrence) = &mut node.op else { return done };
                let mut step = recurrence.step.function().clone();
                let sum = step.nodes.iter_mut().find_map(|n| match &mut n.op {
                    Op::Reduce(r) => Some(&mut r.how),
                    _ => None,
                });
                let Some(how) = sum else { return done };
                *how = dreamc_compiler::ir::Reduce::Mean;
                recurrence.step = step.into();
                true
            })
        }),
        caches(
            "a cache without its last row",
            WRITTEN,
            // The row of the token itself stands for the last one.
            |_, f| {
                let Some(&at) = nodes(f, |op| matches!(op, Op::ShiftState)).first() else { return false };
                let (row, last) = (f.nodes[at].inputs[0], f.nodes[at].first);
                redirect(f, at + 1, last, row);
                true
            },
            ["", ""],
        ),
        caches(
            "a state that padding moves",
            WRITTEN,
            |_, f| {
                let find = |name: &str| f.params.iter().position(|p| p.name == name).map(|i| Value(i as u32));
                let (Some(slots), Some(positions)) = (find("slots"), find("positions")) else { return false };
                mixers(f).fold(false, |done, node| {
                    let reads = node.inputs.contains(&slots);
                    node.inputs.iter_mut().filter(|v| **v == slots).for_each(|v| *v = positions);
                    done || reads
                })
            },
            ["", ""],
        ),
        caches(
            "linear attention of texts that reads the state before its token",
            LINEAR,
            |_, f| {
                f.nodes.iter_mut().fold(false, |done, node| match &mut node.op {
                    Op::LinearAttention(attention) => {
                        attention.0.before = true;
                        true
                    }
                    _ => done,
                })
            },
            ["", ""],
        ),
        Fault {
            name: "a state that survives its text",
            spec: WRITTEN,
            stage: Stage::Plan(|c| {
                let all = c.sequence.len();
                c.sequence.retain(|state| state.per != dreamc_compiler::compiled::Per::Text);
                c.sequence.len() < all
            }),
            caught: "batch",
            place: ["", ""],
        },
        Fault {
            name: "a state of texts that no list has",
            spec: WRITTEN,
            stage: Stage::Plan(|c| {
                let text = |state: &dreamc_compiler::compiled::SequenceState| {
                    state.per == dreamc_compiler::compiled::Per::Text
                };
                let last = c.sequence.iter().rposition(text);
                last.is_some_and(|last| {
                    c.sequence.remove(last);
                    true
                })
            }),
            caught: "batch",
            place: ["", ""],
        },
        lower("the weights of two networks inside a definition mixed up", INSIDE, |_, f| {
            let find = |name: &str| f.params.iter().position(|p| p.name == name);
            let (one, two) = (find("own.first.down.weight"), find("own.second.down.weight"));
            let (Some(one), Some(two)) = (one, two) else { return false };
            let name = std::mem::take(&mut f.params[one].name);
            f.params[one].name = std::mem::replace(&mut f.params[two].name, name);
            true
        }),
        lower("an own block that is not always chosen", CHOOSING, |_, f| choices(f, |c| c.near = 0)),
        lower("first blocks in the place of chosen ones", CHOOSING, |_, f| choices(f, |c| c.first = 1)),
        lower("a choice of the smallest scores", CHOOSING, |module, f| {
            let Some(&at) = nodes(f, |op| matches!(op, Op::ChooseKeys(_))).first() else { return false };
            let q = f.nodes[at].inputs[0];
            let turned = insert(module, f, at, Op::Unary(Unary::Neg), vec![q])[0];
            f.nodes[at + 1].inputs[0] = turned;
            true
        }),
        lower("means of blocks one token longer", CHOOSING, |_, f| blocks(f, 3)),
        lower("keys of blocks that are not complete", CHOOSING, |_, f| {
            attention(f, |a| a.every = a.every.map(|every| every - 1))
        }),
        caches("a sum of a block that goes on in the next", CHOOSING, |_, f| blocks(f, 1 << 20), ["", ""]),
        Fault {
            name: "a gradient of keys that were not chosen",
            spec: CHOOSING,
            stage: Stage::Derive(|_, f| {
                f.nodes.iter_mut().fold(false, |done, n| match &mut n.op {
                    Op::AttentionGrad(AttentionGrad(a)) if a.among.is_some() => {
                        n.inputs.remove(AttentionGrad::MASK + a.chosen());
                        a.among = None;
                        true
                    }
                    _ => done,
                })
            }),
            caught: "gradients",
            place: ["", "own"],
        },
        lower("weights that are kept and not made greater", DROPPING, |module, f| {
            let Some(&at) = nodes(f, |op| matches!(op, Op::Attention(a) if a.dropout.is_some())).first()
            else {
                return false;
            };
            let Op::Attention(a) = &f.nodes[at].op else { return false };
            let (kept, o) = (1.0 - a.dropout.unwrap_or_default(), f.nodes[at].first);
            let less = insert(module, f, at + 1, Op::Constant(Constant(kept)), vec![])[0];
            let smaller = insert(module, f, at + 2, Op::Binary(Binary::Mul), vec![o, less])[0];
            redirect(f, at + 3, o, smaller);
            true
        }),
        Fault {
            name: "weights of the first application dropped at every one",
            spec: DROPPING,
            stage: Stage::Plan(|c| first_instance(&mut c.plan, ProgramKey::BACKWARD, |name| name == "draws")),
            caught: "devices",
            place: ["", ""],
        },
        Fault {
            name: "a gradient that drops fewer weights",
            spec: DROPPING,
            stage: Stage::Derive(|_, f| {
                f.nodes.iter_mut().fold(false, |done, n| match &mut n.op {
                    Op::AttentionGrad(AttentionGrad(a)) if a.dropout.is_some() => {
                        a.dropout = Some(0.1);
                        true
                    }
                    _ => done,
                })
            }),
            caught: "gradients",
            place: ["", "own"],
        },
        lower("states of texts that follow tokens which left", LEAVING, |_, f| {
            let passes = f.params.iter().position(|p| p.name.starts_with("own.pass"));
            let Some(state) = passes.map(|i| Value(i as u32)) else { return false };
            let taken = nodes(f, |op| matches!(op, Op::CacheTake))
                .into_iter()
                .find(|&at| f.nodes[at].inputs[0] == state);
            let Some(before) = taken.map(|at| f.nodes[at].first) else { return false };
            // The value that the token has now, in the place of what its last pass made.
            let kept = nodes(f, |op| matches!(op, Op::Keep));
            let Some(&of_left) = kept.iter().find(|&&at| f.nodes[at].inputs[0] == before) else {
                return false;
            };
            let Some(&of_running) = kept.iter().rev().find(|&&at| at < of_left) else { return false };
            f.nodes[of_left].inputs[0] = f.nodes[of_running].inputs[0];
            true
        }),
        scored("a score whose derivative forgets c[j]", |m, f| forgotten(m, f, Place::Key)),
        scored("a score whose derivative forgets its table", |m, f| forgotten(m, f, Place::Table)),
        Fault {
            name: "another optimizer",
            spec: RECURRENT,
            stage: Stage::Read(|spec| spec.train.optimizer = OptimizerKind::Lion),
            caught: "devices",
            place: ["", ""],
        },
        // Rules that carry a rate from size to size.
        wider("one rate at all widths", |spec| spec.train.transfer = None),
        wider("matrices at the rate of the base", |spec| scaled(spec, "layers.*", 1)),
        wider("embeddings slower where wider", |spec| scaled(spec, "embed.weight", -1)),
        wider("the head at the rate of the base", |spec| scaled(spec, "head.weight", 1)),
        wider("gains slower where wider", |spec| scaled(spec, "*norm.weight", -1)),
        wider("the rate of another fan in for one matrix", |spec| scaled(spec, "*.out.weight", 1)),
        Fault {
            name: "logits of an embedding that grows",
            spec: TIED,
            stage: Stage::Read(|spec| spec.model.logit_scale = None),
            caught: "coordinates",
            place: ["", ""],
        },
        narrow("a head as large at first as that of the base", |c| narrower(c, TensorKind::Head)),
        // Layers that a limit of memory has computed again.
        again("a layer computed again from the stream of another", |c| {
            again_as_first(c, &|name| name.ends_with("stream"))
        }),
        again("a layer computed again with the weights of another", |c| {
            let weights: Vec<String> = c
                .tensors
                .iter()
                .map(|t| t.weight)
                .map(|id| c.plan.buffers[id.0 as usize].name.clone())
                .collect();
            again_as_first(c, &|name| weights.iter().any(|w| w == name))
        }),
        again("layers not computed again", |c| computed_again(c, &|_, _| None)),
        again("keys over the depth computed again for another application", |c| {
            computed_again(c, &|plan, launch| {
                let write = matches!(plan.kernels[launch.kernel.0 as usize], Kernel::CacheWrite(_));
                match launch.operands.get_mut(1) {
                    Some(Operand::Index(row)) if write => *row = Affine::constant(row.base),
                    _ => return Some(false),
                }
                Some(true)
            })
        }),
        again("choices counted once more where they are computed again", |c| {
            let counts = c.tensors.iter().find_map(|t| t.counts);
            computed_again(c, &|plan, launch| {
                let mut done = false;
                for operand in &mut launch.operands {
                    if let (Operand::Tensor { buffer, .. }, Some(counts)) = (operand, counts)
                        && plan.buffers[buffer.0 as usize].name.contains("again.")
                        && plan.buffers[buffer.0 as usize].elements()
                            == plan.buffers[counts.0 as usize].elements()
                    {
                        (*buffer, done) = (counts, true);
                    }
                }
                Some(done)
            })
        }),
        narrow("first embeddings smaller where wider", |c| narrower(c, TensorKind::Embedding)),
        Fault {
            name: "orthogonal steps of another mean of gradients",
            spec: ORTHOGONAL,
            ..plan(
                "",
                |c| kernels(c, ProgramKey::UPDATE, |k| constants(k, |x| (x == 0.95).then_some(1.0))),
                "devices",
                ["", ""],
            )
        },
        Fault {
            name: "a mean in bf16 that keeps less of itself",
            spec: HALVES,
            ..plan(
                "",
                |c| kernels(c, ProgramKey::UPDATE, |k| constants(k, |x| (x == 0.95).then_some(0.9))),
                "devices",
                ["", ""],
            )
        },
        Fault {
            name: "the last expert's matrix not moved",
            spec: ORTHOGONAL,
            ..plan(
                "",
                |c| {
                    let update = c.plan.programs.get_mut(&ProgramKey::UPDATE);
                    let loops = update.into_iter().flat_map(|p| &mut p.steps).filter_map(|step| match step {
                        Step::Loop { count, .. } if *count > 2 => Some(count),
                        Step::Loop { .. } | Step::Launch(_) => None,
                    });
                    loops.map(|count| *count -= 1).count() > 0
                },
                "devices",
                ["", ""],
            )
        },
        Fault {
            name: "steps of Newton and Schulz with another coefficient",
            spec: ORTHOGONAL,
            ..plan(
                "",
                |c| kernels(c, ProgramKey::UPDATE, |k| constants(k, |x| (x == 3.4445).then_some(3.0))),
                "devices",
                ["", ""],
            )
        },
        plan(
            "norm of half of the gradients",
            |c| {
                kernels(c, ProgramKey::NORM, |k| match k {
                    Kernel::Norm(kernel::Norm { elements }) => {
                        *elements /= 2;
                        true
                    }
                    _ => false,
                })
            },
            "devices",
            ["", ""],
        ),
        plan(
            "balancing away from the balance",
            |c| {
                kernels(c, ProgramKey::UPDATE, |k| match k {
                    Kernel::Balance(kernel::Balance { rate, .. }) => {
                        rate.0 = -rate.0;
                        true
                    }
                    _ => false,
                })
            },
            "devices",
            ["layers.1", ""],
        ),
        plan(
            "moments of a tensor not kept",
            |c| {
                let kept =
                    c.tensors.iter_mut().find(|t| t.kind == TensorKind::Matrix && !t.states.is_empty());
                kept.map(|t| t.states.clear()).is_some()
            },
            "resume",
            ["", ""],
        ),
        // Counts.
        counted("a parameter too many", |c| c.parameters.total += 1, ["", ""]),
        counted("FLOPs off by one multiply-add", |c| c.flops_per_token.decode.total += 2, ["", ""]),
        counted(
            "a component's parameters off by one",
            |c| c.parameters.by_component.get_mut("ea").into_iter().for_each(|n| *n -= 1),
            ["", "ea"],
        ),
    ]
}

/// The sum with the shared expert: it stays without it.
fn shared_sum(f: &Function, i: usize) -> Option<usize> {
    let n = &f.nodes[i];
    if !matches!(n.op, Op::Binary(Binary::Add)) {
        return None;
    }
    let scaled = defines(f, n.inputs[1]).map(|d| &f.nodes[d])?;
    let stopped = |v: &Value| defines(f, *v).is_some_and(|d| matches!(f.nodes[d].op, Op::StopGradient));
    (matches!(scaled.op, Op::Binary(Binary::Mul)) && scaled.inputs.iter().any(stopped)).then_some(0)
}

/// Two temporaries that one launch reads share one place.
fn reused(c: &mut Compiled) -> bool {
    let mut pair = None;
    let buffers = c.plan.buffers.clone();
    for program in [ProgramKey::EVALUATE, ProgramKey::BACKWARD] {
        launches(&mut c.plan, program, &mut |launch, list| {
            let inputs = match &list[launch.kernel.0 as usize] {
                Kernel::Rows(_) | Kernel::Attention(_) | Kernel::Product(_) => 2,
                _ => 0,
            };
            let temporaries: Vec<BufferId> = launch
                .operands
                .iter()
                .take(inputs)
                .filter_map(|o| match o {
                    Operand::Tensor { buffer, .. }
                        if buffers[buffer.0 as usize].space == Space::Temporary =>
                    {
                        Some(*buffer)
                    }
                    _ => None,
                })
                .collect();
            if let ([a, b], None) = (temporaries.as_slice(), pair)
                && buffers[a.0 as usize].offset != buffers[b.0 as usize].offset
            {
                pair = Some((*a, *b));
            }
            false
        });
    }
    pair.is_some_and(|(a, b)| {
        c.plan.buffers[b.0 as usize].offset = c.plan.buffers[a.0 as usize].offset;
        true
    })
}

// The test ----------------------------------------------------------------------------------------

fn prove(pipeline: &dyn Pipeline, spec: &Spec, only: &[&str]) -> Result<Report, String> {
    let only: Vec<String> = only.iter().map(|s| s.to_string()).collect();
    let task = Task {
        spec,
        weights: None,
        seed: 5,
        only: &only,
        devices: &[],
        pipeline,
        ranks: if only.iter().any(|o| o == "ranks") { 4 } else { 1 },
    };
    verify(&task, &mut |_| {}).map_err(|e| e.to_string())
}

/// The first golden file that the interpreter does not agree with, and in what.
fn golden(pipeline: &dyn Pipeline) -> Option<String> {
    for golden in every_golden() {
        let ids = &golden.tensors["ids"];
        let (b, n) = (ids.dims[0], ids.dims[1] - 1);
        let z_loss = golden.spec.train.z_loss;
        let shape = Shape { batch: b as u64, sequence: n as u64, z_loss, ..Shape::default() };
        let (inputs, targets) = golden.batch(ids.ints(), n);
        let batch = Batch { ids: inputs, targets, ..Batch::default() };
        let found = pipeline
            .oracle(&golden.spec.model, shape, None, &Rewriting::off(), Form::Training)
            .map_err(|e| e.to_string())
            .and_then(|o| o.evaluate(&golden.with_prefix("weights."), &batch).map_err(|e| e.to_string()));
        let found = match found {
            Ok(found) => found,
            Err(error) => return Some(format!("{}: {error}", golden.name)),
        };
        let e = error(found.logits.floats(), golden.tensors["logits"].floats());
        if e > 1e-9 {
            return Some(format!("{}: logits differ by {e:.1e}", golden.name));
        }
        let e = error(&[found.loss], golden.tensors["loss"].floats());
        if e > 1e-9 {
            return Some(format!("{}: loss differs by {e:.1e}", golden.name));
        }
        for (name, expected) in golden.with_prefix("gradients.") {
            let scale = expected.floats().iter().fold(0.0f64, |m, x| m.max(x.abs()));
            let e =
                found.gradients.get(&name).map_or(f64::INFINITY, |g| error(g.floats(), expected.floats()));
            if scale > 1e-9 && e > 1e-9 {
                return Some(format!("{}: gradient of {name} differs by {e:.1e}", golden.name));
            }
        }
    }
    None
}

/// A test of its own for each fault, `cargo test --test faults cache`; with `--nocapture` each says
/// how it was noticed.
fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let shown = arguments.nocapture;
    let sound = |name: &str, spec: &'static str| {
        Trial::test(format!("without a fault: {name}"), move || {
            let report = prove(&Faulty::new(None), &specification(spec), &[])?;
            if report.holds() { Ok(()) } else { Err(report.to_string().into()) }
        })
    };
    let files = || golden(&Faulty::new(None)).map_or(Ok(()), |difference| Err(difference.into()));
    let mut trials = vec![
        sound("recurrent", RECURRENT),
        sound("skipping", SKIPPING),
        sound("keys", KEYS),
        sound("wide", WIDE),
        sound("tied", TIED),
        sound("deep", DEEP),
        sound("handed", HANDED),
        sound("again", AGAIN),
        sound("depths", DEPTHS),
        sound("named", NAMED),
        sound("lanes", LANES),
        sound("manifold", MANIFOLD),
        sound("attended", ATTENDED),
        sound("passes", PASSES),
        sound("recursions", RECURSIONS),
        sound("networks", NETWORKS),
        sound("chooser", CHOOSER),
        sound("replaced", REPLACED),
        sound("whole", WHOLE),
        sound("expected", EXPECTED),
        sound("adapters", ADAPTERS),
        sound("magnitudes", MAGNITUDES),
        sound("choice", CHOICE),
        sound("written", WRITTEN),
        sound("scored", SCORED),
        sound("inside", INSIDE),
        sound("dropping", DROPPING),
        sound("leaving", LEAVING),
        sound("followed", followed::FOLLOWED),
        sound("e4m3", fp8::LAYERS),
        Trial::test("without a fault: ranks", || {
            for spec in [RECURRENT, SKIPPING, KEYS, ORTHOGONAL, experts::MIXTURES] {
                let report = prove(&Faulty::new(None), &specification(spec), &["ranks"])?;
                if !report.holds() {
                    return Err(report.to_string().into());
                }
            }
            Ok(())
        }),
        Trial::test("without a fault: a teacher", teacher::sound),
        Trial::test("the divergence of a teacher is that of PyTorch", teacher::agrees_with_pytorch),
        Trial::test("without a fault: golden files", files),
    ];
    let added = spread::faults().into_iter().chain(fp8::faults()).chain(experts::faults());
    let added = added.chain(followed::faults());
    let faults: Vec<Fault> = faults().into_iter().chain(added).collect();
    let number = faults.len();
    let moved = transplant::faults();
    let taught = teacher::faults();
    let preferred = preferences::faults();
    let carried = transfer::faults();
    let packed = blocks::faults();
    let texts = kernel_texts::faults();
    let number =
        number + moved.len() + taught.len() + preferred.len() + carried.len() + packed.len() + texts.len();
    trials.extend(kernel_texts::all().into_iter().map(|(form, format)| {
        Trial::test(kernel_texts::name(form, format), move || kernel_texts::sound(form, format))
    }));
    trials.extend(
        texts
            .into_iter()
            .map(|fault| trial("kernels", fault.name, shown, move || kernel_texts::noticed(&fault))),
    );
    trials.push(Trial::test("without a fault: preferences", preferences::sound));
    trials.push(Trial::test("without a fault: rates that carry", transfer::sound));
    trials.extend(
        carried
            .into_iter()
            .map(|fault| trial("transfer", fault.name, shown, move || transfer::noticed(&fault))),
    );
    trials.extend(
        preferred
            .into_iter()
            .map(|fault| trial("preferences", fault.name, shown, move || preferences::noticed(&fault))),
    );
    trials.extend(
        packed.into_iter().map(|fault| trial("blocks", fault.name, shown, move || blocks::noticed(&fault))),
    );
    trials.push(Trial::test("the page of faults has their number", move || page(number)));
    trials.extend(
        moved
            .into_iter()
            .map(|fault| trial("transplant", fault.name, shown, move || transplant::noticed(&fault))),
    );
    trials.extend(
        taught.into_iter().map(|fault| trial("teacher", fault.name, shown, move || teacher::noticed(&fault))),
    );
    trials.extend(faults.into_iter().map(|fault| {
        let caught = fault.caught;
        trial("", fault.name, shown, move || noticed(&fault)).with_kind(caught)
    }));
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// A test that something notices a fault of a kind; with `shown` it says how.
fn trial(
    kind: &str,
    name: &'static str,
    shown: bool,
    noticed: impl FnOnce() -> Result<String, Failed> + Send + 'static,
) -> Trial {
    let full = if kind.is_empty() { name.into() } else { format!("{kind}: {name}") };
    Trial::test(full, move || {
        let how = noticed()?;
        if shown {
            println!("{name:<58} {how}");
        }
        Ok(())
    })
}

/// Whether `docs/dev/verify.md` has the number of faults; with `BLESS=1` it is written there.
fn page(number: usize) -> Result<(), Failed> {
    const BEFORE: &str = "| seeded faults | ";
    const BEHIND: &str = " noticed by a proof";
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/dev/verify.md");
    let old = fs::read_to_string(path)?;
    let found = old.split_once(BEFORE).and_then(|(a, rest)| Some((a, rest.split_once(BEHIND)?.1)));
    let (before, behind) = found.ok_or("docs/dev/verify.md has no row of seeded faults")?;
    let new = format!("{before}{BEFORE}{number} of {number}{BEHIND}{behind}");
    if std::env::var_os("BLESS").is_some_and(|v| v == "1") {
        fs::write(path, &new)?;
    } else if old != new {
        return Err(format!(
            "docs/dev/verify.md has another number of faults than {number}; BLESS=1 writes it"
        )
        .into());
    }
    Ok(())
}

/// How the proof that must fail says so; an error where it does not, or names another place.
fn noticed(fault: &Fault) -> Result<String, Failed> {
    let faulty = Faulty::new(Some(&fault.stage));
    let mut wrong = vec![];
    let how = match prove(&faulty, &specification(fault.spec), &[fault.caught]) {
        Err(error) => error,
        Ok(report) => match &report.proofs[0].verdict {
            Verdict::Failed { why, place } => {
                let found = [&place.layer, &place.component].map(|p| p.clone().unwrap_or_default());
                for (found, expected) in found.iter().zip(fault.place) {
                    if !expected.is_empty() && found != expected {
                        wrong.push(format!("names {found:?}, not {expected:?}"));
                    }
                }
                format!("{} {}: {why}", found[0], found[1])
            }
            _ => {
                wrong.push(format!("{} does not notice", fault.caught));
                String::new()
            }
        },
    };
    if fault.caught == "formulas"
        && ![
            KEYS,
            HANDED,
            AGAIN,
            ATTENDED,
            WRITTEN,
            INNER,
            INSIDE,
            DROPPING,
            LEAVING,
            CHOOSING,
            followed::DOCUMENTS,
        ]
        .contains(&fault.spec)
        && golden(&faulty).is_none()
    {
        wrong.push("the golden files do not notice".into());
    }
    if faulty.times.load(Relaxed) == 0 {
        wrong.push("was never put in".into());
    }
    if wrong.is_empty() { Ok(how) } else { Err(wrong.join(", ").into()) }
}

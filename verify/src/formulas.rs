//! The model is the one of the formulas: a second implementation of all of them, against the
//! interpreter's model.
//!
//! *In*: a specification and tensors by name. *Out*: logits, streams and losses in f64. *Promise*:
//! nothing of the compiler is used; the formulas are those of the published sources and of the
//! language's documentation, in the plainest form: a loop over applications, every expert one by
//! one, every pair of tokens. Nothing is gathered: masks say which tokens there are, take part, and
//! are keys.
//!
//! A derivative is of what does not stop gradients: choices, and values that are stopped, are
//! recorded on the way and held ([`Formulas::held`]), so that differences give the gradient that
//! the formulas ask for.

mod definition;

use super::gradients::slope_error;
use super::subject::Subject;
use super::{Checks, Place, Proof, VerifyError, blame, difference, error, length};
use dreamc_compiler::ir::interpret::Tensor;
use dreamc_compiler::lower::Form;
use dreamc_compiler::rewrite::Rewriting;
use dreamc_data::Batch;
use dreamc_data::rng::Philox;
use dreamc_dsl::define::graph::beside;
use dreamc_dsl::spec::*;
use indexmap::IndexMap;
use std::cell::RefCell;
use std::f64::consts::PI;

/// How far two sums of the same numbers in f64 may be apart.
const EXACT: f64 = 1e-9;

/// The compiled model is the one of the formulas.
pub struct Meaning;

impl Proof for Meaning {
    fn name(&self) -> &'static str {
        "formulas"
    }

    fn claim(&self) -> &'static str {
        "the model is the one of the formulas"
    }

    fn how(&self) -> &'static str {
        "logits of training and evaluation, losses of routers among them, and derivatives along a direction of every tensor, by a \
         second implementation that shares nothing with the compiler, in f64"
    }

    fn prove(&self, s: &Subject, checks: &mut Checks) -> Result<Option<String>, VerifyError> {
        if undecided(&s.spec.model.body) {
            return Ok(Some(
                "a top-k `skip` inside a threshold, whose tokens training chooses among all".into(),
            ));
        }
        s.conditioned()?;
        if let Some(share) = share_to_leave(s) {
            let expected = Formulas { exit: Some(share), ..Formulas::new(s, &s.weights, false, None) }.run();
            let found = s.forward(&s.leaving(share)?, &s.batch)?;
            let e = error(found.logits.floats(), &expected.logits);
            checks.check("logits where tokens leave their loop", e, EXACT, Place::default());
        }
        for (form, what) in [(Form::Inference, "evaluation"), (Form::Training, "training")] {
            let oracle = s.oracle(None, &Rewriting::off(), form)?;
            let expected = Formulas::new(s, &s.weights, form == Form::Training, None).run();
            let found = s.forward(&oracle, &s.batch)?;
            let e = error(found.logits.floats(), &expected.logits);
            let mut place = Place::default();
            if e > EXACT {
                let streams: Vec<Vec<f64>> = found.streams.iter().map(|x| x.floats().to_vec()).collect();
                place = blame::first_stream(s, &streams, &expected.streams, EXACT);
            }
            checks.check(format!("logits of {what}"), e, EXACT, place);
            if form == Form::Inference {
                continue;
            }
            let e = (found.loss - expected.loss).abs() / expected.loss.abs().max(1e-3);
            checks.check("loss with those of routers", e, EXACT, Place::default());
            let evaluation = s.evaluation(&oracle, &s.batch)?;
            for (name, expected) in &expected.counts {
                let counted = evaluation.counts.get(name).map_or(&[][..], Vec::as_slice);
                checks.check(
                    format!("choices for {name}"),
                    difference(counted, expected),
                    0.0,
                    Place::of_tensor(name),
                );
            }
            let gradients = evaluation.gradients;
            let mut weights = s.weights.clone();
            for (name, gradient) in &gradients {
                let mut random = Philox::new(s.seed, name).stream(3);
                let direction: Vec<f64> =
                    gradient.floats().iter().map(|_| random.unit() * 2.0 - 1.0).collect();
                let slope = gradient.floats().iter().zip(&direction).map(|(a, b)| a * b).sum();
                let before = weights[name].clone();
                let mut along = |h: f64| {
                    let moved = before.floats().iter().zip(&direction).map(|(x, d)| x + h * d).collect();
                    weights[name] = Tensor::float(&before.dims, moved);
                    Ok(Formulas::new(s, &weights, true, Some(&expected.held)).run().loss)
                };
                let (e, tolerance) = slope_error(&mut along, slope, expected.loss)?;
                weights[name] = before;
                checks.check(format!("derivative by {name}"), e, tolerance, Place::of_tensor(name));
            }
        }
        Ok(None)
    }
}

/// Whether a top-k router chooses among tokens where a part around it lets an unknown number
/// through.
fn undecided(items: &[Item]) -> bool {
    fn expr(e: &Expr, masked: bool) -> bool {
        match e {
            Expr::Component(_) | Expr::Norm => false,
            Expr::Sequential(terms) | Expr::Parallel(terms) => terms.iter().any(|t| expr(t, masked)),
            Expr::Skip(skip, inner) => match &skip.rule {
                SkipRule::Threshold { .. } | SkipRule::DepthChoice { .. } => expr(inner, true),
                SkipRule::TopK { causal, .. } => masked || expr(inner, causal.is_some() && ahead(inner)),
            },
        }
    }
    /// Whether a router inside names no rule for evaluation.
    fn ahead(e: &Expr) -> bool {
        match e {
            Expr::Component(_) | Expr::Norm => false,
            Expr::Sequential(terms) | Expr::Parallel(terms) => terms.iter().any(ahead),
            Expr::Skip(skip, inner) => {
                matches!(skip.rule, SkipRule::TopK { causal: None, .. }) || ahead(inner)
            }
        }
    }
    items.iter().any(|item| match item {
        Item::Layer(e) => expr(e, false),
        Item::Statement(_) => false,
        Item::Repeat { items, .. } | Item::Recur { items, .. } => undecided(items),
    })
}

/// A share of tokens by which some leave their loop and none by a hair: the middle of the widest
/// gap among the shares that have left, those at the ends left out. `None` where there is no gate,
/// or where tokens cannot leave by it.
pub(super) fn share_to_leave(s: &Subject) -> Option<f64> {
    let exits = |item: &Item| matches!(item, Item::Recur { looping, .. } if looping.exit.gate().is_some());
    let sources = matches!(s.spec.model.stream, Stream::Attend { .. });
    let skips = super::decoding::any_skip(s, &|_, _| true);
    if sources || skips || !s.spec.model.body.iter().any(exits) {
        return None;
    }
    let mut shares = Formulas::new(s, &s.weights, false, None).run().shares;
    shares.sort_by(f64::total_cmp);
    let quarter = shares.len() / 4;
    let gaps = shares[quarter..shares.len() - quarter].windows(2);
    let widest = gaps.max_by(|a, b| (a[1] - a[0]).total_cmp(&(b[1] - b[0])))?;
    Some((widest[0] + widest[1]) / 2.0)
}

/// Results of a forward pass.
struct Found {
    /// `[rows, tokens, vocab]`
    logits: Vec<f64>,
    /// The stream before each application, and after the last.
    streams: Vec<Vec<f64>>,
    /// Mean over targets, and losses of routers.
    loss: f64,
    held: Vec<Vec<f64>>,
    counts: IndexMap<String, Vec<f64>>,
    /// The share of every token that has left after each pass but the last.
    shares: Vec<f64>,
}

/// The work of an application.
#[derive(Clone, Copy)]
enum Step<'a> {
    Layer(&'a Expr),
    Statement(&'a Statement),
    /// The vector that a pass adds to the stream, of the loop of that number.
    Embed(usize),
    /// Before a loop whose passes share out the loss: nothing happens.
    Enter,
    /// The end of a pass that is not the last; the loss sees its stream.
    Exit,
    /// Before the loop of that number, whose tokens choose how many passes of it they make.
    Choose(usize, &'a Scorer),
    /// After it.
    Chosen,
}

/// The choices of tokens where a loop begins.
#[derive(Default)]
struct Chosen {
    /// The last pass of each.
    last: Vec<usize>,
    /// The share of that choice.
    share: Vec<f64>,
    /// The stream there.
    start: Vec<f64>,
}

impl Chosen {
    /// The stream after the loop, from what its passes made.
    fn weighed(&self, made: &[f64]) -> Vec<f64> {
        let mut x = times(made, &self.share);
        add(&mut x, &self.start);
        x
    }
}

/// One application of a layer or a statement.
#[derive(Clone, Copy)]
struct Application<'a> {
    step: Step<'a>,
    /// Number of the set of weights among those of layers, or of statements.
    set: usize,
    /// Whether no gradient flows through it.
    detached: bool,
    /// Which pass of the outermost loop it is in.
    pass: usize,
    /// Where passes share keys: the number of the loop, and of the application in its pass.
    shared: Option<([usize; 2], PassKeys)>,
    /// How often the set is applied in all, where a `recur` is around it, and whether that
    /// normalises the stream.
    recurrent: Option<(u64, bool)>,
}

/// An application before a loop, of nothing.
const NOWHERE: Application =
    Application { step: Step::Enter, set: 0, detached: false, pass: 0, shared: None, recurrent: None };

/// Applications in order; sets of layers, of statements, and loops are numbered as they are first
/// used.
fn expand<'a>(
    items: &'a [Item],
    recurrent: Option<bool>,
    sets: &mut [usize; 3],
    out: &mut Vec<Application<'a>>,
) {
    for item in items {
        match item {
            Item::Layer(expr) => {
                let recurrent = recurrent.map(|norm| (1, norm));
                let (step, set) = (Step::Layer(expr), sets[0]);
                out.push(Application { step, set, recurrent, ..NOWHERE });
                sets[0] += 1;
            }
            Item::Statement(s) => {
                let step = Step::Statement(s);
                out.push(Application { step, set: sets[1], ..NOWHERE });
                sets[1] += 1;
            }
            Item::Repeat { count, items } => (0..*count).for_each(|_| expand(items, recurrent, sets, out)),
            Item::Recur { count, residual_norm, items, looping } => {
                let (mut once, number, outermost) = (vec![], sets[2], recurrent.is_none());
                sets[2] += 1;
                if looping.embed {
                    let step = Step::Embed(number);
                    once.push(Application { step, ..NOWHERE });
                }
                expand(items, Some(*residual_norm), sets, &mut once);
                let kept = looping.backprop.unwrap_or(*count);
                if !looping.kv.is_own() {
                    once.iter_mut().enumerate().for_each(|(i, a)| a.shared = Some(([number, i], looping.kv)));
                }
                if looping.exit.gate().is_some() {
                    out.push(NOWHERE);
                }
                if let Some((skip, _)) = depth_choice(items) {
                    out.push(Application { step: Step::Choose(number, &skip.scorer), ..NOWHERE });
                }
                for pass in 0..*count {
                    let detached = pass + kept < *count;
                    let at = |a: &Application| if outermost { pass as usize } else { a.pass };
                    out.extend(once.iter().map(|a| Application { detached, pass: at(a), ..*a }));
                    if !looping.exit.is_last() && pass + 1 < *count {
                        out.push(Application { step: Step::Exit, ..NOWHERE });
                    }
                }
                if depth_choice(items).is_some() {
                    out.push(Application { step: Step::Chosen, ..NOWHERE });
                }
            }
        }
    }
}

/// Whether the last thing that is done to the stream is a norm. `save` does nothing to it.
fn normalised(items: &[Item], inside: bool) -> bool {
    match items.iter().rev().find(|item| !matches!(item, Item::Statement(Statement::Save(_)))) {
        Some(Item::Layer(_)) => inside,
        Some(Item::Statement(s)) => matches!(s, Statement::Norm(_)),
        Some(Item::Repeat { items, .. }) => normalised(items, inside),
        Some(Item::Recur { residual_norm, items, .. }) => normalised(items, *residual_norm),
        None => false,
    }
}

/// After how many layers the streams are that `mix history` reads, without the one that is there.
fn past(steps: Steps, depth: usize) -> Vec<usize> {
    let read = |j: &usize| match steps {
        Steps::Every(step) => (*j as u64).is_multiple_of(step),
        Steps::Apart(step) => ((depth - j) as u64).is_multiple_of(step),
    };
    // Before any layer the embedding is the past and the present.
    if depth == 0 { vec![0] } else { (0..depth).filter(read).collect() }
}

/// The rows that a router reads: `x / T`.
fn cooled(scorer: &Scorer, x: &[f64]) -> Vec<f64> {
    x.iter().map(|x| x / scorer.temperature).collect()
}

/// `V gelu(U x)` of rows of `h` numbers, `V` with `out` rows.
fn network(x: &[f64], up: &[f64], down: &[f64], h: usize, out: usize) -> Vec<f64> {
    let inner: Vec<f64> = product(x, up, h).into_iter().map(gelu_by_error_function).collect();
    product(&inner, down, down.len() / out.max(1))
}

/// How many `recur`s there are, those of every copy.
pub(super) fn loops(items: &[Item]) -> usize {
    let each = items.iter().map(|item| match item {
        Item::Layer(_) | Item::Statement(_) => 0,
        Item::Repeat { count, items } => *count as usize * loops(items),
        Item::Recur { items, .. } => 1 + loops(items),
    });
    each.sum()
}

/// The components of a composition.
fn names(expr: &Expr) -> Vec<&str> {
    match expr {
        Expr::Component(name) => vec![name],
        Expr::Norm => vec![],
        Expr::Sequential(terms) | Expr::Parallel(terms) => terms.iter().flat_map(names).collect(),
        Expr::Skip(_, inner) => names(inner),
    }
}

/// Which tokens there are inside a part: those that have rows, those that take part, those that are
/// keys and values.
#[derive(Clone)]
struct Inside {
    here: Vec<bool>,
    part: Vec<bool>,
    keys: Vec<bool>,
}

/// The stream between layers.
enum Wired {
    Sum(Vec<f64>),
    /// Everything that can be read: the embedding, and every output since.
    Sources {
        embedding: Vec<f64>,
        outputs: Vec<Vec<f64>>,
    },
    Lanes(Vec<Vec<f64>>),
}

/// Numbers between a unit and the lanes, of a token.
struct Around {
    alpha: Vec<f64>,
    beta: Vec<f64>,
    /// `[to][from]`
    mix: Vec<Vec<f64>>,
}

/// Keys and values of an application of depth attention, and which tokens have them.
type Depth = (Vec<f64>, Vec<f64>, Vec<bool>);

struct Formulas<'a> {
    model: &'a Model,
    /// Numbers that streams start with.
    noise: Vec<f64>,
    /// Numbers of tokens by which attentions drop weights, and how many attentions of this
    /// application have.
    draws: Vec<i32>,
    dropping: u64,
    weights: &'a IndexMap<String, Tensor>,
    batch: &'a Batch,
    training: bool,
    z_loss: f64,
    /// Of another way, in the order in which they were recorded.
    before: Option<&'a [Vec<f64>]>,
    held: RefCell<Vec<Vec<f64>>>,
    /// Number of applications; of this one.
    depths: usize,
    depth: usize,
    /// Names of tensors of this application begin so.
    prefix: String,
    recurrent: Option<u64>,
    pass: usize,
    shared: Option<([usize; 2], PassKeys)>,
    /// Which application of its set it is.
    turn: usize,
    skips: usize,
    /// Keys and values of first passes, by loop, application in the pass, and component.
    first_keys: IndexMap<([usize; 2], String), Depth>,
    caches: IndexMap<String, Vec<Depth>>,
    /// Keys before any norm and values that stand in the depth stream.
    depth_stream: Vec<Depth>,
    /// Streams by name, as they were saved last.
    saved: IndexMap<String, Vec<f64>>,
    /// Values of the first application of each component.
    firsts: IndexMap<String, Vec<f64>>,
    auxiliary: f64,
    /// How often tokens that take part chose each expert, by the name of the router's bias.
    counts: IndexMap<String, Vec<f64>>,
    /// Means of masks, by capacity and penalty.
    pools: Vec<([f64; 2], Vec<f64>)>,
    /// A token leaves its loop where more than this share of it has left.
    exit: Option<f64>,
    /// Which tokens have left.
    gone: Vec<bool>,
    /// Keys and values that attentions made in the pass before, and in this one.
    passes: [Vec<(Vec<f64>, Vec<f64>)>; 2],
    /// The same of values of definitions that later tokens read.
    seen: [Vec<definition::Value>; 2],
    shares: Vec<f64>,
    /// Which tokens a `skip` processed last.
    members: IndexMap<String, Vec<bool>>,
    chosen: Chosen,
    /// Named values of definitions, of the last application of a component.
    named: IndexMap<(String, String), definition::Value>,
    /// Keys and values of applications, by component and place in its graph.
    applied: IndexMap<(String, u32), Vec<definition::Applied>>,
}

impl<'a> Formulas<'a> {
    fn new(
        subject: &'a Subject,
        weights: &'a IndexMap<String, Tensor>,
        training: bool,
        before: Option<&'a [Vec<f64>]>,
    ) -> Self {
        Formulas {
            model: &subject.spec.model,
            noise: super::subject::noise(&subject.spec, &subject.batch),
            draws: super::subject::draws(&subject.spec, &subject.batch),
            dropping: 0,
            weights,
            batch: &subject.batch,
            training,
            z_loss: subject.spec.train.z_loss,
            before,
            held: RefCell::default(),
            depths: 0,
            depth: 0,
            prefix: String::new(),
            recurrent: None,
            pass: 0,
            shared: None,
            turn: 0,
            skips: 0,
            first_keys: IndexMap::new(),
            caches: IndexMap::new(),
            depth_stream: vec![],
            saved: IndexMap::new(),
            firsts: IndexMap::new(),
            auxiliary: 0.0,
            counts: IndexMap::new(),
            pools: vec![],
            exit: None,
            gone: vec![false; subject.batch.ids.len()],
            passes: [vec![], vec![]],
            seen: [vec![], vec![]],
            shares: vec![],
            members: IndexMap::new(),
            chosen: Chosen::default(),
            named: IndexMap::new(),
            applied: IndexMap::new(),
        }
    }

    fn run(mut self) -> Found {
        let model = self.model;
        let h = model.hidden as usize;
        let scale = match model.embed_scale {
            None => 1.0,
            Some(EmbedScale::SqrtHidden) => (h as f64).sqrt(),
            Some(EmbedScale::Value(c)) => c,
        };
        let embed = self.w("embed.weight");
        let mut x: Vec<f64> =
            self.batch.ids.iter().flat_map(|&id| &embed[id as usize * h..][..h]).map(|x| x * scale).collect();
        let mut applications = vec![];
        expand(&model.body, None, &mut [0; 3], &mut applications);
        let layer = |a: &&Application| matches!(a.step, Step::Layer(_));
        let times = |set| applications.iter().filter(layer).filter(|a| a.set == set).count() as u64;
        self.depths = applications.iter().filter(layer).count();
        let mut stream = match model.stream {
            Stream::Sum => Wired::Sum(std::mem::take(&mut x)),
            Stream::Attend { .. } => Wired::Sources { embedding: std::mem::take(&mut x), outputs: vec![] },
            Stream::Lanes { count, embed, .. } => {
                let mut lanes = vec![x; count as usize];
                let own = if embed { self.w("lanes.embed.weight") } else { &[] };
                for (lane, own) in lanes.iter_mut().zip(own.chunks(h)) {
                    lane.chunks_mut(h).for_each(|row| add(row, own));
                }
                Wired::Lanes(lanes)
            }
        };
        let mut streams = vec![self.flat(&stream)];
        let (mut left_at, mut rest) = (vec![], vec![1.0; self.tokens()]);
        // The stream after every layer so far, and at which depths a statement reads it later.
        let mut history = vec![self.flat(&stream)];
        let (mut depth, mut read) = (0, vec![]);
        for a in &applications {
            match a.step {
                Step::Layer(_) => depth += 1,
                Step::Statement(Statement::History(steps)) => read.extend(past(*steps, depth)),
                Step::Statement(_)
                | Step::Embed(_)
                | Step::Enter
                | Step::Exit
                | Step::Choose(..)
                | Step::Chosen => {}
            }
        }
        // Keeping it is an application that does nothing.
        if read.contains(&0) {
            streams.push(self.flat(&stream));
        }
        let all = Inside {
            here: vec![true; self.tokens()],
            part: vec![true; self.tokens()],
            keys: vec![true; self.tokens()],
        };
        for (number, a) in applications.iter().enumerate() {
            (self.pass, self.shared) = (a.pass, a.shared);
            self.turn = applications[..number].iter().filter(layer).filter(|b| b.set == a.set).count();
            let before = self.flat(&stream);
            let expr = match a.step {
                Step::Layer(expr) => expr,
                Step::Enter => {
                    self.passes = [vec![], vec![]];
                    self.seen = [vec![], vec![]];
                    streams.push(self.flat(&stream));
                    continue;
                }
                Step::Choose(number, scorer) => {
                    self.choose(number, scorer, &before);
                    streams.push(before);
                    continue;
                }
                Step::Chosen => {
                    stream = self.wired(self.chosen.weighed(&before));
                    streams.push(self.flat(&stream));
                    continue;
                }
                Step::Exit => {
                    let read = self.last(&stream);
                    self.leave(&read, &mut rest);
                    let through = match self.model.body.last() {
                        Some(Item::Statement(Statement::Norm(gain))) => {
                            let x = match gain {
                                NormGain::Plain => self.plain_norm(&before),
                                NormGain::Own | NormGain::Named(_) => self.norm(&before, &self.last_gain()),
                            };
                            self.last(&self.wired(x))
                        }
                        _ => read.clone(),
                    };
                    left_at.push((read, through));
                    streams.push(self.flat(&stream));
                    continue;
                }
                Step::Embed(number) => {
                    let all = self.w(&format!("loops.{number}.embed.weight"));
                    let mut x = self.flat(&stream);
                    x.chunks_mut(h).for_each(|row| add(row, &all[a.pass * h..][..h]));
                    stream = self.wired(self.staying(&before, x));
                    if a.detached {
                        self.stop_stream(&mut stream);
                    }
                    streams.push(self.flat(&stream));
                    continue;
                }
                Step::Statement(s) => {
                    self.prefix = format!("body.{}", a.set);
                    // A norm after the loop is of all tokens.
                    let last = matches!(model.body.last(), Some(Item::Statement(_)));
                    if last && self.last_statement() == self.prefix {
                        self.gone.fill(false);
                    }
                    let x = self.flat(&stream);
                    let x = match s {
                        Statement::History(steps) => {
                            let kept = past(*steps, self.depth).into_iter().map(|j| &history[j]);
                            let mut sum = vec![0.0; x.len()];
                            for (source, factor) in kept.chain([&x]).zip(self.own("mix.weight")) {
                                sum.iter_mut().zip(source).for_each(|(s, x)| *s += factor * x);
                            }
                            sum
                        }
                        s => self.statement(s, x),
                    };
                    stream = self.wired(self.staying(&before, x));
                    if a.detached {
                        self.stop_stream(&mut stream);
                        if let Statement::Save(name) = s {
                            self.saved.insert(name.clone(), self.flat(&stream));
                        }
                    }
                    streams.push(self.flat(&stream));
                    continue;
                }
            };
            (self.skips, self.dropping, self.prefix) = (0, 0, format!("layers.{}", a.set));
            self.recurrent = a.recurrent.map(|_| times(a.set));
            let pools = self.pools.iter().map(|pool| pool.1.len()).collect();
            let so_far = (self.auxiliary, pools, self.firsts.len());
            self.layer(expr, &mut stream, &all);
            self.depth += 1;
            if a.recurrent.is_some_and(|(_, norm)| norm) {
                let name = format!("{}.residual_norm.weight", self.prefix);
                match &mut stream {
                    Wired::Sum(x) => *x = self.norm(x, &name),
                    Wired::Lanes(lanes) => lanes.iter_mut().for_each(|x| *x = self.norm(x, &name)),
                    Wired::Sources { .. } => {}
                }
            }
            if self.gone.contains(&true) {
                let x = self.flat(&stream);
                stream = self.wired(self.staying(&before, x));
            }
            if a.detached {
                self.stop_stream(&mut stream);
                self.detach(expr, so_far);
            }
            streams.push(self.flat(&stream));
            history.push(self.flat(&stream));
            if read.contains(&self.depth) {
                streams.push(self.flat(&stream));
            }
        }
        let last = self.last(&stream);
        let logits = self.expected(&left_at, &last).unwrap_or_else(|| self.logits(&last));
        let targets = self.batch.targets.iter().filter(|&&y| y >= 0).count().max(1) as f64;
        let rows = logits.chunks(model.vocab as usize).zip(&self.batch.targets);
        let squares = rows.filter(|(_, y)| **y >= 0).map(|(z, _)| self.z_loss * lse(z).powi(2)).sum::<f64>();
        let each = if self.training { self.shared_out(&left_at, &logits) } else { self.nll(&logits) };
        let loss = each.iter().sum::<f64>() + squares;
        for ([capacity, penalty], means) in std::mem::take(&mut self.pools) {
            let mean = means.iter().sum::<f64>() / means.len() as f64;
            self.auxiliary += self.penalty(mean, capacity, penalty);
        }
        let loss = loss / targets + self.auxiliary;
        Found {
            logits,
            streams,
            loss,
            held: self.held.into_inner(),
            counts: self.counts,
            shares: self.shares,
        }
    }

    /// The loop whose passes share out the loss: how, and its number.
    fn exit(&self) -> Option<(Exit, usize)> {
        let mut number = 0;
        self.model.body.iter().find_map(|item| match item {
            Item::Recur { looping, .. } if !looping.exit.is_last() => Some((looping.exit, number)),
            item => {
                number += loops(std::slice::from_ref(item));
                None
            }
        })
    }

    /// Lets every token choose how many passes it makes of the loop before which this is the
    /// stream.
    fn choose(&mut self, number: usize, scorer: &Scorer, x: &[f64]) {
        let name = |part: &str| format!("loops.{number}.choice.{part}");
        let (bias, h) = (self.w(&name("bias")), self.model.hidden as usize);
        let read = cooled(scorer, x);
        let z = match scorer.network {
            None => product(&read, self.w(&name("weight")), h),
            Some(_) => {
                let part = |part: &str| self.w(&name(&format!("network.{part}.weight")));
                network(&read, part("up"), part("down"), h, bias.len())
            }
        };
        if self.training {
            let squares = z.chunks(bias.len().max(1)).map(|z| lse(z).powi(2)).sum::<f64>();
            self.auxiliary += scorer.z_loss * squares / self.tokens() as f64;
        }
        let rows: Vec<Vec<f64>> = z.chunks(bias.len().max(1)).map(softmax).collect();
        let biased = rows.iter().map(|p| p.iter().zip(bias).map(|(p, b)| p + b).collect::<Vec<f64>>());
        let last = self.stop(biased.map(|z| largest_of(&z, 1)[0] as f64).collect());
        let last: Vec<usize> = last.into_iter().map(|pass| pass as usize).collect();
        let mut counts = vec![0.0; bias.len()];
        last.iter().for_each(|&pass| counts[pass] += 1.0);
        self.counts.insert(name("bias"), counts);
        let share = rows.iter().zip(&last).map(|(p, &pass)| p[pass]).collect();
        self.chosen = Chosen { last, share, start: x.to_vec() };
    }

    /// Lets tokens leave after a pass; `rest` is how much of each is still there.
    fn leave(&mut self, x: &[f64], rest: &mut [f64]) {
        let Some((Exit::Gate(_) | Exit::Expected(_), number)) = self.exit() else { return };
        let (w, c) =
            (self.w(&format!("loops.{number}.exit.weight")), self.w(&format!("loops.{number}.exit.bias"))[0]);
        for (i, (x, rest)) in x.chunks(w.len().max(1)).zip(rest).enumerate() {
            *rest *= 1.0 - sigmoid(inner(x, w) + c);
            self.shares.push(1.0 - *rest);
            self.gone[i] |= self.exit.is_some_and(|share| 1.0 - *rest > share);
        }
        self.passes = [std::mem::take(&mut self.passes[1]), vec![]];
        self.seen = [std::mem::take(&mut self.seen[1]), vec![]];
    }

    /// The stream `x`, and of tokens that left what it was.
    fn staying(&self, before: &[f64], mut x: Vec<f64>) -> Vec<f64> {
        self.of_gone(before, &mut x);
        x
    }

    /// Puts what it was into the rows of tokens that left.
    fn of_gone(&self, before: &[f64], x: &mut [f64]) {
        let each = x.len() / self.gone.len().max(1);
        for (i, _) in self.gone.iter().enumerate().filter(|(_, gone)| **gone) {
            x[i * each..][..each].copy_from_slice(&before[i * each..][..each]);
        }
    }

    /// Logits of a stream that leaves.
    fn logits(&self, x: &[f64]) -> Vec<f64> {
        self.capped(self.scores(x))
    }

    fn capped(&self, mut logits: Vec<f64>) -> Vec<f64> {
        if let Some(c) = self.model.logit_softcap {
            logits.iter_mut().for_each(|z| *z = c * (*z / c).tanh());
        }
        logits
    }

    /// Logits before their cap.
    fn scores(&self, x: &[f64]) -> Vec<f64> {
        let model = self.model;
        let normed = model.stream == Stream::Sum && normalised(&model.body, false);
        let last = if normed { x.to_vec() } else { self.norm(x, "norm.weight") };
        let head = self.w(if model.tie { "embed.weight" } else { "head.weight" });
        let mut logits = product(&last, head, model.hidden as usize);
        if model.head_bias {
            logits.chunks_mut(model.vocab as usize).for_each(|row| add(row, self.w("head.bias")));
        }
        if let Some(scale) = model.logit_scale {
            logits.iter_mut().for_each(|z| *z *= scale);
        }
        logits
    }

    /// The loss of each token; 0 where it has no target.
    fn nll(&self, logits: &[f64]) -> Vec<f64> {
        let rows = logits.chunks(self.model.vocab as usize).zip(&self.batch.targets);
        rows.map(|(z, &y)| if y >= 0 { lse(z) - z[y as usize] } else { 0.0 }).collect()
    }

    /// The loss of each token, which passes share out: what their gates and their heads read, but
    /// those of the last, and its logits.
    fn shared_out(&self, streams: &[(Vec<f64>, Vec<f64>)], logits: &[f64]) -> Vec<f64> {
        let last = self.nll(logits);
        let Some((exit, number)) = self.exit() else { return last };
        let through = |(_, x): &(Vec<f64>, Vec<f64>)| self.nll(&self.logits(x));
        let mut all: Vec<Vec<f64>> = streams.iter().map(through).collect();
        all.push(last);
        let entropy = |q: &[f64]| -> f64 { q.iter().map(|q| q * q.ln()).sum() };
        let each = |i: usize| match exit {
            Exit::Last => all[all.len() - 1][i],
            Exit::Mean => all.iter().map(|nll| nll[i]).sum::<f64>() / all.len() as f64,
            Exit::Gate(beta) => {
                let q = self.shares_of(number, streams, i);
                q.iter().zip(&all).map(|(q, nll)| q * nll[i]).sum::<f64>() + beta * entropy(&q)
            }
            // The logits of the last pass are those that are expected.
            Exit::Expected(beta) => {
                all[all.len() - 1][i] + beta * entropy(&self.shares_of(number, streams, i))
            }
        };
        let targets = self.batch.targets.iter().enumerate();
        targets.map(|(i, y)| if *y >= 0 { each(i) } else { 0.0 }).collect()
    }

    /// The share that each pass has of a token.
    fn shares_of(&self, number: usize, streams: &[(Vec<f64>, Vec<f64>)], i: usize) -> Vec<f64> {
        let (w, c) =
            (self.w(&format!("loops.{number}.exit.weight")), self.w(&format!("loops.{number}.exit.bias")));
        let mut rest = 1.0;
        let mut q = vec![];
        for (x, _) in streams {
            let go = sigmoid(inner(&x[i * w.len()..][..w.len()], w) + c[0]);
            q.push(rest * go);
            rest *= 1.0 - go;
        }
        q.push(rest);
        q
    }

    /// The logits that are expected of all passes, where training sees those.
    fn expected(&self, streams: &[(Vec<f64>, Vec<f64>)], last: &[f64]) -> Option<Vec<f64>> {
        let Some((Exit::Expected(_), number)) = self.exit().filter(|_| self.training) else { return None };
        let all = streams.iter().map(|(_, x)| self.scores(x)).chain([self.scores(last)]);
        let vocab = self.model.vocab as usize;
        let mut sum = vec![0.0; self.tokens() * vocab];
        for (p, scores) in all.enumerate() {
            for (i, (sum, z)) in sum.chunks_mut(vocab).zip(scores.chunks(vocab)).enumerate() {
                let q = self.shares_of(number, streams, i)[p];
                sum.iter_mut().zip(z).for_each(|(s, z)| *s += q * z);
            }
        }
        Some(self.capped(sum))
    }

    /// The name of the gain of the last statement, a norm.
    fn last_statement(&self) -> String {
        let mut sets = [0; 3];
        expand(&self.model.body, None, &mut sets, &mut vec![]);
        format!("body.{}", sets[1] - 1)
    }

    /// The gain of the norm that is the last item of the body.
    fn last_gain(&self) -> String {
        match self.model.body.last() {
            Some(Item::Statement(Statement::Norm(NormGain::Named(name)))) => format!("norms.{name}.weight"),
            _ => format!("{}.norm.weight", self.last_statement()),
        }
    }

    /// Detaches what a layer left apart from the stream: losses, means and first values beyond
    /// those that there were before the layer.
    fn detach(&mut self, expr: &Expr, (auxiliary, pools, firsts): (f64, Vec<usize>, usize)) {
        for i in firsts..self.firsts.len() {
            let first = std::mem::take(&mut self.firsts[i]);
            self.firsts[i] = self.stop(first);
        }
        // A component inside a definition is called as that, a dot, and the value that it gives.
        let applied = |name: &str, of: &str| name.split('.').next() == Some(of);
        let known: Vec<String> = self.caches.keys().cloned().collect();
        for name in known.iter().filter(|name| names(expr).iter().any(|of| applied(name, of))) {
            let Some((keys, values, own)) = self.caches.get_mut(name).and_then(Vec::pop) else { continue };
            let (keys, values) = (self.stop(keys), self.stop(values));
            let first = self.shared.and_then(|(at, _)| self.first_keys.get_mut(&(at, name.clone())));
            if let (Some(first), 0) = (first, self.pass) {
                *first = (keys.clone(), values.clone(), own.clone());
            }
            self.caches[name].push((keys, values, own));
        }
        let leave =
            names(expr).into_iter().filter(|name| self.model.components[*name].leaves_depth()).count();
        for at in self.depth_stream.len() - leave..self.depth_stream.len() {
            let (keys, values, all) = std::mem::take(&mut self.depth_stream[at]);
            self.depth_stream[at] = (self.stop(keys), self.stop(values), all);
        }
        self.detach_definitions(&|name| names(expr).iter().any(|of| applied(name, of)));
        let added = self.stop(vec![self.auxiliary - auxiliary])[0];
        self.auxiliary = auxiliary + added;
        for i in 0..self.pools.len() {
            let mut means = self.pools[i].1.split_off(pools.get(i).copied().unwrap_or(0));
            means = self.stop(means);
            self.pools[i].1.extend(means);
        }
    }

    // Building blocks -----------------------------------------------------------------------------

    fn tokens(&self) -> usize {
        self.batch.ids.len()
    }

    /// Sequence and place of a token.
    fn place(&self, i: usize) -> (usize, usize) {
        (i / self.batch.sequence, i % self.batch.sequence)
    }

    /// Whether token `j` is before `i`, or `i` itself, in one document.
    fn behind(&self, i: usize, j: usize) -> bool {
        self.place(i).0 == self.place(j).0 && j <= i && self.batch.segments[i] == self.batch.segments[j]
    }

    fn w(&self, name: &str) -> &'a [f64] {
        self.weights.get(name).map_or(&[], Tensor::floats)
    }

    /// A tensor of this application.
    fn own(&self, name: &str) -> &'a [f64] {
        self.w(&format!("{}.{name}", self.prefix))
    }

    /// A tensor of a `skip`; each pass may have its own.
    fn of_pass(&self, skip: &Skip, name: &str) -> &'a [f64] {
        let all = self.w(name);
        let passes = self.weights.get(name).map_or(1, |w| w.dims[0]);
        match skip.each_pass {
            true => &all[self.pass * (all.len() / passes)..][..all.len() / passes],
            false => all,
        }
    }

    /// A matrix of this application, with what the pass adds to it.
    fn matrix(&self, name: &str) -> Vec<f64> {
        let [a, b] = ["a", "b"].map(|of| format!("{name}.lora_{of}"));
        self.adapted(&format!("{name}.weight"), [&a, &b])
    }

    /// The same by the names of its tensors.
    fn adapted(&self, name: &str, factors: [&str; 2]) -> Vec<f64> {
        let mut w = self.with_adapter(name);
        let [a, b] = factors.map(|name| self.weights.get(&format!("{}.{name}", self.prefix)));
        let (Some(a), Some(b)) = (a, b) else { return w };
        let (rank, wide, high) = (a.dims[1], a.dims[2], b.dims[1]);
        let a = &a.floats()[self.pass * rank * wide..][..rank * wide];
        let b = &b.floats()[self.pass * high * rank..][..high * rank];
        for (i, w) in w.iter_mut().enumerate() {
            *w += (0..rank).map(|r| b[i / wide * rank + r] * a[r * wide + i % wide]).sum::<f64>();
        }
        w
    }

    /// A matrix of this application, or all those of a mixture, with what adapters add:
    /// `W + alpha/rank · B A`, of DoRA times `m / |row|` with that norm held. Queries, keys and
    /// values are rows of one matrix and have adapters of their own.
    fn with_adapter(&self, name: &str) -> Vec<f64> {
        let mut w = self.own(name).to_vec();
        let Some(adapt) = &self.model.adapt else { return w };
        let stem = beside(name, "");
        let of_rows: &[&str] = if stem.ends_with(".qkv") { &["q", "k", "v", "qkv"] } else { &[] };
        let rows = of_rows.iter().map(|part| (*part, stem.replace(".qkv", &format!(".{part}"))));
        let names: Vec<(&str, String)> = match of_rows {
            [] => vec![("", stem.clone())],
            _ => rows.collect(),
        };
        for (part, own) in names {
            let factor = |to: &str| {
                let name = match part {
                    "" => beside(name, &format!(".adapter_{to}")),
                    _ => format!("{own}.adapter_{to}"),
                };
                self.weights.get(&format!("{}.{name}", self.prefix))
            };
            let (Some(a), Some(b)) = (factor("a"), factor("b")) else { continue };
            let [.., rank, wide] = a.dims[..] else { continue };
            let many = a.floats().len() / (rank * wide);
            let (high, all) = (b.floats().len() / (many * rank), w.len() / (many * wide));
            let first = match part {
                "k" => all - 2 * high,
                "v" => all - high,
                _ => 0,
            };
            for (m, i, j) in
                (0..many).flat_map(|m| (0..high).flat_map(move |i| (0..wide).map(move |j| (m, i, j))))
            {
                let (a, b) = (&a.floats()[m * rank * wide..], &b.floats()[m * high * rank..]);
                let sum: f64 = (0..rank).map(|r| b[i * rank + r] * a[r * wide + j]).sum();
                w[(m * all + first + i) * wide + j] += adapt.alpha / adapt.rank as f64 * sum;
            }
            let Some(magnitudes) = factor("magnitude").map(Tensor::floats) else { continue };
            for (at, magnitude) in magnitudes.iter().enumerate() {
                let row = &mut w[(at / high * all + first + at % high) * wide..][..wide];
                let norm = self.stop(vec![row.iter().map(|x| x * x).sum::<f64>().sqrt()]);
                row.iter_mut().for_each(|x| *x *= magnitude / norm[0]);
            }
        }
        w
    }

    /// The value recorded in its place, or the value itself, recorded.
    fn stop(&self, value: Vec<f64>) -> Vec<f64> {
        let mut held = self.held.borrow_mut();
        let value = self.before.and_then(|b| b.get(held.len())).cloned().unwrap_or(value);
        held.push(value.clone());
        value
    }

    fn stop_bools(&mut self, value: Vec<bool>) -> Vec<bool> {
        self.stop(value.into_iter().map(|b| f64::from(u8::from(b))).collect())
            .iter()
            .map(|&x| x > 0.0)
            .collect()
    }

    /// Its slope is a choice.
    fn relu(&mut self, x: Vec<f64>) -> Vec<f64> {
        let positive = self.stop_bools(x.iter().map(|x| *x > 0.0).collect());
        x.into_iter().zip(positive).map(|(x, p)| if p { x } else { 0.0 }).collect()
    }

    /// `x · rsqrt(mean(x²) + eps) · g` of rows as long as the gain.
    fn norm(&self, x: &[f64], name: &str) -> Vec<f64> {
        self.norm_with(x, name, self.model.norm.eps)
    }

    fn norm_with(&self, x: &[f64], name: &str, eps: f64) -> Vec<f64> {
        let (gain, n) = (self.w(name), self.model.norm);
        let row = |x: &[f64]| -> Vec<f64> {
            let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
            let one = if n.unit_offset { 1.0 } else { 0.0 };
            x.iter().zip(gain).map(|(x, g)| x / (mean + eps).sqrt() * (g + one)).collect()
        };
        x.chunks(gain.len().max(1)).flat_map(row).collect()
    }

    /// `x · rsqrt(mean(x²) + eps)` of rows of the stream.
    fn plain_norm(&self, x: &[f64]) -> Vec<f64> {
        let row = |x: &[f64]| -> Vec<f64> {
            let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
            x.iter().map(|x| x / (mean + self.model.norm.eps).sqrt()).collect()
        };
        x.chunks(self.model.hidden as usize).flat_map(row).collect()
    }

    /// Turns pairs `(i, i + d/2)` of the first `d` elements, a share of all, by `position(i) ·
    /// base^(-2i/d)`.
    fn rotate(&self, x: &mut [f64], rope: Rope, position: impl Fn(usize) -> f64) {
        let d = (rope.share * x.len() as f64 + 1e-9) as usize;
        let half = d / 2;
        for i in 0..half {
            let mut turn = rope.base.powf(-2.0 * i as f64 / d as f64);
            let mut long = 1.0;
            match rope.scaling {
                None => {}
                Some(RopeScaling::Linear { factor }) => turn /= factor,
                Some(RopeScaling::Llama3 { factor, low, high, original_context }) => {
                    let wave = 2.0 * PI / turn;
                    if wave > original_context / low {
                        turn /= factor;
                    } else if wave >= original_context / high {
                        let smooth = (original_context / wave - low) / (high - low);
                        turn = (1.0 - smooth) * turn / factor + smooth * turn;
                    }
                }
                // `_compute_yarn_parameters` of transformers' `modeling_rope_utils.py`.
                Some(RopeScaling::Yarn { factor, fast, slow, original_context, attention, truncate }) => {
                    let dim = |turns: f64| {
                        d as f64 * (original_context / (turns * 2.0 * PI)).ln() / (2.0 * rope.base.ln())
                    };
                    let (low, high) =
                        if truncate { (dim(fast).floor(), dim(slow).ceil()) } else { (dim(fast), dim(slow)) };
                    let (low, mut high) = (low.max(0.0), high.min(d as f64 - 1.0));
                    if low == high {
                        high += 0.001;
                    }
                    let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    turn = turn / factor * ramp + turn * (1.0 - ramp);
                    long = attention;
                }
            }
            let (sin, cos) = (position(i) * turn).sin_cos();
            let (a, b) = (x[i], x[i + half]);
            (x[i], x[i + half]) = ((a * cos - b * sin) * long, (b * cos + a * sin) * long);
        }
    }

    /// The position of pair `i` on the axis of depth: odd pairs count from the last depth where
    /// half are reversed.
    fn depth_position(&self, rope: Rope) -> impl Fn(usize) -> f64 + use<> {
        let (depth, last) = (self.depth as f64, (self.depths - 1) as f64);
        move |i| if rope.half_reversed && i % 2 == 1 { last - depth } else { depth }
    }

    // Statements ----------------------------------------------------------------------------------

    fn statement(&mut self, s: &Statement, x: Vec<f64>) -> Vec<f64> {
        let h = self.model.hidden as usize;
        match s {
            Statement::StartZeros => vec![0.0; x.len()],
            Statement::StartNormal(sigma) => {
                let each = x.len() / self.noise.len().max(1);
                let token = |z: &[f64]| z.iter().map(|z| sigma * z).collect::<Vec<_>>().repeat(each);
                self.noise.chunks(h).flat_map(token).collect()
            }
            Statement::Norm(NormGain::Own) => self.norm(&x, &format!("{}.norm.weight", self.prefix)),
            Statement::Norm(NormGain::Plain) => self.plain_norm(&x),
            Statement::Norm(NormGain::Named(name)) if name == "final" => self.norm(&x, "norm.weight"),
            Statement::Norm(NormGain::Named(name)) => self.norm(&x, &format!("norms.{name}.weight")),
            Statement::Linear(_) => product(&x, self.own("linear.weight"), h),
            Statement::Save(name) => {
                self.saved.insert(name.clone(), x.clone());
                x
            }
            // It reads more than the stream.
            Statement::History(_) => x,
            Statement::Mix { name, how } => {
                let e = &self.saved[name];
                let rows = x.chunks(h).zip(e.chunks(h));
                match how {
                    Mixing::Add => x.iter().zip(e).map(|(x, e)| x + e).collect(),
                    Mixing::Linear(_) => {
                        let both: Vec<f64> = rows.flat_map(|(x, e)| [x, e].concat()).collect();
                        product(&both, self.own("mix.weight"), 2 * h)
                    }
                    Mixing::Scaled => {
                        let (lambda, mu) = (self.own("mix.lambda")[0], self.own("mix.mu")[0]);
                        x.iter().zip(e).map(|(x, e)| lambda * x + mu * e).collect()
                    }
                    Mixing::Diagonal => {
                        let (a, decay) = (self.own("mix.delta"), self.own("mix.decay"));
                        let read = product(e, self.own("mix.weight"), h);
                        let of = |(i, (x, read)): (usize, (&f64, &f64))| {
                            let step = a[i % h].exp().ln_1p();
                            (-step * decay[i % h].exp()).exp() * x + step * read
                        };
                        x.iter().zip(&read).enumerate().map(of).collect()
                    }
                }
            }
        }
    }

    // Streams -------------------------------------------------------------------------------------

    /// The stream as the model keeps it between layers: of sources, the sum of the run so far.
    fn flat(&self, stream: &Wired) -> Vec<f64> {
        let h = self.model.hidden as usize;
        match stream {
            Wired::Sum(x) => x.clone(),
            Wired::Lanes(lanes) => {
                let token = |i: usize| lanes.iter().flat_map(move |x| x[i * h..][..h].to_vec());
                (0..self.tokens()).flat_map(token).collect()
            }
            Wired::Sources { embedding, outputs } => {
                self.sources(embedding, outputs).pop().unwrap_or_default()
            }
        }
    }

    /// The embedding, and the sums of runs of outputs.
    fn sources(&self, embedding: &[f64], outputs: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let Stream::Attend { block } = self.model.stream else { return vec![] };
        let mut sources = vec![embedding.to_vec()];
        for run in outputs.chunks(block as usize) {
            let mut sum = vec![0.0; embedding.len()];
            run.iter().for_each(|y| add(&mut sum, y));
            sources.push(sum);
        }
        sources
    }

    /// `Σ_j p_j v_j` of every token.
    fn attended(&self, sources: &[Vec<f64>], name: &str) -> Vec<f64> {
        let (h, w) = (self.model.hidden as usize, self.w(&format!("{name}.weight")));
        let gain = format!("{name}.norm.weight");
        let scores: Vec<Vec<f64>> = sources.iter().map(|v| product(&self.norm(v, &gain), w, h)).collect();
        let mut read = vec![0.0; self.tokens() * h];
        for (i, read) in read.chunks_mut(h).enumerate() {
            let p = softmax(&scores.iter().map(|s| s[i]).collect::<Vec<_>>());
            for (p, v) in p.iter().zip(sources) {
                read.iter_mut().zip(&v[i * h..]).for_each(|(u, v)| *u += p * v);
            }
        }
        read
    }

    /// A stream as [`Formulas::flat`] gives it, back as it is between layers.
    fn wired(&self, x: Vec<f64>) -> Wired {
        let h = self.model.hidden as usize;
        match self.model.stream {
            Stream::Sum | Stream::Attend { .. } => Wired::Sum(x),
            Stream::Lanes { count, .. } => {
                let n = count as usize;
                let lane = |i: usize| x.chunks(h).skip(i).step_by(n).flatten().copied().collect();
                Wired::Lanes((0..n).map(lane).collect())
            }
        }
    }

    /// Stops the gradients of all that a stream holds.
    fn stop_stream(&mut self, stream: &mut Wired) {
        let all: Vec<&mut Vec<f64>> = match stream {
            Wired::Sum(x) => vec![x],
            Wired::Lanes(lanes) => lanes.iter_mut().collect(),
            Wired::Sources { embedding, outputs } => std::iter::once(embedding).chain(outputs).collect(),
        };
        for x in all {
            *x = self.stop(std::mem::take(x));
        }
    }

    /// Applies a layer: its units one by one, a sum inside of each. A norm among the terms is of
    /// the stream so far.
    fn layer(&mut self, expr: &Expr, stream: &mut Wired, inside: &Inside) {
        let units = match expr {
            Expr::Sequential(terms) => &terms[..],
            one => std::slice::from_ref(one),
        };
        match stream {
            Wired::Sum(x) => {
                let terms = match expr {
                    Expr::Sequential(terms) if terms.contains(&Expr::Norm) => terms.as_slice(),
                    _ => std::slice::from_ref(expr),
                };
                for (norms, run) in terms.split_inclusive(|term| *term == Expr::Norm).enumerate() {
                    let mut sum = vec![0.0; x.len()];
                    for term in run.iter().filter(|term| **term != Expr::Norm) {
                        let mut y = x.clone();
                        add(&mut y, &sum);
                        let update = self.expr(term, &y, inside);
                        add(&mut sum, &update);
                    }
                    add(x, &sum);
                    if run.last() == Some(&Expr::Norm) {
                        *x = self.norm(x, &format!("{}.norm{norms}.weight", self.prefix));
                    }
                }
            }
            Wired::Lanes(lanes) => {
                let (mut j, mut norms) = (0, 0);
                for unit in units {
                    if *unit == Expr::Norm {
                        let name = format!("{}.norm{norms}.weight", self.prefix);
                        lanes.iter_mut().for_each(|x| *x = self.norm(x, &name));
                        norms += 1;
                        continue;
                    }
                    let around = self.around(&format!("{}.lanes{j}", self.prefix), lanes);
                    let u = self.mixed(lanes, |i| around[i].alpha.clone());
                    let y = self.expr(unit, &u, inside);
                    let all = lanes.iter().map(Vec::as_slice).chain([&y[..]]).map(<[f64]>::to_vec);
                    let all: Vec<Vec<f64>> = all.collect();
                    for (to, x) in lanes.iter_mut().enumerate() {
                        let weights = |i: usize| [&around[i].mix[to][..], &[around[i].beta[to]]].concat();
                        *x = self.mixed(&all, weights);
                    }
                    j += 1;
                }
            }
            Wired::Sources { embedding, outputs } => {
                for unit in units {
                    let terms = match unit {
                        Expr::Parallel(terms) => &terms[..],
                        one => std::slice::from_ref(one),
                    };
                    let sources = self.sources(embedding, outputs);
                    for term in terms {
                        let label = match term {
                            Expr::Component(name) => name.clone(),
                            _ => format!("skip.{}", self.skips),
                        };
                        let u = self.attended(&sources, &format!("{}.{label}.read", self.prefix));
                        let y = self.expr(term, &u, inside);
                        outputs.push(y);
                    }
                }
            }
        }
    }

    /// `Σ_j w_j x_j` of every token, with weights of its own.
    fn mixed(&self, of: &[Vec<f64>], weights: impl Fn(usize) -> Vec<f64>) -> Vec<f64> {
        let h = self.model.hidden as usize;
        let mut sum = vec![0.0; self.tokens() * h];
        for (i, sum) in sum.chunks_mut(h).enumerate() {
            for (w, x) in weights(i).iter().zip(of) {
                sum.iter_mut().zip(&x[i * h..]).for_each(|(s, x)| *s += w * x);
            }
        }
        sum
    }

    /// The numbers around a unit, for every token.
    fn around(&self, name: &str, lanes: &[Vec<f64>]) -> Vec<Around> {
        let (n, h) = (lanes.len(), self.model.hidden as usize);
        let w = |part: &str| self.w(&format!("{name}.{part}"));
        // Inside a loop every application has its own.
        let each = |part: &str| {
            let all = w(part);
            let size = all.len() / self.recurrent.unwrap_or(1) as usize;
            &all[self.recurrent.map_or(0, |_| self.turn) * size..][..size]
        };
        let Stream::Lanes { kind, .. } = self.model.stream else { return vec![] };
        let token = |i: usize| match kind {
            LaneKind::Static | LaneKind::Dynamic => {
                let mut around = Around {
                    alpha: each("alpha").to_vec(),
                    beta: each("beta").to_vec(),
                    mix: each("mix").chunks(n).map(<[f64]>::to_vec).collect(),
                };
                if kind == LaneKind::Dynamic {
                    let (s, t) = (w("alpha_scale")[0], w("beta_scale")[0]);
                    for (from, lane) in lanes.iter().enumerate() {
                        let x = self.norm(&lane[i * h..][..h], &format!("{name}.norm.weight"));
                        around.alpha[from] += s * inner(&x, w("alpha_weight")).tanh();
                        around.beta[from] += t * inner(&x, w("beta_weight")).tanh();
                        for to in 0..n {
                            let column = w("mix_weight").iter().skip(to).step_by(n);
                            let z: f64 = x.iter().zip(column).map(|(x, w)| x * w).sum();
                            around.mix[to][from] += s * z.tanh();
                        }
                    }
                }
                around
            }
            LaneKind::Mhc => {
                let z = self.flattened(lanes, i, w("weight"));
                let (bias, scale) = (w("bias"), w("scale"));
                let one = |at: usize, s: usize| scale[s] * z[at] + bias[at];
                let mut m: Vec<Vec<f64>> = (0..n)
                    .map(|i| softmax(&(0..n).map(|j| one(2 * n + i * n + j, 2)).collect::<Vec<_>>()))
                    .collect();
                m.iter_mut().flatten().for_each(|x| *x += 1e-6);
                for turn in 0..20 {
                    if turn > 0 {
                        for row in &mut m {
                            let sum = row.iter().sum::<f64>() + 1e-6;
                            row.iter_mut().for_each(|x| *x /= sum);
                        }
                    }
                    for j in 0..n {
                        let sum = m.iter().map(|row| row[j]).sum::<f64>() + 1e-6;
                        m.iter_mut().for_each(|row| row[j] /= sum);
                    }
                }
                Around {
                    alpha: (0..n).map(|i| sigmoid(one(i, 0)) + 1e-6).collect(),
                    beta: (0..n).map(|i| 2.0 * sigmoid(one(n + i, 1))).collect(),
                    mix: (0..n).map(|to| m.iter().map(|row| row[to]).collect()).collect(),
                }
            }
        };
        (0..self.tokens()).map(token).collect()
    }

    /// `W · RMSNorm(flatten X)` of a token.
    fn flattened(&self, lanes: &[Vec<f64>], token: usize, w: &[f64]) -> Vec<f64> {
        let h = self.model.hidden as usize;
        let x: Vec<f64> = lanes.iter().flat_map(|x| &x[token * h..][..h]).copied().collect();
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        let x: Vec<f64> = x.iter().map(|x| x / (mean + self.model.norm.eps).sqrt()).collect();
        product(&x, w, x.len())
    }

    /// The value that the final norm reads.
    fn last(&self, stream: &Wired) -> Vec<f64> {
        match stream {
            Wired::Sum(x) => x.clone(),
            Wired::Sources { embedding, outputs } => {
                self.attended(&self.sources(embedding, outputs), "output.read")
            }
            Wired::Lanes(lanes) => {
                let mhc = matches!(self.model.stream, Stream::Lanes { kind: LaneKind::Mhc, .. });
                self.mixed(lanes, |i| {
                    if !mhc {
                        return vec![1.0; lanes.len()];
                    }
                    let z = self.flattened(lanes, i, self.w("output.lanes.weight"));
                    let (bias, scale) = (self.w("output.lanes.bias"), self.w("output.lanes.scale")[0]);
                    z.iter().zip(bias).map(|(z, b)| sigmoid(scale * z + b) + 1e-6).collect()
                })
            }
        }
    }

    // Composition ---------------------------------------------------------------------------------

    /// The update of an expert.
    fn expr(&mut self, e: &Expr, x: &[f64], inside: &Inside) -> Vec<f64> {
        match e {
            Expr::Component(name) => self.component(name, x, inside),
            Expr::Norm => vec![0.0; x.len()],
            Expr::Parallel(terms) => {
                let mut sum = vec![0.0; x.len()];
                for term in terms {
                    let update = self.expr(term, x, inside);
                    add(&mut sum, &update);
                }
                sum
            }
            Expr::Sequential(terms) => {
                // Added up, and no difference of streams: next to a large stream that would be
                // rounding, which a router multiplies.
                let mut sum = vec![0.0; x.len()];
                for term in terms {
                    let mut y = x.to_vec();
                    add(&mut y, &sum);
                    let update = self.expr(term, &y, inside);
                    add(&mut sum, &update);
                }
                sum
            }
            Expr::Skip(skip, inner) => self.skip(skip, inner, x, inside),
        }
    }

    fn component(&mut self, name: &str, x: &[f64], inside: &Inside) -> Vec<f64> {
        let model = self.model;
        self.output_of(name, &model.components[name], x, inside)
    }

    /// The output of a component whose tensors have this name.
    fn output_of(&mut self, name: &str, component: &Component, x: &[f64], inside: &Inside) -> Vec<f64> {
        let prefix = format!("{}.{name}", self.prefix);
        let (pre_norm, post_norm) = component.norms();
        let n = if pre_norm { self.norm(x, &format!("{prefix}.norm.weight")) } else { x.to_vec() };
        if let Component::Mlp(Mlp { depth_stream: true, biased, .. }) = component {
            self.leave_depth(name, &n, *biased);
        }
        if let Component::Experts(Experts { depth_stream: true, .. }) = component {
            self.leave_depth(name, &n, false);
        }
        let y = match component {
            Component::Sequence(a) => self.attention(name, a, &n, inside, false),
            Component::Depth(a) => self.attention(name, a, &n, inside, true),
            Component::Experts(e) => self.experts(name, e, &n, inside),
            Component::Mlp(m) => {
                let [gate, up, down] =
                    ["gate", "up", "down"].map(|which| self.matrix(&format!("{name}.{which}")));
                let bias = |which: &str| match m.biased {
                    true => self.own(&format!("{name}.{which}.bias")).to_vec(),
                    false => vec![],
                };
                let biases = ["gate", "up", "down"].map(bias);
                self.network(m.activation, &n, [&gate, &up, &down], biases.each_ref().map(|b| &b[..]))
            }
            Component::Defined(defined) => match defined.graph(self.model) {
                Ok(graph) => self.defined(name, &graph, &n, inside),
                // No number is equal to it.
                Err(_) => vec![f64::NAN; n.len()],
            },
        };
        let mut y = if post_norm { self.norm(&y, &format!("{prefix}.post_norm.weight")) } else { y };
        if let Some(scale) = self.model.output_scale {
            y.iter_mut().for_each(|y| *y *= scale);
        }
        y
    }

    /// `down(activation(gate x) ⊙ up x)` of every token.
    /// Each matrix adds its bias, where there is one.
    fn network(
        &mut self,
        activation: Activation,
        x: &[f64],
        [gate, up, down]: [&[f64]; 3],
        biases: [&[f64]; 3],
    ) -> Vec<f64> {
        let h = self.model.hidden as usize;
        let up = shifted(product(x, up, h), biases[1]);
        let gate = if gate.is_empty() { vec![] } else { shifted(product(x, gate, h), biases[0]) };
        let inner = match activation {
            Activation::SwigluClamped => {
                let beyond = |x: &f64| x.abs() > 7.0;
                let gates = self.stop_bools(gate.iter().map(|g| *g > 7.0).collect());
                let ups = self.stop_bools(up.iter().map(beyond).collect());
                let each = gate.iter().zip(&up).zip(gates.iter().zip(&ups));
                each.map(|((g, u), (most, bound))| {
                    let g = if *most { 7.0 } else { *g };
                    let u = if *bound { 7.0 * u.signum() } else { *u };
                    g * sigmoid(1.702 * g) * (u + 1.0)
                })
                .collect()
            }
            Activation::Swiglu => gate.iter().zip(up).map(|(g, u)| g * sigmoid(*g) * u).collect(),
            Activation::Geglu => gate.iter().zip(up).map(|(g, u)| gelu(*g) * u).collect(),
            Activation::GegluErf => {
                gate.iter().zip(up).map(|(g, u)| gelu_by_error_function(*g) * u).collect()
            }
            Activation::Gelu => up.into_iter().map(gelu).collect(),
            Activation::Relu => self.relu(up),
            Activation::Relu2 => self.relu(up).into_iter().map(|a| a * a).collect(),
        };
        let width: usize = down.len() / h;
        shifted(product(&inner, down, width), biases[2])
    }

    // Attention -----------------------------------------------------------------------------------

    /// Leaves keys and values of a matrix of their own in the depth stream.
    fn leave_depth(&mut self, c: &str, n: &[f64], biased: bool) {
        let w = self.own(&format!("{c}.depth_kv.weight")).to_vec();
        let made = product(n, &w, self.model.hidden as usize);
        let bias = if biased { self.own(&format!("{c}.depth_kv.bias")) } else { &[] };
        let made = shifted(made, bias);
        let half = made.len() / self.tokens() / 2;
        let part = |at: usize| made.chunks(2 * half).flat_map(|row| row[at..at + half].to_vec()).collect();
        self.depth_stream.push((part(0), part(half), vec![true; self.tokens()]));
    }

    fn attention(&mut self, c: &str, a: &Attention, n: &[f64], inside: &Inside, depth: bool) -> Vec<f64> {
        let (tokens, d) = (self.tokens(), a.head_size as usize);
        let (heads, kv_heads) = (a.heads as usize, a.kv_heads as usize);
        let mixture = match (self.recurrent, &a.projection) {
            (Some(times), Some(p)) => {
                let experts = p.count.unwrap_or(times) as usize;
                let (chosen, gates) = self.route(c, &p.router, n, experts, 1, None, inside);
                let stopped = if p.shared { self.stop(gates.clone()) } else { vec![] };
                Some((experts, chosen, gates, stopped))
            }
            _ => None,
        };
        let project = |this: &Self, which: &str, x: &[f64], wide: usize| -> Vec<f64> {
            let w = this.with_adapter(&format!("{c}.{which}.weight"));
            let Some((experts, chosen, gates, stopped)) = &mixture else {
                return product(x, &this.matrix(&format!("{c}.{which}")), wide);
            };
            let shared = this.own(&format!("{c}.{which}.shared.weight"));
            let size = w.len() / experts;
            let mut out = vec![];
            for (i, x) in x.chunks(wide).enumerate() {
                let mut y = product(x, &w[chosen[i] * size..][..size], wide);
                y.iter_mut().for_each(|y| *y *= gates[i]);
                if !stopped.is_empty() {
                    let common = product(x, shared, wide);
                    y.iter_mut().zip(common).for_each(|(y, c)| *y += stopped[i] * c);
                }
                out.extend(y);
            }
            out
        };
        let biased =
            |this: &Self, which: &str, x: Vec<f64>| shifted(x, this.own(&format!("{c}.{which}.bias")));
        let mut qkv = match &a.latent {
            Some(l) => self.latent(c, a, l, n),
            None => project(self, "qkv", n, self.model.hidden as usize),
        };
        if matches!(a.bias, Some(Bias::Qkv | Bias::All)) {
            qkv = biased(self, "qkv", qkv);
        }
        let (q, k) = (heads * d, if a.kv_from.is_some() { 0 } else { kv_heads * d });
        let part = |from: usize, n: usize| -> Vec<f64> {
            qkv.chunks(q + 2 * k).flat_map(|row| row[from..from + n].to_vec()).collect()
        };
        let (mut q, mut k, mut v) = (part(0, q), part(q, k), part(q + k, k));
        if a.bias == Some(Bias::Qk) {
            (q, k) = (biased(self, "q", q), biased(self, "k", k));
        }
        // Keys and values as they are left in the depth stream, and those that stand there.
        let plain = (k.clone(), v.clone(), inside.keys.clone());
        let mut above = if a.depth_stream.is_some() { self.depth_stream.clone() } else { vec![] };
        for (keys, ..) in above.iter_mut().filter(|_| a.qk_norm != QkNorm::None) {
            *keys = self.norm(keys, &format!("{}.{c}.k_norm.weight", self.prefix));
        }
        match a.depth_stream {
            None => {}
            Some(DepthStream::Keys) => self.depth_stream.push(plain),
            Some(DepthStream::Own) => {
                self.leave_depth(c, n, matches!(a.bias, Some(Bias::Qkv | Bias::All)));
            }
        }
        if a.qk_norm != QkNorm::None {
            // Rows as long as the gains are: of a head, or of all.
            q = self.norm(&q, &format!("{}.{c}.q_norm.weight", self.prefix));
            if a.kv_from.is_none() {
                k = self.norm(&k, &format!("{}.{c}.k_norm.weight", self.prefix));
            }
        }
        if a.value_residual {
            let share = self.own(&format!("{c}.value_residual"))[0];
            let first = self.firsts.entry(c.into()).or_insert_with(|| v.clone());
            v.iter_mut().zip(first).for_each(|(v, first)| *v = share * *v + (1.0 - share) * *first);
        }
        if let Some(rope) = a.rope
            && let Some(l) = &a.latent
        {
            for x in [&mut q, &mut k] {
                for (at, head) in x.chunks_mut(d).enumerate() {
                    let position = f64::from(self.batch.positions[at / heads]);
                    let turning = &mut head[d - l.turned as usize..];
                    let key = (at % heads) as u64 * l.keys / a.heads;
                    match l.pairs_of(key) {
                        None => self.rotate(turning, rope, |_| position),
                        Some(pairs) => {
                            // A whole head of zeros with these pairs in their places.
                            let (all, own) = (rope.turning(a.head_size) as usize / 2, pairs.len());
                            let mut whole = vec![0.0; 2 * all];
                            for (i, pair) in pairs.iter().enumerate() {
                                whole[*pair as usize] = turning[i];
                                whole[all + *pair as usize] = turning[own + i];
                            }
                            self.rotate(&mut whole, dreamc_dsl::spec::Rope { share: 1.0, ..rope }, |_| {
                                position
                            });
                            for (i, pair) in pairs.iter().enumerate() {
                                turning[i] = whole[*pair as usize];
                                turning[own + i] = whole[all + *pair as usize];
                            }
                        }
                    }
                }
            }
        } else if let Some(rope) = a.rope {
            for (x, heads) in [(&mut q, heads), (&mut k, kv_heads)] {
                for (at, head) in x.chunks_mut(d).enumerate() {
                    if depth {
                        self.rotate(head, rope, self.depth_position(rope));
                    } else {
                        let position = f64::from(self.batch.positions[at / heads]);
                        self.rotate(head, rope, |_| position);
                    }
                }
            }
        }
        if !depth && a.kv_from.is_none() {
            if let Some((keys, values)) = self.passes[0].get(self.passes[1].len()) {
                self.of_gone(keys, &mut k);
                self.of_gone(values, &mut v);
            }
            self.passes[1].push((k.clone(), v.clone()));
        }
        let scale = a.scale.unwrap_or(1.0 / (d as f64).sqrt());
        let mut mixed = vec![0.0; tokens * heads * d];
        let mut keys = inside.keys.clone();
        if let (Some((at, kv)), false, None) = (self.shared, depth, &a.kv_from) {
            let own = (k, v, keys);
            (k, v, keys) = self.first_keys.entry((at, c.into())).or_insert_with(|| own.clone()).clone();
            if kv == PassKeys::Replaced {
                for (all, own) in [(&mut k, &own.0), (&mut v, &own.1)] {
                    let width = own.len() / tokens;
                    for i in (0..tokens).filter(|i| inside.keys[*i]) {
                        all[i * width..][..width].copy_from_slice(&own[i * width..][..width]);
                    }
                }
            }
        }
        if depth || a.depth_keys {
            self.caches.entry(c.into()).or_default().push((k, v, keys));
        } else if a.kv_from.is_none() {
            self.caches.insert(c.into(), vec![(k, v, keys)]);
        }
        let cache = &self.caches[a.kv_from.as_deref().unwrap_or(c)];
        let latest = cache.len() - 1;
        let cache: Vec<&Depth> = cache.iter().chain(&above).collect();
        for i in (0..tokens).filter(|&i| inside.here[i]) {
            // Pairs of an application and a token whose key is seen.
            let seen: Vec<(usize, usize)> = if depth {
                (0..=latest).filter(|&l| cache[l].2[i]).map(|l| (l, i)).collect()
            } else {
                let near = |j: usize| a.window.is_none_or(|w| ((i - j) as u64) < w);
                let before = (0..latest).filter(|_| a.depth_keys).chain(latest + 1..cache.len());
                let before = before.map(|l| (l, i));
                (0..tokens)
                    .filter(|&j| self.behind(i, j) && near(j) && cache[latest].2[j])
                    .map(|j| (latest, j))
                    .chain(before)
                    .collect()
            };
            if seen.is_empty() {
                continue;
            }
            for head in 0..heads {
                let group = head / (heads / kv_heads);
                let of = |x: &[f64], j: usize| x[(j * kv_heads + group) * d..][..d].to_vec();
                let query = &q[(i * heads + head) * d..][..d];
                let score = |(l, j): &(usize, usize)| {
                    let s = scale * inner(query, &of(&cache[*l].0, *j));
                    a.softcap.map_or(s, |c| c * (s / c).tanh())
                };
                let scores: Vec<f64> = seen.iter().map(score).collect();
                let sink = a.sink.then(|| self.own(&format!("{c}.sink"))[head]);
                let all = lse(&[&scores[..], sink.as_slice()].concat());
                for (s, (l, j)) in scores.iter().zip(&seen) {
                    let value = of(&cache[*l].1, *j);
                    let at = &mut mixed[(i * heads + head) * d..][..d];
                    at.iter_mut().zip(value).for_each(|(y, v)| *y += (s - all).exp() * v);
                }
            }
        }
        let gate = self.matrix(&format!("{c}.gate"));
        match a.gate {
            None => {}
            // One for each head, or for each of its elements.
            Some(HeadGate::Head) => {
                let gates = product(n, &gate, self.model.hidden as usize);
                mixed = times(&mixed, &gates.into_iter().map(sigmoid).collect::<Vec<_>>());
            }
            Some(HeadGate::Element) => {
                let gates = product(n, &gate, self.model.hidden as usize);
                mixed.iter_mut().zip(gates).for_each(|(x, z)| *x *= sigmoid(z));
            }
        }
        if let Some(l) = &a.latent {
            // Zeros stand after the values of heads.
            let value = l.value as usize;
            mixed = mixed.chunks(d).flat_map(|head| head[..value].to_vec()).collect();
        }
        let y = project(self, "out", &mixed, mixed.len() / tokens);
        if matches!(a.bias, Some(Bias::Out | Bias::All)) { biased(self, "out", y) } else { y }
    }

    /// Queries, keys and values of latent attention, of all heads one after another, values with
    /// zeros after them.
    fn latent(&self, c: &str, a: &Attention, l: &Latent, n: &[f64]) -> Vec<f64> {
        let (h, heads, d) = (self.model.hidden as usize, a.heads as usize, a.head_size as usize);
        let (rank, value, still) = (l.kv as usize, l.value as usize, d - l.turned as usize);
        let all = ["q_up", "q_down", "kv_down", "kv_up"]
            .map(|which| (which, self.with_adapter(&format!("{c}.{which}.weight"))));
        let w = |which: &str| all.iter().find(|(name, _)| *name == which).map_or(&[][..], |(_, w)| w);
        let eps = l.eps.unwrap_or(self.model.norm.eps);
        let norm = |x: &[f64], which: &str| match l.norm {
            true => self.norm_with(x, &format!("{}.{c}.{which}.weight", self.prefix), eps),
            false => x.to_vec(),
        };
        let q = match l.query {
            None => product(n, w("q_up"), h),
            Some(rank) => {
                product(&norm(&product(n, w("q_down"), h), "q_down_norm"), w("q_up"), rank as usize)
            }
        };
        let down = product(n, w("kv_down"), h);
        let (keys, turned) = (l.keys as usize, d - still);
        let tokens = q.chunks(heads * d).zip(down.chunks(rank + keys * turned));
        let token = |(q, down): (&[f64], &[f64])| {
            let (latent, shared) = down.split_at(rank);
            let up = product(&norm(latent, "kv_down_norm"), w("kv_up"), rank);
            let each = || up.chunks(still + value);
            let k = each().enumerate().flat_map(|(h, head)| {
                let key = h * keys / heads;
                [&head[..still], &shared[key * turned..][..turned]].concat()
            });
            let v = each().flat_map(|head| [&head[still..], &vec![0.0; d - value]].concat());
            [q, &k.collect::<Vec<_>>(), &v.collect::<Vec<_>>()].concat()
        };
        tokens.flat_map(token).collect()
    }

    // Experts -------------------------------------------------------------------------------------

    /// The experts that each token chose, `active` for each, and their gates. Where their numbers
    /// of tokens are rounded, as many that a token may have, and `usize::MAX` for none.
    #[allow(clippy::too_many_arguments)]
    fn route(
        &mut self,
        c: &str,
        r: &Router,
        n: &[f64],
        experts: usize,
        active: usize,
        round: Option<(u64, u64)>,
        inside: &Inside,
    ) -> (Vec<usize>, Vec<f64>) {
        let h = self.model.hidden as usize;
        let prefix = format!("{}.{c}.router", self.prefix);
        let logits = match &r.form {
            RouterForm::Linear => product(n, self.w(&format!("{prefix}.weight")), h),
            RouterForm::LowRank { query, rope } => {
                let size = *query as usize;
                let q = product(n, self.w(&format!("{prefix}.query.weight")), h);
                let mut q = self.norm(&q, &format!("{prefix}.q_norm.weight"));
                if let Some(rope) = rope {
                    q.chunks_mut(size).for_each(|q| self.rotate(q, *rope, self.depth_position(*rope)));
                }
                let keys =
                    self.norm(self.w(&format!("{prefix}.keys.weight")), &format!("{prefix}.k_norm.weight"));
                product(&q, &keys, size).into_iter().map(|z| z / (size as f64).sqrt()).collect()
            }
        };
        // Empty where there is none.
        let logits = shifted(logits, self.w(&format!("{prefix}.logit_bias")));
        let scores: Vec<f64> = match r.score {
            Score::Sigmoid => logits.iter().copied().map(sigmoid).collect(),
            Score::Softmax => logits.chunks(experts).flat_map(softmax).collect(),
            Score::Sqrtsoftplus => logits.iter().map(|z| lse(&[0.0, *z]).sqrt()).collect(),
        };
        let bias = if r.balance.is_some() { self.w(&format!("{prefix}.bias")) } else { &[] };
        let of = if r.select == Select::Logit { &logits } else { &scores };
        let (mut chosen, mut taken) = (vec![], vec![]);
        let round = round.filter(|_| self.training);
        for row in of.chunks(experts) {
            let mut biased: Vec<f64> = (0..experts).map(|e| row[e] + bias.get(e).unwrap_or(&0.0)).collect();
            let each = experts / r.groups as usize;
            let worth = |group: &[f64]| largest_of(group, 2).into_iter().map(|e| group[e]).sum::<f64>();
            let worths: Vec<f64> = biased.chunks(each).map(worth).collect();
            let best = largest_of(&worths, r.topk_groups as usize);
            for (e, value) in biased.iter_mut().enumerate() {
                if !best.contains(&(e / each)) {
                    *value = f64::NEG_INFINITY;
                }
            }
            chosen.extend(largest_of(&biased, active).into_iter().map(|e| e as f64));
            let allowed = biased.iter().filter(|x| x.is_finite()).count();
            let wider = active + usize::from(round.is_some() && allowed > active);
            taken.extend(largest_of(&biased, wider).into_iter().map(|e| e as f64));
        }
        let chosen: Vec<usize> = self.stop(chosen).into_iter().map(|e| e as usize).collect();
        let mut gates: Vec<f64> =
            chosen.iter().enumerate().map(|(at, e)| scores[at / active * experts + e]).collect();
        for row in gates.chunks_mut(active).filter(|_| r.normalise) {
            let sum: f64 = row.iter().sum();
            row.iter_mut().for_each(|g| *g /= sum);
        }
        gates.iter_mut().for_each(|g| *g *= r.scale);
        let rounded = round.map(|(tile, real)| {
            let mut taken: Vec<usize> = self.stop(taken).into_iter().map(|e| e as usize).collect();
            let wider = taken.len() / self.tokens();
            let score = |at: usize, e: usize| scores[at / wider * experts + e];
            let gates = taken.iter().enumerate().map(|(at, &e)| {
                let own = chosen[at / wider * active..][..active].iter();
                let all: f64 = own.map(|&e| scores[at / wider * experts + e]).sum();
                r.scale * score(at, e) / if r.normalise { all } else { 1.0 }
            });
            let gates: Vec<f64> = gates.collect();
            let kept = self.stop_bools(round_up_or_down(&taken, &score, wider, active, (tile, real), inside));
            for (expert, _) in taken.iter_mut().zip(&kept).filter(|(_, kept)| !**kept) {
                *expert = usize::MAX;
            }
            (taken, gates)
        });
        if r.balance.is_some() {
            let counts = self.counts.entry(format!("{prefix}.bias")).or_insert_with(|| vec![0.0; experts]);
            let taking = chosen.chunks(active).zip(&inside.part).filter(|(_, part)| **part);
            taking.flat_map(|(chosen, _)| chosen).for_each(|e| counts[*e] += 1.0);
        }
        if self.training {
            let here: Vec<usize> = (0..self.tokens()).filter(|&i| inside.here[i]).collect();
            let rows = here.len() as f64;
            if r.load_balance_loss != 0.0 {
                let mut sum = 0.0;
                for e in 0..experts {
                    let times =
                        |i: &usize| chosen[i * active..][..active].iter().filter(|c| **c == e).count();
                    let f = here.iter().map(times).sum::<usize>() as f64 / (rows * active as f64);
                    let p = here.iter().map(|i| softmax(&logits[i * experts..][..experts])[e]).sum::<f64>()
                        / rows;
                    sum += f * p;
                }
                self.auxiliary += r.load_balance_loss * experts as f64 * sum;
            }
            if r.z_loss != 0.0 {
                let squares = here.iter().map(|i| lse(&logits[i * experts..][..experts]).powi(2));
                self.auxiliary += r.z_loss * squares.sum::<f64>() / rows;
            }
        }
        rounded.unwrap_or((chosen, gates))
    }

    fn experts(&mut self, c: &str, e: &Experts, n: &[f64], inside: &Inside) -> Vec<f64> {
        let (h, active) = (self.model.hidden as usize, e.active as usize);
        let (all, round) = ((e.count + e.noop) as usize, e.round.map(|tile| (tile, e.count)));
        let (chosen, gates) = self.route(c, &e.router, n, all, active, round, inside);
        let each = chosen.len() / self.tokens();
        let mut y = vec![0.0; n.len()];
        let adapted = ["gate", "up", "down"].map(|which| self.with_adapter(&format!("{c}.{which}.weight")));
        for expert in 0..e.count as usize {
            let of = |all: &Vec<f64>| {
                let size = all.len() / e.count as usize;
                all[expert * size..][..size].to_vec()
            };
            let bias = |which: &str| {
                let all = self.own(&format!("{c}.{which}.bias"));
                let size = all.len() / e.count as usize;
                &all[expert * size..][..size]
            };
            let (matrices, biases) = (adapted.each_ref().map(of), ["gate", "up", "down"].map(bias));
            let all = self.network(e.activation, n, matrices.each_ref().map(Vec::as_slice), biases);
            for (at, gate) in gates.iter().enumerate().filter(|(at, _)| chosen[*at] == expert) {
                let token = at / each;
                y[token * h..][..h].iter_mut().zip(&all[token * h..]).for_each(|(y, f)| *y += gate * f);
            }
        }
        if e.shared > 0 {
            let of = |which: &str| self.with_adapter(&format!("{c}.shared.{which}.weight"));
            let shared = ["gate", "up", "down"].map(of);
            let mut always = self.network(e.activation, n, shared.each_ref().map(Vec::as_slice), [&[]; 3]);
            if e.shared_gate {
                let z = product(n, self.own(&format!("{c}.shared_gate.weight")), h);
                always = times(&always, &z.into_iter().map(sigmoid).collect::<Vec<_>>());
            }
            add(&mut y, &always);
        }
        y
    }

    // Skipping ------------------------------------------------------------------------------------

    fn skip(&mut self, skip: &Skip, inner: &Expr, x: &[f64], around: &Inside) -> Vec<f64> {
        let prefix = format!("{}.skip.{}", self.prefix, self.skips);
        self.skips += 1;
        let (h, tokens) = (self.model.hidden as usize, self.tokens());
        let here: Vec<usize> = (0..tokens).filter(|&i| around.here[i]).collect();
        let score = |this: &Self, x: &[f64]| -> Vec<f64> {
            let x: &[f64] = &cooled(&skip.scorer, x);
            if skip.scorer.network.is_some() {
                let part = |part: &str| this.of_pass(skip, &format!("{prefix}.network.{part}.weight"));
                return network(x, part("up"), part("down"), h, 1);
            }
            match skip.input {
                SkipInput::Hidden => product(x, this.of_pass(skip, &format!("{prefix}.router.weight")), h),
                SkipInput::NormOnly => {
                    let one = |name: &str| this.of_pass(skip, &format!("{prefix}.router.{name}.weight"))[0];
                    let norm = |x: &[f64]| length(x.iter().copied());
                    x.chunks(h).map(|x| one("scale") * norm(x) + one("offset")).collect()
                }
            }
        };
        let predictor = |this: &Self, x: &[f64]| -> Vec<f64> {
            let up = product(x, this.of_pass(skip, &format!("{prefix}.predictor.up.weight")), h);
            let inner: Vec<f64> = up.into_iter().map(|a| a * sigmoid(a)).collect();
            let down = this.of_pass(skip, &format!("{prefix}.predictor.down.weight"));
            product(&inner, down, down.len())
        };
        let mut r = match skip.rule {
            // The router of its loop scored before the first pass.
            SkipRule::DepthChoice { .. } => vec![],
            SkipRule::TopK { .. } | SkipRule::Threshold { .. } => score(self, x),
        };
        let rows = here.len() as f64;
        let mean = |values: &[f64]| here.iter().map(|&i| values[i]).sum::<f64>() / rows;
        match &skip.rule {
            SkipRule::TopK { capacity, causal } => {
                let capacity = &own_share(skip, *capacity, self.pass);
                let factor = |r: f64| match skip.gate {
                    SkipGate::Score => r,
                    SkipGate::Sigmoid => sigmoid(r),
                    SkipGate::Tanh => r.tanh(),
                };
                let gate: Vec<f64> = r.iter().map(|&r| skip.gate_scale * factor(r)).collect();
                let behind = |mut f: Vec<f64>| {
                    if skip.whole {
                        add(&mut f, x);
                    }
                    f
                };
                // Those of the pass before, among which it chooses.
                let key = prefix.clone();
                let asked = match (skip.nested && self.pass > 0, self.members.get(&key)) {
                    (true, Some(members)) => members.clone(),
                    _ => around.here.clone(),
                };
                let here: Vec<usize> = here.iter().copied().filter(|&i| asked[i]).collect();
                let z = match causal {
                    _ if self.training => None,
                    _ if *capacity >= 1.0 => {
                        self.members.insert(key, around.part.clone());
                        let f = self.expr(inner, x, around);
                        return times(&behind(f), &gate);
                    }
                    None => None,
                    Some(CausalRule::Bce { .. }) => Some(r.clone()),
                    Some(CausalRule::Predictor { .. }) => Some(predictor(self, x)),
                };
                let inside = match z {
                    Some(z) => {
                        let part: Vec<bool> =
                            (0..tokens).map(|i| around.part[i] && asked[i] && z[i] > 0.0).collect();
                        Inside { here: around.here.clone(), part: part.clone(), keys: part }
                    }
                    None => {
                        let mut chosen = vec![false; tokens];
                        for row in 0..tokens / self.batch.sequence {
                            let own: Vec<usize> =
                                here.iter().copied().filter(|&i| self.place(i).0 == row).collect();
                            let scores: Vec<f64> = own.iter().map(|&i| r[i]).collect();
                            // A share is one of all tokens; fewer of them may be asked.
                            let all =
                                (0..tokens).filter(|&i| around.here[i] && self.place(i).0 == row).count();
                            let k = (capacity * all as f64 + 1e-9).floor().max(1.0) as usize;
                            largest_of(&scores, k.min(own.len()))
                                .into_iter()
                                .for_each(|at| chosen[own[at]] = true);
                        }
                        let chosen = self.stop_bools(chosen);
                        Inside { here: chosen.clone(), part: chosen.clone(), keys: chosen }
                    }
                };
                if self.training {
                    let squares = here.iter().map(|&i| r[i] * r[i]).sum::<f64>();
                    self.auxiliary += skip.scorer.z_loss * squares / here.len() as f64;
                }
                self.members.insert(key, inside.part.clone());
                let f = behind(self.wrapped(skip, inner, x, around, &inside));
                let update = self.spread(skip, &times(&f, &gate), around, &inside.part);
                if let (Some(rule), true) = (causal, self.training) {
                    let (weight, z) = match rule {
                        CausalRule::Bce { weight, into_input: true } => (weight, r),
                        CausalRule::Bce { weight, into_input: false } => {
                            let stopped = self.stop(x.to_vec());
                            (weight, score(self, &stopped))
                        }
                        CausalRule::Predictor { weight, .. } => {
                            let stopped = self.stop(x.to_vec());
                            (weight, predictor(self, &stopped))
                        }
                    };
                    // Binary cross-entropy of a logit.
                    let member = |i: usize| f64::from(u8::from(inside.part[i]));
                    let each: Vec<f64> = (0..tokens).map(|i| lse(&[0.0, z[i]]) - z[i] * member(i)).collect();
                    let sum = here.iter().map(|&i| each[i]).sum::<f64>();
                    self.auxiliary += weight * sum / here.len() as f64;
                }
                update
            }
            SkipRule::DepthChoice { .. } => {
                let last = &self.chosen.last;
                let part: Vec<bool> = (0..tokens).map(|i| around.part[i] && last[i] >= self.pass).collect();
                let made: Vec<f64> = part.iter().map(|&part| f64::from(u8::from(part))).collect();
                let inside = Inside { here: around.here.clone(), part: part.clone(), keys: part };
                times(&self.expr(inner, x, &inside), &made)
            }
            SkipRule::Threshold { capacity, penalty, pooled } => {
                let capacity = &own_share(skip, *capacity, self.pass);
                if skip.level == SkipLevel::Sequence {
                    for row in 0..tokens / self.batch.sequence {
                        let own: Vec<usize> =
                            here.iter().copied().filter(|&i| self.place(i).0 == row).collect();
                        let mean = own.iter().map(|&i| r[i]).sum::<f64>() / own.len() as f64;
                        own.into_iter().for_each(|i| r[i] = mean);
                    }
                }
                let part: Vec<bool> = (0..tokens).map(|i| around.part[i] && r[i] >= 0.0).collect();
                let part = self.stop_bools(part);
                let keys = if skip.kv == SkipKv::All { around.keys.clone() } else { part.clone() };
                let inside = Inside { here: around.here.clone(), part, keys };
                let f = self.wrapped(skip, inner, x, around, &inside);
                let hard: Vec<f64> = inside.part.iter().map(|&b| f64::from(u8::from(b))).collect();
                if !self.training {
                    return self.spread(skip, &times(&f, &hard), around, &inside.part);
                }
                let p: Vec<f64> = r.iter().copied().map(sigmoid).collect();
                let rest = self.stop(hard.iter().zip(&p).map(|(m, p)| m - p).collect());
                let mask: Vec<f64> = p.iter().zip(&rest).map(|(p, rest)| p + rest).collect();
                let share = mean(&mask);
                if *pooled {
                    let key = [*capacity, *penalty];
                    match self.pools.iter_mut().find(|(k, _)| *k == key) {
                        Some((_, means)) => means.push(share),
                        None => self.pools.push((key, vec![share])),
                    }
                } else {
                    self.auxiliary += self.penalty(share, *capacity, *penalty);
                }
                let update = times(&f, &mask);
                let mut all = self.spread(skip, &update, around, &inside.part);
                if skip.merge {
                    // The value is that of the last token that takes part; the gradient of its own
                    // decision is kept.
                    let skipped: Vec<f64> = hard.iter().map(|m| 1.0 - m).collect();
                    add(&mut all, &times(&update, &skipped));
                }
                all
            }
        }
    }

    /// `λ·ReLU(mean - c*)`; no share is above 1.
    fn penalty(&mut self, mean: f64, capacity: f64, weight: f64) -> f64 {
        if capacity < 1.0 { weight * self.relu(vec![mean - capacity])[0] } else { 0.0 }
    }

    /// The wrapped part, on what comes into it.
    fn wrapped(
        &mut self,
        skip: &Skip,
        inner: &Expr,
        x: &[f64],
        around: &Inside,
        inside: &Inside,
    ) -> Vec<f64> {
        if !skip.merge {
            return self.expr(inner, x, inside);
        }
        let h = self.model.hidden as usize;
        let mut merged = x.to_vec();
        for i in (0..self.tokens()).filter(|&i| inside.part[i]) {
            // Itself, and those that were skipped since the one before it.
            let since: Vec<usize> = (0..=i)
                .rev()
                .filter(|&j| around.part[j] && self.behind(i, j))
                .take_while(|&j| j == i || !inside.part[j])
                .collect();
            for k in 0..h {
                merged[i * h + k] = since.iter().map(|j| x[j * h + k]).sum::<f64>() / since.len() as f64;
            }
        }
        self.expr(inner, &merged, inside)
    }

    /// Updates of the tokens that take part; with `merge` others share that of the last one before
    /// them.
    fn spread(&self, skip: &Skip, update: &[f64], around: &Inside, part: &[bool]) -> Vec<f64> {
        let h = self.model.hidden as usize;
        let mut all = vec![0.0; update.len()];
        for i in (0..self.tokens()).filter(|&i| around.here[i]) {
            let last = match skip.merge {
                true if !around.part[i] => None,
                true => (0..=i).rev().find(|&j| part[j] && self.behind(i, j)),
                // The others' share in straight-through gradients is multiplied by 0.
                false => Some(i).filter(|&i| part[i] || matches!(skip.rule, SkipRule::Threshold { .. })),
            };
            if let Some(j) = last {
                all[i * h..][..h].copy_from_slice(&update[j * h..][..h]);
            }
        }
        all
    }
}

/// The share that a `skip` asks for in a pass.
fn own_share(skip: &Skip, all: f64, pass: usize) -> f64 {
    skip.capacities.get(pass).copied().unwrap_or(all)
}

// Numbers -----------------------------------------------------------------------------------------

fn add(x: &mut [f64], y: &[f64]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

/// Rows and a bias; those alone where it is empty.
fn shifted(mut rows: Vec<f64>, bias: &[f64]) -> Vec<f64> {
    rows.chunks_mut(bias.len().max(1)).for_each(|row| add(row, bias));
    rows
}

/// Rows times one number each.
fn times(rows: &[f64], by: &[f64]) -> Vec<f64> {
    let n = rows.len() / by.len().max(1);
    rows.iter().enumerate().map(|(i, x)| x * by[i / n]).collect()
}

fn inner(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

/// Rows of `x` times the rows of a matrix `[out, n]`.
fn product(x: &[f64], w: &[f64], n: usize) -> Vec<f64> {
    x.chunks(n).flat_map(|x| w.chunks(n).map(|w| inner(x, w)).collect::<Vec<_>>()).collect()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The approximation by tanh.
fn gelu(x: f64) -> f64 {
    // `(1 + tanh u) / 2` without its cancellation where `u` is far below 0.
    x / (1.0 + (-2.0 * (2.0 / PI).sqrt() * (x + 0.044715 * x * x * x)).exp())
}

/// `x/2 · (1 + erf(x / √2))`, `erf` by Abramowitz and Stegun, 7.1.26.
fn gelu_by_error_function(x: f64) -> f64 {
    let z = x.abs() / 2f64.sqrt();
    let t = 1.0 / (1.0 + 0.3275911 * z);
    let p = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))));
    // `(1 - p e^-z²)` of the error function, without its cancellation far below 0.
    x.max(0.0) - x.abs() * p * (-z * z).exp() / 2.0
}

/// `ln Σ e^x`
fn lse(x: &[f64]) -> f64 {
    let most = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    most + x.iter().map(|x| (x - most).exp()).sum::<f64>().ln()
}

fn softmax(x: &[f64]) -> Vec<f64> {
    let all = lse(x);
    x.iter().map(|x| (x - all).exp()).collect()
}

/// Which choices are kept where every expert's number of tokens becomes the nearest multiple of a
/// tile. Choices of a token after the first `active` are spare.
fn round_up_or_down(
    chosen: &[usize],
    score: &dyn Fn(usize, usize) -> f64,
    wider: usize,
    active: usize,
    (tile, experts): (u64, u64),
    inside: &Inside,
) -> Vec<bool> {
    let (tile, mut kept) = (tile as usize, vec![false; chosen.len()]);
    for expert in 0..experts as usize {
        let of = |spare: bool| -> Vec<usize> {
            let at = (0..chosen.len()).filter(|at| chosen[*at] == expert && inside.here[at / wider]);
            at.filter(|at| (at % wider >= active) == spare).collect()
        };
        let (own, spare) = (of(false), of(true));
        let [lower, upper] = [own.len() / tile * tile, own.len().div_ceil(tile) * tile];
        let closer_above = upper - own.len() <= own.len() - lower && upper <= own.len() + spare.len();
        let [keep, take] = if closer_above { [own.len(), upper - own.len()] } else { [lower, 0] };
        for (slots, count) in [(own, keep), (spare, take)] {
            let scores: Vec<f64> = slots.iter().map(|&at| score(at, expert)).collect();
            largest_of(&scores, count).into_iter().for_each(|i| kept[slots[i]] = true);
        }
    }
    kept
}

/// Numbers of the `k` largest, ties to the lowest.
fn largest_of(x: &[f64], k: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..x.len()).collect();
    order.sort_by(|a, b| x[*b].total_cmp(&x[*a]).then(a.cmp(b)));
    order.truncate(k);
    order
}

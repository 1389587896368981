//! Operations of the IR as expressions of PyTorch.

use crate::TorchError;
use crate::body::{At, Body};
use crate::formula;
use crate::recurrence;
use crate::scope::{Made, Names};
use crate::shape::{aligned, integer, permuted, product, reshaped, short, zeros};
use crate::tree::Expr;
use dreamc_compiler::ir::{
    Attention, Binary, DType, Dim, Mask, Op, Positions, Reduce, Rope, RopeScaling, Unary,
};
use dreamc_compiler::op::{ChooseKeys, Conv, KeyMass, KeyScores, Measure, Running, Shift, Tokens};

/// The text of an operation of these operands.
pub fn written(body: &Body, at: &At, x: &[Expr], names: &Names) -> Result<Made, TorchError> {
    let one = |e: Expr| Ok(Made::Expr(e));
    let arg = |k: usize| x[k].clone();
    let call = |name: &str| Ok(Made::Expr(Expr::call(name, x.to_vec())));
    match at.op {
        Op::Constant(c) => one(body.number(at, c.0)?),
        Op::Unary(f) => one(unary(*f, as_tensor(arg(0)))?),
        Op::Binary(f) => one(binary(body, at, *f, x)),
        Op::StopGradient => one(arg(0).method("detach", vec![])),
        Op::Cast(to) => match to.0 {
            DType::I32 => one(arg(0).method("long", vec![])),
            DType::F32 | DType::Bf16 | DType::E4m3 | DType::Packed(_) => refused("a cast"),
        },
        Op::Reduce(r) => one(reduced(at, r.how, &r.over, arg(0))),
        Op::Rms(rms) => {
            let inner = (rms.inner > 1).then(|| integer(rms.inner as i64));
            one(Expr::call("rms", [arg(0), Expr::number(rms.eps)].into_iter().chain(inner).collect()))
        }
        Op::Softmax => one(arg(0).method("softmax", vec![integer(-1)])),
        Op::Rope(r) => one(rope(r, x)?),
        Op::Reshape(_) => one(reshaped(arg(0), at.input(0), at.result(0), body.module, body.varies)),
        Op::Split(s) => one(split(body, at, &s.0, arg(0))),
        Op::Concat(_) => one(Expr::call("torch.cat", vec![list(x), integer(-1)])),
        Op::Zeros(_) => one(zeros(body.like.0, at.result(0), &|d| body.size_of(d))),
        Op::Arrange(_) => one(arranged(body, at, arg(0))),
        Op::Contract(c) => {
            one(product((arg(0), at.input(0)), (arg(1), at.input(1)), &c.over, at.result(0), body.module))
        }
        Op::ByHead(by) => one(by_head(body, at, by.over, by.part, by.first, x)),
        Op::Grouped(g) => {
            let turned = at.input(1)[1] == g.over;
            let w = if turned { arg(1).method("transpose", vec![integer(1), integer(2)]) } else { arg(1) };
            one(Expr::call("grouped", vec![arg(0), w, arg(2)]))
        }
        Op::Route(r) => one(Expr::call("route", vec![arg(0), size(body, r.k)])),
        Op::Group(g) => one(Expr::call("group", vec![arg(0), size(body, g.experts)])),
        Op::RoundGroups(r) => {
            let numbers = [r.tile, r.spare, r.none].map(|n| integer(n as i64));
            one(Expr::call("round_groups", x.iter().cloned().chain(numbers).collect()))
        }
        Op::Pick => one(arg(0).method("gather", vec![integer(-1), arg(1)])),
        Op::Gather => call("gather"),
        Op::Combine => call("combine"),
        Op::TopTokens(_) => one(Expr::call("top_tokens", vec![arg(0), Expr::number(body.capacity(at)?)])),
        Op::TakeTokens => call("take_tokens"),
        Op::PutTokens(_) => {
            one(Expr::call("put_tokens", vec![arg(0), arg(1), Expr::name(body.size_of(at.result(0)[1]))]))
        }
        Op::Decide(d) => one(Expr::call("decide", vec![arg(0), truth(d.inclusive)])),
        Op::Keep => call("keep"),
        Op::KeepInts(k) => one(Expr::call("keep", vec![arg(0), arg(1), integer(k.otherwise.into())])),
        Op::Numbers => one(arg(0).method("to", vec![Expr::name("torch.get_default_dtype()")])),
        Op::Number => one(Expr::call("number", vec![arg(0)])),
        Op::Runs(r) => one(Expr::call("runs", vec![arg(0), arg(1), truth(r.begins)])),
        Op::Conv(Conv { reverse: false, tokens: Tokens::All | Tokens::Segments }) => call("conv"),
        Op::Running(Running { reverse: false, tokens: Tokens::All, block: None }) => {
            one(arg(0).method("cumsum", vec![integer(1)]))
        }
        Op::Running(Running { reverse: false, tokens: Tokens::Segments, block: None }) => call("running"),
        Op::Running(Running { reverse: false, tokens: Tokens::All, block: Some(block) }) => {
            one(Expr::call("running_block", vec![arg(0), arg(1), integer(*block as i64)]))
        }
        Op::Running(Running { reverse: false, tokens: Tokens::Segments, block: Some(block) }) => {
            let segments = Expr::keyword("segments", arg(1));
            one(Expr::call("running_block", vec![arg(0), arg(2), integer(*block as i64), segments]))
        }
        Op::ChooseKeys(c) => one(choose_keys(body, c, x)),
        Op::KeyMass(seen) => one(key_mass(&seen.0, x)),
        Op::KeyScores(of) => one(key_scores(of, x)),
        Op::Shift(Shift { by, ahead: false, places, segments }) => {
            let mut args = vec![arg(0), integer(*by as i64)];
            args.extend(places.then(|| Expr::keyword("places", arg(1))));
            args.extend(segments.then(|| Expr::keyword("segments", arg(1 + usize::from(*places)))));
            one(Expr::call("shift", args))
        }
        Op::Conv(_) | Op::Running(_) | Op::Shift(_) => {
            refused("a sum over later tokens, or one that goes on from a state")
        }
        Op::Attention(a) => attention(at, a, x),
        Op::ReadSources(r) => {
            one(Expr::call("read_sources", x.iter().cloned().chain([Expr::number(r.eps)]).collect()))
        }
        Op::CacheWrite => call("write"),
        Op::DepthAttention(a) => one(depth_attention(&a.0, x)),
        Op::Embed => one(Expr::call("F.embedding", vec![arg(1), arg(0)])),
        Op::CrossEntropy if at.is_read(1) => refused("a log of a sum of the head's"),
        Op::CrossEntropy => one(Expr::call("cross_entropy", vec![arg(0), arg(1)])),
        Op::Recurrence(r) => recurrence::written(body, at, r, x, names),
        Op::LinearAttention(_) => refused("a recurrence in chunks"),
        Op::AddCounts => one(Expr::infix("+", arg(0), arg(1).method("diff", vec![]))),
        Op::CacheTake if !at.is_read(1) => one(arg(0).index(x[1].text())),
        Op::Admit | Op::Append | Op::CacheTake | Op::ShiftState => refused("a cache"),
        Op::HeadLoss(_) => refused("a loss that holds the head"),
        Op::Fp8(_) => refused("numbers rounded to e4m3"),
        Op::PickGrad(p) => one(Expr::call("scatter", vec![arg(0), arg(1), size(body, p.experts)])),
        Op::RmsGrad(_)
        | Op::SoftmaxGrad
        | Op::GroupedOuter(_)
        | Op::CombineGrad
        | Op::CombineGates
        | Op::ConvGrad(_)
        | Op::RecurrenceGrad(_)
        | Op::LinearAttentionGrad(_)
        | Op::AttentionGrad(_)
        | Op::KeyScoresGrad(_)
        | Op::ReadSourcesGrad(_)
        | Op::DepthAttentionGrad(_)
        | Op::EmbedGrad(_)
        | Op::CrossEntropyGrad
        | Op::HeadLossGrad(_) => refused("a derivative"),
    }
}

fn refused<T>(operation: &'static str) -> Result<T, TorchError> {
    Err(TorchError::Unsupported(operation))
}

/// A value whose methods may be called: of a plain number, a tensor of one.
fn as_tensor(x: Expr) -> Expr {
    if x.text().parse::<f64>().is_ok() { Expr::call("number", vec![x]) } else { x }
}

fn truth(x: bool) -> Expr {
    Expr::name(if x { "True" } else { "False" })
}

fn list(x: &[Expr]) -> Expr {
    let each: Vec<String> = x.iter().map(Expr::text).collect();
    Expr::name(format!("[{}]", each.join(", ")))
}

fn size(body: &Body, dim: Dim) -> Expr {
    integer(body.module.size(dim) as i64)
}

fn unary(f: Unary, x: Expr) -> Result<Expr, TorchError> {
    Ok(match f {
        Unary::Neg => Expr::Neg(Box::new(x)),
        Unary::Exp => x.method("exp", vec![]),
        Unary::Log => x.method("log", vec![]),
        Unary::Sigmoid => x.method("sigmoid", vec![]),
        Unary::Tanh => x.method("tanh", vec![]),
        Unary::Silu => Expr::call("F.silu", vec![x]),
        Unary::Gelu => {
            let approximate = Expr::keyword("approximate", Expr::name("\"tanh\""));
            Expr::call("F.gelu", vec![x, approximate])
        }
        Unary::Relu => Expr::call("F.relu", vec![x]),
        Unary::Softplus => Expr::call("softplus", vec![x]),
        Unary::Rsqrt => x.method("rsqrt", vec![]),
        Unary::Sqrt => x.method("sqrt", vec![]),
        Unary::Recip => x.method("reciprocal", vec![]),
        Unary::Square => x.method("square", vec![]),
        Unary::Positive => Expr::call("truth", vec![Expr::infix(">", x, Expr::name("0"))]),
        Unary::Sin => x.method("sin", vec![]),
        Unary::Cos => x.method("cos", vec![]),
        Unary::Floor => x.method("floor", vec![]),
        Unary::SiluGrad | Unary::GeluGrad => return refused("a derivative"),
    })
}

/// An operation of two values, the smaller broadcast by the names of its dimensions.
fn binary(body: &Body, at: &At, f: Binary, x: &[Expr]) -> Expr {
    let to = at.result(0);
    let side = |k: usize| aligned(x[k].clone(), at.input(k), to);
    // Zeros of a shape that a value is added to repeat it along that shape.
    if f == Binary::Add && body.spreads(at) {
        return if at.input(1).is_empty() { x[0].clone() } else { side(1) };
    }
    match f {
        Binary::Add => match side(1) {
            Expr::Neg(b) => Expr::infix("-", side(0), *b),
            b => Expr::infix("+", side(0), b),
        },
        Binary::Sub => Expr::infix("-", side(0), side(1)),
        Binary::Mul => Expr::infix("*", side(0), side(1)),
        Binary::Div => Expr::infix("/", side(0), side(1)),
        Binary::Max => Expr::call("larger", vec![side(0), side(1)]),
        Binary::Where => {
            let condition = Expr::infix("!=", side(1), Expr::name("0"));
            Expr::call("torch.where", vec![condition, side(0), Expr::number(0.0)])
        }
    }
}

fn reduced(at: &At, how: Reduce, over: &[Dim], x: Expr) -> Expr {
    let dims = at.input(0);
    let name = match how {
        Reduce::Sum => "sum",
        Reduce::Mean => "mean",
        Reduce::Max => "amax",
    };
    let mut places: Vec<i64> = over
        .iter()
        .filter_map(|d| dims.iter().position(|e| e == d))
        .map(|k| k as i64 - dims.len() as i64)
        .collect();
    places.sort_unstable();
    let args = match &places[..] {
        all if all.len() == dims.len() => vec![],
        [one] => vec![integer(*one)],
        many => {
            let many: Vec<String> = many.iter().map(i64::to_string).collect();
            vec![Expr::name(format!("({})", many.join(", ")))]
        }
    };
    x.method(name, args)
}

fn rope(r: &Rope, x: &[Expr]) -> Result<Expr, TorchError> {
    if r.inverse {
        return refused("a rotation backwards");
    }
    let mut args: Vec<Expr> = x.to_vec();
    args.push(Expr::number(r.base));
    let name = match (r.positions, r.chosen) {
        (Positions::Tokens, None) => "rope",
        (Positions::Tokens, Some(chosen)) => {
            let all = (0..128).filter(|pair| chosen.bits[pair / 64] >> (pair % 64) & 1 == 1);
            let pairs: Vec<String> = all.map(|pair| pair.to_string()).collect();
            args.extend([format!("[{}]", pairs.join(", ")), chosen.of.to_string()].map(Expr::name));
            "chosen_rope"
        }
        (Positions::Depth { .. }, Some(_)) => return refused("pairs of a rotation over depth"),
        (Positions::Depth { half_reversed }, None) => {
            args.push(truth(half_reversed));
            "rope_depth"
        }
    };
    args.extend(r.scaling.map(scaled));
    Ok(Expr::call(name, args))
}

/// The scaling of frequencies, as a function of them and the base.
fn scaled(scaling: RopeScaling) -> Expr {
    let (name, numbers) = match scaling {
        RopeScaling::Linear { factor } => ("linear_frequencies", vec![factor]),
        RopeScaling::Llama3 { factor, low, high, original_context } => {
            ("llama3_frequencies", vec![factor, low, high, original_context])
        }
        RopeScaling::Yarn { factor, fast, slow, original_context, truncate, attention: _ } => {
            ("yarn_frequencies", vec![factor, fast, slow, original_context, f64::from(u8::from(truncate))])
        }
    };
    let args = ["f", "base"].map(Expr::name).into_iter().chain(numbers.into_iter().map(Expr::number));
    Expr::Lambda("f, base", Box::new(Expr::call(name, args.collect())))
}

/// All parts, or of one that alone is read its place in the whole.
fn split(body: &Body, at: &At, parts: &[Dim], x: Expr) -> Expr {
    let sizes: Vec<u64> = parts.iter().map(|&d| body.module.size(d)).collect();
    let read: Vec<usize> = (0..parts.len()).filter(|&k| at.is_read(k)).collect();
    if let [only] = read[..] {
        let from: u64 = sizes[..only].iter().sum();
        return x.index(format!("..., {from}:{}", from + sizes[only]));
    }
    let sizes: Vec<String> = sizes.iter().map(u64::to_string).collect();
    x.method("split", vec![Expr::name(format!("({})", sizes.join(", "))), integer(-1)])
}

fn arranged(body: &Body, at: &At, x: Expr) -> Expr {
    let (from, to) = (at.input(0), at.result(0));
    if from.len() == to.len() {
        let order: Vec<usize> = to.iter().filter_map(|d| from.iter().position(|e| e == d)).collect();
        return permuted(x, &order);
    }
    let sizes = to.iter().map(|d| match from.contains(d) {
        true => integer(-1),
        false => Expr::name(body.size_of(*d)),
    });
    let sizes = sizes.collect();
    // Dimensions of one in front have to be there for those that follow to have their places.
    aligned(x, from, to).method("expand", sizes)
}

fn by_head(body: &Body, at: &At, over: Dim, part: Dim, first: u64, x: &[Expr]) -> Expr {
    let (from, w, to) = (at.input(0), at.input(1), at.result(0));
    let rows = body.module.size(part);
    let mut matrix = x[1].clone();
    if first > 0 || rows != body.module.size(w[1]) {
        matrix = matrix.index(format!(":, {first}:{}", first + rows));
    }
    let mut dims = w.to_vec();
    dims[1] = part;
    product((x[0].clone(), from), (matrix, &dims), &[over], to, body.module)
}

/// By PyTorch's own attention where that says the same, by scores otherwise.
fn attention(at: &At, a: &Attention, x: &[Expr]) -> Result<Made, TorchError> {
    // The draws of dropout are PyTorch's own.
    let chosen = a.draws();
    let (masks, reads) = x[Attention::MASK..].split_at(chosen + usize::from(a.among.is_some()));
    let (positions, segments) = a.mask_operands();
    let positions = positions.map(|[q, k]| Expr::name(format!("({}, {})", masks[q].text(), masks[k].text())));
    let mut seen = vec![x[0].clone(), x[1].clone()];
    seen.extend(a.window.map(|w| Expr::keyword("window", integer(w as i64))));
    seen.extend(segments.map(|k| Expr::keyword("segments", masks[k].clone())));
    seen.extend(positions.clone().map(|p| Expr::keyword("positions", p)));
    seen.extend(a.every.map(|every| Expr::keyword("every", integer(every as i64))));
    seen.extend(a.among.map(|among| {
        let chosen = masks[chosen].text();
        Expr::keyword("among", Expr::name(format!("({chosen}, {})", among.block)))
    }));
    let plain = seen.len() == 2;
    let seen = Expr::call("causal", seen);
    let mut args: Vec<Expr> = x[..3].iter().cloned().chain([Expr::number(a.scale)]).collect();
    let by_scores = a.softcap.is_some()
        || a.program.is_some()
        || a.mask == Mask::Positions
        || at.is_read(1)
        || a.dropout.is_some()
        || a.listed();
    if !by_scores {
        args.extend((!plain).then_some(seen));
        return Ok(Made::Expr(Expr::call("attention", args)));
    }
    args.push(seen);
    if let Some(score) = score(a, reads)? {
        args.push(Expr::keyword("score", Expr::Lambda("s, i, j, head", Box::new(score))));
    }
    if let Some(program) = a.program.as_deref()
        && let Some(mask) = &program.mask
    {
        let mask = formula::expression(mask, program, reads)?;
        args.push(Expr::keyword("mask", Expr::Lambda("i, j, head", Box::new(mask))));
    }
    args.extend(positions.map(|p| Expr::keyword("positions", p)));
    // PyTorch draws, and none are dropped where the module evaluates.
    args.extend(
        a.dropout.map(|p| Expr::keyword("dropout", Expr::name(format!("{p} if self.training else 0.0")))),
    );
    let call = Expr::call("scored_attention", args);
    Ok(Made::Expr(match (at.is_read(0), at.is_read(1)) {
        (true, true) => call,
        (false, true) => call.index("1"),
        (_, false) => call.index("0"),
    }))
}

/// The blocks of keys that queries read.
fn choose_keys(body: &Body, c: &ChooseKeys, x: &[Expr]) -> Expr {
    let masks = &x[ChooseKeys::MASK..c.weights()];
    let (positions, segments) = c.seen.mask_operands();
    let positions = positions.map(|[q, k]| Expr::name(format!("({}, {})", masks[q].text(), masks[k].text())));
    let block = integer(c.seen.every.unwrap_or(1) as i64);
    let mut seen = vec![x[0].clone(), x[1].clone(), Expr::keyword("every", block.clone())];
    seen.extend(segments.map(|k| Expr::keyword("segments", masks[k].clone())));
    seen.extend(positions.clone().map(|p| Expr::keyword("positions", p)));
    let measure = match c.measure {
        Measure::Products => "\"products\"",
        Measure::Relu => "\"relu\"",
        Measure::Softmax => "\"softmax\"",
    };
    let mut args = vec![x[0].clone(), x[1].clone(), Expr::call("causal", seen), block];
    args.extend([size(body, c.count), size(body, c.lists)]);
    args.push(Expr::keyword("scale", Expr::number(c.seen.scale)));
    args.push(Expr::keyword("measure", Expr::name(measure)));
    args.extend((c.near > 0).then(|| Expr::keyword("near", integer(c.near as i64))));
    args.extend((c.first > 0).then(|| Expr::keyword("first", integer(c.first as i64))));
    args.extend(c.weighed.then(|| Expr::keyword("weights", x[c.weights()].clone())));
    args.extend(positions.map(|p| Expr::keyword("positions", p)));
    Expr::call("choose_keys", args)
}

/// The keys that queries see of those that were chosen, the choice, and the positions of both; the
/// operands of the mask are `masks`.
fn chosen(a: &Attention, x: &[Expr], masks: &[Expr]) -> [Option<Expr>; 3] {
    let (positions, segments) = a.mask_operands();
    let positions = positions.map(|[q, k]| Expr::name(format!("({}, {})", masks[q].text(), masks[k].text())));
    let positions = positions.map(|p| Expr::keyword("positions", p));
    let among = a.among.map(|among| {
        Expr::keyword("among", Expr::name(format!("({}, {})", masks[a.chosen()].text(), among.block)))
    });
    let mut seen = vec![x[0].clone(), x[1].clone()];
    seen.extend(a.window.map(|w| Expr::keyword("window", integer(w as i64))));
    seen.extend(segments.map(|k| Expr::keyword("segments", masks[k].clone())));
    seen.extend(positions.clone());
    seen.extend(a.every.map(|every| Expr::keyword("every", integer(every as i64))));
    seen.extend(among.clone());
    [Some(Expr::call("causal", seen)), among, positions]
}

/// How much attention reads of each block that was chosen.
fn key_mass(a: &Attention, x: &[Expr]) -> Expr {
    let [seen, among, positions] = chosen(a, x, &x[KeyMass::MASK..]);
    let args = x[..KeyMass::MASK].iter().cloned().chain(seen).chain([Expr::number(a.scale)]);
    Expr::call("key_mass", args.chain(among).chain(positions).collect())
}

/// The scores of tokens that were chosen.
fn key_scores(of: &KeyScores, x: &[Expr]) -> Expr {
    let [seen, among, positions] = chosen(&of.seen, x, &x[KeyScores::MASK..of.weights()]);
    let mut args: Vec<Expr> = x[..2].iter().cloned().chain(seen).collect();
    args.push(Expr::number(of.seen.scale));
    args.extend(among);
    args.extend(of.relu.then(|| Expr::keyword("relu", Expr::name("True"))));
    args.extend(of.weighed.then(|| Expr::keyword("weights", x[of.weights()].clone())));
    args.extend(positions);
    Expr::call("key_scores", args)
}

/// The score of a pair, where it is not the scaled product.
fn score(a: &Attention, reads: &[Expr]) -> Result<Option<Expr>, TorchError> {
    if let Some(program) = a.program.as_deref()
        && let Some(score) = &program.score
    {
        return formula::expression(score, program, reads).map(Some);
    }
    Ok(a.softcap.map(|c| {
        let inner = Expr::infix("/", Expr::name("s"), Expr::number(c));
        Expr::infix("*", Expr::number(c), Expr::call("torch.tanh", vec![inner]))
    }))
}

fn depth_attention(a: &Attention, x: &[Expr]) -> Expr {
    let mut args: Vec<Expr> = x.iter().cloned().chain([Expr::number(a.scale)]).collect();
    args.extend(a.softcap.map(|c| Expr::keyword("softcap", Expr::number(c))));
    args.extend(a.window.map(|w| Expr::keyword("window", integer(w as i64))));
    Expr::call("depth_attention", args)
}

/// A name for a result, from what makes it.
pub fn hint(body: &Body, at: &At, k: usize, written: Option<&Expr>) -> String {
    let last = |d: &[Dim]| d.last().map_or("h".into(), |d| short(body.module.name(*d)));
    match at.op {
        Op::Group(_) => ["order", "offsets", "inverse"][k].into(),
        // Keys and values have one size.
        Op::Split(s) if k == 2 && s.0.len() == 3 && s.0[1] == s.0[2] => "v".into(),
        Op::Split(s) => short(body.module.name(s.0[k])),
        Op::Attention(_) => ["o", "lse"][k.min(1)].into(),
        Op::DepthAttention(_) => "o".into(),
        Op::CrossEntropy => "nll".into(),
        Op::TopTokens(_) => "index".into(),
        Op::Decide(_) => "places".into(),
        Op::Route(_) | Op::ChooseKeys(_) => "chosen".into(),
        Op::KeyMass(_) => "mass".into(),
        Op::KeyScores(_) => "scores".into(),
        Op::Recurrence(_) => "o".into(),
        Op::Combine => "mixed".into(),
        Op::Gather => "rows".into(),
        _ => written.map_or_else(|| last(at.result(k)), crate::scope::name_of),
    }
}

//! Statements of a function, or of a part of one: which values get a name, and which are written
//! where they are read.
//!
//! *In*: items in order, each an operation or a call, with the values that they read and give.
//! *Out*: statements. *Promise*: a value that two read, or that the text names, has a name; a name
//! is given again only where nothing reads the value that had it.

use crate::tree::{Expr, Stmt};
use dreamc_compiler::ir::Value;
use std::collections::{HashMap, HashSet};

/// Something that is computed.
pub struct Item<T> {
    /// Values that it reads, in order, as often as its text mentions them.
    pub reads: Vec<Value>,
    /// Values that it gives and something reads; `None` for one that nothing does.
    pub gives: Vec<Option<Value>>,
    /// Its kind.
    pub what: T,
}

/// The text of an item.
pub enum Made {
    /// One expression; with several results, a tuple.
    Expr(Expr),
    /// Statements, and the results.
    Block(Vec<Stmt>, Vec<Expr>),
}

/// Says how items are written.
pub trait Writer<T> {
    /// Its text, of those of what it reads.
    fn write(&mut self, item: &Item<T>, args: &[Expr], names: &Names) -> Result<Made, crate::TorchError>;

    /// The name that a result should have, and whether the text of the specification says so.
    fn hint(&self, item: &Item<T>, value: Value, args: &[Expr]) -> (String, bool);

    /// Dimensions, where a comment should say them.
    fn comment(&self, item: &Item<T>) -> String;

    /// Whether operands need to be names.
    fn wants_names(&self, item: &Item<T>) -> bool;
}

/// Names that are in use.
#[derive(Default)]
pub struct Names {
    taken: HashMap<String, Option<Value>>,
}

/// Words that Python or the module has for something else.
const WORDS: [&str; 47] = [
    "self", "and", "as", "assert", "async", "await", "break", "class", "continue", "def", "del", "elif",
    "else", "except", "False", "finally", "for", "from", "global", "if", "import", "in", "is", "lambda",
    "None", "nonlocal", "not", "or", "pass", "raise", "return", "True", "try", "while", "with", "yield",
    "torch", "nn", "F", "math", "len", "max", "min", "sum", "range", "float", "int",
];

/// A name of Python's, made of any text.
pub fn identifier(text: &str) -> String {
    let mut name: String =
        text.chars().map(|c| if c.is_alphanumeric() || c == '_' { c } else { '_' }).collect();
    if name.is_empty() || name.starts_with(|c: char| c.is_numeric()) {
        name.insert(0, '_');
    }
    let helper = crate::helpers::is_helper(&name);
    if WORDS.contains(&name.as_str()) || helper { name + "_" } else { name }
}

impl Names {
    /// The same; none may be given again.
    pub fn held(&self) -> Names {
        Names { taken: self.taken.keys().map(|name| (name.clone(), None)).collect() }
    }

    /// Takes a name for good.
    pub fn take(&mut self, name: &str) -> String {
        self.free(name, None, |_| false)
    }

    /// A name like this one that is free, or whose value may go.
    fn free(&mut self, name: &str, value: Option<Value>, gone: impl Fn(Value) -> bool) -> String {
        let name = identifier(name);
        let mut tried = name.clone();
        let mut n = 1;
        while let Some(owner) = self.taken.get(&tried) {
            if owner.is_some_and(&gone) {
                break;
            }
            n += 1;
            tried = format!("{name}{n}");
        }
        self.taken.insert(tried.clone(), value);
        tried
    }
}

/// Facts about values while statements are made.
struct Scope {
    names: Names,
    /// The text of each value: a name, or what is written where it is read.
    exprs: HashMap<Value, Expr>,
    last: HashMap<Value, usize>,
    stmts: Vec<Stmt>,
}

/// The statements of items, of whose parameters the texts are given, and the texts of `wanted`.
pub fn statements<T, W: Writer<T>>(
    items: &[Item<T>],
    params: &[(Value, Expr)],
    names: Names,
    wanted: &[Value],
    writer: &mut W,
) -> Result<(Vec<Stmt>, Vec<Expr>), crate::TorchError> {
    let inlined = inlined(items, wanted, writer);
    let mut scope = Scope {
        names,
        exprs: params.iter().cloned().collect(),
        last: last_uses(items, wanted, &inlined),
        stmts: vec![],
    };
    for (value, expr) in params {
        if let Expr::Atom(name) = expr {
            scope.names.taken.insert(name.clone(), Some(*value));
        }
    }
    for (at, item) in items.iter().enumerate() {
        scope.item(at, item, &inlined, writer)?;
    }
    let long = |scope: &Scope| wanted.iter().map(|v| scope.exprs[v].text().len() + 2).sum::<usize>() > 80;
    for v in wanted {
        if wanted.len() > 1 && long(&scope) {
            scope.bind_operand(*v, usize::MAX);
        }
    }
    let results = wanted.iter().map(|v| scope.exprs[v].clone()).collect();
    Ok((scope.stmts, results))
}

/// Values that are written where they are read: read once, and not named by the text.
fn inlined<T, W: Writer<T>>(items: &[Item<T>], wanted: &[Value], writer: &W) -> HashSet<Value> {
    let mut uses: HashMap<Value, usize> = HashMap::new();
    let read = items.iter().flat_map(|item| {
        let twice = if writer.wants_names(item) { 2 } else { 1 };
        item.reads.iter().map(move |v| (*v, twice))
    });
    for (v, n) in read.chain(wanted.iter().map(|v| (*v, 1))) {
        *uses.entry(v).or_default() += n;
    }
    let once = |item: &Item<T>| match item.gives[..] {
        [Some(v)] => (uses.get(&v) == Some(&1) && !writer.hint(item, v, &[]).1).then_some(v),
        _ => None,
    };
    items.iter().filter_map(once).collect()
}

/// The item at which each value's text is written last.
fn last_uses<T>(items: &[Item<T>], wanted: &[Value], inlined: &HashSet<Value>) -> HashMap<Value, usize> {
    let mut last: HashMap<Value, usize> = wanted.iter().map(|v| (*v, usize::MAX)).collect();
    for (at, item) in items.iter().enumerate().rev() {
        let own = item.gives.iter().flatten().filter(|v| inlined.contains(v));
        let at = own.filter_map(|v| last.get(v)).copied().max().unwrap_or(at);
        for v in &item.reads {
            let entry = last.entry(*v).or_insert(at);
            *entry = (*entry).max(at);
        }
    }
    last
}

impl Scope {
    fn item<T, W: Writer<T>>(
        &mut self,
        at: usize,
        item: &Item<T>,
        inlined: &HashSet<Value>,
        writer: &mut W,
    ) -> Result<(), crate::TorchError> {
        if writer.wants_names(item) {
            for v in &item.reads {
                self.bind_operand(*v, at);
            }
        }
        loop {
            let args: Vec<Expr> = item.reads.iter().map(|v| self.exprs[v].clone()).collect();
            let made = writer.write(item, &args, &self.names)?;
            let expr = match made {
                Made::Block(stmts, results) => {
                    self.stmts.extend(stmts);
                    for (value, expr) in item.gives.iter().zip(results) {
                        if let Some(value) = value {
                            let (hint, _) = writer.hint(item, *value, &args);
                            self.assign(&[Some(*value)], vec![hint], expr, writer.comment(item), at);
                        }
                    }
                    return Ok(());
                }
                Made::Expr(expr) => expr,
            };
            if expr.text().chars().count() > 84 {
                let longest =
                    (0..args.len()).filter(|&k| !args[k].is_atom()).max_by_key(|&k| args[k].text().len());
                if let Some(k) = longest.filter(|&k| args[k].text().len() > 12) {
                    self.bind_operand(item.reads[k], at);
                    continue;
                }
            }
            match item.gives[..] {
                [Some(value)] if inlined.contains(&value) || expr.is_atom() => {
                    self.keep(&expr, value);
                    self.exprs.insert(value, expr);
                }
                _ => {
                    let hint =
                        |v: &Option<Value>| v.map_or("_".to_string(), |v| writer.hint(item, v, &args).0);
                    let hints = item.gives.iter().map(hint).collect();
                    self.assign(&item.gives, hints, expr, writer.comment(item), at);
                }
            }
            return Ok(());
        }
    }

    /// A name that a second value has, too, stays until nothing reads either.
    fn keep(&mut self, expr: &Expr, value: Value) {
        let Expr::Atom(name) = expr else { return };
        let last = self.last.get(&value).copied();
        if let (Some(Some(owner)), Some(last)) = (self.names.taken.get(name), last) {
            let until = self.last.entry(*owner).or_insert(last);
            *until = (*until).max(last);
        }
    }

    /// Gives an operand a name, where it is written out.
    fn bind_operand(&mut self, value: Value, at: usize) {
        let expr = self.exprs[&value].clone();
        if !expr.is_atom() {
            let name = name_of(&expr);
            // Other operands of the item keep its name.
            self.assign(&[Some(value)], vec![name], expr, String::new(), at.saturating_sub(1));
        }
    }

    fn assign(
        &mut self,
        values: &[Option<Value>],
        hints: Vec<String>,
        expr: Expr,
        comment: String,
        at: usize,
    ) {
        let mut targets = vec![];
        for (value, hint) in values.iter().zip(hints) {
            let Some(value) = value else {
                targets.push("_".into());
                continue;
            };
            let last = &self.last;
            let name = self.names.free(&hint, Some(*value), |old| last.get(&old).is_none_or(|&l| l <= at));
            self.exprs.insert(*value, Expr::name(name.clone()));
            targets.push(name);
        }
        if let ([target], Expr::Atom(text)) = (&targets[..], &expr)
            && target == text
        {
            return;
        }
        self.stmts.push(Stmt::Assign(targets, expr, comment));
    }
}

/// A name for what an expression computes: that of the tensor that it multiplies by, or of what it
/// changes.
pub fn name_of(expr: &Expr) -> String {
    match expr {
        Expr::Atom(text) if text.starts_with(|c: char| c.is_alphabetic()) && text.len() < 20 => {
            text.trim_end_matches(|c: char| c.is_numeric()).trim_end_matches('_').to_string()
        }
        Expr::Atom(_) => "h".into(),
        Expr::Attribute(x, last) if last == "weight" => name_of(x),
        Expr::Attribute(_, last) => last.clone(),
        Expr::Index(x, _) => name_of(x),
        Expr::Neg(x) | Expr::Keyword(_, x) | Expr::Lambda(_, x) => name_of(x),
        Expr::Infix(_, a, b) => match (name_of(a), name_of(b)) {
            (a, b) if a == "h" || a == "x" => b,
            (a, _) => a,
        },
        Expr::Call(f, args) => match &**f {
            Expr::Atom(f) if f == "F.linear" || f == "grouped" => args.get(1).map_or("h".into(), name_of),
            Expr::Atom(f) if f == "route" => "chosen".into(),
            Expr::Atom(f) if f.ends_with("attention") => "o".into(),
            Expr::Atom(_) => args.first().map_or("h".into(), name_of),
            Expr::Attribute(x, part) if **x == Expr::name("self") => part.clone(),
            Expr::Attribute(x, f) if f == "softmax" || f == "sigmoid" => match name_of(x) {
                name if name == "h" => "p".into(),
                name => name,
            },
            Expr::Attribute(x, _) => name_of(x),
            f => name_of(f),
        },
    }
}

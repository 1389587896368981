//! A model as one readable PyTorch module.
//!
//! *In*: a model. *Out*: [`Module`], the text of `model.py`. *Promise*: it is printed from the IR
//! as lowered, before any rewriting: one class for each component, named as in the specification,
//! one for each distinct layer, and `Model` around them; tensors have the names of checkpoints. An
//! operation with no form in PyTorch is refused by name.

mod body;
mod classes;
mod docs;
mod formula;
mod helpers;
mod layer;
mod model;
mod ops;
mod recurrence;
mod scope;
mod shape;
mod tree;

use dreamc_compiler::CompileError;
use dreamc_compiler::architecture::{Architecture, skips};
use dreamc_compiler::ir::{Attention, Binding, Dim, Dims, Function, Input, Node, Op, Value};
use dreamc_compiler::lower::{Shape, lower};
use dreamc_dsl::spec::{Model, SkipRule};
use layer::{Class, Source};
use std::collections::BTreeMap;
use thiserror::Error;

/// Why a model has no module.
#[derive(Debug, Error)]
pub enum TorchError {
    /// It does not compile.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// An operation that the printer has no form for.
    #[error("{0} has no form in a PyTorch module yet")]
    Unsupported(&'static str),
    /// A value that no caller has.
    #[error("`{0}` is a value that a PyTorch module does not hand on")]
    Argument(String),
}

/// A module that was written.
#[derive(Clone, Debug, PartialEq)]
pub struct Module {
    /// The text of `model.py`.
    pub text: String,
    /// Its classes, `Model` last, and the functions that they call: without imports and `load`.
    pub code: String,
    /// Whether the code calls functions of Python's `math`.
    pub math: bool,
    /// Whether the stream begins with numbers that are given, as `noise`.
    pub noise: bool,
    /// Tensors whose name in the module is another than in checkpoints.
    pub renamed: BTreeMap<String, String>,
}

/// Options of a module.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Whether attention and recurrences stop at the ends of documents.
    pub segments: bool,
    /// Weight of `mean(logsumexp(logits)²)` in the loss.
    pub z_loss: f64,
}

/// Imports of the code of every module.
pub const IMPORTS: &str = "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n";

/// Writes a model as a module.
pub fn module(model: &Model, options: Options) -> Result<Module, TorchError> {
    let architecture = Architecture::new(model, None)?;
    let shape = |batch, sequence| Shape {
        batch,
        sequence,
        segments: options.segments,
        z_loss: options.z_loss,
        ..Shape::default()
    };
    let sequence = model.context.clamp(2, 1 << 16);
    let mut lowered = lower(&architecture, shape(3, sequence))?;
    lowered.module.functions.values_mut().for_each(simplify);
    let mut other = lower(&architecture, shape(2, sequence / 2))?;
    other.module.functions.values_mut().for_each(simplify);
    let dims = lowered.module.dims.clone();
    let sizes = other.module.dims.clone();
    // Of a share of the tokens there may be as many of both.
    let shares: Dims = lowered.module.functions.values().flat_map(|f| &f.nodes).filter_map(share).collect();
    let varies = move |d: Dim| {
        shares.contains(&d)
            || dims.get_index(d.0 as usize).is_none_or(|(name, size)| sizes.get(name) != Some(size))
    };
    let source = Source {
        architecture: &architecture,
        lowered: &lowered,
        other: &other,
        varies: &varies,
        capacities: capacities(&architecture),
    };
    let mut classes: Vec<Class> = vec![];
    let mut calls = BTreeMap::new();
    let mut homes: Vec<(String, String)> = vec![];
    let leaders: Vec<usize> =
        (0..architecture.bodies.len()).filter(|&b| architecture.leader(b) == b).collect();
    for leader in leaders {
        let (parts, mut layer, mut called) = layer::classes(&source, leader)?;
        for part in parts {
            let name = add(&mut classes, part.clone());
            if name != part.name {
                rename(&mut layer, &part.name, &name);
            }
        }
        // Bodies of one loop have one set of tensors: they are methods of one class.
        let prefix = source.prefix(leader);
        let same = homes.iter().find(|(p, _)| prefix.as_ref() == Some(p)).map(|(_, name)| name.clone());
        match same.and_then(|name| classes.iter_mut().find(|c| c.name == name)) {
            Some(home) => {
                home.init.extend(layer.init);
                for (name, args, body) in layer.methods {
                    let name =
                        if name == "forward" { architecture.bodies[leader].name.clone() } else { name };
                    home.methods.push((name, args, body));
                }
                for (_, call) in &mut called {
                    call.method.get_or_insert_with(|| architecture.bodies[leader].name.clone());
                }
            }
            None => {
                homes.extend(prefix.map(|prefix| (prefix, layer.name.clone())));
                classes.push(layer);
            }
        }
        calls.extend(called);
    }
    classes.push(model::Writer { source: &source, calls }.class()?);
    let mut renamed = BTreeMap::new();
    let globals = lowered.globals.iter().map(|w| w.name.clone());
    let own = architecture.prefixes().flat_map(|(prefix, (body, _))| {
        lowered.weights[body].iter().map(move |w| format!("{prefix}.{}", w.name)).collect::<Vec<_>>()
    });
    for name in globals.chain(own) {
        let other = classes::renamed(&name);
        if other != name {
            renamed.insert(name, other);
        }
    }
    let (code, math) = code(&classes);
    let given = |f: &Function| f.param_of(Binding::Batch(Input::Noise)).is_some();
    let noise = lowered.module.functions.values().any(given);
    Ok(Module { text: text(model, (&code, math), &renamed), code, math, noise, renamed })
}

/// The dimension of the tokens that a choice of them gives.
fn share(node: &Node) -> Option<Dim> {
    if let Op::TopTokens(top) = &node.op { Some(top.k) } else { None }
}

/// Puts what a module says in another way than the compiler into its words.
fn simplify(f: &mut Function) {
    put_back(f);
    undrawn(f);
}

/// PyTorch draws for dropout by itself: attention loses that operand.
fn undrawn(f: &mut Function) {
    for node in &mut f.nodes {
        if let Op::Attention(a) = &node.op
            && a.dropout.is_some()
        {
            node.inputs.remove(Attention::MASK + a.draws());
        }
    }
}

/// A row of a cache that is taken and put back is read: the cache is what it was.
fn put_back(f: &mut Function) {
    let taken = |f: &Function, v: Value| {
        f.nodes.iter().find(|n| n.op == Op::CacheTake && n.results().any(|r| r == v)).cloned()
    };
    for k in 0..f.nodes.len() {
        let write = f.nodes[k].clone();
        let [cache, value, row] = write.inputs[..] else { continue };
        let Some(take) = taken(f, cache).filter(|_| write.op == Op::CacheWrite) else { continue };
        let same = take.first == value && take.inputs[1] == row && cache.0 == take.first.0 + 1;
        if !same {
            continue;
        }
        let rename = |v: &mut Value| {
            if *v == write.first {
                *v = take.inputs[0];
            }
        };
        f.nodes.iter_mut().flat_map(|n| &mut n.inputs).for_each(rename);
        f.results.iter_mut().map(|(_, v)| v).for_each(rename);
    }
}

/// The README of an exported folder.
pub fn readme(model: &Model, weights: bool) -> String {
    let load = match weights {
        true => "    model = load(\".\")                    # with the weights of model.safetensors\n",
        false => "    model = Model()                      # begins as the recipe says\n",
    };
    let import = if weights { "load" } else { "Model" };
    format!(
        "# {}\n\n`dreamc export torch` wrote `model.py` from `spec.yaml`. It needs `torch`{}.\n\n    from model import {import}\n\n{load}    \
         logits = model(ids)                  # ids [batch, seq] -> [batch, seq, {}]\n    \
         logits, loss = model(ids, targets)   # a negative target is none\n    \
         text = model.generate(ids, 20)       # greedy, without a cache\n",
        model.name,
        if weights { " and `safetensors`" } else { "" },
        model.vocab
    )
}

/// Adds a class, unless it is there; its name, which differs where another class has it.
fn add(classes: &mut Vec<Class>, mut class: Class) -> String {
    let name = class.name.clone();
    let mut n = 1;
    loop {
        match classes.iter().find(|c| c.name == class.name) {
            None => {
                classes.push(class.clone());
                return class.name;
            }
            Some(same) if same.text() == class.text() => return class.name,
            Some(_) => {
                n += 1;
                class.name = format!("{name}{n}");
            }
        }
    }
}

fn rename(layer: &mut Class, from: &str, to: &str) {
    for stmt in &mut layer.init {
        if let tree::Stmt::Assign(_, value, _) = stmt
            && *value == tree::Expr::call(from, vec![])
        {
            *value = tree::Expr::call(to, vec![]);
        }
    }
}

/// Shares of tokens that `skip`s take by looking at the whole sequence.
fn capacities(architecture: &Architecture) -> Vec<f64> {
    let mut found = vec![];
    for body in &architecture.bodies {
        let dreamc_compiler::architecture::Work::Layer(expr) = &body.work else { continue };
        for (skip, _) in skips(expr) {
            if let SkipRule::TopK { capacity, .. } = skip.rule {
                found.push(capacity);
            }
        }
    }
    found
}

/// The classes and what they call, and whether that is in Python's `math`.
fn code(classes: &[Class]) -> (String, bool) {
    let body = classes.iter().map(Class::text).collect::<Vec<_>>().join("\n\n");
    let mut parts = helpers::needed(&body);
    parts.push(body.trim_end());
    let math = parts.iter().any(|part| part.contains("math."));
    (parts.join("\n\n\n"), math)
}

/// The whole text.
fn text(model: &Model, (code, math): (&str, bool), renamed: &BTreeMap<String, String>) -> String {
    let mut out = format!("\"\"\"`{}`, as `dreamc export torch` writes it.\n\n", model.name);
    out.push_str("    model = load(\"FOLDER\")            # model.safetensors beside this file\n");
    out.push_str("    logits = model(ids)               # ids [batch, seq]\n");
    out.push_str("    logits, loss = model(ids, targets)\n\"\"\"\n\n");
    if math {
        out.push_str("import math\n");
    }
    out.push_str("import pathlib\n\n");
    out.push_str(IMPORTS);
    out.push_str(&format!("\n\n{code}\n\n\n{}", loader(renamed)));
    out
}

/// The function that reads weights.
fn loader(renamed: &BTreeMap<String, String>) -> String {
    let mut out = String::new();
    if !renamed.is_empty() {
        out.push_str("# Tensors whose names are words of Python or PyTorch.\nRENAMED = {\n");
        for (from, to) in renamed {
            out.push_str(&format!("    \"{from}\": \"{to}\",\n"));
        }
        out.push_str("}\n\n\n");
    }
    let name =
        if renamed.is_empty() { "tensors" } else { "{RENAMED.get(k, k): v for k, v in tensors.items()}" };
    out.push_str(&format!(
        "def load(folder):\n    \"\"\"The model with the weights of `model.safetensors` in a folder.\"\"\"\n    \
         from safetensors.torch import load_file\n\n    model = Model()\n    \
         tensors = load_file(pathlib.Path(folder) / \"model.safetensors\")\n    \
         model.load_state_dict({name})\n    return model\n"
    ));
    out
}

//! Tests that are files: `compiler/filetests/**/*.ir`, after cranelift's.
//!
//! The first line is a command, `; test print`; then come the input and, after `; expect:`, the
//! expected output as comments. `BLESS=1 cargo test -p dreamc-compiler --test filetests` replaces
//! the expected output by the output found. Each file is a test of its name:
//! `cargo test -p dreamc-compiler --test filetests rewrite/window`.
//!
//! | command | output |
//! |---|---|
//! | `print` | the module as printed, or the parser's error |
//! | `verify` | `ok`, or the rule broken |
//! | `rewrite RULE …` | what those rules find in the first function, whether it is used, and the function then |
//! | `schedule` | the launches of the last function, with the places whose rows alone are needed where not all are; results called `d.…` are added to what is there |
//! | `interpret` | the results of the last function, or of `; call @f`, and the multiply-adds executed |
//!
//! An interpreted function takes its arguments from lines `; set %x = 1 2 3` (elements in row-major
//! order), or `; set %x = all 0.5`. A rewritten one is called many times for each set of weights,
//! and `; index %x = 0` says that an index is that number in every call.

use dreamc_compiler::ir::interpret::{Data, execute};
use dreamc_compiler::ir::{Function, Module, Port, Tensor, Type, parse, verify};
use dreamc_compiler::rewrite::{self, Rewriting, Stage};
use dreamc_compiler::schedule::{Bind, LocalOperand, Place, schedule};
use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;

#[path = "../../tests/support/files.rs"]
mod files;

fn main() -> ExitCode {
    files::run(&Path::new(env!("CARGO_MANIFEST_DIR")).join("filetests"), |input| Ok(run(input)))
}

fn schedule_test(module: &Module) -> Result<String, String> {
    let f = module.functions.values().next_back().ok_or("no function")?;
    let bind = |(port, _): &(Port, _)| match f.state_of(port) {
        Some(state) => Bind::State(state.0),
        None if port.binding.is_cotangent() => Bind::Add,
        None => Bind::Store,
    };
    let bind: Vec<Bind> = f.results.iter().map(bind).collect();
    let scheduled = schedule(module, f, &bind).map_err(|e| e.to_string())?;
    let place = |operand: &LocalOperand| match operand {
        LocalOperand::Index(i) => f.params[*i as usize].name.clone(),
        LocalOperand::View(view) => match view.place {
            Place::Param(i) => f.params[i as usize].name.clone(),
            Place::Result(i) => format!("={}", f.results[i as usize].0),
            Place::Temp(i) => format!("t{i}"),
        },
    };
    let mut text = String::new();
    for launch in &scheduled.launches {
        let operands: Vec<String> = launch.operands.iter().map(place).collect();
        let places = launch.places.iter().map(|p| format!(" where {} >= 0", place(p))).collect::<String>();
        let _ = writeln!(text, "{} ({}){places}", launch.kernel, operands.join(", "));
    }
    Ok(text)
}

fn run(input: &str) -> String {
    let command = input.lines().next().and_then(|l| l.strip_prefix("; test ")).unwrap_or("").trim();
    let module = match parse(input) {
        Ok(module) => module,
        Err(error) => return format!("error: {error}"),
    };
    match command {
        "print" => module.to_string(),
        "verify" => verify(&module).map_or_else(|e| format!("error: {e}"), |()| "ok".into()),
        "schedule" => schedule_test(&module).unwrap_or_else(|e| format!("error: {e}")),
        "interpret" => interpret_test(input, &module).unwrap_or_else(|e| format!("error: {e}")),
        _ => match command.strip_prefix("rewrite ") {
            Some(rules) => rewrite_test(input, &module, rules).unwrap_or_else(|e| format!("error: {e}")),
            None => format!(
                "unknown command `{command}`; the first line is `; test print`, `verify`, `schedule`, `rewrite` or `interpret`"
            ),
        },
    }
}

fn rewrite_test(input: &str, module: &Module, names: &str) -> Result<String, String> {
    let names: Vec<&str> = names.split_whitespace().collect();
    let unknown = |n: &&str| format!("no rule `{n}`");
    let stages = names.iter().map(|n| rewrite::rules::find(n).map(|r| r.stage).ok_or_else(|| unknown(n)));
    let stages: Vec<Stage> = stages.collect::<Result<_, _>>()?;
    let mut indices = vec![];
    for line in input.lines().filter_map(|l| l.strip_prefix("; index %")) {
        let (name, number) = line.split_once(" = ").ok_or("`; index %x = 0` has a number")?;
        indices.push((name.to_string(), number.trim().parse().map_err(|_| format!("`{number}`"))?));
    }
    let stage = stages.into_iter().max().unwrap_or(Stage::Differentiable);
    let context = rewrite::Context { stage, uses: 1e6, indices, packed: vec![], narrow: false };
    let function = module.functions.values().next().ok_or("no function")?;
    let mut module = module.clone();
    let (function, report) = rewrite::rewrite(&mut module, function, &context, &Rewriting::only(&names))
        .map_err(|e| e.to_string())?;
    let mut out = String::new();
    for f in &report.firings {
        let _ = writeln!(out, "{}: {}", f.rule, if f.used { "used" } else { "found, and not worth it" });
        f.sites.iter().for_each(|site| _ = writeln!(out, "  {site}"));
    }
    if report.firings.is_empty() {
        out += "nothing found\n";
    }
    Ok(out + "\n" + &module.show_function(&function))
}

fn interpret_test(input: &str, module: &Module) -> Result<String, String> {
    let call = input.lines().find_map(|l| l.strip_prefix("; call @"));
    let function = match call {
        Some(name) => module.functions.get(name.trim()),
        None => module.functions.values().last(),
    };
    let function = function.ok_or("no such function")?;
    let args: Vec<Tensor> =
        (0..function.params.len()).map(|i| argument(input, module, function, i)).collect::<Result<_, _>>()?;
    let execution = execute(module, function, &args).map_err(|e| e.to_string())?;
    let mut out = String::new();
    for (name, value) in &function.results {
        let _ = writeln!(out, "{name}: {}", module.show(function.ty(*value)));
        out.push_str(&rows(&execution.values[value.index()]));
    }
    let _ = writeln!(out, "multiply-adds: {}", execution.multiply_adds.iter().sum::<u64>());
    Ok(out)
}

fn argument(input: &str, module: &Module, function: &Function, i: usize) -> Result<Tensor, String> {
    let (param, ty): (_, &Type) = (&function.params[i], &function.types[i]);
    let set = format!("; set %{} = ", param.name);
    let line = input.lines().find_map(|l| l.strip_prefix(&set)).ok_or(format!("no `{set}`"))?;
    let numbers = |text: &str| -> Result<Vec<f64>, String> {
        text.split_whitespace().map(|n| n.parse().map_err(|_| format!("`{n}` is no number"))).collect()
    };
    let values = match line.strip_prefix("all ") {
        Some(value) => vec![numbers(value)?[0]; module.elements(&ty.dims).min(1 << 20) as usize],
        None => numbers(line)?,
    };
    let dims: Vec<usize> = ty.dims.iter().map(|&d| module.size(d) as usize).collect();
    Ok(if ty.dtype.is_float() {
        Tensor::float(&dims, values)
    } else {
        Tensor::int(&dims, values.into_iter().map(|x| x as i32).collect())
    })
}

/// One line for each row of the last dimension; ten digits, so that another libm's last bit does
/// not show.
fn rows(tensor: &Tensor) -> String {
    let words: Vec<String> = match &tensor.data {
        Data::Float(data) => data.iter().map(|x| format!("{}", rounded(*x))).collect(),
        Data::Int(data) => data.iter().map(i32::to_string).collect(),
    };
    let width = tensor.dims.last().copied().unwrap_or(1);
    words.chunks(width).map(|row| format!("  {}\n", row.join(" "))).collect()
}

fn rounded(x: f64) -> f64 {
    let x: f64 = format!("{x:.9e}").parse().unwrap_or(x);
    if x.abs() < 1e-12 { 0.0 } else { x }
}

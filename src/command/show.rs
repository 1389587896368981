//! `dreamc show`: a specification with every default filled in, or the factors of its weights.

use crate::arguments::SpecArguments;
use clap::{Args, ValueEnum};
use dreamc_compiler::transfer;
use dreamc_dsl::Spelling;
use dreamc_dsl::define::library::LIBRARY;
use dreamc_study::failure::{Done, Failure};
use dreamc_study::show::table;
use dreamc_study::{output, say, show};

/// Print a specification with every default filled in
#[derive(Args)]
#[command(after_help = "\
Examples:
  dreamc show model.yaml
  dreamc show model.yaml --to dream
  dreamc show model.yaml --set train.steps=100 --json
  dreamc show model.yaml --rates      every weight's first values and rate under `transfer`
  dreamc show std                     the library of definitions
  dreamc show std/gated_delta         one of them, as it is written")]
pub struct Arguments {
    #[command(flatten)]
    spec: SpecArguments,

    /// Spelling to print in
    #[arg(long, value_enum, default_value_t = To::Yaml)]
    to: To,

    /// Print as JSON
    #[arg(long)]
    json: bool,

    /// Print the factors of every weight under the recipe's `transfer`: on first values, rate,
    /// weight decay and ε, each with its reason
    #[arg(long, conflicts_with = "to")]
    rates: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum To {
    Yaml,
    Dream,
}

pub fn run(a: Arguments) -> Done {
    let library = (!a.spec.spec.exists()).then(|| a.spec.spec.to_str().and_then(std_name)).flatten();
    if let Some(name) = library {
        return show_library(name);
    }
    let spec = a.spec.load()?;
    if a.rates {
        return rates(&transfer::table(&spec)?, a.json);
    }
    if a.json {
        show::json(&spec)?;
    } else {
        let to = if a.to == To::Yaml { Spelling::Yaml } else { Spelling::Dream };
        output::write(dreamc_dsl::show(&spec, to).as_bytes())?;
    }
    Ok(())
}

fn rates(found: &transfer::Table, json: bool) -> Done {
    if json {
        show::json(found)?;
        return Ok(());
    }
    let times = |x: f64| format!("×{}", factor(x));
    say!(
        "{}, rate {:e}: width {}, layers {}, passes {}, tokens {} over the base\n",
        found.rule,
        found.learning_rate,
        times(found.width),
        times(found.depth),
        times(found.passes),
        times(found.tokens)
    )?;
    let head =
        ["weight", "role", "fan in", "fan out", "by", "deviation", "init", "rate", "decay", "eps", "reason"];
    let mut rows = vec![head.map(String::from).to_vec()];
    let fan = |[here, base]: [u64; 2]| match here == base {
        true => here.to_string(),
        false => format!("{base} → {here}"),
    };
    for line in &found.lines {
        let many = if line.sets > 1 { format!(" and {} more", line.sets - 1) } else { String::new() };
        rows.push(vec![
            format!("{}{many}", line.weight),
            line.role.into(),
            fan(line.fan_in),
            fan(line.fan_out),
            line.optimizer.unwrap_or("frozen").into(),
            line.deviation.map_or("-".into(), |x| format!("{x:.3e}")),
            factor(line.init),
            factor(line.rate),
            factor(line.decay),
            factor(line.eps),
            line.reason.clone(),
        ]);
    }
    say!("{}", table(&rows))?;
    if !found.multipliers.is_empty() {
        let mut rows = vec![["multiplier", "here", "base", "reason"].map(String::from).to_vec()];
        for m in &found.multipliers {
            rows.push(vec![m.field.clone(), factor(m.value[0]), factor(m.value[1]), m.reason.clone()]);
        }
        say!("{}", table(&rows))?;
    }
    for warning in &found.warnings {
        say!("warning: {}: {}", warning.weight, warning.message)?;
    }
    Ok(())
}

fn factor(x: f64) -> String {
    if x == 0.0 || (1e-3..1e4).contains(&x.abs()) {
        format!("{}", (x * 1e4).round() / 1e4)
    } else {
        format!("{x:.3e}")
    }
}

/// The name in the library that a path means; none for the library itself.
fn std_name(path: &str) -> Option<Option<&str>> {
    let path = path.trim_end_matches('/');
    if path == "std" {
        Some(None)
    } else {
        path.strip_prefix("std/").map(|name| Some(name.trim_end_matches(".dream")))
    }
}

/// Prints the definition of that name; without one all names, each with its first line.
fn show_library(name: Option<&str>) -> Done {
    if let Some(name) = name {
        let Some((_, text)) = LIBRARY.iter().find(|(own, _)| *own == name) else {
            let names: Vec<&str> = LIBRARY.iter().map(|(name, _)| *name).collect();
            return Err(Failure::Usage(format!("std has no `{name}`; it has {}", names.join(", "))));
        };
        output::write(text.as_bytes())?;
        return Ok(());
    }
    let width = LIBRARY.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    for (name, text) in LIBRARY {
        let about = text.lines().next().unwrap_or("").trim_start_matches("// ");
        output::write(format!("{name:width$}  {about}\n").as_bytes())?;
    }
    Ok(())
}

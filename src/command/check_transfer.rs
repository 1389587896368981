//! `dreamc check-transfer`: sizes of activations against the size of the model.

use crate::arguments::SpecArguments;
use clap::Args;
use dreamc_dsl::diagnostic::{Diagnostic, Diagnostics};
use dreamc_runtime::train::event::{Event, Watcher};
use dreamc_study::failure::{Done, Failure};
use dreamc_study::progress::Progress;
use dreamc_study::show::table;
use dreamc_study::{say, show};
use dreamc_verify::coordinates::{Axis, Line, Report, check};
use dreamc_verify::{Compiler, Subject, shrink};

/// Check that sizes of activations do not follow width and depth under the recipe's `transfer`
#[derive(Args)]
#[command(after_help = "\
The model is made small, then taken at four widths, at four sizes of heads and at four depths, with the least as the base. Each takes
five steps; the slope of the logarithm of every part's size over that of the model's must be the one that the rule gives. A line that
is off names the weight, and the exit code is 1.

Examples:
  dreamc check-transfer examples/rates.yaml
  dreamc check-transfer model.yaml --set 'train.transfer={rule: mup, width: 64, depth: 4}'
  dreamc check-transfer examples/rates.yaml --set train.transfer.rule=mup --json")]
pub struct Arguments {
    #[command(flatten)]
    spec: SpecArguments,

    /// Seed of weights and tokens
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,

    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

pub fn run(a: Arguments) -> Done {
    let spec = a.spec.load()?;
    if spec.train.transfer.is_none() {
        let error = Diagnostic::error("missing-key", "the recipe has no `transfer`: there is no rule to check")
            .at(&spec.sources, "train")
            .help(format!(
                "write `transfer: {{rule: mup, width: {}, depth: …}}` in `train`, the size at which the rate was tuned",
                spec.model.hidden
            ));
        return Err(Diagnostics::new(spec.sources.clone(), vec![error]).into());
    }
    let small = shrink(&spec, false);
    let subject = Subject::new(small.spec, a.seed, None, &[], &Compiler)?;
    let mut progress = Progress::default();
    let report = check(&subject, &mut |_| progress.tell(&Event::Busy("check-transfer")));
    progress.clear();
    let Some(report) = report? else { return Ok(()) };
    if a.json {
        show::json(&report)?;
    } else {
        print(&report)?;
    }
    if report.holds() { Ok(()) } else { Err(Failure::Said) }
}

fn print(report: &Report) -> Done {
    let sizes = |sizes: &[u64]| sizes.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
    say!("{}: hidden sizes {}; layers {}\n", report.rule, sizes(&report.widths), sizes(&report.depths))?;
    for axis in [Axis::Width, Axis::Heads, Axis::Depth] {
        let lines: Vec<&Line> = report.lines.iter().filter(|line| line.over == axis).collect();
        if lines.is_empty() {
            continue;
        }
        let head = [axis.title(), "", "sizes", "slope", "95 %", "rule", ""];
        let mut rows = vec![head.map(String::from).to_vec()];
        for line in lines {
            let sizes: Vec<String> = line.sizes.iter().map(|x| format!("{x:.1e}")).collect();
            let verdict = match (&line.weight, line.flat) {
                (_, true) => "flat".to_string(),
                (Some(weight), false) => format!("NOT FLAT: {weight}"),
                (None, false) => "NOT FLAT".into(),
            };
            rows.push(vec![
                line.of.clone(),
                if line.moved { "movement" } else { "start" }.into(),
                sizes.join(" "),
                format!("{:+.2}", line.slope.slope),
                format!("{:+.2} to {:+.2}", line.slope.low, line.slope.high),
                format!("{:+.1}", line.expected),
                verdict,
            ]);
        }
        say!("{}", table(&rows))?;
    }
    let off = report.lines.iter().filter(|line| !line.flat).count();
    match off {
        0 => say!("all {} slopes are those of the rule within {}", report.lines.len(), report.tolerance)?,
        _ => say!("{off} of {} slopes are off by more than {}", report.lines.len(), report.tolerance)?,
    }
    Ok(())
}

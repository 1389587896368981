//! A chain of assignments modulo `size`, in the manner of iGSM (arXiv 2407.20311): `length`
//! variables in any order, each a number, or one or two others combined by `+`, `-` or `*`; asked
//! is one that takes `steps` operations from a number, the others being there to mislead. Models of
//! the paper write every step; here the value alone is asked: `c=a+4;a=7;b=a*c;b?`.

use super::symbols::lower;
use super::{Drawn, chosen};
use crate::rng::Stream;
use dreamc_dsl::spec::Task;

/// A variable for each operation, and the one they begin with.
pub fn check(task: &Task) -> Result<(), String> {
    let (most, length) = (task.difficulties().max().unwrap_or(0), task.length.unwrap_or(0));
    if most + 1 > length {
        return Err(format!(
            "{most} operations take {} variables, length is {length}: use length {} or at most {} operations",
            most + 1,
            most + 1,
            length.saturating_sub(1)
        ));
    }
    Ok(())
}

/// Draws a problem.
pub fn problem(task: &Task, operations: u64, random: &mut Stream) -> Drawn {
    let count = task.length.unwrap_or(operations + 1).max(operations + 1);
    let (modulus, chain) = (task.size, operations as usize + 1);
    let names: Vec<String> = chosen(count, count, random).into_iter().map(|n| lower(n, count)).collect();
    let (mut values, mut lines): (Vec<u64>, Vec<String>) = (vec![], vec![]);
    for i in 0..names.len() {
        // Of the chain each needs the one before; others need any that stands before, or nothing.
        let needs = match i {
            0 => None,
            i if i < chain => Some(i - 1),
            i => (random.below(4) > 0).then(|| random.below(i as u64) as usize),
        };
        let Some(needs) = needs else {
            values.push(random.below(modulus));
            lines.push(format!("{}={};", names[i], values[i]));
            continue;
        };
        let operator = ['+', '-', '*'][random.below(3) as usize];
        // The other side is a number, or a variable of before.
        let (other, written) = match random.below(2) {
            0 => {
                let number = random.below(modulus);
                (number, number.to_string())
            }
            _ => {
                let before = random.below(i as u64) as usize;
                (values[before], names[before].clone())
            }
        };
        let swapped = random.below(2) == 1;
        let (left, right) = if swapped { (other, values[needs]) } else { (values[needs], other) };
        values.push(match operator {
            '+' => (left + right) % modulus,
            '-' => (left + modulus - right) % modulus,
            _ => left * right % modulus,
        });
        lines.push(match swapped {
            true => format!("{}={written}{operator}{};", names[i], names[needs]),
            false => format!("{}={}{operator}{written};", names[i], names[needs]),
        });
    }
    let order = chosen(count, count, random);
    let text: String = order.into_iter().map(|i| lines[i as usize].as_str()).collect();
    (format!("{text}{}? ", names[chain - 1]), values[chain - 1].to_string()).into()
}

#[cfg(test)]
mod tests {
    use super::super::tests::draws;
    use super::*;
    use dreamc_dsl::spec::TaskKind;
    use std::collections::HashMap;

    fn task() -> Task {
        Task { length: Some(8), ..Task::new(TaskKind::Chain, 1, 6) }
    }

    /// The value of a variable, worked out from its line; and the operations that the longest way
    /// to a number has.
    fn value(lines: &HashMap<&str, &str>, of: &str) -> (u64, u64) {
        if let Ok(number) = of.parse() {
            return (number, 0);
        }
        let line = lines[of];
        let Some(at) = line.find(['+', '-', '*']) else { return value(lines, line) };
        let (left, right) = (value(lines, &line[..at]), value(lines, &line[at + 1..]));
        let found = match &line[at..=at] {
            "+" => (left.0 + right.0) % 23,
            "-" => (left.0 + 23 - right.0) % 23,
            _ => left.0 * right.0 % 23,
        };
        (found, 1 + left.1.max(right.1))
    }

    #[test]
    fn answers_take_so_many_operations() {
        for steps in [1, 3, 6] {
            for drawn in draws(&task(), steps, 200) {
                let mut lines: Vec<&str> = drawn.prompt.trim_end().split(';').collect();
                let asked = lines.pop().unwrap().trim_end_matches('?');
                let lines: HashMap<&str, &str> = lines.iter().map(|l| l.split_once('=').unwrap()).collect();
                assert_eq!(lines.len(), 8);
                let (found, depth) = value(&lines, asked);
                assert_eq!(drawn.answer, found.to_string(), "{}", drawn.prompt);
                assert_eq!(depth, steps, "{}", drawn.prompt);
            }
        }
    }

    #[test]
    fn chains_longer_than_their_variables_say_what_would_fit() {
        let refused = check(&Task { max_steps: 9, ..task() }).unwrap_err();
        assert!(refused.ends_with("use length 10 or at most 7 operations"), "{refused}");
    }
}

//! Multi-step arithmetic in words, modulo `size`: `start two, add five, times three, minus one =`
//! gives `zero`.

use super::Drawn;
use crate::rng::Stream;
use dreamc_dsl::spec::Task;

const ONES: [&str; 20] = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
];
const TENS: [&str; 10] =
    ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"];

/// Any numbers go together.
pub fn check(_: &Task) -> Result<(), String> {
    Ok(())
}

/// Draws a problem.
pub fn problem(task: &Task, steps: u64, random: &mut Stream) -> Drawn {
    let size = task.size;
    let mut value = random.below(size);
    let mut prompt = format!("start {}", words(value));
    for _ in 0..steps {
        let operand = random.below(size);
        let verb = match random.below(3) {
            0 => {
                value = (value + operand) % size;
                "add"
            }
            1 => {
                value = (value + size - operand) % size;
                "minus"
            }
            _ => {
                value = value * operand % size;
                "times"
            }
        };
        prompt.push_str(&format!(", {verb} {}", words(operand)));
    }
    prompt.push_str(" = ");
    (prompt, words(value)).into()
}

/// A number below 1000 in words.
fn words(n: u64) -> String {
    match n {
        0..20 => ONES[n as usize].to_string(),
        20..100 if n.is_multiple_of(10) => TENS[n as usize / 10].to_string(),
        20..100 => format!("{}-{}", TENS[n as usize / 10], ONES[n as usize % 10]),
        _ if n.is_multiple_of(100) => format!("{} hundred", ONES[n as usize / 100 % 10]),
        _ => format!("{} hundred {}", ONES[n as usize / 100 % 10], words(n % 100)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Philox;
    use dreamc_dsl::spec::TaskKind;

    #[test]
    fn numbers_in_words() {
        let said = [0, 13, 20, 47, 100, 999].map(words);
        let right = ["zero", "thirteen", "twenty", "forty-seven", "one hundred", "nine hundred ninety-nine"];
        assert_eq!(said, right);
    }

    #[test]
    fn answers_follow_from_the_text() {
        let value = |word: &str| ONES.iter().position(|w| *w == word).unwrap() as u64;
        for i in 0..100 {
            let task = Task { size: 10, ..Task::new(TaskKind::Arithmetic, 1, 4) };
            let Drawn { prompt, answer, .. } = problem(&task, 4, &mut Philox::new(0, "t").stream(i));
            let mut parts = prompt.trim_end_matches(" = ").split(", ");
            let mut x = value(parts.next().unwrap().trim_start_matches("start "));
            for part in parts {
                let (verb, word) = part.split_once(' ').unwrap();
                x = match verb {
                    "add" => x + value(word),
                    "minus" => x + 10 - value(word),
                    "times" => x * value(word),
                    _ => panic!("{verb}"),
                } % 10;
            }
            assert_eq!(words(x), answer, "{prompt}");
        }
    }
}

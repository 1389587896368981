//! Mano of "Physics of language models 4.1" (arXiv 2512.17351, task 4): an expression of `steps`
//! additions, subtractions and multiplications modulo `size`, operators first, and its value. Of a
//! tree of operators the left side has any number of those that are left, each with the same
//! probability, as in the authors' generator. Values are letters: `2 +a*bc=`.

use super::Drawn;
use super::symbols::lower;
use crate::rng::Stream;
use dreamc_dsl::spec::Task;

/// Any numbers go together.
pub fn check(_: &Task) -> Result<(), String> {
    Ok(())
}

/// A number of operators, or a value, that is still to be drawn.
enum Open {
    Tree(u64),
    Apply(char),
}

/// An expression of `operators` operators, and its value.
fn expression(operators: u64, modulus: u64, random: &mut Stream) -> (String, u64) {
    let (mut text, mut values) = (String::new(), vec![]);
    let mut open = vec![Open::Tree(operators)];
    // Trees are deep: no recursion.
    while let Some(next) = open.pop() {
        match next {
            Open::Tree(0) => {
                let value = random.below(modulus);
                text += &lower(value, modulus);
                values.push(value);
            }
            Open::Tree(n) => {
                let operator = ['+', '-', '*'][random.below(3) as usize];
                let left = random.below(n);
                text.push(operator);
                open.extend([Open::Apply(operator), Open::Tree(n - 1 - left), Open::Tree(left)]);
            }
            Open::Apply(operator) => {
                let (right, left) = (values.pop().unwrap_or(0), values.pop().unwrap_or(0));
                values.push(match operator {
                    '+' => (left + right) % modulus,
                    '-' => (left + modulus - right) % modulus,
                    _ => left * right % modulus,
                });
            }
        }
    }
    (text, values.pop().unwrap_or(0))
}

/// Draws a problem.
pub fn problem(task: &Task, operators: u64, random: &mut Stream) -> Drawn {
    let (text, value) = expression(operators, task.size, random);
    (format!("{operators} {text}="), lower(value, task.size)).into()
}

#[cfg(test)]
mod tests {
    use super::super::tests::draws;
    use super::*;
    use dreamc_dsl::spec::TaskKind;

    /// The value of an expression, read from the right: a second way.
    fn value(text: &str, modulus: u64) -> u64 {
        let mut stack: Vec<u64> = vec![];
        for c in text.chars().rev() {
            if c.is_ascii_lowercase() {
                stack.push(c as u64 - 'a' as u64);
                continue;
            }
            let (left, right) = (stack.pop().unwrap(), stack.pop().unwrap());
            stack.push(match c {
                '+' => (left + right) % modulus,
                '-' => (left + modulus - right) % modulus,
                '*' => (left * right) % modulus,
                other => panic!("{other}"),
            });
        }
        assert_eq!(stack.len(), 1);
        stack[0]
    }

    #[test]
    fn answers_are_the_values_of_expressions() {
        let task = Task::new(TaskKind::Mano, 1, 10);
        let mut left = [0u64; 10];
        for drawn in draws(&task, 10, 2000) {
            let text = drawn.prompt.strip_prefix("10 ").unwrap().strip_suffix('=').unwrap();
            assert_eq!(text.len(), 21);
            assert_eq!(drawn.answer, lower(value(text, 23), 23));
            // Operators of the left side: where its values are one more than they.
            let (mut balance, mut count) = (1i64, 0);
            for c in text[1..].chars() {
                balance += if c.is_ascii_lowercase() { -1 } else { 1 };
                count += u64::from(!c.is_ascii_lowercase());
                if balance == 0 {
                    break;
                }
            }
            left[count as usize] += 1;
        }
        // Any number of operators stands on the left side as often.
        assert!(left.iter().all(|n| (140..260).contains(n)), "{left:?}");
    }

    /// Shares of expressions whose value is 0, and 1, of 40,000 that the authors' code drew
    /// (`mano.py` of PhysicsLM4): products are 0 more often than sums.
    #[test]
    fn values_are_those_of_the_authors() {
        for (operators, zero, one) in [(2, 0.0605, 0.0404), (5, 0.0696, 0.0418), (10, 0.0690, 0.0409)] {
            let drawn = draws(&Task::new(TaskKind::Mano, 1, 10), operators, 8000);
            let share = |letter: &str| drawn.iter().filter(|d| d.answer == letter).count() as f64 / 8000.0;
            assert!((share("a") - zero).abs() < 0.012, "{operators}: {}", share("a"));
            assert!((share("b") - one).abs() < 0.012, "{operators}: {}", share("b"));
        }
    }
}

//! The flip-flop language FFL(p) (arXiv 2306.00946, section 3): instructions with a bit each, the
//! first `w` (write) and the last `r` (read), between them `i` (ignore) with `size` in a hundred
//! and the other two alike; a bit after `r` is that of the last `w`, others are of chance. Asked is
//! every bit that is read: `w0i1r0i0r0`. The paper trains on FFL(0.8) of 256 instructions, and asks
//! FFL(0.98), where reads are far from writes, and FFL(0.1).

use super::{Drawn, Text};
use crate::rng::Stream;
use dreamc_dsl::spec::Task;

/// Any numbers go together.
pub fn check(_: &Task) -> Result<(), String> {
    Ok(())
}

/// Draws a problem.
pub fn problem(task: &Task, steps: u64, random: &mut Stream) -> Drawn {
    let ignored = task.size as f64 / 100.0;
    let mut text = Text::default();
    let mut kept = 0;
    for i in 0..steps {
        let u = random.unit();
        let instruction = if i == 0 {
            'w'
        } else if i + 1 == steps {
            'r'
        } else if u < ignored {
            'i'
        } else if u < (1.0 + ignored) / 2.0 {
            'w'
        } else {
            'r'
        };
        let bit = random.below(2);
        text.push(&instruction.to_string());
        match instruction {
            'r' => text.ask(&kept.to_string()),
            'w' => {
                kept = bit;
                text.push(&bit.to_string())
            }
            _ => text.push(&bit.to_string()),
        };
    }
    text.drawn()
}

#[cfg(test)]
mod tests {
    use super::super::tests::draws;
    use super::*;
    use dreamc_dsl::spec::TaskKind;

    #[test]
    fn a_read_gives_the_bit_of_the_last_write() {
        let (mut ignored, mut written, mut read) = (0u64, 0u64, 0u64);
        for drawn in draws(&Task::new(TaskKind::FlipFlop, 2, 64), 64, 500) {
            let text = drawn.answer.as_bytes();
            assert_eq!((text.len(), text[0], text[126]), (128, b'w', b'r'));
            let (mut kept, mut asked) = (0, vec![]);
            for (i, pair) in text.chunks(2).enumerate() {
                match pair[0] {
                    b'w' => (kept, written) = (pair[1], written + u64::from(i > 0)),
                    b'r' => {
                        assert_eq!(pair[1], kept);
                        asked.push(2 * i + 1..2 * i + 2);
                        read += u64::from(i < 63);
                    }
                    _ => ignored += 1,
                }
            }
            assert_eq!(asked, drawn.asked);
        }
        // 31,000 instructions between the first and the last: 80 %, 10 % and 10 %.
        let share = |n: u64| n as f64 / 31_000.0;
        assert!((share(ignored) - 0.8).abs() < 0.01, "{}", share(ignored));
        assert!((share(written) - 0.1).abs() < 0.01 && (share(read) - 0.1).abs() < 0.01);
    }
}

//! Capo of "Physics of language models 4.1" (arXiv 2512.17351, task 3; the bioS of arXiv
//! 2404.05405): `size` persons with six facts each, which are the same in every text and stand in
//! no prompt, so that they are learned in weights or not at all. Facts are drawn evenly from as
//! many values as the paper's: a birthday of 12 months, 28 days and 200 years, 200 cities of birth,
//! 300 universities, 100 majors, 263 employers, each in one of 200 cities. A text asks all facts of
//! `steps` persons in any order: `aK:cZq uB7 …`. Sentences of the paper are letters here, which
//! teach the model nothing. Held out are texts, not persons.

use super::symbols::symbol;
use super::{Drawn, Text, chosen};
use crate::rng::{Philox, Stream};
use dreamc_dsl::spec::Task;

/// The seed of the persons, which no seed of a run changes.
const PERSONS: u64 = 12_345;
/// Employers; their city is a fact of each.
const EMPLOYERS: u64 = 263;
const CITIES: u64 = 200;

/// Any numbers go together.
pub fn check(_: &Task) -> Result<(), String> {
    Ok(())
}

/// The facts of a person, each with the letter that asks for it.
fn facts(person: u64) -> [(char, String); 6] {
    let mut random = Philox::new(PERSONS, "persons").stream(person);
    let mut of = |n: u64| random.below(n);
    let birthday = [symbol(of(12), 12), symbol(of(28), 28), symbol(of(200), 200)].concat();
    let (city, university, major, employer) = (of(CITIES), of(300), of(100), of(EMPLOYERS));
    let works = Philox::new(PERSONS, "employers").stream(employer).below(CITIES);
    [
        ('d', birthday),
        ('c', symbol(city, CITIES)),
        ('u', symbol(university, 300)),
        ('m', symbol(major, 100)),
        ('e', symbol(employer, EMPLOYERS)),
        ('w', symbol(works, CITIES)),
    ]
}

/// Draws a problem.
pub fn problem(task: &Task, persons: u64, random: &mut Stream) -> Drawn {
    let mut text = Text::default();
    for _ in 0..persons {
        let person = random.below(task.size);
        text.push(&format!("{}:", symbol(person, task.size)));
        let facts = facts(person);
        for i in chosen(6, 6, random) {
            let (letter, value) = &facts[i as usize];
            text.push(&letter.to_string()).ask(value).push(" ");
        }
    }
    text.drawn()
}

#[cfg(test)]
mod tests {
    use super::super::tests::{asked, draws};
    use super::*;
    use dreamc_dsl::spec::TaskKind;
    use std::collections::{HashMap, HashSet};

    #[test]
    fn persons_have_the_same_facts_in_every_text() {
        let task = Task { size: 62, ..Task::new(TaskKind::Capo, 1, 4) };
        let mut known: HashMap<String, String> = HashMap::new();
        for drawn in draws(&task, 4, 200) {
            assert_eq!(asked(&drawn).len(), 24);
            for range in asked(&drawn) {
                let person = drawn.answer[..range.start].rfind(':').unwrap() - 1;
                let key = format!(
                    "{}{}",
                    &drawn.answer[person..=person],
                    &drawn.answer[range.start - 1..range.start]
                );
                let value = drawn.answer[range.clone()].to_string();
                assert_eq!(known.entry(key).or_insert(value.clone()), &value);
            }
        }
        assert_eq!(known.len(), 6 * 62);
    }

    /// Persons of one employer work in one city, and values are spread.
    #[test]
    fn facts_are_spread_and_employers_have_one_city() {
        let all: Vec<[(char, String); 6]> = (0..2000).map(facts).collect();
        let values = |i: usize| all.iter().map(|f| f[i].1.clone()).collect::<HashSet<_>>().len();
        assert!(values(0) > 1900, "{}", values(0));
        assert_eq!([1, 3].map(values), [200, 100]);
        assert!(values(4) > 255 && values(2) > 290);
        let cities: HashSet<(String, String)> =
            all.iter().map(|f| (f[4].1.clone(), f[5].1.clone())).collect();
        assert_eq!(cities.len(), values(4));
    }
}

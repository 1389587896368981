//! Parts: the tensors and states of a model's components.
//!
//! *In*: nothing. *Out*: [`Part`], the last words of a name and what passes ask of it. *Promise*:
//! no pass lists parts. A component declares those that it has where it is lowered
//! (`lower::attention::part`); a pass asks a part for a property, or compares it with the constant
//! of a component that it knows.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use dreamc_dsl::define::graph::beside;

/// A tensor or a state of its owner. Names are made of it, and nothing is found out from names.
///
/// Two parts are one where the same component declares the same path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Part {
    of: &'static str,
    path: &'static str,
    role: Role,
}

/// The answers of a part to passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Role {
    reached: Reached,
    ends: bool,
    rows: Option<Rows>,
    counted: Counted,
    repeats: bool,
    factor: Option<(Reached, Adapted, Factor)>,
}

/// Additions of a matrix of low rank to a matrix, by whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Reached {
    Never,
    ByAdapters,
    ByPasses,
}

/// How the applications that write a state along depth have their rows in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Rows {
    /// One after another, after `before` rows that no application writes.
    Each {
        /// How many.
        before: u64,
    },
    /// All in one value.
    Whole {
        /// Whether applications before the passes have added to it, too: of sources.
        every: bool,
    },
}

/// When a state along depth is memory that a count declares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Counted {
    /// Always.
    Always,
    /// In training, and where the function leaves the keys that others read: elsewhere they stand
    /// in a sequence cache.
    Handed,
    /// Never: it is no cache.
    Never,
}

impl Part {
    /// A part of that name, which follows the name of its owner, of the component `of`. Of a state
    /// no rows are known; a gradient that ends there is an error, never a guess.
    pub const fn new(of: &'static str, path: &'static str) -> Part {
        let (reached, counted) = (Reached::Never, Counted::Always);
        Part {
            of,
            path,
            role: Role { reached, ends: false, rows: None, counted, repeats: false, factor: None },
        }
    }

    /// The same under a name that is known when the program runs.
    pub fn named(of: &'static str, path: &str) -> Part {
        Part::new(of, interned(path))
    }

    const fn playing(self, role: Role) -> Part {
        Part { role, ..self }
    }

    /// A matrix to which passes of a loop, and adapters, add one of low rank.
    pub const fn with_low_rank(self) -> Part {
        self.playing(Role { reached: Reached::ByPasses, ..self.role })
    }

    /// A matrix to which adapters alone add one of low rank.
    pub const fn with_adapters(self) -> Part {
        self.playing(Role { reached: Reached::ByAdapters, ..self.role })
    }

    /// The last weight before the output of its component, which is added to the stream.
    pub const fn at_end(self) -> Part {
        self.playing(Role { ends: true, ..self.role })
    }

    /// A state along depth with a row for each application, after `before` rows that none writes.
    pub const fn with_rows(self, before: u64) -> Part {
        self.playing(Role { rows: Some(Rows::Each { before }), ..self.role })
    }

    /// A state along depth that is one value of all applications; `every`: of those before the
    /// passes, too.
    pub const fn whole(self, every: bool) -> Part {
        self.playing(Role { rows: Some(Rows::Whole { every }), ..self.role })
    }

    /// A state along depth that is counted then.
    pub const fn counted(self, counted: Counted) -> Part {
        self.playing(Role { counted, ..self.role })
    }

    /// A state along depth whose function may run again on the way back: each application has a row
    /// of its own, and reads those before.
    pub const fn repeatable(self) -> Part {
        self.playing(Role { repeats: true, ..self.role })
    }
}

impl Part {
    /// The name of the tensor, which follows the name of its owner.
    pub const fn path(self) -> &'static str {
        self.path
    }

    /// The matrix that it is, where a pass may add one of low rank.
    pub fn adapted(self) -> Option<Adapted> {
        (self.role.reached == Reached::ByPasses).then_some(self.rows_named(Slice::All))
    }

    /// The matrix that it is, where an adapter may add one of low rank.
    pub fn adaptable(self) -> Option<Adapted> {
        (self.role.reached != Reached::Never).then_some(self.rows_named(Slice::All))
    }

    /// Some of its rows, which are adapted by themselves.
    pub const fn rows_named(self, rows: Slice) -> Adapted {
        Adapted { path: self.path, ends: self.role.ends, rows }
    }

    /// The factor that it is of what a pass adds to a matrix.
    pub fn low(self) -> Option<(Adapted, Factor)> {
        self.factor_of(Reached::ByPasses)
    }

    /// The factor that it is of what an adapter adds to a matrix.
    pub fn adapter(self) -> Option<(Adapted, Factor)> {
        self.factor_of(Reached::ByAdapters)
    }

    fn factor_of(self, by: Reached) -> Option<(Adapted, Factor)> {
        self.role.factor.and_then(|(of, matrix, factor)| (of == by).then_some((matrix, factor)))
    }

    /// Whether it is the last weight before the output of its component.
    pub const fn ends(self) -> bool {
        self.role.ends
    }

    /// The layout of a state along depth; none of a part that no gradient is known to reach through
    /// passes.
    pub const fn rows(self) -> Option<Rows> {
        self.role.rows
    }

    /// Rows of such a state before that of the first application.
    pub const fn rows_before(self) -> u64 {
        match self.role.rows {
            Some(Rows::Each { before }) => before,
            Some(Rows::Whole { .. }) | None => 0,
        }
    }

    /// When the bytes of a state along depth are counted.
    pub const fn when_counted(self) -> Counted {
        self.role.counted
    }

    /// Whether a function that returns this state along depth finds on the way back what it found
    /// before.
    pub const fn repeats(self) -> bool {
        self.role.repeats
    }
}

/// A matrix to which a pass, or an adapter, adds one of low rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Adapted {
    path: &'static str,
    ends: bool,
    rows: Slice,
}

/// Which rows of a tensor a matrix is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Slice {
    /// All of them.
    All,
    /// The first ones, under this name.
    First(&'static str),
    /// Those that begin at this many times their number before the end, under this name.
    Last(&'static str, u64),
}

impl Adapted {
    /// Its name in its component, as the language has it.
    pub fn name(self) -> Cow<'static, str> {
        match self.rows {
            Slice::All => beside(self.path, "").into(),
            Slice::First(name) | Slice::Last(name, _) => name.into(),
        }
    }

    /// The path of the tensor whose rows it is.
    pub const fn path(self) -> &'static str {
        self.path
    }

    /// Which of the tensor's rows it is.
    pub const fn rows(self) -> Slice {
        self.rows
    }

    /// Whether what it makes is the output of its component.
    pub const fn ends(self) -> bool {
        self.ends
    }

    /// A factor of what a pass adds to it.
    pub fn low(self, factor: Factor) -> Part {
        let path = self.path.replacen("weight", &format!("lora_{}", factor.word()), 1);
        self.factor(Reached::ByPasses, factor, &path)
    }

    /// A factor, or a vector, of what an adapter adds to it.
    pub fn adapter(self, factor: Factor) -> Part {
        let to = format!(".adapter_{}", factor.word());
        let path = match self.rows {
            Slice::All => beside(self.path, &to),
            Slice::First(name) | Slice::Last(name, _) => format!("{name}{to}"),
        };
        self.factor(Reached::ByAdapters, factor, &path)
    }

    fn factor(self, by: Reached, factor: Factor, path: &str) -> Part {
        let part = Part::named("adapted", path);
        part.playing(Role { factor: Some((by, self, factor)), ..part.role })
    }
}

/// A factor of `B A`, or a vector that DoRA adds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Factor {
    /// `[rank, in]`
    A,
    /// `[out, rank]`
    B,
    /// The magnitude of each row, which is learned: `[out]`.
    Magnitude,
    /// The norm of each row of the frozen matrix, a constant: `[out]`.
    Norm,
}

impl Factor {
    /// How names of tensors end.
    fn word(self) -> &'static str {
        match self {
            Factor::A => "a",
            Factor::B => "b",
            Factor::Magnitude => "magnitude",
            Factor::Norm => "norm",
        }
    }
}

/// A text that is kept while the program runs, so that parts are values: each text once.
fn interned(text: &str) -> &'static str {
    static KNOWN: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(&text) = known.get(text) {
        return text;
    }
    let text: &'static str = Box::leak(text.into());
    known.insert(text);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No layout is guessed: of a part that does not say its rows none is known.
    #[test]
    fn a_state_along_depth_has_a_known_layout_or_none() {
        const STATE: Part = Part::new("a", "keys");
        assert_eq!(STATE.with_rows(1).rows(), Some(Rows::Each { before: 1 }));
        assert_eq!(STATE.whole(true).rows(), Some(Rows::Whole { every: true }));
        assert_eq!((STATE.rows(), STATE.rows_before(), STATE.repeats()), (None, 0, false));
    }

    /// Tensors of two components whose names end alike are two parts.
    #[test]
    fn parts_of_two_components_are_not_one() {
        let [a, b] = ["a", "b"].map(|of| Part::new(of, "weight"));
        assert_ne!(a, b);
        assert_eq!(Part::named("a", &["we", "ight"].concat()), a);
    }

    /// Factors are named after their matrix, some of its rows by their own name, and lead back to
    /// the tensor.
    #[test]
    fn a_factor_has_the_name_of_its_matrix() {
        const MATRIX: Part = Part::new("a", "qkv.weight").with_low_rank().at_end();
        let whole = MATRIX.adapted().unwrap();
        assert_eq!((whole.name(), whole.ends()), ("qkv".into(), true));
        assert_eq!(whole.low(Factor::A).path(), "qkv.lora_a");
        assert_eq!(whole.adapter(Factor::Magnitude).path(), "qkv.adapter_magnitude");
        let keys = MATRIX.rows_named(Slice::Last("k", 2));
        let b = keys.adapter(Factor::B);
        assert_eq!((b.path(), b.adapter(), b.low()), ("k.adapter_b", Some((keys, Factor::B)), None));
        assert_eq!(keys.path(), "qkv.weight");

        const SHARED: Part = Part::new("a", "up.weight").with_adapters();
        assert_eq!((SHARED.adapted(), SHARED.adaptable().is_some()), (None, true));
        assert_eq!(MATRIX.adapter(), None);
    }
}

//! The kinds of components: one file each, which says all that the language and its readers ask.
//!
//! *In*: a component's keys as written. *Out*: a checked [`Component`]. *Promise*: the list below
//! is the only list of kinds; a kind answers every question of `Language` and of [`Described`], and
//! none has a default. Code that needs the type of a kind matches all kinds or asks
//! [`with_component!`](crate::with_component).

pub mod attention;
pub mod defined;
pub mod experts;
pub mod mlp;

use serde::Serialize;

pub use attention::{Attention, Bias, DepthStream, HeadGate, Latent, Projection, QkNorm};
pub use defined::{DEFINED, Defined, Setting};
pub use experts::Experts;
pub use mlp::{Activation, Mlp};

use crate::ast::ValueKind;
use crate::check::{Checker, Group};
use crate::keys::Fallback::{Required, Rule, Value};
use crate::keys::{FALSE, Key, NONE, SIZE, Section, Type, key};
use crate::show::{Fields, int, name, real};
use crate::spec::{Model, Rope, Router, RouterForm};

macro_rules! components {
    ($d:tt $($(#[$doc:meta])* $kind:ident($ty:ty): $section:path, $mixes:ident;)*) => {
        /// One named component of a layer.
        #[derive(Clone, Debug, PartialEq, Serialize)]
        #[serde(rename_all = "snake_case")]
        pub enum Component {
            $($(#[$doc])* $kind($ty),)*
            /// A component that the specification defines.
            Defined(Defined),
        }

        /// The kinds of components.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Kind {
            $($(#[$doc])* $kind,)*
            /// A component that the specification defines.
            Defined,
        }

        impl Kind {
            /// Those with a word of the language.
            pub const BUILT_IN: [Kind; [$(Kind::$kind),*].len()] = [$(Kind::$kind),*];

            /// The keys of its components.
            pub const fn section(self) -> &'static Section {
                match self {
                    $(Kind::$kind => &$section,)*
                    Kind::Defined => &defined::DEFINED,
                }
            }

            /// The vectors that its components bring together.
            pub const fn mixes(self) -> Mixes {
                match self {
                    $(Kind::$kind => Mixes::$mixes,)*
                    Kind::Defined => Mixes::Tokens,
                }
            }

            /// A component of it from its keys. That of a definition is read with its settings, see
            /// [`Defined`].
            pub(crate) fn check(self, c: &mut Checker, group: &Group, hidden: Option<u64>) -> Option<Component> {
                match self {
                    $(Kind::$kind => Language::check(c, group, self, hidden).map(Component::$kind),)*
                    Kind::Defined => None,
                }
            }
        }

        /// The sections of all kinds of components that have a word of the language.
        pub static COMPONENTS: [&Section; Kind::BUILT_IN.len()] = [$(&$section),*];

        impl Component {
            /// Its kind.
            pub const fn kind(&self) -> Kind {
                match self {
                    $(Component::$kind(_) => Kind::$kind,)*
                    Component::Defined(_) => Kind::Defined,
                }
            }
        }

        /// `with_component!(component, c => body)`: the same expression for the keys of whichever
        /// kind it is.
        #[macro_export]
        macro_rules! with_component {
            ($d component:expr, $d c:ident => $d body:expr) => {
                match $d component {
                    $($crate::spec::Component::$kind($d c) => $d body,)*
                    $crate::spec::Component::Defined($d c) => $d body,
                }
            };
        }
    };
}

components! { $
    /// Attention over the tokens of the sequence (`docs/dev/semantics.md` section 2).
    Sequence(Attention): attention::SEQUENCE, Tokens;
    /// Attention over the earlier depths of the same token (section 3).
    Depth(Attention): attention::DEPTH, Depths;
    /// A routed mixture of networks (section 4).
    Experts(Experts): experts::EXPERTS, Features;
    /// One dense network.
    Mlp(Mlp): mlp::MLP, Features;
}

/// The vectors that a kind of component brings together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mixes {
    /// Those of several tokens of a sequence.
    Tokens,
    /// Those of one token at several depths.
    Depths,
    /// The one of its token at its depth.
    Features,
}

/// A component as other programs know it.
#[derive(Clone, Copy, Debug)]
pub enum Known<'a> {
    /// An attention.
    Attention(&'a Attention),
    /// A routed mixture.
    Experts(&'a Experts),
    /// A network.
    Mlp(&'a Mlp),
    /// A kind that no other program has: families do not fit, and packages refuse it.
    Own,
}

/// The language of a kind: its keys read and written.
pub(crate) trait Language: Sized {
    /// A component of it from its keys; every mistake at its token.
    fn check(c: &mut Checker, group: &Group, kind: Kind, hidden: Option<u64>) -> Option<Self>;

    /// Its keys with their values, `recurrent` where it stands in a `recur`. Those that only
    /// another kind of the same type has are left out later.
    fn show(&self, keys: &mut Fields, recurrent: bool);
}

/// The questions that every kind of component answers.
pub trait Described {
    /// Whether it reads the stream through a norm of its own, and whether its output has one.
    fn norms(&self) -> (bool, bool);

    /// It as other programs know it.
    fn known(&self) -> Known<'_>;

    /// Its router: of experts, or of an attention's projections.
    fn router(&self) -> Option<&Router>;

    /// A few words for drawings, where they say more than its kind.
    fn about(&self) -> Option<String>;

    /// Its sizes by their paths, and nothing where one is not set.
    fn sizes(&mut self) -> Vec<(&str, Option<&mut u64>)>;

    /// The first rule of the language that its sizes break in a model.
    fn broken(&self, model: &Model) -> Option<String>;

    /// Experts of it that ranks can own, where it has any and says how many.
    fn owned(&self) -> Option<u64>;

    /// Whether it has scores of heads that have a size.
    fn attends(&self, model: &Model) -> bool;

    /// Whether it sees keys by how far they are.
    fn sees_by_place(&self, model: &Model) -> bool;

    /// Whether it reads values of other components by their names.
    fn reads_by_name(&self) -> bool;

    /// Its steps between the norms, each with the dimensions of what it leaves, for drawings: `n`
    /// tokens, each by itself where there is no other word. `None` where its definition is drawn.
    fn steps(&self, mixes: Mixes, hidden: u64) -> Option<Vec<(String, String)>>;

    /// Its formula and the paper that it is of, or its definition, for docstrings.
    fn formula(&self, mixes: Mixes) -> String;

    /// Takes a mixture of projections away, which loops alone have.
    fn unmix(&mut self);

    /// The names of its matrices that adapters can add to. Routers choose, and have none.
    fn matrices(&self, model: &Model) -> Vec<String>;

    /// Makes its sizes the smallest that keep what matters of them.
    fn shrink(&mut self, to: &mut Small);

    /// Gives it a width of at least `least`, and lets nothing be chosen or balanced, so that the
    /// numbers of two widths compare.
    fn settle(&mut self, least: u64);

    /// Its sizes that grow in proportion to the hidden size, where nothing else is said, by their
    /// paths. Those of a definition follow from the hidden size by arithmetic, or stay.
    fn widths(&mut self) -> Vec<(&'static str, &mut u64)>;
}

/// A component answers as its kind.
impl std::ops::Deref for Component {
    type Target = dyn Described;

    fn deref(&self) -> &Self::Target {
        with_component!(self, c => c)
    }
}

impl std::ops::DerefMut for Component {
    fn deref_mut(&mut self) -> &mut Self::Target {
        with_component!(self, c => c)
    }
}

impl Component {
    /// The attention that it is, over the sequence or over depth.
    pub fn attention(&self) -> Option<&Attention> {
        match self.known() {
            Known::Attention(a) => Some(a),
            Known::Experts(_) | Known::Mlp(_) | Known::Own => None,
        }
    }

    /// Whether it leaves keys and values in the depth stream of its model.
    pub fn leaves_depth(&self) -> bool {
        match self.known() {
            Known::Attention(a) => a.depth_stream.is_some(),
            Known::Experts(e) => e.depth_stream,
            Known::Mlp(m) => m.depth_stream,
            Known::Own => false,
        }
    }

    /// Takes the norm in front of it away.
    pub(crate) fn without_pre_norm(&mut self) {
        with_component!(self, c => c.pre_norm = false);
    }

    /// It as it is written, all keys filled in.
    pub(crate) fn show(&self, recurrent: bool) -> ValueKind {
        let (section, mut keys) = (self.kind().section(), Fields::broken());
        with_component!(self, c => c.show(&mut keys, recurrent));
        let name = match self {
            Component::Defined(defined) => defined.name(),
            _ => {
                keys.0.items.retain(|item| section.key(&item.node.key.text).is_some());
                section.name
            }
        };
        let mut wrapper = Fields::broken();
        wrapper.put(name, keys.map());
        wrapper.map()
    }
}

/// The bounds of a small form.
pub struct Small<'a> {
    /// The width of the stream now.
    pub hidden: u64,
    /// Tokens of a context before.
    pub context: u64,
    /// Tokens of a sequence now.
    pub sequence: u64,
    /// Lowers the size of a path to a bound.
    pub lower: &'a mut dyn FnMut(&str, &mut u64, u64),
}

impl Small<'_> {
    /// Lowers the size of a path to a bound.
    pub fn less(&mut self, path: &str, size: &mut u64, most: u64) {
        (self.lower)(path, size, most);
    }

    /// The size of vectors that a rotation turns, all elements or a share: at least two pairs, and
    /// two elements more where some do not turn.
    pub fn turned(&mut self, path: &str, rope: &mut Option<Rope>, size: &mut u64) {
        let before = *size;
        match rope {
            Some(rope) if rope.share < 1.0 => {
                self.less(path, size, 6);
                if *size < before {
                    rope.share = 4.0 / *size as f64;
                }
            }
            Some(_) | None => self.less(path, size, 4),
        }
    }
}

impl Router {
    /// Size of its queries and keys, where it has any.
    fn query(&mut self) -> Option<&mut u64> {
        match &mut self.form {
            RouterForm::LowRank { query, .. } => Some(query),
            RouterForm::Linear => None,
        }
    }

    fn broken(&self) -> Option<String> {
        match &self.form {
            RouterForm::LowRank { query, rope: Some(rope) } if !rope.turns_pairs(*query) => {
                Some(format!("a rotation needs an even query, not {query}"))
            }
            RouterForm::LowRank { .. } | RouterForm::Linear => None,
        }
    }

    fn shrink(&mut self, path: &str, to: &mut Small) {
        if let RouterForm::LowRank { query, rope } = &mut self.form {
            to.turned(path, rope, query);
        }
    }

    fn unbalance(&mut self) {
        (self.balance, self.load_balance_loss, self.z_loss) = (None, 0.0, 0.0);
    }
}

/// The norm in front of a component.
pub const PRE_NORM: Key = key(
    "pre_norm",
    Type::Bool,
    Value("true"),
    "Whether the component reads the stream through a norm of its own (not in OLMo 2).",
);

/// The norm after a component.
pub const POST_NORM: Key =
    key("post_norm", Type::Bool, FALSE, "Whether the branch output has a norm of its own (Gemma 2).");

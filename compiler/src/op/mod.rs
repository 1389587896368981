//! The operations of the IR: one folder each, or one for a family that shares its payload.
//!
//! *In*: an operation with its attributes. *Out*: all that passes ask of it. *Promise*: this file
//! has the one list of operations and that of their kernels; an operation's folder answers every
//! question of [`Operation`], none has a default, and a new operation fails to compile until all
//! are answered.
//!
//! Notation: `x[b, t, h]` is a value with those dimensions; `..` stands for any leading dimensions
//! (the *rows*). Every operation is a pure function of its operands; "state" operands are consumed
//! and returned, which the schedule turns into updates in place. Sums are over the named dimensions
//! in increasing index order.

pub mod arrange;
pub mod attention;
pub mod by_head;
pub mod cache;
pub mod choose;
pub mod chosen;
pub mod collective;
pub mod combine;
pub mod contract;
pub mod conv;
pub mod counts;
pub mod depth;
pub mod elementwise;
pub mod embed;
pub mod fp8;
pub mod gather;
pub mod group;
pub mod grouped;
pub mod kernel;
pub mod linear_attention;
pub mod loss;
pub mod memory;
pub mod norm;
pub mod pick;
pub mod places;
pub mod recurrence;
pub mod reduce;
pub mod rope;
pub mod route;
pub mod rows;
pub mod running;
pub mod shape;
pub mod shift;
pub mod softmax;
pub mod sources;
pub mod tokens;
pub mod update;

mod bits;

pub use arrange::Arrange;
pub use attention::{Attention, AttentionGrad, Mask};
pub use bits::Bits;
pub use by_head::ByHead;
pub use choose::{ChooseKeys, Measure};
pub use chosen::{KeyMass, KeyScores, KeyScoresGrad};
pub use contract::Contract;
pub use conv::{Conv, ConvGrad, Sequence, Tokens};
pub use depth::{ABSENT, DepthAttention, DepthAttentionGrad};
pub use elementwise::{Binary, Cast, Constant, Unary};
pub use embed::EmbedGrad;
pub use fp8::Fp8;
pub use group::{Group, RoundGroups};
pub use grouped::{Grouped, GroupedOuter};
pub use linear_attention::{Decay, Delta, LinearAttention, LinearAttentionGrad};
pub use loss::{HeadLoss, HeadLossGrad};
pub use norm::{Rms, RmsGrad};
pub use pick::PickGrad;
pub use places::{Decide, KeepInts, Runs};
pub use recurrence::{Recurrence, RecurrenceGrad, Step};
pub use reduce::{Reduce, Reduction};
pub use rope::{Chosen, Positions, Rope, RopeScaling};
pub use route::Route;
pub use running::Running;
pub use shape::{Concat, Reshape, Split, Zeros};
pub use shift::Shift;
pub use sources::{ReadSources, ReadSourcesGrad};
pub use tokens::{PutTokens, TopTokens};

// Imports of every operation's folder, by way of `use super::*`.
use crate::CompileError;
use crate::autodiff::Adjoint;
use crate::build::Builder;
use crate::ir::cost::{Count, Counts, Extents, LAST, Shapes};
use crate::ir::infer::{Operands, TypeError, is_subsequence, repeated};
use crate::ir::interpret::{
    Data, Evaluation, Tensor, checked, inner_product, log_sum_exp, round_bf16, softcap, softcap_slope,
    strides, walk,
};
use crate::ir::random::{Case, Instance, Rng, with};
use crate::ir::text::{Attributes, Parsed};
use crate::ir::{Binding, DType, Dim, Dims, Lifetime, Node, Type, Value};
use crate::program::{Broadcast, RowOp, RowStore};
use crate::schedule::need::{Asked, Need};
use crate::schedule::rows::{RowBuilder, RowWork};
use crate::schedule::{Choose, row_dims};
use bits::by_bits;

/// All that passes ask of an operation. Answers that need code are handed over by its
/// [`Signature`] as `self`.
pub(crate) trait Operation {
    /// Its name, operands and results, and how passes treat it.
    fn signature(&self) -> Signature<'_>;

    /// The types of its results, or why the operands do not fit. Their number has been checked.
    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError>;

    /// Its meaning, in f64.
    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String>;

    /// A small random instance of a blank.
    fn random(&self, case: Case) -> Instance;
}

/// The attributes of an operation that has some.
pub(crate) trait Payload: Default {
    /// One of each name, its attributes blank: the parser fills them in, and each has a random
    /// instance.
    fn blanks() -> Vec<Self> {
        vec![Self::default()]
    }

    /// Visits the attributes in the order of the text form.
    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()>;
}

/// An operation's name, operands and results, and how passes treat it.
pub(crate) struct Signature<'a> {
    /// Its word in the text form.
    pub name: &'static str,
    /// Operands: a name, then the type where it is not that of floats. One that ends in `?` may be
    /// absent, and `…` stands for any number more of the one before it.
    pub operands: &'static [&'static str],
    /// Results, in the same notation. One with the name of an operand stays in that operand's
    /// memory.
    pub results: &'static [&'static str],
    /// How it is scheduled.
    pub class: Class<'a>,
    /// The rows of operands that some rows of results need.
    pub rows: Rows,
    /// Its operands and results in bf16.
    pub bf16: Bf16,
    /// Its cost when it runs alone.
    pub work: Work<'a>,
    /// How cotangents pass it.
    pub derivative: Derivative<'a>,
}

/// How an operation is scheduled.
pub(crate) enum Class<'a> {
    /// A number or zeros: every kernel that reads it makes it.
    Number(RowOp),
    /// The operand's elements in other dimensions. Nothing runs where the operand is in memory.
    View {
        /// Where the results are in the operand.
        moved: Moved<'a>,
        /// Its part of a row kernel that has the operand.
        row: &'a dyn RowWork,
    },
    /// The operand itself.
    Identity,
    /// Row work that looks at one element at a time.
    Element(&'a dyn RowWork),
    /// Row work: each row of results is made of the same row of operands, or all rows are summed.
    Row {
        /// Whether it is so cheap that a second kernel makes it again rather than reading it.
        again: bool,
        /// Its part of a row kernel.
        row: &'a dyn RowWork,
    },
    /// Rows of operand 0 in the order of operand 1: its reader may do it.
    Gather(&'a dyn Choose),
    /// A kernel of its own.
    Anchor(&'a dyn Choose, Anchor),
}

/// How a view shows its operand.
#[derive(Clone, Copy)]
pub(crate) enum Moved<'a> {
    /// The same elements in these dimensions.
    Reshaped(&'a [Dim]),
    /// Parts of each row, of these sizes, a result each.
    Cut(&'a [Dim]),
}

/// Particulars of a kernel of its own.
#[derive(Clone, Copy, Default)]
pub(crate) struct Anchor {
    /// The operand whose rows it may read through an order, a gather left to it.
    pub through: Option<usize>,
    /// Whether it can store its result as the type that a cast, its only reader, gives it.
    pub casts: bool,
    /// Whether the backward function makes its result again rather than keeping it.
    pub again: bool,
}

impl<'a> Class<'a> {
    /// A kernel of its own with nothing particular.
    pub fn anchored(kernel: &'a dyn Choose) -> Class<'a> {
        Class::Anchor(kernel, Anchor::default())
    }

    /// Whether the backward function makes results again rather than keeping them: work that costs
    /// little more than reading its operands.
    pub fn repeats(&self) -> bool {
        match self {
            Class::Number(_)
            | Class::View { .. }
            | Class::Identity
            | Class::Element(_)
            | Class::Row { .. }
            | Class::Gather(_) => true,
            Class::Anchor(_, anchor) => anchor.again,
        }
    }

    /// The particulars of its kernel, where it has one of its own.
    pub fn anchor(&self) -> Option<Anchor> {
        if let Class::Anchor(_, anchor) = self { Some(*anchor) } else { None }
    }
}

/// The rows of operands that the needed rows of the results need.
#[derive(Clone, Copy)]
pub(crate) enum Rows {
    /// All rows of every operand.
    All,
    /// The same rows, of operands that have the rows of the results.
    Same,
    /// The same where the function holds: each token is one row of the kernel. All rows, of results
    /// too, where a token has several.
    One(fn(&Asked) -> bool),
    /// As the function says of an operand.
    Of(fn(&Asked, usize) -> Need),
}

/// Operands and results of an operation where storage is in bf16.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bf16 {
    /// Nothing: it reads every operand in the type it has.
    Own,
    /// It reads these operands, weights, as they are stored, and gives f32.
    Stored(&'static [usize]),
    /// It reads these operands as bf16.
    Reads(&'static [usize]),
    /// It reads its first two operands as bf16; the second is a weight that may be stored in bf16
    /// while the first is f32: the head's matmul.
    Head,
    /// It reads these operands as bf16 where they are stored so anyway.
    Follows(&'static [usize]),
    /// A product of two operands: both are read as bf16 unless it is of weights alone; its result
    /// is stored so where it has a row for each token, and no choice is made from it.
    Product,
    /// As `Product`, with a row for each slot.
    Slots,
}

/// The cost of an operation. Elements of operands are read once and those of results written once,
/// unless it counts for itself.
#[derive(Clone, Copy)]
pub(crate) enum Work<'a> {
    /// Nothing runs: a view or a fact.
    Nothing,
    /// Elements move.
    Moves,
    /// This many element-wise operations for each element of this operand.
    Operand(usize, u64),
    /// This many element-wise operations for each element of the first result.
    Result(u64),
    /// It counts for itself.
    Counted(&'a dyn Counted),
    /// A product of two tensors: a router's, or a dense one.
    Dense(&'a dyn Counted),
    /// Products of a mixture's experts. Offsets in this operand decide how many slots are in a
    /// group, and how many groups have one.
    Groups(&'a dyn Counted, usize),
    /// Products of attention along depth. The index in this operand decides how many rows of a
    /// cache are seen.
    Row(&'a dyn Counted, &'a Attention, usize),
    /// Products of attention along the sequence. The mask operands from this one on decide which
    /// pairs of a query and a key exist.
    Pairs(&'a dyn Counted, &'a Attention, usize),
}

/// An operation that counts what it costs.
pub(crate) trait Counted {
    /// The cost of running it alone.
    fn cost(&self, s: &Shapes, extents: &Extents) -> Counts;
}

/// How cotangents pass an operation.
pub(crate) enum Derivative<'a> {
    /// By its rule.
    Rule(&'a dyn Reverse),
    /// None passes, for this reason.
    Blocked(#[expect(dead_code, reason = "for readers of the operation's folder")] &'static str),
    /// None passes: the result is a decision, which finite differences hold as it was.
    Held(Ties),
    /// To ask for it is an error: `no derivative …`.
    Missing(&'static str),
}

/// Operands between which a decision changes.
#[derive(Clone, Copy)]
pub(crate) enum Ties {
    /// It changes with its operand: the gradient is stopped.
    Copies,
    /// The last score chosen and the next.
    Scores,
    /// The same of blocks of keys.
    Keys,
    /// A number and zero.
    Zero,
    /// The last score of a group that its tiles take and the next.
    Tiles,
}

impl Derivative<'_> {
    /// The answer of gradient operations.
    const SECOND_ORDER: Derivative<'static> = Derivative::Missing("of second order");
}

/// The rule of an operation's derivative.
pub(crate) trait Reverse {
    /// Adds to the cotangents of the operands what those of the results give.
    fn reverse(&self, at: &mut Adjoint) -> Result<(), CompileError>;
}

impl Signature<'_> {
    /// Names of results, or of operands: those of the list, and as many more as `…` stands for.
    pub fn names(list: &[&'static str], count: usize) -> Vec<String> {
        let named =
            |list: &[&'static str]| list.iter().take(count).map(|text| name(text).to_string()).collect();
        let [first @ .., repeated, "…"] = list else { return named(list) };
        let stem = name(repeated).trim_end_matches('0');
        let mut names: Vec<String> = named(first);
        names.extend((0..count.saturating_sub(first.len())).map(|i| format!("{stem}{i}")));
        names
    }

    /// The operand in whose memory a result stays, where it does.
    pub fn in_place(&self, result: usize) -> Option<usize> {
        let result = name(self.results.get(result).filter(|text| **text != "…")?);
        self.operands.iter().position(|operand| name(operand) == result)
    }
}

/// The name of an operand or result of a signature.
fn name(text: &'static str) -> &'static str {
    text.split(['[', ' ', '?']).next().unwrap_or(text)
}

/// The variant of an operation, its unit type where it has no attributes, and its payload where it
/// has some.
macro_rules! variant {
    (pattern $op:ident $x:ident) => {
        Op::$op
    };
    (pattern $op:ident $x:ident $payload:ident) => {
        Op::$op($x)
    };
    (operation $folder:ident $op:ident $x:ident) => {
        &$folder::$op
    };
    (operation $folder:ident $op:ident $x:ident $payload:ident) => {
        $x
    };
    (attributes $x:ident $a:ident) => {
        Ok(())
    };
    (attributes $x:ident $a:ident $payload:ident) => {
        $x.attributes($a)
    };
    (blanks $folder:ident $op:ident) => {
        [Op::$op]
    };
    (blanks $folder:ident $op:ident $payload:ident) => {
        $folder::$payload::blanks().into_iter().map(Op::$op)
    };
}

/// Makes [`Op`] from the one list: variant, payload where the operation has attributes, folder.
macro_rules! operations {
    ($($variant:ident $(($payload:ident))? in $folder:ident,)*) => {
        /// An operation with its attributes.
        #[derive(Clone, Debug, PartialEq, Eq, Hash)]
        pub enum Op {
            $(
                #[doc = concat!("See [`", stringify!($folder), "`](mod@", stringify!($folder), ").")]
                $variant $(($folder::$payload))?,
            )*
        }

        impl Op {
            /// Names of the variants.
            pub const VARIANTS: &[&str] = &[$(stringify!($variant)),*];

            /// Name of the variant.
            fn variant(&self) -> &'static str {
                match self {
                    $(Op::$variant { .. } => stringify!($variant),)*
                }
            }

            /// The answers of its folder.
            pub(crate) fn operation(&self) -> &dyn Operation {
                match self {
                    $(variant!(pattern $variant x $($payload)?) => variant!(operation $folder $variant x $($payload)?),)*
                }
            }

            /// Visits the attributes in the order of the text form.
            pub(crate) fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
                match self {
                    $(variant!(pattern $variant x $($payload)?) => variant!(attributes x a $($payload)?),)*
                }
            }

            /// One of each name, its attributes blank.
            pub(crate) fn blanks() -> Vec<Op> {
                let mut all = vec![];
                $(all.extend(variant!(blanks $folder $variant $($payload)?));)*
                all
            }
        }

        $($(
            impl From<$folder::$payload> for Op {
                fn from(payload: $folder::$payload) -> Op {
                    Op::$variant(payload)
                }
            }

            impl<'a> TryFrom<&'a Op> for &'a $folder::$payload {
                type Error = ();

                fn try_from(op: &'a Op) -> Result<Self, ()> {
                    if let Op::$variant(payload) = op { Ok(payload) } else { Err(()) }
                }
            }
        )?)*
    };
}

operations! {
    Constant(Constant) in elementwise,
    Unary(Unary) in elementwise,
    Binary(Binary) in elementwise,
    StopGradient in elementwise,
    Cast(Cast) in elementwise,
    Fp8(Fp8) in fp8,

    Reduce(Reduction) in reduce,
    Rms(Rms) in norm,
    RmsGrad(RmsGrad) in norm,
    Softmax in softmax,
    SoftmaxGrad in softmax,
    Rope(Rope) in rope,
    Reshape(Reshape) in shape,
    Split(Split) in shape,
    Concat(Concat) in shape,
    Zeros(Zeros) in shape,
    Arrange(Arrange) in arrange,

    Contract(Contract) in contract,
    ByHead(ByHead) in by_head,
    Grouped(Grouped) in grouped,
    GroupedOuter(GroupedOuter) in grouped,

    Route(Route) in route,
    Group(Group) in group,
    RoundGroups(RoundGroups) in group,
    Pick in pick,
    PickGrad(PickGrad) in pick,
    Gather in gather,
    Combine in combine,
    CombineGrad in combine,
    CombineGates in combine,
    AddCounts in counts,

    TopTokens(TopTokens) in tokens,
    TakeTokens in tokens,
    PutTokens(PutTokens) in tokens,
    Decide(Decide) in places,
    Keep in places,
    KeepInts(KeepInts) in places,
    Numbers in places,
    Runs(Runs) in places,
    Admit in places,

    Conv(Conv) in conv,
    ConvGrad(ConvGrad) in conv,
    Running(Running) in running,
    Recurrence(Recurrence) in recurrence,
    RecurrenceGrad(RecurrenceGrad) in recurrence,
    LinearAttention(LinearAttention) in linear_attention,
    LinearAttentionGrad(LinearAttentionGrad) in linear_attention,

    Attention(Attention) in attention,
    AttentionGrad(AttentionGrad) in attention,
    ChooseKeys(ChooseKeys) in choose,
    KeyMass(KeyMass) in chosen,
    KeyScores(KeyScores) in chosen,
    KeyScoresGrad(KeyScoresGrad) in chosen,
    Number in sources,
    ReadSources(ReadSources) in sources,
    ReadSourcesGrad(ReadSourcesGrad) in sources,
    CacheWrite in cache,
    Append in cache,
    CacheTake in cache,
    Shift(Shift) in shift,
    ShiftState in shift,
    DepthAttention(DepthAttention) in depth,
    DepthAttentionGrad(DepthAttentionGrad) in depth,

    Embed in embed,
    EmbedGrad(EmbedGrad) in embed,
    CrossEntropy in loss,
    CrossEntropyGrad in loss,
    HeadLoss(HeadLoss) in loss,
    HeadLossGrad(HeadLossGrad) in loss,
}

/// Declares [`Kernel`], the structs of its variants (in [`kernels`]), and `with_kernel!`, which
/// does the same with each.
macro_rules! kernels {
    ($d:tt $($folder:ident { $($variant:ident),* $(,)? })*) => {
        /// The numbers of every kernel, a struct for each.
        pub mod kernels {
            $(pub use super::$folder::kernel::{$($variant),*};)*
        }

        /// The kernel of a launch: the one list of all kernels. Each is documented where its struct
        /// stands, and its operands are its [`signature`](kernel::KernelKind::signature).
        #[derive(Clone, Debug, PartialEq, Eq, Hash)]
        pub enum Kernel {
            /// A generated kernel over rows.
            Rows(rows::kernel::RowKernel),
            $($(
                #[doc = concat!("See [`kernels::", stringify!($variant), "`].")]
                $variant(kernels::$variant),
            )*)*
        }

        impl Kernel {
            /// Names of the variants whose structs are in [`kernels`].
            pub const VARIANTS: &[&str] = &[$($(stringify!($variant)),*),*];

            fn kind(&self) -> &dyn kernel::KernelKind {
                match self {
                    Kernel::Rows(k) => k,
                    $($(Kernel::$variant(k) => k,)*)*
                }
            }
        }

        $($(
            impl From<kernels::$variant> for Kernel {
                fn from(k: kernels::$variant) -> Kernel {
                    Kernel::$variant(k)
                }
            }
        )*)*

        /// `with_kernel!(kernel, k => body)`: the same expression for the struct of whichever
        /// kernel it is.
        #[macro_export]
        macro_rules! with_kernel {
            ($d kernel:expr, $d k:ident => $d body:expr) => {
                match $d kernel {
                    $crate::program::Kernel::Rows($d k) => $d body,
                    $($($crate::program::Kernel::$variant($d k) => $d body,)*)*
                }
            };
        }
    };
}

kernels! { $
    contract { Product, ProductE4m3 }
    arrange { Arrange }
    by_head { ByHead }
    grouped { Grouped, GroupedOuter }
    route { Route }
    group { Group, RoundGroups }
    counts { AddCounts }
    gather { Gather }
    combine { Combine, CombineGrad, CombineGates }
    tokens { TopTokens, TakeTokens, PutTokens }
    places { Decide, Keep, KeepInts, Numbers, Runs, Admit }
    conv { Conv, ConvGrad }
    running { Running }
    recurrence { Recurrence, RecurrenceGrad }
    linear_attention { LinearAttention, LinearAttentionGrad }
    attention { Attention, AttentionGrad }
    choose { ChooseKeys }
    chosen { KeyMass, KeyScores, KeyScoresGrad }
    depth { DepthAttention, DepthAttentionGrad }
    sources { ReadSources, ReadSourcesGrad }
    cache { CacheWrite, Append, CacheTake }
    shift { Shift, ShiftState }
    embed { Embed, EmbedGrad }
    fp8 { Fp8 }
    loss { CrossEntropy, CrossEntropyGrad, HeadLoss, HeadLossGrad }
    memory { Zero, Copy }
    update { Norm, Balance }
    collective { AllReduce, ReduceScatter, AllGather, Gathered, Scattered, Sent, Returned, Pooled }
}

/// By name and printed attributes: the order of e-nodes in a class, which decides between terms of
/// equal price, so that plans do not depend on the order of the list above.
impl Ord for Op {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        let attributes = || format!("{self:?}").cmp(&format!("{other:?}"));
        self.variant().cmp(other.variant()).then_with(attributes)
    }
}

impl PartialOrd for Op {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Op {
    /// The operation's word in the text form.
    pub fn name(&self) -> &'static str {
        self.signature().name
    }

    /// Its name, operands and results, and how passes treat it.
    pub(crate) fn signature(&self) -> Signature<'_> {
        self.operation().signature()
    }

    /// How it is scheduled.
    pub(crate) fn class(&self) -> Class<'_> {
        self.signature().class
    }

    /// The dimensions that the operation itself names, in addition to those of its operands.
    pub fn dims(&self) -> Dims {
        crate::ir::text::named_dims(self)
    }
}

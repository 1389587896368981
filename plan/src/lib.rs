//! Memory, bytes, time and cost of a training by many ranks, before it begins.
//!
//! *In*: the compiled plan of a rank, seconds of each of its launches, and a [`Machine`]. *Out*:
//! the [`Memory`] of a rank, the bytes of each link, the seconds of a step, and what failures cost.
//! *Promise*: memory is that of the plan which the rank loads, bytes are those that its transport
//! counts, and the time of a step is a closed form that [`simulate`] does not share: it moves every
//! launch and every message of every rank. Nothing here runs a plan, or asks a device.
//!
//! ```text
//! machine   a table of machines, or a file        links, rates, failures
//! memory    a plan                                bytes by kind
//! timeline  a plan, prices, micro-batches         launches and exchanges of a step, in order
//! exchange  an exchange, a mesh                   messages of its algorithm, bytes by link
//! model     a timeline, a mesh                    seconds of a step, in closed form
//! simulate  a timeline, a mesh                    the same by events
//! failure   hours between failures, a checkpoint  the best distance, what is lost
//! published figures of runs that others reported  the same forms, and those that are not built
//! ```

pub mod exchange;
pub mod failure;
pub mod machine;
pub mod memory;
pub mod model;
pub mod published;
pub mod simulate;
pub mod timeline;

pub use exchange::{Bytes, Exchange, Mesh, What};
pub use machine::{Machine, MachineError};
pub use memory::Memory;
pub use timeline::{Work, forward, timeline};

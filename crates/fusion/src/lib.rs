//! Kernel fusion: what a step computes as an explicit list of ops, and named rules that
//! rewrite several of them into one that a GPU has a kernel for.
//!
//! A GPU backend does not launch an op when a model asks for it, but appends it to an
//! [`OpList`]. Before the list is launched, [`fuse`] applies [`RULES`] to it. So models stay
//! equations, one op after the other, and no kernel is chosen by guessing what comes next.
//!
//! ```text
//! model ──ops──> OpList ──fuse──> OpList of fewer ops ──launch──> kernels of the backend
//! ```
//!
//! A list is in SSA form: an op makes new [`Value`]s and changes none, whatever memory they
//! are given later. Weights, KV caches, recurrent states and rows of a step are [`Operand`]s,
//! opaque numbers of the backend's. What a rule must know of the device it asks a
//! [`Device`]. Each fused op has the bits of the ops that it stands for, one after the
//! other; [`interpret`] defines that on [`backend::Reference`].
//!
//! No kernels, no memory, no launches.

#![forbid(unsafe_code)]

pub mod interpret;
mod list;
mod rewrite;
pub mod rules;
#[cfg(test)]
mod tests;

pub use list::{HeadJob, HeadRole, Kind, Op, OpList, Operand, Rope, SumTerm, Value};
pub use rewrite::{Device, fuse};
pub use rules::{RULES, Rule};

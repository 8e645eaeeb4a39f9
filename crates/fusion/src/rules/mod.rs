//! The rules of fusion, a file for each small family.
//!
//! A rule is data: a name, what it looks for and what it puts there, written as equations,
//! and an example list with the text of what becomes of it, which the tests check, on
//! [`backend::Reference`] too. Rules are applied in the order of [`RULES`]; none takes a
//! value away that an op outside of its pattern, or somebody after the list, still reads.

pub mod beside_experts;
pub mod delta;
pub mod f16;
pub mod glu;
pub mod heads;
pub mod products;
pub mod residual;

use crate::rewrite::Match;
use crate::{Kind, OpList};

/// How several ops become one.
pub struct Rule {
    /// Short name.
    pub name: &'static str,
    /// The ops that it looks for.
    pub pattern: &'static str,
    /// What it puts in their place.
    pub replacement: &'static str,
    /// A list in which it finds its pattern once.
    pub example: fn() -> OpList,
    /// The text of the example once the rule was applied.
    pub rewritten: &'static str,
    /// Whether the pattern's last op may be of this kind.
    pub(crate) starts_at: fn(&Kind) -> bool,
    /// Rewrites the pattern whose last op is at the place given, and returns where the scan goes on;
    /// `None` if it is not there.
    pub(crate) rewrite: fn(&mut Match<'_>, usize) -> Option<usize>,
}

/// Every rule, in the order in which they are applied. Those that look for more ops come
/// before those that would take a part of them.
pub const RULES: &[Rule] = &[
    residual::DENSE_BRANCH,
    residual::SHARED_EXPERT,
    residual::POST_NORM,
    residual::FACTOR,
    residual::NEXT_NORM,
    heads::NORM_ROPE,
    heads::APPEND,
    delta::NORM_GLU,
    glu::NORM,
    glu::COLUMNS,
    products::SAME_INPUT,
    beside_experts::GATE,
    glu::PROJECTION,
    f16::INPUTS,
    f16::KEPT,
    f16::EPILOGUE,
];

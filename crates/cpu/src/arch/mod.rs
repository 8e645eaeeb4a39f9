//! The logical vector: 16 lanes of `f32`, on whatever the CPU has.
//!
//! A kernel is one generic function over [`Lanes`]. [`Detected::run`] enters it
//! through a function compiled for that instruction set, so everything below is
//! inlined into it; the choice is made once per op or per job, never per row.
//! Results have equal bits on all of them: lanes round alike, and sums over
//! lanes go through [`backend::math::sum_tree`]'s order.

#[cfg(target_arch = "aarch64")]
mod aarch64;
mod bytes;
mod element;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod instructions;
mod isa;
mod lanes;
mod scalar;
#[cfg(test)]
mod tests;
mod tiles;
#[cfg(target_arch = "x86_64")]
mod x86_64;

pub(crate) use bytes::{ByteKernel, Bytes};
pub(crate) use element::{Element, with_element};
pub(crate) use isa::Detected;
pub use isa::Isa;
pub(crate) use lanes::{Kernel, Lanes, Registers, for_each, load, map, map_two, store, update};
pub(crate) use tiles::{TILE_DEPTH, TILE_ROWS, TileKernel, TileRegisters};

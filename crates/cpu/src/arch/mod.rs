//! Instruction sets, behind one vector type: 16 lanes of `f32`.
//!
//! A kernel is one generic function over [`Lanes`]. [`Detected::run`] enters it through a
//! function that is compiled for an instruction set and into which the whole kernel is inlined;
//! the choice is made once per op or per job, never per row. All instruction sets give equal
//! bits: lanes round alike, and sums over lanes have the order of [`backend::math::sum_tree`].

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
pub(crate) use lanes::{
    Kernel, Lanes, Registers, for_each, load, map, map_two, store, update, update_one, update_two,
};
pub(crate) use tiles::{TILE_DEPTH, TILE_ROWS, TileKernel, TileRegisters};

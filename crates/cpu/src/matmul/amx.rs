//! Products of coded weights with more than a few rows, in tiles of 16 x 16 sums.
//!
//! The codes of a group are a tile as they lie in a panel, once they are bytes; so
//! a panel is unpacked once for all rows. Sums of a group leave the tile for
//! memory and are added to the outputs of [`coded::dot`](crate::coded::dot) in its
//! order: only the integers are summed elsewhere.

mod few;
mod many;

use super::quantized::{
    AFFINE4, AFFINE8, IntegerScales, LEVEL4, LEVEL8, QuantizedPanels, QuantizedWork, ScaleLayout,
    TABLE4,
};
use crate::arch::{self, TILE_ROWS as M};
use crate::device::Cpu;
use few::FewRows;
use half::{bf16, f16};
use quant::Scalar;
use std::marker::PhantomData;

/// Kernels for few rows: the codes, columns of a group, groups of a unit and factors that
/// each is for, and from how many rows on it is faster than vectors (Sapphire Rapids,
/// weights from memory): where codes take a byte, memory is what vectors wait for, too.
macro_rules! few {
    ($($kind:ident, $group:tt, $span:tt, $factors:pat => $scales:ty, from $rows:literal;)*) => {
        /// Rows from which on tiles multiply blocks of few faster than vectors do.
        fn from(w: &QuantizedPanels) -> Option<usize> {
            match (w.kind, w.group, w.span, w.factors) {
                $(($kind, $group, $span, $factors) => Some($rows),)*
                _ => None,
            }
        }

        /// Multiplies blocks of few rows.
        fn few(cpu: &Cpu, piece: QuantizedWork<'_>) {
            match (piece.w.kind, piece.w.group, piece.w.span, piece.w.factors) {
                $(($kind, $group, $span, $factors) => {
                    few!(@$group, cpu, piece, ($kind, $span, $scales));
                })*
                other => unreachable!("no kernel for {other:?}"),
            }
        }
    };
    (@32, $($to:tt)*) => { few!(@@ 32, (8, 2), $($to)*) };
    (@64, $($to:tt)*) => { few!(@@ 64, (8, 2) (16, 1), $($to)*) };
    (@128, $($to:tt)*) => { few!(@@ 128, (16, 1), $($to)*) };
    (@@ $group:tt, $(($block:tt, $panels:tt))*, $cpu:ident, $piece:ident, $of:tt) => {
        match $piece.x.block {
            $($block => $cpu.isa.run_tiles(few!(@@@ $group, $block, $panels, $piece, $of)),)*
            other => unreachable!("no kernel for blocks of {other} rows"),
        }
    };
    (@@@ $group:tt, $block:tt, $panels:tt, $piece:ident, ($kind:ident, $span:tt, $scales:ty)) => {
        FewRows::<$scales, $kind, $group, $span, $block, $panels>($piece, PhantomData)
    };
}

few! {
    LEVEL4, 32, 2, ScaleLayout::Own(Scalar::F16) => f16, from 8;
    TABLE4, 32, 2, ScaleLayout::Own(Scalar::F16) => f16, from 8;
    LEVEL8, 32, 2, ScaleLayout::Own(Scalar::F16) => f16, from 14;
    AFFINE4, 32, 8, ScaleLayout::Integers => IntegerScales, from 8;
    AFFINE8, 32, 8, ScaleLayout::Integers => IntegerScales, from 14;
    AFFINE4, 32, 1, ScaleLayout::Own(Scalar::Bf16) => bf16, from 8;
    AFFINE4, 64, 1, ScaleLayout::Own(Scalar::Bf16) => bf16, from 8;
    AFFINE8, 64, 1, ScaleLayout::Own(Scalar::Bf16) => bf16, from 14;
    AFFINE4, 128, 1, ScaleLayout::Own(Scalar::Bf16) => bf16, from 14;
    AFFINE8, 128, 1, ScaleLayout::Own(Scalar::Bf16) => bf16, from 14;
}

/// Rows of a block where tiles multiply `rows` rows with `w` faster than vectors do. A tile
/// takes as long however many of its rows there are, so at most an eighth may be missing.
pub(crate) fn block(w: &QuantizedPanels, rows: usize) -> Option<usize> {
    let wide = w.group >= arch::TILE_DEPTH;
    let whole = w.cols.is_multiple_of(w.group.max(arch::TILE_DEPTH));
    let block = if wide && rows > FEW { M } else { FEW };
    match from(w) {
        _ if wide && rows > M => Some(M),
        Some(from) if rows >= from && whole => {
            (rows.next_multiple_of(block) * 7 <= rows * 8).then_some(block)
        }
        _ => None,
    }
}

/// Multiplies in tiles.
pub(crate) fn multiply(cpu: &Cpu, piece: QuantizedWork<'_>) {
    match piece.x.rows > M && piece.x.block == M {
        true => cpu.isa.run_tiles(piece),
        false => few(cpu, piece),
    }
}

/// Rows of which two groups of 32 columns share a tile.
const FEW: usize = M / 2;

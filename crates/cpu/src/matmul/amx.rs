//! Quantized products with more than a few rows, in AMX tiles of 16 x 16 sums.
//!
//! ```text
//!   activations: 16 rows x 64 bytes        codes of a panel: 16 x 64 bytes, unpacked
//!                       └──── one instruction ────┘
//!                     tile of sums: 16 rows x 16 lanes ──▶ memory ──▶ y (vectors)
//! ```
//!
//! The codes of a group are a tile as they lie in a panel, once each takes a byte; so a panel is
//! unpacked once for all rows. The sums of a group leave their tile for memory, and vectors add
//! them to the outputs in the order of [`dot`](super::definition::dot): only the integers are
//! summed elsewhere.

mod few;
mod many;

use super::quantized::{
    AFFINE4, AFFINE8, CodeKind, IntegerScales, LEVEL4, LEVEL8, QuantizedPanels, QuantizedWork,
    ScaleLayout, TABLE4, biased,
};
use crate::arch::{self, TILE_ROWS as M};
use crate::device::Device;
use few::FewRows;
use half::{bf16, f16};
use quant::Scalar;
use std::marker::PhantomData;

/// The kernels for few rows: the kind of codes, columns of a group, groups of a super-block and
/// scales that each is for, and from how many rows on it is faster than vectors (Sapphire Rapids,
/// weights from memory). Where codes take a byte, vectors wait for memory, too, so that is later.
macro_rules! few {
    ($($kind:ident, $group:tt, $span:tt, $layout:pat => $scales:ty, from $rows:literal;)*) => {
        /// The number of rows from which on tiles multiply few rows faster than vectors do; nothing, if they do not
        /// take weights of this kind with groups of so many columns, and super-blocks of so many groups.
        fn from(kind: CodeKind, [group, span]: [usize; 2], scales: ScaleLayout) -> Option<usize> {
            match (kind, group, span, scales) {
                $(($kind, $group, $span, $layout) => Some($rows),)*
                _ => None,
            }
        }

        /// Multiplies few rows.
        fn few(device: &Device, work: QuantizedWork<'_>) {
            match (work.w.kind, work.w.group, work.w.span, work.w.scales) {
                $(($kind, $group, $span, $layout) => {
                    few!(@$group, device, work, ($kind, $span, $scales));
                })*
                other => unreachable!("no kernel for {other:?}"),
            }
        }
    };
    (@32, $($to:tt)*) => { few!(@@ 32, (8, 2) (16, 1), $($to)*) };
    (@64, $($to:tt)*) => { few!(@@ 64, (8, 2) (16, 1), $($to)*) };
    (@128, $($to:tt)*) => { few!(@@ 128, (16, 1), $($to)*) };
    (@@ $group:tt, $(($block:tt, $panels:tt))*, $device:ident, $work:ident, $of:tt) => {
        match $work.x.block {
            $($block => $device.isa.run_tiles(few!(@@@ $group, $block, $panels, $work, $of)),)*
            other => unreachable!("no kernel for blocks of {other} rows"),
        }
    };
    (@@@ $group:tt, $block:tt, $panels:tt, $work:ident, ($kind:ident, $span:tt, $scales:ty)) => {
        FewRows::<$scales, $kind, $group, $span, $block, $panels>($work, PhantomData)
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

/// Whether there is a tile kernel for weights of this kind, with groups of so many columns and super-blocks of so many
/// groups.
pub(crate) fn takes(kind: CodeKind, shape: [usize; 2], scales: ScaleLayout) -> bool {
    shape[0] >= arch::TILE_DEPTH || from(kind, shape, scales).is_some()
}

/// The rows of a block, where tiles multiply `rows` rows with `w` faster than vectors do; else
/// `None`. A block takes as long however many of its rows there are, so at most a quarter of the
/// rows may be absent, and an eighth where small groups have biases. One of 16 rows takes 1.6 times as long as one of 8 (Sapphire Rapids, weights
/// from the second-level cache).
pub(crate) fn block(w: &QuantizedPanels, rows: usize) -> Option<usize> {
    let wide = w.group >= arch::TILE_DEPTH;
    if wide && rows > M {
        return Some(M);
    }
    let few = w.group <= arch::TILE_DEPTH && 5 * rows.div_ceil(FEW) < 8 * rows.div_ceil(M);
    let block = if few { FEW } else { M };
    let whole = w.cols.is_multiple_of(w.group.max(arch::TILE_DEPTH));
    let (most, of) = match biased(w.kind) && !wide {
        true => (7, 8),
        false => (3, 4),
    };
    let full = rows.next_multiple_of(block) * most <= rows * of;
    let from = from(w.kind, [w.group, w.span], w.scales);
    (whole && full && from.is_some_and(|from| rows >= from)).then_some(block)
}

/// Multiplies in tiles. Only where there are tiles.
pub(crate) fn multiply(device: &Device, work: QuantizedWork<'_>) {
    let wide = work.w.group >= arch::TILE_DEPTH;
    match wide && work.x.rows > M && work.x.block == M {
        true => device.isa.run_tiles(work),
        false => few(device, work),
    }
}

/// Rows of a smaller block, of which two groups of 32 columns share a tile.
const FEW: usize = M / 2;

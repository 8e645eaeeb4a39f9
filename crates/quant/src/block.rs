//! Self-contained blocks: codes, scales and biases of some columns in one piece.
//!
//! ```text
//! scale_g = d_s · scales_g        value = scale_g · level(code)
//! bias_g  = m_s · mins_g          value = fma(scale_g, code, bias_g)
//! ```
//!
//! for the columns of group `g`, which lies in super-group `s`. Formats without
//! integer sub-scales have one `d` (and `m`) a group and sub-scales of 1. Every
//! product above is exact in `f32` (11 bits of `d` or 4 of an E4M3, at most 7 of a
//! sub-scale, at most 7 of a level), so a value is rounded once, if at all, and
//! equals what GGUF's own tools compute in two steps.

use crate::{Codes, Format, Owned, Row, Scalar, WeightLayout, Zero};

/// Columns of the longest block.
const COLS: usize = 256;
/// Codes that are copied at once; every block has a multiple of it.
const STEP: usize = 32;
/// Groups of the finest block.
const GROUPS: usize = 16;

/// How one format's blocks are read and written.
#[derive(Clone, Copy)]
pub(crate) struct Block {
    /// Takes a block apart.
    pub(crate) read: fn(&[u8], &mut Pieces),
    /// The inverse of `read`, into zeroed bytes.
    pub(crate) write: fn(&Pieces, &mut [u8]),
    /// Chooses the pieces for one block's values.
    pub(crate) fit: Option<fn(&Codes, &[f32], &mut Pieces)>,
}

/// One block taken apart. What a format does not have is as in [`Pieces::new`].
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Pieces {
    pub(crate) codes: [u8; COLS],
    /// One a super-group; in formats without sub-scales, one a group.
    pub(crate) d: [f32; 4],
    pub(crate) m: [f32; 4],
    /// One a group.
    pub(crate) scales: [i8; GROUPS],
    pub(crate) mins: [i8; GROUPS],
}

impl Pieces {
    pub(crate) fn new() -> Pieces {
        Pieces {
            codes: [0; COLS],
            d: [0.0; 4],
            m: [0.0; 4],
            scales: [1; GROUPS],
            mins: [1; GROUPS],
        }
    }

    /// Copies the codes of a block to `to`.
    pub(crate) fn put_codes(&self, to: &mut [u8]) {
        let steps = to.as_chunks_mut::<STEP>().0.iter_mut();
        for (to, from) in steps.zip(self.codes.as_chunks().0) {
            *to = *from;
        }
    }

    /// Scale and bias of group `g`.
    pub(crate) fn factors(&self, view: &Codes, g: usize) -> (f32, f32) {
        // A division a group takes as long as reading its codes.
        let s = match view.super_group == view.group {
            true => g,
            false => g * view.group / view.super_group,
        };
        (
            self.d[s] * f32::from(self.scales[g]),
            self.m[s] * f32::from(self.mins[g]),
        )
    }
}

/// A format of blocks of `cols` columns in `bytes` bytes.
pub(crate) const fn format(
    name: &'static str,
    ggml: u32,
    (cols, bytes): (u16, u16),
    view: Codes,
    block: Block,
) -> Format {
    assert!(cols.is_multiple_of(STEP as u16), "whole steps of codes");
    Format {
        name,
        layout: WeightLayout::Block { cols, bytes },
        block: cols as usize,
        ggml: Some(ggml),
        view: Some(view),
        pieces: Some(block),
        decode,
        encode: match block.fit {
            Some(_) => Some(encode),
            None => None,
        },
    }
}

/// The parts of a format made by [`format`].
fn parts(format: &Format) -> (Codes, Block, usize) {
    match (format.view, format.pieces, format.layout) {
        (Some(view), Some(block), WeightLayout::Block { bytes, .. }) => (view, block, bytes.into()),
        _ => unreachable!("only formats of blocks are made here"),
    }
}

/// Calls `visit` with each block of a row and its first column.
pub(crate) fn each(format: &Format, row: Row<'_>, mut visit: impl FnMut(usize, &Pieces)) {
    let (_, block, bytes) = parts(format);
    let mut pieces = Pieces::new();
    for (i, bytes) in row.codes.chunks_exact(bytes).enumerate() {
        (block.read)(bytes, &mut pieces);
        visit(i * format.block, &pieces);
    }
}

fn decode(format: &Format, row: Row<'_>, out: &mut [f32]) {
    let (view, ..) = parts(format);
    each(format, row, |first, pieces| {
        let out = &mut out[first..first + format.block];
        let groups = out.chunks_exact_mut(view.group);
        for (g, (out, codes)) in groups
            .zip(pieces.codes.chunks_exact(view.group))
            .enumerate()
        {
            let (scale, bias) = pieces.factors(&view, g);
            let values = out.iter_mut().zip(codes);
            match view.zero {
                Zero::Bias => values.for_each(|(v, &c)| *v = scale.mul_add(c.into(), bias)),
                Zero::Levels(levels) => {
                    values.for_each(|(v, &c)| *v = scale * f32::from(levels[usize::from(c)]));
                }
            }
        }
    });
}

/// Appends a row of blocks.
pub(crate) fn encode(format: &Format, values: &[f32], _scale: Scalar, out: &mut Owned) {
    let (view, block, bytes) = parts(format);
    let fit = block.fit.expect("a format that can be written");
    let mut pieces = Pieces::new();
    for values in values.chunks_exact(format.block) {
        fit(&view, values, &mut pieces);
        let start = out.codes.len();
        out.codes.resize(start + bytes, 0);
        (block.write)(&pieces, &mut out.codes[start..]);
    }
}

/// The half-precision number at `at`.
pub(crate) fn half(block: &[u8], at: usize) -> f32 {
    half::f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Writes `value` as a half-precision number at `at`, exact for what [`half`]
/// or [`to_half`] gave.
pub(crate) fn put_half(block: &mut [u8], at: usize, value: f32) {
    block[at..at + 2].copy_from_slice(&half::f16::from_f32(value).to_le_bytes());
}

/// `value` rounded to half precision; what is too large becomes the largest.
pub(crate) fn to_half(value: f32) -> f32 {
    let top = half::f16::MAX.to_f32();
    half::f16::from_f32(value.clamp(-top, top)).to_f32()
}

/// `value` rounded to half precision, but away from zero below the normal halves: a
/// scale that is too small there would leave its values out of the codes' reach.
pub(crate) fn to_half_scale(value: f32) -> f32 {
    const STEPS: f32 = (1u32 << 24) as f32;
    if value.abs() < half::f16::MIN_POSITIVE.to_f32() {
        (value.abs() * STEPS).ceil().copysign(value) / STEPS
    } else {
        to_half(value)
    }
}

/// Low nibbles of `packed` are the first half of `codes`, high ones the second.
pub(crate) fn nibbles(packed: &[u8], codes: &mut [u8]) {
    let (low, high) = codes.split_at_mut(packed.len());
    let (low, high) = (low.as_chunks_mut::<8>().0, high.as_chunks_mut::<8>().0);
    let (packed, rest) = packed.as_chunks::<8>();
    assert!(rest.is_empty(), "eights of bytes");
    for (packed, (low, high)) in packed.iter().zip(low.iter_mut().zip(high)) {
        (*low, *high) = (packed.map(|byte| byte & 15), packed.map(|byte| byte >> 4));
    }
}

/// The inverse of [`nibbles`], of the low four bits of `codes`.
pub(crate) fn put_nibbles(packed: &mut [u8], codes: &[u8]) {
    let (low, high) = codes.split_at(packed.len());
    for (byte, (low, high)) in packed.iter_mut().zip(low.iter().zip(high)) {
        *byte = low & 15 | high << 4;
    }
}

/// `code − OFFSET` for `N` codes.
pub(crate) const fn levels<const N: usize>(offset: i32) -> [i8; N] {
    let mut levels = [0; N];
    let mut code = 0;
    while code < N {
        levels[code] = (code as i32 - offset) as i8;
        code += 1;
    }
    levels
}

//! Quantized weights in panels, and one worker's range of a product with them.
//!
//! Weights keep their codes: `w[c] = scale_g code[c] + bias_g`, or
//! `w[c] = scale_g level[code[c]]`, for the columns of group `g`.
//!
//! A panel holds 16 rows, a row a lane, as super-blocks of one or several groups:
//!
//! ```text
//! panel = | super-block | super-block | …          all groups of 16 rows, one stream
//! super-block = | codes of group 0 | codes of group 1 | … | scales (and biases) | padding |
//! codes of a group = 64-byte vectors, 4 columns of each of the 16 rows:
//!
//!   byte:    0  1  2  3    4  5  6  7          60 61 62 63
//!   row:     0  0  0  0    1  1  1  1    …     15 15 15 15
//!   column:  0  1  2  3    0  1  2  3           0  1  2  3
//! ```
//!
//! Codes of up to 4 bits come in pairs, so that a vector holds eight columns: the lower halves
//! of its bytes are columns 0 to 3, the upper halves 4 to 7. Codes of 2 and 3 bits take as much
//! memory as those of 4, codes of 5 bits as much as those of 6. Super-blocks are padded to whole cache lines.
//!
//! Codes of 3 bits for levels of a table take what they are ([`TABLE3`]). A super-block is two
//! groups of 16 columns. Columns 0 to 23 lie in three vectors as pairs do, and the spare upper bit
//! of each half is one of a code of columns 24 to 31:
//!
//! ```text
//!   vector:          0                 1                 2
//!   bits 0 to 2      column c          column 8 + c      column 16 + c       c = 0 … 3
//!   bit 3            column 24 + c, bits 0, 1 and 2
//!   bits 4 to 6      column 4 + c      column 12 + c     column 20 + c
//!   bit 7            column 28 + c, bits 0, 1 and 2
//! ```
//!
//! Codes of 6 bits take what they are, too ([`LEVEL6`], [`AFFINE6`]): of 16 columns, three vectors have columns 0 to 11 in
//! the lower six bits of their bytes, and in the upper two bits of each two bits of columns 12 to 15. On CPUs with tiles
//! (AMX), codes for which there is a tile kernel take a byte each, because tile kernels read no codes of 6 bits.

use super::activations::ActivationView;
use super::pack::{self, PanelSource};
use crate::arch::{Element, Lanes, with_element};
use crate::pool::DisjointSlice;
use crate::tuning::{WeightKind, WeightReads};
use half::f16;
use quant::{Rotated, Scalar};
use std::ops::Range;

/// How codes lie in a panel and what they stand for: a constant parameter of kernels.
pub(crate) type CodeKind = u8;
/// Two codes a byte, with biases.
pub(crate) const AFFINE4: CodeKind = 0;
/// A code a byte, with biases.
pub(crate) const AFFINE8: CodeKind = 1;
/// Two codes a byte; a code is its level plus 8.
pub(crate) const LEVEL4: CodeKind = 2;
/// Two codes a byte, which stand for levels of a table.
pub(crate) const TABLE4: CodeKind = 3;
/// A code a byte, signed: the levels themselves.
pub(crate) const LEVEL8: CodeKind = 4;
/// Eight codes in three bytes, which stand for levels of a table. The table is twice in
/// [`QuantizedPanels::levels`], so that the bit above a code does not matter.
pub(crate) const TABLE3: CodeKind = 5;

/// Four codes in three bytes; a code is its level plus 32.
pub(crate) const LEVEL6: CodeKind = 6;
/// Four codes in three bytes, with biases.
pub(crate) const AFFINE6: CodeKind = 7;

/// Whether codes lie in pairs.
pub(crate) const fn pairs(kind: CodeKind) -> bool {
    matches!(kind, AFFINE4 | LEVEL4 | TABLE4 | TABLE3)
}

/// Whether four codes lie in three bytes.
pub(crate) const fn sixes(kind: CodeKind) -> bool {
    matches!(kind, LEVEL6 | AFFINE6)
}

/// Whether groups have biases.
pub(crate) const fn biased(kind: CodeKind) -> bool {
    matches!(kind, AFFINE4 | AFFINE6 | AFFINE8)
}

/// How the scales and biases of a super-block are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScaleLayout {
    /// A scale for each group, then its bias if there are any.
    Own(Scalar),
    /// Products of an integer of each group and a number that the super-block shares: `d` (and
    /// `m`) in half precision, then `s` (and `t`) of each group in bytes.
    Integers,
}

/// [`ScaleLayout`] as a type: a parameter of kernels. Elements stand for
/// [`ScaleLayout::Own`].
pub(crate) trait LoadScales {
    /// Bytes of a number that all groups of a super-block share, and of one of a group's own.
    const BYTES: (usize, usize);

    /// Loads the scales of 16 rows, and their biases (zeros if there are none), of group `j` of
    /// a super-block of `span` groups whose scales start at `scales`.
    ///
    /// # Safety
    ///
    /// The scales are readable, and there is such a group.
    unsafe fn load_scales<L: Lanes, const KIND: CodeKind>(
        scales: *const u8,
        span: usize,
        j: usize,
    ) -> (L, L);
}

impl<S: Element> LoadScales for S {
    const BYTES: (usize, usize) = (0, size_of::<S>());

    #[inline(always)]
    unsafe fn load_scales<L: Lanes, const KIND: CodeKind>(
        scales: *const u8,
        _: usize,
        j: usize,
    ) -> (L, L) {
        let at = scales.cast::<[S; 16]>();
        // SAFETY: arrays of 16 elements, one or two a group, as `scale_arrays` says.
        unsafe {
            match const { biased(KIND) } {
                true => (S::load(&*at.add(2 * j)), S::load(&*at.add(2 * j + 1))),
                false => (S::load(&*at.add(j)), L::splat(0.0)),
            }
        }
    }
}

/// [`ScaleLayout::Integers`] as a type.
pub(crate) struct IntegerScales;

impl LoadScales for IntegerScales {
    const BYTES: (usize, usize) = (2, 1);

    #[inline(always)]
    unsafe fn load_scales<L: Lanes, const KIND: CodeKind>(
        scales: *const u8,
        span: usize,
        j: usize,
    ) -> (L, L) {
        let two = const { biased(KIND) };
        let shared = scales.cast::<[f16; 16]>();
        // SAFETY: arrays of 16 numbers, shared ones first, as `scale_arrays` says.
        unsafe {
            let integers = shared.add(if two { 2 } else { 1 }).cast::<[i8; 16]>();
            let scale = L::load_f16(&*shared) * L::load_i8(&*integers.add(j));
            let bias = match two {
                true => L::load_f16(&*shared.add(1)) * L::load_i8(&*integers.add(span + j)),
                false => L::splat(0.0),
            };
            (scale, bias)
        }
    }
}

/// A matrix in panels of codes.
pub(crate) struct QuantizedPanels {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// Columns of a group.
    pub(crate) group: usize,
    pub(crate) kind: CodeKind,
    /// The levels that codes of up to 4 bits without biases stand for.
    pub(crate) levels: [i8; 16],
    /// How columns were rotated before they were coded, if they were. A super-block is what was
    /// rotated together.
    pub(crate) rotated: Option<Rotated>,
    pub(crate) scales: ScaleLayout,
    /// Groups of a super-block. A power of two.
    pub(crate) span: usize,
    /// Bytes of a super-block's codes, of a super-block and of a panel; known once, because
    /// kernels ask for each group.
    pub(crate) code_bytes: usize,
    pub(crate) superblock_bytes: usize,
    pub(crate) panel_bytes: usize,
    /// What each stored code becomes in the panel; if that is the code plus a number, `shift` is
    /// that number.
    pub(crate) map: Box<[u8; 256]>,
    pub(crate) shift: Option<u8>,
    pub(crate) source: PanelSource,
}

impl QuantizedPanels {
    /// The kind of weights whose tuning is used.
    pub(crate) fn weight_kind(&self) -> WeightKind {
        match self.kind {
            AFFINE4 => WeightKind::Affine4,
            AFFINE6 | AFFINE8 | LEVEL6 | LEVEL8 => WeightKind::Codes8,
            _ => WeightKind::Levels4,
        }
    }

    /// Vectors of codes of one group, once each has a place of its own.
    pub(crate) fn vectors(&self) -> usize {
        self.group / if pairs(self.kind) { 8 } else { 4 }
    }

    /// Bytes of a super-block's codes.
    pub(crate) fn bytes_of_codes(&self) -> usize {
        let bytes = self.span * self.vectors() * 64;
        if self.kind == TABLE3 || sixes(self.kind) {
            bytes / 4 * 3
        } else {
            bytes
        }
    }

    /// The code (of [`LEVEL6`] the level) of row `lane` in column `c` of group `j` of the super-block with these `vectors`.
    #[inline(always)]
    fn code(&self, vectors: &[u8], (j, c): (usize, usize), lane: usize) -> u8 {
        let byte = |vector: usize| vectors[vector * 64 + lane * 4 + c % 4];
        let (first, half) = (j * self.vectors(), c % 8 / 4 * 4);
        match self.kind {
            LEVEL6 | AFFINE6 => {
                let first = (j * self.group + c) / 16 * 3;
                let code = match c % 16 / 4 {
                    3 => (0..3).map(|v| byte(first + v) >> 6 << (2 * v)).sum(),
                    v => byte(first + v) & 63,
                };
                match self.kind {
                    LEVEL6 => code.wrapping_sub(32),
                    _ => code,
                }
            }
            TABLE3 if j == 1 && c >= 8 => {
                let bit = |vector: usize| (byte(vector) >> (half + 3) & 1) << vector;
                bit(0) | bit(1) | bit(2)
            }
            TABLE3 => byte(first + c / 8) >> half & 7,
            kind if pairs(kind) => byte(first + c / 8) >> half & 15,
            _ => byte(first + c / 4),
        }
    }

    /// The arrays of 16 elements, one a row, that hold a super-block's scales: how many of how
    /// many bytes, in order.
    pub(crate) fn scale_arrays(&self) -> [(usize, usize); 2] {
        let each = if biased(self.kind) { 2 } else { 1 };
        match self.scales {
            ScaleLayout::Own(scalar) => [(0, 0), (each * self.span, scalar.bytes())],
            ScaleLayout::Integers => [(each, 2), (each * self.span, 1)],
        }
    }

    /// The super-block of group `g`, and the group's place in it.
    #[inline(always)]
    pub(crate) fn place(&self, g: usize) -> (usize, usize) {
        (g >> self.span.trailing_zeros(), g & (self.span - 1))
    }

    /// Scale and bias of row `lane` in group `j` of the super-block with these `scales`.
    #[inline(always)]
    fn scale_and_bias(&self, scales: &[u8], j: usize, lane: usize) -> (f32, f32) {
        let two = biased(self.kind);
        match self.scales {
            ScaleLayout::Own(scalar) => {
                let at = 16 * j * if two { 2 } else { 1 } + lane;
                let bias = if two {
                    scalar.get(scales, at + 16)
                } else {
                    0.0
                };
                (scalar.get(scales, at), bias)
            }
            ScaleLayout::Integers => {
                let n = self.scale_arrays()[0].0;
                let integer = |at: usize| f32::from(scales[32 * n + 16 * at + lane] as i8);
                let scale = Scalar::F16.get(scales, lane) * integer(j);
                let bias = match two {
                    true => Scalar::F16.get(scales, 16 + lane) * integer(self.span + j),
                    false => 0.0,
                };
                (scale, bias)
            }
        }
    }

    /// Loads scales and biases as [`LoadScales::load_scales`] does, whatever their layout.
    ///
    /// # Safety
    ///
    /// The scales are readable, and there is such a group.
    #[inline(always)]
    pub(crate) unsafe fn load_scales<L: Lanes, const KIND: CodeKind>(
        &self,
        scales: *const u8,
        j: usize,
    ) -> (L, L) {
        // SAFETY: the scales are readable and there is such a group, as promised.
        unsafe {
            match self.scales {
                ScaleLayout::Own(scalar) => {
                    with_element!(scalar, S => S::load_scales::<L, KIND>(scales, self.span, j))
                }
                ScaleLayout::Integers => {
                    IntegerScales::load_scales::<L, KIND>(scales, self.span, j)
                }
            }
        }
    }

    /// Dequantizes row `row`, times `factor`.
    #[inline(always)]
    pub(crate) fn row(&self, row: usize, factor: f32, out: &mut [f32]) {
        let data = match &self.source {
            PanelSource::Packed(data) => data.elements::<u8>(),
            PanelSource::Mapped(kept) => return pack::row(kept, row, factor, out),
        };
        let panel = &data[row / 16 * self.panel_bytes..][..self.panel_bytes];
        let lane = row % 16;
        let superblocks = panel.chunks_exact(self.superblock_bytes);
        for (superblock, out) in superblocks.zip(out.chunks_exact_mut(self.span * self.group)) {
            let (vectors, scales) = superblock.split_at(self.code_bytes);
            for (j, out) in out.chunks_exact_mut(self.group).enumerate() {
                let (scale, bias) = self.scale_and_bias(scales, j, lane);
                for (c, out) in out.iter_mut().enumerate() {
                    let code = self.code(vectors, (j, c), lane);
                    *out = match (&self.rotated, self.kind) {
                        (Some(rotated), _) => scale * rotated.levels[usize::from(code)],
                        (_, AFFINE4 | AFFINE6 | AFFINE8) => scale.mul_add(f32::from(code), bias),
                        (_, LEVEL6 | LEVEL8) => scale * f32::from(code as i8),
                        _ => scale * f32::from(self.levels[usize::from(code)]),
                    };
                }
            }
            if self.rotated.is_some() {
                let blocks = out.as_chunks_mut().0;
                blocks.iter_mut().for_each(Rotated::undo);
            }
            out.iter_mut().for_each(|value| *value *= factor);
        }
    }
}

/// One worker's range of a product: some panels for all rows of activations.
pub(crate) struct QuantizedWork<'a> {
    pub(crate) w: &'a QuantizedPanels,
    /// The bytes of panels `range`.
    pub(crate) data: &'a [u8],
    /// Columns of the output: the rows of `w`, or as many as are wanted of one panel.
    pub(crate) n_out: usize,
    pub(crate) x: ActivationView<'a>,
    pub(crate) range: Range<usize>,
    /// The output, `[rows, n_out]`.
    pub(crate) y: &'a DisjointSlice<'a, f32>,
    pub(crate) reads: WeightReads,
}

impl QuantizedWork<'_> {
    /// The outputs of a row and a panel.
    ///
    /// # Safety
    ///
    /// One result is used at a time, and no other worker has the panel.
    #[inline(always)]
    #[expect(clippy::mut_from_ref, reason = "the contract forbids overlap")]
    pub(crate) unsafe fn out(&self, row: usize, panel: usize) -> &mut [f32] {
        let start = row * self.n_out + panel * 16;
        let n = (self.n_out - panel * 16).min(16);
        // SAFETY: only this worker has the panel, and one part at a time, as promised.
        unsafe { self.y.part(start..start + n) }
    }
}

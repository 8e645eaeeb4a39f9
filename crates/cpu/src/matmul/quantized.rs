//! Products of coded weights with 8-bit activations.
//!
//! PackedWeights keep their codes: `w[c] = scale_g code[c] + bias_g`, or
//! `w[c] = scale_g level[code[c]]`, for the columns of group `g`. The activations of
//! a row are rounded in the same groups,
//!
//! ```text
//! d_g = max |x| / 127        q[c] = round(x[c] 127 / max |x|)
//! ```
//!
//! (`d_g` is NaN if an `x` is not finite: codes would hide that a model computes nothing.)
//!
//! and a product is, for ascending groups and from `y = 0`,
//!
//! ```text
//! y = fma(scale_g Σ code[c] q[c], d_g, y)        the sum is an exact integer
//! y = fma(bias_g, d_g Σ q[c], y)                 only where there are biases
//! ```
//!
//! with `level[code[c]]` for `code[c]` where codes stand for levels. [`dot`] is this
//! definition. A panel holds, group after group, the codes of 16 rows, four columns
//! of each row to a vector of 64 bytes (codes of up to 4 bits in pairs, eight
//! columns), and after one or several groups what makes their scales and biases:
//! one stream. Codes of 2 and 3 bits take the room of 4, those of 5 and 6 bits
//! that of 8.

use super::activations::ActivationView;
use super::pack::{self, PanelSource};
use crate::arch::{Element, Lanes, with_element};
use crate::pool::DisjointSlice;
use half::f16;
use quant::Scalar;
use std::ops::Range;

/// How codes lie in a panel and what they stand for: a parameter of kernels.
pub(crate) type CodeKind = u8;
/// Pairs, with biases.
pub(crate) const AFFINE4: CodeKind = 0;
/// Bytes, with biases.
pub(crate) const AFFINE8: CodeKind = 1;
/// Pairs; a code is its level and 8.
pub(crate) const LEVEL4: CodeKind = 2;
/// Pairs that stand for levels of a table.
pub(crate) const TABLE4: CodeKind = 3;
/// Signed bytes, the levels themselves.
pub(crate) const LEVEL8: CodeKind = 4;

/// Whether codes lie in pairs.
pub(crate) const fn pairs(kind: CodeKind) -> bool {
    matches!(kind, AFFINE4 | LEVEL4 | TABLE4)
}

/// Whether groups have biases.
pub(crate) const fn biased(kind: CodeKind) -> bool {
    matches!(kind, AFFINE4 | AFFINE8)
}

/// What the scales and biases of a panel are made from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScaleLayout {
    /// Each group's own: its scale, then its bias if there are any.
    Own(Scalar),
    /// Integers of each group times a number of all of a unit: `d` (and `m`) in
    /// half precision, then `s` (and `t`) of each group in bytes.
    Integers,
}

/// [`ScaleLayout`] as a type: a parameter of kernels. Elements are each group's own.
pub(crate) trait LoadScales {
    /// Bytes of a number that all groups of a unit share, and of one of a group's own.
    const BYTES: (usize, usize);

    /// LoadScales and biases, zeros if there are none, of group `j` of a unit of `span` whose
    /// factors start at `scales`.
    ///
    /// # Safety
    ///
    /// They are readable, and there is such a group.
    unsafe fn lanes<L: Lanes, const KIND: CodeKind>(
        scales: *const u8,
        span: usize,
        j: usize,
    ) -> (L, L);
}

impl<S: Element> LoadScales for S {
    const BYTES: (usize, usize) = (0, size_of::<S>());

    #[inline(always)]
    unsafe fn lanes<L: Lanes, const KIND: CodeKind>(
        scales: *const u8,
        _: usize,
        j: usize,
    ) -> (L, L) {
        let at = scales.cast::<[S; 16]>();
        // SAFETY: arrays of 16 elements, as `arrays` says.
        unsafe {
            match const { biased(KIND) } {
                true => (S::load(&*at.add(2 * j)), S::load(&*at.add(2 * j + 1))),
                false => (S::load(&*at.add(j)), L::splat(0.0)),
            }
        }
    }
}

/// [`ScaleLayout::Integers`].
pub(crate) struct IntegerScales;

impl LoadScales for IntegerScales {
    const BYTES: (usize, usize) = (2, 1);

    #[inline(always)]
    unsafe fn lanes<L: Lanes, const KIND: CodeKind>(
        scales: *const u8,
        span: usize,
        j: usize,
    ) -> (L, L) {
        let two = const { biased(KIND) };
        let own = scales.cast::<[f16; 16]>();
        // SAFETY: arrays of 16 elements, as `arrays` says.
        unsafe {
            let integers = own.add(if two { 2 } else { 1 }).cast::<[i8; 16]>();
            let scale = L::load_f16(&*own) * L::load_i8(&*integers.add(j));
            let bias = match two {
                true => L::load_f16(&*own.add(1)) * L::load_i8(&*integers.add(span + j)),
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
    pub(crate) group: usize,
    pub(crate) kind: CodeKind,
    /// What codes of a table stand for; for pairs without biases what any does.
    pub(crate) levels: [i8; 16],
    pub(crate) factors: ScaleLayout,
    /// Groups of a unit: their codes, then what makes their scales. A power of two.
    pub(crate) span: usize,
    /// Bytes of a unit's codes, of a unit and of a panel; known once, because
    /// kernels ask for each group.
    pub(crate) codes: usize,
    pub(crate) unit: usize,
    pub(crate) panel: usize,
    /// What turns a stored code into that of the panel: by adding, where it can.
    pub(crate) map: Box<[u8; 256]>,
    pub(crate) shift: Option<u8>,
    pub(crate) source: PanelSource,
}

impl QuantizedPanels {
    /// Vectors of codes of one group.
    pub(crate) fn vectors(&self) -> usize {
        self.group / if pairs(self.kind) { 8 } else { 4 }
    }

    /// How the kernels take `rows` rows of activations: in tiles from as many on as they
    /// how many bytes, in order.
    pub(crate) fn arrays(&self) -> [(usize, usize); 2] {
        let each = if biased(self.kind) { 2 } else { 1 };
        match self.factors {
            ScaleLayout::Own(scalar) => [(0, 0), (each * self.span, scalar.bytes())],
            ScaleLayout::Integers => [(each, 2), (each * self.span, 1)],
        }
    }

    /// Group `g`'s unit, and its place there.
    #[inline(always)]
    pub(crate) fn place(&self, g: usize) -> (usize, usize) {
        (g >> self.span.trailing_zeros(), g & (self.span - 1))
    }

    /// Scale and bias of group `j` of a unit whose factors are `scales`.
    fn factors_of(&self, scales: &[u8], j: usize, lane: usize) -> (f32, f32) {
        let two = biased(self.kind);
        match self.factors {
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
                let n = self.arrays()[0].0;
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

    /// LoadScales and biases, zeros if there are none, of group `j` of a unit whose
    /// factors start at `scales`.
    ///
    /// # Safety
    ///
    /// They are readable, and there is such a group.
    #[inline(always)]
    pub(crate) unsafe fn lanes<L: Lanes, const KIND: CodeKind>(
        &self,
        scales: *const u8,
        j: usize,
    ) -> (L, L) {
        // SAFETY: as promised.
        unsafe {
            match self.factors {
                ScaleLayout::Own(scalar) => {
                    with_element!(scalar, S => S::lanes::<L, KIND>(scales, self.span, j))
                }
                ScaleLayout::Integers => IntegerScales::lanes::<L, KIND>(scales, self.span, j),
            }
        }
    }

    /// Row `row` dequantized, times `factor`.
    pub(crate) fn row(&self, row: usize, factor: f32, out: &mut [f32]) {
        let data = match &self.source {
            PanelSource::Packed(data) => data.of::<u8>(),
            PanelSource::Mapped(kept) => return pack::row(kept, row, factor, out),
        };
        let panel = &data[row / 16 * self.panel..][..self.panel];
        let lane = row % 16;
        let units = panel.chunks_exact(self.unit);
        for (unit, out) in units.zip(out.chunks_exact_mut(self.span * self.group)) {
            let (vectors, scales) = unit.split_at(self.codes);
            for (j, out) in out.chunks_exact_mut(self.group).enumerate() {
                let (scale, bias) = self.factors_of(scales, j, lane);
                let vectors = &vectors[j * self.vectors() * 64..];
                for (c, out) in out.iter_mut().enumerate() {
                    let byte = |at: usize| vectors[at * 64 + lane * 4 + c % 4];
                    let code = match pairs(self.kind) {
                        true => byte(c / 8) >> (c % 8 / 4 * 4) & 15,
                        false => byte(c / 4),
                    };
                    let value = match self.kind {
                        AFFINE4 | AFFINE8 => scale.mul_add(f32::from(code), bias),
                        LEVEL8 => scale * f32::from(code as i8),
                        _ => scale * f32::from(self.levels[usize::from(code)]),
                    };
                    *out = value * factor;
                }
            }
        }
    }
}

/// One worker's piece of a product: some panels for all rows.
pub(crate) struct QuantizedWork<'a> {
    pub(crate) w: &'a QuantizedPanels,
    /// PlainPanels `range`.
    pub(crate) data: &'a [u8],
    /// Rows of the output: `w`'s, or as many as are wanted of one panel.
    pub(crate) n_out: usize,
    pub(crate) x: ActivationView<'a>,
    pub(crate) range: Range<usize>,
    pub(crate) y: &'a DisjointSlice<'a, f32>,
}

impl QuantizedWork<'_> {
    /// The outputs of a row and a panel.
    ///
    /// # Safety
    ///
    /// One at a time, and no other worker has the panel.
    #[inline(always)]
    #[expect(clippy::mut_from_ref, reason = "the contract forbids overlap")]
    pub(crate) unsafe fn out(&self, row: usize, panel: usize) -> &mut [f32] {
        let start = row * self.n_out + panel * 16;
        // SAFETY: as promised.
        unsafe {
            self.y
                .part(start..start + (self.n_out - panel * 16).min(16))
        }
    }
}

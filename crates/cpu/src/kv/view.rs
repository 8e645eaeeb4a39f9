//! Keys and values as attention reads them: elements or codes, converted to `f32`.

use super::encode::STRIP;
use super::{BLOCK, UnitLayout, codes};
use crate::arch::{Element, Lanes, with_element};
use crate::memory::elements;
use backend::PAGE_ROWS;
use half::{bf16, f16};
use quant::{Scalar, turbo};
use std::marker::PhantomData;
use std::ops::Range;
use std::slice::ChunksExactMut;

/// Keys or values as they lie in memory: all units of a layer, or one.
#[derive(Clone, Copy)]
pub(crate) struct KvView<'a> {
    pub(super) layout: UnitLayout,
    pub(super) cols: usize,
    pub(crate) bytes: &'a [u8],
}

impl<'a> KvView<'a> {
    /// One of all units.
    #[inline(always)]
    pub(crate) fn unit(self, unit: usize) -> Self {
        let (_, len) = self.layout.bytes(self.cols);
        KvView {
            bytes: &self.bytes[unit * len..(unit + 1) * len],
            ..self
        }
    }

    /// The bytes of some of a unit's rows, without scales.
    #[inline(always)]
    pub(crate) fn rows(self, rows: Range<usize>) -> &'a [u8] {
        let row = self.layout.bytes(self.cols).0 / PAGE_ROWS;
        &self.bytes[rows.start * row..rows.end * row]
    }

    /// A unit's elements, if kernels can read them as they are.
    #[inline(always)]
    pub(crate) fn as_bf16(self) -> Option<&'a [bf16]> {
        (self.layout == UnitLayout::Plain(Scalar::Bf16)).then(|| elements(self.bytes))
    }

    /// A unit's scales of group `g`, where it has codes.
    #[inline(always)]
    fn scales(self, g: usize) -> &'a [f16; PAGE_ROWS] {
        let (codes, _) = self.layout.bytes(self.cols);
        let scales = elements::<f16>(&self.bytes[codes..]);
        &scales.as_chunks().0[g]
    }

    /// A unit's scales of group `g` as `f32`, where it has codes.
    #[inline(always)]
    fn wide_scales<L: Lanes>(self, g: usize) -> [f32; PAGE_ROWS] {
        let mut scales = [0.0; PAGE_ROWS];
        let halves = self.scales(g).as_chunks().0;
        for (to, from) in scales.as_chunks_mut().0.iter_mut().zip(halves) {
            L::load_f16(from).store(to);
        }
        scales
    }

    /// Converts blocks `blocks` of a unit of keys to `f32`, `[blocks, cols, 16]`.
    #[inline(always)]
    pub(crate) fn keys<L: Lanes>(self, blocks: Range<usize>, to: &mut [f32]) {
        let cols = self.cols;
        let to = to.as_chunks_mut::<BLOCK>().0;
        let UnitLayout::Plain(scalar) = self.layout else {
            self.with_codes(ConvertKeys::<L> {
                blocks,
                to,
                lanes: PhantomData,
            });
            return;
        };
        with_element!(scalar, W => {
            let from = elements::<W>(self.bytes).as_chunks().0;
            let from = &from[blocks.start * cols..blocks.end * cols];
            for (to, from) in to.iter_mut().zip(from) {
                W::load::<L>(from).store(to);
            }
        });
    }

    /// Converts columns `first .. first + STRIP` (fewer at the end of a row) of the values of
    /// `keys` to `f32`, in their rows of `[64, STRIP]`.
    #[inline(always)]
    pub(crate) fn values<L: Lanes>(self, keys: Range<usize>, first: usize, to: &mut [f32]) {
        let cols = self.cols;
        let vectors = (cols - first).min(STRIP) / 16;
        let UnitLayout::Plain(scalar) = self.layout else {
            self.with_codes(ConvertValues::<L> {
                keys,
                first,
                to,
                lanes: PhantomData,
            });
            return;
        };
        with_element!(scalar, W => {
            let from = elements::<W>(self.bytes);
            let rows = strips(to).enumerate().take(keys.end).skip(keys.start);
            for (key, to) in rows {
                let from = from[key * cols + first..][..16 * vectors].as_chunks().0;
                for (to, from) in to.iter_mut().zip(from) {
                    W::load::<L>(from).store(to);
                }
            }
        });
    }

    /// Whether the unit has codes, for [`Self::with_codes`].
    #[inline(always)]
    pub(crate) fn has_codes(self) -> bool {
        !matches!(self.layout, UnitLayout::Plain(_))
    }

    /// Runs `work` on a unit with codes, compiled for its kind of codes.
    ///
    /// # Panics
    ///
    /// If the unit has elements instead.
    #[inline(always)]
    pub(crate) fn with_codes(self, work: impl UseCodes) {
        match self.layout {
            UnitLayout::Plain(_) => unreachable!("a unit of elements has no codes"),
            UnitLayout::Coded {
                bits,
                group,
                offset,
            } => match bits {
                8 => work.run(self.codes::<8, _>(group, Offset(offset))),
                5 => work.run(self.codes::<5, _>(group, Offset(offset))),
                _ => work.run(self.codes::<4, _>(group, Offset(offset))),
            },
            UnitLayout::Levels { bits } => {
                let levels = Levels(turbo::levels(bits));
                match bits {
                    4 => work.run(self.codes::<4, _>(turbo::GROUP, levels)),
                    3 => work.run(self.codes::<3, _>(turbo::GROUP, levels)),
                    _ => work.run(self.codes::<2, _>(turbo::GROUP, levels)),
                }
            }
        }
    }

    #[inline(always)]
    fn codes<const BITS: usize, D: Decode>(self, group: usize, decoder: D) -> Codes<'a, BITS, D> {
        Codes {
            unit: self,
            group,
            decoder,
        }
    }
}

/// Work on a unit with codes, compiled for each kind of codes.
pub(crate) trait UseCodes {
    fn run<const BITS: usize, D: Decode>(self, codes: Codes<'_, BITS, D>);
}

/// A unit with codes of `BITS` bits.
pub(crate) struct Codes<'a, const BITS: usize, D> {
    unit: KvView<'a>,
    /// Columns that share a scale.
    pub(crate) group: usize,
    decoder: D,
}

impl<const BITS: usize, D: Decode> Codes<'_, BITS, D> {
    /// The scales of 16 keys, those of block `b`, for the columns of group `g`.
    #[inline(always)]
    pub(crate) fn key_scales<L: Lanes>(&self, b: usize, g: usize) -> L {
        L::load_f16(&self.unit.scales(g).as_chunks().0[b])
    }

    /// The scales of all 64 values for the columns of group `g`.
    #[inline(always)]
    pub(crate) fn value_scales<L: Lanes>(&self, g: usize) -> [f32; PAGE_ROWS] {
        self.unit.wide_scales::<L>(g)
    }

    /// Columns `8 eight .. 8 eight + 8` of the 16 keys of block `b`, not yet multiplied by
    /// [`Self::key_scales`].
    #[inline(always)]
    pub(crate) fn keys<L: Lanes>(&self, b: usize, eight: usize) -> [L; 8] {
        let cols = self.unit.cols;
        let vectors = cols * BITS / 8;
        let block = &self.unit.bytes.as_chunks::<BLOCK>().0[b * vectors..][..vectors];
        let codes = codes::keys::<BITS>(block, cols, eight);
        let mut lanes = [L::splat(0.0); 8];
        for (to, codes) in lanes.iter_mut().zip(&codes) {
            *to = self.decoder.decode::<L>(codes);
        }
        lanes
    }

    /// Strip `strip` of the values of `key`, not yet multiplied by its scale.
    #[inline(always)]
    pub(crate) fn values<L: Lanes>(&self, key: usize, strip: usize) -> [L; 2] {
        let bytes = self.unit.cols * BITS / 8;
        let row = &self.unit.bytes[key * bytes..][..bytes];
        let [a, b] = codes::values::<BITS>(row, strip);
        [self.decoder.decode::<L>(&a), self.decoder.decode::<L>(&b)]
    }
}

/// [`KvView::keys`] of codes.
struct ConvertKeys<'t, L> {
    blocks: Range<usize>,
    to: &'t mut [[f32; BLOCK]],
    lanes: PhantomData<L>,
}

impl<L: Lanes> UseCodes for ConvertKeys<'_, L> {
    #[inline(always)]
    fn run<const BITS: usize, D: Decode>(self, codes: Codes<'_, BITS, D>) {
        let blocks = self.to.chunks_exact_mut(codes.unit.cols);
        for (b, to) in self.blocks.zip(blocks) {
            for (g, to) in to.chunks_mut(codes.group).enumerate() {
                let scale: L = codes.key_scales(b, g);
                for (i, to) in to.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                    let keys = codes.keys::<L>(b, g * codes.group / 8 + i);
                    for (to, keys) in to.iter_mut().zip(keys) {
                        (keys * scale).store(to);
                    }
                }
            }
        }
    }
}

/// [`KvView::values`] of codes: a strip from column `first`.
struct ConvertValues<'t, L> {
    keys: Range<usize>,
    first: usize,
    to: &'t mut [f32],
    lanes: PhantomData<L>,
}

impl<L: Lanes> UseCodes for ConvertValues<'_, L> {
    #[inline(always)]
    fn run<const BITS: usize, D: Decode>(self, codes: Codes<'_, BITS, D>) {
        let scales = codes.value_scales::<L>(self.first / codes.group);
        let rows = strips(self.to).enumerate();
        for (key, to) in rows.take(self.keys.end).skip(self.keys.start) {
            let scale = L::splat(scales[key]);
            let values = codes.values::<L>(key, self.first / STRIP);
            for (to, values) in to.iter_mut().zip(values) {
                (values * scale).store(to);
            }
        }
    }
}

/// The rows of `[64, STRIP]`, in vectors.
#[inline(always)]
fn strips(values: &mut [f32]) -> ChunksExactMut<'_, [f32; 16]> {
    values.as_chunks_mut().0.chunks_exact_mut(STRIP / 16)
}

/// What codes stand for, but for their scale.
pub(crate) trait Decode {
    fn decode<L: Lanes>(&self, codes: &[u8; 16]) -> L;
}

/// Codes that are this much more than their levels.
struct Offset(f32);

impl Decode for Offset {
    #[inline(always)]
    fn decode<L: Lanes>(&self, codes: &[u8; 16]) -> L {
        L::load_u8(codes) - L::splat(self.0)
    }
}

/// Indices of these levels.
struct Levels([f32; 16]);

impl Decode for Levels {
    #[inline(always)]
    fn decode<L: Lanes>(&self, codes: &[u8; 16]) -> L {
        L::lookup(&self.0, codes)
    }
}

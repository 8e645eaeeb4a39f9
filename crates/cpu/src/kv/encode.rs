//! Encodes rows of keys and values as their format stores them.

use super::codes::pack;
use crate::arch::{Detected, Kernel, Lanes};
use quant::{KvRowFormat, Rotation, turbo};

/// How many columns of values are converted together.
pub(crate) const STRIP: usize = 32;

/// Whether a store holds keys or values.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum KeysOrValues {
    Keys,
    Values,
}

/// A worker's memory for encoding rows, kept from step to step.
#[derive(Default)]
pub(crate) struct RowEncoder {
    /// A row in the cache's format.
    stored: Vec<u8>,
    /// A row while it is rotated and rounded.
    rounded: Vec<f32>,
    codes: Vec<u8>,
    pub(super) scales: Vec<f32>,
    /// Codes as they lie in memory.
    pub(super) packed: Vec<u8>,
}

impl RowEncoder {
    /// Encodes `x` in a format of codes in groups of `group` columns, and packs them as they lie in
    /// memory.
    pub(super) fn encode_codes(
        &mut self,
        isa: Detected,
        (format, kind): (&KvRowFormat, KeysOrValues),
        x: &[f32],
        (bits, group): (u8, usize),
    ) {
        match format.rotation {
            None => format.encode(x, &mut self.stored),
            Some(rotation) => {
                self.rounded.clear();
                self.rounded.extend_from_slice(x);
                let row = &mut self.rounded;
                isa.run(Rotate { rotation, row });
                format.encode_rotated(&self.rounded, &mut self.stored);
            }
        }
        self.codes.resize(x.len(), 0);
        self.scales.resize(x.len() / group, 0.0);
        format.unpack(&self.stored, &mut self.codes, &mut self.scales);
        pack(bits.into(), kind, &self.codes, &mut self.packed);
    }

    /// Rotates `x`, rounds it to levels and packs their indices as they lie in memory.
    pub(super) fn encode_levels(&mut self, isa: Detected, kind: KeysOrValues, x: &[f32], bits: u8) {
        self.rounded.clear();
        self.rounded.extend_from_slice(x);
        self.codes.resize(x.len(), 0);
        self.scales.resize(x.len().div_ceil(turbo::GROUP), 0.0);
        isa.run(Round {
            bits,
            kind,
            encoder: self,
        });
    }
}

/// Rotates a row.
struct Rotate<'a> {
    rotation: Rotation,
    row: &'a mut [f32],
}

impl Kernel for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        self.rotation.rotate(self.row);
    }
}

/// Rounds a worker's row to levels.
struct Round<'a> {
    bits: u8,
    kind: KeysOrValues,
    encoder: &'a mut RowEncoder,
}

impl Kernel for Round<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let RowEncoder {
            rounded,
            codes,
            scales,
            packed,
            ..
        } = self.encoder;
        turbo::round(self.bits, rounded, codes, scales);
        pack(self.bits.into(), self.kind, codes, packed);
    }
}

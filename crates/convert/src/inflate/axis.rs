//! How rows and columns of a grown matrix follow from those of the small one.

use super::BAND;
use quant::{Owned, Scalar, Stored, WeightLayout};

/// Where a row or column of a grown matrix comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Slot {
    /// This row or column of the small matrix.
    Old(usize),
    /// Padding; a copy of this, where nothing reads it.
    Pad(usize),
    /// The band that carries the constant: padding too.
    Band,
}

/// The rows or the columns of a grown matrix.
pub(super) type Axis = Vec<Slot>;

/// `n` old ones.
pub(super) fn old(n: usize) -> Axis {
    (0..n).map(Slot::Old).collect()
}

/// `n` old ones, then copies.
pub(super) fn grown(n: usize, to: usize) -> Axis {
    (0..to)
        .map(|i| {
            if i < n {
                Slot::Old(i)
            } else {
                Slot::Pad(i % n)
            }
        })
        .collect()
}

/// [`grown`], with the band behind the old ones.
pub(super) fn banded(n: usize, to: usize) -> Axis {
    let band = |i: usize| (n..n + BAND).contains(&i);
    grown(n, to)
        .into_iter()
        .enumerate()
        .map(|(i, slot)| if band(i) { Slot::Band } else { slot })
        .collect()
}

/// `first`, then `second` for what lies `offset` further on in the small matrix.
pub(super) fn and(mut first: Axis, second: &Axis, offset: usize) -> Axis {
    first.extend(second.iter().map(|slot| match *slot {
        Slot::Old(i) => Slot::Old(i + offset),
        Slot::Pad(i) => Slot::Pad(i + offset),
        Slot::Band => Slot::Band,
    }));
    first
}

/// `heads` as an axis of heads of `size` each.
pub(super) fn of_size(heads: &Axis, size: usize) -> Axis {
    let each = |slot: &Slot| {
        let slot = *slot;
        (0..size).map(move |i| match slot {
            Slot::Old(h) => Slot::Old(h * size + i),
            Slot::Pad(h) => Slot::Pad(h * size + i),
            Slot::Band => Slot::Band,
        })
    };
    heads.iter().flat_map(each).collect()
}

/// How one matrix grows.
pub(super) struct Rule {
    pub(super) rows: Axis,
    pub(super) cols: Axis,
    /// Factors of the left and the right half of the old columns.
    pub(super) gain: [f32; 2],
    /// Factors of padding rows and columns; 0 where something reads them.
    pub(super) copy: [f32; 2],
    /// The band's columns in old rows, in padding rows and in its own rows.
    pub(super) band: [f32; 3],
}

impl Rule {
    pub(super) fn new(rows: Axis, cols: Axis) -> Rule {
        Rule {
            rows,
            cols,
            gain: [1.0; 2],
            copy: [0.0; 2],
            band: [0.0; 3],
        }
    }

    /// Padding is a copy: nothing reads it.
    pub(super) fn free(self) -> Rule {
        Rule {
            copy: [1.0; 2],
            ..self
        }
    }

    pub(super) fn gain(self, gain: f32) -> Rule {
        Rule {
            gain: [gain; 2],
            ..self
        }
    }

    /// Row `row` of the grown matrix, behind those in `out`.
    pub(super) fn push(&self, from: &Stored<'_>, row: usize, out: &mut Owned) {
        let slot = self.rows[row];
        let (Slot::Old(source) | Slot::Pad(source)) = slot else {
            return self.push_band(out);
        };
        let is_old = matches!(slot, Slot::Old(_));
        let stored = from.row(source);
        let unit = from.format.block;
        let bytes = from.format.code_bytes(unit);
        for group in self.cols.chunks_exact(unit) {
            let (at, copy) = match group[0] {
                Slot::Old(c) => (c, 1.0),
                Slot::Pad(c) => (c, self.copy[1]),
                Slot::Band => {
                    constant(out, unit, self.band[usize::from(!is_old)]);
                    continue;
                }
            };
            let gain =
                self.gain[2 * at / from.cols] * copy * if is_old { 1.0 } else { self.copy[0] };
            match from.format.layout {
                _ if gain == 0.0 => constant(out, unit, 0.0),
                WeightLayout::Plain(scalar) => {
                    put(&mut out.codes, scalar, scalar.get(stored.codes, at) * gain)
                }
                _ => {
                    let g = at / unit;
                    out.codes
                        .extend_from_slice(&stored.codes[g * bytes..][..bytes]);
                    put(
                        &mut out.scales,
                        from.scale,
                        from.scale.get(stored.scales, g) * gain,
                    );
                    put(
                        &mut out.biases,
                        from.scale,
                        from.scale.get(stored.biases, g) * gain,
                    );
                }
            }
        }
        out.rows += 1;
    }

    /// A row of the band: it reads the first band of the columns.
    fn push_band(&self, out: &mut Owned) {
        let first = self
            .cols
            .iter()
            .position(|&slot| slot == Slot::Band)
            .unwrap_or(0);
        let unit = out.format.block;
        for at in (0..self.cols.len()).step_by(unit) {
            let is_first = (first..first + BAND).contains(&at);
            constant(out, unit, if is_first { self.band[2] } else { 0.0 });
        }
        out.rows += 1;
    }
}

/// One group of columns that all hold `value`.
fn constant(out: &mut Owned, cols: usize, value: f32) {
    match out.format.layout {
        WeightLayout::Plain(scalar) => (0..cols).for_each(|_| put(&mut out.codes, scalar, value)),
        _ => {
            let bytes = out.codes.len() + out.format.code_bytes(cols);
            out.codes.resize(bytes, 0);
            put(&mut out.scales, out.scale, 1.0);
            put(&mut out.biases, out.scale, value);
        }
    }
}

fn put(bytes: &mut Vec<u8>, scalar: Scalar, value: f32) {
    let at = bytes.len();
    bytes.resize(at + scalar.bytes(), 0);
    scalar.put(&mut bytes[at..], 0, value);
}

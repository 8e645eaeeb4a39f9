//! What converters do to values on the way into a GGUF file, and its inverse
//! (`checkpoints.md` §4).
//!
//! Value heads of a delta layer lie by key head elsewhere, `h = k·r + j` for the
//! `j`-th of key head `k`, and tiled in these files, at slot `j·nk + k`. The
//! rotary pairs of an EAGLE-3 head lie half a head apart elsewhere, `(i, i + d/2)`,
//! and beside each other in these files.

use quant::{Owned, Scalar, Stored, WeightLayout, Zero};
use serde_json::Value;

/// What a writer does to a tensor. Rows and columns are those of the canonical
/// matrix; a vector is a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Edit {
    /// Nothing.
    Same,
    /// Adds one to a norm's weights, which other files may hold as offsets.
    Folded,
    /// Tiles the value heads among rows of which those of queries and keys go
    /// before.
    MixedRows,
    /// Tiles the value heads, each as many rows as a value.
    ValueRows,
    /// Tiles the value heads, a row each.
    HeadRows,
    /// `−exp(x)`, and tiles the value heads.
    Decay,
    /// Tiles the value heads, each as many columns as a value.
    ValueColumns,
    /// Puts the rotary pairs of query heads beside each other.
    QueryPairs,
    /// Puts the rotary pairs of key heads beside each other.
    KeyPairs,
    /// Adds its index to each integer: a distance becomes a place.
    Absolute,
}

/// The sizes that edits depend on, from a configuration's language model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sizes {
    key_heads: usize,
    value_heads: usize,
    key_dim: usize,
    value_dim: usize,
    /// Attention heads, key/value heads and their size.
    query: (usize, usize),
    keys: (usize, usize),
}

impl Sizes {
    pub(crate) fn of(text_config: &Value) -> Sizes {
        let size = |key: &str| {
            let value = text_config.get(key).and_then(Value::as_u64).unwrap_or(0);
            usize::try_from(value).unwrap_or(0)
        };
        Sizes {
            key_heads: size("linear_num_key_heads"),
            value_heads: size("linear_num_value_heads"),
            key_dim: size("linear_key_head_dim"),
            value_dim: size("linear_value_head_dim"),
            query: (size("num_attention_heads"), size("head_dim")),
            keys: (size("num_key_value_heads"), size("head_dim")),
        }
    }
}

/// Where units of rows or columns come from: unit `i` of the canonical matrix is
/// unit `order[i]` of the file's, after `before` of them that stay.
struct Order {
    before: usize,
    /// Rows or columns of a unit.
    width: usize,
    order: Vec<usize>,
}

impl Order {
    /// Rows or columns in all.
    fn len(&self) -> usize {
        self.before + self.width * self.order.len()
    }

    /// Every row or column in canonical order, as the file has it.
    fn each(&self) -> impl Iterator<Item = usize> {
        let units = self
            .order
            .iter()
            .map(|&unit| self.before + unit * self.width);
        (0..self.before).chain(units.flat_map(|first| first..first + self.width))
    }
}

impl Edit {
    /// Whether numbers must be moved or changed when they are read. Norms need not:
    /// reading a norm takes either form. Integers are changed as they are read.
    pub(crate) fn changes(self, sizes: &Sizes) -> bool {
        match self {
            Edit::Same | Edit::Folded | Edit::Absolute => false,
            Edit::Decay | Edit::QueryPairs | Edit::KeyPairs => true,
            _ => sizes.key_heads != sizes.value_heads,
        }
    }

    /// How rows, or for [`Edit::ValueColumns`] columns, are ordered.
    fn order(self, sizes: &Sizes) -> Result<Order, String> {
        let heads = |before: usize, width: usize| {
            let (keys, values) = (sizes.key_heads, sizes.value_heads);
            if keys == 0 || width == 0 || !values.is_multiple_of(keys) {
                return Err(format!(
                    "{values} value heads of {width} for {keys} key heads"
                ));
            }
            let shared = values / keys;
            let order = (0..values).map(|h| h % shared * keys + h / shared);
            Ok(Order {
                before,
                width,
                order: order.collect(),
            })
        };
        let pairs = |(heads, size): (usize, usize)| {
            let half = size / 2;
            if half == 0 || !size.is_multiple_of(2) {
                return Err(format!("heads of {size} have no pairs"));
            }
            let row = |i: usize| i / size * size + i % size % half * 2 + i % size / half;
            Ok(Order {
                before: 0,
                width: 1,
                order: (0..heads.saturating_mul(size)).map(row).collect(),
            })
        };
        match self {
            Edit::Same | Edit::Folded | Edit::Absolute => unreachable!("nothing moves"),
            Edit::MixedRows => heads(
                sizes
                    .key_heads
                    .saturating_mul(sizes.key_dim)
                    .saturating_mul(2),
                sizes.value_dim,
            ),
            Edit::ValueRows | Edit::ValueColumns => heads(0, sizes.value_dim),
            Edit::HeadRows | Edit::Decay => heads(0, 1),
            Edit::QueryPairs => pairs(sizes.query),
            Edit::KeyPairs => pairs(sizes.keys),
        }
    }

    /// Whether a tensor of `rows` and `cols` can be edited so.
    ///
    /// # Errors
    ///
    /// Why not.
    pub(crate) fn fits(self, sizes: &Sizes, rows: usize, cols: usize) -> Result<(), String> {
        // Before any list is made: a configuration may claim any size.
        let limit = rows.max(cols);
        let claimed = sizes.value_heads.max(sizes.query.0).max(sizes.keys.0);
        let expected = if claimed > limit {
            claimed
        } else {
            self.order(sizes)?.len()
        };
        let (found, what) = match self {
            Edit::ValueColumns => (cols, "columns"),
            _ => (rows, "rows"),
        };
        if found != expected {
            return Err(format!("has {found} {what}, its heads have {expected}"));
        }
        Ok(())
    }

    /// The canonical matrix of `stored`, the file's, exactly.
    pub(crate) fn undo(self, sizes: &Sizes, stored: &Stored<'_>) -> Owned {
        let order = self.order(sizes).expect("proven by `fits`");
        match self {
            Edit::ValueColumns => gather_columns(stored, &order),
            Edit::Decay => {
                let values: Vec<f32> = Owned::gather(stored, order.each())
                    .view()
                    .to_f32()
                    .into_iter()
                    // Doubles, so that rounding gives back what the writer had.
                    .map(|a| f64::from(-a).ln() as f32)
                    .collect();
                quant::encode(&quant::F32, &values, stored.cols, Scalar::F32)
            }
            _ => Owned::gather(stored, order.each()),
        }
    }

    /// Does to canonical `values: [rows, cols]` what a writer does.
    ///
    /// # Errors
    ///
    /// As [`Edit::fits`].
    pub(crate) fn apply(
        self,
        sizes: &Sizes,
        values: &mut [f32],
        rows: usize,
        cols: usize,
    ) -> Result<(), String> {
        self.fits(sizes, rows, cols)?;
        let before = values.to_vec();
        for (from, to) in self.order(sizes)?.each().enumerate() {
            match self {
                Edit::ValueColumns => {
                    (0..rows).for_each(|row| values[row * cols + to] = before[row * cols + from]);
                }
                _ => values[to * cols..][..cols].copy_from_slice(&before[from * cols..][..cols]),
            }
        }
        if self == Edit::Decay {
            let decay = |v: f32| -f64::from(v).exp() as f32;
            values.iter_mut().for_each(|v| *v = decay(*v));
        }
        Ok(())
    }
}

/// Columns in another order.
fn gather_columns(stored: &Stored<'_>, order: &Order) -> Owned {
    let whole;
    let stored = if order.width.is_multiple_of(stored.format.block) {
        stored
    } else {
        whole = finer(stored);
        &whole.view()
    };
    let unit = stored.format.code_bytes(order.width);
    let mut out = Owned::gather(stored, 0..stored.rows);
    let rows = (0..stored.rows).map(|row| stored.row(row));
    for (r, row) in rows.enumerate() {
        let n = order.order.len();
        for (to, from) in order.order.iter().enumerate() {
            let to = r * n + to;
            out.codes[to * unit..][..unit].copy_from_slice(&row.codes[from * unit..][..unit]);
            for (out, row) in [(&mut out.scales, row.scales), (&mut out.biases, row.biases)] {
                let scales = row.len() / n;
                out[to * scales..][..scales].copy_from_slice(&row[from * scales..][..scales]);
            }
        }
    }
    out
}

/// The values of `stored` in a format with smaller blocks: affine groups with `f32`
/// scales where the codes allow it, else `f32`.
fn finer(stored: &Stored<'_>) -> Owned {
    let view = stored.format.codes().filter(|view| match view.zero {
        Zero::Bias => true,
        Zero::Levels(_) => view.zero.offset().is_some(),
    });
    let affine = view.and_then(|view| Some((view, quant::affine(view.bits.into(), view.group)?)));
    let Some((view, format)) = affine else {
        let values = stored.to_f32();
        return quant::encode(&quant::F32, &values, stored.cols, Scalar::F32);
    };
    debug_assert!(matches!(format.layout, WeightLayout::Affine { .. }));
    let (bits, groups) = (usize::from(view.bits), stored.cols / view.group);
    let offset = view.zero.offset().unwrap_or(0) as f32;
    let mut out = Owned::gather(stored, []);
    (out.format, out.rows, out.scale) = (format, stored.rows, Scalar::F32);
    let (mut codes, mut scales, mut biases) =
        (vec![0; stored.cols], vec![0.0; groups], vec![0.0; groups]);
    for row in 0..stored.rows {
        stored
            .format
            .unpack(stored.row(row), &mut codes, &mut scales, &mut biases);
        let start = out.codes.len();
        out.codes.resize(start + format.code_bytes(stored.cols), 0);
        for (c, &code) in codes.iter().enumerate() {
            let both = u16::from(code) << (c * bits % 8);
            out.codes[start + c * bits / 8] |= both as u8;
            if both > 0xff {
                out.codes[start + c * bits / 8 + 1] |= (both >> 8) as u8;
            }
        }
        for (scale, bias) in scales.iter().zip(&biases) {
            out.scales.extend(scale.to_le_bytes());
            // `s (q − o)` is `fma(s, q, −s o)`: all products are exact.
            out.biases.extend((bias - scale * offset).to_le_bytes());
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SIZES: Sizes = Sizes {
        key_heads: 2,
        value_heads: 6,
        key_dim: 4,
        value_dim: 128,
        query: (4, 8),
        keys: (2, 8),
    };

    #[test]
    fn value_heads_are_tiled() {
        let mut values: Vec<f32> = (0..6).map(|h| h as f32).collect();
        Edit::HeadRows.apply(&SIZES, &mut values, 6, 1).unwrap();
        // Heads 0, 1, 2 belong to key head 0.
        assert_eq!(values, [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
    }

    #[test]
    fn rotary_pairs_lie_beside_each_other() {
        let mut values: Vec<f32> = (0..16).map(|row| row as f32).collect();
        Edit::KeyPairs.apply(&SIZES, &mut values, 16, 1).unwrap();
        assert_eq!(values[..8], [0.0, 4.0, 1.0, 5.0, 2.0, 6.0, 3.0, 7.0]);
        assert_eq!(values[8], 8.0);
    }

    #[test]
    fn a_tensor_of_other_heads_is_refused() {
        for (edit, rows, cols) in [
            (Edit::MixedRows, 16 + 6 * 128 - 1, 8),
            (Edit::ValueColumns, 8, 5 * 128),
            (Edit::HeadRows, 7, 1),
            (Edit::QueryPairs, 16, 4),
        ] {
            assert!(edit.fits(&SIZES, rows, cols).is_err(), "{edit:?}");
        }
        let huge = Sizes {
            query: (usize::MAX, 2),
            ..SIZES
        };
        assert!(Edit::QueryPairs.fits(&huge, 4, 4).is_err());
        let none = Sizes::default();
        assert!(Edit::HeadRows.fits(&none, 4, 1).is_err());
    }

    proptest! {
        #[test]
        fn undoing_an_edit_gives_the_values_back(seed in proptest::collection::vec(-2f32..2.0, 997)) {
            for (edit, rows, cols) in [
                (Edit::MixedRows, 16 + 6 * 128, 4),
                (Edit::ValueRows, 6 * 128, 4),
                (Edit::HeadRows, 6, 4),
                (Edit::Decay, 6, 1),
                (Edit::ValueColumns, 3, 6 * 128),
                (Edit::QueryPairs, 32, 4),
                (Edit::KeyPairs, 16, 4),
            ] {
                let values: Vec<f32> = seed.iter().copied().cycle().take(rows * cols).collect();
                let mut file = values.clone();
                edit.apply(&SIZES, &mut file, rows, cols).unwrap();
                prop_assert_ne!(&file, &values, "{:?}", edit);
                let stored = quant::encode(&quant::F32, &file, cols, Scalar::F32);
                edit.fits(&SIZES, rows, cols).unwrap();
                let back = edit.undo(&SIZES, &stored.view()).view().to_f32();
                for (back, value) in back.iter().zip(&values) {
                    let close = if edit == Edit::Decay { (back - value).abs() < 2e-7 } else { back == value };
                    prop_assert!(close, "{:?}: {} {}", edit, back, value);
                }
            }
        }

        /// Heads of 128 columns cut blocks of 256 in two.
        #[test]
        fn columns_of_any_format_are_moved_exactly(seed in proptest::collection::vec(-2f32..2.0, 997)) {
            let cols = 6 * 128;
            let values: Vec<f32> = seed.iter().copied().cycle().take(2 * cols).collect();
            for name in ["q8_0", "q4_0", "bf16", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs", "mxfp4", "tq3_1s", "tq4_1s"] {
                let stored = quant::encode(quant::format(name).unwrap(), &values, cols, Scalar::F32);
                let mut expected = vec![0.0; 2 * cols];
                let file = stored.view().to_f32();
                for (to, from) in Edit::ValueColumns.order(&SIZES).unwrap().each().enumerate() {
                    (0..2).for_each(|row| expected[row * cols + to] = file[row * cols + from]);
                }
                let got = Edit::ValueColumns.undo(&SIZES, &stored.view());
                prop_assert_eq!(got.view().to_f32(), expected, "{}", name);
            }
        }
    }
}

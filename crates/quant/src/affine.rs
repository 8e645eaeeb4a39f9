//! Affine groups, as MLX stores them (`specs/checkpoints.md` §2.2).
//!
//! `value = scale[c / group] * code[c] + bias[c / group]`; a row's codes are one
//! little-endian bit stream, code `c` in bits `c*bits .. (c+1)*bits`, so codes of
//! 3, 5 and 6 bits straddle bytes. Scales may be negative.

use crate::{Codes, Format, Owned, Row, Scalar, Stored, WeightLayout, Zero};

const fn of(name: &'static str, bits: u8, group: u16) -> Format {
    Format {
        name,
        layout: WeightLayout::Affine { bits, group },
        block: group as usize,
        ggml: None,
        view: Some(Codes {
            bits,
            group: group as usize,
            super_group: group as usize,
            scale: None,
            zero: Zero::Bias,
            rotated: None,
        }),
        pieces: None,
        decode,
        encode: Some(encode),
    }
}

/// MLX's affine formats: every width of codes with every size of groups.
pub const AFFINE: &[Format] = &[
    of("affine2-g32", 2, 32),
    of("affine2-g64", 2, 64),
    of("affine2-g128", 2, 128),
    of("affine3-g32", 3, 32),
    of("affine3-g64", 3, 64),
    of("affine3-g128", 3, 128),
    of("affine4-g32", 4, 32),
    of("affine4-g64", 4, 64),
    of("affine4-g128", 4, 128),
    of("affine5-g32", 5, 32),
    of("affine5-g64", 5, 64),
    of("affine5-g128", 5, 128),
    of("affine6-g32", 6, 32),
    of("affine6-g64", 6, 64),
    of("affine6-g128", 6, 128),
    of("affine8-g32", 8, 32),
    of("affine8-g64", 8, 64),
    of("affine8-g128", 8, 128),
];

/// The affine format with `bits` a code and `group` columns a scale.
pub fn affine(bits: usize, group: usize) -> Option<&'static Format> {
    AFFINE.iter().find(|f| matches!(f.layout, WeightLayout::Affine { bits: b, group: g } if usize::from(b) == bits && usize::from(g) == group))
}

fn shape(format: &Format) -> (usize, usize) {
    match format.layout {
        WeightLayout::Affine { bits, group } => (bits.into(), group.into()),
        _ => unreachable!("only affine formats are made here"),
    }
}

/// Code `c` of a bit stream of `bits`-wide codes.
pub(crate) fn code(codes: &[u8], bits: usize, c: usize) -> u32 {
    let (byte, shift) = (c * bits / 8, c * bits % 8);
    let high = codes.get(byte + 1).copied().unwrap_or(0);
    (u32::from(u16::from_le_bytes([codes[byte], high])) >> shift) & ((1 << bits) - 1)
}

/// The first codes of a bit stream, as many as there is room for.
pub(crate) fn codes(stream: &[u8], bits: usize, out: &mut [u8]) {
    if bits == 4 {
        // The compiler makes vectors of it.
        let (pairs, last) = out.as_chunks_mut();
        let bytes = last.iter_mut().zip(&stream[pairs.len()..]);
        bytes.for_each(|(last, byte)| *last = byte & 15);
        let pairs = pairs.iter_mut().zip(stream);
        pairs.for_each(|(pair, byte)| *pair = [byte & 15, byte >> 4]);
        return;
    }
    let (eights, rest) = out.as_chunks_mut::<8>();
    match bits {
        2 => codes_by_eights::<2>(stream, eights),
        3 => codes_by_eights::<3>(stream, eights),
        5 => codes_by_eights::<5>(stream, eights),
        6 => codes_by_eights::<6>(stream, eights),
        8 => codes_by_eights::<8>(stream, eights),
        _ => unreachable!("codes have 2 to 6 bits, or 8"),
    }
    for (c, out) in (8 * eights.len()..).zip(rest) {
        *out = code(stream, bits, c) as u8;
    }
}

/// Eight codes have as many bytes as one has bits.
fn codes_by_eights<const BITS: usize>(stream: &[u8], out: &mut [[u8; 8]]) {
    for (out, bytes) in out.iter_mut().zip(stream.as_chunks::<BITS>().0) {
        let mut word = [0; 8];
        word[..BITS].copy_from_slice(bytes);
        let word = u64::from_le_bytes(word);
        for (i, out) in out.iter_mut().enumerate() {
            *out = (word >> (BITS * i)) as u8 & (u8::MAX >> (8 - BITS));
        }
    }
}

fn decode(format: &Format, row: Row<'_>, out: &mut [f32]) {
    let (bits, group) = shape(format);
    for (g, out) in out.chunks_exact_mut(group).enumerate() {
        let (scale, bias) = (row.scale.get(row.scales, g), row.scale.get(row.biases, g));
        for (c, value) in out.iter_mut().enumerate() {
            *value = scale.mul_add(code(row.codes, bits, g * group + c) as f32, bias);
        }
    }
}

/// [`Format::unpack`], lengths proven.
pub(crate) fn unpack(
    format: &Format,
    row: Row<'_>,
    codes: &mut [u8],
    scales: &mut [f32],
    biases: &mut [f32],
) {
    self::codes(row.codes, shape(format).0, codes);
    for (g, (scale, bias)) in scales.iter_mut().zip(biases).enumerate() {
        (*scale, *bias) = (row.scale.get(row.scales, g), row.scale.get(row.biases, g));
    }
}

/// The numbers of `from` with more bits a code, in groups that divide the old ones:
/// `scale code + bias = (scale / 2ⁿ)(2ⁿ code) + bias`, no value changes.
///
/// `None` where `format` has fewer bits, longer groups, or is not affine; where
/// it is the format of `from`, the bytes are.
pub fn widen(from: &Stored<'_>, format: &'static Format) -> Option<Owned> {
    let (
        WeightLayout::Affine { bits, group },
        WeightLayout::Affine {
            bits: wide,
            group: short,
        },
    ) = (from.format.layout, format.layout)
    else {
        return None;
    };
    let shift = wide.checked_sub(bits)?;
    let repeat = group.is_multiple_of(short).then(|| group / short)?;
    let mut out = Owned {
        format,
        codes: vec![0; from.rows * format.code_bytes(from.cols)],
        ..Owned::gather(from, [])
    };
    for row in 0..from.rows {
        let (row, start) = (from.row(row), row * format.code_bytes(from.cols));
        for c in 0..from.cols {
            let code = code(row.codes, bits.into(), c) << shift;
            put_code(&mut out.codes[start..], wide.into(), c, code);
        }
        for g in 0..from.format.scales(from.cols) {
            let scale = row.scale.get(row.scales, g) / f32::from(1u16 << shift);
            for (list, value) in [
                (&mut out.scales, scale),
                (&mut out.biases, row.scale.get(row.biases, g)),
            ] {
                for _ in 0..repeat {
                    push(list, row.scale, value);
                }
            }
        }
    }
    out.rows = from.rows;
    Some(out)
}

/// Writes code `c` of a bit stream of zeros.
fn put_code(codes: &mut [u8], bits: usize, c: usize, code: u32) {
    let both = code << (c * bits % 8);
    codes[c * bits / 8] |= both as u8;
    if both > 0xff {
        codes[c * bits / 8 + 1] |= (both >> 8) as u8;
    }
}

fn push(list: &mut Vec<u8>, scalar: Scalar, value: f32) {
    let at = list.len();
    list.resize(at + scalar.bytes(), 0);
    scalar.put(&mut list[at..], 0, value);
}

/// Spreads the codes over a group's range, from the end that lies farther from
/// zero, and moves the step so that zero itself stays a code where it lies in
/// the range: a pruned or centered weight keeps its zeros.
fn encode(format: &Format, values: &[f32], scale_type: Scalar, out: &mut Owned) {
    let (bits, group) = shape(format);
    let top = ((1u32 << bits) - 1) as f32;
    let start = out.codes.len();
    out.codes.resize(start + format.code_bytes(values.len()), 0);
    for (g, values) in values.chunks_exact(group).enumerate() {
        let low = values.iter().copied().fold(f32::INFINITY, f32::min);
        let high = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let (edge, other) = if low.abs() > high.abs() {
            (low, high)
        } else {
            (high, low)
        };
        let mut scale = ((other - edge) / top)
            .abs()
            .max(1e-7)
            .copysign(other - edge);
        let mut bias = edge;
        let zero = (-edge / scale).round_ties_even();
        if zero > 0.0 && zero <= top {
            scale = -edge / zero;
        }
        let mut stored = [0u8; 4];
        let mut round = |v: f32| {
            scale_type.put(&mut stored, 0, v);
            scale_type.get(&stored, 0)
        };
        (scale, bias) = (round(scale), round(bias));
        push(&mut out.scales, scale_type, scale);
        push(&mut out.biases, scale_type, bias);
        for (c, &value) in values.iter().enumerate() {
            let code = ((value - bias) / scale).round_ties_even().clamp(0.0, top) as u32;
            put_code(&mut out.codes[start..], bits, g * group + c, code);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::encode;
    use proptest::prelude::*;

    /// Reads a code bit by bit: the definition, without byte arithmetic.
    fn code_by_bits(codes: &[u8], bits: usize, c: usize) -> u32 {
        (0..bits)
            .map(|b| (u32::from(codes[(c * bits + b) / 8]) >> ((c * bits + b) % 8) & 1) << b)
            .sum()
    }

    proptest! {
        #[test]
        fn codes_are_read_from_any_bit_offset(stream in proptest::collection::vec(any::<u8>(), 96), less in 0usize..9) {
            for bits in [2, 3, 4, 5, 6, 8] {
                let n = 96 * 8 / bits;
                for c in 0..n {
                    prop_assert_eq!(code(&stream, bits, c), code_by_bits(&stream, bits, c));
                }
                let mut all = vec![0; n - less];
                codes(&stream, bits, &mut all);
                for (c, got) in all.into_iter().enumerate() {
                    prop_assert_eq!(u32::from(got), code_by_bits(&stream, bits, c), "code {} of {} bits", c, bits);
                }
            }
        }

        #[test]
        fn more_bits_and_shorter_groups_change_no_value(values in proptest::collection::vec(-4f32..4.0, 256)) {
            for from in AFFINE.iter().filter(|f| shape(f).1 <= 128) {
                let stored = encode(from, &values, 128, Scalar::Bf16);
                for to in AFFINE {
                    let ((bits, group), (wide, short)) = (shape(from), shape(to));
                    let widened = widen(&stored.view(), to);
                    prop_assert_eq!(widened.is_some(), wide >= bits && short <= group, "{} {}", from.name, to.name);
                    if let Some(widened) = widened {
                        prop_assert_eq!(widened.view().to_f32(), stored.view().to_f32(), "{} {}", from.name, to.name);
                    }
                }
            }
        }

        #[test]
        fn a_value_moves_by_less_than_a_step(values in proptest::collection::vec(-4f32..4.0, 128)) {
            for format in AFFINE {
                let (bits, group) = shape(format);
                let stored = encode(format, &values, 128, Scalar::F32);
                let back = stored.view().to_f32();
                for (v, b) in values.chunks(group).zip(back.chunks(group)) {
                    let range = v.iter().fold(0f32, |m, x| m.max(*x)) - v.iter().fold(0f32, |m, x| m.min(*x));
                    let step = range.max(8e-7) / ((1u32 << bits) - 1) as f32;
                    for (v, b) in v.iter().zip(b) {
                        prop_assert!((v - b).abs() <= 1.6 * step, "{} {v} {b} step {step}", format.name);
                    }
                }
            }
        }
    }
}

//! Plain elements: f32, f16, bf16.

use crate::{Format, Owned, Row, Scalar, WeightLayout};

const fn plain(name: &'static str, ggml: u32, scalar: Scalar) -> Format {
    Format {
        name,
        layout: WeightLayout::Plain(scalar),
        block: 1,
        ggml: Some(ggml),
        view: None,
        pieces: None,
        decode,
        encode: Some(encode),
    }
}

/// IEEE single precision.
pub const F32: Format = plain("f32", 0, Scalar::F32);
/// IEEE half precision.
pub const F16: Format = plain("f16", 1, Scalar::F16);
/// The upper half of an `f32`.
pub const BF16: Format = plain("bf16", 30, Scalar::Bf16);

fn scalar(format: &Format) -> Scalar {
    match format.layout {
        WeightLayout::Plain(scalar) => scalar,
        _ => unreachable!("only plain formats are made here"),
    }
}

fn decode(format: &Format, row: Row<'_>, out: &mut [f32]) {
    let scalar = scalar(format);
    for (i, value) in out.iter_mut().enumerate() {
        *value = scalar.get(row.codes, i);
    }
}

fn encode(format: &Format, values: &[f32], _scale: Scalar, out: &mut Owned) {
    let scalar = scalar(format);
    let start = out.codes.len();
    out.codes.resize(start + values.len() * scalar.bytes(), 0);
    for (i, &value) in values.iter().enumerate() {
        scalar.put(&mut out.codes[start..], i, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::encode;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_a_format_can_hold_survives_a_round_trip(bits in proptest::collection::vec(any::<u16>(), 1..40)) {
            for (format, scalar) in [(&F16, Scalar::F16), (&BF16, Scalar::Bf16)] {
                let bytes: Vec<u8> = bits.iter().flat_map(|b| b.to_le_bytes()).collect();
                let values: Vec<f32> = (0..bits.len()).map(|i| scalar.get(&bytes, i)).collect();
                if values.iter().any(|v| v.is_nan()) {
                    continue;
                }
                let stored = encode(format, &values, values.len(), Scalar::F32);
                prop_assert_eq!(stored.view().to_f32(), values);
            }
        }
    }
}

//! Floats of one byte: E4M3 and E8M0.

/// The value of an E4M3 byte: sign, four bits of exponent, three of fraction; no
/// infinities, `0x7f` and `0xff` are NaN.
///
/// ```
/// assert_eq!(quant::e4m3(0x7e), 448.0);
/// assert_eq!(quant::e4m3(0x81), -1.0 / 512.0);
/// ```
pub const fn e4m3(byte: u8) -> f32 {
    const SMALLEST: f32 = 1.0 / 512.0;
    let (exponent, fraction) = ((byte >> 3 & 15) as u32, (byte & 7) as u32);
    let size = match (exponent, fraction) {
        (15, 7) => f32::NAN,
        (0, fraction) => fraction as f32 * SMALLEST,
        _ => f32::from_bits((exponent + 120) << 23 | fraction << 20),
    };
    if byte > 0x7f { -size } else { size }
}

/// The value of an E8M0 byte, `2^(byte − 127)`; `0xff` is NaN.
///
/// ```
/// assert_eq!(quant::e8m0(130), 8.0);
/// ```
pub const fn e8m0(byte: u8) -> f32 {
    match byte {
        0 => f32::from_bits(0x0040_0000),
        0xff => f32::NAN,
        _ => f32::from_bits((byte as u32) << 23),
    }
}

/// [`e4m3`] of every byte.
pub(crate) const E4M3: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        values[byte] = e4m3(byte as u8);
        byte += 1;
    }
    values
};

/// The values of E2M1, doubled, which makes them integers. Both zeros are `+0`.
pub(crate) const E2M1_DOUBLED: &[i8] = &[0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

#[cfg(test)]
mod tests {
    use super::*;

    /// Sign, exponent and fraction by the definition, in double precision.
    fn by_definition(byte: u8, exponent_bits: u32, fraction_bits: u32) -> f64 {
        let field = |at: u32, bits: u32| f64::from(u32::from(byte) >> at & ((1 << bits) - 1));
        let (exponent, fraction) = (
            field(fraction_bits, exponent_bits),
            field(0, fraction_bits) / f64::from(1 << fraction_bits),
        );
        let bias = f64::from((1 << (exponent_bits - 1)) - 1);
        let size = match exponent {
            0.0 => fraction * (1.0 - bias).exp2(),
            _ => (1.0 + fraction) * (exponent - bias).exp2(),
        };
        let negative = byte >> (exponent_bits + fraction_bits) & 1 == 1;
        if negative { -size } else { size }
    }

    #[test]
    fn every_byte_is_what_its_fields_say() {
        for byte in 0..=255u8 {
            if byte & 0x7f == 0x7f {
                assert!(e4m3(byte).is_nan());
            } else {
                assert_eq!(
                    f64::from(e4m3(byte)),
                    by_definition(byte, 4, 3),
                    "{byte:#x}"
                );
            }
            if byte == 0xff {
                assert!(e8m0(byte).is_nan());
            } else {
                assert_eq!(f64::from(e8m0(byte)), (f64::from(byte) - 127.0).exp2());
            }
        }
        for code in 0..16u8 {
            let doubled = f64::from(E2M1_DOUBLED[usize::from(code)]);
            assert_eq!(doubled, 2.0 * by_definition(code, 2, 1), "{code}");
        }
    }
}

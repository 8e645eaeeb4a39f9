use super::*;
use crate::block::Pieces;
use crate::{FORMATS, Owned, Scalar, Stored, WeightLayout, Zero, encode, format};
use proptest::prelude::*;

/// What other programs make of these blocks (`tests/golden/gguf_blocks.py`).
const GOLDEN: &str = include_str!("../../../../tests/golden/gguf/blocks.txt");

/// What values become in formats with rotated columns (`tests/golden/rotated_blocks.py`).
const ROTATED: &str = include_str!("../../../../tests/golden/gguf/rotated.txt");

fn bytes(hex: &str) -> Vec<u8> {
    let pairs = hex.as_bytes().chunks_exact(2);
    let byte = |pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    pairs.map(byte).collect()
}

fn floats(hex: &str) -> Vec<f32> {
    let bytes = bytes(hex);
    (0..bytes.len() / 4)
        .map(|i| Scalar::F32.get(&bytes, i))
        .collect()
}

fn golden(kind: &str) -> impl Iterator<Item = (&'static Format, &'static str, &'static str)> {
    let lines = GOLDEN.lines().chain(ROTATED.lines());
    lines.filter_map(move |line| {
        let fields: Vec<&str> = line.split(' ').collect();
        let [found, name, input, output] = fields[..] else {
            panic!("four fields in {line}");
        };
        (found == kind).then(|| (format(name).unwrap(), input, output))
    })
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn all() -> impl Iterator<Item = &'static Format> {
    [SIMPLE, K_QUANTS, NONLINEAR, TURBO].into_iter().flatten()
}

/// `cols` as one row.
fn one_row<'a>(format: &'static Format, cols: usize, codes: &'a [u8]) -> Stored<'a> {
    Stored::new(format, 1, cols, codes)
}

#[test]
fn blocks_mean_what_other_programs_read() {
    let mut seen = 0;
    for (format, blocks, values) in golden("decode") {
        let (blocks, values) = (bytes(blocks), floats(values));
        let got = one_row(format, values.len(), &blocks).to_f32();
        // A zero's sign is lost in some of their tables.
        let got: Vec<f32> = got.iter().map(|v| v + 0.0).collect();
        let values: Vec<f32> = values.iter().map(|v| v + 0.0).collect();
        assert_eq!(bits(&got), bits(&values), "{}", format.name);
        seen += 1;
    }
    assert_eq!(seen, all().count());
}

#[test]
fn simple_and_rotated_formats_are_written_as_other_programs_write_them() {
    let mut seen = Vec::new();
    for (format, values, blocks) in golden("encode") {
        let values = floats(values);
        let got = encode(format, &values, values.len(), Scalar::F32);
        assert_eq!(got.codes, bytes(blocks), "{}", format.name);
        seen.push(format.name);
    }
    let simple = SIMPLE.iter().map(|f| f.name).chain(["mxfp4"]);
    let rotated = ["tq3_1s", "tq4_1s"].into_iter().flat_map(|name| [name; 12]);
    assert_eq!(seen, simple.chain(rotated).collect::<Vec<_>>());
}

#[test]
fn a_type_number_finds_its_format_and_nothing_else_does() {
    for id in 0..256 {
        match gguf_format(id) {
            Some(format) => assert_eq!(format.ggml, Some(id)),
            None => assert!(
                FORMATS
                    .iter()
                    .copied()
                    .flatten()
                    .all(|f| f.ggml != Some(id))
            ),
        }
    }
    assert_eq!(gguf_format(2).unwrap().name, "q4_0");
    assert_eq!(gguf_format(30).unwrap().name, "bf16");
    assert_eq!(gguf_format(40).unwrap().code_bytes(128), 72);
}

#[test]
fn levels_one_apart_are_an_offset() {
    let offset = |name| format(name).unwrap().codes().unwrap().zero.offset();
    for (name, expected) in [
        ("q4_0", 8),
        ("q5_0", 16),
        ("q8_0", 128),
        ("q3_k", 4),
        ("q6_k", 32),
    ] {
        assert_eq!(offset(name), Some(expected), "{name}");
    }
    for name in ["q4_k", "iq4_nl", "mxfp4"] {
        assert_eq!(offset(name), None, "{name}");
    }
}

/// The rows of `format` in `matrix` through `unpack`, and through `unpack_super`
/// where there are blocks.
fn rebuilt(matrix: &Stored<'_>, row: usize) -> Vec<f32> {
    let format = matrix.format;
    let view = format.codes().unwrap();
    let groups = matrix.cols / view.group;
    let mut codes = vec![0; matrix.cols];
    let (mut scales, mut biases) = (vec![0.0; groups], vec![0.0; groups]);
    format.unpack(matrix.row(row), &mut codes, &mut scales, &mut biases);
    if matches!(format.layout, WeightLayout::Block { .. }) {
        let supers = matrix.cols / view.super_group;
        let (mut d, mut m) = (vec![0.0; supers], vec![0.0; supers]);
        let (mut s, mut t) = (vec![0; groups], vec![0; groups]);
        let mut same = vec![0; matrix.cols];
        format.unpack_super(matrix.row(row), &mut same, &mut d, &mut m, &mut s, &mut t);
        assert_eq!(same, codes, "{}", format.name);
        for g in 0..groups {
            let at = g * view.group / view.super_group;
            assert_eq!(
                scales[g].to_bits(),
                (d[at] * f32::from(s[g])).to_bits(),
                "{}",
                format.name
            );
            assert_eq!(
                biases[g].to_bits(),
                (m[at] * f32::from(t[g])).to_bits(),
                "{}",
                format.name
            );
        }
        if let Some(scale) = view.scale {
            let mut stored = [0; 4];
            for value in scales.iter().chain(&biases) {
                scale.put(&mut stored, 0, *value);
                assert_eq!(
                    scale.get(&stored, 0).to_bits(),
                    value.to_bits(),
                    "{} in {scale:?}",
                    format.name
                );
            }
        }
    }
    let value = |(c, &code): (usize, &u8)| {
        assert!(
            u32::from(code) < 1 << view.bits,
            "{} has {} bits",
            format.name,
            view.bits
        );
        match view.zero {
            Zero::Bias => scales[c / view.group].mul_add(code.into(), biases[c / view.group]),
            Zero::Levels(levels) => scales[c / view.group] * f32::from(levels[usize::from(code)]),
        }
    };
    codes.iter().enumerate().map(value).collect()
}

/// The relative error, root of the mean square, of storing `values`.
fn error(format: &'static Format, values: &[f32]) -> f32 {
    let back = encode(format, values, values.len(), Scalar::F16)
        .view()
        .to_f32();
    let square = |values: &mut dyn Iterator<Item = f32>| values.map(|v| v * v).sum::<f32>();
    (square(&mut values.iter().zip(&back).map(|(a, b)| a - b))
        / square(&mut values.iter().copied()))
    .sqrt()
}

/// Against the errors of GGUF's own tools, without an importance matrix, on the
/// same values.
#[test]
fn stored_values_err_no_more_than_with_other_programs() {
    // Sums of twelve uniform numbers from a linear congruence.
    let mut state = 1u64;
    let mut uniform = || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    let values: Vec<f32> = (0..64 * 256)
        .map(|_| 0.02 * ((0..12).map(|_| uniform()).sum::<f32>() - 6.0))
        .collect();
    for (name, theirs) in [
        ("q8_0", 0.00520),
        ("q6_k", 0.01742),
        ("q5_k", 0.03553),
        ("q5_1", 0.03710),
        ("q5_0", 0.04130),
        ("q4_k", 0.06963),
        ("q4_1", 0.07652),
        ("q4_0", 0.08355),
        ("iq4_nl", 0.07755),
        ("iq4_xs", 0.07557),
        ("mxfp4", 0.11246),
        ("q3_k", 0.14780),
        ("q2_k", 0.28957),
        ("tq3_1s", 0.15131),
        ("tq4_1s", 0.07283),
    ] {
        let error = error(format(name).unwrap(), &values);
        assert!(
            error <= 1.01 * theirs,
            "{name} errs by {error:.5}, theirs by {theirs}"
        );
    }
}

proptest! {
    #[test]
    fn a_view_of_codes_gives_the_decoded_values(seed in proptest::collection::vec(any::<u8>(), 210 * 4), values in proptest::collection::vec(-1f32..1.0, 512)) {
        let here = |f: &&Format| f.codes().is_some_and(|c| c.rotated.is_none()) && !matches!(f.layout, WeightLayout::Scaled { .. });
        for format in FORMATS.iter().copied().flatten().filter(here) {
            let owned: Owned;
            let matrix = match format.layout {
                WeightLayout::Block { bytes, .. } => {
                    let bytes = usize::from(bytes);
                    let n = 4 / (format.block / 32).clamp(1, 2);
                    Stored::new(format, 2, n / 2 * format.block, &seed[..n * bytes])
                }
                _ => {
                    owned = encode(format, &values, 256, Scalar::Bf16);
                    owned.view()
                }
            };
            for row in 0..2 {
                let mut expected = vec![0.0; matrix.cols];
                matrix.decode_row(row, &mut expected);
                if expected.iter().all(|v| !v.is_nan()) {
                    prop_assert_eq!(bits(&rebuilt(&matrix, row)), bits(&expected), "{}", format.name);
                }
            }
        }
    }

    #[test]
    fn writing_a_block_undoes_reading_it(seed in proptest::collection::vec(any::<u8>(), 256)) {
        for format in all() {
            let (Some(block), WeightLayout::Block { bytes, .. }) = (format.pieces, format.layout) else {
                continue;
            };
            let seed = &seed[..usize::from(bytes)];
            let mut pieces = Pieces::new();
            (block.read)(seed, &mut pieces);
            if pieces.d.iter().chain(&pieces.m).any(|d| d.is_nan()) {
                continue;
            }
            let mut back = vec![0; seed.len()];
            (block.write)(&pieces, &mut back);
            let mut again = Pieces::new();
            (block.read)(&back, &mut again);
            prop_assert_eq!(&again, &pieces, "{}", format.name);
            if format.name != "nvfp4" { // several bytes of a scale mean the same
                prop_assert_eq!(&back, seed, "{}", format.name);
            }
        }
    }

    #[test]
    fn any_values_can_be_stored(values in proptest::collection::vec(any::<f32>(), 256)) {
        for format in all().filter(|f| f.can_encode()) {
            let stored = encode(format, &values, 256, Scalar::F16);
            prop_assert_eq!(stored.codes.len(), format.code_bytes(256));
        }
    }

    #[test]
    fn zeros_stay_zeros_and_constants_stay_close(value in -2f32..2.0) {
        for format in all().filter(|f| f.can_encode()) {
            let back = encode(format, &[0.0; 256], 256, Scalar::F16).view().to_f32();
            prop_assert!(back.iter().all(|v| *v == 0.0), "{}", format.name);
            let back = encode(format, &[value; 256], 256, Scalar::F16).view().to_f32();
            let far = 0.34 * value.abs() + 1e-6;
            if TURBO.contains(format) {
                // The error of a rotated column is spread over its block.
                let square: f32 = back.iter().map(|v| (v - value) * (v - value)).sum();
                prop_assert!((square / 256.0).sqrt() <= far, "{} {value} {square}", format.name);
                continue;
            }
            for v in back {
                prop_assert!((v - value).abs() <= far, "{} {value} {v}", format.name);
            }
        }
    }
}

proptest! {
    #[test]
    fn scales_below_the_normal_halves_still_reach_their_values(exponent in -18f32..-10.0, down: bool) {
        let value = exponent.exp2() * if down { -1.0 } else { 1.0 };
        for format in all().filter(|f| f.can_encode() && (f.name.ends_with("_k") || f.name.starts_with("iq4"))) {
            let back = encode(format, &[value; 256], 256, Scalar::F16).view().to_f32();
            for v in back {
                prop_assert!((v - value).abs() <= 0.34 * value.abs(), "{} {value} {v}", format.name);
            }
        }
    }
}

/// Of formats with rotated columns, with their own levels instead of the integers near them.
#[test]
fn codes_of_rotated_columns_and_their_scales_are_all_that_a_row_is() {
    for (format, _, blocks) in golden("encode").filter(|(f, ..)| TURBO.contains(f)) {
        let blocks = bytes(blocks);
        let WeightLayout::Block { bytes: size, .. } = format.layout else {
            panic!("blocks");
        };
        let cols = blocks.len() / usize::from(size) * 32;
        let view = format.codes().unwrap();
        let levels = view.rotated.unwrap().levels;
        let (mut codes, mut scales) = (vec![0; cols], vec![0.0; cols / 16]);
        let mut biases = scales.clone();
        let matrix = one_row(format, cols, &blocks);
        format.unpack(matrix.row(0), &mut codes, &mut scales, &mut biases);
        let levels = codes.iter().map(|&code| levels[usize::from(code)]);
        let mut values: Vec<f32> = levels
            .enumerate()
            .map(|(c, level)| level * scales[c / 16])
            .collect();
        let blocks = values.as_chunks_mut().0;
        blocks.iter_mut().for_each(crate::Rotated::undo);
        assert_eq!(bits(&values), bits(&matrix.to_f32()), "{}", format.name);
    }
}

#[test]
fn integer_levels_of_rotated_columns_are_within_0_012_of_the_own_ones() {
    for format in TURBO {
        let view = format.codes().unwrap();
        let rotated = view.rotated.unwrap();
        let Zero::Levels(levels) = view.zero else {
            panic!("levels");
        };
        assert_eq!(
            (levels.len(), rotated.levels.len()),
            (1 << view.bits, 1 << view.bits)
        );
        for (&near, own) in levels.iter().zip(rotated.levels) {
            assert!((f32::from(near) * rotated.step - own).abs() < 0.012);
        }
    }
}

#[test]
fn a_scale_beyond_half_precision_becomes_the_largest() {
    for format in TURBO {
        let stored = encode(format, &[1e6; 32], 32, Scalar::F32);
        let read = stored.view().to_f32();
        assert!(read.iter().all(|v| v.is_finite()), "{}", format.name);
        assert!(read.iter().sum::<f32>() > 32.0 * 3e4, "{}", format.name);
    }
}

//! Bytes of a stranger: refused with a reason, or read correctly, never a panic.

use crate::common::*;
use proptest::prelude::*;
use std::borrow::Cow;
use weights::{Checkpoint, LoadError};

/// Opens `bytes` and touches everything in it.
fn exercise(bytes: &[u8]) -> Result<(), LoadError> {
    let checkpoint = Checkpoint::from_bytes(
        "{}",
        vec![("model.safetensors".into(), Cow::Owned(bytes.to_vec()))],
    )?;
    let names: Vec<String> = checkpoint.names().map(String::from).collect();
    for stored in &names {
        let name = stored.strip_suffix("_packed").unwrap_or(stored);
        if let Some(shape) = checkpoint.shape(name) {
            let (n, cols) = (
                shape.iter().product::<usize>(),
                shape.last().copied().unwrap_or(1),
            );
            let _ = checkpoint.matrix(name, n / cols, cols).map(|m| m.to_f32());
            let _ = checkpoint.vector(name, n);
            let _ = checkpoint.integers(name, n);
        }
        let _ = checkpoint.matrix(name, 2, 64).map(|m| m.to_f32());
    }
    for name in ["norm.weight", "mtp.norm.weight"] {
        let _ = checkpoint.norm(name, 4);
    }
    assert!(checkpoint.unused().len() <= names.len());
    Ok(())
}

fn sample() -> Vec<u8> {
    let mut tensors = vec![
        filled("model.norm.weight", 4, 1.0),
        f32s(
            "model.layers.0.linear_attn.conv1d.weight",
            &[2, 4, 1],
            &[0.5; 8],
        ),
        filled("mtp.norm.weight", 4, 0.5),
    ];
    let format = quant::affine(4, 32).unwrap();
    let owned = quant::encode(format, &[0.25; 128], 64, quant::Scalar::F32);
    tensors.push(Tensor(
        "lm_head.weight".into(),
        "U32",
        vec![2, 8],
        owned.codes,
    ));
    tensors.push(Tensor(
        "lm_head.scales".into(),
        "F32",
        vec![2, 2],
        owned.scales,
    ));
    tensors.push(Tensor(
        "lm_head.biases".into(),
        "F32",
        vec![2, 2],
        owned.biases,
    ));
    for (name, dtype, shape, n) in [
        ("a.weight", "F8_E4M3", vec![2, 64], 128),
        ("a.weight_scale", "F32", vec![2, 1], 8),
        ("b.weight_packed", "I32", vec![2, 8], 64),
        ("b.weight_scale", "BF16", vec![2, 2], 8),
        ("b.weight_zero_point", "I32", vec![1, 2], 8),
        ("b.weight_shape", "I64", vec![2], 16),
        ("c.weight_packed", "U8", vec![2, 32], 64),
        ("c.weight_scale", "F8_E4M3", vec![2, 4], 8),
        ("c.weight_global_scale", "F32", vec![1], 4),
        ("d.weight", "U32", vec![2, 8], 64),
        ("d.scales", "U8", vec![2, 4], 8),
        ("d.global_scale", "F32", vec![1], 4),
    ] {
        let bytes = match name {
            "b.weight_shape" => [2u64, 64].map(u64::to_le_bytes).concat(),
            _ => vec![1; n],
        };
        tensors.push(Tensor(name.into(), dtype, shape, bytes));
    }
    file(Some(r#"{"format": "mlx"}"#), &tensors)
}

#[test]
fn every_matrix_of_the_sample_can_be_read() {
    let checkpoint = load("{}", &[("model.safetensors", sample())]).unwrap();
    for name in [
        "lm_head.weight",
        "a.weight",
        "b.weight",
        "c.weight",
        "d.weight",
    ] {
        assert_eq!(
            checkpoint.matrix(name, 2, 64).unwrap().to_f32().len(),
            128,
            "{name}"
        );
    }
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let whole = sample();
    exercise(&whole).unwrap();
    let header = u64::from_le_bytes(whole[..8].try_into().unwrap());
    for len in 0..whole.len() {
        let message = exercise(&whole[..len]).unwrap_err().to_string();
        let expected = match len as u64 {
            0..8 => format!(
                "the file ends after {len} bytes, its header needs 8, in `model.safetensors`"
            ),
            n if n < 8 + header => format!(
                "the file ends after {len} bytes, its header needs {}, in `model.safetensors`",
                8 + header
            ),
            n => format!(
                "of {}: the file is cut short or its header wrong, in `model.safetensors`",
                n - 8 - header
            ),
        };
        assert!(message.ends_with(&expected), "{len}: {message}");
    }
}

#[test]
fn a_header_cut_anywhere_is_refused_even_if_its_length_says_otherwise() {
    let whole = sample();
    let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let text = std::str::from_utf8(&whole[8..8 + header]).unwrap();
    for len in 0..header {
        let message = refusal(&text[..len], &whole[8 + header..]);
        assert!(
            message.starts_with("malformed header: ") && message.contains("column"),
            "{len}: {message}"
        );
    }
}

#[test]
fn every_lie_of_a_header_is_named() {
    let long = "x".repeat(513);
    for (header, expected) in [
        (
            "",
            "malformed header: EOF while parsing a value at line 1 column 0, in `model.safetensors`",
        ),
        (
            "[]",
            "malformed header: invalid type: sequence, expected an object of tensors at line 1 column 0, in `model.safetensors`",
        ),
        (
            "{} {}",
            "malformed header: trailing characters at line 1 column 4, in `model.safetensors`",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[1]}}"#,
            "malformed header: missing field `data_offsets` at line 1 column 32, in `model.safetensors`",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}"#,
            "malformed header: invalid value: integer `-1`, expected u64 at line 1 column 31, in `model.safetensors`",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}}"#,
            "malformed header: trailing characters at line 1 column 53, in `model.safetensors`",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,4]}}"#,
            "malformed header: invalid length 9, expected a shape of at most 8 axes at line 1 column 47, in `model.safetensors`",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}"#,
            "tensor `a` has shape [0], with an axis of no elements, in `model.safetensors`",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}"#,
            "tensor `a` has shape [4294967296, 4294967296], more than any file can hold, in `model.safetensors`",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[2305843009213693953],"data_offsets":[0,4]}}"#,
            "tensor `a` has shape [2305843009213693953], more than any file can hold, in `model.safetensors`",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#,
            "tensor `a` has 4 bytes of data, but F32 of shape [2] take 8, in `model.safetensors`",
        ),
        (
            r#"{"a":{"dtype":"F4","shape":[1],"data_offsets":[0,1]}}"#,
            "tensor `a` has 1 bytes of data, but F4 of shape [1] take 1, in `model.safetensors`",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}"#,
            "tensor `a` ends at byte 0, before it begins at 4, in `model.safetensors`",
        ),
        (
            r#"{"a":{"dtype":"F33","shape":[1],"data_offsets":[0,4]}}"#,
            "tensor `a` has the unknown type `F33`, in `model.safetensors`",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}}"#,
            "tensor `a` ends at byte 12 of 8: the file is cut short or its header wrong, in `model.safetensors`",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[18446744073709551611,18446744073709551615]}}"#,
            "tensor `a` ends at byte 18446744073709551615 of 8: the file is cut short or its header wrong, in `model.safetensors`",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F16","shape":[1],"data_offsets":[2,4]}}"#,
            "tensors `a` and `b` overlap, in `model.safetensors`",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#,
            "malformed header: two entries called `a`, in `model.safetensors`",
        ),
        (
            r#"{"a\n":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#,
            "malformed header: invalid value: another name, expected a printable name of 1 to 512 bytes at line 1 column 6, in `model.safetensors`",
        ),
        (
            &format!(r#"{{"{long}":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}}"#),
            "malformed header: invalid value: another name, expected a printable name of 1 to 512 bytes at line 1 column 516, in `model.safetensors`",
        ),
    ] {
        assert_eq!(refusal(header, &[0; 8]), expected);
    }
    assert!(refusal("{\"\u{1}\":0}", &[]).starts_with("malformed header: control character"));
}

#[test]
fn gaps_and_trailing_bytes_are_allowed() {
    let header = r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]},"__metadata__":null}   "#;
    let checkpoint = load(
        "{}",
        &[(
            "model.safetensors",
            with_header(header, &[0, 0, 0, 0, 0, 0, 0x80, 0x3f, 9]),
        )],
    )
    .unwrap();
    assert_eq!(checkpoint.vector("a", 1).unwrap(), [1.0]);
}

#[test]
fn limits_are_limits() {
    for length in [(16 << 20) + 1, 1 << 40, u64::MAX] {
        let bytes = [&length.to_le_bytes()[..], b"{}"].concat();
        let expected = format!(
            "header length in bytes is {length}, more than the limit of 16777216, in `model.safetensors`"
        );
        assert_eq!(exercise(&bytes).unwrap_err().to_string(), expected);
    }
    let longest = [&(16u64 << 20).to_le_bytes()[..], b"{}"].concat();
    assert!(
        exercise(&longest)
            .unwrap_err()
            .to_string()
            .starts_with("the file ends after 10 bytes")
    );

    let entry = |i: usize| {
        format!(
            r#""{i}":{{"dtype":"U8","shape":[],"data_offsets":[{i},{}]}}"#,
            i + 1
        )
    };
    let with = |n: usize| {
        with_header(
            &format!("{{{}}}", (0..n).map(entry).collect::<Vec<_>>().join(",")),
            &vec![0; n],
        )
    };
    assert!(load("{}", &[("model.safetensors", with(1 << 16))]).is_ok());
    let message = load("{}", &[("model.safetensors", with((1 << 16) + 1))])
        .unwrap_err()
        .to_string();
    assert_eq!(
        message,
        "number of tensors is 65537, more than the limit of 65536, in `model.safetensors`"
    );
}

#[test]
fn the_end_of_a_message_is_not_up_to_the_file() {
    let header = format!(
        r#"{{"a":{{"dtype":"{}\u001b[2J","shape":[1],"data_offsets":[0,4]}}}}"#,
        "y".repeat(150)
    );
    let message = refusal(&header, &[0; 4]);
    assert!(
        message.ends_with("\\u{1b}[2J`, in `model.safetensors`") && !message.contains('\u{1b}'),
        "{message}"
    );
    assert!(refusal(&header.replace('y', "yyyy"), &[0; 4]).len() < 400);
}

/// Every input that a fuzzer was started from, and every one that once crashed.
#[test]
fn fuzzed_files_never_panic() {
    let folder =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/regressions/safetensors");
    let files = std::fs::read_dir(folder)
        .unwrap()
        .map(|f| f.unwrap().path());
    let mut opened: Vec<String> = files
        .filter(|path| exercise(&std::fs::read(path).unwrap()).is_ok())
        .map(|path| path.file_name().unwrap().to_string_lossy().into_owned())
        .collect();
    opened.sort();
    assert_eq!(opened, ["affine", "coded", "plain"]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), fix in any::<bool>()) {
        let mut bytes = bytes;
        if fix && bytes.len() > 8 {
            let n = (bytes.len() - 8) as u64;
            bytes[..8].copy_from_slice(&n.to_le_bytes());
        }
        prop_assert!(exercise(&bytes).is_err(), "random bytes are no header");
    }

    #[test]
    fn a_damaged_file_never_panics(damage in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..6)) {
        let mut bytes = sample();
        for (at, byte) in damage {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let _ = exercise(&bytes);
    }

    #[test]
    fn a_damaged_number_never_panics(which in any::<proptest::sample::Index>(), number in prop_oneof![any::<u64>(), 0u64..70, Just(u64::MAX), Just(1 << 63)]) {
        let whole = sample();
        let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
        let text = std::str::from_utf8(&whole[8..8 + header]).unwrap();
        // Replaces one whole run of digits.
        let starts: Vec<usize> = (1..text.len()).filter(|&i| text.as_bytes()[i].is_ascii_digit() && b"[ ,".contains(&text.as_bytes()[i - 1])).collect();
        let start = starts[which.index(starts.len())];
        let end = start + text[start..].find(|c: char| !c.is_ascii_digit()).unwrap();
        let changed = format!("{}{number}{}", &text[..start], &text[end..]);
        let _ = exercise(&with_header(&changed, &whole[8 + header..]));
    }
}

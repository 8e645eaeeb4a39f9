//! Codes under scales, as each tool lays them out.

use crate::common::*;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::Path;
use weights::Checkpoint;

fn golden(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/golden/coded")
        .join(name)
}

/// SHA-256 of values, zeros positive.
fn digest(values: &[f32]) -> String {
    let bytes: Vec<u8> = values
        .iter()
        .flat_map(|v| (v + 0.0).to_le_bytes())
        .collect();
    let digest = Sha256::digest(bytes);
    digest.iter().map(|b| format!("{b:02x}")).collect()
}

#[test]
fn weights_are_what_the_tools_that_packed_them_unpack() {
    let mut formats: BTreeMap<&str, usize> = BTreeMap::new();
    for name in ["ct", "fp8", "modelopt", "mlx", "mlx-moe"] {
        let folder = golden(name);
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let values = std::fs::read(folder.join("values.json")).unwrap();
        let values: serde_json::Value = serde_json::from_slice(&values).unwrap();
        for (weight, expected) in values.as_object().unwrap() {
            let axes = expected["shape"].as_array().unwrap();
            let shape: Vec<usize> = axes.iter().map(|n| n.as_u64().unwrap() as usize).collect();
            let (cols, lead) = shape.split_last().unwrap();
            assert!(checkpoint.has(weight), "{name}: {weight}");
            let matrix = checkpoint.matrix(weight, lead.iter().product(), *cols);
            let matrix = matrix.unwrap_or_else(|e| panic!("{name}: {e}"));
            let format = matrix.format.name;
            assert_eq!(
                digest(&matrix.to_f32()),
                expected["sha256"].as_str().unwrap(),
                "{name}: {weight} in {format}"
            );
            *formats.entry(format).or_default() += 1;
            // MLX files are looked at without a width, which affine groups need.
            if !format.starts_with("affine") {
                assert_eq!(checkpoint.shape(weight), Some(shape), "{name}: {weight}");
            }
        }
        let rest = checkpoint.unused();
        let plain = ["norm", "conv1d.weight", "A_log", "dt_bias"];
        let left = |n: &&String| !plain.iter().any(|part| n.contains(part));
        assert_eq!(rest.iter().find(left), None, "{name}: every part is read");
    }
    println!("{formats:?}");
    for format in [
        "fp8",
        "fp8-mx",
        "fp4-mx",
        "fp4-nv",
        "int4-g32",
        "int4-g64",
        "uint4-g32",
        "int8-g32",
        "uint8-g64",
        "sint8-g64",
    ] {
        assert!(
            formats.contains_key(format),
            "{format} is among {formats:?}"
        );
    }
}

/// A tensor of bytes that count up.
fn t(name: &str, dtype: &'static str, shape: &[usize]) -> Tensor {
    let size = match dtype {
        "F32" | "I32" | "U32" => 4,
        "BF16" => 2,
        "I64" => 8,
        _ => 1,
    };
    let n = shape.iter().product::<usize>() * size;
    let bytes = (0..n).map(|i| (i % 100) as u8).collect();
    Tensor(name.into(), dtype, shape.into(), bytes)
}

fn numbers(name: &str, values: &[i32]) -> Tensor {
    let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    Tensor(name.into(), "I32", vec![values.len()], bytes)
}

fn outcome(config: &str, tensors: &[Tensor]) -> Result<Vec<f32>, String> {
    let checkpoint = load(config, &[("model.safetensors", file(None, tensors))]).unwrap();
    let matrix = checkpoint.matrix("a.weight", 2, 64);
    matrix.map(|m| m.to_f32()).map_err(|e| e.to_string())
}

#[test]
fn what_does_not_belong_together_is_named() {
    let fp8 = || t("a.weight", "F8_E4M3", &[2, 64]);
    let packed = || t("a.weight_packed", "I32", &[2, 8]);
    let scale = |shape: &[usize]| t("a.weight_scale", "BF16", shape);
    let nv = || {
        vec![
            t("a.weight_packed", "U8", &[2, 32]),
            t("a.weight_scale", "F8_E4M3", &[2, 4]),
        ]
    };
    let with = |mut tensors: Vec<Tensor>, more: Tensor| {
        tensors.push(more);
        tensors
    };
    for (tensors, message) in [
        (
            vec![fp8()],
            "tensor `a.weight_scale` is missing, without which `a.weight` means nothing",
        ),
        (
            vec![scale(&[2, 1])],
            "tensor `a.weight` is missing, without which `a.weight_scale` means nothing",
        ),
        (
            vec![t("a.scales", "U8", &[2, 2])],
            "tensor `a.weight` is missing, without which `a.scales` means nothing",
        ),
        (
            vec![fp8(), scale(&[3, 1])],
            "tensor `a.weight_scale` has shape [3, 1], but a matrix [2, 64] needs one scale, one a row, one for some columns of a row, or one for each block of [128, 128]",
        ),
        (
            vec![t("a.weight", "F8_E4M3", &[2, 32]), scale(&[2, 1])],
            "tensor `a.weight` has shape [2, 32], expected [2, 64]",
        ),
        (
            vec![fp8(), t("a.weight_scale", "I32", &[2, 1])],
            "tensor `a.weight_scale` is stored as I32, but f32, f16, bf16 or u8 (scales) is needed here",
        ),
        (
            vec![t("a.weight", "BF16", &[2, 64]), scale(&[2, 1])],
            "tensor `a.weight` is stored as BF16, but f8_e4m3, i8 or u8 beside its scale is needed here",
        ),
        (
            vec![packed()],
            "tensor `a.weight_scale` is missing, without which `a.weight_packed` means nothing",
        ),
        (
            nv(),
            "tensor `a.weight_global_scale` is missing, without which `a.weight_packed` means nothing",
        ),
        (
            with(nv(), t("a.weight_zero_point", "I8", &[2, 4])),
            "tensor `a.weight` is stored in floats or unpacked codes with zero points format, which cannot be read",
        ),
        (
            with(nv(), f32s("a.weight_global_scale", &[1], &[0.0])),
            "element 0 of tensor `a.weight_global_scale` is 0, which cannot be a factor of scales",
        ),
        (
            with(nv(), f32s("a.weight_global_scale", &[3], &[1.0; 3])),
            "tensor `a.weight_global_scale` has shape [3], expected [1]",
        ),
        (
            vec![
                t("a.weight", "U8", &[2, 32]),
                t("a.weight_scale", "F8_E4M3", &[2, 4]),
            ],
            "tensor `a.weight_scale_2` is missing, without which `a.weight` means nothing",
        ),
        (
            vec![t("a.weight_packed", "I32", &[2, 6]), scale(&[2, 2])],
            "tensor `a.weight` packs words [2, 6] with scales [2, 2], which is no known form of [2, 64]",
        ),
        (
            vec![packed(), scale(&[2, 4])],
            "tensor `a.weight` packs words [2, 8] with scales [2, 4], which is no known form of [2, 64]",
        ),
        (
            vec![
                packed(),
                scale(&[2, 2]),
                numbers("a.weight_shape", &[2, 60]),
            ],
            "tensor `a.weight` has shape [2, 60], expected [2, 64]",
        ),
        (
            vec![
                packed(),
                scale(&[2, 2]),
                numbers("a.weight_g_idx", &[1; 64]),
            ],
            "tensor `a.weight` is stored in codes in an order of activations (`g_idx`) format, which cannot be read",
        ),
        (
            vec![
                packed(),
                scale(&[2, 2]),
                t("a.weight_zero_point", "I32", &[2, 2]),
            ],
            "tensor `a.weight_zero_point` has shape [2, 2], expected [1, 2]",
        ),
        (
            vec![packed(), scale(&[2, 2]), t("a.weight", "BF16", &[2, 64])],
            "tensor `a.weight` is stored as BF16, but nothing beside its packed form is needed here",
        ),
        (
            vec![t("a.weight", "U32", &[2, 8]), t("a.scales", "U8", &[2, 1])],
            "tensor `a.weight` packs words [2, 8] with scales [2, 1], which is no known form of [2, 64]",
        ),
        (
            vec![
                t("a.weight", "I8", &[2, 64]),
                scale(&[2, 1]),
                t("a.weight_zero_point", "I8", &[2, 1]),
            ],
            "tensor `a.weight` is stored in floats or unpacked codes with zero points format, which cannot be read",
        ),
    ] {
        assert_eq!(outcome("{}", &tensors).unwrap_err(), message);
    }
    let asymmetric = r#"{"quantization_config": {"config_groups": {"group_0": {"weights": {"symmetric": false}}}}}"#;
    assert_eq!(
        outcome(asymmetric, &[packed(), scale(&[2, 2])]).unwrap_err(),
        "tensor `a.weight_zero_point` is missing, without which `a.weight_packed` means nothing"
    );
    let rotated = r#"{"quantization_config": {"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}}"#;
    assert_eq!(
        outcome(rotated, &[fp8(), scale(&[2, 1])]).unwrap_err(),
        "tensor `a.weight` is stored in compressed-tensors with `transform_config` format, which cannot be read"
    );
}

#[test]
fn the_shape_of_scales_says_what_they_cover() {
    let codes = || t("a.weight", "F8_E4M3", &[2, 64]);
    let plain: Vec<f32> = (0..128).map(|i| quant::e4m3(i % 100)).collect();
    let expected = |scale: &dyn Fn(usize, usize) -> f32| -> Vec<f32> {
        (0..128).map(|i| plain[i] * scale(i / 64, i % 64)).collect()
    };
    let with = |config: &str, shape: &[usize], values: &[f32]| {
        outcome(config, &[codes(), f32s("a.weight_scale", shape, values)]).unwrap()
    };
    for shape in [&[][..], &[1], &[1, 1]] {
        assert_eq!(with("{}", shape, &[0.5]), expected(&|_, _| 0.5));
    }
    for shape in [&[2][..], &[2, 1]] {
        assert_eq!(
            with("{}", shape, &[0.5, 2.0]),
            expected(&|r, _| [0.5, 2.0][r])
        );
    }
    let four = [0.5, 2.0, 4.0, 0.25];
    assert_eq!(
        with("{}", &[2, 2], &four),
        expected(&|r, c| four[2 * r + c / 32])
    );
    let blocks =
        r#"{"quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 20]}}"#;
    assert_eq!(with(blocks, &[1, 4], &four), expected(&|_, c| four[c / 20]));
    let exponents = Tensor(
        "a.weight_scale_inv".into(),
        "F8_E8M0",
        vec![1, 1],
        vec![130],
    );
    assert_eq!(
        outcome("{}", &[codes(), exponents]),
        Ok(expected(&|_, _| 8.0))
    );
    let stacked = [
        t("a.weight", "F8_E4M3", &[2, 1, 64]),
        f32s("a.weight_scale", &[2, 1, 1], &[0.5, 2.0]),
    ];
    assert_eq!(outcome("{}", &stacked), Ok(expected(&|r, _| [0.5, 2.0][r])));
}

#[test]
fn groups_in_order_are_no_reordering() {
    let order: Vec<i32> = (0..64).map(|c| c / 32).collect();
    let tensors = [
        t("a.weight_packed", "I32", &[2, 8]),
        t("a.weight_scale", "BF16", &[2, 2]),
        numbers("a.weight_g_idx", &order),
    ];
    assert_eq!(outcome("{}", &tensors), outcome("{}", &tensors[..2]));
}

#[test]
fn scales_of_activations_are_left_out_on_purpose() {
    let names = [
        "a.input_scale",
        "b.k_scale",
        "b.v_scale",
        "a.input_global_scale",
    ];
    let tensors: Vec<Tensor> = names.iter().map(|n| filled(n, 1, 1.0)).collect();
    let checkpoint = single(&tensors);
    assert_eq!(checkpoint.names().count(), 4);
    assert_eq!(checkpoint.unused(), [""; 0]);
}

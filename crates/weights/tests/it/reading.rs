//! What is stored comes back.

use crate::common::*;
use proptest::prelude::*;
use quant::Scalar;
use weights::{Checkpoint, LoadError};

/// The tensors an MLX writer makes of a matrix, as `quant` packs it.
fn packed(module: &str, owned: &quant::Owned) -> Vec<Tensor> {
    let name = match owned.scale {
        Scalar::F32 => "F32",
        Scalar::F16 => "F16",
        Scalar::Bf16 => "BF16",
    };
    let groups = owned.format.scales(owned.cols);
    vec![
        Tensor(
            format!("{module}.weight"),
            "U32",
            vec![owned.rows, owned.format.code_bytes(owned.cols) / 4],
            owned.codes.clone(),
        ),
        Tensor(
            format!("{module}.scales"),
            name,
            vec![owned.rows, groups],
            owned.scales.clone(),
        ),
        Tensor(
            format!("{module}.biases"),
            name,
            vec![owned.rows, groups],
            owned.biases.clone(),
        ),
    ]
}

fn values(n: usize) -> Vec<f32> {
    (0..n)
        .map(|i| ((i * 37 % 101) as f32 - 50.0) / 16.0)
        .collect()
}

#[test]
fn a_checkpoint_can_be_shared_by_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Checkpoint>();
    shared::<LoadError>();
}

#[test]
fn plain_matrices_come_back_in_every_float_type() {
    let values = values(12);
    for (dtype, scalar, format) in [
        ("F32", Scalar::F32, &quant::F32),
        ("F16", Scalar::F16, &quant::F16),
        ("BF16", Scalar::Bf16, &quant::BF16),
    ] {
        let stored = quant::encode(format, &values, 4, scalar);
        let checkpoint = single(&[Tensor(
            "model.a.weight".into(),
            dtype,
            vec![3, 4],
            stored.codes.clone(),
        )]);
        let matrix = checkpoint.matrix("a.weight", 3, 4).unwrap();
        assert_eq!(matrix.format.name, format.name);
        assert_eq!(matrix.to_f32(), stored.view().to_f32());
        assert_eq!(
            checkpoint.vector("a.weight", 12).unwrap(),
            stored.view().to_f32()
        );
        assert_eq!(checkpoint.shape("a.weight"), Some(vec![3, 4]));
    }
}

#[test]
fn affine_matrices_are_what_quant_packed_whatever_the_config_says() {
    for format in quant::AFFINE {
        for (config, tells) in [
            ("{}", false),
            (
                r#"{"quantization": {"bits": 4, "group_size": 64}}"#,
                format.name == "affine4-g64",
            ),
        ] {
            let owned = quant::encode(format, &values(3 * 256), 256, Scalar::Bf16);
            let checkpoint = load(
                config,
                &[("model.safetensors", file(None, &packed("lm_head", &owned)))],
            )
            .unwrap();
            let matrix = checkpoint.matrix("lm_head.weight", 3, 256).unwrap();
            let expected = owned.view();
            assert_eq!(matrix.format.name, format.name);
            assert_eq!(
                (matrix.rows, matrix.cols, matrix.scale),
                (3, 256, Scalar::Bf16)
            );
            assert_eq!(
                (matrix.codes, matrix.scales, matrix.biases),
                (expected.codes, expected.scales, expected.biases)
            );
            assert_eq!(matrix.to_f32(), expected.to_f32());
            assert_eq!(
                checkpoint.unused(),
                Vec::<String>::new(),
                "scales and biases are used with their matrix"
            );
            if tells {
                assert_eq!(checkpoint.shape("lm_head.weight"), Some(vec![3, 256]));
            }
        }
    }
}

#[test]
fn the_config_of_a_module_goes_before_the_default() {
    let owned = quant::encode(quant::affine(8, 32).unwrap(), &values(64), 64, Scalar::F32);
    let files = [("model.safetensors", file(None, &packed("model.a", &owned)))];
    let config = r#"{"quantization": {"bits": 2, "group_size": 64, "model.a": {"bits": 8, "group_size": 32}}}"#;
    assert_eq!(
        load(config, &files).unwrap().shape("a.weight"),
        Some(vec![1, 64])
    );
    assert_eq!(
        load("{}", &files).unwrap().shape("a.weight"),
        None,
        "nothing tells the width"
    );
    assert_eq!(
        load(r#"{"quantization": {"bits": 3, "group_size": 32}}"#, &files)
            .unwrap()
            .shape("a.weight"),
        None,
        "the shapes contradict"
    );
}

#[test]
fn stacked_and_convolution_weights_count_as_matrices() {
    let checkpoint = single(&[
        f32s("experts.down_proj", &[2, 3, 4], &values(24)),
        f32s("conv.weight", &[4, 3, 2, 1, 1], &values(24)),
    ]);
    assert_eq!(
        checkpoint
            .matrix("experts.down_proj", 6, 4)
            .unwrap()
            .to_f32(),
        values(24)
    );
    assert_eq!(
        checkpoint.matrix("conv.weight", 4, 6).unwrap().to_f32(),
        values(24)
    );
    let refused = checkpoint
        .matrix("experts.down_proj", 4, 6)
        .unwrap_err()
        .to_string();
    assert_eq!(
        refused,
        "tensor `experts.down_proj` has shape [2, 3, 4], expected [4, 6]"
    );

    let format = quant::affine(4, 32).unwrap();
    let mut stacked = packed(
        "experts.up",
        &quant::encode(format, &values(6 * 64), 64, Scalar::F16),
    );
    stacked.iter_mut().for_each(|t| t.2 = vec![2, 3, t.2[1]]);
    let checkpoint = single(&stacked);
    assert_eq!(
        checkpoint
            .matrix("experts.up.weight", 6, 64)
            .unwrap()
            .format,
        format
    );
}

#[test]
fn a_vector_may_have_any_axes() {
    for shape in [&[4][..], &[1, 4], &[2, 1, 2], &[4, 1, 1]] {
        assert_eq!(
            single(&[f32s("a", shape, &values(4))])
                .vector("a", 4)
                .unwrap(),
            values(4)
        );
    }
    assert_eq!(
        single(&[f32s("a", &[], &[7.0])]).vector("a", 1).unwrap(),
        [7.0]
    );
}

#[test]
fn integers_of_every_width_are_checked() {
    let i64s = |v: &[i64]| {
        Tensor(
            "o".into(),
            "I64",
            vec![v.len()],
            v.iter().flat_map(|v| v.to_le_bytes()).collect(),
        )
    };
    let i32s = |v: &[i32]| {
        Tensor(
            "o".into(),
            "I32",
            vec![v.len()],
            v.iter().flat_map(|v| v.to_le_bytes()).collect(),
        )
    };
    let u32s = |v: &[u32]| {
        Tensor(
            "o".into(),
            "U32",
            vec![v.len()],
            v.iter().flat_map(|v| v.to_le_bytes()).collect(),
        )
    };
    assert_eq!(
        single(&[i64s(&[3, 0, 4294967295])])
            .integers("o", 3)
            .unwrap(),
        [3, 0, u32::MAX]
    );
    assert_eq!(
        single(&[i32s(&[3, 0, 7])]).integers("o", 3).unwrap(),
        [3, 0, 7]
    );
    assert_eq!(
        single(&[u32s(&[3, u32::MAX])]).integers("o", 2).unwrap(),
        [3, u32::MAX]
    );
    for (tensor, n, message) in [
        (
            i64s(&[0, -1]),
            2,
            "element 1 of tensor `o` is -1, which is no 32-bit unsigned number",
        ),
        (
            i64s(&[1 << 32]),
            1,
            "element 0 of tensor `o` is 4294967296, which is no 32-bit unsigned number",
        ),
        (
            i32s(&[0, -5]),
            2,
            "element 1 of tensor `o` is -5, which is no 32-bit unsigned number",
        ),
        (u32s(&[0, 1]), 3, "tensor `o` has shape [2], expected [3]"),
        (
            filled("o", 2, 1.0),
            2,
            "tensor `o` is stored as F32, but i64, i32, u32, u8 or bool is needed here",
        ),
    ] {
        assert_eq!(
            single(&[tensor]).integers("o", n).unwrap_err().to_string(),
            message
        );
    }
}

#[test]
fn what_was_never_asked_for_is_unused() {
    let checkpoint = single(&[
        filled("model.norm.weight", 2, 1.0),
        filled("model.visual.merger.norm.bias", 2, 1.0),
        filled("mtp.norm.weight", 2, 1.0),
    ]);
    assert_eq!(
        checkpoint.unused(),
        ["mtp.norm.weight", "norm.weight", "visual.merger.norm.bias"]
    );
    assert!(checkpoint.has("norm.weight") && !checkpoint.has("model.norm.weight"));
    checkpoint.shape("norm.weight").unwrap();
    assert_eq!(checkpoint.unused().len(), 3, "looking is not using");
    checkpoint.vector("norm.weight", 2).unwrap();
    assert_eq!(
        checkpoint.unused(),
        ["mtp.norm.weight", "visual.merger.norm.bias"]
    );
}

#[test]
fn the_config_is_read_where_it_lies() {
    let files = [("model.safetensors", file(None, &[]))];
    let nested = load(
        r#"{"architectures": ["A"], "model_type": "b", "text_config": {"hidden_size": 4}}"#,
        &files,
    )
    .unwrap();
    assert_eq!(
        (
            nested.architecture().unwrap(),
            nested.text_config()["hidden_size"].as_u64()
        ),
        ("A", Some(4))
    );
    let flat = load(r#"{"model_type": "b", "hidden_size": 5}"#, &files).unwrap();
    assert_eq!(
        (
            flat.architecture().unwrap(),
            flat.text_config()["hidden_size"].as_u64()
        ),
        ("b", Some(5))
    );
    let empty = load("{}", &files).unwrap();
    assert_eq!(
        empty.architecture().unwrap_err().to_string(),
        "`config.json` has no `architectures` or `model_type`"
    );
}

#[test]
fn two_tensors_of_one_meaning_are_refused() {
    let file = file(
        None,
        &[
            filled("model.a", 1, 1.0),
            filled("language_model.a", 1, 1.0),
        ],
    );
    let message = load("{}", &[("model.safetensors", file)])
        .unwrap_err()
        .to_string();
    assert_eq!(
        message,
        "`a` is stored twice: `model.a` in `model.safetensors` and `language_model.a` in `model.safetensors`"
    );
}

#[test]
fn a_head_saved_under_two_prefixes_is_one_head_if_the_bytes_agree() {
    let twice = |second| {
        file(
            None,
            &[
                filled("lm_head.weight", 2, 1.0),
                filled("language_model.lm_head.weight", 2, second),
            ],
        )
    };
    assert!(
        load("{}", &[("model.safetensors", twice(1.0))])
            .unwrap()
            .has("lm_head.weight")
    );
    assert!(matches!(
        load("{}", &[("model.safetensors", twice(2.0))]),
        Err(LoadError::NameClash { .. })
    ));
}

#[test]
fn what_cannot_be_used_is_named() {
    let owned = quant::encode(quant::affine(4, 32).unwrap(), &values(64), 64, Scalar::F32);
    let mut no_biases = packed("a", &owned);
    no_biases.pop();
    let mut short_biases = packed("a", &owned);
    short_biases[2] = filled("a.biases", 2, 0.0);
    let mut other_biases = packed("a", &owned);
    other_biases[2] = Tensor("a.biases".into(), "F16", vec![1, 2], vec![0; 4]);
    let mut mx = packed("a", &owned);
    mx[1] = Tensor("a.scales".into(), "I8", vec![1, 2], vec![0; 2]);
    let mut bytes = packed("a", &owned);
    bytes[0] = Tensor("a.weight".into(), "U8", vec![1, 32], vec![0; 32]);
    for (tensors, message) in [
        (vec![], "tensor `a.weight` is missing"),
        (
            no_biases,
            "tensor `a.biases` is missing, without which `a.scales` means nothing",
        ),
        (
            short_biases,
            "tensor `a.biases` has shape [2], expected [1, 2]",
        ),
        (
            other_biases,
            "tensor `a.biases` is stored as F16, but the type of its scales is needed here",
        ),
        (
            mx,
            "tensor `a.scales` is stored as I8, but f32, f16, bf16 or u8 (scales) is needed here",
        ),
        (
            bytes,
            "tensor `a.weight` is stored as U8, but u32 beside scales is needed here",
        ),
        (
            vec![Tensor(
                "a.weight".into(),
                "F8_E4M3",
                vec![1, 64],
                vec![0; 64],
            )],
            "tensor `a.weight_scale` is missing, without which `a.weight` means nothing",
        ),
        (
            vec![Tensor("a.qweight".into(), "I32", vec![8, 1], vec![0; 32])],
            "tensor `a.weight` is stored in GPTQ or AWQ format, which cannot be read",
        ),
    ] {
        assert_eq!(
            single(&tensors)
                .matrix("a.weight", 1, 64)
                .unwrap_err()
                .to_string(),
            message
        );
    }
    let mut other_rows = packed("a", &owned);
    other_rows[1] = f32s("a.scales", &[3, 2], &[0.0; 6]);
    other_rows[2] = f32s("a.biases", &[3, 2], &[0.0; 6]);
    let refused = single(&other_rows).matrix("a.weight", 1, 64).unwrap_err();
    assert!(
        matches!(refused, LoadError::WrongGroups { .. }),
        "{refused}"
    );
    for (rows, cols) in [(2, 64), (1, 256), (1, 32), (1, 63), (1, usize::MAX)] {
        let message = single(&packed("a", &owned))
            .matrix("a.weight", rows, cols)
            .unwrap_err()
            .to_string();
        assert_eq!(
            message,
            format!(
                "tensor `a.weight` packs words [1, 8] with scales [1, 2], which is no known form of [{rows}, {cols}]"
            )
        );
    }
}

#[test]
fn the_hash_tells_contents_and_config_but_not_file_names() {
    let one = |config: &str, name: &str, value| {
        load(config, &[(name, file(None, &[filled("a", 2, value)]))])
            .unwrap()
            .content_hash()
    };
    let hash = one("{}", "model.safetensors", 1.0);
    assert_eq!(hash.len(), 64);
    assert_eq!(hash, one("{}", "other.safetensors", 1.0));
    assert_ne!(hash, one("{}", "model.safetensors", 2.0));
    assert_ne!(hash, one("{ }", "model.safetensors", 1.0));
}

proptest! {
    #[test]
    fn any_set_of_tensors_comes_back(
        tensors in proptest::collection::btree_map("[a-zé.\\\\\"]{1,12}", (0usize..4, proptest::collection::vec(1usize..5, 0..5), any::<u8>()), 0..8),
    ) {
        const TYPES: [(&str, usize); 4] = [("BF16", 2), ("F32", 4), ("I64", 8), ("F8_E4M3", 1)];
        let tensors: Vec<Tensor> = tensors.into_iter().map(|(name, (t, shape, byte))| {
            let bytes = shape.iter().product::<usize>() * TYPES[t].1;
            let escaped = name.replace('\\', "\\\\").replace('"', "\\\"");
            Tensor(format!("x.{escaped}"), TYPES[t].0, shape, (0..bytes).map(|i| byte.wrapping_add(i as u8)).collect())
        }).collect();
        let checkpoint = single(&tensors);
        prop_assert_eq!(checkpoint.names().count(), tensors.len());
        for Tensor(escaped, dtype, shape, data) in &tensors {
            let name = escaped.replace("\\\"", "\"").replace("\\\\", "\\");
            prop_assert_eq!(checkpoint.shape(&name), Some(shape.clone()));
            let n: usize = shape.iter().product();
            match checkpoint.matrix(&name, 1, n) {
                Ok(matrix) => prop_assert_eq!(matrix.codes, &data[..]),
                Err(e) => prop_assert!(!["BF16", "F32"].contains(dtype), "{}", e),
            }
        }
    }
}

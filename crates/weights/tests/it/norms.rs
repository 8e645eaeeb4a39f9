//! Norms come out as the scale `1 + w`, whoever wrote the file.

use crate::common::*;
use weights::Checkpoint;

/// Effective scales with a spread as trained ones have.
fn scales() -> Vec<f32> {
    (0..64).map(|i| 0.4 + i as f32 / 64.0).collect()
}

fn norm(name: &str, folded: bool) -> Tensor {
    let shift = if folded { 0.0 } else { 1.0 };
    f32s(
        name,
        &[64],
        &scales().iter().map(|s| s - shift).collect::<Vec<_>>(),
    )
}

fn conv(name: &str, folded: bool) -> Tensor {
    f32s(
        name,
        if folded { &[6, 4, 1] } else { &[6, 1, 4] },
        &[0.0; 24],
    )
}

fn trunk(conv_folded: bool, norms_folded: bool) -> Vec<Tensor> {
    vec![
        conv("model.layers.0.linear_attn.conv1d.weight", conv_folded),
        norm("model.layers.0.input_layernorm.weight", norms_folded),
        norm("model.norm.weight", norms_folded),
    ]
}

fn head(prefix: &str, folded: bool) -> Vec<Tensor> {
    vec![
        norm(&format!("{prefix}norm.weight"), folded),
        norm(&format!("{prefix}layers.0.self_attn.q_norm.weight"), folded),
    ]
}

fn close(checkpoint: &Checkpoint, name: &str) {
    for (found, expected) in checkpoint.norm(name, 64).unwrap().iter().zip(scales()) {
        assert!(
            (found - expected).abs() < 1e-6,
            "{name}: {found} for {expected}"
        );
    }
}

const MLX: Option<&str> = Some(r#"{"format": "mlx"}"#);
const PT: Option<&str> = Some(r#"{"format": "pt"}"#);

#[test]
fn the_convolution_decides_for_the_trunk_and_a_head_inside_it() {
    for folded in [false, true] {
        for metadata in [None, PT, MLX] {
            let tensors = [trunk(folded, folded), head("mtp.", folded)].concat();
            let checkpoint =
                load("{}", &[("model.safetensors", file(metadata, &tensors))]).unwrap();
            for name in [
                "norm.weight",
                "layers.0.input_layernorm.weight",
                "mtp.norm.weight",
                "mtp.layers.0.self_attn.q_norm.weight",
            ] {
                close(&checkpoint, name);
            }
            assert_eq!(
                checkpoint.unused(),
                ["layers.0.linear_attn.conv1d.weight"],
                "the test for folding uses nothing"
            );
        }
    }
}

#[test]
fn a_head_of_its_own_is_decided_by_its_own_file() {
    let scales = filled("mtp.layers.0.mlp.up_proj.scales", 2, 1.0);
    for trunk_folded in [false, true] {
        for (metadata, extra, folded) in [
            (None, vec![], false),
            (PT, vec![], false),
            (MLX, vec![], true),
            (PT, vec![scales.clone()], true),
        ] {
            for (name, prefix) in [
                ("mtp.safetensors", "mtp."),
                ("model-mtp.safetensors", "mtp."),
                ("mtp/model.safetensors", ""),
            ] {
                let head = file(metadata, &[head(prefix, folded), extra.clone()].concat());
                let checkpoint = load(
                    "{}",
                    &[
                        (
                            "model.safetensors",
                            file(None, &trunk(trunk_folded, trunk_folded)),
                        ),
                        (name, head),
                    ],
                )
                .unwrap();
                close(&checkpoint, "mtp.norm.weight");
                close(&checkpoint, "mtp.layers.0.self_attn.q_norm.weight");
                close(&checkpoint, "norm.weight");
            }
        }
    }
}

#[test]
fn a_drafter_published_alone_is_a_head_without_prefix() {
    for (metadata, folded) in [(MLX, true), (PT, false)] {
        let checkpoint = load(
            r#"{"model_type": "qwen3_5_mtp"}"#,
            &[("model.safetensors", file(metadata, &head("", folded)))],
        )
        .unwrap();
        close(&checkpoint, "mtp.norm.weight");
        assert!(!checkpoint.has("norm.weight"));
    }
}

#[test]
fn values_that_contradict_the_layout_are_refused() {
    let message = |tensors: &[Tensor]| {
        single(tensors)
            .norm("norm.weight", 64)
            .unwrap_err()
            .to_string()
    };
    let start = "cannot tell whether the norms of the trunk hold `w` or `1 + w`: `layers.0.linear_attn.conv1d.weight` has shape";
    assert_eq!(
        message(&trunk(true, false)),
        format!(
            "{start} [6, 4, 1], which means `1 + w`, but their values have mean -0.11 and 60.9 % of them are not positive; convert the original again"
        )
    );
    assert_eq!(
        message(&trunk(false, true)),
        format!(
            "{start} [6, 1, 4], which means `w`, but their values have mean 0.89 and 0.0 % of them are not positive; convert the original again"
        )
    );
    let mixed = [
        trunk(true, true),
        vec![conv("model.layers.1.linear_attn.conv1d.weight", false)],
    ]
    .concat();
    assert!(
        message(&mixed).ends_with(
            "but `layers.1.linear_attn.conv1d.weight` has shape [6, 1, 4], which means `w`; convert the original again"
        ),
        "{}",
        message(&mixed)
    );
}

#[test]
fn a_head_that_contradicts_its_metadata_is_refused_and_the_trunk_is_not() {
    let files = |metadata, folded| {
        [
            ("model.safetensors", file(None, &trunk(false, false))),
            ("mtp.safetensors", file(metadata, &head("mtp.", folded))),
        ]
    };
    for (metadata, folded) in [(MLX, false), (PT, true)] {
        let checkpoint = load("{}", &files(metadata, folded)).unwrap();
        let message = checkpoint
            .norm("mtp.norm.weight", 64)
            .unwrap_err()
            .to_string();
        assert!(
            message.starts_with("cannot tell whether the norms of the MTP head hold"),
            "{message}"
        );
        close(&checkpoint, "norm.weight");
    }
}

#[test]
fn fresh_norms_are_no_contradiction() {
    let with = |folded, value| {
        single(&[
            conv("layers.0.linear_attn.conv1d.weight", folded),
            filled("norm.weight", 64, value),
        ])
    };
    assert_eq!(with(false, 0.0).norm("norm.weight", 64).unwrap(), [1.0; 64]);
    assert_eq!(with(true, 1.0).norm("norm.weight", 64).unwrap(), [1.0; 64]);
    assert!(with(true, 0.0).norm("norm.weight", 64).is_err());
    assert!(with(false, 1.0).norm("norm.weight", 64).is_err());
    assert!(with(true, f32::NAN).norm("norm.weight", 64).is_err());
}

#[test]
#[should_panic(expected = "no offset norm")]
fn asking_for_a_norm_without_offset_is_a_mistake_of_the_caller() {
    let _ = single(&[filled("layers.0.linear_attn.norm.weight", 4, 1.0)])
        .norm("layers.0.linear_attn.norm.weight", 4);
}

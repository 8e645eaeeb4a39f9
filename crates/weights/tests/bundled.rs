//! The checkpoints of `models/` at the root of the repository.

use std::path::{Path, PathBuf};
use weights::Checkpoint;

fn bundled(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../models")
        .join(name)
}

#[test]
fn the_bundled_qwen_opens_and_its_norms_are_scales() {
    let checkpoint = Checkpoint::open(&bundled("qwen3_5-15m")).unwrap();
    assert!(checkpoint.architecture().unwrap().starts_with("Qwen3_5"));
    let table = checkpoint.matrix("embed_tokens.weight", 8192, 256).unwrap();
    assert_eq!(table.format.name, "affine8-g64");
    assert_eq!(
        checkpoint.shape("embed_tokens.weight"),
        Some(vec![8192, 256])
    );
    for name in [
        "norm.weight",
        "layers.0.input_layernorm.weight",
        "mtp.norm.weight",
        "mtp.pre_fc_norm_hidden.weight",
    ] {
        let scale = checkpoint.norm(name, 256).unwrap();
        assert!(
            scale.iter().all(|s| (0.1..2.5).contains(s)),
            "{name}: {scale:?}"
        );
        assert_eq!(
            scale,
            checkpoint.vector(name, 256).unwrap(),
            "MLX files hold the scale itself"
        );
    }
    checkpoint
        .vector("layers.0.linear_attn.conv1d.weight", 1024 * 4)
        .unwrap();
    assert!(
        checkpoint
            .unused()
            .iter()
            .all(
                |name| !name.starts_with("embed_tokens") && !name.contains("conv1d")
                    || !name.starts_with("layers.0.")
            )
    );
}

#[test]
fn the_bundled_gemma_pair_opens() {
    let target = Checkpoint::open(&bundled("gemma4-14m")).unwrap();
    target
        .matrix("layers.3.self_attn.q_proj.weight", 256, 256)
        .unwrap();
    target.vector("layers.0.layer_scalar", 1).unwrap();
    let drafter = Checkpoint::open(&bundled("gemma4-14m-assistant")).unwrap();
    assert!(drafter.text_config()["hidden_size"] == 128);
    let projection = drafter.matrix("pre_projection.weight", 128, 512).unwrap();
    assert_eq!((projection.rows, projection.cols), (128, 512));
}

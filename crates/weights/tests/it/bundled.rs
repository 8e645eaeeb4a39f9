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
    let checkpoint = Checkpoint::open(&bundled("tiny-qwen3.5")).unwrap();
    assert!(checkpoint.architecture().unwrap().starts_with("Qwen3_5"));
    let table = checkpoint.matrix("embed_tokens.weight", 8192, 384).unwrap();
    assert_eq!(table.format.name, "affine4-g128");
    assert_eq!(
        checkpoint.shape("embed_tokens.weight"),
        Some(vec![8192, 384])
    );
    for name in [
        "norm.weight",
        "layers.0.input_layernorm.weight",
        "mtp.norm.weight",
        "mtp.pre_fc_norm_hidden.weight",
    ] {
        let scale = checkpoint.norm(name, 384).unwrap();
        assert!(
            scale.iter().all(|s| (0.03..2.5).contains(s)),
            "{name}: {scale:?}"
        );
        assert_eq!(
            scale,
            checkpoint.vector(name, 384).unwrap(),
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
    let target = Checkpoint::open(&bundled("tiny-gemma4")).unwrap();
    target
        .matrix("layers.3.self_attn.q_proj.weight", 768, 384)
        .unwrap();
    target.vector("layers.0.layer_scalar", 1).unwrap();
    let drafter = Checkpoint::open(&bundled("tiny-gemma4-assistant")).unwrap();
    assert!(drafter.text_config()["hidden_size"] == 256);
    let projection = drafter.matrix("pre_projection.weight", 256, 768).unwrap();
    assert_eq!((projection.rows, projection.cols), (256, 768));
}

#[test]
fn a_mapped_checkpoint_equals_the_same_bytes_in_memory() {
    for name in [
        "tiny-qwen3.5",
        "tiny-gemma4",
        "tiny-gemma4-assistant",
        "tiny-gemma4-e",
        "tiny-gemma4-e-assistant",
        "tiny-gemma4-moe",
        "tiny-gemma4-moe-assistant",
        "tiny-qwen3.5-moe",
    ] {
        let folder = bundled(name);
        let mapped = Checkpoint::open(&folder).unwrap();
        let config = std::fs::read_to_string(folder.join("config.json")).unwrap();
        let files = mapped
            .files()
            .map(|f| (f.to_string(), std::fs::read(folder.join(f)).unwrap().into()));
        let in_memory = Checkpoint::from_bytes(&config, files.collect()).unwrap();
        assert_eq!(mapped.content_hash(), in_memory.content_hash());
        assert_eq!(mapped.bytes(), in_memory.bytes());
        assert_eq!(mapped.unused(), in_memory.unused());
        for tensor in mapped
            .names()
            .filter(|n| !n.ends_with(".scales") && !n.ends_with(".biases"))
            // Token ids are no matrices.
            .filter(|n| !n.ends_with("token_ordering"))
        {
            let shape = mapped.shape(tensor).unwrap();
            assert_eq!(in_memory.shape(tensor).as_ref(), Some(&shape));
            let cols = *shape.last().unwrap();
            let rows = shape.iter().product::<usize>() / cols;
            let (a, b) = (
                mapped.matrix(tensor, rows, cols).unwrap(),
                in_memory.matrix(tensor, rows, cols).unwrap(),
            );
            assert_eq!(
                (a.format, a.codes, a.scales, a.biases),
                (b.format, b.codes, b.scales, b.biases),
                "{tensor}"
            );
        }
        assert!(
            mapped
                .unused()
                .iter()
                .all(|n| n.ends_with("token_ordering"))
        );
    }
}

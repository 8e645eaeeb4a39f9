//! Files of vision towers as llama.cpp's converter writes them, `mmproj`.

use convert::gguf::{Store, TensorInfo, Writer};
use half::f16;
use serde_json::Value as Json;
use weights::Checkpoint;
use weights::gguf::{Kind, Value};

/// A tensor: name, shape, values.
pub type Tensor = (String, Vec<usize>, Vec<f32>);

/// The tensors of the tower of `checkpoint`, by canonical name.
pub fn tower_tensors(checkpoint: &Checkpoint) -> Vec<Tensor> {
    let names = checkpoint.weight_names();
    let is_of_tower = |name: &&str| models::TOWER_PREFIXES.iter().any(|p| name.starts_with(p));
    let tensors = names.filter(is_of_tower).map(|name| {
        let shape = checkpoint.shape(name).unwrap();
        let (cols, rows) = shape
            .split_last()
            .map_or((1, 1), |(c, r)| (*c, r.iter().product()));
        let values = checkpoint.matrix(name, rows, cols).unwrap().to_f32();
        (name.to_owned(), shape, values)
    });
    tensors.collect()
}

/// `values` of rows `[a, b, c]` as `[c, a, b]`.
fn last_axis_first(values: &[f32], [a, b, c]: [usize; 3]) -> Vec<f32> {
    let rows = values.chunks_exact(a * b * c);
    let row = |row: &[f32]| {
        let of = |k: usize| (0..a * b).map(move |ij| ij * c + k);
        (0..c).flat_map(of).map(|i| row[i]).collect::<Vec<_>>()
    };
    rows.flat_map(row).collect()
}

/// What llama.cpp calls a tensor of Gemma 4's tower.
fn gemma_name(name: &str) -> String {
    let name = name.replace(".linear.weight", ".weight");
    if let Some(rest) = name.strip_prefix("vision_tower.encoder.layers.") {
        let (block, part) = rest.split_once('.').unwrap();
        let mut part = part.to_owned();
        for (from, to) in [
            ("pre_feedforward_layernorm", "ln2"),
            ("post_feedforward_layernorm", "ffn_post_norm"),
            ("post_attention_layernorm", "attn_post_norm"),
            ("input_layernorm", "ln1"),
            ("self_attn.q_proj", "attn_q"),
            ("self_attn.k_proj", "attn_k"),
            ("self_attn.v_proj", "attn_v"),
            ("self_attn.o_proj", "attn_out"),
            ("self_attn.q_norm", "attn_q_norm"),
            ("self_attn.k_norm", "attn_k_norm"),
            ("mlp.gate_proj", "ffn_gate"),
            ("mlp.up_proj", "ffn_up"),
            ("mlp.down_proj", "ffn_down"),
        ] {
            part = part.replace(from, to);
        }
        return format!("v.blk.{block}.{part}");
    }
    match &*name {
        "vision_tower.patch_embedder.input_proj.weight" => "v.patch_embd.weight",
        "vision_tower.patch_embedder.position_embedding_table" => "v.position_embd.weight",
        "vision_tower.std_bias" => "v.std_bias",
        "vision_tower.std_scale" => "v.std_scale",
        "embed_vision.embedding_projection.weight" => "mm.input_projection.weight",
        "vision_embedder.patch_dense.weight" => "v.patch_embd.weight",
        "vision_embedder.patch_dense.bias" => "v.patch_embd.bias",
        "vision_embedder.pos_embedding" => "v.position_embd.weight",
        other => {
            let norms = [("patch_ln1", "1"), ("patch_ln2", "2"), ("pos_norm", "3")];
            let other = other.strip_prefix("vision_embedder.").unwrap();
            let (norm, part) = other.split_once('.').unwrap();
            let (_, number) = norms.iter().find(|(name, _)| *name == norm).unwrap();
            return format!("v.patch_norm.{number}.{part}");
        }
    }
    .to_owned()
}

/// What llama.cpp calls a tensor of Qwen 3.5's tower.
fn qwen_name(name: &str) -> String {
    let mut name = name.strip_prefix("visual.").unwrap().to_owned();
    for (from, to) in [
        ("blocks.", "v.blk."),
        ("merger.norm", "v.post_ln"),
        ("merger.linear_fc1", "mm.0"),
        ("merger.linear_fc2", "mm.2"),
        ("patch_embed.proj", "v.patch_embd"),
        ("pos_embed", "v.position_embd"),
        ("norm1", "ln1"),
        ("norm2", "ln2"),
        ("attn.qkv", "attn_qkv"),
        ("attn.proj", "attn_out"),
        ("mlp.linear_fc1", "ffn_up"),
        ("mlp.linear_fc2", "ffn_down"),
    ] {
        name = name.replace(from, to);
    }
    name
}

/// The tensors of a tower as llama.cpp's converter writes them.
pub fn projector_tensors(projector: &str, tensors: Vec<Tensor>) -> Vec<Tensor> {
    let mut out = Vec::new();
    for (name, shape, values) in tensors {
        let stored = match projector {
            "qwen3vl_merger" => qwen_name(&name),
            _ => gemma_name(&name),
        };
        let side = |numbers: usize| (numbers / 3).isqrt();
        match (projector, &*stored) {
            ("qwen3vl_merger", "v.patch_embd.weight") => {
                let pixels = values.len() / shape[0] / 6;
                // Channel, frame, pixel.
                let of_frame = |frame: usize| {
                    let parts = values.chunks_exact(pixels).enumerate();
                    let parts = parts.filter(move |(part, _)| part % 2 == frame);
                    parts
                        .flat_map(|(_, pixels)| pixels.to_vec())
                        .collect::<Vec<_>>()
                };
                let shape = vec![shape[0], 3, pixels.isqrt(), pixels.isqrt()];
                out.push((stored.clone(), shape.clone(), of_frame(0)));
                out.push((format!("{stored}.1"), shape, of_frame(1)));
            }
            (_, "v.patch_embd.weight") => {
                let side = side(shape[1]);
                let values = last_axis_first(&values, [side, side, 3]);
                let shape = match projector {
                    "gemma4v" => vec![shape[0], 3, side, side],
                    _ => shape,
                };
                out.push((stored, shape, values));
            }
            (_, "v.patch_norm.1.weight" | "v.patch_norm.1.bias") => {
                let side = side(values.len());
                out.push((stored, shape, last_axis_first(&values, [side, side, 3])));
            }
            ("gemma4uv", "v.position_embd.weight") => {
                let [n, two, width] = shape[..] else {
                    panic!("three axes")
                };
                let by_axis = (0..two).flat_map(|a| (0..n).map(move |i| i * two + a));
                let values = by_axis.flat_map(|at| values[at * width..][..width].to_vec());
                out.push((stored, vec![two, n, width], values.collect()));
            }
            _ => out.push((
                stored,
                if shape.is_empty() { vec![1] } else { shape },
                values,
            )),
        }
    }
    out
}

/// A file of a tower alone, for the tower that `config` describes, in 32 bits.
pub fn projector_file(projector: &str, config: &Json, tensors: Vec<Tensor>) -> Vec<u8> {
    projector_file_in(&quant::F32, projector, config, tensors)
}

/// As [`projector_file`], with matrices in `format`: [`quant::F32`] or [`quant::F16`].
pub fn projector_file_in(
    format: &'static quant::Format,
    projector: &str,
    config: &Json,
    tensors: Vec<Tensor>,
) -> Vec<u8> {
    let format_of = |shape: &[usize]| match shape.len() {
        0 | 1 => &quant::F32,
        _ => format,
    };
    let vision = &config["vision_config"];
    let size = |keys: &[&str]| {
        let value = keys.iter().find_map(|key| vision[*key].as_u64());
        Value::U32(value.unwrap_or(0) as u32)
    };
    let half = || Value::Array(Kind::F32, vec![Value::F32(0.5); 3]);
    let metadata = [
        ("general.architecture", "clip".into()),
        ("clip.has_vision_encoder", Value::Bool(true)),
        ("clip.vision.projector_type", projector.into()),
        ("clip.vision.patch_size", size(&["patch_size"])),
        (
            "clip.vision.embedding_length",
            size(&["hidden_size", "mm_embed_dim"]),
        ),
        (
            "clip.vision.feed_forward_length",
            size(&["intermediate_size"]),
        ),
        (
            "clip.vision.block_count",
            size(&["depth", "num_hidden_layers"]),
        ),
        (
            "clip.vision.attention.head_count",
            size(&["num_heads", "num_attention_heads"]),
        ),
        ("clip.vision.attention.layer_norm_epsilon", Value::F32(1e-6)),
        (
            "clip.vision.spatial_merge_size",
            size(&["spatial_merge_size"]),
        ),
        ("clip.vision.image_mean", half()),
        ("clip.vision.image_std", half()),
    ];
    let infos = tensors.iter().map(|(name, shape, _)| TensorInfo {
        name: name.clone(),
        shape: shape.clone(),
        store: Store::Numbers(format_of(shape)),
    });
    let mut writer = Writer::new(Vec::new(), &metadata, infos.collect()).unwrap();
    for (_, shape, values) in &tensors {
        let bytes: Vec<u8> = match format_of(shape).name {
            "f16" => values
                .iter()
                .flat_map(|x| f16::from_f32(*x).to_le_bytes())
                .collect(),
            _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        };
        writer.write(&bytes).unwrap();
    }
    writer.finish().unwrap()
}

/// The file of the tower of `checkpoint`, of the type `projector`.
pub fn mmproj(projector: &str, checkpoint: &Checkpoint) -> Vec<u8> {
    let tensors = projector_tensors(projector, tower_tensors(checkpoint));
    projector_file(projector, checkpoint.config(), tensors)
}

//! Towers in the layouts that other tools give them: as MLX files have them, and in files of their
//! own as llama.cpp's converter writes them. All are the same tower, bit for bit.

use backend::{Backend, Reference};
use convert::gguf::{Store, TensorInfo, Writer};
use cpu::{Activations, Cpu, CpuOptions, Isa};
use models::{Frames, ModelError, Tower, encode, load_tower};
use serde_json::{Value as Json, json};
use suites::{repository, test_pixels};
use weights::Checkpoint;
use weights::gguf::{Kind, Value};

/// A tensor: name, shape, values.
type Tensor = (String, Vec<usize>, Vec<f32>);

fn open(model: &str) -> Checkpoint {
    Checkpoint::open(&repository(model)).unwrap()
}

/// The tensors of the tower of `checkpoint`, by canonical name.
fn tower_tensors(checkpoint: &Checkpoint) -> Vec<Tensor> {
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

/// `values` of rows `[a, b, c]` as `[b, c, a]`.
fn first_axis_last(values: &[f32], [a, b, c]: [usize; 3]) -> Vec<f32> {
    let rows = values.chunks_exact(a * b * c);
    let row = |row: &[f32]| {
        let of = |jk: usize| (0..a).map(move |i| i * b * c + jk);
        (0..b * c).flat_map(of).map(|i| row[i]).collect::<Vec<_>>()
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
fn projector_tensors(projector: &str, tensors: Vec<Tensor>) -> Vec<Tensor> {
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

/// A file of a tower alone, for the tower that `config` describes.
fn projector_file(projector: &str, config: &Json, tensors: Vec<Tensor>) -> Vec<u8> {
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
        store: Store::Numbers(&quant::F32),
    });
    let mut writer = Writer::new(Vec::new(), &metadata, infos.collect()).unwrap();
    for (_, _, values) in &tensors {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        writer.write(&bytes).unwrap();
    }
    writer.finish().unwrap()
}

/// A checkpoint of `config` and `tensors` in f32, under these names.
fn safetensors(config: &Json, tensors: &[Tensor], format: &str) -> Checkpoint {
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".into(), json!({ "format": format }));
    let mut data = Vec::new();
    for (name, shape, values) in tensors {
        let begin = data.len();
        data.extend(values.iter().flat_map(|x| x.to_le_bytes()));
        let range = [begin, data.len()];
        let entry = json!({"dtype": "F32", "shape": shape, "data_offsets": range});
        header.insert(name.clone(), entry);
    }
    let header = serde_json::to_vec(&header).unwrap();
    let file = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
    let files = vec![("model.safetensors".to_owned(), file.into())];
    Checkpoint::from_bytes(&config.to_string(), files).unwrap()
}

/// Embeddings of a picture of two by three rows.
fn rows(tower: &dyn Tower) -> Vec<f32> {
    let side = tower.outline().patch * tower.outline().merge;
    let (height, width) = (2 * side, 3 * side);
    let rgb = test_pixels(1, height, width);
    let frames = Frames {
        height,
        width,
        rgb: &rgb,
    };
    encode(tower, &Reference, &frames).unwrap().1
}

const MODELS: &[(&str, &str)] = &[
    ("tests/golden/checkpoints/gemma4-vision-clipped", "gemma4v"),
    ("tests/golden/checkpoints/gemma4-vision-standard", "gemma4v"),
    ("tests/golden/checkpoints/gemma4-unified", "gemma4uv"),
    ("models/tiny-qwen3.5-vision", "qwen3vl_merger"),
];

#[test]
fn a_tower_is_the_same_in_every_layout() {
    for &(model, projector) in MODELS {
        let checkpoint = open(model);
        let config = checkpoint.config();
        let tensors = tower_tensors(&checkpoint);
        let plain = safetensors(config, &tensors, "pt");
        let want = rows(&*load_tower(&Reference, &plain).unwrap());

        let file = projector_file(
            projector,
            config,
            projector_tensors(projector, tensors.clone()),
        );
        let alone = Checkpoint::from_bytes("", vec![("mmproj.gguf".into(), file.into())]).unwrap();
        let tower = load_tower(&Reference, &alone).unwrap();
        assert!(rows(&*tower) == want, "{model} as {projector}");
        assert_eq!(tower.tokens(), None, "{model}: a tower knows no tokens");
        let text_width = checkpoint.text_config()["hidden_size"].as_u64();
        assert_eq!(Some(tower.embedding_size() as u64), text_width, "{model}");
        assert_eq!(alone.unused(), [""; 0], "{model}: every tensor is read");

        let mlx = tensors
            .into_iter()
            .map(|(name, shape, values)| match &*name {
                "visual.patch_embed.proj.weight" => {
                    let pixels = values.len() / shape[0] / 6;
                    let values = first_axis_last(&values, [3, 2, pixels]);
                    let shape = vec![shape[0], 2, pixels.isqrt(), pixels.isqrt(), 3];
                    (
                        "vision_tower.patch_embed.proj.weight".to_owned(),
                        shape,
                        values,
                    )
                }
                _ => (name.replace("visual.", "vision_tower."), shape, values),
            });
        let mlx = safetensors(config, &mlx.collect::<Vec<_>>(), "mlx");
        assert!(
            rows(&*load_tower(&Reference, &mlx).unwrap()) == want,
            "{model} in MLX"
        );
    }
}

/// Why there is no tower.
fn refusal(checkpoint: &Checkpoint) -> String {
    let refused: Result<_, ModelError> = load_tower(&Reference, checkpoint);
    refused.err().expect("a refusal").to_string()
}

#[test]
fn what_is_no_tower_says_so() {
    let text = open("models/tiny-gemma4");
    assert!(refusal(&text).contains("reads text alone"));
    let (model, projector) = MODELS[3];
    let checkpoint = open(model);
    let stripped = safetensors(checkpoint.config(), &[], "mlx");
    assert!(refusal(&stripped).contains("a conversion for text alone has dropped them"));

    let tensors = tower_tensors(&checkpoint);
    let changed = |key: &str, value: Json| {
        let mut config = checkpoint.config().clone();
        config["vision_config"][key] = value;
        refusal(&safetensors(&config, &tensors, "pt"))
    };
    for (key, value, reason) in [
        (
            "model_type",
            json!("siglip"),
            "a vision tower of the kind `siglip` is not supported",
        ),
        (
            "deepstack_visual_indexes",
            json!([1, 2]),
            "(deepstack) is not supported",
        ),
        (
            "temporal_patch_size",
            json!(1),
            "not of two frames is not supported",
        ),
        (
            "hidden_act",
            json!("relu"),
            "the activation `relu` is not supported",
        ),
        ("out_hidden_size", json!(64), "which are not the model's"),
        ("num_position_embeddings", json!(255), "are no square"),
        ("num_heads", json!(3), "cannot be 3 heads"),
        ("depth", json!(0), "num_hidden_layers is 0"),
        ("depth", json!(6), "visual.blocks.5"),
        ("image_std", json!([0.5, 0.0, 0.5]), "image_std"),
    ] {
        let said = changed(key, value);
        assert!(said.contains(reason), "{key}: {said}");
    }

    let file = projector_file(
        "pixtral",
        checkpoint.config(),
        projector_tensors(projector, tensors),
    );
    let unknown = Checkpoint::from_bytes("", vec![("mmproj.gguf".into(), file.into())]);
    let said = unknown.err().unwrap().to_string();
    assert!(
        said.contains("gemma4v, gemma4uv, qwen3vl_merger can be read, not `pixtral`"),
        "{said}"
    );
}

/// Loads the tower of `checkpoint`, and has it look at a picture if that is not too large.
fn try_tower(checkpoint: &Checkpoint) -> bool {
    let Ok(tower) = load_tower(&Reference, checkpoint) else {
        return false;
    };
    tower.size_rule(Some(70)).fit(1, 100, 30).ok();
    if tower.outline().patch * tower.outline().merge <= 48 {
        assert!(!rows(&*tower).is_empty());
    }
    true
}

#[test]
fn no_configuration_makes_a_tower_panic() {
    let (mut loaded, mut refused) = (0, 0);
    for (model, _) in MODELS {
        let checkpoint = open(model);
        let tensors = tower_tensors(&checkpoint);
        let vision = checkpoint.config()["vision_config"].as_object().unwrap();
        for key in vision.keys() {
            for value in [
                json!(0),
                json!(1),
                json!(-1),
                json!(7),
                json!(1 << 10),
                json!((1 << 24) - 1),
                json!(u64::MAX),
                json!(1.5),
                json!(1e300),
                json!(null),
                json!("silu"),
                json!([]),
                json!({}),
                json!(true),
            ] {
                let mut config = checkpoint.config().clone();
                config["vision_config"][key] = value;
                match try_tower(&safetensors(&config, &tensors, "pt")) {
                    true => loaded += 1,
                    false => refused += 1,
                }
            }
        }
    }
    assert!(
        loaded > 100 && refused > 100,
        "{loaded} loaded, {refused} refused"
    );
}

#[test]
fn no_damage_to_a_file_makes_a_tower_panic() {
    let (model, projector) = MODELS[2];
    let checkpoint = open(model);
    let tensors = projector_tensors(projector, tower_tensors(&checkpoint));
    let file = projector_file(projector, checkpoint.config(), tensors);
    let open = |bytes: Vec<u8>| Checkpoint::from_bytes("", vec![("m.gguf".into(), bytes.into())]);
    for percent in 0..100 {
        let cut = file[..file.len() * percent / 100].to_vec();
        assert!(open(cut).is_err(), "{percent} % of the file");
    }
    let mut rng = suites::Rng(3);
    let mut survived = 0;
    for _ in 0..2000 {
        // Most of what stands before the tensors' numbers.
        let mut damaged = file.clone();
        damaged[rng.below(1500) as usize] = rng.below(256) as u8;
        survived += u32::from(open(damaged).is_ok_and(|checkpoint| try_tower(&checkpoint)));
    }
    assert!(survived > 100, "{survived} of 2000 load all the same");
}

/// The rows of each span of a clip of `frames` frames of two by two rows.
fn spans(b: &dyn Backend, tower: &dyn Tower, frames: std::ops::Range<usize>) -> Vec<Vec<f32>> {
    let side = tower.outline().patch * tower.outline().merge;
    let (height, width) = (2 * side, 2 * side);
    let rgb = test_pixels(frames.end, height, width);
    let frames = Frames {
        height,
        width,
        rgb: &rgb[frames.start * height * width * 3..],
    };
    let (grid, rows) = encode(tower, b, &frames).unwrap();
    let rows = rows.chunks_exact(grid.run_rows() * tower.embedding_size());
    rows.map(<[f32]>::to_vec).collect()
}

fn assert_frames_are_alone(b: &dyn Backend, model: &str, n: usize) {
    let tower = load_tower(b, &open(model)).unwrap();
    let each = tower.outline().frames_a_run;
    let together = spans(b, &*tower, 0..n * each);
    assert_eq!(together.len(), n);
    for span in [0, n / 2, n - 1] {
        let alone = spans(b, &*tower, span * each..(span + 1) * each);
        assert!(
            alone[0] == together[span],
            "{model} on {}: span {span}",
            b.name()
        );
    }
}

#[test]
fn a_frame_has_the_same_rows_alone_and_in_a_clip_of_any_length() {
    let isas = Isa::available();
    let cpu = |isa, threads, activations| {
        let options = CpuOptions {
            threads,
            isa: Some(isa),
            activations,
            ..CpuOptions::default()
        };
        Cpu::new(options).unwrap()
    };
    let best = *isas.last().unwrap();
    for (model, _) in MODELS.iter().chain(&[("models/tiny-gemma4-vision", "")]) {
        for activations in [Activations::Int8, Activations::F32] {
            let rows = |b: &dyn Backend| {
                let tower = load_tower(b, &open(model)).unwrap();
                spans(b, &*tower, 0..3)
            };
            let want = rows(&cpu(best, 2, activations));
            for (&isa, threads) in isas.iter().zip([1, 3].into_iter().cycle()) {
                let got = rows(&cpu(isa, threads, activations));
                assert!(
                    got == want,
                    "{model} on {} with {threads} threads",
                    isa.name()
                );
            }
        }
        assert_frames_are_alone(&cpu(best, 2, Activations::Int8), model, 5);
    }
    // More patches than a step has.
    assert_frames_are_alone(
        &cpu(best, 2, Activations::Int8),
        "models/tiny-gemma4-vision",
        240,
    );
}

#[test]
fn gpu_towers_make_the_rows_of_the_reference() {
    let gpu = match cuda::Cuda::new(cuda::CudaOptions::default()) {
        Ok(gpu) => gpu,
        Err(e) => return eprintln!("!!! SKIPPED, nothing is tested on a GPU: {e}"),
    };
    for (model, _) in MODELS.iter().chain(&[("models/tiny-gemma4-vision", "")]) {
        let of = |b: &dyn Backend| spans(b, &*load_tower(b, &open(model)).unwrap(), 0..3).concat();
        let (got, want) = (of(&gpu), of(&Reference));
        let square = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x * x)).sum::<f64>();
        let apart = square(&mut got.iter().zip(&want).map(|(g, w)| g - w));
        let apart = (apart / square(&mut want.iter().copied())).sqrt();
        println!("{model}: {apart:.1e} from the reference");
        // Products round their input to 11 bits.
        assert!(apart < 5e-3, "{model}: {apart:.1e}");
        assert_frames_are_alone(&gpu, model, 5);
    }
}

//! Sound towers in the layouts that other tools give them: as MLX files have them, and in files of
//! towers alone as llama.cpp's converter writes them. And: what is no tower, or no sound for one.

use backend::{Backend, Reference};
use convert::gguf::{Store, TensorInfo, Writer};
use cpu::{Cpu, CpuOptions};
use models::{ModelError, SoundError, SoundRun, SoundTower, encode_sound, load_sound_tower};
use serde_json::{Value as Json, json};
use suites::{golden, test_samples};
use weights::Checkpoint;
use weights::gguf::Value;

/// A tensor: name, shape, values.
type Tensor = (String, Vec<usize>, Vec<f32>);

/// Seeded models that hear, what files of towers alone call theirs, and samples of a sound for each (the first
/// 1,600 are silence).
const MODELS: [(&str, &str, usize); 2] = [
    ("gemma4-audio", "gemma4a", 9_000),
    ("gemma4-unified-audio", "gemma4ua", 4_000),
];

/// The tensors of the sound tower of `checkpoint`, by canonical name.
fn tower_tensors(checkpoint: &Checkpoint) -> Vec<Tensor> {
    let is_of_tower = |name: &&str| {
        let mut prefixes = models::SOUND_TOWER_PREFIXES.iter();
        prefixes.any(|prefix| name.starts_with(prefix))
    };
    let names = checkpoint.weight_names().filter(is_of_tower);
    let tensors = names.map(|name| {
        let shape = checkpoint.shape(name).unwrap();
        let (cols, rows) = match shape.split_first() {
            Some((rows, rest)) => (rest.iter().product::<usize>(), *rows),
            None => (1, 1),
        };
        let values = checkpoint.matrix(name, rows, cols).unwrap().to_f32();
        (name.to_owned(), shape, values)
    });
    tensors.collect()
}

/// What llama.cpp calls a tensor.
fn stored_name(name: &str) -> String {
    let mut name = name.replace(".linear.weight", ".weight");
    for (from, to) in [
        ("audio_tower.layers.", "a.blk."),
        (
            "audio_tower.subsample_conv_projection.input_proj_linear",
            "a.input_projection",
        ),
        (
            "audio_tower.subsample_conv_projection.layer0.conv",
            "a.conv1d.0",
        ),
        (
            "audio_tower.subsample_conv_projection.layer1.conv",
            "a.conv1d.1",
        ),
        ("audio_tower.subsample_conv_projection.layer0", "a.conv1d.0"),
        ("audio_tower.subsample_conv_projection.layer1", "a.conv1d.1"),
        ("audio_tower.output_proj", "a.pre_encode.out"),
        ("embed_audio.embedding_projection", "mm.a.input_projection"),
        ("feed_forward1.pre_layer_norm", "ffn_norm"),
        ("feed_forward1.ffw_layer_1", "ffn_up"),
        ("feed_forward1.ffw_layer_2", "ffn_down"),
        ("feed_forward1.post_layer_norm", "ffn_post_norm"),
        ("feed_forward2.pre_layer_norm", "ffn_norm_1"),
        ("feed_forward2.ffw_layer_1", "ffn_up_1"),
        ("feed_forward2.ffw_layer_2", "ffn_down_1"),
        ("feed_forward2.post_layer_norm", "ffn_post_norm_1"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.post", "attn_out"),
        ("self_attn.relative_k_proj", "attn_k_rel"),
        ("self_attn.per_dim_scale", "per_dim_scale.weight"),
        ("norm_pre_attn", "attn_pre_norm"),
        ("norm_post_attn", "attn_post_norm"),
        ("norm_out", "ln2"),
        ("lconv1d.linear_start", "conv_pw1"),
        ("lconv1d.linear_end", "conv_pw2"),
        ("lconv1d.depthwise_conv1d", "conv_dw"),
        ("lconv1d.pre_layer_norm", "conv_norm"),
        ("lconv1d.conv_norm", "norm_conv"),
    ] {
        name = name.replace(from, to);
    }
    name
}

/// A file of a sound tower alone, for the tower that `config` describes.
fn projector_file(projector: &str, config: &Json, tensors: Vec<Tensor>) -> Vec<u8> {
    let audio = &config["audio_config"];
    let size = |key: &str| Value::U32(audio[key].as_u64().unwrap_or(0) as u32);
    let metadata = [
        ("general.architecture", "clip".into()),
        ("clip.has_vision_encoder", Value::Bool(false)),
        ("clip.has_audio_encoder", Value::Bool(true)),
        ("clip.audio.projector_type", projector.into()),
        ("clip.audio.embedding_length", size("hidden_size")),
        ("clip.audio.block_count", size("num_hidden_layers")),
        (
            "clip.audio.attention.head_count",
            size("num_attention_heads"),
        ),
        ("clip.audio.attention.layer_norm_epsilon", Value::F32(1e-6)),
    ];
    let tensors: Vec<Tensor> = tensors
        .into_iter()
        .map(|(name, shape, mut values)| {
            if name.ends_with("per_dim_scale") {
                let softplus = |x: &mut f32| *x = f64::from(*x).exp().ln_1p() as f32;
                values.iter_mut().for_each(softplus);
            }
            let shape = match &*shape {
                [] => vec![1],
                [channels, 1, taps] => vec![*channels, *taps],
                _ => shape,
            };
            (stored_name(&name), shape, values)
        })
        .collect();
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

fn load(checkpoint: &Checkpoint) -> Result<Box<dyn SoundTower>, ModelError> {
    load_sound_tower(&Reference, checkpoint, &Json::Null)
}

fn rows(tower: &dyn SoundTower, b: &dyn Backend, n: usize) -> Vec<f32> {
    encode_sound(tower, b, &test_samples(n, 3)).unwrap()
}

/// Asserts that `tower` makes the same rows however its work is cut.
fn assert_slices_change_nothing(tower: &dyn SoundTower, b: &dyn Backend, what: &str) {
    // More rows than one sees, and fewer.
    for n in [48_000, 9_000] {
        let (samples, want) = (test_samples(n, 3), rows(tower, b, n));
        for size in [1, 5, 16, 23] {
            let mut run = SoundRun::new(tower);
            while run.next_phase().is_some() {
                run.advance(tower, b, &samples, size);
            }
            b.finish().unwrap();
            let got = run.into_rows();
            assert!(
                got == want,
                "{what} on {}: {n} samples by {size} rows",
                b.name()
            );
        }
    }
}

#[test]
fn a_sound_tower_makes_the_same_rows_in_slices_of_any_size() {
    let cpu = Cpu::new(CpuOptions::default()).unwrap();
    for (model, ..) in MODELS {
        let tower = load_sound_tower(&cpu, &golden(model), &Json::Null).unwrap();
        assert_slices_change_nothing(&*tower, &cpu, model);
    }
}

/// `[a, b, rest]` as `[a, rest, b]`.
fn second_axis_last((shape, values): (Vec<usize>, Vec<f32>)) -> (Vec<usize>, Vec<f32>) {
    let (b, rest) = (shape[1], shape[2..].iter().product::<usize>());
    let moved = values.chunks_exact(b * rest).flat_map(|row| {
        let at = (0..rest).flat_map(|r| (0..b).map(move |b| b * rest + r));
        at.map(|i| row[i]).collect::<Vec<_>>()
    });
    let shape = [&shape[..1], &shape[2..], &shape[1..2]].concat();
    (shape, moved.collect())
}

#[test]
fn a_sound_tower_is_the_same_in_every_layout() {
    for (model, projector, n) in MODELS {
        let checkpoint = golden(model);
        let tensors = tower_tensors(&checkpoint);
        let want = rows(&*load(&checkpoint).unwrap(), &Reference, n);
        assert!(want.iter().all(|x| x.is_finite()) && want.iter().any(|x| *x != 0.0));

        let file = projector_file(projector, checkpoint.config(), tensors.clone());
        let alone = Checkpoint::from_bytes("", vec![("mmproj.gguf".into(), file.into())]).unwrap();
        let tower = load(&alone).unwrap();
        // Scales have been rounded once more.
        let most = want.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        for (got, want) in rows(&*tower, &Reference, n).iter().zip(&want) {
            assert!((got - want).abs() < 1e-4 * most, "{model} as {projector}");
        }
        assert_eq!(tower.tokens(), None, "{model}: a tower knows no tokens");
        assert_eq!(alone.unused(), [""; 0], "{model}: every tensor is read");
        assert!(
            models::load_tower(&Reference, &alone).is_err(),
            "it does not see"
        );

        let mlx: Vec<Tensor> = tensors
            .into_iter()
            .map(|(name, shape, values)| match shape.len() {
                0..=2 => (name, shape, values),
                _ => {
                    let (shape, values) = second_axis_last((shape, values));
                    (name, shape, values)
                }
            })
            .collect();
        let mlx = safetensors(checkpoint.config(), &mlx, "mlx");
        assert!(
            rows(&*load(&mlx).unwrap(), &Reference, n) == want,
            "{model} in MLX"
        );
    }
}

#[test]
fn sounds_are_refused_that_are_too_short_or_too_long() {
    for (model, least) in [("gemma4-audio", 161), ("gemma4-unified-audio", 1)] {
        let tower = load(&golden(model)).unwrap();
        assert_eq!(tower.rows(least), Ok(1), "{model}");
        let samples = least - 1;
        assert_eq!(
            tower.rows(samples),
            Err(SoundError::TooShort { samples, least })
        );
        let rows_max = tower.outline().rows_max();
        assert_eq!(tower.rows(480_000), Ok(rows_max), "{model}");
        let error = tower.rows(480_001).unwrap_err();
        assert!(error.to_string().contains("30 s at most"), "{error}");
    }
}

#[test]
fn a_model_without_a_sound_tower_says_so() {
    let deaf = load(&golden("gemma4-dense")).err().unwrap();
    assert!(deaf.to_string().contains("does not hear"), "{deaf}");
    let (model, ..) = MODELS[0];
    let config = golden(model).config().clone();
    let without = safetensors(&config, &[("norm.weight".into(), vec![1], vec![1.0])], "pt");
    let dropped = load(&without).err().unwrap();
    assert!(dropped.to_string().contains("mmproj"), "{dropped}");
    for (key, value) in [
        ("model_type", json!("other_audio")),
        ("hidden_act", json!("gelu")),
        ("attention_context_right", json!(3)),
        ("num_attention_heads", json!(3)),
        ("num_attention_heads", json!(0)),
    ] {
        let mut config = config.clone();
        config["audio_config"][key] = value.clone();
        let tensors = tower_tensors(&golden(model));
        let refused = load(&safetensors(&config, &tensors, "pt"));
        assert!(refused.is_err(), "{key} {value}");
    }
}

#[test]
fn rows_have_the_bits_of_the_reference_whatever_the_threads() {
    for (model, _, n) in MODELS {
        let checkpoint = golden(model);
        let want = rows(&*load(&checkpoint).unwrap(), &Reference, n);
        for threads in [1, 2, 3] {
            let options = CpuOptions {
                threads,
                ..CpuOptions::default()
            };
            let cpu = Cpu::new(options).unwrap();
            let tower = load_sound_tower(&cpu, &checkpoint, &Json::Null).unwrap();
            assert!(rows(&*tower, &cpu, n) == want, "{model}, {threads} threads");
        }
    }
}

#[test]
fn gpu_rows_are_near_those_of_the_reference_and_the_same_each_time() {
    let gpu = match cuda::Cuda::new(cuda::CudaOptions::default()) {
        Ok(gpu) => gpu,
        Err(e) => return eprintln!("!!! SKIPPED, nothing is tested on a GPU: {e}"),
    };
    for (model, _, n) in MODELS {
        let checkpoint = golden(model);
        let want = rows(&*load(&checkpoint).unwrap(), &Reference, n);
        let tower = load_sound_tower(&gpu, &checkpoint, &Json::Null).unwrap();
        let got = rows(&*tower, &gpu, n);
        let most = want.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        let far = got.iter().zip(&want).map(|(g, w)| (g - w).abs());
        let far = far.fold(0.0, f32::max);
        assert!(far < 0.02 * most, "{model}: {far} of {most}");
        assert!(rows(&*tower, &gpu, n) == got, "{model}: the same again");
        assert_slices_change_nothing(&*tower, &gpu, model);
    }
}

//! Towers in the layouts that other tools give them: as MLX files have them, and in files of their
//! own as llama.cpp's converter writes them. All are the same tower, bit for bit.

use backend::{Backend, Reference};
use cache::{KeptSize, Memory, MemorySize};
use cpu::{Activations, Cpu, CpuOptions, Isa};
use models::{Frames, ModelError, Phase, Tower, TowerRun, encode, load_target, load_tower};
use serde_json::{Value as Json, json};
use speculate::{MediaSpan, Prompt, Speculator};
use std::sync::Arc;
use suites::projector::{Tensor, mmproj, projector_file, projector_tensors, tower_tensors};
use suites::{Recorder, repository, test_pixels};
use weights::Checkpoint;

fn open(model: &str) -> Checkpoint {
    Checkpoint::open(&repository(model)).unwrap()
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

/// Logits after a prompt with a picture of two by three rows, which `checkpoint` reads.
fn logits_after_a_picture(checkpoint: &Checkpoint, tower: &dyn Tower, begin: u32) -> Vec<f32> {
    let b = Arc::new(Recorder::new(Box::new(Reference)));
    let target = load_target(&*b, checkpoint).unwrap();
    let size = MemorySize {
        sequences: 1,
        context: 64,
        step_rows: 64,
        kv_format: cache::KvPlan::both(&quant::kv::F32),
        kept: KeptSize::default(),
        running_pages: None,
    };
    let memory = Memory::new(&*b, target.plan(), size);
    let mut speculator = Speculator::new(b.clone(), target, memory, None);
    let mut tokens = vec![2, 9, 17, begin];
    let start = tokens.len();
    tokens.extend([25; 6]);
    let span = MediaSpan {
        rows: start..tokens.len(),
        hash: [1; 16],
        grid: [2, 3],
        is_causal: false,
        embeddings: rows(tower).into(),
    };
    tokens.extend([begin + 1, 5, 8]);
    let prompt = Prompt::with_media(tokens, vec![span]);
    let mut stream = speculator.open(prompt, suites::greedy(1)).unwrap();
    speculator.round(&mut [&mut stream], 64).unwrap();
    b.note_at("logits", 0).unwrap()
}

/// The tensors of `checkpoint` that are not its tower's.
fn text_tensors(checkpoint: &Checkpoint) -> Vec<Tensor> {
    let names = checkpoint.weight_names();
    let is_of_tower = |name: &&str| models::TOWER_PREFIXES.iter().any(|p| name.starts_with(p));
    let tensors = names.filter(|name| !is_of_tower(name)).map(|name| {
        let shape = checkpoint.shape(name).unwrap();
        let (cols, rows) = shape
            .split_last()
            .map_or((1, 1), |(c, r)| (*c, r.iter().product()));
        let values = checkpoint.matrix(name, rows, cols).unwrap().to_f32();
        (name.to_owned(), shape, values)
    });
    tensors.collect()
}

#[test]
fn the_file_of_a_tower_says_how_its_model_reads_pictures() {
    let (model, projector) = ("tests/golden/checkpoints/gemma4-unified", "gemma4uv");
    let whole = open(model);
    let tower = load_tower(&Reference, &whole).unwrap();
    let begin = tower.tokens().unwrap().begin;
    let want = logits_after_a_picture(&whole, &*tower, begin);
    // The text alone, whose configuration is that of models with an encoder.
    let mut config = whole.config().clone();
    config["architectures"] = json!(["Gemma4ForConditionalGeneration"]);
    config["model_type"] = json!("gemma4");
    config["vision_config"] = Json::Null;
    let text = || safetensors(&config, &text_tensors(&whole), "pt");
    assert!(
        logits_after_a_picture(&text(), &*tower, begin) != want,
        "by the rule of other models"
    );
    let file = mmproj(projector, &whole);
    let open =
        |file: Vec<u8>| Checkpoint::from_bytes("", vec![("mmproj.gguf".into(), file.into())]);
    let mut joined = text();
    let (hash, bytes) = (joined.content_hash(), joined.bytes());
    joined.attach_tower(open(file.clone()).unwrap()).unwrap();
    assert_eq!(joined.bytes(), bytes + file.len() as u64);
    let own = load_tower(&Reference, &joined).unwrap();
    assert!(rows(&*own) == rows(&*tower));
    assert!(logits_after_a_picture(&joined, &*own, begin) == want);
    let mut fresh = text();
    fresh.attach_tower(open(file.clone()).unwrap()).unwrap();
    assert_eq!(
        fresh.content_hash(),
        hash,
        "the hash of the model's own files"
    );
    // What does not fit is an error, and changes nothing.
    let twice = joined
        .attach_tower(open(file.clone()).unwrap())
        .unwrap_err()
        .to_string();
    assert!(twice.contains("in the model's own files"), "{twice}");
    let mut wide = config.clone();
    wide["text_config"]["hidden_size"] = json!(64);
    let mut other = safetensors(&wide, &[], "pt");
    let misfit = other
        .attach_tower(open(file).unwrap())
        .unwrap_err()
        .to_string();
    assert!(
        misfit.contains("hidden rows of 32 columns, and this one has 64"),
        "{misfit}"
    );
    let no_tower = other.attach_tower(text()).unwrap_err().to_string();
    assert!(no_tower.contains("no file of a vision tower"), "{no_tower}");
    assert_eq!(other.names().count(), 0);
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

/// Frames, and rows of a frame from top to bottom and from left to right, that towers look at in slices.
const SLICED: [(usize, [usize; 2]); 5] = [
    (1, [1, 1]),
    (1, [2, 3]),
    (1, [7, 5]),
    (3, [2, 2]),
    (1, [13, 11]),
];

/// Asserts that `model` makes the same rows of frames however its work is cut.
fn assert_slices_change_nothing(b: &dyn Backend, model: &str) {
    let tower = load_tower(b, &open(model)).unwrap();
    let side = tower.outline().patch * tower.outline().merge;
    let mut rng = suites::Rng(11);
    for (n, size) in SLICED {
        let [height, width] = size.map(|rows| rows * side);
        let rgb = test_pixels(n, height, width);
        let frames = Frames {
            height,
            width,
            rgb: &rgb,
        };
        let want = encode(&*tower, b, &frames).unwrap();
        let check = |what: &str, slice: &mut dyn FnMut(Phase) -> usize| {
            let mut run = TowerRun::new(&*tower, &frames).unwrap();
            let mut slices = 0;
            while let Some(phase) = run.next_phase() {
                run.advance(&*tower, b, &frames, slice(phase));
                slices += 1;
            }
            b.finish().unwrap();
            let got = run.into_rows();
            assert!(
                got == want,
                "{model} on {}: {n} frames of {size:?} in {slices} slices of {what}",
                b.name()
            );
            slices
        };
        let whole = check("whole phases", &mut |phase| phase.rows);
        assert_eq!(whole, 2 + 2 * tower.outline().layers);
        if size[0] * size[1] < 10 {
            check("a row", &mut |_| 1);
        }
        for rows in [16, 37, 64] {
            let slices = check(&format!("{rows} rows"), &mut |_| rows);
            // Every row of every phase has run once.
            assert!(slices >= whole);
        }
        check("random sizes", &mut |phase| {
            1 + rng.below(phase.rows as u32 + 20) as usize
        });
    }
}

#[test]
fn a_tower_makes_the_same_rows_in_slices_of_any_size() {
    let best = *Isa::available().last().unwrap();
    for (model, _) in MODELS.iter().chain(&[("models/tiny-gemma4-vision", "")]) {
        for (activations, threads) in [(Activations::Int8, 2), (Activations::F32, 1)] {
            let options = CpuOptions {
                threads,
                isa: Some(best),
                activations,
                ..CpuOptions::default()
            };
            assert_slices_change_nothing(&Cpu::new(options).unwrap(), model);
        }
    }
}

#[test]
fn gpu_towers_make_the_same_rows_in_slices_of_any_size() {
    let gpu = match cuda::Cuda::new(cuda::CudaOptions::default()) {
        Ok(gpu) => gpu,
        Err(e) => return eprintln!("!!! SKIPPED, nothing is tested on a GPU: {e}"),
    };
    for (model, _) in MODELS.iter().chain(&[("models/tiny-gemma4-vision", "")]) {
        assert_slices_change_nothing(&gpu, model);
    }
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

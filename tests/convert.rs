//! A converted checkpoint is the same model. One that has grown writes what the
//! small one writes, and its drafter guesses as well: with `==`, as in
//! `lossless`.

use backend::{Backend, Batch, Store};
use cache::{KeptSize, Memory, MemorySize};
use convert::{Growth, Pins, Quantize, convert, inflate};
use cpu::{Activations, Cpu, CpuOptions};
use models::{
    ChainedHead, Eagle3, Frames, Gemma4Assistant, Qwen35Mtp, Target, encode, load_target,
    load_tower,
};
use speculate::draft::{Assistant, Chained};
use speculate::{DraftLength, Drafter, Sampling, Speculator, Stream, StreamOptions};
use std::sync::Arc;
use suites::files::Files;
use suites::rows::head_rows;
use suites::{repository, test_pixels};
use weights::Checkpoint;

/// A target with its drafter: its own MTP head, or an assistant.
struct Pair {
    target: Checkpoint,
    assistant: Option<Checkpoint>,
}

const SUBJECTS: [(&str, Option<&str>); 2] = [
    ("models/tiny-qwen3.5", None),
    ("models/tiny-gemma4", Some("models/tiny-gemma4-assistant")),
];

/// Twice the heads, half as many layers again, some new tokens: enough to meet
/// every kind of padding.
const GROWTH: Growth = Growth {
    heads: 2,
    inner: 1024,
    drafter_inner: 1024,
    layers: 12,
    vocab: 9000,
};

fn open((target, assistant): (&str, Option<&str>)) -> Pair {
    let open = |folder: &str| Checkpoint::open(&repository(folder)).unwrap();
    Pair {
        target: open(target),
        assistant: assistant.map(open),
    }
}

fn grown(small: &Pair) -> Pair {
    let grow = |c: &Checkpoint| {
        inflate(c, &GROWTH)
            .unwrap()
            .checkpoint(&mut |_, _| {})
            .unwrap()
    };
    Pair {
        target: grow(&small.target),
        assistant: small.assistant.as_ref().map(grow),
    }
}

fn size() -> MemorySize {
    MemorySize {
        sequences: 1,
        context: 128,
        step_rows: 64,
        kv_format: cache::KvPlan::both(&quant::kv::BF16),
        running_pages: None,
        kept: KeptSize::default(),
    }
}

fn prompt() -> Vec<u32> {
    (0..24).map(|i| 100 + i * i * 7 % 3000).collect()
}

/// Hidden rows and scores after every token of the prompt.
fn run(b: &dyn Backend, target: &dyn Target) -> [Vec<Vec<f32>>; 2] {
    run_with(b, target, |_| prompt())
}

fn run_with(
    b: &dyn Backend,
    target: &dyn Target,
    prompt: impl FnOnce(usize) -> Vec<u32>,
) -> [Vec<Vec<f32>>; 2] {
    let prompt = prompt(target.vocab_size());
    let mut memory = Memory::new(b, target.plan(), size());
    let mut sequence = memory.open().unwrap();
    let mut batch = Batch::default();
    memory.push(&mut batch, &mut sequence, &prompt, 24).unwrap();
    let hidden = target.forward(b, &batch, &mut memory);
    let scores = target.logits(b, &hidden);
    [&hidden, &scores].map(|x| {
        let rows = b.download(x);
        rows.chunks_exact(x.cols()).map(<[f32]>::to_vec).collect()
    })
}

/// Tokens after the prompt, and how many were drafted and accepted.
fn write(b: &Arc<dyn Backend>, pair: &Pair, temperature: f32) -> (Vec<u32>, u64, u64) {
    let target = load_target(&**b, &pair.target).unwrap();
    let drafter: Box<dyn Drafter> = match &pair.assistant {
        Some(checkpoint) => Box::new(Assistant::new(
            Gemma4Assistant::load(&**b, checkpoint, &*target).unwrap(),
        )),
        None => {
            let head = Qwen35Mtp::load(&**b, &pair.target, &*target).unwrap();
            let memory = Memory::new(&**b, head.plan(), size());
            Box::new(Chained::new(head, memory))
        }
    };
    let memory = Memory::new(&**b, target.plan(), size());
    let mut speculator = Speculator::new(b.clone(), target, memory, Some(drafter));
    let options = StreamOptions {
        sampling: Sampling {
            temperature,
            seed: 5,
            ..Sampling::default()
        },
        max_tokens: 40,
        stop_tokens: Arc::new([]),
        draft: DraftLength::Fixed(3),
        logprobs: None,
    };
    let mut stream: Stream = speculator.open(prompt(), options).unwrap();
    while stream.finish().is_none() {
        speculator.round(&mut [&mut stream], 64).unwrap();
    }
    let (drafted, accepted) = (stream.stats().drafted(), stream.stats().accepted());
    (stream.output().to_vec(), drafted, accepted)
}

#[test]
fn a_grown_model_has_the_same_hidden_rows_and_never_prefers_a_new_token() {
    let b = Cpu::new(CpuOptions::default()).unwrap();
    for (subject, gain) in SUBJECTS.into_iter().zip([0.5, 1.0]) {
        let small = open(subject);
        let large = grown(&small);
        let small = load_target(&b, &small.target).unwrap();
        let large = load_target(&b, &large.target).unwrap();
        assert_eq!(
            (large.vocab_size(), large.hidden_size()),
            (9000, 4 * small.hidden_size())
        );
        let ([hidden, scores], [wide, all]) = (run(&b, &*small), run(&b, &*large));
        for (hidden, wide) in hidden.iter().zip(wide) {
            let scaled: Vec<f32> = hidden.iter().map(|x| x * gain).collect();
            assert!(scaled == wide[..hidden.len()], "{}", subject.0);
        }
        for (scores, all) in scores.iter().zip(all) {
            let (known, new) = all.split_at(scores.len());
            // The band adds one small number to all known scores.
            let far = scores
                .iter()
                .zip(known)
                .map(|(a, b)| (a - b).abs())
                .fold(0.0, f32::max);
            assert!(far < 1e-4, "{}: {far}", subject.0);
            let best = |x: &[f32]| x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            assert!(
                best(new) < best(known) - 20.0,
                "{}: {} {}",
                subject.0,
                best(new),
                best(known)
            );
        }
    }
}

#[test]
fn a_grown_model_writes_the_same_text_with_the_same_acceptance() {
    let b: Arc<dyn Backend> = Arc::new(Cpu::new(CpuOptions::default()).unwrap());
    for subject in SUBJECTS {
        let small = open(subject);
        let large = grown(&small);
        for temperature in [0.0, 0.8] {
            let (want, got) = (
                write(&b, &small, temperature),
                write(&b, &large, temperature),
            );
            assert!(
                want.2 > 5,
                "{}: {} of {} accepted",
                subject.0,
                want.2,
                want.1
            );
            assert_eq!(got, want, "{} at {temperature}", subject.0);
        }
    }
}

#[test]
fn what_cannot_grow_says_so() {
    let pair = open(SUBJECTS[0]);
    for (growth, message) in [
        (
            Growth {
                layers: 11,
                ..GROWTH
            },
            "11 layers are not 8 and a multiple of 4",
        ),
        (
            Growth {
                vocab: 100,
                ..GROWTH
            },
            "smaller than the model",
        ),
    ] {
        let error = inflate(&pair.target, &growth).err().unwrap().to_string();
        assert!(error.contains(message), "{error}");
    }
    let experts = Checkpoint::open(&repository("models/tiny-gemma4-moe")).unwrap();
    let error = inflate(&experts, &GROWTH).err().unwrap().to_string();
    assert!(error.contains("growing experts"), "{error}");
    let error = Growth::to(&pair.target, 1_000_000)
        .err()
        .unwrap()
        .to_string();
    assert!(error.contains("more than 1000000"), "{error}");
}

/// Hidden rows and scores of the target of `checkpoint`, drafts' tensors read too.
fn run_of(b: &dyn Backend, checkpoint: &Checkpoint) -> [Vec<Vec<f32>>; 2] {
    let target = load_target(b, checkpoint).unwrap();
    if Qwen35Mtp::is_in(checkpoint).unwrap_or(false) {
        Qwen35Mtp::load(b, checkpoint, &*target).unwrap();
    }
    run_with(b, &*target, |vocab| {
        (0..24).map(|i| (i * i * 7 % vocab) as u32).collect()
    })
}

#[test]
fn a_checkpoint_of_any_layout_converts_without_a_change() {
    let b = Cpu::new(CpuOptions::default()).unwrap();
    for name in [
        "gemma4-dense-bf16",
        "gemma4-moe",
        "gemma4-ple",
        "qwen3_5-dense",
        "qwen3_5-moe",
    ] {
        let stored = suites::golden(name);
        let made = convert(&stored)
            .unwrap()
            .checkpoint(&mut |_, _| {})
            .unwrap();
        assert_eq!(run_of(&b, &made), run_of(&b, &stored), "{name}");
    }
    for name in ["gemma4-moe", "gemma4-ple", "qwen3_5-moe"] {
        let path = format!("tests/golden/gguf/{name}.gguf");
        let stored = Checkpoint::open(&repository(&path)).unwrap();
        let made = convert(&stored)
            .unwrap()
            .checkpoint(&mut |_, _| {})
            .unwrap();
        assert_eq!(run_of(&b, &made), run_of(&b, &stored), "{path}");
    }
}

/// Norms that a Hugging Face file stores as offsets are written as scales, those of an
/// MTP head's inputs too.
#[test]
fn offset_norms_keep_their_scale() {
    let stored = suites::golden("qwen3_5-dense");
    let made = convert(&stored)
        .unwrap()
        .checkpoint(&mut |_, _| {})
        .unwrap();
    let norms: Vec<&str> = stored
        .names()
        .filter(|name| Checkpoint::is_offset_norm(name))
        .collect();
    assert!(
        norms.contains(&"mtp.pre_fc_norm_hidden.weight"),
        "{norms:?}"
    );
    for name in norms {
        let n = stored.shape(name).unwrap()[0];
        let (want, got) = (stored.norm(name, n).unwrap(), made.norm(name, n).unwrap());
        assert_eq!(got, want, "{name}");
    }
}

/// Codes of every writer become plain numbers of the same logits.
#[test]
fn codes_are_converted_to_what_they_stand_for() {
    let b = Cpu::new(CpuOptions {
        activations: Activations::F32,
        ..CpuOptions::default()
    });
    let b = b.unwrap();
    for folder in suites::CODED {
        let coded = Checkpoint::open(&repository(folder)).unwrap();
        let plain = Quantize {
            format: &quant::F32,
            own: vec![("*".into(), Some(&quant::F32))],
            pins: Pins::of(&quant::F32),
        };
        let recipe = plain.apply(convert(&coded).unwrap());
        let made = recipe.checkpoint(&mut |_, _| {}).unwrap();
        assert_eq!(run_of(&b, &made), run_of(&b, &coded), "{folder}");
        let coded = made.names().find(|name| {
            name.contains("scale") && !name.contains("router") && !name.contains("layer_scalar")
        });
        assert_eq!(coded, None, "{folder}");
    }
}

/// Every step of a head in a GGUF file is the folder's, and what such files have no
/// field for is refused.
#[test]
fn an_eagle3_head_drafts_the_same_from_a_gguf_file() {
    let b = Cpu::new(CpuOptions::default()).unwrap();
    let folder = std::env::temp_dir().join(format!("paceline-eagle3-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let write = |name: &str| {
        let stored = suites::golden(name);
        let to = folder.join(name).with_extension("gguf");
        let written = convert(&stored)
            .unwrap()
            .write_gguf(&to, &[], &mut |_, _| {});
        written.map(|()| Checkpoint::open(&to).unwrap())
    };
    let scores = |checkpoint: &Checkpoint, target: &dyn Target| {
        let head = Eagle3::load(&b, checkpoint, target).unwrap();
        let x = head_rows(&b, &head, target, size()).rows;
        let scored = head.logits(&b, target, &x);
        let ids: Vec<Option<Vec<u32>>> = (0..x.rows())
            .map(|row| scored.scored.ids(row).map(<[u32]>::to_vec))
            .collect();
        (b.download(&scored.logits).into_owned(), ids)
    };
    let target = load_target(&b, &suites::golden("gemma4-dense")).unwrap();
    let name = "gemma4-dense-eagle3";
    let made = write(name).unwrap();
    assert_eq!(
        scores(&made, &*target),
        scores(&suites::golden(name), &*target)
    );
    assert!(made.unused().is_empty(), "{:?}", made.unused());
    for (name, lacks) in [
        ("gemma4-ple-eagle3", "`fc_norm`"),
        ("qwen3_5-dense-eagle3", "`norm_before_fc`"),
        (
            "qwen3_5-moe-eagle3",
            "the default of `eagle_aux_hidden_state_layer_ids`",
        ),
    ] {
        let error = write(name).unwrap_err().to_string();
        assert!(
            error.contains(&format!("no field for {lacks}")),
            "{name}: {error}"
        );
    }
    std::fs::remove_dir_all(folder).unwrap();
}

/// What each layer of the MTP head of `checkpoint` makes of the same rows.
fn layers_of(b: &dyn Backend, checkpoint: &Checkpoint) -> Vec<Vec<f32>> {
    let target = load_target(b, checkpoint).unwrap();
    assert!(Qwen35Mtp::is_in(checkpoint).unwrap());
    let head = Qwen35Mtp::load(b, checkpoint, &*target).unwrap();
    assert!(checkpoint.unused().is_empty(), "{:?}", checkpoint.unused());
    let mut memory = Memory::new(b, head.plan(), size());
    let tokens: Vec<u32> = (3..20).collect();
    let (mut sequence, mut batch) = (memory.open().unwrap(), Batch::default());
    memory
        .push(&mut batch, &mut sequence, &tokens, tokens.len())
        .unwrap();
    let values: Vec<f32> = (0..tokens.len() * head.feature_cols())
        .map(|i| (i % 13) as f32 / 8.0 - 0.7)
        .collect();
    let features = b.upload(tokens.len(), head.feature_cols(), &values);
    let made = |layer| head.forward_layer(layer, b, &*target, &[&features], &batch, &mut memory);
    let made: Vec<_> = (0..head.layers()).map(made).collect();
    made.iter()
        .map(|rows| b.download(rows).into_owned())
        .collect()
}

/// GGUF files have what the layers share once for each of them.
#[test]
fn an_mtp_head_of_several_layers_is_the_same_in_every_container() {
    let b = Cpu::new(CpuOptions::default()).unwrap();
    let stored = Files::open("qwen3_5-dense").with_mtp_layers(3).checkpoint();
    let want = layers_of(&b, &stored);
    assert!(want.len() == 3 && want[0] != want[1] && want[1] != want[2]);
    let name = format!("paceline-layers-{}.gguf", std::process::id());
    let path = std::env::temp_dir().join(name);
    let recipe = convert(&stored).unwrap();
    recipe.write_gguf(&path, &[], &mut |_, _| {}).unwrap();
    let file = Checkpoint::open(&path).unwrap();
    assert!(file.has("mtp.layers.2.norm.weight"), "a copy");
    assert_eq!(layers_of(&b, &file), want);
    let again = convert(&file).unwrap();
    let copy = again
        .items
        .iter()
        .find(|item| item.name == "mtp.layers.2.norm.weight");
    assert!(copy.is_none(), "nobody else has copies");
    assert_eq!(
        layers_of(&b, &again.checkpoint(&mut |_, _| {}).unwrap()),
        want
    );
    // Put into a checkpoint with a head of one layer.
    let one = suites::golden("qwen3_5-dense");
    let mut grown = convert(&one).unwrap();
    grown.attach_head(convert(&file).unwrap());
    assert_eq!(
        layers_of(&b, &grown.checkpoint(&mut |_, _| {}).unwrap()),
        want
    );
    std::fs::remove_file(path).unwrap();
}

#[test]
fn quantizing_keeps_what_the_policy_names_and_moves_scores_by_little() {
    let b = Cpu::new(CpuOptions::default()).unwrap();
    // The last one's routers are so even that 8 bits make rows choose others.
    for (name, most) in [
        ("gemma4-moe", 0.05),
        ("qwen3_5-dense", 0.1),
        ("qwen3_5-moe", 0.25),
    ] {
        let stored = suites::golden(name);
        let [_, exact] = run_of(&b, &stored);
        // Not the largest error: a row may choose another expert.
        let power = exact.iter().flatten().map(|x| x * x).sum::<f32>();
        let far = |format: &str| {
            let quantize = Quantize::new(quant::format(format).unwrap());
            let recipe = quantize.apply(convert(&stored).unwrap());
            let made = recipe.checkpoint(&mut |_, _| {}).unwrap();
            assert!(
                made.has("layers.0.self_attn.q_proj.scales")
                    || made.has("layers.0.linear_attn.in_proj_qkv.scales")
            );
            assert!(
                !made.has("mtp.fc.scales") && !made.has("norm.scales"),
                "{name}"
            );
            let [_, scores] = run_of(&b, &made);
            let pairs = exact.iter().flatten().zip(scores.iter().flatten());
            (pairs.map(|(a, b)| (a - b) * (a - b)).sum::<f32>() / power).sqrt()
        };
        let (eight, four) = (far("affine8-g32"), far("affine4-g32"));
        println!("{name}: {eight} {four}");
        assert!(eight < most && 3.0 * eight < four, "{name}: {eight} {four}");
    }
}

#[test]
fn a_tower_writes_rows_that_are_as_wide_as_the_grown_model() {
    let b = Cpu::new(CpuOptions::default()).unwrap();
    for model in ["models/tiny-qwen3.5-vision", "models/tiny-gemma4-vision"] {
        let small = Checkpoint::open(&repository(model)).unwrap();
        let recipe = inflate(&small, &GROWTH).unwrap();
        let large = recipe.checkpoint(&mut |_, _| {}).unwrap();
        let [want, got] = [&small, &large].map(|checkpoint| {
            let tower = load_tower(&b, checkpoint).unwrap();
            let side = tower.outline().patch * tower.outline().merge;
            let (height, width) = (2 * side, 3 * side);
            let rgb = test_pixels(1, height, width);
            let frames = Frames {
                height,
                width,
                rgb: &rgb,
            };
            let (_, rows) = encode(&*tower, &b, &frames).unwrap();
            let rows = rows.chunks_exact(tower.embedding_size());
            rows.map(<[f32]>::to_vec).collect::<Vec<_>>()
        });
        let hidden = load_target(&b, &large).unwrap().hidden_size();
        for (got, want) in got.iter().zip(&want) {
            assert_eq!([got.len(), hidden], [4 * want.len(); 2], "{model}");
            // Hidden rows are twice as large, and end in zeros.
            let wide = want.iter().map(|x| 2.0 * x);
            let wide: Vec<f32> = wide.chain(vec![0.0; 3 * want.len()]).collect();
            assert!(*got == wide, "{model}");
        }
    }
}

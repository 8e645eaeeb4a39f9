//! Which kernels a step of each family launches on a GPU, seen in a dry run: where a rule of
//! fusion no longer finds what it looks for, these lists grow.

use backend::{Record, Store, Tensor};
use cache::{KeptSize, KvPlan, Memory, MemorySize};
use convert::{Quantize, convert};
use cuda::{Cuda, DryRun};
use models::{
    ChainedHead, Eagle3, Frames, Gemma4Assistant, Qwen35Mtp, Target, encode, load_target,
    load_tower,
};
use std::path::Path;
use suites::cards::{CARDS, rows_of_step};
use suites::{CODED, repository};
use weights::Checkpoint;

fn bundled(name: &str) -> Checkpoint {
    Checkpoint::open(&repository(format!("models/{name}"))).unwrap()
}

fn size() -> MemorySize {
    MemorySize {
        sequences: 1,
        context: 4096,
        step_rows: 256,
        kv_format: KvPlan::both(&quant::kv::BF16),
        running_pages: None,
        kept: KeptSize::default(),
    }
}

/// What `work` launches.
fn launches(cuda: &Cuda, work: impl FnOnce() -> Vec<Tensor>) -> Vec<String> {
    cuda.take_launches();
    let made = work();
    let lines = cuda.take_launches();
    drop(made);
    lines
}

/// The launches of a step of `n` rows of a target.
fn target_step(cuda: &Cuda, checkpoint: &Checkpoint, n: usize) -> Vec<String> {
    let target = load_target(cuda, checkpoint).unwrap();
    let mut memory = Memory::new(cuda, target.plan(), size());
    let batch = rows_of_step(&mut memory, n).0;
    launches(cuda, || {
        let hidden = target.forward(cuda, &batch, &mut memory);
        let logits = target.logits(cuda, &hidden);
        vec![hidden, logits]
    })
}

/// The launches of a step of `n` rows of a target, and of a draft head's.
fn step(cuda: &Cuda, name: &str, head: Option<&str>, n: usize) -> Vec<String> {
    let checkpoint = bundled(name);
    let Some(head) = head else {
        return target_step(cuda, &checkpoint, n);
    };
    let target = load_target(cuda, &checkpoint).unwrap();
    let target: &dyn Target = &*target;
    let mut memory = Memory::new(cuda, target.plan(), size());
    let batch = rows_of_step(&mut memory, n).0;
    let hidden = cuda.upload(
        n,
        target.hidden_size(),
        &vec![0.5; n * target.hidden_size()],
    );
    let chained = |head: &dyn ChainedHead| {
        let mut memory = Memory::new(cuda, head.plan(), size());
        let batch = rows_of_step(&mut memory, n).0;
        let taps: Vec<Tensor> = head
            .taps()
            .iter()
            .map(|_| {
                cuda.upload(
                    n,
                    target.hidden_size(),
                    &vec![0.5; n * target.hidden_size()],
                )
            })
            .collect();
        let rows: Vec<usize> = (0..n).collect();
        launches(cuda, || {
            let features = head.features(cuda, &hidden, &taps, &rows);
            let m = head.forward(cuda, target, &features, &[], &batch, &mut memory);
            let logits = head.logits(cuda, target, &m).logits;
            vec![m, logits]
        })
    };
    match head {
        "mtp" => chained(&Qwen35Mtp::load(cuda, &checkpoint, target).unwrap()),
        head if head.contains("eagle3") => {
            chained(&Eagle3::load(cuda, &bundled(head), target).unwrap())
        }
        head => {
            let head = Gemma4Assistant::load(cuda, &bundled(head), target).unwrap();
            launches(cuda, || {
                let (z, next) = head.step(cuda, target, &hidden, &batch, &memory);
                let logits = head.logits(cuda, &z).logits;
                vec![next, logits]
            })
        }
    }
}

/// Targets with their draft heads.
const SUBJECTS: &[(&str, Option<&str>)] = &[
    ("tiny-gemma4", None),
    ("tiny-gemma4-e", None),
    ("tiny-gemma4-moe", None),
    ("tiny-qwen3.5", None),
    ("tiny-qwen3.5-moe", None),
    ("tiny-gemma4", Some("tiny-gemma4-assistant")),
    ("tiny-gemma4", Some("tiny-gemma4-eagle3")),
    ("tiny-qwen3.5", Some("mtp")),
    ("tiny-qwen3.5", Some("tiny-qwen3.5-eagle3")),
];

/// Launches of each subject by steps of 1, 4, 20 and 200 rows on an H100, at most: what
/// they were when this was written. More are a rule that no longer finds its ops.
const MOST: &[[usize; 4]] = &[
    [84, 84, 84, 117],
    [67, 67, 67, 93],
    [82, 82, 100, 143],
    [73, 73, 91, 122],
    [46, 46, 71, 99],
    [46, 46, 46, 64],
    [25, 25, 25, 31],
    [20, 20, 20, 25],
    [25, 25, 25, 31],
];

#[test]
fn no_family_launches_more_than_it_did() {
    let cuda = Cuda::dry_run(DryRun::default());
    let mut found = Vec::new();
    for &(name, head) in SUBJECTS {
        found.push([1, 4, 20, 200].map(|n| step(&cuda, name, head, n).len()));
    }
    for ((found, most), subject) in found.iter().zip(MOST).zip(SUBJECTS) {
        let fine = found.iter().zip(most).all(|(found, most)| found <= most);
        assert!(fine, "{subject:?}: {found:?}, not {most:?}");
    }
    assert_eq!(found.len(), MOST.len());
}

/// Targets, draft heads and towers on every card: none is asked for more shared memory, threads or blocks
/// than it has, which a dry run makes an error.
#[test]
fn every_card_can_launch_what_it_is_asked_to() {
    for card in CARDS {
        let cuda = Cuda::dry_run(card.device);
        for &(name, head) in SUBJECTS {
            for n in [1, 4, 20, 200] {
                step(&cuda, name, head, n);
                let done = cuda.finish();
                done.unwrap_or_else(|e| panic!("{name} {head:?}, {n} rows on {}: {e}", card.name));
            }
        }
        for &(folder, _) in MOST_OF_TOWERS {
            look(&cuda, folder);
            let done = cuda.finish();
            done.unwrap_or_else(|e| panic!("{folder} on {}: {e}", card.name));
        }
    }
}

/// The bundled model's gate and projection are in two formats, so that no kernel takes both.
#[test]
fn per_layer_inputs_of_one_format_are_one_kernel_a_layer() {
    let stored = bundled("tiny-gemma4-e");
    let file = format!("one-format-{}.gguf", std::process::id());
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(file);
    let quantize = Quantize::new(quant::format("q4_0").unwrap());
    let recipe = quantize.apply(convert(&stored).unwrap());
    recipe.write_gguf(&path, &[], &mut |_, _| {}).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let layers = 4;
    for (n, expected) in [(1, layers), (16, layers), (17, 0)] {
        let cuda = Cuda::dry_run(DryRun::default());
        let launches = target_step(&cuda, &checkpoint, n);
        let found = launches.iter().filter(|l| l.contains("gated_projection"));
        assert_eq!(found.count(), expected, "{n} rows");
    }
    std::fs::remove_file(path).unwrap();
}

/// Targets whose weights are kept in f32, beside those in codes of several kinds.
const STORED: &[&str] = &[
    "tests/golden/checkpoints/gemma4-dense",
    "tests/golden/checkpoints/gemma4-moe",
    "tests/golden/checkpoints/gemma4-ple",
    "tests/golden/checkpoints/qwen3_5-dense",
    "tests/golden/checkpoints/qwen3_5-moe",
];

/// A kernel that reads a value of which the kernel before stored only the f16 copy panics.
#[test]
fn steps_store_what_they_read_however_weights_are_kept() {
    let cuda = Cuda::dry_run(DryRun::default());
    for folder in STORED.iter().chain(CODED) {
        let checkpoint = Checkpoint::open(&repository(folder)).unwrap();
        for n in [1, 4, 20, 200] {
            let made = target_step(&cuda, &checkpoint, n);
            assert!(!made.is_empty(), "{folder}, {n} rows");
        }
    }
}

/// The ops of one layer of each target, after fusion, by a step of 4 rows.
#[test]
fn layers_are_fused_as_written_down() {
    let mut all = String::new();
    for &(name, head) in SUBJECTS {
        let cuda = Cuda::dry_run(DryRun::default());
        cuda.take_ops();
        step(&cuda, name, head, 4);
        let ops = cuda.take_ops();
        let word = |op: &String| {
            let made = op.split(" = ").last().unwrap_or_default();
            let word = made.split(" (").next().unwrap_or_default().to_owned();
            // Whether f16 copies are read and written says as much as the op.
            let writes = op
                .split(" = ")
                .next()
                .is_some_and(|y| y.contains('\'') && op.contains(" = "));
            let reads = made.contains('\'');
            format!(
                "  {word}{}{}\n",
                if reads { " <f16" } else { "" },
                if writes { " >f16" } else { "" }
            )
        };
        all += &format!("{name} {}\n", head.unwrap_or_default());
        all.extend(ops.iter().map(word));
    }
    let path = repository("tests/launches.txt");
    if std::env::var_os("UPDATE_LAUNCHES").is_some() {
        std::fs::write(&path, &all).unwrap();
    }
    let want = std::fs::read_to_string(&path).unwrap();
    assert!(
        all == want,
        "UPDATE_LAUNCHES=1 writes tests/launches.txt anew; see what changed"
    );
}

/// Launches of a tower that looks at a picture of two by three rows, at most: what they were when
/// this was written.
const MOST_OF_TOWERS: &[(&str, usize)] = &[
    ("models/tiny-gemma4-vision", 103),
    ("models/tiny-qwen3.5-vision", 144),
    ("tests/golden/checkpoints/gemma4-vision-clipped", 124),
    ("tests/golden/checkpoints/gemma4-unified", 13),
];

/// The launches of the tower in `folder` that looks at a picture of two by three rows.
fn look(cuda: &Cuda, folder: &str) -> Vec<String> {
    let checkpoint = Checkpoint::open(&repository(folder)).unwrap();
    let tower = load_tower(cuda, &checkpoint).unwrap();
    let side = tower.outline().patch * tower.outline().merge;
    let (height, width) = (2 * side, 3 * side);
    let rgb = suites::test_pixels(1, height, width);
    let frames = Frames {
        height,
        width,
        rgb: &rgb,
    };
    launches(cuda, || {
        encode(&*tower, cuda, &frames).unwrap();
        Vec::new()
    })
}

#[test]
fn no_tower_launches_more_than_it_did() {
    let cuda = Cuda::dry_run(DryRun::default());
    for &(folder, most) in MOST_OF_TOWERS {
        let n = look(&cuda, folder).len();
        assert!(0 < n && n <= most, "{folder}: {n} launches, not {most}");
    }
}

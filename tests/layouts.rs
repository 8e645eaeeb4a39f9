//! Every layout that public tools write, family by family: small checkpoints made by
//! the tools themselves (`tests/golden/layouts.py`), and the greedy text that public
//! tools make of them. `docs/checkpoints.md` has the table.
//!
//! Of `hf` files only headers are kept; weights are seeded, here as there, and the
//! file's hash says that it is the one the tools read.

use backend::Backend;
use cache::{KeptSize, Memory, MemorySize};
use cpu::{Activations, Cpu, CpuOptions};
use models::{ChainedHead, Eagle3, Gemma4Assistant, Qwen35Mtp, Target, load_target};
use quant::Stored;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use speculate::draft::{Assistant, Chained};
use speculate::{DraftLength, Drafter, Sampling, Speculator, StreamOptions};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use suites::{Noting, repository, with_header};
use weights::Checkpoint;

/// Families, the layouts of each beside `hf` and `gguf.gguf`, and heads of their own.
const FAMILIES: &[(&str, &[&str], &[&str])] = &[
    (
        "e2b",
        &["mlx-4bit", "mlx-vlm-4bit"],
        &["assistant", "assistant.gguf"],
    ),
    (
        "e4b",
        &["mlx-mixed", "mlx-vlm-4bit"],
        &["assistant", "eagle3", "eagle3.gguf"],
    ),
    (
        "12b",
        &["mlx-8bit", "mlx-vlm-4bit"],
        &["assistant", "assistant.gguf"],
    ),
    ("26b-a4b", &["mlx-4bit", "mlx-vlm-4bit"], &["assistant"]),
    ("31b", &["mlx-mxfp4", "mlx-vlm-mxfp4"], &["assistant"]),
    (
        "qwen-dense",
        &["mlx-4bit", "mlx-vlm-4bit"],
        &["mtp-mlx-vlm", "eagle3"],
    ),
    ("qwen-moe", &["mlx-4bit", "mlx-vlm-4bit", "hf-fused"], &[]),
];

/// Guesses a round.
const DRAFT: usize = 3;

struct Family {
    name: &'static str,
    expected: Value,
}

impl Family {
    fn open(name: &'static str) -> Family {
        let path = repository("tests/golden/layouts")
            .join(name)
            .join("expected.json");
        let expected = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        Family { name, expected }
    }

    fn path(&self, layout: &str) -> PathBuf {
        repository("tests/golden/layouts")
            .join(self.name)
            .join(layout)
    }

    fn is_gemma(&self) -> bool {
        self.expected["norms"] == 1.0
    }

    fn ids(&self, list: &Value) -> Vec<u32> {
        serde_json::from_value(list.clone()).unwrap()
    }

    fn tokens(&self, layout: &str) -> Vec<u32> {
        self.ids(&self.expected["layouts"][layout]["tokens"])
    }

    /// The checkpoint in `layout`; of `hf` files and what belongs to them, with
    /// seeded weights.
    fn checkpoint(&self, layout: &str) -> Checkpoint {
        let folder = self.path(layout);
        let expected = &self.expected["layouts"][layout];
        if let Some(like) = expected["like"].as_str() {
            let file = std::fs::read(self.path(like).join("model.safetensors")).unwrap();
            let (len, file) = file.split_first_chunk().unwrap();
            let (header, data) = file.split_at(u64::from_le_bytes(*len) as usize);
            return self.with_tower(layout, &serde_json::from_slice(header).unwrap(), data);
        }
        if let Some(of) = expected["made_of"].as_str() {
            let (tensors, data) = self.in_four_bits(of, expected["sha256"].as_str().unwrap());
            return self.with_tower(layout, &tensors, &data);
        }
        let Ok(header) = std::fs::read(folder.join("header.json")) else {
            return Checkpoint::open(&folder)
                .unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
        };
        let seed = self.expected["seed"].as_u64().unwrap();
        let seed = match layout {
            "assistant" => seed + 1000,
            "eagle3" => seed + 2000,
            _ => seed,
        };
        let stacked =
            |name: &str, shape: &[usize], values: &dyn Fn(&str, &[usize]) -> Vec<f32>| match layout
            {
                "hf-fused" => restacked(name, shape, values),
                _ => values(name, shape),
            };
        let centre = match layout {
            "eagle3" => 1.0,
            _ => self.expected["norms"].as_f64().unwrap(),
        };
        let file = with_header(&header, |name, dtype, shape| {
            stored(
                dtype,
                &stacked(name, shape, &|name, shape| {
                    values(name, shape, seed, centre)
                }),
            )
        });
        if let Some(sha256) = self.expected["layouts"][layout]["sha256"].as_str() {
            assert_eq!(
                digest(Sha256::new().chain_update(&file)),
                sha256,
                "{} is the file that the tools read",
                folder.display()
            );
        }
        let config = if layout == "hf-fused" { "hf" } else { layout };
        let mut config: Value =
            serde_json::from_slice(&std::fs::read(self.path(config).join("config.json")).unwrap())
                .unwrap();
        if layout == "assistant" {
            // llama.cpp's converter leaves centroids out, and drafts are to be compared.
            config["use_ordered_embeddings"] = false.into();
        }
        let files = vec![("model.safetensors".into(), Cow::Owned(file))];
        Checkpoint::from_bytes(&config.to_string(), files).unwrap()
    }

    /// The text's tensors of layout `of` as MLX writes them with codes of 4 bits in groups
    /// of 32, and their bytes. MLX rounds by scales and biases that it stores in bf16 only
    /// afterwards; `sha256` is that of its names and bytes.
    fn in_four_bits(&self, of: &str, sha256: &str) -> (Map<String, Value>, Vec<u8>) {
        let header = std::fs::read(self.path(of).join("header.json")).unwrap();
        let header: Map<String, Value> = serde_json::from_slice(&header).unwrap();
        let seed = self.expected["seed"].as_u64().unwrap();
        let centre = self.expected["norms"].as_f64().unwrap();
        let format = quant::affine(4, 32).unwrap();
        let mut made = BTreeMap::new();
        for (name, entry) in &header {
            let Some(text) = name.strip_prefix("model.language_model.") else {
                continue;
            };
            let shape: Vec<usize> = serde_json::from_value(entry["shape"].clone()).unwrap();
            let plain = stored("BF16", &values(name, &shape, seed, centre));
            let text = format!("language_model.model.{text}");
            let &[rows, cols] = &shape[..] else {
                made.insert(text, ("BF16", shape, plain));
                continue;
            };
            let plain = Stored::new(&quant::BF16, rows, cols, &plain).to_f32();
            let codes = quant::encode(format, &plain, cols, quant::Scalar::F32).codes;
            let numbers = quant::encode(format, &plain, cols, quant::Scalar::Bf16);
            let module = text.strip_suffix("weight").unwrap().to_owned();
            made.insert(text, ("U32", vec![rows, cols / 8], codes));
            for (part, bytes) in [("scales", numbers.scales), ("biases", numbers.biases)] {
                let groups = vec![rows, cols / 32];
                made.insert(format!("{module}{part}"), ("BF16", groups, bytes));
            }
        }
        let (mut hash, mut tensors, mut data) = (Sha256::new(), Map::new(), Vec::new());
        for (name, (dtype, shape, bytes)) in made {
            hash = hash.chain_update(&name).chain_update(&bytes);
            let place = [data.len(), data.len() + bytes.len()];
            let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": place});
            tensors.insert(name, entry);
            data.extend(bytes);
        }
        assert_eq!(digest(hash), sha256, "{}: codes are MLX's", self.name);
        (tensors, data)
    }

    /// The checkpoint in `layout`, which has these tensors and, beside them, a picture
    /// tower; that of zeros, as no picture is read.
    fn with_tower(&self, layout: &str, tensors: &Map<String, Value>, data: &[u8]) -> Checkpoint {
        let bytes = |shape: &[usize]| 2 * shape.iter().product::<usize>();
        let (mut all, mut end) = (tensors.clone(), data.len());
        let tower = &self.expected["layouts"][layout]["tower"];
        for (name, shape) in tower.as_object().unwrap() {
            let start = end;
            end += bytes(&serde_json::from_value::<Vec<usize>>(shape.clone()).unwrap());
            let place = json!({"dtype": "BF16", "shape": shape, "data_offsets": [start, end]});
            all.insert(name.clone(), place);
        }
        assert!(all.len() > tensors.len(), "{layout} has a tower");
        let mut header = Value::Object(all).to_string();
        header += &" ".repeat(header.len().next_multiple_of(8) - header.len());
        let file = with_header(header.as_bytes(), |name, _, shape| {
            let Some(tensor) = tensors.get(name) else {
                return vec![0; bytes(shape)];
            };
            let [start, end] = serde_json::from_value(tensor["data_offsets"].clone()).unwrap();
            data[start..end].to_vec()
        });
        let config = std::fs::read_to_string(self.path(layout).join("config.json")).unwrap();
        let files = vec![("model.safetensors".into(), Cow::Owned(file))];
        Checkpoint::from_bytes(&config, files).unwrap()
    }
}

/// In hexadecimal.
fn digest(hash: Sha256) -> String {
    let bytes = hash.finalize();
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Seeded values, as `seeded` and `special` of `layouts.py` make them.
fn values(name: &str, shape: &[usize], seed: u64, centre: f64) -> Vec<f32> {
    let n: usize = shape.iter().product();
    if name.ends_with("token_ordering") {
        return (0..n).map(|i| (i * 5 % n) as f32).collect();
    }
    // Every second token of the target's.
    match name {
        "d2t" => return (0..n).map(|i| i as f32).collect(),
        "t2d" => return (0..n).map(|i| (1 - i % 2) as f32).collect(),
        _ => {}
    }
    let (middle, most) = match shape {
        _ if name.ends_with("layer_scalar") => (0.9, 0.05),
        [_, cols] if name.ends_with("embed_tokens.weight") => (0.0, 1.0 / (*cols as f64).sqrt()),
        [_, .., cols] => (0.0, 2.5 / (*cols as f64).sqrt()),
        _ if name.contains("norm") && name.contains("linear_attn") => (1.0, 0.3),
        _ if name.contains("norm") => (centre, 0.3),
        _ if name.ends_with("scale") => (1.0, 0.3),
        _ => (0.0, 0.5),
    };
    let hash = |key: u64, byte: u8| (key ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    let mut numbers = suites::Rng(name.bytes().fold(0xcbf2_9ce4_8422_2325, hash) ^ seed);
    let mut unit = || ((numbers.number() >> 48) as f32 - 32768.0) / 32768.0;
    (0..n)
        .map(|_| middle as f32 + most as f32 * unit())
        .collect()
}

/// Values where experts are stacked that lie one by one in the `hf` file.
fn restacked(name: &str, shape: &[usize], values: &dyn Fn(&str, &[usize]) -> Vec<f32>) -> Vec<f32> {
    let Some((at, part)) = name.split_once(".experts.") else {
        return values(name, shape);
    };
    match (part, shape) {
        ("gate_up_proj", &[experts, rows, cols]) => {
            let one = |e: usize, half: &str| {
                values(
                    &format!("{at}.experts.{e}.{half}.weight"),
                    &[rows / 2, cols],
                )
            };
            (0..experts)
                .flat_map(|e| [one(e, "gate_proj"), one(e, "up_proj")].concat())
                .collect()
        }
        ("down_proj", &[experts, rows, cols]) => {
            let one =
                |e: usize| values(&format!("{at}.experts.{e}.down_proj.weight"), &[rows, cols]);
            (0..experts).flat_map(one).collect()
        }
        _ => panic!("{name} of shape {shape:?}"),
    }
}

/// Numbers as a file has them.
fn stored(dtype: &str, values: &[f32]) -> Vec<u8> {
    match dtype {
        "I64" => values
            .iter()
            .flat_map(|v| (*v as i64).to_le_bytes())
            .collect(),
        "BOOL" => values.iter().map(|v| *v as u8).collect(),
        "F32" => quant::encode(&quant::F32, values, values.len(), quant::Scalar::F32).codes,
        "BF16" => quant::encode(&quant::BF16, values, values.len(), quant::Scalar::F32).codes,
        other => panic!("no layout has {other}"),
    }
}

fn backend() -> Arc<dyn Backend> {
    let options = CpuOptions {
        threads: 1,
        activations: Activations::F32,
        ..CpuOptions::default()
    };
    Arc::new(Cpu::new(options).unwrap())
}

fn size() -> MemorySize {
    MemorySize {
        sequences: 1,
        context: 64,
        step_rows: 64,
        kv_format: cache::KvPlan::both(&quant::kv::F32),
        running_pages: None,
        kept: KeptSize::default(),
    }
}

/// The greedy text of the target in `checkpoint`, and what its head, if it is given
/// one, guessed in every round. Nothing of the text's part and of a vision tower may stay unread.
fn write(
    family: &Family,
    checkpoint: &Checkpoint,
    head: Option<&Checkpoint>,
) -> (Vec<u32>, Vec<Vec<u32>>) {
    let b = backend();
    let at = format!(
        "{} as {:?}",
        family.name,
        checkpoint.files().collect::<Vec<_>>()
    );
    let target = load_target(&*b, checkpoint).unwrap_or_else(|e| panic!("{at}: {e}"));
    if models::has_tower(checkpoint) {
        let tower = models::load_tower(&*b, checkpoint).unwrap_or_else(|e| panic!("{at}: {e}"));
        assert_eq!(tower.embedding_size(), target.hidden_size(), "{at}");
    }
    let drafts = Arc::new(Mutex::new(Vec::new()));
    let drafter = head.map(|head| {
        let inner = drafter(&*b, family, head, &*target).unwrap_or_else(|e| panic!("{at}: {e}"));
        let drafts = drafts.clone();
        Box::new(Noting { inner, drafts }) as Box<dyn Drafter>
    });
    let assert_read = |of: &Checkpoint, counts: &dyn Fn(&str) -> bool| {
        let unread: Vec<String> = (of.unused().into_iter())
            .filter(|name| counts(name) && !may_stay_unread(family, name))
            .collect();
        assert!(unread.is_empty(), "{at}: nobody reads {unread:?}");
    };
    assert_read(checkpoint, &|name| !name.starts_with("mtp."));
    if let Some(head) = head {
        assert_read(head, &|name| {
            family.is_gemma() || is_eagle3(head) || name.starts_with("mtp.")
        });
    }
    let prompt = family.ids(&family.expected["prompt"]);
    let memory = Memory::new(&*b, target.plan(), size());
    let length = if drafter.is_some() { DRAFT } else { 0 };
    let mut speculator = Speculator::new(b, target, memory, drafter);
    let options = StreamOptions {
        sampling: Sampling::default(),
        max_tokens: family.tokens("hf").len(),
        stop_tokens: Arc::new([]),
        draft: DraftLength::Fixed(length),
        logprobs: None,
    };
    let mut stream = speculator.open(prompt, options).unwrap();
    while stream.finish().is_none() {
        speculator.round(&mut [&mut stream], 64).unwrap();
    }
    let drafts = std::mem::take(&mut *drafts.lock().unwrap());
    (stream.output().to_vec(), drafts)
}

/// Whether `head` is of a kind that any target can have.
fn is_eagle3(head: &Checkpoint) -> bool {
    let architecture = head.architecture().unwrap();
    let kind = (models::DRAFT_HEADS.iter()).find(|kind| kind.architectures.contains(&architecture));
    kind.is_some_and(|kind| kind.name == "eagle3")
}

fn drafter(
    b: &dyn Backend,
    family: &Family,
    head: &Checkpoint,
    target: &dyn Target,
) -> Result<Box<dyn Drafter>, models::ModelError> {
    if is_eagle3(head) {
        let head = Eagle3::load(b, head, target)?;
        let memory = Memory::new(b, head.plan(), size());
        return Ok(Box::new(Chained::new(head, memory)));
    }
    if family.is_gemma() {
        let head = Gemma4Assistant::load(b, head, target)?;
        return Ok(Box::new(Assistant::new(head)));
    }
    let head = Qwen35Mtp::load(b, head, target)?;
    let memory = Memory::new(b, head.plan(), size());
    Ok(Box::new(Chained::new(head, memory)))
}

/// What hears, centroids that a test turns off, and the keys and values
/// of layers that share another's.
fn may_stay_unread(family: &Family, name: &str) -> bool {
    let other = ["audio_", "embed_audio.", "masked_embedding."];
    let shared = matches!(family.name, "e2b" | "e4b") && name.contains(".self_attn.");
    shared || other.iter().any(|prefix| name.starts_with(prefix))
}

#[test]
fn every_layout_gives_the_text_of_public_tools() {
    for &(name, layouts, _) in FAMILIES {
        let family = Family::open(name);
        let all: BTreeSet<&str> = layouts.iter().copied().chain(["hf", "gguf.gguf"]).collect();
        let listed = family.expected["layouts"].as_object().unwrap();
        assert_eq!(
            listed.keys().map(String::as_str).collect::<BTreeSet<_>>(),
            all,
            "{name}"
        );
        for layout in all {
            let checkpoint = family.checkpoint(layout);
            let (text, _) = write(&family, &checkpoint, None);
            assert_eq!(text, family.tokens(layout), "{name} as {layout}");
        }
    }
}

/// What a head guesses beside the `hf` target, of `layout`.
fn drafts_of(family: &Family, layout: &str) -> Vec<Vec<u32>> {
    let (target, head) = (family.checkpoint("hf"), family.checkpoint(layout));
    let (text, drafts) = write(family, &target, Some(&head));
    assert_eq!(text, family.tokens("hf"), "{} with {layout}", family.name);
    assert!(
        drafts.iter().map(Vec::len).sum::<usize>() > 2 * DRAFT,
        "{} with {layout}",
        family.name
    );
    drafts
}

/// The head in the GGUF file `head` makes these guesses, and drafts for the target as a
/// file of the same tool.
fn assert_gguf_pair(family: &Family, head: &str, guesses: &[Vec<u32>]) {
    let name = family.name;
    assert_eq!(drafts_of(family, head), guesses, "{name}");
    let pair = ["gguf.gguf", head].map(|layout| family.checkpoint(layout));
    let (text, drafts) = write(family, &pair[0], Some(&pair[1]));
    assert_eq!(text, family.tokens("gguf.gguf"), "{name}");
    assert!(!drafts.is_empty());
}

/// Of the guesses, at least the share `least` is equal.
fn assert_alike(drafts: &[Vec<u32>], guesses: &[Vec<u32>], least: f64, layout: &str) {
    let pairs: Vec<bool> = (drafts.iter().flatten().zip(guesses.iter().flatten()))
        .map(|(a, b)| a == b)
        .collect();
    let equal = pairs.iter().filter(|equal| **equal).count() as f64 / pairs.len() as f64;
    println!("{layout}: {equal:.2} of {} guesses are equal", pairs.len());
    assert!(equal >= least, "{layout}: {drafts:?} for {guesses:?}");
}

#[test]
fn every_layout_of_a_head_makes_its_guesses() {
    for &(name, _, heads) in FAMILIES {
        let family = Family::open(name);
        if family.is_gemma() {
            let guesses = drafts_of(&family, "assistant");
            if !heads.contains(&"assistant.gguf") {
                continue;
            }
            assert_gguf_pair(&family, "assistant.gguf", &guesses);
            continue;
        }
        let guesses = drafts_of(&family, "hf");
        if name == "qwen-moe" {
            assert_eq!(drafts_of(&family, "hf-fused"), guesses, "{name}");
        }
        let whole = family.checkpoint("gguf.gguf");
        let (text, drafts) = write(&family, &whole, Some(&whole));
        assert_eq!(text, family.tokens("gguf.gguf"), "{name}");
        assert_alike(&drafts, &guesses, 0.95, "gguf.gguf");
        for head in heads.iter().filter(|head| head.starts_with("mtp-")) {
            // Its norms are folded in bf16, which rounds.
            let least = 0.85;
            assert_alike(&drafts_of(&family, head), &guesses, least, head);
        }
    }
}

#[test]
fn an_eagle3_head_drafts_for_either_family_and_from_either_layout() {
    let with_head = FAMILIES.iter().filter(|(_, _, h)| h.contains(&"eagle3"));
    let mut n = 0;
    for &(name, _, heads) in with_head {
        let family = Family::open(name);
        let guesses = drafts_of(&family, "eagle3");
        n += 1;
        if !heads.contains(&"eagle3.gguf") {
            continue;
        }
        assert_gguf_pair(&family, "eagle3.gguf", &guesses);
    }
    assert_eq!(n, 2, "a family each");
}

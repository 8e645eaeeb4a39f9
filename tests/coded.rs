//! A model whose weights are codes computes what it computes with the values of
//! these codes as plain floats: same logits, same text.

use backend::{Backend, Batch, Reference};
use cache::{KeptSize, Memory, MemorySize};
use cpu::{Activations, Cpu, CpuOptions};
use models::load_target;
use suites::{CODED, Rng, repository};
use weights::Checkpoint;

/// What belongs to codes and not to plain weights.
const COMPANIONS: &[&str] = &[
    "_scale",
    ".scales",
    ".biases",
    "_packed",
    "_shape",
    "_zero_point",
];

/// The checkpoint in `folder` with every weight as f32.
fn dequantized(folder: &str, coded: &Checkpoint) -> Checkpoint {
    let path = repository(folder).join("values.json");
    let values: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    let mut add = |name: &str, shape: &[usize], values: &[f32]| {
        let begin = data.len();
        data.extend(values.iter().flat_map(|v| v.to_le_bytes()));
        let entry = serde_json::json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, data.len()]});
        header.insert(name.into(), entry);
    };
    for (name, expected) in values.as_object().unwrap() {
        let axes = expected["shape"].as_array().unwrap();
        let shape: Vec<usize> = axes.iter().map(|n| n.as_u64().unwrap() as usize).collect();
        let (cols, lead) = shape.split_last().unwrap();
        let matrix = coded.matrix(name, lead.iter().product(), *cols).unwrap();
        add(name, &shape, &matrix.to_f32());
    }
    for name in coded.names() {
        let part = COMPANIONS.iter().any(|part| name.contains(part));
        if !part && values.get(name).is_none() {
            let shape = coded.shape(name).unwrap();
            add(
                name,
                &shape,
                &coded.vector(name, shape.iter().product()).unwrap(),
            );
        }
    }
    let is_mlx = coded.config().get("quantization").is_some();
    let format = if is_mlx { "mlx" } else { "pt" };
    header.insert("__metadata__".into(), serde_json::json!({"format": format}));
    let header = serde_json::to_vec(&header).unwrap();
    let file = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
    let config = coded.config().to_string();
    Checkpoint::from_bytes(&config, vec![("model.safetensors".into(), file.into())]).unwrap()
}

/// The logits of `n` greedy tokens after `prompt`.
fn greedy(b: &dyn Backend, checkpoint: &Checkpoint, prompt: &[u32], n: usize) -> Vec<Vec<f32>> {
    let target = load_target(b, checkpoint).unwrap();
    let size = MemorySize {
        sequences: 1,
        context: prompt.len() + n,
        step_rows: prompt.len(),
        kv_format: cache::KvPlan::both(&quant::kv::F32),
        running_pages: None,
        kept: KeptSize::default(),
    };
    let mut memory = Memory::new(b, target.plan(), size);
    let mut sequence = memory.open().unwrap();
    let (mut tokens, mut rows) = (prompt.to_vec(), Vec::new());
    while rows.len() < n {
        let mut batch = Batch::default();
        memory
            .push(&mut batch, &mut sequence, &tokens, tokens.len())
            .unwrap();
        let hidden = target.forward(b, &batch, &mut memory);
        let logits = target.logits(b, &b.gather(&hidden, &[tokens.len() - 1]));
        tokens = vec![b.argmax(&logits)[0]];
        rows.push(b.download(&logits).into_owned());
    }
    rows
}

#[test]
fn codes_give_the_logits_and_text_of_their_values() {
    let exact = CpuOptions {
        activations: Activations::F32,
        ..CpuOptions::default()
    };
    for &folder in CODED {
        let coded = Checkpoint::open(&repository(folder)).unwrap();
        let plain = dequantized(folder, &coded);
        let mut rng = Rng(7);
        let prompt: Vec<u32> = (0..24).map(|_| rng.below(96)).collect();
        let backends: [Box<dyn Backend>; 2] =
            [Box::new(Cpu::new(exact).unwrap()), Box::new(Reference)];
        for b in backends {
            let [got, want] = [&coded, &plain].map(|c| greedy(&*b, c, &prompt, 40));
            assert_eq!(got, want, "{folder} on {}", b.name());
            assert!(got.iter().flatten().all(|v| v.is_finite()));
        }
    }
}

//! Seeded block drafters: the heads of `tests/golden/blocks.json`, whose tensors a formula gives that
//! `tests/golden/blocks.py` has, too.

mod gguf;

use crate::{Rng, repository};
use models::BlockKind;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use weights::Checkpoint;

/// A head that is not in files: what its checkpoint would hold.
#[derive(Clone)]
pub struct SeededBlock {
    /// The kind of head.
    pub kind: BlockKind,
    /// The seeded target that it is made for.
    pub target: String,
    /// Its `config.json`.
    pub config: Value,
    /// Shapes of its tensors, by name.
    pub tensors: BTreeMap<String, Vec<usize>>,
}

/// Values in [-1, 1) that belong to `name`.
pub fn uniform(name: &str, n: usize) -> Vec<f32> {
    let mix = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    let mut rng = Rng(name.bytes().fold(0xcbf2_9ce4_8422_2325, mix));
    let value = |number: u64| (number >> 40) as f32 / (1 << 23) as f32 - 1.0;
    (0..n).map(|_| value(rng.number())).collect()
}

/// The numbers of tensor `name`, which has `shape`.
fn values(name: &str, shape: &[usize]) -> Vec<f32> {
    let v = uniform(name, shape.iter().product());
    let is_table = ["embed_tokens.weight", "markov_w1.weight"]
        .iter()
        .any(|table| name.ends_with(table));
    let of = |v: f32| match shape {
        _ if name.ends_with("bias") => 1.5 + v / 2.0,
        [_] => 1.0 + v / 4.0,
        _ if is_table => v,
        _ => v * 4.0 / f32::from(1u16 << (shape[1].next_power_of_two().ilog2().div_ceil(2))),
    };
    v.into_iter().map(of).collect()
}

/// The type and the bytes of tensor `name`, which has `shape`.
fn stored(name: &str, shape: &[usize]) -> (&'static str, Vec<u8>) {
    match name {
        "d2t" => {
            let ids = (0..shape[0] as i64).map(|i| i + 3);
            ("I64", ids.flat_map(i64::to_le_bytes).collect())
        }
        "t2d" => {
            let is_drafted = |i| (3..2 * 40 + 3).contains(&i) && i % 2 == 1;
            let drafted = (0..shape[0]).map(|i| u8::from(is_drafted(i)));
            ("BOOL", drafted.collect())
        }
        _ => {
            let values = values(name, shape).into_iter();
            ("F32", values.flat_map(f32::to_le_bytes).collect())
        }
    }
}

impl SeededBlock {
    /// The head called `name` in `blocks.json`: `dflash`, `deepspec` or `speculators`, by its
    /// layout, or one of more layers and parts.
    pub fn new(name: &str) -> Self {
        let file = std::fs::read(repository("tests/golden/blocks.json")).unwrap();
        let mut all: Value = serde_json::from_slice(&file).unwrap();
        let head = all[name].take();
        SeededBlock {
            kind: match name {
                "dflash" | "dflash2" => BlockKind::Dflash,
                _ => BlockKind::Dspark,
            },
            target: head["target"].as_str().unwrap().to_owned(),
            config: head["config"].clone(),
            tensors: serde_json::from_value(head["tensors"].clone()).unwrap(),
        }
    }

    /// The bytes of its file of weights.
    pub fn safetensors(&self) -> Vec<u8> {
        let mut header = Map::new();
        let mut data = Vec::<u8>::new();
        for (name, shape) in &self.tensors {
            let (dtype, bytes) = stored(name, shape);
            let range = [data.len(), data.len() + bytes.len()];
            let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": range});
            header.insert(name.clone(), entry);
            data.extend(bytes);
        }
        let header = serde_json::to_vec(&header).unwrap();
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header);
        file.extend(data);
        file
    }

    /// Its checkpoint.
    pub fn checkpoint(&self) -> Checkpoint {
        let files = vec![("model.safetensors".to_owned(), self.safetensors().into())];
        Checkpoint::from_bytes(&self.config.to_string(), files).unwrap()
    }
}

//! Golden checkpoints that a test changes before it opens them.

use crate::repository;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use weights::Checkpoint;

/// Type, shape and bytes of a tensor.
pub type Stored = (String, Vec<usize>, Vec<u8>);

/// A golden checkpoint's files, to be changed.
pub struct Files {
    /// `config.json`.
    pub config: Value,
    /// The checkpoint's tensors by name.
    pub tensors: BTreeMap<String, Stored>,
}

impl Files {
    /// The files of the golden checkpoint `name`.
    ///
    /// # Panics
    ///
    /// If there is no such checkpoint with its weights in one file.
    pub fn open(name: &str) -> Files {
        let folder = repository("tests/golden/checkpoints").join(name);
        let read = |file| std::fs::read(folder.join(file)).expect("a golden file");
        let bytes = read("model.safetensors");
        let n = u64::from_le_bytes(bytes[..8].try_into().expect("a golden file")) as usize;
        let header: BTreeMap<String, Value> =
            serde_json::from_slice(&bytes[8..8 + n]).expect("a golden file");
        let tensor = |(name, entry): (String, Value)| {
            let at = |i: usize| {
                8 + n + entry["data_offsets"][i].as_u64().expect("a golden file") as usize
            };
            let shape: Vec<usize> =
                serde_json::from_value(entry["shape"].clone()).expect("a golden file");
            let dtype = entry["dtype"].as_str().expect("a golden file").to_owned();
            (name, (dtype, shape, bytes[at(0)..at(1)].to_vec()))
        };
        Files {
            config: serde_json::from_slice(&read("config.json")).expect("a golden file"),
            tensors: header
                .into_iter()
                .filter(|(name, _)| name != "__metadata__")
                .map(tensor)
                .collect(),
        }
    }

    /// Gives its MTP head `n` layers: layer `i` is the first one with the rows of every tensor moved down
    /// by `i`, as in `tests/golden/mtp_layers.py`.
    ///
    /// # Panics
    ///
    /// If there is no head.
    #[must_use]
    pub fn with_mtp_layers(mut self, n: usize) -> Files {
        let first = "mtp.layers.0.";
        let own = self
            .tensors
            .iter()
            .filter(|(name, _)| name.starts_with(first));
        let own: Vec<(String, Stored)> = own
            .map(|(name, tensor)| (name.clone(), tensor.clone()))
            .collect();
        assert!(!own.is_empty(), "an MTP head");
        for layer in 1..n {
            for (name, (dtype, shape, bytes)) in &own {
                let mut moved = bytes.clone();
                moved.rotate_right(layer % shape[0] * (bytes.len() / shape[0]));
                let name = name.replace(first, &format!("mtp.layers.{layer}."));
                let tensor = (dtype.clone(), shape.clone(), moved);
                self.tensors.insert(name, tensor);
            }
        }
        self.config["mtp_num_hidden_layers"] = json!(n);
        self
    }

    /// The checkpoint that they are now.
    ///
    /// # Panics
    ///
    /// If they are none any more.
    pub fn checkpoint(&self) -> Checkpoint {
        let files = vec![("model.safetensors".to_owned(), self.weights().into())];
        Checkpoint::from_bytes(&self.config.to_string(), files).expect("a golden file")
    }

    /// Writes them into `folder`, which is made.
    ///
    /// # Panics
    ///
    /// If that fails.
    pub fn save(&self, folder: &Path) {
        std::fs::create_dir_all(folder).expect("a folder");
        let config = self.config.to_string().into_bytes();
        for (name, bytes) in [
            ("config.json", config),
            ("model.safetensors", self.weights()),
        ] {
            std::fs::write(folder.join(name), bytes).expect("a file");
        }
    }

    /// The bytes of the file of weights.
    fn weights(&self) -> Vec<u8> {
        let mut header = serde_json::Map::new();
        let mut data = Vec::<u8>::new();
        for (name, (dtype, shape, bytes)) in &self.tensors {
            let range = [data.len(), data.len() + bytes.len()];
            let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": range});
            header.insert(name.clone(), entry);
            data.extend(bytes);
        }
        let header = serde_json::to_vec(&header).expect("a golden file");
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header);
        file.extend(data);
        file
    }

    /// Puts `to` in the place of `from` at the beginning of names.
    pub fn rename(&mut self, from: &str, to: &str) {
        let tensors = std::mem::take(&mut self.tensors);
        let renamed = |(name, tensor): (String, _)| match name.strip_prefix(from) {
            Some(rest) => (format!("{to}{rest}"), tensor),
            None => (name, tensor),
        };
        self.tensors = tensors.into_iter().map(renamed).collect();
    }
}

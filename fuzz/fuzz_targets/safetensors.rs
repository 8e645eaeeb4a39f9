//! A checkpoint of one safetensors file of any bytes: refused, or every tensor
//! of it can be read.
//!
//! The fuzzer cannot guess an eight-byte length, so the first eight bytes are
//! the header's length only if they fit, and else replaced by one that does.

#![no_main]

use libfuzzer_sys::fuzz_target;
use std::borrow::Cow;
use weights::Checkpoint;

const CONFIG: &str = r#"{"quantization": {"bits": 4, "group_size": 32}}"#;

fuzz_target!(|data: &[u8]| {
    let mut bytes = data.to_vec();
    if let Some((length, rest)) = bytes.split_first_chunk_mut::<8>()
        && u64::from_le_bytes(*length) > rest.len() as u64
    {
        let end = rest
            .iter()
            .rposition(|b| *b == b'}')
            .map_or(rest.len(), |at| at + 1);
        *length = (end as u64).to_le_bytes();
    }
    for name in ["model.safetensors", "mtp/model.safetensors"] {
        let files = vec![(name.to_string(), Cow::Owned(bytes.clone()))];
        if let Ok(checkpoint) = Checkpoint::from_bytes(CONFIG, files) {
            read_all(&checkpoint);
        }
    }
});

/// Asks for every tensor in every way.
fn read_all(checkpoint: &Checkpoint) {
    let names: Vec<&str> = checkpoint.names().collect();
    for stored in &names {
        let name = stored.strip_suffix("_packed").unwrap_or(stored);
        let Some(shape) = checkpoint.shape(name) else {
            continue;
        };
        let n: usize = shape.iter().product();
        let cols = shape.last().copied().unwrap_or(1);
        for (rows, cols) in [(n / cols, cols), (1, n), (n, 1)] {
            if let Ok(matrix) = checkpoint.matrix(name, rows, cols) {
                assert_eq!(matrix.to_f32().len(), n);
            }
        }
        if let Ok(values) = checkpoint.vector(name, n) {
            assert_eq!(values.len(), n);
        }
        if let Ok(values) = checkpoint.integers(name, n) {
            assert_eq!(values.len(), n);
        }
        for norm in [
            "norm.weight",
            "mtp.norm.weight",
            "layers.0.input_layernorm.weight",
        ] {
            let _ = checkpoint.norm(norm, n); // a wrong answer is not a crash
        }
    }
    assert!(checkpoint.unused().len() <= names.len());
    assert_eq!(checkpoint.content_hash().len(), 64);
}

//! A model of one GGUF file of any bytes: refused, or every key and tensor of it
//! can be read.
//!
//! The fuzzer seldom keeps a file's start, so it need not have one: the input
//! follows the magic, the version and small counts.

#![no_main]

use libfuzzer_sys::fuzz_target;
use std::borrow::Cow;
use weights::Checkpoint;

fuzz_target!(|data: &[u8]| {
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    match data.strip_prefix(b"GGUF") {
        Some(_) => bytes = data.to_vec(),
        None => {
            let Some((counts, rest)) = data.split_first_chunk::<2>() else {
                return;
            };
            for count in counts {
                bytes.extend(u64::from(count % 16).to_le_bytes());
            }
            bytes.extend(rest);
        }
    }
    let files = vec![("model.gguf".to_string(), Cow::Owned(bytes))];
    if let Ok(checkpoint) = Checkpoint::from_bytes("", files) {
        read_all(&checkpoint);
    }
});

/// Asks for everything in every way.
fn read_all(checkpoint: &Checkpoint) {
    let metadata = checkpoint.metadata().expect("a GGUF file has metadata");
    for key in metadata.keys() {
        assert!(metadata.get(key).is_some());
    }
    let names: Vec<&str> = checkpoint.names().collect();
    for name in &names {
        let shape = checkpoint.shape(name).expect("nothing is packed in words");
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
        for norm in ["norm.weight", "mtp.norm.weight"] {
            let _ = checkpoint.norm(norm, n); // a wrong answer is not a crash
        }
    }
    assert!(checkpoint.unused().len() <= names.len());
    assert!(checkpoint.config().is_object());
}

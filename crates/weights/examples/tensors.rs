//! Lists the weights of a checkpoint, a folder of safetensors or a GGUF file, with
//! their shapes and number formats:
//!
//! ```sh
//! cargo run -p weights --example tensors -- models/tiny-qwen3.5
//! ```

use std::path::PathBuf;
use weights::{Checkpoint, LoadError, WeightData};

/// What is listed without an argument: a model of the repository.
const DEFAULT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tiny-qwen3.5");

fn main() -> Result<(), LoadError> {
    let path = std::env::args_os()
        .nth(1)
        .map_or(DEFAULT.into(), PathBuf::from);
    let checkpoint = Checkpoint::open(&path)?;
    println!("{}", checkpoint.architecture()?);
    for name in checkpoint.weight_names() {
        let weight = checkpoint.weight(name)?;
        let format = match weight.data {
            WeightData::Matrix(stored) => stored.format.name,
            WeightData::Raw { dtype, .. } => dtype,
        };
        println!("{format:<12} {:<16} {name}", format!("{:?}", weight.shape));
    }
    println!(
        "{} bytes in {:?}",
        checkpoint.bytes(),
        checkpoint.files().collect::<Vec<_>>()
    );
    Ok(())
}

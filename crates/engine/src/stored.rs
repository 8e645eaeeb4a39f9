//! What a checkpoint stores: how many numbers, in which format, in which kind of file.

use weights::{Checkpoint, WeightData};

/// What a checkpoint stores.
pub(crate) struct Stored {
    /// Numbers in all weights.
    pub(crate) parameters: u64,
    /// The name of the number format of the largest weight of a layer.
    pub(crate) format: &'static str,
    /// The kind of file: `gguf` or `safetensors`.
    pub(crate) container: &'static str,
}

impl Stored {
    /// Looks at `checkpoint`. Marks one of its tensors used, so ask for the unused ones first.
    pub(crate) fn new(checkpoint: &Checkpoint) -> Stored {
        let shapes = checkpoint
            .weight_names()
            .filter_map(|name| checkpoint.shape(name));
        let numbers = |shape: Vec<usize>| shape.iter().map(|&n| n as u64).product::<u64>();
        Stored {
            parameters: shapes.map(numbers).sum(),
            format: format(checkpoint).unwrap_or("unknown"),
            container: match checkpoint.metadata() {
                Some(_) => "gguf",
                None => "safetensors",
            },
        }
    }
}

/// The number format of the largest weight of a layer of `checkpoint`.
fn format(checkpoint: &Checkpoint) -> Option<&'static str> {
    let sizes = checkpoint.sizes();
    let of_layers = sizes.filter(|(name, _)| name.starts_with("layers."));
    let (name, _) = of_layers.max_by_key(|&(_, bytes)| bytes)?;
    match checkpoint
        .weight(&name.replace("weight_packed", "weight"))
        .ok()?
        .data
    {
        WeightData::Matrix(stored) => Some(stored.format.name),
        WeightData::Raw { dtype, .. } => Some(dtype),
    }
}

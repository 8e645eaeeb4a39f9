//! What the config says of quantized Hugging Face weights, where tensors cannot tell.

use crate::{Checkpoint, LoadError};
use serde_json::Value;

impl Checkpoint {
    /// The config's part on quantized Hugging Face weights.
    fn quantization(&self) -> Option<&Value> {
        let keys = ["quantization_config", "compression_config"];
        let parts = [self.config(), self.text_config()];
        parts
            .into_iter()
            .find_map(|c| keys.iter().find_map(|k| c.get(k)))
    }

    /// What all groups of the config say of `key` of their weights, if they agree.
    pub(super) fn weights_setting(&self, key: &str) -> Option<&Value> {
        let groups = self.quantization()?.get("config_groups")?.as_object()?;
        let mut found = groups.values().map(|g| g.get("weights")?.get(key));
        let first = found.next()??;
        found.all(|other| other == Some(first)).then_some(first)
    }

    /// Rows and columns of a block, if the config says.
    pub(super) fn block(&self) -> Option<(usize, usize)> {
        let fp8 = self.quantization()?.get("weight_block_size");
        let sizes = fp8
            .filter(|b| !b.is_null())
            .or_else(|| self.weights_setting("block_structure"))?;
        let side = |i: usize| {
            usize::try_from(sizes.get(i)?.as_u64()?)
                .ok()
                .filter(|n| *n > 0)
        };
        Some((side(0)?, side(1)?))
    }

    /// An error if `name` has zero points, which are known of packed integers only.
    pub(super) fn refuse_zeros(&self, name: &str) -> Result<(), LoadError> {
        match self.find(&format!("{name}_zero_point")) {
            Some(_) => Err(self.unknown(name, "floats or unpacked codes with zero points")),
            None => Ok(()),
        }
    }

    /// An error if weights are true only for rotated inputs: they would give fluent
    /// nonsense.
    pub(super) fn refuse_rotations(&self, name: &str) -> Result<(), LoadError> {
        let groups = self
            .quantization()
            .and_then(|q| q.get("transform_config")?.get("config_groups"));
        match groups.and_then(Value::as_object) {
            Some(groups) if !groups.is_empty() => {
                Err(self.unknown(name, "compressed-tensors with `transform_config`"))
            }
            _ => Ok(()),
        }
    }
}

//! What requests mean that do not say.
//!
//! ```text
//! request  >  the server's defaults  >  the checkpoint's generation_config.json  >  OpenAI's defaults
//! ```

use serde_json::{Map, Value};

/// What requests for a model mean that do not say. What is left out here is as the checkpoint
/// recommends.
#[derive(Clone, Debug, Default)]
pub struct Defaults {
    /// Numbers of the sampler, by the names in [`engine::SAMPLER_NUMBERS`].
    pub numbers: Vec<(&'static str, f32)>,
    /// The number of likeliest tokens to sample from; 0 is all.
    pub top_k: Option<usize>,
    /// The seed; a new one for each request, if absent.
    pub seed: Option<u64>,
    /// Tokens to write, at most.
    pub max_tokens: Option<usize>,
    /// Arguments of the chat template.
    pub template_arguments: Map<String, Value>,
}

impl Defaults {
    /// The sampler's number called `name`, if it has a default here.
    pub(crate) fn number(&self, name: &str) -> Option<f32> {
        let found = self.numbers.iter().find(|(own, _)| *own == name);
        found.map(|(_, number)| *number)
    }

    /// Adds the arguments of the chat template that a request leaves out to its `arguments`.
    pub(crate) fn fill(&self, arguments: &mut Map<String, Value>) {
        for (name, value) in &self.template_arguments {
            arguments
                .entry(name.as_str())
                .or_insert_with(|| value.clone());
        }
    }
}

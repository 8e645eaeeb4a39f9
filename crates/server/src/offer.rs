//! Tools that a request offers the model.

use std::sync::Arc;

use serde_json::Value;

/// What a model may call.
#[derive(Clone, Debug)]
pub(crate) struct Offer {
    /// The tools, as chat templates read them: `{"type": "function", "function": {…}}` each.
    pub(crate) definitions: Arc<Value>,
    /// Which of the tools' calls must fit their schemas, in the same order.
    pub(crate) strict: Vec<bool>,
    /// Whether the model must call.
    pub(crate) choice: ToolChoice,
    /// Calls of one answer, at most.
    pub(crate) calls_max: Option<usize>,
}

/// Whether a model must call a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ToolChoice {
    /// The model must not call.
    None,
    /// The model decides.
    Auto,
    /// The model must call some tool.
    Required,
    /// The model must call the tool of this name.
    Named(String),
}

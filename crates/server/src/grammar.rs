//! What an answer has to follow.

use engine::GrammarSpec;

/// What an answer has to follow, and the field that says so.
#[derive(Clone, Debug)]
pub(crate) struct AnswerGrammar {
    /// Path of the field.
    pub(crate) field: String,
    pub(crate) spec: GrammarSpec,
}

//! What can be wrong with a grammar, or go wrong while it is followed.

/// Why a grammar could not be compiled or followed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A keyword of a JSON Schema would be ignored or only approximated, so that a text could
    /// follow the grammar and still break the schema.
    #[error(
        "`{keyword}` cannot be enforced: {reason}; remove it or say it with other keywords, at `{pointer}`"
    )]
    UnsupportedKeyword {
        /// The keyword, or the name that is no keyword.
        keyword: String,
        /// What about it is not supported.
        reason: String,
        /// JSON pointer to the keyword, a URI fragment such as `#/properties/a/not`.
        pointer: String,
    },
    /// A JSON Schema has a value that the specification does not allow at this place.
    #[error("the schema is not valid: {reason}, at `{pointer}`")]
    InvalidSchema {
        /// What is wrong.
        reason: String,
        /// JSON pointer to the value, a URI fragment.
        pointer: String,
    },
    /// A regular expression, a grammar or a list of choices does not parse or uses something
    /// that is not supported.
    #[error("the {what} is not valid: {reason}")]
    Invalid {
        /// The kind of the grammar, such as `regular expression`.
        what: &'static str,
        /// What is wrong, and where.
        reason: String,
    },
    /// No text follows the grammar.
    #[error("no text can match the {what}: {reason}")]
    Unsatisfiable {
        /// The kind of the grammar, such as `JSON schema`.
        what: &'static str,
        /// The parts that contradict each other.
        reason: String,
    },
    /// A size is over its limit.
    #[error("the {what} is over the limit of {limit}; make it smaller")]
    TooLarge {
        /// What was measured, with its unit.
        what: &'static str,
        /// The limit in [`Limits`](crate::Limits).
        limit: u64,
    },
    /// Compiling took longer than [`Limits::compile_ms`](crate::Limits::compile_ms).
    #[error("the grammar takes longer to compile than {limit_ms} ms; make it simpler")]
    TimedOut {
        /// The limit in milliseconds.
        limit_ms: u64,
    },
    /// Too many grammars were being compiled for this one to begin in time.
    #[error("too many grammars are being compiled; try again later")]
    Busy,
    /// The grammar became too ambiguous or too complex at this place of the text, or allows no
    /// token of the vocabulary there.
    #[error("the grammar cannot be followed further, make it simpler: {reason}")]
    TooComplex {
        /// What was exceeded.
        reason: String,
    },
    /// The tokens of a model cannot be used.
    #[error("the vocabulary cannot be constrained: {reason}")]
    Vocabulary {
        /// What is wrong.
        reason: String,
    },
}

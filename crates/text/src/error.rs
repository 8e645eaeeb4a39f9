//! Why text work failed.

use std::path::PathBuf;

/// Why a tokenizer, a template or a piece of text was refused.
///
/// Everything here can be caused by bytes from outside: a checkpoint's files
/// or a client's messages. [`TextError::is_callers_fault`] tells the two apart.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// A file of the checkpoint could not be read.
    #[error("cannot read `{path}`")]
    Io {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// Something is larger than its named limit.
    #[error("{found} {what} are too many: at most {limit} are allowed")]
    TooLarge {
        /// What was measured, with its unit.
        what: &'static str,
        /// The size found, or a lower bound of it where measuring stopped early.
        found: usize,
        /// The limit.
        limit: usize,
    },
    /// A file is not the JSON that it should be.
    #[error("`{file}` is not valid JSON")]
    BadJson {
        /// The file's usual name.
        file: &'static str,
        /// Where the JSON is wrong, and why.
        source: serde_json::Error,
    },
    /// A field of a configuration file has an unusable value.
    #[error("`{file}` has an unusable value for `{field}`: {reason}")]
    BadField {
        /// The file's usual name.
        file: &'static str,
        /// The field.
        field: &'static str,
        /// What was expected there.
        reason: &'static str,
    },
    /// The tokenizer file parses, but describes no tokenizer we can run.
    #[error("unusable tokenizer.json: {reason}")]
    BadTokenizer {
        /// Why it failed.
        reason: String,
    },
    /// The tokenizer refused this text.
    #[error("the tokenizer failed on this text: {reason}")]
    Encode {
        /// Why it failed.
        reason: String,
    },
    /// The text has more tokens than were asked for.
    #[error(
        "this model's maximum context length is {limit} tokens; the prompt has at least {at_least} tokens"
    )]
    TooManyTokens {
        /// No encoding of the text has fewer.
        at_least: usize,
        /// How many were allowed.
        limit: usize,
    },
    /// A library panicked; the panic was caught and only this call failed.
    #[error("{what} panicked on this input")]
    Panicked {
        /// What ran when the limit was reached.
        what: &'static str,
    },
    /// The system gave no thread to run a template on.
    #[error("cannot start a thread for the chat template")]
    NoThread {
        /// The operating system's error.
        source: std::io::Error,
    },
    /// The checkpoint carries no chat template.
    #[error("the model has no chat template")]
    NoTemplate,
    /// The template does not compile, or failed while it ran.
    #[error("chat template failed at line {line}: {reason}")]
    Template {
        /// The line of the template, 0 where unknown.
        line: usize,
        /// Why it failed.
        reason: String,
    },
    /// The template itself called `raise_exception`.
    #[error("the chat template refused the messages: {message}")]
    Refused {
        /// The template's own words.
        message: String,
    },
    /// The template ran out of its instruction budget.
    #[error("the chat template ran for more than {fuel} instructions and was stopped")]
    OutOfFuel {
        /// The budget.
        fuel: u64,
    },
    /// The messages do not have the shape of a conversation.
    #[error("message {index}: {reason}")]
    BadMessage {
        /// Which message, from 0.
        index: usize,
        /// What is wrong with the message.
        reason: &'static str,
    },
    /// Template arguments may not replace what the server itself passes.
    #[error("the server sets this chat template argument itself; leave it out: `{name}`")]
    ReservedArgument {
        /// The argument.
        name: String,
    },
    /// A stop string is unusable.
    #[error("stop string {} is empty; leave it out", index + 1)]
    EmptyStop {
        /// Which one, from 0.
        index: usize,
    },
}

impl TextError {
    /// Whether the request is to blame (an HTTP 400) and not the checkpoint.
    pub fn is_callers_fault(&self) -> bool {
        matches!(
            self,
            Self::TooLarge { .. }
                | Self::Encode { .. }
                | Self::TooManyTokens { .. }
                | Self::Refused { .. }
                | Self::BadMessage { .. }
                | Self::ReservedArgument { .. }
                | Self::EmptyStop { .. }
        )
    }
}

/// Fails when `found` is over `limit`.
pub(crate) fn within(what: &'static str, found: usize, limit: usize) -> Result<(), TextError> {
    if found > limit {
        return Err(TextError::TooLarge { what, found, limit });
    }
    Ok(())
}

/// Runs `work` and turns a panic of a library into an error.
///
/// Unwind safety: what the closures borrow is either read-only or thrown away
/// after a failure; the tokenizer's word cache takes its lock with `try_write`
/// and is simply not used any more once poisoned.
pub(crate) fn contain<T>(
    what: &'static str,
    work: impl FnOnce() -> Result<T, TextError>,
) -> Result<T, TextError> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(work))
        .unwrap_or(Err(TextError::Panicked { what }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_an_error() {
        let result: Result<(), _> = contain("the test", || panic!("on purpose"));
        assert!(matches!(
            result,
            Err(TextError::Panicked { what: "the test" })
        ));
    }
}

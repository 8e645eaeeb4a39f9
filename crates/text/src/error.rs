//! Errors of this crate, and the two guards that make them: limits, and panics of libraries.

use std::path::PathBuf;

/// Why a tokenizer, a template or a piece of text was refused.
///
/// Every variant can be caused by bytes from outside, a checkpoint's files or a client's
/// request; [`TextError::is_callers_fault`] tells which.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// A file of the checkpoint could not be read.
    #[error("cannot read `{path}`")]
    Io {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// Something is larger than its named limit.
    #[error("{found} {what} are too many: at most {limit} are allowed")]
    TooLarge {
        /// The measured thing and its unit, such as "text bytes".
        what: &'static str,
        /// The measured size; a lower bound of it where measuring stopped early.
        found: usize,
        /// The largest size that is allowed.
        limit: usize,
    },
    /// A file of the checkpoint is not valid JSON, or lacks a field that it must have.
    #[error("`{file}` is not valid JSON: download the model again")]
    BadJson {
        /// The file's usual name.
        file: &'static str,
        /// The place in the file, and what is wrong there.
        source: serde_json::Error,
    },
    /// A field of a configuration file has an unusable value.
    #[error("`{file}` has an unusable value for `{field}`: {reason}")]
    BadField {
        /// The file's usual name.
        file: &'static str,
        /// The field.
        field: &'static str,
        /// The values that would be usable.
        reason: &'static str,
    },
    /// The tokenizer file is valid JSON, but describes no tokenizer that can run here.
    #[error("unusable tokenizer.json: {reason}")]
    BadTokenizer {
        /// The part of the file that is unusable.
        reason: String,
    },
    /// The tokenizer failed on one text.
    #[error("the tokenizer failed on this text: {reason}")]
    Encode {
        /// The message of the tokenizer.
        reason: String,
    },
    /// A text has more tokens than the caller allows.
    #[error(
        "this model's maximum context length is {limit} tokens; the prompt has at least {at_least} tokens"
    )]
    TooManyTokens {
        /// A lower bound of the number of tokens in the text.
        at_least: usize,
        /// The number of tokens that is allowed.
        limit: usize,
    },
    /// A library panicked; the panic was caught and only this call failed.
    #[error("{what} panicked on this input: please report it as a bug")]
    Panicked {
        /// The part that was running, such as "the tokenizer".
        what: &'static str,
    },
    /// The operating system refused the thread that a template runs on.
    #[error("cannot start a thread for the chat template")]
    NoThread {
        /// The error of the operating system.
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
        /// The message of the interpreter.
        reason: String,
    },
    /// The template refused the messages by calling `raise_exception`.
    #[error("the chat template refused the messages: {message}")]
    Refused {
        /// The template's own words.
        message: String,
    },
    /// The template used up its budget of instructions.
    #[error(
        "the chat template ran for more than {fuel} instructions and was stopped: send fewer or shorter messages"
    )]
    OutOfFuel {
        /// The budget of instructions.
        fuel: u64,
    },
    /// A message does not have the shape that the API or the template asks for.
    #[error("message {index}: {reason}")]
    BadMessage {
        /// The number of the message, from 0.
        index: usize,
        /// The fault of the message.
        reason: &'static str,
    },
    /// A template argument has a name that the server itself passes.
    #[error("the server sets this chat template argument itself; leave it out: `{name}`")]
    ReservedArgument {
        /// The name of the argument.
        name: String,
    },
    /// A stop string is empty.
    #[error("stop string {} is empty; leave it out", index + 1)]
    EmptyStop {
        /// The number of the stop string, from 0.
        index: usize,
    },
}

impl TextError {
    /// Whether the request caused the error (an HTTP 400), and not the checkpoint.
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

/// Fails with [`TextError::TooLarge`] if `found` is over `limit`. `what` names the measured
/// thing and its unit.
pub(crate) fn within(what: &'static str, found: usize, limit: usize) -> Result<(), TextError> {
    if found > limit {
        return Err(TextError::TooLarge { what, found, limit });
    }
    Ok(())
}

/// Runs `work` and turns a panic of a library into [`TextError::Panicked`].
///
/// Unwind safety: what the closures borrow is either read-only or thrown away after a
/// failure; the tokenizer's word cache takes its lock with `try_write` and is not used any
/// more once poisoned.
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

//! Errors of the interpreter, and ours for them.

use minijinja::ErrorKind;

use super::limits::FUEL;
use crate::error::TextError;

/// The text that a template passed to `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Raised(pub(super) String);

/// An error of the interpreter that ends a rendering for `reason`.
pub(super) fn refuse(reason: &'static str) -> minijinja::Error {
    minijinja::Error::new(ErrorKind::InvalidOperation, reason)
}

/// Turns an error of the interpreter into ours: a refusal by the template, an exhausted
/// budget, or a failure at a line.
pub(super) fn explain(err: &minijinja::Error) -> TextError {
    if err.kind() == ErrorKind::OutOfFuel {
        return TextError::OutOfFuel { fuel: FUEL };
    }
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(err);
    while let Some(inner) = cause {
        if let Some(Raised(message)) = inner.downcast_ref() {
            return TextError::Refused {
                message: message.chars().take(1000).collect(),
            };
        }
        if let Some(inner) = inner.downcast_ref::<minijinja::Error>()
            && inner.kind() == ErrorKind::OutOfFuel
        {
            return TextError::OutOfFuel { fuel: FUEL };
        }
        cause = inner.source();
    }
    let reason: String = match err.detail() {
        Some(detail) => format!("{}: {detail}", err.kind()),
        None => err.kind().to_string(),
    };
    TextError::Template {
        line: err.line().unwrap_or(0),
        reason: reason.chars().take(1000).collect(),
    }
}

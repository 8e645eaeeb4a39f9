//! Errors of the hub and its cache.
//!
//! Messages quote text from outside: names, redirects, parts of answers. All of it passes
//! [`line`], so that no message is longer than a screen or moves the cursor.

use std::path::PathBuf;

/// Most characters of text from outside that a message quotes.
const MAX_QUOTED: usize = 200;

/// Text from outside as a message quotes it: one line of at most [`MAX_QUOTED`] characters, with
/// escapes for those that a terminal would not show.
pub(crate) fn line(text: &str) -> String {
    let mut line = String::new();
    for (i, c) in text.chars().enumerate() {
        if i == MAX_QUOTED {
            line.push('…');
            break;
        }
        match c {
            '\'' | '"' | '\\' => line.push(c),
            _ => line.extend(c.escape_debug()),
        }
    }
    line
}

/// Why something could not be fetched from the hub, or is not in its cache. Each message
/// is one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// A text is not the name of a repository.
    #[error(
        "`{}` is not a repository name: expected ORG/NAME, as on huggingface.co",
        line(name)
    )]
    BadId {
        /// The text that was given.
        name: String,
    },
    /// Something is not in the cache, and the network must not be used.
    #[error(
        "{} is not in the cache, and HF_HUB_OFFLINE forbids downloading it",
        line(what)
    )]
    Offline {
        /// The thing that would have been fetched.
        what: String,
    },
    /// The hub answered 401: it does not know who asks, or does not allow it.
    #[error(
        "access to {} was denied (401): it does not exist, or is private or gated; {advice}",
        line(what)
    )]
    Unauthorized {
        /// The thing that was asked for.
        what: String,
        /// The next step for the user.
        advice: &'static str,
    },
    /// The hub answered 403: the model is gated, and its terms have not been accepted.
    #[error(
        "access to {} was denied (403): accept its terms on its page, with the account that HF_TOKEN belongs to",
        line(what)
    )]
    Forbidden {
        /// The thing that was asked for.
        what: String,
    },
    /// The hub answered 404: there is no such repository, revision or file.
    #[error("the hub has no {}: check the spelling", line(what))]
    NotFound {
        /// The thing that was asked for.
        what: String,
    },
    /// The hub answered 429 or 5xx in every try.
    #[error(
        "the hub answered {status} to {tries} requests for {}: try again later; the bytes fetched so far are kept",
        line(what)
    )]
    Unavailable {
        /// The HTTP status of the answer.
        status: u16,
        /// The thing that was asked for.
        what: String,
        /// The number of tries.
        tries: u32,
    },
    /// The hub answered with a status that is not expected.
    #[error("the hub answered {status} to the request for {}", line(what))]
    Status {
        /// The HTTP status of the answer.
        status: u16,
        /// The thing that was asked for.
        what: String,
    },
    /// There was no answer in any try.
    #[error(
        "cannot fetch {}: {}; the bytes fetched so far are kept",
        line(what),
        line(reason)
    )]
    Network {
        /// The thing that was asked for.
        what: String,
        /// The last failure.
        reason: String,
    },
    /// A transfer broke off in every try without progress.
    #[error(
        "cannot fetch {}: the last {tries} tries got no further than byte {reached} of {total}: {}",
        line(what),
        line(reason)
    )]
    Stalled {
        /// The thing that was asked for.
        what: String,
        /// The last byte that arrived.
        reached: u64,
        /// The bytes of the whole transfer.
        total: u64,
        /// The number of tries without progress.
        tries: u32,
        /// The last failure.
        reason: String,
    },
    /// An answer of the hub is invalid.
    #[error("the hub's answer about {} is invalid: {}", line(what), line(reason))]
    BadAnswer {
        /// The thing that was asked for.
        what: String,
        /// The fault of the answer.
        reason: String,
    },
    /// A file arrived with other contents than announced.
    #[error(
        "{} arrived with other contents than announced (SHA-256 or size: expected {}, found {}): the download was deleted, pull again",
        line(what),
        line(expected),
        line(found)
    )]
    Checksum {
        /// The file that was fetched.
        what: String,
        /// The announced SHA-256 or size.
        expected: String,
        /// The SHA-256 or size of what arrived.
        found: String,
    },
    /// A file or folder of the cache cannot be used.
    #[error("cannot use `{}`: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// No GGUF model of a repository matches, or several do.
    #[error("{}", no_quant(what, wanted, *found, known))]
    NoQuant {
        /// The repository.
        what: String,
        /// The formats that were looked for, such as "the format `Q8_0`".
        wanted: String,
        /// The number of models that match.
        found: usize,
        /// The models of the repository, separated by commas.
        known: String,
    },
    /// A checkpoint has no draft head to fetch.
    #[error(
        "{} has no MTP head (`mtp.*` tensors): conversions drop it, so name the original model",
        line(what)
    )]
    NoHead {
        /// The repository.
        what: String,
    },
}

/// The message of [`HubError::NoQuant`].
fn no_quant(what: &str, wanted: &str, found: usize, known: &str) -> String {
    let what = line(what);
    if known.is_empty() {
        return format!("{what} has no GGUF model");
    }
    let problem = match found {
        0 => format!("{what} has no GGUF model in {wanted}"),
        found => format!("{what} has {found} GGUF models in {wanted}"),
    };
    format!("{problem}: add one format to the name, as in ORG/NAME:Q4_K_M; it has {known}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_from_outside_is_one_short_line() {
        let hostile = format!("\u{1b}[2J\r\n\u{202e}ü'\"\\{}", "x".repeat(60_000));
        let error = HubError::BadAnswer {
            what: hostile.clone(),
            reason: hostile,
        };
        let error = error.to_string();
        assert!(error.chars().count() < 600, "{error}");
        assert!(error.contains(r#"\u{1b}[2J\r\n\u{202e}ü'"\x"#), "{error}");
        assert!(error.ends_with("x…"), "{error}");
    }
}

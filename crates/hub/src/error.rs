//! Why something could not be fetched from the hub, or is not in its cache.
//!
//! Messages quote what strangers have sent: names, redirects, parts of answers. All of it
//! passes [`line`], so that no message is longer than a screen or moves the cursor.

use std::path::PathBuf;

/// Characters of a stranger's text that a message quotes.
const MAX_QUOTED: usize = 200;

/// Text of a stranger as a message quotes it: one line, at most [`MAX_QUOTED`]
/// characters, and none that a terminal does not show as they are.
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
    /// The text is not the name of a repository.
    #[error(
        "`{}` is not a repository name: expected ORG/NAME, as on huggingface.co",
        line(name)
    )]
    BadId {
        /// The text that was given as a name.
        name: String,
    },
    /// The network must not be used.
    #[error(
        "{} is not in the cache, and HF_HUB_OFFLINE forbids downloading it",
        line(what)
    )]
    Offline {
        /// What would have been fetched.
        what: String,
    },
    /// Status 401.
    #[error(
        "access to {} was denied (401): it does not exist, or is private or gated; {advice}",
        line(what)
    )]
    Unauthorized {
        /// The file or repository that was asked for.
        what: String,
        /// What the user can do about it.
        advice: &'static str,
    },
    /// Status 403.
    #[error(
        "access to {} was denied (403): accept its terms on its page, with the account that HF_TOKEN belongs to",
        line(what)
    )]
    Forbidden {
        /// The file or repository that was asked for.
        what: String,
    },
    /// Status 404.
    #[error("the hub has no {}", line(what))]
    NotFound {
        /// The file or repository that was asked for.
        what: String,
    },
    /// Status 429 or 5xx, again and again.
    #[error(
        "the hub answered {status} to {tries} requests for {}: try again later; the bytes fetched so far are kept",
        line(what)
    )]
    Unavailable {
        /// The status.
        status: u16,
        /// The file or repository that was asked for.
        what: String,
        /// Attempts that were made.
        tries: u32,
    },
    /// Another status.
    #[error("the hub answered {status} to the request for {}", line(what))]
    Status {
        /// The status.
        status: u16,
        /// The file or repository that was asked for.
        what: String,
    },
    /// No answer, again and again.
    #[error(
        "cannot fetch {}: {}; the bytes fetched so far are kept",
        line(what),
        line(reason)
    )]
    Network {
        /// The file or repository that was asked for.
        what: String,
        /// What went wrong.
        reason: String,
    },
    /// A transfer that broke off again and again at the same place.
    #[error(
        "cannot fetch {}: the last {tries} tries got no further than byte {reached} of {total}: {}",
        line(what),
        line(reason)
    )]
    Stalled {
        /// The file or repository that was asked for.
        what: String,
        /// The furthest byte that arrived.
        reached: u64,
        /// Bytes in all.
        total: u64,
        /// Tries without progress.
        tries: u32,
        /// What went wrong in the last attempt.
        reason: String,
    },
    /// An answer that makes no sense.
    #[error("the hub's answer about {} is invalid: {}", line(what), line(reason))]
    BadAnswer {
        /// The file or repository that was asked for.
        what: String,
        /// What is wrong with the file.
        reason: String,
    },
    /// Contents other than announced.
    #[error(
        "{} arrived with other contents than announced (SHA-256 or size: expected {}, found {}): the download was deleted, pull again",
        line(what),
        line(expected),
        line(found)
    )]
    Checksum {
        /// The file.
        what: String,
        /// SHA-256 or size as announced.
        expected: String,
        /// The hash of what was received.
        found: String,
    },
    /// A file or folder of the cache.
    #[error("cannot use `{}`: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// The repository has no GGUF model of this name, or several.
    #[error("{}", no_quant(what, wanted, *found, known))]
    NoQuant {
        /// The repository.
        what: String,
        /// The formats that were looked for, as in "the format `Q8_0`".
        wanted: String,
        /// How many models have it.
        found: usize,
        /// The models that there are, separated by commas.
        known: String,
    },
    /// There is no draft head to fetch.
    #[error("{} has no MTP head (`mtp.*` tensors)", line(what))]
    NoHead {
        /// The repository.
        what: String,
    },
}

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
    fn text_of_strangers_is_one_short_line() {
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

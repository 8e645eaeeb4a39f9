//! Why something of the hub cannot be had.

use std::path::PathBuf;

/// Why something of the hub cannot be had. Each message is one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// Not the name of a repository.
    #[error("`{name}` is not a repository name: expected ORG/NAME, as on the hub")]
    BadId {
        /// What was given.
        name: String,
    },
    /// The network is not to be used.
    #[error("HF_HUB_OFFLINE is set, and {what} is not in the cache")]
    Offline {
        /// What would have been fetched.
        what: String,
    },
    /// Status 401.
    #[error(
        "the hub wants to know who asks for {what}: it does not exist, or is private or gated; {advice}"
    )]
    Unauthorized {
        /// What was asked for.
        what: String,
        /// What to do.
        advice: &'static str,
    },
    /// Status 403.
    #[error("the hub refuses {what}: accept its terms on its page, with the account of HF_TOKEN")]
    Forbidden {
        /// What was asked for.
        what: String,
    },
    /// Status 404.
    #[error("the hub has no {what}")]
    NotFound {
        /// What was asked for.
        what: String,
    },
    /// Status 429 or 5xx, again and again.
    #[error(
        "the hub answers {status} to {what}, {tries} times; try again later, what has been fetched stays"
    )]
    Unavailable {
        /// The status.
        status: u16,
        /// What was asked for.
        what: String,
        /// How often.
        tries: u32,
    },
    /// Another status.
    #[error("the hub answers {status} to {what}")]
    Status {
        /// The status.
        status: u16,
        /// What was asked for.
        what: String,
    },
    /// No answer, or half of one, again and again.
    #[error("{what} cannot be fetched: {reason}; what has been fetched stays")]
    Network {
        /// What was asked for.
        what: String,
        /// What happened.
        reason: String,
    },
    /// An answer that makes no sense.
    #[error("the hub's answer to {what} makes no sense: {reason}")]
    BadAnswer {
        /// What was asked for.
        what: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Contents other than announced.
    #[error(
        "{what} has arrived with other contents than announced ({found}, expected {expected}); it was removed"
    )]
    Checksum {
        /// The file.
        what: String,
        /// SHA-256 or size as announced.
        expected: String,
        /// As it came.
        found: String,
    },
    /// A file of the cache.
    #[error("cannot use `{path}`: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Somebody else fetches the same file.
    #[error("another program is fetching {what}")]
    Busy {
        /// The file.
        what: String,
    },
    /// No one GGUF model is meant.
    #[error(
        "{what} has no one GGUF model in the {wanted} but {found}; name a format behind a colon, as in ORG/NAME:Q4_K_M; it has {known}"
    )]
    NoQuant {
        /// The repository.
        what: String,
        /// The format that was asked for.
        wanted: String,
        /// How many models have it.
        found: usize,
        /// The models that there are.
        known: String,
    },
    /// There is no draft head to fetch.
    #[error("{what} has no `mtp.*` tensors")]
    NoHead {
        /// The repository.
        what: String,
    },
}

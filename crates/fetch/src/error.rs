//! Why a file cannot be had. No message says more of the network or of the disk than whoever asked
//! may know: neither addresses, nor whether a host answers that may not be asked.

/// Why nothing was fetched.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FetchError {
    /// The address cannot be read, or has another scheme.
    #[error("is no address that begins with http:// or https://, or redirects to none")]
    BadUrl,
    /// The address has a user name or a password in it.
    #[error("has a user name or a password in it, or redirects to an address with one")]
    Credentials,
    /// The operator does not allow the host.
    #[error("is, or redirects to, a host that this server does not fetch from")]
    NotListed,
    /// The host is unknown, or one of its addresses is not of the public internet.
    #[error("is, or redirects to, a host that is unknown or not on the public internet")]
    NotPublic,
    /// No connection, or a broken answer.
    #[error("cannot be fetched: its host does not answer, or not as HTTP says")]
    NoAnswer,
    /// The host answered with another status than 200.
    #[error("cannot be fetched: its host answers with status {0}")]
    Status(u16),
    /// Too many redirects, or one from HTTPS to HTTP.
    #[error("cannot be fetched: it redirects too often, or from https to http")]
    Redirects,
    /// The file has too many bytes.
    #[error("is too large: {0} bytes at most")]
    TooLarge(usize),
    /// The file did not arrive in time.
    #[error("did not arrive in time")]
    TooSlow,
}

/// Why a file of a folder cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// There is no such file in the folder, it cannot be read, or it lies outside.
    #[error("is no file that this server may read")]
    NoFile,
    /// The file has too many bytes.
    #[error("is too large: {0} bytes at most")]
    TooLarge(usize),
}

/// Why the name of a host cannot be in a list of hosts.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HostError {
    /// It is neither a name nor an address, with a port or without.
    #[error("expected a host such as images.example.org or example.org:8443, or * for any: `{0}`")]
    NoHost(String),
    /// It is an address that nothing is ever fetched from.
    #[error("nothing is fetched from link-local, multicast and unspecified addresses: `{0}`")]
    Forbidden(String),
}

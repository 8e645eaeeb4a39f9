//! Files that strangers name instead of sending them: at an address of the public internet, or in
//! the one folder that an operator has opened.
//!
//! ```
//! use fetch::{FetchError, Fetcher, Hosts};
//! use std::time::{Duration, Instant};
//!
//! let fetcher = Fetcher::new(Hosts::parse(["*"])?);
//! let until = Instant::now() + Duration::from_secs(10);
//! let refused = fetcher.get("http://127.0.0.1/secret", 1 << 20, until);
//! assert_eq!(refused, Err(FetchError::NotPublic));
//! # Ok::<(), fetch::HostError>(())
//! ```
//!
//! | room | what it does |
//! | --- | --- |
//! | [`Fetcher`] | GET over HTTP and HTTPS, with limits of bytes, time and redirects |
//! | [`Hosts`] | which hosts may be asked |
//! | [`is_private`] | which addresses are not of the public internet |
//! | [`Folder`] | regular files below a folder, and nothing that links lead to outside |
//!
//! A name is looked up here, all of its addresses are checked, and the connection goes to one of
//! these addresses: a name that changes its address between check and connection gains nothing. Each
//! redirect is checked in the same way. All calls block, up to a time that the caller sets.
//!
//! Deliberately absent: proxies and other variables of the environment, user names and passwords,
//! cookies, compression, caches, and other methods than GET.

#![forbid(unsafe_code)]

mod error;
mod folder;
mod hosts;
mod http;
mod public;

pub use error::{FetchError, FileError, HostError};
pub use folder::Folder;
pub use hosts::Hosts;
pub use http::Fetcher;
pub use public::is_private;

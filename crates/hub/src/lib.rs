//! The model hub: its cache on disk, its protocol, and who drafts for whom.
//!
//! | room | what it does |
//! | --- | --- |
//! | [`Settings`] | where cache, endpoint and token are, from the variables that other tools read |
//! | [`Cache`] | `models--ORG--NAME/{blobs,refs,snapshots}`, shared with `huggingface_hub` |
//! | [`Client`] | files into the cache: resumed, checked, locked |
//! | [`gguf`] | which GGUF files of a repository are one model |
//! | [`head`] | only the draft head of a checkpoint, by range requests |
//! | [`known`] | the table of targets and their drafters |
//!
//! What comes over the network is from strangers: names become paths only after a
//! check, sizes have limits, contents are compared with their hash. Blocking, no
//! threads. Nothing is fetched unless a caller asks for it by name.

#![forbid(unsafe_code)]

mod cache;
mod client;
mod error;
pub mod gguf;
pub mod head;
mod http;
pub mod known;
mod lookup;
mod parts;
mod retry;
mod settings;
mod transfer;

pub use cache::{Cache, Cached, Incomplete, files_of};
pub use client::{Client, FileInfo, RepoInfo, is_model_file};
pub use error::HubError;
pub use settings::{RepoId, Settings};
pub use transfer::Progress;

//! The model hub: its cache on disk, its protocol, and who drafts for whom.
//!
//! | room | what it does |
//! | --- | --- |
//! | [`Settings`] | cache, endpoint and token, from the variables that other tools read |
//! | [`Cache`] | `models--ORG--NAME/{blobs,refs,snapshots}`, shared with `huggingface_hub` |
//! | [`Client`] | fetches files into the cache: resumed, checked, locked |
//! | `transfer` | contents over connections that break off |
//! | `http` | requests: redirects, refusals, the token |
//! | `retry` | how often something is tried again |
//! | `lookup` | names to addresses, and where a redirect may not lead |
//! | [`gguf`] | which GGUF files of a repository are one model |
//! | [`head`] | fetches the draft head of a checkpoint alone, by range requests |
//! | [`known`] | the table of targets and their drafters |
//! | `parts` | wanted fields of JSON, without keeping the rest |
//!
//! Nothing from the network is trusted: names become paths only after a check, sizes have
//! limits, contents are compared with their hash. All calls block; there are no threads.
//! Nothing is fetched unless a caller asks for it by name. `examples/cached_model.rs` finds
//! a model in a cache without network.

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

//! Pictures, clips and sounds of requests: files become pixels or samples, these rows of a prompt, and rows
//! embeddings.
//!
//! ```text
//! file ─ Vision::open, Hearing::open ─→ MediaItem ─ Senses::place ─→ Request::media    any thread
//! Request::media ─ Looking::see ─→ embeddings ─→ speculate::MediaSpan                 the engine's thread
//! ```
//!
//! An item is decoded, resized and hashed by whoever reads a request. A picture is one span of a prompt,
//! a sound too, a clip several: one a frame, or a pair of frames. The tower runs on the engine's thread, in slices
//! between rounds that take a share of their time ([`slices`]), and what it has made is kept by content, so that a
//! second question about a picture runs no tower.
//!
//! Deliberately absent: fetching, the sound of clips.

mod cache;
mod hearing;
mod item;
mod look;
mod own_file;
mod place;
mod senses;
mod sight;
mod slices;
mod vision;

pub use hearing::{Hearing, HearingInfo};
pub use item::{MediaItem, MediaKind, MediaRowCounts, PlacedMedia};
pub use look::MediaCounts;
pub(crate) use look::{Looking, check_places, is_seen};
pub(crate) use own_file::OwnFile;
pub use own_file::TowerFile;
pub use place::WrongPlaces;
pub use senses::Senses;
pub(crate) use sight::Sight;
pub use vision::{ClipOptions, ClipSource, OpenError, Vision, VisionInfo};

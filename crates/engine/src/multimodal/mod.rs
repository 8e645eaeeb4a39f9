//! Pictures and clips of requests: files become pixels, pixels rows of a prompt, and rows embeddings.
//!
//! ```text
//! file ─ Vision::open ─→ MediaItem ─ Vision::place ─→ Request::media        any thread
//! Request::media ─ Looking::see ─→ embeddings ─→ speculate::MediaSpan       the engine's thread
//! ```
//!
//! An item is decoded, resized and hashed by whoever reads a request. A picture is one span of a prompt,
//! a clip several: one a frame, or a pair of frames. The tower runs on the engine's thread, one span
//! between two rounds, and what it has made is kept by content, so that a second question about a picture
//! runs no tower.
//!
//! Deliberately absent: fetching, sound.

mod cache;
mod item;
mod look;
mod own_file;
mod place;
mod sight;
mod vision;

pub use item::{MediaItem, MediaKind, MediaRowCounts, PlacedMedia};
pub use look::MediaCounts;
pub(crate) use look::{Looking, check_places, is_seen};
pub(crate) use own_file::OwnFile;
pub use own_file::TowerFile;
pub use place::WrongPlaces;
pub(crate) use sight::Sight;
pub use vision::{ClipOptions, ClipSource, OpenError, Vision, VisionInfo};

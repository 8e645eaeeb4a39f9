//! Traces: what every round of an engine did, as lines of JSON (`docs/traces.md`).
//!
//! ```text
//! engine's thread ─ StepRecord ─→ Writer ─ bounded queue ─→ thread ─→ file
//! file ─→ Trace ─→ Replay: the same text with other draft lengths
//! ```
//!
//! | room | what it does |
//! | --- | --- |
//! | [`schema`] | the lines |
//! | [`Writer`] | writes them, and never has an engine wait for a disk |
//! | [`Trace`] | reads them, as far as a file is whole |
//! | [`replay`] | tells what other draft lengths would have brought and taken |
//!
//! Deliberately absent: tokens and text, of prompts as of answers. A line has counts, times and
//! names of drafters.

#![forbid(unsafe_code)]

mod read;
pub mod replay;
pub mod schema;
mod write;

pub use read::{ReadError, Trace};
pub use write::Writer;

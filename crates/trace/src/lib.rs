//! Traces: what every round of an engine did, as lines of JSON (`docs/traces.md`).
//!
//! ```text
//! engine's thread ─ StepRecord ─→ Writer ─ bounded queue ─→ thread ─→ file
//! file ─→ Trace
//! ```
//!
//! | room | what it does |
//! | --- | --- |
//! | [`schema`] | the lines |
//! | [`Writer`] | writes them, and never has an engine wait for a disk |
//! | [`Trace`] | reads them, as far as a file is whole |
//!
//! Deliberately absent: tokens and text, of prompts as of answers. A line has counts, times and
//! names of drafters.

#![forbid(unsafe_code)]

mod read;
pub mod schema;
mod write;

pub use read::{ReadError, Trace};
pub use write::Writer;

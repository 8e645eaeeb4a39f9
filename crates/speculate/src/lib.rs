//! Speculative decoding: draft → verify → accept → rollback, once.
//!
//! A [`Stream`] is one text being written. A [`Speculator`] owns a target, its
//! [drafters](Drafters) and what all of these remember, and takes any number of streams
//! through a round together. Prefill is a round whose rows are the prompt's,
//! plain decoding is a round with an empty draft; there is no other path.
//!
//! A token is accepted when the target, asked with the same noise, chooses it
//! itself ([`sample`]). So the text does not depend on the drafter, and neither
//! greedy decoding nor a seed's sampled text changes when speculation is on. Whoever
//! asks for it gets rejection sampling instead ([`accept::Accept::Residual`]).
//!
//! No text, no clock beyond two durations, no scheduling between requests.

#![forbid(unsafe_code)]

pub mod accept;
mod calibrate;
mod choosing;
mod constrained;
mod constraint;
pub mod draft;
mod forward;
mod host_choices;
mod kept;
pub mod length;
mod logprobs;
mod pooling;
mod preempt;
mod probe;
mod prompt;
mod reuse;
mod round;
pub mod sample;
pub mod saved;
pub mod score;
mod speculator;
mod stats;
mod step;
mod stream;
mod timing;
mod told;
mod trace;

pub use accept::Accept;
pub use backend::{MAX_TENTATIVE, noise};
pub use constraint::{Constraint, ConstraintError};
pub use draft::{Drafter, Drafters};
pub use kept::{Evictions, Parked};
pub use length::{DraftLength, Guesser, Guessers, MAX_HEADS};
pub use logprobs::{Logprobs, LogprobsOf, MAX_TOP_LOGPROBS, TopLogprobs};
pub use pooling::Pooling;
pub use probe::Difference;
pub use prompt::{MediaSpan, Prompt, Spans};
pub use round::{NO_TOKEN_REASON, RoundError};
pub use sample::Sampling;
pub use speculator::Speculator;
pub use stats::{Guesses, Position, Stats};
pub use step::{StepRecord, StreamStep};
pub use stream::{Finish, Stream, StreamOptions};
pub use trace::{RoundTrace, TokenSource};

//! The engine as a library: load a model, submit requests, receive events.
//!
//! ```text
//! load()  checkpoint + drafter + text → Model
//! Engine  one thread: admit → round, for all requests together; another delivers beside its drafting
//! ```
//!
//! Requests that run at the same time share every step; none waits for another
//! to finish, and none changes another's text. There is no async here: events
//! are pushed into a function that the caller gives.
//!
//! No HTTP, no flags, no files other than those of the model and of the prefix cache. No device, no family and no
//! drafter is named outside the tables that list them.

#![forbid(unsafe_code)]

mod breakers;
mod calibration;
mod constraint;
mod counters;
mod delivery;
mod disk;
mod drafters;
mod embedding;
mod engine;
mod error;
mod footprint;
mod grammars;
mod hashes;
mod info;
mod lines;
mod load;
mod memory_plan;
mod multimodal;
mod options;
mod pace;
mod pages;
mod placement;
mod preflight;
mod queue;
mod reason;
mod redraft;
mod request;
mod resize;
mod sampler;
mod scheduler;
mod shortlist;
mod source;
mod steps;
mod stored;
mod token_counts;
mod warm_up;

pub use backend::PAGE_ROWS;
pub use breakers::{DRY_BREAKERS, sequence_breakers};
pub use cache::{
    KV_PRESETS, KvPlan, KvPlanError, Namespace, PageChange, PageGroup, PageKind, RowKey,
};
pub use calibration::Calibration;
pub use constrain::{Error as GrammarError, Grammar, Spec as GrammarSpec};
pub use counters::{Counters, DrafterTally};
pub use disk::CacheFolder;
pub use drafters::{DrafterKind, drafter_kinds, suggested_width};
pub use embedding::{Embedding, Norm};
pub use engine::{Engine, EngineOptions};
pub use error::{
    DrafterReason, EngineError, FoundHead, MissingHead, NoHead, RefusedHead, Remedy, TooLarge,
    Unmappable, kept_formats, of_some_layers,
};
pub use footprint::RequestBytes;
pub use hashes::{read_json, write_json};
pub use info::{KvLayersInfo, Model, ModelInfo};
pub use lines::LineLimits;
pub use load::load;
pub use media::{Frame, Limits as MediaLimits, SoundLimits};
pub use memory_plan::KvMemory;
pub use multimodal::{
    ClipOptions, ClipSource, Hearing, HearingInfo, MediaCounts, MediaItem, MediaKind,
    MediaRowCounts, OpenError, PlacedMedia, Senses, TowerFile, Vision, VisionInfo, WrongPlaces,
};
pub use options::{
    DEFAULT_CONTEXT, DEFAULT_DRAFT_MAX, DRAFT_MAX, DraftChoice, LoadOptions, LoadProgress,
};
pub use pages::PageSink;
pub use preflight::{
    Finding, Guesses, HeadPreflight, Norms, PastTrial, Preflight, Probing, Trial, TrialResult,
    past_trials,
};
pub use reason::{Placement, WeightsReason, Words};
pub use request::{
    CallBegin, CallEnd, CallPart, CancelToken, DrafterCounts, Event, FinishReason, PositionCounts,
    Rejected, Request, RequestOutcome, RoundEvent, Segment, Sink, Speculation, Timings, ToolUse,
    TracedToken, Usage, WrittenToken, full_context,
};
pub use sampler::{SAMPLER_NUMBERS, SamplerNumber};
pub use shortlist::DraftVocabulary;
pub use source::{ModelFiles, Source};
pub use speculate::length::{CostOf, CostPoint};
pub use speculate::sample::Mirostat;
pub use speculate::score::{divergence, log_prob};
pub use speculate::{
    Accept, DraftLength, Guesser, Guessers, Logprobs, LogprobsOf, MAX_TOP_LOGPROBS,
    NO_TOKEN_REASON, Pooling, Sampling, StepRecord, StreamStep, TokenSource, TopLogprobs,
};
pub use steps::{DeliveryTimes, StepReport, StepSink};
pub use text::{Channel, PromptEnd, SamplingDefaults, Text, Tools};
pub use token_counts::TokenCounts;

//! The server over a socket, with a bundled model behind it.
//!
//! The client here is written by hand, so that it can send what no library
//! would and see every byte that comes back.

mod anthropic;
mod choices;
mod client;
mod defaults;
mod deploy;
mod disk;
mod embeddings;
mod fields;
mod kv_events;
mod lifecycle;
mod llama;
mod log;
mod logprobs;
mod metrics;
mod models;
mod numbers;
mod ollama;
mod page;
mod paths;
mod pictures;
mod queue;
mod recorded;
mod refusals;
mod render;
mod responses;
mod reuse;
mod sampling;
mod sounds;
mod sources;
mod stream;
mod structured;
mod tools;
mod trace;
mod video;
mod wire;

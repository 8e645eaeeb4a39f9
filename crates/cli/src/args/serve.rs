//! `paceline serve`: where it listens, whom it answers and how many at once.

use super::draft::{DraftArgs, OverlapArgs};
use super::media::MediaArgs;
use super::model::{KvShare, LoadArgs, kv_memory, size};
use super::text::{SamplerArgs, seed, template_arguments};
use super::trace::TraceArgs;
use super::values::count;
use clap::{Args, ValueEnum};
use engine::SAMPLER_NUMBERS;
use serde_json::{Map, Value};
use server::{Defaults, Limits};
use std::num::NonZeroUsize;
use std::path::PathBuf;

/// `paceline serve`
#[derive(Clone, Debug, Args)]
pub(crate) struct ServeArgs {
    /// Address or name to listen on; all but loopback needs a key, or --insecure
    #[arg(long, default_value = "127.0.0.1", help_heading = "Server")]
    pub(crate) host: String,
    /// Port to listen on; 0 takes any that is free
    #[arg(long, default_value_t = 8080, help_heading = "Server")]
    pub(crate) port: u16,
    /// Requests that run at the same time, in one batch; up to --queue more wait for their turn
    #[arg(long, value_name = "N", default_value_t = 4, help_heading = "Server")]
    pub(crate) parallel: usize,
    /// Requests that may wait for their turn; more are refused with 429 and a time to come back. For a
    /// benchmark, at least as many as it sends at once
    #[arg(long, value_name = "N", default_value_t = engine::EngineOptions::default().queue, help_heading = "Server")]
    pub(crate) queue: usize,
    /// Time that the tower may take between two steps of running requests to look at pictures, video and
    /// sounds of others, in percent of a step's time, where seven requests or more run; beside fewer it
    /// takes more, 7 × PERCENT / requests, and beside none as much as it needs. Less makes text come
    /// evenly, more has pictures answered sooner
    #[arg(
        long,
        value_name = "PERCENT",
        default_value_t = engine::EngineOptions::default().tower_share,
        value_parser = clap::value_parser!(u32).range(1..=1000),
        help_heading = "Server"
    )]
    pub(crate) tower_share: u32,
    /// Memory of the KV cache that running requests share, a draft model's included, such as 8GB; auto takes half of what
    /// the weights leave free, on a GPU three quarters, and the longest context that fits. When it runs out, the request of
    /// lowest priority gives its place to others and goes on later, with the same text [default: --parallel times
    /// --context]
    #[arg(long, value_name = "SIZE", value_parser = kv_memory, help_heading = "Server")]
    pub(crate) kv_memory: Option<KvShare>,
    /// Turn the prefix cache off: every prompt is computed from its start, even if an earlier request
    /// began the same way. Texts are the same, and response times tell nothing of others' prompts
    #[arg(long, help_heading = "Server")]
    pub(crate) no_prefix_cache: bool,
    /// Folder in which the prefix cache outlives the server: texts are written there before they make
    /// room for others and when the server stops, and read when a prompt begins like one of them. Its
    /// files, their owner's alone, hold what users and models wrote
    #[arg(long, value_name = "DIR", help_heading = "Server")]
    pub(crate) cache_dir: Option<PathBuf>,
    /// Size of the prefix cache in --cache-dir, such as 50GB; what is worth least goes first
    #[arg(long, value_name = "SIZE", default_value = "10GB", value_parser = size, help_heading = "Server")]
    pub(crate) cache_disk: u64,
    /// Ask for this API key; may be repeated
    #[arg(long, value_name = "KEY", value_parser = api_key, help_heading = "Server")]
    pub(crate) api_key: Vec<String>,
    /// Ask for one of the API keys in this file, a line each
    #[arg(long, value_name = "FILE", help_heading = "Server")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// Let web pages from this origin in, such as http://localhost:3000, or with localhost every page
    /// of this machine; may be repeated
    #[arg(
        long,
        value_name = "ORIGIN",
        value_parser = server::parse_origin,
        value_delimiter = ',',
        help_heading = "Server"
    )]
    pub(crate) allow_origin: Vec<String>,
    /// Answer to this host name too, also without a key; may be repeated
    #[arg(
        long,
        value_name = "NAME",
        value_delimiter = ',',
        help_heading = "Server"
    )]
    pub(crate) allow_host: Vec<String>,
    /// Listen on the network without a key
    #[arg(long, help_heading = "Server")]
    pub(crate) insecure: bool,
    /// Name of the model in requests and responses; may be repeated [default: its own]
    #[arg(
        long,
        value_name = "NAME",
        value_delimiter = ',',
        help_heading = "Server"
    )]
    pub(crate) alias: Vec<String>,
    /// Refuse requests for a model of another name; otherwise this model answers them
    #[arg(long, help_heading = "Server")]
    pub(crate) strict_model_names: bool,
    /// Chat template in place of the model's own: a file with a Jinja program, or the name of a
    /// built-in one: chatml
    #[arg(long, value_name = "NAME|FILE", help_heading = "Server")]
    pub(crate) chat_template: Option<String>,
    /// Whether the model reasons where a request does not say: on, off, or auto, which leaves it to
    /// the chat template. Requests of Anthropic's API always say
    #[arg(
        long,
        value_name = "WHEN",
        default_value = "auto",
        help_heading = "Server"
    )]
    pub(crate) reasoning: Reasoning,
    /// Answer a conversation that ends with a message of the assistant by a turn of its own, unless
    /// the request says otherwise; without this the answer goes on from that message
    #[arg(long, help_heading = "Server")]
    pub(crate) no_prefill_assistant: bool,
    /// How the hidden rows of a text become its embedding: last, the row of its last token; mean, the
    /// mean of all rows; cls, the first row; none, each row is a vector, which only /embedding
    /// answers with [default: last]
    #[arg(long, value_name = "KIND", value_parser = pooling, help_heading = "Server")]
    pub(crate) pooling: Option<engine::Pooling>,
    /// Seconds that running requests get to finish after Ctrl-C
    #[arg(long, value_name = "SECONDS", default_value_t = Limits::default().drain_timeout.as_secs(), help_heading = "Server")]
    pub(crate) drain_timeout: u64,
    #[command(flatten)]
    pub(crate) media: MediaArgs,
    #[command(flatten)]
    pub(crate) defaults: DefaultsArgs,
    #[command(flatten)]
    pub(crate) kv_events: KvEventsArgs,
    /// Say what would be served and what memory it would take, and exit
    #[arg(long, help_heading = "Server")]
    pub(crate) dry_run: bool,
    #[command(flatten)]
    pub(crate) models: ModelsArgs,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
    #[command(flatten)]
    pub(crate) draft: DraftArgs,
    #[command(flatten)]
    pub(crate) overlap: OverlapArgs,
    #[command(flatten)]
    pub(crate) trace: TraceArgs,
}

/// What requests mean that do not say.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Defaults of requests")]
pub(crate) struct DefaultsArgs {
    #[command(flatten)]
    pub(crate) sampler: SamplerArgs,
    /// Random seed of requests that name none: the same request gets the same text [default: a new
    /// one each time]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = seed)]
    pub(crate) seed: Option<u64>,
    /// Tokens to write, at most [default: until the context is full]
    #[arg(short = 'n', long, visible_alias = "n-predict", value_name = "N", value_parser = count)]
    pub(crate) max_tokens: Option<usize>,
    /// Arguments of the model's chat template, such as {"enable_thinking": true}; those of a request
    /// count more
    #[arg(long, value_name = "JSON", value_parser = template_arguments)]
    pub(crate) chat_template_kwargs: Option<Map<String, Value>>,
}

impl DefaultsArgs {
    /// The defaults as the server has them.
    pub(crate) fn of_requests(&self) -> Defaults {
        let numbers = SAMPLER_NUMBERS.iter();
        let numbers =
            numbers.filter_map(|number| Some((number.name, self.sampler.number(number.name)?)));
        Defaults {
            numbers: numbers.collect(),
            top_k: self.sampler.top_k,
            seed: self.seed,
            max_tokens: self.max_tokens,
            template_arguments: self.chat_template_kwargs.clone().unwrap_or_default(),
        }
    }

    /// Refuses numbers that no request may have.
    ///
    /// # Errors
    ///
    /// A message that names the option and its range.
    pub(crate) fn check(&self) -> Result<(), String> {
        for (name, number) in self.of_requests().numbers {
            let of = SAMPLER_NUMBERS.iter().find(|of| of.name == name);
            let range = &of.expect("they are from there").range;
            if !range.contains(&f64::from(number)) {
                return Err(format!(
                    "--{} must be between {} and {}, not {number}",
                    name.replace('_', "-"),
                    range.start(),
                    range.end()
                ));
            }
        }
        Ok(())
    }
}

/// Which models, and which of them are loaded.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Model")]
pub(crate) struct ModelsArgs {
    /// A folder with config.json and safetensors, a GGUF file, ORG/NAME of a model in the hub cache
    /// (`paceline pull` fetches it), or the name of a bundled model; may be repeated: several models
    /// are loaded when requests name them [default: tiny-gemma4]
    #[arg(short, long, value_name = "MODEL")]
    pub(crate) model: Vec<String>,
    /// Folder of models to serve: each folder in it that holds a model, and each GGUF file
    #[arg(long, value_name = "DIR")]
    pub(crate) models_dir: Option<PathBuf>,
    /// Models that are loaded at the same time, at most: the one that was used longest ago makes room,
    /// but never one that is writing [default: as many as there is memory for]
    #[arg(long, value_name = "N")]
    pub(crate) models_max: Option<NonZeroUsize>,
    /// Memory that weights and KV caches of all loaded models may take together, such as 24GB
    /// [default: what is free]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) models_memory: Option<u64>,
    /// Unload a model that had no request for so many seconds; the next one loads it again. Ollama's
    /// `keep_alive` counts more
    #[arg(long, value_name = "SECONDS")]
    pub(crate) idle_unload: Option<u64>,
    /// Load all models when the server starts, and take no requests before
    #[arg(long)]
    pub(crate) preload: bool,
}

/// Events about the prefix cache.
#[derive(Clone, Debug, Args)]
pub(crate) struct KvEventsArgs {
    /// Publish what the prefix cache holds over ZeroMQ, as vLLM does: `tcp://*:PORT` waits for
    /// subscribers, `tcp://HOST:PORT` connects to one
    #[arg(
        long = "kv-events",
        value_name = "ENDPOINT",
        conflicts_with = "no_prefix_cache",
        help_heading = "Server"
    )]
    pub(crate) endpoint: Option<String>,
    /// Where subscribers ask for messages that they missed, such as `tcp://*:5558`
    #[arg(
        long = "kv-events-replay",
        value_name = "ENDPOINT",
        requires = "endpoint",
        help_heading = "Server"
    )]
    pub(crate) replay: Option<String>,
    /// The topic of messages; `kv@ADDRESS@MODEL` if left out
    #[arg(
        long = "kv-events-topic",
        value_name = "TOPIC",
        requires = "endpoint",
        help_heading = "Server"
    )]
    pub(crate) topic: Option<String>,
    /// How events are spelled: `map` for vLLM since June 2026 and llm-d, `array` for AIBrix and
    /// older subscribers
    #[arg(
        long = "kv-events-encoding",
        value_enum,
        default_value_t = KvEventsEncoding::Map,
        requires = "endpoint",
        help_heading = "Server"
    )]
    pub(crate) encoding: KvEventsEncoding,
}

/// How KV events are spelled, as `--kv-events-encoding` has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum KvEventsEncoding {
    Map,
    Array,
}

/// Whether the model reasons where a request does not say, as `--reasoning` has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Reasoning {
    On,
    Off,
    Auto,
}

impl Reasoning {
    /// What requests that do not say mean, if that is one or the other.
    pub(crate) fn default_of_requests(self) -> Option<bool> {
        match self {
            Reasoning::On => Some(true),
            Reasoning::Off => Some(false),
            Reasoning::Auto => None,
        }
    }
}

/// A kind of pooling by its name.
fn pooling(name: &str) -> Result<engine::Pooling, String> {
    let all = engine::Pooling::ALL.map(engine::Pooling::name);
    let refused = || match name {
        "rank" => "no model that is served here ranks documents".to_owned(),
        _ => format!("kinds of pooling are {}", all.join(", ")),
    };
    engine::Pooling::named(name).ok_or_else(refused)
}

/// A key that keeps somebody out: an empty one, of a variable that is not set, would
/// let everyone in.
fn api_key(text: &str) -> Result<String, String> {
    match text.trim() {
        "" => Err("an API key may not be empty".into()),
        key => Ok(key.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_not_empty() {
        assert_eq!(api_key(" k "), Ok("k".into()));
        assert!(api_key("").is_err() && api_key(" ").is_err());
    }
}

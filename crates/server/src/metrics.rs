//! Metrics for Prometheus.
//!
//! Names under `vllm:` are those of vLLM, so that its dashboards and benchmarks of
//! acceptance read this server unchanged; names under `paceline:` are our own. Labels come
//! from fixed sets or are limited in number, so that no client can create series.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use engine::{Counters, DrafterCounts, FinishReason, KvLayersInfo, PAGE_ROWS, RequestOutcome};

/// Most values of one label; further ones count as `other`.
const LABELS_MAX: usize = 128;

/// Upper bounds in seconds of whole requests: from a tiny model's first token to the end of a
/// long generation.
const SECONDS: [f64; 14] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0, 600.0,
];

/// Upper bounds in seconds of the time for one token: those of vLLM, and finer ones for small
/// models.
const TOKEN_SECONDS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];
/// Upper bounds in seconds of the time in the queue, the same as vLLM's.
const QUEUE_SECONDS: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
];

/// Upper bounds of numbers of tokens, the same as vLLM's: 1, 2, 5, 10, … up to `context`.
fn token_counts(context: usize) -> Vec<f64> {
    let powers = (0..u64::BITS).map_while(|n| 10_u64.checked_pow(n));
    let bounds = powers.flat_map(|power| [1, 2, 5].map(|m| m as f64 * power as f64));
    bounds
        .take_while(|&bound| bound <= context as f64)
        .collect()
}

/// A histogram: values, counted by upper bound.
#[derive(Debug)]
pub(crate) struct Histogram {
    /// The upper bounds, ascending.
    bounds: Vec<f64>,
    /// Values up to each bound and above the one before it.
    buckets: Vec<AtomicU64>,
    /// All values, those above the last bound included.
    count: AtomicU64,
    /// The sum of the values in millionths.
    millionths: AtomicU64,
}

impl Histogram {
    /// No values yet.
    fn new(bounds: &[f64]) -> Self {
        Histogram {
            bounds: bounds.to_vec(),
            buckets: bounds.iter().map(|_| AtomicU64::new(0)).collect(),
            count: AtomicU64::new(0),
            millionths: AtomicU64::new(0),
        }
    }

    /// Counts a duration in seconds.
    pub(crate) fn observe(&self, duration: Duration) {
        self.add(duration.as_secs_f64(), 1);
    }

    /// Counts `value` so many `times`.
    fn add(&self, value: f64, times: u64) {
        if let Some(bucket) = self.bounds.iter().position(|&bound| value <= bound) {
            self.buckets[bucket].fetch_add(times, Ordering::Relaxed);
        }
        self.count.fetch_add(times, Ordering::Relaxed);
        let sum = (value * 1e6 * times as f64) as u64;
        self.millionths.fetch_add(sum, Ordering::Relaxed);
    }
}

/// Counters by the value of a label.
#[derive(Debug, Default)]
pub(crate) struct Tally(Mutex<BTreeMap<String, u64>>);

impl Tally {
    /// Counts one event with this value of the label.
    pub(crate) fn count(&self, label: &str) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_known = counts.contains_key(label) || counts.len() < LABELS_MAX;
        *counts
            .entry(if is_known { label } else { "other" }.to_owned())
            .or_default() += 1;
    }

    /// The counters so far.
    fn get(&self) -> BTreeMap<String, u64> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

/// The counts of the server itself; the engine has counters of its own.
#[derive(Debug)]
pub(crate) struct Metrics {
    /// Seconds from submission to the first text.
    pub(crate) time_to_first_token: Histogram,
    /// Seconds from submission to the end.
    pub(crate) request_latency: Histogram,
    /// Seconds from one text to the next, divided by the tokens of the next.
    token_latency: Histogram,
    /// Seconds from submission to the first round.
    queue_time: Histogram,
    /// Tokens in the prompt of each request.
    prompt_tokens: Histogram,
    /// Tokens generated for each request.
    generation_tokens: Histogram,
    /// Seconds from a cancellation to the end of the request in the engine.
    pub(crate) cancel_latency: Histogram,
    /// Requests that ended, by finish reason.
    pub(crate) finished: Tally,
    /// Requests without speculation, by reason.
    pub(crate) spec_disabled: Tally,
    /// Generations that failed, by the error's code.
    pub(crate) faults: Tally,
    /// Whether the thread of the engine has ended.
    pub(crate) engine_lost: AtomicBool,
    /// Tokens that a sequence has at most.
    context: usize,
}

/// The HTTP responses of a server.
#[derive(Debug)]
pub(crate) struct Http {
    /// Those to requests for each model, by `route status`; the last are those to requests for none.
    responses: Vec<Tally>,
}

impl Http {
    /// The responses of a server of `n` models, none yet.
    pub(crate) fn new(n: usize) -> Self {
        Http {
            responses: (0..=n).map(|_| Tally::default()).collect(),
        }
    }

    /// Counts a response to a request for model `model`, if it was for one. Where there is only one,
    /// every request is for that.
    pub(crate) fn count(&self, model: Option<usize>, route: &str, status: u16) {
        let last = self.responses.len() - 1;
        let place = model.unwrap_or(if last == 1 { 0 } else { last });
        self.responses[place].count(&format!("{route} {status}"));
    }
}

/// One model, as the page counts it.
pub(crate) struct Source {
    /// The model's name, which labels its samples.
    pub(crate) model: String,
    /// Whether the model is loaded.
    pub(crate) is_loaded: bool,
    /// What the server has counted, if the model was ever loaded.
    pub(crate) metrics: Option<Arc<Metrics>>,
    /// What the engine has counted.
    pub(crate) counters: Arc<Counters>,
    /// Draft positions that have a sample.
    pub(crate) positions: usize,
    /// Drafters that have a sample, whether they have guessed yet or not.
    pub(crate) drafters: Vec<&'static str>,
    /// The formats of keys and values, if the model was ever loaded.
    pub(crate) kv: Option<KvFormats>,
}

/// The formats of a model's keys and values.
pub(crate) struct KvFormats {
    /// The name of all together, as users type it.
    pub(crate) name: String,
    /// How many layers have which.
    pub(crate) layers: Vec<KvLayersInfo>,
}

impl Metrics {
    /// Nothing counted yet. A sequence has at most `context` tokens.
    pub(crate) fn new(context: usize) -> Self {
        let tokens = token_counts(context);
        Metrics {
            time_to_first_token: Histogram::new(&SECONDS),
            request_latency: Histogram::new(&SECONDS),
            token_latency: Histogram::new(TOKEN_SECONDS),
            queue_time: Histogram::new(QUEUE_SECONDS),
            prompt_tokens: Histogram::new(&tokens),
            generation_tokens: Histogram::new(&tokens),
            cancel_latency: Histogram::new(&SECONDS),
            finished: Tally::default(),
            spec_disabled: Tally::default(),
            faults: Tally::default(),
            engine_lost: AtomicBool::new(false),
            context,
        }
    }

    /// Counts `n` tokens that took `duration` together. A round of speculation generates several
    /// at once; each counts with an equal share.
    pub(crate) fn count_tokens(&self, n: usize, duration: Duration) {
        if n > 0 {
            let share = duration.as_secs_f64() / n as f64;
            self.token_latency.add(share, n as u64);
        }
    }

    /// Counts a request that has ended.
    pub(crate) fn count_outcome(&self, outcome: &RequestOutcome) {
        let usage = &outcome.usage;
        self.queue_time.add(outcome.timings.queued_ms / 1e3, 1);
        self.prompt_tokens.add(usage.prompt_tokens as f64, 1);
        self.generation_tokens
            .add(usage.completion_tokens as f64, 1);
        self.finished.count(match outcome.finish {
            FinishReason::Stop | FinishReason::StopString(_) | FinishReason::ToolCalls => "stop",
            FinishReason::Length => "length",
            FinishReason::Cancelled => "abort",
        });
        if let Some(reason) = &outcome.speculation.reason {
            self.spec_disabled.count(reason);
        }
    }

    /// Tokens that a sequence has at most.
    pub(crate) fn context(&self) -> usize {
        self.context
    }

    /// Whether the thread of the engine has ended.
    pub(crate) fn is_engine_lost(&self) -> bool {
        self.engine_lost.load(Ordering::Relaxed)
    }
}

/// The page in Prometheus' text format. Every sample is labeled with the name of its model.
pub(crate) fn render(sources: &[Source], http: &Http) -> String {
    let mut page = Page::default();
    for series in SERIES {
        let kind = match series.value {
            Value::Gauge(_) | Value::Loaded | Value::Blocks | Value::KvLayers => "gauge",
            Value::Histogram(_) => "histogram",
            _ => "counter",
        };
        page.head(series.name, kind, series.help);
        for source in sources {
            page.model = escape(&source.model);
            page.samples(series, source);
        }
        if let Value::Responses = series.value {
            for (i, tally) in http.responses.iter().enumerate() {
                page.model = sources
                    .get(i)
                    .map_or_else(String::new, |s| escape(&s.model));
                page.responses(series.name, tally);
            }
        }
        page.end_series();
    }
    page.text
}

/// A series of the page: its name, its help text, and the source of its value.
#[derive(Clone, Copy)]
struct Series {
    name: &'static str,
    help: &'static str,
    value: Value,
}

/// The kind of a series, and the source of its value.
#[derive(Clone, Copy)]
enum Value {
    /// A number that rises and falls.
    Gauge(fn(&Counters) -> f64),
    /// A number that only rises.
    Counter(fn(&Counters) -> &AtomicU64),
    /// Seconds that only rise, from a number of microseconds.
    Seconds(fn(&Counters) -> &AtomicU64),
    /// Values by upper bound.
    Histogram(fn(&Metrics) -> &Histogram),
    /// Counters by the value of the label that is named.
    Tally(&'static str, fn(&Metrics) -> &Tally),
    /// Accepted draft tokens, a counter for each draft position.
    Positions,
    /// What drafters have guessed, a counter for each.
    Drafters(fn(&DrafterCounts) -> u64),
    /// The size, number and format of the KV cache's pages, as labels.
    Blocks,
    /// Attention layers by the formats of their keys and values.
    KvLayers,
    /// HTTP responses by route and status.
    Responses,
    /// Whether the model is loaded.
    Loaded,
}

/// Every series of the page, in the order of the page.
const SERIES: &[Series] = {
    use Value::{
        Blocks, Counter, Drafters, Gauge, Histogram, KvLayers, Loaded, Positions, Responses,
        Seconds, Tally,
    };
    const fn series(name: &'static str, help: &'static str, value: Value) -> Series {
        Series { name, help, value }
    }
    &[
        series(
            "vllm:num_requests_running",
            "Requests that run.",
            Gauge(|c| gauge(&c.running)),
        ),
        series(
            "vllm:num_requests_waiting",
            "Requests that wait.",
            Gauge(|c| gauge(&c.waiting)),
        ),
        series(
            "vllm:num_preemptions_total",
            "Times that a running request gave its memory to others, and waited.",
            Counter(|c| &c.preemptions),
        ),
        series(
            "vllm:kv_cache_usage_perc",
            "Share of the KV pages in use, 1 is all.",
            Gauge(|c| match gauge(&c.pages) {
                0.0 => 0.0,
                pages => gauge(&c.pages_used) / pages,
            }),
        ),
        series(
            "vllm:cache_config_info",
            "Rows of a KV page, how many pages there are, and the formats of keys and values.",
            Blocks,
        ),
        series(
            "paceline:kv_cache_layers",
            "Attention layers by the formats of their keys and values, and by the rows of their sliding window.",
            KvLayers,
        ),
        series(
            "vllm:prompt_tokens_total",
            "Prompt tokens.",
            Counter(|c| &c.prompt_tokens),
        ),
        series(
            "vllm:prefix_cache_queries_total",
            "Prompt tokens that were looked for in what ended requests left.",
            Counter(|c| &c.cache_queries),
        ),
        series(
            "vllm:prefix_cache_hits_total",
            "Prompt tokens that were found there.",
            Counter(|c| &c.cached_tokens),
        ),
        series(
            "vllm:mm_cache_queries_total",
            "Pictures and parts of videos, whose embeddings were looked for by their content.",
            Counter(|c| &c.media.shown),
        ),
        series(
            "vllm:mm_cache_hits_total",
            "Those whose embeddings were found.",
            Counter(|c| &c.media.known),
        ),
        series(
            "paceline:media_encoded_total",
            "Pictures and parts of videos that the vision tower has looked at.",
            Counter(|c| &c.media.encoded),
        ),
        series(
            "paceline:tower_seconds_total",
            "Seconds that the vision tower has taken.",
            Seconds(|c| &c.media.tower_micros),
        ),
        series(
            "paceline:prefix_cache_texts",
            "Ended texts in the prefix cache.",
            Gauge(|c| gauge(&c.kept_texts)),
        ),
        series(
            "paceline:prefix_cache_bytes",
            "Bytes of keys, values and states that only those texts have.",
            Gauge(|c| gauge(&c.kept_bytes)),
        ),
        series(
            "paceline:prefix_cache_evicted_texts_total",
            "Ended texts that made room, whole or in part.",
            Counter(|c| &c.evicted_texts),
        ),
        series(
            "paceline:prefix_cache_evicted_snapshots_total",
            "Snapshots that made room while their texts stayed.",
            Counter(|c| &c.evicted_snapshots),
        ),
        series(
            "paceline:prefix_cache_disk_files",
            "Texts on disk that can be read.",
            Gauge(|c| gauge(&c.disk_files)),
        ),
        series(
            "paceline:prefix_cache_disk_bytes",
            "Bytes of their files.",
            Gauge(|c| gauge(&c.disk_bytes)),
        ),
        series(
            "paceline:prefix_cache_disk_hits_total",
            "Texts that were read from disk for a request.",
            Counter(|c| &c.disk_hits),
        ),
        series(
            "paceline:prefix_cache_disk_read_bytes_total",
            "Bytes of keys, values and states that were read from disk.",
            Counter(|c| &c.disk_read_bytes),
        ),
        series(
            "paceline:prefix_cache_disk_written_bytes_total",
            "Bytes of files that were written.",
            Counter(|c| &c.disk_written_bytes),
        ),
        series(
            "paceline:prefix_cache_disk_discarded_files_total",
            "Files on disk that were damaged, or of another form.",
            Counter(|c| &c.disk_discarded_files),
        ),
        series(
            "vllm:generation_tokens_total",
            "Tokens written.",
            Counter(|c| &c.completion_tokens),
        ),
        series(
            "vllm:request_success_total",
            "Ended requests.",
            Tally("finished_reason", |m| &m.finished),
        ),
        series(
            "vllm:time_to_first_token_seconds",
            "Time to the first text.",
            Histogram(|m| &m.time_to_first_token),
        ),
        // vLLM has renamed the first to the second; dashboards ask for either.
        series(
            "vllm:time_per_output_token_seconds",
            "Time for a token after the first.",
            Histogram(|m| &m.token_latency),
        ),
        series(
            "vllm:inter_token_latency_seconds",
            "Time for a token after the first.",
            Histogram(|m| &m.token_latency),
        ),
        series(
            "vllm:request_queue_time_seconds",
            "Time in the queue.",
            Histogram(|m| &m.queue_time),
        ),
        series(
            "vllm:request_prompt_tokens",
            "Prompt tokens of a request.",
            Histogram(|m| &m.prompt_tokens),
        ),
        series(
            "vllm:request_generation_tokens",
            "Tokens written for a request.",
            Histogram(|m| &m.generation_tokens),
        ),
        series(
            "vllm:e2e_request_latency_seconds",
            "Time to the end.",
            Histogram(|m| &m.request_latency),
        ),
        series(
            "vllm:spec_decode_num_drafts_total",
            "Drafts verified.",
            Counter(|c| &c.drafts),
        ),
        series(
            "vllm:spec_decode_num_draft_tokens_total",
            "Tokens drafted.",
            Counter(|c| &c.drafted),
        ),
        series(
            "vllm:spec_decode_num_accepted_tokens_total",
            "Draft tokens accepted.",
            Counter(|c| &c.accepted),
        ),
        series(
            "vllm:spec_decode_num_accepted_tokens_per_pos_total",
            "Draft tokens accepted, by draft position.",
            Positions,
        ),
        series(
            "paceline:spec_drafter_rounds_total",
            "Rounds whose draft the drafter guessed.",
            Drafters(|d| d.rounds),
        ),
        series(
            "paceline:spec_drafter_draft_tokens_total",
            "Tokens that the drafter guessed.",
            Drafters(|d| d.drafted),
        ),
        series(
            "paceline:spec_drafter_accepted_tokens_total",
            "Tokens that the drafter guessed and that were accepted.",
            Drafters(|d| d.accepted),
        ),
        series(
            "paceline:spec_forced_draft_tokens_total",
            "Draft tokens that a grammar left no choice about; no drafter guessed them.",
            Counter(|c| &c.forced),
        ),
        series(
            "paceline:spec_forced_accepted_tokens_total",
            "Draft tokens that a grammar left no choice about and that were accepted.",
            Counter(|c| &c.forced_accepted),
        ),
        series(
            "paceline:spec_disabled_total",
            "Requests without speculation.",
            Tally("reason", |m| &m.spec_disabled),
        ),
        series(
            "paceline:requests_finished_total",
            "Requests that ended.",
            Counter(|c| &c.finished),
        ),
        series(
            "paceline:requests_cancelled_total",
            "Requests cancelled.",
            Counter(|c| &c.cancelled),
        ),
        series(
            "paceline:requests_failed_total",
            "Requests that failed.",
            Counter(|c| &c.failed),
        ),
        series(
            "paceline:request_faults_total",
            "Generations that failed.",
            Tally("code", |m| &m.faults),
        ),
        series(
            "paceline:cancel_latency_seconds",
            "From cancelling to the engine letting go.",
            Histogram(|m| &m.cancel_latency),
        ),
        series("paceline:http_responses_total", "Responses.", Responses),
        series(
            "paceline:model_loaded",
            "1 while the model is loaded.",
            Loaded,
        ),
    ]
};

/// The value of a counter that rises and falls.
fn gauge(counter: &AtomicUsize) -> f64 {
    counter.load(Ordering::Relaxed) as f64
}

/// A page in Prometheus' text format.
#[derive(Default)]
struct Page {
    text: String,
    /// The name of the model whose samples follow.
    model: String,
    /// Where the series begins, and where its samples do.
    series: (usize, usize),
}

impl Page {
    /// Begins a series.
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let begin = self.text.len();
        let _ = write!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
        self.series = (begin, self.text.len());
    }

    /// Ends a series; one of positions that has no samples was none.
    fn end_series(&mut self) {
        let (begin, samples) = self.series;
        let is_of_positions = self.text[begin..].contains("per_pos");
        if is_of_positions && self.text.len() == samples {
            self.text.truncate(begin);
        }
    }

    /// Adds a value. `labels` follow the model's label, each with a comma before it.
    fn sample(&mut self, name: &str, labels: &str, value: f64) {
        let _ = writeln!(
            self.text,
            "{name}{{model_name=\"{}\"{labels}}} {value}",
            self.model
        );
    }

    /// Adds the samples of a series that one model has.
    fn samples(&mut self, series: &Series, source: &Source) {
        let (name, counters) = (series.name, &*source.counters);
        match series.value {
            Value::Gauge(read) => self.sample(name, "", read(counters)),
            Value::Counter(of) => {
                self.sample(name, "", of(counters).load(Ordering::Relaxed) as f64);
            }
            Value::Seconds(of) => {
                let micros = of(counters).load(Ordering::Relaxed);
                self.sample(name, "", micros as f64 / 1e6);
            }
            Value::Histogram(of) => {
                if let Some(metrics) = &source.metrics {
                    self.histogram(name, of(metrics));
                }
            }
            Value::Tally(label, of) => {
                if let Some(metrics) = &source.metrics {
                    self.tally(name, label, of(metrics));
                }
            }
            Value::Positions => {
                let accepted = &counters.accepted_by_position;
                self.positions(name, &accepted[..source.positions.min(accepted.len())]);
            }
            Value::Drafters(of) => self.drafters(name, &source.drafters, counters, of),
            Value::Blocks => {
                let pages = gauge(&counters.pages);
                let dtype = source.kv.as_ref().map_or("", |kv| &kv.name);
                let labels = format!(
                    ",block_size=\"{PAGE_ROWS}\",num_gpu_blocks=\"{pages}\",cache_dtype=\"{dtype}\""
                );
                self.sample(name, &labels, 1.0);
            }
            Value::KvLayers => {
                for layers in source.kv.iter().flat_map(|kv| &kv.layers) {
                    let window = layers.window.map_or_else(String::new, |w| w.to_string());
                    let labels = format!(",format=\"{}\",window=\"{window}\"", layers.format);
                    self.sample(name, &labels, layers.layers as f64);
                }
            }
            Value::Loaded => self.sample(name, "", f64::from(u8::from(source.is_loaded))),
            Value::Responses => {}
        }
    }

    /// Adds a sample for each value of `label`.
    fn tally(&mut self, name: &str, label: &str, tally: &Tally) {
        for (value, count) in tally.get() {
            self.sample(
                name,
                &format!(",{label}=\"{}\"", escape(&value)),
                count as f64,
            );
        }
    }

    /// Adds a sample for each draft position.
    fn positions(&mut self, name: &str, counters: &[AtomicU64]) {
        for (position, counter) in counters.iter().enumerate() {
            let count = counter.load(Ordering::Relaxed);
            self.sample(name, &format!(",position=\"{position}\""), count as f64);
        }
    }

    /// Adds a sample for each of `drafters`, and for each that has guessed before: a model may have come back with
    /// others.
    fn drafters(
        &mut self,
        name: &str,
        drafters: &[&str],
        counters: &Counters,
        of: fn(&DrafterCounts) -> u64,
    ) {
        let counted = counters.by_drafter.get();
        let idle = drafters.iter().copied();
        let idle = idle.filter(|&name| counted.iter().all(|counts| counts.drafter != name));
        let counts = counted.iter().map(|c| (c.drafter.as_str(), of(c)));
        let all: BTreeMap<&str, u64> = counts.chain(idle.map(|name| (name, 0))).collect();
        for (drafter, count) in all {
            let label = format!(",drafter=\"{}\"", escape(drafter));
            self.sample(name, &label, count as f64);
        }
    }

    /// Adds a sample for each route and status.
    fn responses(&mut self, name: &str, tally: &Tally) {
        for (label, count) in tally.get() {
            let (route, status) = label.split_once(' ').unwrap_or((&label, ""));
            let labels = format!(",route=\"{}\",status=\"{}\"", escape(route), escape(status));
            self.sample(name, &labels, count as f64);
        }
    }

    /// Adds the samples of a histogram: its buckets, each with all values up to its bound, sum and
    /// count.
    fn histogram(&mut self, name: &str, histogram: &Histogram) {
        let mut below = 0;
        for (bound, bucket) in histogram.bounds.iter().zip(&histogram.buckets) {
            below += bucket.load(Ordering::Relaxed);
            self.sample(
                &format!("{name}_bucket"),
                &format!(",le=\"{bound}\""),
                below as f64,
            );
        }
        // Read after the buckets, so it is never below their sum.
        let count = histogram.count.load(Ordering::Relaxed) as f64;
        self.sample(&format!("{name}_bucket"), ",le=\"+Inf\"", count);
        self.sample(
            &format!("{name}_sum"),
            "",
            histogram.millionths.load(Ordering::Relaxed) as f64 / 1e6,
        );
        self.sample(&format!("{name}_count"), "", count);
    }
}

/// A value of a label, with escapes.
fn escape(label: &str) -> String {
    label
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

#[cfg(test)]
mod tests;

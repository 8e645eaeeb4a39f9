//! What Prometheus reads.
//!
//! Names under `vllm:` are those of vLLM, so that its dashboards and acceptance
//! benchmarks read this server unchanged; names under `paceline:` are ours.
//! Labels come from fixed sets or are bounded: a client cannot make series.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use engine::{Counters, FinishReason, RequestOutcome};

/// Different label values of one counter; what comes after is `other`.
const LABELS_MAX: usize = 128;

/// Upper bounds in seconds: a tiny model's first token to a long prompt's last.
const SECONDS: [f64; 14] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0, 600.0,
];

/// Upper bounds in seconds of the time for one token: vLLM's, and finer ones for small models.
const TOKEN_SECONDS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];
/// Upper bounds in seconds of the time in the queue, as vLLM has them.
const QUEUE_SECONDS: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
];

/// Upper bounds of counts of tokens, as vLLM has them: 1, 2, 5, 10, … up to `context`.
fn token_counts(context: usize) -> Vec<f64> {
    let powers = (0..u64::BITS).map_while(|n| 10_u64.checked_pow(n));
    let bounds = powers.flat_map(|power| [1, 2, 5].map(|m| m as f64 * power as f64));
    bounds
        .take_while(|&bound| bound <= context as f64)
        .collect()
}

/// Values, counted by upper bound.
#[derive(Debug)]
pub(crate) struct Histogram {
    bounds: Vec<f64>,
    buckets: Vec<AtomicU64>,
    count: AtomicU64,
    /// Sum of the values in millionths.
    millionths: AtomicU64,
}

impl Histogram {
    fn new(bounds: &[f64]) -> Self {
        Histogram {
            bounds: bounds.to_vec(),
            buckets: bounds.iter().map(|_| AtomicU64::new(0)).collect(),
            count: AtomicU64::new(0),
            millionths: AtomicU64::new(0),
        }
    }

    pub(crate) fn observe(&self, duration: Duration) {
        self.add(duration.as_secs_f64(), 1);
    }

    /// Counts `value` as often as `times`.
    fn add(&self, value: f64, times: u64) {
        if let Some(bucket) = self.bounds.iter().position(|&bound| value <= bound) {
            self.buckets[bucket].fetch_add(times, Ordering::Relaxed);
        }
        self.count.fetch_add(times, Ordering::Relaxed);
        let sum = (value * 1e6 * times as f64) as u64;
        self.millionths.fetch_add(sum, Ordering::Relaxed);
    }
}

/// Counters by label.
#[derive(Debug, Default)]
pub(crate) struct Tally(Mutex<BTreeMap<String, u64>>);

impl Tally {
    pub(crate) fn count(&self, label: &str) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_known = counts.contains_key(label) || counts.len() < LABELS_MAX;
        *counts
            .entry(if is_known { label } else { "other" }.to_owned())
            .or_default() += 1;
    }

    fn get(&self) -> BTreeMap<String, u64> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

/// What the server itself counts; the engine's counters come beside it.
#[derive(Debug)]
pub(crate) struct Metrics {
    /// Time from submission to the first text.
    pub(crate) time_to_first_token: Histogram,
    /// Time from submission to the end.
    pub(crate) request_latency: Histogram,
    /// Time from one text to the next, for each of its tokens.
    token_latency: Histogram,
    /// Time from submission to the first round.
    queue_time: Histogram,
    /// Tokens of each prompt.
    prompt_tokens: Histogram,
    /// Tokens written for each request.
    generation_tokens: Histogram,
    /// Time from the wish to cancel to the end of the request in the engine.
    pub(crate) cancel_latency: Histogram,
    /// Ended requests, by finish reason.
    pub(crate) finished: Tally,
    /// Requests without speculation, by reason.
    pub(crate) spec_disabled: Tally,
    /// Responses, by `route status`.
    pub(crate) responses: Tally,
    /// Generations that failed, by the error's code.
    pub(crate) faults: Tally,
    /// Whether the engine's thread is gone.
    pub(crate) engine_lost: AtomicBool,
}

impl Metrics {
    /// Nothing counted yet; sequences have at most `context` tokens.
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
            responses: Tally::default(),
            faults: Tally::default(),
            engine_lost: AtomicBool::new(false),
        }
    }

    /// Notes that `n` tokens took `duration` together. A round of speculation writes
    /// several at once; each counts with its share.
    pub(crate) fn count_tokens(&self, n: usize, duration: Duration) {
        if n > 0 {
            let share = duration.as_secs_f64() / n as f64;
            self.token_latency.add(share, n as u64);
        }
    }

    /// Notes how a request ended.
    pub(crate) fn count_outcome(&self, outcome: &RequestOutcome) {
        let usage = &outcome.usage;
        self.queue_time.add(outcome.timings.queued_ms / 1e3, 1);
        self.prompt_tokens.add(usage.prompt_tokens as f64, 1);
        self.generation_tokens
            .add(usage.completion_tokens as f64, 1);
        self.finished.count(match outcome.finish {
            FinishReason::Stop | FinishReason::StopString(_) => "stop",
            FinishReason::Length => "length",
            FinishReason::Cancelled => "abort",
        });
        if let Some(reason) = &outcome.speculation.reason {
            self.spec_disabled.count(reason);
        }
    }

    /// The page, for the engine's `counters`, the model's name and the positions of the
    /// longest drafts.
    pub(crate) fn render(&self, counters: &Counters, model: &str, positions: usize) -> String {
        let mut page = Page {
            text: String::new(),
            model: escape(model),
        };
        let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed) as f64;
        let gauge =
            |counter: &std::sync::atomic::AtomicUsize| counter.load(Ordering::Relaxed) as f64;
        page.one(
            "vllm:num_requests_running",
            "gauge",
            "Requests that run.",
            gauge(&counters.running),
        );
        page.one(
            "vllm:num_requests_waiting",
            "gauge",
            "Requests that wait.",
            gauge(&counters.waiting),
        );
        let (used, all) = (gauge(&counters.pages_used), gauge(&counters.pages));
        let share = if all > 0.0 { used / all } else { 0.0 };
        page.one(
            "vllm:kv_cache_usage_perc",
            "gauge",
            "Share of the KV pages in use, 1 is all.",
            share,
        );
        page.one(
            "vllm:prompt_tokens_total",
            "counter",
            "Prompt tokens.",
            value(&counters.prompt_tokens),
        );
        page.one(
            "vllm:prefix_cache_queries_total",
            "counter",
            "Prompt tokens that were looked for in what ended requests left.",
            value(&counters.cache_queries),
        );
        page.one(
            "vllm:prefix_cache_hits_total",
            "counter",
            "Prompt tokens that were found there.",
            value(&counters.cached_tokens),
        );
        page.one(
            "vllm:generation_tokens_total",
            "counter",
            "Tokens written.",
            value(&counters.completion_tokens),
        );
        page.tally(
            "vllm:request_success_total",
            "Ended requests.",
            "finished_reason",
            &self.finished,
        );
        page.histogram(
            "vllm:time_to_first_token_seconds",
            "Time to the first text.",
            &self.time_to_first_token,
        );
        // vLLM has renamed the first to the second; dashboards ask for either.
        for name in [
            "vllm:time_per_output_token_seconds",
            "vllm:inter_token_latency_seconds",
        ] {
            page.histogram(
                name,
                "Time for a token after the first.",
                &self.token_latency,
            );
        }
        page.histogram(
            "vllm:request_queue_time_seconds",
            "Time in the queue.",
            &self.queue_time,
        );
        page.histogram(
            "vllm:request_prompt_tokens",
            "Prompt tokens of a request.",
            &self.prompt_tokens,
        );
        page.histogram(
            "vllm:request_generation_tokens",
            "Tokens written for a request.",
            &self.generation_tokens,
        );
        page.histogram(
            "vllm:e2e_request_latency_seconds",
            "Time to the end.",
            &self.request_latency,
        );
        page.one(
            "vllm:spec_decode_num_drafts_total",
            "counter",
            "Drafts verified.",
            value(&counters.drafts),
        );
        page.one(
            "vllm:spec_decode_num_draft_tokens_total",
            "counter",
            "Tokens drafted.",
            value(&counters.drafted),
        );
        page.one(
            "vllm:spec_decode_num_accepted_tokens_total",
            "counter",
            "Draft tokens accepted.",
            value(&counters.accepted),
        );
        let name = "vllm:spec_decode_num_accepted_tokens_per_pos_total";
        let accepted = &counters.accepted_by_position;
        if positions > 0 {
            page.head(name, "counter", "Draft tokens accepted, by draft position.");
        }
        for (position, counter) in accepted.iter().enumerate().take(positions) {
            let label = format!(",position=\"{position}\"");
            page.sample(name, &label, value(counter));
        }
        page.tally(
            "paceline:spec_disabled_total",
            "Requests without speculation.",
            "reason",
            &self.spec_disabled,
        );
        page.one(
            "paceline:requests_finished_total",
            "counter",
            "Requests that ended.",
            value(&counters.finished),
        );
        page.one(
            "paceline:requests_cancelled_total",
            "counter",
            "Requests cancelled.",
            value(&counters.cancelled),
        );
        page.one(
            "paceline:requests_failed_total",
            "counter",
            "Requests that failed.",
            value(&counters.failed),
        );
        page.tally(
            "paceline:request_faults_total",
            "Generations that failed.",
            "code",
            &self.faults,
        );
        page.histogram(
            "paceline:cancel_latency_seconds",
            "From cancelling to the engine letting go.",
            &self.cancel_latency,
        );
        page.head("paceline:http_responses_total", "counter", "Responses.");
        for (label, count) in self.responses.get() {
            let (route, status) = label.split_once(' ').unwrap_or((&label, ""));
            let labels = format!(",route=\"{}\",status=\"{}\"", escape(route), escape(status));
            page.sample("paceline:http_responses_total", &labels, count as f64);
        }
        page.text
    }
}

/// A page in Prometheus' text format.
struct Page {
    text: String,
    model: String,
}

impl Page {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = write!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    /// `labels` come after the model's and start with a comma, if there are any.
    fn sample(&mut self, name: &str, labels: &str, value: f64) {
        let _ = writeln!(
            self.text,
            "{name}{{model_name=\"{}\"{labels}}} {value}",
            self.model
        );
    }

    fn one(&mut self, name: &str, kind: &str, help: &str, value: f64) {
        self.head(name, kind, help);
        self.sample(name, "", value);
    }

    fn tally(&mut self, name: &str, help: &str, label: &str, tally: &Tally) {
        self.head(name, "counter", help);
        for (value, count) in tally.get() {
            self.sample(
                name,
                &format!(",{label}=\"{}\"", escape(&value)),
                count as f64,
            );
        }
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.head(name, "histogram", help);
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

fn escape(label: &str) -> String {
    label
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_cumulative_and_labels_are_escaped() {
        let metrics = Metrics::new(100);
        for millis in [4, 20, 700_000] {
            metrics
                .time_to_first_token
                .observe(Duration::from_millis(millis));
        }
        metrics.responses.count("/health 200");
        let page = metrics.render(&Counters::default(), "a\"b", 2);
        let name = "vllm:time_to_first_token_seconds";
        for line in [
            format!("{name}_bucket{{model_name=\"a\\\"b\",le=\"0.005\"}} 1"),
            format!("{name}_bucket{{model_name=\"a\\\"b\",le=\"0.025\"}} 2"),
            format!("{name}_bucket{{model_name=\"a\\\"b\",le=\"600\"}} 2"),
            format!("{name}_bucket{{model_name=\"a\\\"b\",le=\"+Inf\"}} 3"),
            format!("{name}_sum{{model_name=\"a\\\"b\"}} 700.024"),
            "paceline:http_responses_total{model_name=\"a\\\"b\",route=\"/health\",status=\"200\"} 1".to_owned(),
            "vllm:num_requests_running{model_name=\"a\\\"b\"} 0".to_owned(),
        ] {
            assert!(page.lines().any(|l| l == line), "{line}\n{page}");
        }
        let positions = |page: &str| page.matches(",position=").count();
        assert_eq!(positions(&page), 2);
        let plain = metrics.render(&Counters::default(), "m", 0);
        assert!(!plain.contains("per_pos"), "{plain}");
    }

    #[test]
    fn tokens_count_with_their_share_and_requests_by_their_tokens() {
        let metrics = Metrics::new(100);
        metrics.count_tokens(4, Duration::from_millis(80));
        metrics.count_tokens(0, Duration::from_secs(9));
        metrics.count_tokens(1, Duration::from_millis(1));
        let outcome = RequestOutcome {
            finish: FinishReason::Stop,
            usage: engine::Usage {
                prompt_tokens: 60,
                completion_tokens: 5,
                ..engine::Usage::default()
            },
            timings: engine::Timings {
                queued_ms: 400.0,
                ..engine::Timings::default()
            },
            speculation: engine::Speculation::default(),
        };
        metrics.count_outcome(&outcome);
        let page = metrics.render(&Counters::default(), "m", 0);
        for line in [
            "vllm:inter_token_latency_seconds_bucket{model_name=\"m\",le=\"0.001\"} 1",
            "vllm:inter_token_latency_seconds_bucket{model_name=\"m\",le=\"0.01\"} 1",
            "vllm:inter_token_latency_seconds_bucket{model_name=\"m\",le=\"0.025\"} 5",
            "vllm:inter_token_latency_seconds_sum{model_name=\"m\"} 0.081",
            "vllm:time_per_output_token_seconds_count{model_name=\"m\"} 5",
            "vllm:request_queue_time_seconds_bucket{model_name=\"m\",le=\"0.3\"} 0",
            "vllm:request_queue_time_seconds_bucket{model_name=\"m\",le=\"0.5\"} 1",
            "vllm:request_prompt_tokens_bucket{model_name=\"m\",le=\"50\"} 0",
            "vllm:request_prompt_tokens_bucket{model_name=\"m\",le=\"100\"} 1",
            "vllm:request_prompt_tokens_sum{model_name=\"m\"} 60",
            "vllm:request_generation_tokens_bucket{model_name=\"m\",le=\"5\"} 1",
            "vllm:request_generation_tokens_count{model_name=\"m\"} 1",
        ] {
            assert!(page.lines().any(|l| l == line), "{line}\n{page}");
        }
        assert!(!page.contains("le=\"200\""), "the context has 100 tokens");
        let bounds = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0];
        assert_eq!(token_counts(100), bounds);
        assert_eq!(token_counts(199), bounds);
    }

    #[test]
    fn series_are_bounded() {
        let tally = Tally::default();
        for i in 0..10 * LABELS_MAX {
            tally.count(&i.to_string());
        }
        assert_eq!(tally.get().len(), LABELS_MAX + 1);
        assert_eq!(tally.get().values().sum::<u64>(), 10 * LABELS_MAX as u64);
    }
}

//! Tests of the page.

use super::*;

/// The page of one model called `name`.
fn page(metrics: Metrics, http: &Http, name: &str, positions: usize) -> String {
    let source = Source {
        model: name.to_owned(),
        is_loaded: true,
        metrics: Some(Arc::new(metrics)),
        counters: Arc::default(),
        positions,
        drafters: Vec::new(),
        kv: None,
    };
    render(&[source], http)
}

#[test]
fn several_models_share_each_series() {
    let source = |model: &str, metrics| Source {
        model: model.to_owned(),
        is_loaded: model == "a",
        metrics,
        counters: Arc::default(),
        positions: 0,
        drafters: Vec::new(),
        kv: None,
    };
    let http = Http::new(2);
    http.count(Some(1), "/v1/x", 200);
    http.count(None, "/health", 200);
    let loaded = Some(Arc::new(Metrics::new(10)));
    let page = render(&[source("a", loaded), source("b", None)], &http);
    for line in [
        "vllm:num_requests_running{model_name=\"a\"} 0",
        "vllm:num_requests_running{model_name=\"b\"} 0",
        "vllm:e2e_request_latency_seconds_count{model_name=\"a\"} 0",
        "paceline:model_loaded{model_name=\"a\"} 1",
        "paceline:model_loaded{model_name=\"b\"} 0",
        "paceline:http_responses_total{model_name=\"b\",route=\"/v1/x\",status=\"200\"} 1",
        "paceline:http_responses_total{model_name=\"\",route=\"/health\",status=\"200\"} 1",
    ] {
        assert!(page.lines().any(|l| l == line), "{line}\n{page}");
    }
    let heads: Vec<&str> = page.lines().filter(|l| l.starts_with("# TYPE")).collect();
    let once: std::collections::BTreeSet<&&str> = heads.iter().collect();
    assert_eq!(heads.len(), once.len(), "each series has one head");
    assert!(!page.contains("latency_seconds_count{model_name=\"b\"}"));
}

#[test]
fn buckets_are_cumulative_and_labels_are_escaped() {
    let metrics = Metrics::new(100);
    for millis in [4, 20, 700_000] {
        metrics
            .time_to_first_token
            .observe(Duration::from_millis(millis));
    }
    let http = Http::new(1);
    http.count(None, "/health", 200);
    let page = page(metrics, &http, "a\"b", 2);
    let name = "vllm:time_to_first_token_seconds";
    for line in [
        format!("{name}_bucket{{model_name=\"a\\\"b\",le=\"0.005\"}} 1"),
        format!("{name}_bucket{{model_name=\"a\\\"b\",le=\"0.025\"}} 2"),
        format!("{name}_bucket{{model_name=\"a\\\"b\",le=\"600\"}} 2"),
        format!("{name}_bucket{{model_name=\"a\\\"b\",le=\"+Inf\"}} 3"),
        format!("{name}_sum{{model_name=\"a\\\"b\"}} 700.024"),
        "paceline:http_responses_total{model_name=\"a\\\"b\",route=\"/health\",status=\"200\"} 1"
            .to_owned(),
        "vllm:num_requests_running{model_name=\"a\\\"b\"} 0".to_owned(),
    ] {
        assert!(page.lines().any(|l| l == line), "{line}\n{page}");
    }
    let positions = |page: &str| page.matches(",position=").count();
    assert_eq!(positions(&page), 2);
    let plain = super::tests::page(Metrics::new(100), &http, "m", 0);
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
        embedding: Vec::new(),
    };
    metrics.count_outcome(&outcome);
    let page = page(metrics, &Http::new(1), "m", 0);
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

#[test]
fn drafters_have_samples_before_they_guess() {
    let source = |drafters| Source {
        model: "m".to_owned(),
        is_loaded: true,
        metrics: None,
        counters: Arc::default(),
        positions: 3,
        drafters,
        kv: None,
    };
    let page = render(&[source(vec!["mtp", "ngram"])], &Http::new(1));
    for name in ["rounds", "draft_tokens", "accepted_tokens"] {
        for drafter in ["mtp", "ngram"] {
            let labels = format!("{{model_name=\"m\",drafter=\"{drafter}\"}}");
            let line = format!("paceline:spec_drafter_{name}_total{labels} 0");
            assert!(page.lines().any(|l| l == line), "{line}\n{page}");
        }
    }
    let plain = render(&[source(Vec::new())], &Http::new(1));
    assert!(!plain.contains(",drafter="), "{plain}");
}

#[test]
fn formats_of_keys_and_values_are_labels() {
    let layers = |format: &str, layers, window| KvLayersInfo {
        format: format.to_owned(),
        layers,
        window,
    };
    let source = Source {
        model: "m".to_owned(),
        is_loaded: true,
        metrics: None,
        counters: Arc::default(),
        positions: 0,
        drafters: Vec::new(),
        kv: Some(KvFormats {
            name: "turbo4,turbo3,protect=1".to_owned(),
            layers: vec![
                layers("turbo4,turbo3", 3, None),
                layers("q8_0", 2, Some(128)),
            ],
        }),
    };
    let page = render(&[source], &Http::new(1));
    let lines = |name: &str| {
        let lines = page.lines().filter(|line| line.starts_with(name));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    let info = lines("vllm:cache_config_info{").concat();
    assert!(
        info.contains("cache_dtype=\"turbo4,turbo3,protect=1\"}"),
        "{info}"
    );
    let layers = lines("paceline:kv_cache_layers{");
    assert_eq!(layers.len(), 2, "{page}");
    assert!(
        layers[0].ends_with(",format=\"turbo4,turbo3\",window=\"\"} 3"),
        "{layers:?}"
    );
    assert!(
        layers[1].ends_with(",format=\"q8_0\",window=\"128\"} 2"),
        "{layers:?}"
    );
}

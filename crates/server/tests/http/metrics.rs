//! What `/metrics` says of speculation: each drafter by itself, and all of them together.

use std::collections::BTreeMap;
use std::path::Path;

use engine::{DraftChoice, Source};
use serde_json::{Value, json};

use crate::client::{Server, Setup};
use crate::wire::with;

/// The values of the metric `name` by the value of its label `label`; by an empty one where samples have no such label.
fn samples(page: &str, name: &str, label: &str) -> BTreeMap<String, u64> {
    let lines = page.lines().filter_map(|line| line.strip_prefix(name));
    let sample = |rest: &str| {
        let (labels, value) = rest.strip_prefix('{')?.split_once("} ")?;
        let of = labels.split_once(&format!("{label}=\""));
        let of = of.map_or("", |(_, value)| value.split('"').next().unwrap());
        Some((of.to_owned(), value.parse().unwrap()))
    };
    lines.filter_map(sample).collect()
}

/// The value of a metric without labels of its own.
fn sum(page: &str, name: &str) -> u64 {
    samples(page, name, "none")[""]
}

/// Requests whose drafts are of all kinds: by each drafter alone and by whoever is chosen, with tokens that a
/// schema forces, ended by a stop string, by a stop token and in the middle of a draft.
fn requests() -> Vec<Value> {
    let schema = json!({
        "type": "object", "additionalProperties": false, "required": ["favorite_color", "age"],
        "properties": {"favorite_color": {"enum": ["red", "green"]}, "age": {"enum": [1, 2, 3]}},
    });
    let base = json!({
        "messages": [{"role": "user", "content": "Say it again: a fox, a fox, a fox, a fox."}],
        "max_tokens": 41, "temperature": 0, "seed": 3,
    });
    let fixed =
        |drafters: &[&str]| json!({"speculation": {"draft_fixed": 3, "drafters": drafters}});
    let mut all = Vec::new();
    for drafters in [
        &["mtp"][..],
        &["dspark"],
        &["ngram"],
        &["mtp", "dspark", "ngram"],
    ] {
        let base = with(&base, fixed(drafters));
        all.push(with(&base, json!({"ignore_eos": true})));
        all.push(with(&base, json!({"json_schema": schema})));
        all.push(with(&base, json!({"stop": [" a"], "temperature": 0.8})));
    }
    all.push(with(&base, json!({"n": 2, "temperature": 1.0})));
    all.push(with(&base, json!({"speculation": "off"})));
    all
}

/// The records of all answers to the requests, each with its request.
async fn records(server: &Server) -> Vec<(Value, Value)> {
    let mut records = Vec::new();
    for body in requests() {
        let answer = server.chat(&body).await.json();
        let choices = answer["choices"].as_array().unwrap();
        match &choices[..] {
            [_] => records.push((body, answer["speculation"].clone())),
            several => {
                let each = several.iter().map(|choice| choice["speculation"].clone());
                records.extend(each.map(|record| (body.clone(), record)));
            }
        }
    }
    records
}

#[tokio::test]
async fn drafters_and_forced_tokens_add_up_to_all_drafts() {
    let dspark = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-qwen3.5-dspark");
    let server = Server::start(Setup {
        draft: DraftChoice::Several {
            heads: vec![("mtp", None), ("dspark", Some(Source::Folder(dspark)))],
            ngrams: true,
        },
        context: 1024,
        ..Setup::default()
    })
    .await;
    let page = server.get("/metrics").await.body;
    let by_drafter = |page: &str, name: &str| {
        samples(
            page,
            &format!("paceline:spec_drafter_{name}_total"),
            "drafter",
        )
    };
    let none = ["dspark", "mtp", "ngram"].map(|name| (name.to_owned(), 0));
    for name in ["rounds", "draft_tokens", "accepted_tokens"] {
        assert_eq!(
            by_drafter(&page, name),
            BTreeMap::from(none.clone()),
            "{name}"
        );
    }

    // What records say, each counter by drafter.
    let mut told: [BTreeMap<String, u64>; 3] = Default::default();
    for (body, record) in records(&server).await {
        let (mut drafted, mut accepted) = (0, 0);
        for counts in record["by_drafter"].as_array().into_iter().flatten() {
            let of = |name: &str| counts[name].as_u64().unwrap();
            let drafter = counts["drafter"].as_str().unwrap();
            for (all, name) in told.iter_mut().zip(["rounds", "drafted", "accepted"]) {
                *all.entry(drafter.to_owned()).or_default() += of(name);
            }
            drafted += of("drafted");
            accepted += of("accepted");
        }
        let of = |name: &str| record[name].as_u64().unwrap_or(0);
        assert_eq!(drafted + of("forced"), of("drafted"), "{body}: {record}");
        assert_eq!(
            accepted + of("forced_accepted"),
            of("accepted"),
            "{body}: {record}"
        );
    }

    let page = server.get("/metrics").await.body;
    let counted = ["rounds", "draft_tokens", "accepted_tokens"].map(|name| by_drafter(&page, name));
    assert_eq!(counted, told);
    for drafter in ["mtp", "dspark", "ngram"] {
        assert!(
            counted.iter().all(|of| of[drafter] > 0),
            "{drafter}: {counted:?}"
        );
    }
    let all = |of: &BTreeMap<String, u64>| of.values().sum::<u64>();
    let [drafts, drafted, accepted] = ["drafts", "draft_tokens", "accepted_tokens"]
        .map(|name| sum(&page, &format!("vllm:spec_decode_num_{name}_total")));
    let [forced, forced_accepted] = ["draft_tokens", "accepted_tokens"]
        .map(|name| sum(&page, &format!("paceline:spec_forced_{name}_total")));
    assert!(forced > 0 && forced_accepted > 0, "{page}");
    assert_eq!(all(&counted[1]) + forced, drafted);
    assert_eq!(all(&counted[2]) + forced_accepted, accepted);
    // A draft may be forced as a whole.
    assert!(all(&counted[0]) <= drafts, "{counted:?} {drafts}");
}

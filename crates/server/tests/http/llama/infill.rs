//! `/infill`, and `suffix` of OpenAI's completions.

use serde_json::{Value, json};

use super::{ask, content, error, stream, with};
use crate::client::{Server, Setup};

const PREFIX: &str = "#include <cstdio>\n\nint main() {\n";
const SUFFIX: &str = "}\n";

fn gap(more: &Value) -> Value {
    let body =
        json!({"input_prefix": PREFIX, "input_suffix": SUFFIX, "n_predict": 8, "temperature": 0});
    with(body, more)
}

#[tokio::test]
async fn a_gap_is_filled_from_what_stands_around_it() {
    let server = Server::start(Setup::default()).await;
    let answer = ask(&server, "/infill", &gap(&json!({"prompt": "    int n = "}))).await;
    let prompt = format!("<|fim_prefix|>{PREFIX}    int n = <|fim_suffix|>{SUFFIX}<|fim_middle|>");
    assert_eq!(answer["prompt"], prompt);
    assert!(answer["tokens_predicted"].as_u64().unwrap() <= 8 && answer["content"].is_string());
    // It is what a model writes after that prompt, until a mark or the end.
    let plain = ask(
        &server,
        "/completion",
        &json!({"prompt": prompt, "n_predict": 8, "temperature": 0}),
    )
    .await;
    assert_eq!(plain["content"], answer["content"]);
    let chunks = stream(&server, "/infill", &gap(&json!({"prompt": "    int n = "}))).await;
    assert_eq!(json!(content(&chunks)), answer["content"]);
    let extra = json!([{"filename": "a.h", "text": "int n_threads();\n"}, {"text": "b"}]);
    let answer = ask(&server, "/infill", &gap(&json!({"input_extra": extra}))).await;
    let prompt = answer["prompt"].as_str().unwrap();
    let files = "<|repo_name|>project\n<|file_sep|>a.h\nint n_threads();\n<|file_sep|>other\nb<|file_sep|>file\n<|fim_prefix|>";
    assert!(prompt.starts_with(files), "{prompt}");
    let on = gap(&json!({"n_predict": 30, "return_tokens": true}));
    let off = with(on.clone(), &json!({"speculation": "off"}));
    let [on, off] = [
        ask(&server, "/infill", &on).await,
        ask(&server, "/infill", &off).await,
    ];
    assert_eq!(
        (&on["content"], &on["tokens"]),
        (&off["content"], &off["tokens"])
    );
}

#[tokio::test]
async fn what_editors_send_is_answered() {
    let server = Server::start(Setup::default()).await;
    let body = gap(&json!({
        "prompt": "    x", "n_predict": 20, "n_indent": 4, "top_k": 40, "top_p": 0.9, "stream": false,
        "samplers": ["top_k", "top_p", "infill"], "cache_prompt": true, "t_max_prompt_ms": 500,
        "t_max_predict_ms": 1000, "id_slot": 0, "stop": [],
        "response_fields": ["content", "timings/prompt_n", "timings/predicted_n", "truncated", "tokens_cached",
            "generation_settings/n_ctx"],
    }));
    let reply = server.post("/infill", &body).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    assert_eq!(
        reply.header("x-ignored-fields"),
        Some("id_slot, samplers.infill, t_max_prompt_ms")
    );
    let answer = reply.json();
    assert_eq!(answer.as_object().unwrap().len(), 5, "{answer}");
    assert!(answer["content"].is_string() && answer["timings/prompt_n"].is_u64());
}

#[tokio::test]
async fn what_does_not_fit_around_a_gap_is_left_out() {
    let server = Server::start(Setup {
        context: 128,
        ..Setup::default()
    })
    .await;
    let lines: String = (0..100).map(|n| format!("line {n}\n")).collect();
    let body = json!({"input_prefix": lines, "input_suffix": lines, "n_predict": 8,
        "input_extra": [{"text": lines}]});
    let answer = ask(&server, "/infill", &body).await;
    assert_eq!(answer["tokens_evaluated"], 120);
    let prompt = answer["prompt"].as_str().unwrap();
    assert!(
        prompt.contains("line 99\n<|fim_suffix|>line 0\n"),
        "{prompt}"
    );
}

#[tokio::test]
async fn a_completion_with_a_suffix_fills_the_gap() {
    let server = Server::start(Setup::default()).await;
    let filled = ask(&server, "/infill", &gap(&json!({}))).await;
    let body = json!({"prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 8, "temperature": 0});
    let answer = ask(&server, "/v1/completions", &body).await;
    assert_eq!(answer["choices"][0]["text"], filled["content"]);
    assert_eq!(answer["usage"]["prompt_tokens"], filled["tokens_evaluated"]);
    let several = with(body.clone(), &json!({"prompt": [PREFIX, PREFIX]}));
    let several = ask(&server, "/v1/completions", &several).await;
    assert_eq!(several["choices"][1]["text"], filled["content"]);
    let ids = with(body, &json!({"prompt": [1, 2]}));
    assert_eq!(
        server.post("/v1/completions", &ids).await.error()["param"],
        "suffix"
    );
}

#[tokio::test]
async fn what_is_no_gap_is_named_and_so_is_a_model_that_fills_none() {
    let server = Server::start(Setup::default()).await;
    for (more, param) in [
        (json!({"input_prefix": null}), "input_prefix"),
        (json!({"input_suffix": 1}), "input_suffix"),
        (json!({"prompt": 1}), "prompt"),
        (json!({"input_extra": {}}), "input_extra"),
        (json!({"input_extra": [1]}), "input_extra[0]"),
        (json!({"input_extra": [{}]}), "input_extra[0].text"),
        (
            json!({"input_extra": [{"filename": "ok"}]}),
            "input_extra[0].text",
        ),
        (
            json!({"input_extra": [{"filename": 1, "text": "a"}]}),
            "input_extra[0].filename",
        ),
        (json!({"input_extra": [{"text": 4}]}), "input_extra[0].text"),
    ] {
        let told = error(&server.post("/infill", &gap(&more)).await, 400);
        assert_eq!(told["param"], param, "{more}");
    }
    let server = Server::start(Setup {
        model: "tiny-gemma4",
        ..Setup::default()
    })
    .await;
    let told = error(&server.post("/infill", &gap(&json!({}))).await, 400);
    assert!(
        told["message"].as_str().unwrap().contains("fills no gaps"),
        "{told}"
    );
    let body = json!({"prompt": PREFIX, "suffix": SUFFIX});
    assert_eq!(
        server.post("/v1/completions", &body).await.error()["param"],
        "suffix"
    );
}

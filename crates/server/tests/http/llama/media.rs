//! Prompts with pictures, in both of llama-server's forms.

use serde_json::{Value, json};

use super::ask;
use crate::client::Server;
use crate::pictures::{blue, chat, picture, red, said, setup, words};

/// A greedy continuation of `prompt`, with the fields of `more`.
fn completion(prompt: Value, more: &Value) -> Value {
    super::with(
        json!({"prompt": prompt, "n_predict": 24, "temperature": 0}),
        more,
    )
}

#[tokio::test]
async fn a_prompt_with_pictures_is_the_same_in_every_form() {
    for model in ["tiny-gemma4-vision", "tiny-qwen3.5-vision"] {
        let server = Server::start(setup(model)).await;
        let parts = [
            words("Is "),
            picture(&red()),
            picture(&blue()),
            words(" red?"),
        ];
        let question = chat(&parts);
        let told = server.chat(&question).await;
        let text = said(&told)[0].clone();
        // The chat's prompt, with its own places of pictures, and with markers in their stead.
        let rendered = ask(&server, "/apply-template", &question).await;
        let rendered = rendered["prompt"].as_str().unwrap();
        let own = match model {
            "tiny-gemma4-vision" => "<|image|>",
            _ => "<|vision_start|><|image_pad|><|vision_end|>",
        };
        assert_eq!(rendered.matches(own).count(), 2, "{rendered}");
        let marked = rendered.replace(own, "<__media__>");
        let data = json!([red(), blue()]);
        let object = json!({"prompt_string": marked, "multimodal_data": data});
        let answer = ask(
            &server,
            "/completion",
            &completion(object.clone(), &json!({})),
        )
        .await;
        assert_eq!(answer["content"], text, "{model}: {answer}");
        let prompt_tokens = told.json()["usage"]["prompt_tokens"].clone();
        assert_eq!(answer["tokens_evaluated"], prompt_tokens, "{model}");
        // By numbers, the second first.
        let numbered = rendered
            .replacen(own, "[img-7]", 1)
            .replacen(own, "[img-10]", 1);
        let images = json!([{"data": blue(), "id": 10}, {"data": red(), "id": 7}]);
        let older = completion(json!(numbered), &json!({"image_data": images}));
        for path in ["/completion", "/completions"] {
            assert_eq!(ask(&server, path, &older).await["content"], text, "{model}");
        }
        // Several prompts, one of them without a picture.
        let several = completion(json!(["Once upon a time", object]), &json!({}));
        let answers = ask(&server, "/completion", &several).await;
        assert_eq!(answers[1]["content"], text, "{model}");
        let plain = completion(json!("Once upon a time"), &json!({}));
        let plain = ask(&server, "/completion", &plain).await;
        assert_eq!(answers[0]["content"], plain["content"]);
        // A marker that stands for nothing is text.
        let bare = completion(json!("<__media__>"), &json!({}));
        ask(&server, "/completion", &bare).await;
    }
}

#[tokio::test]
async fn pictures_without_a_place_are_refused() {
    let server = Server::start(setup("tiny-qwen3.5-vision")).await;
    let props = server.get("/props").await.json();
    assert_eq!(props["media_marker"], "<__media__>");
    let object = |text: &str, data: Value| json!({"prompt_string": text, "multimodal_data": data});
    for (body, param) in [
        (
            completion(object("a", json!([red()])), &json!({})),
            "prompt.prompt_string",
        ),
        (
            completion(object("<__media__>", json!(["AAAA"])), &json!({})),
            "prompt.multimodal_data[0]",
        ),
        (
            completion(
                json!("a"),
                &json!({"image_data": [{"data": red(), "id": 1}]}),
            ),
            "image_data[0]",
        ),
        (
            completion(
                json!([1, 2]),
                &json!({"image_data": [{"data": red(), "id": 1}]}),
            ),
            "image_data",
        ),
    ] {
        let reply = server.post("/completion", &body).await;
        assert_eq!(reply.status, 400, "{reply:?}");
        assert_eq!(reply.json()["error"]["param"], param, "{reply:?}");
    }
    let infill =
        json!({"input_prefix": "a", "input_suffix": "b", "image_data": [{"data": red(), "id": 1}]});
    let reply = server.post("/infill", &infill).await;
    assert_eq!(reply.status, 400, "{reply:?}");
}

//! Requests with pictures, to models that see and to one that does not.

use std::sync::atomic::Ordering;

use image::{ImageFormat, Rgb, RgbImage};
use serde_json::{Value, json};

use crate::client::{Reply, Server, Setup};

/// The models that see, and who drafts for them.
pub(crate) const SEEING: [(&str, &str); 2] = [
    ("tiny-gemma4-vision", "assistant"),
    ("tiny-qwen3.5-vision", "mtp"),
];

pub(crate) fn setup(model: &'static str) -> Setup {
    Setup {
        model,
        context: 1024,
        sequences: 4,
        ..Setup::default()
    }
}

/// A file with a square of `color` on white, `size` pixels a side, in base64.
pub(crate) fn drawn(color: [u8; 3], size: u32, format: ImageFormat) -> String {
    base64(&file(color, size, format))
}

/// A file with a square of `color` on white, `size` pixels a side.
pub(crate) fn file(color: [u8; 3], size: u32, format: ImageFormat) -> Vec<u8> {
    let inside = |x: u32| (size / 4..size * 3 / 4).contains(&x);
    let picture = RgbImage::from_fn(size, size, |x, y| match inside(x) && inside(y) {
        true => Rgb(color),
        false => Rgb([255; 3]),
    });
    let mut file = std::io::Cursor::new(Vec::new());
    picture.write_to(&mut file, format).unwrap();
    file.into_inner()
}

pub(crate) fn red() -> String {
    drawn([220, 30, 30], 96, ImageFormat::Png)
}

pub(crate) fn blue() -> String {
    drawn([30, 30, 220], 130, ImageFormat::Jpeg)
}

pub(crate) fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for three in bytes.chunks(3) {
        let bits = three
            .iter()
            .fold(0_u32, |n, byte| n << 8 | u32::from(*byte));
        let bits = bits << (8 * (3 - three.len()));
        for i in 0..4 {
            let digit = DIGITS[(bits >> (18 - 6 * i) & 63) as usize];
            text.push(if i <= three.len() {
                char::from(digit)
            } else {
                '='
            });
        }
    }
    text
}

pub(crate) fn picture(data: &str) -> Value {
    json!({"type": "image_url", "image_url": {"url": format!("data:image/png;base64,{data}")}})
}

pub(crate) fn words(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

pub(crate) fn chat(parts: &[Value]) -> Value {
    json!({"messages": [{"role": "user", "content": parts}], "temperature": 0, "max_tokens": 24})
}

pub(crate) fn with(body: &Value, name: &str, value: Value) -> Value {
    let mut body = body.clone();
    body[name] = value;
    body
}

/// What an answer says, and how likely each of its tokens was.
pub(crate) fn said(reply: &Reply) -> Value {
    assert_eq!(reply.status, 200, "{reply:?}");
    let choice = reply.json()["choices"][0].clone();
    json!([
        choice["message"]["content"],
        choice["logprobs"],
        choice["finish_reason"]
    ])
}

pub(crate) fn details(reply: &Reply, name: &str) -> u64 {
    let value = reply.json()["usage"]["prompt_tokens_details"][name].clone();
    value.as_u64().unwrap_or_else(|| panic!("{reply:?}"))
}

/// Pictures, and frames of videos, that the tower has looked at.
pub(crate) fn encoded(server: &Server) -> u64 {
    server
        .engine
        .counters()
        .media
        .encoded
        .load(Ordering::Relaxed)
}

/// Asks each of `asks` of a server of its own, and then all of one server at once, which says the same; that
/// server.
pub(crate) async fn same_alone_and_together(model: &'static str, asks: &[Value; 4]) -> Server {
    let mut alone = Vec::new();
    for ask in asks {
        let server = Server::start(setup(model)).await;
        alone.push(said(&server.chat(ask).await));
    }
    let server = Server::start(setup(model)).await;
    let [a, b, c, d] = asks.each_ref();
    let (a, b, c, d) = tokio::join!(
        server.chat(a),
        server.chat(b),
        server.chat(c),
        server.chat(d)
    );
    assert_eq!([a, b, c, d].each_ref().map(said).to_vec(), alone, "{model}");
    server
}

#[tokio::test]
async fn speculation_never_changes_what_is_said_of_a_picture() {
    for (model, drafter) in SEEING {
        let server = Server::start(setup(model)).await;
        let ask = chat(&[words("What is this? "), picture(&red()), words(" Say it.")]);
        let ask = with(&ask, "logprobs", json!(true));
        let drafted = server.chat(&ask).await;
        let record = drafted.json()["speculation"].clone();
        assert_eq!(record["drafter"], drafter, "{record}");
        assert!(record["drafted"].as_u64() > Some(0), "{model}: {record}");
        let plain = Server::start(setup(model)).await;
        let plain = plain.chat(&with(&ask, "speculation", json!("off"))).await;
        assert_eq!(plain.json()["speculation"]["engaged"], false);
        assert_eq!(said(&drafted), said(&plain), "{model}");
        let rows = details(&drafted, "image_tokens");
        assert!(rows > 0 && rows < drafted.json()["usage"]["prompt_tokens"].as_u64().unwrap());
        // Another picture is another question.
        let other = with(
            &ask,
            "messages",
            json!([{"role": "user", "content":
            [words("What is this? "), picture(&blue()), words(" Say it.")]}]),
        );
        assert!(
            said(&server.chat(&other).await) != said(&plain),
            "{model} sees"
        );
    }
}

#[tokio::test]
async fn a_second_question_about_a_picture_runs_no_tower() {
    for (model, _) in SEEING {
        let server = Server::start(setup(model)).await;
        let counts = &server.engine.counters().media;
        let count = || [&counts.encoded, &counts.known].map(|n| n.load(Ordering::Relaxed));
        let long = "The rabbit and the kite went to the wind and the hill. ".repeat(12);
        let before = [words(&long), picture(&red())];
        let one = chat(&[&before[..], &[words(&long)]].concat());
        let first = server.chat(&one).await;
        assert_eq!((details(&first, "cached_tokens"), count()), (0, [1, 0]));
        let two = chat(&[&before[..], &[words(&long), words("And where?")]].concat());
        let second = server.chat(&two).await;
        assert_eq!(count(), [1, 1], "{model}");
        assert!(details(&second, "cached_tokens") > details(&second, "image_tokens"));
        let cold = Server::start(setup(model)).await;
        assert_eq!(said(&cold.chat(&two).await), said(&second), "{model}");
        // The same picture in another place, beside another one.
        let both = chat(&[picture(&blue()), words("or"), picture(&red()), words("?")]);
        let both_rows = details(&server.chat(&both).await, "image_tokens");
        assert_eq!(count(), [2, 2], "{model}");
        assert!(both_rows > details(&second, "image_tokens"));
    }
}

#[tokio::test]
async fn a_picture_changes_no_text_that_is_written_beside_it() {
    for (model, _) in SEEING {
        let asks = [
            chat(&[picture(&red()), picture(&blue()), words("Which is red?")]),
            chat(&[words("Tell me a story about a rabbit.")]),
            chat(&[words("Tell me of the wind.")]),
            chat(&[words("What is a kite?")]),
        ];
        let server = same_alone_and_together(model, &asks).await;
        assert_eq!(encoded(&server), 2);
    }
}

#[tokio::test]
async fn every_api_takes_the_same_picture_for_the_same() {
    let server = Server::start(setup("tiny-qwen3.5-vision")).await;
    let said = server
        .chat(&chat(&[picture(&red()), words("What is it?")]))
        .await;
    let text = said.text();
    let anthropic = json!({"max_tokens": 24, "temperature": 0, "model": "m", "messages": [{"role": "user", "content": [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": red()}},
        {"type": "text", "text": "What is it?"}]}]});
    let reply = server.post("/v1/messages", &anthropic).await;
    assert_eq!(reply.json()["content"][0]["text"], text, "{reply:?}");
    let count = server.post("/v1/messages/count_tokens", &anthropic).await;
    assert_eq!(
        count.json()["input_tokens"],
        said.json()["usage"]["prompt_tokens"]
    );
    let url = format!("data:image/png;base64,{}", red());
    let responses = json!({"max_output_tokens": 24, "temperature": 0, "input": [{"role": "user", "content": [
        {"type": "input_image", "image_url": url}, {"type": "input_text", "text": "What is it?"}]}]});
    let reply = server.post("/v1/responses", &responses).await;
    assert_eq!(
        reply.json()["output"][0]["content"][0]["text"],
        text,
        "{reply:?}"
    );
    let options = json!({"num_predict": 24, "temperature": 0});
    let ollama = json!({"stream": false, "options": options, "messages": [
        {"role": "user", "content": "What is it?", "images": [red()]}]});
    let reply = server.post("/api/chat", &ollama).await;
    assert_eq!(reply.json()["message"]["content"], text, "{reply:?}");
    let ollama =
        json!({"stream": false, "options": options, "prompt": "What is it?", "images": [red()]});
    let reply = server.post("/api/generate", &ollama).await;
    assert_eq!(reply.json()["response"], text, "{reply:?}");
    // It has been looked at once.
    assert_eq!(encoded(&server), 1);
}

/// What a conversation says in which a tool has answered `result` with a picture: as Anthropic's API, the
/// Responses API and chat completions have it, with the number of tokens of the prompt. The fourth is what
/// a template that shows no picture of a tool makes of it.
async fn said_of_results(server: &Server, data: &str) -> [(Value, Value); 4] {
    let (asked, told) = ("What does the camera show?", "Taken at noon.");
    let source = json!({"type": "base64", "media_type": "image/png", "data": data});
    let result = json!({"type": "tool_result", "tool_use_id": "c", "content": [
        {"type": "text", "text": told}, {"type": "image", "source": source}]});
    let anthropic = json!({"max_tokens": 24, "temperature": 0, "messages": [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]},
        {"role": "user", "content": [result]}]});
    let reply = server.post("/v1/messages", &anthropic).await.json();
    let count = server.post("/v1/messages/count_tokens", &anthropic).await;
    let blocks = (
        reply["content"][0]["text"].clone(),
        count.json()["input_tokens"].clone(),
    );
    let output = json!([{"type": "input_text", "text": told},
        {"type": "input_image", "image_url": format!("data:image/png;base64,{data}")}]);
    let responses = json!({"max_output_tokens": 24, "temperature": 0, "input": [
        {"role": "user", "content": asked},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": output}]});
    let reply = server.post("/v1/responses", &responses).await.json();
    let items = (
        reply["output"][0]["content"][0]["text"].clone(),
        reply["usage"]["input_tokens"].clone(),
    );
    let call =
        json!({"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}});
    let begun = [
        json!({"role": "user", "content": asked}),
        json!({"role": "assistant", "content": null, "tool_calls": [call]}),
    ];
    let tool = |content: Value| json!({"role": "tool", "tool_call_id": "c", "content": content});
    let ends = [
        vec![tool(json!([words(told), picture(data)]))],
        vec![
            tool(json!(told)),
            json!({"role": "user", "content": [picture(data)]}),
        ],
    ];
    let mut chats = Vec::new();
    for end in ends {
        let messages = [&begun[..], &end].concat();
        let reply = server
            .chat(&json!({"max_tokens": 24, "temperature": 0, "messages": messages}))
            .await;
        let tokens = reply.json()["usage"]["prompt_tokens"].clone();
        chats.push((json!(reply.text()), tokens));
    }
    let [parts, turn] = chats.try_into().expect("two chats");
    [blocks, items, parts, turn]
}

#[tokio::test]
async fn a_picture_in_the_result_of_a_tool_is_seen_in_every_api() {
    for (model, _) in SEEING {
        let server = Server::start(setup(model)).await;
        let seen = said_of_results(&server, &red()).await;
        for other in &seen {
            assert_eq!(*other, seen[0], "{model}: {seen:?}");
        }
        // It is in the prompt, and has been looked at once.
        assert_eq!(encoded(&server), 1, "{model}");
        assert!(seen[0].0.as_str().is_some_and(|text| !text.is_empty()));
        let others = said_of_results(&server, &blue()).await;
        assert_eq!(others[1], others[0], "{model}: {others:?}");
        assert!(others[0].0 != seen[0].0, "{model} sees another picture");
        assert_eq!(encoded(&server), 2, "{model}");
    }
}

#[tokio::test]
async fn the_bytes_of_a_file_say_what_it_is() {
    let server = Server::start(setup("tiny-qwen3.5-vision")).await;
    let ask = |kind: &str| {
        let url = format!("data:{kind};base64,{}", blue());
        let part = json!({"type": "image_url", "image_url": {"url": url}});
        chat(&[part, words("What is it?")])
    };
    let want = server.chat(&ask("image/jpeg")).await;
    for wrong in ["image/png", "image/svg+xml", "video/mp4", "application/pdf"] {
        assert_eq!(
            said(&server.chat(&ask(wrong)).await),
            said(&want),
            "{wrong}"
        );
    }
    // And what it is not.
    let text = format!("data:image/png;base64,{}", base64(b"<svg></svg>"));
    let part = json!({"type": "image_url", "image_url": {"url": text}});
    let reply = server.chat(&chat(&[part])).await;
    assert_eq!(reply.status, 400, "{reply:?}");
    let message = reply.error()["message"].to_string();
    assert!(message.contains("no known format"), "{message}");
}

#[tokio::test]
async fn what_is_no_picture_is_refused_by_its_place() {
    let server = Server::start(setup("tiny-gemma4-vision")).await;
    let url = |url: &str| json!({"type": "image_url", "image_url": {"url": url}});
    let whole = red();
    let cut = &whole[..whole.len() / 2 / 4 * 4];
    let many: Vec<Value> = std::iter::repeat_with(|| picture(&red()))
        .take(33)
        .collect();
    let at = "messages[0].content[1].image_url";
    for (parts, param, told) in [
        (
            vec![words("a"), url("https://a.b/c.png")],
            at,
            "fetches nothing",
        ),
        (
            vec![words("a"), url("file:///a.png")],
            at,
            "start the server with --media-root",
        ),
        (vec![words("a"), url("a.png")], at, "names a file"),
        (vec![words("a"), url("ftp://a.b")], at, "must have the form"),
        (vec![words("a"), picture("!!!!")], at, "is not base64"),
        (vec![words("a"), picture("AAAA")], at, "no known format"),
        (vec![words("a"), picture(cut)], at, "is broken or cut off"),
        (many, "messages[0].content[32].image_url", "32 at most"),
    ] {
        let reply = server.chat(&chat(&parts)).await;
        assert_eq!(reply.status, 400, "{reply:?}");
        let error = reply.error();
        assert_eq!(error["param"], param, "{error}");
        assert!(error["message"].as_str().unwrap().contains(told), "{error}");
    }
    // What a user spells is text, whatever comes beside it.
    let spelled = chat(&[words("<|image|> and "), picture(&red())]);
    assert_eq!(server.chat(&spelled).await.status, 200);
    // More rows than the context has, found before anything runs.
    let full = vec![picture(&red()); 20];
    let reply = server.chat(&chat(&full)).await;
    assert_eq!(
        reply.error()["code"],
        "context_length_exceeded",
        "{reply:?}"
    );
    assert_eq!(encoded(&server), 1);
}

#[tokio::test]
async fn a_model_without_a_tower_says_so() {
    let blind = Server::start(setup("tiny-qwen3.5")).await;
    let reply = blind.chat(&chat(&[picture(&red()), words("?")])).await;
    assert_eq!(reply.error()["param"], "messages[0].content[0].image_url");
    let message = reply.error()["message"].to_string();
    assert!(
        message.contains("takes none: the model reads text alone"),
        "{message}"
    );
    let seeing = Server::start(setup("tiny-qwen3.5-vision")).await;
    for (server, sees) in [(&blind, false), (&seeing, true)] {
        let props = server.get("/props").await.json();
        assert_eq!(props["modalities"]["vision"], sees);
        let models = server.get("/v1/models").await.json();
        assert_eq!(models["data"][0]["meta"]["pictures"]["taken"], sees);
        let tags = server.get("/api/tags").await.json();
        let can = tags["models"][0]["capabilities"]
            .as_array()
            .unwrap()
            .clone();
        assert_eq!(can.contains(&json!("vision")), sees);
    }
}

//! Responses over a WebSocket, and conversations that become a summary.

use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use server::Keys;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::handshake::client::Request;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::{self, Message};

use super::{RESPONSES, events, hello, respond, server, weather};
use crate::client::{PATIENCE, Server, Setup};
use crate::wire::with;

/// A client on a WebSocket.
struct Client(WebSocketStream<TcpStream>);

/// The handshake for `server`.
fn handshake(server: &Server) -> Request {
    let url = format!("ws://{}{RESPONSES}", server.address);
    url.into_client_request().unwrap()
}

/// Shakes hands.
async fn try_connect(server: &Server, request: Request) -> Result<Client, tungstenite::Error> {
    let stream = TcpStream::connect(server.address).await.unwrap();
    let connected = timeout(PATIENCE, tokio_tungstenite::client_async(request, stream)).await;
    connected.unwrap().map(|(socket, _)| Client(socket))
}

async fn connect(server: &Server) -> Client {
    try_connect(server, handshake(server)).await.unwrap()
}

impl Client {
    async fn send(&mut self, message: impl Into<String>) {
        let message: String = message.into();
        self.0.send(Message::text(message)).await.unwrap();
    }

    /// The next message that is no ping.
    async fn receive(&mut self) -> Message {
        loop {
            let next = timeout(PATIENCE, self.0.next()).await.unwrap();
            match next.unwrap().unwrap() {
                Message::Ping(_) => {}
                message => return message,
            }
        }
    }

    async fn event(&mut self) -> Value {
        let message = self.receive().await;
        serde_json::from_str(message.to_text().unwrap()).unwrap()
    }

    /// The events up to the last one of a response.
    async fn events(&mut self) -> Vec<Value> {
        let mut all = vec![self.event().await];
        let last = ["response.completed", "response.incomplete", "error"];
        while !last.contains(&all[all.len() - 1]["type"].as_str().unwrap()) {
            all.push(self.event().await);
        }
        all
    }

    /// Asks for a response with these fields, and returns all of its events.
    async fn ask(&mut self, fields: &Value) -> Vec<Value> {
        let create = with(fields, json!({"type": "response.create"}));
        self.send(create.to_string()).await;
        self.events().await
    }

    /// Asks for a response, and returns it or the error.
    async fn respond(&mut self, fields: &Value) -> Value {
        let last = self.ask(fields).await.pop().unwrap();
        match last["type"].as_str() {
            Some("error") => last,
            _ => last["response"].clone(),
        }
    }
}

/// What an event says, without ids, times and what is measured.
fn plain(event: &Value) -> Value {
    match event {
        Value::Object(map) => {
            let varies = [
                "id",
                "item_id",
                "created_at",
                "completed_at",
                "timings",
                "speculation",
                "usage",
                "seed",
            ];
            let kept = map
                .iter()
                .filter(|(name, _)| !varies.contains(&name.as_str()));
            let kept = kept.map(|(name, value)| (name.clone(), plain(value)));
            Value::Object(kept.collect())
        }
        Value::Array(list) => list.iter().map(plain).collect(),
        other => other.clone(),
    }
}

/// The text deltas put together, and everything else: pieces end where a round does.
fn told(events: &[Value]) -> (String, Vec<Value>) {
    let is_delta = |event: &&Value| event["type"] == "response.output_text.delta";
    let text = events.iter().filter(is_delta);
    let text = text.map(|event| event["delta"].as_str().unwrap()).collect();
    let others = events.iter().filter(|event| !is_delta(event));
    let mut others: Vec<Value> = others.map(plain).collect();
    for event in &mut others {
        event.as_object_mut().unwrap().remove("sequence_number");
    }
    (text, others)
}

#[tokio::test]
async fn a_socket_has_the_events_of_a_stream() {
    let server = server("tiny-qwen3.5").await;
    let stream = with(&hello(), json!({"stream": true}));
    let streamed = events(&server.post(RESPONSES, &stream).await);
    let mut client = connect(&server).await;
    // The second response begins to count anew.
    for _ in 0..2 {
        let all = client.ask(&hello()).await;
        for (i, event) in all.iter().enumerate() {
            assert_eq!(event["sequence_number"], i);
        }
        assert_eq!(told(&all), told(&streamed));
    }
    // Messages that come while a response is being written have theirs afterwards, in order.
    for n in [3, 5, 2] {
        let create = json!({"type": "response.create", "max_output_tokens": n, "ignore_eos": true});
        client.send(with(&hello(), create).to_string()).await;
    }
    for n in [3, 5, 2] {
        let last = client.events().await.pop().unwrap();
        assert_eq!(last["response"]["usage"]["output_tokens"], n);
    }
}

#[tokio::test]
async fn the_last_response_of_a_socket_can_be_gone_on_from() {
    let server = server("tiny-qwen3.5").await;
    let mut client = connect(&server).await;
    let kept = json!({"store": false, "max_output_tokens": 8, "temperature": 0});
    let ask = |fields: Value| with(&kept, fields);
    let first = client.respond(&ask(json!({"input": "Hello."}))).await;
    let second = json!({"input": "And then?", "previous_response_id": first["id"]});
    let second = client.respond(&ask(second)).await;
    // The same as with everything in one request.
    let input = json!([
        {"role": "user", "content": "Hello."},
        first["output"][0],
        {"role": "user", "content": "And then?"},
    ]);
    let whole = respond(&server, &ask(json!({ "input": input }))).await;
    assert_eq!(plain(&whole["output"]), plain(&second["output"]));
    assert_eq!(
        whole["usage"]["input_tokens"],
        second["usage"]["input_tokens"]
    );
    let third = json!({"input": "And then?", "previous_response_id": second["id"]});
    let third = client.respond(&ask(third)).await;
    assert_eq!(third["previous_response_id"], second["id"]);

    // Only the last one, only here, and nothing of it is stored.
    let missing = |reply: &Value| {
        assert_eq!(reply["type"], "error", "{reply}");
        assert_eq!(reply["status"], 400);
        assert_eq!(reply["error"]["code"], "previous_response_not_found");
        assert_eq!(reply["error"]["param"], "previous_response_id");
    };
    let on = |id: &Value| ask(json!({"input": "And?", "previous_response_id": id}));
    missing(&client.respond(&on(&first["id"])).await);
    let mut other = connect(&server).await;
    missing(&other.respond(&on(&third["id"])).await);
    let path = format!("{RESPONSES}/{}", third["id"].as_str().unwrap());
    assert_eq!(server.get(&path).await.status, 404);
    // One that is stored can be gone on from everywhere.
    let stored = json!({"input": "Hi", "max_output_tokens": 4});
    let stored = other.respond(&stored).await;
    let again = client.respond(&on(&stored["id"])).await;
    assert_eq!(again["previous_response_id"], stored["id"]);
}

#[tokio::test]
async fn a_failed_continuation_ends_the_conversation_of_a_socket() {
    let server = server("tiny-qwen3.5").await;
    let mut client = connect(&server).await;
    let ask = |fields: Value| with(&json!({"store": false, "max_output_tokens": 4}), fields);
    let first = client.respond(&ask(json!({"input": "Hi"}))).await;
    let result = json!({"type": "function_call_output", "call_id": "call_none", "output": "1"});
    let no_call = json!({"input": [result], "previous_response_id": first["id"]});
    let reply = client.respond(&ask(no_call.clone())).await;
    assert_eq!(reply["status"], 400, "{reply}");
    assert_eq!(reply["error"]["param"], "input[0].call_id");
    let again = ask(json!({"input": "Hi", "previous_response_id": first["id"]}));
    let again = client.respond(&again).await;
    assert_eq!(again["error"]["code"], "previous_response_not_found");

    // A result of a call that is there goes on; over HTTP one of no call is an error as well.
    let call = json!({"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": "{}"});
    let called = json!({"input": ["Weather?", call], "tools": [weather()]});
    let mut called = ask(called);
    called["input"][0] = json!({"role": "user", "content": "Weather?"});
    let second = client.respond(&called).await;
    let result = json!({"type": "function_call_output", "call_id": "call_1", "output": "sunny"});
    let on = ask(json!({"input": [result], "previous_response_id": second["id"]}));
    assert_eq!(
        client.respond(&on).await["previous_response_id"],
        second["id"]
    );
    let stored = respond(&server, &json!({"input": "Hi", "max_output_tokens": 4})).await;
    let over_http = with(&no_call, json!({"previous_response_id": stored["id"]}));
    assert_eq!(server.post(RESPONSES, &over_http).await.status, 400);
}

#[tokio::test]
async fn a_message_that_is_wrong_is_an_error_and_the_socket_goes_on() {
    let server = server("tiny-qwen3.5").await;
    let mut client = connect(&server).await;
    for (message, param) in [
        ("no JSON".to_owned(), Value::Null),
        (json!({"type": "session.update"}).to_string(), json!("type")),
        (json!({"input": "Hi"}).to_string(), json!("type")),
        (
            json!({"type": "response.create"}).to_string(),
            json!("input"),
        ),
        (
            json!({"type": "response.create", "input": "Hi", "temperature": "hot"}).to_string(),
            json!("temperature"),
        ),
    ] {
        client.send(&message).await;
        let reply = client.event().await;
        assert_eq!(reply["type"], "error", "{message}: {reply}");
        assert_eq!(reply["status"], 400);
        assert!(reply["error"]["code"].is_string());
        assert_eq!(reply["error"]["param"], param);
    }
    let fields = json!({"input": "Hi", "generate": false});
    let prepared = client.respond(&fields).await;
    assert_eq!(prepared["usage"]["output_tokens"], 0);
    assert_eq!(client.respond(&hello()).await["status"], "incomplete");
}

#[tokio::test]
async fn a_client_that_leaves_ends_its_response() {
    let server = server("tiny-qwen3.5").await;
    let mut client = connect(&server).await;
    let long = json!({"type": "response.create", "input": "Hi", "ignore_eos": true});
    client.send(long.to_string()).await;
    assert_eq!(client.event().await["type"], "response.created");
    drop(client);
    server.until_idle().await;
}

#[tokio::test]
async fn a_shutdown_closes_idle_sockets_and_finishes_responses() {
    let mut server = server("tiny-qwen3.5").await;
    let mut idle = connect(&server).await;
    let mut busy = connect(&server).await;
    let create = json!({"type": "response.create", "max_output_tokens": 200, "ignore_eos": true});
    busy.send(with(&hello(), create).to_string()).await;
    assert_eq!(busy.event().await["type"], "response.created");
    server.stop();
    let last = busy.events().await.pop().unwrap();
    assert_eq!(last["response"]["usage"]["output_tokens"], 200);
    for client in [&mut idle, &mut busy] {
        let Message::Close(Some(close)) = client.receive().await else {
            panic!("no close");
        };
        assert_eq!(close.code, CloseCode::Away);
    }
    server.ended().await;
}

#[tokio::test]
async fn strangers_get_no_socket() {
    let mut setup = Setup::default();
    setup.config.keys = Keys::new(["secret"]);
    let server = Server::start(setup).await;
    let refused = async |name: &'static str, value: &str| {
        let mut request = handshake(&server);
        request.headers_mut().insert(name, value.parse().unwrap());
        match try_connect(&server, request).await {
            Err(tungstenite::Error::Http(response)) => Some(response.status().as_u16()),
            Err(other) => panic!("{other}"),
            Ok(_) => None,
        }
    };
    assert_eq!(refused("authorization", "Bearer wrong").await, Some(401));
    assert_eq!(refused("origin", "http://evil.example").await, Some(403));
    assert_eq!(refused("authorization", "Bearer secret").await, None);
    let plain = server
        .send(b"GET /v1/responses HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer secret\r\n\r\n")
        .await;
    assert_eq!(plain.status, 405);
}

#[tokio::test]
async fn a_conversation_becomes_a_summary_that_stands_for_it() {
    const COMPACT: &str = "/v1/responses/compact";
    let server = server("tiny-qwen3.5").await;
    let first = respond(&server, &json!({"input": "Hello.", "max_output_tokens": 4})).await;
    let compact =
        json!({"previous_response_id": first["id"], "max_output_tokens": 12, "temperature": 0});
    let reply = server.post(COMPACT, &compact).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    let window = reply.json();
    assert_eq!(window["object"], "response.compaction");
    assert_eq!(window["usage"]["output_tokens"], 12);
    let output = window["output"].as_array().unwrap();
    assert_eq!(output.len(), 1);
    let sealed = output[0]["encrypted_content"].as_str().unwrap();
    let summary = sealed.strip_prefix("paceline:").unwrap();

    // The next request reads it as a user's message.
    let user = json!({"role": "user", "content": "And?"});
    let tokens = async |input: Value| {
        let body = json!({"input": input, "max_output_tokens": 1});
        respond(&server, &body).await["usage"]["input_tokens"].clone()
    };
    let spelled = format!("A summary of the conversation so far:\n\n{summary}");
    let spelled = json!([{"role": "user", "content": spelled}, user]);
    assert_eq!(
        tokens(json!([output[0], user])).await,
        tokens(spelled).await
    );

    let mut foreign = output[0].clone();
    foreign["encrypted_content"] = json!("gAAAAA");
    let reply = server.post(RESPONSES, &json!({"input": [foreign]})).await;
    assert_eq!(reply.status, 400);
    assert_eq!(reply.error()["param"], "input[0].encrypted_content");
    for (field, value) in [("stream", json!(true)), ("input", json!(7))] {
        let body = with(&compact, json!({ field: value }));
        assert_eq!(server.post(COMPACT, &body).await.status, 400, "{field}");
    }
}

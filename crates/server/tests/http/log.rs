//! What the log says of a request, and what it never says.

use std::io::Write;
use std::sync::{Arc, Mutex, Once};

use serde_json::{Value, json};
use tokio::time::{Duration, Instant, sleep};
use tracing_subscriber::fmt::MakeWriter;

use crate::client::{PATIENCE, Server, Setup, request};

const CHAT: &str = "/v1/chat/completions";

/// The log of all tests in this process.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Log;

    fn make_writer(&'a self) -> Log {
        self.clone()
    }
}

fn log() -> Log {
    static START: Once = Once::new();
    static LOG: Mutex<Option<Log>> = Mutex::new(None);
    START.call_once(|| {
        let log = Log::default();
        *LOG.lock().unwrap() = Some(log.clone());
        tracing_subscriber::fmt()
            .with_ansi(false)
            .with_max_level(tracing::Level::INFO)
            .with_writer(log)
            .init();
    });
    LOG.lock().unwrap().clone().unwrap()
}

impl Log {
    /// The lines with the request id `id`, once one of them has `last`.
    async fn lines(&self, id: &str, last: &str) -> Vec<String> {
        let start = Instant::now();
        loop {
            let text = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
            let id = format!("id=\"{id}\"");
            let lines: Vec<String> = text
                .lines()
                .filter(|line| line.contains(&id))
                .map(str::to_owned)
                .collect();
            if lines.iter().any(|line| line.contains(last)) {
                return lines;
            }
            assert!(start.elapsed() < PATIENCE, "no {last} of {id} in {text}");
            sleep(Duration::from_millis(2)).await;
        }
    }
}

fn ask(id: &str, body: &Value) -> Vec<u8> {
    let header = format!("x-request-id: {id}\r\n");
    request(CHAT, &header, body.to_string().as_bytes())
}

#[tokio::test]
async fn a_refusal_is_logged_with_code_and_message_and_without_the_prompt() {
    let (log, server) = (log(), Server::start(Setup::default()).await);
    let secret = "xylophone-4711";
    let body = json!({"messages": [{"role": "user", "content": secret}], "tfs_z": 0.5});
    server.send(&ask("refused-1", &body)).await;
    let lines = log.lines("refused-1", "response").await;
    let line = lines
        .iter()
        .find(|line| line.contains("status=400"))
        .unwrap();
    for part in [
        "code=\"unsupported_parameter\"",
        "`tfs_z` is not supported yet",
    ] {
        assert!(line.contains(part), "{line}");
    }
    assert!(!lines.concat().contains(secret), "{lines:?}");
}

#[tokio::test]
async fn the_words_of_a_template_that_refuses_stay_out_of_the_log() {
    let template = "{{ raise_exception('not ' + messages[0].content) }}";
    let setup = Setup {
        model: crate::client::altered_in("refusing", "chat_template.jinja", template),
        ..Setup::default()
    };
    let (log, server) = (log(), Server::start(setup).await);
    let body = json!({"messages": [{"role": "user", "content": "glockenspiel-4711"}]});
    let reply = server.send(&ask("refused-2", &body)).await;
    let told = reply.error()["message"].as_str().unwrap().to_owned();
    assert!(told.contains("glockenspiel-4711"), "{told}");
    let lines = log.lines("refused-2", "status=400").await.concat();
    assert!(lines.contains("the chat template refused the messages"));
    assert!(!lines.contains("glockenspiel"), "{lines}");
}

#[tokio::test]
async fn every_line_of_a_streamed_answer_has_the_id_of_its_request() {
    let (log, server) = (log(), Server::start(Setup::default()).await);
    let body =
        json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "stream": true});
    server.send(&ask("streamed-1", &body)).await.events();
    log.lines("streamed-1", "generation ended").await;
    // A client that leaves is noticed after the handler has ended, too.
    let body = json!({"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 400, "ignore_eos": true, "stream": true});
    let mut exchange = server.open(&ask("streamed-2", &body)).await;
    exchange.until("\"content\":\"").await;
    drop(exchange);
    log.lines("streamed-2", "client went away").await;
}

#[tokio::test]
async fn ignored_fields_are_one_line_unless_they_are_known_to_be_harmless() {
    let (log, server) = (log(), Server::start(Setup::default()).await);
    let body = json!({"messages": [{"role": "user", "content": "Hi", "zz": 1}], "max_tokens": 1, "user": "u", "temprature": 1});
    server.send(&ask("ignored-1", &body)).await;
    let lines = log.lines("ignored-1", "response").await;
    let warnings: Vec<&String> = lines.iter().filter(|line| line.contains("WARN")).collect();
    assert_eq!(warnings.len(), 1, "{lines:?}");
    assert!(
        warnings[0].contains("fields=\"messages[0].zz, temprature\""),
        "{warnings:?}"
    );
    let body =
        json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "user": "u"});
    server.send(&ask("ignored-2", &body)).await;
    let lines = log.lines("ignored-2", "response").await;
    assert!(!lines.concat().contains("WARN"), "{lines:?}");
}

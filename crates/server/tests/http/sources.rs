//! Pictures and videos that requests name: at addresses of hosts that may be asked, and in a folder.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use image::ImageFormat;
use serde_json::{Value, json};
use server::{Config, Folder, Hosts, MediaSources};

use crate::client::{Server, Setup};
use crate::pictures::{
    SEEING, base64, blue, chat, encoded, file, picture, red, said, setup, words,
};
use crate::video::{gif_file, png_files, video};

/// A host that gives every request `file`, and how often it was asked.
fn host(file: Vec<u8>) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let asked = Arc::new(AtomicUsize::new(0));
    let count = asked.clone();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            while lines
                .next()
                .is_some_and(|line| !line.unwrap_or_default().is_empty())
            {}
            count.fetch_add(1, Ordering::Relaxed);
            let length = file.len();
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n");
            // Who has heard enough closes early.
            let _ = stream.write_all(&[head.as_bytes(), &file].concat());
        }
    });
    (address, asked)
}

fn square(color: [u8; 3]) -> Vec<u8> {
    file(color, 96, ImageFormat::Png)
}

fn url(url: &str) -> Value {
    json!({"type": "image_url", "image_url": {"url": url}})
}

async fn start(media: MediaSources) -> Server {
    start_with("tiny-qwen3.5-vision", media).await
}

async fn start_with(model: &'static str, media: MediaSources) -> Server {
    let config = Config {
        media,
        ..Config::default()
    };
    let setup = Setup {
        config,
        ..setup(model)
    };
    Server::start(setup).await
}

fn hosts(address: SocketAddr) -> Option<Hosts> {
    Some(Hosts::parse([address.to_string()]).unwrap())
}

/// A folder for the test `name`, with a picture.
fn folder(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("red.png"), square([220, 30, 30])).unwrap();
    folder
}

#[tokio::test]
async fn a_picture_that_is_named_is_the_same_as_one_that_is_sent() {
    let (address, asked) = host(square([220, 30, 30]));
    let folder = folder("named-pictures");
    let media = MediaSources::new(hosts(address), Some(Folder::open(&folder).unwrap()));
    let server = start(media).await;
    let ask = |part: Value| chat(&[part, words("What is it?")]);
    let sent = server.chat(&ask(picture(&red()))).await;
    let whole = folder.canonicalize().unwrap();
    for named in [
        format!("http://{address}/red.png"),
        format!("file://{}/red.png", whole.display()),
        "red.png".to_owned(),
    ] {
        let reply = server.chat(&ask(url(&named))).await;
        assert_eq!(said(&reply), said(&sent), "{named}");
    }
    // In every API that names pictures, and beside one that is sent.
    let named = format!("http://{address}/red.png");
    let anthropic = json!({"max_tokens": 24, "temperature": 0, "messages": [{"role": "user", "content": [
        {"type": "image", "source": {"type": "url", "url": named}},
        {"type": "text", "text": "What is it?"}]}]});
    let reply = server.post("/v1/messages", &anthropic).await;
    assert_eq!(reply.json()["content"][0]["text"], sent.text(), "{reply:?}");
    let responses = json!({"max_output_tokens": 24, "temperature": 0, "input": [{"role": "user", "content": [
        {"type": "input_image", "image_url": named}, {"type": "input_text", "text": "What is it?"}]}]});
    let reply = server.post("/v1/responses", &responses).await;
    let text = &reply.json()["output"][0]["content"][0]["text"];
    assert_eq!(*text, sent.text(), "{reply:?}");
    assert_eq!(asked.load(Ordering::Relaxed), 3);
    let both = server
        .chat(&chat(&[url(&named), picture(&blue()), words("?")]))
        .await;
    let sent = server
        .chat(&chat(&[picture(&red()), picture(&blue()), words("?")]))
        .await;
    assert_eq!(said(&both), said(&sent));
    // All of them are two pictures.
    assert_eq!(encoded(&server), 2);
}

#[tokio::test]
async fn a_video_that_is_named_is_the_same_as_one_that_is_sent() {
    let clip = gif_file(4, true);
    for (model, _) in SEEING {
        let (address, asked) = host(clip.clone());
        let folder = folder(&format!("named-videos-{model}"));
        std::fs::write(folder.join("kite.gif"), &clip).unwrap();
        for (i, frame) in png_files(4, true).iter().enumerate() {
            std::fs::write(folder.join(format!("{i}.png")), frame).unwrap();
        }
        let media = MediaSources::new(hosts(address), Some(Folder::open(&folder).unwrap()));
        let server = start_with(model, media).await;
        let ask = |part: Value| chat(&[part, words("What moves?")]);
        let sent = server.chat(&ask(video(&base64(&clip)))).await;
        let looks = encoded(&server);
        let whole = folder.canonicalize().unwrap();
        let file = format!("file://{}/kite.gif", whole.display());
        let fetched = format!("http://{address}/kite.gif");
        let frames: Vec<String> = (0..4).map(|i| format!("file://{i}.png")).collect();
        for part in [
            json!({"type": "video_url", "video_url": {"url": file}}),
            json!({"type": "video_url", "video_url": "kite.gif"}),
            json!({"type": "input_video", "video_url": "file://kite.gif"}),
            json!({"type": "video_url", "video_url": {"url": fetched}}),
            json!({"type": "video", "video": "kite.gif"}),
            json!({"type": "video", "video": frames, "fps": 4}),
        ] {
            let reply = server.chat(&ask(part.clone())).await;
            assert_eq!(said(&reply), said(&sent), "{model}: {part}");
        }
        let responses = json!({"max_output_tokens": 24, "temperature": 0, "input": [{"role": "user", "content": [
            {"type": "input_video", "video_url": file}, {"type": "input_text", "text": "What moves?"}]}]});
        let reply = server.post("/v1/responses", &responses).await;
        let text = &reply.json()["output"][0]["content"][0]["text"];
        assert_eq!(*text, sent.text(), "{model}: {reply:?}");
        // The tower has looked at no frame twice.
        assert_eq!(encoded(&server), looks, "{model}");
        assert_eq!(asked.load(Ordering::Relaxed), 1, "{model}");
        let outside = ask(json!({"type": "video_url", "video_url": "../kite.gif"}));
        let error = server.chat(&outside).await.error();
        assert_eq!(
            error["param"], "messages[0].content[0].video_url",
            "{error}"
        );
    }
}

#[tokio::test]
async fn what_may_not_be_named_is_refused_by_its_place() {
    let (inner, asked) = host(square([220, 30, 30]));
    let (listed, _) = host(b"no picture".to_vec());
    let folder = folder("refused-pictures");
    std::fs::write(folder.join("../beside.png"), square([1, 2, 3])).unwrap();
    let media = MediaSources::new(hosts(listed), Some(Folder::open(&folder).unwrap()));
    let server = start(media).await;
    for (named, told) in [
        (
            format!("http://{inner}/"),
            "a host that this server does not fetch from",
        ),
        (
            "http://169.254.169.254/latest".to_owned(),
            "does not fetch from",
        ),
        (
            format!("http://u:p@{listed}/"),
            "has a user name or a password",
        ),
        (format!("http://{listed}/"), "is in no known format"),
        (
            "../beside.png".to_owned(),
            "no file that this server may read",
        ),
        (
            "file:///etc/passwd".to_owned(),
            "no file that this server may read",
        ),
    ] {
        let reply = server.chat(&chat(&[words("a"), url(&named)])).await;
        assert_eq!(reply.status, 400, "{reply:?}");
        let error = reply.error();
        assert_eq!(
            error["param"], "messages[0].content[1].image_url",
            "{error}"
        );
        assert!(error["message"].as_str().unwrap().contains(told), "{error}");
    }
    assert_eq!(asked.load(Ordering::Relaxed), 0);
    // Nothing is fetched for a model that takes no pictures.
    let blind = Setup {
        config: Config {
            media: MediaSources::new(hosts(inner), None),
            ..Config::default()
        },
        ..Setup::default()
    };
    let blind = Server::start(blind).await;
    let reply = blind.chat(&chat(&[url(&format!("http://{inner}/"))])).await;
    assert!(reply.error()["message"].to_string().contains("takes none"));
    assert_eq!(asked.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn all_files_that_a_request_names_share_one_limit() {
    // Each is within the limit of a file; two of them are not.
    let mut large = square([220, 30, 30]);
    large.resize(20 << 20, 0);
    let (address, asked) = host(large);
    let server = start(MediaSources::new(hosts(address), None)).await;
    let named = url(&format!("http://{address}/"));
    let reply = server
        .chat(&chat(&[named.clone(), named.clone(), named]))
        .await;
    let error = reply.error();
    assert_eq!(
        error["param"], "messages[0].content[1].image_url",
        "{error}"
    );
    assert!(
        error["message"].to_string().contains("too large"),
        "{error}"
    );
    assert_eq!(asked.load(Ordering::Relaxed), 2);
}

#[tokio::test]
async fn who_waits_for_another_machine_holds_nobody_up() {
    // Takes connections and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap();
    let server = start(MediaSources::new(hosts(address), None)).await;
    let ask = chat(&[url(&format!("http://{address}/")), words("?")]);
    let body = ask.to_string();
    // More than there are workers for requests of this size.
    let request = crate::client::request("/v1/chat/completions", "", body.as_bytes());
    let mut waiting = Vec::new();
    for _ in 0..8 {
        waiting.push(server.open(&request).await);
    }
    let (first, _) = silent.accept().unwrap();
    let reply = server.chat(&chat(&[words("What is a kite?")])).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    drop((first, waiting));
}

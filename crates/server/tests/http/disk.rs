//! The prefix cache on disk: servers that come after each other, or stand beside each other.

use crate::client::{Server, Setup};
use crate::pictures::with;
use engine::CacheFolder;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

/// A folder of the test called `name`, with nothing in it.
fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("disk-{name}"));
    let _ = fs::remove_dir_all(&path);
    path
}

fn setup(folder: &Path) -> Setup {
    Setup {
        context: 2048,
        // Room for the snapshots of all texts of a test.
        sequences: 8,
        disk: Some(CacheFolder::open(folder, 100 << 20).unwrap()),
        ..Setup::default()
    }
}

/// The files of texts in `folder`, and their bytes.
fn files(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let all = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let texts = all.filter(|path| path.extension().is_some_and(|end| end == "kept"));
    texts
        .map(|path| (path.clone(), fs::read(path).unwrap()))
        .collect()
}

fn said(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

fn turn(messages: &[Value]) -> Value {
    json!({"messages": messages, "temperature": 0, "max_tokens": 24})
}

fn cached(body: &Value) -> u64 {
    let usage = &body["usage"];
    usage["prompt_tokens_details"]["cached_tokens"]
        .as_u64()
        .unwrap()
}

fn prompt(body: &Value) -> u64 {
    body["usage"]["prompt_tokens"].as_u64().unwrap()
}

/// A server whose engine has looked at its folder, as it has once it answers: a text that is too short to
/// be written to disk.
async fn looking(setup: Setup) -> Server {
    let server = Server::start(setup).await;
    server.chat(&turn(&[said("user", "Hello")])).await.json();
    server
}

/// Ends a server and waits until what it leaves is on disk.
async fn end(mut server: Server) {
    server.stop();
    let engine = server.engine.clone();
    server.ended().await;
    tokio::task::spawn_blocking(move || engine.stop())
        .await
        .unwrap();
}

#[tokio::test]
async fn a_conversation_outlives_the_server() {
    let folder = folder("restart");
    let long = "Tell me about the rabbit, the kite and the wind. ".repeat(150);
    let mut messages = vec![said("system", &long), said("user", "Where did it fly?")];
    let server = Server::start(setup(&folder)).await;
    let mut salted = turn(&messages);
    salted["cache_salt"] = json!("a salt that nobody may read");
    let first = server.chat(&turn(&messages)).await.json();
    assert!(prompt(&first) > 1500 && cached(&first) == 0);
    server.chat(&salted).await.json();
    end(server).await;

    let written = files(&folder);
    assert_eq!(written.len(), 2);
    for (_, bytes) in &written {
        let needle = b"a salt that nobody may read";
        assert!(!bytes.windows(needle.len()).any(|part| part == needle));
    }
    let reply = first["choices"][0]["message"]["content"].as_str().unwrap();
    messages.extend([said("assistant", reply), said("user", "And then?")]);
    let fresh = Server::start(Setup {
        context: 2048,
        ..Setup::default()
    });
    let want = fresh.await.chat(&turn(&messages)).await.json();

    let server = Server::start(setup(&folder)).await;
    // Another caller's text is nobody else's, on disk either.
    let mut other = turn(&messages);
    other["cache_salt"] = json!("another one");
    assert_eq!(cached(&server.chat(&other).await.json()), 0);
    let second = server.chat(&turn(&messages)).await.json();
    assert_eq!(second["choices"], want["choices"]);
    let (found, before) = (cached(&second), prompt(&first));
    assert!(100 * found >= 98 * before, "{found} of {before} tokens");
    salted["messages"] = json!(messages);
    assert_eq!(cached(&server.chat(&salted).await.json()), found);
    let counters = server.engine.counters();
    assert_eq!(counters.disk_hits.load(Ordering::Relaxed), 2);
    let metrics = server.get("/metrics").await.body;
    let hits = "paceline:prefix_cache_disk_hits_total{model_name=\"tiny-qwen3.5\"} 2\n";
    assert!(metrics.contains(hits), "{metrics}");
    end(server).await;
    assert!(files(&folder).len() >= 3, "second turns are written too");
}

#[tokio::test]
async fn a_damaged_file_is_removed_and_fails_no_request() {
    let folder = folder("damaged");
    let long = "The kite flew over the hill and the rabbit ran. ".repeat(20);
    let body = turn(&[said("user", &long)]);
    let server = Server::start(setup(&folder)).await;
    let want = server.chat(&body).await.json();
    end(server).await;
    let (path, whole) = files(&folder).remove(0);
    let head = u32::from_le_bytes(whole[12..16].try_into().unwrap()) as usize;
    // In the head, and in the first piece.
    for (at, is_known) in [(40, 0), (16 + head + 32 + 40, 1)] {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        fs::write(&path, &bytes).unwrap();
        let server = looking(setup(&folder)).await;
        let counters = server.engine.counters();
        assert_eq!(counters.disk_files.load(Ordering::Relaxed), is_known);
        let got = server.chat(&body).await.json();
        assert_eq!((&got["choices"], cached(&got)), (&want["choices"], 0));
        assert_eq!(counters.disk_discarded_files.load(Ordering::Relaxed), 1);
        assert!(!path.exists(), "byte {at} of {}", bytes.len());
        end(server).await;
        // It has been written anew.
        assert!(path.exists());
    }
}

#[tokio::test]
async fn texts_that_made_room_are_found_on_disk_while_the_server_runs() {
    let folder = folder("room");
    let small = || Setup {
        context: 512,
        sequences: 1,
        ..setup(&folder)
    };
    let server = Server::start(small()).await;
    let ask = |i: usize| {
        let text = format!("Story {i}: a bird, a tree and a stone by the river. ").repeat(12);
        turn(&[said("user", &text)])
    };
    let mut firsts = Vec::new();
    for i in 0..4 {
        let first = server.chat(&ask(i)).await.json();
        assert!(cached(&first) < 64, "{}", first["usage"]);
        firsts.push(first);
        // One that made room before it was copied would be lost.
        let copied = |c: &engine::Counters| c.disk_files.load(Ordering::Relaxed) > i;
        server.until("the text is copied", copied).await;
    }
    let again = server.chat(&ask(0)).await.json();
    assert_eq!(again["choices"], firsts[0]["choices"]);
    assert!(
        10 * cached(&again) >= 8 * prompt(&again),
        "{}",
        again["usage"]
    );
    let hits = server.engine.counters().disk_hits.load(Ordering::Relaxed);
    assert_eq!(hits, 1);
    end(server).await;
}

#[tokio::test]
async fn a_file_that_another_server_has_replaced_is_read() {
    let folder = folder("replaced");
    let body = turn(&[said(
        "user",
        &"One bird, two trees, three stones. ".repeat(20),
    )]);
    let undrafted = |body: &Value| with(body, "speculation", json!("off"));
    let (one, other) = (looking(setup(&folder)).await, looking(setup(&folder)).await);
    let first = one.chat(&body).await.json();
    end(one).await;
    let reader = looking(setup(&folder)).await;
    // The same text, of which the drafter has read nothing.
    let same = other.chat(&undrafted(&body)).await.json();
    assert_eq!(
        same["choices"][0]["message"],
        first["choices"][0]["message"]
    );
    end(other).await;
    assert_eq!(files(&folder).len(), 1);
    let answer = reader.chat(&undrafted(&body)).await.json();
    assert!(cached(&answer) > 0, "{}", answer["usage"]);
    end(reader).await;
}

#[tokio::test]
async fn servers_of_two_models_share_a_folder_at_the_same_time() {
    let folder = folder("shared");
    let gemma = || Setup {
        model: "tiny-gemma4",
        ..setup(&folder)
    };
    let body = turn(&[said(
        "user",
        &"One bird, two trees, three stones. ".repeat(20),
    )]);
    for round in 0..2 {
        let servers = [
            looking(gemma()).await,
            looking(setup(&folder)).await,
            looking(setup(&folder)).await,
        ];
        for server in servers {
            let answer = server.chat(&body).await.json();
            assert_eq!(cached(&answer) > 0, round == 1, "{}", answer["usage"]);
            end(server).await;
        }
        // Twins write files of equal names.
        assert_eq!(files(&folder).len(), 2);
    }
}

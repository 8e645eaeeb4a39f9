//! A model that computes NaN for one request.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::client::{Server, Setup};

const COMPLETIONS: &str = "/v1/completions";

/// A token whose per-layer embedding is NaN in the copy.
const DAMAGED: usize = 4711;

/// A copy of `tiny-gemma4-e` with one damaged row of a table that is looked up only.
fn damaged() -> &'static str {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-gemma4-e");
    let to = Path::new(env!("CARGO_TARGET_TMPDIR")).join("nan-gemma4-e");
    fs::create_dir_all(&to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
    let file = to.join("model.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let tensors: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let (_, tensor) = tensors
        .as_object()
        .unwrap()
        .iter()
        .find(|(name, _)| name.ends_with("embed_tokens_per_layer.scales"))
        .unwrap();
    assert_eq!(tensor["dtype"], "BF16");
    let row = 2 * tensor["shape"][1].as_u64().unwrap() as usize;
    let at = 8 + header + tensor["data_offsets"][0].as_u64().unwrap() as usize + DAMAGED * row;
    for value in bytes[at..at + row].chunks_exact_mut(2) {
        value.copy_from_slice(&0x7fc0u16.to_le_bytes());
    }
    fs::write(file, bytes).unwrap();
    to.to_str().unwrap().to_owned().leak()
}

#[tokio::test]
async fn a_request_for_which_the_model_computes_nan_fails_by_name_and_no_other() {
    let server = Server::start(Setup {
        model: damaged(),
        ..Setup::default()
    })
    .await;
    let ask = |prompt: Value, stream| json!({"prompt": prompt, "max_tokens": 4, "seed": 1, "stream": stream});
    let sound = json!([5, 6, 7]);
    let before = server.post(COMPLETIONS, &ask(sound.clone(), false)).await;
    assert_eq!(before.status, 200);
    let failed = server
        .post(COMPLETIONS, &ask(json!([5, DAMAGED, 7]), false))
        .await;
    assert_eq!(failed.status, 500);
    let error = failed.error();
    assert_eq!(error["code"], "model_failed");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("not a number"), "{message}");
    let events = server
        .post(COMPLETIONS, &ask(json!([5, DAMAGED, 7]), true))
        .await;
    assert!(events.body.contains("model_failed"), "{}", events.body);
    let after = server.post(COMPLETIONS, &ask(sound, false)).await;
    let text = |reply: &Value| reply["choices"][0]["text"].clone();
    assert_eq!(text(&after.json()), text(&before.json()));
}

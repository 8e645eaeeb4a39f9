//! Pictures and videos from files.

use crate::{bad, feed, folder, good, paceline, run_json, text};
use std::fs;

const SEEING: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../models/tiny-qwen3.5-vision"
);
/// Pixels of a side of a clip.
const SIDE: usize = 64;

/// A GIF of frames, in which a square moves to the right, a quarter of a second each.
fn gif(frames: usize) -> Vec<u8> {
    let side = (SIDE as u16).to_le_bytes();
    let mut file = b"GIF89a".to_vec();
    // 128 colors: white, blue, and others.
    file.extend([&side[..], &side, &[0xf6, 0, 0], &[255; 3], &[40, 84, 214]].concat());
    file.extend([0; 126 * 3]);
    for i in 0..frames {
        let left = i * (SIDE - 20) / frames;
        let is_inside = |at: usize| {
            let (x, y) = (at % SIDE, at / SIDE);
            (left..left + 20).contains(&x) && (22..42).contains(&y)
        };
        let pixels: Vec<u8> = (0..SIDE * SIDE).map(|at| is_inside(at).into()).collect();
        // Codes of eight bits, as long as a table is cleared before it grows.
        let runs = pixels.chunks(100).map(|run| [&[128], run].concat());
        let codes = [runs.collect::<Vec<_>>().concat(), vec![129]].concat();
        file.extend([0x21, 0xf9, 4, 0, 25, 0, 0, 0, 0x2c, 0, 0, 0, 0]);
        file.extend([&side[..], &side, &[0, 7]].concat());
        for block in codes.chunks(255) {
            file.push(block.len() as u8);
            file.extend(block);
        }
        file.push(0);
    }
    file.push(0x3b);
    file
}

#[test]
fn run_and_chat_show_pictures_and_videos() {
    let folder = folder("media");
    fs::write(folder.join("moves.gif"), gif(8)).unwrap();
    let ask = "What moves?";
    let model = ["-m", SEEING, "--temperature", "0"];
    let run = |shown: &[&str]| run_json(&folder, &[&[ask][..], &model, shown].concat());
    let count = |record: &serde_json::Value, name: &str| record["usage"][name].as_u64().unwrap();
    let clip = run(&["--video", "moves.gif"]);
    assert!(count(&clip, "video_tokens") > 0 && count(&clip, "picture_tokens") == 0);
    let plain = run(&["--video", "moves.gif", "--draft", "none"]);
    assert_eq!(clip["text"], plain["text"]);
    // Of an animation that is shown as a picture it is the first frame.
    let both = run(&["--video", "moves.gif", "--image", "moves.gif"]);
    assert!(count(&both, "video_tokens") > count(&both, "picture_tokens"));
    assert!(count(&both, "picture_tokens") > 0);

    let chat = [&["chat"][..], &model].concat();
    let output = feed(
        paceline(&folder, &chat),
        &format!("/video moves.gif\n{ask}\n"),
    );
    let said = clip["text"].as_str().unwrap();
    assert_eq!(text(&output.stdout), format!("{said}\n"));

    fs::write(folder.join("words.mp4"), "words").unwrap();
    let wrong = [&["run", ask, "--video", "words.mp4"][..], &model].concat();
    let error = bad(paceline(&folder, &wrong));
    assert!(error.contains("the video is in no known format"), "{error}");
    let blind = ["run", ask, "--video", "moves.gif", "-m", "tiny-qwen3.5"];
    let error = bad(paceline(&folder, &blind));
    assert!(error.contains("the model takes no video"), "{error}");
    let (help, _) = good(paceline(&folder, &["run", "--help"]));
    assert!(help.contains("--video"));
}

//! Requests with video, to models that see and to one that does not.

use std::io::Cursor;

use image::codecs::gif::GifEncoder;
use image::{Delay, ImageFormat, Rgba, RgbaImage};
use serde_json::{Value, json};

use crate::client::Server;
use crate::pictures::{
    SEEING, base64, chat, details, encoded, picture, red, said, same_alone_and_together, setup,
    with, words,
};

/// Frames a second of the clips here.
const FPS: u32 = 4;

/// Frame `i` of `n`: a square that moves to the right, or to the left.
fn frame(i: u32, n: u32, to_right: bool) -> RgbaImage {
    let at = if to_right { i } else { n - 1 - i };
    let left = 8 + at * 64 / n;
    let is_inside = |x: u32, y: u32| (left..left + 32).contains(&x) && (40..72).contains(&y);
    RgbaImage::from_fn(112, 112, |x, y| match is_inside(x, y) {
        true => Rgba([40, 84, 214, 255]),
        false => Rgba([255; 4]),
    })
}

/// A GIF of `n` frames, in base64.
fn gif(n: u32, to_right: bool) -> String {
    base64(&gif_file(n, to_right))
}

/// A GIF of `n` frames.
pub(crate) fn gif_file(n: u32, to_right: bool) -> Vec<u8> {
    let mut file = Vec::new();
    let mut encoder = GifEncoder::new(&mut file);
    for i in 0..n {
        let delay = Delay::from_numer_denom_ms(1000, FPS);
        let frame = image::Frame::from_parts(frame(i, n, to_right), 0, 0, delay);
        encoder.encode_frame(frame).unwrap();
    }
    drop(encoder);
    file
}

/// The same frames as a PNG each.
pub(crate) fn png_files(n: u32, to_right: bool) -> Vec<Vec<u8>> {
    let png = |i| {
        let mut file = Cursor::new(Vec::new());
        let frame = frame(i, n, to_right);
        frame.write_to(&mut file, ImageFormat::Png).unwrap();
        file.into_inner()
    };
    (0..n).map(png).collect()
}

pub(crate) fn video(data: &str) -> Value {
    json!({"type": "video_url", "video_url": {"url": format!("data:image/gif;base64,{data}")}})
}

#[tokio::test]
async fn speculation_never_changes_what_is_said_of_a_video() {
    for (model, drafter) in SEEING {
        let server = Server::start(setup(model)).await;
        let parts = [
            words("Look: "),
            video(&gif(8, true)),
            picture(&red()),
            words("What moves?"),
        ];
        let ask = with(&chat(&parts), "logprobs", json!(true));
        let drafted = server.chat(&ask).await;
        let record = drafted.json()["speculation"].clone();
        assert_eq!(record["drafter"], drafter, "{record}");
        assert!(record["drafted"].as_u64() > Some(0), "{model}: {record}");
        let plain = Server::start(setup(model)).await;
        let plain = plain.chat(&with(&ask, "speculation", json!("off"))).await;
        assert_eq!(said(&drafted), said(&plain), "{model}");
        let (shown, seen) = (
            details(&drafted, "video_tokens"),
            details(&drafted, "image_tokens"),
        );
        assert!(shown > seen && seen > 0, "{model}: {shown} and {seen}");
        // The other way is another video.
        let mut other = parts.clone();
        other[1] = video(&gif(8, false));
        let other = with(&chat(&other), "logprobs", json!(true));
        assert!(said(&server.chat(&other).await) != said(&plain), "{model}");
    }
}

#[tokio::test]
async fn a_video_is_the_same_in_every_form() {
    for (model, _) in SEEING {
        let server = Server::start(setup(model)).await;
        let ask = |part: &Value| {
            let ask = chat(&[part.clone(), words("What moves?")]);
            with(&ask, "logprobs", json!(true))
        };
        let want = server.chat(&ask(&video(&gif(4, true)))).await;
        let looks = encoded(&server);
        let frames: Vec<String> = png_files(4, true).iter().map(|f| base64(f)).collect();
        let listed = frames.iter();
        let listed: Vec<_> = listed
            .map(|f| format!("data:image/png;base64,{f}"))
            .collect();
        let joined = format!("data:video/jpeg;base64,{}", frames.join(","));
        let url = format!("data:image/gif;base64,{}", gif(4, true));
        for part in [
            json!({"type": "video", "video": listed, "sample_fps": "4"}),
            json!({"type": "video_url", "video_url": {"url": joined, "fps": 4}}),
            json!({"type": "video", "video": url}),
            json!({"type": "input_video", "video_url": url, "max_frames": 4}),
        ] {
            let reply = server.chat(&ask(&part)).await;
            assert_eq!(said(&reply), said(&want), "{model}: {part}");
        }
        // By a request's own field, too.
        let part = json!({"type": "video", "video": listed});
        for (name, value) in [
            ("mm_processor_kwargs", json!({"fps": 4})),
            ("media_io_kwargs", json!({"video": {"fps": 4}})),
        ] {
            let reply = server.chat(&with(&ask(&part), name, value)).await;
            assert_eq!(said(&reply), said(&want), "{model}: {name}");
        }
        let input = json!([{"role": "user", "content": [
            {"type": "input_video", "video_url": url}, {"type": "input_text", "text": "What moves?"}]}]);
        let responses = json!({"max_output_tokens": 24, "temperature": 0, "input": input});
        let reply = server.post("/v1/responses", &responses).await;
        let text = &reply.json()["output"][0]["content"][0]["text"];
        assert_eq!(*text, want.text(), "{reply:?}");
        // The tower has looked at no frame twice.
        let now = encoded(&server);
        assert_eq!((now, looks > 1), (looks, true), "{model}");
    }
}

#[tokio::test]
async fn whoever_asks_says_how_many_frames_are_looked_at() {
    for (model, _) in SEEING {
        let server = Server::start(setup(model)).await;
        let rows = async |part: &Value| {
            let reply = server.chat(&chat(&[part.clone(), words("?")])).await;
            assert_eq!(reply.status, 200, "{reply:?}");
            let prompt = reply.json()["usage"]["prompt_tokens"].as_u64();
            (details(&reply, "video_tokens"), prompt.unwrap())
        };
        let all = rows(&video(&gif(8, true))).await;
        let mut fewer = video(&gif(8, true));
        fewer["num_frames"] = json!(2);
        let two = rows(&fewer).await;
        // Qwen's frames share a number of pixels: of fewer each is larger.
        let is_other = match model.contains("gemma") {
            true => two.0 * 2 == all.0,
            false => two.0 > all.0 / 2,
        };
        assert!(two != all && is_other, "{model}: {two:?} of {all:?}");
        fewer["num_frames"] = json!(null);
        fewer["max_frames"] = json!(2);
        assert_eq!(rows(&fewer).await, two, "{model}");
    }
}

#[tokio::test]
async fn a_video_changes_no_text_that_is_written_beside_it() {
    for (model, _) in SEEING {
        let asks = [
            chat(&[video(&gif(8, true)), words("What moves?")]),
            chat(&[words("Tell me a story about a rabbit.")]),
            chat(&[video(&gif(8, false)), picture(&red()), words("What?")]),
            chat(&[words("What is a kite?")]),
        ];
        same_alone_and_together(model, &asks).await;
    }
}

#[tokio::test]
async fn what_is_no_video_is_refused_by_its_place() {
    let server = Server::start(setup("tiny-gemma4-vision")).await;
    let part = |data: &str| json!({"type": "video_url", "video_url": {"url": data}});
    let file = |data: &[u8]| part(&format!("data:video/mp4;base64,{}", base64(data)));
    let at = "messages[0].content[1].video_url";
    let short = json!({"type": "video", "video": ["data:image/png;base64,AAAA"]});
    for (bad, param, told) in [
        (part("https://a.b/c.mp4"), at, "fetches nothing"),
        (part("data:video/mp4;base64,!!!"), at, "is not base64"),
        (file(b"nothing at all"), at, "in no known format"),
        (short, "messages[0].content[1].video", "frame 0"),
        (file(b"\0\0\0\x18ftypisom\0\0\0\0"), at, ""),
    ] {
        let reply = server.chat(&chat(&[words("a"), bad])).await;
        assert_eq!(reply.status, 400, "{reply:?}");
        let error = reply.error();
        assert_eq!(error["param"], param, "{error}");
        assert!(error["message"].as_str().unwrap().contains(told), "{error}");
    }
    let many = vec![video(&gif(4, true)); 9];
    let error = server.chat(&chat(&many)).await.error();
    assert_eq!(error["param"], "messages[0].content[8].video_url");
    let ask = chat(&[video(&gif(4, true)), words("?")]);
    let ask = with(&ask, "mm_processor_kwargs", json!({"max_pixels": 9}));
    let error = server.chat(&ask).await.error();
    assert_eq!(error["param"], "mm_processor_kwargs.max_pixels");
    let blind = Server::start(setup("tiny-qwen3.5")).await;
    let reply = blind.chat(&chat(&[video(&gif(4, true)), words("?")])).await;
    let message = reply.error()["message"].to_string();
    assert!(
        message.contains("is a video, and this model takes none"),
        "{message}"
    );
    let models = server.get("/v1/models").await.json();
    let video = &models["data"][0]["meta"]["video"];
    assert_eq!(
        (&video["taken"], &video["frames_max"]),
        (&json!(true), &json!(4))
    );
}

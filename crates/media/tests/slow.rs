//! Files that would take minutes: decoding ends with its time, and so does the thread that decodes.

mod common;

use std::time::{Duration, Instant};

use common::{ByThrees, gif, progressive_jpeg, webp};
use media::{
    Limits, MediaError, VideoTools, decode, decode_clip, decode_clip_here, decode_frames,
    decode_here,
};

/// Much less than any of the files here takes.
const TIME: Duration = Duration::from_millis(200);

fn limits() -> Limits {
    Limits {
        time: TIME,
        ..Limits::default()
    }
}

/// A GIF of 3000 frames, each of 16 million pixels of which a few change.
fn large_gif() -> Vec<u8> {
    let mut file = gif(&[(9, 5); 3000]);
    file[6..10].copy_from_slice(&[0, 0x10, 0, 0x10]);
    file
}

/// An animated WebP of many small frames on a canvas of 4096 by 4096 pixels.
fn large_webp() -> Vec<u8> {
    let mut file = webp(&[(9, 50); 3000]);
    assert_eq!(&file[12..16], b"VP8X");
    file[24..30].copy_from_slice(&[0xff, 0x0f, 0, 0xff, 0x0f, 0]);
    file
}

/// A JPEG of 64 million pixels that are gone through 100 times.
fn layers() -> Vec<u8> {
    progressive_jpeg(8192, 7800, 99)
}

/// Whether a thread of this process decodes.
fn decodes() -> bool {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let mut names = tasks.filter_map(|task| {
        let name = task.ok()?.path().join("comm");
        std::fs::read_to_string(name).ok()
    });
    names.any(|name| name.trim() == "decode")
}

#[test]
fn who_waits_is_told_in_time_and_the_decoder_stops() {
    let rule = || ByThrees(1);
    let tools = VideoTools::default();
    let late = MediaError::TooSlow(TIME);
    assert_eq!(decode(layers(), &limits()), Err(late.clone()));
    for file in [large_gif(), large_webp(), layers()] {
        let clip = decode_clip(file, rule(), &limits(), &tools);
        assert_eq!(clip, Err(late.clone()));
    }
    let clip = decode_frames(vec![layers()], None, rule(), &limits());
    assert_eq!(clip, Err(late));
    if cfg!(target_os = "linux") {
        let patience = Instant::now() + Duration::from_secs(60);
        while decodes() {
            assert!(Instant::now() < patience, "a decoder goes on");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

#[test]
fn a_caller_that_decodes_itself_gets_the_same_errors() {
    let (late, tools) = (MediaError::TooSlow(TIME), VideoTools::default());
    assert_eq!(decode_here(&layers(), &limits()), Err(late.clone()));
    let clip = decode_clip_here(&large_webp(), ByThrees(1), &limits(), &tools);
    assert_eq!(clip, Err(late));
}

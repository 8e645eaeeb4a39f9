//! Files that mean harm: what they may cost is bounded before they are decoded, in memory by the
//! limits alone.

mod common;
#[path = "common/memory.rs"]
mod memory;

use common::{Bits, written};
use image::{ImageBuffer, ImageFormat, Rgb, RgbImage, Rgba};
use media::{Bound, ClipRule, Frame, Limits, MediaError, VideoTools, decode, decode_clip};
use memory::{alone, measured};

/// Files as other programs write them.
const FILES: &[(&str, &[u8], [usize; 3])] = &[
    ("cmyk.jpg", include_bytes!("files/cmyk.jpg"), [1, 16, 24]),
    (
        "progressive.jpg",
        include_bytes!("files/progressive.jpg"),
        [1, 16, 24],
    ),
    ("gray.jpg", include_bytes!("files/gray.jpg"), [1, 16, 24]),
    (
        "gray16.png",
        include_bytes!("files/gray16.png"),
        [1, 16, 24],
    ),
    (
        "palette.png",
        include_bytes!("files/palette.png"),
        [1, 16, 24],
    ),
    (
        "lossy.webp",
        include_bytes!("files/lossy.webp"),
        [1, 16, 24],
    ),
    (
        "alpha.webp",
        include_bytes!("files/alpha.webp"),
        [1, 16, 24],
    ),
    (
        "animated.webp",
        include_bytes!("files/animated.webp"),
        [3, 16, 24],
    ),
    (
        "animated.gif",
        include_bytes!("files/animated.gif"),
        [3, 16, 24],
    ),
];

/// Every frame, as it is.
struct All;

impl ClipRule for All {
    fn frames(&self, count: usize, _: Option<f64>) -> Vec<usize> {
        (0..count).collect()
    }

    fn size(&self, _: usize, height: usize, width: usize) -> Result<[usize; 2], String> {
        Ok([height, width])
    }
}

/// Programs that are not there.
fn no_tools() -> VideoTools {
    VideoTools {
        ffmpeg: "/nonexistent/ffmpeg".into(),
        ffprobe: "/nonexistent/ffprobe".into(),
    }
}

/// Limits that a bomb of a test can exceed.
fn tight() -> Limits {
    Limits {
        bytes: 4 << 20,
        side: 4096,
        pixels: 2_000_000,
        frames: 64,
        seconds: 60,
        clip_pixels: 2_000_000,
        ..Limits::default()
    }
}

/// What decoding `file` within `limits` gives, and the most memory that it took beside the file.
fn read(file: &[u8], limits: &Limits) -> (Result<Frame, MediaError>, usize) {
    let file = file.to_vec();
    measured(|| decode(file, limits))
}

/// Bytes that a decoder may take within `limits`: as the crate says, the pixels that it returns, its
/// own copy of the file, and what libraries keep of 12 bytes a pixel.
fn cage(limits: &Limits) -> usize {
    let pixels = limits.pixels.max(limits.clip_pixels) as usize;
    15 * pixels + limits.bytes + (17 << 20)
}

/// A chunk of a PNG with its checksum.
fn chunk(name: &[u8; 4], data: &[u8]) -> Vec<u8> {
    let body = [name, data].concat();
    let mut crc = u32::MAX;
    for &byte in &body {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg());
        }
    }
    let length = (data.len() as u32).to_be_bytes();
    [&length[..], &body, &(!crc).to_be_bytes()].concat()
}

/// Chunks of a PNG of 8-bit RGB, whose header promises `width` by `height` pixels.
fn png(width: u32, height: u32, chunks: &[Vec<u8>]) -> Vec<u8> {
    let size = [width.to_be_bytes(), height.to_be_bytes()].concat();
    let header = chunk(b"IHDR", &[&size[..], &[8, 2, 0, 0, 0]].concat());
    [&b"\x89PNG\r\n\x1a\n"[..], &header, &chunks.concat()].concat()
}

/// Many zeros as zlib writes them, by an encoder of the tests: of a PNG's one data chunk.
fn zeros(n: usize) -> Vec<u8> {
    let side = 4096;
    let image = RgbImage::new(side, (n / 3 / side as usize).max(1) as u32);
    let file = written(&image.into(), ImageFormat::Png);
    let mut data = Vec::new();
    let mut at = 8;
    while at < file.len() {
        let length = u32::from_be_bytes(file[at..at + 4].try_into().unwrap()) as usize;
        if &file[at + 4..at + 8] == b"IDAT" {
            data.extend_from_slice(&file[at + 8..][..length]);
        }
        at += length + 12;
    }
    data
}

#[test]
fn files_of_other_programs_are_read_whole() {
    let _alone = alone();
    for (name, file, [frames, height, width]) in FILES {
        let frame = decode(file.to_vec(), &Limits::default());
        let frame = frame.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!([frame.height(), frame.width()], [*height, *width], "{name}");
        let clip = decode_clip(file.to_vec(), All, &Limits::default(), &no_tools());
        assert_eq!(clip.unwrap().frames().len(), *frames, "{name}");
        let first = &frame.rgb()[..3];
        match *name {
            // No cyan, and all of magenta and yellow; the first frames are red, too.
            "cmyk.jpg" | "animated.webp" | "animated.gif" => {
                let is_red = first[0] > 200 && first[1] < 60 && first[2] < 60;
                assert!(is_red, "{name}: {first:?}");
            }
            "gray16.png" => {
                let last = &frame.rgb()[16 * 24 * 3 - 3..];
                assert_eq!(
                    (first, last),
                    (&[0; 3][..], &[(383 * 170 / 257) as u8; 3][..])
                );
            }
            _ => {}
        }
    }
}

#[test]
fn what_is_cut_off_takes_no_more_than_the_whole() {
    let _alone = alone();
    for (name, file, _) in FILES {
        let (whole, most) = read(file, &tight());
        whole.unwrap_or_else(|error| panic!("{name}: {error}"));
        for percent in 0..100 {
            let (cut, took) = read(&file[..file.len() * percent / 100], &tight());
            match cut {
                Err(MediaError::UnknownFormat | MediaError::Broken(_)) => {}
                // Some decoders show what there is.
                Ok(frame) => assert!(frame.height() > 0, "{name} at {percent} %"),
                Err(other) => panic!("{name} at {percent} %: {other}"),
            }
            // Another thread's name or a message may be longer.
            assert!(
                took <= most + (64 << 10),
                "{name} at {percent} %: {took} of {most}"
            );
        }
    }
}

#[test]
fn a_promise_of_too_many_pixels_costs_nothing() {
    let _alone = alone();
    let gif = |width: u16, height: u16| {
        let size = [width.to_le_bytes(), height.to_le_bytes()].concat();
        let frame = [
            &b"\x2c\0\0\0\0"[..],
            &size,
            &b"\0\x02\x02\x44\x01\0\x3b"[..],
        ]
        .concat();
        [
            &b"GIF89a"[..],
            &size,
            &b"\x80\0\0\0\0\0\xff\xff\xff"[..],
            &frame,
        ]
        .concat()
    };
    // The canvas of an animation: both sides less one, in three bytes.
    let webp = |width: u32, height: u32| {
        let mut file = include_bytes!("files/animated.webp").to_vec();
        assert_eq!(&file[12..16], b"VP8X");
        file[24..27].copy_from_slice(&(width - 1).to_le_bytes()[..3]);
        file[27..30].copy_from_slice(&(height - 1).to_le_bytes()[..3]);
        file
    };
    // A frame of 65,500 by 65,500 pixels and three components.
    let mut jpeg = include_bytes!("files/gray.jpg").to_vec();
    let at = jpeg
        .windows(2)
        .position(|pair| pair == [0xff, 0xc0])
        .unwrap();
    jpeg[at + 5..at + 9].copy_from_slice(&[0xff, 0xdc, 0xff, 0xdc]);
    for (name, file) in [
        ("a wide PNG", png(100_000, 1, &[chunk(b"IDAT", &[])])),
        ("a high PNG", png(1, 100_000, &[chunk(b"IDAT", &[])])),
        ("a large PNG", png(4000, 4000, &[chunk(b"IDAT", &[])])),
        (
            "the largest PNG",
            png(i32::MAX as u32, i32::MAX as u32, &[chunk(b"IDAT", &[])]),
        ),
        ("a wide GIF", gif(65_535, 1)),
        ("a large GIF", gif(4000, 4000)),
        ("a wide WebP", webp(100_000, 1)),
        ("a large WebP", webp(4000, 4000)),
        ("a JPEG", jpeg),
    ] {
        let (refused, took) = read(&file, &tight());
        let is_refused = matches!(
            refused,
            Err(MediaError::TooLarge {
                bound: Bound::Side | Bound::Pixels,
                ..
            })
        );
        assert!(is_refused, "{name}: {refused:?}");
        assert!(took < 1 << 20, "{name} takes {took} bytes");
    }
}

#[test]
fn a_bomb_bursts_in_its_cage() {
    let _alone = alone();
    let bomb = zeros(400 << 20);
    assert!(bomb.len() < 4 << 20, "{}", bomb.len());
    // Pixels for a hundred times as many as the header says.
    let pixels = png(1000, 1000, &[chunk(b"IDAT", &bomb), chunk(b"IEND", &[])]);
    // A color profile and a text that are bombs.
    let profile = [&b"icc\0\0"[..], &bomb].concat();
    let profile = png(
        9,
        9,
        &[
            chunk(b"iCCP", &profile),
            chunk(b"IDAT", &zeros(3)),
            chunk(b"IEND", &[]),
        ],
    );
    let text = [&b"text\0\0"[..], &bomb].concat();
    let text = png(
        9,
        9,
        &[
            chunk(b"zTXt", &text),
            chunk(b"IDAT", &zeros(3)),
            chunk(b"IEND", &[]),
        ],
    );
    // The largest pictures of one color that the limits allow, of few and of many bytes a pixel.
    let deep: ImageBuffer<Rgba<u16>, _> = ImageBuffer::new(1000, 1000);
    let clear: ImageBuffer<Rgba<u8>, _> = ImageBuffer::new(2000, 1000);
    let plain = RgbImage::from_pixel(2000, 1000, Rgb([9, 9, 9]));
    for (name, file) in [
        ("pixels", pixels),
        ("a profile", profile),
        ("a text", text),
        ("deep pixels", written(&deep.into(), ImageFormat::Png)),
        ("clear pixels", written(&clear.into(), ImageFormat::Png)),
        ("a PNG", written(&plain.clone().into(), ImageFormat::Png)),
        ("a JPEG", written(&plain.clone().into(), ImageFormat::Jpeg)),
        ("a WebP", written(&plain.clone().into(), ImageFormat::WebP)),
        ("a GIF", written(&plain.into(), ImageFormat::Gif)),
    ] {
        let (decoded, took) = read(&file, &tight());
        assert!(
            took <= cage(&tight()),
            "{name} takes {took} bytes: {decoded:?}"
        );
    }
}

/// A lossless WebP of 16 by 16 pixels, whose blocks say that there are 65,536 sets of Huffman codes. Each
/// code has eleven symbols, the last two of which have ten bits: a table of a thousand entries.
fn many_codes() -> Vec<u8> {
    let mut bits = Bits::default();
    bits.put(0x2f, 8);
    bits.put(15, 14);
    bits.put(15, 14);
    // No alpha, version 0, no transforms, no cache; more sets than one, blocks of 4 by 4 pixels.
    bits.put(0, 6);
    bits.put(1, 1);
    bits.put(0, 3);
    // The picture of their numbers, without a cache: green and red are 255, all else is 0.
    bits.put(0, 1);
    for symbol in [255u64, 255, 0, 0, 0] {
        bits.put(0b101 | symbol << 3, 11);
    }
    let mut code = Bits::default();
    code.put(0, 1);
    code.put(10, 4);
    // The code of lengths: those of 17, 18, 0, 1 to 5, 16, 6, 7 to 10.
    for length in [0, 0, 0, 3, 3, 3, 3, 3, 0, 3, 4, 4, 4, 4] {
        code.put(length, 3);
    }
    // Eleven lengths, each as its code of three or four bits, the highest first.
    code.put(0b0011, 4);
    code.put(9, 4);
    for length in [1u64, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10] {
        let (value, n) = match length {
            ..=6 => (length - 1, 3),
            _ => (length - 7 + 0b1100, 4),
        };
        code.put(value.reverse_bits() >> (64 - n), n);
    }
    let mut data = bits;
    for _ in 0..5 * 65_536 {
        data.append(&code);
    }
    let data = data.bytes();
    let length = |n: usize| (n as u32).to_le_bytes();
    let chunk = [&b"VP8L"[..], &length(data.len()), &data].concat();
    [&b"RIFF"[..], &length(chunk.len() + 4), b"WEBP", &chunk].concat()
}

/// A file that fuzzing has found: `image-webp` 0.2.4 panics at a lossy picture with transparency in a frame of another size.
#[test]
fn a_picture_of_another_size_than_its_frame_is_refused() {
    let file = include_bytes!("broken/frame-of-another-size.webp");
    let error = media::decode_here(file, &Limits::default()).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("another size than its frame"), "{error}");
}

#[test]
fn huffman_codes_that_few_bytes_ask_for_cost_nothing() {
    let _alone = alone();
    let file = many_codes();
    assert!(file.len() < 4 << 20, "{}", file.len());
    let (decoded, took) = read(&file, &tight());
    let error = decoded.unwrap_err().to_string();
    assert!(error.contains("65536 sets of Huffman codes"), "{error}");
    assert!(took < file.len() + (1 << 20), "{took}");
}

#[test]
fn clips_that_are_cut_off_take_no_more_than_the_whole() {
    let _alone = alone();
    let read = |file: Vec<u8>| measured(|| decode_clip(file, All, &tight(), &no_tools()));
    let lossless = common::webp(&[(10, 50), (200, 50), (90, 100), (7, 50)]);
    let files = FILES.iter().map(|(name, file, _)| (*name, file.to_vec()));
    for (name, file) in files.chain([("lossless.webp", lossless)]) {
        let (whole, most) = read(file.clone());
        let whole = whole.unwrap_or_else(|error| panic!("{name}: {error}"));
        for percent in 0..100 {
            let (cut, took) = read(file[..file.len() * percent / 100].to_vec());
            match cut {
                Err(MediaError::UnknownClip | MediaError::Broken(_)) => {}
                Ok(clip) => assert!(clip.frames().len() <= whole.frames().len(), "{name}"),
                Err(other) => panic!("{name} at {percent} %: {other}"),
            }
            assert!(
                took <= most + (64 << 10),
                "{name} at {percent} %: {took} of {most}"
            );
        }
    }
}

#[test]
fn deep_pixels_count_for_more() {
    let _alone = alone();
    let deep: ImageBuffer<Rgba<u16>, Vec<u16>> = ImageBuffer::new(100, 60);
    let file = written(&deep.into(), ImageFormat::Png);
    let limits = |pixels| Limits {
        pixels,
        ..Limits::default()
    };
    assert!(decode(file.clone(), &limits(12_000)).is_ok());
    let expected = MediaError::TooLarge {
        bound: Bound::Pixels,
        most: 11_999,
        found: 12_000,
    };
    assert_eq!(decode(file, &limits(11_999)), Err(expected));
}

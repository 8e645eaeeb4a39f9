//! Files for the tests of clips.

#![allow(dead_code)]

use std::io::Cursor;

use image::codecs::gif::{GifEncoder, Repeat};
use image::codecs::webp::WebPEncoder;
use image::{Delay, ExtendedColorType, ImageEncoder, ImageFormat, Rgb, RgbImage, Rgba, RgbaImage};
use media::{ClipRule, Frame};

/// Every frame whose number is a multiple of this, as it is; 0 takes no size.
pub(crate) struct ByThrees(pub(crate) usize);

impl ClipRule for ByThrees {
    fn frames(&self, count: usize, _: Option<f64>) -> Vec<usize> {
        (0..count).step_by(self.0.max(1)).collect()
    }

    fn size(&self, _: usize, height: usize, width: usize) -> Result<[usize; 2], String> {
        match self.0 {
            0 => Err("no size".to_owned()),
            _ => Ok([height, width]),
        }
    }
}

/// A frame of one gray.
pub(crate) fn gray_frame(height: usize, width: usize, gray: u8) -> Frame {
    Frame::new(height, width, vec![gray; height * width * 3])
}

/// A PNG of one gray.
pub(crate) fn png(width: u32, height: u32, gray: u8) -> Vec<u8> {
    let mut bytes = Cursor::new(Vec::new());
    let image = RgbImage::from_pixel(width, height, Rgb([gray; 3]));
    image.write_to(&mut bytes, ImageFormat::Png).unwrap();
    bytes.into_inner()
}

/// A GIF of frames of one gray each, and how many hundredths of a second each is shown.
pub(crate) fn gif(frames: &[(u8, u32)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = GifEncoder::new(&mut bytes);
    encoder.set_repeat(Repeat::Infinite).unwrap();
    for &(gray, hundredths) in frames {
        let image = RgbaImage::from_pixel(20, 10, Rgba([gray, gray, gray, 255]));
        let delay = Delay::from_numer_denom_ms(hundredths * 10, 1);
        let frame = image::Frame::from_parts(image, 0, 0, delay);
        encoder.encode_frame(frame).unwrap();
    }
    drop(encoder);
    bytes
}

/// An animated WebP of frames of one gray each, and how many milliseconds each is shown.
pub(crate) fn webp(frames: &[(u8, u32)]) -> Vec<u8> {
    let chunk = |name: &[u8; 4], data: &[u8]| {
        let mut chunk = name.to_vec();
        chunk.extend((data.len() as u32).to_le_bytes());
        chunk.extend(data);
        chunk.resize(chunk.len().next_multiple_of(2), 0);
        chunk
    };
    let (width, height) = (20u32, 10u32);
    let three = |n: u32| n.to_le_bytes()[..3].to_vec();
    let canvas = [vec![0x02, 0, 0, 0], three(width - 1), three(height - 1)].concat();
    let mut body = b"WEBP".to_vec();
    body.extend(chunk(b"VP8X", &canvas));
    body.extend(chunk(b"ANIM", &[0; 6]));
    for &(gray, ms) in frames {
        let mut still = Vec::new();
        let pixels = vec![gray; (width * height * 3) as usize];
        WebPEncoder::new_lossless(&mut still)
            .write_image(&pixels, width, height, ExtendedColorType::Rgb8)
            .unwrap();
        let place = [three(0), three(0), three(width - 1), three(height - 1)].concat();
        // The picture without the header of its file; it covers what was there.
        let frame = [&place[..], &three(ms), &[2], &still[12..]].concat();
        body.extend(chunk(b"ANMF", &frame));
    }
    let mut file = b"RIFF".to_vec();
    file.extend((body.len() as u32).to_le_bytes());
    file.extend(body);
    file
}

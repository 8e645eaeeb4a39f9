//! Files for the tests.

#![allow(dead_code)]

use std::io::Cursor;

use image::codecs::gif::{GifEncoder, Repeat};
use image::codecs::webp::WebPEncoder;
use image::{
    Delay, DynamicImage, ExtendedColorType, ImageEncoder, ImageFormat, Rgb, RgbImage, Rgba,
    RgbaImage,
};
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

/// The file of `image` in a format.
pub(crate) fn written(image: &DynamicImage, format: ImageFormat) -> Vec<u8> {
    let mut bytes = Cursor::new(Vec::new());
    image.write_to(&mut bytes, format).unwrap();
    bytes.into_inner()
}

/// A PNG of one gray.
pub(crate) fn png(width: u32, height: u32, gray: u8) -> Vec<u8> {
    let image = RgbImage::from_pixel(width, height, Rgb([gray; 3]));
    written(&image.into(), ImageFormat::Png)
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

/// A page of an Ogg file, with its checksum: `kind` is 2 for the first of a stream, and 1 for one that
/// goes on with a packet.
fn page(kind: u8, number: u32, lengths: &[u8], data: &[u8]) -> Vec<u8> {
    let mut page = b"OggS\0".to_vec();
    page.push(kind);
    page.extend([0; 8]);
    page.extend(7u32.to_le_bytes());
    page.extend(number.to_le_bytes());
    page.extend([0; 4]);
    page.push(lengths.len() as u8);
    page.extend(lengths);
    page.extend(data);
    let mut sum = 0u32;
    for &byte in &page {
        sum ^= u32::from(byte) << 24;
        for _ in 0..8 {
            sum = (sum << 1) ^ (0x04c1_1db7 & (sum >> 31).wrapping_neg());
        }
    }
    page[22..26].copy_from_slice(&sum.to_le_bytes());
    page
}

/// An Ogg file of these packets, each of which begins a page.
pub(crate) fn ogg(packets: &[Vec<u8>]) -> Vec<u8> {
    let (mut file, mut number) = (Vec::new(), 0);
    for (i, packet) in packets.iter().enumerate() {
        let mut lengths = vec![255; packet.len() / 255];
        lengths.push((packet.len() % 255) as u8);
        let mut data = &packet[..];
        for (part, lengths) in lengths.chunks(255).enumerate() {
            let n = lengths.iter().map(|&length| usize::from(length)).sum();
            let kind = if i == 0 { 2 } else { u8::from(part > 0) };
            file.extend(page(kind, number, lengths, &data[..n]));
            data = &data[n..];
            number += 1;
        }
    }
    file
}

/// The first packet of a Vorbis file of one channel.
pub(crate) fn vorbis_head() -> Vec<u8> {
    let mut first = b"\x01vorbis\0\0\0\0\x01".to_vec();
    first.extend(16_000u32.to_le_bytes());
    first.extend([0; 12]);
    first.extend([0xb8, 1]);
    first
}

/// A segment of a JPEG: its marker, its length and its data.
fn segment(marker: u8, data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u16 + 2).to_be_bytes();
    [&[0xff, marker], &length[..], data].concat()
}

/// What a JPEG of three colors begins with: `frame` is the marker of its frame. Codes are as short as
/// can be: a bit 0 is a difference of 0 for the first coefficient of a block, and `others` for the rest.
fn jpeg_head(frame: u8, width: u16, height: u16, others: u8) -> Vec<u8> {
    let one_code = |class: u8, symbol: u8| {
        let mut table = vec![class, 1];
        table.resize(17, 0);
        table.push(symbol);
        segment(0xc4, &table)
    };
    let mut quantities = vec![1; 65];
    quantities[0] = 0;
    let mut sizes = vec![8];
    sizes.extend(height.to_be_bytes());
    sizes.extend(width.to_be_bytes());
    sizes.extend([3, 1, 0x11, 0, 2, 0x11, 0, 3, 0x11, 0]);
    [
        vec![0xff, 0xd8],
        segment(0xdb, &quantities),
        segment(frame, &sizes),
        one_code(0x00, 0),
        one_code(0x10, others),
    ]
    .concat()
}

/// The header of a scan of the color with this number, of these coefficients: first, last, and how far
/// they are refined.
fn scan(color: u8, coefficients: [u8; 3]) -> Vec<u8> {
    segment(0xda, &[&[1, color, 0][..], &coefficients].concat())
}

/// A progressive JPEG in which `n` scans refine the pixels of one color, of which all are 0: some bytes
/// tell so for all blocks.
pub(crate) fn progressive_jpeg(width: u16, height: u16, n: usize) -> Vec<u8> {
    let blocks = usize::from(width).div_ceil(8) * usize::from(height).div_ceil(8);
    // A code and 14 bits say that 16,384 blocks have nothing.
    let mut file = jpeg_head(0xc2, width, height, 0xe0);
    file.extend(scan(1, [0, 0, 0]));
    file.extend(vec![0; blocks.div_ceil(8)]);
    let runs = vec![0; (blocks.div_ceil(16_384) * 15).div_ceil(8)];
    let refined = [scan(1, [1, 63, 0x10]), runs].concat();
    file.extend(refined.repeat(n));
    file.extend([0xff, 0xd9]);
    file
}

/// Bits, the lowest of each byte first.
#[derive(Default)]
pub(crate) struct Bits(Vec<bool>);

impl Bits {
    /// Appends the lowest `n` bits of `value`; bits beyond its 64 are 0.
    pub(crate) fn put(&mut self, value: u64, n: u32) {
        self.0.extend((0..n).map(|i| value >> i & 1 == 1));
    }

    /// Appends all bits of `other`.
    pub(crate) fn append(&mut self, other: &Bits) {
        self.0.extend(&other.0);
    }

    /// The bytes, filled up with 0.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let byte = |bits: &[bool]| (0..bits.len()).map(|i| u8::from(bits[i]) << i).sum();
        self.0.chunks(8).map(byte).collect()
    }
}

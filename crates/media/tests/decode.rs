//! Decoding: what files show, and what is done with those that mean harm.

mod common;

use std::time::Duration;

use common::{gif, written};
use image::codecs::jpeg::JpegEncoder;
use image::codecs::webp::WebPEncoder;
use image::{
    DynamicImage, ExtendedColorType, GrayImage, ImageBuffer, ImageEncoder, ImageFormat, Luma, Rgb,
    RgbImage, Rgba, RgbaImage,
};
use media::{Bound, Frame, Limits, MediaError, decode};

fn read(bytes: &[u8]) -> Result<Frame, MediaError> {
    decode(bytes.to_vec(), &Limits::default())
}

/// A picture whose pixels all differ.
fn picture(width: u32, height: u32) -> RgbImage {
    RgbImage::from_fn(width, height, |x, y| {
        Rgb([x as u8, y as u8, (x * 7 + y) as u8])
    })
}

/// One file of each format.
fn files() -> Vec<(&'static str, Vec<u8>)> {
    let image = DynamicImage::from(picture(60, 40));
    let mut jpeg = Vec::new();
    JpegEncoder::new_with_quality(&mut jpeg, 100)
        .encode_image(&image)
        .unwrap();
    let mut webp = Vec::new();
    WebPEncoder::new_lossless(&mut webp)
        .write_image(image.as_bytes(), 60, 40, ExtendedColorType::Rgb8)
        .unwrap();
    vec![
        ("png", written(&image, ImageFormat::Png)),
        ("jpeg", jpeg),
        ("webp", webp),
        ("gif", gif(&[(10, 5), (200, 5), (90, 5)])),
    ]
}

#[test]
fn files_are_told_apart_by_their_bytes() {
    for (format, bytes) in files() {
        let frame = read(&bytes).unwrap();
        let size = (frame.height(), frame.width());
        match format {
            "gif" => assert_eq!((size, frame.rgb()[0]), ((10, 20), 10), "the first frame"),
            _ => assert_eq!(size, (40, 60)),
        }
        match format {
            "png" | "webp" => assert_eq!(frame.rgb(), picture(60, 40).as_raw().as_slice()),
            "jpeg" => {
                let far = frame.rgb().iter().zip(picture(60, 40).into_raw());
                let far = far.map(|(a, b)| a.abs_diff(b)).max();
                assert!(far < Some(60), "{far:?}");
            }
            _ => {}
        }
    }
    assert_eq!(read(b""), Err(MediaError::UnknownFormat));
    assert_eq!(
        read(b"<svg xmlns='http://www.w3.org/2000/svg'/>"),
        Err(MediaError::UnknownFormat)
    );
    // A format that the library knows and this crate does not take.
    assert_eq!(
        read(b"BM\x3a\0\0\0\0\0\0\0"),
        Err(MediaError::UnknownFormat)
    );
}

#[test]
fn every_kind_of_pixel_becomes_rgb() {
    let gray = GrayImage::from_pixel(3, 2, Luma([77]));
    let deep = ImageBuffer::from_pixel(3, 2, Rgb([65_535u16, 257 * 9, 0]));
    let clear = RgbaImage::from_pixel(3, 2, Rgba([200, 0, 100, 0]));
    let half = RgbaImage::from_pixel(3, 2, Rgba([200, 0, 100, 128]));
    for (image, expected) in [
        (DynamicImage::from(gray), [77, 77, 77]),
        (DynamicImage::from(deep), [255, 9, 0]),
        (DynamicImage::from(clear), [255, 255, 255]),
        (DynamicImage::from(half), [227, 127, 177]),
    ] {
        let frame = read(&written(&image, ImageFormat::Png)).unwrap();
        for pixel in frame.rgb().chunks(3) {
            assert_eq!(pixel, expected);
        }
    }
}

/// A JPEG whose EXIF says how it stands.
fn turned(orientation: u8) -> Vec<u8> {
    let image = DynamicImage::from(picture(16, 8));
    let mut jpeg = Vec::new();
    JpegEncoder::new_with_quality(&mut jpeg, 100)
        .encode_image(&image)
        .unwrap();
    let mut exif = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0".to_vec();
    exif.extend([orientation, 0, 0, 0, 0, 0, 0, 0]);
    let length = (exif.len() as u16 + 2).to_be_bytes();
    let segment = [&[0xff, 0xe1], &length[..], &exif[..]].concat();
    [&jpeg[..2], &segment, &jpeg[2..]].concat()
}

#[test]
fn a_photo_stands_as_its_exif_says() {
    let upright = read(&turned(1)).unwrap();
    let left = read(&turned(6)).unwrap();
    assert_eq!((upright.height(), upright.width()), (8, 16));
    assert_eq!((left.height(), left.width()), (16, 8));
    // Turned clockwise: the first row is the first column, from below.
    let pixel = |frame: &media::Frame, x: usize, y: usize| {
        frame.rgb()[(y * frame.width() + x) * 3..][..3].to_vec()
    };
    for x in 0..8 {
        assert_eq!(pixel(&left, x, 0), pixel(&upright, 0, 7 - x));
    }
}

#[test]
fn every_bound_holds() {
    let limits = Limits {
        bytes: 10_000,
        side: 50,
        pixels: 1500,
        ..Limits::default()
    };
    let png = |width, height| {
        written(
            &DynamicImage::from(picture(width, height)),
            ImageFormat::Png,
        )
    };
    for (bytes, bound, most, found) in [
        (vec![0; 10_001], Bound::Bytes, 10_000, 10_001),
        (png(51, 2), Bound::Side, 50, 51),
        (png(40, 38), Bound::Pixels, 1500, 1520),
    ] {
        let expected = MediaError::TooLarge { bound, most, found };
        assert_eq!(decode(bytes, &limits), Err(expected));
    }
    let hasty = Limits {
        time: Duration::ZERO,
        ..Limits::default()
    };
    assert_eq!(
        decode(png(40, 30), &hasty),
        Err(MediaError::TooSlow(Duration::ZERO))
    );
}

/// A PNG header that promises `width` by `height` pixels, with the checksum of its chunk.
fn promise(width: u32, height: u32) -> Vec<u8> {
    let mut chunk = b"IHDR".to_vec();
    chunk.extend(width.to_be_bytes());
    chunk.extend(height.to_be_bytes());
    chunk.extend([8, 2, 0, 0, 0]);
    let mut crc = u32::MAX;
    for &byte in &chunk {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg());
        }
    }
    let begin = b"\x89PNG\r\n\x1a\n\0\0\0\x0d";
    let pixels = b"\0\0\x10\0IDAT";
    [&begin[..], &chunk, &(!crc).to_be_bytes(), pixels].concat()
}

#[test]
fn a_header_that_promises_too_much_is_refused() {
    for (width, height) in [(100_000, 1), (1, 100_000), (16_000, 16_000), (1 << 30, 9)] {
        let error = read(&promise(width, height)).unwrap_err();
        assert!(matches!(error, MediaError::TooLarge { .. }), "{error:?}");
    }
    // A promise within the bounds, and no pixels.
    let error = read(&promise(7000, 9000)).unwrap_err();
    assert!(matches!(error, MediaError::Broken(_)), "{error:?}");
}

#[test]
fn what_is_cut_off_or_damaged_is_an_error_or_a_picture() {
    for (format, bytes) in files() {
        let mut broken = 0;
        for percent in 0..100 {
            let cut = &bytes[..bytes.len() * percent / 100];
            match read(cut) {
                Err(MediaError::UnknownFormat | MediaError::Broken(_)) => broken += 1,
                // Some decoders show what there is.
                Ok(_) => assert!(percent > 5, "{format}"),
                Err(other) => panic!("{format} at {percent} %: {other:?}"),
            }
        }
        assert!(broken >= 5, "{format}: {broken}");
        for at in (0..bytes.len()).step_by(bytes.len() / 97 + 1) {
            let mut odd = bytes.clone();
            odd[at] ^= 0x55;
            let _ = read(&odd);
        }
    }
}

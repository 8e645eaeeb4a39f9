//! From bytes to frames.

use std::io::Cursor;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use image::codecs::gif::GifDecoder;
use image::codecs::jpeg::JpegDecoder;
use image::codecs::png::PngDecoder;
use image::codecs::webp::WebPDecoder;
use image::{
    AnimationDecoder, DynamicImage, ImageDecoder, ImageError, ImageFormat, RgbaImage, guess_format,
};

use crate::error::check;
use crate::{Bound, Clip, Frame, Limits, MediaError};

/// A frame that an animation does not time is shown this long, as browsers do.
const UNTIMED: Duration = Duration::from_millis(100);
/// A shorter time is not meant: it counts as none.
const SHORTEST: Duration = Duration::from_millis(11);

/// Decodes a file: PNG, JPEG and WebP to one frame, animated GIF and WebP to all of theirs.
///
/// Works on a thread of its own. If that takes too long it is left to itself: the bound of pixels
/// ends it.
///
/// # Errors
///
/// [`MediaError`] if the format is unknown, the file is broken or exceeds one of `limits`.
///
/// # Panics
///
/// Panics if the system cannot start a thread.
pub fn decode(bytes: Vec<u8>, limits: &Limits) -> Result<Clip, MediaError> {
    check(Bound::Bytes, limits.bytes as u64, bytes.len() as u64)?;
    let format = guess_format(&bytes).map_err(|_| MediaError::UnknownFormat)?;
    let (send, receive) = channel();
    let (own, time) = (limits.clone(), limits.time);
    let work = move || {
        // Nobody waits any more after the deadline.
        let _ = send.send(decode_as(format, &bytes, &own));
    };
    let thread = thread::Builder::new().name("decode".to_owned());
    thread.spawn(work).expect("a thread to decode with starts");
    match receive.recv_timeout(time) {
        Ok(decoded) => decoded,
        Err(RecvTimeoutError::Timeout) => Err(MediaError::TooSlow(time)),
        Err(RecvTimeoutError::Disconnected) => {
            Err(MediaError::Broken("the decoder failed".to_owned()))
        }
    }
}

fn decode_as(format: ImageFormat, bytes: &[u8], limits: &Limits) -> Result<Clip, MediaError> {
    let bytes = Cursor::new(bytes);
    match format {
        ImageFormat::Png => picture(PngDecoder::new(bytes).map_err(broken)?, limits),
        ImageFormat::Jpeg => picture(JpegDecoder::new(bytes).map_err(broken)?, limits),
        ImageFormat::Gif => {
            let mut decoder = GifDecoder::new(bytes).map_err(broken)?;
            prepare(&mut decoder, limits)?;
            clip(decoder, limits)
        }
        ImageFormat::WebP => {
            let mut decoder = WebPDecoder::new(bytes).map_err(broken)?;
            if !decoder.has_animation() {
                return picture(decoder, limits);
            }
            prepare(&mut decoder, limits)?;
            clip(decoder, limits)
        }
        _ => Err(MediaError::UnknownFormat),
    }
}

/// Checks the size that the header states, and bounds the decoder.
fn prepare(decoder: &mut impl ImageDecoder, limits: &Limits) -> Result<(), MediaError> {
    let (width, height) = decoder.dimensions();
    check_size(width, height, limits)?;
    let mut own = image::Limits::default();
    own.max_image_width = Some(limits.side);
    own.max_image_height = Some(limits.side);
    own.max_alloc = Some(limits.decoder_bytes());
    decoder.set_limits(own).map_err(broken)
}

fn check_size(width: u32, height: u32, limits: &Limits) -> Result<(), MediaError> {
    let longer = u64::from(width.max(height));
    check(Bound::Side, u64::from(limits.side), longer)?;
    let pixels = u64::from(width) * u64::from(height);
    check(Bound::Pixels, limits.pixels, pixels)?;
    match pixels {
        0 => Err(MediaError::Broken("it has no pixels".to_owned())),
        _ => Ok(()),
    }
}

/// A file of one frame.
fn picture(mut decoder: impl ImageDecoder, limits: &Limits) -> Result<Clip, MediaError> {
    prepare(&mut decoder, limits)?;
    // A broken orientation is none.
    let orientation = decoder.orientation().ok();
    let mut image = DynamicImage::from_decoder(decoder).map_err(broken)?;
    if let Some(orientation) = orientation {
        image.apply_orientation(orientation);
    }
    Ok(Clip::new(vec![frame(image)], Duration::ZERO))
}

/// A file of several frames.
fn clip<'a>(decoder: impl AnimationDecoder<'a>, limits: &Limits) -> Result<Clip, MediaError> {
    let mut frames: Vec<Frame> = Vec::new();
    let (mut duration, mut pixels) = (Duration::ZERO, 0);
    for next in decoder.into_frames() {
        let next = next.map_err(broken)?;
        let shown = Duration::from(next.delay());
        duration += if shown < SHORTEST { UNTIMED } else { shown };
        let buffer = next.into_buffer();
        pixels += u64::from(buffer.width()) * u64::from(buffer.height());
        let n = frames.len() as u64 + 1;
        check(Bound::Frames, limits.frames as u64, n)?;
        check(Bound::ClipPixels, limits.clip_pixels, pixels)?;
        frames.push(on_white(&buffer));
    }
    match frames.len() {
        0 => Err(MediaError::Broken("it has no frames".to_owned())),
        1 => Ok(Clip::new(frames, Duration::ZERO)),
        _ => Ok(Clip::new(frames, duration)),
    }
}

/// A decoded picture as a frame, on white where it is transparent.
fn frame(image: DynamicImage) -> Frame {
    match image.color().has_alpha() {
        true => on_white(&image.into_rgba8()),
        false => {
            let image = image.into_rgb8();
            let (width, height) = (image.width() as usize, image.height() as usize);
            Frame::new(height, width, image.into_raw())
        }
    }
}

/// A picture on white.
fn on_white(image: &RgbaImage) -> Frame {
    let (width, height) = (image.width() as usize, image.height() as usize);
    let mut rgb = Vec::with_capacity(width * height * 3);
    for pixel in image.pixels() {
        let [red, green, blue, alpha] = pixel.0;
        // Rounded to the nearest.
        let over = |color: u8| {
            let (color, alpha) = (u32::from(color), u32::from(alpha));
            ((color * alpha + 255 * (255 - alpha) + 127) / 255) as u8
        };
        rgb.extend([over(red), over(green), over(blue)]);
    }
    Frame::new(height, width, rgb)
}

/// A decoder's error, in at most a line.
fn broken(error: ImageError) -> MediaError {
    let text = error.to_string();
    let line = text.lines().next().unwrap_or_default();
    MediaError::Broken(line.chars().take(200).collect())
}

//! From the bytes of a picture to a frame.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use image::codecs::gif::GifDecoder;
use image::codecs::png::PngDecoder;
use image::codecs::webp::WebPDecoder;
use image::{
    AnimationDecoder, DynamicImage, ImageDecoder, ImageError, ImageFormat, RgbaImage, guess_format,
};

use crate::deadline::{Deadline, Timed};
use crate::error::check;
use crate::{Bound, Frame, Limits, MediaError, jpeg, webp};

/// Bytes of a color profile and of texts of a PNG, as they are kept.
const HEADER_BYTES: u64 = 16 << 20;
/// Bytes of a pixel as a file has it, for which the bound of pixels is meant: a file with deeper
/// pixels may have fewer of them.
const PIXEL_BYTES: u64 = 4;

/// Decodes a picture: PNG, JPEG, WebP or GIF; of an animation it is the first frame.
///
/// Works on a thread of its own. If time is up before it has ended, the thread is left to itself, and
/// ends when it next reads of the file: after the pixels of one frame at most.
///
/// # Errors
///
/// [`MediaError`] if the format is unknown, the file is broken or exceeds one of `limits`.
///
/// # Panics
///
/// Panics if the system cannot start a thread.
pub fn decode(bytes: Vec<u8>, limits: &Limits) -> Result<Frame, MediaError> {
    check(Bound::Bytes, limits.bytes as u64, bytes.len() as u64)?;
    let own = limits.clone();
    within(limits.time, move |deadline| picture(&bytes, &own, deadline))
}

/// [`decode`] on the caller's thread, which panics where a decoder does: for tests.
///
/// # Errors
///
/// As [`decode`].
pub fn decode_here(bytes: &[u8], limits: &Limits) -> Result<Frame, MediaError> {
    check(Bound::Bytes, limits.bytes as u64, bytes.len() as u64)?;
    let deadline = Deadline::after(limits.time);
    deadline.keep(|| picture(bytes, limits, deadline))
}

/// Does `work` on a thread of its own, which knows when it has to have ended, and waits for it until
/// then.
///
/// # Errors
///
/// Any error of `work`; [`MediaError::TooSlow`] if it has not ended in time.
pub(crate) fn within<T: Send + 'static>(
    time: Duration,
    work: impl FnOnce(Deadline) -> Result<T, MediaError> + Send + 'static,
) -> Result<T, MediaError> {
    let (send, receive) = channel();
    let deadline = Deadline::after(time);
    let work = move || {
        // Nobody waits any more after the deadline.
        let _ = send.send(deadline.keep(|| work(deadline)));
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

/// The first frame of a file.
pub(crate) fn picture(
    bytes: &[u8],
    limits: &Limits,
    deadline: Deadline,
) -> Result<Frame, MediaError> {
    let file = || Timed::new(bytes, deadline);
    match guess_format(bytes).map_err(|_| MediaError::UnknownFormat)? {
        ImageFormat::Png => {
            check_png_header(bytes, limits)?;
            // What comes before the pixels may be compressed, too.
            let mut own = image::Limits::default();
            own.max_alloc = Some(HEADER_BYTES);
            let decoder = PngDecoder::with_limits(file(), own);
            still(decoder.map_err(broken)?, limits)
        }
        ImageFormat::Jpeg => Ok(frame(jpeg::picture(file(), limits)?)),
        format @ (ImageFormat::Gif | ImageFormat::WebP) => {
            match animation(format, bytes, limits, deadline)? {
                Some(mut frames) => {
                    let first = frames.next().ok_or_else(no_frames)?.map_err(broken)?;
                    Ok(on_white(&first.into_buffer()))
                }
                None => still(WebPDecoder::new(file()).map_err(broken)?, limits),
            }
        }
        _ => Err(MediaError::UnknownFormat),
    }
}

/// The frames of a GIF or an animated WebP; nothing of a WebP of one picture.
pub(crate) fn animation<'a>(
    format: ImageFormat,
    bytes: &'a [u8],
    limits: &Limits,
    deadline: Deadline,
) -> Result<Option<image::Frames<'a>>, MediaError> {
    let file = Timed::new(bytes, deadline);
    if format == ImageFormat::Gif {
        let mut decoder = GifDecoder::new(file).map_err(broken)?;
        prepare(&mut decoder, limits)?;
        return Ok(Some(decoder.into_frames()));
    }
    let mut decoder = WebPDecoder::new(file).map_err(broken)?;
    prepare(&mut decoder, limits)?;
    webp::check(bytes, limits, deadline)?;
    if !decoder.has_animation() {
        return Ok(None);
    }
    Ok(Some(decoder.into_frames()))
}

/// An animation without a frame.
pub(crate) fn no_frames() -> MediaError {
    MediaError::Broken("it has no frames".to_owned())
}

/// Checks the size that the header of a PNG states, before its decoder makes anything of it.
fn check_png_header(bytes: &[u8], limits: &Limits) -> Result<(), MediaError> {
    // After the signature, and the length and name of the first chunk.
    let number = |at: usize| Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let size = number(16).zip(number(20));
    size.map_or(Ok(()), |(width, height)| check_size(width, height, limits))
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

/// Refuses a frame that has no pixels or more than `limits` allow.
pub(crate) fn check_size(width: u32, height: u32, limits: &Limits) -> Result<(), MediaError> {
    let longer = u64::from(width.max(height));
    check(Bound::Side, u64::from(limits.side), longer)?;
    let pixels = u64::from(width) * u64::from(height);
    check(Bound::Pixels, limits.pixels, pixels)?;
    match pixels {
        0 => Err(MediaError::Broken("it has no pixels".to_owned())),
        _ => Ok(()),
    }
}

/// The frame of a file that has one.
fn still(mut decoder: impl ImageDecoder, limits: &Limits) -> Result<Frame, MediaError> {
    prepare(&mut decoder, limits)?;
    let pixels = decoder.total_bytes().div_ceil(PIXEL_BYTES);
    check(Bound::Pixels, limits.pixels, pixels)?;
    // A broken orientation is none.
    let orientation = decoder.orientation().ok();
    let mut image = DynamicImage::from_decoder(decoder).map_err(broken)?;
    if let Some(orientation) = orientation {
        image.apply_orientation(orientation);
    }
    Ok(frame(image))
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
pub(crate) fn on_white(image: &RgbaImage) -> Frame {
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
pub(crate) fn broken(error: ImageError) -> MediaError {
    MediaError::broken(&error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_decoder_gives_pixels_of_a_file_that_cannot_be_read() {
        let limits = Limits::default();
        let (now, later) = (Duration::ZERO, limits.time);
        let files = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/files");
        let mut formats = 0;
        for file in std::fs::read_dir(files).unwrap() {
            let path = file.unwrap().path();
            let bytes = std::fs::read(&path).unwrap();
            assert!(picture(&bytes, &limits, Deadline::after(later)).is_ok());
            let late = picture(&bytes, &limits, Deadline::after(now));
            assert!(late.is_err(), "{}: {late:?}", path.display());
            if let Ok(format @ (ImageFormat::Gif | ImageFormat::WebP)) = guess_format(&bytes) {
                let late = animation(format, &bytes, &limits, Deadline::after(now));
                assert!(late.is_err(), "{}", path.display());
            }
            formats += 1;
        }
        assert!(formats >= 9, "{formats}");
    }
}

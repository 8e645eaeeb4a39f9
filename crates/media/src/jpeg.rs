//! JPEG, by the decoder that the library of pictures uses too.
//!
//! The library hands that decoder the whole file at once, and a hundred scans of 64 million pixels, for
//! which some hundred kilobytes are enough, take many seconds. Here it reads a file that ends with its time.

use image::metadata::Orientation;
use image::{DynamicImage, GrayImage, RgbImage};
use zune_jpeg::JpegDecoder;
use zune_jpeg::errors::DecodeErrors;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

use crate::deadline::Timed;
use crate::decode::check_size;
use crate::{Limits, MediaError};

/// The picture of a JPEG file, as its EXIF orientation says. What is cut off or damaged after the
/// header is gray.
pub(crate) fn picture(file: Timed<'_>, limits: &Limits) -> Result<DynamicImage, MediaError> {
    let options = DecoderOptions::default()
        .set_strict_mode(false)
        .set_max_width(usize::MAX)
        .set_max_height(usize::MAX);
    let mut decoder = JpegDecoder::new_with_options(file, options);
    decoder.decode_headers().map_err(broken)?;
    let no_size = || MediaError::Broken("it has no frame".to_owned());
    // Sides have 16 bits.
    let (width, height) = decoder.dimensions().ok_or_else(no_size)?;
    let (width, height) = (width as u32, height as u32);
    check_size(width, height, limits)?;
    let is_gray = decoder.input_colorspace() == Some(ColorSpace::Luma);
    let (space, colors) = match is_gray {
        true => (ColorSpace::Luma, 1),
        false => (ColorSpace::RGB, 3),
    };
    decoder.set_options(options.jpeg_set_out_colorspace(space));
    // A broken orientation is none.
    let exif = decoder.exif();
    let orientation = exif.and_then(|exif| Orientation::from_exif_chunk(exif));
    let mut pixels = vec![0; width as usize * height as usize * colors];
    decoder.decode_into(&mut pixels).map_err(broken)?;
    let image = match is_gray {
        true => GrayImage::from_raw(width, height, pixels).map(DynamicImage::from),
        false => RgbImage::from_raw(width, height, pixels).map(DynamicImage::from),
    };
    let mut image = image.expect("as many bytes as the picture has");
    image.apply_orientation(orientation.unwrap_or(Orientation::NoTransforms));
    Ok(image)
}

/// The decoder's error, in at most a line.
fn broken(error: DecodeErrors) -> MediaError {
    MediaError::broken(&error.to_string())
}

//! Pictures and clips: bytes of strangers become frames of pixels, and frames get the size that
//! a model wants.
//!
//! ```
//! use media::{Limits, decode};
//!
//! # let red = image::RgbImage::from_pixel(40, 30, image::Rgb([255, 0, 0]));
//! # let mut png = std::io::Cursor::new(Vec::new());
//! # red.write_to(&mut png, image::ImageFormat::Png).unwrap();
//! # let png = png.into_inner();
//! let picture = decode(png, &Limits::default())?;
//! assert_eq!((picture.height(), picture.width()), (30, 40));
//! let small = picture.resized(16, 32);
//! assert_eq!(small.rgb().len(), 16 * 32 * 3);
//! # Ok::<(), media::MediaError>(())
//! ```
//!
//! | step | what |
//! | --- | --- |
//! | [`decode`] | PNG, JPEG, WebP and GIF, told apart by their first bytes, within [`Limits`] and a deadline |
//! | [`decode_clip`] | the frames of an animated GIF or WebP that a [`ClipRule`] wants, and of MP4 and WebM by the programs `ffmpeg` and `ffprobe`, where there are any |
//! | [`decode_frames`], [`choose_frames`] | a clip whose frames come as pictures, or are there already |
//! | [`decode_sound`] | WAV, FLAC, MP3 and Ogg Vorbis as one channel, within [`SoundLimits`] and a deadline |
//! | [`Frame::resized`] | bicubic with antialiasing, with the bits of the public processors |
//!
//! Pixels are 8-bit RGB in sRGB as the file has them; a transparent pixel lies on white, and a
//! picture stands as its EXIF orientation says. Nothing here knows a model: to what size a frame is
//! resized and which frames of a clip are looked at is said by the tower that takes them.
//!
//! Sound becomes one channel, the mean of those that there are, at the rate that somebody asks for.
//!
//! Deliberately absent: video codecs, color profiles, other codecs of sound (AAC, Opus).

#![forbid(unsafe_code)]

mod clip;
mod deadline;
mod decode;
mod error;
mod frame;
mod helper;
mod jpeg;
mod limits;
mod resize;
mod sound;
mod webp;

pub use clip::{ClipRule, choose_frames, decode_clip, decode_clip_here, decode_frames};
pub use decode::{decode, decode_here};
pub use error::{Bound, MediaError};
pub use frame::{Clip, Frame};
pub use helper::VideoTools;
pub use limits::{Limits, SoundLimits};
pub use sound::{Sound, decode_sound, decode_sound_here};

//! From the bytes of a clip to the frames of it that are looked at.
//!
//! ```text
//! file ─ count its frames, see how long it takes ─→ ClipRule::frames ─→ numbers
//! file ─ decode ─→ the frames of these numbers, one after the other ─→ ClipRule::size ─→ resized
//! ```
//!
//! A file is gone through twice, so that nothing is kept of a frame that nobody looks at, and a frame
//! is kept in the size that the model wants.

use std::time::Duration;

use image::{ImageFormat, guess_format};

use crate::deadline::Deadline;
use crate::decode::{animation, broken, no_frames, on_white, picture, within};
use crate::error::check;
use crate::helper::Container;
use crate::{Bound, Clip, Frame, Limits, MediaError, VideoTools};

/// A frame that an animation does not time is shown this long, as browsers do.
const UNTIMED: Duration = Duration::from_millis(100);
/// A shorter time is not meant: it counts as none.
const SHORTEST: Duration = Duration::from_millis(11);

/// Which frames of a clip are looked at, and in which size.
pub trait ClipRule: Send + 'static {
    /// The numbers of the frames, ascending, of a clip of `count` frames, `fps` a second if that is
    /// known.
    fn frames(&self, count: usize, fps: Option<f64>) -> Vec<usize>;

    /// Height and width to which `frames` frames of `height` by `width` pixels are resized.
    ///
    /// # Errors
    ///
    /// Why that cannot be.
    fn size(&self, frames: usize, height: usize, width: usize) -> Result<[usize; 2], String>;
}

/// Decodes a clip: an animated GIF or WebP, a picture as a clip of one frame, and MP4 and WebM where
/// there are `tools` for them.
///
/// # Errors
///
/// [`MediaError`] if the format is unknown, the file is broken or exceeds one of `limits`, or there
/// are no tools that it takes.
///
/// # Panics
///
/// Panics if the system cannot start a thread.
pub fn decode_clip(
    bytes: Vec<u8>,
    rule: impl ClipRule,
    limits: &Limits,
    tools: &VideoTools,
) -> Result<Clip, MediaError> {
    check(Bound::Bytes, limits.bytes as u64, bytes.len() as u64)?;
    let (own, tools) = (limits.clone(), tools.clone());
    within(limits.time, move |deadline| {
        clip(&bytes, rule, &own, &tools, deadline)
    })
}

/// [`decode_clip`] on the caller's thread, which panics where a decoder does: for tests.
///
/// # Errors
///
/// As [`decode_clip`].
pub fn decode_clip_here(
    bytes: &[u8],
    rule: impl ClipRule,
    limits: &Limits,
    tools: &VideoTools,
) -> Result<Clip, MediaError> {
    check(Bound::Bytes, limits.bytes as u64, bytes.len() as u64)?;
    let deadline = Deadline::after(limits.time);
    deadline.keep(|| clip(bytes, rule, limits, tools, deadline))
}

/// The frames of a file that `rule` wants.
fn clip(
    bytes: &[u8],
    rule: impl ClipRule,
    limits: &Limits,
    tools: &VideoTools,
    deadline: Deadline,
) -> Result<Clip, MediaError> {
    if let Some(container) = Container::of(bytes) {
        return tools.decode(container, bytes, rule, limits, deadline);
    }
    match guess_format(bytes) {
        Ok(format @ (ImageFormat::Gif | ImageFormat::WebP)) => {
            animated(format, bytes, rule, limits, deadline)
        }
        Ok(ImageFormat::Png | ImageFormat::Jpeg) => single(bytes, rule, limits, deadline),
        _ => Err(MediaError::UnknownClip),
    }
}

/// Decodes a clip whose frames come as pictures, `fps` a second if that is known. All of them are
/// looked at.
///
/// # Errors
///
/// [`MediaError`] of the first file that is none, or has another size than the first.
///
/// # Panics
///
/// Panics if the system cannot start a thread.
pub fn decode_frames(
    files: Vec<Vec<u8>>,
    fps: Option<f64>,
    rule: impl ClipRule,
    limits: &Limits,
) -> Result<Clip, MediaError> {
    check(Bound::Frames, limits.frames as u64, files.len() as u64)?;
    let bytes = files.iter().map(Vec::len).sum::<usize>();
    check(Bound::Bytes, limits.bytes as u64, bytes as u64)?;
    let own = limits.clone();
    within(limits.time, move |deadline| {
        let numbers = (0..files.len()).collect();
        let mut kept = Kept::new(numbers, &rule, &own, deadline);
        for (frame, file) in files.into_iter().enumerate() {
            let taken = picture(&file, &own, deadline).and_then(|picture| kept.take(&picture));
            taken.map_err(|error| match error {
                MediaError::UnknownFormat | MediaError::Broken(_) => MediaError::Frame {
                    frame,
                    error: Box::new(error),
                },
                error => error,
            })?;
        }
        kept.clip(fps)
    })
}

/// The clip of `frames` that are there already, `fps` a second if that is known.
///
/// # Errors
///
/// [`MediaError`] if there are none, or they have several sizes, or exceed one of `limits`.
pub fn choose_frames(
    frames: &[Frame],
    fps: Option<f64>,
    rule: &impl ClipRule,
    limits: &Limits,
) -> Result<Clip, MediaError> {
    check_length(frames.len(), fps, limits)?;
    let numbers = rule.frames(frames.len(), fps);
    let mut kept = Kept::new(numbers, rule, limits, Deadline::after(limits.time));
    while let Some(number) = kept.next() {
        kept.take(&frames[number])?;
    }
    kept.clip(fps)
}

/// Frames of a clip that are looked at, as they come.
pub(crate) struct Kept<'a, R> {
    numbers: Vec<usize>,
    rule: &'a R,
    limits: &'a Limits,
    deadline: Deadline,
    /// Height and width as they come, and as they are kept.
    sizes: Option<[[usize; 2]; 2]>,
    frames: Vec<Frame>,
}

impl<'a, R: ClipRule> Kept<'a, R> {
    /// Frames of these `numbers`.
    pub(crate) fn new(
        numbers: Vec<usize>,
        rule: &'a R,
        limits: &'a Limits,
        deadline: Deadline,
    ) -> Self {
        Kept {
            numbers,
            rule,
            limits,
            deadline,
            sizes: None,
            frames: Vec::new(),
        }
    }

    /// The numbers of the frames that are wanted.
    pub(crate) fn numbers(&self) -> &[usize] {
        &self.numbers
    }

    /// The number of the next frame that is wanted; none once there are all.
    pub(crate) fn next(&self) -> Option<usize> {
        self.numbers.get(self.frames.len()).copied()
    }

    /// Takes the next frame that is wanted.
    ///
    /// # Errors
    ///
    /// If it has another size than the first, all of them are too large, or time is up.
    pub(crate) fn take(&mut self, frame: &Frame) -> Result<(), MediaError> {
        self.deadline.check()?;
        let found = [frame.height(), frame.width()];
        let [first, size] = match self.sizes {
            Some(sizes) => sizes,
            None => {
                let n = self.numbers.len();
                let size = self.rule.size(n, found[0], found[1]);
                let size = size.map_err(MediaError::Size)?;
                let pixels = (size[0] as u64) * (size[1] as u64) * n as u64;
                check(Bound::ClipPixels, self.limits.clip_pixels, pixels)?;
                [found, size]
            }
        };
        if found != first {
            let frame = self.frames.len();
            return Err(MediaError::OtherSize { frame });
        }
        self.sizes = Some([first, size]);
        self.frames.push(match size == found {
            true => frame.clone(),
            false => frame.resized(size[0], size[1]),
        });
        Ok(())
    }

    /// The clip of the frames that have come, `fps` a second.
    ///
    /// # Errors
    ///
    /// If none has.
    pub(crate) fn clip(mut self, fps: Option<f64>) -> Result<Clip, MediaError> {
        if self.frames.is_empty() {
            return Err(no_frames());
        }
        // A video may have fewer than it promises.
        self.numbers.truncate(self.frames.len());
        Ok(Clip::new(self.frames, self.numbers, fps))
    }
}

/// Refuses a clip that takes too long, if it has `count` frames, `fps` a second.
pub(crate) fn check_length(
    count: usize,
    fps: Option<f64>,
    limits: &Limits,
) -> Result<(), MediaError> {
    check(Bound::Frames, limits.frames as u64, count as u64)?;
    let seconds = fps.map_or(0.0, |fps| count as f64 / fps);
    check(Bound::Seconds, limits.seconds, seconds as u64)
}

/// A picture as a clip of one frame.
fn single(
    bytes: &[u8],
    rule: impl ClipRule,
    limits: &Limits,
    deadline: Deadline,
) -> Result<Clip, MediaError> {
    let mut kept = Kept::new(vec![0], &rule, limits, deadline);
    kept.take(&picture(bytes, limits, deadline)?)?;
    kept.clip(None)
}

/// A GIF or a WebP.
fn animated(
    format: ImageFormat,
    bytes: &[u8],
    rule: impl ClipRule,
    limits: &Limits,
    deadline: Deadline,
) -> Result<Clip, MediaError> {
    let Some(frames) = animation(format, bytes, limits, deadline)? else {
        return single(bytes, rule, limits, deadline);
    };
    let (mut count, mut duration) = (0, Duration::ZERO);
    for next in frames {
        let shown = Duration::from(next.map_err(broken)?.delay());
        duration += if shown < SHORTEST { UNTIMED } else { shown };
        count += 1;
        check(Bound::Frames, limits.frames as u64, count as u64)?;
        check(Bound::Seconds, limits.seconds, duration.as_secs())?;
        deadline.check()?;
    }
    if count == 0 {
        return Err(no_frames());
    }
    let fps = (count > 1).then(|| count as f64 / duration.as_secs_f64());
    let mut kept = Kept::new(rule.frames(count, fps), &rule, limits, deadline);
    let frames = animation(format, bytes, limits, deadline)?.ok_or_else(no_frames)?;
    for (number, next) in frames.enumerate() {
        match kept.next() {
            None => break,
            Some(wanted) if wanted != number => {
                next.map_err(broken)?;
            }
            Some(_) => kept.take(&on_white(&next.map_err(broken)?.into_buffer()))?,
        }
        deadline.check()?;
    }
    kept.clip(fps)
}

//! Frames of pixels.

use std::time::Duration;

use crate::resize::resize;

/// A picture, or one frame of a clip: 8-bit red, green and blue, `[height, width, 3]`.
#[derive(Clone, PartialEq, Eq)]
pub struct Frame {
    height: usize,
    width: usize,
    rgb: Vec<u8>,
}

impl Frame {
    /// A frame of `rgb`, `[height, width, 3]`.
    ///
    /// # Panics
    ///
    /// Panics if a side is 0 or `rgb` has another length.
    pub fn new(height: usize, width: usize, rgb: Vec<u8>) -> Self {
        assert!(height > 0 && width > 0, "a frame has pixels");
        assert_eq!(rgb.len(), height * width * 3, "three bytes a pixel");
        Frame { height, width, rgb }
    }

    /// Rows of pixels.
    pub fn height(&self) -> usize {
        self.height
    }

    /// Columns of pixels.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Red, green and blue of each pixel, `[height, width, 3]`.
    pub fn rgb(&self) -> &[u8] {
        &self.rgb
    }

    /// The frame at another size: bicubic (a = -1/2), antialiased where it shrinks, in 16-bit fixed
    /// point as PyTorch resizes 8-bit pictures, with its bits. Columns are resized first.
    ///
    /// # Panics
    ///
    /// Panics if a side is 0.
    #[must_use]
    pub fn resized(&self, height: usize, width: usize) -> Frame {
        assert!(height > 0 && width > 0, "a frame has pixels");
        Frame {
            height,
            width,
            rgb: resize(&self.rgb, [self.height, self.width], [height, width]),
        }
    }
}

impl std::fmt::Debug for Frame {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Frame({}x{})", self.height, self.width)
    }
}

/// What a file shows: one frame of a picture, several of an animation. All have the same size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Clip {
    frames: Vec<Frame>,
    /// How long all frames are shown; zero for a picture.
    duration: Duration,
}

impl Clip {
    /// A clip of `frames`, which are shown for `duration` together.
    ///
    /// # Panics
    ///
    /// Panics if there is no frame, or the sizes differ.
    pub fn new(frames: Vec<Frame>, duration: Duration) -> Self {
        let size = |frame: &Frame| (frame.height, frame.width);
        let first = frames.first().map(size).expect("a clip has frames");
        assert!(frames.iter().all(|frame| size(frame) == first));
        Clip { frames, duration }
    }

    /// The frames, in order.
    pub fn frames(&self) -> &[Frame] {
        &self.frames
    }

    /// Frame `i`.
    ///
    /// # Panics
    ///
    /// Panics if there is no such frame.
    pub fn frame(&self, i: usize) -> &Frame {
        &self.frames[i]
    }

    /// Frames a second, if there are several and the file says how long they are shown.
    pub fn fps(&self) -> Option<f64> {
        let seconds = self.duration.as_secs_f64();
        let known = self.frames.len() > 1 && seconds > 0.0;
        known.then(|| self.frames.len() as f64 / seconds)
    }
}

//! Frames of pixels.

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

/// The frames of a clip that are looked at. All have the same size.
#[derive(Clone, Debug, PartialEq)]
pub struct Clip {
    frames: Vec<Frame>,
    numbers: Vec<usize>,
    fps: Option<f64>,
}

impl Clip {
    /// A clip of `frames`, which have these `numbers` among all of its frames, of which there are `fps`
    /// a second if that is known.
    ///
    /// # Panics
    ///
    /// Panics if there is no frame, there are more or fewer numbers, or the sizes differ.
    pub fn new(frames: Vec<Frame>, numbers: Vec<usize>, fps: Option<f64>) -> Self {
        let size = |frame: &Frame| (frame.height, frame.width);
        let first = frames.first().map(size).expect("a clip has frames");
        assert!(frames.iter().all(|frame| size(frame) == first));
        assert_eq!(frames.len(), numbers.len(), "a number for each frame");
        Clip {
            frames,
            numbers,
            fps,
        }
    }

    /// The frames, in order.
    pub fn frames(&self) -> &[Frame] {
        &self.frames
    }

    /// The number of each frame among all frames of the clip, from 0.
    pub fn numbers(&self) -> &[usize] {
        &self.numbers
    }

    /// Frames of the clip a second, if that is known.
    pub fn fps(&self) -> Option<f64> {
        self.fps
    }
}

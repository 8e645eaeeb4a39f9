//! To which size pictures are resized before they are cut into patches.

use super::MediaError;
use serde_json::Value;

/// Sides of a picture, the longer one by the shorter one, at most.
const MOST_ASPECT: f64 = 200.0;

/// Pixels that a configuration may ask for, at most: far more than memory has room for.
const MOST_PIXELS: u64 = 1 << 32;

/// How the size of a picture follows from the size that it has. Both rules keep its shape as well
/// as multiples of `side` allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SizeRule {
    /// The largest size that becomes at most `most` rows, a square of `side` pixels each: small
    /// pictures are enlarged (Gemma 4).
    Rows {
        /// Pixels of the side of what becomes a row.
        side: usize,
        /// Rows, at most. The authors use 70, 140, 280, 560 and 1120.
        most: usize,
    },
    /// The nearest size of between `least` and `most` pixels, all frames of a video together
    /// (Qwen 3.5).
    Pixels {
        /// Pixels of the side of what becomes a row.
        side: usize,
        /// Pixels, at least.
        least: usize,
        /// Pixels, at most.
        most: usize,
        /// Frames that become one span.
        frames_a_run: usize,
    },
}

impl SizeRule {
    /// The rule with the numbers that a `preprocessor_config.json` has, or for all frames of a video
    /// together a `video_preprocessor_config.json`.
    #[must_use]
    pub fn read(self, config: &Value) -> SizeRule {
        let number = |value: &Value| {
            value
                .as_u64()
                .filter(|n| *n > 0)
                .map(|n| n.min(MOST_PIXELS))
        };
        let first = |values: [&Value; 2]| values.into_iter().find_map(number).map(|n| n as usize);
        let (size, none) = (&config["size"], &Value::Null);
        match self {
            SizeRule::Rows { side, most } => SizeRule::Rows {
                side,
                most: first([&config["max_soft_tokens"], none]).unwrap_or(most),
            },
            SizeRule::Pixels {
                side,
                least,
                most,
                frames_a_run,
            } => SizeRule::Pixels {
                side,
                least: first([&size["shortest_edge"], &config["min_pixels"]]).unwrap_or(least),
                most: first([&size["longest_edge"], &config["max_pixels"]]).unwrap_or(most),
                frames_a_run,
            },
        }
    }

    /// The rule with at most `rows` rows a picture, at least one.
    #[must_use]
    pub fn at_most(self, rows: usize) -> SizeRule {
        let rows = rows.max(1);
        match self {
            SizeRule::Rows { side, most } => SizeRule::Rows {
                side,
                most: most.min(rows),
            },
            SizeRule::Pixels {
                side,
                least,
                most,
                frames_a_run,
            } => {
                let most = most.min(rows.saturating_mul(side * side));
                SizeRule::Pixels {
                    side,
                    least: least.min(most),
                    most,
                    frames_a_run,
                }
            }
        }
    }

    /// Rows that a picture becomes, at most.
    pub const fn most_rows(&self) -> usize {
        match *self {
            SizeRule::Rows { most, .. } => most,
            SizeRule::Pixels { side, most, .. } => most / (side * side),
        }
    }

    /// Height and width that `frames` frames of `height` and `width` pixels are resized to; 1 frame
    /// for a picture.
    ///
    /// # Errors
    ///
    /// [`MediaError::NoFrames`] without frames or pixels, [`MediaError::Aspect`] if one side is too
    /// much longer than the other.
    pub fn fit(
        &self,
        frames: usize,
        height: usize,
        width: usize,
    ) -> Result<[usize; 2], MediaError> {
        if frames == 0 || height == 0 || width == 0 {
            return Err(MediaError::NoFrames);
        }
        match *self {
            SizeRule::Rows { side, most } => fit_rows(side, most, height, width),
            SizeRule::Pixels {
                side,
                least,
                most,
                frames_a_run,
            } => {
                let frames = match frames {
                    1 => [1, 1],
                    n => [n, round_even(n, frames_a_run) * frames_a_run],
                };
                fit_pixels(side, [least, most], frames, height, width)
            }
        }
    }
}

fn fit_rows(
    side: usize,
    most: usize,
    height: usize,
    width: usize,
) -> Result<[usize; 2], MediaError> {
    let (h, w, s) = (height as f64, width as f64, side as f64);
    let pixels = (most * side * side) as f64;
    let factor = (pixels / (h * w)).sqrt();
    let sides = |x: f64| (factor * x / s).floor() as usize;
    match [sides(h), sides(w)] {
        [0, 0] => Err(MediaError::Aspect { height, width }),
        [0, _] => Ok([side, (width / height).min(most) * side]),
        [_, 0] => Ok([(height / width).min(most) * side, side]),
        [rows, cols] => Ok([rows * side, cols * side]),
    }
}

/// Fits `frames`, as they are and as whole runs.
fn fit_pixels(
    side: usize,
    [least, most]: [usize; 2],
    [frames, whole]: [usize; 2],
    mut height: usize,
    mut width: usize,
) -> Result<[usize; 2], MediaError> {
    let s = side as f64;
    let is_video = frames > 1;
    if is_video && (height < side || width < side) {
        let scale = (s / height as f64).max(s / width as f64);
        height = (height as f64 * scale) as usize;
        width = (width as f64 * scale) as usize;
    }
    let (h, w) = (height as f64, width as f64);
    if h.max(w) / h.min(w) > MOST_ASPECT {
        return Err(MediaError::Aspect { height, width });
    }
    let [rows, cols] = [height, width].map(|x| round_even(x, side) * side);
    let all = whole * rows * cols;
    let n = (frames * height * width) as f64;
    let sides = |f: &dyn Fn(f64) -> f64| [h, w].map(|x| f(x) as usize * side);
    if all > most {
        let shrink = (n / most as f64).sqrt();
        let sizes = sides(&|x| (x / shrink / s).floor());
        return Ok(sizes.map(|x| x.max(side)));
    }
    if all < least {
        let grow = (least as f64 / n).sqrt();
        return Ok(sides(&|x| (x * grow / s).ceil()));
    }
    Ok([rows, cols])
}

/// `n / by`, rounded to the nearest, ties to even.
fn round_even(n: usize, by: usize) -> usize {
    (n as f64 / by as f64).round_ties_even() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What transformers 5.23 computes (`get_aspect_ratio_preserving_size`).
    #[test]
    fn pictures_of_gemma_fill_their_rows() {
        let fit = |most, height, width| SizeRule::Rows { side: 48, most }.fit(1, height, width);
        for (most, from, to) in [
            (70, (384, 384), [384, 384]),
            (70, (40, 90), [240, 576]),
            (70, (1080, 1920), [288, 528]),
            (280, (1080, 1920), [576, 1056]),
            (280, (6, 200), [96, 4608]),
            (70, (1, 90), [48, 3360]),
            (70, (1, 60), [48, 3072]),
            (70, (3000, 10), [3360, 48]),
            (1120, (4000, 3000), [1824, 1344]),
            (70, (384, 385), [384, 384]),
            (140, (999, 1001), [528, 528]),
            (560, (37, 41), [1056, 1152]),
        ] {
            assert_eq!(fit(most, from.0, from.1), Ok(to), "{from:?} in {most} rows");
        }
        let aspect = MediaError::Aspect {
            height: 0,
            width: 9,
        };
        assert_eq!(fit(70, 0, 9), Err(MediaError::NoFrames), "not {aspect}");
    }

    /// What transformers 5.23 computes (`smart_resize` of pictures, and that of video).
    #[test]
    fn pictures_of_qwen_keep_their_size_within_limits() {
        let rule = SizeRule::Pixels {
            side: 32,
            least: 65536,
            most: 16_777_216,
            frames_a_run: 2,
        };
        for (frames, from, to) in [
            (1, (256, 256), [256, 256]),
            (1, (100, 210), [192, 384]),
            (1, (1080, 1920), [1088, 1920]),
            (1, (5000, 7000), [3456, 4832]),
            (1, (80, 16), [576, 128]),
            (1, (48, 80), [224, 352]),
            (1, (16, 48), [160, 448]),
            (1, (4096, 4096), [4096, 4096]),
            (1, (4112, 4100), [4096, 4096]),
            (1, (10, 1990), [32, 3616]),
            (4, (240, 320), [256, 320]),
            (7, (20, 90), [64, 224]),
            (768, (480, 640), [128, 160]),
            (3, (333, 777), [320, 768]),
            (2, (40, 40), [192, 192]),
        ] {
            assert_eq!(
                rule.fit(frames, from.0, from.1),
                Ok(to),
                "{frames} of {from:?}"
            );
        }
        assert!(rule.fit(1, 10, 2010).is_err());
        let config = serde_json::json!({"size": {"shortest_edge": 1024, "longest_edge": 4096}});
        assert_eq!(rule.read(&config).fit(1, 256, 256), Ok([64, 64]));
        // Fewer rows than the rule's least pixels have, too.
        for rows in [16, 64, 70] {
            let [height, width] = rule.at_most(rows).fit(1, 1080, 1920).unwrap();
            assert!(height * width <= rows * 32 * 32, "{rows}: {height}x{width}");
        }
        assert_eq!(rule.at_most(1 << 20), rule);
    }
}

//! Which frames of a video a tower looks at, and what a prompt says of their times.

use serde_json::Value;

/// Frames a second of a video that does not say.
const FPS: f64 = 24.0;

/// How frames are chosen, and what stands before each span of them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum VideoRule {
    /// Some frames at even distances, each a span of at most `rows` rows
    /// ([`Tower::size_rule`](crate::Tower::size_rule)) after its time in minutes and seconds, spans
    /// apart by a space (Gemma 4).
    Even {
        /// Frames, at most.
        frames: usize,
        /// Rows of a frame, at most.
        rows: usize,
    },
    /// Some frames a second, several of which are a span after their mean time in seconds (Qwen
    /// 3.5).
    Rate {
        /// Frames a second.
        fps: f64,
        /// Frames, at least, of a video that has them.
        least: usize,
        /// Frames, at most.
        most: usize,
        /// Frames of a span.
        frames_a_run: usize,
    },
}

impl VideoRule {
    /// The rule with the numbers that a `video_preprocessor_config.json` has.
    #[must_use]
    pub fn read(self, config: &Value) -> VideoRule {
        let size = |key: &str, or: usize| {
            let size = config[key].as_u64().filter(|n| *n > 0);
            size.map_or(or, |n| usize::try_from(n).unwrap_or(usize::MAX))
        };
        match self {
            VideoRule::Even { frames, rows } => VideoRule::Even {
                frames: size("num_frames", frames),
                rows: size("max_soft_tokens", rows),
            },
            VideoRule::Rate {
                fps,
                least,
                most,
                frames_a_run,
            } => VideoRule::Rate {
                fps: config["fps"]
                    .as_f64()
                    .filter(|fps| *fps > 0.0)
                    .unwrap_or(fps),
                least: size("min_frames", least),
                most: size("max_frames", most),
                frames_a_run,
            },
        }
    }

    /// The numbers of the frames, ascending, that are looked at in a video of `count` frames, `fps` a
    /// second (24 if that is not known or no number of frames).
    pub fn frames(&self, count: usize, fps: Option<f64>) -> Vec<usize> {
        match *self {
            VideoRule::Even { frames, .. } => {
                let n = frames.min(count);
                let nth = |i: usize| (i as u128 * count as u128 / n as u128) as usize;
                (0..n).map(nth).collect()
            }
            VideoRule::Rate {
                fps: rate,
                least,
                most,
                ..
            } => {
                let wanted = (count as f64 / known(fps) * rate) as usize;
                let n = wanted.max(least).min(most).min(count);
                let last = count.saturating_sub(1);
                let step = last as f64 / n.saturating_sub(1).max(1) as f64;
                let nth = |i: usize| ((i as f64 * step).round_ties_even() as usize).min(last);
                (0..n).map(nth).collect()
            }
        }
    }

    /// What stands before each span, in order, where frames of these numbers are looked at.
    pub fn labels(&self, frames: &[usize], fps: Option<f64>) -> Vec<String> {
        let fps = known(fps);
        let time = |frame: usize| frame as f64 / fps;
        match *self {
            VideoRule::Even { .. } => {
                let label = |(i, &frame): (usize, &usize)| {
                    let seconds = time(frame) as u64;
                    let apart = if i > 0 { " " } else { "" };
                    format!("{apart}{:02}:{:02} ", seconds / 60, seconds % 60)
                };
                frames.iter().enumerate().map(label).collect()
            }
            VideoRule::Rate { frames_a_run, .. } => {
                // A span that lacks frames repeats the last one.
                let last = |span: &[usize]| match span.len() == frames_a_run {
                    true => span[frames_a_run - 1],
                    false => *frames.last().expect("frames of a span"),
                };
                let mean = |span: &[usize]| (time(span[0]) + time(last(span))) / 2.0;
                let spans = frames.chunks(frames_a_run);
                spans
                    .map(|span| format!("<{:.1} seconds>", mean(span)))
                    .collect()
            }
        }
    }
}

fn known(fps: Option<f64>) -> f64 {
    fps.filter(|fps| fps.is_finite() && *fps > 0.0)
        .unwrap_or(FPS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const GEMMA: VideoRule = VideoRule::Even {
        frames: 32,
        rows: 70,
    };
    const QWEN: VideoRule = VideoRule::Rate {
        fps: 2.0,
        least: 4,
        most: 768,
        frames_a_run: 2,
    };

    /// What transformers 5.23 chooses and writes.
    #[test]
    fn frames_and_times_are_those_of_the_public_processors() {
        let said = |rule: VideoRule, count, fps| {
            let frames = rule.frames(count, Some(fps));
            let labels = rule.labels(&frames, Some(fps)).concat();
            (frames, labels)
        };
        for (count, fps, frames, labels) in [
            (3, 24.0, &[0, 1, 2][..], "<0.0 seconds><0.1 seconds>"),
            (10, 24.0, &[0, 3, 6, 9], "<0.1 seconds><0.3 seconds>"),
            (48, 24.0, &[0, 16, 31, 47], "<0.3 seconds><1.6 seconds>"),
            (49, 24.0, &[0, 16, 32, 48], "<0.3 seconds><1.7 seconds>"),
            (
                100,
                30.0,
                &[0, 20, 40, 59, 79, 99],
                "<0.3 seconds><1.6 seconds><3.0 seconds>",
            ),
            (
                5,
                1.0,
                &[0, 1, 2, 3, 4],
                "<0.5 seconds><2.5 seconds><4.0 seconds>",
            ),
        ] {
            assert_eq!(said(QWEN, count, fps), (frames.to_vec(), labels.to_owned()));
        }
        let long = QWEN.frames(301, Some(29.97));
        assert_eq!((long.len(), &long[..6]), (20, &[0, 16, 32, 47, 63, 79][..]));
        let four = GEMMA.read(&json!({"num_frames": 4, "max_soft_tokens": 140}));
        assert_eq!(
            four,
            VideoRule::Even {
                frames: 4,
                rows: 140
            }
        );
        let (frames, labels) = said(four, 7 * 24 * 61, 24.0);
        assert_eq!(frames, [0, 2562, 5124, 7686]);
        assert_eq!(labels, "00:00  01:46  03:33  05:20 ");
        assert_eq!(said(GEMMA, 2, 24.0).1, "00:00  00:00 ");
    }

    #[test]
    fn videos_of_any_length_and_speed_have_frames_of_their_own() {
        for rule in [GEMMA, QWEN] {
            for count in [0, 1, 2, 5, 1000, usize::MAX] {
                for fps in [None, Some(0.0), Some(f64::NAN), Some(1e-300), Some(1e300)] {
                    let frames = rule.frames(count, fps);
                    assert!(frames.len() <= count.min(768) && frames.iter().all(|f| *f < count));
                    assert!(frames.is_sorted());
                    rule.labels(&frames, fps);
                }
            }
        }
    }
}

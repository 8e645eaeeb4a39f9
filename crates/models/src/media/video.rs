//! Which frames of a video a tower looks at, and what a prompt says of their times.

use serde_json::Value;

/// Frames a second of a video that does not say.
const FPS: f64 = 24.0;
/// Tokens of a span beside its rows, about: its time, and what begins and ends it.
const SPAN_TOKENS: usize = 12;

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
        /// Frames a second, at most, where somebody asks for that.
        fps: Option<f64>,
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
            VideoRule::Even { frames, rows, fps } => VideoRule::Even {
                frames: size("num_frames", frames),
                rows: size("max_soft_tokens", rows),
                fps,
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

    /// The rule where somebody asks for `fps` frames a second, or for `frames` frames in all, which
    /// come before.
    #[must_use]
    pub fn asked(self, fps: Option<f64>, frames: Option<usize>) -> VideoRule {
        let fps = fps.filter(|fps| fps.is_finite() && *fps > 0.0);
        match self {
            VideoRule::Even {
                frames: most,
                rows,
                fps: of_rule,
            } => VideoRule::Even {
                frames: frames.unwrap_or(most).max(1),
                rows,
                fps: fps.filter(|_| frames.is_none()).or(of_rule),
            },
            VideoRule::Rate {
                fps: of_rule,
                least,
                most,
                frames_a_run,
            } => VideoRule::Rate {
                fps: fps.unwrap_or(of_rule),
                least: frames.unwrap_or(least).max(1),
                most: frames.unwrap_or(most).max(1),
                frames_a_run,
            },
        }
    }

    /// The rule with at most so many frames that `tokens` tokens of a prompt have room for their rows
    /// and for what is said of their times, at least one span.
    #[must_use]
    pub fn at_most(self, tokens: usize) -> VideoRule {
        match self {
            VideoRule::Even { frames, rows, fps } => VideoRule::Even {
                frames: frames.min(tokens / (rows + SPAN_TOKENS)).max(1),
                rows,
                fps,
            },
            VideoRule::Rate {
                fps,
                least,
                most,
                frames_a_run,
            } => {
                let most = most.min((tokens / (2 * SPAN_TOKENS)).max(1) * frames_a_run);
                VideoRule::Rate {
                    fps,
                    least: least.min(most),
                    most,
                    frames_a_run,
                }
            }
        }
    }

    /// The rule with `frames` frames at most, at least one.
    #[must_use]
    pub fn with_most(mut self, frames: usize) -> VideoRule {
        let limit = |most: &mut usize| *most = (*most).min(frames).max(1);
        match &mut self {
            VideoRule::Even { frames, .. } => limit(frames),
            VideoRule::Rate { least, most, .. } => {
                limit(most);
                *least = (*least).min(*most);
            }
        }
        self
    }

    /// Frames that are looked at, at most.
    pub fn most_frames(&self) -> usize {
        match *self {
            VideoRule::Even { frames, .. } => frames,
            VideoRule::Rate { most, .. } => most,
        }
    }

    /// Frames of a span.
    pub fn frames_a_run(&self) -> usize {
        match *self {
            VideoRule::Even { .. } => 1,
            VideoRule::Rate { frames_a_run, .. } => frames_a_run,
        }
    }

    /// The numbers of the frames, ascending, that are looked at in a video of `count` frames, `fps` a
    /// second (24 if that is not known or no number of frames).
    pub fn frames(&self, count: usize, fps: Option<f64>) -> Vec<usize> {
        match *self {
            VideoRule::Even {
                frames, fps: rate, ..
            } => {
                let wanted = rate.map(|rate| (count as f64 / known(fps) * rate) as usize);
                let n = wanted.unwrap_or(frames).max(1).min(frames).min(count);
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
        fps: None,
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
                rows: 140,
                fps: None,
            }
        );
        let (frames, labels) = said(four, 7 * 24 * 61, 24.0);
        assert_eq!(frames, [0, 2562, 5124, 7686]);
        assert_eq!(labels, "00:00  01:46  03:33  05:20 ");
        assert_eq!(said(GEMMA, 2, 24.0).1, "00:00  00:00 ");
    }

    #[test]
    fn somebody_may_ask_for_other_frames() {
        let n = |rule: VideoRule, count| rule.frames(count, Some(24.0)).len();
        assert_eq!(n(QWEN.asked(Some(1.0), None), 240), 10);
        assert_eq!(n(QWEN.asked(Some(1.0), None), 24), 4, "the least");
        assert_eq!(n(QWEN.asked(None, Some(7)), 2400), 7);
        assert_eq!(n(QWEN.asked(None, Some(7)), 5), 5);
        assert_eq!(n(GEMMA.asked(Some(1.0), None), 240), 10);
        assert_eq!(n(GEMMA.asked(Some(1.0), None), 24_000), 32, "the most");
        assert_eq!(n(GEMMA.asked(Some(0.1), None), 24), 1);
        assert_eq!(n(GEMMA.asked(Some(9.0), Some(50)), 2400), 50);
        assert_eq!(GEMMA.asked(Some(f64::NAN), None), GEMMA);
        assert_eq!(n(GEMMA.with_most(5), 2400), 5);
        assert_eq!(
            (n(QWEN.with_most(3), 2400), n(QWEN.with_most(0), 2400)),
            (3, 1)
        );
        // Half of a context of 1024 tokens.
        assert_eq!(n(GEMMA.at_most(512), 2400), 6);
        assert_eq!(n(QWEN.at_most(512), 24_000), 42);
        assert_eq!(n(QWEN.at_most(0), 24_000), 2);
        assert_eq!((GEMMA.at_most(4096), QWEN.at_most(1 << 20)), (GEMMA, QWEN));
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

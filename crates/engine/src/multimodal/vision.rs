//! What a model sees with: files become what its vision tower reads.

use super::item::{Input, MediaItem, MediaKind, MediaPart, PlacedMedia, frames};
use super::own_file::OwnFile;
use super::place::{KindTokens, WrongPlaces, expand};
use backend::Backend;
use media::{Clip, ClipRule, Frame, Limits, VideoTools};
use models::{Frames, MediaTokens, SizeRule, Tower, TowerPlan, VideoRule};
use sha2::{Digest, Sha256};
use std::sync::Arc;
use text::Tokenizer;

/// Why a file is no picture, clip or sound for the model.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The file cannot be decoded.
    #[error(transparent)]
    File(#[from] media::MediaError),
    /// The picture has a size that the model cannot look at.
    #[error(transparent)]
    Size(#[from] models::MediaError),
    /// The sound is too short or too long.
    #[error(transparent)]
    Sound(#[from] models::SoundError),
    /// The sound would fill the context.
    #[error("becomes {rows} tokens, and half of the context has room for {most}")]
    Rows {
        /// Rows of a prompt that it would become.
        rows: usize,
        /// Rows, at most.
        most: usize,
    },
}

/// A clip that nobody has decoded yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClipSource {
    /// A file: an animated GIF or WebP; MP4 and WebM where there are programs for them.
    File(Vec<u8>),
    /// A file for each frame: PNG, JPEG, WebP or GIF. All of them are looked at.
    Frames(Vec<Vec<u8>>),
}

/// What somebody asks for of a clip.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ClipOptions {
    /// Frames a second: that are looked at of a file, or that a list of frames has.
    pub fps: Option<f64>,
    /// Frames that are looked at of a file, in all.
    pub frames: Option<usize>,
    /// Frames that are looked at of a file, at most.
    pub frames_max: Option<usize>,
}

/// Frames a second of a list of frames whose sender does not say.
const LISTED_FPS: f64 = 1.0;

/// What a model sees with: its vision tower, and what stands for media in its prompts.
pub struct Vision {
    tower: Box<dyn Tower>,
    b: Arc<dyn Backend>,
    tokens: MediaTokens,
    plan: TowerPlan,
    tools: VideoTools,
    /// The tower's own file.
    file: OwnFile,
}

/// What is known of how a model sees.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct VisionInfo {
    /// The architecture of the tower, as in `vision_config.model_type`.
    pub name: &'static str,
    /// Layers of the tower; 0 of a front end without an encoder.
    pub layers: usize,
    /// Rows of a prompt that a picture becomes, at most.
    pub rows_max: usize,
    /// Frames of a clip that are looked at, at most.
    pub frames_max: usize,
    /// Bytes that the tower takes beside its weights while it looks at a picture, or at as much of a
    /// clip as at once, about.
    pub step_bytes: u64,
    /// The name of the tower's own file (`mmproj`); absent where it is part of the model's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
}

impl std::fmt::Debug for Vision {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Vision({})", self.tower.outline().name)
    }
}

/// Which frames of a clip a model looks at, and in which size.
#[derive(Clone, Copy)]
struct Wanted {
    video: VideoRule,
    size: SizeRule,
}

impl ClipRule for Wanted {
    fn frames(&self, count: usize, fps: Option<f64>) -> Vec<usize> {
        self.video.frames(count, fps)
    }

    fn size(&self, frames: usize, height: usize, width: usize) -> Result<[usize; 2], String> {
        // A span that lacks frames repeats the last one: a clip is no picture.
        let frames = frames.max(self.video.frames_a_run());
        let size = self.size.fit(frames, height, width);
        size.map_err(|error| error.to_string())
    }
}

impl Vision {
    /// What a model sees with whose `tower` is on device `b`.
    ///
    /// # Errors
    ///
    /// Says which tokens `tokenizer` lacks.
    pub(crate) fn new(
        tower: Box<dyn Tower>,
        b: Arc<dyn Backend>,
        plan: TowerPlan,
        tokenizer: &Tokenizer,
        file: OwnFile,
    ) -> Result<Self, String> {
        let tokens = tower.tokens().or_else(|| {
            let ids = tower.token_texts().map(|said| tokenizer.id_of(said));
            Some(MediaTokens {
                begin: ids[0]?,
                end: ids[1]?,
                picture: ids[2]?,
                video: ids[3]?,
            })
        });
        let Some(tokens) = tokens else {
            let all = tower.token_texts().join("`, `");
            return Err(format!("the tokenizer lacks one of the tokens `{all}`"));
        };
        Ok(Vision {
            tower,
            b,
            tokens,
            plan,
            tools: VideoTools::default(),
            file,
        })
    }

    /// The tower, and the device that it is on.
    pub(super) fn tower(&self) -> (&dyn Tower, &dyn Backend) {
        (&*self.tower, &*self.b)
    }

    /// The tokens that stand for pictures and for clips.
    pub(super) fn kinds(&self) -> [KindTokens; 2] {
        let MediaTokens {
            begin,
            end,
            picture,
            video,
        } = self.tokens;
        let of = |kind, row| KindTokens {
            kind,
            begin,
            end,
            row,
        };
        [of(MediaKind::Picture, picture), of(MediaKind::Video, video)]
    }

    /// What is known of the model's vision tower.
    pub fn info(&self) -> VisionInfo {
        let outline = self.plan.outline;
        VisionInfo {
            name: outline.name,
            layers: outline.layers,
            rows_max: self.plan.picture.most_rows(),
            frames_max: self.plan.video.most_frames(),
            step_bytes: outline.step_bytes(span_rows(&self.plan)),
            file: self.file.name.clone(),
        }
    }

    /// Decodes a PNG, JPEG, WebP or GIF and resizes it for the model, to `rows` rows of a prompt at
    /// most where somebody asks for fewer than the model's own limit. Of an animation it is the first
    /// frame. Takes milliseconds to seconds: not for a thread that must not wait.
    ///
    /// # Errors
    ///
    /// [`OpenError`]: the file is broken, exceeds `limits`, or has a size that cannot be.
    pub fn open(
        &self,
        file: Vec<u8>,
        rows: Option<usize>,
        limits: &Limits,
    ) -> Result<MediaItem, OpenError> {
        self.picture(&media::decode(file, limits)?, rows)
    }

    /// The picture that `frame` becomes, as [`Vision::open`] has it.
    ///
    /// # Errors
    ///
    /// [`OpenError::Size`]
    pub fn picture(&self, frame: &Frame, rows: Option<usize>) -> Result<MediaItem, OpenError> {
        let rule = self.plan.picture;
        let rule = rows.map_or(rule, |rows| rule.at_most(rows));
        let [height, width] = rule.fit(1, frame.height(), frame.width())?;
        let frame = frame.resized(height, width);
        let part = self.part(String::new(), std::slice::from_ref(&frame))?;
        Ok(MediaItem {
            kind: MediaKind::Picture,
            parts: vec![part],
        })
    }

    /// Decodes a clip and resizes the frames of it that the model looks at. Takes milliseconds to
    /// seconds: not for a thread that must not wait.
    ///
    /// # Errors
    ///
    /// As [`Vision::open`].
    pub fn open_clip(
        &self,
        source: ClipSource,
        options: ClipOptions,
        limits: &Limits,
    ) -> Result<MediaItem, OpenError> {
        let size = self.plan.frames;
        let clip = match source {
            ClipSource::File(file) => {
                let video = self.video(options);
                media::decode_clip(file, Wanted { video, size }, limits, &self.tools)?
            }
            ClipSource::Frames(files) => {
                let video = self.plan.video;
                let fps = Some(options.fps.unwrap_or(LISTED_FPS));
                media::decode_frames(files, fps, Wanted { video, size }, limits)?
            }
        };
        self.clip(&clip)
    }

    /// The clip that `frames` become, `fps` a second if that is known: those that the model looks at of
    /// them.
    ///
    /// # Errors
    ///
    /// [`OpenError`]: there are none, or they have several sizes, or one that cannot be.
    pub fn frames(
        &self,
        frames: &[Frame],
        fps: Option<f64>,
        options: ClipOptions,
    ) -> Result<MediaItem, OpenError> {
        let size = self.plan.frames;
        let video = self.video(options);
        let clip = media::choose_frames(frames, fps, &Wanted { video, size }, &Limits::default())?;
        self.clip(&clip)
    }

    /// Which frames are looked at where somebody asks for `options`.
    fn video(&self, options: ClipOptions) -> VideoRule {
        let asked = self.plan.video.asked(options.fps, options.frames);
        asked.with_most(options.frames_max.unwrap_or(usize::MAX))
    }

    /// The spans that `clip` becomes, whose frames have a size for the model.
    fn clip(&self, clip: &Clip) -> Result<MediaItem, OpenError> {
        let labels = self.plan.video.labels(clip.numbers(), clip.fps());
        let runs = clip.frames().chunks(self.plan.video.frames_a_run());
        let parts = labels.into_iter().zip(runs);
        let parts = parts.map(|(label, frames)| self.part(label, frames));
        Ok(MediaItem {
            kind: MediaKind::Video,
            parts: parts.collect::<Result<_, _>>()?,
        })
    }

    /// The span that frames of a size for the model become.
    fn part(&self, label: String, shown: &[Frame]) -> Result<MediaPart, OpenError> {
        let all: Vec<&[u8]> = shown.iter().map(Frame::rgb).collect();
        let (height, width) = (shown[0].height(), shown[0].width());
        let rgb: Arc<[u8]> = all.concat().into();
        let read = frames(height, width, &rgb);
        let grid = self.tower.grid(&read)?;
        Ok(MediaPart {
            label,
            grid: [grid.height, grid.width],
            hash: self.hash(&read),
            input: Input::Pixels { height, width, rgb },
        })
    }

    /// The first 16 bytes of the SHA-256 of `frames` and of what their encoding depends on.
    fn hash(&self, frames: &Frames<'_>) -> [u8; 16] {
        let mut hash = Sha256::new();
        let outline = self.tower.outline();
        hash.update(format!(
            "{outline:?} {} {} {}x{}\n",
            self.file.sha256,
            self.b.name(),
            frames.height,
            frames.width
        ));
        hash.update(frames.rgb);
        let all: [u8; 32] = hash.finalize().into();
        all[..16].try_into().expect("16 of 32 bytes")
    }

    /// The token that stands for a picture in a prompt that [`Vision::place`] takes.
    pub fn placeholder(&self) -> u32 {
        self.tokens.picture
    }

    /// Gives each of `items` its place in `prompt`, in order: the token that stands for it there becomes
    /// as many as it has rows, between the tokens that begin and end a picture, where these are not there
    /// already. Of a clip each frame, or pair of frames, comes after its time, as `tokenizer` spells it.
    ///
    /// # Errors
    ///
    /// [`WrongPlaces`]
    pub fn place(
        &self,
        prompt: Vec<u32>,
        items: Vec<MediaItem>,
        tokenizer: &Tokenizer,
    ) -> Result<(Vec<u32>, Vec<PlacedMedia>), WrongPlaces> {
        expand(prompt, items, &self.kinds(), tokenizer)
    }
}

/// Rows of a span, at most, in which a tower of this `plan` looks at a picture or at frames of a clip.
pub(super) fn span_rows(plan: &TowerPlan) -> usize {
    let frames = plan.frames.most_rows() / plan.video.frames_a_run();
    plan.picture.most_rows().max(frames)
}

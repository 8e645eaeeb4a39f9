//! Pictures of requests: files become pixels, pixels rows of a prompt, and rows embeddings.
//!
//! ```text
//! file ─ Vision::open ─→ Picture ─ Vision::place ─→ Request::pictures      any thread
//! Request::pictures ─ Looking::see ─→ embeddings ─→ speculate::MediaSpan   the engine's thread
//! ```
//!
//! A picture is decoded, resized and hashed by whoever reads a request. The tower runs on the
//! engine's thread, one picture between two rounds, and what it has made is kept by content, so that
//! a second question about a picture runs no tower.
//!
//! Deliberately absent: fetching, video, sound.

mod cache;
mod sight;

pub(crate) use sight::Sight;

use crate::request::Request;
use backend::Backend;
use cache::Embeddings;
use media::{Frame, Limits};
use models::{Frames, MediaTokens, SizeRule, Tower, encode};
use sha2::{Digest, Sha256};
use speculate::MediaSpan;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use text::Tokenizer;

/// Bytes of embeddings that are kept for later questions about their pictures.
const CACHE_BYTES: usize = 256 << 20;

/// A picture that has been decoded and resized for the model.
#[derive(Clone)]
pub struct Picture {
    height: usize,
    width: usize,
    /// Red, green and blue of each pixel, `[height, width, 3]`.
    rgb: Arc<[u8]>,
    /// Rows of a prompt from top to bottom, and from left to right.
    grid: [usize; 2],
    hash: [u8; 16],
}

impl Picture {
    /// Rows of a prompt that the picture becomes.
    pub fn rows(&self) -> usize {
        self.grid[0] * self.grid[1]
    }

    /// The first 16 bytes of the SHA-256 of its pixels, its size, and what their encoding depends on.
    pub fn hash(&self) -> [u8; 16] {
        self.hash
    }
}

impl std::fmt::Debug for Picture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Picture({}x{})", self.height, self.width)
    }
}

/// A picture in a prompt.
#[derive(Clone, Debug)]
pub struct PlacedPicture {
    picture: Picture,
    /// The rows of the prompt; their tokens are placeholders.
    rows: Range<usize>,
    /// What the target reads in the place of the placeholders; empty until the tower has run.
    embeddings: Arc<[f32]>,
}

impl PlacedPicture {
    /// The rows of the prompt that are the picture's; their tokens are placeholders.
    pub fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// The picture as prompts of the target have it.
    pub(crate) fn span(&self) -> MediaSpan {
        MediaSpan {
            rows: self.rows.clone(),
            hash: self.picture.hash,
            grid: self.picture.grid,
            embeddings: self.embeddings.clone(),
        }
    }
}

/// Why a file is no picture for the model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PictureError {
    /// The file cannot be decoded.
    #[error(transparent)]
    File(#[from] media::MediaError),
    /// The picture has a size that the model cannot look at.
    #[error(transparent)]
    Size(#[from] models::MediaError),
}

/// A prompt has places for another number of pictures than there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the prompt has {places} of the token that stands for a picture, and {pictures} pictures come with it: the model's chat template writes one for each, and nothing else may"
)]
pub struct WrongPlaces {
    /// Placeholders in the prompt.
    pub places: usize,
    /// Pictures that come with it.
    pub pictures: usize,
}

/// What a model sees with: its vision tower, and what stands for pictures in its prompts.
pub struct Vision {
    tower: Box<dyn Tower>,
    b: Arc<dyn Backend>,
    tokens: MediaTokens,
    rule: SizeRule,
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
    /// Bytes that the tower takes beside its weights while it looks at such a picture, about.
    pub step_bytes: u64,
}

impl std::fmt::Debug for Vision {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Vision({})", self.tower.outline().name)
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
        rule: SizeRule,
        tokenizer: &Tokenizer,
    ) -> Result<Self, String> {
        let tokens = tower.tokens().or_else(|| {
            let ids = tower.token_texts().map(|text| tokenizer.id_of(text));
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
            rule,
        })
    }

    /// What is known of it.
    pub fn info(&self) -> VisionInfo {
        let (outline, rows_max) = (self.tower.outline(), self.rule.most_rows());
        VisionInfo {
            name: outline.name,
            layers: outline.layers,
            rows_max,
            step_bytes: outline.step_bytes(rows_max),
        }
    }

    /// Decodes a PNG, JPEG, WebP or GIF and resizes it for the model, to `rows` rows of a prompt at
    /// most where somebody asks for fewer than the model's own limit. Of an animation it is the first
    /// frame. Takes milliseconds to seconds: not for a thread that must not wait.
    ///
    /// # Errors
    ///
    /// [`PictureError`]: the file is broken, exceeds `limits`, or has a size that cannot be.
    pub fn open(
        &self,
        file: Vec<u8>,
        rows: Option<usize>,
        limits: &Limits,
    ) -> Result<Picture, PictureError> {
        let clip = media::decode(file, limits)?;
        self.picture(clip.frame(0), rows)
    }

    /// The picture that `frame` becomes, as [`Vision::open`] has it.
    ///
    /// # Errors
    ///
    /// [`PictureError::Size`]
    pub fn picture(&self, frame: &Frame, rows: Option<usize>) -> Result<Picture, PictureError> {
        let rule = rows.map_or(self.rule, |rows| self.rule.at_most(rows));
        let [height, width] = rule.fit(1, frame.height(), frame.width())?;
        let frame = frame.resized(height, width);
        let frames = Frames {
            height,
            width,
            rgb: frame.rgb(),
        };
        let grid = self.tower.grid(&frames)?;
        let hash = self.hash(&frames);
        Ok(Picture {
            height,
            width,
            rgb: frame.rgb().into(),
            grid: [grid.height, grid.width],
            hash,
        })
    }

    /// The first 16 bytes of the SHA-256 of `frames` and of what their encoding depends on.
    fn hash(&self, frames: &Frames<'_>) -> [u8; 16] {
        let mut hash = Sha256::new();
        let outline = self.tower.outline();
        hash.update(format!(
            "{outline:?} {} {}x{}\n",
            self.b.name(),
            frames.height,
            frames.width
        ));
        hash.update(frames.rgb);
        let all: [u8; 32] = hash.finalize().into();
        all[..16].try_into().expect("16 of 32 bytes")
    }

    /// Whether `prompt` has a token that stands for a picture.
    pub fn is_in(&self, prompt: &[u32]) -> bool {
        prompt.contains(&self.tokens.picture)
    }

    /// Gives each of `pictures` its place in `prompt`, in order: the token that stands for it there
    /// becomes as many as the picture has rows, between the tokens that begin and end a picture, where
    /// these are not there already.
    ///
    /// # Errors
    ///
    /// [`WrongPlaces`]
    pub fn place(
        &self,
        prompt: Vec<u32>,
        pictures: Vec<Picture>,
    ) -> Result<(Vec<u32>, Vec<PlacedPicture>), WrongPlaces> {
        expand(prompt, pictures, self.tokens)
    }
}

/// [`Vision::place`] by a tower's `tokens`.
fn expand(
    prompt: Vec<u32>,
    pictures: Vec<Picture>,
    tokens: MediaTokens,
) -> Result<(Vec<u32>, Vec<PlacedPicture>), WrongPlaces> {
    let places = prompt.iter().filter(|&&t| t == tokens.picture).count();
    if places != pictures.len() {
        return Err(WrongPlaces {
            places,
            pictures: pictures.len(),
        });
    }
    let all: usize = pictures.iter().map(|picture| picture.rows() + 1).sum();
    let mut out = Vec::with_capacity(prompt.len() + all);
    let (mut placed, mut pictures) = (Vec::new(), pictures.into_iter());
    for (i, &token) in prompt.iter().enumerate() {
        if token != tokens.picture {
            out.push(token);
            continue;
        }
        let picture = pictures.next().expect("as many pictures as places");
        if out.last() != Some(&tokens.begin) {
            out.push(tokens.begin);
        }
        let rows = out.len()..out.len() + picture.rows();
        out.resize(rows.end, tokens.picture);
        if prompt.get(i + 1) != Some(&tokens.end) {
            out.push(tokens.end);
        }
        placed.push(PlacedPicture {
            picture,
            rows,
            embeddings: Arc::default(),
        });
    }
    Ok((out, placed))
}

/// What the engine's thread looks at pictures with.
pub(crate) struct Looking {
    vision: Arc<Vision>,
    embeddings: Embeddings,
}

impl Looking {
    pub(crate) fn new(vision: Arc<Vision>) -> Self {
        Looking {
            vision,
            embeddings: Embeddings::new(CACHE_BYTES),
        }
    }

    /// Gives pictures of `request` what is known of them, and has the tower look at the first that
    /// is unknown. Whether the tower has worked, as `counts` are told.
    ///
    /// # Errors
    ///
    /// What the device says.
    pub(crate) fn see(
        &mut self,
        request: &mut Request,
        counts: &PictureCounts,
    ) -> Result<bool, String> {
        for placed in &mut request.pictures {
            if !placed.embeddings.is_empty() {
                continue;
            }
            let picture = &placed.picture;
            if let Some(known) = self.embeddings.get(&picture.hash) {
                placed.embeddings = known;
                counts.known.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            let frames = Frames {
                height: picture.height,
                width: picture.width,
                rgb: &picture.rgb,
            };
            let (tower, b) = (&*self.vision.tower, &*self.vision.b);
            let (_, rows) = encode(tower, b, &frames).map_err(|error| error.to_string())?;
            placed.embeddings = rows.into();
            self.embeddings.put(picture.hash, placed.embeddings.clone());
            counts.encoded.fetch_add(1, Ordering::Relaxed);
            return Ok(true);
        }
        Ok(false)
    }
}

/// Pictures since the engine has started.
#[derive(Debug, Default)]
pub struct PictureCounts {
    /// Pictures that the tower has looked at.
    pub encoded: AtomicU64,
    /// Pictures that were known by their content.
    pub known: AtomicU64,
}

/// Checks that the pictures of `request` stand in its prompt, one after the other.
///
/// # Errors
///
/// Says which rows do not.
pub(crate) fn check_places(request: &Request) -> Result<(), String> {
    let mut free = 0;
    for PlacedPicture { rows, .. } in &request.pictures {
        if rows.start < free || rows.end > request.prompt.len() {
            return Err(format!(
                "the rows of pictures ascend within the prompt; {rows:?} does not"
            ));
        }
        free = rows.end;
    }
    Ok(())
}

/// Whether the tower has looked at all pictures of `request`.
pub(crate) fn is_seen(request: &Request) -> bool {
    let mut pictures = request.pictures.iter();
    pictures.all(|placed| !placed.embeddings.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKENS: MediaTokens = MediaTokens {
        begin: 90,
        end: 91,
        picture: 99,
        video: 98,
    };

    fn picture(grid: [usize; 2]) -> Picture {
        Picture {
            height: 1,
            width: 1,
            rgb: Arc::new([0; 3]),
            grid,
            hash: [grid[0] as u8; 16],
        }
    }

    #[test]
    fn a_placeholder_becomes_the_rows_of_its_picture() {
        let pictures = || vec![picture([1, 2]), picture([3, 1])];
        let rows = |placed: &[PlacedPicture]| -> Vec<Range<usize>> {
            placed.iter().map(PlacedPicture::rows).collect()
        };
        // Gemma's template writes the placeholder alone, also one after the other.
        let (tokens, placed) = expand(vec![5, 99, 6, 99], pictures(), TOKENS).unwrap();
        assert_eq!(tokens, [5, 90, 99, 99, 91, 6, 90, 99, 99, 99, 91]);
        assert_eq!(rows(&placed), [2..4, 7..10]);
        assert_eq!(placed[1].span().grid, [3, 1]);
        let (tokens, placed) = expand(vec![99, 99], pictures(), TOKENS).unwrap();
        assert_eq!(tokens, [90, 99, 99, 91, 90, 99, 99, 99, 91]);
        assert_eq!(rows(&placed), [1..3, 5..8]);
        // Qwen's writes what begins and ends it too.
        let written = vec![90, 99, 91, 90, 99, 91, 7];
        let (tokens, placed) = expand(written, pictures(), TOKENS).unwrap();
        assert_eq!(tokens, [90, 99, 99, 91, 90, 99, 99, 99, 91, 7]);
        assert_eq!(rows(&placed), [1..3, 5..8]);
    }

    #[test]
    fn a_prompt_has_one_placeholder_for_each_picture() {
        for (prompt, n, places) in [(vec![5], 1, 0), (vec![99, 99], 1, 2), (vec![99], 2, 1)] {
            let pictures = vec![picture([1, 1]); n];
            let error = expand(prompt, pictures, TOKENS).unwrap_err();
            assert_eq!(
                error,
                WrongPlaces {
                    places,
                    pictures: n
                }
            );
        }
        let (tokens, placed) = expand(vec![5, 90, 6], vec![], TOKENS).unwrap();
        assert!(tokens == [5, 90, 6] && placed.is_empty());
    }
}

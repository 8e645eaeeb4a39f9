//! All that a model perceives with.

use super::place::{KindTokens, WrongPlaces, expand};
use super::{Hearing, MediaItem, PlacedMedia, Vision};
use std::sync::Arc;
use text::Tokenizer;

/// What a model sees and hears with, as far as it does.
#[derive(Clone, Debug, Default)]
pub struct Senses {
    /// For pictures and clips.
    pub vision: Option<Arc<Vision>>,
    /// For sounds.
    pub hearing: Option<Arc<Hearing>>,
}

impl Senses {
    /// Whether the model takes any media.
    pub fn is_some(&self) -> bool {
        self.vision.is_some() || self.hearing.is_some()
    }

    fn tokens(&self) -> Vec<KindTokens> {
        let seen = self.vision.iter().flat_map(|vision| vision.kinds());
        let heard = self.hearing.iter().map(|hearing| hearing.tokens());
        seen.chain(heard).collect()
    }

    /// Gives each of `items` its place in `prompt`, in order: the token that stands for it there becomes
    /// as many as it has rows, between the tokens that begin and end its kind, where these are not there
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
        expand(prompt, items, &self.tokens(), tokenizer)
    }
}

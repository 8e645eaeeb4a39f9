//! How media come into a prompt.
//!
//! A chat template writes one placeholder for a picture, a clip or a sound. It becomes as many as there are
//! rows, between the tokens that begin and end a span. A clip is several spans, each after its time.

use super::{MediaItem, MediaKind, PlacedMedia};
use std::sync::Arc;
use text::{Specials, TextError, Tokenizer};

/// Why media cannot come into a prompt.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WrongPlaces {
    /// The prompt has places for another number of them than there are.
    #[error(
        "the prompt has {places} of the token that stands for a {kind}, and {items} of them come with it: the model's chat template writes one for each, and nothing else may"
    )]
    Count {
        /// The kind of medium that is counted.
        kind: MediaKind,
        /// Placeholders in the prompt.
        places: usize,
        /// Pictures, clips or sounds that come with it.
        items: usize,
    },
    /// Another kind of media has its place there.
    #[error("the prompt has a place for a {kind} where {found} comes: the chat template has another order", found = match found { MediaKind::Picture => "a picture", MediaKind::Video => "a video", MediaKind::Sound => "a sound" })]
    Order {
        /// What has its place there.
        kind: MediaKind,
        /// What comes.
        found: MediaKind,
    },
    /// The times of frames cannot be written.
    #[error(transparent)]
    Text(#[from] TextError),
}

/// The tokens of a prompt that stand for a kind of media.
#[derive(Clone, Copy, Debug)]
pub(super) struct KindTokens {
    pub(super) kind: MediaKind,
    /// Before a span.
    pub(super) begin: u32,
    /// After a span.
    pub(super) end: u32,
    /// A row.
    pub(super) row: u32,
}

/// Gives each of `items` its place in `prompt`, in order, by the `tokens` of towers.
pub(super) fn expand(
    prompt: Vec<u32>,
    items: Vec<MediaItem>,
    tokens: &[KindTokens],
    tokenizer: &Tokenizer,
) -> Result<(Vec<u32>, Vec<PlacedMedia>), WrongPlaces> {
    for kind in [MediaKind::Picture, MediaKind::Video, MediaKind::Sound] {
        let row = tokens.iter().find(|of| of.kind == kind).map(|of| of.row);
        let places = prompt.iter().filter(|&&t| Some(t) == row).count();
        let items = items.iter().filter(|item| item.kind == kind).count();
        if places != items {
            return Err(WrongPlaces::Count {
                kind,
                places,
                items,
            });
        }
    }
    let all: usize = items
        .iter()
        .map(|item| item.rows() + 16 * item.looks())
        .sum();
    let mut out = Vec::with_capacity(prompt.len() + all);
    let (mut placed, mut items) = (Vec::new(), items.into_iter());
    for (i, &token) in prompt.iter().enumerate() {
        let Some(tokens) = tokens.iter().find(|of| of.row == token) else {
            out.push(token);
            continue;
        };
        let kind = tokens.kind;
        let item = items.next().expect("as many items as places");
        if item.kind != kind {
            let found = item.kind;
            return Err(WrongPlaces::Order { kind, found });
        }
        let is_alone = item.parts.iter().all(|part| part.label.is_empty());
        for part in item.parts {
            if !part.label.is_empty() {
                write_after(&mut out, &part.label, tokenizer)?;
            }
            // Templates write what begins and ends a picture, or leave it to whoever fills it in.
            if !is_alone || out.last() != Some(&tokens.begin) {
                out.push(tokens.begin);
            }
            let rows = out.len()..out.len() + part.rows();
            out.resize(rows.end, token);
            if !is_alone || prompt.get(i + 1) != Some(&tokens.end) {
                out.push(tokens.end);
            }
            placed.push(PlacedMedia {
                kind,
                part,
                rows,
                embeddings: Arc::default(),
            });
        }
    }
    Ok((out, placed))
}

/// Writes `label` after the text that `out` ends with, as if both had been encoded as one text.
fn write_after(out: &mut Vec<u32>, label: &str, tokenizer: &Tokenizer) -> Result<(), TextError> {
    let added = tokenizer.added();
    let is_added = |token: &u32| added.binary_search(token).is_ok();
    let start = out.iter().rposition(is_added).map_or(0, |at| at + 1);
    let before = tokenizer.detokenize(&out[start..], Specials::Show);
    // Another spelling of the same text, as where control tokens are text, stays as it is.
    if start < out.len() && tokenizer.encode_as_text(&before)? == out[start..] {
        let both = tokenizer.encode_as_text(&(before + label))?;
        out.truncate(start);
        out.extend(both);
    } else {
        out.extend(tokenizer.encode_as_text(label)?);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::item::{Input, MediaPart};
    use super::*;
    use std::ops::Range;

    const fn tokens(kind: MediaKind, begin: u32, end: u32, row: u32) -> KindTokens {
        KindTokens {
            kind,
            begin,
            end,
            row,
        }
    }

    const TOKENS: &[KindTokens] = &[
        tokens(MediaKind::Picture, 90, 91, 99),
        tokens(MediaKind::Video, 90, 91, 98),
        tokens(MediaKind::Sound, 80, 81, 89),
    ];

    fn tokenizer(model: &str) -> Tokenizer {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/");
        let file = std::fs::read(format!("{root}{model}/tokenizer.json")).unwrap();
        Tokenizer::from_bytes(&file).unwrap()
    }

    fn item(kind: MediaKind, parts: &[(&str, [usize; 2])]) -> MediaItem {
        let part = |&(label, grid): &(&str, [usize; 2])| MediaPart {
            label: label.to_owned(),
            input: Input::Pixels {
                height: 1,
                width: 1,
                rgb: Arc::new([0; 3]),
            },
            grid,
            hash: [grid[0] as u8; 16],
        };
        MediaItem {
            kind,
            parts: parts.iter().map(part).collect(),
        }
    }

    fn picture(grid: [usize; 2]) -> MediaItem {
        item(MediaKind::Picture, &[("", grid)])
    }

    fn rows(placed: &[PlacedMedia]) -> Vec<Range<usize>> {
        placed.iter().map(PlacedMedia::rows).collect()
    }

    #[test]
    fn a_placeholder_becomes_the_rows_of_its_picture() {
        let tokenizer = tokenizer("tiny-gemma4");
        let pictures = || vec![picture([1, 2]), picture([3, 1])];
        let expand = |prompt| expand(prompt, pictures(), TOKENS, &tokenizer).unwrap();
        // Gemma's template writes the placeholder alone, also one after the other.
        let (tokens, placed) = expand(vec![5, 99, 6, 99]);
        assert_eq!(tokens, [5, 90, 99, 99, 91, 6, 90, 99, 99, 99, 91]);
        assert_eq!(rows(&placed), [2..4, 7..10]);
        assert_eq!(placed[1].span().grid, [3, 1]);
        let (tokens, placed) = expand(vec![99, 99]);
        assert_eq!(tokens, [90, 99, 99, 91, 90, 99, 99, 99, 91]);
        assert_eq!(rows(&placed), [1..3, 5..8]);
        // Qwen's writes what begins and ends it too.
        let (tokens, placed) = expand(vec![90, 99, 91, 90, 99, 91, 7]);
        assert_eq!(tokens, [90, 99, 99, 91, 90, 99, 99, 99, 91, 7]);
        assert_eq!(rows(&placed), [1..3, 5..8]);
    }

    #[test]
    fn a_clip_becomes_spans_after_their_times() {
        let tokenizer = tokenizer("tiny-gemma4");
        let text = |text: &str| tokenizer.encode_as_text(text).unwrap();
        let items = || {
            let clip = [("00:00 ", [1, 2]), (" 00:01 ", [1, 1])];
            vec![item(MediaKind::Video, &clip), picture([1, 1])]
        };
        let first = tokenizer.added()[0];
        let prompt = [&[first], &text("Look: ")[..], &[98, 99]].concat();
        let (tokens, placed) = expand(prompt, items(), TOKENS, &tokenizer).unwrap();
        // The first time is of one text with what stands before it.
        let expected = [
            &[first][..],
            &text("Look: 00:00 "),
            &[90, 98, 98, 91],
            &text(" 00:01 "),
            &[90, 98, 91, 90, 99, 91],
        ];
        assert_eq!(tokens, expected.concat());
        let kinds: Vec<MediaKind> = placed.iter().map(PlacedMedia::kind).collect();
        assert_eq!(
            kinds,
            [MediaKind::Video, MediaKind::Video, MediaKind::Picture]
        );
        for placed in &placed {
            let token = TOKENS.iter().find(|of| of.kind == placed.kind).unwrap().row;
            assert!(tokens[placed.rows()].iter().all(|&t| t == token));
        }
        // What a template writes around a clip stays, as in the public processors.
        let prompt = vec![90, 98, 91, 99];
        let (tokens, _) = expand(prompt, items(), TOKENS, &tokenizer).unwrap();
        assert_eq!(tokens[0], 90);
        let ends = tokens.iter().filter(|&&t| t == 91).count();
        assert_eq!(ends, 4, "{tokens:?}");
        let error = expand(vec![99, 98], items(), TOKENS, &tokenizer).unwrap_err();
        assert!(matches!(error, WrongPlaces::Order { .. }), "{error}");
    }

    #[test]
    fn a_sound_stands_between_tokens_of_its_own() {
        let tokenizer = tokenizer("tiny-gemma4");
        let items = || vec![item(MediaKind::Sound, &[("", [1, 3])]), picture([1, 2])];
        let (tokens, placed) = expand(vec![5, 89, 99], items(), TOKENS, &tokenizer).unwrap();
        assert_eq!(tokens, [5, 80, 89, 89, 89, 81, 90, 99, 99, 91]);
        assert_eq!(rows(&placed), [2..5, 7..9]);
        assert!(placed[0].span().is_causal && !placed[1].span().is_causal);
        let error = expand(vec![99, 89], items(), TOKENS, &tokenizer).unwrap_err();
        assert!(error.to_string().contains("a sound comes"), "{error}");
        // A model that only sees has no place for it.
        let error = expand(vec![5, 99], items(), &TOKENS[..2], &tokenizer).unwrap_err();
        assert!(error.to_string().contains("stands for a sound"), "{error}");
    }

    #[test]
    fn a_prompt_has_one_placeholder_for_each_picture() {
        let tokenizer = tokenizer("tiny-qwen3.5");
        for (prompt, n, places) in [(vec![5], 1, 0), (vec![99, 99], 1, 2), (vec![99], 2, 1)] {
            let items = vec![picture([1, 1]); n];
            let error = expand(prompt, items, TOKENS, &tokenizer).unwrap_err();
            let WrongPlaces::Count {
                kind,
                places: p,
                items,
            } = error
            else {
                panic!("{error}");
            };
            assert_eq!((kind, p, items), (MediaKind::Picture, places, n));
        }
        assert!(expand(vec![98], vec![], TOKENS, &tokenizer).is_err());
        let (tokens, placed) = expand(vec![5, 90, 6], vec![], TOKENS, &tokenizer).unwrap();
        assert!(tokens == [5, 90, 6] && placed.is_empty());
    }
}

//! Texts with sounds: as those with pictures, they are those of plain decoding, bit for bit, whoever
//! drafts. Rows of sounds see nothing ahead, also where those of pictures do, and may be cut.

use crate::media::{assert_media_change_nothing, write_alone};
use crate::subjects::{ALONE, Draft, Subject};
use crate::writing::{Setup, backend, best_cpu, speculator};
use backend::Backend;
use cpu::Isa;
use models::{
    Frames, SoundTower, Tower, encode, encode_sound, load_sound_tower, load_target, load_tower,
};
use serde_json::Value;
use speculate::{MediaSpan, Prompt};
use std::sync::Arc;
use suites::{Rng, repository, test_pixels, test_samples};
use weights::Checkpoint;

/// Models whose prompts have sounds, and who drafts for them. The first does not hear: rows are made up
/// for it, which its drafters read as well.
pub(crate) const HEARING: &[Subject] = &[
    Subject {
        target: "models/tiny-gemma4-vision",
        assistant: Some("models/tiny-gemma4-assistant"),
        eagle3: Some("models/tiny-gemma4-eagle3"),
        ..ALONE
    },
    Subject {
        target: "tests/golden/checkpoints/gemma4-audio",
        ..ALONE
    },
    Subject {
        target: "tests/golden/checkpoints/gemma4-unified-audio",
        ..ALONE
    },
];

/// Samples of the sounds, in rows of 40 ms, and one row's own.
const LENGTHS: [usize; 2] = [33, 5];

/// What makes prompts with sounds.
struct Listener {
    b: Arc<dyn Backend>,
    checkpoint: Checkpoint,
    ear: Option<Box<dyn SoundTower>>,
    eye: Option<Box<dyn Tower>>,
    rng: Rng,
}

impl Listener {
    fn new(subject: Subject, b: &Arc<dyn Backend>) -> Self {
        let checkpoint = Checkpoint::open(&repository(subject.target)).unwrap();
        Listener {
            b: b.clone(),
            ear: load_sound_tower(&**b, &checkpoint, &Value::Null).ok(),
            eye: load_tower(&**b, &checkpoint).ok(),
            checkpoint,
            rng: Rng(9),
        }
    }

    fn text(&mut self, n: usize) -> Vec<u32> {
        let vocab = self.checkpoint.text_config()["vocab_size"]
            .as_u64()
            .unwrap();
        let tokens = (vocab as u32).min(8000) - 40;
        (0..n).map(|_| 30 + self.rng.below(tokens)).collect()
    }

    /// Embeddings of sound `number`.
    fn rows(&mut self, number: usize) -> Vec<f32> {
        match &self.ear {
            Some(ear) => {
                let samples = LENGTHS[number] * ear.outline().samples_a_row;
                encode_sound(&**ear, &*self.b, &test_samples(samples, number)).unwrap()
            }
            None => {
                let target = load_target(&*self.b, &self.checkpoint).unwrap();
                let tokens: Vec<u32> = (0..LENGTHS[number])
                    .map(|_| 30 + self.rng.below(900))
                    .collect();
                self.b
                    .download(&target.embed(&*self.b, &tokens))
                    .into_owned()
            }
        }
    }

    /// `prompt` and sound `number` behind it.
    fn say(&mut self, prompt: &mut Vec<u32>, spans: &mut Vec<MediaSpan>, number: usize) {
        let width = self.checkpoint.text_config()["hidden_size"]
            .as_u64()
            .unwrap() as usize;
        let embeddings = self.rows(number);
        let (n, start) = (embeddings.len() / width, prompt.len());
        prompt.resize(start + n, 27);
        spans.push(MediaSpan {
            rows: start..start + n,
            hash: [60 + number as u8; 16],
            grid: [1, n],
            is_causal: true,
            embeddings: embeddings.into(),
        });
    }

    /// `prompt` and a picture behind it, if the model sees.
    fn show(&self, prompt: &mut Vec<u32>, spans: &mut Vec<MediaSpan>) {
        let Some(eye) = &self.eye else { return };
        let side = eye.outline().patch * eye.outline().merge;
        let rgb = test_pixels(1, 2 * side, 3 * side);
        let frames = Frames {
            height: 2 * side,
            width: 3 * side,
            rgb: &rgb,
        };
        let (grid, rows) = encode(&**eye, &*self.b, &frames).unwrap();
        let start = prompt.len();
        prompt.resize(start + grid.rows(), 25);
        spans.push(MediaSpan {
            rows: start..prompt.len(),
            hash: [1; 16],
            grid: [grid.height, grid.width],
            is_causal: false,
            embeddings: rows.into(),
        });
    }

    /// A sound between texts, two sounds one after the other, and a picture between them.
    fn prompts(&mut self) -> Vec<Prompt> {
        let mut prompts = Vec::new();
        for (numbers, is_shown) in [(&[0][..], false), (&[1, 0], false), (&[0, 1], true)] {
            let (mut prompt, mut spans) = (self.text(9), Vec::new());
            for &number in numbers {
                self.say(&mut prompt, &mut spans, number);
                if is_shown {
                    self.show(&mut prompt, &mut spans);
                }
            }
            prompt.extend(self.text(6));
            prompts.push(Prompt::with_media(prompt, spans));
        }
        prompts
    }
}

#[test]
fn speculation_never_changes_a_token_after_sounds() {
    let best = Isa::available().pop().unwrap();
    let backends = [backend(best, 2), backend(best, 1)];
    for &subject in HEARING {
        assert_sounds_change_nothing(subject, [&backends[0], &backends[1]]);
    }
}

/// Asserts that `subject` writes the same texts after prompts with sounds whoever drafts on either of
/// `backends`, in batches and chunks of several sizes.
pub(crate) fn assert_sounds_change_nothing(subject: Subject, backends: [&Arc<dyn Backend>; 2]) {
    let prompts = Listener::new(subject, backends[0]).prompts();
    assert_media_change_nothing(subject, &prompts, backends);
}

#[test]
fn another_sound_has_another_answer() {
    let b = best_cpu();
    for &subject in HEARING {
        let mut listener = Listener::new(subject, &b);
        let (before, after) = (listener.text(9), listener.text(6));
        let mut ask = |number| {
            let (mut prompt, mut spans) = (before.clone(), Vec::new());
            listener.say(&mut prompt, &mut spans, number);
            prompt.extend(&after);
            Prompt::with_media(prompt, spans)
        };
        let prompts = [ask(0), ask(1)];
        let setup = Setup {
            draft: Draft::None,
            width: 1,
            chunk: 128,
            ..Setup::plain(subject, &b)
        };
        let texts = write_alone(&mut speculator(&setup, &[], &|drafter| drafter), &prompts);
        assert!(
            texts[0] != texts[1],
            "{}: the sound is heard",
            subject.target
        );
    }
}

//! Texts with pictures and clips: whoever drafts, however a prompt is cut, whatever is beside it and however
//! much of it is reused, they are those of plain decoding, bit for bit.

use crate::samplings;
use crate::subjects::{ALONE, Draft, Subject};
use crate::writing::{
    Setup, Text, backend, best_cpu, one_thread, oracle, speculator, write_groups,
};
use backend::Backend;
use cache::KvPlan;
use cpu::Isa;
use models::{
    ChainedHead, Eagle3, Frames, MediaTokens, Qwen35Mtp, Tower, encode, load_target, load_tower,
};
use speculate::DraftLength::{self, Fixed, UpTo};
use speculate::{MediaSpan, Prompt, Sampling, Speculator, StreamOptions, TopLogprobs};
use std::sync::Arc;
use suites::{Recorder, Rng, repository, test_pixels};
use weights::Checkpoint;

/// Models with towers, and who drafts for them.
pub(crate) const SEEING: &[Subject] = &[
    Subject {
        target: "models/tiny-gemma4-vision",
        assistant: Some("models/tiny-gemma4-assistant"),
        eagle3: Some("models/tiny-gemma4-eagle3"),
        model: Some("models/tiny-gemma4"),
        ..ALONE
    },
    Subject {
        target: "models/tiny-qwen3.5-vision",
        eagle3: Some("models/tiny-qwen3.5-eagle3"),
        model: Some("models/tiny-qwen3.5-moe"),
        ..ALONE
    },
    Subject {
        target: "tests/golden/checkpoints/gemma4-vision-clipped",
        ..ALONE
    },
    Subject {
        target: "tests/golden/checkpoints/gemma4-vision-standard",
        ..ALONE
    },
    Subject {
        target: "tests/golden/checkpoints/gemma4-unified",
        ..ALONE
    },
];

/// Rows that a picture becomes from top to bottom and from left to right.
const SIZES: [[usize; 2]; 3] = [[2, 3], [4, 2], [3, 3]];

/// Frames of the clip that is shown: of pairs the last lacks one.
const CLIP_FRAMES: usize = 5;

/// What stands between texts.
#[derive(Clone, Copy, Debug)]
enum Shown {
    /// The picture of this number.
    Picture(usize),
    /// A clip of the size of the picture of this number: spans after their times.
    Clip(usize),
}

use Shown::{Clip, Picture};

/// Tokens that a text writes.
const N_TOKENS: usize = 40;

/// What makes prompts with pictures.
struct Painter {
    b: Arc<dyn Backend>,
    tower: Box<dyn Tower>,
    vocab: u32,
    rng: Rng,
}

impl Painter {
    fn new(subject: Subject, b: &Arc<dyn Backend>) -> Self {
        let checkpoint = Checkpoint::open(&repository(subject.target)).unwrap();
        let vocab = checkpoint.text_config()["vocab_size"].as_u64().unwrap();
        Painter {
            b: b.clone(),
            tower: load_tower(&**b, &checkpoint).unwrap(),
            vocab: vocab as u32,
            rng: Rng(7),
        }
    }

    fn text(&mut self, n: usize) -> Vec<u32> {
        let tokens = self.vocab.min(8000) - 40;
        (0..n).map(|_| 30 + self.rng.below(tokens)).collect()
    }

    /// A prompt of texts and, between them, what is shown.
    fn prompt(&self, texts: &[Vec<u32>], shown: &[Shown]) -> Prompt {
        let (mut prompt, mut spans) = (texts[0].clone(), Vec::new());
        let MediaTokens { picture, video, .. } = self.tower.tokens().unwrap();
        for (&shown, text) in shown.iter().zip(&texts[1..]) {
            match shown {
                Picture(number) => {
                    let frame = self.pixels(number, 1);
                    self.show(&mut prompt, &mut spans, picture, number, &frame);
                }
                Clip(number) => {
                    let frames = self.pixels(number, CLIP_FRAMES);
                    let run = frames.len() / CLIP_FRAMES * self.tower.outline().frames_a_run;
                    for (i, frames) in frames.chunks(run).enumerate() {
                        // A time, which is text.
                        prompt.extend([40 + i as u32, 31, 32 + i as u32]);
                        let content = 100 + 10 * number + i;
                        self.show(&mut prompt, &mut spans, video, content, frames);
                    }
                }
            }
            prompt.extend(text);
        }
        Prompt::with_media(prompt, spans)
    }

    /// Frames of the size of picture `number`.
    fn pixels(&self, number: usize, frames: usize) -> Vec<u8> {
        let [height, width] = self.size(number);
        let mut rgb = test_pixels(frames, height, width);
        rgb.iter_mut()
            .for_each(|x| *x = x.wrapping_add(91 * number as u8));
        rgb
    }

    /// Pixels of picture `number` from top to bottom, and from left to right.
    fn size(&self, number: usize) -> [usize; 2] {
        let side = self.tower.outline().patch * self.tower.outline().merge;
        SIZES[number % 10].map(|n| n * side)
    }

    /// Has `prompt` show a span of frames whose rows stand behind `token`, whose number is `content`.
    fn show(
        &self,
        prompt: &mut Vec<u32>,
        spans: &mut Vec<MediaSpan>,
        token: u32,
        content: usize,
        rgb: &[u8],
    ) {
        let number = if content < 100 { content } else { content / 10 };
        let [height, width] = self.size(number);
        let frames = Frames { height, width, rgb };
        let (grid, rows) = encode(&*self.tower, &*self.b, &frames).unwrap();
        let tokens = self.tower.tokens().unwrap();
        prompt.push(tokens.begin);
        let start = prompt.len();
        prompt.resize(start + grid.rows(), token);
        spans.push(MediaSpan {
            rows: start..prompt.len(),
            hash: [content as u8; 16],
            grid: [grid.height, grid.width],
            is_causal: false,
            embeddings: rows.into(),
        });
        prompt.push(tokens.end);
    }

    /// A picture between texts, two pictures, text alone, a picture at the end of a long text, a clip, and
    /// a clip after a picture.
    fn prompts(&mut self) -> Vec<Prompt> {
        let texts = [
            [9, 12, 0],
            [4, 3, 7],
            [30, 0, 0],
            [75, 2, 0],
            [8, 11, 0],
            [3, 5, 14],
        ];
        let shown: [&[Shown]; 6] = [
            &[Picture(0)],
            &[Picture(1), Picture(2)],
            &[],
            &[Picture(1)],
            &[Clip(0)],
            &[Picture(2), Clip(1)],
        ];
        let each = texts.into_iter().zip(shown);
        each.map(|(lengths, shown)| {
            let texts: Vec<Vec<u32>> = lengths.into_iter().map(|n| self.text(n)).collect();
            self.prompt(&texts, shown)
        })
        .collect()
    }
}

fn options(sampling: &Sampling, of: usize, draft: DraftLength) -> StreamOptions {
    StreamOptions {
        sampling: Sampling {
            seed: sampling.seed + of as u64,
            ..sampling.clone()
        },
        max_tokens: N_TOKENS,
        stop_tokens: Arc::new([]),
        draft,
        logprobs: Some(TopLogprobs::of_logits(of)),
    }
}

/// Writes after all prompts, `chunk` rows of each in a round. Also how many tokens were drafted, and how
/// many of these accepted.
fn write(
    speculator: &mut Speculator,
    prompts: &[Prompt],
    (sampling, draft): (&Sampling, DraftLength),
    chunk: usize,
) -> (Vec<Text>, [u64; 2]) {
    write_groups(speculator, prompts, chunk, |i| options(sampling, i, draft))
}

#[track_caller]
fn assert_texts(what: &str, got: &[Text], want: &[Text]) {
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!(
            got == want,
            "{what}: text {i} parts at {:?}",
            got.parting(want)
        );
    }
    assert_eq!(got.len(), want.len(), "{what}");
}

#[test]
fn speculation_never_changes_a_token_after_pictures_and_clips() {
    let best = Isa::available().pop().unwrap();
    let backends = [backend(best, 2), backend(best, 1)];
    for &subject in SEEING {
        assert_pictures_change_nothing(subject, [&backends[0], &backends[1]]);
    }
}

/// Asserts that `subject` writes the same texts after prompts with pictures whoever drafts on either
/// of `backends`, in batches and chunks of several sizes.
pub(crate) fn assert_pictures_change_nothing(subject: Subject, backends: [&Arc<dyn Backend>; 2]) {
    let prompts = Painter::new(subject, backends[0]).prompts();
    assert_media_change_nothing(subject, &prompts, backends);
}

/// What is written after `prompts` without drafts.
pub(crate) fn write_alone(speculator: &mut Speculator, prompts: &[Prompt]) -> Vec<Text> {
    write(speculator, prompts, (&Sampling::default(), Fixed(0)), 128).0
}

/// Asserts that `subject` writes the same texts after `prompts` whoever drafts on either of `backends`,
/// in batches and chunks of several sizes.
pub(crate) fn assert_media_change_nothing(
    subject: Subject,
    prompts: &[Prompt],
    backends: [&Arc<dyn Backend>; 2],
) {
    for (s, (what, sampling)) in samplings().into_iter().enumerate() {
        let setup = |draft, width, backend| Setup {
            draft,
            width,
            // Room for a picture and more, whatever chunk a round is given.
            chunk: 128,
            kv_format: KvPlan::both([&quant::kv::BF16, &quant::kv::F32][s % 2]),
            ..Setup::plain(subject, backend)
        };
        let plain = setup(Draft::None, 1, backends[0]);
        let mut alone = speculator(&plain, &[], &|drafter| drafter);
        let (want, _) = write(&mut alone, prompts, (&sampling, Fixed(0)), 128);
        let drafts = [
            Draft::None,
            Draft::Head,
            Draft::Eagle3,
            Draft::Ngram,
            Draft::Portfolio,
            Draft::Model,
            Draft::Oracle,
        ];
        for (d, draft) in drafts.into_iter().enumerate() {
            if subject.lacks(draft) {
                continue;
            }
            let setup = setup(draft, [4, 1, 3][(s + d) % 3], backends[(s + d) % 2]);
            let length = [Fixed(3), UpTo(8), Fixed(1)][(s + d) % 3];
            let chunk = [1, 33, 128, 7][(s + 2 * d) % 4];
            let what = format!("{} {draft:?} {what}, chunk {chunk}", subject.target);
            let mut drafted = match draft {
                Draft::Oracle => speculator(&setup, &[], &|_| oracle(&want, 4)),
                _ => speculator(&setup, &want, &|drafter| drafter),
            };
            let (got, [n, accepted]) = write(&mut drafted, prompts, (&sampling, length), chunk);
            assert_texts(&what, &got, &want);
            println!("{what}: {accepted} of {n} accepted");
            if draft != Draft::None && draft != Draft::Ngram {
                assert!(n > 0 && accepted > 0, "{what}: {accepted} of {n} accepted");
            }
        }
    }
}

#[test]
fn a_second_question_about_a_picture_or_a_clip_reuses_its_rows_and_changes_nothing() {
    let b = best_cpu();
    let shown = [
        [Picture(0), Picture(1), Picture(2)],
        [Clip(0), Clip(1), Clip(2)],
    ];
    for (&subject, [one_shown, two_shown, other_shown]) in
        SEEING.iter().flat_map(|s| shown.map(|shown| (s, shown)))
    {
        let mut painter = Painter::new(subject, &b);
        let before = painter.text(140);
        let mut question = |n| painter.text(n);
        let (one, two) = (question(90), question(25));
        let ask = |painter: &Painter, question: &Vec<u32>, shown| {
            painter.prompt(&[before.clone(), question.clone()], &[shown])
        };
        let prompts = [
            ask(&painter, &one, one_shown),
            ask(&painter, &[&one[..70], &two].concat(), one_shown),
            // Another one of another size.
            ask(&painter, &two, two_shown),
        ];
        let draft = match subject {
            s if s.has_head() => Draft::Head,
            _ => Draft::Ngram,
        };
        let setup = Setup {
            draft,
            width: 1,
            chunk: 128,
            ..Setup::plain(subject, &b)
        };
        let way = (&Sampling::default(), Fixed(3));
        let mut cold = speculator(&setup, &[], &|drafter| drafter);
        let (want, _) = write(&mut cold, &prompts, way, 128);
        let mut warm = speculator(&setup, &[], &|drafter| drafter);
        let mut got = Vec::new();
        let mut reused = Vec::new();
        let mut parked = None;
        for (i, prompt) in prompts.iter().enumerate() {
            let options = options(way.0, i, way.1);
            let mut stream = match parked.take() {
                None => warm.open(prompt.clone(), options).unwrap(),
                Some(parked) => warm.resume(parked, prompt.clone(), options).unwrap(),
            };
            while stream.finish().is_none() {
                warm.round(&mut [&mut stream], 128).unwrap();
            }
            reused.push(stream.n_reused());
            got.push(Text::of(&mut stream));
            parked = Some(warm.park(stream));
        }
        let what = &*format!("{} {one_shown:?}", subject.target);
        assert_texts(what, &got, &want);
        // The picture's rows end before row 150; recurrent state is taken up at a snapshot.
        assert!(reused[1] >= 150, "{what}: {} rows reused", reused[1]);
        // A clip begins with its time.
        assert!(reused[2] <= 144, "{what}: rows of another picture");
        // The same question about another picture has another answer, or is as likely in other ways.
        let other = ask(&painter, &one, other_shown);
        let (other, _) = write(&mut cold, &[other], way, 128);
        assert!(other[0] != want[0], "{what}: the picture is seen");
    }
}

/// What the draft head of `subject` makes of a prompt with a picture and writes after it; the notes
/// of its rows, by name.
fn head_rows(subject: Subject, draft: Draft, prompt: &Prompt, name: &str) -> (Vec<Vec<f32>>, Text) {
    let recorder = Arc::new(Recorder::new(Box::new(one_thread())));
    let b: Arc<dyn Backend> = recorder.clone();
    let setup = Setup {
        draft,
        width: 1,
        chunk: 128,
        ..Setup::plain(subject, &b)
    };
    let mut speculator = speculator(&setup, &[], &|drafter| drafter);
    let way = (&Sampling::default(), Fixed(3));
    let (mut texts, _) = write(&mut speculator, std::slice::from_ref(prompt), way, 33);
    let notes = (0..).map_while(|i| recorder.note_at(name, i)).collect();
    (notes, texts.remove(0))
}

#[test]
fn draft_heads_read_the_embeddings_that_the_target_reads() {
    let (gemma, qwen) = (SEEING[0], SEEING[1]);
    // Positions too: the MTP head turns by the target's, an EAGLE-3 head knows no grid.
    let b = best_cpu();
    let open = |folder: &str| Checkpoint::open(&repository(folder)).unwrap();
    let (checkpoint, eagle3) = (open(qwen.target), open(qwen.eagle3.unwrap()));
    let target = load_target(&*b, &checkpoint).unwrap();
    let mtp = Qwen35Mtp::load(&*b, &checkpoint, &*target).unwrap();
    let eagle3 = Eagle3::load(&*b, &eagle3, &*target).unwrap();
    assert!(mtp.follows_grid() && !eagle3.follows_grid());
    for (subject, draft, name) in [
        (qwen, Draft::Head, "draft.hidden"),
        (qwen, Draft::Eagle3, "draft.layers.0.out"),
        (gemma, Draft::Eagle3, "draft.layers.0.out"),
    ] {
        let b = best_cpu();
        let checkpoint = Checkpoint::open(&repository(subject.target)).unwrap();
        let target = load_target(&*b, &checkpoint).unwrap();
        let mut painter = Painter::new(subject, &b);
        let (text, own, other) = (painter.text(40), painter.text(6), painter.text(6));
        let prompt = |instead: &[u32], embeddings: Arc<[f32]>| {
            let mut tokens = text.clone();
            tokens[10..16].copy_from_slice(instead);
            let span = MediaSpan {
                rows: 10..16,
                hash: [1; 16],
                grid: [2, 3],
                is_causal: false,
                embeddings,
            };
            Prompt::with_media(tokens, vec![span])
        };
        let embedded = b.download(&target.embed(&*b, &own)).into_owned();
        let as_media = prompt(&other, embedded.into());
        let as_tokens = prompt(&own, Arc::default());
        let [media, tokens, without] = [as_media, as_tokens, prompt(&other, Arc::default())]
            .map(|prompt| head_rows(subject, draft, &prompt, name));
        let what = format!("{} {draft:?}", subject.target);
        assert!(
            !media.0.is_empty() && media.0 == tokens.0,
            "{what}: rows of the head"
        );
        assert_eq!(media.1.output(), tokens.1.output(), "{what}");
        assert!(
            media.0 != without.0,
            "{what}: placeholders are not what it reads"
        );
    }
}

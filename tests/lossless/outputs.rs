//! Steps that keep some of their hidden rows: those have the bits that they have among all, and what is remembered and
//! tapped stays as it is.

use crate::subjects::{Subject, TINY, TRAINED};
use crate::writing::{backend, best_cpu, in_turn};
use backend::{Backend, Batch, Reference, Tensor};
use cache::{KeptSize, KvPlan, Memory, MemorySize};
use cpu::Isa;
use models::{Taps, Target, load_target};
use std::ops::Range;
use std::sync::Arc;
use suites::Rng;
use weights::Checkpoint;

/// Rows of two texts in a step, after as many that the first one has already.
const ROWS: [usize; 2] = [61, 40];
const BEFORE: usize = 70;

/// Rows of the first text in that step that see as much as the one behind them, if the model lets rows see their span.
const SPAN: Range<usize> = 10..40;

/// Rows of that step that are kept: the last one, that of each text, several, and most.
fn kept() -> [Vec<usize>; 4] {
    [
        vec![100],
        vec![60, 100],
        vec![0, 1, 59, 60, 61, 99],
        (20..97).collect(),
    ]
}

#[test]
fn hidden_rows_do_not_depend_on_which_are_kept() {
    let reference: Arc<dyn Backend> = Arc::new(Reference);
    let isas = Isa::available();
    let fast = [best_cpu(), backend(*isas.last().unwrap(), 2)];
    for (s, &subject) in TINY.iter().chain(TRAINED).enumerate() {
        // The reference is slow.
        let slow = (s < TINY.len()).then_some(&reference);
        for b in [&fast[s % 2]].into_iter().chain(slow) {
            assert_kept_rows_are_the_same(subject, b, in_turn(subject, b, s));
        }
    }
}

/// Asserts that `subject` makes the same rows in steps that keep some as in one that keeps all, with keys and
/// values in `kv_format`.
pub(crate) fn assert_kept_rows_are_the_same(
    subject: Subject,
    b: &Arc<dyn Backend>,
    kv_format: KvPlan,
) {
    let checkpoint = Checkpoint::open(&subject.folder()).unwrap();
    let target = load_target(&**b, &checkpoint).unwrap();
    let run = |taps: &[usize], kept| run(&**b, &*target, (taps, kept), kv_format);
    let n = target.n_layers();
    let kept = kept();
    let taps = [&[][..], &[0], &[1, n - 1], &[n]];
    for (i, taps) in taps.into_iter().enumerate() {
        let all = run(taps, None);
        for kept in [&kept[i], &kept[(i + 1) % kept.len()]] {
            let what = format!("{} {} {taps:?} {kept:?}", subject.target, b.name());
            let some = run(taps, Some(kept));
            let of_all = all.hidden.chunks_exact(target.hidden_size()).enumerate();
            let of_all = of_all.filter(|(row, _)| kept.contains(row));
            let of_all: Vec<u32> = of_all.flat_map(|(_, row)| row).copied().collect();
            assert!(of_all == some.hidden, "{what}: hidden rows");
            assert!(all.taps == some.taps, "{what}: tapped rows");
            assert!(all.next == some.next, "{what}: the next step");
        }
    }
}

/// What a step makes, as bits.
struct Made {
    hidden: Vec<u32>,
    taps: Vec<Vec<u32>>,
    /// The hidden rows of a step of one row a text that follows.
    next: Vec<u32>,
}

fn run(
    b: &dyn Backend,
    target: &dyn Target,
    (layers, kept): (&[usize], Option<&[usize]>),
    kv_format: KvPlan,
) -> Made {
    let size = MemorySize {
        sequences: 2,
        context: 256,
        step_rows: 128,
        kv_format,
        running_pages: None,
        kept: KeptSize::default(),
    };
    let mut memory = Memory::new(b, target.plan(), size);
    let mut rng = Rng(7);
    let mut texts = [memory.open().unwrap(), memory.open().unwrap()];
    let mut step = |rows: [usize; 2], taps: &mut Taps| {
        let mut batch = Batch::default();
        for (text, n) in texts.iter_mut().zip(rows).filter(|(_, n)| *n > 0) {
            let tokens: Vec<u32> = (0..n)
                .map(|_| rng.below(target.vocab_size() as u32))
                .collect();
            memory.push(&mut batch, text, &tokens, n).unwrap();
        }
        // Some rows see each other, as those of a picture do.
        if target.media_rows().see_their_span && batch.n_rows() > SPAN.end {
            let end = batch.rows[SPAN.end].sees.end;
            SPAN.for_each(|row| batch.rows[row].sees.end = end);
        }
        let hidden = target.forward_tapped(b, &batch, &mut memory, taps);
        bits(b, &hidden)
    };
    step([BEFORE, 0], &mut Taps::new(&[]));
    let mut taps = Taps::new(layers).with_outputs(kept.map(<[usize]>::to_vec));
    let hidden = step(ROWS, &mut taps);
    let next = step([1, 1], &mut Taps::new(&[]));
    let taps = taps.into_rows();
    let made = Made {
        hidden,
        taps: taps.iter().map(|x| bits(b, x)).collect(),
        next,
    };
    b.finish().unwrap();
    made
}

fn bits(b: &dyn Backend, x: &Tensor) -> Vec<u32> {
    b.download(x).iter().map(|x| x.to_bits()).collect()
}

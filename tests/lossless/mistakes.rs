//! What the grid would see: a rollback that goes wrong on purpose.

use crate::subjects::{Draft, TINY, prompts};
use crate::writing::{Setup, write};
use backend::{Backend, Batch, KvFormat, Reference};
use speculate::DraftLength::Fixed;
use speculate::Sampling;
use std::sync::Arc;
use suites::Recorder;

#[test]
fn a_rollback_that_is_off_by_one_does_not_go_unseen() {
    let subject = *TINY
        .iter()
        .find(|s| s.target.ends_with("qwen3_5-dense"))
        .unwrap();
    let prompts = prompts(6, 90, 5);
    let texts = |backend: Arc<dyn Backend>, draft, length, truth: &[_]| {
        let setup = Setup {
            draft,
            length: Fixed(length),
            chunk: 64,
            width: 3,
            kv_format: KvFormat::both(&quant::F32),
            ..Setup::plain(subject, &backend)
        };
        write(&setup, &prompts, 0, &Sampling::default(), truth).texts
    };
    let want = texts(Arc::new(Reference), Draft::None, 0, &[]);
    let drafted = texts(Arc::new(Reference), Draft::Oracle, 3, &want);
    assert_eq!(drafted, want);
    let mistakes: [fn(&mut Batch); 2] = [
        |batch| {
            let seqs = batch.seqs.iter_mut();
            seqs.for_each(|s| s.kept = s.kept.saturating_sub(1));
        },
        |batch| {
            let seqs = batch.seqs.iter_mut();
            seqs.for_each(|s| s.certain = s.rows.len().min(s.certain + 1));
        },
    ];
    for mistake in mistakes {
        let wrong = Arc::new(Recorder::with_mistake(Box::new(Reference), mistake));
        let got = texts(wrong, Draft::Oracle, 3, &want);
        assert_ne!(got, want, "recurrent state after the wrong row");
    }
}

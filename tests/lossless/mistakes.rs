//! What the grid would see: a rollback that goes wrong on purpose.

use crate::subjects::{Draft, Subject, TINY, prompts};
use crate::writing::{Setup, write};
use backend::{Backend, KvFormat};
use speculate::DraftLength::{self, Fixed};
use speculate::Sampling;
use std::sync::Arc;
use suites::Recorder;

#[test]
fn a_rollback_that_is_off_by_one_does_not_go_unseen() {
    let subject = *TINY
        .iter()
        .find(|s| s.target.ends_with("qwen3_5-dense"))
        .unwrap();
    fn setup<'a>(
        subject: Subject,
        backend: &'a Arc<dyn Backend>,
        draft: Draft,
        length: DraftLength,
    ) -> Setup<'a> {
        Setup {
            subject,
            backend,
            draft,
            length,
            chunk: 64,
            width: 3,
            kv_format: KvFormat::both(&quant::F32),
            shortlist: false,
            mapped: false,
        }
    }
    let prompts = prompts(6, 90, 5);
    let sampling = Sampling::default();
    let right: Arc<dyn Backend> = Arc::new(backend::Reference);
    let want = write(
        &setup(subject, &right, Draft::None, Fixed(0)),
        &prompts,
        0,
        &sampling,
        &[],
    )
    .texts;
    let drafted = write(
        &setup(subject, &right, Draft::Oracle, Fixed(3)),
        &prompts,
        0,
        &sampling,
        &want,
    )
    .texts;
    assert_eq!(drafted, want);
    let mistakes: [fn(&mut backend::Batch); 2] = [
        |batch| {
            batch
                .seqs
                .iter_mut()
                .for_each(|s| s.kept = s.kept.saturating_sub(1))
        },
        |batch| {
            batch
                .seqs
                .iter_mut()
                .for_each(|s| s.certain = s.rows.len().min(s.certain + 1))
        },
    ];
    for mistake in mistakes {
        let wrong: Arc<dyn Backend> = Arc::new(Recorder::with_mistake(
            Box::new(backend::Reference),
            mistake,
        ));
        let got = write(
            &setup(subject, &wrong, Draft::Oracle, Fixed(3)),
            &prompts,
            0,
            &sampling,
            &want,
        )
        .texts;
        assert_ne!(got, want, "recurrent state after the wrong row");
    }
}

//! Mirostat, whose bound follows the text: the same bounds with speculation as without.

use crate::samplings;
use crate::subjects::{Draft, TINY, prompts, vocab};
use crate::writing::{Setup, assert_same, best_cpu, write};
use backend::Backend;
use cache::KvPlan;
use speculate::DraftLength::{Fixed, UpTo};
use speculate::Sampling;
use speculate::sample::Mirostat;
use std::sync::Arc;

#[test]
fn speculation_never_changes_a_token_of_a_text_under_mirostat() {
    let backend: Arc<dyn Backend> = best_cpu();
    let ways = [
        (Mirostat::V1, 2.0, 0.1),
        (Mirostat::V1, 1.0, 0.6),
        (Mirostat::V2, 1.0, 0.5),
        (Mirostat::V2, 3.0, 0.1),
        (Mirostat::V2, 2.0, 0.9),
    ];
    let mut n_bounded = 0;
    for (s, &subject) in TINY.iter().enumerate() {
        let prompts = prompts(4, vocab(subject), 270 + s as u64);
        for (i, (mirostat, tau, eta)) in ways.into_iter().enumerate() {
            let plain = Sampling {
                temperature: 0.8,
                seed: 23,
                ..Sampling::default()
            };
            // With penalties beside it now and then.
            let beside = [&plain, &samplings()[2].1][i % 2].clone();
            let sampling = Sampling {
                mirostat,
                mirostat_tau: tau,
                mirostat_eta: eta,
                ..beside.clone()
            };
            let setup = |draft, length, chunk, width| Setup {
                draft,
                length,
                chunk,
                width,
                constrained: (s + i) % 3 == 1,
                kv_format: KvPlan::both(&quant::kv::BF16),
                ..Setup::plain(subject, &backend)
            };
            let alone = setup(Draft::None, Fixed(0), 512, 2);
            let want = write(&alone, &prompts, 0, &sampling, &[]).texts;
            let without = write(&alone, &prompts, 0, &beside, &[]).texts;
            // Under a constraint a bound can be so high that nothing exceeds it: tokens without a choice
            // are no surprise.
            n_bounded += usize::from(want != without);
            let what = format!("{mirostat:?} tau {tau} eta {eta}");
            let cases = [
                (Draft::Oracle, [Fixed(5), UpTo(8)][i % 2], 64, [1, 3][i % 2]),
                (Draft::Ngram, Fixed(3), 7, 3),
                (Draft::Head, Fixed(2), 33, 2),
            ];
            for (draft, length, chunk, width) in cases {
                if draft == Draft::Head && !subject.has_head() {
                    continue;
                }
                let setup = setup(draft, length, chunk, width);
                let got = write(&setup, &prompts, 0, &sampling, &want);
                assert_same(&setup, &what, &got, &want);
                if draft == Draft::Oracle {
                    assert!(0 < got.accepted && got.accepted < got.drafted, "{what}");
                }
            }
        }
    }
    let n = TINY.len() * ways.len();
    println!("{n_bounded} of {n} texts bounded");
    assert!(n_bounded * 4 > n * 3, "{n_bounded} of {n} bounded");
}

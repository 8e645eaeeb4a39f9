//! Texts under a constraint: the same with speculation as without, and never a token that may
//! not come.

use crate::samplings;
use crate::subjects::{Draft, Subject, TINY, TRAINED, greedy_prompts, prompts, vocab};
use crate::writing::{Setup, Written, assert_same, backend, best_cpu, write};
use backend::Backend;
use cache::KvPlan;
use cpu::Isa;
use speculate::DraftLength::{Fixed, UpTo};
use speculate::{Constraint, ConstraintError};
use std::sync::Arc;

/// Allows some tokens after each beginning of a text, and in some places one.
pub(crate) struct Pattern {
    vocab: u32,
    /// What makes the patterns of two texts differ.
    salt: u32,
    /// Tokens of a complete text.
    length: usize,
    text: Vec<u32>,
}

/// What may come next.
enum Next {
    All,
    One(u32),
    /// Tokens `t` with `t % of == rest`.
    Some {
        of: u32,
        rest: u32,
    },
}

impl Pattern {
    pub(crate) fn new(vocab: u32, salt: u32) -> Self {
        Pattern {
            vocab,
            salt,
            length: 90 + salt as usize % 50,
            text: Vec::new(),
        }
    }

    /// What may come after the first `n` tokens.
    fn next(&self, n: usize) -> Next {
        let last = n.checked_sub(1).map_or(self.salt, |i| self.text[i]);
        match (n as u32 + self.salt) % 11 {
            // Runs of one token each: six in a row, and one alone.
            0..=5 if (n as u32 / 11 + self.salt).is_multiple_of(2) => {
                Next::One((last.wrapping_mul(7) + n as u32) % self.vocab)
            }
            6 => Next::One((last + 1) % self.vocab),
            7 => Next::All,
            8 => Next::Some {
                of: 2,
                rest: last % 2,
            },
            _ => Next::Some {
                of: 5,
                rest: last % 5,
            },
        }
    }

    fn allows(&self, n: usize, token: u32) -> bool {
        match self.next(n) {
            Next::All => true,
            Next::One(only) => token == only,
            Next::Some { of, rest } => token % of == rest,
        }
    }

    /// Asserts that `output` is a text of the pattern, whole or not.
    pub(crate) fn assert_allows(mut self, output: &[u32]) {
        assert!(output.len() <= self.length, "no token after the last");
        for (n, &token) in output.iter().enumerate() {
            assert!(self.allows(n, token), "token {n} may not be {token}");
            self.text.push(token);
        }
    }
}

impl Constraint for Pattern {
    fn allowed(&mut self, allowed: &mut [u32]) -> Result<bool, ConstraintError> {
        let n = self.text.len();
        if let Next::All = self.next(n) {
            return Ok(false);
        }
        for token in (0..self.vocab).filter(|&token| self.allows(n, token)) {
            allowed[token as usize / 32] |= 1 << (token % 32);
        }
        Ok(true)
    }

    fn push(&mut self, token: u32) -> Result<bool, ConstraintError> {
        let is_allowed = !self.must_end() && self.allows(self.text.len(), token);
        if is_allowed {
            self.text.push(token);
        }
        Ok(is_allowed)
    }

    fn pop(&mut self, n: usize) {
        let left = self
            .text
            .len()
            .checked_sub(n)
            .expect("a push for every pop");
        self.text.truncate(left);
    }

    fn forced(&mut self, most: usize) -> Vec<u32> {
        let before = self.text.len();
        while self.text.len() < before + most
            && !self.must_end()
            && let Next::One(token) = self.next(self.text.len())
        {
            self.text.push(token);
        }
        self.text.split_off(before)
    }

    fn must_end(&mut self) -> bool {
        self.text.len() == self.length
    }
}

#[test]
fn speculation_never_changes_a_token_of_a_constrained_text() {
    let backends: Vec<Arc<dyn Backend>> = [
        best_cpu(),
        backend(Isa::available()[Isa::available().len() / 2], 1),
    ]
    .into();
    for (s, &subject) in TINY.iter().chain(TRAINED).enumerate() {
        assert_constraints_hold(s, subject, &backends[s % 2]);
    }
}

/// Asserts that constrained texts of `subject` do not depend on the drafter, and that drafts were
/// accepted, forced tokens among them.
pub(crate) fn assert_constraints_hold(s: usize, subject: Subject, backend: &Arc<dyn Backend>) {
    let prompts = match subject.target.strip_prefix("models/") {
        Some(name) => greedy_prompts(name)[..4].to_vec(),
        None => prompts(6, vocab(subject), 70 + s as u64),
    };
    for (i, (what, sampling)) in samplings().into_iter().enumerate() {
        let setup = |draft, length, chunk, width| Setup {
            draft,
            length,
            chunk,
            width,
            constrained: true,
            kv_format: KvPlan::both([&quant::kv::BF16, &quant::kv::F32][(s + i) % 2]),
            ..Setup::plain(subject, backend)
        };
        let plain = setup(Draft::None, Fixed(0), 512, 2);
        let want = write(&plain, &prompts, 0, &sampling, &[]).texts;
        assert!(
            want.iter().any(|text| text.output().len() < 120),
            "some are complete"
        );
        let cases = [
            (Draft::None, Fixed(3), 64, 3),
            (
                Draft::Head,
                [Fixed(3), UpTo(8), Fixed(1)][i],
                33,
                [1, 3, 8][i],
            ),
            (Draft::Eagle3, Fixed(2), 64, 3),
            (Draft::Block, Fixed(4), 64, 3),
            (Draft::Model, Fixed(4), 64, 3),
            (Draft::Ngram, Fixed(5), 7, [8, 1, 3][i]),
            (Draft::Oracle, [UpTo(8), Fixed(8), Fixed(5)][i], 512, 3),
        ];
        for (draft, length, chunk, width) in cases {
            if subject.lacks(draft) {
                continue;
            }
            let setup = setup(draft, length, chunk, width);
            let got = write(&setup, &prompts, 0, &sampling, &want);
            assert_same(&setup, what, &got, &want);
            assert_engaged(&setup, &got);
        }
    }
}

fn assert_engaged(setup: &Setup<'_>, got: &Written) {
    let what = format!("{} {:?}", setup.subject.target, setup.draft);
    assert!(got.forced > 50, "{what}: {} forced tokens", got.forced);
    assert!(
        got.accepted > 0 && got.accepted <= got.drafted,
        "{what}: {} of {} accepted",
        got.accepted,
        got.drafted
    );
    // Without a drafter every token of a draft is forced, and forced tokens are never wrong.
    if setup.draft == Draft::None {
        assert_eq!(
            (got.drafted, got.accepted),
            (got.forced, got.forced),
            "{what}"
        );
    }
}

//! What penalties, DRY, bias and suppression do to logits: token by token, in this order, for the host to
//! do or for a device.

use super::dry::Repeats;
use super::{History, Sampling, Scratch};
use backend::{Edit, RowEdits};

impl Sampling {
    /// The logits after penalties, bias and suppression: in `buffer`, or as they are where no
    /// option changes any. `place(token)` is the index of the token's logit, if it has one.
    pub(super) fn edited<'a>(
        &self,
        history: &History,
        logits: &'a [f32],
        buffer: &'a mut Vec<f32>,
        repeats: &mut Repeats,
        place: impl Fn(u32) -> Option<usize>,
    ) -> &'a [f32] {
        if !self.edits_logits() {
            return logits;
        }
        buffer.clear();
        buffer.extend_from_slice(logits);
        self.each_edit(history, repeats, |token, edit| {
            if let Some(i) = place(token) {
                buffer[i] = edit.apply(buffer[i]);
            }
        });
        buffer
    }

    /// The edits of a row of logits, for a device to do. `place(token)` is the column of the
    /// token's logit, if it has one.
    pub(crate) fn edits(
        &self,
        history: &History,
        scratch: &mut Scratch,
        place: impl Fn(u32) -> Option<u32>,
    ) -> RowEdits {
        let mut edits = Vec::new();
        self.each_edit(history, &mut scratch.repeats, |token, edit| {
            edits.extend(place(token).map(|column| (column, edit)));
        });
        RowEdits::new(edits)
    }

    /// Hands out what penalties, bias and suppression do to logits: tokens and edits, those of one
    /// token in the order in which they are done.
    fn each_edit(&self, history: &History, repeats: &mut Repeats, mut edit: impl FnMut(u32, Edit)) {
        let penalty = self.repetition_penalty;
        for (token, count) in history.counts() {
            let is_seen = count.n_prompt > 0 || count.n_output > 0;
            // Neither a factor of 1 nor a sum with 0 changes a bit.
            if is_seen && penalty != 1.0 {
                edit(token, Edit::Divide(penalty));
            }
            let subtracted = self.count_penalty(count.n_output);
            if subtracted != 0.0 {
                edit(token, Edit::Add(-subtracted));
            }
        }
        if let Some(passages) = history.passages() {
            for (token, length) in passages.repeats(self, repeats) {
                edit(token, Edit::Add(-self.dry_penalty(length)));
            }
        }
        for &(token, bias) in &self.logit_bias {
            edit(token, Edit::Add(bias));
        }
        let is_early = history.n_output() < self.min_tokens;
        let early = if is_early { &self.end_tokens[..] } else { &[] };
        for &token in self.suppress.iter().chain(early) {
            edit(token, Edit::Suppress);
        }
    }

    /// What presence and frequency penalties subtract from the logit of a token that is `n` times in
    /// the output.
    fn count_penalty(&self, n: u32) -> f32 {
        match n {
            0 => 0.0,
            n => self.presence_penalty + self.frequency_penalty * n as f32,
        }
    }

    /// What DRY subtracts from the logit of a token that `length` tokens of a repetition lead to.
    fn dry_penalty(&self, length: usize) -> f32 {
        // By squaring: equal bits everywhere, which `powi` does not promise.
        let (mut power, mut square) = (1.0, f64::from(self.dry_base));
        let mut exponent = length - self.dry_allowed_length;
        while exponent > 0 {
            if exponent % 2 == 1 {
                power *= square;
            }
            square *= square;
            exponent /= 2;
        }
        (f64::from(self.dry_multiplier) * power).min(f64::from(f32::MAX)) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dry_grows_with_the_repetition_and_stays_a_number() {
        let sampling = Sampling {
            dry_multiplier: 0.5,
            dry_base: 1.75,
            dry_allowed_length: 2,
            ..Sampling::default()
        };
        for (length, power) in [(2, 1.0), (3, 1.75), (4, 3.062_5), (5, 5.359_375)] {
            assert_eq!(sampling.dry_penalty(length), 0.5 * power);
        }
        assert_eq!(sampling.dry_penalty(100_000), f32::MAX);
    }

    #[test]
    fn a_device_is_sent_what_changes_a_logit_and_nothing_else() {
        let sampling = Sampling {
            repetition_penalty: 1.5,
            frequency_penalty: 0.25,
            logit_bias: vec![(9, 1.0), (3, -1.0)],
            suppress: vec![4, 700],
            min_tokens: 3,
            end_tokens: vec![5],
            ..Sampling::default()
        };
        let mut history = History::new(&sampling, &[3, 8]);
        let column = |token: u32| Some(2 * token).filter(|&column| column < 100);
        let edits = |history: &History| {
            let edits = sampling.edits(history, &mut Scratch::default(), column);
            edits.as_slice().to_vec()
        };
        let (divide, suppress) = (Edit::Divide(1.5), Edit::Suppress);
        let prompt = [
            (6, divide),
            (6, Edit::Add(-1.0)),
            (8, suppress),
            (10, suppress),
            (16, divide),
            (18, Edit::Add(1.0)),
        ];
        assert_eq!(edits(&history), prompt);
        [3, 3, 1].iter().for_each(|&token| history.push(token));
        let three = [
            (2, divide),
            (2, Edit::Add(-0.25)),
            (6, divide),
            (6, Edit::Add(-0.5)),
            (6, Edit::Add(-1.0)),
            (8, suppress),
            (16, divide),
            (18, Edit::Add(1.0)),
        ];
        assert_eq!(edits(&history), three);
        (0..3).for_each(|_| history.pop());
        assert_eq!(edits(&history), prompt);
    }
}

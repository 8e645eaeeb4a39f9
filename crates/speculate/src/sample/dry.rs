//! DRY ("don't repeat yourself"): how long a repetition each token would go on.
//!
//! ```text
//! t_0 .. t_n-1    the tokens of prompt and output, or the last of them (`dry_penalty_last_n`)
//! e               the end of the last breaker, -1 if there is none: no repetition reaches over it
//! L(p)            min(longest k with t_p-k+1 .. t_p = t_n-k .. t_n-1, n-1 - e), for p < n-1
//! length(i)       max L(p) over all p with t_p+1 = i
//! ```
//!
//! If token `i` came next, a passage of `length(i)` tokens would be followed by what followed it
//! before. All lengths together take time linear in `n`, however repetitive the text is (the
//! Z-function of the reversed text, Gusfield 1997, §1.3).

use super::Sampling;
use std::collections::HashMap;
use std::sync::Arc;

/// Sequences of tokens that no repetition of [DRY](Sampling::dry_multiplier) reaches over, such
/// as those of a line break. Cheap to clone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Breakers {
    /// By their last token, the tokens before it.
    by_last: Arc<HashMap<u32, Vec<Vec<u32>>>>,
}

impl Breakers {
    /// The breakers `sequences`; empty ones count for nothing.
    pub fn new(sequences: impl IntoIterator<Item = Vec<u32>>) -> Self {
        let mut by_last: HashMap<u32, Vec<Vec<u32>>> = HashMap::new();
        for mut sequence in sequences {
            if let Some(last) = sequence.pop() {
                let before = by_last.entry(last).or_default();
                if !before.contains(&sequence) {
                    before.push(sequence);
                }
            }
        }
        Breakers {
            by_last: Arc::new(by_last),
        }
    }

    /// The breakers, in no order.
    pub fn sequences(&self) -> impl Iterator<Item = Vec<u32>> {
        let each = self.by_last.iter();
        let whole = |(last, before): (u32, &Vec<u32>)| {
            let mut sequence = before.clone();
            sequence.push(last);
            sequence
        };
        each.flat_map(|(&last, before)| before.iter().map(move |before| (last, before)))
            .map(whole)
    }

    /// Whether `token` is a breaker by itself, which DRY never makes less likely.
    fn is_breaker(&self, token: u32) -> bool {
        let before = self.by_last.get(&token);
        before.is_some_and(|before| before.iter().any(Vec::is_empty))
    }

    /// Where the breaker begins that ends with `token` after `text`, the latest if there are
    /// several.
    fn start(&self, text: &[u32], token: u32) -> Option<usize> {
        let before = self.by_last.get(&token)?;
        let found = before.iter().filter(|before| text.ends_with(before));
        found.map(|before| text.len() - before.len()).max()
    }
}

/// A breaker in the text: its first and its last token.
#[derive(Clone, Copy, Debug)]
struct Break {
    first: usize,
    last: usize,
}

/// The tokens of prompt and output in their order, and where repetitions end, with `push` and
/// `pop` for drafts.
#[derive(Clone, Debug)]
pub(super) struct Passages {
    tokens: Vec<u32>,
    breakers: Breakers,
    /// The breaker that counts after its last token has been pushed: of all so far, one that
    /// begins last, and of those the longest.
    breaks: Vec<Break>,
}

impl Passages {
    /// The text `prompt`.
    pub(super) fn new(breakers: &Breakers, prompt: &[u32]) -> Self {
        let mut passages = Passages {
            tokens: Vec::with_capacity(prompt.len()),
            breakers: breakers.clone(),
            breaks: Vec::new(),
        };
        prompt.iter().for_each(|&token| passages.push(token));
        passages
    }

    /// Appends a token.
    pub(super) fn push(&mut self, token: u32) {
        let last = self.tokens.len();
        if let Some(first) = self.breakers.start(&self.tokens, token)
            && self.breaks.last().is_none_or(|b| first >= b.first)
        {
            self.breaks.push(Break { first, last });
        }
        self.tokens.push(token);
    }

    /// Takes the last token back.
    pub(super) fn pop(&mut self) {
        self.tokens.pop();
        let n = self.tokens.len();
        self.breaks.pop_if(|b| b.last == n);
    }

    /// The tokens that would repeat at least `dry_allowed_length` others, in no order, each with
    /// how many.
    pub(super) fn repeats<'s>(
        &self,
        sampling: &Sampling,
        scratch: &'s mut Repeats,
    ) -> impl Iterator<Item = (u32, usize)> + use<'s> {
        let Repeats { matches, lengths } = scratch;
        lengths.clear();
        let allowed = sampling.dry_allowed_length;
        let most = sampling.dry_penalty_last_n.unwrap_or(usize::MAX);
        let first = self.tokens.len().saturating_sub(most);
        let text = &self.tokens[first..];
        let limit = match self.breaks.last() {
            Some(b) if b.first >= first => self.tokens.len() - 1 - b.last,
            _ => text.len(),
        };
        if text.len() > allowed && limit >= allowed {
            common_endings(text, matches);
            for (&next, &length) in text[1..].iter().zip(&*matches) {
                let length = (length as usize).min(limit);
                if length >= allowed && !self.breakers.is_breaker(next) {
                    let longest = lengths.entry(next).or_default();
                    *longest = length.max(*longest);
                }
            }
        }
        lengths.iter().map(|(&token, &length)| (token, length))
    }
}

/// Buffers of [`Passages::repeats`].
#[derive(Clone, Debug, Default)]
pub(super) struct Repeats {
    matches: Vec<u32>,
    lengths: HashMap<u32, usize>,
}

/// For each token of `text` but the last, how many tokens up to it are those that the text ends
/// with.
fn common_endings(text: &[u32], matches: &mut Vec<u32>) {
    let n = text.len();
    // All in a reversed text: `z[k]` tokens from `k` on are those it begins with, of which
    // `[from, to)` is the match that reaches furthest yet.
    let reversed = |k: usize| text[n - 1 - k];
    matches.clear();
    matches.resize(n, 0);
    let z = |k: usize| n - 1 - k;
    let (mut from, mut to) = (0, 0);
    for k in 1..n {
        let mut length = match k < to {
            true => (matches[z(k - from)] as usize).min(to - k),
            false => 0,
        };
        if k + length >= to {
            while k + length < n && reversed(length) == reversed(k + length) {
                length += 1;
            }
            (from, to) = (k, k + length);
        }
        matches[z(k)] = length as u32;
    }
    matches.truncate(n.saturating_sub(1));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn repeats(sampling: &Sampling, passages: &Passages) -> Vec<(u32, usize)> {
        let mut scratch = Repeats::default();
        let mut repeats: Vec<_> = passages.repeats(sampling, &mut scratch).collect();
        repeats.sort_unstable();
        repeats
    }

    fn dry(breakers: &[&[u32]]) -> Sampling {
        Sampling {
            dry_multiplier: 1.0,
            dry_breakers: Breakers::new(breakers.iter().map(|b| b.to_vec())),
            ..Sampling::default()
        }
    }

    #[test]
    fn a_token_that_would_go_on_with_a_repetition_is_found() {
        let sampling = dry(&[]);
        let passages = Passages::new(&sampling.dry_breakers, &[1, 2, 3, 9, 2, 3, 8, 1, 2, 3]);
        // `1 2 3` was followed by 9, `2 3` by 8.
        assert_eq!(repeats(&sampling, &passages), [(8, 2), (9, 3)]);
        let last_eight = Sampling {
            dry_penalty_last_n: Some(8),
            ..sampling.clone()
        };
        assert_eq!(repeats(&last_eight, &passages), [(8, 2)]);
        let four = Sampling {
            dry_allowed_length: 4,
            ..sampling
        };
        assert_eq!(repeats(&four, &passages), []);
    }

    #[test]
    fn no_repetition_reaches_over_a_breaker() {
        let text = [1, 2, 3, 9, 1, 2, 3];
        for (breakers, expected) in [
            (&[&[1][..]][..], vec![(9, 2)]),
            (&[&[2]], vec![]),
            (&[&[1, 2]], vec![]),
            (&[&[9, 1]], vec![(9, 2)]),
            (&[&[7]], vec![(9, 3)]),
            // A breaker is not held against a repetition that ends with it.
            (&[&[9]], vec![]),
            // Of breakers that begin together the longest counts.
            (&[&[9], &[9, 1]], vec![]),
            (&[&[4, 9], &[9, 1]], vec![(9, 2)]),
        ] {
            let sampling = dry(breakers);
            let passages = Passages::new(&sampling.dry_breakers, &text);
            assert_eq!(repeats(&sampling, &passages), expected, "{breakers:?}");
        }
        // One that begins before the last tokens that count is not looked for.
        let whole = dry(&[&[7, 9, 9]]);
        let passages = Passages::new(&whole.dry_breakers, &[7, 9, 9, 9, 9]);
        assert_eq!(repeats(&whole, &passages), [(9, 2)]);
        let last_four = Sampling {
            dry_penalty_last_n: Some(4),
            ..whole
        };
        assert_eq!(repeats(&last_four, &passages), [(9, 3)]);
        // Nor does one count that begins earlier than another, though it ends later.
        let sampling = dry(&[&[3], &[2, 3, 9]]);
        let passages = Passages::new(&sampling.dry_breakers, &[9, 4, 6, 2, 3, 9, 4]);
        assert_eq!(repeats(&sampling, &passages), [(6, 2)]);
    }

    #[test]
    fn a_pop_takes_breakers_back() {
        let sampling = dry(&[&[5], &[6, 5]]);
        let mut passages = Passages::new(&sampling.dry_breakers, &[1, 2, 3, 1, 2]);
        let before = repeats(&sampling, &passages);
        assert_eq!(before, [(3, 2)]);
        for tokens in [[1, 5, 2], [6, 5, 2]] {
            tokens.iter().for_each(|&token| passages.push(token));
            assert_ne!(repeats(&sampling, &passages), before);
            tokens.iter().for_each(|_| passages.pop());
            assert_eq!(repeats(&sampling, &passages), before);
        }
    }

    #[test]
    fn time_is_linear_in_a_text_that_only_repeats_itself() {
        // Comparing passages one by one would take 10^10 steps.
        let sampling = dry(&[]);
        let passages = Passages::new(&sampling.dry_breakers, &[3; 100_000]);
        assert_eq!(repeats(&sampling, &passages), [(3, 99_999)]);
    }
}

//! How tokens are chosen, as a device needs to know it.

use crate::math::{MASS_ONE, ln, mass};
use crate::noise::Noise;
use crate::{Backend, Tensor};
use std::cmp::Ordering;
use std::sync::OnceLock;

/// What stands for the token of a row that gives none ([`gives_token`]). No vocabulary has
/// a token of this id.
pub const NO_TOKEN: u32 = u32::MAX;

/// The bits of infinity less those of `|x|`, as integers: negative if `x` is NaN, and for no other value. The bitwise or
/// over many values is negative if one of them is NaN, a loop that compilers make vectors of.
#[inline(always)]
pub fn nan_sign(x: f32) -> i32 {
    0x7f80_0000 - (x.to_bits() & 0x7fff_ffff).cast_signed()
}

/// Whether a row of logits gives a token: no logit is NaN, and the largest is finite. A
/// model that computes any other row, or what came before it, is damaged.
pub fn gives_token(row: &[f32]) -> bool {
    let (lanes, rest) = row.as_chunks::<16>();
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let (mut signs, mut largest) = ([0; 16], [f32::NEG_INFINITY; 16]);
    for x in lanes {
        for i in 0..16 {
            signs[i] |= nan_sign(x[i]);
            largest[i] = larger(largest[i], x[i]);
        }
    }
    let rest_signs = rest.iter().map(|&x| nan_sign(x));
    let has_nan = signs.into_iter().chain(rest_signs).any(|sign| sign < 0);
    let all = largest.into_iter().chain(rest.iter().copied());
    let largest = all.fold(f32::NEG_INFINITY, larger);
    !has_nan && largest.is_finite()
}

/// How one token is chosen among a row of logits `l`, all of them as they are.
///
/// ```text
/// 1/T = 0  token = argmax l
/// 1/T > 0  z_i   = l_i (1/T)
///          S     = {i: z_i >= floor}, then in this order
///          top-k   the k first by z
///          top-p   the shortest prefix by z whose mass is at least p times that of S
///          min-p   those with z_i >= max z + ln(min_p)
///          token = argmax over S of z_i + g_i,  g = noise(seed, position)
/// ```
///
/// Of equal values the lower token comes first, everywhere. If `max z` is not finite, the token is
/// `argmax l`. A mass is `exp(z - max z)` in whole units ([`mass`]), so that masses add up exactly in
/// any order. The noise `g` is a function of the token ([`crate::noise`]), whichever its column.
///
/// [`TokenChoice::choose`] is the definition in plain loops; whoever carries it out returns the
/// same token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenChoice {
    /// Key of the noise.
    pub seed: u64,
    /// Tokens before the chosen one.
    pub position: u64,
    /// The reciprocal of the temperature; 0 is greedy.
    pub scale: f32,
    /// Mass to keep; 1 keeps all.
    pub top_p: f32,
    /// Logarithm of the least probability to keep, as a share of the largest; -inf keeps
    /// all.
    pub ln_min_p: f32,
    /// Most likely tokens to keep; 0 keeps all.
    pub top_k: u32,
    /// Least scaled logit to keep, at most the largest of the row; [`f32::MIN`] keeps all numbers, and
    /// none is below.
    pub floor: f32,
}

impl TokenChoice {
    /// The token that `logits` give, `logits[i]` being that of token `ids[i]`, or of token `i` without
    /// `ids`; [`NO_TOKEN`] if they [give none](gives_token).
    ///
    /// # Panics
    ///
    /// If there are fewer ids than logits.
    ///
    /// ```
    /// use backend::TokenChoice;
    ///
    /// let (top_p, ln_min_p) = (1.0, f32::NEG_INFINITY);
    /// let floor = f32::MIN;
    /// let choice = TokenChoice { seed: 7, position: 0, scale: 1.25, top_p, ln_min_p, top_k: 2, floor };
    /// let logits = [1.0, 3.0, -2.0, 2.5];
    /// let token = choice.choose(&logits, None);
    /// assert!([1, 3].contains(&token), "one of the two likeliest");
    /// let greedy = TokenChoice { scale: 0.0, ..choice };
    /// assert_eq!(greedy.choose(&logits, Some(&[20, 21, 22, 23])), 21);
    /// ```
    pub fn choose(&self, logits: &[f32], ids: Option<&[u32]>) -> u32 {
        if !gives_token(logits) {
            return NO_TOKEN;
        }
        let token = |column: usize| ids.map_or(column as u32, |ids| ids[column]);
        let mut row: Vec<(f32, u32)> = (logits.iter().enumerate())
            .map(|(column, &logit)| (logit, token(column)))
            .collect();
        let best = |row: &[(f32, u32)]| {
            let best = row.iter().copied().min_by(best_first);
            best.expect("a row that gives a token has some")
        };
        let (largest, first) = best(&row);
        let top = largest * self.scale;
        if self.scale == 0.0 || !top.is_finite() {
            return first;
        }
        row.iter_mut().for_each(|(z, _)| *z *= self.scale);
        self.keep_support(top, &mut row);
        let noise = Noise::new(self.seed, self.position);
        row.iter_mut()
            .for_each(|(z, token)| *z += noise.gumbel(*token));
        best(&row).1
    }

    /// Keeps those of `row`, scaled logits and their tokens, that the noise decides between. `top` is
    /// the largest of them.
    fn keep_support(&self, top: f32, row: &mut Vec<(f32, u32)>) {
        row.retain(|&(z, _)| z >= self.floor);
        row.sort_by(best_first);
        if self.top_k > 0 {
            row.truncate(self.top_k as usize);
        }
        if self.top_p < 1.0 {
            let masses: Vec<u64> = row.iter().map(|&(z, _)| mass(z - top)).collect();
            let total: u64 = masses.iter().sum();
            let wanted = (f64::from(self.top_p) * total as f64).ceil() as u64;
            let mut sum = 0;
            let reaches = |&mass: &u64| {
                sum += mass;
                sum >= wanted
            };
            let last = masses.iter().position(reaches);
            row.truncate(last.map_or(row.len(), |last| last + 1));
        }
        row.retain(|&(z, _)| z >= top + self.ln_min_p);
    }
}

/// The order of values and their tokens, which are no NaN: the larger value first, of equal ones
/// the lower token.
fn best_first(a: &(f32, u32), b: &(f32, u32)) -> Ordering {
    let by_value = b.0.partial_cmp(&a.0).expect("numbers");
    by_value.then(a.1.cmp(&b.1))
}

/// What a row of logits, as they are, says of its tokens. What is not a number counts as
/// -inf.
#[derive(Clone, Debug, PartialEq)]
pub struct Likeliest {
    /// The tokens of the largest logits, and these: the largest first, of equal ones the
    /// lower token. None has -inf.
    pub top: Vec<(u32, f32)>,
    /// The largest logit.
    pub largest: f32,
    /// The logit of the token that was asked about.
    pub logit: f32,
    /// The [`mass`] of all, in whole numbers and so the same in any order.
    pub mass: u64,
}

impl Likeliest {
    /// Summarizes `row`, a row of logits: the logit of `token` and the `n` largest.
    pub fn of(row: &[f32], token: u32, n: usize) -> Self {
        let mut top: Vec<(u32, f32)> = Vec::with_capacity(n);
        let mut largest = f32::NEG_INFINITY;
        let mut least = if n == 0 { f32::INFINITY } else { largest };
        for (id, &logit) in (0..).zip(row) {
            if logit > largest {
                largest = logit;
            }
            if logit > least {
                top.truncate(n - 1);
                let at = top.partition_point(|&(_, better)| better >= logit);
                top.insert(at, (id, logit));
                if let Some(&(_, last)) = top.get(n - 1) {
                    least = last;
                }
            }
        }
        let logit = row[token as usize];
        Likeliest {
            top,
            largest,
            logit: if logit.is_nan() {
                f32::NEG_INFINITY
            } else {
                logit
            },
            mass: row.iter().map(|&logit| mass(logit - largest)).sum(),
        }
    }

    /// The logarithm of the probability of a token with this logit, `logit - largest - ln
    /// Σ exp(l - largest)`: at most 0, and -inf for all if the largest is not finite.
    pub fn logprob(&self, logit: f32) -> f32 {
        if !self.largest.is_finite() {
            return f32::NEG_INFINITY;
        }
        logit - self.largest - ln((self.mass as f64 / MASS_ONE) as f32)
    }
}

/// The tokens that the columns of some logits stand for.
#[derive(Debug)]
pub struct TokenList {
    ids: Vec<u32>,
    on_device: Tensor,
    /// Tokens and their columns by ascending token, once somebody has asked for one.
    columns: OnceLock<Vec<(u32, u32)>>,
}

/// The bits of `ids` as those of numbers, `[1, m]`.
fn upload(b: &dyn Backend, ids: &[u32]) -> Tensor {
    let bits: Vec<f32> = ids.iter().map(|&id| f32::from_bits(id)).collect();
    b.upload(1, bits.len(), &bits)
}

impl TokenList {
    /// A column for each of `ids`.
    pub fn new(b: &dyn Backend, ids: Vec<u32>) -> Self {
        TokenList {
            on_device: upload(b, &ids),
            ids,
            columns: OnceLock::new(),
        }
    }

    /// The tokens, by column.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// The column that stands for `token`, if one does; the first of several.
    ///
    /// ```
    /// # use backend::{Reference, TokenList};
    /// let list = TokenList::new(&Reference, vec![7, 2, 9]);
    /// assert_eq!([2, 9, 3].map(|token| list.column(token)), [Some(1), Some(2), None]);
    /// ```
    pub fn column(&self, token: u32) -> Option<u32> {
        let columns = self.columns.get_or_init(|| {
            let mut columns: Vec<(u32, u32)> = self.ids.iter().copied().zip(0..).collect();
            columns.sort_unstable();
            columns
        });
        let first = columns.partition_point(|&(other, _)| other < token);
        let found = columns.get(first).filter(|(other, _)| *other == token);
        found.map(|&(_, column)| column)
    }

    /// The same where a device can read them: their bits, `[1, m]`.
    pub fn on_device(&self) -> &Tensor {
        &self.on_device
    }
}

/// Tokens in groups of one size, the best of which are scored.
#[derive(Debug)]
pub struct TokenGroups {
    list: TokenList,
    size: usize,
    top: usize,
}

impl TokenGroups {
    /// Groups of `size`, one after the other in `ids`; the `top` best of them count.
    ///
    /// # Panics
    ///
    /// If there are not so many whole groups.
    pub fn new(b: &dyn Backend, ids: Vec<u32>, size: usize, top: usize) -> Self {
        assert!(ids.len().is_multiple_of(size) && top * size <= ids.len());
        let list = TokenList::new(b, ids);
        TokenGroups { list, size, top }
    }

    /// The tokens, group after group.
    pub fn list(&self) -> &TokenList {
        &self.list
    }

    /// Tokens of a group.
    pub fn size(&self) -> usize {
        self.size
    }

    /// How many groups count.
    pub fn top(&self) -> usize {
        self.top
    }

    /// The tokens of the groups with the largest `scores`, the lower of equal ones, in
    /// ascending order.
    pub fn best(&self, scores: &[f32]) -> Vec<u32> {
        let mut order: Vec<usize> = (0..scores.len()).collect();
        let better = |&a: &usize, &b: &usize| scores[b].total_cmp(&scores[a]).then(a.cmp(&b));
        if self.top < order.len() {
            order.select_nth_unstable_by(self.top, better);
            order.truncate(self.top);
        }
        let group = |g: usize| &self.list.ids[g * self.size..(g + 1) * self.size];
        let mut ids: Vec<u32> = order.into_iter().flat_map(group).copied().collect();
        ids.sort_unstable();
        ids
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_probabilities_are_those_of_a_softmax() {
        let row: Vec<f32> = (0..5000u32)
            .map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / 1e6 - 9.0)
            .collect();
        let of = |l: f32| f64::from(l);
        let largest = row.iter().copied().fold(f32::MIN, f32::max);
        let sum: f64 = row.iter().map(|&l| of(l - largest).exp()).sum();
        let mut order: Vec<u32> = (0..5000).collect();
        order.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]).then(a.cmp(&b)));
        for n in [0, 1, 5, 20, 5000, 6000] {
            let found = Likeliest::of(&row, 17, n);
            let ids: Vec<u32> = found.top.iter().map(|&(id, _)| id).collect();
            assert_eq!(ids, order[..n.min(5000)]);
            for (id, logit) in found.top.iter().copied().chain([(17, found.logit)]) {
                assert_eq!(logit, row[id as usize]);
                let exact = of(logit - largest) - sum.ln();
                assert!((of(found.logprob(logit)) - exact).abs() < 2e-6, "{id}");
            }
        }
    }

    /// The tokens that `choice` chooses of `logits` at some of many positions, in ascending order.
    fn chosen(choice: TokenChoice, logits: &[f32]) -> Vec<u32> {
        let at = |position| TokenChoice { position, ..choice }.choose(logits, None);
        let mut tokens: Vec<u32> = (0..3000).map(at).collect();
        tokens.sort_unstable();
        tokens.dedup();
        tokens
    }

    #[test]
    fn noise_chooses_among_what_truncation_leaves() {
        // Shares of 0.4, 0.1, 0.2, 0.2 and 0.1.
        let shares = [4.0f32, 1.0, 2.0, 2.0, 1.0];
        let logits = [shares.map(f32::ln).as_slice(), &[f32::NEG_INFINITY]].concat();
        let all = TokenChoice {
            seed: 3,
            position: 0,
            scale: 1.0,
            top_p: 1.0,
            ln_min_p: f32::NEG_INFINITY,
            top_k: 0,
            floor: f32::MIN,
        };
        assert_eq!(chosen(all, &logits), [0, 1, 2, 3, 4]);
        // Of equal ones the lower token comes first.
        for (top_k, want) in [(1, vec![0]), (2, vec![0, 2]), (9, vec![0, 1, 2, 3, 4])] {
            assert_eq!(chosen(TokenChoice { top_k, ..all }, &logits), want);
        }
        for (top_p, want) in [(0.3, vec![0]), (0.59, vec![0, 2]), (0.75, vec![0, 2, 3])] {
            assert_eq!(chosen(TokenChoice { top_p, ..all }, &logits), want);
        }
        for (min_p, want) in [(0.51f32, vec![0]), (0.49, vec![0, 2, 3])] {
            let ln_min_p = ln(min_p);
            assert_eq!(chosen(TokenChoice { ln_min_p, ..all }, &logits), want);
        }
        // A floor comes before top-k and top-p: 0.4 is half of what it leaves.
        for (floor, top_p, want) in [
            (0.5, 1.0, vec![0, 2, 3]),
            (1.0, 1.0, vec![0]),
            (0.5, 0.49, vec![0]),
            (0.5, 0.55, vec![0, 2]),
        ] {
            let floored = TokenChoice {
                floor,
                top_p,
                ..all
            };
            assert_eq!(chosen(floored, &logits), want);
        }
        // Top-p is a share of what top-k leaves: 0.4 of 0.6.
        let (top_k, top_p) = (2, 0.65);
        assert_eq!(
            chosen(
                TokenChoice {
                    top_k,
                    top_p,
                    ..all
                },
                &logits
            ),
            [0]
        );
        assert_eq!(chosen(TokenChoice { scale: 0.0, ..all }, &logits), [0]);
    }

    #[test]
    fn a_choice_is_made_by_token_and_not_by_column() {
        let (logits, ids) = ([0.5, 0.5, -0.0, 0.0], [9, 4, 2, 7]);
        let mut scale = 0.0;
        for position in 0..200 {
            let choice = TokenChoice {
                seed: 1 << 40,
                position,
                scale,
                top_p: 1.0,
                ln_min_p: f32::NEG_INFINITY,
                top_k: 0,
                floor: f32::MIN,
            };
            let token = choice.choose(&logits, Some(&ids));
            let mut row = logits;
            let mut swapped = ids;
            row.reverse();
            swapped.reverse();
            assert_eq!(choice.choose(&row, Some(&swapped)), token);
            if scale == 0.0 {
                assert_eq!(token, 4, "the lower token of two equal ones");
            }
            scale = 1.0;
        }
    }

    #[test]
    fn a_row_gives_a_token_if_its_largest_logit_is_finite_and_none_is_nan() {
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        for n in [1, 15, 16, 17, 40] {
            for at in [0, n / 2, n - 1] {
                let with = |all: f32, one: f32| {
                    let mut row = vec![all; n];
                    row[at] = one;
                    gives_token(&row)
                };
                assert!(with(0.5, 1.0) && with(-inf, 1.0) && with(-inf, f32::MIN));
                for row in [(0.5, nan), (0.5, -nan), (0.5, inf), (-inf, nan)] {
                    assert!(!with(row.0, row.1), "{row:?} at {at} of {n}");
                }
                assert!(!with(-inf, -inf) && !with(nan, nan));
            }
        }
    }

    #[test]
    fn what_is_not_a_number_has_no_probability() {
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        let row = [nan, 1.0, -inf, 1.0, nan];
        let found = Likeliest::of(&row, 0, 3);
        assert_eq!(found.top, [(1, 1.0), (3, 1.0)]);
        assert_eq!((found.logit, found.mass), (-inf, 2 << 40));
        assert_eq!(found.logprob(found.logit), -inf);
        assert!((found.logprob(1.0) + 2.0f32.ln()).abs() < 1e-6);
        for row in [[nan, -inf], [inf, 1.0]] {
            let found = Likeliest::of(&row, 1, 2);
            assert_eq!(found.logprob(found.logit), -inf, "{row:?}");
        }
        assert_eq!(Likeliest::of(&[7.0], 0, 1).logprob(7.0), 0.0);
    }
}

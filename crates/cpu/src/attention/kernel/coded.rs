//! A few queries against keys and values in codes, which are decoded in registers.
//!
//! Many queries share keys and values that are converted to memory once. For one row of a model
//! with few query heads a key/value head, what is stored and loaded again costs as much as its products:
//! here each value is multiplied where it is decoded. The sums, and their order, are those of
//! [`accumulate`](crate::microkernel::accumulate).

use super::super::prefetch::PrefetchRange;
use super::super::softmax::OnlineSoftmax;
use super::{Attend, Scratch};
use crate::arch::{Lanes, Registers, load, store};
use crate::kv::{BLOCK, Codes, Decode, KvView, STRIP, UseCodes};
use crate::microkernel::{PREFETCH_STEPS, Prefetch};
use backend::PAGE_ROWS;
use std::marker::PhantomData;
use std::ops::Range;

/// Queries of a call. Fewer are filled up with the last one, so that one shape is compiled for
/// each kind of codes.
const M: usize = 4;

/// Blocks of keys of a call.
pub(super) const KEY_BLOCKS: usize = 2;

/// Strips of values that are added up at a time.
const STRIPS: usize = 2;

/// Whether `queries` queries decode `unit` in registers.
#[inline(always)]
pub(super) fn decodes<L: Lanes>(unit: KvView<'_>, queries: usize) -> bool {
    L::REGISTERS == Registers::Wide && queries <= M && unit.has_codes()
}

impl Attend<'_> {
    /// Scores [`KEY_BLOCKS`] blocks of keys of `unit`, from block `b` on.
    #[inline(always)]
    pub(super) fn score_codes<L: Lanes>(
        &mut self,
        unit: KvView<'_>,
        b: usize,
        active: Range<usize>,
        ahead: PrefetchRange,
    ) {
        let prefetch = ahead.over(self.args.spec.head_dim);
        unit.with_codes(ScoreCodes::<L> {
            attend: self,
            active,
            b,
            prefetch,
            lanes: PhantomData,
        });
    }

    /// Whether [`Self::add_codes`] adds the values of `unit` to queries `active`: they must see the
    /// same of its keys, in whole steps of columns.
    #[inline(always)]
    pub(super) fn adds_codes<L: Lanes>(&self, unit: KvView<'_>, active: Range<usize>) -> bool {
        let states = &self.scratch.states[active];
        let mut seen = states.iter().map(|s| (s.first, s.last));
        decodes::<L>(unit, states.len())
            && self.args.width.is_multiple_of(STRIPS * STRIP)
            && seen.next().is_none_or(|first| seen.all(|s| s == first))
    }

    /// `part = part * correction + Σ p v` for queries `active`.
    #[inline(always)]
    pub(super) fn add_codes<L: Lanes>(
        &mut self,
        unit: KvView<'_>,
        active: Range<usize>,
        ahead: PrefetchRange,
    ) {
        unit.with_codes(AddCodes::<L> {
            attend: self,
            active,
            ahead,
            lanes: PhantomData,
        });
    }
}

/// The numbers of [`M`] queries, the last of `active` for what is too much.
#[inline(always)]
fn filled_up(active: &Range<usize>) -> [usize; M] {
    std::array::from_fn(|m| (active.start + m).min(active.end - 1))
}

/// Scores of [`KEY_BLOCKS`] blocks of keys, from block `b` on.
struct ScoreCodes<'s, 'a, L> {
    attend: &'s mut Attend<'a>,
    active: Range<usize>,
    b: usize,
    prefetch: Prefetch,
    lanes: PhantomData<L>,
}

impl<L: Lanes> UseCodes for ScoreCodes<'_, '_, L> {
    #[inline(always)]
    fn run<const BITS: usize, D: Decode>(self, codes: Codes<'_, BITS, D>) {
        let (head_dim, b) = (self.attend.args.spec.head_dim, self.b);
        let Scratch { q, p, .. } = &mut self.attend.scratch;
        let q = filled_up(&self.active).map(|i| &q[i * head_dim..][..head_dim]);
        let mut acc = [[L::splat(0.0); KEY_BLOCKS]; M];
        for g in 0..head_dim.div_ceil(codes.group) {
            let mut scales = [L::splat(0.0); KEY_BLOCKS];
            for (r, scales) in scales.iter_mut().enumerate() {
                *scales = codes.key_scales(b + r, g);
            }
            let columns = g * codes.group..head_dim.min((g + 1) * codes.group);
            for eight in columns.start / 8..columns.end / 8 {
                self.prefetch.step::<L>(eight);
                let mut keys = [[L::splat(0.0); 8]; KEY_BLOCKS];
                for (r, keys) in keys.iter_mut().enumerate() {
                    *keys = codes.keys(b + r, eight);
                }
                let mut x = [&[0.0; 8]; M];
                for m in 0..M {
                    x[m] = q[m][8 * eight..].first_chunk().expect("8 columns");
                }
                for c in 0..8 {
                    let mut lanes = [L::splat(0.0); KEY_BLOCKS];
                    for r in 0..KEY_BLOCKS {
                        lanes[r] = keys[r][c] * scales[r];
                    }
                    for m in 0..M {
                        let x = L::splat(x[m][c]);
                        for r in 0..KEY_BLOCKS {
                            acc[m][r] = lanes[r].mul_add(x, acc[m][r]);
                        }
                    }
                }
            }
        }
        for (i, acc) in self.active.zip(acc) {
            for (r, lanes) in acc.into_iter().enumerate() {
                store(lanes, &mut p[i * PAGE_ROWS + (b + r) * BLOCK..][..BLOCK]);
            }
        }
    }
}

/// Values, to be added to queries that see the same keys.
struct AddCodes<'s, 'a, L> {
    attend: &'s mut Attend<'a>,
    active: Range<usize>,
    ahead: PrefetchRange,
    lanes: PhantomData<L>,
}

impl<L: Lanes> UseCodes for AddCodes<'_, '_, L> {
    #[inline(always)]
    fn run<const BITS: usize, D: Decode>(mut self, codes: Codes<'_, BITS, D>) {
        let width = self.attend.args.width;
        let Scratch {
            p, part, states, ..
        } = &mut self.attend.scratch;
        let queries = filled_up(&self.active);
        let states: [OnlineSoftmax; M] = queries.map(|i| states[i]);
        let keys = states[0].first..states[0].last;
        assert!(keys.end <= PAGE_ROWS, "keys of a page");
        let p = queries.map(|i| {
            let p = p[i * PAGE_ROWS..].first_chunk::<PAGE_ROWS>();
            p.expect("probabilities of a page")
        });
        for col in (0..width).step_by(STRIPS * STRIP) {
            let ahead = self.ahead.take(width - col, STRIPS * STRIP);
            let prefetch = ahead.over(keys.len());
            let mut scales = [[0.0; PAGE_ROWS]; STRIPS];
            for (s, scales) in scales.iter_mut().enumerate() {
                *scales = codes.value_scales::<L>((col + s * STRIP) / codes.group);
            }
            let at = |i: usize, s: usize, half: usize| i * width + col + s * STRIP + 16 * half;
            let mut acc = [[[L::splat(0.0); 2]; STRIPS]; M];
            for m in 0..M {
                for s in 0..STRIPS {
                    for half in 0..2 {
                        let part = &part[at(queries[m], s, half)..][..16];
                        acc[m][s][half] = load::<L>(part) * L::splat(states[m].correction);
                    }
                }
            }
            for key in keys.clone() {
                let turn = key - keys.start;
                if turn.is_multiple_of(PREFETCH_STEPS) {
                    prefetch.step::<L>(turn / PREFETCH_STEPS);
                }
                let mut values = [[L::splat(0.0); 2]; STRIPS];
                for s in 0..STRIPS {
                    let scale = L::splat(scales[s][key]);
                    let [a, b] = codes.values::<L>(key, col / STRIP + s);
                    values[s] = [a * scale, b * scale];
                }
                for m in 0..M {
                    let x = L::splat(p[m][key]);
                    for s in 0..STRIPS {
                        for half in 0..2 {
                            acc[m][s][half] = values[s][half].mul_add(x, acc[m][s][half]);
                        }
                    }
                }
            }
            for (i, acc) in self.active.clone().zip(acc) {
                for (s, halves) in acc.into_iter().enumerate() {
                    for (half, lanes) in halves.into_iter().enumerate() {
                        store(lanes, &mut part[at(i, s, half)..][..16]);
                    }
                }
            }
        }
    }
}

//! Attention: keys and values in pages, windows, rows that see each other.

use super::{Noise, Pair, same};
use crate::{
    Attention, Backend, Batch, BatchSeq, Kv, KvFormat, KvSpec, NO_PAGE, PAGE_ROWS, Row, SPLIT_ROWS,
    Tensor,
};
use quant::{KvRowFormat, kv};

/// Sequences with pages, as `cache` would keep them.
pub(super) struct Sequences {
    lens: Vec<usize>,
    tables: Vec<Vec<u32>>,
    free: Vec<u32>,
}

impl Sequences {
    fn new(noise: &mut Noise, n: usize, pages: usize) -> Self {
        let mut free: Vec<u32> = (0..pages as u32).collect();
        (1..pages).for_each(|i| free.swap(i, noise.below(i + 1)));
        Sequences {
            lens: vec![0; n],
            tables: vec![Vec::new(); n],
            free,
        }
    }

    /// A step of `rows[s]` more rows for each sequence `s`; pages that `window`
    /// has left are gone.
    fn step(&mut self, rows: &[usize], window: Option<usize>) -> Batch {
        let mut batch = Batch::default();
        for (s, &n) in rows.iter().enumerate().filter(|(_, n)| **n > 0) {
            let (old, len) = (self.lens[s], self.lens[s] + n);
            let table = &mut self.tables[s];
            while table.len() * PAGE_ROWS < len {
                table.push(self.free.pop().expect("pages enough for the case"));
            }
            if let Some(window) = window {
                let gone = (old + 1).saturating_sub(window) / PAGE_ROWS;
                table[..gone].fill(NO_PAGE);
            }
            let first = batch.n_rows();
            batch.rows.extend((old..len).map(|i| Row::text(i as u32)));
            let tables = batch.tables.len()..batch.tables.len() + table.len();
            batch.tables.extend_from_slice(table);
            batch.seqs.push(BatchSeq {
                rows: first..first + n,
                slot: s,
                is_new: old == 0,
                kept: 0,
                certain: n,
                tables: vec![tables],
            });
            self.lens[s] = len;
        }
        batch
    }

    /// Has each sequence go on in another page than its newest, by way of a second one. Returns
    /// from where to where pages have to be moved, in that order.
    fn move_last_pages(&mut self) -> Vec<(u32, u32)> {
        let mut moves = Vec::new();
        for page in self.tables.iter_mut().filter_map(|table| table.last_mut()) {
            for _ in 0..2 {
                let to = self.free.remove(0);
                moves.push((*page, to));
                self.free.push(std::mem::replace(page, to));
            }
        }
        moves
    }
}

/// Has a run of rows in the middle of each sequence's see each other, as an image's do, and
/// every other sequence's rows forget the first third of what they saw.
pub(super) fn see_each_other(batch: &mut Batch) {
    let Batch { rows, seqs, .. } = batch;
    for seq in seqs {
        let n = seq.rows.len();
        let span = &mut rows[seq.rows.start + n / 4..seq.rows.end - n / 5];
        let end = span.last().map_or(0, |row| row.sees.end);
        span.iter_mut().for_each(|row| row.sees.end = end);
        if seq.slot % 2 == 1 {
            for row in &mut rows[seq.rows.clone()] {
                row.sees.start = row.own() / 3;
            }
        }
    }
}

/// A shape of attention.
pub(super) struct AttendCase {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    window: Option<usize>,
    k: &'static KvRowFormat,
    v: &'static KvRowFormat,
    /// Rows of each sequence, step by step.
    steps: &'static [&'static [usize]],
}

/// Lengths that cross tiles and splits, with rows enough to fill any block.
pub(super) const LONG: &[&[usize]] = &[
    &[PAGE_ROWS - 1, SPLIT_ROWS + 3],
    &[1, 1],
    &[4, 7],
    &[17, 1],
    &[1, SPLIT_ROWS + 40],
    &[3, 2],
];
pub(super) const SHORT: &[&[usize]] = &[
    &[1, 0, 3],
    &[1, 70, 0],
    &[5, 3, 17],
    &[2, 1, 1],
    &[40, 0, 100],
    &[1, 1, 1],
];

pub(super) fn attend_cases() -> Vec<AttendCase> {
    let named = |name| quant::kv_format(name).expect("a format that exists");
    // (query heads, key/value heads, their size), window, (keys, values), steps
    let case = |(heads, kv_heads, head_dim), window, (k, v), steps| AttendCase {
        heads,
        kv_heads,
        head_dim,
        window,
        k,
        v,
        steps,
    };
    vec![
        case((1, 1, 16), None, (&kv::F32, &kv::F32), LONG),
        case((4, 2, 64), None, (&kv::BF16, &kv::BF16), SHORT),
        case((4, 1, 16), Some(100), (&kv::F16, &kv::F16), LONG),
        case((8, 1, 24), Some(7), (&kv::BF16, &kv::BF16), SHORT),
        case((2, 1, 20), Some(SPLIT_ROWS + 5), (&kv::F32, &kv::F32), LONG),
        case((3, 3, 128), None, (&kv::F16, &kv::F16), SHORT),
        case((2, 1, 256), Some(64), (&kv::BF16, &kv::BF16), SHORT),
        case(
            (2, 2, 512),
            None,
            (&kv::F32, &kv::F32),
            &[&[5, 70], &[1, 3]],
        ),
        case((4, 1, 64), None, (named("q8_0"), named("q4_0")), LONG),
        case(
            (10, 2, 32),
            Some(100),
            (named("q4_0"), named("q8_0")),
            SHORT,
        ),
        case((2, 1, 96), None, (&kv::BF16, named("q8_0")), SHORT),
        // Codes beside elements.
        case((2, 1, 64), None, (named("q4_0"), &kv::F16), SHORT),
        // Values that are rotated, in groups of 64, 128 and both.
        case(
            (4, 2, 64),
            Some(100),
            (named("q8_0"), named("turbo3")),
            SHORT,
        ),
        case((9, 1, 192), None, (&kv::BF16, named("turbo4")), SHORT),
        case((2, 1, 256), None, (&kv::F32, named("turbo3")), LONG),
        case((8, 2, 128), None, (named("turbo2"), named("turbo2")), SHORT),
        // Keys that are rotated, with values that are and others.
        case((4, 2, 64), None, (named("turbo4"), named("turbo4")), LONG),
        case(
            (6, 1, 192),
            Some(90),
            (named("turbo3"), named("turbo2")),
            SHORT,
        ),
        case((2, 1, 128), None, (named("turbo4"), &kv::F16), SHORT),
        // Rotated codes; fifth bits.
        case(
            (4, 2, 128),
            None,
            (named("rot-q8_0"), named("turbo4")),
            SHORT,
        ),
        case(
            (2, 1, 64),
            None,
            (named("rot-q5_0"), named("rot-q4_0")),
            LONG,
        ),
        case(
            (3, 1, 192),
            Some(100),
            (named("rot-q4_0"), named("rot-q5_0")),
            SHORT,
        ),
        case((2, 1, 96), None, (named("q5_0"), named("q5_0")), SHORT),
        case((2, 2, 64), None, (&kv::BF16, named("rot-q8_0")), SHORT),
    ]
}

impl AttendCase {
    fn name(&self) -> String {
        let AttendCase {
            heads,
            kv_heads,
            head_dim,
            window,
            ..
        } = self;
        format!(
            "{heads} heads on {kv_heads} of {head_dim} in {}, window {window:?}",
            self.format()
        )
    }

    fn attention(&self) -> Attention {
        Attention {
            group: 0,
            heads: self.heads,
            scale: (self.head_dim as f32).sqrt().recip(),
            window: self.window,
        }
    }

    fn format(&self) -> KvFormat {
        KvFormat {
            k: self.k,
            v: self.v,
        }
    }

    fn kv(&self, b: &dyn Backend, pages: usize) -> Kv {
        b.kv(KvSpec {
            pages,
            rows: pages * crate::PAGE_ROWS,
            heads: self.kv_heads,
            head_dim: self.head_dim,
            format: self.format(),
        })
    }

    /// Appends `k` and `v` and attends with `q`, `[n, ..]` each.
    fn run(&self, b: &dyn Backend, kv: &mut Kv, batch: &Batch, [q, k, v]: [&[f32]; 3]) -> Tensor {
        let n = batch.n_rows();
        let (cols, kv_cols) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        b.kv_append(
            kv,
            &b.upload(n, kv_cols, k),
            &b.upload(n, kv_cols, v),
            0,
            batch,
        );
        b.attend(&b.upload(n, cols, q), kv, &self.attention(), batch)
    }
}

pub(super) fn attend_equals(got: &dyn Backend, want: &dyn Backend) {
    /// Enough for the longest case without giving pages back.
    const PAGES: usize = 48;
    let pair = Pair { got, want };
    let mut noise = Noise(8);
    let kept = |case: &&AttendCase| got.capabilities().kv.contains(case.format());
    let both = |case| [(case, false), (case, true)];
    let cases = attend_cases();
    for (case, spans) in cases.iter().filter(|case| kept(case)).flat_map(both) {
        let mut sequences = Sequences::new(&mut noise, case.steps[0].len(), PAGES);
        let (mut kv, mut kv_want) = pair.each(|b| case.kv(b, PAGES));
        for rows in case.steps {
            let mut batch = sequences.step(rows, case.window);
            if spans {
                see_each_other(&mut batch);
            }
            let n = batch.n_rows();
            let q = noise.values(n * case.heads * case.head_dim, 6.0);
            let k = noise.values(n * case.kv_heads * case.head_dim, 1.0);
            let v = noise.values(n * case.kv_heads * case.head_dim, 1.0);
            let name = format!(
                "{}, {rows:?} rows more to {:?}, which see each other: {spans}",
                case.name(),
                sequences.lens
            );
            let got = case.run(got, &mut kv, &batch, [&q, &k, &v]);
            let want = case.run(want, &mut kv_want, &batch, [&q, &k, &v]);
            pair.compare_tensors("attend", &name, &got, &want);
        }
        let moved = sequences.move_last_pages();
        for (b, kv) in [(got, &mut kv), (want, &mut kv_want)] {
            move_pages(b, kv, &moved);
        }
        // Rows that append nothing, as a draft head's.
        let mut batch = sequences.step(&vec![1; sequences.lens.len()], case.window);
        for row in &mut batch.rows {
            *row = Row::reader(row.sees.end - 1);
        }
        let q = noise.values(batch.n_rows() * case.heads * case.head_dim, 6.0);
        let attend = |b: &dyn Backend, kv: &Kv| {
            b.attend(
                &b.upload(batch.n_rows(), case.heads * case.head_dim, &q),
                kv,
                &case.attention(),
                &batch,
            )
        };
        let name = format!("{}, rows that append nothing", case.name());
        pair.compare_tensors("attend", &name, &attend(got, &kv), &attend(want, &kv_want));
    }
}

pub(super) fn attend_rows_are_independent(b: &dyn Backend) {
    const PAGES: usize = 40;
    let mut noise = Noise(15);
    let kept = |case: &AttendCase| b.capabilities().kv.contains(case.format());
    for case in attend_cases().into_iter().filter(kept) {
        // Two sequences share steps; the second is cut in other places.
        let (n, m) = if case.steps == LONG {
            (SPLIT_ROWS + 30, 90)
        } else {
            (150, 60)
        };
        let (cols, kv_cols) = (case.heads * case.head_dim, case.kv_heads * case.head_dim);
        let q = noise.values((n + m) * cols, 6.0);
        let (k, v) = (
            noise.values((n + m) * kv_cols, 1.0),
            noise.values((n + m) * kv_cols, 1.0),
        );
        // Rows of the first that see each other, and so come in one step.
        let span = n - 40..n - 10;
        let mut run = |spans: bool, steps: &mut dyn FnMut(usize) -> usize| -> Vec<f32> {
            let mut sequences = Sequences::new(&mut noise, 2, PAGES);
            let mut kv = case.kv(b, PAGES);
            let mut out = vec![0.0; (n + m) * cols];
            while sequences.lens != [n, m] {
                let old = sequences.lens.clone();
                let mut rows = [steps(0).min(n - old[0]), steps(1).min(m - old[1])];
                if spans && old[0] <= span.start && old[0] + rows[0] > span.start {
                    rows[0] = rows[0].max(span.end - old[0]);
                }
                let mut batch = sequences.step(&rows, case.window);
                if spans && rows[0] > 0 {
                    for row in &mut batch.rows[..rows[0]] {
                        if span.contains(&(row.own() as usize)) {
                            row.sees.end = span.end as u32;
                        }
                    }
                }
                let parts = [old[0]..old[0] + rows[0], n + old[1]..n + old[1] + rows[1]];
                let pick = |from: &[f32], cols: usize| -> Vec<f32> {
                    parts
                        .iter()
                        .flat_map(|p| &from[p.start * cols..p.end * cols])
                        .copied()
                        .collect()
                };
                let y = case.run(
                    b,
                    &mut kv,
                    &batch,
                    [&pick(&q, cols), &pick(&k, kv_cols), &pick(&v, kv_cols)],
                );
                let y = b.download(&y);
                let mut rest = &y[..];
                for part in parts {
                    let (mine, other) = rest.split_at(part.len() * cols);
                    out[part.start * cols..part.end * cols].copy_from_slice(mine);
                    rest = other;
                }
            }
            out
        };
        for spans in [false, true] {
            let together = run(spans, &mut |_| n);
            let mut turn = 0;
            let apart = run(spans, &mut |s| {
                turn += 1;
                [1, 2, 4, 8, 16, 33, 64, 1, 5][turn % 9] * if s == 0 { 1 } else { turn / 2 % 2 }
            });
            let name = format!("{}, prefill in steps, spans: {spans}", case.name());
            same("attend", &name, cols, &apart, &together);
        }
    }
}

/// Copies pages `from` to pages `to` of each pair, every other one by way of its bytes.
fn move_pages(b: &dyn Backend, kv: &mut Kv, pages: &[(u32, u32)]) {
    for (i, &(from, to)) in pages.iter().enumerate() {
        let (from, to) = (from as usize, to as usize);
        if i % 2 == 0 {
            b.kv_copy(kv, from, to);
        } else {
            let bytes = b.kv_save(kv, from);
            assert!(!b.kv_load(kv, to, &bytes[1..]), "not a page's bytes");
            assert!(b.kv_load(kv, to, &bytes), "what was saved is loaded");
        }
    }
}

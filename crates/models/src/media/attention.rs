//! Attention among the patches of a frame.

use backend::{
    Attention, Backend, Batch, BatchSeq, CacheRows, Kv, KvFormat, KvSpec, PAGE_ROWS, Position, Row,
    Tensor,
};
use quant::kv::{BF16, F16, F32};
use std::ops::Range;

/// How the patches of a frame attend to each other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FrameAttention {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Columns of a head.
    pub head_dim: usize,
    /// Factor of scores.
    pub scale: f32,
}

/// Keys and values of the layer at work, and the step whose rows are patches: each run of them
/// is a sequence of its own, whose rows see each other and nothing else.
pub(crate) struct FrameMemory {
    kv: Kv,
    /// Row and column of each patch of a run.
    places: Vec<[usize; 2]>,
    /// The rows at work, and the step that they are: axis 1 of a position is the patch's row, axis 2 its
    /// column.
    part: Range<usize>,
    batch: Batch,
    attention: Attention,
}

impl FrameMemory {
    /// For `runs` runs whose patches lie at `places`, row and column.
    pub(crate) fn new(
        b: &dyn Backend,
        runs: usize,
        places: Vec<[usize; 2]>,
        attention: FrameAttention,
    ) -> Self {
        let FrameAttention {
            heads,
            kv_heads,
            head_dim,
            scale,
        } = attention;
        let spec = KvSpec {
            pages: runs * places.len().div_ceil(PAGE_ROWS),
            rows: places.len(),
            heads: kv_heads,
            head_dim,
            format: format(b),
        };
        FrameMemory {
            kv: b.kv(spec),
            places,
            part: 0..0,
            batch: Batch::default(),
            attention: Attention {
                group: 0,
                heads,
                scale,
                window: None,
            },
        }
    }

    /// Goes to rows `part` of all runs' patches, which lie one run after the other; the step that they
    /// are.
    pub(crate) fn batch(&mut self, part: Range<usize>) -> &Batch {
        if part == self.part {
            return &self.batch;
        }
        let n = self.places.len();
        let pages = n.div_ceil(PAGE_ROWS);
        let batch = &mut self.batch;
        batch.clear();
        batch.tokens.resize(part.len(), 0);
        for run in part.start / n..part.end.div_ceil(n) {
            let of_run = part.start.max(run * n)..part.end.min((run + 1) * n);
            let rows = of_run.start - part.start..of_run.end - part.start;
            let sees = CacheRows {
                start: 0,
                end: n as u32,
            };
            batch.rows.extend(of_run.map(|patch| {
                let at = patch % n;
                let [row, col] = self.places[at];
                Row {
                    at: Some(at as u32),
                    sees,
                    position: Position::new([0, row as u32, col as u32]),
                }
            }));
            let tables = batch.tables.len();
            let of_run = run * pages..(run + 1) * pages;
            batch.tables.extend(of_run.map(|page| page as u32));
            batch.seqs.push(BatchSeq {
                certain: rows.len(),
                rows,
                slot: run,
                is_new: true,
                kept: 0,
                tables: std::iter::once(tables..batch.tables.len()).collect(),
            });
        }
        self.part = part;
        &self.batch
    }

    /// Writes the keys and values of the rows at work.
    pub(crate) fn append(&mut self, b: &dyn Backend, k: &Tensor, v: &Tensor) {
        b.kv_append(&mut self.kv, k, v, 0, &self.batch);
    }

    /// `softmax(scale q·kᵀ) v` of the rows at work among the patches of their run: `[n, heads · e]`.
    pub(crate) fn attend(&self, b: &dyn Backend, q: &Tensor) -> Tensor {
        b.attend(q, &self.kv, &self.attention, &self.batch)
    }
}

/// The format of keys and values: the most exact one, or f16 on a device whose products take their
/// input so anyway.
fn format(b: &dyn Backend) -> KvFormat {
    let able = b.capabilities();
    let formats = match able.own_memory {
        true => [&F16, &BF16, &F32],
        false => [&F32, &F16, &BF16],
    };
    let mut formats = formats.into_iter().map(KvFormat::both);
    let format = formats.find(|format| able.kv.contains(*format));
    format.expect("every device keeps plain keys and values")
}

//! Attention among the patches of a frame.

use backend::{
    Attention, Backend, Batch, BatchSeq, CacheRows, Kv, KvFormat, KvSpec, PAGE_ROWS, Position, Row,
    Tensor,
};
use quant::kv::{BF16, F16, F32};

/// Keys and values of the layer at work, and the step whose rows are patches: each run of them
/// is a sequence of its own, whose rows see each other and nothing else.
pub(crate) struct FrameMemory {
    kv: Kv,
    /// The step, for rotary embeddings: axis 1 of a position is the patch's row, axis 2 its column.
    pub(crate) batch: Batch,
    attention: Attention,
}

impl FrameMemory {
    /// For `runs` runs whose patches lie at `places`, row and column; heads and their columns; the
    /// factor of scores.
    pub(crate) fn new(
        b: &dyn Backend,
        runs: usize,
        places: &[[usize; 2]],
        (heads, kv_heads, head_dim): (usize, usize, usize),
        scale: f32,
    ) -> Self {
        let n = places.len();
        let pages = n.div_ceil(PAGE_ROWS);
        let mut batch = Batch::default();
        for run in 0..runs {
            let sees = CacheRows {
                start: 0,
                end: n as u32,
            };
            batch
                .rows
                .extend((0..).zip(places).map(|(at, &[row, col])| Row {
                    at: Some(at),
                    sees,
                    position: Position::new([0, row as u32, col as u32]),
                }));
            batch
                .tables
                .extend((run * pages..(run + 1) * pages).map(|page| page as u32));
            batch.seqs.push(BatchSeq {
                rows: run * n..(run + 1) * n,
                slot: run,
                is_new: true,
                kept: 0,
                certain: n,
                tables: std::iter::once(run * pages..(run + 1) * pages).collect(),
            });
        }
        batch.tokens = vec![0; runs * n];
        let spec = KvSpec {
            pages: runs * pages,
            heads: kv_heads,
            head_dim,
            format: format(b),
        };
        FrameMemory {
            kv: b.kv(spec),
            batch,
            attention: Attention {
                group: 0,
                heads,
                scale,
                window: None,
            },
        }
    }

    /// `softmax(scale q·kᵀ) v` among the patches of each run: `[n, heads · e]`.
    pub(crate) fn attend(&mut self, b: &dyn Backend, q: &Tensor, k: &Tensor, v: &Tensor) -> Tensor {
        b.kv_append(&mut self.kv, k, v, 0, &self.batch);
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

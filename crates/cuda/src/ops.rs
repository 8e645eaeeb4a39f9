//! The ops of a model's layers: shapes are checked, and ops appended to the list.

use crate::args::Address;
use crate::attention;
use crate::delta::{self, states};
use crate::kv::pages;
use crate::machine::lock;
use crate::matmul::weights;
use crate::memory::{Block, Cell, cell, tensor};
use crate::record::{Bound, Frequencies, Recorder, Rows, Tokens};
use crate::{Cuda, moe, step};
use backend::{
    Activation, Attention, Batch, Delta, DeltaWeights, Experts, Kv, KvSpec, MAX_TENTATIVE, Matrix,
    NearAttention, Ops, Rope, Store, Tensor, TokenGroups,
};
use fusion::{Kind, Operand};
use std::sync::Arc;

/// Rows and columns of a tensor.
fn shape(x: &Tensor) -> (usize, usize) {
    (x.rows(), x.cols())
}

/// The operand that a matrix is.
fn matrix(list: &mut Recorder, w: &Matrix) -> Operand {
    list.operand(Bound::Weights(weights(w).clone()))
}

impl Cuda {
    /// The step's rows on the device, and what they are to a list.
    fn rows(&self, batch: &Batch) -> (Rows, Bound) {
        let (address, own) = self.batch(batch);
        let rows = Rows {
            address,
            n: batch.n_rows(),
            seqs: batch.seqs.len(),
            longest: step::longest(batch),
            ahead: batch.rows_ahead(),
        };
        (rows, Bound::Batch { rows, _own: own })
    }

    /// The frequencies of `rope`, which fits the heads of `x`, and behind them the axes of
    /// positions, by pair, on the device.
    fn frequencies(&self, x: &Tensor, rope: &Rope) -> Frequencies {
        assert!(x.cols().is_multiple_of(rope.head_dim), "whole heads");
        let pairs = rope.frequencies.len();
        rope.check();
        let frequencies = rope.frequencies.iter().map(|f| f.to_bits());
        let axes = (0..pairs).map(|j| rope.axis(j) as u32);
        let words: Vec<u32> = frequencies.chain(axes).collect();
        let mut state = self.state();
        let known = state.frequencies.entry(words);
        let block = known.or_insert_with_key(|words| {
            Block::of(&self.device.driver, words, "rotary frequencies")
        });
        Frequencies {
            address: block.address,
            pair_offset: rope.pair_offset,
            pairs,
        }
    }

    /// Appends an op on `x` that makes a tensor of the same shape.
    fn map<const N: usize>(&self, kind: Kind, x: [&Tensor; N]) -> Tensor {
        let (rows, cols) = shape(x[0]);
        self.record(|list| {
            let x = list.values(x);
            list.make(kind, &x, rows, cols)
        })
    }
}

impl Ops for Cuda {
    fn embed(&self, table: &Matrix, tokens: &[u32], scale: f32) -> Tensor {
        assert!(
            tokens.iter().all(|&t| (t as usize) < table.rows),
            "tokens of the table"
        );
        // A recorded step reads its own tokens, whatever they are by then.
        let tokens_at = self.recorded_tokens(tokens).unwrap_or_else(|| {
            let own = self.device.arena.of(tokens);
            Tokens {
                ids: own.address,
                batch: 0,
                _own: Some(Arc::new(own)),
            }
        });
        self.record(|list| {
            let kind = Kind::Embed {
                table: matrix(list, table),
                tokens: list.operand(Bound::Tokens(tokens_at)),
                scale,
            };
            list.make(kind, &[], tokens.len(), table.cols)
        })
    }

    fn matmul_into(&self, x: &Tensor, w: &[&Matrix], y: &mut [Tensor]) {
        for (w, y) in w.iter().zip(&*y) {
            assert_eq!(
                (w.cols, w.rows, x.rows()),
                (x.cols(), y.cols(), y.rows()),
                "shapes of a product"
            );
        }
        self.record(|list| {
            let cells: Vec<Arc<Cell>> = y.iter().map(|y| Cell::f32(y.rows(), y.cols())).collect();
            let weights = w.iter().map(|w| matrix(list, w)).collect();
            let x = list.values([x]);
            list.push(
                Kind::Product { weights },
                &x,
                &cells.iter().collect::<Vec<_>>(),
            );
            for (y, cell) in y.iter_mut().zip(cells) {
                *y = tensor(cell);
            }
        });
    }

    fn matmul_rows(&self, x: &Tensor, w: &Matrix, ids: &[Vec<u32>]) -> Tensor {
        let n_ids = ids.first().map_or(0, Vec::len);
        assert!(
            ids.len() == x.rows() && ids.iter().all(|i| i.len() == n_ids),
            "as many rows of the matrix for each row"
        );
        let bits: Vec<f32> = ids.iter().flatten().map(|&id| f32::from_bits(id)).collect();
        assert!(
            bits.iter().all(|id| (id.to_bits() as usize) < w.rows),
            "rows of the matrix"
        );
        let ids = self.upload(x.rows(), n_ids, &bits);
        self.chosen_product(x, w, &ids)
    }

    fn matmul_groups(
        &self,
        x: &Tensor,
        w: &Matrix,
        scores: &Tensor,
        groups: &TokenGroups,
    ) -> [Tensor; 2] {
        let (n, size) = (groups.top() * groups.size(), groups.size());
        assert_eq!(
            scores.cols() * size,
            groups.list().ids().len(),
            "a score for each group"
        );
        let ids = self.record(|list| {
            let top = groups.top();
            let kind = Kind::BestGroups {
                groups: list.operand(Bound::Groups { size, top }),
            };
            let inputs = list.values([scores, groups.list().on_device()]);
            list.make(kind, &inputs, x.rows(), n)
        });
        [self.chosen_product(x, w, &ids), ids]
    }

    fn rms_norm(&self, x: &Tensor, weight: Option<&Tensor>, width: usize, eps: f32) -> Tensor {
        let (rows, cols) = shape(x);
        assert!(cols.is_multiple_of(width), "whole runs of the norm's width");
        self.record(|list| {
            let mut inputs = list.values([x]).to_vec();
            inputs.extend(weight.map(|w| list.value(cell(w))));
            let kind = Kind::RmsNorm {
                width,
                eps,
                is_weighted: weight.is_some(),
            };
            list.make(kind, &inputs, rows, cols)
        })
    }

    fn layer_norm(&self, x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f32) -> Tensor {
        let want = (1, x.cols());
        assert_eq!(
            (shape(weight), shape(bias)),
            (want, want),
            "a value for each column"
        );
        self.map(Kind::LayerNorm { eps }, [x, weight, bias])
    }

    fn affine(&self, x: Tensor, factor: Option<&Tensor>, shift: &Tensor) -> Tensor {
        for row in factor.into_iter().chain([shift]) {
            assert_eq!(shape(row), (1, x.cols()), "a value for each column");
        }
        match factor {
            Some(factor) => self.map(Kind::Affine { has_factor: true }, [&x, factor, shift]),
            None => self.map(Kind::Affine { has_factor: false }, [&x, shift]),
        }
    }

    fn activate(&self, x: Tensor, activation: Activation) -> Tensor {
        self.map(Kind::Activate { activation }, [&x])
    }

    fn clamp(&self, x: Tensor, low: f32, high: f32) -> Tensor {
        self.map(Kind::Clamp { low, high }, [&x])
    }

    fn add(&self, x: Tensor, y: &Tensor) -> Tensor {
        assert_eq!(shape(&x), shape(y), "shapes of a sum");
        self.map(Kind::Add, [&x, y])
    }

    fn scale(&self, x: Tensor, factor: f32) -> Tensor {
        if factor == 1.0 {
            return x;
        }
        self.map(Kind::Scale { factor }, [&x])
    }

    fn glu(&self, gate: Tensor, x: &Tensor, activation: Activation) -> Tensor {
        assert_eq!(shape(&gate), shape(x), "shapes of a gate");
        self.map(Kind::Glu { activation }, [&gate, x])
    }

    fn softcap(&self, x: Tensor, cap: f32) -> Tensor {
        self.map(Kind::Softcap { cap }, [&x])
    }

    fn gather(&self, x: &Tensor, rows: &[usize]) -> Tensor {
        assert!(
            rows.iter().all(|&r| r < x.rows()),
            "rows of the tensor: {rows:?} of {}",
            x.rows()
        );
        let numbers: Vec<u32> = rows.iter().map(|&r| r as u32).collect();
        let numbers = Arc::new(self.device.arena.of(&numbers));
        self.record(|list| {
            let kind = Kind::Gather {
                rows: list.operand(Bound::Numbers(numbers)),
            };
            let inputs = list.values([x]);
            list.make(kind, &inputs, rows.len(), x.cols())
        })
    }

    fn replace_rows(&self, x: Tensor, embeddings: &Tensor, source: u32, batch: &Batch) -> Tensor {
        assert_eq!(x.cols(), embeddings.cols(), "rows of one width");
        let of_source = batch.media.iter().filter(|m| m.source == source);
        let pairs: Vec<u32> = of_source.flat_map(|m| [m.row, m.embedding]).collect();
        let (rows, embedded) = (x.rows(), embeddings.rows());
        let exist = |p: &[u32]| (p[0] as usize) < rows && (p[1] as usize) < embedded;
        assert!(
            pairs.chunks_exact(2).all(exist),
            "rows of the step and of its embeddings"
        );
        if pairs.is_empty() {
            return x;
        }
        let n = pairs.len() / 2;
        let pairs = Arc::new(self.device.arena.of(&pairs));
        self.record(|list| {
            let kind = Kind::ReplaceRows {
                pairs: list.operand(Bound::Numbers(pairs)),
                n,
            };
            let inputs = list.values([&x, embeddings]);
            list.make(kind, &inputs, rows, x.cols())
        })
    }

    fn columns(&self, x: &Tensor, first: usize, cols: usize) -> Tensor {
        assert!(first + cols <= x.cols(), "columns of the tensor");
        self.record(|list| {
            let inputs = list.values([x]);
            list.make(Kind::Columns { first }, &inputs, x.rows(), cols)
        })
    }

    fn concat(&self, a: &Tensor, b: &Tensor) -> Tensor {
        assert_eq!(a.rows(), b.rows(), "rows to join");
        self.record(|list| {
            let inputs = list.values([a, b]);
            list.make(Kind::Concat, &inputs, a.rows(), a.cols() + b.cols())
        })
    }

    fn rope(&self, x: Tensor, rope: &Rope, batch: &Batch) -> Tensor {
        assert_eq!(x.rows(), batch.n_rows(), "a row for each of the step's");
        let ((_, rows), table) = (self.rows(batch), self.frequencies(&x, rope));
        self.record(|list| {
            let kind = Kind::Rope(fusion::Rope {
                table: list.operand(Bound::Rope(table)),
                head_dim: rope.head_dim,
                batch: list.operand(rows),
            });
            let inputs = list.values([&x]);
            list.make(kind, &inputs, x.rows(), x.cols())
        })
    }

    fn kv_append(&self, kv: &mut Kv, k: &Tensor, v: &Tensor, group: usize, batch: &Batch) {
        let KvSpec {
            heads, head_dim, ..
        } = kv.spec;
        let want = (batch.n_rows(), heads * head_dim);
        assert_eq!(
            (shape(k), shape(v)),
            (want, want),
            "shapes of keys and values"
        );
        let (_, rows) = self.rows(batch);
        self.record(|list| {
            let kind = Kind::KvAppend {
                kv: list.operand(Bound::Kv(pages(kv).clone())),
                group,
                heads,
                head_dim,
                batch: list.operand(rows),
            };
            let inputs = list.values([k, v]);
            list.push(kind, &inputs, &[]);
        });
    }

    fn attend(&self, q: &Tensor, kv: &Kv, attention: &Attention, batch: &Batch) -> Tensor {
        let want = (batch.n_rows(), attention.heads * kv.spec.head_dim);
        assert_eq!(shape(q), want, "shape of the queries");
        let (size, rows) = self.rows(batch);
        self.record_mixing(|list| {
            let kind = Kind::Attend {
                kv: list.operand(Bound::Kv(pages(kv).clone())),
                attention: *attention,
                batch: list.operand(rows),
                writes_f16: attention::writes_f16(pages(kv), attention, &size),
            };
            let inputs = list.values([q]);
            list.make(kind, &inputs, q.rows(), q.cols())
        })
    }

    fn attend_near(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        relative: &Tensor,
        attention: &NearAttention,
    ) -> Tensor {
        attention.check(q, k, v, relative);
        self.map(Kind::AttendNear(*attention), [q, k, v, relative])
    }

    fn gated_delta(
        &self,
        state: &mut Delta,
        weights: &DeltaWeights,
        qkv: &Tensor,
        b: &Tensor,
        a: &Tensor,
        batch: &Batch,
    ) -> Tensor {
        let spec = state.spec;
        assert_eq!(
            (qkv.cols(), b.cols(), a.cols()),
            (spec.channels(), spec.value_heads, spec.value_heads),
            "columns of the projections"
        );
        assert!(
            batch
                .seqs
                .iter()
                .all(|s| s.rows.len() - s.certain <= MAX_TENTATIVE),
            "at most {MAX_TENTATIVE} tentative rows"
        );
        let (size, rows) = self.rows(batch);
        self.record_mixing(|list| {
            let kind = Kind::Delta {
                state: list.operand(Bound::Delta(states(state).clone())),
                batch: list.operand(rows),
                value_dim: spec.value_dim,
                is_single: delta::is_single(&self.device, &spec, &size),
            };
            let DeltaWeights {
                conv,
                decay,
                dt_bias,
            } = weights;
            let inputs = list.values([qkv, b, a, conv, decay, dt_bias]);
            list.make(kind, &inputs, size.n, spec.value_heads * spec.value_dim)
        })
    }

    fn moe(&self, x: &Tensor, scores: &Tensor, experts: &Experts) -> Tensor {
        let (n, hidden) = shape(x);
        let (count, top_k) = (experts.experts.len(), experts.top_k);
        let first = &experts.experts[0].gate_up;
        assert_eq!(
            (scores.rows(), scores.cols(), first.cols),
            (n, count, hidden),
            "a score an expert"
        );
        let Some(table) = moe::table(&self.device, experts) else {
            return backend::moe::grouped(self, x, scores, experts);
        };
        self.record(|list| {
            let experts = Bound::Experts {
                table,
                _first: weights(first).clone(),
            };
            let kind = Kind::Experts {
                experts: list.operand(experts),
                top_k,
            };
            let inputs = list.values([x, scores]);
            let parts = Cell::f32(n * top_k, hidden);
            let weights = Cell::f32(n, top_k);
            list.push(kind, &inputs, &[&parts, &weights]);
            let inputs = [list.value(&parts), list.value(&weights)];
            list.make(Kind::Combine { top_k }, &inputs, n, hidden)
        })
    }

    fn gate_rows(&self, x: &Tensor, gate: &Tensor, activation: Activation) -> Tensor {
        assert_eq!((gate.rows(), gate.cols()), (x.rows(), 1), "one gate a row");
        self.map(Kind::GateRows { activation }, [x, gate])
    }
}

impl Cuda {
    /// Appends products with the rows of `w` whose ids `ids` has for each row of `x`.
    fn chosen_product(&self, x: &Tensor, w: &Matrix, ids: &Tensor) -> Tensor {
        self.record(|list| {
            let kind = Kind::ChosenProduct {
                weights: matrix(list, w),
            };
            let inputs = list.values([x, ids]);
            list.make(kind, &inputs, ids.rows(), ids.cols())
        })
    }

    /// Where the values of `x` lie, once everything before was launched.
    pub(crate) fn address(&self, x: &Tensor) -> Address {
        lock(&self.recorder).launch(&self.device);
        cell(x).address(&self.device.arena)
    }
}

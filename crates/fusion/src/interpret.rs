//! What every kind of op means: a list is run op by op on [`backend::Reference`].
//!
//! A fused op is run as the ops that it stands for. So a list and what rules make of it can
//! be compared bit by bit, and whoever writes a kernel for a fused op can read here what it
//! owes. F16 copies have the values of what they are copies of.

use crate::{HeadJob, HeadRole, Kind, Op, OpList, Operand, Rope, SumTerm, Value};
use backend::{
    Activation, Batch, Delta, DeltaWeights, Experts, Kv, Matrix, Ops, Reference, Store, Tensor,
    TokenGroups,
};
use std::collections::HashMap;

/// What an [`Operand`] is.
pub enum Bound {
    /// Weights, or a table.
    Matrix(Matrix),
    /// How heads are rotated.
    Rope(backend::Rope),
    /// The rows of a step.
    Batch(Batch),
    /// A KV cache.
    Kv(Kv),
    /// Recurrent states.
    Delta(Delta),
    /// The experts of a layer.
    Experts(Experts),
    /// Numbers of rows.
    Rows(Vec<usize>),
    /// Tokens of a table.
    Tokens(Vec<u32>),
    /// Groups of tokens.
    Groups(TokenGroups),
}

/// Values and operands, by number.
#[derive(Default)]
pub struct Machine {
    /// The operands that lists name.
    pub operands: HashMap<u32, Bound>,
    /// The values so far, row-major.
    pub values: HashMap<Value, Vec<f32>>,
}

macro_rules! bound {
    ($name:ident, $kind:ident, $type:ty, $what:literal) => {
        fn $name(&self, operand: Operand) -> &$type {
            match self.operands.get(&operand.0) {
                Some(Bound::$kind(bound)) => bound,
                _ => panic!("operand {} is no {}", operand.0, $what),
            }
        }
    };
}

impl Machine {
    bound!(matrix, Matrix, Matrix, "matrix");
    bound!(rope, Rope, backend::Rope, "rope");
    bound!(batch, Batch, Batch, "batch");
    bound!(experts, Experts, Experts, "experts");
    bound!(rows, Rows, [usize], "list of rows");
    bound!(tokens, Tokens, [u32], "list of tokens");
    bound!(groups, Groups, TokenGroups, "groups of tokens");

    /// Runs every op of `list`.
    ///
    /// # Panics
    ///
    /// If a value or an operand that an op reads is missing, or of another kind.
    pub fn run(&mut self, list: &OpList) {
        for op in &list.ops {
            let made = self.op(list, op);
            assert_eq!(
                made.len(),
                op.outputs.len(),
                "outputs of {}",
                op.kind.name()
            );
            for (&y, tensor) in op.outputs.iter().zip(made) {
                assert_eq!(
                    [tensor.rows(), tensor.cols()],
                    list.shape(y),
                    "{}",
                    op.kind.name()
                );
                self.values
                    .insert(y, Reference.download(&tensor).into_owned());
            }
            for &(of, copy) in &op.f16_outputs {
                let values = self.values[&of].clone();
                self.values.insert(copy, values);
            }
        }
    }

    fn tensor(&self, list: &OpList, value: Value) -> Tensor {
        let [rows, cols] = list.shape(value);
        Reference.upload(rows, cols, &self.values[&value])
    }

    /// Takes the operand out while `work` changes it.
    fn change(
        &mut self,
        operand: Operand,
        work: impl FnOnce(&Self, &mut Bound) -> Vec<Tensor>,
    ) -> Vec<Tensor> {
        let mut bound = self.operands.remove(&operand.0).expect("an operand");
        let made = work(self, &mut bound);
        self.operands.insert(operand.0, bound);
        made
    }

    fn op(&mut self, list: &OpList, op: &Op) -> Vec<Tensor> {
        let b = &Reference;
        let mut x: Vec<Tensor> = op.inputs.iter().map(|&x| self.tensor(list, x)).collect();
        if let Some(copy) = op.f16_input {
            x[0] = self.tensor(list, copy);
        }
        match &op.kind {
            Kind::Embed {
                table,
                tokens,
                scale,
            } => vec![b.embed(self.matrix(*table), self.tokens(*tokens), *scale)],
            Kind::Product { weights } => {
                let each = weights.iter().map(|&w| product(&x[0], self.matrix(w)));
                each.collect()
            }
            Kind::ChosenProduct { weights } => {
                vec![chosen_product(&x[0], &x[1], self.matrix(*weights))]
            }
            Kind::BestGroups { groups } => vec![best_groups(&x[0], self.groups(*groups))],
            Kind::RmsNorm { width, eps, .. } => vec![b.rms_norm(&x[0], x.get(1), *width, *eps)],
            Kind::LayerNorm { eps } => vec![b.layer_norm(&x[0], &x[1], &x[2], *eps)],
            Kind::Affine { has_factor } => {
                let y = x.remove(0);
                let shift = x.last().expect("a shift");
                vec![b.affine(y, has_factor.then_some(&x[0]), shift)]
            }
            Kind::Activate { activation } => vec![b.activate(x.remove(0), *activation)],
            Kind::Clamp { low, high } => vec![b.clamp(x.remove(0), *low, *high)],
            Kind::Add => {
                let y = x.remove(1);
                vec![b.add(x.remove(0), &y)]
            }
            Kind::Scale { factor } => vec![b.scale(x.remove(0), *factor)],
            Kind::Softcap { cap } => vec![b.softcap(x.remove(0), *cap)],
            Kind::Glu { activation } => {
                let y = x.remove(1);
                vec![b.glu(x.remove(0), &y, *activation)]
            }
            Kind::GateRows { activation } => vec![b.gate_rows(&x[0], &x[1], *activation)],
            Kind::Gather { rows } => vec![b.gather(&x[0], self.rows(*rows))],
            Kind::ReplaceRows { pairs, .. } => vec![replace_rows(&x[0], &x[1], self.rows(*pairs))],
            Kind::Columns { first } => {
                let [_, cols] = list.shape(op.outputs[0]);
                vec![b.columns(&x[0], *first, cols)]
            }
            Kind::Concat => vec![b.concat(&x[0], &x[1])],
            Kind::Rope(rope) => vec![self.rotate(x.remove(0), *rope)],
            Kind::KvAppend {
                kv, group, batch, ..
            } => self.append(*kv, &x[0], &x[1], *group, *batch),
            Kind::AttendNear(near) => vec![b.attend_near(&x[0], &x[1], &x[2], &x[3], near)],
            Kind::Attend {
                kv,
                attention,
                batch,
                ..
            } => {
                let (attention, batch) = (*attention, *batch);
                self.change(*kv, |this, kv| match kv {
                    Bound::Kv(kv) => vec![b.attend(&x[0], kv, &attention, this.batch(batch))],
                    _ => panic!("attention needs a KV cache"),
                })
            }
            Kind::Delta { state, batch, .. } => vec![self.delta(*state, *batch, &mut x)],
            Kind::Experts { experts, .. } => {
                run_experts(&x[0], &x[1], self.experts(*experts)).into()
            }
            Kind::Combine { top_k } => vec![combine(&x[0], &x[1], *top_k)],
            Kind::ToF16 => Vec::new(),
            Kind::NormRope { .. }
            | Kind::HeadsAppend { .. }
            | Kind::DeltaNormGlu { .. }
            | Kind::NormGlu { .. }
            | Kind::GluColumns { .. }
            | Kind::GatedProjection { .. }
            | Kind::ExpertsBeside { .. }
            | Kind::ResidualNorm { .. } => self.fused(list, op, x),
        }
    }

    /// A fused op on its inputs `x`, as the ops that it stands for.
    fn fused(&mut self, list: &OpList, op: &Op, mut x: Vec<Tensor>) -> Vec<Tensor> {
        let b = &Reference;
        match &op.kind {
            Kind::NormRope { rope, eps } => {
                let heads = b.rms_norm(&x[0], Some(&x[1]), rope.head_dim, *eps);
                vec![self.rotate(heads, *rope)]
            }
            Kind::HeadsAppend { .. } => self.heads_append(&op.kind, x),
            Kind::DeltaNormGlu {
                state,
                batch,
                value_dim,
                eps,
                activation,
            } => {
                let o = self.delta(*state, *batch, &mut x);
                let n = b.rms_norm(&o, Some(&x[0]), *value_dim, *eps);
                let y = b.glu(x.remove(1), &n, *activation);
                vec![o, n, y]
            }
            Kind::NormGlu {
                width,
                eps,
                activation,
                ..
            } => {
                let gate = x.pop().expect("a gate");
                let n = b.rms_norm(&x[0], x.get(1), *width, *eps);
                let y = b.glu(gate, &n, *activation);
                vec![n, y]
            }
            Kind::GluColumns { activation, first } => {
                let [_, cols] = list.shape(op.outputs[0]);
                let c = b.columns(&x[1], *first, cols);
                let mut made = vec![b.glu(x.remove(0), &c, *activation)];
                made.extend((op.outputs.len() > 1).then_some(c));
                made
            }
            Kind::GatedProjection {
                gate,
                activation,
                first,
                projection,
            } => {
                let gate = product(&x[0], self.matrix(*gate));
                let c = b.columns(&x[1], *first, gate.cols());
                let y = b.glu(gate, &c, *activation);
                vec![product(&y, self.matrix(*projection))]
            }
            Kind::ExpertsBeside {
                experts,
                activation,
                product: w,
                ..
            } => {
                let mut made: Vec<Tensor> =
                    run_experts(&x[0], &x[1], self.experts(*experts)).into();
                let up = x.remove(3);
                let y = b.glu(x.remove(2), &up, *activation);
                let z = w.map(|w| product(&y, self.matrix(w)));
                made.push(y);
                made.extend(z);
                made
            }
            Kind::ResidualNorm { .. } => residual_norm(&op.kind, x),
            other => unreachable!("`{}` is no fused op", other.name()),
        }
    }

    fn rotate(&self, x: Tensor, rope: Rope) -> Tensor {
        Reference.rope(x, self.rope(rope.table), self.batch(rope.batch))
    }

    fn append(
        &mut self,
        kv: Operand,
        k: &Tensor,
        v: &Tensor,
        group: usize,
        batch: Operand,
    ) -> Vec<Tensor> {
        self.change(kv, |this, kv| match kv {
            Bound::Kv(kv) => {
                Reference.kv_append(kv, k, v, group, this.batch(batch));
                Vec::new()
            }
            _ => panic!("keys and values go to a KV cache"),
        })
    }

    fn heads_append(&mut self, kind: &Kind, inputs: Vec<Tensor>) -> Vec<Tensor> {
        let Kind::HeadsAppend {
            kv,
            group,
            head_dim,
            batch,
            rope,
            eps,
            jobs,
        } = kind
        else {
            unreachable!("called for this kind");
        };
        let mut inputs = inputs.into_iter();
        let mut made: Vec<(HeadJob, Tensor)> = Vec::new();
        for &job in jobs {
            let x = inputs.next().expect("heads");
            let weight = if job.is_weighted { inputs.next() } else { None };
            let mut y = match job.is_normed {
                true => Reference.rms_norm(&x, weight.as_ref(), *head_dim, *eps),
                false => x,
            };
            if job.is_rotated {
                y = self.rotate(y, rope.expect("a rotation"));
            }
            made.push((job, y));
        }
        let with = |role| {
            &made
                .iter()
                .find(|(job, _)| job.role == role)
                .expect("a key and a value")
                .1
        };
        let (k, v) = (with(HeadRole::Key), with(HeadRole::Value));
        self.append(*kv, k, v, *group, *batch);
        let normed = made.into_iter().filter(|(job, _)| job.is_normed);
        normed.map(|(_, y)| y).collect()
    }

    /// Takes the first six of `x`.
    fn delta(&mut self, state: Operand, batch: Operand, x: &mut Vec<Tensor>) -> Tensor {
        let rest = x.split_off(6);
        let mut inputs = std::mem::replace(x, rest);
        let (dt_bias, decay, conv) = (inputs.pop(), inputs.pop(), inputs.pop());
        let weights = DeltaWeights {
            conv: conv.expect("six inputs"),
            decay: decay.expect("six inputs"),
            dt_bias: dt_bias.expect("six inputs"),
        };
        let mut made = self.change(state, |this, state| match state {
            Bound::Delta(state) => {
                let [qkv, b, a] = &inputs[..] else {
                    panic!("six inputs")
                };
                vec![Reference.gated_delta(state, &weights, qkv, b, a, this.batch(batch))]
            }
            _ => panic!("the delta rule needs recurrent states"),
        });
        made.pop().expect("one tensor")
    }
}

fn product(x: &Tensor, w: &Matrix) -> Tensor {
    let mut y = [Reference.scratch(x.rows(), w.rows)];
    Reference.matmul_into(x, &[w], &mut y);
    let [y] = y;
    y
}

/// Products with the rows of `w` that the bits of `ids` name, row by row.
fn chosen_product(x: &Tensor, ids: &Tensor, w: &Matrix) -> Tensor {
    let bits = Reference.download(ids).into_owned();
    let rows = bits.chunks_exact(ids.cols());
    let ids: Vec<Vec<u32>> = rows
        .map(|row| row.iter().map(|id| id.to_bits()).collect())
        .collect();
    Reference.matmul_rows(x, w, &ids)
}

/// The tokens of each row's best groups, as bits.
fn best_groups(scores: &Tensor, groups: &TokenGroups) -> Tensor {
    let values = Reference.download(scores);
    let rows = values.chunks_exact(scores.cols());
    let ids = rows.flat_map(|row| groups.best(row));
    let bits: Vec<f32> = ids.map(f32::from_bits).collect();
    Reference.upload(scores.rows(), bits.len() / scores.rows(), &bits)
}

/// `x` with rows of `embeddings`; `pairs` holds a row of `x` and one of `embeddings`, in turn.
fn replace_rows(x: &Tensor, embeddings: &Tensor, pairs: &[usize]) -> Tensor {
    let (mut values, cols) = (Reference.download(x).into_owned(), x.cols());
    let embeddings = Reference.download(embeddings);
    for pair in pairs.chunks_exact(2) {
        let from = &embeddings[pair[1] * cols..][..cols];
        values[pair[0] * cols..][..cols].copy_from_slice(from);
    }
    Reference.upload(x.rows(), cols, &values)
}

/// `parts` and `weights` of [`Kind::Experts`].
fn run_experts(x: &Tensor, scores: &Tensor, experts: &Experts) -> [Tensor; 2] {
    let b = &Reference;
    let (mut parts, mut weights) = (Vec::new(), Vec::new());
    for (row, scores) in b.download(scores).chunks_exact(scores.cols()).enumerate() {
        let x = b.gather(x, &[row]);
        for (expert, weight) in experts.choose(scores) {
            let expert = &experts.experts[expert];
            let (both, inner) = (product(&x, &expert.gate_up), expert.down.cols);
            let up = b.columns(&both, inner, inner);
            let h = b.glu(b.columns(&both, 0, inner), &up, experts.activation);
            parts.extend_from_slice(&b.download(&product(&h, &expert.down)));
            weights.push(weight);
        }
    }
    let n = x.rows();
    [
        b.upload(n * experts.top_k, x.cols(), &parts),
        b.upload(n, experts.top_k, &weights),
    ]
}

fn combine(parts: &Tensor, weights: &Tensor, top_k: usize) -> Tensor {
    let (rows, cols) = (parts.rows() / top_k, parts.cols());
    let (all, weights) = (Reference.download(parts), Reference.download(weights));
    let mut y = vec![0.0f32; rows * cols];
    let rows_of = y.chunks_exact_mut(cols).zip(all.chunks_exact(top_k * cols));
    for ((y, parts), weights) in rows_of.zip(weights.chunks_exact(top_k)) {
        for (part, weight) in parts.chunks_exact(cols).zip(weights) {
            y.iter_mut()
                .zip(part)
                .for_each(|(y, part)| *y = weight.mul_add(*part, *y));
        }
    }
    Reference.upload(rows, cols, &y)
}

fn residual_norm(kind: &Kind, inputs: Vec<Tensor>) -> Vec<Tensor> {
    let &Kind::ResidualNorm {
        term,
        has_post,
        factor,
        eps,
        norms,
    } = kind
    else {
        unreachable!("called for this kind");
    };
    let b = &Reference;
    let norm = |x: &Tensor, w: &Tensor| b.rms_norm(x, Some(w), x.cols(), eps);
    let mut inputs = inputs.into_iter();
    let mut next = || inputs.next().expect("as many inputs as the kind has");
    let x = next();
    let term = match term {
        SumTerm::Plain => next(),
        SumTerm::SharedExpert { top_k, activation } => {
            let routed = combine(&next(), &next(), top_k);
            let (shared, gate) = (next(), next());
            let activation: Activation = activation;
            b.add(routed, &b.gate_rows(&shared, &gate, activation))
        }
        SumTerm::DenseBranch { top_k } => {
            let routed = combine(&next(), &next(), top_k);
            let (dense, dense_weight, own_weight) = (next(), next(), next());
            b.add(norm(&dense, &dense_weight), &norm(&routed, &own_weight))
        }
    };
    let term = if has_post { norm(&term, &next()) } else { term };
    let sum = b.add(term, &x);
    let sum = if factor == 1.0 {
        sum
    } else {
        b.scale(sum, factor)
    };
    let normed: Vec<Tensor> = (0..norms).map(|_| norm(&sum, &next())).collect();
    std::iter::once(sum).chain(normed).collect()
}

//! How rules rewrite a list: who makes and reads a value, and where a fused op may stand.

use crate::{Kind, Op, OpList, Operand, RULES, Value};

/// What rules must know of the device that a list is for.
pub trait Device {
    /// Widest row of which one kernel makes a sum and its norms.
    fn row_width(&self) -> usize;

    /// Widest head that is normalized and rotated in one kernel.
    fn head_width(&self) -> usize;

    /// Columns of a tile of an f16 copy: a kernel that makes only a part of a row writes whole tiles.
    fn f16_tile(&self) -> usize;

    /// Whether products with the matrix read the f16 copy of their input.
    fn reads_f16(&self, weights: Operand) -> bool;

    /// Whether the experts of so many rows are chosen in a kernel that can compute a gate beside that.
    fn gates_beside_experts(&self, rows: usize) -> bool;

    /// Whether the product of `rows` rows with `weights` can be computed beside the second product of
    /// the experts.
    fn joins_experts(&self, experts: Operand, top_k: usize, weights: Operand, rows: usize) -> bool;

    /// Whether one kernel multiplies `rows` rows with `gate`, gates columns of another tensor with the result and
    /// multiplies what comes out with `projection`.
    fn projects_gates(&self, gate: Operand, projection: Operand, rows: usize) -> bool;
}

/// Applies every rule, in order, wherever it fits. Returns the names of the rules that were
/// applied, in order.
pub fn fuse(list: &mut OpList, device: &dyn Device) -> Vec<&'static str> {
    let mut applied = Vec::new();
    for rule in RULES {
        let mut at = 0;
        let mut index = None;
        while at < list.ops.len() {
            if !(rule.starts_at)(&list.ops[at].kind) {
                at += 1;
                continue;
            }
            let found = index.get_or_insert_with(|| Index::of(list));
            match (rule.rewrite)(
                &mut Match {
                    list,
                    index: found,
                    device,
                },
                at,
            ) {
                Some(at_next) => {
                    applied.push(rule.name);
                    index = None;
                    at = at_next;
                }
                None => at += 1,
            }
        }
    }
    applied
}

/// Who makes each value, and how often it is read.
pub(crate) struct Index {
    maker: Vec<Option<usize>>,
    reads: Vec<usize>,
}

impl Index {
    fn of(list: &OpList) -> Self {
        let mut index = Index {
            maker: vec![None; list.n_values()],
            reads: vec![0; list.n_values()],
        };
        for (at, op) in list.ops.iter().enumerate() {
            op.makes()
                .for_each(|y| index.maker[y.0 as usize] = Some(at));
            op.reads().for_each(|x| index.reads[x.0 as usize] += 1);
        }
        index
    }
}

/// A list while a rule looks at it.
pub(crate) struct Match<'a> {
    pub(crate) list: &'a mut OpList,
    index: &'a Index,
    pub(crate) device: &'a dyn Device,
}

impl Match<'_> {
    /// The op at `at`.
    pub(crate) fn op(&self, at: usize) -> &Op {
        &self.list.ops[at]
    }

    /// Which op makes `value`; `None` if it was there before the list.
    pub(crate) fn maker(&self, value: Value) -> Option<usize> {
        self.index.maker[value.0 as usize]
    }

    /// Whether one op reads `value`, once, and nobody after the list.
    pub(crate) fn is_only_read_once(&self, value: Value) -> bool {
        self.index.reads[value.0 as usize] == 1 && !self.list.is_kept(value)
    }

    /// The op that makes `value`, if nothing but one op reads it.
    pub(crate) fn private_maker(&self, value: Value) -> Option<usize> {
        self.maker(value).filter(|_| self.is_only_read_once(value))
    }

    /// The last op before `before` that reads `value`.
    pub(crate) fn reader_between(
        &self,
        value: Value,
        after: usize,
        before: usize,
    ) -> Option<usize> {
        (after + 1..before).find(|&i| self.op(i).reads().any(|x| x == value))
    }

    /// Whether the op at `at` is the norm of whole rows with a weight that one kernel makes with others: the norm's
    /// input, weight and `eps`.
    pub(crate) fn row_norm(&self, at: usize) -> Option<(Value, Value, f32)> {
        let op = self.op(at);
        let Kind::RmsNorm {
            width,
            eps,
            is_weighted: true,
        } = op.kind
        else {
            return None;
        };
        let [_, cols] = self.list.shape(op.inputs[0]);
        let fits = width == cols && width <= self.device.row_width() && op.f16_outputs.is_empty();
        fits.then(|| (op.inputs[0], op.inputs[1], eps))
    }

    /// Puts `op` in the place of the ops `parts`, as late among them as the order of reads and
    /// writes allows. Returns where, or `None`, with nothing changed, if nowhere is right.
    pub(crate) fn replace(&mut self, parts: &[usize], op: Op) -> Option<usize> {
        let mut parts = parts.to_vec();
        parts.sort_unstable();
        let at = *parts
            .iter()
            .rev()
            .find(|&&at| self.may_stand(&parts, &op, at))?;
        self.list.ops[at] = op;
        let mut number = 0;
        self.list.ops.retain(|_| {
            number += 1;
            number - 1 == at || !parts.contains(&(number - 1))
        });
        Some(at - parts.iter().filter(|&&part| part < at).count())
    }

    /// Whether `op` may stand at `at`, one of `parts`, in place of all of them.
    fn may_stand(&self, parts: &[usize], op: &Op, at: usize) -> bool {
        let made_in_time = |x: Value| match self.maker(x) {
            Some(maker) => maker < at && !parts.contains(&maker),
            None => true,
        };
        let effects_stay = |&part: &usize| part == at || !self.op(part).kind.has_effects();
        let not_read_before = |&part: &usize| {
            let mut between = (part..at).filter(|i| !parts.contains(i));
            !between.any(|i| {
                self.op(i)
                    .reads()
                    .any(|x| self.op(part).makes().any(|y| y == x))
            })
        };
        op.reads().all(made_in_time)
            && parts.iter().all(effects_stay)
            && parts.iter().all(not_read_before)
    }
}

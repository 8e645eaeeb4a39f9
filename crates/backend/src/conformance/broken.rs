//! Proof that the cases fail where they should: the reference with one wrong op at a time.

use super::*;
use crate::{
    Activation, Attention, Batch, Chained, Delta, DeltaSpec, DeltaWeights, DeviceError, Edit,
    Experts, Kv, KvSpec, Link, MAX_TENTATIVE, Matrix, NearAttention, Ops, Record, Rope, RowEdits,
    Sample, StepKey, Store, TokenChoice, TokenGroups, TokenList, TokenMask,
};
use quant::Stored;
use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What [`Broken`] gets wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    Embed,
    Matmul,
    MatmulRows,
    RmsNorm,
    LayerNorm,
    Affine,
    Activate,
    Clamp,
    Add,
    Scale,
    Glu,
    Softcap,
    Gather,
    ReplaceRows,
    Columns,
    Concat,
    Rope,
    Append,
    Attend,
    AttendNear,
    GatedDelta,
    /// Forgets that rows were taken back.
    Kept,
    DeltaCopy,
    DeltaSave,
    KvCopy,
    KvLoad,
    Moe,
    GateRows,
    Argmax,
    /// Chooses tokens without one part of the definition.
    Choose(Part),
    Likeliest,
    /// Sums distances that are one unit off.
    Moments,
    /// Lets a token pass that its mask does not allow.
    Mask,
    /// Edits logits without one part of the definition.
    Edit(EditPart),
    /// Chooses other rows of a matrix than the best groups.
    Groups,
    /// A step's last tensor is not what its ops make.
    Step,
    /// A chain's later steps do not see what the first one passed on.
    Chain,
}

/// A part of what defines a choice ([`TokenChoice`]).
#[derive(Clone, Copy, Debug, PartialEq)]
enum Part {
    Temperature,
    TopK,
    TopP,
    MinP,
    Floor,
    /// The seed's upper half.
    Seed,
    /// The position's upper half.
    Position,
    /// The noise of a column's token, not of the column.
    Token,
    /// The lower of equal ones.
    Ties,
    /// That damaged rows give no token.
    Damage,
}

/// A part of what defines edited logits ([`crate::RowEdits`]).
#[derive(Clone, Copy, Debug, PartialEq)]
enum EditPart {
    /// That edits of a column are done one after the other, in their order.
    Order,
    /// That a repetition penalty multiplies what is not positive.
    Sign,
    /// That a quotient is rounded once: not a product with a reciprocal.
    Quotient,
    /// That every sum is rounded.
    Rounding,
    Suppress,
    /// That what is no number stays.
    Damage,
    /// The last row's edits.
    Row,
}

/// The reference with one wrong op: a value moves by one bit, in one row of
/// several only.
struct Broken(Fault);

impl Broken {
    fn nudge(&self, fault: Fault, mut x: Tensor) -> Tensor {
        if self.0 == fault
            && x.rows() > 1
            && let Some(x) = x.storage_mut::<Vec<f32>>().last_mut()
        {
            *x = f32::from_bits(x.to_bits() ^ 1);
        }
        x
    }
}

impl Backend for Broken {
    fn name(&self) -> String {
        format!("reference without {:?}", self.0)
    }
}

impl Store for Broken {
    fn matrix(&self, parts: &[Stored<'_>]) -> Matrix {
        Reference.matrix(parts)
    }
    fn upload(&self, rows: usize, cols: usize, values: &[f32]) -> Tensor {
        Reference.upload(rows, cols, values)
    }
    fn download<'a>(&self, x: &'a Tensor) -> Cow<'a, [f32]> {
        Reference.download(x)
    }
    fn kv(&self, spec: KvSpec) -> Kv {
        Reference.kv(spec)
    }
    fn delta(&self, spec: DeltaSpec) -> Delta {
        Reference.delta(spec)
    }
    fn kv_copy(&self, kv: &mut Kv, from: usize, to: usize) {
        if self.0 != Fault::KvCopy {
            Reference.kv_copy(kv, from, to);
        }
    }
    fn kv_save(&self, kv: &Kv, page: usize) -> Vec<u8> {
        Reference.kv_save(kv, page)
    }
    fn kv_load(&self, kv: &mut Kv, page: usize, bytes: &[u8]) -> bool {
        let mut bytes = bytes.to_vec();
        if self.0 == Fault::KvLoad {
            bytes.reverse();
        }
        Reference.kv_load(kv, page, &bytes)
    }
    fn delta_copy(&self, delta: &mut Delta, from: usize, to: usize) {
        if self.0 != Fault::DeltaCopy {
            Reference.delta_copy(delta, from, to);
        }
    }
    fn delta_save(&self, delta: &Delta, slot: usize) -> Vec<u8> {
        let mut bytes = Reference.delta_save(delta, slot);
        if self.0 == Fault::DeltaSave {
            // All but the updates that are still to be replayed.
            let spec = &delta.spec;
            let state = spec.value_heads * spec.key_dim * spec.value_dim;
            let history = (spec.conv_taps - 1 + MAX_TENTATIVE) * spec.channels();
            bytes.truncate(4 * (state + history));
        }
        bytes
    }
    fn delta_load(&self, delta: &mut Delta, slot: usize, bytes: &[u8]) -> bool {
        Reference.delta_load(delta, slot, bytes)
    }
    fn scratch(&self, rows: usize, cols: usize) -> Tensor {
        Reference.scratch(rows, cols)
    }
}

impl Ops for Broken {
    fn embed(&self, table: &Matrix, tokens: &[u32], scale: f32) -> Tensor {
        self.nudge(Fault::Embed, Reference.embed(table, tokens, scale))
    }
    fn replace_rows(&self, x: Tensor, with: &Tensor, source: u32, batch: &Batch) -> Tensor {
        self.nudge(
            Fault::ReplaceRows,
            Reference.replace_rows(x, with, source, batch),
        )
    }
    fn matmul_into(&self, x: &Tensor, w: &[&Matrix], y: &mut [Tensor]) {
        Reference.matmul_into(x, w, y);
        if self.0 == Fault::Matmul && x.rows() > 1 {
            let y = &mut y[0].storage_mut::<Vec<f32>>()[0];
            *y = f32::from_bits(y.to_bits() ^ 1);
        }
    }
    fn matmul_rows(&self, x: &Tensor, w: &Matrix, ids: &[Vec<u32>]) -> Tensor {
        self.nudge(Fault::MatmulRows, Reference.matmul_rows(x, w, ids))
    }
    fn matmul_groups(
        &self,
        x: &Tensor,
        w: &Matrix,
        scores: &Tensor,
        groups: &TokenGroups,
    ) -> [Tensor; 2] {
        let [y, ids] = Reference.matmul_groups(x, w, scores, groups);
        [self.nudge(Fault::Groups, y), ids]
    }
    fn rms_norm(&self, x: &Tensor, weight: Option<&Tensor>, width: usize, eps: f32) -> Tensor {
        self.nudge(Fault::RmsNorm, Reference.rms_norm(x, weight, width, eps))
    }
    fn layer_norm(&self, x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f32) -> Tensor {
        let y = Reference.layer_norm(x, weight, bias, eps);
        self.nudge(Fault::LayerNorm, y)
    }
    fn affine(&self, x: Tensor, factor: Option<&Tensor>, shift: &Tensor) -> Tensor {
        self.nudge(Fault::Affine, Reference.affine(x, factor, shift))
    }
    fn activate(&self, x: Tensor, activation: Activation) -> Tensor {
        self.nudge(Fault::Activate, Reference.activate(x, activation))
    }
    fn clamp(&self, x: Tensor, low: f32, high: f32) -> Tensor {
        self.nudge(Fault::Clamp, Reference.clamp(x, low, high))
    }
    fn add(&self, x: Tensor, y: &Tensor) -> Tensor {
        self.nudge(Fault::Add, Reference.add(x, y))
    }
    fn scale(&self, x: Tensor, factor: f32) -> Tensor {
        self.nudge(Fault::Scale, Reference.scale(x, factor))
    }
    fn glu(&self, gate: Tensor, x: &Tensor, activation: Activation) -> Tensor {
        self.nudge(Fault::Glu, Reference.glu(gate, x, activation))
    }
    fn softcap(&self, x: Tensor, cap: f32) -> Tensor {
        self.nudge(Fault::Softcap, Reference.softcap(x, cap))
    }
    fn gather(&self, x: &Tensor, rows: &[usize]) -> Tensor {
        self.nudge(Fault::Gather, Reference.gather(x, rows))
    }
    fn columns(&self, x: &Tensor, first: usize, cols: usize) -> Tensor {
        self.nudge(Fault::Columns, Reference.columns(x, first, cols))
    }
    fn concat(&self, a: &Tensor, b: &Tensor) -> Tensor {
        self.nudge(Fault::Concat, Reference.concat(a, b))
    }
    fn rope(&self, x: Tensor, rope: &Rope, batch: &Batch) -> Tensor {
        self.nudge(Fault::Rope, Reference.rope(x, rope, batch))
    }
    fn kv_append(&self, kv: &mut Kv, k: &Tensor, v: &Tensor, group: usize, batch: &Batch) {
        let mut batch = batch.clone();
        if self.0 == Fault::Append && batch.n_rows() > 1 {
            let first = batch.seqs[0].rows.start;
            batch.rows[first].at = batch.rows[first].at.map(|at| at + 1);
        }
        Reference.kv_append(kv, k, v, group, &batch);
    }
    fn attend(&self, q: &Tensor, kv: &Kv, attention: &Attention, batch: &Batch) -> Tensor {
        self.nudge(Fault::Attend, Reference.attend(q, kv, attention, batch))
    }
    fn attend_near(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        relative: &Tensor,
        attention: &NearAttention,
    ) -> Tensor {
        let y = Reference.attend_near(q, k, v, relative, attention);
        self.nudge(Fault::AttendNear, y)
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
        let mut batch = batch.clone();
        if self.0 == Fault::Kept {
            // Too few rows stay, once there is a choice.
            batch
                .seqs
                .iter_mut()
                .filter(|s| s.kept > 3)
                .for_each(|s| s.kept -= 1);
        }
        self.nudge(
            Fault::GatedDelta,
            Reference.gated_delta(state, weights, qkv, b, a, &batch),
        )
    }
    fn moe(&self, x: &Tensor, scores: &Tensor, experts: &Experts) -> Tensor {
        self.nudge(Fault::Moe, Reference.moe(x, scores, experts))
    }
    fn gate_rows(&self, x: &Tensor, gate: &Tensor, activation: Activation) -> Tensor {
        self.nudge(Fault::GateRows, Reference.gate_rows(x, gate, activation))
    }
}

impl Sample for Broken {
    fn argmax(&self, x: &Tensor) -> Vec<u32> {
        let mut best = Reference.argmax(x);
        if self.0 == Fault::Argmax {
            // The last of equal ones.
            let values = Reference.download(x);
            let rows = best.iter_mut().zip(values.chunks_exact(x.cols()));
            for (best, row) in rows.filter(|(best, _)| **best != crate::NO_TOKEN) {
                let largest = row[*best as usize];
                *best = row
                    .iter()
                    .rposition(|&x| x == largest)
                    .map_or(*best, |i| i as u32);
            }
        }
        best
    }
    fn choose_tokens(
        &self,
        x: &Tensor,
        list: Option<&TokenList>,
        choices: &[TokenChoice],
    ) -> Option<Vec<u32>> {
        let Fault::Choose(part) = self.0 else {
            return Reference.choose_tokens(x, list, choices);
        };
        let mut choices = choices.to_vec();
        for choice in &mut choices {
            match part {
                // The floor with it: it could be above all that is scaled otherwise.
                Part::Temperature if choice.scale > 0.0 => {
                    (choice.scale, choice.floor) = (1.0, f32::MIN);
                }
                Part::TopK => choice.top_k = 0,
                Part::TopP => choice.top_p = 1.0,
                Part::MinP => choice.ln_min_p = f32::NEG_INFINITY,
                Part::Floor => choice.floor = f32::MIN,
                Part::Seed => choice.seed &= u64::from(u32::MAX),
                Part::Position => choice.position &= u64::from(u32::MAX),
                _ => {}
            }
        }
        let list_if_seen = list.filter(|_| part != Part::Token);
        let mut tokens = Reference.choose_tokens(x, list_if_seen, &choices)?;
        let name = |column: u32| list.map_or(column, |list| list.ids()[column as usize]);
        let largest = Broken(Fault::Argmax).argmax(x);
        for ((token, choice), largest) in tokens.iter_mut().zip(choices).zip(largest) {
            match (part, *token == crate::NO_TOKEN) {
                (Part::Token, false) => *token = name(*token),
                (Part::Ties, false) if choice.scale == 0.0 => *token = name(largest),
                (Part::Damage, true) => *token = name(0),
                _ => {}
            }
        }
        Some(tokens)
    }
    fn mask_logits(&self, x: Tensor, masks: &[Option<TokenMask>]) -> Tensor {
        let mut masks = masks.to_vec();
        if self.0 == Fault::Mask {
            masks[0] = None;
        }
        Reference.mask_logits(x, &masks)
    }
    fn edit_logits(&self, x: Tensor, edits: &[RowEdits]) -> Tensor {
        let Fault::Edit(part) = self.0 else {
            return Reference.edit_logits(x, edits);
        };
        let cols = x.cols();
        let mut logits = Reference.download(&x).into_owned();
        let of_row = |row: &mut [f32], edits: &RowEdits| {
            let mut edits = edits.as_slice().to_vec();
            if part == EditPart::Order {
                edits.reverse();
            }
            for (column, edit) in edits {
                let l = &mut row[column as usize];
                let is_number = *l < f32::INFINITY;
                *l = match (part, edit) {
                    (EditPart::Damage, _) => edit.apply(*l),
                    _ if !is_number => *l,
                    (EditPart::Suppress, Edit::Suppress) => f32::MIN,
                    (EditPart::Sign, Edit::Divide(by)) => *l / by,
                    (EditPart::Quotient, Edit::Divide(by)) if *l > 0.0 => *l * by.recip(),
                    (EditPart::Rounding, Edit::Add(x)) => f32::from_bits((*l + x).to_bits() & !1),
                    _ => edit.apply(*l),
                };
            }
        };
        let rows = logits.chunks_exact_mut(cols).zip(edits);
        let n = edits.len() - usize::from(part == EditPart::Row);
        rows.take(n).for_each(|(row, edits)| of_row(row, edits));
        Reference.upload(edits.len(), cols, &logits)
    }
    fn moments(&self, x: &Tensor, rows: &[usize]) -> Vec<crate::moments::Moments> {
        let mut all = Reference.moments(x, rows);
        if self.0 == Fault::Moments
            && let Some(last) = all.last_mut()
        {
            let (n, sum) = (last.deviation.n(), 1);
            last.deviation = crate::moments::Deviation::of_sums(n, sum, 1);
        }
        all
    }
    fn likeliest(&self, x: &Tensor, asked: &[(usize, u32)], n: usize) -> Vec<crate::Likeliest> {
        let mut all = Reference.likeliest(x, asked, n);
        if self.0 == Fault::Likeliest {
            all[0].mass += 1;
        }
        all
    }
}

impl Record for Broken {
    fn step(
        &self,
        _key: StepKey,
        _batch: &Batch,
        inputs: &[&Tensor],
        work: &mut dyn FnMut(&[&Tensor]) -> Vec<Tensor>,
    ) -> Vec<Tensor> {
        let mut made = work(inputs);
        let last = made.pop().map(|x| self.nudge(Fault::Step, x));
        made.extend(last);
        made
    }
    fn chain(
        &self,
        chain: &crate::Chain<'_>,
        x: &Tensor,
        work: &mut dyn FnMut(usize, &Batch, &Tensor) -> Link,
    ) -> Option<Chained> {
        let (mut tokens, mut confidences, mut next) = (Vec::new(), Vec::new(), None);
        for (i, batch) in chain.batches.iter().enumerate() {
            let mut batch = batch.clone();
            batch.tokens = tokens.last().cloned().unwrap_or(batch.tokens);
            let from = next.as_ref().filter(|_| self.0 != Fault::Chain);
            let link = work(i, &batch, from.unwrap_or(x));
            confidences.push(self.confidences(&link.logits));
            tokens.push(self.choose_tokens(&link.logits, chain.list, &chain.choices[i])?);
            next = link.next;
        }
        Some(Chained {
            tokens,
            confidences,
            next,
        })
    }
    fn finish(&self) -> Result<(), DeviceError> {
        Ok(())
    }
}

fn failure(f: impl FnOnce()) -> Option<String> {
    let panic = catch_unwind(AssertUnwindSafe(f)).err()?;
    Some(panic.downcast_ref::<String>().cloned().unwrap_or_default())
}

#[test]
fn the_reference_passes_its_own_cases() {
    check(&Broken(Fault::None));
}

#[test]
fn one_wrong_bit_in_any_op_fails() {
    use Fault::*;
    let faults = [
        (Embed, "embed", "embed ("),
        (Matmul, "matmul", "matmul ("),
        (MatmulRows, "matmul_rows", "matmul_rows ("),
        (RmsNorm, "rms_norm", "rms_norm ("),
        (LayerNorm, "layer_norm", "layer_norm ("),
        (Affine, "affine", "affine ("),
        (Activate, "elementwise", "activate silu ("),
        (Clamp, "elementwise", "clamp ("),
        (Add, "elementwise", "add ("),
        (Scale, "elementwise", "scale ("),
        (Glu, "elementwise", "glu silu ("),
        (Softcap, "elementwise", "softcap ("),
        (Gather, "moves", "gather ("),
        (ReplaceRows, "moves", "replace_rows ("),
        (Columns, "moves", "columns ("),
        (Concat, "moves", "concat ("),
        (Rope, "rope", "rope ("),
        (Append, "attend", "attend ("),
        (Attend, "attend", "attend ("),
        (AttendNear, "attend_near", "attend_near ("),
        (GatedDelta, "gated_delta", "gated_delta ("),
        (Kept, "gated_delta", "gated_delta ("),
        (DeltaCopy, "gated_delta", "gated_delta ("),
        (DeltaSave, "gated_delta", "gated_delta ("),
        (KvCopy, "attend", "attend ("),
        (KvLoad, "attend", "attend ("),
        (Moe, "moe", "moe ("),
        (GateRows, "moe", "gate_rows ("),
        (Argmax, "argmax", "argmax"),
        (
            Choose(Part::Temperature),
            "choose_tokens",
            "choose_tokens (",
        ),
        (Choose(Part::TopK), "choose_tokens", "choose_tokens ("),
        (Choose(Part::TopP), "choose_tokens", "choose_tokens ("),
        (Choose(Part::MinP), "choose_tokens", "choose_tokens ("),
        (Choose(Part::Seed), "choose_tokens", "choose_tokens ("),
        (Choose(Part::Position), "choose_tokens", "choose_tokens ("),
        (Choose(Part::Token), "choose_tokens", "choose_tokens ("),
        (Choose(Part::Ties), "choose_tokens", "choose_tokens ("),
        (Choose(Part::Damage), "choose_tokens", "choose_tokens ("),
        (Likeliest, "likeliest", "likeliest"),
        (Choose(Part::Floor), "choose_tokens", "choose_tokens ("),
        (Moments, "moments", "moments ("),
        (Mask, "mask_logits", "mask_logits ("),
        (Edit(EditPart::Order), "edit_logits", "edit_logits ("),
        (Edit(EditPart::Sign), "edit_logits", "edit_logits ("),
        (Edit(EditPart::Quotient), "edit_logits", "edit_logits ("),
        (Edit(EditPart::Rounding), "edit_logits", "edit_logits ("),
        (Edit(EditPart::Suppress), "edit_logits", "edit_logits ("),
        (Edit(EditPart::Damage), "edit_logits", "edit_logits ("),
        (Edit(EditPart::Row), "edit_logits", "edit_logits ("),
    ];
    for (fault, case, op) in faults {
        let cases = EQUAL_CASES.iter().filter(|(name, _)| *name == case);
        let message = failure(|| cases.for_each(|(_, case)| case(&Broken(fault), &Reference)));
        assert!(
            message.as_ref().is_some_and(|m| m.contains(op)),
            "{fault:?}: {message:?}"
        );
    }
}

#[test]
fn a_row_that_depends_on_its_company_fails() {
    use Fault::*;
    for (fault, case, op) in [
        (Matmul, "matmul", "matmul ("),
        (RmsNorm, "rms_norm", "rms_norm ("),
        (Softcap, "elementwise", "softcap ("),
        (Rope, "rope", "rope ("),
        (Append, "attend", "attend ("),
        (Attend, "attend", "attend ("),
        (AttendNear, "attend_near", "attend_near ("),
        (GatedDelta, "gated_delta", "gated_delta ("),
        (Kept, "gated_delta", "gated_delta ("),
        (Moe, "moe", "moe ("),
        (Groups, "matmul_groups", "matmul_groups ("),
        (Step, "step", "step ("),
        (Chain, "chain", "chain ("),
    ] {
        let cases = INVARIANCE_CASES.iter().filter(|(name, _)| *name == case);
        let message = failure(|| cases.for_each(|(_, case)| case(&Broken(fault))));
        assert!(
            message.as_ref().is_some_and(|m| m.contains(op)),
            "{fault:?}: {message:?}"
        );
    }
}

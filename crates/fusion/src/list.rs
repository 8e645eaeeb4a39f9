//! A list of ops in SSA form, and how it is written as text.

use backend::{Activation, Attention, NearAttention};
use std::collections::{HashMap, HashSet};
use std::fmt::{self, Display, Formatter};

/// A tensor `[rows, cols]`: made by an op of the list, or there before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Value(pub u32);

/// Something of the backend's that no op of the list makes: weights, a KV cache, a recurrent
/// state, a layer's experts, the rows of a step. Equal numbers are the same thing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Operand(pub u32);

/// How heads of a tensor are rotated by their rows' positions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// The table of frequencies.
    pub table: Operand,
    /// Columns of a head.
    pub head_dim: usize,
    /// The rows' positions.
    pub batch: Operand,
}

/// What is added to the residual stream by [`Kind::ResidualNorm`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SumTerm {
    /// A tensor `y`.
    Plain,
    /// `combine(parts, weights) + activation(gate) shared`: experts and one that all rows
    /// share, behind a gate for each row.
    SharedExpert {
        /// Experts of a row.
        top_k: usize,
        /// The gate's function.
        activation: Activation,
    },
    /// `rms(dense) dense_weight + rms(combine(parts, weights)) own_weight`: a dense block and
    /// experts, each with its norm.
    DenseBranch {
        /// Experts of a row.
        top_k: usize,
    },
}

/// What becomes of the heads of one tensor in [`Kind::HeadsAppend`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadJob {
    /// Whether each head is normalized; otherwise heads go to the cache as they are.
    pub is_normed: bool,
    /// Whether the norm has a weight.
    pub is_weighted: bool,
    /// Whether heads are rotated after the norm.
    pub is_rotated: bool,
    /// Heads of a row.
    pub heads: usize,
    /// Whether the result is written to the KV cache.
    pub role: HeadRole,
}

/// Where the heads of a [`HeadJob`] go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadRole {
    /// Nowhere but to their tensor.
    Query,
    /// Also to the keys of the cache.
    Key,
    /// Also to the values of the cache.
    Value,
}

/// What an op computes, and its attributes. Inputs and outputs are listed as
/// `inputs -> outputs`; `?` marks an input that is there only if the attributes say so.
#[derive(Clone, Debug, PartialEq)]
pub enum Kind {
    /// `-> y`: rows of a table, times `scale`.
    Embed {
        /// The table.
        table: Operand,
        /// Which rows.
        tokens: Operand,
        /// The factor.
        scale: f32,
    },
    /// `x -> y…`: `y_i = x w_iᵀ`.
    Product {
        /// A matrix for each output.
        weights: Vec<Operand>,
    },
    /// `x, ids -> y`: products with the rows of a matrix that `ids` names for each row.
    ChosenProduct {
        /// The matrix.
        weights: Operand,
    },
    /// `scores, tokens -> ids`: of the tokens, which lie group after group, those of each row's best
    /// groups.
    BestGroups {
        /// The groups of tokens.
        groups: Operand,
    },
    /// `x, weight? -> y`: an RMS norm of each run of `width` columns.
    RmsNorm {
        /// Columns of a run.
        width: usize,
        /// Added to the mean square.
        eps: f32,
        /// Whether there is a weight.
        is_weighted: bool,
    },
    /// `x, weight, bias -> y`: a layer norm of each row.
    LayerNorm {
        /// Added to the variance.
        eps: f32,
    },
    /// `x, factor?, shift -> x factor + shift`, by column.
    Affine {
        /// Whether there is a factor.
        has_factor: bool,
    },
    /// `x -> activation(x)`.
    Activate {
        /// The function.
        activation: Activation,
    },
    /// `x -> y`: what lies beyond a bound becomes the bound.
    Clamp {
        /// The lower bound.
        low: f32,
        /// The upper bound.
        high: f32,
    },
    /// `x, y -> x + y`.
    Add,
    /// `x -> x factor`.
    Scale {
        /// The factor.
        factor: f32,
    },
    /// `x -> cap tanh(x / cap)`.
    Softcap {
        /// The cap.
        cap: f32,
    },
    /// `gate, x -> activation(gate) x`.
    Glu {
        /// The gate's function.
        activation: Activation,
    },
    /// `x, gate -> activation(gate) x`, one gate for each row.
    GateRows {
        /// The gate's function.
        activation: Activation,
    },
    /// `x -> y`: some rows of `x`.
    Gather {
        /// Which rows.
        rows: Operand,
    },
    /// `x, embeddings -> y`: `x`, with rows of `embeddings` in place of some of its rows.
    ReplaceRows {
        /// For each of these rows, its number in `x` and that of the row of `embeddings`.
        pairs: Operand,
        /// How many pairs there are.
        n: usize,
    },
    /// `x -> y`: as many columns of `x` as `y` has.
    Columns {
        /// The first one.
        first: usize,
    },
    /// `a, b -> y`: the columns of `a`, then those of `b`.
    Concat,
    /// `x -> y`: rotated heads.
    Rope(Rope),
    /// `k, v ->`: writes keys and values of the step's rows to a KV cache.
    KvAppend {
        /// The cache.
        kv: Operand,
        /// Which page tables of the batch.
        group: usize,
        /// Key/value heads.
        heads: usize,
        /// Columns of a head.
        head_dim: usize,
        /// The step's rows.
        batch: Operand,
    },
    /// `q, k, v, relative -> y`: attention to the rows right before each row.
    AttendNear(NearAttention),
    /// `q -> y`: attention over a KV cache.
    Attend {
        /// The cache.
        kv: Operand,
        /// How rows attend.
        attention: Attention,
        /// The step's rows.
        batch: Operand,
        /// Whether its kernel can write the f16 copy of `y`.
        writes_f16: bool,
    },
    /// `qkv, b, a, conv, decay, dt_bias -> o`: the gated delta rule.
    Delta {
        /// The recurrent state.
        state: Operand,
        /// The step's rows.
        batch: Operand,
        /// Columns of a value head.
        value_dim: usize,
        /// Whether one kernel computes it, which can go on with a norm and a gate.
        is_single: bool,
    },
    /// `x, scores -> parts, weights`: the outputs of the experts that each row chooses, a row
    /// for each pair of row and rank, and the weight of each pair.
    Experts {
        /// The layer's experts.
        experts: Operand,
        /// Experts of a row.
        top_k: usize,
    },
    /// `parts, weights -> y`: the weighted sum of each row's experts.
    Combine {
        /// Experts of a row.
        top_k: usize,
    },
    /// `x ->` and an f16 copy: activations as matrix products read them.
    ToF16,

    /// `x, (y, post? | parts, weights, shared, gate | parts, weights, dense, dense_weight,
    /// own_weight, post?), norm weight… -> sum, norm…`:
    /// `sum = (x + rms(term) post) factor` and up to [`MAX_NORMS`](crate::rules::residual::MAX_NORMS) norms of it.
    ResidualNorm {
        /// What is added.
        term: SumTerm,
        /// Whether it is normalized first.
        has_post: bool,
        /// The factor of the sum.
        factor: f32,
        /// Added to every mean square.
        eps: f32,
        /// Norms of the sum.
        norms: usize,
    },
    /// `x, weight -> y`: an RMS norm of each head, then a rotation.
    NormRope {
        /// The rotation.
        rope: Rope,
        /// Added to the mean square.
        eps: f32,
    },
    /// `(x, weight?)… -> y…`: norms and rotations of heads of up to three tensors, two of
    /// which become keys and values. A tensor without a norm has no output.
    HeadsAppend {
        /// The cache.
        kv: Operand,
        /// Which page tables of the batch.
        group: usize,
        /// Columns of a head.
        head_dim: usize,
        /// The step's rows.
        batch: Operand,
        /// The rotation, if any tensor is rotated.
        rope: Option<Rope>,
        /// Added to every mean square.
        eps: f32,
        /// What becomes of each tensor.
        jobs: Vec<HeadJob>,
    },
    /// `gate, x -> y` or `y, columns`: [`Kind::Glu`] with some columns of `x`.
    GluColumns {
        /// The gate's function.
        activation: Activation,
        /// The first column.
        first: usize,
    },
    /// `x, v -> z`: `z = (activation(x gateᵀ) c) projectionᵀ`, where `c` is as many columns of `v` as the gate has.
    GatedProjection {
        /// The gate's matrix.
        gate: Operand,
        /// The gate's function.
        activation: Activation,
        /// The first column of `v`.
        first: usize,
        /// The matrix that multiplies what the gate lets through.
        projection: Operand,
    },
    /// `x, weight?, gate -> n, y`: `n` the RMS norm of each head of `x`, `y = activation(gate)
    /// n`.
    NormGlu {
        /// Columns of a head.
        width: usize,
        /// Added to the mean square.
        eps: f32,
        /// Whether the norm has a weight.
        is_weighted: bool,
        /// The gate's function.
        activation: Activation,
    },
    /// `qkv, b, a, conv, decay, dt_bias, weight, gate -> o, n, y`: [`Kind::Delta`], the norm
    /// of its heads and a gate.
    DeltaNormGlu {
        /// The recurrent state.
        state: Operand,
        /// The step's rows.
        batch: Operand,
        /// Columns of a value head.
        value_dim: usize,
        /// Added to the mean square.
        eps: f32,
        /// The gate's function.
        activation: Activation,
    },
    /// `x, scores, gate, up -> parts, weights, y` and `z`: [`Kind::Experts`] with a
    /// [`Kind::Glu`] beside their choice and, perhaps, the product `z = y wᵀ` beside theirs.
    ExpertsBeside {
        /// The layer's experts.
        experts: Operand,
        /// Experts of a row.
        top_k: usize,
        /// The function of the gate beside them.
        activation: Activation,
        /// The matrix of the product beside theirs.
        product: Option<Operand>,
    },
}

impl Kind {
    /// The word for it in a list's text.
    pub fn name(&self) -> &'static str {
        match self {
            Kind::Embed { .. } => "embed",
            Kind::Product { .. } => "product",
            Kind::ChosenProduct { .. } => "chosen_product",
            Kind::BestGroups { .. } => "best_groups",
            Kind::RmsNorm { .. } => "rms_norm",
            Kind::LayerNorm { .. } => "layer_norm",
            Kind::Affine { .. } => "affine",
            Kind::Activate { .. } => "activate",
            Kind::Clamp { .. } => "clamp",
            Kind::Add => "add",
            Kind::Scale { .. } => "scale",
            Kind::Softcap { .. } => "softcap",
            Kind::Glu { .. } => "glu",
            Kind::GateRows { .. } => "gate_rows",
            Kind::Gather { .. } => "gather",
            Kind::ReplaceRows { .. } => "replace_rows",
            Kind::Columns { .. } => "columns",
            Kind::Concat => "concat",
            Kind::Rope(_) => "rope",
            Kind::KvAppend { .. } => "kv_append",
            Kind::Attend { .. } => "attend",
            Kind::AttendNear(_) => "attend_near",
            Kind::Delta { .. } => "delta",
            Kind::Experts { .. } => "experts",
            Kind::Combine { .. } => "combine",
            Kind::ToF16 => "to_f16",
            Kind::ResidualNorm { term, .. } => match term {
                SumTerm::Plain => "residual_norm",
                SumTerm::SharedExpert { .. } => "shared_expert_residual_norm",
                SumTerm::DenseBranch { .. } => "dense_branch_residual_norm",
            },
            Kind::NormRope { .. } => "norm_rope",
            Kind::HeadsAppend { .. } => "heads_append",
            Kind::GluColumns { .. } => "glu_columns",
            Kind::GatedProjection { .. } => "gated_projection",
            Kind::NormGlu { .. } => "norm_glu",
            Kind::DeltaNormGlu { .. } => "delta_norm_glu",
            Kind::ExpertsBeside { .. } => "experts_beside",
        }
    }

    /// Whether it reads or writes what is no value, so that its place among others of that
    /// kind counts.
    pub(crate) fn has_effects(&self) -> bool {
        matches!(
            self,
            Kind::KvAppend { .. }
                | Kind::Attend { .. }
                | Kind::Delta { .. }
                | Kind::HeadsAppend { .. }
                | Kind::DeltaNormGlu { .. }
        )
    }
}

/// One op of a list.
#[derive(Clone, Debug, PartialEq)]
pub struct Op {
    /// What it computes.
    pub kind: Kind,
    /// What it reads.
    pub inputs: Vec<Value>,
    /// What it makes.
    pub outputs: Vec<Value>,
    /// The f16 copy of the first input, which it reads as well.
    pub f16_input: Option<Value>,
    /// Outputs of which it writes an f16 copy as well, and the copies.
    pub f16_outputs: Vec<(Value, Value)>,
}

impl Op {
    /// An op without f16 copies.
    pub fn new(kind: Kind, inputs: Vec<Value>, outputs: Vec<Value>) -> Self {
        Op {
            kind,
            inputs,
            outputs,
            f16_input: None,
            f16_outputs: Vec::new(),
        }
    }

    /// Everything that it reads.
    pub fn reads(&self) -> impl Iterator<Item = Value> {
        self.inputs.iter().copied().chain(self.f16_input)
    }

    /// Everything that it makes.
    pub fn makes(&self) -> impl Iterator<Item = Value> {
        let copies = self.f16_outputs.iter().map(|&(_, copy)| copy);
        self.outputs.iter().copied().chain(copies)
    }

    /// The f16 copy of `output` that it writes.
    pub fn f16_of(&self, output: Value) -> Option<Value> {
        let mut copies = self.f16_outputs.iter();
        copies.find(|(of, _)| *of == output).map(|&(_, copy)| copy)
    }
}

/// Ops in the order in which they are to run, and the shapes of their values.
#[derive(Clone, Debug, Default)]
pub struct OpList {
    /// The ops.
    pub ops: Vec<Op>,
    /// Rows and columns of each value.
    shapes: Vec<[usize; 2]>,
    /// Values that are needed after the list.
    kept: HashSet<Value>,
    /// Values with an f16 copy that was there before the list.
    copies: HashMap<Value, Value>,
}

impl OpList {
    /// A value that is there before the list, or that the next op makes.
    pub fn value(&mut self, rows: usize, cols: usize) -> Value {
        self.shapes.push([rows, cols]);
        Value(self.shapes.len() as u32 - 1)
    }

    /// The rows and columns of `value`.
    pub fn shape(&self, value: Value) -> [usize; 2] {
        self.shapes[value.0 as usize]
    }

    /// How many values there are.
    pub fn n_values(&self) -> usize {
        self.shapes.len()
    }

    /// Appends an op.
    pub fn push(&mut self, kind: Kind, inputs: Vec<Value>, outputs: Vec<Value>) {
        self.ops.push(Op::new(kind, inputs, outputs));
    }

    /// Appends an op that makes one value of `rows` and `cols`, and returns that.
    pub fn make(&mut self, kind: Kind, inputs: &[Value], rows: usize, cols: usize) -> Value {
        let y = self.value(rows, cols);
        self.push(kind, inputs.to_vec(), vec![y]);
        y
    }

    /// The line of text that stands for `op`.
    pub fn line(&self, op: &Op) -> String {
        Line(self, op).to_string()
    }

    /// Says that `value` is needed after the list: no rule drops it.
    pub fn keep(&mut self, value: Value) {
        self.kept.insert(value);
    }

    /// Whether `value` is needed after the list.
    pub fn is_kept(&self, value: Value) -> bool {
        self.kept.contains(&value)
    }

    /// The values that are needed after the list, in order.
    pub fn kept(&self) -> Vec<Value> {
        let mut kept: Vec<Value> = self.kept.iter().copied().collect();
        kept.sort_unstable();
        kept
    }

    /// Says that `copy` holds `value` in f16 before the list begins.
    pub fn set_f16(&mut self, value: Value, copy: Value) {
        self.copies.insert(value, copy);
    }

    /// The f16 copy of `value` that was there before the list.
    pub fn f16_before(&self, value: Value) -> Option<Value> {
        self.copies.get(&value).copied()
    }
}

impl Display for OpList {
    /// A line for each op: `outputs = name attributes (inputs)`. A `'` marks an f16 copy.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.ops
            .iter()
            .try_for_each(|op| writeln!(f, "{}", Line(self, op)))
    }
}

/// An op as a line of text.
struct Line<'a>(&'a OpList, &'a Op);

impl Display for Line<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Line(list, op) = self;
        for (i, &y) in op.outputs.iter().enumerate() {
            let [rows, cols] = list.shape(y);
            let copy = if op.f16_of(y).is_some() { "'" } else { "" };
            let comma = if i > 0 { ", " } else { "" };
            write!(f, "{comma}v{}{copy}[{rows}x{cols}]", y.0)?;
        }
        if let (Kind::ToF16, Some((of, _))) = (&op.kind, op.f16_outputs.first()) {
            write!(f, "v{}'", of.0)?;
        }
        if op.makes().next().is_some() {
            f.write_str(" = ")?;
        }
        f.write_str(op.kind.name())?;
        attributes(&op.kind, f)?;
        f.write_str(" (")?;
        for (i, x) in op.inputs.iter().enumerate() {
            let copy = if i == 0 && op.f16_input.is_some() {
                "'"
            } else {
                ""
            };
            let comma = if i > 0 { ", " } else { "" };
            write!(f, "{comma}v{}{copy}", x.0)?;
        }
        f.write_str(")")
    }
}

fn attributes(kind: &Kind, f: &mut Formatter<'_>) -> fmt::Result {
    match kind {
        Kind::Product { weights } if weights.len() > 1 => write!(f, " x{}", weights.len()),
        Kind::RmsNorm { width, .. } => write!(f, " width={width}"),
        Kind::Affine { has_factor } => f.write_str(if *has_factor { " factor" } else { "" }),
        Kind::Activate { activation } => write!(f, " {activation:?}"),
        Kind::Clamp { low, high } => write!(f, " {low} to {high}"),
        Kind::Scale { factor } => write!(f, " {factor}"),
        Kind::Softcap { cap } => write!(f, " {cap}"),
        Kind::Glu { activation } | Kind::GateRows { activation } => write!(f, " {activation:?}"),
        Kind::NormGlu { activation, .. } | Kind::DeltaNormGlu { activation, .. } => {
            write!(f, " {activation:?}")
        }
        Kind::AttendNear(near) => write!(f, " {} rows", near.window),
        Kind::Columns { first } => write!(f, " from {first}"),
        Kind::GluColumns { activation, first }
        | Kind::GatedProjection {
            activation, first, ..
        } => write!(f, " {activation:?} from {first}"),
        Kind::Experts { top_k, .. } | Kind::Combine { top_k } => write!(f, " top_k={top_k}"),
        Kind::ExpertsBeside { top_k, product, .. } => {
            write!(f, " top_k={top_k}")?;
            f.write_str(if product.is_some() { " product" } else { "" })
        }
        Kind::ResidualNorm {
            has_post,
            factor,
            norms,
            ..
        } => {
            f.write_str(if *has_post { " post" } else { "" })?;
            if *factor != 1.0 {
                write!(f, " factor={factor}")?;
            }
            write!(f, " norms={norms}")
        }
        Kind::HeadsAppend { jobs, .. } => jobs.iter().try_for_each(|job| {
            write!(f, " {:?}", job.role)?;
            f.write_str(if job.is_normed { "+norm" } else { "" })?;
            f.write_str(if job.is_rotated { "+rope" } else { "" })
        }),
        _ => Ok(()),
    }
}

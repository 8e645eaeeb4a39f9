//! A fused list on its way to the device: each op gets memory for what it makes, is launched,
//! and gives back the memory of what nobody reads any more.

use crate::args::{Activations, Address, Args};
use crate::driver::Driver;
use crate::machine::Grid;
use crate::memory::{Arena, Block, Cell};
use crate::pack::TILE;
use crate::record::{Bound, Frequencies, Rows};
use crate::tuning::Tunings;
use crate::{Kernel, attention, delta, elementwise, gated_projection, kv, matmul, moe};
use fusion::{Kind, Op, OpList, Operand, Value, fuse};
use std::cell::RefCell;
use std::sync::Arc;

/// Bytes of [`Device::arrivals`].
pub(crate) const ARRIVALS_BYTES: usize = 64 << 10;

/// What launches need.
pub(crate) struct Device {
    /// Counters of what a kernel's blocks have done; zeros between kernels.
    pub(crate) arrivals: Block,
    pub(crate) arena: Arc<Arena>,
    pub(crate) driver: Arc<Driver>,
    pub(crate) tunings: Tunings,
}

impl Device {
    pub(crate) fn launch(&self, kernel: &Kernel, grid: Grid, args: Args) {
        self.driver.launch(kernel, grid, args);
    }
}

/// What the rules of fusion know of the device, and of the operands of a list.
struct Abilities<'a> {
    device: &'a Device,
    bound: &'a [Bound],
}

impl fusion::Device for Abilities<'_> {
    fn row_width(&self) -> usize {
        elementwise::WIDEST
    }

    fn head_width(&self) -> usize {
        elementwise::WIDEST_HEAD
    }

    fn f16_tile(&self) -> usize {
        TILE
    }

    fn reads_f16(&self, weights: Operand) -> bool {
        reads_f16(&self.bound[weights.0 as usize])
    }

    fn gates_beside_experts(&self, rows: usize) -> bool {
        rows <= moe::ROUTE_ROWS
    }

    fn joins_experts(&self, experts: Operand, top_k: usize, weights: Operand, rows: usize) -> bool {
        match (
            &self.bound[experts.0 as usize],
            &self.bound[weights.0 as usize],
        ) {
            (Bound::Experts { table, .. }, Bound::Weights(w)) => {
                moe::joins(self.device, table, top_k, w, rows)
            }
            _ => false,
        }
    }

    fn projects_gates(&self, gate: Operand, projection: Operand, rows: usize) -> bool {
        match [gate, projection].map(|w| &self.bound[w.0 as usize]) {
            [Bound::Weights(gate), Bound::Weights(projection)] => {
                gated_projection::Matrices { gate, projection }.fit(&self.device.driver, rows)
            }
            _ => false,
        }
    }
}

/// Fuses `list` and launches its ops. `cells` are its values, `bound` its operands.
pub(crate) fn launch(device: &Device, mut list: OpList, cells: Vec<Arc<Cell>>, bound: &[Bound]) {
    // The host, or another tensor's f16 copy, holds what is needed later.
    for (value, cell) in cells.iter().enumerate() {
        if Arc::strong_count(cell) > 1 {
            list.keep(Value(value as u32));
        }
    }
    fuse(&mut list, &Abilities { device, bound });
    let mut last = vec![0; list.n_values()];
    for (at, op) in list.ops.iter().enumerate() {
        op.reads()
            .chain(op.makes())
            .for_each(|v| last[v.0 as usize] = at);
    }
    let mut read = vec![false; list.n_values()];
    let of_ops = list.ops.iter().flat_map(|op| {
        let only_copy = usize::from(reads_only_copy(op, bound));
        op.inputs.iter().skip(only_copy).copied()
    });
    for value in of_ops.chain(list.kept()) {
        read[value.0 as usize] = true;
    }
    let mut cells: Vec<Option<Arc<Cell>>> = cells.into_iter().map(Some).collect();
    cells.resize_with(list.n_values(), || None);
    for op in &list.ops {
        for &(of, copy) in &op.f16_outputs {
            let [rows, cols] = list.shape(copy);
            let cell = Cell::f16(rows, cols);
            // What is only compiled leaves no copy behind.
            let is_left = list.is_kept(of) && !device.driver.is_collecting();
            if let Some(of) = cells[of.0 as usize].as_ref().filter(|_| is_left) {
                of.set_f16_copy(cell.clone());
            }
            cells[copy.0 as usize] = Some(cell);
        }
    }
    let mut launch = Launch {
        device,
        list: &list,
        cells,
        bound,
        last,
        read,
        at: 0,
        unread: RefCell::default(),
    };
    for (at, op) in list.ops.iter().enumerate() {
        launch.at = at;
        device.driver.say(|| list.line(op));
        launch.op(op);
        launch.unread.get_mut().clear();
        for v in op.reads().chain(op.makes()) {
            if launch.last[v.0 as usize] == at {
                launch.cells[v.0 as usize] = None;
            }
        }
    }
}

/// Whether matrices with `operand` read the f16 copy of their input.
fn reads_f16(operand: &Bound) -> bool {
    match operand {
        Bound::Weights(w) => w.tiles().is_some_and(|tiles| !tiles.is_rotated()),
        Bound::Experts { table, .. } => table.reads_f16(),
        _ => false,
    }
}

/// Whether `op` reads of its first input nothing but the f16 copy. A product may have matrices beside each other of
/// which some read the copy and some the values.
fn reads_only_copy(op: &Op, bound: &[Bound]) -> bool {
    let all_read_copy = match &op.kind {
        Kind::Product { weights } => weights.iter().all(|w| reads_f16(&bound[w.0 as usize])),
        _ => true,
    };
    op.f16_input.is_some() && all_read_copy
}

/// The launch of one op.
pub(crate) struct Launch<'a> {
    pub(crate) device: &'a Device,
    list: &'a OpList,
    cells: Vec<Option<Arc<Cell>>>,
    bound: &'a [Bound],
    /// The op that reads or makes each value last.
    last: Vec<usize>,
    /// Whether an op or the host reads each value itself, not only its f16 copy.
    read: Vec<bool>,
    at: usize,
    /// Memory that only the op's own kernels use.
    unread: RefCell<Vec<Arc<Cell>>>,
}

impl Launch<'_> {
    fn cell(&self, x: Value) -> &Arc<Cell> {
        let cell = self.cells[x.0 as usize].as_ref();
        cell.expect("a value lives until the last op that reads it")
    }

    /// Rows and columns.
    pub(crate) fn shape(&self, x: Value) -> [usize; 2] {
        self.list.shape(x)
    }

    /// Values of a tensor.
    pub(crate) fn len(&self, x: Value) -> usize {
        let [rows, cols] = self.shape(x);
        rows * cols
    }

    /// Where the values of `x` lie, or are to lie.
    ///
    /// # Panics
    ///
    /// If the op reads `x`, of which only the f16 copy is stored.
    pub(crate) fn address(&self, x: Value) -> Address {
        let is_input = self.list.ops[self.at].inputs.contains(&x);
        let is_stored = !is_input || self.read[x.0 as usize];
        assert!(is_stored, "{x:?} is read, but only its f16 copy is stored");
        self.cell(x).address(&self.device.arena)
    }

    /// Where the values of `y` are to lie, which the op makes: 0 if nobody reads more than their f16 copy.
    pub(crate) fn address_if_read(&self, y: Value) -> Address {
        match self.read[y.0 as usize] {
            true => self.address(y),
            false => 0,
        }
    }

    /// As [`Launch::reuse`], or 0 if nobody reads more of `y` than its f16 copy.
    pub(crate) fn reuse_if_read(&self, x: Value, y: Value) -> Address {
        match self.read[y.0 as usize] {
            true => self.reuse(x, y),
            false => 0,
        }
    }

    /// Where `y` is to lie, whose kernel finds `x` there: the memory of `x`, if nobody reads
    /// that any more, else a copy.
    pub(crate) fn in_place(&self, x: Value, y: Value) -> Address {
        let (from, to) = (self.cell(x), self.cell(y));
        if self.is_last_read(x) {
            from.give(to);
        } else {
            let arena = &self.device.arena;
            let bytes = 4 * self.len(x);
            self.device
                .driver
                .copy(to.address(arena), from.address(arena), bytes);
        }
        self.address(y)
    }

    /// Where `y` is to lie, whose kernel reads `x` before it writes there: the memory of `x`, if nobody
    /// reads that any more.
    pub(crate) fn reuse(&self, x: Value, y: Value) -> Address {
        if self.is_last_read(x) {
            self.cell(x).give(self.cell(y));
        }
        self.address(y)
    }

    /// Whether nobody reads `x` after this op.
    fn is_last_read(&self, x: Value) -> bool {
        self.last[x.0 as usize] == self.at && !self.list.is_kept(x)
    }

    /// The f16 copy `x`.
    pub(crate) fn activations(&self, x: Value) -> Activations {
        self.cell(x).activations(&self.device.arena)
    }

    /// The f16 copy that `op` reads of its first input.
    pub(crate) fn f16_input(&self, op: &Op) -> Activations {
        let copy = op.f16_input.expect("products read a copy");
        self.activations(copy)
    }

    /// The f16 copy that `op` writes of `y`; the struct of none, if it writes none.
    pub(crate) fn f16_output(&self, op: &Op, y: Value) -> Activations {
        let copy = op.f16_of(y);
        copy.map_or(Activations::default(), |copy| self.activations(copy))
    }

    /// The f16 copy that the kernel of `op` writes of `y` in any case: to memory that nobody reads, if
    /// nobody wants it.
    pub(crate) fn f16_written(&self, op: &Op, y: Value) -> Activations {
        if op.f16_of(y).is_some() {
            return self.f16_output(op, y);
        }
        let [rows, cols] = self.shape(y);
        let copy = Cell::f16(rows, cols);
        let activations = copy.activations(&self.device.arena);
        self.unread.borrow_mut().push(copy);
        activations
    }

    /// What `operand` is.
    pub(crate) fn bound(&self, operand: Operand) -> &Bound {
        &self.bound[operand.0 as usize]
    }

    /// The step's rows that `operand` is.
    pub(crate) fn rows(&self, operand: Operand) -> Rows {
        match self.bound(operand) {
            Bound::Batch { rows, .. } => *rows,
            _ => unreachable!("recorded as a step's rows"),
        }
    }

    /// The rotation that `operand` is.
    pub(crate) fn frequencies(&self, operand: Operand) -> Frequencies {
        match self.bound(operand) {
            Bound::Rope(frequencies) => *frequencies,
            _ => unreachable!("recorded as a rotation"),
        }
    }

    fn op(&self, op: &Op) {
        match &op.kind {
            Kind::Embed { .. } => matmul::embed(self, op),
            Kind::Product { .. } => matmul::product(self, op),
            Kind::ChosenProduct { .. } => matmul::chosen_product(self, op),
            Kind::BestGroups { .. } => matmul::best_groups(self, op),
            Kind::GatedProjection { .. } => gated_projection::launch(self, op),
            Kind::KvAppend { .. } => kv::append(self, op),
            Kind::HeadsAppend { .. } => kv::heads_append(self, op),
            Kind::Attend { .. } => attention::attend(self, op),
            Kind::Delta { .. } | Kind::DeltaNormGlu { .. } => delta::gated_delta(self, op),
            Kind::Experts { .. } | Kind::ExpertsBeside { .. } => moe::experts(self, op),
            Kind::Combine { .. } => moe::combine(self, op),
            Kind::ResidualNorm { .. } => elementwise::residual_norm(self, op),
            _ => elementwise::launch(self, op),
        }
    }
}

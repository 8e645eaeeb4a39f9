//! Device memory: blocks that last, and a step's buffers, which are recycled.
//!
//! Everything runs on one stream, so a buffer may be given out again while
//! kernels that use it still wait: whoever gets it runs after them. Recorded
//! steps are the exception, for they run again later. Their buffers come from a
//! pool of their own, which records share, since they run one after the other. What a step
//! leaves behind, its results, lies in blocks that no earlier record writes to ([`Arena::own`]), so it
//! lasts while other steps run.
//!
//! A tensor is a [`Cell`], which gets a buffer when the op that makes it is launched. The list of
//! ops holds the cells that its ops read; so a buffer goes back to the arena when neither
//! they nor the host need it any more.

use crate::args::{Activations, Address};
use crate::driver::{Driver, Number};
use crate::machine::lock;
use backend::Tensor;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// A block of device memory.
pub(crate) struct Block {
    driver: Arc<Driver>,
    pub(crate) address: Address,
    pub(crate) bytes: usize,
    /// The number of the record for which it was allocated; 0 outside of records.
    record: u64,
}

impl Block {
    /// `bytes` of unspecified content, for `what`.
    pub(crate) fn new(driver: &Arc<Driver>, bytes: usize, what: &str) -> Self {
        Block::at(driver, driver.allocate(bytes, what), bytes)
    }

    /// The memory of `bytes` at `address`, which the block owns from now on.
    fn at(driver: &Arc<Driver>, address: Address, bytes: usize) -> Self {
        Block {
            address,
            driver: driver.clone(),
            bytes,
            record: 0,
        }
    }

    pub(crate) fn zeroed(driver: &Arc<Driver>, bytes: usize, what: &str) -> Self {
        let block = Block::new(driver, bytes, what);
        driver.zero(block.address, bytes);
        block
    }

    pub(crate) fn of<T: Number>(driver: &Arc<Driver>, values: &[T], what: &str) -> Self {
        let block = Block::new(driver, size_of_val(values), what);
        driver.write(block.address, values);
        block
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.driver.free(self.address);
    }
}

/// Blocks nobody uses, by size; one list for ordinary steps, one for recorded.
#[derive(Default)]
struct Pools {
    free: [HashMap<usize, Vec<Block>>; 2],
    recording: bool,
    /// The number of the newest record, from 1.
    record: u64,
    /// Buffers given out since [`Arena::own`].
    n_given: usize,
    /// Which of these get a block of their own.
    own: Vec<usize>,
}

/// Where a step's buffers come from.
pub(crate) struct Arena {
    driver: Arc<Driver>,
    pools: Mutex<Pools>,
}

/// Smallest buffer, in bytes; addresses of all are multiples of it.
const LEAST: usize = 256;

impl Arena {
    pub(crate) fn new(driver: Arc<Driver>) -> Arc<Self> {
        Arc::new(Arena {
            driver,
            pools: Mutex::default(),
        })
    }

    /// Has buffers come from the pool of records from now on, for another record, or from the ordinary one
    /// again.
    pub(crate) fn recording(&self, recording: bool) {
        let mut pools = lock(&self.pools);
        pools.recording = recording;
        pools.record += u64::from(recording);
        pools.own.clear();
    }

    /// Counts the buffers given out from here, and gives those whose numbers are in `own` a block that no record
    /// has used.
    pub(crate) fn own(&self, own: Vec<usize>) {
        let mut pools = lock(&self.pools);
        (pools.n_given, pools.own) = (0, own);
    }

    /// A buffer of at least `bytes`, of unspecified content.
    pub(crate) fn buffer(self: &Arc<Self>, bytes: usize) -> Buffer {
        // Four sizes an octave, so that at most a quarter is wasted.
        let quarter = (bytes.max(LEAST).next_power_of_two() / 8).max(LEAST);
        let size = bytes.max(1).next_multiple_of(quarter);
        let mut pools = lock(&self.pools);
        let pool = usize::from(pools.recording);
        let number = pools.n_given;
        pools.n_given += 1;
        let is_own = pools.own.contains(&number);
        let free = pools.free[pool].get_mut(&size).filter(|_| !is_own);
        let kept = free.and_then(Vec::pop);
        let record = if pools.recording { pools.record } else { 0 };
        drop(pools);
        let block = kept.unwrap_or_else(|| {
            let address = self.driver.try_allocate(size);
            let mut block = match address {
                Some(address) => Block::at(&self.driver, address, size),
                None => {
                    self.free_unused();
                    Block::new(&self.driver, size, "a step's tensor")
                }
            };
            block.record = record;
            block
        });
        Buffer {
            address: block.address,
            number,
            block: Some((block, pool, self.clone())),
        }
    }

    /// Frees the blocks of the ordinary pool that nobody has: of the sizes that steps of other numbers of rows took.
    fn free_unused(&self) {
        let mut pools = lock(&self.pools);
        // Freeing memory waits for the device, which what is recorded must not.
        if !self.driver.is_recording() {
            let unused = std::mem::take(&mut pools.free[0]);
            drop(pools);
            drop(unused);
        }
    }

    /// A buffer that holds `values`.
    pub(crate) fn of<T: Number>(self: &Arc<Self>, values: &[T]) -> Buffer {
        let buffer = self.buffer(size_of_val(values));
        self.driver.write(buffer.address, values);
        buffer
    }
}

/// Memory that goes back to the arena.
pub(crate) struct Buffer {
    pub(crate) address: Address,
    /// How many buffers were given out before it since [`Arena::own`].
    number: usize,
    /// The block, its pool and its arena; nothing, where somebody else owns the memory.
    block: Option<(Block, usize, Arc<Arena>)>,
}

impl Buffer {
    /// Whether an earlier record than the newest one may write to its block.
    fn is_shared(&self) -> bool {
        let block = self.block.as_ref();
        block.is_some_and(|(block, _, home)| block.record != lock(&home.pools).record)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some((block, pool, home)) = self.block.take() {
            let mut pools = lock(&home.pools);
            pools.free[pool].entry(block.bytes).or_default().push(block);
        }
    }
}

/// A tensor `[rows, cols]` in f32 or, as products read it, in f16 (`Activations` in
/// kernels/common.cuh). It has a buffer once the op that makes it was launched.
pub(crate) struct Cell {
    shape: [usize; 2],
    bytes: usize,
    buffer: Mutex<Option<Buffer>>,
    /// The f16 copy of it, once a kernel has written one.
    f16: Mutex<Option<Arc<Cell>>>,
    /// The last list of ops that it is a value of, and which one ([`Cell::number`]).
    number: AtomicU64,
}

/// Columns of an f16 copy: whole tiles.
fn padded(cols: usize) -> usize {
    cols.next_multiple_of(crate::pack::TILE)
}

impl Cell {
    /// A tensor in f32 that has no memory yet.
    pub(crate) fn f32(rows: usize, cols: usize) -> Arc<Self> {
        Cell::with([rows, cols], 4 * rows * cols, None)
    }

    /// A tensor in f16, with a scale for each tile of a row, that has no memory yet.
    pub(crate) fn f16(rows: usize, cols: usize) -> Arc<Self> {
        let padded = padded(cols);
        Cell::with([rows, cols], rows * (2 * padded + padded / 16), None)
    }

    fn with(shape: [usize; 2], bytes: usize, buffer: Option<Buffer>) -> Arc<Self> {
        Arc::new(Cell {
            shape,
            bytes,
            buffer: Mutex::new(buffer),
            f16: Mutex::new(None),
            number: AtomicU64::new(0),
        })
    }

    /// Rows and columns.
    pub(crate) fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// An alias of this tensor's memory and of its f16 copy: `self` must outlive it.
    pub(crate) fn alias(&self) -> Arc<Self> {
        let address = lock(&self.buffer).as_ref().map_or(0, |b| b.address);
        let buffer = Buffer {
            address,
            number: 0,
            block: None,
        };
        let alias = Cell::with(self.shape, self.bytes, Some(buffer));
        *lock(&alias.f16) = self.f16_copy();
        alias
    }

    /// The numbers, as [`Arena::own`] counts them, of the buffers of this tensor and its f16 copy, and whether an
    /// earlier record than the newest one may write to them.
    pub(crate) fn buffers(&self) -> Vec<(usize, bool)> {
        let buffer = lock(&self.buffer);
        let number = |buffer: &Buffer| (buffer.number, buffer.is_shared());
        let mut numbers: Vec<_> = buffer.as_ref().map(number).into_iter().collect();
        drop(buffer);
        if let Some(copy) = self.f16_copy() {
            numbers.extend(copy.buffers());
        }
        numbers
    }

    /// Where its values lie. Without memory it gets some, of unspecified content.
    pub(crate) fn address(&self, arena: &Arc<Arena>) -> Address {
        let mut buffer = lock(&self.buffer);
        buffer
            .get_or_insert_with(|| arena.buffer(self.bytes))
            .address
    }

    /// Gives its memory to `to`, a tensor of as many bytes.
    pub(crate) fn give(&self, to: &Cell) {
        *lock(&to.buffer) = lock(&self.buffer).take();
    }

    /// The kernels' struct of a tensor in f16.
    pub(crate) fn activations(&self, arena: &Arc<Arena>) -> Activations {
        let (address, padded) = (self.address(arena), padded(self.shape[1]));
        Activations {
            values: address,
            scales: address + (2 * self.shape[0] * padded) as Address,
            stride: padded as i32,
        }
    }

    /// The f16 copy of the tensor, if there is one.
    pub(crate) fn f16_copy(&self) -> Option<Arc<Cell>> {
        lock(&self.f16).clone()
    }

    /// Keeps an f16 copy of its values.
    pub(crate) fn set_f16_copy(&self, copy: Arc<Cell>) {
        *lock(&self.f16) = Some(copy);
    }

    /// Which value of list `list` it is.
    pub(crate) fn number(&self, list: u32) -> Option<u32> {
        let number = self.number.load(Ordering::Relaxed);
        (number >> 32 == u64::from(list)).then_some(number as u32)
    }

    /// Says which value of list `list` it is.
    pub(crate) fn set_number(&self, list: u32, value: u32) {
        let number = u64::from(list) << 32 | u64::from(value);
        self.number.store(number, Ordering::Relaxed);
    }
}

/// A tensor of the contract, on this device.
pub(crate) fn tensor(cell: Arc<Cell>) -> Tensor {
    let [rows, cols] = cell.shape;
    Tensor::new(rows, cols, Box::new(cell), None)
}

/// What a tensor of the contract is on this device.
pub(crate) fn cell(x: &Tensor) -> &Arc<Cell> {
    x.storage::<Arc<Cell>>()
}

#[cfg(test)]
mod tests {
    use crate::{Cuda, DryRun, machine::lock};
    use backend::Record;

    #[test]
    fn unused_buffers_make_room_for_others() {
        let cuda = Cuda::dry_run(DryRun::default());
        let arena = &cuda.device.arena;
        let log = cuda.device.driver.log.as_deref().unwrap();
        let held: u64 = lock(log).held.values().sum();
        lock(log).limit = Some(held + (1 << 20));
        // Buffers of two sizes, which do not stand for each other.
        drop(arena.buffer(600 << 10));
        let second = arena.buffer(800 << 10);
        cuda.finish().unwrap();
        assert_ne!(second.address, 0);
        let third = arena.buffer(600 << 10);
        let error = cuda.finish().unwrap_err();
        assert!(error.to_string().contains("out of memory"), "{error}");
        assert_eq!(third.address, 0);
    }
}

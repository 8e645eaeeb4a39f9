//! Device memory: blocks that last, and a step's buffers, which are recycled.
//!
//! Everything runs on one stream, so a buffer may be given out again while
//! kernels that use it still wait: whoever gets it runs after them. Recorded
//! steps are the exception, for they run again later. Their buffers come from a
//! pool of their own; between two steps nothing lives there but their results.

use crate::args::Activations;
use crate::driver::{Address, Driver, Number, lock};
use backend::Tensor;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// A block of device memory.
pub(crate) struct Block {
    driver: Arc<Driver>,
    pub(crate) address: Address,
    pub(crate) bytes: usize,
}

impl Block {
    /// `bytes` of unspecified content, for `what`.
    pub(crate) fn new(driver: &Arc<Driver>, bytes: usize, what: &str) -> Self {
        Block {
            address: driver.allocate(bytes, what),
            driver: driver.clone(),
            bytes,
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

    /// Chooses the pool that buffers come from from now on.
    pub(crate) fn recording(&self, recording: bool) {
        lock(&self.pools).recording = recording;
    }

    /// A buffer of at least `bytes`, of unspecified content.
    pub(crate) fn buffer(self: &Arc<Self>, bytes: usize) -> Buffer {
        // Four sizes an octave, so that at most a quarter is wasted.
        let quarter = (bytes.max(LEAST).next_power_of_two() / 8).max(LEAST);
        let size = bytes.max(1).next_multiple_of(quarter);
        let mut pools = lock(&self.pools);
        let pool = usize::from(pools.recording);
        let kept = pools.free[pool].get_mut(&size).and_then(Vec::pop);
        drop(pools);
        let block = kept.unwrap_or_else(|| Block::new(&self.driver, size, "a step's tensor"));
        Buffer {
            address: block.address,
            block: Some(block),
            pool,
            home: self.clone(),
        }
    }

    /// A buffer that holds `values`.
    pub(crate) fn of<T: Number>(self: &Arc<Self>, values: &[T]) -> Buffer {
        let buffer = self.buffer(size_of_val(values));
        self.driver.write(buffer.address, values);
        buffer
    }

    /// A tensor of unspecified content.
    pub(crate) fn tensor(self: &Arc<Self>, rows: usize, cols: usize) -> Tensor {
        let values = self.buffer(4 * rows * cols);
        let values = Values {
            values,
            half: Mutex::new(None),
        };
        Tensor::new(rows, cols, Box::new(values), None)
    }
}

/// Memory that goes back to the arena.
pub(crate) struct Buffer {
    pub(crate) address: Address,
    block: Option<Block>,
    pool: usize,
    home: Arc<Arena>,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(block) = self.block.take() {
            let mut pools = lock(&self.home.pools);
            pools.free[self.pool]
                .entry(block.bytes)
                .or_default()
                .push(block);
        }
    }
}

/// A tensor's storage.
pub(crate) struct Values {
    pub(crate) values: Buffer,
    /// The values as products read them, once something has asked.
    half: Mutex<Option<Arc<Half>>>,
}

/// Activations for tensor cores (`Activations` in kernels/common.cuh).
pub(crate) struct Half {
    buffer: Buffer,
    rows: usize,
    /// Columns, whole tiles of them.
    padded: usize,
}

impl Half {
    pub(crate) fn new(arena: &Arc<Arena>, rows: usize, cols: usize) -> Self {
        let padded = cols.next_multiple_of(crate::pack::TILE);
        Half {
            buffer: arena.buffer(rows * (2 * padded + padded / 16)),
            rows,
            padded,
        }
    }

    pub(crate) fn address(&self) -> Address {
        self.buffer.address
    }

    /// The kernels' struct.
    pub(crate) fn args(&self) -> Activations {
        Activations {
            values: self.address(),
            scales: self.address() + (2 * self.rows * self.padded) as Address,
            stride: self.padded as i32,
        }
    }
}

impl Values {
    /// The same memory once more, its values for products included: `self` must
    /// outlive it.
    pub(crate) fn alias(&self) -> Self {
        let half = lock(&self.half);
        Values {
            values: Buffer {
                address: self.values.address,
                block: None,
                pool: self.values.pool,
                home: self.values.home.clone(),
            },
            half: Mutex::new(half.clone()),
        }
    }

    /// The values for products, made by `make` unless they are there.
    pub(crate) fn half(&self, make: impl FnOnce() -> Arc<Half>) -> Arc<Half> {
        let mut half = lock(&self.half);
        half.get_or_insert_with(make).clone()
    }

    /// Keeps what a kernel wrote beside the values.
    pub(crate) fn set_half(&mut self, half: Option<Arc<Half>>) {
        *self.half.get_mut().unwrap_or_else(PoisonError::into_inner) = half;
    }
}

/// The address of a tensor's values.
pub(crate) fn address(x: &Tensor) -> Address {
    x.storage::<Values>().values.address
}

/// The address of a tensor's values, to change them.
pub(crate) fn address_mut(x: &mut Tensor) -> Address {
    let values = x.storage_mut::<Values>();
    values.set_half(None);
    values.values.address
}

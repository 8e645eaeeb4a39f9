//! The weights of the next product, prefetched by workers that have nothing else to do.
//!
//! A step multiplies the same matrices in the same order as the one before, with small ops between
//! them that one thread does alone. [`Sequence`] keeps which product came after each. A worker
//! that is done with its part of a product prefetches its part of the next one, until there is
//! other work; so memory is read during the small ops, and a product begins with weights in the
//! second-level cache. Prefetching changes no value and may name any address.

use crate::arch::{Detected, Kernel, Lanes};
use crate::memory::LINE;
use crate::shares::{PieceOrder, n_shares, piece_of, share_start};
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// The most matrices of a product.
pub(crate) const MAX_MATRICES: usize = 8;

/// Bytes that are prefetched before a worker looks for other work again.
const STEP_BYTES: usize = 2048;

/// Where a matrix lies in memory, which may have been given back since.
#[derive(Clone, Copy, Default, PartialEq)]
struct Span {
    address: usize,
    bytes: usize,
    /// Bytes that a worker claims at a time, and how often.
    range_bytes: usize,
    n_ranges: usize,
}

/// The matrices of one product.
#[derive(Clone, Copy)]
pub(crate) struct Weights {
    isa: Detected,
    spans: [Span; MAX_MATRICES],
    n_spans: usize,
}

impl Weights {
    /// No matrices yet.
    pub(crate) fn new(isa: Detected) -> Self {
        Weights {
            isa,
            spans: [Span::default(); MAX_MATRICES],
            n_spans: 0,
        }
    }

    /// Adds a matrix that workers claim in ranges of `range_bytes`.
    ///
    /// # Panics
    ///
    /// If there are [`MAX_MATRICES`] already.
    pub(crate) fn push(&mut self, matrix: &[u8], range_bytes: usize) {
        let range_bytes = range_bytes.max(1);
        self.spans[self.n_spans] = Span {
            address: matrix.as_ptr() as usize,
            bytes: matrix.len(),
            range_bytes,
            n_ranges: matrix.len().div_ceil(range_bytes),
        };
        self.n_spans += 1;
    }

    /// Ranges that workers claim, of all matrices together.
    pub(crate) fn n_ranges(&self) -> usize {
        self.spans().iter().map(|s| s.n_ranges).sum()
    }

    fn spans(&self) -> &[Span] {
        &self.spans[..self.n_spans]
    }

    #[cfg(test)]
    pub(crate) fn begins_with(&self, matrix: &[u8]) -> bool {
        let first = self.spans[0];
        (first.address, first.bytes) == (matrix.as_ptr() as usize, matrix.len())
    }

    /// Whether `other` are the same matrices in the same ranges.
    fn is_same(&self, other: &Weights) -> bool {
        self.spans() == other.spans()
    }
}

/// What a worker has prefetched of its part of [`Weights`].
pub(crate) struct Prefetcher {
    weights: Weights,
    /// The order in which the product's workers claim ranges.
    order: PieceOrder,
    /// Ranges of the worker's share that are not begun, by their numbers in that order.
    ranges: Range<usize>,
    /// The matrix whose range is being prefetched, and the bytes of that range that are left.
    span: usize,
    part: Range<usize>,
    /// Bytes to prefetch still.
    left: usize,
}

impl Prefetcher {
    /// For worker `id` of `n_workers`: prefetches the share of `weights` that it begins with where ranges are claimed in
    /// `order`, up to half of the second-level cache.
    pub(crate) fn new(weights: Weights, order: PieceOrder, id: usize, n_workers: usize) -> Self {
        let total = weights.n_ranges();
        let wanted = n_workers.min(total);
        let shares = n_shares(wanted).max(1);
        let start = |share| share_start(share, shares, total);
        let ranges = match id < wanted {
            true => start(id % shares)..start(id % shares + 1),
            false => 0..0,
        };
        Prefetcher {
            weights,
            order,
            ranges,
            span: 0,
            part: 0..0,
            left: most_bytes(),
        }
    }

    /// Prefetches on while `is_idle`.
    pub(crate) fn run(&mut self, is_idle: impl Fn() -> bool) {
        while self.left > 0 && is_idle() {
            self.step();
        }
    }

    /// Prefetches some bytes, if there are some left.
    pub(crate) fn step(&mut self) {
        while self.part.is_empty() {
            let Some(range) = self.ranges.next() else {
                self.left = 0;
                return;
            };
            let spans = self.weights.spans();
            let (span, range) = piece_of(range, self.order, spans.iter().map(|s| s.n_ranges));
            let at = |range: usize| (range * spans[span].range_bytes).min(spans[span].bytes);
            (self.span, self.part) = (span, at(range)..at(range + 1));
        }
        let bytes = STEP_BYTES.min(self.part.len()).min(self.left);
        let at = self.weights.spans()[self.span].address + self.part.start;
        self.weights.isa.run(Lines { at, bytes });
        self.part.start += bytes;
        self.left -= bytes;
    }
}

/// Prefetches `bytes` from address `at` on.
struct Lines {
    at: usize,
    bytes: usize,
}

impl Kernel for Lines {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        for offset in (0..self.bytes).step_by(LINE) {
            L::prefetch(std::ptr::without_provenance(self.at + offset));
        }
    }
}

/// Bytes that a worker may prefetch: half of a core's second-level cache.
fn most_bytes() -> usize {
    /// Where the system does not tell: what is half of that cache on most CPUs, or less.
    const UNKNOWN: usize = 256 << 10;
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(|| {
        let file = "/sys/devices/system/cpu/cpu0/cache/index2/size";
        let text = std::fs::read_to_string(file).unwrap_or_default();
        let kib = text.trim().strip_suffix('K').and_then(|n| n.parse().ok());
        kib.map_or(UNKNOWN, |kib: usize| kib * 1024 / 2)
    })
}

/// The weights that were multiplied after those of one matrix the last time.
pub(crate) type Successor = Mutex<Option<Arc<Weights>>>;

/// Which product comes after which.
#[derive(Default)]
pub(crate) struct Sequence {
    /// The successor of the last product.
    last: Mutex<Option<Arc<Successor>>>,
}

impl Sequence {
    /// Notes that `weights` are multiplied now, the first of which keeps `successor`, and returns
    /// what came after them the last time. Weights that are not in memory break the sequence.
    pub(crate) fn next(
        &self,
        weights: Option<Weights>,
        successor: &Arc<Successor>,
    ) -> Option<Arc<Weights>> {
        fn lock<T>(kept: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
            kept.lock().unwrap_or_else(PoisonError::into_inner)
        }
        let own = weights.is_some().then(|| successor.clone());
        let before = std::mem::replace(&mut *lock(&self.last), own);
        if let Some(before) = before {
            // Kept if they are the same, so that all workers have them in their caches.
            let mut noted = lock(&before);
            match (&*noted, &weights) {
                (Some(noted), Some(weights)) if noted.is_same(weights) => {}
                _ => *noted = weights.map(Arc::new),
            }
        }
        lock(successor).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::Isa;

    fn detected() -> Detected {
        Detected::new(Isa::Scalar).expect("portable code")
    }

    /// The parts that `n_workers` prefetch of matrices of these bytes and ranges, as
    /// `(matrix, offset)` of each step.
    fn parts(
        matrices: &[(usize, usize)],
        order: PieceOrder,
        n_workers: usize,
    ) -> Vec<Vec<(usize, usize)>> {
        let memory: Vec<Vec<u8>> = matrices.iter().map(|&(n, _)| vec![0; n]).collect();
        let mut weights = Weights::new(detected());
        for (matrix, (_, range)) in memory.iter().zip(matrices) {
            weights.push(matrix, *range);
        }
        let part = |id| {
            let mut prefetcher = Prefetcher::new(weights, order, id, n_workers);
            let mut steps = Vec::new();
            while prefetcher.left > 0 {
                let before = prefetcher.left;
                prefetcher.step();
                assert!(prefetcher.left < before);
                if prefetcher.left > 0 {
                    let bytes = before - prefetcher.left;
                    steps.push((prefetcher.span, prefetcher.part.start - bytes));
                }
            }
            steps
        };
        (0..n_workers).map(part).collect()
    }

    #[test]
    fn each_worker_prefetches_the_part_that_it_begins_with() {
        // Ranges of 4096 bytes: three of the first matrix and two of the second.
        let matrices = [(10_000, 4096), (6000, 4096)];
        let sequential = parts(&matrices, PieceOrder::Sequential, 2);
        assert_eq!(sequential[0], [(0, 0), (0, 2048), (0, 4096), (0, 6144)]);
        assert_eq!(
            sequential[1],
            [(0, 8192), (1, 0), (1, 2048), (1, 4096)],
            "the last range of the first matrix and both of the second"
        );
        let by_share = parts(&matrices, PieceOrder::ByShare(2), 2);
        assert_eq!(by_share[0], [(0, 0), (0, 2048), (1, 0), (1, 2048)]);
        assert_eq!(
            by_share[1],
            [(0, 4096), (0, 6144), (0, 8192), (1, 4096)],
            "the last two ranges of the first matrix and the last of the second"
        );
    }

    #[test]
    fn more_workers_than_ranges_prefetch_nothing() {
        for order in [PieceOrder::Sequential, PieceOrder::ByShare(2)] {
            let parts = parts(&[(3000, 3000), (50, 64)], order, 4);
            assert_eq!(parts[0], [(0, 0), (0, 2048)]);
            assert_eq!(parts[1], [(1, 0)]);
            assert_eq!(parts[2..], [[], []]);
        }
    }

    #[test]
    fn a_product_is_followed_by_what_followed_it_the_last_time() {
        let (sequence, memory) = (Sequence::default(), vec![0; 100]);
        let successors: [Arc<Successor>; 3] = Default::default();
        let weights = |i: usize| {
            let mut weights = Weights::new(detected());
            weights.push(&memory[i..], 10);
            Some(weights)
        };
        let multiply = |i: usize, weights| {
            let next = sequence.next(weights, &successors[i])?;
            Some(next.spans[0].address - memory.as_ptr() as usize)
        };
        assert_eq!(multiply(0, weights(0)), None);
        assert_eq!(multiply(1, weights(1)), None);
        assert_eq!(multiply(0, weights(0)), Some(1));
        assert_eq!(multiply(2, weights(2)), None);
        assert_eq!(multiply(0, weights(0)), Some(2));
        assert_eq!(multiply(1, None), Some(0), "nothing to prefetch for 0");
        assert_eq!(multiply(0, weights(0)), None);
    }
}

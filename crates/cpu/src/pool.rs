//! A fixed set of threads that work on one job at a time.
//!
//! The caller is worker 0. The others spin for a while after each job, because during a step the
//! next one comes within microseconds, and then park. Workers claim a job's work in pieces, so it
//! ends with its last piece: a worker that wakes too late finds the job closed and has missed
//! nothing, and no job waits until every thread has been scheduled. Each worker says on a cache
//! line of its own that it has taken a job, so many workers do not wait for each other, and a job
//! of few pieces is taken by as many.
//!
//! No queue, no futures, no allocation per job.

use crate::ahead::{Prefetcher, Weights};
use crate::cores::Seat;
use crate::shares::{MAX_SHARES, PieceOrder, n_shares, rank, share_start};
use std::any::Any;
use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

/// Elements that one worker takes at a time where an op does little with each. Fewer than twice
/// as many stay on the calling thread.
pub(crate) const WORK_RANGE: usize = 16 << 10;

/// Elements that one worker takes at a time where an op does more with each: dozens of
/// instructions, or two reads, or a write of what the same worker reads next, as in a sum and the
/// norm of it.
pub(crate) const WORK_RANGE_LONG: usize = WORK_RANGE / 4;

/// How often a worker looks for the next job before it parks, and a caller for the end of its job
/// before it yields: about a millisecond.
const SPINS: usize = 20_000;

/// How many pieces of a share were claimed; on a cache line of its own.
#[repr(align(64))]
struct Claimed(AtomicUsize);

/// A job, which each worker that takes it calls with its own number.
type Job = dyn Fn(usize) + Sync;

/// The bits of [`Posted::state`] that say how many workers a job is for: enough for
/// [`MAX_THREADS`](crate::MAX_THREADS).
const WANTED_BITS: u32 = 11;
const _: () = assert!(crate::MAX_THREADS < 1 << WANTED_BITS);

/// The current job, which the caller writes and all workers read.
#[repr(align(64))]
struct Posted {
    /// `number << WANTED_BITS | wanted`: the job's number, and how many workers it has work for.
    /// The first `wanted` may take it.
    state: AtomicU64,
    /// Written before the job is posted, read by workers that took it.
    job: UnsafeCell<Option<*const Job>>,
    /// What to prefetch after the job, and how often that has changed; written and read as the
    /// job is. Kept, for a worker that has missed the job reads it with a later one.
    ahead: UnsafeCell<(u64, Option<Arc<Weights>>)>,
}

/// The number of the last job that no worker may take any more.
#[repr(align(64))]
struct Closed(AtomicU64);

/// What one worker writes, on a cache line of its own: workers that take a job do not wait for
/// each other.
#[repr(align(64))]
struct Slot {
    /// The number of the job that the worker has taken, or 0.
    taken: AtomicU64,
    /// Whether the worker is parked or about to be.
    parked: AtomicBool,
}

/// What the caller and the threads share.
struct Shared {
    posted: Posted,
    closed: Closed,
    /// A slot for each worker.
    slots: Vec<Slot>,
    /// The first panic of the current job.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// Whether the threads are to end.
    stop: AtomicBool,
    /// Whether a share of a job about several matrices is a share of each.
    shares_matrices: AtomicBool,
}

// SAFETY: what a job is made of is written only by the holder of `Pool::turn` while no worker has
// taken a job, and read only by workers that took the current one.
unsafe impl Sync for Shared {}
// SAFETY: the job's pointer is followed only while `Pool::run_then_prefetch` keeps the job alive.
unsafe impl Send for Shared {}

impl Shared {
    /// The order of a job of so many pieces of several matrices.
    fn piece_order(&self, pieces: usize) -> PieceOrder {
        match self.shares_matrices.load(Relaxed) {
            true => PieceOrder::ByShare(n_shares(pieces.min(self.slots.len())).max(1)),
            false => PieceOrder::Sequential,
        }
    }

    /// What worker `id` prefetches of `weights`.
    fn prefetcher(&self, weights: Weights, id: usize) -> Prefetcher {
        let order = self.piece_order(weights.n_ranges());
        Prefetcher::new(weights, order, id, self.slots.len())
    }

    /// Keeps a panic for the caller of the job, if it is the job's first.
    fn keep(&self, panic: Box<dyn Any + Send>) {
        let mut first = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
        first.get_or_insert(panic);
    }

    /// Waits as worker `id` until another state than `seen` is posted, and returns it.
    fn wait(&self, id: usize, seen: u64) -> u64 {
        let mut spins = 0;
        loop {
            let state = self.posted.state.load(Acquire);
            if state != seen {
                return state;
            }
            spins += 1;
            if spins <= SPINS {
                std::hint::spin_loop();
                continue;
            }
            let parked = &self.slots[id].parked;
            parked.store(true, SeqCst);
            if self.posted.state.load(SeqCst) == seen {
                thread::park();
            }
            parked.store(false, SeqCst);
        }
    }

    /// Takes one job after the other as worker `id`, until the pool is dropped.
    fn work(&self, id: usize) {
        let (mut seen, mut changes) = (0, 0);
        let mut prefetcher: Option<Prefetcher> = None;
        loop {
            seen = self.wait(id, seen);
            if self.stop.load(Acquire) {
                return;
            }
            let (number, wanted) = (seen >> WANTED_BITS, seen & ((1 << WANTED_BITS) - 1));
            let taken = &self.slots[id].taken;
            // Of this store and load, and those in `Pool::run_then_prefetch`, one sees the other: either
            // the job is closed here, or the caller waits for this worker.
            if (id as u64) < wanted {
                taken.store(number, SeqCst);
                if self.closed.0.load(SeqCst) < number {
                    // SAFETY: this worker has taken the job before it was closed, so
                    // `Pool::run_then_prefetch` waits for it, and keeps alive what it has posted.
                    let (job, ahead) = unsafe {
                        let job = (*self.posted.job.get()).expect("a posted job");
                        (&*job, &*self.posted.ahead.get())
                    };
                    if changes != ahead.0 {
                        changes = ahead.0;
                        let weights = ahead.1.as_deref();
                        prefetcher = weights.map(|w| self.prefetcher(*w, id));
                    }
                    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(id))) {
                        self.keep(panic);
                    }
                }
                taken.store(0, Release);
            }
            if let Some(prefetcher) = &mut prefetcher {
                prefetcher.run(|| self.posted.state.load(Relaxed) == seen);
            }
        }
    }
}

/// A fixed set of threads.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    /// The threads of all workers but worker 0.
    threads: Vec<JoinHandle<()>>,
    /// Held by the caller whose job runs: what callers prefetch while they wait for the others.
    turn: Mutex<Option<Prefetcher>>,
}

impl Pool {
    /// Starts `n` workers, the caller among them.
    pub(crate) fn new(n: usize) -> Self {
        let slot = |_| Slot {
            taken: AtomicU64::new(0),
            parked: AtomicBool::new(false),
        };
        let shared = Arc::new(Shared {
            posted: Posted {
                state: AtomicU64::new(0),
                job: UnsafeCell::new(None),
                ahead: UnsafeCell::new((0, None)),
            },
            closed: Closed(AtomicU64::new(0)),
            slots: (0..n).map(slot).collect(),
            panic: Mutex::new(None),
            stop: AtomicBool::new(false),
            shares_matrices: AtomicBool::new(false),
        });
        let threads = (1..n)
            .map(|id| {
                let shared = shared.clone();
                thread::Builder::new()
                    .name(format!("cpu-{id}"))
                    .spawn(move || shared.work(id))
                    .expect("the system gives threads")
            })
            .collect();
        Pool {
            shared,
            threads,
            turn: Mutex::new(None),
        }
    }

    /// Binds each thread but the caller's to one hardware thread of those that this process may use,
    /// one of each core first; the first is left to the caller.
    ///
    /// # Errors
    ///
    /// If the system refuses or has no way to.
    pub(crate) fn pin(&self) -> std::io::Result<()> {
        self.bind(|seat| Some(vec![seat.thread]))
    }

    /// Binds each thread but the caller's to the hardware threads of one memory node; does nothing where there is one node.
    /// The system places memory near the thread that first writes it, so the share of a matrix that a worker packs is near
    /// it, and [`PieceOrder::ByShare`] has the worker begin products with that share.
    ///
    /// # Errors
    ///
    /// If the system refuses or has no way to.
    pub(crate) fn bind_to_nodes(&self) -> std::io::Result<()> {
        self.bind(|seat| seat.node.clone())
    }

    /// Binds each thread but the caller's to the hardware threads that `of` names for its seat, if it names any.
    fn bind(&self, of: impl Fn(&Seat) -> Option<Vec<usize>>) -> std::io::Result<()> {
        let n = self.n_workers();
        let seats = crate::cores::seats(n);
        if seats.is_empty() {
            return Err(std::io::ErrorKind::Unsupported.into());
        }
        for (i, thread) in self.threads.iter().enumerate() {
            if let Some(ids) = of(&seats[rank(i + 1, n)]) {
                bind(thread, &ids)?;
            }
        }
        Ok(())
    }

    /// Workers, the caller included.
    pub(crate) fn n_workers(&self) -> usize {
        self.threads.len() + 1
    }

    /// Whether jobs that multiply several matrices use [`PieceOrder::ByShare`].
    pub(crate) fn share_matrices(&self, yes: bool) {
        self.shared.shares_matrices.store(yes, Relaxed);
    }

    /// The order of a job of so many pieces of several matrices.
    pub(crate) fn piece_order(&self, pieces: usize) -> PieceOrder {
        self.shared.piece_order(pieces)
    }

    /// Calls `job` once on this thread and at most once on each other worker,
    /// and returns when all calls have. Jobs must claim their work in pieces.
    ///
    /// # Panics
    ///
    /// With the panic of the first call that panicked, after all have ended.
    pub(crate) fn run(&self, job: &(dyn Fn(usize) + Sync + '_)) {
        self.run_then_prefetch(None, self.n_workers(), job);
    }

    /// As [`Pool::run`] on the first `wanted` workers; after the job, idle workers prefetch
    /// `ahead`, or go on with what the last job named.
    fn run_then_prefetch(
        &self,
        ahead: Option<Arc<Weights>>,
        wanted: usize,
        job: &(dyn Fn(usize) + Sync + '_),
    ) {
        if self.threads.is_empty() {
            return job(0);
        }
        let mut turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. The job is closed and every worker that took it
        // has left before this function returns or unwinds.
        let alive: *const Job =
            unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const Job>(job) };
        // SAFETY: no job is open and `turn` is held.
        unsafe { *shared.posted.job.get() = Some(alive) };
        if let Some(weights) = ahead {
            *turn = Some(shared.prefetcher(*weights, 0));
            // SAFETY: no job is open and `turn` is held.
            let ahead = unsafe { &mut *shared.posted.ahead.get() };
            *ahead = (ahead.0 + 1, Some(weights));
        }
        let number = (shared.posted.state.load(Relaxed) >> WANTED_BITS) + 1;
        let state = number << WANTED_BITS | wanted as u64;
        shared.posted.state.store(state, SeqCst);
        self.wake(wanted);
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(0))) {
            shared.keep(panic);
        }
        shared.closed.0.store(number, SeqCst);
        for slot in &shared.slots[1..wanted] {
            let is_taken = || slot.taken.load(SeqCst) == number;
            if let Some(prefetcher) = &mut *turn {
                prefetcher.run(is_taken);
            }
            let mut spins = 0;
            while is_taken() {
                spins += 1;
                if spins > SPINS {
                    thread::yield_now();
                } else {
                    std::hint::spin_loop();
                }
            }
        }
        let panic = shared
            .panic
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        drop(turn);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Calls `piece(worker, range)` over `0..n` in ranges of `chunk` (the last
    /// may be shorter), each once. A worker begins with a share of its own, so that
    /// what it asks memory for ahead is what it reads next, and then helps the others.
    pub(crate) fn each(&self, n: usize, chunk: usize, piece: impl Fn(usize, Range<usize>) + Sync) {
        self.each_then_prefetch(None, n, chunk, piece);
    }

    /// As [`Pool::each`]; after it, idle workers prefetch `ahead`, or go on with what was named
    /// last.
    pub(crate) fn each_then_prefetch(
        &self,
        ahead: Option<Arc<Weights>>,
        n: usize,
        chunk: usize,
        piece: impl Fn(usize, Range<usize>) + Sync,
    ) {
        let chunk = chunk.max(1);
        if n <= chunk || self.threads.is_empty() {
            // In the same pieces as below, for callers that rely on their size.
            for start in (0..n).step_by(chunk) {
                piece(0, start..(start + chunk).min(n));
            }
            return;
        }
        let pieces = n.div_ceil(chunk);
        let wanted = pieces.min(self.n_workers());
        let shares = n_shares(wanted);
        let claimed = [const { Claimed(AtomicUsize::new(0)) }; MAX_SHARES];
        let start_of = |share: usize| share_start(share, shares, pieces);
        self.run_then_prefetch(ahead, wanted, &|worker| {
            for share in (0..shares).map(|i| (worker + i) % shares) {
                let (first, end) = (start_of(share), start_of(share + 1));
                loop {
                    let i = first + claimed[share].0.fetch_add(1, Relaxed);
                    if i >= end {
                        break;
                    }
                    piece(worker, i * chunk..((i + 1) * chunk).min(n));
                }
            }
        });
    }

    /// A size of pieces of `0..n` for [`Pool::each`]: at least about `size`, and such that all
    /// workers get equally many pieces. Less than two times `size` stay one piece.
    pub(crate) fn even_chunk(&self, n: usize, size: usize) -> usize {
        let (pieces, workers) = ((n / size.max(1)).max(1), self.n_workers());
        n.div_ceil(match pieces > workers {
            true => pieces.next_multiple_of(workers),
            false => pieces,
        })
    }

    /// Wakes those of the first `n` workers that are parked.
    fn wake(&self, n: usize) {
        for (slot, thread) in self.shared.slots[1..n].iter().zip(&self.threads) {
            if slot.parked.load(SeqCst) {
                thread.thread().unpark();
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        self.shared.posted.state.fetch_add(1 << WANTED_BITS, SeqCst);
        self.wake(self.n_workers());
        for thread in self.threads.drain(..) {
            // A worker catches its job's panics; there is nothing left to report.
            let _ = thread.join();
        }
    }
}

/// Binds a thread to some hardware threads.
#[cfg(target_os = "linux")]
fn bind(thread: &JoinHandle<()>, ids: &[usize]) -> std::io::Result<()> {
    use std::os::unix::thread::JoinHandleExt;
    const SIZE: usize = size_of::<libc::cpu_set_t>();
    // SAFETY: a set of cores may be all zeros.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for &id in ids {
        // SAFETY: the number is from a set of the same size.
        unsafe { libc::CPU_SET(id, &mut set) };
    }
    // SAFETY: a thread exists until its handle is joined, and the set has `SIZE` bytes.
    match unsafe { libc::pthread_setaffinity_np(thread.as_pthread_t(), SIZE, &raw const set) } {
        0 => Ok(()),
        error => Err(std::io::Error::from_raw_os_error(error)),
    }
}

#[cfg(not(target_os = "linux"))]
fn bind(_: &JoinHandle<()>, _: &[usize]) -> std::io::Result<()> {
    Err(std::io::ErrorKind::Unsupported.into())
}

/// A slice that workers write in parts.
pub(crate) struct DisjointSlice<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: callers on different threads get disjoint parts only, by the contract of `part`.
unsafe impl<T: Send> Sync for DisjointSlice<'_, T> {}

impl<'a, T> DisjointSlice<'a, T> {
    /// All of `slice`.
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        DisjointSlice {
            start: slice.as_mut_ptr(),
            len: slice.len(),
            slice: PhantomData,
        }
    }

    /// The elements of `range`.
    ///
    /// # Safety
    ///
    /// No two parts that are alive at once may overlap.
    ///
    /// # Panics
    ///
    /// If the range reaches past the end.
    #[expect(clippy::mut_from_ref, reason = "the contract forbids overlap")]
    pub(crate) unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "a part lies in its slice"
        );
        // SAFETY: in bounds, and no other part that is alive overlaps, as promised.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }

    /// The elements from `start` on.
    ///
    /// # Panics
    ///
    /// If that is past the end.
    pub(crate) fn after(&self, start: usize) -> DisjointSlice<'a, T> {
        assert!(start <= self.len, "a part lies in its slice");
        DisjointSlice {
            // SAFETY: not past the end of the slice.
            start: unsafe { self.start.add(start) },
            len: self.len - start,
            slice: PhantomData,
        }
    }

    /// The elements of `range`, to read.
    ///
    /// # Safety
    ///
    /// No part to write that is alive at the same time may overlap the range.
    ///
    /// # Panics
    ///
    /// If the range reaches past the end.
    pub(crate) unsafe fn read(&self, range: Range<usize>) -> &[T] {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "a part lies in its slice"
        );
        // SAFETY: in bounds, and nobody writes the range meanwhile, as promised.
        unsafe { std::slice::from_raw_parts(self.start.add(range.start), range.len()) }
    }

    /// Writes one element, for parts that interleave.
    ///
    /// # Safety
    ///
    /// No part that is alive contains the element, and no other worker writes it.
    ///
    /// # Panics
    ///
    /// If there is no such element.
    #[inline(always)]
    pub(crate) unsafe fn write(&self, i: usize, value: T) {
        assert!(i < self.len, "an element of the slice");
        // SAFETY: in bounds, and nobody else uses the element meanwhile, as promised.
        unsafe { self.start.add(i).write(value) };
    }
}

/// The scratch memory of `worker`, in a tensor that has `len` values for each worker.
///
/// # Safety
///
/// The worker uses the result in one place at a time.
#[expect(clippy::mut_from_ref, reason = "as `DisjointSlice::part`")]
pub(crate) unsafe fn worker_scratch<'a>(
    scratch: &'a DisjointSlice<'_, f32>,
    worker: usize,
    len: usize,
) -> &'a mut [f32] {
    // SAFETY: the values of different workers are disjoint, and this worker's are used once at a
    // time, as promised.
    unsafe { scratch.part(worker * len..(worker + 1) * len) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::{Detected, Isa};

    #[test]
    fn every_piece_runs_once() {
        for n in [1, 2, 3, 8] {
            let pool = Pool::new(n);
            for round in 0..3000 {
                let total = round % 37;
                let hits: Vec<AtomicUsize> = (0..total).map(|_| AtomicUsize::new(0)).collect();
                pool.each(total, round % 5, |worker, range| {
                    assert!(worker < n);
                    range.for_each(|i| {
                        hits[i].fetch_add(1, Relaxed);
                    });
                });
                assert!(hits.iter().all(|h| h.load(Relaxed) == 1));
            }
        }
    }

    #[test]
    fn a_job_of_few_pieces_runs_on_as_many_workers() {
        let pool = Pool::new(6);
        for pieces in [2, 3, 5] {
            for _ in 0..300 {
                pool.each(pieces, 1, |worker, _| assert!(worker < pieces));
            }
        }
        let met = AtomicUsize::new(0);
        pool.each(6, 1, |_, _| {
            // All six must meet: those that had no work before are still there.
            met.fetch_add(1, SeqCst);
            while met.load(SeqCst) < 6 {
                thread::yield_now();
            }
        });
    }

    /// The hardware threads that this thread may use.
    #[cfg(target_os = "linux")]
    fn allowed() -> Vec<usize> {
        // SAFETY: a set of cores is an array of numbers, and as large as is said; numbers are below its bits.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            let size = size_of::<libc::cpu_set_t>();
            assert_eq!(libc::sched_getaffinity(0, size, &raw mut set), 0);
            (0..8 * size)
                .filter(|&i| libc::CPU_ISSET(i, &set))
                .collect()
        }
    }

    /// What each of `n` workers may use.
    #[cfg(target_os = "linux")]
    fn allowed_to_workers(pool: &Pool) -> Vec<Vec<usize>> {
        let n = pool.n_workers();
        let (met, all) = (AtomicUsize::new(0), Mutex::new(vec![Vec::new(); n]));
        pool.run(&|worker| {
            all.lock().unwrap()[worker] = allowed();
            met.fetch_add(1, SeqCst);
            while met.load(SeqCst) < n {
                thread::yield_now();
            }
        });
        all.into_inner().unwrap()
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_pinned_thread_runs_on_one_core_and_the_caller_on_any() {
        let before = allowed();
        let pool = Pool::new(3);
        pool.pin().expect("Linux binds threads");
        let all = allowed_to_workers(&pool);
        assert_eq!(all[0], before);
        assert!(all[1..].iter().all(|of| of.len() == 1), "{all:?}");
        assert_eq!(allowed(), before);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn threads_stay_near_one_memory_node_where_there_are_several() {
        let before = allowed();
        let pool = Pool::new(4);
        pool.bind_to_nodes().expect("Linux binds threads");
        let all = allowed_to_workers(&pool);
        assert_eq!(all[0], before);
        let nodes = crate::cores::memory_nodes();
        if nodes == 1 {
            assert!(all.iter().all(|of| *of == before), "{all:?}");
            return;
        }
        let seats = crate::cores::seats(4);
        for (seat, of) in seats.iter().zip(&all).skip(1) {
            assert_eq!(seat.node.as_ref(), Some(of));
            assert!(of.len() < before.len());
        }
    }

    #[test]
    fn what_to_prefetch_is_kept_for_workers_that_missed_the_job_that_named_it() {
        let pool = Pool::new(2);
        let weights = |bytes| {
            let isa = Detected::new(Isa::Scalar).expect("portable code");
            let mut weights = Weights::new(isa);
            weights.push(bytes, 64);
            Arc::new(weights)
        };
        let [first, second] = [weights(&[0; 100]), weights(&[0; 200])];
        pool.each_then_prefetch(Some(first.clone()), 4, 1, |_, _| {});
        pool.each(4, 1, |_, _| {});
        assert_eq!(Arc::strong_count(&first), 2);
        pool.each_then_prefetch(Some(second.clone()), 4, 1, |_, _| {});
        assert_eq!([&first, &second].map(Arc::strong_count), [1, 2]);
    }

    #[test]
    fn parked_workers_wake() {
        let pool = Pool::new(3);
        for _ in 0..20 {
            let met = AtomicUsize::new(0);
            // All three must meet, so none may sleep through the job.
            pool.run(&|_| {
                met.fetch_add(1, SeqCst);
                while met.load(SeqCst) < 3 {
                    thread::yield_now();
                }
            });
            thread::sleep(std::time::Duration::from_millis(3));
        }
    }

    #[test]
    fn a_panic_on_any_worker_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(3);
        for round in 0..200 {
            let caught = catch_unwind(AssertUnwindSafe(|| {
                pool.each(64, 1, |_, range| {
                    assert_ne!(range.start, round % 64, "piece {round}")
                });
            }));
            let message = caught.expect_err("a piece panics");
            assert!(
                message
                    .downcast_ref::<String>()
                    .is_some_and(|m| m.contains("piece"))
            );
            let sum = AtomicUsize::new(0);
            pool.each(10, 1, |_, range| {
                sum.fetch_add(range.start, Relaxed);
            });
            assert_eq!(sum.load(Relaxed), 45);
        }
    }

    #[test]
    fn several_callers_take_turns() {
        let pool = Pool::new(2);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        let sum = AtomicUsize::new(0);
                        pool.each(8, 1, |_, range| {
                            sum.fetch_add(range.start, Relaxed);
                        });
                        assert_eq!(sum.load(Relaxed), 28);
                    }
                });
            }
        });
    }
}

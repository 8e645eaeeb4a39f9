//! A fixed set of threads that work on one job at a time.
//!
//! The caller is worker 0. The others spin for a while after each job, because during a step the
//! next one comes within microseconds, and then park. Workers claim a job's work in pieces, so it
//! ends with its last piece: a worker that wakes too late finds the job closed and has missed
//! nothing, and no job waits until every thread has been scheduled.
//!
//! No queue, no futures, no allocation per job.

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

/// The most shares that a job is cut into. Where there are more workers, several begin with the
/// same share.
const SHARES: usize = 32;

/// How many pieces of a share were claimed; on a cache line of its own.
#[repr(align(64))]
struct Claimed(AtomicUsize);

/// A job, which each worker that takes it calls with its own number.
type Job = dyn Fn(usize) + Sync;

/// The bit of [`Shared::state`] that says that workers may take the current job.
const OPEN: u64 = 1 << 31;

/// What the caller and the threads share.
struct Shared {
    /// `generation << 32 | OPEN | n`: the number of the current job, whether it is open, and
    /// how many workers took it.
    state: AtomicU64,
    /// How many of the workers that took the current job are done with it.
    left: AtomicUsize,
    /// Written before a generation opens, read by workers that took it.
    job: UnsafeCell<Option<*const Job>>,
    /// For each worker, whether it is parked or about to be.
    parked: Vec<AtomicBool>,
    /// The first panic of the current job.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// Whether the threads are to end.
    stop: AtomicBool,
}

// SAFETY: `job` is written only by the holder of `Pool::turn` while no worker has
// taken a job, and read only by workers that took the open generation.
unsafe impl Sync for Shared {}
// SAFETY: the pointer is followed only while `Pool::run` keeps its target alive.
unsafe impl Send for Shared {}

impl Shared {
    /// Keeps a panic for the caller of the job, if it is the job's first.
    fn keep(&self, panic: Box<dyn Any + Send>) {
        let mut first = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
        first.get_or_insert(panic);
    }

    /// Takes one job after the other as worker `id`, until the pool is dropped.
    fn work(&self, id: usize) {
        let mut seen = 0;
        loop {
            let mut spins = 0;
            let mut state = self.state.load(Acquire);
            while state >> 32 == seen {
                spins += 1;
                if spins > SPINS {
                    self.parked[id].store(true, SeqCst);
                    if self.state.load(SeqCst) >> 32 == seen {
                        thread::park();
                    }
                    self.parked[id].store(false, SeqCst);
                } else {
                    std::hint::spin_loop();
                }
                state = self.state.load(Acquire);
            }
            if self.stop.load(Acquire) {
                return;
            }
            seen = state >> 32;
            while state >> 32 == seen && state & OPEN != 0 {
                match self
                    .state
                    .compare_exchange_weak(state, state + 1, Acquire, Acquire)
                {
                    Ok(_) => {
                        // SAFETY: this worker is counted in the open generation, so
                        // `Pool::run` waits for it and the job is alive.
                        let job =
                            unsafe { &*(*self.job.get()).expect("an open generation has a job") };
                        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(id))) {
                            self.keep(panic);
                        }
                        self.left.fetch_add(1, Release);
                        break;
                    }
                    Err(now) => state = now,
                }
            }
        }
    }
}

/// A fixed set of threads.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    /// The threads of all workers but worker 0.
    threads: Vec<JoinHandle<()>>,
    /// Held by the caller whose job runs.
    turn: Mutex<()>,
}

impl Pool {
    /// Starts `n` workers, the caller among them.
    pub(crate) fn new(n: usize) -> Self {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            left: AtomicUsize::new(0),
            job: UnsafeCell::new(None),
            parked: (0..n).map(|_| AtomicBool::new(false)).collect(),
            panic: Mutex::new(None),
            stop: AtomicBool::new(false),
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
            turn: Mutex::new(()),
        }
    }

    /// Binds each thread but the caller's to one core, in order of those that this
    /// process may use; the first is left to the caller.
    ///
    /// # Errors
    ///
    /// If the system refuses or has no way to.
    #[cfg(target_os = "linux")]
    pub(crate) fn pin(&self) -> std::io::Result<()> {
        use std::os::unix::thread::JoinHandleExt;
        const SIZE: usize = size_of::<libc::cpu_set_t>();
        // SAFETY: a set of cores is an array of numbers, which may all be zero.
        let mut allowed: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        // SAFETY: the set has `SIZE` bytes to write.
        if unsafe { libc::sched_getaffinity(0, SIZE, &raw mut allowed) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: the numbers of cores that are asked for are below the bits of the set.
        let has = |&core: &usize| unsafe { libc::CPU_ISSET(core, &allowed) };
        let cores: Vec<usize> = (0..8 * SIZE).filter(has).collect();
        for (i, thread) in self.threads.iter().enumerate() {
            // SAFETY: a set of cores may be all zeros, and the core is from a set of the same size.
            let one = unsafe {
                let mut one: libc::cpu_set_t = std::mem::zeroed();
                libc::CPU_SET(cores[(i + 1) % cores.len()], &mut one);
                one
            };
            // SAFETY: a thread exists until its handle is joined, and the set has `SIZE` bytes.
            let error = unsafe {
                libc::pthread_setaffinity_np(thread.as_pthread_t(), SIZE, &raw const one)
            };
            if error != 0 {
                return Err(std::io::Error::from_raw_os_error(error));
            }
        }
        Ok(())
    }

    #[cfg(not(target_os = "linux"))]
    pub(crate) fn pin(&self) -> std::io::Result<()> {
        Err(std::io::ErrorKind::Unsupported.into())
    }

    /// Workers, the caller included.
    pub(crate) fn n_workers(&self) -> usize {
        self.threads.len() + 1
    }

    /// Calls `job` once on this thread and at most once on each other worker,
    /// and returns when all calls have. Jobs must claim their work in pieces.
    ///
    /// # Panics
    ///
    /// With the panic of the first call that panicked, after all have ended.
    pub(crate) fn run(&self, job: &(dyn Fn(usize) + Sync + '_)) {
        if self.threads.is_empty() {
            return job(0);
        }
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. The generation is closed and every
        // worker that took it has left before this function returns or unwinds.
        let alive: *const Job =
            unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const Job>(job) };
        // SAFETY: no generation is open and `turn` is held.
        unsafe { *shared.job.get() = Some(alive) };
        shared.left.store(0, Relaxed);
        let generation = (shared.state.load(Relaxed) >> 32) + 1;
        shared.state.store(generation << 32 | OPEN, SeqCst);
        self.wake();
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(0))) {
            shared.keep(panic);
        }
        let taken = shared.state.fetch_and(!OPEN, SeqCst) as u32 & !(OPEN as u32);
        let mut spins = 0;
        while shared.left.load(Acquire) != taken as usize {
            spins += 1;
            if spins > SPINS {
                thread::yield_now();
            } else {
                std::hint::spin_loop();
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
        let chunk = chunk.max(1);
        if n <= chunk || self.threads.is_empty() {
            // In the same pieces as below, for callers that rely on their size.
            for start in (0..n).step_by(chunk) {
                piece(0, start..(start + chunk).min(n));
            }
            return;
        }
        let pieces = n.div_ceil(chunk);
        let shares = self.n_workers().min(SHARES);
        let claimed = [const { Claimed(AtomicUsize::new(0)) }; SHARES];
        let start_of = |share: usize| share * pieces / shares;
        self.run(&|worker| {
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

    /// Wakes the workers that are parked.
    fn wake(&self) {
        for (parked, thread) in self.shared.parked[1..].iter().zip(&self.threads) {
            if parked.load(SeqCst) {
                thread.thread().unpark();
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        self.shared.state.fetch_add(1 << 32, SeqCst);
        self.wake();
        for thread in self.threads.drain(..) {
            // A worker catches its job's panics; there is nothing left to report.
            let _ = thread.join();
        }
    }
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

    #[cfg(target_os = "linux")]
    #[test]
    fn a_pinned_thread_runs_on_one_core_and_the_caller_on_any() {
        let cores = || {
            // SAFETY: a set of cores is an array of numbers, and as large as is said.
            unsafe {
                let mut set: libc::cpu_set_t = std::mem::zeroed();
                let size = size_of::<libc::cpu_set_t>();
                assert_eq!(libc::sched_getaffinity(0, size, &raw mut set), 0);
                libc::CPU_COUNT(&set)
            }
        };
        let before = cores();
        let pool = Pool::new(3);
        pool.pin().expect("Linux binds threads");
        let met = AtomicUsize::new(0);
        pool.run(&|worker| {
            assert_eq!(cores(), if worker == 0 { before } else { 1 });
            met.fetch_add(1, SeqCst);
            while met.load(SeqCst) < 3 {
                thread::yield_now();
            }
        });
        assert_eq!(cores(), before);
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

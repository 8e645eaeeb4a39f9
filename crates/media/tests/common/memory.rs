//! Memory of a test, by an allocator that counts.

use std::sync::{Mutex, MutexGuard, PoisonError};

use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATED: PeakAlloc = PeakAlloc;

/// Holds the others up: tests measure memory one after the other.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What `work` gives, and the most memory that it took beside what was there.
pub(crate) fn measured<T>(work: impl FnOnce() -> T) -> (T, usize) {
    ALLOCATED.reset_peak_usage();
    let before = ALLOCATED.current_usage();
    let done = work();
    (done, ALLOCATED.peak_usage().saturating_sub(before))
}

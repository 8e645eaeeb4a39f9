//! The clock of the examples.

use cpu::Cpu;

/// A clock in microseconds: this thread's processor time if it works alone.
pub(crate) fn now(cpu: &Cpu) -> f64 {
    let clock = match cpu.threads() {
        1 => libc::CLOCK_THREAD_CPUTIME_ID,
        _ => libc::CLOCK_MONOTONIC,
    };
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: writes the time it is given.
    let failed = unsafe { libc::clock_gettime(clock, &mut time) };
    assert_eq!(failed, 0, "the system has both clocks");
    time.tv_sec as f64 * 1e6 + time.tv_nsec as f64 / 1e3
}

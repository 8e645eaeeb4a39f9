//! Signals: Ctrl-C, and the request to terminate.

use crate::{INTERRUPTED, TERMINATED};
use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The time between two looks at another program that the signals are for.
const POLL: std::time::Duration = std::time::Duration::from_millis(20);

/// The signals that have come.
///
/// The first signal sets `interrupted`. A signal that finds it set ends the program, so the
/// caller clears it once it has reacted. While `idle` is set there is nothing to interrupt,
/// and a signal ends the program as if it were not handled.
#[derive(Clone, Debug, Default)]
pub(crate) struct Interrupts {
    interrupted: Arc<AtomicBool>,
    idle: Arc<AtomicBool>,
    terminated: Arc<AtomicBool>,
}

/// The exit code of a program that `signal` has ended, as shells define it.
fn exit_code(signal: i32) -> u8 {
    if signal == SIGTERM {
        TERMINATED
    } else {
        INTERRUPTED
    }
}

impl Interrupts {
    /// Handles Ctrl-C.
    pub(crate) fn of_ctrl_c() -> Result<Self> {
        Interrupts::of(&[SIGINT])
    }

    /// Handles Ctrl-C and the request to terminate (SIGTERM).
    pub(crate) fn of_all() -> Result<Self> {
        Interrupts::of(&[SIGINT, SIGTERM])
    }

    /// Handles these signals.
    fn of(signals: &[i32]) -> Result<Self> {
        let all = Interrupts::default();
        for &signal in signals {
            // In this order: each must see the flags as the signals before left them.
            flag::register_conditional_default(signal, all.idle.clone())
                .and_then(|_| {
                    flag::register_conditional_shutdown(
                        signal,
                        exit_code(signal).into(),
                        all.interrupted.clone(),
                    )
                })
                .and_then(|_| {
                    if signal == SIGTERM {
                        flag::register(signal, all.terminated.clone())?;
                    }
                    flag::register(signal, all.interrupted.clone())
                })
                .context("cannot handle signals")?;
        }
        Ok(all)
    }

    /// Whether a signal has come since the last [`Interrupts::clear`].
    pub(crate) fn is_set(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed)
    }

    /// The exit code of the program for the signal that has come.
    pub(crate) fn exit_code(&self) -> u8 {
        exit_code(if self.terminated.load(Ordering::Relaxed) {
            SIGTERM
        } else {
            SIGINT
        })
    }

    /// Forgets a signal that has come.
    pub(crate) fn clear(&self) {
        self.interrupted.store(false, Ordering::Relaxed);
    }

    /// Waits until `look` finds something. Signals that come until then are for another program.
    pub(crate) fn ignored_until<T>(
        &self,
        mut look: impl FnMut() -> std::io::Result<Option<T>>,
    ) -> std::io::Result<T> {
        loop {
            self.clear();
            if let Some(found) = look()? {
                return Ok(found);
            }
            std::thread::sleep(POLL);
        }
    }

    /// Does `work` during which a signal ends the program.
    pub(crate) fn while_idle<T>(&self, work: impl FnOnce() -> T) -> T {
        self.idle.store(true, Ordering::Relaxed);
        let result = work();
        self.idle.store(false, Ordering::Relaxed);
        result
    }
}

//! What is known of requests while they run.
//!
//! ```text
//! engine's thread ─ Inlet ─→ Run ←─ dialect, GET /slots
//! ```
//!
//! A slot is one of the places in the engine's batch: a request takes the first that is free when
//! the engine admits it, and leaves it when it ends.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use engine::{Request, Sampling};

/// A request on its way through the engine.
#[derive(Debug)]
pub(crate) struct Run {
    /// The number of the request since the server has started.
    pub(crate) id: u64,
    /// How its tokens are chosen, without lists of tokens.
    pub(crate) sampling: Sampling,
    /// Tokens to write, at most.
    pub(crate) max_tokens: Option<usize>,
    submitted: Instant,
    admitted: OnceLock<Admitted>,
    /// When the first token came.
    first: OnceLock<Instant>,
    written: AtomicUsize,
    has_line_break: AtomicBool,
}

/// What is known of a request once it runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Admitted {
    /// The request's slot.
    pub(crate) slot: usize,
    /// Tokens of its prompt.
    pub(crate) prompt_tokens: usize,
    /// Tokens of the prompt that were found in the prefix cache.
    pub(crate) cached_tokens: usize,
    at: Instant,
}

/// How far a request is, in milliseconds and tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SoFar {
    /// Milliseconds that it has waited for its turn.
    pub(crate) queued_ms: f64,
    /// Tokens of its prompt.
    pub(crate) prompt_tokens: usize,
    /// Tokens of the prompt that were found in the prefix cache.
    pub(crate) cached_tokens: usize,
    /// Milliseconds for the prompt.
    pub(crate) prompt_ms: f64,
    /// Tokens written.
    pub(crate) written: usize,
    /// Milliseconds since the first of them.
    pub(crate) written_ms: f64,
}

impl Run {
    /// What the engine has said when it took the request; nothing before.
    pub(crate) fn admitted(&self) -> Option<Admitted> {
        self.admitted.get().copied()
    }

    /// Milliseconds since the request was admitted.
    pub(crate) fn ms(&self) -> f64 {
        let admitted = self.admitted.get();
        admitted.map_or(0.0, |admitted| ms(admitted.at, Instant::now()))
    }

    /// Tokens written.
    pub(crate) fn written(&self) -> usize {
        self.written.load(Ordering::Relaxed)
    }

    /// Whether the text has a line break.
    pub(crate) fn has_line_break(&self) -> bool {
        self.has_line_break.load(Ordering::Relaxed)
    }

    /// How far the request is.
    pub(crate) fn so_far(&self) -> SoFar {
        let now = Instant::now();
        let admitted = self.admitted.get();
        let begun = admitted.map_or(now, |admitted| admitted.at);
        let first = self.first.get().copied();
        SoFar {
            queued_ms: ms(self.submitted, begun),
            prompt_tokens: admitted.map_or(0, |admitted| admitted.prompt_tokens),
            cached_tokens: admitted.map_or(0, |admitted| admitted.cached_tokens),
            prompt_ms: ms(begun, first.unwrap_or(now)),
            written: self.written(),
            written_ms: first.map_or(0.0, |first| ms(first, now)),
        }
    }

    /// Notes that tokens were written, and whether there is a line break in their text.
    pub(crate) fn wrote(&self, n_tokens: usize, has_line_break: bool) {
        self.first.get_or_init(Instant::now);
        self.written.fetch_add(n_tokens, Ordering::Relaxed);
        if has_line_break {
            self.has_line_break.store(true, Ordering::Relaxed);
        }
    }
}

fn ms(from: Instant, to: Instant) -> f64 {
    to.saturating_duration_since(from).as_secs_f64() * 1e3
}

/// The slots of a server.
#[derive(Debug)]
pub(crate) struct Slots {
    /// What runs in each slot.
    runs: Mutex<Vec<Option<Arc<Run>>>>,
    submitted: AtomicU64,
}

impl Slots {
    /// `n` slots, in which nothing runs.
    pub(crate) fn new(n: usize) -> Self {
        Slots {
            runs: Mutex::new(vec![None; n]),
            submitted: AtomicU64::new(0),
        }
    }

    /// A request that is being submitted.
    pub(crate) fn run(&self, request: &Request) -> Arc<Run> {
        let of = &request.sampling;
        let sampling = Sampling {
            logit_bias: Vec::new(),
            suppress: Vec::new(),
            dry_breakers: Default::default(),
            ..of.clone()
        };
        Arc::new(Run {
            id: self.submitted.fetch_add(1, Ordering::Relaxed),
            sampling,
            max_tokens: request.max_tokens,
            submitted: Instant::now(),
            admitted: OnceLock::new(),
            first: OnceLock::new(),
            written: AtomicUsize::new(0),
            has_line_break: AtomicBool::new(false),
        })
    }

    /// Gives `run` a slot, unless it has one already.
    pub(crate) fn admit(&self, run: &Arc<Run>, prompt_tokens: usize, cached_tokens: usize) {
        run.admitted.get_or_init(|| {
            let mut runs = self.runs();
            let free = runs.iter().position(Option::is_none);
            let slot = free.unwrap_or_else(|| {
                runs.push(None);
                runs.len() - 1
            });
            runs[slot] = Some(run.clone());
            Admitted {
                slot,
                prompt_tokens,
                cached_tokens,
                at: Instant::now(),
            }
        });
    }

    /// Frees the slot of `run`, if it has one.
    pub(crate) fn leave(&self, run: &Run) {
        if let Some(admitted) = run.admitted() {
            self.runs()[admitted.slot] = None;
        }
    }

    /// What runs in each slot.
    pub(crate) fn all(&self) -> Vec<Option<Arc<Run>>> {
        self.runs().clone()
    }

    fn runs(&self) -> MutexGuard<'_, Vec<Option<Arc<Run>>>> {
        self.runs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_has_the_first_free_slot_while_it_runs() {
        let slots = Slots::new(2);
        let [a, b, c] = [1, 2, 3].map(|token| slots.run(&Request::new(vec![token])));
        let slot = |run: &Run| run.admitted().map(|admitted| admitted.slot);
        assert_eq!((a.id, b.id, slot(&a)), (0, 1, None));
        slots.admit(&a, 10, 4);
        slots.admit(&b, 1, 0);
        slots.admit(&a, 10, 4);
        assert_eq!((slot(&a), slot(&b)), (Some(0), Some(1)));
        slots.leave(&a);
        slots.leave(&c);
        assert!(slots.all()[0].is_none() && slots.all()[1].is_some());
        slots.admit(&c, 1, 0);
        assert_eq!(slot(&c), Some(0));
        assert_eq!(a.so_far().cached_tokens, 4);
    }
}

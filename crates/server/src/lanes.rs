//! Lanes: where requests wait to be read, rendered and tokenized.
//!
//! Reading makes many bytes of memory from few, and tokenizing takes a core for half a
//! second a megabyte. So both are done by few requests at a time, and by size: a small
//! request waits for small ones only. Who waits holds the bytes that were sent and
//! nothing else.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::limits::{LONG_BODY_BYTES, LONG_WORKERS, Limits, MIDDLE_WORKERS, SHORT_BODY_BYTES};

/// The right to work on the text of a request.
pub(crate) type Worker = OwnedSemaphorePermit;

/// A lane for each size of request.
pub(crate) struct Lanes {
    short: Arc<Semaphore>,
    middle: Arc<Semaphore>,
    long: Arc<Semaphore>,
}

impl Lanes {
    pub(crate) fn new(limits: &Limits) -> Self {
        let lane = |workers: usize| Arc::new(Semaphore::new(workers));
        Lanes {
            short: lane(limits.text_workers.max(1)),
            middle: lane(MIDDLE_WORKERS),
            long: lane(LONG_WORKERS),
        }
    }

    /// Waits for the turn of a request of `bytes`.
    pub(crate) async fn enter(&self, bytes: usize) -> Worker {
        let lane = if bytes <= SHORT_BODY_BYTES {
            &self.short
        } else if bytes <= LONG_BODY_BYTES {
            &self.middle
        } else {
            &self.long
        };
        lane.clone().acquire_owned().await.expect("never closed")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn a_request_waits_for_those_of_its_size_only() {
        let sizes = [1, SHORT_BODY_BYTES + 1, LONG_BODY_BYTES + 1];
        for busy in sizes {
            let lanes = Lanes::new(&Limits::default());
            let enter = |bytes| lanes.enter(bytes).now_or_never();
            let mut working = Vec::new();
            while let Some(worker) = enter(busy) {
                working.push(worker);
            }
            for size in sizes {
                assert_eq!(enter(size).is_some(), size != busy, "{size} beside {busy}");
            }
            working.pop();
            assert!(enter(busy).is_some());
        }
    }
}

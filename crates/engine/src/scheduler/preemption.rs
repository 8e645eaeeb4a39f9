//! Preemption: who gives its memory to others where there is too little for all.
//!
//! ```text
//! before a round     too few free pages for its rows      the running request of greatest rank goes
//! at admission       no place or pages for a request      those of a greater priority number go
//! ```
//!
//! The rank is the priority, then the order of arrival ([`crate::queue::Rank`]). A request that goes waits, before
//! all of its priority that have not run yet, with prompt and text so far. What it remembers stays in the
//! prefix cache until its pages are wanted, and the rest runs again. Its text is the same.
//!
//! Everybody gets on: before a round the request of least rank never goes, and alone it has room for a
//! whole context. A request makes room for one of smaller priority only, so two never push each other
//! out in turn.

use super::Scheduler;
use crate::delivery::Running;
use crate::request::Event;
use speculate::Stream;
use std::sync::atomic::Ordering;

impl Scheduler {
    /// Preempts requests until the others have pages for a round of at most `chunk` rows of each prompt.
    pub(super) fn make_room(&mut self, chunk: usize) {
        loop {
            let running: Vec<&Stream> = self.running.iter().map(|r| &r.stream).collect();
            if self.speculator.make_room(&running, chunk) || running.len() == 1 {
                return;
            }
            let Some(last) = self.last() else { return };
            self.preempt(last, "too few free pages");
        }
    }

    /// Preempts requests of greater priority numbers than that of the waiting request at `index`, until
    /// this one has room. False, and nobody goes, if it would have none anyway.
    pub(super) fn preempt_for(&mut self, index: usize) -> bool {
        let priority = self.waiting.rank(index).priority;
        let stays = |r: &&Running| r.rank.priority <= priority || r.stream.finish().is_some();
        let staying = self.running.iter().filter(stays);
        let staying: Vec<&Stream> = staying.map(|r| &r.stream).collect();
        if staying.len() == self.running.len() || !self.has_room_beside(index, &staying) {
            return false;
        }
        while !self.has_room(index) {
            let Some(last) = self.last() else { break };
            self.preempt(last, "a request of higher priority");
        }
        true
    }

    /// Which running request is the first to go: the one of greatest rank that has not ended.
    fn last(&self) -> Option<usize> {
        let going = self.running.iter().enumerate();
        let going = going.filter(|(_, running)| running.stream.finish().is_none());
        let last = going.max_by_key(|(_, running)| running.rank);
        last.map(|(i, _)| i)
    }

    /// Has running request `i` wait, for this reason.
    fn preempt(&mut self, i: usize, reason: &str) {
        let mut running = self.running.remove(i);
        let keeps = self.reuse && running.embedding.is_none();
        self.speculator.preempt(&mut running.stream, keeps);
        tracing::debug!(
            reason,
            priority = running.rank.priority,
            tokens = running.stream.tokens().len(),
            times = running.stream.n_preemptions(),
            "request preempted"
        );
        self.counters.running.fetch_sub(1, Ordering::AcqRel);
        self.counters.waiting.fetch_add(1, Ordering::AcqRel);
        self.counters.preemptions.fetch_add(1, Ordering::Relaxed);
        self.waiting.push_preempted(running);
    }

    /// Has a preempted request go on.
    pub(super) fn go_on(&mut self, mut running: Running) {
        let others: Vec<&Stream> = self.running.iter().map(|r| &r.stream).collect();
        let stream = &mut running.stream;
        match self.speculator.go_on(stream, running.reuses, &others) {
            Ok(()) => {
                self.counters.running.fetch_add(1, Ordering::AcqRel);
                self.running.push(running);
            }
            Err(full) => {
                self.counters.failed.fetch_add(1, Ordering::Relaxed);
                let mut reply = running.take_reply();
                self.speculator.close(running.stream);
                reply.tell(Event::Failed(full.to_string()));
            }
        }
    }
}

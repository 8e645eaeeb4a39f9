//! What the engine has done: numbers that anybody may read while it runs.

use crate::multimodal::MediaCounts;
use crate::request::{DrafterCounts, Speculation};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// What the engine has done since it started.
#[derive(Debug, Default)]
pub struct Counters {
    /// Requests that run now.
    pub running: AtomicUsize,
    /// Requests that wait now, those that were preempted among them.
    pub waiting: AtomicUsize,
    /// How often a request that ran had to give its memory to others and wait.
    pub preemptions: AtomicU64,
    /// Requests that have ended by themselves.
    pub finished: AtomicU64,
    /// Requests that were cancelled.
    pub cancelled: AtomicU64,
    /// Requests that failed.
    pub failed: AtomicU64,
    /// Prompt tokens.
    pub prompt_tokens: AtomicU64,
    /// Prompt tokens that were looked for in the prefix cache.
    pub cache_queries: AtomicU64,
    /// Prompt tokens that were found in the prefix cache.
    pub cached_tokens: AtomicU64,
    /// Tokens written.
    pub completion_tokens: AtomicU64,
    /// Drafts verified.
    pub drafts: AtomicU64,
    /// Tokens drafted.
    pub drafted: AtomicU64,
    /// Draft tokens accepted.
    pub accepted: AtomicU64,
    /// Draft tokens accepted, by position.
    pub accepted_by_position: [AtomicU64; backend::MAX_TENTATIVE],
    /// Tokens drafted that a grammar left no choice about. With those that drafters have guessed they are
    /// [`Counters::drafted`].
    pub forced: AtomicU64,
    /// Forced tokens accepted. With the accepted guesses of drafters they are [`Counters::accepted`].
    pub forced_accepted: AtomicU64,
    /// What each drafter has guessed.
    pub by_drafter: DrafterTally,
    /// Pages of keys and values in use by requests that run.
    pub pages_used: AtomicUsize,
    /// Pages of keys and values.
    pub pages: AtomicUsize,
    /// Texts in the prefix cache that have ended.
    pub kept_texts: AtomicUsize,
    /// Bytes of keys, values and states that only those texts have.
    pub kept_bytes: AtomicUsize,
    /// Texts that made room in the prefix cache, whole or in part.
    pub evicted_texts: AtomicU64,
    /// Snapshots that made room in the prefix cache while their texts stayed.
    pub evicted_snapshots: AtomicU64,
    /// Texts of the prefix cache on disk that can be read.
    pub disk_files: AtomicUsize,
    /// Bytes of the prefix cache's files on disk.
    pub disk_bytes: AtomicUsize,
    /// Texts that were read from disk for a request.
    pub disk_hits: AtomicU64,
    /// Bytes of keys, values and states that were read from disk.
    pub disk_read_bytes: AtomicU64,
    /// Bytes of files that were written.
    pub disk_written_bytes: AtomicU64,
    /// Files on disk that were damaged, or of another form.
    pub disk_discarded_files: AtomicU64,
    /// Pictures and parts of clips, by how their embeddings were found.
    pub media: MediaCounts,
}

/// What each drafter has guessed, over all requests that have ended.
#[derive(Debug, Default)]
pub struct DrafterTally(Mutex<Vec<DrafterCounts>>);

impl DrafterTally {
    /// Counts of each drafter that has guessed, in the order in which they first did.
    pub fn get(&self) -> Vec<DrafterCounts> {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        counts.clone()
    }

    /// Adds what the drafters of a request have guessed.
    fn add(&self, request: &[DrafterCounts]) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        DrafterCounts::add(&mut all, request);
    }
}

impl Counters {
    /// Adds what speculation did for a request that has ended.
    pub(crate) fn add_speculation(&self, record: &Speculation) {
        let drafts = record.by_position.first().map_or(0, |p| p.drafted);
        for (counter, more) in [
            (&self.drafts, drafts),
            (&self.drafted, record.drafted),
            (&self.accepted, record.accepted),
            (&self.forced, record.forced),
            (&self.forced_accepted, record.forced_accepted),
        ] {
            counter.fetch_add(more, Ordering::Relaxed);
        }
        for (counter, position) in self.accepted_by_position.iter().zip(&record.by_position) {
            counter.fetch_add(position.accepted, Ordering::Relaxed);
        }
        self.by_drafter.add(&record.by_drafter);
    }

    /// Notes that `n` requests wait no longer that an engine has not taken. An engine that ends meanwhile has
    /// set the gauge to 0 already.
    pub(crate) fn leave_queue(&self, n: usize) {
        let rest = |waiting: usize| Some(waiting.saturating_sub(n));
        let update = self
            .waiting
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, rest);
        debug_assert!(update.is_ok(), "there is always a rest");
    }
}

/// The gauges of an engine's thread: they are 0 when it has ended, by a panic too.
#[derive(Debug)]
pub(crate) struct GaugesOfThread(pub(crate) Arc<Counters>);

impl Drop for GaugesOfThread {
    fn drop(&mut self) {
        let of = &self.0;
        for gauge in [
            &of.running,
            &of.waiting,
            &of.pages_used,
            &of.pages,
            &of.kept_texts,
            &of.kept_bytes,
            &of.disk_files,
            &of.disk_bytes,
        ] {
            gauge.store(0, Ordering::Release);
        }
    }
}

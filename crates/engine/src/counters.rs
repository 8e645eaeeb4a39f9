//! What the engine has done: numbers that anybody may read while it runs.

use crate::multimodal::MediaCounts;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

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

impl Counters {
    /// Sets all gauges to 0: no engine runs.
    pub(crate) fn clear_gauges(&self) {
        for gauge in [
            &self.running,
            &self.waiting,
            &self.pages_used,
            &self.pages,
            &self.kept_texts,
            &self.kept_bytes,
            &self.disk_files,
            &self.disk_bytes,
        ] {
            gauge.store(0, Ordering::Release);
        }
    }
}

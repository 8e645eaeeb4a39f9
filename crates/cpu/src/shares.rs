//! How workers share the pieces of a job: each begins with pieces of its own.

/// The most shares that a job is cut into. Where there are more workers, several begin with the
/// same share.
pub(crate) const MAX_SHARES: usize = 32;

/// How many shares a job is cut into for `n_workers`. Worker `i` begins with share `i % n_shares`.
pub(crate) fn n_shares(n_workers: usize) -> usize {
    n_workers.min(MAX_SHARES)
}

/// The first of `pieces` that belongs to share `share` of `shares`.
pub(crate) fn share_start(share: usize, shares: usize, pieces: usize) -> usize {
    share * pieces / shares
}

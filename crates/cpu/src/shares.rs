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

/// The order in which a job that multiplies several matrices numbers its pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PieceOrder {
    /// All pieces of the first matrix, then those of the second, and so on.
    Sequential,
    /// Share 0 of every matrix, then share 1 of every matrix, and so on, for this number of shares. A worker then begins
    /// with the part of each matrix that it packed, give or take a piece of each.
    ByShare(usize),
}

/// Which matrix piece `i` of a job belongs to, and which piece of that matrix it is. The job has `counts` pieces of each
/// matrix.
#[inline]
pub(crate) fn piece_of(
    i: usize,
    order: PieceOrder,
    counts: impl Iterator<Item = usize> + Clone,
) -> (usize, usize) {
    match order {
        PieceOrder::Sequential => {
            let mut left = i;
            for (matrix, n) in counts.enumerate() {
                if left < n {
                    return (matrix, left);
                }
                left -= n;
            }
            unreachable!("a piece of the job");
        }
        PieceOrder::ByShare(shares) => piece_by_share(i, shares, counts),
    }
}

/// [`piece_of`] in the order [`PieceOrder::ByShare`].
fn piece_by_share(
    i: usize,
    shares: usize,
    counts: impl Iterator<Item = usize> + Clone,
) -> (usize, usize) {
    let start = |share| -> usize { counts.clone().map(|n| share_start(share, shares, n)).sum() };
    let total: usize = counts.clone().sum();
    debug_assert!(i < total, "a piece of the job");
    let mut share = i * shares / total;
    while start(share) > i {
        share -= 1;
    }
    while start(share + 1) <= i {
        share += 1;
    }
    let mut left = i - start(share);
    for (matrix, n) in counts.enumerate() {
        let first = share_start(share, shares, n);
        let own = share_start(share + 1, shares, n) - first;
        if left < own {
            return (matrix, first + left);
        }
        left -= own;
    }
    unreachable!("a share is as long as its parts");
}

/// [`piece_of`] where each of `matrices` matrices has `count` pieces.
pub(crate) fn piece_of_equal(
    i: usize,
    order: PieceOrder,
    matrices: usize,
    count: usize,
) -> (usize, usize) {
    let PieceOrder::ByShare(shares) = order else {
        return (i / count, i % count);
    };
    // Of each matrix, the share that has piece `i / matrices` of it, if the matrices' pieces are taken in turn.
    let mut share = i / matrices * shares / count;
    let start = |share| share_start(share, shares, count);
    while start(share + 1) * matrices <= i {
        share += 1;
    }
    let own = start(share + 1) - start(share);
    let left = i - start(share) * matrices;
    (left / own, start(share) + left % own)
}

/// A worker's place if workers are sorted by the share that they begin with. From 33 workers on several begin with one
/// share; they are neighbors in this order.
pub(crate) fn rank(worker: usize, n_workers: usize) -> usize {
    let shares = n_shares(n_workers);
    let (share, turn) = (worker % shares, worker / shares);
    // The first shares have a worker more than the last ones.
    share * (n_workers / shares) + share.min(n_workers % shares) + turn
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All pieces of a job, in its order.
    fn pieces(counts: &[usize], order: PieceOrder) -> Vec<(usize, usize)> {
        let counts = counts.iter().copied();
        let all = 0..counts.clone().sum();
        all.map(|i| piece_of(i, order, counts.clone())).collect()
    }

    #[test]
    fn a_job_has_each_piece_of_each_matrix_once_and_shares_of_all() {
        for (counts, shares) in [
            (&[7][..], 3),
            (&[8, 4, 4], 4),
            (&[3, 2], 2),
            (&[1, 1], 2),
            (&[0, 5, 1, 30], 7),
            (&[40; 9], 32),
        ] {
            let sequential = pieces(counts, PieceOrder::Sequential);
            let each = |(m, &n): (usize, &usize)| (0..n).map(move |i| (m, i));
            let all: Vec<_> = counts.iter().enumerate().flat_map(each).collect();
            assert_eq!(sequential, all);
            let mut by_share = pieces(counts, PieceOrder::ByShare(shares));
            if counts.len() == 1 {
                assert_eq!(by_share, all, "one matrix is read in its order");
            }
            by_share.sort_unstable();
            assert_eq!(by_share, all, "{counts:?} in {shares}");
        }
        for (matrices, count, shares) in [(1, 7, 3), (3, 8, 4), (9, 40, 32), (5, 3, 8)] {
            for order in [PieceOrder::Sequential, PieceOrder::ByShare(shares)] {
                let all = 0..matrices * count;
                let equal: Vec<_> = all
                    .map(|i| piece_of_equal(i, order, matrices, count))
                    .collect();
                assert_eq!(equal, pieces(&vec![count; matrices], order));
            }
        }
        // Half of each matrix, and then the other halves.
        let halves = pieces(&[8, 4], PieceOrder::ByShare(2));
        let first = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)];
        assert_eq!(halves[..6], first);
    }

    #[test]
    fn workers_of_one_share_have_places_beside_each_other() {
        for n in [1, 2, 31, 32, 33, 64, 100] {
            let mut all: Vec<_> = (0..n).map(|worker| (rank(worker, n), worker)).collect();
            all.sort_unstable();
            assert!(all.iter().map(|&(rank, _)| rank).eq(0..n), "{n} workers");
            let share = |&(_, worker): &(usize, usize)| worker % n_shares(n);
            assert!(all.iter().is_sorted_by_key(share), "{n} workers");
        }
    }
}

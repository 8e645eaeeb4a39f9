//! Ids, seeds and the date.

use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

/// Bits of a seed that we choose: JSON's readers are exact up to 53.
const SEED_BITS: u32 = 53;

/// 64 bits that nobody has seen: a hash, keyed by the system's randomness, of a
/// counter. Not for secrets.
fn random() -> u64 {
    static KEY: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    static COUNT: AtomicU64 = AtomicU64::new(0);
    KEY.hash_one(COUNT.fetch_add(1, Ordering::Relaxed))
}

/// A new id, 24 hexadecimal digits.
pub(crate) fn unique() -> String {
    format!("{:016x}{:08x}", random(), random() >> 32)
}

/// A seed for a request that brings none.
pub(crate) fn random_seed() -> u64 {
    random() >> (u64::BITS - SEED_BITS)
}

/// A random number from 0 to 1.
pub(crate) fn fraction() -> f64 {
    random() as f64 / u64::MAX as f64
}

/// Seconds since 1970.
pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |d| d.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_differ_and_seeds_fit_a_double() {
        let ids: std::collections::HashSet<String> = (0..1000).map(|_| unique()).collect();
        assert_eq!(ids.len(), 1000);
        assert!(ids.iter().all(|id| id.len() == 24));
        assert!((0..1000).all(|_| random_seed() < 1 << SEED_BITS));
    }
}

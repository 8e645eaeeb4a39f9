//! The cores and hardware threads that this process may use.

use std::collections::HashSet;
use std::thread::available_parallelism;

/// How much runs at once on this machine, as far as this process may use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cores {
    /// Cores.
    pub cores: usize,
    /// Hardware threads: more than cores where a core runs several.
    pub threads: usize,
}

/// What this process may use: its CPU set and, for a container, its quota of time. Where the
/// system does not tell cores from hardware threads, each counts as a core.
pub fn cores() -> Cores {
    let threads = available_parallelism().map_or(1, usize::from);
    let cores = one_a_core(&allowed()).0.len();
    Cores {
        cores: match cores {
            0 => threads,
            n => n.min(threads),
        },
        threads,
    }
}

/// The numbers of hardware threads that this process may use: one of each core first.
pub(crate) fn in_order() -> Vec<usize> {
    let (mut first, others) = one_a_core(&allowed());
    first.extend(others);
    first
}

/// A hardware thread and what it shares a core with.
type Sibling = (usize, String);

/// One hardware thread of each core, and all others.
fn one_a_core(all: &[Sibling]) -> (Vec<usize>, Vec<usize>) {
    let mut seen = HashSet::new();
    let (first, others): (Vec<&Sibling>, Vec<&Sibling>) =
        all.iter().partition(|(_, siblings)| seen.insert(siblings));
    let ids = |of: Vec<&Sibling>| of.into_iter().map(|(id, _)| *id).collect();
    (ids(first), ids(others))
}

/// The hardware threads of this process, each with the list of those that share its core, which is
/// its own number where the system does not tell.
#[cfg(target_os = "linux")]
fn allowed() -> Vec<Sibling> {
    const SIZE: usize = size_of::<libc::cpu_set_t>();
    // SAFETY: a set of cores is an array of numbers, which may all be zero.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set has `SIZE` bytes to write.
    if unsafe { libc::sched_getaffinity(0, SIZE, &raw mut set) } != 0 {
        return Vec::new();
    }
    // SAFETY: the numbers of cores that are asked for are below the bits of the set.
    let has = |&id: &usize| unsafe { libc::CPU_ISSET(id, &set) };
    let sibling = |id: usize| {
        let file = format!("/sys/devices/system/cpu/cpu{id}/topology/thread_siblings_list");
        let siblings = std::fs::read_to_string(file);
        (id, siblings.unwrap_or_else(|_| id.to_string()))
    };
    (0..8 * SIZE).filter(has).map(sibling).collect()
}

#[cfg(not(target_os = "linux"))]
fn allowed() -> Vec<Sibling> {
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_core_comes_once_before_its_other_threads() {
        let all = |lists: &[&str]| -> Vec<Sibling> {
            (0..)
                .zip(lists.iter().map(|list| (*list).to_owned()))
                .collect()
        };
        let two_a_core = all(&["0,2", "1,3", "0,2", "1,3"]);
        assert_eq!(one_a_core(&two_a_core), (vec![0, 1], vec![2, 3]));
        let neighbors = all(&["0-1", "0-1", "2-3", "2-3", "4"]);
        assert_eq!(one_a_core(&neighbors), (vec![0, 2, 4], vec![1, 3]));
        assert_eq!(one_a_core(&all(&["0", "1"])), (vec![0, 1], vec![]));
    }

    #[test]
    fn this_machine_has_a_core_for_each_thread_or_fewer() {
        let Cores { cores, threads } = cores();
        assert!(
            1 <= cores && cores <= threads,
            "{cores} cores, {threads} threads"
        );
    }
}

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

/// How many memory nodes (NUMA) the hardware threads of this process belong to.
pub fn memory_nodes() -> usize {
    let nodes: HashSet<usize> = allowed().iter().map(|t| t.node).collect();
    nodes.len().max(1)
}

/// A hardware thread.
#[derive(Clone, Debug, PartialEq, Eq)]
struct HardwareThread {
    id: usize,
    /// The list of those that share its core, itself included.
    siblings: String,
    /// The memory node (NUMA) that is near it.
    node: usize,
}

/// Where a worker runs.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Seat {
    /// One hardware thread.
    pub(crate) thread: usize,
    /// All hardware threads of its memory node, if there are several nodes.
    pub(crate) node: Option<Vec<usize>>,
}

/// Where each of `n` workers is to run, by [`rank`](crate::shares::rank); nothing where the system does not tell. Every core
/// is used once before any is used twice. Seats next to each other are near the same memory node wherever possible, and
/// nodes get workers in proportion to their cores.
pub(crate) fn seats(n: usize) -> Vec<Seat> {
    seats_among(&allowed(), n)
}

fn seats_among(all: &[HardwareThread], n: usize) -> Vec<Seat> {
    let by_node = |mut of: Vec<HardwareThread>| {
        of.sort_by_key(|t| t.node);
        of
    };
    let (first, others) = one_a_core(all);
    let (first, others) = (by_node(first), by_node(others));
    let nodes: HashSet<usize> = all.iter().map(|t| t.node).collect();
    let in_order: Vec<&HardwareThread> = first.iter().chain(&others).collect();
    let place = |i: usize| {
        let (cores, all) = (first.len(), in_order.len());
        match nodes.len() > 1 {
            // Where not all are used, each node has its share of those that are.
            true if n < cores => i * cores / n,
            true if i >= cores && n < all => cores + (i - cores) * (all - cores) / (n - cores),
            _ => i % all,
        }
    };
    let seat = |t: &HardwareThread| Seat {
        thread: t.id,
        node: (nodes.len() > 1).then(|| {
            let near = all.iter().filter(|other| other.node == t.node);
            near.map(|other| other.id).collect()
        }),
    };
    let n = if in_order.is_empty() { 0 } else { n };
    (0..n).map(|i| seat(in_order[place(i)])).collect()
}

/// One hardware thread of each core, and all others.
fn one_a_core(all: &[HardwareThread]) -> (Vec<HardwareThread>, Vec<HardwareThread>) {
    let mut seen = HashSet::new();
    all.iter()
        .cloned()
        .partition(|t| seen.insert(t.siblings.clone()))
}

/// The hardware threads of this process. Where the system does not tell which share a core, none do; where it does not
/// tell memory nodes, there is one.
#[cfg(target_os = "linux")]
fn allowed() -> Vec<HardwareThread> {
    const SIZE: usize = size_of::<libc::cpu_set_t>();
    // SAFETY: a set of cores is an array of numbers, which may all be zero.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set has `SIZE` bytes to write.
    if unsafe { libc::sched_getaffinity(0, SIZE, &raw mut set) } != 0 {
        return Vec::new();
    }
    // SAFETY: the numbers of cores that are asked for are below the bits of the set.
    let has = |&id: &usize| unsafe { libc::CPU_ISSET(id, &set) };
    let thread = |id: usize| {
        let folder = format!("/sys/devices/system/cpu/cpu{id}");
        let siblings = std::fs::read_to_string(format!("{folder}/topology/thread_siblings_list"));
        let names = std::fs::read_dir(folder).into_iter().flatten().flatten();
        // A link called node1, say.
        let mut nodes = names.filter_map(|entry| {
            let name = entry.file_name();
            name.to_str()?.strip_prefix("node")?.parse().ok()
        });
        HardwareThread {
            id,
            siblings: siblings.unwrap_or_else(|_| id.to_string()),
            node: nodes.next().unwrap_or(0),
        }
    };
    (0..8 * SIZE).filter(has).map(thread).collect()
}

#[cfg(not(target_os = "linux"))]
fn allowed() -> Vec<HardwareThread> {
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hardware threads, each with its siblings and its node.
    fn machine(threads: &[(&str, usize)]) -> Vec<HardwareThread> {
        let thread = |(id, &(siblings, node)): (usize, &(&str, usize))| HardwareThread {
            id,
            siblings: siblings.to_owned(),
            node,
        };
        threads.iter().enumerate().map(thread).collect()
    }

    fn threads_of(seats: &[Seat]) -> Vec<usize> {
        seats.iter().map(|seat| seat.thread).collect()
    }

    #[test]
    fn each_core_comes_once_before_its_other_threads() {
        let threads = |lists: &[&str], n| {
            let all: Vec<_> = lists.iter().map(|&list| (list, 0)).collect();
            let seats = seats_among(&machine(&all), n);
            assert!(seats.iter().all(|seat| seat.node.is_none()), "one node");
            threads_of(&seats)
        };
        assert_eq!(threads(&["0,2", "1,3", "0,2", "1,3"], 4), [0, 1, 2, 3]);
        assert_eq!(
            threads(&["0-1", "0-1", "2-3", "2-3", "4"], 6),
            [0, 2, 4, 1, 3, 0]
        );
        assert_eq!(threads(&["0", "1"], 1), [0]);
        assert_eq!(threads(&[], 3), [0usize; 0]);
    }

    #[test]
    fn workers_beside_each_other_are_near_one_memory_node() {
        // Two nodes whose cores are numbered in turn, with two hardware threads each.
        let cores = ["0,4", "1,5", "2,6", "3,7"];
        let all: Vec<_> = (0..8).map(|i| (cores[i % 4], i % 2)).collect();
        let all = machine(&all);
        let seats = seats_among(&all, 4);
        assert_eq!(threads_of(&seats), [0, 2, 1, 3]);
        let near = |i: usize| seats[i].node.clone().unwrap();
        assert_eq!((near(1), near(2)), (vec![0, 2, 4, 6], vec![1, 3, 5, 7]));
        assert_eq!(
            threads_of(&seats_among(&all, 2)),
            [0, 1],
            "a worker for each node"
        );
        assert_eq!(
            threads_of(&seats_among(&all, 8)),
            [0, 2, 1, 3, 4, 6, 5, 7],
            "second threads of cores last"
        );
        assert_eq!(
            threads_of(&seats_among(&all, 6)),
            [0, 2, 1, 3, 4, 5],
            "a second thread of a core near each node"
        );
    }

    #[test]
    fn this_machine_has_a_core_for_each_thread_or_fewer() {
        let Cores { cores, threads } = cores();
        assert!(
            1 <= cores && cores <= threads,
            "{cores} cores, {threads} threads"
        );
        assert!(memory_nodes() >= 1);
    }
}

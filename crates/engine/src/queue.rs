//! The requests that wait, and whose turn it is.
//!
//! The smallest [`priority`](crate::Request::priority) comes first. Among equals it is the turn of
//! the [`client`](crate::Request::client) with the fewest running requests, then of the one whose
//! last turn is longest ago, and of one client's requests the oldest comes first. So a client that
//! sends a hundred requests at once delays the next client's by one.

use crate::request::{CancelToken, Request, Sink};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// Clients whose last turn is remembered, at most, beside those with waiting requests.
const CLIENTS_MAX: usize = 1024;

/// A request on its way to the engine's thread.
pub(crate) struct Job {
    pub(crate) request: Request,
    pub(crate) sink: Sink,
    pub(crate) cancel: CancelToken,
    pub(crate) submitted: Instant,
    /// Whether reading what the prompt begins with from disk is over; none before it was asked for.
    pub(crate) fetch: Option<Arc<AtomicBool>>,
}

/// Requests that wait, in the order of their arrival.
#[derive(Default)]
pub(crate) struct Queue {
    jobs: Vec<Job>,
    /// The number of the last turn of each client.
    turns: HashMap<u64, u64>,
    /// Turns so far.
    n_turns: u64,
}

impl Queue {
    /// Adds a request that has just come.
    pub(crate) fn push(&mut self, job: Job) {
        self.jobs.push(job);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Removes the requests for which `keep` is false.
    pub(crate) fn retain(&mut self, keep: impl FnMut(&Job) -> bool) {
        self.jobs.retain(keep);
    }

    /// The requests that wait, as indices for [`take`](Queue::take), the one whose turn it is
    /// first; `running` are the clients of the requests that run.
    pub(crate) fn order(&self, running: &[u64]) -> Vec<usize> {
        let mut of_client: HashMap<u64, usize> = HashMap::new();
        for client in running {
            *of_client.entry(*client).or_default() += 1;
        }
        let mut order: Vec<usize> = (0..self.jobs.len()).collect();
        order.sort_by_key(|&index| self.jobs[index].request.priority);
        // A request that would be its client's second comes after every client's first.
        let place = |index: usize| {
            let Request {
                client, priority, ..
            } = self.jobs[index].request;
            let ahead = of_client.entry(client).or_default();
            *ahead += 1;
            let turn = self.turns.get(&client).copied().unwrap_or_default();
            (priority, *ahead, turn, index)
        };
        let mut places: Vec<_> = order.into_iter().map(place).collect();
        places.sort_unstable();
        places.into_iter().map(|(.., index)| index).collect()
    }

    /// The request at `index`.
    pub(crate) fn get(&self, index: usize) -> &Job {
        &self.jobs[index]
    }

    /// The request at `index`, to be changed.
    pub(crate) fn get_mut(&mut self, index: usize) -> &mut Job {
        &mut self.jobs[index]
    }

    /// Takes the request at `index` out: its client has had a turn.
    pub(crate) fn take(&mut self, index: usize) -> Job {
        let job = self.jobs.remove(index);
        self.n_turns += 1;
        if self.turns.len() >= CLIENTS_MAX {
            let jobs = &self.jobs;
            self.turns
                .retain(|client, _| jobs.iter().any(|job| job.request.client == *client));
        }
        self.turns.insert(job.request.client, self.n_turns);
        job
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A queue of requests, each a client and a priority; their prompts number them.
    fn queue(requests: &[(u64, i64)]) -> Queue {
        let mut queue = Queue::default();
        for (number, &(client, priority)) in (0..).zip(requests) {
            let mut request = Request::new(vec![number]);
            (request.client, request.priority) = (client, priority);
            queue.push(Job {
                request,
                sink: Box::new(|_| true),
                cancel: CancelToken::new(),
                submitted: Instant::now(),
                fetch: None,
            });
        }
        queue
    }

    /// Takes all requests one by one while those of `running` run on.
    fn taken(mut queue: Queue, running: &[u64]) -> Vec<u32> {
        let mut taken = Vec::new();
        while let Some(&first) = queue.order(running).first() {
            taken.push(queue.take(first).request.prompt[0]);
        }
        taken
    }

    #[test]
    fn one_client_is_served_in_order() {
        assert_eq!(taken(queue(&[(1, 0); 4]), &[]), [0, 1, 2, 3]);
    }

    #[test]
    fn the_smallest_priority_comes_first() {
        let requests = [(1, 0), (1, 5), (1, -1), (1, 0)];
        assert_eq!(taken(queue(&requests), &[]), [2, 0, 3, 1]);
    }

    #[test]
    fn clients_take_turns() {
        let requests = [(1, 0), (1, 0), (1, 0), (2, 0), (2, 0), (3, 0)];
        assert_eq!(taken(queue(&requests), &[]), [0, 3, 5, 1, 4, 2]);
    }

    #[test]
    fn who_runs_less_comes_first() {
        let requests = [(1, 0), (2, 0), (3, 0)];
        assert_eq!(taken(queue(&requests), &[1, 1, 2]), [2, 1, 0]);
        let order = queue(&[(1, 0), (2, 0), (1, 0)]).order(&[1]);
        assert_eq!(order, [1, 0, 2]);
    }

    #[test]
    fn few_clients_are_remembered() {
        let mut queue = Queue::default();
        for client in 0..3 * CLIENTS_MAX as u64 {
            let mut one = super::tests::queue(&[(client, 0)]);
            queue.push(one.take(0));
            queue.take(0);
        }
        assert!(queue.turns.len() <= CLIENTS_MAX);
    }
}

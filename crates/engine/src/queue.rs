//! The requests that wait, and whose turn it is.
//!
//! The smallest [`priority`](crate::Request::priority) comes first. Among equals it is the turn of
//! the [`client`](crate::Request::client) with the fewest running requests, then of the one whose
//! last turn is longest ago, and of one client's requests the oldest comes first. So a client that
//! sends a hundred requests at once delays the next client's by one.
//!
//! A request that was preempted comes before all of its priority that have not run yet, and among
//! several the one that came first: it had its turn.

use crate::delivery::Running;
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

/// Who comes before whom: a smaller priority, then whoever arrived earlier. The greatest is the first
/// to be preempted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    pub(crate) priority: i64,
    /// Requests that had arrived before.
    pub(crate) arrival: u64,
}

/// A request that waits.
pub(crate) enum Waiting {
    /// One that has not run yet.
    New(Box<Job>),
    /// One that has run, and was preempted.
    Preempted(Box<Running>),
}

impl Waiting {
    pub(crate) fn is_cancelled(&self) -> bool {
        match self {
            Waiting::New(job) => job.cancel.is_cancelled(),
            Waiting::Preempted(running) => running.cancel.is_cancelled(),
        }
    }
}

/// What a request's turn depends on.
#[derive(Clone, Copy, Debug)]
struct Ticket {
    client: u64,
    rank: Rank,
    /// Whether the request has not run yet.
    is_new: bool,
}

/// Requests that wait.
#[derive(Default)]
pub(crate) struct Queue {
    waiting: Vec<(Ticket, Waiting)>,
    /// The number of the last turn of each client.
    turns: HashMap<u64, u64>,
    /// Turns so far.
    n_turns: u64,
    /// Requests that have arrived so far.
    n_arrived: u64,
}

impl Queue {
    /// Adds a request that has just come.
    pub(crate) fn push(&mut self, job: Job) {
        let ticket = Ticket {
            client: job.request.client,
            rank: Rank {
                priority: job.request.priority,
                arrival: self.n_arrived,
            },
            is_new: true,
        };
        self.n_arrived += 1;
        self.waiting.push((ticket, Waiting::New(Box::new(job))));
    }

    /// Adds a request that was preempted.
    pub(crate) fn push_preempted(&mut self, running: Running) {
        let ticket = Ticket {
            client: running.client,
            rank: running.rank,
            is_new: false,
        };
        let running = Waiting::Preempted(Box::new(running));
        self.waiting.push((ticket, running));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// The requests that wait, in no order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Waiting> {
        self.waiting.iter().map(|(_, waiting)| waiting)
    }

    /// Takes out the requests that were cancelled.
    pub(crate) fn take_cancelled(&mut self) -> Vec<Waiting> {
        let cancelled = self.waiting.extract_if(.., |(_, w)| w.is_cancelled());
        cancelled.map(|(_, waiting)| waiting).collect()
    }

    /// Takes out all requests.
    pub(crate) fn take_all(&mut self) -> Vec<Waiting> {
        let all = self.waiting.drain(..);
        all.map(|(_, waiting)| waiting).collect()
    }

    /// The requests that wait, as indices for [`take`](Queue::take), the one whose turn it is
    /// first; `running` are the clients of the requests that run.
    pub(crate) fn order(&self, running: &[u64]) -> Vec<usize> {
        let tickets: Vec<Ticket> = self.waiting.iter().map(|(ticket, _)| *ticket).collect();
        let turn = |client| self.turns.get(&client).copied().unwrap_or_default();
        ordered(&tickets, running, turn)
    }

    /// The rank of the request at `index`.
    pub(crate) fn rank(&self, index: usize) -> Rank {
        self.waiting[index].0.rank
    }

    /// The request at `index`.
    pub(crate) fn get(&self, index: usize) -> &Waiting {
        &self.waiting[index].1
    }

    /// The request at `index`, to be changed.
    pub(crate) fn get_mut(&mut self, index: usize) -> &mut Waiting {
        &mut self.waiting[index].1
    }

    /// Takes the request at `index` out, and says who comes before whom: its client has had a turn,
    /// unless it had it before.
    pub(crate) fn take(&mut self, index: usize) -> (Rank, Waiting) {
        let (ticket, waiting) = self.waiting.remove(index);
        if ticket.is_new {
            self.n_turns += 1;
            if self.turns.len() >= CLIENTS_MAX {
                let waiting = &self.waiting;
                let waits = |client| waiting.iter().any(|(ticket, _)| ticket.client == client);
                self.turns.retain(|&client, _| waits(client));
            }
            self.turns.insert(ticket.client, self.n_turns);
        }
        (ticket.rank, waiting)
    }
}

/// Numbers of `tickets`, the one whose turn it is first. `running` are the clients of the requests that
/// run, and `turn` says which number the last turn of a client had.
fn ordered(tickets: &[Ticket], running: &[u64], turn: impl Fn(u64) -> u64) -> Vec<usize> {
    let mut of_client: HashMap<u64, usize> = HashMap::new();
    for client in running {
        *of_client.entry(*client).or_default() += 1;
    }
    let mut order: Vec<usize> = (0..tickets.len()).collect();
    order.sort_by_key(|&index| (tickets[index].rank.priority, tickets[index].is_new));
    // A request that would be its client's second comes after every client's first.
    let place = |index: usize| {
        let Ticket {
            client,
            rank: Rank { priority, arrival },
            is_new,
        } = tickets[index];
        let ahead = of_client.entry(client).or_default();
        *ahead += 1;
        let turn = if is_new {
            (*ahead, turn(client))
        } else {
            (0, 0)
        };
        (priority, is_new, turn, arrival, index)
    };
    let mut places: Vec<_> = order.into_iter().map(place).collect();
    places.sort_unstable();
    places.into_iter().map(|(.., index)| index).collect()
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
            let (_, Waiting::New(job)) = queue.take(first) else {
                panic!("nothing was preempted");
            };
            taken.push(job.request.prompt[0]);
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
    fn who_was_preempted_comes_first_of_a_priority() {
        let ticket = |client, priority, arrival, is_new| Ticket {
            client,
            rank: Rank { priority, arrival },
            is_new,
        };
        let tickets = [
            ticket(1, 0, 5, true),
            ticket(1, 0, 4, false),
            ticket(2, 0, 3, false),
            ticket(2, 1, 0, false),
            ticket(3, -1, 6, true),
            ticket(3, 0, 7, true),
        ];
        // Client 1 runs, and client 3 had its turn before client 1 had.
        let order = ordered(&tickets, &[1], |client| 10 - client);
        assert_eq!(order, [4, 2, 1, 5, 0, 3]);
    }

    #[test]
    fn few_clients_are_remembered() {
        let mut queue = Queue::default();
        for client in 0..3 * CLIENTS_MAX as u64 {
            let mut one = super::tests::queue(&[(client, 0)]);
            let (_, Waiting::New(job)) = one.take(0) else {
                panic!("nothing was preempted");
            };
            queue.push(*job);
            queue.take(0);
        }
        assert!(queue.turns.len() <= CLIENTS_MAX);
    }
}

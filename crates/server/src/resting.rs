//! Connections that wait for a request, and the door that closes one of them to let a
//! new client in.
//!
//! HTTP allows a server to close a connection between two requests, and clients then
//! open another. So idle connections never keep a new client out: where there is no
//! room, the one that has rested longest is closed. One that has begun to send a
//! request, or is being answered, is left alone.

use std::collections::BTreeMap;
use std::io;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::sleep;

/// Pause after the system refused to accept, for instance for want of file
/// descriptors; asking again at once would only burn a core.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Connections that wait for a request, by when they began to.
#[derive(Debug, Default)]
pub(crate) struct Resting {
    queue: Mutex<Queue>,
    /// Told whenever a connection begins to rest.
    came: Notify,
}

#[derive(Debug, Default)]
struct Queue {
    n_came: u64,
    resting: BTreeMap<u64, Arc<Notify>>,
}

impl Resting {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a connection that `close` tells to end. The number is its place.
    pub(crate) fn join(&self, close: Arc<Notify>) -> u64 {
        let mut queue = self.queue();
        queue.n_came += 1;
        let place = queue.n_came;
        queue.resting.insert(place, close);
        drop(queue);
        self.came.notify_one();
        place
    }

    /// Notes that the connection at `place` no longer rests; false if it has been told to
    /// end.
    pub(crate) fn leave(&self, place: u64) -> bool {
        self.queue().resting.remove(&place).is_some()
    }

    /// Tells the connection that has rested longest to end; false if none rests.
    fn close_oldest(&self) -> bool {
        let oldest = self.queue().resting.pop_first();
        match oldest {
            None => false,
            Some((_, close)) => {
                close.notify_one();
                true
            }
        }
    }
}

/// Where clients come in.
pub(crate) struct Door {
    listener: TcpListener,
    slots: Arc<Semaphore>,
    resting: Arc<Resting>,
    /// A client that is in and has no slot yet.
    next: Option<TcpStream>,
}

impl Door {
    /// A door for at most `connections` clients at a time.
    pub(crate) fn new(listener: TcpListener, connections: usize) -> Self {
        Door {
            listener,
            slots: Arc::new(Semaphore::new(connections)),
            resting: Arc::default(),
            next: None,
        }
    }

    /// The connections that may be closed for others.
    pub(crate) fn resting(&self) -> &Arc<Resting> {
        &self.resting
    }

    /// The next client, with its slot. Whoever drops the future loses no client.
    pub(crate) async fn accept(&mut self) -> (TcpStream, OwnedSemaphorePermit) {
        if self.next.is_none() {
            self.next = Some(self.knock().await);
        }
        let slot = room(&self.slots, &self.resting).await;
        (self.next.take().expect("somebody is in"), slot)
    }

    async fn knock(&self) -> TcpStream {
        loop {
            match self.listener.accept().await {
                Ok((client, _)) => return client,
                Err(error) if is_of_one_connection(&error) => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    self.resting.close_oldest();
                    sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
}

/// A slot: a free one, or that of the connection that has rested longest.
async fn room(slots: &Arc<Semaphore>, resting: &Resting) -> OwnedSemaphorePermit {
    if let Ok(slot) = slots.clone().try_acquire_owned() {
        return slot;
    }
    let mut slot = pin!(slots.clone().acquire_owned());
    loop {
        if resting.close_oldest() {
            return slot.await.expect("never closed");
        }
        tokio::select! {
            slot = &mut slot => return slot.expect("never closed"),
            () = resting.came.notified() => {}
        }
    }
}

fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(
        error.kind(),
        ConnectionAborted | ConnectionRefused | ConnectionReset
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn the_one_that_has_rested_longest_is_closed_and_nobody_else() {
        let resting = Resting::default();
        let close: Vec<Arc<Notify>> = (0..3).map(|_| Arc::default()).collect();
        let places: Vec<u64> = close.iter().map(|c| resting.join(c.clone())).collect();
        // The first has got a request and rests again, so it is the newest.
        assert!(resting.leave(places[0]));
        let again = resting.join(close[0].clone());
        let is_told = |i: usize| close[i].notified().now_or_never().is_some();
        for oldest in [1, 2, 0] {
            assert!(resting.close_oldest());
            assert_eq!([0, 1, 2].map(is_told), [0, 1, 2].map(|i| i == oldest));
        }
        assert!(!resting.close_oldest());
        assert!(!resting.leave(again), "it has been told to end");
    }

    #[tokio::test]
    async fn a_slot_is_waited_for_where_nobody_rests() {
        let slots = Arc::new(Semaphore::new(1));
        let resting = Resting::default();
        let busy = room(&slots, &resting).await;
        assert!(room(&slots, &resting).now_or_never().is_none());
        drop(busy);
        let busy = room(&slots, &resting).await;
        let close = Arc::<Notify>::default();
        let waits = async {
            resting.join(close.clone());
            close.notified().await;
            drop(busy);
        };
        let (_slot, ()) = tokio::join!(room(&slots, &resting), waits);
    }
}

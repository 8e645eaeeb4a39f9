//! Turns: who is let into the queue, and when those come back who are not.
//!
//! The engine serves its queue in order. But who finds it full has to come back, and by
//! then the clients that were just served have taken every free place. So a refused
//! client is owed a place until some time after it was told to come back, and a client
//! served since then leaves free as many places as are owed to others. Nothing is left
//! free beyond that, and nothing while the engine has little to do.
//!
//! A client is a connection: what it is owed ends with it.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::auth::Caller;

/// Ended requests that the rate is reckoned from.
const ENDED_MAX: usize = 32;
/// When to come back where no request has ended yet.
const UNKNOWN_WAIT: Duration = Duration::from_millis(500);
/// Bounds of when to come back, before the spread.
const WAIT: [Duration; 2] = [Duration::from_millis(250), Duration::from_secs(30)];

/// One connection.
#[derive(Debug, Default)]
pub(crate) struct Client {
    /// Where the connection comes from.
    address: Option<IpAddr>,
    /// When a request of this client last ended.
    served: Mutex<Option<Instant>>,
}

/// What the server owes to whom.
#[derive(Debug)]
pub(crate) struct Turns {
    grace: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// At most one entry a client.
    owed: Vec<Owed>,
    /// When the last requests have ended.
    ended: VecDeque<Instant>,
}

#[derive(Debug)]
struct Owed {
    client: Weak<Client>,
    since: Instant,
    until: Instant,
}

impl Turns {
    /// Turns that are kept for `grace` after the time to come back.
    pub(crate) fn new(grace: Duration) -> Self {
        Turns {
            grace,
            state: Mutex::default(),
        }
    }

    fn state(&self, now: Instant) -> MutexGuard<'_, State> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state
            .owed
            .retain(|owed| owed.until > now && owed.client.strong_count() > 0);
        state
    }

    /// Whether `client` may take one of `free` places.
    pub(crate) fn may_enter(&self, client: &Arc<Client>, free: usize, now: Instant) -> bool {
        let Some(served) = client.served() else {
            return true;
        };
        let state = self.state(now);
        if state.owed.iter().any(|owed| owed.is_to(client)) {
            return true;
        }
        let earlier = state.owed.iter().filter(|owed| owed.since < served);
        free > earlier.count()
    }

    /// Notes that `client` is in the queue.
    pub(crate) fn entered(&self, client: &Arc<Client>, now: Instant) {
        self.state(now).owed.retain(|owed| !owed.is_to(client));
    }

    /// Notes that `client` was refused, and says when to come back; `spread` from 0 to 1
    /// keeps those who are refused together from coming back together.
    pub(crate) fn refused(&self, client: &Arc<Client>, spread: f64, now: Instant) -> Duration {
        let mut state = self.state(now);
        let known = state.owed.iter().position(|owed| owed.is_to(client));
        let ahead = known.unwrap_or(state.owed.len());
        let wait = match state.ended.front() {
            None => UNKNOWN_WAIT.mul_f64(1.0 + spread),
            Some(&first) => {
                // As many must end as are owed a place before.
                let each = now.duration_since(first).as_secs_f64() / state.ended.len() as f64;
                let [least, most] = WAIT.map(|wait| wait.as_secs_f64());
                let wait = (each * (ahead + 1) as f64).clamp(least, most);
                Duration::from_secs_f64(wait * (1.0 + spread / 2.0))
            }
        };
        // Who counts in whole seconds comes back up to one later.
        let until = now + wait + Duration::from_secs(1) + self.grace;
        match known {
            Some(place) => state.owed[place].until = until,
            None => state.owed.push(Owed {
                client: Arc::downgrade(client),
                since: now,
                until,
            }),
        }
        wait
    }

    /// Notes that a request of `client` has ended.
    pub(crate) fn served(&self, client: &Client, now: Instant) {
        *client.served.lock().unwrap_or_else(PoisonError::into_inner) = Some(now);
        let mut state = self.state(now);
        if state.ended.len() == ENDED_MAX {
            state.ended.pop_front();
        }
        state.ended.push_back(now);
    }
}

impl Owed {
    fn is_to(&self, client: &Arc<Client>) -> bool {
        std::ptr::eq(self.client.as_ptr(), Arc::as_ptr(client))
    }
}

impl Client {
    /// A connection from `address`.
    pub(crate) fn new(address: Option<IpAddr>) -> Self {
        Client {
            address,
            ..Client::default()
        }
    }

    /// A number that the connections of one caller share: of the key that they carry, else of the
    /// address that they come from.
    pub(crate) fn number(&self, key: Option<&Caller>) -> u64 {
        let mut hasher = DefaultHasher::new();
        match key {
            Some(key) => key.hash(&mut hasher),
            None => self.address.hash(&mut hasher),
        }
        hasher.finish()
    }

    fn served(&self) -> Option<Instant> {
        *self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(2);

    fn clients<const N: usize>() -> [Arc<Client>; N] {
        std::array::from_fn(|_| Arc::default())
    }

    #[test]
    fn who_was_just_served_leaves_free_what_is_owed_to_others() {
        let turns = Turns::new(GRACE);
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let [served, first, second, new] = clients();
        turns.refused(&first, 0.0, at(0));
        turns.refused(&second, 0.0, at(1));
        turns.refused(&second, 0.0, at(2));
        turns.served(&served, at(3));
        let may = |client: &Arc<Client>, free, ms| turns.may_enter(client, free, at(ms));
        assert!(!may(&served, 1, 4) && !may(&served, 2, 4) && may(&served, 3, 4));
        // Others are let in as long as there is room: those who are owed it, and who is new.
        assert!(may(&first, 1, 4) && may(&second, 1, 4) && may(&new, 1, 4));
        turns.entered(&first, at(5));
        assert!(!may(&served, 1, 6) && may(&served, 2, 6));
        // A place is owed to a connection, and not for ever.
        drop(second);
        assert!(may(&served, 1, 7));
        turns.refused(&new, 0.0, at(8));
        assert!(may(&served, 1, 9), "it was served before that");
        turns.served(&served, at(10));
        assert!(!may(&served, 1, 11));
        assert!(may(&served, 1, 500 + 1000 + 2000 + 9));
    }

    #[test]
    fn the_time_to_come_back_follows_the_queue_and_the_rate() {
        let turns = Turns::new(GRACE);
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let all: [Arc<Client>; 3] = clients();
        let ms = |client: usize, spread, at| turns.refused(&all[client], spread, at).as_millis();
        assert_eq!(ms(0, 0.0, at(0)), 500);
        assert_eq!(ms(0, 1.0, at(0)), 1000);
        // Two a second.
        for i in 0..8 {
            turns.served(&Client::default(), at(500 * i));
        }
        let now = at(500 * 8);
        turns.entered(&all[0], now);
        assert_eq!(ms(0, 0.0, now), 500);
        assert_eq!(ms(1, 0.0, now), 1000);
        assert_eq!(ms(2, 0.0, now), 1500);
        assert_eq!(ms(2, 1.0, now), 2250);
        assert_eq!(ms(0, 0.0, now), 500);
        assert_eq!(ms(0, 0.0, at(1_000_000_000)), 30_000);
    }
}

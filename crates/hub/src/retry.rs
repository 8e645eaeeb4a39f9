//! Trying again: how often, and with what pauses.
//!
//! A try that got further than every try before it counts as progress; after
//! [`MAX_TRIES`] tries in a row without progress there is no further one. Before each new
//! try there is a pause, which doubles until the next progress.

use std::time::Duration;

/// Waits for a while.
pub(crate) type Sleep = Box<dyn Fn(Duration) + Send + Sync>;
/// Tries in a row without progress before giving up.
pub(crate) const MAX_TRIES: u32 = 5;
/// Pause before the second try.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Longest pause, also where a server asks for a longer one.
const MAX_PAUSE: Duration = Duration::from_secs(60);

/// Counts tries without progress, and pauses between them.
pub(crate) struct Tries<'s> {
    sleep: &'s Sleep,
    /// The furthest byte that any try has reached.
    pub(crate) furthest: u64,
    count: u32,
    pause: Duration,
}

impl<'s> Tries<'s> {
    /// No tries so far, at byte `have`.
    pub(crate) fn new(sleep: &'s Sleep, have: u64) -> Self {
        Tries {
            sleep,
            furthest: have,
            count: 0,
            pause: FIRST_PAUSE,
        }
    }

    /// Tries in a row without progress.
    pub(crate) fn count(&self) -> u32 {
        self.count
    }

    /// Counts a try that ended at byte `have`, and whether another one makes sense: if
    /// so, pauses first, for as long as the server has `asked` or longer with each try.
    pub(crate) fn again(&mut self, have: u64, asked: Option<Duration>) -> bool {
        if have > self.furthest {
            self.furthest = have;
            self.count = 0;
            self.pause = FIRST_PAUSE;
        } else {
            self.count += 1;
        }
        if self.count >= MAX_TRIES {
            return false;
        }
        (self.sleep)(asked.unwrap_or(self.pause).min(MAX_PAUSE));
        self.pause *= 2;
        true
    }
}

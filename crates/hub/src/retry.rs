//! Tries without progress: how many there are, and the pauses between them.
//!
//! A try that got further than every try before it counts as progress; after
//! [`MAX_TRIES`] tries in a row without progress there is no other. Before each new try
//! there is a pause, which doubles until the next progress.

use std::time::Duration;

/// Waits for a time.
pub(crate) type Sleep = Box<dyn Fn(Duration) + Send + Sync>;
/// Most tries in a row without progress.
pub(crate) const MAX_TRIES: u32 = 5;
/// The pause before the second try.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// The longest pause, even if a server asks for a longer one.
const MAX_PAUSE: Duration = Duration::from_secs(60);

/// Counts the tries without progress of one transfer, and pauses between them.
pub(crate) struct Tries<'s> {
    sleep: &'s Sleep,
    /// The last byte that any try has reached.
    pub(crate) furthest: u64,
    /// Tries in a row without progress.
    count: u32,
    /// The next pause.
    pause: Duration,
}

impl<'s> Tries<'s> {
    /// A transfer that has `have` bytes and no tries behind it.
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

    /// Counts a try that ended at byte `have`. Returns whether there is another one, after a
    /// pause: as long as the server has `asked`, else twice as long as the last.
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

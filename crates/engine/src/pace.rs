//! How many rows of a prompt run at a time beside other requests, which wait for their
//! next token meanwhile. It changes no token: rows have the same bits in any company.

use std::time::Duration;

/// What a round with rows of prompts takes, about, if several requests run.
const SHARED_ROUND: Duration = Duration::from_millis(250);

/// Rows of a prompt in a round, at least: weights are read for all of a round's rows.
const LEAST: usize = 16;

/// What rounds with prompts in them took so far.
#[derive(Default)]
pub(crate) struct Pace {
    rows_per_second: Option<f64>,
}

impl Pace {
    /// Rows of each prompt in the next round, at most: `most` if there is one prompt and no other request. All prompts
    /// together have no more, but for [`LEAST`] rows each. `due`: what is left of each request's prompt.
    pub(crate) fn chunk(&self, due: &[usize], most: usize) -> usize {
        let prompts = due.iter().filter(|&&rows| rows > 0).count();
        if prompts == 0 {
            return most;
        }
        let of_rate = match self.rows_per_second {
            Some(rate) if due.len() > 1 => rate * SHARED_ROUND.as_secs_f64(),
            _ => f64::INFINITY,
        };
        let rows = (of_rate as usize).min(most);
        (rows / prompts).max(LEAST).min(most)
    }

    /// A round with so many rows of prompts took so long.
    pub(crate) fn note(&mut self, rows: usize, took: Duration) {
        if rows >= LEAST {
            self.rows_per_second = Some(rows as f64 / took.as_secs_f64().max(1e-6));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_share_a_quarter_of_a_second_with_others() {
        let mut pace = Pace::default();
        assert_eq!(pace.chunk(&[6000, 0], 256), 256, "nothing is known");
        assert_eq!(pace.chunk(&[6000; 8], 256), 32, "eight prompts together");
        assert_eq!(pace.chunk(&[6000; 100], 256), LEAST);
        pace.note(256, Duration::from_secs(1));
        assert_eq!(pace.chunk(&[6000], 256), 256, "alone");
        assert_eq!(pace.chunk(&[6000, 0], 256), 64);
        assert_eq!(pace.chunk(&[6000, 0, 3000], 256), 32, "two of them");
        assert_eq!(pace.chunk(&[0, 0], 256), 256, "no prompt is left");
        pace.note(3, Duration::from_secs(1));
        assert_eq!(pace.chunk(&[6000, 0], 256), 64, "too few to tell");
        pace.note(16, Duration::from_secs(4));
        assert_eq!(pace.chunk(&[6000, 0], 256), LEAST);
        assert_eq!(pace.chunk(&[6000, 0], 8), 8, "never more than asked for");
        pace.note(256, Duration::from_millis(10));
        assert_eq!(pace.chunk(&[6000, 0], 256), 256, "fast enough");
        assert_eq!(pace.chunk(&[6000, 6000], 256), 128, "two prompts");
    }
}

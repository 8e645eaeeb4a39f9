//! How far a tower gets between two rounds, while the requests of these rounds wait for it.
//!
//! ```text
//! time for the tower beside a round = share · time of the round
//! share = max(S, 7 S / requests that run)
//! ```
//!
//! S is [`EngineOptions::tower_share`](crate::EngineOptions::tower_share). A slice runs if what is left of the
//! time will do for it, as slices like it have taken so far; if even the smallest one takes longer, time is
//! saved over several rounds. It changes no embedding: rows have the same bits in slices of any size.

use models::Phase;
use std::collections::HashMap;
use std::time::Duration;

/// Requests from which on more of them leave the tower no less time.
const MANY: f64 = 7.0;

/// Rows of a slice, at least, unless its phase has fewer: matrices are read for all rows of a slice.
const LEAST: usize = 16;

/// The share of the time beside a round that is not worth another slice.
const REST: f64 = 0.25;

/// Slices that take as long a row.
type Kind = (&'static str, u32, u32);

/// Seconds of the last two measurements, the later one first.
#[derive(Clone, Copy, Debug, Default)]
struct LastTwo(Option<f64>, Option<f64>);

impl LastTwo {
    fn push(&mut self, seconds: f64) {
        *self = LastTwo(Some(seconds), self.0);
    }

    /// The smaller one: what is odd about a single measurement, such as the first one, counts for nothing.
    fn seconds(self) -> Option<f64> {
        Some(self.0?.min(self.1?))
    }
}

/// The time of a tower beside rounds, and what slices take.
pub(super) struct Slices {
    share: f64,
    rounds: LastTwo,
    /// Seconds for the tower beside a round.
    allowance: f64,
    /// Seconds that are left of it; negative after slices that took longer than was thought.
    left: f64,
    /// What the next slice takes at least, if it waits.
    awaited: f64,
    /// Seconds a row, by kind of slice.
    row_seconds: HashMap<Kind, LastTwo>,
}

/// The class of slices of `rows` rows: those up to twice as long share one.
fn class(rows: usize) -> u32 {
    rows.div_ceil(LEAST).next_power_of_two().ilog2()
}

impl Slices {
    /// For a share of `percent` of a round's time.
    pub(super) fn new(percent: u32) -> Self {
        Slices {
            share: f64::from(percent) / 100.0,
            rounds: LastTwo::default(),
            allowance: 0.0,
            left: 0.0,
            awaited: 0.0,
            row_seconds: HashMap::new(),
        }
    }

    /// A round of `running` requests took so long; `is_at_work` says whether a tower has something to do.
    pub(super) fn round(&mut self, took: Duration, running: usize, is_at_work: bool) {
        self.rounds.push(took.as_secs_f64());
        if !is_at_work {
            (self.left, self.awaited) = (0.0, 0.0);
            return;
        }
        let share = self.share * (MANY / running.max(1) as f64).max(1.0);
        let round = self.rounds.seconds().unwrap_or(took.as_secs_f64());
        self.allowance = share * round;
        let most = self.allowance.max(self.awaited);
        self.left = (self.left + self.allowance).min(most);
    }

    /// Seconds that `rows` rows of `phase` will take, at most, if slices as small were seen.
    fn estimate(&self, phase: Phase, rows: usize) -> Option<f64> {
        let of = class(phase.of);
        let known = |class| self.row_seconds.get(&(phase.kind, of, class))?.seconds();
        // A row of a smaller slice takes no less.
        let a_row = (0..=class(rows)).filter_map(known).reduce(f64::min)?;
        Some(a_row * rows as f64)
    }

    /// How many rows of `phase` may run now; `None` if the next round comes first.
    pub(super) fn next_rows(&mut self, phase: Phase) -> Option<usize> {
        if self.left <= REST * self.allowance {
            return None;
        }
        let mut rows = LEAST.min(phase.rows);
        if let Some(seconds) = self.estimate(phase, rows)
            && seconds > self.left
        {
            self.awaited = seconds;
            return None;
        }
        self.awaited = 0.0;
        while rows < phase.rows {
            let more = (2 * rows).min(phase.rows);
            if self.estimate(phase, more).is_none_or(|s| s > self.left) {
                break;
            }
            rows = more;
        }
        Some(rows)
    }

    /// A slice of `rows` rows of `phase` took so long.
    pub(super) fn note(&mut self, phase: Phase, rows: usize, took: Duration) {
        let seconds = took.as_secs_f64();
        self.left -= seconds;
        let kind = (phase.kind, class(phase.of), class(rows));
        let known = self.row_seconds.entry(kind).or_default();
        known.push(seconds / rows as f64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn phase(rows: usize) -> Phase {
        Phase {
            kind: "mix",
            rows,
            of: 4096,
        }
    }

    /// Runs slices until the next round comes, at so many milliseconds a row: rows, and milliseconds.
    fn run(slices: &mut Slices, rows_left: usize, row: f64) -> (usize, f64) {
        let mut done = 0;
        while done < rows_left
            && let Some(rows) = slices.next_rows(phase(rows_left - done))
        {
            slices.note(phase(rows_left - done), rows, MS.mul_f64(row * rows as f64));
            done += rows;
        }
        (done, done as f64 * row)
    }

    #[test]
    fn a_tower_takes_its_share_of_a_rounds_time_and_no_more() {
        let mut slices = Slices::new(10);
        assert_eq!(slices.next_rows(phase(4096)), None, "no round yet");
        for (running, share) in [(7, 0.1), (20, 0.1), (2, 0.35), (1, 0.7)] {
            let mut took = 0.0;
            for round in 0..40 {
                slices.round(100 * MS, running, true);
                let (_, ms) = run(&mut slices, 1 << 20, 0.01);
                assert!(ms <= 100.0 * share + 1e-6, "{ms} ms beside {running}");
                took += if round < 20 { 0.0 } else { ms };
            }
            assert!(
                took > 0.75 * 20.0 * 100.0 * share,
                "{took} beside {running}"
            );
        }
    }

    #[test]
    fn time_for_a_long_slice_is_saved_over_rounds() {
        let mut slices = Slices::new(10);
        // 16 rows take 35 ms, 10 ms of 100 are the tower's.
        let mut ran = Vec::new();
        for _ in 0..40 {
            slices.round(100 * MS, 8, true);
            ran.push(run(&mut slices, 1 << 20, 35.0 / 16.0).0);
        }
        // The first ones tell how long they take.
        let ran = &ran[20..];
        assert!(ran.iter().all(|&rows| rows <= 16), "{ran:?}");
        assert!((5..=6).contains(&ran.iter().filter(|&&rows| rows > 0).count()));
    }

    #[test]
    fn nothing_is_saved_while_there_is_nothing_to_look_at() {
        let mut slices = Slices::new(10);
        for _ in 0..100 {
            slices.round(100 * MS, 8, false);
        }
        assert_eq!(slices.next_rows(phase(4096)), None);
        slices.round(100 * MS, 8, true);
        assert_eq!(
            slices.next_rows(phase(4096)),
            Some(16),
            "a small one to begin with"
        );
        assert_eq!(slices.next_rows(phase(9)), Some(9));
    }

    #[test]
    fn one_odd_measurement_counts_for_nothing() {
        let mut slices = Slices::new(10);
        slices.round(100 * MS, 8, true);
        // Kernels are compiled.
        slices.note(phase(4096), 16, 3000 * MS);
        slices.left = 0.0;
        for _ in 0..3 {
            slices.round(100 * MS, 8, true);
            assert!(run(&mut slices, 1 << 20, 0.01).0 > 0);
        }
        // The larger ones are tried as soon as smaller ones say that they may do.
        slices.round(100 * MS, 8, true);
        assert!(slices.next_rows(phase(4096)) >= Some(256));
    }
}

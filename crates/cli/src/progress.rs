//! Progress on stderr for a user who waits: spinners and bars. Nothing without a terminal.

use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// How long work may take before it shows anything.
const PATIENCE: Duration = Duration::from_millis(500);
/// The time between two pictures of a spinner.
const TICK: Duration = Duration::from_millis(100);

/// Does `work`, and shows a spinner beside `message` if it takes long.
pub(crate) fn patiently<T>(message: &str, work: impl FnOnce() -> T) -> T {
    if !std::io::stderr().is_terminal() {
        return work();
    }
    let (done, waiting) = channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            if waiting.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
                let style = ProgressStyle::with_template("{spinner} {msg} {elapsed}")
                    .expect("a valid template");
                let spinner = ProgressBar::new_spinner()
                    .with_style(style)
                    .with_message(message.to_owned());
                spinner.enable_steady_tick(TICK);
                // Nothing is ever sent: the channel closes when the work is done.
                let _ = waiting.recv();
                spinner.finish_and_clear();
            }
        });
        // Dropped also when `work` panics, so the thread always ends.
        let _done = done;
        work()
    })
}

/// A bar for the rows of a prompt that prefill has run.
pub(crate) struct PrefillBar {
    /// When prefill began.
    start: Instant,
    /// Whether the bar may still appear.
    is_wanted: bool,
    bar: Option<ProgressBar>,
}

impl PrefillBar {
    /// A bar that appears if prefill takes long, and only if it `is_wanted`.
    pub(crate) fn new(is_wanted: bool) -> Self {
        PrefillBar {
            start: Instant::now(),
            is_wanted: is_wanted && std::io::stderr().is_terminal(),
            bar: None,
        }
    }

    /// Shows that `done` of `total` rows have run.
    pub(crate) fn set(&mut self, done: usize, total: usize) {
        if self.is_wanted && self.bar.is_none() && self.start.elapsed() > PATIENCE {
            let style = ProgressStyle::with_template("reading the prompt {bar:30} {pos}/{len}");
            self.bar =
                Some(ProgressBar::new(total as u64).with_style(style.expect("a valid template")));
        }
        if let Some(bar) = &self.bar {
            bar.set_position(done as u64);
        }
    }

    /// Removes the bar.
    pub(crate) fn clear(&mut self) {
        self.is_wanted = false;
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

/// A bar for bytes that are written.
pub(crate) struct ByteBar {
    bar: Option<ProgressBar>,
}

impl ByteBar {
    /// A bar beside `message`, if it `is_wanted`.
    pub(crate) fn new(message: &str, is_wanted: bool) -> Self {
        let style =
            ProgressStyle::with_template("{msg} {bar:30} {bytes} of {total_bytes}, {eta} left");
        let bar = || {
            ProgressBar::new(0)
                .with_style(style.expect("a valid template"))
                .with_message(message.to_owned())
        };
        ByteBar {
            bar: (is_wanted && std::io::stderr().is_terminal()).then(bar),
        }
    }

    /// Shows that `done` of `total` bytes are written.
    pub(crate) fn set(&mut self, done: u64, total: u64) {
        if let Some(bar) = &self.bar {
            bar.set_length(total);
            bar.set_position(done);
        }
    }

    /// Removes the bar.
    pub(crate) fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

/// A bar for a file that is fetched.
pub(crate) struct DownloadBar {
    bar: Option<ProgressBar>,
    /// The file that the bar shows.
    file: String,
}

impl DownloadBar {
    /// A bar, if it `is_wanted`.
    pub(crate) fn new(is_wanted: bool) -> Self {
        let style = ProgressStyle::with_template(
            "{bar:30} {bytes:>9} of {total_bytes:<9} {bytes_per_sec:>11} {eta:>4} {wide_msg}",
        );
        let bar = (is_wanted && std::io::stderr().is_terminal())
            .then(|| ProgressBar::new(0).with_style(style.expect("a valid template")));
        DownloadBar {
            bar,
            file: String::new(),
        }
    }

    /// Shows the progress of a file.
    pub(crate) fn set(&mut self, progress: hub::Progress<'_>) {
        let Some(bar) = &self.bar else {
            return;
        };
        if self.file != progress.file {
            progress.file.clone_into(&mut self.file);
            bar.set_message(self.file.clone());
            bar.set_length(progress.total);
            bar.reset_eta();
        }
        bar.set_position(progress.done);
    }

    /// Removes the bar.
    pub(crate) fn clear(self) {
        if let Some(bar) = self.bar {
            bar.finish_and_clear();
        }
    }
}

/// A bar for the cells of a grid, beside a table that grows.
pub(crate) struct GridBar {
    bar: Option<ProgressBar>,
    /// Whether messages are wanted.
    is_wanted: bool,
}

impl GridBar {
    /// A bar for `n` cells, if it `is_wanted`.
    pub(crate) fn new(n: usize, is_wanted: bool) -> Self {
        let style = ProgressStyle::with_template("{bar:30} {pos} of {len} cells, {elapsed}");
        let bar = || ProgressBar::new(n as u64).with_style(style.expect("a valid template"));
        GridBar {
            bar: (is_wanted && std::io::stderr().is_terminal()).then(bar),
            is_wanted,
        }
    }

    /// Shows that `n` more cells are done.
    pub(crate) fn pass(&self, n: usize) {
        if let Some(bar) = &self.bar {
            bar.inc(n as u64);
        }
    }

    /// Prints with the bar out of the way.
    pub(crate) fn aside<T>(&self, print: impl FnOnce() -> T) -> T {
        match &self.bar {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }

    /// Says a line on stderr, if messages are wanted.
    pub(crate) fn say(&self, line: &str) {
        if self.is_wanted {
            self.aside(|| say!("paceline: {line}"));
        }
    }

    /// Removes the bar.
    pub(crate) fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

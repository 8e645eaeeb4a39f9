//! Memory to prefetch while something else is worked on.

use crate::microkernel::{PREFETCH_STEPS, Prefetch};

/// Cache lines that will be read next.
#[derive(Clone, Copy)]
pub(super) struct PrefetchRange {
    from: *const u8,
    lines: usize,
}

impl PrefetchRange {
    pub(super) const NOTHING: PrefetchRange = PrefetchRange {
        from: std::ptr::null(),
        lines: 0,
    };

    /// All whole lines of `memory`.
    pub(super) fn of<T>(memory: &[T]) -> Self {
        PrefetchRange {
            from: memory.as_ptr().cast(),
            lines: size_of_val(memory) / 64,
        }
    }

    /// Takes as much as `part` is of `whole`, and leaves the rest.
    #[inline(always)]
    pub(super) fn take(&mut self, whole: usize, part: usize) -> Self {
        let lines = (self.lines * part).div_ceil(whole.max(1)).min(self.lines);
        let taken = PrefetchRange { lines, ..*self };
        self.from = self.from.wrapping_add(64 * lines);
        self.lines -= lines;
        taken
    }

    /// Spreads the lines over the `k` columns of a microkernel.
    #[inline(always)]
    pub(super) fn over(self, k: usize) -> Prefetch {
        match self.lines.div_ceil((k / PREFETCH_STEPS).max(1)) {
            0 => Prefetch::None,
            lines => Prefetch::Lines(self.from, lines),
        }
    }
}

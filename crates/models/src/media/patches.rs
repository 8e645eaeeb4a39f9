//! Frames of pixels as patches, in the order in which a tower reads them.

use super::{Frames, MediaError, MediaGrid};
use quant::{Owned, Scalar, Stored};

/// The order of the patches of a frame, and of the numbers of a patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PatchOrder {
    /// Patches row-major; in a patch row, column, channel. A frame is a run.
    Rows,
    /// Blocks of `merge` by `merge` patches row-major, and row-major inside; in a patch channel,
    /// frame of the run, row, column.
    Blocks {
        /// Patches of a block's side.
        merge: usize,
        /// Frames of a run.
        frames: usize,
    },
}

/// How a tower cuts frames into patches.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patches {
    /// Pixels of a patch's side.
    pub(crate) size: usize,
    /// Patches of a side that become one row.
    pub(crate) merge: usize,
    /// Positions of a side, at most.
    pub(crate) positions: usize,
    /// In which order they come.
    pub(crate) order: PatchOrder,
    /// Factor and summand of a value of 0 to 1, by channel.
    pub(crate) scale: [[f32; 2]; 3],
}

/// The patches of frames.
pub(crate) struct Cut {
    /// Numbers, `[patches, patch size² · 3 · frames of a run]`.
    pub(crate) values: Vec<f32>,
    /// Row and column of each patch of one run, in the tower's order.
    pub(crate) places: Vec<[usize; 2]>,
    /// Runs.
    pub(crate) runs: usize,
}

impl Patches {
    fn frames_a_run(&self) -> usize {
        match self.order {
            PatchOrder::Rows => 1,
            PatchOrder::Blocks { frames, .. } => frames,
        }
    }

    /// Numbers of a patch.
    pub(crate) fn width(&self) -> usize {
        self.size * self.size * 3 * self.frames_a_run()
    }

    /// The rows that `frames` become.
    pub(crate) fn grid(&self, frames: &Frames<'_>) -> Result<MediaGrid, MediaError> {
        let count = frames.count();
        if count == 0 {
            return Err(MediaError::NoFrames);
        }
        let (height, width) = (frames.height, frames.width);
        let side = self.size * self.merge;
        if !height.is_multiple_of(side) || !width.is_multiple_of(side) {
            return Err(MediaError::Sides {
                side,
                height,
                width,
            });
        }
        let patches = height.max(width) / self.size;
        if patches > self.positions {
            return Err(MediaError::TooWide {
                most: self.positions,
                patches,
            });
        }
        Ok(MediaGrid {
            runs: count.div_ceil(self.frames_a_run()),
            height: height / side,
            width: width / side,
        })
    }

    /// Cuts `frames`; a run that lacks frames repeats the last one.
    ///
    /// # Panics
    ///
    /// If [`Patches::grid`] gives an error.
    pub(crate) fn cut(&self, frames: &Frames<'_>) -> Cut {
        let grid = self.grid(frames).expect("frames of a size for the tower");
        let places = self.places(grid);
        let mut values = Vec::with_capacity(grid.runs * places.len() * self.width());
        let last = frames.count() - 1;
        for run in 0..grid.runs {
            for &[row, col] in &places {
                let at = [row * self.size, col * self.size];
                self.push_patch(
                    frames,
                    |i| last.min(run * self.frames_a_run() + i),
                    at,
                    &mut values,
                );
            }
        }
        Cut {
            values,
            places,
            runs: grid.runs,
        }
    }

    /// Row and column of each patch of a run.
    fn places(&self, grid: MediaGrid) -> Vec<[usize; 2]> {
        let [height, width] = [grid.height, grid.width].map(|n| n * self.merge);
        let cells = |rows: usize, cols: usize| {
            (0..rows).flat_map(move |row| (0..cols).map(move |col| [row, col]))
        };
        match self.order {
            PatchOrder::Rows => cells(height, width).collect(),
            PatchOrder::Blocks { merge, .. } => cells(height / merge, width / merge)
                .flat_map(|[row, col]| {
                    cells(merge, merge).map(move |[y, x]| [row * merge + y, col * merge + x])
                })
                .collect(),
        }
    }

    /// Appends the patch whose first pixel is row and column `at` of each frame of its run.
    fn push_patch(
        &self,
        frames: &Frames<'_>,
        frame_of_run: impl Fn(usize) -> usize,
        at: [usize; 2],
        values: &mut Vec<f32>,
    ) {
        let size = self.size;
        let value = |frame: usize, row: usize, col: usize, channel: usize| {
            let pixel = (frame * frames.height + at[0] + row) * frames.width + at[1] + col;
            let [factor, summand] = self.scale[channel];
            (f32::from(frames.rgb[3 * pixel + channel]) / 255.0).mul_add(factor, summand)
        };
        let cells = || (0..size).flat_map(move |row| (0..size).map(move |col| (row, col)));
        match self.order {
            PatchOrder::Rows => values.extend(cells().flat_map(|(row, col)| {
                let frame = frame_of_run(0);
                [0, 1, 2].map(|channel| value(frame, row, col, channel))
            })),
            PatchOrder::Blocks { frames: n, .. } => {
                for (channel, i) in (0..3).flat_map(|c| (0..n).map(move |i| (c, i))) {
                    let frame = frame_of_run(i);
                    values.extend(cells().map(|(row, col)| value(frame, row, col, channel)));
                }
            }
        }
    }
}

/// `stored` with its column `order(i)` as column `i`, exactly.
pub(crate) fn in_order(stored: &Stored<'_>, order: impl Fn(usize) -> usize) -> Owned {
    picked(stored, stored.cols, order)
}

/// `cols` columns of `stored`, with its column `pick(i)` as column `i`, exactly.
pub(crate) fn picked(stored: &Stored<'_>, cols: usize, pick: impl Fn(usize) -> usize) -> Owned {
    let values = stored.to_f32();
    let rows = values.chunks_exact(stored.cols);
    let moved: Vec<f32> = rows
        .flat_map(|row| (0..cols).map(|i| row[pick(i)]))
        .collect();
    let plain = [&quant::F16, &quant::BF16];
    let format = plain.into_iter().find(|f| f.name == stored.format.name);
    quant::encode(format.unwrap_or(&quant::F32), &moved, cols, Scalar::F32)
}

/// For number `i` of a patch of `size` by `size` pixels as [`PatchOrder::Rows`] has it, where that
/// lies channel by channel.
pub(crate) fn channel_first(size: usize) -> impl Fn(usize) -> usize {
    move |i| i % 3 * size * size + i / 3
}

/// For number `i` of a patch of `frames` frames as [`PatchOrder::Blocks`] has it, where that lies
/// frame by frame, channels last.
pub(crate) fn channel_last(size: usize, frames: usize) -> impl Fn(usize) -> usize {
    let pixels = size * size;
    move |i| {
        let (channel, frame) = (i / (frames * pixels), i / pixels % frames);
        (frame * pixels + i % pixels) * 3 + channel
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A frame of 4 × 6 pixels whose red says where it lies, and the frame's number as blue.
    fn frames() -> Vec<u8> {
        let pixels = (0..2u8).flat_map(|f| (0..24u8).map(move |i| [i, 0, 100 * f]));
        pixels.flatten().collect()
    }

    fn patches(order: PatchOrder) -> Patches {
        Patches {
            size: 1,
            merge: 2,
            positions: 6,
            order,
            scale: [[255.0, 0.0]; 3],
        }
    }

    #[test]
    fn patches_lie_row_by_row_or_block_by_block() {
        let rgb = frames();
        let frames = Frames {
            height: 4,
            width: 6,
            rgb: &rgb,
        };
        let rows = patches(PatchOrder::Rows).cut(&frames);
        assert_eq!((rows.runs, rows.places[7]), (2, [1, 1]));
        let reds: Vec<f32> = rows.values.iter().copied().step_by(3).collect();
        assert_eq!(reds[..8], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
        assert_eq!(rows.values[24 * 3..][..3], [0.0, 0.0, 100.0]);

        let merge = 2;
        let blocks = patches(PatchOrder::Blocks { merge, frames: 2 }).cut(&frames);
        assert_eq!(blocks.places[..5], [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2]]);
        let width = 6;
        let reds: Vec<f32> = blocks.values.iter().copied().step_by(width).collect();
        assert_eq!(reds[..6], [0.0, 1.0, 6.0, 7.0, 2.0, 3.0]);
        // Red of both frames, green, blue.
        assert_eq!(
            blocks.values[width..2 * width],
            [1.0, 1.0, 0.0, 0.0, 0.0, 100.0]
        );
    }

    #[test]
    fn a_run_that_lacks_a_frame_repeats_its_last() {
        let rgb = frames();
        let one = Frames {
            height: 4,
            width: 6,
            rgb: &rgb[..72],
        };
        let twice = [&rgb[..72], &rgb[..72]].concat();
        let order = PatchOrder::Blocks {
            merge: 2,
            frames: 2,
        };
        let two = Frames { rgb: &twice, ..one };
        assert_eq!(
            patches(order).cut(&one).values,
            patches(order).cut(&two).values
        );
    }

    #[test]
    fn frames_of_other_sizes_are_refused() {
        let rgb = frames();
        let of = |height, width, rgb| Frames { height, width, rgb };
        let grid = |frames: &Frames<'_>| patches(PatchOrder::Rows).grid(frames);
        let whole = MediaGrid {
            runs: 2,
            height: 2,
            width: 3,
        };
        assert_eq!(grid(&of(4, 6, &rgb)), Ok(whole));
        assert_eq!(grid(&of(4, 6, &rgb[1..])), Err(MediaError::NoFrames));
        assert_eq!(grid(&of(0, 6, &[])), Err(MediaError::NoFrames));
        assert!(matches!(
            grid(&of(3, 8, &rgb)),
            Err(MediaError::Sides { .. })
        ));
        assert!(matches!(
            grid(&of(2, 12, &rgb)),
            Err(MediaError::TooWide { .. })
        ));
    }
}

//! Frames of pixels as patches, in the order in which a tower reads them.

use super::{Frames, MediaError, MediaGrid};
use quant::{Owned, Scalar, Stored};
use std::ops::Range;

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

/// Some patches of frames.
pub(crate) struct Cut {
    /// Numbers, `[patches, patch size² · 3 · frames of a run]`.
    pub(crate) values: Vec<f32>,
    /// Row and column of each patch.
    pub(crate) places: Vec<[usize; 2]>,
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

    /// Cuts patches `rows` out of `frames`, those of one run after those of the one before; `places` are those
    /// of the patches of a run. A run that lacks frames repeats the last one.
    ///
    /// # Panics
    ///
    /// If there are no such patches.
    pub(crate) fn cut(
        &self,
        frames: &Frames<'_>,
        places: &[[usize; 2]],
        rows: Range<usize>,
    ) -> Cut {
        let mut values = Vec::with_capacity(rows.len() * self.width());
        let last = frames.count() - 1;
        let scaled = self.scaled();
        let places = rows.map(|patch| {
            let (run, place) = (patch / places.len(), places[patch % places.len()]);
            let frame = |i| last.min(run * self.frames_a_run() + i);
            let at = place.map(|n| n * self.size);
            self.push_patch(frames, (frame, at), &scaled, &mut values);
            place
        });
        Cut {
            places: places.collect(),
            values,
        }
    }

    /// What each byte becomes, by channel.
    fn scaled(&self) -> [[f32; 256]; 3] {
        self.scale.map(|[factor, summand]| {
            let value = |byte: usize| (byte as f32 / 255.0).mul_add(factor, summand);
            std::array::from_fn(value)
        })
    }

    /// Row and column of each patch of a run of `grid`.
    pub(crate) fn places(&self, grid: MediaGrid) -> Vec<[usize; 2]> {
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

    /// Appends the patch whose first pixel is row and column `at` of each frame of its run; `scaled` is what
    /// bytes become.
    fn push_patch(
        &self,
        frames: &Frames<'_>,
        (frame_of_run, at): (impl Fn(usize) -> usize, [usize; 2]),
        scaled: &[[f32; 256]; 3],
        values: &mut Vec<f32>,
    ) {
        let size = self.size;
        let pixels = |frame: usize, row: usize| {
            let first = (frame * frames.height + at[0] + row) * frames.width + at[1];
            frames.rgb[3 * first..3 * (first + size)].chunks_exact(3)
        };
        match self.order {
            PatchOrder::Rows => {
                for pixel in (0..size).flat_map(|row| pixels(frame_of_run(0), row)) {
                    let value = |channel: usize| scaled[channel][usize::from(pixel[channel])];
                    values.extend_from_slice(&[value(0), value(1), value(2)]);
                }
            }
            PatchOrder::Blocks { frames: n, .. } => {
                for (channel, i) in (0..3).flat_map(|c| (0..n).map(move |i| (c, i))) {
                    let of_channel = &scaled[channel];
                    for row in 0..size {
                        let bytes = pixels(frame_of_run(i), row).map(|pixel| pixel[channel]);
                        values.extend(bytes.map(|byte| of_channel[usize::from(byte)]));
                    }
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

    /// All patches of `frames`.
    fn cut(order: PatchOrder, frames: &Frames<'_>) -> Cut {
        let patches = patches(order);
        let grid = patches.grid(frames).unwrap();
        let places = patches.places(grid);
        patches.cut(frames, &places, 0..grid.runs * places.len())
    }

    #[test]
    fn patches_lie_row_by_row_or_block_by_block() {
        let rgb = frames();
        let frames = Frames {
            height: 4,
            width: 6,
            rgb: &rgb,
        };
        let rows = cut(PatchOrder::Rows, &frames);
        assert_eq!((rows.places.len(), rows.places[7]), (2 * 24, [1, 1]));
        let reds: Vec<f32> = rows.values.iter().copied().step_by(3).collect();
        assert_eq!(reds[..8], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
        assert_eq!(rows.values[24 * 3..][..3], [0.0, 0.0, 100.0]);

        let merge = 2;
        let blocks = cut(PatchOrder::Blocks { merge, frames: 2 }, &frames);
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
        assert_eq!(cut(order, &one).values, cut(order, &two).values);
    }

    #[test]
    fn some_patches_are_a_part_of_all() {
        let rgb = frames();
        let frames = Frames {
            height: 4,
            width: 6,
            rgb: &rgb,
        };
        let order = PatchOrder::Rows;
        let (all, patches) = (cut(order, &frames), patches(order));
        let places = patches.places(patches.grid(&frames).unwrap());
        // Of both frames.
        let some = patches.cut(&frames, &places, 20..31);
        assert_eq!(some.values, all.values[20 * 3..31 * 3]);
        assert_eq!(some.places, all.places[20..31]);
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

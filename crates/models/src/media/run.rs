//! A tower at work, a slice at a time.
//!
//! ```text
//! embed ─→ for each layer: heads ─→ mix ─→ merge        each a phase, of rows
//! ```
//!
//! Rows see each other in attention alone, and all keys and values of a layer are there before one of its
//! rows is mixed. So the rows of a phase may be run together or in slices of any size: every op gives a
//! row the same bits in any company.
//!
//! Absent: how large a slice is and when it runs, which whoever drives the tower decides.

use super::{FrameMemory, Frames, MediaError, MediaGrid, Tower, TowerOutline};
use backend::{Backend, Batch, MediaRow, Tensor};
use std::borrow::Cow;
use std::ops::Range;

/// Patches that are looked at together, about: what bounds the memory that a long video takes.
const STEP_PATCHES: usize = 8192;

/// What comes next of a tower's work: rows that may run together or in slices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Phase {
    /// What is done with the rows; slices of one kind take as long a row, if `of` is alike.
    pub kind: &'static str,
    /// Rows that are left.
    pub rows: usize,
    /// Rows of the whole phase, or that a row sees.
    pub of: usize,
}

/// What is being done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Patches become rows.
    Embed,
    /// Queries, keys and values of a layer.
    Heads(usize),
    /// Attention of a layer, and what follows it.
    Mix(usize),
    /// Rows become embeddings.
    Merge,
}

/// A vision tower at work: what it has made of its frames so far.
pub struct TowerRun {
    grid: MediaGrid,
    layers: usize,
    /// Row and column of each patch of a run.
    places: Vec<[usize; 2]>,
    /// Runs that are looked at together, and the first of these.
    step: usize,
    first: usize,
    stage: Stage,
    /// Rows of the stage that are done.
    done: usize,
    x: Rows,
    q: Rows,
    memory: Option<FrameMemory>,
    values: Vec<f32>,
}

impl TowerRun {
    /// The beginning of `tower`'s work on `frames`; nothing has been done.
    ///
    /// # Errors
    ///
    /// [`MediaError`]: the frames are none that the tower takes.
    pub fn new(tower: &dyn Tower, frames: &Frames<'_>) -> Result<Self, MediaError> {
        let grid = tower.grid(frames)?;
        let TowerOutline { merge, layers, .. } = tower.outline();
        Ok(TowerRun {
            grid,
            layers,
            places: tower.places(grid),
            step: (STEP_PATCHES / (grid.run_rows() * merge * merge)).max(1),
            first: 0,
            stage: Stage::Embed,
            done: 0,
            x: Rows::default(),
            q: Rows::default(),
            memory: None,
            values: Vec::new(),
        })
    }

    /// Runs that are looked at now.
    fn runs(&self) -> Range<usize> {
        self.first..self.grid.runs.min(self.first + self.step)
    }

    /// Rows of the stage.
    fn stage_rows(&self) -> usize {
        self.runs().len()
            * match self.stage {
                Stage::Merge => self.grid.run_rows(),
                _ => self.places.len(),
            }
    }

    /// What comes next; nothing once the work is done.
    pub fn next_phase(&self) -> Option<Phase> {
        let (kind, of) = match self.stage {
            _ if self.runs().is_empty() => return None,
            Stage::Embed => ("embed", 0),
            Stage::Heads(_) => ("heads", 0),
            Stage::Mix(_) => ("mix", self.places.len()),
            Stage::Merge => ("merge", 0),
        };
        Some(Phase {
            kind,
            rows: self.stage_rows() - self.done,
            of,
        })
    }

    /// Runs the next `rows` rows on `b`, or as many as the phase has left, without waiting for the device.
    /// `tower` and `frames` are those that the work began with.
    ///
    /// # Panics
    ///
    /// If nothing is left, or `rows` is 0.
    pub fn advance(
        &mut self,
        tower: &dyn Tower,
        b: &dyn Backend,
        frames: &Frames<'_>,
        rows: usize,
    ) {
        let phase = self.next_phase().expect("work that is left");
        assert!(rows > 0, "rows of a slice");
        let part = self.done..self.done + rows.min(phase.rows);
        let n = self.stage_rows();
        match self.stage {
            Stage::Embed => self.embed(tower, b, frames, part.clone()),
            Stage::Heads(layer) => self.heads(tower, b, layer, part.clone()),
            Stage::Mix(layer) => self.mix(tower, b, layer, part.clone()),
            Stage::Merge => {
                let x = self.x.all();
                let rows = tower.merge(b, x, self.grid, part.clone());
                take_values(&mut self.values, b.download(&rows));
            }
        }
        self.done = part.end;
        if self.done == n {
            self.done = 0;
            self.next_stage();
        }
    }

    fn next_stage(&mut self) {
        let layer = |layer: usize| match layer < self.layers {
            true => Stage::Heads(layer),
            false => Stage::Merge,
        };
        self.stage = match self.stage {
            Stage::Embed => layer(0),
            Stage::Heads(layer) => Stage::Mix(layer),
            Stage::Mix(before) => layer(before + 1),
            Stage::Merge => {
                (self.x, self.q, self.memory) = (Rows::default(), Rows::default(), None);
                self.first = self.runs().end;
                Stage::Embed
            }
        };
    }

    fn embed(
        &mut self,
        tower: &dyn Tower,
        b: &dyn Backend,
        frames: &Frames<'_>,
        part: Range<usize>,
    ) {
        // Patches of all runs lie one after the other.
        let before = self.first * self.places.len();
        let made = tower.embed(
            b,
            frames,
            &self.places,
            before + part.start..before + part.end,
        );
        self.x.put(b, self.stage_rows(), part, made);
    }

    fn heads(&mut self, tower: &dyn Tower, b: &dyn Backend, layer: usize, part: Range<usize>) {
        let (n, runs) = (self.stage_rows(), self.runs().len());
        let layers = tower.layers().expect("a tower with layers");
        let memory = self.memory.get_or_insert_with(|| {
            FrameMemory::new(b, runs, self.places.clone(), layers.attention())
        });
        let batch = memory.batch(part.clone());
        let [q, k, v] = self
            .x
            .read(b, part.clone(), |x| layers.heads(b, layer, x, batch));
        memory.append(b, &k, &v);
        self.q.put(b, n, part, q);
    }

    fn mix(&mut self, tower: &dyn Tower, b: &dyn Backend, layer: usize, part: Range<usize>) {
        let n = self.stage_rows();
        let layers = tower.layers().expect("a tower with layers");
        let memory = self.memory.as_mut().expect("keys and values");
        memory.batch(part.clone());
        let a = {
            let q = self.q.take(b, part.clone());
            memory.attend(b, &q)
        };
        let x = self.x.take(b, part.clone());
        let x = layers.mix(b, layer, x, a);
        self.x.put(b, n, part, x);
    }

    /// The frames' rows in a prompt, and their embeddings, span after span, row-major: those that are
    /// done. An error of the device comes out of [`finish`](backend::Record::finish), which has to be asked
    /// first.
    pub fn into_rows(self) -> (MediaGrid, Vec<f32>) {
        (self.grid, self.values)
    }
}

/// Rows of a step that are written and read in slices; all at once, they are moved and not copied.
#[derive(Default)]
pub(super) struct Rows(Option<Tensor>);

impl Rows {
    /// All rows.
    pub(super) fn all(&self) -> &Tensor {
        self.0.as_ref().expect("rows that were written")
    }

    /// Has `read` read rows `part`.
    pub(super) fn read<T>(
        &self,
        b: &dyn Backend,
        part: Range<usize>,
        read: impl FnOnce(&Tensor) -> T,
    ) -> T {
        let x = self.all();
        if part == (0..x.rows()) {
            return read(x);
        }
        read(&gathered(b, x, part))
    }

    /// Rows `part`, which are not read again before they are written.
    fn take(&mut self, b: &dyn Backend, part: Range<usize>) -> Tensor {
        if part == (0..self.all().rows()) {
            return self.0.take().expect("rows that were written");
        }
        gathered(b, self.all(), part)
    }

    /// Writes rows `part` of `n`.
    pub(super) fn put(&mut self, b: &dyn Backend, n: usize, part: Range<usize>, rows: Tensor) {
        if part == (0..n) {
            self.0 = Some(rows);
            return;
        }
        let all = self.0.take();
        let all = all.unwrap_or_else(|| b.scratch(n, rows.cols()));
        let media = part.zip(0..).map(|(row, embedding)| MediaRow {
            row: row as u32,
            source: 0,
            embedding,
        });
        let batch = Batch {
            media: media.collect(),
            ..Batch::default()
        };
        self.0 = Some(b.replace_rows(all, &rows, 0, &batch));
    }
}

/// Appends what was downloaded, without a copy if it is the first.
fn take_values(values: &mut Vec<f32>, made: Cow<'_, [f32]>) {
    match made {
        Cow::Owned(made) if values.is_empty() => *values = made,
        made => values.extend_from_slice(&made),
    }
}

/// Rows `part` of `x`.
pub(crate) fn gathered(b: &dyn Backend, x: &Tensor, part: Range<usize>) -> Tensor {
    b.gather(x, &part.collect::<Vec<_>>())
}

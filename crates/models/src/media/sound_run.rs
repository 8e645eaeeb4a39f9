//! A sound tower at work, a slice at a time.
//!
//! A row of a layer's result depends on the row itself and on some before it, as many as
//! [`SoundTower::reach`] says. So a slice of a layer begins that many rows earlier, and what becomes of
//! these is dropped.

use super::run::Rows;
use super::{Phase, SoundTower, gathered};
use backend::Backend;
use std::ops::Range;

/// What is being done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Samples become rows, all at once.
    Embed,
    Layer(usize),
    /// Rows become embeddings.
    Project,
    Done,
}

/// A sound tower at work: what it has made of its samples so far.
pub struct SoundRun {
    layers: usize,
    stage: Stage,
    /// Rows of the stage that are done.
    done: usize,
    /// Rows before the layer at work, and behind it.
    x: Rows,
    y: Rows,
    values: Vec<f32>,
}

impl SoundRun {
    /// The beginning of `tower`'s work; nothing has been done.
    pub fn new(tower: &dyn SoundTower) -> Self {
        SoundRun {
            layers: tower.outline().layers,
            stage: Stage::Embed,
            done: 0,
            x: Rows::default(),
            y: Rows::default(),
            values: Vec::new(),
        }
    }

    /// What comes next; nothing once the work is done.
    pub fn next_phase(&self) -> Option<Phase> {
        let (kind, rows) = match self.stage {
            Stage::Embed => ("sound embed", 1),
            Stage::Layer(_) => ("sound layer", self.x.all().rows()),
            Stage::Project => ("sound project", self.x.all().rows()),
            Stage::Done => return None,
        };
        Some(Phase {
            kind,
            rows: rows - self.done,
            of: 0,
        })
    }

    /// Runs the next `rows` rows on `b`, or as many as the phase has left, without waiting for the device.
    /// `tower` and `samples` are those that the work began with.
    ///
    /// # Panics
    ///
    /// If nothing is left, `rows` is 0, or [`SoundTower::rows`] gives an error.
    pub fn advance(
        &mut self,
        tower: &dyn SoundTower,
        b: &dyn Backend,
        samples: &[f32],
        rows: usize,
    ) {
        let phase = self.next_phase().expect("work that is left");
        assert!(rows > 0, "rows of a slice");
        let part = self.done..self.done + rows.min(phase.rows);
        self.done = part.end;
        match self.stage {
            Stage::Embed => {
                let x = tower.embed(b, samples);
                self.x.put(b, x.rows(), 0..x.rows(), x);
            }
            Stage::Layer(layer) => self.layer(tower, b, layer, part.clone()),
            Stage::Project => {
                let e = self.x.read(b, part.clone(), |x| tower.project(b, x));
                self.values.extend_from_slice(&b.download(&e));
            }
            Stage::Done => {}
        }
        if part.len() == phase.rows {
            self.next_stage();
        }
    }

    fn layer(&mut self, tower: &dyn SoundTower, b: &dyn Backend, layer: usize, part: Range<usize>) {
        let n = self.x.all().rows();
        let before = part.start.min(tower.reach());
        let read = part.start - before..part.end;
        let y = self.x.read(b, read.clone(), |x| tower.layer(b, layer, x));
        let y = match before {
            0 => y,
            _ => gathered(b, &y, before..read.len()),
        };
        self.y.put(b, n, part, y);
    }

    fn next_stage(&mut self) {
        let layer = |layer: usize| match layer < self.layers {
            true => Stage::Layer(layer),
            false => Stage::Project,
        };
        self.done = 0;
        self.stage = match self.stage {
            Stage::Embed => layer(0),
            Stage::Layer(before) => {
                self.x = std::mem::take(&mut self.y);
                layer(before + 1)
            }
            Stage::Project | Stage::Done => {
                self.x = Rows::default();
                Stage::Done
            }
        };
    }

    /// The sound's embeddings, row-major: those that are done. An error of the device comes out of
    /// [`finish`](backend::Record::finish), which has to be asked first.
    pub fn into_rows(self) -> Vec<f32> {
        self.values
    }
}

//! Another KV cache for a model that is loaded: its weights stay where they are.

use crate::drafters::outlook;
use crate::drafters::pairing::fits;
use crate::error::EngineError;
use crate::footprint::Planned;
use crate::info::Model;
use crate::load::check_formats;
use crate::memory_plan::{Room, planned_size};
use crate::options::LoadOptions;
use crate::source::Source;
use cache::{KeptSize, KvPlan, MemorySize};

impl Model {
    /// Replaces KV cache and recurrent state by those that `options` ask for, with their context, number of
    /// sequences and formats, and the drafter as [`redraft`](Model::redraft) does. The model was loaded from `source`
    /// with the same options but for these and those that may differ there; it is not tried again, and starts from what
    /// rounds have cost so far.
    ///
    /// # Errors
    ///
    /// [`EngineError`] as of [`load`](crate::load), [`EngineError::TooLarge`] before anything is allocated. The model
    /// then has no drafter, and has to be resized before it writes again.
    pub fn resize(&mut self, source: &Source, options: &LoadOptions) -> Result<(), EngineError> {
        options.check()?;
        let costs = self.speculator.costs().clone();
        self.discard_drafter();
        let resized = self.remember(source, options);
        self.speculator.set_costs(costs);
        resized
    }

    /// Replaces the KV cache by an empty one of keys and values in `kv`, and leaves the model without a drafter.
    ///
    /// # Errors
    ///
    /// [`EngineError`] as of [`load`](crate::load), before the cache is replaced, where the format or its size is what
    /// cannot be had.
    pub fn change_kv(&mut self, kv: KvPlan) -> Result<(), EngineError> {
        self.discard_drafter();
        let (b, target) = (self.speculator.backend(), self.speculator.target());
        fits(&**b, &target.plan(), &kv)?;
        let size = MemorySize {
            kv_format: kv,
            ..*self.speculator.memory().size()
        };
        self.budget.check(&[Planned::target(target)], &size)?;
        self.speculator.resize(size);
        self.speculator.backend().finish()?;
        self.count_memory();
        Ok(())
    }

    /// The part of [`resize`](Model::resize) that can fail on the way.
    fn remember(&mut self, source: &Source, options: &LoadOptions) -> Result<(), EngineError> {
        let step_rows = self.speculator.memory().size().step_rows;
        let (b, target) = (self.speculator.backend(), self.speculator.target());
        check_formats(&**b, target, options)?;
        let beside = outlook(&**b, options).map(|outlook| outlook.planned);
        let size = planned_size(target, beside.as_ref(), step_rows, Room::Unknown, options)?;
        self.budget.check(&[Planned::target(target)], &size)?;
        self.speculator.resize(size);
        if let Err(error) = self.speculator.backend().finish() {
            // What could be had of it is given back.
            self.speculator.resize(MemorySize {
                sequences: 1,
                context: 1,
                running_pages: None,
                kept: KeptSize::default(),
                ..size
            });
            return Err(error.into());
        }
        self.info.context = size.context;
        self.info.sequences = size.sequences;
        self.redraft(source, options)
    }
}

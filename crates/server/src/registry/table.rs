//! Each model's state, and the rules: who makes room for whom, and when.
//!
//! Nothing here waits or loads; whoever changes the table tells the others.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::ModelInfo;

use super::spec::{LoadFailure, ModelsOptions, Progress};
use crate::app::Loaded;
use crate::metrics::Metrics;

/// Where a model is.
pub(super) enum State {
    /// Not in memory.
    Unloaded,
    /// Being loaded.
    Loading(Arc<Progress>),
    /// In memory.
    Loaded(Arc<Loaded>),
    /// Leaving memory.
    Unloading,
}

/// What changes of a model.
pub(super) struct Slot {
    pub(super) state: State,
    /// Whether the model can be loaded again, and so may be unloaded.
    pub(super) may_leave: bool,
    /// Requests that hold the model.
    pub(super) holds: usize,
    /// Requests that wait for the model, or are about to take it.
    pub(super) wanted: usize,
    /// Whether the model was loaded for a request that has not taken it yet: until then it stays.
    pub(super) is_fresh: bool,
    /// When a request last took or left the model, counted in such events.
    pub(super) used: u64,
    /// Since when nobody holds the model, if nobody does.
    pub(super) idle_since: Instant,
    /// How long the model stays without requests; for ever if absent.
    pub(super) keep: Option<Duration>,
    /// Whether the model leaves as soon as nobody holds it.
    pub(super) leaves: bool,
    /// Tries to load the model.
    pub(super) tries: u64,
    /// Why the last try failed, if it did.
    pub(super) failure: Option<LoadFailure>,
    /// Whether the model has been loaded, or could not be.
    pub(super) is_settled: bool,
    /// Whether another model has to leave before this one is tried again.
    pub(super) is_short: bool,
    /// Bytes of memory that the model needs, as far as known.
    pub(super) needs: u64,
    /// What was known of the model when it was last loaded.
    pub(super) info: Option<ModelInfo>,
    /// What is counted of the model.
    pub(super) metrics: Option<Arc<Metrics>>,
}

impl Slot {
    /// The model, if it is loaded.
    pub(super) fn loaded(&self) -> Option<&Arc<Loaded>> {
        match &self.state {
            State::Loaded(loaded) => Some(loaded),
            _ => None,
        }
    }

    /// When the model leaves for want of requests, if it does.
    pub(super) fn expires(&self) -> Option<Instant> {
        let is_idle = self.loaded().is_some() && self.is_free() && self.may_leave;
        let keep = if self.leaves {
            Some(Duration::ZERO)
        } else {
            self.keep
        };
        keep.filter(|_| is_idle)
            .and_then(|keep| self.idle_since.checked_add(keep))
    }

    /// Whether nobody has the model, or is about to.
    pub(super) fn is_free(&self) -> bool {
        self.holds == 0 && !self.is_fresh
    }

    fn is_moving(&self) -> bool {
        matches!(self.state, State::Loading(_) | State::Unloading)
    }
}

/// Every model's state.
pub(super) struct Table {
    pub(super) slots: Vec<Slot>,
    max_loaded: usize,
    memory: Option<u64>,
    /// How long a model stays without requests where these do not say.
    pub(super) keep: Option<Duration>,
    /// Events so far of requests that took or left a model.
    events: u64,
    /// Requests that have come to wait for a model.
    tickets: u64,
    /// Requests that wait for room, or for one that does: the model of each, by its ticket.
    line: BTreeMap<u64, usize>,
    /// The model that takes no more requests, so that it makes room for those who wait.
    drains: Option<usize>,
}

/// Whether there is room for a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Room {
    /// There is.
    Free,
    /// There will be when this model has left.
    After(usize),
    /// A model is moving, or all that could leave are held.
    Wait,
}

impl Table {
    pub(super) fn new(options: &ModelsOptions) -> Self {
        Table {
            slots: Vec::new(),
            max_loaded: options.max_loaded.unwrap_or(usize::MAX).max(1),
            memory: options.memory,
            keep: options.idle_unload,
            events: 0,
            tickets: 0,
            line: BTreeMap::new(),
            drains: None,
        }
    }

    /// Adds a model that is not loaded.
    pub(super) fn add(&mut self, needs: u64, may_leave: bool) {
        self.slots.push(Slot {
            state: State::Unloaded,
            may_leave,
            holds: 0,
            wanted: 0,
            is_fresh: false,
            used: 0,
            idle_since: Instant::now(),
            keep: self.keep,
            leaves: false,
            tries: 0,
            failure: None,
            is_settled: false,
            is_short: false,
            needs,
            info: None,
            metrics: None,
        });
    }

    /// Notes that model `i` is loaded.
    pub(super) fn is_loaded(&mut self, i: usize, loaded: Arc<Loaded>) {
        self.events += 1;
        let slot = &mut self.slots[i];
        slot.needs = memory_of(loaded.engine.info());
        slot.info = Some(loaded.engine.info().clone());
        slot.metrics = Some(loaded.metrics.clone());
        (slot.used, slot.idle_since) = (self.events, Instant::now());
        (slot.failure, slot.is_settled, slot.leaves) = (None, true, false);
        slot.is_fresh = slot.wanted > 0;
        slot.state = State::Loaded(loaded);
    }

    /// Notes that model `i` could not be loaded. If another model can make room for it, it waits for
    /// that; otherwise the try has failed.
    pub(super) fn has_failed(&mut self, i: usize, failure: LoadFailure) {
        let others = self.may_leave().any(|other| other != i);
        let slot = &mut self.slots[i];
        slot.state = State::Unloaded;
        slot.is_short = failure.is_too_large && others;
        if !slot.is_short {
            (slot.failure, slot.is_settled) = (Some(failure), true);
        }
    }

    /// Models that could leave, held or not.
    fn may_leave(&self) -> impl Iterator<Item = usize> {
        let slots = self.slots.iter().enumerate();
        slots.filter_map(|(i, slot)| (slot.loaded().is_some() && slot.may_leave).then_some(i))
    }

    /// Bytes of all models that are loaded.
    fn taken(&self) -> u64 {
        let loaded = self.slots.iter().filter(|slot| slot.loaded().is_some());
        loaded.map(|slot| slot.needs).sum()
    }

    /// Bytes that the next model may take, if there is a limit.
    pub(super) fn room(&self) -> Option<u64> {
        self.memory.map(|all| all.saturating_sub(self.taken()))
    }

    /// Notes that a request waits for model `i`, and gives its place in the order of requests.
    pub(super) fn want(&mut self, i: usize) -> u64 {
        self.slots[i].wanted += 1;
        self.ticket()
    }

    /// Notes that the request with this ticket no longer waits for model `i`.
    pub(super) fn leave(&mut self, i: usize, ticket: u64) {
        let slot = &mut self.slots[i];
        slot.wanted -= 1;
        slot.is_fresh &= slot.wanted > 0;
        self.leave_line(ticket);
    }

    /// A place in the order of requests.
    pub(super) fn ticket(&mut self) -> u64 {
        self.tickets += 1;
        self.tickets
    }

    /// Leaves the line of those who wait.
    pub(super) fn leave_line(&mut self, ticket: u64) {
        self.line.remove(&ticket);
        if self.line.is_empty() {
            self.drains = None;
        }
    }

    /// Takes model `i` for the request with this ticket; nothing if the model is not loaded, or
    /// makes room for others who came first.
    pub(super) fn take(&mut self, i: usize, ticket: u64) -> Option<Arc<Loaded>> {
        let loaded = self.slots[i].loaded()?.clone();
        let first = self.line.first_key_value().map(|(first, _)| *first);
        let is_late = first.is_some_and(|first| first < ticket);
        // Whom it was loaded for has it, whoever waits.
        if self.drains == Some(i) && is_late && !self.slots[i].is_fresh {
            self.line.insert(ticket, i);
            return None;
        }
        self.leave_line(ticket);
        self.events += 1;
        let slot = &mut self.slots[i];
        slot.holds += 1;
        slot.is_fresh = false;
        slot.used = self.events;
        Some(loaded)
    }

    /// Takes back what [`take`](Table::take) gave.
    pub(super) fn give_back(&mut self, i: usize) {
        self.events += 1;
        let slot = &mut self.slots[i];
        slot.holds -= 1;
        (slot.used, slot.idle_since) = (self.events, Instant::now());
    }

    /// Whether model `i` can be loaded beside those that are.
    fn fits(&self, i: usize) -> bool {
        let n_loaded = self.slots.iter().filter(|slot| slot.loaded().is_some());
        let is_full = n_loaded.count() >= self.max_loaded;
        let slot = &self.slots[i];
        let is_too_much = self.room().is_some_and(|room| slot.needs > room);
        // If nothing can leave, the only way to learn whether the model fits is to try.
        !(is_full || is_too_much || slot.is_short) || self.may_leave().next().is_none()
    }

    /// Whether somebody who came before the request with this ticket waits to load another model than
    /// `i`, and could.
    fn is_preceded(&self, i: usize, ticket: u64) -> bool {
        let mut earlier = self.line.range(..ticket).map(|(_, model)| *model);
        let is_unloaded = |model: usize| matches!(self.slots[model].state, State::Unloaded);
        earlier.any(|model| model != i && is_unloaded(model) && self.fits(model))
    }

    /// Whether there is room for model `i`, which the request with this ticket waits for.
    pub(super) fn make_room(&mut self, i: usize, ticket: u64) -> Room {
        if self.slots.iter().any(Slot::is_moving) || self.is_preceded(i, ticket) {
            self.line.insert(ticket, i);
            return Room::Wait;
        }
        if self.fits(i) {
            return Room::Free;
        }
        let by_use = |&i: &usize| self.slots[i].used;
        let idle = self.may_leave().filter(|&i| self.slots[i].is_free());
        match idle.min_by_key(by_use) {
            Some(idle) => Room::After(idle),
            None => {
                self.drains = self.may_leave().min_by_key(by_use);
                self.line.insert(ticket, i);
                Room::Wait
            }
        }
    }

    /// Begins to unload model `i`, which nobody holds.
    ///
    /// # Panics
    ///
    /// If somebody does, or it is not loaded.
    pub(super) fn begin_to_leave(&mut self, i: usize) -> Arc<Loaded> {
        let slot = &mut self.slots[i];
        assert_eq!(slot.holds, 0, "a model that is held stays");
        let State::Loaded(loaded) = std::mem::replace(&mut slot.state, State::Unloading) else {
            panic!("a model that is not loaded cannot leave");
        };
        slot.leaves = false;
        if self.drains == Some(i) {
            self.drains = None;
        }
        for slot in &mut self.slots {
            slot.is_short = false;
        }
        loaded
    }

    /// Models whose time without requests is over at `now`, and when the next one's is.
    pub(super) fn expired(&self, now: Instant) -> (Vec<usize>, Option<Instant>) {
        let all = self.slots.iter().enumerate();
        let all: Vec<(usize, Instant)> = all
            .filter_map(|(i, slot)| Some((i, slot.expires()?)))
            .collect();
        let (over, later): (Vec<_>, Vec<_>) = all.into_iter().partition(|(_, at)| *at <= now);
        let next = later.into_iter().map(|(_, at)| at).min();
        (over.into_iter().map(|(i, _)| i).collect(), next)
    }
}

/// Bytes of weights and KV caches of a loaded model; weights that stay in their files take none.
pub(super) fn memory_of(info: &ModelInfo) -> u64 {
    let weights = match info.weights {
        "mapped" => 0,
        _ => info.weight_bytes + info.drafter_weight_bytes,
    };
    weights + info.memory_bytes as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_came_first_loads_first() {
        let mut table = Table::new(&ModelsOptions {
            max_loaded: Some(1),
            ..ModelsOptions::default()
        });
        (0..3).for_each(|_| table.add(0, true));
        // Two wait for a third model that is leaving, and look in the other order once it has left.
        table.slots[2].state = State::Unloading;
        let (first, second) = (table.want(0), table.want(1));
        assert_eq!(table.make_room(0, first), Room::Wait);
        assert_eq!(table.make_room(1, second), Room::Wait);
        table.slots[2].state = State::Unloaded;
        assert_eq!(table.make_room(1, second), Room::Wait);
        assert_eq!(table.make_room(0, first), Room::Free);
        // Nobody waits for one that has gone.
        table.leave(0, first);
        assert_eq!(table.make_room(1, second), Room::Free);
    }
}

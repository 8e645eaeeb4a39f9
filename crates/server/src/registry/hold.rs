//! A request's hold on a model, and the wait for it.

use std::sync::Arc;
use std::time::Duration;

use super::table::{Room, State};
use super::{Registry, Snapshot};
use crate::app::Loaded;
use crate::errors::ApiError;

/// How long a model is to stay loaded after a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keep {
    /// As long as the server says.
    Default,
    /// So long.
    For(Duration),
    /// Until its room is needed.
    Forever,
}

/// A hold on a model: it is not unloaded before the hold is dropped.
pub(crate) struct Hold {
    registry: Arc<Registry>,
    model: usize,
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.registry.table().give_back(self.model);
        // The task that unloads idle models is told too.
        self.registry.tell();
    }
}

/// A place in the line of those who wait for a model, given up when the request is.
struct Place<'a> {
    registry: &'a Registry,
    model: usize,
    ticket: u64,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.registry.table().leave(self.model, self.ticket);
        self.registry.tell();
    }
}

/// What comes of a look at the table.
enum Step {
    Held(Arc<Loaded>, Hold),
    Wait,
    Failed(ApiError),
}

impl Registry {
    /// Takes model `i`, if it is loaded and makes no room for others.
    pub(crate) fn try_hold(self: &Arc<Self>, i: usize, keep: Keep) -> Option<(Arc<Loaded>, Hold)> {
        let mut table = self.table();
        let ticket = table.ticket();
        let loaded = table.take(i, ticket);
        if loaded.is_none() {
            table.leave_line(ticket);
        }
        let loaded = loaded?;
        self.keep(&mut table.slots[i].keep, keep);
        let hold = Hold {
            registry: self.clone(),
            model: i,
        };
        Some((loaded, hold))
    }

    /// How far model `i` is, if it is the only one and is being loaded for the first time: a
    /// request for it is told to come back.
    pub(crate) fn starts(&self, i: usize) -> Option<Snapshot> {
        let table = self.table();
        let slot = &table.slots[i];
        match &slot.state {
            _ if !self.is_single() || !self.entries[i].preload || slot.is_settled => None,
            State::Loading(progress) => Some(progress.snapshot()),
            _ => Some(Snapshot::default()),
        }
    }

    /// Waits for model `i`, loading it if need be, and takes it.
    ///
    /// # Errors
    ///
    /// If it could not be loaded.
    pub(crate) async fn hold(
        self: &Arc<Self>,
        i: usize,
        keep: Keep,
    ) -> Result<(Arc<Loaded>, Hold), ApiError> {
        let mut changes = self.changes.subscribe();
        let ticket = self.table().want(i);
        let place = Place {
            registry: self,
            model: i,
            ticket,
        };
        let mut tried = None;
        loop {
            changes.borrow_and_update();
            match self.step(i, keep, place.ticket, &mut tried) {
                Step::Held(loaded, hold) => return Ok((loaded, hold)),
                Step::Failed(error) => return Err(error),
                Step::Wait => {
                    // The registry is there, so the sender is.
                    let _ = changes.changed().await;
                }
            }
        }
    }

    /// Looks at the table for a request for model `i`. `tried` is the try to load it that the
    /// request waits for.
    fn step(self: &Arc<Self>, i: usize, keep: Keep, ticket: u64, tried: &mut Option<u64>) -> Step {
        let mut table = self.table();
        if let Some(loaded) = table.take(i, ticket) {
            self.keep(&mut table.slots[i].keep, keep);
            let hold = Hold {
                registry: self.clone(),
                model: i,
            };
            return Step::Held(loaded, hold);
        }
        let slot = &table.slots[i];
        match &slot.state {
            State::Loaded(_) | State::Unloading => return Step::Wait,
            State::Loading(_) => {
                *tried = Some(slot.tries);
                return Step::Wait;
            }
            State::Unloaded => {}
        }
        let has_failed = slot.failure.is_some() && *tried == Some(slot.tries);
        if has_failed || !slot.may_leave {
            return Step::Failed(ApiError::not_loaded(&self.entries[i].names[0]));
        }
        match table.make_room(i, ticket) {
            Room::Free => {
                self.begin_to_load(&mut table, i);
                *tried = Some(table.slots[i].tries);
            }
            Room::After(other) => self.begin_to_unload(&mut table, other),
            Room::Wait => {}
        }
        Step::Wait
    }

    /// Has a model stay as a request says.
    fn keep(&self, slot: &mut Option<Duration>, asked: Keep) {
        *slot = match asked {
            Keep::Default => self.options.idle_unload,
            Keep::For(time) => Some(time),
            Keep::Forever => None,
        };
    }
}

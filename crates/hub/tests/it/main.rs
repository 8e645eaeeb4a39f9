//! The hub's client against a hub on this machine, and against broken ones.

mod fetching;
mod heads;
mod server;

//! One binary, so that the crate is linked once.

mod bundled;
mod coded;
mod common;
mod folder;
mod hostile;
mod norms;
mod reading;

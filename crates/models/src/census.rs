//! Whether a checkpoint holds the whole of a draft head, counted by name.
//!
//! A loader that stops at the first missing tensor, or skips one it does not
//! know, leaves people guessing: a head without one scale still drafts, and is
//! never right. So the names are counted before anything is loaded, and what was
//! left unread afterwards.

use crate::ModelError;
use serde::Serialize;
use std::collections::BTreeSet;
use weights::Checkpoint;

/// Missing tensors that a message lists one by one.
const MISSING_SHOWN: usize = 6;

/// The tensors of a draft head that a checkpoint should have, and has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Census {
    /// How many tensors the configuration implies, scales and biases of quantized
    /// ones not counted.
    pub expected: usize,
    /// Names of expected tensors that are not there.
    pub missing: Vec<String>,
    /// Names of tensors that nobody reads.
    pub extra: Vec<String>,
}

impl Census {
    /// Counts the tensors of `checkpoint` under `prefix` against `expected`.
    pub(crate) fn take(checkpoint: &Checkpoint, prefix: &str, expected: &[String]) -> Census {
        let module = |name: &str| name.strip_suffix("weight").map(str::to_owned);
        let names: BTreeSet<&str> = expected.iter().map(String::as_str).collect();
        let modules: BTreeSet<String> = expected.iter().filter_map(|n| module(n)).collect();
        // A format of its own, such as `fc.weight_packed`, counts: if it cannot be
        // read, the loader says so by its name.
        let holds = |name: &String| {
            let packed = module(name).map(|m| [format!("{m}weight_packed"), format!("{m}qweight")]);
            checkpoint.has(name) || packed.is_some_and(|p| p.iter().any(|p| checkpoint.has(p)))
        };
        let is_known = |name: &str| {
            let mut ends = name.match_indices('.').map(|(at, _)| &name[..=at]);
            names.contains(name) || ends.any(|module| modules.contains(module))
        };
        let extra = checkpoint
            .names()
            .filter(|name| name.starts_with(prefix) && !is_known(name));
        Census {
            expected: expected.len(),
            missing: expected.iter().filter(|n| !holds(n)).cloned().collect(),
            extra: extra.map(str::to_owned).collect(),
        }
    }

    /// An error that names what is missing of `head`.
    pub(crate) fn complete(&self, head: &'static str) -> Result<(), ModelError> {
        if self.missing.is_empty() {
            return Ok(());
        }
        Err(ModelError::IncompleteHead {
            head,
            expected: self.expected,
            missing: self.missing.clone(),
        })
    }
}

/// An error if a part of a tensor of the head was left unread.
pub(crate) fn all_parts_read(checkpoint: &Checkpoint, prefix: &str) -> Result<(), ModelError> {
    match checkpoint.unread_companions(prefix).first() {
        None => Ok(()),
        Some(name) => Err(ModelError::UnreadPart {
            name: (*name).to_owned(),
        }),
    }
}

/// `names` for a message: quoted, the end of a long list cut off.
pub(crate) fn list(names: &[String]) -> String {
    let shown: Vec<String> = names
        .iter()
        .take(MISSING_SHOWN)
        .map(|n| format!("`{n}`"))
        .collect();
    let rest = names.len() - shown.len();
    let end = if rest == 0 {
        String::new()
    } else {
        format!(" and {rest} more")
    };
    shown.join(", ") + &end
}

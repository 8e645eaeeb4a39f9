//! Responses that are kept, so that they can be read again and gone on from.
//!
//! In memory only, within limits of number and bytes; the one that was used longest ago is
//! dropped for a new one. What goes on from a response keeps no copy of it, so a conversation
//! takes the memory of its items once. Whoever uses a response uses all that it goes on from,
//! the earliest last: the end of a conversation is dropped before its beginning.
//!
//! A response belongs to the API key that it was asked for with, where keys are used. To all
//! others it is not there.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Map, Value};

use crate::auth::Caller;
use crate::limits::Limits;

/// Bytes that a [`Value`] takes beside its text, and an object beside its names.
const VALUE_BYTES: usize = 72;
const OBJECT_BYTES: usize = 5 * VALUE_BYTES;

/// A response that is kept.
#[derive(Debug)]
pub(crate) struct Stored {
    /// The id of the response.
    pub(super) id: String,
    /// The key that it was asked for with.
    pub(super) caller: Option<Caller>,
    /// The id of the response that it goes on from.
    pub(super) previous: Option<String>,
    /// The items of its own input.
    pub(super) input: Arc<Vec<Map<String, Value>>>,
    /// The items that were written.
    pub(super) output: Vec<Map<String, Value>>,
    /// The response as a JSON document.
    pub(super) document: String,
}

impl Stored {
    /// Every item, in the order of the conversation.
    pub(super) fn items(&self) -> impl Iterator<Item = &Map<String, Value>> {
        self.input.iter().chain(&self.output)
    }

    /// Bytes of memory that it takes, about.
    pub(super) fn bytes(&self) -> usize {
        let items = self.items().map(bytes_of_map).sum::<usize>();
        VALUE_BYTES + self.id.len() + self.document.len() + items
    }
}

fn bytes_of_map(map: &Map<String, Value>) -> usize {
    let entry = |(name, value): (&String, &Value)| VALUE_BYTES + name.len() + bytes_of(value);
    OBJECT_BYTES + map.iter().map(entry).sum::<usize>()
}

fn bytes_of(value: &Value) -> usize {
    VALUE_BYTES
        + match value {
            Value::String(text) => text.len(),
            Value::Array(list) => list.iter().map(bytes_of).sum(),
            Value::Object(map) => bytes_of_map(map),
            Value::Null | Value::Bool(_) | Value::Number(_) => 0,
        }
}

/// The responses that are kept.
#[derive(Debug)]
pub(crate) struct Store {
    /// How many there may be.
    most: usize,
    /// Bytes that they may take together.
    bytes_most: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    entries: HashMap<String, Entry>,
    /// Ids by when they were last used.
    by_use: BTreeMap<u64, String>,
    bytes: usize,
    clock: u64,
}

#[derive(Debug)]
struct Entry {
    stored: Arc<Stored>,
    used: u64,
}

impl Store {
    /// An empty store.
    pub(crate) fn new(limits: &Limits) -> Self {
        Store {
            most: limits.stored_responses,
            bytes_most: limits.stored_bytes,
            state: Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a response, and drops others where there is no room; one that is larger than all
    /// of the room is not kept.
    pub(super) fn keep(&self, stored: impl Into<Arc<Stored>>) {
        let stored = stored.into();
        let bytes = stored.bytes();
        if bytes > self.bytes_most || self.most == 0 {
            return;
        }
        let mut state = self.state();
        let id = stored.id.clone();
        let entry = Entry { stored, used: 0 };
        state.entries.insert(id.clone(), entry);
        state.bytes += bytes;
        state.touch(&id);
        while state.entries.len() > self.most || state.bytes > self.bytes_most {
            let Some((_, oldest)) = state.by_use.pop_first() else {
                return;
            };
            state.remove(&oldest);
        }
    }

    /// The response with this id, if it is kept for `caller`.
    pub(super) fn get(&self, id: &str, caller: Option<Caller>) -> Option<Arc<Stored>> {
        let mut state = self.state();
        let found = state.find(id, caller)?;
        state.touch(id);
        Some(found)
    }

    /// The conversation that ends with the response `id`, the earliest response first; or the
    /// id of the first one, going back, that is not kept for `caller`.
    pub(super) fn conversation(
        &self,
        id: &str,
        caller: Option<Caller>,
    ) -> Result<Vec<Arc<Stored>>, String> {
        let mut state = self.state();
        let mut all = Vec::new();
        let mut next = Some(id.to_owned());
        while let Some(id) = next {
            let Some(found) = state.find(&id, caller) else {
                return Err(id);
            };
            next = found.previous.clone();
            all.push(found);
        }
        state.touch(id);
        all.reverse();
        Ok(all)
    }

    /// Forgets a response; false if it is not kept for `caller`.
    pub(super) fn forget(&self, id: &str, caller: Option<Caller>) -> bool {
        let mut state = self.state();
        state.find(id, caller).is_some() && state.remove(id)
    }

    /// The items with these ids, of the responses that are kept for `caller`. Of several with
    /// one id it is the one that was used last.
    pub(super) fn items(
        &self,
        ids: &HashSet<&str>,
        caller: Option<Caller>,
    ) -> HashMap<String, Map<String, Value>> {
        let state = self.state();
        let mut found = HashMap::new();
        for id in state.by_use.values() {
            let stored = &state.entries[id].stored;
            for item in stored.items().filter(|_| stored.caller == caller) {
                let id = item.get("id").and_then(Value::as_str).unwrap_or_default();
                if ids.contains(id) {
                    found.insert(id.to_owned(), item.clone());
                }
            }
        }
        found
    }
}

impl State {
    fn find(&self, id: &str, caller: Option<Caller>) -> Option<Arc<Stored>> {
        let entry = self.entries.get(id)?;
        (entry.stored.caller == caller).then(|| entry.stored.clone())
    }

    /// Notes that the response `id` is used, and after it all that it goes on from.
    fn touch(&mut self, id: &str) {
        let mut next = Some(id.to_owned());
        while let Some(id) = next
            && let Some(entry) = self.entries.get_mut(&id)
        {
            next = entry.stored.previous.clone();
            self.clock += 1;
            let before = std::mem::replace(&mut entry.used, self.clock);
            self.by_use.remove(&before);
            self.by_use.insert(self.clock, id);
        }
    }

    fn remove(&mut self, id: &str) -> bool {
        let Some(entry) = self.entries.remove(id) else {
            return false;
        };
        self.by_use.remove(&entry.used);
        self.bytes -= entry.stored.bytes();
        true
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn store(most: usize, bytes_most: usize) -> Store {
        Store::new(&Limits {
            stored_responses: most,
            stored_bytes: bytes_most,
            ..Limits::default()
        })
    }

    fn response(id: &str, previous: Option<&str>, caller: Option<Caller>) -> Stored {
        let item = |id: &str| Map::from_iter([("id".to_owned(), json!(id))]);
        Stored {
            id: id.to_owned(),
            caller,
            previous: previous.map(str::to_owned),
            input: Arc::new(vec![item(&format!("in_{id}"))]),
            output: vec![item(&format!("out_{id}"))],
            document: "x".repeat(1000),
        }
    }

    #[test]
    fn what_was_used_longest_ago_makes_room() {
        let store = store(3, 1 << 20);
        for id in ["a", "b", "c"] {
            store.keep(response(id, None, None));
        }
        assert!(store.get("a", None).is_some());
        store.keep(response("d", None, None));
        let there = |id: &str| store.get(id, None).is_some();
        assert!(there("a") && !there("b") && there("c") && there("d"));
        assert!(store.forget("c", None) && !store.forget("c", None));
        let state = store.state();
        assert_eq!((state.entries.len(), state.by_use.len()), (2, 2));
    }

    #[test]
    fn memory_is_bounded_and_given_back() {
        let each = response("a", None, None).bytes();
        let store = store(100, each * 2);
        for id in ["a", "b", "c"] {
            store.keep(response(id, None, None));
        }
        let there = |id: &str| store.get(id, None).is_some();
        assert!(!there("a") && there("b") && there("c"));
        let mut large = response("d", None, None);
        large.document = "x".repeat(each * 2);
        store.keep(large);
        assert!(!there("d") && there("b") && there("c"));
        assert!(store.forget("b", None) && store.forget("c", None));
        assert_eq!(store.state().bytes, 0);
        assert!(
            super::Store::new(&Limits {
                stored_responses: 0,
                ..Limits::default()
            })
            .get("a", None)
            .is_none()
        );
    }

    #[test]
    fn the_end_of_a_conversation_is_dropped_before_its_beginning() {
        let store = store(3, 1 << 20);
        store.keep(response("a", None, None));
        store.keep(response("b", Some("a"), None));
        store.keep(response("c", Some("b"), None));
        let ids = |id: &str| {
            let all = store.conversation(id, None)?;
            Ok::<_, String>(all.iter().map(|s| s.id.clone()).collect::<Vec<_>>())
        };
        assert_eq!(ids("c").unwrap(), ["a", "b", "c"]);
        store.keep(response("x", None, None));
        assert_eq!(ids("c"), Err("c".to_owned()));
        assert_eq!(ids("b").unwrap(), ["a", "b"]);
        assert!(store.forget("a", None));
        assert_eq!(ids("b"), Err("a".to_owned()));
    }

    #[test]
    fn a_response_is_there_for_its_own_key_only() {
        let store = store(10, 1 << 20);
        let (one, other) = (Some([1; 32]), Some([2; 32]));
        store.keep(response("a", None, one));
        assert!(store.get("a", one).is_some());
        for caller in [None, other] {
            assert!(store.get("a", caller).is_none());
            assert!(store.conversation("a", caller).is_err());
            assert!(!store.forget("a", caller));
            assert!(store.items(&HashSet::from(["in_a"]), caller).is_empty());
        }
        let found = store.items(&HashSet::from(["in_a", "out_a", "in_b"]), one);
        assert_eq!(found.len(), 2);
    }
}

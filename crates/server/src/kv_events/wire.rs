//! KV events as vLLM's subscribers read them: MessagePack of `[time, events, rank]`.
//!
//! A page of the prefix cache is a block, once for each group of layers that has it: full attention, each
//! window, recurrent state. Pages are known by their chained hashes, and which
//! texts share them is the reader's own business: it computes keys of its own from the token ids.

use engine::{PAGE_ROWS, PageChange, PageGroup, PageKind, RowKey};
use rmp::encode;

/// Where the blocks are, as vLLM names the memory that the model computes with.
const MEDIUM: &str = "GPU";
/// The number of the server among those that share a model's requests: there is one.
const RANK: u64 = 0;

/// How an event is spelled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EventEncoding {
    /// A map of names and values, `type` among them: vLLM since June 2026, llm-d.
    #[default]
    Map,
    /// A list that begins with the type: vLLM before that, AIBrix.
    Array,
}

/// A value of an event.
enum Value {
    Null,
    Integer(u64),
    Text(&'static str),
    Integers(Vec<u64>),
    /// For each block, what its rows were computed from besides tokens.
    Contents(Vec<Vec<[u8; 16]>>),
}

/// An event: its type, and its fields in vLLM's order.
struct Event {
    kind: &'static str,
    fields: Vec<(&'static str, Value)>,
    /// How many of the fields a list has; the others came to vLLM with maps.
    n_listed: usize,
}

/// The batch of `changes`, at `seconds` since 1970.
pub(super) fn batch(seconds: f64, changes: Vec<PageChange>, encoding: EventEncoding) -> Vec<u8> {
    let events = events(changes, encoding);
    let mut bytes = Vec::new();
    let out = &mut bytes;
    list(out, 3);
    encode::write_f64(out, seconds).expect("a buffer takes everything");
    list(out, events.len());
    for event in &events {
        write(out, event, encoding);
    }
    integer(out, RANK);
    bytes
}

/// One event for each chain of pages that came, and for each run of pages that went. A list does not say
/// of which group its blocks are, so it has those of full attention only.
fn events(mut changes: Vec<PageChange>, encoding: EventEncoding) -> Vec<Event> {
    if encoding == EventEncoding::Array {
        changes.retain(|change| group_of(change).kind == PageKind::Full);
    }
    let mut events: Vec<Event> = Vec::new();
    let mut changes = changes.into_iter().peekable();
    while let Some(change) = changes.next() {
        match change {
            PageChange::Added {
                group,
                hash,
                before,
                keys,
            } => {
                let (mut hashes, mut tokens) = (vec![hash], Vec::new());
                let mut contents = Vec::new();
                add(&keys, &mut tokens, &mut contents);
                while let Some(PageChange::Added { hash, keys, .. }) =
                    changes.next_if(|next| follows(next, group, *hashes.last().unwrap_or(&hash)))
                {
                    hashes.push(hash);
                    add(&keys, &mut tokens, &mut contents);
                }
                events.push(stored(group, hashes, before, tokens, contents));
            }
            PageChange::Removed { group, hash } => {
                let mut hashes = vec![hash];
                while let Some(PageChange::Removed { hash, .. }) = changes.next_if(|next| {
                    matches!(next, PageChange::Removed { group: other, .. } if *other == group)
                }) {
                    hashes.push(hash);
                }
                events.push(removed(group, hashes));
            }
        }
    }
    events
}

/// Of which layers a page is that came or went.
fn group_of(change: &PageChange) -> PageGroup {
    match change {
        PageChange::Added { group, .. } | PageChange::Removed { group, .. } => *group,
    }
}

/// Whether `change` is a page of `group` that came after the page of `hash`.
fn follows(change: &PageChange, group: PageGroup, hash: u64) -> bool {
    matches!(change, PageChange::Added { group: other, before: Some(before), .. }
        if *other == group && *before == hash)
}

/// What vLLM calls a kind of cache.
fn kind_name(kind: PageKind) -> &'static str {
    match kind {
        PageKind::Full => "full_attention",
        PageKind::Window(_) => "sliding_window",
        PageKind::State => "mamba",
    }
}

/// Adds the rows of a block. A row of a picture has token 0, and the picture's hash is among the
/// block's contents.
fn add(keys: &[RowKey], tokens: &mut Vec<u64>, contents: &mut Vec<Vec<[u8; 16]>>) {
    let mut own: Vec<[u8; 16]> = Vec::new();
    for key in keys {
        match key {
            RowKey::Token(token) => tokens.push(u64::from(*token)),
            RowKey::Media { hash, .. } => {
                tokens.push(0);
                if own.last() != Some(hash) {
                    own.push(*hash);
                }
            }
        }
    }
    contents.push(own);
}

fn stored(
    group: PageGroup,
    hashes: Vec<u64>,
    before: Option<u64>,
    tokens: Vec<u64>,
    contents: Vec<Vec<[u8; 16]>>,
) -> Event {
    let contents = match contents.iter().all(Vec::is_empty) {
        true => Value::Null,
        false => Value::Contents(contents),
    };
    let window = match group.kind {
        PageKind::Window(rows) => Value::Integer(rows as u64),
        PageKind::Full | PageKind::State => Value::Null,
    };
    Event {
        kind: "BlockStored",
        fields: vec![
            ("block_hashes", Value::Integers(hashes)),
            (
                "parent_block_hash",
                before.map_or(Value::Null, Value::Integer),
            ),
            ("token_ids", Value::Integers(tokens)),
            ("block_size", Value::Integer(PAGE_ROWS as u64)),
            ("lora_id", Value::Null),
            ("medium", Value::Text(MEDIUM)),
            ("lora_name", Value::Null),
            ("extra_keys", contents),
            ("group_idx", Value::Integer(group.index as u64)),
            ("kv_cache_spec_kind", Value::Text(kind_name(group.kind))),
            ("kv_cache_spec_sliding_window", window),
        ],
        n_listed: 6,
    }
}

fn removed(group: PageGroup, hashes: Vec<u64>) -> Event {
    Event {
        kind: "BlockRemoved",
        fields: vec![
            ("block_hashes", Value::Integers(hashes)),
            ("medium", Value::Text(MEDIUM)),
            ("group_idx", Value::Integer(group.index as u64)),
        ],
        n_listed: 2,
    }
}

fn write(out: &mut Vec<u8>, event: &Event, encoding: EventEncoding) {
    match encoding {
        EventEncoding::Map => {
            let n = event.fields.len() + 1;
            encode::write_map_len(out, length(n)).expect("a buffer takes everything");
            text(out, "type");
            text(out, event.kind);
            for (name, value) in &event.fields {
                text(out, name);
                write_value(out, value);
            }
        }
        EventEncoding::Array => {
            list(out, event.n_listed + 1);
            text(out, event.kind);
            for (_, value) in &event.fields[..event.n_listed] {
                write_value(out, value);
            }
        }
    }
}

fn write_value(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::Null => null(out),
        Value::Integer(n) => integer(out, *n),
        Value::Text(value) => text(out, value),
        Value::Integers(values) => {
            list(out, values.len());
            values.iter().for_each(|&n| integer(out, n));
        }
        Value::Contents(blocks) => {
            list(out, blocks.len());
            for block in blocks {
                if block.is_empty() {
                    null(out);
                    continue;
                }
                list(out, block.len());
                for hash in block {
                    let hex: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
                    text(out, &hex);
                }
            }
        }
    }
}

fn list(out: &mut Vec<u8>, n: usize) {
    encode::write_array_len(out, length(n)).expect("a buffer takes everything");
}

fn text(out: &mut Vec<u8>, text: &str) {
    encode::write_str(out, text).expect("a buffer takes everything");
}

fn integer(out: &mut Vec<u8>, n: u64) {
    encode::write_uint(out, n).expect("a buffer takes everything");
}

fn null(out: &mut Vec<u8>) {
    encode::write_nil(out).expect("a buffer takes everything");
}

/// A length as MessagePack has it: no step comes near four billion rows.
fn length(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FULL: PageGroup = PageGroup {
        index: 0,
        kind: PageKind::Full,
    };
    const WINDOW: PageGroup = PageGroup {
        index: 1,
        kind: PageKind::Window(512),
    };

    fn page(hash: u64, before: Option<u64>, first: u32) -> PageChange {
        page_of(FULL, hash, before, first)
    }

    fn page_of(group: PageGroup, hash: u64, before: Option<u64>, first: u32) -> PageChange {
        let keys = (first..first + PAGE_ROWS as u32).map(RowKey::Token);
        PageChange::Added {
            group,
            hash,
            before,
            keys: keys.collect(),
        }
    }

    fn gone(group: PageGroup, hash: u64) -> PageChange {
        PageChange::Removed { group, hash }
    }

    #[test]
    fn pages_of_each_group_are_events_of_their_own() {
        let changes = vec![
            page(1, None, 0),
            page_of(WINDOW, 1, None, 0),
            page_of(WINDOW, 2, Some(1), 64),
            gone(FULL, 5),
            gone(WINDOW, 5),
        ];
        let found = events(changes.clone(), EventEncoding::Map);
        let field = |i: usize, name: &str| {
            let (_, value) = found[i]
                .fields
                .iter()
                .find(|field| field.0 == name)
                .unwrap();
            match value {
                Value::Integer(n) => *n,
                Value::Text("sliding_window") => 1,
                Value::Integers(all) => all.len() as u64,
                _ => 0,
            }
        };
        let groups: Vec<u64> = (0..4).map(|i| field(i, "group_idx")).collect();
        assert_eq!(groups, [0, 1, 0, 1]);
        assert_eq!(field(1, "block_hashes"), 2);
        assert_eq!(
            [0, 1].map(|i| [
                field(i, "kv_cache_spec_kind"),
                field(i, "kv_cache_spec_sliding_window")
            ]),
            [[0, 0], [1, 512]]
        );
        // Older subscribers know one group.
        assert_eq!(events(changes, EventEncoding::Array).len(), 2);
    }

    #[test]
    fn pages_of_one_chain_are_one_event() {
        let changes = vec![
            page(1, None, 0),
            page(2, Some(1), 64),
            page(9, Some(1), 64),
            gone(FULL, 9),
            gone(FULL, 2),
        ];
        let events = events(changes, EventEncoding::Map);
        let kinds: Vec<&str> = events.iter().map(|event| event.kind).collect();
        assert_eq!(kinds, ["BlockStored", "BlockStored", "BlockRemoved"]);
        let hashes = |i: usize| match &events[i].fields[0].1 {
            Value::Integers(hashes) => hashes.clone(),
            _ => panic!("hashes come first"),
        };
        assert_eq!(
            [hashes(0), hashes(1), hashes(2)],
            [vec![1, 2], vec![9], vec![9, 2]]
        );
        assert!(matches!(events[1].fields[1].1, Value::Integer(1)));
        assert!(matches!(&events[0].fields[2].1, Value::Integers(ids) if ids.len() == 128));
    }

    #[test]
    fn a_list_has_what_older_subscribers_know() {
        let bytes = batch(
            1.5,
            vec![gone(FULL, 7), gone(WINDOW, 7)],
            EventEncoding::Array,
        );
        let mut expected = vec![0x93, 0xcb];
        expected.extend(1.5f64.to_be_bytes());
        expected.extend([0x91, 0x93, 0xac]);
        expected.extend(b"BlockRemoved");
        expected.extend([0x91, 7, 0xa3]);
        expected.extend(b"GPU");
        expected.push(0);
        assert_eq!(bytes, expected);
    }

    #[test]
    fn a_block_with_a_picture_says_which() {
        let media = |row| RowKey::Media {
            hash: [0xab; 16],
            row,
        };
        let keys = (0..PAGE_ROWS as u32).map(media).collect();
        let added = PageChange::Added {
            group: FULL,
            hash: 3,
            before: None,
            keys,
        };
        let bytes = batch(0.0, vec![added], EventEncoding::Map);
        let hex = "ab".repeat(16);
        let found = bytes.windows(32).filter(|w| *w == hex.as_bytes());
        assert_eq!(found.count(), 1);
    }
}

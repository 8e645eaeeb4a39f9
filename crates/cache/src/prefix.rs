//! The prefix index: who remembers the beginning of a prompt.
//!
//! Each text is cut into pages of [`PAGE_ROWS`] keys. The hash of a page includes the hash
//! of the page before it, so one look-up for each page of a prompt finds the texts that
//! begin with the same pages:
//!
//! ```text
//! h_0 = hash(namespace, keys[0..64])     h_i = hash(h_{i-1}, keys[64 i .. 64 (i + 1)])
//! ```
//!
//! A text is found by prompts of its own [`Namespace`] only.
//!
//! Hashes say where to look. What counts is decided by comparing keys, so two texts of one
//! hash cost time and never share a row.
//!
//! Deliberately absent: pages, snapshots and what they cost. [`crate::Memory`] says with how many
//! rows a fork can begin, whoever keeps sequences which of the matches is worth it.

use crate::PageGroup;
use backend::PAGE_ROWS;
use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};

/// What a row was computed from, besides the rows before it.
///
/// Tokens alone do not say it: the rows of every picture have the same placeholder tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowKey {
    /// A token of text.
    Token(u32),
    /// One row of an encoded picture, video or sound.
    Media {
        /// The first 16 bytes of a cryptographic hash of what was encoded, and of everything
        /// that its encoding depends on.
        hash: [u8; 16],
        /// Number of the row among those of its span, from 0.
        row: u32,
    },
}

/// Whose texts a prompt may find: those of the same namespace, and no others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Namespace(pub [u8; 32]);

/// The most of the first `n` of `keys` that end in no span of media rows: `n`, or where the
/// span begins that row `n` continues.
pub fn whole_spans(keys: &[RowKey], n: usize) -> usize {
    match keys.get(n) {
        Some(&RowKey::Media { row, .. }) => n.saturating_sub(row as usize),
        _ => n,
    }
}

/// Names a text of a [`PrefixIndex`]. Later ones are greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Entry(u64);

/// A text that begins like the keys that were looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Match {
    /// The text.
    pub entry: Entry,
    /// First keys that are equal, cut back to a whole number of spans.
    pub rows: usize,
}

/// A page that came with the first text that has it, or went with the last one. Pages of full attention
/// are those of a [`PrefixIndex`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PageChange {
    /// A page of [`PAGE_ROWS`] keys that no text had before.
    Added {
        /// Of which layers.
        group: PageGroup,
        /// The chained hash of the page.
        hash: u64,
        /// The hash of the page before it, if there is one.
        before: Option<u64>,
        /// The keys of its rows.
        keys: Vec<RowKey>,
    },
    /// A page that no text has any more.
    Removed {
        /// Of which layers.
        group: PageGroup,
        /// The chained hash of the page.
        hash: u64,
    },
}

/// Texts by what their rows were computed from.
#[derive(Debug)]
pub struct PrefixIndex {
    texts: HashMap<Entry, Keys>,
    /// Number and chained hash of a page to the texts that have it.
    pages: HashMap<(usize, u64), Vec<Entry>>,
    next: u64,
    hash: fn(u64, &[RowKey]) -> u64,
    /// Pages that came and went since they were asked for, if anybody asks.
    changes: Option<Vec<PageChange>>,
}

/// One text's keys and the chained hashes of its whole pages.
#[derive(Debug)]
struct Keys {
    namespace: Namespace,
    keys: Vec<RowKey>,
    hashes: Vec<u64>,
}

impl Default for PrefixIndex {
    fn default() -> Self {
        PrefixIndex::with_hash(chained)
    }
}

impl PrefixIndex {
    /// An empty index.
    pub fn new() -> Self {
        PrefixIndex::default()
    }

    /// An empty index with the hash of a page after one of another hash.
    fn with_hash(hash: fn(u64, &[RowKey]) -> u64) -> Self {
        PrefixIndex {
            texts: HashMap::new(),
            pages: HashMap::new(),
            next: 0,
            hash,
            changes: None,
        }
    }

    /// Notes from now on which pages come and go.
    pub fn watch(&mut self) {
        self.changes.get_or_insert_default();
    }

    /// Which pages came and went since the last call, in order; nothing unless the index is
    /// [watched](PrefixIndex::watch).
    pub fn take_changes(&mut self) -> Vec<PageChange> {
        self.changes
            .as_mut()
            .map(std::mem::take)
            .unwrap_or_default()
    }

    /// Adds a text of `namespace` that begins with `keys`.
    pub fn insert(
        &mut self,
        namespace: Namespace,
        keys: impl IntoIterator<Item = RowKey>,
    ) -> Entry {
        let entry = Entry(self.next);
        self.next += 1;
        let text = Keys {
            namespace,
            keys: Vec::new(),
            hashes: Vec::new(),
        };
        self.texts.insert(entry, text);
        self.extend(entry, keys);
        entry
    }

    /// Appends `keys` to the text of `entry`.
    ///
    /// # Panics
    ///
    /// If the text has been removed.
    pub fn extend(&mut self, entry: Entry, keys: impl IntoIterator<Item = RowKey>) {
        let text = self.texts.get_mut(&entry).expect("a text of this index");
        text.keys.extend(keys);
        let n_hashed = text.hashes.len();
        for page in text.keys[n_hashed * PAGE_ROWS..].chunks_exact(PAGE_ROWS) {
            let seed = || hashed(&text.namespace);
            let before = text.hashes.last().copied().unwrap_or_else(seed);
            let hash = (self.hash)(before, page);
            let holders = self.pages.entry((text.hashes.len(), hash)).or_default();
            if let Some(changes) = self.changes.as_mut().filter(|_| holders.is_empty()) {
                changes.push(PageChange::Added {
                    group: PageGroup::default(),
                    hash,
                    before: text.hashes.last().copied(),
                    keys: page.to_vec(),
                });
            }
            holders.push(entry);
            text.hashes.push(hash);
        }
    }

    /// Forgets all keys of the text of `entry` but the first `rows`.
    ///
    /// # Panics
    ///
    /// If the text has been removed.
    pub fn truncate(&mut self, entry: Entry, rows: usize) {
        let text = self.texts.get_mut(&entry).expect("a text of this index");
        text.keys.truncate(rows);
        let first = (rows / PAGE_ROWS).min(text.hashes.len());
        let gone = text.hashes.split_off(first);
        self.leave(entry, first, gone);
    }

    /// Takes the text of `entry` out of pages with these hashes, the first of which is its page
    /// `first`. The last page goes first, so that none is left without the one before it.
    fn leave(&mut self, entry: Entry, first: usize, hashes: Vec<u64>) {
        for page in (first..).zip(hashes).collect::<Vec<_>>().into_iter().rev() {
            let holders = self.pages.get_mut(&page).expect("pages of a text");
            holders.retain(|&holder| holder != entry);
            if holders.is_empty() {
                self.pages.remove(&page);
                if let Some(changes) = &mut self.changes {
                    changes.push(removed(page.1));
                }
            }
        }
    }

    /// Removes the text of `entry`.
    ///
    /// # Panics
    ///
    /// If it has been removed already.
    pub fn remove(&mut self, entry: Entry) {
        let text = self.texts.remove(&entry).expect("a text of this index");
        self.leave(entry, 0, text.hashes);
    }

    /// Texts in the index.
    pub fn len(&self) -> usize {
        self.texts.len()
    }

    /// Whether there is no text.
    pub fn is_empty(&self) -> bool {
        self.texts.is_empty()
    }

    /// The text of `namespace` that begins with most of `keys`; the newest of several.
    pub fn longest(&self, namespace: Namespace, keys: &[RowKey]) -> Option<Match> {
        self.matches(namespace, keys).into_iter().next()
    }

    /// All texts of `namespace` that begin with the first of `keys`: those with most of them
    /// first, and the newest first among equal ones.
    pub fn matches(&self, namespace: Namespace, keys: &[RowKey]) -> Vec<Match> {
        let mut holders = Vec::new();
        let mut before = hashed(&namespace);
        for (i, page) in keys.chunks_exact(PAGE_ROWS).enumerate() {
            before = (self.hash)(before, page);
            match self.pages.get(&(i, before)) {
                Some(entries) => holders.push(entries),
                None => break,
            }
        }
        // Every holder of a page holds those before it too.
        let deepest_first = holders.iter().rev().flat_map(|entries| entries.iter());
        // The others can have equal keys in the first page only.
        let all = deepest_first.chain(self.texts.keys());
        let mut seen = HashSet::new();
        let mut matches: Vec<Match> = all
            .filter(|&&entry| seen.insert(entry))
            .map(|&entry| Match {
                entry,
                rows: self.alike(entry, namespace, keys),
            })
            .filter(|found| found.rows > 0)
            .collect();
        matches.sort_by_key(|found| std::cmp::Reverse((found.rows, found.entry)));
        matches
    }

    /// How many of `keys` the text of `entry` begins with, cut back to a whole number of
    /// spans; 0 for a text of another namespace than `namespace`.
    ///
    /// # Panics
    ///
    /// If the text has been removed.
    pub fn alike(&self, entry: Entry, namespace: Namespace, keys: &[RowKey]) -> usize {
        let text = &self.texts[&entry];
        if text.namespace != namespace {
            return 0;
        }
        let pairs = text.keys.iter().zip(keys);
        whole_spans(keys, pairs.take_while(|(a, b)| a == b).count())
    }

    /// The chained hashes of the whole pages of the text of `entry`.
    ///
    /// # Panics
    ///
    /// If the text has been removed.
    pub fn hashes(&self, entry: Entry) -> &[u64] {
        &self.texts[&entry].hashes
    }

    /// The namespace and all keys of the text of `entry`.
    ///
    /// # Panics
    ///
    /// If the text has been removed.
    pub fn text(&self, entry: Entry) -> (Namespace, &[RowKey]) {
        let text = &self.texts[&entry];
        (text.namespace, &text.keys)
    }
}

/// A page of full attention that nobody has any more.
fn removed(hash: u64) -> PageChange {
    PageChange::Removed {
        group: PageGroup::default(),
        hash,
    }
}

/// A hash of `x`.
fn hashed(x: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    x.hash(&mut hasher);
    hasher.finish()
}

/// The hash of a page after one of hash `before`.
fn chained(before: u64, page: &[RowKey]) -> u64 {
    hashed(&(before, page))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    const HOME: Namespace = Namespace([0; 32]);

    fn tokens(ids: impl IntoIterator<Item = u32>) -> Vec<RowKey> {
        ids.into_iter().map(RowKey::Token).collect()
    }

    /// A prompt with a picture of 70 rows at row 80, between tokens of text.
    fn with_picture(hash: u8) -> Vec<RowKey> {
        let media = (0..70).map(|row| RowKey::Media {
            hash: [hash; 16],
            row,
        });
        let (before, after) = (tokens(0..80), tokens(0..50));
        [before, media.collect(), after].concat()
    }

    #[test]
    fn the_longest_prefix_is_found_to_the_row_and_the_newest_of_equal_ones() {
        let mut index = PrefixIndex::new();
        let long = index.insert(HOME, tokens(0..200));
        let short = index.insert(HOME, tokens(0..70));
        let twin = index.insert(HOME, tokens(0..70));
        index.insert(HOME, tokens(300..500));
        let prompt = tokens((0..150).chain([999]).chain(151..220));
        let found = index.matches(HOME, &prompt);
        let found: Vec<_> = found.iter().map(|m| (m.entry, m.rows)).collect();
        assert_eq!(found, [(long, 150), (twin, 70), (short, 70)]);
        index.remove(long);
        assert_eq!(index.longest(HOME, &prompt).map(|m| m.entry), Some(twin));
        index.extend(short, tokens(70..140));
        assert_eq!(index.longest(HOME, &prompt).map(|m| m.rows), Some(140));
    }

    #[test]
    fn pictures_of_equal_placeholders_share_only_what_precedes_them() {
        let mut index = PrefixIndex::new();
        let one = index.insert(HOME, with_picture(1));
        assert_eq!(index.alike(one, HOME, &with_picture(1)), 200);
        assert_eq!(index.alike(one, HOME, &with_picture(2)), 80);
    }

    #[test]
    fn a_match_never_ends_inside_a_span() {
        let mut index = PrefixIndex::new();
        let whole = with_picture(1);
        // A text that was cut off inside the picture.
        let entry = index.insert(HOME, whole[..100].iter().copied());
        assert_eq!(index.alike(entry, HOME, &whole), 80);
        for n in 0..=whole.len() {
            let inside = (81..150).contains(&n);
            assert_eq!(whole_spans(&whole, n), if inside { 80 } else { n });
        }
    }

    #[test]
    fn a_text_is_found_in_its_own_namespace_only() {
        let mut index = PrefixIndex::new();
        let other = Namespace([1; 32]);
        let theirs = index.insert(other, tokens(0..200));
        assert_eq!(index.longest(HOME, &tokens(0..200)), None);
        assert_eq!(index.alike(theirs, HOME, &tokens(0..200)), 0);
        let ours = index.insert(HOME, tokens(0..100));
        let found = index
            .longest(HOME, &tokens(0..200))
            .map(|m| (m.entry, m.rows));
        assert_eq!(found, Some((ours, 100)));
        let found = index
            .longest(other, &tokens(0..10))
            .map(|m| (m.entry, m.rows));
        assert_eq!(found, Some((theirs, 10)));
    }

    #[test]
    fn what_comes_and_goes_is_told_once_for_all_texts() {
        let mut index = PrefixIndex::new();
        index.insert(HOME, tokens(0..64));
        assert_eq!(index.take_changes(), [], "nobody watched");
        index.watch();
        let long = index.insert(HOME, tokens(0..200));
        let added = index.take_changes();
        let [
            PageChange::Added {
                hash: second,
                before: Some(_),
                keys,
                ..
            },
            PageChange::Added {
                hash: third,
                before,
                ..
            },
        ] = &added[..]
        else {
            panic!("the first page is known: {added:?}");
        };
        assert_eq!(
            (keys[..].as_ref(), *before),
            (&tokens(64..128)[..], Some(*second))
        );
        let twin = index.insert(HOME, tokens(0..130));
        index.truncate(long, 130);
        assert_eq!(index.take_changes(), [removed(*third)]);
        index.extend(long, tokens(130..200));
        assert_eq!(index.take_changes(), added[1..]);
        index.remove(long);
        assert_eq!(index.take_changes(), [removed(*third)]);
        index.remove(twin);
        assert_eq!(index.take_changes(), [removed(*second)]);
    }

    #[test]
    fn nothing_is_left_of_a_removed_text() {
        let mut index = PrefixIndex::new();
        for entry in [0, 1].map(|_| index.insert(HOME, tokens(0..300))) {
            index.remove(entry);
        }
        assert!(index.is_empty() && index.pages.is_empty());
        assert_eq!(index.longest(HOME, &tokens(0..300)), None);
    }

    proptest! {
        /// A hash of one bit, so that pages of different keys often have the same.
        #[test]
        fn matches_are_those_of_a_search_by_key(
            texts in vec(vec((0u32..2, 1usize..90), 0..5), 1..8),
            removed in 0usize..8,
            prompt in vec((0u32..2, 1usize..90), 1..5),
            coarse: bool,
        ) {
            let runs = |runs: &[(u32, usize)]| -> Vec<RowKey> {
                runs.iter().flat_map(|&(id, n)| tokens(std::iter::repeat_n(id, n))).collect()
            };
            let hash = if coarse { |before, page: &[RowKey]| chained(before, page) % 2 } else { chained };
            let mut index = PrefixIndex::with_hash(hash);
            let mut naive = Vec::new();
            for (i, text) in texts.iter().enumerate() {
                // In two parts, as texts grow.
                let keys = runs(text);
                let half = keys.len() / 2;
                let namespace = Namespace([u8::from(i % 3 == 2); 32]);
                let entry = index.insert(namespace, keys[..half].iter().copied());
                index.extend(entry, keys[half..].iter().copied());
                if namespace == HOME {
                    naive.push((entry, keys));
                }
            }
            if removed < naive.len() {
                index.remove(naive.remove(removed).0);
            }
            let prompt = runs(&prompt);
            let alike = |keys: &[RowKey]| keys.iter().zip(&prompt).take_while(|(a, b)| a == b).count();
            let mut want: Vec<(usize, Entry)> = naive.iter().map(|(e, k)| (alike(k), *e)).collect();
            want.retain(|&(rows, _)| rows > 0);
            want.sort_by(|a, b| b.cmp(a));
            let got: Vec<(usize, Entry)> = index.matches(HOME, &prompt).iter().map(|m| (m.rows, m.entry)).collect();
            prop_assert_eq!(got, want);
        }
    }
}

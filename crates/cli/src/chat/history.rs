//! The history of lines, searched by words and by letters (Ctrl-R).

use rustyline::Config;
use rustyline::Result;
use rustyline::history::{FileHistory, History, SearchDirection, SearchResult};
use std::path::Path;

/// A history in a file whose search is fuzzy: the nearest line that has all words of the term, in
/// any order; if none does, the nearest that has its letters in their order. Case does not count.
pub(super) struct FuzzyHistory(FileHistory);

impl FuzzyHistory {
    /// An empty history.
    pub(super) fn new(config: &Config) -> Self {
        FuzzyHistory(FileHistory::with_config(config))
    }

    /// The line nearest to `start` in which `find` finds a place, and that place.
    fn nearest(
        &self,
        start: usize,
        direction: SearchDirection,
        find: impl Fn(&str) -> Option<usize>,
    ) -> Result<Option<SearchResult<'_>>> {
        let search = |index: usize| -> Result<Option<SearchResult<'_>>> {
            let line = self.0.get(index, direction)?;
            Ok(line.and_then(|line| {
                let pos = find(&line.entry)?;
                Some(SearchResult { pos, ..line })
            }))
        };
        let found = match direction {
            SearchDirection::Reverse => (0..=start).rev().map(search).find_map(Result::transpose),
            SearchDirection::Forward => (start..self.0.len())
                .map(search)
                .find_map(Result::transpose),
        };
        found.transpose()
    }
}

/// Where the first word of `term` begins in `line`, if all of its words are there.
fn words_in(line: &str, term: &str) -> Option<usize> {
    let places: Option<Vec<usize>> = term
        .split_whitespace()
        .map(|word| position(line, word))
        .collect();
    places?.first().copied()
}

/// Where `word` begins in `line`, whatever their case.
fn position(line: &str, word: &str) -> Option<usize> {
    let begins = |rest: &str| {
        let mut letters = rest.chars().flat_map(char::to_lowercase);
        let mut wanted = word.chars().flat_map(char::to_lowercase);
        wanted.all(|letter| letters.next() == Some(letter))
    };
    let mut starts = line.char_indices().map(|(at, _)| at);
    starts.find(|&at| begins(&line[at..]))
}

/// Where the first letter of `term` is in `line`, if the letters of `term` are there in their
/// order.
fn letters_in(line: &str, term: &str) -> Option<usize> {
    let mut wanted = term.chars().filter(|c| !c.is_whitespace()).peekable();
    let mut first = None;
    for (at, letter) in line.char_indices() {
        let is_next = |w: &char| w.to_lowercase().eq(letter.to_lowercase());
        if wanted.next_if(is_next).is_some() {
            first = first.or(Some(at));
        }
    }
    first.filter(|_| wanted.peek().is_none())
}

impl History for FuzzyHistory {
    fn search(
        &self,
        term: &str,
        start: usize,
        direction: SearchDirection,
    ) -> Result<Option<SearchResult<'_>>> {
        if term.trim().is_empty() || start >= self.0.len() {
            return Ok(None);
        }
        let by_words = self.nearest(start, direction, |line| words_in(line, term))?;
        match by_words {
            Some(found) => Ok(Some(found)),
            None => self.nearest(start, direction, |line| letters_in(line, term)),
        }
    }

    fn starts_with(
        &self,
        term: &str,
        start: usize,
        direction: SearchDirection,
    ) -> Result<Option<SearchResult<'_>>> {
        self.0.starts_with(term, start, direction)
    }

    fn get(&self, index: usize, direction: SearchDirection) -> Result<Option<SearchResult<'_>>> {
        self.0.get(index, direction)
    }

    fn add(&mut self, line: &str) -> Result<bool> {
        self.0.add(line)
    }

    fn add_owned(&mut self, line: String) -> Result<bool> {
        self.0.add_owned(line)
    }

    fn len(&self) -> usize {
        self.0.len()
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn set_max_len(&mut self, len: usize) -> Result<()> {
        self.0.set_max_len(len)
    }

    fn ignore_dups(&mut self, yes: bool) -> Result<()> {
        self.0.ignore_dups(yes)
    }

    fn ignore_space(&mut self, yes: bool) {
        self.0.ignore_space(yes);
    }

    fn save(&mut self, path: &Path) -> Result<()> {
        self.0.save(path)
    }

    fn append(&mut self, path: &Path) -> Result<()> {
        self.0.append(path)
    }

    fn load(&mut self, path: &Path) -> Result<()> {
        self.0.load(path)
    }

    fn clear(&mut self) -> Result<()> {
        self.0.clear()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_found_by_words_then_by_letters() {
        let mut history = FuzzyHistory::new(&Config::default());
        for line in [
            "Tell me of a Kite",
            "a story of Rome",
            "translate this",
            "two kites, one tale",
        ] {
            history.add(line).unwrap();
        }
        let find = |term: &str, start: usize, direction| {
            let found = history.search(term, start, direction).unwrap();
            found.map(|found| (found.idx, found.pos))
        };
        let back = SearchDirection::Reverse;
        assert_eq!(find("kite", 3, back), Some((3, 4)));
        assert_eq!(find("KITE", 2, back), Some((0, 13)));
        assert_eq!(find("rome story", 3, back), Some((1, 11)));
        // Nothing has these words; the letters come in this order.
        assert_eq!(find("trslt", 3, back), Some((2, 0)));
        assert_eq!(find("trslt", 1, back), None);
        assert_eq!(find("kite", 1, SearchDirection::Forward), Some((3, 4)));
        assert_eq!(find("", 3, back), None);
        assert_eq!(find("kite", 4, back), None);
    }
}

//! A lexeme as an automaton, and whether two of them clash.

use super::lexemes::LEXEME_CHARS_MAX;
use crate::pattern::{Class, Re};

/// The positions of an expression (Glushkov's automaton): each character of it is a state.
pub(super) struct Automaton {
    classes: Vec<Class>,
    first: Vec<usize>,
    is_last: Vec<bool>,
    /// The positions that may come after each.
    next: Vec<Vec<usize>>,
}

/// Positions where a part of an expression begins and ends.
struct Ends {
    first: Vec<usize>,
    last: Vec<usize>,
    nullable: bool,
}

/// Most pairs of positions in sequence.
const NEXT_MAX: usize = 100_000;

impl Automaton {
    /// The automaton of `re`; `None` if it is too large.
    pub(super) fn new(re: &Re) -> Option<Self> {
        if re.size() > LEXEME_CHARS_MAX {
            return None;
        }
        let mut automaton = Self {
            classes: Vec::new(),
            first: Vec::new(),
            is_last: Vec::new(),
            next: Vec::new(),
        };
        let mut left = NEXT_MAX;
        let ends = automaton.add(re, &mut left)?;
        automaton.first = ends.first;
        automaton.is_last = vec![false; automaton.classes.len()];
        ends.last.iter().for_each(|&i| automaton.is_last[i] = true);
        for next in &mut automaton.next {
            next.sort_unstable();
            next.dedup();
        }
        Some(automaton)
    }

    fn join(&mut self, last: &[usize], first: &[usize], left: &mut usize) -> Option<()> {
        *left = left.checked_sub(last.len() * first.len())?;
        last.iter().for_each(|&i| self.next[i].extend(first));
        Some(())
    }

    fn after(&mut self, a: Ends, b: Ends, left: &mut usize) -> Option<Ends> {
        self.join(&a.last, &b.first, left)?;
        let mut first = a.first;
        if a.nullable {
            first.extend(&b.first);
        }
        let mut last = b.last;
        if b.nullable {
            last.extend(&a.last);
        }
        Some(Ends {
            first,
            last,
            nullable: a.nullable && b.nullable,
        })
    }

    fn add(&mut self, re: &Re, left: &mut usize) -> Option<Ends> {
        let empty = || Ends {
            first: Vec::new(),
            last: Vec::new(),
            nullable: true,
        };
        match re {
            Re::Class(class) => {
                let id = self.classes.len();
                self.classes.push(class.clone());
                self.next.push(Vec::new());
                Some(Ends {
                    first: vec![id],
                    last: vec![id],
                    nullable: false,
                })
            }
            Re::Concat(parts) => parts.iter().try_fold(empty(), |before, part| {
                let part = self.add(part, left)?;
                self.after(before, part, left)
            }),
            Re::Alternatives(parts) => {
                let mut all = empty();
                all.nullable = false;
                for part in parts {
                    let part = self.add(part, left)?;
                    all.first.extend(part.first);
                    all.last.extend(part.last);
                    all.nullable |= part.nullable;
                }
                Some(all)
            }
            Re::Repeat(part, min, max) => {
                let mut all = empty();
                let n = max.unwrap_or((*min).max(1));
                for i in 0..n {
                    let mut one = self.add(part, left)?;
                    if max.is_none() && i + 1 == n {
                        let (first, last) = (one.first.clone(), one.last.clone());
                        self.join(&last, &first, left)?;
                    }
                    one.nullable |= i >= *min;
                    all = self.after(all, one, left)?;
                }
                Some(all)
            }
            Re::Start | Re::Finish => Some(empty()),
        }
    }

    /// Whether a text that `self` matches begins a longer match of `other`, by a character of
    /// `follow`. Adds the steps taken to `work`.
    pub(super) fn clashes(&self, other: &Self, follow: &Class, work: &mut u64) -> bool {
        let (x, y) = (self, other);
        let mut seen = vec![false; x.classes.len() * y.classes.len()];
        let mut open = Vec::new();
        let mut reach = |i: usize, j: usize, open: &mut Vec<(usize, usize)>| {
            let mark = &mut seen[i * y.classes.len() + j];
            if !*mark && x.classes[i].meets(&y.classes[j]) {
                *mark = true;
                open.push((i, j));
            }
        };
        for &i in &x.first {
            for &j in &y.first {
                reach(i, j, &mut open);
            }
        }
        *work += (x.first.len() * y.first.len()) as u64;
        while let Some((i, j)) = open.pop() {
            *work += 1 + (x.next[i].len() * y.next[j].len()) as u64;
            let longer = |j: &usize| y.classes[*j].meets(follow);
            if x.is_last[i] && y.next[j].iter().any(longer) {
                return true;
            }
            for &i in &x.next[i] {
                for &j in &y.next[j] {
                    reach(i, j, &mut open);
                }
            }
        }
        false
    }
}

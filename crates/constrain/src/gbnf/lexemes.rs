//! Which parts of a grammar become lexemes.
//!
//! A lexer reads the longest piece that any lexeme allowed here can match. That changes nothing
//! if it never has to decide: if, wherever a lexeme `a` has matched, no character that may
//! follow `a` in the grammar continues a match of a lexeme `b` that read the same piece. Then
//! the next character tells whether `a` ends.
//!
//! 1. Rules that only mention regular rules are regular; so is a rule that ends in itself, such
//!    as `ws ::= ([ \t] ws)?`, which is a repetition.
//! 2. In the others, runs of regular parts become lexemes, as long as they can be.
//! 3. Every pair of lexemes is tried (`clash`). Where two clash, both are broken up into
//!    their parts, down to single characters, and all is tried again.

use std::collections::HashMap;

use super::parse::{Node, Rules};
use crate::pattern::{Class, Re};
use crate::{Error, Limits};

/// Most characters of a lexeme with its repetitions written out.
const LEXEME_CHARS_MAX: u64 = 600;
/// Most nesting of a lexeme's expression.
const LEXEME_DEPTH_MAX: usize = 40;
/// Most characters of all regular rules together.
const REGULAR_CHARS_MAX: u64 = 100_000;
/// Most steps of trying pairs of lexemes.
const WORK_MAX: u64 = 20_000_000;
/// Most rules.
const RULES_MAX: usize = 4_000;

/// A part of a rule whose regular parts are lexemes.
#[derive(Clone, Debug)]
pub(super) enum Part {
    /// The lexeme of this number.
    Lexeme(usize),
    Sequence(Vec<Part>),
    Alternatives(Vec<Part>),
    Repeat(Box<Part>, u32, Option<u32>),
    /// The rule of this number.
    Rule(usize),
}

/// A grammar over lexemes.
pub(super) struct Grammar {
    /// The rules that the root reaches and that are not lexemes, by number.
    pub(super) rules: Vec<Option<Part>>,
    pub(super) root: Part,
    pub(super) lexemes: Vec<Lexeme>,
    /// The number of each lexeme by its expression.
    numbers: HashMap<String, usize>,
}

/// A regular expression that the lexer reads as one piece, which is never empty.
pub(super) struct Lexeme {
    pub(super) re: Re,
    /// Where the expression matches the empty text, the lexeme is optional instead.
    pub(super) is_nullable: bool,
    automaton: Option<Automaton>,
}

impl Grammar {
    pub(super) fn new(rules: &Rules, limits: &Limits) -> Result<Self, Error> {
        if rules.bodies.len() > RULES_MAX {
            return Err(Error::TooLarge {
                what: "number of rules",
                limit: RULES_MAX as u64,
            });
        }
        let rules = &finite(rules)?;
        let regular = regular_rules(rules);
        let mut grammar = Self {
            rules: vec![None; rules.bodies.len()],
            root: Part::Rule(rules.root),
            lexemes: Vec::new(),
            numbers: HashMap::new(),
        };
        grammar.root = grammar.part(&Node::Rule(rules.root), &regular);
        let mut open = mentioned(&grammar.root);
        while let Some(id) = open.pop() {
            if grammar.rules[id].is_none() {
                let part = grammar.part(&rules.bodies[id], &regular);
                open.extend(mentioned(&part));
                grammar.rules[id] = Some(part);
            }
        }
        grammar.settle(limits)?;
        Ok(grammar)
    }

    /// The lexeme of `re`, optional if `re` matches the empty text.
    fn lexeme(&mut self, re: Re) -> Part {
        let re = simple(re);
        let mut key = String::new();
        re.write(&mut key);
        if key.is_empty() {
            return Part::Sequence(Vec::new());
        }
        let next = self.lexemes.len();
        let id = *self.numbers.entry(key).or_insert(next);
        if id == next {
            let automaton = Automaton::new(&re);
            self.lexemes.push(Lexeme {
                is_nullable: is_nullable(&re),
                re,
                automaton,
            });
        }
        match self.lexemes[id].is_nullable {
            true => Part::Repeat(Box::new(Part::Lexeme(id)), 0, Some(1)),
            false => Part::Lexeme(id),
        }
    }

    /// `node` with lexemes for its regular parts.
    fn part(&mut self, node: &Node, regular: &[Option<Re>]) -> Part {
        if let Some(re) = to_re(node, regular).filter(is_small) {
            return self.lexeme(re);
        }
        match node {
            Node::Class(class) => self.lexeme(Re::Class(class.clone())),
            Node::Sequence(nodes) => {
                let mut parts = Vec::new();
                let mut run: Vec<Re> = Vec::new();
                for node in nodes {
                    match to_re(node, regular).filter(is_small) {
                        Some(re) => {
                            let longer = Re::Concat([&run[..], &[re.clone()]].concat());
                            if !run.is_empty() && !is_small(&longer) {
                                let full = std::mem::take(&mut run);
                                parts.push(self.lexeme(Re::Concat(full)));
                            }
                            run.push(re);
                        }
                        None => {
                            let full = std::mem::take(&mut run);
                            parts.push(self.lexeme(Re::Concat(full)));
                            parts.push(self.part(node, regular));
                        }
                    }
                }
                parts.push(self.lexeme(Re::Concat(run)));
                Part::Sequence(parts)
            }
            Node::Alternatives(nodes) => {
                let parts = nodes.iter().map(|node| self.part(node, regular));
                Part::Alternatives(parts.collect())
            }
            Node::Repeat(node, min, max) => {
                Part::Repeat(Box::new(self.part(node, regular)), *min, *max)
            }
            Node::Rule(id) => Part::Rule(*id),
        }
    }

    /// Breaks lexemes up until none of them clash.
    fn settle(&mut self, limits: &Limits) -> Result<(), Error> {
        let mut work = 0;
        loop {
            let follow = self.follow();
            let used = self.used();
            let mut broken: Vec<bool> = self
                .lexemes
                .iter()
                .map(|lexeme| lexeme.automaton.is_none())
                .collect();
            for &a in &used {
                for &b in &used {
                    if !broken[a] && !broken[b] && self.clash(a, b, &follow[a], &mut work) {
                        broken[a] |= !self.lexemes[a].is_character();
                        broken[b] |= !self.lexemes[b].is_character();
                    }
                }
                if work > WORK_MAX {
                    return Err(Error::TooLarge {
                        what: "work of comparing the lexemes of the grammar",
                        limit: WORK_MAX,
                    });
                }
            }
            if !used.iter().any(|&id| broken[id]) {
                return Ok(());
            }
            if self.lexemes.len() > limits.schema_nodes {
                return Err(Error::TooLarge {
                    what: "number of lexemes of the grammar",
                    limit: limits.schema_nodes as u64,
                });
            }
            let root = std::mem::replace(&mut self.root, Part::Sequence(Vec::new()));
            self.root = self.break_up(root, &broken);
            for id in 0..self.rules.len() {
                if let Some(part) = self.rules[id].take() {
                    self.rules[id] = Some(self.break_up(part, &broken));
                }
            }
        }
    }

    /// `part` with the parts of each broken lexeme in its place.
    fn break_up(&mut self, part: Part, broken: &[bool]) -> Part {
        match part {
            Part::Lexeme(id) if broken[id] => match self.lexemes[id].re.clone() {
                Re::Concat(parts) => {
                    Part::Sequence(parts.into_iter().map(|re| self.lexeme(re)).collect())
                }
                Re::Alternatives(parts) => {
                    Part::Alternatives(parts.into_iter().map(|re| self.lexeme(re)).collect())
                }
                Re::Repeat(re, min, max) => Part::Repeat(Box::new(self.lexeme(*re)), min, max),
                Re::Class(_) | Re::Start | Re::Finish => Part::Lexeme(id),
            },
            Part::Lexeme(_) | Part::Rule(_) => part,
            Part::Sequence(parts) => {
                let parts = parts.into_iter().map(|part| self.break_up(part, broken));
                Part::Sequence(parts.collect())
            }
            Part::Alternatives(parts) => {
                let parts = parts.into_iter().map(|part| self.break_up(part, broken));
                Part::Alternatives(parts.collect())
            }
            Part::Repeat(part, min, max) => {
                Part::Repeat(Box::new(self.break_up(*part, broken)), min, max)
            }
        }
    }

    /// The lexemes that the grammar mentions.
    pub(super) fn used(&self) -> Vec<usize> {
        let mut out = Vec::new();
        let mut open: Vec<&Part> = self.rules.iter().flatten().chain([&self.root]).collect();
        while let Some(part) = open.pop() {
            match part {
                Part::Lexeme(id) => out.push(*id),
                Part::Rule(_) => {}
                Part::Sequence(parts) | Part::Alternatives(parts) => open.extend(parts),
                Part::Repeat(part, ..) => open.push(part),
            }
        }
        out.sort_unstable();
        out.dedup();
        out
    }

    /// Whether a piece that `a` matches may be longer as a match of `b`, by a character that
    /// may follow `a`.
    fn clash(&self, a: usize, b: usize, follow: &Class, work: &mut u64) -> bool {
        let (Some(x), Some(y)) = (&self.lexemes[a].automaton, &self.lexemes[b].automaton) else {
            return true;
        };
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

    /// The characters that may follow each lexeme.
    fn follow(&self) -> Vec<Class> {
        let mut sets = Sets {
            grammar: self,
            first: vec![(Class::new(Vec::new()), false); self.rules.len()],
            after: vec![Class::new(Vec::new()); self.rules.len()],
            follow: vec![Class::new(Vec::new()); self.lexemes.len()],
            changed: true,
        };
        while std::mem::take(&mut sets.changed) {
            for (id, part) in self.rules.iter().enumerate() {
                let Some(part) = part else { continue };
                let new = sets.first_of(part);
                if new != sets.first[id] {
                    sets.first[id] = new;
                    sets.changed = true;
                }
            }
        }
        sets.changed = true;
        while std::mem::take(&mut sets.changed) {
            sets.visit(&self.root, &Class::new(Vec::new()));
            for (id, part) in self.rules.iter().enumerate() {
                if let Some(part) = part {
                    let after = sets.after[id].clone();
                    sets.visit(part, &after);
                }
            }
        }
        sets.follow
    }
}

impl Lexeme {
    fn is_character(&self) -> bool {
        matches!(self.re, Re::Class(_))
    }
}

/// First characters of rules, and what follows rules and lexemes, while they grow.
struct Sets<'a> {
    grammar: &'a Grammar,
    /// The first characters of each rule, and whether it may be empty.
    first: Vec<(Class, bool)>,
    after: Vec<Class>,
    follow: Vec<Class>,
    changed: bool,
}

/// The characters of both.
fn union(a: &Class, b: &Class) -> Class {
    Class::new([&a.ranges[..], &b.ranges[..]].concat())
}

impl Sets<'_> {
    fn first_of(&self, part: &Part) -> (Class, bool) {
        match part {
            Part::Lexeme(id) => (self.grammar.lexemes[*id].first(), false),
            Part::Rule(id) => self.first[*id].clone(),
            Part::Sequence(parts) => {
                let mut first = Class::new(Vec::new());
                for part in parts {
                    let (class, nullable) = self.first_of(part);
                    first = union(&first, &class);
                    if !nullable {
                        return (first, false);
                    }
                }
                (first, true)
            }
            Part::Alternatives(parts) => {
                let parts = parts.iter().map(|part| self.first_of(part));
                let none = (Class::new(Vec::new()), false);
                parts.fold(none, |(a, x), (b, y)| (union(&a, &b), x || y))
            }
            Part::Repeat(part, min, _) => {
                let (class, nullable) = self.first_of(part);
                (class, nullable || *min == 0)
            }
        }
    }

    /// Adds what follows the lexemes and rules of `part`, which `after` follows.
    fn visit(&mut self, part: &Part, after: &Class) {
        match part {
            Part::Lexeme(id) => grow(&mut self.follow[*id], after, &mut self.changed),
            Part::Rule(id) => grow(&mut self.after[*id], after, &mut self.changed),
            Part::Sequence(parts) => {
                let mut after = after.clone();
                for part in parts.iter().rev() {
                    self.visit(part, &after);
                    let (first, nullable) = self.first_of(part);
                    after = if nullable {
                        union(&first, &after)
                    } else {
                        first
                    };
                }
            }
            Part::Alternatives(parts) => parts.iter().for_each(|part| self.visit(part, after)),
            Part::Repeat(part, _, max) => {
                let again = *max != Some(1);
                let after = match again {
                    true => union(after, &self.first_of(part).0),
                    false => after.clone(),
                };
                self.visit(part, &after);
            }
        }
    }
}

fn grow(set: &mut Class, by: &Class, changed: &mut bool) {
    let new = union(set, by);
    if new != *set {
        *set = new;
        *changed = true;
    }
}

impl Lexeme {
    /// The characters that a match may begin with.
    fn first(&self) -> Class {
        first_characters(&self.re).0
    }
}

fn first_characters(re: &Re) -> (Class, bool) {
    match re {
        Re::Class(class) => (class.clone(), false),
        Re::Concat(parts) => {
            let mut first = Class::new(Vec::new());
            for part in parts {
                let (class, nullable) = first_characters(part);
                first = union(&first, &class);
                if !nullable {
                    return (first, false);
                }
            }
            (first, true)
        }
        Re::Alternatives(parts) => {
            let parts = parts.iter().map(first_characters);
            let none = (Class::new(Vec::new()), false);
            parts.fold(none, |(a, x), (b, y)| (union(&a, &b), x || y))
        }
        Re::Repeat(part, min, _) => {
            let (class, nullable) = first_characters(part);
            (class, nullable || *min == 0)
        }
        Re::Start | Re::Finish => (Class::new(Vec::new()), true),
    }
}

fn is_nullable(re: &Re) -> bool {
    first_characters(re).1
}

/// The positions of an expression (Glushkov's automaton): each character of it is a state.
struct Automaton {
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
    fn new(re: &Re) -> Option<Self> {
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
}

/// `re` without sequences in sequences and choices between one, so that each part of it is
/// smaller than it.
fn simple(re: Re) -> Re {
    match re {
        Re::Concat(parts) => {
            let mut flat = Vec::with_capacity(parts.len());
            for part in parts {
                match simple(part) {
                    Re::Concat(parts) => flat.extend(parts),
                    part => flat.push(part),
                }
            }
            match flat.len() {
                1 => flat.swap_remove(0),
                _ => Re::Concat(flat),
            }
        }
        Re::Alternatives(mut parts) => match parts.len() {
            1 => simple(parts.swap_remove(0)),
            _ => Re::Alternatives(parts.into_iter().map(simple).collect()),
        },
        Re::Repeat(part, min, max) => Re::Repeat(Box::new(simple(*part)), min, max),
        re => re,
    }
}

/// The rules that `part` mentions.
fn mentioned(part: &Part) -> Vec<usize> {
    let mut out = Vec::new();
    let mut open = vec![part];
    while let Some(part) = open.pop() {
        match part {
            Part::Lexeme(_) => {}
            Part::Rule(id) => out.push(*id),
            Part::Sequence(parts) | Part::Alternatives(parts) => open.extend(parts),
            Part::Repeat(part, ..) => open.push(part),
        }
    }
    out
}

fn is_small(re: &Re) -> bool {
    fn depth(re: &Re) -> usize {
        match re {
            Re::Class(_) | Re::Start | Re::Finish => 1,
            Re::Concat(parts) | Re::Alternatives(parts) => {
                1 + parts.iter().map(depth).max().unwrap_or(0)
            }
            Re::Repeat(part, ..) => 1 + depth(part),
        }
    }
    re.size() <= LEXEME_CHARS_MAX && depth(re) <= LEXEME_DEPTH_MAX
}

/// `node` as a regular expression, if all the rules it mentions are `regular`.
fn to_re(node: &Node, regular: &[Option<Re>]) -> Option<Re> {
    let all = |nodes: &[Node]| {
        let parts = nodes.iter().map(|node| to_re(node, regular));
        parts.collect::<Option<Vec<_>>>()
    };
    match node {
        Node::Class(class) => Some(Re::Class(class.clone())),
        Node::Sequence(nodes) => all(nodes).map(Re::Concat),
        Node::Alternatives(nodes) => all(nodes).map(Re::Alternatives),
        Node::Repeat(node, min, max) => {
            to_re(node, regular).map(|re| Re::Repeat(Box::new(re), *min, *max))
        }
        Node::Rule(id) => regular[*id].clone(),
    }
}

/// The rules that are regular and small enough to be lexemes, as expressions.
fn regular_rules(rules: &Rules) -> Vec<Option<Re>> {
    let mut regular: Vec<Option<Re>> = vec![None; rules.bodies.len()];
    let mut left = REGULAR_CHARS_MAX;
    loop {
        let mut changed = false;
        for (id, body) in rules.bodies.iter().enumerate() {
            if regular[id].is_some() {
                continue;
            }
            let found = to_re(body, &regular).or_else(|| repetition(id, body, &regular));
            if let Some(re) = found.filter(is_small)
                && let Some(rest) = left.checked_sub(re.size())
            {
                left = rest;
                regular[id] = Some(re);
                changed = true;
            }
        }
        if !changed {
            return regular;
        }
    }
}

/// A rule whose alternatives are regular, or regular and then the rule again, as a repetition.
fn repetition(id: usize, body: &Node, regular: &[Option<Re>]) -> Option<Re> {
    let mut again = Vec::new();
    let mut ends = Vec::new();
    let mut open = vec![body];
    while let Some(node) = open.pop() {
        match node {
            Node::Alternatives(nodes) => open.extend(nodes.iter().rev()),
            Node::Repeat(node, 0, Some(1)) => {
                ends.push(Re::Concat(Vec::new()));
                open.push(node);
            }
            Node::Sequence(nodes) if matches!(nodes.last(), Some(Node::Rule(last)) if *last == id) =>
            {
                let nodes = nodes[..nodes.len() - 1].iter();
                let parts = nodes.map(|node| to_re(node, regular));
                again.push(Re::Concat(parts.collect::<Option<_>>()?));
            }
            node => ends.push(to_re(node, regular)?),
        }
    }
    if again.is_empty() || ends.is_empty() {
        return None;
    }
    let again = Re::Repeat(Box::new(Re::Alternatives(again)), 0, None);
    Some(Re::Concat(vec![again, Re::Alternatives(ends)]))
}

/// The rules without the parts whose every text would be endless; an error if nothing is left.
fn finite(rules: &Rules) -> Result<Rules, Error> {
    let mut finite = vec![false; rules.bodies.len()];
    let mut changed = true;
    while std::mem::take(&mut changed) {
        for (id, body) in rules.bodies.iter().enumerate() {
            if !finite[id] && is_finite(body, &finite) {
                finite[id] = true;
                changed = true;
            }
        }
    }
    if !finite[rules.root] {
        return Err(Error::Unsatisfiable {
            what: "GBNF grammar",
            reason: "every text would be endless".to_owned(),
        });
    }
    // Nothing mentions the rules that are left out.
    let nothing = || Node::Sequence(Vec::new());
    let bodies = rules.bodies.iter();
    let bodies = bodies.map(|body| prune(body, &finite).unwrap_or_else(nothing));
    Ok(Rules {
        bodies: bodies.collect(),
        root: rules.root,
    })
}

fn is_finite(node: &Node, finite: &[bool]) -> bool {
    match node {
        Node::Class(class) => !class.is_empty(),
        Node::Sequence(nodes) => nodes.iter().all(|node| is_finite(node, finite)),
        Node::Alternatives(nodes) => nodes.iter().any(|node| is_finite(node, finite)),
        Node::Repeat(node, min, _) => *min == 0 || is_finite(node, finite),
        Node::Rule(id) => finite[*id],
    }
}

/// `node` without its endless parts; `None` if it is one.
fn prune(node: &Node, finite: &[bool]) -> Option<Node> {
    if !is_finite(node, finite) {
        return None;
    }
    match node {
        Node::Class(_) | Node::Rule(_) => Some(node.clone()),
        Node::Sequence(nodes) => {
            let nodes = nodes.iter().map(|node| prune(node, finite));
            nodes.collect::<Option<_>>().map(Node::Sequence)
        }
        Node::Alternatives(nodes) => {
            let nodes = nodes.iter().filter_map(|node| prune(node, finite));
            Some(Node::Alternatives(nodes.collect()))
        }
        Node::Repeat(node, min, max) => Some(match prune(node, finite) {
            Some(node) => Node::Repeat(Box::new(node), *min, *max),
            None => Node::Sequence(Vec::new()),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::super::parse::parse;
    use super::*;

    /// The lexemes that a grammar ends up with.
    fn lexemes(text: &str) -> Vec<String> {
        let limits = Limits::default();
        let rules = parse(text, &limits).unwrap();
        let grammar = Grammar::new(&rules, &limits).unwrap();
        let write = |id: usize| {
            let mut out = String::new();
            grammar.lexemes[id].re.write(&mut out);
            out
        };
        grammar.used().into_iter().map(write).collect()
    }

    #[test]
    fn a_regular_grammar_is_one_lexeme() {
        assert_eq!(
            lexemes("root ::= a+ \"x\"\na ::= [0-9] | b\nb ::= \"-\""),
            ["(?:[0-9]|\\x{2D})+x"]
        );
        let found = lexemes("root ::= \"a\" ws\nws ::= ([ \\t] ws)?");
        assert_eq!(found.len(), 1, "{found:?}");
    }

    #[test]
    fn lexemes_that_clash_are_broken_up() {
        let nested = "root ::= \"(\" root \")\" | ";
        // The end of `[a]*` cannot be told from what follows.
        let found = lexemes(&format!(
            "{nested} x\nx ::= y x | y\ny ::= \"<\" y \">\" | [a]* \"a\""
        ));
        assert!(found.contains(&"a".to_owned()), "{found:?}");
        // A word ends where a blank follows.
        let found = lexemes(&format!("{nested} word (\" \" root)?\nword ::= [a-z]+"));
        assert!(found.contains(&"[a-z]+".to_owned()), "{found:?}");
        // `ab` is longer than `a`, and `b` may follow `a`.
        let found = lexemes(
            "root ::= \"a\" rest \"c\" | \"ab\" rest \"d\"\nrest ::= \"(\" rest \")\" | \"b\"",
        );
        assert!(!found.contains(&"ab".to_owned()), "{found:?}");
        let found = lexemes(
            "root ::= \"a\" rest \"c\" | \"ab\" rest \"d\"\nrest ::= \"(\" rest \")\" | \"-\"",
        );
        assert!(found.contains(&"ab".to_owned()), "{found:?}");
    }

    #[test]
    fn an_endless_grammar_is_refused() {
        let limits = Limits::default();
        let rules = parse("root ::= \"a\" root", &limits).unwrap();
        assert!(matches!(
            Grammar::new(&rules, &limits),
            Err(Error::Unsatisfiable { .. })
        ));
    }
}

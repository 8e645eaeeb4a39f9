//! Choosing a drafter: the one asked for, or the best that lies in the checkpoint,
//! beside it or where the caller says.
//!
//! Drafters are data. Those with a draft head or a draft model are entries of [`HEADS`], one file each
//! in this folder; the n-grams of each text need none, and guess beside the head that is found.

mod assistant;
mod block;
mod eagle3;
mod model;
mod mtp;
pub(crate) mod pairing;

pub(crate) use assistant::NAME as ASSISTANT;

use crate::error::{DrafterReason, EngineError, MissingHead, NoHead, RefusedHead, Remedy};
use crate::options::DraftChoice;
use crate::source::Source;
pub(crate) use model::{Outlook, outlook};
use models::ModelError;
use pairing::{Found, HeadDrafter, Home, Pairing, Place};
use speculate::Drafters;
use speculate::draft::{NGRAM, NGRAM_HELP};
use std::str::FromStr;

/// Every drafter with a draft head, in the order in which they are looked for.
const HEADS: &[HeadDrafter] = &[
    mtp::KIND,
    assistant::KIND,
    eagle3::KIND,
    block::DFLASH,
    block::DSPARK,
    model::KIND,
];

/// The head that a checkpoint holds whose architecture is no draft head's: one inside a target's.
const INSIDE: &HeadDrafter = &HEADS[0];

/// A drafter, as help texts list it.
#[derive(Clone, Copy, Debug)]
pub struct DrafterKind {
    /// The drafter's name, as users type it and as records have it.
    pub name: &'static str,
    /// What it is, in a few words; empty if the name says it.
    pub help: &'static str,
    /// Whether it can be asked for by its name alone.
    pub stands_alone: bool,
    /// Whether the place of a draft head may follow the name.
    pub takes_place: bool,
}

/// Every drafter that can be asked for.
pub fn drafter_kinds() -> impl Iterator<Item = DrafterKind> {
    let heads = HEADS.iter().map(|kind| DrafterKind {
        name: kind.name,
        help: kind.help,
        stands_alone: !kind.needs_place,
        takes_place: true,
    });
    let ngram = DrafterKind {
        name: NGRAM,
        help: NGRAM_HELP,
        stands_alone: true,
        takes_place: false,
    };
    heads.chain([ngram])
}

/// The width of the target's hidden rows that the draft head of this `config.json` reads, if it
/// is one that may be suggested by its width alone.
pub fn suggested_width(config: &serde_json::Value) -> Option<u64> {
    HEADS.iter().find_map(|kind| (kind.target_width)(config))
}

/// The draft head that checkpoints of this architecture hold, if they are draft heads.
pub(crate) fn head_of(architecture: &str) -> Option<&'static str> {
    let mut heads = models::DRAFT_HEADS.iter();
    let head = heads.find(|head| head.architectures.contains(&architecture));
    head.map(|head| head.name)
}

impl FromStr for DraftChoice {
    type Err = String;

    /// Reads `auto`, `none`, a drafter's name, or `NAME:PATH` with the place of its head. Those with heads may be
    /// joined by `+`, one of each kind, and `+ngram` may follow them.
    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "auto" => return Ok(DraftChoice::Auto),
            "none" => return Ok(DraftChoice::None),
            _ => {}
        }
        let unknown = || {
            let known = choices().join(", ");
            format!(
                "`{s}` is not a drafter; known are {known}; heads of different kinds may be joined by +, \
                 and +{NGRAM} may follow a head"
            )
        };
        let all: Option<Vec<_>> = joined(s).into_iter().map(named).collect();
        let mut all = all.ok_or_else(unknown)?;
        let ngrams = all.len() > 1 && all.pop_if(|(name, _)| *name == NGRAM).is_some();
        let is_twice = |name: &str| all.iter().filter(|(other, _)| *other == name).count() > 1;
        if all.len() > 1 && all.iter().any(|(name, _)| *name == NGRAM || is_twice(name)) {
            return Err(unknown());
        }
        Ok(match (all.len(), ngrams) {
            (1, _) => {
                let (name, source) = all.remove(0);
                match ngrams {
                    true if name == NGRAM => return Err(unknown()),
                    true => DraftChoice::WithNgrams(name, source),
                    false => DraftChoice::Named(name, source),
                }
            }
            (_, ngrams) => DraftChoice::Several { heads: all, ngrams },
        })
    }
}

/// The parts of `s` that are joined by `+`: a drafter's name follows each, for places may have a `+`, too.
fn joined(s: &str) -> Vec<&str> {
    let begins_drafter = |rest: &str| {
        let name = rest.split([':', '+']).next().unwrap_or_default();
        drafter_kinds().any(|kind| kind.name == name)
    };
    let mut parts = Vec::new();
    let mut first = 0;
    for (at, _) in s.match_indices('+') {
        if begins_drafter(&s[at + 1..]) {
            parts.push(&s[first..at]);
            first = at + 1;
        }
    }
    parts.push(&s[first..]);
    parts
}

/// The drafter that `s` names, and the place of its head if it says one.
fn named(s: &str) -> Option<(&'static str, Option<Source>)> {
    let (name, path) = match s.split_once(':') {
        Some((name, path)) => (name, Some(path)),
        None => (s, None),
    };
    let fits = |kind: &DrafterKind| {
        kind.name == name
            && match path {
                Some(path) => kind.takes_place && !path.is_empty(),
                None => kind.stands_alone,
            }
    };
    let kind = drafter_kinds().find(fits)?;
    Some((kind.name, path.map(|path| Source::Folder(path.into()))))
}

/// What a [`DraftChoice`] can be read from.
fn choices() -> Vec<String> {
    let mut all = vec!["auto".to_owned(), "none".to_owned()];
    for kind in drafter_kinds() {
        all.extend(kind.stands_alone.then(|| kind.name.to_owned()));
        all.extend(kind.takes_place.then(|| format!("{}:PATH", kind.name)));
    }
    all
}

/// `error`, unless memory is too small: then another drafter is no answer.
fn unless_too_large(error: EngineError) -> Result<EngineError, EngineError> {
    match error {
        EngineError::TooLarge(_) => Err(error),
        other => Ok(other),
    }
}

/// The drafter that the options of `pair` ask for.
///
/// # Errors
///
/// [`EngineError::NoDrafter`] if one is asked for by name and cannot be had;
/// [`EngineError::TooLarge`] if it fits no memory.
pub(crate) fn find(pair: &mut Pairing<'_>) -> Result<Found, EngineError> {
    let options = pair.options;
    match &options.draft {
        _ if options.draft_max == 0 => Ok(Found::new(Drafters::none(), DrafterReason::NoLength)),
        DraftChoice::None => Ok(Found::new(Drafters::none(), DrafterReason::NotAsked)),
        DraftChoice::Auto => Search::new(pair).best(),
        choice => all_of(pair, &choice.named()),
    }
}

/// The drafters called so, each with the head at its source.
fn all_of(
    pair: &mut Pairing<'_>,
    named: &[(&'static str, Option<&Source>)],
) -> Result<Found, EngineError> {
    let mut all: Option<Found> = None;
    for &(name, source) in named {
        if all.is_some() && name == NGRAM || named.iter().filter(|n| n.0 == name).count() > 1 {
            return Err(EngineError::DrafterTwice { name });
        }
        let found = one(pair, name, source)?;
        pair.beside.extend(found.plans.iter().cloned());
        let weights = if pair.mapped { 0 } else { found.weight_bytes };
        pair.budget = pair.budget.beside(weights);
        all = Some(match all {
            None => found,
            Some(all) => all.and(name, found),
        });
    }
    let none = || Found::new(Drafters::none(), DrafterReason::NotAsked);
    Ok(all.unwrap_or_else(none))
}

/// The drafter called `name`, with the head at `source`, or wherever it is found.
fn one(
    pair: &mut Pairing<'_>,
    name: &'static str,
    source: Option<&Source>,
) -> Result<Found, EngineError> {
    if name == NGRAM {
        let reason = DrafterReason::Asked { drafter: NGRAM };
        return Ok(Found::new(Drafters::ngrams(), reason));
    }
    let kind = HEADS.iter().find(|kind| kind.name == name);
    let kind = kind.ok_or(EngineError::UnknownDrafter { name })?;
    match source {
        Some(source) => at(pair, kind, source),
        None => Search::new(pair).named(kind),
    }
}

/// The drafter `kind` with the head at `source`, where a user or the target's place has it.
fn at(
    pair: &mut Pairing<'_>,
    kind: &'static HeadDrafter,
    source: &Source,
) -> Result<Found, EngineError> {
    let error = match (kind.load)(pair, Place::At(source)) {
        Ok(found) => return Ok(found),
        Err(error) => unless_too_large(error)?,
    };
    let none = NoHead {
        refused: vec![RefusedHead {
            place: Some(source.place()),
            error,
        }],
        missing: MissingHead::Anywhere,
        remedy: Some(Remedy::OtherHead),
    };
    Err(EngineError::NoDrafter {
        asked: kind.name,
        reason: DrafterReason::NoHead(none),
    })
}

/// Every drafter that may fit the target of `pair`: heads in the order in which [`Search::best`]
/// looks for them, the first of them with n-grams beside it, and n-grams alone.
pub(crate) fn candidates(pair: &Pairing<'_>) -> Vec<DraftChoice> {
    let mut all = Vec::new();
    let known = pair.target.draft_heads();
    for kind in HEADS.iter().filter(|kind| known.contains(&kind.name)) {
        match (kind.find)(pair) {
            // A head that cannot be used is refused, with its reason, when it is loaded.
            Ok(Home::Inside) | Err(_) => all.push(DraftChoice::Named(kind.name, None)),
            Ok(Home::Beside(source)) => all.push(DraftChoice::Named(kind.name, Some(source))),
            Ok(Home::Nowhere(_)) => {}
        }
    }
    for source in &pair.options.drafters {
        let kind = kind_of(source).unwrap_or(INSIDE);
        all.push(DraftChoice::Named(kind.name, Some(source.clone())));
    }
    let first = match all.first() {
        Some(DraftChoice::Named(name, source)) => {
            Some(DraftChoice::WithNgrams(name, source.clone()))
        }
        _ => None,
    };
    all.extend(first);
    all.push(DraftChoice::Named(NGRAM, None));
    all
}

/// The kind of draft head whose checkpoint is at `source`, if it can be read and is one's own.
fn kind_of(source: &Source) -> Option<&'static HeadDrafter> {
    let checkpoint = source.checkpoint().ok()?;
    let name = head_of(checkpoint.architecture().ok()?);
    HEADS.iter().find(|kind| Some(kind.name) == name)
}

/// A search for a draft head in all places, which remembers what it could not use.
struct Search<'a, 'p> {
    pair: &'a mut Pairing<'p>,
    refused: Vec<RefusedHead>,
    /// What to do about the first refused head.
    remedy: Option<Remedy>,
}

impl<'a, 'p> Search<'a, 'p> {
    fn new(pair: &'a mut Pairing<'p>) -> Self {
        Search {
            pair,
            refused: Vec::new(),
            remedy: None,
        }
    }

    /// The head of `kind`, wherever it lies.
    fn named(mut self, kind: &'static HeadDrafter) -> Result<Found, EngineError> {
        let missing = match (kind.find)(self.pair) {
            // Where it has to lie, nothing else can be meant.
            Ok(Home::Beside(source)) => return at(self.pair, kind, &source),
            Ok(Home::Inside) => match self.inside(kind)? {
                Some(found) => return Ok(found),
                None => MissingHead::Anywhere,
            },
            Ok(Home::Nowhere(missing)) => missing,
            Err(error) => {
                self.refuse_inside(kind, unless_too_large(error)?);
                MissingHead::Anywhere
            }
        };
        if let Some(found) = self.elsewhere()? {
            return Ok(found);
        }
        Err(EngineError::NoDrafter {
            asked: kind.name,
            reason: DrafterReason::NoHead(self.explain(missing)),
        })
    }

    /// The best that there is; heads that cannot be used are part of the reason.
    fn best(mut self) -> Result<Found, EngineError> {
        let known = self.pair.target.draft_heads();
        for kind in HEADS.iter().filter(|kind| known.contains(&kind.name)) {
            match (kind.find)(self.pair) {
                Ok(Home::Inside) => {
                    if let Some(found) = self.inside(kind)? {
                        return Ok(found);
                    }
                }
                Ok(Home::Beside(source)) => match (kind.load)(self.pair, Place::At(&source)) {
                    Ok(found) => return Ok(found),
                    Err(error) => self.refuse_apart(&source, unless_too_large(error)?),
                },
                Ok(Home::Nowhere(_)) => {}
                Err(error) => self.refuse_inside(kind, unless_too_large(error)?),
            }
        }
        Ok(match self.elsewhere()? {
            Some(found) => found,
            None => Found::new(
                Drafters::ngrams(),
                DrafterReason::NoHead(self.explain(MissingHead::Anywhere)),
            ),
        })
    }

    /// The head of `kind` inside the target's checkpoint.
    fn inside(&mut self, kind: &HeadDrafter) -> Result<Option<Found>, EngineError> {
        match (kind.load)(self.pair, Place::Inside) {
            Ok(found) => Ok(Some(found)),
            Err(error) => {
                self.refuse_inside(kind, unless_too_large(error)?);
                Ok(None)
            }
        }
    }

    /// The first of the caller's places that has a head for this target, of the kind that its
    /// configuration names.
    fn elsewhere(&mut self) -> Result<Option<Found>, EngineError> {
        let options = self.pair.options;
        for source in &options.drafters {
            match self.by_architecture(source) {
                Ok(found) => return Ok(Some(found)),
                Err(error) => self.refuse_apart(source, unless_too_large(error)?),
            }
        }
        Ok(None)
    }

    fn by_architecture(&mut self, source: &Source) -> Result<Found, EngineError> {
        let checkpoint = source.checkpoint()?;
        let architecture = checkpoint.architecture().map_err(ModelError::from)?;
        let name = head_of(architecture);
        let kind = HEADS.iter().find(|kind| Some(kind.name) == name);
        (kind.unwrap_or(INSIDE).load)(self.pair, Place::At(source))
    }

    /// Notes why the head inside the checkpoint is not used.
    fn refuse_inside(&mut self, kind: &HeadDrafter, error: EngineError) {
        self.refused.push(RefusedHead { place: None, error });
        self.remedy
            .get_or_insert(Remedy::HeadOfOriginal { drafter: kind.name });
    }

    /// Notes why the head at `source` is not used.
    fn refuse_apart(&mut self, source: &Source, error: EngineError) {
        self.refused.push(RefusedHead {
            place: Some(source.place()),
            error,
        });
        self.remedy.get_or_insert(Remedy::OtherHead);
    }

    /// Why no head is used: `missing` if none is there.
    fn explain(self, missing: MissingHead) -> NoHead {
        let advice = self.pair.options.advice.clone().map(Remedy::Advice);
        NoHead {
            refused: self.refused,
            missing,
            remedy: advice.or(self.remedy),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drafter_is_read_from_its_name_and_its_place() {
        let read = |s: &str| s.parse::<DraftChoice>();
        assert!(matches!(read("auto"), Ok(DraftChoice::Auto)));
        assert!(matches!(read("none"), Ok(DraftChoice::None)));
        assert!(matches!(read("mtp"), Ok(DraftChoice::Named("mtp", None))));
        assert!(matches!(
            read("eagle3:a:b"),
            Ok(DraftChoice::Named("eagle3", Some(Source::Folder(path)))) if path.ends_with("a:b")
        ));
        assert!(matches!(
            read("mtp+ngram"),
            Ok(DraftChoice::WithNgrams("mtp", None))
        ));
        assert!(matches!(
            read("eagle3:a+b+ngram"),
            Ok(DraftChoice::WithNgrams("eagle3", Some(Source::Folder(path)))) if path.ends_with("a+b")
        ));
        for (s, wanted, with_ngrams) in [
            (
                "mtp+eagle3:a+b",
                vec![("mtp", None), ("eagle3", Some("a+b"))],
                false,
            ),
            (
                "assistant:A+model:B+mtpx+dspark:c:d+ngram",
                vec![
                    ("assistant", Some("A")),
                    ("model", Some("B+mtpx")),
                    ("dspark", Some("c:d")),
                ],
                true,
            ),
        ] {
            let Ok(DraftChoice::Several { heads, ngrams }) = read(s) else {
                panic!("{s}");
            };
            assert_eq!(ngrams, with_ngrams, "{s}");
            let heads: Vec<_> = heads
                .iter()
                .map(|(name, source)| {
                    let place = source.as_ref().map(|source| match source {
                        Source::Folder(path) => path.to_str().unwrap(),
                        Source::Files(_) => panic!("no files were named"),
                    });
                    (*name, place)
                })
                .collect();
            assert_eq!(heads, wanted, "{s}");
        }
        for wrong in [
            "",
            "mtp+mtp:x",
            "mtp+dspark",
            "ngram+mtp",
            "mtp+ngram+eagle3:x",
            "model:a+none+mtp+auto",
            "oracle",
            "eagle3",
            "eagle3:",
            "mtp:",
            "ngram:x",
            "auto:x",
            "auto+ngram",
            "ngram+ngram",
            "+ngram",
        ] {
            let error = read(wrong).err().unwrap_or_else(|| panic!("{wrong}"));
            let known = "known are auto, none, mtp, mtp:PATH, assistant, assistant:PATH, eagle3:PATH, dflash:PATH, dspark:PATH, model:PATH, ngram; heads of different kinds may be joined by +, and +ngram may follow a head";
            assert!(error.ends_with(known), "{error}");
        }
    }

    #[test]
    fn drafters_have_names_of_their_own() {
        let mut names: Vec<_> = drafter_kinds().map(|kind| kind.name).collect();
        names.sort_unstable();
        let all = names.len();
        names.dedup();
        assert_eq!(names.len(), all);
        // A head's checkpoint is found by the name that it has in both tables.
        for head in models::DRAFT_HEADS {
            assert!(
                HEADS.iter().any(|kind| kind.name == head.name),
                "{}",
                head.name
            );
        }
    }
}

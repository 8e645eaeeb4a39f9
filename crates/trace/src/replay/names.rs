//! Who the names of drafters in a trace stand for.

use crate::read::ModelTrace;
use speculate::Guesser;
use speculate::draft::NGRAM;
use speculate::length::MAX_HEADS;

/// The drafters of a trace's model.
#[derive(Clone, Debug)]
pub(super) struct Names {
    /// Heads, as rounds number them.
    heads: Vec<String>,
    /// Whether n-grams may draft.
    ngrams: bool,
}

impl Names {
    /// The drafters of the model, and any others that its rounds name.
    pub(super) fn of(trace: &ModelTrace) -> Self {
        let streams = trace.rounds.iter().flat_map(|round| &round.streams);
        let named = streams.filter_map(|stream| stream.drafter.as_ref());
        let mut names = Names {
            heads: Vec::new(),
            ngrams: false,
        };
        for name in trace.model.drafters.iter().chain(named) {
            if name == NGRAM {
                names.ngrams = true;
            } else if !names.heads.contains(name) && names.heads.len() < MAX_HEADS {
                names.heads.push(name.clone());
            }
        }
        names
    }

    /// Whoever is called so; the first head if nobody is.
    pub(super) fn guesser(&self, name: &str) -> Guesser {
        match name == NGRAM {
            true => Guesser::Ngram,
            false => {
                let head = self.heads.iter().position(|head| head == name);
                Guesser::Head(head.unwrap_or(0))
            }
        }
    }

    /// What `guesser` is called.
    pub(super) fn name(&self, guesser: Guesser) -> &str {
        match guesser {
            Guesser::Ngram => NGRAM,
            Guesser::Head(head) => self.heads.get(head).map_or("", String::as_str),
        }
    }

    /// Who would draft first: the first head, or n-grams if nobody else drafts.
    pub(super) fn first(&self) -> Guesser {
        match self.heads.is_empty() && self.ngrams {
            true => Guesser::Ngram,
            false => Guesser::HEAD,
        }
    }

    /// Whether n-grams have no head beside them.
    pub(super) fn only_ngrams(&self) -> bool {
        self.first() == Guesser::Ngram
    }
}

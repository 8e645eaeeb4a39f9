//! The Gemma 4 assistant: a small model that reads the target's KV cache and has none.

use super::pairing::{Found, HeadDrafter, Home, Pairing, Place};
use crate::error::{EngineError, FoundHead, MissingHead};
use crate::source::quantized;
use models::Gemma4Assistant;
use speculate::draft::Assistant;

pub(crate) const KIND: HeadDrafter = HeadDrafter {
    name: NAME,
    help: "",
    needs_place: false,
    target_width: |config| {
        let is_head = config["model_type"].as_str()?.ends_with("_assistant");
        let width = config.get("backbone_hidden_size");
        width.filter(|_| is_head)?.as_u64()
    },
    find: |pair| {
        Ok(match pair.source.assistant_beside() {
            Some(source) => Home::Beside(source),
            None => Home::Nowhere(MissingHead::Beside { drafter: NAME }),
        })
    },
    load,
};

pub(crate) const NAME: &str = "assistant";

fn load(pair: &mut Pairing<'_>, place: Place<'_>) -> Result<Found, EngineError> {
    let Place::At(source) = place else {
        unreachable!("an assistant is never found inside its target's checkpoint");
    };
    let checkpoint = quantized(pair.open(source)?, pair.options.quantize.as_ref())?;
    let mut head = Gemma4Assistant::load(pair.b, &checkpoint, pair.target)?;
    if let Some(ids) = &pair.shortlist {
        head = head.with_shortlist(pair.b, &checkpoint, ids)?;
    }
    if let Some(rows) = pair.options.draft_window {
        head = head.with_window(rows.get());
    }
    let found = FoundHead {
        what: "assistant",
        checkpoint: Some(source.name()),
    };
    let shortlist = head.shortlist().map(|list| list.ids().len());
    let found = Found::head(
        Box::new(Assistant::new(head)),
        found,
        Some(Gemma4Assistant::census(&checkpoint)?),
        shortlist,
        pair.target.vocab_size(),
    );
    pair.apart(source, &checkpoint, found)
}

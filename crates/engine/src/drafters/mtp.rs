//! The MTP head of Qwen 3.5 and 3.6: part of the target's checkpoint, or kept apart where a
//! conversion has dropped it.

use super::pairing::{Found, HeadDrafter, Home, Pairing, Place, fits};
use crate::error::{EngineError, FoundHead, MissingHead};
use models::{ChainedHead, Qwen35Mtp};
use weights::Checkpoint;

pub(crate) const KIND: HeadDrafter = HeadDrafter {
    name: NAME,
    help: "the model's own MTP head",
    needs_place: false,
    target_width: |config| {
        let is_head = config["model_type"].as_str()?.ends_with("_mtp");
        let nested = config["text_config"].get("hidden_size");
        let width = nested.or_else(|| config.get("hidden_size"));
        width.filter(|_| is_head)?.as_u64()
    },
    find: |pair| {
        let family = pair.target.family();
        if !pair.target.draft_heads().contains(&NAME) {
            return Ok(Home::Nowhere(MissingHead::Family { family, what: WHAT }));
        }
        Ok(if Qwen35Mtp::is_in(pair.checkpoint)? {
            Home::Inside
        } else {
            Home::Nowhere(MissingHead::Inside {
                family,
                drafter: NAME,
                what: WHAT,
            })
        })
    },
    load,
};

const NAME: &str = "mtp";
const WHAT: &str = "MTP head";

fn load(pair: &mut Pairing<'_>, place: Place<'_>) -> Result<Found, EngineError> {
    let Place::At(source) = place else {
        return paired(pair, pair.checkpoint, None);
    };
    let checkpoint = pair.open(source)?;
    let mut found = paired(pair, &checkpoint, Some(source.name()))?;
    let facts = pair.target.norm_facts(&checkpoint);
    found.preflight.note_norms(facts);
    pair.apart(source, &checkpoint, found)
}

/// The head in `checkpoint`, which is called `name` if it is not the target's.
fn paired(
    pair: &Pairing<'_>,
    checkpoint: &Checkpoint,
    name: Option<String>,
) -> Result<Found, EngineError> {
    let mut head = Qwen35Mtp::load(pair.b, checkpoint, pair.target)?;
    if let Some(ids) = &pair.shortlist {
        head = head.with_shortlist(pair.b, pair.checkpoint, pair.target, ids)?;
    }
    fits(pair.b, &head.plan(), &pair.size.kv_format)?;
    let census = Qwen35Mtp::census(checkpoint, pair.target)?;
    let found = FoundHead {
        what: WHAT,
        checkpoint: name,
    };
    Ok(pair.chained(head, Some(census), found)?)
}

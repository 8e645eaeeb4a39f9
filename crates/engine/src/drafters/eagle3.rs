//! EAGLE-3 heads: checkpoints of their own, for targets of any family, that read rows from three
//! layers of the target.

use super::pairing::{Found, HeadDrafter, Home, Pairing, Place, fits};
use crate::error::{EngineError, FoundHead, MissingHead};
use models::{ChainedHead, Eagle3};

pub(crate) const KIND: HeadDrafter = HeadDrafter {
    name: "eagle3",
    help: "",
    needs_place: true,
    // A head fits one target of many that are as wide, so none is suggested.
    target_width: |_| None,
    find: |_| Ok(Home::Nowhere(MissingHead::Anywhere)),
    load,
};

fn load(pair: &mut Pairing<'_>, place: Place<'_>) -> Result<Found, EngineError> {
    let Place::At(source) = place else {
        unreachable!("an EAGLE-3 head is never found inside its target's checkpoint");
    };
    let checkpoint = pair.open(source)?;
    let head = Eagle3::load(pair.b, &checkpoint, pair.target)?;
    fits(pair.b, &head.plan(), &pair.size.kv_format)?;
    let found = FoundHead {
        what: "EAGLE-3 head",
        checkpoint: Some(source.name()),
    };
    let found = pair.chained(head, None, found)?;
    pair.apart(source, &checkpoint, found)
}

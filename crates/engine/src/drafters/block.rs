//! Block drafters, DFlash and DSpark heads: checkpoints of their own, for targets of any family, that
//! read rows from some layers of the target.

use super::pairing::{Found, HeadDrafter, Home, Pairing, Place, fits};
use crate::error::{EngineError, FoundHead, MissingHead};
use models::{BlockHead, BlockKind};
use speculate::draft::Block;

pub(crate) const DFLASH: HeadDrafter = HeadDrafter {
    name: BlockKind::Dflash.head().name,
    help: "",
    needs_place: true,
    // A head fits one target of many that are as wide, so none is suggested.
    target_width: |_| None,
    find: |_| Ok(Home::Nowhere(MissingHead::Anywhere)),
    load: |pair, place| load(pair, place, BlockKind::Dflash, "DFlash head"),
};

pub(crate) const DSPARK: HeadDrafter = HeadDrafter {
    name: BlockKind::Dspark.head().name,
    load: |pair, place| load(pair, place, BlockKind::Dspark, "DSpark head"),
    ..DFLASH
};

fn load(
    pair: &mut Pairing<'_>,
    place: Place<'_>,
    kind: BlockKind,
    what: &'static str,
) -> Result<Found, EngineError> {
    let Place::At(source) = place else {
        unreachable!("a block drafter is never found inside its target's checkpoint");
    };
    let checkpoint = pair.open(source)?;
    let head = BlockHead::load(pair.b, &checkpoint, pair.target, kind)?;
    fits(pair.b, &head.plan(), &pair.size.kv_format)?;
    let found = FoundHead {
        what,
        checkpoint: Some(source.name()),
    };
    let (plan, memory) = pair.head_memory(head.plan())?;
    let found = Found {
        plans: vec![plan],
        ..Found::head(
            Box::new(Block::new(head, memory)),
            found,
            None,
            None,
            pair.target.vocab_size(),
        )
    };
    pair.apart(source, &checkpoint, found)
}

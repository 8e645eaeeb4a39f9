//! The engine's errors and reasons in the words of the command line: with the options that a
//! person types.

use anyhow::{Error, anyhow};
use engine::{
    DrafterReason, EngineError, MissingHead, NoHead, Placement, Rejected, Remedy, TooLarge,
    Unmappable, WeightsReason, Words,
};

/// How reasons are spelled in what the commands print.
pub(crate) const WORDS: Words = Words {
    drafter: drafter_reason,
    weights: weights_reason,
};

/// `error` with the options that it is about.
pub(crate) fn load_error(error: EngineError) -> Error {
    match spelled(&error) {
        Some(text) => anyhow!(text),
        None => anyhow!(error),
    }
}

/// `error` of a request, with the option that helps where its prompt is too long.
pub(crate) fn request_error(error: Error) -> Error {
    match error.downcast_ref() {
        Some(Rejected::PromptTooLong {
            context,
            context_max,
            ..
        }) => anyhow!("{error}{}", server::longer_context(*context, *context_max)),
        _ => error,
    }
}

/// `error` in words that name options; `None` where it is about none.
fn spelled(error: &EngineError) -> Option<String> {
    Some(match error {
        EngineError::DraftTooLong { asked, most } => {
            format!("--draft-max {asked} is more than {most}")
        }
        EngineError::DraftVocabulary { .. } => {
            format!("{error}; `paceline count` writes one for this model")
        }
        EngineError::NoSize => "--parallel, --chunk and --context must be at least 1".into(),
        EngineError::ContextTooLong { asked, most } => {
            format!("--context {asked} is more than the {most} tokens that this model knows")
        }
        EngineError::IsDrafter { drafter } => format!(
            "this checkpoint is a drafter: name its target with -m, and it with --draft {drafter}:PATH"
        ),
        EngineError::NoDrafter { asked, reason } => {
            format!("--draft {asked}: {}", drafter_reason(reason))
        }
        EngineError::Unmappable(obstacle) => format!(
            "--weights mapped: {}; leave the option out",
            unmappable(obstacle)
        ),
        EngineError::NoKv {
            kv,
            pair,
            device,
            supported,
        } => format!(
            "--kv {kv}: {device} keeps {}{}",
            engine::kept_formats(supported),
            engine::of_some_layers(kv, *pair)
        ),
        EngineError::KvMisfit {
            kv,
            format,
            block,
            head_dim,
        } => format!(
            "--kv {kv}: {format} has blocks of {block} values, of which heads of {head_dim} are no multiple"
        ),
        EngineError::TooLarge(too_large) => memory(too_large),
        EngineError::KvTooSmall {
            asked,
            least,
            context,
        } => format!(
            "--kv-memory {}: one request of {context} tokens needs {}; a smaller --context needs less",
            crate::model::bytes(*asked),
            crate::model::bytes(*least)
        ),
        _ => return None,
    })
}

/// What a model takes, and the options that let it take less.
fn memory(too_large: &TooLarge) -> String {
    let mut less = vec!["a smaller --context", "--kv q8_0"];
    if too_large.sequences > 1 {
        less.insert(0, "a smaller --parallel");
    }
    if too_large.weights > 0 {
        less.push("--weights mapped");
    }
    let more = match too_large.own_memory {
        true => "",
        false => ", and --memory SIZE allows more",
    };
    format!("{too_large}; {} needs less{more}", less.join(" or "))
}

fn drafter_reason(reason: &DrafterReason) -> String {
    match reason {
        DrafterReason::NotAsked => "--draft none".into(),
        DrafterReason::NoLength => "--draft-max is 0".into(),
        DrafterReason::Asked { drafter } => format!("--draft {drafter}"),
        DrafterReason::NoHead(none) => no_head(none),
        reason => reason.to_string(),
    }
}

fn no_head(none: &NoHead) -> String {
    none.spell(
        |error| spelled(error).unwrap_or_else(|| error.to_string()),
        |missing| match missing {
            MissingHead::Inside { drafter, .. } | MissingHead::Beside { drafter } => {
                format!("{missing}; name one with --draft {drafter}:PATH")
            }
            missing => missing.to_string(),
        },
        |remedy| match remedy {
            Remedy::HeadOfOriginal { drafter } => format!(
                "`paceline pull ORIGINAL --head-only` fetches the head of the original, for --draft {drafter}:ORIGINAL"
            ),
            remedy => remedy.to_string(),
        },
    )
}

fn weights_reason(reason: &WeightsReason) -> String {
    match reason {
        WeightsReason::Asked(Placement::Mapped) => "--weights mapped".into(),
        WeightsReason::Asked(_) => "--weights packed".into(),
        WeightsReason::Unmappable(obstacle) => unmappable(obstacle),
        reason => reason.to_string(),
    }
}

fn unmappable(obstacle: &Unmappable) -> String {
    match obstacle {
        Unmappable::Quantized => "--quant makes weights that lie in no file".into(),
        obstacle => obstacle.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::RefusedHead;

    #[test]
    fn options_are_named_at_every_depth() {
        let head = RefusedHead {
            place: Some("a/head".into()),
            error: EngineError::KvMisfit {
                kv: engine::KvPlan::both(&quant::kv::F16).into(),
                format: "q8_0",
                block: 32,
                head_dim: 8,
            },
        };
        let none = NoHead {
            refused: vec![head],
            missing: MissingHead::Anywhere,
            remedy: Some(Remedy::HeadOfOriginal { drafter: "mtp" }),
        };
        let error = EngineError::NoDrafter {
            asked: "mtp",
            reason: DrafterReason::NoHead(none),
        };
        assert_eq!(
            load_error(error).to_string(),
            "--draft mtp: `a/head`: --kv f16: q8_0 has blocks of 32 values, of which heads of 8 are no multiple; \
             `paceline pull ORIGINAL --head-only` fetches the head of the original, for --draft mtp:ORIGINAL"
        );
        let largest = EngineError::TooLarge(TooLarge {
            weights: 1,
            remembered: 2_000_000_000,
            limit: 1_000_000_000,
            sequences: 4,
            context: 8,
            shared: false,
            own_memory: false,
        });
        assert_eq!(
            load_error(largest).to_string(),
            "the KV cache of 4 requests of 8 tokens needs 2.0 GB, the weights 0.0 GB; 1.0 GB are free; \
             a smaller --parallel or a smaller --context or --kv q8_0 or --weights mapped needs less, \
             and --memory SIZE allows more"
        );
    }
}

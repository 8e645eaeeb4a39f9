//! Draft models: any model that can be a target and has the target's vocabulary.

use super::pairing::{Found, HeadDrafter, Home, Pairing, Place, fits};
use crate::error::{EngineError, FoundHead, MissingHead};
use crate::footprint::Planned;
use crate::memory_plan::KvMemory;
use crate::options::LoadOptions;
use crate::reason::Placement;
use crate::source::{Source, quantized};
use backend::Backend;
use models::ModelError;
use speculate::draft::{DraftModel, MODEL};
use std::sync::Arc;
use text::Tokenizer;
use weights::Checkpoint;

pub(crate) const KIND: HeadDrafter = HeadDrafter {
    name: MODEL,
    help: "",
    needs_place: true,
    // Nothing in a configuration says which model drafts for which.
    target_width: |_| None,
    find: |_| Ok(Home::Nowhere(MissingHead::Anywhere)),
    load,
};

/// What a draft model will take beside its target.
pub(crate) struct Outlook {
    /// The KV cache of the draft model.
    pub(crate) planned: Planned,
    /// Bytes of its weights, packed.
    pub(crate) weights: u64,
}

/// What the draft model will take that `options` ask for, if they ask for one that can be loaded, and leave anything
/// open that depends on it: where weights are, or how much requests remember. Its weights stay in their files
/// for that, where the device can do so, which costs next to nothing.
pub(crate) fn outlook(b: &dyn Backend, options: &LoadOptions) -> Option<Outlook> {
    let named = options.draft.named().into_iter();
    let source = named
        .filter(|&(name, _)| name == MODEL)
        .find_map(|(_, source)| source)?;
    let is_open = matches!(options.weights, Placement::Auto(_))
        && options.quantize.is_none()
        && b.capabilities().mapped_weights;
    let shares = matches!(options.kv_memory, KvMemory::Bytes(_)) || options.prefix_cache_memory > 0;
    if options.draft_max == 0 || !(is_open || shares) {
        return None;
    }
    let checkpoint = source.checkpoint().ok()?;
    let architecture = checkpoint.architecture().ok()?;
    if super::head_of(architecture).is_some() {
        return None;
    }
    checkpoint.keep_mapped(true);
    // From here on it counts what this model leaves in its files.
    b.left_in_files();
    let model = models::load_target(b, &checkpoint).ok()?;
    let weights = match b.left_in_files() {
        0 => checkpoint.bytes(),
        packed => packed,
    };
    Some(Outlook {
        planned: Planned::draft_model(&*model),
        weights,
    })
}

fn load(pair: &mut Pairing<'_>, place: Place<'_>) -> Result<Found, EngineError> {
    let Place::At(source) = place else {
        unreachable!("a draft model is never found inside its target's checkpoint");
    };
    let checkpoint = pair.open(source)?;
    let architecture = checkpoint.architecture().map_err(ModelError::from)?;
    if let Some(drafter) = super::head_of(architecture) {
        return Err(EngineError::IsDrafter { drafter });
    }
    let own = tokenizer(source, &checkpoint)?;
    let differing = compare(pair.tokenizer, &own)?;
    let checkpoint = quantized(checkpoint, pair.options.quantize.as_ref())?;
    let model = models::load_target(pair.b, &checkpoint)?;
    let plan = Planned::draft_model(&*model);
    fits(pair.b, plan.plan(), &plan.size(&pair.size).kv_format)?;
    let (vocab, max_context) = (model.vocab_size(), model.max_context());
    let weights = if pair.mapped { 0 } else { checkpoint.bytes() };
    let memory = pair.memory(&plan, pair.budget.beside(weights))?;
    let target_vocab = pair.target.vocab_size();
    let drafter = DraftModel::new(model, memory, target_vocab);
    let found = FoundHead {
        what: "draft model",
        checkpoint: Some(source.name()),
    };
    let scored = (vocab < target_vocab).then_some(vocab);
    let mut found = Found {
        plans: vec![plan],
        ..Found::head(Box::new(drafter), found, None, scored, target_vocab)
    };
    let warnings = &mut found.preflight.warnings;
    warnings.extend(differing);
    if max_context < pair.size.context {
        warnings.push(format!(
            "the draft model knows {max_context} tokens: it drafts nothing in the rest of a context of {}",
            pair.size.context
        ));
    }
    Ok(pair.measured(source, &checkpoint, found))
}

/// The tokenizer of the draft model at `source`.
fn tokenizer(source: &Source, checkpoint: &Checkpoint) -> Result<Arc<Tokenizer>, EngineError> {
    if let Some(metadata) = checkpoint.metadata() {
        return Ok(convert::vocabulary(&metadata).load()?.tokenizer);
    }
    let bytes = source
        .tokenizer_bytes()
        .ok_or(EngineError::NoDraftTokenizer)?;
    Ok(Arc::new(Tokenizer::from_bytes(&bytes)?))
}

/// An error if a token of text is another one in `drafter` than in `target`. Tokens beside the learned
/// vocabulary may differ, and be missing in one of both: what differs, for people.
fn compare(target: &Tokenizer, drafter: &Tokenizer) -> Result<Option<String>, EngineError> {
    let n = target.vocab_size().min(drafter.vocab_size()) as u32;
    let is_text = |tokenizer: &Tokenizer, id| tokenizer.added().binary_search(&id).is_err();
    let mut others = Vec::new();
    for id in 0..n {
        let (Some(own), Some(theirs)) = (drafter.entry(id), target.entry(id)) else {
            continue;
        };
        if own == theirs {
            continue;
        }
        if is_text(target, id) && is_text(drafter, id) {
            return Err(EngineError::OtherVocabulary {
                id,
                drafter: own.escape_debug().to_string(),
                target: theirs.escape_debug().to_string(),
            });
        }
        others.push((id, own, theirs));
    }
    Ok(others.first().map(|(id, own, theirs)| {
        format!(
            "{} special tokens of the draft model are others in the target, the first of them {id}: `{}` \
             and `{}`",
            others.len(),
            own.escape_debug(),
            theirs.escape_debug()
        )
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::path::Path;

    /// The tokenizer of a bundled model, with the contents that `change` makes of them.
    fn changed(change: impl FnOnce(&mut Value)) -> Tokenizer {
        let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models");
        let file = std::fs::read(models.join("tiny-gemma4/tokenizer.json")).unwrap();
        let mut json: Value = serde_json::from_slice(&file).unwrap();
        change(&mut json);
        Tokenizer::from_bytes(&serde_json::to_vec(&json).unwrap()).unwrap()
    }

    /// Renames the token `id` of the learned vocabulary.
    fn rename(json: &mut Value, id: u32, to: &str) {
        let vocab = json["model"]["vocab"].as_object_mut().unwrap();
        let old = vocab.iter().find(|(_, n)| **n == json!(id));
        let old = old.unwrap().0.clone();
        vocab.remove(&old);
        vocab.insert(to.to_owned(), json!(id));
        // Merges that make the old token have nothing to make.
        let merges = json["model"]["merges"].as_array_mut().unwrap();
        let parts = |merge: &Value| -> Vec<String> {
            match merge {
                Value::String(pair) => pair.split(' ').map(str::to_owned).collect(),
                pair => serde_json::from_value(pair.clone()).unwrap(),
            }
        };
        merges.retain(|merge| {
            let parts = parts(merge);
            parts.concat() != old && !parts.contains(&old)
        });
    }

    #[test]
    fn a_vocabulary_is_the_targets_but_for_special_tokens() {
        let target = changed(|_| ());
        assert_eq!(compare(&target, &changed(|_| ())).unwrap(), None);
        let more = |json: &mut Value| {
            let last = json["added_tokens"][0].clone();
            let mut token = last;
            token["id"] = json!(target.vocab_size());
            token["content"] = json!("<one more>");
            json["added_tokens"].as_array_mut().unwrap().push(token);
        };
        let longer = changed(more);
        assert_eq!(longer.vocab_size(), target.vocab_size() + 1);
        assert_eq!(compare(&target, &longer).unwrap(), None);
        assert_eq!(compare(&longer, &target).unwrap(), None);

        let special = target.added()[1];
        let other = changed(|json| {
            let tokens = json["added_tokens"].as_array_mut().unwrap();
            let token = tokens.iter_mut().find(|t| t["id"] == json!(special));
            token.unwrap()["content"] = json!("<another>");
            if json["model"]["vocab"]
                .as_object()
                .unwrap()
                .values()
                .any(|n| *n == json!(special))
            {
                rename(json, special, "<another>");
            }
        });
        let said = compare(&target, &other).unwrap().unwrap();
        let want = format!(
            "1 special tokens of the draft model are others in the target, the first of them {special}: `<another>`"
        );
        assert!(said.starts_with(&want), "{said}");

        let is_text = |id: &u32| target.added().binary_search(id).is_err();
        let last = (0..target.vocab_size() as u32).rev().find(is_text);
        let last = last.unwrap();
        let wrong = changed(|json| rename(json, last, "another"));
        let error = compare(&target, &wrong).unwrap_err().to_string();
        let want = format!("token {last} is `another` in the draft model");
        assert!(error.contains(&want), "{error}");
    }
}

//! MTP heads taken out of a checkpoint or put into one, and towers left out.

use crate::{Item, Recipe};
use serde_json::json;
use std::collections::BTreeSet;

fn is_head(item: &Item<'_>) -> bool {
    item.name.starts_with("mtp.")
}

fn is_of_tower(item: &Item<'_>) -> bool {
    let mut prefixes = models::TOWER_PREFIXES
        .iter()
        .chain(models::SOUND_TOWER_PREFIXES);
    prefixes.any(|prefix| item.name.starts_with(prefix))
}

impl<'a> Recipe<'a> {
    /// Whether the checkpoint holds an MTP head.
    pub fn has_head(&self) -> bool {
        self.items.iter().any(is_head)
    }

    /// Leaves out the towers for pictures and sounds, which GGUF models have in a file of their own.
    /// Returns whether there was any.
    pub fn leave_towers_out(&mut self) -> bool {
        let all = self.items.len();
        self.items.retain(|item| !is_of_tower(item));
        self.items.len() < all
    }

    /// Leaves nothing but the MTP head; nothing at all where there is none.
    pub fn keep_head(&mut self) {
        self.items.retain(is_head);
    }

    /// Layers of the MTP head.
    pub(crate) fn head_layers(&self) -> usize {
        let layer = |item: &'_ Item<'a>| -> Option<String> {
            let (layer, _) = item.name.strip_prefix("mtp.layers.")?.split_once('.')?;
            Some(layer.to_owned())
        };
        let layers: BTreeSet<String> = self.items.iter().filter_map(layer).collect();
        layers.len()
    }

    /// Puts the MTP head of `other` in the place of this one's, if it has any. Does
    /// nothing where `other` has none.
    pub fn attach_head(&mut self, mut other: Recipe<'a>) {
        if !other.has_head() {
            return;
        }
        other.keep_head();
        let layers = other.head_layers();
        // How the head is to be used goes with it.
        match other.config.get_mut(weights::MTP_CONTRACT) {
            Some(contract) => self.config[weights::MTP_CONTRACT] = contract.take(),
            None => drop(
                self.config
                    .as_object_mut()
                    .map(|c| c.remove(weights::MTP_CONTRACT)),
            ),
        }
        self.items.retain(|item| !is_head(item));
        self.items.extend(other.items);
        let text = self.config.get("text_config");
        let nested = text.is_some_and(|part| part.is_object());
        let config = match nested {
            true => &mut self.config["text_config"],
            false => &mut self.config,
        };
        config["mtp_num_hidden_layers"] = json!(layers);
    }
}

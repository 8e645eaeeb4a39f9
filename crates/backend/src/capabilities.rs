//! What a device can do, as plain data: callers ask it instead of trying, and no
//! caller needs to know a device by name.

use crate::KvFormat;
use quant::KvRowFormat;

/// The formats in which a device can store keys and values.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KvFormats {
    /// Formats for keys, in the order users should see them.
    pub keys: Vec<&'static KvRowFormat>,
    /// Formats for values, in the order users should see them.
    pub values: Vec<&'static KvRowFormat>,
    /// Whether keys and values must be in one format; otherwise any pair will do.
    pub same: bool,
}

impl KvFormats {
    /// Every format that a cache might have, in any pair.
    pub fn all() -> Self {
        KvFormats {
            keys: quant::KV_FORMATS.iter().collect(),
            values: quant::KV_FORMATS.iter().collect(),
            same: false,
        }
    }

    /// `formats`, each for keys and values together.
    pub fn same(formats: Vec<&'static KvRowFormat>) -> Self {
        KvFormats {
            keys: formats.clone(),
            values: formats,
            same: true,
        }
    }

    /// Whether keys and values can be stored in `format`.
    pub fn contains(&self, format: KvFormat) -> bool {
        self.keys.contains(&format.k)
            && self.values.contains(&format.v)
            && (!self.same || format.k == format.v)
    }
}

/// Rows of a prompt in one step: enough to keep a device busy, and few enough to spare memory and the requests
/// that wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptRows {
    /// Rows in a step of the largest models; 1 or more.
    pub least: usize,
    /// Rows in a step of the smallest models.
    pub most: usize,
}

impl PromptRows {
    /// Multiplications in a step of a prompt, about.
    const PRODUCTS: u64 = 32_000_000_000_000;

    /// `rows` rows of a prompt in a step of every model, whatever its size.
    pub fn fixed(rows: usize) -> Self {
        PromptRows {
            least: rows,
            most: rows,
        }
    }

    /// Rows in a step of a model that multiplies each with so many `weights`: `least`, doubled up to `most` as long
    /// as they take at most 3.2e13 multiplications. Experts of a mixture get few rows of a step each, which a
    /// device of many cores multiplies faster in larger steps.
    ///
    /// ```
    /// let rows = backend::PromptRows { least: 1024, most: 4096 };
    /// assert_eq!(rows.of(31_000_000_000), 1024);
    /// assert_eq!(rows.of(14_000_000_000), 2048);
    /// assert_eq!(rows.of(4_000_000_000), 4096);
    /// ```
    pub fn of(self, weights: u64) -> usize {
        let mut rows = self.least.max(1);
        while 2 * rows <= self.most && (2 * rows as u64).saturating_mul(weights) <= Self::PRODUCTS {
            rows *= 2;
        }
        rows
    }
}

/// What a device can do beyond what every [`Backend`](crate::Backend) must.
#[derive(Clone, Debug, PartialEq)]
pub struct Capabilities {
    /// Formats of keys and values that [`Store::kv`](crate::Store::kv) accepts.
    pub kv: KvFormats,
    /// Rows of a prompt in one step where nobody asks for another number.
    pub prompt_rows: PromptRows,
    /// Whether weights can stay in their mapped files ([`quant::Stored::keep`]).
    pub mapped_weights: bool,
    /// Whether the device masks logits where they lie
    /// ([`Sample::mask_logits`](crate::Sample::mask_logits)). Otherwise that waits for the device, and
    /// all logits are copied twice.
    pub masks: bool,
    /// Whether the device edits logits where they lie
    /// ([`Sample::edit_logits`](crate::Sample::edit_logits)) and chooses tokens of them there
    /// ([`Sample::choose_tokens`](crate::Sample::choose_tokens)). Otherwise whoever asks does both
    /// with a copy of the logits.
    pub edits: bool,
    /// Whether steps are recorded when their kind comes the first times, and replayed later
    /// ([`Record::step`](crate::Record::step)): kinds that are run before anybody waits are fast from then on.
    pub records: bool,
    /// Whether the device tells which experts rows have chosen
    /// ([`Record::take_experts`](crate::Record::take_experts)).
    pub experts: bool,
    /// Whether the device has memory of its own. It then says itself when that is full,
    /// and takes nothing from a limit on the host's memory.
    pub own_memory: bool,
}

impl Default for Capabilities {
    /// A device in the host's memory that keeps all formats and has nothing special.
    fn default() -> Self {
        Capabilities {
            kv: KvFormats::all(),
            prompt_rows: PromptRows::fixed(256),
            mapped_weights: false,
            masks: false,
            edits: false,
            records: false,
            experts: false,
            own_memory: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_pair_is_one_of_all_and_same_formats_are_for_both() {
        use quant::kv::{F16, F32, Q8_0};
        let (all, same) = (KvFormats::all(), KvFormats::same(vec![&F16, &Q8_0]));
        for k in quant::KV_FORMATS {
            for v in quant::KV_FORMATS {
                let pair = KvFormat { k, v };
                assert!(all.contains(pair), "{pair}");
                let is_kept = k == v && (*k == F16 || *k == Q8_0);
                assert_eq!(same.contains(pair), is_kept, "{pair}");
            }
        }
        assert!(!same.contains(KvFormat::both(&F32)));
    }
}

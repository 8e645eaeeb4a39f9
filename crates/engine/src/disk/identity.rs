//! What the bytes of saved texts depend on.

use sha2::{Digest, Sha256};

/// A hash of all that decides the bits of keys, values and states: a file of another identity is not
/// used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity(pub(super) [u8; 32]);

/// What an [`Identity`] is a hash of.
#[derive(Debug)]
pub(crate) struct Parts<'a> {
    /// The content hash of the target's checkpoint.
    pub(crate) target: &'a str,
    /// How its weights are quantized while they are loaded.
    pub(crate) quantize: String,
    /// The names of the heads, or of another drafter.
    pub(crate) drafter: Option<String>,
    /// The content hashes of the heads' checkpoints, where they have their own.
    pub(crate) drafter_hash: Option<&'a str>,
    /// The formats of keys and values.
    pub(crate) kv_format: &'a str,
    /// What the device's arithmetic depends on.
    pub(crate) device: String,
}

impl Identity {
    /// The identity of an engine of `parts`, of this version of paceline.
    pub(crate) fn of(parts: &Parts<'_>) -> Identity {
        let Parts {
            target,
            quantize,
            drafter,
            drafter_hash,
            kv_format,
            device,
        } = parts;
        let version = (env!("CARGO_PKG_VERSION"), backend::NUMERICS);
        let drafter = (drafter, drafter_hash);
        // Quotes are part of it, so that different parts are different texts.
        let all = (version, target, quantize, drafter, kv_format, device);
        Identity(Sha256::digest(format!("{all:?}")).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_counts() {
        let parts = || Parts {
            target: "t",
            quantize: "none".into(),
            drafter: Some("mtp".into()),
            drafter_hash: Some("d"),
            kv_format: "bf16",
            device: "cpu".into(),
        };
        let others = [
            Parts {
                target: "u",
                ..parts()
            },
            Parts {
                quantize: "q4".into(),
                ..parts()
            },
            Parts {
                drafter: None,
                ..parts()
            },
            Parts {
                drafter_hash: Some("e"),
                ..parts()
            },
            Parts {
                kv_format: "f32",
                ..parts()
            },
            Parts {
                kv_format: "bf16,protect=1:f32",
                ..parts()
            },
            Parts {
                device: "cuda".into(),
                ..parts()
            },
        ];
        assert_eq!(Identity::of(&parts()), Identity::of(&parts()));
        for other in others {
            assert_ne!(Identity::of(&other), Identity::of(&parts()), "{other:?}");
        }
    }
}

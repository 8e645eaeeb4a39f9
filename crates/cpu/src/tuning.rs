//! How products read weights from memory: choices that change their speed and never their bits.
//!
//! Processors differ in how many streams of memory a core follows, how far ahead it must ask for a
//! cache line, and into which cache. The defaults are what was fastest, or nearly so, on all that
//! were measured; [`Trial`](crate::Trial) times others on this one.

use std::fmt;

/// The cache that weights are prefetched to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PrefetchHint {
    /// No prefetching: the processor's own prefetchers do it all.
    None,
    /// The first-level cache.
    L1,
    /// The second-level cache.
    L2,
    /// The first-level cache, as data that is read once.
    Once,
}

impl PrefetchHint {
    /// The hint of everything but tuned products: on x86-64 the second-level cache, for attention
    /// prefetches more ahead than the first level holds, and few fills of it can be under way.
    pub(crate) const DEFAULT: PrefetchHint = match cfg!(target_arch = "x86_64") {
        true => PrefetchHint::L2,
        false => PrefetchHint::L1,
    };

    /// Each hint.
    pub const ALL: [PrefetchHint; 4] = [
        PrefetchHint::None,
        PrefetchHint::L1,
        PrefetchHint::L2,
        PrefetchHint::Once,
    ];
}

/// How a product of few rows reads weights of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct WeightReads {
    /// Panels of 16 outputs that are read side by side for one row of activations, each of them a
    /// stream of memory: 2, 4 or 8. Processors with less than 32 vector registers of 64 bytes read
    /// quantized panels one by one.
    pub panels: usize,
    /// Panels of 16 outputs that are read side by side for 2 to 4 rows of activations: 2 or 4.
    pub panels_of_few_rows: usize,
    /// Bytes between what is read and what is prefetched.
    pub distance: usize,
    /// Where one row's quantized weights are prefetched to.
    pub hint: PrefetchHint,
}

impl WeightReads {
    /// Panels that are read side by side for `rows` rows of activations, at most.
    pub(crate) fn of_rows(self, rows: usize) -> usize {
        match rows {
            1 => self.panels,
            2..=4 => self.panels_of_few_rows,
            _ => 2,
        }
    }
}

impl WeightReads {
    /// What is used where nothing was measured. On Sapphire Rapids one row of 4-bit weights reads at
    /// 0.8 of its speed without prefetching, and at half with the hint for data that is read once;
    /// distances of 2 to 8 KiB are alike. A core reads four panels 1.1 times as fast as two, and those
    /// 1.2 times as fast as one.
    pub(crate) const DEFAULT: WeightReads = WeightReads {
        panels: 4,
        panels_of_few_rows: 4,
        distance: 4096,
        hint: PrefetchHint::DEFAULT,
    };
}

impl Default for WeightReads {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl fmt::Display for WeightReads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} panels ({} for 2 to 4 rows), ",
            self.panels, self.panels_of_few_rows
        )?;
        let to = match self.hint {
            PrefetchHint::None => return f.write_str("not prefetched"),
            PrefetchHint::L1 => "L1",
            PrefetchHint::L2 => "L2",
            PrefetchHint::Once => "L1 as data read once",
        };
        write!(f, "prefetched {} bytes ahead to {to}", self.distance)
    }
}

/// Kinds of weights that differ in how much is computed for a byte of them.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum WeightKind {
    /// Codes of up to 4 bits that stand for levels, such as `q4_0`.
    Levels4,
    /// Codes of up to 4 bits with a scale and a bias, such as `affine4-g64`.
    Affine4,
    /// Codes of more than 4 bits, which take 6 or 8 bits each; tuned with `q8_0`.
    Codes8,
    /// Plain numbers.
    Plain,
}

impl WeightKind {
    /// Each kind, in the order of its values.
    pub const ALL: [WeightKind; 4] = [
        WeightKind::Levels4,
        WeightKind::Affine4,
        WeightKind::Codes8,
        WeightKind::Plain,
    ];

    /// The name of a format of this kind, which trials use.
    pub fn example(self) -> &'static str {
        match self {
            WeightKind::Levels4 => "q4_0",
            WeightKind::Affine4 => "affine4-g64",
            WeightKind::Codes8 => "q8_0",
            WeightKind::Plain => "bf16",
        }
    }
}

/// How products of few rows read their weights, for each kind of weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tuning([WeightReads; 4]);

impl Tuning {
    /// How weights of `kind` are read.
    pub fn of(&self, kind: WeightKind) -> WeightReads {
        self.0[kind as usize]
    }

    /// Changes how weights of `kind` are read.
    pub fn set(&mut self, kind: WeightKind, reads: WeightReads) {
        self.0[kind as usize] = reads;
    }
}

//! Which drafter guesses ahead, and which of its tokens are accepted.

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use engine::{Accept, DraftChoice, DraftVocabulary};
use std::num::NonZeroUsize;

/// Which drafter guesses ahead, and which of its tokens are accepted.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Speculative decoding")]
pub(crate) struct DrafterArgs {
    /// Which drafter guesses tokens ahead, one of [`engine::drafter_kinds`].
    #[arg(long, value_name = "DRAFTER", default_value = "auto", help = draft_help())]
    pub(crate) draft: DraftChoice,
    /// Vocabulary entries that the draft head scores: the first N, or all; auto takes 32768 of a
    /// large vocabulary, and FILE.json, which count writes, the 32768 most frequent ones
    /// (FILE.json:N another number). Texts that need other tokens fall back to all
    #[arg(long, value_name = "N", default_value = "auto")]
    pub(crate) draft_vocab: DraftVocabulary,
    /// Newest rows of the target that a Gemma 4 assistant reads, for long contexts; all if not given
    #[arg(long, value_name = "ROWS")]
    pub(crate) draft_window: Option<NonZeroUsize>,
    /// How drafted tokens are accepted: exact gives the text of plain decoding, token for token;
    /// residual (rejection sampling) keeps only the output distribution, and accepts more tokens
    #[arg(long, value_name = "RULE", default_value = "exact", value_parser = accept_rule())]
    pub(crate) accept: Accept,
}

/// What goes on beside drafting.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Speculative decoding")]
pub(crate) struct OverlapArgs {
    /// Send text after the next tokens are drafted instead of meanwhile, to compare; the text is the same
    #[arg(long)]
    pub(crate) no_overlap: bool,
}

/// Which drafter guesses ahead, and how far.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Speculative decoding")]
pub(crate) struct DraftArgs {
    #[command(flatten)]
    pub(crate) drafter: DrafterArgs,
    /// Longest draft, in tokens; drafts are shorter where that is faster, 0 turns speculation off
    #[arg(long, value_name = "N", default_value_t = engine::DEFAULT_DRAFT_MAX)]
    pub(crate) draft_max: usize,
}

impl Default for DraftArgs {
    fn default() -> Self {
        DraftArgs {
            drafter: DrafterArgs {
                draft: DraftChoice::Auto,
                ..DraftArgs::none().drafter
            },
            draft_max: engine::DEFAULT_DRAFT_MAX,
        }
    }
}

impl DraftArgs {
    /// Plain decoding, for commands that draft nothing.
    pub(crate) fn none() -> Self {
        DraftArgs {
            drafter: DrafterArgs {
                draft: DraftChoice::None,
                draft_vocab: DraftVocabulary::default(),
                draft_window: None,
                accept: Accept::default(),
            },
            draft_max: 0,
        }
    }
}

/// The help of `--draft`: every drafter, and those whose place can be named.
fn draft_help() -> String {
    let alone = engine::drafter_kinds().filter(|kind| kind.stands_alone);
    let alone = alone.map(|kind| match kind.help {
        "" => kind.name.to_owned(),
        help => format!("{} ({help})", kind.name),
    });
    let placed = engine::drafter_kinds().filter(|kind| kind.takes_place);
    let placed: Vec<String> = placed.map(|kind| format!("{}:PATH", kind.name)).collect();
    let (last, rest) = placed.split_last().expect("some drafter has a head");
    format!(
        "Drafter that guesses tokens ahead: auto, none, {}, or {} or {last}, where PATH may also be \
         ORG/NAME; heads of different kinds can be joined by +, as in mtp+model:PATH, of which the \
         one drafts that promises most; with +ngram after these, as in mtp+ngram, repetitions are \
         copied where that promises more, which auto does by itself",
        alone.collect::<Vec<_>>().join(", "),
        rest.join(", ")
    )
}

/// The names of the rules by which drafted tokens are accepted.
pub(super) fn accept_rule() -> impl TypedValueParser<Value = Accept> {
    PossibleValuesParser::new(Accept::ALL.map(Accept::name)).map(|name| {
        let rule = Accept::ALL.into_iter().find(|rule| rule.name() == name);
        rule.expect("one of the names")
    })
}

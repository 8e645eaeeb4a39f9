//! The commands that write a text, `run` and `chat`, and how its tokens are chosen.

use super::draft::{DraftArgs, OverlapArgs};
use super::form::FormArgs;
use super::model::{LoadArgs, ModelArg};
use super::trace::TraceArgs;
use super::values::count;
use clap::Args;
use serde_json::{Map, Value};
use std::path::PathBuf;

/// Tokens a reply may have where nobody says otherwise.
const DEFAULT_MAX_TOKENS: usize = 512;

/// The numbers of the sampler.
#[derive(Clone, Debug, Args)]
pub(crate) struct SamplerArgs {
    /// Randomness; 0 takes the likeliest token [default: the checkpoint's generation_config,
    /// 1 if it names none]
    #[arg(
        long,
        visible_alias = "temp",
        value_name = "T",
        allow_negative_numbers = true
    )]
    pub(crate) temperature: Option<f32>,
    /// Keep the likeliest tokens that make up this probability
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(crate) top_p: Option<f32>,
    /// Keep this many of the likeliest tokens
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) top_k: Option<usize>,
    /// Keep tokens with at least this share of the likeliest one's probability
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(crate) min_p: Option<f32>,
    /// Keep the tokens closest to the mean surprise that make up this probability
    #[arg(
        long,
        visible_alias = "typical",
        value_name = "P",
        allow_negative_numbers = true
    )]
    pub(crate) typical_p: Option<f32>,
    /// Keep tokens within this many standard deviations of the largest logit
    #[arg(
        long,
        visible_alias = "top-nsigma",
        value_name = "X",
        allow_negative_numbers = true
    )]
    pub(crate) top_n_sigma: Option<f32>,
    /// How likely XTC is to drop all but the least likely of the tokens above its threshold
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(crate) xtc_probability: Option<f32>,
    /// Probability from which on XTC drops tokens [default: 0.1]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(crate) xtc_threshold: Option<f32>,
    /// Lower the temperature by up to this where the model is sure, raise it where it is not
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) dynatemp_range: Option<f32>,
    /// Power of the entropy that dynamic temperature goes by [default: 1]
    #[arg(
        long,
        visible_alias = "dynatemp-exp",
        value_name = "X",
        allow_negative_numbers = true
    )]
    pub(crate) dynatemp_exponent: Option<f32>,
    /// Divide the logits of tokens that occur in prompt or reply; 1 changes nothing
    #[arg(
        long,
        visible_alias = "repeat-penalty",
        value_name = "X",
        allow_negative_numbers = true
    )]
    pub(crate) repetition_penalty: Option<f32>,
    /// Subtract this from the logits of tokens that the reply contains
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) presence_penalty: Option<f32>,
    /// Subtract this from a token's logit for each time that the reply contains it
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) frequency_penalty: Option<f32>,
    /// Subtract this, and more, from the logits of tokens that would go on with a repetition (DRY)
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) dry_multiplier: Option<f32>,
    /// Factor of that for each token that the repetition is longer [default: 1.75]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) dry_base: Option<f32>,
}

/// How tokens are chosen, and how many.
#[derive(Debug, Args)]
#[command(next_help_heading = "Text")]
pub(crate) struct TextArgs {
    #[command(flatten)]
    pub(crate) sampler: SamplerArgs,
    /// Add VALUE to the logit of token ID; may be repeated
    #[arg(long, value_name = "ID=VALUE", value_parser = bias, value_delimiter = ',')]
    pub(crate) logit_bias: Vec<(u32, f32)>,
    /// Random seed: the same seed gives the same text [default: a new one each time]
    #[arg(short = 's', long, value_name = "N", allow_negative_numbers = true, value_parser = seed)]
    pub(crate) seed: Option<u64>,
    /// Tokens to write, at most
    #[arg(short = 'n', long, visible_alias = "n-predict", value_name = "N", default_value_t = DEFAULT_MAX_TOKENS, allow_negative_numbers = true, value_parser = count)]
    pub(crate) max_tokens: usize,
    /// End before this string; may be repeated
    #[arg(long, value_name = "TEXT")]
    pub(crate) stop: Vec<String>,
    /// Do not stop at the model's end-of-text token
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    /// System prompt: instructions before the conversation
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    /// Arguments of the model's chat template; {"enable_thinking": true} has Gemma 4 and
    /// Qwen 3.5 reason before they answer
    #[arg(long, value_name = "JSON", value_parser = template_arguments)]
    pub(crate) chat_template_kwargs: Option<Map<String, Value>>,
}

impl SamplerArgs {
    /// The number of the sampler called `name`, one of [`engine::SAMPLER_NUMBERS`], if it was typed.
    pub(crate) fn number(&self, name: &str) -> Option<f32> {
        match name {
            "temperature" => self.temperature,
            "top_p" => self.top_p,
            "min_p" => self.min_p,
            "repetition_penalty" => self.repetition_penalty,
            "presence_penalty" => self.presence_penalty,
            "frequency_penalty" => self.frequency_penalty,
            "typical_p" => self.typical_p,
            "top_n_sigma" => self.top_n_sigma,
            "xtc_probability" => self.xtc_probability,
            "xtc_threshold" => self.xtc_threshold,
            "dynatemp_range" => self.dynatemp_range,
            "dynatemp_exponent" => self.dynatemp_exponent,
            "dry_multiplier" => self.dry_multiplier,
            "dry_base" => self.dry_base,
            _ => unreachable!("the sampler's number `{name}` has no flag"),
        }
    }
}

/// `paceline run`
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// What to answer. Text piped to stdin goes before it, with a blank line between; with `-`, or
    /// without a prompt, stdin is the prompt
    #[arg(conflicts_with_all = ["prompt_file", "prompt_option"])]
    pub(crate) prompt: Option<String>,
    /// The prompt, as an option
    #[arg(
        short = 'p',
        long = "prompt",
        value_name = "PROMPT",
        conflicts_with = "prompt_file",
        help_heading = "Text"
    )]
    pub(crate) prompt_option: Option<String>,
    /// Read the prompt from a file
    #[arg(
        short = 'f',
        long,
        visible_alias = "file",
        value_name = "FILE",
        help_heading = "Text"
    )]
    pub(crate) prompt_file: Option<PathBuf>,
    /// Show the model this picture (PNG, JPEG, WebP or GIF) before the prompt; may be given several
    /// times
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with = "raw",
        help_heading = "Text"
    )]
    pub(crate) image: Vec<PathBuf>,
    /// Show the model this video (an animated GIF or WebP; MP4 or WebM where ffmpeg is installed) before
    /// the prompt, after pictures; may be given several times
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with = "raw",
        help_heading = "Text"
    )]
    pub(crate) video: Vec<PathBuf>,
    /// Let the model hear this sound (WAV, FLAC, MP3 or Ogg Vorbis) before the prompt, after pictures and
    /// videos; may be given several times
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with = "raw",
        help_heading = "Text"
    )]
    pub(crate) audio: Vec<PathBuf>,
    /// Continue the prompt as it is, without the chat template
    #[arg(long, conflicts_with_all = ["system", "chat_template_kwargs", "allow_special_tokens"], help_heading = "Text")]
    pub(crate) raw: bool,
    #[command(flatten)]
    pub(crate) text: TextArgs,
    #[command(flatten)]
    pub(crate) form: FormArgs,
    #[command(flatten)]
    pub(crate) model: ModelArg,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
    #[command(flatten)]
    pub(crate) draft: DraftArgs,
    #[command(flatten)]
    pub(crate) overlap: OverlapArgs,
    #[command(flatten)]
    pub(crate) trace: TraceArgs,
    /// Print one JSON object: text, tokens, times and what speculation did
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}

/// `paceline chat`
#[derive(Debug, Args)]
pub(crate) struct ChatArgs {
    #[command(flatten)]
    pub(crate) text: TextArgs,
    #[command(flatten)]
    pub(crate) form: FormArgs,
    #[command(flatten)]
    pub(crate) model: ModelArg,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
    #[command(flatten)]
    pub(crate) draft: DraftArgs,
    #[command(flatten)]
    pub(crate) overlap: OverlapArgs,
    #[command(flatten)]
    pub(crate) trace: TraceArgs,
}

/// A seed as the API has it: any number of 64 bits, signed or not.
pub(super) fn seed(text: &str) -> Result<u64, String> {
    let signed = || text.parse().map(i64::cast_unsigned);
    let seed = text.parse().or_else(|_| signed());
    seed.map_err(|_| "expected a whole number of 64 bits".into())
}

pub(super) fn template_arguments(text: &str) -> Result<Map<String, Value>, String> {
    serde_json::from_str(text)
        .map_err(|_| r#"expected a JSON object, such as {"enable_thinking": true}"#.into())
}

fn bias(text: &str) -> Result<(u32, f32), String> {
    let parsed = text
        .split_once('=')
        .and_then(|(id, value)| Some((id.parse().ok()?, value.parse().ok()?)));
    parsed.ok_or_else(|| "expected a token id and a number, such as 42=-1.5".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_have_a_sign() {
        assert_eq!(seed("-1"), Ok(u64::MAX));
        assert_eq!(seed("18446744073709551615"), Ok(u64::MAX));
        for bad in ["", "x", "1.5", "-9223372036854775809"] {
            assert!(seed(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn biases_are_pairs() {
        assert_eq!(bias("42=-1.5"), Ok((42, -1.5)));
        for bad in ["42", "=1", "42=", "x=1", "-1=1"] {
            assert!(bias(bad).is_err(), "{bad}");
        }
    }
}

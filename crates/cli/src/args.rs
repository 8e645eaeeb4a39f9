//! The command line: every flag with its default, its range and its help.
//!
//! A flag is declared once, here. Its environment variable and its key in
//! `paceline.toml` are derived from its long name by `config.rs`, so the three
//! cannot drift apart.

use backend::KvFormat;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use engine::{Accept, DraftChoice, DraftVocabulary};
use quant::Format;
use serde_json::{Map, Value};
use server::Limits;
use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::path::PathBuf;

/// Tokens a reply may have where nobody says otherwise.
const DEFAULT_MAX_TOKENS: usize = 512;

const AFTER_HELP: &str = "\
An option may also come from the environment (PACELINE_DRAFT_MAX for --draft-max) or from \
paceline.toml, in this folder or in ~/.config/paceline. The command line counts most, then the \
environment, then the files. `paceline config show` prints the result.";

/// Below the help of `run`.
const RUN_EXAMPLES: &str = "\
Examples:
  paceline run \"Tell me a story about a kite.\"
  cat letter.txt | paceline run \"Summarize this letter:\"
  paceline run -m ORG/NAME --temperature 0.7 --seed 1 -n 200 \"Write a poem.\"
  paceline run --raw --json \"Once upon a time\" > record.json";

/// Runs language models with speculative decoding: same text, sooner
#[derive(Debug, Parser)]
#[command(
    name = "paceline",
    version,
    long_version = crate::version(),
    max_term_width = 100,
    after_help = AFTER_HELP
)]
pub(crate) struct Cli {
    /// The command to run.
    #[command(subcommand)]
    pub(crate) command: Command,
    /// How much the program says on stderr.
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Write one text and exit
    #[command(after_help = RUN_EXAMPLES)]
    Run(Box<RunArgs>),
    /// Talk with a model
    Chat(Box<ChatArgs>),
    /// Serve the OpenAI API over HTTP
    Serve(Box<ServeArgs>),
    /// Show what a model is, who drafts for it and how much memory it takes
    Inspect(Box<InspectArgs>),
    /// Measure steps, prefill and what speculation saves
    Bench(Box<BenchArgs>),
    /// Measure how well a model predicts a text
    Perplexity(Box<PerplexityArgs>),
    /// Write a checkpoint in another format or size
    Convert(Box<ConvertArgs>),
    /// Fetch a model, and who drafts for it, from the hub into its cache
    Pull(PullArgs),
    /// List the models that are here: bundled, and in the hub cache
    List(ListArgs),
    /// Remove models from the hub cache
    Rm(RmArgs),
    /// Check this machine: processor, memory, kernels, caches
    Doctor(DoctorArgs),
    /// Show the configuration, and which file or variable each value is from
    Config(ConfigArgs),
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: Shell,
    },
}

/// Verbosity.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct OutputArgs {
    /// More messages on stderr; twice for internals
    #[arg(short, long, global = true, action = clap::ArgAction::Count, help_heading = "Output")]
    pub(crate) verbose: u8,
    /// Only errors on stderr
    #[arg(
        short,
        long,
        global = true,
        conflicts_with = "verbose",
        help_heading = "Output"
    )]
    pub(crate) quiet: bool,
}

/// Which model.
#[derive(Debug, Args)]
pub(crate) struct ModelArg {
    /// A folder with config.json and safetensors, a GGUF file, ORG/NAME of a model in the hub cache
    /// (`paceline pull` fetches it), or the name of a bundled model
    #[arg(short, long, value_name = "MODEL", default_value = crate::bundled::DEFAULT, help_heading = "Model")]
    pub(crate) model: String,
}

/// Which drafter guesses ahead, and which of its tokens are accepted.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Speculative decoding")]
pub(crate) struct DrafterArgs {
    /// Which drafter guesses tokens ahead, one of [`engine::drafter_kinds`].
    #[arg(long, value_name = "DRAFTER", default_value = "auto", help = draft_help())]
    pub(crate) draft: DraftChoice,
    /// Vocabulary entries that the draft head scores: the first N, or all; auto takes 32768 of a
    /// large vocabulary. Texts that need other tokens fall back to all
    #[arg(long, value_name = "N", default_value = "auto")]
    pub(crate) draft_vocab: DraftVocabulary,
    /// How drafted tokens are accepted: exact gives the text of plain decoding, token for token;
    /// residual (rejection sampling) keeps only the output distribution, and accepts more tokens
    #[arg(long, value_name = "RULE", default_value = "exact", value_parser = accept_rule())]
    pub(crate) accept: Accept,
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

impl DraftArgs {
    /// Plain decoding, for commands that draft nothing.
    pub(crate) fn none() -> Self {
        DraftArgs {
            drafter: DrafterArgs {
                draft: DraftChoice::None,
                draft_vocab: DraftVocabulary::default(),
                accept: Accept::default(),
            },
            draft_max: 0,
        }
    }
}

/// How the model is loaded.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Model")]
pub(crate) struct LoadArgs {
    /// Context length: tokens of prompt and reply together, such as 4096 or 32k [default: the
    /// model's limit, at most 8k]
    #[arg(short = 'c', long, visible_alias = "ctx-size", value_name = "TOKENS", value_parser = count)]
    pub(crate) context: Option<usize>,
    #[arg(long, value_name = "FORMAT", help = kv_help(), default_value = quant::KV_FORMATS[0].name, value_parser = kv_format)]
    pub(crate) kv: KvFormat,
    /// Quantize weights while they are loaded: q4, q5, q6, q8 or a name such as affine4-g32
    #[arg(long, value_name = "FORMAT", value_parser = load_format)]
    pub(crate) quant: Option<&'static Format>,
    /// Where weights are kept: packed copies them to memory, which is fast; mapped leaves them in
    /// memory-mapped files (mmap), which is slower and takes less memory; auto packs them if they fit
    /// the free memory
    #[arg(long, value_name = "WHERE", default_value = "auto")]
    pub(crate) weights: Weights,
    /// Memory that weights and KV cache may take together on a CPU, such as 12GB; a model that needs
    /// more is not started [default: what is free]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) memory: Option<u64>,
    /// Prompt tokens of one prefill step, at most [default: 256, on a GPU 1024]
    #[arg(long, value_name = "TOKENS", value_parser = count)]
    pub(crate) chunk: Option<usize>,
    /// Device to run on: cpu, cuda, cuda:N, or auto, which takes a GPU if there is one
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_parser = device)]
    pub(crate) device: Device,
    /// CPU threads to compute with [default: one per core]
    #[arg(short = 't', long, value_name = "N", value_parser = threads)]
    pub(crate) threads: Option<NonZeroUsize>,
    /// Bind each thread but the first to a core of its own
    #[arg(long)]
    pub(crate) pin_threads: bool,
    /// Format of the activations that quantized weights are multiplied with: rounded to 8 bits, or
    /// kept in f32, which takes four bytes per weight
    #[arg(long, value_name = "FORMAT", default_value = "int8")]
    pub(crate) activations: Activations,
    /// Read control tokens that a message, a tool or a template argument spells, such as
    /// `<|im_end|>`, as control tokens: whoever writes them can end a turn and begin another
    #[arg(long)]
    pub(crate) allow_special_tokens: bool,
    /// Skip the self-test after loading, which checks that batched and single steps agree bit for
    /// bit and that drafts are accepted. Its result is remembered, so only the first start takes longer
    #[arg(long)]
    pub(crate) no_probe: bool,
    /// Instruction set to compute with, to measure or to find a fault
    #[arg(long, hide = true, value_parser = isa)]
    pub(crate) isa: Option<cpu::Isa>,
}

/// `paceline bench`.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// Which model.
    #[command(flatten)]
    pub(crate) model: ModelArg,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
    /// Which drafter guesses ahead; `--draft-lengths` says how far.
    #[command(flatten)]
    pub(crate) drafter: DrafterArgs,
    /// Prompts to run: JSON lines with `category` and `messages` or `prompt` [default: nine short
    /// ones]
    #[arg(long, value_name = "FILE", help_heading = "Bench")]
    pub(crate) prompts: Option<PathBuf>,
    /// Draft lengths to compare
    #[arg(
        long,
        value_name = "N,…",
        value_delimiter = ',',
        default_value = "0,1,2,3,4",
        help_heading = "Bench"
    )]
    pub(crate) draft_lengths: Vec<usize>,
    /// Temperatures to compare
    #[arg(
        long,
        value_name = "T,…",
        value_delimiter = ',',
        default_value = "0",
        help_heading = "Bench"
    )]
    pub(crate) temperatures: Vec<f32>,
    /// Probability that samples are cut to, where the temperature is not 0
    #[arg(long, value_name = "P", default_value_t = 0.9, help_heading = "Bench")]
    pub(crate) top_p: f32,
    /// Tokens a text may have
    #[arg(long, value_name = "N", default_value_t = 128, help_heading = "Bench")]
    pub(crate) max_tokens: usize,
    /// Times that each step is timed; the median counts
    #[arg(
        long,
        value_name = "N",
        default_value_t = 21,
        conflicts_with = "no_steps",
        help_heading = "Bench"
    )]
    pub(crate) reps: usize,
    /// Leave out the timing of steps and prefill
    #[arg(long, help_heading = "Bench")]
    pub(crate) no_steps: bool,
    /// Print one JSON object
    #[arg(long, help_heading = "Bench")]
    pub(crate) json: bool,
}

/// `paceline perplexity`.
#[derive(Debug, Args)]
pub(crate) struct PerplexityArgs {
    /// The text: JSON lines with `text`, `messages`, or `prompt` and `response` if it ends in .jsonl,
    /// else one plain text
    pub(crate) file: PathBuf,
    /// Which model.
    #[command(flatten)]
    pub(crate) model: ModelArg,
    /// How it is loaded; `--context` is the length of a window.
    #[command(flatten)]
    pub(crate) load: LoadArgs,
    /// Tokens from one window to the next [default: half a window]
    #[arg(long, value_name = "TOKENS", value_parser = count, help_heading = "Text")]
    pub(crate) stride: Option<usize>,
    /// Tokens at the start of every window that are read and not scored [default: those that the
    /// window before has scored]
    #[arg(long, value_name = "TOKENS", value_parser = count, help_heading = "Text")]
    pub(crate) lead: Option<usize>,
    /// Texts of the file to score, from the first [default: all]
    #[arg(long, value_name = "N", help_heading = "Text")]
    pub(crate) texts: Option<usize>,
    /// Print one JSON object
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}

/// `paceline convert`.
#[derive(Debug, Args)]
pub(crate) struct ConvertArgs {
    /// What to convert: a model as for -m
    #[arg(value_name = "SRC")]
    pub(crate) source: String,
    /// The folder or GGUF file to write; it must not exist
    pub(crate) out: PathBuf,
    /// Store matrices as FORMAT: q4, q5, q6, q8 (MLX's affine groups of 64), or a name such as
    /// affine4-g32, q4_0 or bf16
    #[arg(long, value_name = "FORMAT", value_parser = weight_format, help_heading = "Format")]
    pub(crate) quant: Option<&'static Format>,
    /// Store the tensors that PATTERN fits as FORMAT, or `stored` as they are; may be repeated, the
    /// first that fits counts
    #[arg(long, value_name = "PATTERN=FORMAT", value_parser = tensor_format, requires = "quant", help_heading = "Format")]
    pub(crate) tensor: Vec<TensorFormat>,
    /// Kind of file: a folder of safetensors as MLX has it, or one GGUF file; gguf where OUT ends in
    /// .gguf, else safetensors
    #[arg(long, value_name = "KIND", help_heading = "Format")]
    pub(crate) format: Option<Container>,
    /// Take the tokenizer of a GGUF file from this model: a drafter has none of its own
    #[arg(long, value_name = "MODEL", help_heading = "Format")]
    pub(crate) tokenizer: Option<String>,
    /// Grow a small model and its drafter to the shapes of a model of this many weights, such as 2b,
    /// with the same text and acceptance: to measure speed
    #[arg(long, value_name = "SIZE", value_parser = parameters, help_heading = "Size")]
    pub(crate) inflate: Option<u64>,
    /// Layers of the grown model
    #[arg(long, value_name = "N", requires = "inflate", help_heading = "Size")]
    pub(crate) layers: Option<usize>,
    /// Vocabulary of the grown model
    #[arg(long, value_name = "N", requires = "inflate", help_heading = "Size")]
    pub(crate) vocab: Option<usize>,
    /// Write nothing but the MTP head
    #[arg(long, conflicts_with_all = ["inflate", "attach_head"], help_heading = "Head")]
    pub(crate) extract_head: bool,
    /// Put in the MTP head of this model
    #[arg(
        long,
        value_name = "PATH",
        conflicts_with = "inflate",
        help_heading = "Head"
    )]
    pub(crate) attach_head: Option<String>,
    /// Write the model without its assistant, which otherwise goes to OUT-assistant
    #[arg(long, help_heading = "Head")]
    pub(crate) no_drafter: bool,
}

/// Kinds of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Container {
    Safetensors,
    Gguf,
}

/// A pattern over tensor names and a format, none for "as stored".
pub(crate) type TensorFormat = (String, Option<&'static Format>);

/// Short names of formats.
const SHORT_FORMATS: &[(&str, &str)] = &[
    ("q2", "affine2-g64"),
    ("q3", "affine3-g64"),
    ("q4", "affine4-g64"),
    ("q5", "affine5-g64"),
    ("q6", "affine6-g64"),
    ("q8", "affine8-g64"),
];

/// The format called `name`, in full or in short.
fn named_format(name: &str) -> Option<&'static Format> {
    let long = SHORT_FORMATS.iter().find(|(short, _)| *short == name);
    quant::format(long.map_or(name, |(_, long)| long))
}

/// The names of formats that folders of safetensors can have.
fn folder_formats() -> String {
    let short = SHORT_FORMATS.iter().map(|(short, _)| *short);
    let long = convert::Container::Safetensors.formats().map(|f| f.name);
    short.chain(long).collect::<Vec<_>>().join(", ")
}

/// A format that weights are written in.
fn weight_format(name: &str) -> Result<&'static Format, String> {
    named_format(name).ok_or_else(|| {
        let in_folders = |f: &&'static Format| convert::Container::Safetensors.holds(f);
        let others = convert::Container::Gguf
            .formats()
            .filter(|f| !in_folders(f));
        let others: Vec<_> = others.map(|f| f.name).collect();
        format!(
            "known are {}; GGUF files can also have {}",
            folder_formats(),
            others.join(", ")
        )
    })
}

/// A format that weights are brought to in memory.
fn load_format(name: &str) -> Result<&'static Format, String> {
    match named_format(name) {
        Some(format) if convert::Container::Safetensors.holds(format) => Ok(format),
        Some(_) => Err(
            "weights are loaded as q2 to q8, affineN-gM, bf16, f16 or f32; `paceline convert` writes the others".into(),
        ),
        None => Err(format!("known are {}", folder_formats())),
    }
}

fn tensor_format(text: &str) -> Result<TensorFormat, String> {
    let (pattern, format) = text
        .split_once('=')
        .ok_or("expected PATTERN=FORMAT, such as lm_head.*=q8")?;
    Ok((
        pattern.into(),
        if format == "stored" {
            None
        } else {
            Some(weight_format(format)?)
        },
    ))
}

/// A number of weights such as `2b` or `800m`.
fn parameters(text: &str) -> Result<u64, String> {
    let split = text.len()
        - text
            .chars()
            .last()
            .filter(char::is_ascii_alphabetic)
            .map_or(0, |_| 1);
    let unit = match text[split..].to_ascii_lowercase().as_str() {
        "" => 1.0,
        "m" => 1e6,
        "b" => 1e9,
        _ => f64::NAN,
    };
    let number = text[..split].parse::<f64>().map_or(f64::NAN, |n| n * unit);
    (1.0..1e15)
        .contains(&number)
        .then_some(number as u64)
        .ok_or_else(|| "expected a number such as 2b or 800m".into())
}

/// Devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    /// A GPU if there is one that can be used, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// The GPU of this number.
    Cuda(usize),
}

/// Formats of what quantized weights are multiplied with.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Activations {
    Int8,
    F32,
}

/// Where weights are kept, as `--weights` has it.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Weights {
    Auto,
    Packed,
    Mapped,
}

impl Activations {
    /// The format as users type it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Activations::Int8 => "int8",
            Activations::F32 => "f32",
        }
    }
}

/// How tokens are chosen, and how many.
#[derive(Debug, Args)]
#[command(next_help_heading = "Text")]
pub(crate) struct TextArgs {
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
    #[arg(long, visible_alias = "typical", value_name = "P", allow_negative_numbers = true)]
    pub(crate) typical_p: Option<f32>,
    /// Keep tokens within this many standard deviations of the largest logit
    #[arg(long, visible_alias = "top-nsigma", value_name = "X", allow_negative_numbers = true)]
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
    #[arg(long, visible_alias = "dynatemp-exp", value_name = "X", allow_negative_numbers = true)]
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

impl TextArgs {
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
    /// Continue the prompt as it is, without the chat template
    #[arg(long, conflicts_with_all = ["system", "chat_template_kwargs", "allow_special_tokens"], help_heading = "Text")]
    pub(crate) raw: bool,
    #[command(flatten)]
    pub(crate) text: TextArgs,
    #[command(flatten)]
    pub(crate) model: ModelArg,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
    #[command(flatten)]
    pub(crate) draft: DraftArgs,
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
    pub(crate) model: ModelArg,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
    #[command(flatten)]
    pub(crate) draft: DraftArgs,
}

/// `paceline serve`
#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// Address or name to listen on; all but loopback needs a key, or --insecure
    #[arg(long, default_value = "127.0.0.1", help_heading = "Server")]
    pub(crate) host: String,
    /// Port to listen on; 0 takes any that is free
    #[arg(long, default_value_t = 8080, help_heading = "Server")]
    pub(crate) port: u16,
    /// Requests that run at the same time, in one batch; up to --queue more wait for their turn
    #[arg(long, value_name = "N", default_value_t = 4, help_heading = "Server")]
    pub(crate) parallel: usize,
    /// Requests that may wait for their turn; more are refused with 429 and a time to come back. For a
    /// benchmark, at least as many as it sends at once
    #[arg(long, value_name = "N", default_value_t = engine::EngineOptions::default().queue, help_heading = "Server")]
    pub(crate) queue: usize,
    /// Turn the prefix cache off: every prompt is computed from its start, even if an earlier request
    /// began the same way. Texts are the same, and response times tell nothing of others' prompts
    #[arg(long, help_heading = "Server")]
    pub(crate) no_prefix_cache: bool,
    /// Ask for this API key; may be repeated
    #[arg(long, value_name = "KEY", value_parser = api_key, help_heading = "Server")]
    pub(crate) api_key: Vec<String>,
    /// Ask for one of the API keys in this file, a line each
    #[arg(long, value_name = "FILE", help_heading = "Server")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// Let web pages from this origin in, such as http://localhost:3000, or with localhost every page
    /// of this machine; may be repeated
    #[arg(
        long,
        value_name = "ORIGIN",
        value_parser = server::parse_origin,
        value_delimiter = ',',
        help_heading = "Server"
    )]
    pub(crate) allow_origin: Vec<String>,
    /// Answer to this host name too, also without a key; may be repeated
    #[arg(
        long,
        value_name = "NAME",
        value_delimiter = ',',
        help_heading = "Server"
    )]
    pub(crate) allow_host: Vec<String>,
    /// Listen on the network without a key
    #[arg(long, help_heading = "Server")]
    pub(crate) insecure: bool,
    /// Name of the model in requests and responses; may be repeated [default: its own]
    #[arg(
        long,
        value_name = "NAME",
        value_delimiter = ',',
        help_heading = "Server"
    )]
    pub(crate) alias: Vec<String>,
    /// Refuse requests for a model of another name; otherwise this model answers them
    #[arg(long, help_heading = "Server")]
    pub(crate) strict_model_names: bool,
    /// Seconds that running requests get to finish after Ctrl-C
    #[arg(long, value_name = "SECONDS", default_value_t = Limits::default().drain_timeout.as_secs(), help_heading = "Server")]
    pub(crate) drain_timeout: u64,
    /// Say what would be served and what memory it would take, and exit
    #[arg(long, help_heading = "Server")]
    pub(crate) dry_run: bool,
    #[command(flatten)]
    pub(crate) model: ModelArg,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
    #[command(flatten)]
    pub(crate) draft: DraftArgs,
}

/// `paceline inspect`
#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// The model, as for -m
    #[arg(value_name = "MODEL", conflicts_with = "model")]
    pub(crate) positional: Option<String>,
    #[command(flatten)]
    pub(crate) model: ModelArg,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
    #[command(flatten)]
    pub(crate) draft: DraftArgs,
    /// Print one JSON object
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}

/// `paceline pull`
#[derive(Debug, Args)]
pub(crate) struct PullArgs {
    /// ORG/NAME on the hub, ORG/NAME@REVISION, or ORG/NAME:FORMAT for GGUF files, such as Q4_K_M
    #[arg(value_name = "MODEL")]
    pub(crate) model: String,
    /// Fetch its drafter too: an assistant, or the head that a conversion has dropped
    #[arg(long)]
    pub(crate) draft: bool,
    /// Fetch only the `mtp.*` tensors, for conversions of this model
    #[arg(long, conflicts_with = "draft")]
    pub(crate) head_only: bool,
}

/// `paceline list`
#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// `paceline rm`
#[derive(Debug, Args)]
pub(crate) struct RmArgs {
    /// ORG/NAME of each
    #[arg(value_name = "MODEL", required = true)]
    pub(crate) models: Vec<String>,
}

/// `paceline doctor`
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// `paceline config`
#[derive(Debug, Args)]
pub(crate) struct ConfigArgs {
    /// What to do with the configuration.
    #[command(subcommand)]
    pub(crate) command: ConfigCommand,
}

/// `paceline config …`
#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Print what a command would run with, as a paceline.toml
    Show {
        /// Print command lines instead, with every option that is not at its default
        #[arg(long)]
        as_command: bool,
        /// A command and its options; every command if absent
        #[arg(
            value_name = "COMMAND",
            trailing_var_arg = true,
            allow_hyphen_values = true
        )]
        line: Vec<OsString>,
    },
}

/// A number of things: digits, with `k` or `m` for 1024 or 1024².
fn count(text: &str) -> Result<usize, String> {
    let (digits, unit) = match text.as_bytes().last() {
        Some(b'k' | b'K') => (&text[..text.len() - 1], 1 << 10),
        Some(b'm' | b'M') => (&text[..text.len() - 1], 1 << 20),
        _ => (text, 1),
    };
    let number: Option<usize> = digits.parse().ok().and_then(|n: usize| n.checked_mul(unit));
    number.ok_or_else(|| "expected a number such as 4096 or 4k".into())
}

/// Bytes, such as `12GB`, `800MB` or `1.5T`.
fn size(text: &str) -> Result<u64, String> {
    let upper = text.trim().to_ascii_uppercase();
    let digits = upper.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match upper[digits.len()..].trim_end_matches('B') {
        "" => 1.0,
        "K" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "T" => 1e12,
        _ => f64::NAN,
    };
    let bytes = digits.trim().parse::<f64>().unwrap_or(f64::NAN) * unit;
    if (1.0..1e18).contains(&bytes) {
        Ok(bytes as u64)
    } else {
        Err("expected a size such as 12GB or 800MB".into())
    }
}

/// A key that keeps somebody out: an empty one, of a variable that is not set, would
/// let everyone in.
fn api_key(text: &str) -> Result<String, String> {
    match text.trim() {
        "" => Err("an API key may not be empty".into()),
        key => Ok(key.into()),
    }
}

/// A seed as the API has it: any number of 64 bits, signed or not.
fn seed(text: &str) -> Result<u64, String> {
    let signed = || text.parse().map(i64::cast_unsigned);
    let seed = text.parse().or_else(|_| signed());
    seed.map_err(|_| "expected a whole number of 64 bits".into())
}

fn template_arguments(text: &str) -> Result<Map<String, Value>, String> {
    serde_json::from_str(text)
        .map_err(|_| r#"expected a JSON object, such as {"enable_thinking": true}"#.into())
}

fn bias(text: &str) -> Result<(u32, f32), String> {
    let parsed = text
        .split_once('=')
        .and_then(|(id, value)| Some((id.parse().ok()?, value.parse().ok()?)));
    parsed.ok_or_else(|| "expected a token id and a number, such as 42=-1.5".into())
}

fn device(text: &str) -> Result<Device, String> {
    let ordinal = |n: &str| n.parse().ok().map(Device::Cuda);
    let device = match text {
        "auto" => Some(Device::Auto),
        "cpu" => Some(Device::Cpu),
        "cuda" => Some(Device::Cuda(0)),
        _ => text.strip_prefix("cuda:").and_then(ordinal),
    };
    device.ok_or_else(|| "devices are auto, cpu, cuda and cuda:N, such as cuda:1".into())
}

/// Threads wait for each other all the time: one that has no core stalls them all.
fn threads(text: &str) -> Result<NonZeroUsize, String> {
    let most = std::thread::available_parallelism().map_or(usize::MAX, NonZeroUsize::get);
    match text.parse::<NonZeroUsize>() {
        Ok(n) if n.get() > most => Err(format!("this machine runs {most} at once")),
        parsed => parsed.map_err(|_| "expected a number from 1 on".into()),
    }
}

fn isa(text: &str) -> Result<cpu::Isa, String> {
    let available = cpu::Isa::available();
    let names = || {
        available
            .iter()
            .map(|isa| isa.name())
            .collect::<Vec<_>>()
            .join(", ")
    };
    available
        .iter()
        .copied()
        .find(|isa| isa.name() == text)
        .ok_or_else(|| format!("this CPU has {}", names()))
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
         ORG/NAME",
        alone.collect::<Vec<_>>().join(", "),
        rest.join(", ")
    )
}

fn accept_rule() -> impl TypedValueParser<Value = Accept> {
    PossibleValuesParser::new(Accept::ALL.map(Accept::name)).map(|name| {
        let rule = Accept::ALL.into_iter().find(|rule| rule.name() == name);
        rule.expect("one of the names")
    })
}

/// The names of KV formats that keys can have too, or of the others.
fn kv_names(for_keys: bool) -> Vec<&'static str> {
    let formats = quant::KV_FORMATS.iter();
    let formats = formats.filter(|format| format.holds_keys == for_keys);
    formats.map(|format| format.name).collect()
}

/// `a, b or c`
fn any_of(names: &[&str]) -> String {
    match names {
        [first @ .., last] if !first.is_empty() => format!("{} or {last}", first.join(", ")),
        names => names.concat(),
    }
}

fn kv_help() -> String {
    let (all, values) = (kv_names(true), kv_names(false));
    format!(
        "Format of the KV cache, or of keys and values apart as K,V: {}; values also {} \
         (TurboQuant), as in q8_0,{}",
        any_of(&all),
        any_of(&values),
        values[0]
    )
}

fn kv_format(text: &str) -> Result<KvFormat, String> {
    let format = |name: &str| {
        quant::kv_format(name).ok_or_else(|| {
            let (all, values) = (kv_names(true).join(", "), kv_names(false));
            format!(
                "`{name}` is none of {all}; values also take {}, as in q8_0,{}",
                values.join(" and "),
                values[0]
            )
        })
    };
    let (k, v) = text.split_once(',').unwrap_or((text, text));
    let k = format(k)?;
    if !k.holds_keys {
        let k = k.name;
        return Err(format!("`{k}` is supported for values only; try q8_0,{k}"));
    }
    Ok(KvFormat { k, v: format(v)? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn counts_have_units() {
        assert_eq!(count("4096"), Ok(4096));
        assert_eq!(count("32k"), Ok(32 << 10));
        assert_eq!(count("1M"), Ok(1 << 20));
        for bad in [
            "",
            "k",
            "4.5",
            "-1",
            "99999999999999999999",
            "9999999999999999m",
        ] {
            assert!(count(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_of_memory_have_units() {
        assert_eq!(size("12GB"), Ok(12_000_000_000));
        assert_eq!(size("1.5 g"), Ok(1_500_000_000));
        assert_eq!(size("800m"), Ok(800_000_000));
        assert_eq!(size("1000"), Ok(1000));
        for bad in [
            "",
            "GB",
            "-1GB",
            "0",
            "nan",
            "inf",
            "12XB",
            "1e30",
            "12 gigabytes",
        ] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_and_formats_have_short_names() {
        assert_eq!(parameters("2b"), Ok(2_000_000_000));
        assert_eq!(parameters("0.5B"), Ok(500_000_000));
        assert_eq!(parameters("40M"), Ok(40_000_000));
        for bad in ["", "b", "-1b", "1x", "nan", "1e30b", "2é"] {
            assert!(parameters(bad).is_err(), "{bad}");
        }
        assert_eq!(
            tensor_format("mtp.*=q8").unwrap().1.unwrap().name,
            "affine8-g64"
        );
        assert_eq!(
            tensor_format("lm_head.*=stored"),
            Ok(("lm_head.*".into(), None))
        );
        assert!(load_format("q8").is_ok() && load_format("bf16").is_ok());
        assert!(load_format("q4_0").unwrap_err().contains("convert"));
        assert!(tensor_format("lm_head").is_err() && tensor_format("x=q7").is_err());
    }

    #[test]
    fn keys_and_values_may_differ() {
        assert_eq!(kv_format("f16").unwrap(), KvFormat::both(&quant::kv::F16));
        assert_eq!(kv_format("q8_0,q4_0").unwrap().to_string(), "q8_0,q4_0");
        for bad in ["", "f8", "q4_k", "bf16,", ",f16", "bf16,f16,f32"] {
            assert!(kv_format(bad).is_err(), "{bad}");
        }
        for name in kv_names(true) {
            assert_eq!(kv_format(name).unwrap().to_string(), name);
        }
        for name in kv_names(false) {
            let both = format!("q8_0,{name}");
            assert_eq!(kv_format(&both).unwrap().to_string(), both);
            assert!(kv_format(name).unwrap_err().contains(&both));
        }
    }

    #[test]
    fn keys_are_not_empty_and_seeds_have_a_sign() {
        assert_eq!(api_key(" k "), Ok("k".into()));
        assert!(api_key("").is_err() && api_key(" ").is_err());
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

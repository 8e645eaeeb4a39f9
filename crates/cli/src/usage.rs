//! Wrong command lines: options without effect, and hints that go with the parser's errors.
//!
//! The parser knows which options a command has, and which pairs never go together. Here
//! are the pairs in which one option has no effect because of the *value* of the other.

use crate::config::Layered;
use crate::resolve;
use clap::ArgMatches;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use std::ffi::OsString;

/// An option with a value after which others have no effect.
struct Silencer {
    /// The option that silences others.
    option: &'static str,
    /// Whether the option silences others with this value.
    silences: fn(&str) -> bool,
    /// The options that then have no effect.
    silenced: &'static [&'static str],
}

/// Every option with a value after which others of the same command line have no effect.
const SILENCERS: &[Silencer] = &[
    Silencer {
        option: "draft",
        silences: |value| value == "none",
        silenced: &["draft_max", "draft_vocab", "draft_window", "accept"],
    },
    Silencer {
        option: "draft",
        silences: |value| value == "ngram",
        silenced: &["draft_vocab", "draft_window"],
    },
    Silencer {
        option: "draft_max",
        silences: |value| value == "0",
        silenced: &["draft_vocab", "draft_window", "accept"],
    },
    Silencer {
        option: "device",
        silences: |value| value.starts_with("cuda"),
        silenced: &["pin_threads", "activations", "isa"],
    },
    Silencer {
        option: "contexts",
        silences: |_| true,
        silenced: &["context"],
    },
    Silencer {
        option: "kv_formats",
        silences: |_| true,
        silenced: &["kv"],
    },
    Silencer {
        option: "temperatures",
        silences: |values| values.split(',').all(|t| t.parse() == Ok(0.0)),
        silenced: &["top_p"],
    },
];

/// Refuses a command line with an option that has no effect. Options from files and the
/// environment are meant for many command lines, and are not checked.
///
/// # Errors
///
/// A message that names both options.
pub(crate) fn check(matches: &ArgMatches) -> Result<(), String> {
    let Some((name, command)) = matches.subcommand() else {
        return Ok(());
    };
    let is_typed = |id: &str| {
        let is_known = command.try_contains_id(id).unwrap_or(false);
        is_known && command.value_source(id) == Some(ValueSource::CommandLine)
    };
    if name == "perplexity" && is_typed("allow_special_tokens") {
        return Err(
            "--allow-special-tokens has no effect on perplexity, which scores plain text: leave it out"
                .into(),
        );
    }
    for Silencer {
        option,
        silences,
        silenced,
    } in SILENCERS
    {
        // A default silences as well, but `--draft none` by default would be odd to hear of.
        if !is_typed(option) && *option != "temperatures" {
            continue;
        }
        let Ok(Some(values)) = command.try_get_raw(option) else {
            continue;
        };
        let values: Vec<_> = values.map(|v| v.to_string_lossy()).collect();
        let value = values.join(",");
        if !silences(&value) {
            continue;
        }
        if let Some(idle) = silenced.iter().find(|id| is_typed(id)) {
            return Err(format!(
                "--{} has no effect with --{} {value}: leave one of them out",
                idle.replace('_', "-"),
                option.replace('_', "-"),
            ));
        }
    }
    Ok(())
}

/// A hint for the user whose words the parser refused: the option that was meant, or the
/// variable that a wrong value comes from.
pub(crate) fn hint(error: &clap::Error, layered: &Layered) -> Option<String> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    let invalid = text(ContextKind::InvalidArg)?;
    match error.kind() {
        ErrorKind::UnknownArgument => {
            let named = words.windows(2).find_map(|pair| {
                let (before, word) = (pair[0].to_str()?, pair[1].to_str()?);
                let is_value = before.starts_with('-');
                (!is_value && resolve::is_known(word)).then_some(word)
            });
            named.map(|name| format!("did you mean -m {name}?"))
        }
        ErrorKind::InvalidValue | ErrorKind::ValueValidation => {
            // `--draft-max <N>`
            let long = invalid.split_whitespace().next()?.strip_prefix("--")?;
            let value = text(ContextKind::InvalidValue)?;
            let variable = layered.variable(long)?;
            let is_typed = words.iter().any(|word| {
                let word = word.to_string_lossy();
                word == format!("--{long}") || word.starts_with(&format!("--{long}="))
            });
            let is_set = std::env::var(&variable).is_ok_and(|set| set.contains(value));
            (!is_typed && is_set)
                .then(|| format!("the value comes from the environment variable {variable}"))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Cli;
    use clap::CommandFactory;

    /// Commands that load a model.
    const LOADING: &str = "run chat serve launch inspect bench perplexity count conformance";
    /// Commands that choose tokens for a user.
    const WRITING: &str = "run chat";

    /// Commands that have the sampler's numbers.
    const SAMPLING: &str = "run chat serve";

    /// Every option, the commands that have it, and what it does there that can be seen.
    const EFFECTS: &[(&str, &str, &str)] = &[
        ("model", LOADING, "the model that is loaded"),
        (
            "context",
            LOADING,
            "size of the KV cache, and of a window of perplexity",
        ),
        ("kv", LOADING, "format of the KV cache"),
        (
            "quant",
            LOADING,
            "format of the weights; inspect refuses it",
        ),
        ("weights", LOADING, "where weights are"),
        ("memory", LOADING, "the models that are loaded"),
        ("prefix-cache-memory", LOADING, "the KV cache's bytes"),
        ("pooling", "serve", "vectors of the embeddings' paths"),
        ("kv-memory", "serve", "pages of requests that run"),
        ("chunk", LOADING, "rows of a prefill step"),
        ("device", LOADING, "the backend"),
        ("threads", LOADING, "threads of the backend"),
        ("pin-threads", LOADING, "their cores"),
        ("activations", LOADING, "the backend's rounding"),
        ("isa", LOADING, "the backend's kernels"),
        ("mmproj", LOADING, "the vision tower"),
        ("no-pictures", LOADING, "the vision tower"),
        ("no-probe", LOADING, "the self-test line"),
        (
            "allow-special-tokens",
            LOADING,
            "control tokens in messages; perplexity refuses it",
        ),
        (
            "draft",
            "run chat serve launch inspect bench conformance",
            "the drafter",
        ),
        (
            "draft-vocab",
            "run chat serve launch inspect bench",
            "the draft head's vocabulary",
        ),
        (
            "draft-window",
            "run chat serve launch inspect bench",
            "the rows that an assistant reads",
        ),
        (
            "accept",
            "run chat serve launch inspect bench conformance",
            "the acceptance rule",
        ),
        (
            "draft-max",
            "run chat serve launch inspect replay",
            "the longest draft",
        ),
        ("no-overlap", "run chat serve bench", "when text is sent"),
        ("draft-lengths", "bench", "rows of the table"),
        ("draft-fixed", "replay", "rows of the table"),
        ("drafter", "replay", "the drafters that are told of"),
        ("contexts", "bench", "rows of the table"),
        ("kv-formats", "bench", "rows of the table"),
        ("batch", "bench", "rows of the table"),
        ("temperatures", "bench", "rows of the table"),
        ("prompts", "bench count", "the texts that are written"),
        ("reps", "bench", "how often steps are timed"),
        ("no-steps", "bench", "no table of steps"),
        ("quick", "conformance", "prompts of a cell"),
        ("top-p", "run chat bench serve", "the tokens sampled from"),
        (
            "max-tokens",
            "run chat bench count serve",
            "length of the text",
        ),
        ("top-k", "run chat serve", "the sampler"),
        ("logit-bias", WRITING, "the sampler"),
        ("seed", "run chat serve", "the sampler"),
        ("stop", WRITING, "the end of the text"),
        ("ignore-eos", WRITING, "the end of the text"),
        ("system", WRITING, "the first message"),
        (
            "chat-template-kwargs",
            "run chat serve",
            "the rendered template",
        ),
        ("prompt", "run", "the prompt"),
        ("prompt-file", "run", "the prompt"),
        ("raw", "run", "no chat template"),
        ("image", "run", "the prompt"),
        ("video", "run", "the prompt"),
        ("audio", "run", "the prompt"),
        ("format", WRITING, "the form of the text"),
        ("schema", WRITING, "the form of the text"),
        ("grammar", WRITING, "the form of the text"),
        ("regex", WRITING, "the form of the text"),
        ("stride", "perplexity", "windows"),
        ("lead", "perplexity", "windows"),
        ("texts", "perplexity", "texts scored"),
        (
            "kl-divergence",
            "perplexity",
            "a comparison of formats of the KV cache",
        ),
        ("answers", "count", "the texts that are written"),
        ("trace", "run chat serve", "a file of what each round did"),
        (
            "json",
            "run inspect bench perplexity conformance replay list doctor ps",
            "the form of stdout",
        ),
        ("models-dir", "serve", "the models that are listed"),
        ("models-max", "serve", "the models that stay loaded"),
        ("models-memory", "serve", "the models that stay loaded"),
        ("idle-unload", "serve", "the models that stay loaded"),
        ("preload", "serve", "what is loaded before requests come"),
        ("host", "serve", "the address"),
        ("port", "serve", "the address"),
        ("parallel", "serve", "requests in one batch"),
        ("queue", "serve", "requests that wait"),
        (
            "tower-share",
            "serve",
            "when pictures are looked at beside texts",
        ),
        ("no-prefix-cache", "serve", "cached tokens"),
        ("kv-events", "serve", "messages over ZeroMQ"),
        ("kv-events-replay", "serve", "messages that come again"),
        ("kv-events-topic", "serve", "the topic of messages"),
        ("kv-events-encoding", "serve", "maps or lists"),
        ("cache-dir", "serve", "cached tokens after a restart"),
        ("cache-disk", "serve", "files in the cache folder"),
        ("api-key", "serve", "401"),
        (
            "api-key",
            "launch",
            "the key that a running server asks for",
        ),
        ("print", "launch", "lines for a shell instead of the client"),
        ("all", "stop", "the servers that end"),
        (
            "recalibrate",
            "doctor",
            "how weights are read and multiplied",
        ),
        ("api-key-file", "serve", "401"),
        ("allow-origin", "serve", "CORS headers"),
        ("allow-host", "serve", "403"),
        ("allow-fetch", "serve", "pictures from addresses"),
        ("media-root", "serve", "pictures from a folder"),
        ("insecure", "serve", "listening without a key"),
        ("alias", "serve", "the model list"),
        ("strict-model-names", "serve", "404"),
        ("chat-template", "serve", "the rendered prompt"),
        ("reasoning", "serve", "what silence about reasoning means"),
        ("no-prefill-assistant", "serve", "who goes on from a turn"),
        ("drain-timeout", "serve", "the end"),
        ("dry-run", "serve", "a plan instead of a server"),
        ("quant", "convert", "the format written"),
        ("tensor", "convert", "the format of single tensors"),
        ("pin", "convert", "the format of some tensors"),
        ("format", "convert", "the container written"),
        ("tokenizer", "convert", "the GGUF file's vocabulary"),
        ("inflate", "convert", "shapes"),
        ("layers", "convert", "shapes"),
        ("vocab", "convert", "shapes"),
        ("extract-head", "convert", "tensors"),
        ("attach-head", "convert", "tensors"),
        ("no-drafter", "convert", "no second output"),
        ("draft", "pull", "files fetched"),
        ("head-only", "pull", "files fetched"),
        ("no-mmproj", "pull", "files fetched"),
    ];

    #[test]
    fn every_option_has_an_effect_on_every_command_that_has_it() {
        let mut placed: Vec<String> = Vec::new();
        for (option, commands, effect) in EFFECTS {
            assert!(!effect.is_empty());
            placed.extend(commands.split(' ').map(|c| format!("{c} --{option}")));
        }
        // The sampler's numbers have their effect there.
        for number in engine::SAMPLER_NUMBERS {
            let option = number.name.replace('_', "-");
            if EFFECTS.iter().all(|(listed, ..)| *listed != option) {
                placed.extend(SAMPLING.split(' ').map(|c| format!("{c} --{option}")));
            }
        }
        let mut found = Vec::new();
        for command in Cli::command().get_subcommands() {
            for long in command.get_arguments().filter_map(clap::Arg::get_long) {
                found.push(format!("{} --{long}", command.get_name()));
            }
        }
        placed.sort();
        found.sort();
        assert_eq!(found, placed, "a new option needs a line in `EFFECTS`");
    }

    #[test]
    fn options_without_effect_are_refused() {
        let refusal = |line: &str| -> Option<String> {
            let words = format!("paceline {line}");
            match Cli::command().try_get_matches_from(words.split(' ')) {
                Err(error) => Some(error.to_string()),
                Ok(matches) => check(&matches).err(),
            }
        };
        for (line, first, second) in [
            (
                "run x --draft none --draft-max 7",
                "--draft-max",
                "--draft none",
            ),
            (
                "serve --draft none --accept residual",
                "--accept",
                "--draft none",
            ),
            (
                "chat --draft ngram --draft-vocab 9",
                "--draft-vocab",
                "--draft ngram",
            ),
            (
                "run x --draft-max 0 --accept residual",
                "--accept",
                "--draft-max 0",
            ),
            (
                "inspect --device cuda --pin-threads",
                "--pin-threads",
                "--device cuda",
            ),
            (
                "run x --activations f32 --device cuda:0",
                "--activations",
                "--device cuda:0",
            ),
            ("bench --top-p 0.5", "--top-p", "--temperatures 0"),
            ("bench --no-steps --reps 3", "--reps", "--no-steps"),
            (
                "bench --contexts 1k,2k --context 4k",
                "--context has",
                "--contexts 1k,2k",
            ),
            (
                "bench --kv-formats bf16,q8_0+q4_0 --kv f16",
                "--kv has",
                "--kv-formats bf16,q8_0+q4_0",
            ),
            (
                "run x --raw --allow-special-tokens",
                "--allow-special-tokens",
                "--raw",
            ),
            (
                "perplexity x --allow-special-tokens",
                "--allow-special-tokens",
                "perplexity",
            ),
            (
                "bench --draft-max 1 --draft-lengths 0,2",
                "--draft-max",
                "unexpected",
            ),
            ("perplexity x --draft mtp", "--draft", "unexpected"),
            ("perplexity x --draft-max 9", "--draft-max", "unexpected"),
            ("perplexity x --accept residual", "--accept", "unexpected"),
        ] {
            let said = refusal(line).unwrap_or_else(|| panic!("{line} is taken"));
            assert!(said.contains(first) && said.contains(second), "{said}");
        }
        for line in [
            "run x --draft mtp --draft-max 7 --accept residual",
            "bench --temperatures 0,1 --top-p 0.5",
            "bench --kv-formats bf16 --context 4k",
            "run x --draft none",
            "run x --device cpu --threads 1",
        ] {
            assert_eq!(refusal(line), None, "{line}");
        }
    }
}

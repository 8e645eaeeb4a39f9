//! `paceline launch`: starts a coding agent or chat client that uses a model here.
//!
//! A client is told where the server is by its own variables and options ([`CLIENTS`]), so that
//! its configuration files stay as they are. `--print` shows them, for whoever wants to keep them.

use crate::args::{LaunchArgs, OutputArgs};
use crate::interrupts::Interrupts;
use crate::serve::{self, Background};
use crate::servers;
use anyhow::{Context, Result, bail};
use serde_json::json;
use std::io::Write as _;
use std::process::{Command, ExitCode};

/// What a client must know.
struct Target<'a> {
    /// The server's URL, without a path.
    url: &'a str,
    /// The name of the model.
    model: &'a str,
    /// Tokens that prompt and answer may have.
    context: usize,
    /// The key that is sent; some clients want one even where the server asks for none.
    key: &'a str,
}

/// Variables and options of a client.
#[derive(Debug, Default, PartialEq)]
struct Setup {
    variables: Vec<(&'static str, String)>,
    options: Vec<String>,
}

/// A client that can be started.
struct Client {
    /// What users call it.
    name: &'static str,
    /// The program.
    program: &'static str,
    /// How to get it.
    install: &'static str,
    setup: fn(&Target<'_>) -> Setup,
}

/// Every client that can be started.
const CLIENTS: &[Client] = &[
    Client {
        name: "claude",
        program: "claude",
        install: "npm install -g @anthropic-ai/claude-code",
        setup: claude,
    },
    Client {
        name: "codex",
        program: "codex",
        install: "npm install -g @openai/codex",
        setup: codex,
    },
    Client {
        name: "opencode",
        program: "opencode",
        install: "npm install -g opencode-ai",
        setup: opencode,
    },
    Client {
        name: "qwen",
        program: "qwen",
        install: "npm install -g @qwen-code/qwen-code",
        setup: qwen,
    },
    Client {
        name: "aider",
        program: "aider",
        install: "python -m pip install aider-chat",
        setup: aider,
    },
    Client {
        name: "gptme",
        program: "gptme",
        install: "python -m pip install gptme",
        setup: gptme,
    },
];

/// The names of all clients, for the command line.
pub(crate) fn names() -> Vec<&'static str> {
    CLIENTS.iter().map(|client| client.name).collect()
}

/// Claude Code: one model for all of its roles, and nothing sent elsewhere.
fn claude(target: &Target<'_>) -> Setup {
    let model = target.model.to_owned();
    Setup {
        variables: vec![
            ("ANTHROPIC_BASE_URL", target.url.to_owned()),
            ("ANTHROPIC_AUTH_TOKEN", target.key.to_owned()),
            ("ANTHROPIC_MODEL", model.clone()),
            ("ANTHROPIC_DEFAULT_OPUS_MODEL", model.clone()),
            ("ANTHROPIC_DEFAULT_SONNET_MODEL", model.clone()),
            ("ANTHROPIC_DEFAULT_HAIKU_MODEL", model),
            ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1".to_owned()),
        ],
        options: Vec::new(),
    }
}

/// Codex: a provider of its own, over the Responses API.
fn codex(target: &Target<'_>) -> Setup {
    let text = |text: &str| json!(text).to_string();
    let provider = |key: &str, value: String| format!("model_providers.paceline.{key}={value}");
    let settings = [
        format!("model={}", text(target.model)),
        format!("model_provider={}", text("paceline")),
        format!("model_context_window={}", target.context),
        provider("name", text("paceline")),
        provider("base_url", text(&format!("{}/v1", target.url))),
        provider("wire_api", text("responses")),
        provider("env_key", text("PACELINE_LAUNCH_KEY")),
    ];
    Setup {
        variables: vec![("PACELINE_LAUNCH_KEY", target.key.to_owned())],
        options: settings
            .into_iter()
            .flat_map(|setting| ["-c".to_owned(), setting])
            .collect(),
    }
}

/// opencode: a provider in the configuration that it takes from a variable.
fn opencode(target: &Target<'_>) -> Setup {
    let output = target.context / 2;
    let config = json!({
        "model": format!("paceline/{}", target.model),
        "small_model": format!("paceline/{}", target.model),
        "provider": {"paceline": {
            "npm": "@ai-sdk/openai-compatible",
            "name": "paceline",
            "options": {"baseURL": format!("{}/v1", target.url), "apiKey": target.key},
            "models": {target.model: {
                "name": target.model,
                "limit": {"context": target.context, "output": output},
            }},
        }},
    });
    Setup {
        variables: vec![("OPENCODE_CONFIG_CONTENT", config.to_string())],
        options: Vec::new(),
    }
}

/// The variables of OpenAI's own clients.
fn openai(target: &Target<'_>, base: &'static str) -> Vec<(&'static str, String)> {
    vec![
        (base, format!("{}/v1", target.url)),
        ("OPENAI_API_KEY", target.key.to_owned()),
    ]
}

/// Qwen Code.
fn qwen(target: &Target<'_>) -> Setup {
    let mut variables = openai(target, "OPENAI_BASE_URL");
    variables.push(("OPENAI_MODEL", target.model.to_owned()));
    Setup {
        variables,
        options: ["--auth-type", "openai"].map(str::to_owned).into(),
    }
}

/// aider.
fn aider(target: &Target<'_>) -> Setup {
    Setup {
        variables: openai(target, "OPENAI_API_BASE"),
        options: vec!["--model".to_owned(), format!("openai/{}", target.model)],
    }
}

/// gptme.
fn gptme(target: &Target<'_>) -> Setup {
    Setup {
        variables: openai(target, "OPENAI_BASE_URL"),
        options: vec!["--model".to_owned(), format!("local/{}", target.model)],
    }
}

/// Runs the command.
pub(crate) fn run(args: LaunchArgs, output: OutputArgs) -> Result<ExitCode> {
    let client = CLIENTS.iter().find(|client| client.name == args.client);
    let client = client.context("no such client")?;
    if !args.print && !is_installed(client.program) {
        bail!("`{}` is not installed: {}", client.program, client.install);
    }
    let place = place(&args)?;
    let key = args.api_key.as_deref().unwrap_or("paceline");
    let setup = (client.setup)(&Target {
        url: &place.url,
        model: &place.model,
        context: place.context,
        key,
    });
    if args.print {
        std::io::stdout().write_all(shell(client, &setup).as_bytes())?;
        return Ok(ExitCode::SUCCESS);
    }
    if !output.quiet {
        say!("{} uses {} at {}", client.name, place.model, place.url);
    }
    // Ctrl-C is the client's, which shares the terminal.
    let interrupts = Interrupts::of_ctrl_c()?;
    let child = Command::new(client.program)
        .args(&setup.options)
        .args(&args.arguments)
        .envs(setup.variables)
        .spawn();
    let mut child = child.with_context(|| format!("cannot start `{}`", client.program))?;
    let status = interrupts.ignored_until(|| child.try_wait())?;
    if let Some(background) = place.background {
        background.stop()?;
    }
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(code.map_or(ExitCode::FAILURE, ExitCode::from))
}

/// Whether a program is in one of the folders of `PATH`.
fn is_installed(program: &str) -> bool {
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let suffixed = format!("{program}{}", std::env::consts::EXE_SUFFIX);
    // On Windows, npm installs scripts.
    let names = [suffixed, format!("{program}.cmd")];
    std::env::split_paths(&paths).any(|path| names.iter().any(|name| path.join(name).is_file()))
}

/// A server for a client.
struct Place {
    url: String,
    model: String,
    context: usize,
    /// The server, if it was started for this client.
    background: Option<Background>,
}

/// The server that runs already, or one that is started.
fn place(args: &LaunchArgs) -> Result<Place> {
    let running: Vec<_> = servers::running()
        .into_iter()
        .map(|(server, _)| server)
        .filter(|server| match &args.model {
            None => true,
            Some(model) => *model == server.model || server.models.contains(model),
        })
        .collect();
    if let [server] = &running[..] {
        if server.needs_key && args.api_key.is_none() {
            bail!(
                "the server at {} asks for a key: give it with --api-key",
                server.url
            );
        }
        return Ok(Place {
            url: server.url.clone(),
            model: args.model.as_ref().unwrap_or(&server.model).clone(),
            context: match server.context {
                0 => engine::DEFAULT_CONTEXT,
                context => context,
            },
            background: None,
        });
    }
    if args.print {
        bail!(
            "there is no one server to write settings for; start one with `paceline serve`, or name its model with -m"
        );
    }
    let background = serve::background(args)?;
    Ok(Place {
        url: background.url.clone(),
        model: background.model.clone(),
        context: background.context,
        background: Some(background),
    })
}

/// The lines for a shell that do what `launch` does.
fn shell(client: &Client, setup: &Setup) -> String {
    let mut lines = String::new();
    for (name, value) in &setup.variables {
        lines += &format!("export {name}={}\n", quoted(value));
    }
    lines += client.program;
    for option in &setup.options {
        lines += &format!(" {}", quoted(option));
    }
    lines.push('\n');
    lines
}

/// A word for a shell.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TARGET: Target<'_> = Target {
        url: "http://127.0.0.1:8080",
        model: "org/a model",
        context: 8192,
        key: "k'",
    };

    #[test]
    fn settings_can_be_pasted_into_a_shell() {
        for client in CLIENTS {
            let setup = (client.setup)(&TARGET);
            let lines = shell(client, &setup);
            let script = lines.rsplit_once(client.program).unwrap();
            let script = format!("{}printf '%s\\n' {}", script.0, script.1);
            let output = Command::new("sh").args(["-c", &script]).output().unwrap();
            let words = String::from_utf8(output.stdout).unwrap();
            let expected: String = setup.options.iter().map(|o| format!("{o}\n")).collect();
            assert_eq!(words.trim(), expected.trim(), "{lines}");
        }
    }

    #[test]
    fn every_client_is_told_the_address_the_model_and_the_key() {
        for client in CLIENTS {
            let Setup { variables, options } = (client.setup)(&TARGET);
            let values = variables.into_iter().map(|(_, value)| value);
            let all: String = values.chain(options).collect::<Vec<_>>().join("\n");
            for part in [TARGET.url, TARGET.model, TARGET.key] {
                assert!(all.contains(part), "{}: {part} in {all}", client.name);
            }
        }
    }
}

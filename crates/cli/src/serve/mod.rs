//! `paceline serve`: the API on a port.
//!
//! | file | what |
//! | --- | --- |
//! | `known` | which models there are |
//! | `load` | how one is loaded |
//! | `socket` | where the server listens |
//!
//! The async runtime is started here and nowhere else. The first signal stops
//! taking requests and lets the running ones finish; a second ends the program.

mod known;
mod load;
mod socket;

use crate::args::{
    KvEventsArgs, KvEventsEncoding, LaunchArgs, MediaArgs, ModelsArgs, OutputArgs, ServeArgs,
};
use crate::config::Layered;
use crate::servers::{self, Server};
use crate::traced::Traced;
use crate::{INTERRUPTED, TERMINATED, bundled, machine, model};
use anyhow::{Context, Result, anyhow, bail};
use engine::{Engine, EngineOptions};
use known::Known;
use load::{Described, Shared};
use server::kv_events::{EventEncoding, KvEvents, Publisher};
use server::{
    Config, Folder, Hosts, Keys, Limits, MediaSources, ModelConfig, Models, ModelsOptions,
    ServeError,
};
use std::collections::HashMap;
use std::ffi::OsString;
use std::io::{Read, Write as _};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;

/// Largest file of API keys.
const KEY_FILE_BYTES_MAX: u64 = 1 << 20;

/// Runs the command with the options of `args`, which `layered` and the command `line` have made.
pub(crate) fn run(
    args: &ServeArgs,
    layered: &Layered,
    line: &[OsString],
    output: OutputArgs,
) -> Result<ExitCode> {
    let mut keys = args.api_key.clone();
    if let Some(file) = &args.api_key_file {
        keys.extend(read_keys(file)?);
    }
    let config = Config {
        keys: Keys::new(&keys),
        allowed_origins: args.allow_origin.clone(),
        allowed_hosts: args.allow_host.clone(),
        insecure: args.insecure,
        strict_model_names: args.strict_model_names,
        media: media_sources(&args.media)?,
        limits: Limits {
            drain_timeout: Duration::from_secs(args.drain_timeout),
            connections: socket::connections(machine::open_files()),
            ..Limits::default()
        },
    };
    let known = known::all(args, layered, line)?;
    if args.dry_run {
        return dry_run(args, &known);
    }
    let traced = Traced::create(&args.trace)?;
    let runtime = runtime()?;
    let needs_key = !config.keys.is_empty();
    // From now on clients are answered, and told how far the model is.
    let listener = runtime.block_on(socket::listen(&args.host, args.port, &config))?;
    let address = listener.local_addr().context("the port has no address")?;
    let publisher = runtime.block_on(publisher(&args.kv_events))?;
    let shared = Arc::new(Shared::new(
        address,
        known.len() > 1,
        publisher,
        traced.clone(),
    ));
    let names: Vec<String> = known.iter().map(|known| known.names[0].clone()).collect();
    let specs = known.into_iter().map(|known| load::spec(known, &shared));
    let models = Models::new(specs.collect(), options(args));
    let mut server = Server {
        pid: std::process::id(),
        address,
        url: socket::url(address),
        model: names[0].clone(),
        models: names,
        context: 0,
        needs_key,
        started: servers::now(),
        drain_timeout: args.drain_timeout,
    };
    let registered = servers::register(&server);
    let ready = models.clone();
    let greeting = async move {
        if ready.ready().await.is_err() {
            // The server ends, and says why.
            return std::future::pending().await;
        }
        let lock = PoisonError::into_inner;
        let described = shared.described.lock().unwrap_or_else(lock).clone();
        if let Some(only) = described.get(&server.model) {
            server.context = only.context;
            servers::update(registered.as_ref(), &server);
        }
        if !output.quiet {
            greet(&server, &described);
        }
        // The file is there for as long as the server.
        std::future::pending::<()>().await;
        drop(registered);
    };
    let served = runtime.block_on(async {
        let stop = stop().context("cannot handle signals")?;
        let serve = server::serve(config, models, listener, stop);
        tokio::select! {
            served = serve => Ok::<_, anyhow::Error>(served),
            () = greeting => unreachable!("it waits for ever, or for a server that ends"),
        }
    })?;
    traced.finish();
    match served {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(ServeError::Load(reason)) => Err(anyhow!("{reason}")),
        Err(error) => Err(error).context("the server has stopped"),
    }
}

/// What requests may name instead of sending it.
fn media_sources(args: &MediaArgs) -> Result<MediaSources> {
    let hosts = Some(Hosts::parse(&args.allow_fetch)?).filter(|_| !args.allow_fetch.is_empty());
    let open = |path: &PathBuf| {
        Folder::open(path).with_context(|| format!("cannot use the folder `{}`", path.display()))
    };
    let folder = args.media_root.as_ref().map(open).transpose()?;
    Ok(MediaSources::new(hosts, folder))
}

/// How many models are loaded, and for how long.
fn options(args: &ServeArgs) -> ModelsOptions {
    let ModelsArgs {
        models_max,
        models_memory,
        idle_unload,
        ..
    } = args.models;
    ModelsOptions {
        max_loaded: models_max.map(NonZeroUsize::get),
        memory: models_memory,
        idle_unload: idle_unload.map(Duration::from_secs),
    }
}

/// Starts to publish events about prefix caches, if they are wanted.
async fn publisher(args: &KvEventsArgs) -> Result<Option<Publisher>> {
    let Some(endpoint) = args.endpoint.clone() else {
        return Ok(None);
    };
    let publisher = Publisher::start(KvEvents {
        endpoint,
        replay: args.replay.clone(),
        encoding: match args.encoding {
            KvEventsEncoding::Map => EventEncoding::Map,
            KvEventsEncoding::Array => EventEncoding::Array,
        },
    });
    Ok(Some(publisher.await?))
}

/// Says what would be served and what it would take; the port is not touched.
fn dry_run(args: &ServeArgs, known: &[Known]) -> Result<ExitCode> {
    let mut stdout = std::io::stdout().lock();
    for Known { what, args, .. } in known {
        let model = model::load(what, &args.load, &args.draft, args.parallel)?;
        let info = &model.info;
        let all = info.weight_bytes + info.drafter_weight_bytes + info.memory_bytes as u64;
        let machine = match machine::ram() {
            None => "this system does not say what it has".to_owned(),
            Some(ram) => format!(
                "this machine has {}: {}",
                model::bytes(ram.total),
                if all <= ram.total {
                    "fits"
                } else {
                    "does NOT fit"
                }
            ),
        };
        writeln!(stdout, "{}", model::describe(info))?;
        writeln!(
            stdout,
            "{} in all for {} requests at once; {machine}",
            model::bytes(all),
            info.sequences,
        )?;
    }
    writeln!(stdout, "would listen on {}:{}", args.host, args.port)?;
    Ok(ExitCode::SUCCESS)
}

/// Ends with the first signal; from then on another one ends the program.
fn stop() -> std::io::Result<impl Future<Output = ()> + Send + 'static> {
    let mut signals = Signals::new()?;
    Ok(async move {
        signals.recv().await;
        say!("paceline: finishing running requests; press Ctrl-C again to stop now");
        tokio::spawn(async move {
            let code = signals.recv().await;
            std::process::exit(code.into());
        });
    })
}

/// Ctrl-C, and where there is such a thing the request to terminate.
struct Signals {
    #[cfg(unix)]
    terminate: tokio::signal::unix::Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Signals {
            #[cfg(unix)]
            terminate: tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?,
        })
    }

    /// The exit code of the next signal.
    async fn recv(&mut self) -> u8 {
        #[cfg(unix)]
        let terminate = self.terminate.recv();
        #[cfg(not(unix))]
        let terminate = std::future::pending::<()>();
        tokio::select! {
            _ = tokio::signal::ctrl_c() => INTERRUPTED,
            _ = terminate => TERMINATED,
        }
    }
}

/// Says where the server is and how to try it; `described` are the models that are loaded.
fn greet(server: &Server, described: &HashMap<String, Described>) {
    let Server { url, models, .. } = server;
    for name in models {
        if let Some(model) = described.get(name) {
            say!("{}", model.lines);
        }
    }
    let has_several = models.len() > 1;
    if has_several {
        say!(
            "models, loaded when a request names them: {}",
            models.join(", ")
        );
    }
    say!("OpenAI base URL: {url}/v1");
    let key = if server.needs_key { "KEY" } else { "none" };
    let header = if server.needs_key {
        " -H 'Authorization: Bearer KEY'"
    } else {
        ""
    };
    let mut path = "chat/completions";
    let mut body = r#""messages": [{"role": "user", "content": "Tell me a story."}]"#.to_owned();
    let chats = described
        .get(&server.model)
        .map_or(Ok(()), |m| m.chats.clone());
    if let Err(why) = &chats {
        say!("{why}");
        (path, body) = ("completions", r#""prompt": "Once upon a time""#.to_owned());
    }
    if has_several {
        body = format!(r#""model": "{}", {body}"#, server.model);
    }
    say!(
        "curl:   curl {url}/v1/{path}{header} -H 'Content-Type: application/json' -d '{{{body}}}'"
    );
    say!("python: openai.OpenAI(base_url=\"{url}/v1\", api_key=\"{key}\")");
    if chats.is_ok() {
        say!("page:   {url}/");
        say!(
            "claude: ANTHROPIC_BASE_URL={url} ANTHROPIC_AUTH_TOKEN={key} claude, or `paceline launch claude`"
        );
    }
}

/// A server that runs in this process beside something else.
pub(crate) struct Background {
    /// Where it is reached, without a path.
    pub(crate) url: String,
    /// The name of its model.
    pub(crate) model: String,
    /// Tokens that prompt and answer may have.
    pub(crate) context: usize,
    stop: oneshot::Sender<()>,
    thread: JoinHandle<Result<(), server::ServeError>>,
}

impl Background {
    /// Ends the server, with what it is writing.
    pub(crate) fn stop(self) -> Result<()> {
        // A server that has ended by itself listens no more.
        let _ = self.stop.send(());
        let ended = self.thread.join();
        ended
            .map_err(|_| anyhow!("the server has panicked"))?
            .context("the server has stopped")
    }
}

/// Loads a model and serves it on a free port of the loopback address, without a key.
///
/// # Errors
///
/// If the model cannot be loaded, or there is no port.
pub(crate) fn background(args: &LaunchArgs) -> Result<Background> {
    let parallel = 4;
    let name = args.model.as_deref().unwrap_or(bundled::DEFAULT);
    let model = model::load(name, &args.load, &args.draft, parallel)?;
    model::check_chats(&model.text)?;
    let engine = Arc::new(Engine::start(model, EngineOptions::default()));
    let config = Config {
        limits: Limits {
            drain_timeout: Duration::ZERO,
            connections: socket::connections(machine::open_files()),
            ..Limits::default()
        },
        ..Config::default()
    };
    let runtime = runtime()?;
    let listener = runtime.block_on(socket::listen("127.0.0.1", 0, &config))?;
    let address = listener.local_addr().context("the port has no address")?;
    let (name, context) = (engine.info().name.clone(), engine.info().context);
    let (stop, stopped) = oneshot::channel();
    let thread = thread::spawn(move || {
        let stopped = async move {
            let _ = stopped.await;
        };
        runtime.block_on(server::serve(
            config,
            Models::one(engine, ModelConfig::default()),
            listener,
            stopped,
        ))
    });
    Ok(Background {
        url: socket::url(address),
        model: name,
        context,
        stop,
        thread,
    })
}

/// The threads that serve.
fn runtime() -> Result<Runtime> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.enable_all().build().context("cannot start threads")
}

/// The keys in a file, a line each; `#` begins a comment.
fn read_keys(path: &Path) -> Result<Vec<String>> {
    let cannot = || format!("cannot read `{}`", path.display());
    let mut text = String::new();
    let file = std::fs::File::open(path).with_context(cannot)?;
    file.take(KEY_FILE_BYTES_MAX + 1)
        .read_to_string(&mut text)
        .with_context(cannot)?;
    if text.len() as u64 > KEY_FILE_BYTES_MAX {
        bail!(
            "a file of API keys has at most {KEY_FILE_BYTES_MAX} bytes, there are more in `{}`",
            path.display()
        );
    }
    let keys: Vec<String> = text
        .lines()
        .map(str::trim)
        .filter(|l| !l.is_empty() && !l.starts_with('#'))
        .map(str::to_owned)
        .collect();
    // An empty file would open the server to everyone who can reach it.
    if keys.is_empty() {
        bail!("there is no API key in `{}`", path.display());
    }
    Ok(keys)
}

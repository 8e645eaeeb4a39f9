//! `paceline serve`: the API on a port.
//!
//! The async runtime is started here and nowhere else. The first signal stops
//! taking requests and lets the running ones finish; a second ends the program.

use crate::args::{KvEventsArgs, KvEventsEncoding, LaunchArgs, MediaArgs, OutputArgs, ServeArgs};
use crate::servers::{self, Server};
use crate::{INTERRUPTED, TERMINATED, bundled, machine, model, templates};
use anyhow::{Context, Result, anyhow, bail};
use engine::{CacheFolder, Engine, EngineOptions, PageSink};
use server::kv_events::{EventEncoding, KvEvents, Publisher};
use server::{Config, Folder, Hosts, Keys, Limits, MediaSources};
use std::io::{Read, Write as _};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;
use tokio::net::{TcpListener, TcpSocket};
use tokio::runtime::Runtime;
use tokio::sync::oneshot;

/// Largest file of API keys.
const KEY_FILE_BYTES_MAX: u64 = 1 << 20;

/// Connections that may wait to be taken.
const BACKLOG: u32 = 1024;

/// Open files that are no connection: the model's, the runtime's, a GPU's.
const OTHER_FILES: usize = 64;

/// Runs the command.
pub(crate) fn run(mut args: ServeArgs, output: OutputArgs) -> Result<ExitCode> {
    let mut keys = args.api_key.clone();
    if let Some(file) = &args.api_key_file {
        keys.extend(read_keys(file)?);
    }
    let config = Config {
        keys: Keys::new(&keys),
        allowed_origins: args.allow_origin.clone(),
        allowed_hosts: args.allow_host.clone(),
        insecure: args.insecure,
        model_names: args.alias.clone(),
        strict_model_names: args.strict_model_names,
        whole_assistant_turns: args.no_prefill_assistant,
        reasoning: args.reasoning.default_of_requests(),
        media: media_sources(&args.media)?,
        pooling: args.pooling,
        limits: Limits {
            drain_timeout: Duration::from_secs(args.drain_timeout),
            connections: connections(machine::open_files()),
            ..Limits::default()
        },
    };
    if let Some(template) = &args.chat_template {
        args.load.chat_template = Some(templates::source(template)?);
    }
    args.load.kv_memory = args.kv_memory;
    if args.dry_run {
        return dry_run(&args);
    }
    let disk = cache_folder(&args)?;
    args.load.identify = disk.is_some();
    let runtime = runtime()?;
    let needs_key = !config.keys.is_empty();
    // Before the model is loaded: a port that is taken should not cost a minute to find out. It
    // refuses connections until there is somebody to answer.
    let socket = runtime.block_on(claim(&args.host, args.port, &config))?;
    let address = socket.local_addr().context("the port has no address")?;
    let model = model::load(&args.model.model, &args.load, &args.draft, args.parallel)?;
    let name = args.alias.first().unwrap_or(&model.info.name).clone();
    let options = EngineOptions {
        queue: args.queue,
        reuse: !args.no_prefix_cache,
        page_sink: runtime.block_on(page_sink(&args.kv_events, address, &name))?,
        disk,
    };
    let engine = Arc::new(Engine::start(model, options));
    let listener = listen(&runtime, socket)?;
    let url = url(address);
    let _registered = servers::register(&Server {
        pid: std::process::id(),
        address,
        url: url.clone(),
        model: name,
        context: engine.info().context,
        needs_key,
        started: servers::now(),
        drain_timeout: args.drain_timeout,
    });
    if !output.quiet {
        greet(&engine, &url, needs_key);
    }
    let served = engine.clone();
    runtime.block_on(async {
        let stop = stop().context("cannot handle signals")?;
        server::serve(config, served, listener, stop)
            .await
            .context("the server has stopped")
    })?;
    engine.stop();
    Ok(ExitCode::SUCCESS)
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

/// Starts to publish events about the prefix cache, if they are wanted.
async fn page_sink(
    args: &KvEventsArgs,
    address: SocketAddr,
    model: &str,
) -> Result<Option<PageSink>> {
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
    let topic = args.topic.clone();
    let topic = topic.unwrap_or_else(|| format!("kv@{address}@{model}"));
    Ok(Some(publisher.await?.sink(&topic)))
}

/// The folder in which the prefix cache outlives the server, if there is to be one.
fn cache_folder(args: &ServeArgs) -> Result<Option<CacheFolder>> {
    let folder = args.cache_dir.as_ref().filter(|_| !args.no_prefix_cache);
    let open = |path: &PathBuf| {
        let opened = CacheFolder::open(path, args.cache_disk);
        opened.with_context(|| {
            format!(
                "cannot use the folder of the prefix cache `{}`",
                path.display()
            )
        })
    };
    folder.map(open).transpose()
}

/// Connections where a program may have so many open files; a connection takes one.
fn connections(files: Option<usize>) -> usize {
    let most = Limits::default().connections;
    let room = |files: usize| files.saturating_sub(OTHER_FILES).max(files / 2).max(1);
    files.map_or(most, |files| most.min(room(files)))
}

/// Says what would be served and what it would take; the port is not touched.
fn dry_run(args: &ServeArgs) -> Result<ExitCode> {
    let model = model::load(&args.model.model, &args.load, &args.draft, args.parallel)?;
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
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{}", model::describe(info))?;
    writeln!(
        stdout,
        "{} in all for {} requests at once; {machine}\nwould listen on {}:{}",
        model::bytes(all),
        info.sequences,
        args.host,
        args.port
    )?;
    Ok(ExitCode::SUCCESS)
}

/// Takes a port, on which nobody listens yet.
async fn claim(host: &str, port: u16, config: &Config) -> Result<TcpSocket> {
    let bind = || format!("cannot listen on {host}:{port}");
    let addresses: Vec<SocketAddr> = tokio::net::lookup_host((host, port))
        .await
        .with_context(bind)?
        .collect();
    for &address in &addresses {
        server::check_bind(config, address)?;
    }
    let mut claimed = Err(std::io::ErrorKind::AddrNotAvailable.into());
    for &address in &addresses {
        claimed = claim_address(address);
        if claimed.is_ok() {
            break;
        }
    }
    claimed.with_context(bind)
}

fn claim_address(address: SocketAddr) -> std::io::Result<TcpSocket> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    // Connections of a server that has just ended must not keep the next one from its port. On
    // Windows this would let two servers share it.
    #[cfg(unix)]
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    Ok(socket)
}

/// Takes connections from now on.
fn listen(runtime: &Runtime, socket: TcpSocket) -> Result<TcpListener> {
    let listener = runtime.block_on(async { socket.listen(BACKLOG) });
    listener.context("cannot listen on the port: another server may have taken it meanwhile")
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

/// The URL under which this machine reaches a server, without a path.
fn url(address: SocketAddr) -> String {
    // What listens everywhere is reached here under the loopback address.
    let host = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => "127.0.0.1".to_owned(),
        IpAddr::V6(ip) if ip.is_unspecified() => "[::1]".to_owned(),
        IpAddr::V4(ip) => ip.to_string(),
        IpAddr::V6(ip) => format!("[{ip}]"),
    };
    format!("http://{host}:{}", address.port())
}

/// Says where the server is and how to try it.
fn greet(engine: &Engine, url: &str, needs_key: bool) {
    say!("{}", model::describe(engine.info()));
    say!("OpenAI base URL: {url}/v1");
    let key = if needs_key { "KEY" } else { "none" };
    let header = if needs_key {
        " -H 'Authorization: Bearer KEY'"
    } else {
        ""
    };
    let mut path = "chat/completions";
    let mut body = r#""messages": [{"role": "user", "content": "Tell me a story."}]"#;
    let chats = model::check_chats(engine.text());
    if let Err(why) = &chats {
        say!("{why}");
        (path, body) = ("completions", r#""prompt": "Once upon a time""#);
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
            connections: connections(machine::open_files()),
            ..Limits::default()
        },
        ..Config::default()
    };
    let runtime = runtime()?;
    let socket = runtime.block_on(claim("127.0.0.1", 0, &config))?;
    let listener = listen(&runtime, socket)?;
    let address = listener.local_addr().context("the port has no address")?;
    let (name, context) = (engine.info().name.clone(), engine.info().context);
    let (stop, stopped) = oneshot::channel();
    let thread = thread::spawn(move || {
        let stopped = async move {
            let _ = stopped.await;
        };
        runtime.block_on(server::serve(config, engine, listener, stopped))
    });
    Ok(Background {
        url: url(address),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_refuses_connections_until_the_server_is_ready() {
        let runtime = runtime().unwrap();
        let config = Config::default();
        let claim = |port| runtime.block_on(claim("127.0.0.1", port, &config));
        let socket = claim(0).unwrap();
        let address = socket.local_addr().unwrap();
        assert!(std::net::TcpStream::connect(address).is_err());
        let listener = listen(&runtime, socket).unwrap();
        assert!(std::net::TcpStream::connect(address).is_ok());
        let error = claim(address.port()).unwrap_err();
        assert!(format!("{error}").contains("cannot listen on 127.0.0.1"));
        drop(listener);
        assert!(claim(address.port()).is_ok());
    }

    #[test]
    fn connections_leave_room_for_other_files() {
        let most = Limits::default().connections;
        assert_eq!(connections(None), most);
        assert_eq!(connections(Some(1 << 20)), most);
        assert_eq!(connections(Some(1024)), 960);
        assert_eq!(connections(Some(64)), 32);
        assert_eq!(connections(Some(0)), 1);
    }
}

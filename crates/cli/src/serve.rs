//! `paceline serve`: the API on a port.
//!
//! The async runtime is started here and nowhere else. The first signal stops
//! taking requests and lets the running ones finish; a second ends the program.

use crate::args::{OutputArgs, ServeArgs};
use crate::{INTERRUPTED, TERMINATED, machine, model, templates};
use anyhow::{Context, Result, bail};
use engine::{Engine, EngineOptions};
use server::{Config, Keys, Limits};
use std::io::{Read, Write as _};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;

/// Largest file of API keys.
const KEY_FILE_BYTES_MAX: u64 = 1 << 20;

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
        limits: Limits {
            drain_timeout: Duration::from_secs(args.drain_timeout),
            connections: connections(machine::open_files()),
            ..Limits::default()
        },
    };
    if let Some(template) = &args.chat_template {
        args.load.chat_template = Some(templates::source(template)?);
    }
    if args.dry_run {
        return dry_run(&args);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("cannot start threads")?;
    let needs_key = !config.keys.is_empty();
    // Bound before the model is loaded: a port that is taken should not cost a minute to find out.
    let listener = runtime.block_on(listen(&args.host, args.port, &config))?;
    let address = listener.local_addr().context("the port has no address")?;
    let model = model::load(&args.model.model, &args.load, &args.draft, args.parallel)?;
    let options = EngineOptions {
        queue: args.queue,
        reuse: !args.no_prefix_cache,
    };
    let engine = Arc::new(Engine::start(model, options));
    if !output.quiet {
        greet(&engine, address, needs_key);
    }
    runtime.block_on(async {
        let stop = stop().context("cannot handle signals")?;
        server::serve(config, engine, listener, stop)
            .await
            .context("the server has stopped")
    })?;
    Ok(ExitCode::SUCCESS)
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

async fn listen(host: &str, port: u16, config: &Config) -> Result<TcpListener> {
    let bind = || format!("cannot listen on {host}:{port}");
    let addresses: Vec<SocketAddr> = tokio::net::lookup_host((host, port))
        .await
        .with_context(bind)?
        .collect();
    for &address in &addresses {
        server::check_bind(config, address)?;
    }
    TcpListener::bind(&addresses[..]).await.with_context(bind)
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

/// Says where the server is and how to try it.
fn greet(engine: &Engine, address: SocketAddr, needs_key: bool) {
    let info = engine.info();
    // What listens everywhere is reached here under the loopback address.
    let host = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => "127.0.0.1".to_owned(),
        IpAddr::V6(ip) if ip.is_unspecified() => "[::1]".to_owned(),
        IpAddr::V4(ip) => ip.to_string(),
        IpAddr::V6(ip) => format!("[{ip}]"),
    };
    let base = format!("http://{host}:{}", address.port());
    let key = if needs_key {
        " -H 'Authorization: Bearer KEY'"
    } else {
        ""
    };
    say!("{}", model::describe(info));
    say!("OpenAI base URL: {base}/v1");
    let mut path = "chat/completions";
    let mut body = r#""messages": [{"role": "user", "content": "Tell me a story."}]"#;
    if let Err(why) = model::check_chats(engine.text()) {
        say!("{why}");
        (path, body) = ("completions", r#""prompt": "Once upon a time""#);
    }
    say!("try: curl {base}/v1/{path}{key} -H 'Content-Type: application/json' -d '{{{body}}}'");
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
    fn connections_leave_room_for_other_files() {
        let most = Limits::default().connections;
        assert_eq!(connections(None), most);
        assert_eq!(connections(Some(1 << 20)), most);
        assert_eq!(connections(Some(1024)), 960);
        assert_eq!(connections(Some(64)), 32);
        assert_eq!(connections(Some(0)), 1);
    }
}

//! Which servers of this user run: `serve` leaves a file for each, `ps`, `stop` and `launch` read
//! them.
//!
//! ```text
//! $XDG_STATE_HOME/paceline/servers/PID.json
//! ```
//!
//! A file is removed by the server that wrote it, or by the next reader if that server is gone.

use crate::args::{OutputArgs, PsArgs, StopArgs};
use crate::places;
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::fs;
use std::io::{self, Read, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How long a server may take to say how it is.
const PATIENCE: Duration = Duration::from_secs(2);
/// The time between two looks at whether a server has ended.
const POLL: Duration = Duration::from_millis(50);

/// A server that runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Server {
    /// The process.
    pub(crate) pid: u32,
    /// Where it listens.
    pub(crate) address: SocketAddr,
    /// The URL under which this machine reaches it, without a path.
    pub(crate) url: String,
    /// The name of its model, of the first if it has several.
    pub(crate) model: String,
    /// The names of all of its models.
    #[serde(default)]
    pub(crate) models: Vec<String>,
    /// Tokens that prompt and answer may have; 0 while that is not known.
    pub(crate) context: usize,
    /// Whether it asks for an API key.
    pub(crate) needs_key: bool,
    /// When it began to serve, in seconds since 1970.
    pub(crate) started: u64,
    /// Seconds that its requests get to finish.
    pub(crate) drain_timeout: u64,
}

/// The file of a server, which goes with this value.
pub(crate) struct Registered(PathBuf);

impl Drop for Registered {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// The folder of the files.
fn folder() -> Option<PathBuf> {
    Some(places::state()?.join("servers"))
}

/// Tells other commands of a server; `None` if there is no place to.
pub(crate) fn register(server: &Server) -> Option<Registered> {
    let folder = folder()?;
    fs::create_dir_all(&folder).ok()?;
    let path = folder.join(format!("{}.json", server.pid));
    write(&path, server)?;
    Some(Registered(path))
}

/// Tells other commands what has changed of a server.
pub(crate) fn update(registered: Option<&Registered>, server: &Server) {
    // A file that cannot be written stays as it is.
    let _ = registered.and_then(|Registered(path)| write(path, server));
}

fn write(path: &Path, server: &Server) -> Option<()> {
    // Readers never see half of a file.
    let part = path.with_extension("part");
    fs::write(&part, serde_json::to_vec(server).ok()?).ok()?;
    fs::rename(&part, path).ok()
}

/// Now, in seconds since 1970.
pub(crate) fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or_default().as_secs()
}

/// Every server that runs, the oldest first, with what it says of itself.
pub(crate) fn running() -> Vec<(Server, State)> {
    let files = folder().and_then(|folder| fs::read_dir(folder).ok());
    let mut servers = Vec::new();
    for file in files.into_iter().flatten().flatten() {
        let path = file.path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let server = fs::read(&path).ok();
        let server = server.and_then(|text| serde_json::from_slice::<Server>(&text).ok());
        match server.map(|server| (ask(&server), server)) {
            Some((Some(state), server)) => servers.push((server, state)),
            // Nobody answers there any more, or the file is no server's.
            _ => {
                let _ = fs::remove_file(&path);
            }
        }
    }
    servers.sort_by_key(|(server, _)| (server.started, server.pid));
    servers
}

/// What a server says of itself at `/health`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct State(String);

impl State {
    /// The state of a server that takes connections and is too busy to say more.
    fn no_answer() -> State {
        State("no answer".to_owned())
    }
}

/// Asks a server how it is; `None` if there is none at its address.
fn ask(server: &Server) -> Option<State> {
    let address = match server.address {
        all if all.ip().is_unspecified() => {
            let mut here = all;
            here.set_ip(match all.is_ipv4() {
                true => std::net::Ipv4Addr::LOCALHOST.into(),
                false => std::net::Ipv6Addr::LOCALHOST.into(),
            });
            here
        }
        one => one,
    };
    let text = match health(address) {
        Ok(text) => text,
        Err(error) if is_late(&error) => return Some(State::no_answer()),
        Err(_) => return None,
    };
    let (_, body) = text.split_once("\r\n\r\n")?;
    let document: serde_json::Value = serde_json::from_str(body).ok()?;
    Some(State(document["status"].as_str()?.to_owned()))
}

/// What the server at `address` answers to a request for its health.
fn health(address: SocketAddr) -> io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(format!("GET /health HTTP/1.0\r\nHost: {address}\r\n\r\n").as_bytes())?;
    let mut text = String::new();
    stream.take(1 << 16).read_to_string(&mut text)?;
    Ok(text)
}

/// Whether `error` is that an answer took too long; which of the two kinds that is depends on the system.
fn is_late(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
    )
}

/// Runs `paceline ps`.
pub(crate) fn list(args: &PsArgs) -> Result<ExitCode> {
    let servers = running();
    let mut stdout = std::io::stdout().lock();
    if args.json {
        let all: Vec<_> = servers
            .iter()
            .map(|(server, state)| {
                let mut entry = json!(server);
                entry["status"] = json!(state.0);
                entry
            })
            .collect();
        writeln!(stdout, "{}", json!({ "servers": all }))?;
        return Ok(ExitCode::SUCCESS);
    }
    if servers.is_empty() {
        say!("no server runs; `paceline serve` starts one");
        return Ok(ExitCode::SUCCESS);
    }
    writeln!(
        stdout,
        "{:<9}{:<10}{:<9}{:<28}MODEL",
        "PID", "STATUS", "UP", "URL"
    )?;
    for (server, State(status)) in servers {
        let up = duration(now().saturating_sub(server.started));
        let model = server.models.join(", ");
        let model = if model.is_empty() {
            server.model
        } else {
            model
        };
        let Server { pid, url, .. } = server;
        writeln!(stdout, "{pid:<9}{status:<10}{up:<9}{url:<28}{model}")?;
    }
    Ok(ExitCode::SUCCESS)
}

/// A time for people, in its largest unit.
fn duration(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min", seconds / 60),
        3600..86400 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86400),
    }
}

/// Runs `paceline stop`.
pub(crate) fn stop(args: &StopArgs, output: OutputArgs) -> Result<ExitCode> {
    let running = running();
    let silent: Vec<u32> = running
        .iter()
        .filter(|(_, state)| *state == State::no_answer())
        .map(|(server, _)| server.pid)
        .collect();
    let servers: Vec<Server> = running.into_iter().map(|(server, _)| server).collect();
    let chosen = match (&args.servers[..], args.all) {
        (_, true) => servers,
        ([], false) => match servers.len() {
            0 => bail!("no server runs"),
            1 => servers,
            n => bail!("{n} servers run: name one by its process, port or model, or use --all"),
        },
        (names, false) => named(names, &servers)?,
    };
    for server in chosen {
        // The process could be another's by now, and what holds the port too.
        if silent.contains(&server.pid) {
            bail!(
                "{} does not answer: try again, or end the process {} yourself",
                server.url,
                server.pid
            );
        }
        terminate(&server)?;
        let Server { pid, url, .. } = &server;
        let limit = Duration::from_secs(server.drain_timeout) + PATIENCE;
        if !has_ended(&server, limit) {
            bail!("the server {pid} at {url} is still finishing requests");
        }
        if !output.quiet {
            say!("stopped {} at {url}", server.model);
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The servers that are called by process, port, URL or model.
fn named(names: &[String], servers: &[Server]) -> Result<Vec<Server>> {
    let mut chosen: Vec<Server> = Vec::new();
    for name in names {
        let is_meant = |server: &&Server| {
            let number = name.parse();
            number == Ok(server.pid)
                || number == Ok(server.address.port().into())
                || *name == server.url
                || *name == server.model
                || server.models.contains(name)
        };
        let found: Vec<&Server> = servers.iter().filter(is_meant).collect();
        match found[..] {
            [one] if chosen.contains(one) => {}
            [one] => chosen.push(one.clone()),
            [] => bail!(
                "no server has this process, port or model: `{name}`; `paceline ps` lists them"
            ),
            _ => bail!("several servers are meant, name one by its process: `{name}`"),
        }
    }
    Ok(chosen)
}

/// Asks a server to finish what it does and end.
#[cfg(unix)]
fn terminate(server: &Server) -> Result<()> {
    use rustix::process::{Pid, Signal, kill_process};
    let pid = i32::try_from(server.pid).ok().and_then(Pid::from_raw);
    let pid = pid.context("a server's file has no process")?;
    kill_process(pid, Signal::TERM)
        .with_context(|| format!("cannot stop the server `{}`", server.pid))
}

/// Asks a server to finish what it does and end.
#[cfg(not(unix))]
fn terminate(_: &Server) -> Result<()> {
    bail!("this system has no signal for that: press Ctrl-C where the server runs")
}

/// Waits until nobody answers at a server's address; `false` if that takes longer than `limit`.
fn has_ended(server: &Server, limit: Duration) -> bool {
    let start = Instant::now();
    while ask(server).is_some() {
        if start.elapsed() > limit {
            return false;
        }
        thread::sleep(POLL);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(pid: u32, port: u16, model: &str) -> Server {
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        Server {
            pid,
            address,
            url: format!("http://{address}"),
            model: model.into(),
            models: vec![model.into(), format!("{model}-2")],
            context: 8192,
            needs_key: false,
            started: 0,
            drain_timeout: 30,
        }
    }

    #[test]
    fn servers_are_named_by_process_port_address_and_model() {
        let servers = [
            server(10, 8080, "a"),
            server(11, 8081, "b"),
            server(12, 8082, "b"),
        ];
        let find = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
            named(&names, &servers).map(|found| found.iter().map(|s| s.pid).collect::<Vec<_>>())
        };
        assert_eq!(find(&["10"]).unwrap(), [10]);
        assert_eq!(find(&["8081", "a"]).unwrap(), [11, 10]);
        assert_eq!(find(&["http://127.0.0.1:8082", "12"]).unwrap(), [12]);
        assert_eq!(find(&["a-2"]).unwrap(), [10]);
        assert!(find(&["b"]).unwrap_err().to_string().contains("several"));
        assert!(find(&["c"]).unwrap_err().to_string().contains("`c`"));
    }

    #[test]
    fn a_server_that_does_not_answer_is_told_from_none() {
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = silent.local_addr().unwrap().port();
        assert_eq!(ask(&server(10, port, "a")), Some(State::no_answer()));
        drop(silent);
        // A process that another test starts may hold the port a little longer.
        let start = Instant::now();
        while ask(&server(10, port, "a")).is_some() {
            assert!(start.elapsed().as_secs() < 60, "nobody listens");
        }
    }

    #[test]
    fn times_have_one_unit() {
        let said = [0, 59, 60, 7199, 86_400].map(duration);
        assert_eq!(said, ["0 s", "59 s", "1 min", "1 h", "1 d"]);
    }
}

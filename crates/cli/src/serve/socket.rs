//! The port that a server listens on.

use anyhow::{Context, Result};
use server::{Config, Limits};
use std::net::{IpAddr, SocketAddr};
use tokio::net::{TcpListener, TcpSocket};

/// Connections that may wait to be taken.
const BACKLOG: u32 = 1024;

/// Open files that are no connection: the model's, the runtime's, a GPU's.
const OTHER_FILES: usize = 64;

/// Connections where a program may have so many open files; a connection takes one.
pub(super) fn connections(files: Option<usize>) -> usize {
    let most = Limits::default().connections;
    let room = |files: usize| files.saturating_sub(OTHER_FILES).max(files / 2).max(1);
    files.map_or(most, |files| most.min(room(files)))
}

/// Takes a port, and connections from then on.
pub(super) async fn listen(host: &str, port: u16, config: &Config) -> Result<TcpListener> {
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
        claimed = claim(address);
        if claimed.is_ok() {
            break;
        }
    }
    claimed.with_context(bind)
}

fn claim(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    // Connections of a server that has just ended must not keep the next one from its port. On
    // Windows this would let two servers share it.
    #[cfg(unix)]
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// The URL under which this machine reaches a server, without a path.
pub(super) fn url(address: SocketAddr) -> String {
    // What listens everywhere is reached here under the loopback address.
    let host = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => "127.0.0.1".to_owned(),
        IpAddr::V6(ip) if ip.is_unspecified() => "[::1]".to_owned(),
        IpAddr::V4(ip) => ip.to_string(),
        IpAddr::V6(ip) => format!("[{ip}]"),
    };
    format!("http://{host}:{}", address.port())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn a_port_is_taken_once() {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let config = Config::default();
        let listen = |port| runtime.block_on(listen("127.0.0.1", port, &config));
        let listener = listen(0).unwrap();
        let address = listener.local_addr().unwrap();
        assert!(std::net::TcpStream::connect(address).is_ok());
        let error = listen(address.port()).unwrap_err();
        assert!(format!("{error}").contains("cannot listen on 127.0.0.1"));
        drop(listener);
        // A process that another test starts at this moment holds a copy of the socket until it
        // runs its own program.
        let ends = Instant::now() + Duration::from_secs(30);
        while let Err(error) = listen(address.port()) {
            assert!(Instant::now() < ends, "{error:#}");
            std::thread::sleep(Duration::from_millis(10));
        }
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

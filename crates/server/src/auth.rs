//! Who may ask: API keys, Host names, origins of web pages.
//!
//! Three different threats. A key keeps out strangers on the network. The Host
//! list keeps out web pages that had their own name resolved to this machine
//! (DNS rebinding). The origin list keeps out web pages that talk to this
//! machine under its right name.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use axum::http::{HeaderMap, Request, Version, header};
use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};

use crate::errors::ApiError;
use crate::{Config, ServeError};

/// Name of the header that Anthropic's clients send a key in.
const X_API_KEY: &str = "x-api-key";

/// The API keys of a server, as hashes. None means that everyone may ask.
#[derive(Clone, Default)]
pub struct Keys(Vec<[u8; 32]>);

impl Keys {
    /// Keeps the hashes of `keys`; empty ones are left out.
    pub fn new<S: AsRef<str>>(keys: impl IntoIterator<Item = S>) -> Self {
        let keys = keys.into_iter();
        let hash = |key: S| {
            let key = key.as_ref().trim();
            (!key.is_empty()).then(|| Sha256::digest(key.as_bytes()).into())
        };
        Keys(keys.filter_map(hash).collect())
    }

    /// Whether there is no key.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether `key` is one of these.
    ///
    /// The time does not depend on how much of a key is right: hashes of equal
    /// length are compared in constant time, and all of them always.
    pub fn contains(&self, key: &[u8]) -> bool {
        let hash: [u8; 32] = Sha256::digest(key).into();
        let found = self.0.iter().fold(Choice::from(0), |found, known| {
            found | known.as_slice().ct_eq(&hash)
        });
        found.into()
    }
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} keys", self.0.len())
    }
}

/// Refuses to serve the network without a key.
///
/// # Errors
///
/// [`ServeError::OpenToTheNetwork`] if `address` is not a loopback address,
/// there is no key and `insecure` is not set.
pub fn check_bind(config: &Config, address: SocketAddr) -> Result<(), ServeError> {
    if address.ip().is_loopback() || !config.keys.is_empty() || config.insecure {
        return Ok(());
    }
    Err(ServeError::OpenToTheNetwork { address })
}

/// Checks the key of a request, in either of the two headers.
pub(crate) fn check_key(keys: &Keys, headers: &HeaderMap) -> Result<(), ApiError> {
    if keys.is_empty() {
        return Ok(());
    }
    let bearer = headers
        .get(header::AUTHORIZATION)
        .and_then(|value| bearer(value.as_bytes()));
    let plain = headers.get(X_API_KEY).map(|value| value.as_bytes());
    let is_known = [bearer, plain]
        .into_iter()
        .flatten()
        .any(|key| keys.contains(key));
    if is_known {
        Ok(())
    } else {
        Err(ApiError::unauthorized())
    }
}

/// The credentials of `Bearer KEY`; the scheme's case does not matter.
fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, key) = value.split_at_checked(7)?;
    scheme
        .eq_ignore_ascii_case(b"bearer ")
        .then(|| key.trim_ascii())
}

/// Checks that a request was meant for this server.
///
/// Names of the loopback interface and configured names pass; addresses pass on
/// a server that listens on the network, since only a name can be rebound.
pub(crate) fn check_host<B>(
    config: &Config,
    local: SocketAddr,
    request: &Request<B>,
) -> Result<(), ApiError> {
    let (uri, headers) = (request.uri(), request.headers());
    let mut hosts = headers.get_all(header::HOST).iter();
    let (host, more) = (hosts.next(), hosts.next());
    let host = match (host.map(|value| value.to_str()), more) {
        (Some(Ok(host)), None) => host,
        // HTTP/1.0 knows no Host header, and no browser speaks it.
        (None, None) if uri.authority().is_none() && request.version() < Version::HTTP_11 => {
            return Ok(());
        }
        _ => return Err(ApiError::host()),
    };
    let is_known = |authority: &str| {
        let name = host_of(authority);
        is_loopback_name(name)
            || config
                .allowed_hosts
                .iter()
                .any(|allowed| allowed == "*" || allowed.eq_ignore_ascii_case(name))
            || !local.ip().is_loopback() && address_of(name).is_some()
    };
    // An absolute request target names a host of its own.
    let target = uri.authority().is_none_or(|a| is_known(a.as_str()));
    if target && is_known(host) {
        Ok(())
    } else {
        Err(ApiError::host())
    }
}

/// The host of `host[:port]`.
fn host_of(authority: &str) -> &str {
    if authority.starts_with('[') {
        return authority
            .find(']')
            .map_or(authority, |end| &authority[..=end]);
    }
    authority
        .split_once(':')
        .map_or(authority, |(host, _)| host)
}

fn is_loopback_name(name: &str) -> bool {
    let name = name.strip_suffix('.').unwrap_or(name);
    name.eq_ignore_ascii_case("localhost")
        || address_of(name).is_some_and(|address| address.is_loopback())
}

fn address_of(name: &str) -> Option<IpAddr> {
    let bare = name.strip_prefix('[').and_then(|n| n.strip_suffix(']'));
    bare.unwrap_or(name).parse().ok()
}

/// What the Origin header of a request means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// There is none, or it is this server's own.
    Same,
    /// A page of a configured origin.
    Allowed,
}

/// Checks that a web page may ask: its origin is this server's, or configured.
pub(crate) fn check_origin(config: &Config, headers: &HeaderMap) -> Result<Origin, ApiError> {
    let Some(origin) = headers.get(header::ORIGIN) else {
        return Ok(Origin::Same);
    };
    let origin = origin.to_str().map_err(|_| ApiError::origin())?;
    let is_allowed = |allowed: &String| allowed == "*" || allowed.eq_ignore_ascii_case(origin);
    if config.allowed_origins.iter().any(is_allowed) {
        return Ok(Origin::Allowed);
    }
    let host = headers
        .get(header::HOST)
        .and_then(|host| host.to_str().ok());
    let own = origin
        .strip_prefix("http://")
        .or_else(|| origin.strip_prefix("https://"));
    match (own, host) {
        (Some(own), Some(host)) if own.eq_ignore_ascii_case(host) => Ok(Origin::Same),
        _ => Err(ApiError::origin()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    fn headers(list: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in list {
            headers.append(*name, HeaderValue::from_str(value).unwrap());
        }
        headers
    }

    #[test]
    fn a_key_opens_in_either_header_and_nothing_else_does() {
        let keys = Keys::new(["one", " two ", ""]);
        assert_eq!(format!("{keys:?}"), "2 keys");
        for good in [
            ("authorization", "Bearer one"),
            ("authorization", "bearer two"),
            ("x-api-key", "one"),
        ] {
            assert!(check_key(&keys, &headers(&[good])).is_ok(), "{good:?}");
        }
        for bad in [
            ("authorization", "one"),
            ("authorization", "Bearer"),
            ("authorization", "Bearer "),
            ("authorization", "Basic one"),
            ("x-api-key", ""),
            ("x-api-key", "on"),
            ("x-api-key", "onee"),
            ("cookie", "one"),
        ] {
            assert!(check_key(&keys, &headers(&[bad])).is_err(), "{bad:?}");
        }
        assert!(check_key(&keys, &headers(&[])).is_err());
        assert!(check_key(&Keys::default(), &headers(&[])).is_ok());
    }

    #[test]
    fn only_loopback_may_be_served_without_a_key() {
        let mut config = Config::default();
        assert!(check_bind(&config, "127.0.0.1:80".parse().unwrap()).is_ok());
        assert!(check_bind(&config, "[::1]:80".parse().unwrap()).is_ok());
        for open in ["0.0.0.0:80", "[::]:80", "192.168.0.2:80"] {
            assert!(check_bind(&config, open.parse().unwrap()).is_err());
        }
        config.insecure = true;
        assert!(check_bind(&config, "0.0.0.0:80".parse().unwrap()).is_ok());
        config.insecure = false;
        config.keys = Keys::new(["k"]);
        assert!(check_bind(&config, "0.0.0.0:80".parse().unwrap()).is_ok());
    }

    #[test]
    fn hosts_that_are_not_ours_are_refused() {
        let config = Config {
            allowed_hosts: vec!["box.lan".into()],
            ..Config::default()
        };
        let passes = |local: &str, target: &str, version: Version, hosts: &[&str]| {
            let mut request = Request::get(target).version(version);
            for host in hosts {
                request = request.header(header::HOST, *host);
            }
            let request = request.body(()).unwrap();
            check_host(&config, local.parse().unwrap(), &request).is_ok()
        };
        let check = |local: &str, target: &str, host: &str| {
            passes(local, target, Version::HTTP_11, &[host])
        };
        let local = "127.0.0.1:80";
        for host in [
            "localhost",
            "LOCALHOST:8080",
            "127.0.0.1:1",
            "127.1.2.3",
            "[::1]:80",
            "box.lan:1",
            "Box.LAN",
        ] {
            assert!(check(local, "/", host), "{host}");
        }
        for host in [
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "10.0.0.1",
            "",
            "evil.example:127.0.0.1",
            "[::1",
            "box.lan.evil.example",
        ] {
            assert!(!check(local, "/", host), "{host}");
        }
        assert!(check("0.0.0.0:80", "/", "10.0.0.1"));
        assert!(!check("0.0.0.0:80", "/", "evil.example"));
        assert!(!check(local, "http://evil.example/", "localhost"));
        let two = ["localhost", "evil.example"];
        assert!(!passes(local, "/", Version::HTTP_11, &two));
        assert!(!passes(local, "/", Version::HTTP_11, &[]));
        assert!(passes(local, "/", Version::HTTP_10, &[]));
    }

    #[test]
    fn pages_of_other_origins_are_refused_unless_configured() {
        let mut config = Config::default();
        let from = |config: &Config, origin: &str| {
            check_origin(
                config,
                &headers(&[("host", "localhost:8080"), ("origin", origin)]),
            )
            .ok()
        };
        assert_eq!(from(&config, "http://localhost:8080"), Some(Origin::Same));
        for other in [
            "http://localhost:3000",
            "http://evil.example",
            "null",
            "",
            "file://",
        ] {
            assert_eq!(from(&config, other), None, "{other}");
        }
        config.allowed_origins = vec!["http://localhost:3000".into()];
        assert_eq!(
            from(&config, "http://localhost:3000"),
            Some(Origin::Allowed)
        );
        assert_eq!(from(&config, "http://evil.example"), None);
    }
}

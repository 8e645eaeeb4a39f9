//! Who may ask: API keys, Host names, origins of web pages.
//!
//! Three different threats. A key keeps out strangers on the network. The Host
//! list keeps out web pages that had their own name resolved to this machine
//! (DNS rebinding). The origin list keeps out web pages that talk to this
//! machine under its right name.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use axum::http::{HeaderMap, HeaderName, Request, Version, header};
use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};

use crate::errors::ApiError;
use crate::{Config, ServeError};

/// Name of the header that Anthropic's clients send a key in.
const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");
/// Headers that decide who may ask: a second one could say something else than the first.
const SINGLE_HEADERS: [HeaderName; 4] = [
    header::HOST,
    header::ORIGIN,
    header::AUTHORIZATION,
    X_API_KEY,
];
/// The allowed origin that stands for every page of this machine.
const LOOPBACK_ORIGINS: &str = "localhost";

/// The hash of the API key that a request carries: what one key stores another one cannot read.
pub(crate) type Caller = [u8; 32];

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

/// Refuses a request with two of a header that decides who may ask.
pub(crate) fn check_single(headers: &HeaderMap) -> Result<(), ApiError> {
    let is_doubled = |name: &&HeaderName| headers.get_all(*name).iter().nth(1).is_some();
    match SINGLE_HEADERS.iter().find(is_doubled) {
        None => Ok(()),
        Some(name) => Err(ApiError::request(format!(
            "the header `{name}` is there more than once; send it once"
        ))),
    }
}

/// Checks the key of a request, in either of the two headers.
pub(crate) fn check_key(keys: &Keys, headers: &HeaderMap) -> Result<(), ApiError> {
    if keys.is_empty() || has_key(keys, headers) {
        Ok(())
    } else {
        Err(ApiError::unauthorized())
    }
}

/// The hash of the key that a request was let in with; nothing where everyone may ask.
pub(crate) fn caller(keys: &Keys, headers: &HeaderMap) -> Option<Caller> {
    let mut valid = sent_keys(headers).filter(|key| keys.contains(key));
    valid.next().map(|key| Sha256::digest(key).into())
}

/// Whether a request carries one of `keys`.
fn has_key(keys: &Keys, headers: &HeaderMap) -> bool {
    sent_keys(headers).any(|key| keys.contains(key))
}

/// What a request has in the headers for keys.
fn sent_keys(headers: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    let bearer = headers
        .get(header::AUTHORIZATION)
        .and_then(|value| bearer(value.as_bytes()));
    let plain = headers.get(X_API_KEY).map(|value| value.as_bytes());
    [bearer, plain].into_iter().flatten()
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
/// a server that listens on the network, since only a name can be rebound. Any name
/// passes with a valid key, which a page that has its name rebound cannot know.
pub(crate) fn check_host<B>(
    config: &Config,
    local: SocketAddr,
    request: &Request<B>,
) -> Result<(), ApiError> {
    let (uri, headers) = (request.uri(), request.headers());
    let host = match headers.get(header::HOST) {
        Some(host) => host.to_str().ok(),
        // HTTP/1.0 knows no Host header, and no browser speaks it.
        None if uri.authority().is_none() && request.version() < Version::HTTP_11 => return Ok(()),
        None => None,
    };
    // An absolute request target names a host of its own.
    let target = uri.authority().map(|authority| authority.as_str());
    for authority in [target, Some(host.unwrap_or_default())]
        .into_iter()
        .flatten()
    {
        let Some(name) = host_of(authority) else {
            return Err(ApiError::malformed_host());
        };
        let is_known = is_loopback_name(name)
            || config
                .allowed_hosts
                .iter()
                .any(|allowed| allowed == "*" || allowed.eq_ignore_ascii_case(name))
            || !local.ip().is_loopback() && address_of(name).is_some();
        if !is_known && !has_key(&config.keys, headers) {
            return Err(ApiError::host(name, !config.keys.is_empty()));
        }
    }
    Ok(())
}

/// The host of `host[:port]`, if `authority` is that and nothing more.
fn host_of(authority: &str) -> Option<&str> {
    let end = match authority.strip_prefix('[') {
        Some(address) => address.find(']')? + 2,
        None => authority.find(':').unwrap_or(authority.len()),
    };
    let (host, port) = authority.split_at(end);
    let is_port =
        |port: &str| port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok();
    let is_whole = port.is_empty() || port.strip_prefix(':').is_some_and(is_port);
    (!host.is_empty() && is_whole).then_some(host)
}

fn is_loopback_name(name: &str) -> bool {
    let name = name.strip_suffix('.').unwrap_or(name);
    name.eq_ignore_ascii_case("localhost")
        || address_of(name).is_some_and(|address| address.is_loopback())
}

fn address_of(name: &str) -> Option<IpAddr> {
    match name.strip_prefix('[').and_then(|n| n.strip_suffix(']')) {
        Some(bare) => bare.parse::<Ipv6Addr>().ok().map(IpAddr::V6),
        None => name.parse::<Ipv4Addr>().ok().map(IpAddr::V4),
    }
}

/// Reads an entry of [`Config::allowed_origins`] as an operator writes it.
///
/// # Errors
///
/// What is wrong with it and the form that it should have, if no page could have this
/// origin.
pub fn parse_origin(text: &str) -> Result<String, String> {
    let text = text.trim();
    if ["*", "null", LOOPBACK_ORIGINS].contains(&text) {
        return Ok(text.to_owned());
    }
    let Some((scheme, rest)) = text.split_once("://") else {
        let host = text.split('/').next().unwrap_or_default();
        return Err(match host_of(host) {
            Some(host) if is_loopback_name(host) => format!(
                "an origin begins with http:// or https://, such as http://{text}; \
                 localhost alone allows any port of this machine"
            ),
            _ => format!("an origin begins with http:// or https://, such as https://{text}"),
        });
    };
    let host = rest.split(['/', '?', '#']).next().unwrap_or_default();
    if host_of(host).is_none() || host.contains('*') {
        return Err(format!(
            "expected {scheme}://HOST or {scheme}://HOST:PORT; localhost alone allows any port of this machine"
        ));
    }
    if host != rest {
        return Err(format!("an origin has no path: {scheme}://{host}"));
    }
    Ok(text.to_owned())
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
    let origin = origin.to_str().map_err(|_| ApiError::origin(""))?;
    let is_allowed = |allowed: &String| match allowed.as_str() {
        "*" => true,
        LOOPBACK_ORIGINS => is_loopback_origin(origin),
        allowed => allowed.eq_ignore_ascii_case(origin),
    };
    if config.allowed_origins.iter().any(is_allowed) {
        return Ok(Origin::Allowed);
    }
    let host = headers
        .get(header::HOST)
        .and_then(|host| host.to_str().ok());
    match (web_host(origin), host) {
        (Some(own), Some(host)) if own.eq_ignore_ascii_case(host) => Ok(Origin::Same),
        _ => Err(ApiError::origin(origin)),
    }
}

/// Whether `origin` is a page of this machine, at any port.
fn is_loopback_origin(origin: &str) -> bool {
    web_host(origin)
        .and_then(host_of)
        .is_some_and(is_loopback_name)
}

/// Host and port of a page that came over HTTP.
fn web_host(origin: &str) -> Option<&str> {
    origin
        .strip_prefix("http://")
        .or_else(|| origin.strip_prefix("https://"))
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
            "[::1]evil.example",
            "[::1]:80:80",
            "[127.0.0.1]",
            "::1",
            "localhost:evil",
            "localhost:",
            "localhost:+80",
            "localhost:99999",
            "user@localhost",
            "127.0.0.1:80:80",
            ":80",
        ] {
            assert!(!check(local, "/", host), "{host}");
        }
        assert!(check("0.0.0.0:80", "/", "10.0.0.1"));
        assert!(!check("0.0.0.0:80", "/", "evil.example"));
        assert!(!check(local, "http://evil.example/", "localhost"));
        assert!(!passes(local, "/", Version::HTTP_11, &[]));
        assert!(passes(local, "/", Version::HTTP_10, &[]));
    }

    #[test]
    fn a_valid_key_is_enough_under_any_name_and_a_missing_one_never_is() {
        let passes = |config: &Config, host: &str, key: &str| {
            let request = Request::get("/").header(header::HOST, host);
            let request = request.header(X_API_KEY, key).body(()).unwrap();
            check_host(config, "127.0.0.1:80".parse().unwrap(), &request).is_ok()
        };
        let keyed = Config {
            keys: Keys::new(["right"]),
            ..Config::default()
        };
        assert!(passes(&keyed, "mybox:8080", "right"));
        for (config, host, key) in [
            (&keyed, "mybox:8080", "wrong"),
            (&keyed, "mybox:8080", ""),
            (&keyed, "mybox:evil", "right"),
            (&keyed, "", "right"),
            (&Config::default(), "mybox:8080", "right"),
            (&Config::default(), "mybox:8080", ""),
        ] {
            assert!(!passes(config, host, key), "{host} {key}");
        }
    }

    #[test]
    fn headers_that_decide_who_may_ask_are_sent_once() {
        for name in ["host", "origin", "authorization", "x-api-key"] {
            let one = [(name, "a"), ("accept", "a"), ("accept", "b")];
            assert!(check_single(&headers(&one)).is_ok());
            let error = check_single(&headers(&[(name, "a"), (name, "a")])).unwrap_err();
            assert_eq!(error.status(), 400);
            assert!(error.message.contains(name));
        }
    }

    #[test]
    fn origins_that_no_page_has_are_errors_that_show_the_form() {
        for good in [
            "*",
            "null",
            "localhost",
            "http://localhost:3000",
            "https://a.example",
            "http://[::1]:80",
            "tauri://localhost",
        ] {
            assert_eq!(parse_origin(good).as_deref(), Ok(good));
        }
        for (bad, form) in [
            ("localhost:3000", "http://localhost:3000"),
            ("a.example", "https://a.example"),
            ("http://localhost:3000/", "http://localhost:3000"),
            ("http://localhost:*", "http://HOST:PORT"),
            ("http://", "http://HOST"),
            ("", "http://"),
        ] {
            let error = parse_origin(bad).unwrap_err();
            assert!(error.contains(form), "{bad}: {error}");
        }
    }

    #[test]
    fn localhost_allows_every_page_of_this_machine_and_no_other() {
        let config = Config {
            allowed_origins: vec!["localhost".into()],
            ..Config::default()
        };
        let allows = |origin: &str| {
            let headers = headers(&[("host", "127.0.0.1:8080"), ("origin", origin)]);
            check_origin(&config, &headers).is_ok_and(|from| from == Origin::Allowed)
        };
        for page in [
            "http://localhost",
            "http://localhost:3000",
            "https://localhost:3000",
            "http://127.0.0.1:5173",
            "http://[::1]:5173",
        ] {
            assert!(allows(page), "{page}");
        }
        for page in [
            "http://localhost.evil.example",
            "http://localhost:3000.evil.example",
            "http://127.0.0.1.evil.example",
            "http://evil.example",
            "http://localhost@evil.example",
            "file://localhost",
            "null",
            "localhost",
        ] {
            assert!(!allows(page), "{page}");
        }
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

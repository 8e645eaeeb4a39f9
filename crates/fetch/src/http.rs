//! GET, and who may be asked.

use crate::error::FetchError;
use crate::hosts::{Hosts, Permit};
use crate::public::is_private;
use std::io::Read;
use std::time::{Duration, Instant};
use ureq::config::Config;
use ureq::http::uri::PathAndQuery;
use ureq::http::{Response, Uri, header};
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{DefaultConnector, NextTimeout};
use ureq::{Agent, Body};

/// Most redirects that are followed.
const REDIRECTS_MAX: usize = 3;
/// Most bytes of the headers of an answer.
const HEADER_BYTES_MAX: usize = 16 << 10;

/// Fetches files from hosts that it is allowed to ask.
#[derive(Debug)]
pub struct Fetcher {
    hosts: Hosts,
    agent: Agent,
}

impl Fetcher {
    /// A fetcher that asks `hosts`.
    pub fn new(hosts: Hosts) -> Fetcher {
        Fetcher::with_resolver(hosts, DefaultResolver::default())
    }

    fn with_resolver(hosts: Hosts, names: impl Resolver) -> Fetcher {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .proxy(None)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .max_response_header_size(HEADER_BYTES_MAX)
            // A connection is of one file: its address was checked for that one.
            .max_idle_connections(0)
            .user_agent(concat!("paceline/", env!("CARGO_PKG_VERSION")))
            .build();
        let resolver = Checked {
            hosts: hosts.clone(),
            names,
        };
        Fetcher {
            hosts,
            agent: Agent::with_parts(config, DefaultConnector::default(), resolver),
        }
    }

    /// Fetches what `url` names, of at most `bytes_max` bytes, until `until`.
    ///
    /// # Errors
    ///
    /// [`FetchError`]; a message follows the words for the file, such as "the picture".
    pub fn get(&self, url: &str, bytes_max: usize, until: Instant) -> Result<Vec<u8>, FetchError> {
        let mut uri: Uri = url.parse().map_err(|_| FetchError::BadUrl)?;
        for _ in 0..=REDIRECTS_MAX {
            self.check(&uri)?;
            let answer = self.once(&uri, until)?;
            match answer.status().as_u16() {
                200 => return read(answer, bytes_max, until),
                301 | 302 | 303 | 307 | 308 => uri = target(&uri, &answer)?,
                status => return Err(FetchError::Status(status)),
            }
        }
        Err(FetchError::Redirects)
    }

    /// Checks all of `uri` that can be without looking up its host.
    fn check(&self, uri: &Uri) -> Result<(), FetchError> {
        let authority = uri.authority().ok_or(FetchError::BadUrl)?;
        if !matches!(uri.scheme_str(), Some("http" | "https")) || authority.host().is_empty() {
            return Err(FetchError::BadUrl);
        }
        if authority.as_str().contains('@') {
            return Err(FetchError::Credentials);
        }
        self.hosts.permit(uri).ok_or(FetchError::NotListed)?;
        Ok(())
    }

    /// Sends one request, following no redirect.
    fn once(&self, uri: &Uri, until: Instant) -> Result<Response<Body>, FetchError> {
        let left = until.saturating_duration_since(Instant::now());
        if left == Duration::ZERO {
            return Err(FetchError::TooSlow);
        }
        let request = self.agent.get(uri).config().timeout_global(Some(left));
        let request = request.build().header(header::ACCEPT_ENCODING, "identity");
        request.call().map_err(|error| match error {
            ureq::Error::Timeout(_) => FetchError::TooSlow,
            ureq::Error::HostNotFound => FetchError::NotPublic,
            ureq::Error::Other(error) => match error.downcast::<FetchError>() {
                Ok(error) => *error,
                Err(_) => FetchError::NoAnswer,
            },
            _ => FetchError::NoAnswer,
        })
    }
}

/// The body of `answer`.
fn read(answer: Response<Body>, bytes_max: usize, until: Instant) -> Result<Vec<u8>, FetchError> {
    let too_large = FetchError::TooLarge(bytes_max);
    let length = answer.body().content_length();
    if length.is_some_and(|length| length > bytes_max as u64) {
        return Err(too_large);
    }
    let mut bytes = Vec::new();
    // One byte more than allowed shows that there are more.
    let body = answer.into_body().into_reader().take(bytes_max as u64 + 1);
    let read = { body }.read_to_end(&mut bytes);
    match read {
        Ok(_) if bytes.len() > bytes_max => Err(too_large),
        Ok(_) => Ok(bytes),
        Err(_) if Instant::now() >= until => Err(FetchError::TooSlow),
        Err(error) => match ureq::Error::from(error) {
            ureq::Error::Timeout(_) => Err(FetchError::TooSlow),
            _ => Err(FetchError::NoAnswer),
        },
    }
}

/// Where `answer` to a request for `uri` redirects to.
fn target(uri: &Uri, answer: &Response<Body>) -> Result<Uri, FetchError> {
    let location = answer.headers().get(header::LOCATION);
    let location = location
        .and_then(|l| l.to_str().ok())
        .ok_or(FetchError::BadUrl)?;
    let (scheme, authority) = (uri.scheme_str(), uri.authority());
    let (scheme, authority) = scheme.zip(authority).ok_or(FetchError::BadUrl)?;
    let path = uri.path_and_query().map_or("/", PathAndQuery::path);
    let folder = &path[..path.rfind('/').map_or(0, |at| at + 1)];
    let whole = if location.contains("://") {
        location.to_owned()
    } else if location.starts_with("//") {
        format!("{scheme}:{location}")
    } else if location.starts_with('/') {
        format!("{scheme}://{authority}{location}")
    } else {
        format!("{scheme}://{authority}{folder}{location}")
    };
    let target: Uri = whole.parse().map_err(|_| FetchError::BadUrl)?;
    match (scheme, target.scheme_str()) {
        ("https", Some("http")) => Err(FetchError::Redirects),
        _ => Ok(target),
    }
}

/// Looks names up, and lets through only what may be connected to.
#[derive(Debug)]
struct Checked<R> {
    hosts: Hosts,
    names: R,
}

impl<R: Resolver> Resolver for Checked<R> {
    fn resolve(
        &self,
        uri: &Uri,
        config: &Config,
        timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, ureq::Error> {
        let refuse = |error: FetchError| ureq::Error::Other(Box::new(error));
        let permit = self.hosts.permit(uri);
        let permit = permit.ok_or_else(|| refuse(FetchError::NotListed))?;
        let found = self
            .names
            .resolve(uri, config, timeout)
            .map_err(|error| match error {
                ureq::Error::Timeout(_) => error,
                _ => refuse(FetchError::NotPublic),
            })?;
        let may = |address| match permit {
            Permit::Public => !is_private(address),
            Permit::Address(own) => own == address,
        };
        match found.iter().all(|address| may(address.ip())) {
            true => Ok(found),
            false => Err(refuse(FetchError::NotPublic)),
        }
    }
}

#[cfg(test)]
mod tests;

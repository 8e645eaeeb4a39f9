//! Requests to one hub: redirects, tries, refusals and the token.
//!
//! The token is sent to the endpoint alone, never where a redirect leads. Reading the
//! contents of an answer is the work of `transfer`.

use crate::HubError;
use crate::error::line;
use crate::lookup::Lookup;
use crate::retry::{Sleep, Tries};
use std::time::Duration;
use ureq::http::{Response, StatusCode, header};
use ureq::unversioned::transport::DefaultConnector;
use ureq::{Agent, Body};

/// Most redirects that are followed; the hub uses one.
const MAX_REDIRECTS: u32 = 5;

/// Sends requests to one hub.
pub(crate) struct Http {
    agent: Agent,
    /// The hub's address, without a slash at the end.
    pub(crate) endpoint: String,
    /// The access token, sent to the endpoint alone.
    token: Option<String>,
    /// Whether every request is refused.
    offline: bool,
    /// Pauses between tries.
    pub(crate) sleep: Sleep,
}

impl Http {
    /// Sends requests to the hub at `endpoint` with `token`; refuses all of them if `offline`.
    pub(crate) fn new(endpoint: String, token: Option<String>, offline: bool) -> Http {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("paceline/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(Duration::from_secs(15)))
            .timeout_recv_response(Some(Duration::from_secs(60)))
            .timeout_per_read(Some(Duration::from_secs(60)))
            .build();
        let lookup = Lookup::new(&endpoint);
        Http {
            agent: Agent::with_parts(config, DefaultConnector::default(), lookup),
            endpoint,
            token,
            offline,
            sleep: Box::new(std::thread::sleep),
        }
    }

    /// Sends HEAD to the endpoint, following no redirect. `what` names the thing for errors.
    ///
    /// # Errors
    ///
    /// If the hub refuses, or does not answer in several tries.
    pub(crate) fn head(&self, url: &str, what: &str) -> Result<Response<Body>, HubError> {
        self.tries(what, |_| self.once("HEAD", url, None))
    }

    /// Sends GET and follows redirects. With a `range` of bytes, a partial answer begins at its
    /// start; a server may send the whole file instead. `what` names the thing for errors.
    ///
    /// # Errors
    ///
    /// If the hub refuses, does not answer in several tries, or sends another range.
    pub(crate) fn request(
        &self,
        url: &str,
        range: Option<(u64, u64)>,
        what: &str,
    ) -> Result<Response<Body>, HubError> {
        let answer = self.tries(what, |_| {
            let mut url = url.to_owned();
            for _ in 0..MAX_REDIRECTS {
                let answer = self.once("GET", &url, range)?;
                if !answer.status().is_redirection() {
                    return Ok(answer);
                }
                let location = answer.headers().get(header::LOCATION);
                let location = location.and_then(|l| l.to_str().ok()).unwrap_or_default();
                url = self.resolve(location)?;
            }
            Err(ureq::Error::TooManyRedirects)
        })?;
        let begins = || {
            let range = answer.headers().get(header::CONTENT_RANGE)?.to_str().ok()?;
            let begin = range.strip_prefix("bytes ")?.split_once('-')?.0;
            begin.parse::<u64>().ok()
        };
        if answer.status() == StatusCode::PARTIAL_CONTENT && begins() != range.map(|r| r.0) {
            return Err(HubError::BadAnswer {
                what: what.to_owned(),
                reason: "the server sent another range than asked for".into(),
            });
        }
        Ok(answer)
    }

    /// The URL that a redirect of the endpoint leads to.
    ///
    /// # Errors
    ///
    /// If it leads from HTTPS to something else.
    fn resolve(&self, location: &str) -> Result<String, ureq::Error> {
        if location.starts_with('/') && !location.starts_with("//") {
            return Ok(format!("{}{location}", self.endpoint));
        }
        // A redirect of a hub at HTTPS never leads to plain HTTP.
        let is_safe = location.starts_with("https://")
            || location.starts_with("http://") && self.endpoint.starts_with("http://");
        if is_safe {
            Ok(location.to_owned())
        } else {
            let to = line(location);
            Err(ureq::Error::BadUri(format!("a redirect leads to `{to}`")))
        }
    }

    /// Sends one request, following no redirect.
    fn once(
        &self,
        method: &str,
        url: &str,
        range: Option<(u64, u64)>,
    ) -> Result<Response<Body>, ureq::Error> {
        let mut request = match method {
            "HEAD" => self.agent.head(url),
            _ => self.agent.get(url),
        };
        request = request.header(header::ACCEPT_ENCODING, "identity");
        if let Some((begin, end)) = range {
            request = request.header(header::RANGE, format!("bytes={begin}-{}", end - 1));
        }
        let after = url.strip_prefix(&self.endpoint);
        if let (Some(token), Some(true)) = (&self.token, after.map(|a| a.starts_with('/'))) {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        request.call()
    }

    /// Calls `attempt` with the number of the try until it succeeds, is refused, or has failed
    /// too often.
    fn tries(
        &self,
        what: &str,
        attempt: impl Fn(u32) -> Result<Response<Body>, ureq::Error>,
    ) -> Result<Response<Body>, HubError> {
        if self.offline {
            return Err(HubError::Offline {
                what: what.to_owned(),
            });
        }
        let mut tries = Tries::new(&self.sleep, 0);
        loop {
            let asked = tries.count() + 1;
            let failed = match attempt(asked) {
                Err(ureq::Error::BadUri(why)) => return Err(network(what, &why)),
                Err(error) => Err(error),
                Ok(answer) => match answer.status().as_u16() {
                    200 | 206 | 301..=308 => return Ok(answer),
                    429 | 500..=599 => Ok(answer),
                    status => return Err(self.refusal(status, what)),
                },
            };
            if tries.again(0, failed.as_ref().ok().and_then(retry_after)) {
                continue;
            }
            return Err(match failed {
                Err(error) => network(what, &error),
                Ok(answer) => HubError::Unavailable {
                    status: answer.status().as_u16(),
                    what: what.to_owned(),
                    tries: asked,
                },
            });
        }
    }

    /// The error for an answer that no other try would change.
    fn refusal(&self, status: u16, what: &str) -> HubError {
        let what = what.to_owned();
        match status {
            401 => HubError::Unauthorized {
                what,
                advice: if self.token.is_some() {
                    "the token in HF_TOKEN does not give access"
                } else {
                    "set HF_TOKEN if you have access"
                },
            },
            403 => HubError::Forbidden { what },
            404 => HubError::NotFound { what },
            416 => HubError::BadAnswer {
                what,
                reason: "the file is shorter than announced".into(),
            },
            _ => HubError::Status { status, what },
        }
    }
}

/// The error for a request without an answer.
pub(crate) fn network(what: &str, error: &dyn std::fmt::Display) -> HubError {
    HubError::Network {
        what: what.to_owned(),
        reason: error.to_string(),
    }
}

/// The pause that a server asks for.
fn retry_after(answer: &Response<Body>) -> Option<Duration> {
    let value = answer.headers().get(header::RETRY_AFTER)?.to_str().ok()?;
    value.parse().ok().map(Duration::from_secs)
}

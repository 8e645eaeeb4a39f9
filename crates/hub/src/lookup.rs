//! Names to addresses, and the networks that a redirect may not reach.
//!
//! A redirect makes this machine send a request to another one. A hub at public addresses
//! may not redirect into a private network, where this machine reaches what the hub
//! cannot (server-side request forgery). The addresses that are then connected to are
//! checked, so no name gets past it. A hub in a private network may redirect anywhere. A
//! proxy looks names up itself.

use crate::error::line;
use fetch::is_private;
use std::sync::atomic::{AtomicBool, Ordering};
use ureq::config::Config;
use ureq::http::Uri;
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::NextTimeout;

/// Looks up the addresses of names for one hub.
#[derive(Debug)]
pub(crate) struct Lookup {
    /// The name of the hub's own host.
    home: Option<String>,
    /// Whether all addresses of the hub were public when it was last looked up.
    is_public: AtomicBool,
    system: DefaultResolver,
}

impl Lookup {
    /// A lookup for the hub at `endpoint`.
    pub(crate) fn new(endpoint: &str) -> Lookup {
        let home = endpoint.parse::<Uri>().ok();
        Lookup {
            home: home.and_then(|uri| Some(uri.host()?.to_owned())),
            is_public: AtomicBool::new(true),
            system: DefaultResolver::default(),
        }
    }
}

impl Resolver for Lookup {
    fn resolve(
        &self,
        uri: &Uri,
        config: &Config,
        timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, ureq::Error> {
        let found = self.system.resolve(uri, config, timeout)?;
        let leads_inside = found.iter().any(|address| is_private(address.ip()));
        if uri.host() == self.home.as_deref() {
            self.is_public.store(!leads_inside, Ordering::Relaxed);
        } else if leads_inside && self.is_public.load(Ordering::Relaxed) {
            let host = line(uri.host().unwrap_or_default());
            return Err(ureq::Error::BadUri(format!(
                "a redirect leads to `{host}`, which is not a public address"
            )));
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolves(lookup: &Lookup, url: &str) -> Result<(), String> {
        let uri = url.parse().expect("a URL");
        let found = lookup.resolve(&uri, &Config::default(), NextTimeout::default());
        found.map(|_| ()).map_err(|e| e.to_string())
    }

    #[test]
    fn a_public_hub_leads_into_no_private_network() {
        let lookup = Lookup::new("https://8.8.8.8");
        resolves(&lookup, "https://8.8.8.8/api").unwrap();
        for host in [
            "127.0.0.1",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
            "[::]",
            "[::1]",
            "[::ffff:10.0.0.1]",
            "[fd00::1]",
            "[fe80::1]",
        ] {
            let error = resolves(&lookup, &format!("https://{host}/x")).unwrap_err();
            assert!(
                error.contains(&format!("a redirect leads to `{host}`")),
                "{error}"
            );
        }
        for host in ["1.1.1.1", "100.128.0.1", "172.32.0.1", "[2606:4700::1]"] {
            resolves(&lookup, &format!("https://{host}/x")).unwrap();
        }
    }

    #[test]
    fn a_hub_of_a_private_network_may_lead_anywhere() {
        let lookup = Lookup::new("http://127.0.0.1:1234");
        resolves(&lookup, "http://127.0.0.1:1234/api").unwrap();
        for url in ["http://10.0.0.1/x", "http://[::1]/x", "http://1.1.1.1/x"] {
            resolves(&lookup, url).unwrap();
        }
    }
}

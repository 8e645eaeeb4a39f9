//! Names to addresses, and where a hub may not lead.
//!
//! A redirect makes this machine ask another one. From a hub at public addresses none
//! leads into a private network, where it would reach what strangers cannot: the check
//! is of the addresses that are then connected to, so no name gets past it. A hub that
//! lies in a private network itself may lead anywhere. A proxy looks names up itself.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use ureq::config::Config;
use ureq::http::Uri;
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::NextTimeout;

/// Looks names up for one hub.
#[derive(Debug)]
pub(crate) struct Lookup {
    /// The hub's own host.
    home: Option<String>,
    /// Whether all of its addresses were public when it was last asked.
    is_public: AtomicBool,
    system: DefaultResolver,
}

impl Lookup {
    /// For the hub at `endpoint`.
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
            let host = uri.host().unwrap_or_default().escape_debug();
            return Err(ureq::Error::BadUri(format!(
                "a redirect leads to `{host}`, into a private network"
            )));
        }
        Ok(found)
    }
}

/// Whether no stranger reaches `address` from afar: this machine, its networks, and
/// those that providers keep to themselves (RFC 6598).
fn is_private(address: IpAddr) -> bool {
    let v4 = |v4: Ipv4Addr| {
        let [a, b, ..] = v4.octets();
        v4.is_private()
            || v4.is_loopback()
            || v4.is_link_local()
            || v4.is_broadcast()
            || a == 0
            || (a == 100 && b & 0xc0 == 64)
    };
    match address {
        IpAddr::V4(address) => v4(address),
        IpAddr::V6(address) => match address.to_ipv4() {
            // Mapped or compatible, `::` and `::1` among the latter.
            Some(inner) => v4(inner),
            None => address.is_unique_local() || address.is_unicast_link_local(),
        },
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

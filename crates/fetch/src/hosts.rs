//! Which hosts may be asked.

use crate::error::HostError;
use std::net::IpAddr;
use ureq::http::Uri;
use ureq::http::uri::Authority;

/// The entry that stands for every host of the public internet.
const ANY: &str = "*";

/// Hosts that files may be fetched from. Without an entry there is none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hosts {
    /// Whether every host of the public internet is one.
    any: bool,
    listed: Vec<Host>,
}

/// A host of the list.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Host {
    /// In small letters, without a full stop at the end.
    name: String,
    /// The only port; any, if there is none.
    port: Option<u16>,
    /// The address, if the name is one.
    address: Option<IpAddr>,
}

/// To what a host that may be asked may lead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Permit {
    /// Addresses of the public internet.
    Public,
    /// This one address, wherever it is.
    Address(IpAddr),
}

impl Hosts {
    /// The hosts that `entries` name: `*` is every host of the public internet, `HOST` is one of them,
    /// `HOST:PORT` one at one port. Names lead to addresses of the public internet alone; an address
    /// that is listed itself, as `10.0.0.7:9000`, may be a private one.
    ///
    /// # Errors
    ///
    /// [`HostError`] for the first entry that is no such thing.
    pub fn parse<S: AsRef<str>>(entries: impl IntoIterator<Item = S>) -> Result<Hosts, HostError> {
        let mut hosts = Hosts::default();
        for entry in entries {
            match entry.as_ref().trim() {
                ANY => hosts.any = true,
                entry => hosts.listed.push(Host::parse(entry)?),
            }
        }
        Ok(hosts)
    }

    /// To what `uri` may lead; nothing if its host may not be asked.
    pub(crate) fn permit(&self, uri: &Uri) -> Option<Permit> {
        let name = plain(uri.host()?);
        let port = uri.port_u16().or(match uri.scheme_str() {
            Some("http") => Some(80),
            Some("https") => Some(443),
            _ => None,
        })?;
        let fits = |host: &&Host| host.name == name && host.port.is_none_or(|own| own == port);
        match self.listed.iter().find(fits) {
            Some(Host {
                address: Some(address),
                ..
            }) => Some(Permit::Address(*address)),
            Some(_) => Some(Permit::Public),
            None => self.any.then_some(Permit::Public),
        }
    }
}

impl Host {
    fn parse(entry: &str) -> Result<Host, HostError> {
        let wrong = || HostError::NoHost(entry.chars().take(80).collect());
        let authority: Authority = entry.parse().map_err(|_| wrong())?;
        let name = plain(authority.host());
        let rest = &entry[authority.host().len().min(entry.len())..];
        let port = match rest.strip_prefix(':') {
            None if rest.is_empty() => None,
            None => return Err(wrong()),
            Some(port) => Some(port.parse().map_err(|_| wrong())?),
        };
        let is_name = |c: char| c.is_ascii_alphanumeric() || "-._[]:".contains(c);
        if name.is_empty() || !name.chars().all(is_name) {
            return Err(wrong());
        }
        let address: Option<IpAddr> = name.trim_matches(['[', ']']).parse().ok();
        let is_never = |address: IpAddr| match address {
            IpAddr::V4(v4) => v4.is_link_local() || v4.is_multicast() || v4.is_unspecified(),
            IpAddr::V6(v6) => {
                v6.is_unicast_link_local() || v6.is_multicast() || v6.is_unspecified()
            }
        };
        match address.map(|address| address.to_canonical()) {
            Some(address) if is_never(address) => Err(HostError::Forbidden(name)),
            _ => Ok(Host {
                name,
                port,
                address,
            }),
        }
    }
}

/// A host's name as names are compared.
fn plain(name: &str) -> String {
    let name = name.to_ascii_lowercase();
    name.strip_suffix('.').map_or(name.clone(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_listed_hosts_may_be_asked() {
        let hosts = Hosts::parse([
            "Images.Example.org",
            "b.c:8443",
            "10.0.0.7:9000",
            "[fd00::1]",
        ]);
        let hosts = hosts.unwrap();
        let inner = |text: &str| Some(Permit::Address(text.parse().unwrap()));
        let public = Some(Permit::Public);
        for (url, permit) in [
            ("https://images.example.org/a", public),
            ("http://IMAGES.example.org.:81/a", public),
            ("https://b.c:8443/", public),
            ("https://b.c/", None),
            ("https://x.images.example.org/", None),
            ("https://images.example.org.evil.com/", None),
            ("http://10.0.0.7:9000/", inner("10.0.0.7")),
            ("http://10.0.0.7/", None),
            ("http://167772167:9000/", None),
            ("http://[fd00::1]:5/", inner("fd00::1")),
            ("http://[fd00::2]/", None),
        ] {
            assert_eq!(hosts.permit(&url.parse().unwrap()), permit, "{url}");
        }
        let url: Uri = "http://a.b/".parse().unwrap();
        assert_eq!(Hosts::parse(["*"]).unwrap().permit(&url), public);
        assert_eq!(Hosts::default().permit(&url), None);
    }

    #[test]
    fn what_is_no_host_is_refused() {
        for entry in [
            "",
            "http://a.b",
            "a.b/c",
            "a b",
            "u@a.b",
            "a.b:",
            "a.b:99999",
            "a.b:x",
            "*.a.b",
        ] {
            let error = Hosts::parse([entry]).unwrap_err();
            assert!(matches!(error, HostError::NoHost(_)), "{entry}: {error}");
        }
        for entry in [
            "169.254.169.254",
            "[fe80::1]",
            "0.0.0.0:80",
            "[::]",
            "224.0.0.1",
        ] {
            let error = Hosts::parse([entry]).unwrap_err();
            assert!(matches!(error, HostError::Forbidden(_)), "{entry}: {error}");
        }
    }
}

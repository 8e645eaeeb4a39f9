//! A fetcher against hosts on this machine, and against names that lie.

use super::*;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

/// Longest wait for anything; a test that needs it has found a hang.
const PATIENCE: Duration = Duration::from_secs(60);
const MOST: usize = 1000;

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

/// A host that gives each request the next of `answers`, and notes the requests.
fn host(answers: Vec<String>) -> (SocketAddr, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let asked = Arc::new(Mutex::new(Vec::new()));
    let notes = asked.clone();
    thread::spawn(move || {
        for answer in answers {
            let (mut stream, _) = listener.accept().unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            let head = lines.by_ref().map(|line| line.unwrap_or_default());
            let head: Vec<String> = head.take_while(|line| !line.is_empty()).collect();
            notes.lock().unwrap().push(head.join("\n").to_lowercase());
            // Who has heard enough closes early.
            let _ = stream.write_all(answer.as_bytes());
        }
    });
    (address, asked)
}

fn ok(body: &str) -> String {
    format!(
        "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}

fn redirect(to: &str) -> String {
    format!("HTTP/1.1 302 Found\r\nlocation: {to}\r\ncontent-length: 0\r\n\r\n")
}

/// A fetcher that may ask `address`, and the public internet.
fn fetcher(address: SocketAddr) -> Fetcher {
    Fetcher::new(Hosts::parse(["*", &address.to_string()]).unwrap())
}

#[test]
fn a_file_is_fetched_without_anything_that_tells_who_asks() {
    let (address, asked) = host(vec![ok("picture")]);
    let url = format!("http://{address}/a/b.png?x=1#part");
    assert_eq!(
        fetcher(address).get(&url, MOST, soon()),
        Ok(b"picture".to_vec())
    );
    let head = asked.lock().unwrap()[0].clone();
    assert!(head.starts_with("get /a/b.png?x=1 http/1.1"), "{head}");
    for name in ["authorization", "cookie", "referer", "x-forwarded", "proxy"] {
        assert!(!head.contains(name), "{head}");
    }
    assert!(head.contains("accept-encoding: identity"), "{head}");
}

#[test]
fn what_is_no_public_address_is_never_asked() {
    let any = Fetcher::new(Hosts::parse(["*"]).unwrap());
    // The port of a host that would answer.
    let (address, asked) = host(vec![ok("secret")]);
    let port = address.port();
    for host in [
        "127.0.0.1",
        "127.1",
        "0x7f000001",
        "2130706433",
        "0177.0.0.1",
        "0",
        "0.0.0.0",
        "localhost",
        "LOCALHOST.",
        "10.0.0.1",
        "172.16.9.9",
        "192.168.1.1",
        "100.64.0.1",
        "169.254.169.254",
        "198.18.0.1",
        "224.0.0.1",
        "255.255.255.255",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[::ffff:a9fe:a9fe]",
        "[::127.0.0.1]",
        "[fd00::1]",
        "[fe80::1]",
        "[64:ff9b::127.0.0.1]",
        "[64:ff9b::a9fe:a9fe]",
        "[2002:7f00:1::]",
        "[ff02::1]",
        "no-such-host.invalid",
    ] {
        let error = any.get(&format!("http://{host}:{port}/"), MOST, soon());
        assert!(
            matches!(error, Err(FetchError::NotPublic | FetchError::BadUrl)),
            "{host}: {error:?}"
        );
    }
    assert!(asked.lock().unwrap().is_empty());
}

#[test]
fn odd_addresses_are_refused() {
    let (address, asked) = host(vec![ok("secret")]);
    let fetcher = fetcher(address);
    for (url, error) in [
        ("", FetchError::BadUrl),
        ("/etc/passwd", FetchError::BadUrl),
        ("file:///etc/passwd", FetchError::BadUrl),
        ("ftp://127.0.0.1/", FetchError::BadUrl),
        ("gopher://127.0.0.1/_x", FetchError::BadUrl),
        ("http://", FetchError::BadUrl),
        ("http:///a", FetchError::BadUrl),
        ("http://a b/", FetchError::BadUrl),
        ("http://\u{ff11}27.0.0.1/", FetchError::BadUrl),
        ("http://127.0.0.1%00.a.b/", FetchError::BadUrl),
        ("http://a.b\r\nx: y/", FetchError::BadUrl),
        (&format!("http://u:p@{address}/"), FetchError::Credentials),
        (&format!("http://@{address}/"), FetchError::Credentials),
        ("http://8.8.8.8\\@127.0.0.1/", FetchError::BadUrl),
    ] {
        assert_eq!(fetcher.get(url, MOST, soon()), Err(error), "{url}");
    }
    assert!(asked.lock().unwrap().is_empty());
}

#[test]
fn hosts_outside_of_the_list_are_not_asked() {
    let (address, asked) = host(vec![ok("a")]);
    let listed = Fetcher::new(Hosts::parse(["images.example.org"]).unwrap());
    let url = format!("http://{address}/");
    assert_eq!(listed.get(&url, MOST, soon()), Err(FetchError::NotListed));
    let none = Fetcher::new(Hosts::default());
    assert_eq!(none.get(&url, MOST, soon()), Err(FetchError::NotListed));
    assert!(asked.lock().unwrap().is_empty());
}

#[test]
fn every_redirect_is_checked() {
    let (inner, asked) = host(vec![ok("secret")]);
    for (to, error) in [
        (format!("http://{inner}/"), FetchError::NotPublic),
        (
            "http://169.254.169.254/latest/meta-data/".into(),
            FetchError::NotPublic,
        ),
        ("http://u:p@8.8.8.8/".into(), FetchError::Credentials),
        ("file:///etc/passwd".into(), FetchError::BadUrl),
        (String::new(), FetchError::Redirects),
    ] {
        let (address, _) = host(vec![redirect(&to); 9]);
        let url = format!("http://{address}/");
        assert_eq!(fetcher(address).get(&url, MOST, soon()), Err(error), "{to}");
    }
    assert!(asked.lock().unwrap().is_empty());
    // To a listed host: without a scheme, from its root, beside the file.
    let (address, asked) = host(vec![redirect("/two/x"), redirect("three?y"), ok("here")]);
    let (second, _) = host(vec![redirect(&format!("//{address}/a"))]);
    let both = [address, second].map(|address| address.to_string());
    let both = Fetcher::new(Hosts::parse(&both).unwrap());
    let got = both.get(&format!("http://{second}/"), MOST, soon());
    assert_eq!(got, Ok(b"here".to_vec()));
    let heads = asked.lock().unwrap();
    let paths: Vec<_> = heads
        .iter()
        .map(|head| head.split(' ').nth(1).unwrap())
        .collect();
    assert_eq!(paths, ["/a", "/two/x", "/two/three?y"]);
}

#[test]
fn https_never_leads_to_http() {
    let answer = |to: &str| {
        let answer = Response::builder().status(302).header(header::LOCATION, to);
        answer.body(Body::builder().data("")).unwrap()
    };
    let from: Uri = "https://a.b/c/d".parse().unwrap();
    let to = |to| target(&from, &answer(to)).map(|uri| uri.to_string());
    assert_eq!(to("http://a.b/c"), Err(FetchError::Redirects));
    assert_eq!(to("//e.f/c"), Ok("https://e.f/c".to_owned()));
    assert_eq!(to("e?f"), Ok("https://a.b/c/e?f".to_owned()));
}

#[test]
fn a_file_has_its_bytes_and_no_more() {
    let chunked = |body: &str| {
        let length = format!("{:x}", body.len());
        format!(
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{length}\r\n{body}\r\n0\r\n\r\n"
        )
    };
    let long = "x".repeat(MOST + 1);
    let endless = format!("HTTP/1.1 200 OK\r\n\r\n{long}");
    let promised = "HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\nx".to_owned();
    let cut = "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc".to_owned();
    let heads = format!(
        "HTTP/1.1 200 OK\r\na: {}\r\n\r\n",
        "x".repeat(HEADER_BYTES_MAX)
    );
    for (answer, expected) in [
        (ok(&long[1..]), Ok(long.as_bytes()[1..].to_vec())),
        (chunked(&long[1..]), Ok(long.as_bytes()[1..].to_vec())),
        (ok(&long), Err(FetchError::TooLarge(MOST))),
        (chunked(&long), Err(FetchError::TooLarge(MOST))),
        (endless, Err(FetchError::TooLarge(MOST))),
        (promised, Err(FetchError::TooLarge(MOST))),
        (cut, Err(FetchError::NoAnswer)),
        (heads, Err(FetchError::NoAnswer)),
        ("SSH-2.0-x\r\n".to_owned(), Err(FetchError::NoAnswer)),
        (
            "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n".to_owned(),
            Err(FetchError::Status(404)),
        ),
        (
            "HTTP/1.1 206 Partial\r\ncontent-length: 1\r\n\r\nx".to_owned(),
            Err(FetchError::Status(206)),
        ),
    ] {
        let (address, _) = host(vec![answer.clone()]);
        let got = fetcher(address).get(&format!("http://{address}/"), MOST, soon());
        assert_eq!(got, expected, "{:.60}", answer);
    }
}

#[test]
fn who_does_not_answer_in_time_is_left() {
    // Takes connections, and says nothing.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let url = format!("http://{address}/");
    let until = Instant::now() + Duration::from_millis(50);
    assert_eq!(
        fetcher(address).get(&url, MOST, until),
        Err(FetchError::TooSlow)
    );
    let past = Instant::now();
    assert_eq!(
        fetcher(address).get(&url, MOST, past),
        Err(FetchError::TooSlow)
    );
    // Sends byte after byte, for ever.
    let dripping = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = dripping.local_addr().unwrap();
    thread::spawn(move || {
        let (mut stream, _) = dripping.accept().unwrap();
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n");
        while stream.write_all(b"x").is_ok() {}
    });
    let until = Instant::now() + Duration::from_millis(100);
    let got = fetcher(address).get(&format!("http://{address}/"), 1 << 30, until);
    assert_eq!(got, Err(FetchError::TooSlow));
}

/// Gives the addresses of a name in turn, as the name server of an attacker does.
#[derive(Debug)]
struct Turning {
    addresses: Vec<Vec<SocketAddr>>,
    asked: AtomicUsize,
}

impl Resolver for Turning {
    fn resolve(
        &self,
        _: &Uri,
        _: &Config,
        _: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, ureq::Error> {
        let turn = self.asked.fetch_add(1, Ordering::Relaxed);
        let mut found = self.empty();
        for &address in &self.addresses[turn % self.addresses.len()] {
            found.push(address);
        }
        Ok(found)
    }
}

#[test]
fn a_name_that_changes_its_address_gains_nothing() {
    let (inner, asked) = host(vec![ok("secret"); 9]);
    // Nobody answers at this public address; that it is tried shows that it is used as it was checked.
    let outer: SocketAddr = "192.0.2.1:9".parse().unwrap();
    let public: SocketAddr = "[2606:4700::1]:9".parse().unwrap();
    for addresses in [
        vec![vec![inner]],
        vec![vec![public, inner]],
        vec![vec![outer]],
    ] {
        let names = Turning {
            addresses,
            asked: AtomicUsize::new(0),
        };
        let fetcher = Fetcher::with_resolver(Hosts::parse(["*"]).unwrap(), names);
        let got = fetcher.get("http://rebind.example.org/", MOST, soon());
        assert_eq!(got, Err(FetchError::NotPublic));
    }
    // One lookup a request: what was checked is what is connected to.
    let checked = Checked {
        hosts: Hosts::parse(["*"]).unwrap(),
        names: Turning {
            addresses: vec![vec![public], vec![inner]],
            asked: AtomicUsize::new(0),
        },
    };
    let uri: Uri = "http://rebind.example.org/".parse().unwrap();
    let resolve = || checked.resolve(&uri, &Config::default(), NextTimeout::default());
    assert_eq!(resolve().unwrap()[..], [public]);
    assert!(resolve().is_err());
    // A listed name may not lead inside either; a listed address may only lead to itself.
    for (listed, addresses) in [("rebind.example.org", inner), ("10.0.0.7", inner)] {
        let names = Turning {
            addresses: vec![vec![addresses]],
            asked: AtomicUsize::new(0),
        };
        let fetcher = Fetcher::with_resolver(Hosts::parse([listed]).unwrap(), names);
        let got = fetcher.get(&format!("http://{listed}/"), MOST, soon());
        assert_eq!(got, Err(FetchError::NotPublic));
    }
    assert!(asked.lock().unwrap().is_empty());
}

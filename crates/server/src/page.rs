//! The chat page for browsers: files that are part of the binary, served as they are.
//!
//! The files are the same for everyone and hold nothing of this server: the page asks the API for
//! all it shows, with the key that a person has given it. It runs under a content security policy
//! that allows its own files and this server, and nothing else.

use std::sync::LazyLock;

use axum::body::Body;
use axum::extract::Path;
use axum::http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use axum::response::IntoResponse;
use sha2::{Digest, Sha256};

use crate::errors::ApiError;

/// The path of the page's files.
pub(crate) const FILE: &str = "/page/{file}";
/// The path of the page, which has an answer for other clients too.
pub(crate) const ROOT: &str = "/";

/// What the page may load and reach: its own files, this server, and pictures that a person adds.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
    img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// One file of the page.
struct File {
    name: &'static str,
    media_type: &'static str,
    text: &'static str,
}

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";

/// An entry of [`FILES`].
macro_rules! file {
    ($name:literal, $media_type:ident) => {
        File {
            name: $name,
            media_type: $media_type,
            text: include_str!(concat!("../page/", $name)),
        }
    };
}

/// Every file of the page; the first is the document.
const FILES: &[File] = &[
    file!("index.html", HTML),
    file!("style.css", CSS),
    file!("icon.svg", SVG),
    file!("api.js", SCRIPT),
    file!("app.js", SCRIPT),
    file!("composer.js", SCRIPT),
    file!("dom.js", SCRIPT),
    file!("files.js", SCRIPT),
    file!("history.js", SCRIPT),
    file!("markdown.js", SCRIPT),
    file!("message.js", SCRIPT),
    file!("settings.js", SCRIPT),
    file!("speculation.js", SCRIPT),
    file!("store.js", SCRIPT),
    file!("theme.js", SCRIPT),
    file!("tree.js", SCRIPT),
];

/// The entity tags of [`FILES`], in their order: hashes of what is in them.
static TAGS: LazyLock<Vec<HeaderValue>> = LazyLock::new(|| {
    let tag = |file: &File| {
        let hash = Sha256::digest(file.text);
        let hex: String = hash[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        HeaderValue::from_str(&format!("\"{hex}\"")).expect("hexadecimal digits")
    };
    FILES.iter().map(tag).collect()
});

/// Whether a request for `path` with these headers is one for the page or a file of it.
pub(crate) fn is_asked(path: &str, headers: &HeaderMap) -> bool {
    path == FILE || path == ROOT && wants_html(headers)
}

/// Whether a client shows HTML, as browsers say and programs do not.
pub(crate) fn wants_html(headers: &HeaderMap) -> bool {
    let accepted = headers.get_all(header::ACCEPT).iter();
    let mut accepted = accepted.filter_map(|value| value.to_str().ok());
    accepted.any(|value| value.contains("text/html"))
}

/// The page's document.
pub(crate) fn document(headers: &HeaderMap) -> Response<Body> {
    serve(0, headers)
}

/// `GET /page/{file}`.
pub(crate) async fn file(
    Path(name): Path<String>,
    headers: HeaderMap,
) -> Result<Response<Body>, ApiError> {
    match FILES.iter().position(|file| file.name == name) {
        Some(at) => Ok(serve(at, &headers)),
        None => Err(ApiError::no_route(None, "/")),
    }
}

/// The file number `at`, or word that a client has it already.
fn serve(at: usize, headers: &HeaderMap) -> Response<Body> {
    let (file, tag) = (&FILES[at], &TAGS[at]);
    let known = headers
        .get(header::IF_NONE_MATCH)
        .and_then(|tags| tags.to_str().ok());
    let own = tag.to_str().unwrap_or_default();
    let is_known = known.is_some_and(|tags| {
        tags.split(',')
            .any(|tag| tag.trim().trim_start_matches("W/") == own)
    });
    let mut response = match is_known {
        true => StatusCode::NOT_MODIFIED.into_response(),
        false => Response::new(Body::from(file.text)),
    };
    let answer = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_TYPE, file.media_type),
        // A browser asks each time whether its copy is the newest: a new binary has new files.
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (
            header::HeaderName::from_static("cross-origin-opener-policy"),
            "same-origin",
        ),
        (
            header::HeaderName::from_static("cross-origin-resource-policy"),
            "same-origin",
        ),
        // Only browsers get the page at its path.
        (header::VARY, "accept"),
    ] {
        answer.insert(name, HeaderValue::from_static(value));
    }
    answer.insert(header::ETAG, tag.clone());
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Most bytes of all files together.
    const BYTES_MAX: usize = 150_000;

    #[test]
    fn the_page_is_light_and_whole() {
        let bytes: usize = FILES.iter().map(|file| file.text.len()).sum();
        assert!(bytes < BYTES_MAX, "{bytes} bytes");
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/page");
        let mut there: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        there.sort_unstable();
        let mut served: Vec<&str> = FILES.iter().map(|file| file.name).collect();
        served.sort_unstable();
        assert_eq!(there, served);
    }

    #[test]
    fn nothing_of_the_page_breaks_its_own_policy() {
        for file in FILES {
            let text = file.text.to_lowercase();
            for inline in [
                " style=\"",
                "<style",
                " onclick=",
                " onload=",
                "javascript:",
                "innerhtml",
                "outerhtml",
                "insertadjacenthtml",
                "document.write",
                "eval(",
                "new function",
                "setattribute('style'",
            ] {
                assert!(!text.contains(inline), "{} has {inline}", file.name);
            }
            // Namespaces and the beginnings of links are no addresses that are loaded.
            let outside = text.replace("http://www.w3.org/2000/svg", "");
            let outside = outside.matches("://").count();
            let patterns = if file.name == "markdown.js" { 4 } else { 0 };
            assert!(outside <= patterns, "{} has {outside} addresses", file.name);
        }
        let document = FILES[0].text;
        for script in document.split("<script").skip(1) {
            let (tag, rest) = script.split_once('>').unwrap();
            assert!(tag.contains("src=") && rest.starts_with("</script>"));
        }
        assert!(POLICY.starts_with("default-src 'none'") && !POLICY.contains("unsafe"));
    }

    #[test]
    fn browsers_get_the_page_and_programs_do_not() {
        let accepting = |value: &'static str| {
            HeaderMap::from_iter([(header::ACCEPT, HeaderValue::from_static(value))])
        };
        let browser = accepting("text/html,application/xhtml+xml,*/*;q=0.8");
        assert!(is_asked("/", &browser) && !is_asked("/v1/models", &browser));
        for program in [
            accepting("*/*"),
            accepting("application/json"),
            HeaderMap::new(),
        ] {
            assert!(!is_asked("/", &program));
            assert!(is_asked(FILE, &program));
        }
    }

    #[test]
    fn a_copy_that_is_the_newest_is_not_sent_again() {
        let first = document(&HeaderMap::new());
        assert_eq!(first.status(), StatusCode::OK);
        let tag = first.headers()[header::ETAG].clone();
        let asking = |tag: &str| {
            let tag = HeaderValue::from_str(tag).unwrap();
            document(&HeaderMap::from_iter([(header::IF_NONE_MATCH, tag)]))
        };
        let tag = tag.to_str().unwrap();
        for same in [tag.to_owned(), format!("W/{tag}"), format!("\"x\", {tag}")] {
            let again = asking(&same);
            assert_eq!(again.status(), StatusCode::NOT_MODIFIED);
            assert_eq!(again.headers()[header::CONTENT_SECURITY_POLICY], POLICY);
        }
        assert_eq!(asking("\"x\"").status(), StatusCode::OK);
        assert_ne!(TAGS[0], TAGS[1]);
    }
}

//! The page for browsers: who gets it, and the headers that it comes with.

use server::Config;
use server::auth::Keys;

use crate::client::{Reply, Server, Setup};

/// `GET path` as a browser sends it to `host`.
async fn browse(server: &Server, path: &str, host: &str, more: &str) -> Reply {
    let accept = "accept: text/html,application/xhtml+xml,*/*;q=0.8";
    let request = format!("GET {path} HTTP/1.1\r\nhost: {host}\r\n{accept}\r\n{more}\r\n");
    server.send(request.as_bytes()).await
}

#[tokio::test]
async fn browsers_get_a_page_under_a_strict_policy_and_programs_a_greeting() {
    let server = Server::start(Setup::default()).await;
    let greeting = server.get("/").await;
    assert!(greeting.body.starts_with("paceline ") && greeting.body.contains("/v1/models"));
    assert_eq!(greeting.header("vary"), Some("accept"));
    let page = browse(&server, "/", "localhost", "").await;
    assert_eq!(page.status, 200);
    assert_eq!(
        page.header("content-type"),
        Some("text/html; charset=utf-8")
    );
    let policy = page.header("content-security-policy").unwrap();
    for directive in [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data: blob:",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "form-action 'none'",
    ] {
        assert!(
            policy.split("; ").any(|own| own == directive),
            "{directive}"
        );
    }
    assert_eq!(page.header("x-content-type-options"), Some("nosniff"));
    assert_eq!(page.header("referrer-policy"), Some("no-referrer"));
    // Everything that the document names is there, under the same policy.
    let mut files = 0;
    for part in page.body.split("=\"page/").skip(1) {
        let name = part.split('"').next().unwrap();
        for folder in ["/page/", "/v1/page/"] {
            let file = browse(&server, &format!("{folder}{name}"), "localhost", "").await;
            assert_eq!(file.status, 200, "{name}");
            assert_eq!(file.header("content-security-policy"), Some(policy));
            let tag = file.header("etag").unwrap();
            let again = format!("if-none-match: {tag}\r\n");
            let again = browse(&server, &format!("{folder}{name}"), "localhost", &again).await;
            assert_eq!((again.status, again.body.as_str()), (304, ""), "{name}");
        }
        files += 1;
    }
    assert!(files > 8, "{files}");
    let missing = browse(&server, "/page/missing.js", "localhost", "").await;
    assert_eq!(missing.status, 404);
    assert!(missing.error()["message"].is_string());
}

#[tokio::test]
async fn the_page_needs_no_key_and_no_known_name_where_there_are_keys() {
    let config = Config {
        keys: Keys::new(["right"]),
        ..Config::default()
    };
    let keyed = Server::start(Setup {
        config,
        ..Setup::default()
    })
    .await;
    for host in ["localhost", "mybox:8080"] {
        for path in ["/", "/page/app.js"] {
            assert_eq!(
                browse(&keyed, path, host, "").await.status,
                200,
                "{host}{path}"
            );
        }
        let models = browse(&keyed, "/v1/models", host, "").await;
        assert!(
            [401, 403, 421].contains(&models.status),
            "{host}: {models:?}"
        );
    }
    let with_key = "authorization: Bearer right\r\n";
    assert_eq!(
        browse(&keyed, "/v1/models", "mybox:8080", with_key)
            .await
            .status,
        200
    );
    // The greeting names the model.
    assert_eq!(keyed.get("/").await.status, 401);
    let open = Server::start(Setup::default()).await;
    for path in ["/", "/page/app.js"] {
        let reply = browse(&open, path, "evil.example", "").await;
        assert!(reply.status >= 400, "{path}: {reply:?}");
    }
    let foreign = browse(&open, "/", "localhost", "origin: http://evil.example\r\n").await;
    assert_eq!(foreign.status, 403);
}

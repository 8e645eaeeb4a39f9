//! Paths as clients spell them: with and without `/v1`, with a slash at the end, and what
//! to say of a path that is not served.

/// The folder of the OpenAI API's paths.
const V1: &str = "/v1";
/// Characters of a path that are compared with the served ones.
const COMPARED_CHARS_MAX: usize = 128;

/// APIs that are known and not served: how their paths begin, and what they are. Those
/// without `/v1` are compared as they are.
const FOREIGN: &[(&str, &str)] = &[
    ("/api", "this part of Ollama's API"),
    ("/v1/messages/batches", "Anthropic's Message Batches API"),
    ("/v1/complete", "Anthropic's Text Completions API"),
    ("/v1/audio", "OpenAI's Audio API"),
    ("/v1/images", "OpenAI's Images API"),
    ("/v1/moderations", "OpenAI's Moderations API"),
    ("/v1/files", "OpenAI's Files API"),
    ("/v1/batches", "OpenAI's Batch API"),
    ("/v1/assistants", "OpenAI's Assistants API"),
    ("/v1/threads", "OpenAI's Assistants API"),
    ("/v1/rerank", "the Rerank API"),
    ("/v1beta", "Google's Gemini API"),
    ("/generate", "TGI's API"),
];

/// Every spelling under which `path` is served, its own first.
pub(crate) fn spellings(path: &str) -> Vec<String> {
    let bare = path.strip_prefix(V1).unwrap_or(path);
    if bare == "/" {
        return vec!["/".to_owned(), V1.to_owned(), format!("{V1}/")];
    }
    let (long, short) = (format!("{V1}{bare}"), bare.to_owned());
    let mut all = if path == short {
        vec![short, long]
    } else {
        vec![long, short]
    };
    // A wildcard takes the slash at the end too.
    if !path.contains('*') {
        all.extend(all.clone().into_iter().map(|path| path + "/"));
    }
    all
}

/// The API to which `path` belongs, if it is one that is known and not served.
pub(crate) fn foreign(path: &str) -> Option<&'static str> {
    let path = trimmed(path);
    let long = format!("{V1}{path}");
    let is_inside = |path: &str, folder: &str| {
        path.strip_prefix(folder)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    let mut all = FOREIGN.iter();
    all.find(|(folder, _)| {
        is_inside(&path, folder) || folder.starts_with(V1) && is_inside(&long, folder)
    })
    .map(|&(_, name)| name)
}

/// Which of the `served` paths was probably meant by `path`: the longest that it ends
/// with, one that it begins, or the one with the fewest different letters, a third of
/// them at most.
pub(crate) fn nearest<'a>(path: &str, served: &[&'a str]) -> Option<&'a str> {
    let path = trimmed(path);
    if path.is_empty() || path == V1 {
        return None;
    }
    let named = served.iter().copied().filter(|served| *served != "/");
    let ends = named.clone().filter(|served| path.ends_with(bare(served)));
    if let Some(found) = ends.max_by_key(|served| served.len()) {
        return Some(found);
    }
    let begins = |served: &&str| served.starts_with(&path) || bare(served).starts_with(&path);
    if let Some(found) = named.clone().find(begins) {
        return Some(found);
    }
    let away = |served: &str| distance(&path, served).min(distance(&path, bare(served)));
    let found = named.map(|served| (away(served), served)).min()?;
    (found.0 * 3 <= path.chars().count()).then_some(found.1)
}

/// `path` without the folder of the OpenAI API.
fn bare(path: &str) -> &str {
    path.strip_prefix(V1).unwrap_or(path)
}

/// `path` in small letters, without doubled slashes and the one at the end.
fn trimmed(path: &str) -> String {
    let parts = path.split('/').filter(|part| !part.is_empty());
    let joined = parts.flat_map(|part| ["/", part]).collect::<String>();
    let short: String = joined.chars().take(COMPARED_CHARS_MAX).collect();
    short.to_lowercase()
}

/// Letters to insert, delete or replace to make `b` of `a` (Levenshtein 1966), by rows.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.chars().count()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.chars().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.chars().count()]
}

#[cfg(test)]
mod tests {
    use super::*;

    const SERVED: &[&str] = &[
        "/",
        "/health",
        "/metrics",
        "/v1/models",
        "/v1/chat/completions",
        "/v1/completions",
    ];

    #[test]
    fn a_path_is_served_with_and_without_its_folder_and_a_slash() {
        assert_eq!(spellings("/"), ["/", "/v1", "/v1/"]);
        assert_eq!(
            spellings("/health"),
            ["/health", "/v1/health", "/health/", "/v1/health/"]
        );
        assert_eq!(
            spellings("/v1/completions"),
            [
                "/v1/completions",
                "/completions",
                "/v1/completions/",
                "/completions/"
            ]
        );
        assert_eq!(
            spellings("/v1/models/{*id}"),
            ["/v1/models/{*id}", "/models/{*id}"]
        );
    }

    #[test]
    fn the_nearest_path_is_named_if_one_is_near() {
        for (path, meant) in [
            ("/v1/v1/chat/completions", Some("/v1/chat/completions")),
            ("/v1//chat/completions", Some("/v1/chat/completions")),
            ("/V1/Chat/Completions", Some("/v1/chat/completions")),
            ("/openai/v1/completions", Some("/v1/completions")),
            ("/v1/chat", Some("/v1/chat/completions")),
            ("/chat", Some("/v1/chat/completions")),
            ("/v1/chat/completion", Some("/v1/chat/completions")),
            ("/chat/competions", Some("/v1/chat/completions")),
            ("/v1/model", Some("/v1/models")),
            ("/helth", Some("/health")),
            ("/healthz", Some("/health")),
            ("/metric", Some("/metrics")),
            ("/%00", None),
            ("/favicon.ico", None),
            ("/robots.txt", None),
            ("", None),
            ("/v1", None),
        ] {
            assert_eq!(nearest(path, SERVED), meant, "{path}");
        }
    }

    #[test]
    fn foreign_apis_are_known_by_their_folder() {
        for (path, name) in [
            ("/api/embed", Some("this part of Ollama's API")),
            ("/api/", Some("this part of Ollama's API")),
            (
                "/v1/messages/batches/b_1",
                Some("Anthropic's Message Batches API"),
            ),
            ("/messages/batches", Some("Anthropic's Message Batches API")),
            ("/v1/messages", None),
            ("/v1/responses", None),
            ("/v1beta/models/x", Some("Google's Gemini API")),
            ("/apiary", None),
            ("/v1/messagesx", None),
            ("/nothing", None),
        ] {
            assert_eq!(foreign(path), name, "{path}");
        }
    }

    #[test]
    fn distances_count_letters() {
        for (a, b, n) in [
            ("", "", 0),
            ("", "abc", 3),
            ("kitten", "sitting", 3),
            ("a", "a", 0),
        ] {
            assert_eq!(distance(a, b), n, "{a} {b}");
            assert_eq!(distance(b, a), n, "{b} {a}");
        }
    }
}

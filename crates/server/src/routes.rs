//! Every path of the server: what it is for, what it takes and who answers it.

use std::sync::{Arc, LazyLock};

use axum::routing::{MethodRouter, delete, get, post};

use crate::dialect::{Dialect, answer};
use crate::llama::completion::{Completion, Continued, Filled};
use crate::openai::responses::compact::Compact;
use crate::openai::responses::{self, Respond, socket, stored};
use crate::openai::{chat, models};
use crate::server::Server;
use crate::table::Table;
use crate::{anthropic, health, llama, ollama, openai, openapi, page, render, router};

/// The media type of server-sent events.
const EVENTS: &str = "text/event-stream";
/// The media type of a stream of JSON documents, one a line.
const LINES: &str = "application/x-ndjson";

/// One path.
pub(crate) struct Route {
    /// The path as it is documented; [`paths::spellings`](crate::paths::spellings) has all that
    /// are served.
    pub(crate) path: &'static str,
    /// The methods that it takes, joined by `or`.
    pub(crate) method: &'static str,
    /// What it does, in one line.
    pub(crate) about: &'static str,
    /// Whether it is open without a key.
    pub(crate) is_public: bool,
    /// How its errors are spelled.
    pub(crate) dialect: &'static Dialect,
    /// The fields of the JSON object that its `POST` takes, in each form that it knows.
    pub(crate) bodies: &'static [&'static LazyLock<Table>],
    /// The media type of its answer.
    pub(crate) returns: &'static str,
    /// The media type of its stream, if one can be asked for.
    pub(crate) stream: Option<&'static str>,
    pub(crate) methods: fn() -> MethodRouter<Arc<Server>>,
}

impl Route {
    const fn new(
        path: &'static str,
        method: &'static str,
        about: &'static str,
        methods: fn() -> MethodRouter<Arc<Server>>,
    ) -> Self {
        Route {
            path,
            method,
            about,
            is_public: false,
            dialect: &openai::DIALECT,
            bodies: &[],
            returns: "application/json",
            stream: None,
            methods,
        }
    }

    const fn get(
        path: &'static str,
        about: &'static str,
        methods: fn() -> MethodRouter<Arc<Server>>,
    ) -> Self {
        Route::new(path, "GET", about, methods)
    }

    const fn post(
        path: &'static str,
        about: &'static str,
        methods: fn() -> MethodRouter<Arc<Server>>,
    ) -> Self {
        Route::new(path, "POST", about, methods)
    }

    /// A path that is open without a key.
    const fn public(self) -> Self {
        Route {
            is_public: true,
            ..self
        }
    }

    /// A path whose errors are spelled as `dialect` does.
    const fn of(self, dialect: &'static Dialect) -> Self {
        Route { dialect, ..self }
    }

    /// A path that takes an object with the fields of one of `bodies`.
    const fn takes(self, bodies: &'static [&'static LazyLock<Table>]) -> Self {
        Route { bodies, ..self }
    }

    /// A path whose answer has another media type than JSON's.
    const fn returns(self, media_type: &'static str) -> Self {
        Route {
            returns: media_type,
            ..self
        }
    }

    /// A path that answers with a stream of this media type where it is asked to.
    const fn streams(self, media_type: &'static str) -> Self {
        Route {
            stream: Some(media_type),
            ..self
        }
    }
}

/// Every path of the server.
pub(crate) static ROUTES: &[Route] = &[
    Route::get(
        page::ROOT,
        "the chat page; for programs, what is served",
        || get(router::greeting),
    )
    .returns("*/*"),
    Route::get(page::FILE, "a file of the chat page", || get(page::file))
        .public()
        .returns("*/*"),
    Route::get("/openapi.json", "this description", || {
        get(openapi::document)
    })
    .public(),
    Route::get("/health", "whether requests are taken", || {
        get(health::ready)
    })
    .public(),
    Route::get("/health/live", "whether the engine runs", || {
        get(health::live)
    })
    .public(),
    Route::get("/health/ready", "whether requests are taken", || {
        get(health::ready)
    })
    .public(),
    Route::get("/metrics", "metrics in Prometheus' text format", || {
        get(health::metrics)
    })
    .returns("text/plain"),
    Route::get("/v1/models", "what is served", || get(models::list)),
    Route::get("/v1/models/{*id}", "a model that is served", || {
        get(models::get)
    }),
    Route::post("/models/load", "begins to load a model", || {
        post(llama::models::load)
    })
    .of(&llama::DIALECT)
    .takes(&[&llama::tables::MODELS]),
    Route::post("/models/unload", "unloads a model", || {
        post(llama::models::unload)
    })
    .of(&llama::DIALECT)
    .takes(&[&llama::tables::MODELS]),
    Route::post(
        "/v1/chat/completions",
        "writes the next message of a conversation",
        || post(answer::<chat::Chat>),
    )
    .takes(&[&openai::tables::CHAT])
    .streams(EVENTS),
    Route::post("/v1/completions", "goes on with a text", || {
        post(llama::completion::completions)
    })
    .takes(&[&openai::tables::COMPLETIONS, &llama::tables::TEXT])
    .streams(EVENTS),
    Route::post(
        "/completion",
        "goes on with a text, in llama-server's form",
        || post(answer::<Completion<Continued>>),
    )
    .of(&llama::DIALECT)
    .takes(&[&llama::tables::TEXT])
    .streams(EVENTS),
    Route::post("/infill", "fills a gap in a text", || {
        post(answer::<Completion<Filled>>)
    })
    .of(&llama::DIALECT)
    .takes(&[&llama::tables::TEXT])
    .streams(EVENTS),
    Route::post("/tokenize", "the tokens of a text", || {
        post(llama::tokens::tokenize)
    })
    .of(&llama::DIALECT)
    .takes(&[&llama::tables::TOKENIZER, &llama::tables::VLLM_TOKENIZER]),
    Route::post("/detokenize", "the text of tokens", || {
        post(llama::tokens::detokenize)
    })
    .of(&llama::DIALECT)
    .takes(&[&llama::tables::TOKENIZER]),
    Route::post(
        "/apply-template",
        "the prompt that a conversation becomes",
        || post(llama::tokens::apply_template),
    )
    .of(&llama::DIALECT)
    .takes(&[&openai::tables::CHAT]),
    Route::get("/props", "settings of the server and the model", || {
        get(llama::props::props).post(llama::props::set_props)
    })
    .of(&llama::DIALECT),
    Route::get("/slots", "the requests that run", || {
        get(llama::props::slots)
    })
    .of(&llama::DIALECT),
    Route::get(
        "/lora-adapters",
        "the adapters that are loaded: none",
        || get(llama::props::adapters).post(llama::props::set_adapters),
    )
    .of(&llama::DIALECT),
    Route::post(
        "/v1/messages",
        "writes the next message of a conversation",
        || post(answer::<anthropic::answer::Message>),
    )
    .of(&anthropic::DIALECT)
    .takes(&[&anthropic::tables::MESSAGES])
    .streams(EVENTS),
    Route::post(
        "/v1/messages/count_tokens",
        "counts the tokens of a prompt",
        || post(anthropic::count::count_tokens),
    )
    .of(&anthropic::DIALECT)
    .takes(&[&anthropic::tables::MESSAGES]),
    Route::new(
        "/v1/responses",
        "POST or GET",
        "writes the next items of a conversation; `GET` with an upgrade is a WebSocket",
        || post(answer::<Respond>).get(socket::connect),
    )
    .takes(&[&responses::tables::RESPONSES])
    .streams(EVENTS),
    Route::post("/v1/responses/compact", "summarizes a conversation", || {
        post(answer::<Compact>)
    })
    .takes(&[&responses::tables::RESPONSES]),
    Route::new(
        "/v1/responses/{id}",
        "GET or DELETE",
        "a response that is kept",
        || get(stored::get).delete(stored::delete),
    ),
    Route::get(
        "/v1/responses/{id}/input_items",
        "the input of a response that is kept",
        || get(stored::input_items),
    ),
    Route::post(
        "/v1/responses/{id}/cancel",
        "refused: nothing runs in the background",
        || post(stored::cancel),
    ),
    Route::post("/v1/embeddings", "vectors of texts", || {
        post(llama::embedding::embeddings)
    })
    .takes(&[&openai::embeddings::EMBEDDINGS, &llama::tables::EMBEDDING]),
    Route::post(
        "/embedding",
        "vectors of texts, in llama-server's form",
        || post(llama::embedding::embedding),
    )
    .of(&llama::DIALECT)
    .takes(&[&llama::tables::EMBEDDING]),
    Route::post(
        "/v1/chat/completions/render",
        "the tokens that a conversation becomes, in vLLM's form",
        || post(render::one::<chat::Chat>),
    )
    .takes(&[&openai::tables::CHAT]),
    Route::post(
        "/v1/completions/render",
        "the tokens of each prompt, in vLLM's form",
        || post(render::several::<openai::completions::Completion>),
    )
    .takes(&[&openai::tables::COMPLETIONS]),
    Route::post(
        "/v1/responses/render",
        "the tokens that a conversation becomes, in vLLM's form",
        || post(render::one::<Respond>),
    )
    .takes(&[&responses::tables::RESPONSES]),
    Route::post(
        "/v1/messages/render",
        "the tokens that a conversation becomes, in vLLM's form",
        || post(render::one::<anthropic::answer::Message>),
    )
    .of(&anthropic::DIALECT)
    .takes(&[&anthropic::tables::MESSAGES]),
    Route::get("/api/version", "the version of Ollama's API", || {
        get(ollama::models::version)
    })
    .of(&ollama::DIALECT),
    Route::get("/api/tags", "what is served", || get(ollama::models::tags)).of(&ollama::DIALECT),
    Route::get("/api/ps", "what is loaded", || get(ollama::models::ps)).of(&ollama::DIALECT),
    Route::post("/api/show", "a model that is served", || {
        post(ollama::models::show)
    })
    .of(&ollama::DIALECT)
    .takes(&[&ollama::tables::CHAT]),
    Route::post(
        "/api/chat",
        "writes the next message of a conversation",
        || post(answer::<ollama::answer::Chat>),
    )
    .of(&ollama::DIALECT)
    .takes(&[&ollama::tables::CHAT])
    .streams(LINES),
    Route::post("/api/generate", "goes on with a text", || {
        post(answer::<ollama::answer::Generate>)
    })
    .of(&ollama::DIALECT)
    .takes(&[&ollama::tables::GENERATE])
    .streams(LINES),
    Route::post("/api/embed", "vectors of texts", || {
        post(ollama::embed::embed)
    })
    .of(&ollama::DIALECT)
    .takes(&[&ollama::tables::EMBED]),
    Route::post("/api/embeddings", "the vector of a text", || {
        post(ollama::embed::embeddings)
    })
    .of(&ollama::DIALECT)
    .takes(&[&ollama::tables::EMBEDDINGS]),
    unchangeable("/api/pull"),
    unchangeable("/api/push"),
    unchangeable("/api/create"),
    unchangeable("/api/copy"),
    unchangeable("/api/blobs/{digest}"),
    Route::new("/api/delete", "DELETE", UNCHANGEABLE, || {
        delete(ollama::models::refuse_change)
    })
    .of(&ollama::DIALECT),
];

/// What paths are for that would change which models there are.
const UNCHANGEABLE: &str = "refused: models are chosen when the server starts";

/// A path of Ollama's API that would change which models there are.
const fn unchangeable(path: &'static str) -> Route {
    let route = Route::post(path, UNCHANGEABLE, || post(ollama::models::refuse_change));
    route.of(&ollama::DIALECT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_health_and_what_is_the_same_everywhere_is_public() {
        let public = ROUTES.iter().filter(|route| route.is_public);
        let public: Vec<&str> = public.map(|route| route.path).collect();
        let health = ["/health", "/health/live", "/health/ready"];
        assert_eq!(public[..2], [page::FILE, "/openapi.json"]);
        assert_eq!(public[2..], health);
    }

    #[test]
    fn a_route_says_which_method_it_takes() {
        for route in ROUTES {
            let taken = format!("{:?}", (route.methods)());
            for method in route.method.split(" or ") {
                assert!(taken.contains(method), "{}: {taken}", route.path);
            }
        }
    }
}

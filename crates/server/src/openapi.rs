//! `GET /openapi.json`: the server described in OpenAPI 3.1, from [the routes](ROUTES) and the
//! [tables](crate::table) of fields.

use std::sync::LazyLock;

use axum::body::{Body, Bytes};
use axum::http::{Response, header};
use engine::SAMPLER_NUMBERS;
use serde_json::{Map, Value, json};

use crate::errors::ApiError;
use crate::openai::bytes;
use crate::routes::{ROUTES, Route};
use crate::table::{Entry, Kind, Table};

/// The name of the security scheme.
const KEY: &str = "key";

/// What the description says of itself.
const ABOUT: &str = "The APIs of OpenAI, Anthropic, llama-server and Ollama over one engine. \
    Every path is served with and without `/v1`. A field that is `null` is one that is left out. \
    Fields that are not listed are refused by name if they would change the answer, else ignored \
    and named in the response header `x-ignored-fields`.";

/// `GET /openapi.json`.
pub(crate) async fn document() -> Response<Body> {
    static PAGE: LazyLock<Bytes> = LazyLock::new(|| bytes(&describe()).into());
    let mut response = Response::new(Body::from(PAGE.clone()));
    let json = header::HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}

/// The whole description.
fn describe() -> Value {
    let mut paths = Map::new();
    let mut schemas = Map::new();
    for route in ROUTES {
        for table in route.bodies {
            let schema = || schema(table);
            schemas.entry(table.name()).or_insert_with(schema);
        }
        paths.insert(route.path.replace("{*", "{"), path(route));
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "paceline",
            "version": env!("CARGO_PKG_VERSION"),
            "description": ABOUT,
            "license": {"name": env!("CARGO_PKG_LICENSE"), "identifier": env!("CARGO_PKG_LICENSE")},
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                KEY: {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "one of the keys that the server was started with, if any; the header `x-api-key` takes it too",
                },
            },
        },
        "security": [{KEY: []}, {}],
    })
}

/// The operations of a path.
fn path(route: &Route) -> Value {
    let mut item = Map::new();
    for method in route.method.split(" or ") {
        item.insert(method.to_lowercase(), operation(route, method));
    }
    let names = route.path.split('/').filter_map(|part| {
        let name = part.strip_prefix('{')?.strip_suffix('}')?;
        Some(name.trim_start_matches('*'))
    });
    let parameters: Vec<Value> = names
        .map(|name| json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}}))
        .collect();
    if !parameters.is_empty() {
        item.insert("parameters".to_owned(), parameters.into());
    }
    item.into()
}

/// One method of a path.
fn operation(route: &Route, method: &str) -> Value {
    let mut content = Map::new();
    content.insert(route.returns.to_owned(), json!({}));
    if let Some(stream) = route.stream {
        content.insert(stream.to_owned(), json!({}));
    }
    let error = (route.dialect.error)(&ApiError::internal(), "req_0");
    let example: Value = serde_json::from_str(&error).unwrap_or_default();
    let name: Vec<&str> = route.path.split(['/', '-', '{', '*', '}', '.']).collect();
    let mut operation = json!({
        "operationId": format!("{}{}", method.to_lowercase(), name.join("_").trim_end_matches('_')),
        "summary": route.about,
        "tags": [route.dialect.name],
        "responses": {
            "200": {"description": route.about, "content": content},
            "default": {
                "description": "what was wrong, and what to do",
                "content": {"application/json": {"schema": {"type": "object"}, "example": example}},
            },
        },
    });
    if !route.bodies.is_empty() {
        let refs = route.bodies.iter();
        let mut refs: Vec<Value> = refs
            .map(|table| json!({"$ref": format!("#/components/schemas/{}", table.name())}))
            .collect();
        let schema = match refs.len() {
            1 => refs.remove(0),
            _ => json!({"anyOf": refs}),
        };
        operation["requestBody"] =
            json!({"required": true, "content": {"application/json": {"schema": schema}}});
    }
    if route.is_public {
        operation["security"] = json!([]);
    }
    operation
}

/// The JSON Schema of a request with the fields of `table`.
fn schema(table: &Table) -> Value {
    let mut root = json!({"type": "object", "properties": {}, "required": table.required()});
    let honored = table.entries().iter();
    for entry in honored.filter(|entry| entry.about().is_some()) {
        let mut at = &mut root;
        for name in entry.path.split('.') {
            let list = name.strip_suffix("[]");
            at = &mut at["properties"][list.unwrap_or(name)];
            if list.is_some() {
                at = &mut at["items"];
            }
        }
        *at = field(entry);
    }
    root
}

/// The JSON Schema of a field.
fn field(entry: &Entry) -> Value {
    let strings = json!({"type": "array", "items": {"type": "string"}});
    let mut schema = match entry.kind {
        Kind::Any => json!({}),
        Kind::Bool => json!({"type": ["boolean", "null"]}),
        Kind::Integer => json!({"type": ["integer", "null"]}),
        Kind::Number => json!({"type": ["number", "null"]}),
        Kind::Text => json!({"type": ["string", "null"]}),
        Kind::Texts => json!({"type": ["array", "null"], "items": {"type": "string"}}),
        Kind::TextOrTexts => json!({"anyOf": [{"type": ["string", "null"]}, strings]}),
        Kind::Object => json!({"type": ["object", "null"]}),
        Kind::List => json!({"type": ["array", "null"]}),
    };
    let name = entry.path.rsplit('.').next();
    if let Some(number) = SAMPLER_NUMBERS.iter().find(|n| Some(n.name) == name) {
        schema["minimum"] = json!(number.range.start());
        schema["maximum"] = json!(number.range.end());
    }
    schema["description"] = json!(entry.about());
    schema
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_route_and_every_honored_field_is_described() {
        let page = describe();
        let mut fields = 0;
        for route in ROUTES {
            let path = &page["paths"][route.path.replace("{*", "{")];
            for method in route.method.to_lowercase().split(" or ") {
                let operation = &path[method];
                assert_eq!(operation["summary"], route.about);
                for table in route.bodies {
                    let schema = &page["components"]["schemas"][table.name()];
                    let honored = table.entries().iter().filter(|e| e.about().is_some());
                    for entry in honored {
                        let pointer = entry
                            .path
                            .replace("[]", "/items")
                            .replace('.', "/properties/");
                        let found = schema["properties"].pointer(&format!("/{pointer}"));
                        assert_eq!(found.unwrap()["description"], json!(entry.about()));
                        fields += 1;
                    }
                }
            }
        }
        assert!(fields > 500, "{fields}");
    }

    #[test]
    fn fields_have_their_types_and_ranges() {
        let page = describe();
        let chat = &page["components"]["schemas"]["ChatRequest"];
        let properties = &chat["properties"];
        assert_eq!(chat["required"], json!(["messages"]));
        assert_eq!(properties["temperature"]["type"], json!(["number", "null"]));
        assert_eq!(properties["temperature"]["maximum"], json!(2.0));
        assert_eq!(properties["messages"]["type"], json!(["array", "null"]));
        let role = &properties["messages"]["items"]["properties"]["role"];
        assert_eq!(role["type"], json!(["string", "null"]));
        assert_eq!(
            page["paths"]["/health"]["get"]["security"],
            json!([]),
            "health needs no key"
        );
        let streams = &page["paths"]["/api/chat"]["post"]["responses"]["200"]["content"];
        assert!(streams["application/x-ndjson"].is_object());
    }
}

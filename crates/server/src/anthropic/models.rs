//! `GET /v1/models` and `GET /v1/models/{id}` in Anthropic's form.

use serde_json::{Value, json};
use text::strftime;

use crate::server::Server;

/// The list of all models, as the only page of a list.
pub(crate) fn list(server: &Server) -> Value {
    let names = server.registry.names();
    let data: Vec<Value> = (0..names.len()).map(|i| model(server, i)).collect();
    json!({"data": data, "has_more": false, "first_id": names.first(), "last_id": names.last()})
}

/// Model `i`.
pub(crate) fn model(server: &Server, i: usize) -> Value {
    let name = &server.registry.entries[i].names[0];
    let context = server.registry.last_info(i).map(|info| info.context);
    let since = i64::try_from(server.started).unwrap_or_default();
    json!({
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": strftime("%Y-%m-%dT%H:%M:%SZ", since),
        "max_input_tokens": context,
        "max_tokens": context,
        "lifecycle": "active",
    })
}

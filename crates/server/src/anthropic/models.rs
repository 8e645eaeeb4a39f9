//! `GET /v1/models` and `GET /v1/models/{id}` in Anthropic's form.

use serde_json::{Value, json};
use text::strftime;

use crate::App;

/// The list of the one model, as the only page of a list.
pub(crate) fn list(app: &App) -> Value {
    let name = app.model();
    json!({"data": [model(app)], "has_more": false, "first_id": name, "last_id": name})
}

/// The model.
pub(crate) fn model(app: &App) -> Value {
    let info = app.engine.info();
    let since = i64::try_from(app.started).unwrap_or_default();
    json!({
        "type": "model",
        "id": app.model(),
        "display_name": app.model(),
        "created_at": strftime("%Y-%m-%dT%H:%M:%SZ", since),
        "max_input_tokens": info.context,
        "max_tokens": info.context,
        "lifecycle": "active",
    })
}

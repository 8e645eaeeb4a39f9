//! Renders a conversation with a model's chat template and shows the tokens of the prompt.
//!
//! ```sh
//! cargo run -p text --example prompt -- [FOLDER]
//! ```

use serde_json::{Map, json};
use std::path::Path;
use text::{Detokenizer, Specials, TextFiles};

fn main() -> Result<(), text::TextError> {
    let bundled = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tiny-qwen3.5");
    let folder = std::env::args()
        .nth(1)
        .unwrap_or_else(|| bundled.to_owned());
    // Tokenizer, template, stop tokens and recommended sampling; no weights are read.
    let text = TextFiles::open(Path::new(&folder))?;
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What flies in the wind?"}]},
    ]);
    let prompt = text.encode_chat(&messages, None, true, &Map::new())?;
    let rendered = text.tokenizer.detokenize(&prompt, Specials::Show);
    println!("{rendered}\n\n{} tokens:", prompt.len());

    // A detokenizer takes one token at a time and gives whole characters.
    let mut detokenizer = Detokenizer::new(Specials::Show);
    for &id in &prompt {
        println!("{id:>7} {:?}", detokenizer.push(&text.tokenizer, id));
    }
    println!("\na reply ends with one of {:?}", text.stop_tokens.ids());
    Ok(())
}

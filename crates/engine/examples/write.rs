//! Loads a model from a folder, writes a text after a prompt, and says what speculation did.
//!
//! ```sh
//! cargo run --release -p engine --example write -- [FOLDER] [PROMPT]
//! ```

use engine::{Channel, Engine, EngineOptions, Event, LoadOptions, Request, Source, load};
use std::error::Error;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let bundled = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tiny-gemma4");
    let folder = arguments.next().unwrap_or_else(|| bundled.to_owned());
    let prompt = arguments.next();
    let prompt = prompt.as_deref().unwrap_or("Tell me a story about a kite.");

    // Everything runs on a backend; the engine knows no device by name.
    let backend = Arc::new(cpu::Cpu::new(cpu::CpuOptions::default())?);
    let model = load(
        backend,
        &Source::Folder(PathBuf::from(folder)),
        &LoadOptions::default(),
    )?;
    let info = &model.info;
    println!("{} ({}), {}", info.name, info.family, info.backend);
    println!("drafter: {}", info.drafter_reason);

    let engine = Engine::start(model, EngineOptions::default());
    let messages = serde_json::json!([{"role": "user", "content": prompt}]);
    let none = serde_json::Map::new();
    let mut request = Request::new(engine.text().encode_chat(&messages, None, true, &none)?);
    request.max_tokens = Some(64);

    // Events come on the engine's thread; a channel brings them here.
    let (events, inbox) = channel();
    engine.submit(request, Box::new(move |event| events.send(event).is_ok()))?;
    for event in inbox {
        match event {
            Event::Prefill { done, total, .. } => eprintln!("prompt: {done} of {total} tokens"),
            Event::Round(_) => {}
            Event::Text(segments) => {
                for segment in segments.iter().filter(|s| s.channel == Channel::Answer) {
                    print!("{}", segment.text);
                }
                std::io::stdout().flush()?;
            }
            Event::Done(outcome) => {
                let record = serde_json::to_string_pretty(&outcome.speculation)?;
                println!("\n{:?} after {record}", outcome.finish);
            }
            Event::Failed(reason) => return Err(reason.into()),
        }
    }
    Ok(())
}

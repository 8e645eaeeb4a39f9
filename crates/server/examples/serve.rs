//! Serves a bundled model. With a port it serves there until the program is stopped; without one
//! it takes any port, sends itself one request, prints the answer and exits.
//!
//! ```sh
//! cargo run --release -p server --example serve -- [PORT]
//! ```

use engine::{Engine, EngineOptions, LoadOptions, Source, load};
use server::{Config, ModelConfig, Models, serve};
use std::error::Error;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

const REQUEST: &str =
    r#"{"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 24}"#;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let port: Option<u16> = std::env::args()
        .nth(1)
        .map(|port| port.parse())
        .transpose()?;
    let backend = Arc::new(cpu::Cpu::new(cpu::CpuOptions::default())?);
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tiny-gemma4");
    let options = LoadOptions {
        sequences: 4,
        ..LoadOptions::default()
    };
    let model = load(backend, &Source::Folder(folder.into()), &options)?;
    let engine = Arc::new(Engine::start(model, EngineOptions::default()));
    let models = Models::one(engine, ModelConfig::default());

    let listener = TcpListener::bind(("127.0.0.1", port.unwrap_or(0))).await?;
    let address = listener.local_addr()?;
    println!("serving at http://{address}/v1");
    let (stop, stopped) = oneshot::channel::<()>();
    let server = serve(Config::default(), models, listener, async {
        // Ends once `stop` is used or dropped.
        let _ = stopped.await;
    });
    if port.is_some() {
        let _running = stop;
        return Ok(server.await?);
    }
    let client = async move {
        let mut connection = TcpStream::connect(address).await?;
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\nConnection: close\r\n\r\n",
            REQUEST.len()
        );
        connection.write_all((head + REQUEST).as_bytes()).await?;
        let mut response = String::new();
        connection.read_to_string(&mut response).await?;
        println!("{response}");
        let _ = stop.send(());
        Ok::<_, std::io::Error>(())
    };
    let (served, asked) = tokio::join!(server, client);
    asked?;
    Ok(served?)
}

//! A server in this process and a client that sees bytes.

use std::fs;
use std::net::SocketAddr;
use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use engine::{
    CacheFolder, DraftChoice, Engine, EngineError, EngineOptions, KvMemory, LoadOptions, PageSink,
    Source,
};
use serde_json::Value;
use server::{Config, ModelConfig, Models, ServeError};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

/// Longest wait for anything; a test that needs it has found a hang.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// How to set up a server.
pub(crate) struct Setup {
    pub(crate) model: &'static str,
    pub(crate) sequences: usize,
    pub(crate) queue: usize,
    pub(crate) context: usize,
    pub(crate) chunk: usize,
    /// Whether all requests share memory for one whole context.
    pub(crate) is_tight: bool,
    pub(crate) draft: DraftChoice,
    pub(crate) page_sink: Option<PageSink>,
    pub(crate) config: Config,
    pub(crate) settings: ModelConfig,
    /// Where the prefix cache outlives the server.
    pub(crate) disk: Option<CacheFolder>,
}

impl Default for Setup {
    fn default() -> Self {
        Setup {
            model: "tiny-qwen3.5",
            sequences: 2,
            queue: 64,
            context: 512,
            chunk: 64,
            is_tight: false,
            draft: DraftChoice::Auto,
            page_sink: None,
            config: Config::default(),
            settings: ModelConfig::default(),
            disk: None,
        }
    }
}

/// A copy of `tiny-qwen3.5` in which `file` is `text`.
pub(crate) fn altered(file: &str, text: &str) -> &'static str {
    altered_in(&format!("other-{file}"), file, text)
}

/// A copy of `tiny-qwen3.5` in a folder called `name`, in which `file` is `text`.
pub(crate) fn altered_in(name: &str, file: &str, text: &str) -> &'static str {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-qwen3.5");
    let to = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::create_dir_all(&to).unwrap();
    for file in fs::read_dir(from).unwrap().map(Result::unwrap) {
        fs::copy(file.path(), to.join(file.file_name())).unwrap();
    }
    fs::write(to.join(file), text).unwrap();
    to.to_str().unwrap().to_owned().leak()
}

/// A running server.
pub(crate) struct Peer {
    pub(crate) address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<Result<(), ServeError>>,
}

/// A running server of one model.
pub(crate) struct Server {
    peer: Peer,
    pub(crate) engine: Arc<Engine>,
}

impl Deref for Server {
    type Target = Peer;

    fn deref(&self) -> &Peer {
        &self.peer
    }
}

impl DerefMut for Server {
    fn deref_mut(&mut self) -> &mut Peer {
        &mut self.peer
    }
}

impl Server {
    pub(crate) async fn start(setup: Setup) -> Server {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../models")
            .join(setup.model);
        let mut options = LoadOptions {
            draft: setup.draft,
            sequences: setup.sequences,
            context: Some(setup.context),
            chunk: Some(setup.chunk),
            identify: setup.disk.is_some(),
            // A text that repeats itself would end before others have come that are to run beside it.
            draft_max: 3,
            ..LoadOptions::default()
        };
        let backend = cpu::Cpu::new(cpu::CpuOptions {
            threads: 1,
            ..cpu::CpuOptions::default()
        })
        .unwrap();
        let (backend, source) = (Arc::new(backend), Source::Folder(folder));
        if setup.is_tight {
            options.kv_memory = KvMemory::Bytes(0);
            let refused = engine::load(backend.clone(), &source, &options);
            let Err(EngineError::KvTooSmall { least, .. }) = refused else {
                panic!("nothing holds no context");
            };
            options.kv_memory = KvMemory::Bytes(least);
        }
        let model = engine::load(backend, &source, &options).unwrap();
        let engine = Arc::new(Engine::start(
            model,
            EngineOptions {
                queue: setup.queue,
                page_sink: setup.page_sink,
                disk: setup.disk,
                ..EngineOptions::default()
            },
        ));
        let models = Models::one(engine.clone(), setup.settings);
        Server {
            peer: Peer::start(setup.config, models).await,
            engine,
        }
    }

    /// Waits for `serve` to return.
    pub(crate) async fn ended(self) {
        self.peer.ended().await.unwrap();
    }

    /// Waits until `is_so`.
    pub(crate) async fn until(&self, what: &str, is_so: impl Fn(&engine::Counters) -> bool) {
        let start = Instant::now();
        while !is_so(self.engine.counters()) {
            assert!(
                start.elapsed() < PATIENCE,
                "{what}: {:?}",
                self.engine.counters()
            );
            sleep(Duration::from_millis(2)).await;
        }
    }

    /// Waits until nothing runs and nothing is held.
    pub(crate) async fn until_idle(&self) {
        self.until("idle", |counters| {
            counters.running.load(Ordering::Acquire) + counters.waiting.load(Ordering::Acquire) == 0
        })
        .await;
    }
}

impl Peer {
    /// Serves `models`.
    pub(crate) async fn start(config: Config, models: Models) -> Peer {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel();
        let shutdown = async move {
            let _ = stopped.await;
        };
        let task = tokio::spawn(server::serve(config, models, listener, shutdown));
        Peer {
            address,
            stop: Some(stop),
            task,
        }
    }

    /// Begins a shutdown.
    pub(crate) fn stop(&mut self) {
        self.stop.take().unwrap().send(()).unwrap();
    }

    /// Waits for `serve` to return.
    pub(crate) async fn ended(self) -> Result<(), ServeError> {
        timeout(PATIENCE, self.task).await.unwrap().unwrap()
    }

    pub(crate) async fn get(&self, path: &str) -> Reply {
        self.send(format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n").as_bytes())
            .await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Reply {
        self.send(&request(path, "", body.to_string().as_bytes()))
            .await
    }

    pub(crate) async fn chat(&self, body: &Value) -> Reply {
        self.post("/v1/chat/completions", body).await
    }

    pub(crate) async fn send(&self, bytes: &[u8]) -> Reply {
        let mut exchange = self.open(bytes).await;
        timeout(PATIENCE, exchange.reply())
            .await
            .expect("an answer in time")
    }

    /// Sends `bytes` and leaves the answer to be read.
    pub(crate) async fn open(&self, bytes: &[u8]) -> Exchange {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        // A server that refuses early may close before it has read everything.
        let _ = stream.write_all(bytes).await;
        Exchange {
            stream,
            buffer: Vec::new(),
        }
    }
}

/// A POST request with `headers` (each with its line break) and `body`.
pub(crate) fn request(path: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{headers}content-length: {length}\r\n\r\n"
    );
    [head.as_bytes(), body].concat()
}

/// A whole answer.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: String,
}

impl Reply {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, value)| value.as_str())
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|_| panic!("no JSON: {self:?}"))
    }

    /// The error document, after checking its shape.
    pub(crate) fn error(&self) -> Value {
        let error = self.json()["error"].clone();
        assert!(
            error["message"].as_str().is_some_and(|m| !m.is_empty()),
            "{self:?}"
        );
        assert!(error["type"].is_string(), "{self:?}");
        assert!(
            error.get("param").is_some() && error.get("code").is_some(),
            "{self:?}"
        );
        error
    }

    /// The documents of a stream, which must end with `[DONE]`.
    pub(crate) fn events(&self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{self:?}");
        let mut events = data(&self.body);
        assert_eq!(events.pop().as_deref(), Some("[DONE]"), "{self:?}");
        events
            .iter()
            .map(|event| serde_json::from_str(event).unwrap())
            .collect()
    }

    /// The text of a whole or streamed answer of either endpoint.
    pub(crate) fn text(&self) -> String {
        assert_eq!(self.status, 200, "{self:?}");
        let of = |choice: &Value| {
            let pointers = ["/message/content", "/delta/content", "/text"];
            let text = pointers
                .iter()
                .find_map(|p| choice.pointer(p))
                .and_then(Value::as_str);
            text.unwrap_or_default().to_owned()
        };
        if self
            .header("content-type")
            .unwrap()
            .starts_with("text/event-stream")
        {
            self.events()
                .iter()
                .map(|event| of(&event["choices"][0]))
                .collect()
        } else {
            of(&self.json()["choices"][0])
        }
    }
}

/// The data lines of a stream.
pub(crate) fn data(body: &str) -> Vec<String> {
    body.lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .map(str::to_owned)
        .collect()
}

/// A request that has been sent, and what came back so far.
pub(crate) struct Exchange {
    pub(crate) stream: TcpStream,
    pub(crate) buffer: Vec<u8>,
}

impl Exchange {
    /// Reads until the answer is whole.
    pub(crate) async fn reply(&mut self) -> Reply {
        loop {
            if let Some(reply) = self.parse() {
                return reply;
            }
            let mut piece = [0; 4096];
            match self.stream.read(&mut piece).await {
                Ok(n) if n > 0 => self.buffer.extend(&piece[..n]),
                end => panic!("{end:?} after {:?}", String::from_utf8_lossy(&self.buffer)),
            }
        }
    }

    /// Reads until the bytes so far contain `what`.
    pub(crate) async fn until(&mut self, what: &str) {
        let wait = async {
            while !String::from_utf8_lossy(&self.buffer).contains(what) {
                let mut piece = [0; 4096];
                let n = self.stream.read(&mut piece).await.unwrap();
                assert!(
                    n > 0,
                    "no {what} in {:?}",
                    String::from_utf8_lossy(&self.buffer)
                );
                self.buffer.extend(&piece[..n]);
            }
        };
        timeout(PATIENCE, wait)
            .await
            .unwrap_or_else(|_| panic!("no {what} in time"));
    }

    fn parse(&mut self) -> Option<Reply> {
        let end = find(&self.buffer, b"\r\n\r\n")?;
        let head = String::from_utf8(self.buffer[..end].to_vec()).unwrap();
        let mut lines = head.lines();
        let status = lines.next()?.split(' ').nth(1)?.parse().unwrap();
        let headers: Vec<(String, String)> = lines
            .map(|line| {
                line.split_once(": ")
                    .map(|(n, v)| (n.to_lowercase(), v.to_owned()))
                    .unwrap()
            })
            .collect();
        let rest = &self.buffer[end + 4..];
        let header = |name: &str| {
            headers
                .iter()
                .find(|(n, _)| n == name)
                .map(|(_, v)| v.as_str())
        };
        let (body, n_read) = if header("transfer-encoding") == Some("chunked") {
            dechunk(rest)?
        } else {
            let length: usize = header("content-length").map_or(0, |n| n.parse().unwrap());
            (rest.get(..length)?.to_vec(), length)
        };
        let reply = Reply {
            status,
            headers,
            body: String::from_utf8(body).unwrap(),
        };
        self.buffer.drain(..end + 4 + n_read);
        Some(reply)
    }
}

fn dechunk(mut bytes: &[u8]) -> Option<(Vec<u8>, usize)> {
    let whole = bytes.len();
    let mut body = Vec::new();
    loop {
        let line = find(bytes, b"\r\n")?;
        let n = usize::from_str_radix(std::str::from_utf8(&bytes[..line]).unwrap(), 16).unwrap();
        body.extend(bytes.get(line + 2..line + 2 + n)?);
        bytes = bytes.get(line + 4 + n..)?;
        if n == 0 {
            return Some((body, whole - bytes.len()));
        }
    }
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|window| window == what)
}

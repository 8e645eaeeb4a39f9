//! Programs and libraries that speak to OpenAI's, Anthropic's or Ollama's API, against a live server:
//! the scripts of `tests/clients`, and that of the chat page in `tests/page`, each with both bundled
//! models that draft. A client whose package is not installed is named as skipped;
//! `tests/clients/README.md` says how to install them.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// One with an assistant beside it, and one with an MTP head in it.
const MODELS: [&str; 2] = ["tiny-gemma4", "tiny-qwen3.5"];
/// Longest time that a script may take. One on an idle machine takes a few seconds.
const PATIENCE: Duration = Duration::from_secs(300);

/// A client and its script.
struct Client {
    /// The name of the client, as in the README.
    name: &'static str,
    script: &'static str,
    /// The modules that the script needs.
    modules: &'static [&'static str],
}

/// The folder of the scripts.
fn scripts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/clients")
}

/// A folder that has a virtual environment a client, called after it, or `node_modules`.
fn installed() -> Option<PathBuf> {
    std::env::var_os("CLIENTS").map(PathBuf::from)
}

/// Says what is not tested, past the test runner, which hides what a test that passes prints.
fn skip(name: &str, why: &str) {
    let line = format!("SKIPPED: {name} ({why})\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// The interpreter of a script.
fn interpreter(client: &Client) -> Command {
    let is_node = client.script.ends_with(".cjs");
    let own = installed().map(|folder| folder.join(client.name).join("bin/python3"));
    let mut command = match own.filter(|path| path.exists()) {
        _ if is_node => Command::new("node"),
        Some(python) => Command::new(python),
        None => Command::new("python3"),
    };
    if let Some(folder) = installed().filter(|_| is_node) {
        command.env("NODE_PATH", folder.join("node_modules"));
    }
    command
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("NO_PROXY", "127.0.0.1")
        .stdin(Stdio::null());
    command
}

/// The module that is missing.
fn missing(client: &Client) -> Option<String> {
    let is_node = client.script.ends_with(".cjs");
    let module = client.modules.iter().find(|module| {
        let mut command = interpreter(client);
        match is_node {
            true => command.args(["-e", &format!("require.resolve('{module}')")]),
            // Looks for it without running it.
            false => command.args([
                "-c",
                &format!(
                    "import importlib.util as u, sys; sys.exit(u.find_spec('{module}') is None)"
                ),
            ]),
        };
        let found = command.stdout(Stdio::null()).stderr(Stdio::null()).status();
        !found.is_ok_and(|status| status.success())
    });
    module.map(|module| format!("package {module} is not installed"))
}

/// A running server, ended with the test.
struct Server {
    child: Child,
    address: String,
    /// Where it publishes KV events, and where they can be asked for again.
    kv_events: [String; 2],
}

/// An endpoint of ZeroMQ that nobody used a moment ago.
fn endpoint() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    format!("tcp://*:{}", listener.local_addr().unwrap().port())
}

impl Server {
    fn start(folder: &Path, model: &str) -> Server {
        for _ in 0..20 {
            match Server::start_once(folder, model) {
                Ok(server) => return server,
                // Another program was faster.
                Err(said) if said.contains("cannot publish KV events") => {}
                Err(said) => panic!("the server says where it is: {said}"),
            }
        }
        panic!("every port was taken")
    }

    /// Starts a server; what it said, if it ended.
    fn start_once(folder: &Path, model: &str) -> Result<Server, String> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_paceline"));
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("PACELINE_") {
                command.env_remove(name);
            }
        }
        let kv_events = [endpoint(), endpoint()];
        let [published, replayed] = &kv_events;
        let mut child = command
            .args(["serve", "--port", "0", "-m", model])
            .args(["--kv-events", published, "--kv-events-replay", replayed])
            .current_dir(folder)
            .env("HOME", folder)
            .env("XDG_CONFIG_HOME", folder)
            .env(
                "XDG_CACHE_HOME",
                Path::new(env!("CARGO_TARGET_TMPDIR")).join("cache"),
            )
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut said = String::new();
        let address = loop {
            let mut line = String::new();
            if stderr.read_line(&mut line).unwrap() == 0 {
                child.wait().unwrap();
                return Err(said);
            }
            said += &line;
            if let Some((_, rest)) = line.split_once("base URL: ") {
                break rest.trim_end().trim_end_matches("/v1").to_owned();
            }
        };
        // The server must not wait for a reader of what it logs.
        thread::spawn(move || std::io::copy(&mut stderr, &mut std::io::sink()));
        Ok(Server {
            child,
            address,
            kv_events,
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads a stream to its end beside the test.
fn reader(mut stream: impl Read + Send + 'static) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = stream.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Runs the script of `client` with each model, if it can run here.
fn passes(client: Client) {
    if let Some(why) = missing(&client) {
        return skip(client.name, &why);
    }
    let name = client.script.replace('/', "-");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("client-{name}"));
    fs::create_dir_all(&folder).unwrap();
    for model in MODELS {
        let server = Server::start(&folder, model);
        let mut child = interpreter(&client)
            .arg(scripts().join(client.script).canonicalize().unwrap())
            .arg(&server.address)
            .env("KV_EVENTS", &server.kv_events[0])
            .env("KV_EVENTS_REPLAY", &server.kv_events[1])
            .current_dir(&folder)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let said = [
            reader(child.stdout.take().unwrap()),
            reader(child.stderr.take().unwrap()),
        ];
        let start = Instant::now();
        let ended = loop {
            match child.try_wait().unwrap() {
                Some(status) => break Some(status),
                None if start.elapsed() > PATIENCE => break None,
                None => thread::sleep(Duration::from_millis(50)),
            }
        };
        if ended.is_none() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        let [stdout, stderr] = said.map(|reader| reader.join().unwrap());
        for line in stdout.lines().filter(|line| line.starts_with("SKIPPED: ")) {
            let line = format!("{line} [{} on {model}]\n", client.name);
            let _ = std::io::stderr().write_all(line.as_bytes());
        }
        assert!(
            ended.is_some_and(|status| status.success()),
            "{} with {model}: {ended:?}; None is more than {PATIENCE:?}\n{stdout}\n{stderr}",
            client.script
        );
    }
}

/// A test a client.
macro_rules! clients {
    ($($test:ident: $name:literal, $script:literal, [$($module:literal),*];)*) => {
        $(
            #[test]
            fn $test() {
                passes(Client { name: $name, script: $script, modules: &[$($module),*] });
            }
        )*
    };
}

clients! {
    openai_python: "openai-python", "openai_python.py", ["openai", "pydantic"];
    openai_responses: "openai-python", "openai_responses.py", ["openai", "pydantic"];
    anthropic_python: "anthropic-python", "anthropic_python.py", ["anthropic"];
    instructor: "instructor", "instructor_modes.py", ["instructor"];
    pydantic_ai: "pydantic-ai", "pydantic_ai_agents.py", ["pydantic_ai", "openai"];
    langchain: "langchain-openai", "langchain_openai_chat.py", ["langchain_openai"];
    smolagents: "smolagents", "smolagents_agents.py", ["smolagents", "openai"];
    llm: "llm", "llm_cli.py", ["llm"];
    openapi: "openapi", "openapi_document.py", ["schemathesis", "openapi_spec_validator"];
    kv_events: "vllm-kv-events", "vllm_kv_events.py", ["vllm", "msgspec", "zmq"];
    ollama: "ollama-python", "ollama_python.py", ["ollama"];
    langchain_ollama: "langchain-ollama", "langchain_ollama_chat.py", ["langchain_ollama"];
    litellm: "litellm", "litellm_completion.py", ["litellm"];
    openai_agents: "openai-agents", "openai_agents_chat.py", ["agents", "openai"];
    openai_agents_responses: "openai-agents", "openai_agents_responses.py", ["agents", "openai"];
    llama_index: "llama-index", "llama_index_openai_like.py", ["llama_index.llms.openai_like"];
    openai_node: "openai-node", "openai_node.cjs", ["openai", "zod"];
    ai_sdk: "ai-sdk", "ai_sdk.cjs", ["ai", "@ai-sdk/openai-compatible", "zod"];
    // The chat page in a browser.
    page: "page", "../page/page.cjs", ["playwright-core"];
}

//! What a bad file costs: an error, soon and in little memory beyond the file
//! (`cargo test -p suites --release --test cost -- --nocapture` prints the most).

use peak_alloc::PeakAlloc;
use std::borrow::Cow;
use std::sync::LazyLock;
use std::time::{Duration, Instant};
use suites::repository;
use text::{TextFiles, Tokenizer};
use weights::Checkpoint;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// Bytes that a refusal may take beyond the file.
const BEYOND: usize = 16 << 20;
/// Processor time that a refusal may take: 100 ms. Builds for tests, in which readers are
/// hardly optimized, take four times as long, and cores that are shared twice that.
const SOON: Duration = Duration::from_millis(if cfg!(debug_assertions) { 800 } else { 100 });
/// What readers allow before they read at all.
const SAFETENSORS_HEADER: usize = 16 << 20;
const GGUF_HEADER: usize = 64 << 20;
const CONFIG: usize = 4 << 20;
const INDEX: usize = 32 << 20;

/// Processor time of this thread, which other programs on the machine do not lengthen
/// much; where the system does not tell, time.
fn busy() -> Duration {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    let told = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let nanos = told.and_then(|all| all.split(' ').next()?.parse().ok());
    nanos.map_or_else(|| START.elapsed(), Duration::from_nanos)
}

/// The most that refusals took.
#[derive(Default)]
struct Cost {
    bytes: usize,
    time: Duration,
    cases: usize,
}

impl Cost {
    /// Runs `refuse`, which must refuse.
    fn of(&mut self, what: &str, refuse: impl FnOnce() -> bool) {
        let start = busy();
        MEMORY.reset_peak_usage();
        let before = MEMORY.current_usage();
        assert!(refuse(), "{what} is no error");
        let bytes = MEMORY.peak_usage() - before;
        let time = busy() - start;
        assert!(bytes <= BEYOND, "{what} takes {bytes} bytes");
        assert!(time <= SOON, "{what} takes {time:?}");
        self.bytes = self.bytes.max(bytes);
        self.time = self.time.max(time);
        self.cases += 1;
    }
}

impl Drop for Cost {
    fn drop(&mut self) {
        println!(
            "{} refusals: at most {} KB, {:?}",
            self.cases,
            self.bytes >> 10,
            self.time
        );
    }
}

/// `one` again and again, up to `len` bytes, between `begin` and `end`.
fn repeated(begin: &str, one: impl Fn(usize) -> String, end: &str, len: usize) -> String {
    let mut text = begin.to_owned();
    for i in 0.. {
        let next = one(i);
        if text.len() + next.len() + end.len() > len {
            break;
        }
        text += &next;
    }
    text + end
}

fn opens(name: &str, config: &str, file: &'static [u8]) -> bool {
    let files = vec![(name.to_owned(), Cow::Borrowed(file))];
    Checkpoint::from_bytes(config, files).is_ok()
}

/// One test, because memory is counted for the whole process.
#[test]
fn a_refusal_takes_little_memory() {
    safetensors();
    gguf();
    configurations();
    indices();
    tokenizers();
}

fn safetensors() {
    let mut cost = Cost::default();
    let entry = |shape: &'static str| {
        move |i: usize| {
            format!(
                r#""{i}":{{"dtype":"U8","shape":[{shape}],"data_offsets":[{i},{}]}},"#,
                i + 1
            )
        }
    };
    let part = |begin: &str, one: &dyn Fn(usize) -> String, end: &str| {
        repeated(begin, one, end, SAFETENSORS_HEADER)
    };
    for (what, header) in [
        ("entries", part("{", &entry("1"), r#""x":1}"#)),
        (
            "entries of many axes",
            part("{", &entry("1,1,1,1,1,1,1,1"), r#""x":1}"#),
        ),
        ("one name", part(r#"{""#, &|_| "a".repeat(1024), r#"":1}"#)),
        (
            "one shape",
            part(r#"{"a":{"shape":["#, &|_| "1,".into(), "1]}}"),
        ),
        (
            "metadata",
            part(
                r#"{"__metadata__":{"#,
                &|i| format!(r#""{i}":"","#),
                r#""x":""},"a":1}"#,
            ),
        ),
        ("nesting", part("", &|_| r#"{"a":["#.into(), "")),
        (
            "dtype",
            part(r#"{"a":{"dtype":""#, &|_| "\\u0041".repeat(100), r#""}}"#),
        ),
        ("as many tensors as may be, one of them too long", {
            let all: Vec<String> = (0..(1 << 16) - 1).map(entry("1,1,1,1,1,1,1,1")).collect();
            format!(
                r#"{{{}"x":{{"dtype":"U8","shape":[9],"data_offsets":[0,9]}}}}"#,
                all.concat()
            )
        }),
    ] {
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.resize(file.len() + (1 << 16), 0);
        let file: &'static [u8] = file.leak();
        cost.of(what, || !opens("m.safetensors", "{}", file));
    }
    let whole = std::fs::read(repository("tests/golden/coded/mlx/model.safetensors")).unwrap();
    let whole: &'static [u8] = whole.leak();
    let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    for len in 0..8 + header {
        cost.of("a file cut short", || {
            !opens("m.safetensors", "{}", &whole[..len])
        });
    }
}

/// A GGUF file of these counts and bytes.
fn gguf_of(tensors: u64, keys: u64, rest: &[u8]) -> &'static [u8] {
    let mut file = b"GGUF\x03\0\0\0".to_vec();
    file.extend(tensors.to_le_bytes());
    file.extend(keys.to_le_bytes());
    file.extend(rest);
    file.resize(file.len() + 64, 0);
    file.leak()
}

fn gguf() {
    let mut cost = Cost::default();
    let text = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    let key = |name: &str, kind: u32, value: &[u8]| {
        [&text(name), &kind.to_le_bytes()[..], value].concat()
    };
    let array = |kind: u32, n: usize, items: &[u8]| {
        [&kind.to_le_bytes()[..], &(n as u64).to_le_bytes(), items].concat()
    };
    let tensor = |name: &str, axes: &[u64], offset: u64| {
        let axes: Vec<u8> = axes.iter().flat_map(|a| a.to_le_bytes()).collect();
        let n_axes = (axes.len() as u32 / 8).to_le_bytes();
        [
            &text(name),
            &n_axes[..],
            &axes,
            &24u32.to_le_bytes(),
            &offset.to_le_bytes(),
        ]
        .concat()
    };
    let long = |i: usize| format!("{i:0>512}");
    let tensors = |n: usize| {
        (0..n)
            .flat_map(|i| tensor(&long(i), &[1, 1, 1, 1], 32 * i as u64))
            .collect::<Vec<u8>>()
    };
    let bytes = vec![0u8; GGUF_HEADER - 1000];
    let empty = vec![0u8; GGUF_HEADER / 8 * 8 - 1000];
    let keys = (0..1 << 12)
        .flat_map(|i| key(&long(i), 0, &[1]))
        .collect::<Vec<u8>>();
    let architecture = key("general.architecture", 8, &text("qwen35"));
    let blocks = key("qwen35.block_count", 4, &1u32.to_le_bytes());
    for (what, file) in [
        ("counts", gguf_of(u64::MAX, u64::MAX, &[])),
        (
            "as many tensors as may be",
            gguf_of(1 << 15, 0, &tensors(1 << 15)),
        ),
        ("more tensors", gguf_of((1 << 15) + 1, 0, &tensors(64))),
        ("as many keys as may be", gguf_of(0, 1 << 12, &keys)),
        (
            "keys and tensors",
            gguf_of(1 << 15, 1 << 12, &[keys.clone(), tensors(1 << 15)].concat()),
        ),
        (
            "a long architecture",
            gguf_of(
                0,
                1,
                &key("general.architecture", 9, &array(0, bytes.len(), &bytes)),
            ),
        ),
        (
            "a long alignment",
            gguf_of(
                0,
                1,
                &key("general.alignment", 9, &array(0, bytes.len(), &bytes)),
            ),
        ),
        (
            "many texts",
            gguf_of(
                0,
                1,
                &key("split.count", 9, &array(8, empty.len() / 8, &empty)),
            ),
        ),
        (
            "a long name",
            gguf_of(0, 1, &key(&"k".repeat(GGUF_HEADER - 1000), 0, &[1])),
        ),
        ("a long array where a number is wanted", {
            let wide = key(
                "qwen35.attention.head_count_kv",
                9,
                &array(0, bytes.len(), &bytes),
            );
            let wide = [
                architecture.clone(),
                blocks.clone(),
                wide,
                tensor("a", &[9; 4], 0),
            ]
            .concat();
            gguf_of(1, 3, &wide)
        }),
        (
            "a header past its limit",
            gguf_of(
                0,
                2,
                &key(
                    "a",
                    9,
                    &array(0, bytes.len() + 2000, &vec![0; bytes.len() + 2000]),
                ),
            ),
        ),
    ] {
        cost.of(what, || !opens("m.gguf", "", file));
    }
    let whole = std::fs::read(repository("tests/golden/gguf/gemma4-ple-assistant.gguf")).unwrap();
    let whole: &'static [u8] = whole.leak();
    for len in 0..whole.len().min(16 << 10) {
        cost.of("a file cut short", || !opens("m.gguf", "", &whole[..len]));
    }
}

fn configurations() {
    let mut cost = Cost::default();
    let part =
        |begin: &str, one: &dyn Fn(usize) -> String, end: &str| repeated(begin, one, end, CONFIG);
    for (what, config) in [
        ("numbers", part("[", &|_| "0,".into(), "0]")),
        ("objects", part("[", &|_| "{},".into(), "0]")),
        ("keys", part("{", &|i| format!(r#""{i}":0,"#), r#""x":0}"#)),
        ("one string", part("\"", &|_| "a".repeat(1024), "\"")),
        ("nesting", part("", &|_| r#"{"a":["#.into(), "")),
        ("nesting of arrays", part("", &|_| "[".into(), "")),
    ] {
        cost.of(what, || {
            Checkpoint::from_bytes(&config, Vec::new()).is_err()
        });
    }
    let whole = std::fs::read_to_string(repository("tests/golden/coded/mlx/config.json")).unwrap();
    let whole = whole.trim_end();
    for len in 0..whole.len() {
        cost.of("a file cut short", || {
            Checkpoint::from_bytes(&whole[..len], Vec::new()).is_err()
        });
    }
}

fn indices() {
    let mut cost = Cost::default();
    let part = |begin: &str, one: &dyn Fn(usize) -> String, end: &str| {
        let text = repeated(begin, one, end, INDEX);
        vec![(
            "model.safetensors.index.json".to_owned(),
            Cow::Owned(text.into_bytes()),
        )]
    };
    let begin = r#"{"weight_map":{"#;
    let entry = |i: usize| format!(r#""{i}":"a.safetensors","#);
    for (what, files) in [
        ("entries", part(begin, &entry, r#""x":"a.safetensors"}}"#)),
        (
            "entries of one letter each",
            part(begin, &|i| format!(r#""{i}":"a","#), r#""x":"a"}}"#),
        ),
        ("as many entries as may be, and no file", {
            let all: String = (0..(1 << 18) - 1).map(entry).collect();
            let text = format!(r#"{begin}{all}"x":"a.safetensors"}}}}"#);
            vec![(
                "model.safetensors.index.json".to_owned(),
                Cow::Owned(text.into_bytes()),
            )]
        }),
        (
            "files",
            part(
                begin,
                &|i| format!(r#""{i}":"{i}.safetensors","#),
                r#""x":"a"}}"#,
            ),
        ),
        (
            "names with escapes",
            part(begin, &|i| format!(r#""\u0041{i}":"a","#), r#""x":"a"}}"#),
        ),
        (
            "other fields",
            part(r#"{"metadata":["#, &|_| r#"{"a":[]},"#.into(), "0]}"),
        ),
        ("nesting", part("", &|_| r#"{"a":["#.into(), "")),
    ] {
        cost.of(what, move || Checkpoint::from_bytes("{}", files).is_err());
    }
}

fn tokenizers() {
    let mut cost = Cost::default();
    let limit = CONFIG;
    let part =
        |begin: &str, one: &dyn Fn(usize) -> String, end: &str| repeated(begin, one, end, limit);
    for (what, json) in [
        ("nesting", part("", &|_| r#"{"a":["#.into(), "")),
        ("keys", part("{", &|i| format!(r#""{i}":0,"#), r#""x":0}"#)),
        ("one string", part("\"", &|_| "a".repeat(1024), "\"")),
        ("a sparse vocabulary", {
            let good =
                std::fs::read_to_string(repository("models/tiny-qwen3.5/tokenizer.json")).unwrap();
            let mut json: serde_json::Value = serde_json::from_str(&good).unwrap();
            json["model"]["vocab"] = serde_json::json!({"a": u32::MAX});
            json["model"]["merges"] = serde_json::json!([]);
            json["added_tokens"] = serde_json::json!([]);
            json.to_string()
        }),
    ] {
        cost.of(what, || Tokenizer::from_bytes(json.as_bytes()).is_err());
    }
    let whole = std::fs::read(repository("models/tiny-qwen3.5/tokenizer.json")).unwrap();
    let end = whole.len() - 2;
    for len in (0..1000)
        .chain((1000..end).step_by(end / 100))
        .chain(end - 100..end)
    {
        cost.of("a file cut short", || {
            let files = TextFiles {
                tokenizer: &whole[..len],
                ..TextFiles::default()
            };
            files.load().is_err()
        });
    }
}

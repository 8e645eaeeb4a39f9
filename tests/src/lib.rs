//! What the tests that cross rooms share.

#![forbid(unsafe_code)]

pub mod blocks;
pub mod cards;
pub mod drawing;
pub mod files;
pub mod projector;
pub mod rows;

use backend::{
    Activation, Attention, Backend, Batch, Capabilities, Chain, Chained, Delta, DeltaSpec,
    DeltaWeights, DeviceError, ExpertMarks, Kv, KvSpec, Link, Matrix, NearAttention, Ops, Record,
    Rope, RowEdits, Sample, StepKey, Store, Tensor, TokenChoice, TokenGroups, TokenList, TokenMask,
};
use cache::{MemoryFull, Piece};
use serde_json::{Map, Value};
use speculate::draft::{DraftRequest, DraftState, HiddenRows, SavedDraft, TargetView};
use speculate::sample::{History, Scratch, choose, choose_among};
use speculate::{DraftLength, Drafter, Sampling, Speculator, Stream, StreamOptions};
use std::borrow::{BorrowMut, Cow};
use std::collections::{BTreeSet, HashMap};
use std::fmt::Arguments;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use weights::Checkpoint;

/// A file of the repository.
pub fn repository(path: impl AsRef<Path>) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// A backend that keeps every intermediate a model names, in order, and that can
/// be told to make a mistake.
pub struct Recorder {
    inner: Box<dyn Backend>,
    notes: Mutex<HashMap<String, Vec<Vec<f32>>>>,
    mistake: Option<fn(&mut Batch)>,
    chains: bool,
    chooses: bool,
    records: Option<Mutex<Kinds>>,
}

/// Kinds of steps and chains that have run.
#[derive(Default)]
struct Kinds {
    runs: HashMap<(StepKey, Vec<(usize, usize)>), usize>,
    ran_first: bool,
}

impl Kinds {
    /// Runs of a kind that count as its first ones.
    const FIRST: usize = 2;

    fn ran<'a>(&mut self, key: StepKey, batches: impl Iterator<Item = &'a Batch>) {
        let sizes = batches.map(|batch| (batch.n_rows(), batch.seqs.len()));
        let runs = self.runs.entry((key, sizes.collect())).or_default();
        *runs += 1;
        self.ran_first |= *runs <= Kinds::FIRST;
    }
}

/// How `choice` samples.
fn sampling(choice: &TokenChoice) -> Sampling {
    let temperature = match choice.scale {
        0.0 => 0.0,
        scale => scale.recip(),
    };
    assert!(choice.scale == 0.0 || temperature.recip() == choice.scale);
    assert!(choice.ln_min_p == f32::NEG_INFINITY, "no least probability");
    Sampling {
        temperature,
        top_k: choice.top_k as usize,
        top_p: choice.top_p,
        seed: choice.seed,
        ..Sampling::default()
    }
}

impl Recorder {
    /// Listens to models that run on `inner`.
    pub fn new(inner: Box<dyn Backend>) -> Self {
        Recorder {
            inner,
            notes: Mutex::new(HashMap::new()),
            mistake: None,
            chains: false,
            chooses: false,
            records: None,
        }
    }

    /// Runs on `inner`, but shows recurrent layers a wrong step: tests must see
    /// the difference.
    pub fn with_mistake(inner: Box<dyn Backend>, mistake: fn(&mut Batch)) -> Self {
        Recorder {
            mistake: Some(mistake),
            ..Recorder::new(inner)
        }
    }

    /// Runs on `inner`, and chains of steps in one go: what a device that keeps tokens to
    /// itself owes.
    pub fn chaining(inner: Box<dyn Backend>) -> Self {
        Recorder {
            chains: true,
            ..Recorder::new(inner)
        }
    }

    /// Like [`Recorder::chaining`], and tells which steps are the first of their kind, as a device that records steps
    /// does.
    pub fn recording(inner: Box<dyn Backend>) -> Self {
        Recorder {
            records: Some(Mutex::default()),
            ..Recorder::chaining(inner)
        }
    }

    /// Rows of the steps of one text that have run.
    pub fn rows_run(&self) -> BTreeSet<usize> {
        let kinds = self.kinds().expect("a backend that records");
        let sizes = kinds.runs.keys().map(|(_, sizes)| &sizes[..]);
        sizes
            .filter_map(|sizes| match *sizes {
                [(rows, 1)] => Some(rows),
                _ => None,
            })
            .collect()
    }

    fn kinds(&self) -> Option<MutexGuard<'_, Kinds>> {
        let kinds = self.records.as_ref();
        kinds.map(|kinds| kinds.lock().expect("no test panics while counting"))
    }

    /// Runs on `inner`, and edits logits and chooses tokens like a device that keeps its logits to
    /// itself, by the definition.
    pub fn choosing(inner: Box<dyn Backend>) -> Self {
        Recorder {
            chooses: true,
            ..Recorder::new(inner)
        }
    }

    /// The `n`-th value called `name`.
    pub fn note_at(&self, name: &str, n: usize) -> Option<Vec<f32>> {
        self.notes
            .lock()
            .expect("no test panics while noting")
            .get(name)?
            .get(n)
            .cloned()
    }
}

macro_rules! delegate {
    ($($name:ident($($arg:ident: $type:ty),*) $(-> $out:ty)?;)*) => {
        $(fn $name(&self, $($arg: $type),*) $(-> $out)? { self.inner.$name($($arg),*) })*
    };
}

impl Backend for Recorder {
    delegate! {
        name() -> String;
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            edits: self.chooses,
            records: self.records.is_some(),
            ..self.inner.capabilities()
        }
    }
}

impl Store for Recorder {
    delegate! {
        matrix(parts: &[quant::Stored<'_>]) -> Matrix;
        upload(rows: usize, cols: usize, values: &[f32]) -> Tensor;
        kv(spec: KvSpec) -> Kv;
        delta(spec: DeltaSpec) -> Delta;
        kv_copy(kv: &mut Kv, from: usize, to: usize);
        kv_save(kv: &Kv, page: usize) -> Vec<u8>;
        kv_load(kv: &mut Kv, page: usize, bytes: &[u8]) -> bool;
        delta_copy(delta: &mut Delta, from: usize, to: usize);
        delta_save(delta: &Delta, slot: usize) -> Vec<u8>;
        delta_load(delta: &mut Delta, slot: usize, bytes: &[u8]) -> bool;
        scratch(rows: usize, cols: usize) -> Tensor;
    }

    fn download<'a>(&self, x: &'a Tensor) -> Cow<'a, [f32]> {
        self.inner.download(x)
    }
}

impl Ops for Recorder {
    delegate! {
        embed(table: &Matrix, tokens: &[u32], scale: f32) -> Tensor;
        replace_rows(x: Tensor, embeddings: &Tensor, source: u32, batch: &Batch) -> Tensor;
        matmul_into(x: &Tensor, w: &[&Matrix], y: &mut [Tensor]);
        matmul_rows(x: &Tensor, w: &Matrix, ids: &[Vec<u32>]) -> Tensor;
        rms_norm(x: &Tensor, weight: Option<&Tensor>, width: usize, eps: f32) -> Tensor;
        layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f32) -> Tensor;
        affine(x: Tensor, factor: Option<&Tensor>, shift: &Tensor) -> Tensor;
        activate(x: Tensor, activation: Activation) -> Tensor;
        clamp(x: Tensor, low: f32, high: f32) -> Tensor;
        add(x: Tensor, y: &Tensor) -> Tensor;
        scale(x: Tensor, factor: f32) -> Tensor;
        glu(gate: Tensor, x: &Tensor, activation: Activation) -> Tensor;
        softcap(x: Tensor, cap: f32) -> Tensor;
        gather(x: &Tensor, rows: &[usize]) -> Tensor;
        columns(x: &Tensor, first: usize, cols: usize) -> Tensor;
        concat(a: &Tensor, b: &Tensor) -> Tensor;
        rope(x: Tensor, rope: &Rope, batch: &Batch) -> Tensor;
        kv_append(kv: &mut Kv, k: &Tensor, v: &Tensor, group: usize, batch: &Batch);
        attend(q: &Tensor, kv: &Kv, attention: &Attention, batch: &Batch) -> Tensor;
        attend_near(q: &Tensor, k: &Tensor, v: &Tensor, relative: &Tensor, attention: &NearAttention) -> Tensor;
    }

    fn gated_delta(
        &self,
        state: &mut Delta,
        weights: &DeltaWeights,
        qkv: &Tensor,
        b: &Tensor,
        a: &Tensor,
        batch: &Batch,
    ) -> Tensor {
        let Some(mistake) = self.mistake else {
            return self.inner.gated_delta(state, weights, qkv, b, a, batch);
        };
        let mut wrong = batch.clone();
        mistake(&mut wrong);
        self.inner.gated_delta(state, weights, qkv, b, a, &wrong)
    }

    fn matmul_groups(
        &self,
        x: &Tensor,
        w: &Matrix,
        scores: &Tensor,
        groups: &TokenGroups,
    ) -> [Tensor; 2] {
        let scores = self.inner.download(scores);
        let rows = scores.chunks_exact(scores.len() / x.rows());
        let mut ids: Vec<Vec<u32>> = rows.map(|row| groups.best(row)).collect();
        // In any order: not in theirs.
        ids.iter_mut().for_each(|ids| ids.reverse());
        let bits: Vec<f32> = ids.iter().flatten().map(|&id| f32::from_bits(id)).collect();
        let bits = self.inner.upload(x.rows(), ids[0].len(), &bits);
        [self.inner.matmul_rows(x, w, &ids), bits]
    }
}

impl Sample for Recorder {
    delegate! {
        argmax(x: &Tensor) -> Vec<u32>;
        mask_logits(x: Tensor, masks: &[Option<TokenMask>]) -> Tensor;
        edit_logits(x: Tensor, edits: &[RowEdits]) -> Tensor;
    }

    fn choose_tokens(
        &self,
        x: &Tensor,
        list: Option<&TokenList>,
        choices: &[TokenChoice],
    ) -> Option<Vec<u32>> {
        let logits = self.chooses.then(|| self.inner.download(x))?;
        let rows = logits.chunks_exact(x.cols()).zip(choices);
        let ids = list.map(TokenList::ids);
        Some(rows.map(|(row, choice)| choice.choose(row, ids)).collect())
    }
}

impl Record for Recorder {
    delegate! {
        finish() -> Result<(), DeviceError>;
        note_experts();
        take_experts(marks: &mut ExpertMarks) -> bool;
    }

    fn step(
        &self,
        key: StepKey,
        batch: &Batch,
        inputs: &[&Tensor],
        work: &mut dyn FnMut(&[&Tensor]) -> Vec<Tensor>,
    ) -> Vec<Tensor> {
        if let Some(mut kinds) = self.kinds() {
            kinds.ran(key, [batch].into_iter());
        }
        work(inputs)
    }

    fn take_first_runs(&self) -> bool {
        let kinds = self.kinds();
        kinds.is_some_and(|mut kinds| std::mem::take(&mut kinds.ran_first))
    }

    fn is_recorded(&self, key: StepKey, rows: usize, sequences: usize) -> bool {
        self.kinds().is_none_or(|kinds| {
            let runs = kinds.runs.get(&(key, vec![(rows, sequences)]));
            runs.is_some_and(|&runs| runs >= Kinds::FIRST)
        })
    }

    fn chain(
        &self,
        chain: &Chain<'_>,
        x: &Tensor,
        work: &mut dyn FnMut(usize, &Batch, &Tensor) -> Link,
    ) -> Option<Chained> {
        if let Some(mut kinds) = self.kinds() {
            kinds.ran(chain.key, chain.batches.iter());
        }
        let mut tokens: Vec<Vec<u32>> = Vec::new();
        let mut confidences = Vec::new();
        let mut next: Option<Tensor> = None;
        let mut scratch = Scratch::default();
        for (i, (batch, choices)) in chain.batches.iter().zip(chain.choices).enumerate() {
            let mut batch = batch.clone();
            if let Some(tokens) = tokens.last() {
                batch.tokens.clone_from(tokens);
            }
            let link = self
                .chains
                .then(|| work(i, &batch, next.as_ref().unwrap_or(x)))?;
            if chain.wants_confidences {
                confidences.push(self.inner.confidences(&link.logits));
            }
            let logits = self.inner.download(&link.logits);
            let by_row = link.ids.as_ref().map(|ids| {
                let ids = self.inner.download(ids);
                ids.iter().map(|id| id.to_bits()).collect::<Vec<u32>>()
            });
            let cols = link.logits.cols();
            let rows = logits.chunks_exact(cols).zip(choices).enumerate();
            let chosen = rows.map(|(r, (row, choice))| {
                let by_row = by_row.as_ref().map(|ids| &ids[r * cols..(r + 1) * cols]);
                let ids = by_row.or(chain.list.map(TokenList::ids));
                let (sampling, position) = (sampling(choice), choice.position);
                let history = History::new(&sampling, &[]);
                match ids {
                    None => choose(&sampling, &history, position, row, &mut scratch),
                    Some(ids) => {
                        choose_among(&sampling, &history, position, ids, row, &mut scratch)
                    }
                }
            });
            tokens.push(chosen.collect());
            next = link.next.or(next);
        }
        Some(Chained {
            tokens,
            confidences,
            next,
        })
    }

    fn note(&self, name: Arguments<'_>, x: &Tensor) {
        let values = self.inner.download(x).into_owned();
        let mut notes = self.notes.lock().expect("no test panics while noting");
        notes.entry(name.to_string()).or_default().push(values);
    }
}

/// A safetensors file of this header, an entry's bytes from `data` by name, type and
/// shape.
///
/// # Panics
///
/// If there are not as many bytes as the header says.
pub fn with_header(header: &[u8], data: impl Fn(&str, &str, &[usize]) -> Vec<u8>) -> Vec<u8> {
    let parsed: Map<String, Value> = serde_json::from_slice(header).expect("a header");
    let mut area = Vec::new();
    for (name, entry) in parsed.iter().filter(|(name, _)| *name != "__metadata__") {
        let numbers = |key: &str| -> Vec<usize> {
            serde_json::from_value(entry[key].clone()).expect("a list of numbers")
        };
        let offsets = numbers("data_offsets");
        let dtype = entry["dtype"].as_str().expect("a type");
        area.resize(area.len().max(offsets[1]), 0);
        area[offsets[0]..offsets[1]].copy_from_slice(&data(name, dtype, &numbers("shape")));
    }
    [&(header.len() as u64).to_le_bytes(), header, &area].concat()
}

/// Golden checkpoints with the weights of another one, of which only headers are kept
/// (`tests/golden/make.py`).
const DERIVED: &[(&str, &str)] = &[
    ("gemma4-dense-bf16", "gemma4-dense"),
    ("gemma4-dense-f16", "gemma4-dense"),
    ("gemma4-multimodal", "gemma4-dense"),
    ("qwen3_5-multimodal", "qwen3_5-dense"),
];

/// The golden checkpoint called `name`.
///
/// # Panics
///
/// If it cannot be opened.
pub fn golden(name: &str) -> Checkpoint {
    let folder = |name| repository("tests/golden/checkpoints").join(name);
    let open = |name| Checkpoint::open(&folder(name)).expect("a golden checkpoint");
    let Some((_, of)) = DERIVED.iter().find(|(derived, _)| *derived == name) else {
        return open(name);
    };
    let plain = open(of);
    // Weights by text-only name, in the type of the header; zeros for other senses.
    let data = |name: &str, dtype: &str, shape: &[usize]| {
        let n = shape.iter().product();
        let name = name.replace("model.language_model.", "model.");
        let values = plain.vector(name.strip_prefix("model.").unwrap_or(&name), n);
        let values = values.unwrap_or_else(|_| vec![0.0; n]);
        let format = quant::format(&dtype.to_lowercase()).expect("a type of plain numbers");
        quant::encode(format, &values, n, quant::Scalar::F32).codes
    };
    let mut files = Vec::new();
    for file in std::fs::read_dir(folder(name)).expect("a folder") {
        let path = file.expect("a file").path();
        let bytes = std::fs::read(&path).expect("a file");
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        if let Some(weights) = file.strip_suffix(".header") {
            files.push((weights.to_owned(), with_header(&bytes, data).into()));
        } else if file.ends_with(".index.json") {
            files.push((file.into_owned(), bytes.into()));
        }
    }
    let config = std::fs::read_to_string(folder(name).join("config.json"));
    Checkpoint::from_bytes(&config.expect("a file"), files).expect("a golden checkpoint")
}

/// The golden checkpoint called `name`, with its `BF16` tensors widened to `F32`; as it
/// is, if it has the weights of another one.
///
/// # Panics
///
/// If it cannot be opened.
pub fn golden_in_f32(name: &str) -> Checkpoint {
    let folder = repository("tests/golden/checkpoints").join(name);
    let Ok(bytes) = std::fs::read(folder.join("model.safetensors")) else {
        return golden(name);
    };
    let n = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let mut header: Map<String, Value> =
        serde_json::from_slice(&bytes[8..8 + n]).expect("a header");
    header.remove("__metadata__");
    let mut area = Vec::new();
    for entry in header.values_mut() {
        let at = |i: usize| 8 + n + entry["data_offsets"][i].as_u64().expect("a number") as usize;
        let (stored, begin) = (&bytes[at(0)..at(1)], area.len());
        if entry["dtype"] == "BF16" {
            entry["dtype"] = "F32".into();
            area.extend(stored.chunks_exact(2).flat_map(|c| [0, 0, c[0], c[1]]));
        } else {
            area.extend_from_slice(stored);
        }
        entry["data_offsets"] = [begin, area.len()].as_slice().into();
    }
    let header = serde_json::to_vec(&header).expect("a header");
    let file = [&(header.len() as u64).to_le_bytes(), &*header, &area].concat();
    let config = std::fs::read_to_string(folder.join("config.json")).expect("a file");
    let files = vec![("model.safetensors".to_owned(), file.into())];
    Checkpoint::from_bytes(&config, files).expect("a golden checkpoint")
}

/// The pixels of test pictures, `[frames, height, width, 3]`, as `tests/golden/vision.py` has them.
pub fn test_pixels(frames: usize, height: usize, width: usize) -> Vec<u8> {
    let mut rgb = Vec::with_capacity(frames * height * width * 3);
    for (f, y) in (0..frames).flat_map(|f| (0..height).map(move |y| (f, y))) {
        for (x, c) in (0..width).flat_map(|x| (0..3).map(move |c| (x, c))) {
            rgb.push((7 * x + 13 * y + 50 * c + 31 * f + x * y / 5) as u8);
        }
    }
    rgb
}

/// The samples of test sound `number`, as `tests/golden/audio.py` has them.
pub fn test_samples(n: usize, number: usize) -> Vec<f32> {
    let sample = |i: usize| {
        let noise = ((7 * i * i + 13 * i + 50 * number) % 1009) as f64 / 1009.0 - 0.5;
        (noise * (i / 1600 % 5) as f64 / 4.0) as f32
    };
    (0..n).map(sample).collect()
}

/// Options of a stream that writes the likeliest tokens, `max_tokens` at most, without drafts.
pub fn greedy(max_tokens: usize) -> StreamOptions {
    StreamOptions {
        sampling: Sampling::default(),
        max_tokens,
        stop_tokens: Arc::new([]),
        draft: DraftLength::Fixed(0),
        logprobs: None,
    }
}

/// Checkpoints whose weights are codes under scales, in the layouts of several
/// tools (`tests/golden/coded.py`).
pub const CODED: &[&str] = &[
    "tests/golden/coded/ct",
    "tests/golden/coded/fp8",
    "tests/golden/coded/modelopt",
    "tests/golden/coded/mlx",
    "tests/golden/coded/mlx-moe",
];

/// A small generator of test data (splitmix64), the same everywhere.
pub struct Rng(
    /// The seed.
    pub u64,
);

impl Rng {
    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`.
    pub fn below(&mut self, n: u32) -> u32 {
        (((self.number() >> 32) * u64::from(n)) >> 32) as u32
    }
}

/// Takes `streams` to their ends, `chunk` rows of each in a round; each leaves the rounds when it has ended.
///
/// # Panics
///
/// If a round fails.
pub fn finish<S: BorrowMut<Stream>>(speculator: &mut Speculator, streams: &mut [S], chunk: usize) {
    loop {
        let streams = streams.iter_mut().map(BorrowMut::borrow_mut);
        let mut going: Vec<&mut Stream> = streams.filter(|s| s.finish().is_none()).collect();
        if going.is_empty() {
            return;
        }
        speculator.round(&mut going, chunk).expect("a round");
    }
}

/// A drafter that notes what it guesses.
pub struct Noting {
    /// Who guesses.
    pub inner: Box<dyn Drafter>,
    /// What it guessed, a draft a request and round.
    pub drafts: Arc<Mutex<Vec<Vec<u32>>>>,
}

impl Drafter for Noting {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn taps(&self) -> &[usize] {
        self.inner.taps()
    }

    fn state(&self) -> Result<Box<dyn DraftState>, MemoryFull> {
        self.inner.state()
    }

    fn fits(&self, saved: Option<&SavedDraft>, n_pieces: usize) -> bool {
        self.inner.fits(saved, n_pieces)
    }

    fn restorable(&self, saved: Option<&SavedDraft>, rows: usize) -> usize {
        self.inner.restorable(saved, rows)
    }

    fn needs_all_hidden(&self) -> bool {
        self.inner.needs_all_hidden()
    }

    fn restore(
        &self,
        saved: Option<&SavedDraft>,
        rows: usize,
    ) -> Result<(Box<dyn DraftState>, Vec<Option<Piece>>), MemoryFull> {
        self.inner.restore(saved, rows)
    }

    fn draft(
        &mut self,
        target: TargetView<'_>,
        hidden: &HiddenRows,
        requests: &mut [DraftRequest<'_>],
    ) -> Vec<Vec<u32>> {
        let drafts = self.inner.draft(target, hidden, requests);
        self.drafts.lock().unwrap().extend(drafts.clone());
        drafts
    }
}

//! The messages of `proto/worker.proto`. Workers build and read them; the bytes are made here.

use bytes::Bytes;
use pulsing_gateway::api::{self, Api};
use pulsing_gateway::protocol;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyFloat, PyList, PyString, PyTuple};

/// OpenAI's sentinel for a token that is very unlikely.
const LOGPROB_FLOOR: f64 = -9999.0;
/// How deep log probabilities are looked into: a list of tokens, of their likes, of their bytes; and no cycle.
const LOGPROB_DEPTH: u32 = 8;

fn malformed(message: String) -> PyErr {
    PyValueError::new_err(message)
}

/// A request as a worker sees it.
#[pyclass(frozen, module = "pulsing._core")]
pub(crate) struct WorkerRequest {
    #[pyo3(get)]
    kind: Py<PyString>,
    #[pyo3(get)]
    version: u32,
    /// A subscriber wants news of the prompt cache.
    #[pyo3(get)]
    blocks: bool,
    generate: protocol::Generate,
    #[pyo3(get)]
    body: Py<PyBytes>,
}

#[pymethods]
impl WorkerRequest {
    #[staticmethod]
    #[pyo3(signature = (head, buffers = Vec::new()))]
    fn decode(py: Python<'_>, head: PyBuffer<u8>, buffers: Vec<PyBuffer<u8>>) -> PyResult<Self> {
        let request: protocol::Request = protocol::decode_bytes(&head.to_vec(py)?).map_err(malformed)?;
        if request.version != protocol::VERSION {
            return Err(malformed(format!(
                "a request of worker protocol {}; this worker speaks {}",
                request.version,
                protocol::VERSION
            )));
        }
        let mut blocks = false;
        let (kind, generate) = match request.kind {
            Some(protocol::Kind::Generate(generate)) => (intern!(py, "generate"), generate),
            Some(protocol::Kind::SubscribeLoad(asked)) => {
                blocks = asked.blocks;
                (intern!(py, "subscribe_load"), protocol::Generate::default())
            }
            Some(protocol::Kind::Describe(_)) => (intern!(py, "describe"), protocol::Generate::default()),
            Some(protocol::Kind::Question(protocol::Question { api, request_id, deadline_ms, traceparent })) => {
                let shared = protocol::Generate { api, request_id, deadline_ms, traceparent, ..Default::default() };
                (intern!(py, "question"), shared)
            }
            Some(protocol::Kind::Relay(_)) => (intern!(py, "relay"), protocol::Generate::default()),
            None => return Err(malformed("a request without a kind".to_owned())),
        };
        let body = match buffers.first() {
            Some(buffer) => PyBytes::new_with(py, buffer.len_bytes(), |bytes| buffer.copy_to_slice(py, bytes))?,
            None => PyBytes::new(py, b""),
        };
        Ok(Self { kind: kind.clone().unbind(), version: request.version, blocks, generate, body: body.unbind() })
    }
    #[getter]
    fn api<'py>(&self, py: Python<'py>) -> Bound<'py, PyString> {
        // What Python compares and hashes for each request; any other text is made anew.
        match self.generate.api.as_str() {
            "chat.completions" => intern!(py, "chat.completions").clone(),
            "completions" => intern!(py, "completions").clone(),
            other => PyString::new(py, other),
        }
    }
    #[getter]
    fn request_id(&self) -> &str {
        &self.generate.request_id
    }
    /// What a request to generate says beside its body, by the names of `GenerateRequest`.
    fn surroundings<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let said = PyDict::new(py);
        said.set_item(intern!(py, "api"), self.api(py))?;
        said.set_item(intern!(py, "request_id"), &self.generate.request_id)?;
        said.set_item(intern!(py, "deadline"), self.deadline())?;
        said.set_item(intern!(py, "continue_text"), &self.generate.continue_text)?;
        said.set_item(intern!(py, "continue_tokens"), PyTuple::new(py, &self.generate.continue_tokens)?)?;
        said.set_item(intern!(py, "handoff"), self.handoff(py))?;
        Ok(said)
    }
    #[getter]
    fn deadline(&self) -> Option<f64> {
        (self.generate.deadline_ms > 0).then_some(self.generate.deadline_ms as f64 / 1000.0)
    }
    #[getter]
    fn traceparent(&self) -> &str {
        &self.generate.traceparent
    }
    #[getter]
    fn continue_text(&self) -> &str {
        &self.generate.continue_text
    }
    #[getter]
    fn continue_tokens(&self) -> Vec<u32> {
        self.generate.continue_tokens.clone()
    }
    #[getter]
    fn handoff<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.generate.handoff)
    }
    #[getter]
    fn whole(&self) -> bool {
        self.generate.whole
    }
    fn __repr__(&self) -> String {
        format!("<WorkerRequest {} {} {}>", self.kind, self.generate.api, self.generate.request_id)
    }
}

/// The head of a request, for tests and for engines that forward to other workers.
#[pyfunction]
#[pyo3(signature = (kind, *, api = String::new(), request_id = String::new(), deadline = None, traceparent = String::new(), continue_text = String::new(), continue_tokens = Vec::new(), handoff = Vec::new(), whole = false, blocks = false))]
pub(crate) fn encode_request<'py>(
    py: Python<'py>,
    kind: &str,
    api: String,
    request_id: String,
    deadline: Option<f64>,
    traceparent: String,
    continue_text: String,
    continue_tokens: Vec<u32>,
    handoff: Vec<u8>,
    whole: bool,
    blocks: bool,
) -> PyResult<Bound<'py, PyBytes>> {
    // A float becomes an integer saturating: a negative deadline has passed, which 1 ms says.
    let deadline_ms = deadline.map_or(0, |seconds| ((seconds * 1000.0) as u64).max(1));
    let kind = match kind {
        "question" => protocol::Kind::Question(protocol::Question { api, request_id, deadline_ms, traceparent }),
        "generate" => protocol::Kind::Generate(protocol::Generate {
            api,
            request_id,
            deadline_ms,
            traceparent,
            continue_text,
            continue_tokens,
            handoff: handoff.into(),
            whole,
        }),
        "subscribe_load" => protocol::Kind::SubscribeLoad(protocol::SubscribeLoad { blocks }),
        "describe" => protocol::Kind::Describe(protocol::Describe {}),
        "relay" => protocol::Kind::Relay(protocol::Relay {}),
        other => {
            return Err(malformed(format!(
                "kind={other:?}: expected 'generate', 'question', 'subscribe_load', 'describe' or 'relay'"
            )));
        }
    };
    let request = protocol::Request { version: protocol::VERSION, kind: Some(kind) };
    Ok(PyBytes::new(py, &protocol::encode(&request)))
}

/// Tokens spent.
#[pyclass(frozen, eq, hash, module = "pulsing._core")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct Usage {
    #[pyo3(get)]
    prompt_tokens: u32,
    #[pyo3(get)]
    completion_tokens: u32,
    #[pyo3(get)]
    cached_tokens: u32,
}

#[pymethods]
impl Usage {
    #[new]
    #[pyo3(signature = (prompt_tokens, completion_tokens, cached_tokens = 0))]
    fn new(prompt_tokens: u32, completion_tokens: u32, cached_tokens: u32) -> Self {
        Self { prompt_tokens, completion_tokens, cached_tokens }
    }
    #[getter]
    fn total_tokens(&self) -> u64 {
        u64::from(self.prompt_tokens) + u64::from(self.completion_tokens)
    }
    fn __repr__(&self) -> String {
        format!(
            "Usage(prompt_tokens={}, completion_tokens={}, cached_tokens={})",
            self.prompt_tokens, self.completion_tokens, self.cached_tokens
        )
    }
}

impl Usage {
    fn message(&self) -> protocol::Usage {
        protocol::Usage {
            prompt_tokens: self.prompt_tokens,
            completion_tokens: self.completion_tokens,
            cached_tokens: self.cached_tokens,
        }
    }
}

/// A piece of one choice of an answer.
#[pyclass(frozen, module = "pulsing._core")]
pub(crate) struct Delta(protocol::Delta);

#[pymethods]
impl Delta {
    #[new]
    #[pyo3(signature = (text = String::new(), *, index = 0, token_ids = Vec::new(), finish_reason = None, usage = None, logprobs = None, tool_calls = None, reasoning = None, handoff = Vec::new()))]
    fn new(
        text: String,
        index: u32,
        token_ids: Vec<u32>,
        finish_reason: Option<String>,
        usage: Option<&Bound<'_, Usage>>,
        logprobs: Option<&Bound<'_, PyAny>>,
        tool_calls: Option<&Bound<'_, PyAny>>,
        reasoning: Option<String>,
        handoff: Vec<u8>,
    ) -> PyResult<Self> {
        let usage = usage.map(|usage| usage.get().message());
        Ok(Self(protocol::Delta {
            index,
            text,
            token_ids,
            logprobs_json: logprobs_text(logprobs)?,
            tool_calls_json: json_text("tool_calls", tool_calls)?,
            reasoning: reasoning.unwrap_or_default(),
            finish_reason: finish_reason.unwrap_or_default(),
            usage,
            handoff: handoff.into(),
        }))
    }
    #[getter]
    fn text(&self) -> &str {
        &self.0.text
    }
    #[getter]
    fn index(&self) -> u32 {
        self.0.index
    }
    #[getter]
    fn token_ids(&self) -> Vec<u32> {
        self.0.token_ids.clone()
    }
    #[getter]
    fn finish_reason(&self) -> Option<&str> {
        Some(self.0.finish_reason.as_str()).filter(|reason| !reason.is_empty())
    }
    #[getter]
    fn usage(&self) -> Option<Usage> {
        self.0.usage.map(|usage| Usage {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            cached_tokens: usage.cached_tokens,
        })
    }
    #[getter]
    fn logprobs<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        json_object(py, &self.0.logprobs_json)
    }
    #[getter]
    fn tool_calls<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        json_object(py, &self.0.tool_calls_json)
    }
    #[getter]
    fn reasoning(&self) -> Option<&str> {
        Some(self.0.reasoning.as_str()).filter(|text| !text.is_empty())
    }
    #[getter]
    fn handoff<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.handoff)
    }
    fn __repr__(&self) -> String {
        format!("Delta({:?}, index={}, finish_reason={:?})", self.0.text, self.0.index, self.0.finish_reason)
    }
}

/// JSON text of an object, or the text itself if it is JSON already. Non-finite numbers are refused: they are no JSON.
fn json_text(what: &str, value: Option<&Bound<'_, PyAny>>) -> PyResult<String> {
    let Some(value) = value else { return Ok(String::new()) };
    if let Ok(text) = value.cast::<PyString>() {
        return text.extract();
    }
    let options = PyDict::new(value.py());
    options.set_item("allow_nan", false)?;
    options.set_item("separators", (",", ":"))?;
    let dumps = value.py().import("json")?.getattr("dumps")?;
    match dumps.call((value,), Some(&options)) {
        Ok(text) => text.extract(),
        Err(error) => Err(malformed(format!("{what} cannot be written as JSON: {error}"))),
    }
}

/// [`json_text`] of log probabilities, where -inf becomes [`LOGPROB_FLOOR`].
fn logprobs_text(value: Option<&Bound<'_, PyAny>>) -> PyResult<String> {
    match (json_text("logprobs", value), value) {
        // Seldom: looked for only where it stands in the way.
        (Err(error), Some(value)) => match floored(value, LOGPROB_DEPTH) {
            Ok(floored) => json_text("logprobs", Some(&floored)),
            Err(_) => Err(error),
        },
        (text, _) => text,
    }
}

/// The same dicts and lists with [`LOGPROB_FLOOR`] for each -inf in them.
fn floored<'py>(value: &Bound<'py, PyAny>, depth: u32) -> PyResult<Bound<'py, PyAny>> {
    let Some(depth) = depth.checked_sub(1) else { return Err(malformed("logprobs are nested too deeply".to_owned())) };
    if let Ok(items) = value.cast::<PyDict>() {
        let copy = PyDict::new(value.py());
        for (key, item) in items.iter() {
            copy.set_item(key, floored(&item, depth)?)?;
        }
        return Ok(copy.into_any());
    }
    if let Ok(items) = value.cast::<PyList>() {
        let copy: Vec<_> = items.iter().map(|item| floored(&item, depth)).collect::<PyResult<_>>()?;
        return Ok(PyList::new(value.py(), copy)?.into_any());
    }
    match value.cast::<PyFloat>() {
        Ok(number) if number.value() == f64::NEG_INFINITY => Ok(PyFloat::new(value.py(), LOGPROB_FLOOR).into_any()),
        _ => Ok(value.clone()),
    }
}

fn json_object<'py>(py: Python<'py>, text: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
    if text.is_empty() {
        return Ok(None);
    }
    py.import("json")?.call_method1("loads", (text,)).map(Some)
}

/// One stream item.
#[pyfunction]
pub(crate) fn encode_deltas<'py>(py: Python<'py>, deltas: Vec<Bound<'_, Delta>>) -> Bound<'py, PyBytes> {
    let deltas = deltas.iter().map(|delta| delta.get().0.clone()).collect();
    PyBytes::new(py, &protocol::encode(&protocol::Deltas { deltas }))
}

/// The deltas of one stream item.
#[pyfunction]
pub(crate) fn decode_deltas(py: Python<'_>, head: PyBuffer<u8>) -> PyResult<Vec<Delta>> {
    let deltas: protocol::Deltas = protocol::decode_bytes(&head.to_vec(py)?).map_err(malformed)?;
    Ok(deltas.deltas.into_iter().map(Delta).collect())
}

/// How Routers call the prompt of a request, and how long it is: the hash of each whole block of 256 bytes and all before it, and
/// the bytes of all of it. Nothing of several prompts, and of a body that no Router would pass on.
#[pyfunction]
pub(crate) fn prompt_blocks(api: &str, body: &[u8]) -> (Vec<u64>, usize) {
    let api = match api {
        "chat.completions" => Api::Chat,
        "completions" => Api::Completions,
        _ => return (Vec::new(), 0),
    };
    let body = Bytes::copy_from_slice(body);
    let Ok(parsed) = api::parse(api, &body) else { return (Vec::new(), 0) };
    let chain = parsed.chain(&body);
    // Of a huge prompt only the beginning is hashed; how it is escaped matters little there.
    let length = chain.length().unwrap_or(parsed.text.len());
    (chain.finish(), length)
}

/// The answer to a question of the worker protocol. `embeddings` are 32-bit floats as bytes, little-endian.
#[pyfunction]
#[pyo3(signature = (*, embeddings = Vec::new(), tokens = Vec::new(), token_texts = Vec::new(), text = String::new(), usage = None, max_model_len = 0))]
pub(crate) fn encode_answer<'py>(
    py: Python<'py>,
    embeddings: Vec<Bound<'_, PyBytes>>,
    tokens: Vec<u32>,
    token_texts: Vec<String>,
    text: String,
    usage: Option<&Bound<'_, Usage>>,
    max_model_len: u64,
) -> Bound<'py, PyBytes> {
    let vector = |bytes: &Bound<'_, PyBytes>| protocol::Embedding { values: bytes.as_bytes().to_vec().into() };
    let embeddings = embeddings.iter().map(vector).collect();
    let usage = usage.map(|usage| usage.get().message());
    PyBytes::new(
        py,
        &protocol::encode(&protocol::Answer { embeddings, tokens, token_texts, text, usage, max_model_len }),
    )
}

/// How a worker is doing.
#[pyclass(frozen, module = "pulsing._core")]
pub(crate) struct LoadReport(protocol::LoadReport);

#[pymethods]
impl LoadReport {
    #[new]
    #[pyo3(signature = (state = String::from("ready"), running = 0, waiting = 0, capacity = 1, kv_usage = 0.0, processed = 0, progress_age_ms = 0, models = Vec::new(), detail = String::new(), max_model_len = 0, answer_age_ms = 0))]
    fn new(
        state: String,
        running: u32,
        waiting: u32,
        capacity: u32,
        kv_usage: f32,
        processed: u64,
        progress_age_ms: u64,
        models: Vec<String>,
        detail: String,
        max_model_len: u64,
        answer_age_ms: u64,
    ) -> PyResult<Self> {
        if !["loading", "ready", "draining", "failed"].contains(&state.as_str()) {
            return Err(malformed(format!("state={state:?}: expected 'loading', 'ready', 'draining' or 'failed'")));
        }
        Ok(Self(protocol::LoadReport {
            state,
            running,
            waiting,
            capacity,
            kv_usage,
            processed,
            progress_age_ms,
            models,
            detail,
            max_model_len,
            answer_age_ms,
            blocks: None,
        }))
    }
    /// `blocks`: number, reset, stored and dropped of the news of the prompt cache that go with it.
    #[pyo3(signature = (blocks = None))]
    fn encode<'py>(&self, py: Python<'py>, blocks: Option<(u64, bool, Vec<u64>, Vec<u64>)>) -> Bound<'py, PyBytes> {
        let Some((seq, reset, stored, dropped)) = blocks else {
            return PyBytes::new(py, &protocol::encode(&self.0));
        };
        let blocks = Some(protocol::BlockNews { seq, reset, stored, dropped });
        PyBytes::new(py, &protocol::encode(&protocol::LoadReport { blocks, ..self.0.clone() }))
    }
    #[staticmethod]
    fn decode(py: Python<'_>, head: PyBuffer<u8>) -> PyResult<Self> {
        protocol::decode_bytes(&head.to_vec(py)?).map(Self).map_err(malformed)
    }
    /// This report inside a `Description`, encoded: the answer to `describe`. `authorization` is what Routers send to the
    /// engine behind an EngineWorker.
    #[pyo3(signature = (engine, engine_version, authorization = String::new()))]
    fn describe<'py>(
        &self,
        py: Python<'py>,
        engine: String,
        engine_version: String,
        authorization: String,
    ) -> Bound<'py, PyBytes> {
        let load = Some(self.0.clone());
        let description = protocol::Description { engine, engine_version, load, authorization };
        PyBytes::new(py, &protocol::encode(&description))
    }
    #[getter]
    fn state(&self) -> &str {
        &self.0.state
    }
    #[getter]
    fn running(&self) -> u32 {
        self.0.running
    }
    #[getter]
    fn waiting(&self) -> u32 {
        self.0.waiting
    }
    #[getter]
    fn capacity(&self) -> u32 {
        self.0.capacity
    }
    #[getter]
    fn kv_usage(&self) -> f32 {
        self.0.kv_usage
    }
    #[getter]
    fn processed(&self) -> u64 {
        self.0.processed
    }
    #[getter]
    fn progress_age_ms(&self) -> u64 {
        self.0.progress_age_ms
    }
    #[getter]
    fn models(&self) -> Vec<String> {
        self.0.models.clone()
    }
    #[getter]
    fn detail(&self) -> &str {
        &self.0.detail
    }
    #[getter]
    fn max_model_len(&self) -> u64 {
        self.0.max_model_len
    }
    #[getter]
    fn answer_age_ms(&self) -> u64 {
        self.0.answer_age_ms
    }
    /// Number, reset, stored and dropped of the news of the prompt cache that came with it.
    #[getter]
    fn blocks(&self) -> Option<(u64, bool, Vec<u64>, Vec<u64>)> {
        let news = self.0.blocks.as_ref()?;
        Some((news.seq, news.reset, news.stored.clone(), news.dropped.clone()))
    }
    fn __repr__(&self) -> String {
        format!("<LoadReport {} {}+{} of {}>", self.0.state, self.0.running, self.0.waiting, self.0.capacity)
    }
}

/// What a worker is.
#[pyclass(frozen, module = "pulsing._core")]
pub(crate) struct Description(protocol::Description);

#[pymethods]
impl Description {
    #[new]
    #[pyo3(signature = (engine, engine_version = String::new(), load = None))]
    fn new(engine: String, engine_version: String, load: Option<&Bound<'_, LoadReport>>) -> Self {
        let load = load.map(|load| load.get().0.clone());
        Self(protocol::Description { engine, engine_version, load, ..protocol::Description::default() })
    }
    fn encode<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &protocol::encode(&self.0))
    }
    #[staticmethod]
    fn decode(py: Python<'_>, head: PyBuffer<u8>) -> PyResult<Self> {
        protocol::decode_bytes(&head.to_vec(py)?).map(Self).map_err(malformed)
    }
    #[getter]
    fn engine(&self) -> &str {
        &self.0.engine
    }
    #[getter]
    fn engine_version(&self) -> &str {
        &self.0.engine_version
    }
    #[getter]
    fn load(&self) -> Option<LoadReport> {
        self.0.load.clone().map(LoadReport)
    }
    #[getter]
    fn authorization(&self) -> &str {
        &self.0.authorization
    }
    fn __repr__(&self) -> String {
        format!("<Description {} {}>", self.0.engine, self.0.engine_version)
    }
}

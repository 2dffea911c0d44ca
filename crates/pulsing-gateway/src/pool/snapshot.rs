//! An immutable picture of the pool.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::Arc;

use pulsing_core::Instance;

use super::{Role, Served, State, Worker};
use crate::api::Api;

/// Names listed in a 503 before it says how many more there are.
pub(super) const NAMES_SHOWN: usize = 20;
/// What names of a node's own begin with.
const INNER: &str = "system/";

/// The Workers at one moment.
#[derive(Debug, Default)]
pub struct Snapshot {
    groups: Vec<Group>,
    all: Vec<Arc<Worker>>,
    /// By what clients may put into `model`.
    routes: HashMap<String, Route>,
    /// Names a client may ask for, with the longest context known, in the order in which they are shown.
    listed: Vec<(String, u64)>,
}

/// Who serves under one worker name.
#[derive(Debug)]
pub(super) struct Group {
    worker_name: String,
    workers: Vec<Arc<Worker>>,
    /// Kinds of what is registered under the name and is no Worker.
    strangers: Vec<String>,
    /// The model that a public name without one stands for.
    primary: Option<String>,
    /// Models with the longest context known, in order of appearance.
    models: Vec<(String, u64)>,
}

/// Where requests for one name go.
#[derive(Debug)]
struct Route {
    group: usize,
    /// What the Workers call the model.
    model: Option<String>,
    ready: Able,
    /// Those that need what another one has read, ready if one is.
    decoders: Arc<[Arc<Worker>]>,
    /// For when nobody is ready.
    spare: Able,
    /// By place in [`Api::ALL`]: there are Workers, and none of them answers such requests.
    lacks: [bool; Api::ALL.len()],
}

/// Workers by what they answer.
#[derive(Debug)]
struct Able {
    all: Arc<[Arc<Worker>]>,
    /// By place in [`Api::ALL`]; `None`: all of them answer.
    only: [Option<Arc<[Arc<Worker>]>>; Api::ALL.len()],
}

impl Able {
    fn new(all: Arc<[Arc<Worker>]>) -> Self {
        let only = Api::ALL.map(|api| {
            let able = |worker: &&Arc<Worker>| worker.serves(api);
            (!all.iter().all(|worker| able(&worker))).then(|| all.iter().filter(able).cloned().collect())
        });
        Self { all, only }
    }
    fn of(&self, api: Api) -> Arc<[Arc<Worker>]> {
        Arc::clone(self.only[api as usize].as_ref().unwrap_or(&self.all))
    }
}

impl Group {
    /// `primary` is the model that was meant so far; it stays that while a Worker has it.
    pub(super) fn new(
        worker_name: String,
        workers: Vec<Arc<Worker>>,
        strangers: Vec<String>,
        primary: Option<String>,
    ) -> Self {
        let mut models: Vec<(String, u64)> = Vec::new();
        let mut first = None;
        for worker in &workers {
            let state = worker.state();
            for (index, model) in worker.models().into_iter().enumerate() {
                if index == 0 && state != State::Failed && state != State::Incompatible {
                    first.get_or_insert_with(|| model.clone());
                }
                match models.iter_mut().find(|(name, _)| *name == model) {
                    Some((_, length)) => *length = (*length).max(worker.max_model_len()),
                    None => models.push((model.clone(), worker.max_model_len())),
                }
            }
        }
        let primary = primary.filter(|model| models.iter().any(|(name, _)| name == model)).or(first);
        Self { worker_name, workers, strangers, primary, models }
    }
    /// The model that a public name without one stands for.
    pub(super) fn primary(&self) -> Option<&str> {
        self.primary.as_deref()
    }
    /// More than one model is served.
    pub(super) fn is_mixed(&self) -> bool {
        self.models.len() > 1
    }
    fn has(&self, model: &str) -> bool {
        self.models.iter().any(|(name, _)| name == model)
    }
    fn length(&self, model: Option<&str>) -> u64 {
        model.and_then(|model| self.models.iter().find(|(name, _)| name == model)).map_or(0, |(_, length)| *length)
    }
    /// Where requests for `model` go; Workers that name no model serve whatever is meant, if `unnamed`.
    fn route(&self, group: usize, model: Option<&str>, unnamed: bool) -> Route {
        let fits = |worker: &&Arc<Worker>| {
            let models = worker.models();
            (unnamed && models.is_empty()) || model.is_none_or(|model| models.iter().any(|name| name == model))
        };
        let fitting = || self.workers.iter().filter(fits);
        let of = |states: &[State], decodes: bool| -> Vec<Arc<Worker>> {
            let wanted = |worker: &&Arc<Worker>| {
                states.contains(&worker.state()) && matches!(worker.role(), Role::Decode(_)) == decodes
            };
            fitting().filter(wanted).cloned().collect()
        };
        // A slow Worker, or one that rests, is better than none.
        const SPARE: [State; 2] = [State::Stuck, State::Tripped];
        let decoders = Some(of(&[State::Ready], true)).filter(|ready| !ready.is_empty());
        let decoders = decoders.unwrap_or_else(|| of(&SPARE, true));
        let useful = |workers: Vec<Arc<Worker>>| -> Arc<[Arc<Worker>]> {
            workers.into_iter().filter(|worker| has_decoder(worker, &decoders)).collect()
        };
        Route {
            group,
            model: model.map(str::to_owned),
            ready: Able::new(useful(of(&[State::Ready], false))),
            spare: Able::new(useful(of(&SPARE, false))),
            lacks: Api::ALL.map(|api| fitting().next().is_some() && !fitting().any(|worker| worker.serves(api))),
            decoders: decoders.into(),
        }
    }
}

/// A Worker that only reads prompts is of use where another one takes them over.
fn has_decoder(worker: &Worker, decoders: &[Arc<Worker>]) -> bool {
    match worker.role() {
        Role::Prefill(own) => decoders.iter().any(|other| other.pairing().is_some_and(|pairing| pairing.fits(&own))),
        Role::Aggregated | Role::Decode(_) => true,
    }
}

impl Snapshot {
    /// Groups in the order in which `served` mentions their worker names.
    pub(super) fn new(groups: Vec<Group>, served: &[Served]) -> Self {
        let mut routes: HashMap<String, Route> = HashMap::new();
        let mut listed = Vec::new();
        for one in served {
            let Some(at) = groups.iter().position(|group| group.worker_name == one.worker_name) else { continue };
            let group = &groups[at];
            let model = match &one.model {
                Some(model) => Some(model.as_str()),
                // A model that really has the public name is what that name means.
                None if group.has(&one.name) => Some(one.name.as_str()),
                None => group.primary(),
            };
            listed.push((one.name.clone(), group.length(model)));
            routes.insert(one.name.clone(), group.route(at, model, one.model.is_none()));
        }
        for (at, group) in groups.iter().enumerate() {
            for (model, length) in &group.models {
                if routes.contains_key(model) {
                    continue;
                }
                listed.push((model.clone(), *length));
                routes.insert(model.clone(), group.route(at, Some(model), false));
            }
        }
        let all = groups.iter().flat_map(|group| group.workers.iter().cloned()).collect();
        Self { groups, all, routes, listed }
    }

    /// Ready Workers for `model`; `None` for a model that nobody here has.
    pub fn ready_for(&self, model: &str) -> Option<Arc<[Arc<Worker>]>> {
        self.routes.get(model).map(|route| Arc::clone(&route.ready.all))
    }
    /// Workers for `model` that generate from what others have read.
    pub fn decoders_for(&self, model: &str) -> Arc<[Arc<Worker>]> {
        self.routes.get(model).map_or_else(Arc::default, |route| Arc::clone(&route.decoders))
    }
    /// Who may take a request: Workers of `model` that answer `api`, the ready ones, or if there are none those that do
    /// not get on, or rest.
    pub(crate) fn candidates(&self, model: &str, api: Api) -> Arc<[Arc<Worker>]> {
        let Some(route) = self.routes.get(model) else { return Arc::default() };
        let ready = route.ready.of(api);
        if ready.is_empty() { route.spare.of(api) } else { ready }
    }
    /// What the Workers call the model that clients call `model`; `None` if they name none.
    pub fn own_name(&self, model: &str) -> Option<&str> {
        self.routes.get(model).and_then(|route| route.model.as_deref())
    }
    /// Why `model` never answers requests for `api`, if it has Workers and none of them does.
    pub(crate) fn lacks(&self, model: &str, api: Api) -> Option<String> {
        let route = self.routes.get(model).filter(|route| route.lacks[api as usize])?;
        let served: Vec<&str> = Api::ALL.into_iter().filter(|api| !route.lacks[*api as usize]).map(Api::path).collect();
        Some(format!("its workers have {}", if served.is_empty() { "none".to_owned() } else { served.join(", ") }))
    }
    /// Every Worker, in whatever state.
    pub fn all(&self) -> &[Arc<Worker>] {
        &self.all
    }
    /// Workers in a state.
    pub fn count(&self, state: State) -> usize {
        self.all.iter().filter(|worker| worker.state() == state).count()
    }
    pub(super) fn groups(&self) -> &[Group] {
        &self.groups
    }
    /// Names a client may ask for, the public ones first, with the longest context in tokens (0 = unknown).
    pub fn listed(&self) -> &[(String, u64)] {
        &self.listed
    }

    /// `names`: how many the cluster has; `first`: an instance each of some of them. Clients see it: it tells no engine's
    /// address.
    pub(super) fn explain(&self, model: &str, names: usize, first: &[Instance]) -> String {
        let group = self.routes.get(model).map_or(0, |route| route.group);
        let Some(Group { worker_name, workers, strangers, .. }) = self.groups.get(group) else {
            return "no worker name is watched.".to_owned();
        };
        let mut text = if workers.is_empty() {
            format!("no worker is registered under the name {worker_name:?}.")
        } else {
            format!("no worker named {worker_name:?} is ready for model {model:?}.")
        };
        for state in State::ALL {
            let details: Vec<String> = workers
                .iter()
                .filter(|worker| worker.state() == state)
                .map(|worker| {
                    let models = worker.models().join(", ");
                    match (models.is_empty(), worker.told()) {
                        (true, detail) if detail.is_empty() => "model unknown".to_owned(),
                        (true, detail) => detail,
                        (false, detail) if detail.is_empty() => models,
                        (false, detail) => format!("{models}: {detail}"),
                    }
                })
                .collect();
            if !details.is_empty() {
                let shown = details.iter().take(4).cloned().collect::<Vec<_>>().join("; ");
                let _ = write!(text, " {} worker(s) {state} ({shown}).", details.len());
            }
        }
        let halves =
            workers.iter().filter(|worker| worker.state() == State::Ready && worker.role() != Role::Aggregated);
        let roles: Vec<&str> = halves.map(|worker| worker.role().name()).collect();
        if !roles.is_empty() {
            let count = |name: &str| roles.iter().filter(|role| **role == name).count();
            let _ = write!(
                text,
                " A pair of prefill and decode of the same pd is needed; {} prefill and {} decode worker(s) are ready.",
                count("prefill"),
                count("decode")
            );
        }
        if !strangers.is_empty() {
            let _ = write!(
                text,
                " {} instance(s) under that name are no workers but {}.",
                strangers.len(),
                strangers.iter().take(4).cloned().collect::<Vec<_>>().join(", ")
            );
        }
        // Each node has some of its own, which nobody looks for.
        let (inner, first): (Vec<_>, Vec<_>) = first.iter().partition(|one| one.name.starts_with(INNER));
        let names = names.saturating_sub(inner.len());
        if first.is_empty() {
            text.push_str(" No names exist in the cluster yet: start a worker with --seeds pointing at this cluster.");
            return text;
        }
        let kind = |one: &Instance| one.metadata.get("kind").map_or("actor", String::as_str).to_owned();
        let shown: Vec<String> = first.into_iter().map(|one| format!("{} ({})", one.name, kind(one))).collect();
        let _ = write!(text, " Names in the cluster: {}", shown.join(", "));
        if names > shown.len() {
            let _ = write!(text, " and {} more", names - shown.len());
        }
        text.push('.');
        text
    }
}

//! An immutable picture of the pool.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::Arc;

use pulsing_core::Instance;

use super::{State, Worker};

/// Names listed in a 503 before it says how many more there are.
pub(super) const NAMES_SHOWN: usize = 20;

/// The Workers at one moment.
#[derive(Debug, Default)]
pub struct Snapshot {
    all: Vec<Arc<Worker>>,
    strangers: Vec<String>,
    /// Ready Workers by model.
    ready: HashMap<String, Arc<[Arc<Worker>]>>,
    /// Ready Workers for the alias.
    alias: Arc<[Arc<Worker>]>,
    alias_name: String,
    primary: Option<String>,
    /// Models with the longest context known, in order of appearance.
    models: Vec<(String, u64)>,
}

impl Snapshot {
    /// `primary` is the model that the alias meant so far; it keeps meaning that while a Worker has it.
    pub(super) fn new(all: Vec<Arc<Worker>>, strangers: Vec<String>, alias_name: &str, primary: Option<&str>) -> Self {
        let mut models: Vec<(String, u64)> = Vec::new();
        let mut ready: HashMap<String, Vec<Arc<Worker>>> = HashMap::new();
        let mut first = None;
        for worker in &all {
            let state = worker.state();
            for (index, model) in worker.models().into_iter().enumerate() {
                if index == 0 && state != State::Failed && state != State::Incompatible {
                    first.get_or_insert_with(|| model.clone());
                }
                match models.iter_mut().find(|(name, _)| *name == model) {
                    Some((_, length)) => *length = (*length).max(worker.max_model_len()),
                    None => models.push((model.clone(), worker.max_model_len())),
                }
                if state == State::Ready {
                    ready.entry(model).or_default().push(Arc::clone(worker));
                }
            }
        }
        let known = |model: &str| models.iter().any(|(name, _)| name == model);
        let primary = if known(alias_name) {
            // A model that really has the alias's name is what the alias means.
            Some(alias_name.to_owned())
        } else {
            primary.filter(|model| known(model)).map(str::to_owned).or(first)
        };
        let alias = all
            .iter()
            .filter(|worker| worker.state() == State::Ready)
            .filter(|worker| {
                let models = worker.models();
                // A Worker that names no model serves whatever the alias means.
                models.is_empty() || primary.as_ref().is_none_or(|primary| models.contains(primary))
            })
            .cloned()
            .collect();
        Self {
            all,
            strangers,
            ready: ready.into_iter().map(|(model, workers)| (model, workers.into())).collect(),
            alias,
            alias_name: alias_name.to_owned(),
            primary,
            models,
        }
    }

    /// Ready Workers for `model`; `None` for a model that nobody here has.
    pub fn ready_for(&self, model: &str) -> Option<Arc<[Arc<Worker>]>> {
        if model == self.alias_name {
            return Some(Arc::clone(&self.alias));
        }
        match self.ready.get(model) {
            Some(workers) => Some(Arc::clone(workers)),
            None => self.models.iter().any(|(name, _)| name == model).then(Arc::default),
        }
    }
    /// Ready Workers for the alias.
    pub fn ready(&self) -> Arc<[Arc<Worker>]> {
        Arc::clone(&self.alias)
    }
    /// Every Worker, in whatever state.
    pub fn all(&self) -> &[Arc<Worker>] {
        &self.all
    }
    /// Workers in a state.
    pub fn count(&self, state: State) -> usize {
        self.all.iter().filter(|worker| worker.state() == state).count()
    }
    /// The model that the alias stands for.
    pub fn primary(&self) -> Option<&str> {
        self.primary.as_deref()
    }
    /// More than one model is served.
    pub fn mixed(&self) -> bool {
        self.models.len() > 1
    }
    /// Names a client may ask for, the alias first, with the longest context in tokens (0 = unknown).
    pub fn listed(&self) -> Vec<(String, u64)> {
        let length = |model: &str| self.models.iter().find(|(name, _)| name == model).map_or(0, |(_, length)| *length);
        let mut listed = vec![(self.alias_name.clone(), self.primary.as_deref().map_or(0, length))];
        listed.extend(self.models.iter().filter(|(name, _)| *name != self.alias_name).cloned());
        listed
    }

    /// `names`: how many the cluster has; `first`: an instance each of some of them.
    pub(super) fn explain(&self, worker_name: &str, model: &str, names: usize, first: &[Instance]) -> String {
        let mut text = if self.all.is_empty() {
            format!("no worker is registered under the name {worker_name:?}.")
        } else {
            format!("no worker named {worker_name:?} is ready for model {model:?}.")
        };
        for state in State::ALL {
            let details: Vec<String> = self
                .all
                .iter()
                .filter(|worker| worker.state() == state)
                .map(|worker| {
                    let models = worker.models().join(", ");
                    match (models.is_empty(), worker.detail()) {
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
        if !self.strangers.is_empty() {
            let _ = write!(
                text,
                " {} instance(s) under that name are no workers but {}.",
                self.strangers.len(),
                self.strangers.iter().take(4).cloned().collect::<Vec<_>>().join(", ")
            );
        }
        if names == 0 {
            text.push_str(" No names exist in the cluster yet: start a worker with --seeds pointing at this cluster.");
            return text;
        }
        let kind = |one: &Instance| one.metadata.get("kind").map_or("actor", String::as_str).to_owned();
        let shown: Vec<String> = first.iter().map(|one| format!("{} ({})", one.name, kind(one))).collect();
        let _ = write!(text, " Names in the cluster: {}", shown.join(", "));
        if names > shown.len() {
            let _ = write!(text, " and {} more", names - shown.len());
        }
        text.push('.');
        text
    }
}

//! The names that clients may ask for.

use serde::Deserialize;

/// One public model name and what it stands for (S7).
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Served {
    /// What clients put into `model`.
    pub name: String,
    /// Name that the Workers behind it are registered under.
    pub worker_name: String,
    /// Which of those Workers' models is meant; `None`: whatever they serve, with mixed models the first one seen.
    pub model: Option<String>,
}

impl Served {
    /// `name` for whatever serves under `worker_name`.
    pub fn new(name: impl Into<String>, worker_name: impl Into<String>) -> Self {
        Self { name: name.into(), worker_name: worker_name.into(), model: None }
    }
}

//! What is counted by model. Only names that this Router serves become labels, and not more of them than [`MOST`].

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use parking_lot::RwLock;

use super::family;
use super::histogram::{GAPS, Histogram, SECONDS};
use crate::protocol::Usage;

/// Names that are told apart; the rest is counted together. Workers come and go under names of their own.
const MOST: usize = 64;
const REST: &str = "(other)";

/// Numbers of one model.
pub(crate) struct ModelMetrics {
    requests: AtomicU64,
    ttft: Histogram,
    gaps: Histogram,
    prompt: AtomicU64,
    completion: AtomicU64,
}

impl ModelMetrics {
    fn new() -> Self {
        Self {
            requests: AtomicU64::new(0),
            ttft: Histogram::new(SECONDS),
            gaps: Histogram::new(GAPS),
            prompt: AtomicU64::new(0),
            completion: AtomicU64::new(0),
        }
    }
    pub(crate) fn first_token(&self, after: Duration) {
        self.ttft.took(after);
    }
    pub(crate) fn gap(&self, time: Duration) {
        self.gaps.took(time);
    }
    pub(crate) fn used(&self, usage: &Usage) {
        self.prompt.fetch_add(u64::from(usage.prompt_tokens), Relaxed);
        self.completion.fetch_add(u64::from(usage.completion_tokens), Relaxed);
    }
}

/// All models.
#[derive(Default)]
pub(super) struct Models(RwLock<BTreeMap<String, Arc<ModelMetrics>>>);

impl Models {
    /// Counts a request for `name`, which must be one that is served.
    pub(super) fn request(&self, name: &str) -> Arc<ModelMetrics> {
        let known = self.0.read().get(name).cloned();
        let model = known.unwrap_or_else(|| {
            let mut models = self.0.write();
            let name = if models.len() < MOST || models.contains_key(name) { name } else { REST };
            Arc::clone(models.entry(name.to_owned()).or_insert_with(|| Arc::new(ModelMetrics::new())))
        });
        model.requests.fetch_add(1, Relaxed);
        model
    }

    pub(super) fn write(&self, out: &mut String) {
        let models: Vec<(String, Arc<ModelMetrics>)> = {
            let models = self.0.read();
            models.iter().map(|(name, model)| (escaped(name), Arc::clone(model))).collect()
        };
        family(out, "pulsing_router_model_requests_total", "counter", "Requests sent on, by model asked for.");
        for (name, model) in &models {
            let _ = writeln!(
                out,
                "pulsing_router_model_requests_total{{model=\"{name}\"}} {}",
                model.requests.load(Relaxed)
            );
        }
        family(
            out,
            "pulsing_router_model_tokens_total",
            "counter",
            "Tokens as reported by workers, by model asked for.",
        );
        for (name, model) in &models {
            for (kind, count) in [("prompt", &model.prompt), ("completion", &model.completion)] {
                let count = count.load(Relaxed);
                let _ = writeln!(out, "pulsing_router_model_tokens_total{{model=\"{name}\",kind=\"{kind}\"}} {count}");
            }
        }
        let ttft = "pulsing_router_model_time_to_first_token_seconds";
        family(out, ttft, "histogram", "From request to the worker's first piece, by model asked for.");
        for (name, model) in &models {
            model.ttft.write(out, ttft, &format!("model=\"{name}\","));
        }
        let gaps = "pulsing_router_model_inter_token_latency_seconds";
        family(out, gaps, "histogram", "Between two pieces of a stream, by model asked for.");
        for (name, model) in &models {
            model.gaps.write(out, gaps, &format!("model=\"{name}\","));
        }
    }
}

/// As a label's value has to be.
fn escaped(name: &str) -> String {
    name.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn h10_names_beyond_the_limit_are_counted_together() {
        let models = Models::default();
        for number in 0..1000 {
            models.request(&format!("m{number}"));
        }
        models.request("m1").first_token(Duration::from_millis(3));
        let mut out = String::new();
        models.write(&mut out);
        assert_eq!(out.matches("pulsing_router_model_requests_total{").count(), MOST + 1);
        assert!(out.contains("model_requests_total{model=\"m1\"} 2\n"), "{out}");
        assert!(out.contains(&format!("model_requests_total{{model=\"(other)\"}} {}\n", 1000 - MOST)), "{out}");
        assert!(out.contains("model_time_to_first_token_seconds_bucket{model=\"m1\",le=\"0.005\"} 1\n"), "{out}");
        assert_eq!(escaped("a\"b\\\n"), "a\\\"b\\\\\\n");
    }
}

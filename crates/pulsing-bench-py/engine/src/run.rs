//! A run from the first probe to the last point, on threads of its own.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::{Condvar, Mutex};
use serde_json::json;
use tokio::sync::watch;

use crate::clock::Clock;
use crate::config::{Config, Kind, micros};
use crate::error::BenchError;
use crate::exchange::Client;
use crate::limits;
use crate::live::{Live, Progress};
use crate::phase::{self, PhaseResult, Setting, Shape};
use crate::point::{Point, round};
use crate::probe;
use crate::prompt::Prompts;
use crate::record::{Outcome, Record, Source};
use crate::report::{self, Report, Server};
use crate::target::Target;
use crate::verdict::{self, State};

/// A sweep ends after so many saturated points in a row: one slow point may be chance.
const SATURATED_POINTS: usize = 2;
/// How far above the measured request rate a sweep goes.
const BEYOND: f64 = 1.2;

/// A tokenizer: how many tokens a text is, or none where it cannot say.
pub type Counter<'a> = dyn Fn(&str) -> Option<u64> + 'a;

/// A run that goes on in the background.
pub struct Run {
    shared: Arc<Shared>,
}

struct Shared {
    clock: Clock,
    live: Arc<Live>,
    stop: watch::Sender<bool>,
    outcome: Mutex<Option<Result<RunData, BenchError>>>,
    done: Condvar,
}

struct RunData {
    config: Config,
    seed: u64,
    server: Server,
    started_at: f64,
    ended_at: f64,
    warmup: Option<PhaseResult>,
    phases: Vec<PhaseResult>,
    interrupted: bool,
    notes: Vec<String>,
}

impl Run {
    /// Starts the threads and returns at once.
    ///
    /// # Errors
    /// [`BenchError::Runtime`] when the machine gives no threads, [`BenchError::Config`] when it has too few files or ports.
    pub fn start(config: Config) -> Result<Self, BenchError> {
        limits::make_room(config.concurrency.iter().copied().max().unwrap_or(config.max_vus))?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(config.num_workers)
            .thread_name("pulsing-bench")
            .enable_all()
            .build()?;
        let shared = Arc::new(Shared {
            clock: Clock::start(),
            live: Arc::default(),
            stop: watch::channel(false).0,
            outcome: Mutex::new(None),
            done: Condvar::new(),
        });
        shared.live.begin("probe", 0, 0, 0, None);
        let owned = Arc::clone(&shared);
        thread::Builder::new().name("pulsing-bench-run".into()).spawn(move || {
            // Receivers live in the run; a sender without any would lose the stop.
            let stop = owned.stop.subscribe();
            let main = runtime.spawn(measure(config, owned.clock, Arc::clone(&owned.live), stop));
            let outcome = runtime.block_on(main).unwrap_or_else(|error| {
                Err(BenchError::Runtime(std::io::Error::other(format!("the run broke off: {error}"))))
            });
            *owned.outcome.lock() = Some(outcome);
            owned.done.notify_all();
            runtime.shutdown_background();
        })?;
        Ok(Self { shared })
    }

    /// Ends the run early: requests in flight are cut off, the report holds what was measured.
    pub fn stop(&self) {
        self.shared.stop.send_replace(true);
    }

    /// Waits up to `limit`; true when the run is over.
    pub fn wait(&self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        let mut outcome = self.shared.outcome.lock();
        while outcome.is_none() {
            if self.shared.done.wait_until(&mut outcome, until).timed_out() {
                break;
            }
        }
        outcome.is_some()
    }

    /// How far it is.
    pub fn progress(&self) -> Progress {
        self.shared.live.look(self.shared.clock.now())
    }

    /// The result of a run that is over. `count` is a tokenizer for answers without usage.
    ///
    /// # Errors
    /// Why the run could not be made; [`BenchError::Config`] when it is not over yet.
    pub fn report(&self, count: Option<&Counter<'_>>) -> Result<Report, BenchError> {
        let mut outcome = self.shared.outcome.lock();
        match outcome.as_mut() {
            None => Err(BenchError::Config("the run is not over; wait for it first".into())),
            Some(Ok(data)) => Ok(data.report(count)),
            Some(Err(error)) => Err(match error {
                BenchError::Config(text) => BenchError::Config(text.clone()),
                BenchError::Server(text) => BenchError::Server(text.clone()),
                BenchError::Runtime(error) => BenchError::Runtime(std::io::Error::other(error.to_string())),
                BenchError::Interrupted => BenchError::Interrupted,
            }),
        }
    }
}

impl Run {
    /// Every request of the points of a run that is over, with the label of its point.
    pub fn requests(&self, mut each: impl FnMut(&str, &Record)) {
        if let Some(Ok(data)) = self.shared.outcome.lock().as_ref() {
            for phase in &data.phases {
                phase.records.iter().for_each(|record| each(&phase.label, record));
            }
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.stop();
    }
}

async fn measure(
    config: Config,
    clock: Clock,
    live: Arc<Live>,
    mut stop: watch::Receiver<bool>,
) -> Result<RunData, BenchError> {
    let started_at = unix_now();
    let seed = config.seed.unwrap_or_else(rand::random);
    let prompts = Prompts::new(seed);
    let target = Target::resolve(&config.url).await?;
    let client = Client::new(target, clock, config.api_key.as_deref(), config.timeouts.clone(), config.connection)?;
    let asked = async {
        let found = probe::probe(&config, &client, clock, &prompts).await?;
        Ok((found, probe::models(&client).await))
    };
    let (found, models) = tokio::select! {
        asked = asked => asked.map_err(|error| clean(error, &config))?,
        _ = stop.wait_for(|stop| *stop) => return Err(BenchError::Interrupted),
    };
    let server = Server {
        authority: client.target().authority.clone(),
        path: found.path.clone(),
        models,
        ignore_eos_sent: found.dialect.ignore_eos,
        usage_asked: found.dialect.usage,
        tokens_per_word: round(found.scale.tokens_per_word),
        prompt_length_measured: found.scale.measured,
        refused: found.refused,
    };
    let setting = Arc::new(Setting {
        seed,
        clock,
        client,
        dialect: found.dialect,
        path: found.path,
        scale: found.scale,
        prompts,
        live,
        next: AtomicU64::new(0),
        config: config.clone(),
    });
    let mut data = RunData {
        config,
        seed,
        server,
        started_at,
        ended_at: started_at,
        warmup: None,
        phases: Vec::new(),
        interrupted: false,
        notes: Vec::new(),
    };
    points(&setting, &mut data, &stop).await;
    setting.client.drop_idle();
    data.ended_at = unix_now();
    Ok(data)
}

async fn points(setting: &Arc<Setting>, data: &mut RunData, stop: &watch::Receiver<bool>) {
    let config = setting.config.clone();
    let mut plan = plan(&config);
    let planned = match config.kind {
        Kind::Sweep => 1 + config.num_rates,
        _ => plan.len(),
    };
    if config.warmup > 0.0 {
        let shape = warmup_shape(&config, &plan);
        setting.live.begin("warm-up", setting.clock.now(), micros(config.warmup), 0, Some(planned));
        let warmup = phase::run(setting, "warm-up".into(), shape, config.warmup, stop.clone()).await;
        data.interrupted = warmup.interrupted;
        data.warmup = Some(warmup);
    }
    let mut saturated = 0;
    let mut at = 0;
    while at < plan.len() && !data.interrupted {
        let shape = plan[at];
        let label = label(shape);
        setting.live.begin(&label, setting.clock.now(), micros(config.duration), at, Some(planned));
        let mut result = phase::run(setting, label, shape, config.duration, stop.clone()).await;
        data.interrupted |= result.interrupted;
        blank_key(&mut result, config.api_key.as_deref());
        saturated = if verdict::judge(&result).state == State::Saturated { saturated + 1 } else { 0 };
        data.phases.push(result);
        at += 1;
        if at == 1 && config.kind == Kind::Sweep && !data.interrupted {
            let reached = Point::of(&data.phases[0], &config).capacity();
            if reached <= 0.0 {
                data.notes.push("the throughput point finished no request, so the sweep has no rates to try".into());
            }
            plan.extend(sweep_rates(&config, reached));
        }
        if saturated >= SATURATED_POINTS && at < plan.len() {
            data.notes.push(format!(
                "{saturated} points in a row were saturated: {} further ones were left out",
                plan.len() - at
            ));
            break;
        }
    }
}

fn plan(config: &Config) -> Vec<Shape> {
    match config.kind {
        Kind::Throughput | Kind::Sweep => vec![Shape::Closed { users: config.max_vus }],
        Kind::Rate => config.rates.iter().map(|rate| open(config, *rate)).collect(),
        Kind::Csweep => users(config).into_iter().map(|users| Shape::Closed { users }).collect(),
    }
}

fn open(config: &Config, rate: f64) -> Shape {
    Shape::Open { rate, law: config.arrival, cap: config.max_vus, on_full: config.on_full }
}

fn sweep_rates(config: &Config, reached: f64) -> Vec<Shape> {
    if reached <= 0.0 {
        return Vec::new();
    }
    let n = config.num_rates;
    (1..=n).map(|at| open(config, round(reached * BEYOND * at as f64 / n as f64).max(0.001))).collect()
}

/// The numbers of users of a csweep: as asked, or from 1 to `max_vus` in equal factors.
fn users(config: &Config) -> Vec<usize> {
    if !config.concurrency.is_empty() {
        return config.concurrency.clone();
    }
    let n = config.num_rates.max(2);
    let mut users: Vec<usize> =
        (0..n).map(|at| (config.max_vus as f64).powf(at as f64 / (n - 1) as f64).round() as usize).collect();
    users.dedup();
    users
}

/// The warm-up has the shape of the load: of a csweep, its largest.
fn warmup_shape(config: &Config, plan: &[Shape]) -> Shape {
    match config.kind {
        Kind::Csweep => Shape::Closed { users: users(config).into_iter().max().unwrap_or(config.max_vus) },
        _ => plan.first().copied().unwrap_or(Shape::Closed { users: config.max_vus }),
    }
}

fn label(shape: Shape) -> String {
    match shape {
        Shape::Closed { users: 1 } => "1 user".into(),
        Shape::Closed { users } => format!("{users} users"),
        Shape::Open { rate, .. } => format!("{rate}/s"),
    }
}

fn clean(error: BenchError, config: &Config) -> BenchError {
    match (error, &config.api_key) {
        (BenchError::Server(text), Some(key)) => BenchError::Server(report::without(&text, key)),
        (error, _) => error,
    }
}

/// A server's words may quote the key it was sent.
fn blank_key(result: &mut PhaseResult, key: Option<&str>) {
    let Some(key) = key else { return };
    for record in &mut result.records {
        if let Outcome::Failed(failure) = &mut record.outcome {
            failure.reason = report::without(&failure.reason, key);
        }
    }
}

fn unix_now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| round(since.as_secs_f64()))
}

impl RunData {
    fn report(&mut self, count: Option<&Counter<'_>>) -> Report {
        if let Some(count) = count {
            for record in self.phases.iter_mut().flat_map(|phase| &mut phase.records) {
                if let Some(tokens) = record.text.as_deref().and_then(count) {
                    record.tokens = tokens;
                    record.source = Source::Tokenizer;
                    record.text = None;
                }
            }
        }
        let points: Vec<Point> = self.phases.iter().map(|phase| Point::of(phase, &self.config)).collect();
        let warmup = self.warmup.as_ref().map(|phase| {
            let point = Point::of(phase, &self.config);
            json!({"length_s": point.length_s, "target": point.target, "counts": point.counts, "errors": point.errors})
        });
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Report {
            schema_version: 1,
            tool: json!({"name": "pulsing bench", "version": env!("CARGO_PKG_VERSION")}),
            definitions: report::definitions(),
            environment: json!({
                "os": std::env::consts::OS,
                "arch": std::env::consts::ARCH,
                "cores": cores,
                "started_at": self.started_at,
                "ended_at": self.ended_at,
            }),
            config: self.config.clone(),
            seed: self.seed,
            server: self.server.clone(),
            warmup,
            points,
            interrupted: self.interrupted,
            notes: self.notes.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Shape, plan, sweep_rates, users};
    use crate::config::Config;

    fn config(more: &str) -> Config {
        Config::from_json(&format!(r#"{{"model": "m", "url": "http://x", {more}}}"#)).unwrap()
    }

    #[test]
    fn a_csweep_goes_from_one_to_all_users_in_equal_factors() {
        assert_eq!(
            users(&config(r#""kind": "csweep", "max_vus": 128, "num_rates": 8"#)),
            [1, 2, 4, 8, 16, 32, 64, 128]
        );
        assert_eq!(users(&config(r#""kind": "csweep", "max_vus": 3"#)), [1, 2, 3]);
        assert_eq!(users(&config(r#""kind": "csweep", "max_vus": 1"#)), [1]);
        assert_eq!(users(&config(r#""kind": "csweep", "concurrency": [5, 2]"#)), [5, 2]);
    }

    #[test]
    fn a_sweep_derives_its_rates_from_what_was_reached() {
        let config = config(r#""kind": "sweep", "num_rates": 4"#);
        assert_eq!(plan(&config), [Shape::Closed { users: 128 }]);
        let rates: Vec<f64> = sweep_rates(&config, 10.0)
            .into_iter()
            .map(|shape| match shape {
                Shape::Open { rate, .. } => rate,
                Shape::Closed { .. } => 0.0,
            })
            .collect();
        assert_eq!(rates, [3.0, 6.0, 9.0, 12.0]);
        assert!(sweep_rates(&config, 0.0).is_empty());
    }

    #[test]
    fn what_cannot_be_meant_is_refused_by_name() {
        for (more, named) in [
            (r#""kind": "rate""#, "--rates"),
            (r#""rates": [1]"#, "rates"),
            (r#""kind": "warp""#, "warp"),
            (r#""duration": "120s""#, "120s"),
            (r#""duration": 0"#, "duration"),
            (r#""durations": 5"#, "durations"),
            (r#""max_vus": 0"#, "max_vus"),
            (r#""kind": "rate", "rates": [-1]"#, "-1"),
            (r#""extra_body": {"stream": false}"#, "stream"),
        ] {
            let error = Config::from_json(&format!(r#"{{"model": "m", "url": "http://x", {more}}}"#)).unwrap_err();
            assert!(error.to_string().contains(named), "{more}: {error}");
        }
    }
}

//! Whole runs against a scripted server.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod mock;

use std::time::Duration;

use mock::{Mock, Step, answer, content, done, event, head, piece, plain, usage};
use pulsing_bench::arrival::Arrivals;
use pulsing_bench::config::Law;
use pulsing_bench::report::Report;
use pulsing_bench::verdict::State;
use pulsing_bench::{BenchError, Config, Run};
use serde_json::json;

/// The probe's two requests come before everything measured.
const PROBES: usize = 2;

fn config(url: &str, more: serde_json::Value) -> Config {
    let mut all = json!({"model": "mock", "url": url, "warmup": 0.0, "duration": 0.5, "drain": 2.0, "max_vus": 2,
        "num_workers": 2, "seed": 1, "output_tokens": {"low": 3, "high": 3}});
    all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    Config::from_json(&all.to_string()).unwrap()
}

fn run(url: &str, more: serde_json::Value) -> (Run, Report) {
    let run = Run::start(config(url, more)).unwrap();
    assert!(run.wait(Duration::from_secs(30)), "the run hangs");
    let report = run.report(None).unwrap();
    (run, report)
}

fn refused(url: &str, more: serde_json::Value) -> String {
    let run = Run::start(config(url, more)).unwrap();
    assert!(run.wait(Duration::from_secs(30)), "the run hangs");
    match run.report(None) {
        Err(BenchError::Server(text)) => text,
        other => panic!("{other:?}"),
    }
}

/// The accounting identities hold for every point.
fn check(report: &Report) {
    for point in &report.points {
        let counts = &point.counts;
        assert_eq!(counts.sent, counts.ok + counts.failed + counts.cut, "{counts:?}");
        assert_eq!(counts.due, counts.sent + counts.dropped + counts.unsent, "{counts:?}");
        assert_eq!(point.errors.values().map(|class| class.count).sum::<u64>(), counts.failed);
        assert!(point.achieved.in_flight_peak as f64 >= point.achieved.in_flight_mean);
        if let Some(goodput) = &point.goodput {
            assert!(goodput.requests_per_s <= point.throughput.requests_per_s + 1e-9 || counts.late > 0);
        }
    }
}

#[test]
fn a_closed_loop_measures_what_the_server_did() {
    let mock = Mock::start(|index, _| answer(index, 40, 10, 3));
    let (_, report) = run(&mock.url, json!({"max_vus": 4, "duration": 1.0, "slo": {"ttft": 10_000.0}}));
    check(&report);
    let point = &report.points[0];
    let ttft = point.latency_ms.ttft.as_ref().unwrap();
    let tpot = point.latency_ms.tpot.as_ref().unwrap();
    println!("ttft {ttft:?}\ntpot {tpot:?}");
    // A timer never fires early: these are bounds of the protocol, not of speed.
    assert!(ttft.min >= 40.0 && tpot.min >= 9.0);
    assert_eq!((point.counts.failed, point.counts.cut), (0, 0));
    assert!(point.counts.ok >= 4);
    assert_eq!(point.tokens.output, 3 * point.counts.ok);
    assert_eq!(point.goodput.as_ref().unwrap().share, Some(1.0));
    assert_eq!(point.achieved.in_flight_peak, 4);
    assert!(mock.in_flight_peak.load(std::sync::atomic::Ordering::SeqCst) >= 4);
    // Connections are kept: all but the users' first requests came over one that was used before.
    let served = mock.served.lock();
    let fresh = served.iter().skip(PROBES).filter(|request| !request.reused).count();
    assert!(fresh <= 4, "{fresh} new connections for {} requests", served.len());
    assert!(served[PROBES].body.contains("\"max_tokens\":3"));
    assert!(report.server.usage_asked && report.server.ignore_eos_sent);
}

#[test]
fn the_first_token_is_stamped_close_to_when_the_server_sent_it() {
    let mock = Mock::start(|index, _| answer(index, 50, 5, 16));
    let (run, report) = run(&mock.url, json!({"max_vus": 64, "duration": 1.5}));
    check(&report);
    let served = mock.served.lock();
    let mut errors: Vec<f64> = Vec::new();
    run.requests(|_, record| {
        // The server tells its own number of the request in the usage.
        let request = &served[record.prompt.unwrap() as usize];
        let server = request.token.unwrap().duration_since(request.read).as_secs_f64() * 1e3;
        errors.push(record.ttft().unwrap() as f64 / 1e3 - server);
    });
    errors.sort_by(f64::total_cmp);
    let at = |q: f64| errors[((errors.len() - 1) as f64 * q) as usize];
    println!(
        "TTFT error at 64 streams, ms: n {} p50 {:.3} p99 {:.3} max {:.3}",
        errors.len(),
        at(0.5),
        at(0.99),
        at(1.0)
    );
    // What the client adds: sending before the server read, reading after the server sent. Never less than nothing.
    assert!(errors.len() >= 64 && errors[0] >= -0.001, "{}", errors[0]);
}

#[test]
fn every_byte_in_a_packet_of_its_own_changes_nothing() {
    let mock = Mock::start(|index, _| {
        let mut steps = vec![head()];
        let stream = [content("é😀"), content(" b"), usage(index, 2), event("[DONE]")].concat();
        steps.extend(stream.iter().map(|byte| Step::Send(vec![*byte])));
        steps.push(Step::Send(b"0\r\n\r\n".to_vec()));
        steps
    });
    let (_, report) = run(&mock.url, json!({"max_vus": 1}));
    check(&report);
    let point = &report.points[0];
    assert_eq!((point.counts.failed, point.tokens.output), (0, 2 * point.counts.ok));
}

#[test]
fn each_failure_has_its_class_and_no_place_in_the_latencies() {
    let hello = || Step::Token(content("a"));
    let cases: Vec<(&str, Vec<Step>)> = vec![
        ("http_503", vec![Step::Send(plain(503, r#"{"error": {"message": "busy"}}"#))]),
        ("reset", vec![Step::Close]),
        ("reset", vec![Step::Reset]),
        ("reset", vec![head(), hello(), Step::Wait(20), Step::Reset]),
        ("truncated", vec![head(), hello(), Step::Close]),
        ("truncated", vec![head(), hello(), Step::Send(b"0\r\n\r\n".to_vec())]),
        ("truncated", vec![head(), hello(), Step::Send(piece(b"data: {\"choi")), Step::Send(b"0\r\n\r\n".to_vec())]),
        ("stream_error", vec![head(), hello(), Step::Send(event(r#"{"error": {"message": "kv cache full"}}"#))]),
        ("stream_error", vec![head(), Step::Send(piece(b"event: error\ndata: overloaded\n\n"))]),
        ("bad_json", vec![head(), hello(), Step::Send(event("{nope"))]),
        ("not_a_stream", vec![Step::Send(plain(200, r#"{"choices": []}"#))]),
        ("timeout_first", vec![Step::Wait(1200), Step::Close]),
        ("timeout_first", vec![head(), Step::Send(content("")), Step::Wait(1200), Step::Close]),
        ("timeout_idle", vec![head(), hello(), Step::Wait(1200), Step::Close]),
        ("protocol", vec![Step::Send(b"SSH-2.0-x\r\n\r\n".to_vec()), Step::Close]),
    ];
    for (class, steps) in cases {
        let shown = format!("{class}: {steps:?}");
        let mock = Mock::start(move |index, _| if index < PROBES { answer(index, 0, 0, 3) } else { steps.clone() });
        // Short only where it is to be reached: a busy machine must not turn another failure into a timeout.
        let limit = if class.starts_with("timeout") { 0.5 } else { 20.0 };
        let limits = json!({"first": limit, "idle": limit});
        let (_, report) = run(&mock.url, json!({"max_vus": 1, "duration": 0.1, "timeouts": limits}));
        check(&report);
        let point = &report.points[0];
        assert_eq!(point.counts.ok, 0, "{shown}");
        assert!(point.errors.keys().eq([class]), "{shown}: {:?}", point.errors);
        let error = &point.errors[class];
        assert!(!error.reason.is_empty() && error.after_ms.is_some());
        assert_eq!(error.retry_after.as_deref(), (class == "http_503").then_some("7"));
        assert!(point.latency_ms.ttft.is_none() && point.latency_ms.e2e.is_none(), "{shown}");
        assert_eq!(point.throughput.requests_per_s, 0.0);
    }
}

#[test]
fn a_total_limit_ends_an_answer_that_goes_on_and_on() {
    let mock = Mock::start(|index, _| answer(index, 0, 20, if index < PROBES { 1 } else { 100 }));
    let (_, report) = run(&mock.url, json!({"max_vus": 1, "duration": 0.1, "timeouts": {"total": 0.5}}));
    let point = &report.points[0];
    assert!(point.errors.keys().eq(["timeout_total"]), "{:?}", point.errors);
    assert!(point.errors["timeout_total"].tokens > 0, "tokens before the failure are kept apart");
}

#[test]
fn a_server_that_goes_away_is_refused_connections_and_users_pause() {
    let mock = Mock::start(|index, _| answer(index, 0, 0, 3));
    let url = mock.url.clone();
    let run = Run::start(config(&url, json!({"max_vus": 2, "duration": 1.0, "connection": "new"}))).unwrap();
    while run.progress().ok == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(mock);
    assert!(run.wait(Duration::from_secs(20)));
    let report = run.report(None).unwrap();
    check(&report);
    let refused = report.points[0].errors["refused"].count;
    // 50, 100, 200, 400 ms, then the end of the point.
    assert!((1..=12).contains(&refused), "{refused}");
}

#[test]
fn a_kept_connection_that_the_server_closed_costs_no_request() {
    let mock = Mock::start(|index, _| {
        let mut steps = answer(index, 1, 1, 2);
        steps.push(Step::Close);
        steps
    });
    let (_, report) = run(&mock.url, json!({"max_vus": 1}));
    check(&report);
    assert_eq!(report.points[0].counts.failed, 0);
    assert!(report.points[0].counts.ok > 1);
}

#[test]
fn a_missing_end_mark_is_forgiven_after_a_finish_reason() {
    let mock = Mock::start(|_, _| {
        let end = event(r#"{"choices": [{"delta": {}, "finish_reason": "stop"}]}"#);
        vec![head(), Step::Token(content("a")), Step::Send(end), Step::Send(b"0\r\n\r\n".to_vec())]
    });
    let (_, report) = run(&mock.url, json!({"max_vus": 1, "duration": 0.1}));
    let counts = &report.points[0].counts;
    assert!(counts.failed == 0 && counts.ok > 0 && counts.missing_done == counts.ok);
}

#[test]
fn an_open_loop_charges_a_freeze_to_every_request_it_made_wait() {
    // Request 10 and all that come within 500 ms after it are held until the freeze is over.
    let frozen: std::sync::Arc<std::sync::OnceLock<std::time::Instant>> = std::sync::Arc::default();
    let mock = Mock::start(move |index, request| {
        let mut wait = 1;
        if index >= PROBES + 10 {
            let from = *frozen.get_or_init(|| request.read);
            let until = from + Duration::from_millis(500);
            wait = until.saturating_duration_since(request.read).as_millis() as u64 + 1;
        }
        answer(index, wait, 0, 1)
    });
    let (_, report) = run(
        &mock.url,
        json!({"kind": "rate", "rates": [100.0], "arrival": "constant", "duration": 1.2, "max_vus": 20, "drain": 5.0}),
    );
    check(&report);
    let point = &report.points[0];
    assert_eq!(point.counts.due, 120);
    assert_eq!(point.counts.failed, 0);
    // 20 slots: the other 30 requests of the freeze wait here, which only the schedule-anchored latency shows.
    let (sent, sched) = (point.latency_ms.ttft.as_ref().unwrap(), point.latency_ms.ttft_sched.as_ref().unwrap());
    println!("frozen: ttft {sent:?}\nttft_sched {sched:?}");
    assert!(sched.mean > sent.mean);
    assert!(point.latency_ms.queue.as_ref().unwrap().max > 100.0);
    assert_eq!(point.achieved.in_flight_peak, 20);
}

#[test]
fn an_open_loop_sends_exactly_what_its_law_says_whatever_the_server_does() {
    let mock = Mock::start(|index, _| answer(index, 3, 0, 1));
    let (run, report) =
        run(&mock.url, json!({"kind": "rate", "rates": [400.0], "duration": 1.0, "max_vus": 500, "seed": 5}));
    check(&report);
    let planned: Vec<u64> =
        Arrivals::new(Law::Poisson, 400.0, 5 ^ 400f64.to_bits()).take_while(|at| *at < 1_000_000).collect();
    assert_eq!(report.points[0].counts.due, planned.len() as u64);
    let mut due = Vec::new();
    run.requests(|_, record| due.push(record.sched));
    due.sort_unstable();
    println!("lag at 400/s: {:?}", report.points[0].client.lag_ms);
    if report.points[0].client.reanchored == 0 {
        let began = due[0] - planned[0];
        assert!(due.iter().zip(&planned).all(|(due, planned)| due - began == *planned), "the schedule was bent");
    }
}

#[test]
fn arrivals_beyond_the_cap_are_dropped_and_counted_when_asked() {
    let mock = Mock::start(|index, _| answer(index, if index < PROBES { 0 } else { 300 }, 0, 1));
    let (_, report) = run(
        &mock.url,
        json!({"kind": "rate", "rates": [50.0], "arrival": "constant", "max_vus": 3, "on_full": "drop"}),
    );
    check(&report);
    let counts = &report.points[0].counts;
    assert_eq!(counts.due, 25);
    assert!(counts.dropped >= 15, "{counts:?}");
}

#[test]
fn a_rate_beyond_the_server_is_called_saturated() {
    let mock = Mock::start(|index, _| answer(index, if index < PROBES { 0 } else { 200 }, 0, 1));
    let (_, report) = run(&mock.url, json!({"kind": "rate", "rates": [100.0], "max_vus": 4, "duration": 1.0}));
    check(&report);
    let point = &report.points[0];
    assert!(point.verdict.state != State::Stable, "{:?}", point.verdict);
    assert!(point.counts.unsent > 0);
}

#[test]
fn a_sweep_derives_its_rates_and_a_csweep_its_users() {
    let mock = Mock::start(|index, _| answer(index, 5, 0, 1));
    let (_, report) =
        run(&mock.url, json!({"kind": "sweep", "num_rates": 3, "duration": 0.3, "warmup": 0.1, "max_vus": 4}));
    check(&report);
    let reached = report.capacity().unwrap();
    assert!(report.points.len() == 4 || !report.notes.is_empty());
    let rate = report.points[1].target["rate_per_s"].as_f64().unwrap();
    assert!((rate - reached * 0.4).abs() < 0.01, "{rate} of {reached}");
    let warmup = report.warmup.unwrap();
    assert!(warmup["counts"]["ok"].as_u64().unwrap() > 0);

    let (_, report) = run(&mock.url, json!({"kind": "csweep", "num_rates": 3, "duration": 0.2, "max_vus": 4}));
    let users: Vec<u64> = report.points.iter().map(|point| point.target["concurrency"].as_u64().unwrap()).collect();
    assert_eq!(users, [1, 2, 4]);
}

#[test]
fn stopping_at_any_moment_leaves_a_report_of_what_was_measured() {
    let mock = Mock::start(|index, _| answer(index, 5, 5, 10));
    for (after, more) in [
        (100, json!({"duration": 60.0})),
        (300, json!({"duration": 60.0, "warmup": 0.1})),
        (100, json!({"duration": 60.0, "kind": "rate", "rates": [20.0, 30.0]})),
    ] {
        let run = Run::start(config(&mock.url, more)).unwrap();
        while run.progress().label == "probe" {
            assert!(!run.wait(Duration::from_millis(1)));
        }
        assert!(!run.wait(Duration::from_millis(after)));
        run.stop();
        assert!(run.wait(Duration::from_secs(5)), "stopping takes too long");
        let report = run.report(None).unwrap();
        assert!(report.interrupted);
        check(&report);
        report.to_json().unwrap();
    }
}

#[test]
fn spellings_a_server_refuses_are_left_out() {
    let mock = Mock::start(|index, request| {
        if request.head.contains("/chat/") {
            return vec![Step::Send(plain(400, r#"{"error": {"message": "no chat template"}}"#))];
        }
        if request.body.contains("ignore_eos") {
            return vec![Step::Send(plain(422, r#"{"error": {"message": "unknown field ignore_eos"}}"#))];
        }
        let text = event(r#"{"choices": [{"text": "x"}]}"#);
        vec![head(), Step::Token(text), Step::Send(usage(index, 1)), Step::Send(done())]
    });
    let (_, report) = run(&mock.url, json!({"duration": 0.1}));
    assert_eq!(report.server.path, "/v1/completions");
    assert!(!report.server.ignore_eos_sent && report.server.usage_asked);
    assert_eq!(report.server.refused.len(), 4);
    assert!(report.points[0].counts.ok > 0 && report.points[0].counts.failed == 0);
}

#[test]
fn a_server_that_cannot_be_measured_is_named_before_the_run() {
    let unused = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", unused.local_addr().unwrap());
    drop(unused);
    assert!(refused(&url, json!({})).contains("refused"));
    let mock = Mock::start(|_, _| vec![Step::Send(plain(404, r#"{"error": {"message": "no model x"}}"#))]);
    let text = refused(&mock.url, json!({}));
    assert!(text.contains("no model x") && text.contains("Models of this server: mock"), "{text}");
}

#[test]
fn the_key_is_sent_and_stays_out_of_everything_written() {
    let key = "sk-very-secret-42";
    let mock = Mock::start(move |index, request| {
        assert!(request.head.contains(key));
        if index < PROBES {
            return answer(index, 0, 0, 1);
        }
        vec![Step::Send(plain(429, &format!(r#"{{"error": {{"message": "Slow down, {key}"}}}}"#)))]
    });
    let (run_, report) = run(&mock.url, json!({"duration": 0.1, "api_key": key}));
    let text = report.to_json().unwrap();
    assert!(report.points[0].errors.contains_key("http_429"));
    assert!(!text.contains(key), "{text}");
    assert!(text.contains("Slow down, [api key]") && text.contains("\"api_key_given\":true"));
    assert!(!serde_json::to_string(&run_.progress()).unwrap().contains(key));

    let mock = Mock::start(move |_, _| vec![Step::Send(plain(401, &format!(r#"{{"error": "bad key {key}"}}"#)))]);
    let text = refused(&mock.url, json!({"api_key": key}));
    assert!(!text.contains(key) && text.contains("--api_key"), "{text}");
}

#[test]
fn a_tokenizer_counts_answers_without_usage() {
    let mock = Mock::start(|_, _| vec![head(), Step::Token(content("one two three")), Step::Send(done())]);
    let run = Run::start(config(&mock.url, json!({"duration": 0.1, "keep_text": true}))).unwrap();
    assert!(run.wait(Duration::from_secs(10)));
    let report = run.report(Some(&|text| Some(text.split(' ').count() as u64))).unwrap();
    let tokens = &report.points[0].tokens;
    assert_eq!(tokens.output, 3 * report.points[0].counts.ok);
    assert!(tokens.source.keys().all(|source| *source == pulsing_bench::record::Source::Tokenizer));
}

#[test]
fn the_same_seed_sends_the_same_requests() {
    let bodies = || {
        let mock = Mock::start(|index, _| answer(index, 0, 0, 1));
        let (_, _) = run(&mock.url, json!({"max_vus": 1, "duration": 0.1, "seed": 99}));
        let served = mock.served.lock();
        served.iter().map(|request| request.body.clone()).take(8).collect::<Vec<_>>()
    };
    let (one, two) = (bodies(), bodies());
    let n = one.len().min(two.len());
    assert!(n > PROBES);
    assert_eq!(one[..n], two[..n]);
}

"""`pulsing bench` against a scripted server: what it prints, writes, sends and returns."""

import json
import os
import pathlib
import pty
import re
import signal
import subprocess
import sys

from scripted import Bench, Script, Server

SHORT = ("--duration", "300ms", "--warmup", "0", "--max_vus", "2", "--output_tokens", "4")
KEY = "sk-very-secret-42"


def test_model_and_url_are_enough_and_the_table_says_what_was_measured(bench: Bench) -> None:
    with Server() as server:
        done = bench("gpt2", "--url", server.url, *SHORT)
    assert done.returncode == 0, done.stderr
    for word in ("TTFT p50", "2 users", "itl", "e2e", "verdict: "):
        assert word in done.stdout
    # Not a terminal: a line per point, no control characters.
    assert "[1/1] 2 users" in done.stderr
    assert "\x1b" not in done.stderr + done.stdout
    body = json.loads(server.requests[-1].body)
    assert (body["model"], body["stream"], body["max_tokens"]) == ("gpt2", True, 4)
    assert server.requests[-1].path == "/v1/chat/completions"


def test_json_goes_alone_to_stdout_and_has_every_latency_in_milliseconds(bench: Bench, tmp_path: pathlib.Path) -> None:
    file, lines = tmp_path / "report.json", tmp_path / "requests.jsonl"
    with Server(lambda _: Script(first=0.02)) as server:
        done = bench(
            "gpt2", "--url", server.url, "--json", "--output", str(file), "--requests-output", str(lines), *SHORT
        )
    report = json.loads(done.stdout)
    assert report == json.loads(file.read_text())
    assert not list(tmp_path.glob("tmp*")), "a half-written file stays"
    point = report["points"][0]
    for name in ("ttft", "ttft_sched", "tpot", "itl", "icl", "e2e", "queue", "normalised"):
        assert {"n", "mean", "p50", "p90", "p95", "p99", "max"} <= set(point["latency_ms"][name]), name
    assert point["latency_ms"]["ttft"]["min"] >= 20.0
    assert point["tokens"]["source"] == {"usage": point["counts"]["ok"]}
    assert "excludes ttft" in report["definitions"]["tpot"]
    assert report["config"]["kind"] == "throughput"
    assert report["warmup"] is None
    requests = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(requests) == point["counts"]["sent"]
    assert all(request["outcome"] == "ok" and request["ttft_ms"] >= 20.0 for request in requests)


def test_kinds_and_their_points(bench: Bench) -> None:
    with Server() as server:
        base = ("gpt2", "--url", server.url + "/v1", "--json", *SHORT, "--max-vus", "4")
        rate = json.loads(bench(*base, "--benchmark_kind", "rate", "--rates", "20,40", "--arrival", "constant").stdout)
        assert [point["target"]["rate_per_s"] for point in rate["points"]] == [20.0, 40.0]
        assert [point["counts"]["due"] for point in rate["points"]] == [6, 12]
        steps = json.loads(bench(*base, "--benchmark-kind=csweep", "--num_rates", "3").stdout)
        assert [point["target"]["concurrency"] for point in steps["points"]] == [1, 2, 4]
        sweep = json.loads(bench(*base, "--mode", "sweep", "--num_rates", "2", "--warmup", "100ms").stdout)
        assert [point["target"]["loop"] for point in sweep["points"]][:2] == ["closed", "open"]
        assert sweep["warmup"]["counts"]["ok"] > 0


def test_failures_are_named_and_none_succeeding_is_a_failure(bench: Bench) -> None:
    with Server(lambda index: Script(status=200 if index < 2 else 503, error="no room")) as server:
        done = bench("gpt2", "--url", server.url, *SHORT)
    assert done.returncode == 1
    assert re.search(r"failed: \d+ http_503: no room", done.stdout)
    assert "not one request succeeded" in done.stderr


def test_a_server_that_is_not_there_is_a_failure_in_words(bench: Bench) -> None:
    with Server() as server:
        pass
    done = bench("gpt2", "--url", server.url, *SHORT)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Is the server running" in done.stderr


def test_the_key_reaches_the_server_and_nothing_else(bench: Bench, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "report.json"
    with Server(lambda index: Script(status=200 if index < 8 else 429, error=f"slow down, {KEY}")) as server:
        done = bench("gpt2", "--url", server.url, "--api_key", KEY, "--output", str(file), *SHORT)
        again = bench("gpt2", "--url", server.url, "--json", *SHORT, PULSING_BENCH_API_KEY=KEY)
    assert {request.headers["authorization"] for request in server.requests} == {f"bearer {KEY}"}
    assert KEY not in done.stdout + done.stderr + file.read_text() + again.stdout + again.stderr
    assert json.loads(file.read_text())["config"]["api_key_given"] is True


def test_misuse_says_what_is_expected(bench: Bench) -> None:
    for arguments, word in [
        ((), "MODEL is missing"),
        (("gpt2",), "--url is missing"),
        (("gpt2", "--url", "https://x"), "https cannot be measured yet"),
        (("gpt2", "--url", "http://x", "--benchmark_kind", "swep"), "did you mean sweep?"),
        (("gpt2", "--url", "http://x", "--benchmark_kind", "rate"), "--rates 1,2,4"),
        (("gpt2", "--url", "http://x", "--rates", "1"), "kind rate"),
        (("gpt2", "--url", "http://x", "--duration", "12 parsecs"), "120s, 2m or 500ms"),
        (("gpt2", "--url", "http://x", "--slo", "ttft=500"), "ttft=500ms"),
        (("gpt2", "--url", "http://x", "--extra_body", "[1]"), "JSON object"),
        (("gpt2", "--url", "http://x", "--max_vu", "1"), "--max_vus"),
        (("gpt2", "--url", "http://x", "--output", "/no/such/folder/x"), "does not exist"),
        (("gpt2", "--url", "http://x", "--output", "/tmp"), "it is a folder"),
        (("gpt2", "--url", "http://x", "--duration", "9" * 400 + "s"), "--duration '999"),
        (("gpt2", "--url", "http://x", "--duration", "9" * 5000), "--duration '999"),
        (("gpt2", "--url", "http://x", "--input_tokens", "9" * 20), "--input_tokens '999"),
        (("gpt2", "--url", "http://x", "--input_tokens", "9" * 5000), "--input_tokens '999"),
        (("gpt2", "--url", "http://x", "--benchmark_kind", "rate", "--rates", "1,inf"), "--rates 'inf': expected"),
        (("gpt2", "--url", "http://x", "--benchmark_kind", "rate", "--rates", "nan"), "--rates 'nan': expected"),
        (("gpt2", "--url", "http://x", "--max_vus", "9" * 30), "--max_vus '999"),
    ]:
        done = bench(*arguments)
        assert (done.returncode, done.stdout) == (2, ""), arguments
        assert word in done.stderr, done.stderr


def test_a_tokenizer_that_cannot_be_had_is_said_before_anything_is_sent(bench: Bench, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    with Server() as server:
        done = bench("gpt2", "--url", server.url, "--tokenizer_name", str(tmp_path), *SHORT)
    assert (done.returncode, done.stdout, server.requests) == (2, "", [])
    # Also where the package that reads tokenizers is missing.
    assert "the server's own usage numbers are used" in done.stderr


def test_without_the_module_the_command_that_builds_it_is_said() -> None:
    # An import hook in place of an environment without the module: the suite's own has it.
    code = (
        "import sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'pulsing._bench':\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Hidden())\n"
        "from pulsing.cli.main import main\n"
        "main(['bench', 'gpt2', '--url', 'http://localhost:8080'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "pulsing._bench module not found" in done.stderr
    assert "maturin develop --manifest-path crates/pulsing-bench-py/Cargo.toml" in done.stderr


def test_ctrl_c_ends_with_the_partial_report(environment: dict[str, str]) -> None:
    with Server() as server:
        command = [sys.executable, "-m", "pulsing.cli", "bench", "gpt2", "--url", server.url, "--json"]
        process = subprocess.Popen(
            [*command, "--duration", "60s", "--warmup", "0", "--max_vus", "2"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        while "users" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    report = json.loads(out)
    assert report["interrupted"] is True
    counts = report["points"][0]["counts"]
    assert counts["sent"] == counts["ok"] + counts["failed"] + counts["cut"]


def test_on_a_terminal_one_line_shows_progress_and_is_gone_at_the_end(environment: dict[str, str]) -> None:
    leader, follower = pty.openpty()
    with Server() as server:
        command = [sys.executable, "-m", "pulsing.cli", "bench", "gpt2", "--url", server.url, *SHORT]
        process = subprocess.Popen(
            [*command, "--duration", "1s"], env=environment, stdout=subprocess.PIPE, stderr=follower, text=True
        )
        os.close(follower)
        out, _ = process.communicate(timeout=60)
    shown = os.read(leader, 1 << 16).decode()
    os.close(leader)
    assert process.returncode == 0
    assert "verdict" in out
    assert "\n" not in shown
    assert "in flight 2" in shown
    assert shown.endswith("\r\x1b[2K")


def test_a_file_that_cannot_be_written_costs_the_file_and_not_the_result(bench: Bench, tmp_path: pathlib.Path) -> None:
    # A file that may not be replaced: its name is too long for the file system, which only the writing finds out.
    file = tmp_path / ("x" * 300)
    with Server() as server:
        done = bench("gpt2", "--url", server.url, "--json", "--output", str(file), *SHORT)
    assert done.returncode == 1
    assert f"cannot write {file}: " in done.stderr
    assert json.loads(done.stdout)["points"][0]["counts"]["ok"] > 0
    assert not list(tmp_path.iterdir()), "a draft stays"

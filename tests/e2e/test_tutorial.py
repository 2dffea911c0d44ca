"""The README's commands, as they stand there, with real engines and the official client."""

import concurrent.futures
import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterator

import openai
import pytest
from terminals import ROOT, Readme, Shell, get_json, wait_for

sys.path.append(str(ROOT / "tests" / "bench"))
from bench_module import with_module

MESSAGES = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture(scope="module")
def tutorial(terminals: Callable[[], Shell], readme: Readme) -> Shell:
    """The two commands, the third worker of "Scale", and the embedded engine: one Router, three Workers."""
    shell = terminals()
    router, first = readme.lines(r"^pulsing actor .*(--worker_name worker$|--addr 0.0.0.0:8001)")
    (second,) = readme.lines(r"^pulsing actor .*--addr 0.0.0.0:8003")
    (embedded,) = readme.lines(r"^pulsing actor", mark="mistralrs")
    shell.start("router", router)
    shell.start("transformers-1", first)
    shell.start("transformers-2", second)
    shell.start("mistralrs", embedded)
    shell.wait_ready(3)
    return shell


@pytest.fixture(scope="module")
def client(tutorial: Shell) -> Iterator[openai.OpenAI]:
    # No retries: what the Router promises must not be mended by the client.
    with openai.OpenAI(base_url=f"{tutorial.api}/v1", api_key="unused", max_retries=0, timeout=120) as made:
        yield made


def test_inspect_shows_the_router_and_the_workers(tutorial: Shell, readme: Readme) -> None:
    actors, cluster = readme.lines(r"^pulsing inspect (actors|cluster)")
    shown = tutorial.run(actors)
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"^my-llm\s+pulsing\.serving\.\S*Router", shown.stdout, re.MULTILINE), shown.stdout
    workers = re.findall(r"^worker\s+pulsing\.serving\.\S*?(\w+)\s+\S+\s+ready", shown.stdout, re.MULTILINE)
    assert sorted(workers) == ["MistralRsWorker", "TransformersWorker", "TransformersWorker"], shown.stdout
    members = tutorial.run(cluster)
    assert members.returncode == 0, members.stderr
    assert "4 nodes (4 alive)" in members.stdout
    listing = json.loads(tutorial.run(f"{actors} --json_output").stdout)
    assert {row["name"] for row in listing} >= {"my-llm", "worker"}


def test_the_inspect_commands(tutorial: Shell, readme: Readme) -> None:
    cluster, actors, rows, metrics, watch = (tutorial.run(line) for line in readme.lines("^pulsing", mark="inspect"))
    for shown in (cluster, actors, rows, metrics, watch):
        assert (shown.returncode, shown.stderr) == (0, "")
    assert "4 nodes (4 alive)" in cluster.stdout
    assert re.search(r"^worker +3 +3 ready ", actors.stdout, re.MULTILINE), actors.stdout
    assert [row["metadata"]["state"] for row in json.loads(rows.stdout)] == ["ready"] * 3
    assert "Requests" in metrics.stdout.splitlines()[0]
    assert len(metrics.stdout.splitlines()) == 5
    assert f"node 127.0.0.1:{tutorial.ports[8001]}" in watch.stdout


def test_requests_are_counted(tutorial: Shell, client: openai.OpenAI) -> None:
    def counted() -> int:
        shown = tutorial.run("pulsing inspect metrics --seeds 127.0.0.1:8000 --raw False").stdout
        (row,) = (line for line in shown.splitlines() if line.startswith(f"127.0.0.1:{tutorial.ports[8000]} "))
        return int(row.split()[-1])

    before = counted()
    for _ in range(3):
        client.chat.completions.create(model="gpt2", messages=MESSAGES, max_tokens=2)
    wait_for("three more requests", lambda: counted() == before + 3, 10)


def test_bench(tutorial: Shell, readme: Readme, tmp_path: pathlib.Path) -> None:
    """The README's line needs minutes; with less load the same in seconds."""
    build, line = readme.lines("", mark="bench")
    # `make bench-layout` runs the line that builds; what it names must be there.
    assert (ROOT / build.split()[-1]).is_file()
    short = "--duration 3s --warmup 1s --max_vus 2 --input_tokens 8 --output_tokens 4"
    before, tutorial.env = tutorial.env, with_module(tutorial.env, tmp_path)
    try:
        table = tutorial.run(f"{line} {short}")
        report = tutorial.run(f"{line} {short} --json")
    finally:
        tutorial.env = before
    assert table.returncode == 0, table.stderr
    assert "ttft" in table.stdout.lower()
    assert report.returncode == 0, report.stderr
    json.loads(report.stdout)


def test_curl_plain_and_streamed(tutorial: Shell, readme: Readme) -> None:
    plain, streamed = readme.lines(r"^curl")
    answer = tutorial.run(f"{plain} -sS --fail-with-body")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    body = json.loads(answer.stdout)
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["content"].strip()
    assert body["usage"]["completion_tokens"] > 0
    lines = [line for line in tutorial.run(f"{streamed} -sS").stdout.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines), lines[:3]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line[6:]) for line in lines[:-1]]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert len([c for c in chunks if c["choices"] and c["choices"][0]["delta"].get("content")]) > 1
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] in ("stop", "length")


def test_plain_answer_of_the_official_client(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="gpt2", messages=MESSAGES, temperature=0, max_tokens=32)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= 32
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream_of_the_official_client(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="gpt2",
        messages=MESSAGES,
        temperature=0,
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, reasons, usage = "", [], None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            if choice.finish_reason:
                reasons.append(choice.finish_reason)
    assert text.strip()
    assert reasons in (["length"], ["stop"])
    assert usage is not None
    assert usage.completion_tokens <= 8


def test_two_turns(client: openai.OpenAI) -> None:
    messages = list(MESSAGES)
    first = client.chat.completions.create(model="gpt2", messages=messages, temperature=0, max_tokens=24)
    messages.append({"role": "assistant", "content": first.choices[0].message.content or ""})
    messages.append({"role": "user", "content": "And of Italy?"})
    second = client.chat.completions.create(model="gpt2", messages=messages, temperature=0, max_tokens=24)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens + first.usage.completion_tokens
    assert (second.choices[0].message.content or "").strip()


def test_a_stop_string_ends_the_answer_before_it(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="gpt2", messages=MESSAGES, temperature=0, max_tokens=64, stop=["Paris"]
    )
    content = answer.choices[0].message.content or ""
    assert "Paris" not in content
    assert content.strip()
    assert answer.choices[0].finish_reason == "stop"


def test_an_unknown_model_is_a_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="gpt-nonesuch", messages=MESSAGES)
    assert "gpt-nonesuch" in str(refused.value)


def test_the_public_name_is_listed(client: openai.OpenAI) -> None:
    assert "gpt2" in [entry.id for entry in client.models.list()]


def test_a_dead_worker_costs_no_request_that_had_not_begun(
    tutorial: Shell, client: openai.OpenAI, readme: Readme
) -> None:
    def ask(at: int) -> str:
        answer = client.chat.completions.create(
            model="gpt2", messages=[{"role": "user", "content": f"Say the number {at}."}], max_tokens=8
        )
        return answer.choices[0].finish_reason or ""

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(ask, at) for at in range(6)]
        tutorial.kill("transformers-1")
        asked += [pool.submit(ask, at) for at in range(6, 10)]
        for one in asked:
            assert one.result() in ("stop", "length")
    # And the one that comes back serves again.
    (line,) = readme.lines(r"^pulsing actor .*--addr 0.0.0.0:8001")
    tutorial.start("transformers-1", line)
    tutorial.wait_ready(3)


def test_workers_before_their_router_and_a_router_that_names_itself(
    terminals: Callable[[], Shell], readme: Readme
) -> None:
    shell = terminals()
    one, two, router = readme.lines(r"^pulsing actor", mark="workers first")
    shell.start("worker-1", one)
    shell.start("worker-2", two)
    # The README leaves the HTTP port at its default, which another run on this machine may hold.
    shell.start("router", f"{router} --http_port 8080")
    shell.wait_ready(2)
    with openai.OpenAI(base_url=f"{shell.api}/v1", api_key="unused", max_retries=0, timeout=120) as client:
        answer = client.chat.completions.create(model="pulsing-model", messages=MESSAGES, temperature=0, max_tokens=16)
    assert (answer.choices[0].message.content or "").strip()
    # The Router did not register under the name of the workers it routes to.
    listing = json.loads(shell.run("pulsing inspect actors --endpoint 127.0.0.1:8000 --json_output").stdout)
    assert sorted(row["name"] for row in listing) == ["router", "worker-1", "worker-2"]
    codes = shell.stop()
    assert codes == {"worker-1": 0, "worker-2": 0, "router": 0}


@pytest.mark.parametrize("mark", ["secret", "insecure"])
def test_two_hosts(terminals: Callable[[], Shell], readme: Readme, mark: str) -> None:
    """The flags of two hosts, on one; an engine that loads quickly stands for the README's."""
    shell = terminals()
    (shell.logs / "secret.txt").write_text("correct horse battery staple\n")
    router, worker, *inspect = (line.replace("router-host", "127.0.0.1") for line in readme.lines("^pulsing", mark))
    shell.start("router", router)
    shell.start("worker", worker.replace("TransformersWorker", "MistralRsWorker"))
    wait_for("a ready worker", lambda: get_json(f"{shell.api}/ready")[0] == 200)
    with openai.OpenAI(base_url=f"{shell.api}/v1", api_key="unused", max_retries=0, timeout=120) as client:
        answer = client.chat.completions.create(model="gpt2", messages=MESSAGES, max_tokens=4)
    assert answer.choices[0].finish_reason in ("stop", "length")
    for line in inspect:
        shown = shell.run(line)
        assert "2 nodes (2 alive)" in shown.stdout, shown.stderr
    assert ("WARN" in shell.log("router")) == (mark == "insecure"), shell.log("router")
    assert set(shell.stop().values()) == {0}


def test_python_of_the_readme(readme: Readme, tutorial: Shell, tmp_path: pathlib.Path) -> None:
    for name, containing, words in (
        ("counter", "class Counter", ["2", "5"]),
        ("ask", "from openai import OpenAI", []),
    ):
        file = tmp_path / f"{name}.py"
        file.write_text(tutorial.here(readme.code("python", containing)))
        done = tutorial.run(f"python {file}")
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
        if words:
            assert done.stdout.split() == words


def test_both_readmes_show_the_same_commands(readme: Readme) -> None:
    assert Readme(ROOT / "README.zh-CN.md").blocks == readme.blocks

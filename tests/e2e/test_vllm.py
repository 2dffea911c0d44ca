"""VllmWorker from the command line, with the real engine: starts, serves, drains, and leaves nothing behind."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import openai
import psutil
import pytest
from terminals import ROOT, Readme, Shell, get_json, wait_for

sys.path.append(str(ROOT / "tests" / "serving"))
import vllm_kit

WORKER = "pulsing actor pulsing.serving.VllmWorker --addr 127.0.0.1:8002 --seeds 127.0.0.1:8000 --name worker --"
MODEL_OF_README = "Qwen/Qwen2.5-0.5B"
ENGINE = "--model $MODEL --dtype bfloat16 --enforce_eager --max_model_len 1k --max_num_seqs 4 --seed 0"
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
LONG = {"ignore_eos": True}


@pytest.fixture(scope="module")
def shell(terminals: Callable[[], Shell], tmp_path_factory: pytest.TempPathFactory, readme: Readme) -> Iterator[Shell]:
    """A Router and one VllmWorker: the README's, with a small model and what a small CPU needs."""
    folder = tmp_path_factory.mktemp("model") / "SmolLM2"
    env = {**os.environ, **vllm_kit.ENVIRONMENT}
    subprocess.run([sys.executable, vllm_kit.__file__, "convert", str(folder)], env=env, check=True)
    shell = terminals()
    shell.env.update(vllm_kit.ENVIRONMENT, MODEL=str(folder))
    shell.start(
        "router",
        "pulsing actor pulsing.serving.Router --addr 127.0.0.1:8000 -- --http_port 8080 --model_name my-llm "
        "--worker_name worker",
    )
    (line,) = readme.lines("^pulsing", mark="vllm")
    assert line.count(f"--model {MODEL_OF_README} ") == 1
    shell.start("worker", line.replace(f"--model {MODEL_OF_README}", ENGINE))
    shell.wait_ready(1)
    return shell


@pytest.fixture
def client(shell: Shell) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{shell.api}/v1", api_key="unused", max_retries=0, timeout=120) as made:
        yield made


def family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def gone(processes: list[psutil.Process]) -> bool:
    return not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes)


def test_the_official_client_gets_plain_and_streamed_answers(shell: Shell, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="my-llm", messages=MESSAGES, temperature=0, max_tokens=24)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (37, 8)
    stream = client.chat.completions.create(
        model="my-llm", messages=MESSAGES, temperature=0, max_tokens=24, stream=True
    )
    pieces = [choice.delta.content for chunk in stream for choice in chunk.choices if choice.delta.content]
    assert "".join(pieces) == "The capital of France is Paris."
    assert len(pieces) > 4
    _, actors = get_json(f"http://127.0.0.1:{shell.ports[8000]}/actors")
    (worker,) = [row["metadata"] for row in actors["cluster"] if row["metadata"].get("kind") == "worker"]
    assert (worker["engine"], worker["role"], worker["state"]) == ("vllm", "aggregated", "ready")


def test_a_context_too_long_is_the_clients_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="my-llm", messages=[{"role": "user", "content": "word " * 3000}])
    assert refused.value.code == "context_length_exceeded"
    assert "maximum context length is 1000 tokens" in str(refused.value)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ("--gpu_memory_utilisation 0.9", 2, "--gpu_memory_utilisation - did you mean gpu_memory_utilization?"),
        ("--role prefil", 2, "aggregated|prefill|decode"),
        ("--role decode", 1, "role decode needs a KV connector"),
    ],
)
def test_what_cannot_be_started_is_told_at_once(shell: Shell, options: str, code: int, words: str) -> None:
    begun = time.monotonic()
    refused = shell.run(f"pulsing actor pulsing.serving.VllmWorker --addr 127.0.0.1:0 -- --model $MODEL {options}")
    assert refused.returncode == code, refused.stderr
    assert words in refused.stderr
    assert refused.stdout == ""
    # Importing vLLM alone takes longer than this on any machine.
    assert time.monotonic() - begun < 10


def test_a_worker_told_to_stop_finishes_its_answers_and_its_engine_goes_with_it(
    shell: Shell, client: openai.OpenAI
) -> None:
    process = shell.processes.pop("worker")
    engine = family(process)
    assert any("EngineCore" in one.name() for one in engine), engine
    stream = client.chat.completions.create(
        model="my-llm", messages=MESSAGES, temperature=0, max_tokens=200, stream=True, extra_body=LONG
    )
    chunks = iter(stream)
    next(chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content)
    # As a Ctrl-C in a terminal does: to the worker and to every process of its engine.
    for one in [*engine, process]:
        one.send_signal(2)
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == ["length"]
    assert process.wait(60) == 0, shell.log("worker")
    wait_for("the engine's processes to be gone", lambda: gone(engine), 10)


def test_a_start_is_called_off_and_a_killed_worker_leaves_no_engine(shell: Shell, client: openai.OpenAI) -> None:
    # Two starts at once: one is told to stop while its engine loads, the other is killed when it serves.
    called_off = shell.start("called off", f"{WORKER.replace('8002', '8003')} {ENGINE}")
    shell.start("killed", f"{WORKER} {ENGINE}")
    starting = wait_for("an engine that starts", lambda: [one for one in family(called_off) if "Engine" in one.name()])
    del shell.processes["called off"]
    called_off.send_signal(15)
    assert called_off.wait(40) == 0, shell.log("called off")
    wait_for("the engine's processes to be gone", lambda: gone(starting), 10)
    shell.wait_ready(1)
    process = shell.processes.pop("killed")
    engine = family(process)

    stream = client.chat.completions.create(
        model="my-llm", messages=MESSAGES, max_tokens=800, stream=True, extra_body=LONG
    )
    chunks = iter(stream)
    next(chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content)
    process.kill()
    process.wait(10)
    # The only worker is gone: the client is told, and the engine is not left with a request that nobody reads.
    with pytest.raises(openai.APIError):
        list(chunks)
    wait_for("the engine's processes to be gone", lambda: gone(engine), 10)

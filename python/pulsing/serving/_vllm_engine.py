"""A running vLLM engine. Importing this module imports vLLM; only the worker that serves with it does.

All of vLLM that Pulsing touches is here and in ``_vllm_request``: vLLM promises no stable Python interface, and a new
version should be looked through in one place.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

# vLLM reads these while it is imported. A user's own setting wins.
# Forking a process that has threads (the runtime's) is undefined; only spawn is sound here.
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
# Stdout belongs to whoever started the worker.
os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
# A server of one's own should not report to somebody else's.
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import vllm
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM

from pulsing.serving._fingerprint import fingerprint_of, weights_in
from pulsing.serving._hf_text import PLAIN_STOPS, PLAIN_TEMPLATE, TextCodec
from pulsing.serving._vllm_args import convert
from pulsing.serving._vllm_events import EventSocket

__all__ = ["CalledOffError", "Engine", "EngineStart", "settings_of"]

_log = logging.getLogger("pulsing.serving")

# What running requests' memory and processes get to be freed in, after which vLLM kills its processes.
_SHUTDOWN_TIMEOUT = 20.0
# Connectors by which a KV cache arrives as it was computed; others may pack it.
_EXACT_CONNECTORS = frozenset({"ExampleConnector", "NixlConnector", "NixlPullConnector", "NixlPushConnector"})
# Engines start one at a time, so that a process born meanwhile belongs to the one that starts.
_STARTING = threading.Lock()


class CalledOffError(RuntimeError):
    """The worker was stopped while its engine was starting."""


class EngineLoad:
    """What the scheduler of the engine says of itself, after each of its steps.

    Args:
        changed: called on the engine's loop when the numbers have changed enough to tell somebody.
        progressed: called there after each step of the engine.
    """

    def __init__(self, changed: Callable[[], None], progressed: Callable[[], None]) -> None:
        self._changed = changed
        self._progressed = progressed
        self._told = (0, 0.0)
        self._of: dict[int, tuple[int, int, float]] = {}

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return sum(one[0] for one in self._of.values())

    @property
    def waiting(self) -> int:
        """Sequences that wait for a place in it."""
        return sum(one[1] for one in self._of.values())

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache in use, 0..1; of several engines (data parallel) the mean."""
        return sum(one[2] for one in self._of.values()) / len(self._of) if self._of else 0.0

    def logger(self, config: Any, engine: int = 0) -> EngineLoad:
        """As a factory of vLLM's "stat loggers", one for each engine."""
        del config
        self._of[engine] = (0, 0, 0.0)
        return self

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Called by vLLM."""
        if scheduler_stats is None:
            return
        self._progressed()
        waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
        self._of[engine_idx] = (scheduler_stats.num_running_reqs, waiting, scheduler_stats.kv_cache_usage)
        told_waiting, told_usage = self._told
        # Usage creeps with every token; one in a hundred is what routing can use.
        if self.waiting != told_waiting or abs(self.kv_usage - told_usage) >= 0.01:
            self._told = (self.waiting, self.kv_usage)
            self._changed()

    def log(self) -> None:
        """Called by vLLM; these numbers go into load reports instead."""

    def log_engine_initialized(self) -> None:
        """Called by vLLM; nothing to say."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Called by vLLM; a Worker never puts its engine to sleep."""


class Engine:
    """vLLM's ``AsyncLLM`` with its renderer and parsers.

    Args:
        llm: the engine client.
        load: the numbers it records.
        chat_template: Jinja text, or a file that holds it; the model's own when ``None``.
        tool_call_parser: name of the vLLM parser of the model's tool calls.
        name: the model's name, for messages.
        tether: holds the engine's processes to this one.
        events: where it tells of its KV cache, if that was arranged here.
    """

    version = str(vllm.__version__)

    def __init__(
        self,
        llm: Any,
        load: EngineLoad,
        chat_template: str | None,
        tool_call_parser: str | None,
        name: str,
        tether: Tether,
        events: EventSocket | None,
    ) -> None:
        self.llm = llm
        self._tether = tether
        self._events = events
        # An address to bind to is here reached on this host.
        sources = llm.get_kv_event_sources().values()
        self.event_endpoints = [str(source.endpoint).replace("*", "127.0.0.1") for source in sources]
        """Where the engine tells of its KV cache."""
        self.load = load
        config = llm.vllm_config
        self.model_config = config.model_config
        self.max_model_len = int(config.model_config.max_model_len)
        self.max_running = int(config.scheduler_config.max_num_seqs)
        self.tokenizer = llm.renderer.get_tokenizer()
        self.defaults: dict[str, Any] = config.model_config.get_diff_sampling_param()
        """Sampling settings of the model's ``generation_config``."""
        self.has_tool_parser = tool_call_parser is not None
        self.has_reasoning_parser = bool(config.structured_outputs_config.reasoning_parser)
        template, self.implied_stops = _template(chat_template, self.tokenizer, self.model_config, name)
        self.renderer = OnlineRenderer(
            config.model_config,
            llm.renderer,
            request_logger=None,
            chat_template=template,
            chat_template_content_format="auto",
            enable_auto_tools=tool_call_parser is not None,
            exclude_tools_when_tool_choice_none=True,
            tool_parser=tool_call_parser,
            reasoning_parser=config.structured_outputs_config.reasoning_parser,
        )
        self.token_bytes = _token_bytes(self.tokenizer, name)
        weights = _weights(config.model_config)
        self.fingerprint = fingerprint_of(*settings_of(config), weights, template, tool_call_parser) if weights else ""
        """What engines have in common that answer alike; empty: the weights cannot be told."""

    @property
    def dead(self) -> bool:
        """Whether the engine's process has ended."""
        return bool(self.llm.errored)

    def stop_reading(self) -> None:
        """To be called on the loop before :meth:`close`, or the engine's orderly end is logged as a failure."""
        if self.llm.output_handler is not None:
            self.llm.output_handler.cancel()

    def close(self) -> None:
        """End the engine's processes. Blocks."""
        self.llm.shutdown(timeout=_SHUTDOWN_TIMEOUT)
        self._tether.cut()
        if self._events is not None:
            self._events.close()


class Tether:
    """Ends the engine's processes with this one, even if it is killed (on Linux). See ``_vllm_guardian``.

    Args:
        folder: directory that goes with them.
    """

    def __init__(self, folder: Path | None) -> None:
        self._mark = ("PULSING_ENGINE_OF", f"{os.getpid()}-{uuid.uuid4().hex}")
        self._guardian: subprocess.Popen[bytes] | None = None
        if sys.platform.startswith("linux"):
            program = Path(__file__).with_name("_vllm_guardian.py")
            folders = [] if folder is None else [str(folder)]
            self._guardian = subprocess.Popen(
                [sys.executable, "-I", "-S", str(program), "=".join(self._mark), *folders],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                # A signal to the worker's group must not end what watches over it.
                start_new_session=True,
            )

    @contextlib.contextmanager
    def marking(self) -> Iterator[None]:
        """Processes started inside belong to the engine."""
        name, value = self._mark
        os.environ[name] = value
        try:
            yield
        finally:
            del os.environ[name]

    def cut(self) -> None:
        """End whatever is left of the engine's processes. Blocks."""
        if self._guardian is not None and self._guardian.stdin is not None:
            self._guardian.stdin.close()
            self._guardian.wait()


class EngineStart:
    """One start of an engine, which may be called off from another thread.

    Args:
        model: a hub id or a directory.
        name: the name the engine goes by.
        arguments: vLLM engine arguments as the user gave them.
        chat_template: see :class:`Engine`.
        tool_call_parser: see :class:`Engine`.
        load_changed: see :class:`EngineLoad`.
        progressed: see :class:`EngineLoad`.
    """

    def __init__(
        self,
        model: str,
        name: str,
        arguments: Mapping[str, Any],
        chat_template: str | None,
        tool_call_parser: str | None,
        load_changed: Callable[[], None],
        progressed: Callable[[], None],
    ) -> None:
        self._model = model
        self._name = name
        self._arguments = arguments
        self._chat_template = chat_template
        self._tool_call_parser = tool_call_parser
        self._load = EngineLoad(load_changed, progressed)
        self._lock = threading.Lock()
        self._called_off = False
        self._before: set[int | None] | None = None
        self._ended = threading.Event()

    def run(self) -> Engine:
        """Start; blocks for as long as the model takes to load.

        Raises:
            CalledOffError: it was called off.
            ValueError: an argument is not as vLLM wants it.
            RuntimeError: the engine did not start.
        """
        with _STARTING:
            with self._lock:
                if self._called_off:
                    raise CalledOffError("the worker was stopped before its engine started")
                self._before = {child.pid for child in multiprocessing.active_children()}
            try:
                engine = self._start()
            finally:
                self._ended.set()
        if self._called_off:
            engine.close()
            raise CalledOffError("the worker was stopped while its engine started")
        return engine

    def _start(self) -> Engine:
        parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
        values = convert(self._arguments, parser)
        # An engine of several ranks has several sockets, which vLLM cannot number where they are files.
        events = (
            EventSocket() if "kv_events_config" not in values and values.get("data_parallel_size", 1) == 1 else None
        )
        try:
            return self._start_with(values, events)
        except BaseException:
            if events is not None:
                events.close()
            raise

    def _start_with(self, values: dict[str, Any], events: EventSocket | None) -> Engine:
        if events is not None:
            values["kv_events_config"] = events.config()
        arguments = AsyncEngineArgs(model=self._model, served_model_name=self._name, **values)
        _refuse_what_is_no_generator(arguments)
        # Started now: starting it unblocks signals (CPython before 3.12), and it is no part of the engine.
        resource_tracker.ensure_running()
        # A Ctrl-C goes to every process of the terminal. The engine must outlive it, to finish what runs; it is ended
        # by its worker. Its processes inherit the mask of this thread, which has no other use for it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        tether = Tether(None if events is None else events.folder)
        try:
            with tether.marking():
                llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[self._load.logger])
        except BaseException:
            tether.cut()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            return Engine(llm, self._load, self._chat_template, self._tool_call_parser, self._name, tether, events)
        except BaseException:
            llm.shutdown(timeout=_SHUTDOWN_TIMEOUT)
            tether.cut()
            raise

    def call_off(self) -> None:
        """End the start and every process it made. Blocks until then, a second or so."""
        with self._lock:
            self._called_off = True
            before = self._before
        if before is None:
            return
        deadline = time.monotonic() + _SHUTDOWN_TIMEOUT
        while not self._ended.wait(0.1) and time.monotonic() < deadline:
            for child in multiprocessing.active_children():
                if child.pid not in before:
                    child.kill()


def _refuse_what_is_no_generator(arguments: Any) -> None:
    if arguments.runner not in ("auto", "generate"):
        raise ValueError(f"runner {arguments.runner!r} generates no text; a Worker serves runner auto or generate")
    if arguments.skip_tokenizer_init:
        raise ValueError("skip_tokenizer_init leaves no tokenizer, and a Worker takes and gives text; leave it out")


def _template(given: str | None, tokenizer: Any, model_config: Any, name: str) -> tuple[str | None, tuple[str, ...]]:
    """The chat template to ask vLLM for (``None``: the model's own), and the stop strings that belong to it."""
    if given is not None:
        if "{" in given:
            return given, ()
        try:
            return Path(given).read_text(encoding="utf-8"), ()
        except OSError as error:
            raise ValueError(
                f"chat_template {given!r} is neither Jinja text nor a readable file: {error.strerror or error}"
            ) from None
    if not hasattr(tokenizer, "get_chat_template"):
        # Tokenizers of vLLM's own (Mistral's, DeepSeek's) write their chats themselves.
        return None, ()
    from vllm.renderers.hf import resolve_chat_template

    if resolve_chat_template(tokenizer, None, None, model_config=model_config) is not None:
        return None, ()
    _log.warning(
        '%s has no chat template: using a plain one ("User: ..." lines, then "Assistant:"); '
        "give a better one with --chat_template FILE",
        name,
    )
    return PLAIN_TEMPLATE, PLAIN_STOPS


def settings_of(config: Any) -> tuple[str, str]:
    """What of vLLM's settings decides an answer. That an engine hands over what it has read does not; but connectors
    that are not known to hand it over as it is count, by name.

    Args:
        config: a ``VllmConfig``.
    """
    alone = copy.copy(config)
    alone.kv_transfer_config = None
    connector = "" if config.kv_transfer_config is None else str(config.kv_transfer_config.kv_connector)
    return alone.compute_hash(), "" if connector in _EXACT_CONNECTORS else connector


def _weights(model_config: Any) -> str:
    """A name for the weights: of files by what they hold, of a repository by its commit; empty if unknown."""
    folder = Path(model_config.model)
    if folder.is_dir():
        return weights_in(folder)
    commit = getattr(model_config.hf_config, "_commit_hash", None)
    return f"{model_config.model} {commit}" if commit else ""


def _token_bytes(tokenizer: Any, name: str) -> Callable[[int], bytes]:
    """The bytes of a token, for log probabilities."""
    if hasattr(tokenizer, "added_tokens_decoder") and hasattr(tokenizer, "chat_template"):
        # The template has no part in this; given, so that no warning about a missing one is logged twice.
        return TextCodec(tokenizer, "{{ messages }}", name).token_bytes
    special = frozenset(tokenizer.all_special_ids)
    return lambda token: b"" if token in special else str(tokenizer.decode([token])).encode()

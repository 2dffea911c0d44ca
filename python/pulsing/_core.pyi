"""The extension: the bridge between asyncio and tokio, nodes, and the native parts of serving.

Tokens are numbers from `Bridge.token`: what an operation or a call has to say arrives in `Bridge.drain` as a tuple
``(kind, token, ...)``; `pulsing.core._bridge` has the kinds. Ids are 16 bytes, big-endian. Times are in seconds.
"""

from asyncio import Future
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, Literal, Self, TypeVar, final

from typing_extensions import Buffer as BufferLike

T = TypeVar("T")

__version__: str
SCHEDULER_TYPES: list[str]
"""The scheduler types that a Router takes, the default first."""

class CoreError(Exception):
    """A runtime error as ``(kind, message, fields, state)``; `pulsing.core` turns it into its public class."""

@final
class Bridge:
    """One event queue with one wake descriptor; Python makes one for each event loop.

    ``PULSING_BRIDGE_PIPE=1`` takes the portable pipe on Linux too.

    Raises:
        RuntimeError: This process was forked from one that had started the runtime.
        OSError: No descriptor is left.
    """

    def __new__(cls) -> Self: ...
    def fileno(self) -> int:
        """The descriptor that is readable while events wait."""

    def token(self) -> int:
        """A number that no other event source of this bridge has."""

    def drain(self) -> list[tuple[Any, ...]]:
        """Everything that has arrived, oldest first. A turn begins, to be ended with `flush`."""

    def flush(self) -> None:
        """Sends what was held back in this turn of the loop."""

    def give_up(self, token: int) -> None:
        """The answer to a call that `System.ask` made is no longer wanted; nothing if its first event has come."""

    def close(self) -> None:
        """The loop is gone: what arrives from now on is dropped, and calls are answered that their actor stopped."""

@final
class Buffer:
    """Received bytes behind the buffer protocol; writable when nobody else holds them."""

    @property
    def readonly(self) -> bool:
        """Whether views are read-only."""

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class CallHandle:
    """Control over one call that is out."""

    @property
    def token(self) -> int:
        """What the call's events carry."""

    def cancel(self) -> None:
        """The answer is no longer wanted; the callee's handler is cancelled. Idempotent."""

    def grant(self, items: int) -> None:
        """The caller can take `items` more stream items."""

@final
class PendingTell:
    """A tell that waits for room. Its end is reported to `token`; dropped, it is withdrawn."""

    @property
    def token(self) -> int:
        """What a done or an error event will carry, unless it is withdrawn before."""

    def cancel(self) -> None:
        """The message is not to be sent any more. Idempotent."""

@final
class InboundCall:
    """One call as its actor sees it. Dropped without an answer it tells the caller that the actor stopped."""

    @property
    def token(self) -> int:
        """The token of its cancellation."""

    @property
    def codec(self) -> int:
        """How `head` is encoded: 0 message type and body, 1 pickle, 2 JSON, 3 worker protocol."""

    @property
    def head(self) -> bytes:
        """The encoded message."""

    @property
    def buffers(self) -> list[Buffer]:
        """Its out-of-band buffers."""

    @property
    def timeout(self) -> float | None:
        """Seconds the caller had left when the call was drained; None for ever."""

    @property
    def trace(self) -> str | None:
        """W3C ``traceparent``."""

    @property
    def no_wait(self) -> bool:
        """The caller prefers a refusal to waiting in a full mailbox."""

    @property
    def one_way(self) -> bool:
        """Nobody waits for the answer."""

    @property
    def sender(self) -> bytes | None:
        """The calling actor."""

    @property
    def chain(self) -> list[bytes]:
        """Actors whose exclusive slot this chain of calls holds, outermost first."""

    @property
    def cancelled(self) -> bool:
        """The caller gave up."""

    @property
    def answered(self) -> bool:
        """The answer is complete."""

    def accept(self) -> None:
        """A tell has a place in its actor's mailbox, or runs: whoever sent it may send another. Idempotent."""

    def reply(self, head: BufferLike, buffers: Sequence[BufferLike] = ..., codec: int | None = None) -> None:
        """Answers with one value.

        Raises:
            RuntimeError: Answered already, or a stream has begun.
        """

    def answer(self, value: Any) -> bool:
        """`reply` with the pickle of a plain value. False, and nothing was sent: it is none.

        Raises:
            RuntimeError: As `reply`.
        """

    def start(self, header: bytes) -> None:
        """Begins a stream, if it has not begun, with a header ahead of its items that costs no credit.

        Args:
            header: Head of a message of codec 0 (raw) without buffers.

        Raises:
            CoreError: "cancelled": the consumer has gone.
        """

    def try_send(self, head: BufferLike, buffers: Sequence[BufferLike] = ..., codec: int | None = None) -> bool:
        """Sends one stream item if there is credit; begins the stream.

        Raises:
            CoreError: "cancelled": the consumer has gone.
            RuntimeError: Answered already.
        """

    def wait_credit(self, token: int) -> None:
        """Asks for a credit event with `token` as soon as the stream may have credit, or has lost its consumer."""

    def end(self) -> None:
        """The stream is complete.

        Raises:
            RuntimeError: Answered already.
        """

    def fail(
        self, type_name: str, message: str, code: int = 0, data: BufferLike | None = None, traceback: str = ...
    ) -> None:
        """Answers with the actor's own error, or fails the stream.

        Raises:
            RuntimeError: Answered already.
        """

    def refuse(self, kind: str, detail: str = ..., number: float = 0.0) -> None:
        """Answers with one of the runtime's errors: actor_stopped (number = 1: the message was not begun), mailbox_full
        (number = capacity), deadlock, timeout (number = seconds), cancelled, shut_down, protocol.

        Raises:
            RuntimeError: Answered already.
        """

@final
class Starting:
    """A node that is starting."""

    def cancel(self) -> None:
        """Nobody waits for it any more: it stops dialling and frees its port. Nothing happens once it has started."""

@final
class System:
    """A running node."""

    @staticmethod
    def start(
        bridge: Bridge,
        token: int,
        *,
        addr: str | None,
        advertise: str | None,
        seeds: list[str],
        cluster: str,
        passphrase: str | None,
        cert: str | PathLike[str] | None,
        key: str | PathLike[str] | None,
        ca: str | PathLike[str] | None,
        insecure: bool,
        secret_file: str | PathLike[str] | None,
        join_timeout: float | None,
        observe: bool,
        observe_addr: str | None,
        handshake_timeout: float,
        max_handshakes: int,
        max_observers: int,
        max_message: int | None,
        stream_idle: float | None,
        threads: int,
        preset: str | None = None,
        host: TestHost | None = None,
    ) -> Starting:
        """Starts a node and reports it to `token`, unless that is given up. `SystemConfig` has the settings.

        With a `host` it lives on that host of a `TestNetwork`, and there only.

        Raises:
            RuntimeError: In a forked child, or while the interpreter exits.
            CoreError: An empty passphrase.
            ValueError: A passphrase beside certificates, or one of their files without the others.
        """

    @property
    def node_id(self) -> bytes:
        """Id of this node."""

    @property
    def addr(self) -> str:
        """Address that others reach it at, ``ip:port``."""

    @property
    def bound(self) -> str:
        """Address it listens on, ``ip:port``; other than `addr` for a wildcard, or where another one is advertised."""

    @property
    def observed_at(self) -> str | None:
        """Address where it answers observers besides its port, ``ip:port``; None: nowhere."""

    def register(
        self,
        bridge: Bridge,
        key: int,
        actor: bytes,
        *,
        name: str | None,
        public: bool,
        class_name: str,
        metadata: dict[str, str],
        internal: bool,
        unique: bool,
    ) -> None:
        """Makes an actor reachable: its calls arrive with `key` as their token, and so does the loss of a unique name.

        Raises:
            CoreError: name_taken, invalid_name, config (metadata over 1 KB, a private unique name), shut_down.
        """

    def check_vacant(self, name: str, unique: bool) -> None:
        """Whether `register` could claim the name now.

        Raises:
            CoreError: name_taken, invalid_name.
        """

    def withdraw(self, actor: bytes) -> None:
        """Takes an actor's name off the cluster, and frees it here; its id still reaches it. Idempotent."""

    def restarted(
        self, actor: bytes, reason: str, *, name: str | None = None, class_name: str = "", public: bool = False
    ) -> None:
        """Counts that supervision starts an actor again, and tells observers.

        Args:
            actor: Its id.
            reason: How its last instance ended: a word that watchers are told.
            name: Of an actor in a process of its own, which the node does not know: its name.
            class_name: And its class.
            public: And whether its name is published.
        """

    def unregister(self, actor: bytes, reason: str = "stopped", error: str = ...) -> bool:
        """Takes an actor that has ended off the node, and tells who watches it; False if it was not there.

        Args:
            actor: Its id.
            reason: stopped, failed, killed or node_left.
            error: What it failed with.

        Raises:
            ValueError: None of these.
        """

    def watch_actor(self, bridge: Bridge, token: int, node: bytes, actor: bytes) -> WatchHandle:
        """Reports ``(reason, error)`` to `token` when an actor has ended, wherever it lives; at once if it has."""

    def end(
        self,
        bridge: Bridge,
        token: int,
        node: bytes,
        actor: bytes,
        how: str,
        grace: float | None = None,
        error: str = ...,
    ) -> None:
        """Ends an actor, here or on another node, and reports ``(reason, error)`` to `token` when it has ended.

        Args:
            bridge: Where the report goes.
            token: Its token.
            node: The actor's node.
            actor: The actor.
            how: drain, stop, kill or fail.
            grace: Seconds that running handlers get; None: 5.
            error: What it fails with.

        Raises:
            ValueError: Another way to end, or a negative grace.
        """

    def link(
        self, bridge: Bridge, token: int, one: tuple[bytes, bytes], other: tuple[bytes, bytes], linked: bool
    ) -> None:
        """Links two actors, each ``(node, actor)``, or undoes that, and reports to `token`."""

    def set_metadata(self, actor: bytes, metadata: dict[str, str]) -> bool:
        """Replaces the metadata published with an actor's name; False if it is not there.

        Raises:
            CoreError: config (over 1 KB).
        """

    def instances(self, name: str) -> list[dict[str, Any]]:
        """Instances of a name: name, node_id, actor_id, addr, class, metadata, unique."""

    def names(self) -> dict[str, list[dict[str, Any]]]:
        """Every published instance by name."""

    def watch_name(self, name: str) -> NameWatchHandle:
        """The instances of `name` as they come, change and go.

        Raises:
            CoreError: invalid_name.
        """

    def published(self, actor: bytes) -> dict[str, Any] | None:
        """The published instance that is this actor, as `instances` has it."""

    def name_of(self, actor: bytes) -> str | None:
        """The published name of an actor, wherever in the cluster it lives."""

    def members(self) -> list[dict[str, Any]]:
        """The nodes of the cluster: node_id, addr, state, me."""

    def metrics(self) -> dict[str, int]:
        """The node's counters."""

    def count(
        self,
        *,
        messages: int = 0,
        waiting: int = 0,
        streams: int = 0,
        stream_items: int = 0,
        dead_letters: int = 0,
        bytes_copied: int = 0,
    ) -> None:
        """Adds what happened inside Python, where local calls stay, to the node's counters.

        Args:
            messages: Local calls delivered.
            waiting: Messages that began to wait in mailboxes, less those that ceased to.
            streams: Local streams begun.
            stream_items: Their items.
            dead_letters: Messages nobody took.
            bytes_copied: Bytes of large data that were copied.
        """

    def resolve(self, bridge: Bridge, token: int, name: str, node: bytes | None = None, timeout: float = 0.0) -> None:
        """Reports one instance of a name, waiting up to `timeout` seconds for it."""

    def call(
        self,
        bridge: Bridge,
        node: bytes,
        actor: bytes,
        codec: int,
        head: BufferLike,
        buffers: Sequence[BufferLike],
        timeout: float | None,
        sender: bytes | None,
        chain: list[bytes],
        trace: str | None,
        no_wait: bool,
        window: int,
        idempotent: bool = False,
    ) -> CallHandle:
        """Sends a call; every outcome is reported to the token of the handle. `bytes` of 64 KiB and more are lent, not
        copied.
        """

    def ask(
        self,
        bridge: Bridge,
        future: Future[Any],
        node: bytes,
        actor: bytes,
        operation: int,
        name: str,
        args: tuple[Any, ...],
        timeout: float | None,
        window: int,
    ) -> int | None:
        """`call` with the pickled envelope of these parts, and nothing else that a call may carry.

        Its first event completes `future`, in `drain`: a short answer of plain types, lists and dicts with its value,
        any other with the event's tuple. An event that begins a stream is left to who drains, with the `CallHandle`
        and `future` behind the token.

        Args:
            bridge: Where it is drained.
            future: Of the bridge's loop.
            node: The actor's node.
            actor: Its id.
            operation: First part of the envelope.
            name: Its second.
            args: Its third; the fourth is an empty dict.
            timeout: Seconds until the first event; None for ever.
            window: Items of a stream before its producer waits for `grant`.

        Returns:
            The token, for `Bridge.give_up`; None, and nothing was sent: `args` has more than numbers, None, and text
            and bytes of up to 4096 bytes.
        """

    def tell(
        self,
        bridge: Bridge,
        node: bytes,
        actor: bytes,
        codec: int,
        head: BufferLike,
        buffers: Sequence[BufferLike],
        sender: bytes | None,
        trace: str | None,
        no_wait: bool,
    ) -> PendingTell | None:
        """Sends without an answer. None: it is on its way; else it waits for room.

        Raises:
            CoreError: shut_down, node_not_found, actor_not_found, too_large; mailbox_full with `no_wait`.
        """

    def watch(self, bridge: Bridge, token: int) -> ChangesHandle:
        """A changed event with `token` whenever members or names may answer differently, at most every 20 ms."""

    def drain(self) -> None:
        """Says that the node is about to leave: ``/ready`` answers 503, and who wants its port waits for it."""

    def shutdown(self, bridge: Bridge, token: int) -> None:
        """Leaves the cluster and reports to `token` when the port is free."""

@final
class TestHost:
    """One life of one host of a `TestNetwork`: what a system is started on."""

    @property
    def addr(self) -> str:
        """``ip:port`` that its node is reached at, the same in every life."""

@final
class TestNetwork:
    """Hosts in memory and their clock, for `pulsing.testing`. All of it runs on the thread that plays it.

    Args:
        seed: What its chances derive from.

    Raises:
        RuntimeError: No descriptor is left for its runtime.
    """

    def __new__(cls, seed: int) -> Self: ...
    def play(self, function: Callable[[], T]) -> T:
        """Calls `function` on the network's clock, then ends the network.

        Raises:
            RuntimeError: This thread plays one already.
        """

    def now(self) -> float:
        """Seconds since the network began."""

    def turn(self) -> None:
        """Runs what is ready; the clock stands still.

        Raises:
            RuntimeError: The network has ended.
        """

    def wait(self, until: float) -> None:
        """Runs until a bridge has something for its loop, or `wake`, or the clock reads `until`; it jumps meanwhile.

        Raises:
            RuntimeError: The network has ended.
        """

    def wake(self) -> None:
        """Ends a `wait`; from any thread."""

    def host(self, name: str) -> TestHost:
        """A host, or its next life.

        Raises:
            ValueError: The former life goes on; or that is no name.
        """

    def faults(
        self,
        *,
        delay: tuple[float, float],
        loss: float,
        reorder: float,
        break_after: float,
        between: tuple[str, str] | None = None,
    ) -> None:
        """Says how links misbehave; `pulsing.testing.Network.faults` has the meanings.

        Raises:
            ValueError: Numbers that make no sense, unknown hosts.
        """

    def partition(self, a: list[str], b: list[str], one_way: bool, refuse: bool) -> None:
        """Stops what goes between two sides.

        Raises:
            ValueError: Unknown hosts.
        """

    def heal(self) -> None:
        """Ends every partition."""

    def kill(self, name: str) -> None:
        """Ends a host at once.

        Raises:
            ValueError: No such host.
        """

    def pause(self, name: str) -> None:
        """Stops a host.

        Raises:
            ValueError: No such host.
        """

    def resume(self, name: str) -> None:
        """Ends a pause.

        Raises:
            ValueError: No such host.
        """

@final
class WatchHandle:
    """A watch of one actor. Dropped, it ends."""

    def cancel(self) -> None:
        """Ends the watch. Idempotent."""

@final
class ChangesHandle:
    """Hears of every change of members and names until cancelled; dropping it changes nothing."""

    def cancel(self) -> None:
        """No more events. Idempotent."""

@final
class NameWatchHandle:
    """A watch of one name. Dropped, it ends."""

    def next(self, bridge: Bridge, token: int) -> None:
        """Reports ``[(kind, instance), ...]`` to `token` once something changed: "added", "updated" or "removed".

        Raises:
            ValueError: The watch is closed.
        """

    def close(self) -> None:
        """Ends the watch; a wait under way ends with an error. Idempotent."""

def runtime_started() -> bool:
    """True in the process that started the runtime's threads, until they are stopped."""

def runtime_tasks() -> int:
    """Tasks of the runtime that have not ended: of every node of this process together."""

def leave_all(systems: list[System], timeout: float) -> None:
    """`System.shutdown` of all at once, from outside a loop, waiting at most `timeout` seconds."""

def stop_runtime(timeout: float) -> None:
    """Stops the runtime for good, waiting at most `timeout` seconds for its threads."""

def init_logging(filter: str, format: str) -> bool:
    """Starts Rust's logging to stderr, once; False if it had been started.

    Args:
        filter: error, warn, info, debug or trace, or a filter such as ``info,pulsing_core::net=debug``.
        format: "text" or "json".

    Raises:
        ValueError: Neither.
    """

def error_kinds() -> list[tuple[str, str]]:
    """Every kind of `CoreError` with what it says about the callee: "no", "maybe" or "yes"."""

def observe_get(
    addrs: list[str],
    path: str,
    timeout: float = 10.0,
    passphrase: str | None = None,
    cluster: str = "default",
    cert: str | PathLike[str] | None = None,
    key: str | PathLike[str] | None = None,
    ca: str | PathLike[str] | None = None,
) -> list[tuple[int, str, str | None]]:
    """GETs `path` from the observer endpoint of every address at once; with a passphrase, or with the files of a
    certificate, over the cluster's TLS.

    Returns:
        One tuple an address: ``(status, body, None)``, or ``(0, "", why)`` without an answer within `timeout` seconds.

    Raises:
        ValueError: A timeout that is no positive number, an empty passphrase, or files that do not serve.
    """

def seed_places(seed: str, *, read: bool = True) -> list[str]:
    """The ``host:port``s that a seed stands for: itself, the DNS name of a service, or the lines of a file.

    Args:
        seed: ``host:port``, ``k8s://service.namespace:port`` or ``file:///path``.
        read: Whether a file is read; without, it stands for nothing.

    Raises:
        ValueError: What can be no seed, or a file that cannot be read or has no seed in it; says which and why.
    """

@final
class WorkerRequest:
    """A request of the worker protocol."""

    @staticmethod
    def decode(head: BufferLike, buffers: Sequence[BufferLike] = ...) -> WorkerRequest:
        """Reads a call's head and buffers.

        Raises:
            ValueError: Not a request of this protocol version.
        """

    @property
    def kind(self) -> Literal["generate", "question", "subscribe_load", "describe", "relay"]:
        """What is wanted."""

    @property
    def version(self) -> int:
        """Version of the protocol."""

    @property
    def blocks(self) -> bool:
        """Of ``subscribe_load``: news of the prompt cache is wanted, too."""

    @property
    def api(self) -> str:
        """``chat.completions`` or ``completions``; of a question ``embeddings``, ``tokenize`` or ``detokenize``."""

    @property
    def request_id(self) -> str:
        """``x-request-id``."""

    def surroundings(self) -> dict[str, Any]:
        """What a request to generate says beside its body, by the names of ``GenerateRequest``: api, request_id,
        deadline, continue_text, continue_tokens (a tuple) and handoff."""

    @property
    def deadline(self) -> float | None:
        """Seconds left when it was sent; None for ever."""

    @property
    def traceparent(self) -> str:
        """W3C trace context; empty = none."""

    @property
    def body(self) -> bytes:
        """The client's JSON, untouched; of ``relay`` the bytes of a whole HTTP request, or none."""

    @property
    def continue_text(self) -> str:
        """Text already sent to the client, to continue from."""

    @property
    def continue_tokens(self) -> list[int]:
        """The same as token ids."""

    @property
    def whole(self) -> bool:
        """Nobody sees any of the answer before all of it is there: one message may answer in place of the stream."""

    @property
    def handoff(self) -> bytes:
        """To a decode worker: what the prefill worker gave; with pd=concurrent to both: where they meet, as JSON."""

def encode_request(
    kind: Literal["generate", "question", "subscribe_load", "describe", "relay"],
    *,
    api: str = ...,
    request_id: str = ...,
    deadline: float | None = None,
    traceparent: str = ...,
    continue_text: str = ...,
    continue_tokens: list[int] = ...,
    handoff: bytes = ...,
    whole: bool = False,
    blocks: bool = False,
) -> bytes:
    """The head of a request, for tests and for engines that forward to other workers.

    Raises:
        ValueError: An unknown kind.
    """

@final
class Usage:
    """Tokens spent."""

    def __new__(cls, prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> Self: ...
    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""

    @property
    def completion_tokens(self) -> int:
        """Tokens generated."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from a cache."""

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""

@final
class Delta:
    """A piece of one choice of an answer.

    Args:
        text: New text: whole characters, stop strings removed.
        index: The choice.
        token_ids: Ids of the new tokens.
        finish_reason: Why the choice ends; with its last piece only.
        usage: Tokens spent; with the last piece of the answer only.
        logprobs: The choice's ``logprobs`` object for this piece, as an object or as JSON text.
        tool_calls: The ``delta.tool_calls`` array for this piece, likewise.
        reasoning: New reasoning text.
        handoff: From a prefill worker, with its last piece: what the decode worker gets as `WorkerRequest.handoff`.

    Raises:
        ValueError: What cannot be written as JSON.
    """

    def __new__(
        cls,
        text: str = ...,
        *,
        index: int = 0,
        token_ids: Sequence[int] = ...,
        finish_reason: str | None = None,
        usage: Usage | None = None,
        logprobs: Any = None,
        tool_calls: Any = None,
        reasoning: str | None = None,
        handoff: bytes = ...,
    ) -> Self: ...
    @property
    def text(self) -> str:
        """New text."""

    @property
    def index(self) -> int:
        """The choice."""

    @property
    def token_ids(self) -> list[int]:
        """Ids of the new tokens."""

    @property
    def finish_reason(self) -> str | None:
        """Why the choice ends."""

    @property
    def usage(self) -> Usage | None:
        """Tokens spent."""

    @property
    def logprobs(self) -> Any:
        """The ``logprobs`` object; None = none."""

    @property
    def tool_calls(self) -> Any:
        """The ``tool_calls`` array; None = none."""

    @property
    def reasoning(self) -> str | None:
        """New reasoning text."""

    @property
    def handoff(self) -> bytes:
        """What the decode worker needs; empty: nothing."""

def read_json(body: bytes) -> dict[str, Any] | None:
    """An object of JSON as ``json.loads`` reads it, in a fraction of the time where a text in it is long.

    Args:
        body: The text, in UTF-8.

    Returns:
        None where it is no object, or where ``json`` has to look at it: long integers, keys with escapes, half
        surrogate pairs, other encodings, more than 64 levels, whatever is wrong with it.
    """

def encode_deltas(deltas: list[Delta]) -> bytes:
    """One stream item."""

def prompt_blocks(api: str, body: bytes) -> tuple[list[int], int]:
    """How Routers call the prompt of a request: the hash of each whole block of 256 bytes and all before it.

    Args:
        api: ``chat.completions`` or ``completions``; any other has none.
        body: The client's JSON.

    Returns:
        The hashes, and the bytes of the whole prompt. None and 0 for several prompts, and for what is no request.
    """

def encode_answer(
    *,
    embeddings: list[bytes] = ...,
    tokens: list[int] = ...,
    token_texts: list[str] = ...,
    text: str = ...,
    usage: Usage | None = None,
    max_model_len: int = 0,
) -> bytes:
    """The answer to a question of the worker protocol.

    Args:
        embeddings: One for each input, in order: 32-bit floats, little-endian.
        tokens: Of ``tokenize``.
        token_texts: One a token, where they were asked for.
        text: Of ``detokenize``.
        usage: Tokens spent.
        max_model_len: Longest context in tokens; 0 = unknown.
    """

def decode_deltas(head: BufferLike) -> list[Delta]:
    """The deltas of one stream item.

    Raises:
        ValueError: Malformed bytes.
    """

@final
class LoadReport:
    """How a worker is doing.

    Args:
        state: loading, ready, draining or failed.
        running: Requests being served.
        waiting: Requests in its queue.
        capacity: Requests it serves at once.
        kv_usage: Share of the KV cache in use, 0..1; 0 = unknown.
        processed: Requests served since its start.
        progress_age_ms: Milliseconds since the last token, or part of a prompt; of an idle worker it says nothing.
        models: Model names.
        detail: How far loading is, or why it failed.
        max_model_len: Longest context in tokens; 0 = unknown.
        answer_age_ms: Of a worker that stands for a server: milliseconds since the first question that the server has
            not answered; 0 = none.

    Raises:
        ValueError: An unknown state.
    """

    def __new__(
        cls,
        state: str = ...,
        running: int = 0,
        waiting: int = 0,
        capacity: int = 1,
        kv_usage: float = 0.0,
        processed: int = 0,
        progress_age_ms: int = 0,
        models: Sequence[str] = ...,
        detail: str = ...,
        max_model_len: int = 0,
        answer_age_ms: int = 0,
    ) -> Self: ...
    def encode(self, blocks: tuple[int, bool, list[int], list[int]] | None = None) -> bytes:
        """One stream item.

        Args:
            blocks: News of the prompt cache, for a subscriber that wants it: number, reset, stored, dropped.
        """

    @staticmethod
    def decode(head: BufferLike) -> LoadReport:
        """Reads what `encode` wrote.

        Raises:
            ValueError: Malformed bytes.
        """

    def describe(self, engine: str, engine_version: str, authorization: str = ...) -> bytes:
        """This report inside an encoded `Description`: the answer to ``describe``.

        Args:
            engine: Name of the engine.
            engine_version: Its version; empty = unknown.
            authorization: For a worker with ``url`` in its metadata, the header Routers send to it; empty = none.
        """

    @property
    def state(self) -> str:
        """loading, ready, draining or failed."""

    @property
    def running(self) -> int:
        """Requests being served."""

    @property
    def waiting(self) -> int:
        """Requests in its queue."""

    @property
    def capacity(self) -> int:
        """Requests it serves at once."""

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache in use."""

    @property
    def processed(self) -> int:
        """Requests served since its start."""

    @property
    def progress_age_ms(self) -> int:
        """Milliseconds since the last token."""

    @property
    def models(self) -> list[str]:
        """Model names."""

    @property
    def detail(self) -> str:
        """How far loading is, or why it failed."""

    @property
    def max_model_len(self) -> int:
        """Longest context in tokens."""

    @property
    def answer_age_ms(self) -> int:
        """Milliseconds since the first question that the server has not answered."""

    @property
    def blocks(self) -> tuple[int, bool, list[int], list[int]] | None:
        """News of the prompt cache that came with it: number, reset, stored, dropped."""

@final
class Description:
    """What a worker is."""

    def __new__(cls, engine: str, engine_version: str = ..., load: LoadReport | None = None) -> Self: ...
    def encode(self) -> bytes:
        """The answer to ``describe``."""

    @staticmethod
    def decode(head: BufferLike) -> Description:
        """Reads what `encode` wrote.

        Raises:
            ValueError: Malformed bytes.
        """

    @property
    def engine(self) -> str:
        """Name of the engine."""

    @property
    def engine_version(self) -> str:
        """Its version; empty = unknown."""

    @property
    def load(self) -> LoadReport | None:
        """How it is doing."""

    @property
    def authorization(self) -> str:
        """The ``Authorization`` that the engine behind the worker wants; empty = none."""

@final
class Gateway:
    """A Router's running HTTP server. Dropped, it stops at once."""

    @property
    def addr(self) -> str:
        """``ip:port`` it listens on."""

    @property
    def port(self) -> int:
        """Its port."""

    def shutdown(self, bridge: Bridge, token: int, grace: float) -> None:
        """Stops accepting, lets requests finish for up to `grace` seconds, and reports to `token`."""

def start_gateway(
    system: System,
    bridge: Bridge,
    token: int,
    *,
    settings: str,
    scheduler: tuple[bytes, bytes] | None = None,
) -> None:
    """Starts a gateway on `system` and reports it, or why it cannot listen, to `token`.

    Args:
        system: The node whose workers it serves.
        bridge: Where it reports.
        token: To whom.
        settings: JSON object: `pulsing.serving._router_settings` by name, times in seconds, sizes in bytes.
        scheduler: (node id, actor id) of an actor that chooses; none: the policy does.

    Raises:
        ValueError: A setting that cannot be read.
    """

def check_scheduler_type(name: str) -> None:
    """Refuses a scheduler type that there is not.

    Raises:
        ValueError: It names the valid ones.
    """

@final
class Tracer:
    """Sends spans to a collector of OpenTelemetry traces (OTLP/HTTP in JSON), beside everything else.

    Args:
        system: The node whose threads send them.
        endpoint: ``http://host:4318``; https too.
        service: ``service.name`` of the spans.
        headers_file: File of headers that the collector wants, one ``Name: value`` a line, closed to other users.
        headers: The same where there is no file, as ``OTEL_EXPORTER_OTLP_HEADERS`` has it: ``name=value,...``.

    Raises:
        ValueError: An address or headers that cannot be used. It repeats no header's value.
    """

    def __new__(
        cls,
        system: System,
        endpoint: str,
        service: str,
        *,
        headers_file: str | None = None,
        headers: str | None = None,
    ) -> Self: ...
    def record(
        self, traceparent: str, name: str, start: float, end: float, attributes: str, error: str | None = None
    ) -> None:
        """A span below `traceparent`; none where that is no W3C trace context, or one that is not kept.

        Args:
            traceparent: Of the span above it.
            name: What it is called.
            start: Seconds since 1970.
            end: Seconds since 1970.
            attributes: JSON object of text, numbers and flags.
            error: What went wrong.

        Raises:
            ValueError: `attributes` is no JSON object.
        """

@final
class WorkerPicker:
    """Chooses workers as a Router does: the same pool, the same pushed load, the same policies.

    Args:
        system: The node that looks for them.
        worker_name: Name that the workers serve under.
        scheduler_type: One of `SCHEDULER_TYPES`.

    Raises:
        ValueError: An unknown scheduler type.
    """

    def __new__(cls, system: System, worker_name: str, scheduler_type: str) -> Self: ...
    def pick(self, key: str | None = None, text: str | None = None) -> tuple[str, str] | None:
        """(node id, actor id) of a ready worker, or None.

        Args:
            key: Ties requests of one conversation together, for `consistent_hash`.
            text: The prompt, for `cache_aware`.
        """

    def workers(self) -> list[tuple[str, str, str, int, int]]:
        """Every worker as (node id, actor id, state, load, capacity)."""

    def reset(self) -> None:
        """Forgets whose turn it is."""

    def close(self) -> None:
        """Stops watching."""

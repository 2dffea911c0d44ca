"""Every error Pulsing raises.

::

    PulsingError
    ├── PulsingRuntimeError                 the runtime could not do it
    │   ├── ActorNotFoundError              no actor with this id lives there
    │   ├── MailboxFull                     full, and the call was made with no_wait
    │   ├── DeadlockError                   the actor would wait on itself
    │   ├── NameTakenError                  the name has a holder already
    │   ├── InvalidNameError                the text cannot be a name           (also ValueError)
    │   ├── NameNotFoundError               nobody serves under this name       (also LookupError)
    │   ├── NodeNotFoundError               the node is no member               (also LookupError)
    │   ├── CodeNotFoundError               the other node lacks a module       (also ImportError)
    │   ├── ConnectFailedError              the peer could not be dialled       (also ConnectionError)
    │   ├── ConnectionLostError             the link broke while a call was out (also ConnectionError)
    │   ├── RefusedError                    a handshake was refused             (also ConnectionError)
    │   ├── TooLargeError                   over a configured limit: `size`, `limit`; not sent, or not taken
    │   │   └── ReplyTooLargeError          an answer was: the callee has run
    │   ├── BindError                       cannot listen on the address        (also OSError)
    │   ├── JoinError                       no seed let us in
    │   ├── ConfigError                     a setting does not make sense       (also ValueError)
    │   ├── ProtocolError                   a peer sent what the protocol forbids
    │   ├── CallCancelledError              the call was cancelled by its callee's side
    │   └── SystemShutDownError             the actor system is shut down
    └── PulsingActorError                   the actor failed
        ├── ActorStoppedError               it stopped before it answered
        ├── ProcessDiedError                its own process ended before it was ready
        ├── PulsingBusinessError            the caller's mistake; never counts as a failure of the actor
        ├── PulsingSystemError              the actor's own trouble
        ├── PulsingTimeoutError             a deadline passed                   (also TimeoutError)
        └── PulsingUnsupportedError         the actor does not offer this

``err.state_changed`` says whether the callee may have run ("no", "maybe", "yes"), ``err.retry_safe`` whether a retry
cannot run it twice. An exception that an actor raises arrives as its own type, with the remote traceback as its
``__cause__``; one that cannot be rebuilt here arrives as `PulsingActorError` naming the type.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "ActorNotFoundError",
    "ActorStoppedError",
    "BindError",
    "CallCancelledError",
    "CodeNotFoundError",
    "ConfigError",
    "ConnectFailedError",
    "ConnectionLostError",
    "DeadlockError",
    "InvalidNameError",
    "JoinError",
    "MailboxFull",
    "NameNotFoundError",
    "NameTakenError",
    "NodeNotFoundError",
    "ProcessDiedError",
    "ProtocolError",
    "PulsingActorError",
    "PulsingBusinessError",
    "PulsingError",
    "PulsingRuntimeError",
    "PulsingSystemError",
    "PulsingTimeoutError",
    "PulsingUnsupportedError",
    "RefusedError",
    "RemoteTraceback",
    "ReplyTooLargeError",
    "SystemShutDownError",
    "TooLargeError",
]


class PulsingError(Exception):
    """Base of all errors of Pulsing."""

    state_changed: str = "maybe"
    """Whether the callee may have run: "no", "maybe" or "yes"."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message)

    @property
    def retry_safe(self) -> bool:
        """True when repeating the call cannot run it twice."""
        return self.state_changed == "no"

    def __reduce__(self) -> tuple[Any, ...]:
        # The default rebuilds an exception from `args`, which is only the text: constructors with more would not
        # take it.
        return _rebuild, (type(self), self.args, dict(self.__dict__))


def _rebuild(cls: type[PulsingError], args: tuple[Any, ...], state: dict[str, Any]) -> PulsingError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class PulsingRuntimeError(PulsingError):
    """The runtime could not do what was asked.

    Args:
        message: What went wrong and what to do about it.
        cause: The error behind it, if any.
    """

    state_changed = "no"

    def __init__(self, message: str, cause: BaseException | None = None) -> None:
        super().__init__(message)
        self.cause = cause


class ActorNotFoundError(PulsingRuntimeError):
    """No actor with this id lives on the node; resolve its name again."""


class MailboxFull(PulsingRuntimeError):  # noqa: N818 - the name design R3 gives it
    """The mailbox is full and the call was made with ``no_wait``."""


class DeadlockError(PulsingRuntimeError):
    """A serial actor would wait on itself; the message names the chain."""


class NameTakenError(PulsingRuntimeError):
    """The name has a holder: on this node, or anywhere if one of the two is unique. Stop it or choose another name."""


class InvalidNameError(PulsingRuntimeError, ValueError):
    """The text cannot be an actor name."""


class NameNotFoundError(PulsingRuntimeError, LookupError):
    """Nobody serves under this name."""


class NodeNotFoundError(PulsingRuntimeError, LookupError):
    """The node is not a member of the cluster."""


class CodeNotFoundError(PulsingRuntimeError, ImportError):
    """A node lacks code that an actor or a message needs; nothing ran there.

    Args:
        message: What is missing where, and the way out.
        module: Module that could not be imported, if known.
        node: The node that lacks it.
    """

    def __init__(self, message: str, *, module: str | None = None, node: str = "") -> None:
        super().__init__(message)
        self.module = module
        self.node = node


class ConnectFailedError(PulsingRuntimeError, ConnectionError):
    """The peer could not be dialled: nothing was sent."""


class ConnectionLostError(PulsingRuntimeError, ConnectionError):
    """The link broke while the call was out: the callee may have run."""

    state_changed = "maybe"


class RefusedError(PulsingRuntimeError, ConnectionError):
    """The peer refused the handshake, or we refused the peer's."""


class TooLargeError(PulsingRuntimeError):
    """A message is over a configured limit: it was not sent, or not taken. The text names the setting that moves it."""

    size: int = 0
    """What it measures, in bytes."""
    limit: int = 0
    """What it may measure, in bytes."""


class ReplyTooLargeError(TooLargeError):
    """An answer, or an item of a stream, is over a configured limit: the callee has run, its answer is lost."""

    state_changed = "yes"


class BindError(PulsingRuntimeError, OSError):
    """Cannot listen on the address, usually because another process does."""


class JoinError(PulsingRuntimeError):
    """No seed let us in within the join timeout; the message says what was tried."""


class ConfigError(PulsingRuntimeError, ValueError):
    """A setting, an address or an id does not make sense."""


class ProtocolError(PulsingRuntimeError):
    """A peer sent what the protocol does not allow."""

    state_changed = "maybe"


class CallCancelledError(PulsingRuntimeError):
    """The call was cancelled, and not by this caller."""

    state_changed = "maybe"


class SystemShutDownError(PulsingRuntimeError):
    """The actor system is shut down."""

    state_changed = "maybe"


class PulsingActorError(PulsingError):
    """An actor failed.

    Args:
        message: What went wrong.
        actor_name: Name or id of the actor, if known.
        cause: The error behind it, if any.
    """

    state_changed = "yes"
    type_name: str | None = None
    """Full name of the original exception's type when it could not be rebuilt here."""
    remote_traceback: str = ""
    """The traceback where it was raised, ready to print."""
    code: int = 0
    """The number the callee gave its error; an HTTP status in the worker protocol. 0 = none."""
    data: bytes = b""
    """The callee's own encoding of an error that could not be rebuilt here."""

    def __init__(self, message: str, actor_name: str | None = None, cause: BaseException | None = None) -> None:
        super().__init__(message)
        self.actor_name = actor_name
        self.cause = cause


class ActorStoppedError(PulsingActorError):
    """The actor stopped, or was restarted, before it answered; `retry_safe` where it had not begun with the message."""

    state_changed = "maybe"


class ProcessDiedError(PulsingActorError):
    """The process of an actor (``new_process=True``) ended before the actor was ready.

    Args:
        message: How it ended.
        actor_name: Name of the actor, else its class.
        exit_code: What it exited with; None: a signal ended it.
        signal: Number of the signal that ended it.
    """

    def __init__(
        self, message: str, actor_name: str | None = None, *, exit_code: int | None = None, signal: int | None = None
    ) -> None:
        super().__init__(message, actor_name)
        self.exit_code = exit_code
        self.signal = signal


class PulsingBusinessError(PulsingActorError):
    """The caller's mistake. It does not count as a failure of the actor, so supervision ignores it.

    Args:
        code: A number with meaning to the caller, e.g. 404.
        message: What is wrong with the request.
        details: Anything more that helps.
    """

    def __init__(self, code: int, message: str, details: str | None = None) -> None:
        super().__init__(f"[{code}] {message}")
        self.code = code
        self.message = message
        self.details = details


class PulsingSystemError(PulsingActorError):
    """The actor's own trouble.

    Args:
        error: What went wrong.
        recoverable: Whether trying again later may help.
    """

    def __init__(self, error: str, recoverable: bool = True) -> None:
        super().__init__(error)
        self.error = error
        self.recoverable = recoverable


class PulsingTimeoutError(PulsingActorError, TimeoutError):
    """A deadline passed: the callee may have run.

    Args:
        operation: What was waited for.
        duration_ms: The whole limit in milliseconds; 0 when unknown.
    """

    state_changed = "maybe"

    def __init__(self, operation: str, duration_ms: int = 0) -> None:
        text = f"no answer within {duration_ms / 1000:g} s: {operation}" if duration_ms else f"timed out: {operation}"
        super().__init__(text)
        self.operation = operation
        self.duration_ms = duration_ms


class PulsingUnsupportedError(PulsingActorError):
    """What was asked for is not offered.

    Args:
        operation: What was asked for.
    """

    state_changed = "no"

    def __init__(self, operation: str) -> None:
        super().__init__(operation)
        self.operation = operation


class RemoteTraceback(Exception):  # noqa: N818 - a carrier of text, not an error of its own
    """Carries the remote traceback as the ``__cause__`` of an exception that an actor raised elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text.rstrip()}"

"""Proxies: an actor's methods as if they were here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Generator
from typing import Any, NoReturn, Self

from pulsing.core._arguments import PLAIN_TYPES, ask_streaming, carries_stream
from pulsing.core._dispatch import HOOKS, methods_of
from pulsing.core._options import DEFAULT, PLAIN, Options, Timeout
from pulsing.core._outbound import ask_far
from pulsing.core._refs import OP_AUTO, OP_CALL, ActorRef
from pulsing.core._streams import StreamReader
from pulsing.core.messaging import Message

OP_GET = 2


def method_names(cls: Any) -> frozenset[str]:
    """The remote methods of a class or an ``@remote`` class."""
    raw = getattr(cls, "cls", cls)
    if not isinstance(raw, type):
        raise TypeError(f"as_type takes a class or an @remote class, not {cls!r}")
    return frozenset(methods_of(raw))


class ActorProxy:
    """Forwards method calls to an actor.

    ``await proxy.method(...)`` returns its result; ``async for item in proxy.method(...)`` iterates what a generator
    yields, and so does the awaited value of one. ``proxy.method.options(timeout=1.0)(...)`` and
    ``proxy.options(no_wait=True).method(...)`` change how calls are made. A typed proxy knows its methods: anything
    else is
    an AttributeError. `ask`, `tell`, `as_any`, `as_type`, `options`, `ref`, `actor_id`, `node_id` and `is_local` are
    the
    proxy's own.
    """

    # No slots: methods that were looked up stay in the instance.

    def __init__(self, ref: ActorRef, methods: Any = None, options: Options | None = None) -> None:
        self._ref = ref
        self._methods = None if methods is None else frozenset(methods)
        self._options = options or PLAIN

    def __setattr__(self, name: str, value: Any) -> None:
        # Here it would hide what the actor has. A method may be replaced, as tests do.
        if not name.startswith("_") and (self._methods is None or name not in self._methods):
            raise AttributeError(f"cannot set {name!r}: an actor's state is its own; call a method that sets it")
        super().__setattr__(name, value)

    @property
    def ref(self) -> ActorRef:
        """The reference behind the proxy."""
        return self._ref

    @property
    def actor_id(self) -> Any:
        """Id of the actor."""
        return self._ref.actor_id

    @property
    def node_id(self) -> Any:
        """Id of its node."""
        return self._ref.node_id

    def is_local(self) -> bool:
        """True when the actor lives on this node."""
        return self._ref.is_local()

    def options(
        self, *, timeout: Timeout = DEFAULT, no_wait: bool | None = None, idempotent: bool | None = None
    ) -> ActorProxy:
        """The same actor, called otherwise; what is not given stays as it is.

        Args:
            timeout: Seconds until the first answer; None for ever. At first: the system's (30 s).
            no_wait: Raise `MailboxFull` instead of waiting in a full mailbox.
            idempotent: Calls may run twice: one whose connection breaks is sent again, once, within its timeout.
                Without effect within a process.

        Raises:
            TypeError, ValueError: Not seconds above 0, not a flag.
        """
        return ActorProxy(self._ref, self._methods, self._options.changed(timeout, no_wait, idempotent))

    async def ask(
        self,
        msg: Any,
        *,
        timeout: Timeout = DEFAULT,
        no_wait: bool | None = None,
        idempotent: bool | None = None,
    ) -> Any:
        """Sends a message to the actor's `receive`, with the proxy's options but for those given: `ActorRef.ask`."""
        options = self._options
        if timeout is not DEFAULT or no_wait is not None or idempotent is not None:
            options = options.changed(timeout, no_wait, idempotent)
        return await self._ref.ask_with(msg, options)

    async def tell(self, first: Any, *args: Any, **kwargs: Any) -> None:
        """Sends without an answer: ``tell(message)`` to `receive`, ``tell("method", *args, **kwargs)`` to a method.

        A lone string is a method where there is one of that name and no `receive`.
        """
        if isinstance(first, str) and (args or kwargs or (self._methods is not None and first in self._methods)):
            await self._ref._tell(OP_CALL, first, args, kwargs, self._options)
        else:
            await self._ref._tell(OP_AUTO, "", (first,), {}, self._options)

    def as_any(self) -> ActorProxy:
        """A proxy that forwards any method name."""
        return ActorProxy(self._ref, None, self._options)

    def as_type(self, cls: Any) -> ActorProxy:
        """A proxy that knows the methods of `cls`, a class or an ``@remote`` class."""
        return ActorProxy(self._ref, method_names(cls), self._options)

    def __getattr__(self, name: str) -> BoundMethod:
        if name.startswith("_") or name in HOOKS:
            raise AttributeError(f"no method {name!r}: names with an underscore and hooks are not called from outside")
        if self._methods is not None and name not in self._methods:
            raise AttributeError(f"no method {name!r}; the actor has: {', '.join(sorted(self._methods)) or 'none'}")
        method = self.__dict__[name] = BoundMethod(self._ref, name, self._options)
        return method

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *(self._methods or ())})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActorProxy) and self._ref == other._ref

    def __hash__(self) -> int:
        return hash(self._ref)

    def __repr__(self) -> str:
        return f"<ActorProxy for {self._ref!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return ActorProxy, (self._ref, self._methods)


OWN = frozenset(name for name in vars(ActorProxy) if not name.startswith("_"))
"""What of a proxy is its own: methods of an actor that are called so cannot be called through it."""


class BoundMethod:
    """One method of one actor. Call it; or, on an untyped proxy, await it to read a public attribute of that name."""

    __slots__ = ("_name", "_options", "_ref")

    def __init__(self, ref: ActorRef, name: str, options: Options) -> None:
        self._ref = ref
        self._name = name
        self._options = options

    def __call__(self, *args: Any, **kwargs: Any) -> MethodCall:
        # Here and not in a function of its own: every call passes, and few have more than plain values.
        for one in args:
            if type(one) not in PLAIN_TYPES:
                return self._with_objects(args, kwargs)
        if kwargs:
            return self._with_objects(args, kwargs)
        ref = self._ref
        if not ref._local:
            return MethodCall(ask_far(ref, OP_CALL, self._name, args, kwargs, self._options), self._name)
        return MethodCall(ref._ask(OP_CALL, self._name, args, kwargs, self._options), self._name)

    def _with_objects(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MethodCall:
        ask = ask_streaming if carries_stream(args, kwargs) else ActorRef._ask
        return MethodCall(ask(self._ref, OP_CALL, self._name, args, kwargs, self._options), self._name)

    def options(
        self, *, timeout: Timeout = DEFAULT, no_wait: bool | None = None, idempotent: bool | None = None
    ) -> BoundMethod:
        """The same method, called otherwise; see `ActorProxy.options`."""
        return BoundMethod(self._ref, self._name, self._options.changed(timeout, no_wait, idempotent))

    def tell(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, None]:
        """Calls the method without waiting for an answer."""
        return self._ref._tell(OP_CALL, self._name, args, kwargs, self._options)

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._ref._ask(OP_GET, self._name, (), {}, self._options).__await__()

    def __repr__(self) -> str:
        return f"<method {self._name} of {self._ref!r}>"


class MethodCall(Coroutine[Any, Any, Any]):
    """A call that starts when it is awaited or iterated. A coroutine: `create_task`, `gather` and `wait_for` take
    it.
    """

    __slots__ = ("_coroutine", "_name")

    _pulsing_streams = True

    def __init__(self, coroutine: Coroutine[Any, Any, Any], name: str) -> None:
        # Its name is what Python's "was never awaited" warning shows.
        named: Any = coroutine
        named.__qualname__ = name
        self._coroutine = coroutine
        self._name = name

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        """Part of being a coroutine."""
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        """Part of being a coroutine."""
        return self._coroutine.throw(*error)

    def close(self) -> None:
        """Part of being a coroutine."""
        self._coroutine.close()

    def __aiter__(self) -> CallItems:
        return CallItems(self._coroutine, self._name)


class CallItems(AsyncIterator[Any]):
    """The items of a call that answers with a stream; starts it at the first item."""

    __slots__ = ("_call", "_name", "_stream")

    def __init__(self, call: Coroutine[Any, Any, Any], name: str) -> None:
        self._call: Coroutine[Any, Any, Any] | None = call
        self._name = name
        self._stream: Any = None

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Coroutine[Any, Any, Any]:
        # One coroutine an item, not two.
        return self._first() if self._call is not None or self._stream is None else self._stream.__anext__()

    async def _first(self) -> Any:
        if self._call is not None:
            call, self._call = self._call, None
            result = await call
            if isinstance(result, Message) and result.is_stream:
                result = result.stream_reader()
            if not isinstance(result, StreamReader):
                self._not_a_stream(result)
            self._stream = result
        if self._stream is None:
            raise StopAsyncIteration
        return await self._stream.__anext__()

    def _not_a_stream(self, result: Any) -> NoReturn:
        raise TypeError(f"{self._name} answered with a {type(result).__name__}, not a stream: await it instead")

    async def aclose(self) -> None:
        """Gives up the rest and ends the producer; idempotent."""
        if self._call is not None:
            self._call.close()
            self._call = None
        if self._stream is not None:
            await self._stream.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def as_any(ref: ActorRef | ActorProxy) -> ActorProxy:
    """A proxy on `ref` that forwards any method name."""
    return ref.as_any()

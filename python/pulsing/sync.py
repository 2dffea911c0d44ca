"""Pulsing for code without an event loop: scripts, notebooks, threads.

::

    import pulsing as pul

    pul.sync.init()
    counter = pul.sync.spawn(Counter, 5, name="counter")
    counter.add(2)                       # blocks; returns 7
    for n in counter.count_down():       # a stream
        print(n)
    pul.sync.shutdown()                  # or just exit

The actors live on an event loop in a thread of its own (uvloop's where that is installed); or, when the process's own
system was started by ``await pul.init()``, on that loop. Any number of threads may call at once. A thread that runs an
event loop may not: a blocking call would stop that loop, and is refused in words. Ctrl-C cancels the call that waits.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, ParamSpec, Self, TypeVar, cast

from pulsing.core import _global
from pulsing.core._ids import ActorId, NodeId
from pulsing.core._lifecycle import check_fork
from pulsing.core._loop_thread import LoopThread
from pulsing.core._options import DEFAULT, Timeout
from pulsing.core._proxy import ActorProxy, BoundMethod
from pulsing.core._refs import ActorRef
from pulsing.core._remote import ActorClass
from pulsing.core._streams import WINDOW, StreamReader
from pulsing.core._system import ActorSystem
from pulsing.core._threads import refuse_on_a_loop, wait_for
from pulsing.core._watch import Ended, Watch
from pulsing.core._watch import link as _link
from pulsing.core._watch import unlink as _unlink
from pulsing.core.messaging import Message
from pulsing.exceptions import PulsingRuntimeError
from pulsing.integrations.ray import init_inside_ray as _inside_ray
from pulsing.integrations.torchrun import init_inside_torchrun as _inside_torchrun

__all__ = [
    "Method",
    "Proxy",
    "Stream",
    "System",
    "drain",
    "init",
    "init_inside_ray",
    "init_inside_torchrun",
    "kill",
    "link",
    "proxy",
    "refer",
    "resolve",
    "run",
    "shutdown",
    "spawn",
    "stop",
    "unlink",
    "watch",
]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_lock = threading.Lock()
_thread: LoopThread | None = None


def _like(_: Callable[P, Any]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Gives a function the parameters of another."""
    return lambda function: cast("Callable[P, R]", function)


@_like(_global.init)
def init(*args: Any, **kwargs: Any) -> System:
    """`pul.init` without an event loop: starts the process's own system, or returns it if it runs with the same
    arguments, which are those of `pul.init`.

    Raises:
        PulsingRuntimeError: It runs with other arguments; or this thread runs an event loop.
        BindError, JoinError, RefusedError, ConfigError: As `pul.init`.
    """
    return _begin(lambda: _global.init(*args, **kwargs))


@_like(_inside_ray)
def init_inside_ray(*args: Any, **kwargs: Any) -> System:
    """`pul.init_inside_ray` without an event loop: for Ray's tasks, threaded actors and drivers."""
    return _begin(lambda: _inside_ray(*args, **kwargs))


@_like(_inside_torchrun)
def init_inside_torchrun(*args: Any, **kwargs: Any) -> System:
    """`pul.init_inside_torchrun` without an event loop."""
    return _begin(lambda: _inside_torchrun(*args, **kwargs))


def _begin(start: Callable[[], Coroutine[Any, Any, ActorSystem]]) -> System:
    """Starts the process's own system on a loop of its own, or on the loop of the one that runs."""
    global _thread  # noqa: PLW0603 - the process has one
    refuse_on_a_loop()
    check_fork()
    with _lock:
        running = _global._current()
        if running is not None:
            return System(wait_for(running.loop, start))
        if _thread is not None:
            _thread.stop()
        thread = _thread = LoopThread()
        try:
            system = wait_for(thread.loop, start)
        except BaseException:
            thread.stop()
            _thread = None
            raise
        thread.at_exit(lambda: _global.shutdown(0.5))
        return System(system)


def shutdown(grace: float | None = None) -> None:
    """Ends the process's own system; nothing happens when there is none.

    Args:
        grace: Seconds that running handlers get to finish.
    """
    global _thread
    refuse_on_a_loop()
    with _lock:
        system = _global._current()
        if system is not None:
            wait_for(system.loop, lambda: _global.shutdown(grace))
        thread, _thread = _thread, None
        if thread is not None:
            thread.stop()


def _system() -> ActorSystem:
    check_fork()
    system = _global._current()
    if system is None:
        raise PulsingRuntimeError("Actor system not initialized: call pul.sync.init() first")
    return system


def run(function: Callable[..., Coroutine[Any, Any, T]], *args: Any, **kwargs: Any) -> T:
    """Runs ``function(*args, **kwargs)``, any coroutine function, on the loop of the process's own system, and waits.

    ``pul.sync.run(pul.get_system().members)``
    """
    return wait_for(_system().loop, lambda: function(*args, **kwargs))


def spawn(actor: Any, *args: Any, **kwargs: Any) -> Proxy:
    """Starts an actor and returns when it is ready.

    Args:
        actor: An ``@remote`` class; or what `pul.spawn` takes: an instance, or a zero-argument factory of one.
        *args: For the constructor of an ``@remote`` class.
        **kwargs: For it, and the options of ``Cls.spawn``; else those of `pul.spawn`.

    Raises:
        Exception: What the constructor or `on_start` raised.
        TypeError: Constructor arguments for what is no ``@remote`` class.
        NameTakenError, ValueError: As ``Cls.spawn`` and `pul.spawn`.
    """
    args, kwargs = _theirs(args, kwargs)
    if isinstance(actor, ActorClass):
        return Proxy(run(actor.spawn, *args, **kwargs))
    if args:
        raise TypeError(f"constructor arguments go with an @pul.remote class only, not with {actor!r}: use a lambda")
    return Proxy(run(_global.spawn, actor, **kwargs).as_any())


def resolve(
    name: str, *, cls: Any = None, node_id: str | int | NodeId | None = None, timeout: float | None = None
) -> Proxy:
    """`pul.resolve`: one actor that serves under `name`.

    Raises:
        NameNotFoundError: Nobody serves under it, for `timeout` seconds if given.
    """
    return Proxy(run(_global.resolve, name, cls=cls, node_id=node_id, timeout=timeout))


def refer(actorid: ActorId | str) -> Proxy:
    """`pul.refer`: the actor with this id, wherever in the cluster it lives.

    Raises:
        ConfigError: The text is no id.
        ActorNotFoundError: No node knows it.
    """
    return Proxy(run(_global.refer, actorid).as_any())


def drain(actor: str | Proxy) -> None:
    """Lets an actor finish what waits and runs, and ends it; see `ActorSystem.drain`."""
    run(_system().drain, _which(actor))


def stop(actor: str | Proxy, grace: float | None = None) -> None:
    """Stops an actor, by name or proxy, on whatever node it lives; an unknown one is a warning in the log.

    Args:
        actor: Which.
        grace: Seconds that running handlers get to finish.
    """
    run(_system().stop, _which(actor), grace)


def kill(actor: str | Proxy) -> None:
    """Ends an actor at once; see `ActorSystem.kill`."""
    run(_system().kill, _which(actor))


def watch(actor: ActorProxy | ActorRef | Proxy, timeout: float | None = None) -> Ended:
    """Waits until an actor has ended, and says how; see `pul.watch`. What had ended before is told at once.

    Args:
        actor: Which.
        timeout: Seconds to wait; None for ever.

    Raises:
        TimeoutError: It lives on.
    """
    ref = proxy(actor).ref

    async def end() -> Ended:
        async with asyncio.timeout(timeout), Watch(ref) as ended:
            return await ended

    return wait_for(ref._system.loop, end)


def link(one: ActorProxy | ActorRef | Proxy, other: ActorProxy | ActorRef | Proxy) -> None:
    """Ties the fates of two actors; see `pul.link`."""
    run(_link, proxy(one).ref, proxy(other).ref)


def unlink(one: ActorProxy | ActorRef | Proxy, other: ActorProxy | ActorRef | Proxy) -> None:
    """Undoes `link`."""
    run(_unlink, proxy(one).ref, proxy(other).ref)


def _which(actor: str | Proxy) -> str | ActorRef:
    return actor.ref if isinstance(actor, Proxy) else actor


def proxy(actor: ActorProxy | ActorRef | Proxy) -> Proxy:
    """A blocking proxy of an actor, for a thread that was given an awaiting one."""
    if isinstance(actor, Proxy):
        return actor
    return Proxy(actor.as_any() if isinstance(actor, ActorRef) else actor)


class System:
    """The process's own system, as `init` returns it. In a ``with`` block it is shut down at the end."""

    __slots__ = ("system",)

    def __init__(self, system: ActorSystem) -> None:
        self.system = system
        """The system itself; its coroutine methods go through `run`."""

    @property
    def addr(self) -> str:
        """Address that others reach this node at, ``ip:port``."""
        return self.system.addr

    @property
    def node_id(self) -> NodeId:
        """Id of this node."""
        return self.system.node_id

    def members(self) -> list[dict[str, Any]]:
        """The nodes of the cluster: node_id (hex), addr, state, status, me."""
        return wait_for(self.system.loop, self.system.members)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        shutdown()

    def __repr__(self) -> str:
        return f"<sync {self.system!r}>"


class Proxy:
    """An actor whose methods block until they have answered.

    A method that answers with a stream returns a `Stream`. ``proxy.method.options(timeout=1.0)(...)`` and
    ``proxy.options(no_wait=True).method(...)`` change how calls are made. Generators among the arguments stream to the
    callee; they run on the event loop's thread.
    """

    __slots__ = ("_proxy",)

    def __init__(self, awaiting: ActorProxy) -> None:
        self._proxy = awaiting

    @property
    def ref(self) -> ActorRef:
        """The reference behind the proxy."""
        return self._proxy.ref

    @property
    def awaiting(self) -> ActorProxy:
        """The same actor for code with an event loop."""
        return self._proxy

    def options(
        self, *, timeout: Timeout = DEFAULT, no_wait: bool | None = None, idempotent: bool | None = None
    ) -> Proxy:
        """The same actor, called otherwise; see `ActorProxy.options`."""
        return Proxy(self._proxy.options(timeout=timeout, no_wait=no_wait, idempotent=idempotent))

    def ask(
        self,
        msg: Any,
        *,
        timeout: Timeout = DEFAULT,
        no_wait: bool | None = None,
        idempotent: bool | None = None,
    ) -> Any:
        """Sends a message to the actor's `receive` and returns its answer; see `ActorProxy.ask`."""
        sent = _their(msg)
        return _wait(self.ref, lambda: self._proxy.ask(sent, timeout=timeout, no_wait=no_wait, idempotent=idempotent))

    def tell(self, first: Any, *args: Any, **kwargs: Any) -> None:
        """Sends without an answer, and returns when there is a place for it; see `ActorProxy.tell`."""
        args, kwargs = _theirs((first, *args), kwargs)
        _wait(self.ref, lambda: self._proxy.tell(*args, **kwargs))

    def as_any(self) -> Proxy:
        """A proxy that forwards any method name."""
        return Proxy(self._proxy.as_any())

    def as_type(self, cls: Any) -> Proxy:
        """A proxy that knows the methods of `cls`, a class or an ``@remote`` class."""
        return Proxy(self._proxy.as_type(cls))

    def __getattr__(self, name: str) -> Method:
        return Method(self.ref, getattr(self._proxy, name))

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self._proxy)})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Proxy) and self._proxy == other._proxy

    def __hash__(self) -> int:
        return hash(self._proxy)

    def __repr__(self) -> str:
        return f"<sync {self._proxy!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        # Whoever receives it may be an actor on an event loop.
        return self._proxy.__reduce__()


class Method:
    """One method of one actor: call it."""

    __slots__ = ("_method", "_ref")

    def __init__(self, ref: ActorRef, method: BoundMethod) -> None:
        self._ref = ref
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _theirs(args, kwargs)
        return _wait(self._ref, lambda: self._method(*args, **kwargs))

    def options(
        self, *, timeout: Timeout = DEFAULT, no_wait: bool | None = None, idempotent: bool | None = None
    ) -> Method:
        """The same method, called otherwise; see `ActorProxy.options`."""
        return Method(self._ref, self._method.options(timeout=timeout, no_wait=no_wait, idempotent=idempotent))

    def tell(self, *args: Any, **kwargs: Any) -> None:
        """Calls the method without waiting for an answer."""
        args, kwargs = _theirs(args, kwargs)
        _wait(self._ref, lambda: self._method.tell(*args, **kwargs))

    def get(self) -> Any:
        """Reads the public attribute of this name."""

        async def read() -> Any:
            return await self._method

        return _wait(self._ref, read)

    def __repr__(self) -> str:
        return f"<sync {self._method!r}>"


class Stream(Iterator[Any]):
    """The items of a stream; each step blocks until there is one.

    Leaving the loop early: `close` it (or use ``with``), or drop it; the producer's ``finally`` runs promptly.

    Attributes:
        msg_type: Type of the message whose body it is; "" for a bare generator.
    """

    def __init__(self, ref: ActorRef, reader: StreamReader, msg_type: str = "") -> None:
        self.msg_type = msg_type
        self._ref = ref
        self._reader = reader
        self._items: list[Any] = []
        """Arrived, last one first."""

    def __next__(self) -> Any:
        if not self._items:
            self._items = wait_for(self._ref._system.loop, self._some)
            if not self._items:
                raise StopIteration
        return self._items.pop()

    async def _some(self) -> list[Any]:
        # One trip to the loop's thread for all that has arrived.
        reader = self._reader
        items = []
        async for item in reader:
            items.append(item)
            if not reader.buffered or len(items) == WINDOW:
                break
        items.reverse()
        return items

    def close(self) -> None:
        """Gives up the rest of the stream and ends its producer; idempotent."""
        self._items.clear()
        wait_for(self._ref._system.loop, self._reader.aclose)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<sync Stream of {self._ref!r}>"


def _wait(ref: ActorRef, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    check_fork()
    result = wait_for(ref._system.loop, call)
    if isinstance(result, StreamReader):
        return Stream(ref, result)
    if isinstance(result, Message) and result.is_stream:
        reader = result.stream_reader()
        if isinstance(reader, StreamReader):
            return Stream(ref, reader, result.msg_type)
    if isinstance(result, (ActorProxy, ActorRef)):
        return proxy(result)
    return result


def _theirs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments as an actor uses them, which lives on a loop."""
    return tuple(_their(one) for one in args), {key: _their(one) for key, one in kwargs.items()}


def _their(value: Any) -> Any:
    if isinstance(value, Proxy):
        return value.awaiting
    return value._reader if isinstance(value, Stream) else value

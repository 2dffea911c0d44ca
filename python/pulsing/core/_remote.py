"""``@remote``: a class whose instances live as actors."""

from __future__ import annotations

import importlib
import inspect
import sys
import warnings
import weakref
from typing import Any, overload

from pulsing.core._ids import NodeId
from pulsing.core._proxy import OWN, ActorProxy, method_names
from pulsing.core._supervision import RestartPolicy, check_limits
from pulsing.exceptions import CodeNotFoundError, PulsingRuntimeError

_wrappers: weakref.WeakValueDictionary[str, ActorClass] = weakref.WeakValueDictionary()


class ActorClass:
    """What ``@remote`` makes of a class.

    ``await Cls.spawn(...)`` starts an actor; ``Cls(...)`` makes a plain instance; everything else of the class is
    reachable
    through it.

    Attributes:
        cls: The class itself.
        policy: How its actors are supervised.
    """

    def __init__(
        self, cls: type, policy: RestartPolicy, mailbox: int | None = None, max_concurrency: int | None = None
    ) -> None:
        self.cls = cls
        self.policy = policy
        self._mailbox = mailbox
        self._max_concurrency = max_concurrency
        self.__wrapped__ = cls
        self.__name__ = cls.__name__
        self.__qualname__ = cls.__qualname__
        self.__module__ = cls.__module__
        self.__doc__ = cls.__doc__
        _wrappers[_path(cls)] = self

    async def spawn(
        self,
        *args: Any,
        system: Any = None,
        name: str | None = None,
        public: bool | None = None,
        unique: bool = False,
        placement: str | int | NodeId = "local",
        mailbox: int | None = None,
        max_concurrency: int | None = None,
        new_process: bool = False,
        **kwargs: Any,
    ) -> ActorProxy:
        """Starts an actor and returns its typed proxy when it is ready.

        Args:
            *args: For the constructor.
            system: Where; default: the global system of `pul.init`.
            name: Name to serve under; none: reachable through the returned proxy only.
            public: Publish the name in the cluster; default: when there is one.
            unique: The name is for this actor alone in the whole cluster. Of claims made on several nodes at once,
                or while they were parted, the oldest stands, and the other actor is stopped.
            placement: "local"; "remote": the other Python nodes in turn (here, with a warning, when there is none); a
                node id; or the ``host:port`` of a member.
            mailbox: Messages that may wait (16 to 1,000,000). Default: the decorator's, else the system's.
            max_concurrency: Handlers that may interleave. Default: likewise.
            new_process: It lives in a process of its own, with an interpreter and a GIL of its own, which ends with it,
                and with the node that started it. A restart policy starts a process that died again, under the same
                name, which it needs then.
            **kwargs: For the constructor. Its parameters that are called as one of the above are given by position.

        Raises:
            Exception: What the constructor or `on_start` raised, there as here.
            NameTakenError: The name has a holder on that node; or anywhere, if that holder or this actor is unique.
            ConfigError: A unique actor without a public name.
            ProcessDiedError: The new process ended before the actor was ready.
            NodeNotFoundError: The placement is no living member.
            CodeNotFoundError: The other node lacks code that the actor needs.
            ValueError: A placement that is none, or numbers that make no sense.
        """
        where = _where(system)
        ref = await where.spawn_class(
            self,
            args,
            kwargs,
            name=name,
            public=public,
            unique=unique,
            placement=placement,
            mailbox=mailbox,
            max_concurrency=max_concurrency,
            new_process=new_process,
        )
        return ActorProxy(ref, method_names(self.cls))

    def limits(self, mailbox: int | None, max_concurrency: int | None) -> tuple[int | None, int | None]:
        """``(mailbox, max_concurrency)`` of a spawn: what it says, else what the decorator said."""
        return (
            self._mailbox if mailbox is None else mailbox,
            self._max_concurrency if max_concurrency is None else max_concurrency,
        )

    async def local(
        self, system: Any, *args: Any, name: str | None = None, public: bool | None = None, **kwargs: Any
    ) -> ActorProxy:
        """`spawn` on `system`'s node, with its other keyword arguments, too."""
        return await self.spawn(*args, system=system, name=name, public=public, **kwargs)

    async def remote(
        self, system: Any, *args: Any, name: str | None = None, public: bool | None = None, **kwargs: Any
    ) -> ActorProxy:
        """`spawn` on some other node of `system`'s cluster, with its other keyword arguments, too."""
        return await self.spawn(*args, system=system, name=name, public=public, placement="remote", **kwargs)

    async def resolve(
        self,
        name: str,
        *,
        system: Any = None,
        node_id: str | int | NodeId | None = None,
        timeout: float | None = None,
    ) -> ActorProxy:
        """A typed proxy of the actor that serves under `name`.

        Args:
            name: Its name.
            system: Where to look; default: the global system.
            node_id: Only on this node.
            timeout: Seconds to wait for the name to appear; None: it must be known now.

        Raises:
            NameNotFoundError: Nobody serves under it.
        """
        where = _where(system)
        found: ActorProxy = await where.resolve(name, cls=self, node_id=node_id, timeout=timeout)
        return found

    def proxy(self, ref: Any) -> ActorProxy:
        """A typed proxy on a reference."""
        return ActorProxy(getattr(ref, "ref", ref), method_names(self.cls))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.cls(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in {"cls", "__wrapped__"}:
            raise AttributeError(name)
        return getattr(self.cls, name)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self.cls)

    def __subclasscheck__(self, subclass: Any) -> bool:
        return issubclass(getattr(subclass, "cls", subclass), self.cls)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (self.cls,)

    def __repr__(self) -> str:
        return f"<ActorClass {_path(self.cls)}>"

    def __reduce__(self) -> Any:
        from pulsing.core._pickle import is_main

        if is_main(self.cls):
            return ActorClass, (self.cls, self.policy, self._mailbox, self._max_concurrency)
        return import_class, (self.cls.__module__, self.cls.__qualname__)


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _where(system: Any) -> Any:
    if system is None:
        from pulsing.core._global import get_system

        return get_system()
    from pulsing.core._system import ActorSystem

    if not isinstance(system, ActorSystem):
        raise TypeError(f"system={system!r}: expected what `await pul.init()` or `await pul.actor_system()` returned")
    return system


def wrapper_of(cls: type) -> ActorClass | None:
    """The `ActorClass` of a class, if ``@remote`` was put on it."""
    wrapper = _wrappers.get(_path(cls))
    return wrapper if wrapper is not None and wrapper.cls is cls else None


def registered() -> list[str]:
    """Import paths of the ``@remote`` classes of this process."""
    return sorted(_wrappers)


def import_class(module: str, qualname: str, node: str = "") -> ActorClass:
    """The ``@remote`` class at an import path; a plain class is wrapped.

    Args:
        module: Where it is.
        qualname: What it is called there.
        node: How errors name this node; empty: "this node".

    Raises:
        CodeNotFoundError: It cannot be imported here.
        PulsingRuntimeError: It is no class.
    """
    try:
        found: Any = sys.modules.get(module) or importlib.import_module(module)
        for part in qualname.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise CodeNotFoundError(
            f"cannot import {module}.{qualname} on {f'node {node}' if node else 'this node'}: {error}; install module "
            f"{getattr(error, 'name', None) or module!r} there too, or define the class in the main program: from "
            "there it travels by value",
            module=module,
            node=node,
        ) from error
    if isinstance(found, ActorClass):
        return found
    if isinstance(found, type):
        return ActorClass(found, RestartPolicy())
    raise PulsingRuntimeError(f"{module}.{qualname} is no class but a {type(found).__name__}")


@overload
def remote(cls: type, /) -> ActorClass: ...
@overload
def remote(
    *,
    restart_policy: str = "never",
    max_restarts: int | None = None,
    min_backoff: float | None = None,
    max_backoff: float | None = None,
    restart_window: float | None = None,
    mailbox: int | None = None,
    max_concurrency: int | None = None,
) -> Any: ...
def remote(
    cls: type | None = None,
    /,
    *,
    restart_policy: str = "never",
    max_restarts: int | None = None,
    min_backoff: float | None = None,
    max_backoff: float | None = None,
    restart_window: float | None = None,
    mailbox: int | None = None,
    max_concurrency: int | None = None,
) -> Any:
    """Makes a class an actor class.

    Args:
        cls: The class, when used without parentheses.
        restart_policy: "never", "on_failure" or "always".
        max_restarts: Restarts allowed within `restart_window`; default: the system's, and so are the next three.
        min_backoff: Seconds before the first restart of a series.
        max_backoff: Longest wait in seconds.
        restart_window: Seconds over which restarts are counted.
        mailbox: Messages that may wait (16 to 1,000,000); default: the system's.
        max_concurrency: Handlers that may interleave; default: the system's.

    Raises:
        TypeError: Put on something that is no class.
        ValueError: A policy or numbers that make no sense.
    """
    policy = RestartPolicy.of(restart_policy, max_restarts, min_backoff, max_backoff, restart_window)
    check_limits(mailbox, max_concurrency)

    def wrap(target: type) -> ActorClass:
        if not inspect.isclass(target):
            raise TypeError(f"@pul.remote goes on a class, not on {target!r}")
        hidden = sorted(OWN & method_names(target))
        if hidden:
            warnings.warn(
                f"{target.__qualname__}: proxies have {', '.join(hidden)} of their own; methods called so cannot be "
                "called from outside",
                stacklevel=2 if cls is None else 3,
            )
        return ActorClass(target, policy, mailbox, max_concurrency)

    return wrap if cls is None else wrap(cls)

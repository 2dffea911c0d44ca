"""The actor runtime: actors, proxies, messages, systems."""

from pulsing.core._actor import Actor
from pulsing.core._arguments import ArgumentStream
from pulsing.core._config import SystemConfig
from pulsing.core._dispatch import blocking, serial
from pulsing.core._global import (
    actor_system,
    drain,
    get_system,
    init,
    is_initialized,
    kill,
    mount,
    refer,
    resolve,
    shutdown,
    spawn,
    stop,
    unmount,
    watch_name,
)
from pulsing.core._ids import ActorId, NodeId
from pulsing.core._inbound import InboundCall
from pulsing.core._name_watch import NameChange, NameWatch
from pulsing.core._propagate import propagate, trace, traceparent
from pulsing.core._proxy import ActorProxy, as_any
from pulsing.core._refs import ActorRef
from pulsing.core._remote import ActorClass, remote
from pulsing.core._service import (
    PYTHON_ACTOR_SERVICE_NAME,
    PythonActorService,
    PythonActorServiceProxy,
    SystemActorProxy,
    get_python_actor_service,
    get_system_actor,
)
from pulsing.core._system import ActorSystem
from pulsing.core._watch import Ended, Watch, link, unlink, watch
from pulsing.core.helpers import (
    DEFAULT_ASK_TIMEOUT,
    ask_with_timeout,
    get_metrics,
    get_node_info,
    health_check,
    list_actors,
    ping,
    run_until_signal,
    spawn_and_run,
    tell_with_timeout,
)
from pulsing.core.messaging import Message, StreamMessage, StreamReader, StreamWriter
from pulsing.exceptions import PulsingActorError, PulsingError, PulsingRuntimeError

RemoteClass = ActorClass

__all__ = [
    "DEFAULT_ASK_TIMEOUT",
    "PYTHON_ACTOR_SERVICE_NAME",
    "Actor",
    "ActorClass",
    "ActorId",
    "ActorProxy",
    "ActorRef",
    "ActorSystem",
    "ArgumentStream",
    "Ended",
    "InboundCall",
    "Message",
    "NameChange",
    "NameWatch",
    "NodeId",
    "PulsingActorError",
    "PulsingError",
    "PulsingRuntimeError",
    "PythonActorService",
    "PythonActorServiceProxy",
    "RemoteClass",
    "StreamMessage",
    "StreamReader",
    "StreamWriter",
    "SystemActorProxy",
    "SystemConfig",
    "Watch",
    "actor_system",
    "as_any",
    "ask_with_timeout",
    "blocking",
    "drain",
    "get_metrics",
    "get_node_info",
    "get_python_actor_service",
    "get_system",
    "get_system_actor",
    "health_check",
    "init",
    "is_initialized",
    "kill",
    "link",
    "list_actors",
    "mount",
    "ping",
    "propagate",
    "refer",
    "remote",
    "resolve",
    "run_until_signal",
    "serial",
    "shutdown",
    "spawn",
    "spawn_and_run",
    "stop",
    "tell_with_timeout",
    "trace",
    "traceparent",
    "unlink",
    "unmount",
    "watch",
    "watch_name",
]

"""Fleets: how engines, routers and other commands are launched is said in one spec, and known nowhere else."""

from pulsing.fleet._cell import Backend
from pulsing.fleet._commands import (
    llama_cpp_command,
    pulsing_router_command,
    session_server_command,
    sglang_command,
    sglang_router_command,
    transformers_command,
    vllm_command,
)
from pulsing.fleet._deployment import Deployment, Join, Pool, Ready, Restart, Stop
from pulsing.fleet._engines import ServerGroup, inference_engine
from pulsing.fleet._join import engine_worker_command
from pulsing.fleet._launcher import FleetRunningError, Launcher
from pulsing.fleet._load import FleetFileError, load
from pulsing.fleet._local import LocalBackend
from pulsing.fleet._model import (
    CommandWorkerSpec,
    Half,
    HostAndPort,
    LaunchCommandContext,
    NamedHostAndPorts,
    PortInfo,
    SchedulingSpec,
)
from pulsing.fleet._ports import PortHolder, PortTakenError
from pulsing.fleet._services import command, router, session_server
from pulsing.fleet._status import CellStatus

__all__ = [
    "Backend",
    "CellStatus",
    "CommandWorkerSpec",
    "Deployment",
    "FleetFileError",
    "FleetRunningError",
    "Half",
    "HostAndPort",
    "Join",
    "LaunchCommandContext",
    "Launcher",
    "LocalBackend",
    "NamedHostAndPorts",
    "Pool",
    "PortHolder",
    "PortInfo",
    "PortTakenError",
    "Ready",
    "Restart",
    "SchedulingSpec",
    "ServerGroup",
    "Stop",
    "command",
    "engine_worker_command",
    "inference_engine",
    "llama_cpp_command",
    "load",
    "pulsing_router_command",
    "router",
    "session_server",
    "session_server_command",
    "sglang_command",
    "sglang_router_command",
    "transformers_command",
    "vllm_command",
]

"""The start of a node: what its settings come to in Rust."""

from __future__ import annotations

import asyncio
import os

from pulsing import _core
from pulsing.core._bridge import LoopBridge
from pulsing.core._config import SystemConfig
from pulsing.core._errors import from_core
from pulsing.core._settings import DEBUG_COPY, flag_of, net_threads


async def start_core(config: SystemConfig, bridge: LoopBridge, host: _core.TestHost | None) -> _core.System:
    """Starts the Rust half of a node, and returns when it has joined.

    Args:
        config: The node's settings.
        bridge: The bridge of the loop it belongs to.
        host: Where it runs on a network in memory; None: on this machine's.

    Raises:
        BindError, JoinError, RefusedError, ConfigError: As they say.
    """
    # Here, where nothing runs yet that would have to be stopped again.
    flag_of(DEBUG_COPY, os.environ)
    starting: _core.Starting | None = None
    threads = net_threads(os.environ)

    def start(token: int) -> None:
        nonlocal starting
        starting = _core.System.start(
            bridge.core,
            token,
            addr=config.addr,
            advertise=config.advertise,
            seeds=list(config.seeds),
            cluster=config.cluster,
            passphrase=config.passphrase,
            cert=config.cert,
            key=config.key,
            ca=config.ca,
            insecure=config.insecure,
            secret_file=config.secret_file,
            join_timeout=config.join_timeout,
            observe=config.observe,
            observe_addr=config.observe_addr,
            handshake_timeout=config.handshake_timeout,
            max_handshakes=config.max_handshakes,
            max_observers=config.max_observers,
            max_message=config.max_message,
            threads=threads,
            preset=None if config.preset == "auto" else config.preset,
            stream_idle=config.stream_idle,
            host=host,
        )

    try:
        core = await bridge.run(start, orphan=lambda late: late.shutdown(bridge.core, bridge.core.token()))
    except _core.CoreError as error:
        raise from_core(error.args) from None
    except asyncio.CancelledError:
        # It would dial its seeds for as long as the process lives.
        if starting is not None:
            starting.cancel()
        raise
    started: _core.System = core
    return started

"""The settings of a node in a program: one table, checked values, and what `pul.init` takes from where."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import pathlib
import typing
from typing import Any

import pytest
from runtime_util import local_system, run

import pulsing as pul
from pulsing.core._bridge import bridge_of
from pulsing.core._config import NodeSettings
from pulsing.core._settings import SETTINGS
from pulsing.exceptions import ConfigError


@pul.remote
class Plain:
    async def on_start(self) -> None:
        return None

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def test_the_table_the_config_and_the_arguments_agree() -> None:
    fields = {one.name: one.default for one in dataclasses.fields(pul.SystemConfig) if one.name != "passphrase"}
    assert fields == {setting.name: setting.default for setting in SETTINGS if setting.field}
    hints = typing.get_type_hints(pul.SystemConfig)
    taken = {name: kind for name, kind in hints.items() if name not in {"addr", "seeds", "passphrase"}}
    assert typing.get_type_hints(NodeSettings) == taken


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mailbox": 3}, "mailbox=3: expected 16 to 1000000 messages"),
        ({"mailbox": "many"}, "mailbox='many': expected 16 to 1000000 messages"),
        ({"mailbox": True}, "mailbox=True"),
        ({"max_concurrency": 0}, "max_concurrency=0: expected 1 to 2147483647"),
        ({"default_timeout": 0}, "default_timeout=0: expected seconds above 0, or None for ever"),
        ({"default_timeout": float("nan")}, "default_timeout=nan"),
        ({"stop_grace": -1}, "stop_grace=-1: expected seconds, 0 or more"),
        ({"stop_timeout": None}, "stop_timeout=None: expected seconds above 0"),
        ({"preset": "moon"}, "preset='moon': expected 'auto', 'local', 'lan' or 'wan'"),
        ({"max_message": 0}, "max_message=0: expected 1024 to "),
        ({"cluster": ""}, "cluster='': expected a name"),
        ({"max_observers": 2**63}, "max_observers=9223372036854775808: expected 1 to 2147483647"),
        ({"max_handshakes": 10**30}, "expected 1 to 2147483647"),
        ({"max_restarts": 10**30}, "expected 0 to 2147483647"),
        ({"max_message": 10**30}, "expected 1024 to 4611686018427387904 bytes"),
        ({"min_backoff": 2.0, "max_backoff": 1.0}, "min_backoff=2.0 is longer than max_backoff=1.0"),
        ({"passphrase": "x", "insecure": True}, "exclude each other"),
    ],
)
def test_values_that_do_not_fit_are_named_with_the_way_out(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        pul.SystemConfig(**settings)
    assert words in str(refused.value)


def test_an_unknown_setting_names_the_nearest() -> None:
    async def main() -> None:
        unknown: dict[str, Any] = {"mailboxes": 5}
        for start in (pul.init, pul.actor_system):
            with pytest.raises(TypeError, match="unknown setting 'mailboxes' - did you mean mailbox"):
                await start("127.0.0.1:0", **unknown)

    run(main())


def test_init_takes_arguments_then_the_environment_then_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "pulsing.toml"
    file.write_text('addr = "127.0.0.1:0"\ncluster = "file"\nmailbox = 33\nmax_concurrency = 3\njoin_timeout = 0\n')
    secret = tmp_path / "secret"
    secret.write_text("correct horse\n")
    monkeypatch.setenv("PULSING_CONFIG", str(file))
    monkeypatch.setenv("PULSING_CLUSTER", "environment")
    monkeypatch.setenv("PULSING_MAX_CONCURRENCY", "4")
    monkeypatch.setenv("PULSING_PASSPHRASE_FILE", str(secret))

    async def main() -> None:
        system = await pul.init(max_concurrency=5)
        config = system.config
        assert (config.addr, config.cluster, config.mailbox, config.max_concurrency) == (
            "127.0.0.1:0",
            "environment",
            33,
            5,
        )
        assert (config.join_timeout, config.passphrase) == (None, "correct horse")
        await Plain.spawn()
        cell = system.cells()[-1]
        assert (cell.mailbox.capacity, cell.handlers.max_concurrency) == (33, 5)
        assert await pul.init(max_concurrency=5) is system
        with pytest.raises(pul.PulsingRuntimeError, match="called before with other arguments"):
            await pul.init()
        await pul.shutdown()
        # Every one of them may be given although the environment or the file says otherwise.
        monkeypatch.setenv("PULSING_SEEDS", "127.0.0.1:1")
        own = await pul.init("127.0.0.1:0", seeds=[], passphrase="staple", cluster="argument")
        assert (own.config.seeds, own.config.passphrase, own.config.cluster) == ((), "staple", "argument")
        await pul.shutdown()
        monkeypatch.delenv("PULSING_SEEDS")
        monkeypatch.setenv("PULSING_MAILBOXX", "1")
        with pytest.raises(ConfigError, match="PULSING_MAILBOXX is no setting - did you mean PULSING_MAILBOX"):
            await pul.init()
        monkeypatch.delenv("PULSING_MAILBOXX")
        monkeypatch.setenv("PULSING_MAILBOX", "3")
        with pytest.raises(ConfigError, match="PULSING_MAILBOX=3: expected 16 to"):
            await pul.init()
        file.write_text("mailbx = 5\n")
        with pytest.raises(ConfigError, match="unknown key 'mailbx' - did you mean mailbox"):
            await pul.init()
        # Another system asks only its arguments.
        async with local_system() as other:
            assert (other.config.cluster, other.config.mailbox) == ("default", 256)

    run(main())


def test_restart_numbers_come_from_the_actor_then_from_the_system() -> None:
    async def main() -> None:
        async with local_system(max_restarts=9, min_backoff=1.0, restart_window=7.0) as system:

            async def policy(actor: Any, **settings: Any) -> tuple[int, float, float, float]:
                await system.spawn(actor, restart_policy="on_failure", **settings)
                found = system.cells()[-1].life._policy
                return found.max_restarts, found.min_backoff, found.max_backoff, found.window

            assert await policy(Plain) == (9, 1.0, 30.0, 7.0)
            assert await policy(Plain, max_restarts=2, restart_window=5.0) == (2, 1.0, 30.0, 5.0)
            decorated = pul.remote(restart_policy="always", min_backoff=0.5)(type("Decorated", (), {"go": lambda _: 1}))
            await decorated.spawn(system=system)
            found = system.cells()[-1].life._policy
            assert (found.policy, found.max_restarts, found.min_backoff) == ("always", 9, 0.5)

    run(main())


def test_limits_of_the_system_reach_its_actors() -> None:
    async def main() -> None:
        async with local_system(start_timeout=0.05, stop_grace=0.0, mailbox=16) as system:

            class Slow:
                async def on_start(self) -> None:
                    await asyncio.sleep(60)

                def go(self) -> None: ...

            with pytest.raises(pul.PulsingTimeoutError, match=r"within 0.05 s: on_start .*start_timeout"):
                await system.spawn(Slow)
            plain = await Plain.spawn(system=system, name="plain")
            ask = asyncio.create_task(plain.sleep(60))
            await asyncio.sleep(0)
            await system.stop("plain")
            with pytest.raises(pul.ActorStoppedError):
                await ask

    run(main())


@pytest.mark.parametrize(("watchdog", "limit"), [(0.5, 0.5), (None, math.inf)])
def test_the_watchdog_waits_as_long_as_it_is_told(watchdog: float | None, limit: float) -> None:
    async def main() -> None:
        async with local_system(watchdog=watchdog):
            assert bridge_of(asyncio.get_running_loop()).watch.limit == limit

    run(main())


@pytest.mark.parametrize("preset", ["auto", "local", "lan", "wan"])
def test_every_preset_starts(preset: Any) -> None:
    async def main() -> None:
        async with local_system(preset=preset) as system:
            assert len(await system.members()) == 1

    run(main())


@pytest.mark.parametrize(("raw", "copies"), [("1", True), ("true", True), ("0", False), ("", False), ("no", False)])
def test_r15_the_variable_that_copies_arguments_is_read_like_any_other(
    monkeypatch: pytest.MonkeyPatch, raw: str, copies: bool
) -> None:
    async def copying() -> bool:
        system = await pul.actor_system()
        await system.shutdown()
        return system.debug_copy

    monkeypatch.setenv("PULSING_DEBUG_COPY", raw)
    assert asyncio.run(copying()) is copies
    monkeypatch.setenv("PULSING_DEBUG_COPY", "2")
    with pytest.raises(ConfigError, match="PULSING_DEBUG_COPY: '2' is not a bool"):
        asyncio.run(copying())


@pytest.mark.parametrize("name", ["passphrase_file", "config", "cert", "key", "ca", "secret_file"])
@pytest.mark.parametrize("path", ["", " ", 5, b"x"], ids=repr)
def test_a_path_that_is_none_never_counts_as_not_given(name: str, path: Any) -> None:
    # A descriptor would be read and closed, and an empty name would start a node without its secret.
    with pytest.raises(ConfigError, match=f"{name}=.*: expected a path"):
        asyncio.run(pul.init(**{name: path}))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"log_level": "loud"}, "log_level='loud': expected 'error', 'warn'"),
        ({"log_level": 5}, "log_level=5: expected 'error', 'warn'"),
        ({"log_format": "xml"}, "log_format='xml': expected 'text' or 'json'"),
        ({"seeds": 5}, "seeds=5: expected a list of host:port"),
        ({"seeds": ["a:1", 5]}, "seeds: 5 is no host:port"),
    ],
)
def test_what_init_takes_beside_the_config_is_checked_too(settings: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, TypeError)) as refused:
        asyncio.run(pul.init(**settings))
    assert words in str(refused.value)


@pytest.mark.parametrize("name", ["PASSPHRASE_FILE", "CERT", "KEY", "CA"])
def test_an_empty_variable_of_who_may_join_is_an_error(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(f"PULSING_{name}", "")
    with pytest.raises(ConfigError, match=f"PULSING_{name} is set but empty"):
        asyncio.run(pul.init())

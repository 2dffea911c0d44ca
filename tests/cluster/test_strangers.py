"""Who is kept out of a node without a secret, and who of one with a secret learns it (design, section 6)."""

from __future__ import annotations

import asyncio
import os
import pathlib
import pickle
import re
import subprocess
import sys
import traceback

import pytest
from runtime_util import eventually, local_system, run

import pulsing as pul
from pulsing.exceptions import JoinError, PulsingError, RefusedError

SECRET = "correct-horse-battery-staple"


def test_another_user_of_this_host_is_refused(tmp_path: pathlib.Path) -> None:
    async def main() -> None:
        async with local_system(secret_file=str(tmp_path / "mine")) as node:
            for settings, words in (
                ({"secret_file": str(tmp_path / "theirs")}, "could not prove this user's secret"),
                # Without a secret there is nothing to prove with.
                ({"insecure": True}, "could not prove this user's secret"),
            ):
                with pytest.raises((RefusedError, JoinError), match=words) as refused:
                    await pul.actor_system("127.0.0.1:0", seeds=[node.addr], join_timeout=5.0, **settings)
                assert "--insecure on both sides" in str(refused.value)
            assert len(await node.members()) == 1

    run(main())


def test_a_secret_is_in_no_repr_error_or_traceback() -> None:
    shown = []
    config = pul.SystemConfig(passphrase=SECRET)
    shown += [repr(config), str(config), f"{config.with_addr('x:1')}"]

    async def main() -> None:
        async with local_system(passphrase=SECRET) as node:
            shown.extend([repr(node), repr(node.config), str(vars(type(node)))])
            attempts = [
                {"seeds": [node.addr], "passphrase": SECRET + "-other"},
                {"seeds": [node.addr], "passphrase": SECRET, "cluster": "other"},
                {"passphrase": SECRET, "insecure": True},
                {"passphrase": SECRET, "mailbox": 3},
                {"passphrase": SECRET, "cert": "x"},
            ]
            for settings in attempts:
                with pytest.raises((PulsingError, TypeError)) as refused:
                    await pul.actor_system("127.0.0.1:0", join_timeout=5.0, **settings)
                shown.append("".join(traceback.format_exception(refused.value)))
        await pul.init("127.0.0.1:0", passphrase=SECRET)
        with pytest.raises(PulsingError) as differs:
            await pul.init("127.0.0.1:0", passphrase=SECRET + "-other")
        shown.append("".join(traceback.format_exception(differs.value)))
        await pul.shutdown()

    run(main())
    assert not [text for text in shown if SECRET in text]
    # It travels to the process of an actor, which needs it.
    assert pickle.loads(pickle.dumps(config)).passphrase == SECRET


@pytest.mark.parametrize("how", ["file", "variable"])
def test_a_secret_is_in_no_log_and_no_command_line(tmp_path: pathlib.Path, how: str) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PULSING_")}
    flags = ["--passphrase-file", str(file)] if how == "file" else []
    environ |= {} if how == "file" else {"PULSING_PASSPHRASE": SECRET}
    words = [sys.executable, "-m", "pulsing.cli", "actor", "pulsing.serving.Router", "--addr", "127.0.0.1:0"]
    log = tmp_path / "log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [*words, "--log_level", "trace", *flags, "--", "--http_port", "0"],
            stderr=stderr,
            stdout=stderr,
            env=environ,
        )
    try:

        async def look() -> None:
            def started() -> bool:
                assert process.poll() is None, log.read_text()
                return "router started at" in log.read_text()

            await eventually("it has started", started, 30.0)
            found = re.findall(r"router started at (\S+)", log.read_text())[0]
            # A stranger, so that there is something to log.
            with pytest.raises((RefusedError, JoinError), match="check the passphrase and --cluster"):
                await pul.actor_system("127.0.0.1:0", seeds=[found], passphrase="wrong", join_timeout=5.0)
            await eventually("it says so", lambda: "a peer was refused" in log.read_text())

        asyncio.run(look())
        titles = [pathlib.Path(f"/proc/{process.pid}/{name}") for name in ("cmdline", "comm")]
        shown = [title.read_bytes().decode() for title in titles if title.exists()]
    finally:
        process.kill()
        process.wait()
    assert SECRET not in "".join([*shown, log.read_text()])

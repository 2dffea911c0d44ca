"""Nodes with certificates of their own, made as the guide says; files that change under a running node."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from runtime_util import cluster, eventually, run

import pulsing as pul
from pulsing.exceptions import ConfigError, JoinError, RefusedError

GUIDE = pathlib.Path(__file__).parents[2] / "docs/guides/security.md"


@pul.remote
class Echo:
    def echo(self, value: str) -> str:
        return value


def commands() -> list[str]:
    """The guide's four, for this host."""
    (block,) = re.findall(r"```sh\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    return block.replace("10.0.0.5", "127.0.0.1").strip().splitlines()


def openssl(directory: pathlib.Path, lines: list[str]) -> None:
    subprocess.run(["sh", "-ec", "\n".join(lines)], cwd=directory, check=True, capture_output=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("authority")
    assert len(commands()) == 4
    openssl(directory, commands())
    return directory


@pytest.fixture
def files(made: pathlib.Path, tmp_path: pathlib.Path) -> dict[str, str]:
    for name in ("node.pem", "node.key", "ca.pem", "ca.key", "node.ext"):
        (tmp_path / name).write_bytes((made / name).read_bytes())
        (tmp_path / name).chmod(0o600)
    return {"cert": str(tmp_path / "node.pem"), "key": str(tmp_path / "node.key"), "ca": str(tmp_path / "ca.pem")}


def flags(files: dict[str, str]) -> list[str]:
    return [word for name, path in files.items() for word in (f"--{name}", path)]


def test_the_guides_certificates_make_a_cluster_that_others_are_kept_out_of(
    files: dict[str, str], tmp_path: pathlib.Path
) -> None:
    (tmp_path / "theirs").mkdir()
    openssl(tmp_path / "theirs", commands())
    theirs = {name: str(tmp_path / "theirs" / pathlib.Path(path).name) for name, path in files.items()}

    async def main() -> None:
        async with cluster(2, **files) as (one, two):
            assert one.config.is_tls_enabled()
            await Echo.spawn(system=one, name="echo")
            assert await (await two.resolve("echo", timeout=5)).echo("x") == "x"
            for settings, words in (
                (theirs, "of another authority than --ca names"),
                ({"passphrase": "correct horse"}, "it belongs to another cluster"),
                ({}, "start with --cert, --key and --ca"),
                ({"insecure": True}, "start with --cert, --key and --ca"),
            ):
                with pytest.raises((RefusedError, JoinError), match=re.escape(words)):
                    await pul.actor_system("127.0.0.1:0", seeds=[one.addr], join_timeout=5.0, **settings)
            with pytest.raises(ConfigError, match=r"neither this node's address \(IP:127\.0\.0\.2\)"):
                await pul.actor_system("127.0.0.2:0", seeds=[one.addr], join_timeout=5.0, **files)

    run(main())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cert": "c"}, "cert, key and ca belong together: key and ca missing"),
        ({"cert": "c", "key": "k"}, "cert, key and ca belong together: ca missing"),
        ({"cert": "c", "key": "k", "ca": "a", "passphrase": "horse"}, "passphrase and cert exclude each other"),
        ({"cert": "c", "key": "k", "ca": "a", "insecure": True}, "cert and insecure=True exclude each other"),
        ({"cert": 3, "key": "k", "ca": "a"}, "cert=3: expected a path"),
    ],
)
def test_settings_that_contradict_each_other_are_told(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as refused:
        pul.SystemConfig(**settings)
    assert "horse" not in str(refused.value)


def test_an_argument_wins_over_certificates_of_the_environment(
    files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, path in files.items():
        monkeypatch.setenv(f"PULSING_{name.upper()}", path)

    async def main() -> None:
        async def started(**settings: object) -> tuple[bool, bool, bool]:
            config = (await pul.init("127.0.0.1:0", **settings)).config
            await pul.shutdown()
            return config.cert == files["cert"], config.passphrase is not None, config.insecure

        assert await started() == (True, False, False)
        assert await started(passphrase="correct horse") == (False, True, False)
        assert await started(insecure=True) == (False, False, True)
        monkeypatch.setenv("PULSING_PASSPHRASE", "correct horse")
        with pytest.raises(ConfigError, match="passphrase and cert exclude each other"):
            await started()
        assert await started(**files) == (True, False, False)

    run(main())


@contextlib.contextmanager
def actor(log: pathlib.Path, *argv: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """`pulsing actor` as a process, and its address."""
    words = [sys.executable, "-m", "pulsing.cli", "actor", "pulsing.serving.Router", "--addr", "127.0.0.1:0", *argv]
    with log.open("wb") as stderr:
        process = subprocess.Popen([*words, "--", "--http_port", "0"], stderr=stderr, stdout=stderr)
    try:
        addr = asyncio.run(_address(process, log))
        yield process, addr
    finally:
        process.kill()
        process.wait()


async def _address(process: subprocess.Popen[bytes], log: pathlib.Path) -> str:
    found: list[str] = []

    def said() -> bool:
        assert process.poll() is None, log.read_text()
        found.extend(re.findall(r"router started at (\S+)", log.read_text()))
        return bool(found)

    await eventually("it says where it is", said, 30.0)
    return found[0]


def inspect(*argv: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "pulsing.cli", "inspect", "cluster", *argv]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)


def test_commands_take_certificates_and_a_bad_change_is_logged_once(
    files: dict[str, str], tmp_path: pathlib.Path
) -> None:
    log = tmp_path / "log"
    with actor(log, *flags(files)) as (process, addr):
        shown = inspect("--seeds", addr, *flags(files), "--json")
        assert shown.returncode == 0, shown.stderr
        assert addr in shown.stdout
        plain = inspect("--seeds", addr)
        assert plain.returncode == 2
        assert "--cert, --key and --ca" in plain.stderr
        half = inspect("--seeds", addr, "--cert", files["cert"])
        assert (half.returncode, half.stderr) == (
            2,
            "Error: --cert, --key and --ca belong together: key and ca missing.\n",
        )
        both = inspect("--seeds", addr, *flags(files), "--passphrase_file", files["key"])
        assert both.returncode == 2
        assert "--passphrase_file and --cert exclude each other" in both.stderr

        key = pathlib.Path(files["key"])
        good = key.read_bytes()
        key.write_text("half a file")

        async def bad_then_good() -> None:
            told = "the changed certificate files are not used"
            await eventually("it says so", lambda: told in log.read_text(), 20.0)
            await asyncio.to_thread(_renew, tmp_path)
            await eventually("it reads the good one", lambda: "was read again" in log.read_text(), 20.0)
            assert log.read_text().count(told) == 1
            assert "holds no private key in PEM" in log.read_text()

        asyncio.run(bad_then_good())
        assert key.read_bytes() != good
        assert inspect("--seeds", addr, *flags(files)).returncode == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        for secret in (good, key.read_bytes()):
            assert secret.splitlines()[1].decode() not in log.read_text()


def _renew(directory: pathlib.Path) -> None:
    """Makes a certificate, and puts it in place in one go however slow that was."""
    aside = directory / "aside"
    aside.mkdir()
    for name in ("ca.pem", "ca.key"):
        (aside / name).write_bytes((directory / name).read_bytes())
    openssl(aside, commands()[1:])
    for name in ("node.pem", "node.key"):
        (aside / name).replace(directory / name)


def test_a_key_that_all_may_read_is_warned_about(files: dict[str, str], tmp_path: pathlib.Path) -> None:
    pathlib.Path(files["key"]).chmod(0o644)
    with actor(tmp_path / "log", *flags(files)):
        pass
    assert f"every user of this host may read the key {files['key']}" in (tmp_path / "log").read_text()


def test_variables_and_a_missing_file(files: dict[str, str], tmp_path: pathlib.Path) -> None:
    environ = {**os.environ, **{f"PULSING_{name.upper()}": path for name, path in files.items()}}
    os.unlink(files["ca"])
    words = [sys.executable, "-m", "pulsing.cli", "actor", "pulsing.serving.Router", "--addr", "127.0.0.1:0"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, env=environ)
    assert ended.returncode == 2
    assert ended.stderr == f"Error: bad setting: cannot read --ca {files['ca']}: no such file\n"

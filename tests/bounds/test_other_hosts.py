"""Plaintext between two hosts, which network namespaces are: refused in words, unless both sides say otherwise."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from namespaces import Network

NODE = """
import asyncio, sys
import pulsing as pul

async def main():
    addr, seed, insecure = sys.argv[1:]
    seeds = [seed] if seed else []
    try:
        system = await pul.actor_system(addr, seeds=seeds, join_timeout=5.0, insecure=insecure == "insecure")
    except pul.PulsingError as error:
        print(type(error).__name__, error, flush=True)
    else:
        print("joined" if seed else system.addr, flush=True)
        if not seed:
            await asyncio.to_thread(sys.stdin.readline)
        await system.shutdown(0.0)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def two() -> Iterator[Network]:
    with Network(2) as network:
        yield network


@pytest.mark.parametrize(("here", "there"), [("", ""), ("", "insecure"), ("insecure", ""), ("insecure", "insecure")])
def test_plaintext_from_another_host_needs_insecure_on_both_sides(two: Network, here: str, there: str) -> None:
    def node(host: int, *argv: str) -> subprocess.Popen[str]:
        words = [*two.inside(host), sys.executable, "-c", NODE, two.addr(host, 0), *argv]
        return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    seed = node(0, "", here)
    try:
        assert seed.stdout is not None
        addr = seed.stdout.readline().strip()
        told, _ = node(1, addr, there).communicate(timeout=60)
    finally:
        seed.kill()
        seed.communicate()
    if here and there:
        assert told == "joined\n"
        return
    assert told.startswith("RefusedError"), told
    for words in ("on another host and the connection is plaintext", "--passphrase-file", "--insecure"):
        assert words in told


def test_m6_hosts_of_several_networks_that_listen_everywhere_advertise_what_the_others_use() -> None:
    with Network(2) as network:
        for host in range(2):
            # One more address, which comes first in every list and which nobody else reaches.
            lines = [f"addr add 10.99.{host}.1/32 dev lo", f"route add default via {network.ip(1 - host)}"]
            network.run(host, lines)

        def node(host: int, *argv: str) -> subprocess.Popen[str]:
            words = [*network.inside(host), sys.executable, "-c", NODE, *argv]
            return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

        seed = node(0, "0.0.0.0:7000", "", "insecure")
        try:
            assert seed.stdout is not None
            assert seed.stdout.readline().strip() == network.addr(0)
            told, _ = node(1, "0.0.0.0:0", network.addr(0), "insecure").communicate(timeout=60)
        finally:
            seed.kill()
            seed.communicate()
        assert told == "joined\n"

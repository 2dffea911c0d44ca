"""Hosts that are network namespaces of this machine, on one bridge whose every link can be cut or made to lose packets.

Needs root, `ip` and `nft` (Debian: iproute2, nftables). What a killed run left behind is removed by the next one.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence

PREFIX = "pulsing-"
_numbers = itertools.count()


class NoNamespacesError(RuntimeError):
    """This machine makes no network namespaces; the message says why, and what would help."""


def _do(*words: str, given: str | None = None) -> str:
    done = subprocess.run(words, input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNamespacesError(
            f"`{' '.join(words)}` failed: {done.stderr.strip() or done.returncode}\n{given or ''}".rstrip()
        )
    return done.stdout


def _check() -> None:
    missing = [tool for tool in ("ip", "nft") if shutil.which(tool) is None]
    if missing:
        raise NoNamespacesError(f"{' and '.join(missing)} missing: apt-get install iproute2 nftables")
    if os.geteuid() != 0:
        raise NoNamespacesError(
            "network namespaces need root; in a container, the capabilities NET_ADMIN and SYS_ADMIN"
        )


def _remove(names: Iterable[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _sweep() -> None:
    """Removes the namespaces of runs that are over."""
    for line in _do("ip", "netns", "list").splitlines():
        found = re.match(PREFIX + r"(\d+)-\S+", line)
        if found and not pathlib.Path(f"/proc/{found[1]}").exists():
            _remove([found[0]])


class Network:
    """`size` hosts, each at an address of its own, as a context manager.

    Args:
        size: Number of hosts, at most 250.
        ipv6: Whether hosts have IPv6 addresses, and no IPv4 at all, not even on loopback.

    Raises:
        NoNamespacesError: This machine cannot.
    """

    def __init__(self, size: int, *, ipv6: bool = False) -> None:
        self.size = size
        self.ipv6 = ipv6
        self._base = f"{PREFIX}{os.getpid()}-{next(_numbers)}-"
        self._hub = self._base + "hub"
        self._rules: list[str] = []

    def __enter__(self) -> Network:
        _check()
        _sweep()
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        _remove([*(self._name(host) for host in range(self.size)), self._hub])

    def _name(self, host: int) -> str:
        return f"{self._base}{host}"

    def _build(self) -> None:
        _do(
            "ip",
            "-batch",
            "-",
            given="".join(f"netns add {name}\n" for name in [self._hub, *map(self._name, range(self.size))]),
        )
        # Without snooping, or neighbours over IPv6 are found late.
        lines = ["link add br0 type bridge stp_state 0 forward_delay 0 mcast_snooping 0", "link set br0 up"]
        for host in range(self.size):
            lines += [
                f"link add v{host} type veth peer name eth0 netns {self._name(host)}",
                f"link set v{host} master br0 up",
            ]
        self._batch(self._hub, lines)
        for host in range(self.size):
            end = " nodad" if self.ipv6 else ""
            self._batch(
                self._name(host),
                [
                    f"addr add {self.ip(host)}/{64 if self.ipv6 else 24} dev eth0{end}",
                    "link set eth0 up",
                    "link set lo up",
                ],
            )
            if self.ipv6:
                self._batch(self._name(host), ["addr del 127.0.0.1/8 dev lo"])
        self._apply(
            "add table bridge weather", "add chain bridge weather links { type filter hook forward priority 0; }"
        )

    def _batch(self, name: str, lines: Sequence[str]) -> None:
        _do("ip", "-n", name, "-batch", "-", given="\n".join(lines) + "\n")

    def _apply(self, *first: str) -> None:
        rules = [f"add rule bridge weather links {rule}" for rule in self._rules]
        given = "\n".join([*first, "flush chain bridge weather links", *rules]) + "\n"
        _do("ip", "netns", "exec", self._hub, "nft", "-f", "-", given=given)

    def ip(self, host: int) -> str:
        """The address of a host."""
        return f"fd70:756c::{host + 1:x}" if self.ipv6 else f"10.77.0.{host + 1}"

    def addr(self, host: int, port: int = 7000) -> str:
        """``host:port`` there."""
        return f"[{self.ip(host)}]:{port}" if self.ipv6 else f"{self.ip(host)}:{port}"

    def inside(self, host: int) -> list[str]:
        """What goes before a command that is to run on a host; the process it becomes is the command's own."""
        return ["ip", "netns", "exec", self._name(host)]

    def run(self, host: int, lines: Sequence[str]) -> None:
        """Has `ip` carry out `lines` on a host."""
        self._batch(self._name(host), lines)

    def silence(self, senders: Iterable[int], receivers: Iterable[int], share: float = 1.0) -> None:
        """Drops what `senders` send to `receivers`, silently, in that direction only.

        Args:
            senders: Hosts.
            receivers: Hosts.
            share: Of the packets, 0 to 1, each by chance.
        """
        ends = [", ".join(f"v{host}" for host in hosts) for hosts in (sorted(senders), sorted(receivers))]
        chance = "" if share >= 1 else f"numgen random mod 1000 < {round(share * 1000)} "
        self._rules.append(f"iifname {{ {ends[0]} }} oifname {{ {ends[1]} }} {chance}drop")
        self._apply()

    def part(self, hosts: Iterable[int]) -> None:
        """Cuts `hosts` off from all others, silently and both ways."""
        inside = set(hosts)
        outside = set(range(self.size)) - inside
        self.silence(inside, outside)
        self.silence(outside, inside)

    def lose(self, share: float) -> None:
        """Every packet between hosts is lost with this chance, 0 to 1."""
        self.silence(range(self.size), range(self.size), share)

    def down(self, host: int) -> None:
        """Pulls a host's cable: it sees its own link go down."""
        self._batch(self._hub, [f"link set v{host} down"])

    def heal(self) -> None:
        """Everything arrives again."""
        self._rules.clear()
        self._apply()
        self._batch(self._hub, [f"link set v{host} up" for host in range(self.size)])

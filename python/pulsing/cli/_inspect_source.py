"""Whom `pulsing inspect` asks, and what became of it."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from pulsing.cli._errors import FailureError, MisuseError, UnreachableError
from pulsing.cli._settings import PASSPHRASE, check_security, passphrase

Pki: TypeAlias = tuple[str | None, str | None, str | None]
"""Files of a certificate, its key, and the authorities."""
DEFAULT_PORT = 8000
HINT = "\nIs the node running, is this its --addr, and was it started without --no_observe?"
_LONGEST = 86400  # seconds
# Of several seeds one that hangs must not cost the whole timeout when another answers at once. Seconds.
_FIRST_LOOK = 1.0


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one node said, or why it said nothing."""

    addr: str
    body: str
    error: str | None
    node_id: str = ""
    there: bool = True
    """Whether a node was there, even if it refused."""
    path: str = ""
    """What it was asked for."""

    def json(self) -> Any:
        """What it says.

        Raises:
            FailureError: It is not what a node says there; somebody else's server, most likely.
        """
        try:
            found = json.loads(self.body)
        except (json.JSONDecodeError, RecursionError) as error:
            raise FailureError(f"{self.addr} does not answer as a Pulsing node: {error}") from None
        if not _SHAPES.get(self.path, _anything)(found):
            raise FailureError(f"{self.addr} does not answer as a Pulsing node: {self.path} holds something else")
        return found


def _anything(_: object) -> bool:
    return True


def _rows(found: object, *keys: str) -> bool:
    """Whether it is a list of objects with text under each of `keys`."""
    return isinstance(found, list) and all(
        isinstance(row, dict) and all(isinstance(row.get(key), str) for key in keys) for row in found
    )


def _members(found: Any) -> bool:
    return _rows(found, "node_id", "addr", "state") and all("me" in row for row in found)


def _actors(found: Any) -> bool:
    if not isinstance(found, dict) or not _rows([found], "node_id", "addr"):
        return False
    local: Any = found.get("local")
    cluster: Any = found.get("cluster")
    if not _rows(local, "actor_id", "class") or not _rows(cluster, "name", "actor_id", "class", "node_id", "addr"):
        return False
    named = all(row.get("name") is None or isinstance(row["name"], str) for row in local)
    said = (row.get("metadata") for row in (*local, *cluster))
    words = all(isinstance(one, dict) and all(isinstance(value, str) for value in one.values()) for one in said)
    return named and words and all("internal" in row for row in local)


_SHAPES: dict[str, Callable[[Any], bool]] = {"/cluster/members": _members, "/actors": _actors}


def _words(body: str) -> str:
    """What a node's refusal says, or the beginning of what was answered."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body[:200]


@dataclasses.dataclass(frozen=True)
class Source:
    """Whom to ask: `endpoint` is one node, `seeds` lead to all of them. `timeout` in seconds, for each node.

    With a secret (`passphrase_file`, or `PULSING_PASSPHRASE`) or a certificate (`pki`), over the TLS of the cluster of
    this name. With `best_effort`, nodes that fail are kept in `failures` and the others shown; `close` tells of it.
    """

    seeds: str | None
    timeout: float
    best_effort: bool = False
    endpoint: str | None = None
    passphrase_file: str | None = None
    cluster: str = "default"
    pki: Pki = (None, None, None)
    failures: dict[str, str] = dataclasses.field(default_factory=dict)
    """Address -> why it did not answer."""
    others: list[str] = dataclasses.field(default_factory=list)
    """Addresses to ask when no seed answers any more."""

    def __post_init__(self) -> None:
        if not 0 < self.timeout <= _LONGEST:
            raise MisuseError(f"--timeout is a number of seconds above 0 and up to {_LONGEST}, not {self.timeout:g}.")

    def fetch(
        self, addrs: Sequence[str], path: str, limit: float | None = None, *, plain: bool = False
    ) -> list[Answer]:
        """GETs `path` from all `addrs` at once, each within `limit` seconds; `plain` is without the cluster's TLS."""
        from pulsing._core import observe_get

        secret = None if plain else passphrase(self.passphrase_file)
        check_security("--passphrase_file" if self.passphrase_file else PASSPHRASE if secret else None, *self.pki)
        cert, key, ca = (None, None, None) if plain else self.pki
        answers = []
        try:
            found = observe_get(list(addrs), path, limit or self.timeout, secret, self.cluster, cert, key, ca)
        except ValueError as unfit:
            raise FailureError(f"{unfit}.") from None
        for addr, (status, body, error) in zip(addrs, found, strict=True):
            refusal = f"{addr} answers {status} to {path}: {_words(body)}" if status != 200 else None
            there = not error or "refused the connection" in error
            answers.append(Answer(addr, body, error or refusal, there=there, path=path))
        return answers

    def first(self) -> list[str]:
        """Addresses from the command line.

        Raises:
            MisuseError: what can be no seed, or a file of seeds that names none.
        """
        from pulsing._core import seed_places

        text = self.endpoint or self.seeds or ""
        addrs = [with_port(part.strip()) for part in text.split(",") if part.strip()]
        if not addrs:
            raise MisuseError("whom to ask is missing: give --seeds HOST:PORT.")
        flag = "--endpoint" if self.endpoint else "--seeds"
        try:
            return list(dict.fromkeys(place for addr in addrs for place in seed_places(addr)))
        except ValueError as error:
            raise MisuseError(f"{flag}: {error}.") from None

    def ask(self, path: str) -> tuple[str, Any]:
        """(address, JSON) of the first node that answers.

        Raises:
            UnreachableError: none does; says why for each.
        """
        addrs = list(dict.fromkeys([*self.first(), *self.others]))
        answers: list[Answer] = []
        if len(addrs) > 1 and self.timeout > _FIRST_LOOK:
            answers = self.fetch(addrs, path, _FIRST_LOOK)
        if all(answer.error for answer in answers):
            answers = self.fetch(addrs, path)
        reasons = []
        for answer in answers:
            try:
                if answer.error is None:
                    return answer.addr, answer.json()
                reasons.append(answer.error)
            except FailureError as error:
                reasons.append(str(error))
        hint = "" if all(answer.there for answer in answers) else HINT
        raise UnreachableError("no node answers:\n" + "\n".join(f"  {reason}" for reason in reasons) + hint)

    def members(self) -> tuple[str, list[dict[str, Any]]]:
        """(who says so, the members)."""
        asked, members = self.ask("/cluster/members")
        return asked, members

    def ask_all(self, path: str, *, down: bool = True) -> list[Answer]:
        """What every member of the cluster answers, but for those that have left.

        Args:
            path: what to GET.
            down: ask members too that are known to be down; the cluster lists them for a minute.

        Raises:
            UnreachableError: no seed can be reached.
            FailureError: some member does not answer and `best_effort` is off, or none does.
        """
        asked, members = self.members()
        states = ("down", "suspect", "alive") if down else ("suspect", "alive")
        nodes = {
            asked if member["me"] else member["addr"]: member["node_id"]
            # The last one of an address counts: where a node was started again, that is the living one.
            for state in states
            for member in members
            if member["state"] == state
        }
        answers = [dataclasses.replace(answer, node_id=nodes[answer.addr]) for answer in self.fetch(list(nodes), path)]
        failed = {answer.addr: answer.error for answer in answers if answer.error is not None}
        if failed and (not self.best_effort or len(failed) == len(answers)):
            raise FailureError(
                _told(failed, len(answers)) + ("" if self.best_effort else "\n--best_effort shows the others.")
            )
        self.failures.update(failed)
        return [answer for answer in answers if answer.error is None]

    def close(self) -> None:
        """To be called when everything is shown.

        Raises:
            FailureError: nodes failed meanwhile.
        """
        if self.failures:
            raise FailureError(_told(self.failures))


def with_port(addr: str) -> str:
    """`addr` with port 8000 if it names none. IPv6 literals may stand with or without brackets."""
    scheme, separator, rest = addr.partition("://")
    if separator:
        return f"{addr}:{DEFAULT_PORT}" if scheme == "k8s" and ":" not in rest else addr
    if addr.startswith("["):
        return addr if "]:" in addr else f"{addr}:{DEFAULT_PORT}"
    if addr.count(":") > 1:
        return f"[{addr}]:{DEFAULT_PORT}"
    return addr if ":" in addr else f"{addr}:{DEFAULT_PORT}"


def _told(failed: dict[str, str], asked: int | None = None) -> str:
    count = f"{len(failed)} of {asked} nodes" if asked else "1 node" if len(failed) == 1 else f"{len(failed)} nodes"
    verb = "does" if len(failed) == 1 else "do"
    return f"{count} {verb} not answer:\n" + "\n".join(f"  {reason}" for reason in failed.values())

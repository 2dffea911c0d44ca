"""How soon eight processes on one machine know what became of one of them (M2, M3, M4, M5)."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from fleet import Fleet, wait_for

PROCESSES = 8
CRASH = 2.0
NAME = 1.0
LEAVE = 1.0
PAUSE = 10.0
REJOIN = 75.0


@pytest.fixture(scope="module")
def eight() -> Iterator[Fleet]:
    with Fleet() as fleet:
        fleet.start(PROCESSES)
        yield fleet


@pytest.fixture
def fleet(eight: Fleet) -> Fleet:
    eight.start(PROCESSES)
    return eight


def test_m5_a_name_is_gone_everywhere_within_a_second(fleet: Fleet) -> None:
    node = fleet.nodes[3]
    node.ask("spawn", name="passing")
    fleet.wait_named("passing", 1, 0.0, fleet.nodes, 10.0)
    begun = time.monotonic()
    node.ask("stop", name="passing")
    assert (gone := fleet.wait_named("passing", 0, begun, fleet.nodes, 10.0))[-1] < NAME, gone


def test_m3_a_crash_is_seen_by_all_within_two_seconds(fleet: Fleet) -> None:
    node = fleet.nodes.pop()
    try:
        begun = time.monotonic()
        node.kill()
        assert (seen := fleet.wait_seen(node, ["down"], begun, fleet.nodes, 30.0))[-1] < CRASH, seen
        assert (gone := fleet.wait_named(node.name, 0, begun, fleet.nodes, 10.0))[-1] < CRASH, gone
        assert not fleet.deaths(begun)
    finally:
        node.close()


def test_m3_a_graceful_leave_is_seen_by_all_within_a_second(fleet: Fleet) -> None:
    node = fleet.nodes.pop()
    try:
        begun = time.monotonic()
        node.ask("leave")
        assert (seen := fleet.wait_seen(node, ["left"], begun, fleet.nodes, 30.0))[-1] < LEAVE, seen
        assert (gone := fleet.wait_named(node.name, 0, begun, fleet.nodes, 10.0))[-1] < LEAVE, gone
        assert not fleet.deaths(begun)
    finally:
        node.close()


def test_m4_a_process_at_the_same_address_replaces_its_old_self(fleet: Fleet) -> None:
    old = fleet.nodes.pop()
    try:
        begun = time.monotonic()
        old.kill()
        fleet.add(old.name, addr=old.addr, seeds=[fleet.nodes[0].addr]).wait_ready()
        fleet.wait_whole(REJOIN)
        assert fleet.nodes[1].ask("call", name=old.name) == [old.name, 7]
        assert not fleet.deaths(begun)
    finally:
        old.close()


def test_m2_a_process_that_was_stopped_declares_nobody_dead_and_is_back_without_restart(fleet: Fleet) -> None:
    stopped, *others = reversed(fleet.nodes)
    begun = time.monotonic()
    stopped.signal(signal.SIGSTOP)
    wait_for("the pause is over", lambda: time.monotonic() > begun + PAUSE, PAUSE + 1)
    stopped.signal(signal.SIGCONT)
    fleet.wait_whole(REJOIN)
    assert others[0].ask("call", name=stopped.name) == [stopped.name, 7]
    assert stopped.ask("call", name=others[0].name) == [others[0].name, 7]
    assert not fleet.deaths(begun, others)

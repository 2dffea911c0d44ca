"""What a cluster of ten hosts does when its network fails: real processes in network namespaces (M3, M4).

The bounds are those of the protocol, not of the machine: what is measured is mostly waiting.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from namespaces import Network

from fleet import Fleet, networked

HOSTS = 10
SILENT_LOSS = 8.0
# The longest pause between two greetings of a node that is down, and a few probes.
REJOIN = 75.0

House = tuple[Network, Fleet]


@pytest.fixture(scope="module")
def ten() -> Iterator[House]:
    with networked(HOSTS) as made:
        yield made


@pytest.fixture
def house(ten: House) -> Iterator[House]:
    network, fleet = ten
    fleet.wait_whole(REJOIN)
    yield network, fleet
    network.heal()


def test_m3_silent_loss_is_seen_by_all_and_m4_healing_needs_no_restart(house: House) -> None:
    network, fleet = house
    lost, *rest = reversed(fleet.nodes)
    begun = time.monotonic()
    network.part([HOSTS - 1])
    seen = fleet.wait_seen(lost, ["down"], begun, rest, 30.0)
    assert seen[-1] < SILENT_LOSS, seen
    fleet.wait_named(lost.name, 0, begun, rest, 5.0)
    assert not fleet.deaths(begun, rest) or {text.split()[0] for text in fleet.deaths(begun, rest)} == {lost.name}
    network.heal()
    fleet.wait_whole(REJOIN)
    assert rest[0].ask("call", name=lost.name) == [lost.name, 7]
    assert lost.ask("call", name=rest[0].name) == [rest[0].name, 7]


def test_m4_halves_that_took_each_other_for_dead_are_one_cluster_again(house: House) -> None:
    network, fleet = house
    halves = fleet.nodes[: HOSTS // 2], fleet.nodes[HOSTS // 2 :]
    begun = time.monotonic()
    network.part(range(HOSTS // 2))
    for half, others in (halves, halves[::-1]):
        for other in others:
            fleet.wait_seen(other, ["down"], begun, half, 60.0)
    # Either half goes on by itself.
    for half in halves:
        assert half[0].ask("call", name=half[1].name) == [half[1].name, 7]
    network.heal()
    fleet.wait_whole(REJOIN)


def test_m4_a_host_whose_cable_was_pulled_is_back_when_it_is_plugged_in(house: House) -> None:
    network, fleet = house
    host = HOSTS - 2
    lost = fleet.nodes[host]
    rest = [node for node in fleet.nodes if node is not lost]
    begun = time.monotonic()
    network.down(host)
    assert (seen := fleet.wait_seen(lost, ["down"], begun, rest, 30.0))[-1] < SILENT_LOSS, seen
    network.heal()
    fleet.wait_whole(REJOIN)
    assert lost.ask("call", name=rest[0].name) == [rest[0].name, 7]


def test_m1_a_link_that_carries_one_way_only_kills_nobody(house: House) -> None:
    network, fleet = house
    network.silence([3], [4])
    fleet.nobody_dies(10.0)


def test_m3_a_fifth_of_all_packets_lost_kills_nobody(house: House) -> None:
    network, fleet = house
    network.lose(0.2)
    fleet.nobody_dies(10.0)


def test_a_plaintext_peer_from_another_host_is_refused_in_words(house: House) -> None:
    network, fleet = house
    begun = time.monotonic()
    stranger = {"addr": f"{network.ip(2)}:7001", "seeds": [network.addr(0)], "join_timeout": 5.0}
    for settings, word in (
        ({"insecure": True}, "TLS"),
        ({}, "plaintext"),
        ({"passphrase": "another one"}, "passphrase"),
    ):
        answer = fleet.nodes[2].try_to("join", **stranger, **settings)
        assert answer.get("error") in ("RefusedError", "JoinError"), answer
        assert word in answer["text"], answer
    assert not fleet.deaths(begun)


def test_m6_hosts_without_ipv4_form_a_cluster() -> None:
    with networked(3, ipv6=True) as (_, fleet):
        assert fleet.nodes[2].ask("call", name="n1") == ["n1", 7]

"""Who is told what at the rendezvous of a Ray job, without Ray."""

from pulsing.integrations._meeting import CLAIM, FORGET, LEASE, LINGER, STALE, Entry, Meeting


def begun(now: float = 0.0) -> Meeting:
    meeting = Meeting(now)
    assert meeting.enter("a", (), now).first
    assert meeting.begin("a", "a:1", now)
    return meeting


def test_of_those_who_come_at_once_one_begins() -> None:
    meeting = Meeting(0.0)
    assert meeting.enter("a", (), 0.0) == Entry(first=True)
    assert meeting.enter("b", (), 0.1) == Entry()
    assert meeting.begin("a", "a:1", 0.2)
    assert meeting.enter("b", (), 0.3) == Entry(("a:1",))


def test_one_that_was_chosen_and_died_is_replaced_and_cannot_come_back_as_first() -> None:
    meeting = Meeting(0.0)
    assert meeting.enter("a", (), 0.0).first
    assert meeting.enter("b", (), CLAIM + 1).first
    assert not meeting.begin("a", "a:1", CLAIM + 2)
    assert meeting.begin("b", "b:1", CLAIM + 2)
    assert meeting.enter("a", (), CLAIM + 3) == Entry(("b:1",))


def test_a_silent_node_is_a_seed_until_somebody_found_it_away() -> None:
    meeting = begun()
    later = STALE + 1
    assert meeting.enter("b", (), later) == Entry(("a:1",))
    assert meeting.enter("b", ("a:1",), later) == Entry(first=True)


def test_a_node_that_was_heard_of_is_never_given_up_because_one_cannot_reach_it() -> None:
    meeting = begun()
    meeting.beat("a:1", 10.0)
    assert meeting.enter("b", ("a:1",), 10.0 + STALE / 2) == Entry(("a:1",))


def test_seeds_are_those_heard_of_last_and_outlive_the_first_node() -> None:
    meeting = begun()
    for n in range(8):
        meeting.beat(f"b:{n}", 1.0 + n / 10)
    assert meeting.enter("c", (), 2.0).seeds == ("b:7", "b:6", "b:5", "b:4", "b:3")
    meeting.beat("b:0", 50.0)
    assert meeting.enter("c", (), FORGET + 1.05).seeds == ("b:0", "b:7", "b:6", "b:5", "b:4")


def test_a_beat_brings_the_others_that_live() -> None:
    meeting = begun()
    assert meeting.beat("b:1", 1.0) == ("a:1",)
    assert meeting.beat("b:1", STALE + 1) == ()


def test_after_a_restart_nodes_get_time_to_be_heard_of() -> None:
    meeting = Meeting(100.0, restarted=True)
    assert meeting.enter("b", (), 100.1) == Entry()
    meeting.beat("a:1", 101.0)
    assert meeting.enter("b", (), 101.1) == Entry(("a:1",))


def test_it_is_over_soon_after_the_last_left_and_later_after_the_last_was_lost() -> None:
    left = begun()
    left.leave("a:1", 1.0)
    assert not left.over(1.0 + LINGER)
    assert left.over(1.1 + LINGER)
    lost = begun()
    assert not lost.over(LEASE)
    assert lost.over(LEASE + 0.1)
    two = begun()
    two.beat("b:1", 0.5)
    two.leave("a:1", 1.0)
    assert not two.over(1.1 + LINGER)

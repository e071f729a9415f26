"""The part of a pool's service that a backlogged tenant really gets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_processors.dispatcher.scheduling.served_shares import ServedShares


def test_a_share_is_what_was_served_since_the_backlog_began() -> None:
    shares = ServedShares()
    for _ in range(500):
        shares.dispatched("other", "normal", 100)
    shares.begin("a", "normal", 400)
    for _ in range(300):
        shares.dispatched("other", "normal", 75)
        shares.dispatched("a", "normal", 25)
    assert shares.share("a", "normal") == pytest.approx(0.25, abs=0.02)
    assert shares.share("a", "high") is None, "by class"


def test_before_two_turns_there_is_none() -> None:
    shares = ServedShares()
    shares.begin("a", "normal", 1_000)
    assert shares.share("a", "normal") is None
    shares.dispatched("a", "normal", 100)
    shares.dispatched("other", "normal", 1_800)
    assert shares.share("a", "normal") is None, "it may just not have had its turn"
    shares.dispatched("other", "normal", 100)
    assert shares.share("a", "normal") == pytest.approx(0.05, abs=0.02)


def test_a_pool_that_stands_still_changes_nothing() -> None:
    shares = ServedShares()
    shares.begin("a", "normal", 200)
    for _ in range(20):
        shares.dispatched("a", "normal", 100)
        shares.dispatched("other", "normal", 100)
    assert shares.share("a", "normal") == shares.share("a", "normal") == pytest.approx(0.5, abs=0.05)


def test_a_backlog_that_ended_is_forgotten() -> None:
    shares = ServedShares()
    shares.begin("a", "normal", 100)
    shares.dispatched("a", "normal", 300)
    shares.end("a", "normal")
    shares.end("a", "normal")
    shares.begin("a", "normal", 100)
    shares.dispatched("other", "normal", 300)
    assert shares.share("a", "normal") == 0.0


def test_it_follows_what_changes() -> None:
    shares = ServedShares()
    shares.begin("a", "normal", 200)
    for _ in range(100):
        shares.dispatched("a", "normal", 100)
    assert shares.share("a", "normal") == pytest.approx(1.0, abs=0.05)
    for _ in range(300):
        shares.dispatched("a", "normal", 10)
        shares.dispatched("other", "normal", 90)
    assert shares.share("a", "normal") == pytest.approx(0.1, abs=0.05)


EVENTS = st.lists(st.tuples(st.sampled_from("abc"), st.floats(1, 1e6)), max_size=60)


@given(EVENTS, st.floats(0, 1e6))
def test_shares_are_parts_of_one(events: list[tuple[str, float]], turn_tokens: float) -> None:
    shares = ServedShares()
    for name in "abc":
        shares.begin(name, "normal", turn_tokens)
    for name, tokens in events:
        shares.dispatched(name, "normal", tokens)
    found = [share for share in (shares.share(name, "normal") for name in "abc") if share is not None]
    assert all(0 <= share <= 1 for share in found)

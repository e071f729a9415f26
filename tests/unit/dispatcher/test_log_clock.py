"""What our own heartbeats say about the clocks."""

from hypothesis import given
from hypothesis import strategies as st

from stream_processors.dispatcher.feedback.broker_clock import BrokerClock

NOW_MS = 1_700_000_000_000
delays_ms = st.tuples(st.integers(0, 5_000), st.integers(0, 120_000))


def heartbeat(clock: BrokerClock, ahead_ms: int, at_ms: int = NOW_MS, write_ms: int = 3, read_ms: int = 40) -> None:
    """One that was made at this time by the broker's clock."""
    made_at_ms, appended_at_ms = at_ms + ahead_ms, at_ms + write_ms
    clock.heard(made_at_ms, appended_at_ms, made_at_ms + write_ms + read_ms)


def test_nothing_is_known_before_the_first() -> None:
    assert BrokerClock().skew_ms is None
    assert BrokerClock().broker_ms(NOW_MS) is None


def test_a_clock_that_is_off_is_found_out_to_the_time_of_a_write_or_a_read() -> None:
    for ahead_ms, said in ((31_000, 30_997), (-31_000, -30_960), (0, 0), (2, 0), (-30, 0)):
        clock = BrokerClock()
        heartbeat(clock, ahead_ms)
        assert clock.skew_ms == said


def test_a_clock_that_was_set_is_believed_at_once() -> None:
    clock = BrokerClock()
    for ahead_ms in (0, 5_000, -5_000, 0):
        heartbeat(clock, ahead_ms)
        heartbeat(clock, ahead_ms)
        assert clock.skew_ms is not None
        assert abs(clock.skew_ms - ahead_ms) <= 40


@given(st.integers(-60_000, 60_000), st.lists(delays_ms, min_size=1, max_size=80))
def test_delays_are_never_taken_for_skew(ahead_ms: int, delays: list[tuple[int, int]]) -> None:
    """However slow the broker, however long this process slept: no more is said than is true."""
    clock, at_ms = BrokerClock(), NOW_MS
    for write_ms, read_ms in delays:
        heartbeat(clock, ahead_ms, at_ms, write_ms, read_ms)
        at_ms += 200
    assert clock.skew_ms is not None
    assert 0 <= clock.skew_ms <= ahead_ms or 0 >= clock.skew_ms >= ahead_ms
    shown_ms = clock.broker_ms(at_ms + ahead_ms)
    assert shown_ms is not None
    assert at_ms <= shown_ms <= at_ms + min(write_ms for write_ms, _ in delays[-50:]), "late by the quickest write"

"""How fast a partition brings what is refused, while others send."""

from hypothesis import given
from hypothesis import strategies as st

from fairlane.ownership import PartitionId
from stream_processors.dispatcher.intake.invalid_record_limiter import InvalidRecordLimiter

HOSTILE, OTHER = PartitionId("requests.hostile", 0), PartitionId("requests.other", 0)
PER_S = 100


def test_a_partition_alone_is_never_paused() -> None:
    pace = InvalidRecordLimiter(PER_S)
    for number in range(10_000):
        pace.arrived(HOSTILE, number)
        pace.charge(HOSTILE, 100, number)
    assert pace.in_debt(10_000) == set()


def test_beside_others_a_debtor_is_paused_until_its_debt_is_paid() -> None:
    pace = InvalidRecordLimiter(PER_S)
    pace.arrived(OTHER, 0)
    pace.arrived(HOSTILE, 0)
    crossed = [pace.charge(HOSTILE, 100, 0) for _ in range(60)]
    assert crossed.count(True) == 1  # said once, when the burst of 50 was used up
    assert pace.in_debt(0) == {HOSTILE}
    assert pace.in_debt(99) == {HOSTILE}
    assert pace.in_debt(101) == set()
    assert set(pace.slow) == {HOSTILE}
    assert pace.in_debt(601) == set()
    assert not pace.slow


def test_others_that_sent_long_ago_are_not_protected() -> None:
    pace = InvalidRecordLimiter(PER_S)
    pace.arrived(OTHER, 0)
    pace.arrived(HOSTILE, 1_900)
    for _ in range(1_000):
        pace.charge(HOSTILE, 100, 1_900)
    assert pace.in_debt(1_950) == {HOSTILE}
    assert pace.in_debt(2_001) == set()
    pace.arrived(OTHER, 2_100)
    assert pace.in_debt(2_100) == {HOSTILE}


def test_a_large_record_costs_as_many_small_ones() -> None:
    pace = InvalidRecordLimiter(PER_S)
    pace.arrived(OTHER, 0)
    pace.arrived(HOSTILE, 0)
    pace.charge(HOSTILE, 4 * 1024 * 1024, 0)
    assert pace.in_debt(0) == {HOSTILE}


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 300_000)), max_size=200))
def test_what_is_charged_while_not_in_debt_stays_within_rate_and_burst(steps: list[tuple[int, int]]) -> None:
    """As the dispatcher uses it: nothing more is read of a partition in debt."""
    pace, now_ms, charged, last = InvalidRecordLimiter(PER_S), 0, 0.0, 0.0
    for wait_ms, size in steps:
        now_ms += wait_ms
        pace.arrived(OTHER, now_ms)
        if HOSTILE not in pace.in_debt(now_ms):
            pace.arrived(HOSTILE, now_ms)
            last = max(1.0, size / 32_768)
            charged += last
            pace.charge(HOSTILE, size, now_ms)
    assert charged <= PER_S * (0.5 + now_ms / 1_000) + last + 1e-6

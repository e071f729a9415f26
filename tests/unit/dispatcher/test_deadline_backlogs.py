"""How much of a backlog has an earlier deadline."""

from hypothesis import given
from hypothesis import strategies as st

from stream_processors.dispatcher.scheduling.deadline_backlogs import DeadlineBacklogs
from tests.kit.scheduler_kit import Kit

DAY_MS = 24 * 3_600_000
DEADLINES_MS = st.integers(0, DAY_MS) | st.integers(0, 100_000)


@given(st.lists(st.tuples(DEADLINES_MS, st.integers(1, 1_000), st.booleans()), max_size=60), DEADLINES_MS)
def test_it_is_the_sum_over_those_that_are_left(steps: list[tuple[int, int, bool]], at_ms: int) -> None:
    kit, backlogs = Kit(), DeadlineBacklogs()
    queued = [kit.request(deadline_at_ms=deadline_ms, cost_tokens=tokens) for deadline_ms, tokens, _ in steps]
    for item in queued:
        backlogs.add(item)
    left = []
    for item, (_, _, goes) in zip(queued, steps, strict=True):
        if goes:
            backlogs.remove(item)
        else:
            left.append(item)
    wanted = sum(item.cost_tokens for item in left if item.deadline_at_ms // 1_000 <= at_ms // 1_000)
    assert backlogs.tokens_until("a", "normal", at_ms) == wanted
    for item in left:
        backlogs.remove(item)
    assert backlogs == DeadlineBacklogs()


def test_backfill_and_others_are_left_out() -> None:
    kit, backlogs = Kit(), DeadlineBacklogs()
    backlogs.add(kit.request("a", is_backfill=True))
    backlogs.add(kit.request("b"))
    assert backlogs.tokens_until("a", "normal", DAY_MS) == 0

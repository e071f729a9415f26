"""However many chunks may be under way: none is opened while too much waits to be written."""

import pytest

from fairlane.outcomes import Outcome
from fairlane.records import InferenceReply, InferenceRequest, Output
from producers.backfill import runner
from producers.backfill.job import Status
from tests.kit.backfill_kit import TENANT, good_rows, world_of

CHUNKS = 60
TEXT = "x" * 10_000
PATIENCE_MS = 60_000


@pytest.mark.parametrize(("most_held_bytes", "is_held_up"), [(len(TEXT) * 5, True), (len(TEXT) * 1_000, False)])
def test_no_chunk_is_opened_while_the_answers_that_wait_take_too_much(
    monkeypatch: pytest.MonkeyPatch, most_held_bytes: int, is_held_up: bool
) -> None:
    monkeypatch.setattr(runner, "MOST_HELD_BYTES", most_held_bytes)
    world = world_of(good_rows(2 * CHUNKS), chunk_rows=2, max_open_chunks=CHUNKS)
    firsts: set[str] = set()
    opened = 0

    def answer(request: InferenceRequest) -> InferenceReply | None:
        """The first row of every chunk takes its time, so that nothing can be written until then."""
        nonlocal opened
        firsts.update(one.request_id for one in world.sent[::2])
        if world.now_ms < 1_000_000 + PATIENCE_MS:
            opened = len(world.plans)
            if request.request_id in firsts:
                world.unanswered.append(request)
                return None
        return InferenceReply(request.request_id, TENANT, Outcome.OK, model="words", output=Output(text=TEXT))

    world.answer = answer
    assert world.run() is Status.COMPLETED

    assert (opened < CHUNKS) is is_held_up
    assert world.output is not None
    assert [one.row for one in world.output] == list(range(2 * CHUNKS)), "it goes on once they are written"

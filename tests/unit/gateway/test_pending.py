"""Calls that wait: each gets its own reply and nobody else's, and what is lost is looked for elsewhere."""

import asyncio
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.outcomes import Code
from fairlane.records import InferenceReply, Output, ReplyChunk
from fairlane_server.kafka.reply_partition import partition_of
from producers.gateway.edge.error_responses import error_response
from producers.gateway.pipeline.pending import MOST_UNTAKEN_CHARS, Pending, PendingReply
from producers.gateway.pipeline.publisher import TOO_MANY_CALLS, busy_with_tenant
from producers.openai_api.errors import GatewayError
from tests.kit.submitter_doubles import Chunks, Recorded

REPLY = InferenceReply("id-1", "acme", "ok", output=Output(text="one two"))
CHUNK = ReplyChunk("id-1", "acme", 1, 1, 0, "one ")


def pending_of(max_calls: int) -> Pending:
    return Pending(max_calls, Chunks(), Recorded().find)  # type: ignore[arg-type]  # a double


def test_a_reply_goes_to_all_who_wait_for_it_and_the_first_counts() -> None:
    pending = pending_of(8)
    one, same, other = (pending.open("acme", name) for name in ("id-1", "id-1", "id-2"))
    pending.settle([REPLY])
    pending.settle([replace(REPLY, replayed=True)])
    assert (one.answer, same.answer, other.answer) == (REPLY, REPLY, None)


def test_a_reply_of_another_tenant_is_not_given() -> None:
    """Whoever guesses an id and asks under it gets a reply of its own tenant, which says so."""
    pending = pending_of(8)
    call = pending.open("globex", "id-1", streamed=True)
    pending.settle([REPLY])
    pending.add([("acme", CHUNK)])
    assert call.answer is None
    assert call.text is not None
    assert call.text.take() is None


def test_replies_that_nobody_waits_for_are_ignored() -> None:
    pending = pending_of(1)
    pending.settle([REPLY])
    pending.add([("acme", CHUNK)])
    call = pending.open("acme", "id-1")
    pending.close(call)
    pending.settle([REPLY])
    assert "id-1" not in pending


def test_no_more_calls_wait_than_may() -> None:
    pending = pending_of(2)
    first = pending.open("acme", "id-1")
    pending.open("globex", "id-1")
    with pytest.raises(GatewayError) as raised:
        pending.open("initech", "id-2")
    assert (raised.value.status, raised.value.code) == (503, Code.OVERLOADED)
    pending.close(first)
    pending.close(first)
    assert len(pending) == 1
    pending.open("initech", "id-2")


def test_one_tenant_has_half_and_the_others_the_rest() -> None:
    pending = pending_of(8)
    mine = [pending.open("acme", f"id-{number}") for number in range(4)]
    with pytest.raises(GatewayError) as raised:
        pending.open("acme", "id-9")
    assert (raised.value.status, raised.value.code) == (429, TOO_MANY_CALLS)
    assert raised.value.retry_after_ms
    for number in range(4):
        pending.open("globex", f"id-{number}")
    pending.close(mine.pop())
    pending.open("acme", "id-9")


@pytest.mark.parametrize(("path", "kind"), [("/v1/chat/completions", "rate_limit_error"), ("/v1/requests", None)])
def test_a_tenant_with_too_many_calls_is_told_in_the_shape_of_its_route(path: str, kind: str | None) -> None:
    answer = error_response(path, busy_with_tenant())
    told = json.loads(bytes(answer.body))["error"]
    assert (answer.status_code, told["code"], told.get("type")) == (429, TOO_MANY_CALLS, kind)
    assert answer.headers["retry-after"] == "1"


def test_text_comes_in_pieces_and_the_reply_has_the_rest() -> None:
    pending = pending_of(1)
    call = pending.open("acme", "id-1", streamed=True)
    news = call.news
    pending.add([("acme", CHUNK)])
    assert news.is_set()
    assert call.text is not None
    assert str(call.text.take()) == "one "
    pending.settle([REPLY])
    assert str(call.text.take()) == "two"
    pending.add([("acme", replace(CHUNK, seq=1, text="late"))])
    assert call.text.take() is None


def test_text_that_nobody_takes_is_bounded_and_the_reply_has_it_all() -> None:
    pending = pending_of(4)
    call, taken = (pending.open("acme", name, streamed=True) for name in ("id-1", "id-2"))
    piece = "x" * 1_000
    whole = Output(text=1_000 * piece)
    came = ""
    for seq in range(1_000):
        for request_id in ("id-1", "id-2"):
            pending.add([("acme", replace(CHUNK, request_id=request_id, seq=seq, text=piece))])
        came += str(taken.take() or "")
    assert came == whole.text, "who takes it gets all"
    first = call.take()
    assert first is not None
    assert len(first.text) <= MOST_UNTAKEN_CHARS
    pending.settle([replace(REPLY, output=whole)])
    rest = call.take()
    assert rest is not None
    assert not rest.restarted
    assert first.text + rest.text == whole.text


def test_text_that_is_left_out_shows_that_it_goes_on() -> None:
    pending = pending_of(1)
    call = pending.open("acme", "id-1", streamed=True)
    pending.add([("acme", CHUNK)])
    assert not call.still_comes()
    for seq in (1, 2):
        pending.add([("acme", replace(CHUNK, seq=seq, text="x" * MOST_UNTAKEN_CHARS))])
        assert call.still_comes()
        assert not call.still_comes(), "nothing came since"


def test_a_lost_partition_concerns_the_calls_that_wait_there() -> None:
    pending = pending_of(4)
    pending.owned(frozenset(range(8)), 8)
    ids = {partition_of(request_id, 8): request_id for request_id in (pending.new_request_id() for _ in range(500))}
    here, there = pending.open("acme", ids[3]), pending.open("acme", ids[4])
    news = here.news
    pending.lost(frozenset({3}))
    assert news.is_set()
    news = here.news
    pending.lost(frozenset({3}))
    assert not news.is_set(), "it is known already"
    assert (here.is_lost, there.is_lost) == (True, False)


def test_news_are_told_to_everybody_who_waits() -> None:
    async def wait() -> None:
        pending = pending_of(1)
        call = pending.open("acme", "id-1")
        waiters = [asyncio.ensure_future(call.news.wait()) for _ in range(3)]
        await asyncio.sleep(0)
        pending.settle([REPLY])
        await asyncio.gather(*waiters)
        assert not call.news.is_set(), "the next news are not these"

    asyncio.run(wait())


@given(st.lists(st.tuples(st.sampled_from(["open", "close", "settle"]), st.integers(0, 5)), max_size=60))
def test_what_waits_is_what_was_opened_and_not_closed(steps: list[tuple[str, int]]) -> None:
    pending = pending_of(16)
    model: list[PendingReply] = []
    for verb, number in steps:
        if verb == "open" and len(model) == 8:
            with pytest.raises(GatewayError):
                pending.open("acme", f"id-{number}")
        elif verb == "open":
            model.append(pending.open("acme", f"id-{number}"))
        elif verb == "close" and number < len(model):
            pending.close(model.pop(number))
        elif verb == "settle":
            pending.settle([replace(REPLY, request_id=f"id-{number}")])
            assert all(call.answer is not None for call in model if call.request_id == f"id-{number}")
        assert len(pending) == len(model)
        assert all((f"id-{n}" in pending) == any(call.request_id == f"id-{n}" for call in model) for n in range(6))

"""Calls that wait: each gets its own reply and nobody else's, and what is lost is looked for elsewhere."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.records import InferenceReply, Output, ReplyChunk
from producers.gateway.pipeline.pending import Pending, TooManyCallsError

REPLY = InferenceReply("id-1", "acme", "ok", output=Output(text="one two"))
CHUNK = ReplyChunk("id-1", "acme", 1, 1, 0, "one ")


def test_a_reply_goes_to_all_who_wait_for_it_and_the_first_counts() -> None:
    pending = Pending(4)
    one, same, other = (pending.open("acme", name, 0) for name in ("id-1", "id-1", "id-2"))
    assert pending.settle(REPLY)
    assert pending.settle(replace(REPLY, replayed=True))
    assert (one.reply, same.reply, other.reply) == (REPLY, REPLY, None)


def test_a_reply_of_another_tenant_is_not_given() -> None:
    """Whoever guesses an id and asks under it gets a reply of its own tenant, which says so."""
    pending = Pending(4)
    call = pending.open("globex", "id-1", 0, streamed=True)
    assert not pending.settle(REPLY)
    pending.add("acme", CHUNK)
    assert call.reply is None
    assert call.text is not None
    assert call.text.take() is None


def test_replies_that_nobody_waits_for_are_ignored() -> None:
    pending = Pending(1)
    assert not pending.settle(REPLY)
    pending.add("acme", CHUNK)
    call = pending.open("acme", "id-1", 0)
    pending.close(call)
    assert not pending.settle(REPLY)
    assert "id-1" not in pending


def test_no_more_calls_wait_than_may() -> None:
    pending = Pending(2)
    first = pending.open("acme", "id-1", 0)
    pending.open("acme", "id-1", 0)
    assert pending.is_full
    with pytest.raises(TooManyCallsError):
        pending.open("acme", "id-2", 0)
    pending.close(first)
    pending.close(first)
    assert len(pending) == 1
    pending.open("acme", "id-2", 0)


def test_text_comes_in_pieces_and_the_reply_has_the_rest() -> None:
    pending = Pending(1)
    call = pending.open("acme", "id-1", 0, streamed=True)
    news = call.news
    pending.add("acme", CHUNK)
    assert news.is_set()
    assert call.text is not None
    assert str(call.text.take()) == "one "
    pending.settle(REPLY)
    assert str(call.text.take()) == "two"
    pending.add("acme", replace(CHUNK, seq=1, text="late"))
    assert call.text.take() is None


def test_a_lost_partition_concerns_the_calls_that_wait_there() -> None:
    pending = Pending(3)
    here, there = pending.open("acme", "id-1", 3), pending.open("acme", "id-2", 4)
    news = here.news
    assert pending.lose({3}) == 1
    assert pending.lose({3}) == 0, "it is known already"
    assert news.is_set()
    assert (here.is_lost, there.is_lost) == (True, False)


def test_news_are_told_to_everybody_who_waits() -> None:
    async def wait() -> None:
        pending = Pending(1)
        call = pending.open("acme", "id-1", 0)
        waiters = [asyncio.ensure_future(call.news.wait()) for _ in range(3)]
        await asyncio.sleep(0)
        pending.settle(REPLY)
        await asyncio.gather(*waiters)
        assert not call.news.is_set(), "the next news are not these"

    asyncio.run(wait())


@given(st.lists(st.tuples(st.sampled_from(["open", "close", "settle"]), st.integers(0, 5)), max_size=60))
def test_what_waits_is_what_was_opened_and_not_closed(steps: list[tuple[str, int]]) -> None:
    pending, model = Pending(8), []
    for verb, number in steps:
        if verb == "open" and not pending.is_full:
            model.append(pending.open("acme", f"id-{number}", 0))
        elif verb == "close" and number < len(model):
            pending.close(model.pop(number))
        elif verb == "settle":
            assert pending.settle(replace(REPLY, request_id=f"id-{number}")) == any(
                call.request_id == f"id-{number}" for call in model
            )
        assert len(pending) == len(model)
        assert all((f"id-{n}" in pending) == any(call.request_id == f"id-{n}" for call in model) for n in range(6))

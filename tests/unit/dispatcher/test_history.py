"""Conversations at the dispatcher: what was said before goes with the request, within the budget, whatever happens."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from fairlane.outcomes import Degradation, HistoryReason
from fairlane.records import HistoryUse, Message, Parameters, RequestInput, Retrieval, WorkItem
from fairlane_server.store_error import StoreError
from stream_processors.dispatcher.enrichment.context import ReadHistory
from stream_processors.dispatcher.enrichment.history import HistoryReader
from tests.kit.dispatcher_bench import MODEL, Bench, encoded, handed_back, request
from tests.kit.fake_passages import collection, hit
from tests.kit.fake_turns import FakeTurns, turn, turn_id
from tests.kit.waiting import eventually_async

WORK = "priority.pool.normal"
BUDGET_S = 1.0


@pytest.fixture
def bench() -> Bench:
    made = Bench(retrieval_budget_ms=int(1_000 * BUDGET_S))
    made.turns.add("acme", "talk", turn(1), turn(2))
    made.passages.add(collection())
    made.passages.nearest = (hit("a"),)
    return made


def given(number: int = 1, **fields: Any) -> bytes:
    return encoded(number, **{"conversation_id": "talk", **fields})


def work(bench: Bench) -> list[WorkItem]:
    return bench.decoded(WORK)


def contents(item: WorkItem) -> list[str]:
    return [message.content for message in item.history]


def decide_and_wait(bench: Bench, *values: bytes) -> list[WorkItem]:
    """What becomes of these."""

    async def run() -> None:
        for offset, value in enumerate(values):
            await bench.write(offset, value)
        running = asyncio.create_task(bench.dispatcher.run())
        await bench.eventually(lambda: len(work(bench)) == len(values))
        running.cancel()

    asyncio.run(run())
    return work(bench)


def test_what_was_said_goes_with_the_request(bench: Bench) -> None:
    bench.run(encoded(2), given())
    plain, item = work(bench)
    assert item.history == (
        Message("user", "question 1"),
        Message("assistant", "answer 1"),
        Message("user", "question 2"),
        Message("assistant", "answer 2"),
    )
    assert (item.history_use, item.degradations) == (HistoryUse(4), ())
    assert (plain.history, plain.history_use) == ((), None)
    # A word, a number and what a message is framed with, each with the margin.
    more = item.prompt_tokens - plain.prompt_tokens
    assert 4 * 12 < more < 4 * (12 + 6)
    assert item.cost_tokens - plain.cost_tokens == more


def test_another_tenant_and_another_conversation_have_said_nothing(bench: Bench) -> None:
    bench.turns.add("globex", "talk", turn(9))
    bench.run(given(conversation_id="other"), given(2))
    other, talk = work(bench)
    assert (other.history, other.history_use, other.degradations) == ((), HistoryUse(0), ())
    assert len(talk.history) == 4
    assert {asked[0] for asked in bench.turns.asked} == {"acme"}


def test_only_what_generates_goes_on_a_conversation(bench: Bench) -> None:
    embedder = replace(MODEL, model="vectors", tasks=("embed",), max_output_tokens=0)
    bench.register(list(bench.dispatcher.registry.tenants.values()), [MODEL, embedder])
    bench.run(given(model="vectors", task="embed", input=RequestInput(texts=("a",))))
    assert bench.turns.asked == []


def test_passages_and_history_are_looked_up_at_once_and_share_the_room(bench: Bench) -> None:
    bench.passages.hangs = True
    bench.turns.hangs = True
    (item,) = decide_and_wait(bench, given(retrieval=Retrieval("handbook", 2)))
    assert item.history_use is not None
    assert item.retrieval_use is not None
    assert (item.history_use.reason, item.retrieval_use.reason) == ("late", "late")
    assert set(item.degradations) == {Degradation.NO_HISTORY, Degradation.NO_RETRIEVAL}
    (timeout_s,) = bench.turns.timeouts_s
    assert timeout_s == pytest.approx(BUDGET_S, abs=BUDGET_S / 2)


def test_passages_have_the_room_that_history_leaves(bench: Bench) -> None:
    bench.register(list(bench.dispatcher.registry.tenants.values()), [replace(MODEL, max_context_tokens=400)])
    bench.passages.nearest, bench.passages.matching = (hit("long", 190), hit("short", 20)), ()
    wanted: dict[str, Any] = {"retrieval": Retrieval("handbook", 2), "parameters": Parameters(50)}
    bench.run(given(conversation_id=None, **wanted), given(2, **wanted))
    alone, with_history = work(bench)
    assert [one.passage_id for one in alone.passages] == ["long", "short"]
    assert [one.passage_id for one in with_history.passages] == ["short"]
    assert len(with_history.history) == 4


def test_a_long_conversation_has_half_of_the_room_and_says_that_it_is_shortened(bench: Bench) -> None:
    bench.register(list(bench.dispatcher.registry.tenants.values()), [replace(MODEL, max_context_tokens=400)])
    bench.turns.add("acme", "long", *(turn(number, "word " * 15, "word " * 15) for number in range(9)))
    bench.run(given(conversation_id="long", parameters=Parameters(50)))
    (item,) = work(bench)
    assert item.history_use == HistoryUse(4, HistoryReason.SHORTENED)
    assert item.degradations == ()
    assert bench.turns.asked[-1][3] < 200


def test_a_conversation_without_room_is_left_out_and_said(bench: Bench) -> None:
    bench.register(list(bench.dispatcher.registry.tenants.values()), [replace(MODEL, max_context_tokens=120)])
    bench.run(given(parameters=Parameters(50)))
    (item,) = work(bench)
    assert (item.history, item.history_use) == ((), HistoryUse(0, HistoryReason.NO_ROOM))
    assert item.degradations == (Degradation.NO_HISTORY,)


@pytest.mark.parametrize(("trouble", "reason"), [("hangs", "late"), ("away", "unavailable")])
def test_what_goes_wrong_costs_the_budget_and_is_said(bench: Bench, trouble: str, reason: str) -> None:
    bench.turns.hangs = trouble == "hangs"
    if trouble == "away":
        bench.turns.failures = [StoreError("away")]
    (item,) = decide_and_wait(bench, given())
    assert item.history_use is not None
    assert (item.history, item.history_use.messages, item.history_use.reason) == ((), 0, reason)
    assert item.degradations == (Degradation.NO_HISTORY,)


def test_the_turn_that_it_comes_after_is_waited_for(bench: Bench) -> None:
    bench.turns.coming = [("acme", "talk", turn(number)) for number in (3, 4, 5)]
    (item,) = decide_and_wait(bench, given(conversation_after=turn_id(5)))
    assert contents(item)[-1] == "answer 5"
    assert item.history_use is not None
    assert item.history_use.reason is None
    assert item.degradations == ()


def test_a_turn_that_does_not_come_costs_no_more_than_the_budget(bench: Bench) -> None:
    (item,) = decide_and_wait(bench, given(conversation_after=turn_id(7)))
    assert contents(item)[-1] == "answer 2"
    assert item.history_use is not None
    assert item.history_use.reason == HistoryReason.BEHIND
    assert item.degradations == ()
    assert len(bench.turns.asked) > 3


def test_one_that_waits_its_turn_is_looked_up_before_and_again_if_it_was_behind(bench: Bench) -> None:
    bench.report(rate=10.0, tokens=10)
    patience = {"timeout_ms": 80_000_000}
    waiting = (encoded(number) for number in range(3, 40))

    async def run() -> None:
        values = (*waiting, given(1, conversation_after=turn_id(3), **patience), given(2, **patience))
        for offset, value in enumerate(values):
            await bench.write(offset, value)
        await bench.decide()
        # Once each: nobody waits for a turn of a conversation before its own has come.
        await bench.eventually(lambda: len(bench.turns.asked) == 2)
        bench.turns.add("acme", "talk", turn(3))
        bench.report(rate=1e9, tokens=1_000_000)
        bench.dispatcher.dispatch()
        await bench.eventually(lambda: len([item for item in work(bench) if item.history]) == 2)

    asyncio.run(run())
    found = {item.request.request_id: item for item in work(bench) if item.history}
    assert contents(found[request(1).request_id])[-1] == "answer 3"
    assert contents(found[request(2).request_id])[-1] == "answer 2"
    assert len(bench.turns.asked) == 3


def test_what_failed_while_it_waited_is_tried_again_and_what_was_found_is_not(bench: Bench) -> None:
    bench.report(rate=10.0, tokens=10)
    bench.turns.failures = [StoreError("away")]
    waiting = (encoded(number) for number in range(2, 40))

    async def run() -> None:
        both = given(1, timeout_ms=80_000_000, retrieval=Retrieval("handbook", 2))
        for offset, value in enumerate((*waiting, both)):
            await bench.write(offset, value)
        await bench.decide()
        await bench.eventually(lambda: len(bench.turns.asked) == 1 and len(bench.passages.searches) == 1)
        bench.report(rate=1e9, tokens=1_000_000)
        bench.dispatcher.dispatch()
        await bench.eventually(lambda: [item for item in work(bench) if item.history])

    asyncio.run(run())
    (item,) = [item for item in work(bench) if item.history]
    assert len(item.passages) == 1
    assert item.degradations == ()
    assert (len(bench.turns.asked), len(bench.passages.searches)) == (2, 1)


def test_work_that_was_handed_back_keeps_what_was_said(bench: Bench) -> None:
    said = tuple(Message(role, text) for text in ("a", "b") for role in ("user", "assistant"))
    use = HistoryUse(4)
    back = handed_back(request=request(1, conversation_id="talk"), history=said, history_use=use)
    bench.assign("returned.pool")
    bench.run(bench.classifier.codec.encode(back), topic="returned.pool")
    assert bench.turns.asked == []
    (item,) = work(bench)
    # A little less of it: the model did not have room for it, or it would not have come back.
    assert (item.history, item.history_use) == (said[2:], replace(use, messages=2, reason="shortened"))


def test_a_store_that_does_not_answer_a_tenant_is_left_alone_for_it_and_nobody_else() -> None:
    turns = FakeTurns(failures=[StoreError("away") for _ in range(5)])
    turns.add("globex", "talk", turn(1))
    reader = HistoryReader(turns, lambda: 1_000)

    async def ask(tenant: str) -> ReadHistory:
        return await reader.read(tenant, "talk", None, 1_000, BUDGET_S, lambda: True)

    async def run() -> None:
        for _ in range(7):
            assert (await ask("acme")).reason == HistoryReason.UNAVAILABLE
        assert len(turns.asked) == 5
        assert len((await ask("globex")).turns.turns) == 1

    asyncio.run(run())


def test_one_that_is_not_urgent_asks_once() -> None:
    turns = FakeTurns()
    turns.add("acme", "talk", turn(1))
    reader = HistoryReader(turns, lambda: 1_000)
    found = asyncio.run(reader.read("acme", "talk", turn_id(2), 1_000, 60.0, lambda: False))
    assert (len(found.turns.turns), found.reason, len(turns.asked)) == (1, HistoryReason.BEHIND, 1)


def test_a_store_that_goes_away_while_a_turn_is_awaited_costs_no_more_than_the_budget() -> None:
    turns = FakeTurns()
    turns.add("acme", "talk", turn(1))
    reader = HistoryReader(turns, lambda: 1_000)

    async def run() -> ReadHistory:
        asking = asyncio.create_task(reader.read("acme", "talk", "turn-2", 1_000, BUDGET_S, lambda: True))
        await eventually_async(lambda: turns.asked)
        turns.hangs = True
        return await asyncio.wait_for(asking, BUDGET_S + 30)

    found = asyncio.run(run())
    assert (len(found.turns.turns), found.reason) == (0, HistoryReason.LATE)

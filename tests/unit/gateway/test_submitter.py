"""The way into the log and back: what is published, what is refused before, and how a reply is waited for."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from fairlane import headers as names_of_headers
from fairlane.names import GATEWAY_REPLIES
from fairlane.outcomes import Code
from fairlane.records import (
    Budget,
    BudgetNotice,
    CancelRequest,
    InferenceReply,
    InferenceRequest,
    ModelVersion,
    Output,
    Parameters,
    ReplyChunk,
    RequestInput,
    TenantSpec,
)
from fairlane.schema_files import default_codec
from fairlane_server.kafka.reply_partition import partition_of
from fairlane_server.models.catalog import catalog_of
from producers.gateway.pipeline.call_context import CallContext, present
from producers.gateway.pipeline.early_rejection import LatestLoad, RegistrySnapshot
from producers.gateway.pipeline.pending import MOST_UNTAKEN_CHARS, Pending, PendingReply
from producers.gateway.pipeline.publisher import TOO_MANY_CALLS, not_confirmed
from producers.gateway.pipeline.submitter import Submitter
from producers.openai_api.errors import GatewayError
from tests.kit.submitter_doubles import Chunks, Log, Recorded
from tests.kit.waiting import eventually_async

WAIT_S = 20.0
NOW_MS = 1_760_000_000_000
PARTITIONS = 12
OWNED = frozenset(range(6))
REQUEST = InferenceRequest("", "chat", "generate", RequestInput(prompt="p"))
REGISTRY = RegistrySnapshot(
    {name: TenantSpec(name) for name in ("acme", "globex", "initech")},
    catalog_of(ModelVersion("chat", "1", "gpu", "simulated", ("generate",), "chat", 4_096, 512)),
)
PARENT = ("traceparent", b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")


@dataclass
class Bench:
    log: Log = field(default_factory=Log)
    chunks: Chunks = field(default_factory=Chunks)
    recorded: Recorded = field(default_factory=Recorded)
    max_calls: int = 8

    def run(self, test: Callable[[Submitter], Awaitable[None]]) -> None:
        async def main() -> None:
            submitter = Submitter(
                default_codec(),
                self.log,  # type: ignore[arg-type]  # a double
                Pending(self.max_calls, self.chunks, self.recorded.find),  # type: ignore[arg-type]  # a double
                lambda: REGISTRY,
                LatestLoad(),
            )
            submitter.pending.owned(OWNED, PARTITIONS)
            await test(submitter)

        asyncio.run(main())


def request(submitter: Submitter, **fields: Any) -> InferenceRequest:
    return replace(REQUEST, **({"request_id": submitter.new_request_id()} | fields))


def reply(request_id: str, tenant: str = "acme", text: str = "one two") -> InferenceReply:
    return InferenceReply(request_id, tenant, "ok", output=Output(text=text))


async def refused(submitter: Submitter, tenant: str = "acme", **fields: Any) -> GatewayError:
    with pytest.raises(GatewayError) as raised:
        await submitter.submit(tenant, request(submitter, **fields))
    assert len(submitter.pending) == 0, "nobody waits for what was not accepted"
    return raised.value


def test_a_request_is_published_as_its_tenants_and_answered_here() -> None:
    bench = Bench()

    async def test(submitter: Submitter) -> None:
        caller = CallContext(trace=(PARENT,))
        caller.requested_by = "key:0123456789abcdef"
        present.set(caller)
        asked = request(submitter, tenant=None, reply_to=None, requested_by="key:of another")
        waiting = await submitter.submit("acme", asked)
        ((topic, key, record, headers),) = bench.log.records
        assert (topic, key) == ("requests.acme", asked.request_id)
        named = replace(asked, requested_by="key:0123456789abcdef")
        assert record == replace(named, tenant="acme", reply_to=GATEWAY_REPLIES)
        assert partition_of(key, PARTITIONS) in OWNED
        assert headers[PARENT[0]] == PARENT[1]
        assert headers[names_of_headers.CE_ID] == key.encode()
        submitter.pending.settle([reply("other"), reply(key, "globex"), reply(key)])
        assert await waiting.reply(WAIT_S) == reply(key)
        assert await waiting.reply(WAIT_S) == reply(key), "it may be asked for again"
        waiting.forget()
        waiting.forget()
        assert len(submitter.pending) == 0
        assert (caller.request_id, caller.reply) == (key, reply(key))

    bench.run(test)


def test_what_would_be_refused_is_not_published() -> None:
    bench = Bench()

    async def test(submitter: Submitter) -> None:
        assert (await refused(submitter, "nobody")).status == 403
        assert (await refused(submitter, model="none")).code == Code.UNKNOWN_MODEL
        assert (await refused(submitter, priority="urgent")).field == "priority"
        assert (await refused(submitter, input=RequestInput(prompt="x" * 5_000_000))).status == 413
        wrong = await refused(submitter, metadata={"a": 1})
        assert (wrong.status, wrong.code) == (400, Code.INVALID)
        assert not bench.log.records

    bench.run(test)


def test_what_a_spent_budget_would_refuse_is_not_published() -> None:
    bench = Bench()
    of_key = Budget("each_key", "day", "XTS", hard_nanos=10)
    spent = BudgetNotice("hard", "each_key", "day", "XTS", 10, 11, 0, NOW_MS + 60_000, "key:1")

    async def test(submitter: Submitter) -> None:
        acme = TenantSpec("acme", budgets=(of_key,))
        submitter.registry = lambda: RegistrySnapshot({"acme": acme}, REGISTRY.models)
        submitter.clock = lambda: NOW_MS
        refusal = InferenceReply("other", "acme", "rejected", code=Code.INSUFFICIENT_QUOTA, budget=spent)
        submitter.spent.learn([refusal], NOW_MS)
        caller = CallContext()
        present.set(caller)
        caller.requested_by = "key:1"
        early = await refused(submitter)
        assert (early.status, early.code, early.budget) == (429, Code.INSUFFICIENT_QUOTA, spent)
        assert not bench.log.records
        caller.requested_by = "key:2"
        (await submitter.submit("acme", request(submitter))).forget()
        assert len(bench.log.records) == 1

    bench.run(test)


def test_a_gateway_that_drains_takes_nothing_new_and_answers_what_it_took() -> None:
    bench = Bench()

    async def test(submitter: Submitter) -> None:
        asked = request(submitter)
        waiting = await submitter.submit("acme", asked)
        submitter.is_draining = True
        with pytest.raises(GatewayError) as raised:
            await submitter.submit("acme", request(submitter))
        assert (raised.value.status, raised.value.code) == (503, Code.DRAINING)
        submitter.pending.settle([reply(asked.request_id)])
        assert (await waiting.reply(WAIT_S)).outcome == "ok"

    bench.run(test)


def test_no_more_calls_are_taken_than_may_wait() -> None:
    bench = Bench(max_calls=2)

    async def test(submitter: Submitter) -> None:
        waiting = await submitter.submit("acme", request(submitter))
        with pytest.raises(GatewayError) as raised:
            await submitter.submit("acme", request(submitter))
        assert (raised.value.status, raised.value.code) == (429, TOO_MANY_CALLS), "its own share is full"
        await submitter.submit("globex", request(submitter))
        with pytest.raises(GatewayError) as raised:
            await submitter.submit("initech", request(submitter))
        assert (raised.value.status, raised.value.code) == (503, Code.OVERLOADED)
        assert [topic for topic, *_ in bench.log.records] == ["requests.acme", "requests.globex"]
        waiting.forget()
        await submitter.submit("initech", request(submitter))

    bench.run(test)


def test_who_was_not_published_does_not_wait() -> None:
    bench = Bench()

    async def test(submitter: Submitter) -> None:
        bench.log.error = not_confirmed("id")
        error = await refused(submitter, parameters=Parameters(stream=True))
        assert error.request_id == "id"
        assert bench.chunks.streams == 0

    bench.run(test)


def test_waiting_ends_with_its_time_and_the_request_goes_on() -> None:
    bench = Bench()

    async def test(submitter: Submitter) -> None:
        asked = request(submitter)
        waiting = await submitter.submit("acme", asked)
        with pytest.raises(TimeoutError):
            await waiting.reply(0.01)
        submitter.pending.settle([reply(asked.request_id)])
        assert await waiting.reply(WAIT_S) == reply(asked.request_id)

    bench.run(test)


def test_when_waiting_ends_it_ends_for_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producers.gateway.pipeline.pending._LOOK_UP_TIMEOUT_S", 10 * WAIT_S)
    bench = Bench()

    async def test(submitter: Submitter) -> None:
        asked = request(submitter)
        waiting = await submitter.submit("acme", asked)
        lost = await submitter.submit("acme", request(submitter))
        looked_up = asyncio.Event()

        async def find(tenant: str, request_id: str) -> InferenceReply | None:
            looked_up.set()
            await asyncio.sleep(10 * WAIT_S)
            raise AssertionError("nobody ended it")

        submitter.pending.find_reply = find
        calls = [asyncio.ensure_future(waiting.reply(10 * WAIT_S))]
        await asyncio.sleep(0)
        submitter.pending.lost(OWNED)
        calls += [asyncio.ensure_future(lost.reply(10 * WAIT_S))]
        await looked_up.wait()
        submitter.pending.end_waiting()
        async with asyncio.timeout(WAIT_S):
            ended = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(one) for one in ended] == [TimeoutError] * 2
        submitter.pending.settle([reply(asked.request_id)])
        assert await waiting.reply(WAIT_S) == reply(asked.request_id), "what came is given all the same"

    bench.run(test)


def test_a_reply_in_a_partition_that_moved_is_looked_up() -> None:
    bench = Bench(recorded=Recorded(failures=1))

    async def test(submitter: Submitter) -> None:
        asked = request(submitter)
        waiting = await submitter.submit("acme", asked)
        call = asyncio.ensure_future(waiting.reply(WAIT_S))
        await asyncio.sleep(0)
        assert bench.recorded.asked == 0, "nobody asks Postgres while the reply comes here"
        submitter.pending.lost(OWNED)
        await eventually_async(lambda: bench.recorded.asked >= 2, what="another try after one that failed")
        bench.recorded.replies["acme", asked.request_id] = reply(asked.request_id)
        assert await call == reply(asked.request_id)

    bench.run(test)


def test_look_ups_that_fail_are_told_in_a_few_lines() -> None:
    """Postgres is away, and every call that lost its partition asks it."""
    bench = Bench(recorded=Recorded(failures=1_000_000), max_calls=200)

    async def test(submitter: Submitter) -> None:
        calls = [await submitter.submit("acme", request(submitter)) for _ in range(100)]
        submitter.pending.lost(OWNED)
        with capture_logs() as lines:
            waiting = [asyncio.ensure_future(call.reply(WAIT_S)) for call in calls]
            await eventually_async(lambda: bench.recorded.asked >= len(calls), what="a look-up of each")
        for call in waiting:
            call.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        failed = [line for line in lines if line["event"] == "reply_look_up_failed"]
        assert 1 <= len(failed) < len(calls) / 2
        assert {line["error"] for line in failed} == {"GatewayError"}

    bench.run(test)


def test_a_reply_is_taken_from_wherever_it_comes_first() -> None:
    bench = Bench()

    async def test(submitter: Submitter) -> None:
        asked = request(submitter)
        waiting = await submitter.submit("acme", asked)
        submitter.pending.lost(OWNED)
        submitter.pending.owned(OWNED, PARTITIONS)
        call = asyncio.ensure_future(waiting.reply(WAIT_S))
        await eventually_async(lambda: bench.recorded.asked, what="a look-up")
        submitter.pending.settle([reply(asked.request_id)])
        assert await call == reply(asked.request_id)

    bench.run(test)


def test_an_id_that_was_made_elsewhere_is_looked_up_from_the_beginning() -> None:
    bench = Bench()

    async def test(submitter: Submitter) -> None:
        mine = request(submitter)
        submitter.pending.owned(frozenset(), PARTITIONS)
        waiting = await submitter.submit("acme", mine)
        bench.recorded.replies["acme", mine.request_id] = reply(mine.request_id)
        assert await waiting.reply(WAIT_S) == reply(mine.request_id)
        assert not submitter.pending.owns_partitions
        assert submitter.new_request_id() != submitter.new_request_id()

    bench.run(test)


def test_text_comes_in_pieces_and_ends_with_the_reply() -> None:
    bench = Bench()

    async def test(submitter: Submitter) -> None:
        asked = request(submitter, parameters=Parameters(stream=True))
        waiting = await submitter.submit("acme", asked)
        assert bench.chunks.streams == 1
        submitter.pending.add([("acme", ReplyChunk(asked.request_id, "acme", 1, 1, 0, "one "))])
        deltas = waiting.deltas(WAIT_S)
        first = await anext(deltas)
        submitter.pending.settle([reply(asked.request_id)])
        assert [first.text, *[delta.text async for delta in deltas]] == ["one ", "two"]
        waiting.forget()
        assert bench.chunks.streams == 0

    bench.run(test)


def test_a_stream_that_was_not_taken_in_time_is_waited_for_as_long_as_text_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    piece = "x" * MOST_UNTAKEN_CHARS

    async def test(submitter: Submitter) -> None:
        asked = request(submitter, parameters=Parameters(stream=True))
        still_comes = PendingReply.still_comes

        def then_settled(call: PendingReply) -> bool:
            came = still_comes(call)
            submitter.pending.settle([reply(asked.request_id, text=2 * piece)])
            return came

        monkeypatch.setattr(PendingReply, "still_comes", then_settled)
        waiting = await submitter.submit("acme", asked)
        for seq in range(2):
            submitter.pending.add([("acme", ReplyChunk(asked.request_id, "acme", 1, 1, seq, piece))])
        assert [delta.text async for delta in waiting.deltas(0.01)] == [piece, piece]
        waiting.forget()

    bench.run(test)


def test_each_piece_of_a_stream_may_take_the_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()

    async def test(submitter: Submitter) -> None:
        asked = request(submitter, parameters=Parameters(stream=True))
        waiting = await submitter.submit("acme", asked)
        deadlines: list[float] = []

        async def news(_waiting: PendingReply, deadline_s: float) -> None:
            if len(deadlines) == 3:
                raise TimeoutError
            submitter.pending.add([("acme", ReplyChunk(asked.request_id, "acme", 1, 1, len(deadlines), "piece "))])
            deadlines.append(deadline_s)

        monkeypatch.setattr(PendingReply, "_news", news)
        deltas = waiting.deltas(WAIT_S)
        assert [(await anext(deltas)).text for _ in range(3)] == ["piece "] * 3
        assert deadlines == sorted(set(deadlines))
        with pytest.raises(TimeoutError):
            await anext(deltas)
        waiting.forget()

    bench.run(test)


def test_a_stream_without_chunks_has_its_text_in_one_piece() -> None:
    bench = Bench(chunks=Chunks(follows=False))

    async def test(submitter: Submitter) -> None:
        asked = request(submitter, parameters=Parameters(stream=True))
        waiting = await submitter.submit("acme", asked)
        submitter.pending.settle([reply(asked.request_id)])
        assert [delta.text async for delta in waiting.deltas(WAIT_S)] == ["one two"]
        waiting.forget()
        assert bench.chunks.streams == 0

    bench.run(test)


def test_a_cancel_goes_where_the_request_went() -> None:
    bench = Bench()

    async def test(submitter: Submitter) -> None:
        asked = request(submitter)
        await submitter.submit("acme", asked)
        await submitter.cancel("acme", asked.request_id)
        topic, key, record, _ = bench.log.records[-1]
        assert (topic, key) == ("requests.acme", asked.request_id)
        assert record == CancelRequest(asked.request_id, "acme")
        with pytest.raises(GatewayError, match="must be the id"):
            await submitter.cancel("acme", "no id")

    bench.run(test)

"""The dispatcher's loop without a broker: what it hands to the transactions, and what it forgets."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fairlane import headers, names
from fairlane.outcomes import Decision, Outcome
from fairlane.ownership import Membership, Ownership, PartitionId
from fairlane.records import (
    AuditEvent,
    InferenceReply,
    InferenceRequest,
    ModelVersion,
    Parameters,
    RequestInput,
    SourceCoordinate,
    TenantSpec,
    WorkItem,
)
from fairlane.schema_files import default_codec
from fairlane.transactions import OutRecord, Settlement, TransactionLoop
from stream_processors.dispatcher.decisions import DecisionWriter
from stream_processors.dispatcher.dispatcher import Dispatcher
from stream_processors.dispatcher.validation import Limits, validate
from stream_processors.dispatcher.work_queue import ArrivalOrder

NOW_MS = 1_000_000
SECRET = "a prompt nobody may see"
MODEL = ModelVersion("words", "1", "pool", "simulated", ("generate",), "words", 4_096, 512)
PARTITION = PartitionId("requests.acme", 0)


@dataclass
class Submitted:
    """Where a TransactionLoop would be."""

    settlements: list[Settlement] = field(default_factory=list)
    pending_count: int = 0

    def submit(self, settlement: Settlement) -> None:
        self.submit_many([settlement])

    def submit_many(self, settlements: Sequence[Settlement]) -> None:
        self.settlements.extend(settlements)

    @property
    def outputs(self) -> list[OutRecord]:
        return [output for settlement in self.settlements for output in settlement.outputs]


@dataclass
class Seen:
    """A duplicate index that a test fills."""

    firsts: dict[str, SourceCoordinate] = field(default_factory=dict)
    meanwhile: Any = None

    async def first_seen(self, entries: Sequence[tuple[str, str, SourceCoordinate]]) -> list[SourceCoordinate | None]:
        if self.meanwhile is not None:
            self.meanwhile()
        return [self.firsts.get(request_id) for _, request_id, _ in entries]


@dataclass
class Archive:
    reply: InferenceReply | None = None

    async def find(self, tenant: str, request_id: str, source: SourceCoordinate) -> InferenceReply | None:
        return self.reply


class Bench:
    """A dispatcher whose surroundings are all in the test's hand."""

    def __init__(self, max_held: int = 100, max_span: int = 1_000) -> None:
        self.ownership = Ownership(max_span)
        self.transactions = Submitted()
        self.seen = Seen()
        self.archive = Archive()
        self.now_ms = NOW_MS
        self.dispatcher = Dispatcher(
            codec=default_codec(),
            ownership=self.ownership,
            transactions=cast("TransactionLoop", self.transactions),
            writer=DecisionWriter(default_codec(), "dispatcher-1"),
            queue=ArrivalOrder(),
            duplicates=self.seen,
            archive=self.archive,
            limits=Limits(1_000_000, 512, 86_400_000, 4_096),
            max_held=max_held,
            max_held_bytes=1_000_000,
            clock=lambda: self.now_ms,
            tenants={"acme": TenantSpec("acme")},
            models={"words": MODEL},
        )
        self.assign()

    def assign(self) -> None:
        self.ownership.assign({PARTITION: None}, Membership(1, "me", b""))

    async def write(self, offset: int, value: bytes | None, message_headers: Sequence[tuple[str, bytes]] = ()) -> None:
        """A record as Faust hands it on."""
        message = SimpleNamespace(
            topic=PARTITION.topic,
            partition=0,
            offset=offset,
            timestamp=NOW_MS / 1_000,
            key=b"key",
            value=value,
            headers=message_headers,
            checksum=None,
        )
        await self.dispatcher.on_record(message)

    def run(self, *values: bytes | None) -> list[Settlement]:
        """Give it these records, let it decide them, and say what it settled."""

        async def turn() -> None:
            for offset, value in enumerate(values):
                await self.write(offset, value)
            await self.decide()

        asyncio.run(turn())
        return self.transactions.settlements

    async def decide(self) -> None:
        """Run its tasks until they have nothing left to do."""
        tasks = [asyncio.create_task(self.dispatcher.run()), asyncio.create_task(self.dispatcher.settle_duplicates())]
        for _ in range(50):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def decoded(self, topic: str) -> list[Any]:
        return [default_codec().decode(out.value) for out in self.transactions.outputs if out.topic == topic]


def request(number: int = 1, **fields: Any) -> InferenceRequest:
    made = InferenceRequest(
        f"00000000-0000-0000-0000-{number:012}", "words", "generate", RequestInput(prompt=SECRET), Parameters(4)
    )
    return replace(made, **fields)


def encoded(number: int = 1, **fields: Any) -> bytes:
    return default_codec().encode(request(number, **fields))


def test_good_requests_become_work_in_order() -> None:
    bench = Bench()
    settlements = bench.run(encoded(1), encoded(2, priority="high"))
    assert [settlement.claim.offset for settlement in settlements] == [0, 1]
    (item,) = bench.decoded("priority.pool.normal")
    assert item == WorkItem(
        request=request(1),
        tenant="acme",
        pool="pool",
        model_version="1",
        priority_class="normal",
        cost_tokens=5 + 2 * 4,
        submitted_at_ms=NOW_MS,
        admitted_at_ms=NOW_MS,
        dispatched_at_ms=NOW_MS,
        deadline_at_ms=NOW_MS + 60_000,
        reply_topic="replies.acme",
        dispatcher_id="dispatcher-1",
        source=SourceCoordinate("requests.acme", 0, 0),
    )
    (high,) = bench.decoded("priority.pool.high")
    assert high.deadline_at_ms == NOW_MS + 30_000


def test_only_the_trace_header_goes_on() -> None:
    bench = Bench()

    async def turn() -> None:
        await bench.write(0, encoded(), [("cookie", b"x"), (headers.TRACE_PARENT, b"00-1-2-01")])
        await bench.decide()

    asyncio.run(turn())
    (output,) = bench.transactions.outputs
    names_of_headers = [name for name, _ in output.headers]
    assert "cookie" not in names_of_headers
    assert (headers.TRACE_PARENT, b"00-1-2-01") in output.headers


def test_our_own_failure_buries_one_record_and_shows_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = validate

    def broken(one: InferenceRequest, *rest: Any, **options: Any) -> Any:
        if one.request_id.endswith("1"):
            raise RuntimeError(f"cannot cope with {one.input.prompt}")
        return real(one, *rest, **options)

    monkeypatch.setattr("stream_processors.dispatcher.dispatcher.validate", broken)
    bench = Bench()
    values = encoded(1), encoded(2)
    assert len(bench.run(*values)) == 2
    (letter,) = [out for out in bench.transactions.outputs if out.topic == names.DEAD_LETTER_REQUESTS]
    assert letter.value == values[0]
    assert dict(letter.headers)[headers.DLT_EXCEPTION_MESSAGE] == b"intake_failed: RuntimeError"
    assert len(bench.decoded("priority.pool.normal")) == 1
    shown = "".join(capsys.readouterr())
    assert "RuntimeError" in shown
    assert SECRET not in shown


def test_what_waited_too_long_is_answered_expired() -> None:
    bench = Bench()

    async def turn() -> None:
        await bench.write(0, encoded(timeout_ms=100))
        bench.now_ms += 101
        await bench.decide()

    asyncio.run(turn())
    (reply,) = bench.decoded("replies.acme")
    assert (reply.outcome, reply.source) == (Outcome.EXPIRED, SourceCoordinate("requests.acme", 0, 0))
    (event,) = bench.decoded(names.LEDGER_AUDIT)
    assert event.decision == Decision.EXPIRED


def test_a_revocation_purges_what_waits() -> None:
    bench = Bench()

    async def turn() -> None:
        await bench.write(0, encoded(1))
        bench.ownership.revoke_all()
        bench.dispatcher.on_revoked()
        await bench.decide()
        assert not bench.transactions.settlements
        # The same record again, in the next assignment.
        bench.assign()
        await bench.write(0, encoded(1))
        await bench.decide()

    asyncio.run(turn())
    assert [settlement.claim.offset for settlement in bench.transactions.settlements] == [0]


def test_a_revocation_during_intake_purges_what_is_being_admitted() -> None:
    bench = Bench()
    bench.seen.meanwhile = bench.ownership.revoke_all
    assert not bench.run(encoded(1))


def test_a_record_of_a_partition_that_moved_on_is_not_taken() -> None:
    bench = Bench()
    bench.ownership.revoke_all()
    assert not bench.run(encoded(1))


def test_a_full_dispatcher_reads_no_more_until_a_commit_makes_room() -> None:
    bench = Bench(max_held=2)

    async def turn() -> None:
        await bench.write(0, encoded(1))
        second = asyncio.create_task(bench.write(1, encoded(2)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not second.done()
        await bench.decide()
        bench.transactions.pending_count = 2
        bench.dispatcher.on_room()
        await asyncio.sleep(0)
        assert not second.done()
        bench.transactions.pending_count = 1
        bench.dispatcher.on_room()
        await asyncio.wait_for(second, 1)

    asyncio.run(turn())


def test_a_full_dispatcher_lets_go_when_its_partitions_are_revoked() -> None:
    """Otherwise the agent would hang in the record of an assignment that is over."""
    bench = Bench(max_held=1)

    async def turn() -> None:
        held = asyncio.create_task(bench.write(0, encoded(1)))
        await asyncio.sleep(0)
        assert not held.done()
        bench.ownership.revoke_all()
        bench.dispatcher.on_revoked()
        await asyncio.wait_for(held, 1)

    asyncio.run(turn())


def test_a_duplicate_is_audited_and_not_run() -> None:
    bench = Bench()
    first = SourceCoordinate("requests.acme", 0, 0)
    bench.seen.firsts[request(1).request_id] = first
    bench.run(encoded(1))
    assert {output.topic for output in bench.transactions.outputs} == {names.LEDGER_AUDIT}
    (event,) = bench.decoded(names.LEDGER_AUDIT)
    assert isinstance(event, AuditEvent)
    assert (event.decision, event.inputs) == (Decision.DUPLICATE, {"replayed": "false"})


def test_a_duplicate_of_a_settled_request_gets_a_copy_that_says_so() -> None:
    bench = Bench()
    bench.seen.firsts[request(1).request_id] = SourceCoordinate("requests.acme", 0, 0)
    bench.archive.reply = InferenceReply(request(1).request_id, "acme", Outcome.OK)
    bench.run(encoded(1))
    (reply,) = bench.decoded("replies.acme")
    assert reply == replace(bench.archive.reply, replayed=True)

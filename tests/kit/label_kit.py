"""The recorder's part of the labelling queue on a real Postgres: its tables, and the thread that fills the queue."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fairlane.clock import now_ms
from fairlane.names import CONTROL_TENANTS, LEDGER_FEEDBACK, LEDGER_USAGE, replies_topic
from fairlane.records import (
    Feedback,
    InferenceReply,
    InferenceRequest,
    Message,
    Output,
    RequestInput,
    SourceCoordinate,
    TenantSpec,
    UsageEvent,
    WorkItem,
)
from fairlane.schema_files import default_codec
from fairlane.settings import Settings
from fairlane_server.erasure.erasures import ErasureKind, Erasures
from fairlane_server.postgres.connection import ALL_TENANTS, act_for, connect
from stream_processors.recorder.label_collector import LabelCollector
from stream_processors.recorder.label_sources import WorkItemLog
from stream_processors.recorder.projection import LogRecord, project
from stream_processors.recorder.store import RecorderStore
from tests.kit.native_kit import used
from tests.kit.recorder_kit import Tables
from tests.kit.stack import PostgresServer

QUESTION = Message("user", "What is the capital of Australia?")
_DAY_MS = 86_400_000
_NUMBERS = "SELECT right(request_id, 12)::bigint FROM label_items ORDER BY tenant, request_id"


def request_id(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012d}"


class FakeWorkLog(WorkItemLog):
    """Work items as they would be in the log; its offsets are their numbers. Those in ``gone`` are not there, where
    those in ``replaced`` were, there is another one, and reading one of ``failing`` raises that error. ``fields`` are
    of single items, and ``asked`` of their requests; ``on_read`` is called before each one."""

    def __init__(self) -> None:
        self.gone: set[int] = set()
        self.replaced: set[int] = set()
        self.failing: dict[int, Exception] = {}
        self.fields: dict[int, dict[str, Any]] = {}
        self.asked: dict[int, dict[str, Any]] = {}
        self.on_read: Callable[[], None] = lambda: None
        self.reads = 0
        self.closed = 0

    def close(self) -> None:
        self.closed += 1

    def read(self, place: SourceCoordinate) -> WorkItem | None:
        self.reads += 1
        self.on_read()
        if (error := self.failing.get(place.offset)) is not None:
            raise error
        if place.offset in self.gone:
            return None
        tenant = "other" if place.offset in self.replaced else place.topic.split(".")[1]
        request = InferenceRequest(request_id(place.offset), "words", "generate", RequestInput(messages=(QUESTION,)))
        request = replace(request, **self.asked.get(place.offset, {}))
        source = SourceCoordinate(f"requests.{tenant}", 0, place.offset)
        item = WorkItem(request, tenant, "p", "2", "normal", 1, 1, 1, 1, 1, f"replies.{tenant}", "dispatcher-1", source)
        return replace(item, **self.fields.get(place.offset, {}))


class LabelBench:
    """What the recorder stores, and the thread that fills the queue, step by step."""

    def __init__(self, server: PostgresServer) -> None:
        self.server = server
        self.store = RecorderStore(server.recorder_dsn)
        self.works = FakeWorkLog()
        self.tables = Tables(server)
        self._collectors: list[LabelCollector] = []
        self.collector = self.collect_with()

    def collect_with(self, **settings: Any) -> LabelCollector:
        known = Settings(postgres_dsn=self.server.recorder_dsn, **settings)
        self._collectors.append(LabelCollector(known, self.works, lambda _: None))
        return self._collectors[-1]

    def close(self) -> None:
        for collector in self._collectors:
            collector.close()
        self.store.close()

    def allow(self, *tenants: str, evaluation: str = "allowed") -> None:
        self.write([(CONTROL_TENANTS, TenantSpec(tenant, evaluation=evaluation), tenant) for tenant in tenants])

    def answered(self, *numbers: int, tenant: str = "acme", topic: str = "priority", **fields: Any) -> None:
        records: list[tuple[str, object, str]] = []
        for number in numbers:
            source = SourceCoordinate(f"requests.{tenant}", 0, number)
            reply = InferenceReply(
                *(request_id(number), tenant, "ok"), model="words", model_version="2", arm="new", source=source
            )
            reply = replace(reply, task="generate", output=Output(text=f"answer {number}"))
            reply = replace(reply, **fields)
            event: UsageEvent = replace(
                used(number, tenant=tenant),
                request_id=request_id(number),
                occurred_at_ms=now_ms(),
                work=SourceCoordinate(f"{topic}.{tenant}.normal", 0, number),
            )
            records += [(replies_topic(tenant), reply, tenant), (LEDGER_USAGE, event, tenant)]
        self.write(records)

    def rated(self, *numbers: int, tenant: str = "acme", **fields: Any) -> None:
        given: dict[str, Any] = {"thumb": "down", "given_at_ms": now_ms(), "given_by": "user:1"} | fields
        self.write([(LEDGER_FEEDBACK, Feedback(request_id(one), tenant, **given), tenant) for one in numbers])

    def write(self, records: Sequence[tuple[str, object, str]]) -> None:
        log = [
            LogRecord(topic, 0, offset, now_ms(), key.encode(), default_codec().encode(record))
            for offset, (topic, record, key) in enumerate(records, start=now_ms())
        ]
        self.store.write(project(log, default_codec()), {})

    def queued(self) -> list[int]:
        """Numbers of the items, by tenant."""
        return [number for (number,) in self.tables.rows(_NUMBERS)]

    def erase(self, kind: ErasureKind, *names: str, tenant: str = "acme") -> None:
        """Request an erasure, and carry it out."""
        with Erasures(self.server.gateway_dsn, tenant, kept_ms=_DAY_MS) as erasures:
            erasure_id = erasures.request(kind, list(names), "key:1")
            while erasures.step(erasure_id):
                pass

    def as_owner(self, statement: str, *parameters: object) -> None:
        """Change rows of all tenants, as time would."""
        with connect(self.server.owner_dsn, "tests") as connection, connection.transaction():
            act_for(connection, ALL_TENANTS)
            connection.execute(statement.encode(), parameters)

"""Replays of the log in tests: answered work without dispatchers and consumers, results of copies, and the runner."""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import psycopg

from fairlane import names
from fairlane.clock import now_ms
from fairlane.outcomes import Outcome, Task
from fairlane.records import (
    InferenceReply,
    LabelScore,
    Output,
    SourceCoordinate,
    TenantSpec,
    Timings,
    TokenUsage,
    UsageEvent,
    WorkItem,
)
from fairlane.settings import Settings
from fairlane_server.evaluation.copies import EvaluationArm
from fairlane_server.log_replay.plan import LogReplayPlan, LogReplayState
from fairlane_server.log_replay.runner import LogReplayRunner
from fairlane_server.log_replay.store import LogReplay, LogReplays
from stream_processors.recorder.projection import LogRecord, project
from stream_processors.recorder.store import RecorderStore
from tests.kit.log_reader import LogReader
from tests.kit.pipeline import Pipeline
from tests.kit.stack import PostgresServer
from tests.kit.waiting import eventually
from tests.kit.work_items import work_item, write_work

_numbers = count()


@dataclass
class ReplayBench:
    """A pipeline's topics and a database, without a service of the pipeline but what a test starts."""

    pipeline: Pipeline
    database: PostgresServer
    _copies: LogReader | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        # A tenant that the recorder knows.
        self.record_tenants(*self.pipeline.tenants.values())

    @property
    def settings(self) -> Settings:
        """Of the process of the admin API."""
        return Settings(
            kafka_bootstrap_servers=self.pipeline.settings.kafka_bootstrap_servers,
            group_prefix=self.pipeline.group_prefix,
            postgres_dsn=self.database.admin_dsn,
        )

    @property
    def model(self) -> str:
        return self.pipeline.models[0].model

    def record(self, *records: LogRecord) -> None:
        """Write records of the log as the recorder does."""
        with closing(RecorderStore(self.database.recorder_dsn)) as store:
            store.write(project(records, self.pipeline.codec), {})

    def record_tenants(self, *specs: TenantSpec) -> None:
        encoded = self.pipeline.codec.encode
        self.record(
            *(
                LogRecord(names.CONTROL_TENANTS, 0, next(_numbers), now_ms(), spec.tenant.encode(), encoded(spec))
                for spec in specs
            )
        )

    def work(self, number: int, tenant: str = "a", **fields: Any) -> list[WorkItem]:
        """So many admitted classifications, in the log and not answered."""
        made = [
            work_item(self.pipeline, tenant=tenant, offset=next(_numbers), request=self.pipeline.request(Task.CLASSIFY))
            for _ in range(number)
        ]
        return [replace(item, **fields) for item in made]

    def answered(
        self, items: Sequence[WorkItem], *, outcome: str = Outcome.OK, label: str = "7", version: str = "1"
    ) -> list[SourceCoordinate]:
        """Write work to the log, and its answers to the tables. Returns where the work stands."""
        places = write_work(self.pipeline, *items)
        self.record_answers(items, places, outcome=outcome, label=label, version=version)
        return places

    def record_answers(
        self,
        items: Sequence[WorkItem],
        places: Sequence[SourceCoordinate],
        *,
        outcome: str = Outcome.OK,
        label: str = "7",
        version: str = "1",
    ) -> None:
        """The usage and the reply of each dispatch, as the recorder writes them."""
        self.record(*(self.usage(item, place, outcome) for item, place in zip(items, places, strict=True)))
        self.record(*(self.reply(item, outcome=outcome, label=label, version=version) for item in items))

    def usage(self, item: WorkItem, place: SourceCoordinate, outcome: str) -> LogRecord:
        event = UsageEvent(
            request_id=item.request.request_id,
            tenant=item.tenant,
            pool=item.pool,
            model=item.request.model,
            model_version=item.model_version,
            priority_class=item.priority_class,
            outcome=outcome,
            code=None,
            prompt_tokens=0,
            completion_tokens=0,
            cached_tokens=0,
            cost_tokens=1,
            engine_ms=5,
            occurred_at_ms=now_ms(),
            work=place,
        )
        key = item.tenant.encode()
        return LogRecord(names.LEDGER_USAGE, 0, next(_numbers), now_ms(), key, self.pipeline.codec.encode(event))

    def reply(
        self, item: WorkItem, *, outcome: str = Outcome.OK, label: str = "7", version: str | None = None, **fields: Any
    ) -> LogRecord:
        """The reply to work, or to a copy, on the log."""
        at_ms = now_ms()
        own = {"output": Output(labels=(LabelScore(label, 0.9),)) if outcome == Outcome.OK else None}
        made = InferenceReply(
            item.request.request_id,
            item.tenant,
            outcome,
            model=item.request.model,
            model_version=version or item.model_version,
            task=item.request.task,
            usage=TokenUsage(),
            timings=Timings(at_ms, at_ms, at_ms, at_ms, at_ms, at_ms + 5),
            source=item.source,
            evaluation=item.evaluation,
            **(own | fields),
        )
        key = item.request.request_id.encode()
        return LogRecord(item.reply_topic, 0, next(_numbers), at_ms, key, self.pipeline.codec.encode(made))

    def plan(self, **fields: Any) -> LogReplay:
        """Plan a replay of everything, with these fields of its plan."""
        plan = LogReplayPlan(self.model, "2", "1", 0, now_ms() + 1, sample=1.0)
        with LogReplays(self.database.operator_dsn) as replays:
            return replays.create(replace(plan, **fields), "1", "a test", now_ms())

    def replay(self, made: LogReplay) -> LogReplay:
        """As it is now."""
        return self.named(made.replay)

    def named(self, name: str) -> LogReplay:
        with LogReplays(self.database.operator_dsn) as replays:
            return replays.get(name)

    @contextmanager
    def running(self) -> Iterator[LogReplayRunner]:
        """The runner, as in the process of the admin API; ended at the end, and an error of it is raised."""
        failures: list[BaseException] = []
        runner = LogReplayRunner(self.settings, self.pipeline.codec, failures.append)
        runner.start()
        try:
            yield runner
        finally:
            runner.stop()
        assert failures == []

    def copies(self, made: LogReplay) -> list[WorkItem]:
        """The copies of a replay that are committed now."""
        if self._copies is None:
            self._copies = self.pipeline.reader(names.EVALUATION_WORK)
        return self.copies_in(self._copies, made)

    def copies_in(self, reader: LogReader, made: LogReplay) -> list[WorkItem]:
        reader.read_to_end()
        found = [self.pipeline.codec.decode_as(WorkItem, one.value()) for one in reader.records]
        return [one for one in found if one.evaluation is not None and one.evaluation.run == made.replay]

    def copied_requests(self, made: LogReplay) -> Counter[tuple[str, str, str]]:
        """How many copies of each request there are, by arm, tenant and request."""
        marks = [one.evaluation for one in self.copies(made)]
        return Counter((mark.arm, mark.tenant, mark.request_id) for mark in marks if mark is not None)

    def end_copies(self, copies: Sequence[WorkItem], labels: Mapping[str, str] | None = None, **fields: Any) -> None:
        """Give copies their results: of each arm the label of it, by default the same as the originals'."""
        said = labels or {}
        arms = [(one, one.evaluation.arm) for one in copies if one.evaluation is not None]
        if arms:
            self.record(*(self.reply(one, label=said.get(arm, "7"), **fields) for one, arm in arms))

    def wait_for(self, made: LogReplay, state: LogReplayState, timeout_s: float = 60.0) -> LogReplay:
        """The replay when it has a state."""
        eventually(lambda: self.replay(made).state is state, timeout_s, f"{state} of {made.replay}")
        return self.replay(made)

    def execute(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """As the owner of the tables, for all tenants."""
        with psycopg.connect(self.database.owner_dsn) as connection:
            connection.execute("SELECT set_config('fairlane.tenant', '*', true)")
            cursor = connection.execute(statement.encode(), values)
            return cursor.fetchall() if cursor.description else []


def requests_of(items: Sequence[WorkItem]) -> set[tuple[str, str, str]]:
    """Arm, tenant and request of all copies that are due."""
    return {(arm, item.tenant, item.request.request_id) for item in items for arm in EvaluationArm}


class Answering:
    """Gives every copy of a replay its result as it comes, on a thread, as a pool would."""

    def __init__(self, bench: ReplayBench, made: LogReplay, labels: Mapping[str, str] | None = None) -> None:
        self._bench = bench
        self._made = made
        self._labels = labels
        # A reader is for one thread.
        self._reader = bench.pipeline.reader(names.EVALUATION_WORK)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.most_outstanding = 0

    def __enter__(self) -> "Answering":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        ended = 0
        while not self._stop.wait(0.05):
            copies = self._bench.copies_in(self._reader, self._made)
            self.most_outstanding = max(self.most_outstanding, len(copies) - ended)
            self._bench.end_copies(copies[ended:], self._labels)
            ended = len(copies)

"""Drift in a real Postgres: from recorded results to a finding, its alarm, its samples and the labelling queue, and
what takes them out again."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from fairlane.clock import now_ms
from fairlane.names import CONTROL_TENANTS, LEDGER_USAGE, backfill_topic, replies_topic
from fairlane.records import (
    InferenceReply,
    InferenceRequest,
    LabelScore,
    Message,
    Output,
    RequestInput,
    SourceCoordinate,
    TenantSpec,
    TokenUsage,
    UsageEvent,
    WorkItem,
)
from fairlane.schema_files import default_codec
from fairlane.settings import Settings
from fairlane_server.cli import main
from fairlane_server.drift.distances import NumberReference
from fairlane_server.drift.monitor import CALIBRATION_BLOCKS, REFERENCE_BLOCKS, DriftFinding
from fairlane_server.drift.streams import DriftRules, StreamKey
from fairlane_server.erasure.erasures import ErasureKind, Erasures
from stream_processors.recorder.drift_store import DriftStore, ShownFinding
from stream_processors.recorder.drift_watch import MOST_SAMPLES, DriftWatch
from stream_processors.recorder.label_collector import LabelCollector
from stream_processors.recorder.label_sources import WorkItemLog
from stream_processors.recorder.projection import LogRecord, project
from stream_processors.recorder.store import RecorderStore
from tests.kit.native_kit import used
from tests.kit.recorder_kit import Tables
from tests.kit.stack import PostgresServer

pytestmark = [pytest.mark.broker, pytest.mark.full]

DAY_MS = 86_400_000
SIZE = 16
BLOCK_S = 20
LEARNING = REFERENCE_BLOCKS + CALIBRATION_BLOCKS
MOST_UNTIL_FOUND = 40
FINDINGS = "SELECT tenant, version, statistic, effect FROM drift_findings ORDER BY found_at_ms, statistic"
SAMPLES = "SELECT request_id FROM drift_samples ORDER BY strangeness DESC, request_id"


def request_id(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012d}"


class Works(WorkItemLog):
    """Work items as they would be in the log; the text of the request with each offset is ``question``."""

    def __init__(self) -> None:
        self.question = "What is the capital of Australia?"
        self.reads = 0

    def close(self) -> None:
        """Nothing to close."""

    def read(self, place: SourceCoordinate) -> WorkItem | None:
        self.reads += 1
        tenant = place.topic.split(".")[1]
        asked = RequestInput(messages=(Message("user", self.question),))
        request = InferenceRequest(request_id(place.offset), "words", "generate", asked)
        source = SourceCoordinate(f"requests.{tenant}", 0, place.offset)
        return WorkItem(request, tenant, "p", "2", "normal", 1, 1, 1, 1, 1, f"replies.{tenant}", "dispatcher-1", source)


class Rig:
    """A recorder's tables and its drift watch, step by step, with a clock of its own: a block takes BLOCK_S seconds."""

    def __init__(self, server: PostgresServer) -> None:
        self.server = server
        self.store = RecorderStore(server.recorder_dsn)
        self.works = Works()
        self.tables = Tables(server)
        # A test takes less than a part of the day.
        self.at_ms = now_ms() // DAY_MS * DAY_MS
        self.drawn = random.Random(58)
        self.number = 0
        self._watches: list[DriftWatch] = []
        self.watch = self.another_watch()

    def another_watch(self, size: int = SIZE) -> DriftWatch:
        settings = Settings(postgres_dsn=self.server.recorder_dsn)
        rules = DriftRules(size, 1_000, 0, 1.0)
        self._watches.append(DriftWatch(settings, rules, self.works, lambda _: None, lambda: self.at_ms))
        return self._watches[-1]

    def close(self) -> None:
        for watch in self._watches:
            watch.close()
        self.store.close()

    def allow(self, tenant: str, evaluation: str = "allowed") -> None:
        self.write([(CONTROL_TENANTS, TenantSpec(tenant, evaluation=evaluation), tenant)])

    def blocks(self, count: int, *, look: bool = True, tenant: str = "acme", **fields: Any) -> None:
        """So many blocks are answered, and after each one is looked."""
        for _ in range(count):
            self.at_ms += 1_000 * BLOCK_S
            self.answered(SIZE, tenant=tenant, **fields)
            if look:
                self.watch.look()

    def answered(
        self, count: int, *, tenant: str = "acme", longer: float = 1.0, refused: float = 0.0, **fields: Any
    ) -> None:
        records: list[tuple[str, object, str]] = []
        for _ in range(count):
            self.number += 1
            number = self.number
            text = "I'm sorry, but I cannot." if self.drawn.random() < refused else "Canberra."
            usage = TokenUsage(round(self.drawn.lognormvariate(5, 1)), round(longer * self.drawn.lognormvariate(4, 1)))
            reply = InferenceReply(
                *(request_id(number), tenant, "ok"),
                model="words",
                model_version="2",
                task="generate",
                output=Output(text=text),
                usage=usage,
                source=SourceCoordinate(f"requests.{tenant}", 0, number),
            )
            event: UsageEvent = replace(
                used(number, tenant=tenant),
                request_id=request_id(number),
                occurred_at_ms=self.at_ms,
                work=SourceCoordinate(f"priority.{tenant}.normal", 0, number),
            )
            records += [(replies_topic(tenant), replace(reply, **fields), tenant), (LEDGER_USAGE, event, tenant)]
        self.write(records)

    def write(self, records: Sequence[tuple[str, object, str]]) -> None:
        # Spread over the time of the block, the last one at its end.
        log = [
            LogRecord(topic, 0, number, self.at_ms - 500 * (len(records) - at), key.encode(), raw)
            for at, (number, (topic, record, key)) in enumerate(enumerate(records, start=now_ms()), start=1)
            if (raw := default_codec().encode(record))
        ]
        self.store.write(project(log, default_codec()), {})

    def until_found(self, statistic: str, **fields: Any) -> tuple[Any, ...]:
        """Look block by block until there is a finding of this statistic."""
        for _ in range(MOST_UNTIL_FOUND):
            self.blocks(1, **fields)
            if found := [row for row in self.tables.rows(FINDINGS) if row[2] == statistic]:
                return found[0]
        raise AssertionError(f"nothing was found of {statistic}")

    def phases(self, version: str) -> Mapping[str, str]:
        query = (
            "SELECT one.key, one.value ->> 'phase' FROM drift_streams, jsonb_each(statistics) AS one WHERE version = %s"
        )
        return dict(self.tables.rows(query, version))


@pytest.fixture
def rig(migrated: PostgresServer) -> Iterator[Rig]:
    made = Rig(migrated)
    yield made
    made.close()


def gauge(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, labels)


def test_a_change_of_answers_becomes_a_finding_with_samples_an_alarm_and_items_to_judge(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rig.allow("acme")
    rig.blocks(LEARNING + 5)
    assert set(rig.phases("2").values()) == {"watching"}
    assert rig.tables.rows(FINDINGS) == []
    changed_at_ms, first_changed = rig.at_ms, rig.number + 1

    tenant, version, _, effect = rig.until_found("output_tokens", longer=4.0)

    assert (tenant, version) == ("acme", "2")
    assert effect > 0.3
    ((finding_id, since_ms),) = rig.tables.rows("SELECT finding_id, since_ms FROM drift_findings")
    assert abs(since_ms - changed_at_ms) <= 3_000 * BLOCK_S
    samples = [one for (one,) in rig.tables.rows(SAMPLES)]
    assert len(samples) == MOST_SAMPLES
    assert sum(int(one[-12:]) >= first_changed for one in samples) > MOST_SAMPLES / 2
    labels = {"tenant": "acme", "model": "words", "statistic": "output_tokens"}
    assert gauge("fairlane_drift_findings", **labels) == 1
    assert rig.phases("2") == {"output_tokens": "reference", "refusals": "watching"}
    assert gauge("fairlane_drift_statistics", phase="watching") == 3

    collector = LabelCollector(
        Settings(postgres_dsn=rig.server.recorder_dsn, labels_sample_rate=0.0),
        rig.works,
        lambda _: None,
        lambda: rig.at_ms,
    )
    try:
        collector.look()
    finally:
        collector.close()
    queued = rig.tables.rows("SELECT request_id, origin FROM label_items ORDER BY 1")
    assert queued == [(one, "drift") for one in sorted(samples)]

    monkeypatch.setenv("POSTGRES_DSN", rig.server.operator_dsn)
    # The log of the watch.
    capsys.readouterr()

    def run(*arguments: str, code: int = 0) -> Any:
        with pytest.raises(SystemExit) as ended:
            main(("drift", *arguments, "--json"))
        shown = capsys.readouterr()
        assert ended.value.code == code, shown.err
        return shown.err if code else json.loads(shown.out)

    (listed,) = run("list", "--tenant", "acme")["findings"]
    shown = run("show", finding_id)
    assert shown["finding"] == listed
    assert listed["now"]["p50"] > 2 * listed["before"]["p50"]
    assert [one["request_id"] for one in shown["samples"]] == samples
    states = {(one["version"], one["statistic"]): one["phase"] for one in run("status")["statistics"]}
    assert states["", "prompt_tokens"] == states["2", "refusals"] == "watching"
    assert run("list", "--tenant", "globex") == {"findings": []}
    assert "no finding" in run("show", "drift-0000000000000000", code=1)


def test_without_consent_no_text_is_read_and_lengths_are_watched_all_the_same(rig: Rig) -> None:
    rig.allow("acme", evaluation="denied")
    rig.blocks(REFERENCE_BLOCKS + 1)

    assert rig.works.reads == 0
    assert rig.phases("2") == {"output_tokens": "calibration"}
    assert rig.phases("") == {"prompt_tokens": "calibration"}


def test_languages_and_refusals_are_found_and_go_with_the_consent(rig: Rig) -> None:
    rig.allow("acme")
    rig.blocks(LEARNING + 5, refused=0.05)
    rig.works.question = "Какая столица Австралии?"
    rig.until_found("language", refused=0.05)
    rig.until_found("refusals", refused=0.8)

    ((version, before, now),) = rig.tables.rows(
        "SELECT version, before, now FROM drift_findings WHERE statistic = 'language'"
    )
    assert (version, before) == ("", {"en": 1.0, "ru": 0.0})
    assert now["ru"] > 0.5
    assert rig.tables.rows("SELECT count(*) > 0 FROM drift_samples") == [(True,)]
    rig.allow("acme", evaluation="denied")
    rig.watch.look()
    assert rig.tables.rows(FINDINGS) == []
    assert rig.tables.rows("SELECT count(*) FROM drift_samples") == [(0,)]
    assert rig.tables.rows("SELECT DISTINCT has_payload FROM drift_streams") == [(False,)]
    assert rig.phases("2").keys() | rig.phases("").keys() <= {"output_tokens", "prompt_tokens"}


def test_an_erasure_takes_samples_and_nothing_erased_becomes_one(rig: Rig) -> None:
    rig.blocks(LEARNING + 5)
    rig.until_found("output_tokens", longer=4.0)
    first, second, *rest = [one for (one,) in rig.tables.rows(SAMPLES)]
    with Erasures(rig.server.gateway_dsn, "acme", kept_ms=DAY_MS) as erasures:
        erasures.request(ErasureKind.REQUESTS, [first], "key:1")
        assert [one for (one,) in rig.tables.rows(SAMPLES)] == [second, *rest]
        # Between the look that read it and the one that stores it.
        store = DriftStore(rig.server.recorder_dsn)
        look = store.look(rig.at_ms, SIZE)
        key = StreamKey("acme", "words", "generate", "2")
        requests = store.window(key, 0, rig.at_ms, 2 * MOST_SAMPLES)
        erasures.request(ErasureKind.REQUESTS, [requests[0].request_id], "key:1")
        reference = NumberReference((1.0,))
        finding = DriftFinding("output_tokens", 0.5, 20.0, 16.0, 0, rig.at_ms, 7, {}, {}, reference)
        shown = ShownFinding("drift-1", key, finding, [(one, 1.0) for one in requests])
        assert store.write(look, [], [], [shown], rig.at_ms)
        assert not store.write(look, [], [], [shown], rig.at_ms), "another recorder was faster"
        store.close()
    stored = {one for (one,) in rig.tables.rows("SELECT request_id FROM drift_samples WHERE finding_id = 'drift-1'")}
    assert stored == {one.request_id for one in requests[1:]}


def test_two_recorders_count_each_block_once(rig: Rig) -> None:
    other = rig.another_watch()
    for _ in range(10):
        rig.blocks(1)
        other.look()
        rig.watch.look()

    blocks = rig.tables.rows(
        "SELECT (statistics -> 'prompt_tokens' ->> 'blocks')::int FROM drift_streams WHERE version = ''"
    )
    assert blocks == [(10,)]


def test_only_answers_of_models_to_online_requests_count(rig: Rig) -> None:
    rig.blocks(2, outcome="failed", output=None)
    rig.blocks(2, source=SourceCoordinate(backfill_topic("acme"), 0, 1))
    assert rig.tables.rows("SELECT count(*) FROM drift_streams") == [(0,)]

    rig.blocks(1, task="classify", model="digits", output=Output(labels=(LabelScore("7", 0.75), LabelScore("1", 0.25))))
    assert rig.tables.rows("SELECT version, block -> 'sample' FROM drift_streams") == [("2", [])]
    assert rig.phases("2") == {"confidence": "reference"}


def test_another_size_of_blocks_begins_anew(rig: Rig) -> None:
    rig.blocks(3)
    rig.watch = rig.another_watch(SIZE // 2)
    rig.blocks(1)

    query = (
        "SELECT block_requests, (statistics -> 'prompt_tokens' ->> 'blocks')::int FROM drift_streams WHERE version = ''"
    )
    assert rig.tables.rows(query) == [(SIZE // 2, 1)]


def test_what_is_old_is_removed(rig: Rig) -> None:
    rig.blocks(1)
    rig.at_ms += 91 * DAY_MS
    rig.watch.look()

    assert rig.tables.rows("SELECT count(*) FROM drift_streams") == [(0,)]

"""From records of the log to events: what cannot be true is passed over, and what is old is known to be old."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from confluent_kafka import TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from fairlane import headers, names
from fairlane.codec import Codec
from fairlane.outcomes import Outcome
from fairlane.records import CapacityReport, ClassLoad, DispatchReport, PoolLoad, SourceCoordinate, UsageEvent
from fairlane.schema_files import committed_schemas, default_codec
from fairlane.schema_registry import RegistryError
from fairlane.skipping_consumer import BAD_CHECKSUM, SkippedRange
from fairlane_server.admission_rule import CapacityState
from stream_processors.dispatcher.budgets.ledger import ReadUsage
from stream_processors.dispatcher.feedback.work_records import AgedCapacityReport, UsageRead, WorkRecords
from stream_processors.dispatcher.scheduling.capacity import CapacityBoard

NOW_MS = 1_700_000_000_000
REPORT = CapacityReport("gpu", "llm", ("m",), "healthy", False, 1.0, 1.0, 32, 16_384, 0.5, 0, 0, 1, 1_000.0, (0, 1))
USAGE = UsageEvent(
    *("r", "acme", "llm", "m", "1", "high", Outcome.OK, None, 1, 1, 0, 3, 1, 1),
    SourceCoordinate("priority.llm.high", 0, 3),
)
WORK = [
    (headers.COST_TOKENS, b"120"),
    (headers.SOURCE_TOPIC, b"requests.acme"),
    (headers.SOURCE_PARTITION, b"0"),
    (headers.SOURCE_OFFSET, b"41"),
]


def heartbeat(weight: float = 1.0, instance_id: str = "other", reported_at_ms: int = NOW_MS) -> DispatchReport:
    load = PoolLoad("llm", 1, 1.0, 0, (ClassLoad("normal", weight, 1, 1),))
    return DispatchReport(instance_id, 0, reported_at_ms, draining=False, pools=(load,))


@dataclass
class Record:
    """A message as librdkafka hands it on."""

    on: str
    content: Any = None
    at_ms: int = NOW_MS
    kind: int = TIMESTAMP_LOG_APPEND_TIME
    carries: Any = None
    schema_id: int | None = None

    def topic(self) -> str:
        return self.on

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return 7

    def value(self) -> bytes | None:
        if self.content is None:
            return None
        value = default_codec().encode(self.content)
        return value if self.schema_id is None else b"\0" + self.schema_id.to_bytes(4, "big") + value[5:]

    def headers(self) -> Any:
        return self.carries

    def timestamp(self) -> tuple[int, int]:
        return self.kind, self.at_ms


def following() -> WorkRecords:
    """Of a feed that has caught up."""
    records = WorkRecords(default_codec(), "me")
    assert records.heard(NOW_MS) == []
    return records


def unreadable(topic: str) -> float:
    return REGISTRY.get_sample_value("fairlane_work_feed_unreadable_total", {"topic": topic}) or 0.0


def test_what_can_be_is_read() -> None:
    records = following()
    assert records.read(Record(names.CONTROL_CAPACITY, REPORT), NOW_MS) is None, "kept until it is asked for"
    assert records.heard(NOW_MS) == [AgedCapacityReport(REPORT, 0)]
    assert records.heard(NOW_MS) == []
    unmeasured = replace(REPORT, cost_tokens_per_s=0.0, prefill_tokens_per_s=0.0, decode_tokens_per_s=0.0)
    records.read(Record(names.CONTROL_CAPACITY, unmeasured), NOW_MS)
    assert records.heard(NOW_MS) == [AgedCapacityReport(unmeasured, 0)]
    assert records.read(Record(names.CONTROL_DISPATCH, heartbeat()), NOW_MS) == heartbeat()
    assert records.read(Record(names.LEDGER_USAGE, USAGE), NOW_MS) == USAGE
    assert records.read(Record("priority.llm.high", carries=WORK), NOW_MS) is not None


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan, -1.0, 1e300, 5e-324])
@pytest.mark.parametrize("field", ["cost_tokens_per_s", "prefill_tokens_per_s", "decode_tokens_per_s"])
def test_a_rate_that_cannot_be_is_passed_over(field: str, number: float) -> None:
    rate: dict[str, Any] = {field: number}
    is_passed_over(names.CONTROL_CAPACITY, replace(REPORT, **rate))


@pytest.mark.parametrize(
    "fields",
    [
        {"max_batch_size": -1},
        {"max_batch_tokens": -(10**9)},
        {"max_batch_tokens": 2**62},
        {"in_flight_items": -1},
        {"in_flight_tokens": -1},
        {"batch_fill": math.nan},
        {"partitions": (0, -1)},
        {"pool": "gpu a"},
    ],
    ids=str,
)
def test_a_size_or_a_name_that_cannot_be_is_passed_over(fields: dict[str, Any]) -> None:
    is_passed_over(names.CONTROL_CAPACITY, replace(REPORT, **fields))


@pytest.mark.parametrize("weight", [math.inf, math.nan, -1.0, 1e300])
def test_a_weight_that_cannot_be_is_passed_over(weight: float) -> None:
    is_passed_over(names.CONTROL_DISPATCH, heartbeat(weight))


@pytest.mark.parametrize(
    "fields", [{"prompt_tokens": -5}, {"completion_tokens": -1}, {"prompt_tokens": 2**62}], ids=str
)
def test_a_bill_that_cannot_be_is_passed_over(fields: dict[str, Any]) -> None:
    is_passed_over(names.LEDGER_USAGE, replace(USAGE, **fields))


def test_the_place_of_usage_that_cannot_be_read_is_passed_on_in_order() -> None:
    """Without it a dispatcher would take what it has read for all that was spent."""
    records = following()
    records.read(Record(names.LEDGER_USAGE, USAGE), NOW_MS)
    records.read(Record(names.LEDGER_USAGE, replace(USAGE, prompt_tokens=-1)), NOW_MS)
    records.read(Record(names.LEDGER_USAGE), NOW_MS)
    for topic in (names.LEDGER_USAGE, names.CONTROL_CAPACITY):
        records.passed_over(SkippedRange(topic, 1, 10, 20, BAD_CHECKSUM, "reason"))
    places = ReadUsage(0, 7, USAGE), ReadUsage(0, 7, None), ReadUsage(0, 7, None), ReadUsage(1, 19, None)
    assert records.usage_read() == UsageRead(places)


@pytest.mark.parametrize("cost", [b"-1", b"9" * 400])
def test_work_at_a_cost_that_cannot_be_is_passed_over(cost: bytes) -> None:
    is_passed_over("priority.llm.high", carries=[(headers.COST_TOKENS, cost), *WORK[1:]])


def test_an_unknown_schema_ends_no_feed_while_the_registry_is_away() -> None:
    """It is asked again after a while, and not for every heartbeat."""
    registry = AwayRegistry()
    records = WorkRecords(Codec(registry), "me")
    records.heard(NOW_MS)
    of_a_newer = Record(names.CONTROL_CAPACITY, REPORT, schema_id=900)
    before = unreadable(names.CONTROL_CAPACITY)
    for at_ms in (0, 250, 29_000):
        assert records.read(of_a_newer, NOW_MS + at_ms) is None
    assert (registry.asked, unreadable(names.CONTROL_CAPACITY)) == (1, before + 3)
    assert records.read(Record(names.CONTROL_CAPACITY, REPORT), NOW_MS + 29_000) is None
    assert len(records.heard(NOW_MS + 29_000)) == 1
    registry.is_away = False
    assert records.read(of_a_newer, NOW_MS + 31_000) is None
    assert len(records.heard(NOW_MS + 31_000)) == 1
    assert registry.asked == 2


class AwayRegistry:
    """A registry that has one more id of capacity reports than the files."""

    def __init__(self) -> None:
        self.is_away, self.asked = True, 0

    def writer(self, record_name: str) -> tuple[int, Mapping[str, Any]]:
        return committed_schemas().writer(record_name)

    def reader(self, schema_id: int) -> tuple[str, Mapping[str, Any]]:
        if schema_id != 900:
            return committed_schemas().reader(schema_id)
        self.asked += 1
        if self.is_away:
            raise RegistryError("away")
        return "CapacityReport", committed_schemas().writer("CapacityReport")[1]

    def is_loaded(self, schema_id: int) -> bool:
        return schema_id != 900

    def refresh(self) -> None:
        raise AssertionError("a reader asks for what it meets")


def is_passed_over(topic: str, content: Any = None, carries: Any = None) -> None:
    records, before = following(), unreadable(topic)
    with capture_logs() as logs:
        assert records.read(Record(topic, content, carries=carries), NOW_MS) is None
    assert records.heard(NOW_MS) == []
    assert unreadable(topic) == before + 1
    (entry,) = logs
    assert (entry["event"], entry["topic"], entry["offset"]) == ("work_feed_unreadable", topic, 7)


def board_after(records: WorkRecords, now_ms: int) -> Callable[[str], CapacityState]:
    board = CapacityBoard()
    for heard in records.heard(now_ms):
        board.report(heard.report, now_ms - heard.age_ms)
    return lambda pool: board.pool(pool, now_ms).state


def test_a_feed_that_lags_takes_no_old_report_for_a_fresh_one() -> None:
    """It was paused for a minute, and one of two pools has died ten seconds after that began."""
    records = following()
    for second in range(60):
        at_ms = NOW_MS + 1_000 * second
        if second <= 10:
            records.read(Record(names.CONTROL_CAPACITY, replace(REPORT, pool="dead"), at_ms), NOW_MS + 60_000)
        records.read(Record(names.CONTROL_CAPACITY, replace(REPORT, pool="lives"), at_ms), NOW_MS + 60_000)
    state = board_after(records, NOW_MS + 60_000)
    assert (state("dead"), state("lives")) == (CapacityState.LOST, CapacityState.LIVE)


def test_a_feed_that_has_read_a_part_of_its_lag_knows_that_it_lags() -> None:
    """Our own heartbeats tell what the broker's clock shows by now, whatever ours does."""
    for ahead_ms in (0, 31_000, -31_000):
        records, own = following(), heartbeat(instance_id="me", reported_at_ms=NOW_MS + ahead_ms)
        assert records.read(Record(names.CONTROL_DISPATCH, own, NOW_MS + 2), NOW_MS + ahead_ms + 30) == own
        at_ms = NOW_MS + 60_000
        records.read(Record(names.CONTROL_CAPACITY, replace(REPORT, pool="dead"), NOW_MS + 10_000), at_ms + ahead_ms)
        records.read(Record(names.CONTROL_CAPACITY, replace(REPORT, pool="lives"), at_ms - 100), at_ms + ahead_ms)
        state = board_after(records, at_ms + ahead_ms)
        assert (state("dead"), state("lives")) == (CapacityState.LOST, CapacityState.LIVE)


def test_the_clock_of_a_consumer_is_not_trusted() -> None:
    records = following()
    records.read(Record(names.CONTROL_CAPACITY, REPORT, 5, TIMESTAMP_CREATE_TIME), NOW_MS)
    assert records.heard(NOW_MS) == [AgedCapacityReport(REPORT, 0)]


def test_a_clock_that_is_off_is_shown_and_said_once() -> None:
    records = following()

    def own(ahead_ms: int, at_ms: int, kind: int = TIMESTAMP_LOG_APPEND_TIME) -> None:
        made = heartbeat(instance_id="me", reported_at_ms=at_ms + ahead_ms)
        records.read(Record(names.CONTROL_DISPATCH, made, at_ms, kind), at_ms + ahead_ms + 20)
        records.show_skew()

    def gauge() -> float | None:
        return REGISTRY.get_sample_value("fairlane_clock_skew_seconds")

    with capture_logs() as logs:
        own(31_000, NOW_MS, TIMESTAMP_CREATE_TIME)
        assert logs == [], "no broker stamped it"
        for ahead_ms in (900, 1_100, 900, 600, 1_100):
            own(ahead_ms, NOW_MS)
        assert gauge() == 1.1
        own(400, NOW_MS)
        own(-31_020, NOW_MS)
        assert gauge() == -31.0
    said = [(entry["event"], entry["log_level"], entry["ahead_of_broker_s"]) for entry in logs]
    assert said == [
        ("clock_skewed", "warning", 1.1),
        ("clock_right_again", "info", 0.4),
        ("clock_skewed", "warning", -31.0),
    ]


def test_somebody_elses_heartbeat_says_nothing_about_our_clock() -> None:
    records = following()
    with capture_logs() as logs:
        records.read(Record(names.CONTROL_DISPATCH, heartbeat(reported_at_ms=5)), NOW_MS)
        records.show_skew()
    assert logs == []

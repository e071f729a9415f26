"""The recorder and damaged batches of replies: what stands around them is in Postgres, and its position goes on."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.local.ports import PortClaims
from deploy.local.services import Service
from fairlane.names import replies_topic
from fairlane.records import TenantSpec
from fairlane.schema_files import default_codec
from tests.kit.broker_log import PartitionLog
from tests.kit.damage import DAMAGES, Damage, KeyAndValue, write_batch
from tests.kit.processes import ServiceProcess
from tests.kit.recorder_kit import Tables, delete_reply_topics, make_topics, reply_to
from tests.kit.stack import PostgresServer
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.broker]

PER_BATCH = 3


@pytest.fixture
def tenant(broker: str, unique: str) -> Iterator[str]:
    make_topics(broker, TenantSpec(unique))
    yield unique
    delete_reply_topics(broker, unique)


@pytest.fixture
def recorder(broker: str, migrated: PostgresServer, unique: str, tmp_path: Path) -> Iterator[ServiceProcess]:
    """Not started; killed at the end."""
    shared = {
        "KAFKA_BOOTSTRAP_SERVERS": broker,
        "POSTGRES_DSN": migrated.recorder_dsn,
        "GROUP_PREFIX": unique,
        "LOG_FORMAT": "json",
    }
    claims = PortClaims()
    service = Service("recorder", ("-m", "stream_processors.recorder"), {})
    process = ServiceProcess(service, shared, claims.take("recorder"), tmp_path / "recorder.log")
    yield process
    process.kill()
    claims.close()


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_what_stands_around_it_is_recorded(
    broker: str, broker_log_dir: Path, migrated: PostgresServer, tenant: str, recorder: ServiceProcess, damage: Damage
) -> None:
    topic, tables = replies_topic(tenant), Tables(migrated)

    def batch(number: int) -> list[KeyAndValue]:
        numbers = range(number * PER_BATCH, (number + 1) * PER_BATCH)
        return [(b"%d" % one, default_codec().encode(reply_to(tenant, one))) for one in numbers]

    for number in range(3):
        write_batch(broker, topic, batch(number))
    log = PartitionLog.of(broker_log_dir, topic)
    damage.apply(log, log.at(PER_BATCH), batch(1))
    expected = [*range(PER_BATCH), *range(PER_BATCH, 2 * PER_BATCH)[damage.survivors], *range(6, 9)]

    recorder.start().wait_ready()
    eventually(lambda: tables.count(tenant) == len(expected), what="the rows")
    tables.assert_exactly(tenant, expected)
    problem = damage.problem or "none"
    passed = PER_BATCH if damage.problem else 0
    assert recorder.metric("fairlane_recorder_skipped_total", topic=topic, problem=problem) == passed
    # It reads the replies of other tests on this broker too.
    every = [entry for entry in recorder.events("unreadable_batch_passed") if entry["problem"] == problem]
    counted = recorder.metric("fairlane_unreadable_records_total", reader="recorder", problem=problem)
    assert counted == sum(entry["last_offset"] + 1 - entry["first_offset"] for entry in every)
    assert passed_ranges(recorder, topic) == ([(PER_BATCH, 2 * PER_BATCH - 1)] if damage.problem else [])

    assert recorder.stop() == 0
    recorder.start().wait_ready()
    write_batch(broker, topic, batch(3))
    eventually(lambda: tables.count(tenant) == len(expected) + PER_BATCH, what="the rows of what came later")
    assert passed_ranges(recorder, topic) == [], "its position is behind the batch"


def passed_ranges(recorder: ServiceProcess, topic: str) -> list[tuple[int, int]]:
    """The first and the last offset of what was passed of this topic since the start."""
    events = recorder.events("unreadable_batch_passed")
    return [(entry["first_offset"], entry["last_offset"]) for entry in events if entry["topic"] == topic]

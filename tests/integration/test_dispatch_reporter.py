"""The heartbeat of a dispatcher on the real broker: often enough, at once when it matters, and a last one."""

import asyncio
from collections.abc import Iterator
from time import monotonic

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, NewTopic
from prometheus_client import REGISTRY

from fairlane import names
from fairlane.kafka_config import connection
from fairlane.records import ClassLoad, DispatchReport, PoolLoad, TenantLoad
from fairlane.schema_files import default_codec
from fairlane.settings import Settings
from stream_processors.dispatcher.output.heartbeat_publisher import HeartbeatPublisher
from tests.kit.log_reader import LogReader
from tests.kit.waiting import eventually_async

pytestmark = pytest.mark.alone

CODEC = default_codec()
POOL = "shared"
TENANT = TenantLoad("acme", POOL, 1, 10, 0, 0, 1.0, 0.0)


class Dispatcher:
    """Something to report about."""

    def __init__(self, instance_id: str) -> None:
        self.instance_id = instance_id
        self.weight = 0.0
        self.collected = 0

    def collect(self, with_tenants: bool) -> DispatchReport:
        self.collected += 1
        load = PoolLoad(POOL, 1_000, 1.0, 0, (ClassLoad("high", self.weight, 1, 10),))
        return DispatchReport(self.instance_id, 1, self.collected, False, (load,), (TENANT,) if with_tenants else ())


class Reports:
    """What the others get to read of it."""

    def __init__(self, settings: Settings) -> None:
        self._instance_id = settings.instance_id
        self._reader = LogReader(settings, [names.CONTROL_DISPATCH], from_beginning=False)

    def so_far(self) -> list[DispatchReport]:
        self._reader.poll(0.02)
        found = (CODEC.decode_as(DispatchReport, record.value()) for record in self._reader.records)
        return [report for report in found if report.instance_id == self._instance_id]

    def close(self) -> None:
        self._reader.close()


async def pace_s(steps: int, step_s: float) -> float:
    """How long so many steps of this length take here: as long as they say, on a machine that does nothing else."""
    started = monotonic()
    for _ in range(steps):
        await asyncio.sleep(step_s)
    return monotonic() - started


@pytest.fixture
def settings(broker: str, unique: str) -> Settings:
    made = Settings(kafka_bootstrap_servers=broker, instance_id=unique)
    admin = AdminClient(connection(made))
    created = admin.create_topics([NewTopic(names.CONTROL_DISPATCH, 1, 1)])
    error = created[names.CONTROL_DISPATCH].exception(10)
    # The other tests of this broker may have made it already.
    assert not isinstance(error, KafkaException) or error.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS, error
    return made


@pytest.fixture
def reports(settings: Settings) -> Iterator[Reports]:
    made = Reports(settings)
    yield made
    made.close()


@pytest.mark.broker
def test_it_reports_five_times_a_second_tenants_once_and_a_last_time(settings: Settings, reports: Reports) -> None:
    async def run() -> None:
        dispatcher = Dispatcher(settings.instance_id)
        reporter = HeartbeatPublisher(settings, CODEC, dispatcher.collect)
        started = monotonic()
        task = asyncio.create_task(reporter.run())
        paced = asyncio.create_task(pace_s(10, 0.2))
        await eventually_async(lambda: dispatcher.collected >= 11, what="eleven reports")
        took_s = monotonic() - started
        await reporter.stop()
        await task
        assert 1.9 <= took_s <= 1.5 * await paced
        await eventually_async(lambda: any(report.draining for report in reports.so_far()), what="the last report")
        found = reports.so_far()
        assert found[-1].draining
        assert [report.reported_at_ms for report in found] == list(range(1, len(found) + 1)), "in order, all of them"
        with_tenants = [report for report in found[:-1] if report.tenants]
        assert 2 <= len(with_tenants) <= took_s + 1
        await reporter.stop()

    asyncio.run(run())


@pytest.mark.broker
def test_a_new_backlog_is_told_at_once_and_a_flood_of_them_is_not_a_flood_of_reports(
    settings: Settings, reports: Reports
) -> None:
    async def run() -> None:
        dispatcher = Dispatcher(settings.instance_id)
        reporter = HeartbeatPublisher(settings, CODEC, dispatcher.collect)
        task = asyncio.create_task(reporter.run())
        await eventually_async(reports.so_far, what="the first report")
        delays_s = []
        for _ in range(5):
            dispatcher.weight = 0.0
            before = dispatcher.collected
            await eventually_async(lambda: dispatcher.collected > before)  # noqa: B023 - waited for in this round
            await asyncio.sleep(0.03)  # beyond the shortest time between two
            before, at = dispatcher.collected, monotonic()
            dispatcher.weight = 1.0
            reporter.arrived(POOL, "high")
            while dispatcher.collected == before:
                await asyncio.sleep(0.001)
            delays_s.append(monotonic() - at)
        assert sorted(delays_s)[2] < 0.1, f"the next regular one would come some 0.17 s later: {delays_s}"

        async def reports_of_a_flood(pool: str) -> tuple[int, float]:
            """How many were made while it lasted, and how long that was."""
            before, at = dispatcher.collected, monotonic()
            while monotonic() < at + 0.4:
                reporter.arrived(pool, "high")
                await asyncio.sleep(0.001)
            return dispatcher.collected - before, monotonic() - at

        made, lasted_s = await reports_of_a_flood(POOL)
        assert made <= lasted_s / 0.2 + 1, "what waits there is known"
        dispatcher.weight = 0.0
        made, lasted_s = await reports_of_a_flood("another")
        assert lasted_s / 0.2 + 1 < made <= lasted_s / 0.02 + 1
        await reporter.stop()
        await task

    asyncio.run(run())


def test_without_a_broker_the_loop_goes_on_and_stopping_takes_seconds_at_most() -> None:
    settings = Settings(kafka_bootstrap_servers="127.0.0.1:1", instance_id="alone")

    def lost() -> float:
        found = REGISTRY.get_sample_value("fairlane_dispatch_reports_lost_total", {"reason": "_MSG_TIMED_OUT"})
        return found or 0.0

    async def run() -> None:
        reporter = HeartbeatPublisher(settings, CODEC, Dispatcher("alone").collect)
        task = asyncio.create_task(reporter.run())
        late, last = 0, monotonic()
        before = lost()
        while lost() == before:
            assert not task.done()
            await asyncio.sleep(0.005)
            late, last = late + (monotonic() - last > 0.2), monotonic()
        assert late <= 2, "some 25 reports were handed over meanwhile, and none is waited for"
        started = monotonic()
        await reporter.stop()
        await task
        assert monotonic() - started < 15

    asyncio.run(run())


def test_a_full_queue_drops_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairlane.kafka_config.MAX_HEARTBEATS_QUEUED", 2)
    monkeypatch.setattr("stream_processors.dispatcher.output.heartbeat_publisher._EVERY_S", 0.03)
    settings = Settings(kafka_bootstrap_servers="127.0.0.1:1", instance_id="alone")

    def dropped() -> float:
        return REGISTRY.get_sample_value("fairlane_dispatch_reports_lost_total", {"reason": "_QUEUE_FULL"}) or 0.0

    async def run() -> None:
        before = dropped()
        reporter = HeartbeatPublisher(settings, CODEC, Dispatcher("alone").collect)
        task = asyncio.create_task(reporter.run())
        await eventually_async(lambda: dropped() > before, what="a dropped report")
        await reporter.stop()
        await task

    asyncio.run(run())

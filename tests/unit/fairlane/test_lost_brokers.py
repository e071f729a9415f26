"""A client without brokers raises from its poll, on statistics as librdkafka writes them."""

import json

import pytest
from confluent_kafka import Consumer

from fairlane.cluster import BrokersWatch, LostBrokersError, with_broker_check
from tests.kit.waiting import eventually

NOBODY = {"bootstrap.servers": "127.0.0.1:1", "group.id": "nobody", "log_level": 0, "statistics.interval.ms": 20}


def statistics(**sources: str) -> str:
    """As librdkafka writes them, without a space."""
    brokers = {name: {"name": name, "nodeid": -1, "source": source} for name, source in sources.items()}
    return json.dumps({"name": "rdkafka#consumer-1", "brokers": brokers, "topics": {}}, separators=(",", ":"))


ALIVE, LOST = statistics(GroupCoordinator="logical", one="learned"), statistics(GroupCoordinator="logical")


def test_one_report_without_brokers_may_be_a_bootstrap_and_two_are_final() -> None:
    watch = BrokersWatch()
    for report in (ALIVE, LOST, ALIVE, LOST):
        watch(report)
    with pytest.raises(LostBrokersError) as raised:
        watch(LOST)
    assert raised.value.args[0].fatal()


def test_a_server_that_was_configured_counts() -> None:
    watch = BrokersWatch()
    for _ in range(3):
        watch(statistics(GroupCoordinator="logical", given="configured"))


def test_statistics_of_the_library_name_the_source_of_a_broker_that_does_not_answer() -> None:
    watch, seen = BrokersWatch(), list[str]()

    def take(report: str) -> None:
        watch(report)
        seen.append(report)

    consumer = Consumer(NOBODY | {"stats_cb": take})
    try:
        eventually(lambda: consumer.poll(0.02) or len(seen) > 3, what="statistics")
    finally:
        consumer.close()
    assert '"source":"configured"' in seen[-1]


def test_what_the_watch_raises_comes_out_of_poll() -> None:
    watch, reports = BrokersWatch(), iter((LOST, LOST))

    def report(_statistics: str) -> None:
        # Closing the consumer reports once more, and must not raise.
        if (lost := next(reports, None)) is not None:
            watch(lost)

    consumer = Consumer(with_broker_check(NOBODY) | {"statistics.interval.ms": 20, "stats_cb": report})
    try:
        with pytest.raises(LostBrokersError):
            eventually(lambda: consumer.poll(0.02) is not None, 20, "an exception")
    finally:
        consumer.close()

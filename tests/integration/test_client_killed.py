"""A tenant's service on a real broker: what it is given when the one before it died, and what is no reply."""

import os
import signal
import subprocess
import sys
from contextlib import closing

import pytest
from confluent_kafka import Producer
from prometheus_client import REGISTRY

import fairlane
from deploy.local.layout import PROJECT_ROOT
from fairlane.kafka_config import idempotent_producer
from fairlane.names import dead_letter_replies_topic, replies_topic
from fairlane.schema_files import default_codec
from fairlane.settings import KafkaSettings
from tests.kit.log_reader import LogReader
from tests.kit.other_side import create_topics

pytestmark = [pytest.mark.full, pytest.mark.broker]

WAIT_S = 180
BROKEN = b"no reply at all"
DIES = """
import os, signal, sys
import fairlane
from fairlane.client.group_member import GroupMember

handled = []
send_commit = GroupMember._send_commit

def dies_before_what_is_handled_is_committed(member):
    if handled:
        os.kill(os.getpid(), signal.SIGKILL)
    send_commit(member)

GroupMember._send_commit = dies_before_what_is_handled_is_committed

def handle(reply):
    print(reply.request_id, flush=True)
    handled.append(reply)

fairlane.replies("billing", handle, tenant=sys.argv[1]).run()
"""


@pytest.fixture
def tenant(broker: str, unique: str) -> str:
    """A tenant whose services may read its replies and keep dead letters."""
    create_topics(broker, replies_topic(unique), dead_letter_replies_topic(unique))
    return unique


def settings(servers: str) -> KafkaSettings:
    return KafkaSettings(kafka_bootstrap_servers=servers)


def write(servers: str, tenant: str, *records: str | bytes) -> None:
    """A reply with this id, or these bytes as they are."""
    producer = Producer(idempotent_producer(settings(servers)))
    for record in records:
        value = record
        if isinstance(record, str):
            value = default_codec().encode(fairlane.InferenceReply(record, tenant, "ok"))
        producer.produce(replies_topic(tenant), value, record)
    assert producer.flush(WAIT_S) == 0


def sample(name: str, tenant: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, {"topic": replies_topic(tenant), **labels}) or 0.0


def test_what_a_killed_service_handled_and_did_not_commit_is_given_to_the_next(broker: str, tenant: str) -> None:
    ids = ["1", "2", "3", "4"]
    write(broker, tenant, *ids)
    died = subprocess.run(
        [sys.executable, "-c", DIES, tenant],
        cwd=PROJECT_ROOT,
        env=os.environ | {"KAFKA_BOOTSTRAP_SERVERS": broker},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    handled = died.stdout.split()
    assert handled
    assert handled == ids[: len(handled)]

    seen: list[str] = []

    def handle(reply: fairlane.InferenceReply) -> None:
        seen.append(reply.request_id)
        if seen[-1] == ids[-1]:
            service.stop()

    service = fairlane.replies(
        "billing", handle, tenant=tenant, bootstrap_servers=broker, idle_timeout_ms=WAIT_S * 1_000
    )
    service.run()
    assert seen == ids, "all again, each once, in their order"
    assert sample("fairlane_replies_served_total", tenant, result="handled") == len(ids)
    assert sample("fairlane_reply_handler_seconds_count", tenant) == len(ids)


def test_what_is_no_reply_is_kept_on_the_topic_or_by_the_callback(broker: str, tenant: str) -> None:
    write(broker, tenant, "1", BROKEN, "2")
    seen: list[str] = []

    def handle(reply: fairlane.InferenceReply) -> None:
        seen.append(reply.request_id)
        if reply.request_id == "2":
            service.stop()

    options = {"tenant": tenant, "bootstrap_servers": broker, "idle_timeout_ms": WAIT_S * 1_000}
    service = fairlane.replies("to-the-topic", handle, **options)  # type: ignore[arg-type]  # strings and a number
    service.run()
    letters: list[fairlane.DeadLetter] = []
    service = fairlane.replies("to-me", handle, **options, on_dead_letter=letters.append)  # type: ignore[arg-type]
    service.run()

    assert seen == ["1", "2"] * 2
    assert sample("fairlane_replies_served_total", tenant, result="dead_letter") == 2
    (letter,) = letters
    assert (letter.reply, letter.record.value, letter.record.offset) == (None, BROKEN, 1)
    with closing(LogReader(settings(broker), [dead_letter_replies_topic(tenant)])) as kept:
        kept.read_to_end()
        assert [(record.key(), record.value()) for record in kept.records] == [(BROKEN, BROKEN)]

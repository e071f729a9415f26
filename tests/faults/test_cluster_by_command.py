"""Three Kafka brokers as a person starts and ends them, and starts them again where somebody took their ports."""

import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from deploy.local.kafka import ADMIN_USER
from deploy.local.layout import PROJECT_ROOT, DataDir, Endpoints
from deploy.local.status import read_status
from fairlane.kafka_config import connection, idempotent_producer
from fairlane.settings import KafkaSettings
from tests.kit.duties import BROKERS, badly_kept
from tests.kit.log_reader import LogReader
from tests.kit.stack import PostgresServer
from tests.kit.up_command import running

pytestmark = [pytest.mark.broker, pytest.mark.long]


def test_a_cluster_keeps_its_records_wherever_its_nodes_listen(
    database: PostgresServer, redis_url: str, unique: str, tmp_path: Path
) -> None:
    external = {
        **database.environ,
        "REDIS_URL": redis_url,
        "REDIS_CACHE_URL": redis_url,
    }
    options = ("--brokers", str(len(BROKERS)))
    with running(tmp_path, external, *options) as process:
        first = servers(tmp_path)
        admin = AdminClient(connection(first))
        admin.create_topics([NewTopic(unique, 3)])[unique].result(20)
        assert badly_kept(admin) == set()
        producer = Producer(idempotent_producer(first))
        for number in range(30):
            producer.produce(unique, str(number), partition=number % 3)
        assert producer.flush(20) == 0
        assert command("down", "--data-dir", str(tmp_path)).returncode == 0
        assert process.wait(60) == 0
        assert "did not stop" not in (process.stderr.read() if process.stderr is not None else "")
    DataDir(tmp_path).ports_file.unlink()
    with running(tmp_path, external, *options):
        second = servers(tmp_path)
        assert not set(first.kafka_bootstrap_servers.split(",")) & set(second.kafka_bootstrap_servers.split(","))
        reader = LogReader(second, [unique])
        reader.wait(lambda: len(reader.records) >= 30)
        reader.close()
        assert sorted(int(record.value() or b"") for record in reader.records) == list(range(30))
        assert command("status", "--data-dir", str(tmp_path)).returncode == 0
        assert {part.name for part in read_status(DataDir(tmp_path)).parts if part.state == "ready"} == {
            *BROKERS.values()
        }
    refused = command("up", "--bare", "--data-dir", str(tmp_path))
    assert refused.returncode == 1
    assert refused.stderr == (
        f"fairlane: {tmp_path}/kafka holds the data of 3 Kafka broker(s), not of 1: choose another folder\n"
    )


def servers(data_dir: Path) -> KafkaSettings:
    """To reach the brokers of the stack in this folder, as who may do everything."""
    endpoints = Endpoints.load(DataDir(data_dir).endpoints_file)
    assert endpoints is not None
    return endpoints.kafka_settings(ADMIN_USER)


def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """One of the stack's other commands."""
    return subprocess.run(
        (sys.executable, "-m", "deploy.local", *arguments),
        cwd=PROJECT_ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
